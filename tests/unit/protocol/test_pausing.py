"""Pauses as rows: they begin, are put off, end, run out, and are replaced."""

import pytest
from logkit import H, Log, ident, pause

from kafka_marshal.protocol.history_rows import Moment
from kafka_marshal.protocol.pausing import ran_out, replaced, told

AT = Moment(7, 1_500, 1_500)


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def say(log):
    """Append a pause of a group and return the rows that it ended."""
    pauses = {}

    def run(until, **record):
        made = pause(until, **record)
        log.append(made)
        return list(told(pauses, log.state, record=made, at=AT))

    run.pauses = pauses
    return run


def in_ms(log, delay_ms):
    return log.state.append_time_ms + delay_ms


def test_one_begins_is_put_off_and_ends(log, say):
    assert say(in_ms(log, H)) == []
    (row,) = say.pauses.values()
    assert (row.group_id, row.client_id, row.start) == ("g", "admin", AT)
    until_ms = in_ms(log, 3 * H)
    assert say(until_ms, seq=1) == []
    assert (row.until_ms, row.renewals_count, row.ending) == (until_ms, 1, "open")
    assert say(0, seq=2) == [row]
    assert (row.ending, row.end) == ("unpaused", AT)
    assert say.pauses == {}


def test_those_that_ran_out_end_by_group(log, say):
    for group, delay_ms in (("h", H), ("g", H), ("i", 5 * H)):
        say(in_ms(log, delay_ms), group=group)
    assert list(ran_out(say.pauses, log.state, entry=log.entries[-1])) == []
    log.append(b"anything", after=2 * H)
    entry = log.entries[-1]
    ended = list(ran_out(say.pauses, log.state, entry=entry))
    assert [(row.group_id, row.ending) for row in ended] == [
        ("g", "ran_out"),
        ("h", "ran_out"),
    ]
    assert {row.end.offset for row in ended} == {entry.offset}
    assert list(say.pauses) == ["i"]


def test_another_state_brings_its_own(log, say):
    """Kept, ended, another one than before, and one that was over."""
    until_ms = in_ms(log, 9 * H)
    for group in ("kept", "other", "over", "gone"):
        say(until_ms, group=group)
    rows = dict(say.pauses)
    log.state.groups["gone"].pause = None
    rows["kept"].until_ms = until_ms + H
    rows["other"].op_id = ident("another")
    del say.pauses["over"]
    ended = list(replaced(say.pauses, log.state, at=AT))
    assert [(row.group_id, row.ending, row.end) for row in ended] == [
        ("gone", "reset", AT),
        ("other", "reset", AT),
    ]
    assert set(say.pauses) == {"kept", "other", "over"}
    assert say.pauses["kept"] is rows["kept"]
    assert rows["kept"].until_ms == until_ms
    for group in ("other", "over"):
        row = say.pauses[group]
        assert row is not rows[group]
        assert (row.client_id, row.reason, row.start) == ("admin", None, AT)
        assert row.until_ms == until_ms
