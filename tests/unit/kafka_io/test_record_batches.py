"""Batches of a fetch: splitting, headers, checksums, parsers and compression."""

import gzip
import struct
import sys
from types import FunctionType, SimpleNamespace

import crc32c
import pyarrow as pa
import pytest
from batchkit import new_batch
from kafka.errors import CorruptRecordError
from kafka.record.legacy_records import LegacyRecordBatchBuilder

from kafka_marshal.kafka_io import record_batches
from kafka_marshal.kafka_io.record_batches import (
    APPEND_TIME,
    HEADER_BYTES,
    batch_end,
    compiled_parser,
    content_of,
    decompress,
    has_checksum,
    header_of,
    old_records,
    python_records,
    whole_batches,
)


def batch(*values) -> memoryview:
    builder = new_batch()
    for offset, value in enumerate(values):
        builder.append(offset, timestamp=5, key=None, value=value, headers=[])
    return memoryview(bytes(builder.build()))


def old_batch() -> memoryview:
    builder = LegacyRecordBatchBuilder(1, 0, 10_000)
    builder.append(0, timestamp=1, key=None, value=b"old")
    return memoryview(bytes(builder.build()))


@pytest.fixture
def fresh():
    compiled_parser.cache_clear()
    yield
    compiled_parser.cache_clear()


def test_a_fetch_is_split_into_whole_batches():
    one, two = batch(b"a"), batch(b"b", b"c")
    assert list(whole_batches(memoryview(bytes(one) + bytes(two)))) == [one, two]
    for cut in range(1, len(two) + 1):
        data = bytes(one) + bytes(two)[:-cut]
        assert list(whole_batches(memoryview(data))) == [one]
    assert list(whole_batches(memoryview(b""))) == []


@pytest.mark.parametrize("length", [-1, 0, 13, 48])
def test_a_batch_shorter_than_its_header_is_refused(length):
    data = bytearray(batch(b"a"))
    struct.pack_into(">i", data, 8, length)
    with pytest.raises(CorruptRecordError, match="offset 0 has"):
        list(whole_batches(memoryview(data)))


def test_only_a_whole_batch_has_an_end():
    raw = batch(b"a")
    assert batch_end(raw, 0) == len(raw)
    assert batch_end(raw, 1) is None
    assert batch_end(raw[:-1], 0) is None
    assert batch_end(raw[:11], 0) is None


def test_the_content_of_a_batch_follows_its_header_decompressed():
    raw = batch(b"a")
    header = header_of(raw)
    assert header is not None
    assert content_of(raw, header) == raw[HEADER_BYTES:]
    content = gzip.compress(raw[HEADER_BYTES:])
    pressed = memoryview(bytes(raw[:HEADER_BYTES]) + content)
    assert content_of(pressed, header._replace(attributes=1)) == raw[HEADER_BYTES:]
    with pytest.raises(CorruptRecordError):
        content_of(raw, header._replace(attributes=1))


def test_a_header_has_every_field():
    header = header_of(batch(b"a", b"b"))
    assert header is not None
    assert (header.base_offset, header.next_offset, header.records_count) == (0, 2, 2)
    assert (header.first_ms, header.magic, header.producer_id) == (5, 2, -1)
    assert header.append_ms is None
    assert header._replace(attributes=APPEND_TIME, last_ms=9).append_ms == 9
    assert not header.is_control
    assert not header.is_transactional
    assert header_of(old_batch()) is None


def test_the_checksum_detects_a_change_of_any_byte():
    data = bytearray(batch(b"value"))
    header = header_of(memoryview(data))
    assert has_checksum(memoryview(data), header)
    assert header.crc == crc32c.crc32c(data[21:])
    for at in range(21, len(data)):
        data[at] ^= 1
        assert not has_checksum(memoryview(data), header)
        data[at] ^= 1


def test_checksums_of_old_messages_are_checked_on_request():
    data = bytearray(old_batch())
    assert [each.value for each in old_records(data, is_checked=True)] == [b"old"]
    data[-1] ^= 1
    assert len(list(old_records(data, is_checked=False))) == 1
    with pytest.raises(CorruptRecordError):
        list(old_records(data, is_checked=True))


def test_both_parsers_make_the_same_records():
    parse = compiled_parser()
    assert parse is not None, "the locked requirements have it for this machine"
    names = ("offset", "timestamp", "timestamp_type", "key", "value", "headers")
    raw = batch(b"a", None, b"")
    found = [
        [tuple(getattr(each, name) for name in names) for each in records]
        for records in (parse(raw), python_records(raw))
    ]
    assert found[0] == found[1]
    assert [row[4] for row in found[0]] == [b"a", None, b""]


def test_without_aiokafka_there_is_no_compiled_parser(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiokafka.record.default_records", None)
    assert compiled_parser() is None


def test_aiokafka_without_its_extension_is_not_used(fresh, monkeypatch):
    def validate_crc(_):
        return True

    assert isinstance(validate_crc, FunctionType)
    plain = SimpleNamespace(validate_crc=validate_crc)
    name = "aiokafka.record.default_records"
    module = SimpleNamespace(DefaultRecordBatch=plain)
    monkeypatch.setitem(sys.modules, name, module)
    assert compiled_parser() is None


# --- Each codec of Kafka, by cramjam and by Arrow

DATA = b"some bytes, some bytes and some more bytes; " * 20


@pytest.fixture(params=["cramjam", "pyarrow"])
def package(request, monkeypatch):
    """The package that decompresses."""
    if request.param == "pyarrow":
        monkeypatch.setitem(sys.modules, "cramjam", None)
    record_batches._decoders.cache_clear()
    yield request.param
    record_batches._decoders.cache_clear()


def snappy(data):
    size, length = len(data), bytearray()
    block = pa.Codec("snappy").compress(data, asbytes=True)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    # The block of Arrow begins with the length.
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
def test_batches_decompressed_with_one_buffer_are_independent(
    package, codec, name, monkeypatch
):
    """A thread reuses one buffer for all batches up to a size."""
    monkeypatch.setattr(record_batches, "_scratch", record_batches._Scratch())
    monkeypatch.setattr(record_batches, "_SCRATCH_BYTES_MAX", 10_000)
    whole = [
        bytes([number]) * size for number, size in enumerate((9, 9_999, 5, 99_999))
    ]
    found = [decompress(codec, memoryview(streamed(each, name))) for each in whole]
    assert found == whole
    if package == "cramjam":
        assert len(record_batches._scratch.buffer) == 9_999
    assert decompress(codec, memoryview(streamed(b"x", name)), room=2) == b"\0\0x"


@pytest.mark.parametrize("size", [-(2**31), -5, -4, 0, 2**31 - 1])
def test_a_wrong_block_size_in_a_snappy_frame_raises(package, size):
    _, pressed = PRESSED[2]
    with pytest.raises(CorruptRecordError, match="decompress"):
        decompress(2, memoryview(pressed[:16] + struct.pack(">i", size) + pressed[20:]))


def test_an_unknown_codec_raises(package):
    with pytest.raises(CorruptRecordError, match="unknown compression 7"):
        decompress(7, memoryview(b""))


def test_a_memory_error_is_not_reported_as_corruption(monkeypatch):
    def fails(_):
        raise MemoryError

    monkeypatch.setattr(record_batches, "_decoders", lambda: {4: fails})
    with pytest.raises(MemoryError):
        decompress(4, memoryview(b""))


def test_decompression_without_a_codec_package_raises(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "cramjam", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    record_batches._decoders.cache_clear()
    with pytest.raises(ImportError):
        decompress(1, memoryview(b""))
