"""Records that ``native/records.c`` cuts out of a batch are those of kafka-python.

Whatever a batch with a right checksum has in it, a reader returns the same records, the
same position and the same kind of error with and without the compiled functions. Where
nothing was compiled, the tests are skipped.
"""

import struct

import crc32c
import pytest
from batchkit import BadText, new_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka import TopicPartition as KafkaTopicPartition

from kafka_marshal.kafka_io.fetched_batches import FetchData
from kafka_marshal.kafka_io.fetched_records import FetchedRecords
from kafka_marshal.kafka_io.packed_records import PackedPiece, parsed_records
from kafka_marshal.kafka_io.record_batches import python_records
from kafka_marshal.native import compiled

pytestmark = pytest.mark.skipif(compiled is None, reason="nothing was compiled here")

PLACE = KafkaTopicPartition("t", 0)
APPENDED = 0x08
ATTRIBUTES_AT, CHECKSUM_AT, COUNT_AT = 21, 17, 57
parts = st.none() | st.binary(max_size=5) | st.binary(min_size=60, max_size=300)
names = st.text(max_size=3) | st.just(BadText("b"))
headers = st.lists(st.tuples(names, parts), max_size=2)
times = st.sampled_from([0, 1, 63, 64, 8191, 2**31, 2**40, 2**62])
rows = st.lists(st.tuples(times, parts, parts, headers), min_size=1, max_size=8)


@st.composite
def batches(draw, *, is_hostile):
    """Draw a batch, perhaps with other bytes and another count, its checksum right."""
    builder = new_batch()
    gap = draw(st.sampled_from([1] * 9 + [3]))
    for at, (time_ms, key, value, pairs) in enumerate(draw(rows)):
        builder.append(at * gap, timestamp=time_ms, key=key, value=value, headers=pairs)
    raw = bytearray(builder.build())
    raw[ATTRIBUTES_AT + 1] |= draw(st.sampled_from([0, 0, APPENDED]))
    if is_hostile:
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(61, len(raw) - 1))
            raw[at] = draw(st.integers(0, 255))
        if draw(st.integers(0, 4)) == 0:
            count = draw(st.sampled_from([-1, 0, 1, 3, 9, 2**31 - 1]))
            struct.pack_into(">i", raw, COUNT_AT, count)
    struct.pack_into(">I", raw, CHECKSUM_AT, crc32c.crc32c(bytes(raw[21:])))
    return bytes(raw)


def read(raw, *, start, portion, can_pack):
    """Read a fetch in portions; return all records, the position and the error."""
    part = FetchedRecords(
        FetchData(place=PLACE, offset=start, data=memoryview(raw)),
        parser=python_records,
        make=lambda origin, sources: parsed_records(sources, None, origin=origin),
        can_pack=can_pack,
    )
    found, error, packed = [], None, 0
    try:
        while part:
            for each in part.take(portion):
                if type(each) is PackedPiece:
                    found += each.records(None)
                    packed += each.size
                else:
                    found.append(each)
    except Exception as raised:  # noqa: BLE001 - its type is compared
        error = type(raised)
    return [repr(each) for each in found], part.next_fetch_offset, error, packed


@given(batches(is_hostile=False), st.integers(0, 4), st.integers(1, 9))
@settings(max_examples=300)
def test_sound_batches_are_read_as_in_python(raw, start, portion):
    *found, _ = read(raw, start=start, portion=portion, can_pack=True)
    *expected, _ = read(raw, start=start, portion=portion, can_pack=False)
    assert found == expected


@given(batches(is_hostile=True), st.integers(0, 4), st.integers(1, 9))
@settings(max_examples=800)
def test_hostile_batches_are_read_as_in_python(raw, start, portion):
    *found, _ = read(raw, start=start, portion=portion, can_pack=True)
    *expected, _ = read(raw, start=start, portion=portion, can_pack=False)
    assert found == expected


@given(rows)
def test_sound_batches_without_a_gap_are_never_parsed(content):
    builder = new_batch()
    for at, (time_ms, key, value, pairs) in enumerate(content):
        builder.append(at, timestamp=time_ms, key=key, value=value, headers=pairs)
    *_, packed = read(bytes(builder.build()), start=0, portion=3, can_pack=True)
    assert packed == len(content)


def test_every_truncation_of_the_records_is_left_to_python():
    builder = new_batch()
    builder.append(0, timestamp=5, key=b"key", value=b"v" * 200, headers=[("h", b"x")])
    builder.append(1, timestamp=6, key=None, value=b"", headers=[])
    data = bytes(builder.build())[61:]
    for size in range(len(data)):
        assert compiled.index_records(data[:size], 2, 0) is None
    assert compiled.index_records(data, 2, 0) is not None
    assert compiled.index_records(data, 2, 2**63 - 1) is None, "a time overflows"
