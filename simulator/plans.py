"""Groups that follow Plans, with nonsensical Plans in between (PROTOCOL 9.2).

Some processes may not plan; in some worlds none may. An outside writer writes Plans of
random members, of earlier generations and without their last slices, and settings that
turn planning off and on again.
"""

import random
from collections.abc import Sequence
from itertools import count

import msgspec

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import (
    GroupSettings,
    Plan,
    PlannedMember,
    PlannedTopic,
)
from kafka_marshal.protocol.settings import FAIR, PLANNER
from kafka_marshal.protocol.state import WorldState
from simulator.base import GROUP, TOPIC
from simulator.checkers import Folded
from simulator.fleet import Fleet
from simulator.pauses import ADMIN
from simulator.plan import PLANS, Fault, chance
from simulator.world import World

FAR = 2**62
HALF = 0.5
GARBAGE, OLD, CUT, TURN_OFF = "garbage", "old", "cut", "turn_off"
KINDS = (GARBAGE, GARBAGE, GARBAGE, OLD, CUT, TURN_OFF)


def nonsense(
    rng: random.Random,
    clients: Sequence[str],
    *,
    home: WorldState,
    partitions: int,
    coordinators: int,
) -> Plan:
    """Return the next Plan of the group, of any members for any keys.

    Args:
        rng: Draws the Plan.
        clients: Members of the group.
        home: The group's home.
        partitions: Number of data partitions.
        coordinators: Number of coordinating partitions.
    """
    names, numbers = [*clients, "nobody"], range(partitions + 1)

    def picks() -> bool:
        return rng.random() < HALF

    chosen = {rng.choice(names): () for _ in range(rng.randint(1, 3))}
    moves = tuple(
        PlannedMember(name, ((topic, tuple(n for n in numbers if picks())),))
        for name in chosen
        for topic in rng.choice([(0,), (0,), (9,)])
    )
    next_offset = rng.choice([0, FAR, FAR, home.next_offset])
    return Plan(
        client_id=ADMIN.client_id,
        group_id=GROUP,
        incarnation=ADMIN.incarnation,
        seq=1,
        follows=home.plan_generation(GROUP),
        number=0,
        slice_count=1,
        vector=((next_offset, 0),) * (coordinators + rng.choice([0, 0, 0, 0, 1])),
        planner_version=rng.choice([1, 99]),
        input_digest=rng.randbytes(16),
        topics=(PlannedTopic(TOPIC, rng.choice([1, len(numbers), 50])),),
        moves=moves,
    )


class Plans:
    """Lets a group follow Plans, and writes nonsensical Plans in between."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        """Turn planning on from the start, if this world has Plans."""
        self._world = world
        self._fleet = fleet
        self._seqs = count(1)
        if PLANS in world.plan.kinds:
            self.ask()

    def ask(self, policy: str = PLANNER) -> None:
        """Write settings with this policy, unless they are in force."""
        settings = self._home.settings_of(GROUP)
        if settings.policy == policy:
            return
        self._write(
            GroupSettings(
                client_id=ADMIN.client_id,
                group_id=GROUP,
                incarnation=ADMIN.incarnation,
                seq=next(self._seqs),
                generation=settings.generation + 1,
                policy=policy,
                planner_version_max=None,
                debounce_ms=None,
                handoff_ms=None,
                handoffs_max=None,
                grace_ms=None,
                reason=None,
            )
        )
        self._world.trace(f"the group is to follow policy {policy}")

    def strike(self, fault: Fault) -> None:
        """Write nonsense, or turn planning off or on."""
        rng = chance(self._world.plan.seed, f"plan nonsense/{fault.number}")
        kind = rng.choice(KINDS)
        if kind == TURN_OFF and self._home.settings_of(GROUP).policy == PLANNER:
            self._world.coverage.note("planning_off")
            self.ask(FAIR)
            return
        self.ask()  # a log that lost its end may have lost the settings
        if kind == TURN_OFF:
            return
        self._world.coverage.note(f"plan_{kind}")
        generation = self._home.plan_generation(GROUP)
        follows = (
            max(0, generation - 1 - rng.randrange(3)) if kind == OLD else generation
        )
        record = nonsense(
            rng,
            [app.node.owner.client_id for app in self._fleet.apps],
            home=self._home,
            partitions=self._world.plan.partitions,
            coordinators=self._world.counts[0],
        )
        changes = {"follows": follows, "seq": next(self._seqs)}
        slices = {"slice_count": 2} if kind == CUT else {}
        self._write(msgspec.structs.replace(record, **changes, **slices))
        self._world.trace(f"somebody writes a plan: {kind}")

    def on_fold(self, folded: Folded) -> None:
        """Count the effects of Plans."""
        transition, note = folded.transition, self._world.coverage.note
        record = transition.record
        if not isinstance(record, Plan) or record.client_id == ADMIN.client_id:
            return
        note("planned" if transition.effect else "plan_overtaken")

    def heal(self) -> None:
        """Let the group follow Plans from now on."""
        if PLANS in self._world.plan.kinds:
            self.ask()

    @property
    def _home(self) -> WorldState:
        return self._world.watcher.worlds[self._world.home]

    def _write(self, record: GroupSettings | Plan) -> None:
        cluster = self._world.cluster
        cluster.kafka.produce(cluster.place(self._home.partition), encode(record))
