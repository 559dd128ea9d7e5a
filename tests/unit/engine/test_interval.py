"""Changes of the heartbeat interval under running members (PROTOCOL 4.12)."""

import msgspec
import pytest
from enginekit import T0, H, held_by, lines, owning, spec, world, write

from kafka_marshal.errors import CoordinationError
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.protocol.records import BatchHeartbeat, Heartbeat, Member
from kafka_marshal.testing.fakestore import AppendFate


def altered(cluster, h, generation=2):
    return msgspec.structs.replace(
        cluster.config,
        generation=generation,
        era=generation,
        heartbeat_interval_ms=h,
    )


def sent_after(cluster, offset, *kinds):
    return [
        line
        for line in lines(cluster)
        if line.offset > offset and isinstance(line.record, kinds)
    ]


@pytest.fixture(name="cluster")
def _cluster():
    return world()


def test_members_beat_and_announce_at_once(cluster):
    node = owning(cluster)
    cluster.run(H)
    write(cluster, altered(cluster, H // 4))
    at = lines(cluster)[-1]
    cluster.run(100)
    for kinds in ((Heartbeat, BatchHeartbeat), (Member,)):
        assert sent_after(cluster, at.offset, *kinds)[0].time_ms <= at.time_ms + 100
    assert node.observer.named("interval_changed")
    assert node.log.delivery_timeout_ms == H // 8


def test_a_lower_interval_costs_no_claim_and_moves_no_deadline_back(cluster):
    node = owning(cluster)
    cluster.run(H)
    claim = node.session.holdings[next(iter(node.held))].claim
    before = claim.lease
    write(cluster, altered(cluster, H // 5))
    cluster.run(200)
    assert claim.lease.hard_until_ms >= before.hard_until_ms
    cluster.run(6 * H)
    assert claim.lease == Lease.since(claim.base_ms, H // 5)
    assert not node.observer.named("claim_ended")
    assert not node.observer.named("clock_step")


def test_a_higher_interval_slows_heartbeats_down(cluster):
    node = owning(cluster)
    write(cluster, altered(cluster, 4 * H))
    cluster.run(H)
    at = lines(cluster)[-1]
    cluster.run(8 * H)
    assert len(sent_after(cluster, at.offset, Heartbeat, BatchHeartbeat)) <= 8
    assert node.held


def test_the_least_interval_of_all_partitions_paces():
    cluster = world(partitions=2, records=[1] * 4)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 4), H)
    context = node.engine.context
    write(cluster, altered(cluster, 4 * H), 0)
    cluster.run(100)
    assert context.heartbeat_interval_ms == H
    assert not node.observer.named("interval_changed")
    write(cluster, altered(cluster, 4 * H), 1)
    cluster.run(100)
    assert (context.heartbeat_interval_ms, context.least_interval_ms) == (4 * H, None)
    write(cluster, altered(cluster, H, 3), 0)
    cluster.run(100)
    assert context.heartbeat_interval_ms == H
    cluster.run(20 * H)
    assert len(node.held) == 4


def test_a_new_member_starts_while_a_partition_is_behind():
    cluster = world(partitions=2, records=[1] * 4)
    write(cluster, altered(cluster, 2 * H), 0)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 4), 2 * H)
    assert node.engine.failure is None


def test_timeouts_that_could_not_be_changed_are_set_again(cluster, monkeypatch):
    node = owning(cluster)
    plain, tried = node.log.configure, []

    def configure(interval_ms):
        tried.append(interval_ms)
        if len(tried) == 1:
            raise CoordinationError("no answer")
        plain(interval_ms)

    monkeypatch.setattr(node.log, "configure", configure)
    write(cluster, altered(cluster, H // 3))
    cluster.run(100)
    assert node.observer.named("timeouts_unchanged")
    cluster.run(H)
    assert tried == [H // 3, H // 3]
    assert node.log.delivery_timeout_ms == H // 6
    assert T0 in {key.topic_partition for key in node.held}


def test_a_batch_above_a_lower_limit_is_split_and_sent_again(cluster):
    cluster = world(records=[1] * 4)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 4), H)
    config = altered(cluster, H)
    limits = msgspec.structs.replace(config.limits, beats=2)
    # The heartbeats are on their way when the limit is lowered.
    cluster.fates["a"] = AppendFate(delay_ms=200)
    node.session.on_interval()
    cluster.run(50)
    write(cluster, msgspec.structs.replace(config, limits=limits))
    at = lines(cluster)[-1]
    cluster.run(250)
    cluster.fates.clear()
    (refused,) = sent_after(cluster, at.offset, BatchHeartbeat)
    assert refused.transition.reason == "limits"
    cluster.run(200)
    again = sent_after(cluster, refused.offset, BatchHeartbeat)
    assert {len(line.record.beats) for line in again} == {2}
    assert len(node.held) == 4
    assert not node.observer.named("claim_ended")
