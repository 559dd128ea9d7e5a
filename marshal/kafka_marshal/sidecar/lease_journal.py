"""The deadlines that were sent to clients, in a file that survives a restart.

PROTOCOL 12: a restarted sidecar neither releases a key nor gives it to another process
before the deadline that its previous client received. So a deadline is sent only after
it is in the file. A reboot ends every process, and with them the use of the file.

Where it cannot be written, as on a full disk, it is emptied, which takes no space. For
the next process an empty file is damaged: it resumes no claim, so that it has no lease
to end. So deadlines may be sent then, too.

The file begins with all clients, in one line. Between two writes of that line, which
take their time where there are many, further leases are appended, a line each.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kafka_marshal.identity import make_private, replace_file
from kafka_marshal.remote.api import SubscriptionSpec

FILE_NAME = "leases.json"
LEVEL = 1
# All clients are written at most at this pace: a thousand of them in some 100 ms.
BYTES_PER_MS = 2_000
# When to try again to write a file that could only be emptied.
RETRY_MS = 1_000


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
        claim_requests: Number of the last request for each of them, None without one.
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
    claim_requests: tuple[int | None, ...] = ()
    generation: int | None = None


class AddedLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that was added, or whose deadline was moved, since all were written.

    Attributes:
        client_id: Name of its client.
        instance: The client's process among those of this name, in hex.
        lease: The lease; the client that had this partition before has it no more.
    """

    client_id: str
    instance: str
    lease: JournaledLease


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
        # Whether the file is of this process and ends with a whole line.
        self._can_append = False
        self.is_damaged = False
        """Whether the file exists and could not be read."""
        self.is_emptied = False
        """Whether it could not be written, and the next process resumes nothing."""
        self.rest_ms = 0
        """How long after writing all clients to do so again, at the earliest."""

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
        # What follows the last line feed was cut off by a crash, and so never sent.
        first, *more = content.split(b"\n")
        try:
            found = msgspec.json.decode(first, type=_File)
            added = [msgspec.json.decode(line, type=AddedLease) for line in more[:-1]]
        except msgspec.MsgspecError:
            self.is_damaged = True
            return ()
        if found.boot_id != self._boot_id:
            return ()  # all of those processes are dead
        if found.level != LEVEL:
            self.is_damaged = True
            return ()
        return _with_added(found.clients, added)

    def save(self, clients: Sequence[JournaledClient]) -> OSError | None:
        """Replace the file atomically; return the error, if any.

        After an error the file is empty, if possible: see ``is_emptied``.

        A directory that was removed is created again. Without the identity that was in
        it the next process resumes no claim, so it cannot end a lease too early.
        """
        if self._folder is None:
            return None
        content = msgspec.json.encode(_File(LEVEL, self._boot_id, tuple(clients)))
        content += b"\n"
        error = self._replace(self._folder, content)
        self.is_emptied = False
        if error is not None and self._empty(self._folder):
            # Now there is the space that the old content took.
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
        """Have the next process resume nothing; return whether it will not."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            os.close(os.open(folder / FILE_NAME, flags, 0o600))
        except OSError:
            return False
        return True

    def append(self, added: Sequence[AddedLease]) -> OSError | None:
        """Append leases to the file; return the error, if any.

        After an error all clients must be written: a line may be cut off.
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
    """Return the clients with leases that were added later, in this order."""
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
    """Return the entry of a client of which nothing but leases is known."""
    return JournaledClient(
        client_id=client_id,
        instance=instance,
        beat_ms=1,
        pid=None,
        started=None,
        children=(),
        wants={},
        keys=keys,
    )
