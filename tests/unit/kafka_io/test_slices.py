"""Exact ranges, and the readers that a process keeps."""

import gc
from types import SimpleNamespace
from uuid import UUID

import pytest
from kafka import TopicPartition as Place
from kafka.errors import LogTruncationError

from kafka_marshal.errors import DeadlineExceeded, PositionError, UnknownTopicId
from kafka_marshal.kafka_io import slices as module
from kafka_marshal.kafka_io.columns import Slice
from kafka_marshal.kafka_io.fetched import Fetched
from kafka_marshal.kafka_io.records import Records
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.slices import SliceReader, Slices, TopicReplaced
from kafka_marshal.protocol.types import TopicPartition

T0 = TopicPartition("t", 0)


def group(*offsets):
    """Return what makes columns of some offsets, within a range."""

    def columns(span, *, with_headers):
        assert not gc.isenabled(), "it would look at records that are about to go"
        kept = [each for each in offsets if span[0] <= each < span[1]]
        same = [0] * len(kept)
        headers = [()] * len(kept) if with_headers else None
        return Slice(kept, same, same, same, same, headers) if kept else None

    return columns


class Reader:
    """A reader of kafka-python's that hands out one fetch a call.

    A fetch is groups of offsets with a record, and the next that it will look at.
    """

    def __init__(self, *fetches):
        self.fetches = list(fetches)
        self.place = None
        self.assigned = []

    def aim(self, partition, span, *, topic_id):
        self.assigned = [partition]
        self.place = span[0]

    def assign(self, partitions):
        self.assigned = partitions

    def take(self, timeout_ms):
        assert timeout_ms > 0
        if not self.fetches:
            return ()
        groups, self.place = self.fetches.pop(0)
        return [Fetched(self.place - 1, [group(*each) for each in groups])]

    def place_of(self, partition):
        return self.place

    def require_reach(self, partition, span):
        raise PositionError("short", requested=span[0], log_start=0, log_end=span[0])


def read(*fetches, span, **more):
    reader = SliceReader(
        ConnectionSettings("b:1"), isolation_level="read_committed", client_rack=""
    )
    reader._reader = Reader(*fetches)
    settings = {"timeout_ms": 0, "with_headers": False} | more
    found = list(reader.read(T0, span, **settings))
    assert reader._reader.assigned == []
    return found


def test_a_range_is_read_to_its_end_and_no_further():
    found = read(([[2, 3], [4]], 5), ([[5, 6]], 7), span=(3, 6), timeout_ms=60_000)
    assert [rows.offsets for rows in found] == [[3], [4], [5]]
    assert found[0].headers is None
    assert read(span=(3, 3)) == []


def test_headers_come_where_they_are_asked_for():
    (rows,) = read(([[0]], 1), span=(0, 1), with_headers=True)
    assert rows.headers == [()]


def test_gaps_are_passed_where_the_reader_passes_them():
    found = read(([[0]], 1), ([], 3), ([[9]], 10), span=(0, 5), timeout_ms=60_000)
    assert [rows.offsets for rows in found] == [[0]]


def test_what_does_not_come_is_told():
    with pytest.raises(DeadlineExceeded, match="up to offset 5"):
        read(([[0]], 1), span=(0, 5))


def test_a_log_that_stays_silent_is_asked_whether_it_reaches_the_end(monkeypatch):
    monkeypatch.setattr(module, "LOOK_MS", 0)
    with pytest.raises(PositionError, match="short"):
        read(([[0]], 1), span=(0, 5), timeout_ms=60_000)


class Consumer:
    """What a reader asks a consumer of kafka-python."""

    def __init__(self, *, ends=5, highwater=5, topic_id=None, fault=None):
        self._cluster = SimpleNamespace(topic_id=lambda _: topic_id)
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
    found = module._Reader(
        ConnectionSettings("b:1"), isolation_level="read_committed", client_rack=""
    )
    found._consumer = consumer
    found.aim(T0, span, **more)
    return found


def test_a_log_that_was_cut_off_is_told_by_our_own_error():
    """A reader that is used again raises what kafka-python found in between."""
    fault = LogTruncationError({Place("t", 0): None})
    reader = beneath(Consumer(fault=fault))
    with pytest.raises(PositionError, match="cut off") as caught:
        reader.place_of(T0)
    assert (caught.value.requested, caught.value.log_end) == (3, 5)


def test_only_a_log_whose_leader_ends_below_a_range_is_short():
    beneath(Consumer(highwater=9)).require_reach(T0, (3, 9))
    beneath(Consumer(ends=9)).require_reach(T0, (3, 9))
    with pytest.raises(PositionError) as caught:
        beneath(Consumer()).require_reach(T0, (3, 9))
    assert caught.value.log_end == 5


def test_the_topic_of_a_range_is_the_one_that_was_planned():
    one, other = UUID(int=1), UUID(int=2)
    beneath(Consumer(topic_id=one, highwater=9), topic_id=one.hex).require_reach(
        T0, (3, 9)
    )
    reader = beneath(Consumer(topic_id=other), topic_id=one.hex)
    with pytest.raises(TopicReplaced, match="created again"):
        reader.require_reach(T0, (3, 9))

    def refused(*_):
        raise UnknownTopicId("?", partition=T0)

    reader.poll = refused
    with pytest.raises(TopicReplaced, match="created again"):
        reader.take(1)
    reader = beneath(Consumer(topic_id=one), topic_id=one.hex)
    reader.poll = refused
    assert reader.take(1) == (), "the broker may not know it yet"


def test_the_reader_beneath_aims_before_it_reads(monkeypatch):
    hooked = []
    monkeypatch.setattr(module.KafkaDataReader, "_new_consumer", lambda _: "a consumer")
    monkeypatch.setattr(module, "read_in_place", hooked.append)
    monkeypatch.setattr(module, "as_columns", lambda *each: hooked.append(each))
    reader = module._Reader(
        ConnectionSettings("b:1"), isolation_level="read_committed", client_rack=""
    )
    reader.aim(T0, (3, 9))
    assert (reader.place_of(T0), reader._aim.end) == (3, 9)
    assert reader._new_consumer() == "a consumer"
    assert hooked == ["a consumer", ("a consumer", reader._aim)]


def test_records_are_taken_of_a_release_that_is_not_known(monkeypatch):
    hooked = []
    monkeypatch.setattr(module, "is_known", lambda: False)
    monkeypatch.setattr(module.KafkaDataReader, "_new_consumer", lambda _: "a consumer")
    monkeypatch.setattr(module, "read_in_place", hooked.append)
    monkeypatch.setattr(module, "as_columns", lambda *each: hooked.append(each))
    reader = module._Reader(
        ConnectionSettings("b:1"), isolation_level="read_committed", client_rack=""
    )
    assert reader._new_consumer() == "a consumer"
    assert hooked == []
    same = {"timestamp": 5, "timestamp_type": 1, "headers": [("h", b"x")]}
    sources = [SimpleNamespace(offset=n, key=b"k", value=b"v", **same) for n in (3, 4)]
    records = Records(sources, token=None, make=lambda *_: iter(()))
    monkeypatch.setattr(reader, "poll", lambda timeout_ms, most: {T0: records})
    (fetched,) = reader.take(1)
    assert fetched.offset == 4
    rows = fetched.groups[0]((4, 9), with_headers=True)
    assert rows == Slice([4], [5], [1], [b"k"], [b"v"], [(("h", b"x"),)])


def test_a_process_keeps_one_reader_for_each_way_to_connect(monkeypatch):
    made = []

    class Kept:
        closed = False

        def close(self):
            self.closed = True

    def opened(settings, **_):
        made.append(Kept())
        return made[-1]

    monkeypatch.setattr(module, "SliceReader", opened)
    slices = Slices()
    way = {"isolation_level": "read_committed", "client_rack": ""}
    one = ConnectionSettings("b:1", options={"security.protocol": "PLAINTEXT"})
    first = slices.reader(one, **way)
    assert slices.reader(one, **way) is first
    assert slices.reader(ConnectionSettings("b:1"), **way) is not first
    assert slices.reader(one, **(way | {"client_rack": "r"})) is not first
    assert len(made) == 3
    slices.drop()
    assert all(each.closed for each in made)
    again = slices.reader(one, **way)
    monkeypatch.setattr(module.os, "getpid", lambda: -1)
    assert slices.reader(one, **way) is not again, "a child has its own"
    assert not again.closed
