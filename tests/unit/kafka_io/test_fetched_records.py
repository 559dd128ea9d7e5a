"""Records of a fetch: positions, transactions, damage, and the choice of a parser."""

import gc
import random
import struct
import sys
from types import SimpleNamespace

import pytest
from batchkit import (
    APPEND_TIME,
    ATTRIBUTES,
    BadText,
    lenient_records,
    new_batch,
    sealed,
)
from kafka import TopicPartition as KafkaTopicPartition
from kafka.errors import CorruptRecordError
from kafka.record import MemoryRecords, MemoryRecordsBuilder

from kafka_marshal.kafka_io import fetched_records as module
from kafka_marshal.kafka_io.fetched_batches import FetchData
from kafka_marshal.kafka_io.fetched_records import (
    COMPILED_FROM_BYTES,
    Expansion,
    FetchedRecords,
    parse_records,
)
from kafka_marshal.kafka_io.packed_records import Origin
from kafka_marshal.kafka_io.record_batches import compiled_parser, python_records
from kafka_marshal.native import compiled

PLACE = KafkaTopicPartition("t", 0)
CONTROL = 0x20
ABORT, COMMIT = struct.pack(">hh", 0, 0), struct.pack(">hh", 0, 1)
FIELDS = ("offset", "timestamp", "timestamp_type", "key", "value", "headers")


def batch(
    offset, *values, magic=2, compression=0, producer=-1, key=b"k", flags=0, epoch=4
):
    builder = MemoryRecordsBuilder(
        magic=magic,
        compression_type=compression,
        batch_size=10**8,
        offset=0 if magic == 2 else offset,
        transactional=producer >= 0,
        producer_id=producer,
        producer_epoch=0 if producer >= 0 else -1,
        base_sequence=0 if producer >= 0 else -1,
    )
    for value in values:
        builder.append(timestamp=7, key=key, value=value)
    builder.close()
    data = builder.buffer()
    if magic < 2:
        return bytes(data)
    return sealed(data, offset=offset, epoch=epoch, flags=flags)


def with_header(name):
    builder = new_batch()
    builder.append(0, timestamp=1, key=None, value=b"x", headers=[(name, b"1")])
    return bytes(builder.build())


def rows_of(origin, sources):
    assert origin[:2] == PLACE
    epoch = origin.leader_epoch
    return [(epoch, *(getattr(each, name) for name in FIELDS)) for each in sources]


def fetch(data, **options):
    return FetchData(place=PLACE, data=memoryview(data), **options)


def fetched(*batches, start=0, parser=None, **options):
    return FetchedRecords(
        fetch(b"".join(batches), offset=start, **options),
        parser=parser or compiled_parser(),
        make=rows_of,
    )


def offsets(rows):
    return [row[1] for row in rows]


def values(rows):
    return [row[5] for row in rows]


def test_the_position_follows_records_taken_in_parts():
    drained = []
    part = fetched(
        batch(0, b"a", b"b", b"c"), batch(3, b"d", epoch=5), on_drain=drained.append
    )
    assert part
    assert values(part.take(2)) == [b"a", b"b"]
    assert (part.next_fetch_offset, part.leader_epoch) == (2, 4)
    rows = list(part.take(9))
    assert values(rows) == [b"c", b"d"]
    assert [row[0] for row in rows] == [4, 5]
    assert (part.next_fetch_offset, part.leader_epoch) == (4, 5)
    assert part.bytes_read > 0
    assert not part
    assert list(part.take(1)) == []
    part.drain()
    assert drained == [part]


def test_the_compiled_parser_reads_every_part_of_a_batch(monkeypatch):
    monkeypatch.setattr(module, "python_records", None)
    part = fetched(batch(0, b"a", b"b", b"c", b"d"), batch(4, b"e"), start=1)
    assert [offsets(part.take(2)) for _ in range(3)] == [[1, 2], [3, 4], []]


@pytest.mark.skipif(compiled is None, reason="not compiled")
def test_a_poll_ends_once_it_has_decompressed_enough(monkeypatch):
    """All that a response has may take hundreds of times its size, for all partitions.

    kafka-python takes more until the lengths add up to its limit.
    """
    monkeypatch.setattr(module, "DECOMPRESSED_BYTES", 3_000)
    log = [batch(at, bytes(1_000), compression=1) for at in range(5)]
    shared = Expansion()
    parts = [
        FetchedRecords(
            fetch(b"".join(log)), make=rows_of, can_pack=True, expansion=shared
        )
        for _ in range(2)
    ]
    polls = []
    while any(parts):
        left, offsets_found = 100, []
        while left > 0 and (part := next(filter(None, parts), None)):
            taken = part.take(left)
            left -= len(taken)
            offsets_found += [piece.offset_at(0) for piece in taken]
        polls.append(offsets_found)
    assert polls == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4]]


def test_all_records_are_taken_without_a_limit():
    assert values(fetched(batch(0, b"a"), batch(1, b"b")).take()) == [b"a", b"b"]


def test_a_fetch_may_begin_within_a_batch():
    part = fetched(batch(5, b"a", b"b", b"c"), start=7)
    assert offsets(part.take(5)) == [7]
    part = fetched(batch(5, b"a", b"b"), batch(7, b"c"), start=7)
    assert offsets(part.take(5)) == [7]


def test_the_position_skips_offsets_without_a_record():
    data = bytearray(batch(0, b"a", b"b"))
    struct.pack_into(">i", data, ATTRIBUTES + 2, 9)
    part = fetched(sealed(data))
    assert offsets(part.take(5)) == [0, 1]
    assert part.next_fetch_offset == 10
    marker = batch(3, b"", producer=5, key=COMMIT, flags=CONTROL)
    part = fetched(marker)
    assert list(part.take(5)) == []
    assert (part.next_fetch_offset, bool(part)) == (4, False)


def test_a_batch_that_is_cut_off_is_left_to_the_next_fetch():
    part = fetched(batch(0, b"a"), batch(1, b"b")[:-4])
    assert values(part.take(9)) == [b"a"]
    assert (part.next_fetch_offset, bool(part)) == (1, False)


LOG = (
    batch(0, b"lost", producer=5),
    batch(1, b"kept", producer=6),
    batch(2, b"plain"),
    batch(3, b"", producer=5, key=ABORT, flags=CONTROL),
    batch(4, b"again", producer=5),
    batch(5, b"", producer=5, key=COMMIT, flags=CONTROL),
    batch(6, b"", producer=6, key=COMMIT, flags=CONTROL),
)


def test_aborted_records_and_transaction_markers_are_skipped():
    aborted = [SimpleNamespace(first_offset=0, producer_id=5)]
    part = fetched(*LOG, aborted=aborted)
    assert values(part.take(9)) == [b"kept", b"plain", b"again"]
    assert part.next_fetch_offset == 7
    assert values(fetched(*LOG).take(9)) == [b"lost", b"kept", b"plain", b"again"]


def test_a_wrong_checksum_raises_after_the_records_before_it():
    wrong = bytearray(batch(1, b"value"))
    wrong[-2] ^= 1
    part = fetched(batch(0, b"a"), bytes(wrong), batch(2, b"c"))
    assert values(part.take(9)) == [b"a"]
    for _ in range(3):
        with pytest.raises(CorruptRecordError, match=r"offset 1 of .*checksum"):
            part.take(9)
    assert (part.next_fetch_offset, bool(part)) == (1, True)
    assert values(fetched(bytes(wrong), is_checked=False).take(9))


@pytest.mark.parametrize("compression", [0, 1, 2, 3, 4])
def test_batches_of_every_compression_are_read(compression):
    values_in = [b"v%d" % number * 50 for number in range(20)]
    part = FetchedRecords(fetch(packed(compression, values_in)), make=rows_of)
    assert values(part.take(99)) == values_in


def packed(compression, values_in):
    """Return a batch made by aiokafka, whose builder has every compression."""
    from aiokafka.record.default_records import (
        DefaultRecordBatchBuilder,
    )

    builder = DefaultRecordBatchBuilder(2, compression, 0, -1, -1, -1, 10**6)
    for number, value in enumerate(values_in):
        assert builder.append(number, timestamp=7, key=None, value=value, headers=[])
    data = bytes(builder.build())
    assert data[ATTRIBUTES + 1] & 7 == compression
    return data


def test_a_record_has_the_append_time_of_its_batch():
    (row,) = fetched(batch(0, b"a", flags=APPEND_TIME)).take(1)
    assert row[:4] == (4, 0, 7, 1)


@pytest.mark.parametrize("magic", [0, 1])
def test_batches_of_old_formats_are_read(magic):
    old = batch(1, b"a", b"b", magic=magic)
    part = fetched(batch(0, b"z"), old, batch(3, b"new"))
    assert values(part.take(2)) == [b"z", b"a"]
    assert values(part.take(9)) == [b"b", b"new"]
    assert part.next_fetch_offset == 4


def test_invalid_bytes_of_a_header_name_are_replaced():
    part = fetched(
        sealed(with_header("good")), sealed(with_header(BadText("b")), offset=1)
    )
    rows = list(part.take(9))
    assert [row[-1] for row in rows] == [[("good", b"1")], [("a\ufffd", b"1")]]


def test_kafka_python_parses_a_batch_that_the_parser_refuses():
    def refuses(_):
        raise ValueError

    assert values(fetched(batch(0, b"a", b"b"), parser=refuses).take(9)) == [b"a", b"b"]


def test_a_parser_failure_within_a_batch_loses_no_record():
    def fails(data):
        yield from list(python_records(data))[:2]
        raise ValueError

    part = fetched(batch(0, b"a", b"b", b"c"), batch(3, b"d"), parser=fails)
    assert values(part.take(1)) == [b"a"]
    assert values(part.take(9)) == [b"b", b"c", b"d"]


# --- both parsers, on damaged batches with correct checksums


def pure(data):
    """Return the records and the error of kafka-python's parser."""
    part = lenient_records(0, PLACE, MemoryRecords(data))
    return outcome(part, lambda rows: rows_of(Origin("t", 0, part.leader_epoch), rows))


def outcome(part, rows):
    found, error = [], None
    try:
        while part and (taken := list(part.take(3))):
            found += rows(taken)
    except Exception as raised:  # noqa: BLE001 - its type is compared
        error = type(raised)
    return found, error


@pytest.mark.parametrize("parser", [compiled_parser(), python_records])
def test_damaged_batches_give_the_records_and_errors_of_kafka_python(parser):
    """Each parser accepts exactly the batches that kafka-python accepts."""
    chance = random.Random(7)
    accepted = refused = 0
    for _ in range(4_000):
        builder = new_batch()
        for offset in range(chance.randrange(1, 6)):
            builder.append(
                offset,
                timestamp=chance.randrange(10**12),
                key=chance.choice([None, b"", b"key"]),
                value=chance.choice([None, b"", b"v" * 3, b"w" * 200]),
                headers=[("h", None), ("i", b"x")][: chance.randrange(3)],
            )
        data = bytearray(builder.build())
        for _ in range(chance.randrange(3)):
            data[chance.randrange(61, len(data))] = chance.randrange(256)
        if chance.random() < 0.1:
            count = chance.choice([0, 1, 3, 9, 2**31 - 1])
            struct.pack_into(">i", data, 57, count)
        raw = sealed(data)
        ours = fetched(raw, parser=parser)
        found, error = outcome(ours, lambda rows: rows)
        expected, expected_error = pure(raw)
        assert found == expected
        assert (error is None) == (expected_error is None), (error, expected_error)
        accepted += error is None
        refused += error is not None
    assert min(accepted, refused) > 300


# --- consumers


def consumer():
    return SimpleNamespace(_fetcher=SimpleNamespace(PartitionRecords=None))


def parser_of(monkeypatch, *values_in):
    """Read a fetch with these values; return the names of the parsers used."""
    used = []

    def noted(name, parse):
        def parsed(data):
            used.append(name)
            return parse(data)

        return parsed

    compiled = compiled_parser()
    monkeypatch.setattr(
        module, "compiled_parser", lambda: compiled and noted("compiled", compiled)
    )
    python = noted("python", module.python_records)
    monkeypatch.setattr(module, "python_records", python)
    ours = consumer()
    parse_records(ours, rows_of)
    part = ours._fetcher.PartitionRecords(
        *(0, PLACE, MemoryRecords(batch(0, *values_in))),
        key_deserializer=None,
        check_crcs=True,
    )
    assert values(part.take()) == list(values_in)
    return used


def test_large_fetches_are_parsed_by_the_compiled_parser(monkeypatch):
    assert parser_of(monkeypatch, bytes(COMPILED_FROM_BYTES)) == ["compiled"]


def test_small_fetches_are_parsed_by_kafka_python(monkeypatch):
    assert parser_of(monkeypatch, b"a", b"b") == ["python"]


def test_large_fetches_without_a_compiled_parser_use_kafka_python(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "compiled_parser", lambda: None)
    assert parser_of(monkeypatch, bytes(COMPILED_FROM_BYTES)) == ["python"]


def test_a_large_batch_does_not_start_the_garbage_collector():
    """The values made from records are retained, the parsed records are not."""

    def make(_, sources):
        return [each.value for each in sources]

    data = batch(0, *[b"v"] * 5_000)
    part = FetchedRecords(fetch(data), parser=compiled_parser(), make=make)
    runs = []

    def note(phase, _):
        runs.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        assert len(part.take(5_000)) == 5_000
    finally:
        gc.callbacks.remove(note)
    assert runs == []
