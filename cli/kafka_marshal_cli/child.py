"""One process at work on records: started, fed, watched, ended.

It leads a session of its own, so that all it starts can be ended with it, and a
Ctrl-C on the terminal reaches us alone: we decide when it ends.
"""

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from kafka_marshal import ConfigurationError

# A pipe that nobody reads from yet takes so much without blocking, on any system.
PIPE_BYTES_MIN = 4096
# Where the system cannot tell of a child's end, it is looked for so often.
LOOK_EVERY_S = 0.01
# A zombie is reaped at once; this is no more than a deadline.
REAP_S = 10


class Child:
    """A running process that gets bytes on its stdin.

    Args:
        argv: Program and arguments.
        payload: What it reads.
        env: Its environment.

    Raises:
        ConfigurationError: It cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], payload: bytes, *, env: Mapping[str, str]
    ) -> None:
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, env=dict(env), start_new_session=True
            )
        except OSError as error:
            raise ConfigurationError(
                f"--exec: {argv[0]!r} cannot be started: {error}", setting="--exec"
            ) from error
        self.started_s = time.monotonic()
        self._told_to_end_s: float | None = None
        self._code: int | None = None
        self._fd = _end_of(self._process.pid)
        if len(payload) <= PIPE_BYTES_MIN:
            self._feed(payload)
        else:
            # A child that never reads must not hold us up.
            feeder = threading.Thread(target=self._feed, args=(payload,), daemon=True)
            feeder.start()

    def _feed(self, payload: bytes) -> None:
        # Whether it wants its input is the child's own business.
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            with self._process.stdin as pipe:
                pipe.write(payload)

    @property
    def is_told_to_end(self) -> bool:
        """Whether ``end`` was called."""
        return self._told_to_end_s is not None

    def exit_code(self) -> int | None:
        """Return how it ended, None while it runs; minus the signal that killed it.

        What it left running in the background ends with it.
        """
        if self._code is None and self._has_ended():
            self.kill()
            self._code = self._process.wait(timeout=REAP_S)
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
        return self._code

    def _has_ended(self) -> bool:
        waitid = getattr(os, "waitid", None)
        if waitid is None:
            return self._process.poll() is not None
        # Not reaped yet: as long as it is a zombie, its group is surely its own.
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return waitid(os.P_PID, self._process.pid, how) is not None

    def end(self, *, grace_ms: int) -> None:
        """Ask it to end; called again after the grace time, kill it."""
        now_s = time.monotonic()
        if self._told_to_end_s is None:
            self._told_to_end_s = now_s
            self._kill_group(signal.SIGTERM)
        elif (now_s - self._told_to_end_s) * 1000 >= grace_ms:
            self.kill()

    def kill(self) -> None:
        """Kill it and all that it started. Safe in a signal handler."""
        self._kill_group(signal.SIGKILL)

    def _kill_group(self, number: int) -> None:
        # macOS says EPERM of a group of which only a zombie is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._code is None:
                os.killpg(self._process.pid, number)

    @property
    def fd(self) -> int | None:
        """A descriptor that is readable once it has ended, where there is one."""
        return self._fd


def _end_of(pid: int) -> int | None:
    opened = getattr(os, "pidfd_open", None)
    if opened is None:
        return None
    try:
        fd: int = opened(pid)
    except OSError:
        return None
    return fd


def wait_any(children: Sequence[Child], timeout_ms: int) -> None:
    """Wait until one of these has ended, or for so long."""
    fds = [child.fd for child in children if child.fd is not None]
    if len(fds) == len(children):
        select.select(fds, [], [], timeout_ms / 1000)
        return
    deadline_s = time.monotonic() + timeout_ms / 1000
    while time.monotonic() < deadline_s:
        if any(child.exit_code() is not None for child in children):
            return
        time.sleep(LOOK_EVERY_S)
