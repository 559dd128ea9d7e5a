"""A process that is stopped beyond its claim, and resumes, writes to no sink.

A process is stopped (SIGSTOP) with an uncommitted batch, before or within its write.
Its claim expires, another process takes the partition over and writes everything.
Then the first resumes (SIGCONT), as if nothing had happened.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import postgres
import psycopg
import pytest
from domain import opened
from sparkkit import committed

from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark.fencing import Fence
from kafka_marshal.spark.sinks_files import FileSink
from kafka_marshal.spark.sinks_table import TableSink

PROGRAM = Path(__file__).parents[1] / "support" / "zombie_program.py"
H_MS = 2_000
RECORDS, BATCH = 60, 20
LINES_MAX = 1_000


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS) as domain:
        yield domain


@pytest.fixture(scope="module")
def database():
    with postgres.running() as server:
        yield server


class Process:
    def __init__(self, settings):
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, event):
        """Read its events up to one with this name; None at its end."""
        for _ in range(LINES_MAX):
            line = self._process.stdout.readline()
            if not line:
                return None
            output = json.loads(line)
            if output["event"] == event:
                return output
        raise AssertionError("it reports no end")

    def remaining_events(self):
        found = []
        for _ in range(LINES_MAX):
            line = self._process.stdout.readline()
            if not line:
                break
            found.append(json.loads(line))
        return found

    def stop(self):
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self):
        os.kill(self._process.pid, signal.SIGCONT)
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self):
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(timeout=60)
        self._process.stdin.close()
        self._process.stdout.close()


def run_both(settings):
    """Return the events of the stopped process and of the one that took over."""
    first = Process(settings | {"client_id": "zombie", "stops": True})
    second = None
    try:
        assert first.wait_for("in_hand") is not None
        first.stop()
        second = Process(settings | {"client_id": "healthy", "stops": False})
        healthy = second.remaining_events()
        first.go_on()
        return first.remaining_events(), healthy
    finally:
        first.end()
        if second is not None:
            second.end()


def common(domain, sink, where):
    topic = domain.data_topic(1, records_each=RECORDS)
    return {
        "servers": domain.servers,
        "coordination_topic": domain.topic,
        "group": domain.unique("zombies"),
        "topic": topic,
        "batch": BATCH,
        "end": RECORDS,
        "sink": sink,
        "where": where,
    }


def judge(zombie, healthy):
    """Check that the stopped process wrote nothing, and the other everything."""
    assert sum(line["count"] for line in healthy if "count" in line) == RECORDS
    assert sum(line["count"] for line in zombie if "count" in line) == 0
    assert zombie


@pytest.mark.parametrize("where", ["before", "midst"])
def test_a_table_accepts_no_row_of_a_process_that_lost_its_claim(
    domain, database, where
):
    settings = common(domain, "table", where) | {"dsn": database.dsn}
    with database.connect() as connection:
        connection.execute("DROP TABLE IF EXISTS zombies")
        connection.execute("CREATE TABLE zombies (number bigint, value bytea)")
        sink = TableSink(lambda: psycopg.connect(database.dsn), None, settings["group"])
        sink.create()
        zombie, healthy = run_both(settings)
        judge(zombie, healthy)
        rows = connection.execute("SELECT number FROM zombies ORDER BY number")
        assert [number for (number,) in rows] == list(range(RECORDS))
    assert sink.positions() == {(settings["topic"], 0): RECORDS}
    if where == "midst":
        assert zombie[0]["event"] == "refused"


def test_files_have_no_row_of_a_process_that_lost_its_claim(domain, tmp_path):
    settings = common(domain, "files", "before") | {"path": str(tmp_path)}
    zombie, healthy = run_both(settings)
    judge(zombie, healthy)
    sink = FileSink(tmp_path, Fence(settings["group"], {}))
    links = sink.links()[TopicPartition(settings["topic"], 0)]
    assert [(link.first, link.end) for link in links] == [
        (first, first + BATCH) for first in range(0, RECORDS, BATCH)
    ]
    assert all(link.folder.startswith("data/healthy") for link in links)
    assert not list(tmp_path.glob("data/zombie*"))


@pytest.mark.parametrize("where", ["before", "midst"])
def test_a_topic_has_no_row_of_a_process_that_lost_its_claim(domain, where):
    settings = common(domain, "kafka", where) | {"out": domain.data_topic(1)}
    zombie, healthy = run_both(settings)
    judge(zombie, healthy)
    found = committed(domain, settings["out"], RECORDS)
    assert found == list(range(RECORDS))
    if where == "midst":
        # The claim is not checked within a write: the broker refused it.
        refused = (zombie[0]["event"], zombie[0]["error"])
        assert refused == ("refused", "ClaimLost"), zombie
        assert "later producer" in zombie[0]["says"]
