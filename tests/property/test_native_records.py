"""``native/records.c`` reads the records of a fetch that kafka-python reads.

For batches with right checksums and any content, a reader returns the same records,
the same position and the same type of error with and without the compiled functions.
Where nothing was compiled, the tests are skipped.
"""

import struct
from types import SimpleNamespace

import crc32c
import pytest
from batchkit import BadText, new_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka import TopicPartition as KafkaTopicPartition
from slices import slice_of

from kafka_marshal.kafka_io.fetched_batches import FetchData
from kafka_marshal.kafka_io.fetched_records import FetchedRecords
from kafka_marshal.kafka_io.packed_records import (
    PackedPiece,
    index_batches,
    parsed_records,
)
from kafka_marshal.kafka_io.record_batches import python_records
from kafka_marshal.native import compiled

pytestmark = pytest.mark.skipif(compiled is None, reason="nothing was compiled here")

PLACE = KafkaTopicPartition("t", 0)
APPENDED, TRANSACTIONAL, CONTROL = 0x08, 0x10, 0x20
EPOCH_AT, CHECKSUM_AT, ATTRIBUTES_AT, LAST_DELTA_AT = 12, 17, 21, 23
FIRST_MS_AT, PRODUCER_AT, COUNT_AT = 27, 43, 57
PRODUCER = 5
parts = st.none() | st.binary(max_size=5) | st.binary(min_size=60, max_size=300)
names = st.text(max_size=3) | st.just(BadText("b"))
headers = st.lists(st.tuples(names, parts), max_size=2)
times = st.sampled_from([0, 1, 63, 64, 8191, 2**31, 2**40, 2**62])
rows = st.lists(st.tuples(times, parts, parts, headers), min_size=1, max_size=8)


@st.composite
def batches(draw, *, is_hostile):
    """Draw a batch with a right checksum, perhaps with other bytes and count."""
    builder = new_batch()
    gap = draw(st.sampled_from([1] * 9 + [3]))
    for at, (time_ms, key, value, pairs) in enumerate(draw(rows)):
        builder.append(at * gap, timestamp=time_ms, key=key, value=value, headers=pairs)
    raw = bytearray(builder.build())
    raw[ATTRIBUTES_AT + 1] |= draw(st.sampled_from([0, 0, APPENDED]))
    if draw(st.integers(0, 5)) == 0:
        raw[ATTRIBUTES_AT + 1] |= draw(st.sampled_from([TRANSACTIONAL, CONTROL]))
        struct.pack_into(">q", raw, PRODUCER_AT, PRODUCER)
    if is_hostile:
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(61, len(raw) - 1))
            raw[at] = draw(st.integers(0, 255))
        if draw(st.integers(0, 4)) == 0:
            count = draw(st.sampled_from([-1, 0, 1, 3, 9, 2**31 - 1]))
            struct.pack_into(">i", raw, COUNT_AT, count)
    struct.pack_into(">I", raw, CHECKSUM_AT, crc32c.crc32c(bytes(raw[21:])))
    return bytes(raw)


@st.composite
def fetches(draw, *, is_hostile):
    """Draw consecutive batches, perhaps with gaps and higher leader epochs."""
    found, base, epoch = b"", 0, 0
    for _ in range(draw(st.integers(1, 5))):
        raw = bytearray(draw(batches(is_hostile=is_hostile and draw(st.booleans()))))
        epoch += draw(st.sampled_from([0, 0, 0, 1]))
        struct.pack_into(">q", raw, 0, base)
        struct.pack_into(">i", raw, EPOCH_AT, epoch)
        (last,) = struct.unpack_from(">i", raw, LAST_DELTA_AT)
        base += last + 1 + draw(st.sampled_from([0, 0, 0, 2]))
        found += raw
    return found[: len(found) - draw(st.sampled_from([0, 0, 0, 1, 70]))]


def read(raw, *, start, portion, can_pack, aborted=()):
    """Read a fetch in portions.

    Returns:
        All records, the position, the type of the error, and how many were packed.
    """
    part = FetchedRecords(
        FetchData(place=PLACE, offset=start, data=memoryview(raw), aborted=aborted),
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
@settings(max_examples=slice_of(quick=150, full=3_000))
def test_sound_batches_are_read_as_in_python(raw, start, portion):
    *found, _ = read(raw, start=start, portion=portion, can_pack=True)
    *expected, _ = read(raw, start=start, portion=portion, can_pack=False)
    assert found == expected


@given(batches(is_hostile=True), st.integers(0, 4), st.integers(1, 9))
@settings(max_examples=slice_of(quick=400, full=8_000))
def test_hostile_batches_are_read_as_in_python(raw, start, portion):
    *found, _ = read(raw, start=start, portion=portion, can_pack=True)
    *expected, _ = read(raw, start=start, portion=portion, can_pack=False)
    assert found == expected


@given(fetches(is_hostile=False), st.integers(0, 12), st.integers(1, 9), st.booleans())
@settings(max_examples=slice_of(quick=200, full=4_000))
def test_fetches_are_read_as_in_python(raw, start, portion, is_aborted):
    lost = SimpleNamespace(first_offset=2, producer_id=PRODUCER)
    same = {"start": start, "portion": portion, "aborted": [lost][: int(is_aborted)]}
    *found, _ = read(raw, **same, can_pack=True)
    *expected, _ = read(raw, **same, can_pack=False)
    assert found == expected


@given(fetches(is_hostile=True), st.integers(0, 12), st.integers(1, 9))
@settings(max_examples=slice_of(quick=400, full=8_000))
def test_hostile_fetches_are_read_as_in_python(raw, start, portion):
    *found, _ = read(raw, start=start, portion=portion, can_pack=True)
    *expected, _ = read(raw, start=start, portion=portion, can_pack=False)
    assert found == expected


def test_batches_with_falling_offsets_are_read_as_in_python():
    """A record of the first batch has an offset behind the end of that batch."""
    raw = b""
    for base, delta in ((0, 3), (2, 0), (3, 0)):
        builder = new_batch()
        builder.append(delta, timestamp=1, key=None, value=b"v", headers=[])
        made = bytearray(builder.build())
        struct.pack_into(">q", made, 0, base)
        struct.pack_into(">i", made, LAST_DELTA_AT, int(base == 0))
        struct.pack_into(">I", made, CHECKSUM_AT, crc32c.crc32c(bytes(made[21:])))
        raw += made
    for start in range(5):
        *found, _ = read(raw, start=start, portion=1, can_pack=True)
        *expected, _ = read(raw, start=start, portion=1, can_pack=False)
        assert found == expected


@given(st.lists(rows, min_size=1, max_size=4))
def test_sound_batches_without_a_gap_form_one_packed_piece(contents):
    raw, base = b"", 0
    for content in contents:
        builder = new_batch()
        for at, (time_ms, key, value, pairs) in enumerate(content):
            builder.append(at, timestamp=time_ms, key=key, value=value, headers=pairs)
        made = bytearray(builder.build())
        struct.pack_into(">q", made, 0, base)
        raw, base = raw + made, base + len(content)
    part = FetchedRecords(
        FetchData(place=PLACE, data=memoryview(raw)), make=list, can_pack=True
    )
    (piece,) = part.take()
    assert (piece.size, part.next_fetch_offset) == (base, base)


def test_every_truncation_of_a_batch_is_left_to_python():
    builder = new_batch()
    builder.append(0, timestamp=5, key=b"key", value=b"v" * 200, headers=[("h", b"x")])
    builder.append(1, timestamp=6, key=None, value=b"", headers=[])
    whole = bytearray(builder.build())
    for size in range(len(whole)):
        data = whole[:size]
        if size > ATTRIBUTES_AT:
            struct.pack_into(">i", data, 8, size - 12)
        assert index_batches(data, is_checked=False) is None
    assert index_batches(whole) is not None
    for at in (-1, len(whole), len(whole) + 1):
        assert index_batches(whole, at=at) is None
    struct.pack_into(">q", whole, FIRST_MS_AT, 2**63 - 1)
    assert index_batches(whole) is None, "its checksum is wrong"
    assert index_batches(whole, is_checked=False) is None, "a time overflows"


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 1_400, 1_535, 1_536, 1_537, 5_000, 70_001]
)
def test_a_wrong_checksum_of_a_batch_of_any_size_is_detected(size):
    builder = new_batch()
    value = bytes(number * 7 & 255 for number in range(size))
    builder.append(0, timestamp=5, key=None, value=value, headers=[])
    whole = bytearray(builder.build())
    assert index_batches(whole) is not None
    for at in range(ATTRIBUTES_AT, len(whole), max(1, len(whole) // 50)):
        whole[at] ^= 4
        assert index_batches(whole) is None
        whole[at] ^= 4
