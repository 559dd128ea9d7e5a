"""``marshal doctor``: what is in the way, and what to run against it."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import attrs
import typer

from kafka_marshal import MarshalError, World, __version__
from kafka_marshal.admin import UNCLEAN, remedy, set_command
from kafka_marshal.identity import state_home
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal_cli import assumptions, columns, facts
from kafka_marshal_cli.assumptions import ClockReading
from kafka_marshal_cli.checks import Check, Result
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.render import Answer, Section, duration
from kafka_marshal_cli.shared import Call, command, tell, wall_ms

EPILOG = "Example: marshal doctor -b broker-1:9092"
PYTHON_MIN = (3, 11)
QUESTIONS = 5
TOPICS_MAX = 50


@command()
def doctor(call: Call) -> None:
    """Check this machine, the brokers, the coordination topic and its log.

    Looks at all that the guarantees assume. Writes nothing to the cluster. Ends with
    1 if a check failed; a note is no failure.
    """
    patient = Patient(call)
    checks = list(patient.examine())
    rows = [{**attrs.asdict(each), "result": each.result.value} for each in checks]
    world = patient.world
    now = {"time_ms": wall_ms(), "offsets": {}}
    as_of = now if world is None else facts.as_of(world)
    section = Section("checks", rows, columns.CHECKS)
    call.answer(Answer(as_of, {}, (section,)))
    failed = [each.check for each in checks if each.result is Result.FAILED]
    if failed:
        tell(f"marshal: failed: {', '.join(failed)}")
        raise typer.Exit(ExitCode.FAILED)


def machine() -> Iterator[Check]:
    """Check what is installed here."""
    python = ".".join(map(str, sys.version_info[:3]))
    is_new = sys.version_info >= PYTHON_MIN
    yield Check(
        "python",
        Result.OK if is_new else Result.FAILED,
        f"{python} ({sys.executable}), kafka-marshal {__version__}",
        None if is_new else "install Python 3.11 or later",
    )
    for package, need in (
        ("kafka-python", "nothing can connect"),
        ("crc32c", "checksums are computed ten times slower"),
    ):
        found = installed(package)
        yield Check(
            package,
            Result.FAILED if found is None else Result.OK,
            found or f"missing: {need}",
            f"pip install {package}" if found is None else None,
        )
    yield java()
    yield assumptions.state_folder(state_home())
    yield assumptions.death_watch(getattr(os, "pidfd_open", None))


def installed(package: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def java() -> Check:
    """Check for a Java that the embedded broker could run on."""
    from kafka_marshal.testing.java import find_java

    try:
        found = find_java()
    except MarshalError as error:
        # Only the embedded broker, the demo and the tests need it.
        told = f"{error} Only `broker run` and `demo` need it."
        return Check("java", Result.NOTE, told, "pip install 'kafka-marshal[broker]'")
    return Check("java", Result.OK, f"{found.version} ({found.executable})")


class Patient:
    """A cluster that is examined.

    Attributes:
        world: The world, once its log was read.
    """

    def __init__(self, call: Call) -> None:
        self.world: World | None = None
        self._call = call
        self._leaders: dict[int, int] = {}
        self._took_ms: list[float] = []

    def examine(self) -> Iterator[Check]:
        """Check one thing after the other; what needs a failed one is skipped."""
        begun, began = ClockReading.take(), time.monotonic()
        yield from machine()
        yield from self._cluster()
        # Over a shorter time the error of reading a clock would look like drift.
        early_s = assumptions.DRIFT_S_MIN - (time.monotonic() - began)
        time.sleep(max(0.0, early_s))
        yield assumptions.local_clock(begun, ClockReading.take())

    def _cluster(self) -> Iterator[Check]:
        steps: list[tuple[str, Callable[[], Iterator[Check]]]] = [
            ("broker", self._broker),
            ("log", self._log),
            ("format", self._format),
            ("clock", self._clock),
            ("data topics", self._data_topics),
        ]
        is_well = True
        for name, step in steps:
            if not is_well:
                yield Check(name, Result.SKIPPED, "needs what failed above")
                continue
            try:
                for check in step():
                    yield check
                    if check.check in {"topic", "log"}:
                        is_well = is_well and check.result is not Result.FAILED
            except MarshalError as error:
                is_well = False
                yield Check(name, Result.FAILED, str(error), _MENDING[name])

    def _broker(self) -> Iterator[Check]:
        with self._call.admin() as admin:
            transport = admin.transport
            found = f"{transport.name}: {transport.reason}"
            yield Check("transport", Result.OK, found)
            cluster = admin.cluster()
            brokers = ", ".join(f"{b.host}:{b.port}" for b in cluster.brokers)
            yield Check("broker", Result.OK, f"{len(cluster.brokers)} ({brokers})")
            yield Check("cluster id", Result.OK, cluster.cluster_id)
            report = admin.report_topic()
        topic = self._call.coordination_topic
        if not report.topic.exists:
            found = f"{topic} does not exist"
            yield Check("topic", Result.FAILED, found, _MENDING["format"])
            return
        count = report.topic.partition_count
        found = f"{topic}, {count} partitions, {report.topic.replication} replicas"
        yield Check("topic", Result.OK, found)
        self._leaders = dict(report.topic.leaders)
        yield from assumptions.copies(report)
        if report.note is not None:
            note = f"not looked at: {report.note}"
            yield Check("settings", Result.NOTE, note, "grant DESCRIBE_CONFIGS")
            return
        servers = self._call.bootstrap_servers
        for problem in report.found:
            run = remedy(problem, topic, servers=servers)
            yield Check("settings", Result.FAILED, problem.text, run)
        if not report.found:
            yield Check("settings", Result.OK, "as they must be")

    def _log(self) -> Iterator[Check]:
        with self._call.scan() as scan:
            starts, ends = scan.starts, scan.ends
            for _ in range(QUESTIONS):
                asked = time.monotonic()
                scan.latest_ends()
                self._took_ms.append((time.monotonic() - asked) * 1_000)
        gone = sorted(t for t, offset in starts.items() if offset > 0)
        began = time.monotonic()
        self.world = self._call.world()
        lost = list(self.world.log_start_missing)
        if lost:
            found = f"partitions {lost} begin above offset 0, without a checkpoint"
            run = (
                "set retention.ms=-1 and keep any member running: it writes a "
                "checkpoint; if none runs, see README, Troubleshooting"
            )
            yield Check("log", Result.FAILED, found, run)
            return
        if gone:
            found = f"partitions {gone} begin above 0, and go on from checkpoints"
            yield Check("retention", Result.OK, found)
        took_s = time.monotonic() - began
        count = sum(ends.values())
        rate = round(count / max(took_s, 0.001))
        found = f"{count} records read to the end, {rate}/s"
        yield Check("log", Result.OK, found)
        bad = sum(
            state.soft.counters.get("undecodable", 0) for state in self.world.partitions
        )
        if bad:
            found = f"{bad} records could not be decoded, and are ignored by everybody"
            yield Check("records", Result.NOTE, found, "marshal log dump")
        topic, servers = self._call.coordination_topic, self._call.bootstrap_servers
        yield from assumptions.timestamps(self.world, topic, servers=servers)

    def _format(self) -> Iterator[Check]:
        assert self.world is not None
        config = self.world.config()
        yield Check(
            "format",
            Result.OK,
            f"{config.format_id.hex()} generation {config.generation}, "
            f"K={config.partition_count} agree, "
            f"H={duration(config.heartbeat_interval_ms)}",
        )
        yield from assumptions.levels(self.world)
        yield assumptions.round_trips(self._took_ms, config.heartbeat_interval_ms)

    def _clock(self) -> Iterator[Check]:
        assert self.world is not None
        behind = assumptions.leaders_clocks(self.world, self._leaders)
        if behind is not None:
            yield behind
            return
        last_ms = max(state.append_time_ms for state in self.world.partitions)
        age = duration(self.world.read_at_ms - last_ms)
        found = (
            f"the last record is {age} old by this machine's clock, which is at most "
            "that far ahead of the brokers"
        )
        # Claims are judged by the log's own time: skew misleads people only.
        yield Check("clock", Result.OK, found)

    def _data_topics(self) -> Iterator[Check]:
        """Neither guarantee covers records that Kafka itself loses."""
        assert self.world is not None
        keys = {key for state in self.world.partitions for key in state.keys}
        # What the protocol claims for itself is no topic that a broker could know.
        topics = sorted({key.topic for key in keys} - RESERVED_TOPICS)
        with self._call.admin() as admin:
            found = {topic: admin.risk_of(topic) for topic in topics[:TOPICS_MAX]}
        risks = [f"{topic} ({risk})" for topic, risk in found.items() if risk]
        name, looked = "data topics", f"{min(len(topics), TOPICS_MAX)} looked at"
        if risks:
            told = f"{looked}; records may get lost of {assumptions.shown(risks)}"
            unclean = [topic for topic, risk in found.items() if risk == UNCLEAN]
            run = "bring back the brokers that have them"
            if unclean:
                servers = self._call.bootstrap_servers
                first = unclean[0]  # and each of the others
                run = set_command(first, servers, setting=UNCLEAN, value="false")
            yield Check(name, Result.NOTE, told, run)
            return
        yield Check(name, Result.OK, looked)


_MENDING = {
    "broker": "check the address, the network, and that the brokers run",
    "log": "check the brokers and their log",
    "format": "check --coordination-topic; for a new topic: marshal topic format",
    "clock": "check this machine's clock",
    "data topics": "grant DESCRIBE on the topics that groups consume",
}
