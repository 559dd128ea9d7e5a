"""A client's session with a coordination topic of a ``FakeKafka``."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from kafka_marshal.errors import (
    CoordinationError,
    InvalidTransition,
    LogTruncated,
)
from kafka_marshal.ports import Append, CoordinationLog
from kafka_marshal.protocol.types import LogEntry, TopicPartition
from kafka_marshal.testing.fakelog import FakeKafka
from kafka_marshal.testing.fakestore import AppendFate, FakeAppend, Partition

DELIVERY_TIMEOUT_MS = 30_000


class FakeCoordinationLog(CoordinationLog):
    """One client's session with a coordination topic of a ``FakeKafka``.

    Attributes:
        name: Name of this writer for the fate policy.
        cut: Whether the network between this client and the cluster is cut.
            Reads then return nothing and look-ups fail; appends wait, and land
            if it is restored within the delivery timeout.
        read_lag_ms: Delay with which this client sees records.
        lags_ms: Such a delay of single partitions, where it is longer.
        poll_entries_max: Most entries that one ``poll`` returns.
        topic: Its name.
        topic_id: Id of the topic when it was opened.
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
        deadline = time.monotonic() + timeout_ms / 1000
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
