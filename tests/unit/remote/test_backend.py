"""The backend of one client: events, heartbeats, restarts, departure and queries."""

import asyncio
import os
import time
from contextlib import closing
from functools import partial

import httpx
import msgspec
import pytest
from enginekit import T0, world
from fakesidecar import (
    EMPTY,
    INSTANCE,
    WAIT_S,
    FakeSidecar,
    H,
    RequestsBy,
    connected,
    failure,
)
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from slowness import is_over

from kafka_marshal import Marshal
from kafka_marshal.aio import AsyncMarshal
from kafka_marshal.claims import HeldClaim
from kafka_marshal.clock import SystemClock, ThreadBackground
from kafka_marshal.config import Callbacks, ConsumerConfig
from kafka_marshal.consumer import Consumer
from kafka_marshal.engine import Subscription
from kafka_marshal.engine.replica import LastClaim
from kafka_marshal.errors import (
    ClaimLost,
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    IdentityConflict,
    InvalidTransition,
)
from kafka_marshal.metrics import MarshalCollector
from kafka_marshal.policies import find_policy
from kafka_marshal.ports import TopicInfo
from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal.remote import api, transport
from kafka_marshal.remote import backend as module
from kafka_marshal.remote.answers import (
    AsOf,
    ClientsNow,
    GroupNow,
    LocalClient,
    OwnersNow,
    WorldNow,
)
from kafka_marshal.remote.backend import (
    SidecarBackend,
    beat_ms_of,
    greet,
)
from kafka_marshal.remote.transport import Connection
from simulator.node import Recorder

KEY = Key("g", "t", 0)
FOREVER_MS = 3_600_000
WANTS = api.SubscriptionSpec(topics=("t",))
AS_OF = AsOf(time_ms=1, offsets={})


def link_to(sidecar, observer):
    return SidecarBackend(
        connected(sidecar),
        info=sidecar.info(),
        data=world(records=(10,)).kafka.data_log(),
        observer=observer,
        transport="fake",
    )


class Linked:
    """A backend connected to a sidecar in memory, with its events."""

    def __init__(self):
        self.sidecar = FakeSidecar()
        self.observer = Recorder()
        self.link = link_to(self.sidecar, self.observer)
        self.link.start()
        self.stream = self.sidecar.stream()

    def subscribe(self, on_warm=None):
        subscription = Subscription(
            group_id="g",
            topics={"t": TopicInfo(1, None)},
            policy=find_policy("fair"),
            config=ConsumerConfig(topics=("t",), max_poll_records=4),
            on_warm=on_warm,
            warming=None if on_warm is None else ThreadBackground(),
        )
        self.link.subscribe(subscription)
        (self.name,) = self.link.session.names
        return subscription

    def consumer(self):
        subscription = self.subscribe()
        return Consumer(
            self.link.engine,
            self.link.session,
            subscription=subscription,
            reader=self.link.engine.context.ports.data.reader(),
            callbacks=Callbacks(),
        )

    def assigned(self, *, epoch=5, position=0, lasts_ms=60_000, name=None):
        now_ms = self.sidecar.clock.now_ms()
        return api.Assignment(
            subscription=self.name if name is None else name,
            topic="t",
            partition=0,
            epoch=epoch,
            token=f"1.0.{epoch}",
            client_id="host-a",
            incarnation=self.sidecar.incarnation,
            secret="5e" * 16,
            position=position,
            is_anchored=True,
            soft_until_ms=now_ms + lasts_ms,
            hard_until_ms=now_ms + 2 * lasts_ms,
        )

    def snapshot(self, *assigned):
        return api.Snapshot(
            assigned=assigned,
            releasing=(),
            paused=EMPTY.paused,
            subscriptions=(),
        )

    def named(self, name):
        return [event.fields for event in self.observer.events if event.name == name]

    def wait_for(self, is_done):
        since_s = time.monotonic()
        with self.link.engine.changed:
            while not is_done():
                assert not is_over(since_s, WAIT_S)
                self.link.engine.changed.wait(0.01)

    def restart(self):
        """Replace the sidecar by another process, which knows no client."""
        self.sidecar.incarnation = "cd" * 16
        self.sidecar.is_known = False
        self.stream.end()
        self.stream = self.sidecar.stream()


@pytest.fixture
def linked():
    linked = Linked()
    yield linked
    linked.stream.end()
    linked.link.close()


def handed(consumer):
    return [r.offset for rs in consumer.poll(WAIT_S * 1_000).values() for r in rs]


# --- Following ---


def test_a_warm_event_calls_the_application_and_ready_is_reported(linked):
    calls = []
    subscription = linked.subscribe(on_warm=lambda *seen: calls.append(seen))
    (sent,) = linked.sidecar.named("PUT", linked.name)
    assert sent["warms"] is True
    now_ms = linked.sidecar.clock.now_ms()
    event = api.Warm(
        subscription=linked.name,
        topic="t",
        partition=0,
        epoch=4,
        owner="w1",
        position=7,
        until_ms=now_ms + 60_000,
    )
    linked.sidecar.answers["POST", "ready"] = [(503, failure("CoordinationError"))]
    linked.stream.push(event)
    ready = {"topic": "t", "partition": 0, "epoch": 4}
    linked.wait_for(lambda: linked.sidecar.named("POST", "/ready") == [ready, ready])
    assert calls == [(("t", 0), 7, "w1")]
    assert [each["key"] for each in linked.named("warmed")] == [KEY]
    subscription.warming.close(0)


def test_a_subscription_without_on_warm_does_not_warm_up(linked):
    linked.subscribe()
    (sent,) = linked.sidecar.named("PUT", linked.name)
    assert sent["warms"] is False


def test_an_assigned_partition_is_consumed_and_its_position_reported(linked):
    consumer = linked.consumer()
    (sent,) = linked.sidecar.named("PUT", linked.name)
    assert sent["topics"] == ["t"]
    linked.stream.push(linked.snapshot(linked.assigned()))
    assert handed(consumer) == [0, 1, 2, 3]
    consumer.commit()

    def is_reported():
        beats = linked.sidecar.named("POST", "/beat")
        reported = [each for beat in beats for each in beat["progress"]]
        return any(each["position"] == 4 for each in reported)

    linked.wait_for(is_reported)


def test_answers_to_heartbeats_set_the_deadlines(linked):
    consumer = linked.consumer()
    linked.stream.push(linked.snapshot(linked.assigned()))
    linked.wait_for(consumer.assignment)
    linked.sidecar.deadlines = (
        api.Lease(
            topic="t", partition=0, epoch=5, soft_until_ms=7, hard_until_ms=10**15
        ),
    )
    holding = linked.link.session.holdings[KEY]
    linked.wait_for(lambda: holding.claim.lease.soft_until_ms == 7)
    assert consumer.poll() == {}


def test_the_client_of_a_dead_sidecar_stops_by_its_deadline(linked):
    consumer = linked.consumer()
    linked.stream.push(linked.snapshot(linked.assigned(lasts_ms=300)))
    assert handed(consumer) == [0, 1, 2, 3]
    linked.sidecar.is_dead = True
    linked.stream.end(httpx.ReadError("reset"))
    linked.wait_for(lambda: not linked.link.session.holdings)
    with pytest.raises(ClaimLost, match="lease_expired"):
        consumer.poll()
    assert consumer.poll() == {}
    assert len(linked.named("sidecar_unreachable")) == 1


def test_a_client_resumes_its_events_after_a_lost_connection(linked):
    consumer = linked.consumer()
    linked.stream.push(linked.snapshot(linked.assigned()))
    linked.wait_for(consumer.assignment)
    linked.stream.end(httpx.ReadError("reset"))
    linked.stream = linked.sidecar.stream()
    assert linked.stream.after.startswith("abababab.1.")
    linked.stream.push(api.Paused(is_paused=True))
    linked.wait_for(lambda: linked.named("sidecar_reached"))
    assert consumer.assignment() == {T0}


def test_a_client_registers_and_subscribes_again_at_a_restarted_sidecar(linked):
    consumer = linked.consumer()
    linked.stream.push(linked.snapshot(linked.assigned()))
    assert handed(consumer) == [0, 1, 2, 3]
    linked.sidecar.answers["PUT", "c"] = [
        (503, failure("CoordinationError", retriable=True))
    ]
    linked.sidecar.info_rest = {"span": 7, "heartbeat_interval_ms": H // 10}
    linked.restart()
    linked.stream.push(linked.snapshot(linked.assigned(epoch=9)))
    session = linked.link.session
    linked.wait_for(lambda: session.holdings[KEY].claim.epoch == 9)
    with pytest.raises(ClaimLost, match="sidecar_restarted"):
        consumer.poll()
    assert handed(consumer) == [0, 1, 2, 3]
    *_, registered = linked.sidecar.named("PUT", "/clients/c")
    assert registered == {"instance": INSTANCE, "beat_ms": H // 60, "pid": None}
    assert len(linked.sidecar.named("PUT", linked.name)) == 2
    context = linked.link.engine.context  # as the sidecar says now
    assert (context.span, context.heartbeat_interval_ms) == (7, H // 10)


def test_an_unchanged_claim_continues_after_a_sidecar_restart(linked):
    consumer = linked.consumer()
    assigned = linked.assigned()
    linked.stream.push(linked.snapshot(assigned))
    assert handed(consumer) == [0, 1, 2, 3]
    linked.restart()
    linked.stream.push(linked.snapshot(assigned))
    assert handed(consumer) == [4, 5, 6, 7]
    consumer.commit()


def test_a_restarted_sidecar_that_expects_the_client_is_sent_its_subscriptions(linked):
    """It knows this process, but perhaps not its subscriptions."""
    linked.consumer()
    linked.stream.push(linked.snapshot(linked.assigned()))
    linked.wait_for(lambda: linked.link.session.holdings)
    linked.sidecar.incarnation = "cd" * 16
    linked.stream.end(httpx.ReadError("reset"))
    linked.stream = linked.sidecar.stream()
    linked.stream.push(linked.snapshot(linked.assigned()))
    linked.wait_for(lambda: len(linked.sidecar.named("PUT", linked.name)) == 2)
    linked.wait_for(
        lambda: linked.link.session.claimant.owner.incarnation == b"\xcd" * 16
    )


def test_a_client_that_the_sidecar_does_not_know_registers_again(linked):
    linked.sidecar.is_known = False
    linked.wait_for(lambda: linked.sidecar.named("POST", "/beat"))
    linked.stream.end()
    linked.stream = linked.sidecar.stream()
    assert linked.sidecar.named("PUT", "/clients/c")


def test_a_generation_is_acknowledged_until_a_heartbeat_is_answered(linked):
    """PROTOCOL 10.7: never before the events that lead to it are applied."""

    def acknowledged():
        beats = [beat or {} for beat in linked.sidecar.named("POST", "/beat")]
        return [beat["generation"] for beat in beats if beat.get("generation")]

    linked.stream.push(replace(linked.snapshot(), generation=1))
    linked.wait_for(lambda: linked.link.session.acknowledgment() == 1)
    linked.wait_for(lambda: linked.link.session.acknowledgment() is None)
    assert acknowledged() == [1]
    linked.sidecar.answers["POST", "beat"] = [(503, failure("CoordinationError"))]
    linked.stream.push(api.Layout(generation=2))
    linked.wait_for(lambda: acknowledged() == [1, 2, 2])
    linked.wait_for(lambda: linked.link.session.acknowledgment() is None)
    # A restarted sidecar does not know that it was acknowledged.
    linked.restart()
    linked.stream.push(replace(linked.snapshot(), generation=2))
    linked.wait_for(lambda: acknowledged() == [1, 2, 2, 2])


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        pytest.param(
            (409, failure("IdentityConflict", holder="c")), IdentityConflict, id="twin"
        ),
        pytest.param("other", ConfigurationError, id="another-cluster"),
    ],
)
def test_a_client_that_cannot_register_again_fails(linked, answer, kind):
    consumer = linked.consumer()
    if answer == "other":
        linked.sidecar.info_rest = {"cluster_id": "other"}
    else:
        linked.sidecar.answers["PUT", "c"] = [answer]
    linked.sidecar.is_known = False
    linked.stream.end()
    linked.wait_for(lambda: linked.link.session.failure is not None)
    with pytest.raises(kind):
        consumer.poll()


def test_an_internal_error_in_a_heartbeat_fails_the_client(linked, monkeypatch):
    consumer = linked.consumer()
    monkeypatch.setattr(linked.link.session, "acknowledgment", lambda: 1 / 0)
    linked.wait_for(lambda: linked.link.session.failure is not None)
    with pytest.raises(CoordinationError, match="internal error"):
        consumer.poll()


def test_a_late_answer_does_not_invalidate_a_newer_registration(linked):
    """Otherwise no heartbeat is sent until the event stream ends."""
    link = linked.link
    link._on_unknown(replace(link._info))
    assert link._is_known
    link._on_unknown(link._info)
    assert not link._is_known


def test_an_internal_error_in_an_event_fails_the_client(linked, monkeypatch):
    consumer = linked.consumer()
    monkeypatch.setattr(linked.link.session, "on_event", lambda _: 1 / 0)
    linked.stream.push(EMPTY)
    linked.wait_for(lambda: linked.link.session.failure is not None)
    with pytest.raises(CoordinationError, match="internal error"):
        consumer.poll()


# --- Subscriptions and claims ---


def test_a_refused_subscription_raises_and_is_forgotten(linked):
    linked.sidecar.answers["PUT", f"{INSTANCE[:8]}-1"] = [
        (400, failure("ConfigurationError", setting="policy"))
    ]
    with pytest.raises(ConfigurationError) as caught:
        linked.subscribe()
    assert caught.value.setting == "policy"
    linked.subscribe()
    linked.wait_for(lambda: linked.sidecar.named("POST", f"{INSTANCE[:8]}-1/end"))


def held_claim(linked):
    link = linked.link
    holding = link.contend_for(KEY)
    claim = HeldClaim(link.engine, link.session, holding=holding, glance=link.glance)
    linked.stream.push(linked.assigned(name="", position=None))
    claim.wait_held(WAIT_S * 1_000)
    return claim


def test_a_claim_without_consumption_is_held_and_released(linked):
    claim = held_claim(linked)
    claim.set_position(7)
    claim.check()
    claim.release()
    assert claim.position == 7
    linked.wait_for(lambda: linked.sidecar.named("DELETE", "/claims/t/0"))
    # Sent again before the claim ends, as the first may still be on its way.
    sent = linked.sidecar.named("POST", "/released")
    assert {each["position"] for assigned in sent for each in assigned["returned"]} == {
        7
    }


def test_the_answer_to_a_withdrawn_request_does_not_win_the_next_claim(linked):
    """The answer is on its way while the application gives up and claims again."""
    link = linked.link
    link.session.unwant(link.contend_for(KEY))
    holding = link.contend_for(KEY)
    claim = HeldClaim(link.engine, link.session, holding=holding, glance=link.glance)
    late = linked.assigned(name="", position=None)
    linked.stream.push(replace(late, request=1))
    answer = linked.assigned(name="", position=None, epoch=6)
    linked.stream.push(replace(answer, request=2))
    claim.wait_held(WAIT_S * 1_000)
    assert str(claim.token) == "1.0.6"


def test_the_rejection_of_a_claim_names_the_owner(linked):
    row = {
        "topic": "t",
        "partition": 0,
        "owner": {"client_id": "b", "incarnation": "00"},
        "freshness": "fresh",
        "age_ms": 3,
        "position": 4,
    }
    linked.sidecar.answers["GET", "g"] = [
        GroupNow(as_of=AS_OF, group="g", claims=(row,), pauses=())
    ]
    link = linked.link
    holding = link.contend_for(KEY)
    claim = HeldClaim(link.engine, link.session, holding=holding, glance=link.glance)
    with pytest.raises(ClaimRejected, match="held by 'b'") as caught:
        claim.wait_held(20)
    assert caught.value.freshness == "fresh"
    assert link.glance(KEY) is None


def test_a_claim_of_another_client_is_refused(linked):
    linked.sidecar.answers["PUT", "0"] = [(409, failure("InvalidTransition"))]
    with pytest.raises(InvalidTransition):
        linked.link.contend_for(KEY)
    assert linked.link.session.holdings == {}


def test_views_of_the_log_come_from_the_sidecar(linked):
    world_now = WorldNow(as_of=AS_OF, schema=1, partitions={"0": {"next_offset": 3}})
    linked.sidecar.answers["GET", "world"] = [world_now]
    linked.sidecar.answers["GET", "t"] = [OwnersNow(as_of=AS_OF, owners={0: "host-a"})]
    group = GroupNow(as_of=AS_OF, group="g", claims=(), pauses=())
    linked.sidecar.answers["GET", "g"] = [group]
    link = linked.link
    assert link.world(1_000) == {"schema": 1, "partitions": world_now.partitions}
    assert link.owners("t", 1_000) == {T0: "host-a"}
    assert link.last_claims(1_000) == {}
    assert (link.coordination_topic, link.transport) == ("__marshal", "fake")


# --- Leaving ---


def test_a_client_that_leaves_reports_no_unreachable_sidecar(linked):
    """The sidecar forgets the client and ends its stream, as expected."""
    linked.stream.push(linked.snapshot())
    linked.link.leave(release=True, timeout_ms=1_000)
    linked.sidecar.is_known = False
    linked.stream.end(httpx.RemoteProtocolError("incomplete chunked read"))
    events, beats, _ = linked.link._threads
    events.join(WAIT_S)
    assert not events.is_alive()
    assert linked.named("sidecar_unreachable") == []
    assert linked.sidecar.named("PUT", "/clients/c") == []
    assert beats.is_alive()


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        pytest.param(True, "shutdown", id="for-good"),
        pytest.param(False, "restart", id="for-a-moment"),
    ],
)
def test_leaving_sends_the_reason(linked, release, reason):
    linked.link.leave(release=release, timeout_ms=1_000)
    (sent,) = linked.sidecar.named("DELETE", "/clients/c")
    assert (sent["release"], sent["reason"]) == (release, reason)


def test_leaving_a_dead_sidecar_ends_in_time(linked):
    linked.sidecar.is_dead = True
    linked.link.leave(release=True, timeout_ms=100)
    assert linked.named("close_unconfirmed")


@pytest.fixture
def at_once(monkeypatch):
    """A sidecar that does not run counts as gone at the first refusal."""
    monkeypatch.setattr(transport, "GONE_MS_MAX", 0)


@pytest.mark.usefixtures("at_once")
def test_closing_does_not_wait_for_a_sidecar_that_is_gone(linked):
    consumer = linked.consumer()
    linked.sidecar.is_dead = True
    consumer.close(timeout_ms=FOREVER_MS)
    assert not consumer.is_close_confirmed
    linked.link.leave(release=True, timeout_ms=FOREVER_MS)
    assert len(linked.named("close_unconfirmed")) == 2


@pytest.mark.usefixtures("at_once")
def test_a_release_does_not_wait_for_a_sidecar_that_is_gone(linked):
    claim = held_claim(linked)
    linked.sidecar.is_dead = True
    with pytest.raises(DeadlineExceeded, match="no sidecar runs to confirm the"):
        claim.release(timeout_ms=FOREVER_MS)


def test_a_release_waits_for_a_sidecar_that_soon_returns(linked, monkeypatch):
    claim = held_claim(linked)
    monkeypatch.setattr(transport, "GONE_MS_MAX", FOREVER_MS)
    linked.sidecar.answers["POST", "released"] = [httpx.ConnectError("refused")] * 2
    claim.release(timeout_ms=FOREVER_MS)


def test_closing_waits_for_a_sidecar_that_soon_returns(linked, monkeypatch):
    monkeypatch.setattr(transport, "GONE_MS_MAX", FOREVER_MS)
    consumer = linked.consumer()
    linked.sidecar.answers["POST", "end"] = [httpx.ConnectError("refused")] * 2
    consumer.close(timeout_ms=FOREVER_MS)
    assert consumer.is_close_confirmed
    linked.sidecar.answers["DELETE", "c"] = [httpx.ConnectError("refused")] * 2
    linked.link.leave(release=True, timeout_ms=FOREVER_MS)
    assert not linked.named("close_unconfirmed")


@pytest.mark.usefixtures("at_once")
def test_closing_waits_for_a_sidecar_that_answers_late(linked):
    consumer = linked.consumer()
    linked.sidecar.answers["POST", "end"] = [httpx.ReadTimeout("late")] * 2
    consumer.close(timeout_ms=FOREVER_MS)
    assert consumer.is_close_confirmed


def test_leaving_a_sidecar_that_does_not_know_the_client_succeeds(linked):
    linked.sidecar.is_known = False
    linked.link.leave(release=True, timeout_ms=1_000)
    assert not linked.named("close_unconfirmed")


# --- Greeting ---


def greeted(sidecar, *, timeout_ms=1_000, check=lambda info: None):
    connection = connected(sidecar)
    clock = sidecar.clock
    return greet(connection, clock=clock, check=check, timeout_ms=timeout_ms)


def test_greeting_waits_for_a_sidecar_that_is_starting():
    sidecar = FakeSidecar()
    starting = (503, failure("CoordinationError", "it is starting", retriable=True))
    sidecar.answers["GET", "info"] = [starting, starting]
    assert greeted(sidecar).client_id == "host-a"
    sidecar.answers["GET", "info"] = [starting] * 100
    with pytest.raises(CoordinationError, match="it is starting"):
        greeted(sidecar, timeout_ms=100)


def test_greeting_does_not_wait_if_no_sidecar_answers():
    sidecar = FakeSidecar()
    sidecar.is_dead = True
    with pytest.raises(CoordinationError, match="no sidecar answers"):
        greeted(sidecar, timeout_ms=60_000)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        pytest.param({"level": 99}, "level 99", id="level"),
        pytest.param({"boot_id": "another"}, "another clock", id="boot"),
        pytest.param({"now_ms": 10**15}, "another clock", id="ahead"),
        pytest.param({"now_ms": 0}, "another clock", id="behind"),
    ],
)
def test_a_sidecar_of_another_level_or_clock_is_refused(rest, message):
    sidecar = FakeSidecar()
    sidecar.info_rest = rest
    with pytest.raises(ConfigurationError, match=message):
        greeted(sidecar)
    assert sidecar.named("PUT", "/clients/c") == []


def test_a_client_that_stood_still_during_the_answer_has_the_same_clock():
    """Such as a stopped process: the answer was 10 s old when it was read."""
    sidecar, now_ms = FakeSidecar(), SystemClock().now_ms
    info = sidecar.info()
    sidecar.info = lambda: replace(info, now_ms=now_ms())
    sidecar.clock.now_ms = lambda: now_ms() + 10_000 * len(sidecar.named("GET", "info"))
    assert greeted(sidecar).client_id == "host-a"


def test_a_client_does_not_register_if_the_check_fails():
    sidecar = FakeSidecar()

    def refuse(info):
        raise ConfigurationError(info.coordination_topic)

    with pytest.raises(ConfigurationError, match="__marshal"):
        greeted(sidecar, check=refuse)
    assert sidecar.named("PUT", "/clients/c") == []


def test_the_heartbeat_interval_is_the_least_of_its_limits():
    info = FakeSidecar().info()
    assert beat_ms_of(info) == 50
    slow = msgspec.structs.replace(info, client_beat_ms_max=60_000)
    assert beat_ms_of(slow) == H // 6
    assert beat_ms_of(msgspec.structs.replace(slow, heartbeat_interval_ms=60_000)) == (
        1_000
    )


UNKNOWN = (503, failure("CoordinationError", retriable=True))
# In the log a sidecar has another incarnation for each group.
HERE = {"client_id": "host-a", "incarnation": "cd" * 16}
THERE = {"client_id": "host-b", "incarnation": "ef" * 16}


@pytest.fixture
def sidecar():
    return FakeSidecar()


@pytest.fixture
def queries(sidecar):
    with closing(link_to(sidecar, Recorder())) as link:  # not started
        yield link


def claim(owner, partition=0, **rest):
    return {
        "topic": "t",
        "partition": partition,
        "owner": owner,
        "freshness": "fresh",
        "age_ms": 3,
        "position": None,
        "epoch": 5,
    } | rest


def report(sidecar, *claims, count=1):
    """Have the sidecar report these claims of the group."""
    group = GroupNow(as_of=AS_OF, group="g", claims=claims, pauses=())
    sidecar.answers["GET", "g"] = [group] * count


def row_of(client, *places, group="g"):
    row = LocalClient(
        group=group,
        client=client,
        pid=1,
        state="ready",
        beat_age_ms=1,
        subscriptions=(),
        assigned=places,
        lease_until_ms=None,
    )
    return ClientsNow(as_of=AS_OF, clients=(row,))


def test_a_glance_names_the_local_client_that_holds_the_key(sidecar, queries):
    report(sidecar, claim(HERE), count=3)
    nobody = ClientsNow(as_of=AS_OF, clients=())
    sidecar.answers["GET", "clients"] = [row_of("b", "t-0"), nobody, UNKNOWN]
    asked = [queries.glance(KEY).holder for _ in range(3)]
    assert asked == ["b", "host-a", "host-a"]


def test_a_key_that_is_not_known_has_no_glance(sidecar, queries):
    report(sidecar, claim(HERE, partition=1))
    assert queries.glance(KEY) is None
    sidecar.answers["GET", "g"] = [UNKNOWN]
    assert queries.glance(KEY) is None


@pytest.mark.parametrize(
    ("clients", "may_be_ours"),
    [
        pytest.param(ClientsNow(as_of=AS_OF, clients=()), True, id="of-nobody-yet"),
        pytest.param(row_of("c", "t-0"), True, id="ours"),
        pytest.param(row_of("b", "t-0"), False, id="a-neighbour-s"),
        pytest.param(row_of("b", "t-1"), True, id="a-neighbour-has-another"),
        pytest.param(row_of("b", "t-0", group="h"), True, id="of-another-group"),
    ],
)
def test_a_claim_of_no_other_local_client_may_be_of_this_process(
    sidecar, queries, clients, may_be_ours
):
    report(sidecar, claim(HERE))
    sidecar.answers["GET", "clients"] = [clients]
    assert queries.last_claims(1_000) == {T0: LastClaim("host-a", 5, may_be_ours)}


def test_claims_of_other_hosts_cause_no_query_for_local_clients(sidecar, queries):
    report(sidecar, claim(THERE), claim(None, 1, epoch=7))
    assert queries.last_claims(1_000) == {
        T0: LastClaim("host-b", 5),
        TopicPartition("t", 1): LastClaim(None, 7),
    }
    assert sidecar.named("GET", "clients") == []


def test_last_claims_raises_the_error_of_the_sidecar(sidecar, queries):
    sidecar.answers["GET", "g"] = [UNKNOWN]
    with pytest.raises(CoordinationError):
        queries.last_claims(1_000)


@pytest.fixture
def reached(monkeypatch):
    """A sidecar that every ``Marshal`` of the test reaches, over a data topic ``t``."""
    reached = FakeSidecar()
    reached.settings = []  # type: ignore[attr-defined]

    def open_data(settings):
        reached.settings.append(settings)  # type: ignore[attr-defined]
        return world(records=(10,)).kafka.data_log()

    plain = partial(Connection.open, requests=RequestsBy(reached), transport=reached)
    monkeypatch.setattr(Connection, "open", plain)
    monkeypatch.setattr(module, "open_data_log", open_data)
    return reached


def opened(**rest):
    sent = {"group_id": "g", "client_id": "c", "sidecar": "unix:/run/s.sock"}
    return Marshal(**(sent | {"observer": Recorder()} | rest))


def test_a_client_registers_subscribes_and_leaves(reached):
    with opened() as marshal:
        stream = reached.stream()
        assert (marshal.client_id, marshal.group_id) == ("c", "g")
        assert marshal.coordination_topic == "__marshal"
        with marshal.consumer("t", claims_max=3) as consumer:
            assert consumer.poll() == {}
        stream.end()
    wants = [body for m, p, body in reached.asked if m == "PUT" and "subscr" in p]
    assert (wants[0]["topics"], wants[0]["claims_max"]) == (["t"], 3)
    assert len(reached.named("DELETE", "/clients/c")) == 1
    with pytest.raises(InvalidTransition, match="closed"):
        marshal.consumer("t")


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        pytest.param(None, ("broker:9092",), id="the-sidecars"),
        pytest.param("other:9092", ("other:9092",), id="its-own"),
    ],
)
def test_data_is_read_from_the_given_servers(reached, servers, expected):
    options = {"security_protocol": "SSL"}
    with opened(bootstrap_servers=servers, options=options):
        reached.stream().end()
    (settings,) = reached.settings
    assert settings.bootstrap_servers == expected
    assert settings.options["security_protocol"] == "SSL"


@pytest.mark.parametrize(
    ("rest", "setting"),
    [
        pytest.param({"sidecar": "tcp:1"}, "sidecar", id="address"),
        pytest.param(
            {"sidecar": "http://127.0.0.1:1"}, "sidecar_token_file", id="token"
        ),
        pytest.param({"coordination_topic": "x"}, "coordination_topic", id="topic"),
        pytest.param({"heartbeat_interval_ms": 7}, "heartbeat_interval_ms", id="h"),
        pytest.param({"bootstrap_servers": ""}, "bootstrap_servers", id="servers"),
        pytest.param({"group_id": "a b"}, "group_id", id="name"),
        pytest.param({"mirror_offsets": False}, "mirror_offsets", id="mirror"),
        pytest.param({"person": "alice"}, "person", id="person"),
        pytest.param(
            {"sidecar": None, "sidecar_instance": b"i" * 16}, "sidecar", id="instance"
        ),
        pytest.param(
            {"sidecar": None, "sidecar_token_file": "f"}, "sidecar", id="no-sidecar"
        ),
    ],
)
def test_invalid_options_are_refused_before_registration(reached, rest, setting):
    with pytest.raises(ConfigurationError) as caught:
        opened(**rest)
    assert caught.value.setting == setting
    assert reached.named("PUT", "/clients/c") == []


def test_options_that_match_the_sidecar_are_accepted(reached):
    with opened(coordination_topic="__marshal", heartbeat_interval_ms=H):
        reached.stream().end()


def test_opening_without_a_running_sidecar_names_the_status_command(reached):
    reached.is_dead = True
    with pytest.raises(CoordinationError, match="marshal sidecar status"):
        opened()


def test_a_policy_that_is_a_function_is_refused(reached):
    with opened() as marshal:
        stream = reached.stream()
        with pytest.raises(ConfigurationError, match="given by name") as caught:
            marshal.consumer("t", policy=lambda _view: None)
        assert caught.value.setting == "policy"
        stream.end()


def test_a_child_process_cannot_use_the_client_of_its_parent(reached, monkeypatch):
    marshal = opened()
    stream = reached.stream()
    consumer = marshal.consumer("t")
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(InvalidTransition, match="parent process"):
        marshal.consumer("t")
    marshal.close()
    assert reached.named("DELETE", "/clients/c") == []
    monkeypatch.undo()
    consumer.close(timeout_ms=0)
    stream.end()
    marshal.session.commands  # noqa: B018 - nothing was torn down
    marshal._backend.close()


def test_metrics_of_a_client_of_a_sidecar_are_collected(reached):
    registry = CollectorRegistry()
    with opened() as marshal:
        stream = reached.stream()
        MarshalCollector(marshal, registry=registry)
        value = partial(registry.get_sample_value, labels={"group": "g"})
        assert value("marshal_up") == 1
        assert value("marshal_group_members") is None
        stream.end()


def test_settings_are_checked_as_without_a_sidecar(reached):
    with opened() as marshal:
        with pytest.raises(ConfigurationError, match="neither 'alo'"):
            marshal.consumer("t", delivery="exactly once")
        with pytest.raises(ConfigurationError, match="is the coordination topic"):
            marshal.consumer("__marshal")
        marshal.consumer("t", delivery="amo").close()
        reached.stream().end()
    (wants,) = [body for m, p, body in reached.asked if m == "PUT" and "subscr" in p]
    assert wants["delivery"] == "amo"


def test_settings_of_async_consumers_are_checked(reached):
    async def work():
        async with AsyncMarshal(
            group_id="g", client_id="c", sidecar="unix:/run/s.sock"
        ) as marshal:
            with pytest.raises(ConfigurationError, match="neither 'alo'"):
                await marshal.consumer("t", delivery="exactly once").assignment()
            with pytest.raises(ConfigurationError, match="is the coordination topic"):
                await marshal.consumer("__marshal").assignment()
            reached.stream().end()

    asyncio.run(asyncio.wait_for(work(), 10))


def test_an_async_consumer_polls_through_a_sidecar(reached):
    async def work():
        async with AsyncMarshal(
            group_id="g", client_id="c", sidecar="unix:/run/s.sock"
        ) as marshal:
            async with marshal.consumer("t") as consumer:
                assert await consumer.poll() == {}
            reached.stream().end()

    asyncio.run(asyncio.wait_for(work(), 10))
