"""What changed since an earlier Plan of a group."""

import pytest
from logkit import Log, claim, member, planned, release, settings

from kafka_marshal import Key, World
from kafka_marshal.engine.kept_states import Restored
from kafka_marshal.errors import ClaimRejected, LogUnreadable
from kafka_marshal.plan_changes import find_plan, plan_changes
from kafka_marshal.plan_view import view_plan
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState


class Scan:
    """A scan of a log, or of what is left of it."""

    def __init__(self, log, *, first=0):
        self._entries = [each for each in log.entries if each.offset >= first]
        self._first = first

    def restore(self):
        return {0: Restored(WorldState(0), None, self._first)}

    def __iter__(self):
        return iter((0, each) for each in self._entries)


@pytest.fixture
def log():
    """Members a and b; a has three of four partitions, one is free."""
    log = Log(cluster_id="cluster", level=2)
    log.append(settings(policy="planner"))
    for name in "ab":
        log.append(member(name, capacity=0))
    for number in range(3):
        log.append(claim("a", key=Key("g", "t", number)))
    return log


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


def view_of(log):
    return World([log.state], {0: 0}, cluster_id="cluster", read_at_ms=5)


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


def test_entries_are_carried_out_open_or_overtaken(log):
    plan_to(log, "b", 1, 2, 3)
    plan_to(log, "b", 2)
    move(log, 1, "b")
    # Nobody has claimed 3, and the plan in force does not name anybody for it.
    assert changes(log, 1) == [
        (1, "b", "b", "b", "done"),
        (2, "b", "b", "a", "open"),
        (3, "b", None, None, "overtaken"),
    ]
    move(log, 2, "c")
    assert changes(log, 1)[1] == (2, "b", "c", "c", "overtaken")


def test_other_partitions_are_shown_if_another_member_is_to_have_them(log):
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


def test_keys_of_the_protocol_itself_are_left_out(log):
    plan_to(log, "b", 2)
    log.append(claim("a", key=Key("g", "/checkpoint", 0)))
    assert [row[0] for row in changes(log, 1)] == [2]


def test_a_plan_in_slices_is_found_by_any_of_them(log):
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
    with pytest.raises(ClaimRejected, match="no whole plan of group g any more"):
        find_plan(Scan(log), "g", generation=1)


def test_of_a_plan_that_is_gone_the_oldest_is_named(log):
    plan_to(log, "b", 2)
    first = log.state.next_offset
    begun = Restored(past_of(log)({0: first - 1}).partitions[0], "a checkpoint", first)
    plan_to(log, "b", 3)
    scan = Scan(log, first=first)
    scan.restore = lambda: {0: begun}
    with pytest.raises(ClaimRejected, match="the oldest that it has is 2"):
        find_plan(scan, "g", generation=1)


def test_without_the_start_of_the_log_nothing_is_found(log):
    with pytest.raises(LogUnreadable, match="marshal doctor"):
        find_plan(Scan(log, first=3), "g", generation=1)


def test_a_group_that_was_dropped_counts_again():
    log = Log(level=2, forget_ms=100)
    for follows in (0, 1):
        log.append(planned(follows))
    log.append(planned(0, group="h"), after=101)
    assert log.outcome_of(planned(0)) == "planned"
    assert find_plan(Scan(log), "g", generation=1).offset == log.state.next_offset - 1
    with pytest.raises(ClaimRejected, match="no plan of generation 2 yet"):
        find_plan(Scan(log), "g", generation=2)


def test_a_vector_of_other_coordinating_partitions_is_not_compared(log):
    log.append(planned(0, vector=((3, 0), (3, 0))))
    with pytest.raises(LogUnreadable, match="other coordinating partitions"):
        changes(log, 1)
