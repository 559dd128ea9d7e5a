"""New partitions, topics of a pattern, and what is deleted, over a whole log."""

import re

import pytest
from enginekit import H, held_by, of, wish, world

from kafka_marshal.engine import topics
from kafka_marshal.engine.topics import matching_topics
from kafka_marshal.errors import CoordinationError
from kafka_marshal.protocol.records import Member
from kafka_marshal.protocol.types import Key

REFRESH_MS = 1_000


def orders(name):
    return re.fullmatch(r"orders-.*", name) is not None


def following(cluster, **rest):
    """Start a node that follows every topic named orders-... from none on."""
    names = [n for n in cluster.kafka.topic_names() if orders(n)]
    node = cluster.node(
        "a", wish=wish(*names, matches=orders, refresh_ms=REFRESH_MS, **rest)
    )
    if not names:
        sub = node.session.subscriptions[0]
        for topic in list(sub.topics):
            sub.drop_topic(topic)
    return node


def held_topics(node):
    return {key.topic for key in node.held}


def test_new_partitions_join_live():
    cluster = world(records=[1, 1])
    node = cluster.node("a", wish=wish(refresh_ms=REFRESH_MS))
    cluster.run_until(held_by(node, 2), H)
    cluster.kafka.add_partitions("t", 3)
    took_ms = cluster.run_until(held_by(node, 5), 2 * H)
    assert took_ms <= REFRESH_MS + H // 10 + 100
    (event,) = node.observer.named("topic_changed")
    assert event.fields["partition_count"] == 5


def test_new_topics_of_a_pattern_join_live():
    cluster = world(topic="orders-a", records=[1])
    node = following(cluster)
    cluster.run_until(lambda: held_topics(node) == {"orders-a"}, H)
    cluster.fill("orders-b", [1, 1])
    cluster.fill("invoices", [1])
    cluster.run_until(held_by(node, 3), 2 * H)
    assert held_topics(node) == {"orders-a", "orders-b"}
    cluster.run(H)
    assert of(cluster, "a", Member)[-1].record.topics == ("orders-a", "orders-b")


def test_a_pattern_that_matches_nothing_waits_for_topics():
    cluster = world()
    node = following(cluster)
    cluster.run(H)
    assert not node.held
    cluster.fill("orders-a", [1])
    cluster.run_until(held_by(node, 1), 2 * H)


def test_deleted_topics_leave_after_two_looks():
    cluster = world(topic="orders-a", records=[1])
    cluster.fill("orders-b", [1])
    node = following(cluster)
    cluster.run_until(held_by(node, 2), H)
    cluster.kafka.delete_topic("orders-b")
    cluster.run_until(lambda: held_topics(node) == {"orders-a"}, 4 * H)
    (event,) = node.observer.named("topic_gone")
    assert event.fields == {"topic": "orders-b"}
    (ending,) = [e.fields["ending"] for e in node.observer.named("claim_ended")]
    assert (ending.reason, ending.was_lost) == ("topic_gone", False)
    cluster.fill("orders-b", [1])
    cluster.run_until(held_by(node, 2), 4 * H)


def test_a_topic_that_one_look_misses_stays():
    cluster = world(topic="orders-a", records=[1])
    node = following(cluster)
    cluster.run_until(held_by(node, 1), H)
    names, answers = cluster.kafka.topic_names(), iter([[]])
    node.data.topics = lambda _ms: next(answers, names)
    cluster.run(6 * H)
    assert node.observer.named("topic_gone") == []
    assert len(node.held) == 1


def test_a_look_that_fails_changes_nothing():
    cluster = world(topic="orders-a", records=[1])
    node = following(cluster)
    cluster.run_until(held_by(node, 1), H)

    def fail(_ms):
        raise CoordinationError("no answer")

    node.data.topics = fail
    cluster.run(6 * H)
    assert len(node.held) == 1


def test_what_is_consumed_otherwise_does_not_join():
    cluster = world(topic="orders-a", records=[1])
    node = following(cluster)
    cluster.run_until(held_by(node, 1), H)
    node.session.want(Key("g", "orders-b", 0))
    cluster.fill("orders-b", [1, 1])
    cluster.run(3 * H)
    assert set(node.held) == {Key("g", "orders-a", 0), Key("g", "orders-b", 0)}


def test_a_pattern_takes_no_more_topics_than_can_be_announced(monkeypatch):
    monkeypatch.setattr(topics, "TOPICS_MAX", 2)
    cluster = world(topic="orders-a", records=[1])
    node = following(cluster)
    cluster.run_until(held_by(node, 1), H)
    for name in "bcd":
        cluster.fill(f"orders-{name}", [1])
    cluster.run(4 * H)
    assert held_topics(node) == {"orders-a", "orders-b"}
    assert len(node.observer.named("topics_limit")) == 1


def test_matching_topics_asks_about_matches_only():
    cluster = world(topic="orders-a", records=[1])
    cluster.fill("orders-b", [1, 1])
    data = cluster.kafka.data_log()
    found = matching_topics(data, orders, timeout_ms=100)
    assert {name: info.partition_count for name, info in found.items()} == {
        "orders-a": 1,
        "orders-b": 2,
    }
    assert matching_topics(data, lambda _name: False, timeout_ms=100) == {}


@pytest.mark.parametrize("count", [1, 3])
def test_named_topics_never_leave_by_absence(count):
    cluster = world(records=[1] * count)
    node = cluster.node("a", wish=wish(refresh_ms=REFRESH_MS))
    cluster.run_until(held_by(node, count), H)
    node.data.describe = lambda _topics, _ms: {}
    cluster.run(6 * H)
    assert len(node.held) == count
