"""Sends a claimant's records and remembers what it waits to read back."""

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
    """A record on its way.

    Attributes:
        sent_ms: Local time just before it was handed to the log.
        partition: Coordinating partition it went to.
        key: The key it is about, None for batches, members and admin records.
        grantee: Who asks for offsets by it, None for all other records.
    """

    sent_ms: int
    partition: int
    key: Key | None
    grantee: bytes | None = None


class Outbox:
    """Numbers, encodes and appends records; PROTOCOL 3.5 ``seq`` finds them back.

    An append that failed may still land, and only the log answers (PROTOCOL
    1.4). What an append reports serves for one thing: to tell that the log
    refuses this process for good.
    """

    __slots__ = ("_appends", "_context", "_pending", "claimant")

    def __init__(self, context: Context, claimant: Claimant) -> None:
        self._context = context
        self._pending: dict[int, Sent] = {}
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
        self._pending[seq] = Sent(sent_ms, partition, key, grantee_of(record))
        if len(self._pending) > PENDING_MAX:
            del self._pending[next(iter(self._pending))]
        self._appends.append(self._context.ports.log.append(partition, value))
        return seq, sent_ms

    def refusal(self) -> MarshalError | None:
        """Return why the log takes nothing from this process, once it says so."""
        while self._appends and self._appends[0].is_done():
            error = self._appends.popleft().error()
            if error is not None:
                self._context.meters.failed_appends += 1
            if isinstance(error, LogUnwritable):
                return error
        return None

    def read_back(self, seq: int, *, grantee: bytes | None = None) -> Sent | None:
        """Return and forget what was sent under ``seq``, for that grantee if any.

        PROTOCOL 6.2: other processes ask for offsets under our incarnation, and
        number as they like.
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
        """Return the records about these keys that may still be read back.

        Sending is given up after H/2; what is older than H never arrived.
        """
        since_ms = self._context.now_ms - self._context.heartbeat_interval_ms
        return [
            seq
            for seq, sent in self._pending.items()
            if sent.key in keys and sent.sent_ms > since_ms
        ]

    def is_pending(self, seq: int, *, late: bool = True) -> bool:
        """Return whether a record has not been read back yet.

        Args:
            seq: Its sequence number.
            late: Whether one counts that is older than H. Sending is given up
                after H/2, so it never arrived: nobody needs to wait for it, but
                it is not confirmed either.
        """
        sent = self._pending.get(seq)
        since_ms = self._context.now_ms - self._context.heartbeat_interval_ms
        return sent is not None and (late or sent.sent_ms > since_ms)


def grantee_of(record: Record) -> bytes | None:
    """Return who asks for offsets by a record, None for all other records."""
    return record.grantee if isinstance(record, ClaimingMessages) else None
