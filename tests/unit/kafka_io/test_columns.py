"""Columns of record batches, compared with the records of kafka-python."""

import attrs
import pyarrow as pa
import pytest
from batchkit import BadText, built, taken
from hypothesis import given
from hypothesis import strategies as st
from kafka.errors import CorruptRecordError

from kafka_marshal.kafka_io.columns import to_columns
from kafka_marshal.protocol.types import OffsetRange

FAR = 2**62
parts = st.none() | st.binary(max_size=200)
rows = st.tuples(
    st.integers(min_value=0, max_value=2**40),
    parts,
    parts,
    st.lists(st.tuples(st.text(max_size=5), parts), max_size=2),
)


def listed(found):
    return {
        "offsets": found.offsets.tolist(),
        "times": found.times_ms.tolist(),
        "kinds": found.kinds.tolist(),
        "keys": found.keys.to_pylist(),
        "values": found.values.to_pylist(),
        "headers": [list(each) for each in found.headers],
    }


def expected(records):
    return {
        "offsets": [each.offset for each in records],
        "times": [each.timestamp for each in records],
        "kinds": [each.timestamp_type for each in records],
        "keys": [each.key for each in records],
        "values": [each.value for each in records],
        "headers": [each.headers for each in records],
    }


@given(
    contents=st.lists(st.lists(rows, min_size=1, max_size=80), min_size=1, max_size=3),
    gap=st.integers(min_value=1, max_value=200),
    edges=st.tuples(st.integers(0, 400), st.integers(0, 400)),
)
def test_columns_equal_the_records_of_kafka_python_in_the_range(contents, gap, edges):
    batches, base = [], 0
    for content in contents:
        places = [(at * gap, row) for at, row in enumerate(content)]
        batches.append(built(places, base=base))
        base = batches[-1].next_offset
    found = to_columns(
        [taken(each) for each in batches], OffsetRange(*edges), with_headers=True
    )
    first, end = edges
    own = [each for batch in batches for each in batch if first <= each.offset < end]
    if found is None:
        assert not own
    else:
        assert listed(found) == expected(own)


def test_large_records_and_distant_times_are_read():
    records = [
        (0, (0, b"k" * 70_000, b"v" * 3_000_000, [])),
        (300_000, (2**55, None, b"", [("a" * 100, None)])),
    ]
    batch = built(records, base=2**40)
    found = to_columns([taken(batch)], OffsetRange(0, FAR), with_headers=True)
    assert listed(found) == expected(list(batch))


def test_headers_are_optional_and_null_columns_are_binary():
    batch = built([(0, (1, None, b"v", [("a", b"1")])), (1, (1, None, b"w", []))])
    found = to_columns([taken(batch)], OffsetRange(0, FAR), with_headers=False)
    assert found.headers is None
    assert (found.keys.type, found.keys.null_count) == (pa.binary(), 2)


def test_append_time_applies_to_every_record_of_a_batch():
    batches = [
        taken(built([(0, (10, None, b"", [])), (1, (20, None, b"", []))])),
        taken(built([(0, (30, None, b"", []))], base=2), append_ms=77),
    ]
    found = to_columns(batches, OffsetRange(1, 3), with_headers=False)
    assert found.times_ms.tolist() == [20, 77]
    assert found.kinds.tolist() == [0, 1]


@pytest.mark.parametrize("change", ["cut", "more", "key", "length"])
def test_malformed_records_are_refused(change):
    batch = taken(built([(0, (1, b"key", b"value", [])), (1, (1, b"key", b"v", []))]))
    data = bytearray(batch.data)
    if change == "cut":
        data = data[:-3]
    elif change == "more":
        data += b"\x02\x00"
    elif change == "key":
        data[4:5] = b"\x7e"  # a length beyond the end
        data[data.index(b"key", 10) - 1] = 0x7E
    else:
        data[0] = 0xFF
    with pytest.raises(CorruptRecordError):
        to_columns(
            [attrs.evolve(batch, data=bytes(data))],
            OffsetRange(0, FAR),
            with_headers=False,
        )


def test_invalid_bytes_of_a_header_name_are_replaced():
    """Otherwise one record with such a header would stop its readers for good."""
    batch = built([(0, (1, None, b"v", [(BadText("b"), b"2"), ("good", None)]))])
    found = to_columns([taken(batch)], OffsetRange(0, 1), with_headers=True)
    assert listed(found)["headers"] == [[("a\ufffd", b"2"), ("good", None)]]
