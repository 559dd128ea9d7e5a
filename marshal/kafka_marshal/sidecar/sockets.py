"""The sidecar's sockets: who may reach them, and only one sidecar on each.

A Unix socket stands in a folder that nobody else may enter, so that no other user
gets as far as connecting. A lock beside it tells a living sidecar from a socket that
a dead one left.
"""

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

import attrs

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.identity import make_private

BACKLOG = 128
FOLDER_MODE = 0o700
SOCKET_MODE = 0o600
CONNECT_S = 1.0
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@attrs.define
class UnixPlace:
    """A Unix socket that is ours alone, until it is closed.

    Attributes:
        path: Its path.
        listening: The socket, bound.
    """

    path: Path
    listening: socket.socket
    _lock: int

    def close(self) -> None:
        """Close and remove it. Idempotent."""
        if self._lock < 0:
            return
        self.listening.close()
        self.path.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1


def open_unix(path: Path) -> UnixPlace:
    """Return a Unix socket at a path, of mode 0600 in a folder of mode 0700.

    A socket that nobody answers on is replaced.

    Raises:
        ConfigurationError: Somebody answers there, others may enter the folder, or
            the path cannot be used.
    """
    try:
        make_private(path.parent, FOLDER_MODE)
        _require_ours(path.parent)
        lock = _locked(path)
    except OSError as error:
        raise _unusable(path, error) from error
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _make_room(path)
        # Before it has a name: nobody can come in between with another mode.
        os.fchmod(listening.fileno(), SOCKET_MODE)
        listening.bind(str(path))
        path.chmod(SOCKET_MODE)
    except BaseException as error:
        listening.close()
        os.close(lock)
        if isinstance(error, OSError):
            raise _unusable(path, error) from error
        raise
    listening.settimeout(0)
    return UnixPlace(path, listening, lock)


def open_tcp(host: str, port: int) -> socket.socket:
    """Return a TCP socket on an address of this machine.

    Raises:
        ConfigurationError: It is in use, or cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        is_taken = error.errno == errno.EADDRINUSE
        why = "is in use by another program" if is_taken else f"cannot be used: {error}"
        raise ConfigurationError(
            f"tcp address {host}:{port} {why}; name another port with --tcp",
            setting="tcp",
        ) from error
    listening.settimeout(0)
    return listening


def _require_ours(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise ConfigurationError(
            f"the socket's folder {str(folder)!r} belongs to another user "
            f"({found.st_uid}); name a socket in a folder of your own",
            setting="socket",
        )
    if found.st_mode & _OTHERS:
        raise ConfigurationError(
            f"the socket's folder {str(folder)!r} may be entered by others "
            f"({stat.filemode(found.st_mode)}); run: chmod 700 {folder}, or name a "
            "socket in a folder of its own, which is then made",
            setting="socket",
        )


def _locked(path: Path) -> int:
    """Return the lock of a socket; it goes with the process, however that ends."""
    lock = os.open(
        path.with_name(path.name + ".lock"),
        os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
        SOCKET_MODE,
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock, 20).decode("ascii", "replace").strip()
        os.close(lock)
        by = f" (process {pid})" if pid.isdecimal() else ""
        raise _taken(path, f"a living sidecar{by}") from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _make_room(path: Path) -> None:
    """Remove a socket that nobody answers on."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(
            f"{str(path)!r} is there and no socket; remove it, or name another socket",
            setting="socket",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass  # it is busy, or not ours to open: somebody is there
    raise _taken(path, "another program")


def _taken(path: Path, by: str) -> ConfigurationError:
    return ConfigurationError(
        f"socket {str(path)!r} is in use by {by}; stop that one, or name another "
        "socket with --socket; see: marshal sidecar status",
        setting="socket",
    )


def _unusable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"socket {str(path)!r} cannot be used: {error}; name another one with --socket",
        setting="socket",
    )
