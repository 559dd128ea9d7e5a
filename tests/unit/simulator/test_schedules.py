"""Scheduled pauses of a simulated fleet, and their judge."""

from collections import Counter

import pytest
from logkit import START_MS, H, Log, beat, layout_fence, pause, scope_of

from kafka_marshal.protocol import fold_groups, fold_layouts
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import SECOND_LEVEL, PauseGroup
from simulator.checkers import Folded, Violation
from simulator.fakestore import Stored
from simulator.plan import SCHEDULES, Fault, draw
from simulator.schedules import ScheduleJudge, Schedules
from simulator.world import World

OP = b"scheduled".ljust(16, b".")


class Scene:
    """A log of one coordinating partition, and its judge."""

    def __init__(self, log=None):
        self.log, self.seen = log or Log(level=SECOND_LEVEL), Counter()
        self.judge = ScheduleJudge(lambda name: self.seen.update([name]))

    def land(self, record, *, after=1):
        for transition in self.log.append(record, after=after):
            stored = Stored(
                offset=0,
                leader_epoch=0,
                timestamp_ms=0,
                timestamp_type=1,
                key=None,
                value=encode(record),
                headers=(),
                landed_ms=0,
            )
            self.judge.take(Folded(0, stored, transition, None, 0, False), self.state)

    @property
    def state(self):
        return self.log.state

    def schedule(self, begin_ms, until_ms, *, op=OP, scope=None):
        self.land(
            PauseGroup(
                client_id="admin",
                group_id="g",
                incarnation=OP,
                seq=1,
                op_id=op,
                begin_time=self.state.append_time_ms + begin_ms,
                msg_expire_time=self.state.append_time_ms + until_ms,
                scope=scope_of(scope),
                reason=None,
            )
        )


def test_a_scheduled_pause_begins_at_its_time():
    scene = Scene()
    scene.schedule(H, 9 * H)
    scene.schedule(H, 9 * H, op=b"another".ljust(16, b"."))
    scene.land(pause(START_MS), after=2 * H)
    assert scene.seen["scheduled"] == 2
    assert scene.seen["schedule_begun"] == 1


def test_a_scheduled_pause_that_does_not_begin_is_a_violation(monkeypatch):
    monkeypatch.setattr(fold_groups, "_begin", lambda *_: None)
    scene = Scene()
    scene.schedule(H, 9 * H)
    with pytest.raises(Violation, match=r"4\.14"):
        scene.land(beat(0), after=2 * H)


def test_a_change_of_the_partition_count_ends_all_schedules():
    scene = Scene(Log(1, level=SECOND_LEVEL, k=2))
    scene.schedule(H, 9 * H)
    scene.schedule(H, 9 * H, op=b"some".ljust(16, b"."), scope={"t": (0,)})
    scene.land(layout_fence(4, 2, level=SECOND_LEVEL))
    scene.land(beat(0), after=2 * H)
    assert scene.seen["schedule_ended_by_resize"] == 1
    assert not scene.seen["schedule_begun"]


def test_a_schedule_kept_by_a_change_of_the_count_is_a_violation(monkeypatch):
    monkeypatch.setattr(fold_layouts, "_end_pauses", lambda *_: None)
    scene = Scene(Log(1, level=SECOND_LEVEL, k=2))
    scene.schedule(H, 9 * H)
    with pytest.raises(Violation, match=r"10\.2"):
        scene.land(layout_fence(4, 2, level=SECOND_LEVEL))


def test_pauses_of_some_partitions_are_judged_independently():
    scene = Scene()
    scene.schedule(H, 3 * H, scope={"t": (0,)})
    scene.schedule(H, 9 * H, op=b"another".ljust(16, b"."), scope={"t": ()})
    scene.land(beat(0), after=2 * H)
    assert len(scene.state.groups["g"].scoped) == len(scene.judge.scoped) == 2
    scene.land(beat(0), after=2 * H)
    assert list(scene.judge.scoped) == [b"another".ljust(16, b".")]


@pytest.mark.parametrize("begin_ms", [0, H], ids=["lasts too long", "never begins"])
def test_a_wrong_pause_of_some_partitions_is_a_violation(monkeypatch, begin_ms):
    monkeypatch.setattr(fold_groups, "_begin", lambda *_: None)
    scene = Scene()
    scene.schedule(begin_ms, 3 * H, scope={"t": (0,)})
    if not begin_ms:
        scene.state.groups["g"].scoped[0].until_ms += 9 * H
    with pytest.raises(Violation, match=r"4\.15"):
        scene.land(beat(0), after=3 * H if not begin_ms else 2 * H)


def test_admins_schedule_and_cancel_pauses():
    world = World(draw(6, faults=(SCHEDULES,)))
    schedules = Schedules(world)
    world.on_folded = schedules.on_fold
    for number in range(40):
        schedules.strike(
            Fault(number=number, at_ms=0, kind=SCHEDULES, for_ms=0, who=0, size=0)
        )
        world.run(world.plan.h_ms)
    world.is_healed = True
    schedules.heal()
    world.settle()
    for name in ("scheduled", "schedule_begun", "schedule_cancelled"):
        assert world.coverage.counts[name] > 0
    assert all(state.active_pause("g") is None for state in world.watcher.worlds)
    assert all(
        not state.groups or not state.groups["g"].scheduled
        for state in world.watcher.worlds
    )
