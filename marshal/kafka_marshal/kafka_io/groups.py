"""Kafka's own consumer groups, looked at from outside: who works, what is committed."""

from collections.abc import Mapping

import attrs

from kafka_marshal.kafka_io.lookups import Lookups
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.translate import Access
from kafka_marshal.kafka_io.untyped import Untyped
from kafka_marshal.protocol.types import TopicPartition

TIMEOUT_MS = 30_000
CLOSE_MS = 2_000
# States in which a group has no members (KIP-848 uses the same two words).
_IDLE_STATES = ("EMPTY", "DEAD")
_ABSENT = "ABSENT"


@attrs.frozen
class GroupOffsets:
    """What Kafka knows of one consumer group.

    Attributes:
        group_id: The group.
        state: Kafka's word for its state in capitals; ABSENT where it lists none.
        offsets: Committed offset of each partition that has one.
    """

    group_id: str
    state: str
    offsets: Mapping[TopicPartition, int]

    @property
    def is_active(self) -> bool:
        """Whether it has members, or is about to."""
        return self.state not in (*_IDLE_STATES, _ABSENT)


class KafkaGroups:
    """Reads consumer groups. Thread-safe, blocking; connects when first asked."""

    def __init__(self, settings: ConnectionSettings) -> None:
        """Remember how to connect."""
        self._lookups = Lookups(settings)

    def read(self, group_id: str, *, timeout_ms: int = TIMEOUT_MS) -> GroupOffsets:
        """Return state and committed offsets; a group that is absent has none.

        Raises:
            LogUnreadable: DESCRIBE on the group is missing.
            CoordinationError: The cluster did not answer.
        """

        def ask(admin: Untyped) -> GroupOffsets:
            # The state first: a group that starts to work later shows in offsets
            # that differ when they are read again.
            listed = admin.list_groups()
            states = {row["group_id"]: str(row["group_state"]) for row in listed}
            found = admin.list_group_offsets({group_id: None})[group_id]
            return GroupOffsets(
                group_id,
                states.get(group_id, _ABSENT).upper(),
                {
                    TopicPartition(*place): entry.offset
                    for place, entry in sorted(found.items())
                    if entry.offset >= 0
                },
            )

        return self._lookups.call(
            ask,
            doing=f"Asking for the committed offsets of group {group_id}",
            access=Access.READ,
            needs=f"DESCRIBE on group {group_id}",
            timeout_ms=timeout_ms,
        )

    def close(self) -> None:
        """Let go of the connection. Idempotent."""
        self._lookups.close(timeout_ms=CLOSE_MS)
