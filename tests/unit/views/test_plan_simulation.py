"""Predicted owners after kills, joins, drains, limits and new partitions."""

from collections import Counter

import msgspec
import pytest
from logkit import (
    START_MS,
    H,
    Log,
    beat,
    claim,
    direct,
    growth,
    member,
    pause,
    release,
    schedule,
    settings,
)

from kafka_marshal import Key, TopicPartition, World
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.group_plan import Uncovered
from kafka_marshal.protocol.growths import awaited_source
from kafka_marshal.protocol.types import PARTITION_MAX
from kafka_marshal.views import plan_simulation
from kafka_marshal.views.plan_simulation import (
    Changes,
    NewMember,
    closed_topics,
    group_topics,
    simulate,
    uncovered_now,
)


def announced(name, **others):
    fields = {"capacity": 0} | others
    return msgspec.structs.replace(member(name), **fields)


def group(*owners, members="abc", **others):
    """Return a world of members, with keys by owner; None = free."""
    log = Log()
    for name in members:
        log.append(announced(name, **others.get(name, {})))
    for number, owner in enumerate(owners):
        key = Key("g", "t", number)
        epoch = log.claimed(owner or "z", key=key)
        if owner is None:
            log.append(release(epoch, client="z", key=key))
    return World([log.state], {0: 0})


def place(number, topic="t"):
    return TopicPartition(topic, number)


def counts(found):
    return dict(Counter(found.owners.values()))


def test_a_balanced_group_has_no_moves():
    found = simulate(group(*"abc"), "g", changes=Changes())
    assert (found.moves, found.waves, found.is_settled) == ((), 0, True)
    assert found.owners == found.before


def test_keys_of_a_killed_member_move_after_two_intervals():
    found = simulate(group(*"aabbcc"), "g", changes=Changes(kill=("c",)))
    assert counts(found) == {"a": 3, "b": 3}
    assert {(m.source, m.gap_ms, m.wave) for m in found.moves} == {("c", 2 * H, 1)}
    assert found.members == {"a": "host", "b": "host", "c": "host"}
    assert found.before[place(5)] == "c"


def test_a_kill_and_a_join_are_combined():
    changes = Changes(kill=("c",), add=(NewMember(name="d", host="h2"),))
    found = simulate(group(*"aabbcc"), "g", changes=changes)
    assert counts(found) == {"a": 2, "b": 2, "d": 2}
    assert {move.to for move in found.moves} == {"d"}
    assert found.members["d"] == "h2"


def test_a_joining_member_gets_a_share_up_to_its_limit():
    changes = Changes(add=(NewMember(name="d", limit=1),))
    found = simulate(group(*"aabbcc"), "g", changes=changes)
    assert counts(found)["d"] == 1
    assert [move.gap_ms for move in found.moves] == [None]


def test_a_drained_client_and_host_release_all_partitions():
    world = group(*"aabbcc", b={"host": "h2"}, c={"host": "h2"})
    found = simulate(world, "g", changes=Changes(drain=("b",), drain_hosts=("h2",)))
    assert counts(found) == {"a": 6}
    assert {move.gap_ms for move in found.moves} == {None}


def directed_group(*owners, policy=None, **directive):
    """Return a world of members ``abc`` and a directive."""
    log = Log(level=2)
    if policy:
        log.append(settings(policy=policy))
    log.append(direct(until=START_MS + 9 * H, **directive))
    for name in "abc":
        log.append(announced(name))
    for number, owner in enumerate(owners):
        log.claimed(owner, key=Key("g", "t", number))
    return World([log.state], {0: 0})


@pytest.mark.parametrize("policy", [None, "planner"])
@pytest.mark.parametrize("action", ["drain", "cordon"])
def test_a_client_with_a_drain_or_cordon_takes_no_partitions(policy, action):
    world = directed_group(*"bbcc", client="a", action=action, policy=policy)
    found = simulate(world, "g", changes=Changes(kill=("c",)))
    assert counts(found) == {"b": 4}
    nobody = simulate(world, "g", changes=Changes(kill=("b", "c")))
    assert {each.reason for each in nobody.uncovered} == {"no members"}


def test_topics_whose_members_are_all_drained_are_closed():
    world = directed_group(*"abc", host="host")
    assert closed_topics(world, "g") == {"t": "no members"}


def test_uncovered_keys_have_a_reason():
    world = group(*"ab", members="ab")
    found = simulate(world, "g", changes=Changes(kill=("b",), limits={"a": 1}))
    assert found.uncovered == (Uncovered(place(1), "limits"),)
    found = simulate(world, "g", changes=Changes(kill=("a", "b")))
    assert {each.reason for each in found.uncovered} == {"no members"}
    world = group(*"ab", members="ab", b={"topics": ("u",)})
    found = simulate(world, "g", changes=Changes(kill=("a",)))
    assert found.uncovered == (Uncovered(place(0), "topics"),)


@pytest.mark.parametrize("policy", ["fair", "planner"])
def test_drained_members_release_and_cordoned_members_keep_keys(policy):
    log = Log(level=2)
    log.append(settings(policy=policy))
    for name in "abc":
        log.append(announced(name))
    for number, owner in enumerate("aaabbc"):
        log.claimed(owner, key=Key("g", "t", number))
    log.append(direct(client="a"))
    log.append(direct(client="c", op=b"c" * 16, action="cordon"))
    world = World([log.state], {0: 0})
    found = simulate(world, "g", changes=Changes())
    assert counts(found) == {"b": 5, "c": 1}
    assert [(m.source, m.to) for m in found.moves] == [("a", "b")] * 3
    assert found.terms["a"].is_drained
    assert found.terms["c"].is_cordoned
    found = simulate(world, "g", changes=Changes(kill=("b",)))
    assert {each.reason for each in found.uncovered} == {"no members"}


def test_shares_follow_weights():
    """A sidecar with four clients keeps four keys when one with one client joins."""
    world = group(*"aaaa", members="ab", a={"labels": {"weight": "4"}})
    found = simulate(world, "g", changes=Changes())
    assert counts(found) == {"a": 4}
    assert [found.terms[name].weight for name in "ab"] == [4, 1]


def test_a_planner_assigns_no_partition_that_a_member_fails():
    world = planned_group(*"aabbcc", a={"labels": {"fails:t": "4,5"}})
    found = simulate(world, "g", changes=Changes(kill=("c",)))
    assert counts(found) == {"a": 3, "b": 3}
    assert {found.owners[place(number)] for number in (4, 5)} == {"b"}


def test_a_claim_far_above_the_others_adds_no_partitions():
    log = Log()
    log.append(announced("a"))
    for number in (0, 2, PARTITION_MAX):
        log.claimed("a", key=Key("g", "t", number))
    found = simulate(World([log.state], {0: 0}), "g", changes=Changes())
    assert found.owners == {place(0): "a", place(1): "a", place(2): "a"}


def test_paused_or_reserved_keys_are_not_uncovered():
    world = group(None, members="")
    assert closed_topics(world, "g") == {"t": "no members"}
    assert uncovered_now(world, "g", partition_counts={"t": 2}) == (
        Uncovered(place(0), "no members"),
        Uncovered(place(1), "no members"),
    )
    log = Log()
    epoch = log.claimed("z", key=Key("g", "t", 0))
    log.append(release(epoch, client="z", key=Key("g", "t", 0), successor="b"))
    assert (
        uncovered_now(World([log.state], {0: 0}), "g", partition_counts={"t": 1}) == ()
    )
    log.append(pause(START_MS + 9 * H))
    later = World([log.state], {0: H})
    assert uncovered_now(later, "g", partition_counts={"t": 2}) == ()


@pytest.mark.parametrize("begin", [0, START_MS + H], ids=["lasting", "due"])
@pytest.mark.parametrize("policy", ["fair", "planner"])
def test_partitions_in_a_pause_of_some_topics_count_in_no_share(policy, begin):
    log = Log(level=2)
    log.append(settings(policy=policy))
    for name in "ab":
        log.append(announced(name, topics=("t", "u")))
    for number, owner in enumerate("aabbb"):
        log.claimed(owner, key=Key("g", "t", number))
    scope = {"t": (2, 3, 4), "u": ()}
    log.append(schedule(begin, START_MS + 9 * H, scope=scope))
    found = simulate(
        World([log.state], {0: H}),
        "g",
        changes=Changes(partitions={"t": 6, "u": 2}),
        partition_counts={"t": 5, "u": 1},
    )
    # Of the partitions that are not paused, a new one is free, and b holds none.
    assert found.before == {place(0): "a", place(1): "a"}
    assert counts(found) == {"a": 2, "b": 1}
    ended = simulate(World([log.state], {0: 10 * H}), "g", changes=Changes())
    assert len(ended.before) == 5


def test_new_partitions_are_shared_among_members():
    found = simulate(group(*"abc"), "g", changes=Changes(partitions={"t": 9}))
    assert counts(found) == {"a": 3, "b": 3, "c": 3}
    found = simulate(group(*"abc"), "g", changes=Changes(), partition_counts={"t": 6})
    assert counts(found) == {"a": 2, "b": 2, "c": 2}


def test_keys_of_stale_owners_count_as_free():
    log = Log()
    for number, name in enumerate("az"):
        log.append(claim(client=name, key=Key("g", "t", number)), at=START_MS)
    log.append(announced("a"), at=START_MS + 3 * H)
    found = simulate(World([log.state], {0: 0}), "g", changes=Changes())
    assert found.before == {place(0): None, place(1): None}
    assert counts(found) == {"a": 2}


def test_a_released_key_is_assigned():
    found = simulate(group("a", "b", "c", None), "g", changes=Changes())
    assert [(m.key, m.source) for m in found.moves] == [(place(3), None)]
    assert found.is_settled


def test_members_are_the_latest_incarnations_of_staying_clients():
    log = Log()
    log.append(announced("a", incarnation=b"1" * 16, host="old"))
    log.append(announced("a", host="new"))
    log.append(announced("b", draining=True))
    found = simulate(World([log.state], {0: 0}), "g", changes=Changes())
    assert found.members == {"a": "new"}


def test_topics_of_a_group_are_those_of_members_and_claims():
    world = group(*"ab", members="ab", b={"topics": ("u",)})
    assert group_topics(world, "g") == {"t", "u"}


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        (Changes(kill=("x",)), "kill"),
        (Changes(kill=("a", "a")), "kill"),
        (Changes(drain=("x",)), "drain"),
        (Changes(drain_hosts=("x",)), "drain_hosts"),
        (Changes(limits={"x": 1}), "limits"),
        (Changes(add=(NewMember(name="a"),)), "add"),
        (Changes(partitions={"x": 1}), "partitions"),
        (Changes(partitions={"t": 1}), "partitions"),
        (Changes(partitions={"t": 10**12}), "partitions"),
    ],
)
def test_invalid_changes_are_refused_with_their_setting(changes, setting):
    with pytest.raises(ConfigurationError) as caught:
        simulate(group(*"abc"), "g", changes=changes)
    assert caught.value.setting == setting


def planned_group(*owners, **others):
    """Return a world of a group with policy ``planner``."""
    log = Log(level=2)
    log.append(settings(policy="planner"))
    for name in "abc":
        log.append(announced(name, **others.get(name, {})))
    for number, owner in enumerate(owners):
        log.claimed(owner, key=Key("g", "t", number))
    return World([log.state], {0: 0})


def test_a_group_with_policy_planner_moves_in_one_wave():
    changes = Changes(kill=("c",), add=(NewMember(name="d"),))
    found = simulate(planned_group(*"aabbcc"), "g", changes=changes)
    assert counts(found) == {"a": 2, "b": 2, "d": 2}
    assert {(m.source, m.to, m.gap_ms) for m in found.moves} == {("c", "d", 2 * H)}
    assert (found.policy, found.waves, found.is_settled) == ("planner", 1, True)
    still = simulate(planned_group(*"aabbcc"), "g", changes=Changes())
    assert (still.moves, still.waves, still.policy) == ((), 0, "planner")


def test_a_plan_limits_a_member_to_its_announced_target():
    world = planned_group(*"aabbcc", c={"labels": {"target": "1", "rack": "r"}})
    found = simulate(world, "g", changes=Changes())
    assert counts(found)["c"] == 1
    assert [move.source for move in found.moves] == ["c"]


@pytest.mark.parametrize("policy", ["fair", "planner"])
@pytest.mark.parametrize("position", [None, 6, 7])
def test_a_new_partition_is_claimed_once_its_source_has_passed_the_growth(
    policy, position
):
    log = Log(level=2)
    log.append(settings(policy=policy))
    log.append(announced("a"))
    epoch = log.claimed("a", key=Key("g", "t", 0))
    if position is not None:
        log.append(beat(epoch, position, key=Key("g", "t", 0), client="a"))
    log.append(growth(2, 1))
    log.append(growth(2, 1, ends=(7,)))
    found = simulate(
        World([log.state], {0: 0}), "g", changes=Changes(), partition_counts={"t": 2}
    )
    owned = [place(0), place(1)] if position == 7 else [place(0)]
    assert (sorted(found.owners), found.is_settled) == (owned, True)
    assert not found.uncovered


def test_each_partition_is_checked_for_a_growth_once(monkeypatch):
    log = Log(level=2)
    for name in "abc":
        log.append(announced(name))
    log.append(growth(4, 2))
    checked = []

    def awaited(growths, key, **rest):
        checked.append(key.partition)
        return awaited_source(growths, key, **rest)

    monkeypatch.setattr(plan_simulation, "awaited_source", awaited)
    world = World([log.state], {0: 0})
    found = simulate(world, "g", changes=Changes(), partition_counts={"t": 4})
    assert sorted(checked) == [0, 1, 2, 3]
    assert sorted(found.owners) == [place(0), place(1)]
