"""Processes that seek in their claims, with sidecars or without (PROTOCOL 6.6)."""

import random

from kafka_marshal.config import Delivery
from kafka_marshal.engine.session import SEEK_UNCONFIRMED
from kafka_marshal.errors import InvalidTransition, MarshalError
from kafka_marshal.protocol.types import Key
from simulator.base import GROUP, TOPIC
from simulator.checkers import Violation
from simulator.seeks import OpenSeeks, Sought, draw_offset
from simulator.sidecar.host import SEED_BITS
from simulator.sidecar.world import HostedWorld, Process


class HostedSeeks:
    """Lets processes seek back and forward, and watches the ends of their seeks."""

    def __init__(self, world: HostedWorld) -> None:
        """Start without any."""
        self._world = world
        self._open = OpenSeeks()
        world.on_driven = self._on_driven

    def strike(self) -> None:
        """Let the application of an owner seek in a partition that it holds."""
        world = self._world
        rng = random.Random(world.rng.getrandbits(SEED_BITS))  # noqa: S311
        found = [
            (process, key)
            for process in world.processes
            if not process.is_leaving and process.wakes_ms <= world.now_ms
            for key in sorted(process.held)
            if key.group_id == GROUP and key.topic == TOPIC
        ]
        if not found:
            return
        process, key = rng.choice(found)
        end = world.cluster.kafka.log(key.topic_partition).end
        position = process.held[key].position or 0
        offset = draw_offset(rng, position, end=end)
        if world.delivery is Delivery.AT_MOST_ONCE:
            self._require_refusal(process, key, offset)
        else:
            self._seek(process, key, offset)

    def _require_refusal(self, process: Process, key: Key, offset: int) -> None:
        """Demand that a seek at most once is refused."""
        consumer = process.work.consumer
        assert consumer is not None
        try:
            consumer.seek(key.topic_partition, offset, timeout_ms=0)
        except InvalidTransition:
            self._world.count("seek_refused")
        except MarshalError:
            return  # the claim is over
        else:
            raise Violation("6.6", f"{process.name} seeks at most once in {key}")

    def _seek(self, process: Process, key: Key, offset: int) -> None:
        """Seek; the log confirms the seek later, and the application continues."""
        world, holding = self._world, process.held[key]
        before, token = holding.position or 0, holding.claim.token
        count, consumer = holding.seek_count, process.work.consumer
        assert consumer is not None
        assert token is not None
        world.hand_outs.seeking(key, token, offset=offset)
        try:
            consumer.seek(key.topic_partition, offset, timeout_ms=0)
        except MarshalError as error:
            world.trace(f"{process.name} seeks to {offset} in {key}: {error!r}")
        if holding.seek_count == count:
            return
        world.watcher.skips.seeking(key, token, first=before, offset=offset)
        world.trace(f"{process.name} seeks from {before} to {offset} in {key}")
        world.count("sought_back" if offset < before else "sought_forward")
        # It can no longer commit the records of the key that it has.
        place = key.topic_partition
        process.hand = [
            each for each in process.hand if (each.topic, each.partition) != place
        ]
        self._open.add(Sought(process, key, holding, token, offset))

    def _on_driven(self, process: Process) -> None:
        """Find the seeks of a process that were confirmed in its last step."""
        world = self._world
        for each in self._open.take_ended(process):
            ending = each.holding.claim.ending
            if ending is None:
                world.count("seek_confirmed")
                world.hand_outs.sought(each.key, each.token, offset=each.offset)
                world.watcher.skips.sought(each.key, each.token, offset=each.offset)
                world.trace(f"{process.name} has sought to {each.offset} in {each.key}")
            elif ending.reason == SEEK_UNCONFIRMED:
                world.count("seek_ended_claim")
