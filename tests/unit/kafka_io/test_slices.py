"""Exact ranges over kafka-python, and the readers that a process keeps."""

import gc
from typing import NamedTuple

import pytest

from kafka_marshal.errors import DeadlineExceeded
from kafka_marshal.kafka_io import slices as module
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.slices import KafkaSliceReader, Slice, Slices, uncollected
from kafka_marshal.protocol.types import TopicPartition

T0 = TopicPartition("t", 0)


class Source(NamedTuple):
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes
    value: bytes
    headers: list


class Reader:
    """A reader of kafka-python's that hands out one chunk a call.

    A chunk is offsets with a record, and the next that it will look at.
    """

    def __init__(self, *chunks):
        self.chunks = list(chunks)
        self.place = None
        self.assigned = []

    def assign(self, partitions):
        self.assigned = partitions

    def seek(self, partition, offset):
        self.place = offset

    def take(self, timeout_ms, most):
        assert timeout_ms > 0
        found, self.place = self.chunks.pop(0) if self.chunks else ([], self.place)
        return [Source(o, 1_000, 0, b"k", b"v", [("a", b"1")]) for o in found]

    def place_of(self, partition):
        return self.place


def read(*chunks, span, **more):
    reader = KafkaSliceReader(
        ConnectionSettings("b:1"), isolation_level="read_committed", client_rack=""
    )
    reader._reader = Reader(*chunks)
    settings = {"timeout_ms": 0, "with_headers": False} | more
    found = list(reader.read(T0, span, **settings))
    assert reader._reader.assigned == []
    return found


def test_a_range_is_read_to_its_end_and_no_further():
    found = read(([3, 4], 5), ([5, 6], 7), span=(3, 6), timeout_ms=60_000)
    assert [rows.offsets for rows in found] == [[3, 4], [5]]
    assert (found[0].times_ms, found[0].kinds) == ([1_000, 1_000], [0, 0])
    assert (found[0].keys, found[0].values) == ([b"k", b"k"], [b"v", b"v"])
    assert found[0].headers is None


def test_headers_come_where_they_are_asked_for():
    (rows,) = read(([0], 1), span=(0, 1), with_headers=True)
    assert rows.headers == [[("a", b"1")]]


def test_gaps_are_passed_where_the_reader_passes_them():
    found = read(([0], 1), ([], 5), span=(0, 5), timeout_ms=60_000)
    assert [rows.offsets for rows in found] == [[0]]


def test_what_does_not_come_is_told():
    with pytest.raises(DeadlineExceeded, match="up to offset 5"):
        read(([0], 1), span=(0, 5))


@pytest.mark.parametrize(
    ("size", "least", "most"),
    [
        (None, module.CHUNK_RECORDS, module.CHUNK_RECORDS),
        (1_000, 500, 1_100),
        (10 * module.CHUNK_BYTES, 1, 1),
    ],
)
def test_a_chunk_has_a_bounded_size_whatever_records_have(size, least, most):
    values = [None if size is None else bytes(size)] * 40
    rows = Slice(range(40), [0] * 40, [0] * 40, [b"k"] * 40, values, None)
    assert least <= module.chunk_like(rows) <= most


def test_a_chunk_is_judged_by_keys_too():
    keys = [bytes(module.CHUNK_BYTES // 10)]
    rows = Slice([0], [0], [0], keys, [None], None)
    assert module.chunk_like(rows) < 20


def test_the_collector_rests_and_is_as_it_was():
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_process_keeps_one_reader_for_each_way_to_connect(monkeypatch):
    made = []

    class Kept:
        closed = False

        def close(self):
            self.closed = True

    def opened(settings, **_):
        made.append(Kept())
        return made[-1]

    monkeypatch.setattr(module, "open_slices", opened)
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


@pytest.mark.parametrize("transport", ["fast", "kafka-python"])
def test_the_transport_that_is_chosen_reads(transport):
    settings = ConnectionSettings("b:1", transport=transport)
    reader = module.open_slices(settings, isolation_level="read_uncommitted")
    assert ("Fast" in type(reader).__name__) == (transport == "fast")
    reader.close()
