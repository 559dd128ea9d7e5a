"""A subscription has the topics that exist when a consumer opens."""

import re

import pytest

from kafka_marshal.config import ConsumerConfig
from kafka_marshal.errors import ConfigurationError, LogUnreadable
from kafka_marshal.subscribing import new_subscription
from simulator.node import Cluster


@pytest.fixture
def data():
    cluster = Cluster()
    for name, count in (("orders-a", 1), ("orders-b", 2), ("x-orders-a", 1)):
        cluster.fill(name, [0] * count)
    cluster.fill("__internal", [0])
    return cluster.kafka.data_log()


def subscribe(data, *topics, coordination="__marshal", **changed):
    return new_subscription(
        ConsumerConfig(topics=topics, **changed),
        data,
        group_id="g",
        coordination_topic=coordination,
        timeout_ms=100,
    )


def test_an_unknown_policy_is_refused(data):
    with pytest.raises(ConfigurationError) as caught:
        subscribe(data, "orders-a", policy="best")
    assert caught.value.setting == "policy"


def test_a_missing_topic_is_named_in_the_error(data):
    with pytest.raises(LogUnreadable, match="'orders-z' does not exist"):
        subscribe(data, "orders-a", "orders-z")


def test_zero_means_no_limit(data):
    sub = subscribe(data, "orders-a", max_handling_ms=0)
    assert sub.handling_limit_ms(1_000) == 0
    assert sub.claims_max == 0
    assert subscribe(data, "orders-a").handling_limit_ms(1_000) == 1_000
    limited = subscribe(data, "orders-a", max_handling_ms=5)
    assert limited.handling_limit_ms(1_000) == 5


@pytest.mark.parametrize("pattern", [r"orders-.*", re.compile(r"orders-[a-z]")])
def test_a_pattern_matches_whole_names(data, pattern):
    sub = subscribe(data, pattern=pattern)
    assert list(sub.topics) == ["orders-a", "orders-b"]


def test_matching_takes_linear_time_whatever_the_pattern():
    cluster = Cluster()
    for name in ("a" * 249, "a" * 248 + "X"):
        cluster.fill(name, [0])
    sub = subscribe(cluster.kafka.data_log(), pattern=".*" * 40 + "X")
    assert list(sub.topics) == ["a" * 248 + "X"]


def test_the_coordination_topic_is_not_a_data_topic(data):
    data_topics = ("orders-a", "orders-b")
    with pytest.raises(ConfigurationError, match="marshal log tail") as caught:
        subscribe(data, *data_topics, coordination="orders-b")
    assert caught.value.setting == "topics"
    assert subscribe(data, "__internal").topics.keys() == {"__internal"}


def test_a_pattern_never_matches_internal_topics(data):
    assert set(subscribe(data, pattern=".*").topics) == {
        "orders-a",
        "orders-b",
        "x-orders-a",
    }
    other = subscribe(data, pattern=".*", coordination="orders-a")
    assert "orders-a" not in other.topics


def test_a_pattern_may_match_nothing(data):
    assert subscribe(data, pattern="nothing").topics == {}


def test_a_policy_may_count_whole_topics(data):
    mine = type("Mine", (), {"counts_topics": True, "__call__": lambda *_: None})
    for policy in ("topic", mine):
        assert subscribe(data, "orders-a", policy=policy).counts_topics
