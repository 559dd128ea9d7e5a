"""Header names that are no text, and last words: read, and only those are changed."""

import socket

import pytest
from batchkit import BadText, new_batch
from kafka.errors import CorruptRecordError
from kafka.net.transport import KafkaTCPTransport
from kafka.record import memory_records
from kafka.record.default_records import DefaultRecordBatch

from kafka_marshal.kafka_io.tolerant import TolerantBatch


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


def test_kafka_python_uses_it():
    assert memory_records.DefaultRecordBatch is TolerantBatch


def test_what_was_said_before_closing_is_heard():
    """A refusal and the end of the connection come at once; the refusal counts."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        transport = KafkaTCPTransport(None, ours, "broker")
        theirs.sendall(b"no")
        theirs.close()
        assert transport._sock_recv() == (b"no", None)
        data, error = transport._sock_recv()
        assert data == b""
        assert "disconnected" in str(error)
