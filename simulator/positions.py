"""Admins that set positions of a running group, and may die (PROTOCOL 8.3 to 8.6).

Each admin is the production operation, as one process of the world: it reads the log,
is slow at times, and may be killed before any of its records. Members finish an
operation that it leaves, or another admin does, with its plan or without.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs
from msgspec.structs import replace

from kafka_marshal.admin.finishing import Resolution
from kafka_marshal.admin.pausing import Sender
from kafka_marshal.admin.set_position import (
    PositionPlan,
    SetPosition,
    Target,
    plan_undo,
)
from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.engine.follower import Follower
from kafka_marshal.ports import Clock
from kafka_marshal.protocol.codec import OP_ID_BYTES, decode
from kafka_marshal.protocol.records import (
    ClaimingPartition,
    Config,
    DecidePosition,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.types import Key, TopicPartition
from simulator.base import GROUP
from simulator.checkers import Violation
from simulator.fates import Window
from simulator.fleet import Fleet
from simulator.loop import Loop
from simulator.node import Cluster
from simulator.plan import Fault, chance
from simulator.position_judge import name_of
from simulator.turns import Killed, Program, WaitingLog, refusal_of
from simulator.world import World

FINISHES, UNDOES = 0.25, 0.25
HOME_AWAY, LAGS = 0.15, 0.15
DIES, DIES_IN_TIME, FALLS_ASLEEP = 0.6, 0.1, 0.02
NAMED, REPROCESSES = 0.7, 0.8
PAUSE_HS_MAX = 4
ENDS_HS_MAX = 80
"""Maximum time that a live admin may take, in heartbeat intervals."""
DIED: Mapping[type, str] = {
    StagePosition: "admin_died_staging",
    DecidePosition: "admin_died_deciding",
    ResolvePosition: "admin_died_resolving",
}
DIED_BEFORE = "admin_died_pausing"


class _Named(Sender):
    """A sender whose incarnation and op_ids are drawn from a seed."""

    def __init__(self, admin: "Admin") -> None:
        super().__init__(admin.name)
        self.host = admin.name
        self._incarnation, self._rng = admin.incarnation, admin.rng

    def new_op_id(self) -> bytes:
        """Return the op_id of a new operation."""
        return self._rng.randbytes(OP_ID_BYTES)


@attrs.define(eq=False, kw_only=True)
class Admin:
    """One process of an admin.

    Attributes:
        name: Its name, unique for ever.
        rng: Its own random numbers.
        for_ms: Length of its pauses; it never sleeps for longer than two of them.
        op_id: The operation that it works on, in hex; empty if it begins one.
        records_max: Number of records after which it dies; None if it does not.
        incarnation: Incarnation of its process in the log, once it has begun.
        program: The process.
        died_before: The kind of record before which it died, if it did.
    """

    name: str
    rng: random.Random
    for_ms: int
    op_id: str = ""
    records_max: int | None = None
    incarnation: bytes = b""
    program: Program | None = None
    died_before: type | None = None


@attrs.frozen(kw_only=True)
class Tools:
    """The tools of an admin's process.

    Attributes:
        follower: Follows the log, which it has read to its end.
        follow_again: Returns a follower of all present Kafka partitions.
        clock: Its local time.
        sender: The sender of its records.
        config: The Config of coordinating partition 0.
    """

    follower: Follower
    follow_again: Callable[[], Follower]
    clock: Clock
    sender: Sender
    config: Config


Work = Callable[[Admin, Tools], None]


def draw_plan(
    admin: Admin, *, cluster: Cluster, places: Sequence[TopicPartition]
) -> PositionPlan:
    """Draw positions for some partitions: back, forward, to 0 or to the end."""
    rng = admin.rng
    named = [each for each in places if rng.random() < NAMED]
    targets = []
    for place in named or places[:1]:
        end = cluster.kafka.log(place).end
        topic_id = cluster.kafka.topic(place.topic).topic_id
        position = rng.choice([0, rng.randint(0, end), rng.randint(0, end), end])
        targets.append(
            Target(
                topic=place.topic,
                topic_id=topic_id.hex(),
                partition=place.partition,
                position=position,
            )
        )
    return PositionPlan(
        op_id=admin.op_id,
        group_id=GROUP,
        targets=tuple(targets),
        allows_reprocess=rng.random() < REPROCESSES,
    )


def targets_of(plan: PositionPlan) -> dict[Key, int]:
    """Return the positions of a plan, by key."""
    return {plan.key(each): each.position for each in plan.targets}


def execute(plan: PositionPlan, admin: Admin, *, tools: Tools) -> None:
    """Set the positions of a plan, or continue to."""
    h_ms, rng = tools.config.heartbeat_interval_ms, admin.rng
    setting = SetPosition(
        tools.follower,
        tools.clock,
        tools.sender,
        plan=plan,
        config=tools.config,
        for_ms=admin.for_ms,
    )
    timeout_ms = rng.choice([h_ms, 2 * h_ms])
    setting.run(timeout_ms, drain_ms=rng.choice([1, 3, 6]) * h_ms)


def begin(
    admin: Admin,
    work: Work,
    *,
    loop: Loop,
    cluster: Cluster,
    on_append: Callable[[int, bytes], None],
    on_end: Callable[[], None],
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Start the process of an admin, which reads the log to its end first.

    Args:
        admin: The admin as drawn.
        work: Its operation.
        loop: The loop with which it takes turns.
        cluster: The cluster in memory.
        on_append: Called before each record; may raise ``Killed``.
        on_end: Called once it has ended.
        on_wait: Called before each wait for the log; may raise ``Killed``.
    """
    rng, h_ms = admin.rng, cluster.heartbeat_interval_ms
    admin.incarnation = rng.randbytes(16)
    clock = cluster.clock.view(offset_ms=rng.randint(0, 10**6))

    def wait(timeout_ms: int) -> None:
        """Wait for the log; at times a process is called late, or very late."""
        on_wait()
        for_ms = rng.randint(1, max(timeout_ms, h_ms // 20))
        if rng.random() < FALLS_ASLEEP:
            for_ms = rng.randint(1, 2 * admin.for_ms)
        program.sleep(for_ms)

    def send(partition: int, value: bytes) -> None:
        if admin.records_max == 0:
            admin.died_before = type(decode(value))
            raise Killed
        if admin.records_max is not None:
            admin.records_max -= 1
        on_append(partition, value)

    def follow() -> Follower:
        log = cluster.kafka.coordination_log(name=admin.name)
        log.configure(h_ms)
        waiting = WaitingLog(log, wait=wait, on_append=send)
        return Follower(waiting, clock, sources=(LogCheckpoints(),))

    def call() -> None:
        follower = follow()
        follower.catch_up(2 * h_ms)
        config = follower.replicas[0].world.config
        assert config is not None
        if config.partition_count > len(follower.replicas):
            # The partition count has grown since the log was opened.
            follower = follow()
            follower.catch_up(2 * h_ms)
        tools = Tools(
            follower=follower,
            follow_again=follow,
            clock=clock,
            sender=_Named(admin),
            config=config,
        )
        work(admin, tools)

    program = admin.program = Program(loop, call, on_end=on_end)
    program.start(loop.clock.at_ms)


class Processes:
    """The processes of all admins of a world, those that ended included."""

    def __init__(self) -> None:
        """Start without any."""
        self._admins: list[Admin] = []

    def are_done(self) -> bool:
        """Return whether no admin works any more."""
        programs = (each.program for each in self._admins)
        return all(each is None or each.is_done for each in programs)

    def close(self) -> None:
        """End all of them."""
        for each in self._admins:
            if each.program is not None:
                each.program.close()


class Admins(Processes):
    """Lets admins set positions of the group, as faults of a plan."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        """Start without any."""
        super().__init__()
        self._world = world
        self._fleet = fleet
        self._plans: dict[str, PositionPlan] = {}

    @property
    def pause_ms_max(self) -> int:
        """The longest pause of any admin."""
        return PAUSE_HS_MAX * self._world.plan.h_ms

    # --- what an admin is asked for

    def strike(self, fault: Fault) -> None:
        """Start an admin with its own plan, or with an operation that another left."""
        world = self._world
        if world.topic_id is None:
            return
        rng = chance(world.plan.seed, f"positions/{fault.number}")
        if rng.random() < HOME_AWAY:
            self._lose_home(fault)
        if rng.random() < LAGS:
            self._let_lag(fault)
        luck = rng.random()
        operations = world.positions.operations
        moved = [op_id for op_id, each in operations.items() if each.moved]
        if self._plans and luck < FINISHES:
            op_id = rng.choice(sorted(self._plans))
            admin = self._admin(fault, op_id, rng)
            work: Work = rng.choice([self._execute, self._finish])
        elif moved and luck < FINISHES + UNDOES:
            admin = self._admin(fault, _op_id(fault), rng)
            work = partial(self._undo, undone=moved[-1].hex())
        else:
            admin = self._admin(fault, _op_id(fault), rng)
            self._ask(draw_plan(admin, cluster=world.cluster, places=world.places))
            work = self._execute
        self._start(admin, work)

    def _admin(self, fault: Fault, op_id: str, rng: random.Random) -> Admin:
        h_ms, count = self._world.plan.h_ms, self._world.counts[0]
        records_max = rng.randint(0, 3 * count + 2) if rng.random() < DIES else None
        return Admin(
            name=f"admin{fault.number}",
            op_id=op_id,
            rng=rng,
            for_ms=rng.choice([h_ms // 2, h_ms, 2 * h_ms, PAUSE_HS_MAX * h_ms]),
            records_max=records_max,
        )

    def _ask(self, plan: PositionPlan) -> None:
        self._plans[plan.op_id] = plan
        self._world.positions.ask(bytes.fromhex(plan.op_id), targets_of(plan))

    def _lose_home(self, fault: Fault) -> None:
        """Make the home of the group accept no records for a while."""
        world = self._world
        home = world.home
        window = Window("mute", None, 1.0, home)
        world.fates.open(window)
        close = partial(world.fates.close, window)
        world.loop.at(world.now_ms + fault.for_ms, close)
        world.trace(f"nothing reaches {home}, the home, for {fault.for_ms} ms")

    def _let_lag(self, fault: Fault) -> None:
        """Make a member read one coordinating partition late, but not the others."""
        world, apps = self._world, self._fleet.apps
        if not apps:
            return
        app = apps[fault.who % len(apps)]
        number = fault.size % max(world.counts)
        log = app.node.log
        log.lags_ms = {number: fault.for_ms}
        world.loop.at(world.now_ms + fault.for_ms, log.lags_ms.clear)
        world.trace(f"{app.name} reads {number} {fault.for_ms} ms late")

    def heal(self) -> None:
        """End all delays of reading."""
        for app in self._fleet.apps:
            app.node.log.lags_ms.clear()

    # --- its process

    def _start(self, admin: Admin, work: Work) -> None:
        world, rng = self._world, admin.rng
        world.trace(f"{admin.name} begins with {name_of(admin.op_id)}")
        begin(
            admin,
            work,
            loop=world.loop,
            cluster=world.cluster,
            on_append=self._on_append,
            on_end=partial(self._on_end, admin),
        )
        world.names[admin.incarnation] = admin.name
        self._admins.append(admin)
        if rng.random() < DIES_IN_TIME and admin.program is not None:
            dies_ms = world.now_ms + rng.randint(1, 6 * world.plan.h_ms)
            world.loop.at(dies_ms, admin.program.kill)

    def _on_append(self, partition: int, value: bytes) -> None:
        if isinstance(decode(value), ClaimingPartition):
            self._world.chronicle.on_append(partition, value, append=None, held={})

    def _on_end(self, admin: Admin) -> None:
        assert admin.program is not None
        error = refusal_of(admin.program)
        world = self._world
        if admin.program.is_killed:
            world.trace(f"{admin.name} dies")
            if admin.died_before is not None:
                world.coverage.note(DIED.get(admin.died_before, DIED_BEFORE))
        elif error is None:
            world.trace(f"{admin.name} has ended")
        else:
            reason = getattr(error, "reason", "")
            world.trace(f"{admin.name} gives up: {type(error).__name__} {reason}")
            world.coverage.note("admin_gave_up")

    # --- what it does

    def _execute(self, admin: Admin, tools: Tools) -> None:
        execute(self._plans[admin.op_id], admin, tools=tools)

    def _finish(self, admin: Admin, tools: Tools) -> None:
        resolution = Resolution(
            tools.follower,
            tools.sender,
            group_id=GROUP,
            op_id=admin.op_id,
            config=tools.config,
        )
        resolution.finish(2 * self._world.plan.h_ms)

    def _undo(self, admin: Admin, tools: Tools, *, undone: str) -> None:
        """Undo an operation; the plan must have exactly the positions before it."""
        plan = plan_undo(
            tools.follower.worlds,
            group_id=GROUP,
            op_id=undone,
            new_op_id=admin.op_id,
            is_partial=True,
        )
        before = self._world.positions.operations[bytes.fromhex(undone)].moved
        for target in plan.targets:
            if before[plan.key(target)] != target.position:
                text = f"{target} is to undo {undone}, and it was at {before}"
                raise Violation("8.6", text)
        self._ask(replace(plan, allows_reprocess=True))
        self._execute(admin, tools)
        self._world.coverage.note("set_undone")


def _op_id(fault: Fault) -> str:
    return f"set {fault.number}".encode().ljust(16, b".").hex()
