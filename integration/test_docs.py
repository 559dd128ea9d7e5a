"""The programs and commands in the documents do what they say, on a real broker.

Each block of Python that is marked ``<!-- run: name -->``, and each of commands that
is marked ``<!-- shell: name -->``, is executed unchanged, except for the broker's
address; names that it leaves to the reader are defined here.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path

import prometheus_client
import pytest
import structlog
from kafka import KafkaProducer
from slices import HANG_S
from waiting import eventually

from kafka_marshal import Admin, Token, TopicPartition, World
from kafka_marshal.admin.formatting import Format
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.testing.jars import cache_dir

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
    "security",
    "replay_seed",
    "policy",
    "mock",
}
# Those for Spark are run by the tests in integration/spark.
ON_SPARK = {"audit_python", "spark_batch", "spark_stream"}
# Those that need a sidecar are run by integration/test_sidecar.py.
BY_SIDECAR = {"sidecar_python"}
# Commands of these documents; SIDECAR.md's are run by its own test.
COMMANDS = {
    name: code
    for path in (*ROOT.glob("*.md"), ROOT / "docs" / "reference.md")
    for name, code in re.findall(
        r"^<!-- shell: (\w+) -->\n```sh\n(.*?)^```$",
        path.read_text(),
        re.MULTILINE | re.DOTALL,
    )
}
# Attempts of a second or two: as long as a member may need to get its share.
PRODUCED_MAX = 60
# Nothing is replicated on one broker, and no member has the name.
FAILS_HERE = {"marshal doctor", "marshal plan simulate billing --kill worker-2"}
HEARTBEAT_MS = 2_000
RECORDS_EACH = 20
WANTED = 30
TOPICS = {"payments": 6, "refunds": 2}
OUTPUT = "receipts"

Run = Callable[..., dict[str, object]]


@pytest.fixture(scope="module")
def servers(bootstrap_servers):
    """A cluster with the topics that the documents name."""
    form = Format(partition_count=4, heartbeat_interval_ms=HEARTBEAT_MS)
    with Admin(bootstrap_servers) as admin:
        admin.format_topic(form, ignore_formatted=True)
    with KafkaTopicAdmin(ConnectionConfig(bootstrap_servers)) as topics:
        for name, count in {**TOPICS, OUTPUT: 1}.items():
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
    """A function that the reader defines: it records its calls, and finally stops."""

    def __init__(self, wanted=WANTED):
        self.scope = {}
        self.calls = []
        self.wanted = wanted

    def __call__(self, *what, token=None):
        assert isinstance(token, Token)
        self.calls.append(what)
        if len(self.calls) >= self.wanted and "consumer" in self.scope:
            self.scope["consumer"].stop()


class Shell:
    """Runs the lines of a block, each as a process group in one folder."""

    def __init__(self, servers, names, folder):
        self.folder = folder
        self._named = {"localhost:9092": servers} | names
        self._env = os.environ | {
            "MARSHAL_BOOTSTRAP_SERVER": servers,
            "MARSHAL_STATE_DIR": str(folder / "state"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            # The jars of Kafka are 120 MB: every test uses those of the machine.
            "KAFKA_MARSHAL_CACHE": str(cache_dir()),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def start(self, line, **options):
        for shown, real in self._named.items():
            line = line.replace(shown, real)
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder,
            env=self._env,
            start_new_session=True,
            text=True,
            **options,
        )

    def run(self, line):
        """Run to the end; return the output."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.start(line, **pipes)
        out, err = process.communicate(timeout=HANG_S)
        is_clean = (
            process.returncode == 0 or line.partition("#")[0].strip() in FAILS_HERE
        )
        assert is_clean, (line, process.returncode, out, err)
        assert "Traceback" not in err, (line, err)
        return out

    @contextmanager
    def started(self, line):
        """Run until the end of the block; yields the file of the output."""
        path = self.folder / f"out-{uuid.uuid4().hex}"
        with path.open("w") as file:
            process = self.start(line, stdout=file)
        try:
            yield path
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=HANG_S)


@pytest.fixture
def shell(servers, unique, tmp_path):
    names = {name: unique(name) for name in ("payments", "billing", "alerts")}
    return Shell(servers, names, tmp_path)


@pytest.fixture
def filled(shell):
    """The same, with a topic that has records in each partition."""
    create, produce, _ = COMMANDS["quickstart"].splitlines()
    shell.run(create)
    shell.run(produce)
    return shell


def count_lines(path, wanted):
    def has_all():
        return path.exists() and len(path.read_text().splitlines()) >= wanted

    eventually(has_all, f"{wanted} lines of output", 120_000)


def test_every_command_block_is_run():
    tested = set(re.findall(r"COMMANDS\[\"(\w+)\"\]", Path(__file__).read_text()))
    assert set(COMMANDS) == tested


def test_the_quickstart_consumes_all_records(filled):
    *_, consume = COMMANDS["quickstart"].splitlines()
    with filled.started(consume) as out:
        count_lines(out, 1_000)


def test_documented_commands_end_without_an_error(filled):
    *_, consume = COMMANDS["quickstart"].splitlines()
    with filled.started(consume) as out:
        count_lines(out, 1)
        for line in COMMANDS["commands"].splitlines():
            filled.run(line)
        for line in COMMANDS["more_commands"].splitlines():
            filled.run(line)
    world = json.loads((filled.folder / "world.json").read_text())
    assert world
    assert (filled.folder / "transitions.jsonl").read_text()


def test_documented_commands_that_run_on_print_something(filled):
    _, produce, _ = COMMANDS["quickstart"].splitlines()
    bill = filled.folder / "bill"
    bill.write_text("#!/bin/sh\ncat >> billed\n")
    bill.chmod(0o755)
    with ExitStack() as stack:
        for line in COMMANDS["endless_commands"].splitlines():
            path = stack.enter_context(filled.started(line))
            if "--exec" in line:
                path = filled.folder / "billed"
            for _ in range(PRODUCED_MAX):
                if path.exists() and path.read_text():
                    break
                # Records for a consumer that joined late, and beats for a watch.
                filled.run(produce)
            assert path.read_text(), line


def test_documented_slices_of_the_tests_run(shell):
    for line in COMMANDS["slices"].splitlines():
        shell.run(f"cd {ROOT} && {line}")


def test_every_marked_block_is_run():
    tested = set(re.findall(r"run\(\s*\"(\w+)\"", Path(__file__).read_text()))
    assert set(BLOCKS) - WITHOUT_BROKER - ON_SPARK - BY_SIDECAR == tested


def test_the_example_at_least_once_handles_records(run):
    handle = Helper()
    run("alo", handle=handle)
    assert len(handle.calls) == WANTED


def test_the_example_at_most_once_handles_batches_of_one_partition(run):
    send_alerts = Helper(wanted=2)
    run("amo", send_alerts=send_alerts)
    assert len(send_alerts.calls) >= 2
    for partition, records in send_alerts.calls:
        assert {record.partition for record in records} == {partition.partition}


def test_the_example_with_transactions_handles_each_record_once(run):
    total = RECORDS_EACH * TOPICS["payments"]
    found = []

    def receipt_of(record):
        found.append((record.partition, record.offset))
        if len(found) == total:
            signal.raise_signal(signal.SIGINT)
        return record.value

    with pytest.raises(KeyboardInterrupt):
        run("transactions", receipt_of=receipt_of)
    assert len(set(found)) == len(found) == total


def test_the_example_with_callbacks_ends_on_sigterm(run, capsys):
    total = RECORDS_EACH * (TOPICS["payments"] + TOPICS["refunds"])
    before = signal.getsignal(signal.SIGTERM)
    handled = []

    def handle(record, *, token):
        handled.append((record.topic, record.partition, record.offset))
        if len(handled) == total:
            signal.raise_signal(signal.SIGTERM)

    run("signals", handle=handle)
    assert len(set(handled)) == len(handled) == total
    assert "claimed: payments-0 token " in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_example_with_asyncio_handles_each_record_once(run):
    total = RECORDS_EACH * TOPICS["payments"]
    handled = []

    async def handle(record, *, token):
        assert isinstance(token, Token)
        handled.append((record.partition, record.offset))
        if len(handled) == total:
            signal.raise_signal(signal.SIGTERM)

    run("async", handle=handle)
    assert len(set(handled)) == len(handled) == total


def test_the_example_of_a_claim_stores_its_position(run, servers):
    export = Helper()
    run("claim", export=export)
    place = TopicPartition("payments", 3)
    assert export.calls == [(place, offset) for offset in range(10)]
    ((key, state),) = World.open(servers).claims("export")
    assert (key.topic_partition, state.position, state.owner) == (place, 10, None)


def test_the_example_of_the_world_prints_each_partition(run, capsys):
    run("alo", handle=Helper())
    run("world")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == TOPICS["payments"]
    assert lines[0].startswith("payments-0 nobody ")


def test_the_example_of_a_key_history_prints_its_claims(run, capsys):
    run("alo", handle=Helper())
    run("key_history")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("free since ")
    assert " released " in lines[1]
    assert [line.split()[1] for line in lines[2:]][-1] == "released"


def test_the_example_of_a_pause_pauses_and_resumes_the_group(run, servers):
    during = []

    def migrate():
        during.extend(
            state.active_pause("billing") for state in World.open(servers).partitions
        )

    run("pause", migrate=migrate)
    assert len(during) >= 4
    assert None not in during[:4]
    after = World.open(servers).partitions
    assert all(state.active_pause("billing") is None for state in after)


def test_the_example_of_metrics_serves_them_over_http(run, monkeypatch):
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
        run("metrics", handle=handle, stopper=stopper)
    finally:
        ((server, thread),) = started
        server.shutdown()
        server.server_close()
        thread.join(timeout=60)
    assert 'marshal_up{group="billing"} 1.0' in scraped[0]


def test_the_example_of_structured_logs_prints_json(run, capsys):
    try:
        marshal = run("structured_logs")["marshal"]
        with marshal, marshal.consumer("payments") as consumer:
            next(iter(consumer))
    finally:
        structlog.reset_defaults()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    claimed = [line for line in lines if line["event"] == "claimed"]
    assert {line["topic"] for line in claimed} == {"payments"}
    assert {line["level"] for line in claimed} == {"info"}
