"""How long a partition is not served while it moves to a member that loads state.

One member owns all partitions, and each gets a record every few milliseconds. A second
member joins, which needs some seconds to load the state of a partition. The gap of a
partition is the time between the last hand-out by the first member and the first by the
second. With ``on_warm`` the second member loads the state while the first one continues
to consume. This is compared with members without ``on_warm``, which load state after
the claim, and with a cooperative consumer group of confluent-kafka, which loads state
after the assignment. Members are processes, as in ``gaps.py``.

Then an admin drains a member with many partitions, until it holds none.
"""

import json
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
from confluent_kafka import Consumer as ConfluentConsumer
from gaps import (
    SESSION_MS,
    SETTLE_S,
    HandoutLog,
    Member,
    Unsettled,
    follow_by_confluent,
    follow_by_marshal,
    producing,
    unique,
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
    show_figures,
    show_progress,
    write_document,
)

from kafka_marshal import Admin, Marshal
from kafka_marshal.admin.formatting import Format
from kafka_marshal.testing.producing import create_topic

H_MS = 3_000
TICK_S = 0.005
DRAIN_FOR_MS = 600_000
WARM, COLD, COOPERATIVE = "warm handoff", "load after the claim", "cooperative group"
P99 = 0.99


@attrs.frozen(kw_only=True)
class Load:
    """Sizes of a run.

    Attributes:
        partitions: Partitions with traffic; half of them move.
        load_s: Time that a member takes to load the state of a partition.
        drained: Partitions of the member that is drained.
    """

    partitions: int
    load_s: float
    drained: int


FULL = Load(partitions=8, load_s=5.0, drained=100)
QUICK = Load(partitions=2, load_s=0.1, drained=4)

# --- a member, in a process of its own


def by_marshal(
    options: Mapping[str, Any], handouts: HandoutLog, is_over: threading.Event
) -> None:
    """Consume by claims until stopped."""
    load_s = options["load_s"]
    settings: dict[str, Any] = {}
    if load_s and options["kind"] == WARM:
        settings["on_warm"] = lambda *_: time.sleep(load_s)
    elif load_s:
        settings["on_claimed"] = lambda *_: time.sleep(load_s)
        # State is loaded on the application's thread, which must not count as stuck.
        settings["max_handling_ms"] = round(SETTLE_S * 1_000)
    with Marshal(
        options["servers"],
        group_id=options["group"],
        client_id=options["name"],
        coordination_topic=options["log"],
        state_dir="",
    ) as marshal:
        consumer = marshal.consumer(options["topic"], **settings)
        follow_by_marshal(consumer, handouts, is_over)


def by_confluent(
    options: Mapping[str, Any], handouts: HandoutLog, is_over: threading.Event
) -> None:
    """Consume in a cooperative group until stopped."""
    consumer = ConfluentConsumer(
        {
            "bootstrap.servers": options["servers"],
            "group.id": options["group"],
            "auto.offset.reset": "earliest",
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": H_MS // 3,
        }
    )
    consumer.subscribe(
        [options["topic"]],
        on_assign=lambda _, places: time.sleep(options["load_s"] * len(places)),
    )
    follow_by_confluent(consumer, handouts, is_over)


def member(options: Mapping[str, Any]) -> None:
    """Wait for the command to begin, then consume until SIGTERM."""
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: is_over.set())
    handouts = HandoutLog(options["path"])
    print("ready", flush=True)
    sys.stdin.readline()
    run = by_confluent if options["kind"] == COOPERATIVE else by_marshal
    run(options, handouts, is_over)


# --- two members


class Pair:
    """Two members of one kind; the second one must load state."""

    def __init__(
        self, kind: str, servers: str, folder: Path, *, partitions: int, load_s: float
    ) -> None:
        """Make the topic and start the processes."""
        self.topic, self.group, self.log = map(unique, ("data", "group", "marshal"))
        create_topic(servers, self.topic, partitions=partitions)
        if kind != COOPERATIVE:
            with Admin(servers, coordination_topic=self.log) as admin:
                admin.format_topic(Format(heartbeat_interval_ms=H_MS))
        self._partitions = partitions
        self.members = [
            Member(
                {
                    "kind": kind,
                    "servers": servers,
                    "topic": self.topic,
                    "group": self.group,
                    "log": self.log,
                    "name": name,
                    "load_s": load_s if name == "b" else 0.0,
                    "path": str(folder / f"{self.group}-{name}"),
                },
                script=__file__,
            )
            for name in ("a", "b")
        ]
        for each in self.members:
            each.await_ready()

    def await_served(self, number: int, *, more_s: float = 0.0) -> None:
        """Wait until the first members share all partitions and nothing moves."""
        deadline = time.monotonic() + SETTLE_S + more_s
        while not self._are_served(number):
            if time.monotonic() > deadline:
                raise Unsettled(f"not shared out within {SETTLE_S + more_s:.0f} s")
            time.sleep(0.2)

    def _are_served(self, number: int) -> bool:
        now = time.monotonic()
        shares = [
            {p for at, ps in each.handed() if at > now - 1.0 for p in ps}
            for each in self.members[:number]
        ]
        is_whole = len(set().union(*shares)) == self._partitions
        each = self._partitions // number
        return is_whole and all(len(share) == each for share in shares)

    def gaps(self, since: float) -> tuple[list[float], list[float]]:
        """Return the gaps of partitions that moved, and the longest gap of others."""
        times: dict[int, dict[int, list[float]]] = defaultdict(dict)
        for number, each in enumerate(self.members):
            for at, partitions in each.handed():
                for partition in partitions:
                    times[partition].setdefault(number, []).append(at)
        moved, kept = [], []
        for by_member in times.values():
            if 1 in by_member:
                moved.append(max(0.0, by_member[1][0] - by_member[0][-1]) * 1_000)
            else:
                series = [at for at in by_member[0] if at >= since]
                kept.append(max(b - a for a, b in pairwise(series)) * 1_000)
        return moved, kept

    def close(self) -> None:
        """End every process."""
        for each in self.members:
            each.end()


Kept = dict[str, list[float]]


def joined(kind: str, servers: str, load: Load, kept: Kept) -> float:
    """Let the second member join; add all gaps to ``kept``, return the median."""
    with TemporaryDirectory() as folder:
        pair = Pair(
            kind, servers, Path(folder), partitions=load.partitions, load_s=load.load_s
        )
        try:
            with producing(
                servers, pair.topic, partitions=load.partitions, tick_s=TICK_S
            ):
                pair.members[0].begin()
                pair.await_served(1)
                since = time.monotonic()
                pair.members[1].begin()
                pair.await_served(2, more_s=2 * load.partitions * load.load_s)
            moved, others = pair.gaps(since)
        finally:
            pair.close()
    kept.setdefault("moved", []).extend(moved)
    kept.setdefault("others", []).extend(others)
    show_progress(f"{kind}: {', '.join(f'{each:.0f}' for each in sorted(moved))} ms")
    return sorted(moved)[len(moved) // 2]


def drained(servers: str, load: Load) -> float:
    """Drain a member that has half of the partitions; return the seconds."""
    with TemporaryDirectory() as folder:
        count = 2 * load.drained
        pair = Pair(WARM, servers, Path(folder), partitions=count, load_s=0.0)
        try:
            for each in pair.members:
                each.begin()
            with (
                producing(servers, pair.topic, partitions=count, tick_s=0.5),
                Admin(servers, coordination_topic=pair.log) as admin,
            ):
                pair.await_served(2)
                start = time.monotonic()
                result = admin.drain(
                    "a", for_ms=DRAIN_FOR_MS, wait_ms=round(SETTLE_S * 1_000)
                )
                took_s = time.monotonic() - start
        finally:
            pair.close()
    if result.held:
        raise SystemExit(f"{len(result.held)} partitions were still held")
    return took_s


def measure(servers: str, rounds: int, load: Load) -> list[dict[str, Any]]:
    """Return the figures."""
    kinds = (WARM, COLD, COOPERATIVE)
    kept: dict[str, Kept] = {kind: {} for kind in kinds}

    def side(kind: str) -> Callable[[], float]:
        return lambda: joined(kind, servers, load, kept[kind])

    medians = alternate({kind: side(kind) for kind in kinds}, rounds)
    found = [
        figure(
            f"{WARM}: gap of a partition that moves, beside a {peer}",
            "ratio",
            ratios(medians[WARM], medians[peer]),
        )
        for peer in (COLD, COOPERATIVE)
    ]
    for kind in kinds:
        moved = sorted(kept[kind]["moved"])
        is_ours = kind == WARM
        found += [
            figure(
                f"{kind}: gap of a partition that moves",
                "ms",
                moved,
                target=at_most(10) if is_ours else None,
            ),
            figure(
                f"{kind}: gap of a partition that moves, p99",
                "ms",
                [moved[min(len(moved) - 1, int(P99 * len(moved)))]],
                target=at_most(50) if is_ours else None,
            ),
            figure(f"{kind}: longest gap of another", "ms", kept[kind]["others"]),
        ]
    took = [drained(servers, load) for _ in range(rounds)]
    what = f"drain of a member with {load.drained} partitions"
    return [*found, figure(what, "s", took, target=at_most(5))]


def main() -> None:
    """Run the benchmark and print its document."""
    if sys.argv[1:2] == ["--child"]:
        member(json.loads(sys.argv[2]))
        return
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    load = QUICK if options.quick else FULL
    properties = {"group.min.session.timeout.ms": str(SESSION_MS)}
    with cluster(options.bootstrap_servers, properties) as servers:
        figures = measure(servers, rounds, load)
    show_figures(figures)
    settings = {
        "rounds": rounds,
        "heartbeat_interval_ms": H_MS,
        "records_per_s_and_partition": round(1 / TICK_S),
        **attrs.asdict(load),
    }
    write_document(
        document("handoff", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
