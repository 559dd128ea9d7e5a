"""Positions mirrored to a group's committed offsets (PROTOCOL 5.7)."""

import itertools

import msgspec
import pytest
from enginekit import T0, H, held_by, of, owning, spec, world, write

from kafka_marshal.engine.mirror import MIRROR_RETRY_MS, Mirror
from kafka_marshal.engine.placement import Placement
from kafka_marshal.errors import CoordinationError
from kafka_marshal.protocol.records import Heartbeat
from kafka_marshal.protocol.types import TopicPartition


@pytest.fixture
def cluster():
    return world(records=[10])


def commit(node, count):
    node.consumer.commit(node.consumer.poll(0, count)[T0])


def mirrored(cluster):
    return cluster.kafka.groups.get("g", {}).get(T0)


def follows(cluster, position):
    cluster.run_until(lambda: mirrored(cluster) == position, 2 * H)


def test_positions_are_mirrored_to_committed_offsets(cluster):
    node = owning(cluster)
    for position in (4, 7):
        commit(node, position - (mirrored(cluster) or 0))
        follows(cluster, position)
    assert node.observer.named("mirror_drift") == []


def test_positions_are_mirrored_thrice_in_an_interval_at_most(cluster, monkeypatch):
    """However often positions move, for example by flushes."""
    node, times = owning(cluster), []
    commit(node, 1)
    follows(cluster, 1)
    plain = node.data.commit

    def noted(*args, **options):
        times.append(cluster.clock.now_ms())
        return plain(*args, **options)

    monkeypatch.setattr(node.data, "commit", noted)
    beat = of(cluster, "a", Heartbeat)[-1].record
    for position in range(2, 11):
        write(cluster, msgspec.structs.replace(beat, position=position))
        cluster.run(H // 5)
    assert len(times) >= 3
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) >= H // 3


def test_foreign_commits_are_reported_and_overwritten(cluster):
    node = owning(cluster)
    commit(node, 4)
    follows(cluster, 4)
    cluster.kafka.groups["g"][T0] = 1
    commit(node, 3)
    follows(cluster, 7)
    cluster.run(H)
    (drift,) = node.observer.named("mirror_drift")
    assert dict(drift.fields) == {"partition": T0, "expected": 4, "found": 1}


def test_a_commit_of_the_position_in_the_log_is_not_reported_as_drift(cluster):
    """For example by an admin that has set the position."""
    node = owning(cluster)
    commit(node, 4)
    follows(cluster, 4)
    cluster.kafka.groups["g"][T0] = 7
    commit(node, 3)
    cluster.run(H)
    assert mirrored(cluster) == 7
    assert node.observer.named("mirror_drift") == []


def test_an_offset_that_kafka_has_dropped_is_not_reported_as_drift(cluster):
    """As with a topic that is deleted, and created again."""
    node = owning(cluster)
    commit(node, 4)
    follows(cluster, 4)
    del cluster.kafka.groups["g"][T0]
    commit(node, 3)
    cluster.run(H)
    assert mirrored(cluster) == 7
    assert node.observer.named("mirror_drift") == []


@pytest.mark.parametrize("lands", [True, False])
def test_a_failed_write_is_not_reported_as_drift(cluster, monkeypatch, lands):
    """The failed write may have succeeded: then the offset found is its own."""
    node = owning(cluster)
    commit(node, 4)
    follows(cluster, 4)
    cluster.run(H)
    write = node.data.commit

    def fail(*args, **options):
        if lands:
            write(*args, **options)
        raise CoordinationError("no answer")

    monkeypatch.setattr(node.data, "commit", fail)
    commit(node, 3)
    cluster.run_until(lambda: node.observer.named("mirror_failed"), 2 * H)
    assert mirrored(cluster) == (7 if lands else 4)
    monkeypatch.undo()
    commit(node, 1)
    cluster.run_until(lambda: mirrored(cluster) == 8, 2 * MIRROR_RETRY_MS)
    cluster.run(H)
    assert node.observer.named("mirror_drift") == []


def test_a_stopped_process_mirrors_no_position_of_a_lost_claim(cluster):
    """It reads one entry at a time, and its own last position comes first."""
    node = owning(cluster)
    commit(node, 4)
    follows(cluster, 4)
    commit(node, 3)
    node.session.beat_now()
    cluster.nodes.remove(node)
    other = cluster.node("b", spec=spec())
    cluster.run_until(held_by(other, 1), 4 * H)
    commit(other, 2)
    follows(cluster, 9)
    node.log.poll_entries_max = 1
    cluster.nodes.append(node)
    cluster.run_until(lambda: not node.held, H)
    cluster.run(H)
    assert mirrored(cluster) == 9
    commit(other, 1)
    follows(cluster, 10)
    for each in (node, other):
        assert each.observer.named("mirror_drift") == []


def test_positions_are_compared_only_after_new_entries(cluster, monkeypatch):
    node = owning(cluster)
    commit(node, 4)
    follows(cluster, 4)
    cluster.run(H)
    mirror, compared = node.session._mirror, []
    plain = node.engine.context.placement.partition_of
    partition_of = lambda key: compared.append(key) or plain(key)  # noqa: E731
    monkeypatch.setattr(Placement, "partition_of", lambda _, key: partition_of(key))
    for _ in range(5):
        assert not mirror.is_behind
    assert len(compared) <= 1, "nothing was read"
    commit(node, 3)
    node.session.beat_now()
    cluster.run(20)
    assert mirror.is_behind


def test_comparing_positions_takes_at_most_a_tenth_of_the_time(cluster, monkeypatch):
    node = owning(cluster)
    looks = []

    def wanted(self):
        looks.append(cluster.clock.now_ms())
        cluster.clock.advance(50)
        return {}

    monkeypatch.setattr(Mirror, "_wanted", wanted)
    cluster.run(4 * H)
    gaps = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert len(gaps) > 3
    assert min(gaps) >= 450
    assert node.held


def test_a_position_in_a_deleted_topic_keeps_no_other_from_being_mirrored(
    cluster, monkeypatch
):
    """It moved after the last write, and Kafka refuses to commit it."""
    cluster.fill("u", [10])
    node = cluster.node("a", spec=spec("t", "u", metadata_refresh_ms=H // 10))
    cluster.run_until(held_by(node, 2), 4 * H)
    found = node.consumer.poll(0, 20)
    u0 = TopicPartition("u", 0)
    node.consumer.commit(found[u0][:3])
    at = cluster.kafka.groups.setdefault("g", {})
    cluster.run_until(lambda: at.get(u0) == 3, 2 * H)
    node.consumer.commit(found)
    cluster.kafka.delete_topic("t")
    cluster.run_until(lambda: node.observer.named("topic_gone"), 4 * H)
    cluster.run_until(lambda: at[u0] == 10, H)
    assert at[T0] == 0
    cluster.run_until(lambda: len(node.session._mirror._claims) == 1, 2 * H)
    monkeypatch.setattr(node.data, "commit", None)  # it is not tried again
    cluster.run(2 * MIRROR_RETRY_MS)
    assert node.observer.named("mirror_failed") == []
