"""What members announce in labels; any labels are accepted."""

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
def test_a_number_is_a_few_digits(text, number):
    assert number_of({"target": text}, "target") == number


def test_a_label_that_is_missing_is_no_number():
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


def test_own_labels_are_those_that_the_engine_does_not_use_alone():
    labels = {"weight": "2", "rack": "r1", "fails:t": "0", "layout": "3", "page": "x"}
    assert list(own_labels(labels).items()) == [
        ("fails:t", "0"),
        ("page", "x"),
        ("rack", "r1"),
    ]


def test_partitions_that_fail_are_named_by_topic():
    failing = [TopicPartition("u", 1), TopicPartition("t", 10), TopicPartition("t", 2)]
    labels = failing_labels(failing)
    assert labels == {"fails:t": "2,10", "fails:u": "1"}
    assert failing_of({**labels, "rack": "r1"}) == tuple(sorted(failing))


def test_what_is_no_partition_is_left_out():
    labels = {"fails:t": "1,x,,-2,1234567890,3", "fails:": "5"}
    assert failing_of(labels) == (("", 5), ("t", 1), ("t", 3))


def test_as_many_are_named_as_a_member_can_carry():
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


def test_labels_of_users_fit_and_are_not_those_of_the_engine():
    assert problem_of("rack", "r1") is None
    assert problem_of("target", "7") is None
    assert "whole number" in (problem_of("target", "many") or "")
    assert "by the engine" in (problem_of("plans", "1") or "")
    assert "by the engine" in (problem_of("fails:t", "1") or "")
    for name, text in (("", ""), ("n" * 256, ""), ("n", "t" * 256)):
        assert "255 characters" in (problem_of(name, text) or "")
