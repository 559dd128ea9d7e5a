"""The procedure of docs/reference.md for a coordination topic without its start.

Retention of a real broker deletes the log while no member runs, so every process that
starts is refused. Then the documented commands are run unchanged, except for
addresses and names; for commands of Kafka that the broker's jars lack, an admin client
does the work. Positions must be kept.
"""

import os
import re
import shlex
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from clikit import Cli
from cutting import kept_files
from domain import opened
from fleet import Fleet
from kafka import KafkaConsumer
from kafka import TopicPartition as Place
from kafka.structs import OffsetAndMetadata
from slices import HANG_S
from waiting import eventually, poll_all

from kafka_marshal import LogUnreadable
from kafka_marshal.protocol.snapshot import from_bytes
from kafka_marshal.protocol.types import Key
from kafka_marshal.snapshots import read_file
from kafka_marshal.testing.broker import EmbeddedBroker
from kafka_marshal.testing.jars import kafka_jars
from kafka_marshal.testing.java import find_java

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
HEADING = "### The log of `__marshal` has lost its start\n"
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
RETENTION_MS = 300
PARTITIONS = 2
# Data partitions: one, because a fetch returns all of a partition before the next.
DATA = 1
RECORDS = 15_000
DONE = 100
SERVERS, TOPIC, GROUP = "localhost:9092", "payments", "alerts"
INTERVAL_MS = 1_000
SHIFT = 10_000


def documented():
    """Return the commands of the section, block by block."""
    section = REFERENCE.read_text().partition(HEADING)[2].partition("\n## ")[0]
    blocks = BLOCK.findall(section.replace("\\\n", " "))
    return [
        [shlex.split(line) for line in each.splitlines() if line.strip()]
        for each in blocks
    ]


@pytest.fixture(scope="module")
def domain(unique):
    properties = {
        "log.retention.check.interval.ms": str(RETENTION_MS),
        "log.initial.task.delay.ms": str(RETENTION_MS),
    }
    with (
        EmbeddedBroker(properties=properties) as broker,
        opened(broker, unique, partitions=PARTITIONS) as domain,
    ):
        yield domain


class Operator:
    """Runs commands as a person at a terminal does.

    Attributes:
        names: Words of the document, and their values in this test.
    """

    def __init__(self, domain, cli, names):
        self._domain = domain
        self._cli = cli
        self.names = names

    def run(self, words):
        words = [self.names.get(word, word) for word in words]
        program, *rest = words
        run = {
            "marshal": self._marshal,
            "kafka-configs": self._configs,
            "kafka-topics": self._topics,
            "kafka-consumer-groups": self._groups,
        }[program]
        run(rest)

    def _marshal(self, words):
        self._cli.run(*words)

    def _configs(self, words):
        java = find_java()
        path = os.pathsep.join(map(str, kafka_jars(java)))
        command = [java.executable, "-cp", path, "kafka.admin.ConfigCommand", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert done.returncode == 0, done.stderr

    def _topics(self, words):
        assert words[:3] == ["--bootstrap-server", self._domain.servers, "--delete"]
        option, topic = words[3:]
        assert option == "--topic"
        self._domain.kafka.delete_topics([topic])

    def _groups(self, words):
        *named, by = words[:-1]
        assert words[-1] == "--execute"
        assert named[::2] == [
            *("--bootstrap-server", "--group", "--topic", "--reset-offsets")
        ]
        assert named[-1] == "--shift-by"
        _, servers, _, group, _, topic, _, _ = named
        assert servers == self._domain.servers
        moved = {
            Place(*place): OffsetAndMetadata(min(at + int(by), RECORDS), "", -1)
            for place, at in committed(self._domain, group, topic).items()
        }
        self._domain.kafka.alter_group_offsets(group, moved)


def committed(domain, group, topic):
    """Return a group's committed offsets in Kafka, once all partitions have one."""
    return eventually(
        lambda: (
            found
            if len(found := domain.committed(group, topic)) == DATA
            and min(found.values())
            else None
        ),
        f"offsets of {group}",
    )


def offsets_by_place(worker):
    found = {}
    for each in worker.journal.handled:
        found.setdefault(each.place, set()).add(each.offset)
    return found


def busy(worker):
    """Wait until a worker has handled records of each partition."""

    def is_busy():
        done = offsets_by_place(worker)
        return len(done) == DATA and min(map(len, done.values())) > DONE

    eventually(is_busy, f"{worker.client_id} works")


def wait_lost(domain):
    """Wait until retention has deleted all of the coordination topic."""
    places = [Place(domain.topic, t) for t in range(PARTITIONS)]

    def is_lost():
        consumer = KafkaConsumer(bootstrap_servers=domain.servers)
        try:
            starts = consumer.beginning_offsets(places)
            ends = consumer.end_offsets(places)
        finally:
            consumer.close()
        return all(0 < starts[place] == ends[place] for place in places)

    eventually(is_lost, "retention deletes the log")


def start_fleets(stack, domain, home, groups, topic):
    """Return fleets of workers, by delivery."""
    fleets = {}
    for kind, group in groups.items():
        (home / kind).mkdir()
        fleets[kind] = stack.enter_context(
            Fleet(
                domain,
                home / kind,
                group_id=group,
                topics=[topic],
                delivery=kind,
                handle_ms=2,
            )
        )
    return fleets


def is_refused(worker):
    assert worker.wait() != 0
    (why,) = worker.journal.of("failed")
    assert why["kind"] == "LogUnreadable"
    return "no checkpoint or snapshot replaces the missing records" in why["says"]


def mending(cli):
    """Return the command that the doctor shows to repair the setting."""
    output = cli.run("doctor", "-o", "json", code=1).stdout
    (found,) = set(re.findall(r"kafka-configs [^\"]*retention\.ms=-1", output))
    return shlex.split(found)


def test_documented_commands_move_groups_off_a_log_without_its_start(domain, tmp_path):
    topic = domain.data_topic(DATA, records_each=RECORDS)
    groups = {kind: domain.unique(kind) for kind in ("alo", "amo")}
    cli = Cli(domain, tmp_path)
    names = {SERVERS: domain.servers, TOPIC: topic, GROUP: groups["amo"]}
    operator = Operator(domain, cli, names | {"__marshal": domain.topic})
    make_new, move = documented()
    with ExitStack() as stack:
        fleets = start_fleets(stack, domain, tmp_path, groups, topic)
        first = {kind: fleet.start("w1") for kind, fleet in fleets.items()}
        for kind, worker in first.items():
            busy(worker)
            assert committed(domain, groups[kind], topic)
        for worker in first.values():
            worker.kill()
        domain.alter_coordination_topic("retention.ms", "1000")
        wait_lost(domain)
        kept = {kind: committed(domain, groups[kind], topic) for kind in groups}
        assert is_refused(fleets["alo"].start("late"))

        for words in [mending(cli), *make_new, *move]:
            operator.run(words)
        second = {kind: fleet.start("w2") for kind, fleet in fleets.items()}
        for worker in second.values():
            busy(worker)
        for place, at in kept["alo"].items():
            before = offsets_by_place(first["alo"])[place]
            assert set(range(at)) <= before, "nothing is lost"
            after = offsets_by_place(second["alo"])[place]
            assert min(after) == at > 0, "it goes on where Kafka says"
        assert fleets["amo"].journal.duplicated() == {}
        for place, at in kept["amo"].items():
            assert min(offsets_by_place(second["amo"])[place]) == at + SHIFT


def test_a_snapshot_of_one_host_lets_all_members_start_again(broker, unique, tmp_path):
    with opened(broker, unique, partitions=1) as domain:
        topic, group = domain.data_topic(1, records_each=50), unique("g")
        no_mirror = {"mirror_offsets": False}
        # Clients of one process share an engine unless their transports differ.
        here = {"state_dir": tmp_path / "state", "transport": "fast"}
        elsewhere = {"transport": "kafka-python"}
        with domain.marshal(group, "w1", **here, **no_mirror) as marshal:
            consumer = marshal.consumer(topic, delivery="amo", max_poll_records=5)
            poll_all(consumer, 10)
        (path,) = kept_files(tmp_path)
        (section,) = read_file(path)
        granted = from_bytes(section.state.state).keys[Key(group, topic, 0)].granted
        assert granted >= 10
        place = Place(domain.topic, 0)
        domain.kafka.delete_records({place: section.state.offset - 1})

        def start(name, **options):
            return domain.marshal(group, name, **no_mirror, **options)

        with pytest.raises(LogUnreadable, match="no checkpoint or snapshot"):
            start("w2", **elsewhere)
        with start("w1", checkpoint_interval_ms=INTERVAL_MS, **here):

            def has_started():
                try:
                    start("w3", **elsewhere).close()
                except LogUnreadable:
                    return False
                return True

            eventually(has_started, "a checkpoint is written, and others start")
        with start("w2", **elsewhere) as marshal:
            consumer = marshal.consumer(topic, delivery="amo")
            assert poll_all(consumer, 1)[0].offset == granted, "positions are kept"
