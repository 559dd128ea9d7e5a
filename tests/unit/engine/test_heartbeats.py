"""Leases and the heartbeats that renew them (PROTOCOL 5.2), over a whole log."""

from itertools import pairwise

import pytest
from enginekit import (
    HARD_MS,
    SOFT_MS,
    T0,
    H,
    claim_of,
    held_by,
    lines,
    of,
    owning,
    spec,
    takeovers,
    values,
    world,
    write,
)
from msgspec import structs

from kafka_marshal.engine.heartbeats import FAR_MS, _ClockLead
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ForgettingPartition,
    Heartbeat,
    ReleasingPartition,
)
from simulator.fakestore import AppendFate

# --- Leases (PROTOCOL 5.2) ---


def test_a_lease_first_stops_hand_outs_and_then_ends_the_claim(cluster):
    node = owning(cluster, most=1)
    claim = claim_of(node)
    assert values(node.consumer.poll(0)) == {0: [0]}
    node.cut(is_cut=True)
    sent_ms = claim.lease.soft_until_ms - SOFT_MS
    cluster.run_until(
        lambda: node.clock.now_ms() >= sent_ms + SOFT_MS - 20, 2 * H, step_ms=1
    )
    node.data.cut = False  # records are available, only the lease expires
    assert values(node.consumer.poll(0)) == {0: [1]}
    cluster.run_until(lambda: node.clock.now_ms() == sent_ms + SOFT_MS, H, step_ms=1)
    assert node.consumer.poll(0) == {}
    assert claim.is_valid(node.clock.now_ms())
    cluster.run_until(
        lambda: node.clock.now_ms() == sent_ms + HARD_MS - 1, 2 * H, step_ms=1
    )
    assert claim.phase is Phase.HELD
    cluster.run(1, step_ms=1)
    assert claim.phase is Phase.ENDED
    assert claim.ending.reason == "lease_expired"


def test_fetched_records_are_not_handed_out_after_the_soft_stop(cluster):
    """A process that was stopped for long first checks its lease."""
    node = owning(cluster, most=1)
    node.consumer.poll(0)
    cluster.clock.advance(SOFT_MS)
    assert node.consumer.poll(0) == {}
    assert node.consumer.position(T0) == 1


def test_an_acknowledged_heartbeat_not_read_back_renews_no_lease(cluster):
    node = owning(cluster)
    node.log.read_lag_ms = 10 * H
    cluster.run(2 * H)
    assert len(of(cluster, "a", Heartbeat)) > 5
    assert not node.held


def test_a_late_heartbeat_renews_the_lease_from_the_time_of_sending(cluster):
    node = owning(cluster)
    cluster.run(H)
    cluster.fates["a"] = AppendFate(delay_ms=500)
    cluster.run(H)
    base_ms = claim_of(node).lease.soft_until_ms - SOFT_MS
    assert node.clock.now_ms() - base_ms >= 500
    assert node.held


@pytest.mark.parametrize("h", [H // 2, 2 * H])
def test_a_lease_uses_the_interval_in_force_at_its_heartbeat(cluster, h):
    node = owning(cluster)
    claim, before = claim_of(node), claim_of(node).lease
    # The heartbeat and the Config after it are read in one poll.
    node.log.read_lag_ms = 10 * H
    beats = len(of(cluster, "a", Heartbeat))
    cluster.run_until(lambda: len(of(cluster, "a", Heartbeat)) > beats, H)
    write(
        cluster,
        structs.replace(cluster.config, generation=2, era=2, heartbeat_interval_ms=h),
    )
    node.log.read_lag_ms = 0
    cluster.run(20)
    assert node.engine.context.settled.generation == 2
    assert claim.lease.hard_until_ms > before.hard_until_ms
    assert claim.lease.hard_until_ms - claim.lease.soft_until_ms == HARD_MS - SOFT_MS
    cluster.run(2 * H)  # a renewal under a lower interval shortens no lease
    assert claim.heartbeat_interval_ms == h


def test_an_ignored_heartbeat_ends_the_claim(cluster):
    node = owning(cluster)
    claim = claim_of(node)
    # A process with the full identity of the owner releases the key.
    owner = node.owner
    forged = ReleasingPartition(
        client_id=owner.client_id,
        group_id="g",
        incarnation=owner.incarnation,
        seq=0,
        topic="t",
        partition=0,
        epoch=claim.epoch,
        position=None,
        successor=None,
        reason=None,
    )
    write(cluster, forged)
    cluster.run(H // 2)
    assert claim.phase is Phase.ENDED


def test_heartbeats_to_all_coordinating_partitions_are_sent_together():
    cluster = world(4, records=[5] * 40)
    node = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(node.held) == 40, 4 * H)
    cluster.run(12 * H)  # heartbeats of claims won at other times converge
    since_ms = cluster.clock.wall_ms()
    cluster.run(6 * H)
    times: list[list[int]] = []
    for t in range(4):
        # Each renewal of a record is a line of its own.
        beats = {
            line.offset: line.time_ms
            for line in lines(cluster, t)
            if isinstance(line.record, BatchHeartbeat) and line.time_ms > since_ms
        }
        delays = [later - earlier for earlier, later in pairwise(beats.values())]
        assert 16 <= len(beats) <= 21
        assert max(delays) <= 1.1 * H / 3 + 100
        times.append(list(beats.values()))
    for together in zip(*times, strict=True):
        assert max(together) - min(together) <= 40


def test_a_forward_clock_step_shortens_leases(cluster):
    node = owning(cluster)
    cluster.run(H)
    before = claim_of(node).lease
    cluster.run_until(lambda: claim_of(node).lease != before, H)
    before = claim_of(node).lease
    cluster.kafka.set_skew(0, 700)
    write(cluster, b"tick")
    cluster.run(20)
    # The time of sending and reading cannot be distinguished from a smaller step.
    shorter_ms = before.hard_until_ms - claim_of(node).lease.hard_until_ms
    assert 650 <= shorter_ms <= 700
    assert node.observer.named("clock_step")[0].fields["surplus_ms"] == shorter_ms


def test_a_key_that_is_forgotten_as_the_clock_steps_ends_its_claim_alone(cluster):
    node = owning(cluster)
    lost = claim_of(node)
    cluster.run(H)
    cluster.kafka.set_skew(0, 3 * H)
    admin = {"client_id": "admin", "incarnation": b"a" * 16, "seq": 1}
    key = {"group_id": "g", "topic": "t", "partition": 0, "epoch": lost.epoch}
    write(cluster, ForgettingPartition(**admin, **key))
    cluster.run(20)
    assert "forgotten" in {line.transition.effect for line in lines(cluster)}
    assert lost.ending.reason == "lease_expired"
    cluster.run(2 * H)
    assert node.engine.failure is None
    assert claim_of(node).epoch > lost.epoch


def test_a_clock_step_is_one_event_however_many_leases_it_shortens():
    cluster = world(records=(1,) * 40)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 40), 4 * H)
    cluster.run(H)
    cluster.kafka.set_skew(0, 700)
    write(cluster, b"tick")
    cluster.run(20)
    (event,) = node.observer.named("clock_step")
    assert event.fields["partition"] == 0
    assert event.fields["count"] == 40


def test_a_clock_step_is_detected_by_the_least_lead(cluster):
    """A lease may count from the record with the least lead, however late the rest."""
    node = owning(cluster)
    prompt = claim_of(node).lease
    cluster.fates["a"] = AppendFate(delay_ms=600)
    cluster.run(H // 3 + H // 10)
    assert claim_of(node).lease == prompt  # not folded yet
    cluster.kafka.set_skew(0, 300)
    write(cluster, b"tick")
    cluster.run(20)
    assert 250 <= node.observer.named("clock_step")[0].fields["surplus_ms"] <= 300
    assert claim_of(node).lease.hard_until_ms < prompt.hard_until_ms


def test_an_old_lead_is_forgotten():
    lead = _ClockLead()
    assert lead.least_ms == FAR_MS
    lead.note(5, 0, window_ms=100)
    lead.note(9, 50, window_ms=100)
    assert lead.least_ms == 5
    lead.note(8, 100, window_ms=100)
    assert lead.least_ms == 5  # a lease may still count from it
    lead.note(9, 200, window_ms=100)
    assert lead.least_ms == 8


def test_late_reads_are_not_reported_as_a_clock_step(cluster):
    node = owning(cluster)
    for lag_ms in (H // 2, 0, H // 3, 0):
        node.log.read_lag_ms = lag_ms
        write(cluster, b"tick")
        cluster.run(H // 2)
    assert not node.observer.named("clock_step")
    assert node.held


def test_a_failover_to_a_leader_with_a_skewed_clock_ends_no_claim(cluster):
    node = owning(cluster)
    for leader, skew_ms in ((1, 5 * H), (2, -5 * H), (0, 0)):
        cluster.kafka.set_skew(leader, skew_ms)
        cluster.kafka.fail_over(cluster.place(0), leader=leader)
        cluster.run(2 * H)
    assert node.held
    assert not takeovers(cluster)
