"""How a group's position is set: staged, decided and resolved (PROTOCOL 8.3 to 8.5).

Part of the rationalizer: only ``rationalizer.apply`` calls these. The positions of an
operation are set in all coordinating partitions or in none. Each one locks its keys
first (Stage). A single record on the group's home is the commit (Decide); it is
accepted only while the pause under which all locks were made is active. Then each
partition sets the positions or drops them (Resolve).
"""

from collections.abc import Callable, Iterator
from typing import Any

from kafka_marshal.protocol import judging, layout
from kafka_marshal.protocol.fold_groups import drop_if_empty, end_operation
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.items import Lock, Verdict
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import (
    Config,
    DecidePosition,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.state import (
    KeyState,
    Previous,
    Step,
    Transition,
    Transitions,
    WorldState,
)
from kafka_marshal.protocol.types import Key, may_be_same_topic

STAGE_REFUSALS = (
    *("unknown_key", "old_topic", "cas", "plan_mismatch", "locked", "held"),
)
"""Why a key cannot be staged, in the order of PROTOCOL 8.3."""


def _staged(record: StagePosition) -> Iterator[tuple[Key, Lock]]:
    """Yield each key of a record with its lock; the codec refuses repeated keys."""
    for topic in record.topics:
        for partition, position in topic.positions:
            yield (
                Key(record.group_id, topic.topic, partition),
                Lock(record.op_id, record.plan_digest, position, topic.topic_id),
            )


def _stage(step: Step, record: StagePosition) -> Transitions:
    state = step.state
    config = state.config
    assert config is not None  # the record needs level 2
    locks = dict(_staged(record))
    for key in locks:
        if layout.is_moving(state, key):
            return (step.refused("moving", key),)
    for key in locks:
        if judging.is_misplaced(state, key, config=config):
            return (step.refused(judging.misplaced_reason(state), key),)
    reason = _not_paused(state, record.group_id, op_id=record.op_id)
    if reason is not None:
        return (step.refused(reason),)
    refusal = _first_refusal(state, locks)
    if refusal is not None:
        reason, key = refusal
        detail = judging.time_left(state, state.keys.get(key), reason=reason)
        return (step.refused(reason, key, detail=detail),)
    locked_count = sum(map(len, state.locked.values()))
    new_count = sum(state.keys[key].lock is None for key in locks)
    if locked_count + new_count > config.limit("locks"):
        return (step.refused("limits"),)
    return tuple(_lock(step, key, lock) for key, lock in locks.items())


def _lock(step: Step, named: Key, lock: Lock) -> Transition:
    state = step.state
    known = state.keys[named]
    key = state.epochs.get(known.epoch, named)  # equal, with shared names
    if known.lock is None:
        known.owner = known.handoff = known.offer = None
        known.lock = lock
        known.active_ms = state.now_ms
        state.locked.setdefault((key.group_id, lock.op_id), {})[key] = None
        state.dirty[key] = None
    return step.accepted("staged", key, detail={"position": lock.position})


def _not_paused(state: WorldState, group_id: str, *, op_id: bytes) -> str | None:
    """Return why an operation cannot continue here, None while its pause is active."""
    group = state.groups.get(group_id)
    if group is not None and group.is_over(op_id):
        return "op_over"
    pause = None if group is None else group.pause
    return None if pause is not None and pause.op_id == op_id else "not_paused"


def _first_refusal(state: WorldState, locks: dict[Key, Lock]) -> tuple[str, Key] | None:
    """Return the first reason of the clause that applies to a key, and the key."""
    found = {
        reason: key
        for key in reversed(locks)
        if (reason := _refusal(state, key, lock=locks[key])) is not None
    }
    return next(((name, found[name]) for name in STAGE_REFUSALS if name in found), None)


def _refusal(state: WorldState, key: Key, *, lock: Lock) -> str | None:
    known = state.keys.get(key)
    if known is None:
        return "unknown_key"
    if lock.topic_id is not None and lock.topic_id in known.retired_topic_ids:
        return "old_topic"
    if not may_be_same_topic(lock.topic_id, known.topic_id):
        return "cas"
    if known.lock is not None and known.lock.op_id != lock.op_id:
        return "locked"
    if known.lock is not None and known.lock != lock:
        return "plan_mismatch"
    is_stale = known.freshness(state.now_ms) is Freshness.STALE
    return "held" if known.owner is not None and not is_stale else None


def _decide(step: Step, record: DecidePosition) -> Transitions:
    state = step.state
    config = state.config
    assert config is not None  # the record needs level 2
    if not _is_home(state, record.group_id, config=config):
        return (step.refused(judging.misplaced_reason(state)),)
    reason = _not_paused(state, record.group_id, op_id=record.op_id)
    if reason is not None:
        return (step.refused(reason),)
    group = state.groups[record.group_id]
    verdict = group.unresolved
    if verdict is None:
        group.verdict = Verdict(
            record.op_id,
            record.plan_digest,
            record.key_count,
            step.entry.offset,
            is_resolved=False,
        )
        state.dirty[record.group_id] = None
        return (step.accepted("decided"),)
    if verdict.op_id != record.op_id:
        return (step.refused("busy"),)
    is_same = verdict[1:3] == (record.plan_digest, record.key_count)
    return (step.accepted("decided") if is_same else step.refused("plan_mismatch"),)


def _is_home(state: WorldState, group_id: str, *, config: Config) -> bool:
    # PROTOCOL 10.2: an operation from before an open change ends at its earlier home.
    now = state.layout
    count = config.partition_count if now is None else now.from_count
    home = home_partition(group_id, partition_count=count)
    return home == state.partition


def _resolve(step: Step, record: ResolvePosition) -> Transitions:
    state = step.state
    config = state.config
    group_id, op_id = record.group_id, record.op_id
    assert config is not None  # the record needs level 2
    group = state.groups.get(group_id)
    is_home = _is_home(state, group_id, config=config)
    verdict = group.unresolved if group is not None and is_home else None
    is_decided = verdict is not None and verdict.op_id == op_id
    keys = sorted(state.locked.get((group_id, op_id), ()))
    is_over = group is not None and group.is_over(op_id)
    if is_over and not keys and not is_decided:
        return (step.ignored("op_over"),)
    if is_home and record.commit != is_decided:
        return (step.refused("undecided" if record.commit else "resolve_contradicts"),)
    if group is None and judging.lacks_room_for_group(state, group_id, config=config):
        return (step.refused("limits"),)
    effect = "position_set" if record.commit else "unlocked"
    transitions = []
    for key in keys:
        known = state.keys[key]
        _unlock(known, commits=record.commit)
        if record.commit:
            # The next claim starts at the new position: it follows no earlier claim.
            state.soft.notes.pop(key, None)
        known.active_ms = state.now_ms
        state.dirty[key] = None
        state.note_forgettable(key, known)
        detail = {"position": known.position} if known.position is not None else None
        transitions.append(step.accepted(effect, key, detail=detail))
    state.locked.pop((group_id, op_id), None)
    if not is_over:
        end_operation(state, group_id, op_id=op_id, offset=step.entry.offset)
    if is_decided and group is not None and verdict is not None:
        group.verdict = verdict._replace(is_resolved=True)
        state.dirty[group_id] = None
        drop_if_empty(state, group_id)
    return tuple(transitions) or (step.accepted("resolved"),)


def _unlock(known: KeyState, *, commits: bool) -> None:
    lock = known.lock
    assert lock is not None
    known.lock = None
    if not commits:
        return
    known.previous = Previous(lock.op_id, known.position, known.granted)
    known.position = lock.position
    if known.granted is not None:
        known.granted = lock.position
    if known.topic_id is None:
        known.topic_id = lock.topic_id


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {
    StagePosition: _stage,
    DecidePosition: _decide,
    ResolvePosition: _resolve,
}
"""How each record of a set position is folded."""
