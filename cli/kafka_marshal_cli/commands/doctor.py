"""``marshal doctor``: what is in the way, and what to run against it."""

import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version

import attrs
import typer

from kafka_marshal import MarshalError, World, __version__
from kafka_marshal_cli import columns, facts
from kafka_marshal_cli.exits import ExitCode
from kafka_marshal_cli.render import Answer, Section, duration
from kafka_marshal_cli.shared import Call, command, tell, wall_ms

EPILOG = "Example: marshal doctor -b broker-1:9092"
PYTHON_MIN = (3, 11)


class Result(StrEnum):
    """How a check ended; only ``failed`` makes the whole fail."""

    OK = "ok"
    NOTE = "note"
    FAILED = "failed"
    SKIPPED = "skipped"


@attrs.frozen
class Check:
    """One line of the doctor's.

    Attributes:
        check: What was looked at.
        result: How it ended.
        found: What there is.
        run: What to run to mend it, None where nothing is wrong.
    """

    check: str
    result: Result
    found: str
    run: str | None = None


@command()
def doctor(call: Call) -> None:
    """Check this machine, the brokers, the coordination topic and its log.

    Reads only. Ends with 1 if a check failed; a note is no failure.
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

    def examine(self) -> Iterator[Check]:
        """Check one thing after the other; what needs a failed one is skipped."""
        yield from machine()
        steps: list[tuple[str, Callable[[], Iterator[Check]]]] = [
            ("broker", self._broker),
            ("log", self._log),
            ("format", self._format),
            ("clock", self._clock),
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
            yield Check("topic", Result.FAILED, found, "marshal topic format")
            return
        count = report.topic.partition_count
        found = f"{topic}, {count} partitions, {report.topic.replication} replicas"
        yield Check("topic", Result.OK, found)
        if report.note is not None:
            note = f"not looked at: {report.note}"
            yield Check("settings", Result.NOTE, note, "grant DESCRIBE_CONFIGS")
            return
        for problem in report.problems:
            yield Check("settings", Result.FAILED, problem, "kafka-configs --alter")
        if not report.problems:
            yield Check("settings", Result.OK, "as they must be")

    def _log(self) -> Iterator[Check]:
        with self._call.scan() as scan:
            starts, ends = scan.starts, scan.ends
        gone = sorted(t for t, offset in starts.items() if offset > 0)
        if gone:
            found = f"partitions {gone} begin above offset 0: claims may be gone"
            run = "set retention.ms=-1, then format a new coordination topic"
            yield Check("log", Result.FAILED, found, run)
            return
        began = time.monotonic()
        self.world = self._call.world()
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

    def _clock(self) -> Iterator[Check]:
        assert self.world is not None
        last_ms = max(state.append_time_ms for state in self.world.partitions)
        behind_ms = self.world.read_at_ms - last_ms
        if behind_ms < 0:
            found = f"this machine is {duration(-behind_ms)} behind the brokers"
        else:
            found = (
                f"the last record is {duration(behind_ms)} old by this machine's "
                "clock, which is at most that far ahead of the brokers"
            )
        # Claims are judged by the log's own time: skew misleads people only.
        yield Check("clock", Result.NOTE if behind_ms < 0 else Result.OK, found)


_MENDING = {
    "broker": "check the address, the network, and that the brokers run",
    "log": "check the brokers and their log",
    "format": "marshal topic format",
    "clock": "check this machine's clock",
}
