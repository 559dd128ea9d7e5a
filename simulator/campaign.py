"""Runs many seeds, on several processors, and sums up their outcomes."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial

import attrs

from simulator.build import build
from simulator.coverage import (
    FENCED,
    GREW,
    HANDED,
    PLANNED,
    RESIZED,
    SCHEDULED,
    SET,
    SITUATIONS,
    SOUGHT,
    STOOD_BY,
)
from simulator.plan import (
    FENCES,
    GROWTH,
    HANDOFFS,
    MINUTE_MS,
    PLANS,
    POSITIONS,
    RESIZE,
    SCHEDULES,
    SEEKS,
    STANDBYS,
    Plan,
    draw,
)
from simulator.shrink import shrink
from simulator.simulate import SimulationFailed, run_plan

ASKED_OF = {
    POSITIONS: SET,
    FENCES: FENCED,
    SCHEDULES: SCHEDULED,
    GROWTH: GREW,
    SEEKS: SOUGHT,
    RESIZE: RESIZED,
    PLANS: PLANNED,
    HANDOFFS: HANDED,
    STANDBYS: STOOD_BY,
}
"""Situations that suites must reach, by additional kind of fault."""
BATCH = 10
BATCH_S_MAX = 3_600
SUITE_SEEDS_MIN = 200
"""A run of at least this many seeds, with every fault, must reach each situation."""


@attrs.frozen
class CampaignOptions:
    """The options that all seeds are run with.

    Attributes:
        faults: Kinds of faults that exist; None: each seed draws them.
        also: Additional kinds of faults.
        minutes: How long faults strike, in simulated minutes.
        only: Numbers of the faults that strike; None for all.
        shrinks: Whether failures are shrunk to few faults.
    """

    faults: tuple[str, ...] | None = None
    also: tuple[str, ...] = ()
    minutes: int = 10
    only: tuple[int, ...] | None = None
    shrinks: bool = False

    def plan(self, seed: int) -> Plan:
        """Return the plan that a seed stands for."""
        plan = draw(
            seed,
            faults=self.faults,
            also=self.also,
            duration_ms=self.minutes * MINUTE_MS,
        )
        return plan if self.only is None else plan.keeping(self.only)


@attrs.frozen
class Broken:
    """A seed that broke a rule.

    Attributes:
        seed: The seed.
        invariant: The rule, such as ``S4``; ``error`` if the run raised an error.
        message: What happened.
        faults: Numbers of the faults that struck, after shrinking if requested.
    """

    seed: int
    invariant: str
    message: str
    faults: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Outcome:
    """The outcome of one seed, without its transcript.

    Attributes:
        broken: The rule that it broke, None if all held.
        seen: How often each situation was reached.
        faults: How often each kind of fault struck.
        virtual_ms: Duration of the run in virtual time.
        cpu_ms: Processor time of the run.
    """

    broken: Broken | None
    seen: Mapping[str, int]
    faults: Mapping[str, int]
    virtual_ms: int
    cpu_ms: int


@attrs.define(kw_only=True)
class Summary:
    """The outcome of all seeds together.

    Attributes:
        build: Release and commit that was run.
        options: The options of each seed.
        seed_count: Number of seeds.
        broken: Seeds that broke a rule, in order.
        seen: How often each situation was reached, in all.
        faults: How often each kind of fault struck, in all.
        virtual_ms: Virtual time, in all.
        cpu_ms: Processor time, in all.
        wall_ms: Wall time that the campaign took.
    """

    build: str
    options: CampaignOptions
    seed_count: int = 0
    broken: list[Broken] = attrs.field(factory=list)
    seen: Counter[str] = attrs.field(factory=Counter)
    faults: Counter[str] = attrs.field(factory=Counter)
    virtual_ms: int = 0
    cpu_ms: int = 0
    wall_ms: int = 0

    def add(self, outcome: Outcome) -> None:
        """Add the outcome of a seed."""
        self.seed_count += 1
        self.seen.update(outcome.seen)
        self.faults.update(outcome.faults)
        self.virtual_ms += outcome.virtual_ms
        self.cpu_ms += outcome.cpu_ms
        if outcome.broken is not None:
            self.broken.append(outcome.broken)

    @property
    def seeds_per_minute(self) -> float:
        """Seeds per minute of one processor."""
        return self.seed_count * 60_000 / max(1, self.cpu_ms)

    @property
    def never(self) -> tuple[str, ...]:
        """Situations that were never reached."""
        return tuple(name for name in self.situations if not self.seen[name])

    @property
    def situations(self) -> Mapping[str, str]:
        """Situations that are counted, with their meanings."""
        asked = {
            name: meaning
            for kind, situations in ASKED_OF.items()
            if kind in self.options.also
            for name, meaning in situations.items()
        }
        return asked or SITUATIONS

    @property
    def is_suite(self) -> bool:
        """Whether there were enough seeds to demand every situation."""
        whole = self.options.faults is None and self.options.only is None
        return whole and self.seed_count >= SUITE_SEEDS_MIN

    @property
    def held(self) -> bool:
        """Whether no rule was broken and, for a suite, every situation was reached."""
        return not self.broken and not (self.is_suite and self.never)


def judge(seed: int, options: CampaignOptions) -> Outcome:
    """Run one seed; a broken rule or an error in the run is not raised."""
    plan = options.plan(seed)
    faults = Counter(fault.kind for fault in plan.faults)
    since = time.process_time_ns()
    broken, seen, virtual_ms = None, {}, 0
    try:
        report = run_plan(plan)
        seen, virtual_ms = dict(report.seen), report.virtual_ms
    except SimulationFailed as failure:
        small = shrunk(failure) if options.shrinks else plan
        kept = tuple(fault.number for fault in small.faults)
        broken = Broken(
            seed=seed,
            invariant=failure.invariant,
            message=failure.finding,
            faults=kept,
        )
    cpu_ms = (time.process_time_ns() - since) // 1_000_000
    return Outcome(
        broken=broken, seen=seen, faults=faults, virtual_ms=virtual_ms, cpu_ms=cpu_ms
    )


def shrunk(failure: SimulationFailed) -> Plan:
    """Return few faults of a failed run that break the same rule."""

    def fails(plan: Plan) -> bool:
        try:
            run_plan(plan)
        except SimulationFailed as again:
            return again.invariant == failure.invariant
        return False

    return shrink(failure.plan, fails)


def _judge_batch(seeds: Sequence[int], options: CampaignOptions) -> list[Outcome]:
    return [judge(seed, options) for seed in seeds]


def outcomes(
    seeds: Sequence[int], options: CampaignOptions, *, jobs: int
) -> Iterator[Outcome]:
    """Run seeds on ``jobs`` processors, and yield their outcomes in any order."""
    if jobs == 1:
        yield from (judge(seed, options) for seed in seeds)
        return
    batches = [seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH)]
    with ProcessPoolExecutor(jobs) as pool:
        tasks = [
            pool.submit(partial(_judge_batch, batch, options)) for batch in batches
        ]
        for task in as_completed(tasks, timeout=BATCH_S_MAX * len(batches)):
            yield from task.result(timeout=0)


def run_seeds(seeds: Sequence[int], options: CampaignOptions, *, jobs: int) -> Summary:
    """Run seeds and sum up their outcomes."""
    summary = Summary(build=build(), options=options)
    since = time.monotonic_ns()
    for outcome in outcomes(seeds, options, jobs=jobs):
        summary.add(outcome)
    summary.broken.sort(key=lambda broken: broken.seed)
    summary.wall_ms = (time.monotonic_ns() - since) // 1_000_000
    return summary
