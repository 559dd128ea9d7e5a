"""Python programs as processes of their own that need not import what they run.

A worker or a sidecar imports for half a second of processor time before it does
anything. Here a server with one thread imports that once for all tests of a process,
and each program is a fork of it, with its own id, streams and environment; signals
reach it alone, and the kernel reports its death. Without pidfds (macOS) the
interpreter starts as usual. Tests of a start run the command.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, TextIO

from fork_program import LENGTH_BYTES

from kafka_marshal.system_calls import open_pidfd

PROGRAM = Path(__file__).with_name("fork_program.py")
END_S = 60
CAN_FORK = sys.platform.startswith("linux")


class Forked:
    """A program that runs, with the part of `subprocess.Popen` that tests use.

    Attributes:
        pid: Its process id; not used again before its end was noticed here.
        returncode: As of `subprocess.Popen`; None until its end was noticed.
        stdin: Its standard input, as text, where that is a pipe.
        stdout: Its standard output, likewise.
    """

    def __init__(self, server: "Server", pid: int) -> None:
        self._server = server
        self.pid = pid
        self.stdin: TextIO | None = None
        self.stdout: TextIO | None = None
        self.returncode: int | None = None
        self._death = open_pidfd(pid)
        weakref.finalize(self, os.close, self._death)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        with self._lock:  # a status is given once
            if self.returncode is None:
                self.returncode = self._server.ask({"pid": self.pid})
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it has ended.

        Raises:
            subprocess.TimeoutExpired: It still runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            ends = select.poll()
            ends.register(self._death, select.POLLIN)
            if not ends.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        while (status := self.poll()) is None:
            pass  # it has ended; its status follows at once
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Close both pipes once it has ended; return the rest of a short output.

        Raises:
            subprocess.TimeoutExpired: It still runs after ``timeout`` seconds.
        """
        assert self.stdin is not None
        assert self.stdout is not None
        self.stdin.close()
        self.wait(timeout)
        if self.stdout.closed:
            return "", None
        with self.stdout:
            return self.stdout.read(), None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks. Its methods may be called by any thread.

    Attributes:
        pid: Its process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
        self.pid = self._process.pid
        atexit.register(self.close)

    def ask(self, request: dict, streams: Sequence[int] = ()) -> int | None:
        """Send one request; return the answer."""
        body = json.dumps(request).encode()
        with self._lock:
            socket.send_fds(
                self._socket, [len(body).to_bytes(LENGTH_BYTES)], list(streams)
            )
            self._socket.sendall(body)
            head = self._socket.recv(LENGTH_BYTES, socket.MSG_WAITALL)
            assert head, "the server of forks has ended: its output says why"
            found = self._socket.recv(int.from_bytes(head), socket.MSG_WAITALL)
        answer: int | None = json.loads(found)
        return answer

    def close(self) -> None:
        """End the server; programs that still run stay."""
        self._socket.close()
        self._process.wait(END_S)


@cache
def server() -> Server:
    """Return the server of this process, started when it is first asked for."""
    return Server()


def start(
    arguments: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    stdout: IO | None = None,
    stderr: IO | None = None,
) -> "Forked | subprocess.Popen":
    """Start a Python script, with nothing on its standard input.

    Args:
        arguments: The script's file, and its arguments.
        env: Variables beside those of this process.
        stdout: Where its output goes; None for where that of this process goes.
        stderr: Where its errors go, likewise.
    """
    whole = {**os.environ, **(env or {})}
    if not CAN_FORK:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
    with Path(os.devnull).open("rb") as nothing:
        return _fork(arguments, whole, (nothing, stdout or 1, stderr or 2))


def start_piped(
    arguments: Sequence[str | os.PathLike[str]],
) -> "Forked | subprocess.Popen":
    """Start a Python script with pipes, of text, at its standard input and output."""
    if not CAN_FORK:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([sys.executable, *arguments], text=True, **pipes)
    (its_input, ours), (output, its_output) = os.pipe(), os.pipe()
    try:
        found = _fork(arguments, dict(os.environ), (its_input, its_output, 2))
    finally:
        os.close(its_input)
        os.close(its_output)
    found.stdin, found.stdout = os.fdopen(ours, "w"), os.fdopen(output)
    return found


def _fork(
    arguments: Sequence[str | os.PathLike[str]],
    env: dict[str, str],
    streams: Sequence[IO | int],
) -> Forked:
    line = [os.fspath(each) for each in arguments]
    handles = [each if isinstance(each, int) else each.fileno() for each in streams]
    pid = server().ask({"arguments": line, "env": env}, handles)
    assert pid is not None
    return Forked(server(), pid)
