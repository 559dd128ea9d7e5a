"""How long a partition that does not move is not served, while members change.

Members are processes. A producer writes to every partition at a steady rate; each
member notes when it was handed records. Then one member joins, one leaves in order and
one is killed, each in a window as long as a quiet window in which nothing happens. Only
partitions that one member holds throughout a window count: the figure is the longest
time between two hand-outs of such a partition, beside that of the quiet window.

Consumer groups are measured in the same way: kafka-python's classic protocol, eager and
cooperative, and KIP-848 with confluent-kafka. Each process has imported everything
before it gets its command to join, so that the start of Python does not count.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from confluent_kafka import Consumer as ConfluentConsumer
from confluent_kafka import Producer
from kafka import KafkaConsumer
from kafka.coordinator.assignors.cooperative_sticky import (
    CooperativeStickyAssignor,
)
from support import (
    alternate,
    arguments,
    at_most,
    broker_argument,
    cluster,
    document,
    figure,
    ratios,
    show_progress,
    write_document,
)

from kafka_marshal import Admin, Consumer, Marshal
from kafka_marshal.admin.formatting import Format
from kafka_marshal.testing.producing import create_topic

H_MS = 3_000
SESSION_MS = 6_000  # as long as claims of a killed member last
PARTITIONS = 6
TICK_S = 0.01
POLL_MS = 100
WINDOW_S, WINDOW_QUICK_S = 9.0, 1.0
SETTLE_S = 60.0
BEFORE_S = 1.0
PHASES = ("nothing", "join", "leave", "kill")
KINDS = ("marshal", "marshal, kafka-python", "eager", "cooperative", "KIP-848")
KINDS_QUICK = ("marshal",)
BROKER = {
    "group.min.session.timeout.ms": str(SESSION_MS),
    "group.consumer.min.session.timeout.ms": str(SESSION_MS),
    "group.consumer.session.timeout.ms": str(SESSION_MS),
    "group.consumer.min.heartbeat.interval.ms": "1000",
    "group.consumer.heartbeat.interval.ms": str(H_MS // 3),
}

_run = uuid.uuid4().hex[:8]
_numbers = count(1)


def unique(stem: str) -> str:
    """Return a name that is unique on the cluster."""
    return f"{stem}-{_run}-{next(_numbers)}"


class Unsettled(Exception):
    """The members did not hold all partitions in time."""


# --- a member, in a process of its own


class HandoutLog:
    """Writes the time and the partitions of each hand-out to a file, one per line."""

    def __init__(self, path: str) -> None:
        """Open the file."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, partitions: Sequence[int]) -> None:
        """Note a hand-out, in a single write, so that a kill leaves whole lines."""
        line = json.dumps([time.monotonic(), sorted(set(partitions))])
        os.write(self._file, line.encode() + b"\n")


def follow_by_marshal(
    consumer: Consumer, handouts: HandoutLog, is_over: threading.Event
) -> None:
    """Note and commit the records of a consumer until stopped."""
    while not is_over.is_set():
        handed = consumer.poll(POLL_MS)
        if handed:
            handouts.write([place.partition for place in handed])
            consumer.commit()


def by_marshal(
    options: Mapping[str, Any], handouts: HandoutLog, is_over: threading.Event
) -> None:
    """Consume by claims until stopped."""
    with Marshal(
        options["servers"],
        group_id=options["group"],
        client_id=options["name"],
        coordination_topic=options["log"],
        transport="kafka-python"
        if options["kind"].endswith("kafka-python")
        else "auto",
        state_dir="",
    ) as marshal:
        consumer = marshal.consumer(options["topic"])
        follow_by_marshal(consumer, handouts, is_over)


def by_kafka_python(
    options: Mapping[str, Any], handouts: HandoutLog, is_over: threading.Event
) -> None:
    """Consume in a classic group until stopped."""
    assignors = {}
    if options["kind"] == "cooperative":
        strategy = [CooperativeStickyAssignor]
        assignors["partition_assignment_strategy"] = strategy
    consumer = KafkaConsumer(
        bootstrap_servers=options["servers"],
        group_id=options["group"],
        auto_offset_reset="earliest",
        session_timeout_ms=SESSION_MS,
        heartbeat_interval_ms=H_MS // 3,
        **assignors,
    )
    consumer.partitions_for_topic(options["topic"])  # else a leader assigns nothing
    consumer.subscribe([options["topic"]])
    while not is_over.is_set():
        handed = consumer.poll(timeout_ms=POLL_MS)
        if handed:
            handouts.write([place.partition for place in handed])
    consumer.close()


def follow_by_confluent(
    consumer: ConfluentConsumer, handouts: HandoutLog, is_over: threading.Event
) -> None:
    """Note the records of a subscribed consumer until stopped, then close it."""
    while not is_over.is_set():
        # ``consume`` waits for a full batch: so poll one message, then take the rest.
        first = consumer.poll(POLL_MS / 1_000)
        messages = [] if first is None else [first, *consumer.consume(499, 0)]
        handed = [each.partition() for each in messages if each.error() is None]
        if handed:
            handouts.write(handed)
    consumer.close()


def by_confluent(
    options: Mapping[str, Any], handouts: HandoutLog, is_over: threading.Event
) -> None:
    """Consume in a group under KIP-848 until stopped."""
    consumer = ConfluentConsumer(
        {
            "bootstrap.servers": options["servers"],
            "group.id": options["group"],
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([options["topic"]])
    follow_by_confluent(consumer, handouts, is_over)


def member(options: Mapping[str, Any]) -> None:
    """Wait for the command to begin, then consume until SIGTERM."""
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: is_over.set())
    handouts = HandoutLog(options["path"])
    print("ready", flush=True)
    sys.stdin.readline()
    if options["kind"].startswith("marshal"):
        by_marshal(options, handouts, is_over)
    elif options["kind"] == "KIP-848":
        by_confluent(options, handouts, is_over)
    else:
        by_kafka_python(options, handouts, is_over)


# --- the scenario


class Member:
    """A process that starts to consume on request."""

    def __init__(self, options: Mapping[str, Any], *, script: str = __file__) -> None:
        """Start the process with a benchmark's script; it imports, and waits."""
        self.path = Path(options["path"])
        self._process = subprocess.Popen(
            [sys.executable, script, "--child", json.dumps(dict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def await_ready(self) -> None:
        """Wait until the process has imported everything."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit(f"a member did not start, see above: {self.path.name}")

    def begin(self) -> None:
        """Send the command to begin."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def leave(self) -> None:
        """Make the member leave in order."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def end(self) -> None:
        """Make sure that the process has ended."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.communicate(timeout=SETTLE_S)

    def handed(self) -> Iterator[tuple[float, list[int]]]:
        """Yield the hand-outs that the member has noted."""
        if self.path.exists():
            # The last line may be incomplete now.
            whole, _, _ = self.path.read_text().rpartition("\n")
            for line in whole.splitlines():
                at, partitions = json.loads(line)
                yield at, partitions


@contextmanager
def producing(
    servers: str, topic: str, *, partitions: int = PARTITIONS, tick_s: float = TICK_S
) -> Iterator[None]:
    """Write a record to each partition every few milliseconds."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    is_over = threading.Event()

    def run() -> None:
        due = time.monotonic()
        while not is_over.wait(max(0.0, due - time.monotonic())):
            due += tick_s
            for partition in range(partitions):
                producer.produce(topic, b"x" * 100, partition=partition)
            producer.poll(0)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(timeout=SETTLE_S)
        producer.flush(SETTLE_S)


class Scenario:
    """One topic, one group, three members of one kind."""

    def __init__(
        self, kind: str, servers: str, folder: Path, *, window_s: float
    ) -> None:
        """Make the topic and start the processes."""
        self.kind = kind
        self.window_s = window_s
        self.topic = unique("data")
        create_topic(servers, self.topic, partitions=PARTITIONS)
        options = {
            "kind": kind,
            "servers": servers,
            "topic": self.topic,
            "group": unique("group"),
            "log": unique("marshal"),
        }
        if kind.startswith("marshal"):
            with Admin(servers, coordination_topic=options["log"]) as admin:
                admin.format_topic(Format(heartbeat_interval_ms=H_MS))
        self.members = [
            Member(
                {
                    **options,
                    "name": name,
                    "path": str(folder / f"{options['group']}-{name}"),
                }
            )
            for name in ("a", "b", "c")
        ]
        for each in self.members:
            each.await_ready()

    def await_served(self, number: int) -> None:
        """Wait until the first members share all partitions and nothing moves."""
        deadline = time.monotonic() + SETTLE_S
        while not self._are_served(number):
            if time.monotonic() > deadline:
                raise Unsettled(f"{self.kind}: not shared out within {SETTLE_S} s")
            time.sleep(0.2)

    def _are_served(self, number: int) -> bool:
        now = time.monotonic()
        shares = [
            {p for at, ps in each.handed() if at > now - 1.0 for p in ps}
            for each in self.members[:number]
        ]
        is_whole = len(set().union(*shares)) == PARTITIONS
        return is_whole and all(shares) and sum(map(len, shares)) == PARTITIONS

    def gaps(self, start: float, end: float) -> list[float]:
        """Return all gaps of partitions that one member held throughout a window.

        It must also have held them just before the window: partitions of a member that
        is killed at its beginning move, and do not count.
        """
        times: dict[int, dict[int, list[float]]] = defaultdict(dict)
        for number, each in enumerate(self.members):
            for at, partitions in each.handed():
                if start - BEFORE_S <= at <= end:
                    for partition in partitions:
                        times[partition].setdefault(number, []).append(at)
        found = []
        for by_member in times.values():
            if len(by_member) == 1:
                (series,) = by_member.values()
                around = [start, *(at for at in series if at >= start), end]
                found += [b - a for a, b in pairwise(around)]
        return [gap * 1_000 for gap in found]

    def phase(self, act: Callable[[], object]) -> list[float]:
        """Call ``act``, and return the gaps of the window that begins with it."""
        start = time.monotonic()
        act()
        time.sleep(self.window_s)
        return self.gaps(start, start + self.window_s)

    def run(self) -> dict[str, list[float]]:
        """Let members join, leave and be killed; return the gaps of each phase."""
        a, b, c = self.members
        a.begin()
        b.begin()
        self.await_served(2)
        quiet = self.phase(lambda: None)
        join = self.phase(c.begin)
        self.await_served(3)
        kill = self.phase(c.kill)
        self.await_served(2)
        leave = self.phase(b.leave)
        del a
        return {"nothing": quiet, "join": join, "leave": leave, "kill": kill}

    def close(self) -> None:
        """End every process."""
        for each in self.members:
            each.end()


def longest(kind: str, servers: str, window_s: float, kept: dict[str, Any]) -> float:
    """Play one round; add the longest gap of each phase, return the quiet one.

    A group that does not settle is reported and left out of the round.
    """
    with TemporaryDirectory() as folder:
        scenario = Scenario(kind, servers, Path(folder), window_s=window_s)
        try:
            with producing(servers, scenario.topic):
                gaps = scenario.run()
        except Unsettled as error:
            show_progress(str(error))
            kept["unsettled"] = kept.get("unsettled", 0) + 1
            kept.setdefault("rounds", []).append({})
            return math.nan
        finally:
            scenario.close()
    kept.setdefault("rounds", []).append(gaps)
    for phase, found in gaps.items():
        if not found:
            raise SystemExit(f"{kind}: every partition moved when: {phase}")
        kept.setdefault(phase, []).append(max(found))
        kept.setdefault(f"{phase}, median", []).append(sorted(found)[len(found) // 2])
    show_progress(
        f"{kind}: " + ", ".join(f"{p} {max(g):.0f} ms" for p, g in gaps.items())
    )
    return max(gaps["nothing"])


def figures(kind: str, kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of one kind of member."""
    found: list[dict[str, Any]] = []
    if PHASES[0] not in kept:
        return found
    for phase in PHASES:
        found.append(figure(f"{kind}: longest gap, {phase}", "ms", kept[phase]))
        middle = kept[f"{phase}, median"]
        found.append(figure(f"{kind}: median gap, {phase}", "ms", middle))
    for phase in PHASES[1:]:
        name = f"{kind}: longest gap, {phase}, beside nothing"
        target = at_most(1.2) if kind.startswith("marshal") else None
        share = ratios(kept[phase], kept["nothing"])
        found.append(figure(name, "ratio", share, target=target))
    return found


def beside(
    name: str, peer: str, kept: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the longest gaps of one kind of member beside those of another.

    Rounds in which one of them did not settle are left out.
    """
    rounds = zip(kept[name]["rounds"], kept[peer]["rounds"], strict=True)
    settled = [(ours, theirs) for ours, theirs in rounds if ours and theirs]
    if not settled:
        return []
    found = []
    for phase in PHASES[1:]:
        label = f"{name}: longest gap, {phase}, beside {peer}"
        shares = [max(ours[phase]) / max(theirs[phase]) for ours, theirs in settled]
        found.append(figure(label, "ratio", shares))
    return found


def main() -> None:
    """Run the benchmark and print its document."""
    if sys.argv[1:2] == ["--child"]:
        member(json.loads(sys.argv[2]))
        return
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    window_s = WINDOW_QUICK_S if options.quick else WINDOW_S
    kinds = options.kind or (KINDS_QUICK if options.quick else KINDS)
    kept: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}

    def run(servers: str) -> None:
        def side(kind: str) -> Callable[[], float]:
            return lambda: longest(kind, servers, window_s, kept[kind])

        alternate({kind: side(kind) for kind in kinds}, rounds)

    with cluster(options.bootstrap_servers, BROKER) as servers:
        run(servers)
    settings = {
        "rounds": rounds,
        "heartbeat_interval_ms": H_MS,
        "session_timeout_ms": SESSION_MS,
        "partitions": PARTITIONS,
        "records_per_s_and_partition": round(1 / TICK_S),
        "window_s": window_s,
        "rounds_left_out": {k: kept[k].get("unsettled", 0) for k in kinds},
    }
    found = [each for kind in kinds for each in figures(kind, kept[kind])]
    found += [each for kind in kinds[1:] for each in beside(kinds[0], kind, kept)]
    write_document(
        document("gaps", found, settings=settings, is_quick=options.quick), options.out
    )


if __name__ == "__main__":
    main()
