"""Admins that fence members of a group, some of which are sidecars (PROTOCOL 4.13).

A fence of a sidecar's member ends the claims of all its clients in the group.
"""

import random

from kafka_marshal.protocol.types import Owner
from simulator.base import GROUP
from simulator.fences import FencingAdmin, owners_in
from simulator.node import Node
from simulator.sidecar.host import SEED_BITS
from simulator.sidecar.world import HostedWorld


class HostedFences:
    """Lets admins fence members: present ones, and some that are gone."""

    def __init__(self, world: HostedWorld) -> None:
        """Start without fenced processes."""
        self._world = world
        self._admin = FencingAdmin(
            world, loop=world.loop, late_ms_max=2 * world.h, note=world.count
        )

    def strike(self) -> None:
        """Fence a member that the log or the hosts know."""
        world = self._world
        rng = random.Random(world.rng.getrandbits(SEED_BITS))  # noqa: S311
        present, fenced = self._present(), self._admin.fenced
        choices = {
            "fenced_live": present,
            "fenced_gone": self._gone(present),
            "fence_repeated": fenced,
        }
        found = sorted(name for name, owners in choices.items() if owners)
        if not found:
            return
        how = rng.choice(found)
        owner = rng.choice(choices[how])
        world.count(how)
        self._admin.fence_somehow(
            owner,
            rng,
            numbers=list(range(world.partition_count)),
            name=f"{owner.client_id} {owner.incarnation.hex()[:8]}",
        )

    def _present(self) -> list[Owner]:
        """Return the members that run and are not fenced."""
        world = self._world
        found = [
            process.work.owner
            for process in world.processes
            if isinstance(process.work, Node)
        ]
        services = [place.host.service for place in world.hosts]
        found += [
            group.session.claimant.owner
            for service in services
            for group in (() if service is None else service.groups)
            if group.group_id == GROUP
        ]
        return [owner for owner in found if owner not in self._admin.fenced]

    def _gone(self, present: list[Owner]) -> list[Owner]:
        """Return the owners in the log that do not run any more."""
        known = owners_in(self._world.watcher.worlds)
        return sorted(known.difference(present, self._admin.fenced))
