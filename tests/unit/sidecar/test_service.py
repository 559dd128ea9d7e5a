"""Operations of the service in a simulated cluster: positions, grants, shutdown."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from countkit import is_over, moving, resize
from enginekit import (
    KEY,
    H,
    fold,
    of,
    pause_record,
    spec,
    world,
    write,
)
from logkit import planned, settings
from msgspec.structs import asdict, replace
from sidecarkit import (
    Local,
    Machine,
    find,
    having,
    keys,
    leaving,
    records,
    releases,
    run,
    run_until,
    sizes,
)

from kafka_marshal.config import Membership
from kafka_marshal.errors import (
    ClaimLost,
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    InvalidTransition,
    LogUnwritable,
)
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.losses import marks_of
from kafka_marshal.protocol.records import (
    ClaimingMessages,
    Directive,
    Heartbeat,
    Member,
    ReleasingPartition,
)
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.sidecar import registry, service
from kafka_marshal.sidecar.health import State
from kafka_marshal.sidecar.process_monitor import Caller
from simulator.fakestore import AppendFate

TASK = "7a" * 16


# --- Positions ---


def test_a_position_in_a_heartbeat_reaches_the_log(cluster, machine):
    a = having(machine)
    a.positions[KEY] = 4
    run(cluster, [a], H)
    assert (
        fold(cluster, 1 if KEY not in fold(cluster, 0).keys else 0).keys[KEY].position
        == 4
    )


def test_beat_at_once_does_the_same_as_beat(cluster, machine):
    a = having(machine)
    before = a.beat()
    a.positions[KEY] = 4
    request = api.HeartbeatRequest(progress=a.progress())
    assert machine.service.beat_at_once(a.who, request) == before
    lease = machine.service.groups[0].table.leases[KEY]
    assert lease.holding.position == 4
    (line,) = machine.service.clients()
    assert line.beat_age_ms == 0


def test_beat_at_once_declines_heartbeats_that_may_block(cluster, machine):
    a = having(machine)
    a.beat()
    at_once, lock = machine.service.beat_at_once, machine.node.engine.changed
    assert at_once(a.who, api.HeartbeatRequest(flush=True, timeout_ms=9)) is None
    a.seeks[KEY] = 1
    sought = api.HeartbeatRequest(progress=a.progress())
    assert at_once(a.who, sought) is None
    lease = machine.service.groups[0].table.leases[KEY]
    assert lease.holding.seek_count == 0
    with ThreadPoolExecutor(1) as other:
        other.submit(lock.acquire).result()
        assert at_once(a.who, api.HeartbeatRequest()) is None
        other.submit(lock.release).result()
    assert at_once(a.who, api.HeartbeatRequest()) is not None
    lease.journaled_until_ms -= 1  # a renewal that the journal does not cover yet
    assert at_once(a.who, api.HeartbeatRequest()) is None
    a.beat()
    assert at_once(a.who, api.HeartbeatRequest()) is not None


@pytest.mark.parametrize("group_id", ["g", "other"])
def test_a_heartbeat_keeps_a_client_from_being_silent_while_the_lock_is_busy(
    cluster, machine, group_id
):
    """Otherwise a busy engine would move its partitions, and become busier."""
    a = having(machine)
    find(machine, a).mark_away(cluster.clock.now_ms())
    lock, beat = machine.node.engine.changed, api.HeartbeatRequest()

    def is_away():
        return find(machine, a).is_away(cluster.clock.now_ms())

    with ThreadPoolExecutor(1) as other:
        other.submit(lock.acquire).result()
        others = Caller(group_id, "a", "00" * 16)
        assert machine.service.beat_at_once(others, beat) is None
        assert is_away()
        assert machine.service.beat_at_once(a.who, beat) is None
        assert not is_away()
        other.submit(lock.release).result()


def test_beat_at_once_refuses_an_unknown_client(machine):
    with pytest.raises(ClaimLost, match="register first"):
        machine.service.beat_at_once(Caller("g", "c", "00"), api.HeartbeatRequest())
    with ThreadPoolExecutor(1) as other:  # the lock is free again
        assert other.submit(machine.node.engine.changed.acquire, timeout=30).result()
        other.submit(machine.node.engine.changed.release).result()


def test_a_flush_is_answered_once_the_log_has_the_positions(cluster, machine):
    a = having(machine)
    a.positions = dict.fromkeys(a.held, 5)
    a.beat(flush=True, timeout_ms=1_000)
    assert {keys(cluster)[key].position for key in a.held} == {5}


def test_a_flush_has_a_deadline(cluster, machine):
    a = having(machine)
    machine.node.cut(is_cut=True)
    with pytest.raises(DeadlineExceeded, match="did not show the positions"):
        a.beat(flush=True, timeout_ms=300)


def test_a_flush_confirms_a_seek_and_its_repeat_rewinds_nothing(cluster, machine):
    a = having(machine)
    a.positions = dict.fromkeys(a.held, 5)
    a.beat(flush=True, timeout_ms=1_000)
    a.positions[KEY], a.seeks[KEY] = 2, 1
    a.beat(flush=True, timeout_ms=1_000)
    found = {key: keys(cluster)[key].position for key in a.held}
    assert found == dict.fromkeys(a.held, 5) | {KEY: 2}
    a.beat(flush=True, timeout_ms=1_000)  # repeated: nothing is rewound again
    partition = next(t for t in (0, 1) if KEY in fold(cluster, t).keys)
    sent = of(cluster, "host-1", Heartbeat, partition=partition)
    assert [each.record.position for each in sent if each.record.rewind] == [2]


def test_an_unconfirmed_seek_ends_a_subleased_claim_without_a_release(cluster, machine):
    """PROTOCOL 6.6: an earlier record may undo the seek, so the claim becomes stale."""
    a = having(machine)
    epoch, _ = a.held[KEY]
    cluster.fates["host-1"] = AppendFate(is_lost=True)
    machine.service.groups[0].session.beat_now()
    cluster.fates.clear()
    run(cluster, [a], 2 * H)
    a.positions[KEY], a.seeks[KEY] = 2, 1
    with pytest.raises(ClaimLost, match="no longer held under that claim"):
        a.beat(flush=True, timeout_ms=1_000)
    run(cluster, [a], 20)
    assert KEY not in a.held
    assert releases(cluster) == []
    assert keys(cluster)[KEY].position == 2
    run_until(cluster, [a], lambda: KEY in a.held, 5 * H)
    assert a.held[KEY][0] > epoch


def test_a_position_reported_before_a_seek_is_ignored(cluster, machine):
    a = having(machine)
    a.positions[KEY], a.seeks[KEY] = 2, 1
    a.beat(flush=True, timeout_ms=1_000)
    a.positions[KEY], a.seeks[KEY] = 7, 0
    a.beat(flush=True, timeout_ms=1_000)
    assert keys(cluster)[KEY].position == 2


def test_a_flush_after_a_seek_has_a_deadline(cluster, machine):
    a = having(machine)
    machine.node.cut(is_cut=True)
    a.positions[KEY], a.seeks[KEY] = 2, 1
    with pytest.raises(DeadlineExceeded, match="did not show the positions"):
        a.beat(flush=True, timeout_ms=300)


def test_a_position_reported_for_an_ended_claim_is_ignored(cluster, machine):
    """A flush with such a report is refused."""
    a = having(machine)
    epoch, _ = a.held[KEY]
    a.positions[KEY] = 2
    a.give_back(KEY, timeout_ms=1_000)
    late = api.Progress(topic="t", partition=0, epoch=epoch, position=5)
    machine.service.beat(a.who, api.HeartbeatRequest(progress=(late,)))
    with pytest.raises(ClaimLost, match="no longer held under that claim") as caught:
        machine.service.beat(a.who, api.HeartbeatRequest(progress=(late,), flush=True))
    assert caught.value.reason == "stale_token"
    run(cluster, [a], H)
    assert keys(cluster)[KEY].position == 2


def test_a_release_is_idempotent(cluster, machine):
    a = having(machine)
    returned = a.give_back(KEY, timeout_ms=1_000)
    for _ in range(3):
        machine.service.release(
            a.who, api.ReleaseRequest(returned=returned, timeout_ms=1_000)
        )
    assert len(releases(cluster)) == 1


# --- At most once ---


def granted(machine, client, key, first, last, **rest):
    """Request offsets as a client does; return the verdict."""
    ask = grant_request(machine, client, key, first, last, **rest)
    return machine.service.grant(client.group, ask)


def grant_request(machine, client, key, first, last, **rest):
    host = machine.service.groups[0]
    owner = host.session.claimant.owner
    return api.GrantRequest(
        client_id=owner.client_id,
        incarnation=owner.incarnation.hex(),
        topic=key.topic,
        partition=key.partition,
        epoch=client.held[key][0],
        grantee=rest.pop("grantee", client.instance),
        secret=rest.pop("secret", client.secrets[key]),
        first=first,
        last=last,
        timeout_ms=rest.pop("timeout_ms", 1_000),
        **rest,
    )


@pytest.fixture
def single():
    return Machine(world(records=(20,)))


def test_a_grant_request_is_answered_with_the_verdict_of_the_fold(single):
    a = having(single, count=1, delivery="amo")
    (assigned,) = single.service.groups[0].snapshot(find(single, a))[0].assigned
    assert assigned.position == 0
    got = granted(single, a, KEY, 0, 4, done=0)
    assert (got.outcome, got.first, got.last, got.head) == ("accepted", 0, 4, 5)
    other = granted(single, a, KEY, 0, 4, grantee=TASK)
    assert (other.outcome, other.reason, other.first) == (
        "refused",
        "nothing_left",
        None,
    )
    records = [x.record for x in of(single.cluster, "host-1", ClaimingMessages)]
    assert [r.grantee.hex() for r in records] == [a.instance, TASK]
    assert marks_of(records[0]) == {0: 0}
    with pytest.raises(ConfigurationError, match="last is below first"):
        granted(single, a, KEY, 4, 3)


def at_once(machine, client, first, last, **rest):
    """Call ``grant_at_once``; return the request, and the verdicts sent to it."""
    ask = grant_request(machine, client, KEY, first, last, **rest)
    seen = []
    pending = machine.service.grant_at_once(client.group, ask, on_verdict=seen.append)
    return pending, seen


def test_grant_at_once_does_the_same_as_grant(single):
    a = having(single, count=1, delivery="amo")
    assert at_once(single, a, 0, 4)[0] is None, "the end of the log is not known yet"
    granted(single, a, KEY, 0, 19, grantee=TASK)
    assert [x.record.seq for x in of(single.cluster, "host-1", ClaimingMessages)]
    pending, seen = at_once(single, a, 0, 4, request=1)
    assert (pending.verdict, pending.waiting_count, seen) == (None, 1, [])
    single.cluster.run(100)
    assert seen == [pending.verdict]
    verdict = pending.verdict
    assert (verdict.outcome, verdict.reason) == ("refused", "nothing_left")
    # A repeated number returns the same request, which has its verdict.
    again, later = at_once(single, a, 0, 4, request=1)
    assert (again, later) == (pending, [])
    with pytest.raises(ConfigurationError, match="request number 1 was"):
        at_once(single, a, 1, 4, request=1)


def test_grant_at_once_declines_requests_that_have_to_wait(single):
    a = having(single, count=1, delivery="amo")
    granted(single, a, KEY, 0, 9)
    before = len(of(single.cluster, "host-1", ClaimingMessages))
    assert at_once(single, a, 20, 29)[0] is None, "beyond the known end"
    unread = dict(a.held)
    a.held[KEY] = (a.held[KEY][0] + 1_000, 0)
    assert at_once(single, a, 0, 9)[0] is None
    a.held = unread
    lock = single.node.engine.changed
    with ThreadPoolExecutor(1) as other:
        other.submit(lock.acquire).result()
        assert at_once(single, a, 0, 9)[0] is None
        other.submit(lock.release).result()
    with pytest.raises(ClaimRejected, match="secret of the claim"):
        at_once(single, a, 0, 9, secret="00" * 16)
    assert len(of(single.cluster, "host-1", ClaimingMessages)) == before


def test_a_grant_begun_at_once_has_a_deadline(single):
    a = having(single, count=1, delivery="amo")
    granted(single, a, KEY, 0, 19, grantee=TASK)
    single.node.cut(is_cut=True)
    pending, seen = at_once(single, a, 0, 4)
    deadline = single.service.deadline(200)
    with pytest.raises(DeadlineExceeded, match="verdict"):
        single.service.await_grant(pending, deadline)
    assert pending.waiting_count == 0
    assert seen == []
    single.node.cut(is_cut=False)
    pending, _ = at_once(single, a, 0, 4)
    response = single.service.await_grant(pending, single.service.deadline(1_000))
    assert response.reason == "nothing_left"


def test_a_grant_begins_at_the_head_and_is_limited_by_the_span():
    machine = Machine(world(records=(40,), span=8))
    assert machine.service.info().span == 8
    a = having(machine, count=1, delivery="amo")
    got = [granted(machine, a, KEY, 0, 19) for _ in range(4)]
    assert [(x.first, x.last) for x in got] == [(0, 7), (8, 15), (16, 19), (None, None)]
    assert got[3].reason == "nothing_left"
    far = granted(machine, a, KEY, 30, 39)
    assert (far.first, far.last) == (20, 27), "from the head, not from its first"


def test_a_request_under_an_old_epoch_is_granted_nothing(single):
    a = having(single, count=1, delivery="amo")
    a.held[KEY] = (a.held[KEY][0] - 1, 0)
    assert granted(single, a, KEY, 0, 4).reason == "old_epoch"


def test_a_grant_that_lands_after_the_deadline_is_reported_lost(single):
    a = having(single, count=1, delivery="amo")
    granted(single, a, KEY, 0, 4)
    single.node.cut(is_cut=True)
    with pytest.raises(DeadlineExceeded, match="verdict"):
        granted(single, a, KEY, 5, 9, timeout_ms=200)
    single.node.cut(is_cut=False)
    single.cluster.run(200)
    (event,) = single.events.named("grant_lost")
    assert event.fields["ranges"] == [(5, 9)]


def test_a_repeated_grant_request_is_granted_once(single):
    """Otherwise the range would be lost with the answer."""
    a = having(single, count=1, delivery="amo")
    got = [granted(single, a, KEY, 0, 4, request=1) for _ in range(3)]
    assert got[0] == got[1] == got[2]
    assert (got[0].first, got[0].last) == (0, 4)
    assert len(of(single.cluster, "host-1", ClaimingMessages)) == 1
    single.watch.kill(1)
    (event,) = single.events.named("grant_lost")
    assert event.fields["ranges"] == [(0, 4)], "it is counted once"


def test_a_repeat_that_receives_the_verdict_in_time_loses_no_grant(single):
    a = having(single, count=1, delivery="amo")
    granted(single, a, KEY, 0, 4)
    single.node.cut(is_cut=True)
    with pytest.raises(DeadlineExceeded):
        granted(single, a, KEY, 5, 9, timeout_ms=200, request=1)
    single.node.cut(is_cut=False)
    got = granted(single, a, KEY, 5, 9, request=1)
    assert (got.first, got.last) == (5, 9)
    assert not single.events.named("grant_lost")


def granted_late(machine, client, **rest):
    """Have offsets 5 to 9 granted to a request after its deadline."""
    granted(machine, client, KEY, 0, 4)
    machine.node.cut(is_cut=True)
    with pytest.raises(DeadlineExceeded):
        granted(machine, client, KEY, 5, 9, timeout_ms=200, **rest)
    machine.node.cut(is_cut=False)
    machine.cluster.run(200)


def test_a_late_grant_is_not_lost_if_its_request_is_repeated(single):
    a = having(single, count=1, delivery="amo")
    granted_late(single, a, request=1)
    got = granted(single, a, KEY, 5, 9, request=1)
    assert (got.first, got.last) == (5, 9)
    a.give_back(KEY, done=10)
    single.cluster.run(100)
    assert not single.events.named("grant_lost")


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_late_grant_is_reported_lost_when_its_claim_ends(single, is_dead):
    a = having(single, count=1, delivery="amo")
    granted_late(single, a, request=1)
    assert not single.events.named("grant_lost"), "it may still be asked for"
    if is_dead:
        epoch, _ = a.held[KEY]
        done = api.Progress(topic="t", partition=0, epoch=epoch, position=None, done=5)
        single.service.beat(a.who, api.HeartbeatRequest(progress=(done,)))
        single.watch.kill(1)
    else:
        a.give_back(KEY, done=5)
        single.cluster.run(100)
    (event,) = single.events.named("grant_lost")
    assert event.fields == {"key": KEY, "ranges": [(5, 9)]}


def test_a_late_grant_does_not_delay_the_release_of_a_drained_partition(single):
    """The client knows nothing of it, so nobody else would end the drain."""
    a = having(single, count=1, delivery="amo")
    granted_late(single, a, request=1)
    (group,) = single.service.groups
    group.session.drain(group.session.holdings[KEY], reason="surplus")
    single.cluster.run(100)
    assert not of(single.cluster, "host-1", ReleasingPartition), "it is in use"
    a.give_back(KEY, done=5)
    single.cluster.run(100)
    (released,) = of(single.cluster, "host-1", ReleasingPartition)
    assert released.record.reason == "surplus"
    (event,) = single.events.named("grant_lost")
    assert event.fields == {"key": KEY, "ranges": [(5, 9)]}


def test_a_late_grant_of_an_ended_claim_is_reported_lost_at_once(single):
    a = having(single, count=1, delivery="amo")
    granted(single, a, KEY, 0, 4)
    single.node.cut(is_cut=True)
    with pytest.raises(DeadlineExceeded):
        granted(single, a, KEY, 5, 9, timeout_ms=200, request=1)
    a.give_back(KEY, done=5)
    single.node.cut(is_cut=False)
    single.cluster.run(200)
    (event,) = single.events.named("grant_lost")
    assert event.fields == {"key": KEY, "ranges": [(5, 9)]}


def test_unfinished_grants_of_a_dead_client_are_reported_lost(single):
    a = having(single, count=1, delivery="amo")
    granted(single, a, KEY, 0, 9)
    epoch, _ = a.held[KEY]
    progress = api.Progress(topic="t", partition=0, epoch=epoch, position=None, done=4)
    single.service.beat(a.who, api.HeartbeatRequest(progress=(progress,)))
    single.watch.kill(1)
    (event,) = single.events.named("grant_lost")
    assert event.fields == {"key": KEY, "ranges": [(4, 9)]}
    single.cluster.run(100)
    (release,) = (x.record for x in of(single.cluster, "host-1", ReleasingPartition))
    assert release.reason == "client_died"
    assert marks_of(release) == {0: 4}
    b = Local(single, "b", pid=2)
    b.subscribe(delivery="amo")
    run_until(single.cluster, [b], lambda: sizes(b) == [1], H)
    assert b.positions[KEY] == 10, "what was granted is never granted again"


def test_a_release_by_the_client_reports_no_grants_lost(single):
    a = having(single, count=1, delivery="amo")
    granted(single, a, KEY, 0, 9)
    a.give_back(KEY, done=4)
    single.cluster.run(100)
    assert not single.events.named("grant_lost")


def test_done_offsets_that_a_client_reports_reach_the_log(single):
    a = having(single, count=1, delivery="amo")
    granted(single, a, KEY, 0, 9)
    epoch, _ = a.held[KEY]
    progress = api.Progress(topic="t", partition=0, epoch=epoch, position=None, done=7)
    single.service.beat(a.who, api.HeartbeatRequest(progress=(progress,)))
    single.cluster.run(H)
    beats = [x.record for x in of(single.cluster, "host-1", Heartbeat)]
    assert marks_of(beats[-1]) == {0: 7}


# --- Shutdown, and views of the log ---


def test_a_controlled_shutdown_waits_for_every_client(cluster, machine):
    a = having(machine)
    b = Local(machine, "b", pid=2)
    machine.states.move(State.PENDING_CONTROLLED_SHUTDOWN, reason="a test")
    machine.service.start_drain()
    machine.service.start_drain()
    assert not machine.service.is_drained
    with pytest.raises(CoordinationError, match="admits no clients now"):
        Local(machine, "c")
    with pytest.raises(CoordinationError):
        b.subscribe()
    a.take()
    assert {e.reason for e in a.leaving.values()} == {"shutdown"}
    assert not releases(cluster)
    a.live()
    cluster.run(100)
    assert machine.service.is_drained
    assert {r.reason for r in releases(cluster)} == {"shutdown"}
    machine.service.close(timeout_ms=1_000)
    machine.service.close(timeout_ms=1_000)
    assert not machine.service.groups
    members = [
        line.record
        for t in (0, 1)
        for line in of(cluster, "host-1", Member, partition=t)
    ]
    assert members[-1].draining


def test_closing_the_service_releases_no_leases_in_use(cluster, machine):
    a = having(machine)
    machine.service.close(timeout_ms=1_000)
    assert not releases(cluster)
    assert len(a.valid) == 8, "it works on until its deadlines"
    other = cluster.node("other", spec=spec())
    cluster.run_until(lambda: bool(other.held), 4 * H)
    assert not a.valid


def test_two_sidecars_report_the_same_world(cluster, machine):
    a = having(machine)
    second = Machine(cluster, "host-2")
    worlds = []
    for each in (machine, second):
        each.node.engine.catch_up = lambda timeout_ms: None
        worlds.append(each.service.world(timeout_ms=1_000)[0])
    assert worlds[0] == worlds[1]
    owners = {
        claim["owner"]["client_id"]
        for part in worlds[0]["partitions"].values()
        for claim in part["claims"]
    }
    assert owners == {"host-1"}
    assert a.valid


@pytest.mark.parametrize("keep", [True, False])
def test_a_subscription_that_is_ended_during_its_lookup_does_not_begin(
    cluster, machine, monkeypatch, keep
):
    """The client has given the request up: it would give back each partition."""
    a = Local(machine, "a", pid=1)
    look_up = registry.new_subscription

    def ended(*args, **rest):
        none = api.ReleaseRequest(returned=())
        machine.service.unsubscribe(a.who, "s", release=none, keep=keep)
        return look_up(*args, **rest)

    with monkeypatch.context() as patched:
        patched.setattr(registry, "new_subscription", ended)
        with pytest.raises(InvalidTransition, match="'s' of client 'a' was ended"):
            a.subscribe()
    assert machine.service.clients()[0].subscriptions == ()
    a.subscribe()
    run_until(cluster, [a], lambda: len(a.valid) == 8, 3 * H)


def test_a_claim_is_repeated_at_the_limit_of_claims(cluster, machine, monkeypatch):
    """As after a restart of the sidecar: a refusal would end the client for good."""
    monkeypatch.setattr(service, "CLAIMS_MAX", 2)
    a = Local(machine, "a", pid=1)
    a.claim(0)
    a.claim(1)
    with pytest.raises(ConfigurationError, match="claims 2 partitions one by one"):
        a.claim(2)
    a.claim(0)
    run_until(cluster, [a], lambda: len(a.valid) == 2, 3 * H)


def test_the_owners_of_a_topic_match_the_claims_of_the_world(cluster, machine):
    a = having(machine)
    machine.node.engine.catch_up = lambda timeout_ms, partitions=None: None
    world, _ = machine.service.world(timeout_ms=1_000)
    found = machine.service.owners("g", "t", timeout_ms=1_000)
    assert found.as_of.offsets == {
        t: part["next_offset"] for t, part in world["partitions"].items()
    }
    assert found.owners == {
        claim["partition"]: claim["owner"]["client_id"]
        for part in world["partitions"].values()
        for claim in part["claims"]
    }
    assert list(found.owners) == sorted(found.owners)
    for group, topic in (("h", "t"), ("g", "u")):
        assert machine.service.owners(group, topic, timeout_ms=1_000).owners == {}
    leaving(a)
    run_until(cluster, [], lambda: machine.service.fence(KEY).client_id is None, 2 * H)
    assert (
        machine.service.owners("g", "t", timeout_ms=1_000).owners[KEY.partition] is None
    )


def test_a_fence_query_returns_the_newest_claim_or_none(cluster, machine):
    a = having(machine)
    machine.node.engine.catch_up = lambda timeout_ms: None
    world, _ = machine.service.world(timeout_ms=1_000)
    offsets = {t: part["next_offset"] for t, part in world["partitions"].items()}
    claims = [each for part in world["partitions"].values() for each in part["claims"]]
    (claim,) = (each for each in claims if each["partition"] == KEY.partition)
    found = machine.service.fence(KEY)
    assert found.as_of.offsets == offsets
    assert (found.token, found.epoch) == (claim["token"], claim["epoch"])
    assert found.position == claim["position"]
    assert claim["owner"] == {
        "client_id": found.client_id,
        "incarnation": found.incarnation,
    }
    none = {"token", "epoch", "client_id", "incarnation", "position"}
    for other in (("h", "t", 3), ("g", "u", 3), ("g", "t", 99)):
        found = asdict(machine.service.fence(Key(*other)))
        assert found.pop("as_of").offsets == offsets
        assert found == dict.fromkeys(none)
    assert a.valid


def test_a_fence_query_returns_token_but_no_owner_of_a_released_claim(cluster, machine):
    a = having(machine)
    token = machine.service.fence(KEY).token
    leaving(a)
    run_until(cluster, [], lambda: machine.service.fence(KEY).client_id is None, 2 * H)
    found = machine.service.fence(KEY)
    assert (found.token, found.incarnation) == (token, None)


def test_a_claim_is_shown_once_while_the_partition_count_changes(cluster, machine):
    """In the source, and in the target once that has the key (PROTOCOL 10.8)."""
    a = having(machine)
    key = moving(2, 4)[0]
    source, target = (place_of(key, partition_count=n) for n in (2, 4))
    service, node = machine.service, machine.node
    shown = []

    def look():
        owners = service.owners(key.group_id, key.topic, timeout_ms=1_000).owners
        found = service.fence(key)
        assert owners[key.partition] == found.client_id
        replicas = node.engine.context.replicas
        assert {int(t) for t in found.as_of.offsets} == set(replicas)
        is_there = target in replicas and key in replicas[target].world.keys
        place = target if is_there else source
        world = replicas[place].world
        assert found.token == str(world.token(key))
        assert found.epoch == world.keys[key].epoch
        if not shown or shown[-1] != place:
            shown.append(place)
        return is_over(cluster)

    look()
    resize(cluster, 4)
    run_until(cluster, [a], look, 9 * H)
    assert shown == [source, target]


def test_the_world_shows_person_and_begin_of_a_pause(cluster, machine):
    a = having(machine)
    until_ms = cluster.clock.wall_ms() + 2 * H
    record = pause_record(cluster, until_ms)
    for t in (0, 1):
        write(cluster, replace(record, tags=person_to_tags("ada")), t)
    run_until(cluster, [a], lambda: a.is_paused, H)
    machine.node.engine.catch_up = lambda timeout_ms: None
    _, (row,) = machine.service.world(timeout_ms=1_000)
    assert (row["person"], row["until_ms"]) == ("ada", until_ms)
    assert row["begin_ms"] is not None


def test_reasons_of_claims_name_the_client(cluster, machine):
    having(machine, "worker-7")
    notes = fold(cluster, 0).soft.notes | fold(cluster, 1).soft.notes
    assert {note.reason.partition(";")[0] for note in notes.values()} == {
        "for worker-7"
    }


# --- plans


def test_a_plan_has_the_fields_of_marshal_plan_show(cluster, machine):
    for t in (0, 1):
        write(cluster, settings(policy="planner"), t)
    having(machine)
    moves = planned(0, ("host-1", 0, tuple(range(8))), vector=((0, 0), (0, 0)))
    write(cluster, moves, machine.node.engine.context.home_of("g"))
    offsets, found = machine.service.plan("g", timeout_ms=1_000)
    assert sorted(offsets) == [0, 1]
    assert (found["group_id"], found["policy"]) == ("g", "planner")
    assert (found["generation"], found["open_count"]) == (1, 0)
    (member,) = found["members"]
    assert (member["client_id"], member["held_count"]) == ("host-1", 8)
    assert {row["state"] for row in found["keys"]} == {"done"}
    assert (found["handoffs"], found["uncovered"]) == ([], [])


def test_an_unknown_group_has_an_empty_plan(machine):
    _, found = machine.service.plan("of-nobody-else", timeout_ms=1_000)
    assert (found["policy"], found["generation"]) == ("fair", 0)
    assert (found["members"], found["keys"]) == ([], [])


# --- handing off before the shutdown


def handing_off(cluster, machine, **rest):
    """Begin the handoff of a sidecar; return its client, and a member elsewhere."""
    a = having(machine, warms=True)
    other = cluster.node("other")
    other.warming.is_held = True
    other.consume(spec(**rest))
    share = lambda: 4 in {len(other.held), other.warming.waiting_count}  # noqa: E731
    run_until(cluster, [a], share, 4 * H)
    machine.service.start_handoff(for_ms=20 * H)
    return a, other


def test_clients_work_until_another_host_has_taken_over(cluster, machine):
    a, other = handing_off(cluster, machine, on_warm=lambda *_: None)
    with pytest.raises(CoordinationError, match="admits no clients"):
        Local(machine, "b", pid=2)
    run(cluster, [a], 3 * H)
    assert len(a.valid) == 8
    assert not machine.service.is_handed_off
    other.warming.is_held = False
    other.warming.run_waiting()
    run_until(cluster, [a], lambda: len(other.held) == 8, 3 * H)
    assert not a.valid
    assert machine.service.is_handed_off
    machine.service.start_drain()
    cluster.run(500)
    assert machine.service.is_drained
    machine.service.close(timeout_ms=1_000)
    home = fold(cluster, machine.node.engine.context.home_of("g"))
    assert not home.directed
    assert len(other.held) == 8


def test_partitions_released_before_a_restart_have_that_reason(cluster):
    member = Membership(labels={"rack": "r1"}, can_plan=False, restarts=True)
    machine = Machine(cluster, member=member)
    a = having(machine)
    run(cluster, [a], H)
    assert {record.labels["rack"] for record in records(cluster, Member)} == {"r1"}
    machine.service.start_drain()
    run_until(cluster, [a], lambda: machine.service.is_drained, H)
    machine.service.close(timeout_ms=1_000)
    reasons = {record.reason for record in records(cluster, ReleasingPartition)}
    assert reasons == {"restart"}


def test_without_a_taker_the_sidecar_hands_nothing_off(cluster, machine):
    a = having(machine)
    machine.service.start_handoff(for_ms=20 * H)
    assert machine.service.is_handed_off
    run(cluster, [a], H)
    assert len(a.valid) == 8
    assert not records(cluster, Directive)


def test_a_sidecar_without_claims_has_nothing_to_hand_off(machine):
    assert machine.service.is_handed_off
    Local(machine, "a", pid=1)
    machine.service.start_handoff(for_ms=H)
    assert machine.service.is_handed_off


def test_a_failed_group_is_not_handed_off(cluster, machine):
    a, _ = handing_off(cluster, machine)
    (group,) = machine.service.groups
    group.session.fail(LogUnwritable("a test"))
    run(cluster, [], 200)
    machine.service.start_handoff(for_ms=H)
    assert machine.service.is_handed_off
    assert a.held


def test_a_drained_sidecar_moves_no_partitions_between_its_clients(cluster, machine):
    a = having(machine)
    (group,) = machine.service.groups
    group.session.self_drain.begin(20 * H)
    run_until(cluster, [a], lambda: group.session.self_drain.is_in_force, H)
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run(cluster, [a, b], 3 * H)
    assert sizes(a, b) == [8, 0]
    assert not releases(cluster)
    group.session.self_drain.end()
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], 2 * H)
