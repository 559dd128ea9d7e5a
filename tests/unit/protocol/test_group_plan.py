"""The planner of a whole group: limits, drained members, targets, places, order."""

import json
from collections import Counter
from pathlib import Path

import plankit
import pytest

from kafka_marshal.protocol import group_plan
from kafka_marshal.protocol.group_plan import (
    GroupPlan,
    Move,
    PlanInput,
    PlanKey,
    PlanMember,
    Uncovered,
    plan,
)
from kafka_marshal.protocol.types import TopicPartition

VECTORS = Path(__file__).with_name("group_plan_vectors.json")


def key(number, topic="t"):
    return TopicPartition(topic, number)


def member(name, **others):
    return PlanMember(**{"name": name, "topics": ("t",), **others})


def held(*owners, topic="t", free=()):
    """Return keys by last owner, None if never owned; those in ``free`` are free."""
    return tuple(
        PlanKey(key(n, topic), owner, owner is None or n in free)
        for n, owner in enumerate(owners)
    )


def planned(keys, members, **others):
    return plan(PlanInput(keys=keys, members=tuple(members), **others))


def counts(result):
    return dict(Counter(result.owners.values()))


# --- Frozen ---


@pytest.mark.parametrize("name", sorted(json.loads(VECTORS.read_text())["plans"]))
def test_equal_inputs_have_equal_plans_under_one_version(name):
    """Other results need a new version: old members compute the old results."""
    found = json.loads(VECTORS.read_text())
    assert found["version"] == group_plan.PLANNER_VERSION
    vector = found["plans"][name]
    result = plan(plankit.from_object(vector["input"]))
    assert plankit.result_object(result) == vector["result"]


# --- Shares ---


def test_free_keys_are_shared():
    result = planned(held(*[None] * 5), [member("a"), member("b")])
    assert result.moves[0] == Move(key(0), None, "a")
    assert counts(result) == {"a": 3, "b": 2}
    assert not result.uncovered


def test_a_joining_member_gets_its_share_and_nothing_else_moves():
    result = planned(held(*"aaaabbbb"), [member("a"), member("b"), member("c")])
    assert [(each.source, each.to) for each in result.moves] == [("a", "c"), ("b", "c")]
    assert counts(result) == {"a": 3, "b": 3, "c": 2}


def test_a_free_key_returns_to_its_last_owner():
    result = planned(held(*"aabb", free={3}), [member("a"), member("b")])
    assert result.moves == (Move(key(3), None, "b"),)


def test_a_member_gets_keys_in_proportion_to_its_weight():
    result = planned(held(*[None] * 8), [member("a", weight=3), member("b")])
    assert counts(result) == {"a": 6, "b": 2}


def test_keys_beyond_all_limits_stay_uncovered():
    result = planned(held("a", "a", None), [member("a", limit=1)])
    assert result.uncovered == (
        Uncovered(key(1), "limits"),
        Uncovered(key(2), "limits"),
    )
    assert result.owners == {key(0): "a"}


def test_targets_are_kept_if_they_suffice_for_all_keys():
    members = [member("a", target=1), member("b")]
    assert counts(planned(held(*[None] * 6), members)) == {"a": 1, "b": 5}
    members = [member("a", target=1), member("b", target=1)]
    assert counts(planned(held(*[None] * 6), members)) == {"a": 3, "b": 3}


# --- Eligible members ---


def test_a_drained_member_gives_up_the_keys_that_others_can_take():
    members = [member("a", is_drained=True), member("b", limit=3)]
    result = planned(held(*"aaaa"), members)
    assert counts(result) == {"a": 1, "b": 3}
    assert planned(held(*"aa", free={1}), members).moves == (
        Move(key(0), "a", "b"),
        Move(key(1), None, "b"),
    )


def test_nothing_moves_if_all_members_are_drained():
    result = planned(held("a", None), [member("a", is_drained=True)])
    assert result == GroupPlan(
        owners={key(0): "a"}, moves=(), uncovered=(Uncovered(key(1), "no members"),)
    )


def test_a_cordoned_member_takes_no_key_and_keeps_its_share():
    members = [member("a", is_cordoned=True), member("b")]
    assert counts(planned(held("a", None, None, None), members)) == {"a": 1, "b": 3}
    assert counts(planned(held(*"aaaa"), members)) == {"a": 2, "b": 2}


def test_keys_go_only_to_subscribers_of_their_topic():
    keys = (*held(None, "b"), *held(None, None, topic="u"))
    result = planned(keys, [member("a"), member("b", topics=("u",))])
    assert counts(result) == {"a": 2, "b": 2}
    assert planned(held(None, topic="v"), [member("a")]).uncovered == (
        Uncovered(key(0, "v"), "topics"),
    )


def test_a_failing_member_loses_the_key_and_a_barred_one_does_not_get_it():
    members = [member("a"), member("b")]
    result = planned(held("a", "b"), members, failing=(("a", key(0)),))
    assert result.owners == {key(0): "b", key(1): "a"}
    result = planned(held("a", None), members, barred=(("b", key(1)),))
    assert result.owners == {key(0): "b", key(1): "a"}
    result = planned(held("a", "b"), members, barred=(("a", key(0)),))
    assert not result.moves
    pairs = (("a", key(0)), ("b", key(0)))
    result = planned(held(None), members, barred=pairs)
    assert result.uncovered == (Uncovered(key(0), "failing"),)
    result = planned(held("a", free={0}), [member("a")], barred=pairs)
    assert result.uncovered == (Uncovered(key(0), "failing"),)


def test_a_chain_of_moves_covers_a_key():
    """Only b can take u, and is full with a key that a can take."""
    members = [member("a"), member("b", topics=("t", "u"), limit=1)]
    keys = (*held("b"), *held(None, topic="u"))
    result = planned(keys, members)
    assert result.owners == {key(0): "a", key(0, "u"): "b"}


# --- Racks and hosts ---


def test_a_topic_is_spread_over_racks_then_hosts():
    members = [
        member("a", host="h1", rack="r1"),
        member("b", host="h1", rack="r1"),
        member("c", host="h2", rack="r1"),
        member("d", host="h3", rack="r2"),
    ]
    result = planned(held(None, None, None), members)
    assert set(result.owners.values()) == {"a", "c", "d"}


def test_the_topic_most_concentrated_in_a_rack_gives_up_keys():
    topics = ("t", "u")
    members = [
        member("a", topics=topics, rack="r1"),
        member("b", topics=topics, rack="r2"),
    ]
    keys = (*held(*"aaa"), *held("a", topic="u"))
    result = planned(keys, members)
    assert [each.key for each in result.moves] == [key(1), key(2)]


def test_uncovered_keys_are_chosen_by_name_alone():
    """Else the next plan, with keys in other racks, would leave out another key."""
    topics = ("t", "u")
    members = [
        member("a", topics=topics, rack="r1", limit=2),
        member("b", topics=topics, rack="r2", limit=1),
    ]
    keys = (*held("a", "a"), *held("a", "b", topic="u"))
    result = planned(keys, members)
    assert result.uncovered == (Uncovered(key(0, "u"), "limits"),)
    assert result.moves == ()


def test_racks_never_cause_a_move():
    members = [member("a", rack="r1"), member("b", rack="r2")]
    keys = (*held(*"aa"), *held(*"bb", topic="u"))
    assert not planned(
        keys, [member(m.name, rack=m.rack, topics=("t", "u")) for m in members]
    ).moves


# --- Whole plans ---


@pytest.mark.parametrize("kind", [plankit.uniform_group, plankit.mixed_group])
def test_a_plan_that_was_carried_out_is_followed_by_no_moves(kind):
    for seed in range(150):
        given = kind(plankit.chance_of(seed))
        first = plan(given)
        kept = tuple(PlanKey(k.key, first.owners.get(k.key)) for k in given.keys)
        again = plan(
            PlanInput(
                keys=kept,
                members=given.members,
                failing=given.failing,
                barred=given.barred,
            )
        )
        assert not again.moves
        assert again.owners == first.owners


def test_coverage_is_optimal_even_without_improvements(monkeypatch):
    monkeypatch.setattr(group_plan, "IMPROVEMENTS_MAX", 0)
    for seed in range(150):
        given = plankit.mixed_group(plankit.chance_of(seed))
        assert len(plan(given).uncovered) == plankit.optimum(given)[0]


def test_input_out_of_order_or_repeated_is_an_error():
    with pytest.raises(ValueError, match="t-0 is out of order or repeated"):
        planned(held(None)[::-1] * 2, [])
    with pytest.raises(ValueError, match="'a' is out of order"):
        planned((), [member("a"), member("a")])
