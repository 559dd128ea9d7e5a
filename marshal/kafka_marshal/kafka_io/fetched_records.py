"""Records of fetches over kafka-python.

They stay in their batches if the compiled functions can cut them out later. Otherwise
aiokafka's compiled parser makes those of large fetches, and kafka-python the rest.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, dropwhile, islice
from typing import Any

from kafka.errors import CorruptRecordError

from kafka_marshal.kafka_io.packed_records import Origin, PackedBatch, PackedPiece, pack
from kafka_marshal.kafka_io.patches import (
    accept_any_header,
    fetcher_of,
    is_supported,
    raw_bytes,
)
from kafka_marshal.kafka_io.record_batches import (
    Header,
    Parser,
    compiled_parser,
    has_checksum,
    header_of,
    is_abort,
    old_records,
    python_records,
    whole_batches,
)

# Makes what a poll returns of parsed records. These have kafka-python's names: offset,
# timestamp, timestamp_type, key, value and headers.
Make = Callable[[Origin, Sequence[Any]], Iterable[Any]]
_NO_EPOCH = -1
_NO_PRODUCER = -1
# Parsed records held at once, with at least two objects of each that the garbage
# collector counts. It starts at 700 more new objects than released ones, and now and
# then visits all objects of the process, which would take twice as long as everything
# else. What is made of them should have no such objects.
AT_ONCE = 100
# Loading aiokafka takes as long as parsing this much in Python. Topics with little
# traffic never need it, and a short log is read sooner without.
COMPILED_FROM_BYTES = 65_536
# Those of kafka-python that count; readers set no deserializer and turn metrics off.
_OPTIONS = ("check_crcs", "aborted_transactions", "on_drain")


def parse_records(consumer: Any, make: Make, *, can_pack: bool = False) -> bool:
    """Make polls of a consumer return what ``make`` makes of parsed records.

    Args:
        consumer: A consumer of kafka-python.
        make: Makes records.
        can_pack: Whether to return a ``PackedPiece`` where nothing need be parsed.

    Returns:
        False for a release of kafka-python that is not supported; polls then return its
        own records, with any names of headers.
    """
    if not is_supported():
        accept_any_header(consumer)
        return False

    def fetched(*args: Any, **options: Any) -> FetchedRecords:
        wanted = {name: options[name] for name in _OPTIONS if name in options}
        return FetchedRecords(
            *args, parser=None, make=make, can_pack=can_pack, **wanted
        )

    fetcher_of(consumer).PartitionRecords = fetched
    return True


def _parser_of(fetch_bytes: int, header: Header) -> Parser:
    """Return the parser for a batch in a fetch of this size."""
    is_worth_it = fetch_bytes >= COMPILED_FROM_BYTES or header.codec != 0
    compiled = compiled_parser() if is_worth_it else None
    return compiled or python_records


class Taken:
    """What was taken of a fetch; its length counts records, not pieces.

    kafka-python adds up the length, and extends a list by what this yields.

    Attributes:
        items: Records that were made, and pieces.
    """

    __slots__ = ("_count", "items")

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def add_made(self, count: int, records: Iterable[Any]) -> None:
        """Add what was made of some records."""
        self.items += records
        self._count += count

    def add_piece(self, piece: PackedPiece) -> None:
        """Add records that are not parsed."""
        self.items.append(piece)
        self._count += piece.size


class FetchedRecords:
    """The records of one fetch of a partition.

    Takes the place of kafka-python's ``Fetcher.PartitionRecords``, with its public
    attributes and methods, so it has the state that its fetcher reads between polls:
    the position moves as records are taken.

    Attributes:
        topic_partition: The place, by kafka-python's type.
        next_fetch_offset: Offset behind the records that were taken.
        leader_epoch: Leader epoch of the batch that was taken last; -1 if unknown.
        bytes_read: Size of the fetch once a record was read.
    """

    def __init__(
        self,
        fetch_offset: int,
        place: Any,
        records: Any,
        *,
        parser: Parser | None,
        make: Make,
        can_pack: bool = False,
        check_crcs: bool = True,
        aborted_transactions: Sequence[Any] | None = None,
        on_drain: Callable[["FetchedRecords"], None] = lambda _: None,
    ) -> None:
        """Parse nothing yet.

        Args:
            fetch_offset: Offset that was requested; a batch may begin before it.
            place: The partition.
            records: kafka-python's ``MemoryRecords``.
            parser: Makes records of a batch; None to choose by the fetch's size.
            make: Makes what ``take`` returns.
            can_pack: Whether ``take`` may return a ``PackedPiece`` instead.
            check_crcs: Whether to compare checksums.
            aborted_transactions: What the broker reports, with ``read_committed``.
            on_drain: Called once, after the last record.
        """
        self.topic_partition = place
        self.next_fetch_offset = fetch_offset
        self._fetch_offset = fetch_offset
        self._is_begun = False
        self.leader_epoch = _NO_EPOCH
        self.bytes_read = 0
        self._data = memoryview(raw_bytes(records))
        self._origin = Origin(place.topic, place.partition, _NO_EPOCH)
        self._parser = parser
        self._make = make
        self._can_pack = can_pack
        self._is_checked = check_crcs
        self._on_drain = on_drain
        self._is_drained = False
        self._error: Exception | None = None
        self._batches = whole_batches(self._data)
        self._aborted = deque(
            sorted(aborted_transactions or (), key=lambda each: each.first_offset)
        )
        self._aborting: set[int] = set()
        # The batch under way: bytes, header, records, and how many of them are left.
        self._batch = self._data[:0]
        self._header: Header | None = None
        self._rows: Iterator[Any] = iter(())
        self._packed: PackedBatch | None = None
        self._left = 0
        self._is_compiled = False

    def __bool__(self) -> bool:
        return not self._is_drained

    def drain(self) -> None:
        """End it. Idempotent."""
        if not self._is_drained:
            self._is_drained = True
            self._on_drain(self)

    def take(self, n: int | None = None) -> Taken:
        """Return up to ``n`` of the next records; drain it if there are none.

        Raises:
            KafkaError: The next record cannot be read; so does each later call.
        """
        limit = sys.maxsize if n is None else n
        found = Taken()
        try:
            while len(found) < limit and (self._left or self._open()):
                most = min(limit - len(found), self._left)
                if self._packed is not None:
                    found.add_piece(self._cut(self._packed, most))
                    continue
                rows = self._read(min(most, AT_ONCE))
                found.add_made(len(rows), self._make(self._origin, rows))
        except Exception as error:
            self._error = error
            if not found:
                raise
        return found

    def _open(self) -> bool:
        """Begin the next batch with visible records; drain if there is none."""
        if self._error is not None:
            raise self._error
        for batch in self._batches:
            header = header_of(batch)
            self.bytes_read = len(self._data)
            self._packed = None
            if header is None:
                self._batch, self._header, self._left = batch, None, sys.maxsize
                self._rows = old_records(batch, is_checked=self._is_checked)
                self._is_compiled = False
                return True
            if self._is_checked and not has_checksum(batch, header):
                raise CorruptRecordError(
                    f"the batch at offset {header.base_offset} of "
                    f"{self.topic_partition} does not have its checksum"
                )
            if header.leader_epoch != self.leader_epoch:
                self.leader_epoch = header.leader_epoch
                place = self.topic_partition
                self._origin = Origin(place.topic, place.partition, header.leader_epoch)
            if self._is_visible(batch, header):
                if self._can_pack and self._pack(batch, header):
                    return True
                self._batch, self._header, self._left = (
                    batch,
                    header,
                    header.records_count,
                )
                self._rows = self._parsed(batch, header)
                if header.records_count > 0:
                    return True
                # Compaction removed its records. Check its end.
                self._left = 0
                next(python_records(batch), None)
            self._move_to(header.next_offset)
        self.drain()
        return False

    def _pack(self, batch: memoryview, header: Header) -> bool:
        """Take a batch without parsing it, if that can be."""
        found = pack(batch, header, origin=self._origin)
        if found is None:
            return False
        before = max(0, self._fetch_offset - header.base_offset)
        if before >= found.count:
            return False
        self._packed, self._header, self._left = found, header, found.count - before
        return True

    def _cut(self, packed: PackedBatch, most: int) -> PackedPiece:
        assert self._header is not None
        start = packed.count - self._left
        self._left -= most
        piece = PackedPiece(packed, start, start + most)
        self._move_to(piece.last_offset + 1 if self._left else self._header.next_offset)
        return piece

    def _is_visible(self, batch: memoryview, header: Header) -> bool:
        """Return whether a batch has records for the application.

        Without ``read_committed`` no transaction is reported as aborted.
        """
        producer_id = header.producer_id
        if producer_id > _NO_PRODUCER:
            last = header.next_offset - 1
            while self._aborted and self._aborted[0].first_offset <= last:
                self._aborting.add(self._aborted.popleft().producer_id)
            if producer_id in self._aborting:
                if header.is_control:
                    if is_abort(batch):
                        self._aborting.discard(producer_id)
                elif header.is_transactional:
                    return False
        return not header.is_control

    def _parsed(self, batch: memoryview, header: Header) -> Iterator[Any]:
        parser = self._parser or _parser_of(len(self._data), header)
        self._is_compiled = parser is not python_records
        try:
            # aiokafka's batch may be iterated only once; islice() does so each time.
            return chain(parser(batch))
        except Exception:
            if not self._is_compiled:
                raise
            # kafka-python has the errors.
            self._is_compiled = False
            return python_records(batch)

    def _read(self, count: int) -> list[Any]:
        """Return up to ``count`` records of the batch, none before the fetch."""
        if self._error is not None:
            raise self._error
        rows: list[Any] = []
        try:
            rows.extend(islice(self._rows, count))
            if len(rows) == self._left:
                # The parser checks the end of the batch now.
                next(self._rows, None)
        except Exception as error:
            if self._is_compiled:
                return self._read_by_python(count)
            self._error = error
            if not rows:
                raise
        is_ended = len(rows) < count and self._error is None
        self._left = 0 if is_ended else self._left - len(rows)
        if rows:
            self._move_to(rows[-1].offset + 1)
            if not self._is_begun:
                rows = list(dropwhile(self._is_before, rows))
                self._is_begun = bool(rows)
        if not self._left and self._header is not None and self._error is None:
            self._move_to(self._header.next_offset)
        return rows

    def _is_before(self, row: Any) -> bool:
        return bool(row.offset < self._fetch_offset)

    def _read_by_python(self, count: int) -> list[Any]:
        """Read again by kafka-python what the compiled parser does not accept."""
        assert self._header is not None
        self._is_compiled = False
        taken = self._header.records_count - self._left
        self._rows = islice(python_records(self._batch), taken, None)
        return self._read(count)

    def _move_to(self, offset: int) -> None:
        self.next_fetch_offset = max(self.next_fetch_offset, offset)
