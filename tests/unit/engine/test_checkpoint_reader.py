import pytest
from enginekit import checkpointed, owning, world, write
from logkit import chunk, ident

from kafka_marshal.engine import checkpoint_reader
from kafka_marshal.engine.checkpoint_reader import (
    LogCheckpoints,
    has_checkpoints,
    kept_in,
)
from kafka_marshal.engine.kept_states import POLL_MS, POLLS_MAX
from kafka_marshal.errors import CoordinationError
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.codec import decode, header_of
from kafka_marshal.protocol.records import CheckpointBegin, CheckpointEnd


def find(cluster, source=None):
    log = cluster.kafka.coordination_log()
    starts, ends = log.start_offsets(1), log.end_offsets(1)
    wanted = {t: LogRange(starts[t], ends[t]) for t in starts}
    return (source or LogCheckpoints()).find(wanted, log=log, timeout_ms=1)


def of(cluster, kind, t=0):
    records = cluster.kafka.log(cluster.place(t)).records
    return [r for r in records if r.value.startswith(header_of(kind))]


@pytest.fixture
def small(monkeypatch):
    """Windows so small that no checkpoint fits into one."""
    monkeypatch.setattr(checkpoint_reader, "WINDOW_MIN", 2)
    monkeypatch.setattr(checkpoint_reader, "WINDOW_GROWTH", 2)
    monkeypatch.setattr(checkpoint_reader, "WINDOW_MAX", 4)


@pytest.mark.parametrize("behind", [0, 1, 7, 40])
def test_a_checkpoint_at_any_distance_from_the_log_end_is_read(small, behind):
    cluster = world(2)
    node = owning(cluster)
    checkpointed(cluster, node, 2)
    ends = {t: of(cluster, CheckpointEnd, t)[-1] for t in range(2)}
    for _ in range(behind):
        write(cluster, b"?")
    found = find(cluster)
    assert {t: kept.digest for t, kept in found.items()} == {
        t: decode(end.value).digest.hex() for t, end in ends.items()
    }


def test_the_checkpoints_of_all_partitions_are_read_in_one_pass():
    """A seek waits for the fetch in progress: one seek serves all partitions."""
    cluster = world(8)
    node = owning(cluster)
    checkpointed(cluster, node, 8)
    log = cluster.kafka.coordination_log()
    places = []
    read_from = log.read_from
    log.read_from = lambda offsets: places.append(set(offsets)) or read_from(offsets)
    starts, ends = log.start_offsets(1), log.end_offsets(1)
    wanted = {t: LogRange(starts[t], ends[t]) for t in starts}
    found = LogCheckpoints().find(wanted, log=log, timeout_ms=1)
    assert found.keys() == wanted.keys()
    assert places == [set(wanted), set(wanted)]


def test_an_incomplete_newest_checkpoint_is_skipped_in_its_partition_alone(small):
    cluster = world(2)
    node = owning(cluster)
    checkpointed(cluster, node, 2)
    whole = find(cluster)
    checkpointed(cluster, node, 2)
    newest = find(cluster)
    broken = of(cluster, CheckpointBegin, 1)[-1]
    cluster.kafka.log(cluster.place(1)).records.remove(broken)
    assert find(cluster) == {0: newest[0], 1: whole[1]}


def test_an_incomplete_checkpoint_is_skipped(small):
    cluster = world()
    node = owning(cluster)
    checkpointed(cluster, node)
    whole = find(cluster)[0]
    checkpointed(cluster, node)
    broken = of(cluster, CheckpointBegin)[-1]
    cluster.kafka.log(cluster.place(0)).records.remove(broken)
    assert find(cluster)[0] == whole


def test_a_checkpoint_end_without_its_begin_is_skipped(small):
    cluster = world()
    node = owning(cluster)
    checkpointed(cluster, node)
    kept = find(cluster)[0]
    record = decode(of(cluster, CheckpointEnd)[-1].value)
    head = header_of(CheckpointEnd)
    write(cluster, head + b"\xc1")
    write(cluster, chunk(b"?", checkpoint=ident("else")))
    cluster.kafka.delete_records(cluster.place(0), before=record.begin_offset)
    assert find(cluster)[0] == kept
    cluster.kafka.delete_records(cluster.place(0), before=record.begin_offset + 1)
    assert find(cluster) == {}


def test_the_search_of_a_log_that_has_its_start_is_bounded(small, monkeypatch):
    monkeypatch.setattr(checkpoint_reader, "SEARCHED_MAX", 10)
    cluster = world()
    node = owning(cluster)
    checkpointed(cluster, node)
    for _ in range(20):
        write(cluster, b"?")
    assert find(cluster) == {}
    cluster.kafka.delete_records(cluster.place(0), before=1)
    assert find(cluster).keys() == {0}


def test_a_short_log_is_not_searched_while_it_has_its_start():
    """A search could read the whole log, which is then folded from its start."""
    cluster = world()
    checkpointed(cluster, owning(cluster))
    end = cluster.kafka.coordination_log().end_offsets(1)[0]
    assert find(cluster, LogCheckpoints(whole_max=end)) == {}
    assert find(cluster, LogCheckpoints(whole_max=end - 1)).keys() == {0}
    cluster.kafka.delete_records(cluster.place(0), before=1)
    assert find(cluster, LogCheckpoints(whole_max=end)).keys() == {0}


def test_an_empty_log_has_no_checkpoint():
    cluster = world()
    cluster.kafka.delete_records(cluster.place(0), before=1)
    assert find(cluster) == {}
    log = cluster.kafka.coordination_log()
    assert not has_checkpoints(log, timeout_ms=1)


def test_has_checkpoints_requires_one_in_each_partition():
    cluster = world(2)
    node = owning(cluster)
    log = cluster.kafka.coordination_log
    assert not has_checkpoints(log(), timeout_ms=1)
    checkpointed(cluster, node, 2)
    assert has_checkpoints(log(), timeout_ms=1)


def test_kept_files_are_tried_before_checkpoints_in_the_log():
    (last,) = kept_in(None)
    store = LogCheckpoints()
    assert kept_in(store)[0] is store
    assert isinstance(last, LogCheckpoints)


@pytest.mark.parametrize(
    ("timeout_ms", "polls"),
    [(10**6, POLLS_MAX), (5 * POLL_MS, 5), (1, 1)],
)
def test_a_silent_log_raises_an_error_after_the_timeout(timeout_ms, polls):
    silent, polled = world().kafka.coordination_log(), []
    silent.poll = silent.skim = lambda *_, **__: polled.append(1) or ()
    with pytest.raises(CoordinationError, match="sent nothing"):
        LogCheckpoints().find({0: LogRange(0, 1)}, log=silent, timeout_ms=timeout_ms)
    assert len(polled) == polls + 1


def test_a_truncated_partition_ends_the_search_despite_entries_of_another():
    """Entries of another partition do not count as progress of the search."""
    cluster = world(2)
    for _ in range(5):
        write(cluster, b"?", 1)
    log = cluster.kafka.coordination_log()
    starts, ends = log.start_offsets(1), log.end_offsets(1)
    cluster.kafka.truncate(cluster.place(1), end=ends[1] - 2, leader=7)
    log.read_from(ends | {1: 0})
    polled, poll = [], log.poll

    def beside_a_busy_one(timeout_ms, **_):
        polled.append(write(cluster, b"?", 0))
        assert len(polled) < 99
        return poll(timeout_ms)

    log.poll = log.skim = beside_a_busy_one
    wanted = {1: LogRange(starts[1], ends[1])}
    with pytest.raises(CoordinationError, match=r"\[1\] sent nothing"):
        LogCheckpoints().find(wanted, log=log, timeout_ms=5 * POLL_MS)
