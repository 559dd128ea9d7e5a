"""Views of a Plan: entries and their outcome, changes, verification."""

import pytest
from logkit import H, Log, beat, claim, direct, member, planned, release, settings

from kafka_marshal import Key, World
from kafka_marshal.engine.kept_states import Restored
from kafka_marshal.errors import ClaimRejected, LogUnreadable
from kafka_marshal.protocol.group_plan import plan
from kafka_marshal.protocol.plans import (
    Reading,
    digest_of,
    situation_of,
    slices_of,
    standing_of,
)
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.remote.answers import PlanNow
from kafka_marshal.views.plan import (
    explain_key,
    find_plan,
    plan_changes,
    plan_object,
    verify_plan,
    view_plan,
)

FAR = 2**62
COUNTS = {"t": 4}


def named(number):
    return Key("g", "t", number)


def place(number):
    return TopicPartition("t", number)


@pytest.fixture
def log():
    """Members a and b; a has three of four partitions, one is free."""
    log = Log(cluster_id="cluster", level=2)
    log.append(settings(policy="planner"))
    for name in "ab":
        log.append(member(name, capacity=0, labels={"rack": f"r-{name}"}))
    for number in range(3):
        log.append(claim("a", key=named(number)))
    return log


def view_of(log, elapsed_ms=0):
    return World([log.state], {0: elapsed_ms}, cluster_id="cluster", read_at_ms=5)


def seen(log):
    return view_plan(view_of(log), "g", partition_counts=COUNTS)


def state_of(log, number):
    return {each.key.partition: each.state for each in seen(log).keys}[number]


def test_a_group_without_a_plan_has_no_entries(log):
    view = seen(log)
    assert (view.policy, view.generation, view.is_known) == ("planner", 0, False)
    assert (view.author, view.offset, view.keys) == (None, None, ())
    held = [(each["client_id"], each["held_count"]) for each in view.members]
    assert held == [("a", 3), ("b", 0)]


def test_open_entries_are_gains_and_losses_of_members(log):
    log.append(planned(0, ("b", 0, (2, 3)), client="a", vector=((FAR, 0),)))
    view = seen(log)
    assert (view.generation, view.author, view.is_known) == (1, "a", True)
    assert view.offset == log.state.next_offset - 1
    names = ("client_id", "planned_count", "gains_count", "losses_count", "rack")
    rows = [tuple(each[name] for name in names) for each in view.members]
    assert rows == [("a", 2, 0, 1, "r-a"), ("b", 2, 2, 0, "r-b")]
    keys = [(each.key.partition, each.holder) for each in view.keys]
    assert keys == [(2, "a"), (3, None)]


def lags(rows):
    return [(row["lag"], row["lag_unknown_count"]) for row in rows]


def test_lag_is_summed_where_position_and_end_are_known(log):
    for number, position in ((0, 10), (1, 50)):
        epoch = log.state.keys[named(number)].epoch
        log.append(beat(epoch, position, key=named(number), client="a"))
    ends = {place(0): 15, place(1): 40, place(3): 9}
    view = view_plan(view_of(log), "g", partition_counts=COUNTS, log_ends=ends)
    # The owner of 1 is beyond its log end; 2 has neither; 3 has no claim.
    facts = plan_object(view, [])
    assert lags([facts]) == [(5, 2)]
    assert lags(facts["members"]) == [(5, 1), (0, 0)]
    gone = view_of(log, elapsed_ms=3 * H)
    view = view_plan(gone, "g", partition_counts=COUNTS, log_ends=ends)
    assert lags([view.lag]) == [(5, 2)], "of 1, whose owner is gone, and of 2"


def test_a_sidecar_answers_with_the_same_fields(log):
    fields = set(PlanNow.__struct_fields__)
    assert fields == {"as_of", *plan_object(seen(log), [])}


def test_without_log_ends_lag_is_unknown(log):
    log.append(claim("m", key=Key("g", "/checkpoint", 0)))
    view = seen(log)
    assert lags(view.members) == [(None, 3), (0, 0)]
    assert lags([view.lag]) == [(None, 4)]


def test_targets_and_directives_of_members_are_shown(log):
    log.append(member("b", seq=1, capacity=0, labels={"target": "2"}))
    log.append(direct(client="a"))
    rows = [(each["target"], each["directive"]) for each in seen(log).members]
    assert rows == [(None, "drain"), (2, None)]


def test_standbys_are_shown_in_their_order(log):
    log.append(claim("b", key=named(3)))
    for name in "abc":
        labels = {"standbys": "2"}
        log.append(member(name, seq=1, capacity=0, labels=labels, host=f"h-{name}"))
    log.append(claim("gone", key=Key("other", "t", 3)))
    view = seen(log)
    assert {at: len(names) for at, names in view.standbys.items()} == {
        place(number): 2 for number in range(4)
    }
    assert set(view.standbys[place(0)]) == {"b", "c"}
    assert {each["client_id"]: each["standbys_count"] for each in view.members} == {
        "a": 1,
        "b": 3,
        "c": 4,
    }
    facts = plan_object(view, [])
    assert facts["standbys"][3]["standbys"] == list(view.standbys[place(3)])
    log.append(direct("c"))
    assert view.standbys[place(3)] != seen(log).standbys[place(3)] == ("a",)


def test_entries_are_done_or_void_after_a_claim(log):
    at = log.state.next_offset
    log.append(planned(0, ("b", 0, (2, 3)), vector=((at, 0),)))
    assert (state_of(log, 2), state_of(log, 3)) == ("open", "open")
    log.append(claim("b", key=named(3)))
    assert state_of(log, 3) == "done"
    log.append(release(log.state.keys[named(2)].epoch, key=named(2), client="a"))
    log.append(claim("a", key=named(2)))
    assert state_of(log, 2) == "void"


def test_a_plan_for_another_partition_count_has_no_entries(log):
    log.append(planned(0, ("b", 0, (2,)), vector=((FAR, 0), (FAR, 0))))
    assert seen(log).keys == ()


def test_a_partition_that_no_member_can_take_is_uncovered(log):
    log.append(member("a", seq=1, capacity=3))
    log.append(member("b", seq=1, topics=()))
    (row,) = seen(log).uncovered
    assert (row.key, row.reason) == (place(3), "limits")


def why(log, number):
    world, at = view_of(log), place(number)
    return explain_key(world, "g", place=at, partition_counts=COUNTS)


def test_each_partition_is_explained(log):
    assert why(log, 0) == "t-0 stays with a: no move would improve the balance"
    assert why(log, 3) == "t-3 would go from nobody to b by the next plan"
    log.append(planned(0, ("b", 0, (2,)), client="a", vector=((FAR, 0),)))
    assert why(log, 2) == "t-2 is to go from a to b, by plan generation 1, written by a"
    log.append(member("a", seq=1, capacity=3))
    log.append(member("b", seq=1, topics=()))
    assert why(log, 3) == "t-3 stays without an owner: limits"
    with pytest.raises(ClaimRejected, match="no partition of a topic to which a live"):
        why(log, 9)


def test_a_partition_reserved_for_a_restart_is_explained(log):
    epoch = log.state.keys[named(0)].epoch
    log.append(release(epoch, key=named(0), client="a", reason="restart"))
    log.append(member("a", seq=1, draining=True))
    assert why(log, 0) == "t-0 is reserved for a, which is restarting"


# --- verify


def write_plan(log, *, change=lambda entries: entries, digest=None):
    """Append the Plan that a planner writes now."""
    reading = Reading(
        group_id="g",
        worlds=(log.state,),
        elapsed_ms=(7,),
        counts=COUNTS,
        partition_of=lambda _: 0,
    )
    situation = situation_of(reading, reading.members())
    entries = change(situation.entries(plan(situation.given)))
    (one,) = slices_of(situation.counts, entries, vector=reading.vector)
    moves = [(each.client_id, *keys) for each in one.moves for keys in each.keys]
    record = planned(
        log.state.plan_generation("g"),
        *moves,
        client="a",
        topics=[(each.topic, each.partition_total) for each in one.topics],
        vector=reading.vector,
        digest=digest or digest_of(situation.given),
    )
    assert log.outcome_of(record) == "planned"


def verified(log):
    def past(offsets):
        state = WorldState(0)
        for entry in log.entries:
            if entry.offset <= offsets[0]:
                apply(state, entry)
        return World([state], {}, is_past=True)

    return verify_plan(view_of(log), "g", past=past)


def test_a_plan_equal_to_a_new_one_from_its_input_is_the_same(log):
    write_plan(log)
    found = verified(log)
    assert (found.outcome, found.author, found.differences) == ("same", "a", {})


def test_a_plan_that_follows_a_plan_is_verified_as_the_same(log):
    write_plan(log)
    log.append(member("c", capacity=0), after=H // 2)
    write_plan(log)
    assert (verified(log).outcome, verified(log).generation) == ("same", 2)


def test_a_plan_that_differs_from_its_input_has_diverged(log):
    write_plan(log, change=lambda entries: {**entries, place(0): "b"})
    found = verified(log)
    assert found.outcome == "plan_diverged"
    assert found.differences == {place(0): ("b", None)}


def test_a_plan_cut_to_the_maximum_size_is_verified_as_the_same(log, monkeypatch):
    for name, value in (
        ("PLAN_SLICES_MAX", 1),
        ("FRAME_BYTES_MAX", 1_536 + 50),
        ("_ROOM_BYTES_MIN", 1),
    ):
        monkeypatch.setattr(f"kafka_marshal.protocol.plans.{name}", value)
    written = []
    write_plan(log, change=lambda entries: written.append(entries) or entries)
    found = standing_of(log.state.soft.plans["g"])
    assert 0 < len(found.entries) < len(written[0])
    assert verified(log).outcome == "same"


def test_a_plan_with_another_input_digest_is_unknown(log):
    write_plan(log, digest=b"d" * 16)
    assert verified(log).outcome == "unknown"


def test_a_group_without_a_whole_plan_cannot_be_verified(log):
    with pytest.raises(ClaimRejected, match="no whole plan"):
        verified(log)
    log.append(planned(0, count=2))
    with pytest.raises(ClaimRejected, match="no whole plan"):
        verified(log)


def test_a_plan_for_billions_of_partitions_is_not_computed_again(log):
    log.append(planned(0, topics=(("t", 3), ("u", 2**31 - 1))))
    with pytest.raises(ClaimRejected, match="by c1, is for 2147483650 partitions"):
        verified(log)


def test_a_plan_for_another_partition_count_is_not_verified(log):
    log.append(planned(0, vector=((3, 0), (3, 0))))
    with pytest.raises(LogUnreadable, match="coordinating partitions, but"):
        verified(log)


class Scan:
    """A scan of a log whose entries before an offset are deleted."""

    def __init__(self, log, *, first=0):
        self._entries = [each for each in log.entries if each.offset >= first]
        self._first = first

    def restore(self):
        return {0: Restored(WorldState(0), None, self._first)}

    def __iter__(self):
        return iter((0, each) for each in self._entries)


def plan_to(log, name, *partitions, **fields):
    """Append a Plan that names a member for some partitions."""
    record = planned(
        log.state.plan_generation("g"),
        *([(name, 0, partitions)] if partitions else []),
        vector=((log.state.next_offset, 0),),
        topics=(("t", 4),),
        **fields,
    )
    log.append(record)


def move(log, number, to):
    key = Key("g", "t", number)
    known = log.state.keys.get(key)
    if known is not None and known.owner is not None:
        log.append(release(known.epoch, key=key, client=known.owner.client_id))
    log.append(claim(to, key=key))


def past_of(log):
    def past(offsets):
        state = WorldState(0)
        for entry in log.entries:
            if entry.offset <= offsets[0]:
                apply(state, entry)
        return World([state], {}, is_past=True)

    return past


def changes(log, generation):
    note = find_plan(Scan(log), "g", generation=generation)
    world = view_of(log)
    view = view_plan(world, "g", partition_counts={"t": 4})
    found = plan_changes(world, view, since=note, past=past_of(log))
    return [
        (each.key.partition, each.source, each.to, each.holder, each.state)
        for each in found
    ]


def test_entries_of_an_earlier_plan_are_done_open_or_overtaken(log):
    plan_to(log, "b", 1, 2, 3)
    plan_to(log, "b", 2)
    move(log, 1, "b")
    # 3 has no claim, and the latest plan names no member for it.
    assert changes(log, 1) == [
        (1, "b", "b", "b", "done"),
        (2, "b", "b", "a", "open"),
        (3, "b", None, None, "overtaken"),
    ]
    move(log, 2, "c")
    assert changes(log, 1)[1] == (2, "b", "c", "c", "overtaken")


def test_changes_include_other_partitions_with_a_new_member(log):
    plan_to(log, "b", 2)
    move(log, 0, "b")
    move(log, 3, "a")
    plan_to(log, "b", 1)
    assert changes(log, 1) == [
        (0, "a", "b", "b", None),
        (1, "a", "b", "a", None),
        (2, "b", "a", "a", "overtaken"),
        (3, None, "a", "a", None),
    ]


def test_changes_omit_keys_of_the_protocol(log):
    plan_to(log, "b", 2)
    log.append(claim("a", key=Key("g", "/checkpoint", 0)))
    assert [row[0] for row in changes(log, 1)] == [2]


def test_a_plan_is_found_by_the_generation_of_any_slice(log):
    plan_to(log, "b", 2)
    at = ((log.state.next_offset, 0),)
    for number in (0, 1):
        log.append(planned(1 + number, number=number, count=2, vector=at))
    for generation in (2, 3):
        note = find_plan(Scan(log), "g", generation=generation)
        assert (note.generation, len(note.records)) == (3, 2)
    with pytest.raises(ClaimRejected, match=r"no plan of generation 4 yet.*one is 3"):
        find_plan(Scan(log), "g", generation=4)


def test_a_plan_that_was_never_whole_is_not_found(log):
    log.append(planned(0, count=2))
    with pytest.raises(ClaimRejected, match="no whole plan of group g;"):
        find_plan(Scan(log), "g", generation=1)


def test_an_error_for_a_deleted_plan_names_the_oldest_one(log):
    plan_to(log, "b", 2)
    first = log.state.next_offset
    begun = Restored(past_of(log)({0: first - 1}).partitions[0], "a checkpoint", first)
    plan_to(log, "b", 3)
    scan = Scan(log, first=first)
    scan.restore = lambda: {0: begun}
    with pytest.raises(ClaimRejected, match="the oldest that it has is 2"):
        find_plan(scan, "g", generation=1)


def test_a_plan_cannot_be_found_without_the_log_start(log):
    with pytest.raises(LogUnreadable, match="marshal doctor"):
        find_plan(Scan(log, first=3), "g", generation=1)


def test_plan_generations_restart_after_a_group_is_forgotten():
    log = Log(level=2, forget_ms=100)
    for follows in (0, 1):
        log.append(planned(follows))
    log.append(planned(0, group="h"), after=101)
    assert log.outcome_of(planned(0)) == "planned"
    assert find_plan(Scan(log), "g", generation=1).offset == log.state.next_offset - 1
    with pytest.raises(ClaimRejected, match="no plan of generation 2 yet"):
        find_plan(Scan(log), "g", generation=2)


def test_a_plan_for_another_partition_count_is_not_compared(log):
    log.append(planned(0, vector=((3, 0), (3, 0))))
    with pytest.raises(LogUnreadable, match="coordinating partitions, but"):
        changes(log, 1)
