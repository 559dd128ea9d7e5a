"""Views of the log: their entries, and estimates for display."""

import numpy as np
import pytest
from changekit import Change, group_at, opened
from countkit import fence_to
from enginekit import KEY as OWNED
from enginekit import fold, write
from logkit import (
    KEY,
    START_MS,
    H,
    Log,
    beat,
    config,
    imported_settings,
    layout_done,
    layout_groups,
    member,
    offer,
    pause,
    ready,
    settings,
)
from msgspec.structs import replace
from pastkit import past, patch_open

from kafka_marshal import (
    ConfigurationError,
    GroupHistory,
    KeyHistory,
    LogUnreadable,
    Losses,
    TopicMisconfigured,
    World,
    WorldWatch,
    WrongCluster,
)
from kafka_marshal.clock import SystemClock
from kafka_marshal.protocol.applied import Applied, applied_to_tags
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.views import log_scan, watch
from kafka_marshal.views import world as world_view
from kafka_marshal.views.log_scan import LogScan
from kafka_marshal.views.past import Since

__all__ = ["past"]
UNTIL = 2_000_000


def test_an_age_estimate_includes_the_time_since_the_last_entry():
    log = Log()
    log.append(beat(log.claimed(), 5))
    log.append(b"", after=10)
    world = World([log.state], {0: H})
    assert world.estimated_age_ms(log.state, log.key()) == H + 10
    assert world.elapsed_ms(7) == 0
    assert World([log.state], {0: -5}).elapsed_ms(0) == 0


def test_claims_are_sorted_and_filtered_by_group():
    log = Log()
    for name in ("h", "g"):
        log.claimed(key=KEY._replace(group_id=name))
    world = World([log.state], {})
    assert [key.group_id for key, _ in world.claims()] == ["g", "h"]
    assert [key.group_id for key, _ in world.claims("h")] == ["h"]


def test_the_lag_of_a_member_ends_at_the_end_of_the_view():
    """A past view may end before the offsets that a member has applied."""
    log = Log()
    tags = applied_to_tags(Applied(applied={0: 1, 1: 3}))
    log.append(replace(member("c1"), tags=tags))
    world = World([log.state], {})
    (_, known), *_ = world.members()
    assert world.log_lags(known) == {0: log.state.next_offset - 1}
    assert World([Log(1).state], {}).log_lags(known) == {1: 0}


def test_open_handoffs_are_shown_with_phase_and_times():
    log = Log(level=2)
    other = KEY._replace(group_id="h")
    for key in (other, KEY):
        log.append(offer(log.claimed(key=key), key=key))
    since_ms = log.state.now_ms
    log.append(ready(log.key().epoch), after=5)
    world = World([log.state], {})
    (row,) = world.handoffs("g")
    assert row == {
        **KEY._asdict(),
        "owner": "c1",
        "successor": "c2",
        "phase": "ready",
        "since_ms": since_ms,
        "until_ms": since_ms + H,
    }
    assert [each["phase"] for each in world.handoffs()] == ["ready", "offered"]
    late = World([log.state], {0: H})
    assert [each["group_id"] for each in late.handoffs()] == ["g"]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"key": ("g", "t", 0)}, "is no key"),
        ({"timeout_ms": "5s"}, "timeout_ms must be a number"),
        ({"offset": np.int64(3)}, "each coordinating partition has its own"),
    ],
)
def test_invalid_arguments_are_named_before_any_io(given, error):
    with pytest.raises((TypeError, ConfigurationError), match=error):
        World.at("nowhere:1", **given)


@pytest.mark.parametrize(
    ("world", "kind", "message"),
    [
        pytest.param(
            World([Log(configured=False).state], {}),
            TopicMisconfigured,
            "marshal topic format",
            id="unformatted",
        ),
        pytest.param(
            World([Log(k=2).state, Log(1, configured=False).state], {}),
            TopicMisconfigured,
            r"torn_format: coordinating partitions \[1\]",
            id="torn",
        ),
        pytest.param(
            World([Log(k=2).state, Log(1, k=2, format_id=bytes(16)).state], {}),
            TopicMisconfigured,
            "torn_format",
            id="two-formats",
        ),
        pytest.param(
            World([Log(k=2).state], {}),
            TopicMisconfigured,
            "lost partitions",
            id="cut-down",
        ),
        pytest.param(
            World([Log().state], {}, cluster_id="other"),
            WrongCluster,
            "formatted for cluster 'cluster', and this is cluster 'other'",
            id="another-cluster",
        ),
    ],
)
def test_an_unusable_coordination_topic_is_refused(world, kind, message):
    with pytest.raises(kind, match=message) as caught:
        world.config()
    assert caught.value.problems


def test_a_topic_with_other_records_gets_no_advice_to_format():
    data = Log(configured=False)
    data.append(b"an order")
    with pytest.raises(TopicMisconfigured, match="1 of its records are not") as caught:
        World([data.state], {}).config()
    assert "check the name" in str(caught.value)
    assert "topic format" not in str(caught.value)


def test_a_formatted_topic_with_a_spare_partition_is_accepted():
    spare = Log(1, configured=False)  # PROTOCOL 2.5: added in Kafka, no effect
    world = World([Log().state, spare.state], {}, cluster_id="cluster")
    assert world.config().partition_count == 1


def test_a_world_of_states_alone_has_no_pause_reasons():
    log = Log()
    log.append(pause(UNTIL))
    assert World([log.state], {}).notes == {}


def test_unused_partitions_may_lack_their_log_start():
    used, empty = Log(k=2), WorldState(0)
    assert World([used.state], {}, log_start_missing=[1, 2, 3]).unused == (2, 3)
    view = World([used.state], {}, log_start_missing=[1, 2, 3])
    assert view.log_start_missing == (1,)
    for states, missing in (([used.state], [0, 3]), ([empty], [3]), ([], [3])):
        view = World(states, {}, log_start_missing=missing)
        assert (view.log_start_missing, view.unused) == (tuple(missing), ())


# --- the past, where retention has deleted the start of the log


def test_a_past_view_starts_at_the_newest_checkpoint_before_it(past):
    expected = {at: past.whole(at) for at in range(past.end)}
    past.delete(past.begins[0])
    for at in range(past.ends[0], past.end):
        view = World.at(offset={0: at})
        assert view.log_start_missing == ()
        assert digest(view.partitions[0]) == digest(expected[at])
        assert view.partitions[0].keys[OWNED].owner.client_id == "a"


def test_offsets_before_every_checkpoint_are_unknown(past):
    past.delete(past.begins[0])
    for at in (0, past.begins[0], past.ends[0] - 1):
        view = World.at(offset={0: at})
        assert view.log_start_missing == (0,)
        with pytest.raises(LogUnreadable, match=r"partitions \[0\] begins above"):
            view.require_known([0])
        with pytest.raises(LogUnreadable):
            view.config()
        view.require_known([1])


def test_an_unrequested_partition_does_not_count_as_unknown(past):
    past.delete(past.begins[0])
    assert World.at(offset={}).log_start_missing == ()


def test_a_view_of_a_past_time_starts_at_a_checkpoint_before_it(past):
    times = {each.offset: each.timestamp_ms for each in past.entries()}
    at_ms = times[past.ends[1]]
    expected = past.whole(max(o for o, ms in times.items() if ms <= at_ms))
    past.delete(past.begins[0])
    view = World.at(time_ms=at_ms)
    assert digest(view.partitions[0]) == digest(expected)
    assert World.at(time_ms=times[past.begins[0]] - 1).log_start_missing == (0,)


def test_a_complete_log_is_folded_from_its_start(past):
    view = World.at(offset={0: 3})
    assert view.log_start_missing == ()
    assert digest(view.partitions[0]) == digest(past.whole(3))


def test_unused_partitions_have_an_empty_state_in_a_scan(past):
    cluster = past.cluster
    cluster.kafka.add_partitions("__marshal", 2)
    for t in (1, 2):
        write(cluster, b"x", t)
        cluster.kafka.delete_records(cluster.place(t), before=1)
    write(cluster, b"y", 2)
    expected = digest(fold(cluster))
    for deleted in (0, past.begins[0]):
        past.delete(deleted)
        with LogScan() as scan:
            restored = scan.restore()
            assert not any(each.is_log_start_missing for each in restored.values())
            assert restored[1].world == WorldState(1, next_offset=1)
            for t, each in scan:
                apply(restored[t].world, each)
        assert digest(restored[0].world) == expected
        assert restored[2].world.next_offset == 2
    write(cluster, fence_to(cluster, 2))
    with LogScan() as scan:
        restored = scan.restore()
        assert [each.is_log_start_missing for each in restored.values()] == [0, 1, 0]


def test_a_scan_begins_at_the_first_checkpoint_that_remains(past):
    expected = digest(fold(past.cluster))
    past.delete(past.begins[0])
    with LogScan() as scan:
        restored = scan.restore()[0]
        assert restored.world.next_offset == past.begins[0] + 1
        for _, each in scan:
            apply(restored.world, each)
    assert digest(restored.world) == expected
    past.delete(past.begins[1] + 1)
    with LogScan() as scan:
        assert scan.restore()[0].is_log_start_missing


def test_losses_begin_at_the_first_checkpoint_that_remains(past):
    past.delete(past.begins[0])
    found = Losses.open()
    assert found.began_at == {0: past.begins[0] + 1}
    assert found.world.partitions[0].keys[OWNED].owner.client_id == "a"
    past.delete(past.begins[1] + 1)
    with pytest.raises(LogUnreadable, match="marshal doctor"):
        Losses.open()


class WallClock(SystemClock):
    """A wall clock with a given time."""

    def __init__(self, begin_ms):
        super().__init__()
        self.at_ms = begin_ms

    def wall_ms(self):
        return self.at_ms


@pytest.mark.parametrize(
    "view",
    [
        lambda: World.open(state_dir=""),
        lambda: Losses.open().world,
        lambda: GroupHistory.open(group_id="g").world,
        lambda: KeyHistory.open(key=OWNED),
    ],
    ids=["world", "losses", "group", "key"],
)
def test_owners_are_judged_at_the_time_of_the_log_end_query(past, monkeypatch, view):
    """A live owner does not become stale because reading takes long."""
    last_ms = fold(past.cluster).append_time_ms
    clock = WallClock(last_ms + 1)

    def open_slowly(*_, **__):
        log = past.open()
        poll = log.poll

        def poll_slowly(timeout_ms):
            clock.at_ms += 3_600_000
            return poll(timeout_ms)

        log.poll = poll_slowly
        return log

    patch_open(monkeypatch, open_slowly)
    for module in (log_scan, world_view):
        monkeypatch.setattr(module, "SystemClock", lambda: clock)
    found = view()
    assert found.read_at_ms == last_ms + 1
    if isinstance(found, World):
        assert found.elapsed_ms(0) == 1
    else:
        assert found.state == "owned"


def test_a_watch_begins_at_the_first_checkpoint_that_remains(past, monkeypatch):
    expected = digest(fold(past.cluster))
    past.delete(past.begins[0])
    monkeypatch.setattr(watch, "open_coordination_log", past.open)
    with WorldWatch.open() as watching:
        watching.catch_up(30_000)
        assert digest(watching.world().partitions[0]) == expected
    past.delete(past.begins[1] + 1)
    with WorldWatch.open() as watching:
        watching.catch_up(30_000)
        assert watching.world().log_start_missing == (0,)


# --- reading a part of a complete log


def test_a_scan_since_a_moment_begins_at_the_newest_checkpoint_before_it(past):
    expected = digest(fold(past.cluster))
    times = {each.offset: each.timestamp_ms for each in past.entries()}
    for since, begun in (
        (Since(offsets={0: past.end}), past.begins[1] + 1),
        (Since(offsets={0: past.ends[1]}), past.begins[0] + 1),
        (Since(offsets={0: past.begins[0]}), 0),
        (Since(offsets={}), 0),
        (Since(time_ms=times[past.ends[1]]), past.begins[0] + 1),
        (Since(time_ms=times[past.begins[0]]), 0),
        (Since(time_ms=times[past.end - 1] + 1), past.begins[1] + 1),
        (Since(time_ms=times[past.end - 1] + 1, fits=lambda _: False), 0),
    ):
        with LogScan() as scan:
            restored = scan.restore(since=since)[0]
            assert restored.world.next_offset == begun
            for _, each in scan:
                apply(restored.world, each)
        assert digest(restored.world) == expected


def test_a_scan_since_a_moment_ends_at_the_moment_of_its_view(past):
    expected = digest(past.whole(past.ends[1] - 1))
    with LogScan() as scan:
        scan.until(offset={0: past.ends[1] - 1})
        restored = scan.restore(since=Since(offsets={0: past.end}))[0]
        assert restored.world.next_offset == past.begins[0] + 1
        for _, each in scan:
            apply(restored.world, each)
    assert digest(restored.world) == expected


def test_a_scan_of_selected_entries_reads_no_others(past):
    for first, last in ((3, None), (3, 5), (0, 2), (past.end + 5, None)):
        with LogScan() as scan:
            scan.select(0, first=first, last=last)
            found = [each.offset for _, each in scan]
        end = past.end if last is None else last + 1
        assert [at for at in found if at >= first] == list(range(first, end))
        assert min(found, default=first) >= first
    with LogScan() as scan:
        scan.select(1)
        assert list(scan) == []


def test_losses_since_a_time_begin_before_claims_open_at_that_time(past):
    times = {each.offset: each.timestamp_ms for each in past.entries()}
    latest = max(times.values())
    # The only claim is earlier than both checkpoints, so all of the log is read.
    found = Losses.open(since_ms=latest + 1)
    assert found.began_at == {}
    assert found.lost == Losses.open().lost
    past.delete(past.begins[0])
    assert Losses.open(since_ms=latest + 1).began_at == {0: past.begins[0] + 1}
    # No claim of another group was open.
    assert Losses.open(since_ms=latest + 1, group_id="x").began_at == {}


# --- while the partition count changes (PROTOCOL 10)

DIRECTIONS = [pytest.param(4, 8, id="growing"), pytest.param(8, 4, id="shrinking")]


class Steps:
    """A whole change; ``times`` and ``ends`` are the moments after each step."""

    def __init__(self, patch, before, after, **settings):
        self.change = change = Change(before, after, **settings)
        (self.key,), (self.stays,) = change.moving(), change.staying()
        self.times, self.ends = [], []
        change.claimed(self.key, self.stays)
        self._step()
        change.fence()
        self._step()
        change.released(self.key, position=7)
        self._step()
        change.imported(self.key)
        self._step()
        change.reclaimed(self.key)
        change.done()
        self._step()
        change.final()
        self._step()
        opened(patch, change)

    def _step(self):
        """Note the moment, and advance all partitions by a second."""
        logs = self.change.logs
        self.times.append(max(log.now_ms for log in logs))
        self.ends.append([len(log.entries) for log in logs])
        now_ms = self.times[-1] + 1_000
        for log in logs:
            log.now_ms = now_ms

    @property
    def places(self):
        """The source and the target of the key that moves."""
        pair = self.change.place(self.key), self.change.target(self.key)
        return tuple(log.state.partition for log in pair)


SHOWN = [("c1", None), ("c1", "draining"), (None, "final"), (None, None), ("c2", None)]
"""Owner of the key that moves, and how far its move is, after each step."""


@pytest.mark.parametrize(("before", "after"), DIRECTIONS)
@pytest.mark.parametrize("has_key", [False, True])
def test_a_past_view_shows_a_key_once_at_every_step_of_a_change(
    monkeypatch, before, after, has_key
):
    steps = Steps(monkeypatch, before, after)
    source, target = steps.places
    where = [source, source, source, target, target, target]
    for time_ms, place, (owner, move) in zip(
        steps.times, where, [*SHOWN, SHOWN[-1]], strict=True
    ):
        world = World.at(time_ms=time_ms, key=steps.key if has_key else None)
        state = world.state_of(steps.key)
        assert world.partition_of(steps.key) == state.partition == place
        found = state.keys[steps.key].owner
        assert (None if found is None else found.client_id) == owner
        assert world.moving_to(steps.key) == (None if move is None else (target, move))
        shown = [key for key, _ in world.claims("g")]
        assert shown.count(steps.key) == 1
        assert world.log_start_missing == ()
        if not has_key:
            assert steps.stays in shown
            world.config()


@pytest.mark.parametrize(("before", "after"), DIRECTIONS)
def test_a_key_is_shown_at_an_offset_of_its_old_or_new_partition(
    monkeypatch, before, after
):
    steps = Steps(monkeypatch, before, after)
    source, target = steps.places
    key = steps.key
    old = World.at(offset={source: steps.ends[0][source] - 1}, key=key)
    assert old.state_of(key).keys[key].owner.client_id == "c1"
    assert old.partition_of(key) == source
    new = World.at(offset={target: steps.ends[4][target] - 1}, key=key)
    assert new.state_of(key).keys[key].owner.client_id == "c2"
    plain = World.at(offset=steps.ends[4][target] - 1, key=key)
    assert plain.partition_of(key) == target
    assert plain.state_of(key).keys[key].owner.client_id == "c2"


def test_a_past_view_before_the_first_config_has_no_claims(monkeypatch):
    steps = Steps(monkeypatch, 4, 8)
    world = World.at(time_ms=1, key=steps.key)
    assert world.partition_of(steps.key) == steps.places[0]
    assert world.state_of(steps.key) is None
    assert world.moving_to(steps.key) is None
    assert world.claims() == []
    with pytest.raises(TopicMisconfigured):
        World([Log(configured=False).state], {}).partition_of(steps.key)


def test_a_moved_key_is_found_if_partition_0_has_no_fence_yet(monkeypatch):
    """Clocks of leaders differ: partition 0 is read up to before its fence."""
    change = Change(4, 8)
    (key,) = change.moving()
    change.claimed(key)
    change.released(key)
    change.logs[0].now_ms += 60_000
    change.fence()
    change.imported(key)
    change.done()
    change.final()
    opened(monkeypatch, change)
    source, target = change.place(key).state, change.target(key).state
    assert source.partition, "the test is about another partition than 0"
    world = World.at(time_ms=START_MS, key=key)
    assert [each.partition for each in world.partitions] == sorted(
        (source.partition, target.partition)
    )
    assert world.partition_of(key) == target.partition


@pytest.mark.parametrize(("before", "after"), DIRECTIONS)
def test_a_current_view_is_valid_at_every_step_of_a_change(before, after):
    change = Change(before, after, spare=2)

    def world():
        return World(change.states, {}, cluster_id="cluster")

    (key,) = change.moving()
    change.claimed(key)
    assert world().config().partition_count == before
    for t in range(max(before, after)):
        change.fence(t)
        assert world().config().partition_count == after
        assert world().partition_of(key) == change.place(key).state.partition
    change.released(key)
    change.imported()
    assert world().partition_of(key) == change.target(key).state.partition
    change.done()
    for t in range(max(before, after)):
        change.final(t)
        assert world().config().partition_count == after
        assert [each for each, _ in world().claims()] == [key]


def test_partition_0_without_its_fence_is_not_a_torn_format():
    change = Change(2, 4)
    change.fence()
    behind = Log(0, k=2, level=2)
    world = World([behind.state, *change.states[1:]], {})
    assert world.config().partition_count == 2
    ahead = Log(1, k=2, level=2)
    ahead.append(config(2, era=2, k=2, level=2))
    assert World([behind.state, ahead.state], {}).config().generation == 1
    other = Log(1, k=2, level=2, format_id=b"f" * 16)
    with pytest.raises(TopicMisconfigured, match="torn_format"):
        World([behind.state, other.state], {}).config()


def test_settings_of_a_group_are_those_of_its_current_home():
    change = Change(2, 4)
    group = group_at(1, 2, to_home=3, to_count=4)
    change.logs[1].append(settings(group=group, policy="planner"))

    def policy():
        return World(change.states, {}).settings(group).policy

    assert policy() == "planner"
    change.fence()
    assert policy() == "planner"
    moved = layout_groups(imported_settings(group, policy="planner"), source=1)
    assert change.logs[3].outcome_of(moved) == "group_imported"
    change.logs[3].append(layout_done(0, source=1))
    change.logs[3].append(settings(2, group=group, policy="fair"))
    assert policy() == "fair"
    assert World(change.states, {}).settings("nobody").generation == 0


def test_members_of_both_homes_are_listed_once():
    change = Change(2, 4)
    group = group_at(1, 2, to_home=3, to_count=4)
    for name in ("c1", "c2"):
        change.logs[1].append(member(name, group=group))
    change.fence()
    change.logs[1].append(b"", after=10)
    change.logs[3].append(member("c2", group=group, seq=1))
    change.logs[3].append(member("c3", group=group))
    found = World(change.states, {}).members(group)
    assert [(m.record.client_id, s.partition) for s, m in found] == [
        ("c1", 1),
        ("c2", 3),
        ("c3", 3),
    ]
    assert World(change.states, {}).members("other") == []
    assert len(World(change.states, {}).members()) == 3


def test_handoffs_of_a_key_that_moves_are_shown_once():
    change = Change(2, 4)
    (key,) = change.moving()
    (epoch,) = change.claimed(key)
    change.place(key).append(offer(epoch, key=key))
    change.fence()
    assert len(World(change.states, {}).handoffs()) == 1
    change.tick(3 * H)
    change.imported(key)
    assert World(change.states, {}).handoffs() == []
