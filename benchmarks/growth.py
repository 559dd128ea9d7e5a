"""What claims, heartbeats and views cost as a fleet grows, over a cluster in memory.

Production engines, one per member, run in virtual time: first all start at once and
share out free partitions, then they hold them. One member is measured: the CPU time of
its steps, without that of the cluster in memory. The number of partitions grows with a
fixed number of members, and the reverse. The exponent of a power law is fitted to each
cost; 1 means linear growth.

Then one member alone holds many partitions, and its application polls and gets nothing.
Measured is the CPU time of the engine's thread per partition and heartbeat interval,
without work that runs on other threads in production.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from support import arguments, at_most, document, figure, show_progress, write_document

from kafka_marshal.config import ConsumerConfig
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.records import ClaimingPartition
from simulator.fakelog import AppendFate
from simulator.node import Cluster, ConsumerSpec, Node

H_MS = 12_000
K = 8
STEP_MS = 100
APPEND_MS = 10
STEADY_STEPS = H_MS // STEP_MS
START_LIMIT_MS = 20 * H_MS
VIEWS = 5
VIEW_MS_MAX = 5
# Numbers of partitions that one member holds while nothing else happens.
HELD = (1_000, 10_000)
HELD_H_MS = (5_000, 60_000)
HELD_US_MAX = 100
PARTITIONS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
MEMBERS = (1, 3, 10, 30, 100)
MEMBERS_FIXED = 3
PARTITIONS_FIXED = 300
COSTS = ("claim", "beat", "view")
# Costs may grow linearly; the rest is tolerance, because a fit is never exact.
EXPONENT_MAX = 1.1


class Stopwatch:
    """CPU time of this thread, in the parts that are measured."""

    def __init__(self) -> None:
        """Start at zero."""
        self.total_ns = 0

    @contextmanager
    def running(self, sign: int = 1) -> Iterator[None]:
        """Add the time of the block, or with ``sign`` -1 subtract it."""
        start_ns = time.thread_time_ns()
        try:
            yield
        finally:
            self.total_ns += sign * (time.thread_time_ns() - start_ns)

    def take(self) -> float:
        """Return the milliseconds so far, and start again."""
        total_ns, self.total_ns = self.total_ns, 0
        return total_ns / 1e6


class Latency:
    """Delays every append a moment, so that members do not see it at once."""

    def of_append(self, writer: str, partition: int) -> AppendFate:
        """Return the fate of an append."""
        del writer, partition
        return AppendFate(delay_ms=APPEND_MS)


class Fleet:
    """Members over one cluster; the first is measured."""

    def __init__(
        self, partitions: int, members: int, *, heartbeat_interval_ms: int = H_MS
    ) -> None:
        """Start all members at once."""
        self.heartbeat_interval_ms = heartbeat_interval_ms
        self.cluster = Cluster(
            heartbeat_interval_ms=heartbeat_interval_ms,
            partitions=K,
            policy=Latency(),
        )
        self.cluster.kafka.create_topic("t", partitions)
        self.partitions = partitions
        self.watch = Stopwatch()
        spec = ConsumerSpec(
            ConsumerConfig(topics=("t",), max_handling_ms=0, release_behind=False)
        )
        self.nodes = [
            self.cluster.node(f"m{number:03}", spec=spec) for number in range(members)
        ]
        self.watched = self.nodes[0]
        self._leave_out_the_cluster(self.watched)

    def _leave_out_the_cluster(self, node: Node) -> None:
        log: Any = node.log
        for name in ("poll", "append"):
            setattr(log, name, self._unwatched(getattr(log, name)))
        background: Any = node.background  # another thread in production
        background.submit = self._unwatched(background.submit)

    def _unwatched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def unwatched(*given: object) -> object:
            with self.watch.running(-1):
                return call(*given)

        return unwatched

    def step(self) -> None:
        """Advance the clock by ``STEP_MS``, and step all members."""
        self.cluster.clock.advance(STEP_MS)
        for node in self.nodes[1:]:
            node.step()
        with self.watch.running():
            self.watched.step()

    def held_us(self) -> float:
        """Return the CPU time per held partition and heartbeat interval."""
        consumer = self.watched.consumer
        assert consumer is not None
        steps = self.heartbeat_interval_ms // STEP_MS
        for _ in range(steps):
            self.step()
        self.watch.take()
        for _ in range(steps):
            consumer.poll(0)
            self.step()
        return self.watch.take() * 1_000 / len(self.watched.held)

    def is_shared_out(self) -> bool:
        """Return whether all members hold equal shares, and nothing moves."""
        held = [
            sum(
                h.claim.phase is Phase.HELD and h.drain is None for h in all_of.values()
            )
            for all_of in (node.session.holdings for node in self.nodes)
        ]
        return sum(held) == self.partitions and max(held) - min(held) <= 1

    def start(self) -> int:
        """Step until all partitions are shared out; return the virtual time."""
        for taken_ms in range(0, START_LIMIT_MS, STEP_MS):
            if self.is_shared_out():
                return taken_ms
            self.step()
        raise SystemExit(f"not shared out within {START_LIMIT_MS} ms of virtual time")

    def claims(self) -> int:
        """Return the number of claiming records in the log, also refused ones."""
        places = map(self.cluster.place, range(K))
        return sum(
            isinstance(decode(stored.value), ClaimingPartition)
            for place in places
            for stored in self.cluster.kafka.log(place).records
        )

    def view(self) -> float:
        """Return the milliseconds for one view and decision of the policy."""
        look = self.watched.session._apply_policies  # noqa: SLF001 - as a round does
        watch = Stopwatch()
        with watch.running():
            for _ in range(VIEWS):
                look(self.watched.clock.now_ms())
        return watch.take() / VIEWS


@attrs.frozen
class Point:
    """Costs of the measured member in one fleet.

    Attributes:
        partitions: Partitions of the topic.
        members: Members of the group.
        claim_ms: CPU time from the start until all partitions are shared out.
        beat_ms: CPU time per heartbeat interval while nothing changes.
        view_ms: CPU time of one view and decision of the policy.
        claims_each: Claiming records in the log, per partition.
        start_ms: Virtual time until all partitions are shared out.
    """

    partitions: int
    members: int
    claim_ms: float
    beat_ms: float
    view_ms: float
    claims_each: float
    start_ms: int


def run(partitions: int, members: int) -> Point:
    """Start a fleet, let it hold its partitions, and return the costs."""
    fleet = Fleet(partitions, members)
    start_ms = fleet.start()
    claim_ms = fleet.watch.take()
    claims_each = fleet.claims() / partitions
    for _ in range(STEADY_STEPS):
        fleet.step()
    beat_ms = fleet.watch.take() * H_MS / (STEADY_STEPS * STEP_MS)
    view_ms = fleet.view()
    point = Point(
        partitions=partitions,
        members=members,
        claim_ms=claim_ms,
        beat_ms=beat_ms,
        view_ms=view_ms,
        claims_each=claims_each,
        start_ms=start_ms,
    )
    show_progress(str(point))
    return point


def held_figures(held: Sequence[int]) -> list[dict[str, Any]]:
    """Return the costs of held partitions for the engine's thread at rest."""
    found = []
    for count in held:
        for interval_ms in HELD_H_MS:
            fleet = Fleet(count, 1, heartbeat_interval_ms=interval_ms)
            fleet.start()
            name = f"{count} held, H = {interval_ms // 1_000} s"
            cost = [fleet.held_us()]
            figures = [
                figure(
                    f"{name}: CPU of a partition and interval",
                    "us",
                    cost,
                    target=at_most(HELD_US_MAX),
                ),
                figure(
                    f"{name}: view", "ms", [fleet.view()], target=at_most(VIEW_MS_MAX)
                ),
            ]
            show_progress(f"{name}: {figures[0]['median']} us")
            found += figures
    return found


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return the exponent of the power law that fits best."""
    xs = [math.log(size) for size in sizes]
    ys = [math.log(cost) for cost in costs]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((one - x) * (other - y) for one, other in zip(xs, ys, strict=True))
    return above / sum((one - x) ** 2 for one in xs)


def figures(axis: str, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the growth of each cost along one axis."""
    sizes = [getattr(point, axis) for point in points]
    half = len(points) // 2
    found = []
    for cost in COSTS:
        costs = [getattr(point, f"{cost}_ms") for point in points]
        # Fit the upper half alone as well: small sizes can hide growth at large ones.
        fits = [exponent(sizes[at:], costs[at:]) for at in (0, half) if sizes[at + 1 :]]
        name = f"cost of {cost}s of a member, with {axis}"
        target = at_most(EXPONENT_MAX)
        found.append(figure(name, "exponent", [max(fits)], target=target))
    return found


def plot(along: dict[str, Sequence[Point]], path: Path) -> None:
    """Draw the costs along both axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "growth", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    drawing, panes = plt.subplots(1, len(along), figsize=(9, 3.6), sharey=True)
    for pane, (axis, points) in zip(panes, along.items(), strict=True):
        sizes = [getattr(point, axis) for point in points]
        for cost in COSTS:
            costs = [getattr(point, f"{cost}_ms") for point in points]
            pane.plot(sizes, costs, marker="o", markersize=3, label=cost)
        linear = [points[-1].claim_ms * size / sizes[-1] for size in sizes]
        pane.plot(sizes, linear, color="grey", linestyle=":", label="linear")
        pane.set(xscale="log", yscale="log", xlabel=axis)
        pane.grid(visible=True, alpha=0.3)
    panes[0].set_ylabel("CPU ms of one member")
    panes[0].legend(fontsize=8)
    panes[0].set_title(f"{MEMBERS_FIXED} members", fontsize=9)
    panes[1].set_title(f"{PARTITIONS_FIXED} partitions", fontsize=9)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run the benchmark and print its document."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--plot", type=Path, help="draw the costs into a file")
    parser.add_argument(
        "--held", action="store_true", help="only one member that holds many"
    )
    parser.add_argument(
        "--full", action="store_true", help="also 10,000 partitions of 100 members"
    )
    options = parser.parse_args()
    counts, members = (PARTITIONS, MEMBERS)
    fixed = (PARTITIONS_FIXED, MEMBERS_FIXED)
    if options.quick:
        counts, members, fixed = (10, 30, 100), (1, 3), (20, 2)
    along: dict[str, Sequence[Point]] = {}
    if not options.held:
        along = {
            "partitions": [run(count, fixed[1]) for count in counts],
            "members": [run(fixed[0], count) for count in members],
        }
    found = [each for axis in along for each in figures(axis, along[axis])]
    found += held_figures(HELD[:1] if options.quick else HELD)
    points = [attrs.asdict(point) for axis in along.values() for point in axis]
    if options.full:
        points.append(attrs.asdict(run(PARTITIONS[-1], MEMBERS[-1])))
    if options.plot is not None and along:
        plot(along, options.plot)
    settings = {
        "heartbeat_interval_ms": H_MS,
        "coordinating_partitions": K,
        "step_ms": STEP_MS,
        "members_fixed": fixed[1],
        "partitions_fixed": fixed[0],
    }
    write_document(
        document(
            "growth",
            found,
            settings=settings,
            is_quick=options.quick,
            more={"points": points},
        ),
        options.out,
    )


if __name__ == "__main__":
    main()
