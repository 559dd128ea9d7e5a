"""A deterministic simulation of sidecars and their clients (PROTOCOL 11, 12).

Clients of one or two hosts, each through the sidecar of its host, share a group with
plain consumers. As in ``simulator``, a seed draws the world, its kinds of faults and
every later choice; the same seed gives the same run, byte for byte. Safety is checked
after every step; then everything is healed, and liveness is demanded.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kafka_marshal.config import Delivery
from kafka_marshal.engine.planning import ORPHAN_MS_MAX
from kafka_marshal.protocol.layout_steps import FINAL_AFTER_MS
from kafka_marshal.protocol.types import TopicPartition
from simulator.base import GROUP, Liveness
from simulator.checkers import Violation
from simulator.garbage import GARBAGE_HS, installed
from simulator.outcome import Report, RunFailed, violation_of
from simulator.plan import FENCES, GARBAGE_POLICY, HANDOFFS, PLANS, chance
from simulator.position_judge import unresolved_in
from simulator.positions import ENDS_HS_MAX, PAUSE_HS_MAX
from simulator.sidecar.client import Hosted
from simulator.sidecar.faults import Troubles
from simulator.sidecar.world import (
    CLAIMED_TOPIC,
    POSITIONS,
    HostedWorld,
    Place,
    Process,
)

HEALED_STEP_MS = 50
DEATH_MS = 1_000
TAKEOVER_HS = 3
RESOLVE_HS = 12
RESIZE_HS = 12
WORK_MS = 400
PRODUCED = 0.3
STRUCK = 0.15
UNANSWERED = frozenset(
    {
        *("answers", "line", "hang", "suspend", "crash", "drain"),
        *("delay", "late", "loss", "cut"),
        FENCES,
    }
)
"""Faults that leave requests for offsets without an answer: their grants are not handed
out, and the log does not list them."""


class HostedSimulation(Liveness):
    """One seeded run of a world; ``run`` executes it."""

    def __init__(self, world: HostedWorld) -> None:
        super().__init__(world, h_ms=world.h)
        self.world = world
        self._troubles = Troubles(world)

    def run(self, *, rounds: int = 200) -> Report:
        """Let faults strike for some rounds, heal them, and demand liveness.

        Raises:
            RunFailed: An invariant was broken.
        """
        world = self.world
        start_ms = world.now_ms
        world.trace(f"{world.delivery.value} H={world.h} {sorted(world.faults)}")
        try:
            for _ in range(rounds):
                self._round()
            self._heal()
        except Exception as error:
            raise RunFailed(
                world.seed,
                violation_of(error),
                repeat=f"repeat it with: simulate_hosted({world.seed})",
                transcript=world.transcript,
            ) from error
        finally:
            self._troubles.admins.close()
            self._troubles.resizes.close()
            for place in world.hosts:
                place.host.crash()
        return Report.of(
            world.seed,
            sorted(world.faults),
            virtual_ms=world.now_ms - start_ms,
            hand_outs=world.hand_outs,
            watcher=world.watcher,
            seen=world.counts,
            transcript=world.transcript,
        )

    def _round(self) -> None:
        world, rng = self.world, self.world.rng
        world.pass_time(rng.choice([1, 10, 50, 50, 100, 200, world.h // 4]))
        if world.chance(PRODUCED):
            world.produce(rng.randint(1, 4))
        if world.chance(STRUCK):
            self._troubles.strike()
        actors: list[Process | Place] = [*world.processes, *world.hosts]
        for actor in rng.sample(actors, len(actors)):
            if isinstance(actor, Place):
                world.drive_host(actor)
            else:
                world.drive(actor)
            world.check()

    # --- healing

    def _heal(self) -> None:
        world = self.world
        world.trace("everything is healed")
        world.is_broken = False
        world.fates.faults = ()
        for place in world.hosts:
            place.wakes_ms = place.mends_ms = 0
            place.host.cut(is_cut=False)
            if not place.host.is_up:
                place.starts_ms = 0
        for process in world.processes:
            process.wakes_ms = 0
            world.mend(process)
        if not any(self._is_consumer(process) for process in world.processes):
            world.join(world.rng.choice([*world.hosts, None]))
        world.produce(5)
        # Appends in flight still land.
        self._troubles.end_pauses()
        self._live(TAKEOVER_HS * world.h)
        if POSITIONS in world.faults:
            self._all_resolved()
        if world.is_resizing:
            self._all_resized()
            self._resize()
        self._demand_calm()
        self._demand_owned("L6", self._owned_ms)
        base_ms = TAKEOVER_HS * world.h + 3 * self._garbage_ms
        self._demand_done(base_ms=base_ms, record_ms=WORK_MS)
        if not self._garbage_ms and HANDOFFS not in world.faults:
            self._demand_rest()  # members that warm up slowly get their keys late
        self._check_death()
        self._check_drain()
        if world.delivery is Delivery.AT_MOST_ONCE and not world.faults & UNANSWERED:
            config = world.spec.config
            batches = config.max_granted_batches
            world.hand_outs.check_losses(most=batches * config.max_poll_records)

    def _all_resolved(self) -> None:
        """8.5: demand that no lock and no commit stays, even if admins died."""
        h, worlds = self.world.h, self.world.watcher.worlds
        if not self._gets(ENDS_HS_MAX * h, self._troubles.admins.are_done):
            raise Violation("8.6", "an admin did not end in time")
        limit_ms = (PAUSE_HS_MAX + RESOLVE_HS) * h
        if not self._gets(limit_ms, lambda: not unresolved_in(worlds)):
            left = unresolved_in(worlds)
            raise Violation("8.5", f"{left} are unresolved after {limit_ms} ms")
        self._live(limit_ms)  # pauses run out

    def _all_resized(self) -> None:
        """10: demand that members and sidecars end the changes that admins left."""
        limit_ms = 2 * FINAL_AFTER_MS + RESIZE_HS * self.world.h
        resizes = self._troubles.resizes
        if not self._gets(limit_ms, resizes.are_over):
            raise Violation("10", f"a change is open after {limit_ms} ms: {resizes}")

    def _resize(self) -> None:
        """10: demand that no change, completed or given up, prevents another one."""
        changes = self._troubles.resizes.changes
        before = len(changes.ended)
        self._troubles.resizes.strike_again()
        self._all_resized()
        if len(changes.ended) == before:
            raise Violation("10", "a change is refused, but nothing prevents it")

    @property
    def _garbage_ms(self) -> int:
        is_garbage = GARBAGE_POLICY in self.world.faults
        return GARBAGE_HS * self.world.h if is_garbage else 0

    @property
    def _owned_ms(self) -> int:
        h = self.world.h
        return TAKEOVER_HS * h + h // 10 + self._garbage_ms + self._planning_ms

    @property
    def _planning_ms(self) -> int:
        """Bound of planning: twice the wait of 9.6, and a release to a dead member."""
        h = self.world.h
        wait_ms = 2 * min(h, ORPHAN_MS_MAX) + h // 2
        return wait_ms if PLANS in self.world.faults else 0

    def _is_consumer(self, process: object) -> bool:
        work = getattr(process, "work", None)
        is_leaving = getattr(process, "is_leaving", True)
        return getattr(work, "consumer", None) is not None and not is_leaving

    def _live(self, duration_ms: int) -> None:
        self._gets(duration_ms, lambda: False)

    def _gets(self, limit_ms: int, is_done: Callable[[], bool]) -> bool:
        world = self.world
        start_ms = world.now_ms
        while world.now_ms - start_ms < limit_ms:
            world.pass_time(HEALED_STEP_MS)
            for place in world.hosts:
                world.drive_host(place)
            for process in list(world.processes):
                world.drive(process, is_calm=True)
                if process in world.processes and not process.is_leaving:
                    world.work(process, len(process.hand))
            world.check()
            if is_done():
                return True
        return False

    def _is_calm(self) -> bool:
        for process in self.world.processes:
            if not isinstance(process.work, Hosted) and process.work.is_backing_off:
                return False
        for place in self.world.hosts:
            host, service = place.host, place.host.service
            if service is None:
                return False
            now_ms = host.clock.now_ms()
            for each in service.groups:
                if any(s.backoff.is_on(now_ms) for s in each.session.subscriptions):
                    return False
        return True

    def _missing(self) -> list[TopicPartition]:
        world = self.world
        wanted = list(world.places)
        if any(isinstance(p.work, Hosted) and p.work.claims for p in world.processes):
            wanted.append(TopicPartition(CLAIMED_TOPIC, 0))
        held = {key.topic_partition for p in world.processes for key in p.held}
        return [place for place in wanted if place not in held]

    # --- liveness

    def _check_death(self) -> None:
        """L1: demand that keys of a client whose death is seen are soon in use."""
        world = self.world
        fit = [
            process
            for process in world.processes
            if isinstance(process.work, Hosted)
            and process.work.pid is not None
            and self._is_consumer(process)
        ]
        if not fit or sum(map(self._is_consumer, world.processes)) == 1:
            return
        process = world.rng.choice(fit)
        world.trace(f"{process.name} dies while all is well")
        world.count("death while all is well")
        world.remove(process)
        self._demand_owned("L1", DEATH_MS + self._garbage_ms + self._planning_ms)

    def _check_drain(self) -> None:
        """L3: demand that a paused group drains in two intervals and a round trip."""
        world = self.world
        bound_ms = 2 * world.h + 4 * HEALED_STEP_MS
        self._troubles.pause(2 * bound_ms)
        if not self._gets(bound_ms, self._is_drained):
            raise Violation("L3", f"not drained within {bound_ms} ms")
        self._troubles.end_pauses()
        self._demand_owned("L6", self._owned_ms)

    def _is_drained(self) -> bool:
        if any(process.held for process in self.world.processes):
            return False
        return all(
            known.owner is None or known.remaining_ms(state.now_ms) <= 0
            for state in self.world.watcher.worlds
            for key, known in state.keys.items()
            if key.group_id == GROUP
        )


def simulate_hosted(
    seed: int,
    *,
    delivery: Delivery | None = None,
    faults: Sequence[str] | None = None,
    rounds: int = 200,
    span: int | None = None,
) -> Report:
    """Run one seed.

    Args:
        seed: Decides everything.
        delivery: The guarantee of delivery; None: drawn.
        faults: Kinds of faults, of ``FAULTS``; None: drawn.
        rounds: Number of rounds in which faults strike.
        span: Limit of the Config; None for the default.

    Returns:
        The report, if every invariant held.

    Raises:
        RunFailed: An invariant was broken; the message shows how to repeat it.
    """
    policies = installed(chance(seed, "garbage"))
    with tempfile.TemporaryDirectory(prefix="marshal-hosted-") as folder, policies:
        world = HostedWorld(
            seed, folder=Path(folder), delivery=delivery, faults=faults, span=span
        )
        return HostedSimulation(world).run(rounds=rounds)
