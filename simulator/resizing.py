"""Admins that change the number of coordinating partitions, and die at it.

What they leave, members complete (PROTOCOL 10). An admin here reads the log without
delay; what it writes lands at once, or is the last that it does.
"""

import random
from collections.abc import Iterator

import msgspec

from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.layout import MOVING, is_final
from kafka_marshal.protocol.layout_steps import (
    Change,
    Steps,
    done_of,
    fence_of,
    final_of,
    groups_import_of,
    import_of,
    next_steps,
    read,
)
from kafka_marshal.protocol.records import (
    ClaimingMessages,
    Config,
    Record,
    ReleasingPartition,
)
from kafka_marshal.protocol.types import Key
from simulator.checkers import Folded
from simulator.pauses import ADMIN
from simulator.plan import Fault, chance
from simulator.world import World

COUNTS = {4: (8, 16), 8: (16, 4), 16: (8, 4)}
"""To which number each number changes."""
STEPS = (1, 1, 2, 3, 5, 8, 10**6)
"""Of an admin, before it dies: records that it writes."""
PACE_MS = (1, 500)


class Resizes:
    """Has admins change the number of coordinating partitions, as faults of a plan."""

    def __init__(self, world: World) -> None:
        """Start without any."""
        self._world = world
        self._seq = 0

    def __repr__(self) -> str:
        """Return what is open where."""
        states = self._world.watcher.worlds
        return str({s.partition: s.layout for s in states if s.layout is not None})

    def are_over(self) -> bool:
        """Return whether no change is open in any partition."""
        return all(each.layout is None for each in self._world.watcher.worlds)

    def on_fold(self, folded: Folded) -> None:
        """Count what becomes of keys that move."""
        transition, note = folded.transition, self._world.coverage.note
        record = transition.record
        if transition.effect == "imported":
            note("moved_stale" if self._was_owned(transition.key) else "moved")
        elif isinstance(record, ReleasingPartition) and transition.effect:
            if (record.reason or "").startswith(MOVING):
                note("moving_released")
        elif isinstance(record, ClaimingMessages) and transition.reason == MOVING:
            note("grant_refused_moving")

    def _was_owned(self, key: Key | None) -> bool:
        states = self._world.watcher.worlds
        return key is not None and any(
            is_final(state, key) and state.keys[key].owner is not None
            for state in states
            if state.layout is not None
        )

    def strike(self, fault: Fault) -> None:
        """Begin a change, unless one is open; maybe die at one of its steps."""
        world, first = self._world, self._world.watcher.worlds[0]
        config, note = first.config, world.coverage.note
        if config is None or config.partition_count not in COUNTS:
            return
        rng = chance(world.plan.seed, f"resize/{fault.number}")
        count = rng.choice(COUNTS[config.partition_count])
        change = Change(
            op_id=rng.randbytes(16),
            from_count=config.partition_count,
            config=msgspec.structs.replace(
                config,
                generation=config.generation + 1,
                era=config.era + 1,
                partition_count=count,
            ),
        )
        self._add_partitions(change.config)
        world.trace(f"an admin changes the count from {change.from_count} to {count}")
        self._write(0, fence_of(change, sender=self._sender()))
        world.watcher.catch_up()
        if first.layout is None or first.layout.op_id != change.op_id:
            note("resize_refused")
            return
        note("grown" if count > change.from_count else "shrunk")
        left = rng.choice(STEPS)
        if left <= max(STEPS[:-1]):
            note("resize_left")
        self._go_on_later(change, rng, left - 1)

    def _go_on_later(self, change: Change, rng: random.Random, left: int) -> None:
        def go_on() -> None:
            self._go_on(change, rng, left)

        if left > 0:
            world = self._world
            world.loop.at(world.now_ms + rng.randint(*PACE_MS), go_on)

    def _go_on(self, change: Change, rng: random.Random, left: int) -> None:
        states = {each.partition: each for each in self._world.watcher.worlds}
        reading = read(states)
        if reading is None or reading.change.op_id != change.op_id:
            return
        for number, record in self._records(next_steps(reading)):
            if left <= 0:
                self._world.trace("the admin of a change dies")
                return
            self._write(number, record)
            left -= 1
        self._go_on_later(change, rng, left)

    def _records(self, steps: Steps) -> Iterator[tuple[int, Record]]:
        change = steps.change
        for number in (*steps.fences, *steps.nudges):
            yield number, fence_of(change, sender=self._sender())
        for each in steps.imports:
            yield each.target, import_of(change, each, sender=self._sender())
        for group in steps.groups:
            yield group.target, groups_import_of(change, group, sender=self._sender())
        for done in steps.dones:
            yield done.target, done_of(change, done, sender=self._sender())
        for final in steps.finals:
            yield final.partition, final_of(final, sender=self._sender())

    def _sender(self) -> dict[str, object]:
        self._seq += 1
        return {
            "client_id": ADMIN.client_id,
            "group_id": CHECKPOINT_GROUP,
            "incarnation": ADMIN.incarnation,
            "seq": self._seq,
        }

    def _write(self, number: int, record: Record) -> None:
        cluster = self._world.cluster
        cluster.kafka.produce(cluster.place(number), encode(record))

    def _add_partitions(self, config: Config) -> None:
        kafka = self._world.cluster.kafka
        there = len(kafka.topic(COORDINATION_TOPIC).partitions)
        if there < config.partition_count:
            kafka.add_partitions(COORDINATION_TOPIC, config.partition_count - there)
        for number in range(there, config.partition_count):
            self._world.log_of(number).leader = number
