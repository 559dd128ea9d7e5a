"""A consumer on a real broker, scraped over HTTP as Prometheus would."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from domain import opened
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from waiting import eventually

from kafka_marshal import Delivery, TopicPartition
from kafka_marshal.kafka_io.data import KafkaDataLog
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.metrics import MarshalCollector
from kafka_marshal.observability.metrics import FAMILIES, Server

MARSHAL = Path(sys.executable).with_name("marshal")
PARTITIONS = 2
RECORDS_EACH = 40
TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=5_000) as domain:
        yield domain


@pytest.fixture
def scrape():
    """Serve one registry; ``scrape.registry`` is where collectors go."""

    class Scrape:
        registry = CollectorRegistry()

        def text(self):
            url = f"http://127.0.0.1:{server.port}/metrics"
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert answer.status == 200
                return answer.read().decode()

        def __call__(self):
            found = {}
            for family in text_string_to_metric_families(self.text()):
                for sample in family.samples:
                    place = (sample.name, tuple(sorted(sample.labels.items())))
                    assert place not in found, place
                    found[place] = sample.value
            return lambda name, **labels: found.get(
                (name, tuple(sorted(labels.items())))
            )

    server = Server(Scrape.registry, 0)
    yield Scrape()
    server.close()


def complaints(text):
    """Return the problems that ``promtool check metrics`` would report."""
    found = []
    for family in text_string_to_metric_families(text):
        name = family.name
        if not family.documentation:
            found.append(f"{name}: no help text")
        if family.type == "untyped":
            found.append(f"{name}: no type")
        if family.type != "counter" and name.endswith("_total"):
            found.append(f"{name}: only counters end in _total")
        if family.type == "counter":
            samples = {sample.name for sample in family.samples}
            if samples - {f"{name}_total"}:
                found.append(f"{name}: counters end in _total")
        if re.search(r"_(ms|milliseconds|minutes|kilobytes|percent)(_|$)", name):
            found.append(f"{name}: no base unit")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            found.append(f"{name}: lower case and underscores")
        for sample in family.samples:
            found.extend(
                f"{name}: label {label}"
                for label in sample.labels
                if not re.fullmatch(r"[a-z]+", label)
            )
    lines = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    if len(set(lines)) != len(lines):
        found.append("a family comes twice")
    return found


def hand_out(consumer, count):
    found = []

    def look():
        handed = consumer.poll(200, count - len(found)).values()
        found.extend(record for records in handed for record in records)
        return len(found) == count

    eventually(look, f"{count} records")
    return found


def test_metrics_of_a_consumer_equal_figures_of_the_broker(domain, unique, scrape):
    topic, group = domain.data_topic(PARTITIONS, records_each=RECORDS_EACH), unique("g")
    places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    labels = {p: {"topic": topic, "partition": str(p.partition)} for p in places}
    settings = ConnectionConfig(domain.servers)
    data = KafkaDataLog(settings)
    with domain.marshal(group, "w1") as marshal:
        MarshalCollector(marshal, registry=scrape.registry)
        with marshal.consumer(topic) as consumer:
            eventually(lambda: consumer.assignment() == set(places), "all are held")
            consumer.commit(hand_out(consumer, 30))
            consumer.flush()
            ends = data.ranges(places, TIMEOUT_MS)

            def behind(name, position_of, *, of):
                """Return whether the metric equals the broker's figures."""
                found = scrape()
                return all(
                    found(name, **{of: group}, **labels[place])
                    == ends[place].end - position_of[place]
                    for place in places
                )

            committed = {place: consumer.committed(place) for place in places}
            assert sum(committed.values()) == 30
            eventually(
                lambda: behind("marshal_consumer_lag_records", committed, of="group"),
                "the lag is the broker's end less the position",
            )

            # Positions from before the commit may have been mirrored first.
            eventually(
                lambda: (
                    data.committed(group, places, timeout_ms=TIMEOUT_MS) == committed
                ),
                "positions are mirrored",
            )
            eventually(
                lambda: behind(
                    "kafka_consumergroup_lag", committed, of="consumergroup"
                ),
                "the lag is that of the group's committed offsets",
            )
            found, tokens = scrape(), consumer.tokens()
            for place in places:
                own = {"group": group, **labels[place]}
                assert found("marshal_claim_state", **own, state="held") == 1
                assert found("marshal_claim_epoch", **own) == tokens[place].offset
                age = found("marshal_heartbeat_age_seconds", **own)
                lease = found("marshal_lease_remaining_seconds", **own)
                h = found("marshal_heartbeat_interval_seconds", group=group)
                assert 0 <= age < 2 * h
                assert 0 < lease < 2 * h
            handed = [
                found("marshal_records_handed_out_total", group=group, **labels[place])
                for place in places
            ]
            assert sum(handed) == 30
            assert found("marshal_members", group=group) == 1
            assert found("marshal_desired_clients", group=group) == PARTITIONS
            assert found("marshal_up", group=group) == 1
        after = scrape()
        mine = {"group": group, "topic": topic}
        won = after("marshal_claims_won_total", **mine, reason="claimed")
        released = after("marshal_claims_released_total", **mine, reason="closed")
        assert won == released == PARTITIONS
        text = scrape.text()
    assert complaints(text) == []
    assert scrape.text() == "", "the last client took the collector along"
    data.close(TIMEOUT_MS)


def test_at_most_once_every_family_of_metrics_is_served(domain, unique, scrape):
    topic, group = domain.data_topic(1, records_each=RECORDS_EACH), unique("g")
    own = {"group": group, "topic": topic, "partition": "0"}
    with domain.marshal(group, "w1") as marshal:
        MarshalCollector(marshal, registry=scrape.registry)
        with marshal.consumer(
            topic, delivery=Delivery.AT_MOST_ONCE, max_poll_records=8
        ) as consumer:
            hand_out(consumer, 8)
            found = scrape()
            assert found("marshal_amo_unconfirmed_records", **own) >= 8
            assert found("marshal_records_committed_total", **own) == 8

            def replayed():
                found = scrape()
                lags = [
                    found(
                        "marshal_replay_lag_records",
                        topic=domain.topic,
                        partition=str(number),
                    )
                    for number in marshal.engine.context.replicas
                ]
                return None not in lags and sum(lags) == 0

            eventually(replayed, "all of the log is folded")
            needs_a_reason = {
                "marshal_takeover_duration_seconds",
                "marshal_claims_lost_total",
                "marshal_claims_released_total",
                "marshal_records_ignored_total",
                # A pause, or a partition that a successor had warmed up for.
                "marshal_pause_info",
                "marshal_pause_begin_timestamp_seconds",
                "marshal_pause_end_timestamp_seconds",
                "marshal_handoff_gap_seconds",
                # A checkpoint that was written, and compared with one's own state.
                "marshal_checkpoint_age_seconds",
                "marshal_replica_diverged",
            }
            others = {family.name for family in FAMILIES} - needs_a_reason

            def written():
                lines = scrape.text().splitlines()
                return {line.split()[2] for line in lines if line[:6] == "# TYPE"}

            eventually(lambda: written() >= others, "every other metric is there")


def test_the_command_serves_metrics_and_logs_events_as_json(domain, unique, tmp_path):
    topic, group = domain.data_topic(1, records_each=5), unique("g")
    out, err = tmp_path / "out", tmp_path / "err"
    arguments = ("consume", topic, "--group", group, "--client-id", "c1")
    options = ("--metrics-port", "0", "--log-format", "json", "-b", domain.servers)
    where = ("--coordination-topic", domain.topic, "--state-dir", str(tmp_path))
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [MARSHAL, *arguments, *options, *where], stdout=stdout, stderr=stderr
        )
    try:
        eventually(lambda: out.read_text().count("\n") == 5, "five records")
        (port,) = re.findall(r"^metrics: port (\d+) ", err.read_text(), re.MULTILINE)
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            text = answer.read().decode()
        assert complaints(text) == []
        handed = f'{{group="{group}",partition="0",topic="{topic}"}} 5.0'
        assert f"marshal_records_handed_out_total{handed}" in text
        process.terminate()
        assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=60)
    output = [
        json.loads(line) for line in err.read_text().splitlines() if line[0] == "{"
    ]
    claimed = [line for line in output if line["event"] == "claimed"]
    assert [(line["group"], line["topic"]) for line in claimed] == [(group, topic)]
    assert claimed[0]["client"] == "c1"
