"""The deadlines that were sent to clients, in a file that survives a restart.

PROTOCOL 12: a restarted sidecar neither releases a key nor gives it to another process
before the deadline that its previous client received. So a deadline is sent only after
it is in the file. A reboot ends every process, so it voids the file.

If the file cannot be written, for example on a full disk, it is emptied, which needs no
space. The next process treats an empty file as damaged and resumes no claim, so it
cannot end a lease too early. So deadlines may also be sent after the file was emptied.

The first line has all clients. With many clients it takes long to write, so between two
writes of it new leases are appended, one per line.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kafka_marshal.identity import make_private, replace_file
from kafka_marshal.remote.api import SubscriptionSpec

FILE_NAME = "leases.json"
LEVEL = 1
# Sets the pause after writing all clients: about 100 ms for a thousand of them.
BYTES_PER_MS = 2_000
# Pause before the next attempt to write a file that could only be emptied.
RETRY_MS = 1_000


class JournaledLease(msgspec.Struct, frozen=True, kw_only=True):
    """A partition that a client may use.

    Attributes:
        epoch: Epoch of the claim under which the client has the partition.
        until_ms: Latest deadline that may have been sent, local time.
    """

    topic: str
    partition: int
    epoch: int
    until_ms: int


class JournaledClient(msgspec.Struct, frozen=True, kw_only=True):
    """One client, with all that is needed to restore it.

    Attributes:
        client_id: Its name.
        instance: Identifies its process among the processes of this name, in hex.
        beat_ms: Time between its heartbeats.
        pid: Its process, None if unknown.
        started: Start time of that process.
        children: Processes that work for it.
        specs: Its subscriptions, by name.
        keys: Its leases.
        claims: Topics and partitions that it claims without consumption.
        claim_requests: Number of the last request for each of ``claims``, or None.
        generation: A Config generation that it has acted on, None if unknown.
    """

    client_id: str
    instance: str
    beat_ms: int
    pid: int | None
    started: int | None
    children: tuple[int, ...]
    # The file has an earlier name.
    specs: dict[str, SubscriptionSpec] = msgspec.field(name="wants")
    keys: tuple[JournaledLease, ...]
    claims: tuple[tuple[str, int], ...] = ()
    claim_requests: tuple[int | None, ...] = ()
    generation: int | None = None


class AddedLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that was added, or given a new deadline, since all clients were written.

    Attributes:
        client_id: Name of its client.
        instance: Identifies the client's process, in hex.
        lease: The lease; it replaces any earlier lease of this partition.
    """

    client_id: str
    instance: str
    lease: JournaledLease


class _File(msgspec.Struct):
    level: int
    boot_id: str
    clients: tuple[JournaledClient, ...]


class LeaseJournal:
    """The lease journal of one group of one sidecar.

    Args:
        folder: The group's identity directory. None writes no file, which is safe:
            without that directory no claim can be resumed.
        boot_id: Id of the boot that local times belong to.
    """

    def __init__(self, folder: Path | None, *, boot_id: str) -> None:
        self._folder = folder
        self._boot_id = boot_id
        # Whether this process wrote the file, and its last line is complete.
        self._can_append = False
        self.is_damaged = False
        """Whether the file exists and could not be read."""
        self.is_emptied = False
        """Whether the last write only emptied it: the next process resumes nothing."""
        self.rest_ms = 0
        """Shortest pause after a write of all clients before the next such write."""

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
        # Bytes after the last line feed are a line that a crash cut off. The deadline
        # in it was never sent.
        first, *more = content.split(b"\n")
        try:
            found = msgspec.json.decode(first, type=_File)
            added = [msgspec.json.decode(line, type=AddedLease) for line in more[:-1]]
        except msgspec.MsgspecError:
            self.is_damaged = True
            return ()
        if found.boot_id != self._boot_id:
            return ()  # the processes of an earlier boot are dead
        if found.level != LEVEL:
            self.is_damaged = True
            return ()
        return _with_added(found.clients, added)

    def save(self, clients: Sequence[JournaledClient]) -> OSError | None:
        """Replace the file atomically; return the error, if any.

        After an error the file is empty, if possible: see ``is_emptied``.

        A directory that was removed is created again. Without the identity file of that
        directory the next process resumes no claim, so it cannot end a lease too early.
        """
        if self._folder is None:
            return None
        content = msgspec.json.encode(_File(LEVEL, self._boot_id, tuple(clients)))
        content += b"\n"
        error = self._replace(self._folder, content)
        self.is_emptied = False
        if error is not None and self._empty(self._folder):
            # The space of the old content is free now.
            error = self._replace(self._folder, content)
            self.is_emptied = error is not None
        self._can_append = error is None
        self.rest_ms = RETRY_MS if self.is_emptied else 0
        if error is None:
            self.rest_ms = len(content) // BYTES_PER_MS
        return error

    @staticmethod
    def _replace(folder: Path, content: bytes) -> OSError | None:
        try:
            make_private(folder)
            replace_file(folder / FILE_NAME, content, is_durable=False)
        except OSError as error:
            return error
        return None

    @staticmethod
    def _empty(folder: Path) -> bool:
        """Empty the file, so that the next process resumes nothing; return success."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            os.close(os.open(folder / FILE_NAME, flags, 0o600))
        except OSError:
            return False
        return True

    def append(self, added: Sequence[AddedLease]) -> OSError | None:
        """Append leases to the file; return the error, if any.

        After an error only ``save`` can write again, because a line may be cut off.
        """
        if self._folder is None:
            return None
        if not self._can_append:
            return OSError("the lease journal was not written since its last error")
        self._can_append = False
        lines = [msgspec.json.encode(each) + b"\n" for each in added]
        try:
            with (self._folder / FILE_NAME).open("ab") as file:
                file.write(b"".join(lines))
        except OSError as error:
            return error
        self._can_append = True
        return None


def _with_added(
    clients: Sequence[JournaledClient], added: Sequence[AddedLease]
) -> tuple[JournaledClient, ...]:
    """Return the clients after applying the leases that were added later, in order."""
    if not added:
        return tuple(clients)
    found = {(each.client_id, each.instance): each for each in clients}
    has: dict[tuple[str, int], tuple[tuple[str, str], JournaledLease]] = {}
    for name, client in found.items():
        has |= {(key.topic, key.partition): (name, key) for key in client.keys}
    for each in added:
        name = (each.client_id, each.instance)
        has[each.lease.topic, each.lease.partition] = name, each.lease
        found.setdefault(name, gone_client(*name))
    keys: dict[tuple[str, str], list[JournaledLease]] = {}
    for name, lease in has.values():
        keys.setdefault(name, []).append(lease)
    return tuple(
        msgspec.structs.replace(client, keys=tuple(keys.get(name, ())))
        for name, client in found.items()
    )


def gone_client(
    client_id: str, instance: str, *, keys: tuple[JournaledLease, ...] = ()
) -> JournaledClient:
    """Return the entry of a client of which only leases are known."""
    return JournaledClient(
        client_id=client_id,
        instance=instance,
        beat_ms=1,
        pid=None,
        started=None,
        children=(),
        specs={},
        keys=keys,
    )
