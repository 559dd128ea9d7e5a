"""Exact ranges as columns: fetches, the end of a range, readers of a process."""

import gc
import struct
from types import SimpleNamespace
from uuid import UUID

import pytest
from kafka import TopicPartition as KafkaTopicPartition
from kafka.errors import CorruptRecordError, LogTruncationError
from kafka.record import MemoryRecords, MemoryRecordsBuilder
from kafka.record.util import calc_crc32c

from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    MarshalError,
    PositionError,
    UnknownTopicId,
)
from kafka_marshal.kafka_io import slices as module
from kafka_marshal.kafka_io.columns import Slice
from kafka_marshal.kafka_io.fetched_batches import FetchData
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.slices import (
    Fetch,
    FetchedSlices,
    FetchTarget,
    SliceReader,
    SliceReaders,
    TopicReplaced,
    fetch_batches,
)
from kafka_marshal.protocol.types import OffsetRange, TopicPartition

PLACE = KafkaTopicPartition("t", 0)
END = 2**62
# Positions in the header of a batch, and bits of its attributes.
CRC, ATTRIBUTES = 17, 21
CONTROL, APPEND_TIME = 0x20, 0x08
ABORT, COMMIT = (struct.pack(">hh", 0, kind) for kind in (0, 1))
T0 = TopicPartition("t", 0)


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
    aim = aim or FetchTarget()
    aim.take(OffsetRange(start, end))
    data = memoryview(b"".join(batches))
    fetch = FetchData(place=PLACE, offset=start, data=data, aborted=aborted)
    return FetchedSlices(fetch, aim=aim)


def values(part, span=(0, END)):
    found = []
    for whole in part.take(1):
        for group in whole.groups:
            rows = group(OffsetRange(*span), with_headers=False)
            column = [] if rows is None else rows.values
            found += column if isinstance(column, list) else column.to_pylist()
    return found


def test_a_fetch_is_returned_as_a_whole_in_one_take():
    part = fetched(batch(0, b"a", b"b"), batch(2, b"c"))
    assert part
    (whole,) = part.take(1)
    assert whole.offset == 2
    assert (part.next_fetch_offset, part.bytes_read > 0) == (3, True)
    assert not part, "kafka-python fetches more"


def test_no_batch_after_the_end_of_the_range_is_returned():
    part = fetched(batch(0, b"a", b"b"), batch(2, b"c"), batch(3, b"d"), end=2)
    assert values(part) == [b"a", b"b"], "and nothing behind is looked at"
    assert part, "kafka-python believes that there is more"
    assert part.take(1) == []
    assert not part, "and goes on once it has looked"


def test_a_range_may_begin_and_end_within_a_batch():
    part = fetched(batch(0, b"a", b"b", b"c", b"d"), start=1, end=3)
    assert values(part, (1, 3)) == [b"b", b"c"]
    assert values(fetched(batch(0, b"a"), start=0), (5, 9)) == []


def test_a_batch_that_is_cut_off_is_left_to_the_next_fetch():
    part = fetched(batch(0, b"a"), batch(1, b"b")[:-4])
    assert values(part) == [b"a"]
    assert part.next_fetch_offset == 1


def test_aborted_records_and_transaction_markers_are_skipped():
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


def test_a_fetch_without_records_is_skipped():
    marker = batch(0, b"", producer=5, key=COMMIT, flags=CONTROL)
    for end in (1, END):
        part = fetched(marker, end=end)
        assert part.take(1) == []
        assert (part.next_fetch_offset, bool(part)) == (1, False)


def test_a_wrong_checksum_raises():
    wrong = bytearray(batch(0, b"value"))
    wrong[-2] ^= 1
    with pytest.raises(CorruptRecordError, match=r"offset 0 of .*checksum"):
        fetched(bytes(wrong)).take(1)


def test_groups_of_batches_are_bounded_by_bytes_and_records(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    part = fetched(*(batch(at, bytes(40)) for at in range(5)), batch(5, bytes(400)))
    (whole,) = part.take(1)
    sizes = [
        len(each(OffsetRange(0, END), with_headers=False).offsets)
        for each in whole.groups
    ]
    assert sizes == [2, 2, 1, 1]
    monkeypatch.setattr(module, "CHUNK_BYTES", END)
    monkeypatch.setattr(module, "CHUNK_RECORDS", 3)
    (whole,) = fetched(*(batch(at, b"") for at in range(5))).take(1)
    sizes = [
        len(each(OffsetRange(0, END), with_headers=False).offsets)
        for each in whole.groups
    ]
    assert sizes == [3, 2]


def test_batches_are_decompressed_only_up_to_the_current_group(monkeypatch):
    """All batches of a fetch may take many times its size."""
    done = []

    def content_of(raw, header):
        done.append(header.base_offset)
        return decompressed(raw, header)

    decompressed = module.content_of
    monkeypatch.setattr(module, "content_of", content_of)
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    part = fetched(*(batch(at, bytes(90), compression=1) for at in range(9)))
    (whole,) = part.take(1)
    assert (whole.offset, part.next_fetch_offset, done) == (8, 9, [])
    for count, group in enumerate(whole.groups, 1):
        rows = group(OffsetRange(0, END), with_headers=False)
        assert rows.offsets.tolist() == [count - 1]
        assert len(done) <= count + 1
    assert done == [*range(9)]


def test_compression_and_append_time_are_handled():
    part = fetched(batch(0, b"a" * 99, compression=1, flags=APPEND_TIME))
    ((group,),) = [whole.groups for whole in part.take(1)]
    rows = group(OffsetRange(0, END), with_headers=True)
    assert rows.values.to_pylist() == [b"a" * 99]
    assert (rows.kinds.tolist(), rows.times_ms.tolist()) == ([1], [7])


@pytest.mark.parametrize("magic", [0, 1])
def test_batches_of_old_formats_are_read_as_columns(magic):
    old = batch(0, b"a", b"b", b"c", magic=magic)
    part = fetched(batch(0, b"z"), old, batch(3, b"new"), start=0)
    (whole,) = part.take(1)
    first, second, third = (
        group(OffsetRange(1, END), with_headers=True) for group in whole.groups
    )
    assert first is None
    assert (second.offsets, second.keys) == ([1, 2], [b"k", b"k"])
    assert (second.values, second.headers) == ([b"b", b"c"], [(), ()])
    assert second.kinds == ([0, 0] if magic else [-1, -1])
    assert second.times_ms == ([7, 7] if magic else [-1, -1])
    assert third.offsets.tolist() == [3]
    assert part.next_fetch_offset == 4


def test_the_fetch_limit_follows_record_size_and_remaining_range():
    aim = FetchTarget()
    aim.take(OffsetRange(0, 1_000_000))
    assert aim.config["max_partition_fetch_bytes"] == module.FETCH_BYTES_FIRST
    part = fetched(batch(0, *[bytes(1_000)] * 10), end=1_000_000, aim=aim)
    part.take(1)
    assert aim.bytes_each == pytest.approx(1_010, rel=0.02)
    assert aim.config["max_partition_fetch_bytes"] == module.FETCH_BYTES_MAX
    aim.limit_next(999_000)
    assert 1_000_000 < aim.config["max_partition_fetch_bytes"] < 1_200_000
    aim.limit_next(999_999)
    assert aim.config["max_partition_fetch_bytes"] == 65_536


def test_a_partly_used_fetch_does_not_set_the_record_size():
    aim = FetchTarget()
    fetched(batch(0, b"a"), batch(1, b"b"), end=1, aim=aim).take(1)
    aim.update_record_size(10, 0)
    assert aim.bytes_each is None


def test_a_patched_consumer_uses_the_target_and_returns_slices():
    aim = FetchTarget(config={"max_partition_fetch_bytes": 5})
    fetcher = SimpleNamespace(config={"max_partition_fetch_bytes": 9, "other": 1})
    fetch_batches(SimpleNamespace(_fetcher=fetcher), aim)
    assert fetcher.config == {"max_partition_fetch_bytes": 5, "other": 1}
    assert FetchTarget().config == {}
    assert aim.config is fetcher.config
    part = fetcher.PartitionRecords(0, PLACE, MemoryRecords(batch(0, b"a")))
    assert isinstance(part, FetchedSlices)
    assert part._aim is aim


def group(*offsets):
    """Return a function that makes columns of the given offsets within a range."""

    def columns(span, *, with_headers):
        assert not gc.isenabled(), "it would look at records that are about to go"
        kept = [each for each in offsets if span.first <= each < span.end]
        same = [0] * len(kept)
        headers = [()] * len(kept) if with_headers else None
        return (
            Slice(
                offsets=kept,
                times_ms=same,
                kinds=same,
                keys=same,
                values=same,
                headers=headers,
            )
            if kept
            else None
        )

    return columns


class Reader(SliceReader):
    """A reader that returns one fetch per call.

    A fetch has groups of offsets with a record, and the next offset to fetch.
    """

    def __init__(self, *fetches):
        super().__init__(
            ConnectionConfig("b:1"), isolation_level="read_committed", client_rack=""
        )
        self.fetches = list(fetches)
        self.place = None
        self.assigned = []

    def start(self, partition, span, *, topic_id):
        self.assigned = [partition]
        self.place = span.first

    def assign(self, partitions):
        self.assigned = partitions

    def take(self, timeout_ms):
        assert timeout_ms > 0
        if not self.fetches:
            return ()
        groups, self.place = self.fetches.pop(0)
        return [Fetch(self.place - 1, [group(*each) for each in groups])]

    def position_of(self, partition):
        return self.place

    def require_range(self, partition, span):
        raise PositionError(
            "short", requested=span.first, log_start=0, log_end=span.first
        )


def read(*fetches, span, **more):
    reader = Reader(*fetches)
    settings = {"timeout_ms": 0, "with_headers": False} | more
    found = list(reader.read(T0, OffsetRange(*span), **settings))
    assert reader.assigned == []
    return found


def test_a_range_is_read_exactly_to_its_end():
    found = read(([[2, 3], [4]], 5), ([[5, 6]], 7), span=(3, 6), timeout_ms=60_000)
    assert [rows.offsets for rows in found] == [[3], [4], [5]]
    assert found[0].headers is None
    assert read(span=(3, 3)) == []


def test_headers_are_returned_on_request():
    (rows,) = read(([[0]], 1), span=(0, 1), with_headers=True)
    assert rows.headers == [()]


def test_offsets_without_records_are_skipped():
    found = read(([[0]], 1), ([], 3), ([[9]], 10), span=(0, 5), timeout_ms=60_000)
    assert [rows.offsets for rows in found] == [[0]]


def test_a_malformed_record_raises_an_error_of_the_package():
    def refuse(_, *, with_headers):
        raise CorruptRecordError("a record ends too early")

    reader = Reader()
    reader.assign([T0])
    reader._partitions = {T0: T0}
    reader.take = lambda _: [Fetch(0, [refuse])]
    with pytest.raises(MarshalError, match="a record ends too early"):
        next(reader.read(T0, OffsetRange(0, 1), timeout_ms=0, with_headers=False))


def test_a_range_without_further_records_raises_at_the_deadline():
    with pytest.raises(DeadlineExceeded, match="up to offset 5"):
        read(([[0]], 1), span=(0, 5))


def test_a_range_without_progress_is_checked_against_the_log_end(monkeypatch):
    monkeypatch.setattr(module, "CHECK_MS", 0)
    with pytest.raises(PositionError, match="short"):
        read(([[0]], 1), span=(0, 5), timeout_ms=60_000)


class Consumer:
    """A fake of kafka-python's consumer: log ends, high watermark, topic id."""

    def __init__(self, *, ends=5, highwater=5, topic_id=None, fault=None, known=True):
        cluster = SimpleNamespace(
            topic_id=lambda _: topic_id,
            partitions_for_topic=lambda _: {0} if known else None,
        )
        self._client = SimpleNamespace(cluster=cluster)
        self._fetcher = SimpleNamespace(config={})
        self.ends, self.high, self.fault = ends, highwater, fault

    def beginning_offsets(self, places, timeout_ms):
        return dict.fromkeys(places, 0)

    def end_offsets(self, places, timeout_ms):
        return dict.fromkeys(places, self.ends)

    def highwater(self, place):
        return self.high

    def position(self, place, timeout_ms):
        raise self.fault

    def assign(self, places):
        pass

    def seek(self, place, offset):
        pass


def beneath(consumer, span=(3, 9), **more):
    found = SliceReader(
        ConnectionConfig("b:1"), isolation_level="read_committed", client_rack=""
    )
    found._consumer = consumer
    found.start(T0, OffsetRange(*span), **more)
    return found


def test_a_truncated_log_raises_a_position_error():
    """kafka-python may detect the truncation before the reader is used again."""
    fault = LogTruncationError({KafkaTopicPartition("t", 0): None})
    reader = beneath(Consumer(fault=fault))
    with pytest.raises(PositionError, match="cut off") as caught:
        reader.position_of(T0)
    assert (caught.value.requested, caught.value.log_end) == (3, 5)


def test_a_short_log_raises_only_if_its_leader_confirms_the_end():
    beneath(Consumer(highwater=9)).require_range(T0, OffsetRange(3, 9))
    beneath(Consumer(ends=9)).require_range(T0, OffsetRange(3, 9))
    with pytest.raises(PositionError) as caught:
        beneath(Consumer()).require_range(T0, OffsetRange(3, 9))
    assert caught.value.log_end == 5


def test_a_topic_with_another_id_raises_topic_replaced():
    one, other = UUID(int=1), UUID(int=2)
    beneath(Consumer(topic_id=one, highwater=9), topic_id=one.hex).require_range(
        T0, OffsetRange(3, 9)
    )
    reader = beneath(Consumer(topic_id=other), topic_id=one.hex)
    with pytest.raises(TopicReplaced, match="created again"):
        reader.require_range(T0, OffsetRange(3, 9))

    def refused(*_):
        raise UnknownTopicId("?", partition=T0)

    reader.poll = refused
    with pytest.raises(TopicReplaced, match="created again"):
        reader.take(1)
    reader = beneath(Consumer(topic_id=one), topic_id=one.hex)
    reader.poll = refused
    assert reader.take(1) == (), "the broker may not know it yet"


@pytest.mark.parametrize(
    ("answer", "is_deleted"),
    [({}, True), ({"t": "there"}, False), (CoordinationError("no answer"), False)],
    ids=["absent", "there", "unreachable"],
)
def test_a_topic_absent_in_metadata_is_looked_up_before_it_is_deleted(
    monkeypatch, answer, is_deleted
):
    asked = []

    class Log:
        def __init__(self, settings):
            pass

        def describe(self, topics, timeout_ms):
            asked.append(topics)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def close(self, timeout_ms):
            asked.append("closed")

    monkeypatch.setattr(module, "KafkaDataLog", Log)
    reader = beneath(Consumer(known=False, highwater=9))
    for _ in range(module.ABSENT_CHECKS - 1):
        reader.require_range(T0, OffsetRange(3, 9))
    assert asked == [], "one broker may lag behind"
    if is_deleted:
        with pytest.raises(TopicReplaced, match="topic t was deleted"):
            reader.require_range(T0, OffsetRange(3, 9))
    else:
        reader.require_range(T0, OffsetRange(3, 9))
    assert asked == [["t"], "closed"]


def test_a_new_consumer_fetches_with_the_target_of_the_range(monkeypatch):
    hooked = []
    monkeypatch.setattr(module.KafkaDataReader, "_new_consumer", lambda _: "a consumer")
    monkeypatch.setattr(module, "fetch_batches", lambda *each: hooked.append(each))
    reader = SliceReader(
        ConnectionConfig("b:1"), isolation_level="read_committed", client_rack=""
    )
    reader.start(T0, OffsetRange(3, 9))
    assert (reader.position_of(T0), reader._aim.end) == (3, 9)
    assert reader._new_consumer() == "a consumer"
    assert hooked == [("a consumer", reader._aim)]


def test_a_process_keeps_one_reader_per_connection_and_options(monkeypatch):
    made = []

    class Kept:
        closed = False

        def close(self, timeout_ms):
            self.closed = timeout_ms > 0

    def opened(settings, **_):
        made.append(Kept())
        return made[-1]

    monkeypatch.setattr(module, "SliceReader", opened)
    slices = SliceReaders()
    way = {"isolation_level": "read_committed", "client_rack": ""}
    one = ConnectionConfig("b:1", options={"security.protocol": "PLAINTEXT"})
    first = slices.reader(one, **way)
    assert slices.reader(one, **way) is first
    assert slices.reader(ConnectionConfig("b:1"), **way) is not first
    assert slices.reader(one, **(way | {"client_rack": "r"})) is not first
    assert len(made) == 3
    slices.drop()
    assert all(each.closed for each in made)
    again = slices.reader(one, **way)
    monkeypatch.setattr(module.os, "getpid", lambda: -1)
    assert slices.reader(one, **way) is not again, "a child has its own"
    assert not again.closed  # type: ignore[attr-defined]
