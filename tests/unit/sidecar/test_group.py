"""Events, death, silence and departure of clients, in a simulated cluster."""

from collections import Counter

import msgspec
import pytest
import variants
from enginekit import (
    KEY,
    H,
    pause_record,
    spec,
    world,
    write,
)
from logkit import beat as foreign_beat
from logkit import schedule
from msgspec.structs import replace
from sidecarkit import (
    Local,
    Machine,
    having,
    keys,
    leaving,
    records,
    releases,
    run,
    run_until,
    sharing,
    sizes,
)

from kafka_marshal.engine import Session
from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    PositionError,
)
from kafka_marshal.protocol.records import Member
from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal.remote import api
from kafka_marshal.remote.transport import error_of
from kafka_marshal.sidecar.assignment import Assignor
from kafka_marshal.sidecar.process_monitor import Peer
from simulator.fakestore import AppendFate

# --- Events ---


def test_the_first_event_is_a_snapshot_even_if_it_is_empty(machine):
    a = Local(machine, "a")
    a.take()
    (first,) = a.received
    assert isinstance(first, api.Snapshot)
    assert first.assigned == ()
    incarnation, number, t, offset = a.after.split(".")
    assert incarnation == machine.service.info().incarnation[:8]
    assert int(number) > 0
    assert t == ("1" if machine.node.engine.context.home_of("g") else "0")
    assert offset.isdigit()


def test_unrelated_records_cause_no_events(cluster, machine):
    a = having(machine)
    run(cluster, [a], H)
    before = len(a.received)
    for seq in range(1_000):
        write(cluster, foreign_beat(seq, client="z", key=Key("other", "t", 0)))
    run(cluster, [a], 2 * H)
    assert len(a.received) == before


def test_a_reconnecting_client_gets_the_missed_events(cluster, machine):
    a = having(machine)
    at = a.after
    b = Local(machine, "b", pid=2)
    b.subscribe()
    for _ in range(10):
        cluster.run(100)
        a.beat()
    missed = [frame.body for frame in machine.service.feed(a.who, at).take()]
    assert [type(body) for body in missed] == [api.Releasing] * 4
    assert not machine.service.feed(a.who, a.after).on_news


@pytest.mark.parametrize(
    "after", ["", "deadbeef.1.0.0", "x.y", "{own}.99.0.0", "{own}.x"]
)
def test_a_client_with_an_unknown_event_id_gets_a_snapshot(machine, after):
    a = having(machine)
    own = machine.service.info().incarnation[:8]
    (frame,) = machine.service.feed(a.who, after.format(own=own)).take()
    assert isinstance(frame.body, api.Snapshot)
    assert len(frame.body.assigned) == 8
    assert frame.body.subscriptions == ("s",)


def test_an_assignment_names_the_previous_claim(cluster, machine):
    a = having(machine)
    first = next(e for e in a.received if isinstance(e, api.Snapshot) and e.assigned)
    before = first.assigned
    assert {each.follows for each in before} == {None}
    epochs = {each.partition: each.epoch for each in before}
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    assigned = [each for each in b.received if isinstance(each, api.Assignment)]
    assert len(assigned) == 4
    assert all(each.follows == epochs[each.partition] for each in assigned)


def test_a_slow_reader_of_many_partitions_catches_up_by_a_snapshot():
    cluster = world(partitions=2, records=[0] * 5_000, h=30_000)
    machine = Machine(cluster)
    a = Local(machine, "a", pid=1)
    a.take()
    a.subscribe()

    def added():
        return sum(len(host.table.leases) for host in machine.service.groups)

    for _ in range(400):
        cluster.run(100)
        machine.service.beat(a.who, api.HeartbeatRequest())
        if added() == 5_000:
            break
    assert added() == 5_000
    a.take()
    assert len(a.valid) == 5_000
    assert isinstance(a.received[-1], api.Snapshot), (
        "a snapshot replaces what was missed"
    )


def test_a_new_cursor_closes_the_previous_one(machine):
    a = Local(machine, "a")
    rung = []
    first = a.feed
    first.on_news = lambda: rung.append(True)
    a.follow()
    assert first.is_closed
    assert rung
    first.close()
    assert len(rung) == 1


# --- The group ---


LONG_H = 60_000


def test_many_joining_clients_cause_at_most_one_pass_over_all_keys(monkeypatch):
    """Otherwise these passes leave no time for the clients' heartbeats."""
    cluster = world(partitions=2, records=[0] * 1_000, h=30_000)
    machine = Machine(cluster)
    a = Local(machine, "a", pid=1)
    a.subscribe()
    run_until(cluster, [a], lambda: sizes(a) == [1_000], LONG_H)
    looks = Counter()

    def count(kind, name):
        plain = getattr(kind, name)

        def counted(*given):
            looks[name] += 1
            return plain(*given)

        monkeypatch.setattr(kind, name, counted)

    count(Session, "_apply_policies")
    count(Assignor, "assign")
    count(Assignor, "foresee")
    others = [Local(machine, f"b{number}", pid=2 + number) for number in range(20)]
    for each in others:
        each.subscribe()
    assert max(looks.values(), default=0) <= 1
    run_until(cluster, [a, *others], lambda: min(sizes(a, *others)) >= 40, LONG_H)
    # Most keys have moved, each by a release of its own.
    assert looks["foresee"] < looks["assign"] < 100


# --- Positions that clients report ---


def report_late(machine):
    """Report a position under a claim that has ended."""
    a = having(machine)
    key = min(a.held)
    stale = a.returned(key, reason="closed")
    a.give_back(key, reason="closed")
    run_until(machine.cluster, [a], lambda: key in a.valid, 3 * H)
    epoch, _ = a.held[key]
    assert epoch > stale.epoch
    late = msgspec.structs.replace(stale, position=7)
    machine.service.release(a.who, api.ReleaseRequest(returned=(late,)))
    leaving = api.LeaveRequest(returned=(late,), release=False, reason="restart")
    (host,) = machine.service.groups
    assert key in host.table.leases, "it goes on under the later claim"
    machine.service.leave(a.who, leaving)
    machine.cluster.run(H)
    assert keys(machine.cluster)[key].position != 7


def test_a_position_reported_under_an_ended_claim_is_ignored(machine):
    """The client may hold the key again, under a later claim."""
    report_late(machine)


def test_a_sidecar_that_accepts_positions_under_any_claim_is_caught(
    machine, monkeypatch
):
    variants.take_any_position(monkeypatch)
    with pytest.raises(AssertionError):
        report_late(machine)


# --- Death, silence ---


def test_another_host_gets_the_partitions_of_a_dead_client_at_once():
    """Within a second, although the heartbeat interval is a minute."""
    cluster = world(partitions=2, records=[9] * 4, h=LONG_H)
    machine = Machine(cluster)
    a = Local(machine, "a", pid=1)
    a.subscribe()
    run_until(cluster, [a], lambda: len(a.valid) == 4, LONG_H)
    other = cluster.node("other", spec=spec(claims_max=4))
    run(cluster, [a], 1_000)
    a.positions = dict.fromkeys(a.held, 6)
    a.beat()
    had = set(a.held)
    machine.watch.kill(1)
    took_ms = cluster.run_until(lambda: had <= set(other.held), 1_000)
    assert took_ms < 1_000
    assert {other.session.holdings[key].position for key in had} == {6}
    assert {r.reason for r in releases(cluster)} >= {"client_died"}
    (event,) = machine.events.named("client_gone")
    assert event.fields["reason"] == "client_died"


@pytest.mark.parametrize("is_consumer", [True, False])
def test_claims_won_for_a_client_that_died_are_released(cluster, machine, is_consumer):
    a = Local(machine, "a", pid=1)
    if is_consumer:
        a.subscribe()
    else:
        a.claim(3)
    (host,) = machine.service.groups
    host.drive = lambda now_ms: None  # it wins claims, but assigns none yet
    count = 8 if is_consumer else 1
    cluster.run_until(lambda: sum(host.session.meters.won.values()) == count, H)
    assert not host.table.leases
    del host.drive
    machine.watch.kill(1)
    cluster.run(100)
    assert [r.reason for r in releases(cluster)] == ["client_died"] * count


def test_other_local_clients_get_the_partitions_of_a_dead_client(cluster, machine):
    a, b = sharing(cluster, machine)
    machine.watch.kill(1)
    took_ms = run_until(cluster, [b], lambda: len(b.valid) == 8, H)
    assert took_ms < 1_000
    assert all(a.tokens[key] != b.tokens[key] for key in a.held)


def test_a_silent_client_that_returns_in_time_keeps_its_partitions(cluster, machine):
    a, b = sharing(cluster, machine)
    before = dict(a.tokens)
    count = len(releases(cluster))
    run(cluster, [b], H)
    a.register()
    run(cluster, [a, b], H)
    assert sizes(a, b) == [4, 4]
    assert a.tokens == before
    assert len(releases(cluster)) == count


def test_keys_of_a_silent_client_are_reserved_until_their_deadline(cluster, machine):
    a, b = sharing(cluster, machine)
    a.positions = dict.fromkeys(a.held, 2)
    a.beat()
    until_ms = min(until for _, until in a.held.values())
    while machine.clock.now_ms() < until_ms:
        run(cluster, [b], 20, step_ms=20)
        assert len(b.valid) == 4, "it may still be used elsewhere"
        if machine.clock.now_ms() + 20 >= until_ms:
            break
    run_until(cluster, [b], lambda: len(b.valid) == 8, H)
    assert not a.valid & b.valid
    assert {b.positions[key] for key in a.held} == {2}
    a.register()
    a.take()
    assert not set(a.held) & b.valid


def test_a_process_stopped_for_longer_than_its_lease_loses_it(cluster, machine):
    """SIGSTOP for longer than the lease, then SIGCONT."""
    a, b = sharing(cluster, machine)
    run(cluster, [b], 3 * H)
    assert not a.valid, "by its own clock"
    assert len(b.valid) == 8
    (event,) = machine.events.named("client_silent")
    assert (event.fields["client"], event.fields["partitions"]) == ("a", 0)
    with pytest.raises(ClaimLost) as caught:
        a.beat()
    assert caught.value.reason == "gone"
    a.register()
    a.subscribe()
    a.take()
    assert not a.held
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], 2 * H)


def test_a_silent_client_without_leases_is_removed(cluster, machine):
    """Its name is kept for a heartbeat interval, at most 30 s."""
    a = Local(machine, "a")
    cluster.run(H - 100)
    assert machine.service.clients()
    cluster.run(300)
    assert not machine.service.clients()
    with pytest.raises(ClaimLost) as caught:
        a.beat()
    assert caught.value.reason == "gone"


def test_children_are_watched_with_their_client(machine):
    a = Local(machine, "a", pid=1)
    machine.service.children(a.who, api.Children(pids=(7, 8)))
    assert machine.watch.watched[-1].children == (7, 8)
    unseen = Local(machine, "b")
    with pytest.raises(ConfigurationError, match="children"):
        machine.service.children(unseen.who, api.Children(pids=(7,)))


def test_a_changed_peer_is_watched_again(machine):
    a = Local(machine, "a", pid=1)
    a.register()
    assert len(machine.watch.watched) == 1
    a.pid = 5
    a.register()
    assert [w.is_closed for w in machine.watch.watched] == [True, False]
    machine.service.register(
        "g",
        "a",
        registration=api.RegisterRequest(instance=a.instance, beat_ms=9),
        peer=Peer(1, 0, None),
    )
    assert all(w.is_closed for w in machine.watch.watched), "a pid alone proves nothing"


# --- Leaving ---


def test_a_leaving_client_releases_everything(cluster, machine):
    a = having(machine)
    a.positions = dict.fromkeys(a.held, 3)
    assert leaving(a).action == "shutdown_now"
    assert {(k.owner, k.position) for k in keys(cluster).values()} == {(None, 3)}
    cluster.run(200)
    assert not machine.service.clients()


def test_a_client_that_announces_a_restart_keeps_its_partitions(cluster, machine):
    """The next process gets the partitions under other tokens."""
    a, b = sharing(cluster, machine)
    had = set(a.held)
    assert leaving(a, release=False, reason="restart").action == "shutdown_now"
    machine.watch.kill(1)
    run(cluster, [b], 600)
    assert sizes(b) == [4]
    assert [c.state for c in machine.service.clients()] == ["restarting", "ready"]
    again = Local(machine, "a", pid=3)
    again.subscribe()
    run_until(cluster, [again, b], lambda: again.valid == had, 300)
    assert all(a.tokens[key] != again.tokens[key] for key in had)


def test_the_reservation_for_a_restart_expires(cluster, machine):
    a, b = sharing(cluster, machine)
    began_ms = cluster.clock.now_ms()
    leaving(a, release=False, reason="restart")
    run_until(cluster, [b], lambda: sizes(b) == [8], 2 * H)
    assert cluster.clock.now_ms() - began_ms >= H


def test_a_downscaling_client_works_until_its_drain_ends(cluster, machine):
    a, b = sharing(cluster, machine)
    ask = api.LeaveRequest(reason="downscale", timeout_ms=1_000)
    assert machine.service.leave(a.who, ask).action == "wait_for_drain"
    assert sizes(a) == [4], "it works on"
    run_until(cluster, [b], lambda: sizes(b) == [4], H)
    for _ in range(50):
        cluster.run(100)
        b.live()
        a.take()
        a.beat()
        if a.leaving:
            a.give_back(min(a.leaving))
        if not a.held:
            break
    assert {e.reason for e in a.named(api.Releasing)} == {"moved"}
    assert machine.service.leave(a.who, ask).action == "shutdown_now"
    run_until(cluster, [b], lambda: sizes(b) == [8], H)


def test_partitions_not_returned_at_leaving_stay_reserved(cluster, machine):
    """The client may still process them, until its deadline or its death."""
    a = having(machine)
    machine.service.leave(a.who, api.LeaveRequest())
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run(cluster, [b], 600)
    assert not b.valid
    machine.watch.kill(1)
    run_until(cluster, [b], lambda: sizes(b) == [8], H)


def test_ending_a_subscription_releases_its_partitions(cluster, machine):
    a = having(machine)
    returned = tuple(a.returned(key) for key in sorted(a.held))
    a.held.clear()
    request = api.ReleaseRequest(returned=returned, timeout_ms=1_000)
    machine.service.unsubscribe(a.who, "s", release=request, keep=False)
    assert {r.reason for r in releases(cluster)} <= {"client_left", "closed"}
    assert len(releases(cluster)) == 8
    machine.service.unsubscribe(a.who, "s", release=request, keep=False)
    a.subscribe()
    run_until(cluster, [a], lambda: sizes(a) == [8], 2 * H)


def test_leases_kept_by_unsubscribe_pass_to_the_next_subscription(cluster, machine):
    a = having(machine)
    tokens = dict(a.tokens)
    request = api.ReleaseRequest(returned=())
    machine.service.unsubscribe(a.who, "s", release=request, keep=True)
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run(cluster, [a, b], 600)
    a.subscribe(name="next")
    run(cluster, [a, b], 600)
    assert a.valid | b.valid == set(tokens)
    assert {k: a.tokens[k] for k in a.valid} == {k: tokens[k] for k in a.valid}
    assert machine.service.clients()[0].subscriptions == ("next",)


def test_unsubscribe_recalls_leases_that_were_not_returned(cluster, machine):
    a = having(machine)
    machine.service.unsubscribe(
        a.who, "s", release=api.ReleaseRequest(returned=()), keep=False
    )
    a.take()
    assert len(a.leaving) == 8
    assert {e.reason for e in a.leaving.values()} == {"closed"}
    assert not releases(cluster)
    a.live()
    run(cluster, [a], 100)
    assert len(releases(cluster)) == 8


def test_an_idle_group_is_closed(cluster, machine):
    a = Local(machine, "a")
    leaving(a)
    cluster.run(200)
    machine.service.close_idle()
    cluster.run(H - 200)
    machine.service.close_idle()
    assert [host.group_id for host in machine.service.groups] == ["g"]
    cluster.run(200)
    machine.service.close_idle()
    assert machine.service.groups == ()
    # Its last record is that it has left.
    count = len(records(cluster, Member))
    cluster.run(3 * H)
    assert len(records(cluster, Member)) == count


def test_a_group_is_not_closed_before_the_log_shows_its_releases(cluster, machine):
    """Otherwise nobody would repeat them once the brokers take records again."""
    a = having(machine)
    cluster.fates["host-1"] = AppendFate(is_lost=True)
    returned = tuple(a.returned(key) for key in a.held)
    a.held.clear()
    machine.service.leave(a.who, api.LeaveRequest(returned=returned))
    for _ in range(3):
        machine.service.close_idle()
        cluster.run(H)
    del cluster.fates["host-1"]
    cluster.run(H)
    assert len(releases(cluster)) == 8


def test_a_sidecar_that_ends_leaves_its_groups_in_order(cluster, machine):
    leaving(Local(machine, "a"))
    cluster.run(200)
    machine.service.close_idle()
    machine.service.start_drain()
    cluster.run(H)
    machine.service.close_idle()
    assert len(machine.service.groups) == 1


# --- Drains ---


def test_a_host_that_joins_gets_its_share_of_the_partitions(cluster, machine):
    a = having(machine)
    other = cluster.node("other", spec=spec())
    run_until(cluster, [a], lambda: len(other.held) == 4 and sizes(a) == [4], 3 * H)
    assert {e.reason for e in a.named(api.Releasing)} == {"surplus"}
    assert {e.successor for e in a.named(api.Releasing)} == {"other"}


def test_a_pause_is_published_and_recalls_all_leases(cluster, machine):
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


def test_a_pause_of_some_partitions_is_published_and_recalls_their_leases(
    cluster, machine
):
    a = having(machine)
    until_ms = cluster.clock.wall_ms() + 6 * H
    one = schedule(0, until_ms, op=b"a" * 16, scope={"t": (0, 2)})
    other = schedule(0, until_ms, op=b"b" * 16, scope={"t": (1,), "u": ()})
    for t in (0, 1):
        write(cluster, one, t)
        write(cluster, other, t)
    run_until(cluster, [a], lambda: len(a.valid) == 5, H)
    assert {key.partition for key in a.valid} == {3, 4, 5, 6, 7}
    assert {e.reason for e in a.named(api.Releasing)} == {"paused"}
    published = a.named(api.Paused)
    assert published[-1] == api.Paused(
        is_paused=False,
        topics=(
            api.PausedTopic(topic="t", partitions=(0, 1, 2)),
            api.PausedTopic(topic="u"),
        ),
    )
    for t in (0, 1):
        write(cluster, replace(one, seq=1, msg_expire_time=until_ms + 1), t)
    run(cluster, [a], H // 4)
    assert a.named(api.Paused) == published, "a renewal changes nothing"
    run_until(cluster, [a], lambda: sizes(a) == [8], 9 * H)
    assert a.named(api.Paused)[-1] == api.Paused(is_paused=False)


def test_a_key_released_as_stuck_does_not_return_to_its_client(cluster, machine):
    a, b = sharing(cluster, machine)
    key = min(a.held)
    a.give_back(key, reason="stuck", detail="away for 9 ms")
    run(cluster, [a, b], H - 200)
    assert key not in a.valid
    assert [r.reason for r in releases(cluster)][-1] == "stuck: away for 9 ms"


def test_a_key_whose_position_is_out_of_range_is_not_claimed_again(cluster, machine):
    a = having(machine)
    a.give_back(KEY, reason="position_out_of_range")
    run(cluster, [a], 3 * H)
    assert sizes(a) == [7]


def topic_ids(client):
    """Return the topic id of each partition in the client's last assignment."""
    found = {}
    for body in client.received:
        every = body.assigned if isinstance(body, api.Snapshot) else [body]
        for event in every:
            if isinstance(event, api.Assignment):
                found[event.partition] = event.topic_id
    return found


def test_an_assignment_states_that_no_admin_set_the_position(cluster, machine):
    (assigned, *_) = [
        event
        for body in having(machine).received
        for event in (body.assigned if isinstance(body, api.Snapshot) else [body])
        if isinstance(event, api.Assignment)
    ]
    assert not assigned.set_by
    assert assigned.set_by is not None


def test_all_partitions_of_a_recreated_topic_are_claimed_again(cluster, machine):
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
    """Commit offsets to Kafka, from which the group begins in these partitions."""
    offsets = {TopicPartition("t", number): 1 for number in partitions}
    cluster.kafka.data_log().commit("g", offsets, timeout_ms=1_000)


def test_a_missing_position_fails_one_client_only(cluster, machine):
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


def test_a_missing_position_fails_the_only_client_but_not_the_group(cluster, machine):
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
    a, b = sharing(cluster, machine)
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
    machine.service.release(a.who, api.ReleaseRequest(returned=returned))
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
