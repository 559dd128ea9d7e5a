"""Admins that set positions of a simulated fleet."""

import pytest

from simulator.checkers import Violation
from simulator.coverage import SET
from simulator.fleet import Fleet
from simulator.plan import POSITIONS, Fault, draw
from simulator.position_judge import unresolved_in
from simulator.positions import ENDS_HS_MAX, Admins
from simulator.world import World

FOR_MS = 8_000


class Scene:
    """A world with one process, and admins that set positions."""

    def __init__(self, seed=6):
        self.world = World(draw(seed, faults=(POSITIONS,)))
        self.h_ms = self.world.plan.h_ms
        self.fleet = Fleet(self.world)
        self.world.on_news = self.fleet.on_news
        self.app = self.fleet.admit()
        self.world.produce(10)
        self.run(10)
        self.admins = Admins(self.world, self.fleet)

    def run(self, intervals):
        self.world.run(intervals * self.h_ms)

    def strike(self, number):
        self.admins.strike(
            Fault(
                number=number,
                at_ms=0,
                kind=POSITIONS,
                for_ms=FOR_MS,
                who=number,
                size=number,
            )
        )

    def settle(self):
        limit_ms = ENDS_HS_MAX * self.h_ms
        assert self.world.run(limit_ms, is_done=self.admins.are_done) is not None
        worlds = self.world.watcher.worlds
        resolved = self.world.run(limit_ms, is_done=lambda: not unresolved_in(worlds))
        assert resolved is not None

    @property
    def counts(self):
        return self.world.coverage.counts


@pytest.fixture(name="scene")
def _scene():
    scene = Scene()
    yield scene
    scene.admins.close()


def test_operations_end_even_if_their_admins_die(scene):
    for number in range(40):
        scene.strike(number)
        scene.settle()
    operations = scene.world.positions.operations.values()
    assert sum(bool(each.moved) for each in operations) == scene.counts["set_committed"]
    assert scene.counts["set_committed"] > 2
    died = {name: scene.counts[name] for name in SET if name.startswith("admin_died")}
    assert sum(died.values()) > 2
    assert all(not each.locked for each in operations)


def test_two_admins_at_once_exclude_each_other(scene):
    for number in range(20, 26):
        scene.strike(number)
    scene.settle()
    assert scene.counts["admin_gave_up"] > 0


def test_an_undo_sets_the_earlier_positions_without_a_violation(scene):
    for number in range(40):
        scene.strike(number)
        scene.settle()
        if scene.counts["set_undone"]:
            break
    assert scene.counts["set_undone"] > 0
    *earlier, undo = scene.world.positions.operations.values()
    assert undo.targets
    assert any(undo.targets == each.moved for each in earlier)
    assert undo.moved.keys() == undo.targets.keys()


def test_an_undo_to_other_positions_is_a_violation(scene):
    def strike_all():
        for number in range(60):
            scene.strike(number)
            scene.settle()
            for each in scene.world.positions.operations.values():
                each.moved = {key: (head or 0) + 1 for key, head in each.moved.items()}

    with pytest.raises(Violation, match=r"8\.6"):
        strike_all()


def test_no_position_is_set_while_the_topic_is_deleted(scene):
    scene.world.cluster.kafka.delete_topic("t")
    scene.strike(1)
    assert scene.world.positions.operations == {}


def test_an_unreachable_home_and_a_lagging_reader_are_healed():
    scene = Scene()
    try:
        for number in range(30):
            scene.strike(number)
        transcript = "".join(scene.world.transcript)
        assert "the home" in transcript
        assert "ms late" in transcript
        scene.admins.heal()
        assert scene.app.node.log.lags_ms == {}
        scene.fleet.remove(scene.app)
        for number in range(30, 60):
            scene.strike(number)  # no reader is left
    finally:
        scene.admins.close()
    assert scene.admins.are_done()
