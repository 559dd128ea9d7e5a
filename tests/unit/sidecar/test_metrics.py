import re
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from enginekit import H, held_by, lines, owning, spec, world
from scraping import Scraped
from sidecarkit import Local, Machine, having, run_until

from kafka_marshal.errors import ConfigurationError, LogUnreadable
from kafka_marshal.observability import metrics as library
from kafka_marshal.observability.metrics import Kind
from kafka_marshal.remote.answers import LocalClient
from kafka_marshal.sidecar import metrics
from kafka_marshal.sidecar.health import Lifecycle, State
from kafka_marshal.sidecar.metrics import (
    GROUPS_MAX,
    OWN_FAMILIES,
    ROUTES_MAX,
    Counts,
    SidecarCollector,
    exposition,
)
from simulator.clock import VirtualClock

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = (ROOT / "docs" / "METRICS.md").read_text()
SIDECAR = (ROOT / "docs" / "SIDECAR.md").read_text()
GROUP = {"group": "g"}
T0 = GROUP | {"topic": "t", "partition": "0"}


class Daemon:
    """The parts of a sidecar that its metrics are read from."""

    def __init__(self, node=None):
        clock = VirtualClock() if node is None else node.engine.context.ports.clock
        self.states = Lifecycle(clock)
        self.states.engine = None if node is None else node.engine
        self.watch = SimpleNamespace(process_count=0)
        self.registered = []
        self.refused = {}
        self.counts = Counts()
        collector = SidecarCollector(self, self.counts, coordination_topic="__marshal")
        self.write = exposition(collector)

    def clients(self):
        return self.registered

    def refusals(self):
        return self.refused

    def run(self):
        for step in (State.STARTING, State.RECOVERY, State.RUNNING):
            self.states.move(step, reason="serving")

    def scrape(self):
        text, media = self.write()
        assert media.startswith("text/plain; version=0.0.4")
        return Scraped(text.decode())


def client(group="g", name="c", **changes):
    fields = {
        "pid": 1,
        "state": "ready",
        "beat_age_ms": 200,
        "subscriptions": ("s",),
        "assigned": ("t-0", "t-1"),
        "lease_until_ms": None,
    }
    return LocalClient(group=group, client=name, **(fields | changes))


@pytest.fixture
def cluster():
    return world()


# --- The catalogue


def test_the_documentation_lists_exactly_the_sidecar_s_metrics():
    section = DOCUMENT.partition("\n## A sidecar\n")[2].partition("\n## ")[0]
    item = r"^- `(\w+?)(?:\{([\w,]+)\})?`: (.+?)(?=\n- |\n\n)"
    assert [
        (name, labels, " ".join(meaning.split()))
        for name, labels, meaning in re.findall(item, section, re.MULTILINE | re.DOTALL)
    ] == [
        (family.name, ",".join(family.labels), family.help) for family in OWN_FAMILIES
    ]
    for family in OWN_FAMILIES:
        assert family.kind in {Kind.GAUGE, Kind.COUNTER}, "named as the page states"
    for state in State:
        assert f"`{state.value}`" in section + SIDECAR


def test_metric_names_follow_the_conventions():
    every = [family.name for family in metrics.FAMILIES]
    assert len(set(every)) == len(every)
    for family in OWN_FAMILIES:
        assert re.fullmatch(r"marshal_sidecar(_[a-z]+)+", family.name)
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
        assert not re.search(r"_(ms|millis\w*|count|sum|bucket)(_|$)", family.name)
        labels = {"group", "state", "route", "status", "request", "reason"}
        assert set(family.labels) <= labels
        assert family.help.endswith(".")


# --- Values


def test_without_an_engine_there_are_only_metrics_of_the_daemon():
    found = Daemon().scrape()
    assert found("marshal_sidecar_state", state="NOT_RUNNING") == 1
    assert len(found.named("marshal_sidecar_state")) == len(State)
    assert found("marshal_sidecar_ready") == 0
    assert found.named("marshal_up") == {}
    # An alert on a rate needs a zero to rise from.
    for name in ("client_deaths", "events_sent", "feed_overruns"):
        assert found(f"marshal_sidecar_{name}_total") == 0
    assert found.named("marshal_build_info") != {}
    assert found("process_cpu_seconds_total") > 0


def test_an_engine_without_groups_has_metrics_of_the_log(cluster):
    node = cluster.node("a")
    node.engine.remove_session(node.session)
    daemon = Daemon(node)
    assert daemon.scrape().named("marshal_up") == {}
    cluster.run(40)
    daemon.scrape()  # queries the end of the log
    cluster.run(40)
    log = {"topic": "__marshal", "partition": "0"}
    assert daemon.scrape()("marshal_replay_lag_records", log) == 0


def test_claims_have_the_metrics_of_a_consumer(cluster):
    node = owning(cluster)
    daemon = Daemon(node)
    daemon.run()
    cluster.run(2 * H)
    found = daemon.scrape()
    assert found("marshal_sidecar_state", state="RUNNING") == 1
    assert found("marshal_sidecar_ready") == 1
    assert found("marshal_up", GROUP) == 1
    assert found("marshal_claim_state", T0, state="held") == 1
    lag = {"consumergroup": "g", "topic": "t", "partition": "0"}
    assert found("kafka_consumergroup_lag", lag) == 10


def test_marshal_up_follows_sessions_that_are_added_and_removed(cluster):
    node = owning(cluster)
    daemon = Daemon(node)
    assert daemon.scrape()("marshal_up", GROUP) == 1
    node.engine.remove_session(node.session)
    assert daemon.scrape()("marshal_up", GROUP) is None
    node.engine.add_session(node.session)
    assert daemon.scrape()("marshal_up", GROUP) == 1


def test_a_failed_engine_is_reported_as_down(cluster):
    node = owning(cluster)
    daemon = Daemon(node)
    daemon.run()
    node.engine._fail(LogUnreadable("gone"))
    found = daemon.scrape()
    assert found("marshal_up", GROUP) == 0
    assert found("marshal_sidecar_ready") == 0


def test_an_engine_that_cannot_be_read_is_reported_as_down(cluster, monkeypatch):
    node = owning(cluster)
    daemon = Daemon(node)
    daemon.run()

    def fail(*args, **more):
        raise TimeoutError

    monkeypatch.setattr(metrics.library, "read_client", fail)
    monkeypatch.setattr(metrics.library, "read_engine", fail)
    found = daemon.scrape()
    assert found("marshal_up", GROUP) == 0
    assert found.named("marshal_replay_lag_records") == {}


def test_a_scrape_does_not_wait_for_a_busy_engine_to_list_clients(monkeypatch):
    daemon = Daemon()
    view = attrs.evolve(daemon.states.view(), is_busy=True)
    monkeypatch.setattr(daemon.states, "view", lambda: view)
    monkeypatch.delattr(Daemon, "clients")
    monkeypatch.delattr(Daemon, "refusals")
    assert daemon.scrape()("marshal_sidecar_event_streams") == 0


def test_read_back_and_takeover_times_agree_with_the_log(cluster):
    node = owning(cluster)
    cluster.run(6 * H)
    successor = cluster.node("b", spec=spec())
    cluster.crash(node)
    cluster.run_until(held_by(successor, 1), 5 * H)
    found = Daemon(successor).scrape()
    own = [
        line for line in lines(cluster) if getattr(line.record, "client_id", "") == "b"
    ]
    pending = len(successor.session._outbox._pending)
    name = "marshal_read_back_duration_seconds"
    assert found(f"{name}_count") == len(own) - pending > 0
    assert 0 < found(f"{name}_sum") < H / 1000
    takeover = {"group": "g", "topic": "t", "after": "stale"}
    (claimed,) = [ln for ln in own if ln.transition.effect == "claimed"]
    renewed = [
        line
        for line in lines(cluster)
        if line.transition.effect in {"renewed", "claimed"}
        and line.record.client_id == "a"
    ]
    took_s = (claimed.time_ms - renewed[-1].time_ms) / 1000
    assert found("marshal_takeover_duration_seconds_sum", takeover) == took_s


def test_clients_are_counted_by_group_and_state():
    daemon = Daemon()
    now_ms = daemon.states.view().now_ms
    daemon.registered = [
        client(name="a", lease_until_ms=now_ms + 4_000),
        client(name="b", lease_until_ms=now_ms + 9_000, beat_age_ms=700),
        client(name="c", lease_until_ms=now_ms, beat_age_ms=None),
        client(name="d", state="silent", assigned=()),
        client("other-group", "a", beat_age_ms=None, assigned=("x-1",)),
    ]
    found = daemon.scrape()
    assert found("marshal_sidecar_clients", GROUP, state="ready") == 3
    assert found("marshal_sidecar_clients", GROUP, state="silent") == 1
    assert found("marshal_sidecar_assigned_partitions", GROUP) == 6
    assert found("marshal_sidecar_leased_clients", GROUP) == 2
    assert found("marshal_sidecar_client_lease_remaining_seconds", GROUP) == 9
    assert found("marshal_sidecar_client_beat_age_seconds", GROUP) == 0.7
    other = {"group": "other-group"}
    assert found("marshal_sidecar_leased_clients", other) == 0
    assert found("marshal_sidecar_client_lease_remaining_seconds", other) == 0
    assert found("marshal_sidecar_client_beat_age_seconds", other) is None


def test_groups_are_bounded_and_every_client_is_counted():
    daemon = Daemon()
    daemon.registered = [client(f"g{number}") for number in range(GROUPS_MAX + 50)]
    found = daemon.scrape().named("marshal_sidecar_clients")
    assert len(found) == GROUPS_MAX + 1
    assert found["other", "ready"] == 50
    assert sum(found.values()) == GROUPS_MAX + 50


def test_hostile_names_cannot_forge_a_metric():
    daemon = Daemon()
    bad = 'x"} 1\nmarshal_up{group="y' + "\x1b[2J\u202e" + "z" * 10_000
    daemon.registered = [client(bad, state=bad)]
    text = daemon.write()[0].decode()
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert 'group="y' not in text.replace('\\"', "")
    found = daemon.scrape()
    assert found.named("marshal_up") == {}
    assert len(found.named("marshal_sidecar_clients")) == 1


def test_totals_count_deaths_events_requests_and_refusals():
    daemon = Daemon()
    counts = daemon.counts
    daemon.watch.process_count = 4
    counts.death()
    counts.events(3)
    counts.events(2, overruns=1)
    counts.stream(+1)
    counts.stream(+1)
    counts.stream(-1)
    for status in (200, 200, 409):
        counts.request("beat", status)
    found = daemon.scrape()
    assert found("marshal_sidecar_watched_processes") == 4
    assert found("marshal_sidecar_client_deaths_total") == 1
    assert found("marshal_sidecar_events_sent_total") == 5
    assert found("marshal_sidecar_feed_overruns_total") == 1
    assert found("marshal_sidecar_event_streams") == 1
    daemon.refused = {("ready", "late"): 2}
    found = daemon.scrape()
    refused = "marshal_sidecar_refused_reports_total"
    assert found(refused, request="ready", reason="late") == 2
    requests = "marshal_sidecar_requests_total"
    assert found(requests, route="beat", status="200") == 2
    assert found(requests, route="beat", status="409") == 1


def test_handoffs_between_clients_are_counted_by_phase():
    machine = Machine(world(partitions=2, records=[5] * 8))
    a = having(machine, warms=True)
    b = Local(machine, "b", pid=2)
    b.subscribe(warms=True)
    run_until(machine.cluster, [a, b], lambda: len(b.warm) == 4, H)
    b.ready(min(b.warm))
    found = Daemon(machine.node).scrape()
    phases = {
        phase: found("marshal_handoffs", group="g", phase=phase)
        for phase in ("offered", "ready", "warming")
    }
    assert phases == {"offered": 3, "ready": 1, "warming": 3}


def test_requests_of_excess_routes_are_counted_together():
    counts = Counts()
    for number in range(ROUTES_MAX + 7):
        counts.request(f"r{number}", 200)
    counts.request("r0", 200)
    found = counts.requests()
    assert len(found) == ROUTES_MAX + 1
    assert found["other", 200] == 7
    assert found["r0", 200] == 2


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match="kafka-marshal\\[metrics\\]"):
        Daemon()


def test_describe_returns_every_metric_name():
    daemon = Daemon()
    collector = SidecarCollector(daemon, daemon.counts, coordination_topic="__marshal")
    names = {metric.name for metric in collector.describe()}
    assert "marshal_sidecar_clients" in names
    assert len(names) == len(library.FAMILIES) + len(OWN_FAMILIES)
