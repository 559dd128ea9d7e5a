"""Kept states and checkpoints, from which simulated processes start."""

import pytest

from kafka_marshal.ports import LogRange
from simulator.checkers import Violation
from simulator.fleet import Fleet
from simulator.keeping import Shelf
from simulator.plan import Fault, draw
from simulator.world import World

H_MS = 10_000


class Scene:
    """A world without faults, in which states are kept."""

    def __init__(self, *kinds):
        self.world = World(draw(3, faults=kinds or ("checkpoint", "keep")))
        self.fleet = Fleet(self.world)
        self.world.on_news = self.fleet.on_news
        self.keeping = self.fleet.keeping
        self.app = self.fleet.admit()

    def run(self, duration_ms=60 * H_MS):
        self.world.run(duration_ms)
        return self.world.coverage.counts


def test_a_process_starts_from_a_written_checkpoint():
    scene = Scene("checkpoint")
    assert scene.run()["checkpoint_written"] > 0
    scene.fleet.admit()
    assert scene.run()["began_from_checkpoint"] > 0


def test_a_process_starts_from_the_state_kept_on_its_host():
    scene = Scene("keep")
    scene.run()
    scene.keeping.keep(scene.app.node)
    scene.fleet.remove(scene.app)
    client_id = scene.app.node.owner.client_id
    scene.fleet.start(client_id, ())
    assert scene.run()["began_from_kept"] > 0
    assert scene.world.coverage.counts["began_from_checkpoint"] == 0


def test_a_damaged_kept_state_is_not_used():
    scene = Scene("keep", "damage")
    scene.run()
    scene.keeping.keep(scene.app.node)
    fault = Fault(number=1, at_ms=0, kind="damage", for_ms=0, who=0, size=0)
    for number in range(scene.world.plan.coordinators):
        assert scene.keeping.damage(scene.app.node, number, fault=fault)
    scene.fleet.remove(scene.app)
    scene.fleet.start(scene.app.node.owner.client_id, ())
    counts = scene.run()
    scene.keeping.require_sound()
    assert counts["began_despite_damage"] > 0
    assert counts["began_from_kept"] == 0
    scene.keeping.files.misled = "somebody began from it"
    with pytest.raises(Violation, match=r"7\.1"):
        scene.keeping.require_sound()
    scene.keeping.close()


def test_a_shelf_returns_the_states_of_requested_partitions():
    shelf, scene = Shelf(), Scene("keep")
    scene.run()
    scene.keeping.keep(scene.app.node)
    kept = scene.keeping.sources(scene.app.node.owner.client_id)[0]
    assert isinstance(kept, Shelf)
    shelf.states = kept.states
    found = shelf.find({0: LogRange(0, 9), 99: LogRange(0, 9)}, log=None, timeout_ms=1)
    assert found == {0: shelf.states[0]}


def test_states_are_kept_only_if_drawn():
    scene = Scene("crash")
    assert scene.keeping.sources("a") == ()
    assert scene.keeping.writer(scene.app.node) is None
    assert "checkpoint_written" not in scene.run()


def test_a_process_that_dies_in_a_write_leaves_a_torn_checkpoint():
    scene, begun = Scene("checkpoint"), []

    def die(incarnation):
        begun.append(incarnation)
        scene.fleet.remove(scene.app)

    scene.keeping.on_begin.append(die)
    scene.run()
    assert begun == [scene.keeping.writer(scene.app.node)]
    assert scene.world.coverage.counts["checkpoint_torn"] == 1


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_reset_needs_a_checkpoint(has_checkpoint):
    scene = Scene("checkpoint") if has_checkpoint else Scene("keep")
    scene.run()
    scene.keeping.reset(0)
    assert scene.run(4 * H_MS)["reset"] == has_checkpoint
    message = "is no checkpoint" if not has_checkpoint else "is replaced by"
    assert any(message in line for line in scene.world.transcript)
