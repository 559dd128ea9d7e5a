"""The part that all readers of a fetch share: batches and positions."""

import random
import struct
from types import SimpleNamespace

import pytest
from batchkit import new_batch
from kafka import TopicPartition as KafkaTopicPartition
from kafka.consumer.fetcher import Fetcher
from kafka.errors import CorruptRecordError
from kafka.protocol.consumer import IsolationLevel
from kafka.record import MemoryRecords
from kafka.record.legacy_records import LegacyRecordBatchBuilder
from kafka.record.util import calc_crc32c

from kafka_marshal.kafka_io.fetched_batches import (
    FetchData,
    FetchedBatches,
    read_fetches,
)
from kafka_marshal.kafka_io.fetched_records import FetchedRecords
from kafka_marshal.kafka_io.slices import FetchedSlices, FetchTarget
from kafka_marshal.protocol.types import OffsetRange

PLACE = KafkaTopicPartition("t", 0)
EVERY = OffsetRange(0, 2**62)
LAST_DELTA, COUNT = 23, 57
TRANSACTIONAL, CONTROL = 0x10, 0x20
ABORT, COMMIT = struct.pack(">hh", 0, 0), struct.pack(">hh", 0, 1)


def batch(offset, *values, producer=-1, key=b"k", flags=0, epoch=4, tail=b""):
    builder = new_batch()
    for at, value in enumerate(values):
        builder.append(at, timestamp=7, key=key, value=value, headers=[])
    found = bytearray(builder.build()) + tail
    if not values:
        struct.pack_into(">i", found, LAST_DELTA, 0)
    struct.pack_into(">qii", found, 0, offset, len(found) - 12, epoch)
    struct.pack_into(">h", found, 21, flags)
    struct.pack_into(">q", found, 43, producer)
    struct.pack_into(">I", found, 17, calc_crc32c(memoryview(found)[21:]))
    return bytes(found)


def old(offset, value):
    builder = LegacyRecordBatchBuilder(1, 0, 10_000)
    builder.append(offset, timestamp=1, key=None, value=value)
    return bytes(builder.build())


def fetch(*batches, **options):
    return FetchData(place=PLACE, data=memoryview(b"".join(batches)), **options)


def fetched(*batches, **options):
    return FetchedBatches(fetch(*batches, **options))


def test_batches_are_returned_in_order():
    one, two = batch(0, b"a", b"b"), old(2, b"c")
    part = fetched(one, two, two[:-1], offset=1)
    assert part
    assert (part.next_fetch_offset, part.leader_epoch, part.bytes_read) == (1, -1, 0)
    raw, header = part.next_batch()
    assert (raw, header.base_offset, header.records_count) == (one, 0, 2)
    assert (part.leader_epoch, part.bytes_read) == (4, len(one + two + two) - 1)
    assert part.next_batch() == (two, None)
    assert part.next_batch() is None
    assert part.next_fetch_offset == 1, "the reader moves it"


def test_the_position_moves_over_batches_without_records():
    part = fetched(
        batch(0, epoch=5),
        batch(1, b"", producer=5, key=COMMIT, flags=CONTROL),
        batch(2, b"lost", producer=5, flags=TRANSACTIONAL),
        aborted=[SimpleNamespace(first_offset=2, producer_id=5)],
    )
    assert part.next_batch() is None
    assert (part.next_fetch_offset, part.leader_epoch) == (3, 4)


def test_a_fetch_is_drained_once():
    drained = []
    part = fetched(on_drain=drained.append)
    part.drain()
    part.drain()
    assert drained == [part]
    assert not part


def test_a_wrong_checksum_raises_only_if_checked():
    wrong = bytearray(batch(0, b"value"))
    wrong[-2] ^= 1
    with pytest.raises(CorruptRecordError, match=r"offset 0 of .*checksum"):
        fetched(bytes(wrong)).next_batch()
    assert fetched(bytes(wrong), is_checked=False).next_batch() is not None


def test_a_batch_without_records_but_with_more_bytes_raises():
    with pytest.raises(CorruptRecordError):
        fetched(batch(0, tail=b"more")).next_batch()


# --- records and columns, compared with the records of kafka-python


def drawn_log(chance):
    """Return a random log, and the aborted transactions that a broker reports."""
    log, aborted, opened = [], [], {}
    for offset in range(0, 2 * chance.randrange(1, 14), 2):
        producer = chance.randrange(3)
        kind = chance.choice(["plain", "written", "written", "ended", "old", "empty"])
        if kind == "written":
            opened.setdefault(producer, offset)
            flags = TRANSACTIONAL
            value = b"w%d" % offset
            log.append(batch(offset, value, value, producer=producer, flags=flags))
        elif kind == "ended":
            is_abort = chance.random() < 0.5
            if is_abort and producer in opened:
                first = opened[producer]
                aborted.append(
                    SimpleNamespace(first_offset=first, producer_id=producer)
                )
            opened.pop(producer, None)
            key, flags = (ABORT if is_abort else COMMIT), TRANSACTIONAL | CONTROL
            log.append(batch(offset, b"", key=key, producer=producer, flags=flags))
        elif kind == "old":
            log.append(old(offset, b"o"))
        else:
            log.append(batch(offset, *[b"p"][: kind == "plain"]))
    return b"".join(log), aborted


def values_of(part):
    found = []
    while part:
        for each in part.take(100):
            for group in getattr(each, "groups", ()):
                column = group(EVERY, with_headers=False).values
                found += column if isinstance(column, list) else column.to_pylist()
            if not hasattr(each, "groups"):
                found.append(each.value)
    return found, part.next_fetch_offset


def test_records_and_slices_of_any_log_equal_those_of_kafka_python():
    chance = random.Random(7)
    aim = FetchTarget()
    aim.take(EVERY)
    for _ in range(1_000):
        data, aborted = drawn_log(chance)
        expected = values_of(
            Fetcher.PartitionRecords(
                *(0, PLACE, MemoryRecords(data)),
                isolation_level=IsolationLevel.READ_COMMITTED,
                aborted_transactions=aborted,
            )
        )
        ours = fetch(data, aborted=aborted)
        made = FetchedRecords(ours, make=lambda _, rows: rows)
        assert values_of(made) == expected
        assert values_of(FetchedSlices(ours, aim=aim)) == expected


def test_a_patched_consumer_passes_its_fetch_data():
    consumer = SimpleNamespace(_fetcher=SimpleNamespace(PartitionRecords=None))
    read_fetches(consumer, FetchedBatches)
    aborted, drained = [SimpleNamespace(first_offset=2, producer_id=5)], []
    part = consumer._fetcher.PartitionRecords(
        *(3, PLACE, MemoryRecords(batch(3, b"a"))),
        key_deserializer=None,
        value_deserializer=None,
        check_crcs=False,
        isolation_level=IsolationLevel.READ_COMMITTED,
        aborted_transactions=aborted,
        metric_aggregator=None,
        on_drain=drained.append,
    )
    expected = fetch(
        *(batch(3, b"a"),),
        offset=3,
        aborted=aborted,
        is_checked=False,
        on_drain=drained.append,
    )
    assert part._fetch == expected
