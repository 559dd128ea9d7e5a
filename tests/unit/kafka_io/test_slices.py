"""Exact ranges, and the readers that a process keeps."""

import gc
from types import SimpleNamespace

import pytest

from kafka_marshal.errors import DeadlineExceeded
from kafka_marshal.kafka_io import slices as module
from kafka_marshal.kafka_io.columns import Slice
from kafka_marshal.kafka_io.fetched import Fetched
from kafka_marshal.kafka_io.records import Records
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.slices import SliceReader, Slices
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

    def aim(self, partition, span):
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


def test_the_reader_beneath_aims_before_it_reads(monkeypatch):
    hooked = []
    monkeypatch.setattr(module.KafkaDataReader, "_new_consumer", lambda _: "a consumer")
    monkeypatch.setattr(module, "read_in_place", hooked.append)
    monkeypatch.setattr(module, "as_columns", lambda *each: hooked.append(each))
    beneath = module._Reader(
        ConnectionSettings("b:1"), isolation_level="read_committed", client_rack=""
    )
    beneath.aim(T0, (3, 9))
    assert (beneath.place_of(T0), beneath._aim.end) == (3, 9)
    assert beneath._new_consumer() == "a consumer"
    assert hooked == ["a consumer", ("a consumer", beneath._aim)]


def test_records_are_taken_of_a_release_that_is_not_known(monkeypatch):
    hooked = []
    monkeypatch.setattr(module, "is_known", lambda: False)
    monkeypatch.setattr(module.KafkaDataReader, "_new_consumer", lambda _: "a consumer")
    monkeypatch.setattr(module, "read_in_place", hooked.append)
    monkeypatch.setattr(module, "as_columns", lambda *each: hooked.append(each))
    beneath = module._Reader(
        ConnectionSettings("b:1"), isolation_level="read_committed", client_rack=""
    )
    assert beneath._new_consumer() == "a consumer"
    assert hooked == []
    same = {"timestamp": 5, "timestamp_type": 1, "headers": [("h", b"x")]}
    sources = [SimpleNamespace(offset=n, key=b"k", value=b"v", **same) for n in (3, 4)]
    records = Records(sources, token=None, make=lambda *_: iter(()))
    monkeypatch.setattr(beneath, "poll", lambda timeout_ms, most: {T0: records})
    (fetched,) = beneath.take(1)
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
