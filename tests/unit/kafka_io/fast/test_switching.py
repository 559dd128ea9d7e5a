"""A backlog is read over kafka-python; a switch loses and repeats no record."""

from typing import ClassVar

import pytest

from kafka_marshal.errors import CoordinationError, InvalidTransition
from kafka_marshal.kafka_io.fast import switching
from kafka_marshal.kafka_io.fast.reader import FastDataReader
from kafka_marshal.kafka_io.fast.switching import (
    BACKLOG,
    CONNECTING_PART,
    FEW_POLLS,
    FEW_RECORDS,
    LOOK_S,
    REST_S,
    SMALL_BYTES,
    FastDataLog,
    SwitchingReader,
    can_switch,
)
from kafka_marshal.kafka_io.positions import Positions
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.protocol.types import Token, TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
LOGIN = {
    "sasl_mechanism": "PLAIN",
    "sasl_plain_username": "u",
    "sasl_plain_password": "p",
}
NOW, LATER = Token(1, 0, 7), Token(1, 0, 9)


def sized(found, name):
    assert name == "value"
    return [bytes(FakeReader.value_bytes)] * len(found)


class FakeReader:
    """A reader of logs that end at ``end``; keeps its state, and notes its closing."""

    made: ClassVar[list["FakeReader"]] = []
    end = 0
    value_bytes = SMALL_BYTES

    def __init__(self, settings, *, isolation_level):
        self.level = isolation_level
        self.state = Positions()
        self.is_connected = False
        self.error = None
        self.ended = []
        self.fetched_max = 0
        self.made.append(self)

    def assign(self, partitions):
        self.state.assign(partitions)

    def seek(self, partition, offset, *, token=None, topic_id=None):
        self.state.seek(partition, offset, token=token, topic_id=topic_id)

    def pause(self, partitions):
        self.state.pause(partitions)

    def resume(self, partitions):
        self.state.resume(partitions)

    def poll(self, timeout_ms, max_records):
        found = {}
        for each in self.state.next.keys() - self.state.paused:
            at = self.state.next[each]
            stop = min(self.end, at + max_records)
            if stop > at:
                found[each] = range(at, stop)
                self.state.next[each] = stop
        return found

    def positions(self):
        return {k: v for k, v in self.state.next.items() if v is not None}

    def ends(self):
        return dict.fromkeys(self.state.next, self.end)

    def connect(self):
        if self.error is not None:
            raise self.error
        return self.is_connected

    def disconnect(self):
        self.ended.append("disconnected")

    def close(self, timeout_ms):
        self.ended.append("closed")


@pytest.fixture
def world(monkeypatch):
    """Replace both readers and the clock; return the time as a list of one."""
    now = [1_000.0]
    monkeypatch.setattr(FakeReader, "made", [])
    monkeypatch.setattr(FakeReader, "end", 10 * BACKLOG)
    monkeypatch.setattr(switching, "column_of", sized)
    monkeypatch.setattr(switching, "FastDataReader", FakeReader)
    monkeypatch.setattr(switching, "KafkaDataReader", FakeReader)
    monkeypatch.setattr(switching.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def reader(world):
    made = SwitchingReader(
        ConnectionConfig("nowhere:1"),
        isolation_level="read_committed",
    )
    made.assign([T0, T1])
    made.seek(T0, 5, token=NOW, topic_id=b"i" * 16)
    made.seek(T1, 0, token=LATER)
    made.pause([T1])
    return made


def begun(reader, world):
    """Poll until the reader over kafka-python is made; return both readers."""
    reader.poll(0, 5)
    world[0] += LOOK_S
    reader.poll(0, 5)
    return FakeReader.made


def switched(reader, world):
    """Let the next poll switch to the reader over kafka-python; return both readers."""
    steady, bulk = begun(reader, world)
    bulk.is_connected = True
    bulk.fetched_max = 99
    world[0] += LOOK_S
    return steady, bulk


def test_the_switch_is_checked_at_once_and_often_while_connecting(reader, world):
    reader.poll(0, 5)
    assert len(FakeReader.made) == 1, "there was no record before"
    reader.poll(0, 5)
    steady, bulk = FakeReader.made
    bulk.is_connected = True
    reader.poll(0, 5)
    assert not bulk.state.next, "no time has passed"
    world[0] += LOOK_S * CONNECTING_PART
    reader.poll(0, 5)
    assert (steady.state.next, bulk.state.next[T0]) == ({}, 25)


def test_kafka_python_reads_a_backlog_once_it_is_connected(reader, world):
    steady, bulk = switched(reader, world)
    assert steady.level == bulk.level == "read_committed"
    assert reader.fetched_max == 0
    assert reader.poll(0, 10) == {T0: range(15, 25)}
    assert bulk.state.next == {T0: 25, T1: 0}
    assert bulk.state.tokens == {T0: NOW, T1: LATER}
    assert bulk.state.topic_ids == {T0: b"i" * 16, T1: None}
    assert bulk.state.paused == {T1}
    assert (steady.state.next, steady.ended) == ({}, ["disconnected"])
    assert reader.fetched_max == 99
    reader.resume([T1])
    assert reader.positions() == {T0: 25, T1: 0}
    assert reader.ends() == {T0: FakeReader.end, T1: FakeReader.end}
    assert reader.poll(0, 2) == {T0: range(25, 27), T1: range(2)}
    reader.close(0)
    assert (steady.ended[-1], bulk.ended) == ("closed", ["closed"])


@pytest.mark.parametrize("end", [0, BACKLOG - 1])
def test_few_records_are_read_over_librdkafka(reader, world, monkeypatch, end):
    monkeypatch.setattr(FakeReader, "end", end)
    for _ in range(5):
        reader.poll(0, 10)
        world[0] += LOOK_S
    assert len(FakeReader.made) == 1
    reader.close(0)


def test_large_records_are_read_over_librdkafka(reader, world, monkeypatch):
    monkeypatch.setattr(FakeReader, "value_bytes", SMALL_BYTES + 1)
    for _ in range(5):
        reader.poll(0, 10)
        world[0] += LOOK_S
    assert len(FakeReader.made) == 1
    reader.close(0)


def test_small_fetches_switch_back_to_librdkafka_for_a_while(
    reader, world, monkeypatch
):
    def grow(count):
        at = reader.positions()[T0]
        monkeypatch.setattr(FakeReader, "end", at + count)

    steady, bulk = switched(reader, world)
    for _ in range(FEW_POLLS):
        reader.poll(0, 5)
    reader.poll(0, 1)
    assert reader._reader is bulk, "there was more"
    for _ in range(FEW_POLLS):
        grow(FEW_RECORDS)
        reader.poll(0, 10**9)
    reader.poll(0, 1)
    assert reader._reader is bulk, "these were not small"
    for _ in range(FEW_POLLS):
        grow(FEW_RECORDS - 1)
        reader.poll(0, 10**9)
    at = reader.positions()[T0]
    grow(10 * BACKLOG)
    reader.poll(0, 3)
    assert reader._reader is steady
    assert reader.positions() == {T0: at + 3, T1: 0}
    assert bulk.ended == ["closed"]
    assert steady.state.paused == {T1}
    assert steady.state.tokens == {T0: NOW, T1: LATER}
    world[0] += REST_S * 0.99
    reader.poll(0, 1)
    assert len(FakeReader.made) == 2
    for _ in range(2):
        world[0] += REST_S
        reader.poll(0, 1)
    assert len(FakeReader.made) == 3


def test_the_reader_does_not_switch_while_a_position_is_missing(reader, world):
    switched(reader, world)
    reader.assign([T0, T1, TopicPartition("t", 2)])
    reader._look()
    assert reader._reader is FakeReader.made[0]
    reader.assign([T0])
    reader.poll(0, 1)
    world[0] += LOOK_S
    reader._look()
    assert reader._reader is FakeReader.made[1]


def test_librdkafka_keeps_reading_if_kafka_python_cannot_connect(reader, world):
    steady, bulk = begun(reader, world)
    bulk.error = CoordinationError("down")
    for _ in range(3):
        world[0] += LOOK_S
        assert reader.poll(0, 10)
    assert bulk.ended == ["closed"]
    assert len(FakeReader.made) == 2
    assert reader._reader is steady


def test_a_refused_seek_changes_no_position(reader):
    with pytest.raises(InvalidTransition):
        reader.seek(TopicPartition("t", 9), 0)
    assert reader.positions() == {T0: 5, T1: 0}


@pytest.mark.parametrize(
    ("options", "is_possible"),
    [
        ({}, True),
        ({"security_protocol": "SASL_PLAINTEXT", **LOGIN}, True),
        ({"security_protocol": "SSL"}, False),
        ({"security_protocol": "SASL_SSL", **LOGIN}, False),
    ],
)
def test_the_reader_switches_only_without_tls(monkeypatch, options, is_possible):
    settings = ConnectionConfig("nowhere:1", options=options)
    monkeypatch.setattr(switching, "compiled", object())
    assert can_switch(settings) == is_possible
    kind = SwitchingReader if is_possible else FastDataReader
    assert type(FastDataLog(settings).reader()) is kind


def test_the_reader_never_switches_without_compiled_functions(monkeypatch):
    monkeypatch.setattr(switching, "compiled", None)
    assert not can_switch(ConnectionConfig("nowhere:1"))
