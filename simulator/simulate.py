"""A deterministic simulation of a whole fleet (PROTOCOL 11).

Clients with the production engine, session and consumer run over a cluster in
memory on virtual time, one thread, one call at a time. A seed draws the world and
all faults in it (swarm testing); the same seed gives the same run, byte for byte.
Safety is checked after every call; then everything is healed, and liveness is
demanded, with its bounds.
"""

from collections.abc import Collection, Sequence
from functools import partial
from random import Random

from kafka_marshal.config import Delivery
from kafka_marshal.gc_pause import uncollected
from simulator.build import build
from simulator.checkers import Violation
from simulator.fleet import Fleet
from simulator.healing import Healing, judge_history
from simulator.outcome import Report, RunFailed, violation_of
from simulator.plan import (
    ASKED_FOR,
    FAULTS,
    MINUTE_MS,
    POSITIONS,
    RECREATE,
    TRUNCATE,
    Plan,
    chance,
    draw,
)
from simulator.strikes import Strikes
from simulator.world import World

__all__ = [
    "ASKED_FOR",
    "FAULTS",
    "POSITIONS",
    "PROGRAM",
    "RECREATE",
    "TRUNCATE",
    "Report",
    "SimulationFailed",
    "run_plan",
    "simulate",
]

PROGRAM = "python -m simulator"
DURATION_MS = 10 * MINUTE_MS
PRODUCE_EVERY_MS = (500, 20_000)
PRODUCE_MAX = 4


class SimulationFailed(RunFailed):
    """A run broke an invariant; the message shows how to repeat it.

    Attributes:
        plan: The plan as drawn, with the faults that struck.
    """

    def __init__(self, plan: Plan, violation: Violation, transcript: list[str]) -> None:
        command = f"{PROGRAM} --seed {plan.seed} --transcript"
        minutes = plan.duration_ms // MINUTE_MS
        if minutes * MINUTE_MS == plan.duration_ms:
            command += f" --minutes {minutes}"
        struck = ",".join(str(fault.number) for fault in plan.faults)
        super().__init__(
            plan.seed,
            violation,
            repeat=f"of kafka-marshal {build()}, {plan.delivery.value}; repeat it "
            f"with: {command} --faults {','.join(plan.kinds)} --only {struck}",
            transcript=transcript,
        )
        self.plan = plan


def run_plan(plan: Plan, *, by_history: bool = False) -> Report:
    """Run a plan: let faults strike, heal them, and demand liveness.

    Args:
        plan: The plan.
        by_history: Judge neither steps nor liveness, only the history of the processes,
            as on a real cluster.

    Raises:
        SimulationFailed: An invariant was broken, or the run raised an error.
    """
    # A run has almost no garbage, and its collection takes a fifth of the time.
    with uncollected(leaves_garbage=True):
        return _run_plan(plan, by_history=by_history)


def _run_plan(plan: Plan, *, by_history: bool) -> Report:
    world = World(plan, is_judged=not by_history)
    world.is_truncating = world.levels.may_lose = TRUNCATE in plan.kinds
    if world.is_truncating:
        world.watcher.may_fall = world.readings.is_excused
    fleet = Fleet(world)
    world.on_news = fleet.on_news
    strikes = Strikes(world, fleet)
    start_ms = world.now_ms
    kinds = " ".join(plan.kinds) or "nothing"
    world.trace(f"{plan.delivery.value} H={plan.h_ms} goes wrong: {kinds}")
    for fault in plan.during:
        world.loop.at(start_ms + fault.at_ms, partial(strikes.strike, fault))
    for _ in range(plan.clients):
        fleet.admit()
    _produce(world, chance(plan.seed, "produce when"))
    try:
        world.run(plan.duration_ms)
        if by_history:
            judge_history(world)
        else:
            Healing(world, fleet, strikes).run()
    except Exception as error:
        violation = violation_of(error)
        raise SimulationFailed(plan, violation, world.transcript) from error
    finally:
        strikes.admins.close()
        strikes.resizes.close()
        fleet.keeping.close()
    return Report.of(
        plan.seed,
        plan.kinds,
        virtual_ms=world.now_ms - start_ms,
        hand_outs=world.hand_outs,
        watcher=world.watcher,
        seen=world.coverage.counts,
        transcript=world.transcript,
    )


def _produce(world: World, rng: Random) -> None:
    """Produce records now and then, as long as faults strike."""
    every_ms = rng.randint(*PRODUCE_EVERY_MS)

    def again() -> None:
        if not world.is_healed:
            world.produce(rng.randint(1, PRODUCE_MAX))
            world.loop.at(world.now_ms + rng.randint(1, 2 * every_ms), again)

    again()


def simulate(
    seed: int,
    *,
    delivery: Delivery | None = None,
    faults: Sequence[str] | None = None,
    also: Sequence[str] = (),
    duration_ms: int = DURATION_MS,
    only: Collection[int] | None = None,
    by_history: bool = False,
) -> Report:
    """Run one seed.

    Args:
        seed: Decides everything.
        delivery: The guarantee of delivery; None: drawn.
        faults: Kinds of faults, of ``FAULTS`` and ``ASKED_FOR``; None: drawn.
        also: Additional kinds of faults.
        duration_ms: How long faults strike, in virtual time.
        only: Numbers of the faults that strike; None for all.
        by_history: Judge only by the history; see ``run_plan``.

    Returns:
        The report, if every invariant held.

    Raises:
        SimulationFailed: An invariant was broken; the message shows how to repeat it.
    """
    plan = draw(
        seed, delivery=delivery, faults=faults, also=also, duration_ms=duration_ms
    )
    kept = plan if only is None else plan.keeping(only)
    return run_plan(kept, by_history=by_history)
