"""A Kafka cluster in memory: coordination topics, data topics, group offsets.

It behaves like the real one in what the protocol depends on: LogAppendTime is
the raw wall clock of a partition's leader, leader epochs grow with each
failover, a truncation is noticed by its epochs, and an append may be late, lost,
doubled, or reported as failed and land all the same. One conformance kit holds
it and a real broker to the same behaviour.

With a ``VirtualClock`` nothing ever blocks, and what is due happens at the next
call of anything. With any other clock ``poll`` waits on real time, and handles
may be used from several threads.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kafka_marshal.errors import (
    CoordinationError,
    InvalidTransition,
    LogTruncated,
    MarshalError,
    TopicMisconfigured,
)
from kafka_marshal.ports import Append, Clock, CoordinationLog, LogRange
from kafka_marshal.protocol.types import LogEntry, TimestampType, TopicPartition
from kafka_marshal.testing.clock import VirtualClock
from kafka_marshal.testing.fakestore import (
    AppendFate,
    FatePolicy,
    Partition,
    Prompt,
    Stored,
    Topic,
)

if TYPE_CHECKING:
    from kafka_marshal.testing.fakedata import FakeDataLog

__all__ = ["AppendFate", "FakeCoordinationLog", "FakeKafka", "FatePolicy"]

DELIVERY_TIMEOUT_MS = 30_000


@attrs.define(order=True)
class _Pending:
    """An append on its way."""

    lands_ms: int
    number: int
    topic: str = attrs.field(order=False)
    partition: int = attrs.field(order=False)
    value: bytes = attrs.field(order=False)
    copies: int = attrs.field(order=False)
    append: "_FakeAppend" = attrs.field(order=False)


class _FakeAppend(Append):
    """An append of the fake: its outcome depends on the clock."""

    def __init__(self, cluster: "FakeKafka", *, fails_ms: int) -> None:
        self._cluster = cluster
        # When it is given up on; unless it is sure to fail, landing saves it.
        self.fails_ms = fails_ms
        self.is_sure_to_fail = False
        self.landed: tuple[int, int] | None = None
        self.refusal: MarshalError | None = None

    def _is_acknowledged(self) -> bool:
        return (
            self.landed is not None
            and not self.is_sure_to_fail
            and self.landed[1] <= self.fails_ms
        )

    def _is_failed(self) -> bool:
        return (
            not self._is_acknowledged()
            and self.fails_ms <= self._cluster.clock.now_ms()
        )

    def is_done(self) -> bool:
        self._cluster.settle()
        return self.refusal is not None or self._is_acknowledged() or self._is_failed()

    def offset(self) -> int | None:
        self._cluster.settle()
        is_told = self.refusal is None and self._is_acknowledged()
        return self.landed[0] if is_told and self.landed is not None else None

    def error(self) -> MarshalError | None:
        self._cluster.settle()
        if self.refusal is not None:
            return self.refusal
        if self._is_failed():
            return CoordinationError(
                "No acknowledgement came in time; the record may land all the same."
            )
        return None


class FakeKafka:
    """One cluster in memory.

    Attributes:
        clock: True time of the cluster; each broker adds its own skew.
        cluster_id: An id that no other cluster of this process has.
        groups: Committed offsets by group.
        busy_groups: Groups that have active members, whose offsets none but
            they may set.
    """

    _numbers = itertools.count(1)

    def __init__(
        self, clock: Clock | None = None, *, policy: FatePolicy | None = None
    ) -> None:
        """Make an empty cluster.

        Args:
            clock: Time; a fresh ``VirtualClock`` without it.
            policy: Fate of appends; without it each lands at once.
        """
        self.clock = clock if clock is not None else VirtualClock()
        self.policy: FatePolicy = policy if policy is not None else Prompt()
        self.is_virtual = isinstance(self.clock, VirtualClock)
        self.cluster_id = f"fake-{next(self._numbers)}"
        self.groups: dict[str, dict[TopicPartition, int]] = {}
        self.busy_groups: set[str] = set()
        self.changed = threading.Condition(threading.RLock())
        self._topics: dict[str, Topic] = {}
        self._skews_ms: dict[int, int] = {}
        self._pending: list[_Pending] = []
        self._sequence = itertools.count(1)
        self._writers = itertools.count(1)

    # Topics.

    def create_topic(
        self, name: str, partitions: int, *, is_log_append_time: bool = False
    ) -> None:
        """Make a topic.

        Args:
            name: Its name, not in use.
            partitions: Number of partitions.
            is_log_append_time: Whether the leader stamps records (as for a
                coordination topic), and not the writer.
        """
        with self.changed:
            assert name not in self._topics
            kind = (
                TimestampType.LOG_APPEND_TIME
                if is_log_append_time
                else TimestampType.CREATE_TIME
            )
            topic_id = next(self._sequence).to_bytes(16, "big")
            logs = [Partition() for _ in range(partitions)]
            self._topics[name] = Topic(topic_id, kind, logs)
            self.changed.notify_all()

    def delete_topic(self, name: str) -> None:
        """Remove a topic; one made anew under its name has another id."""
        with self.changed:
            del self._topics[name]
            self.changed.notify_all()

    def add_partitions(self, name: str, count: int) -> None:
        """Add ``count`` partitions to a topic."""
        with self.changed:
            self.topic(name).partitions.extend(Partition() for _ in range(count))
            self.changed.notify_all()

    def topic(self, name: str) -> Topic:
        """Return a topic.

        Raises:
            CoordinationError: There is no such topic.
        """
        found = self._topics.get(name)
        if found is None:
            raise CoordinationError(f"There is no topic {name}; make it first.")
        return found

    def topic_names(self) -> list[str]:
        """Return the names of all topics, in order."""
        return sorted(self._topics)

    def has_topic(self, name: str) -> bool:
        """Return whether there is such a topic."""
        return name in self._topics

    def log(self, place: TopicPartition) -> Partition:
        """Return the log of a partition.

        Raises:
            CoordinationError: There is no such partition.
        """
        partitions = self.topic(place.topic).partitions
        if not 0 <= place.partition < len(partitions):
            raise CoordinationError(f"There is no partition {place}; add it first.")
        return partitions[place.partition]

    def range(self, place: TopicPartition) -> LogRange:
        """Return the offsets that exist in a partition."""
        log = self.log(place)
        return LogRange(log.start, log.end)

    # What happens in the world.

    def set_skew(self, broker: int, skew_ms: int) -> None:
        """Set how far a broker's wall clock is ahead of true time."""
        with self.changed:
            self.settle()
            self._skews_ms[broker] = skew_ms

    def fail_over(self, place: TopicPartition, *, leader: int) -> None:
        """Give a partition another leader, with the next leader epoch."""
        with self.changed:
            self.settle()
            log = self.log(place)
            log.leader = leader
            log.leader_epoch += 1
            log.epochs.append((log.leader_epoch, log.end))

    def truncate(self, place: TopicPartition, *, end: int, leader: int) -> None:
        """Lose the records from ``end`` on: an unclean election of ``leader``."""
        with self.changed:
            self.settle()
            log = self.log(place)
            assert log.start <= end <= log.end
            log.records = [each for each in log.records if each.offset < end]
            log.end = end
            log.epochs = [each for each in log.epochs if each[1] < end] or [(0, 0)]
            log.leader, log.leader_epoch = leader, log.leader_epoch + 1
            log.epochs.append((log.leader_epoch, end))

    def delete_records(self, place: TopicPartition, *, before: int) -> None:
        """Move a log's start, as retention does."""
        with self.changed:
            self.settle()
            log = self.log(place)
            assert log.start <= before <= log.end
            log.start = before
            log.records = [each for each in log.records if each.offset >= before]

    def skip_offsets(self, place: TopicPartition, *, count: int = 1) -> None:
        """Use up offsets without a record for readers, as control records do."""
        with self.changed:
            self.settle()
            self.log(place).end += count
            self.changed.notify_all()

    def produce(
        self,
        place: TopicPartition,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: tuple[tuple[str, bytes], ...] = (),
        timestamp_ms: int | None = None,
        timestamp_type: int | None = None,
    ) -> int:
        """Write a record as some other client, at once.

        Args:
            place: Where.
            value: Value; None is a tombstone.
            key: Key.
            headers: Headers.
            timestamp_ms: What the writer says; the leader's clock wins where
                the topic has LogAppendTime.
            timestamp_type: Overrides the topic's, as if it had been set wrong.

        Returns:
            Its offset.
        """
        with self.changed:
            self.settle()
            log = self.log(place)
            kind = timestamp_type
            if kind is None:
                kind = self.topic(place.topic).timestamp_type
            stamp = self._leader_wall_ms(log, self.clock.now_ms())
            if kind != TimestampType.LOG_APPEND_TIME and timestamp_ms is not None:
                stamp = timestamp_ms
            return self._write(
                log, value, key=key, headers=headers, stamp=(stamp, int(kind))
            )

    # Handles.

    def coordination_log(
        self, topic: str = "__marshal", *, name: str = ""
    ) -> "FakeCoordinationLog":
        """Return a client's session with a coordination topic, from its start.

        Args:
            topic: The topic.
            name: What the fate policy knows this writer as.

        Raises:
            TopicMisconfigured: There is no such topic.
        """
        with self.changed:
            if not self.has_topic(topic):
                raise TopicMisconfigured(
                    f"There is no coordination topic {topic}. Make it with `marshal "
                    "topic format`.",
                    problems=(f"topic {topic} does not exist",),
                )
            writer = name or f"writer-{next(self._writers)}"
            return FakeCoordinationLog(self, topic, name=writer)

    def data_log(self) -> "FakeDataLog":
        """Return a client's session for data topics and group offsets."""
        from kafka_marshal.testing.fakedata import FakeDataLog

        return FakeDataLog(self)

    # For handles.

    def settle(self) -> None:
        """Let everything happen that is due by now."""
        with self.changed:
            now_ms = self.clock.now_ms()
            while self._pending and self._pending[0].lands_ms <= now_ms:
                self._land(heapq.heappop(self._pending))

    def schedule(
        self, place: TopicPartition, value: bytes, *, lands_ms: int, copies: int,
        append: _FakeAppend,
    ) -> None:  # fmt: skip
        """Have an append land at a time."""
        with self.changed:
            item = _Pending(
                lands_ms=lands_ms,
                number=next(self._sequence),
                topic=place.topic,
                partition=place.partition,
                value=value,
                copies=copies,
                append=append,
            )
            heapq.heappush(self._pending, item)
            self.changed.notify_all()

    def wait(self, deadline: float) -> bool:
        """Wait for a change on real time; False at once where time is virtual.

        Args:
            deadline: When to give up, on ``time.monotonic``.
        """
        left_s = deadline - time.monotonic()
        if self.is_virtual or left_s <= 0:
            return False
        if self._pending:
            due_s = (self._pending[0].lands_ms - self.clock.now_ms()) / 1000
            left_s = min(left_s, max(0.001, due_s))
        self.changed.wait(timeout=left_s)
        return True

    def _leader_wall_ms(self, log: Partition, at_ms: int) -> int:
        """Return a leader's wall clock at a moment of true time."""
        wall_ms = self.clock.wall_ms() - (self.clock.now_ms() - at_ms)
        return wall_ms + self._skews_ms.get(log.leader, 0)

    def _land(self, item: _Pending) -> None:
        try:
            log = self.log(TopicPartition(item.topic, item.partition))
        except CoordinationError as error:
            item.append.refusal = error
            return
        stamp = self._leader_wall_ms(log, item.lands_ms)
        kind = int(self.topic(item.topic).timestamp_type)
        for copy in range(item.copies):
            offset = self._write(
                log,
                item.value,
                key=None,
                headers=(),
                stamp=(stamp, kind),
                landed_ms=item.lands_ms,
            )
            if copy == 0:
                item.append.landed = (offset, item.lands_ms)

    def _write(
        self,
        log: Partition,
        value: bytes | None,
        *,
        key: bytes | None,
        headers: tuple[tuple[str, bytes], ...],
        stamp: tuple[int, int],
        landed_ms: int | None = None,
    ) -> int:
        offset = log.end
        record = Stored(
            offset=offset,
            leader_epoch=log.leader_epoch,
            timestamp_ms=stamp[0],
            timestamp_type=stamp[1],
            key=key,
            value=value,
            headers=headers,
            landed_ms=self.clock.now_ms() if landed_ms is None else landed_ms,
        )
        log.records.append(record)
        log.end = offset + 1
        self.changed.notify_all()
        return offset


class FakeCoordinationLog(CoordinationLog):
    """One client's session with a coordination topic of a ``FakeKafka``.

    Attributes:
        name: What the fate policy knows this writer as.
        cut: Whether the network between this client and the cluster is cut.
            Reads then find nothing and questions fail; appends wait, and land
            when it heals within the delivery timeout.
        read_lag_ms: How much later than others this client sees records.
        poll_entries_max: How many entries one ``poll`` returns at most.
        topic_id: Id of the topic when it was opened.
        cluster_id: Id of the cluster.
    """

    def __init__(self, cluster: FakeKafka, topic: str, *, name: str) -> None:
        """Stand at each partition's start."""
        self.name = name
        self.read_lag_ms = 0
        self.poll_entries_max = 5_000
        self.delivery_timeout_ms = DELIVERY_TIMEOUT_MS
        self.cluster_id = cluster.cluster_id
        self.topic_id: bytes | None = cluster.topic(topic).topic_id
        self._cluster = cluster
        self._topic = topic
        self._is_cut = False
        self._held: list[tuple[TopicPartition, bytes, _FakeAppend]] = []
        logs = cluster.topic(topic).partitions
        self._next = [log.start for log in logs]
        self._epochs: list[int | None] = [None] * len(logs)
        self._lands_ms = [0] * len(logs)
        self._fault: MarshalError | None = None
        self._is_closed = False

    @property
    def cut(self) -> bool:
        """Whether the network is cut."""
        return self._is_cut

    @cut.setter
    def cut(self, value: bool) -> None:
        with self._cluster.changed:
            self._is_cut = value
            if value:
                return
            now_ms = self._cluster.clock.now_ms()
            held, self._held = self._held, []
            for place, record, append in held:
                if append.fails_ms > now_ms:
                    self._cluster.schedule(
                        place, record, lands_ms=now_ms, copies=1, append=append
                    )
            self._cluster.settle()

    def configure(
        self, heartbeat_interval_ms: int, *, timeout_ms: int = DELIVERY_TIMEOUT_MS
    ) -> None:
        """Adapt the delivery timeout to H (PROTOCOL 2.1)."""
        del timeout_ms
        self.delivery_timeout_ms = heartbeat_interval_ms // 2

    @property
    def partition_count(self) -> int:
        """Number of partitions that the topic had when it was opened."""
        return len(self._next)

    def append(self, partition: int, value: bytes) -> Append:
        """Start appending one record; its fate is the policy's."""
        cluster = self._cluster
        with cluster.changed:
            cluster.settle()
            now_ms = cluster.clock.now_ms()
            timeout_ms = now_ms + self.delivery_timeout_ms
            append = _FakeAppend(cluster, fails_ms=timeout_ms)
            place = TopicPartition(self._topic, partition)
            if self._is_closed or not 0 <= partition < self.partition_count:
                append.refusal = InvalidTransition(f"Cannot append to {place}.")
                return append
            if self._is_cut:
                self._held.append((place, value, append))
                return append
            fate = cluster.policy.of_append(self.name, partition)
            lands_ms = now_ms + fate.delay_ms
            if fate.fails_after_ms is not None:
                append.fails_ms = now_ms + fate.fails_after_ms
                append.is_sure_to_fail = True
            if fate.is_lost:
                return append
            if append.fails_ms > lands_ms:
                # In order; but one that was given up on holds up no other.
                lands_ms = max(lands_ms, self._lands_ms[partition])
                self._lands_ms[partition] = lands_ms
            cluster.schedule(
                place, value, lands_ms=lands_ms, copies=fate.copies, append=append
            )
            cluster.settle()
            return append

    def poll(self, timeout_ms: int) -> Sequence[tuple[int, LogEntry]]:
        """Return new entries; see ``ports.CoordinationLog``."""
        deadline = time.monotonic() + timeout_ms / 1000
        with self._cluster.changed:
            while True:
                if self._fault is not None:
                    raise self._fault
                self._require_open()
                self._cluster.settle()
                entries = [] if self._is_cut else self._read()
                if entries or not self._cluster.wait(deadline):
                    return entries

    def positions(self) -> Mapping[int, int]:
        """Return the next offset that ``poll`` will look at, per partition."""
        return dict(enumerate(self._next))

    def start_offsets(self, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offset that exists, per partition."""
        return {number: log.start for number, log in self._ask(timeout_ms)}

    def end_offsets(self, timeout_ms: int) -> Mapping[int, int]:
        """Return the next offset to be written, per partition (a barrier)."""
        return {number: log.end for number, log in self._ask(timeout_ms)}

    def close(self, timeout_ms: int) -> None:
        """Let go. Idempotent; appends on their way still land."""
        del timeout_ms
        with self._cluster.changed:
            self._is_closed = True
            self._cluster.changed.notify_all()

    def _require_open(self) -> None:
        if self._is_closed:
            raise InvalidTransition(f"The session with {self._topic} is closed.")

    def _logs(self) -> list[tuple[int, Partition]]:
        partitions = self._cluster.topic(self._topic).partitions
        return list(enumerate(partitions[: self.partition_count]))

    def _ask(self, timeout_ms: int) -> list[tuple[int, Partition]]:
        with self._cluster.changed:
            self._require_open()
            self._cluster.settle()
            if self._is_cut:
                raise CoordinationError(f"No answer within {timeout_ms} ms: cut off.")
            return self._logs()

    def _read(self) -> list[tuple[int, LogEntry]]:
        """Return what lies beyond our positions, and check that nothing went back."""
        entries: list[tuple[int, LogEntry]] = []
        seen_ms = self._cluster.clock.now_ms() - self.read_lag_ms
        for number, log in self._logs():
            self._check(number, log)
            room = self.poll_entries_max - len(entries)
            is_all = True
            for stored in log.read(self._next[number], room + 1):
                if stored.landed_ms > seen_ms or room == 0:
                    is_all = False
                    break
                room -= 1
                entries.append((number, stored.entry()))
                self._next[number] = stored.offset + 1
                self._epochs[number] = stored.leader_epoch
            if is_all and self._next[number] < log.end:
                # Control records at the end are passed without a trace.
                self._next[number] = log.end
                self._epochs[number] = log.epoch_at(log.end - 1)
        return entries

    def _check(self, number: int, log: Partition) -> None:
        position, epoch = self._next[number], self._epochs[number]
        if epoch is None:
            self._next[number] = position = max(position, log.start)
        is_cut_off = epoch is not None and log.epoch_end(epoch) < position
        if position > log.end or position < log.start or is_cut_off:
            self._fault = LogTruncated(
                f"{self._topic}-{number} went back: position {position}, but the log "
                f"has {log.start} to {log.end}. Read it anew from its start."
            )
            raise self._fault
