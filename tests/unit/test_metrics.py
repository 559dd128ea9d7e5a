"""Metrics that a scrape returns of clients, their claims and the log."""

import os
import sys
import threading

import pytest
from enginekit import (
    AMO,
    KEY,
    H,
    Stepping,
    checkpointed,
    claim_of,
    fold,
    held_by,
    owning,
    pause_for,
    spec,
    world,
    write,
)
from logkit import planned, schedule, settings
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as strict
from scraping import Client, Scraped

from kafka_marshal import metrics
from kafka_marshal.engine import Session
from kafka_marshal.engine.meters import Tally
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    InvalidTransition,
)
from kafka_marshal.metrics import EFFECTS, KEYS_PER_HOLD, MarshalCollector
from kafka_marshal.observability import metrics as known
from kafka_marshal.ports import WrongSetting
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.records import ClaimingPartition, Member
from kafka_marshal.protocol.types import Key, Owner

GROUP = {"group": "g"}
T = {"group": "g", "topic": "t"}
T0 = T | {"partition": "0"}


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def scrape(registry):
    return lambda: Scraped(generate_latest(registry).decode())


def exported(node, registry, **options):
    return MarshalCollector(Client(node), registry=registry, **options)


def state_of(found, **labels):
    (state,) = [
        state
        for state in known.STATES
        if found("marshal_claim_state", T0 | labels, state=state) == 1
    ]
    return state


# --- Claims ---


def test_a_won_claim_is_exported_as_held(cluster, registry, scrape):
    node = owning(cluster)
    exported(node, registry)
    found = scrape()
    assert state_of(found) == "held"
    states = found.named("marshal_claim_state")
    assert len(states) == len(known.STATES)
    assert sum(states.values()) == 1
    assert found("marshal_claim_epoch", T0) == claim_of(node).token.offset
    assert found("marshal_claims_won_total", T, reason="claimed") == 1
    assert found("marshal_up", GROUP) == 1
    assert found("marshal_members", GROUP) == 1
    assert found("marshal_group_paused", GROUP) == 0
    assert found("marshal_heartbeat_interval_seconds", GROUP) == H / 1000
    assert found.named("marshal_takeover_duration_seconds_count") == {}


def test_a_waiting_claim_is_exported_without_epoch_and_lease(cluster, registry, scrape):
    owning(cluster)
    other = cluster.node("b")
    cluster.run(40)
    other.session.want(KEY)
    cluster.run(40)
    exported(other, registry)
    found = scrape()
    assert state_of(found) == "waiting"
    assert found("marshal_claim_epoch", T0) is None
    assert found("marshal_lease_remaining_seconds", T0) is None
    assert found("marshal_records_handed_out_total", T0) == 0
    assert found("marshal_members", GROUP) == 2


def test_heartbeats_limit_the_exported_age_and_renew_the_lease(
    cluster, registry, scrape
):
    node = owning(cluster)
    exported(node, registry)
    cluster.run(3 * H)
    found = scrape()
    assert 0 <= found("marshal_heartbeat_age_seconds", T0) < H / 1000
    assert H / 1000 < found("marshal_lease_remaining_seconds", T0) < 2 * H / 1000


def test_without_heartbeats_the_age_grows_until_the_lease_expires(
    cluster, registry, scrape
):
    node = owning(cluster)
    exported(node, registry)
    node.cut(is_cut=True)
    cluster.run(20)
    before = scrape()
    cluster.run(H)
    after = scrape()
    for name, sign in (
        ("marshal_heartbeat_age_seconds", 1),
        ("marshal_lease_remaining_seconds", -1),
    ):
        assert after(name, T0) - before(name, T0) == pytest.approx(sign * H / 1000)
    cluster.run_until(lambda: not node.held, 2 * H)
    cluster.run(40)
    lost = scrape()
    assert lost("marshal_claims_lost_total", T, reason="lease_expired") == 1
    assert lost("marshal_lease_remaining_seconds", T0) is None
    assert lost("marshal_claim_epoch", T0) is None


def test_a_handoff_is_counted_by_phase_and_its_gap_timed(registry, scrape):
    cluster = world(partitions=1, records=(4, 4))
    owner = cluster.node("a", spec=spec())
    cluster.run_until(held_by(owner, 2), 3 * H)
    assert owner.consumer.poll(1000)
    successor = cluster.node("b")
    successor.warming.is_held = True
    successor.consume(spec(on_warm=lambda *_: None))
    exported(owner, registry, client_label=True)
    MarshalCollector(Client(successor), registry=(second := CollectorRegistry()))

    def phases():
        found = Scraped(generate_latest(second).decode())
        return {
            "warming": found("marshal_handoffs", GROUP, phase="warming"),
            **{
                phase: scrape()("marshal_handoffs", GROUP, phase=phase, client="a")
                for phase in ("offered", "ready")
            },
        }

    cluster.run(40)
    assert phases() == {"warming": 0, "offered": 0, "ready": 0}
    cluster.run_until(lambda: successor.warming.waiting_count == 1, 3 * H)
    assert phases() == {"warming": 1, "offered": 1, "ready": 0}
    successor.warming.run_waiting()
    cluster.run(H // 2)
    assert phases() == {"warming": 1, "offered": 0, "ready": 1}, "it drains"
    owner.consumer.commit()
    cluster.run_until(held_by(successor, 1), H)
    assert phases() == {"warming": 0, "offered": 0, "ready": 0}
    found = Scraped(generate_latest(second).decode())
    name = "marshal_handoff_gap_seconds"
    assert found(f"{name}_count", T) == 1
    assert found(f"{name}_sum", T) < 0.1


def test_a_takeover_is_timed_from_the_last_renewal(cluster, registry, scrape):
    dead = owning(cluster)
    cluster.crash(dead)
    successor = cluster.node("b", spec=spec())
    cluster.run_until(held_by(successor, 1), 4 * H)
    exported(successor, registry)
    found = scrape()
    name = "marshal_takeover_duration_seconds"
    assert found(f"{name}_count", T, after="stale") == 1
    assert 2 * H / 1000 < found(f"{name}_sum", T, after="stale") < 3 * H / 1000
    assert found(f"{name}_bucket", T, after="stale", le="5.0") == 0
    assert found(f"{name}_bucket", T, after="stale", le="10.0") == 1
    assert found(f"{name}_bucket", T, after="stale", le="+Inf") == 1


def test_uncovered_partitions_are_counted_and_reported(registry, scrape):
    cluster = world(records=[1] * 3)
    node = cluster.node("a", spec=spec(claims_max=1))
    exported(node, registry)
    cluster.run_until(held_by(node, 1), H)
    assert scrape()("marshal_uncovered_partitions", GROUP) == 0
    assert not node.observer.named("partitions_uncovered"), "free for a moment only"
    cluster.run(2 * H)
    assert scrape()("marshal_uncovered_partitions", GROUP) == 2
    (event,) = node.observer.named("partitions_uncovered")
    (held,) = node.held
    free = [f"t-{number}" for number in range(3) if number != held.partition]
    assert event.fields == {
        "group": "g",
        "count": 2,
        "reasons": ["limits"],
        "partitions": free,
    }
    other = cluster.node("b", spec=spec())
    cluster.run_until(held_by(other, 2), H)
    cluster.run_until(lambda: node.observer.named("partitions_covered"), 2 * H)
    assert scrape()("marshal_uncovered_partitions", GROUP) == 0


def test_the_plan_generation_is_exported(registry, scrape):
    cluster = world(partitions=1, records=[1] * 3)
    node = cluster.node("a", spec=spec())
    exported(node, registry)
    cluster.run_until(held_by(node, 3), H)
    assert scrape()("marshal_plan_generation", GROUP) == 0
    write(cluster, settings(policy="planner"))
    write(cluster, planned(0, ("a", 0, (2,)), client="b"))
    cluster.run(100)
    assert scrape()("marshal_plan_generation", GROUP) == 1


@pytest.mark.parametrize(("limits", "count"), [((1, 1), 0), ((1,), 1)])
def test_only_partitions_of_unclaimed_whole_topics_are_uncovered(
    limits, count, registry, scrape
):
    cluster = world(records=[1] * 3)
    cluster.fill("u", [1])
    for name, most in zip("ab", limits, strict=False):
        of_both = spec("t", "u", policy="topic", claims_max=most)
        node = cluster.node(name, spec=of_both)
    exported(node, registry)
    cluster.run(4 * H)
    held = {key.topic for each in cluster.nodes for key in each.held}
    assert len(held) == 2 - count
    found = scrape()("marshal_uncovered_partitions", GROUP)
    assert found == (0 if not count else 3 if held == {"u"} else 1)


def test_a_pause_and_its_releases_are_exported(cluster, registry, scrape):
    node = owning(cluster)
    exported(node, registry)
    node.consumer.poll(0, 3)
    pause_for(cluster, 4 * H)
    cluster.run(100)
    paused = scrape()
    assert paused("marshal_group_paused", GROUP) == 1
    assert state_of(paused) == "draining"
    node.consumer.commit()
    cluster.run(100)
    released = scrape()
    assert released("marshal_claims_released_total", T, reason="paused") == 1
    assert released("marshal_claim_epoch", T0) is None
    cluster.run_until(held_by(node, 1), 6 * H)
    after = scrape()
    assert after("marshal_group_paused", GROUP) == 0
    assert after("marshal_takeover_duration_seconds_count", T, after="released") == 1


def test_pauses_are_exported_with_person_reason_topics_and_times(
    cluster, registry, scrape
):
    node = owning(cluster)
    exported(node, registry)
    now_ms = cluster.clock.wall_ms()
    plan = schedule(now_ms + 9 * H, now_ms + 12 * H, scope={"t": (0, 3)})
    plan = replace(plan, reason="r" * 300, tags=person_to_tags("ada"))
    write(cluster, plan)
    until_ms = pause_for(cluster, 4 * H)
    cluster.run(100)
    found = scrape()
    assert found("marshal_group_paused", GROUP) == 1
    planned, now = (
        {"group": "g", "operation": op.hex()} for op in (plan.op_id, b"o" * 16)
    )
    assert found(
        "marshal_pause_info", planned, by="ada", reason="r" * 200, topics="t:0,3"
    )
    assert found("marshal_pause_info", now, by="admin", reason="", topics="all") == 1
    assert len(found.named("marshal_pause_info")) == 2
    begin, end = (f"marshal_pause_{x}_timestamp_seconds" for x in ("begin", "end"))
    assert found(begin, planned) == (now_ms + 9 * H) / 1000
    assert found(end, planned) == (now_ms + 12 * H) / 1000
    assert found(begin, now) >= now_ms / 1000
    assert found(end, now) == until_ms / 1000
    for replica in node.engine.context.replicas.values():
        replica.notes.forget()
    found = scrape()
    assert found(begin, planned) is not None
    assert (found(begin, now), found(end, now)) == (None, until_ms / 1000)
    cluster.run_until(held_by(node, 1), 6 * H)
    assert list(scrape().named(end).values()) == [(now_ms + 12 * H) / 1000]


# --- Records and lag ---


def test_lag_and_record_counts_are_exported(cluster, registry, scrape):
    node = owning(cluster)
    exported(node, registry)
    cluster.run(H)
    group_lag = {"consumergroup": "g", "topic": "t", "partition": "0"}
    before = scrape()
    assert before("marshal_consumer_lag_records", T0) == 10
    assert before("kafka_consumergroup_lag", group_lag) == 10
    (records,) = node.consumer.poll(0, 4).values()
    node.consumer.commit(records[:3])
    after = scrape()
    assert after("marshal_records_handed_out_total", T0) == 4
    assert after("marshal_records_committed_total", T0) == 3
    assert after("marshal_consumer_lag_records", T0) == 7
    assert after("kafka_consumergroup_lag", group_lag) == 10, "no beat has told it"
    cluster.run(H)
    assert scrape()("kafka_consumergroup_lag", group_lag) == 7
    assert after("marshal_amo_unconfirmed_records", T0) is None


def test_totals_of_a_key_outlive_its_claims(cluster, registry, scrape):
    node = owning(cluster)
    exported(node, registry)
    (records,) = node.consumer.poll(0, 4).values()
    node.consumer.commit(records[:2])
    node.cut(is_cut=True)
    cluster.run_until(lambda: not node.session.holdings.get(KEY), 3 * H)
    between = scrape()
    assert between("marshal_records_handed_out_total", T0) == 4
    assert between("marshal_records_committed_total", T0) == 2
    node.cut(is_cut=False)
    cluster.run_until(held_by(node, 1), 6 * H)
    node.engine.changed = Stepping(cluster)
    again = dict(node.session.holdings)[KEY]
    again.handed_count += 5
    assert scrape()("marshal_records_handed_out_total", T0) == 9


def test_at_most_once_unconfirmed_records_are_exported(cluster, registry, scrape):
    node = owning(cluster, delivery=AMO)
    node.engine.changed = Stepping(cluster)
    exported(node, registry)
    (records,) = node.consumer.poll(H, 4).values()
    found = scrape()
    unconfirmed = found("marshal_amo_unconfirmed_records", T0)
    assert unconfirmed >= len(records) > 0
    granted = fold(cluster).keys[KEY].granted
    assert unconfirmed == granted
    assert found("marshal_records_committed_total", T0) == len(records)


@pytest.mark.parametrize(("claims_max", "desired"), [(0, 5), (2, 3), (5, 1)])
def test_desired_clients_depend_on_partitions_and_claims_max(
    registry, scrape, claims_max, desired
):
    cluster = world(records=[1] * 5)
    node = cluster.node("a", spec=spec(claims_max=claims_max))
    cluster.run(200)
    exported(node, registry)
    assert scrape()("marshal_desired_clients", GROUP) == desired


def test_desired_clients_count_topics_under_policy_topic(registry, scrape):
    cluster = world(records=[1] * 4)
    cluster.fill("u", [1] * 4)
    node = cluster.node("a", spec=spec("t", "u", policy="topic"))
    cluster.run(200)
    exported(node, registry)
    assert scrape()("marshal_desired_clients", GROUP) == 2


# --- The log ---


def test_checkpoint_age_divergence_and_wrong_settings_are_exported(
    cluster, registry, scrape
):
    node = owning(cluster)
    exported(node, registry)
    place = {"topic": "__marshal", "partition": "0"}
    found = scrape()
    assert found("marshal_checkpoint_age_seconds", place) is None
    assert found("marshal_replica_diverged", place) is None
    assert found("marshal_topic_wrong_settings", topic="__marshal") == 0
    checkpointed(cluster, node)
    cluster.run(5_000)
    wrong = WrongSetting("retention.ms", "retention.ms is 1000", "kafka-configs ...")
    node.engine.context.wrong_settings = (wrong,)
    found = scrape()
    assert found("marshal_checkpoint_age_seconds", place) >= 5
    assert found("marshal_replica_diverged", place) == 0
    assert found("marshal_topic_wrong_settings", topic="__marshal") == 1
    replica = node.engine.context.replicas[0]
    replica.compared = replica.compared._replace(theirs="else")
    assert scrape()("marshal_replica_diverged", place) == 1


def test_refused_and_undecodable_records_are_counted(cluster, registry, scrape):
    node = owning(cluster)
    exported(node, registry)
    assert scrape()("marshal_records_undecodable_total") == 0
    write(cluster, b"noise")
    write(cluster, claiming("g", "t"))
    cluster.run(40)
    found = scrape()
    assert found("marshal_records_undecodable_total") == 1
    assert found("marshal_records_ignored_total", reason="held") == 1
    reasons = {reason for (reason,) in found.named("marshal_records_ignored_total")}
    assert not reasons & (EFFECTS | {"undecodable"})


def test_every_counter_of_an_ordinary_run_is_an_effect(cluster):
    node = owning(cluster)
    cluster.run(2 * H)
    node.leave()
    cluster.run(H)
    assert set(fold(cluster).soft.counters) <= EFFECTS


def test_replay_lag_counts_records_not_yet_folded(registry, scrape):
    cluster = world(partitions=2)
    node = owning(cluster)
    exported(node, registry)
    labels = [{"topic": "__marshal", "partition": str(t)} for t in (0, 1)]
    cluster.run(2_000)
    assert [scrape()("marshal_replay_lag_records", each) for each in labels] == [0, 0]
    for _ in range(7):
        write(cluster, b"noise", 1)
    cluster.clock.advance(2_000)
    assert [scrape()("marshal_replay_lag_records", each) for each in labels] == [0, 7]


def test_replay_lag_is_exported_from_the_last_answer(cluster, registry, scrape):
    node = owning(cluster)
    node.background.is_held = True
    collector = exported(node, registry)
    assert scrape().named("marshal_replay_lag_records") == {}
    node.background.is_held = False
    node.background.run_waiting()
    assert len(scrape().named("marshal_replay_lag_records")) == 1
    node.cut(is_cut=True)
    cluster.clock.advance(2_000)
    assert len(scrape().named("marshal_replay_lag_records")) == 1
    collector.close()


def test_counters_of_alerts_begin_at_zero(cluster, registry, scrape):
    """``increase`` does not count the first sample of a series."""
    node = owning(cluster)
    exported(node, registry)
    found = scrape()
    for event in ("grant_exposed", "lease_journal_unwritable", "identity_unavailable"):
        assert found("marshal_events_total", event=event) == 0
    for reason in ("lease_expired", "taken_over", "beat_ignored", "stuck"):
        assert found("marshal_claims_lost_total", T, reason=reason) == 0


def test_the_engine_exports_its_times_and_events(cluster, registry, scrape):
    node = owning(cluster)
    exported(node, registry)
    found = scrape()
    assert found("marshal_read_back_duration_seconds_count") > 0
    assert found("marshal_engine_step_duration_seconds_count") > 0
    assert found("marshal_append_failures_total") == 0
    assert found("marshal_events_total", event="claimed") == 1
    assert found("marshal_events_total", event="ready") == 1


# --- Records of other writers ---


def claiming(group, topic, partition=0, client="x"):
    incarnation = client.encode().ljust(16, b".")
    return ClaimingPartition(
        client_id=client,
        group_id=group,
        incarnation=incarnation,
        seq=1,
        generation=1,
        topic=topic,
        partition=partition,
        topic_id=None,
        resume_hash=b"h" * 32,
        expected_epoch=None,
        resume=None,
    )


def member(group, client):
    incarnation = client.encode().ljust(16, b".")
    topics = (f"topic-of-{client}",)
    return Member(
        client_id=client,
        group_id=group,
        incarnation=incarnation,
        seq=1,
        topics=topics,
        host="h",
        capacity=0,
        load=0,
        labels={},
        draining=False,
        feature_level_max=1,
        plan_generation=None,
    )


def test_names_in_records_of_other_clients_create_no_series(cluster, registry, scrape):
    node = owning(cluster)
    exported(node, registry)
    cluster.run(40)
    before = scrape()
    for number in range(100):
        write(cluster, claiming(f"group-{number}", f"topic-{number}"))
        write(cluster, claiming("g", f"topic-{number}", number))
        write(cluster, member(f"group-{number}", f"client-{number}"))
        write(cluster, b"\xff" + b"%d" % number)
    cluster.run(40)
    after = scrape()
    assert after("marshal_records_undecodable_total") == 100
    assert set(after.figures) == set(before.figures)


def test_members_of_other_groups_are_not_counted(cluster, registry, scrape):
    node = owning(cluster)
    exported(node, registry)
    write(cluster, member("g", "b"))
    write(cluster, member("elsewhere", "c"))
    cluster.run(40)
    assert scrape()("marshal_members", GROUP) == 2
    cluster.run(3 * H)
    assert scrape()("marshal_members", GROUP) == 1, "it never came again"


# --- Several clients, and the registry ---


def second_session(node, group_id, client_id):
    owner = Owner(client_id, client_id.encode().ljust(16, b"."))
    claimant = Claimant(owner, group_id, master=b"m" * 32)
    session = Session(node.engine.context, claimant)
    node.engine.add_session(session)
    return session


def test_clients_of_one_engine_share_its_figures(cluster, registry, scrape):
    node = owning(cluster)
    collector = exported(node, registry)
    before = scrape()("marshal_engine_step_duration_seconds_count")
    collector.add(Client(node, second_session(node, "other", "a")))
    found = scrape()
    assert found("marshal_engine_step_duration_seconds_count") == before
    assert set(found.named("marshal_up")) == {("g",), ("other",)}


def test_figures_of_two_engines_are_added(cluster, registry, scrape):
    first, second = owning(cluster), cluster.node("b")
    cluster.run(40)
    collector = exported(first, registry)
    alone = scrape()("marshal_engine_step_duration_seconds_count")
    collector.add(Client(second, second_session(second, "other", "c")))
    assert scrape()("marshal_engine_step_duration_seconds_count") > alone


def test_clients_of_one_group_need_the_client_label(cluster, registry, scrape):
    node = owning(cluster)
    other = Client(node, second_session(node, "g", "b"))
    collector = exported(node, registry)
    with pytest.raises(ConfigurationError, match="client_label=True"):
        collector.add(other)
    collector.close()
    labelled = exported(node, registry, client_label=True)
    labelled.add(other)
    found = scrape()
    assert found("marshal_up", GROUP, client="a") == 1
    assert found("marshal_up", GROUP, client="b") == 1
    assert state_of(found, client="a") == "held"
    with pytest.raises(ConfigurationError, match="cannot be distinguished"):
        labelled.add(Client(node))


def test_a_client_for_asyncio_is_exported_once_it_is_open(cluster, registry, scrape):
    """Else it would be registered without an engine, and every scrape would fail."""

    class Async:
        @property
        def marshal(self):
            if given is None:
                raise InvalidTransition("open it first")
            return given

    given = None
    with pytest.raises(InvalidTransition, match="open it"):
        MarshalCollector(Async(), registry=registry)
    with pytest.raises(AttributeError):
        MarshalCollector("marshal", registry=registry)  # type: ignore[arg-type]
    assert not generate_latest(registry)
    given = Client(owning(cluster))
    MarshalCollector(Async(), registry=registry)
    assert scrape()("marshal_up", GROUP) == 1


def test_a_registry_accepts_one_collector(cluster, registry):
    exported(owning(cluster), registry)
    with pytest.raises(ConfigurationError, match="add the client"):
        exported(cluster.nodes[0], registry)


def test_a_registry_with_other_metrics_of_the_same_name_is_refused(cluster, registry):
    Gauge("marshal_up", "Mine.", registry=registry)
    with pytest.raises(ConfigurationError, match="already has metrics of these names"):
        exported(owning(cluster), registry)


def test_closing_the_last_client_unregisters_the_collector(cluster, registry, scrape):
    node = owning(cluster)
    first = Client(node)
    second = Client(node, second_session(node, "other", "b"))
    MarshalCollector(first, second, registry=registry)
    first.close()
    assert set(scrape().named("marshal_up")) == {("other",)}
    second.close()
    assert scrape().figures == {}
    exported(node, registry)
    assert scrape()("marshal_up", GROUP) == 1


def test_a_client_whose_close_was_interrupted_is_not_exported(
    cluster, registry, scrape
):
    client = Client(owning(cluster))
    MarshalCollector(client, registry=registry)
    client.is_closed = True
    assert scrape().named("marshal_up") == {}
    exported(cluster.nodes[0], registry)
    assert scrape()("marshal_up", GROUP) == 1


def test_closing_a_collector_is_idempotent(cluster, registry, scrape):
    collector = exported(owning(cluster), registry)
    collector.close()
    collector.close()
    assert scrape().figures == {}


def test_an_unregistered_collector_can_be_closed(cluster, registry):
    collector = exported(owning(cluster), registry)
    registry.unregister(collector)
    collector.close()


def test_a_forked_child_exports_nothing(cluster, registry, scrape, monkeypatch):
    exported(owning(cluster), registry)
    parent = os.getpid()
    monkeypatch.setattr(metrics.os, "getpid", lambda: parent + 1)
    assert scrape().figures == {}


def test_the_missing_extra_is_named(cluster, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[metrics\]"):
        MarshalCollector(Client(owning(cluster)))


# --- Failures, and the engine's lock ---


def test_a_failed_client_is_exported_as_down(cluster, registry, scrape):
    node = owning(cluster)
    exported(node, registry)
    node.session.fail(CoordinationError("gone"))
    assert scrape()("marshal_up", GROUP) == 0
    assert scrape()("marshal_claims_released_total", T, reason="failed") == 1


def test_a_client_whose_engine_holds_its_lock_is_exported_as_down(
    cluster, registry, scrape, monkeypatch
):
    monkeypatch.setattr(metrics, "LOCK_MS_MAX", 20)
    node = owning(cluster)
    exported(node, registry)
    taken, done = threading.Event(), threading.Event()

    def work():
        with node.engine.changed:
            taken.set()
            done.wait(90)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    assert taken.wait(60)
    found = scrape()
    done.set()
    worker.join(60)
    assert found("marshal_up", GROUP) == 0
    assert found.named("marshal_claim_state") == {}
    assert scrape()("marshal_up", GROUP) == 1


class Watched(threading.Condition):
    """Counts how often the lock is acquired."""

    def __init__(self):
        super().__init__(threading.RLock())
        self.count = 0
        plain = self.acquire

        def acquire(*args, **kwargs):
            self.count += 1
            return plain(*args, **kwargs)

        self.acquire = acquire


def test_many_keys_are_read_in_several_acquisitions_of_the_lock(
    cluster, registry, scrape, monkeypatch
):
    node = owning(cluster)
    tallies = node.session.meters.tallies
    for number in range(1, 5 * KEYS_PER_HOLD):
        tallies[Key("g", "t", number)] = Tally(2, 1)
    exported(node, registry)
    lock = node.engine.changed = Watched()
    plain = known.Scrape.add

    def add(*args, **kwargs):
        is_owned = lock._is_owned()  # type: ignore[attr-defined]
        assert not is_owned, "figures are formatted without the lock"
        return plain(*args, **kwargs)

    monkeypatch.setattr(known.Scrape, "add", add)
    found = scrape()
    assert len(found.named("marshal_records_handed_out_total")) == 5 * KEYS_PER_HOLD
    assert lock.count >= 5


def test_the_strict_openmetrics_parser_accepts_the_exposition(cluster, registry):
    """It checks names, types, units and the order of samples."""
    dead = owning(cluster)
    cluster.crash(dead)
    successor = cluster.node("b", spec=spec())
    cluster.run_until(held_by(successor, 1), 4 * H)
    exported(successor, registry)
    text = openmetrics.generate_latest(registry).decode()
    families = list(strict.text_string_to_metric_families(text))
    assert "marshal_takeover_duration_seconds" in {each.name for each in families}


def test_scrapes_are_complete_while_the_engine_runs(registry, scrape):
    """Two threads scrape while the main thread consumes."""
    cluster = world(records=[20] * 8)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 8), 4 * H)
    exported(node, registry)
    is_over = threading.Event()
    failures = []

    def ask():
        while not is_over.is_set():
            try:
                assert len(scrape().named("marshal_up")) == 1
            except Exception as error:  # noqa: BLE001 - raised by the main thread
                failures.append(error)

    askers = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for asker in askers:
        asker.start()
    for _ in range(30):
        node.consumer.poll(0, 5)
        node.consumer.commit()
        cluster.run(H // 3)
    is_over.set()
    for asker in askers:
        asker.join(30)
    assert failures == []
    assert sum(scrape().named("marshal_records_committed_total").values()) > 0
