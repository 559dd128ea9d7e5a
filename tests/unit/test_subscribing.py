"""The settings of a consumer are checked before anything is looked up."""

import re

import pytest

from kafka_marshal.engine import Delivery
from kafka_marshal.engine.topics import TOPICS_MAX
from kafka_marshal.errors import ConfigurationError, LogUnreadable
from kafka_marshal.subscribing import Settings
from kafka_marshal.testing.node import Cluster


@pytest.fixture
def data():
    cluster = Cluster()
    for name, count in (("orders-a", 1), ("orders-b", 2), ("x-orders-a", 1)):
        cluster.fill(name, [0] * count)
    cluster.fill("__internal", [0])
    return cluster.kafka.data_log()


def settings(*topics, **changed):
    values = {
        "pattern": None,
        "delivery": Delivery.AT_LEAST_ONCE,
        "policy": "fair",
        "claims_max": 0,
        "auto_offset_reset": "earliest",
        "metadata_refresh_ms": 1_000,
        "max_handling_ms": None,
        "release_behind": True,
        "has_on_topics": False,
        **changed,
    }
    return Settings(topics, *values.values())


def subscribe(data, *topics, coordination="__marshal", **changed):
    return settings(*topics, **changed).subscription(
        "g", data, coordination_topic=coordination, timeout_ms=100
    )


@pytest.mark.parametrize(
    ("topics", "changed", "setting"),
    [
        pytest.param((), {}, "topics", id="neither"),
        pytest.param(("t",), {"pattern": "t"}, "topics", id="both"),
        pytest.param(("a b",), {}, "topics", id="bad-name"),
        pytest.param(
            tuple(f"t{n}" for n in range(TOPICS_MAX + 1)), {}, "topics", id="many"
        ),
        pytest.param(("t",), {"claims_max": -1}, "claims_max", id="claims"),
        pytest.param(("t",), {"max_handling_ms": -1}, "max_handling_ms", id="handling"),
        pytest.param(
            ("t",), {"metadata_refresh_ms": 0}, "metadata_refresh_ms", id="refresh"
        ),
        pytest.param(
            ("t",), {"isolation_level": "dirty"}, "isolation_level", id="isolation"
        ),
        pytest.param(
            ("t",), {"auto_offset_reset": "late"}, "auto_offset_reset", id="reset"
        ),
        pytest.param((), {"pattern": "("}, "pattern", id="pattern"),
        pytest.param((), {"pattern": 7}, "pattern", id="no-pattern"),
        pytest.param((), {"pattern": re.compile(b"t")}, "pattern", id="bytes"),
        pytest.param(
            (), {"pattern": re.compile("t", re.VERBOSE)}, "pattern", id="verbose"
        ),
        pytest.param((), {"pattern": "(a{1,1000}){1,1000}"}, "pattern", id="large"),
        pytest.param((), {"pattern": r"(\w{200}|\pL{200}){4}"}, "pattern", id="huge"),
        pytest.param(("t",), {"delivery": "exactly"}, "delivery", id="delivery"),
        pytest.param(("t",), {"delivery": None}, "delivery", id="no-delivery"),
    ],
)
def test_impossible_settings_are_refused(topics, changed, setting):
    with pytest.raises(ConfigurationError) as caught:
        settings(*topics, **changed)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("changed", "setting"),
    [
        pytest.param({"policy": "best"}, "policy", id="policy"),
        pytest.param({"has_on_topics": True}, "on_topics", id="on-topics"),
    ],
)
def test_settings_that_the_subscription_checks_are_refused(data, changed, setting):
    with pytest.raises(ConfigurationError) as caught:
        subscribe(data, "orders-a", **changed)
    assert caught.value.setting == setting


def test_a_missing_topic_is_named_in_the_error(data):
    with pytest.raises(LogUnreadable, match="'orders-z' does not exist"):
        subscribe(data, "orders-a", "orders-z")


def test_zero_is_without_limit_everywhere(data):
    """Acceptance D14."""
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


@pytest.mark.timeout(60)
def test_matching_takes_linear_time_whatever_the_pattern():
    cluster = Cluster()
    for name in ("a" * 249, "a" * 248 + "X"):
        cluster.fill(name, [0])
    sub = subscribe(cluster.kafka.data_log(), pattern=".*" * 40 + "X")
    assert list(sub.topics) == ["a" * 248 + "X"]


@pytest.mark.parametrize("pattern", [r"(a)\1", "a(?=b)", "(?<!a)b", "(?P<n>a)(?P=n)"])
def test_a_pattern_without_linear_time_is_refused(pattern):
    with pytest.raises(ConfigurationError, match="syntax of RE2") as caught:
        settings(pattern=pattern)
    assert caught.value.setting == "pattern"


def test_flags_of_a_compiled_pattern_count_here_and_over_a_sidecar(data):
    pattern = re.compile(r"ORDERS-.*", re.IGNORECASE | re.ASCII)
    assert list(subscribe(data, pattern=pattern).topics) == ["orders-a", "orders-b"]
    text = settings(pattern=pattern).wants().pattern
    assert list(subscribe(data, pattern=text).topics) == ["orders-a", "orders-b"]


@pytest.mark.parametrize("delivery", Delivery)
def test_a_guarantee_may_be_named_by_its_word(data, delivery):
    assert subscribe(data, "orders-a", delivery=delivery.value).delivery is delivery


def test_the_coordination_topic_is_not_a_data_topic(data):
    data_topics = ("orders-a", "orders-b")
    with pytest.raises(ConfigurationError, match="marshal log tail") as caught:
        subscribe(data, *data_topics, coordination="orders-b")
    assert caught.value.setting == "topics"
    assert subscribe(data, "__internal").topics.keys() == {"__internal"}


def test_internal_topics_never_match(data):
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
    assert subscribe(data, "orders-a", policy="topic", has_on_topics=True).counts_topics
    mine = type("Mine", (), {"counts_topics": True, "__call__": lambda *_: None})
    assert subscribe(data, "orders-a", policy=mine, has_on_topics=True).counts_topics
