"""The contract of a record, of any transport."""

import copy
import pickle

import pytest

from kafka_marshal.ports import PlainRecord, Record


class Other(Record):
    """A record whose fields are made when asked for, as readers' are."""

    __slots__ = ()
    topic = "t"
    partition = 0
    offset = property(lambda self: 4)
    timestamp_ms = 9
    timestamp_type = 0
    key = None
    value = b"v"
    headers = ()
    leader_epoch = None
    token = None


PLAIN = PlainRecord("t", 0, 4, 9, 0, None, b"v")


def test_equal_fields_make_equal_records():
    assert Other() == PLAIN
    assert Other() == PLAIN
    assert hash(Other()) == hash(PLAIN)
    assert PlainRecord("t", 0, 4, 9, 0, None, b"w") != PLAIN
    assert PLAIN != ("t", 0, 4, 9, 0, None, b"v", (), None, None)


def test_copies_hold_all_fields():
    for made in (pickle.loads(pickle.dumps(Other())), copy.deepcopy(Other())):
        assert type(made) is PlainRecord
        assert made == PLAIN


def test_a_repr_has_all_fields():
    assert repr(PLAIN) == repr(Other())
    assert repr(PLAIN) == (
        "Record(topic='t', partition=0, offset=4, timestamp_ms=9, timestamp_type=0,"
        " key=None, value=b'v', headers=(), leader_epoch=None, token=None)"
    )


def test_it_does_not_change():
    with pytest.raises(AttributeError):
        PLAIN.offset = 5
    with pytest.raises(AttributeError):
        PLAIN.note = "x"  # type: ignore[attr-defined]
