"""``native/columns.c`` returns the columns of Python, or leaves a batch to Python.

Batches are written by kafka-python and then damaged. Where nothing was compiled, the
tests are skipped.
"""

import attrs
import pytest
from batchkit import built, taken
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.errors import CorruptRecordError
from slices import slice_of

from kafka_marshal.kafka_io import columns
from kafka_marshal.kafka_io.columns import Batch, to_columns
from kafka_marshal.native import compiled
from kafka_marshal.protocol.types import OFFSET_MAX, OffsetRange

pytestmark = pytest.mark.skipif(compiled is None, reason="nothing was compiled here")

EVERY = OffsetRange(0, OFFSET_MAX)
parts = st.none() | st.binary(max_size=5) | st.binary(min_size=60, max_size=300)
times = st.sampled_from([0, 1, 63, 64, 8191, 2**31, 2**40, 2**62])
headers = st.lists(st.tuples(st.text(max_size=3), parts), max_size=2)
rows = st.tuples(times, parts, parts, headers)
bases = st.sampled_from([0, 1, 2**31 - 1, 2**32, OFFSET_MAX - 1])
edges = st.integers(0, 300) | st.sampled_from([2**31, 2**32, OFFSET_MAX])


@st.composite
def logs(draw):
    """Draw batches whose offsets ascend."""
    found, base = [], 0
    gap = draw(st.sampled_from([1, 1, 63, 64, 70_000]))
    for _ in range(draw(st.integers(0, 3))):
        content = draw(st.lists(rows, min_size=1, max_size=12))
        batch = built([(at * gap, row) for at, row in enumerate(content)], base=base)
        append_ms = draw(st.none() | times)
        found.append(taken(batch, append_ms=append_ms))
        base = batch.next_offset
    return found


@st.composite
def hostile_logs(draw):
    """Draw batches with another byte, size, base, count or order."""
    found = draw(logs().filter(bool))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(found) - 1))
        batch, change = found[at], draw(st.integers(0, 6))
        data = bytearray(batch.data)
        if change <= 2 and data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        elif change == 3:
            del data[draw(st.integers(0, len(data))) :]
        elif change == 4:
            data += draw(st.binary(max_size=12))
        elif change == 5:
            size = draw(st.sampled_from([-1, 0, 1, batch.size + 1, 2**31 - 1]))
            batch = attrs.evolve(batch, size=size)
        else:
            batch = attrs.evolve(batch, base=draw(bases), first_ms=draw(times))
        found[at] = attrs.evolve(
            batch, data=draw(st.sampled_from([bytes, memoryview]))(data)
        )
    return found


def rows_of(found):
    """Return columns as lists, with their types."""
    if found is None:
        return None
    for column in (found.keys, found.values):
        column.validate(full=True)
    arrays = [found.offsets, found.times_ms, found.kinds]
    binary = [found.keys, found.values]
    return (
        [(each.dtype, each.tolist()) for each in arrays],
        [(each.type, each.null_count, each.to_pylist()) for each in binary],
        found.headers,
    )


def in_python(batches, span):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "compiled", None)
        return to_columns(batches, span, with_headers=False)


@given(logs(), st.tuples(edges, edges))
@settings(max_examples=200)
def test_sound_batches_are_never_left_to_python(batches, edges):
    span = OffsetRange(*edges)
    assert compiled.to_columns(batches, *edges) is not None
    found = to_columns(batches, span, with_headers=False)
    if batches:
        assert rows_of(found) == rows_of(in_python(batches, span))
    else:
        assert found is None


@given(hostile_logs(), st.tuples(edges, edges) | st.just((0, OFFSET_MAX)))
@settings(max_examples=slice_of(quick=300, full=6_000))
def test_hostile_batches_are_read_as_in_python_or_left_to_it(batches, edges):
    span = OffsetRange(*edges)
    expected = error = None
    try:
        expected = rows_of(in_python(batches, span))
    except (CorruptRecordError, ValueError, OverflowError) as raised:
        error = raised
    if error is not None:
        assert compiled.to_columns(batches, *edges) is None, error
    else:
        assert rows_of(to_columns(batches, span, with_headers=False)) == expected


def test_every_truncation_is_left_to_python():
    batch = taken(
        built([(0, (5, b"key", b"v" * 200, [("h", b"x")])), (1, (6, None, b"", []))])
    )
    for size in range(len(batch.data)):
        cut = attrs.evolve(batch, data=batch.data[:size])
        assert compiled.to_columns([cut], 0, OFFSET_MAX) is None
    assert compiled.to_columns([batch], 0, OFFSET_MAX)[0] == 2


def test_bad_attributes_of_a_batch_raise_or_are_left_to_python():
    batch = Batch(base=0, size=1, first_ms=0, append_ms=None, data=b"")
    huge = attrs.evolve(batch, first_ms=2**64)
    assert compiled.to_columns([huge], 0, 1) is None
    with pytest.raises(TypeError):
        compiled.to_columns([attrs.evolve(batch, data=None)], 0, 1)
    with pytest.raises(TypeError):
        compiled.to_columns([attrs.evolve(batch, base="no number")], 0, 1)
    with pytest.raises(AttributeError):
        compiled.to_columns([None], 0, 1)
