"""Subscriptions that clients of a sidecar share, and settings that must be equal."""

import pytest
from enginekit import H, world
from sidecarkit import Local, Machine, having, run_until, sizes

from kafka_marshal.errors import ConfigurationError, CoordinationError
from kafka_marshal.remote import api


@pytest.fixture
def cluster():
    return world(partitions=2, records=[5] * 8)


@pytest.fixture
def machine(cluster):
    return Machine(cluster)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("delivery", "amo"),
        ("policy", "greedy"),
        ("auto_offset_reset", "latest"),
        ("metadata_refresh_ms", 1_000),
        ("release_behind", False),
    ],
)
def test_clients_of_the_same_topics_need_equal_settings(machine, setting, value):
    having(machine)
    b = Local(machine, "b", pid=2)
    with pytest.raises(
        ConfigurationError, match=f"{setting} is .* in this request"
    ) as caught:
        b.subscribe(**{setting: value})
    assert caught.value.setting == setting
    assert "(a)" in str(caught.value)


def test_subscriptions_with_overlapping_topics_need_equal_topics(cluster, machine):
    cluster.fill("u", [1])
    having(machine)
    b = Local(machine, "b", pid=2)
    with pytest.raises(ConfigurationError, match="topics is") as caught:
        b.subscribe("t", "u")
    assert caught.value.setting == "topics"
    b.subscribe("u")
    run_until(cluster, [b], lambda: len(b.valid) == 1, H)


def test_clients_with_the_same_pattern_share_a_subscription(cluster, machine):
    cluster.fill("u", [1, 1])
    a, b = Local(machine, "a", pid=1), Local(machine, "b", pid=2)
    for client in (a, b):
        client.service.subscribe(
            client.who, "s", spec=api.SubscriptionSpec(pattern="[tu]")
        )
    run_until(cluster, [a, b], lambda: sizes(a, b) == [5, 5], 2 * H)
    c = Local(machine, "c", pid=3)
    with pytest.raises(ConfigurationError, match="topics"):
        c.subscribe("t")


def test_a_client_has_one_subscription_per_topic(machine):
    a = having(machine)
    with pytest.raises(Exception, match="consumes these topics already"):
        a.subscribe(name="other")
    a.subscribe()
    with pytest.raises(ConfigurationError, match="consumes other topics"):
        a.subscribe("u")


def test_invalid_subscriptions_are_refused(machine):
    a = Local(machine, "a", pid=1)
    with pytest.raises(ConfigurationError, match="fair"):
        a.subscribe(policy="fairr")
    with pytest.raises(CoordinationError, match="does not exist"):
        a.subscribe("nowhere")
    with pytest.raises(ConfigurationError, match="is the coordination topic"):
        a.subscribe("__marshal")
    with pytest.raises(ConfigurationError, match="name must have"):
        a.subscribe(name="")
