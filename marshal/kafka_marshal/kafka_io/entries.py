"""Entries of the coordination log from kafka-python's fetches.

kafka-python makes a record of each. Where ``native/entries.c`` was compiled, entries
are made of the fetched bytes instead, and kafka-python parses what that leaves: batches
that are compressed, of an old format or not sound. Elsewhere aiokafka's parser makes
records, if it is there.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from kafka.consumer.fetcher import Fetcher

from kafka_marshal.kafka_io.fetched_records import parse_records
from kafka_marshal.kafka_io.packed_records import Origin
from kafka_marshal.kafka_io.patches import (
    LenientBatches,
    fetcher_of,
    is_supported,
    raw_bytes,
)
from kafka_marshal.native import compiled
from kafka_marshal.protocol.types import LogEntry

# Entries that are made at once: as many as stay in the processor's cache.
AT_ONCE = 500


def to_entry(record: Any) -> LogEntry:
    """Return the entry of a record that kafka-python has made."""
    return LogEntry(
        offset=record.offset,
        leader_epoch=record.leader_epoch,
        timestamp_ms=record.timestamp,
        timestamp_type=record.timestamp_type,
        value=record.value,
    )


class EntryRecords(Fetcher.PartitionRecords):  # type: ignore[misc]  # untyped
    """A fetched partition whose sound batches become entries, without records.

    Only for readers of uncommitted records, without metrics.

    Attributes:
        next_fetch_offset: As in the base class, like all other attributes.
        leader_epoch: That of the batch of the last entry.
    """

    next_fetch_offset: int
    leader_epoch: int

    def _unpack_records(self, place: Any, records: Any, *rest: Any) -> Iterator[Any]:
        """Yield entries, then what kafka-python makes of what was left."""
        assert compiled is not None
        data, at = raw_bytes(records), 0
        while True:
            entries, behind, next_offset, epoch = compiled.to_entries(
                data, at, LogEntry, AT_ONCE
            )
            if behind == at:
                break
            at = behind
            for entry in entries:
                # kafka-python continues from these if it takes no more.
                self.next_fetch_offset = entry.offset + 1
                self.leader_epoch = entry.leader_epoch
                yield entry
            self.next_fetch_offset, self.leader_epoch = next_offset, epoch
        left = LenientBatches(memoryview(data)[at:])
        yield from super()._unpack_records(place, left, *rest)


def fetch_entries(consumer: Any) -> None:
    """Make a consumer of the coordination log return entries where it can."""
    if compiled is not None and is_supported():
        fetcher_of(consumer).PartitionRecords = EntryRecords
    else:
        parse_records(consumer, _entries)


def _entries(origin: Origin, sources: Sequence[Any]) -> Iterator[LogEntry]:
    for each in sources:
        yield LogEntry(
            offset=each.offset,
            leader_epoch=origin.leader_epoch,
            timestamp_ms=each.timestamp,
            timestamp_type=each.timestamp_type,
            value=each.value,
        )
