"""Fast path of the replay: folds runs of ordinary Heartbeats (PROTOCOL 4.1, 4.5).

Most entries of a long log are heartbeats, and a replay needs no transition for them.
Part of the rationalizer: the resulting state equals that of ``apply``, entry by
entry, and all other entries are left to it.

An ordinary heartbeat renews by the same interval, is in the same leader epoch, is not
of a fenced client, and not about a ``/checkpoint`` key: such heartbeats do not count as
news for a checkpoint.

The loop exists twice: here, and in ``native/beats.c``, which is used if it is compiled,
and needs no objects for packed entries. The loop here is the rule; the native one may
fold less, never more.
"""

from collections.abc import Sequence

import msgspec

from kafka_marshal.native import compiled
from kafka_marshal.protocol.codec import header_of, parser_of
from kafka_marshal.protocol.hashing import CHECKPOINT_TOPIC
from kafka_marshal.protocol.judging import is_paused
from kafka_marshal.protocol.packed_entries import PackedEntries
from kafka_marshal.protocol.records import Heartbeat
from kafka_marshal.protocol.state import WorldState, count
from kafka_marshal.protocol.types import OFFSET_MAX, LogEntry, TimestampType

_HEADER = header_of(Heartbeat)
_HEADER_BYTES = len(_HEADER)
_parse = parser_of(Heartbeat)
_NEVER = -(2**63) - 1
NO_EPOCH = -1
_LOG_APPEND_TIME = int(TimestampType.LOG_APPEND_TIME)

Clock = tuple[int, int, int]
"""Next offset, log time and largest append time of the leader epoch."""

Beat = tuple[int, int, int, int, int | None]
"""A folded heartbeat: its offset, append time and epoch; then the log time and the
position of its key after it."""


def fold_beats(
    state: WorldState,
    entries: Sequence[LogEntry],
    *,
    start: int,
    except_epoch: int = NO_EPOCH,
    beats: list[Beat] | None = None,
) -> int:
    """Fold the ordinary heartbeats at the start of the entries, in place.

    Args:
        state: The state as of an offset below that of the next entry.
        entries: Entries of its partition.
        start: Index of the next one.
        except_epoch: Epoch whose heartbeats are not folded, for a caller that observes
            its key.
        beats: The folded heartbeats are added to it, for a caller that observes all.

    Returns: Index of the first entry that was not folded; ``apply`` folds it.
    """
    config, now_ms = state.config, state.log_time_ms
    latest_ms, before_ms = _latest_ms(state), state.epoch_time_ms
    if config is None or now_ms is None or before_ms is None or now_ms > latest_ms:
        return start
    # The compiled loop knows no pauses.
    native = None if compiled is None or state.lapses_ms is not None else compiled
    if native is None:
        fold = fold_in_python
    elif isinstance(entries, PackedEntries):
        fold = native.fold_packed
    else:
        fold = native.fold_beats
    stop, clock = fold(
        state,
        entries,
        clock=(state.next_offset, now_ms, before_ms),
        start=start,
        except_epoch=except_epoch,
        beats=beats,
        interval_ms=config.heartbeat_interval_ms,
        latest_ms=latest_ms,
    )
    if stop == start:
        return start
    state.next_offset, now_ms, before_ms = clock
    _move_clock(state, now_ms, epoch_time_ms=before_ms)
    count(state, "renewed", times=stop - start)
    return stop


def fold_in_python(
    state: WorldState,
    entries: Sequence[LogEntry],
    *,
    clock: Clock,
    start: int,
    except_epoch: int,
    beats: list[Beat] | None,
    interval_ms: int,
    latest_ms: int,
) -> tuple[int, Clock]:
    """Fold heartbeats into the states of keys; the caller sets the state's clock.

    ``interval_ms`` is the heartbeat interval, ``latest_ms`` the log time before which
    only records can change the state; the other arguments are as for ``fold_beats``.

    Returns: Index of the first entry that was not folded, and the clock before it.
    """
    # The busiest loop of a cold start: look up what does not change before it.
    next_offset, now_ms, before_ms = clock
    leader_epoch, lapses_ms = state.leader_epoch, state.lapses_ms
    keys, find, dirty, fences = state.keys, state.epochs.get, state.dirty, state.fences
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
        # Names of a key and its owner were validated when it was claimed.
        if (
            key is None
            or key != (record.group_id, record.topic, record.partition)
            or key.topic == CHECKPOINT_TOPIC
            or record.rewind
            or record.epoch == except_epoch
            or (fences and (key[0], record.client_id, record.incarnation) in fences)
            or (lapses_ms is not None and (at_ms >= lapses_ms or is_paused(state, key)))
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
        if beats is not None:
            beats.append((offset, at_ms, record.epoch, now_ms, known.position))
    else:
        stop = len(entries)
    return stop, (next_offset, now_ms, before_ms)


def _move_clock(state: WorldState, now_ms: int, *, epoch_time_ms: int) -> None:
    if epoch_time_ms != state.epoch_time_ms:
        state.log_time_ms, state.epoch_time_ms = now_ms, epoch_time_ms
        state.append_time_ms = max(state.append_time_ms, epoch_time_ms)


def _latest_ms(state: WorldState) -> int:
    """Return the log time before which only records can change the state."""
    if state.halted is not None or state.ends_ms is not None:
        return _NEVER
    if state.layout is not None:
        return _NEVER  # heartbeats of moving keys do not renew
    if state.lapses_ms is not None and state.lapses_ms <= state.append_time_ms:
        return _NEVER  # a pause begins or ends with the next entry
    if not state.forgettable or state.config is None:
        return OFFSET_MAX
    # PROTOCOL 4.9: until the first key may be dropped for its silence.
    return min(OFFSET_MAX, state.forgettable[0][0] + state.config.limit("forget_ms"))
