"""Admins fence processes of a simulated fleet."""

import pytest

from simulator.fences import Fences
from simulator.fleet import Fleet
from simulator.plan import FENCES, Fault, draw
from simulator.world import World


class Scene:
    """A world without processes at first, and admins that fence."""

    def __init__(self):
        self.world = World(draw(6, faults=(FENCES,)))
        self.fleet = Fleet(self.world)
        self.world.on_news = self.fleet.on_news
        self.fences = Fences(self.world, self.fleet)
        self.world.on_folded = self.fences.on_fold

    def run(self, intervals=4):
        self.world.run(intervals * self.world.plan.h_ms)
        return self.world.coverage.counts

    def strike(self, number=1):
        self.fences.strike(
            Fault(number=number, at_ms=0, kind=FENCES, for_ms=0, who=0, size=0)
        )


@pytest.fixture(name="scene")
def _scene():
    return Scene()


def test_a_fence_without_processes_does_nothing(scene):
    scene.strike()
    assert scene.run() == {}


def test_a_running_process_notices_its_fence_and_is_restarted(scene):
    app = scene.fleet.admit()
    scene.run(10)
    scene.fences.fence(app.node.owner)
    assert scene.run()["fence_noticed"] == 1
    assert app.is_gone
    assert [each.node.owner.client_id for each in scene.fleet.apps] == [
        app.node.owner.client_id
    ]


def test_a_hung_process_that_is_fenced_loses_its_keys(scene):
    app = scene.fleet.admit()
    scene.run(10)
    app.wakes_ms = scene.world.now_ms + 10**6
    scene.strike()
    assert scene.world.coverage.counts["fenced_hung"] == 1
    scene.fleet.admit()
    counts = scene.run(10)
    assert counts["taken_from_fenced"] == len(scene.world.places)
    assert not counts["fence_noticed"]


def test_an_ended_process_may_be_fenced_repeatedly(scene):
    app = scene.fleet.admit()
    scene.run(10)
    scene.fleet.remove(app)
    scene.strike()
    assert scene.world.coverage.counts["fenced_gone"] == 1
    scene.strike(2)
    assert scene.world.coverage.counts["fence_repeated"] == 1
