"""Members of a group with policy ``planner`` write and follow Plans (PROTOCOL 9.2)."""

from collections import Counter

import pytest
import rowkit
from enginekit import H, lines, spec, world, write
from logkit import (
    KEY,
    Log,
    beat,
    claim,
    direct,
    offer,
    pause,
    planned,
    release,
    schedule,
    settings,
)
from logkit import H as INTERVAL_MS
from logkit import settings as group_settings

from kafka_marshal.engine.planning import Debounce, PlanFollower, SettledKeys
from kafka_marshal.engine.replica import Replica
from kafka_marshal.protocol.planner import MemberView
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingPartition,
    Member,
    Plan,
    ReleasingPartition,
)
from kafka_marshal.protocol.settings import NO_SETTINGS, TUNABLES, Settings

ALL = 12


@pytest.fixture
def cluster():
    cluster = world(partitions=1, records=(1,) * ALL)
    write(cluster, settings(policy="planner"))
    return cluster


def start(cluster, *names, group_id="g", **rest):
    return [cluster.node(name, group_id=group_id, spec=spec(**rest)) for name in names]


def counts(cluster):
    return sorted(len(node.held) for node in cluster.nodes)


def balanced(cluster, *held):
    return lambda: counts(cluster) == sorted(held)


def plans(cluster):
    return [line for line in lines(cluster) if isinstance(line.record, Plan)]


def accepted(cluster):
    return [line for line in plans(cluster) if line.transition.effect == "planned"]


def claims(cluster, since=0):
    return [
        line
        for line in lines(cluster)
        if isinstance(line.record, ClaimingPartition) and line.offset >= since
    ]


def end(cluster):
    return lines(cluster)[-1].offset + 1


def test_members_that_start_together_follow_one_plan(cluster):
    start(cluster, "a", "b", "c")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    cluster.run(4 * H)
    assert len(claims(cluster)) == ALL
    assert {line.transition.effect for line in claims(cluster)} == {"claimed"}
    assert len(accepted(cluster)) == 1


def test_a_group_that_does_not_change_writes_no_plan(cluster):
    start(cluster, "a", "b")
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)
    cluster.run(2 * H)
    count = len(plans(cluster))
    cluster.run(20 * H)
    assert len(plans(cluster)) == count


def test_a_change_of_one_group_writes_nothing_for_another(cluster):
    write(cluster, settings(group="other", policy="planner"))
    others = start(cluster, "x", "y", group_id="other")
    start(cluster, "a", "b")
    cluster.run_until(balanced(cluster, 6, 6, 6, 6), 4 * H)
    cluster.run(4 * H)
    since = end(cluster)
    held = [set(node.held) for node in others]
    start(cluster, "c")
    cluster.run_until(balanced(cluster, 4, 4, 4, 6, 6), 4 * H)
    write(cluster, settings(2, policy="planner", debounce_ms=0))
    cluster.crash(cluster.nodes[-1])
    cluster.run_until(lambda: len(cluster.nodes[-2].held) == 6, 4 * H)
    written = Counter(
        (line.record.group_id, type(line.record))
        for line in lines(cluster)
        if line.offset >= since and line.record is not None
    )
    assert written["g", Plan] >= 2
    assert {kind for group, kind in written if group == "other"} == {
        BatchHeartbeat,
        Member,
    }
    assert [set(node.held) for node in others] == held


def test_a_new_member_gets_its_share_by_one_move_of_each_key(cluster):
    start(cluster, "a", "b")
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)
    since = end(cluster)
    start(cluster, "c")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    cluster.run(4 * H)
    assert len(claims(cluster, since)) == 4
    releases = [
        line.record
        for line in lines(cluster)
        if isinstance(line.record, ReleasingPartition)
    ]
    assert {(one.successor, one.reason) for one in releases} == {("c", "planned")}


def test_a_burst_of_joins_causes_one_plan(cluster):
    """Three members that join within a second move each key once."""
    start(cluster, "a")
    cluster.run_until(balanced(cluster, ALL), 4 * H)
    cluster.run(2 * H)
    since, before = end(cluster), len(accepted(cluster))
    for name in ("b", "c", "d"):
        start(cluster, name)
        cluster.run(300)
    cluster.run_until(balanced(cluster, 3, 3, 3, 3), 4 * H)
    cluster.run(4 * H)
    assert len(claims(cluster, since)) == 9
    assert len(accepted(cluster)) == before + 1


def test_planned_keys_move_once_the_new_member_has_warmed_up(cluster):
    start(cluster, "a")
    cluster.run_until(balanced(cluster, ALL), 4 * H)
    b = cluster.node("b")
    b.warming.is_held = True
    b.consume(spec(on_warm=lambda *_: None))
    cluster.run_until(lambda: b.warming.waiting_count == 6, 4 * H)
    count = len(accepted(cluster))
    cluster.run(6 * H)
    # Offered keys are not planned again, however long the warm-up takes.
    assert (counts(cluster), len(accepted(cluster))) == ([0, ALL], count)
    b.warming.run_waiting()
    cluster.run_until(balanced(cluster, 6, 6), 2 * H)
    cluster.run(4 * H)
    assert len(accepted(cluster)) == count


@pytest.fixture
def small_plans(monkeypatch):
    """Let a Plan have one slice, of 1,100 bytes for topics and moves."""
    module = "kafka_marshal.protocol.plans"
    monkeypatch.setattr(f"{module}.PLAN_SLICES_MAX", 1)
    monkeypatch.setattr(f"{module}.FRAME_BYTES_MAX", 1_536 + 1_100)


def test_moves_beyond_the_size_of_a_plan_follow_once_others_are_done(
    cluster, small_plans
):
    start(cluster, "a")
    cluster.run_until(balanced(cluster, ALL), 4 * H)
    others = [cluster.node(name * 200) for name in "bcdef"]
    for node in others:
        node.warming.is_held = True
        node.consume(spec(on_warm=lambda *_: None))
    waiting = [2, 2, 2, 2, 0]
    cluster.run_until(
        lambda: [n.warming.waiting_count for n in others] == waiting, 4 * H
    )
    count = len(accepted(cluster))
    cluster.run(6 * H)
    assert len(accepted(cluster)) == count, "the same was written again"
    for node in others:
        node.warming.is_held = False
        node.warming.run_waiting()
    cluster.run_until(balanced(cluster, *[2] * 6), 6 * H)


def test_coordinating_partitions_too_many_for_a_plan_are_reported(cluster, monkeypatch):
    monkeypatch.setattr("kafka_marshal.protocol.plans.FRAME_BYTES_MAX", 1_536)
    (node,) = start(cluster, "a")
    cluster.run_until(balanced(cluster, ALL), 4 * H)
    cluster.run(6 * H)
    (event,) = node.observer.named("plan_unwritten")
    assert "topic resize" in event.fields["error"]


def test_the_keys_of_a_dead_member_are_planned_and_claimed_once(cluster):
    a, *_ = start(cluster, "a", "b", "c")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    since = end(cluster)
    cluster.crash(a)
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)
    cluster.run(4 * H)
    assert len(claims(cluster, since)) == 4
    assert accepted(cluster)[-1].record.client_id == "b"


def test_a_death_and_a_join_move_as_few_keys_as_possible(cluster):
    a, *_ = start(cluster, "a", "b", "c")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    since = end(cluster)
    cluster.crash(a)
    start(cluster, "d")
    cluster.run_until(balanced(cluster, 4, 4, 4), 6 * H)
    cluster.run(4 * H)
    assert len(claims(cluster, since)) == 4


def test_a_single_free_key_does_not_wait_for_the_debounce_time(cluster):
    nodes = start(cluster, "a", "b", "c")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    cluster.run(2 * H)
    since = end(cluster)
    node = nodes[1]
    key = min(node.held)
    node.session.release(node.held[key], reason="failed")
    took_ms = cluster.run_until(balanced(cluster, 4, 4, 4), H)
    assert took_ms < TUNABLES["debounce_ms"].default // 2
    assert len(claims(cluster, since)) == 1


def test_a_burst_of_members_that_leave_moves_each_key_once():
    """Their ends and releases are read together, also from several partitions."""
    cluster = world(partitions=3, records=(1,) * ALL)
    for t in range(3):
        write(cluster, settings(policy="planner"), t)
    nodes = start(cluster, *"abcdef")
    cluster.run_until(balanced(cluster, 2, 2, 2, 2, 2, 2), 9 * H)
    cluster.run(2 * H)
    begun = [len(lines(cluster, t)) for t in range(3)]
    for node in nodes[:3]:
        node.leave()
        cluster.run(300)
        cluster.nodes.remove(node)
    cluster.run_until(balanced(cluster, 4, 4, 4), 9 * H)
    cluster.run(4 * H)
    found = [
        line
        for t in range(3)
        for line in lines(cluster, t)[begun[t] :]
        if line.transition.effect == "claimed"
    ]
    assert len(found) == 6


def test_the_next_member_in_turn_plans_after_the_first_dies(cluster):
    a, *_ = start(cluster, "a", "b", "c")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    assert {line.record.client_id for line in accepted(cluster)} == {"a"}
    cluster.crash(a)
    start(cluster, "d")
    cluster.run_until(balanced(cluster, 4, 4, 4), 6 * H)
    assert accepted(cluster)[-1].record.client_id == "b"


def test_a_member_that_may_not_plan_writes_no_plan_and_has_no_label(cluster):
    node = cluster.node("a", can_plan=False)
    node.consume(spec())
    start(cluster, "b")
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)
    assert {line.record.client_id for line in plans(cluster)} == {"b"}
    labels = {line.record.client_id: line.record.labels for line in announced(cluster)}
    assert labels == {
        "a": {"layout": "1"},
        "b": {"layout": "1", "plans": "1"},
    }


def announced(cluster):
    return [line for line in lines(cluster) if isinstance(line.record, Member)]


def test_all_keys_are_owned_without_a_member_that_may_plan(cluster):
    for name in ("a", "b"):
        cluster.node(name, can_plan=False).consume(spec())
    cluster.run_until(lambda: sum(counts(cluster)) == ALL, 4 * H)
    assert plans(cluster) == []


def test_without_plans_a_long_interval_delays_no_claim():
    """Keys that no plan names are claimed after 5 s, or twice that."""
    cluster = world(partitions=1, records=(1,) * ALL, h=60_000)
    write(cluster, settings(policy="planner"))
    for name in ("a", "b"):
        cluster.node(name, can_plan=False).consume(spec())
    took_ms = cluster.run_until(lambda: sum(counts(cluster)) == ALL, 12_000)
    assert took_ms >= 5_000


def test_invalid_plans_leave_all_keys_owned_and_balanced(cluster):
    start(cluster, "a", "b")
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)
    generation = len(accepted(cluster))
    far = 2**62
    everything = ("nobody", 0, range(ALL)), ("a", 7, [1]), ("b", 0, [9_999])
    write(cluster, planned(generation, *everything, vector=((far, 0),)))
    write(cluster, planned(0, ("a", 0, range(ALL)), vector=((far, 0),)))
    cluster.run(6 * H)
    assert sum(counts(cluster)) == ALL
    assert counts(cluster) == [6, 6]


def test_a_plan_of_another_number_of_coordinating_partitions_is_void(cluster):
    start(cluster, "a", "b")
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)
    since = end(cluster)
    void = planned(
        len(accepted(cluster)), ("a", 0, range(ALL)), vector=((2**62, 0),) * 2
    )
    write(cluster, void)
    cluster.run(4 * H)
    assert claims(cluster, since) == []


def test_a_drained_member_hands_off_its_keys(cluster):
    start(cluster, "a", "b", "c")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    write(cluster, direct("a", until=cluster.clock.wall_ms() + 99 * H))
    cluster.run_until(balanced(cluster, 0, 6, 6), 4 * H)


def test_no_plan_is_written_while_all_members_are_drained(cluster):
    start(cluster, "a", "b")
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)
    cluster.run(2 * H)
    count = len(plans(cluster))
    for number, name in enumerate(("a", "b")):
        until = cluster.clock.wall_ms() + 99 * H
        write(cluster, direct(name, until=until, op=bytes([number]) * 16))
    cluster.run(4 * H)
    assert len(plans(cluster)) == count
    assert counts(cluster) == [6, 6]


def test_a_new_policy_is_followed_without_a_restart():
    cluster = world(partitions=1, records=(1,) * ALL)
    start(cluster, "a", "b")
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)
    write(cluster, settings(policy="planner"))
    cluster.run(2 * H)
    start(cluster, "c")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    assert accepted(cluster)
    write(cluster, settings(2, policy="fair"))
    start(cluster, "d")
    cluster.run_until(balanced(cluster, 3, 3, 3, 3), 6 * H)
    assert Counter(len(node.held) for node in cluster.nodes) == {3: 4}


def test_claims_max_is_kept_and_uncovered_keys_are_reported(cluster):
    start(cluster, "a", "b", claims_max=5)
    cluster.run_until(balanced(cluster, 5, 5), 4 * H)
    cluster.run(3 * H)
    assert counts(cluster) == [5, 5]
    uncovered = [e for e in cluster.nodes[0].observer.events if "uncovered" in e.name]
    assert uncovered


def restart(cluster, node):
    """Let a member leave as one that restarts does."""
    node.session.restart()
    node.leave()
    cluster.run_until(lambda: node.has_left, H)
    cluster.crash(node)


def test_a_rolling_restart_with_new_names_moves_each_key_once(cluster):
    nodes = start(cluster, "a1", "b1", "c1")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    since = end(cluster)
    for node in nodes:
        restart(cluster, node)
        cluster.run(2 * H)
        name = node.owner.client_id
        labels = {"replaces": name}
        cluster.node(f"{name[0]}2", labels=labels, spec=spec())
        cluster.run_until(balanced(cluster, 4, 4, 4), 2 * H)
        cluster.run(2 * H)
    assert len(claims(cluster, since)) == ALL


def test_a_replacement_that_starts_early_moves_each_key_once(cluster):
    nodes = start(cluster, "a1", "b1", "c1")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    since = end(cluster)
    for node in nodes:
        name = node.owner.client_id
        cluster.node(f"{name[0]}2", labels={"replaces": name}, spec=spec())
        cluster.run(2 * H)
        restart(cluster, node)
        cluster.run_until(balanced(cluster, 4, 4, 4), 2 * H)
        cluster.run(2 * H)
    assert len(claims(cluster, since)) == ALL


ANY = {"replaces": "*"}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rolling_restart_without_names_moves_each_key_once(cluster, is_first):
    """Whether the new member starts before or after the old one leaves."""
    nodes = start(cluster, "a1", "b1", "c1")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    since = end(cluster)
    for node in nodes:
        name = f"{node.owner.client_id[0]}2"
        if is_first:
            cluster.node(name, labels=ANY, spec=spec())
            cluster.run(2 * H)
        restart(cluster, node)
        if not is_first:
            cluster.run(2 * H)
            cluster.node(name, labels=ANY, spec=spec())
        cluster.run_until(balanced(cluster, 4, 4, 4), 2 * H)
        cluster.run(2 * H)
    assert len(claims(cluster, since)) == ALL


def test_drained_members_hand_off_each_key_once_to_replacements(cluster):
    """As the manifest in deploy/kubernetes does, two members at a time."""
    nodes = start(cluster, "a1", "b1", "c1")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    since = end(cluster)
    for some in (nodes[:2], nodes[2:]):
        for node in some:
            name = f"{node.owner.client_id[0]}2"
            cluster.node(name, labels=ANY, spec=spec())
        moved = len(claims(cluster, since))
        cluster.run(2 * H)
        assert len(claims(cluster, since)) == moved
        for number, node in enumerate(some):
            who = node.owner.client_id
            op = bytes([number, len(some)]) * 8
            write(cluster, direct(who, op=op, until=2**62))
        cluster.run_until(lambda some=some: not any(n.held for n in some), 6 * H)
        for node in some:
            node.leave()
            cluster.run_until(lambda node=node: node.has_left, H)
            cluster.crash(node)
        cluster.run(2 * H)
    assert counts(cluster) == [4, 4, 4]
    assert len(claims(cluster, since)) == ALL


def test_a_replacement_of_no_member_gets_its_share_after_the_grace(cluster):
    write(cluster, settings(2, policy="planner", grace_ms=4 * H))
    start(cluster, "a", "b")
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)
    cluster.node("c", labels=ANY, spec=spec())
    cluster.run(3 * H)
    assert counts(cluster) == [0, 6, 6]
    cluster.run_until(balanced(cluster, 4, 4, 4), 6 * H)


def test_members_of_a_first_deployment_get_their_shares_at_once(cluster):
    write(cluster, settings(2, policy="planner", grace_ms=8 * H))
    cluster.node("a", labels=ANY, spec=spec())
    cluster.run_until(balanced(cluster, ALL), 4 * H)
    cluster.node("b", labels=ANY, spec=spec())
    cluster.run_until(balanced(cluster, 6, 6), 2 * H)
    cluster.node("c", labels=ANY, spec=spec())
    cluster.run_until(balanced(cluster, 4, 4, 4), 2 * H)


def test_a_restart_under_the_same_name_moves_nothing(cluster):
    a, *_ = start(cluster, "a", "b", "c")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    since = end(cluster)
    mine = sorted(a.held)
    restart(cluster, a)
    cluster.run(4 * H)
    (a,) = start(cluster, "a")
    cluster.run_until(balanced(cluster, 4, 4, 4), 2 * H)
    assert sorted(a.held) == mine
    assert len(claims(cluster, since)) == 4


def test_the_keys_of_a_member_gone_beyond_the_grace_are_shared(cluster):
    write(cluster, settings(2, policy="planner", grace_ms=4 * H))
    a, *_ = start(cluster, "a", "b", "c")
    cluster.run_until(balanced(cluster, 4, 4, 4), 4 * H)
    restart(cluster, a)
    cluster.run(3 * H)
    assert counts(cluster) == [4, 4]
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)


def test_a_partition_that_fails_at_one_member_goes_to_another(cluster):
    a, _ = start(cluster, "a", "b")
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)
    key = min(a.held)
    (sub,) = a.session._wanted.subs
    sub.exclude(key)
    a.session.release(a.held[key], reason="failed")
    a.session.reconsider()
    (b,) = [node for node in cluster.nodes if node is not a]
    cluster.run_until(lambda: key in b.held, 4 * H)
    last = [line for line in announced(cluster) if line.record.client_id == "a"][-1]
    name, text = f"fails:{key.topic}", str(key.partition)
    assert last.record.labels == {"layout": "1", "plans": "1", name: text}
    cluster.run_until(balanced(cluster, 6, 6), 4 * H)
    cluster.run(4 * H)
    assert key in b.held


def test_plans_balance_a_group_with_a_short_interval():
    cluster = world(partitions=3, records=(1,) * ALL, h=1_000)
    for partition in range(3):
        write(cluster, settings(policy="planner"), partition)
    start(cluster, "a", "b", "c")
    cluster.run_until(balanced(cluster, 4, 4, 4), 9_000)
    cluster.run(5_000)
    assert counts(cluster) == [4, 4, 4]


STALE_MS = 2 * INTERVAL_MS + 1


class Reader:
    """One partition, and how far a planner has read it."""

    def __init__(self):
        self.log = Log(level=2)
        self.replica = Replica(0, now_ms=0)
        self.replica.begin(self.log.state, 0)
        self.keys = SettledKeys("g")
        self.settings = NO_SETTINGS

    def append(self, record, *, after=0):
        """Append a record that is folded at once."""
        (first, *_) = self.log.append(record, after=after)
        assert first.outcome == "accepted", first
        self.replica._note_changes((first,))
        return first.epoch

    def have_changed(self, elapsed_ms=0):
        return self.keys.have_changed(
            {0: self.replica}, self.settings, now_ms=elapsed_ms
        )


@pytest.fixture
def reader():
    return Reader()


def test_keys_are_settled_after_the_first_round(reader):
    reader.append(claim())
    assert reader.have_changed()
    assert reader.keys.are_settled
    assert not reader.have_changed()
    assert not reader.have_changed(STALE_MS - 1)


def test_an_owner_that_becomes_stale_is_a_change_in_each_round(reader):
    reader.append(claim())
    reader.have_changed()
    for _ in range(2):
        assert reader.have_changed(STALE_MS)
        assert not reader.keys.are_settled
    assert reader.have_changed(), "log time went back"
    assert not reader.have_changed()


def test_renewals_are_no_changes(reader):
    epoch = reader.append(claim())
    reader.have_changed()
    reader.append(beat(epoch), after=INTERVAL_MS)
    assert not reader.have_changed(STALE_MS - 1)


def test_a_record_that_names_a_key_is_a_change(reader):
    epoch = reader.append(claim())
    reader.have_changed()
    reader.append(release(epoch))
    assert reader.have_changed()
    assert not reader.have_changed(10 * STALE_MS), "it is free for good"


def test_keys_of_other_groups_are_no_changes(reader):
    reader.append(claim(key=KEY._replace(group_id="other")))
    reader.have_changed()
    assert not reader.have_changed(STALE_MS)


def test_a_key_with_a_named_successor_is_a_change_until_its_wait_ends(reader):
    reader.append(release(reader.append(claim()), successor="c2"))
    for _ in range(2):
        assert reader.have_changed(INTERVAL_MS // 2 - 1)
    assert reader.have_changed(INTERVAL_MS // 2), "the wait has ended"
    assert not reader.have_changed(INTERVAL_MS // 2)
    assert reader.have_changed(INTERVAL_MS // 2 - 1), "log time went back"


def test_a_key_released_for_a_restart_is_a_change_until_the_grace_ends(reader):
    reader.settings = Settings(generation=1, grace_ms=INTERVAL_MS)
    reader.append(release(reader.append(claim()), reason="restart"))
    for _ in range(2):
        assert reader.have_changed(INTERVAL_MS - 1)
    assert reader.have_changed(INTERVAL_MS)
    assert not reader.have_changed(INTERVAL_MS)
    reader.settings = Settings(generation=2, grace_ms=2 * INTERVAL_MS)
    for _ in range(2):
        assert reader.have_changed(INTERVAL_MS)


def test_an_offer_is_a_change_until_handoff_ms_after_its_end(reader):
    reader.settings = Settings(generation=1, handoff_ms=INTERVAL_MS)
    epoch = reader.append(claim())
    reader.append(offer(epoch, within_ms=400))
    end_ms = 400 + INTERVAL_MS
    for elapsed_ms in (0, 0, 400, end_ms - 1):
        assert reader.have_changed(elapsed_ms)
    assert reader.have_changed(end_ms)
    assert not reader.have_changed(end_ms)


@pytest.mark.parametrize("is_later", [False, True])
def test_keys_are_not_settled_while_a_pause_lasts_or_is_scheduled(reader, is_later):
    reader.append(claim())
    now_ms = reader.log.now_ms
    record = schedule(now_ms + 50, now_ms + 99) if is_later else pause(now_ms + 50)
    reader.append(record)
    for _ in range(2):
        assert reader.have_changed()
        assert not reader.keys.are_settled


def test_an_added_partition_is_a_change(reader):
    reader.append(claim())
    reader.have_changed()
    both = {0: reader.replica, 1: Replica(1, now_ms=0)}
    assert reader.keys.have_changed(both, NO_SETTINGS, now_ms=0)
    assert not reader.keys.have_changed(both, NO_SETTINGS, now_ms=0)


def test_planners_read_keys_only_after_changes(monkeypatch):
    seen = rowkit.check_planners(monkeypatch)
    cluster = world(2, records=(1,) * 8)
    for t in range(2):
        write(cluster, group_settings(policy="planner"), t)
    nodes = [cluster.node(name, spec=spec()) for name in "abc"]
    cluster.run_until(lambda: sum(len(node.held) for node in nodes) == 8, 4 * H)
    cluster.run(2 * H)
    before, turns = seen.computed, seen.wanted
    cluster.run(8 * H)
    assert seen.wanted - turns > 100
    assert seen.computed == before, "nothing has changed"
    cluster.crash(nodes[0])
    cluster.run_until(lambda: sum(len(node.held) for node in nodes[1:]) == 8, 5 * H)
    assert seen.computed > before
    assert not seen.wrong


FAR = 2**62


def read(follower, log, *, coordinators=1, settings=None):
    settings = settings or log.state.settings_of("g")
    follower.read(log.state, "g", settings=settings, coordinators=coordinators)


def followed(log, *, coordinators=1):
    follower = PlanFollower()
    read(follower, log, coordinators=coordinators)
    return follower


def planned_log(**rest):
    log = Log(level=2)
    log.append(settings(policy="planner"))
    log.append(planned(0, ("c2", 0, (0,)), vector=((FAR, 0),), **rest))
    return log


def test_a_plan_counts_only_under_the_policy_planner():
    log = planned_log()
    follower = followed(log)
    assert (follower.is_in_force, follower.named(KEY, log.state)) == (True, "c2")
    log.append(settings(2, policy="fair"))
    read(follower, log, coordinators=1)
    assert (follower.is_in_force, follower.named(KEY, log.state)) == (False, None)


def test_a_later_plan_replaces_the_earlier_one():
    log = planned_log()
    follower = followed(log)
    log.append(planned(1, ("c3", 0, (0,)), vector=((FAR, 0),)))
    read(follower, log, coordinators=1)
    assert follower.named(KEY, log.state) == "c3"


def test_a_plan_with_a_missing_slice_names_no_key():
    log = planned_log(count=2)
    assert followed(log).named(KEY, log.state) is None


def test_a_later_claim_makes_the_entry_of_its_key_void():
    log = Log(level=2)
    log.append(settings(policy="planner"))
    log.append(planned(0, ("c2", 0, (0,)), vector=((log.state.next_offset, 0),)))
    follower = followed(log)
    assert follower.named(KEY, log.state) == "c2"
    log.append(claim("c1"))
    assert follower.named(KEY, log.state) is None


def test_a_plan_is_void_once_the_number_of_coordinating_partitions_has_changed():
    log = planned_log()
    follower = followed(log)
    assert follower.named(KEY, log.state) == "c2"
    read(follower, log, coordinators=2)
    assert follower.named(KEY, log.state) is None
    read(follower, log, coordinators=1)
    assert follower.named(KEY, log.state) == "c2"
    assert followed(log, coordinators=2).named(KEY, log.state) is None, "read later"


def test_settings_from_another_home_put_a_plan_in_force():
    log = Log(level=2)
    log.append(planned(0, ("c2", 0, (0,)), vector=((FAR, 0),)))
    follower = followed(log)
    assert not follower.is_in_force
    read(follower, log, settings=Settings(1, policy="planner"))
    assert follower.named(KEY, log.state) == "c2"


def test_endless_joins_do_not_keep_surplus_for_ever():
    debounce = Debounce()
    one, two = ([MemberView(client_id=name, topics=frozenset())] for name in "ab")
    assert debounce.update(two, 100, debounce_ms=1_000) is None
    for now_ms in range(1_000, 6_000, 500):
        members = two if now_ms // 500 % 2 else one
        changed = debounce.update(members, now_ms, debounce_ms=1_000)
    assert changed == 6_000
    assert debounce.is_on(5_999)
    assert not debounce.is_on(6_000)
