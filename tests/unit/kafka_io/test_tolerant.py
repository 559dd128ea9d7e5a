"""Header names that are no text, and last words: read, and only those are changed."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import untouched
from batchkit import BadText, new_batch
from kafka import TopicPartition
from kafka.consumer.fetcher import Fetcher
from kafka.errors import CorruptRecordError
from kafka.net.manager import KafkaConnectionManager
from kafka.net.transport import KafkaTCPTransport
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.legacy_records import LegacyRecordBatchBuilder

from kafka_marshal.kafka_io.tolerant import (
    TolerantBatch,
    TolerantBatches,
    change_transports,
    hear_last_words,
    read_any_header,
)

UNTOUCHED = Path(untouched.__file__)


def batch(*headers) -> bytes:
    builder = new_batch()
    for offset, pairs in enumerate(headers):
        builder.append(
            offset, timestamp=1, key=b"k", value=b"%d" % offset, headers=pairs
        )
    return bytes(builder.build())


def test_the_original_raises_and_ours_reads_on():
    raw = batch([("good", b"1")], [(BadText("b"), b"2")], [("last", None)])
    with pytest.raises(CorruptRecordError):
        list(DefaultRecordBatch(bytearray(raw)))
    records = list(TolerantBatch(bytearray(raw)))
    assert [record.value for record in records] == [b"0", b"1", b"2"]
    assert [record.headers for record in records] == [
        [("good", b"1")],
        [("a\ufffd", b"2")],
        [("last", None)],
    ]


def test_sound_batches_are_read_alike():
    raw = batch([], [("h", b"v")], [("\u65e5", b"")])
    ours = list(TolerantBatch(bytearray(raw)))
    theirs = list(DefaultRecordBatch(bytearray(raw)))
    assert [(r.offset, r.key, r.value, r.headers) for r in ours] == [
        (r.offset, r.key, r.value, r.headers) for r in theirs
    ]


def records_of(raw, kind):
    place = TopicPartition("t", 0)
    records = kind(0, place, MemoryRecords(raw))
    return [(each.offset, each.value, each.headers) for each in records.take()]


def test_a_consumer_of_ours_reads_them_and_another_one_does_not():
    raw = batch([(BadText("b"), b"2")]) + batch([("good", b"1")])
    ours = SimpleNamespace(_fetcher=SimpleNamespace(PartitionRecords=None))
    read_any_header(ours)
    assert records_of(raw, ours._fetcher.PartitionRecords) == [
        (0, b"0", [("a\ufffd", b"2")]),
        (0, b"0", [("good", b"1")]),
    ]
    with pytest.raises(CorruptRecordError):
        records_of(raw, Fetcher.PartitionRecords)


def test_batches_of_old_formats_and_their_faults_are_left_to_kafka_python():
    old = LegacyRecordBatchBuilder(1, 0, 10_000)
    old.append(0, timestamp=1, key=None, value=b"old")
    batches = TolerantBatches(bytes(old.build()) + batch([]))
    first, second = batches.next_batch(), batches.next_batch()
    assert [record.value for record in first] == [b"old"]
    assert type(second) is TolerantBatch
    assert batches.next_batch() is None
    with pytest.raises(CorruptRecordError):
        TolerantBatches(bytes(20)).next_batch()


def test_what_was_said_before_closing_is_heard():
    """A refusal and the end of the connection come at once; the refusal counts."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        transport = KafkaTCPTransport(None, ours, "broker")
        hear_last_words(transport)
        theirs.sendall(b"no")
        theirs.close()
        assert transport._sock_recv() == (b"no", None)
        data, error = transport._sock_recv()
        assert data == b""
        assert "disconnected" in str(error)


def test_transports_that_are_opened_from_now_on_are_changed():
    made = SimpleNamespace(_sock_recv=lambda: (b"", None))
    changed = []

    async def build(node, *, timeout_at):
        assert (node, timeout_at) == ("node", 5)
        return made

    manager = SimpleNamespace(_build_transport=build)
    change_transports(SimpleNamespace(_manager=manager), changed.append)
    assert asyncio.run(manager._build_transport("node", timeout_at=5)) is made
    assert changed == [made]


def test_what_kafka_python_does_not_have_is_left_alone():
    change_transports(None, pytest.fail)
    change_transports(SimpleNamespace(_manager=object()), pytest.fail)


def test_kafka_python_has_the_parts_that_this_counts_on():
    assert asyncio.iscoroutinefunction(KafkaConnectionManager._build_transport)
    assert hasattr(KafkaTCPTransport, "_sock_recv")


def test_importing_changes_nothing_in_kafka_python():
    done = subprocess.run(
        [sys.executable, UNTOUCHED], check=True, capture_output=True, text=True
    )
    assert done.stdout == ""
