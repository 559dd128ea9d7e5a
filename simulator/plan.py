"""The plan that a seed draws: a world, and all faults in it, as data.

Faults are drawn before the run, independently of it: the process that a fault hits is
an index into the processes that exist by then. So a run can be repeated without some of
its faults, which is how a failure is shrunk.
"""

import random
from collections.abc import Collection, Sequence
from functools import partial

import attrs

from kafka_marshal.config import Delivery

MINUTE_MS = 60_000
PRESENT = 0.5
KEPT_PRESENT = 0.4
RARE = 0.2
NO_PLANNER, FEW_PLANNERS = 0.15, 0.4
CHECKPOINT = "checkpoint"
KEEP = "keep"
RESET = "reset"
KEPT = (CHECKPOINT, KEEP, "tear", RESET)
"""Faults of kept states; drawn separately, so that other faults stay as drawn."""
DAMAGE_PRESENT = 1 / 8
DAMAGE = "damage"
"""Damage to the files that hosts keep; drawn separately, and implies ``keep``."""
ABOVE_PRESENT = 1 / 8
HALT_PRESENT = 1 / 25
ABOVE = "above"
LEVEL = "level"
HALT = "halt"
LEVELS = (ABOVE, LEVEL, HALT)
"""Faults of feature levels: records above the level in force, Configs of other levels
that all can follow or that are refused, and a last one that no process can follow;
drawn separately, too."""
_FAULTS = (
    "delay",
    "late",
    "loss",
    "copies",
    "slow",
    "cut",
    "deaf",
    "mute",
    "crash",
    "stop",
    "failover",
    "step",
    "pause",
    "churn",
    "hostile",
    "twin",
    "edge",
    "attempt",
    "drift",
)
FAULTS = (*_FAULTS, *KEPT, *LEVELS, DAMAGE)
"""Kinds of faults; a seed draws which of these exist in its world."""
TRUNCATE = "truncate"
"""Only on request: logs lose records that were read, on which rules depend."""
RECREATE = "recreate"
"""Only on request: the data topic is replaced, which ends all work on old records."""
POSITIONS = "positions"
"""Only on request: admins set positions, and die during that."""
FENCES = "fences"
"""Only on request: admins fence processes."""
SCHEDULES = "schedules"
"""Only on request: admins schedule pauses, and are gone when these begin."""
GROWTH = "growth"
"""Only on request: admins add partitions to the data topic, and die during that."""
SEEKS = "seeks"
"""Only on request: members seek in their own claims."""
PLANS = "plans"
"""Only on request: the group follows Plans, and some are nonsense."""
RESIZE = "resize"
"""Only on request: the number of coordinating partitions changes, and the admin that
began the change may die at each step."""
RESIZE_STEPS = (
    "add",
    "probe",
    "first_fence",
    "fence",
    "import",
    "groups",
    "done",
    "first_final",
    "final",
)
"""Steps of an admin's change: a call that adds Kafka partitions, then records of these
kinds; the first fence and the first Final are those of partition 0."""
RESIZE_COUNTS = {4: (8, 16), 8: (16, 4), 16: (8, 4)}
"""The numbers of coordinating partitions to which each number may change."""
OF_ADMINS = (POSITIONS, FENCES, SCHEDULES, GROWTH)
ASKED_APART = (*OF_ADMINS, SEEKS, PLANS, RESIZE)
"""Kinds of faults that are drawn separately, each by itself."""
GARBAGE_POLICY = "garbage-policy"
"""Only on request: policies advise nonsense, raise, or never return."""
HANDOFFS = "handoffs"
"""Only on request: members warm up, late, never, or die during that."""
STANDBYS = "standbys"
"""Only on request: members stand by for the keys of others."""
ASKED_FOR = (TRUNCATE, RECREATE, *ASKED_APART, GARBAGE_POLICY, HANDOFFS, STANDBYS)
UNFIT_BESIDE_ADMINS = frozenset({RESET, LEVEL})
"""Faults that tools refuse to write while an operation is open (PROTOCOL 8.6), or that
take back the records of admins or their level."""
UNFIT_BESIDE_RESIZE = frozenset({HALT})
"""Faults that end all work, even if a change is open."""
CONDITIONS = frozenset({"drift", CHECKPOINT, GARBAGE_POLICY, HANDOFFS, STANDBYS})
"""Kinds that are permanent conditions, not events."""


@attrs.frozen(kw_only=True)
class Fault:
    """One fault.

    Attributes:
        number: Identifies the fault in its run.
        at_ms: Time at which it strikes, since the start; beyond the duration, it
            strikes once everything has healed.
        kind: One of ``FAULTS`` or ``ASKED_FOR``.
        for_ms: Duration of a fault that lasts.
        who: The process or partition that is hit: an index, modulo those present.
        size: Any other parameter, 0 to 99, such as a chance or a direction.
    """

    number: int
    at_ms: int
    kind: str
    for_ms: int
    who: int
    size: int


@attrs.frozen(kw_only=True)
class Plan:
    """Everything that a seed decides before its run.

    Attributes:
        seed: The seed that it was drawn from.
        h_ms: The heartbeat interval.
        delivery: The guarantee of delivery.
        kinds: Kinds of faults that exist in this world.
        faults: The faults, with the times at which they strike.
        duration_ms: How long faults strike.
        coordinators: Number of coordinating partitions.
        partitions: Number of data partitions.
        clients: Number of clients at the start.
        policy: Name of the clients' policy.
        poll_max: Maximum number of records of one poll.
        depth_max: Maximum number of granted batches.
        handling: How long applications take: quick, slow or long.
        gives_up_slow: Whether slow applications give partitions up.
        latency_ms: Maximum ordinary time to the log and back.
        drift_ppm: Largest drift of any clock.
        ending: The demand on the fleet at the end: kill or pause.
    """

    seed: int
    h_ms: int
    delivery: Delivery
    kinds: tuple[str, ...]
    faults: tuple[Fault, ...]
    duration_ms: int
    coordinators: int
    partitions: int
    clients: int
    policy: str
    poll_max: int
    depth_max: int
    handling: str
    gives_up_slow: bool
    latency_ms: int
    drift_ppm: int
    ending: str

    @property
    def during(self) -> tuple[Fault, ...]:
        """The faults that strike before everything is healed."""
        return tuple(each for each in self.faults if each.at_ms < self.duration_ms)

    @property
    def after(self) -> tuple[Fault, ...]:
        """The faults that strike after everything is healed."""
        return tuple(each for each in self.faults if each.at_ms >= self.duration_ms)

    def keeping(self, numbers: Collection[int]) -> "Plan":
        """Return the same world with only these faults."""
        kept = tuple(fault for fault in self.faults if fault.number in numbers)
        return attrs.evolve(self, faults=kept)


def chance(seed: int, purpose: str) -> random.Random:
    """Return random numbers that depend only on a seed and a purpose."""
    return random.Random(f"{seed}/{purpose}")  # noqa: S311 - repeatable on purpose


def draw(
    seed: int,
    *,
    delivery: Delivery | None = None,
    faults: Sequence[str] | None = None,
    also: Sequence[str] = (),
    duration_ms: int = 10 * MINUTE_MS,
) -> Plan:
    """Draw a world.

    Args:
        seed: Decides everything.
        delivery: The guarantee of delivery; None: drawn.
        faults: Kinds of faults, of ``FAULTS`` and ``ASKED_FOR``; None: drawn.
        also: Additional kinds of faults.
        duration_ms: How long faults strike.
    """
    rng = chance(seed, "world")
    h_ms = rng.choice([5_000, 10_000, 20_000, 30_000])
    drawn = rng.choice(list(Delivery))
    lot = tuple(name for name in _FAULTS if rng.random() < PRESENT)
    kept = _draw_kept(seed)
    apart = (*kept, *_draw_levels(seed), *_draw_damage(seed, kept))
    kinds = (*lot, *apart) if faults is None else tuple(faults)
    kinds = (*kinds, *(each for each in also if each not in kinds))
    if not set(ASKED_APART).difference({RESIZE}).isdisjoint(kinds):
        # With seeks and plans, but no admins, they stay if requested.
        asked = also if set(OF_ADMINS).isdisjoint(kinds) else ()
        unfit = UNFIT_BESIDE_ADMINS.difference(asked)
        kinds = tuple(each for each in kinds if each not in unfit)
    if RESIZE in kinds:
        kinds = tuple(each for each in kinds if each not in UNFIT_BESIDE_RESIZE)
    return Plan(
        seed=seed,
        h_ms=h_ms,
        delivery=delivery or drawn,
        kinds=kinds,
        faults=_draw_faults(seed, kinds, h_ms=h_ms, duration_ms=duration_ms),
        duration_ms=duration_ms,
        **_draw_size(seed, kinds, rng),
        clients=rng.randint(1, 4),
        policy=rng.choice(["fair", "fair", "greedy"]),
        poll_max=rng.choice([1, 3, 20]),
        depth_max=rng.choice([1, 2, 4, 8]),
        handling=rng.choice(["quick", "quick", "slow", "long"]),
        gives_up_slow=rng.choice([False, True]),
        latency_ms=rng.choice([0, 1, 5, 30]),
        drift_ppm=450 if "drift" in kinds else 0,
        ending=rng.choice(["kill", "pause"]),
    )


def _draw_size(seed: int, kinds: tuple[str, ...], rng: random.Random) -> dict[str, int]:
    """Draw the numbers of partitions: several if positions are set."""
    size = {"coordinators": rng.choice([1, 1, 2, 3]), "partitions": rng.randint(1, 4)}
    if RESIZE in kinds:
        apart = chance(seed, "resize sizes")
        return {"coordinators": 4, "partitions": apart.randint(3, 6)}
    if POSITIONS not in kinds:
        # With handoffs, at least two keys: a single key is never handed off.
        return {**size, "partitions": size["partitions"] + (HANDOFFS in kinds)}
    apart = chance(seed, "position sizes")
    return {
        "coordinators": apart.choice([1, 2, 2, 3, 3, 4]),
        "partitions": apart.randint(2, 5),
    }


def _draw_faults(
    seed: int, kinds: tuple[str, ...], *, h_ms: int, duration_ms: int
) -> tuple[Fault, ...]:
    striking = [name for name in kinds if name not in CONDITIONS]
    drawn_apart = {*KEPT, *LEVELS, DAMAGE, *ASKED_APART}
    first = [name for name in striking if name not in drawn_apart]
    kept = [name for name in striking if name in KEPT]
    levels = [name for name in striking if name in LEVELS and name != HALT]
    times = partial(_draw_times, h_ms=h_ms, duration_ms=duration_ms)
    faults = [
        *times(chance(seed, "faults"), first),
        *times(chance(seed, "kept"), kept),
        *times(chance(seed, "levels"), levels),
        *times(chance(seed, "damage"), [name for name in striking if name == DAMAGE]),
    ]
    for name in ASKED_APART:
        if name in striking:
            # An operation takes some intervals; most have time to end.
            factor = 4 if name == RESIZE else 2
            faults += times(chance(seed, name), [name], h_ms=factor * h_ms)
    if HALT in striking:
        faults.append(_draw_halt(chance(seed, "halt"), duration_ms))
    return tuple(
        attrs.evolve(each, number=number) for number, each in enumerate(faults, 1)
    )


def _draw_levels(seed: int) -> tuple[str, ...]:
    """Draw the faults of feature levels."""
    rng = chance(seed, "level kinds")
    has_above, has_halt = rng.random() < ABOVE_PRESENT, rng.random() < HALT_PRESENT
    has_level = rng.random() < PRESENT and (has_above or has_halt)
    drawn = zip(LEVELS, (has_above, has_level, has_halt), strict=True)
    return tuple(name for name, is_there in drawn if is_there)


def _draw_damage(seed: int, kept: tuple[str, ...]) -> tuple[str, ...]:
    """Draw whether files get damaged; that requires ``keep``."""
    if chance(seed, "damage kinds").random() >= DAMAGE_PRESENT:
        return ()
    return (DAMAGE,) if KEEP in kept else (KEEP, DAMAGE)


def _draw_halt(rng: random.Random, duration_ms: int) -> Fault:
    """Draw the Config that none can follow: late, or once everything has healed."""
    late_ms = duration_ms - 1 - int(rng.random() * duration_ms / 2)
    at_ms = duration_ms if rng.random() < PRESENT else late_ms
    return Fault(
        number=0,
        at_ms=at_ms,
        kind=HALT,
        for_ms=0,
        who=rng.randrange(1_000_000),
        size=rng.randrange(100),
    )


def _draw_kept(seed: int) -> tuple[str, ...]:
    """Draw the faults of kept states; all others of them depend on checkpoints."""
    rng = chance(seed, "kept kinds")
    if rng.random() >= KEPT_PRESENT:
        return ()
    rest = tuple(
        name
        for name in KEPT
        if name != CHECKPOINT and rng.random() < (RARE if name == RESET else PRESENT)
    )
    return (CHECKPOINT, *rest)


def _draw_times(
    rng: random.Random, striking: Sequence[str], *, h_ms: int, duration_ms: int
) -> tuple[Fault, ...]:
    # In some worlds faults are rare, in others they come together.
    every_ms = rng.choice([h_ms // 2, h_ms, 2 * h_ms, 4 * h_ms])
    faults: list[Fault] = []
    at_ms = rng.randint(0, 2 * h_ms)
    while striking and at_ms < duration_ms:
        faults.append(
            Fault(
                number=len(faults) + 1,
                at_ms=at_ms,
                kind=rng.choice(striking),
                for_ms=_draw_span_ms(rng, h_ms),
                who=rng.randrange(1_000_000),
                size=rng.randrange(100),
            )
        )
        at_ms += 1 + int(rng.expovariate(1 / every_ms))
    return tuple(faults)


def _draw_span_ms(rng: random.Random, h_ms: int) -> int:
    """Draw how long something lasts: often short, at times many leases."""
    if rng.random() < 0.2:  # noqa: PLR2004 - close to where rules change
        return rng.choice([1, 2]) * h_ms + rng.choice([-1, 0, 1])
    return rng.randint(1, rng.choice([1, 2, 4, 8]) * h_ms)


def can_plan(seed: int, start: int) -> bool:
    """Draw whether a process may plan.

    Args:
        seed: Seed of the run.
        start: Number of the process.
    """
    kind = chance(seed, "planners").random()
    if kind < NO_PLANNER:
        return False
    few = chance(seed, f"plans/{start}").random() < FEW_PLANNERS
    return kind > FEW_PLANNERS or few
