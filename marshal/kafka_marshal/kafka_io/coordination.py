"""The coordination topic on a real cluster: ``ports.CoordinationLog``.

One consumer with all partitions assigned (a single fetch session) reads; a
``Writer`` writes. Both follow PROTOCOL 2.1 to the letter, because the defaults of
kafka-python would rewind silently after a truncation and could turn idempotence
off without an error.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaTopicPartition
from kafka import errors as kafka_errors

from kafka_marshal.errors import (
    InvalidTransition,
    LogTruncated,
    LogUnreadable,
    MarshalError,
    TopicMisconfigured,
)
from kafka_marshal.kafka_io.connecting import connected
from kafka_marshal.kafka_io.lookups import forked
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.kafka_io.translate import Access, translated
from kafka_marshal.kafka_io.untyped import Untyped
from kafka_marshal.kafka_io.writer import Writer, left_ms
from kafka_marshal.ports import Append, CoordinationLog
from kafka_marshal.protocol.types import LogEntry

OPEN_TIMEOUT_MS = 30_000
READER_REQUEST_TIMEOUT_MS = 10_000
# Until H is read from the log, writers go by the protocol's default H of 60 s.
HEARTBEAT_INTERVAL_MS_DEFAULT = 60_000
FETCH_WAIT_MS = 250
# More than a poll can hand on quickly is no gain; a cold start polls often.
ENTRIES_PER_POLL = 5_000
_LEADER_EPOCH_NONE = -1


class KafkaCoordinationLog(CoordinationLog):
    """All partitions of the coordination topic, read from their starts.

    Opening it connects. ``append`` may be called from any thread, the other
    calls from one thread at a time, all from the process that opened it.

    Attributes:
        cluster_id: Id of the cluster it was opened on.
        topic_id: Id of the topic (16 bytes) when it was opened, or None.
        description: What the cluster said of the topic when it was opened.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        heartbeat_interval_ms: int = HEARTBEAT_INTERVAL_MS_DEFAULT,
        timeout_ms: int = OPEN_TIMEOUT_MS,
    ) -> None:
        """Connect, and stand at each partition's start.

        Args:
            settings: Where the cluster is, and the topic's name.
            heartbeat_interval_ms: H where it is known; ``configure`` changes it.
            timeout_ms: When to give up.

        Raises:
            TopicMisconfigured: There is no such topic.
            LogUnreadable: Access is denied.
            CoordinationError: The cluster did not answer.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        self._settings = settings
        self._topic = settings.coordination_topic
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._consumer: Any = None
        self._writer: Writer | None = None
        self._fault: MarshalError | None = None
        self._is_closed = False
        self._look_up(deadline)
        self._partitions = [
            KafkaTopicPartition(self._topic, number)
            for number in range(self._partition_count)
        ]
        # The next offset and the last leader epoch of each partition.
        self._next = [0] * self._partition_count
        self._epochs = [_LEADER_EPOCH_NONE] * self._partition_count
        # The end of each partition, as last asked.
        self._ends = [0] * self._partition_count
        try:
            self._writer = Writer(
                settings,
                heartbeat_interval_ms=heartbeat_interval_ms,
                timeout_ms=left_ms(deadline),
            )
            self._consumer = self._new_consumer(deadline)
            self._go_to_start(deadline)
        except Exception as error:
            self.close(0)
            doing = f"Opening the coordination topic {self._topic}"
            raise self._told(error, doing, Access.READ) from error

    # The port.

    @property
    def partition_count(self) -> int:
        """Number of partitions that the topic had in Kafka when it was opened."""
        return self._partition_count

    def append(self, partition: int, value: bytes) -> Append:
        """Start appending one record; see ``ports.CoordinationLog``."""
        self._require_process("Appending")
        assert self._writer is not None
        return self._writer.append(partition, value)

    def poll(self, timeout_ms: int) -> Sequence[tuple[int, LogEntry]]:
        """Return new entries; see ``ports.CoordinationLog``.

        After LogTruncated and LogUnreadable this object is of no more use, and
        each further poll raises the same: close it and open another, which
        reads from the start.
        """
        self._require_process("Reading")
        if self._fault is not None:
            raise self._fault
        if self._is_closed:
            raise InvalidTransition(f"Reading {self._topic} failed: it is closed.")
        assert self._writer is not None
        self._writer.watch()
        try:
            batches = self._consumer.poll(timeout_ms=max(0, timeout_ms))
        except Exception as error:
            if self._is_early_retention(error, timeout_ms):
                return ()
            told = self._told(error, f"Reading {self._topic}", Access.READ)
            if not told.retriable:
                self._fault = told
            raise told from error
        entries: list[tuple[int, LogEntry]] = []
        for place, records in batches.items():
            self._take(place.partition, records, entries)
        return entries

    def positions(self) -> Mapping[int, int]:
        """Return the next offset that ``poll`` will look at, per partition."""
        self._require_process("Reading")
        for place in self._partitions:
            number = place.partition
            # Only a partition that seems to be behind can have control records
            # before it, which a poll passes without returning anything.
            if self._next[number] >= self._ends[number] or self._is_closed:
                continue
            try:
                at = self._consumer.position(place, timeout_ms=0)
            except kafka_errors.LogTruncationError as error:
                # kafka-python tells it once; the next poll must raise it.
                self._fault = self._told(error, "Reading", Access.READ)
                break
            except kafka_errors.KafkaError:
                continue
            self._next[number] = max(self._next[number], at or 0)
        return dict(enumerate(self._next))

    def start_offsets(self, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offset that exists, per partition."""
        return self._offsets(timeout_ms, is_end=False)

    def end_offsets(self, timeout_ms: int) -> Mapping[int, int]:
        """Return the next offset to be written, per partition (a barrier)."""
        return self._offsets(timeout_ms, is_end=True)

    def close(self, timeout_ms: int) -> None:
        """Flush appends for up to ``timeout_ms``, then let go. Idempotent.

        What is still under way then ends by itself within the delivery
        timeout, in the background. In a forked child nothing is touched.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            writer, consumer = self._writer, self._consumer
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + timeout_ms / 1000
        closer = threading.Thread(
            target=consumer.close if consumer is not None else int,
            kwargs={"autocommit": False} if consumer is not None else {},
            daemon=True,
        )
        closer.start()
        if writer is not None:
            writer.close(timeout_ms)
        closer.join(timeout=max(0.0, deadline - time.monotonic()))

    # Beyond the port.

    def configure(
        self, heartbeat_interval_ms: int, *, timeout_ms: int = OPEN_TIMEOUT_MS
    ) -> None:
        """Adapt the writer's timeouts to H, once H is read from the log.

        The best moment is before the first append: one that finds an earlier
        append to its partition under way fails at once, to keep the order.
        Without a change it does nothing.

        Args:
            heartbeat_interval_ms: H.
            timeout_ms: When to give up; the old timeouts then stay in force.

        Raises:
            CoordinationError: The cluster did not answer.
        """
        self._require_process("Configuring")
        assert self._writer is not None
        try:
            self._writer.configure(heartbeat_interval_ms, timeout_ms=timeout_ms)
        except Exception as error:
            doing = f"Connecting a writer to {self._topic}"
            raise self._told(error, doing, Access.WRITE) from error

    # How it is done.

    def _look_up(self, deadline: float) -> None:
        """Learn the topic's partitions and ids."""
        with KafkaTopicAdmin(self._settings) as admin:
            self.cluster_id = admin.cluster_id(timeout_ms=left_ms(deadline))
            try:
                found = admin.describe(self._topic, timeout_ms=left_ms(deadline))
            except LogUnreadable:
                # Members need no right to see the settings, only the topic.
                found = admin.describe_bare(self._topic, timeout_ms=left_ms(deadline))
        if not found.exists:
            raise TopicMisconfigured(
                f"There is no coordination topic {self._topic} on "
                f"{self._settings.addresses}. Make it with `marshal topic format`.",
                problems=(f"topic {self._topic} does not exist",),
            )
        self._partition_count = found.partition_count
        self.topic_id = found.topic_id
        self.description = found

    def _new_consumer(self, deadline: float) -> Untyped:
        settings = {
            **self._settings.client_config(),
            "group_id": None,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            "isolation_level": "read_uncommitted",
            "allow_auto_create_topics": False,
            "fetch_min_bytes": 1,
            "fetch_max_wait_ms": FETCH_WAIT_MS,
            "max_poll_records": ENTRIES_PER_POLL,
            "request_timeout_ms": READER_REQUEST_TIMEOUT_MS,
            "metrics_enabled": False,
            "bootstrap_timeout_ms": left_ms(deadline),
        }
        consumer = connected(KafkaConsumer, settings)
        consumer.assign(self._partitions)
        return consumer

    def _go_to_start(self, deadline: float) -> None:
        starts = self._consumer.beginning_offsets(
            self._partitions, timeout_ms=left_ms(deadline)
        )
        for place, start in starts.items():
            self._next[place.partition] = start
            self._consumer.seek(place, start)

    def _take(
        self,
        partition: int,
        records: Sequence[Any],
        entries: list[tuple[int, LogEntry]],
    ) -> None:
        """Check one partition's records and turn them into entries."""
        next_offset, epoch = self._next[partition], self._epochs[partition]
        for record in records:
            record_epoch = record.leader_epoch
            if record_epoch is None or record_epoch < 0:
                self._fault = LogUnreadable(
                    f"{self._topic}-{partition} has a record at offset {record.offset} "
                    "without a leader epoch. Its brokers are older than Apache Kafka "
                    "0.11, or its message format is; use a newer cluster."
                )
                raise self._fault
            # PROTOCOL 2.1: offset and leader epoch never go back.
            if record.offset < next_offset or record_epoch < epoch:
                self._fault = LogTruncated(
                    f"{self._topic}-{partition} went back: offset {record.offset} of "
                    f"leader epoch {record_epoch} came after offset {next_offset - 1} "
                    f"of leader epoch {epoch}. Read the log anew from its start."
                )
                raise self._fault
            next_offset, epoch = record.offset + 1, record_epoch
            entry = LogEntry(
                record.offset,
                record_epoch,
                record.timestamp,
                record.timestamp_type,
                record.value,
            )
            entries.append((partition, entry))
        self._next[partition], self._epochs[partition] = next_offset, epoch

    def _is_early_retention(self, error: Exception, timeout_ms: int) -> bool:
        """Step over a start that retention moved before anything was read there.

        Between our asking for the start and the first fetch the broker may have
        deleted records. Nothing was folded, so nothing is lost.
        """
        if not isinstance(error, kafka_errors.OffsetOutOfRangeError) or not error.args:
            return False
        places = list(error.args[0])
        if any(self._epochs[place.partition] >= 0 for place in places):
            return False
        try:
            starts = self._consumer.beginning_offsets(
                places, timeout_ms=max(1, timeout_ms)
            )
        except kafka_errors.KafkaTimeoutError:
            # The next poll comes by here again.
            return True
        if any(starts[place] <= self._next[place.partition] for place in places):
            return False
        for place, start in starts.items():
            self._next[place.partition] = start
            self._consumer.seek(place, start)
        return True

    def _offsets(self, timeout_ms: int, *, is_end: bool) -> Mapping[int, int]:
        self._require_process("Reading")
        if self._is_closed:
            raise InvalidTransition(f"Reading {self._topic} failed: it is closed.")
        ask = self._consumer.end_offsets if is_end else self._consumer.beginning_offsets
        try:
            found = ask(self._partitions, timeout_ms=max(1, timeout_ms))
        except Exception as error:
            which = "end" if is_end else "start"
            doing = f"Asking for the {which} of {self._topic}"
            raise self._told(error, doing, Access.READ) from error
        offsets = {place.partition: offset for place, offset in found.items()}
        if is_end:
            self._ends = [offsets[number] for number in range(self._partition_count)]
        return offsets

    def _require_process(self, doing: str) -> None:
        if os.getpid() != self._pid:
            raise forked(f"{doing} {self._topic}")

    def _told(self, error: Exception, doing: str, access: Access) -> MarshalError:
        addresses = self._settings.addresses
        return translated(error, doing=doing, access=access, addresses=addresses)
