"""Each codec of Kafka, by cramjam and by Arrow."""

import struct
import sys

import pyarrow as pa
import pytest
from kafka.errors import CorruptRecordError

from kafka_marshal.kafka_io import compression
from kafka_marshal.kafka_io.compression import decompress

DATA = b"some bytes, some bytes and some more bytes; " * 20


@pytest.fixture(params=["cramjam", "pyarrow"])
def package(request, monkeypatch):
    """Decompress by one of the packages."""
    if request.param == "pyarrow":
        monkeypatch.setitem(sys.modules, "cramjam", None)
    compression._decoders.cache_clear()
    yield request.param
    compression._decoders.cache_clear()


def snappy(data):
    size, length = len(data), bytearray()
    block = pa.Codec("snappy").compress(data, asbytes=True)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    # Arrow writes the length, too.
    assert block.startswith(bytes(length) + bytes([size]))
    return block


def xerial(data):
    blocks = [snappy(data[:300]), snappy(data[300:])]
    framed = b"".join(struct.pack(">i", len(each)) + each for each in blocks)
    return b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1) + framed


def streamed(data, codec):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PRESSED = [
    (1, streamed(DATA, "gzip")),
    (2, snappy(DATA)),
    (2, xerial(DATA)),
    (3, streamed(DATA, "lz4")),
    (4, streamed(DATA, "zstd")),
]


@pytest.mark.parametrize(("codec", "pressed"), PRESSED)
def test_every_codec_of_kafka_is_decompressed_and_garbage_raises(
    package, codec, pressed
):
    assert decompress(codec, memoryview(pressed)) == DATA
    with pytest.raises(CorruptRecordError, match="decompress"):
        decompress(codec, memoryview(pressed[: len(pressed) // 2]))
    wrong = pressed[:12] + bytes([pressed[12] ^ 0xFF]) * 40
    with pytest.raises(CorruptRecordError, match="decompress"):
        decompress(codec, memoryview(wrong))


@pytest.mark.parametrize(("codec", "name"), [(3, "lz4"), (4, "zstd")])
def test_batches_of_one_thread_are_each_its_own(package, codec, name, monkeypatch):
    """Though one buffer is used for them, as far as it is large enough."""
    monkeypatch.setattr(compression, "_scratch", compression._Scratch())
    monkeypatch.setattr(compression, "_SCRATCH_BYTES_MAX", 10_000)
    whole = [
        bytes([number]) * size for number, size in enumerate((9, 9_999, 5, 99_999))
    ]
    found = [decompress(codec, memoryview(streamed(each, name))) for each in whole]
    assert found == whole
    if package == "cramjam":
        assert len(compression._scratch.buffer) == 9_999
    assert decompress(codec, memoryview(streamed(b"x", name)), room=2) == b"\0\0x"


@pytest.mark.parametrize("size", [-(2**31), -5, -4, 0, 2**31 - 1])
def test_a_block_of_another_size_ends_the_frame(package, size):
    _, pressed = PRESSED[2]
    with pytest.raises(CorruptRecordError, match="decompress"):
        decompress(2, memoryview(pressed[:16] + struct.pack(">i", size) + pressed[20:]))


def test_an_unknown_codec_is_refused(package):
    with pytest.raises(CorruptRecordError, match="unknown compression 7"):
        decompress(7, memoryview(b""))


def test_missing_memory_is_no_damage(monkeypatch):
    def fails(_):
        raise MemoryError

    monkeypatch.setattr(compression, "_decoders", lambda: {4: fails})
    with pytest.raises(MemoryError):
        decompress(4, memoryview(b""))


def test_without_a_package_nothing_is_decompressed(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "cramjam", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    compression._decoders.cache_clear()
    with pytest.raises(ImportError):
        decompress(1, memoryview(b""))
