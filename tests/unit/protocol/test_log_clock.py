"""Clocks of a coordinating partition; ``test_rationalizer`` tests them in a log."""

import pytest
from logkit import CREATE_TIME, LOG_APPEND_TIME

from kafka_marshal.protocol.log_clock import begun_by, move_clock
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import OFFSET_MAX, LogEntry


def entry(ms, epoch=0, kind=LOG_APPEND_TIME):
    return LogEntry(
        offset=9, leader_epoch=epoch, timestamp_ms=ms, timestamp_type=kind, value=b""
    )


def clocks(state):
    return state.log_time_ms, state.epoch_time_ms, state.append_time_ms


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry(5)], (5, 5, 5)),
        ([entry(5, kind=CREATE_TIME)], (5, None, 0)),
        ([entry(5), entry(8)], (8, 8, 8)),
        ([entry(5), entry(3)], (5, 5, 5)),
        ([entry(5), entry(8, epoch=1)], (5, 8, 8)),
        ([entry(5), entry(3, epoch=1), entry(4, epoch=1)], (6, 4, 5)),
        ([entry(OFFSET_MAX + 5)], (OFFSET_MAX, OFFSET_MAX + 5, OFFSET_MAX + 5)),
    ],
)
def test_entries_move_log_time_epoch_time_and_append_time(entries, expected):
    state = WorldState(3)
    for each in entries:
        move_clock(state, each)
    assert clocks(state) == expected


def test_a_state_begun_by_an_entry_has_its_time_and_leader_epoch():
    begun = begun_by(3, entry(7, epoch=2))
    expected = WorldState(
        3, leader_epoch=2, log_time_ms=7, epoch_time_ms=7, append_time_ms=7
    )
    assert begun == expected
