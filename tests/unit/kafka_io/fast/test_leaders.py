"""When leaders are asked for, and how seldom."""

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafka_marshal.kafka_io.fast import leaders as module
from kafka_marshal.kafka_io.fast.leaders import LeaderSearch


class World:
    """A clock, and a handle that answers too late, as a busy broker does."""

    def __init__(self):
        self.now_s = 1_000.0
        self.asked = []

    def list_topics(self, topic, timeout):
        assert timeout <= 0.01
        self.asked.append(topic)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


@pytest.fixture
def world():
    return World()


@pytest.fixture
def search(world):
    return LeaderSearch(lambda: world.now_s)


def run(search, world, *, topics=("t",), span_s):
    """Poll every 10 ms for so long."""
    for _ in range(round(span_s / 0.01)):
        search.go_on(world, topics)
        world.now_s += 0.01


def test_nobody_is_asked_without_a_loss(search, world):
    run(search, world, span_s=60)
    assert world.asked == []
    assert search.patience_s(5) == 5


def test_asked_at_once_and_then_four_times_a_second(search, world):
    search.begin()
    search.go_on(world, ("t",))
    assert world.asked == ["t"]
    run(search, world, span_s=1)
    assert len(world.asked) == 4
    assert search.patience_s(5) == module.ASK_INTERVAL_S
    assert search.patience_s(0.01) == 0.01


def test_it_ends_by_itself(search, world):
    search.begin()
    run(search, world, span_s=module.ASKED_FOR_S + 600)
    assert len(world.asked) <= module.ASKED_FOR_S / module.ASK_INTERVAL_S
    assert search.patience_s(5) == 5


def test_another_loss_goes_on_with_it_and_asks_no_faster(search, world):
    for _ in range(100):
        search.begin()
        run(search, world, span_s=1)
    assert 0.8 * 400 <= len(world.asked) <= 400


def test_of_many_topics_all_are_asked_about_in_turn(search, world):
    topics = [f"t{number}" for number in range(2 * module.TOPICS_AT_ONCE + 1)]
    search.begin()
    search.go_on(world, topics)
    assert world.asked == topics[: module.TOPICS_AT_ONCE]
    run(search, world, topics=topics, span_s=1)
    assert world.asked[: len(topics)] == topics
    assert world.asked[len(topics)] == topics[0]
