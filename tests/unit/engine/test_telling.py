"""Whole topics are told once for each change (acceptance L06)."""

import itertools

from enginekit import H, held_by, wish, world

from kafka_marshal.engine.handout import ConsumerOptions
from kafka_marshal.engine.telling import TopicTeller
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.testing.node import Wish


def test_only_changes_are_told():
    told = []
    teller = TopicTeller(told.append)
    t0, t1, u0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)
    for held in ([], [t1], [t0], [t0, t1], [t1, t0], [t0, u0], [u0], [], []):
        teller.follow(held)
    assert told == [{"t"}, {"t", "u"}, {"u"}, set()]


def test_a_consumer_is_told_and_told_the_end():
    cluster = world(records=[1, 1])
    cluster.fill("u", [1])
    told = []
    options = ConsumerOptions(on_topics=told.append)
    node = cluster.node("a", wish=Wish(("t", "u"), policy="topic", options=options))
    cluster.run_until(held_by(node, 3), H)
    for _ in range(20):
        node.consumer.poll(0)
        cluster.run(20)
    assert told[-1] == {"t", "u"}
    node.consumer.close(timeout_ms=0)
    assert told[-1] == set()
    assert all(a != b for a, b in itertools.pairwise(told))


def test_only_whole_topics_are_told_of():
    assert wish().options.on_topics is None
