"""A Kafka cluster in memory: coordination topics, data topics, group offsets.

It behaves like the real one in everything that the protocol depends on: LogAppendTime
is the raw wall clock of a partition's leader, leader epochs grow with each failover, a
truncation shows in its epochs, and an append may be late, lost, duplicated, or reported
as failed and land all the same. One conformance kit tests both it and a real broker.

With a ``VirtualClock`` no call ever blocks, and due changes happen at the next call of
any method. With any other clock ``poll`` waits in real time, and handles may be used
from several threads.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.errors import (
    CoordinationError,
    TopicMisconfigured,
)
from kafka_marshal.ports import READ_UNCOMMITTED, Clock, LogRange
from kafka_marshal.protocol.types import TimestampType, TopicPartition
from kafka_marshal.testing.clock import BrokerClocks, VirtualClock
from kafka_marshal.testing.fakestore import (
    AppendFate,
    FakeAppend,
    FatePolicy,
    Partition,
    Pending,
    Prompt,
    Stored,
    Topic,
)

if TYPE_CHECKING:
    from kafka_marshal.testing.fakedata import FakeDataLog
    from kafka_marshal.testing.fakesession import FakeCoordinationLog

__all__ = ["AppendFate", "FakeKafka", "FatePolicy"]


class FakeKafka:
    """One cluster in memory.

    Attributes:
        clock: True time of the cluster.
        clocks: The brokers' own clocks.
        cluster_id: An id that no other cluster of this process has.
        groups: Committed offsets by group.
        changes: Grows with each record that is sent or written.
        changed: Notified of each change.
        lock: The lock of ``changed``; acquiring it directly is several times faster.
        busy_groups: Groups with active members: only these may set their offsets.
    """

    _numbers = itertools.count(1)

    def __init__(
        self, clock: Clock | None = None, *, policy: FatePolicy | None = None
    ) -> None:
        """Make an empty cluster.

        Args:
            clock: Time; a fresh ``VirtualClock`` without it.
            policy: Fate of appends; by default each lands at once.
        """
        self.clock = clock if clock is not None else VirtualClock()
        self.policy: FatePolicy = policy if policy is not None else Prompt()
        self.is_virtual = isinstance(self.clock, VirtualClock)
        self.cluster_id = f"fake-{next(self._numbers)}"
        self.groups: dict[str, dict[TopicPartition, int]] = {}
        self.busy_groups: set[str] = set()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.changes = 0
        self._topics: dict[str, Topic] = {}
        self.clocks = BrokerClocks(self.clock)
        self._pending: list[Pending] = []
        # Written by a leader, and not yet in its followers' logs.
        self._tails: dict[TopicPartition, list[tuple[int, Pending]]] = {}
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
            is_log_append_time: Whether the leader sets timestamps (as for a
                coordination topic) instead of the writer.
        """
        with self.lock:
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
        """Remove a topic; a new one of its name has another id."""
        with self.lock:
            del self._topics[name]
            self.changed.notify_all()

    def recreate_topic(self, name: str, partitions: int) -> None:
        """Delete a data topic and create it again, empty, with another topic id."""
        with self.lock:
            self.delete_topic(name)
            self.create_topic(name, partitions)

    def add_partitions(self, name: str, count: int) -> None:
        """Add ``count`` partitions to a topic."""
        with self.lock:
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

    def has_partition(self, place: TopicPartition) -> bool:
        """Return whether there is such a partition."""
        topic = self._topics.get(place.topic)
        return topic is not None and 0 <= place.partition < len(topic.partitions)

    def log(self, place: TopicPartition) -> Partition:
        """Return the log of a partition.

        Raises:
            CoordinationError: There is no such partition.
        """
        name, number = place
        partitions = self.topic(name).partitions
        if not 0 <= number < len(partitions):
            raise CoordinationError(f"There is no partition {place}; add it first.")
        return partitions[number]

    def range(
        self, place: TopicPartition, *, isolation_level: str = READ_UNCOMMITTED
    ) -> LogRange:
        """Return the offsets that exist in a partition, for readers of a level."""
        log = self.log(place)
        return LogRange(log.start, log.end_for(isolation_level))

    # Faults and foreign writers.

    def set_skew(self, broker: int, skew_ms: int) -> None:
        """Set how far a broker's wall clock is ahead of true time."""
        with self.lock:
            self.settle()
            self.clocks.set_ahead(broker, skew_ms)

    def fail_over(
        self, place: TopicPartition, *, leader: int, retry_ms: int | None = None
    ) -> int:
        """Give a partition another leader, with the next leader epoch.

        Args:
            place: The partition.
            leader: Broker that leads it from now on.
            retry_ms: Uncommitted records are lost, and their writers send them again
                after this time; None: the new leader has all of them.

        Returns:
            Number of records that are lost until then.
        """
        with self.lock:
            self.settle()
            log = self.log(place)
            now_ms = self.clock.now_ms()
            lost = [] if retry_ms is None else log.drop_uncommitted(now_ms)
            log.leader = leader
            log.leader_epoch += 1
            log.epochs.append((log.leader_epoch, log.end))
            tail = self._tails.pop(place, [])
            # Records that are not lost are committed later, and visible then.
            self._tails[place] = [each for each in tail if each[0] not in lost]
            for offset, item in tail:
                if retry_ms is not None and offset in lost:
                    item.append.landed = None
                    item.lands_ms = now_ms + retry_ms
                    heapq.heappush(self._pending, item)
            return len(lost)

    def truncate(self, place: TopicPartition, *, end: int, leader: int) -> None:
        """Lose the records from ``end`` on: an unclean election of ``leader``."""
        with self.lock:
            self.settle()
            log = self.log(place)
            assert log.start <= end <= log.end
            log.records = [each for each in log.records if each.offset < end]
            log.end = end
            self._tails.pop(place, None)
            log.epochs = [each for each in log.epochs if each[1] < end] or [(0, 0)]
            log.leader, log.leader_epoch = leader, log.leader_epoch + 1
            log.epochs.append((log.leader_epoch, end))

    def delete_records(self, place: TopicPartition, *, before: int) -> None:
        """Move a log's start, as retention does."""
        with self.lock:
            self.settle()
            log = self.log(place)
            assert log.start <= before <= log.end
            log.start = before
            log.records = [each for each in log.records if each.offset >= before]

    def skip_offsets(self, place: TopicPartition, *, count: int = 1) -> None:
        """Use up offsets without a record for readers, as control records do."""
        with self.lock:
            self.settle()
            self.log(place).end += count
            self.changed.notify_all()

    def produce_transaction(
        self, place: TopicPartition, values: Sequence[bytes], *, is_committed: bool
    ) -> None:
        """Write records in a transaction, and end it."""
        self.begin_transaction(place, values)
        self.end_transaction(place, is_committed=is_committed)

    def begin_transaction(self, place: TopicPartition, values: Sequence[bytes]) -> None:
        """Write the records of a transaction and leave it open; one at a time."""
        with self.lock:
            log = self.log(place)
            assert log.open_from is None
            log.open_from = log.end
            for value in values:
                self.produce(place, value)

    def end_transaction(self, place: TopicPartition, *, is_committed: bool) -> None:
        """End the open transaction of a partition by a control record."""
        with self.lock:
            log = self.log(place)
            assert log.open_from is not None
            if not is_committed:
                log.aborted.update(range(log.open_from, log.end))
            log.open_from = None
            self.skip_offsets(place)

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
            timestamp_ms: The writer's timestamp; with LogAppendTime the leader's clock
                replaces it.
            timestamp_type: Overrides the topic's type, as if that were misconfigured.

        Returns:
            Its offset.
        """
        with self.lock:
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
        self, topic: str = COORDINATION_TOPIC, *, name: str = ""
    ) -> "FakeCoordinationLog":
        """Return a client's session with a coordination topic, from its start.

        Args:
            topic: The topic.
            name: Name of this writer for the fate policy.

        Raises:
            TopicMisconfigured: There is no such topic.
        """
        with self.lock:
            if not self.has_topic(topic):
                raise TopicMisconfigured(
                    f"There is no coordination topic {topic}. Check its name; for a "
                    f"new one, run: marshal topic format --coordination-topic {topic}",
                    problems=(f"topic {topic} does not exist",),
                )
            from kafka_marshal.testing.fakesession import FakeCoordinationLog

            writer = name or f"writer-{next(self._writers)}"
            return FakeCoordinationLog(self, topic, name=writer)

    def data_log(self) -> "FakeDataLog":
        """Return a client's session for data topics and group offsets."""
        from kafka_marshal.testing.fakedata import FakeDataLog

        return FakeDataLog(self)

    # For handles.

    def settle(self) -> None:
        """Apply all changes that are due by now."""
        if not self._pending:
            return
        with self.lock:
            now_ms = self.clock.now_ms()
            while self._pending and self._pending[0].lands_ms <= now_ms:
                self._land(heapq.heappop(self._pending))

    def next_change_ms(self) -> int | None:
        """Return when the next record lands or is committed, None if none is due."""
        now_ms = self.clock.now_ms()
        due = [self._pending[0].lands_ms] if self._pending else []
        for place, tail in self._tails.items():
            committed_ms = self.log(place).next_commit_ms(now_ms) if tail else None
            if committed_ms is not None:
                due.append(committed_ms)
        return min(due, default=None)

    def schedule(
        self, place: TopicPartition, value: bytes, *, lands_ms: int, fate: AppendFate,
        append: FakeAppend,
    ) -> None:  # fmt: skip
        """Schedule when an append lands, with its copies and its commit."""
        with self.lock:
            item = Pending(
                lands_ms=lands_ms,
                number=next(self._sequence),
                topic=place.topic,
                partition=place.partition,
                value=value,
                fate=fate,
                append=append,
                sent_epoch=self.log(place).leader_epoch,
            )
            heapq.heappush(self._pending, item)
            self.changes += 1
            self.changed.notify_all()

    def wait(self, deadline: float) -> bool:
        """Wait for a change in real time; with virtual time return False at once.

        Args:
            deadline: Latest return, on ``time.monotonic``.
        """
        if self.is_virtual:
            return False
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        if self._pending:
            due_s = (self._pending[0].lands_ms - self.clock.now_ms()) / 1000
            left_s = min(left_s, max(0.001, due_s))
        self.changed.wait(timeout=left_s)
        return True

    def _leader_wall_ms(self, log: Partition, at_ms: int) -> int:
        """Return a leader's wall clock at a moment of true time."""
        return self.clocks.wall_ms(log.leader, at_ms)

    def _land(self, item: Pending) -> None:
        place = TopicPartition(item.topic, item.partition)
        try:
            log = self.log(place)
        except CoordinationError as error:
            item.append.refusal = error
            return
        stamp = self._leader_wall_ms(log, item.lands_ms)
        kind = int(self.topic(item.topic).timestamp_type)
        committed_ms = item.lands_ms + item.fate.replicates_ms
        for copy in range(item.fate.copies):
            offset = self._write(
                log,
                item.value,
                key=None,
                headers=(),
                stamp=(stamp, kind),
                landed_ms=committed_ms,
            )
            stored = log.records[-1]
            stored.sent_epoch = item.sent_epoch
            stored.is_ghost = stored.landed_ms > item.append.fails_ms
            if copy == 0:
                item.append.landed = (offset, stored.landed_ms)
                self._follow(place, offset, item)

    def _follow(self, place: TopicPartition, offset: int, item: Pending) -> None:
        """Store records that followers do not have yet: a failover may lose them."""
        now_ms = self.clock.now_ms()
        log = self.log(place)
        tail = [each for each in self._tails.get(place, ()) if
                each[0] >= log.high_watermark(now_ms)]  # fmt: skip
        if log.records[-1].landed_ms > now_ms:
            tail.append((offset, item))
        self._tails[place] = tail

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
        committed_ms = self.clock.now_ms() if landed_ms is None else landed_ms
        if log.records:  # followers copy in order
            committed_ms = max(committed_ms, log.records[-1].landed_ms)
        record = Stored(
            offset=offset,
            leader_epoch=log.leader_epoch,
            timestamp_ms=stamp[0],
            timestamp_type=stamp[1],
            key=key,
            value=value,
            headers=headers,
            landed_ms=committed_ms,
        )
        log.records.append(record)
        log.end = offset + 1
        self.changes += 1
        self.changed.notify_all()
        return offset
