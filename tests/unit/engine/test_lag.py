"""The log ends of a session's partitions."""

import pytest
from enginekit import AMO, KEY, H, held_by, owning, spec, world

from kafka_marshal.engine import lag
from kafka_marshal.errors import CoordinationError
from kafka_marshal.protocol.types import Key, TopicPartition


@pytest.fixture
def cluster():
    return world(records=[10])


def test_lag_is_the_log_end_minus_the_position(cluster):
    node = owning(cluster)
    cluster.run_until(lambda: node.session.lag_of(KEY) == 10, H)
    polled = node.consumer.poll(0, 4)
    assert node.session.lag_of(KEY) == 10  # handed out is not processed
    node.consumer.commit(polled[TopicPartition("t", 0)])
    assert node.session.lag_of(KEY) == 6
    cluster.kafka.produce(TopicPartition("t", 0), b"x")
    cluster.run_until(lambda: node.session.lag_of(KEY) == 7, H)


def test_at_most_once_lag_counts_from_the_granted_offsets(cluster):
    node = owning(cluster, delivery=AMO, most=4)
    cluster.run_until(lambda: node.session.lag_of(KEY) == 10, H)
    node.consumer.poll(0)
    cluster.run_until(lambda: node.session.lag_of(KEY) == 6, H)


def test_a_key_has_no_lag_before_its_log_end_is_known(cluster):
    node = cluster.node("a", spec=spec())
    assert node.session.lag_of(KEY) is None
    node.data.cut = True
    cluster.run(2 * H)
    assert node.session.lag_of(KEY) is None
    assert len(node.observer.named("lag_unknown")) == 1
    node.data.cut = False
    cluster.run_until(lambda: node.session.lag_of(KEY) == 10, 2 * H)


def test_a_failed_look_up_keeps_the_last_lag(cluster):
    node = owning(cluster)
    cluster.run_until(lambda: node.session.lag_of(KEY) == 10, H)
    node.data.cut = True
    cluster.kafka.produce(TopicPartition("t", 0), b"x")
    cluster.run(2 * H)
    assert node.session.lag_of(KEY) == 10


def test_log_ends_are_requested_in_parts_one_at_a_time(cluster, monkeypatch):
    monkeypatch.setattr(lag, "PARTITIONS_MAX", 2)
    cluster = world(records=[3] * 5)
    asked = []
    node = cluster.node("a", spec=spec())
    plain = node.data.ends

    def ends(partitions, timeout_ms, **rest):
        asked.append(len(partitions))
        return plain(partitions, timeout_ms, **rest)

    node.data.ends = ends
    cluster.run_until(held_by(node, 5), H)
    asked.clear()
    cluster.run_until(
        lambda: all(node.session.lag_of(Key("g", "t", n)) == 3 for n in range(5)), 2 * H
    )
    assert max(asked) == 2
    node.background.is_held = True
    asked.clear()
    cluster.run(3 * H)
    assert node.background.waiting_count == 1


def test_answer_count_grows_once_per_look_up_of_all_log_ends(monkeypatch):
    """All held partitions are judged each time that it grows."""
    monkeypatch.setattr(lag, "PARTITIONS_MAX", 2)
    cluster = world(records=[3] * 5)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 5), H)
    lags = node.session._held.lags
    cluster.run(2 * H)
    counted = lags.answer_count
    cluster.run(2 * H)
    assert 5 <= lags.answer_count - counted <= 7, "three times an interval"
    plain, calls = node.data.ends, []

    def ends(*given, **rest):
        calls.append(given)
        if len(calls) % 2 == 0:
            raise CoordinationError("no answer")
        return plain(*given, **rest)

    monkeypatch.setattr(node.data, "ends", ends)
    counted = lags.answer_count
    cluster.run(2 * H)
    assert 5 <= lags.answer_count - counted <= 7, "some ends were looked up"
    node.data.cut = True
    cluster.run(H)
    counted = lags.answer_count
    cluster.run(2 * H)
    assert lags.answer_count == counted
