"""Records of any transport, and sequences of records."""

import copy
import pickle

import pytest

from kafka_marshal.ports import (
    PlainRecord,
    Record,
    Records,
    SourceKind,
    index_from,
    joined_records,
    runs_of,
)
from kafka_marshal.protocol.types import Token


class Other(Record):
    """A record that computes fields on access, as records of readers do."""

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
    assert Other() is not PLAIN
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


def test_a_record_is_immutable():
    with pytest.raises(AttributeError):
        PLAIN.offset = 5
    with pytest.raises(AttributeError):
        PLAIN.note = "x"  # type: ignore[attr-defined]


TOKEN = Token(1, 2, 3)
KIND = SourceKind(
    make=lambda sources, token: (
        PlainRecord("t", 0, each, 0, 0, None, b"v", token=token) for each in sources
    ),
    offset=int,
    timestamp_ms=int,
    key=bytes,
    value=bytes,
)


def lazy(*offsets):
    return Records.of_sources(list(offsets), token=None, kind=KIND)


@pytest.mark.parametrize(
    "parts",
    [
        [lazy(1, 2), lazy(5)],
        [list(lazy(1, 2)), list(lazy(5))],
        [lazy(1, 2), list(lazy(5))],
    ],
)
def test_records_are_joined_under_another_token(parts):
    found = joined_records(parts, TOKEN)
    assert [(each.offset, each.token) for each in found] == [
        (1, TOKEN),
        (2, TOKEN),
        (5, TOKEN),
    ]
    assert found.offset_at(2) == 5
    assert found[1].offset == 2
    assert found[1:][0].token == TOKEN
    assert all(each.token is None for part in parts for each in part)


@pytest.mark.parametrize("records", [lazy(1, 2, 5), list(lazy(1, 2, 5))])
def test_the_index_of_an_offset_is_that_of_the_next_record(records):
    assert [index_from(records, offset) for offset in (0, 2, 3, 6)] == [0, 1, 2, 3]
    assert index_from(records, 0, start=2) == 2


def test_entries_are_grouped_in_runs_of_one_partition():
    assert list(runs_of([])) == []
    assert list(runs_of([(0, "a"), (0, "b"), (1, "c"), (0, "d")])) == [
        (0, ["a", "b"]),
        (1, ["c"]),
        (0, ["d"]),
    ]
