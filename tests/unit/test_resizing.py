"""An admin changes the number of coordinating partitions, on a log in memory."""

import msgspec
import pytest
from countkit import Reading, level_two, moving, owners
from enginekit import H, fold, world, write
from logkit import beat, direct, ident, layout_fence, pause, release, settings
from resizekit import (
    KEYS,
    Died,
    Tool,
    filled,
    hold,
    key,
    position_of,
    require_whole,
)

from kafka_marshal.errors import (
    ClaimRejected,
    DeadlineExceeded,
    LogUnreadable,
    LogUnwritable,
)
from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.records import (
    LayoutFence,
    LayoutImport,
)
from kafka_marshal.resizing import Resize

STEPS_MAX = 200


def records(cluster, kind):
    """Return the records of a kind in all partitions, with their partition."""
    topic = cluster.kafka.topic(cluster.place(0).topic)
    return [
        (t, found)
        for t, log in enumerate(topic.partitions)
        for stored in log.records
        if isinstance(found := decode(stored.value), kind)
    ]


def moving_key(before, after):
    """Return the number of a key that moves between two counts."""
    return next(
        n
        for n in range(1, KEYS)
        if n % 3
        and place_of(key(n), partition_count=before)
        != place_of(key(n), partition_count=after)
    )


def test_the_number_grows_and_shrinks():
    cluster = filled(4)
    for count in (8, 16, 8, 4, 12, 4, 1):
        plan = Tool(cluster).resize(count)
        assert plan.obstacles == ()
        require_whole(cluster, count)
    assert not Tool(cluster).resize(1).is_needed


def test_nothing_is_written_without_execute():
    cluster = filled(4)
    tool = Tool(cluster)
    plan = tool.resize_topic(8)
    assert (tool.sent, plan.is_needed, plan.added_count) == (0, True, 4)
    assert plan.moving_count == sum(
        place_of(key(n), partition_count=4) != place_of(key(n), partition_count=8)
        for n in range(KEYS)
    )


def test_one_record_brings_many_keys():
    cluster = filled(4)
    Tool(cluster).resize(8)
    assert len(records(cluster, LayoutImport)) <= 4


def steps_of(count, after):
    """Return how many records a change takes."""
    tool = Tool(filled(count))
    tool.resize(after)
    return tool.sent


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (2, 6)])
def test_another_admin_continues_wherever_the_first_one_dies(before, after):
    total = steps_of(before, after)
    for left in range(total):
        cluster = filled(before)
        with pytest.raises(Died):
            Tool(cluster, left=left).resize(after)
        Tool(cluster, "second").resize(after)
        require_whole(cluster, after)


def test_an_admin_that_dies_again_and_again_gets_there():
    cluster = filled(4)
    for number in range(STEPS_MAX):
        try:
            Tool(cluster, f"admin-{number}", left=1 if number else 5).resize(8)
        except Died:
            continue
        break
    require_whole(cluster, 8)


def test_two_admins_at_a_time():
    """The other one writes everything while the first waits for its verdicts."""
    cluster = filled(4)
    with pytest.raises(Died):
        Tool(cluster, "begins", left=8).resize(8)
    first, began = Tool(cluster), []
    plain = first._follow().append

    def append(partition, record):
        if not began:
            began.append(record)
            Tool(cluster, "second").resize(8)
        return plain(partition, record)

    first._follow().append = append
    first.resize(8)
    assert began
    require_whole(cluster, 8)


def test_given_up_before_the_commit_leaves_nothing_in_the_way():
    cluster = filled(4)
    probes = 4
    for left in (0, 1, probes):
        with pytest.raises(Died):
            Tool(cluster, left=left).resize(8)
        assert records(cluster, LayoutFence) == []
    for t in range(4, 8):
        assert fold(cluster, t).config is None
    Tool(cluster).resize(12)
    require_whole(cluster, 12)


def lose_probes(cluster, *partitions):
    """Delete all that these partitions have."""
    for t in partitions:
        place = cluster.place(t)
        cluster.kafka.delete_records(place, before=cluster.kafka.log(place).end)


@pytest.mark.parametrize("again", [(8,), (16,), (8, 16), (2, 8)], ids=str)
def test_a_change_after_one_whose_probes_were_deleted(again):
    """The next admin knows no more than the log has."""
    cluster = filled(4)
    with pytest.raises(Died):
        Tool(cluster, left=4).resize(8)
    lose_probes(cluster, 4, 5, 6, 7)
    for count in again:
        Tool(cluster, f"to-{count}").resize(count)
        require_whole(cluster, count)


@pytest.mark.parametrize("left", range(4, 20, 2))
def test_another_admin_continues_where_probes_were_deleted(left):
    cluster = filled(4)
    with pytest.raises(Died):
        Tool(cluster, left=3).resize(8)
    lose_probes(cluster, 4, 5, 6)
    with pytest.raises(Died):
        Tool(cluster, left=left).resize(8)
    Tool(cluster, "second").resize(8)
    require_whole(cluster, 8)


def test_a_later_change_of_partitions_whose_earlier_life_was_deleted():
    cluster = filled(4)
    for count in (8, 4):
        Tool(cluster, f"to-{count}").resize(count)
    lose_probes(cluster, 4, 5, 6, 7)
    Tool(cluster, "again").resize(8)
    require_whole(cluster, 8)


def test_another_number_is_busy_while_a_change_is_open():
    cluster = filled(4)
    with pytest.raises(Died):
        Tool(cluster, left=7).resize(8)
    for count in (4, 16):
        with pytest.raises(ClaimRejected, match=r"resize --partitions 8") as caught:
            Tool(cluster).resize(count)
        assert caught.value.reason == "busy"
    Tool(cluster).resize(8)
    require_whole(cluster, 8)


def test_a_change_that_partition_0_has_ended_is_left_to_the_next_fence():
    total = steps_of(4, 8)
    cluster = filled(4)
    with pytest.raises(Died):
        Tool(cluster, left=total - 3).resize(8)
    assert fold(cluster, 0).layout is None
    assert fold(cluster, 7).layout is not None
    Tool(cluster).resize(16)
    require_whole(cluster, 16)


def test_a_retired_partition_that_missed_the_end_is_ended_later():
    total = steps_of(8, 4)
    cluster = filled(8)
    with pytest.raises(Died):
        Tool(cluster, left=total - 1).resize(4)
    assert fold(cluster, 7).layout is not None
    Tool(cluster).resize(2)
    require_whole(cluster, 2)


def test_keys_of_a_dead_owner_move_once_it_is_stale():
    cluster = filled(4)
    moves = moving_key(4, 8)
    hold(cluster, moves, 4)
    shown = []
    began_ms = cluster.clock.now_ms()
    Tool(cluster).resize(8, on_progress=shown.append)
    assert cluster.clock.now_ms() - began_ms >= 2 * H
    require_whole(cluster, 8)
    assert (shown[0].fenced_count, shown[0].partition_count) == (1, 8)
    assert any(each.moving_count > each.final_count for each in shown)


def test_a_late_heartbeat_of_a_stale_owner_changes_nothing():
    cluster = filled(4)
    moves = moving_key(4, 8)
    epoch = hold(cluster, moves, 4)
    t = place_of(key(moves), partition_count=4)
    with pytest.raises(Died):
        Tool(cluster, left=9).resize(8)
    cluster.run(2 * H + 40)
    write(cluster, beat(epoch, 999, key=key(moves)), t)
    Tool(cluster).resize(8)
    require_whole(cluster, 8)


def test_a_live_owner_is_waited_for():
    cluster = filled(4)
    moves = moving_key(4, 8)
    epoch = hold(cluster, moves, 4)
    t = place_of(key(moves), partition_count=4)
    with pytest.raises(DeadlineExceeded, match="1 keys of client 'c1'") as caught:
        Tool(cluster).resize(8, timeout_ms=H)
    assert "resize --partitions 8 --execute" in str(caught.value)
    write(cluster, release(epoch, position_of(moves), key=key(moves)), t)
    Tool(cluster).resize(8)
    require_whole(cluster, 8)


def test_a_pause_between_plan_and_fence_wins():
    cluster = filled(4)
    tool = Tool(cluster)
    add = tool._add_partitions

    def add_late(count):
        add(count)
        write(cluster, pause(cluster.clock.wall_ms() + 9 * H))

    tool._add_partitions = add_late
    with pytest.raises(ClaimRejected, match="nothing was changed") as caught:
        tool.resize(8)
    assert caught.value.reason == "busy"


def test_another_config_between_plan_and_fence_wins():
    cluster = filled(4)
    tool = Tool(cluster)
    add = tool._add_partitions

    def add_late(count):
        add(count)
        fields = {"generation": 2, "era": cluster.clock.wall_ms() // 1_000 + 9}
        write(cluster, msgspec.structs.replace(cluster.config, **fields))

    tool._add_partitions = add_late
    with pytest.raises(LogUnwritable, match="partition 0 refused the change"):
        tool.resize(8)


def test_partitions_that_do_not_appear_are_an_error():
    tool = Tool(filled(4), adds=False)
    with pytest.raises(DeadlineExceeded, match="has 4 partitions, and 8 are needed"):
        tool.resize(8)
    assert tool.sent == 0


def test_two_changes_of_one_generation_stop_everybody():
    cluster = filled(4)
    with pytest.raises(Died):
        Tool(cluster, left=5).resize(8)
    config = cluster.config
    other = layout_fence(
        8,
        4,
        op=ident("other"),
        era=cluster.clock.wall_ms() // 1_000 + 9,
        h=config.heartbeat_interval_ms,
        cluster_id=config.cluster_id,
        format_id=config.format_id,
    )
    write(cluster, other, 1)
    with pytest.raises(ClaimRejected, match="torn_layout"):
        Tool(cluster).resize(8)
    tool = Tool(cluster)
    tool._follow().catch_up(100)
    resize = Resize(tool._follow(), cluster.clock.view(), sender=tool._sender)
    with pytest.raises(LogUnreadable, match="torn_layout"):
        resize.run(timeout_ms=100, step_ms=100)


def test_many_keys_take_several_records():
    cluster = world(1)
    for number in range(450):
        epoch = hold(cluster, number, 1)
        write(cluster, release(epoch, position_of(number), key=key(number)))
    Tool(cluster).resize(2)
    moved = fold(cluster, 1)
    assert len(records(cluster, LayoutImport)) == -(-len(moved.keys) // 200)
    assert len(moved.keys) > 200


def groups_of(cluster, count):
    """Return settings and directives by group, each from where it belongs."""
    every = {t: fold(cluster, t) for t in range(count)}
    found = {}
    for t, state in every.items():
        for group_id, group in state.groups.items():
            home = home_partition(group_id, partition_count=count)
            if group_id == "marshal":
                assert [each.host for each in group.directives] == ["h1"]
            if group.settings or (group.directives and group_id != "marshal"):
                assert t == home, group_id
                found[group_id] = group.settings, group.directives
    return found


def test_settings_and_directives_move_with_their_home():
    cluster = filled(4)
    until = cluster.clock.wall_ms() + 10**7
    for n in range(12):
        group = f"g{n}"
        home = home_partition(group, partition_count=4)
        write(cluster, settings(group=group, policy="planner", grace_ms=n), home)
        if n % 2:
            write(cluster, direct(group=group, until=until), home)
    for t in range(4):
        write(cluster, direct(group="marshal", host="h1", until=until), t)
    before = groups_of(cluster, 4)
    assert len(before) == 12
    for count in (8, 16, 8, 4, 2):
        Tool(cluster).resize(count)
        assert groups_of(cluster, count) == before
    for n in range(12):
        home = home_partition(f"g{n}", partition_count=2)
        write(cluster, settings(2, group=f"g{n}"), home)
        assert fold(cluster, home).settings_of(f"g{n}").generation == 2


@pytest.mark.parametrize("left", [None, 4, 7])
def test_members_follow_an_admin_and_continue_when_it_dies(left):
    cluster = level_two(2, records=[20] * 8)
    readings = [Reading(cluster, name) for name in "ab"]

    def work():
        for reading in readings:
            reading.step()

    def is_shared():
        work()
        return all(len(reading.node.held) == 4 for reading in readings)

    cluster.run_until(is_shared, 5 * H)
    tool = Tool(cluster, left=left, on_step=work)
    if left is None:
        plan = tool.resize(4)
        assert plan.obstacles == ()
        held = sum(move.held_count for move in plan.moves)
        assert held == plan.moving_count == len(moving(2, 4))
        assert plan.lagging == ()
    else:
        with pytest.raises(Died):
            tool.resize(4)

    def is_ended():
        work()
        states = [fold(cluster, t) for t in range(4)]
        is_over = all(s.layout is None and s.config is not None for s in states)
        return is_over and is_shared()

    cluster.run_until(is_ended, 9 * H)
    cluster.config = fold(cluster, 0).config
    assert set(owners(cluster).values()) == {"a", "b"}
    for reading in readings:
        assert reading.lost == []
    handed = [offset for reading in readings for offset in reading.offsets]
    assert len(handed) == len(set(handed)) == 160
