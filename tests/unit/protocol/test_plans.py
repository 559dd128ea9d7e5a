"""The planner's input, as read from the log, and Plans made of its result."""

import msgspec
import pytest
from logkit import (
    OP,
    H,
    Log,
    claim,
    direct,
    member,
    offer,
    planned,
    ready,
    release,
    schedule,
    settings,
)

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol import plans
from kafka_marshal.protocol.codec import FRAME_BYTES_MAX, encode
from kafka_marshal.protocol.group_plan import PlanInput, PlanKey, plan
from kafka_marshal.protocol.hashing import coordinating_partition
from kafka_marshal.protocol.plans import (
    NO_PLAN,
    Reading,
    digest_of,
    entries_of,
    guessed_counts,
    is_reserved,
    situation_of,
    slices_of,
    standing_of,
    turn_of,
    version_of,
)
from kafka_marshal.protocol.types import PARTITION_MAX, Key, TopicPartition

T0, T1, T2 = (TopicPartition("t", n) for n in range(3))
FAR = 2**62
LONG_VECTOR = ((FAR, FAR),) * 8


def named(number):
    return Key("g", "t", number)


def reading(log, *, after=0, counts=None, k=1):
    worlds = (log.state,) * k
    return Reading(
        group_id="g",
        worlds=worlds,
        elapsed_ms=(after,) * k,
        counts={"t": 3} if counts is None else counts,
        partition_of=lambda key: coordinating_partition(
            key.topic, key.partition, partition_count=1
        ),
    )


def seen(log, **rest):
    found = reading(log, **rest)
    return situation_of(found, found.members())


def keys(log, **rest):
    return {row.key: row for row in seen(log, **rest).given.keys}


def group(*names, **labels):
    """Return a log with live members."""
    log = Log(level=2)
    for name in names:
        log.append(member(name, labels=labels, capacity=0))
    return log


# --- the content of a Plan


def test_a_plan_names_members_for_keys():
    log = group("c1")
    log.append(
        planned(0, ("c2", 0, (0, 2)), ("c3", 1, (1,)), topics=(("t", 3), ("u", 2)))
    )
    standing = standing_of(log.state.soft.plans["g"])
    assert standing.entries == {T0: "c2", T2: "c2", TopicPartition("u", 1): "c3"}
    assert standing.counts == {"t": 3, "u": 2}
    assert standing.vector == ((0, 0),)


def test_topic_numbers_count_over_all_slices_and_unknown_ones_are_skipped():
    log = group("c1")
    log.append(planned(0, ("c2", 1, (0,)), count=2))
    assert standing_of(log.state.soft.plans["g"]) == NO_PLAN
    log.append(planned(1, ("c3", 9, (1,)), count=2, number=1, topics=(("u", 2),)))
    standing = standing_of(log.state.soft.plans["g"])
    assert standing.entries == {TopicPartition("u", 0): "c2"}
    assert standing_of(None) == NO_PLAN


# --- members


def test_a_member_silent_for_over_an_interval_is_not_live():
    log = group("c1", "c2")
    log.append(member("c1", seq=1), after=H)
    assert list(reading(log).members()) == ["c1", "c2"]
    assert list(reading(log, after=1).members()) == ["c1"]


def test_a_draining_member_is_not_live():
    log = group("c1")
    log.append(member("c1", seq=1, draining=True))
    assert reading(log).members() == {}


def test_of_two_processes_of_a_client_the_later_one_is_the_member():
    log = group("c1")
    log.append(member("c1", inc=OP, capacity=7))
    assert reading(log).members()["c1"].record.capacity == 7


def test_a_member_with_a_stale_key_is_live_only_after_a_new_announcement():
    log = group("c1", "c2")
    log.append(claim("c1", key=named(0)))
    log.append(claim("c1", key=named(1)))
    log.append(claim("x", key=Key("other", "t", 0)))
    log.append(member("c2", seq=1), after=2 * H)
    log.append(member("c1", seq=1))
    assert list(reading(log).members()) == ["c1", "c2"]
    assert list(reading(log, after=9).members()) == ["c2"]
    assert list(reading(log, after=9).members(has_stale=False)) == ["c1", "c2"]
    log.append(member("c1", seq=2), after=9)
    assert list(reading(log).members()) == ["c1", "c2"]


def test_the_planner_input_has_announced_labels_and_directives():
    log = Log(level=2)
    labels = {"target": "2", "weight": "3", "rack": "r1", "fails:t": "1"}
    log.append(member("c1", capacity=4, labels=labels, host="m1", topics=("u", "t")))
    log.append(direct("c1", op=b"1" * 16))
    given = seen(log).given
    (one,) = given.members
    assert (one.limit, one.target, one.weight, one.rack) == (4, 2, 3, "r1")
    assert (one.topics, one.host, one.is_drained) == (("t", "u"), "m1", True)
    assert given.failing == (("c1", T1),)


def test_the_planner_input_marks_a_cordoned_member():
    log = group("c1")
    log.append(direct("c1", action="cordon"))
    (one,) = seen(log).given.members
    assert (one.is_drained, one.is_cordoned, one.limit) == (False, True, None)


# --- keys


def test_a_claimed_key_counts_for_its_owner():
    log = group("c1")
    log.append(claim("c1", key=named(0)))
    found = seen(log)
    assert found.given.keys[0] == PlanKey(T0, "c1")
    assert found.given.keys[1] == PlanKey(T1, None, is_free=True)
    assert found.holders == {T0: "c1", T1: None, T2: None}


def test_a_key_of_a_silent_owner_is_free_only_once_it_is_stale():
    log = group("c2")
    log.append(claim("c1", key=named(0)))
    assert keys(log)[T0] == PlanKey(T0, None)
    assert seen(log).holders[T0] is None
    log.append(member("c2", seq=1), after=2 * H + 1)
    assert keys(log)[T0] == PlanKey(T0, None, is_free=True)


def test_a_free_key_counts_for_its_last_owner():
    log = group("c1", "c2")
    log.append(claim("c1", key=named(0)))
    log.append(release(log.state.keys[named(0)].epoch, key=named(0)))
    assert keys(log)[T0] == PlanKey(T0, "c1", is_free=True)


def test_a_key_released_to_a_successor_counts_for_it_for_a_time():
    log = group("c1", "c2")
    log.append(claim("c1", key=named(0)))
    epoch = log.state.keys[named(0)].epoch
    log.append(release(epoch, key=named(0), successor="c2"))
    found = seen(log)
    assert (found.given.keys[0], found.holders[T0]) == (PlanKey(T0, "c2"), "c2")
    assert keys(log, after=H // 2)[T0] == PlanKey(T0, "c1", is_free=True)


def test_a_key_released_to_an_unknown_successor_counts_for_its_last_owner():
    log = group("c1", "c2")
    log.append(claim("c1", key=named(0)))
    epoch = log.state.keys[named(0)].epoch
    log.append(release(epoch, key=named(0), successor="gone"))
    assert keys(log)[T0] == PlanKey(T0, "c1", is_free=True)


def test_an_offered_key_counts_for_a_known_successor():
    log = group("c1", "c2")
    log.append(claim("c1", key=named(0)))
    epoch = log.state.keys[named(0)].epoch
    log.append(offer(epoch, "c2", key=named(0), within_ms=5))
    found = seen(log)
    assert (found.given.keys[0], found.holders[T0]) == (PlanKey(T0, "c2"), "c1")
    log.append(offer(epoch, "gone", key=named(0)))
    assert keys(log)[T0] == PlanKey(T0, "c1")


def test_an_expired_offer_bars_its_successor_from_the_key_for_a_time():
    log = group("c1", "c2")
    log.append(settings(handoff_ms=7))
    log.append(claim("c1", key=named(0)))
    epoch = log.state.keys[named(0)].epoch
    log.append(offer(epoch, "c2", key=named(0), within_ms=5))
    assert seen(log, after=5).given.barred == (("c2", T0),)
    assert keys(log, after=5)[T0] == PlanKey(T0, "c1")
    assert seen(log, after=12).given.barred == ()
    log.append(ready(epoch, key=named(0)))
    assert seen(log, after=5).given.barred == ()


def test_a_key_counts_for_the_member_that_a_plan_names():
    log = group("c1", "c2", "c3")
    log.append(claim("c1", key=named(0)))
    log.append(planned(0, ("c2", 0, (0, 1)), ("gone", 0, (2,)), vector=((FAR, 0),)))
    found = seen(log)
    assert found.standing == {T0: "c2", T1: "c2", T2: "gone"}
    assert (found.given.keys[0], found.holders[T0]) == (PlanKey(T0, "c2"), "c1")
    assert found.given.keys[1] == PlanKey(T1, "c2", is_free=True)
    assert found.given.keys[2] == PlanKey(T2, None, is_free=True)


def test_a_plan_entry_for_a_drained_or_cordoned_member_is_ignored():
    log = group("c1", "c2")
    log.append(claim("c1", key=named(0)))
    log.append(planned(0, ("c2", 0, (0,)), vector=((FAR, 0),)))
    log.append(direct("c2"))
    assert keys(log)[T0] == PlanKey(T0, "c1")
    log.append(direct("c2", action="cordon", op=b"2" * 16))
    assert keys(log)[T0] == PlanKey(T0, "c1")


def test_a_plan_entry_for_a_member_without_the_topic_is_ignored():
    log = group("c1")
    log.append(member("c2", topics=("u",)))
    log.append(claim("c1", key=named(0)))
    log.append(planned(0, ("c2", 0, (0,)), vector=((FAR, 0),)))
    assert keys(log)[T0] == PlanKey(T0, "c1")


def test_a_claim_after_a_plan_voids_the_entry_of_its_key():
    log = group("c1", "c2")
    log.append(planned(0, ("c2", 0, (0,)), vector=((log.state.next_offset, 0),)))
    assert seen(log).standing == {T0: "c2"}
    log.append(claim("c1", key=named(0)))
    assert seen(log).standing == {}


def test_a_plan_is_void_if_its_vector_has_another_partition_count():
    log = group("c1")
    log.append(planned(0, ("c1", 0, (0,)), vector=((FAR, 0), (FAR, 0))))
    assert seen(log).standing == {}


def test_keys_in_the_scope_of_a_pause_are_not_planned():
    log = group("c1")
    log.append(schedule(0, FAR, scope={"t": [0]}))
    assert list(keys(log)) == [T1, T2]


def test_a_key_released_for_a_restart_is_reserved_for_the_grace_period():
    log = group("c2")
    log.append(settings(grace_ms=5))
    log.append(claim("c1", key=named(0)))
    epoch = log.state.keys[named(0)].epoch
    log.append(release(epoch, key=named(0), reason="restart: deploy"))
    assert T0 not in keys(log)
    assert keys(log, after=5)[T0] == PlanKey(T0, None, is_free=True)
    log.append(member("c1"))
    assert keys(log)[T0] == PlanKey(T0, "c1", is_free=True)


def test_a_member_that_replaces_a_gone_one_gets_its_free_keys():
    log = group("c2")
    log.append(member("d1", labels={"replaces": "c1"}))
    log.append(member("d2", labels={"replaces": "c1"}))
    log.append(member("d3", labels={"replaces": "c2"}))
    log.append(claim("c1", key=named(0)))
    epoch = log.state.keys[named(0)].epoch
    log.append(release(epoch, key=named(0)))
    assert keys(log)[T0] == PlanKey(T0, "d1", is_free=True)
    log.append(claim("c2", key=named(1)))
    log.append(release(log.state.keys[named(1)].epoch, key=named(1), client="c2"))
    assert keys(log)[T1] == PlanKey(T1, "c2", is_free=True)


ANY = {"replaces": "*"}


def owning(log, *names):
    """Let each of some members claim a partition."""
    for number, name in enumerate(names):
        log.append(claim(name, key=named(number)))
    return log


def cordoned(log):
    return {each.name for each in seen(log).given.members if each.is_cordoned}


def left(log, number, client="c1"):
    epoch = log.state.keys[named(number)].epoch
    log.append(release(epoch, key=named(number), client=client, reason="restart"))
    log.append(member(client, seq=2, draining=True))


def test_a_replacement_for_any_member_is_cordoned_until_a_member_leaves():
    log = owning(group("c1", "c2"), "c1", "c2")
    for name in ("d1", "d2"):
        log.append(member(name, labels=ANY))
    log.append(claim("d1", key=Key("other", "t", 8)))
    assert cordoned(log) == {"d1", "d2"}
    left(log, 0)
    assert cordoned(log) == {"d2"}
    assert keys(log)[T0] == PlanKey(T0, "d1", is_free=True)
    assert keys(log)[T1] == PlanKey(T1, "c2")


def test_a_drained_member_is_replaced_while_it_still_owns_keys():
    log = owning(group("c1", "c2"), "c1", "c2")
    log.append(member("d1", labels=ANY))
    log.append(member("d2", labels={"replaces": "c2"}))
    log.append(direct(client="c1"))
    assert cordoned(log) == {"d2"}
    assert keys(log)[T0] == PlanKey(T0, "d1")
    log.append(direct("c2", op=b"2" * 16))
    assert keys(log)[T1] == PlanKey(T1, "d2")
    assert cordoned(log) == set()


def test_the_replacement_of_a_drained_member_without_keys_is_not_cordoned():
    log = owning(group("c1", "c2"), "c1", "c2")
    log.append(member("d2", labels={"replaces": "c2"}))
    log.append(direct("c2"))
    epoch = log.state.keys[named(1)].epoch
    log.append(release(epoch, key=named(1), client="c2"))
    log.append(claim("d2", key=named(1)))
    assert cordoned(log) == set()


def test_a_replacement_named_for_a_key_of_a_member_gets_its_other_keys():
    log = owning(group("c1", "c2"), "c1", "c1", "c2")
    for name in ("d1", "d2"):
        log.append(member(name, labels=ANY))
    log.append(direct(client="c1"))
    at = log.state.next_offset
    log.append(planned(0, ("d2", 0, (0, 1)), vector=((at, 0),)))
    assert keys(log)[T1] == PlanKey(T1, "d2")
    assert cordoned(log) == {"d1"}
    log.append(release(log.state.keys[named(0)].epoch, key=named(0), client="c1"))
    log.append(claim("d2", key=named(0)))
    assert keys(log)[T1] == PlanKey(T1, "d2")
    assert cordoned(log) == {"d1"}


def test_a_key_planned_for_another_member_goes_to_no_replacement():
    log = owning(group("c1", "c2"), "c1", "c2")
    log.append(direct(client="c1"))
    at = log.state.next_offset
    log.append(planned(0, ("c2", 0, (0,)), vector=((at, 0),)))
    log.append(member("d1", labels=ANY))
    assert keys(log)[T0] == PlanKey(T0, "c2")
    assert cordoned(log) == {"d1"}


def test_replacements_in_a_group_without_keys_are_not_cordoned():
    log = group()
    for name in ("d1", "d2"):
        log.append(member(name, labels=ANY))
    assert cordoned(log) == set()


def test_replacements_are_not_cordoned_while_all_members_are_replacements():
    log = owning(group(), "d1", "d1")
    log.append(member("d1", labels=ANY))
    log.append(member("d2", labels=ANY))
    assert cordoned(log) == set()
    # c1 is no replacement, and may be about to leave.
    log.append(member("c1"))
    assert cordoned(log) == {"d2"}


def test_the_key_of_a_restarted_member_goes_to_the_first_of_two_replacements():
    log = owning(group("c1"), "c1")
    left(log, 0)
    for name in ("d1", "d2"):
        log.append(member(name, labels=ANY))
    assert cordoned(log) == set()
    assert keys(log)[T0] == PlanKey(T0, "d1", is_free=True)


def test_a_drained_replacement_replaces_no_member():
    log = owning(group("c1", "c2"), "c1", "c2")
    for name in ("d1", "d2"):
        log.append(member(name, labels=ANY))
    log.append(direct("d1"))
    log.append(direct("c1", op=b"2" * 16))
    assert keys(log)[T0] == PlanKey(T0, "d2")


def test_a_replacement_that_lacks_the_topic_gets_none_of_its_keys():
    log = owning(group("c1", "c2"), "c1", "c2")
    log.append(member("d1", labels=ANY, topics=("u",)))
    log.append(direct(client="c1"))
    assert keys(log)[T0] == PlanKey(T0, "c1")


def test_keys_with_an_owner_and_unknown_keys_are_not_reserved():
    log = group("c1")
    log.append(claim("c1", key=named(0)))
    known, note = log.state.keys[named(0)], log.state.soft.notes[named(0)]
    assert not is_reserved(known, note, now_ms=0, grace_ms=9)
    assert not is_reserved(None, note, now_ms=0, grace_ms=9)
    assert not is_reserved(known, None, now_ms=0, grace_ms=9)


def test_the_grace_period_follows_the_settings_up_to_its_bound():
    log = group("c1")
    assert reading(log).grace_ms == 60_000
    log.append(settings(grace_ms=FAR))
    assert reading(log).grace_ms == 600_000


# --- partition counts


def test_the_count_of_an_unknown_topic_follows_from_its_claimed_partitions():
    log = group("c1")
    log.append(claim("c1", key=named(4)))
    log.append(claim("x", key=Key("other", "t", 8)))
    log.append(claim("c1", key=Key("g", "unwanted", 8)))
    log.append(planned(0, topics=(("t", 7),)))
    assert seen(log, counts={}).counts == {"t": 5}


def test_a_claim_far_above_the_others_does_not_add_partitions_to_a_plan():
    """Once, it made planners go through all partitions below."""
    log = group("c1")
    log.append(claim("c1", key=named(2)))
    log.append(claim("x", key=named(PARTITION_MAX)))
    assert seen(log, counts={}).counts == {"t": 3}


@pytest.mark.parametrize(
    ("claimed", "count"),
    [
        ((), 0),
        ((0,), 1),
        ((4, 7), 8),
        ((1_009,), 1_010),
        ((1_010,), 0),
        ((3, 1_020), 4),
        (range(5_000), 5_000),
        ((3, PARTITION_MAX), 4),
    ],
)
def test_a_count_is_guessed_from_claimed_partitions_that_are_near(claimed, count):
    found = guessed_counts(TopicPartition("t", number) for number in claimed)
    assert found == ({"t": count} if claimed else {})


def test_plan_entries_beyond_the_known_partitions_are_ignored():
    log = group("c1")
    log.append(planned(0, ("c1", 0, (0, 1, 2, 7)), vector=((FAR, 0),)))
    found = seen(log)
    assert found.standing == {T0: "c1", T1: "c1", T2: "c1"}
    assert found.entries(plan(found.given)) == found.standing


def test_a_topic_without_a_known_count_has_no_keys():
    log = group("c1")
    assert seen(log, counts={}).given.keys == ()


# --- turns, versions


def test_the_first_three_members_that_can_plan_take_turns():
    log = group("c2", "c3", "c4", plans="1")
    log.append(member("c1"))
    log.append(member("c5", labels={"plans": "1"}))
    members = reading(log).members()
    turns = [turn_of(members, f"c{n}") for n in range(1, 7)]
    assert turns == [None, 0, 1, 2, None, None]


def test_the_lowest_supported_planner_version_is_in_force(monkeypatch):
    monkeypatch.setattr(plans, "PLANNER_VERSION", 5)
    log = group("c1", plans="9")
    assert version_of(reading(log), reading(log).members()) == 5
    log.append(member("c2", labels={"plans": "4"}, capacity=0))
    assert version_of(reading(log), reading(log).members()) == 4
    log.append(settings(planner_version_max=3))
    assert version_of(reading(log), reading(log).members()) == 3


# --- results and records


def test_a_plan_has_entries_only_for_keys_that_move():
    log = group("c1", "c2")
    log.append(claim("c1", key=named(0)))
    log.append(claim("c1", key=named(1)))
    found = seen(log)
    assert found.entries(plan(found.given)) == {T2: "c2"}


def test_equal_inputs_have_equal_digests():
    log = group("c1")
    one, other = seen(log).given, seen(log, counts={"t": 2}).given
    assert digest_of(one) == digest_of(seen(log).given) != digest_of(other)
    empty = digest_of(PlanInput(keys=(), members=()))
    assert empty.hex() == "a8d0a0c5c68cf7cebf9318de645023cb"


def written(slices, vector, **rest):
    """Return the Plans of these slices."""
    return [
        msgspec.structs.replace(
            planned(n, number=n, count=len(slices), vector=vector, **rest),
            client_id="c" * 200,
            topics=each.topics,
            moves=each.moves,
        )
        for n, each in enumerate(slices)
    ]


def test_a_plan_of_one_move_takes_under_200_bytes():
    entries, vector = {TopicPartition("orders", 7): "billing-1"}, ((1_000_000, 20),) * 8
    slices = slices_of({"orders": 10_000}, entries, vector=vector)
    (one,) = written(slices, vector)
    assert len(encode(msgspec.structs.replace(one, client_id="billing-1"))) < 200


def read_back(counts, entries, *, vector=LONG_VECTOR):
    """Write a Plan; return its slices, and the Plan as it is read from the log."""
    slices = slices_of(counts, entries, vector=vector)
    log = Log(level=2)
    for record in written(slices, vector):
        assert len(encode(record)) <= FRAME_BYTES_MAX
        assert log.outcome_of(record) == "planned"
    standing = standing_of(log.state.soft.plans["g"])
    assert standing.entries == entries_of(slices)
    return slices, standing


def test_ten_thousand_moves_take_two_slices():
    topics = [f"topic-{n:03}" for n in range(100)]
    entries = {
        TopicPartition(topic, n): f"billing-{(n * 100 + number) % 1000:04}"
        for number, topic in enumerate(topics)
        for n in range(100)
    }
    slices, found = read_back(dict.fromkeys(topics, 100), entries)
    assert len(slices) == 2
    assert found.entries == entries


def test_topics_too_many_for_a_slice_continue_in_the_next():
    topics = {f"{n:03}" + "t" * 240: 1 for n in range(300)}
    entries = {TopicPartition(topic, 0): "c1" for topic in topics}
    slices, found = read_back(topics, entries)
    assert [bool(each.topics) for each in slices] == [True, True]
    assert (found.entries, found.counts) == (entries, topics)


def test_of_topics_too_many_for_all_slices_only_those_with_moves_are_listed():
    topics = {f"{n:04}" + "t" * 240: 1 for n in range(2_000)}
    entries = {TopicPartition(topic, 0): "c1" for topic in sorted(topics)[500:510]}
    (_,), found = read_back(topics, entries)
    assert found.entries == entries
    assert found.counts.keys() == {each.topic for each in entries}


def test_moves_too_many_for_all_slices_are_left_for_the_next_plan():
    topics = {f"{n:04}" + "t" * 240: 9 for n in range(2_000)}
    entries = {TopicPartition(t, n): "c" * 200 for t in topics for n in range(9)}
    slices, found = read_back(topics, entries)
    assert len(slices) == 8
    assert found.entries.items() < entries.items()
    assert len(found.entries) > 10_000


def test_an_empty_plan_is_one_slice():
    (one,) = slices_of({}, {}, vector=((1, 0),))
    assert one == ((), ())


def test_a_move_fits_beside_a_vector_of_4_000_entries():
    vector = ((2**32 - 1, 2**16),) * 4_000
    _, found = read_back({"t": 1}, {T0: "c1"}, vector=vector)
    assert found.entries == {T0: "c1"}


def test_a_vector_that_leaves_no_room_is_refused():
    with pytest.raises(MalformedRecord, match=r"5,000 .*topic resize") as found:
        slices_of({"t": 1}, {T0: "c1"}, vector=((FAR, 0),) * 5_000)
    assert "groups set" in str(found.value)


def test_the_vector_has_the_folded_offset_and_the_time_since():
    log = group("c1")
    assert reading(log, after=7).vector == ((log.state.next_offset, 7),)


def test_a_free_key_without_a_plan_entry_is_reported():
    log = group("c1")
    assert seen(log, counts={"t": 1}).has_unnamed_key
    log.append(planned(0, ("c1", 0, (0,)), vector=((FAR, 0),)))
    assert not seen(log, counts={"t": 1}).has_unnamed_key
    log.append(claim("c1", key=named(0)))
    assert not seen(log, counts={"t": 1}).has_unnamed_key


# --- standbys


def standing_by(*, beside="h-c", seq=0):
    """Return a log in which a owns a key and is silent; b and c stand by, live."""
    log = group("c1")
    log.append(claim("a", key=named(0)))
    log.append(member("a", capacity=0, host="h-a"))
    for name, host in (("b", "h-b"), ("c", beside)):
        labels = {"standbys": "1"}
        record = member(name, labels=labels, capacity=0, host=host, seq=seq)
        log.append(record, after=H if name == "b" else 1)
    return log


def test_a_key_of_a_silent_owner_counts_for_its_first_standby():
    log = standing_by()
    first = keys(log)[T0].owner
    assert first in {"b", "c"}
    # The owner has been silent for longer than an interval, and is not stale yet.
    assert not keys(log)[T0].is_free
    for name in "bc":
        record = member(
            name, seq=1, labels={"standbys": "1"}, capacity=0, host=f"h-{name}"
        )
        log.append(record, after=H if name == "b" else 1)
    assert keys(log)[T0] == PlanKey(T0, first, is_free=True)


def test_a_standby_on_the_owners_host_comes_last():
    assert keys(standing_by(beside="h-a"))[T0].owner == "b"


def test_a_member_named_by_a_plan_comes_before_standbys():
    log = standing_by(beside="h-a")
    log.append(planned(0, ("c", 0, (0,)), vector=((FAR, 0),)))
    assert keys(log)[T0].owner == "c"


def test_a_drained_member_does_not_stand_by():
    log = standing_by(beside="h-a")
    log.append(direct("b"))
    assert keys(log)[T0].owner == "c"


def test_a_member_without_the_topic_does_not_stand_by():
    log = standing_by(beside="h-a")
    labels = {"standbys": "1"}
    log.append(member("b", seq=1, labels=labels, topics=("u",), capacity=0))
    assert keys(log)[T0].owner == "c"


def test_a_key_of_a_live_owner_counts_for_its_owner():
    log = standing_by()
    log.append(member("a", seq=1, capacity=0, host="h-a"))
    assert keys(log)[T0].owner == "a"
