"""Runs one child process and ends it when the process that started this one ends.

Executed as a script, never imported: ``python -I supervisor.py PARENT_PID COMMAND``.
A broker must not outlive the test that started it, even if the test ends by SIGKILL.
The parent-death signal of the kernel is bound to the *thread* that forked, so this is a
separate process with a single thread: the kernel ends the child when this process dies,
and this process watches its parent.

It prints the child's process id on one line, then nothing more; it exits with
the child's status when the child ends.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_LOOK_INTERVAL_S = 0.1


def _die_with_supervisor() -> None:
    """Ask Linux to kill this process when its parent ends (in the child)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run the command until it or the parent of this process ends."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    on_linux = sys.platform.startswith("linux")
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # stdout is the pipe for the process id; stderr is the log file.
        stdout=sys.stderr.fileno(),
        # One thread, no locks held: the fork is safe to run Python in.
        preexec_fn=_die_with_supervisor if on_linux else None,  # noqa: PLW1509
    )
    # Not print(), which buffers: the line must be in the pipe first.
    os.write(sys.stdout.fileno(), f"{child.pid}\n".encode())
    while child.poll() is None:
        if os.getppid() != parent:
            child.kill()
        time.sleep(_LOOK_INTERVAL_S)
    status: int = abs(child.returncode)
    return status


if __name__ == "__main__":
    sys.exit(main())
