"""Every program under examples/ does what it says, against a real broker."""

import itertools
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kafka import KafkaConsumer
from kafka import TopicPartition as Place
from waiting import eventually

from kafka_marshal import Admin
from kafka_marshal.admin.formatting import Format
from kafka_marshal.testing.producing import Producing, create_topic

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PARTITIONS = 3
RECORDS = 90
LIMIT_S = 300
# Each has a test here; a new example without one fails.
TESTED = {
    *("at_least_once", "at_most_once", "batches", "claims_only"),
    *("kafka_sink", "watch_world"),
}


class Program:
    """One example as a process of its own, and what it printed."""

    _numbers = itertools.count(1)

    def __init__(self, name: str, *arguments: str, server: str, home: Path) -> None:
        self.output_path = home / f"{name}-{next(self._numbers)}.out"
        environment = dict(
            os.environ,
            MARSHAL_BOOTSTRAP_SERVER=server,
            MARSHAL_STATE_DIR=str(home / "state"),
            PYTHONUNBUFFERED="1",
        )
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
        with self.output_path.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment
            )

    @property
    def text(self) -> str:
        return self.output_path.read_text(errors="replace")

    def lines(self, start: str) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith(start)]

    def end(self) -> None:
        """Ask it to end; it must do so in order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=LIMIT_S) == 0, self.text

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=LIMIT_S)


Run = Callable[..., Program]


@pytest.fixture(scope="module")
def server(bootstrap_servers: str) -> str:
    """A cluster that is formatted the way the examples expect it."""
    form = Format(partition_count=4, heartbeat_interval_ms=2_000)
    with Admin(bootstrap_servers) as admin:
        admin.format_topic(form, ignore_formatted=True)
    return bootstrap_servers


@pytest.fixture
def topic(server: str, unique: Callable[[str], str]) -> str:
    name = unique("example")
    create_topic(server, name, partitions=PARTITIONS)
    fill(server, name)
    return name


def fill(server: str, topic: str) -> None:
    with Producing(server, topic, partitions=PARTITIONS) as producing:
        producing.fill(RECORDS)


@pytest.fixture
def run(server: str, tmp_path: Path) -> Iterator[Run]:
    programs: list[Program] = []

    def start(name: str, *arguments: str) -> Program:
        program = Program(name, *arguments, server=server, home=tmp_path)
        programs.append(program)
        return program

    yield start
    for program in programs:
        program.close()


def everything(fills: int = 1) -> list[tuple[int, int]]:
    """Return partition and offset of every record of the topic."""
    each = fills * RECORDS // PARTITIONS
    return [(part, offset) for part in range(PARTITIONS) for offset in range(each)]


def results(path: Path) -> list[tuple[int, int]]:
    if not path.exists():
        return []
    with closing(sqlite3.connect(path, timeout=60)) as database:
        try:
            return database.execute("SELECT part, position FROM results").fetchall()
        except sqlite3.OperationalError:
            return []  # it is being made


def test_each_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED


def test_at_least_once_stores_each_record_once_despite_a_kill(
    run, topic, unique, tmp_path, server
):
    path = tmp_path / "results.db"
    group = unique("group")
    first = run("at_least_once", topic, group, "w1", str(path))
    eventually(lambda: len(results(path)) > 10, "the first stored some")
    first.process.kill()
    # It may have stored all before it was killed, and the second one has to store some.
    fill(server, topic)
    second = run("at_least_once", topic, group, "w2", str(path))
    wanted = everything(fills=2)
    eventually(lambda: len(results(path)) >= len(wanted), "the second stored the rest")
    second.end()
    assert second.lines("stored")
    assert sorted(results(path)) == wanted


def test_at_most_once_sends_each_notification_once(run, topic, unique):
    program = run("at_most_once", topic, unique("group"), "w1")
    eventually(lambda: len(program.lines("notify")) >= RECORDS, "all were notified")
    program.end()
    found = [re.match(r"notify (\d+)/(\d+) ", x) for x in program.lines("notify")]
    assert sorted((int(x[1]), int(x[2])) for x in found) == everything()


def test_batches_come_from_one_partition_each(run, topic, unique):
    program = run("batches", topic, unique("group"), "w1")

    def handled():
        return [
            (int(x[1]), offset)
            for line in program.lines(topic)
            if (x := re.search(r"-(\d+): \d+ records, .* (\d+) to (\d+), token", line))
            for offset in range(int(x[2]), int(x[3]) + 1)
        ]

    eventually(lambda: len(handled()) >= RECORDS, "all were handled")
    program.end()
    assert sorted(handled()) == everything()


def test_claims_only_continues_at_the_position_of_the_last_owner(run, topic, unique):
    group = unique("group")
    each = RECORDS // PARTITIONS
    first = run("claims_only", topic, "1", group, "w1")
    eventually(lambda: len(first.lines("handled")) == each, "all were handled")
    second = run("claims_only", topic, "1", group, "w2")
    eventually(lambda: "held by w1; waiting" in second.text, "the second waits")
    first.end()
    eventually(lambda: second.lines("claimed"), "the second claimed it")
    second.end()
    assert first.lines("claimed") == [f"claimed {topic}-1 at None"]
    assert second.lines("claimed") == [f"claimed {topic}-1 at {each}"]
    assert second.lines("handled") == []


def test_watch_world_shows_owners_positions_and_pauses(run, topic, unique, server):
    group = unique("group")
    worker = run("at_most_once", topic, group, "w1")
    eventually(lambda: len(worker.lines("notify")) >= RECORDS, "all were notified")

    def watch():
        program = run("watch_world", group)
        assert program.process.wait(timeout=LIMIT_S) == 0, program.text
        return program.text.splitlines()

    each = RECORDS // PARTITIONS
    assert watch() == [
        f"{group} {topic}-{number} w1 at {each}" for number in range(PARTITIONS)
    ]
    with Admin(server, client_id="tester") as admin:
        admin.pause_group(group, for_ms=60_000, wait_ms=LIMIT_S * 1000)
        lines = watch()
        admin.resume_group(group)
    assert f"{group} {topic}-0 nobody at {each}" in lines
    paused = [line for line in lines if "is paused by tester until" in line]
    assert paused
    worker.end()


def test_kafka_sink_copies_each_record_once(run, topic, unique, server):
    target = unique("target")
    create_topic(server, target, partitions=1)
    program = run("kafka_sink", topic, target, unique("group"), "w1")

    def copied():
        counts = [
            int(line.split()[1])
            for line in program.lines("copied")
            if len(line.split()) == 4
        ]
        return sum(counts) >= RECORDS

    eventually(copied, "all was copied")
    program.end()
    consumer = KafkaConsumer(
        bootstrap_servers=server,
        isolation_level="read_committed",
        enable_auto_commit=False,
    )
    place = Place(target, 0)
    consumer.assign([place])
    consumer.seek_to_beginning(place)
    found: list[bytes] = []

    def read():
        for records in consumer.poll(timeout_ms=200).values():
            found.extend(record.value for record in records)
        return len(found) >= RECORDS

    try:
        eventually(read, "all can be read")
    finally:
        consumer.close(autocommit=False)
    assert sorted(map(int, found)) == list(range(RECORDS))
