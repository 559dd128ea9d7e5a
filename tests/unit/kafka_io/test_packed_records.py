"""Records cut out of their fetched batches late equal those of a parser."""

import gc
import pickle
import struct

import pytest
from batchkit import (
    APPEND_TIME,
    ATTRIBUTES,
    PLACE,
    ROWS,
    TOKEN,
    BadText,
    batch,
    new_batch,
    numbered,
    piece,
    records,
    run_of,
    sealed,
)
from kafka.errors import CorruptRecordError

from kafka_marshal.kafka_io import fetched_records, packed_records, record_batches
from kafka_marshal.kafka_io.fetched_batches import FetchData
from kafka_marshal.kafka_io.fetched_records import FetchedRecords
from kafka_marshal.kafka_io.packed_records import (
    HEADERS,
    KEYS,
    TIMES,
    VALUES,
    Origin,
    PackedPiece,
    ParsedRecord,
    parsed_records,
)
from kafka_marshal.kafka_io.record_batches import python_records
from kafka_marshal.kafka_io.responses import ResponseBuffer
from kafka_marshal.native import compiled
from kafka_marshal.ports import Records
from kafka_marshal.protocol.types import OFFSET_MAX, Token

pytestmark = pytest.mark.skipif(compiled is None, reason="nothing was compiled here")


def offsets(found):
    return [each.offset for each in found]


@pytest.mark.parametrize("flags", [0, APPEND_TIME])
def test_packed_records_equal_parsed_records(flags):
    raw = batch(7, *ROWS, flags=flags)
    expected = list(
        parsed_records(
            list(python_records(memoryview(raw))), TOKEN, origin=Origin("t", 2, 4)
        )
    )
    found = records(piece(raw))
    assert list(found) == expected
    assert [found[at] for at in range(4)] == expected
    assert pickle.loads(pickle.dumps(found[0])) == expected[0]
    for name in ("offset", "key", "value", "timestamp_ms"):
        assert found.column(name) == [getattr(each, name) for each in expected]
    assert all(type(each) is ParsedRecord for each in found)


def test_invalid_bytes_of_a_header_name_are_replaced():
    raw = batch(0, (1, None, b"x", [(BadText("b"), b"1")]))
    (record,) = records(piece(raw))
    assert record.headers == (("a\ufffd", b"1"),)


def test_records_retain_no_batch_and_are_untracked_by_the_collector():
    raw = bytearray(numbered(0, 3))
    found = list(records(piece(raw)))
    assert not any(map(gc.is_tracked, found))
    del raw[:]  # raises if anything still refers to the buffer


def test_several_pieces_form_one_sequence():
    found = records(
        piece(numbered(0, 4), 1), piece(numbered(4, 3)), piece(numbered(9, 5), 2, 4)
    )
    expected = [1, 2, 3, 4, 5, 6, 11, 12]
    assert len(found) == len(expected)
    assert offsets(found) == found.column("offset") == expected
    assert [found.offset_at(at) for at in range(-8, 8)] == expected * 2
    assert offsets(found[-3:]) == [6, 11, 12]
    assert offsets(found[1:7:2]) == [2, 4, 6]
    assert offsets(found[5:2]) == []
    assert found[1:1].pieces == []
    for start in range(9):
        for stop in range(start, 9):
            part = found[start:stop]
            assert offsets(part) == expected[start:stop]
            assert part.column("value") == found.column("value")[start:stop]
    for index in (8, -9):
        with pytest.raises(IndexError):
            found.offset_at(index)
        with pytest.raises(IndexError):
            found[index]


def test_index_of_finds_the_first_record_at_or_after_an_offset():
    found = records(piece(numbered(2, 3)), piece(numbered(8, 2)))
    assert offsets(found) == [2, 3, 4, 8, 9]
    wanted = [0, 0, 0, 1, 2, 3, 3, 3, 3, 4, 5]
    assert [found.index_of(offset, 0) for offset in range(11)] == wanted
    assert [found.index_of(offset, 2) for offset in (0, 4, 9, 99)] == [2, 2, 4, 5]
    assert records().index_of(0, 0) == 0


def test_adjacent_parts_of_a_batch_are_joined():
    whole = run_of(numbered(0, 9))
    found = records(PackedPiece(whole, 0, 3))
    assert found.replace(2, records(PackedPiece(whole, 3, 5)))
    assert found.replace(0, records(PackedPiece(whole, 5, 6), piece(numbered(9, 1))))
    assert offsets(found) == [2, 3, 4, 5, 9]
    assert len(found.pieces) == 2
    assert not found.replace(0, Records([], token=Token(1, 0, 6)))
    assert not found.replace(0, [])
    assert found.replace(5, records(piece(numbered(12, 1))))
    assert offsets(found) == [12]


# --- batches that are left to a parser


def gap():
    builder = new_batch()
    for at in (0, 2):
        builder.append(at, timestamp=1, key=None, value=b"v", headers=[])
    return sealed(builder.build(), offset=0)


def with_count(count):
    data = bytearray(numbered(0, 2))
    struct.pack_into(">i", data, 57, count)
    return bytes(data)


@pytest.mark.parametrize(
    "raw",
    [
        gap(),
        with_count(0),
        with_count(-1),
        with_count(1),
        with_count(3),
        with_count(2**31 - 1),
        numbered(0, 2)[:-1],
        sealed(numbered(0, 2), offset=-3),
        sealed(numbered(0, 2), offset=OFFSET_MAX - 1),
        sealed(numbered(0, 2), offset=0, flags=1),
        sealed(numbered(0, 2), offset=0, flags=7),
    ],
)
def test_batches_with_gaps_or_damage_are_not_packed(raw):
    assert run_of(raw) is None


def test_a_compressed_batch_is_packed_only_with_a_codec(monkeypatch):
    from aiokafka.record.default_records import DefaultRecordBatchBuilder

    builder = DefaultRecordBatchBuilder(2, 3, 0, -1, -1, -1, 10**6)
    for at in range(20):
        builder.append(at, timestamp=7, key=None, value=b"same" * 50, headers=[])
    raw = bytes(builder.build())
    assert records(piece(raw)).column("value") == [b"same" * 50] * 20

    def missing(*_, **__):
        raise ImportError

    monkeypatch.setattr(record_batches, "decompress", missing)
    assert run_of(raw) is None


def test_a_batch_is_not_packed_without_compiled_functions(monkeypatch):
    monkeypatch.setattr(packed_records, "compiled", None)
    assert run_of(numbered(0, 2)) is None


def test_an_index_of_other_records_is_refused():
    found = run_of(numbered(0, 3))
    other = (b"\x00" * len(found.data), found.places)
    with pytest.raises(ValueError, match="not those of the index"):
        compiled.read_column(*other, 0, 3, VALUES)
    with pytest.raises(ValueError, match="not those of the index"):
        compiled.make_records(ParsedRecord, *other, 0, 3, VALUES, None, found.origin)
    with pytest.raises(ValueError, match="not those of the index"):
        compiled.export_records((*other, 0, 3, VALUES))
    whole = (found.data, found.places)
    for start, stop in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(IndexError):
            compiled.read_column(*whole, start, stop, VALUES)
        at = (ParsedRecord, *whole, start, stop, VALUES, None, found.origin)
        with pytest.raises(IndexError):
            compiled.make_records(*at)
        with pytest.raises(IndexError):
            compiled.export_records((*whole, 0, 1, KEYS), (*whole, start, stop, KEYS))
    for data, places in ((found.data, None), (None, found.places)):
        with pytest.raises(TypeError):
            compiled.read_column(data, places, 0, 1, VALUES)
        with pytest.raises(TypeError):
            compiled.export_records((data, places, 0, 1, VALUES))


def test_an_exception_of_the_record_class_is_raised():
    found = run_of(numbered(0, 3))

    def refuse(*_):
        raise LookupError("no record")

    at = (found.data, found.places, 0, 3, found.fields, None, found.origin)
    with pytest.raises(LookupError):
        compiled.make_records(refuse, *at)


def test_a_run_lists_only_fields_that_its_records_have():
    bare = run_of(batch(0, (1, None, b"v", []), (2, None, b"w", [])))
    assert bare.fields == VALUES | TIMES
    assert [each.key for each in Records([PackedPiece(bare, 0, 2)], token=None)] == [
        None,
        None,
    ]
    whole = run_of(batch(0, (1, None, b"v", []), (2, b"k", None, [("h", b"")])))
    assert whole.fields == KEYS | VALUES | TIMES | HEADERS
    expected = {KEYS: [None, b"k"], VALUES: [b"v", None], TIMES: [1, 2]}
    for field, column in expected.items():
        assert compiled.read_column(whole.data, whole.places, 0, 2, field) == column
    made = Records([PackedPiece(whole, 0, 2)], token=None)
    assert [each.headers for each in made] == [(), (("h", b""),)]
    assert compiled.read_column(whole.data, whole.places, 1, 1, VALUES) == []


# --- fetches


def fetch(*batches, start=0, **options):
    is_view = isinstance(batches[0], memoryview)
    data = batches[0] if is_view else memoryview(b"".join(batches))
    return FetchedRecords(
        FetchData(place=PLACE, offset=start, data=data, **options),
        parser=python_records,
        make=lambda origin, rows: parsed_records(rows, TOKEN, origin=origin),
        can_pack=True,
    )


def flat(taken):
    found = []
    for each in taken:
        found += each.records(TOKEN) if type(each) is PackedPiece else [each]
    assert len(taken) == len(found)
    return offsets(found)


def test_the_position_follows_pieces_taken_from_a_fetch():
    part = fetch(numbered(0, 5), gap_at(5), numbered(8, 3, epoch=5), start=1)
    assert flat(part.take(2)) == [1, 2]
    assert (part.next_fetch_offset, part.leader_epoch) == (3, 4)
    taken = part.take(5)
    assert [type(each) for each in taken] == [
        PackedPiece,
        ParsedRecord,
        ParsedRecord,
        PackedPiece,
    ]
    assert flat(taken) == [3, 4, 5, 7, 8]
    assert (part.next_fetch_offset, part.leader_epoch, bool(part)) == (9, 5, True)
    assert flat(part.take()) == [9, 10]
    assert (part.next_fetch_offset, bool(part)) == (11, False)


@pytest.mark.parametrize("start", [0, 3, 10, 14, 15, 17])
def test_records_indexed_on_arrival_equal_those_indexed_later(start):
    last = bytearray(numbered(13, 2))
    struct.pack_into(">i", last, ATTRIBUTES + 2, 3)  # two offsets without a record
    raw = numbered(0, 10) + numbered(10, 3) + sealed(last, offset=13) + gap_at(20)
    buffer = ResponseBuffer(len(raw))
    buffer[:] = raw
    view = memoryview(buffer)
    taken = compiled.index_records(view, 0, 0, True)
    buffer.set_indexes([(compiled.address_of(view), len(view), taken)])
    part, known = fetch(raw, start=start), fetch(view, start=start)
    while part:
        found = part.take(4)
        again = known.take(4)
        assert flat(found) == flat(again)
        assert [type(each) for each in found] == [type(each) for each in again]
        assert part.next_fetch_offset == known.next_fetch_offset
    assert not known


def test_an_empty_index_is_rebuilt():
    """It is empty if memory was short when the batches arrived."""
    raw = numbered(0, 5)
    buffer = ResponseBuffer(len(raw))
    buffer[:] = raw
    view = memoryview(buffer)
    nothing = (b"", 0, 0, -1, -1, -1)
    buffer.set_indexes([(compiled.address_of(view), len(view), nothing)])
    taken = fetch(view).take(9)
    assert [type(each) for each in taken] == [PackedPiece]
    assert flat(taken) == [0, 1, 2, 3, 4]


def gap_at(offset):
    return sealed(gap(), offset=offset)


def test_the_position_skips_offsets_without_a_record():
    data = bytearray(numbered(0, 2))
    struct.pack_into(">i", data, ATTRIBUTES + 2, 9)
    part = fetch(sealed(data, offset=0), start=1)
    assert flat(part.take(5)) == [1]
    assert part.next_fetch_offset == 10
    part = fetch(sealed(data, offset=0), start=4)
    assert flat(part.take(5)) == []
    assert part.next_fetch_offset == 10


def test_a_wrong_checksum_raises_after_the_records_before_it():
    wrong = bytearray(numbered(2, 2))
    wrong[-2] ^= 1
    part = fetch(numbered(0, 2), bytes(wrong))
    assert flat(part.take(9)) == [0, 1]
    for _ in range(2):
        with pytest.raises(CorruptRecordError, match=r"offset 2 of .*checksum"):
            part.take(9)


def test_taken_pieces_are_counted_as_records():
    taken = fetch(numbered(0, 5), numbered(5, 5)).take(7)
    assert len(taken) == 7
    drained = []
    drained.extend(taken)
    assert [each.size for each in drained] == [7]
    assert not fetched_records.Taken()
