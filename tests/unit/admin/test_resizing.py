"""An admin changes the number of coordinating partitions, on a log in memory."""

import msgspec
import pytest
from adminkit import TuningAdmin
from countkit import Reading, level_two, moving, owners
from enginekit import H, fold, lowered, pause_for, pause_scope, world, write
from logkit import (
    beat,
    claim,
    direct,
    ident,
    layout_fence,
    member,
    pause,
    release,
    schedule,
    settings,
)
from positionkit import die_at, following
from positionkit import written as with_positions
from resizekit import (
    KEYS,
    TIMEOUT_MS,
    Died,
    Tool,
    filled,
    hold,
    key,
    position_of,
    require_whole,
)

from kafka_marshal.admin.altering import Altering
from kafka_marshal.admin.formatting import Format, format_log
from kafka_marshal.admin.group_settings import plan_settings
from kafka_marshal.admin.pausing import PauseOperation, Period, ignore_progress
from kafka_marshal.admin.resizing import plan_resize, wait_text
from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.engine.config_check import require_no_change
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    LogUnreadable,
    LogUnwritable,
    TopicMisconfigured,
)
from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.items import Halt
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.layout_steps import Wait
from kafka_marshal.protocol.records import (
    DecidePosition,
    LayoutFence,
    LayoutImport,
    ResolvePosition,
)

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


def torn(before, after, *, left):
    """Return a cluster whose admin died in a change, after ``left`` records."""
    cluster = filled(before)
    with pytest.raises(Died):
        Tool(cluster, left=left).resize(after)
    return cluster


def test_the_partition_count_grows_and_shrinks():
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


def test_one_import_record_has_many_keys():
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
        cluster = torn(before, after, left=left)
        Tool(cluster, "second").resize(after)
        require_whole(cluster, after)


def test_a_change_ends_although_each_admin_dies_after_one_record():
    cluster = filled(4)
    for number in range(STEPS_MAX):
        try:
            Tool(cluster, f"admin-{number}", left=1 if number else 5).resize(8)
        except Died:
            continue
        break
    require_whole(cluster, 8)


def test_a_second_admin_may_end_a_change_while_the_first_writes():
    """The second admin writes the rest before the next record of the first."""
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


def test_a_change_given_up_before_its_first_fence_prevents_no_other():
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
    """Delete all records of these partitions."""
    for t in partitions:
        place = cluster.place(t)
        cluster.kafka.delete_records(place, before=cluster.kafka.log(place).end)


@pytest.mark.parametrize("again", [(8,), (16,), (8, 16), (2, 8)], ids=str)
def test_a_change_may_follow_one_whose_probes_were_deleted(again):
    """The next admin knows only what the log still has."""
    cluster = torn(4, 8, left=4)
    lose_probes(cluster, 4, 5, 6, 7)
    for count in again:
        Tool(cluster, f"to-{count}").resize(count)
        require_whole(cluster, count)


@pytest.mark.parametrize("left", range(4, 20, 2))
def test_another_admin_continues_although_probes_were_deleted(left):
    cluster = torn(4, 8, left=3)
    lose_probes(cluster, 4, 5, 6)
    with pytest.raises(Died):
        Tool(cluster, left=left).resize(8)
    Tool(cluster, "second").resize(8)
    require_whole(cluster, 8)


def test_partitions_whose_earlier_records_were_deleted_are_used_again():
    cluster = filled(4)
    for count in (8, 4):
        Tool(cluster, f"to-{count}").resize(count)
    lose_probes(cluster, 4, 5, 6, 7)
    Tool(cluster, "again").resize(8)
    require_whole(cluster, 8)


def test_another_count_is_refused_while_a_change_is_open():
    cluster = torn(4, 8, left=7)
    for count in (4, 16):
        with pytest.raises(ClaimRejected, match=r"resize --partitions 8") as caught:
            Tool(cluster).resize(count)
        assert caught.value.reason == "busy"
    Tool(cluster).resize(8)
    require_whole(cluster, 8)


def test_a_change_that_partition_0_has_ended_does_not_prevent_the_next():
    total = steps_of(4, 8)
    cluster = torn(4, 8, left=total - 3)
    assert fold(cluster, 0).layout is None
    assert fold(cluster, 7).layout is not None
    Tool(cluster).resize(16)
    require_whole(cluster, 16)


def test_a_retired_partition_without_its_final_does_not_prevent_the_next():
    total = steps_of(8, 4)
    cluster = torn(8, 4, left=total - 1)
    assert fold(cluster, 7).layout is not None
    Tool(cluster).resize(2)
    require_whole(cluster, 2)


def test_keys_of_a_dead_owner_move_once_its_claims_are_stale():
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


def test_a_change_waits_until_a_live_owner_releases_its_keys():
    cluster = filled(4)
    moves = moving_key(4, 8)
    epoch = hold(cluster, moves, 4)
    t = place_of(key(moves), partition_count=4)
    with pytest.raises(DeadlineExceeded, match="1 key of client 'c1'") as caught:
        Tool(cluster).resize(8, timeout_ms=H)
    assert "resize --partitions 8 --execute" in str(caught.value)
    write(cluster, release(epoch, position_of(moves), key=key(moves)), t)
    Tool(cluster).resize(8)
    require_whole(cluster, 8)


def test_a_pause_between_plan_and_fence_stops_the_change():
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


def test_a_fence_from_a_clock_days_ahead_is_an_error_that_names_the_clock():
    cluster = filled(4)
    tool = Tool(cluster)
    probe = tool._probe

    def step_the_clock(*names):
        probe(*names)
        tool._follow()._clock = cluster.clock.view(wall_offset_ms=2 * 86_400_000)

    tool._probe = step_the_clock
    with pytest.raises(LogUnwritable, match="clock of this machine is more than a day"):
        tool.resize(8)


def test_another_config_between_plan_and_fence_stops_the_change():
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


def test_partitions_that_kafka_does_not_add_are_an_error():
    tool = Tool(filled(4), adds=False)
    with pytest.raises(DeadlineExceeded, match="has 4 partitions, and 8 are needed"):
        tool.resize(8)
    assert tool.sent == 0


def test_two_changes_of_one_generation_are_refused_as_torn_layout():
    cluster = torn(4, 8, left=5)
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
    with pytest.raises(LogUnreadable, match="torn_layout"):
        tool._continue(100, on_progress=ignore_progress)


def test_many_keys_take_several_import_records():
    cluster = world(1)
    for number in range(450):
        epoch = hold(cluster, number, 1)
        write(cluster, release(epoch, position_of(number), key=key(number)))
    Tool(cluster).resize(2)
    moved = fold(cluster, 1)
    assert len(records(cluster, LayoutImport)) == -(-len(moved.keys) // 200)
    assert len(moved.keys) > 200


def groups_of(cluster, count):
    """Return settings and directives by group; each must be in its group's home."""
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


def plan_of(cluster, count=8, *, found=None, **given):
    found = found or following(cluster, "planner")
    now_ms, wall_ms = cluster.clock.now_ms(), cluster.clock.wall_ms()
    return plan_resize(found, count, now_ms=now_ms, wall_ms=wall_ms, **given)


def reasons(cluster, count=8, **given):
    return [each.reason for each in plan_of(cluster, count, **given).obstacles]


def refused(cluster, count=8):
    """Return the only obstacle, which must also stop an execution before any write."""
    (one,) = plan_of(cluster, count).obstacles
    tool = Tool(cluster)
    with pytest.raises(ClaimRejected) as caught:
        tool.resize(count)
    assert (caught.value.reason, tool.sent) == (one.reason, 0)
    return one


def announce(cluster, client="c1", *, partitions=4, **changes):
    record = msgspec.structs.replace(member(client), **changes)
    write(cluster, record, home_partition("g", partition_count=partitions))


# --- plans


def test_a_plan_counts_moving_and_held_keys():
    cluster = filled(4)
    moves = [n for n in range(24) if place_of(key(n), partition_count=8) >= 4]
    hold(cluster, moves[0], 4)
    plan = plan_of(cluster)
    assert (plan.from_count, plan.to_count, plan.added_count) == (4, 8, 4)
    assert plan.moving_count == len(moves)
    assert sum(each.held_count for each in plan.moves) == 1
    assert all(each.target == each.source + 4 for each in plan.moves)
    assert plan.dead_owner_ms == 2 * H
    assert plan.is_needed
    cluster.run(3 * H)
    assert sum(each.held_count for each in plan_of(cluster).moves) == 0


def test_checkpoint_keys_do_not_move():
    cluster = world(1)
    mine = key(0)._replace(group_id="marshal", topic="/checkpoint")
    write(cluster, claim(key=mine))
    assert plan_of(cluster, 2).moves == ()


def test_the_present_count_needs_no_change():
    plan = plan_of(filled(4), 4)
    assert (plan.is_needed, plan.moves, plan.obstacles) == (False, (), ())
    plan.require()


@pytest.mark.parametrize(
    ("count", "match"),
    [(0, "must be 1 to"), (10_001, "must be 1 to"), (6, "for example 8"), (3, "multi")],
)
def test_a_count_that_is_not_allowed_is_refused(count, match):
    with pytest.raises(ConfigurationError, match=match):
        plan_of(filled(4, keys=0), count)


def test_an_unformatted_topic_is_refused():
    cluster = world(1)
    cluster.kafka.log(cluster.place(0)).records.clear()
    with pytest.raises(TopicMisconfigured, match="not formatted"):
        plan_of(cluster)


# --- obstacles


def test_an_earlier_feature_level_is_an_obstacle():
    assert refused(lowered(4)).reason == "level"


def test_an_unreadable_partition_in_use_is_an_obstacle():
    cluster = filled(4, keys=0)
    found = following(cluster, "planner")
    found.log_start_missing.append(2)
    (one,) = plan_of(cluster, found=found).obstacles
    assert (one.reason, "[2]" in one.text) == ("unread", True)
    found.log_start_missing[:] = [9]
    assert plan_of(cluster, found=found).obstacles == ()
    assert plan_of(cluster, 2, found=found).obstacles == ()
    found.replicas[3].world.halted = Halt(1, 9)
    (one,) = plan_of(cluster, found=found).obstacles
    assert "[3]" in one.text


def test_an_unreadable_partition_that_is_not_in_use_is_no_obstacle():
    """Its state starts with the fence, unless partition 0 has an earlier Config."""
    cluster = filled(4)
    Tool(cluster).resize(2)
    write(cluster, b"x", 3)
    cluster.kafka.delete_records(cluster.place(3), before=1)
    found = following(cluster, "planner", sources=(LogCheckpoints(),))
    assert found.log_start_missing == [3]
    assert plan_of(cluster, 4, found=found).obstacles == ()
    config = found.replicas[3].world.config
    later = msgspec.structs.replace(config, generation=3)
    found.replicas[3].world.config = later
    assert plan_of(cluster, 4, found=found).obstacles[0].reason == "unread"


def test_a_torn_format_is_an_obstacle():
    cluster = world(4)
    cluster.kafka.log(cluster.place(3)).records.clear()
    assert refused(cluster).text.startswith("torn_format: coordinating partitions [3]")


def configure(cluster, *numbers, **changes):
    """Write the next Config to some partitions."""
    config = cluster.config
    fields = {"generation": 2, "era": config.era + 1} | changes
    for t in numbers:
        write(cluster, msgspec.structs.replace(config, **fields), t)


def test_a_partition_with_a_later_config_than_partition_0_is_an_obstacle():
    """Partition 0 has lost its end: the next fence could repeat a generation."""
    cluster = filled(4, keys=0)
    configure(cluster, 2, heartbeat_interval_ms=2 * H)
    one = refused(cluster)
    assert (one.reason, "[2] have a later Config" in one.text) == ("torn", True)


def test_a_partition_that_has_lost_a_change_is_restored_first():
    """PROTOCOL 10.9: it would refuse the next fence, whose change would never end."""
    cluster = filled(4, keys=0)
    Tool(cluster).resize(8)
    cluster.kafka.truncate(cluster.place(2), end=1, leader=7)
    one = refused(cluster, 16)
    assert (one.reason, "from 4 to 8" in one.text) == ("busy", True)
    plan = Tool(cluster).resize(8)
    assert plan.change is not None
    assert plan_of(cluster, 16).obstacles == ()


def test_an_unused_partition_that_lost_its_final_is_no_obstacle():
    """It has lost the LayoutFinal of an earlier change, which the next fence ends."""
    cluster = filled(4, keys=0)
    Tool(cluster).resize(8)
    end = cluster.kafka.log(cluster.place(7)).end
    Tool(cluster).resize(4)
    cluster.kafka.truncate(cluster.place(7), end=end - 1, leader=9)
    plan = plan_of(cluster, 8)
    assert (plan.change, plan.obstacles) == (None, ())
    Tool(cluster).resize(8)
    assert plan_of(cluster, 8).change is None


def test_another_count_under_the_same_generation_is_an_obstacle():
    cluster = filled(4, keys=0)
    found = following(cluster, "planner")
    other = msgspec.structs.replace(cluster.config, partition_count=2)
    found.replicas[3].world.config = other
    (one,) = plan_of(cluster, found=found).obstacles
    assert (one.reason, "[3] have a later Config" in one.text) == ("torn", True)


def test_a_partition_that_an_upgrade_has_not_reached_is_an_obstacle():
    """The partition would ignore the fence, and the change could never end."""
    cluster = lowered(4)
    configure(cluster, 0, 1, 3, feature_level=2)
    found = following(cluster, "planner")
    found._log.topic = "own"
    (one,) = plan_of(cluster, found=found).obstacles
    assert (one.reason, "[2] have an earlier" in one.text) == ("level", True)
    assert one.text.endswith("marshal topic format --coordination-topic own")
    configure(cluster, 2, feature_level=2)
    assert plan_of(cluster).obstacles == ()


@pytest.mark.parametrize("kind", ["pause", "scope", "schedule"])
def test_a_pause_is_an_obstacle(kind):
    cluster = filled(4, keys=0)
    if kind == "pause":
        pause_for(cluster, 9 * H)
    elif kind == "scope":
        pause_scope(cluster, 9 * H, {"t": ()})
    else:
        now_ms = cluster.clock.wall_ms()
        write(cluster, schedule(now_ms + H, now_ms + 9 * H))
    one = refused(cluster)
    assert (one.reason, "groups resume" in one.text) == ("paused", True)


@pytest.mark.parametrize("kind", ["pause", "schedule"])
def test_an_expired_pause_in_an_idle_partition_is_no_obstacle(kind):
    """The fence ends the pause: no other record may ever be appended there."""
    cluster = filled(4, keys=0)
    if kind == "pause":
        pause_for(cluster, 2 * H)
    else:
        now_ms = cluster.clock.wall_ms()
        write(cluster, schedule(now_ms + H, now_ms + 2 * H))
    cluster.run(2 * H + 1)
    assert any(
        group.pauses or group.scheduled for group in fold(cluster).groups.values()
    )
    assert plan_of(cluster).obstacles == ()
    Tool(cluster).resize(8)
    require_whole(cluster, 8, keys=0)


def test_an_undecided_set_position_is_an_obstacle():
    cluster = with_positions()
    die_at(cluster, DecidePosition)
    cluster.run(9 * H)
    for t in range(4):
        write(cluster, b"", t)
    one = refused(cluster)
    assert (one.reason, "groups finish" in one.text) == ("unresolved", True)


def test_an_unresolved_verdict_is_an_obstacle():
    cluster = with_positions()
    die_at(cluster, ResolvePosition)
    cluster.run(9 * H)
    for t in range(4):
        write(cluster, b"", t)
    assert refused(cluster).reason == "unresolved"
    assert "unresolved" in reasons(cluster, 2)


def test_members_that_cannot_follow_a_change_are_an_obstacle():
    cluster = filled(4, keys=0)
    announce(cluster, labels={})
    one = refused(cluster)
    assert one.reason == "members"
    assert "g/c1" in one.text
    assert plan_of(cluster).lagging == (("g", "c1"),)
    assert reasons(cluster, ignore_members=True) == []
    announce(cluster, seq=1, labels={"layout": "1"})
    assert reasons(cluster) == []
    announce(cluster, seq=2, labels={})
    cluster.run(2 * H)
    assert reasons(cluster) == ["members"]
    cluster.run(1)
    assert reasons(cluster) == []
    announce(cluster, seq=3, labels={})
    announce(cluster, seq=4, labels={}, draining=True)
    assert reasons(cluster) == []


def test_limits_that_fewer_partitions_exceed_are_obstacles():
    cluster = world(4, keys=4, groups=4)
    for number in range(8):
        t = place_of(key(number), partition_count=4)
        write(cluster, claim(key=key(number)._replace(group_id=f"g{number}")), t)
    keys, groups = plan_of(cluster, 1).obstacles
    assert (keys.reason, groups.reason) == ("limits", "limits")
    assert "would have 7 keys, and the limit is 4" in keys.text
    assert "topic alter --limit groups=7" in groups.text
    assert reasons(cluster, 8) == []


def test_the_error_counts_further_obstacles():
    cluster = filled(4, keys=0)
    pause_for(cluster, 9 * H)
    announce(cluster, labels={})
    with pytest.raises(ClaimRejected, match="and 1 more: see --dry-run"):
        plan_of(cluster).require()


def test_an_obstacle_abbreviates_a_long_list_of_groups():
    cluster = filled(4, keys=0)
    for number in range(7):
        until = cluster.clock.wall_ms() + 9 * H
        write(cluster, schedule(0, until, group=f"g{number}"))
    assert "g0, g1, g2, g3, g4 and 2 more" in plan_of(cluster).obstacles[0].text


# --- other changes meanwhile


def test_no_config_is_written_while_a_change_is_open():
    cluster = torn(4, 8, left=6)
    assert fold(cluster, 7).config is None
    follower = following(cluster, "other")
    with pytest.raises(ClaimRejected, match="resize --partitions 8"):
        format_log(
            follower,
            Format(),
            cluster_id=cluster.config.cluster_id,
            ignore_formatted=True,
            timeout_ms=100,
        )

    class Alter(Altering):
        _timeout_ms = 100

        def _read(self):
            return follower

    for call in (Alter().alter_topic, Alter().upgrade_topic):
        with pytest.raises(ClaimRejected, match="resize --partitions 8"):
            call()
    Tool(cluster).resize(8)
    follower = following(cluster, "other")
    require_no_change({world.partition: world for world in follower.worlds})


def test_pauses_and_settings_are_refused_while_a_change_is_open():
    cluster = filled(4)
    group = next(
        name
        for name in (f"g{n}" for n in range(99))
        if home_partition(name, partition_count=8) == 4
    )
    home = home_partition(group, partition_count=4)
    write(cluster, settings(group=group), home)
    with pytest.raises(Died):
        Tool(cluster, left=12).resize(8)
    assert fold(cluster, 4).layout.sources[0].done_ms is None
    tuning = TuningAdmin(cluster, "other")
    pause = PauseOperation(
        tuning._read(),
        cluster.clock.view(),
        tuning._sender,
        group_id="g",
        op_id=bytes(16),
        period=Period(for_ms=9 * H),
        partition_count=8,
    )
    with pytest.raises(ClaimRejected, match="resize --partitions 8") as caught:
        pause.begin(TIMEOUT_MS)
    assert caught.value.reason == "busy"
    assert not any(fold(cluster, t).active_pause("g") for t in range(8))
    change = plan_settings(fold(cluster, 4), group, changes={"grace_ms": 5})
    with pytest.raises(ClaimRejected, match="are being moved") as caught:
        tuning._write_settings(4, change, None)
    assert caught.value.reason == "importing"


def test_an_old_change_in_a_retired_partition_is_not_an_open_one():
    cluster = torn(8, 4, left=steps_of(8, 4) - 1)
    Tool(cluster).resize(4)
    worlds = {t: fold(cluster, t) for t in range(8)}
    require_no_change(worlds)
    worlds[7].layout = object()
    worlds[7].config = msgspec.structs.replace(worlds[7].config, generation=1)
    require_no_change(worlds)


# --- messages


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (Wait("owned", 1, "c1", 2, 9), "partition 1: 2 keys of client 'c1', for up to"),
        (
            Wait("unresolved", 1, key_count=3),
            "positions that are being set (3 locked keys)",
        ),
        (Wait("quiet", 1, left_ms=4), "the quiet time of a reset, for up to 4 ms"),
        (Wait("adoption", 0, left_ms=4), "members that act on the previous number"),
        (Wait("behind", 0), "records that its log has lost"),
        (Wait("unread", 5), "partition 5: its state, which is not known here"),
    ],
    ids=str,
)
def test_each_kind_of_wait_is_described(wait, text):
    assert text in wait_text(wait)
