"""Why a record is refused or ignored (PROTOCOL 4).

Pure functions of the state. They return the name of the reason, which is also its
counter, or None if the record is acceptable.
"""

from hashlib import sha256

from kafka_marshal.protocol import layout
from kafka_marshal.protocol.hashing import (
    CHECKPOINT_GROUP,
    RESERVED_TOPICS,
    coordinating_partition,
    home_partition,
    key_partition,
)
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import (
    ClaimingMessages,
    ClaimingPartition,
    Config,
    Directive,
    ForgettingPartition,
    HandoffOffer,
    HandoffReady,
    Heartbeat,
    PauseGroup,
    ReleaseGroup,
    ReleasingPartition,
    Scope,
)
from kafka_marshal.protocol.state import (
    DIRECTIVES_MAX,
    SCHEDULED_MAX,
    SCOPED_MAX,
    GroupState,
    KeyState,
    WorldState,
)
from kafka_marshal.protocol.types import Key

OP_INCARNATIONS_MAX = 16
PAUSE_AHEAD_MS_MAX = 30 * 24 * 3_600_000
"""How far ahead of the largest append time a pause may begin: 30 days."""


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
    """Return whether a pause of the key's group covers the key (PROTOCOL 4.15)."""
    return state.pause_of(key) is not None


def draining_reason(state: WorldState, key: Key) -> str | None:
    """Return why an owner's key is being drained, or None."""
    if state.layout is not None and layout.is_moving(state, key):
        return layout.MOVING
    return "paused" if is_paused(state, key) else None


def misplaced_reason(state: WorldState) -> str:
    """Return the reason for a record of another partition (PROTOCOL 2.3, 10.3)."""
    return "retired" if layout.is_retired(state) else "wrong_partition"


def is_home(state: WorldState, group_id: str) -> bool:
    """Return whether this is the home of a group, under either count of a change."""
    assert state.config is not None
    counts = [state.config.partition_count]
    counts += [] if state.layout is None else [state.layout.from_count]
    return state.partition in {
        home_partition(group_id, partition_count=count) for count in counts
    }


def is_fenced(state: WorldState, owner: tuple[str, bytes], *, group_id: str) -> bool:
    """Return whether a process of a client is fenced in its group (PROTOCOL 4.13)."""
    # The common case, in which nothing is fenced, costs no hash.
    return bool(state.fences) and (group_id, *owner) in state.fences


def _is_sender_fenced(
    state: WorldState, record: ClaimingPartition | HandoffOffer | HandoffReady
) -> bool:
    sender = (record.client_id, record.incarnation)
    return is_fenced(state, sender, group_id=record.group_id)


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
        return misplaced_reason(state)
    if known is None and layout.is_importing(state, key):
        return "importing"
    if _is_sender_fenced(state, record):
        return "sender_fenced"
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
        return misplaced_reason(state)
    if _is_sender_fenced(state, record):
        return "sender_fenced"
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
    if layout.is_moving(state, key):
        return "moving"
    if is_misplaced(state, key, config=state.config):
        return misplaced_reason(state)
    if state.layout is not None:
        return "busy"
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
    record: Heartbeat | ReleasingPartition | ClaimingMessages | HandoffOffer,
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
        if state.layout is not None and layout.is_final(state, key):
            return "not_owner"  # PROTOCOL 10.3: nothing changes a final key
        # The partition of an owned key was checked when it was claimed.
        return None if known.epoch == record.epoch else "old_epoch"
    if layout.is_moving(state, key) or not is_misplaced(state, key, config=config):
        return "not_owner"
    return misplaced_reason(state)


def judge_offer(state: WorldState, record: HandoffOffer, *, key: Key) -> str | None:
    """Return why an owner's offer is refused, in the order of PROTOCOL 9.4, or None."""
    if _is_sender_fenced(state, record):
        return "sender_fenced"
    return draining_reason(state, key)


def judge_ready(state: WorldState, record: HandoffReady, *, key: Key) -> str | None:
    """Return why a Ready is refused, in the order of PROTOCOL 9.4, or None."""
    known = state.keys.get(key)
    if known is None or known.epoch != record.epoch:
        return "old_epoch"
    offer = known.offer
    if offer is None:
        return "no_offer"
    if offer.successor != record.client_id:
        return "not_successor"
    if state.now_ms >= offer.until_ms:
        return "late"
    if _is_sender_fenced(state, record):
        return "sender_fenced"
    return draining_reason(state, key)


def judge_release_group(
    state: WorldState, record: ReleaseGroup | PauseGroup, *, config: Config
) -> str | None:
    """Return why a pause or its end is refused, in the order of PROTOCOL 4.8, 4.15."""
    ends = record.msg_expire_time <= state.append_time_ms
    if reason := _refuses_pauses(state, ends=ends):
        return reason
    if lacks_room_for_group(state, record.group_id, config=config):
        return "limits"
    group = state.groups.get(record.group_id) or GroupState()
    if group.is_over(record.op_id):
        return "op_over"
    scheduled, pause = group.scheduled_as(record.op_id), group.lasting(record.op_id)
    if ends and scheduled is not None:
        return None  # a scheduled pause is canceled, whatever pause is active
    scope, known = scope_of(record), pause or scheduled
    if not ends and known is not None and known.scope != scope:
        return "busy"
    if pause is None:
        if scope is None and group.pause is not None:
            return "busy"
        if ends:
            return "expired"
        is_new = scope is not None and scheduled is None
        return "limits" if is_new and _lacks_room_for_scope(state, record) else None
    if record.incarnation not in pause.incarnations:
        full = len(pause.incarnations) >= OP_INCARNATIONS_MAX
        return "limits" if full else None
    if record.incarnation != pause.incarnation or record.seq <= pause.seq:
        return "old_seq"
    return None


def judge_pause_group(
    state: WorldState, record: PauseGroup, *, until_ms: int, config: Config
) -> str | None:
    """Return why a pause cannot be scheduled, in the order of PROTOCOL 4.14, or None.

    Args:
        state: The world.
        record: The record; its pause begins later.
        until_ms: End of the pause, within the limit of its length.
        config: The Config in force.
    """
    if reason := _refuses_pauses(state, ends=False):
        return reason
    if lacks_room_for_group(state, record.group_id, config=config):
        return "limits"
    if record.begin_time - state.append_time_ms > PAUSE_AHEAD_MS_MAX:
        return "limits"
    group = state.groups.get(record.group_id)
    if group is not None and group.is_over(record.op_id):
        return "op_over"
    if record.msg_expire_time <= record.begin_time:
        return "expired"
    if group is not None:
        known = group.scheduled_as(record.op_id)
        if known is not None:
            times = (known.begin_ms, known.until_ms, known.scope)
            is_same = times == (record.begin_time, until_ms, record.scope)
            return None if is_same else "busy"
        if group.lasting(record.op_id) is not None:
            return "busy"
        if len(group.scheduled) >= SCHEDULED_MAX:
            return "limits"
    is_full = record.scope is not None and _lacks_room_for_scope(state, record)
    return "limits" if is_full else None


def _refuses_pauses(state: WorldState, *, ends: bool) -> str | None:
    # PROTOCOL 10.2: no pause begins during a change. A pause needs every partition, so
    # partition 0 orders pauses and changes; and while a pause lasts, all partitions
    # place the home of its set position by the same count.
    if layout.is_retired(state):
        return "retired"
    return "busy" if state.layout is not None and not ends else None


def scope_of(record: ReleaseGroup | PauseGroup) -> Scope | None:
    """Return the partitions that a pause is limited to, None for the whole group."""
    return record.scope if isinstance(record, PauseGroup) else None


def _lacks_room_for_scope(state: WorldState, record: ReleaseGroup | PauseGroup) -> bool:
    """Return whether no more pauses with a scope fit (PROTOCOL 4.15)."""
    assert state.config is not None
    if len(state.scopes) >= state.config.limit("operations"):
        return True
    mine = sum(group_id == record.group_id for group_id, _ in state.scopes)
    return mine >= SCOPED_MAX


def judge_next(
    state: WorldState, group_id: str, *, is_next: bool, overtaken: str
) -> str | None:
    """Return why a group's next settings or plan are refused (PROTOCOL 9.1, 9.2).

    Args:
        state: The state of the partition.
        group_id: The group.
        is_next: Whether the record follows the last one of its kind.
        overtaken: The reason to return if it does not.
    """
    config = state.config
    assert config is not None  # the records need level 2
    home = home_partition(group_id, partition_count=config.partition_count)
    if home != state.partition:
        return misplaced_reason(state)
    if layout.is_importing_group(state, group_id):
        return "importing"
    if not is_next:
        return overtaken
    is_full = lacks_room_for_group(state, group_id, config=config)
    return "limits" if is_full else None


def judge_directive(
    state: WorldState, record: Directive, *, config: Config
) -> str | None:
    """Return why a directive is refused, in the order of PROTOCOL 9.7, or None."""
    group_id, op_id = record.group_id, record.op_id
    home = home_partition(group_id, partition_count=config.partition_count)
    if layout.is_retired(state):
        return "retired"
    if group_id != CHECKPOINT_GROUP and home != state.partition:
        return "wrong_partition"
    if layout.is_importing_group(state, group_id):
        return "importing"
    if lacks_room_for_group(state, group_id, config=config):
        return "limits"
    group = state.groups.get(group_id) or GroupState()
    if group.is_over(op_id):
        return "op_over"
    known = group.directive(op_id)
    ends = record.msg_expire_time <= state.append_time_ms
    if known is None:
        if ends:
            return "expired"
        is_full = has_all_directives(state, group, config=config)
        return "limits" if is_full else None
    subject = known.client, known.host, known.action
    if not ends and subject != (record.client, record.host, record.action):
        return "busy"
    is_old = record.incarnation == known.incarnation and record.seq <= known.seq
    return "old_seq" if is_old else None


def has_all_directives(state: WorldState, group: GroupState, *, config: Config) -> bool:
    """Return whether a group, or this partition, has as many directives as allowed."""
    is_full = len(state.directed) >= config.limit("operations")
    return is_full or len(group.directives) >= DIRECTIVES_MAX


def new_place(state: WorldState, key: Key, *, reason: str) -> dict[str, int] | None:
    """Return the new generation and partition of a key that has moved, or None."""
    config = state.config
    is_moved = state.layout is not None or layout.is_retired(state)
    names = {"wrong_generation", "wrong_partition", "retired"}
    if config is None or not is_moved or reason not in names:
        return None
    place = key_partition(
        key.topic, key.partition, partition_count=config.partition_count
    )
    return {"generation": config.generation, "partition": place}


def time_left(
    state: WorldState, known: KeyState | None, *, reason: str
) -> dict[str, int] | None:
    """Return how long a refusal lasts, if log time alone ends it."""
    if reason == "held" and known is not None:
        return {"remaining_ms": known.remaining_ms(state.now_ms)}
    if reason == "quiet" and state.quiet_until_ms is not None:
        return {"remaining_ms": state.quiet_until_ms - state.now_ms}
    return None
