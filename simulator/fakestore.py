"""Data of a ``FakeKafka``: stored records, logs, appends in flight and their fates."""

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import attrs

from kafka_marshal.errors import CoordinationError, MarshalError
from kafka_marshal.ports import READ_COMMITTED, Append, PlainRecord, Record
from kafka_marshal.protocol.types import LogEntry, Token, TopicPartition

if TYPE_CHECKING:
    from simulator.fakelog import FakeKafka


@attrs.frozen(kw_only=True)
class AppendFate:
    """The fate of one append.

    Attributes:
        delay_ms: Time until it lands in the log.
        is_lost: Whether it never lands.
        copies: How many times it lands.
        fails_after_ms: Time until it is reported as failed, even if it lands. None: it
            is acknowledged when it lands, or fails with the delivery timeout.
        replicates_ms: Time from landing until it is committed. Before, it is neither
            visible nor acknowledged, and a failover may lose it.
    """

    delay_ms: int = 0
    is_lost: bool = False
    copies: int = 1
    fails_after_ms: int | None = None
    replicates_ms: int = 0


class FatePolicy(Protocol):
    """Decides the fate of appends; a test passes one to ``FakeKafka``."""

    def of_append(self, writer: str, partition: int) -> AppendFate:
        """Return the fate of the next append of ``writer`` to ``partition``."""
        ...


class Prompt:
    """The policy without faults: every append lands at once."""

    def of_append(self, writer: str, partition: int) -> AppendFate:
        """Return a fate without delay, loss or copies."""
        del writer, partition
        return AppendFate()


@attrs.define(kw_only=True)
class Stored:
    """One record in a log.

    Attributes:
        landed_ms: Time at which it is committed.
        sent_epoch: Leader epoch at which its writer sent it, if known.
        is_ghost: Whether its writer had given it up before it was committed.
    """

    offset: int
    leader_epoch: int
    timestamp_ms: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    landed_ms: int
    sent_epoch: int | None = None
    is_ghost: bool = False

    def entry(self) -> LogEntry:
        """Return the record as an entry of a coordination topic."""
        return LogEntry(
            offset=self.offset,
            leader_epoch=self.leader_epoch,
            timestamp_ms=self.timestamp_ms,
            timestamp_type=self.timestamp_type,
            value=self.value,
        )

    def record(self, place: TopicPartition, token: Token | None = None) -> Record:
        """Return the record as one of a data topic."""
        return PlainRecord(
            topic=place.topic,
            partition=place.partition,
            offset=self.offset,
            timestamp_ms=self.timestamp_ms,
            timestamp_type=self.timestamp_type,
            key=self.key,
            value=self.value,
            headers=self.headers,
            leader_epoch=self.leader_epoch,
            token=token,
        )


@attrs.define(kw_only=True)
class Partition:
    """The log of one partition. Offsets may have gaps."""

    start: int = 0
    end: int = 0
    leader: int = 0
    leader_epoch: int = 0
    records: list[Stored] = attrs.field(factory=list)
    # First offset of each leader epoch, oldest first; see KIP-101.
    epochs: list[tuple[int, int]] = attrs.field(factory=lambda: [(0, 0)])
    # First offset of the open transaction, and offsets of aborted ones.
    open_from: int | None = None
    aborted: set[int] = attrs.field(factory=set)

    def end_for(self, isolation_level: str) -> int:
        """Return the log's end; under ``read_committed`` the last stable offset."""
        if isolation_level == READ_COMMITTED and self.open_from is not None:
            return self.open_from
        return self.end

    def epoch_end(self, leader_epoch: int) -> int:
        """Return the end offset of an epoch in this log (OffsetForLeaderEpoch)."""
        for epoch, first in self.epochs:
            if epoch > leader_epoch:
                return first
        return self.end

    def epoch_at(self, offset: int) -> int:
        """Return the leader epoch that wrote an offset of this log."""
        return next(epoch for epoch, first in reversed(self.epochs) if first <= offset)

    def high_watermark(self, now_ms: int) -> int:
        """Return the end of the committed records, which readers can see."""
        at = self._committed_count(now_ms)
        return self.end if at == len(self.records) else self.records[at].offset

    def next_commit_ms(self, now_ms: int) -> int | None:
        """Return when the next record is committed, None if all are."""
        at = self._committed_count(now_ms)
        return None if at == len(self.records) else self.records[at].landed_ms

    def _committed_count(self, now_ms: int) -> int:
        at = len(self.records)
        while at and self.records[at - 1].landed_ms > now_ms:
            at -= 1
        return at

    def drop_uncommitted(self, now_ms: int) -> set[int]:
        """Drop uncommitted records; return their offsets."""
        end = self.high_watermark(now_ms)
        lost = {each.offset for each in self.records if each.offset >= end}
        self.records = [each for each in self.records if each.offset < end]
        self.end = end
        return lost

    def read(self, offset: int, count: int) -> list[Stored]:
        """Return up to ``count`` records from ``offset`` on."""
        first = bisect_left(self.records, offset, key=attrgetter("offset"))
        return self.records[first : first + count]


@attrs.define
class Topic:
    """A topic with its partitions."""

    topic_id: bytes
    timestamp_type: int
    partitions: list[Partition]


@attrs.define(order=True, kw_only=True)
class Pending:
    """An append in flight."""

    lands_ms: int
    number: int
    topic: str = attrs.field(order=False)
    partition: int = attrs.field(order=False)
    value: bytes = attrs.field(order=False)
    fate: AppendFate = attrs.field(order=False)
    append: "FakeAppend" = attrs.field(order=False)
    sent_epoch: int = attrs.field(order=False)


class FakeAppend(Append):
    """An append of the fake: its outcome depends on the clock.

    Attributes:
        fails_ms: Time at which it is reported as failed, unless committed before.
        is_sure_to_fail: Whether it is reported as failed even if it lands.
        landed: Its offset, and the time at which it was committed.
        refusal: Why it will never land.
    """

    def __init__(self, cluster: "FakeKafka", *, fails_ms: int) -> None:
        self._cluster = cluster
        self.fails_ms = fails_ms
        self.is_sure_to_fail = False
        self.landed: tuple[int, int] | None = None
        self.refusal: MarshalError | None = None

    def _is_acknowledged(self) -> bool:
        if self.landed is None or self.is_sure_to_fail:
            return False
        return self.landed[1] <= min(self.fails_ms, self._cluster.clock.now_ms())

    def _is_failed(self) -> bool:
        return (
            not self._is_acknowledged()
            and self.fails_ms <= self._cluster.clock.now_ms()
        )

    def is_done(self) -> bool:
        """Return whether its writer knows the outcome."""
        self._cluster.settle()
        return self.refusal is not None or self._is_acknowledged() or self._is_failed()

    def offset(self) -> int | None:
        """Return its offset, once it is acknowledged."""
        self._cluster.settle()
        is_acknowledged = self.refusal is None and self._is_acknowledged()
        return self.landed[0] if is_acknowledged and self.landed is not None else None

    def error(self) -> MarshalError | None:
        """Return why it is reported as failed, None if it is not."""
        self._cluster.settle()
        if self.refusal is not None:
            return self.refusal
        if self._is_failed():
            return CoordinationError(
                "No acknowledgement came in time; the record may land all the same."
            )
        return None
