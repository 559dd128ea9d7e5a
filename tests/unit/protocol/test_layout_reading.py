"""How readers see a change of the number of coordinating partitions."""

import msgspec
from logkit import OP, H, Log, config, layout_final, member, release
from stepkit import OTHER, Change, announce, finished, held, key_of, over

from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.layout_reading import (
    Moving,
    change_of,
    is_torn,
    members_of,
    progress_of,
)
from kafka_marshal.protocol.layout_steps import FINAL_AFTER_MS, Final, Steps
from kafka_marshal.protocol.lost_changes import restored_op
from kafka_marshal.protocol.state import WorldState

# --- which change is open


def test_without_a_change_there_are_no_steps():
    assert Change().read() is None
    assert change_of({0: WorldState(0)}) is None


def test_the_open_change_is_that_of_partition_0():
    found = Change().fence(0).read().change
    assert (found.op_id, found.from_count, found.to_count) == (OP, 2, 4)
    assert (found.generation, found.partitions) == (2, range(4))
    assert found.pairs == [(0, 2), (1, 3)]
    assert Change(4, 2).fence(0).read().change.pairs == [(2, 0), (3, 1)]


def test_a_change_that_a_partition_has_lost_is_open_again():
    change = over()
    config = change.worlds[1].config
    change.logs[1] = Log(1, **change.settings(2))
    found = change.read().change
    assert (found.op_id, found.from_count) == (restored_op(config), 2)
    assert found.config == config


def test_two_changes_of_one_generation_are_torn():
    change = Change().fence(0)
    change.logs[1].append(change.record(op=OTHER))
    steps = change.steps()
    assert steps == Steps(change=steps.change, is_torn=True)
    change = Change().fence(0)
    change.logs[1].append(change.record(era=9))
    assert change.steps().is_torn
    change = Change().fence(0)
    change.logs[1].append(change.record(generation=3, era=3, op=OTHER))
    assert not is_torn(change.worlds, change.read().change)


def test_a_fence_that_restores_a_change_does_not_make_it_torn():
    """One partition has lost its Final, and another the fence before that."""
    change = over()
    config = change.worlds[2].config
    for t, op in ((1, OP), (2, restored_op(config))):
        change.logs[t] = Log(t, configured=t < 2, **change.settings(2))
        assert change.logs[t].outcome_of(change.record(op=op)) == "layout_fenced"
    assert not change.steps().is_torn
    while change.read() is not None:
        change.write()
    change.logs[3] = Log(3, configured=False)
    change.logs[3].append(change.record(op=OTHER))
    change.logs[1] = Log(1, **change.settings(2))
    change.logs[1].append(change.record())
    assert change.steps().is_torn


def test_a_later_config_ends_a_torn_change():
    """Two partitions have different fences, and then a Config of a later generation."""
    change = over()
    for t, op in ((2, OP), (3, OTHER)):
        change.logs[t] = Log(t, configured=False)
        assert change.logs[t].outcome_of(change.record(op=op)) == "layout_fenced"
    assert change.steps().is_torn
    later = config(3, era=3, **change.settings(4))
    for log in change.logs.values():
        assert log.outcome_of(later) == "configured"
    assert not change.steps().is_torn
    for _ in range(9):
        if change.read() is not None:
            change.write()
    assert change.read() is None


# --- what moves


def test_moving_keys_are_computed_once_per_fence():
    change = Change()
    held(change, key_of(0, 2))
    change.fence(0)
    moving = Moving()
    first = moving.of(change.logs[0].state)
    assert first == {2: [key_of(0, 2)]}
    assert moving.of(change.logs[0].state) is first
    state = change.logs[0].state
    state.layout = state.layout._replace(offset=9)
    assert moving.of(state) is not first


# --- members that act on the change


def test_members_that_are_gone_or_leave_are_not_waited_for():
    change = finished(Change())
    announce(change, "c3", 1)
    steps = change.steps(elapsed_ms=dict.fromkeys(range(4), 2 * H + 1))
    assert "adoption" in {wait.reason for wait in steps.waits}
    assert members_of(change.worlds.values(), dict.fromkeys(range(4), 2 * H + 1)) == {}
    assert progress_of(change.read()).lagging == (("g", "c3"),)
    home = home_partition("g", partition_count=4)
    last = msgspec.structs.replace(member("c3", seq=1), labels={}, draining=True)
    change.logs[home].append(last)
    assert progress_of(change.read()).lagging == ()


def test_the_newest_announcement_of_two_homes_counts():
    group = next(
        name
        for name in ("g", "g2", "g3", "g4", "g5", "g6")
        if home_partition(name, partition_count=2)
        != home_partition(name, partition_count=4)
    )
    old, new = (home_partition(group, partition_count=n) for n in (2, 4))
    for first, second in ((old, new), (new, old)):
        change = finished(Change())
        announce(change, "c1", 1, at=first, group=group)
        announce(change, "c1", 2, at=second, group=group, seq=1)
        (one,) = members_of(change.worlds.values()).values()
        assert one.record.seq == 1
        assert change.steps().finals == (Final(0, OP),)


# --- progress


def test_progress_counts_fences_moved_keys_dones_and_finals():
    change = Change()
    keys = [key_of(0, 2, skip=n) for n in range(2)]
    epochs = [held(change, key) for key in keys]
    change.fence(0, 2)
    change.logs[0].append(release(epochs[0], key=keys[0]))
    change.write()
    found = progress_of(change.read())
    assert (found.partition_count, found.fenced_count, found.ended_count) == (4, 4, 0)
    assert (found.moving_count, found.final_count, found.imported_count) == (2, 1, 1)
    assert (found.pair_count, found.done_count) == (2, 0)
    assert (found.floor, found.lagging) == (None, ())
    change.logs[0].append(release(epochs[1], key=keys[1]))
    change.write()
    change.write()
    assert progress_of(change.read()).done_count == 2
    change.move_time(0, FINAL_AFTER_MS)
    change.write()
    found = progress_of(change.read(unread={3}))
    assert (found.fenced_count, found.ended_count, found.done_count) == (3, 1, 1)
    change.logs[2].append(layout_final())
    found = progress_of(change.read())
    assert (found.ended_count, found.done_count, found.moving_count) == (2, 2, 0)


def test_a_partition_without_a_config_counts_as_not_fenced():
    found = progress_of(Change().fence(0).read())
    assert (found.fenced_count, found.ended_count) == (1, 0)
