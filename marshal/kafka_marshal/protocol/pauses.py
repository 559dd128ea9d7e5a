"""Pauses of a group, or of some of its partitions (PROTOCOL 4.8, 4.14, 4.15)."""

from typing import NamedTuple

import attrs

from kafka_marshal.protocol.hashing import PLANNER_TOPIC
from kafka_marshal.protocol.records import Scope
from kafka_marshal.protocol.types import Key


@attrs.define(kw_only=True)
class Pause:
    """An admin operation that pauses a group until a log time (PROTOCOL 4.8).

    Attributes:
        op_id: The operation.
        client_id: Client that sent the last record.
        incarnation: Process of that client.
        seq: Sequence number of that record.
        incarnations: Processes that have sent one, in order of appearance.
        until_ms: End of the pause.
        scope: The partitions that it is limited to (PROTOCOL 4.15); None for all.
    """

    op_id: bytes
    client_id: str
    incarnation: bytes
    seq: int
    incarnations: tuple[bytes, ...]
    until_ms: int
    scope: Scope | None = None


class Scheduled(NamedTuple):
    """A pause that begins at a log time, whatever becomes of its sender.

    Attributes:
        begin_ms: It begins with the first entry whose append time reaches this.
        op_id: The operation.
        client_id: Client that scheduled it.
        incarnation: Process of that client.
        seq: Sequence number of its record.
        until_ms: End of the pause.
        scope: The partitions that it is limited to, None for the whole group.
    """

    begin_ms: int
    op_id: bytes
    client_id: str
    incarnation: bytes
    seq: int
    until_ms: int
    scope: Scope | None = None


def is_in_scope(scope: Scope | None, key: Key) -> bool:
    """Return whether a pause with this scope, of the key's group, pauses the key."""
    if scope is None:
        # PROTOCOL 2.3: a group's pause does not touch its planner key.
        return key.topic != PLANNER_TOPIC
    for each in scope:
        if each.topic == key.topic:
            return not each.partitions or key.partition in each.partitions
    return False
