"""The deterministic rationalizer: folds log entries into world state (PROTOCOL 4).

The laws of this module:

1. Only ``apply`` changes state, and ``fold_beats``, which gives the same state without
   transitions. The state machines of claims and deliveries decide what to write; they
   never change state.
2. The only time is log time. No reader's clock decides anything that two
   readers must agree on.
3. ``apply`` is total: a bad or foreign record is a Transition, not an
   exception, so that all replicas skip it alike.
4. Integers and tuples: no floats, no iteration over sets, no ``hash()`` of
   strings.
5. The core does not log. It returns Transitions; observers turn them into log
   lines and counters.
"""

from collections.abc import Sequence

from kafka_marshal.errors import LogTruncated, LogUnreadable
from kafka_marshal.protocol import (
    fold_advice,
    fold_fences,
    fold_groups,
    fold_keys,
    fold_layouts,
    fold_positions,
    fold_resets,
    growths,
)
from kafka_marshal.protocol.codec import Undecodable, decode
from kafka_marshal.protocol.fold_beats import fold_beats
from kafka_marshal.protocol.items import UndecodableEntry
from kafka_marshal.protocol.log_clock import move_clock
from kafka_marshal.protocol.records import KINDS, LayoutFence
from kafka_marshal.protocol.state import (
    RING_VALUE_BYTES,
    Step,
    Transitions,
    WorldState,
)
from kafka_marshal.protocol.types import LogEntry

LEVEL_MIN = 1  # in force even before a Config: most records need no more


def apply(state: WorldState, entry: LogEntry) -> Transitions:
    """Fold one coordination record into the world state, in place.

    Accepts every record: a replica that stopped at a bad one would disagree
    with those that continued (PROTOCOL 1.5). The state belongs to the caller;
    to keep an earlier one, take a snapshot first.

    Args:
        state: The state as of an offset below ``entry.offset``.
        entry: The next entry of the same partition; offsets may have gaps.

    Returns:
        One transition per heartbeat of a batch, and per key of records that stage,
        unlock or import keys; else one. Empty if the state was halted before
        (PROTOCOL 3.3).

    Raises:
        LogTruncated: Offset or leader epoch went back; the state is unchanged.
        LogUnreadable: The entry has no leader epoch; the state is unchanged.
    """
    if state.halted is not None:
        return ()
    epoch = entry.leader_epoch
    if epoch is None or epoch != state.leader_epoch or entry.offset < state.next_offset:
        _check_order(state, entry)
    move_clock(state, entry)
    if state.lapses_ms is not None and state.append_time_ms >= state.lapses_ms:
        fold_groups.move_pauses(state, entry.offset)
    if state.ends_ms is not None and state.now_ms >= state.ends_ms:
        fold_resets.end_operations(state)
    transitions = _fold(state, entry)
    if state.halted is None:
        state.next_offset = entry.offset + 1
        if state.forgettable and state.config is not None:
            fold_keys.forget(state, transitions)
        if state.plans_ms is not None:
            fold_groups.drop_old_plans(state)
    return transitions


def replay(state: WorldState, entries: Sequence[LogEntry]) -> None:
    """Fold many entries in order, ordinary heartbeats in runs, without transitions.

    Raises: as ``apply``.
    """
    at = 0
    while at < len(entries):
        at = fold_beats(state, entries, start=at)
        if at < len(entries):
            apply(state, entries[at])
            at += 1


def _check_order(state: WorldState, entry: LogEntry) -> None:
    # PROTOCOL 4.1: a fault of the environment, not part of the state.
    epoch = entry.leader_epoch
    if epoch is None or epoch < 0:
        raise LogUnreadable(
            f"coordinating partition {state.partition} offset {entry.offset} has no "
            "leader epoch; the broker must use message format v2 or newer"
        )
    if entry.offset < state.next_offset:
        raise LogTruncated(
            f"coordinating partition {state.partition}: offset went back from "
            f"{state.next_offset} to {entry.offset}; refold from the log's start"
        )
    if state.leader_epoch is not None and epoch < state.leader_epoch:
        raise LogTruncated(
            f"coordinating partition {state.partition} offset {entry.offset}: leader "
            f"epoch went back from {state.leader_epoch} to {epoch}; refold from the "
            "log's start"
        )


def _fold(state: WorldState, entry: LogEntry) -> Transitions:
    reason = entry.undecodable
    record = decode(entry.value) if reason is None else Undecodable(reason)
    if isinstance(record, Undecodable):
        head = (entry.value or b"")[:RING_VALUE_BYTES]
        noted = UndecodableEntry(entry.offset, record.reason, head)
        state.soft.undecodable.append(noted)
        return (Step(state, entry, None).undecodable(),)
    fold, level = _HANDLERS[type(record)]
    step = Step(state, entry, record)
    if level > LEVEL_MIN and level > state.feature_level:
        return (step.ignored("level"),)
    return fold(step, record)


_FOLDS = {
    **fold_keys.FOLDS,
    **fold_groups.FOLDS,
    **fold_fences.FOLDS,
    **fold_advice.FOLDS,
    **fold_positions.FOLDS,
    **fold_resets.FOLDS,
    **fold_layouts.FOLDS,
    **growths.FOLDS,
}
_HANDLERS = {kind.record: (_FOLDS[kind.record], kind.level) for kind in KINDS}
# PROTOCOL 10.2: a fence is the first Config of a new partition, and checks the level.
_HANDLERS[LayoutFence] = (_FOLDS[LayoutFence], LEVEL_MIN)
