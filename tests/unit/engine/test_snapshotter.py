"""When states are saved; saving blocks nothing."""

import pytest
from enginekit import fold, owning, pause_record, world, write
from keptkit import Shelf
from logkit import H
from msgspec.structs import replace

from kafka_marshal.engine.kept_states import freeze_soft
from kafka_marshal.engine.snapshotter import (
    ENTRIES_MAX,
    ENTRIES_MIN,
    PERIOD_MS,
    Snapshotter,
    capture,
)
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.snapshot import Frozen, digest, from_bytes
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.types import Key


class Store(Shelf):
    """Stores states, or fails."""

    def __init__(self):
        super().__init__()
        self.saved = []
        self.error = None

    def save(self, state):
        if self.error is not None:
            raise self.error
        self.saved.append(state)


@pytest.fixture
def cluster():
    return world(partitions=2, records=(10, 10))


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def node(cluster, store):
    made = cluster.node("a")
    made.step()
    made.engine.saver = Snapshotter(made.engine.context, store)
    for t in range(2):
        made.engine.saver.record(t, made.engine.context.replicas[t].world.next_offset)
    return made


def fill(cluster, count, partition=0):
    for _ in range(count):
        write(cluster, b"noise", partition)


def test_a_captured_state_is_complete():
    cluster = world()
    owning(cluster)
    state = fold(cluster, 0)
    made = capture(state, source="here")
    assert from_bytes(made.state) == state
    assert (made.partition, made.offset) == (0, state.next_offset)
    assert (made.leader_epoch, made.digest) == (0, digest(state))
    assert made.soft == freeze_soft(state.soft)()
    assert not made.is_in_log


def test_few_entries_are_not_saved(cluster, node, store):
    fill(cluster, ENTRIES_MIN // 2)
    cluster.run(3 * PERIOD_MS, step_ms=5_000)
    node.engine.saver.save_all()
    assert store.saved == []


def test_at_most_once_grants_are_always_saved(cluster, node, store):
    for t in range(2):
        fill(cluster, 1, t)
    node.step()
    replica = node.engine.context.replicas[1]
    known = KeyState(
        owner=None,
        epoch=1,
        epoch_leader_epoch=0,
        renewed_ms=0,
        heartbeat_interval_ms=H,
        active_ms=0,
        granted=7,
    )
    replica.world.keys[Key("g", "t", 9)] = known
    node.engine.saver.save_all()
    assert [each.partition for each in store.saved] == [1]


def test_many_entries_are_saved_after_a_period(cluster, node, store):
    fill(cluster, ENTRIES_MIN)
    cluster.run(PERIOD_MS - 10_000, step_ms=5_000)
    assert store.saved == []
    cluster.run(20_000, step_ms=5_000)
    assert [each.partition for each in store.saved] == [0]
    assert store.saved[0].offset >= ENTRIES_MIN
    cluster.run(PERIOD_MS, step_ms=5_000)
    assert len(store.saved) == 1


def test_very_many_entries_are_saved_at_once(cluster, node, store):
    node.log.poll_entries_max = 3 * ENTRIES_MAX
    for t in range(2):
        node.engine.saver.record(t, -ENTRIES_MAX)
    node.step()
    cluster.run(20)
    assert [each.partition for each in store.saved] == [0]
    cluster.run(2_000, step_ms=500)
    assert [each.partition for each in store.saved] == [0, 1]


def test_states_are_saved_in_the_background_one_at_a_time(cluster, node, store):
    node.background.is_held = True
    for t in range(2):
        node.engine.saver.record(t, -ENTRIES_MAX)
    cluster.run(5_000, step_ms=500)
    assert store.saved == []
    node.background.is_held = False
    node.background.run_waiting()
    cluster.run(5_000, step_ms=500)
    assert [each.partition for each in store.saved] == [0, 1]


def test_states_are_encoded_in_the_background(cluster, node, store, monkeypatch):
    """They are encoded without the lock, and lack entries folded meanwhile."""
    encoded = []
    plain = Frozen.pieces

    def pieces(self):
        encoded.append(self)
        return plain(self)

    monkeypatch.setattr(Frozen, "pieces", pieces)
    node.background.is_held = True
    node.engine.saver.record(0, -ENTRIES_MAX)
    cluster.run(2_000, step_ms=500)
    assert encoded == []
    before = fold(cluster, 0).next_offset
    fill(cluster, 3)
    cluster.run(500)
    node.background.is_held = False
    node.background.run_waiting()
    (frozen,) = encoded
    (kept,) = store.saved
    assert kept.offset <= before
    assert kept.digest == digest(from_bytes(kept.state)) == frozen.digest()


def test_save_all_saves_states_with_many_new_entries(cluster, node, store):
    fill(cluster, ENTRIES_MIN, 1)
    node.step()
    node.engine.saver.save_all()
    assert [each.partition for each in store.saved] == [1]


def test_a_full_disk_is_reported_once(cluster, node, store):
    store.error = OSError("full")
    for _ in range(3):
        for t in range(2):
            node.engine.saver.record(t, -ENTRIES_MAX)
        cluster.run(5_000, step_ms=500)
    for t in range(2):
        node.engine.saver.record(t, -ENTRIES_MAX)
    node.engine.saver.save_all()
    assert len(node.observer.named("snapshot_failed")) == 1
    assert node.engine.failure is None


def test_the_state_of_an_unfinished_refold_is_not_saved(cluster, node, store):
    node.engine.context.rebuilding.add(0)
    for t in range(2):
        node.engine.saver.record(t, -ENTRIES_MAX)
    cluster.run(5_000, step_ms=500)
    node.engine.saver.save_all()
    assert {each.partition for each in store.saved} == {1}


def test_a_kept_state_is_not_replaced_before_its_losses_are_reported(
    cluster, node, store
):
    fill(cluster, ENTRIES_MAX // 2)
    fill(cluster, ENTRIES_MAX // 2, 1)
    node.engine.context.unreported.add(0)
    cluster.run(2 * PERIOD_MS, step_ms=5_000)
    node.engine.saver.save_all()
    assert {state.partition for state in store.saved} == {1}
    node.engine.context.unreported.clear()
    node.engine.saver.save_all()
    assert {state.partition for state in store.saved} == {0, 1}


def test_without_a_store_nothing_is_saved(node):
    saver = Snapshotter(node.engine.context, None)
    saver.drive(10**9)
    saver.save_all()


def test_the_notes_of_a_pause_outlast_a_restart(cluster, node, store):
    record = pause_record(cluster, cluster.clock.wall_ms() + 9 * H)
    record = replace(record, reason="deploy", tags=person_to_tags("ada"))
    write(cluster, record)
    fill(cluster, ENTRIES_MIN)
    cluster.run(50)
    before = node.engine.context.pauses("g")
    node.engine.saver.save_all()
    cluster.crash(node)
    again = cluster.node("b", sources=(Shelf(*store.saved),))
    cluster.run(50)
    assert again.observer.named("restored")
    assert again.engine.context.pauses("g") == before
    assert (before[0]["person"], before[0]["reason"]) == ("ada", "deploy")
    assert before[0]["begin_ms"] is not None
