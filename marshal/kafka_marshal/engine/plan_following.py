"""What the Plan of a group says to its members (PROTOCOL 9.2)."""

from kafka_marshal.protocol.plans import NO_PLAN, Standing, is_valid_for, standing_of
from kafka_marshal.protocol.settings import PLANNER, Settings
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key

ORPHAN_MS_MAX = 5_000
"""How long a free key of such a group waits at most for the member that is named."""


class PlanFollower:
    """The Plan that a member follows.

    Attributes:
        is_in_force: Whether the settings of the group ask for Plans.
        standing: What the Plan says, valid or not.
    """

    __slots__ = ("_coordinators", "_note", "is_in_force", "standing")

    def __init__(self) -> None:
        self.is_in_force = False
        self._note: object = None
        self._coordinators = 0
        self.standing: Standing = NO_PLAN

    def read(
        self,
        home: WorldState,
        group_id: str,
        *,
        settings: Settings,
        coordinators: int,
    ) -> None:
        """Read the Plan of a group, if it changed.

        Args:
            home: The group's home.
            group_id: The group.
            settings: Its settings, which another home may have (PROTOCOL 10.4).
            coordinators: Number of coordinating partitions; a Plan of another number
                of them is void.
        """
        self.is_in_force = settings.policy == PLANNER
        note = home.soft.plans.get(group_id) if self.is_in_force else None
        if note is not self._note or coordinators != self._coordinators:
            self._note, self._coordinators = note, coordinators
            found = standing_of(note)
            self.standing = found if len(found.vector) == coordinators else NO_PLAN

    def named(self, key: Key, world: WorldState) -> str | None:
        """Return the member that a valid entry of the Plan names for a key, or None.

        Args:
            key: The key.
            world: Its coordinating partition.
        """
        if not self.standing.entries:
            return None  # the common case
        name = self.standing.entries.get(key.topic_partition)
        next_offset = self.standing.vector[world.partition][0]
        is_valid = is_valid_for(world.keys.get(key), next_offset)
        return name if is_valid else None
