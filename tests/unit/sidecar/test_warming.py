"""Clients warm up before they get a partition of this host or of another one."""

import pytest
from enginekit import H, of, spec, world, write
from logkit import settings
from sidecarkit import (
    Local,
    Machine,
    find,
    having,
    records,
    releases,
    run,
    run_until,
    sizes,
)

from kafka_marshal.errors import ClaimLost, ClaimRejected
from kafka_marshal.protocol.records import (
    ClaimingPartition,
    HandoffOffer,
    HandoffReady,
    ReleasingPartition,
)
from kafka_marshal.protocol.settings import TUNABLES
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.answers import Handoff
from kafka_marshal.sidecar.process_monitor import Caller

OFFERS_MAX = TUNABLES["handoffs_max"].default
WITHIN_MS = TUNABLES["handoff_ms"].default


def joining(machine, name="b", *, pid=2, warms=True):
    client = Local(machine, name, pid=pid)
    client.subscribe(warms=warms)
    return client


def offered(cluster, machine, count=4):
    """Return a client that holds all partitions, and one asked to warm up for half."""
    a = having(machine, warms=True)
    b = joining(machine)
    run_until(cluster, [a, b], lambda: len(b.warm) == count, H)
    return a, b


def limit(cluster, machine, handoff_ms):
    """Set the time that successors have to warm up."""
    home = machine.node.engine.context.home_of("g")
    write(cluster, settings(handoff_ms=handoff_ms), home)


def counts(machine):
    return machine.service.groups[0].session.handoff_counts


def shown(machine):
    return machine.service.handoffs("g")


# --- between two clients of one sidecar


def test_a_client_keeps_its_partitions_until_another_is_ready(cluster, machine):
    a, b = offered(cluster, machine)
    run(cluster, [a, b], 3 * H)
    assert sizes(a, b) == [8, 0]
    key, event = min(b.warm.items())
    assert event.owner == "a"
    assert (event.epoch, event.subscription) == (a.held[key][0], "s")
    assert (event.position, event.until_ms > a.now_ms) == (0, True)
    b.ready(key)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [7, 1], H)
    assert set(b.held) == {key}
    (left,) = a.named(api.Releasing)
    assert a.received.index(left) > 0
    assert (left.partition, left.reason) == (key.partition, "moved")


def test_a_handoff_between_clients_writes_only_releases_and_claims(cluster, machine):
    a, b = offered(cluster, machine)
    for key in list(b.warm):
        b.ready(key)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    assert not records(cluster, HandoffOffer)
    assert not records(cluster, HandoffReady)
    assert len(releases(cluster)) == 4
    assert len(records(cluster, ClaimingPartition)) == 8 + 4


def test_a_client_that_does_not_warm_up_gets_partitions_at_once(cluster, machine):
    a = having(machine, warms=True)
    b = joining(machine, warms=False)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    assert not b.named(api.Warm)


def test_partitions_of_a_dead_client_move_without_a_handoff(cluster, machine):
    a, b = offered(cluster, machine)
    machine.watch.kill(1)
    run_until(cluster, [b], lambda: len(b.valid) == 8, H)
    assert not b.warm
    assert {r.reason for r in releases(cluster)} == {"client_died"}
    assert not list(machine.service.groups[0].warm_ups)
    assert a.held


def test_only_partitions_of_living_clients_are_handed_off(cluster, machine):
    """Those of a dead client are assigned without a warm-up."""
    a = having(machine, warms=True)
    b = joining(machine, warms=False)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    had = set(b.held)
    c = Local(machine, "c", pid=3)
    machine.watch.kill(2)
    c.subscribe(warms=True)
    run_until(cluster, [a, c], lambda: c.valid, H)
    for _ in range(20):
        run(cluster, [a, c], 100)
        for key in list(c.warm):
            c.ready(key)
    assert len(a.valid) + len(c.valid) == 8
    assert abs(len(a.valid) - len(c.valid)) <= 1
    assert {w.owner for w in c.named(api.Warm)} <= {"a"}
    assert not had & {c.key(w) for w in c.named(api.Warm)}


def test_the_death_of_a_client_that_warms_up_moves_no_partitions(cluster, machine):
    a, b = offered(cluster, machine)
    before = dict.fromkeys(a.held)
    machine.watch.kill(2)
    run(cluster, [a], 3 * H)
    assert dict.fromkeys(a.held) == before
    assert not releases(cluster)
    assert not list(machine.service.groups[0].warm_ups)
    withdrawn = machine.events.named("handoff_withdrawn")
    assert {each.fields["reason"] for each in withdrawn} == {"successor_gone"}
    assert b.warm


def test_a_client_that_warms_up_too_slowly_is_asked_again_only_later(cluster, machine):
    limit(cluster, machine, H)
    a, b = offered(cluster, machine)
    asked = len(b.named(api.Warm))
    key = min(b.warm)
    run(cluster, [a, b], H - 200)
    assert len(b.named(api.Warm)) == asked
    run(cluster, [a, b], H // 2)
    with pytest.raises(ClaimRejected) as caught:
        b.ready(key)
    assert caught.value.reason == "no_offer"
    assert not shown(machine)
    assert sizes(a, b) == [8, 0]
    run_until(cluster, [a, b], lambda: len(b.named(api.Warm)) > asked, 2 * H)
    b.ready(key)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [7, 1], H)


def test_a_ready_after_the_deadline_is_refused(cluster, machine):
    limit(cluster, machine, H)
    a, b = offered(cluster, machine)
    group = machine.service.groups[0]
    for found in group.warm_ups:
        found.until_ms = a.now_ms
    with pytest.raises(ClaimRejected) as caught:
        b.ready(min(b.warm))
    assert caught.value.reason == "late"


def test_at_most_handoffs_max_partitions_are_offered_at_a_time():
    cluster = world(partitions=2, records=[1] * 40)
    machine = Machine(cluster)
    a = having(machine, count=40, warms=True)
    b = joining(machine)
    run(cluster, [a, b], 2 * H)
    assert len(b.warm) == OFFERS_MAX
    done = set()
    while len(b.valid) < 20:
        for key in set(b.warm) - done:
            b.ready(key)
            done.add(key)
        run(cluster, [a, b], 500)
        assert len(b.named(api.Warm)) <= 20
    assert sizes(a, b) == [20, 20]


def test_unsubscribe_withdraws_the_offers_to_a_client(cluster, machine):
    a, b = offered(cluster, machine)
    none = api.ReleaseRequest(returned=())
    machine.service.unsubscribe(b.who, "s", release=none, keep=False)
    run(cluster, [a, b], 500)
    assert not list(machine.service.groups[0].warm_ups)
    assert sizes(a, b) == [8, 0]


def test_a_silent_client_is_asked_again_when_it_is_back(cluster, machine):
    a, b = offered(cluster, machine)
    key = min(b.warm)
    run(cluster, [a], 2_000)
    assert not list(machine.service.groups[0].warm_ups)
    run(cluster, [a, b], 500)
    assert len([w for w in b.named(api.Warm) if w.partition == key.partition]) == 2
    b.ready(key)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [7, 1], H)


def test_a_client_that_leaves_works_until_another_is_ready(cluster, machine):
    a = having(machine, warms=True)
    b = joining(machine)
    run(cluster, [a, b], 1_000)
    answer = machine.service.leave(a.who, api.LeaveRequest(reason="downscale"))
    assert answer.action == "wait_for_drain"
    run(cluster, [a, b], H)
    assert sizes(a, b) == [8, 0]
    while len(b.valid) < 8:
        for key in list(b.warm):
            b.ready(key)
        run(cluster, [each for each in (a, b) if each is b or a.valid], 100)
    assert not a.valid


@pytest.mark.parametrize("is_leaving", [True, False])
def test_partitions_of_a_client_that_stops_move_without_a_warm_up(
    cluster, machine, is_leaving
):
    a = having(machine, warms=True)
    b = joining(machine)
    run(cluster, [a, b], 1_000)
    if is_leaving:
        machine.service.leave(a.who, api.LeaveRequest())
    else:
        none = api.ReleaseRequest(returned=())
        machine.service.unsubscribe(a.who, "s", release=none, keep=False)
    for _ in range(20):
        run(cluster, [each for each in (a, b) if each is b or a.held], 100)
    assert len(b.valid) == 8
    assert not list(machine.service.groups[0].warm_ups)


# --- a reconnect, a replay, a snapshot


def test_missed_warm_events_are_replayed(cluster, machine):
    a = having(machine, warms=True)
    b = Local(machine, "b", pid=2)
    b.take()
    at = b.after
    b.subscribe(warms=True)
    for _ in range(10):
        cluster.run(100)
        a.live()
        b.beat()
    missed = [frame.body for frame in machine.service.feed(b.who, at).take()]
    assert [type(each) for each in missed] == [api.Warm] * 4


def test_a_hundred_reconnects_lose_no_event(cluster, machine):
    """Each reconnect resumes after the last event."""
    a = having(machine, warms=True)
    b = Local(machine, "b", pid=2)
    b.subscribe(warms=True)
    done = set()
    for number in range(100):
        for client in (a, b):
            client.follow()
            client.live()
        for key in set(b.warm) - done:
            b.ready(key)
            done.add(key)
        if number % 40 == 20:
            none = api.ReleaseRequest(returned=())
            machine.service.unsubscribe(b.who, "s", release=none, keep=False)
        elif number % 40 == 30:
            done.clear()
            b.subscribe(warms=True)
        cluster.run(50)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    for client in (a, b):
        leases = find(machine, client).leases
        assert {key: lease.epoch for key, lease in leases.items()} == {
            key: epoch for key, (epoch, _) in client.held.items()
        }
        # No event was lost that a second snapshot had to replace.
        assert len(client.named(api.Snapshot)) == 1
    assert len(b.named(api.Warm)) >= 8


def test_a_snapshot_lists_the_partitions_to_warm_up_for(cluster, machine):
    _, b = offered(cluster, machine)
    expected = set(b.warm)
    b.ready(min(expected))
    (frame,) = machine.service.feed(b.who, None).take()
    assert {b.key(each) for each in frame.body.warming} == expected - {min(expected)}


def test_views_and_counts_show_the_phase_of_each_handoff(cluster, machine):
    _, b = offered(cluster, machine)
    assert counts(machine) == {"offered": 4, "ready": 0, "warming": 4}
    key = min(b.warm)
    b.ready(key)
    assert counts(machine) == {"offered": 3, "ready": 1, "warming": 3}
    rows = {row.partition: row for row in shown(machine)}
    row = rows[key.partition]
    wall_ms = machine.node.engine.context.ports.clock.wall_ms()
    assert row == Handoff(
        topic="t",
        partition=key.partition,
        owner="host-1",
        successor="host-1",
        phase="ready",
        since_ms=row.since_ms,
        until_ms=row.since_ms + WITHIN_MS,
        from_client="a",
        to_client="b",
    )
    assert 0 <= wall_ms - row.since_ms < H
    assert {each.phase for each in rows.values()} == {"ready", "offered"}
    (line,) = [each for each in machine.service.clients() if each.client == "b"]
    assert len(line.warming) == 3


# --- refusals: phase by sender


def test_a_ready_report_without_an_open_offer_is_refused(cluster, machine):
    """For combinations of phase and sender."""
    a, b = offered(cluster, machine)
    key = min(b.warm)
    epoch, owner = b.warm[key].epoch, a.who
    other = min(set(a.held) - set(b.warm))
    nobody = Caller("g", "z", "00" * 16)
    earlier = Caller("g", "b", "11" * 16)

    def refusal(who, key, epoch):
        report = api.ReadyRequest(topic=key.topic, partition=key.partition, epoch=epoch)
        try:
            machine.service.ready(who, report)
        except (ClaimRejected, ClaimLost) as error:
            return error.reason
        return None

    assert refusal(b.who, key, epoch + 1) == "old_epoch"
    assert refusal(b.who, Key("g", "none", 0), epoch) == "old_epoch"
    assert refusal(b.who, other, a.held[other][0]) == "no_offer"
    assert refusal(owner, key, epoch) == "not_successor"
    assert refusal(nobody, key, epoch) == "unknown"
    assert refusal(earlier, key, epoch) == "gone"
    assert refusal(Caller("none", "b", "11" * 16), key, epoch) == "unknown"
    assert len(a.held) == 8
    assert refusal(b.who, key, epoch) is None
    assert refusal(b.who, key, epoch) is None
    assert refusal(owner, key, epoch) == "not_successor"
    run_until(cluster, [a, b], lambda: key in b.valid, H)
    assert refusal(b.who, key, epoch) == "old_epoch"
    assert refusal(b.who, key, b.held[key][0]) == "no_offer"
    assert machine.service.refusals() == {
        ("ready", "old_epoch"): 3,
        ("ready", "no_offer"): 2,
        ("ready", "not_successor"): 2,
        ("ready", "unknown"): 2,
        ("ready", "gone"): 1,
    }


def test_a_release_without_effect_is_counted_as_refused(cluster, machine):
    a, b = offered(cluster, machine)
    key = min(a.held)
    true = a.returned(key)
    false = api.Release(
        topic="t", partition=key.partition, epoch=true.epoch + 1, position=9
    )
    for who, returned in ((b.who, true), (a.who, false)):
        machine.service.release(who, api.ReleaseRequest(returned=(returned,)))
    assert machine.service.refusals() == {
        ("released", "not_owner"): 1,
        ("released", "old_epoch"): 1,
    }
    run(cluster, [a, b], 500)
    assert key in a.valid
    assert find(machine, a).leases[key].holding.position != 9


# --- a partition of another host


def other_owner(cluster, machine, *, warms=True):
    """Return an owner on another host, and a client here that can warm up."""
    other = cluster.node("other", spec=spec())
    cluster.run_until(lambda: len(other.held) == 8, 3 * H)
    b = joining(machine, warms=warms)
    return other, b


def test_a_client_warms_up_for_partitions_of_another_host(cluster, machine):
    other, b = other_owner(cluster, machine)
    run_until(cluster, [b], lambda: len(b.warm) == 4, 3 * H)
    run(cluster, [b], 2 * H)
    assert len(other.held) == 8
    key, event = min(b.warm.items())
    assert (event.owner, event.position) == ("other", 0)
    assert 0 < event.until_ms - b.now_ms <= WITHIN_MS
    assert counts(machine) == {"offered": 0, "ready": 0, "warming": 4}
    assert {row.phase for row in shown(machine)} == {"offered"}
    assert {(r.owner, r.successor, r.to_client) for r in shown(machine)} == {
        ("other", "host-1", "b")
    }
    b.ready(key)
    run_until(cluster, [b], lambda: set(b.valid) == {key}, H)
    assert len(other.held) == 7
    (ready,) = records(cluster, HandoffReady)
    assert ready.partition == key.partition
    (release,) = releases(cluster, "other")
    assert release.successor == "host-1"


def test_a_key_of_another_host_goes_to_the_client_that_warmed_up(cluster, machine):
    other, b = other_owner(cluster, machine)
    run_until(cluster, [b], lambda: len(b.warm) == 4, 3 * H)
    c = joining(machine, "c", pid=3)
    run(cluster, [b, c], 500)
    warmed = set(b.warm)
    for key in warmed:
        b.ready(key)
    run_until(cluster, [b, c], lambda: len(b.valid) >= 3, 2 * H)
    assert set(b.valid) <= warmed
    assert other.held


def test_another_client_is_asked_to_warm_up_if_the_first_dies(cluster, machine):
    _, b = other_owner(cluster, machine)
    run_until(cluster, [b], lambda: len(b.warm) == 4, 3 * H)
    c = joining(machine, "c", pid=3)
    run(cluster, [b, c], 500)
    machine.watch.kill(2)
    run_until(cluster, [c], lambda: set(c.warm) >= set(b.warm), 2 * H)
    key = min(b.warm)
    c.ready(key)
    run_until(cluster, [c], lambda: key in c.valid, H)


def test_the_owner_stays_if_the_last_client_that_warms_up_dies(cluster, machine):
    other, b = other_owner(cluster, machine)
    run_until(cluster, [b], lambda: len(b.warm) == 4, 3 * H)
    machine.watch.kill(2)
    cluster.run(4 * H)
    assert len(other.held) == 8
    assert not of(cluster, "other", ReleasingPartition, partition=1)
    assert not list(machine.service.groups[0].warm_ups)


def test_a_client_that_does_not_warm_up_gets_partitions_of_another_host(
    cluster, machine
):
    other = cluster.node("other", spec=spec())
    cluster.run_until(lambda: len(other.held) == 8, 3 * H)
    b = joining(machine)
    c = joining(machine, "c", pid=3, warms=False)
    run_until(cluster, [b, c], lambda: len(c.valid) >= 2, 4 * H)
    assert not b.valid
    assert not c.named(api.Warm)


def test_keys_of_a_crashed_host_go_to_a_client_that_was_warming_up(cluster, machine):
    other, b = other_owner(cluster, machine)
    run_until(cluster, [b], lambda: len(b.warm) == 4, 3 * H)
    cluster.crash(other)
    run_until(cluster, [b], lambda: len(b.valid) == 8, 5 * H)
    run(cluster, [b], 200)
    assert not list(machine.service.groups[0].warm_ups)


def test_a_restarted_sidecar_has_its_clients_warm_up_again(cluster, tmp_path):
    machine = Machine(cluster, state_dir=tmp_path)
    other, b = other_owner(cluster, machine)
    run_until(cluster, [b], lambda: len(b.warm) == 4, 3 * H)
    machine.restart()
    b.warm.clear()
    b.register()
    b.subscribe(warms=True)
    run_until(cluster, [b], lambda: len(b.warm) == 4, H)
    for key in list(b.warm):
        b.ready(key)
    run_until(cluster, [b], lambda: len(b.valid) == 4, 2 * H)
    assert len(other.held) == 4


# --- a partition for another host


def test_a_client_keeps_a_partition_until_another_host_is_ready(cluster, machine):
    a = having(machine)
    other = cluster.node("other")
    other.warming.is_held = True
    other.consume(spec(on_warm=lambda *_: None))
    run_until(cluster, [a], lambda: other.warming.waiting_count == 4, 3 * H)
    run(cluster, [a], 2 * H)
    assert len(a.valid) == 8
    assert counts(machine) == {"offered": 4, "ready": 0, "warming": 0}
    assert {(r.from_client, r.to_client) for r in shown(machine)} == {("a", None)}
    other.warming.run_waiting()
    run_until(cluster, [a], lambda: len(other.held) == 4, H)
    assert len(a.valid) == 4
    assert {each.successor for each in a.named(api.Releasing)} == {"other"}


def test_partitions_offered_to_another_host_do_not_move_between_clients(
    cluster, machine
):
    a = having(machine)
    other = cluster.node("other")
    other.warming.is_held = True
    other.consume(spec(on_warm=lambda *_: None))
    run_until(cluster, [a], lambda: other.warming.waiting_count == 4, 3 * H)
    offered = {Key("g", row.topic, row.partition) for row in shown(machine)}
    b = joining(machine, warms=False)
    run(cluster, [a, b], H // 2)
    assert offered <= set(a.valid)


def test_partitions_are_handed_off_between_clients_of_two_sidecars(cluster, machine):
    a = having(machine, warms=True)
    second = Machine(cluster, "host-2")
    b = joining(second)
    run_until(cluster, [a, b], lambda: len(b.warm) == 4, 3 * H)
    assert {each.owner for each in b.warm.values()} == {"host-1"}
    for key in list(b.warm):
        b.ready(key)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    offers = [r for r in records(cluster, HandoffOffer) if r.successor is not None]
    assert len(offers) == 4
    gaps = second.service.groups[0].session.meters.handoff_gaps
    assert sum(sum(each.counts) for each in gaps.values()) == 4


HELD = 8


def owner_elsewhere(cluster, name="other"):
    """Return an owner on another host that keeps everything, its surplus included."""
    other = cluster.node(name, spec=spec(policy="greedy"))
    cluster.run_until(lambda: len(other.held) == HELD, 3 * H)
    return other


def standing(machine, name="b", *, pid=2, count=1, **rest):
    client = Local(machine, name, pid=pid)
    client.subscribe(standbys=count, policy="greedy", **rest)
    return client


def placed(machine):
    return machine.service.groups[0]._warm_ups.standbys


def test_a_client_stands_by_for_partitions_of_another_host(cluster, machine):
    other = owner_elsewhere(cluster)
    b = standing(machine)
    run_until(cluster, [b], lambda: len(b.standbys) == HELD, 3 * H)
    assert not b.held
    event = min(b.standbys.items())[1]
    assert (event.owner, event.position, event.subscription) == ("other", 0, "s")
    cluster.crash(other)
    run_until(cluster, [b], lambda: len(b.valid) == HELD, 5 * H)
    run(cluster, [b], 500)
    assert not b.standbys
    assert not placed(machine).by_key
    assert all(each.owner for each in b.named(api.Standby))


def test_each_partition_goes_to_the_client_that_stood_by_for_it(cluster, machine):
    other = owner_elsewhere(cluster)
    b, c = standing(machine), standing(machine, "d", pid=3)
    run_until(cluster, [b, c], lambda: len(b.standbys) + len(c.standbys) == HELD, 3 * H)
    run(cluster, [b, c], H)
    loaded = {key: client for client in (b, c) for key in client.standbys}
    assert len(loaded) == HELD
    assert b.standbys
    cluster.crash(other)
    first = {}

    def has_all():
        for client in (b, c):
            for key in client.valid:
                first.setdefault(key, client)
        return len(b.valid) + len(c.valid) == HELD

    run_until(cluster, [b, c], has_all, 5 * H)
    assert first == loaded


def test_a_client_without_standbys_gets_no_standby_events(cluster, machine):
    owner_elsewhere(cluster)
    b, c = standing(machine), standing(machine, "c", pid=3, count=0)
    run_until(cluster, [b, c], lambda: len(b.standbys) == HELD, 3 * H)
    assert not c.named(api.Standby)


def test_another_client_stands_by_if_the_first_dies(cluster, machine):
    owner_elsewhere(cluster)
    b, c = standing(machine), standing(machine, "d", pid=3)
    run_until(cluster, [b, c], lambda: len(b.standbys) + len(c.standbys) == HELD, 3 * H)
    machine.watch.kill(2)
    run_until(cluster, [c], lambda: len(c.standbys) == HELD, 2 * H)


def test_the_death_of_the_only_client_ends_its_standbys(cluster, machine):
    other = owner_elsewhere(cluster)
    b = standing(machine)
    run_until(cluster, [b], lambda: len(b.standbys) == HELD, 3 * H)
    machine.watch.kill(2)
    cluster.run(3 * H)
    assert len(other.held) == HELD
    assert not placed(machine).by_key


def test_two_hosts_divide_the_standbys(cluster, machine):
    owner_elsewhere(cluster)
    b = standing(machine)
    run_until(cluster, [b], lambda: len(b.standbys) == HELD, 3 * H)
    second = Machine(cluster, "host-2")
    c = standing(second, "c", pid=4)
    run_until(cluster, [b, c], lambda: len(c.standbys) > 0, 4 * H)
    run(cluster, [b, c], 2 * H)
    assert not b.standbys.keys() & c.standbys.keys()
    assert len(b.standbys) + len(c.standbys) == HELD


def test_a_snapshot_lists_the_standbys_of_a_client(cluster, machine):
    owner_elsewhere(cluster)
    b = standing(machine)
    run_until(cluster, [b], lambda: len(b.standbys) == HELD, 3 * H)
    before = dict(b.standbys)
    b.after = None
    b.follow()
    b.take()
    assert b.standbys == before


def test_a_standby_ends_if_no_client_gets_the_claimed_partition(cluster, machine):
    """The sidecar claimed the partition, and lost it before a client got it."""
    owner_elsewhere(cluster)
    b = standing(machine)
    run_until(cluster, [b], lambda: len(b.standbys) == HELD, 3 * H)
    key = min(b.standbys)
    placed(machine).end(key, is_owner=True)
    run(cluster, [b], H)
    assert b.named(api.Standby)[-1].owner is None
    placed(machine).end(key, is_owner=False)
    assert key not in placed(machine).by_key


def test_a_standby_ends_if_another_client_has_the_partition(cluster, machine):
    b = standing(machine, count=0)
    run_until(cluster, [b], lambda: len(b.valid) == HELD, 3 * H)
    c = standing(machine, "c", pid=3, claims_max=1)
    run(cluster, [b, c], H)
    key = next(key for key in b.valid if key not in c.held)
    placed(machine).begin(key, owner="other", position=None)
    run(cluster, [b, c], H)
    assert [each.owner for each in c.named(api.Standby)] == ["other", None]


def test_the_sidecar_counts_a_standby_as_done_when_it_begins(cluster, machine):
    standing(machine)
    session = machine.service.groups[0].session
    (sub,) = session.subscriptions
    key = next(iter(sub.all_keys()))
    outcome = sub.standby.begin(key, owner="other", position=1)
    assert outcome.done()
    assert outcome.exception() is None
    assert outcome.result() is None
    sub.standby.close()
    assert sub.standby_count == 1


@pytest.mark.parametrize("counts", [(0,), (2,), (0, 0), (0, 2), (2, 1)])
def test_a_subscription_has_the_largest_standby_count_of_its_clients(
    cluster, machine, counts
):
    clients = [
        standing(machine, f"b{number}", pid=2 + number, count=count)
        for number, count in enumerate(counts)
    ]
    run(cluster, clients, H)
    (sub,) = machine.service.groups[0].session.subscriptions
    assert sub.standby_count == max(counts)
    assert (sub.standby is not None) == (max(counts) > 0)
