"""Members that warm up before a key is handed to them: soon, late, never, or dying.

Their calls of ``on_warm`` take virtual time, one after another, as on a thread.
"""

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kafka_marshal.config import OnWarm
from kafka_marshal.protocol.settings import TUNABLES
from kafka_marshal.protocol.types import TopicPartition
from simulator.clock import InlineBackground
from simulator.node import Node
from simulator.plan import HANDOFFS, chance
from simulator.world import World

T = TypeVar("T")

COLD, QUICK, SLOW, NEVER, RAISE, DIE = "cold", "quick", "slow", "never", "raise", "die"
MOODS = (COLD, QUICK, QUICK, SLOW, SLOW, NEVER, RAISE, DIE)


def mood_of(seed: int, start: int) -> str:
    """Draw how the application of a process warms up; ``COLD``: it has no ``on_warm``.

    Args:
        seed: Seed of the run.
        start: Number of the process.
    """
    return chance(seed, f"warms/{start}").choice(MOODS)


def on_warm_of(mood: str) -> OnWarm | None:
    """Return the ``on_warm`` of an application in this mood."""
    if mood == COLD:
        return None
    return _fail if mood == RAISE else _succeed


def _succeed(partition: TopicPartition, position: int | None, owner: str) -> None:
    """Succeed: the time of the call has passed already."""


def _fail(partition: TopicPartition, position: int | None, owner: str) -> None:
    raise RuntimeError(f"{partition} of {owner} cannot be loaded from {position}")


class Warming(InlineBackground):
    """Ends the calls of ``on_warm`` of one process when their time has passed."""

    def __init__(
        self,
        world: World,
        mood: str,
        *,
        rng: random.Random,
        awake_ms: Callable[[], int | None],
        die: Callable[[], None],
    ) -> None:
        """Begin without calls.

        Args:
            world: The world.
            mood: One of ``MOODS``.
            rng: Draws the durations of calls.
            awake_ms: Returns the true time from which on the process runs; None if it
                has ended, or was asked to.
            die: Ends the process without a shutdown.
        """
        super().__init__(is_held=True)
        self._world = world
        self._mood = mood
        self._rng = rng
        self._awake_ms = awake_ms
        self._die = die
        self._free_ms = 0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call behind those that have not ended."""
        future = super().submit(call)
        if self._mood != NEVER:
            self._free_ms = max(self._free_ms, self._world.now_ms) + self._draw_ms()
            self._world.loop.at(self._free_ms, self._end)
        return future

    def _draw_ms(self) -> int:
        h_ms, rng = self._world.plan.h_ms, self._rng
        if self._mood != SLOW:
            return rng.randint(0, h_ms // 2)
        offer_ms = TUNABLES["handoff_ms"].default
        return rng.randint(0, rng.choice([h_ms, 4 * h_ms, 2 * offer_ms]))

    def _end(self) -> None:
        awake_ms = self._awake_ms()
        if awake_ms is None:
            return
        if self._world.now_ms < awake_ms:
            self._world.loop.at(awake_ms, self._end)
        elif self._mood == DIE and not self._world.is_healed:
            self._die()
        else:
            self.run_waiting(count=1)


def note_death(world: World, node: Node) -> None:
    """Count whether a process dies while it, or a successor of its keys, warms up."""
    if HANDOFFS not in world.plan.kinds:
        return
    owner = node.owner
    for state in world.watcher.worlds:
        for known in state.keys.values():
            offer = known.offer
            if offer is None or offer.ready is not None:
                continue
            if known.owner == owner:
                world.coverage.note("owner_died_warming")
            if offer.successor == owner.client_id and node.warming.waiting_count:
                world.coverage.note("successor_died_warming")
