"""``native/entries.c`` reads the entries that Python and kafka-python read.

The tests read a fetch with each and compare the entries, the offset of the next fetch,
and the error at which reading ends. Where nothing was compiled, they are skipped.
"""

import struct
from types import SimpleNamespace

import crc32c
import pytest
from batchkit import BadText, lenient_records, new_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka import TopicPartition as KafkaTopicPartition
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.legacy_records import LegacyRecordBatchBuilder
from slices import slice_of

from kafka_marshal.kafka_io import entries as module
from kafka_marshal.kafka_io.entries import fetch_entries, to_runs
from kafka_marshal.kafka_io.record_batches import batch_end
from kafka_marshal.native import compiled
from kafka_marshal.protocol.packed_entries import PackedEntries
from kafka_marshal.protocol.types import LogEntry

pytestmark = pytest.mark.skipif(compiled is None, reason="nothing was compiled here")


def entries_by(native):
    """Return the class that reads a fetch, with this compiled module or None."""
    consumer = SimpleNamespace(_fetcher=SimpleNamespace(PartitionRecords=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compiled", native)
        fetch_entries(consumer)
    return consumer._fetcher.PartitionRecords


LENIENT, PACKED, PARSED = lenient_records, entries_by(compiled), entries_by(None)

PLACE = KafkaTopicPartition("__marshal", 0)
APPENDED, CONTROL, TRANSACTIONAL = 0x08, 0x20, 0x10
MAGIC_AT, ATTRIBUTES_AT, CHECKSUM_AT = 16, 21, 17
names = st.text(max_size=4) | st.just(BadText("b"))
values = st.none() | st.binary(max_size=80)
rows = st.tuples(
    st.sampled_from([0, 1, 63, 64, 2**40]),
    values,
    values,
    st.lists(st.tuples(names, values), max_size=2),
)


def sealed(raw, *, base, epoch=0, attributes=0, max_ms=None):
    """Return a batch with other header fields and the checksum of its bytes."""
    made = bytearray(raw)
    struct.pack_into(">q", made, 0, base)
    struct.pack_into(">i", made, 12, epoch)
    (before,) = struct.unpack_from(">h", made, ATTRIBUTES_AT)
    struct.pack_into(">h", made, ATTRIBUTES_AT, before | attributes)
    if max_ms is not None:
        struct.pack_into(">q", made, 35, max_ms)
    struct.pack_into(">I", made, CHECKSUM_AT, crc32c.crc32c(bytes(made[21:])))
    return bytes(made)


def written(content, *, compression=0, gap=1):
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=10**9,
    )
    for at, (time_ms, key, value, headers) in enumerate(content):
        builder.append(
            at * gap, timestamp=time_ms, key=key, value=value, headers=headers
        )
    return builder.build()


def old(value):
    builder = LegacyRecordBatchBuilder(1, 0, 10_000)
    builder.append(0, timestamp=1, key=None, value=value)
    return bytes(builder.build())


@st.composite
def fetches(draw):
    """Draw a fetch: batches of several leader epochs, perhaps cut at the end."""
    found, base, epoch = [], draw(st.sampled_from([0, 7, 2**40])), 0
    for _ in range(draw(st.integers(0, 4))):
        content = draw(st.lists(rows, min_size=1, max_size=6))
        gap = draw(st.sampled_from([1, 1, 200]))
        compression = draw(st.sampled_from([0] * 9 + [1]))
        epoch += draw(st.sampled_from([0, 0, 1]))
        kind = draw(st.sampled_from([0, APPENDED, APPENDED, TRANSACTIONAL, CONTROL]))
        raw = written(content, compression=compression, gap=gap)
        max_ms = draw(st.sampled_from([None, 5, -1, 2**63 - 1]))
        found.append(
            sealed(raw, base=base, epoch=epoch, attributes=kind, max_ms=max_ms)
        )
        base += len(content) * gap
    whole = b"".join(found)
    if draw(st.integers(0, 3)) == 0:
        whole = whole[: draw(st.integers(0, len(whole)))]
    return whole


@st.composite
def hostile_fetches(draw):
    """Draw a fetch with some bytes changed, most often with a right checksum."""
    raw = bytearray(written(draw(st.lists(rows, min_size=1, max_size=4))))
    for _ in range(draw(st.integers(1, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    end = draw(st.sampled_from([len(raw)] * 3 + [draw(st.integers(61, len(raw)))]))
    raw = raw[:end]
    if draw(st.booleans()):
        struct.pack_into(">i", raw, 8, len(raw) - 12)
    raw[16] = draw(st.sampled_from([2] * 9 + [1, 3]))
    if draw(st.integers(0, 4)):
        struct.pack_into(">I", raw, CHECKSUM_AT, crc32c.crc32c(bytes(raw[21:])))
    before, behind = draw(fetches()), draw(fetches())
    return before + bytes(raw) + behind


def entry_of(item):
    """Return a record of kafka-python as an entry."""
    if isinstance(item, LogEntry):
        return item
    return LogEntry(
        offset=item.offset,
        leader_epoch=item.leader_epoch,
        timestamp_ms=item.timestamp,
        timestamp_type=item.timestamp_type,
        value=item.value,
    )


def read(kind, raw, *, start=0, most=None):
    """Read a fetch; return entries, next offset, leader epoch and type of error."""
    part = kind(start, PLACE, MemoryRecords(raw))
    entries, error = [], None
    while part:
        try:
            taken = part.take(most)
        except Exception as raised:  # noqa: BLE001 - its type is compared
            error = type(raised)
            break
        for run in to_runs(taken):
            if isinstance(run, PackedEntries):
                assert len(run) == len(list(run))
                assert part.next_fetch_offset > run[-1].offset
            entries += map(entry_of, run)
    epoch = part.leader_epoch if error is None else None
    return entries, part.next_fetch_offset, epoch, error


def formats_of(raw):
    """Return the message formats of all batches.

    kafka-python also reads some batches with unknown formats.
    """
    found, at = set(), 0
    while (end := batch_end(memoryview(raw), at)) is not None and end > at + MAGIC_AT:
        found.add(raw[at + MAGIC_AT])
        at = end
    return found


starts = st.sampled_from([0, 0, 1, 8, 250, 2**40 + 1])
portions = st.sampled_from([None, 1, 3])


@given(fetches(), starts, portions)
@settings(max_examples=300)
def test_a_fetch_is_read_as_kafka_python_reads_it(raw, start, most):
    entries, position, *rest = read(LENIENT, raw, start=start)
    # kafka-python's position may be below the fetch, after batches below it.
    expected = entries, max(start, position), *rest
    assert read(PACKED, raw, start=start, most=most) == expected


@given(hostile_fetches(), starts, st.sampled_from([1, 3, module.RUN_MAX]))
@settings(max_examples=slice_of(quick=300, full=6_000))
def test_a_damaged_fetch_is_read_as_python_reads_it(raw, start, run_max):
    expected = read(PARSED, raw, start=start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RUN_MAX", run_max)
        found = read(PACKED, raw, start=start)
    assert found == expected
    if formats_of(raw) <= {0, 1, 2}:
        theirs = read(LENIENT, raw, start=start)
        assert found[0] == theirs[0]
        # kafka-python raises another error for a batch that is too short.
        assert (found[-1] is None) == (theirs[-1] is None)


def packed(raw, *, first=0, most=10**6):
    """Return the packed entries of a fetch, and the place behind them."""
    places, behind, *_ = compiled.index_entries(raw, 0, first, most)
    return PackedEntries(raw, places), behind


@pytest.mark.parametrize(
    ("raw", "is_native"),
    [
        (sealed(written([(1, None, b"v", [])]), base=0), True),
        (sealed(written([(1, None, b"v", [])] * 9), base=3, attributes=APPENDED), True),
        (sealed(written([(1, None, b"v" * 900, [])], compression=1), base=0), False),
        (sealed(written([(1, None, b"v", [])]), base=0, epoch=-1), False),
        (old(b"v"), False),
    ],
    ids=["one", "append time", "compressed", "no leader epoch", "old format"],
)
def test_only_unusual_batches_are_left_to_kafka_python(raw, is_native):
    entries, behind = packed(raw)
    assert (bool(entries), behind) == (is_native, len(raw) if is_native else 0)
    assert read(PACKED, raw) == read(LENIENT, raw)


@pytest.mark.parametrize("run_max", [1, 499, 500, 501, 10_000])
def test_a_long_fetch_is_read_in_runs_of_any_size(monkeypatch, run_max):
    raw = b"".join(
        sealed(written([(1, b"k", b"%d" % at, [])]), base=at) for at in range(1_200)
    )
    monkeypatch.setattr(module, "RUN_MAX", run_max)
    assert read(PACKED, raw) == read(LENIENT, raw)
    assert compiled.index_entries(raw, 0, 0, 10**6)[1:] == (len(raw), 1_200, 0)


def test_a_run_ends_before_a_batch_of_another_leader_epoch():
    both = [
        sealed(written([(1, None, b"v", [])]), base=at, epoch=at // 2)
        for at in range(4)
    ]
    raw = b"".join(both)
    entries, behind = packed(raw)
    assert [each.offset for each in entries] == [0, 1]
    assert behind == len(both[0] + both[1])
    assert read(PACKED, raw) == read(LENIENT, raw)


def test_a_batch_with_a_lower_offset_is_left_to_python():
    raw = b"".join(sealed(written([(1, None, b"v", [])]), base=at) for at in (5, 4))
    entries, _ = packed(raw)
    assert [each.offset for each in entries] == [5]
    assert [each.offset for each in read(PACKED, raw)[0]] == [5, 4]


def test_a_control_batch_with_a_lower_offset_is_left_to_python():
    one = sealed(written([(1, None, b"v", [])]), base=9)
    back = sealed(written([(1, None, b"", [])]), base=0, attributes=CONTROL)
    entries, behind = packed(one + back)
    assert ([each.offset for each in entries], behind) == ([9], len(one))


@given(fetches(), st.binary(max_size=2))
def test_with_head_selects_entries_by_their_first_bytes(raw, head):
    entries, _ = packed(raw)
    wanted = [each for each in entries if (each.value or b"").startswith(head)]
    wanted = [each for each in wanted if each.value is not None]
    assert entries.with_head(head) == wanted


@given(fetches(), st.sampled_from([-1, 0, 4, 5, 2**40, 2**63 - 1]))
def test_first_later_counts_the_entries_up_to_a_time(raw, time_ms):
    entries, _ = packed(raw)
    later = [
        number
        for number, each in enumerate(entries)
        if each.timestamp_type == 1 and each.timestamp_ms > time_ms
    ]
    assert entries.first_later(time_ms) == next(iter(later), len(entries))


@given(
    st.binary(max_size=200),
    st.lists(st.tuples(st.integers(-9, 300), st.integers(-9, 300)), max_size=4),
)
def test_an_index_of_any_numbers_reads_no_byte_outside_the_data(raw, drawn):
    places = b"".join(struct.pack("=ii", *each) for each in drawn)
    entries = PackedEntries(raw, places)
    for read_all in (
        list,
        lambda each: each.with_head(b"\x01"),
        lambda each: each[: each.first_later(5)],
    ):
        try:
            found = read_all(entries)
        except ValueError:
            continue
        assert all(len(each.value or b"") <= len(raw) for each in found)


def test_places_outside_the_data_give_no_entries_or_an_error():
    raw = sealed(bytes(new_batch().build()), base=0)
    for at in (-1, len(raw), len(raw) + 1, 2**62):
        assert compiled.index_entries(raw, at, 0, 9)[:2] == (b"", at)
    one = sealed(written([(1, None, b"", [])]), base=0)
    places = compiled.index_entries(one, 0, 0, 9)[0]
    for start, stop in ((-1, 1), (0, 2), (1, 0)):
        with pytest.raises(IndexError):
            compiled.read_entries(one, places, start, stop, LogEntry)
    with pytest.raises(TypeError):
        compiled.read_entries(one, places, 0, 1, int)
    with pytest.raises(TypeError):
        compiled.read_entries(one, "text", 0, 1, LogEntry)
    with pytest.raises(TypeError):
        compiled.index_entries("text", 0, 0, 9)
