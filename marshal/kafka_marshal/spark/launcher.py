"""The command ``marshal-spark-python``: a Python whose planners start at once.

On the driver, Spark starts a Python process for each streaming query, the *planner*.
Before it works, a planner imports PySpark, NumPy, PyArrow and this package, which takes
a second. If ``PYSPARK_PYTHON`` names this command, Spark runs it as the Python. For a
planner it asks a server, which has imported these packages, to fork one. The first
query of a driver starts the server, which ends with the driver, or when idle. All other
programs, such as the daemon of PySpark's workers, run in this environment's Python as
if that were called directly.

If the server cannot be used, the planner runs in this Python, too. To start fast, this
module imports only a little of the standard library, like the probe of a sidecar.
"""

import array
import fcntl
import os
import signal
import socket
import sys
from contextlib import suppress
from hashlib import sha256

PLANNER = "pyspark.sql.streaming.python_streaming_source_runner"
SERVER = "from kafka_marshal.spark.forkserver import main; main()"
# Longest wait for the server; Spark itself waits for 10 s.
START_S = 30.0
# When Spark sends SIGTERM it also closes its connection, which ends a planner in order.
# If the signal were passed on at once, it would interrupt that.
TERMINATE_AFTER_S = 1.0
PID_BYTES = 4
LENGTH_BYTES = 4
BACKLOG = 16
# With these, NumPy and PyArrow start no threads when they are imported: a process with
# threads must not fork. A planner does not need these threads.
THREADLESS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
# Variables that differ between planners; each gets its own from its launcher.
_OWN = "PYTHON_WORKER_FACTORY_"
# Mask of a file's type and of all access by group and others; and its value for a
# folder that only its owner can use.
_CHECKED, _PRIVATE_FOLDER = 0o170077, 0o040000


def main() -> None:
    """Run Python with the arguments of this process."""
    arguments = sys.argv[1:]
    if arguments == ["-m", PLANNER] and hasattr(os, "fork"):
        with suppress(OSError):
            run_forked(PLANNER)
            return
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - no shell


def run_forked(module: str) -> None:
    """Run a module as ``__main__`` in a fork of the server, until it ends.

    The fork takes over the environment and the standard streams of this process. A
    SIGTERM is passed on to it if it has not ended ``TERMINATE_AFTER_S`` later.

    Raises:
        OSError: The fork was not started.
    """
    with connected(address(), os.getppid()) as connection:
        connection.settimeout(START_S)
        # A SIGTERM that arrives now waits until there is a fork to pass it on to.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        try:
            send_request(connection, module)
            received = connection.recv(PID_BYTES, socket.MSG_WAITALL)
            if len(received) < PID_BYTES:
                raise ConnectionResetError(
                    "the forked process ended before it sent its id"
                )
            pid = int.from_bytes(received)

            def end(*_: object) -> None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

            def end_later(*_: object) -> None:
                if signal.getitimer(signal.ITIMER_REAL)[0] == 0:
                    signal.setitimer(signal.ITIMER_REAL, TERMINATE_AFTER_S)

            signal.signal(signal.SIGALRM, end)
            signal.signal(signal.SIGTERM, end_later)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        connection.settimeout(None)
        # The connection closes when the fork ends.
        while connection.recv(1):
            pass


def send_request(connection: socket.socket, module: str) -> None:
    """Send a module's name, the environment and the standard streams."""
    lines = [module, *(f"{name}={value}" for name, value in os.environ.items())]
    body = b"\0".join(map(os.fsencode, lines))
    streams = array.array("i", (0, 1, 2))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
    connection.sendmsg([len(body).to_bytes(LENGTH_BYTES)], ancillary)
    connection.sendall(body)


def address() -> str:
    """Return the path of the server's socket.

    Each driver and each environment has its own server, because Python reads some
    variables only when it starts. The socket is in a folder that only this user can
    use.

    Raises:
        OSError: There is no such folder.
    """
    base = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - the folder is private
    folder = f"{base}/marshal-spark-{os.getuid()}"
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)  # noqa: PTH102 - no pathlib
    found = os.lstat(folder)
    if found.st_uid != os.getuid() or found.st_mode & _CHECKED != _PRIVATE_FOLDER:
        raise PermissionError(f"{folder} belongs to another user, or others can use it")
    lasting = sorted(
        pair for pair in os.environ.items() if not pair[0].startswith(_OWN)
    )
    who = repr((sys.executable, os.getcwd(), os.getppid(), lasting))  # noqa: PTH109
    return f"{folder}/{sha256(os.fsencode(who)).hexdigest()[:16]}"


def connected(path: str, driver: int) -> socket.socket:
    """Return a connection to the server of a driver; start the server if there is none.

    Raises:
        OSError: The server cannot be started.
    """
    with suppress(FileNotFoundError, ConnectionRefusedError):
        return _connected(path)
    with locked(path):
        with suppress(FileNotFoundError, ConnectionRefusedError):
            return _connected(path)
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 - of a server that was killed
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            # Listen now, so that requests sent before the server is ready wait for it.
            listener.listen(BACKLOG)
            _start_server(listener, driver)
        return _connected(path)


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _start_server(listener: socket.socket, driver: int) -> None:
    from subprocess import DEVNULL, Popen

    handle = listener.fileno()
    command = [sys.executable, "-c", SERVER, str(handle), str(driver)]
    Popen(
        command,
        stdin=DEVNULL,
        env=os.environ | THREADLESS,
        pass_fds=[handle],
        start_new_session=True,
    )


class locked:  # noqa: N801 - used like a function
    """Lock for creating or removing the socket of a server."""

    def __init__(self, path: str) -> None:
        self._folder = os.open(os.path.dirname(path), os.O_RDONLY)  # noqa: PTH120

    def __enter__(self) -> None:
        fcntl.flock(self._folder, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)
