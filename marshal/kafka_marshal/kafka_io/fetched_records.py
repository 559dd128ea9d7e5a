"""Records of fetches over kafka-python.

They stay in their batches if the compiled functions can cut them out later. Otherwise
aiokafka's compiled parser makes records of large fetches and compressed batches, and
kafka-python's parser makes the rest.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, dropwhile, islice
from typing import Any

from kafka_marshal.kafka_io.fetched_batches import (
    FetchData,
    FetchedBatches,
    read_fetches,
)
from kafka_marshal.kafka_io.packed_records import (
    Index,
    Origin,
    PackedPiece,
    PackedRun,
    index_batches,
    pack,
)
from kafka_marshal.kafka_io.record_batches import (
    Header,
    Parser,
    compiled_parser,
    old_records,
    python_records,
)
from kafka_marshal.kafka_io.responses import take_index

# Makes the items that a poll returns, from parsed records. These have kafka-python's
# names: offset, timestamp, timestamp_type, key, value and headers.
Make = Callable[[Origin, Sequence[Any]], Iterable[Any]]
# Parsed records held at once. Each has at least two objects that the garbage collector
# counts. The collector starts at 700 more new objects than released ones, and now and
# then visits all objects of the process, which would take twice as long as everything
# else. Items made from parsed records should have no such objects.
RECORDS_AT_ONCE = 100
# Loading aiokafka takes as long as parsing this much in Python. Topics with little
# traffic never need it, and a short log is read sooner without.
COMPILED_FROM_BYTES = 65_536
# A poll ends with the batch that reaches this number of decompressed bytes: like a
# response they stay in memory until the last record is handed out.
DECOMPRESSED_BYTES = 8_388_608


def parse_records(consumer: Any, make: Make, *, can_pack: bool = False) -> None:
    """Make polls of a consumer return what ``make`` makes of parsed records.

    Args:
        consumer: A consumer of kafka-python.
        make: Makes records.
        can_pack: Whether to return a ``PackedPiece`` if nothing need be parsed.
    """
    read = partial(FetchedRecords, make=make, can_pack=can_pack, expansion=Expansion())
    read_fetches(consumer, read)


def _parser_of(fetch_bytes: int, header: Header) -> Parser:
    """Return the parser for a batch in a fetch of this size."""
    is_worth_it = fetch_bytes >= COMPILED_FROM_BYTES or header.codec != 0
    compiled = compiled_parser() if is_worth_it else None
    return compiled or python_records


class Expansion:
    """Counts the bytes of batches that the fetches of a consumer decompress.

    Attributes:
        bytes_used: Bytes since the last poll that ended because of them.
    """

    __slots__ = ("bytes_used",)

    def __init__(self) -> None:
        self.bytes_used = 0

    def ends_poll(self) -> bool:
        """Return whether a poll must end, and begin to count again if so."""
        if self.bytes_used < DECOMPRESSED_BYTES:
            return False
        self.bytes_used = 0
        return True


class Taken:
    """Items taken from a fetch; its length counts records, not pieces.

    kafka-python adds up the length, and extends a list by the items. It ends its poll
    once the sum reaches the limit that it gave.

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

    def end_poll(self, limit: int) -> None:
        """Make the poll end, by a length as if the limit was reached."""
        self._count = limit


class FetchedRecords(FetchedBatches):
    """The records of one fetch of a partition; the position moves as they are taken."""

    def __init__(
        self,
        fetch: FetchData,
        *,
        make: Make,
        parser: Parser | None = None,
        can_pack: bool = False,
        expansion: Expansion | None = None,
    ) -> None:
        """Parse nothing yet.

        Args:
            fetch: What was fetched.
            make: Makes what ``take`` returns.
            parser: Makes records of a batch; None to choose by the fetch's size.
            can_pack: Whether ``take`` may return a ``PackedPiece`` instead.
            expansion: What all fetches of the consumer decompress.
        """
        super().__init__(fetch)
        self._expansion = expansion or Expansion()
        self._make = make
        self._parser = parser
        self._can_pack = can_pack
        self._is_begun = False
        self._origin = Origin(
            fetch.place.topic, fetch.place.partition, self.leader_epoch
        )
        # The current batch: bytes, header, records, and how many of them are left.
        self._batch = fetch.data[:0]
        self._header: Header | None = None
        self._rows: Iterator[Any] = iter(())
        self._left = 0
        # Or the current batches that are not parsed, and the offset behind them.
        self._packed: PackedRun | None = None
        self._packed_end = 0
        self._is_compiled = False

    def take(self, n: int | None = None) -> Taken:
        """Return up to ``n`` of the next records; drain the fetch if there are none.

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
                    if self._expansion.ends_poll():
                        found.end_poll(limit)
                    continue
                rows = self._read(min(most, RECORDS_AT_ONCE))
                found.add_made(len(rows), self._make(self._origin, rows))
        except Exception as error:
            self._error = error
            if not found:
                raise
        return found

    def _open(self) -> bool:
        """Begin the next batch with visible records; drain if there is none."""
        if self._can_pack and self._open_run():
            return True
        found = self.next_batch()
        if found is None:
            self.drain()
            return False
        batch, header = self._batch, self._header = found
        self._packed = None
        if self.leader_epoch != self._origin.leader_epoch:
            self._origin = self._origin._replace(leader_epoch=self.leader_epoch)
        if header is None:
            self._left = sys.maxsize
            self._rows = old_records(batch, is_checked=self._fetch.is_checked)
            self._is_compiled = False
        elif not (self._can_pack and self._pack(batch, header)):
            self._left = header.records_count
            self._rows = self._parsed(batch, header)
        return True

    def _open_run(self) -> bool:
        """Begin with batches that need no parsing; return whether there are some."""
        fetch = self._fetch
        if self._aborted or self._aborting or self._error or not fetch.is_checked:
            return False
        data = fetch.data
        while (found := self._index()) is not None:
            self._skip_to(found.behind, found.leader_epoch)
            if found.places:
                self._begin_run(found.run(data, fetch.place), found.next_offset)
                return True
            self._move_to(found.next_offset)
        return False

    def _index(self) -> Index | None:
        """Return where the next records are; None if the next batch must be parsed."""
        data = self._fetch.data
        known = take_index(data) if self._at == 0 else None
        found = None if known is None else Index(*known)
        if found is not None and found.behind > 0:
            return found.since(self._first)
        return index_batches(data, at=self._at, first=self._first)

    def _pack(self, batch: memoryview, header: Header) -> bool:
        """Take a batch without parsing it; return whether that was possible."""
        fetch = self._fetch
        found = pack(batch, header, first=self._first, place=fetch.place)
        if found is not None:
            self._begin_run(found, header.next_offset)
            if header.codec:
                self._expansion.bytes_used += len(found.data)
        return found is not None

    @property
    def _first(self) -> int:
        """Offset below which records are dropped; 0 once a record was kept."""
        return 0 if self._is_begun else self._fetch.offset

    def _begin_run(self, run: PackedRun, end: int) -> None:
        self._packed, self._packed_end, self._left = run, end, run.count
        self._is_begun = True

    def _cut(self, packed: PackedRun, most: int) -> PackedPiece:
        start = packed.count - self._left
        self._left -= most
        piece = PackedPiece(packed, start, start + most)
        self._move_to(piece.last_offset + 1 if self._left else self._packed_end)
        return piece

    def _parsed(self, batch: memoryview, header: Header) -> Iterator[Any]:
        parser = self._parser or _parser_of(len(self._fetch.data), header)
        self._is_compiled = parser is not python_records
        try:
            # One iterator for all calls of islice(): aiokafka's batch may be iterated
            # only once.
            return chain(parser(batch))
        except Exception:
            if not self._is_compiled:
                raise
            # kafka-python raises the error.
            self._is_compiled = False
            return python_records(batch)

    def _read(self, count: int) -> list[Any]:
        """Return up to ``count`` records of the batch, none before the fetch offset."""
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
        return bool(row.offset < self._fetch.offset)

    def _read_by_python(self, count: int) -> list[Any]:
        """Read again by kafka-python what the compiled parser does not accept."""
        assert self._header is not None
        self._is_compiled = False
        taken = self._header.records_count - self._left
        self._rows = islice(python_records(self._batch), taken, None)
        return self._read(count)
