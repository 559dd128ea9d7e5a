"""Reads exact ranges of offsets of one partition after another, as columns.

For tasks that read a range and end: a process keeps its reader for many tasks.
kafka-python handles connections, leaders and replicas. No record is built: the batches
of a fetch are decoded into columns.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
from kafka import TopicPartition as KafkaTopicPartition

from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    PositionError,
    UnknownTopicId,
)
from kafka_marshal.gc_pause import uncollected
from kafka_marshal.kafka_io.columns import Batch, Slice, to_columns
from kafka_marshal.kafka_io.data import KafkaDataLog
from kafka_marshal.kafka_io.fetched_batches import (
    FetchData,
    FetchedBatches,
    read_fetches,
)
from kafka_marshal.kafka_io.patches import fetcher_of, network_of
from kafka_marshal.kafka_io.reader import KafkaDataReader
from kafka_marshal.kafka_io.record_batches import Header, content_of, old_records
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.ports import Records, SourcePiece
from kafka_marshal.protocol.types import OffsetRange, TopicPartition

# Size of a slice. One megabyte stays in the processor's cache from decoding to use; ten
# take twice the time for each byte.
CHUNK_BYTES = 1_048_576
CHUNK_RECORDS = 10_000
# Larger fetches have less overhead, but bytes behind the end of a range are wasted. The
# first fetch does not know the size of records yet.
FETCH_BYTES_MAX = 8_388_608
FETCH_BYTES_FIRST = 1_048_576
_FETCH_BYTES_MIN = 65_536
_MARGIN = 1.1
_LIMIT = "max_partition_fetch_bytes"
POLL_MS = 50
# Time without records after which the end of the log is checked.
CHECK_MS = 1_000
# After this many checks in a row without the topic in the metadata, the cluster is
# asked whether it exists: the metadata of one broker may lag behind.
ABSENT_CHECKS = 10
_DESCRIBE_MS = 5_000
_CLOSE_MS = 5_000
# A part of a fetch. Called with a range and ``with_headers``, it returns the columns of
# its records in that range, or None if it has none.
Group = Callable[..., Slice | None]


@attrs.define(eq=False)
class FetchTarget:
    """End of the range, and the size of the next fetch.

    Attributes:
        end: End of the range, exclusive.
        bytes_each: Bytes per offset of the last fetch; None before the first.
        config: Configuration of kafka-python's fetcher, read for each request.
    """

    end: int = 0
    bytes_each: float | None = None
    config: dict[str, Any] = attrs.field(factory=dict)

    def take(self, span: OffsetRange) -> None:
        """Set the range."""
        self.end = span.end
        self.limit_next(span.first)

    def update_record_size(self, size: int, count: int) -> None:
        """Set the bytes per offset from a fetch."""
        if count > 0:
            self.bytes_each = size / count

    def limit_next(self, at: int) -> None:
        """Limit the next request, from this offset, to the rest of the range."""
        limit = FETCH_BYTES_FIRST
        if self.bytes_each is not None:
            rest = int((self.end - at) * self.bytes_each * _MARGIN)
            limit = min(FETCH_BYTES_MAX, max(_FETCH_BYTES_MIN, rest))
        self.config[_LIMIT] = limit


@attrs.frozen
class Fetch:
    """The content of one fetch.

    Attributes:
        offset: Last offset that it covers, with or without a record.
        groups: Its records in parts of at most ``CHUNK_BYTES`` and ``CHUNK_RECORDS``,
            or one record batch if that is larger. Batches are decompressed one group
            at a time.
    """

    offset: int
    groups: Iterable[Group]


def fetch_batches(consumer: Any, aim: FetchTarget) -> None:
    """Make a consumer return one ``Fetch`` for each fetch instead of records."""
    fetcher = fetcher_of(consumer)
    fetcher.config[_LIMIT] = aim.config.get(_LIMIT, FETCH_BYTES_FIRST)
    aim.config = fetcher.config
    read_fetches(consumer, partial(FetchedSlices, aim=aim))


@attrs.define(kw_only=True)
class _Part:
    """Some batches, or the records of some batches in a format before 2."""

    make: Group
    items: list[Any]
    size_bytes: int
    records_count: int

    def add(self, other: "_Part") -> bool:
        """Add one that follows, and return True, unless this gets too large."""
        size = self.size_bytes + other.size_bytes
        count = self.records_count + other.records_count
        is_large = size > CHUNK_BYTES or count > CHUNK_RECORDS
        if is_large or other.make is not self.make:
            return False
        self.items += other.items
        self.size_bytes, self.records_count = size, count
        return True


class FetchedSlices(FetchedBatches):
    """A fetch whose batches are not decoded into records."""

    def __init__(self, fetch: FetchData, *, aim: FetchTarget) -> None:
        super().__init__(fetch)
        self._aim = aim
        self._is_taken = False

    def take(self, _: int | None = None) -> list[Fetch]:
        """Return the whole fetch at once, up to the end of the range.

        Raises:
            CorruptRecordError: A batch is damaged; so does each later call.
        """
        found: list[Fetch] = []
        if not self._is_taken:
            found = self._read()
            self._is_taken = True
        if not found or self.next_fetch_offset < self._aim.end:
            # Lets kafka-python fetch ahead. At the end of the range it must not, so
            # this fetch counts as unread until it was used.
            self.drain()
        return found

    def _read(self) -> list[Fetch]:
        try:
            makers = list(self._makers())
        except Exception as error:
            self._error = error
            raise
        at = self.next_fetch_offset
        if at < self._aim.end:
            self._aim.update_record_size(len(self._fetch.data), at - self._fetch.offset)
        self._aim.limit_next(at)
        return [Fetch(at - 1, _grouped(makers))] if makers else []

    def _makers(self) -> Iterator[Callable[[], _Part]]:
        while self.next_fetch_offset < self._aim.end:
            found = self.next_batch()
            if found is None:
                return
            raw, header = found
            if header is None:
                old = list(old_records(raw, is_checked=self._fetch.is_checked))
                if old:
                    self._move_to(old[-1].offset + 1)
                    yield partial(
                        _Part,
                        make=_records_to_columns,
                        items=old,
                        size_bytes=sum(map(_size, old)),
                        records_count=len(old),
                    )
                continue
            self._move_to(header.next_offset)
            yield partial(_part_of, raw, header)


def _part_of(raw: memoryview, header: Header) -> _Part:
    """Return a batch with its records decompressed."""
    batch = Batch(
        base=header.base_offset,
        size=header.records_count,
        first_ms=header.first_ms,
        append_ms=header.append_ms,
        data=content_of(raw, header),
    )
    return _Part(
        make=to_columns,
        items=[batch],
        size_bytes=len(batch.data),
        records_count=batch.size,
    )


def _grouped(makers: Iterable[Callable[[], _Part]]) -> Iterator[Group]:
    """Yield the parts of a fetch in groups of at most the size of a slice."""
    last: _Part | None = None
    for make_part in makers:
        part = make_part()
        if last is None:
            last = part
        elif not last.add(part):
            yield partial(last.make, last.items)
            last = part
    if last is not None:
        yield partial(last.make, last.items)


def _size(record: Any) -> int:
    return len(record.key or b"") + len(record.value or b"")


def _records_to_columns(
    records: Sequence[Any], span: OffsetRange, *, with_headers: bool
) -> Slice | None:
    """Return columns of records, such as those written before Kafka 0.11."""
    wanted = [each for each in records if span.first <= each.offset < span.end]
    if not wanted:
        return None
    return Slice(
        offsets=[each.offset for each in wanted],
        times_ms=[
            each.timestamp if each.timestamp is not None else -1 for each in wanted
        ],
        kinds=[
            -1 if each.timestamp is None else each.timestamp_type for each in wanted
        ],
        keys=[each.key for each in wanted],
        values=[each.value for each in wanted],
        headers=[tuple(each.headers) for each in wanted] if with_headers else None,
    )


class TopicReplaced(PositionError):
    """The topic of a range was deleted, and perhaps created again."""


class ProgressTimeout:
    """A deadline that each sign of progress extends."""

    def __init__(self, partition: TopicPartition, end: int, timeout_ms: int) -> None:
        self._partition = partition
        self._end = end
        self._timeout_ms = timeout_ms
        self.reset()

    def reset(self) -> None:
        """Extend the deadline."""
        self._deadline = Deadline(self._timeout_ms)
        self._check_at = Deadline(CHECK_MS)

    def is_check_due(self) -> bool:
        """Return True once for each ``CHECK_MS`` without progress."""
        is_due = self._check_at.is_over
        if is_due:
            self._check_at = Deadline(CHECK_MS)
        return is_due

    def check(self, at: int) -> None:
        """Raise if the deadline has passed.

        Raises:
            DeadlineExceeded: The deadline has passed.
        """
        if not self._deadline.is_over:
            return
        raise DeadlineExceeded(
            f"{self._partition} returned no records from offset {at} on within "
            f"{self._timeout_ms} ms, and must be read up to offset {self._end}; check "
            "that this task can reach the brokers and, with read_committed, that no "
            "transaction is left open"
        )


class SliceReader(KafkaDataReader):
    """Reads ranges, one at a time, on one thread, over kafka-python.

    Used with every transport: librdkafka makes an object for each record, which costs
    more than everything here. The first range connects.
    """

    # Tasks keep all cores busy: one more thread for each would only take time.
    has_receiver = False

    def __init__(
        self, settings: ConnectionConfig, *, isolation_level: str, client_rack: str
    ) -> None:
        super().__init__(
            settings, isolation_level=isolation_level, client_rack=client_rack
        )
        self._aim = FetchTarget()
        self._topic_id = ""
        self._absent_checks = 0

    def read(
        self,
        partition: TopicPartition,
        span: OffsetRange,
        *,
        timeout_ms: int,
        with_headers: bool,
        topic_id: str = "",
    ) -> Iterator[Slice]:
        """Yield every record of a range, in order; skip offsets without one.

        Args:
            partition: Data partition.
            span: Offsets to read.
            timeout_ms: Limit for the next record, or for proof that there is none.
            with_headers: Whether to return headers.
            topic_id: Kafka's id of the topic in hex; empty for any topic of this name.

        Raises:
            TopicReplaced: The topic has another id.
            PositionError: The range is not within the log.
            DeadlineExceeded: There was no progress in time.
            CoordinationError: The cluster could not be read.
        """
        at, end = span.first, span.end
        if at >= end:
            return
        self.start(partition, span, topic_id=topic_id)
        timeout = ProgressTimeout(partition, end, timeout_ms)
        while at < end:
            for fetched in self.take(POLL_MS):
                yield from self._slices_of(
                    fetched, OffsetRange(at, end), with_headers=with_headers
                )
            # The position also passes offsets without a record.
            ahead = self.position_of(partition)
            if ahead > at:
                at = ahead
                timeout.reset()
            else:
                if timeout.is_check_due():
                    self.require_range(partition, OffsetRange(at, end))
                timeout.check(at)
        self.assign([])

    def _slices_of(
        self, fetched: Fetch, span: OffsetRange, *, with_headers: bool
    ) -> Iterator[Slice]:
        groups = iter(fetched.groups)
        while True:
            try:
                with uncollected():
                    group = next(groups, None)
                    rows = group and group(span, with_headers=with_headers)
            except Exception as error:
                raise self._translate(error) from error
            if group is None:
                return
            if rows is not None:
                yield rows

    def start(
        self, partition: TopicPartition, span: OffsetRange, *, topic_id: str = ""
    ) -> None:
        """Start a range."""
        self._topic_id = topic_id
        self._absent_checks = 0
        self.assign([partition])
        wanted = bytes.fromhex(topic_id) or None
        self.seek(partition, span.first, topic_id=wanted)
        self._aim.take(span)

    def take(self, timeout_ms: int) -> Sequence[Fetch]:
        """Return the content of the next fetch, if there is one."""
        try:
            found = self.poll(timeout_ms, 1)
        except UnknownTopicId as error:
            # Perhaps only this broker does not know the topic yet.
            self._require_same_topic(TopicPartition(*error.partition))
            return ()
        for records in found.values():
            assert isinstance(records, Records)
            (piece,) = records.pieces
            assert isinstance(piece, SourcePiece)
            return piece.sources
        return ()

    def position_of(self, partition: TopicPartition) -> int:
        """Return the next offset to fetch, behind gaps.

        Raises:
            PositionError: The log was truncated below it.
        """
        known = self._positions.next[partition] or 0
        if self._consumer is None:
            return known
        try:
            place = self._consumer.position(
                KafkaTopicPartition(*partition), timeout_ms=0
            )
        except Exception as error:
            raise self._translate(error) from error
        return max(known, place or 0)

    def require_range(self, partition: TopicPartition, span: OffsetRange) -> None:
        """Raise if the log ends within a range.

        Called every ``CHECK_MS`` without progress.

        Raises:
            TopicReplaced: The topic was deleted, or has another id.
            PositionError: The log ends within the range.
        """
        self._require_same_topic(partition)
        self._require_topic(partition)
        at, end = span.first, span.end
        if self.ends().get(partition, end) >= end:
            return
        # A follower's end may be late: ask the leader.
        error = self._position_error(
            KafkaTopicPartition(*partition), at, "must be read further"
        )
        if -1 < error.log_end < end:
            raise error

    def _require_same_topic(self, partition: TopicPartition) -> None:
        if self._consumer is None or not self._topic_id:
            return
        known = network_of(self._consumer).cluster.topic_id(partition.topic)
        if known is not None and known.hex != self._topic_id:
            at = self._positions.next[partition] or 0
            raise TopicReplaced(
                f"topic {partition.topic} was deleted and created again: its id was "
                f"{self._topic_id} and is {known.hex}",
                partition=partition,
                requested=at,
                log_start=-1,
                log_end=-1,
            )

    def _require_topic(self, partition: TopicPartition) -> None:
        """Raise if the topic stays unknown and a broker confirms that there is none."""
        topic = partition.topic
        if self._consumer is None or (
            network_of(self._consumer).cluster.partitions_for_topic(topic) is not None
        ):
            self._absent_checks = 0
            return
        self._absent_checks += 1
        if self._absent_checks % ABSENT_CHECKS:
            return
        log = KafkaDataLog(self._settings)
        try:
            found = log.describe([topic], _DESCRIBE_MS)
        except CoordinationError:
            return  # unreachable: the caller waits for progress until its deadline
        finally:
            log.close(_CLOSE_MS)
        if topic not in found:
            raise TopicReplaced(
                f"topic {topic} was deleted",
                partition=partition,
                requested=self._positions.next[partition] or 0,
                log_start=-1,
                log_end=-1,
            )

    def _new_consumer(self) -> Any:
        consumer = super()._new_consumer()
        fetch_batches(consumer, self._aim)
        return consumer


class SliceReaders:
    """Readers of this process by connection settings, made on first use.

    A process that reads one range after another, as Spark's workers do, keeps its
    connections. A forked child makes its own (PROTOCOL 1.7).
    """

    def __init__(self) -> None:
        self._readers: dict[tuple[object, ...], SliceReader] = {}
        self._pid = os.getpid()

    def reader(
        self, settings: ConnectionConfig, *, isolation_level: str, client_rack: str
    ) -> SliceReader:
        """Return the reader for some settings."""
        if self._pid != os.getpid():
            self._readers, self._pid = {}, os.getpid()
        options = tuple(sorted((k, repr(v)) for k, v in settings.options.items()))
        key = (
            settings.bootstrap_servers,
            options,
            isolation_level,
            client_rack,
        )
        found = self._readers.get(key)
        if found is None:
            found = SliceReader(
                settings, isolation_level=isolation_level, client_rack=client_rack
            )
            self._readers[key] = found
        return found

    def drop(self) -> None:
        """Close all readers, so that none keeps a faulty state."""
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.close(_CLOSE_MS)
