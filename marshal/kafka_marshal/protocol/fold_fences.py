"""How clients are fenced (PROTOCOL 4.13).

Part of the rationalizer: only ``rationalizer.apply`` calls these. A fence names one
process of a client. From that entry on the process cannot claim, get grants, announce
itself or renew, so its claims run out. Not renewing is always safe, as in a pause.
"""

from collections.abc import Callable
from typing import Any

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.fold_groups import drop_if_empty
from kafka_marshal.protocol.items import Fence
from kafka_marshal.protocol.layout import is_retired
from kafka_marshal.protocol.records import FencingClient
from kafka_marshal.protocol.state import (
    FENCES_MAX,
    GroupState,
    MemberName,
    Step,
    Transitions,
    WorldState,
)


def _fence(step: Step, record: FencingClient) -> Transitions:
    state = step.state
    config = state.config
    assert config is not None  # the record needs level 2
    group_id = record.group_id
    if is_retired(state):
        return (step.refused("retired"),)
    if judging.lacks_room_for_group(state, group_id, config=config):
        return (step.refused("limits"),)
    fence = Fence(step.entry.offset, record.fenced, record.fenced_incarnation)
    name = (group_id, *fence[1:])
    if name not in state.fences:
        _remember(state, group_id, fence, most=config.limit("operations"))
    state.soft.members.pop(name, None)
    return (step.accepted("fenced"),)


def _remember(state: WorldState, group_id: str, fence: Fence, *, most: int) -> None:
    """Keep a fence, within the bounds; the oldest fences are forgotten first."""
    group = state.groups.setdefault(group_id, GroupState())
    group.fences = (*group.fences, fence)
    state.fences[group_id, fence.client_id, fence.incarnation] = fence.offset
    state.dirty[group_id] = None
    if len(group.fences) > FENCES_MAX:
        _forget(state, (group_id, *group.fences[0][1:]))
    while len(state.fences) > most:
        _forget(state, min(state.fences, key=lambda each: (state.fences[each], each)))


def _forget(state: WorldState, name: MemberName) -> None:
    group_id, *process = name
    del state.fences[name]
    group = state.groups[group_id]
    group.fences = tuple(each for each in group.fences if [*each[1:]] != process)
    state.dirty[group_id] = None
    drop_if_empty(state, group_id)


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {FencingClient: _fence}
"""How a fence is folded."""
