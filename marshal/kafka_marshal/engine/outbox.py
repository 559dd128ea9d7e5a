"""Sends a claimant's records and remembers those not read back yet."""

from collections import deque
from collections.abc import Callable, Container

import attrs

from kafka_marshal.errors import LogUnwritable, MarshalError
from kafka_marshal.ports import Append
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import ClaimingMessages, Record
from kafka_marshal.protocol.types import Key

from .context import Context

PENDING_MAX = 10_000


@attrs.frozen
class Sent:
    """A record that was sent and not read back.

    Attributes:
        sent_ms: Local time just before the append.
        partition: Coordinating partition it went to.
        key: The key of the record, None for batches, members and admin records.
        grantee: The process that requests offsets by it, None for all other records.
    """

    sent_ms: int
    partition: int
    key: Key | None
    grantee: bytes | None = None


class Outbox:
    """Numbers, encodes and appends records, and matches read-backs by ``seq``.

    PROTOCOL 3.5. An append that failed may still arrive; only the log decides (PROTOCOL
    1.4). The result of an append serves two purposes: to detect that the log refuses
    this process permanently, and to report why appends fail.
    """

    __slots__ = ("_appends", "_context", "_forgotten_seq", "_pending", "claimant")

    def __init__(self, context: Context, claimant: Claimant) -> None:
        self._context = context
        self._pending: dict[int, Sent] = {}
        self._forgotten_seq = -1  # the newest that left ``_pending`` for lack of room
        self._appends = deque[Append](maxlen=PENDING_MAX)
        self.claimant = claimant

    def send(
        self,
        partition: int,
        make: Callable[[int], Record],
        *,
        key: Key | None = None,
    ) -> tuple[int, int]:
        """Append the record that ``make`` builds for a sequence number.

        Returns:
            The sequence number, and the local time of sending.
        """
        seq = self.claimant.next_seq()
        record = make(seq)
        value = encode(record)
        # PROTOCOL 5.2: leases count from here, before anything can be delayed.
        sent_ms = self._context.now_ms
        self._pending[seq] = Sent(
            sent_ms=sent_ms, partition=partition, key=key, grantee=grantee_of(record)
        )
        if len(self._pending) > PENDING_MAX:
            self._forgotten_seq = next(iter(self._pending))
            del self._pending[self._forgotten_seq]
        self._appends.append(self._context.ports.log.append(partition, value))
        return seq, sent_ms

    def refusal(self) -> MarshalError | None:
        """Return the error if the log refuses this process permanently."""
        while self._appends and self._appends[0].is_done():
            error = self._appends.popleft().error()
            if error is not None:
                self._context.note_failed_append(error)
            if isinstance(error, LogUnwritable):
                return error
        return None

    def read_back(self, seq: int, *, grantee: bytes | None = None) -> Sent | None:
        """Remove and return the record sent with ``seq``, for that grantee if any.

        PROTOCOL 6.2: other processes request offsets under our incarnation, with
        sequence numbers of their own.
        """
        sent = self._pending.get(seq)
        if sent is not None and sent.grantee != grantee:
            return None
        if sent is not None:
            del self._pending[seq]
            took_ms = self._context.now_ms - sent.sent_ms
            self._context.meters.read_backs.observe(took_ms)
        return sent

    def pending_of(self, keys: Container[Key]) -> list[int]:
        """Return the numbers of these keys' records that may still be read back.

        Sending stops after half a heartbeat interval, so a record that is older than
        one interval never arrived.
        """
        since_ms = self._context.now_ms - self._context.heartbeat_interval_ms
        return [
            seq
            for seq, sent in self._pending.items()
            if sent.key in keys and sent.sent_ms > since_ms
        ]

    def pending_to(self, partition: int) -> list[int]:
        """Return the numbers of records to a partition that may still be read back."""
        since_ms = self._context.now_ms - self._context.heartbeat_interval_ms
        return [
            seq
            for seq, sent in self._pending.items()
            if sent.partition == partition and sent.sent_ms > since_ms
        ]

    def may_land(self, partition: int, *, first: int, before: int) -> bool:
        """Return whether a record that was sent may still land, however late.

        PROTOCOL 1.4: it may, unless it was read back.

        Args:
            partition: The coordinating partition that it was sent to.
            first: The least sequence number that counts.
            before: The least sequence number above it that does not count.
        """
        return self._forgotten_seq >= first or any(
            first <= seq < before and sent.partition == partition
            for seq, sent in self._pending.items()
        )

    def is_pending(self, seq: int, *, late: bool = True) -> bool:
        """Return whether a record has not been read back yet.

        Args:
            seq: Its sequence number.
            late: Whether a record older than a heartbeat interval counts. Sending
                stops after half of it, so that record never arrived: waiting for
                it is useless, but it is not confirmed either.
        """
        sent = self._pending.get(seq)
        since_ms = self._context.now_ms - self._context.heartbeat_interval_ms
        return sent is not None and (late or sent.sent_ms > since_ms)


def grantee_of(record: Record) -> bytes | None:
    """Return the process that requests offsets by a record, None for other records."""
    return record.grantee if isinstance(record, ClaimingMessages) else None
