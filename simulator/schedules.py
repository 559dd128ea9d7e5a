"""Admins that schedule pauses, which begin after the admins are gone (4.14)."""

from collections.abc import Callable
from functools import partial

import attrs
from msgspec.structs import replace

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.items import Pause
from kafka_marshal.protocol.judging import scope_of
from kafka_marshal.protocol.records import (
    PauseGroup,
    ReleaseGroup,
    ResolvePosition,
    ScopedTopic,
)
from kafka_marshal.protocol.state import (
    WorldState,
)
from simulator.base import GROUP, TOPIC
from simulator.checkers import Folded, Violation
from simulator.pauses import ADMIN
from simulator.plan import Fault, chance
from simulator.world import World

DIES, IS_LATE = 0.2, 0.2
CANCELS, REPEATS, TWO = 0.2, 0.15, 0.2
OF_PAUSES = (ReleaseGroup, PauseGroup, ResolvePosition)


@attrs.define
class ScheduleJudge:
    """Judges one coordinating partition: scheduled pauses begin, and end, in time.

    Attributes:
        note: Counts a situation.
        due: Begin and end of the scheduled pauses, by op_id.
        scoped: Begin and end of the pauses with a scope, by op_id.
        waiting: Scheduled pauses that were due during another pause.
        lasting: The active pause after the last record, if any.
    """

    note: Callable[[str], None]
    due: dict[bytes, tuple[int, int]] = attrs.field(factory=dict)
    scoped: dict[bytes, tuple[int, int]] = attrs.field(factory=dict)
    waiting: set[bytes] = attrs.field(factory=set)
    lasting: Pause | None = None

    def take(self, folded: Folded, state: WorldState) -> None:
        """Judge a transition, with the state after its record.

        Raises:
            Violation: A pause lasts too long, begins at a wrong time, or outlives a
                change of the count.
        """
        record, now_ms = folded.transition.record, state.append_time_ms
        pause = state.active_pause(GROUP)
        self._on_record(folded, state)
        if pause is not None and now_ms >= pause.until_ms:
            raise Violation("4.8", f"{pause} lasts at {now_ms}")
        op_id = None if pause is None else pause.op_id
        self._judge_scoped(state)
        before, self.lasting = self.lasting, pause
        for each, (begin_ms, until_ms) in list(self.due.items()):
            if each == op_id:
                if now_ms < begin_ms:
                    raise Violation("4.14", f"{each!r} begins before {begin_ms}")
                if before is not None and now_ms < before.until_ms:
                    raise Violation("4.14", f"{each!r} begins during {before}")
                self._end(each, "schedule_begun")
            elif until_ms <= now_ms:
                self._end(each, "schedule_missed")
            elif begin_ms <= now_ms and pause is not None:
                self.waiting.add(each)
            elif begin_ms <= now_ms and not isinstance(record, OF_PAUSES):
                text = f"{each!r} is due since {begin_ms}, and no pause lasts"
                raise Violation("4.14", text)

    def _judge_scoped(self, state: WorldState) -> None:
        """4.15: demand that pauses with a scope do not wait, and end in time."""
        now_ms, group = state.append_time_ms, state.groups.get(GROUP)
        lasting = {} if group is None else {each.op_id: each for each in group.scoped}
        for each in lasting.values():
            if now_ms >= each.until_ms:
                raise Violation("4.15", f"{each} lasts at {now_ms}")
        for op_id, (begin_ms, until_ms) in list(self.scoped.items()):
            is_due = begin_ms <= now_ms < until_ms
            if is_due != (op_id in lasting):
                text = f"{op_id!r}, from {begin_ms} until {until_ms}, at {now_ms}"
                raise Violation("4.15", text)
            if until_ms <= now_ms:
                del self.scoped[op_id]

    def _on_record(self, folded: Folded, state: WorldState) -> None:
        record, effect = folded.transition.record, folded.transition.effect
        if effect == "layout_fenced":
            self._on_fence(state)
        if not isinstance(record, PauseGroup | ReleaseGroup):
            return
        if scope_of(record) is not None and effect in {"paused", "scheduled"}:
            assert isinstance(record, PauseGroup)
            begin_ms = record.begin_time or state.append_time_ms
            self.scoped[record.op_id] = begin_ms, record.msg_expire_time
        elif effect == "unpaused" and record.op_id in self.scoped:
            del self.scoped[record.op_id]
        elif effect == "unpaused" and record.op_id in self.due:
            self._end(record.op_id, "schedule_cancelled")
        elif effect == "paused":
            self.due.pop(record.op_id, None)
        elif effect == "scheduled" and isinstance(record, PauseGroup):
            assert state.config is not None
            longest_ms = state.config.limit("max_pause_ms")
            until_ms = min(record.msg_expire_time, record.begin_time + longest_ms)
            is_new = record.op_id not in self.due
            self.note("scheduled" if is_new else "schedule_repeated")
            self.due[record.op_id] = record.begin_time, until_ms
        elif isinstance(record, PauseGroup):
            self.note("schedule_refused")

    def _on_fence(self, state: WorldState) -> None:
        """10.2: demand that a fence ends all pauses, also scheduled ones."""
        group = state.groups.get(GROUP)
        if group is not None and (group.pauses or group.scheduled):
            raise Violation("10.2", f"a fence leaves {group.pauses}, {group.scheduled}")
        for op_id in list(self.due):
            self._end(op_id, "schedule_ended_by_resize")
        self.scoped.clear()

    def _end(self, op_id: bytes, how: str) -> None:
        del self.due[op_id]
        if op_id in self.waiting and how == "schedule_begun":
            self.note("schedule_waited")
        self.note(how)


class Schedules:
    """Lets admins schedule, repeat and cancel pauses, as faults of a plan."""

    def __init__(self, world: World) -> None:
        """Start without any."""
        self._world = world
        self._records: list[PauseGroup] = []
        self._judges: dict[int, ScheduleJudge] = {}

    def strike(self, fault: Fault) -> None:
        """Schedule one or two pauses, or repeat or cancel a scheduled one."""
        rng = chance(self._world.plan.seed, f"schedules/{fault.number}")
        luck, numbers = rng.random(), list(self._numbers())
        if self._records and luck < CANCELS:
            self._cancel(rng.choice(self._records))
            return
        if self._records and luck < CANCELS + REPEATS:
            self._write(rng.choice(self._records), numbers)
            return
        h_ms = self._world.plan.h_ms
        for _ in range(2 if rng.random() < TWO else 1):
            begin_ms = self._world.cluster.clock.wall_ms() + rng.randint(1, 6 * h_ms)
            record = self._record(begin_ms, begin_ms + rng.randint(1, 3 * h_ms))
            rng.shuffle(numbers)
            cut = rng.randint(1, len(numbers))
            how = rng.random()
            self._write(record, numbers[:cut] if how < DIES + IS_LATE else numbers)
            if DIES <= how < DIES + IS_LATE:
                at_ms = self._world.now_ms + rng.randint(1, 4 * h_ms)
                self._world.loop.at(at_ms, partial(self._write, record, numbers[cut:]))

    def begin_after(self, wait_ms: int, *, for_ms: int) -> None:
        """Schedule a pause in all partitions, each by the clock of its leader."""
        kafka, cluster = self._world.cluster.kafka, self._world.cluster
        op_id = self._record(0, 0).op_id
        for number in self._numbers():
            leader = kafka.log(cluster.place(number)).leader
            begin_ms = kafka.clocks.wall_ms(leader, self._world.now_ms) + wait_ms
            record = replace(self._record(begin_ms, begin_ms + for_ms), op_id=op_id)
            cluster.kafka.produce(cluster.place(number), encode(record))
        self._world.trace(f"a pause of {for_ms} ms is scheduled, in {wait_ms} ms")

    def pause_some(
        self, wait_ms: int, *, numbers: tuple[int, ...], for_ms: int
    ) -> None:
        """Pause some data partitions everywhere, at once or later (PROTOCOL 4.15)."""
        kafka, cluster = self._world.cluster.kafka, self._world.cluster
        op_id = self._record(0, 0).op_id
        for number in self._numbers():
            leader = kafka.log(cluster.place(number)).leader
            begin_ms = kafka.clocks.wall_ms(leader, self._world.now_ms) + wait_ms
            record = replace(
                self._record(begin_ms if wait_ms else 0, begin_ms + for_ms),
                op_id=op_id,
                scope=(ScopedTopic(TOPIC, numbers),),
            )
            cluster.kafka.produce(cluster.place(number), encode(record))
        self._world.trace(f"{numbers} are paused for {for_ms} ms, in {wait_ms} ms")

    def heal(self) -> None:
        """Cancel or end every pause that was scheduled."""
        for record in self._records:
            self._cancel(record)

    def on_fold(self, folded: Folded) -> None:
        """Judge the effect of a record."""
        world = self._world
        if self._records and world.is_judged and not world.is_truncating:
            state = world.watcher.worlds[folded.partition]
            judge = self._judges.setdefault(
                folded.partition, ScheduleJudge(world.coverage.note)
            )
            judge.take(folded, state)

    def _numbers(self) -> range:
        """Return the coordinating partitions that an admin writes to."""
        return range(max(self._world.counts))

    def _record(self, begin_ms: int, until_ms: int) -> PauseGroup:
        record = PauseGroup(
            client_id=ADMIN.client_id,
            group_id=GROUP,
            incarnation=ADMIN.incarnation,
            seq=1,
            op_id=b"schedule%08d" % len(self._records),
            begin_time=begin_ms,
            msg_expire_time=until_ms,
            scope=None,
            reason=None,
        )
        self._records.append(record)
        return record

    def _write(self, record: PauseGroup, numbers: list[int]) -> None:
        world = self._world
        if world.is_healed:
            return
        for number in numbers:
            world.cluster.kafka.produce(world.cluster.place(number), encode(record))
        text = f"from {record.begin_time} until {record.msg_expire_time}"
        world.trace(f"a pause is scheduled in {numbers}, {text}")

    def _cancel(self, record: PauseGroup) -> None:
        cluster = self._world.cluster
        cancel = ReleaseGroup(
            client_id=ADMIN.client_id,
            group_id=GROUP,
            incarnation=ADMIN.incarnation,
            seq=2,
            op_id=record.op_id,
            msg_expire_time=0,
            reason=None,
        )
        for number in self._numbers():
            cluster.kafka.produce(cluster.place(number), encode(cancel))
        self._world.trace(f"{record.op_id!r} is cancelled")
