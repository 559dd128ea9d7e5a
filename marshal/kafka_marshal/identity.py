"""The local identity of a client: its earlier incarnations, and an exclusive lock.

A process that restarts with the same client_id may resume its keys at once, but only
if its earlier incarnation is certainly dead (PROTOCOL 4.4). The proof is an exclusive
lock on a directory that both use.
"""

import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import attrs
import msgspec

from kafka_marshal.errors import ConfigurationError, IdentityConflict
from kafka_marshal.protocol.claiming import PreviousLife

LIVES_MAX = 8
FILE_NAME = "identity.json"
LOCK_NAME = "lock"


class _Life(msgspec.Struct):
    incarnation: str
    master: str


class _File(msgspec.Struct):
    lives: list[_Life]


def host_label() -> str:
    """Return this host's name as a part of a client_id: a name may have any letters."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100] or "host"


def state_home() -> Path:
    """Return the default directory of identities.

    ``MARSHAL_STATE_DIR``, else the XDG state directory of the user.

    Raises:
        ConfigurationError: The user has no home directory.
    """
    chosen = os.environ.get("MARSHAL_STATE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return Path(base) / "kafka-marshal"
    try:
        return Path.home() / ".local" / "state" / "kafka-marshal"
    except RuntimeError as error:  # a user id of a container, without HOME
        raise ConfigurationError(
            f"user {os.geteuid()} has no home directory to keep state in; set "
            "MARSHAL_STATE_DIR to a directory of its own",
            setting="state_dir",
        ) from error


def replace_file(path: Path, content: bytes, *, is_durable: bool) -> None:
    """Replace a file as a whole: after a crash it has the old or the new content.

    Args:
        path: The file, in a directory that exists.
        content: The new content.
        is_durable: Whether the content must survive a crash of the machine.

    Raises:
        OSError: It could not be written; the old file is still there.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def home_of(state_dir: str | Path | None) -> Path | None:
    """Return the directory that a setting ``state_dir`` names, None for no directory.

    Args:
        state_dir: A directory; None for the user's, if there is one; ``""`` for none.

    Raises:
        ConfigurationError: The setting is not a path.
    """
    if state_dir is None:
        try:
            return state_home()
        except ConfigurationError:
            return None
    if not isinstance(state_dir, str | os.PathLike):
        raise ConfigurationError(
            f"state_dir must be the path of a directory, not {state_dir!r}; leave it "
            "out for that of the user, or give '' for none",
            setting="state_dir",
        )
    return Path(state_dir) if str(state_dir) else None


def make_private(path: Path, mode: int = 0o700) -> None:
    """Create a directory and missing parents, accessible only to their owner.

    Args:
        path: The directory.
        mode: Mode of new directories, less the umask.

    Raises:
        OSError: It cannot be created, or is not a directory.
    """
    missing = []
    for folder in (path, *path.parents):
        if folder.is_dir():
            break
        missing.append(folder)
    for folder in reversed(missing):
        folder.mkdir(mode=mode, exist_ok=True)


def require_private(path: Path) -> None:
    """Check that only this user can change the content of a directory.

    Raises:
        OSError: It is a symbolic link or not a directory, it belongs to another user,
            or its group or others may write to it.
    """
    if path.is_symlink():
        raise PermissionError(
            f"{str(path)!r} is a symbolic link; name the directory itself"
        )
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = os.open(path, flags)
    try:
        found = os.fstat(opened)
    finally:
        os.close(opened)
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{str(path)!r} belongs to another user ({found.st_uid}); name a directory "
            "of your own, which may be a new one below it"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{str(path)!r} may be written by others "
            f"({stat.filemode(found.st_mode)}); run: chmod 700 {path}, or name a new "
            "directory below it"
        )


_held: set[int] = set()


def _close_locks_in_child() -> None:
    """Close the locks that a forked child has inherited.

    A lock belongs to the open file, so a child that outlives its parent would shut out
    the parent's next incarnation (PROTOCOL 1.7).
    """
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


@attrs.frozen
class Identity:
    """An exclusive lock on one client's directory, held until ``close``.

    Attributes:
        lives: Earlier incarnations, newest first, all certainly dead.
    """

    lives: tuple[PreviousLife, ...]
    _path: Path
    _lock: int

    @classmethod
    def take(
        cls, home: Path, *, domain: str, group_id: str, client_id: str
    ) -> "Identity":
        """Lock the directory of a client and read its earlier incarnations.

        Args:
            home: Directory of all identities.
            domain: Names the coordination topic's format, in hex.
            group_id: Group.
            client_id: Client.

        Raises:
            IdentityConflict: Another live process on this machine has the lock.
            OSError: The directory cannot be used, or others can change it.
        """
        # The prefixes keep names such as ``..`` inside the directory.
        path = home / domain / f"g={group_id}" / f"c={client_id}"
        make_private(path)
        require_private(home)
        require_private(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(path / LOCK_NAME, flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            holder = f"process {pid} on this machine; stop it"
            if pid == str(os.getpid()):
                holder = "another Marshal of this process; close that one first"
            raise IdentityConflict(
                f"client_id {client_id!r} of group {group_id!r} is in use by "
                f"{holder} or choose another client_id",
                holder=client_id,
                host=os.uname().nodename,
            ) from error
        _held.add(lock)
        with suppress(OSError):  # such as a full disk: only messages need the pid
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        return cls(_read(path / FILE_NAME), path, lock)

    @property
    def folder(self) -> Path:
        """The client's directory."""
        return self._path

    def forget(self) -> "Identity":
        """Return the same lock without earlier incarnations: no claims are resumed."""
        return attrs.evolve(self, lives=())

    def remember(self, incarnation: bytes, *, master: bytes) -> None:
        """Store the present incarnation, so that the next one can resume its keys.

        Raises:
            OSError: The file cannot be written; it still has the earlier incarnations.
        """
        lives = [PreviousLife(incarnation, master), *self.lives][:LIVES_MAX]
        document = _File([_Life(x.incarnation.hex(), x.master.hex()) for x in lives])
        content = msgspec.json.encode(document)
        replace_file(self._path / FILE_NAME, content, is_durable=True)

    def erase(self) -> None:
        """Make the next process resume no claims. Needs no free disk space.

        Raises:
            OSError: The directory cannot be written.
        """
        (self._path / FILE_NAME).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock."""
        if self._lock in _held:
            _held.discard(self._lock)
            os.close(self._lock)


def forget_client(home: Path, *, domain: str, group_id: str, client_id: str) -> bool:
    """Remove the identity of a client; return whether there was one.

    The client's next start resumes no claims: it claims keys that are free or stale.

    Args:
        home: Directory of all identities.
        domain: Names the coordination topic's format, in hex.
        group_id: Group.
        client_id: Client.

    Raises:
        IdentityConflict: A live process on this machine has the lock.
        OSError: The directory cannot be removed.
    """
    path = home / domain / f"g={group_id}" / f"c={client_id}"
    if not path.is_dir():
        return False
    identity = Identity.take(
        home, domain=domain, group_id=group_id, client_id=client_id
    )
    try:
        shutil.rmtree(path)
    finally:
        identity.close()
    return True


def _read(path: Path) -> tuple[PreviousLife, ...]:
    try:
        document = msgspec.json.decode(path.read_bytes(), type=_File)
        lives = tuple(
            PreviousLife(bytes.fromhex(life.incarnation), bytes.fromhex(life.master))
            for life in document.lives[:LIVES_MAX]
        )
    except (OSError, ValueError, msgspec.MsgspecError):
        return ()  # missing or damaged: keys can be claimed, but not resumed
    return lives
