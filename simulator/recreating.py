"""Deletes the data topic under a fleet, and creates it again (PROTOCOL 5.6)."""

from functools import partial

from simulator.base import TOPIC
from simulator.fleet import Fleet
from simulator.plan import Fault, chance
from simulator.world import World

PERCENT = 100
GAP_PARTS = 4
RECORDS = (0, 5, 40)
"""Initial numbers of records of the next topic: fewer or more than the last one's."""


class Recreations:
    """Replaces the data topic by a new topic of its name."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        """Start with the topic that the world was made with."""
        self._world = world
        self._fleet = fleet

    def strike(self, fault: Fault) -> None:
        """Delete the topic, and create it again: at once, or after a while."""
        world = self._world
        if world.topic_id is None:
            return
        world.coverage.note("recreated")
        if any(app.hand for app in self._fleet.apps):
            world.coverage.note("recreated_with_records")
        world.cluster.kafka.delete_topic(TOPIC)
        world.trace(f"topic {TOPIC} is deleted")
        count = chance(world.plan.seed, f"recreate/{fault.number}").choice(RECORDS)
        if fault.size < PERCENT // 2:
            self._create(count)
        else:
            at_ms = world.now_ms + 1 + fault.for_ms // GAP_PARTS
            world.loop.at(at_ms, partial(self._create, count))

    def heal(self) -> None:
        """Create the topic if it does not exist."""
        self._create(0)

    def _create(self, count: int) -> None:
        world = self._world
        if world.topic_id is None:
            world.cluster.kafka.create_topic(TOPIC, len(world.places))
            world.trace(f"topic {TOPIC} is created again, with {count} records")
            world.produce(count)
