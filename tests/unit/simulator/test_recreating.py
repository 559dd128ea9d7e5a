"""A data topic that is deleted under a fleet, and created again."""

import pytest

from simulator.fleet import Fleet
from simulator.plan import RECREATE, Fault, draw
from simulator.recreating import RECORDS, Recreations
from simulator.world import World

AT_ONCE, LATER = 0, 99
FOR_MS = 8_000


class Scene:
    """A world with one process; only the test recreates the topic."""

    def __init__(self):
        self.world = World(draw(3, faults=(RECREATE,)))
        self.fleet = Fleet(self.world)
        self.world.on_news = self.fleet.on_news
        self.app = self.fleet.admit()
        self.world.produce(10)
        self.world.run(10 * self.world.plan.h_ms)
        self.recreations = Recreations(self.world, self.fleet)

    def strike(self, number=1, *, size):
        self.recreations.strike(
            Fault(
                number=number, at_ms=0, kind=RECREATE, for_ms=FOR_MS, who=0, size=size
            )
        )

    @property
    def ends(self):
        kafka = self.world.cluster.kafka
        return [kafka.log(place).end for place in self.world.places]


@pytest.fixture
def scene():
    return Scene()


def test_a_topic_is_recreated_at_once_with_another_id(scene):
    earlier_id = scene.world.topic_id
    assert sum(scene.ends) == 10
    scene.strike(size=AT_ONCE)
    assert scene.world.topic_id not in {None, earlier_id}
    assert sum(scene.ends) in RECORDS
    assert scene.world.coverage.counts["recreated"] == 1


def test_the_recreated_topic_may_have_more_or_fewer_records(scene):
    counts = set()
    for number in range(20):
        scene.strike(number, size=AT_ONCE)
        counts.add(sum(scene.ends))
    assert counts == set(RECORDS)


def test_a_process_that_starts_without_the_topic_is_restarted(scene):
    scene.strike(size=LATER)
    assert scene.world.topic_id is None
    scene.world.produce(5)
    assert scene.fleet.admit() is None
    assert scene.fleet.apps == [scene.app]
    scene.strike(2, size=AT_ONCE)  # the topic is deleted already
    scene.world.run(FOR_MS + scene.world.plan.h_ms)
    assert scene.world.topic_id is not None
    assert len(scene.fleet.apps) == 2
    counts = scene.world.coverage.counts
    assert counts["recreated"] == counts["topic_missing"] == 1


def test_healing_creates_a_missing_topic_once(scene):
    scene.strike(size=LATER)
    scene.recreations.heal()
    topic_id = scene.world.topic_id
    assert topic_id is not None
    scene.recreations.heal()
    scene.world.run(FOR_MS)
    assert scene.world.topic_id == topic_id


def test_records_of_the_recreated_topic_are_consumed(scene):
    assert scene.world.left() == {}
    scene.strike(size=AT_ONCE)
    scene.world.produce(20)
    left = scene.world.left().values()
    assert sum(end for _, end in left) == sum(scene.ends)
    assert {position for position, _ in left} == {0}
    scene.world.run(20 * scene.world.plan.h_ms)
    assert scene.world.left() == {}
    assert scene.world.coverage.counts["topic_ended"] > 0
