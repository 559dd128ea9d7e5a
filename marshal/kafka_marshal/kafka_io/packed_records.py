"""Record batches that stay as they were fetched until their records are handed out.

``native/records.c`` checks a batch once and notes where each record begins. After that
the offset of any record is known without reading it, and records are cut out of the
bytes when the application gets them. Without the compiled functions, and for a batch
that they leave, records are parsed when they are fetched.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import msgspec
from kafka.errors import CorruptRecordError

from kafka_marshal.kafka_io.record_batches import Header, content_of
from kafka_marshal.native import compiled
from kafka_marshal.ports import Piece, Record, Records
from kafka_marshal.protocol.types import OFFSET_MAX, Token

if TYPE_CHECKING:
    import pyarrow as pa

# Fields of ``native/records.c``, to be combined; offsets need none.
KEYS, VALUES, TIMES, HEADERS = 1, 2, 4, 8
_FIELDS = {"key": KEYS, "value": VALUES, "timestamp_ms": TIMES}
# Of each record in an index.
_INDEX_BYTES = 4
_offset = attrgetter("offset")
_value = attrgetter("value")
_key = attrgetter("key")
_timestamp = attrgetter("timestamp")
_timestamp_type = attrgetter("timestamp_type")
_headers = attrgetter("headers")


class Origin(NamedTuple):
    """Where the records of a batch come from; the leader epoch is -1 if unknown."""

    topic: str
    partition: int
    leader_epoch: int


class ParsedRecord(Record, msgspec.Struct, frozen=True, gc=False):
    """A record that was made of fetched bytes, which it does not retain."""

    offset: int
    value: bytes | None
    token: Token | None
    key: bytes | None
    timestamp_ms: int
    timestamp_type: int
    headers: tuple[tuple[str, bytes], ...]
    _origin: Origin

    @property
    def topic(self) -> str:
        """Data topic."""
        return self._origin.topic

    @property
    def partition(self) -> int:
        """Data partition."""
        return self._origin.partition

    @property
    def leader_epoch(self) -> int | None:
        """Leader epoch of the batch, or None."""
        epoch = self._origin.leader_epoch
        return epoch if epoch >= 0 else None


def parsed_records(
    sources: Sequence[Any], token: Token | None, *, origin: Origin
) -> Iterator[Record]:
    """Make records from those of a parser, which are not retained."""
    headers = list(map(_headers, sources))
    # All callables are built in: no Python frame per record.
    return map(
        ParsedRecord,
        map(_offset, sources),
        map(_value, sources),
        repeat(token),
        map(_key, sources),
        map(_timestamp, sources),
        map(_timestamp_type, sources),
        map(tuple, headers) if any(headers) else repeat(()),
        repeat(origin),
    )


@attrs.frozen(kw_only=True, eq=False)
class PackedBatch:
    """A sound record batch without gaps, and where its records begin.

    Attributes:
        origin: Where it comes from.
        base: Offset of the first record.
        first_ms: What the times of the records count from.
        append_ms: Log append time, if the topic uses it.
        data: Its records, decompressed.
        index: Where each record begins, as ``native/records.c`` writes it.
        fields: The fields that some record has.
    """

    origin: Origin
    base: int
    first_ms: int
    append_ms: int | None
    data: Any
    index: bytes
    fields: int

    @property
    def count(self) -> int:
        """Number of its records."""
        return len(self.index) // _INDEX_BYTES

    def bytes_of(self, start: int, stop: int) -> memoryview:
        """Return the bytes of records, counted from the first one of the batch."""
        starts = memoryview(self.index).cast("i")
        end = starts[stop] if stop < len(starts) else len(self.data)
        return memoryview(self.data)[starts[start] : end]


class PackedPiece(NamedTuple):
    """Records of a batch, counted from its first one: ``start <= at < stop``.

    See ``ports.Piece``.
    """

    batch: PackedBatch
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of records."""
        return self.stop - self.start

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return self.batch.base + self.stop - 1

    def offset_at(self, index: int) -> int:
        """Return the offset of a record."""
        return self.batch.base + self.start + index

    def index_of(self, offset: int) -> int:
        """Return the index of the first record from an offset on."""
        return max(0, offset - self.batch.base - self.start)

    def cut(self, start: int, stop: int) -> "PackedPiece":
        """Return a part of it."""
        return PackedPiece(self.batch, self.start + start, self.start + stop)

    def column(self, name: str) -> list[Any]:
        """Return one field of its records; see ``ports.Piece``."""
        if name == "offset":
            return list(range(self.offset_at(0), self.last_offset + 1))
        batch, field = self.batch, _FIELDS[name]
        if field == TIMES and batch.append_ms is not None:
            return [batch.append_ms] * self.size
        return self._columns(field)[field.bit_length() - 1] or []

    def _columns(self, fields: int) -> tuple[list[Any] | None, ...]:
        """Return keys, values, times and headers, each if it is among the fields."""
        assert compiled is not None
        batch = self.batch
        found: tuple[list[Any] | None, ...] = compiled.read_columns(
            *(batch.data, batch.index, self.start, self.stop, fields, batch.first_ms)
        )
        return found

    def records(self, token: Token | None) -> Iterator[Record]:
        """Make its records."""
        assert compiled is not None
        batch = self.batch
        # The time of an append is that of all records.
        fields = batch.fields if batch.append_ms is None else batch.fields & ~TIMES
        made: list[Record] = compiled.make_records(
            *(ParsedRecord, batch.data, batch.index, self.start, self.stop, fields),
            *(batch.base, batch.first_ms, token, batch.append_ms, batch.origin),
        )
        return iter(made)

    def join(self, other: Piece) -> "PackedPiece | None":
        """Return both as one if they are parts of one batch."""
        if not isinstance(other, PackedPiece) or other.batch is not self.batch:
            return None
        if other.start != self.stop:
            return None
        return PackedPiece(self.batch, self.start, other.stop)


def pack(raw: memoryview, header: Header, *, origin: Origin) -> PackedBatch | None:
    """Return a batch of format 2 with an index; None for one that is to be parsed.

    Args:
        raw: The batch, whose checksum was compared.
        header: Its header.
        origin: Where it comes from.
    """
    end = header.base_offset + header.records_count
    if compiled is None or not 0 <= header.base_offset < end <= OFFSET_MAX:
        return None
    try:
        data = content_of(raw, header)
    except (CorruptRecordError, ImportError):
        return None
    found = compiled.index_records(data, header.records_count, header.first_ms)
    if found is None:
        return None
    index, fields = found
    return PackedBatch(
        origin=origin,
        base=header.base_offset,
        first_ms=header.first_ms,
        append_ms=header.append_ms,
        data=data,
        index=index,
        fields=fields,
    )


def to_arrow(records: Records) -> "pa.RecordBatch | None":
    """Return the columns of ``Batch.to_arrow``; None to make them of lists.

    Raises:
        ImportError: pyarrow is not installed.
    """
    pieces = [each for each in records.pieces if isinstance(each, PackedPiece)]
    if len(pieces) < len(records.pieces):
        return None
    from kafka_marshal.kafka_io.columns import Batch, to_record_batch

    return to_record_batch(
        [
            Batch(
                base=each.batch.base,
                size=each.size,
                first_ms=each.batch.first_ms,
                append_ms=each.batch.append_ms,
                data=each.batch.bytes_of(each.start, each.stop),
            )
            for each in pieces
        ]
    )
