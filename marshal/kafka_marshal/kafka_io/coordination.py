"""The coordination topic over kafka-python: ``ports.CoordinationLog``.

One consumer with all partitions assigned (a single fetch session) reads; a
``Writer`` writes; an admin client asks where the log ends, for any thread and not
behind a fetch that waits for records. Reader and writer follow PROTOCOL 2.1 to the
letter, because the defaults of kafka-python would rewind silently after a truncation
and could turn idempotence off without an error.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaTopicPartition
from kafka import errors as kafka_errors

from kafka_marshal.errors import MarshalError
from kafka_marshal.kafka_io.connecting import connected
from kafka_marshal.kafka_io.faults import needed
from kafka_marshal.kafka_io.offsets import KafkaOffsets
from kafka_marshal.kafka_io.sending import kafka_outlets
from kafka_marshal.kafka_io.tolerant import read_any_header
from kafka_marshal.kafka_io.topiclog import (
    ENTRIES_PER_POLL,
    FETCH_WAIT_MS,
    READER_REQUEST_TIMEOUT_MS,
    Entries,
    TopicLog,
)
from kafka_marshal.kafka_io.translate import Access, translated
from kafka_marshal.kafka_io.writer import Connect, left_ms
from kafka_marshal.protocol.types import LogEntry, TopicPartition


class KafkaCoordinationLog(TopicLog):
    """All partitions of the coordination topic, read by kafka-python."""

    _consumer: Any = None
    _asker: KafkaOffsets | None = None
    _assigned: Sequence[int] = ()

    def _outlets(self) -> Connect:
        return kafka_outlets(self._settings)

    def _connect(self, deadline: float) -> None:
        self._partitions = [
            KafkaTopicPartition(self._topic, number)
            for number in range(self._partition_count)
        ]
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
        self._consumer = connected(KafkaConsumer, settings, topic=self._topic)
        read_any_header(self._consumer)

    def _start(self) -> None:
        self._asker = KafkaOffsets(self._settings)

    def _disconnect(self) -> None:
        if self._asker is not None:
            self._asker.close(0)
        if self._consumer is not None:
            self._consumer.close(autocommit=False)

    def _go_to(self, offsets: Mapping[int, int]) -> None:
        if self._assigned != self._read:
            # Those that stay keep their place.
            self._consumer.assign([self._partitions[number] for number in self._read])
            self._assigned = list(self._read)
        for number, offset in offsets.items():
            self._next[number] = offset
            self._consumer.seek(self._partitions[number], offset)

    def _fetch(self, timeout_ms: int) -> Entries:
        try:
            batches = self._consumer.poll(timeout_ms=timeout_ms)
        except kafka_errors.OffsetOutOfRangeError as error:
            places = error.args[0] if error.args else ()
            if places and self._steps_over((p.partition for p in places), timeout_ms):
                return []
            raise
        return [
            (
                place.partition,
                LogEntry(
                    record.offset,
                    record.leader_epoch,
                    record.timestamp,
                    record.timestamp_type,
                    record.value,
                ),
            )
            for place, records in batches.items()
            for record in records
        ]

    def _passed(self, partitions: Collection[int]) -> Mapping[int, int]:
        found: dict[int, int] = {}
        for number in partitions:
            try:
                at = self._consumer.position(self._partitions[number], timeout_ms=0)
            except kafka_errors.LogTruncationError as error:
                # kafka-python tells it once; the next poll must raise it.
                self._note_fault(self._told(error, "Reading", Access.READ), error)
                break
            except kafka_errors.KafkaError:
                continue
            found[number] = at or 0
        return found

    def _ask(
        self, timeout_ms: int, *, is_end: bool, partitions: Iterable[int] | None = None
    ) -> Mapping[int, int]:
        numbers = self._read if partitions is None else partitions
        if is_end:
            assert self._asker is not None
            asked = [TopicPartition(self._topic, number) for number in numbers]
            ends = self._asker.ends(asked, timeout_ms)
            return {place.partition: offset for place, offset in ends.items()}
        places = [self._partitions[number] for number in numbers]
        found = self._consumer.beginning_offsets(places, timeout_ms=timeout_ms)
        return {place.partition: offset for place, offset in found.items()}

    def _lost(self, error: Exception) -> Sequence[int]:
        if isinstance(error, kafka_errors.OffsetOutOfRangeError):
            places = error.args[0] if error.args else ()
        elif isinstance(error, kafka_errors.LogTruncationError):
            places = error.divergent_offsets
        else:
            places = ()
        return [place.partition for place in places]

    def _told(self, error: Exception, doing: str, access: Access) -> MarshalError:
        return translated(
            error,
            doing=doing,
            access=access,
            addresses=self._settings.addresses,
            needs=needed(access, self._topic),
        )
