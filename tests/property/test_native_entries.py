"""Entries of ``native/entries.c`` are those of kafka-python's records.

The same fetch is read by both, in portions, and compared after each: the entries, where
the next fetch begins, and the error at which reading ends. Where nothing was compiled,
the tests are skipped.
"""

import struct
from types import SimpleNamespace

import crc32c
import pytest
from batchkit import BadText, new_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka import TopicPartition as KafkaTopicPartition
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.legacy_records import LegacyRecordBatchBuilder

from kafka_marshal.kafka_io.entries import AT_ONCE, EntryRecords, to_entry
from kafka_marshal.kafka_io.patches import accept_any_header
from kafka_marshal.native import compiled
from kafka_marshal.protocol.types import LogEntry

pytestmark = pytest.mark.skipif(compiled is None, reason="nothing was compiled here")


def lenient():
    """Return what makes the records of a consumer that accepts any header."""
    consumer = SimpleNamespace(_fetcher=SimpleNamespace(PartitionRecords=None))
    accept_any_header(consumer)
    return consumer._fetcher.PartitionRecords


LENIENT = lenient()

PLACE = KafkaTopicPartition("__marshal", 0)
APPENDED, CONTROL, TRANSACTIONAL = 0x08, 0x20, 0x10
ATTRIBUTES_AT, CHECKSUM_AT = 21, 17
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
    """Draw the bytes of a fetch: batches of some leaders, perhaps cut at the end."""
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
    """Draw a fetch with other bytes, whose checksum may be right all the same."""
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


def read(kind, raw, *, start, portions):
    """Read a fetch in portions; return what each leaves."""
    part = kind(start, PLACE, MemoryRecords(raw))
    found = []
    for portion in portions:
        try:
            taken = part.take(portion) if part else None
        except Exception as error:  # noqa: BLE001 - it is compared
            found.append((type(error), part.next_fetch_offset))
            break
        entries = taken and [
            each if type(each) is LogEntry else to_entry(each) for each in taken
        ]
        found.append((entries, part.next_fetch_offset, part.leader_epoch, bool(part)))
    return found


portions = st.lists(st.integers(1, 5), max_size=3).map(lambda each: [*each, None, 1, 1])
starts = st.sampled_from([0, 0, 1, 8, 250, 2**40 + 1])


@given(fetches(), starts, portions)
@settings(max_examples=300)
def test_fetches_are_read_as_by_kafka_python(raw, start, portions):
    expected = read(LENIENT, raw, start=start, portions=portions)
    assert read(EntryRecords, raw, start=start, portions=portions) == expected


@given(hostile_fetches(), starts, portions)
@settings(max_examples=600)
def test_hostile_fetches_are_read_as_by_kafka_python(raw, start, portions):
    expected = read(LENIENT, raw, start=start, portions=portions)
    assert read(EntryRecords, raw, start=start, portions=portions) == expected


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
def test_only_what_is_unusual_is_left_to_kafka_python(raw, is_native):
    entries, at, _, _ = compiled.to_entries(raw, 0, LogEntry, AT_ONCE)
    assert (bool(entries), at) == (is_native, len(raw) if is_native else 0)
    assert read(EntryRecords, raw, start=0, portions=[None]) == read(
        LENIENT, raw, start=0, portions=[None]
    )


@pytest.mark.parametrize("size", [1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE])
def test_long_fetches_are_read_in_parts(size):
    raw = b"".join(
        sealed(written([(1, b"k", b"%d" % at, [])]), base=at) for at in range(size)
    )
    found = read(EntryRecords, raw, start=0, portions=[700, None])
    assert found == read(LENIENT, raw, start=0, portions=[700, None])
    assert compiled.to_entries(raw, 0, LogEntry, 10**6)[1:] == (len(raw), size, 0)


def test_places_outside_of_the_data_have_no_entries():
    raw = sealed(bytes(new_batch().build()), base=0)
    for at in (-1, len(raw), len(raw) + 1, 2**62):
        assert compiled.to_entries(raw, at, LogEntry, 9)[0] == []
    with pytest.raises(TypeError):
        compiled.to_entries(sealed(written([(1, None, b"", [])]), base=0), 0, int, 9)
    with pytest.raises(TypeError):
        compiled.to_entries("text", 0, LogEntry, 9)
