"""Admins that change the number of coordinating partitions, and may die.

Each admin is the production operation, as one process of the world. It is killed before
or after one of its steps: the call that adds Kafka partitions, or any of its records.
Members complete a change that it leaves, or another admin with the same number does
(PROTOCOL 10).
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from kafka_marshal.admin.resizing import Resizing
from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.engine.follower import Follower
from kafka_marshal.errors import LogUnreadable, MarshalError
from kafka_marshal.protocol.codec import decode, encode
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.layout import MOVING, config_of, is_final, used_count
from kafka_marshal.protocol.lost_changes import restored_op
from kafka_marshal.protocol.placement import place_under
from kafka_marshal.protocol.records import (
    ClaimingMessages,
    ClaimingPartition,
    GroupSettings,
    LayoutDone,
    LayoutFence,
    LayoutFinal,
    LayoutGroups,
    LayoutImport,
    Member,
    ReleasingPartition,
)
from kafka_marshal.protocol.types import Key
from simulator.base import TOPIC, BaseWorld
from simulator.checkers import Folded, LogWatcher, Violation
from simulator.loop import Loop
from simulator.node import Cluster
from simulator.pauses import ADMIN
from simulator.plan import RESIZE_COUNTS, RESIZE_STEPS, Fault, chance
from simulator.positions import Admin, Processes, Tools, begin
from simulator.turns import Killed, refusal_of
from simulator.world import World

CONTINUES = 0.5
LOSES_PROBES = 0.5
LATER = (1, 1, 1, 2, 3, 5)
"""The step of its kind, counted from 1, at which an admin may die."""
ONCE = frozenset({"add", "first_fence", "first_final"})
"""Steps that an admin takes once."""
GROUPS = ("h1", "h2", "h3", "h4")
"""Groups without members, whose settings and keys move."""
FREE_KEYS = 4
ADD, PROBE, FENCE, FINAL = "add", "probe", "fence", "final"
FIRST = "first_"
DEATHS = tuple((step, is_after) for step in RESIZE_STEPS for is_after in (False, True))
"""When an admin may die: before or after a step of each kind."""
LIVES = 2
"""Additional draws, besides the deaths, with which an admin lives."""
STEP_OF: dict[type, str] = {
    Member: PROBE,
    LayoutFence: FENCE,
    LayoutImport: "import",
    LayoutGroups: "groups",
    LayoutDone: "done",
    LayoutFinal: FINAL,
}


@attrs.frozen
class Death:
    """The moment at which an admin dies.

    Attributes:
        step: Kind of the step, of ``RESIZE_STEPS``.
        number: Number of the admin's step of that kind, from 1.
        is_after: Whether it dies right after the step, before it reads the outcome.
    """

    step: str
    number: int
    is_after: bool

    @property
    def name(self) -> str:
        """The name of the situation to count."""
        return f"died_{'after' if self.is_after else 'before'}_{self.step}"

    @property
    def is_early(self) -> bool:
        """Whether it is before the commit point, so that the change is given up."""
        before = RESIZE_STEPS.index(self.step) < RESIZE_STEPS.index(FIRST + FENCE)
        return before or (self.step == FIRST + FENCE and not self.is_after)

    @classmethod
    def of(cls, fault: Fault) -> "Death | None":
        """Return the death that a fault brings, None for an admin that lives."""
        return cls.at(fault.size, fault.who)

    @classmethod
    def at(cls, place: int, later: int) -> "Death | None":
        """Return a death by two numbers of any size, None for an admin that lives."""
        place %= len(DEATHS) + LIVES
        if place >= len(DEATHS):
            return None
        step, is_after = DEATHS[place]
        number = 1 if step in ONCE else LATER[later % len(LATER)]
        return cls(step, number, is_after)


class Mortal:
    """Counts the steps of one admin, and kills it at one of them."""

    def __init__(self, death: Death | None, *, begun: set[bytes]) -> None:
        """Let the admin live until its death.

        Args:
            death: The moment of its death, None if it lives.
            begun: Operations of all admins whose first fence was written.
        """
        self.has_died = False
        self._death = death
        self._begun = begun
        self._counts: Counter[str] = Counter()
        self._is_dying = False

    def on_append(self, partition: int, value: bytes) -> None:
        """Count a record that is about to be written.

        Raises:
            Killed: The admin dies before the record is written.
        """
        record = decode(value)
        name = STEP_OF[type(record)]
        if isinstance(record, LayoutFence):
            is_first = partition == 0 and record.op_id not in self._begun
            name = FIRST * is_first + name
        elif name == FINAL:
            name = FIRST * (partition == 0) + name
        self.before(name)
        if isinstance(record, LayoutFence):
            self._begun.add(record.op_id)
        # The admin writes this record, and dies before it does anything else.
        self._is_dying = self._is_at(name, is_after=True)

    def before(self, name: str) -> None:
        """Die before a step, if the plan says so.

        Raises:
            Killed: The admin dies before this step, or after the previous one.
        """
        self._counts[name] += 1
        if self._is_dying or self._is_at(name, is_after=False):
            self._die()

    def after(self, name: str) -> None:
        """Die after a step, if the plan says so.

        Raises:
            Killed: The admin dies after this step.
        """
        if self._is_at(name, is_after=True):
            self._die()

    def on_wait(self) -> None:
        """Die instead of waiting for a record just written, if the plan says so.

        Raises:
            Killed: The admin dies.
        """
        if self._is_dying:
            self._die()

    def _is_at(self, name: str, *, is_after: bool) -> bool:
        return self._death == Death(name, self._counts[name], is_after)

    def _die(self) -> None:
        self.has_died = True
        raise Killed


class Tool(Resizing):
    """The production code of an admin, over the log of a simulated world."""

    def __init__(
        self, tools: Tools, mortal: Mortal, *, add: Callable[[int], None]
    ) -> None:
        """Start with the tools of an admin that has read the log to its end.

        Args:
            tools: The tools of the admin's process.
            mortal: Kills the admin.
            add: Adds Kafka partitions up to a count.
        """
        self._sender, self._clock = tools.sender, tools.clock
        self._timeout_ms = 2 * tools.config.heartbeat_interval_ms
        self._tools, self._mortal, self._add = tools, mortal, add
        self._follower = tools.follower

    def _read(self) -> Follower:
        follower = self._follow()
        follower.catch_up(self._timeout_ms)
        return follower

    def _follow_again(self) -> Follower:
        self._close_follower()
        self._follower = self._tools.follow_again()
        return self._follow()

    def _add_partitions(self, count: int) -> None:
        self._mortal.before(ADD)
        self._add(count)
        self._mortal.after(ADD)


def add_partitions(cluster: Cluster, count: int) -> None:
    """Add Kafka partitions to the log up to a count; each has its own leader."""
    kafka = cluster.kafka
    there = len(kafka.topic(COORDINATION_TOPIC).partitions)
    if there < count:
        kafka.add_partitions(COORDINATION_TOPIC, count - there)
    for number in range(there, count):
        kafka.log(cluster.place(number)).leader = number


def fill(cluster: Cluster, *, count: int) -> None:
    """Write state without members that must move: settings and keys of other groups."""
    for number, group_id in enumerate(GROUPS):
        sender: dict[str, Any] = {
            "client_id": ADMIN.client_id,
            "group_id": group_id,
            "incarnation": ADMIN.incarnation,
            "seq": number,
        }
        for partition in range(FREE_KEYS):
            _write_free(cluster, Key(group_id, TOPIC, partition), sender, count=count)
        record = GroupSettings(
            **sender,
            generation=1,
            policy="fair",
            planner_version_max=None,
            debounce_ms=None,
            handoff_ms=None,
            handoffs_max=None,
            grace_ms=None,
            reason=None,
        )
        home = home_partition(group_id, partition_count=count)
        cluster.kafka.produce(cluster.place(home), encode(record))


def _write_free(
    cluster: Cluster, key: Key, sender: Mapping[str, Any], *, count: int
) -> None:
    """Claim and release a key."""
    place = cluster.place(place_under(key, count))
    named = {**sender, "topic": key.topic, "partition": key.partition}
    claim = ClaimingPartition(
        **named,
        generation=1,
        topic_id=None,
        resume_hash=None,
        expected_epoch=None,
        resume=None,
    )
    epoch = cluster.kafka.produce(place, encode(claim))
    release = ReleasingPartition(
        **named, epoch=epoch, position=None, successor=None, reason=None
    )
    cluster.kafka.produce(place, encode(release))


class ChangeJudge:
    """Judges that each change is completed, or given up without a trace.

    Attributes:
        may_lose: Whether logs may lose records that were read (PROTOCOL 10.9).
        begun: Operations whose first fence was written.
        committed: Operations that partition 0 has accepted.
        ended: Operations that partition 0 has ended.
    """

    def __init__(self, watcher: LogWatcher) -> None:
        """Start without any."""
        self._watcher = watcher
        self.may_lose = False
        self.begun: set[bytes] = set()
        self.committed: set[bytes] = set()
        self.ended: set[bytes] = set()

    def take(self, folded: Folded) -> None:
        """Judge a transition.

        Raises:
            Violation: A partition follows a change that partition 0 has not accepted.
        """
        record, effect = folded.transition.record, folded.transition.effect
        is_first = folded.partition == 0
        if effect == "layout_fenced" and isinstance(record, LayoutFence):
            if is_first:
                self.committed.add(record.op_id)
            elif record.op_id not in self.committed and not self.may_lose:
                text = f"{record.op_id!r} is in {folded.partition}, and not in 0"
                raise Violation("10.2", text)
        elif effect == "layout_final" and isinstance(record, LayoutFinal) and is_first:
            self.ended.add(record.op_id)

    def are_over(self) -> bool:
        """Return whether each change has ended everywhere, or was given up."""
        worlds = self._watcher.worlds
        if any(each.layout is not None for each in worlds):
            return False
        if not self.may_lose:
            return self.committed == self.ended
        # A change that is lost before another partition has it never began.
        used = worlds[: used_count(worlds[0])]
        generations = {each.config and each.config.generation for each in used}
        return len(generations) == 1 and None not in generations


class ResizeAdmins(Processes):
    """Lets admins change the number of coordinating partitions of any world.

    Attributes:
        changes: Judges the changes.
    """

    def __init__(
        self, world: BaseWorld, *, loop: Loop, h_ms: int, note: Callable[[str], None]
    ) -> None:
        """Start without any.

        Args:
            world: The world.
            loop: Calls its processes.
            h_ms: The heartbeat interval.
            note: Counts a situation.
        """
        super().__init__()
        self._base, self._loop, self._h_ms, self._note = world, loop, h_ms, note
        self.changes = ChangeJudge(world.watcher)

    def __repr__(self) -> str:
        """Return the open changes, by partition."""
        states = self._base.watcher.worlds
        return str({s.partition: s.layout for s in states if s.layout is not None})

    def are_over(self) -> bool:
        """Return whether no change is open in any partition, and no admin works."""
        return self.changes.are_over() and self.are_done()

    def change_again(self, rng: random.Random) -> None:
        """Begin a change that no fault interrupts."""
        self.begin("resizer", rng)

    def begin(
        self, name: str, rng: random.Random, *, death: Death | None = None
    ) -> None:
        """Begin a change, or continue one that is open; maybe die at a step."""
        world = self._base
        config = world.watcher.worlds[0].config
        if config is None or config.partition_count not in RESIZE_COUNTS:
            return
        count = rng.choice(RESIZE_COUNTS[config.partition_count])
        is_open = any(each.layout is not None for each in world.watcher.worlds)
        if is_open and rng.random() < CONTINUES:
            count = config.partition_count
        admin = Admin(name=name, rng=rng, for_ms=self._h_ms)
        mortal = Mortal(death, begun=self.changes.begun)
        world.trace(f"{name} wants {count} coordinating partitions, {death}")
        begin(
            admin,
            partial(self._work, mortal, count),
            loop=self._loop,
            cluster=world.cluster,
            on_append=mortal.on_append,
            on_wait=mortal.on_wait,
            on_end=partial(self._on_end, admin, mortal, death),
        )
        self._admins.append(admin)

    def _work(self, mortal: Mortal, count: int, admin: Admin, tools: Tools) -> None:
        world = self._base
        tool = Tool(tools, mortal, add=partial(add_partitions, world.cluster))
        plan = tool.resize_topic(count, execute=True)
        if plan.is_needed:
            is_new = plan.change is None
            self._note("resize_completed" if is_new else "resize_continued")
        world.trace(f"{admin.name} has brought {count} coordinating partitions")

    def _on_end(self, admin: Admin, mortal: Mortal, death: Death | None) -> None:
        assert admin.program is not None
        error = refusal_of(admin.program)
        if mortal.has_died and death is not None:
            self._base.trace(f"{admin.name} {death.name}")
            self._note(death.name)
            self._note("resize_given_up" if death.is_early else "resize_left")
            if death.is_early and admin.rng.random() < LOSES_PROBES:
                self._lose_probes(admin)
        elif error is not None:
            reason = getattr(error, "reason", "")
            text = f"{admin.name} gives up: {type(error).__name__} {reason}"
            self._base.trace(text)
            self._on_refusal(error)
            self._note("resize_refused")

    def _lose_probes(self, gone: Admin) -> None:
        """Delete records that were read in partitions that no change put into use."""
        if self.changes.may_lose:
            return  # a log that is cut at both ends cannot be recovered
        others = (each.program for each in self._admins if each is not gone)
        if not all(each is None or each.is_done for each in others):
            return  # it could be the probe of a change that continues
        cluster, worlds = self._base.cluster, self._base.watcher.worlds
        first = worlds[0].config
        # Members complete a change whose admin is gone, and need its probes.
        used = 0 if first is None else first.partition_count
        for state in worlds[used:]:
            log = cluster.kafka.log(cluster.place(state.partition))
            if state.config is None and log.start < state.next_offset:
                place = cluster.place(state.partition)
                cluster.kafka.delete_records(place, before=state.next_offset)
                self._note("probes_lost")

    def _on_refusal(self, error: MarshalError) -> None:
        """Judge the error with which an admin gives up.

        Raises:
            Violation: Partitions have two changes of one generation.
        """
        if isinstance(error, LogUnreadable):
            raise Violation("10", str(error))


class Resizes(ResizeAdmins):
    """Lets admins change the number of coordinating partitions, as faults of a plan."""

    def __init__(self, world: World) -> None:
        """Start without any."""
        note = world.coverage.note
        super().__init__(world, loop=world.loop, h_ms=world.plan.h_ms, note=note)
        self._world = world
        self.changes.may_lose = world.is_truncating
        if world.is_resizing:
            fill(world.cluster, count=world.plan.coordinators)

    def on_fold(self, folded: Folded) -> None:
        """Judge changes, and count the situations of keys that move.

        Raises:
            Violation: A change breaks a rule.
        """
        transition, note = folded.transition, self._note
        record = transition.record
        if isinstance(record, LayoutFence) and transition.effect == "layout_fenced":
            if folded.partition == 0:
                self._on_fence(record)
            if record.op_id == restored_op(config_of(record)):
                note("change_restored")
        self.changes.take(folded)
        if transition.effect == "imported":
            note("moved_stale" if self._was_owned(transition.key) else "moved")
        elif isinstance(record, ReleasingPartition) and transition.effect:
            if (record.reason or "").startswith(MOVING):
                note("moving_released")
        elif isinstance(record, ClaimingMessages) and transition.reason == MOVING:
            note("grant_refused_moving")

    def _on_fence(self, record: LayoutFence) -> None:
        is_more = config_of(record).partition_count > record.from_count
        self._note("grown" if is_more else "shrunk")

    def _was_owned(self, key: Key | None) -> bool:
        states = self._world.watcher.worlds
        return key is not None and any(
            is_final(state, key) and state.keys[key].owner is not None
            for state in states
            if state.layout is not None
        )

    def _on_refusal(self, error: MarshalError) -> None:
        """Judge the error unless logs go back: then changes may share a generation."""
        if not self._world.is_truncating:
            super()._on_refusal(error)

    def strike(self, fault: Fault) -> None:
        """Begin a change, or continue one that is open; maybe die at a step."""
        rng = chance(self._world.plan.seed, f"resize/{fault.number}")
        self.begin(f"resizer{fault.number}", rng, death=Death.of(fault))
