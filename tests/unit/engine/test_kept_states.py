"""Which kept states are restored, and which do not fit the log."""

import attrs
import msgspec
import pytest
from enginekit import fold, owning, world, write
from hypothesis import given
from hypothesis import strategies as st
from keptkit import Shelf, kept
from logkit import Log, planned

from kafka_marshal.engine.kept_states import (
    RestoreLog,
    freeze_soft,
    notes_from_bytes,
    restore,
    soft_from_bytes,
    world_of,
)
from kafka_marshal.engine.pause_notes import By, PauseNote
from kafka_marshal.errors import CoordinationError, LogTruncated
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import SoftState
from kafka_marshal.protocol.types import Key


@pytest.fixture
def cluster():
    made = world(partitions=2, records=(10, 10))
    owning_two = made.node("a")
    made.run(100)
    made.crash(owning_two)
    for number in range(5):
        for partition in range(2):
            write(made, b"noise %d" % number, partition)
    return made


def begun(cluster, *sources, partitions=(0, 1)):
    unfit = []
    log = cluster.kafka.coordination_log()
    aside = []
    found = restore(
        log,
        partitions,
        sources=sources,
        on_unfit=lambda state, why: unfit.append((state.partition, why)),
        aside=aside,
    )
    return log, found, unfit, aside


def test_without_a_state_the_log_is_read_from_its_start(cluster):
    log, found, unfit, aside = begun(cluster)
    assert {t: each.source for t, each in found.items()} == {0: None, 1: None}
    assert not any(each.is_log_start_missing for each in found.values())
    assert (unfit, aside) == ([], [])
    assert log.poll(0)[0][1].offset == 0


def test_a_fitting_state_is_restored(cluster):
    state = fold(cluster, 0)
    write(cluster, b"more", 0)
    log, found, unfit, _ = begun(cluster, Shelf(kept(state)))
    assert unfit == []
    assert found[0].source == "a test"
    assert digest(found[0].world) == digest(state)
    entries = log.poll(0)
    assert [entry.offset for t, entry in entries if t == 0] == [state.next_offset]
    assert next(entry.offset for t, entry in entries if t == 1) == 0


def test_each_partition_is_restored_from_the_first_fitting_source(cluster):
    first = Shelf(kept(fold(cluster, 0)), kept(fold(cluster, 1), digest="00" * 16))
    second = Shelf(kept(fold(cluster, 1), source="second"))
    third = Shelf()
    _, found, unfit, _ = begun(cluster, first, second, third)
    assert (found[0].source, found[1].source) == ("a test", "second")
    assert [t for t, _ in unfit] == [1]
    assert first.discarded == [1]
    assert (second.asked, third.asked) == ([[1]], [])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param({"state": b"rubbish"}, "not a snapshot", id="bytes"),
        pytest.param({"state": b""}, "not a snapshot", id="empty"),
        pytest.param({"digest": "00" * 16}, "content has digest", id="digest"),
        pytest.param({"partition": 1}, "differ in partition", id="partition"),
        pytest.param({"leader_epoch": 1}, "leader epoch", id="epoch"),
        pytest.param({"offset": 3}, "offset or leader", id="offset"),
        pytest.param({"offset": 99}, "the log has the offsets from 0", id="beyond"),
        pytest.param({"offset": 0}, "cannot be verified", id="at the start"),
    ],
)
def test_an_unfit_state_is_refused(cluster, changes, why):
    state = fold(cluster, 0)
    found = world_of(kept(state, **changes), LogRange(0, state.next_offset))
    assert isinstance(found, str)
    assert why in found


def test_a_state_beyond_a_truncation_is_refused(cluster):
    """The log has grown again to the same length, under another leader."""
    state = fold(cluster, 0)
    place = cluster.place(0)
    cluster.kafka.truncate(place, end=state.next_offset - 2, leader=1)
    write(cluster, b"another", 0)
    write(cluster, b"another", 0)
    log, found, unfit, _ = begun(cluster, Shelf(kept(state)))
    assert found[0].source is None
    assert "leader epoch" in unfit[0][1]
    assert log.poll(0)[0][1].offset == 0


def test_a_state_before_a_truncation_is_restored(cluster):
    state = fold(cluster, 0)
    write(cluster, b"lost", 0)
    cluster.kafka.truncate(cluster.place(0), end=state.next_offset, leader=1)
    _, found, unfit, _ = begun(cluster, Shelf(kept(state)))
    assert (found[0].source, unfit) == ("a test", [])


def test_the_log_start_is_missing_after_a_deletion_without_a_kept_state(cluster):
    cluster.kafka.delete_records(cluster.place(0), before=2)
    _, found, _, _ = begun(cluster)
    assert found[0].is_log_start_missing
    assert not found[1].is_log_start_missing


def test_a_state_replaces_deleted_entries(cluster):
    state = fold(cluster, 0)
    before = state.next_offset - 1
    cluster.kafka.delete_records(cluster.place(0), before=before)
    _, found, _, _ = begun(cluster, Shelf(kept(state)))
    assert not found[0].is_log_start_missing


def test_a_checkpoint_in_the_log_needs_no_entry_before_it(cluster):
    state = fold(cluster, 0)
    write(cluster, b"a checkpoint", 0)
    cluster.kafka.delete_records(cluster.place(0), before=state.next_offset)
    _, found, _, _ = begun(cluster, Shelf(kept(state)))
    assert found[0].is_log_start_missing
    _, found, _, _ = begun(cluster, Shelf(kept(state, is_in_log=True)))
    assert found[0].source == "a test"


def test_a_restore_hands_back_entries_of_other_partitions(cluster):
    """While one partition is started again, the others continue."""
    log = cluster.kafka.coordination_log()
    while log.poll(0):
        pass
    write(cluster, b"live", 1)
    state = fold(cluster, 0)
    aside = []
    found = restore(
        log, [0], sources=[Shelf(kept(state))], on_unfit=lambda *_: None, aside=aside
    )
    assert list(found) == [0]
    assert [(t, entry.value) for t, entry in aside] == [(1, b"live")]
    assert log.poll(0) == []


def test_a_search_skips_no_entries_of_other_partitions(cluster):
    """A search may leave out entries only if it restores all partitions."""
    log = cluster.kafka.coordination_log()
    aside = []
    part = RestoreLog(log, [0], aside)
    mine = part.skim(0, head=b"x")
    others = [(1, e) for e in _entries(cluster, 1)]
    assert (mine, aside) == ([(0, e) for e in _entries(cluster, 0)], others)
    log.skim = lambda timeout_ms, *, head: [(0, head)]
    assert RestoreLog(log, [0, 1], []).skim(0, head=b"x") == [(0, b"x")]


def _entries(cluster, t):
    records = cluster.kafka.log(cluster.place(t)).records
    return [each.entry() for each in records]


def test_a_restore_from_a_silent_log_raises_an_error(cluster):
    state = fold(cluster, 0)
    log = cluster.kafka.coordination_log()
    log.read_lag_ms = 60_000
    with pytest.raises(CoordinationError, match="sent nothing"):
        restore(log, [0], sources=[Shelf(kept(state))], on_unfit=lambda *_: None)


def test_a_truncation_during_a_restore_raises_a_retriable_error(cluster):
    log = cluster.kafka.coordination_log()
    log.poll(0)
    cluster.kafka.truncate(cluster.place(0), end=1, leader=1)
    with pytest.raises(CoordinationError) as caught:
        RestoreLog(log, [0], []).poll(0)
    assert caught.value.retriable


def test_a_truncation_of_another_partition_is_raised_during_a_restore(cluster):
    """Only the log's reader can restart that partition; the log repeats the error."""
    log = cluster.kafka.coordination_log()
    log.poll(0)
    cluster.kafka.truncate(cluster.place(1), end=1, leader=1)
    with pytest.raises(LogTruncated) as caught:
        RestoreLog(log, [0], []).poll(0)
    assert caught.value.partition == 1


def test_a_truncation_of_an_unknown_partition_is_raised_during_a_restore(cluster):
    log = cluster.kafka.coordination_log()

    def poll(timeout_ms):
        raise LogTruncated("somewhere")

    log.poll = poll
    with pytest.raises(LogTruncated):
        RestoreLog(log, [0], []).poll(0)


def test_a_restore_log_forwards_all_calls_except_the_close(cluster):
    log = cluster.kafka.coordination_log()
    aside = RestoreLog(log, [0], [])
    assert (aside.topic, aside.topic_id) == (log.topic, log.topic_id)
    assert aside.partition_count == 2
    aside.append(0, b"x")
    assert aside.end_offsets(0) == log.end_offsets(0)
    assert aside.start_offsets(0) == {0: 0, 1: 0}
    assert aside.positions() == log.positions()
    aside.close(0)
    assert log.poll(0)


def test_an_engine_starts_from_a_kept_state():
    made = world()
    first = owning(made)
    made.crash(first)
    state = fold(made)
    node = made.node("b")
    node.engine.rebuilder.sources = (Shelf(kept(state)),)
    node.step()
    assert node.engine.is_ready
    assert node.observer.named("restored")[0].fields["offset"] == state.next_offset
    assert digest(node.engine.context.replicas[0].world) == digest(state)


def test_an_engine_reports_an_unfit_state_once(cluster):
    cluster.kafka.delete_records(cluster.place(0), before=2)
    node = cluster.node("b")
    node.engine.rebuilder.sources = (Shelf(kept(fold(cluster, 1), digest="0")),)
    cluster.run(60_000, step_ms=500)
    assert len(node.observer.named("state_unfit")) == 1
    assert node.engine.log_start_missing == (0,)


def test_a_kept_state_that_appears_later_replaces_the_missing_log_start(cluster):
    state = fold(cluster, 0)
    cluster.kafka.delete_records(cluster.place(0), before=2)
    node = cluster.node("b")
    cluster.run(100)
    assert node.engine.log_start_missing == (0,)
    node.engine.rebuilder.sources = (Shelf(kept(state)),)
    cluster.run(20_000, step_ms=500)
    assert node.engine.log_start_missing == ()
    assert node.engine.is_ready


def test_entries_read_during_a_failed_restore_are_folded():
    """A failure while one partition is restored loses no entry of another."""
    cluster = world(partitions=2, records=(10, 10))
    node = cluster.node("a")
    cluster.run(100)
    rebuilder = node.engine.rebuilder
    end = cluster.kafka.log(cluster.place(1)).end

    class Failing(Shelf):
        def find(self, wanted, *, log, timeout_ms):
            write(cluster, b"live", 1)
            log.poll(0)
            raise CoordinationError("no answer")

    rebuilder.sources = (Failing(),)
    cluster.kafka.truncate(cluster.place(0), end=1, leader=1)
    node.step()  # detects the truncation
    node.step()  # looks for a state
    assert node.observer.named("log_poll_failed")
    assert node.engine.context.replicas[1].world.next_offset == end + 1
    rebuilder.sources = ()
    cluster.run(100)
    assert node.engine.failure is None
    assert node.engine.context.rebuilding == set()


# --- Soft state in a file, and damage to it ---


@pytest.fixture(scope="module")
def soft():
    cluster = world()
    owning(cluster)
    write(cluster, b"undecodable")
    found = fold(cluster).soft
    found.offered_ms[Key("g", "t", 0)] = (7, 1_000)
    return found


def test_soft_state_survives_encoding(soft):
    assert soft.members
    assert soft.notes
    assert soft.counters
    assert soft.undecodable
    assert soft.offered_ms
    assert soft_from_bytes(freeze_soft(soft)()) == soft
    assert soft_from_bytes(freeze_soft(SoftState())()) == SoftState()


def test_plans_survive_encoding():
    log = Log(level=2)
    log.append(planned(0, ("c2", 0, (1,)), count=2))
    log.append(planned(1, count=2, number=1))
    plans = log.state.soft.plans
    assert plans["g"].is_whole
    assert soft_from_bytes(freeze_soft(log.state.soft)()).plans == plans


def test_soft_state_of_another_version_is_ignored(soft):
    value = freeze_soft(soft)()
    assert value[1] == 1
    assert soft_from_bytes(value[:1] + b"\x02" + value[2:]) == SoftState()


@given(st.binary(max_size=64))
def test_invalid_bytes_decode_to_empty_soft_state(value):
    assert soft_from_bytes(value) == SoftState()


def test_truncated_bytes_decode_to_empty_soft_state(soft):
    value = freeze_soft(soft)()
    for size in range(len(value)):
        assert soft_from_bytes(value[:size]) == SoftState()


def test_an_invalid_member_is_skipped(soft):
    value = freeze_soft(soft)()
    (member,) = soft.members.values()
    name = member.record.client_id.encode()
    assert name in value
    frame = value.index(b"\x01\x80\x01\x00")  # frame, type 128 as two bytes, version
    bad = value[:frame] + b"\x07" + value[frame + 1 :]
    assert soft_from_bytes(bad).members == {}
    assert soft_from_bytes(bad).notes == soft.notes


def test_notes_of_pauses_are_kept_beside_the_soft_state(soft):
    notes = {
        ("g", b"o" * 16): PauseNote(
            *("deploy", "ada", 5, "admin", b"i" * 16), last=By("other", None)
        ),
        ("h", b"p" * 16): PauseNote(),
    }
    value = freeze_soft(soft, notes)()
    assert notes_from_bytes(value) == notes
    assert soft_from_bytes(value) == soft
    assert notes_from_bytes(value[:-1]) == {}
    # Written before pauses, offers and plans were kept.
    older = msgspec.msgpack.encode(msgspec.msgpack.decode(value)[:-3])
    less = attrs.evolve(soft, offered_ms={}, plans={})
    assert (notes_from_bytes(older), soft_from_bytes(older)) == ({}, less)
