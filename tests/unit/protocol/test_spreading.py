"""A group's keys are spread over racks and hosts, as an admin requests."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import plankit
import pytest

from kafka_marshal.protocol import spreading
from kafka_marshal.protocol.group_plan import (
    PLANNER_VERSION,
    Move,
    PlanInput,
    PlanKey,
    PlanMember,
    plan,
    unit_cost,
)
from kafka_marshal.protocol.spreading import spread
from kafka_marshal.protocol.types import TopicPartition

VECTORS = json.loads(Path(__file__).with_name("spreading_vectors.json").read_text())


def key(number, topic="t"):
    return TopicPartition(topic, number)


def member(name, **others):
    return PlanMember(**{"name": name, "topics": ("t", "u"), **others})


def held(*owners, topic="t"):
    return tuple(PlanKey(key(n, topic), owner) for n, owner in enumerate(owners))


def counts(result, members, topic, place):
    """Return how many keys of a topic lie in each place."""
    places = {each.name: place(each) for each in members}
    found = Counter()
    for each, name in result.owners.items():
        if each.topic == topic:
            found[places[name]] += 1
    return dict(found)


@pytest.mark.parametrize("name", sorted(VECTORS["plans"]))
def test_results_equal_the_vectors_of_this_planner_version(name):
    """Other results need a new version: `plan verify` computes old plans again."""
    assert VECTORS["version"] == PLANNER_VERSION
    vector = VECTORS["plans"][name]
    result = spread(plankit.from_object(vector["input"]))
    assert plankit.result_object(result) == vector["result"]


FOUR = (
    member("a", rack="r1", host="h1"),
    member("b", rack="r1", host="h2"),
    member("c", rack="r2", host="h3"),
    member("d", rack="r2", host="h4"),
)


def test_topics_are_spread_over_racks_and_hosts_by_few_moves():
    """Before, members have equally many keys, and each topic lies in one rack."""
    keys = (*held("a", "a", "b", "b"), *held("c", "c", "d", "d", topic="u"))
    given = PlanInput(keys=keys, members=FOUR)
    assert plan(given).moves == ()
    result = spread(given)
    assert len(result.moves) == 4
    for topic in "tu":
        racks = counts(result, FOUR, topic, lambda each: each.rack)
        assert racks == {"r1": 2, "r2": 2}
        hosts = counts(result, FOUR, topic, lambda each: each.host)
        assert set(hosts.values()) == {1}
    assert set(Counter(result.owners.values()).values()) == {2}


def test_a_group_that_is_already_spread_has_no_moves():
    keys = (*held("a", "b", "c", "d"), *held("d", "c", "b", "a", topic="u"))
    given = PlanInput(keys=keys, members=FOUR)
    assert spread(given).moves == ()


def test_without_racks_and_hosts_the_result_is_the_plan():
    members = tuple(member(name) for name in "abc")
    given = PlanInput(keys=held("a", "a", "a", None), members=members)
    assert spread(given) == plan(given)


def test_a_free_key_goes_back_to_its_last_owner():
    keys = (PlanKey(key(0), "a", is_free=True), PlanKey(key(1), "b"))
    result = spread(PlanInput(keys=keys, members=FOUR[:2]))
    assert result.moves == (Move(key(0), None, "a"),)


def test_a_key_that_no_member_can_have_is_reported_as_uncovered():
    given = PlanInput(keys=held(None, topic="x"), members=FOUR)
    assert [each.reason for each in spread(given).uncovered] == ["topics"]


def test_spreading_stops_at_its_limit_of_arcs(monkeypatch):
    monkeypatch.setattr(spreading, "ARCS_MAX", -1)
    keys = (*held("a", "a", "b", "b"), *held("c", "c", "d", "d", topic="u"))
    given = PlanInput(keys=keys, members=FOUR)
    assert spread(given).moves == ()


def quality(given, owners, base):
    """Return the figures that spreading minimizes, the most important first."""
    members = {each.name: each for each in given.members}
    load = Counter(owners.values())
    level = sum(
        unit_cost(members[name], n + 1)
        for name, count in load.items()
        for n in range(count)
    )
    racks, hosts = Counter(), Counter()
    for each, name in owners.items():
        racks[each.topic, members[name].rack] += 1
        hosts[each.topic, members[name].rack, members[name].host] += 1
    moves = sum(
        each.owner in members and owners[each.key] != each.owner
        for each in given.keys
        if each.key in owners
    )
    squares = [sum(n * n for n in found.values()) for found in (racks, hosts)]
    return (level, *squares, moves)


def best(given, base):
    """Return the best quality of all possible assignments."""
    pairs = {each for _, each in (*given.failing, *given.barred)}
    takers = [m for m in given.members if not (m.is_drained or m.is_cordoned)]
    names = {m.name for m in takers}
    places, choices = [], []
    for each in given.keys:
        owner = base.owners.get(each.key)
        if owner is None:
            continue
        places.append(each.key)
        is_fixed = owner not in names or each.key in pairs
        able = [m.name for m in takers if each.key.topic in m.topics]
        choices.append([owner] if is_fixed else able)
    limits = {m.name: m.limit for m in given.members if m.limit is not None}
    found = None
    for names_of in itertools.product(*choices):
        load = Counter(names_of)
        # A drained or cordoned member may keep more keys than its limit.
        if any(load[name] > most for name, most in limits.items() if name in names):
            continue
        this = quality(given, dict(zip(places, names_of, strict=True)), base)
        found = this if found is None else min(found, this)
    return found


def small(chance):
    """Return a random group with few possible assignments, and its plan."""
    while True:
        given = plankit.mixed_group(chance)
        base = plan(given)
        if len(given.members) ** len(base.owners) <= 20_000:
            return given, base


@pytest.mark.parametrize("seed", range(40))
def test_small_groups_have_the_best_spread(seed):
    """By brute force: constraints and counts first, then racks, hosts, moves."""
    chance = random.Random(seed)
    for _ in range(5):
        given, base = small(chance)
        result = spread(given)
        assert result.owners.keys() == base.owners.keys()
        assert result.uncovered == base.uncovered
        for each in given.keys:
            if each.key in result.owners:
                members = {m.name: m for m in given.members}
                owner = members[result.owners[each.key]]
                assert plankit.may_have(given, each, owner)
        if base.owners:
            assert quality(given, result.owners, base) == best(given, base)
        else:
            assert not result.moves
        after = tuple(
            PlanKey(each.key, result.owners.get(each.key)) for each in given.keys
        )
        settled = PlanInput(
            keys=after,
            members=given.members,
            failing=given.failing,
            barred=given.barred,
        )
        kept = {move.key for move in plan(settled).moves}
        assert not kept & result.owners.keys()
