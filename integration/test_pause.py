"""Pausing a live group: owners let go, nothing is handed out, then it goes on."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from domain import opened
from slowness import factor_now
from waiting import WAIT_MS, eventually, wall_ms

from kafka_marshal import (
    ClaimRejected,
    ConfigurationError,
    Delivery,
    GroupPaused,
    InvalidTransition,
    TopicPartition,
)
from kafka_marshal.protocol.records import ReleaseGroup

PAUSE_MS = 120_000
# Jitter, a few round trips, and the scheduling delays of a busy machine.
SLACK_MS = 10_000
# Of a domain in which nobody writes anything by itself for longer than a machine can be
# busy: what is seen sooner came by the engine's long poll, and waited for nothing else.
IDLE_H_MS = 180_000


@pytest.fixture(scope="module")
def domain(broker, unique):
    # By one transport: nothing of this looks at how records travel.
    with opened(broker, unique, h_ms=5_000) as domain:
        yield domain


@pytest.fixture
def admin(domain):
    with domain.admin(client_id="operator-1") as admin:
        yield admin


class Pump:
    """Polls a consumer on a thread of its own and keeps what it was handed."""

    def __init__(self, consumer):
        self.consumer = consumer
        self.handed = []
        self.lost = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        for record in self.consumer:
            self.handed.append((wall_ms(), record.partition, record.offset))
            self.consumer.commit(record)

    def stop(self):
        self.consumer.stop()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("delivery", list(Delivery), ids=lambda d: d.value)
def test_a_pause_and_its_end(domain, unique, admin, delivery):
    """All partitions drain; another group is unaffected; resume wakes."""
    topic = domain.data_topic(8, records_each=20)
    paused, other = unique("paused"), unique("other")
    with domain.marshal(paused, "w1") as one, domain.marshal(other, "w1") as two:
        pump = Pump(one.consumer(topic, delivery=delivery))
        bystander = Pump(two.consumer(topic, delivery=delivery))
        for each in (pump, bystander):
            eventually(lambda p=each: len(p.handed) == 160, "the backlog is handled")

        shown = admin.pause_group(paused, for_ms=PAUSE_MS, dry_run=True)
        assert (shown.op_id, len(shown.held)) == ("", 8)
        assert not any(w.active_pause(paused) for w in domain.world().partitions)
        result = admin.pause_group(paused, for_ms=PAUSE_MS, wait_ms=WAIT_MS)
        assert result.held == ()
        paused_ms = wall_ms()
        domain.produce(topic, 5)
        eventually(lambda: len(bystander.handed) == 200, "the other group goes on")
        assert set(domain.owners(paused).values()) == {None}
        assert set(domain.owners(other).values()) == {"w1"}
        assert len(pump.handed) == 160
        pauses = [w.active_pause(paused) for w in domain.world().partitions]
        assert all(pauses)
        assert {pause.op_id.hex() for pause in pauses} == {result.op_id}

        assert admin.resume_group(paused, dry_run=True) == 4
        assert all(w.active_pause(paused) for w in domain.world().partitions)
        assert admin.resume_group(paused) == 4
        with domain.admin() as other_admin:
            pass
        with pytest.raises(InvalidTransition, match="closed"):
            other_admin.held(paused)
        eventually(lambda: len(pump.handed) == 200, "the paused group goes on")
        for each in (pump, bystander):
            each.stop()
    assert min(at for at, *_ in pump.handed[160:]) >= paused_ms
    tenures = domain.history().tenures(paused).values()
    assert [two.start for _, two in tenures] == [20] * 8


def test_a_scheduled_pause_begins_and_ends_without_its_admin(domain, unique):
    """Nobody is there when it begins, and when it ends."""
    topic = domain.data_topic(4, records_each=5)
    group, lasts_ms = unique("planned"), 25_000
    with domain.marshal(group, "w1") as marshal:
        pump = Pump(marshal.consumer(topic))
        eventually(lambda: len(pump.handed) == 20, "the backlog is handled")
        begin_ms = wall_ms() + 3_000
        with domain.admin(client_id="operator-2", person="ada") as admin:
            result = admin.pause_group(
                group, begin_ms=begin_ms, for_ms=lasts_ms, reason="maintenance"
            )
        assert (result.begin_ms, result.until_ms) == (begin_ms, begin_ms + lasts_ms)
        assert set(domain.owners(group).values()) == {"w1"}

        eventually(
            lambda: set(domain.owners(group).values()) == {None}, "all is released"
        )
        assert wall_ms() >= begin_ms
        (op_id,) = {
            pause.op_id
            for world in domain.world().partitions
            if (pause := world.active_pause(group)) is not None
        }
        assert op_id.hex() == result.op_id
        domain.produce(topic, 5)
        eventually(
            lambda: len(pump.handed) >= 40,
            "the group goes on by itself",
            timeout_ms=WAIT_MS + lasts_ms,
        )
        assert min(at for at, *_ in pump.handed[20:]) >= begin_ms + lasts_ms
        pump.stop()


def test_a_pause_of_one_topic_leaves_the_other_alone(domain, unique):
    """The other keeps its claims; the paused one resumes by itself."""
    orders, invoices = (domain.data_topic(2, records_each=5) for _ in range(2))
    group, lasts_ms = unique("scoped"), 20_000
    with domain.marshal(group, "w1") as marshal:
        pump = Pump(marshal.consumer(orders, invoices))
        eventually(lambda: len(pump.handed) == 20, "the backlog is handled")
        epochs = {key: state.epoch for key, state in domain.states(group).items()}
        with domain.admin(client_id="operator-2", person="ada") as admin:
            until_ms = wall_ms() + lasts_ms
            result = admin.pause_group(
                group, until_ms=until_ms, topics=[orders], wait_ms=WAIT_MS
            )
        assert (result.topics, result.held) == ((orders,), ())
        owners = {place.topic: who for place, who in domain.owners(group).items()}
        assert owners == {orders: None, invoices: "w1"}
        domain.produce(orders, 5)
        domain.produce(invoices, 5)
        eventually(lambda: len(pump.handed) >= 30, "the other topic goes on")
        seen_ms = wall_ms()
        eventually(
            lambda: len(pump.handed) >= 40,
            "the paused one goes on by itself",
            timeout_ms=WAIT_MS + lasts_ms,
        )
        late = [at for at, *_ in pump.handed if at >= until_ms]
        assert seen_ms >= until_ms or len(late) == 10
        after = {key: state.epoch for key, state in domain.states(group).items()}
        moved = {
            place.topic for place, epoch in after.items() if epochs[place] != epoch
        }
        assert moved == {orders}
        pump.stop()


def test_a_scheduled_pause_is_cancelled(domain, unique, admin):
    group = unique("cancelled")
    begin_ms = wall_ms() + 3_600_000
    admin.pause_group(group, begin_ms=begin_ms, until_ms=begin_ms + 60_000)
    groups = [world.groups[group] for world in domain.world().partitions]
    assert [len(each.scheduled) for each in groups] == [1] * 4
    assert admin.resume_group(group, reason="not needed") == 4
    groups = [world.groups[group] for world in domain.world().partitions]
    assert [len(each.scheduled) for each in groups] == [0] * 4
    with pytest.raises(ClaimRejected, match="not paused"):
        admin.resume_group(group)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "either a length"),
        ({"for_ms": 5, "until_ms": 5}, "either a length"),
        ({"until_ms": 5}, "cannot end at"),
        ({"for_ms": 5, "begin_ms": 5}, "within the next 30 days"),
        ({"for_ms": 5, "begin_ms": 2**60}, "within the next 30 days"),
        ({"for_ms": 5, "begin_ms": 2**60, "wait_ms": 5}, "cannot be waited for"),
    ],
)
def test_a_period_that_no_pause_can_have(admin, wanted, message):
    with pytest.raises(ConfigurationError, match=message):
        admin.pause_group("g", **wanted)


def test_owners_finish_what_is_in_hand(domain, unique, admin):
    """Nothing new is handed out; records handed out before can be committed."""
    topic = domain.data_topic(1, records_each=10)
    group = unique("inhand")
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, max_poll_records=4)
        records = []

        def look():
            records.extend(r for rs in consumer.poll(100).values() for r in rs)
            return records

        eventually(look, "the first batch")
        admin.pause_group(group, for_ms=PAUSE_MS)
        place = TopicPartition(topic, 0)
        replicas = marshal.engine.context.replicas.values()
        eventually(
            lambda: all(r.world.active_pause(group) for r in replicas),
            "the pause is seen",
        )
        assert consumer.poll(timeout_ms=300) == {}
        assert domain.owners(group) == {place: "w1"}
        consumer.commit(records)
        eventually(
            lambda: consumer.poll(50) == {} and domain.owners(group) == {place: None},
            "released once its hands are empty",
        )
        (known,) = domain.states(group).values()
        assert known.position == 4


def test_a_pause_ends_by_itself_on_an_idle_log(domain, unique, admin):
    """Nobody writes, and it goes on all the same."""
    topic = domain.data_topic(4, records_each=5)
    group = unique("expiry")
    with domain.marshal(group, "w1") as marshal:
        pump = Pump(marshal.consumer(topic))
        eventually(lambda: len(pump.handed) == 20, "the backlog is handled")
        result = admin.pause_group(group, for_ms=1_500, wait_ms=WAIT_MS)
        domain.produce(topic, 1)
        eventually(lambda: len(pump.handed) == 24, "it goes on")
        pump.stop()
    history = domain.history()
    # The log time of each partition decides: renewals moved the ends apart.
    ends_ms = {
        step.t: step.record.msg_expire_time
        for step in history.of("paused", group_id=group)
    }
    assert max(ends_ms.values()) == result.until_ms
    again = history.of("claimed", group_id=group)[4:]
    assert len(again) == 4
    for step in again:
        assert 0 <= step.timestamp_ms - ends_ms[step.t] <= SLACK_MS * factor_now()


def test_a_short_pause_is_renewed_until_its_owners_have_let_go(domain, unique, admin):
    """An owner with uncommitted records keeps its claim for longer than the pause."""
    topic = domain.data_topic(1, records_each=1)
    group = unique("renewed")
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic)
        records = []

        def look():
            records.extend(r for rs in consumer.poll(100).values() for r in rs)
            return records

        eventually(look, "the record")
        with ThreadPoolExecutor(1) as pool:
            asked = {"for_ms": 2_000, "wait_ms": WAIT_MS}
            result = pool.submit(admin.pause_group, group, **asked)

            def renewed():
                steps = domain.history().of("paused", group_id=group)
                return len(steps) > 12 or result.done()

            eventually(renewed, "the pause is renewed twice in each T")
            assert not result.done()
            replicas = marshal.engine.context.replicas.values()
            assert all(r.world.active_pause(group) for r in replicas)
            consumer.commit(records)
            eventually(
                lambda: consumer.poll(50) == {} and result.done(), "it has let go"
            )
        assert result.result(0).held == ()


def test_a_second_admin_gets_the_name_of_the_first(domain, unique, admin):
    group = unique("busy")
    first = admin.pause_group(group, for_ms=PAUSE_MS, reason="maintenance")
    with domain.admin(client_id="operator-2") as second:
        with pytest.raises(GroupPaused, match="operator-1") as raised:
            second.pause_group(group, for_ms=PAUSE_MS)
        assert raised.value.by == "operator-1"
        # That of its home, which was written first.
        assert 0 <= first.until_ms - raised.value.until_ms < SLACK_MS * factor_now()
        assert second.resume_group(group) == 4
    again = admin.pause_group(group, for_ms=PAUSE_MS)
    assert again.op_id != first.op_id
    admin.resume_group(group)
    reasons = domain.history().reasons(client_id="operator-2")
    assert reasons.count("busy") == 1  # at home, and nothing was written elsewhere


def test_the_end_of_a_pause_that_is_not(domain, unique, admin):
    with pytest.raises(ClaimRejected, match="not paused"):
        admin.resume_group(unique("running"))


@pytest.mark.parametrize("for_ms", [0, -1, 24 * 3_600_000 + 1])
def test_how_long_a_pause_may_be(admin, unique, for_ms):
    with pytest.raises(ConfigurationError) as raised:
        admin.pause_group(unique("long"), for_ms=for_ms)
    assert raised.value.setting == "for_ms"


def test_a_pause_shows_within_one_fetch_wait(
    broker, unique, transport, record_testsuite_property
):
    """From the append of its last record to the world of a live client."""
    group = unique("visible")
    with (
        opened(broker, unique, h_ms=IDLE_H_MS, transport=transport) as domain,
        domain.admin() as admin,
        domain.marshal(group, "w1") as marshal,
    ):
        replicas = marshal.engine.context.replicas

        def seen():
            return all(r.world.active_pause(group) for r in replicas.values())

        admin.pause_group(group, for_ms=PAUSE_MS)
        eventually(seen, "every T shows it", IDLE_H_MS // 3)
        seen_ms = wall_ms()
        steps = domain.history().of("paused", group_id=group)
        assert all(isinstance(step.record, ReleaseGroup) for step in steps)
        delay_ms = seen_ms - max(step.timestamp_ms for step in steps)
        record_testsuite_property("visible_after_ms", delay_ms)
        admin.resume_group(group)


def test_claims_are_refused_while_paused(domain, unique, admin):
    group = unique("refused")
    topic = domain.data_topic(1)
    admin.pause_group(group, for_ms=PAUSE_MS)
    with domain.marshal(group, "w1") as marshal:
        with pytest.raises(ClaimRejected, match="paused") as raised:
            marshal.claim(topic, 0, timeout_ms=800)
        assert raised.value.reason == "paused"
        admin.resume_group(group)
        with marshal.claim(topic, 0, timeout_ms=WAIT_MS) as claim:
            assert claim.is_valid()
