"""Records that are due while the number of coordinating partitions changes."""

import pytest
from logkit import (
    OP,
    H,
    Log,
    config,
    direct,
    ident,
    layout_fence,
    layout_final,
    messages,
    pause,
    release,
    resets,
    settings,
    stage,
)
from stepkit import OTHER, SENDER, Change, announce, finished, held, key_of, over

from kafka_marshal.protocol.codec import FRAME_BYTES_MAX, encode
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.items import Halt
from kafka_marshal.protocol.layout import digest_of, item_of
from kafka_marshal.protocol.layout_reading import progress_of
from kafka_marshal.protocol.layout_steps import (
    FINAL_AFTER_MS,
    Final,
    Steps,
    Wait,
    fence_of,
    final_of,
    final_waits_of,
    grouped,
    import_of,
    is_adopted,
)
from kafka_marshal.protocol.lost_changes import restored_op
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import GroupState, KeyState, WorldState
from kafka_marshal.protocol.types import Key


def test_a_torn_change_has_no_steps():
    change = Change().fence(0)
    change.logs[1].append(change.record(op=OTHER))
    steps = change.steps()
    assert steps == Steps(change=steps.change, is_torn=True)


# --- fences


def test_other_partitions_are_fenced_after_partition_0():
    change = Change().fence(0)
    steps = change.steps()
    assert steps.fences == (1, 2, 3)
    assert change.write(steps) == ["layout_fenced"] * 3
    assert change.steps().fences == ()


def test_partition_0_is_fenced_again_if_it_lost_the_fence():
    change = Change().fence(1, 2, 3)
    steps = change.steps()
    assert (steps.fences, steps.dones) == ((0,), ())
    assert change.write(steps) == ["layout_fenced"]
    assert change.steps().dones


@pytest.mark.parametrize("lost", [None, {"generation": 1}, {"k": 8}], ids=str)
def test_no_step_is_due_while_partition_0_is_behind(lost):
    change = Change()
    for t in (1, 2):
        record = change.record(generation=3, era=3)
        assert change.logs[t].outcome_of(record) == "layout_fenced"
    change.logs[0] = Log(0, configured=lost is not None, **lost or {})
    if lost == {"k": 8}:
        change.logs[0].state.config = config(2, k=8, level=2)
    steps = change.steps()
    assert steps == Steps(change=steps.change, waits=(Wait("behind", 0),))


def test_unread_partitions_are_waited_for():
    change = Change().fence()
    steps = change.steps(unread={0})
    assert steps == Steps(change=steps.change, waits=(Wait("unread", 0),))
    change = Change()
    held(change, key_of(0, 2))
    change.logs[0].append(release(1, key=key_of(0, 2)))
    change.fence(0, 1)
    steps = change.steps(unread={2})
    assert (steps.fences, steps.imports, steps.dones) == ((2, 3), (), ())
    assert steps.waits[0] == Wait("unread", 2)
    change.logs[3].state.halted = Halt(0, 9)
    assert change.steps(unread={2, 3}).fences == (2,)
    change.fence(2)
    assert change.steps(unread={2, 9}).fences == ()


def test_an_unread_partition_is_fenced_only_if_it_comes_into_use():
    """Without the state of a source it is not known whether that has the fence."""
    change = Change().fence(0)
    assert change.steps(unread={1, 2}).fences == (2, 3)
    assert Change(4, 2).fence(0).steps(unread={1, 3}).fences == (2,)


# --- imports of keys


def test_final_keys_are_imported_with_wanted_keys_first():
    change = Change()
    keys = [key_of(0, 2, skip=n) for n in range(3)]
    epochs = [held(change, key) for key in keys]
    change.logs[0].append(messages(epochs[1], 0, 9, key=keys[1]))
    change.fence()
    assert change.steps().imports == ()
    for key, epoch in zip(keys[:2], epochs[:2], strict=True):
        change.logs[0].append(release(epoch, key=key))
    (one,) = change.steps(wanted={keys[1]}).imports
    assert (one.target, one.source) == (2, 0)
    assert one.source_offset == change.logs[0].state.next_offset
    assert one.keys == (keys[1], keys[0])
    assert [item.granted for item in one.items] == [10, None]
    assert change.write() == ["imported", "imported", "layout_done"]
    assert change.steps().imports == ()
    assert change.logs[2].state.keys[keys[1]].position == 10


def test_imports_have_as_many_keys_as_fit():
    source = WorldState(0)
    known = KeyState(
        owner=None,
        epoch=1,
        epoch_leader_epoch=0,
        renewed_ms=0,
        heartbeat_interval_ms=H,
        active_ms=0,
    )
    keys = [Key("g", "t", n) for n in range(401)]
    source.keys = dict.fromkeys(keys, known)
    found = list(grouped(source, keys, target=2))
    assert [len(each.keys) for each in found] == [200, 200, 1]
    assert [key for each in found for key in each.keys] == keys
    long = [Key("g" * 200, "t" * 249, n) for n in range(200)]
    known.retired_topic_ids = (OP,) * 4
    source.keys = dict.fromkeys(long, known)
    found = list(grouped(source, long, target=2))
    assert [key for each in found for key in each.keys] == long
    assert len(found) > 1
    change = Change().fence(0).read().change
    sender = SENDER | {"client_id": "c" * 200, "tags": b"t" * 1_024}
    sizes = [len(encode(import_of(change, each, sender=sender))) for each in found]
    assert FRAME_BYTES_MAX * 0.9 < max(sizes) <= FRAME_BYTES_MAX
    assert list(grouped(source, [], target=2)) == []


def moving_groups(count):
    """Return groups whose home moves from partition 0 to 2."""
    return [
        f"g{n}"
        for n in range(99 * count)
        if home_partition(f"g{n}", partition_count=2) == 0
        and home_partition(f"g{n}", partition_count=4) == 2
    ][:count]


def test_settings_and_directives_are_imported_before_the_done():
    change = Change()
    one, other = moving_groups(2)
    change.logs[0].append(settings(group=one))
    change.logs[0].append(direct(group=other))
    change.logs[0].append(direct(group="marshal"))
    change.fence()
    steps = change.steps()
    assert [each.source for each in steps.dones] == [1]
    assert [(each.target, each.source) for each in steps.groups] == [(2, 0), (2, 0)]
    assert [each.group_id for each in steps.groups[0].settings] == [one]
    named = [each.group_id for each in steps.groups[1].directives]
    assert named == sorted([other, "marshal"])
    assert change.steps(unread={1, 3}).groups
    assert change.write(steps) == [*["group_imported"] * 3, "layout_done"]
    steps = change.steps()
    assert (steps.groups, [each.source for each in steps.dones]) == ((), [0])
    assert change.write(steps) == ["layout_done"]
    assert change.logs[2].state.settings_of(one).generation == 1


def test_directives_that_do_not_fit_or_have_ended_are_not_waited_for():
    change = Change()
    (group,) = moving_groups(1)
    for name in ("one", "two"):
        change.logs[0].append(direct(group=group, op=ident(name)))
    change.fence()
    target = change.logs[2].state
    target.directed = {("x", ident(f"{n}")): None for n in range(999)}
    assert change.write().count("group_imported") == 1
    assert change.steps().groups == ()
    assert [each.source for each in change.steps().dones] == [0]
    target.directed = {(group, ident("one")): None}
    change.logs[2].append(b"", at=2**62)
    assert target.groups[group].directives == ()
    (left,) = change.steps().groups
    assert [each.op_id for each in left.directives] == [ident("two")]


def test_settings_beyond_the_limit_are_not_waited_for():
    change = Change()
    (group,) = moving_groups(1)
    change.logs[0].append(settings(group=group))
    change.fence()
    target = change.logs[2].state
    target.groups = {f"other{n}": GroupState() for n in range(10_000)}
    assert change.steps().groups == ()
    assert [each.source for each in change.steps().dones] == [0, 1]


def test_many_directives_are_split_over_several_records():
    change = Change()
    (group,) = moving_groups(1)
    for n in range(64):
        change.logs[0].append(
            direct(group=group, host="\u20ac" * 255, op=ident(f"{n}"))
        )
    change.fence()
    assert len(change.steps().groups) > 1
    outcomes = change.write(change.steps())
    assert outcomes.count("group_imported") == 64


# --- Done


def test_a_source_without_moving_keys_is_done_at_once():
    change = Change().fence()
    assert [each[:2] for each in change.steps().dones] == [(2, 0), (3, 1)]
    assert [each.key_count for each in change.steps().dones] == [0, 0]
    assert change.write() == ["layout_done"] * 2
    assert change.steps().dones == ()


def test_a_source_is_done_once_all_its_imports_were_read():
    change = Change()
    keys = [key_of(0, 2, skip=n) for n in range(2)]
    epochs = [held(change, key) for key in keys]
    change.fence()
    change.logs[0].append(release(epochs[0], key=keys[0]))
    assert change.write() == ["imported", "layout_done"]
    assert [each.source for each in change.steps().dones] == []
    change.logs[0].append(release(epochs[1], key=keys[1]))
    change.write()
    state = change.logs[0].state
    done_now = change.logs[2].state.layout.sources[0]
    assert done_now.done_ms is None
    (done,) = change.steps().dones
    assert (done.target, done.source, done.key_count) == (2, 0, 2)
    assert done.digest == digest_of(item_of(key, state.keys[key]) for key in keys)
    assert change.write() == ["layout_done"]


def test_a_quiet_source_is_not_done():
    change = Change()
    state = change.logs[0].state
    for part in resets(to_bytes(state), digest(state)):
        change.logs[0].append(part)
    change.fence()
    steps = change.steps()
    assert [each.source for each in steps.dones] == [1]
    assert steps.waits == (Wait("quiet", 0, left_ms=2 * H + 1),)
    steps = change.steps(elapsed_ms={0: 2 * H + 1})
    assert steps.repeat_fences == (0,)
    change.move_time(0, 2 * H + 1)
    assert len(change.steps().dones) == 2


def test_a_source_that_has_ended_the_change_is_done_without_keys():
    """PROTOCOL 10.9: the target has lost the Done, and maybe imports."""
    change = Change()
    epoch = held(change, key_of(0, 2))
    change.logs[0].append(release(epoch, key=key_of(0, 2)))
    change.fence()
    change.logs[0].append(layout_final())
    dones = {each.source: each for each in change.steps().dones}
    assert dones.keys() == {0, 1}
    assert (dones[0].target, dones[0].key_count) == (2, 0)
    assert dones[0].digest == digest_of(())
    assert change.write().count("layout_done") == 2
    assert change.steps().dones == ()


# --- Final


def test_partition_0_ends_the_change_first():
    change = finished(Change())
    assert change.steps().finals == ()
    change.move_time(0, FINAL_AFTER_MS)
    steps = change.steps()
    assert steps.finals == (Final(0, OP),)
    assert not steps.is_over
    assert change.write(steps) == ["layout_final"]
    steps = change.steps()
    assert steps.is_over
    assert steps.finals == tuple(Final(t, OP) for t in (1, 2, 3))
    change.write()
    assert change.read() is None


def test_a_change_to_fewer_partitions_imports_keys_and_ends():
    change = Change(4, 2)
    key = key_of(0, 2)
    epoch = held(change, key)
    change.fence()
    change.logs[2].append(release(epoch, 5, key=key))
    assert change.write() == ["imported", "layout_done"]
    assert change.write() == ["layout_done"]
    change.move_time(0, FINAL_AFTER_MS)
    change.write()
    assert len(change.write()) == 3
    assert change.read() is None
    assert change.logs[0].state.keys[key].position == 5
    assert change.logs[2].state.keys == {}


@pytest.mark.parametrize(
    ("floor", "waited_ms", "expected"),
    [
        (None, 0, False),
        (1, 0, False),
        (2, 0, True),
        (3, 0, True),
        (None, FINAL_AFTER_MS - 1, False),
        (None, FINAL_AFTER_MS, True),
        (1, FINAL_AFTER_MS, True),
    ],
)
def test_a_change_is_adopted_by_all_members_or_after_a_wait(floor, waited_ms, expected):
    assert is_adopted(floor, generation=2, waited_ms=waited_ms) is expected


def test_the_final_is_due_once_all_members_act_on_the_change():
    change = finished(Change())
    announce(change, "c1", 2)
    announce(change, "c2", None)
    announce(change, "c3", 1)
    assert change.steps().finals == ()
    assert change.steps().waits == (Wait("adoption", 0, left_ms=FINAL_AFTER_MS),)
    progress = progress_of(change.read())
    assert (progress.floor, progress.lagging) == (1, (("g", "c3"),))
    steps = change.steps(elapsed_ms={0: FINAL_AFTER_MS})
    assert (steps.repeat_fences, steps.finals) == ((0,), ())
    announce(change, "c3", 2, seq=1)
    assert change.steps().finals == (Final(0, OP),)


def test_members_that_are_gone_do_not_delay_the_final():
    change = finished(Change())
    announce(change, "c3", 1)
    announce(change, "c1", 2, dead=True)
    assert change.steps().finals == (Final(0, OP),)


def test_a_lock_delays_the_final():
    change = Change()
    key = key_of(1, 1)
    epoch = held(change, key)
    log = change.logs[1]
    log.append(release(epoch, key=key))
    log.append(pause(log.now_ms + 9))
    assert log.outcome_of(stage((key.partition, 5))) == "staged"
    change = finished(change)
    change.move_time(0, FINAL_AFTER_MS)
    assert change.steps().waits == (Wait("unresolved", 1, key_count=1),)
    assert change.steps().finals == ()
    assert list(final_waits_of(change.read(unread={1}))) == [Wait("unread", 1)]


def test_an_unread_partition_delays_the_final():
    change = finished(Change())
    change.move_time(0, FINAL_AFTER_MS)
    steps = change.steps(unread={1})
    assert (steps.finals, steps.waits) == ((), (Wait("unread", 1),))


def test_a_partition_left_in_an_earlier_change_gets_its_final():
    """A change 4 -> 2 whose Final partition 3 lacks, then a change 2 -> 1."""
    change = finished(Change(4, 2))
    change.move_time(0, FINAL_AFTER_MS)
    for t in (0, 1, 2):
        change.logs[t].append(layout_final())
    for t in (0, 1):
        again = layout_fence(1, 2, generation=3, era=3, op=OTHER)
        assert change.logs[t].outcome_of(again) == "layout_fenced"
    steps = change.steps()
    assert steps.change.op_id == OTHER
    assert steps.finals == (Final(3, OP),)
    change.write()
    assert change.logs[3].state.layout is None


@pytest.mark.parametrize("is_fenced", [False, True], ids=["ended", "fenced again"])
def test_partition_0_gets_the_final_again_if_it_lost_it(is_fenced):
    """No other record is due before partition 0 has ended the change."""
    change = finished(Change())
    for t in (1, 2, 3):
        if is_fenced:
            again = layout_fence(8, 4, generation=3, era=3, op=OTHER)
            assert change.logs[t].outcome_of(again) == "layout_fenced"
        else:
            assert change.logs[t].outcome_of(layout_final()) == "layout_final"
    steps = change.steps()
    assert steps.finals == (Final(0, OP),)
    assert change.write(steps) == ["layout_final"]
    if is_fenced:
        assert change.steps().fences == (0,)


def test_the_next_fence_ends_an_earlier_change_or_else_a_final_does():
    change = finished(Change(4, 2))
    change.logs[0].append(layout_final())
    again = layout_fence(1, 2, generation=3, era=3, op=OTHER)
    assert change.logs[0].outcome_of(again) == "layout_fenced"
    steps = change.steps()
    assert steps.fences == (1,)
    assert steps.finals == (Final(2, OP), Final(3, OP))


def test_a_target_that_lost_its_imports_gets_a_done_before_its_final():
    change = Change()
    key = key_of(0, 2)
    epoch = held(change, key)
    change.logs[0].append(release(epoch, key=key))
    finished(change)
    change.write()
    change.logs[0].append(b"", after=FINAL_AFTER_MS)
    state = change.logs[2].state
    lost = state.layout.sources[0]._replace(imported_count=0, done_ms=None)
    state.layout = state.layout._replace(sources=(lost,))
    state.keys.clear()
    change.logs[1].append(layout_final())
    change.logs[3].append(layout_final())
    assert change.steps().finals == ()
    state0 = change.logs[0].state
    state0.layout = None
    steps = change.steps()
    assert steps.is_over
    assert steps.finals == ()
    # The source has ended the change, too: the key is new in its target.
    assert [(each.source, each.key_count) for each in steps.dones] == [(0, 0)]
    change.write()
    assert change.write() == ["layout_final"]
    assert change.read() is None


@pytest.mark.parametrize(("before", "after", "lost"), [(2, 4, 0), (2, 4, 1), (4, 2, 1)])
def test_an_ended_change_is_restored_in_a_partition_that_lost_it(before, after, lost):
    change = over(before, after)
    config = change.worlds[lost].config
    change.logs[lost] = Log(lost, **change.settings(before))
    steps = change.steps()
    assert steps.fences == (lost,)
    assert steps.change.op_id == restored_op(config)
    found = []
    while change.read() is not None:
        found += change.write()
    assert found[0] == "layout_fenced"
    assert found[-1] == "layout_final"
    assert found.count("layout_done") == (after < before)
    assert {each.config for each in change.worlds.values()} == {config}


@pytest.mark.parametrize("k", [1, 8])
def test_a_lost_fence_of_a_change_that_has_not_ended_is_written_again(k):
    """Also in a partition that came into use by the change, whatever its Config."""
    change = finished(Change())
    change.move_time(0, FINAL_AFTER_MS)
    change.write()
    change.logs[1] = Log(1, **change.settings(2))
    change.logs[3] = Log(3, k=k, level=2)
    steps = change.steps()
    assert (steps.is_over, steps.change.op_id) == (True, OP)
    assert steps.fences == (1, 3)


@pytest.mark.parametrize(("k", "dones"), [(1, [(3, 1, 0)]), (2, [])])
def test_a_source_that_gets_no_fence_again_is_done_without_keys(k, dones):
    """PROTOCOL 10.9. A source that gets its fence again is read like any other."""
    change = finished(Change())
    change.move_time(0, FINAL_AFTER_MS)
    change.write()
    change.logs[1] = Log(1, k=k, level=2)
    change.logs[3] = Log(3, configured=False)
    assert change.logs[3].outcome_of(change.record()) == "layout_fenced"
    steps = change.steps()
    assert (1 in steps.fences) == (not dones)
    assert [(d.target, d.source, d.key_count) for d in steps.dones] == dones


def test_a_partition_not_shown_to_come_into_use_gets_no_fence():
    """No other partition shows that the change brought it into use."""
    change = finished(Change())
    change.move_time(0, FINAL_AFTER_MS)
    change.write()
    change.logs[3] = Log(3, k=8, level=2)
    del change.logs[2]
    assert change.steps().fences == ()


@pytest.mark.parametrize(("first", "then"), [((2, 4), 8), ((2, 4), 2), ((4, 2), 4)])
def test_a_lost_change_is_restored_before_the_open_one(first, then):
    """PROTOCOL 10.9: the fence of the open change is refused until then."""
    change = over(*first)
    before = change.worlds[1].config
    change.logs[1] = Log(1, **change.settings(first[0]))
    for t in range(len(change.logs), then):
        change.logs[t] = Log(t, configured=False)
    later = layout_fence(then, first[1], generation=3, era=3, op=OTHER)
    assert change.logs[0].outcome_of(later) == "layout_fenced"
    steps = change.steps()
    assert (1 in steps.fences, steps.change.op_id) == (False, OTHER)
    assert change.logs[1].outcome_of(later) == "config"
    ((t, lost),) = steps.earlier
    assert (t, lost.from_count, lost.config) == (1, first[0], before)
    assert lost.op_id == restored_op(before)
    found = change.write(steps)
    assert set(found[: len(steps.fences) + 1]) == {"layout_fenced"}
    assert change.steps().earlier == ()
    assert 1 in change.steps().fences
    for _ in range(9):
        change.move_time(0, FINAL_AFTER_MS)
        if change.read() is not None:
            change.write()
    assert change.read() is None
    assert len({each.config for each in change.worlds.values()}) == 1


# --- waits and progress


def test_moving_keys_with_an_owner_are_waited_for():
    change = Change()
    keys = [key_of(0, 2, skip=n) for n in range(2)]
    held(change, keys[0])
    change.move_time(0, 5)
    held(change, keys[1])
    held(change, key_of(1, 3), client="c2")
    change.fence()
    assert change.steps().waits == (
        Wait("owned", 0, "c1", 2, 2 * H + 1 - 5),
        Wait("owned", 1, "c2", 1, 2 * H + 1),
    )
    steps = change.steps(elapsed_ms={0: 2 * H})
    assert steps.repeat_fences == (0,)
    change.logs[0].now_ms += 2 * H
    assert change.write(steps) == ["busy"]
    (one,) = change.steps().imports
    assert one.keys == (keys[0],)


def test_a_fence_record_has_the_config_and_a_final_its_operation():
    change = Change().fence(0).read().change
    fence = fence_of(change, sender=SENDER)
    assert (fence.op_id, fence.from_count) == (OP, change.from_count)
    assert fence.config == encode(change.config)
    assert final_of(Final(0, OTHER), sender=SENDER).op_id == OTHER
