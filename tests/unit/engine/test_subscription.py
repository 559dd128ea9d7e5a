"""How members share what there is, over a whole log."""

import pytest
from enginekit import (
    H,
    fold,
    held_by,
    lines,
    of,
    takeovers,
    wish,
    world,
)

from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    Heartbeat,
    Member,
    ReleasingPartition,
)


@pytest.fixture
def cluster():
    return world()


# --- Sharing ---


def test_a_newcomer_is_given_its_share_by_name():
    cluster = world(partitions=2, records=[1] * 8)
    a = cluster.node("a", wish=wish())
    cluster.run_until(held_by(a, 8), H)
    cluster.run(H)
    b = cluster.node("b", wish=wish())
    took_ms = cluster.run_until(held_by(b, 4), 2 * H)
    assert took_ms < H
    assert len(a.held) == 4
    released = [
        x.record
        for t in range(2)
        for x in of(cluster, "a", ReleasingPartition, partition=t)
    ]
    assert {r.reason.partition(":")[0] for r in released} == {"surplus"}
    assert released[0].reason == "surplus: 8 held, share 4 of 8 among 2"
    assert {r.successor for r in released} == {"b"}
    assert not takeovers(cluster, 0)
    assert not takeovers(cluster, 1)


def test_nothing_moves_once_shared():
    """Acceptance L31."""
    cluster = world(partitions=2, records=[1] * 7)
    nodes = [cluster.node(name, wish=wish()) for name in "abc"]
    cluster.run_until(lambda: sum(len(n.held) for n in nodes) == 7, 3 * H)
    cluster.run(3 * H)
    ends = [cluster.kafka.log(cluster.place(t)).end for t in range(2)]
    cluster.run(10 * H, step_ms=50)
    later = {
        type(line.record)
        for t in range(2)
        for line in lines(cluster, t)
        if line.offset >= ends[t]
    }
    assert later == {Heartbeat, BatchHeartbeat, Member}


def test_surplus_is_finished_before_it_is_given_up():
    cluster = world(records=[4, 4])
    a = cluster.node("a", wish=wish(most=100))
    cluster.run_until(held_by(a, 2), H)
    polled = a.consumer.poll(0)
    b = cluster.node("b", wish=wish())
    cluster.run(H // 2)
    assert not b.held
    for records in polled.values():
        a.consumer.commit(records)
    cluster.run_until(held_by(b, 1), H)
    (key,) = b.held
    assert fold(cluster).keys[key].position == 4


def test_surplus_waits_for_a_slow_handler_and_not_for_one_that_never_commits():
    cluster = world(records=[4, 4])
    a = cluster.node("a", wish=wish(most=100))
    cluster.run_until(held_by(a, 2), H)
    a.consumer.poll(0)
    b = cluster.node("b", wish=wish())
    cluster.run(5 * H)  # busy with what was handed out
    assert not b.held
    assert len(a.held) == 2
    a.consumer.poll(0)  # back, and nothing is committed
    cluster.run(H // 2)
    assert not b.held
    cluster.run_until(held_by(b, 1), H)


def test_a_leaver_hands_all_over_at_once():
    cluster = world(records=[1] * 4)
    a, b = (cluster.node(name, wish=wish()) for name in "ab")
    cluster.run_until(lambda: len(a.held) == len(b.held) == 2, 3 * H)
    a.leave()
    assert cluster.run_until(held_by(b, 4), H) <= 500
    assert a.has_left
