"""Heals all faults, then demands liveness within its bounds (PROTOCOL 11)."""

from collections.abc import Callable, Mapping

from kafka_marshal.config import Delivery
from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.engine.planning import ORPHAN_MS_MAX
from kafka_marshal.protocol.layout_steps import FINAL_AFTER_MS
from kafka_marshal.protocol.placement import counts_of, place_under, standing_keys
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key, TopicPartition
from simulator.base import GROUP, Liveness
from simulator.checkers import OPERATIONS, Violation
from simulator.fleet import Fleet
from simulator.garbage import GARBAGE_HS
from simulator.operation_judge import check
from simulator.plan import (
    FENCES,
    GARBAGE_POLICY,
    GROWTH,
    HANDOFFS,
    PLANS,
    POSITIONS,
    RECREATE,
    RESET,
    RESIZE,
    SCHEDULES,
    STANDBYS,
    chance,
)
from simulator.position_judge import unresolved_in
from simulator.positions import ENDS_HS_MAX
from simulator.strikes import Strikes
from simulator.world import World

CLOCK_MS_MAX = 600_000
DRIFT = 500  # one part in this number: more than clocks may drift
TRIP_MS = 400
RECORD_MS = 400
JITTER_MS_MAX = 1_000
FRESH_RECORDS = 5
BESIDE = 2
HUNG = 0.5
# Covers clocks that differ by up to three intervals, and two random parts of one.
RESOLVE_HS = 12
RESIZE_HS = 12
GROWTH_HS = 20
# By an admin's clock, a pause may last three intervals longer.
RESIZE_TRIES = 5


def judge_history(
    world: World, ends: Mapping[Key, tuple[int, int]] | None = None
) -> None:
    """Judge a run by the history of its processes alone.

    Raises:
        Violation: The history breaks a rule.
    """
    plan, operations = world.plan, world.chronicle.operations
    verdict = check(operations, delivery=plan.delivery, ends=ends, h_ms=plan.h_ms)
    for finding in verdict.findings:
        text = f"by the history, {finding.message}"
        raise Violation(finding.invariant, text, judge=OPERATIONS)


class Healing(Liveness):
    """Heals a fleet, and demands L1, L2, L3, L6 and that all records get processed."""

    def __init__(self, world: World, fleet: Fleet, strikes: Strikes) -> None:
        """Start with the fleet as its faults left it."""
        super().__init__(world, h_ms=world.plan.h_ms)
        self._world = world
        self._fleet = fleet
        self._strikes = strikes

    def run(self) -> None:
        """Heal the fleet, and demand liveness.

        Raises:
            Violation: A demand was not met in time.
        """
        world = self._world
        world.trace("everything is healed")
        world.is_healed = True
        self._strikes.heal()
        self._fleet.restart_all()
        if self._strikes.is_over:
            self._all_halt()
            return
        self._end_twins()
        if all(app.is_leaving for app in self._fleet.apps):
            self._fleet.admit()
        # Log time stands still until a clock that was set back is where it was.
        if not self._gets(CLOCK_MS_MAX, self._clocks_are_back):
            raise Violation("L6", "a leader's clock never came back")
        # Appends in flight still land; new members announce themselves.
        world.run(3 * self._h_ms)
        if RECREATE in world.plan.kinds:
            # Members look for a deleted topic only at each metadata refresh.
            world.run(self._fleet.refresh_ms)
        self._demand_ends()
        self._end_twins()
        self._demand_calm()
        self._all_owned("L6")
        world.produce(FRESH_RECORDS)
        self._all_done()
        if not self._is_garbage and HANDOFFS not in world.plan.kinds:
            self._demand_rest()  # members that warm up slowly get their keys late
        if FENCES in world.plan.kinds:
            self._fence()
        if SCHEDULES in world.plan.kinds:
            self._drain_on_schedule()
            self._drain_some()
        if world.plan.after and not world.is_truncating:
            self._strikes.halt(world.plan.after[0])
            self._all_halt()
            return
        if world.plan.ending == "kill" and len(self._fleet.apps) > 1:
            self._kill()
        else:
            self._drain()
        self._all_done()
        self._check_losses()
        self._check_exposures()
        self._check_processed()
        self._check_history()

    def _all_halt(self) -> None:
        """S6: demand that all halt at a Config that none can follow, safely."""
        world, fleet = self._world, self._fleet
        # Appends in flight land; newer programs continue.
        world.run(3 * self._h_ms)
        handed = world.hand_outs.count
        for _ in range(BESIDE):
            fleet.admit()
        world.run(self._h_ms)
        names = [app.name for app in fleet.apps]
        if names or world.hand_outs.count != handed:
            raise Violation("S6", f"{names} continue after a Config above their level")
        self._check_losses()
        self._check_exposures()
        if not self._is_unjudged:
            judge_history(world)

    # --- what is demanded

    def _demand_ends(self) -> None:
        """Demand that members end the operations that admins have left."""
        if POSITIONS in self._world.plan.kinds:
            self._all_resolved()
        if RESIZE in self._world.plan.kinds:
            self._all_resized()
            self._resize()
        if GROWTH in self._world.plan.kinds:
            self._all_grown()

    def _live(self, duration_ms: int) -> None:
        self._world.run(duration_ms)

    def _gets(self, limit_ms: int, is_done: Callable[[], bool]) -> bool:
        self._world.is_timed = True
        is_got = is_done() or self._world.run(limit_ms, is_done=is_done) is not None
        self._world.is_timed = False
        return is_got

    @property
    def _takeover_ms(self) -> int:
        """Bound of a takeover: two intervals, jitter, three round trips, and drift."""
        jitter_ms = min(JITTER_MS_MAX, self._h_ms // 10)
        if STANDBYS in self._world.plan.kinds:
            jitter_ms *= 2  # PROTOCOL 9.9: for a member that does not stand by
        trips_ms = 3 * (self._world.plan.latency_ms + TRIP_MS)
        wait_ms = GARBAGE_HS * self._h_ms if self._is_garbage else 0
        if PLANS in self._world.plan.kinds:
            # Twice the wait of 9.6, and a release to a member that died.
            wait_ms += 2 * min(self._h_ms, ORPHAN_MS_MAX) + self._h_ms // 2
        return wait_ms + 2 * self._h_ms + 2 * self._h_ms // DRIFT + jitter_ms + trips_ms

    @property
    def _is_garbage(self) -> bool:
        return GARBAGE_POLICY in self._world.plan.kinds

    def _all_owned(self, invariant: str) -> None:
        self._demand_owned(invariant, self._takeover_ms)

    def _all_resolved(self) -> None:
        """8.5: demand that no lock and no commit stays, even if admins died."""
        admins, worlds = self._strikes.admins, self._world.watcher.worlds
        if not self._gets(ENDS_HS_MAX * self._h_ms, admins.are_done):
            raise Violation("8.6", "an admin did not end in time")
        self._world.run(self._h_ms)  # the records of the last admin land
        limit_ms = admins.pause_ms_max + RESOLVE_HS * self._h_ms
        if not self._gets(limit_ms, lambda: not unresolved_in(worlds)):
            left = unresolved_in(worlds)
            raise Violation("8.5", f"{left} are unresolved after {limit_ms} ms")
        if not self._gets(limit_ms, self._pauses_are_over):
            raise Violation("8.1", f"a pause is active after {limit_ms} ms")

    def _all_resized(self) -> None:
        """10: demand that members end in time the changes that admins left."""
        limit_ms = 2 * FINAL_AFTER_MS + RESIZE_HS * self._h_ms
        resizes = self._strikes.resizes
        if not self._gets(limit_ms, resizes.are_over):
            raise Violation("10", f"a change is open after {limit_ms} ms: {resizes}")
        known = {world.partition: world for world in self._world.watcher.worlds}
        shown = standing_keys(known)
        count = counts_of(known)[0]
        away = [
            key for key, at in shown.items() if place_under(key, count) != at.partition
        ]
        if away:
            raise Violation("10", f"{away} are not where the count places them")

    def _resize(self) -> None:
        """10: demand that no change, completed or given up, prevents another one."""
        resizes, changes = self._strikes.resizes, self._strikes.resizes.changes
        limit_ms = RESIZE_HS * self._h_ms
        if not self._gets(limit_ms, self._strikes.configs_are_over):
            raise Violation("4.12", f"a Config is not known to all after {limit_ms} ms")
        before = len(changes.ended)
        for number in range(RESIZE_TRIES):
            rng = chance(self._world.plan.seed, f"resize again/{number}")
            resizes.change_again(rng)
            self._all_resized()
            if len(changes.ended) > before:
                return
            self._live(self._h_ms)
        raise Violation("10", "a change is refused, but nothing prevents it")

    def _all_grown(self) -> None:
        """9.10: demand that growths end, and that no partition waits for ever."""
        world, limit_ms = self._world, GROWTH_HS * self._h_ms
        if not self._gets(limit_ms, self._strikes.growths.are_over):
            raise Violation("9.10", f"a growth is open after {limit_ms} ms")
        # Members look for new partitions only at each metadata refresh.
        world.run(self._fleet.refresh_ms)
        self._demand_calm()
        record_ms = 2 * RECORD_MS  # first of the old partitions, then of the new ones
        self._demand_done(base_ms=2 * self._takeover_ms, record_ms=record_ms)

    def _pauses_are_over(self) -> bool:
        """Whether a record appended now would end every pause."""
        pauses = [
            (state, pause)
            for state in self._world.watcher.worlds
            if (pause := state.active_pause(GROUP)) is not None
        ]
        return all(self._wall_ms(state) >= pause.until_ms for state, pause in pauses)

    def _all_done(self) -> None:
        base_ms = (3 + 3 * GARBAGE_HS * self._is_garbage) * self._h_ms
        self._demand_done(base_ms=base_ms, record_ms=RECORD_MS)

    def _kill(self) -> None:
        """L1: kill a process, and demand that others have its partitions soon."""
        app = max(self._fleet.apps, key=lambda app: len(app.node.held))
        self._world.trace(f"{app.name} is killed")
        self._fleet.remove(app)
        self._all_owned("L1")

    def _drain(self) -> None:
        """L3: pause the group, and demand that all keys are released soon."""
        self._strikes.pause(3 * self._h_ms)
        limit_ms = self._takeover_ms
        if not self._gets(limit_ms, lambda: not self._held()):
            raise Violation("L3", f"{self._held()} in use after {limit_ms} ms")
        self._strikes.end_pauses()
        self._all_owned("L6")

    def _fence(self) -> None:
        """4.13: fence a process, hung or not, and demand that others get its keys."""
        world, fleet = self._world, self._fleet
        if len(fleet.apps) == 1:
            fleet.admit()
            world.run(2 * self._h_ms)
        app = max(fleet.apps, key=lambda app: len(app.node.held))
        is_hung = chance(world.plan.seed, "fence").random() < HUNG
        if is_hung:
            app.wakes_ms = world.now_ms + 2 * self._takeover_ms
        self._strikes.fences.fence(app.node.owner)

        def is_over() -> bool:
            return not (self._missing() or (app in fleet.apps and app.node.held))

        if not self._gets(self._takeover_ms, is_over):
            text = f"{app.name} is fenced; {self._missing()} are unused, or held by it"
            raise Violation("4.13", text)
        if app in fleet.apps:
            app.wakes_ms = world.now_ms
            fleet.wake(app)
        world.run(self._h_ms)
        if app in fleet.apps:
            raise Violation("4.13", f"{app.name} is fenced, but continues")
        self._all_owned("4.13")

    def _drain_on_schedule(self) -> None:
        """4.14: demand that a scheduled pause begins and ends, and work continues."""
        wait_ms, for_ms = self._h_ms, 3 * self._h_ms
        self._strikes.schedules.begin_after(wait_ms, for_ms=for_ms)
        limit_ms = wait_ms + self._takeover_ms
        if not self._gets(limit_ms, lambda: not self._held()):
            raise Violation("4.14", f"{self._held()} in use after {limit_ms} ms")
        limit_ms = for_ms + self._takeover_ms
        self._demand_owned("4.14", limit_ms)

    def _drain_some(self) -> None:
        """4.15: demand that only paused partitions are released, until the pause ends.

        Two pauses are active at a time: one begins at once, the other one later.
        """
        places = self._world.places
        first, last = places[:1], places[-1:]
        paused = {*first, *last}
        rest = {*places} - paused
        wait_ms, limit_ms = self._h_ms, self._h_ms + self._takeover_ms
        for_ms = 3 * limit_ms + 4 * self._h_ms
        pause_some = self._strikes.schedules.pause_some
        pause_some(0, numbers=(first[0].partition,), for_ms=for_ms + wait_ms)
        pause_some(wait_ms, numbers=(last[0].partition,), for_ms=for_ms)
        # Free keys may be claimed until the later pause begins, and a claim sent before
        # arrives a little later.
        self._world.run(wait_ms + self._h_ms // 10)
        if not self._gets(limit_ms, lambda: not self._held() & paused):
            raise Violation("4.15", f"{self._held() & paused} in use after {limit_ms}")
        if not self._gets(self._takeover_ms, lambda: rest <= self._held()):
            raise Violation("4.15", f"{rest - self._held()} not in use, but not paused")
        if self._gets(self._h_ms, lambda: bool(self._held() & paused)):
            raise Violation("4.15", f"{self._held() & paused} in use, though paused")
        self._demand_owned("4.15", for_ms + wait_ms + self._takeover_ms)

    def _check_losses(self) -> None:
        plan = self._world.plan
        if self._world.attempts:
            return  # other grantees may lose their own grants
        if plan.delivery is Delivery.AT_MOST_ONCE and not self._world.is_truncating:
            self._world.hand_outs.check_losses(most=plan.depth_max * plan.poll_max)

    def _check_exposures(self) -> None:
        """Demand that grants that the log lost and repeated were reported."""
        world = self._world
        if not world.is_truncating:
            return
        world.exposures.judge()
        if world.exposures.excused_count:
            world.coverage.note("exposed_untold")

    def _check_processed(self) -> None:
        """At least once: demand that each record of the topic now was processed."""
        world = self._world
        if world.plan.delivery is Delivery.AT_MOST_ONCE:
            return
        for key, (start, end) in self._ends().items():
            missed = set(range(start, end)) - world.processed(key)
            if missed:
                raise Violation("6.1", f"{key}: never processed: {sorted(missed)}")

    def _ends(self) -> dict[Key, tuple[int, int]]:
        kafka = self._world.cluster.kafka
        return {
            Key(GROUP, *place): (0, kafka.log(place).end)
            for place in self._world.places
        }

    def _check_history(self) -> None:
        """Demand that the operation judge finds no fault in the processes' history."""
        world = self._world
        if not self._is_unjudged:
            judge_history(world, self._ends())

    @property
    def _is_unjudged(self) -> bool:
        """Whether faults may make a correct log look like a broken history."""
        kinds = set(self._world.plan.kinds)
        return self._world.is_truncating or bool({"step", RESET} & kinds)

    # --- how things are

    def _end_twins(self) -> None:
        seen = set()
        for app in list(self._fleet.apps):
            if app.node.owner.client_id in seen:
                self._fleet.remove(app)
            seen.add(app.node.owner.client_id)

    def _clocks_are_back(self) -> bool:
        """Whether every leader's clock is beyond its last timestamp (4.1)."""
        return all(
            self._wall_ms(state) >= (state.epoch_time_ms or 0)
            for state in self._world.watcher.worlds
        )

    def _wall_ms(self, state: WorldState) -> int:
        """Return the timestamp that a partition's leader would give a record now."""
        kafka, now_ms = self._world.cluster.kafka, self._world.now_ms
        return kafka.clocks.wall_ms(kafka.log(self._place(state)).leader, now_ms)

    @staticmethod
    def _place(state: WorldState) -> TopicPartition:
        return TopicPartition(COORDINATION_TOPIC, state.partition)

    def _is_calm(self) -> bool:
        return not any(app.node.is_backing_off for app in self._fleet.apps)

    def _held(self) -> set[TopicPartition]:
        apps = self._fleet.apps
        return {key.topic_partition for app in apps for key in app.node.held}

    def _missing(self) -> list[TopicPartition]:
        held = self._held()
        return [place for place in self._world.places if place not in held]
