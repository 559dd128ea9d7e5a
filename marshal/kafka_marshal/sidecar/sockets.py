"""Opens the listening sockets, limits access to them, and keeps one sidecar on each.

A Unix socket is in a directory that no other user may enter, except the members of a
configured group, so that others cannot even connect. A lock file beside the socket
distinguishes a running sidecar from a socket that a dead one left.
"""

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

import attrs

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.identity import make_private

BACKLOG = 128
FOLDER_MODE = 0o700
SOCKET_MODE = 0o600
# Modes if the members of a group may use the socket, too.
GROUP_FOLDER_MODE = 0o750
GROUP_SOCKET_MODE = 0o660
# Mode of parent directories that are created for it.
GROUP_PARENT_MODE = 0o755
CONNECT_S = 1.0
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@attrs.define
class UnixPlace:
    """A Unix socket that this process owns until it is closed.

    Attributes:
        path: Its path.
        listening: The socket.
    """

    path: Path
    listening: socket.socket
    _lock: int
    _file: tuple[int, int]

    def is_there(self) -> bool:
        """Return whether the path still names this socket, so clients can connect."""
        return _file_at(self.path) == self._file

    def close(self) -> None:
        """Close the socket and remove its file. Idempotent.

        A socket that another process has made at that path meanwhile is not removed.
        """
        if self._lock < 0:
            return
        self.listening.close()
        if self.is_there():
            self.path.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1


def open_unix(path: Path, *, gid: int | None = None) -> UnixPlace:
    """Return a Unix socket of mode 0600 in a directory of mode 0700.

    A socket file that no process serves is replaced.

    Args:
        path: Its path.
        gid: Group whose members may also use it; the modes are 0660 and 0750 then.

    Raises:
        ConfigurationError: The socket is in use, others may enter the directory, or the
            path cannot be used.
    """
    try:
        _make_folder(path.parent, gid)
        _require_ours(path.parent, gid)
        lock = _locked(path)
    except OSError as error:
        raise _unusable(path, error) from error
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _make_room(path)
        # Before the socket has a name, so that it never has another mode.
        os.fchmod(listening.fileno(), SOCKET_MODE)
        listening.bind(str(path))
        if gid is None:
            path.chmod(SOCKET_MODE)
        else:
            os.chown(path, -1, gid)
            path.chmod(GROUP_SOCKET_MODE)
    except BaseException as error:
        listening.close()
        os.close(lock)
        if isinstance(error, OSError):
            raise _unusable(path, error) from error
        raise
    listening.settimeout(0)
    return UnixPlace(path, listening, lock, _file_at(path))


def _file_at(path: Path) -> tuple[int, int]:
    """Return device and inode number of a file, zeros if it does not exist."""
    try:
        found = path.lstat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def open_tcp(host: str, port: int) -> socket.socket:
    """Return a TCP socket on an address of this machine.

    Raises:
        ConfigurationError: The address is in use, or cannot be used.
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


def _make_folder(folder: Path, gid: int | None) -> None:
    if gid is None:
        make_private(folder, FOLDER_MODE)
    elif not folder.is_dir():
        make_private(folder.parent, GROUP_PARENT_MODE)
        folder.mkdir(mode=FOLDER_MODE)
        os.chown(folder, -1, gid)
        folder.chmod(GROUP_FOLDER_MODE)


def _require_ours(folder: Path, gid: int | None) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise ConfigurationError(
            f"the socket's folder {str(folder)!r} belongs to another user "
            f"({found.st_uid}); name a socket in a folder of your own",
            setting="socket",
        )
    if gid is not None:
        _require_group(folder, found, gid=gid)
    elif found.st_mode & _OTHERS:
        raise ConfigurationError(
            f"the socket's folder {str(folder)!r} can be entered by others "
            f"({stat.filemode(found.st_mode)}); run: chmod 700 {folder}, or name a "
            "socket in a folder of its own, which is then created",
            setting="socket",
        )


def _require_group(folder: Path, found: os.stat_result, *, gid: int) -> None:
    """Check that a group may enter a directory, and only its owner change it."""
    mode = stat.S_IMODE(found.st_mode)
    is_open = mode & (stat.S_IRWXO | stat.S_IWGRP)
    if is_open or not mode & stat.S_IXGRP or found.st_gid != gid:
        raise ConfigurationError(
            f"the socket's folder {str(folder)!r} is {stat.filemode(found.st_mode)} of "
            f"group {found.st_gid}; with socket-group its members, and no others, must "
            f"be able to enter it, and none to change it; run: chgrp {gid} {folder} && "
            f"chmod 750 {folder}",
            setting="socket",
        )


def _locked(path: Path) -> int:
    """Return the descriptor of a socket's lock, which ends with the process."""
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
    with suppress(OSError):  # such as a full disk: only messages need the pid
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _make_room(path: Path) -> None:
    """Remove a socket file that no process serves."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(
            f"{str(path)!r} is not a socket; remove it, or name another socket",
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
            pass  # busy or not permitted: another program serves it
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
