"""What directives say of the members of a group (PROTOCOL 9.7)."""

from collections.abc import Sequence

import msgspec

from kafka_marshal.protocol.planner import MemberView
from kafka_marshal.protocol.records import CORDON, DRAIN
from kafka_marshal.protocol.state import WorldState


def directed(
    members: Sequence[MemberView], home: WorldState, *, group_id: str
) -> Sequence[MemberView]:
    """Return members with whether they are drained or cordoned.

    Args:
        members: Live members.
        home: World of the home of their group.
        group_id: The group.
    """
    if not home.directed:
        return members  # the common case
    found = []
    for each in members:
        action = home.action_for((group_id, each.client_id), host=each.host)
        found.append(
            msgspec.structs.replace(
                each, is_drained=action == DRAIN, is_cordoned=action == CORDON
            )
        )
    return found
