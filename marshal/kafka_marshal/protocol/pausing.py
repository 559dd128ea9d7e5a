"""The pauses of one coordinating partition as they go on, as rows of its history.

Part of the historian (``history``), which alone calls these. Each changes the rows that
last, by group, and yields those that ended.
"""

from collections.abc import Iterator

from kafka_marshal.protocol.history_rows import (
    RAN_OUT,
    RESET,
    UNPAUSED,
    Moment,
    PauseRow,
)
from kafka_marshal.protocol.records import ReleaseGroup
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import LogEntry

Pauses = dict[str, PauseRow]


def told(
    pauses: Pauses, world: WorldState, *, record: ReleaseGroup, at: Moment
) -> Iterator[PauseRow]:
    """Note what an accepted record did: begin a pause, put its end off, or end it.

    Args:
        pauses: Those that last.
        world: The state after the record.
        record: The record.
        at: Where.
    """
    group_id = record.group_id
    row, pause = pauses.get(group_id), world.active_pause(group_id)
    if row is None:
        assert pause is not None
        who = (group_id, record.op_id, record.client_id)
        pauses[group_id] = PauseRow(*who, record.reason, at, pause.until_ms)
    elif pause is None:
        del pauses[group_id]
        row.ending, row.end = UNPAUSED, at
        yield row
    else:
        row.until_ms = pause.until_ms
        row.renewals_count += 1


def ran_out(
    pauses: Pauses, world: WorldState, *, entry: LogEntry
) -> Iterator[PauseRow]:
    """End the pauses that ran out before an entry was judged (PROTOCOL 4.8)."""
    for group_id, row in sorted(pauses.items()):
        if row.until_ms <= world.append_time_ms:
            del pauses[group_id]
            row.ending = RAN_OUT
            row.end = Moment(entry.offset, world.now_ms, entry.timestamp_ms)
            yield row


def replaced(pauses: Pauses, world: WorldState, *, at: Moment) -> Iterator[PauseRow]:
    """Take the pauses of the state that a Reset brought (PROTOCOL 7.6).

    One that it does not have is over. One that nobody knew, or was over, begins
    where the Reset came into force, and nobody knows why.
    """
    before = dict(pauses)
    pauses.clear()
    for group_id in sorted(world.groups):
        pause = world.active_pause(group_id)
        if pause is None:
            continue
        known = before.get(group_id)
        if known is not None and known.op_id == pause.op_id:
            del before[group_id]
            known.until_ms = pause.until_ms
            pauses[group_id] = known
        else:
            who = (group_id, pause.op_id, pause.client_id)
            pauses[group_id] = PauseRow(*who, None, at, pause.until_ms)
    for _, row in sorted(before.items()):
        row.ending, row.end = RESET, at
        yield row
