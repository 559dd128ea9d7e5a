import pytest
from logkit import (
    CREATE_TIME,
    KEY,
    LOG_APPEND_TIME,
    START_MS,
    H,
    Log,
    all_records,
    batch,
    beat,
    claim,
    config,
    pause,
    planned,
    release,
    resets,
)

from kafka_marshal.errors import LogTruncated, LogUnreadable
from kafka_marshal.protocol import rationalizer
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.items import UndecodableEntry
from kafka_marshal.protocol.rationalizer import apply, replay
from kafka_marshal.protocol.snapshot import to_bytes
from kafka_marshal.protocol.state import RING_VALUE_BYTES, WorldState
from kafka_marshal.protocol.types import OFFSET_MAX, LogEntry, TimestampType


def entry(offset=0, epoch=0, at=START_MS, kind=LOG_APPEND_TIME, value=b""):
    return LogEntry(
        offset=offset,
        leader_epoch=epoch,
        timestamp_ms=at,
        timestamp_type=kind,
        value=value,
    )


def clock(state):
    return state.epoch_time_ms, state.log_time_ms, state.append_time_ms


# --- Order: PROTOCOL 4.1 ---


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        pytest.param(entry(5, None), LogUnreadable, id="no leader epoch"),
        pytest.param(entry(5, -1), LogUnreadable, id="leader epoch -1"),
        pytest.param(entry(4, 3), LogTruncated, id="the same offset"),
        pytest.param(entry(0, 3), LogTruncated, id="an earlier offset"),
        pytest.param(entry(-1, 3), LogTruncated, id="a negative offset"),
        pytest.param(entry(5, 2), LogTruncated, id="an earlier leader epoch"),
    ],
)
def test_an_entry_out_of_order_is_an_error_and_changes_nothing(bad, error):
    state = WorldState(0)
    apply(state, entry(4, 3, value=encode(config())))
    before = to_bytes(state), dict(state.soft.counters)
    with pytest.raises(error, match="coordinating partition 0"):
        apply(state, bad)
    assert (to_bytes(state), state.soft.counters) == before


def test_the_first_entry_may_have_any_offset_and_leader_epoch():
    state = WorldState(0)
    apply(state, entry(70, 9))
    assert (state.next_offset, state.leader_epoch) == (71, 9)


def test_offsets_may_have_gaps():
    state = WorldState(0)
    apply(state, entry(0))
    apply(state, entry(9))
    assert state.next_offset == 10


def test_a_negative_first_offset_is_refused():
    with pytest.raises(LogTruncated):
        apply(WorldState(0), entry(-1))


# --- Clock: PROTOCOL 4.1 ---


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([(0, 100, 1)], (100, 100, 100), id="first entry"),
        pytest.param([(0, 100, 0)], (None, 100, 0), id="first entry, CreateTime"),
        pytest.param([(0, 100, -1)], (None, 100, 0), id="first entry, no type"),
        pytest.param([(0, -1, 0)], (None, -1, 0), id="first entry, no time"),
        pytest.param([(0, 100, 1), (0, 130, 1)], (130, 130, 130), id="forward"),
        pytest.param([(0, 100, 1), (0, 100, 1)], (100, 100, 100), id="still"),
        pytest.param([(0, 100, 1), (0, 70, 1)], (100, 100, 100), id="back"),
        pytest.param(
            [(0, 100, 1), (0, 70, 1), (0, 110, 1)], (110, 110, 110), id="back and forth"
        ),
        pytest.param([(0, 100, 1), (0, 900, 0)], (100, 100, 100), id="CreateTime"),
        pytest.param([(0, 100, 1), (0, 900, 7)], (100, 100, 100), id="unknown type"),
        pytest.param(
            [(0, 100, 0), (0, 500, 1)], (500, 100, 500), id="no jump after CreateTime"
        ),
        pytest.param(
            [(0, 100, 1), (1, 900, 1)], (900, 100, 900), id="a new leader ahead"
        ),
        pytest.param(
            [(0, 100, 1), (1, 20, 1)], (20, 100, 100), id="a new leader behind"
        ),
        pytest.param(
            [(0, 100, 1), (1, 20, 1), (1, 50, 1)],
            (50, 130, 100),
            id="time goes on under a leader behind",
        ),
        pytest.param(
            [(0, 100, 1), (1, 0, 0), (1, 20, 1), (1, 21, 1)],
            (21, 101, 100),
            id="a new leader epoch that starts with CreateTime",
        ),
        pytest.param(
            [(0, 100, 1), (1, 0, 0), (1, 0, 0)], (None, 100, 100), id="only CreateTime"
        ),
        pytest.param(
            [(0, 0, 1), (0, OFFSET_MAX, 1), (1, -(2**63), 1), (1, OFFSET_MAX, 1)],
            (OFFSET_MAX, OFFSET_MAX, OFFSET_MAX),
            id="log time has an end",
        ),
    ],
)
@pytest.mark.parametrize("value", [b"", encode(config())])
def test_the_clock_follows_the_append_times_of_each_leader_epoch(
    entries, expected, value
):
    state = WorldState(0)
    for offset, (epoch, at, kind) in enumerate(entries):
        apply(state, entry(offset, epoch, at, kind, value))
    assert clock(state) == expected


def test_the_clock_moves_before_a_record_is_judged():
    log = Log()
    log.claimed()
    assert log.outcome_of(claim("c2"), after=2 * H) == "held"
    assert log.outcome_of(claim("c2"), after=1) == "claimed"


def test_entries_without_an_append_time_are_counted():
    log = Log()
    log.append(b"", kind=CREATE_TIME)
    log.append(b"", kind=TimestampType.NONE)
    assert log.state.soft.counters["timestamp_type"] == 2


def test_create_time_never_makes_an_owner_stale():
    log = Log()
    log.claimed()
    assert log.outcome_of(claim("c2"), at=OFFSET_MAX, kind=CREATE_TIME) == "held"


# --- Totality: PROTOCOL 1.5, 3.3 ---


def test_an_undecodable_value_is_counted_and_its_first_bytes_are_kept():
    log = Log()
    value = bytes(range(200))
    transition = log.one(value, after=5)
    assert (transition.outcome, transition.reason) == ("undecodable", "undecodable")
    assert (transition.key, transition.record) == (None, None)
    (noted,) = log.state.soft.undecodable
    assert noted == UndecodableEntry(1, "unknown frame version 0", value[:64])
    assert RING_VALUE_BYTES == 64
    assert log.state.soft.counters["undecodable"] == 1
    assert (log.state.next_offset, log.state.now_ms) == (2, START_MS + 5)


def test_a_tombstone_is_undecodable():
    log = Log()
    assert log.outcome_of(None) == "undecodable"
    assert log.state.soft.undecodable[0].head == b""


def test_an_undecodable_entry_of_a_dump_is_never_decoded_again():
    state = WorldState(0)
    value = encode(config())
    (transition,) = apply(
        state,
        LogEntry(
            offset=0,
            leader_epoch=0,
            timestamp_ms=0,
            timestamp_type=1,
            value=value,
            undecodable="old reader",
        ),
    )
    assert transition.outcome == "undecodable"
    assert state.config is None
    assert state.soft.undecodable[0].reason == "old reader"


def test_a_record_above_the_level_in_force_is_ignored(monkeypatch):
    log = Log()
    fold, _ = rationalizer._HANDLERS[type(claim())]
    monkeypatch.setitem(rationalizer._HANDLERS, type(claim()), (fold, 2))
    transition = log.one(claim())
    assert (transition.outcome, transition.reason) == ("ignored", "level")
    assert transition.key is None
    assert log.state.keys == {}


@pytest.mark.parametrize("record", all_records(), ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("configured", [False, True])
def test_every_record_type_gives_a_transition(record, configured):
    log = Log(configured=configured)
    transitions = log.append(record)
    assert transitions
    for transition in transitions:
        assert transition.record == record
        assert transition.offset == log.state.next_offset - 1
        is_accepted = transition.outcome == "accepted"
        assert (transition.effect is not None) == is_accepted
        has_no_reason = is_accepted or transition.outcome == "skipped"
        assert (transition.reason is None) == has_no_reason


# --- Halting: PROTOCOL 3.3 ---


def test_entries_after_a_halt_are_not_folded():
    log = Log()
    log.claimed()
    log.append(config(2, era=2, level=3))
    before = clock(log.state), dict(log.state.soft.counters), log.key().position
    for offset in (2, 3, 0):
        assert log.append(beat(1, 5), after=1, offset=offset) == ()
    assert (
        clock(log.state),
        log.state.soft.counters,
        log.key().position,
    ) == before
    assert log.state.next_offset == 2


def test_a_halting_entry_drops_no_forgettable_key():
    log = Log(forget_ms=0)
    log.append(release(log.claimed()))
    log.append(config(2, era=2, level=3), after=H)
    assert KEY in log.state.keys


# --- Before and after an entry ---


def test_a_released_key_is_forgotten_after_forget_ms():
    log = Log(forget_ms=10)
    log.append(release(log.claimed()))
    assert KEY in log.state.keys
    log.append(b"", after=11)
    assert log.state.keys == {}


def test_a_pause_ends_before_an_entry_at_its_end_is_judged():
    log = Log()
    log.append(pause(START_MS + 10))
    assert log.outcome_of(claim(), after=9) == "paused"
    assert log.outcome_of(claim(), after=1) == "claimed"


@pytest.mark.parametrize("is_beat_last", [True, False])
def test_a_replay_gives_the_same_state(is_beat_last):
    log = Log()
    epoch = log.claimed()
    log.append(batch((epoch, 1), (epoch, 2)))
    log.append(beat(epoch, 3))
    log.append(b"")
    if is_beat_last:
        log.append(beat(epoch, 4))
    state = WorldState(0)
    replay(state, log.entries)
    assert to_bytes(state) == to_bytes(log.state)
    assert state.soft.counters == log.state.soft.counters


def test_an_incomplete_reset_ends_by_log_time():
    log = Log(level=2)
    record = resets(b"state", "00" * 16, bytes_max=1)[0]
    assert log.outcome_of(record) == "reset_staged"
    until_ms = log.state.staging.until_ms
    log.append(b"", at=until_ms - 1)
    assert log.state.staging is not None
    log.append(b"", at=until_ms)
    assert (log.state.staging, log.state.ends_ms) == (None, None)


def test_a_group_that_has_only_plans_is_forgotten_after_forget_ms():
    log = Log(level=2, forget_ms=100)
    log.append(planned())
    log.append(b"", after=101)
    assert log.state.groups == {}
