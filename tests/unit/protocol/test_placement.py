"""Which partition shows a key at each step of a change of the partition count."""

import pytest
from changekit import Change, group_at
from logkit import KEY, Log, config, imported, layout_fence, layout_import

from kafka_marshal.protocol.hashing import CHECKPOINT_TOPIC
from kafka_marshal.protocol.placement import (
    by_partition,
    counts_of,
    homes_of,
    is_shown,
    keys_of,
    leading,
    newest,
    partition_of,
    place_under,
    progress_of,
    standing_keys,
    standing_of,
    target_of,
)
from kafka_marshal.protocol.types import Key

DIRECTIONS = [pytest.param(4, 8, id="growing"), pytest.param(8, 4, id="shrinking")]


def shown(change, key):
    """Return the partition that shows a key; both functions must agree on it."""
    worlds = by_partition(change.states)
    found, every = standing_of(worlds, key), standing_keys(worlds)
    assert every.get(key) is found
    return None if found is None else found.partition


@pytest.mark.parametrize(("before", "after"), DIRECTIONS)
def test_a_key_is_shown_from_one_partition_at_every_step(before, after):
    change = Change(before, after)
    (key,), (stays,) = change.moving(), change.staying()
    source, target = (change.place(key, n).state.partition for n in (before, after))
    assert shown(change, key) is None
    change.claimed(key, stays)
    assert shown(change, key) == source
    change.fence(0)
    assert shown(change, key) == source
    change.fence(*range(1, max(before, after)))
    assert shown(change, key) == source
    change.released(key, position=7)
    assert shown(change, key) == source
    change.imported(key)
    assert shown(change, key) == target
    change.reclaimed(key)
    change.done()
    assert shown(change, key) == target
    for t in range(max(before, after)):
        change.final(t)
        assert shown(change, key) == target
    assert shown(change, stays) == change.place(stays).state.partition


@pytest.mark.parametrize(("before", "after"), DIRECTIONS)
def test_a_moving_key_is_draining_until_its_release_and_then_final(before, after):
    change = Change(before, after)
    (key,), (stays,) = change.moving(), change.staying()
    change.claimed(key, stays)
    worlds = by_partition(change.states)
    source, target = change.place(key).state, change.target(key).state
    assert target_of(source, key) is None
    assert progress_of(worlds, key, state=source) is None
    change.fence()
    assert target_of(source, key) == target.partition
    assert progress_of(worlds, key, state=source) == "draining"
    assert target_of(change.place(stays).state, stays) is None
    change.released(key)
    assert progress_of(worlds, key, state=source) == "final"
    change.imported(key)
    assert progress_of(worlds, key, state=source) is None
    assert progress_of(worlds, key, state=target) is None


def test_an_unknown_key_is_claimed_in_its_partition_under_the_newest_count():
    change = Change(4, 8)
    (key,) = change.moving()
    worlds = by_partition(change.states)
    assert partition_of(worlds, key) == change.place(key).state.partition
    change.fence(0)
    assert partition_of(worlds, key) == change.target(key).state.partition
    assert partition_of({}, key) is None
    reserved = Key("marshal", CHECKPOINT_TOPIC, 3)
    assert place_under(reserved, 2) == 3


def test_a_key_that_the_target_has_dropped_is_not_shown_from_the_source():
    """The source has missed the LayoutFinal, and still has the key."""
    change = Change(4, 8)
    (key,) = change.moving()
    change.claimed(key)
    change.fence()
    change.released(key)
    change.imported(key)
    change.done()
    change.final(0)
    worlds, target = by_partition(change.states), change.target(key)
    del target.state.keys[key]
    assert not is_shown(worlds, key, state=change.place(key).state)
    change.final(target.state.partition)
    assert not is_shown(worlds, key, state=change.place(key).state)
    assert shown(change, key) is None


def test_a_target_without_the_fence_of_this_change_does_not_show_the_key():
    change = Change(8, 4)
    (key,) = change.moving()
    change.claimed(key)
    change.fence()
    change.released(key, position=3)
    change.imported()
    change.done()
    change.final(*range(4))  # partitions 4 to 7 miss theirs
    change.before, change.after, change.generation = 4, 8, 2
    change.op = b"again".ljust(16, b".")
    change.fence(*range(4))
    old = change.target(key).state
    assert key in old.keys
    assert shown(change, key) == change.place(key).state.partition
    change.fence(old.partition)
    assert shown(change, key) == change.place(key).state.partition


def test_a_view_without_the_target_shows_the_key_from_the_source():
    change = Change(4, 8)
    (key,) = change.moving()
    change.claimed(key)
    change.fence()
    change.released(key)
    change.imported(key)
    source = change.place(key).state
    assert is_shown({source.partition: source}, key, state=source)


def test_partitions_that_were_read_at_different_moments_show_a_key_once():
    """The source was read before its fence, the target after the import."""
    change = Change(1, 2)
    (key,) = change.moving()
    change.claimed(key)
    target = Log(1, configured=False)
    target.append(layout_fence(2))
    target.append(layout_import(imported(key)))
    worlds = {0: change.logs[0].state, 1: target.state}
    assert standing_keys(worlds)[key] is target.state
    assert standing_of(worlds, key) is target.state
    shrinking = Change(2, 1)
    (key,) = shrinking.moving()
    shrinking.claimed(key)
    target = Log(0, k=2, level=2)
    target.append(layout_fence(1, 2))
    target.append(layout_import(imported(key), source=1))
    worlds = {0: target.state, 1: shrinking.logs[1].state}
    assert standing_keys(worlds)[key] is target.state


def test_an_open_change_has_two_counts_and_a_moving_group_two_homes():
    change = Change(4, 8)
    worlds = by_partition(change.states)
    group = group_at(1, 4, to_home=5, to_count=8)
    assert (counts_of(worlds), homes_of(worlds, group)) == ((4,), (1,))
    change.fence(0)
    assert (counts_of(worlds), homes_of(worlds, group)) == ((8, 4), (5, 1))
    change.fence(*range(1, 8))
    change.done()
    change.final()
    assert (counts_of(worlds), homes_of(worlds, group)) == ((8,), (5,))
    stays = group_at(1, 4, to_home=1, to_count=8)
    assert homes_of(worlds, stays) == (1,)
    assert counts_of({}) == ()
    assert counts_of({0: Log(configured=False).state}) == ()


def test_partition_0_has_the_config_in_force_unless_it_is_behind():
    change = Change(2, 4)
    worlds = by_partition(change.states)
    assert leading(worlds) is worlds[0]
    change.logs[3].append(layout_fence(4, 2, generation=9, era=9))
    assert leading(worlds) is worlds[0], "an unused partition decides nothing"
    change.logs[1].append(layout_fence(4, 2))
    assert leading(worlds) is worlds[1]
    foreign = Log(1, k=2, level=2, format_id=bytes(16))
    foreign.state.config = config(5, k=2, format_id=bytes(16))
    assert leading({0: worlds[0], 1: foreign.state}) is worlds[0]
    assert leading({1: worlds[1], 2: Log(2, configured=False).state}) is worlds[1]
    assert KEY not in standing_keys(worlds)


def test_each_key_of_a_group_is_listed_once_over_all_partitions():
    change = Change(2, 4)
    (key,), (stays,) = change.moving(), change.staying()
    change.claimed(key, stays, stays._replace(group_id="h"))
    source = change.place(key)
    places = {stays: change.place(stays).key(stays)}
    assert keys_of(change.states, "g") == {key: source.key(key), **places}
    change.fence()
    change.released(key)
    change.imported(key)
    assert keys_of(change.states, "g") == {key: change.target(key).key(key), **places}
    assert keys_of(change.states, "i") == {}


def test_a_key_does_not_move_without_a_change_of_the_count():
    log = Log()
    log.claimed()
    assert target_of(log.state, KEY) is None
    assert is_shown({0: log.state}, KEY, state=log.state)
    assert partition_of({0: log.state}, KEY) == 0


def test_the_newest_config_may_be_in_any_partition_of_the_same_format():
    """Partition 0 may have lost the Config under which the others are in use."""
    first = Log(0, k=1, level=2).state
    later = Log(1, configured=False)
    later.append(layout_fence(2, 1))
    other = Log(2, k=3, level=2, format_id=b"other".ljust(16, b".")).state
    worlds = [first, Log(3, configured=False).state, other]
    assert newest(first.config, worlds) is first.config
    assert newest(first.config, [*worlds, later.state]) is later.state.config
    assert newest(later.state.config, worlds) is later.state.config
