"""What clients were promised, in a file: a restarted sidecar must keep it.

PROTOCOL 12: after a restart a key is neither released nor given to another process
before the deadline that its old one was told. So a deadline is told only once it is
in the file, and the file is of no use after a reboot, which ends every process.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kafka_marshal.remote.api import Wants

FILE_NAME = "promises.json"
LEVEL = 1


class JournaledLease(msgspec.Struct, frozen=True):
    """One partition that a client may use until then.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Claim that it had it under.
        until_ms: Largest deadline that it was told, local time.
    """

    topic: str
    partition: int
    epoch: int
    until_ms: int


class JournaledClient(msgspec.Struct, frozen=True):
    """One client, with everything that brings it back to where it was.

    Attributes:
        client_id: Its name.
        instance: Which process of that name, in hex.
        beat_ms: Time between its beats.
        pid: Its process, None where nobody knows.
        started: When that started.
        children: Processes that work for it.
        wants: What it consumes, by name.
        keys: What it has.
        claims: What it claims one by one, by topic and partition.
    """

    client_id: str
    instance: str
    beat_ms: int
    pid: int | None
    started: int | None
    children: tuple[int, ...]
    wants: dict[str, Wants]
    keys: tuple[JournaledLease, ...]
    claims: tuple[tuple[str, int], ...] = ()


class _File(msgspec.Struct):
    level: int
    boot_id: str
    clients: tuple[JournaledClient, ...]


class LeaseJournal:
    """The file of one group of one sidecar.

    Args:
        folder: Its identity directory; None keeps nothing, which is safe where
            nothing can be resumed either.
        boot_id: Which boot local times belong to.
    """

    def __init__(self, folder: Path | None, *, boot_id: str) -> None:
        self._folder = folder
        self._boot_id = boot_id
        self.is_damaged = False
        """Whether something stood there that could not be read: who knows what."""

    def load(self) -> tuple[JournaledClient, ...]:
        """Return what an earlier life of this boot promised, and note damage."""
        if self._folder is None:
            return ()
        try:
            content = (self._folder / FILE_NAME).read_bytes()
        except FileNotFoundError:
            return ()  # nothing was ever promised: the file comes first
        except OSError:
            self.is_damaged = True
            return ()
        try:
            found = msgspec.json.decode(content, type=_File)
        except msgspec.MsgspecError:
            self.is_damaged = True
            return ()
        if found.boot_id != self._boot_id:
            return ()  # all of those processes are dead
        if found.level != LEVEL:
            self.is_damaged = True
            return ()
        return found.clients

    def save(self, clients: Sequence[JournaledClient]) -> OSError | None:
        """Replace the file as a whole; return why it could not be."""
        if self._folder is None:
            return None
        content = msgspec.json.encode(_File(LEVEL, self._boot_id, tuple(clients)))
        try:
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=".promises")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                Path(name).replace(self._folder / FILE_NAME)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            return error
        return None


def boot_id() -> str:
    """Return which boot of the machine this is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
