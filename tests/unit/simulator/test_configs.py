"""Configs of other levels, as an admin writes them."""

import pytest

from simulator.configs import Configs
from simulator.plan import HALT, LEVEL, Fault, draw
from simulator.world import World

BELOW, EQUAL = 0, 40


class Scene:
    """A world without anybody, and its admin."""

    def __init__(self):
        self.world = World(draw(3, faults=(LEVEL, HALT)))
        self.configs = Configs(self.world)
        self.numbers = range(self.world.plan.coordinators)

    def run(self, *sizes, kind=LEVEL, who=0):
        for number, size in enumerate(sizes):
            fault = Fault(
                number=number, at_ms=0, kind=kind, for_ms=0, who=who, size=size
            )
            (self.configs.halt if kind == HALT else self.configs.strike)(fault)
            self.world.run(4 * self.world.plan.h_ms)

    @property
    def levels(self):
        return {self.world.levels.in_force(number) for number in self.numbers}


def test_levels_fall_and_rise_everywhere():
    scene = Scene()
    scene.run(BELOW)
    assert scene.levels == {1}
    scene.run(EQUAL)
    assert scene.levels == {2}
    assert {w.config.generation for w in scene.world.watcher.worlds} == {3}


def test_two_changes_at_once_come_one_after_the_other():
    scene = Scene()
    for size in (BELOW, EQUAL):
        scene.configs.strike(
            Fault(number=size, at_ms=0, kind=LEVEL, for_ms=0, who=0, size=size)
        )
    scene.world.run(8 * scene.world.plan.h_ms)
    assert {w.config.generation for w in scene.world.watcher.worlds} == {3}


@pytest.mark.parametrize("size", range(66, 72))
def test_a_misfit_counts_nowhere(size):
    scene = Scene()
    scene.run(size)
    scene.world.settle()
    counts = scene.world.coverage.counts
    assert (counts["config_refused"], counts["level_changed"]) == (1, 0)
    assert not scene.world.levels.stops


def test_a_config_lost_in_a_failover_is_written_again():
    scene = Scene()
    kafka, place = scene.world.cluster.kafka, scene.world.cluster.place(0)
    scene.configs.strike(
        Fault(number=1, at_ms=0, kind=LEVEL, for_ms=0, who=0, size=BELOW)
    )
    while kafka.log(place).end == 1:
        scene.world.run(1)
    kafka.truncate(place, end=1, leader=9)
    scene.world.watcher.refold(0)
    scene.world.run(4 * scene.world.plan.h_ms)
    assert scene.levels == {1}


@pytest.mark.parametrize("dies_early", [False, True])
def test_the_last_config_halts_each_t_or_one(dies_early):
    scene = Scene()
    scene.run(dies_early, kind=HALT)
    assert set(scene.world.levels.stops) == ({0} if dies_early else {*scene.numbers})
    assert scene.configs.is_over
    scene.run(BELOW, EQUAL)
    assert (
        scene.configs.halt(Fault(number=9, at_ms=0, kind=HALT, for_ms=0, who=0, size=0))
        == ()
    )
    assert scene.world.coverage.counts["level_changed"] == 0


def test_no_reader_must_halt_if_the_log_is_truncated():
    scene = Scene()
    scene.world.is_truncating = True
    assert (
        scene.configs.halt(Fault(number=1, at_ms=0, kind=HALT, for_ms=0, who=0, size=0))
        == ()
    )
    assert not scene.configs.is_over
