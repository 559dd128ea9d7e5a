"""``marshal doctor``: checks this machine and the cluster, and names remedies."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import attrs
import typer

from kafka_marshal import MarshalError, World, __version__, native
from kafka_marshal.admin.client import UNCLEAN, remedy, set_command
from kafka_marshal.clock import duration
from kafka_marshal.counting import counted
from kafka_marshal.deadline import Deadline
from kafka_marshal.defaults import format_command
from kafka_marshal.errors import ConfigurationError, LogUnreadable
from kafka_marshal.identity import state_home
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.protocol.text import abbreviated
from kafka_marshal.sidecar.config import open_files_max
from kafka_marshal.system_calls import open_pidfd
from kafka_marshal.views.log_scan import Arrival
from kafka_marshal_cli import checks, presenters
from kafka_marshal_cli.checks import Check, ClockReading, Result
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import Call, advice, command, notify, wall_ms

app = typer.Typer()
EPILOG = "Example: marshal doctor -b broker-1:9092"
PYTHON_MIN = (3, 11)
ROUND_TRIPS = 5
TOPICS_MAX = 50
_OLD_BROKERS = (
    "a broker is older than Kafka 3.1 and cannot be asked for a topic by its id: over "
    "transport kafka-python, records of a topic that was deleted and created again may "
    "be taken for those of the earlier one"
)


@app.command("doctor", epilog=EPILOG)
@command()
def doctor(call: Call) -> None:
    """Check this machine, the brokers, the coordination topic and its log.

    Writes nothing to the cluster. Ends with exit code 1 if a check failed; a note is
    not a failure. To compare this machine's clock with the brokers' clocks, the command
    waits up to 5 seconds for a new record if the last one is too old; it waits a third
    of a heartbeat interval if live members seem to have written none for so long.
    """
    cluster = ClusterChecks(call)
    results = list(cluster.run())
    rows = [_row(each) for each in results]
    world = cluster.world
    now = {"time_ms": wall_ms(), "offsets": {}}
    as_of = now if world is None else presenters.as_of(world)
    section = Section("checks", rows, presenters.CHECK_COLUMNS)
    call.answer(Answer(as_of, {}, (section,)))
    failed = [each.check for each in results if each.result is Result.FAILED]
    if failed:
        notify(f"marshal: failed: {', '.join(failed)}")
        raise typer.Exit(ExitCode.FAILED)


def _row(found: Check) -> presenters.Row:
    run = None if found.run is None else advice(found.run)
    return {**attrs.asdict(found), "result": found.result.value, "run": run}


def machine() -> Iterator[Check]:
    """Check the installation on this machine."""
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
    yield record_parser()
    yield compiled_part()
    yield java()
    yield checks.state_folder(state_home)
    yield checks.open_files(open_files_max())
    yield checks.death_watch(open_pidfd)


def installed(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def record_parser() -> Check:
    """Check for the compiled parser, which transport kafka-python uses."""
    from kafka_marshal.kafka_io.record_batches import compiled_parser

    if compiled_parser() is None:
        return Check(
            "record parser",
            Result.NOTE,
            "aiokafka or its extension is missing: transport kafka-python parses "
            "records in Python, which takes ten times longer",
            "pip install aiokafka cramjam",
        )
    return Check("record parser", Result.OK, f"aiokafka {installed('aiokafka')}")


def quota() -> Iterator[Check]:
    """Check for delays of this command's own requests by quotas."""
    from kafka_marshal.kafka_io.throttling import throttling

    yield from checks.quota(throttling.longest_ms)


def compiled_part() -> Check:
    """Check for the compiled functions, which are optional."""
    name, package = "compiled part", "kafka-marshal"
    if native.compiled is not None:
        return Check(name, Result.OK, str(native.compiled.__file__))
    return Check(
        name,
        Result.NOTE,
        "missing: everything works, but reading a long log is slower; pip compiles "
        "the module if gcc or clang and the headers of Python are installed",
        f"pip install --force-reinstall --no-deps --no-binary {package} {package}",
    )


def java() -> Check:
    """Check for a Java that can run the embedded broker."""
    from kafka_marshal.testing.java import find_java

    try:
        found = find_java()
    except MarshalError as error:
        # Only the embedded broker, the demo and the tests need it.
        found_text = f"{error} Only `broker run` and `demo` need it."
        return Check(
            "java", Result.NOTE, found_text, "pip install 'kafka-marshal[broker]'"
        )
    return Check("java", Result.OK, f"{found.version} ({found.executable})")


class ClusterChecks:
    """Runs all checks; the timeout of the call begins when the object is constructed.

    Attributes:
        world: The world; None before the log was read.
    """

    def __init__(self, call: Call) -> None:
        self.world: World | None = None
        self._call = call
        self._deadline = Deadline(call.timeout_ms)
        self._leaders: dict[int, int] = {}
        self._took_ms: list[float] = []

    def run(self) -> Iterator[Check]:
        """Run the checks in order; a check that depends on a failed one is skipped."""
        begun, began = ClockReading.now(), time.monotonic()
        yield from machine()
        yield from self._certificate()
        yield from self._cluster()
        yield from quota()
        # Over a shorter time, an inexact reading of the clocks would look like drift.
        early_s = checks.DRIFT_S_MIN - (time.monotonic() - began)
        time.sleep(max(0.0, early_s))
        yield checks.local_clock(begun, ClockReading.now())

    def _certificate(self) -> Iterator[Check]:
        from kafka_marshal.kafka_io.tls_files import expires_at_s

        given = self._call.options
        path = given.get("ssl.certificate.location") or given.get("ssl_certfile")
        end_s = expires_at_s(path) if path else None
        if path and end_s is not None:
            yield checks.certificate(path, expires_at_s=end_s, now_s=time.time())

    def _cluster(self) -> Iterator[Check]:
        steps: list[tuple[str, Callable[[], Iterator[Check]]]] = [
            ("broker", self._broker),
            ("topic", self._topic),
            ("log", self._log),
            ("format", self._format),
            ("clock", self._clock),
            ("data topics", self._data_topics),
        ]
        is_passing = True
        for name, step in steps:
            if not is_passing:
                yield Check(name, Result.SKIPPED, "depends on a check that failed")
                continue
            left_ms = max(1, self._deadline.left_ms)
            self._call = attrs.evolve(self._call, timeout_ms=left_ms)
            try:
                for check in step():
                    yield check
                    if check.check in {"topic", "log"}:
                        is_passing = is_passing and check.result is not Result.FAILED
            except MarshalError as error:
                is_passing = False
                run = self._remedy(name, error)
                found = _OWN_ADVICE.sub(lambda m: "; " if m[1] else "", str(error))
                yield Check(name, Result.FAILED, found, run)

    def _remedy(self, name: str, error: MarshalError | None = None) -> str:
        if isinstance(error, LogUnreadable):
            return "correct the login, or grant the right"
        if isinstance(error, ConfigurationError):
            return "correct the option"
        if name == "format":
            run = format_command(self._call.coordination_topic)
            return f"check --coordination-topic; for a new topic: {run}"
        return _REMEDIES.get(name, _REMEDIES["broker"])

    def _broker(self) -> Iterator[Check]:
        with self._call.admin() as admin:
            transport = admin.transport
            found = f"{transport.name}: {transport.reason}"
            yield Check("transport", Result.OK, found)
            cluster = admin.cluster()
            brokers = ", ".join(b.address for b in cluster.brokers)
            yield Check("broker", Result.OK, f"{len(cluster.brokers)} ({brokers})")
            if not cluster.has_fetch_by_id:
                yield Check("kafka", Result.FAILED, _OLD_BROKERS, "upgrade the brokers")
            yield Check("cluster id", Result.OK, cluster.cluster_id)

    def _topic(self) -> Iterator[Check]:
        with self._call.admin() as admin:
            report = admin.report_topic()
        topic = self._call.coordination_topic
        if not report.topic.exists:
            found = f"{topic} does not exist"
            yield Check("topic", Result.FAILED, found, self._remedy("format"))
            return
        count = counted(report.topic.partition_count, "partition")
        found = f"{topic}, {count}, {counted(report.topic.replication, 'replica')}"
        yield Check("topic", Result.OK, found)
        yield from checks.rights(report)
        self._leaders = dict(report.topic.leaders)
        servers = self._call.bootstrap_servers
        yield from checks.copies(report, servers=servers)
        if report.note is not None:
            note = f"not checked: {report.note}"
            yield Check("settings", Result.NOTE, note, "grant DESCRIBE_CONFIGS")
            return
        for problem in report.found:
            run = remedy(problem, topic, servers=servers)
            yield Check("settings", Result.FAILED, problem.text, run)
        if not report.found:
            yield Check("settings", Result.OK, "all as required")

    def _log(self) -> Iterator[Check]:
        with self._call.scan() as scan:
            starts, ends = scan.starts, scan.ends
            for _ in range(ROUND_TRIPS):
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
                "checkpoint; if none runs, see Troubleshooting in docs/reference.md"
            )
            yield Check("log", Result.FAILED, found, run)
            return
        unused = self.world.unused
        if unused:
            found = (
                f"partitions {list(unused)} are not in use: an abandoned change of the "
                "partition count added them, and its records are deleted; a later "
                "change starts them"
            )
            yield Check("unused", Result.NOTE, found)
        gone = [t for t in gone if t not in unused]
        if gone:
            found = f"partitions {gone} begin above 0, and continue from checkpoints"
            yield Check("retention", Result.OK, found)
        took_s = time.monotonic() - began
        count = sum(ends.values())
        rate = round(count / max(took_s, 0.001))
        found = f"{counted(count, 'record')} read to the end, {rate}/s"
        yield Check("log", Result.OK, found)
        bad = sum(
            state.soft.counters.get("undecodable", 0) for state in self.world.partitions
        )
        if bad:
            found = f"{bad} records could not be decoded, and every reader ignores them"
            run = "marshal log tail --from start --type undecodable"
            yield Check("records", Result.NOTE, found, run)
        topic, servers = self._call.coordination_topic, self._call.bootstrap_servers
        yield from checks.timestamps(self.world, topic, servers=servers)

    def _format(self) -> Iterator[Check]:
        assert self.world is not None
        config = self.world.config()
        yield Check(
            "format",
            Result.OK,
            f"{config.format_id.hex()} generation {config.generation}, "
            f"{config.partition_count} coordinating partitions agree, "
            f"heartbeat interval {duration(config.heartbeat_interval_ms)}",
        )
        yield from checks.levels(self.world)
        yield from checks.growths(self.world)
        from kafka_marshal.kafka_io.topiclog import reader_timeout_ms

        ms = config.heartbeat_interval_ms
        yield checks.round_trips(self._took_ms, ms, read_ms=reader_timeout_ms(ms))

    def _clock(self) -> Iterator[Check]:
        assert self.world is not None
        behind = checks.leaders_clocks(self.world, self._leaders)
        if behind is not None:
            yield behind
            return
        last_ms = max(state.append_time_ms for state in self.world.partitions)
        age_ms = max(0, self.world.read_at_ms - last_ms)
        arrival = self._arrival(age_ms)
        # Claims are judged by log time: skew misleads only people.
        if arrival is not None:
            yield checks.own_clock(arrival, self._leaders)
            return
        found = (
            f"the last record is {duration(age_ms)} old by this machine's clock, which "
            "is at most that far ahead of the brokers"
        )
        yield Check("clock", Result.OK, found)

    def _arrival(self, age_ms: int) -> Arrival | None:
        """Wait for a record that shows a broker's clock, if the last one does not."""
        assert self.world is not None
        if age_ms < checks.CLOCK_OFF_MS_MIN:
            return None
        wait_ms = checks.clock_wait_ms(self.world, age_ms=age_ms)
        if not wait_ms:
            return None
        with self._call.scan() as scan:
            return scan.next_append(min(wait_ms, self._call.timeout_ms))

    def _data_topics(self) -> Iterator[Check]:
        """Check data topics: the guarantees do not cover records that Kafka loses."""
        assert self.world is not None
        keys = {key for state in self.world.partitions for key in state.keys}
        # The protocol's own keys are not topics of a broker.
        topics = sorted({key.topic for key in keys} - RESERVED_TOPICS)
        found: dict[str, str | None] = {}
        hidden = []
        with self._call.admin() as admin:
            for topic in topics[:TOPICS_MAX]:
                try:
                    found[topic] = admin.risk_of(topic)
                except LogUnreadable:  # for example, a topic of another team
                    hidden.append(topic)
        if hidden:
            text = f"not checked: this principal may not describe {abbreviated(hidden)}"
            run = (
                "grant DESCRIBE on these topics, or run marshal doctor as a principal "
                "with that right"
            )
            yield Check("data topics", Result.NOTE, text, run)
        risks = [f"{topic} ({risk})" for topic, risk in found.items() if risk]
        name, count = "data topics", f"{len(found)} checked"
        if risks:
            text = f"{count}; records may be lost from {abbreviated(risks)}"
            unclean = [topic for topic, risk in found.items() if risk == UNCLEAN]
            run = "bring back the brokers that have copies of these topics"
            if unclean:
                servers = self._call.bootstrap_servers
                first = unclean[0]  # likewise for the others
                run = set_command(first, servers, setting=UNCLEAN, value="false")
            yield Check(name, Result.NOTE, text, run)
            return
        yield Check(name, Result.OK, count)


# Advice in errors to run this command.
_OWN_ADVICE = re.compile(
    r"[;.] (?:see|check the brokers with): marshal doctor(, (?:or|and) )?",
    re.IGNORECASE,
)
_REMEDIES = {
    "broker": "correct what column FOUND names; show the settings with: marshal config "
    "show --origin",
    "log": "check the brokers and their log",
    "clock": "check this machine's clock",
}
