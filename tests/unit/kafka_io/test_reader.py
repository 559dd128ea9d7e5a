"""Records over kafka-python's own: sequences and fields."""

import pickle

import pytest
from kafka.consumer.fetcher import ConsumerRecord

from kafka_marshal.kafka_io.reader import KafkaRecord, Records, kafka_records
from kafka_marshal.ports import PlainRecord, Record
from kafka_marshal.protocol.types import Token

TOKEN = Token(1, 0, 5)


def fetched(offset, *, epoch=3, headers=()):
    return ConsumerRecord(
        *("t", 2, epoch, offset, 99, 1, b"k", b"v%d" % offset, list(headers)),
        *(None, 1, 2, -1),
    )


def records(*offsets):
    sources = [fetched(each) for each in offsets]
    return Records(sources, token=TOKEN, make=kafka_records)


def test_every_field_is_there():
    source = fetched(7, headers=[("h", b"1")])
    (record,) = Records([source], token=TOKEN, make=kafka_records)
    plain = PlainRecord("t", 2, 7, 99, 1, b"k", b"v7", (("h", b"1"),), 3, TOKEN)
    assert isinstance(record, KafkaRecord)
    assert record == plain
    assert repr(record) == repr(plain)
    assert pickle.loads(pickle.dumps(record)) == plain


def test_an_unknown_epoch_is_none():
    (record,) = kafka_records([fetched(1, epoch=-1)], None)
    assert record.leader_epoch is None
    assert record.headers == ()


def test_polled_records_are_a_sequence():
    found = records(3, 5, 6)
    assert [record.offset for record in found] == [3, 5, 6]
    assert [record.offset for record in found] == [3, 5, 6]
    assert (found[0].offset, found[-1].offset, len(found)) == (3, 6, 3)
    assert [record.offset for record in found[1:]] == [5, 6]
    assert [record.offset for record in reversed(found)] == [6, 5, 3]
    assert found[1] in found
    assert not records()
    assert list(records()[:1]) == []
    with pytest.raises(IndexError):
        found[3]
    assert repr(found[:1]) == f"Records([{found[0]!r}])"


def test_slices_keep_the_token():
    assert {record.token for record in records(1, 2, 3)[::2]} == {TOKEN}


def test_records_do_not_change():
    record: Record = records(1)[0]
    with pytest.raises(AttributeError):
        record.value = b"other"
    with pytest.raises(AttributeError):
        record.key = b"other"
