"""Record batches that stay as they were fetched until their records are handed out.

``native/batches.c`` checks batches once and notes where each record begins. After that
the offset of any record is known without reading it, and records are cut out of the
bytes when the application gets them. Without the compiled functions, and in a batch
that they do not accept, records are parsed when they are fetched.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import attrs
import msgspec
from kafka.errors import CorruptRecordError

from kafka_marshal.kafka_io.record_batches import Header, uncompressed
from kafka_marshal.native import compiled
from kafka_marshal.ports import Piece, Record
from kafka_marshal.protocol.types import Token

# Flags for fields of records, as in ``native/records.h``; offsets need no flag.
KEYS, VALUES, TIMES, HEADERS = 1, 2, 4, 8
_FIELDS = {"key": KEYS, "value": VALUES, "timestamp_ms": TIMES}
# Bytes for each record in an index.
_PLACE_BYTES = 8
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
class PackedRun:
    """Records of sound batches of one leader epoch, without a gap between offsets.

    Attributes:
        origin: Where they come from.
        base: Offset of the first one.
        data: The batches, uncompressed.
        places: Where each record is, as ``native/batches.c`` writes it.
        fields: The fields that some record has.
    """

    origin: Origin
    base: int
    data: Any
    places: bytes
    fields: int

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.places) // _PLACE_BYTES


class PackedPiece(NamedTuple):
    """Records of a run, counted from its first one: ``start <= at < stop``.

    See ``ports.Piece``.
    """

    run: PackedRun
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of records."""
        return self.stop - self.start

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return self.run.base + self.stop - 1

    def offset_at(self, index: int) -> int:
        """Return the offset of a record."""
        return self.run.base + self.start + index

    def index_of(self, offset: int) -> int:
        """Return the index of the first record from an offset on."""
        return max(0, offset - self.run.base - self.start)

    def cut(self, start: int, stop: int) -> "PackedPiece":
        """Return a part of it."""
        return PackedPiece(self.run, self.start + start, self.start + stop)

    def column(self, name: str) -> list[Any]:
        """Return one field of its records; see ``ports.Piece``."""
        if name == "offset":
            return list(range(self.offset_at(0), self.last_offset + 1))
        assert compiled is not None
        run = self.run
        made: list[Any] = compiled.read_column(
            run.data, run.places, self.start, self.stop, _FIELDS[name]
        )
        return made

    def records(self, token: Token | None) -> Iterator[Record]:
        """Make its records."""
        assert compiled is not None
        run = self.run
        made: list[Record] = compiled.make_records(
            *(ParsedRecord, run.data, run.places, self.start, self.stop, run.fields),
            *(token, run.origin),
        )
        return iter(made)

    def join(self, other: Piece) -> "PackedPiece | None":
        """Return both as one if they are parts of one run."""
        if not isinstance(other, PackedPiece) or other.run is not self.run:
            return None
        if other.start != self.stop:
            return None
        return PackedPiece(self.run, self.start, other.stop)


class Index(NamedTuple):
    """Batches that ``native/batches.c`` has read, and where their records are.

    Attributes:
        places: Where each record is.
        fields: The fields that some record has.
        behind: Where the batches end.
        base: Offset of the first record.
        next_offset: Offset behind the batches, with or without a record.
        leader_epoch: Leader epoch of the batches.
    """

    places: bytes
    fields: int
    behind: int
    base: int
    next_offset: int
    leader_epoch: int

    def since(self, offset: int) -> "Index":
        """Return the index without the records below an offset."""
        left_out = offset - self.base
        if left_out <= 0 or not self.places:
            return self
        return self._replace(places=self.places[left_out * _PLACE_BYTES :], base=offset)

    def run(self, data: Any, place: Any) -> PackedRun:
        """Return the records as a run, with the data and partition of the index."""
        return PackedRun(
            origin=Origin(place.topic, place.partition, self.leader_epoch),
            base=self.base,
            data=data,
            places=self.places,
            fields=self.fields | VALUES | TIMES,
        )


def index_batches(
    data: Any, *, at: int = 0, first: int = 0, is_checked: bool = True
) -> Index | None:
    """Find where records are, in as many batches as follow each other without a gap.

    Control batches are skipped.

    Args:
        data: Batches.
        at: Where to begin.
        first: Records below this offset are left out.
        is_checked: Whether to compare checksums.

    Returns:
        None if the next batch must be read in another way: it is compressed, of an old
        format or malformed, or has a gap.
    """
    if compiled is None:
        return None
    found = Index(*compiled.index_records(data, at, first, is_checked))
    return found if found.behind > at else None


def pack(
    batch: memoryview, header: Header, *, first: int, place: Any
) -> PackedRun | None:
    """Return the records of one batch of format 2; None if a parser has to read it.

    Args:
        batch: The batch, whose checksum was compared.
        header: Its header.
        first: Records below this offset are left out.
        place: Its partition.
    """
    if compiled is None:
        return None
    try:
        data = uncompressed(batch, header)
    except (CorruptRecordError, ImportError):
        return None
    found = index_batches(data, first=first, is_checked=False)
    return found.run(data, place) if found is not None and found.places else None
