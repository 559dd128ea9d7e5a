"""Entries of the coordination log stay packed in the fetched bytes if possible."""

from types import SimpleNamespace

import pytest
from batchkit import built
from kafka import TopicPartition as KafkaTopicPartition
from kafka.future import Future
from kafka.record import MemoryRecords

from kafka_marshal.kafka_io import entries as module
from kafka_marshal.kafka_io.entries import (
    EntryReader,
    EntryRecords,
    fetch_entries,
    to_runs,
)
from kafka_marshal.kafka_io.patches import Network
from kafka_marshal.native import compiled
from kafka_marshal.protocol.packed_entries import PackedEntries
from kafka_marshal.protocol.types import LogEntry


def records_of(*, values):
    """Return the class that reads a fetch with these values, and its runs."""
    consumer = SimpleNamespace(_fetcher=SimpleNamespace(PartitionRecords=None))
    fetch_entries(consumer)
    batch = built([(at, (7, None, value, [])) for at, value in enumerate(values)])
    raw = bytearray(batch._buffer)
    place = KafkaTopicPartition("__marshal", 0)
    part = consumer._fetcher.PartitionRecords(0, place, MemoryRecords(bytes(raw)))
    return type(part), list(to_runs(part.take()))


def entry(offset, value):
    return LogEntry(
        offset=offset, leader_epoch=0, timestamp_ms=7, timestamp_type=0, value=value
    )


@pytest.mark.skipif(compiled is None, reason="nothing was compiled here")
def test_entries_of_an_accepted_batch_stay_packed():
    kind, (run,) = records_of(values=[b"v", None])
    assert kind is EntryRecords
    assert isinstance(run, PackedEntries)
    assert list(run) == [entry(0, b"v"), entry(1, None)]


def test_records_become_entries_without_compiled_functions(monkeypatch):
    monkeypatch.setattr(module, "compiled", None)
    kind, found = records_of(values=[b"v", None])
    assert kind is not EntryRecords
    assert found == [[entry(0, b"v"), entry(1, None)]]


def test_a_request_limit_applies_to_later_requests():
    network = Network({})
    manager = network.manager
    reader = object.__new__(EntryReader)
    reader._consumer = SimpleNamespace(_client=network)
    limits = []

    def send(_, request_timeout_ms):
        limits.append(request_timeout_ms)
        return Future()

    connection = SimpleNamespace(send_request=send, init_future=Future())
    manager._conns["0"] = connection
    manager.get_connection = lambda node_id: connection
    manager.send("a", "0")
    reader.limit_requests(2_000)
    manager.send("b", "0")
    manager.send("c", "0", request_timeout_ms=70)
    assert limits == [None, 2_000, 70]
    manager._conns.clear()
    network.close()


def test_packed_runs_and_single_entries_keep_their_order():
    empty = PackedEntries(b"", b"")
    a, b, c = entry(0, b"a"), entry(1, b"b"), entry(2, b"c")
    runs = list(to_runs([a, b, empty, empty, c]))
    assert [type(each) for each in runs] == [list, PackedEntries, PackedEntries, list]
    assert (runs[0], runs[-1]) == ([a, b], [c])
