"""Marks of a checkpoint, ranges of a batch, and their division into tasks."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import OffsetRange, Token, TopicPartition
from kafka_marshal.spark.planning import (
    Mark,
    Origin,
    PlannedRange,
    limited_ends,
    planned_ranges,
    split_ranges,
    to_marks,
    to_offset,
)

A, B = TopicPartition("a.b-c", 0), TopicPartition("a.b-c", 10)
OLD, NEW = Token(7, 0, 5), Token(7, 1, 9)
T = [TopicPartition("t", number) for number in range(5)]
TOKEN = Token(1, 0, 5)
ORIGIN = Origin(group="g", delivery="alo", coordination="0c")


def planned(partition, token, first, end, topic_id=""):
    return PlannedRange(
        partition=partition, token=token, first=first, end=end, topic_id=topic_id
    )


def test_marks_round_trip_through_an_offset():
    marks = {
        B: Mark(token=NEW, begin=3, next=4, restarts=1, topic_id="0f"),
        A: Mark(OLD, 0, 2),
    }
    offset = to_offset(marks, ORIGIN)
    assert json.dumps(offset) == (
        '{"group": "g", "delivery": "alo", "coordination": "0c", '
        '"a.b-c:0": "7.0.5 0 2 0 ", "a.b-c:10": "7.1.9 3 4 1 0f"}'
    ), "in order: Spark compares texts"
    assert to_marks(json.loads(json.dumps(offset))) == marks
    assert to_marks({}) == to_offset({}, ORIGIN) == {}, "the initial offset"


@pytest.mark.parametrize(
    ("name", "value"),
    [("group", "h"), ("delivery", "amo"), ("coordination", "0d")],
)
def test_a_checkpoint_of_another_origin_raises(name, value):
    other = {**to_offset({A: Mark(OLD, 0, 2)}, ORIGIN), name: value}
    with pytest.raises(ConfigurationError, match=f"written with .*{value}, and the"):
        ORIGIN.require(other)


@pytest.mark.parametrize("offset", [0, "0", [1], None])
def test_an_offset_that_is_not_an_object_raises(offset):
    """For example, offsets of the format rate are numbers."""
    with pytest.raises(ConfigurationError, match="no offset of format marshal") as no:
        ORIGIN.require(offset)
    assert no.value.setting == "checkpointLocation"


@pytest.mark.parametrize("offset", [{}, {"t:0": "1.0.5 0 2 0 "}, {"coordination": ""}])
def test_an_unknown_origin_is_not_compared(offset):
    ORIGIN.require(offset)
    ORIGIN.require(to_offset({A: Mark(OLD, 0, 2)}, ORIGIN))
    unknown = Origin(group="g", delivery="alo", coordination="")
    unknown.require(to_offset({A: Mark(OLD, 0, 2)}, ORIGIN))


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
def test_malformed_marks_raise(offset):
    with pytest.raises(ConfigurationError, match="new checkpointLocation"):
        to_marks(offset)


def test_a_batch_is_the_difference_of_two_offsets():
    start = {A: Mark(OLD, 0, 2), B: Mark(OLD, 0, 8)}
    assert planned_ranges(start, {A: Mark(OLD, 0, 5), B: Mark(OLD, 0, 8)}) == [
        planned(A, OLD, 2, 5)
    ]
    assert planned_ranges(start, {A: Mark(NEW, 1, 5)}) == [planned(A, NEW, 1, 5)], (
        "another claim begins where it says"
    )
    assert planned_ranges({}, {B: Mark(NEW, 3, 4), A: Mark(OLD, 0, 2)}) == [
        planned(A, OLD, 0, 2),
        planned(B, NEW, 3, 4),
    ]


def test_a_mark_with_a_later_restart_begins_a_new_range():
    start = {A: Mark(token=OLD, begin=0, next=20, restarts=0, topic_id="0f")}
    end = {A: Mark(token=OLD, begin=0, next=5, restarts=1, topic_id="0f")}
    assert planned_ranges(start, end) == [planned(A, OLD, 0, 5, "0f")]


def test_marks_differ_in_topic_only_if_both_topic_ids_are_known():
    assert Mark(
        token=OLD, begin=0, next=2, restarts=0, topic_id="0f"
    ).is_of_other_topic("0e")
    assert not Mark(
        token=OLD, begin=0, next=2, restarts=0, topic_id="0f"
    ).is_of_other_topic("0f")
    assert not Mark(
        token=OLD, begin=0, next=2, restarts=0, topic_id="0f"
    ).is_of_other_topic("")
    assert not Mark(OLD, 0, 2).is_of_other_topic("0e")


@pytest.mark.parametrize(
    ("sizes", "most", "wanted"),
    [
        pytest.param([10, 10], 100, [10, 10], id="all-fits"),
        pytest.param([30, 10], 20, [15, 5], id="in-proportion"),
        pytest.param([1000, 1], 10, [9, 1], id="none-starves"),
        pytest.param([5, 5, 5], 1, [1, 1, 1], id="one-each-at-least"),
        pytest.param([7, 0], 3, [3, 0], id="nothing-there"),
    ],
)
def test_a_limit_is_divided_as_by_sparks_own_source(sizes, most, wanted):
    spans = {T[n]: OffsetRange(100, 100 + size) for n, size in enumerate(sizes)}
    found = limited_ends(spans, most)
    assert [found[T[n]] - 100 for n in range(len(sizes))] == wanted


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=5), st.integers(1, 20_000))
def test_limited_ends_stay_within_the_logs_and_the_limit(sizes, most):
    spans = {T[n]: OffsetRange(0, size) for n, size in enumerate(sizes)}
    found = limited_ends(spans, most)
    assert all(1 <= found[T[n]] <= size for n, size in enumerate(sizes))
    assert sum(found.values()) <= max(most, 0) + len(sizes)


@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=5), st.integers(0, 40))
def test_parts_of_a_range_are_contiguous_and_of_similar_length(sizes, least):
    whole = [planned(T[n], TOKEN, 7, 7 + size) for n, size in enumerate(sizes)]
    parts = split_ranges(whole, least)
    assert all(part.first < part.end for part in parts)
    for each in whole:
        mine = [part for part in parts if part.partition == each.partition]
        assert (mine[0].first, mine[-1].end) == (each.first, each.end)
        assert all(one.end == other.first for one, other in pairwise(mine))
        lengths = [part.end - part.first for part in mine]
        assert max(lengths) - min(lengths) <= 1


def test_larger_ranges_are_split_into_more_parts():
    whole = [planned(T[0], None, 0, 90), planned(T[1], None, 0, 10)]
    parts = split_ranges(whole, 10)
    assert [part.partition.partition for part in parts].count(0) == 9
    assert split_ranges(whole, 2) == whole
    assert split_ranges([], 5) == []


@given(st.integers(1, 1_000), st.integers(1, 300), st.integers(0, 20))
def test_no_part_has_more_offsets_than_the_limit(size, most, least):
    parts = split_ranges([planned(T[0], TOKEN, 7, 7 + size)], least, most=most)
    assert (parts[0].first, parts[-1].end) == (7, 7 + size)
    assert all(one.end == other.first for one, other in pairwise(parts))
    assert all(0 < part.end - part.first <= most for part in parts)
