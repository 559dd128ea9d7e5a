"""One partition, folded in a task: what is told, and when it stops."""

import pytest
from logkit import H, Log, beat, claim, config, release
from pastkit import past

from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    LogTruncated,
    LogUnreadable,
)
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.spark.audit import folding, schema
from kafka_marshal.spark.audit.folding import Bounds, Source, Work, entries_of, fold
from kafka_marshal.testing.clock import VirtualClock

__all__ = ["past"]
SAMPLE_MS = 60_000


def story():
    """Two claims of one key, one after the other."""
    log = Log()
    epoch = log.claimed("c1")
    log.append(beat(epoch, 5), after=H // 2)
    log.append(release(epoch, 9), after=10)
    log.append(claim("c2"), after=10)
    log.append(beat(4, 12, client="c2"), after=H // 2)
    return log


@pytest.fixture
def log(monkeypatch):
    made = story()

    def read(source, work, *, start):
        del source
        return iter([e for e in made.entries if (start or 0) <= e.offset < work.end])

    monkeypatch.setattr(folding, "read", read)
    monkeypatch.setattr(folding, "begin", lambda *_, **__: WorldState(0))
    return made


def told(log, *, bounds=None, end=None, **work):
    end = len(log.entries) if end is None else end
    work = Work(0, end, **work)
    return list(fold(work, Source(), bounds=bounds or Bounds(), sample_ms=SAMPLE_MS))


def of(rows, table):
    return [row.values for row in rows if row.table is table]


def test_rows_come_as_they_close_then_what_is_open_then_the_state(log):
    rows = told(log)
    assert [r["ending"] for r in of(rows, schema.INTERVALS)] == ["released", "open"]
    assert [row.table.name for row in rows[-3:]] == ["ages", "partitions", "state"]
    (state,) = of(rows, schema.PARTITIONS)
    assert state["digest"] == digest(log.state)


def test_rows_are_yielded_before_the_log_is_read_to_its_end(monkeypatch, log):
    taken = []

    def read(source, work, *, start):
        del source, work, start
        for entry in log.entries:
            taken.append(entry.offset)
            yield entry

    monkeypatch.setattr(folding, "read", read)
    rows = fold(Work(0, 9), Source(), bounds=Bounds(), sample_ms=SAMPLE_MS)
    first = next(rows)
    assert first.table is schema.CLAIMS
    assert taken == [0, 1]


@pytest.mark.parametrize("split", range(7))
def test_a_run_that_goes_on_tells_what_one_run_does(log, split):
    whole = told(log)
    first = told(log, end=split)
    (state,) = of(first, schema.STATE)
    assert state["next_offset"] == split
    second = told(log, saved=state["saved"], is_new=False)
    closed = [r for r in first if not r.is_open and not r.table.is_final]
    assert closed + second == whole


@pytest.mark.parametrize(
    ("bounds", "claims", "end"),
    [
        pytest.param(Bounds(), 2, 6, id="all"),
        pytest.param(Bounds(from_offset=4), 1, 6, id="from-an-offset"),
        pytest.param(Bounds(from_offset=99), 0, 6, id="from-beyond"),
        pytest.param(Bounds(to_offset=3), 1, 4, id="to-an-offset"),
        pytest.param(Bounds(from_offset=2, to_offset=3), 0, 4, id="both"),
    ],
)
def test_a_range_leaves_rows_out_and_never_moves_the_start(log, bounds, claims, end):
    rows = told(log, bounds=bounds)
    assert len(of(rows, schema.CLAIMS)) == claims
    (state,) = of(rows, schema.PARTITIONS)
    assert (state["first_offset"], state["next_offset"]) == (0, end)
    assert len([row for row in rows if row.is_open]) == (end == 6)


def test_a_range_by_time_is_reached_once_for_all(log):
    """A leader's clock that goes back leaves no hole."""
    late = log.entries[3].timestamp_ms
    log.entries[4] = folding.LogEntry(4, 0, 0, 1, log.entries[4].value)
    rows = told(log, bounds=Bounds(from_ms=late))
    assert len(of(rows, schema.CLAIMS)) == 1
    rows = told(log, bounds=Bounds(to_ms=late - 1))
    assert of(rows, schema.PARTITIONS)[0]["next_offset"] == 3


def test_a_fold_that_halts_ends_there(log):
    log.append(config(2, era=2, level=9))
    log.append(beat(4, client="c2"))
    rows = told(log)
    assert of(rows, schema.PARTITIONS)[0]["halted_level"] == 9
    assert of(rows, schema.STATE)[0]["saved"] is None


# --- where retention has deleted the start of the log


@pytest.fixture
def retained(past, monkeypatch):
    def opened(*_, **__):
        log = past.open()
        log.start_at = lambda offsets, timeout_ms: log.read_from(offsets)
        return log

    monkeypatch.setattr(folding, "open_coordination_log", opened)
    return past


def test_the_fold_begins_at_the_first_checkpoint_that_remains(retained):
    whole = told_of(retained)
    retained.delete(retained.begins[0])
    rows = told_of(retained)
    (state,), (before,) = of(rows, schema.PARTITIONS), of(whole, schema.PARTITIONS)
    assert (state["digest"], state["owned_count"]) == (before["digest"], 1)
    assert (state["first_offset"], before["first_offset"]) == (
        retained.begins[0] + 1,
        0,
    )
    held = [row.values for row in rows if row.table is schema.INTERVALS]
    assert [row["effect"] for row in held if row["topic"] == "t"] == ["restored"]
    bounds = Bounds(to_offset=retained.ends[0] - 1)
    with pytest.raises(LogUnreadable, match="no checkpoint"):
        told_of(retained, bounds)


def told_of(retained, bounds=None):
    work = Work(0, retained.end)
    return list(fold(work, Source(), bounds=bounds or Bounds(), sample_ms=SAMPLE_MS))


# --- reading


class FakeLog:
    """One partition whose polls are given."""

    def __init__(self, polls, *, end):
        self.polls = list(polls)
        self.end = end
        self.at = 0

    def end_offsets(self, timeout_ms):
        del timeout_ms
        return {2: self.end}

    def positions(self):
        return {2: self.at}

    def poll(self, timeout_ms):
        found = self.polls.pop(0) if self.polls else []
        if isinstance(found, Exception):
            raise found
        folding.SystemClock().advance(timeout_ms if not found else 0)
        if found:
            self.at = found[-1].offset + 1
        return [(2, entry) for entry in found]


@pytest.fixture
def clock(monkeypatch):
    clock = VirtualClock()
    monkeypatch.setattr(folding, "SystemClock", lambda: clock)
    return clock


def read(log, end):
    return [each.offset for each in entries_of(log, Work(2, end), timeout_ms=5_000)]


def test_reading_ends_where_it_was_planned(clock):
    entries = story().entries
    late = FakeLog([entries[:2], [], CoordinationError("later"), entries[2:]], end=6)
    assert read(late, 4) == [0, 1, 2, 3]


def test_a_log_that_falls_silent_is_given_up(clock):
    with pytest.raises(DeadlineExceeded, match="sent nothing for 5000 ms"):
        read(FakeLog([story().entries[:2]], end=6), 6)


def test_a_log_that_was_cut_is_told(clock):
    with pytest.raises(LogTruncated, match="ends before offset 6"):
        read(FakeLog([], end=3), 6)


def test_faults_that_stay_are_raised(clock):
    with pytest.raises(LogTruncated, match="back"):
        read(FakeLog([LogTruncated("back")], end=6), 6)
