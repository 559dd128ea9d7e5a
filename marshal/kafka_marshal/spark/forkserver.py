"""The server behind ``marshal-spark-python``: forks planners of Spark queries.

A process with one thread, which has imported all that a planner needs, as PySpark's
daemon does for tasks. It opens no connection to Kafka and holds no claim.
"""

import gc
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from kafka_marshal.spark import launcher

# Modules that a planner imports, at its start or later; missing ones are skipped.
PRELOADED = (
    launcher.PLANNER,
    "kafka_marshal.backend",
    "kafka_marshal.engine.session",
    "kafka_marshal.grants",
    "kafka_marshal.kafka_io.fast.coordination",
    "kafka_marshal.kafka_io.fast.switching",
    "kafka_marshal.remote.backend",
    "kafka_marshal.spark.query",
    "kafka_marshal.spark.source",
)
IDLE_S = 600.0
LOOK_S = 1.0
REQUEST_S = 10.0
_STREAMS = (0, 1, 2)


def main() -> None:
    """Serve at an inherited socket; in a fork, run the requested module."""
    handle, driver = map(int, sys.argv[1:3])
    with socket.socket(fileno=handle) as listener:
        for name in PRELOADED:
            with suppress(ImportError):
                import_module(name)
        # Objects of the parent are never garbage in a fork.
        gc.collect()
        gc.freeze()
        connection = serve(listener, lambda: is_alive(driver))
    if connection is not None:
        run(connection)


def serve(
    listener: socket.socket,
    is_needed: Callable[[], bool],
    *,
    idle_s: float = IDLE_S,
) -> socket.socket | None:
    """Fork a process for each connection, until the server is not needed.

    First redirects the standard streams of this process to ``/dev/null``, because
    nobody reads what it writes.

    Args:
        listener: Socket of the server.
        is_needed: Called every ``LOOK_S``; the server ends once it returns False.
        idle_s: End after this time without a connection, in seconds.

    Returns:
        The connection, in a fork; None in the server, when it ends.
    """
    _replace_streams(os.open(os.devnull, os.O_RDWR))
    listener.settimeout(LOOK_S)
    until = time.monotonic() + idle_s
    while is_needed() and time.monotonic() < until:
        _reap()
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if not os.fork():
            return connection
        connection.close()
        until = time.monotonic() + idle_s
    _remove(listener)
    _reap()
    return None


def run(connection: socket.socket) -> None:
    """Take over environment and streams of a launcher, and run its module.

    Raises:
        OSError: The launcher has ended.
    """
    connection.settimeout(REQUEST_S)
    head, streams, *_ = socket.recv_fds(
        connection, launcher.LENGTH_BYTES, len(_STREAMS)
    )
    count = int.from_bytes(head)
    body = _received(connection, count)
    if len(streams) != len(_STREAMS) or len(body) < count or not count:
        raise ConnectionResetError("the launcher ended before it sent its request")
    module, *lines = body.split(b"\0")
    _replace_streams(*streams)
    os.environ.clear()
    for line in lines:
        variable, _, value = line.partition(b"=")
        os.environb[variable] = value
    # From here on the launcher runs nothing itself: it waits until this process ends,
    # which closes the connection.
    connection.sendall(os.getpid().to_bytes(launcher.PID_BYTES))
    name = os.fsdecode(module)
    sys.argv = [name]
    # Execute the module as new: the server has imported it, but that state is not used.
    sys.modules.pop(name, None)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _received(connection: socket.socket, count: int) -> bytes:
    """Return this many bytes, fewer if the other side ends before."""
    found = bytearray()
    # A socket with a timeout ignores MSG_WAITALL, and a large environment takes several
    # calls.
    while len(found) < count and (more := connection.recv(count - len(found))):
        found += more
    return bytes(found)


def is_alive(pid: int) -> bool:
    """Return whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _replace_streams(*handles: int) -> None:
    """Replace the standard streams by one file for all three, or by one for each."""
    for number in _STREAMS:
        os.dup2(handles[number % len(handles)], number)
    for handle in set(handles) - set(_STREAMS):
        os.close(handle)


def _reap() -> None:
    """Reap forks that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _remove(listener: socket.socket) -> None:
    """Remove the server's socket, so that the next launcher starts another server."""
    path = listener.getsockname()
    # With the lock, and before the listener closes, this path is still this server's.
    with launcher.locked(path), suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - as the launcher names it
