"""Why a record is refused or ignored (PROTOCOL 4).

Pure functions of the state. They return the name of the reason, which is also its
counter, or None if the record is acceptable.
"""

from hashlib import sha256

from kafka_marshal.protocol.hashing import (
    PLANNER_TOPIC,
    RESERVED_TOPICS,
    coordinating_partition,
)
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import (
    ClaimingMessages,
    ClaimingPartition,
    Config,
    ForgettingPartition,
    Heartbeat,
    ReleaseGroup,
    ReleasingPartition,
)
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.types import Key

OP_INCARNATIONS_MAX = 16


def is_misplaced(state: WorldState, key: Key, *, config: Config) -> bool:
    """Return whether a key belongs to another coordinating partition."""
    # PROTOCOL 2.3: a reserved key belongs to the coordinating partition it names.
    if key.topic in RESERVED_TOPICS:
        return key.partition != state.partition
    return (
        coordinating_partition(
            key.topic, key.partition, partition_count=config.partition_count
        )
        != state.partition
    )


def is_paused(state: WorldState, key: Key) -> bool:
    """Return whether a pause holds the key's group."""
    if state.lapses_ms is None:
        return False  # the common case: no group is paused
    # PROTOCOL 2.3: a group's pause does not touch its planner key.
    return key.topic != PLANNER_TOPIC and state.active_pause(key.group_id) is not None


def _held_back(state: WorldState, key: Key) -> str | None:
    """Return why nobody can claim a key now, or None."""
    if is_paused(state, key):
        return "paused"
    return None if state.quiet_until_ms is None else "quiet"


def judge_claim(
    state: WorldState, record: ClaimingPartition, *, config: Config, key: Key
) -> str | None:
    """Return why a claim is refused, in the order of PROTOCOL 4.3, or None."""
    known = state.keys.get(key)
    if record.generation != config.generation:
        return "wrong_generation"
    if is_misplaced(state, key, config=config):
        return "wrong_partition"
    if known is None and _is_full(state, config, key):
        return "limits"
    reason = _held_back(state, key)
    if reason is not None:
        return reason
    if known is None:
        return None if record.expected_epoch is None else "cas"
    return _judge_known(state, known, record)


def _judge_known(
    state: WorldState, known: KeyState, record: ClaimingPartition
) -> str | None:
    if known.lock is not None:
        return "locked"
    if known.handoff is not None:
        successor, deadline_ms = known.handoff
        if state.now_ms < deadline_ms and successor != record.client_id:
            return "handoff"
    if known.owner is not None:
        stale = known.freshness(state.now_ms) is Freshness.STALE
        if not stale and known.owner == (record.client_id, record.incarnation):
            return "duplicate"
        if not stale:
            return "held"
    if record.expected_epoch is not None and record.expected_epoch != known.epoch:
        return "cas"
    if record.topic_id is not None:
        if record.topic_id in known.retired_topic_ids:
            return "old_topic"
        changed = known.topic_id is not None and known.topic_id != record.topic_id
        if changed and record.expected_epoch is None:
            return "cas"
    return None


def judge_resume(
    state: WorldState, record: ClaimingPartition, *, config: Config, key: Key
) -> str | None:
    """Return why a resume is refused, in the order of PROTOCOL 4.4, or None."""
    resume = record.resume
    assert resume is not None
    if record.generation != config.generation:
        return "wrong_generation"
    if is_misplaced(state, key, config=config):
        return "wrong_partition"
    reason = _held_back(state, key)
    if reason is not None:
        return reason
    known = state.keys.get(key)
    if known is None:
        return "resume_mismatch"
    if known.lock is not None:
        return "locked"
    if (
        known.owner != (record.client_id, resume.incarnation)
        or known.epoch != resume.epoch
        or resume.incarnation == record.incarnation
        or known.resume_hash != sha256(resume.secret).digest()
    ):
        return "resume_mismatch"
    if known.freshness(state.now_ms) is not Freshness.FRESH:
        return "resume_not_fresh"
    return None


def _is_full(state: WorldState, config: Config, key: Key) -> bool:
    if len(state.keys) >= config.limit("keys"):
        return True
    return lacks_room_for_group(state, key.group_id, config=config)


def lacks_room_for_group(state: WorldState, group_id: str, *, config: Config) -> bool:
    """Return whether a group is new and the limit of groups is reached."""
    is_new = group_id not in state.groups
    return is_new and len(state.groups) >= config.limit("groups")


def judge_forgetting(
    state: WorldState, record: ForgettingPartition, *, key: Key
) -> str | None:
    """Return why a record cannot drop a key, in the order of PROTOCOL 4.9, or None."""
    if state.config is None:
        return "no_config"
    if is_misplaced(state, key, config=state.config):
        return "wrong_partition"
    known = state.keys.get(key)
    if known is None:
        return "cas"
    if known.lock is not None:
        return "locked"
    is_stale = known.freshness(state.now_ms) is Freshness.STALE
    if known.owner is not None and not is_stale:
        return "held"
    return None if known.epoch == record.epoch else "cas"


def mismatch(
    state: WorldState,
    record: Heartbeat | ReleasingPartition | ClaimingMessages,
    *,
    key: Key,
) -> str | None:
    """Return why a record is not the owner's (PROTOCOL 4.5), or None if it is."""
    config = state.config
    if config is None:
        return "not_owner"
    known = state.keys.get(key)
    sender = (record.client_id, record.incarnation)
    if known is not None and known.owner == sender:
        # The partition of an owned key was checked when it was claimed.
        return None if known.epoch == record.epoch else "old_epoch"
    return "wrong_partition" if is_misplaced(state, key, config=config) else "not_owner"


def judge_release_group(
    state: WorldState, record: ReleaseGroup, *, config: Config
) -> str | None:
    """Return why an admin's record is refused, in the order of PROTOCOL 4.8."""
    if lacks_room_for_group(state, record.group_id, config=config):
        return "limits"
    group = state.groups.get(record.group_id)
    pause = state.active_pause(record.group_id)
    if group is not None and group.is_over(record.op_id):
        return "op_over"
    if pause is None:
        over = record.msg_expire_time <= state.append_time_ms
        return "expired" if over else None
    if pause.op_id != record.op_id:
        return "busy"
    if record.incarnation not in pause.incarnations:
        full = len(pause.incarnations) >= OP_INCARNATIONS_MAX
        return "limits" if full else None
    if record.incarnation != pause.incarnation or record.seq <= pause.seq:
        return "old_seq"
    return None
