"""Reading the past: from the newest checkpoint before a moment up to the moment."""

import time

import pytest
from batchkit import packed
from enginekit import KEY, checkpointed, write
from logkit import OP, ident, schedule
from msgspec.structs import replace
from pastkit import past, patch_open

from kafka_marshal import (
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    LogUnreadable,
    World,
)
from kafka_marshal.engine import checkpoint_reader
from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.engine.pause_notes import NOTES_MAX
from kafka_marshal.native import compiled
from kafka_marshal.protocol.codec import encode, person_to_tags
from kafka_marshal.protocol.records import ReleaseGroup
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.types import LogEntry
from kafka_marshal.views.past import Prefix

__all__ = ["past"]
UNTIL = 2_000_000


def entry(offset, timestamp_ms=0, value=b"", *, kind=1):
    return LogEntry(
        offset=offset,
        leader_epoch=0,
        timestamp_ms=timestamp_ms,
        timestamp_type=kind,
        value=value,
    )


def accepted(prefix, *entries, partition=0):
    return [e.offset for e in entries if prefix.accept(partition, e)]


def test_a_view_of_an_offset_ends_at_the_offset():
    prefix = Prefix({0: 1}, None)
    assert accepted(prefix, *map(entry, range(4))) == [0, 1]
    assert accepted(prefix, entry(0), partition=1) == []


def test_a_view_of_a_time_is_a_prefix_even_if_timestamps_go_back():
    prefix = Prefix(None, 10)
    times = [entry(0, 5), entry(1, 11), entry(2, 7), entry(3, 12)]
    assert accepted(prefix, *times) == [0]
    assert accepted(prefix, entry(0, 10), partition=1) == [0]


def pausing(reason, *, op=OP, seq=0, until_ms=UNTIL, person=None, client="admin"):
    record = ReleaseGroup(
        client_id=client,
        group_id="g",
        incarnation=ident(client),
        seq=seq,
        op_id=op,
        msg_expire_time=until_ms,
        reason=reason,
        tags=person_to_tags(person),
    )
    return encode(record)


def test_the_first_reason_of_an_operation_is_kept():
    prefix = Prefix(None, None)
    for seq, reason in enumerate(("deploy", "still", None)):
        prefix.accept(0, entry(seq, value=pausing(reason, seq=seq)))
    prefix.accept(0, entry(9, value=b"\x01\x05\x00garbage"))
    prefix.accept(0, entry(10, value=None))
    assert prefix.notes["g", OP].reason == "deploy"


def test_the_first_person_of_an_operation_is_kept():
    prefix = Prefix(None, None)
    for seq, person in enumerate((None, "ada", "bob")):
        prefix.accept(0, entry(seq, value=pausing(None, seq=seq, person=person)))
    note = prefix.notes["g", OP]
    assert (note.person, note.reason) == ("ada", None)


def test_a_scheduled_pause_has_its_reason_and_begin():
    prefix = Prefix(None, None)
    plan = schedule(7, 9)
    plan = replace(plan, reason="rest", tags=person_to_tags("ada"))
    prefix.accept(0, entry(0, 5, value=encode(plan)))
    prefix.accept(0, entry(1, 8, value=pausing("end", seq=1)))
    assert prefix.notes["g", OP][:3] == ("rest", "ada", 7)


def test_a_pause_begins_with_the_first_record_of_its_operation():
    prefix = Prefix(None, None)
    for offset, at_ms in enumerate((5, 8)):
        value = pausing(None, seq=offset)
        prefix.accept(0, entry(offset, at_ms, value=value))
    assert prefix.notes["g", OP][:3] == (None, None, 5)


def test_reasons_after_the_end_of_the_view_are_omitted():
    prefix = Prefix({0: -1}, None)
    prefix.accept(0, entry(0, value=pausing("later")))
    assert prefix.notes == {}


def test_only_the_latest_pause_notes_are_kept():
    prefix = Prefix(None, None)
    for number in range(NOTES_MAX + 5):
        op = number.to_bytes(16, "big")
        value = pausing(str(number), op=op, person="ada")
        prefix.accept(0, entry(number, value=value))
    assert len(prefix.notes) == NOTES_MAX
    assert ("g", (5).to_bytes(16, "big")) in prefix.notes
    assert ("g", (4).to_bytes(16, "big")) not in prefix.notes


def test_an_entry_with_a_client_timestamp_does_not_end_a_view():
    prefix = Prefix(None, 10)
    entries = [entry(0, 5), entry(1, 99, kind=0), entry(2, 7), entry(3, 11)]
    assert accepted(prefix, *entries) == [0, 1, 2]
    assert not prefix.has_ended(1)
    again = Prefix(None, 10)
    assert [e.offset for e in again.cut(0, entries)] == [0, 1, 2]
    assert again.has_ended(0)
    assert again.cut(0, [entry(4, 1)]) == ()


def test_a_run_within_the_view_is_not_cut():
    entries = [entry(0, 5), entry(1, 10)]
    assert Prefix(None, 10).cut(0, entries) is entries
    assert Prefix({0: 7}, None).cut(0, entries) == entries
    assert Prefix({0: 0}, None).cut(0, entries) == entries[:1]
    assert Prefix(None, None).cut(0, entries) is entries


@pytest.mark.skipif(compiled is None, reason="nothing was compiled here")
@pytest.mark.parametrize("offset", [None, {0: 2}, {0: 9}, {1: 9}])
@pytest.mark.parametrize("time_ms", [None, 4, 10, 11])
def test_a_packed_run_is_cut_like_a_list(offset, time_ms):
    entries = [entry(0, 5), entry(1, 99, kind=0), entry(2, 10), entry(4, 11)]
    expected, found = Prefix(offset, time_ms), Prefix(offset, time_ms)
    cut = found.cut(0, packed(entries))
    assert list(cut) == list(expected.cut(0, entries))
    assert found.has_ended(0) == expected.has_ended(0)
    one_by_one = Prefix(offset, time_ms)
    assert [e.offset for e in cut] == accepted(one_by_one, *entries)


class Reader:
    """Opens the log of ``past`` and notes the offsets that are read."""

    def __init__(self, past, monkeypatch):
        self.entries = []
        self._past = past
        patch_open(monkeypatch, self.open)

    def open(self, *_, **__):
        log = self._past.open()
        log.poll_entries_max = 1
        poll = log.poll

        def noted(timeout_ms):
            entries = poll(timeout_ms)
            self.entries += [entry.offset for _, entry in entries]
            return entries

        log.poll = noted
        return log


@pytest.fixture
def reader(past, monkeypatch):
    return Reader(past, monkeypatch)


def times(past):
    return {each.offset: each.timestamp_ms for each in past.entries()}


@pytest.mark.parametrize("by", ["offset", "time"])
def test_entries_after_the_moment_are_not_read(past, reader, by):
    at = past.ends[1] + 3
    moment = {"offset": {0: at}} if by == "offset" else {"time_ms": times(past)[at]}
    expected = past.whole(at) if by == "offset" else past.at_time(times(past)[at])
    past.cluster.run(1_000)
    for _ in range(3_000):
        write(past.cluster, b"much later")
    (state,) = World.at(**moment).partitions
    assert to_bytes(state) == to_bytes(expected)
    # One or two entries more are read, to detect the end of the view.
    assert max(reader.entries) <= state.next_offset + 2


def test_only_the_partition_of_a_key_is_read(past, reader):
    view = World.at(key=KEY, offset=past.ends[0])
    assert [state.partition for state in view.partitions] == [0]
    assert view.partition_of(KEY) == 0
    assert digest(view.partitions[0]) == digest(past.whole(past.ends[0]))
    assert not view.is_partial


def test_the_partition_count_can_be_read_from_a_checkpoint(past):
    expected = past.whole(past.ends[0])
    past.delete(past.begins[0])
    view = World.at(key=KEY, offset=past.ends[0])
    assert digest(view.partitions[0]) == digest(expected)
    past.delete(past.begins[1] + 1)
    with pytest.raises(LogUnreadable, match="no checkpoint: the number"):
        World.at(key=KEY, offset=past.end - 1)


def test_a_view_before_the_format_is_empty(past):
    for wrong in ({"time_ms": 0, "offset": {0: 1}}, {"time_ms": "now"}):
        with pytest.raises(ConfigurationError, match=r"not both|whole number"):
            World.at(**wrong)
    view = World.at(time_ms=0)
    assert view.log_start_missing == ()
    assert view.partitions[0].next_offset == 0
    assert World.at(key=KEY, time_ms=0).partition_of(KEY) == 0
    assert World.at(offset={0: -1}).partitions[0].keys == {}


def test_an_offset_without_partition_and_key_is_refused():
    with pytest.raises(ConfigurationError, match="name the partition"):
        World.at(offset=5)


@pytest.mark.parametrize(
    ("offset", "why"),
    [({0: 10**6}, "is not written yet"), ({1: 0}, "no coordinating partition 1")],
)
def test_an_unwritten_offset_or_missing_partition_is_refused(past, offset, why):
    with pytest.raises(ConfigurationError, match=why):
        World.at(offset=offset)


def test_a_time_in_the_future_is_refused(past):
    with pytest.raises(ConfigurationError, match="in the future"):
        World.at(time_ms=2**60)


def test_an_unknown_moment_error_names_the_earliest_known_one(past):
    past.delete(past.begins[0])
    view = World.at(offset={0: past.begins[0]})
    known = view.known_from[0]
    assert known.offset == past.ends[0]
    with pytest.raises(LogUnreadable) as caught:
        view.require_known()
    assert str(caught.value).endswith(f"Z, or 0:{known.offset}")
    assert World.at(offset={0: known.offset}).log_start_missing == ()
    assert World.at(time_ms=known.time_ms).log_start_missing == ()
    early = World.at(time_ms=times(past)[known.offset] - 1)
    assert early.log_start_missing == (0,)
    assert early.known_from == view.known_from


def test_without_a_known_moment_the_error_names_the_doctor(past):
    past.delete(past.begins[1] + 1)
    view = World.at(offset={0: past.end - 1})
    assert view.known_from == {}
    with pytest.raises(LogUnreadable, match="see: marshal doctor"):
        view.require_known()


def paused(past, reason, *, for_ms=60_000, **record):
    """Pause the group for a reason, for a minute by default."""
    until_ms = past.cluster.clock.wall_ms() + for_ms
    write(past.cluster, pausing(reason, until_ms=until_ms, **record))
    past.cluster.run(50)


def again(past):
    """Write another checkpoint; return the last offset after it."""
    checkpointed(past.cluster, past.node)
    return past.entries()[-1].offset


@pytest.mark.parametrize("deleted", [False, True])
def test_the_reason_of_a_pause_is_read_from_before_the_checkpoint(
    past, reader, monkeypatch, deleted
):
    monkeypatch.setattr(checkpoint_reader, "WINDOW_MIN", 2)
    monkeypatch.setattr(checkpoint_reader, "WINDOW_MAX", 2)
    paused(past, "deploy")
    again(past)
    paused(past, "renewed", seq=1)
    again(past)
    paused(past, "later", client="other")
    at = past.entries()[-1].offset
    if deleted:
        past.delete(past.begins[1])
    view = World.at(offset={0: at})
    assert view.partitions[0].active_pause("g").op_id == OP
    assert view.notes["g", OP].reason == "deploy"
    assert view.pauses()[0]["renewed_by"] == "other"
    # The log is read from the checkpoint before the pause, not from its start.
    assert min(reader.entries) > past.begins[0]


def test_a_pause_before_every_checkpoint_has_its_reason(past):
    past.delete(past.begins[1])
    paused(past, "deploy")
    first = again(past)
    past.delete(past.ends[1] + 1)
    view = World.at(offset={0: first})
    assert view.notes["g", OP].reason == "deploy"


def test_the_reason_of_an_ended_pause_is_not_read(past, reader):
    paused(past, "short", for_ms=100)
    again(past)
    past.cluster.run(1_000)
    at = past.entries()[-1].offset
    assert World.at(offset={0: at}).notes == {}


def test_members_are_read_only_on_request(past):
    at = again(past)
    whole = {name: m.offset for name, m in past.whole(at).soft.members.items()}
    assert whole
    bare = World.at(offset={0: at})
    full = World.at(offset={0: at}, has_members=True)
    found = {name: m.offset for name, m in full.partitions[0].soft.members.items()}
    assert not bare.partitions[0].soft.members
    assert found == whole
    assert digest(full.partitions[0]) == digest(bare.partitions[0])


def failing(past, monkeypatch, error, times):
    """Make the first polls of each log fail."""

    def open_log(*_, **__):
        log = past.open()
        poll, left = log.poll, [error] * times

        def failing_poll(timeout_ms):
            if left:
                raise left.pop()
            return poll(timeout_ms)

        log.poll = failing_poll
        return log

    patch_open(monkeypatch, open_log)


def test_a_temporary_coordination_error_is_retried(past, monkeypatch):
    failing(past, monkeypatch, CoordinationError("no broker"), times=3)
    view = World.at(key=KEY, offset=past.ends[0])
    assert digest(view.partitions[0]) == digest(past.whole(past.ends[0]))


def test_a_permanent_error_ends_the_view(past, monkeypatch):
    failing(past, monkeypatch, LogUnreadable("denied"), times=1)
    with pytest.raises(LogUnreadable, match="denied"):
        World.at(offset={0: past.ends[0]})
    failing(past, monkeypatch, CoordinationError("no broker"), times=10**6)
    with pytest.raises(CoordinationError):
        World.at(offset={0: past.ends[0]}, timeout_ms=200)


def test_a_view_that_exceeds_its_timeout_fails(past, monkeypatch):
    monkeypatch.setattr(LogCheckpoints, "find", lambda *_, **__: {})
    patch_open(monkeypatch, lambda *_, **__: silent(past.open()))
    with pytest.raises(DeadlineExceeded, match="--timeout"):
        World.at(offset={0: 0}, timeout_ms=200)


def silent(log):
    """Make polls of a log return nothing."""
    log.poll = lambda timeout_ms: time.sleep(timeout_ms / 1000) or []
    return log
