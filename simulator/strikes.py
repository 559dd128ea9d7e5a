"""Lets faults strike: implements the effect of each of ``plan.FAULTS`` on a world."""

from collections.abc import Callable, Sequence
from functools import partial

from kafka_marshal.config import Delivery
from kafka_marshal.protocol.codec import Undecodable, decode, encode
from kafka_marshal.protocol.records import (
    ClaimingMessages,
    ClaimingPartition,
    Config,
    LayoutFence,
)
from kafka_marshal.protocol.types import Key, Owner
from simulator.base import GROUP
from simulator.checkers import Folded
from simulator.configs import configs_of
from simulator.fakestore import Stored
from simulator.fates import HARDNESS, KINDS, Window
from simulator.fences import Fences
from simulator.fleet import APPS_MAX, App, Fleet
from simulator.growing import Growths
from simulator.newer import Newer
from simulator.pauses import Pauses
from simulator.plan import (
    ABOVE,
    DAMAGE,
    FENCES,
    GROWTH,
    HALT,
    LEVEL,
    PLANS,
    POSITIONS,
    RECREATE,
    RESIZE,
    SCHEDULES,
    SEEKS,
    Fault,
    chance,
)
from simulator.plans import Plans
from simulator.positions import Admins
from simulator.recreating import Recreations
from simulator.resizing import Resizes
from simulator.schedules import Schedules
from simulator.seeks import Seeks
from simulator.world import World

DEAF_MS = 10**9
BROKERS_PER_EPOCH = 8
PERCENT = 100


class Strikes:
    """Strikes a fleet with the faults of its plan.

    Attributes:
        admins: Admins that set positions.
        fences: Admins that fence processes.
        schedules: Admins that schedule pauses.
        growths: Admins that add partitions to the data topic.
        resizes: Admins that change the number of coordinating partitions.
    """

    def __init__(self, world: World, fleet: Fleet) -> None:
        """Prepare all kinds of faults; none strikes yet."""
        self._world = world
        self._fleet = fleet
        self._pauses = Pauses(world.cluster, world.watcher, group_id=GROUP)
        self._configs, self._newer = configs_of(world), Newer(world)
        self._recreations = Recreations(world, fleet)
        self.admins = Admins(world, fleet)
        self.fences, self.schedules = Fences(world, fleet), Schedules(world)
        self.growths, self._seeks = Growths(world), Seeks(world, fleet)
        self._plans = Plans(world, fleet)
        self.resizes = Resizes(world)
        # Each leader is another machine.
        self._brokers = BROKERS_PER_EPOCH * (1 + world.is_resizing)
        world.on_folded = self._on_fold
        self._actions: dict[str, Callable[[Fault], None]] = {
            "cut": self._cut,
            "deaf": self._deafen,
            "crash": self._crash,
            "stop": self._stop,
            "failover": self._fail_over,
            "step": self._step_clock,
            "pause": self._pause,
            "churn": self._churn,
            "hostile": self._write_hostile,
            "twin": self._start_twin,
            "edge": self._claim_at_the_edge,
            "attempt": self._ask_elsewhere,
            "truncate": self._truncate,
            "keep": self._keep,
            "tear": self._tear,
            "reset": self._reset,
            RECREATE: self._recreations.strike,
            DAMAGE: self._damage,
            ABOVE: self._newer.strike,
            LEVEL: self._configs.strike,
            POSITIONS: self.admins.strike,
            FENCES: self.fences.strike,
            SCHEDULES: self.schedules.strike,
            GROWTH: self.growths.strike,
            SEEKS: self._seeks.strike,
            PLANS: self._plans.strike,
            RESIZE: self.resizes.strike,
            HALT: self.halt,
        }

    def strike(self, fault: Fault) -> None:
        """Let one fault strike now."""
        if self._world.is_healed:
            return
        self._world.trace(f"fault {fault.number}: {fault.kind}")
        if fault.kind in KINDS:
            self._open_window(fault)
        else:
            self._actions[fault.kind](fault)

    def heal(self) -> None:
        """Repair everything that is broken now."""
        self._world.fates.heal()
        for app in list(self._fleet.apps):
            if app.wakes_ms > self._world.now_ms:
                app.wakes_ms = self._world.now_ms
                self._fleet.wake(app)
            self._mend(app, app.cut_until_ms)
        self.end_pauses()
        self._format()
        self._configs.heal()
        self._recreations.heal()
        self.growths.heal()
        self.admins.heal()
        self.schedules.heal()
        self._plans.heal()

    def _on_fold(self, folded: Folded) -> None:
        self._newer.on_fold(folded)
        self.fences.on_fold(folded)
        self.schedules.on_fold(folded)
        self.growths.on_fold(folded)
        self._seeks.on_fold(folded)
        self._plans.on_fold(folded)
        self.resizes.on_fold(folded)

    def pause(self, for_ms: int) -> None:
        """Pause the group."""
        self._pauses.begin(for_ms)
        self._world.trace(f"the group is paused for {for_ms} ms")

    def halt(self, fault: Fault) -> None:
        """Write a Config that none can follow; newer programs continue behind it."""
        numbers = self._configs.halt(fault)
        self._newer.follow(fault, numbers)

    @property
    def is_over(self) -> bool:
        """Whether a Config that none can follow was written."""
        return self._configs.is_over

    def configs_are_over(self) -> bool:
        """Return whether all partitions have all Configs that admins were to write."""
        return self._configs.are_over()

    def end_pauses(self) -> None:
        """End every pause that was begun."""
        self._pauses.end()

    # --- the network

    def _open_window(self, fault: Fault) -> None:
        app = self._victim(fault)
        is_all = app is None or (fault.kind != "mute" and fault.size < PERCENT // 3)
        writer = None if is_all or app is None else app.node.owner.client_id
        hardness = 1.0 if fault.kind == "mute" else HARDNESS[fault.size % len(HARDNESS)]
        window = Window(fault.kind, writer, hardness)
        fates, loop = self._world.fates, self._world.loop
        fates.open(window)
        loop.at(self._world.now_ms + fault.for_ms, partial(fates.close, window))

    def _cut(self, fault: Fault) -> None:
        app = self._victim(fault)
        if app is not None:
            app.node.log.cut = True
            app.node.data.cut = fault.size < PERCENT // 2
            self._mend_later(app, fault.for_ms)
            self._world.trace(f"{app.name} is cut off for {fault.for_ms} ms")

    def _deafen(self, fault: Fault) -> None:
        """Cut one way only: a process can write, but reads late or nothing."""
        app = self._victim(fault)
        if app is not None:
            is_late = fault.size < PERCENT // 2
            lag_ms = self._world.plan.h_ms // 2 if is_late else DEAF_MS
            app.node.log.read_lag_ms = lag_ms
            self._mend_later(app, fault.for_ms)
            self._world.trace(f"{app.name} reads late for {fault.for_ms} ms")

    def _mend_later(self, app: App, for_ms: int) -> None:
        app.cut_until_ms = self._world.now_ms + for_ms
        mend = partial(self._mend, app, app.cut_until_ms)
        self._world.loop.at(app.cut_until_ms, mend)

    def _mend(self, app: App, due_ms: int) -> None:
        if app.is_gone or not due_ms or app.cut_until_ms != due_ms:
            return
        app.cut_until_ms = 0
        app.node.cut(is_cut=False)
        app.node.log.read_lag_ms = 0
        self._world.trace(f"{app.name} is connected again")
        self._fleet.call_step(app, self._world.now_ms)

    # --- processes

    def _victim(self, fault: Fault) -> App | None:
        fit = [app for app in self._fleet.apps if not app.is_leaving]
        return fit[fault.who % len(fit)] if fit else None

    def _crash(self, fault: Fault) -> None:
        app = self._victim(fault)
        if app is not None:
            self._world.trace(f"{app.name} crashes")
            self._fleet.remove(app)
            is_resuming = fault.size < PERCENT * 2 // 3
            # A supervisor restarts it quickly, a person slowly.
            after_ms = fault.for_ms // 8 if fault.size % 2 else fault.for_ms
            self._fleet.start_later(app, after_ms, is_resuming=is_resuming)

    def _keep(self, fault: Fault) -> None:
        """Make the host of a process keep its present states."""
        app = self._victim(fault)
        if app is not None:
            self._world.trace(f"{app.name} keeps its states")
            self._fleet.keeping.keep(app.node)

    def _tear(self, fault: Fault) -> None:
        """Crash the process that begins a checkpoint next, in the middle of it."""
        keeping, loop = self._fleet.keeping, self._world.loop

        def crash(incarnation: bytes) -> None:
            for app in self._fleet.apps:
                if keeping.writer(app.node) == incarnation:
                    loop.at(
                        self._world.now_ms + fault.size % (1 + self._trip_ms),
                        partial(self._crash_app, app, fault),
                    )

        keeping.on_begin.append(crash)

    @property
    def _trip_ms(self) -> int:
        return 2 * self._world.plan.latency_ms

    def _crash_app(self, app: App, fault: Fault) -> None:
        if not app.is_gone and not self._world.is_healed:
            self._world.trace(f"{app.name} crashes within a checkpoint")
            self._fleet.remove(app)
            self._fleet.start_later(app, fault.for_ms // 8, is_resuming=True)

    def _damage(self, fault: Fault) -> None:
        """Damage a kept state of a host; often a process starts from it at once."""
        app, keeping = self._victim(fault), self._fleet.keeping
        if app is None:
            return
        keeping.keep(app.node)
        how = keeping.damage(app.node, self._number(fault), fault=fault)
        if how is None:
            return
        self._world.coverage.note("kept_damaged")
        self._world.trace(f"what the host of {app.name} keeps is {how}")
        if fault.size % 2:
            self._fleet.remove(app)
            self._fleet.start_later(app, fault.for_ms // 8, is_resuming=True)

    def _reset(self, fault: Fault) -> None:
        self._fleet.keeping.reset(self._number(fault))

    def _stop(self, fault: Fault) -> None:
        app = self._victim(fault)
        if app is not None:
            app.wakes_ms = max(app.wakes_ms, self._world.now_ms + fault.for_ms)
            if app.hand and fault.for_ms > 2 * self._world.plan.h_ms:
                self._world.coverage.note("stopped_with_records")
            self._world.trace(f"{app.name} is stopped for {fault.for_ms} ms")

    def _churn(self, fault: Fault) -> None:
        if len(self._fleet.apps) < APPS_MAX and fault.size < PERCENT // 2:
            self._fleet.admit()
            return
        app = self._victim(fault)
        if app is not None and len(self._fleet.apps) > 1:
            self._world.trace(f"{app.name} leaves")
            if app.node.engine.is_ready:
                app.is_leaving = True
                app.node.leave()
            else:
                self._fleet.remove(app)  # it has no session yet

    def _start_twin(self, fault: Fault) -> None:
        app = self._victim(fault)
        if app is not None and len(self._fleet.apps) < APPS_MAX:
            self._fleet.start(app.node.owner.client_id, ())

    # --- brokers

    def _number(self, fault: Fault) -> int:
        return fault.who % len(self._world.watcher.worlds)

    def _fail_over(self, fault: Fault) -> None:
        kafka, number = self._world.cluster.kafka, self._number(fault)
        place = self._world.cluster.place(number)
        epoch = kafka.log(place).leader_epoch + 1
        leader = number + self._brokers * epoch
        self._set_clock(fault, leader)
        retry_ms = None if fault.size % 2 else fault.for_ms // 4
        lost = kafka.fail_over(place, leader=leader, retry_ms=retry_ms)
        for _ in range(lost):
            self._world.coverage.note("tail_lost")
        ahead_ms = kafka.clocks.ahead_ms(leader)
        self._world.trace(f"{place} is led by {leader}, its clock at {ahead_ms:+}")

    def _set_clock(self, fault: Fault, leader: int) -> None:
        """Give a leader a clock that is off by up to three intervals, and drifts."""
        plan, clocks = self._world.plan, self._world.cluster.kafka.clocks
        rng = chance(plan.seed, f"leader/{fault.number}")
        clocks.set_ahead(leader, rng.randint(-3 * plan.h_ms, 3 * plan.h_ms))
        clocks.set_drift(leader, rng.randint(-plan.drift_ppm, plan.drift_ppm))

    def _step_clock(self, fault: Fault) -> None:
        """Step a leader's clock while it leads."""
        world, number = self._world, self._number(fault)
        leader = world.cluster.kafka.log(world.cluster.place(number)).leader
        clocks, h_ms = world.cluster.kafka.clocks, world.plan.h_ms
        by_ms = fault.for_ms if fault.size < PERCENT // 2 else -fault.for_ms
        by_ms = by_ms // 8 if fault.size % 2 else by_ms
        clocks.set_ahead(leader, clocks.ahead_ms(leader) + by_ms)
        if by_ms > 0:
            # Leases from before the step may overlap with a claim after it.
            lasts_ms = world.now_ms + 3 * h_ms
            world.excused[number] = max(lasts_ms, world.excused.get(number, 0))
        world.trace(f"the clock of {leader} steps by {by_ms:+} ms")

    def _truncate(self, fault: Fault) -> None:
        """Lose up to ten records that were read: an unclean election."""
        world, number = self._world, self._number(fault)
        place = world.cluster.place(number)
        log = world.cluster.kafka.log(place)
        end = max(self._kept_of(number), log.end - 1 - fault.size % 10)
        if end >= log.end:
            return
        world.coverage.note("truncated")
        self._note_lost(number, log.read(end, log.end))
        leader = number + self._brokers * (log.leader_epoch + 1)
        self._set_clock(fault, leader)
        world.trace(f"{place} is cut back from {log.end} to {end}")
        world.cluster.kafka.truncate(place, end=end, leader=leader)
        world.cuts.on_cut(number, log.leader_epoch)
        world.watcher.refold(number)
        for app in self._fleet.apps:
            app.checked.pop(number, None)

    def _format(self) -> None:
        """Write the Config to partitions that have lost all, as a person would do."""
        world = self._world
        config = world.watcher.worlds[0].config
        assert config is not None
        for number in world.unformatted:
            world.cluster.kafka.produce(world.cluster.place(number), encode(config))
            world.trace(f"{number} is formatted again")

    def _kept_of(self, number: int) -> int:
        """Return how many records a partition must keep: up to a Config.

        It may lose only the last change of the partition count: the Configs of earlier
        changes exist nowhere else (PROTOCOL 10.9).
        """
        begun: dict[bytes, int] = {}
        for stored in self._world.log_of(number).records:
            record = decode(stored.value)
            if isinstance(record, Config):
                begun.setdefault(record.format_id, stored.offset)
            elif isinstance(record, LayoutFence):
                begun.setdefault(record.op_id, stored.offset)
        return 1 + (0, *begun.values())[-2:][0]

    def _note_lost(self, number: int, lost: Sequence[Stored]) -> None:
        records = [decode(each.value) for each in lost]
        for record in records:
            self._world.positions.on_lost(record)
            if number == 0:
                others = self._world.watcher.worlds[1:]
                self._world.readings.on_lost(record, others)
        kinds = {type(each) for each in records}
        if ClaimingMessages in kinds:
            self._world.coverage.note("truncated_grant")
        if ClaimingPartition in kinds:
            self._world.coverage.note("truncated_claim")

    # --- other writers

    def _pause(self, fault: Fault) -> None:
        app = self._victim(fault)
        deaf = "deaf" in self._world.plan.kinds and fault.size < PERCENT // 2
        if deaf and app is not None:
            # Combine two faults: an owner may not read the pause at all.
            app.node.log.read_lag_ms = DEAF_MS
            self._mend_later(app, fault.for_ms + 3 * self._world.plan.h_ms)
        self.pause(fault.for_ms)

    def _write_hostile(self, fault: Fault) -> None:
        """Write random bytes, or a copy of an earlier record."""
        rng = chance(self._world.plan.seed, f"hostile/{fault.number}")
        number = self._number(fault)
        place = self._world.cluster.place(number)
        value: bytes | None = rng.randbytes(rng.randint(0, 40))
        stored = self._world.cluster.kafka.log(place).records
        if stored and fault.size < PERCENT * 2 // 3:
            value = rng.choice(stored).value
            if getattr(decode(value), "incarnation", None) in self._seeks.sought:
                return  # PROTOCOL 6.6 holds only for records that the owner sent
            if value and fault.size % 3 == 0:
                at = rng.randrange(len(value))
                bent = value[:at] + rng.randbytes(1) + value[at + 1 :]
                # If it were a record after the change, it would be a forgery.
                if isinstance(decode(bent), Undecodable):
                    value = bent
        offset = self._world.cluster.kafka.produce(place, value)
        size = len(value or b"")
        self._world.trace(f"somebody writes {size} bytes at {number}/{offset}")

    def _ask_elsewhere(self, fault: Fault) -> None:
        """Let a process without a claim request offsets under one (PROTOCOL 6.2).

        As a task attempt does: under the owner's incarnation, and with a sequence
        number that the owner itself may use next.
        """
        world, app = self._world, self._victim(fault)
        is_amo = world.plan.delivery is Delivery.AT_MOST_ONCE
        held = [] if app is None or not is_amo else sorted(app.node.held)
        if app is None or not held:
            return
        key = held[fault.size % len(held)]
        number, owner = world.place_of(key), app.node.owner
        known = world.watcher.worlds[number].keys[key]
        if known.topic_id != world.topic_id:
            return  # the process reads by the claim's topic id, and finds no records
        first = known.next_unclaimed() or 0
        end = world.cluster.kafka.log(key.topic_partition).end
        if first >= end:
            return
        grantee = chance(world.plan.seed, f"attempt/{fault.number}").randbytes(16)
        world.attempts.add(grantee)
        record = ClaimingMessages(
            client_id=owner.client_id,
            group_id=key.group_id,
            incarnation=owner.incarnation,
            seq=world.seqs.get(owner.incarnation, 0) + 1,
            topic=key.topic,
            partition=key.partition,
            epoch=known.epoch,
            grantee=grantee,
            first=first,
            proposed_last_offset=min(end - 1, first + fault.size % 3),
        )
        world.cluster.kafka.produce(world.cluster.place(number), encode(record))
        world.trace(
            f"another process asks for {first} on under the claim of {app.name}"
        )

    def _claim_at_the_edge(self, fault: Fault) -> None:
        """Claim a key as an unknown process when it becomes stale, or 1 ms before."""
        places = self._world.places
        key = Key(GROUP, *places[fault.who % len(places)])
        until_ms = self._world.now_ms + fault.for_ms + 3 * self._world.plan.h_ms
        rng = chance(self._world.plan.seed, f"edge/{fault.number}")
        stranger = Owner(f"edge{fault.number}", rng.randbytes(16))
        self._lie_in_wait(key, stranger, until_ms, fault.size % 2)

    def _lie_in_wait(
        self, key: Key, stranger: Owner, until_ms: int, over_ms: int
    ) -> None:
        world = self._world
        if world.is_healed or world.now_ms > until_ms:
            return
        number = world.place_of(key)
        state = world.watcher.worlds[number]
        known = state.keys.get(key)
        left_ms = world.plan.h_ms
        if known is not None and known.owner is not None:
            age_ms = known.age_ms(world.log_time_ms(number))
            left_ms = 2 * known.heartbeat_interval_ms + over_ms - age_ms
            if left_ms == 0:
                self._claim(key, stranger, number)
                return
        wait_ms = left_ms if left_ms > 0 else world.plan.h_ms
        again = partial(self._lie_in_wait, key, stranger, until_ms, over_ms)
        world.loop.at(world.now_ms + wait_ms, again)

    def _claim(self, key: Key, stranger: Owner, number: int) -> None:
        config = self._world.watcher.worlds[number].config
        if not self._world.is_resizing:
            config = self._world.levels.config(number)
        record = ClaimingPartition(
            client_id=stranger.client_id,
            group_id=key.group_id,
            incarnation=stranger.incarnation,
            seq=1,
            generation=1 if config is None else config.generation,
            topic=key.topic,
            partition=key.partition,
            topic_id=None,
            resume_hash=None,
            expected_epoch=None,
            resume=None,
        )
        cluster, value = self._world.cluster, encode(record)
        self._world.names[stranger.incarnation] = stranger.client_id
        self._world.chronicle.on_append(number, value, append=None, held={})
        cluster.kafka.produce(cluster.place(number), value)
