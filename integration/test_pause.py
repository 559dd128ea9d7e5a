"""Pausing a live group: owners release, no record is handed out, then it continues."""

import threading

import pytest
from domain import opened
from slowness import factor_now
from waiting import WAIT_MS, eventually, wall_ms

from kafka_marshal import (
    Delivery,
    InvalidTransition,
)
from kafka_marshal.protocol.records import ReleaseGroup

PAUSE_MS = 120_000
# Jitter, a few round trips, and the scheduling delays of a busy machine.
SLACK_MS = 10_000
# So long that no heartbeat is written during the test: what a client reads sooner came
# by its long poll, and did not wait for other records.
IDLE_H_MS = 180_000


@pytest.fixture(scope="module")
def domain(broker, unique):
    # One transport is enough: the tests do not depend on it.
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
def test_a_pause_releases_all_partitions_until_the_group_is_resumed(
    domain, unique, admin, delivery
):
    """Another group is unaffected; a resumed group continues at its positions."""
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


def test_a_pause_expires_on_an_idle_log(domain, unique, admin):
    """The group continues although nothing else is written."""
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


def test_live_clients_read_a_pause_without_waiting_for_an_interval(
    broker, unique, transport, record_testsuite_property
):
    """Measured from the append of its last record to the state of a live client."""
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
