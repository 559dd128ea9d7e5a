"""Record batches of a fetch, and records of a batch by aiokafka's compiled parser.

kafka-python's parser is Python and takes longer than everything else together. aiokafka
has a compiled one for the same format. It is optional: without it kafka-python parses.
kafka-python also parses each batch that the compiled parser refuses, so both ways
accept the same batches, and raise the same errors for others.

Batches are decompressed by cramjam or, on machines without it, by Arrow.
"""

import gzip
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import crc32c
from kafka.errors import CorruptRecordError
from kafka.record.legacy_records import LegacyRecordBatch

from kafka_marshal.kafka_io.patches import LenientBatch

# Makes an iterator of records from the bytes of a batch.
Parser = Callable[[Any], Iterator[Any]]

# Offset and length, which all formats begin with; then the header of format 2.
_PREFIX = struct.Struct(">qi")
_HEADER = struct.Struct(">qiibIhiqqqhii")
_MAGIC_AT = struct.calcsize(">qii")
_CHECKED_FROM = struct.calcsize(">qiibI")
_MAGIC = 2
_COMPRESSION, APPEND_TIME, _TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20
HEADER_BYTES = _HEADER.size
# Shortest message of format 0.
_OLD_BYTES_MIN = _PREFIX.size + 14
_GZIP, _SNAPPY, _LZ4, _ZSTD = 1, 2, 3, 4
# Frame of the Java library around Snappy blocks; others send one block without it.
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
# Bytes of a varint above this are followed by another.
_LAST = 127
# Largest buffer that a thread keeps.
_SCRATCH_BYTES_MAX = 4_194_304


class Header(NamedTuple):
    """Header of a record batch in format 2, field by field."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    first_ms: int
    last_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records_count: int

    @property
    def next_offset(self) -> int:
        """Offset behind the batch, with or without a record."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> int:
        """Number of its compression, 0 for none."""
        return self.attributes & _COMPRESSION

    @property
    def append_ms(self) -> int | None:
        """Log append time of its records, if the topic uses it."""
        return self.last_ms if self.attributes & APPEND_TIME else None

    @property
    def is_transactional(self) -> bool:
        """Whether it belongs to a transaction."""
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        """Whether it has a control record instead of records of the application."""
        return bool(self.attributes & _CONTROL)


@cache
def compiled_parser() -> Parser | None:
    """Return aiokafka's compiled parser, or None if it is not installed."""
    try:
        from aiokafka.record.default_records import DefaultRecordBatch
    except ImportError:
        return None
    if isinstance(DefaultRecordBatch.validate_crc, FunctionType):
        # aiokafka without its extension has a parser like kafka-python's.
        return None
    parser: Parser = DefaultRecordBatch
    return parser


def batch_end(data: memoryview, at: int) -> int | None:
    """Return where the batch ends that begins here; None if it is cut off or missing.

    The end of a damaged batch may be anywhere.
    """
    if at + _PREFIX.size > len(data):
        return None
    _, length = _PREFIX.unpack_from(data, at)
    end: int = at + _PREFIX.size + length
    return end if end <= len(data) else None


def whole_batches(data: memoryview) -> Iterator[memoryview]:
    """Yield the batches of a fetch; the last one may be cut off and is left out.

    Raises:
        CorruptRecordError: A batch is shorter than its header.
    """
    at = 0
    while (end := batch_end(data, at)) is not None:
        least = _OLD_BYTES_MIN
        if end - at >= least and data[at + _MAGIC_AT] >= _MAGIC:
            least = _HEADER.size
        if end - at < least:
            offset, _ = _PREFIX.unpack_from(data, at)
            raise CorruptRecordError(
                f"the batch at offset {offset} has {end - at} bytes, at least {least} "
                "are needed"
            )
        yield data[at:end]
        at = end


def header_of(batch: memoryview) -> Header | None:
    """Return the header of a batch; None in formats before 2."""
    if batch[_MAGIC_AT] < _MAGIC:
        return None
    return Header(*_HEADER.unpack_from(batch))


def has_checksum(batch: memoryview, header: Header) -> bool:
    """Return whether a batch of format 2 has the checksum in its header."""
    return crc32c.crc32c(batch[_CHECKED_FROM:]) == header.crc


def content_of(batch: memoryview, header: Header) -> Any:
    """Return the records of a batch of format 2 in a buffer, decompressed.

    Raises:
        CorruptRecordError: They cannot be decompressed.
        ImportError: No package for their compression is installed.
    """
    data = batch[HEADER_BYTES:]
    return decompress(header.codec, data) if header.codec else data


def uncompressed(batch: memoryview, header: Header) -> Any:
    """Return a batch of format 2 without its compression; the checksum stays as it was.

    Raises:
        CorruptRecordError: It cannot be decompressed.
        ImportError: No package for its compression is installed.
    """
    if not header.codec:
        return batch
    made = decompress(header.codec, batch[HEADER_BYTES:], room=HEADER_BYTES)
    made[:HEADER_BYTES] = batch[:HEADER_BYTES]
    _PREFIX.pack_into(made, 0, header.base_offset, len(made) - _PREFIX.size)
    made[_CHECKED_FROM + 1] &= ~_COMPRESSION
    return made


def python_records(batch: memoryview) -> Iterator[Any]:
    """Return the records of a batch of format 2 by kafka-python's parser."""
    records: Iterator[Any] = iter(LenientBatch(batch))
    return records


def old_records(batch: memoryview, *, is_checked: bool) -> Iterator[Any]:
    """Yield the records of a batch in a format before 2.

    Raises:
        CorruptRecordError: A message has a wrong checksum.
    """
    found = LegacyRecordBatch(batch, batch[_MAGIC_AT])
    if is_checked and not found.validate_crc():
        raise CorruptRecordError(f"the batch at offset {found.base_offset} is damaged")
    for record in found:
        if is_checked and not record.validate_crc():
            raise CorruptRecordError(f"the record at offset {record.offset} is damaged")
        yield record


def is_abort(batch: memoryview) -> bool:
    """Return whether a control batch ends a transaction by aborting it."""
    record = next(python_records(batch), None)
    return record is not None and bool(record.abort)


# --- Compression


class _Scratch(threading.local):
    """The buffer that a thread decompresses into, of the size of its largest batch.

    A new buffer takes longer: the kernel clears each of its pages, and cramjam enlarges
    it several times.
    """

    buffer = bytearray()


_scratch = _Scratch()


def decompress(codec: int, data: memoryview, *, room: int = 0) -> bytearray:
    """Return the decompressed records of a batch.

    Args:
        codec: As in the attributes of a batch.
        data: The compressed records.
        room: Bytes to leave for the caller before the records.

    Raises:
        CorruptRecordError: The data is invalid, or the codec unknown.
        ImportError: Neither cramjam nor Arrow is installed.
    """
    decode = _decoders().get(codec)
    if decode is None:
        raise CorruptRecordError(f"a record batch has the unknown compression {codec}")
    is_framed = codec == _SNAPPY and data[: len(_XERIAL)] == _XERIAL
    try:
        blocks = map(decode, _blocks(data) if is_framed else (data,))
        return bytearray().join((bytes(room), *blocks))
    except MemoryError:
        raise
    except Exception as error:
        raise CorruptRecordError(
            f"a record batch cannot be decompressed: {error}"
        ) from error


def _blocks(data: memoryview) -> Iterator[memoryview]:
    at = _XERIAL_HEADER_BYTES
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        yield data[at + 4 : at + 4 + size]
        at += 4 + size


@cache
def _decoders() -> Mapping[int, Callable[[memoryview], Any]]:
    try:
        from cramjam import DecompressionError, lz4, snappy, zstd
    except ImportError:
        import pyarrow as pa

        return {
            _GZIP: gzip.decompress,
            _SNAPPY: partial(_by_block, pa),
            _LZ4: partial(_by_stream, pa, "lz4"),
            _ZSTD: partial(_by_stream, pa, "zstd"),
        }
    return {
        _GZIP: gzip.decompress,
        _SNAPPY: snappy.decompress_raw,
        _LZ4: partial(_by_frame, lz4, DecompressionError),
        _ZSTD: partial(_by_frame, zstd, DecompressionError),
    }


def _by_frame(codec: Any, error: type[Exception], data: memoryview) -> Any:
    """Return a view that is valid until this thread decompresses the next frame."""
    scratch = _scratch.buffer
    # Raises if the buffer is too small.
    with suppress(error):
        return memoryview(scratch)[: codec.decompress_into(data, scratch)]
    made = codec.decompress(data)
    size = len(made)
    if len(scratch) < size <= _SCRATCH_BYTES_MAX:
        _scratch.buffer = bytearray(size)
    return made


def _by_block(arrow: Any, block: memoryview) -> Any:
    # A block starts with its length as a varint, which Arrow needs as an argument.
    size = shift = at = 0
    while block[at] > _LAST:
        size |= (block[at] & 127) << shift
        shift, at = shift + 7, at + 1
    size |= block[at] << shift
    return arrow.Codec("snappy").decompress(block, size, asbytes=True)


def _by_stream(arrow: Any, name: str, data: memoryview) -> Any:
    source = arrow.BufferReader(arrow.py_buffer(data))
    with arrow.CompressedInputStream(source, name) as stream:
        return stream.read()
