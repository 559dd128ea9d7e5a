"""What a checkpoint holds."""

import json

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import Token, TopicPartition
from kafka_marshal.spark.offsets import (
    Mark,
    Stretch,
    stretches,
    to_marks,
    to_offset,
)

A, B = TopicPartition("a.b-c", 0), TopicPartition("a.b-c", 10)
OLD, NEW = Token(7, 0, 5), Token(7, 1, 9)


def test_an_offset_is_text_that_says_the_same_again():
    marks = {B: Mark(NEW, 3, 4, 1, "0f"), A: Mark(OLD, 0, 2)}
    offset = to_offset(marks)
    assert json.dumps(offset) == (
        '{"a.b-c:0": "7.0.5 0 2 0 ", "a.b-c:10": "7.1.9 3 4 1 0f"}'
    ), "in order: Spark compares texts"
    assert to_marks(json.loads(json.dumps(offset))) == marks
    assert to_marks({}) == {}


@pytest.mark.parametrize(
    "offset",
    [
        {"t:0": 5},
        {"t": "1.0.5 0 2 0 "},
        {"t:0": "1.0 0 2 0 "},
        {"t:0": "1.0.5 0 2"},
        {"t:0": "1.0.5 0 0 "},
    ],
)
def test_the_checkpoint_of_another_source_is_told(offset):
    with pytest.raises(ConfigurationError, match="new checkpointLocation"):
        to_marks(offset)


def test_a_batch_is_what_lies_between_two_offsets():
    start = {A: Mark(OLD, 0, 2), B: Mark(OLD, 0, 8)}
    assert stretches(start, {A: Mark(OLD, 0, 5), B: Mark(OLD, 0, 8)}) == [
        Stretch(A, OLD, 2, 5)
    ]
    assert stretches(start, {A: Mark(NEW, 1, 5)}) == [Stretch(A, NEW, 1, 5)], (
        "another claim begins where it says"
    )
    assert stretches({}, {B: Mark(NEW, 3, 4), A: Mark(OLD, 0, 2)}) == [
        Stretch(A, OLD, 0, 2),
        Stretch(B, NEW, 3, 4),
    ]


def test_a_restart_begins_a_range_of_its_own():
    start = {A: Mark(OLD, 0, 20, 0, "0f")}
    end = {A: Mark(OLD, 0, 5, 1, "0f")}
    assert stretches(start, end) == [Stretch(A, OLD, 0, 5, "0f")]


def test_offsets_are_of_another_topic_where_both_ids_are_known():
    assert Mark(OLD, 0, 2, 0, "0f").is_of_another("0e")
    assert not Mark(OLD, 0, 2, 0, "0f").is_of_another("0f")
    assert not Mark(OLD, 0, 2, 0, "0f").is_of_another("")
    assert not Mark(OLD, 0, 2).is_of_another("0e")
