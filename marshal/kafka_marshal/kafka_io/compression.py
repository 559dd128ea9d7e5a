"""Decompression of record batches, by cramjam or, on machines without it, by Arrow."""

import gzip
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

from kafka.errors import CorruptRecordError

_GZIP, _SNAPPY, _LZ4, _ZSTD = 1, 2, 3, 4
# Frame of the Java library around Snappy blocks; others send one block without it.
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
# Bytes of a varint above this are followed by another.
_LAST = 127
# Of the buffer that a thread keeps.
_SCRATCH_BYTES_MAX = 4_194_304


class _Scratch(threading.local):
    """The buffer that a thread decompresses into, of the size of its largest batch.

    The kernel clears each page of a new one, and cramjam enlarges it several times.
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
    # It may be too small.
    with suppress(error):
        return memoryview(scratch)[: codec.decompress_into(data, scratch)]
    made = codec.decompress(data)
    size = len(made)
    if len(scratch) < size <= _SCRATCH_BYTES_MAX:
        _scratch.buffer = bytearray(size)
    return made


def _by_block(arrow: Any, block: memoryview) -> Any:
    # It starts with its length as a varint, which Arrow has to be given.
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
