"""How Reset replaces a state, and what checkpoints change (PROTOCOL 7.2, 7.6).

Part of the rationalizer: only ``rationalizer.apply`` calls these. A Reset carries
the state itself, and the parts received so far belong to the state, too. So the fold
decides from the log alone, wherever a reader starts, even if retention has deleted
the checkpoint that the state was taken from.
"""

from collections.abc import Callable
from typing import Any

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.fold_groups import forget_soft
from kafka_marshal.protocol.records import (
    CHUNK_BYTES_MAX,
    CheckpointBegin,
    CheckpointChunk,
    CheckpointEnd,
    Config,
    Reset,
)
from kafka_marshal.protocol.snapshot import bytes_max, chained, from_bytes, outline
from kafka_marshal.protocol.state import (
    OPERATIONS,
    STAGING,
    Staging,
    Step,
    Transitions,
    WorldState,
)
from kafka_marshal.protocol.types import OFFSET_MAX

PARTS_MAX = 4_096
OPEN_MS_MAX = 60_000
"""How long the received parts wait for the next one, in log time."""

CheckpointRecord = CheckpointBegin | CheckpointChunk | CheckpointEnd


def _checkpoint(step: Step, record: CheckpointRecord) -> Transitions:
    del record  # evidence only: ``checkpoints`` compares it with a state
    return (step.skipped(),)


def _reset(step: Step, record: Reset) -> Transitions:
    state = step.state
    if state.config is None:
        return (step.refused("no_config"),)
    if state.layout is not None:
        return (step.refused("busy"),)
    if record.number == 0:
        # Replaces an unfinished operation, so that a dead admin blocks nobody.
        _stage(state, None)
    reason = _misfit(state, record, config=state.config)
    if reason is not None:
        return (step.refused(reason),)
    staging = _with_part(state, record)
    if len(staging.parts) < staging.part_count:
        _stage(state, staging)
        return (step.accepted("reset_staged"),)
    _stage(state, None)
    carried = _carried(state, staging, config=state.config)
    if isinstance(carried, str):
        return (step.refused(carried),)
    _install(state, carried, leader_epoch=state.leader_epoch)
    return (step.accepted("reset"),)


def _misfit(state: WorldState, record: Reset, *, config: Config) -> str | None:
    """Return why a part does not follow the parts before it, or None."""
    most, staging = bytes_max(config), state.staging
    if record.part_count > min(PARTS_MAX, 1 + most // CHUNK_BYTES_MAX):
        return "limits"
    if record.size_bytes > min(record.part_count * CHUNK_BYTES_MAX, most):
        return "limits"
    if record.number == 0:
        return None if len(record.data) <= record.size_bytes else "reset_damaged"
    if staging is None or len(staging.parts) != record.number:
        return "reset_order"
    is_same = staging[:6] == (
        record.op_id,
        record.client_id,
        record.incarnation,
        record.part_count,
        record.size_bytes,
        record.digest,
    )
    if not is_same:
        return "reset_order"
    size = sum(map(len, staging.parts)) + len(record.data)
    return None if size <= record.size_bytes else "reset_damaged"


def _with_part(state: WorldState, record: Reset) -> Staging:
    before = state.staging
    parts, chain = ((), b"") if before is None else (before.parts, before.chain)
    return Staging(
        op_id=record.op_id,
        client_id=record.client_id,
        incarnation=record.incarnation,
        part_count=record.part_count,
        size_bytes=record.size_bytes,
        digest=record.digest,
        until_ms=min(state.now_ms + OPEN_MS_MAX, OFFSET_MAX),
        parts=(*parts, record.data),
        chain=chained(chain, record.data),
    )


def _stage(state: WorldState, staging: Staging | None) -> None:
    state.staging = staging
    state.dirty[STAGING] = None
    state.note_next_end()


def _carried(
    state: WorldState, staging: Staging, *, config: Config
) -> WorldState | str:
    """Return the state that the parts hold, or why it cannot replace this one."""
    value = b"".join(staging.parts)
    if len(value) != staging.size_bytes:
        return "reset_damaged"
    try:
        known = outline(value)
    except MalformedRecord:
        return "reset_damaged"
    is_of_this_log = (
        known.header.partition == state.partition
        and known.header.config == config
        and known.header.next_offset <= state.next_offset
    )
    if not is_of_this_log:
        return "reset_foreign"
    # These checks are cheap, and reject most invalid states.
    is_too_large = known.key_count > config.limit("keys")
    if is_too_large or known.group_count > config.limit("groups"):
        return "limits"
    try:
        if bytes.fromhex(known.digest()) != staging.digest:
            return "reset_damaged"
        carried = from_bytes(value)
    except MalformedRecord:
        return "reset_damaged"
    remembered = max(len(carried.over), len(carried.fences))
    has_room = remembered <= config.limit("operations") and sum(
        map(len, carried.locked.values())
    ) <= config.limit("locks")
    return carried if has_room else "limits"


def _install(
    state: WorldState, carried: WorldState, *, leader_epoch: int | None
) -> None:
    """Replace this state with the carried one, without owners, and start quiet time.

    The result depends only on the carried state and the place in the log, not on the
    state before, so that replicas that disagreed agree again.
    """
    config = carried.config
    assert config is not None
    longest_ms = config.heartbeat_interval_ms
    for known in carried.keys.values():
        longest_ms = max(longest_ms, known.heartbeat_interval_ms)
        known.owner = known.handoff = known.offer = known.resume_hash = None
        # Silence counts from here; otherwise keys could be forgotten at once.
        known.active_ms = carried.now_ms
    # PROTOCOL 7.6: an owner may use its key for two heartbeat intervals after its last
    # heartbeat, even if it does not read the Reset. Until then no claim is accepted.
    carried.quiet_until_ms = min(carried.now_ms + 2 * longest_ms + 1, OFFSET_MAX)
    carried.staging = None
    # The time until the next entry does not count, as in a new leader epoch.
    carried.leader_epoch = leader_epoch
    carried.epoch_time_ms = None
    carried.rebuild_derived()
    state.become(carried)
    forget_soft(state)


def end_operations(state: WorldState) -> None:
    """Drop parts of a Reset that timed out, and end the quiet time."""
    staging, quiet_ms = state.staging, state.quiet_until_ms
    if staging is not None and state.now_ms >= staging.until_ms:
        state.staging = None
    if quiet_ms is not None and state.now_ms >= quiet_ms:
        state.quiet_until_ms = None
    state.dirty.update(dict.fromkeys(OPERATIONS))
    state.note_next_end()


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {
    Reset: _reset,
    CheckpointBegin: _checkpoint,
    CheckpointChunk: _checkpoint,
    CheckpointEnd: _checkpoint,
}
"""How each record of section 7 is folded."""
