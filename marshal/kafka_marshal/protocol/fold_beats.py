"""Folds runs of ordinary Heartbeats at once (PROTOCOL 4.1 and 4.5).

Nearly all of a long log are beats of owners, and whoever reads up to its end asks for
the verdict on none of them. Part of the rationalizer: the state that comes out is the
one that ``apply`` gives, entry by entry, and whatever is out of the ordinary is left
to it.
"""

from collections.abc import Sequence

import msgspec

from kafka_marshal.protocol.codec import header_of, parser_of
from kafka_marshal.protocol.hashing import CHECKPOINT_TOPIC
from kafka_marshal.protocol.records import Heartbeat
from kafka_marshal.protocol.state import WorldState, count
from kafka_marshal.protocol.types import OFFSET_MAX, LogEntry, TimestampType

_HEADER = header_of(Heartbeat)
_HEADER_BYTES = len(_HEADER)
_parse = parser_of(Heartbeat)
_NEVER = -(2**63) - 1
_LOG_APPEND_TIME = int(TimestampType.LOG_APPEND_TIME)


def fold_beats(state: WorldState, entries: Sequence[LogEntry], *, start: int) -> int:
    """Fold the ordinary beats that come next, in place.

    Ordinary is a beat that renews by the same H, in the same leader epoch, and not of
    a ``/checkpoint`` key: who counts what is no checkpoint's need not look at each.

    Args:
        state: The state as of an offset below that of the next entry.
        entries: Entries of its partition.
        start: Index of the next one.

    Returns:
        Index of the first entry that was not folded; ``apply`` takes it.
    """
    config, now_ms = state.config, state.log_time_ms
    latest_ms, before_ms = _latest_ms(state), state.epoch_time_ms
    if config is None or now_ms is None or before_ms is None or now_ms > latest_ms:
        return start
    # The busiest loop of a cold start: what stays the same is looked up before it.
    interval_ms, leader_epoch = config.heartbeat_interval_ms, state.leader_epoch
    keys, find, dirty = state.keys, state.epochs.get, state.dirty
    next_offset, stop = state.next_offset, start
    for stop in range(start, len(entries)):
        entry = entries[stop]
        offset, value, at_ms = entry.offset, entry.value, entry.timestamp_ms
        if (
            value is None
            or value[:_HEADER_BYTES] != _HEADER
            or offset < next_offset
            or entry.leader_epoch != leader_epoch
            or entry.timestamp_type != _LOG_APPEND_TIME
            or entry.undecodable is not None
        ):
            break
        try:
            record = _parse(value[_HEADER_BYTES:])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            break
        key = find(record.epoch)
        # Names that are those of a key and its owner have been found valid before.
        if (
            key is None
            or key != (record.group_id, record.topic, record.partition)
            or key.topic == CHECKPOINT_TOPIC
            or record.rewind
        ):
            break
        known = keys[key]
        sender = (record.client_id, record.incarnation)
        if known.owner != sender or known.heartbeat_interval_ms != interval_ms:
            break
        if at_ms > before_ms:
            then_ms = now_ms + at_ms - before_ms
            if then_ms > latest_ms:
                break
            now_ms, before_ms = then_ms, at_ms
        next_offset = offset + 1
        position, old = record.position, known.position
        if position is not None and (old is None or position > old):
            known.position = position
        known.active_ms = known.renewed_ms = now_ms
        dirty[key] = None
    else:
        stop = len(entries)
    state.next_offset = next_offset
    if before_ms != state.epoch_time_ms:
        state.log_time_ms, state.epoch_time_ms = now_ms, before_ms
        state.append_time_ms = max(state.append_time_ms, before_ms)
    count(state, "renewed", times=stop - start)
    return stop


def _latest_ms(state: WorldState) -> int:
    """Return the log time up to which nothing but beats can happen."""
    ends_ms = (state.lapses_ms, state.ends_ms)
    if state.halted is not None or any(end is not None for end in ends_ms):
        return _NEVER
    if not state.forgettable or state.config is None:
        return OFFSET_MAX
    # PROTOCOL 4.9: the first key that silence may drop.
    return min(OFFSET_MAX, state.forgettable[0][0] + state.config.limit("forget_ms"))
