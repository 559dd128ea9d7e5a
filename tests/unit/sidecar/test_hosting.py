"""Subleased keys are recalled, and released only after confirmation."""

import pytest
from enginekit import (
    KEY,
    H,
    pause_record,
    wish,
    write,
)
from sidecarkit import Local, having, releases, run, run_until, sizes

from kafka_marshal.errors import ClaimLost, PositionError
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.remote import api
from kafka_marshal.remote.faults import error_of

# --- Drains ---


def test_another_host_is_given_its_share(cluster, machine):
    a = having(machine)
    other = cluster.node("other", wish=wish())
    run_until(cluster, [a], lambda: len(other.held) == 4 and sizes(a) == [4], 3 * H)
    assert {e.reason for e in a.named(api.Releasing)} == {"surplus"}
    assert {e.successor for e in a.named(api.Releasing)} == {"other"}


def test_a_pause_is_published_and_all_leases_return(cluster, machine):
    a = having(machine)
    for t in (0, 1):
        until_ms = cluster.clock.wall_ms() + 2 * H
        write(cluster, pause_record(cluster, until_ms), t)
    run_until(cluster, [a], lambda: a.is_paused and not a.valid, H)
    assert {e.reason for e in a.named(api.Releasing)} == {"paused"}
    first = a.named(api.Paused)[0]
    assert first.until_wall_ms is not None
    assert first.reason == "paused by admin"
    run_until(cluster, [a], lambda: not a.is_paused and sizes(a) == [8], 4 * H)


def test_a_key_released_as_stuck_goes_to_others(cluster, machine):
    a = having(machine)
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    key = min(a.held)
    a.give_back(key, reason="wedged", detail="away for 9 ms")
    run(cluster, [a, b], H - 200)
    assert key not in a.valid
    assert [r.reason for r in releases(cluster)][-1] == "wedged: away for 9 ms"


def test_a_key_out_of_range_is_excluded(cluster, machine):
    a = having(machine)
    a.give_back(KEY, reason="position_out_of_range")
    run(cluster, [a], 3 * H)
    assert sizes(a) == [7]


def topic_ids(client):
    """Return the topic id of each partition in the client's last assignment."""
    found = {}
    for body in client.received:
        every = body.assigned if isinstance(body, api.Snapshot) else [body]
        for said in every:
            if isinstance(said, api.Assigned):
                found[said.partition] = said.topic_id
    return found


def test_a_recreated_topic_is_claimed_again_for_all_clients(cluster, machine):
    a = having(machine)
    earlier = cluster.kafka.topic("t").topic_id.hex()
    assert topic_ids(a) == dict.fromkeys(range(8), earlier)
    cluster.kafka.recreate_topic("t", 8)
    now = cluster.kafka.topic("t").topic_id.hex()
    a.give_back(KEY, reason="topic_gone")
    wanted = dict.fromkeys(range(8), now)
    run_until(cluster, [a], lambda: topic_ids(a) == wanted and sizes(a) == [8], H)
    assert {each.reason for each in a.named(api.Releasing)} == {"topic_gone"}
    assert {release.reason for release in releases(cluster)} == {"topic_gone"}


def with_commits(cluster, *partitions):
    """Have the group begin in these partitions by what it committed to Kafka."""
    offsets = {TopicPartition("t", number): 1 for number in partitions}
    cluster.kafka.data_log().commit("g", offsets, timeout_ms=1_000)


def test_without_a_position_one_client_fails_alone(cluster, machine):
    """``auto_offset_reset="none"``: the client due to get the key fails."""
    with_commits(cluster, *range(7))
    cluster.fill("u", [1])
    other = Local(machine, "other", pid=9)
    other.subscribe("u")
    a, b = Local(machine, "a", pid=1), Local(machine, "b", pid=2)
    for client in (a, b):
        client.subscribe(auto_offset_reset="none")
    clients = [a, b, other]
    run_until(cluster, clients, lambda: a.failure or b.failure, 3 * H)
    failed, well = (a, b) if a.failure else (b, a)
    error = error_of(failed.failure)
    assert isinstance(error, PositionError)
    assert (error.partition, error.log_start, error.log_end) == (("t", 7), 0, 5)
    run_until(cluster, [well, other], lambda: sizes(well, other) == [7, 1], 2 * H)
    run(cluster, [well, other], 2 * H)
    assert sizes(well, other) == [7, 1]
    assert well.failure is None
    assert other.failure is None
    with pytest.raises(ClaimLost, match="register again"):
        failed.beat()
    # A new process tries again, and may succeed.
    with_commits(cluster, 7)
    again = Local(machine, failed.name, pid=3)
    again.subscribe(auto_offset_reset="none")
    run_until(cluster, [again, well], lambda: sum(sizes(again, well)) == 8, 2 * H)


def test_the_only_client_without_a_position_fails(cluster, machine):
    a = Local(machine, "a", pid=1)
    a.subscribe(auto_offset_reset="none")
    run_until(cluster, [a], lambda: a.failure is not None, H)
    cluster.run(H)
    assert machine.service.clients() == []
    assert machine.service.groups[0].failure is None
    assert {r.reason for r in releases(cluster)} == {"failed"}


def test_a_missing_position_is_reported_once_a_client_is_back(cluster, machine):
    a = Local(machine, "a", pid=1)
    machine.node.background.is_held = True
    a.subscribe(auto_offset_reset="none")
    cluster.run(H - 200)
    machine.node.background.is_held = False
    machine.node.background.run_waiting()
    cluster.run(100)
    assert a.failure is None
    a.take()
    assert a.failure is None
    run_until(cluster, [a], lambda: a.failure is not None, H)


def test_a_step_of_the_leaders_clock_sends_shorter_deadlines(cluster, machine):
    """PROTOCOL S4: a shorter deadline is sent to the client that got a longer one."""
    a = having(machine)
    run(cluster, [a], H)
    before = dict(a.held)
    for t in (0, 1):
        cluster.kafka.set_skew(t, 700)
        write(cluster, b"tick", t)
    cluster.run(20)
    a.take()
    shorter_ms = {before[key][1] - until for key, (_, until) in a.held.items()}
    assert min(shorter_ms) >= 500
    assert all(a.held[key][0] == epoch for key, (epoch, _) in before.items())


def step_ahead(cluster, skew_ms):
    for t in (0, 1):
        cluster.kafka.set_skew(t, skew_ms)
        write(cluster, b"tick", t)
    cluster.run(20)


def test_a_subleased_claim_that_ends_stays_reserved(cluster, machine):
    """A client that reads no events may use it until the deadline that was sent."""
    a = having(machine)
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    step_ahead(cluster, 3 * H)
    assert len(a.valid) == 4
    while a.valid:
        run(cluster, [b], 20, step_ms=20)
        assert not a.valid & b.valid
    run_until(cluster, [b], lambda: len(b.valid) == 8, 3 * H)
    a.take()
    assert not set(a.held) & b.valid


def test_a_confirmed_stop_frees_the_key_at_once(cluster, machine):
    a = having(machine)
    run(cluster, [a], 100)
    until_ms = max(until for _, until in a.held.values())
    returned = tuple(a.returned(key) for key in sorted(a.held))
    step_ahead(cluster, 3 * H)
    a.take()
    assert not a.held
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run(cluster, [b], 200)
    assert not b.valid
    machine.service.release(a.who, api.Release(returned=returned))
    run_until(cluster, [a, b], lambda: len(a.valid | b.valid) == 8, H)
    assert cluster.clock.now_ms() < until_ms


def test_an_expired_subleased_claim_is_not_released(cluster, machine):
    """A deadline sent before a clock stepped may be later: the claim becomes stale."""
    a = having(machine)
    run(cluster, [a], 100)
    step_ahead(cluster, 1_000)
    machine.node.cut(is_cut=True)
    cluster.run(2 * H)
    machine.node.cut(is_cut=False)
    cluster.run(100)
    assert not a.valid
    assert "lease_expired" not in {r.reason for r in releases(cluster)}
