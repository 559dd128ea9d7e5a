"""The blocks of Python in the documents do what they say, on a real broker.

Each block that is marked ``<!-- run: name -->`` is executed as it stands, but for
the broker's address; names that it leaves to the reader are given here.
"""

import json
import re
import signal
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import prometheus_client
import pytest
import structlog
from kafka import KafkaProducer
from waiting import eventually

from kafka_marshal import Admin, Token, TopicPartition, World
from kafka_marshal.admin import Format
from kafka_marshal.kafka_io import ConnectionSettings, KafkaDataLog, KafkaTopicAdmin

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(
    r"^<!-- run: (\w+) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
BLOCKS = {
    name: code
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    for name, code in MARKED.findall(path.read_text())
}
# Those that need no broker are run by tests/test_docs.py.
WITHOUT_BROKER = {
    "sink_sqlite",
    "sink_service",
    "readme_security",
    "replay_seed",
    "policy",
}
# Those for Spark are run by the tests in integration/spark.
ON_SPARK = {"audit_python", "spark_batch", "spark_stream"}
# Those that need a sidecar are run by integration/test_sidecar.py.
BY_SIDECAR = {"sidecar_python"}
HEARTBEAT_MS = 2_000
RECORDS_EACH = 20
WANTED = 30
TIMEOUT_MS = 60_000
TOPICS = {"payments": 6, "refunds": 2, "receipts": 1}

Run = Callable[..., dict[str, object]]


@pytest.fixture(scope="module")
def servers(bootstrap_servers):
    """A cluster with the topics that the documents name."""
    form = Format(partition_count=4, heartbeat_interval_ms=HEARTBEAT_MS)
    with Admin(bootstrap_servers) as admin:
        admin.format_topic(form, ignore_formatted=True)
    with KafkaTopicAdmin(ConnectionSettings(bootstrap_servers)) as topics:
        for name, count in TOPICS.items():
            if not topics.describe_bare(name).exists:
                topics.create_data_topic(name, partitions=count, replication=1)
    producer = KafkaProducer(bootstrap_servers=bootstrap_servers)
    for name in ("payments", "refunds"):
        for number in range(TOPICS[name] * RECORDS_EACH):
            producer.send(name, b"%d" % number, partition=number % TOPICS[name])
    producer.flush(timeout=60)
    producer.close()
    return bootstrap_servers


@pytest.fixture
def run(servers, tmp_path, monkeypatch) -> Run:
    monkeypatch.setenv("MARSHAL_STATE_DIR", str(tmp_path))

    def run_block(name, **given):
        scope = dict(given)
        for function in given.values():
            if isinstance(function, Helper):
                function.scope = scope
        code = BLOCKS[name].replace("localhost:9092", servers)
        exec(compile(code, name, "exec"), scope)
        return scope

    return run_block


class Helper:
    """A function that the reader brings: notes its calls, and stops in the end."""

    def __init__(self, wanted=WANTED):
        self.scope = {}
        self.calls = []
        self.wanted = wanted

    def __call__(self, *what, token=None):
        assert isinstance(token, Token)
        self.calls.append(what)
        if len(self.calls) >= self.wanted and "consumer" in self.scope:
            self.scope["consumer"].stop()


def test_every_marked_block_is_run():
    tested = set(re.findall(r"run\(\s*\"(\w+)\"", Path(__file__).read_text()))
    assert set(BLOCKS) - WITHOUT_BROKER - ON_SPARK - BY_SIDECAR == tested


def test_at_least_once(run):
    handle = Helper()
    run("readme_alo", handle=handle)
    assert len(handle.calls) == WANTED


def test_at_most_once(run):
    send_alerts = Helper(wanted=2)
    run("readme_amo", send_alerts=send_alerts)
    assert len(send_alerts.calls) >= 2
    for partition, records in send_alerts.calls:
        assert {record.partition for record in records} == {partition.partition}


def test_callbacks_and_signals(run, capsys):
    total = RECORDS_EACH * (TOPICS["payments"] + TOPICS["refunds"])
    before = signal.getsignal(signal.SIGTERM)
    handled = []

    def handle(record, *, token):
        handled.append((record.topic, record.partition, record.offset))
        if len(handled) == total:
            signal.raise_signal(signal.SIGTERM)

    run("readme_signals", handle=handle)
    assert len(set(handled)) == len(handled) == total
    assert "ours now: payments-0 under " in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before


def test_poll(run):
    handle = Helper(wanted=10**9)
    total = RECORDS_EACH * TOPICS["payments"]
    run("readme_poll", handle=handle, stopping=lambda: len(handle.calls) >= total)
    assert len(handle.calls) == total


def test_on_an_event_loop(run):
    total = RECORDS_EACH * TOPICS["payments"]
    handled = []

    async def handle(record, *, token):
        assert isinstance(token, Token)
        handled.append((record.partition, record.offset))
        if len(handled) == total:
            signal.raise_signal(signal.SIGTERM)

    run("readme_async", handle=handle)
    assert len(set(handled)) == len(handled) == total


def test_claim_without_consumption(run, servers):
    export = Helper()
    run("readme_claim", export=export)
    place = TopicPartition("payments", 3)
    assert export.calls == [(place, offset) for offset in range(10)]
    ((key, state),) = World.open(servers).claims("export")
    assert (key.topic_partition, state.position, state.owner) == (place, 10, None)


def test_world(run, capsys):
    run("readme_alo", handle=Helper())
    run("readme_world")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == TOPICS["payments"]
    assert lines[0].startswith("payments-0 nobody ")


def test_pause(run, servers):
    during = []

    def migrate():
        during.extend(
            state.active_pause("billing") for state in World.open(servers).partitions
        )

    run("readme_pause", migrate=migrate)
    assert len(during) >= 4
    assert None not in during[:4]
    after = World.open(servers).partitions
    assert all(state.active_pause("billing") is None for state in after)


def test_metrics(run, monkeypatch):
    started = []

    def start(port, *, addr):
        assert (port, addr) == (9464, "127.0.0.1")
        started.append(start_http_server(0, addr=addr))

    def handle(record, *, token):
        ((server, _),) = started
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            scraped.append(answer.read().decode())
        stopper.scope["consumer"].stop()

    scraped = []
    stopper = Helper()
    start_http_server = prometheus_client.start_http_server
    monkeypatch.setattr(prometheus_client, "start_http_server", start)
    try:
        run("readme_metrics", handle=handle, stopper=stopper)
    finally:
        ((server, thread),) = started
        server.shutdown()
        server.server_close()
        thread.join(timeout=60)
    assert 'marshal_up{group="billing"} 1.0' in scraped[0]


def test_structured_logs(run, capsys):
    try:
        run("structured_logs", handle=Helper(wanted=1))
    finally:
        structlog.reset_defaults()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    claimed = [line for line in lines if line["event"] == "claimed"]
    assert {line["topic"] for line in claimed} == {"payments"}
    assert {line["level"] for line in claimed} == {"info"}


def test_kafka_sink(run, servers):
    place = TopicPartition("receipts", 0)
    data = KafkaDataLog(ConnectionSettings(servers))
    stopper = Helper()

    def stop_once_written():
        eventually(lambda: data.ranges([place], TIMEOUT_MS)[place].end > 0, "receipts")
        stopper.scope["consumer"].stop()

    watcher = threading.Thread(target=stop_once_written, daemon=True)
    watcher.start()
    run("sink_kafka", stopper=stopper)
    watcher.join(timeout=60)
    assert not watcher.is_alive()
    data.close(TIMEOUT_MS)
