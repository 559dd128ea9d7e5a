"""Admins that change the number of coordinating partitions in worlds of sidecars."""

import random

from simulator.checkers import Folded
from simulator.resizing import Death, ResizeAdmins, fill
from simulator.sidecar.host import SEED_BITS
from simulator.sidecar.world import HostedWorld


class HostedResizes(ResizeAdmins):
    """Lets admins change the number, and die; members and sidecars complete changes."""

    def __init__(self, world: HostedWorld) -> None:
        """Start without any."""
        super().__init__(world, loop=world.loop, h_ms=world.h, note=world.count)
        self._world = world
        if world.is_resizing:
            fill(world.cluster, count=world.cluster.config.partition_count)
            world.on_folded = self._on_fold

    def strike(self) -> None:
        """Begin a change, or continue one that is open; maybe die at a step."""
        rng = self._draw()
        death = Death.at(rng.getrandbits(SEED_BITS), rng.getrandbits(SEED_BITS))
        self.begin(f"resizer{len(self._admins) + 1}", rng, death=death)

    def strike_again(self) -> None:
        """Begin a change that no fault interrupts."""
        self.change_again(self._draw())

    def _draw(self) -> random.Random:
        return random.Random(self._world.rng.getrandbits(SEED_BITS))  # noqa: S311

    def _on_fold(self, folded: Folded) -> None:
        self.changes.take(folded)
        if folded.transition.effect == "imported":
            self._note("moved")
