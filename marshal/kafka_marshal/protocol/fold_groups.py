"""How pauses, Configs, Members and settings change the state (PROTOCOL 4.8, 4.12, 9.1).

Part of the rationalizer: only ``rationalizer.apply`` calls these.
"""

from collections.abc import Callable
from typing import Any

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.items import Halt, Pause, Scheduled, StandingDirective
from kafka_marshal.protocol.records import (
    SUPPORTED_LEVEL,
    Config,
    GroupSettings,
    Member,
    PauseGroup,
    ReleaseGroup,
)
from kafka_marshal.protocol.settings import Settings
from kafka_marshal.protocol.state import (
    ERAS,
    GroupState,
    MemberState,
    Step,
    Transitions,
    WorldState,
)

OPS_REMEMBERED_MAX = 64
GONE_MEMBERS_PER_ENTRY_MAX = 8
ERA_AHEAD_S_MAX = 24 * 3_600
"""How far an era may be ahead of the largest append time: one day."""
MS_PER_S = 1_000


def _release_group(step: Step, record: ReleaseGroup | PauseGroup) -> Transitions:
    state = step.state
    config = state.config
    if config is None:
        return (step.refused("no_config"),)
    reason = judging.judge_release_group(state, record, config=config)
    if reason is not None:
        return (step.refused(reason),)
    group = state.groups.setdefault(record.group_id, GroupState())
    if record.msg_expire_time <= state.append_time_ms:
        end_operation(
            state, record.group_id, op_id=record.op_id, offset=step.entry.offset
        )
        return (step.accepted("unpaused"),)
    pause = group.lasting(record.op_id)
    seen = () if pause is None else pause.incarnations
    if record.incarnation not in seen:
        seen = (*seen, record.incarnation)
    longest_ms = state.append_time_ms + config.limit("max_pause_ms")
    until_ms = min(record.msg_expire_time, longest_ms)
    held = Pause(
        op_id=record.op_id,
        client_id=record.client_id,
        incarnation=record.incarnation,
        seq=record.seq,
        incarnations=seen,
        until_ms=until_ms,
        scope=judging.scope_of(record),
    )
    _unschedule(group, record.op_id)
    _install(state, record.group_id, held)
    state.note_lapse(until_ms)
    return (step.accepted("paused"),)


def _install(state: WorldState, group_id: str, pause: Pause) -> None:
    """Make a pause active, in place of an earlier record of its operation."""
    group = state.groups[group_id]
    state.dirty[group_id] = None
    if pause.scope is None:
        group.pause = pause
        return
    others = (each for each in group.scoped if each.op_id != pause.op_id)
    group.scoped = tuple(sorted((*others, pause), key=lambda each: each.op_id))
    state.scopes[group_id, pause.op_id] = None


def _pause_group(step: Step, record: PauseGroup) -> Transitions:
    state = step.state
    config = state.config
    assert config is not None  # the record needs level 2
    if record.begin_time <= state.append_time_ms:
        return _release_group(step, record)
    until_ms = min(
        record.msg_expire_time, record.begin_time + config.limit("max_pause_ms")
    )
    reason = judging.judge_pause_group(state, record, until_ms=until_ms, config=config)
    if reason is not None:
        return (step.refused(reason),)
    group = state.groups.setdefault(record.group_id, GroupState())
    if group.scheduled_as(record.op_id) is None:
        scheduled = Scheduled(
            begin_ms=record.begin_time,
            op_id=record.op_id,
            client_id=record.client_id,
            incarnation=record.incarnation,
            seq=record.seq,
            until_ms=until_ms,
            scope=record.scope,
        )
        if record.scope is not None:
            state.scopes[record.group_id, record.op_id] = None
        group.scheduled = tuple(sorted((*group.scheduled, scheduled)))
        state.dirty[record.group_id] = None
        state.note_lapse(record.begin_time)
    return (step.accepted("scheduled"),)


def _unschedule(group: GroupState, op_id: bytes) -> None:
    group.scheduled = tuple(each for each in group.scheduled if each.op_id != op_id)


def move_pauses(state: WorldState, offset: int) -> None:
    """End pauses and directives that are over, begin pauses that are due.

    Called before a record is judged (PROTOCOL 4.8, 4.14, 9.7).
    """
    now_ms = state.append_time_ms
    lapsed = [
        group_id
        for group_id, group in state.groups.items()
        if group.lapses_ms is not None and group.lapses_ms <= now_ms
    ]
    for group_id in sorted(lapsed):
        group = state.groups[group_id]
        for pause in group.pauses:
            if pause.until_ms <= now_ms:
                end_operation(state, group_id, op_id=pause.op_id, offset=offset)
        for each in group.due:
            if each.until_ms <= now_ms:
                end_operation(state, group_id, op_id=each.op_id, offset=offset)
        for each in group.due:
            # Once one pause of the whole group has begun, others like it must wait.
            if each.begin_ms <= now_ms and each in group.due:
                _begin(state, group_id, each)
        for standing in group.directives:
            if standing.until_ms <= now_ms:
                end_operation(state, group_id, op_id=standing.op_id, offset=offset)
    state.note_next_lapse()


def _begin(state: WorldState, group_id: str, due: Scheduled) -> None:
    _unschedule(state.groups[group_id], due.op_id)
    begun = Pause(
        op_id=due.op_id,
        client_id=due.client_id,
        incarnation=due.incarnation,
        seq=due.seq,
        incarnations=(due.incarnation,),
        until_ms=due.until_ms,
        scope=due.scope,
    )
    _install(state, group_id, begun)


def install_directive(
    state: WorldState, group_id: str, *, standing: StandingDirective
) -> None:
    """Put a directive in force, in place of an earlier record of its operation."""
    group = state.groups.setdefault(group_id, GroupState())
    others = (each for each in group.directives if each.op_id != standing.op_id)
    group.directives = tuple(sorted((*others, standing), key=lambda each: each.op_id))
    state.directed[group_id, standing.op_id] = None
    state.dirty[group_id] = None
    state.note_lapse(standing.until_ms)


def end_operation(
    state: WorldState, group_id: str, *, op_id: bytes, offset: int
) -> None:
    """Record that an operation is over, and end its pause or directive.

    Ended operations are remembered within bounds; the oldest are forgotten first.
    """
    group = state.groups.setdefault(group_id, GroupState())
    state.dirty[group_id] = None
    if group.pause is not None and group.pause.op_id == op_id:
        group.pause = None
    group.scoped = tuple(each for each in group.scoped if each.op_id != op_id)
    state.scopes.pop((group_id, op_id), None)
    if state.directed.pop((group_id, op_id), 0) is None:
        kept = (each for each in group.directives if each.op_id != op_id)
        group.directives = tuple(kept)
    _unschedule(group, op_id)
    if group.lapses_ms is not None:
        # A scheduled pause that was due may have waited for the end of this one.
        state.note_lapse(group.lapses_ms)
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
    """Drop a group that has no keys, no pauses and nothing else to keep (4.9)."""
    group = state.groups[group_id]
    if not _has_nothing_but_a_plan(group):
        return
    if group.planned is not None:
        state.note_plan(group.planned.log_time_ms)
        return
    del state.groups[group_id]
    state.note_gone(group_id)


def _has_nothing_but_a_plan(group: GroupState) -> bool:
    is_idle = group.lapses_ms is None and group.unresolved is None
    has_rest = group.over or group.fences or group.settings
    return is_idle and not (group.key_count or has_rest)


def drop_old_plans(state: WorldState) -> None:
    """Drop groups that have nothing but a Plan that is too old (PROTOCOL 4.9)."""
    assert state.config is not None
    assert state.plans_ms is not None
    latest_ms = state.now_ms - state.config.limit("forget_ms")
    if state.plans_ms >= latest_ms:
        return
    left: list[int] = []
    for group_id, group in list(state.groups.items()):
        planned = group.planned
        if planned is None or not _has_nothing_but_a_plan(group):
            continue
        if planned.log_time_ms < latest_ms:
            del state.groups[group_id]
            state.soft.plans.pop(group_id, None)
            state.note_gone(group_id)
        else:
            left.append(planned.log_time_ms)
    state.plans_ms = min(left, default=None)


def _config(step: Step, record: Config) -> Transitions:
    state = step.state
    now = state.config
    if state.partition == 0 and state.layout is not None:
        return (step.refused("busy"),)
    if now is not None and (
        not _is_next(state, record.generation, after=now.generation)
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
        state.end_era(step.entry.offset)
        state.dirty[ERAS] = None
    state.config = record
    return (step.accepted("configured"),)


def _is_next(state: WorldState, generation: int, *, after: int) -> bool:
    # PROTOCOL 4.12: partition 0 decides, generation by generation. Each Config carries
    # everything, so that another partition that missed a generation is not stuck.
    return generation == after + 1 or (state.partition != 0 and generation > after)


def _settings(step: Step, record: GroupSettings) -> Transitions:
    state = step.state
    group_id = record.group_id
    is_next = record.generation == state.settings_of(group_id).generation + 1
    reason = judging.judge_next(
        state, group_id, is_next=is_next, overtaken="settings_overtaken"
    )
    if reason is not None:
        return (step.refused(reason),)
    group = state.groups.setdefault(group_id, GroupState())
    group.settings = Settings(*(getattr(record, name) for name in Settings._fields))
    state.dirty[group_id] = None
    return (step.accepted("group_configured"),)


def _member(step: Step, record: Member) -> Transitions:
    state = step.state
    config = state.config
    if config is None:
        return (step.ignored("no_config"),)
    if not judging.is_home(state, record.group_id):
        return (step.ignored(judging.misplaced_reason(state)),)
    members = state.soft.members
    name = (record.group_id, record.client_id, record.incarnation)
    if name in state.fences:
        return (step.refused("sender_fenced"),)
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
    _drop_gone_members(state)
    return (step.accepted("member"),)


def _drop_gone_members(state: WorldState) -> None:
    members = state.soft.members
    for _ in range(GONE_MEMBERS_PER_ENTRY_MAX):
        oldest = next(iter(members))
        if state.is_live(members[oldest], state.now_ms):
            return
        del members[oldest]


def forget_soft(state: WorldState) -> None:
    """Drop soft state that refers to keys and times of a state that was replaced."""
    state.soft.notes.clear()
    state.soft.offered_ms.clear()
    state.soft.members.clear()  # they announce themselves again
    state.soft.plans.clear()


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {
    ReleaseGroup: _release_group,
    PauseGroup: _pause_group,
    Config: _config,
    GroupSettings: _settings,
    Member: _member,
}
"""How each record about groups, settings and members is folded."""
