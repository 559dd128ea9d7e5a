"""Admins that fence processes of clients, at once, late or twice (PROTOCOL 4.13)."""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import ClaimingPartition, FencingClient
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Owner
from simulator.base import GROUP, BaseWorld
from simulator.checkers import Folded
from simulator.fleet import Fleet
from simulator.loop import Loop
from simulator.pauses import ADMIN
from simulator.plan import Fault, chance
from simulator.world import World

DIES, IS_LATE, TWICE = 0.25, 0.25, 0.15
LIVE, HUNG, GONE, FENCED = "live", "hung", "gone", "fenced"


def owners_in(worlds: Iterable[WorldState]) -> set[Owner]:
    """Return the owners of the group's keys by the log, running or not."""
    return {
        each.owner
        for world in worlds
        for key, each in world.keys.items()
        if key.group_id == GROUP and each.owner is not None
    }


class FencingAdmin:
    """Fences processes: in all coordinating partitions at once, or not quite.

    Attributes:
        fenced: The processes that were fenced, in order.
    """

    def __init__(
        self,
        world: BaseWorld,
        *,
        loop: Loop,
        late_ms_max: int,
        note: Callable[[str], None],
    ) -> None:
        """Start without fenced processes.

        Args:
            world: Where records are written.
            loop: Writes the rest of a late fence.
            late_ms_max: How late that may be.
            note: Notes a situation.
        """
        self.fenced: list[Owner] = []
        self._world = world
        self._loop = loop
        self._late_ms_max = late_ms_max
        self._note = note

    def fence(self, owner: Owner, numbers: Sequence[int], *, name: str) -> None:
        """Fence a process in some coordinating partitions.

        Args:
            owner: The process.
            numbers: The partitions.
            name: Its name in the transcript.
        """
        cluster = self._world.cluster
        if owner not in self.fenced:
            self.fenced.append(owner)
        record = FencingClient(
            client_id=ADMIN.client_id,
            group_id=GROUP,
            incarnation=ADMIN.incarnation,
            seq=1,
            fenced=owner.client_id,
            fenced_incarnation=owner.incarnation,
            reason=None,
        )
        for number in numbers:
            cluster.kafka.produce(cluster.place(number), encode(record))
        self._world.trace(f"{name} is fenced in {numbers}")

    def fence_somehow(
        self,
        owner: Owner,
        rng: random.Random,
        *,
        numbers: Sequence[int],
        name: str,
    ) -> None:
        """Fence in all partitions at once, in some of them late, or only in some."""
        cut = rng.randint(1, len(numbers))
        luck = rng.random()
        if luck >= DIES + IS_LATE:
            self.fence(owner, numbers, name=name)
            if luck < DIES + IS_LATE + TWICE:
                self.fence(owner, numbers, name=name)
            return
        first, rest = numbers[:cut], numbers[cut:]
        self.fence(owner, first, name=name)
        if rest and luck < DIES:
            self._note("fence_torn")
        elif rest:
            self._note("fence_late")
            at_ms = self._world.now_ms + rng.randint(1, self._late_ms_max)
            self._loop.at(at_ms, partial(self.fence, owner, rest, name=name))


class Fences:
    """Lets admins fence processes, as faults of a plan."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        """Start without fenced processes."""
        self._world = world
        self._fleet = fleet
        self._admin = FencingAdmin(
            world,
            loop=world.loop,
            late_ms_max=2 * world.plan.h_ms,
            note=world.coverage.note,
        )

    def strike(self, fault: Fault) -> None:
        """Fence a process that is live, hangs, has ended, or is fenced already."""
        rng = chance(self._world.plan.seed, f"fences/{fault.number}")
        found = {how: owners for how, owners in self._owners().items() if owners}
        if not found:
            return
        how = rng.choice(sorted(found))
        owner = rng.choice(found[how])
        note = self._world.coverage.note
        note(f"fenced_{how}" if how != FENCED else "fence_repeated")
        alive = {app.node.owner for app in self._fleet.apps}
        if how == GONE and owner.client_id in {each.client_id for each in alive}:
            note("fenced_replaced")
        self._admin.fence_somehow(
            owner,
            rng,
            numbers=self._numbers(),
            name=self._world.name_of(owner.incarnation),
        )

    def fence(self, owner: Owner) -> None:
        """Fence a process in all coordinating partitions."""
        name = self._world.name_of(owner.incarnation)
        self._admin.fence(owner, self._numbers(), name=name)

    def on_fold(self, folded: Folded) -> None:
        """Count the effects of fences on processes."""
        if not self._admin.fenced:
            return
        transition, note = folded.transition, self._world.coverage.note
        if transition.reason == "sender_fenced":
            note("refused_as_fenced")
        if transition.effect == "position_only" and self._is_sender_fenced(folded):
            note("beat_of_fenced")
        if isinstance(transition.record, ClaimingPartition) and transition.effect:
            self._on_claim(folded)

    # --- processes

    def _owners(self) -> dict[str, list[Owner]]:
        """Return the processes that an admin may know, by their condition."""
        world, fenced = self._world, self._admin.fenced
        found: dict[str, list[Owner]] = {LIVE: [], HUNG: [], FENCED: fenced}
        for app in self._fleet.apps:
            if app.node.owner not in fenced:
                is_hung = app.wakes_ms > world.now_ms
                found[HUNG if is_hung else LIVE].append(app.node.owner)
        gone = owners_in(world.watcher.worlds).difference(*found.values())
        # Senders that other faults invented are not processes.
        found[GONE] = sorted(each for each in gone if each.incarnation in world.names)
        return found

    def _numbers(self) -> list[int]:
        """Return the coordinating partitions, in the order of an admin's tool."""
        home, count = self._world.home, max(self._world.counts)
        return sorted(range(count), key=lambda number: (number != home, number))

    # --- what the log shows

    def _is_sender_fenced(self, folded: Folded) -> bool:
        record, world = folded.transition.record, self._world
        owner = getattr(record, "client_id", ""), getattr(record, "incarnation", b"")
        return (GROUP, *owner) in world.watcher.worlds[folded.partition].fences

    def _on_claim(self, folded: Folded) -> None:
        owner, world = folded.owner, self._world
        fences = world.watcher.worlds[folded.partition].fences
        if owner is not None and (GROUP, *owner) in fences:
            is_resume = folded.transition.effect == "resumed"
            world.coverage.note(
                "resumed_from_fenced" if is_resume else "taken_from_fenced"
            )
