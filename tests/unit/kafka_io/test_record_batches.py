"""Splitting fetches into batches, and the choice of a parser."""

import gzip
import struct
import sys
from types import FunctionType, SimpleNamespace

import crc32c
import pytest
from batchkit import new_batch
from kafka.errors import CorruptRecordError
from kafka.record.legacy_records import LegacyRecordBatchBuilder

from kafka_marshal.kafka_io.record_batches import (
    APPEND_TIME,
    HEADER_BYTES,
    batch_end,
    compiled_parser,
    content_of,
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


def test_the_end_of_a_batch_is_known_before_it_is_whole():
    raw = batch(b"a")
    assert batch_end(raw, 0) == len(raw)
    assert batch_end(raw, 1) is None
    assert batch_end(raw[:-1], 0) is None
    assert batch_end(raw[:11], 0) is None


def test_the_content_is_what_follows_the_header():
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


def test_any_changed_bit_is_found_by_the_checksum():
    data = bytearray(batch(b"value"))
    header = header_of(memoryview(data))
    assert has_checksum(memoryview(data), header)
    assert header.crc == crc32c.crc32c(data[21:])
    for at in range(21, len(data)):
        data[at] ^= 1
        assert not has_checksum(memoryview(data), header)
        data[at] ^= 1


def test_old_messages_are_checked():
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
