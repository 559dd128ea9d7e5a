"""Labels that members announce; readers accept any."""

import pytest

from kafka_marshal.protocol.labels import (
    FAILING_MAX,
    failing_labels,
    failing_of,
    number_of,
    own_labels,
    problem_of,
    standbys_label,
    weight_of,
)
from kafka_marshal.protocol.types import TopicPartition


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("7", 7), ("999999999", 999_999_999)),
        *(("", None), ("-1", None), ("1.5", None), ("1234567890", None)),
        *(("٣", None), ("x", None)),
    ],
)
def test_only_one_to_nine_digits_are_a_number(text, number):
    assert number_of({"target": text}, "target") == number


def test_a_missing_label_has_no_number():
    assert number_of({}, "target") is None


@pytest.mark.parametrize(
    ("text", "weight"),
    [("3", 3), ("0", 1), ("1000", 1_000), ("1001", 1_000), ("12345", 1), ("x", 1)],
)
def test_a_weight_is_within_bounds(text, weight):
    assert weight_of({"weight": text}) == weight


@pytest.mark.parametrize(("text", "count"), [("2", 2), ("0", 0), ("101", 100), ("", 0)])
def test_a_number_of_standbys_is_within_bounds(text, count):
    assert standbys_label({"standbys": text}) == count


def test_own_labels_leave_out_those_that_only_the_engine_uses():
    labels = {"weight": "2", "rack": "r1", "fails:t": "0", "layout": "3", "page": "x"}
    assert list(own_labels(labels).items()) == [
        ("fails:t", "0"),
        ("page", "x"),
        ("rack", "r1"),
    ]


def test_failing_partitions_are_named_by_topic():
    failing = [TopicPartition("u", 1), TopicPartition("t", 10), TopicPartition("t", 2)]
    labels = failing_labels(failing)
    assert labels == {"fails:t": "2,10", "fails:u": "1"}
    assert failing_of({**labels, "rack": "r1"}) == tuple(sorted(failing))


def test_invalid_partitions_of_a_fails_label_are_left_out():
    labels = {"fails:t": "1,x,,-2,1234567890,3", "fails:": "5"}
    assert failing_of(labels) == (("", 5), ("t", 1), ("t", 3))


def test_failing_partitions_are_cut_to_what_a_member_can_announce():
    many = [TopicPartition("t", n) for n in range(100)]
    assert failing_of(failing_labels(many)) == tuple(many[:FAILING_MAX])
    long = [TopicPartition("t", 10**8 + n) for n in range(60)]
    (text,) = failing_labels(long).values()
    assert len(text) <= 255
    topics = [TopicPartition(f"t{n:02}", 0) for n in range(60)]
    assert len(failing_labels(topics)) == 32
    assert failing_labels([TopicPartition("t" * 250, 0)]) == {}
    assert failing_of({f"fails:t{n:03}": "1,2" for n in range(64)}) == tuple(
        TopicPartition(f"t{n:03}", k) for n in range(32) for k in (1, 2)
    )


def test_a_user_label_of_the_engine_or_of_invalid_length_is_rejected():
    assert problem_of("rack", "r1") is None
    assert problem_of("target", "7") is None
    assert "whole number" in (problem_of("target", "many") or "")
    assert "by the engine" in (problem_of("plans", "1") or "")
    assert "by the engine" in (problem_of("fails:t", "1") or "")
    for name, text in (("", ""), ("n" * 256, ""), ("n", "t" * 256)):
        assert "255 characters" in (problem_of(name, text) or "")
    for name, text in (("rack", "r\udc80"), ("r\udc80", "1")):
        assert "UTF-8" in (problem_of(name, text) or "")
