"""What clients of one sidecar must agree on."""

import pytest
from enginekit import (
    H,
    world,
)
from sidecarkit import Local, Machine, having, run_until, sizes

from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
)
from kafka_marshal.remote import api


@pytest.fixture
def cluster():
    return world(partitions=2, records=[5] * 8)


@pytest.fixture
def machine(cluster):
    return Machine(cluster)


# --- What clients must agree on ---


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
def test_clients_of_the_same_topics_must_agree(machine, setting, value):
    having(machine)
    b = Local(machine, "b", pid=2)
    with pytest.raises(ConfigurationError, match=f"{setting} is .* here") as caught:
        b.subscribe(**{setting: value})
    assert caught.value.setting == setting
    assert "(a)" in str(caught.value)


def test_topics_that_overlap_must_be_the_same(cluster, machine):
    cluster.fill("u", [1])
    having(machine)
    b = Local(machine, "b", pid=2)
    with pytest.raises(ConfigurationError, match="topics is") as caught:
        b.subscribe("t", "u")
    assert caught.value.setting == "topics"
    b.subscribe("u")
    run_until(cluster, [b], lambda: len(b.valid) == 1, H)


def test_a_pattern_is_shared_by_those_who_give_the_same(cluster, machine):
    cluster.fill("u", [1, 1])
    a, b = Local(machine, "a", pid=1), Local(machine, "b", pid=2)
    for client in (a, b):
        client.hub.subscribe(client.who, "s", wants=api.Wants(pattern="[tu]"))
    run_until(cluster, [a, b], lambda: sizes(a, b) == [5, 5], 2 * H)
    c = Local(machine, "c", pid=3)
    with pytest.raises(ConfigurationError, match="topics"):
        c.subscribe("t")


def test_a_client_consumes_topics_once(machine):
    a = having(machine)
    with pytest.raises(Exception, match="consumes these topics already"):
        a.subscribe(name="other")
    a.subscribe()
    with pytest.raises(ConfigurationError, match="consumes other topics"):
        a.subscribe("u")


def test_what_cannot_be_consumed_is_refused(machine):
    a = Local(machine, "a", pid=1)
    with pytest.raises(ConfigurationError, match="fair"):
        a.subscribe(policy="fairr")
    with pytest.raises(CoordinationError, match="does not exist"):
        a.subscribe("nowhere")
    with pytest.raises(ConfigurationError, match="is the coordination topic"):
        a.subscribe("__marshal")
    with pytest.raises(ConfigurationError, match="name must have"):
        a.subscribe(name="")


# --- Where to start, and who else there is ---


def test_what_has_no_position_starts_where_it_is_told(cluster, machine):
    start = api.Start(topic="t", partition=2, offset=3)
    client = having(machine, starts=(start,))
    told = {key.partition: at for key, at in client.positions.items()}
    assert (told[2], told[1]) == (3, 0)


def takers(client):
    return client.hub.beat(client.who, api.Beat()).takers


def test_whoever_beats_learns_whether_others_could_take_its_topics(cluster, machine):
    a = having(machine)
    assert takers(a) == ()
    b = Local(machine, "b", pid=2)
    b.subscribe(claims_max=2)
    assert takers(a) == ("t",)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [6, 2], 3 * H)
    assert takers(a) == ()
    assert takers(b) == ("t",)


def test_another_host_could_take_them_too(cluster, machine):
    a = having(machine)
    other = Machine(cluster, "host-2")
    b = Local(other, "b", pid=2)
    b.subscribe()
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], 6 * H)
    assert takers(a) == ("t",)
