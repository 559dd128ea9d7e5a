"""The fold of a coordinating partition, its end and its checkpoint."""

import msgspec
import pytest
from logkit import H, Log, beat, claim, config, member, release
from pastkit import past

from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    LogTruncated,
    LogUnreadable,
    MalformedRecord,
    TopicMisconfigured,
)
from kafka_marshal.history.historian import Historian
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import LogEntry, TimestampType
from kafka_marshal.spark.audit import folding, schema
from kafka_marshal.spark.audit.folding import (
    VERSION,
    Bounds,
    LogEnds,
    Source,
    Work,
    fold,
    from_checkpoint,
    log_ends,
    require_coordination_log,
    runs_of,
    to_checkpoint,
)
from simulator.clock import VirtualClock

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


@pytest.fixture(params=[1, 2, 100])
def log(monkeypatch, request):
    made, run_max = story(), request.param

    def read(source, work, *, start):
        del source
        found = [e for e in made.entries if (start or 0) <= e.offset < work.end]
        for at in range(0, len(found), run_max):
            yield found[at : at + run_max]
            yield []

    monkeypatch.setattr(folding, "read", read)
    monkeypatch.setattr(folding, "begin", lambda *_, **__: WorldState(0))
    return made


def folded(log, *, bounds=None, end=None, **work):
    end = len(log.entries) if end is None else end
    work = Work(partition=0, end=end, **work)
    return list(fold(work, Source(), bounds=bounds or Bounds(), sample_ms=SAMPLE_MS))


def of(rows, table):
    return [row.values for row in rows if row.table is table]


def test_closed_rows_come_before_open_rows_and_state_rows(log):
    rows = folded(log)
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
            yield [entry]

    monkeypatch.setattr(folding, "read", read)
    rows = fold(
        Work(partition=0, end=9), Source(), bounds=Bounds(), sample_ms=SAMPLE_MS
    )
    first = next(rows)
    assert first.table is schema.CLAIMS
    assert taken == [0, 1]


@pytest.mark.parametrize("split", range(7))
def test_a_run_and_its_continuation_have_the_rows_of_a_single_run(log, split):
    whole = folded(log)
    first = folded(log, end=split)
    (state,) = of(first, schema.STATE)
    assert state["next_offset"] == split
    second = folded(log, saved=state["saved"], is_new=False)
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
def test_a_range_omits_rows_but_the_fold_reads_from_the_log_start(
    log, bounds, claims, end
):
    rows = folded(log, bounds=bounds)
    assert len(of(rows, schema.CLAIMS)) == claims
    (state,) = of(rows, schema.PARTITIONS)
    assert (state["first_offset"], state["next_offset"]) == (0, end)
    assert len([row for row in rows if row.is_open]) == (end == 6)


def test_a_timestamp_that_goes_back_does_not_change_a_time_range(log):
    """Timestamps go back if the clock of a new leader is behind."""
    late = log.entries[3].timestamp_ms
    log.entries[4] = folding.LogEntry(
        offset=4,
        leader_epoch=0,
        timestamp_ms=0,
        timestamp_type=1,
        value=log.entries[4].value,
    )
    rows = folded(log, bounds=Bounds(from_ms=late))
    assert len(of(rows, schema.CLAIMS)) == 1
    rows = folded(log, bounds=Bounds(to_ms=late - 1))
    assert of(rows, schema.PARTITIONS)[0]["next_offset"] == 3


def test_a_fold_that_halts_reports_the_level_and_saves_no_checkpoint(log):
    log.append(config(2, era=2, level=9))
    log.append(beat(4, client="c2"))
    rows = folded(log)
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
    whole = folded_of(retained)
    retained.delete(retained.begins[0])
    rows = folded_of(retained)
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
        folded_of(retained, bounds)


def folded_of(retained, bounds=None):
    work = Work(partition=0, end=retained.end)
    return list(fold(work, Source(), bounds=bounds or Bounds(), sample_ms=SAMPLE_MS))


# --- reading


class FakeLog:
    """One partition that returns the given polls."""

    def __init__(self, polls, *, end):
        self.polls = list(polls)
        self.end = end
        self.at = 0

    def end_offsets(self, timeout_ms):
        del timeout_ms
        return {2: self.end}

    def positions(self):
        return {2: self.at}

    def poll_runs(self, timeout_ms):
        found = self.polls.pop(0) if self.polls else []
        if isinstance(found, Exception):
            raise found
        clock = folding.SystemClock()  # replaced by a virtual one
        clock.advance(timeout_ms if not found else 0)  # type: ignore[attr-defined]
        if found:
            self.at = found[-1].offset + 1
        return [(2, found)] if found else []


@pytest.fixture
def clock(monkeypatch):
    clock = VirtualClock()
    monkeypatch.setattr(folding, "SystemClock", lambda: clock)
    return clock


def read(log, end):
    return [
        each.offset
        for run in runs_of(log, Work(partition=2, end=end), timeout_ms=5_000)
        for each in run
    ]


def test_reading_ends_at_the_planned_end_offset(clock):
    entries = story().entries
    late = FakeLog([entries[:2], [], CoordinationError("later"), entries[2:]], end=6)
    assert read(late, 4) == [0, 1, 2, 3]


def test_a_log_that_sends_no_records_raises_deadline_exceeded(clock):
    with pytest.raises(DeadlineExceeded, match="sent nothing for 5000 ms"):
        read(FakeLog([story().entries[:2]], end=6), 6)


def test_a_truncated_log_raises(clock):
    with pytest.raises(LogTruncated, match="ends before offset 6"):
        read(FakeLog([], end=3), 6)


def test_a_log_truncated_error_while_polling_is_raised(clock):
    with pytest.raises(LogTruncated, match="back"):
        read(FakeLog([LogTruncated("back")], end=6), 6)


class OpenedLog:
    cluster_id = "c"
    topic_id = b"\xab\xcd"

    def __init__(self, ends):
        self._ends = ends
        self.is_closed = False

    def end_offsets(self, timeout_ms):
        assert timeout_ms == 7_000
        if self._ends is None:
            raise DeadlineExceeded("no answer")
        return self._ends

    def close(self, timeout_ms):
        self.is_closed = True


def looked(monkeypatch, log):
    def opened(settings, **rest):
        assert settings.coordination_topic == "m"
        assert (rest["timeout_ms"], rest["only"]) == (7_000, None)
        return log

    monkeypatch.setattr(folding, "open_coordination_log", opened)
    return log_ends(
        Source(bootstrap_servers="b:1", coordination_topic="m", timeout_ms=7_000)
    )


@pytest.mark.parametrize(
    ("topic_id", "expected_id"),
    [(b"\xab\xcd", "abcd"), (None, None)],
    ids=["id", "none"],
)
def test_log_ends_include_the_cluster_id_and_topic_id(
    monkeypatch, topic_id, expected_id
):
    log = OpenedLog({0: 5})
    log.topic_id = topic_id
    assert looked(monkeypatch, log) == LogEnds("c", expected_id, {0: 5})
    assert log.is_closed


def test_a_failed_query_closes_the_log(monkeypatch):
    log = OpenedLog(None)
    with pytest.raises(DeadlineExceeded):
        looked(monkeypatch, log)
    assert log.is_closed


class TruncatedLog:
    """Partitions that return up to 100 entries each per poll, from their start on."""

    def __init__(self, logs, start=0):
        self.start = start
        self.left = dict(logs)
        self.ends = {t: start + len(values) for t, values in logs.items()}
        self.at = dict.fromkeys(logs, start)
        self.read = 0
        self.is_closed = False

    def start_offsets(self, timeout_ms):
        return dict.fromkeys(self.left, self.start)

    def end_offsets(self, timeout_ms):
        return self.ends

    def read_from(self, offsets):
        assert set(offsets.values()) <= {self.start}

    def positions(self):
        return self.at

    def poll(self, timeout_ms):
        found = []
        for t, values in self.left.items():
            for value in values[:100]:
                entry = LogEntry(
                    offset=self.at[t],
                    leader_epoch=0,
                    timestamp_ms=9,
                    timestamp_type=TimestampType.LOG_APPEND_TIME,
                    value=value,
                )
                found.append((t, entry))
                self.at[t] += 1
            self.left[t] = values[100:]
        self.read += len(found)
        return found

    def close(self, timeout_ms):
        self.is_closed = True


def required(monkeypatch, logs, **rest):
    log = TruncatedLog(logs, **rest)
    monkeypatch.setattr(folding, "open_coordination_log", lambda *_, **__: log)
    try:
        require_coordination_log(Source(coordination_topic="orders"))
    finally:
        assert log.is_closed
    return log


JUNK = b'{"order": 5}'


@pytest.mark.parametrize("start", [0, 7_000])
def test_a_topic_with_another_use_is_refused_by_its_first_records(monkeypatch, start):
    with pytest.raises(TopicMisconfigured, match=r"not a coordination topic: .* 2000 "):
        required(monkeypatch, {0: [JUNK] * 5_000, 1: [None] * 5_000}, start=start)


def test_an_empty_topic_is_refused_as_not_formatted(monkeypatch):
    with pytest.raises(TopicMisconfigured, match=r"format --coordination-topic orders"):
        required(monkeypatch, {0: [], 1: []})


def test_one_record_of_the_protocol_identifies_a_coordination_topic(monkeypatch):
    """Foreign records may be in any of its partitions, from the start on."""
    logs = {0: [JUNK] * 5_000, 1: [], 2: [JUNK] * 150 + [encode(claim())] * 900}
    assert required(monkeypatch, logs).read <= 400


def played():
    log, historian = Log(), Historian()
    for record in (claim(), member("c1", seq=3), member("c2", seq=1)):
        transitions = log.append(record)
        historian.take(log.state, log.entries[-1], transitions=transitions)
    return log, historian


def test_a_checkpoint_restores_members_and_their_sequence_numbers():
    log, historian = played()
    world, back = from_checkpoint(to_checkpoint(log.state, historian), partition=0)
    assert digest(world) == digest(log.state)
    assert back == historian
    assert list(world.soft.members) == list(log.state.soft.members)
    assert world.soft.members == log.state.soft.members
    transitions = log.append(member("c1", seq=2))
    (transition,) = apply(world, log.entries[-1])
    assert transition == transitions[0]
    assert transition.reason == "old_seq"


def test_a_fold_that_halted_in_the_last_run_cannot_continue():
    log = Log()
    log.append(config(2, era=2, level=9))
    assert to_checkpoint(log.state, Historian()) is None
    with pytest.raises(LogUnreadable, match="partition 4 halted in the last run"):
        from_checkpoint(None, partition=4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({0: VERSION + 1}, "audit into a new directory", id="version"),
        pytest.param({1: b"\xff"}, "not a snapshot", id="snapshot"),
        pytest.param({2: b"\xff"}, "not a history", id="history"),
        pytest.param({3: [(encode(claim()), 0, 0, 0)]}, "no Member", id="member"),
        pytest.param({3: 5}, "not a saved audit", id="shape"),
    ],
)
def test_invalid_checkpoints_are_refused(change, match):
    log, historian = played()
    fields = [VERSION, to_bytes(log.state), historian, []]
    for at, value in change.items():
        fields[at] = value
    with pytest.raises(MalformedRecord, match=match):
        from_checkpoint(msgspec.msgpack.encode(fields), partition=0)
