"""How claims and their owners' records change keys (PROTOCOL 4.3 to 4.7, 4.9).

Part of the rationalizer: only ``rationalizer.apply`` calls these.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from kafka_marshal.protocol import judging, layout
from kafka_marshal.protocol.fold_groups import drop_if_empty
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingMessages,
    ClaimingPartition,
    ForgettingPartition,
    Heartbeat,
    ReleasingPartition,
)
from kafka_marshal.protocol.state import (
    ACCEPTED,
    RETIRED_TOPIC_IDS_MAX,
    GroupState,
    KeyState,
    Step,
    Transition,
    Transitions,
    WorldState,
    count,
    is_forgettable,
    note_claim,
    note_release,
)
from kafka_marshal.protocol.types import Key, Owner, shared

FORGOTTEN_PER_ENTRY_MAX = 8


def _claim(step: Step, record: ClaimingPartition) -> Transitions:
    state = step.state
    key = Key(record.group_id, record.topic, record.partition)
    config = state.config
    if config is None:
        return (step.refused("no_config", key),)
    known = state.keys.get(key)
    judge = judging.judge_claim if record.resume is None else judging.judge_resume
    reason = judge(state, record, config=config, key=key)
    if reason is not None:
        detail = judging.time_left(state, known, reason=reason)
        detail = detail or judging.new_place(state, key, reason=reason)
        return (step.refused(reason, key, detail=detail),)
    before: Owner | None = None
    follows: int | None = None
    if known is None:
        key = _shared(key)
        known = _new_key(state, key)
    else:
        follows = known.epoch
        key = state.epochs.pop(follows) if follows else _shared(key)
    before = known.owner
    _install_owner(step, record, known)
    note_claim(state, key, record=record, before=before, follows=follows)
    known.heartbeat_interval_ms = config.heartbeat_interval_ms
    state.epochs[step.entry.offset] = key
    state.dirty[key] = None
    effect = "claimed" if record.resume is None else "resumed"
    return (step.accepted(effect, key),)


def _shared(key: Key) -> Key:
    """Return a key with shared names, which saves memory with many keys."""
    return Key(shared(key.group_id), shared(key.topic), key.partition)


def _new_key(state: WorldState, key: Key) -> KeyState:
    known = KeyState(
        owner=None,
        epoch=0,
        epoch_leader_epoch=0,
        renewed_ms=0,
        heartbeat_interval_ms=0,
        active_ms=0,
    )
    state.keys[key] = known
    group = state.groups.setdefault(key.group_id, GroupState())
    group.key_count += 1
    state.dirty[key.group_id] = None
    return known


def _install_owner(step: Step, record: ClaimingPartition, known: KeyState) -> None:
    state = step.state
    known.owner = Owner(shared(record.client_id), record.incarnation)
    known.epoch = step.entry.offset
    known.epoch_leader_epoch = state.leader_epoch or 0
    known.renewed_ms = known.active_ms = state.now_ms
    known.resume_hash = record.resume_hash
    known.offer = None
    if record.resume is not None:
        return  # PROTOCOL 4.4, 9.4: a resume changes nothing else.
    known.handoff = None
    topic_id = record.topic_id
    if topic_id is None or topic_id == known.topic_id:
        return
    if known.topic_id is not None:
        # PROTOCOL 4.3: another topic of the same name; old offsets are void.
        retired = (*known.retired_topic_ids, known.topic_id)
        known.retired_topic_ids = retired[-RETIRED_TOPIC_IDS_MAX:]
        known.position = known.granted = known.previous = None
    known.topic_id = topic_id


def _heartbeat(step: Step, record: Heartbeat) -> Transitions:
    state = step.state
    # The busiest path of a fleet. An epoch identifies its key, so an owner's heartbeat
    # needs no new key object, whose hash would be computed again.
    key = state.epochs.get(record.epoch)
    name = (record.group_id, record.topic, record.partition)
    if key != name or state.config is None:
        return _stray_heartbeat(step, record)
    known = state.keys[key]
    if known.owner != (record.client_id, record.incarnation):
        return _stray_heartbeat(step, record)
    if state.layout is not None and layout.is_final(state, key):
        return (step.ignored("not_owner", key),)
    return _take_heartbeat(step, record, key, known=known)


def _stray_heartbeat(step: Step, record: Heartbeat) -> Transitions:
    key = Key(record.group_id, record.topic, record.partition)
    reason = judging.mismatch(step.state, record, key=key)
    if reason is not None:
        return (step.ignored(reason, key),)
    return _take_heartbeat(step, record, key, known=step.state.keys[key])


def _take_heartbeat(
    step: Step, record: Heartbeat, key: Key, *, known: KeyState
) -> Transitions:
    state = step.state
    position = record.position
    if record.rewind and position is not None:
        known.position = position
    effect = _beat(known, position, state.now_ms, _renewal(state, key))
    state.dirty[key] = None
    count(state, effect)
    offset, epoch = step.entry.offset, known.epoch
    return (
        Transition(
            offset=offset,
            outcome=ACCEPTED,
            effect=effect,
            reason=None,
            key=key,
            epoch=epoch,
            detail=None,
            record=record,
        ),
    )


def _renewal(state: WorldState, key: Key) -> int | None:
    """Return the interval by which the owner's heartbeat renews; None = not at all."""
    assert state.config is not None
    # PROTOCOL 4.5: renewing in a pause would be unsafe; 4.13: a fence ends the claim.
    if judging.draining_reason(state, key) is not None or _is_owner_fenced(state, key):
        return None
    return state.config.heartbeat_interval_ms


def _is_owner_fenced(state: WorldState, key: Key) -> bool:
    owner = state.keys[key].owner
    return owner is not None and judging.is_fenced(state, owner, group_id=key[0])


def _beat(
    known: KeyState, position: int | None, now_ms: int, interval_ms: int | None
) -> str:
    """Apply a heartbeat; with an ``interval_ms`` it renews. Return its effect."""
    old = known.position
    if position is not None and (old is None or position > old):
        known.position = position
    known.active_ms = now_ms
    if interval_ms is None:
        return "position_only"
    known.renew(now_ms, interval_ms)
    return "renewed"


def _batch_heartbeat(step: Step, record: BatchHeartbeat) -> Transitions:
    state, config = step.state, step.state.config
    if config is None:
        return tuple(step.ignored("not_owner") for _ in record.beats)
    if len(record.beats) > config.limit("beats"):
        return (step.refused("limits"),)
    # The busiest loop of a large fleet: look up what does not change before it.
    keys, find, dirty = state.keys, state.epochs.get, state.dirty
    # Names of keys and owners are shared, so that these compare by identity.
    group_id = shared(record.group_id)
    sender = (shared(record.client_id), record.incarnation)
    offset, now_ms = step.entry.offset, state.now_ms
    group = state.groups.get(group_id)
    is_paused = group is not None and bool(group.pauses)
    may_hold = is_paused or bool(state.fences) or state.layout is not None
    renewal: int | None = config.heartbeat_interval_ms
    effect = "renewed"
    ignored = held = 0
    transitions: list[Transition] = []
    append, accepted = transitions.append, ACCEPTED
    for epoch, position in record.beats:
        key = find(epoch)
        if key is None or key[0] != group_id:
            append(step.ignored("not_owner"))
            ignored += 1
            continue
        known = keys[key]
        if known.owner != sender:
            append(step.ignored("not_owner", key))
            ignored += 1
            continue
        if state.layout is not None and layout.is_final(state, key):
            append(step.ignored("not_owner", key))
            ignored += 1
            continue
        if may_hold:
            renewal = _renewal(state, key)
            effect = "position_only" if renewal is None else "renewed"
            held += renewal is None
        # ``_beat`` inlined: the call is a tenth of the time of a heartbeat.
        old = known.position
        if position is not None and (old is None or position > old):
            known.position = position
        known.active_ms = now_ms
        if renewal == known.heartbeat_interval_ms:
            known.renewed_ms = now_ms
        elif renewal is not None:
            known.renew(now_ms, renewal)
        dirty[key] = None
        append(
            Transition(
                offset=offset,
                outcome=accepted,
                effect=effect,
                reason=None,
                key=key,
                epoch=epoch,
                detail=None,
                record=record,
            )
        )
    count(state, "position_only", times=held)
    count(state, "renewed", times=len(transitions) - ignored - held)
    return tuple(transitions)


def _release(step: Step, record: ReleasingPartition) -> Transitions:
    state = step.state
    key = Key(record.group_id, record.topic, record.partition)
    reason = judging.mismatch(state, record, key=key)
    if reason is not None:
        return (step.ignored(reason, key),)
    known = state.keys[key]
    known.owner = known.offer = None
    # A release sets the position as a heartbeat does, and renews nothing.
    _beat(known, record.position, state.now_ms, None)
    if record.successor is not None:
        assert state.config is not None
        deadline_ms = state.now_ms + state.config.heartbeat_interval_ms // 2
        known.handoff = (record.successor, deadline_ms)
    note_release(state, key, record=record, offset=step.entry.offset)
    state.note_forgettable(key, known)
    state.dirty[key] = None
    return (step.accepted("released", key),)


def _claim_messages(step: Step, record: ClaimingMessages) -> Transitions:
    state = step.state
    key = Key(record.group_id, record.topic, record.partition)
    reason = judging.mismatch(state, record, key=key)
    if reason is not None:
        return (step.ignored(reason, key),)
    known = state.keys[key]
    config = state.config
    assert config is not None
    head = known.next_unclaimed()
    first = record.first if head is None else head
    last = record.proposed_last_offset
    if _is_owner_fenced(state, key):
        reason = "sender_fenced"
    elif (draining := judging.draining_reason(state, key)) is not None:
        reason = draining
    elif last < first:
        reason = "nothing_left"
    elif last - first >= config.limit("span"):
        reason = "span"
    if reason is not None:
        return (step.refused(reason, key),)
    known.granted = known.position = last + 1
    known.active_ms = state.now_ms
    state.dirty[key] = None
    detail = {"first": first, "last": last}
    return (step.accepted("granted", key, detail=detail),)


def _forget_key(step: Step, record: ForgettingPartition) -> Transitions:
    state = step.state
    key = Key(record.group_id, record.topic, record.partition)
    reason = judging.judge_forgetting(state, record, key=key)
    if reason is not None:
        known = state.keys.get(key)
        return (
            step.refused(
                reason, key, detail=judging.time_left(state, known, reason=reason)
            ),
        )
    _drop_key(state, key, state.keys[key])
    state.note_forgotten(key)
    return (step.accepted("forgotten", key),)


def forget(state: WorldState, transitions: Transitions) -> None:
    """Drop keys that have been silent for too long (PROTOCOL 4.9)."""
    assert state.config is not None
    if state.layout is not None:
        return  # PROTOCOL 10.3
    latest_ms = state.now_ms - state.config.limit("forget_ms")
    heap = state.forgettable
    if heap[0][0] >= latest_ms:
        return
    named = {transition.key for transition in transitions}
    kept: list[tuple[int, Key]] = []
    dropped = 0
    while heap and heap[0][0] < latest_ms and dropped < FORGOTTEN_PER_ENTRY_MAX:
        active_ms, key = heappop(heap)
        known = state.keys.get(key)
        if known is None or key not in state.awaiting:
            state.stale_count -= 1  # a record dropped it earlier
        elif not is_forgettable(known):
            state.awaiting.discard(key)
        elif known.active_ms != active_ms:
            heappush(heap, (known.active_ms, key))
        elif key in named:
            kept.append((active_ms, key))
        else:
            _drop_key(state, key, known)
            state.awaiting.discard(key)
            dropped += 1
    for item in kept:
        heappush(heap, item)
    state.bound_forgettable()


def _drop_key(state: WorldState, key: Key, known: KeyState) -> None:
    del state.keys[key]
    state.epochs.pop(known.epoch, None)  # an imported key has none
    state.soft.notes.pop(key, None)
    state.soft.offered_ms.pop(key, None)
    state.note_gone(key)
    state.groups[key.group_id].key_count -= 1
    drop_if_empty(state, key.group_id)


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {
    Heartbeat: _heartbeat,
    ClaimingPartition: _claim,
    ReleasingPartition: _release,
    ClaimingMessages: _claim_messages,
    BatchHeartbeat: _batch_heartbeat,
    ForgettingPartition: _forget_key,
}
"""How each record about keys is folded."""
