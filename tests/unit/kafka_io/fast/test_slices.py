"""Exact ranges over librdkafka: gaps, ends, faults; a consumer that is played."""

import gc

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    InvalidTransition,
    MarshalError,
    PositionError,
)
from kafka_marshal.kafka_io.fast import slices as module
from kafka_marshal.kafka_io.fast.clients import Client
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.slices import CHUNK_RECORDS, FIRST_RECORDS
from kafka_marshal.protocol.types import TopicPartition

T0 = TopicPartition("t", 0)
OUT = KafkaError(KafkaError._AUTO_OFFSET_RESET, "out of range")
DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN, "down")
NO_GROUP = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED, "no")


def message(offset, error=None, headers=None, kind=2):
    return Message(
        topic="t",
        partition=0,
        offset=offset,
        key=b"k%d" % offset,
        value=None if offset % 2 else b"v",
        headers=headers,
        error=error,
        timestamp=(kind, 1_000 + offset),
    )


def end_of_log(offset):
    return message(offset, KafkaError(KafkaError._PARTITION_EOF))


class Handle:
    """librdkafka's consumer: hands out what it is given, one chunk a call."""

    def __init__(self, *chunks):
        self.chunks = list(chunks)
        self.range = (0, 100)
        self.places = []
        self.is_assigned = False
        self.collects = []
        self.asked = []

    def assign(self, places):
        self.is_assigned = True
        self.places.append(places[0].offset)

    def unassign(self):
        self.is_assigned = False

    def consume(self, most, timeout):
        assert timeout > 0
        self.collects.append(gc.isenabled())
        self.asked.append(most)
        return self.chunks.pop(0) if self.chunks else []

    def get_watermark_offsets(self, place, timeout):
        if self.range is None:
            raise KafkaException(DOWN)
        return self.range

    def close(self):
        pass


@pytest.fixture
def reading(monkeypatch):
    """Return a reader over a handle with these chunks."""
    made = []

    def read(*chunks):
        handle = Handle(*chunks)
        monkeypatch.setattr(
            module, "new_consumer", lambda *_: made.append(1) or Client(handle)
        )
        settings = ConnectionSettings("b:1", transport="fast")
        reader = module.FastSliceReader(
            settings, isolation_level="read_uncommitted", client_rack=""
        )
        return reader, handle

    return read


def offsets(reader, first, end, **more):
    settings = {"timeout_ms": 0, "with_headers": False} | more
    found = []
    for rows in reader.read(T0, (first, end), **settings):
        found += rows.offsets
    return found


def test_a_range_is_read_to_its_end_and_no_further(reading):
    reader, handle = reading([message(3), message(4)], [message(5), message(6)])
    found = list(reader.read(T0, (3, 6), timeout_ms=0, with_headers=False))
    assert [list(rows.offsets) for rows in found] == [[3, 4], [5]]
    first = found[0]
    assert (list(first.times_ms), list(first.kinds)) == ([1003, 1004], [1, 1])
    assert (list(first.keys), list(first.values)) == ([b"k3", b"k4"], [None, b"v"])
    assert first.headers is None
    assert handle.places == [3]
    assert not handle.is_assigned, "what lies behind is not fetched"
    assert handle.collects == [False, False]
    assert gc.isenabled()


def test_headers_come_where_they_are_asked_for(reading):
    reader, _ = reading([message(0, headers=[("a", b"1")])])
    (rows,) = reader.read(T0, (0, 1), timeout_ms=0, with_headers=True)
    assert [list(pairs) for pairs in rows.headers] == [[("a", b"1")]]


def test_each_record_keeps_its_own_kind_and_offset_where_they_differ(reading):
    reader, _ = reading([message(2, kind=1), message(4), message(5, kind=0)])
    (rows,) = reader.read(T0, (2, 6), timeout_ms=0, with_headers=False)
    assert list(rows.kinds) == [0, 1, -1]
    assert list(rows.offsets) == [2, 4, 5]
    assert list(rows.times_ms) == [1002, 1004, 1005]


def test_as_many_are_asked_for_as_go_on_together(reading):
    reader, handle = reading([message(0)], [message(1)])
    far = 1_000_000
    parts = reader.read(T0, (0, far), timeout_ms=0, with_headers=False)
    next(parts)
    next(parts)
    assert handle.asked == [FIRST_RECORDS, CHUNK_RECORDS], "they are small"
    reader, handle = reading([message(0)])
    assert offsets(reader, 0, 1) == [0]
    assert handle.asked == [1], "it would wait for more"


def test_gaps_are_passed_by_what_comes_behind_or_the_logs_end(reading):
    reader, _ = reading([message(0), message(7)])
    assert offsets(reader, 0, 5) == [0]
    reader, _ = reading([message(0), end_of_log(5)])
    assert offsets(reader, 0, 5) == [0]
    reader, _ = reading([end_of_log(9)])
    assert offsets(reader, 0, 5) == []


def test_an_end_before_the_range_is_waited_for(reading):
    reader, _ = reading([end_of_log(1)], [message(1)])
    assert offsets(reader, 0, 2, timeout_ms=60_000) == [1]
    reader, _ = reading([message(0)])
    with pytest.raises(DeadlineExceeded, match="nothing came from offset 1 on"):
        offsets(reader, 0, 2)


def test_a_connection_is_kept_and_an_empty_range_needs_none(reading):
    reader, handle = reading([message(0)], [message(5)])
    assert offsets(reader, 3, 3) == []
    assert handle.places == []
    assert offsets(reader, 0, 1) == [0]
    assert offsets(reader, 5, 6) == [5]
    assert handle.places == [0, 5]
    reader.close()
    reader.close()


def test_a_range_outside_its_log_is_told_with_the_logs_range(reading):
    reader, handle = reading([message(0, OUT)])
    handle.range = (4, 9)
    with pytest.raises(PositionError, match="its log has 4 to 8") as caught:
        offsets(reader, 0, 2)
    error = caught.value
    assert (error.partition, error.log_start, error.log_end) == (T0, 4, 9)
    assert not handle.is_assigned


def test_a_range_that_cannot_be_asked_is_told(reading, monkeypatch):
    monkeypatch.setattr(module, "_RANGE_S", 0.01)
    reader, handle = reading([message(0, OUT)])
    handle.range = None
    with pytest.raises(CoordinationError, match="could not be asked"):
        offsets(reader, 0, 2)


def test_faults_are_told_in_our_words_and_cost_the_connection(reading):
    reader, _ = reading([message(0, DOWN)])
    with pytest.raises(MarshalError):
        offsets(reader, 0, 2)
    assert reader._client is None


def test_a_group_that_may_not_be_seen_is_none_of_our_business(reading):
    reader, _ = reading([message(0, NO_GROUP), message(0)])
    assert offsets(reader, 0, 1) == [0]


def test_a_refusal_that_no_attempt_will_change_is_told(reading):
    reader, _ = reading([message(0)], [])
    assert offsets(reader, 0, 1) == [0]
    reader._client.refusal = KafkaException(
        KafkaError(KafkaError._AUTHENTICATION, "who are you")
    )
    with pytest.raises(MarshalError, match="who we say we are"):
        offsets(reader, 1, 2)


def test_a_child_must_not_use_it(reading, monkeypatch):
    reader, _ = reading([message(0)])
    monkeypatch.setattr(module.os, "getpid", lambda: -1)
    with pytest.raises(InvalidTransition, match="belongs to the process"):
        offsets(reader, 0, 1)
