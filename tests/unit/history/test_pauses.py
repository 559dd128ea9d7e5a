"""The pauses of one coordinating partition, as they follow from its states."""

import msgspec
import pytest
from logkit import OP, H, Log, ident, layout_fence, pause, resets, schedule

from kafka_marshal.history.pauses import Pauses
from kafka_marshal.history.rows import Moment, Planned
from kafka_marshal.protocol.codec import person_to_tags

AT = Moment(7, 1_500, 1_500)
NAME = ("g", OP)


@pytest.fixture
def log():
    return Log(level=2)


@pytest.fixture
def append(log):
    """Append a record and return the pauses that it ended."""
    pauses = Pauses()

    def run(record, *, after=0):
        (transition, *_) = log.append(record, after=after)
        entry = log.entries[-1]
        at = Moment(entry.offset, log.state.now_ms, entry.timestamp_ms)
        return pauses.take(log.state, at=at, record=transition.record)

    run.pauses = pauses  # type: ignore[attr-defined]
    return run


def in_ms(log, delay_ms):
    return log.state.append_time_ms + delay_ms


def test_a_pause_begins_is_renewed_and_ends(log, append):
    assert append(pause(in_ms(log, H))) == []
    (row,) = append.pauses.lasting.values()
    assert (row.group_id, row.client_id, row.start.offset) == ("g", "admin", 1)
    until_ms = in_ms(log, 3 * H)
    assert append(pause(until_ms, seq=1)) == []
    assert (row.until_ms, row.renewals_count, row.ending) == (until_ms, 1, "open")
    assert append(pause(0, seq=2)) == [row]
    assert (row.ending, row.end.offset) == ("unpaused", 3)
    assert not append.pauses


def test_expired_pauses_end_in_order_of_their_groups(log, append):
    for group, delay_ms in (("h", H), ("g", H), ("i", 5 * H)):
        assert append(pause(in_ms(log, delay_ms), group=group)) == []
    ended = append(b"anything", after=2 * H)
    assert [(row.group_id, row.ending) for row in ended] == [
        ("g", "ran_out"),
        ("h", "ran_out"),
    ]
    assert {row.end.offset for row in ended} == {log.entries[-1].offset}
    assert [group for group, _ in append.pauses.lasting] == ["i"]


def test_a_scheduled_pause_begins_with_the_first_entry_after_its_time(log, append):
    begin_ms, until_ms = in_ms(log, H), in_ms(log, 9 * H)
    plan = schedule(begin_ms, until_ms)
    append(msgspec.structs.replace(plan, reason="rest", tags=person_to_tags("ada")))
    append(schedule(begin_ms, until_ms, seq=1))
    planned = Planned(begin_ms=begin_ms, until_ms=until_ms, reason="rest", person="ada")
    assert append.pauses.scheduled == {NAME: planned}
    assert append(pause(until_ms + 2 * H, seq=2), after=2 * H) == []
    (row,) = append.pauses.lasting.values()
    assert (row.begin_ms, row.reason, row.person) == (begin_ms, "rest", "ada")
    assert (row.start.offset, row.renewals_count) == (3, 1)
    assert append.pauses.scheduled == {}


def test_a_cancelled_scheduled_pause_has_no_row(log, append):
    append(schedule(in_ms(log, H), in_ms(log, 9 * H)))
    assert append.pauses
    assert append(pause(0)) == []
    assert not append.pauses


def test_pauses_are_restored_from_a_state(log):
    log.append(pause(in_ms(log, H)))
    log.append(schedule(in_ms(log, H), in_ms(log, 2 * H), group="h"))
    pauses = Pauses()
    pauses.restore(log.state, at=AT)
    row = pauses.lasting[NAME]
    assert (row.client_id, row.reason, row.start) == ("admin", None, AT)
    (planned,) = pauses.scheduled.values()
    assert (planned.begin_ms, planned.reason) == (in_ms(log, H), None)


@pytest.mark.parametrize("record", [layout_fence(2), *resets(b"state", "00" * 32)])
def test_pauses_follow_the_state_after_a_reset_or_layout_change(record, log, append):
    """One pause is kept, one ends, one is replaced, and one is in force again."""
    until_ms = in_ms(log, 9 * H)
    for group in ("kept", "other", "over", "gone"):
        append(pause(until_ms, group=group))
    lasting = append.pauses.lasting
    rows = {group: row for (group, _), row in lasting.items()}
    log.state.groups["gone"].pause = None
    rows["kept"].until_ms = until_ms + H
    rows["other"].op_id = ident("another")
    lasting["other", ident("another")] = lasting.pop(("other", OP))
    del lasting["over", OP]
    ended = append.pauses.take(log.state, at=AT, record=record)
    assert [(row.group_id, row.ending, row.end) for row in ended] == [
        ("gone", "reset", AT),
        ("other", "reset", AT),
    ]
    assert set(lasting) == {(name, OP) for name in ("kept", "other", "over")}
    assert lasting["kept", OP] is rows["kept"]
    assert rows["kept"].until_ms == until_ms
    for group in ("other", "over"):
        row = lasting[group, OP]
        assert row is not rows[group]
        assert (row.client_id, row.reason, row.start) == ("admin", None, AT)
        assert row.until_ms == until_ms
