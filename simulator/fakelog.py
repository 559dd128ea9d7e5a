"""A Kafka cluster in memory: coordination topics, data topics, group offsets.

It behaves like a real cluster in everything that the protocol depends on: LogAppendTime
is the raw wall clock of a partition's leader, leader epochs grow with each failover, a
truncation shows in the epochs, and an append may be late, lost, duplicated, or reported
as failed and still be written. The same checks test it and a real broker.

With a ``VirtualClock`` no call ever blocks, and due changes happen at the next call of
any method. With any other clock ``poll`` waits in real time, and handles may be used
from several threads.
"""

import heapq
import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kafka_marshal.deadline import Deadline
from kafka_marshal.defaults import COORDINATION_TOPIC, format_command
from kafka_marshal.errors import (
    CoordinationError,
    InvalidTransition,
    LogTruncated,
    TopicMisconfigured,
)
from kafka_marshal.ports import (
    READ_UNCOMMITTED,
    Append,
    Clock,
    CoordinationLog,
    LogRange,
)
from kafka_marshal.protocol.types import LogEntry, TimestampType, TopicPartition
from simulator.clock import BrokerClocks, VirtualClock
from simulator.fakestore import (
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
    from kafka_marshal.outgoing import SourceProgress
    from simulator.fakedata import FakeDataLog

__all__ = ["AppendFate", "FakeCoordinationLog", "FakeKafka", "FatePolicy"]

DELIVERY_TIMEOUT_MS = 30_000


class FakeKafka:
    """One cluster in memory.

    Attributes:
        clock: True time of the cluster.
        clocks: The brokers' own clocks.
        cluster_id: An id that no other cluster of this process has.
        groups: Committed offsets by group.
        changes: Number that grows with each record that is sent or written, and with
            each addition of partitions.
        changed: Notified of each change.
        lock: The lock of ``changed``; acquiring it directly is several times faster.
        busy_groups: Groups with active members: only the members may set offsets.
    """

    _numbers = itertools.count(1)

    def __init__(
        self, clock: Clock | None = None, *, policy: FatePolicy | None = None
    ) -> None:
        """Make an empty cluster.

        Args:
            clock: Time; by default a new ``VirtualClock``.
            policy: Decides the fate of appends; by default each lands at once.
        """
        self.clock = clock if clock is not None else VirtualClock()
        self.policy: FatePolicy = policy if policy is not None else Prompt()
        self.is_virtual = isinstance(self.clock, VirtualClock)
        self.cluster_id = f"fake-{next(self._numbers)}"
        self.groups: dict[str, dict[TopicPartition, int]] = {}
        # Transactions: the last producer of each id, and committed progress.
        self.writers: dict[str, object] = {}
        self.progress: dict[tuple[str, TopicPartition], SourceProgress] = {}
        self.busy_groups: set[str] = set()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.changes = 0
        self._topics: dict[str, Topic] = {}
        self.clocks = BrokerClocks(self.clock)
        self._pending: list[Pending] = []
        # Records that a leader wrote and its followers do not have yet.
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
            self.changes += 1
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
                    f"new one, run: {format_command(topic)}",
                    problems=(f"topic {topic} does not exist",),
                )

            writer = name or f"writer-{next(self._writers)}"
            return FakeCoordinationLog(self, topic, name=writer)

    def data_log(self) -> "FakeDataLog":
        """Return a client's session for data topics and group offsets."""
        from simulator.fakedata import FakeDataLog

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

    def wait(self, deadline: Deadline) -> bool:
        """Wait for a change in real time; with virtual time return False at once."""
        if self.is_virtual or deadline.is_over:
            return False
        left_s = deadline.left_s
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
        """Keep the records that followers do not have yet: a failover may lose them."""
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


class FakeCoordinationLog(CoordinationLog):
    """One client's session with a coordination topic of a ``FakeKafka``.

    Attributes:
        name: Name of this writer for the fate policy.
        cut: Whether the network between this client and the cluster is cut.
            Reads then return nothing and look-ups fail; appends wait, and land
            if it is restored within the delivery timeout.
        read_lag_ms: Delay with which this client sees records.
        lags_ms: Such delays of single partitions, if longer.
        poll_entries_max: Maximum number of entries that one ``poll`` returns.
        topic: Name of the topic.
        topic_id: Id of the topic when the session was opened.
        cluster_id: Id of the cluster.
        on_append: Called for each record sent: partition, value, append.
    """

    def __init__(self, cluster: FakeKafka, topic: str, *, name: str) -> None:
        """Start at the beginning of each partition."""
        self.name = name
        self.read_lag_ms = 0
        self.lags_ms: dict[int, int] = {}
        self.poll_entries_max = 5_000
        self.delivery_timeout_ms = DELIVERY_TIMEOUT_MS
        self.cluster_id = cluster.cluster_id
        self.topic = topic
        self.topic_id: bytes | None = cluster.topic(topic).topic_id
        self.on_append: Callable[[int, bytes, Append], None] | None = None
        self._cluster = cluster
        self._topic = topic
        self._is_cut = False
        self._held: list[tuple[TopicPartition, bytes, FakeAppend]] = []
        logs = cluster.topic(topic).partitions
        self._next = [log.start for log in logs]
        self._epochs: list[int | None] = [None] * len(logs)
        self._has_kept = False
        self._lands_ms = [0] * len(logs)
        self._is_closed = False

    @property
    def cut(self) -> bool:
        """Whether the network is cut."""
        return self._is_cut

    @cut.setter
    def cut(self, value: bool) -> None:
        with self._cluster.lock:
            self._is_cut = value
            if value:
                return
            now_ms = self._cluster.clock.now_ms()
            held, self._held = self._held, []
            for place, record, append in held:
                if append.fails_ms > now_ms:
                    self._cluster.schedule(
                        place, record, lands_ms=now_ms, fate=AppendFate(), append=append
                    )
            self._cluster.settle()

    def configure(
        self, heartbeat_interval_ms: int, *, timeout_ms: int = DELIVERY_TIMEOUT_MS
    ) -> None:
        """Adapt the delivery timeout to the heartbeat interval (PROTOCOL 2.1)."""
        del timeout_ms
        self.delivery_timeout_ms = heartbeat_interval_ms // 2

    @property
    def partition_count(self) -> int:
        """Number of partitions that the topic had when it was opened, or added."""
        return len(self._next)

    def read_added(
        self, partition_count: int, *, timeout_ms: int = DELIVERY_TIMEOUT_MS
    ) -> None:
        """Read partitions that were added; see ``ports.CoordinationLog``."""
        with self._cluster.lock:
            self._require_open()
            logs = self._cluster.topic(self._topic).partitions[:partition_count]
            if self._is_cut or len(logs) < partition_count:
                raise CoordinationError(
                    f"{self._topic} shows less than {partition_count} partitions "
                    f"within {timeout_ms} ms."
                )
            for log in logs[len(self._next) :]:
                self._next.append(log.start)
                self._epochs.append(None)
                self._lands_ms.append(0)

    def append(self, partition: int, value: bytes) -> Append:
        """Start appending one record; the policy decides its fate."""
        append = self._append(partition, value)
        if self.on_append is not None:
            self.on_append(partition, value, append)
        return append

    def _append(self, partition: int, value: bytes) -> FakeAppend:
        cluster = self._cluster
        with cluster.lock:
            cluster.settle()
            now_ms = cluster.clock.now_ms()
            timeout_ms = now_ms + self.delivery_timeout_ms
            append = FakeAppend(cluster, fails_ms=timeout_ms)
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
                # In order, except that a failed append does not delay later ones.
                lands_ms = max(lands_ms, self._lands_ms[partition])
                self._lands_ms[partition] = lands_ms
            cluster.schedule(place, value, lands_ms=lands_ms, fate=fate, append=append)
            cluster.settle()
            return append

    def poll(self, timeout_ms: int) -> Sequence[tuple[int, LogEntry]]:
        """Return new entries; see ``ports.CoordinationLog``."""
        deadline = Deadline(timeout_ms)
        with self._cluster.lock:
            while True:
                self._require_open()
                self._cluster.settle()
                entries = [] if self._is_cut else self._read()
                if entries or not self._cluster.wait(deadline):
                    return entries

    def read_from(self, offsets: Mapping[int, int]) -> None:
        """Continue at other offsets; see ``ports.CoordinationLog``."""
        with self._cluster.lock:
            self._require_open()
            for number, offset in offsets.items():
                self._next[number], self._epochs[number] = offset, None
            self._has_kept = True

    def positions(self) -> Mapping[int, int]:
        """Return the next offset that ``poll`` will read, per partition."""
        return dict(enumerate(self._next))

    def start_offsets(self, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offset that exists, per partition."""
        return {number: log.start for number, log in self._ask(timeout_ms)}

    def offsets_for_times(self, time_ms: int, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offset with this timestamp or a later one, per partition."""
        now_ms = self._cluster.clock.now_ms()
        found = {}
        for number, log in self._ask(timeout_ms):
            visible = (each for each in log.records if each.landed_ms <= now_ms)
            at = (each.offset for each in visible if each.timestamp_ms >= time_ms)
            offset = next(at, None)
            if offset is not None:
                found[number] = offset
        return found

    def end_offsets(
        self, timeout_ms: int, partitions: Collection[int] | None = None
    ) -> Mapping[int, int]:
        """Return the next offset to be written, per partition (a barrier)."""
        now_ms = self._cluster.clock.now_ms()
        logs = self._ask(timeout_ms)
        return {
            number: log.high_watermark(now_ms)
            for number, log in logs
            if partitions is None or number in partitions
        }

    def close(self, timeout_ms: int) -> None:
        """Close the session. Idempotent; appends in flight still land."""
        del timeout_ms
        with self._cluster.lock:
            self._is_closed = True
            self._cluster.changed.notify_all()

    def _require_open(self) -> None:
        if self._is_closed:
            raise InvalidTransition(f"The session with {self._topic} is closed.")

    def _logs(self) -> list[tuple[int, Partition]]:
        partitions = self._cluster.topic(self._topic).partitions
        return list(enumerate(partitions[: len(self._next)]))

    def _ask(self, timeout_ms: int) -> list[tuple[int, Partition]]:
        with self._cluster.lock:
            self._require_open()
            self._cluster.settle()
            if self._is_cut:
                raise CoordinationError(f"No answer within {timeout_ms} ms: cut off.")
            return self._logs()

    def _read(self) -> list[tuple[int, LogEntry]]:
        """Return entries from the positions on; check that no log went back."""
        entries: list[tuple[int, LogEntry]] = []
        now_ms = self._cluster.clock.now_ms()
        # Check all logs first: entries that are read must be returned.
        logs = self._logs()
        for number, log in logs:
            is_same = self._epochs[number] == log.leader_epoch
            if not is_same or not log.start <= self._next[number] <= log.end:
                self._check(number, log)
        for number, log in logs:
            if self._next[number] >= log.end:
                continue
            room = self.poll_entries_max - len(entries)
            seen_ms = now_ms - max(self.read_lag_ms, self.lags_ms.get(number, 0))
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
                # Skip control records at the end.
                self._next[number] = log.end
                self._epochs[number] = log.epoch_at(log.end - 1)
        return entries

    def _check(self, number: int, log: Partition) -> None:
        position, epoch = self._next[number], self._epochs[number]
        if epoch is None and not self._has_kept:
            self._next[number] = position = max(position, log.start)
        is_cut_off = epoch is not None and log.epoch_end(epoch) < position
        if position > log.end or position < log.start or is_cut_off:
            raise LogTruncated(
                f"{self._topic}-{number} went back: position {position}, but the log "
                f"has {log.start} to {log.end}. Read it again from its start.",
                partition=number,
            )
