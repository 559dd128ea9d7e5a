"""What is lent is asked for, and waited for."""

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


def test_a_pause_is_told_and_everything_comes_back(cluster, machine):
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


def test_what_goes_back_as_wedged_goes_to_others(cluster, machine):
    a = having(machine)
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    key = min(a.held)
    a.give_back(key, reason="wedged", detail="away for 9 ms")
    run(cluster, [a, b], H - 200)
    assert key not in a.valid
    assert [r.reason for r in releases(cluster)][-1] == "wedged: away for 9 ms"


def test_what_lies_beyond_its_log_is_wanted_no_more(cluster, machine):
    a = having(machine)
    a.give_back(KEY, reason="position_out_of_range")
    run(cluster, [a], 3 * H)
    assert sizes(a) == [7]


def topic_ids(client):
    """Return the topic id under which a client was last told of each partition."""
    found = {}
    for body in client.told:
        every = body.assigned if isinstance(body, api.Snapshot) else [body]
        for said in every:
            if isinstance(said, api.Assigned):
                found[said.partition] = said.topic_id
    return found


def test_a_recreated_topic_that_one_client_finds_is_claimed_anew_for_all(
    cluster, machine
):
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
    """``auto_offset_reset="none"``: the error is told to whom the key was for."""
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
    # Whoever comes anew tries it anew, and may know better by then.
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


def test_without_a_position_a_silent_client_is_told_once_it_is_back(cluster, machine):
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


def test_a_leader_that_steps_ahead_is_told_of(cluster, machine):
    """PROTOCOL S4: whoever was told of a longer deadline hears of the shorter one."""
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


def test_what_ends_while_it_is_lent_is_kept_from_others_here(cluster, machine):
    """A client that hears of nothing may use it until what it was told."""
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


def test_whoever_says_that_it_has_stopped_is_not_waited_for(cluster, machine):
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


def test_a_lease_that_runs_out_while_it_is_lent_is_not_released(cluster, machine):
    """What was told before a clock stepped may be longer: the log finds it stale."""
    a = having(machine)
    run(cluster, [a], 100)
    step_ahead(cluster, 1_000)
    machine.node.cut(is_cut=True)
    cluster.run(2 * H)
    machine.node.cut(is_cut=False)
    cluster.run(100)
    assert not a.valid
    assert "lease_expired" not in {r.reason for r in releases(cluster)}
