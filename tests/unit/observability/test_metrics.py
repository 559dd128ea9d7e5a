"""The catalogue of metrics, its document, the text format and the server."""

import re
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kafka_marshal.engine.meters import TAKEOVER_MS, Histogram
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.observability import metrics as known
from kafka_marshal.observability.metrics import FAMILIES, Kind, Scrape, Server

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = (ROOT / "docs" / "METRICS.md").read_text()
CORE = {
    *("marshal_claim_state", "marshal_claim_epoch", "marshal_heartbeat_age_seconds"),
    *("marshal_lease_remaining_seconds", "marshal_takeover_duration_seconds"),
    *("marshal_records_ignored_total", "marshal_replay_lag_records"),
    *("marshal_consumer_lag_records", "marshal_amo_unconfirmed_records"),
    *("marshal_group_paused", "marshal_desired_clients", "kafka_consumergroup_lag"),
}
# The name of each counter contains one of these nouns.
COUNTED = (
    *("records", "clients", "members", "claims", "events", "failures", "partitions"),
)


class Whole:
    """A collector that returns one scrape."""

    def __init__(self, scrape):
        self.scrape = scrape

    def describe(self):
        return known.described()

    def collect(self):
        return self.scrape.families()


def text_of(scrape):
    registry = CollectorRegistry()
    registry.register(Whole(scrape))
    return generate_latest(registry).decode()


def samples(scrape):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text_of(scrape))
        for sample in family.samples
    }


# --- The catalogue ---


def test_the_catalogue_has_the_core_metrics():
    assert {family.name for family in FAMILIES} >= CORE


def test_metric_names_are_unique_and_prefixed():
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"marshal(_[a-z]+)+|kafka_consumergroup_lag", name), name


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_follow_the_conventions_of_prometheus(family):
    """The rules are those of ``promtool check metrics``."""
    name = family.name
    assert name.endswith("_total") == (family.kind is Kind.COUNTER)
    assert not re.search(r"_(ms|millis\w*|minutes|hours|percent|kb|mb)(_|$)", name)
    assert not re.search(r"_(gauge|counter|histogram|bucket|count|sum)(_|$)", name)
    if family.kind is Kind.HISTOGRAM:
        assert name.endswith("_seconds")
    if "duration" in name or "_age_" in name or "remaining" in name:
        assert name.endswith("_seconds")
    if family.kind is Kind.COUNTER:
        assert any(what in name for what in COUNTED)
    assert family.help.endswith(".")
    assert "\n" not in family.help


def test_each_label_is_used_only_by_its_metrics():
    own = {"group", "topic", "partition"}
    extra = {
        "version": {"marshal_build_info"},
        "state": {"marshal_claim_state"},
        "after": {"marshal_takeover_duration_seconds"},
        "event": {"marshal_events_total"},
        "consumergroup": {"kafka_consumergroup_lag"},
        "reason": {
            "marshal_claims_won_total",
            "marshal_claims_lost_total",
            "marshal_claims_released_total",
            "marshal_records_ignored_total",
            "marshal_pause_info",
        },
        "operation": {
            "marshal_pause_info",
            "marshal_pause_begin_timestamp_seconds",
            "marshal_pause_end_timestamp_seconds",
        },
        "phase": {"marshal_handoffs"},
        "by": {"marshal_pause_info"},
        "topics": {"marshal_pause_info"},
    }
    for family in FAMILIES:
        assert known.CLIENT not in family.labels
        for label in set(family.labels) - own:
            assert family.name in extra[label]


# --- The document ---


def listed():
    """Return kind (by its name), labels and meaning of each metric."""
    rows = {}
    # Metrics of the sidecar have another section and test.
    page = DOCUMENT.partition("\n## A sidecar\n")[0]
    item = r"^- `(\w+?)(?:\{([\w,]+)\})?`: (.+?)(?=\n- |\n\n)"
    for name, labels, meaning in re.findall(item, page, re.MULTILINE | re.DOTALL):
        kind = Kind.GAUGE
        if name.endswith("_total"):
            kind = Kind.COUNTER
        elif name.endswith(("_duration_seconds", "_gap_seconds")):
            kind = Kind.HISTOGRAM
        known_by = tuple(filter(None, labels.split(",")))
        rows[name] = (kind, known_by, " ".join(meaning.split()))
    return rows


def test_the_document_lists_exactly_the_metrics():
    assert list(listed()) == [family.name for family in FAMILIES]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_document_has_kind_labels_and_help_of_each_metric(family):
    kind, labels, meaning = listed()[family.name]
    assert (kind, labels) == (family.kind, family.labels)
    assert meaning.startswith(family.help)


def test_claim_states_are_documented():
    for state in known.STATES:
        assert f"`{state}`" in DOCUMENT


# --- Figures as text ---


def test_every_family_is_exposed_in_valid_text_format():
    scrape = Scrape()
    for family in FAMILIES:
        labels = [f"{label}-1" for label in family.labels]
        if family.kind is Kind.HISTOGRAM:
            scrape.add_durations(family, labels, durations=Histogram(TAKEOVER_MS))
        else:
            scrape.add(family, labels, value=1)
    parsed = list(text_string_to_metric_families(text_of(scrape)))
    assert len(parsed) == len(FAMILIES)
    for family, found in zip(FAMILIES, parsed, strict=True):
        assert found.type == family.kind.value
        assert found.documentation == family.help
        for sample in found.samples:
            assert set(sample.labels) - {"le"} == set(family.labels)


def test_a_family_without_samples_is_omitted():
    assert text_of(Scrape()) == ""


def test_samples_with_equal_labels_are_summed():
    scrape = Scrape()
    scrape.add(known.IGNORED, ("held",), value=2)
    scrape.add(known.IGNORED, ("held",), value=3)
    for duration_ms in (40, 400):
        figure = Histogram((50, 100))
        figure.observe(duration_ms)
        scrape.add_durations(known.STEP, (), durations=figure)
    found = samples(scrape)
    assert found["marshal_records_ignored_total", ("reason", "held")] == 5
    name = "marshal_engine_step_duration_seconds"
    assert found[f"{name}_bucket", ("le", "0.05")] == 1
    assert found[f"{name}_bucket", ("le", "0.1")] == 1
    assert found[f"{name}_bucket", ("le", "+Inf")] == 2
    assert found[f"{name}_count",] == 2
    assert found[f"{name}_sum",] == pytest.approx(0.44)


def test_the_client_label_is_added_only_on_request():
    for has_client in (False, True):
        scrape = Scrape(has_client=has_client)
        scrape.add(known.UP, ("g",), value=1, client="a")
        scrape.add(known.GROUP_LAG, ("g", "t", 0), value=1, client="a")
        own = (("client", "a"), ("group", "g")) if has_client else (("group", "g"),)
        assert ("marshal_up", *own) in samples(scrape)
        lag = (("consumergroup", "g"), ("partition", "0"), ("topic", "t"))
        assert ("kafka_consumergroup_lag", *lag) in samples(scrape)


def test_label_values_are_escaped_and_of_limited_length():
    scrape = Scrape()
    bad = 'x"} 1\nmarshal_up{group="y' + "\x1b[2J\u202e" + "z" * 10_000
    scrape.add(known.IGNORED, (bad,), value=1)
    text = text_of(scrape)
    assert len(text.splitlines()) == 3
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert len(text) < 1_000
    assert len(samples(scrape)) == 1


# --- Serving ---


def test_the_server_serves_metrics_until_it_is_closed():
    scrape = Scrape()
    scrape.add(known.UP, ("g",), value=1)
    registry = CollectorRegistry()
    registry.register(Whole(scrape))
    server = Server(registry, 0)
    url = f"http://127.0.0.1:{server.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert 'marshal_up{group="g"} 1.0' in answer.read().decode()
    server.close()
    server.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


def test_a_port_in_use_is_refused_by_setting():
    server = Server(CollectorRegistry(), 0)
    try:
        with pytest.raises(ConfigurationError, match="choose another port") as caught:
            Server(CollectorRegistry(), server.port)
        assert caught.value.setting == "metrics_port"
    finally:
        server.close()


def test_an_invalid_port_or_host_is_refused():
    for host, port in (("127.0.0.1", 70_000), ("no.such.host.invalid", 0)):
        with pytest.raises(ConfigurationError, match="metrics cannot be served at"):
            Server(CollectorRegistry(), port, host=host)


def test_metrics_without_prometheus_client_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError) as caught:
        known.prometheus()
    assert "pip install 'kafka-marshal[metrics]'" in str(caught.value)
    assert "\n" not in str(caught.value)
