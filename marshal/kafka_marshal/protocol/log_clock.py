"""The clocks of a coordinating partition (PROTOCOL 4.1)."""

from kafka_marshal.protocol.state import WorldState, count
from kafka_marshal.protocol.types import OFFSET_MAX, LogEntry, TimestampType

_LOG_APPEND_TIME = int(TimestampType.LOG_APPEND_TIME)


def move_clock(state: WorldState, entry: LogEntry) -> None:
    """Advance the clocks by an entry. Log time grows only within a leader epoch."""
    if state.log_time_ms is None:
        state.log_time_ms = min(entry.timestamp_ms, OFFSET_MAX)
    if entry.leader_epoch != state.leader_epoch:
        state.leader_epoch = entry.leader_epoch
        state.epoch_time_ms = None
    if entry.timestamp_type != _LOG_APPEND_TIME:
        count(state, "timestamp_type")
        return
    now_ms = entry.timestamp_ms
    before_ms = state.epoch_time_ms
    if before_ms is None:
        state.epoch_time_ms = now_ms
    elif now_ms > before_ms:
        moved_ms = state.log_time_ms + now_ms - before_ms
        state.log_time_ms = min(moved_ms, OFFSET_MAX)
        state.epoch_time_ms = now_ms
    else:
        return  # The latest append time is never below that of this epoch.
    state.append_time_ms = max(state.append_time_ms, now_ms)


def begun_by(partition: int, entry: LogEntry) -> WorldState:
    """Return the state of a partition whose log begins with an entry not yet folded."""
    state = WorldState(partition)
    move_clock(state, entry)
    return state
