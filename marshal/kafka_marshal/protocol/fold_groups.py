"""How pauses, Configs and Members change the state (PROTOCOL 4.8, 4.12, 3.6).

Part of the rationalizer: only ``rationalizer.apply`` calls these.
"""

from collections.abc import Callable
from typing import Any

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.records import (
    SUPPORTED_LEVEL,
    Config,
    Member,
    ReleaseGroup,
)
from kafka_marshal.protocol.state import (
    ERAS,
    ERAS_MAX,
    GroupState,
    Halt,
    MemberState,
    Pause,
    Step,
    Transitions,
    WorldState,
)

OPS_REMEMBERED_MAX = 64
GONE_MEMBERS_PER_ENTRY_MAX = 8
ERA_AHEAD_S_MAX = 24 * 3_600
"""How far an era may be ahead of the largest append time: one day."""
MS_PER_S = 1_000


def _release_group(step: Step, record: ReleaseGroup) -> Transitions:
    state = step.state
    config = state.config
    if config is None:
        return (step.refused("no_config"),)
    reason = judging.judge_release_group(state, record, config=config)
    if reason is not None:
        return (step.refused(reason),)
    group = state.groups.setdefault(record.group_id, GroupState())
    state.dirty[record.group_id] = None
    pause = group.pause
    if record.msg_expire_time <= state.append_time_ms:
        end_operation(
            state, record.group_id, op_id=record.op_id, offset=step.entry.offset
        )
        return (step.accepted("unpaused"),)
    seen = () if pause is None else pause.incarnations
    if record.incarnation not in seen:
        seen = (*seen, record.incarnation)
    longest_ms = state.append_time_ms + config.limit("max_pause_ms")
    until_ms = min(record.msg_expire_time, longest_ms)
    group.pause = Pause(
        op_id=record.op_id,
        client_id=record.client_id,
        incarnation=record.incarnation,
        seq=record.seq,
        incarnations=seen,
        until_ms=until_ms,
    )
    lapses_ms = state.lapses_ms
    state.lapses_ms = until_ms if lapses_ms is None else min(until_ms, lapses_ms)
    return (step.accepted("paused"),)


def end_pauses(state: WorldState, offset: int) -> None:
    """End expired pauses (PROTOCOL 4.8); called before a record is judged."""
    over = [
        (group_id, group.pause.op_id)
        for group_id, group in state.groups.items()
        if group.pause is not None and group.pause.until_ms <= state.append_time_ms
    ]
    for group_id, op_id in sorted(over):
        end_operation(state, group_id, op_id=op_id, offset=offset)
    state.note_next_lapse()


def end_operation(
    state: WorldState, group_id: str, *, op_id: bytes, offset: int
) -> None:
    """Record that an operation is over, and end its pause.

    Ended operations are remembered within bounds; the oldest are forgotten first.
    """
    group = state.groups.setdefault(group_id, GroupState())
    state.dirty[group_id] = None
    if group.pause is not None and group.pause.op_id == op_id:
        group.pause = None
    group.over = (*group.over, (offset, op_id))
    state.over[offset, group_id, op_id] = None
    if len(group.over) > OPS_REMEMBERED_MAX:
        first_offset, first_op_id = group.over[0]
        _drop_over(state, first_offset, group_id, first_op_id)
    assert state.config is not None
    while len(state.over) > state.config.limit("operations"):
        _drop_over(state, *min(state.over))


def _drop_over(state: WorldState, offset: int, group_id: str, op_id: bytes) -> None:
    del state.over[offset, group_id, op_id]
    group = state.groups[group_id]
    group.over = tuple(note for note in group.over if note != (offset, op_id))
    state.dirty[group_id] = None
    drop_if_empty(state, group_id)


def drop_if_empty(state: WorldState, group_id: str) -> None:
    """Drop a group without keys, pause, ended operations and an unresolved verdict."""
    group = state.groups[group_id]
    is_idle = group.pause is None and group.unresolved is None and not group.over
    if is_idle and group.key_count == 0:
        del state.groups[group_id]
        state.note_gone(group_id)


def _config(step: Step, record: Config) -> Transitions:
    state = step.state
    now = state.config
    if now is not None and (
        record.generation != now.generation + 1
        or record.cluster_id != now.cluster_id
        or record.format_id != now.format_id
        or record.partition_count != now.partition_count
        or record.era <= now.era
    ):
        return (step.refused("config"),)
    if record.era > state.append_time_ms // MS_PER_S + ERA_AHEAD_S_MAX:
        # PROTOCOL 4.12: an era far in the future would leave no room for later ones.
        return (step.refused("config"),)
    if record.feature_level > SUPPORTED_LEVEL:
        # PROTOCOL 3.3: this release does not know what that level changes.
        state.halted = Halt(step.entry.offset, record.feature_level)
        return (step.halted(),)
    if now is not None:
        # PROTOCOL 4.10: existing claims keep the era in which they were won.
        eras = (*state.eras, (step.entry.offset, now.era))
        state.eras = eras[-ERAS_MAX:]
        state.dirty[ERAS] = None
    state.config = record
    return (step.accepted("configured"),)


def _member(step: Step, record: Member) -> Transitions:
    state = step.state
    config = state.config
    if config is None:
        return (step.ignored("no_config"),)
    home = home_partition(record.group_id, partition_count=config.partition_count)
    if home != state.partition:
        return (step.ignored("wrong_partition"),)
    members = state.soft.members
    name = (record.group_id, record.client_id, record.incarnation)
    known = members.get(name)
    if known is not None and record.seq <= known.record.seq:
        return (step.ignored("old_seq"),)
    if known is None and len(members) >= config.limit("keys"):
        return (step.refused("limits"),)
    since = step.entry.offset if known is None else known.since_offset
    members.pop(name, None)  # keeps the order of last announcements
    members[name] = MemberState(
        record=record,
        since_offset=since,
        offset=step.entry.offset,
        seen_ms=state.now_ms,
    )
    _drop_gone_members(state, config)
    return (step.accepted("member"),)


def _drop_gone_members(state: WorldState, config: Config) -> None:
    members = state.soft.members
    limit_ms = 2 * config.heartbeat_interval_ms
    for _ in range(GONE_MEMBERS_PER_ENTRY_MAX):
        oldest = next(iter(members))
        if state.now_ms - members[oldest].seen_ms <= limit_ms:
            return
        del members[oldest]


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {
    ReleaseGroup: _release_group,
    Config: _config,
    Member: _member,
}
"""How each record about groups, settings and members is folded."""
