"""Decompression of record batches, by cramjam or, on machines without it, by Arrow."""

import gzip
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from kafka.errors import CorruptRecordError

_GZIP, _SNAPPY, _LZ4, _ZSTD = 1, 2, 3, 4
# Frame of the Java library around Snappy blocks; others send one block without it.
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
# Bytes of a varint above this are followed by another.
_LAST = 127

_Decoder = Callable[[Any], bytes]


def decompress(codec: int, data: Any) -> bytes:
    """Return the decompressed records of a batch.

    Raises:
        CorruptRecordError: The data is invalid, or the codec unknown.
        ImportError: Neither cramjam nor Arrow is installed.
    """
    decode = _decoders().get(codec)
    if decode is None:
        raise CorruptRecordError(f"a record batch has the unknown compression {codec}")
    try:
        return decode(data)
    except MemoryError:
        raise
    except Exception as error:
        raise CorruptRecordError(
            f"a record batch cannot be decompressed: {error}"
        ) from error


@cache
def _decoders() -> Mapping[int, _Decoder]:
    try:
        import cramjam
    except ImportError:
        return _decoders_of_arrow()
    return {
        _GZIP: gzip.decompress,
        _SNAPPY: _snappy(lambda block: bytes(cramjam.snappy.decompress_raw(block))),
        _LZ4: lambda data: bytes(cramjam.lz4.decompress(data)),
        _ZSTD: lambda data: bytes(cramjam.zstd.decompress(data)),
    }


def _decoders_of_arrow() -> Mapping[int, _Decoder]:
    import pyarrow as pa

    def stream_of(name: str) -> _Decoder:
        def decode(data: Any) -> bytes:
            source = pa.BufferReader(pa.py_buffer(data))
            with pa.CompressedInputStream(source, name) as stream:
                found: bytes = stream.read()
            return found

        return decode

    def decode_block(block: memoryview) -> bytes:
        # It starts with its length as a varint, which Arrow has to be given.
        size = shift = at = 0
        while block[at] > _LAST:
            size |= (block[at] & 127) << shift
            shift, at = shift + 7, at + 1
        size |= block[at] << shift
        found: bytes = pa.Codec("snappy").decompress(block, size, asbytes=True)
        return found

    return {
        _GZIP: gzip.decompress,
        _SNAPPY: _snappy(decode_block),
        _LZ4: stream_of("lz4"),
        _ZSTD: stream_of("zstd"),
    }


def _snappy(decode_block: Callable[[memoryview], bytes]) -> _Decoder:
    """Return a decoder of blocks, in a frame or without."""

    def decode(data: Any) -> bytes:
        data = memoryview(data)
        if data[: len(_XERIAL)] != _XERIAL:
            return decode_block(data)
        parts = []
        at = _XERIAL_HEADER_BYTES
        while at < len(data):
            (size,) = struct.unpack_from(">i", data, at)
            parts.append(decode_block(data[at + 4 : at + 4 + size]))
            at += 4 + size
        return b"".join(parts)

    return decode
