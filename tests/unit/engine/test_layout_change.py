"""How members take part in a change of the partition count (PROTOCOL 10)."""

from collections import Counter
from functools import partial

import msgspec
import pytest
from countkit import (
    Reading,
    commit_at_an_earlier_home,
    fence_to,
    is_over,
    level_two,
    moving,
    owners,
    resize,
    worlds,
)
from enginekit import (
    ALO,
    AMO,
    HARD_MS,
    H,
    fold,
    held_by,
    lines,
    spec,
    write,
)
from logkit import (
    OP,
    direct,
    imported,
    layout_import,
    member,
    settings,
)

from kafka_marshal.engine import session
from kafka_marshal.engine.placement import Placement
from kafka_marshal.errors import ConfigurationError, CoordinationError
from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.records import (
    ClaimingPartition,
    LayoutDone,
    LayoutFence,
    LayoutFinal,
    LayoutImport,
    Member,
    ReleasingPartition,
)
from kafka_marshal.protocol.snapshot import to_bytes
from kafka_marshal.protocol.types import Key
from simulator.fakestore import AppendFate


def fleet(names="ab", before=2, *, delivery=ALO, records=20, **rest):
    """Return a cluster whose nodes hold all eight keys, and read them."""
    cluster = level_two(before, records=[records] * 8)
    readings = [Reading(cluster, name, delivery=delivery, **rest) for name in names]
    share = 8 // len(names)
    cluster.run_until(lambda: all(held_by(r.node, share)() for r in readings), 5 * H)
    return cluster, readings


def run_until_over(cluster, readings, *, generation=2, within_ms=4 * H):
    cluster.run_until(
        lambda: goes_on(readings) and is_over(cluster, generation), within_ms
    )


def goes_on(readings):
    for reading in readings:
        reading.step()
    return True


def of_kind(cluster, kind, effect=None):
    """Return the partition and line of each record of a kind."""
    return [
        (t, line)
        for t in range(len(cluster.kafka.topic("__marshal").partitions))
        for line in lines(cluster, t)
        if isinstance(line.record, kind)
        and (effect is None or line.transition.effect == effect)
    ]


@pytest.mark.parametrize("delivery", [ALO, AMO])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 8), (1, 2)])
def test_moving_keys_keep_their_owner_and_their_position(before, after, delivery):
    cluster, readings = fleet(before=before, delivery=delivery)
    goes_on(readings)
    who = owners(cluster)
    moved = moving(before, after)
    assert moved
    tokens = {
        key: reading.node.session.holdings[key].claim.token
        for reading in readings
        for key in reading.node.held
    }
    resize(cluster, after)
    run_until_over(cluster, readings)
    cluster.run(H)
    goes_on(readings)
    assert owners(cluster) == who
    for reading in readings:
        assert reading.lost == []
        for key, holding in reading.node.held.items():
            assert holding.coordinator == place_of(key, partition_count=after)
            assert (holding.claim.token > tokens[key]) == (key in moved)
            assert (holding.claim.token == tokens[key]) == (key not in moved)
    seen = sorted(each for reading in readings for each in reading.offsets)
    assert seen == [(n, offset) for n in range(8) for offset in range(20)]


def test_each_moving_key_costs_one_release_and_one_claim():
    cluster, readings = fleet()
    goes_on(readings)
    cluster.run(200)
    count = len(of_kind(cluster, ClaimingPartition))
    released = len(of_kind(cluster, ReleasingPartition))
    resize(cluster, 4)
    run_until_over(cluster, readings)
    moved = len(moving(2, 4))
    assert len(of_kind(cluster, ClaimingPartition)) == count + moved
    assert len(of_kind(cluster, ReleasingPartition)) == released + moved
    assert len(of_kind(cluster, LayoutImport, "imported")) == moved
    assert len(of_kind(cluster, LayoutFence, "layout_fenced")) == 4
    assert len(of_kind(cluster, LayoutDone, "layout_done")) == 2
    assert len(of_kind(cluster, LayoutFinal, "layout_final")) == 4


def test_the_owner_claims_a_moved_key_within_round_trips():
    cluster, (reading,) = fleet("a")
    goes_on([reading])
    fence = fence_to(cluster, 4)
    for t in range(4):  # as by an admin that stays alive
        write(cluster, fence, t)
    at_ms = cluster.clock.now_ms()
    ours = dict.fromkeys(range(8), "a")
    cluster.run_until(lambda: goes_on([reading]) and owners(cluster) == ours, H)
    assert cluster.clock.now_ms() - at_ms <= 200


def test_callbacks_report_the_loss_and_the_claim_of_moving_keys():
    cluster, (reading,) = fleet("a")
    goes_on([reading])
    reading.seen.clear()
    resize(cluster, 4)
    run_until_over(cluster, [reading])
    goes_on([reading])
    moved = {key.topic_partition for key in moving(2, 4)}
    assert {each for what, each in reading.seen if what == "lost"} == moved
    assert {each for what, each in reading.seen if what == "claimed"} == moved


def test_uncommitted_records_delay_the_move_of_their_key_alone():
    cluster, (reading,) = fleet("a")
    (slow, *others) = moving(2, 4)
    reading.skipped = {slow.partition}  # it never commits these
    goes_on([reading])
    resize(cluster, 4)
    holdings = reading.node.session.holdings

    def have_moved():
        goes_on([reading])
        return all(
            key in reading.node.held
            and holdings[key].coordinator == place_of(key, partition_count=4)
            for key in others
        )

    cluster.run_until(have_moved, HARD_MS // 2)
    source = place_of(slow, partition_count=2)
    assert slow in reading.node.held
    assert holdings[slow].coordinator == source
    # As in a pause, its claim ends with the lease; the next starts at the position.
    run_until_over(cluster, [reading])
    assert owners(cluster)[slow.partition] == "a"
    assert cluster.nodes[0].session.holdings[slow].position == 0


def test_keys_of_a_dead_owner_are_taken_over_and_moved():
    cluster, readings = fleet()
    goes_on(readings)
    dead, alive = readings
    cluster.run(100)
    cluster.crash(dead.node)
    resize(cluster, 4)
    at_ms = cluster.clock.now_ms()
    cluster.run_until(lambda: goes_on([alive]) and len(alive.node.held) == 8, 4 * H)
    assert cluster.clock.now_ms() - at_ms <= 2 * H + H // 2
    run_until_over(cluster, [alive], within_ms=12 * H)
    assert owners(cluster) == dict.fromkeys(range(8), "b")


def test_keys_of_a_dead_owner_on_an_idle_partition_are_taken_over():
    """Only members that wait append there: a fence, to advance log time."""
    cluster, (dead,) = fleet("a", before=4)
    goes_on([dead])
    cluster.crash(dead.node)
    resize(cluster, 2)
    alive = Reading(cluster, "b")
    cluster.run_until(lambda: goes_on([alive]) and len(alive.node.held) == 8, 5 * H)
    run_until_over(cluster, [alive], within_ms=12 * H)
    assert owners(cluster) == dict.fromkeys(range(8), "b")


def test_keys_without_an_owner_are_imported_with_their_positions():
    cluster, (reading,) = fleet("a")
    goes_on([reading])
    reading.node.leave()
    cluster.run_until(lambda: reading.node.has_left, H)
    cluster.fill("other", [1])
    later = Reading(cluster, "b", "other")
    free = [owner for owner in owners(cluster).values() if owner is None]
    assert len(free) == 8
    resize(cluster, 4)
    run_until_over(cluster, [later])
    again = Reading(cluster, "c")
    cluster.run_until(lambda: goes_on([again]) and len(again.node.held) == 8, H)
    goes_on([again])
    assert again.offsets == []  # the positions were imported


def test_keys_of_a_new_topic_are_claimed_during_a_change():
    cluster, (reading,) = fleet("a", records=5)
    goes_on([reading])
    cluster.fill("u", [3] * 8)
    resize(cluster, 4)
    other = Reading(cluster, "b", "u")
    cluster.run_until(
        lambda: goes_on([reading, other]) and len(other.node.held) == 8, 2 * H
    )
    assert not is_over(cluster)
    run_until_over(cluster, [reading, other])
    goes_on([other])
    assert len(other.offsets) == 24
    fences = dict(of_kind(cluster, LayoutFence, "layout_fenced"))
    dones = {
        (t, line.record.source): line
        for t, line in of_kind(cluster, LayoutDone, "layout_done")
    }
    claims = [
        (t, line)
        for t, line in of_kind(cluster, ClaimingPartition)
        if line.record.topic == "u"
    ]
    assert len(claims) == 8, "none was too early"
    for t, line in claims:
        # A key that moves may be in its source until the target is done with that.
        key = Key("g", "u", line.record.partition)
        source = place_of(key, partition_count=2)
        awaited = fences[t] if source == t else dones[t, source]
        assert line.transition.effect == "claimed"
        assert t == place_of(key, partition_count=4)
        assert line.offset > awaited.offset


def test_a_member_that_starts_during_the_change_gets_its_share():
    cluster, (reading,) = fleet("a")
    goes_on([reading])
    resize(cluster, 4)
    late = Reading(cluster, "b")
    cluster.run_until(
        lambda: goes_on([reading, late]) and len(late.node.held) == 4, 5 * H
    )
    run_until_over(cluster, [reading, late])
    assert reading.lost == late.lost == []


def test_a_member_cut_off_during_the_change_gets_its_share_later():
    cluster, readings = fleet()
    goes_on(readings)
    cut, other = readings
    cut.node.cut(is_cut=True)
    resize(cluster, 4)
    cluster.run_until(lambda: goes_on([other]) and len(other.node.held) == 8, 6 * H)
    run_until_over(cluster, [other], within_ms=12 * H)
    cluster.run(H)
    cut.node.cut(is_cut=False)
    cluster.run_until(lambda: goes_on(readings) and len(cut.node.held) == 4, 10 * H)
    assert cut.node.engine.failure is None
    assert sorted(cut.node.engine.context.replicas) == [0, 1, 2, 3]


def test_settings_and_directives_of_groups_move_with_their_home():
    cluster, readings = fleet(before=1)
    until = cluster.clock.wall_ms() + 10**7
    for group in ("g1", "g2", "g3", "g4"):
        write(cluster, settings(group=group, grace_ms=5), 0)
        write(cluster, direct("c9", group=group, until=until), 0)
    write(cluster, direct("c9", group="marshal", until=until), 0)
    cluster.run(40)
    resize(cluster, 2)
    run_until_over(cluster, readings)
    states = [fold(cluster, t) for t in range(2)]
    for group in ("g1", "g2", "g3", "g4"):
        home = home_partition(group, partition_count=2)
        assert states[home].settings_of(group).grace_ms == 5
        assert len(states[home].groups[group].directives) == 1
        assert group not in states[1 - home].groups
    assert {len(each.groups["marshal"].directives) for each in states} == {1}


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 8)])
def test_all_keys_have_owners_under_plans_after_a_change(before, after):
    cluster = level_two(before, records=[20] * 8)
    home = home_partition("g", partition_count=before)
    write(cluster, settings(policy="planner"), home)
    readings = [Reading(cluster, name) for name in "abc"]
    cluster.run_until(
        lambda: goes_on(readings) and None not in owners(cluster).values(), 9 * H
    )
    cluster.run(2 * H)
    who = owners(cluster)
    resize(cluster, after)
    run_until_over(cluster, readings, within_ms=9 * H)
    assert owners(cluster) == who
    late = Reading(cluster, "d")
    readings.append(late)
    cluster.run_until(lambda: goes_on(readings) and late.node.held, 9 * H)
    assert None not in owners(cluster).values()
    assert all(each.node.session.failure is None for each in readings)
    home = home_partition("g", partition_count=after)
    state = fold(cluster, home)
    assert state.settings_of("g").policy == "planner"
    assert state.plan_generation("g") > 0


def test_repeated_changes_neither_lose_nor_repeat_records():
    cluster, readings = fleet(records=40)
    for number, count in enumerate((4, 8, 2, 8), start=2):
        resize(cluster, count, op=bytes([number]) * 16, generation=number)
        run_until_over(cluster, readings, generation=number, within_ms=6 * H)
        goes_on(readings)
        cluster.run(100)
    goes_on(readings)
    seen = sorted(each for reading in readings for each in reading.offsets)
    assert seen == [(n, offset) for n in range(8) for offset in range(40)]
    assert None not in owners(cluster).values()
    assert all(reading.node.engine.failure is None for reading in readings)


def test_members_announce_the_new_generation_to_the_homes_under_both_counts():
    before, after = (home_partition("g1", partition_count=k) for k in (2, 4))
    assert before != after
    cluster = level_two(2, records=[20] * 8)
    node = cluster.node("a", group_id="g1", spec=spec())
    cluster.run_until(held_by(node, 8), 5 * H)

    def announced():
        return [
            (t, line.record.labels["layout"])
            for t, line in of_kind(cluster, Member, "member")
        ]

    assert set(announced()) == {(before, "1")}
    resize(cluster, 4)
    cluster.run_until(lambda: is_over(cluster), 4 * H)
    assert set(announced()) == {(before, "1"), (before, "2"), (after, "2")}
    counts = Counter(announced())
    cluster.run(H)
    assert (Counter(announced()) - counts).keys() == {(after, "2")}
    members = fold(cluster, after).live_members("g1")
    assert [member.record.client_id for member in members] == ["a"]


def test_a_partition_that_begins_again_ends_the_claims_of_its_keys_alone():
    """Any writer can do that; no member does while the keys are in use."""
    cluster, (reading,) = fleet("a")
    held = dict(reading.node.held)
    cluster.fates["a"] = AppendFate(delay_ms=2 * H)  # no beat is ignored before
    begun = msgspec.structs.replace(fence_to(cluster, 2), from_count=1)
    write(cluster, begun, 1)
    cluster.run(H // 2)
    assert reading.node.engine.failure is None
    endings = {
        holding.coordinator: holding.claim.ending and holding.claim.ending.reason
        for holding in held.values()
    }
    assert endings == {0: None, 1: "fenced"}


def test_a_lost_fence_of_partition_0_is_appended_again():
    cluster, readings = fleet()
    goes_on(readings)
    cluster.run(100)
    end = cluster.kafka.log(cluster.place(0)).end
    resize(cluster, 4)
    cluster.run_until(lambda: all(worlds(cluster)[t].layout for t in range(4)), H)
    cluster.kafka.truncate(cluster.place(0), end=end, leader=1)
    worlds(cluster).clear()
    run_until_over(cluster, readings, within_ms=20 * H)
    cluster.run_until(
        lambda: goes_on(readings) and None not in owners(cluster).values(), 8 * H
    )


def test_no_key_is_claimed_after_two_changes_of_one_generation():
    cluster, (reading,) = fleet("a")
    goes_on([reading])
    before = cluster.config
    fence = fence_to(cluster, 4)
    cluster.config = before
    other = fence_to(cluster, 8, op=b"other".ljust(16, b"."))
    write(cluster, fence, 0)
    write(cluster, other, 1)
    cluster.run(H)
    (event,) = reading.node.observer.named("layout_torn")
    assert event.fields["generation"] == 2
    count = len(of_kind(cluster, ClaimingPartition))
    cluster.node("b", spec=spec())
    cluster.run(4 * H)
    assert len(of_kind(cluster, ClaimingPartition)) == count


def test_added_partitions_are_looked_up_until_the_cluster_shows_them():
    cluster, (reading,) = fleet("a")
    goes_on([reading])
    fence = fence_to(cluster, 4)
    log, asked = reading.node.log, []
    read_added = log.read_added

    def late(count, *, timeout_ms):
        asked.append(count)
        if len(asked) == 1:
            raise ConfigurationError("no such certificate", setting="ssl")
        log.cut = len(asked) < 3
        try:
            read_added(count, timeout_ms=timeout_ms)
        finally:
            log.cut = False

    log.read_added = late
    write(cluster, fence, 0)
    run_until_over(cluster, [reading], within_ms=6 * H)
    assert asked[:3] == [4, 4, 4]
    failed = reading.node.observer.named("log_poll_failed")
    kinds = [type(each.fields["error"]) for each in failed[:2]]
    assert kinds == [ConfigurationError, CoordinationError]


def change_without(late, cluster, reading):
    """Cut a member off while logs lose their last record and the count becomes 4."""
    cluster.run(H)
    late.log.cut = True
    for t in range(2):
        end = cluster.kafka.log(cluster.place(t)).end
        cluster.kafka.truncate(cluster.place(t), end=end - 1, leader=1)
    resize(cluster, 4)
    run_until_over(cluster, [reading], within_ms=40 * H)


def test_a_process_reads_sources_added_while_it_was_cut_off():
    """The count grew meanwhile, and shrinks again: the Config names fewer partitions.

    Logs were truncated before, so the process first reads them to their ends.
    """
    cluster, (reading,) = fleet("a")
    late = cluster.node("b")
    change_without(late, cluster, reading)
    reading.node.log.cut = True
    fence = fence_to(cluster, 2, generation=3)
    for t in range(4):
        write(cluster, fence, t)
    late.log.cut = False
    cluster.run_until(lambda: len(late.engine.context.replicas) == 4, H)
    cluster.run_until(lambda: late.log.partition_count == 4, H)
    end = cluster.kafka.log(cluster.place(3)).end
    cluster.run(H)
    cluster.kafka.truncate(cluster.place(3), end=end - 1, leader=5)
    worlds(cluster).clear()
    reading.node.log.cut = False
    run_until_over(cluster, [reading], generation=3, within_ms=40 * H)
    assert late.engine.failure is None


def test_an_import_read_before_the_engine_is_ready_causes_no_failure():
    cluster, (reading,) = fleet("a")
    fence = fence_to(cluster, 4)
    for t in range(4):
        write(cluster, fence, t)
    late = cluster.node("b", spec=spec())
    late.log.lags_ms[0] = 2 * H
    cluster.run_until(
        lambda: goes_on([reading]) and of_kind(cluster, LayoutImport, "imported"), H
    )
    late.step()
    assert not late.engine.is_ready
    assert late.engine.failure is None
    late.log.lags_ms.clear()
    claims_of = partial(of_kind, cluster, ClaimingPartition)
    assert {line.record.client_id for _, line in claims_of()} == {"a"}
    run_until_over(cluster, [reading], within_ms=20 * H)
    assert late.engine.is_ready
    cluster.run_until(lambda: goes_on([reading]) and held_by(late, 4)(), 5 * H)
    assert {line.transition.effect for _, line in claims_of()} == {"claimed"}
    assert reading.lost == []


def test_a_member_follows_the_newest_count_while_a_partition_has_no_config():
    """It was cut off during the change, and a partition has since lost all entries."""
    cluster, (reading,) = fleet("a")
    late = cluster.node("b", spec=spec())
    change_without(late, cluster, reading)
    cluster.kafka.truncate(cluster.place(3), end=0, leader=5)
    late.log.cut = False
    cluster.run(H)
    assert late.engine.context.settled.partition_count == 4
    cluster.run(2 * H)
    reasons = {
        line.transition.reason for _, line in of_kind(cluster, ClaimingPartition)
    }
    assert reasons.isdisjoint({"wrong_partition", "no_config"})
    assert worlds(cluster)[3].config == cluster.config


def test_a_member_without_the_start_of_a_log_imports_nothing():
    cluster, (reading,) = fleet("a")
    goes_on([reading])
    write(cluster, b"x", 1)
    cluster.kafka.delete_records(cluster.place(1), before=2)
    blind = cluster.node("b")
    resize(cluster, 4)
    cluster.run(2 * H)
    assert blind.engine.log_start_missing == (1,)
    senders = {line.record.client_id for _, line in of_kind(cluster, LayoutImport)}
    assert senders <= {"a"}


def test_a_member_starts_despite_partitions_of_an_abandoned_change():
    """Retention has deleted its probes; no count uses these partitions."""
    cluster, (reading,) = fleet("a")
    goes_on([reading])
    fence_to(cluster, 4)
    for t in (2, 3):
        write(cluster, member("admin"), t)
        cluster.kafka.delete_records(cluster.place(t), before=1)
    later = cluster.node("b")
    cluster.run(H)
    assert later.engine.is_ready
    assert later.engine.log_start_missing == ()


def test_a_member_is_not_ready_without_the_start_of_an_added_partition():
    cluster, _ = fleet("a")
    fence = fence_to(cluster, 4)
    write(cluster, member("admin"), 3)
    cluster.kafka.delete_records(cluster.place(3), before=1)
    write(cluster, fence, 0)
    blind = cluster.node("b")
    cluster.run(H)
    assert not blind.engine.is_ready
    assert blind.engine.log_start_missing == (3,)


def given_up(cluster, *partitions):
    """Leave an abandoned change to four; retention has deleted these probes."""
    fence_to(cluster, 4)
    cluster.config = fold(cluster, 0).config
    for t in partitions:
        end = write(cluster, member("admin"), t) + 1
        cluster.kafka.delete_records(cluster.place(t), before=end)


def probed(cluster, *partitions):
    """Write the probes of the next change."""
    record = msgspec.structs.replace(
        member("admin", group="marshal"), incarnation=OP, draining=True
    )
    for t in partitions:
        write(cluster, record, t)


def test_a_partition_whose_start_is_missing_begins_with_its_fence():
    """One member has read the deleted entries, one has not, and one starts later."""
    cluster, (early,) = fleet("a")
    fence_to(cluster, 4)
    cluster.config = fold(cluster, 0).config
    cluster.run(H)
    given_up(cluster, 2, 3)
    middle = cluster.node("b")
    cluster.run(H)
    assert middle.engine.is_ready
    probed(cluster, 2, 3)
    resize(cluster, 4)
    run_until_over(cluster, [early])
    later = cluster.node("c")
    cluster.run(H)
    for node in (early.node, middle, later):
        assert node.engine.is_ready
        assert (node.engine.log_start_missing, node.engine.context.rebuilding) == (
            (),
            set(),
        )
    for t in range(4):
        states = [
            to_bytes(node.engine.context.replicas[t].world)
            for node in (early.node, middle, later)
        ]
        assert len(set(states)) == 1
    assert early.lost == []
    (found,) = {e.fields["source"] for e in later.observer.named("restored")}
    assert found == "fence of a partition count change"


def test_members_append_the_fence_to_a_partition_of_unknown_state():
    cluster, (early,) = fleet("a")
    given_up(cluster, 3)
    cluster.crash(early.node)
    other = Reading(cluster, "b")
    cluster.run(H)
    probed(cluster, 2, 3)
    resize(cluster, 4)
    run_until_over(cluster, [other], within_ms=8 * H)
    assert other.node.engine.log_start_missing == ()


def test_an_added_partition_without_its_probe_stays_unknown():
    """The fence may be a repeated one, with imports of keys before it."""
    cluster, _ = fleet("a")
    given_up(cluster, 2, 3)
    probed(cluster, 2, 3)
    resize(cluster, 4)
    cluster.run_until(lambda: is_over(cluster, 2), 4 * H)
    for t in (2, 3):
        cluster.kafka.delete_records(cluster.place(t), before=2)
    blind = cluster.node("b")
    cluster.run(H)
    assert blind.engine.log_start_missing == (2, 3)
    assert not blind.engine.is_ready


def test_a_member_is_not_behind_while_unused_partitions_are_rebuilt():
    cluster, _ = fleet("a")
    given_up(cluster, 2, 3)
    later = cluster.node("b")
    cluster.run(H)
    assert later.engine.context.rebuilding == {2, 3}
    assert not later.engine.context.is_behind
    assert later.engine.rebuilder.missing() == []


def test_an_import_that_differs_from_its_source_is_reported():
    cluster, (reading,) = fleet("a")
    goes_on([reading])
    reading.node.leave()
    cluster.run_until(lambda: reading.node.has_left, H)
    cluster.fill("other", [1])
    later = Reading(cluster, "b", "other")
    resize(cluster, 4)
    key = next(k for k in moving(2, 4) if place_of(k, partition_count=4) == 3)
    place = place_of(key, partition_count=2)
    cluster.run_until(
        lambda: all(worlds(cluster)[t].layout is not None for t in (place, 3)), H
    )
    source = worlds(cluster)[place]
    assert key not in worlds(cluster)[3].keys, "no member has imported it yet"
    item = imported(key, position=1)
    forged = layout_import(item, source=source.partition)
    forged = msgspec.structs.replace(forged, source_offset=source.next_offset)
    write(cluster, forged, 3)
    run_until_over(cluster, [later])
    (found,) = later.node.observer.named("import_diverged")
    fields = found.fields
    assert fields["key"] == str(key)
    assert (fields["partition"], fields["source"]) == (3, source.partition)
    assert fields["why"] == "the source has left the key in another state"


@pytest.mark.parametrize("comes_late", [False, True])
def test_a_claim_in_a_source_without_a_fence_ends_once_the_key_is_imported(comes_late):
    """PROTOCOL 10.9: the log of the source has lost the fence, which it had before."""
    cluster, (reading,) = fleet("a")
    goes_on([reading])
    key = next(k for k in moving(2, 4) if place_of(k, partition_count=4) == 3)
    source, log = place_of(key, partition_count=2), reading.node.log
    if comes_late:
        log.lags_ms = {3: 20}  # it reads all entries of the target at once
    fence = fence_to(cluster, 4)
    write(cluster, fence, 0)
    write(cluster, fence, 3)
    write(cluster, layout_import(imported(key, position=1), source=source), 3)
    assert reading.node.held[key].coordinator == source

    def has_ended():
        return [
            each.fields["ending"].reason
            for each in reading.node.observer.named("claim_ended")
            if each.fields["key"] == key
        ]

    cluster.run_until(has_ended, H)
    assert has_ended() == ["fenced"]
    log.lags_ms.clear()
    run_until_over(cluster, [reading])
    cluster.run_until(lambda: goes_on([reading]) and key in reading.node.held, 4 * H)
    assert reading.node.held[key].coordinator == 3


def lose_the_change(cluster, t):
    """Cut a log back to before the fence of the last change."""
    log = cluster.kafka.log(cluster.place(t))
    fences = [
        each.offset
        for each in log.records
        if isinstance(decode(each.value), LayoutFence)
    ]
    cluster.kafka.truncate(cluster.place(t), end=fences[0], leader=7)
    worlds(cluster).pop(t)


@pytest.mark.parametrize("delivery", [ALO, AMO])
@pytest.mark.parametrize(("before", "after", "lost"), [(2, 4, 0), (2, 4, 1), (4, 2, 1)])
def test_a_partition_that_has_lost_an_ended_change_gets_it_again(
    before, after, lost, delivery
):
    """PROTOCOL 10.9: also from a member that starts later."""
    cluster, readings = fleet(before=before, delivery=delivery, records=4)
    goes_on(readings)
    resize(cluster, after)
    run_until_over(cluster, readings)
    cluster.run_until(lambda: goes_on(readings) and len(owners(cluster)) == 8, H)
    lose_the_change(cluster, lost)
    later = Reading(cluster, "z", delivery=delivery)
    readings.append(later)
    run_until_over(cluster, readings, within_ms=8 * H)
    cluster.run_until(
        lambda: goes_on(readings) and None not in owners(cluster).values(), 4 * H
    )
    assert later.node.engine.failure is None
    assert {each.config.generation for each in worlds(cluster).values()} == {2}


def test_a_commit_at_the_home_before_two_changes_is_resolved():
    """PROTOCOL 8.5: the commit kept the fence out; only that partition resolves it."""
    cluster, group_id, home = commit_at_an_earlier_home()
    node = cluster.node("a")
    cluster.run_until(lambda: is_over(cluster, 3), 6 * H)
    assert worlds(cluster)[home].groups[group_id].verdict.is_resolved
    (resolved,) = node.observer.named("position_resolved")
    assert resolved.fields["outcome"] == "committed"


def alter(cluster, *partitions):
    """Write a Config with another limit; return it."""
    before = cluster.config
    limits = msgspec.structs.replace(before.limits, span=99)
    newest = msgspec.structs.replace(
        before, generation=2, era=before.era + 1, limits=limits
    )
    for t in partitions:
        write(cluster, newest, t)
    return newest


@pytest.mark.parametrize("count", [1, 2])
def test_a_config_that_all_partitions_have_lost_is_written_again(count):
    """PROTOCOL 10.9: by a member that has read it, before anything is claimed there."""
    cluster, (reading,) = fleet("a", before=count)
    ends = [cluster.kafka.log(cluster.place(t)).end for t in range(count)]
    newest = alter(cluster, *range(count))
    cluster.run_until(lambda: reading.node.engine.context.settled == newest, H)
    for t, end in enumerate(ends):
        cluster.kafka.truncate(cluster.place(t), end=end, leader=7)
        worlds(cluster).pop(t)
    cluster.run_until(lambda: goes_on([reading]) and is_over(cluster), 4 * H)
    cluster.run_until(lambda: goes_on([reading]) and held_by(reading.node, 8)(), 4 * H)
    for state in worlds(cluster).values():
        assert state.config == newest
        lost_at, restored_at = ends[state.partition], state.eras[-1][0]
        epochs = {known.epoch for known in state.keys.values()}
        assert epochs.isdisjoint(range(lost_at, restored_at))


def claim_in_between(patch):
    """A key that moves is claimed before it is imported."""
    patch.setattr(Placement, "awaits_import", lambda *_: False)


def keep_what_moves(patch):
    """An owner does not drain moving keys: their claims end with the leases."""
    patch.setattr(session, "is_moving", lambda *_: False)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (claim_in_between, test_each_moving_key_costs_one_release_and_one_claim),
        (keep_what_moves, test_the_owner_claims_a_moved_key_within_round_trips),
    ],
)
def test_a_broken_engine_fails_the_tests_of_moving_keys(monkeypatch, plant, check):
    plant(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        check()
