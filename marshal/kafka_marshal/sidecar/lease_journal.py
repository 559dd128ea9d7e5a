"""The deadlines that were sent to clients, in a file that survives a restart.

PROTOCOL 12: a restarted sidecar neither releases a key nor gives it to another process
before the deadline that its previous client received. So a deadline is sent only after
it is in the file. A reboot ends every process, and with them the use of the file.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kafka_marshal.remote.api import SubscriptionSpec

FILE_NAME = "promises.json"
LEVEL = 1


class JournaledLease(msgspec.Struct, frozen=True, kw_only=True):
    """A partition that a client may use.

    Attributes:
        epoch: Claim under which it has it.
        until_ms: Latest deadline that may have been sent, local time.
    """

    topic: str
    partition: int
    epoch: int
    until_ms: int


class JournaledClient(msgspec.Struct, frozen=True, kw_only=True):
    """One client, with everything that restores it.

    Attributes:
        client_id: Its name.
        instance: Its process among those of this name, in hex.
        beat_ms: Time between its heartbeats.
        pid: Its process, None if unknown.
        started: Start time of that process.
        children: Processes that work for it.
        wants: Its subscriptions, by name.
        keys: Its leases.
        claims: Topics and partitions that it claims without consumption.
        generation: Config generation that it acted on at least, None if unknown.
    """

    client_id: str
    instance: str
    beat_ms: int
    pid: int | None
    started: int | None
    children: tuple[int, ...]
    wants: dict[str, SubscriptionSpec]
    keys: tuple[JournaledLease, ...]
    claims: tuple[tuple[str, int], ...] = ()
    generation: int | None = None


class _File(msgspec.Struct):
    level: int
    boot_id: str
    clients: tuple[JournaledClient, ...]


class LeaseJournal:
    """The file of one group of one sidecar.

    Args:
        folder: Its identity directory; None keeps nothing, which is safe because no
            claim can be resumed then either.
        boot_id: Boot that local times belong to.
    """

    def __init__(self, folder: Path | None, *, boot_id: str) -> None:
        self._folder = folder
        self._boot_id = boot_id
        self.is_damaged = False
        """Whether the file exists and could not be read."""

    def load(self) -> tuple[JournaledClient, ...]:
        """Return the clients of the previous process in this boot; detect damage."""
        if self._folder is None:
            return ()
        try:
            content = (self._folder / FILE_NAME).read_bytes()
        except FileNotFoundError:
            return ()  # no deadline was ever sent: the file is written first
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
        """Replace the file atomically; return the error, if any."""
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
    """Return the id of the machine's current boot, "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
