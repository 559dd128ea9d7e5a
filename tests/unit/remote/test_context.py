"""The replacement of the engine knows only what the sidecar has reported."""

from enginekit import AMO, H
from prometheus_client import CollectorRegistry, generate_latest
from remotekit import RemoteRig, granted, key, lost
from scraping import Client, Scraped

from kafka_marshal.engine.replica import Glance
from kafka_marshal.metrics import MarshalCollector


def test_a_key_that_is_not_held_is_unknown():
    rig = RemoteRig()
    assert rig.context.glance(key()) is None
    assert rig.context.member_count("g") is None
    assert rig.context.replicas == {}
    assert rig.engine.failure is None


def test_a_glance_has_the_position_or_the_head():
    rig = RemoteRig()
    consumer = rig.consumer(delivery=AMO, most=4)
    rig.send(rig.assigned(position=2))
    assert rig.context.glance(key()) == Glance(
        holder="host-a", freshness="fresh", age_ms=None, position=2, noted=5
    )
    consumer.poll()
    rig.answer(granted(2, 5, head=6))
    assert rig.context.glance(key()).position == 6


def test_a_glance_has_the_epoch_of_the_previous_claim():
    rig = RemoteRig()
    rig.consumer(delivery=AMO, most=4)
    rig.send(rig.assigned(follows=3))
    assert rig.context.glance(key())[-2:] == (5, 3)
    rig.send(lost())
    assert rig.context.follows == {}


def test_observed_events_are_counted():
    rig = RemoteRig()
    rig.context.observe("ready", {"a": 1})
    assert rig.context.meters.events() == {"ready": 1}
    assert rig.events("ready") == [{"a": 1}]


def test_metrics_have_only_values_that_the_client_knows():
    rig = RemoteRig()
    consumer = rig.consumer(most=4)
    rig.send(rig.assigned())
    registry = CollectorRegistry()
    MarshalCollector(Client(rig), registry=registry)
    rig.tick()
    rig.tick()
    consumer.poll()
    found = Scraped(generate_latest(registry).decode())
    labels = {"group": "g", "topic": "t", "partition": "0"}
    assert found("marshal_claim_state", labels, state="held") == 1
    assert found("marshal_claim_epoch", labels) == 5
    assert found("marshal_lease_remaining_seconds", labels) == 2 * H / 1000
    assert found("marshal_consumer_lag_records", labels) == 10
    assert found("marshal_records_handed_out_total", labels) == 4
    assert found("marshal_group_paused", {"group": "g"}) == 0
    assert found.named("marshal_uncovered_partitions") == {}, "the sidecar reports it"
    for unknown in (
        "marshal_members",
        "marshal_plan_generation",
        "marshal_heartbeat_age_seconds",
    ):
        assert found.named(unknown) == {}
    assert found.named("marshal_records_undecodable_total") == {}
    rig.send(lost())
    found = Scraped(generate_latest(registry).decode())
    assert found("marshal_claim_state", labels, state="held") is None
