"""What a fetch brings, given to kafka-python's own accounting of partitions."""

import struct
from types import SimpleNamespace

import pytest
from kafka import TopicPartition
from kafka.errors import CorruptRecordError
from kafka.record import MemoryRecords, MemoryRecordsBuilder
from kafka.record.util import calc_crc32c

from kafka_marshal.kafka_io import fetched as module
from kafka_marshal.kafka_io.fetched import Aim, Unopened, as_columns, is_known

PLACE = TopicPartition("t", 0)
END = 2**62
# Places in a batch's header, and bits there.
CRC, ATTRIBUTES = 17, 21
CONTROL, APPEND_TIME = 0x20, 0x08
ABORT, COMMIT = (struct.pack(">hh", 0, kind) for kind in (0, 1))


def batch(offset, *values, magic=2, producer=-1, key=b"k", flags=0, compression=0):
    """Return the bytes of a batch."""
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
    found = bytearray(builder.buffer())
    if magic == 2:
        struct.pack_into(">q", found, 0, offset)
        found[ATTRIBUTES + 1] |= flags
        struct.pack_into(">I", found, CRC, calc_crc32c(memoryview(found)[ATTRIBUTES:]))
    return bytes(found)


def fetched(*batches, start=0, end=END, aborted=(), aim=None):
    """Return the records of a fetch, as kafka-python would keep them."""
    aim = aim or Aim()
    aim.take((start, end))
    records = MemoryRecords(b"".join(batches))
    found = Unopened(start, PLACE, records, aborted_transactions=aborted)
    found.aim = aim
    return found


def values(part, span=(0, END)):
    found = []
    for whole in part.take(1):
        for group in whole.groups:
            rows = group(span, with_headers=False)
            column = [] if rows is None else rows.values
            found += column if isinstance(column, list) else column.to_pylist()
    return found


def test_a_fetch_comes_as_a_whole_and_the_next_is_asked_for_meanwhile():
    part = fetched(batch(0, b"a", b"b"), batch(2, b"c"))
    assert part
    (whole,) = part.take(1)
    assert whole.offset == 2
    assert (part.next_fetch_offset, part.bytes_read > 0) == (3, True)
    assert not part, "kafka-python fetches more"


def test_at_the_end_of_a_range_nothing_more_is_asked_for():
    part = fetched(batch(0, b"a", b"b"), batch(2, b"c"), batch(3, b"d"), end=2)
    assert values(part) == [b"a", b"b"], "and nothing behind is looked at"
    assert part, "kafka-python believes that there is more"
    assert part.take(1) == []
    assert not part, "and goes on once it has looked"


def test_a_range_may_begin_and_end_within_a_batch():
    part = fetched(batch(0, b"a", b"b", b"c", b"d"), start=1, end=3)
    assert values(part, (1, 3)) == [b"b", b"c"]
    assert values(fetched(batch(0, b"a"), start=0), (5, 9)) == []


def test_a_cut_batch_at_the_end_of_a_fetch_is_for_the_next_one():
    part = fetched(batch(0, b"a"), batch(1, b"b")[:-4])
    assert values(part) == [b"a"]
    assert part.next_fetch_offset == 1


def test_aborted_records_and_markers_are_passed():
    aborted = [SimpleNamespace(first_offset=0, producer_id=5)]
    log = (
        batch(0, b"lost", producer=5),
        batch(1, b"kept", producer=6),
        batch(2, b"", producer=5, key=ABORT, flags=CONTROL),
        batch(3, b"again", producer=5),
        batch(4, b"", producer=5, key=COMMIT, flags=CONTROL),
    )
    part = fetched(*log, aborted=aborted)
    assert values(part) == [b"kept", b"again"]
    assert part.next_fetch_offset == 5
    assert values(fetched(*log)) == [b"lost", b"kept", b"again"]


def test_a_fetch_without_a_record_is_passed_wherever_the_range_ends():
    marker = batch(0, b"", producer=5, key=COMMIT, flags=CONTROL)
    for end in (1, END):
        part = fetched(marker, end=end)
        assert part.take(1) == []
        assert (part.next_fetch_offset, bool(part)) == (1, False)


def test_a_wrong_checksum_is_told():
    wrong = bytearray(batch(0, b"value"))
    wrong[-2] ^= 1
    with pytest.raises(CorruptRecordError, match=r"offset 0 of .*checksum"):
        fetched(bytes(wrong)).take(1)


def test_batches_go_on_in_groups_of_a_bounded_size(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    part = fetched(*(batch(at, bytes(40)) for at in range(5)), batch(5, bytes(400)))
    (whole,) = part.take(1)
    sizes = [len(each((0, END), with_headers=False).offsets) for each in whole.groups]
    assert sizes == [2, 2, 1, 1]
    monkeypatch.setattr(module, "CHUNK_BYTES", END)
    monkeypatch.setattr(module, "CHUNK_RECORDS", 3)
    (whole,) = fetched(*(batch(at, b"") for at in range(5))).take(1)
    sizes = [len(each((0, END), with_headers=False).offsets) for each in whole.groups]
    assert sizes == [3, 2]


def test_compression_and_the_brokers_time_are_seen():
    part = fetched(batch(0, b"a" * 99, compression=1, flags=APPEND_TIME))
    ((group,),) = [whole.groups for whole in part.take(1)]
    rows = group((0, END), with_headers=True)
    assert rows.values.to_pylist() == [b"a" * 99]
    assert (rows.kinds.tolist(), rows.times_ms.tolist()) == ([1], [7])


@pytest.mark.parametrize("magic", [0, 1])
def test_records_of_old_brokers_are_read_one_by_one(magic):
    old = batch(0, b"a", b"b", b"c", magic=magic)
    part = fetched(batch(0, b"z"), old, batch(3, b"new"), start=0)
    (whole,) = part.take(1)
    first, second, third = (
        group((1, END), with_headers=True) for group in whole.groups
    )
    assert first is None
    assert (second.offsets, second.keys) == ([1, 2], [b"k", b"k"])
    assert (second.values, second.headers) == ([b"b", b"c"], [(), ()])
    assert second.kinds == ([0, 0] if magic else [-1, -1])
    assert second.times_ms == ([7, 7] if magic else [-1, -1])
    assert third.offsets.tolist() == [3]
    assert part.next_fetch_offset == 4


def test_what_is_asked_for_follows_what_is_left():
    aim = Aim()
    aim.take((0, 1_000_000))
    assert aim.config["max_partition_fetch_bytes"] == module.FETCH_BYTES_FIRST
    part = fetched(batch(0, *[bytes(1_000)] * 10), end=1_000_000, aim=aim)
    part.take(1)
    assert aim.bytes_each == pytest.approx(1_010, rel=0.02)
    assert aim.config["max_partition_fetch_bytes"] == module.FETCH_BYTES_MAX
    aim.ask_from(999_000)
    assert 1_000_000 < aim.config["max_partition_fetch_bytes"] < 1_200_000
    aim.ask_from(999_999)
    assert aim.config["max_partition_fetch_bytes"] == 65_536


def test_an_end_within_a_fetch_tells_nothing_of_the_size_of_records():
    aim = Aim()
    fetched(batch(0, b"a"), batch(1, b"b"), end=1, aim=aim).take(1)
    aim.learn(10, 0)
    assert aim.bytes_each is None


def test_a_consumer_hands_on_fetches():
    aim = Aim(config={"max_partition_fetch_bytes": 5})
    fetcher = SimpleNamespace(config={"max_partition_fetch_bytes": 9, "other": 1})
    as_columns(SimpleNamespace(_fetcher=fetcher), aim)
    assert fetcher.config == {"max_partition_fetch_bytes": 5, "other": 1}
    assert Aim().config == {}
    assert aim.config is fetcher.config
    part = fetcher.PartitionRecords(0, PLACE, MemoryRecords(batch(0, b"a")))
    assert isinstance(part, Unopened)
    assert part.aim is aim


def test_the_release_in_use_is_known_and_others_are_not():
    assert is_known()
    assert not is_known("3.1.0")
