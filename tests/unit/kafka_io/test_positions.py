"""Assignment, positions and pauses of a data reader."""

import pytest

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.kafka_io.positions import Positions, outside_error
from kafka_marshal.protocol.types import Token, TopicPartition

A, B, C = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)
TOKEN = Token(1, 0, 5)


@pytest.mark.parametrize(
    ("span", "expected"),
    [((3, 9), "outside its log, which has offsets 3 to 9."), ((-1, -1), "its log.")],
)
def test_a_position_outside_the_log_names_the_range_and_the_command(span, expected):
    start, end = span
    error = outside_error(A, 12, what="is outside its log", start=start, end=end)
    assert f"Position 12 of {A}" in str(error)
    assert expected in str(error)
    assert "unclean leader election" in str(error)
    assert f"marshal claims list --topic {A.topic};" in str(error)
    assert "marshal groups reset GROUP --topic t:0 --to-latest --execute" in str(error)
    assert "eek" not in str(error), "there is no seek"
    assert (error.requested, error.log_start, error.log_end) == (12, *span)
    assert error.partition == A


def test_a_position_before_the_log_names_the_deleted_records():
    error = outside_error(A, 2, what="is outside its log", start=7, end=9)
    assert "Records 2 to 6 were deleted" in str(error)
    assert "groups reset" not in str(error)


@pytest.fixture
def places():
    made = Positions()
    made.assign([A, B])
    return made


def test_partitions_that_stay_assigned_keep_their_position(places):
    places.seek(A, 7, token=TOKEN, topic_id=b"id")
    places.pause([A, B])
    places.assign([C, A])
    assert places.next == {C: None, A: 7}
    assert places.tokens == {C: None, A: TOKEN}
    assert places.topic_ids == {C: None, A: b"id"}
    assert places.paused == {A}
    places.assign([])
    assert (places.next, places.tokens, places.paused) == ({}, {}, set())


def test_only_assigned_partitions_are_paused_and_resumed(places):
    assert places.pause([A, C]) == [A]
    assert places.resume([B, C, A]) == [A]
    assert places.resume([A]) == []
    assert not places.paused


def test_a_seek_needs_an_assigned_partition_and_an_offset(places):
    with pytest.raises(InvalidTransition, match="u-0: it is not assigned"):
        places.seek(C, 0, token=None)
    with pytest.raises(InvalidTransition, match="seek to -1 in t-0"):
        places.seek(A, -1, token=None)
    assert places.next == {A: None, B: None}


def test_require_all_raises_for_a_partition_without_a_position(places):
    places.seek(A, 0, token=None)
    with pytest.raises(InvalidTransition, match="t-1 is new"):
        places.require_all()
    places.seek(B, 0, token=None)
    places.require_all()
