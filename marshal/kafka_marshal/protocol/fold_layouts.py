"""How the number of coordinating partitions changes (PROTOCOL 10).

Part of the rationalizer: only ``rationalizer.apply`` calls these. A fence opens the
change in each partition: keys that belong elsewhere under the new count accept no more
claims, and are final once nothing can change them. Their new partition imports them,
without owner. A Done declares that a source has nothing left for a target, and a Final
ends the change in its partition. Nothing here reads another partition: the writers of
these records have checked what must hold between partitions.
"""

from collections.abc import Callable
from typing import Any

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.fold_groups import (
    ERA_AHEAD_S_MAX,
    MS_PER_S,
    drop_if_empty,
    end_operation,
    forget_soft,
    install_directive,
)
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP, home_partition
from kafka_marshal.protocol.items import (
    Halt,
    Layout,
    LayoutSource,
    StandingDirective,
)
from kafka_marshal.protocol.layout import (
    config_of,
    is_home_moving,
    is_moving,
    is_step,
    place_of,
    sources_of,
)
from kafka_marshal.protocol.log_clock import begun_by
from kafka_marshal.protocol.records import (
    SECOND_LEVEL,
    SUPPORTED_LEVEL,
    Config,
    ImportedDirective,
    ImportedKey,
    ImportedSettings,
    LayoutDone,
    LayoutFence,
    LayoutFinal,
    LayoutGroups,
    LayoutImport,
)
from kafka_marshal.protocol.settings import Settings
from kafka_marshal.protocol.state import (
    LAYOUT,
    GroupState,
    KeyState,
    Previous,
    Step,
    Transition,
    Transitions,
    WorldState,
)
from kafka_marshal.protocol.types import Key, shared


def _fence(step: Step, record: LayoutFence) -> Transitions:
    state, config = step.state, config_of(record)
    is_added = state.partition >= record.from_count
    now = state.config
    if now is not None and not is_added:
        if now.feature_level < SECOND_LEVEL:
            return (step.ignored("level"),)
        if _is_busy(state):
            return (step.refused("busy"),)
    begun = begun_by(state.partition, step.entry) if is_added else state
    if not _may_follow(state, record, config, append_ms=begun.append_time_ms):
        return (step.refused("config"),)
    if config.feature_level > SUPPORTED_LEVEL:
        # PROTOCOL 3.3: this release does not know what that level changes.
        state.halted = Halt(step.entry.offset, config.feature_level)
        return (step.halted(),)
    if is_added:
        _begin(state, begun)
    else:
        _drop_moved(state)
        _end_pauses(state, step.entry.offset)
        if now is not None:
            # PROTOCOL 4.10: existing claims keep the era in which they were won.
            state.end_era(step.entry.offset)
    state.config = config
    places = sources_of(
        state.partition,
        from_count=record.from_count,
        to_count=config.partition_count,
    )
    state.layout = Layout(
        op_id=record.op_id,
        from_count=record.from_count,
        offset=step.entry.offset,
        sources=tuple(LayoutSource(place, 0, None) for place in places),
    )
    state.rebuild_derived()
    return (step.accepted("layout_fenced"),)


def _is_busy(state: WorldState) -> bool:
    """Return whether a fence has to wait (PROTOCOL 10.2).

    Partition 0 decides, so no change, pause or set position may be open there. In
    another partition in use, a fence also does the work of a missed Final, so it waits
    for the same locks and verdicts.
    """
    if state.partition != 0:
        return state.layout is not None and _is_unresolved(state)
    groups = state.groups.values()
    is_paused = any(group.pauses or group.scheduled for group in groups)
    return state.layout is not None or is_paused or _is_unresolved(state)


def _is_unresolved(state: WorldState) -> bool:
    """Return whether a set position, whose home moves, has a lock or open verdict."""
    groups = state.groups.values()
    return bool(state.locked) or any(group.unresolved for group in groups)


def _end_pauses(state: WorldState, offset: int) -> None:
    """End all pauses, also scheduled ones: at its fence, partition 0 had none left."""
    pauses: list[tuple[str, bytes]] = []
    for group_id, group in sorted(state.groups.items()):
        pauses += ((group_id, each.op_id) for each in group.pauses)
        pauses += ((group_id, each.op_id) for each in group.scheduled)
    for group_id, op_id in pauses:
        end_operation(state, group_id, op_id=op_id, offset=offset)


def _may_follow(
    state: WorldState, record: LayoutFence, config: Config, *, append_ms: int
) -> bool:
    """Return whether a fence may follow the Config in force (PROTOCOL 10.2)."""
    now, from_count, count = state.config, record.from_count, config.partition_count
    if not is_step(from_count, count) or state.partition >= max(from_count, count):
        return False
    if config.era > append_ms // MS_PER_S + ERA_AHEAD_S_MAX:
        return False
    is_first = now is None or state.partition >= from_count
    if is_first and config.feature_level < SECOND_LEVEL:
        return False
    if now is None:
        return state.partition != 0
    is_of_this_log = (config.format_id, config.cluster_id) == (
        now.format_id,
        now.cluster_id,
    )
    if not is_of_this_log or config.era <= now.era:
        return False
    if state.partition < from_count and now.partition_count != from_count:
        return False
    if state.partition != 0:
        return config.generation > now.generation
    same = (config.heartbeat_interval_ms, config.feature_level, config.limits)
    return config.generation == now.generation + 1 and same == (
        now.heartbeat_interval_ms,
        now.feature_level,
        now.limits,
    )


def _drop_moved(state: WorldState) -> None:
    """Drop the keys that moved away, and end the change.

    The caller rebuilds derived state.
    """
    moved = [key for key in state.keys if is_moving(state, key)]
    left = [name for name in state.groups if is_home_moving(state, name)]
    for key in moved:
        _drop_key(state, key)
    for group_id in left:
        group = state.groups[group_id]
        group.settings = group.planned = None
        state.soft.plans.pop(group_id, None)
        if group_id != CHECKPOINT_GROUP:
            group.directives = ()
    state.layout = None
    for group_id in sorted({*left, *(key.group_id for key in moved)}):
        drop_if_empty(state, group_id)


def _begin(state: WorldState, begun: WorldState) -> None:
    """Drop all that was known of a partition that comes into use (PROTOCOL 10.2).

    So a reader whose log has lost its start reaches the same state.
    """
    state.become(begun)
    forget_soft(state)


def _drop_key(state: WorldState, key: Key) -> None:
    del state.keys[key]
    state.soft.notes.pop(key, None)
    state.soft.offered_ms.pop(key, None)
    state.groups[key.group_id].key_count -= 1


def _import(step: Step, record: LayoutImport) -> Transitions:
    state, layout, config = step.state, step.state.layout, step.state.config
    reason = _lacks_source(state, record)
    if reason is not None or layout is None or config is None:
        return (step.refused(reason or "layout"),)
    source = layout.source(record.source)
    assert source is not None  # else there is a reason
    keys = [Key(each.group_id, each.topic, each.partition) for each in record.items]
    for key in keys:
        places = (
            place_of(key, partition_count=layout.from_count),
            place_of(key, partition_count=config.partition_count),
        )
        if places != (record.source, state.partition):
            return (step.refused("wrong_partition", key),)
    transitions, count = [], 0
    for key, item in zip(keys, record.items, strict=True):
        if source.imported_count + count >= config.limit("keys"):
            # PROTOCOL 10.4: no source has more keys.
            transitions.append(step.ignored("limits", key))
            continue
        done = _import_key(step, key, item, h_ms=config.heartbeat_interval_ms)
        count += done.effect == "imported"
        transitions.append(done)
    if count:
        found = source._replace(imported_count=source.imported_count + count)
        _set_source(state, layout, found)
    return tuple(transitions)


def _import_key(step: Step, named: Key, item: ImportedKey, *, h_ms: int) -> Transition:
    state = step.state
    if named in state.keys:
        return step.ignored("known", named)
    key = Key(shared(named.group_id), shared(named.topic), named.partition)
    successor, previous = item.successor, item.previous
    known = KeyState(
        owner=None,
        epoch=0,
        epoch_leader_epoch=0,
        renewed_ms=state.now_ms,
        heartbeat_interval_ms=h_ms,
        active_ms=state.now_ms,
        position=item.position,
        granted=item.granted,
        topic_id=item.topic_id,
        retired_topic_ids=item.retired_topic_ids,
        previous=None
        if previous is None
        else Previous(previous.op_id, previous.position, previous.granted),
        handoff=None if successor is None else (successor, state.now_ms + h_ms // 2),
    )
    state.keys[key] = known
    state.groups.setdefault(key.group_id, GroupState()).key_count += 1
    state.dirty[key] = None
    state.dirty[key.group_id] = None
    state.note_forgettable(key, known)
    return step.accepted("imported", key)


def _set_source(state: WorldState, layout: Layout, source: LayoutSource) -> None:
    sources = tuple(
        source if each.partition == source.partition else each
        for each in layout.sources
    )
    state.layout = layout._replace(sources=sources)
    state.dirty[LAYOUT] = None


def _groups(step: Step, record: LayoutGroups) -> Transitions:
    state, layout, config = step.state, step.state.layout, step.state.config
    reason = _lacks_source(state, record)
    if reason is not None or layout is None or config is None:
        return (step.refused(reason or "layout"),)
    is_new = state.partition >= layout.from_count
    homes = {each.group_id for each in record.settings} | {
        each.group_id
        for each in record.directives
        if each.group_id != CHECKPOINT_GROUP or not is_new
    }
    for group_id in homes:
        places = tuple(
            home_partition(group_id, partition_count=count)
            for count in (layout.from_count, config.partition_count)
        )
        if places != (record.source, state.partition):
            return (step.refused("wrong_partition"),)
    return (
        *(_import_settings(step, each, config=config) for each in record.settings),
        *(_import_directive(step, each, config=config) for each in record.directives),
    )


def _import_settings(
    step: Step, item: ImportedSettings, *, config: Config
) -> Transition:
    state, group_id = step.state, item.group_id
    if judging.lacks_room_for_group(state, group_id, config=config):
        return step.ignored("limits")
    group = state.groups.setdefault(group_id, GroupState())
    if group.settings is not None:
        return step.ignored("known")
    group.settings = Settings(*(getattr(item, name) for name in Settings._fields))
    state.dirty[item.group_id] = None
    return step.accepted("group_imported")


def _import_directive(
    step: Step, item: ImportedDirective, *, config: Config
) -> Transition:
    state, group_id, op_id = step.state, item.group_id, item.op_id
    group = state.groups.get(group_id) or GroupState()
    if group.directive(op_id) is not None or group.is_over(op_id):
        return step.ignored("known")
    if judging.has_all_directives(state, group, config=config):
        return step.ignored("limits")
    fields = (getattr(item, name) for name in StandingDirective._fields)
    install_directive(state, group_id, standing=StandingDirective(*fields))
    return step.accepted("group_imported")


def _lacks_source(
    state: WorldState, record: LayoutImport | LayoutGroups | LayoutDone
) -> str | None:
    """Return why a partition refuses records about a source, or None."""
    layout = state.layout
    if layout is None or layout.op_id != record.op_id:
        return "layout"
    source = layout.source(record.source)
    if source is None:
        return judging.misplaced_reason(state)
    return None if source.done_ms is None else "done"


def _done(step: Step, record: LayoutDone) -> Transitions:
    state, layout = step.state, step.state.layout
    reason = _lacks_source(state, record)
    if reason is not None or layout is None:
        return (step.refused(reason or "layout"),)
    source = layout.source(record.source)
    assert source is not None  # else there is a reason
    if source.imported_count < record.key_count:
        return (step.refused("incomplete"),)
    _set_source(state, layout, source._replace(done_ms=state.append_time_ms))
    return (step.accepted("layout_done"),)


def _final(step: Step, record: LayoutFinal) -> Transitions:
    state, layout = step.state, step.state.layout
    if layout is None or layout.op_id != record.op_id:
        return (step.refused("layout"),)
    if any(each.done_ms is None for each in layout.sources):
        return (step.refused("incomplete"),)
    if _is_unresolved(state):
        return (step.refused("busy"),)
    _drop_moved(state)
    state.rebuild_derived()
    return (step.accepted("layout_final"),)


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {
    LayoutFence: _fence,
    LayoutImport: _import,
    LayoutGroups: _groups,
    LayoutDone: _done,
    LayoutFinal: _final,
}
"""How each record of a change of the partition count is folded."""
