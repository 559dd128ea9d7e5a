"""Entries of the coordination log from kafka-python's fetches, in runs.

If ``native/`` was compiled, entries stay packed in the fetched bytes. Batches that it
does not accept (compressed, of an old format, or malformed) are parsed like those of
consumers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaTopicPartition

from kafka_marshal.kafka_io.clients import new_client
from kafka_marshal.kafka_io.fetched_batches import FetchData, read_fetches
from kafka_marshal.kafka_io.fetched_records import (
    FetchedRecords,
    Taken,
    parse_records,
)
from kafka_marshal.kafka_io.packed_records import Origin
from kafka_marshal.kafka_io.patches import fetcher_of, network_of, read_in_place
from kafka_marshal.kafka_io.record_batches import batch_end
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topiclog import READER_REQUEST_TIMEOUT_MS
from kafka_marshal.native import compiled
from kafka_marshal.ports import Run
from kafka_marshal.protocol.packed_entries import PackedEntries
from kafka_marshal.protocol.types import LogEntry

# A packed run ends with the batch that reaches this number of entries. Longer runs are
# folded faster, but hold the engine's lock longer.
RUN_MAX = 20_000
# A poll ends once it has this many entries, so that it does not last long; a cold start
# polls often.
ENTRIES_PER_POLL = 5_000
# Larger fetches make longer runs; fetches of this size just fit the processor's cache.
FETCH_BYTES_MAX = 4_194_304


class EntryRecords(FetchedRecords):
    """A fetched partition whose sound batches become packed entries, without records.

    Only for readers of uncommitted records.
    """

    def __init__(self, fetch: FetchData) -> None:
        super().__init__(fetch, make=_entries)
        # Whether all batches so far have become packed entries.
        self._is_packed = True

    def take(self, n: int | None = None) -> Taken:
        """Return the next packed run, or up to ``n`` entries that a parser has made.

        Raises:
            KafkaError: The next record cannot be read; so does each later call.
        """
        while self._is_packed and self:
            run = self._next_run()
            if run:
                found = Taken()
                found.add_made(len(run), [run])
                return found
        return super().take(n)

    def _next_run(self) -> PackedEntries:
        assert compiled is not None
        first = 0 if self._is_begun else self._fetch.offset
        places, behind, next_offset, epoch = compiled.index_entries(
            self._fetch.data, self._at, first, RUN_MAX
        )
        if behind == self._at:
            self._is_packed = False
        else:
            self._skip_to(behind, epoch)
            self._move_to(next_offset)
            self._is_begun = self._is_begun or bool(places)
            if batch_end(self._fetch.data, behind) is None:
                self.drain()  # so that the next fetch can begin
        return PackedEntries(self._fetch.data, places)


def fetch_entries(consumer: Any) -> None:
    """Make polls of a consumer return log entries, packed ones if possible."""
    if compiled is not None:
        read_fetches(consumer, EntryRecords)
    else:
        parse_records(consumer, _entries)


def to_runs(items: Iterable[Any]) -> Iterator[Sequence[LogEntry]]:
    """Yield what a poll of such a consumer returned for one partition, in runs."""
    made: list[LogEntry] = []
    for item in items:
        if isinstance(item, PackedEntries):
            if made:
                yield made
                made = []
            yield item
        else:
            made.append(item)
    if made:
        yield made


class EntryReader:
    """Reads partitions of the coordination topic over kafka-python, in runs.

    One consumer with all partitions assigned, which is a single fetch session. One
    thread at a time. Errors are those of kafka-python.

    Args:
        settings: Connection and name of the topic.
        fetch_wait_ms: How long a broker waits for new entries.
        timeout_ms: Limit to connect.
    """

    def __init__(
        self, settings: ConnectionConfig, *, fetch_wait_ms: int, timeout_ms: int
    ) -> None:
        self._topic = settings.coordination_topic
        config = {
            **settings.client_config(),
            "group_id": None,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            "isolation_level": "read_uncommitted",
            "allow_auto_create_topics": False,
            "fetch_min_bytes": 1,
            "fetch_max_wait_ms": fetch_wait_ms,
            "max_partition_fetch_bytes": FETCH_BYTES_MAX,
            "max_poll_records": ENTRIES_PER_POLL,
            "request_timeout_ms": READER_REQUEST_TIMEOUT_MS,
            "metrics_enabled": False,
            "bootstrap_timeout_ms": timeout_ms,
        }
        self._consumer = new_client(KafkaConsumer, config, topic=self._topic)
        self._assigned: Sequence[int] = ()
        read_in_place(self._consumer)
        fetch_entries(self._consumer)

    def limit_requests(self, timeout_ms: int) -> None:
        """Set how long each later request may take; on any thread."""
        network_of(self._consumer).manager.request_timeout_ms = timeout_ms

    def seek(self, partitions: Sequence[int], offsets: Mapping[int, int]) -> None:
        """Read exactly these partitions; continue some of them at these offsets."""
        if self._assigned != partitions:
            # Remaining partitions keep their positions.
            self._consumer.assign([self._place(number) for number in partitions])
            self._assigned = list(partitions)
        for number, offset in offsets.items():
            self._consumer.seek(self._place(number), offset)

    def poll(self, timeout_ms: int) -> list[Run]:
        """Return new entries; wait up to ``timeout_ms`` for the first."""
        found = self._consumer.poll(timeout_ms=timeout_ms)
        if found:
            # Send the next fetch, to receive it while these entries are folded. If that
            # fails, the next poll sends it and raises.
            with suppress(Exception):
                fetcher_of(self._consumer).send_fetches()
        return [
            (place.partition, run)
            for place, items in found.items()
            for run in to_runs(items)
        ]

    def position(self, partition: int) -> int:
        """Return the next offset of a partition, without waiting."""
        at = self._consumer.position(self._place(partition), timeout_ms=0)
        return at or 0

    def starts(
        self, partitions: Iterable[int], *, timeout_ms: int
    ) -> Mapping[int, int]:
        """Query the first offsets of partitions."""
        places = [self._place(number) for number in partitions]
        found = self._consumer.beginning_offsets(places, timeout_ms=timeout_ms)
        return {place.partition: offset for place, offset in found.items()}

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close(autocommit=False)

    def _place(self, number: int) -> Any:
        return KafkaTopicPartition(self._topic, number)


def _entries(origin: Origin, sources: Sequence[Any]) -> Iterator[LogEntry]:
    for each in sources:
        yield LogEntry(
            offset=each.offset,
            leader_epoch=origin.leader_epoch,
            timestamp_ms=each.timestamp,
            timestamp_type=each.timestamp_type,
            value=each.value,
        )
