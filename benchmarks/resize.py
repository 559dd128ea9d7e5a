"""How long keys are not served while the number of coordinating partitions changes.

Two members, in processes of their own, share the partitions of a topic, and each
partition gets a record every few milliseconds. Handling takes no time, so almost
nothing is in progress when a key is drained.
An admin doubles the number of coordinating partitions and halves it again, several
times. The figure is the longest time between two hand-outs of a partition, by any
member, from the command until a while after its end: for partitions whose keys move,
and for partitions whose keys stay. For comparison, the same is measured in a window of
that length right after, in which nothing changes.

Then many groups each have one member, which holds all partitions of a topic and reads
no data; a few processes run all members. Measured is the time of the whole change, from
the command until each coordinating partition has its last record, and from then until
all keys are held again.
"""

import json
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
from gaps import HandoutLog, Member, Unsettled, follow_by_marshal, producing, unique
from support import (
    arguments,
    at_most,
    broker_argument,
    cluster,
    document,
    figure,
    show_figures,
    show_progress,
    write_document,
)

from kafka_marshal import Admin, Marshal
from kafka_marshal.admin.formatting import Format
from kafka_marshal.config import ConsumerConfig
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.types import Key
from kafka_marshal.testing.producing import create_topic

H_MS = 60_000
K, K_MORE = 4, 8
TICK_S = 0.02
POLL_MS = 100
SETTLE_S = 120.0
LOOK_S = 0.2
NOTE_S = 0.1
P99 = 0.99
GAP_MS_MAX, WHOLE_S_MAX = 1_000, 10
DELIVERIES = {"alo": "at least once", "amo": "at most once"}
NAMES = ("a", "b")


@attrs.frozen(kw_only=True)
class Load:
    """Sizes of a run.

    Attributes:
        partitions: Partitions with traffic.
        after_s: How long hand-outs are watched after the end of a change.
        members: Members without traffic, each in a group of its own.
        held: Partitions that each of these members holds.
        processes: Number of processes that run these members.
    """

    partitions: int
    after_s: float
    members: int
    held: int
    processes: int


FULL = Load(partitions=16, after_s=3.0, members=100, held=100, processes=4)
QUICK = Load(partitions=4, after_s=1.0, members=10, held=4, processes=1)

# --- processes of their own


def consume(
    options: Mapping[str, Any], handouts: HandoutLog, is_over: threading.Event
) -> None:
    """Consume by claims until stopped."""
    with Marshal(
        options["servers"],
        group_id=options["group"],
        client_id=options["name"],
        coordination_topic=options["log"],
        state_dir="",
    ) as marshal:
        consumer = marshal.consumer(options["topic"], delivery=options["delivery"])
        if options["delivery"] == "alo":
            follow_by_marshal(consumer, handouts, is_over)
        while not is_over.is_set():
            handed = consumer.poll(POLL_MS)
            if handed:
                handouts.write([place.partition for place in handed])


def hold(
    options: Mapping[str, Any], handouts: HandoutLog, is_over: threading.Event
) -> None:
    """Hold partitions for several members until stopped; note their number."""
    with ExitStack() as stack:
        held = []
        for name in options["members"]:
            marshal = stack.enter_context(
                Marshal(
                    options["servers"],
                    group_id=name,
                    client_id=name,
                    coordination_topic=options["log"],
                    mirror_offsets=False,
                    state_dir="",
                )
            )
            held.append(
                marshal.ranges(
                    ConsumerConfig(
                        topics=(options["topic"],),
                        max_handling_ms=0,
                        release_behind=False,
                    )
                )
            )
            # Start members one by one: all at once would queue too many lookups.
            while len(held[-1].held()) < options["held"] and not is_over.wait(NOTE_S):
                pass
        while not is_over.wait(NOTE_S):
            handouts.write([sum(len(each.held()) for each in held)])


def child(options: Mapping[str, Any]) -> None:
    """Wait for the command to begin, then work until SIGTERM."""
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: is_over.set())
    handouts = HandoutLog(options["path"])
    print("ready", flush=True)
    sys.stdin.readline()
    work = hold if "members" in options else consume
    work(options, handouts, is_over)


def formatted(servers: str) -> str:
    """Return a new coordination topic."""
    log = unique("marshal")
    with Admin(servers, coordination_topic=log) as admin:
        wanted = Format(partition_count=K, heartbeat_interval_ms=H_MS)
        admin.format_topic(wanted)
    return log


def resized(admin: Admin, count: int) -> float:
    """Change the number of coordinating partitions; return the seconds."""
    began = time.monotonic()
    plan = admin.resize_topic(count, execute=True)
    took_s = time.monotonic() - began
    if not plan.is_needed:
        raise SystemExit(f"there were {count} coordinating partitions before")
    return took_s


# --- the gaps of partitions with traffic


class Pair:
    """Two members that share a topic."""

    def __init__(
        self, servers: str, folder: Path, *, delivery: str, partitions: int
    ) -> None:
        """Make the topics and start the processes."""
        self.topic, self.group = unique("data"), unique("group")
        self.log = formatted(servers)
        self.partitions = partitions
        create_topic(servers, self.topic, partitions=partitions)
        options = {
            "servers": servers,
            "topic": self.topic,
            "group": self.group,
            "log": self.log,
            "delivery": delivery,
        }
        self.members = [
            Member(
                {**options, "name": name, "path": str(folder / f"{self.group}-{name}")},
                script=__file__,
            )
            for name in NAMES
        ]
        for each in self.members:
            each.await_ready()
            each.begin()

    def await_served(self) -> None:
        """Wait until both share all partitions and nothing moves."""
        deadline = time.monotonic() + SETTLE_S
        while not self._are_served():
            if time.monotonic() > deadline:
                raise Unsettled(f"not shared out within {SETTLE_S:.0f} s")
            time.sleep(LOOK_S)

    def _are_served(self) -> bool:
        since = time.monotonic() - 1.0
        shares = [
            {p for at, ps in each.handed() if at > since for p in ps}
            for each in self.members
        ]
        share = self.partitions // len(NAMES)
        is_whole = len(set().union(*shares)) == self.partitions
        return is_whole and all(len(each) == share for each in shares)

    def gaps(self, start: float, end: float) -> dict[int, float]:
        """Return the longest gap of each partition in a window, in milliseconds."""
        times: dict[int, list[float]] = defaultdict(list)
        for each in self.members:
            for at, partitions in each.handed():
                if start <= at <= end:
                    for partition in partitions:
                        times[partition].append(at)
        return {
            partition: 1_000
            * max(b - a for a, b in pairwise([start, *sorted(times[partition]), end]))
            for partition in range(self.partitions)
        }

    def moving(self) -> set[int]:
        """Return the partitions whose keys move."""
        keys = (Key(self.group, self.topic, p) for p in range(self.partitions))
        return {
            key.partition
            for key in keys
            if place_of(key, partition_count=K) != place_of(key, partition_count=K_MORE)
        }

    def close(self) -> None:
        """End every process."""
        for each in self.members:
            each.end()


Kept = dict[str, list[float]]


def changed(servers: str, delivery: str, load: Load, *, rounds: int) -> Kept:
    """Double and halve the partition count in each round; return the gaps."""
    kept: Kept = defaultdict(list)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        pair = Pair(
            servers, Path(folder), delivery=delivery, partitions=load.partitions
        )
        stack.callback(pair.close)
        traffic = producing(
            servers, pair.topic, partitions=load.partitions, tick_s=TICK_S
        )
        stack.enter_context(traffic)
        admin = stack.enter_context(Admin(servers, coordination_topic=pair.log))
        moving = pair.moving()
        for count in (K_MORE, K) * rounds:
            pair.await_served()
            start = time.monotonic()
            took_s = resized(admin, count)
            time.sleep(load.after_s)
            end = time.monotonic()
            pair.await_served()
            quiet = time.monotonic()
            time.sleep(end - start)
            without = pair.gaps(quiet, quiet + end - start)
            found = pair.gaps(start, end)
            kept["moves"] += [found[p] for p in moving]
            kept["stays"] += [found[p] for p in found if p not in moving]
            kept["nothing"] += without.values()
            kept["took"].append(took_s)
            show_progress(
                f"{delivery}, to {count} in {took_s:.1f} s: moves "
                f"{max((found[p] for p in moving), default=0):.0f} ms, nothing "
                f"{max(without.values()):.0f} ms"
            )
    return kept


def at_p99(samples: Sequence[float]) -> float:
    """Return the 99th percentile."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(P99 * len(ordered)))]


def gap_figures(delivery: str, kept: Kept) -> list[dict[str, Any]]:
    """Return the figures of one kind of delivery."""
    name = DELIVERIES[delivery]
    found = []
    texts = {
        "moves": "a key that moves",
        "stays": "a key that stays",
        "nothing": "any key, without a change",
    }
    for kind, text in texts.items():
        if not kept[kind]:
            continue  # with few keys, all or none may move by chance
        what = f"{name}: longest gap of {text}"
        target = at_most(GAP_MS_MAX) if kind == "moves" else None
        p99 = figure(f"{what}, p99", "ms", [at_p99(kept[kind])], target=target)
        found += [figure(what, "ms", kept[kind]), p99]
    return [*found, figure(f"{name}: the whole change", "s", kept["took"])]


# --- a whole change


class Fleet:
    """Many members, each in its own group, in few processes."""

    def __init__(self, servers: str, folder: Path, *, load: Load) -> None:
        """Make the topics, start the processes and let them claim."""
        topic, stem = unique("data"), unique("group")
        self.log = formatted(servers)
        self.keys = load.members * load.held
        create_topic(servers, topic, partitions=load.held)
        everybody = [f"{stem}-{number}" for number in range(load.members)]
        self.processes = [
            Member(
                {
                    "servers": servers,
                    "topic": topic,
                    "log": self.log,
                    "members": everybody[number :: load.processes],
                    "held": load.held,
                    "path": str(folder / f"process-{number}"),
                },
                script=__file__,
            )
            for number in range(load.processes)
        ]
        for each in self.processes:
            each.await_ready()
            each.begin()

    def held(self, since: float) -> int:
        """Return how many keys all members hold, by notes after a time."""
        notes = [list(each.handed()) for each in self.processes]
        return sum(each[-1][1][0] for each in notes if each and each[-1][0] > since)

    def await_held(self) -> float:
        """Wait until the members hold all keys; return the seconds."""
        began = time.monotonic()
        while (held := self.held(began)) < self.keys:
            if time.monotonic() - began > SETTLE_S:
                raise Unsettled(f"{held} of {self.keys} keys are held")
            time.sleep(NOTE_S)
        return time.monotonic() - began

    def close(self) -> None:
        """End every process."""
        for each in self.processes:
            each.end()


def whole(servers: str, load: Load) -> tuple[dict[str, float], dict[str, float]]:
    """Double and halve the partition count with many keys.

    Returns:
        The seconds of each change, and the seconds from then until all keys are held,
        by notes that each process makes ten times a second.
    """
    took: dict[str, float] = {}
    again: dict[str, float] = {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        fleet = Fleet(servers, Path(folder), load=load)
        stack.callback(fleet.close)
        show_progress(f"{fleet.keys} keys held after {fleet.await_held():.1f} s")
        admin = stack.enter_context(Admin(servers, coordination_topic=fleet.log))
        for before, count in ((K, K_MORE), (K_MORE, K)):
            counts = f"{before} to {count}"
            took[counts] = resized(admin, count)
            again[counts] = fleet.await_held()
            show_progress(
                f"{counts} in {took[counts]:.1f} s, held {again[counts]:.1f} s later"
            )
    return took, again


def measure(servers: str, load: Load, *, rounds: int) -> list[dict[str, Any]]:
    """Return the figures."""
    found = []
    for delivery in DELIVERIES:
        kept = changed(servers, delivery, load, rounds=rounds)
        found += gap_figures(delivery, kept)
    what = f"{load.members * load.held:,} keys, {load.members} members"
    took, again = whole(servers, load)
    for counts, seconds in took.items():
        name = f"{what}: the whole change, {counts}"
        found.append(figure(name, "s", [seconds], target=at_most(WHOLE_S_MAX)))
    for counts, seconds in again.items():
        name = f"{what}: all held again after it, {counts}"
        found.append(figure(name, "s", [seconds]))
    return found


def main() -> None:
    """Run the benchmark and print its document."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    load = QUICK if options.quick else FULL
    with cluster(options.bootstrap_servers) as servers:
        figures = measure(servers, load, rounds=rounds)
    show_figures(figures)
    settings = {
        "rounds": rounds,
        "heartbeat_interval_ms": H_MS,
        "records_per_s_and_partition": round(1 / TICK_S),
        **attrs.asdict(load),
    }
    write_document(
        document("resize", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
