"""What a fetch of kafka-python brings, as record batches instead of records.

kafka-python does all the rest: connections, leaders, replicas, transactions that were
aborted, checksums. It hands on one object for each fetch, of which columns are made.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import attrs
import kafka
from kafka.consumer.fetcher import Fetcher
from kafka.errors import CorruptRecordError

from kafka_marshal.kafka_io.columns import Batch, Slice, columns_of, inflated
from kafka_marshal.kafka_io.untyped import Untyped

# Releases whose inner parts are as they are counted on here.
KNOWN = "3.0."
# What goes on at a time. A megabyte stays in the processor's cache while it is made,
# sent and read; ten of them cost twice the time for each byte.
CHUNK_BYTES = 1_048_576
CHUNK_RECORDS = 10_000
# A fetch has its price, whatever it brings; and what lies behind the end of a range is
# brought for nothing. The first is before anything is known of the size of records.
FETCH_BYTES_MAX = 4_194_304
FETCH_BYTES_FIRST = 1_048_576
_FETCH_BYTES_MIN = 65_536
_MARGIN = 1.1
_LIMIT = "max_partition_fetch_bytes"
_HEADER_BYTES = 61


class Group(Protocol):
    """Some of what was fetched, of which columns can be made."""

    def __call__(self, span: tuple[int, int], *, with_headers: bool) -> Slice | None:
        """Return those records of a range, or None for none."""
        ...


@attrs.define(eq=False)
class Aim:
    """How far a range goes, and how much of it to ask for at a time.

    Attributes:
        end: Where it ends; not read.
        bytes_each: What a record took at last; None before anything was fetched.
        config: Settings of kafka-python's fetcher, which go to its next request.
    """

    end: int = 0
    bytes_each: float | None = None
    config: dict[str, Any] = attrs.field(factory=dict)

    def take(self, span: tuple[int, int]) -> None:
        """Read this range from now on."""
        self.end = span[1]
        self.ask_from(span[0])

    def learn(self, size: int, count: int) -> None:
        """Note how much there was for some offsets."""
        if count > 0:
            self.bytes_each = size / count

    def ask_from(self, at: int) -> None:
        """Have the next request, from this offset on, ask for what is left."""
        limit = FETCH_BYTES_FIRST
        if self.bytes_each is not None:
            rest = int((self.end - at) * self.bytes_each * _MARGIN)
            limit = min(FETCH_BYTES_MAX, max(_FETCH_BYTES_MIN, rest))
        self.config[_LIMIT] = limit


@attrs.frozen
class Fetched:
    """What one fetch brought.

    Attributes:
        offset: The last offset that it covers, whether or not it has a record.
        groups: Its records, in parts of ``CHUNK_BYTES`` and ``CHUNK_RECORDS`` at most,
            or of one batch of its producer's where that is larger.
    """

    offset: int
    groups: Sequence[Group]


def is_known(version: str = kafka.__version__) -> bool:
    """Return whether this release of kafka-python has the inner parts that it takes."""
    return version.startswith(KNOWN)


def from_records(records: Sequence[Untyped]) -> Fetched:
    """Return what a release of kafka-python that is not known has made records of."""
    return Fetched(records[-1].offset, [partial(_columns_of_records, records)])


def as_columns(consumer: Untyped, aim: Aim) -> None:
    """Have a consumer hand on what it fetches as ``Fetched``, one for each fetch."""
    fetcher = consumer._fetcher  # noqa: SLF001 - there is no other way in
    fetcher.config[_LIMIT] = aim.config.get(_LIMIT, FETCH_BYTES_FIRST)
    aim.config = fetcher.config

    def unopened(*args: object, **settings: object) -> Unopened:
        found = Unopened(*args, **settings)
        found.aim = aim
        return found

    fetcher.PartitionRecords = unopened


class Unopened(Fetcher.PartitionRecords):  # type: ignore[misc]  # it has no types
    """Records of a partition as kafka-python keeps them, but not made into any.

    Attributes:
        aim: How far the range goes; set before anything is taken.
        next_fetch_offset: kafka-python's, and so are all others.
    """

    aim: Aim
    next_fetch_offset: int

    def _maybe_skip_record(self, _: object) -> bool:
        # Columns are cut to the range.
        return False

    def _unpack_records(
        self, _: object, records: Untyped, *__: object
    ) -> Iterator[Fetched]:
        """Return all of it at once."""
        first = self.next_fetch_offset
        groups = list(_grouped(self._batches(records)))
        is_whole = self.next_fetch_offset < self.aim.end
        if is_whole:
            self.bytes_read = records.size_in_bytes()
            self.aim.learn(self.bytes_read, self.next_fetch_offset - first)
        self.aim.ask_from(self.next_fetch_offset)
        if is_whole or not groups:
            # More is fetched while this is looked at. Where the range ends, there is
            # nothing more to fetch, and kafka-python must believe this unread.
            self.drain()
        if groups:
            yield Fetched(self.next_fetch_offset - 1, groups)
        self.drain()

    def _batches(self, records: Untyped) -> Iterator[Untyped]:
        """Yield the batches with records that count, up to the end of the range."""
        while self.next_fetch_offset < self.aim.end:
            batch = records.next_batch()
            if batch is None:
                return
            if self.check_crcs and not batch.validate_crc():
                raise CorruptRecordError(
                    f"the batch at offset {batch.base_offset} of "
                    f"{self.topic_partition} does not have its checksum"
                )
            if batch.magic < 2:  # noqa: PLR2004 - the number of the format
                old = list(batch)
                if old:
                    self.next_fetch_offset = old[-1].offset + 1
                    yield old
                continue
            self.leader_epoch = batch.leader_epoch
            is_wanted = self._is_wanted(batch)
            self.next_fetch_offset = batch.next_offset
            if is_wanted and batch.records_count:
                yield batch

    def _is_wanted(self, batch: Untyped) -> bool:
        """Return whether records of a batch go on, as in kafka-python's own loop."""
        if batch.has_producer_id():
            # There are none where uncommitted records are read.
            self._consume_aborted_transactions_up_to(batch.last_offset)
            if self._contains_abort_marker(batch):
                self.aborted_producer_ids.discard(batch.producer_id)
            elif self._is_batch_aborted(batch):
                return False
        return not batch.is_control_batch


def _grouped(batches: Iterator[Untyped]) -> Iterator[Group]:
    """Yield batches in groups of a size that is worth making columns of."""
    group: list[Batch] = []
    old: list[Untyped] = []
    size = count = 0
    for each in batches:
        batch = None if isinstance(each, list) else _opened(each)
        more = sum(map(_size, each)) if batch is None else len(batch.data)
        records = len(each) if batch is None else batch.size
        is_full = size + more > CHUNK_BYTES or count + records > CHUNK_RECORDS
        if is_full or (group if batch is None else old):
            yield from _closed(group, old)
            group, old, size, count = [], [], 0, 0
        if batch is None:
            old += each
        else:
            group.append(batch)
        size, count = size + more, count + records
    yield from _closed(group, old)


def _closed(group: Sequence[Batch], old: Sequence[Untyped]) -> Iterator[Group]:
    if group:
        yield partial(columns_of, group)
    if old:
        yield partial(_columns_of_records, old)


def _opened(batch: Untyped) -> Batch:
    data = memoryview(batch._buffer)[_HEADER_BYTES:]  # noqa: SLF001
    if batch.compression_type:
        data = inflated(batch.compression_type, data)
    return Batch(
        batch.base_offset,
        batch.records_count,
        batch.first_timestamp,
        batch.max_timestamp if batch.timestamp_type else None,
        data,
    )


def _size(record: Untyped) -> int:
    return len(record.key or b"") + len(record.value or b"")


def _columns_of_records(
    records: Sequence[Any], span: tuple[int, int], *, with_headers: bool
) -> Slice | None:
    """Return columns of records, such as brokers before Kafka 0.11 have written."""
    first, end = span
    wanted = [each for each in records if first <= each.offset < end]
    if not wanted:
        return None
    return Slice(
        [each.offset for each in wanted],
        [each.timestamp if each.timestamp is not None else -1 for each in wanted],
        [-1 if each.timestamp is None else each.timestamp_type for each in wanted],
        [each.key for each in wanted],
        [each.value for each in wanted],
        [tuple(each.headers) for each in wanted] if with_headers else None,
    )
