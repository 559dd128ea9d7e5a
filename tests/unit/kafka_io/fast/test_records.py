"""Records made from librdkafka's messages."""

import pickle

from confluent_kafka import Message

from kafka_marshal.kafka_io.fast.records import FastRecord, fast_records, headers_of
from kafka_marshal.ports import PlainRecord
from kafka_marshal.protocol.types import Token

TOKEN = Token(1, 0, 5)


def message(offset, *, headers=None, epoch=3):
    return Message(
        topic="t",
        partition=2,
        offset=offset,
        key=b"k",
        value=b"v%d" % offset,
        headers=headers,
        timestamp=(2, 99),
        leader_epoch=epoch,
    )


def test_every_field_is_there():
    (record,) = fast_records([message(7, headers=[("h", b"1")])], TOKEN)
    plain = PlainRecord("t", 2, 7, 99, 1, b"k", b"v7", (("h", b"1"),), 3, TOKEN)
    assert isinstance(record, FastRecord)
    assert record == plain
    assert pickle.loads(pickle.dumps(record)) == plain


def test_what_is_missing_is_none():
    (record,) = fast_records(
        [Message(topic="t", partition=0, offset=0, timestamp=(0, 0))], None
    )
    assert (record.key, record.value, record.token) == (None, None, None)
    assert (record.headers, record.timestamp_type) == ((), -1)


def test_offsets_with_and_without_gaps():
    for offsets in ([], [4], [4, 5, 6], [4, 5, 7], [4, 6, 7, 9]):
        found = list(fast_records([message(each) for each in offsets], None))
        assert [record.offset for record in found] == offsets
        assert [record.value for record in found] == [b"v%d" % each for each in offsets]


class Unreadable:
    """A message as confluent-kafka makes it where a header's name is no text."""

    class Pair(tuple):
        __slots__ = ()

        def __repr__(self):
            return "(<NULL>, b'2')"

        def __getitem__(self, at):
            assert at == 1, "this would end the process"
            return super().__getitem__(at)

    def __init__(self):
        self.asked = 0
        self.now = [("good", b"1"), self.Pair((None, b"2"))]

    def headers(self):
        self.asked += 1
        if self.asked == 1:
            raise SystemError("returned a result with an exception set")
        return self.now

    def set_headers(self, headers):
        self.now = headers


def test_names_that_are_no_text_are_marked_and_never_touched():
    unreadable = Unreadable()
    assert headers_of(unreadable) == (("good", b"1"), ("\ufffd", b"2"))
    assert headers_of(unreadable) == (("good", b"1"), ("\ufffd", b"2"))
