"""New partitions, topics of a pattern, and deleted topics, over a whole log."""

import itertools
import re

import pytest
from enginekit import ALO, AMO, KEY, T0, H, held_by, of, spec, world

from kafka_marshal.engine import topics
from kafka_marshal.engine.topics import (
    RECHECK_MS,
    TopicCallback,
    TopicWatch,
    matching_topics,
)
from kafka_marshal.errors import CoordinationError, PositionError
from kafka_marshal.protocol.records import ClaimingPartition, Member
from kafka_marshal.protocol.types import Key, TopicPartition

REFRESH_MS = 1_000


def orders(name):
    return re.fullmatch(r"orders-.*", name) is not None


def following(cluster, **rest):
    """Start a node with the pattern orders-..., before any topic exists."""
    return cluster.node(
        "a",
        spec=spec(pattern="orders-.*", metadata_refresh_ms=REFRESH_MS, **rest),
    )


def held_topics(node):
    return {key.topic for key in node.held}


def test_new_partitions_are_claimed_after_a_metadata_refresh():
    cluster = world(records=[1, 1])
    node = cluster.node("a", spec=spec(metadata_refresh_ms=REFRESH_MS))
    cluster.run_until(held_by(node, 2), H)
    cluster.kafka.add_partitions("t", 3)
    took_ms = cluster.run_until(held_by(node, 5), 2 * H)
    assert took_ms <= REFRESH_MS + H // 10 + 100
    (event,) = node.observer.named("topic_changed")
    assert event.fields["partition_count"] == 5


def test_new_topics_of_a_pattern_are_claimed_and_announced():
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


@pytest.mark.parametrize(("is_doubted", "count"), [(False, 2), (True, 1)])
def test_a_deleted_topic_of_a_pattern_is_dropped_and_reported(
    monkeypatch, is_doubted, count
):
    """One look-up is enough if a fetch did not find the topic either."""
    cluster = world(topic="orders-a", records=[1])
    cluster.fill("orders-b", [1])
    node = following(cluster)
    cluster.run_until(held_by(node, 2), H)
    cluster.kafka.delete_topic("orders-b")
    if is_doubted:
        node.session.subscriptions[0].doubt("orders-b")
    monkeypatch.setattr(TopicWatch, "doubt", lambda *_: False)
    look_ups, look_up = [], node.data.topics

    def counted(timeout_ms):
        look_ups.append(cluster.clock.now_ms())
        return look_up(timeout_ms)

    node.data.topics = counted
    cluster.run_until(lambda: held_topics(node) == {"orders-a"}, 4 * H)
    assert len(look_ups) == count
    assert look_ups[-1] - look_ups[0] == (count - 1) * RECHECK_MS
    (event,) = node.observer.named("topic_gone")
    assert event.fields == {"topic": "orders-b"}
    (ending,) = [e.fields["ending"] for e in node.observer.named("claim_ended")]
    assert (ending.reason, ending.was_lost) == ("topic_gone", False)
    cluster.fill("orders-b", [1])
    cluster.run_until(held_by(node, 2), 4 * H)


def test_a_topic_missing_in_one_look_up_stays():
    cluster = world(topic="orders-a", records=[1])
    node = following(cluster)
    cluster.run_until(held_by(node, 1), H)
    names, answers = cluster.kafka.topic_names(), iter([[]])
    node.data.topics = lambda _ms: next(answers, names)
    cluster.run(6 * H)
    assert node.observer.named("topic_gone") == []
    assert len(node.held) == 1


def test_a_failed_look_up_changes_nothing():
    cluster = world(topic="orders-a", records=[1])
    node = following(cluster)
    cluster.run_until(held_by(node, 1), H)

    def fail(_ms):
        raise CoordinationError("no answer")

    node.data.topics = fail
    cluster.run(6 * H)
    assert len(node.held) == 1


def test_a_topic_with_a_claimed_key_does_not_join_the_pattern():
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


def test_matching_topics_describes_only_matches():
    cluster = world(topic="orders-a", records=[1])
    cluster.fill("orders-b", [1, 1])
    data = cluster.kafka.data_log()
    found = matching_topics(data, orders, timeout_ms=100)
    assert {name: info.partition_count for name, info in found.items()} == {
        "orders-a": 1,
        "orders-b": 2,
    }
    assert matching_topics(data, lambda _name: False, timeout_ms=100) == {}


def test_a_named_topic_that_is_deleted_is_reported_once_and_waited_for():
    cluster = world(records=[1, 1])
    node = cluster.node("a", spec=spec(metadata_refresh_ms=REFRESH_MS))
    cluster.run_until(held_by(node, 2), H)
    cluster.kafka.delete_topic("t")
    cluster.run_until(lambda: not node.held, 4 * REFRESH_MS)
    cluster.run(4 * H)
    assert not node.session.holdings
    (event,) = node.observer.named("topic_gone")
    assert event.fields == {"topic": "t"}
    endings = [e.fields["ending"] for e in node.observer.named("claim_ended")]
    assert {(each.reason, each.was_lost) for each in endings} == {("topic_gone", False)}
    assert node.observer.named("lag_unknown") == []
    cluster.fill("t", [1, 1, 1])
    cluster.run_until(held_by(node, 3), 4 * REFRESH_MS)
    assert len(node.observer.named("topic_recreated")) == 1


def test_a_deleted_topic_is_detected_by_its_lag():
    cluster = world(records=[1])
    node = cluster.node("a", spec=spec(metadata_refresh_ms=100 * H))
    cluster.run_until(held_by(node, 1), H)
    cluster.kafka.delete_topic("t")
    cluster.run_until(lambda: not node.held, H)
    assert node.observer.named("lag_unknown") == []
    assert len(node.observer.named("topic_gone")) == 1


def test_a_topic_missing_for_a_while_continues_at_its_position():
    cluster = world(records=[5])
    node = cluster.node("a", spec=spec(metadata_refresh_ms=REFRESH_MS))
    cluster.run_until(held_by(node, 1), H)
    assert taken(cluster, node, 5) == [b"0", b"1", b"2", b"3", b"4"]
    node.consumer.commit()
    describe, node.data.describe = node.data.describe, lambda _topics, _ms: {}
    cluster.run_until(lambda: not node.held, 4 * REFRESH_MS)
    node.data.describe = describe
    cluster.run_until(held_by(node, 1), 4 * REFRESH_MS)
    assert node.observer.named("topic_recreated") == []
    cluster.kafka.produce(T0, b"5")
    assert taken(cluster, node, 1) == [b"5"]


# --- topics that are deleted and created again ---


def taken(cluster, node, count, *, until=None):
    """Poll until enough values were handed out, or a condition is true."""
    found = []

    def is_there():
        for records in node.consumer.poll(0).values():
            found.extend(record.value for record in records)
        return len(found) >= count if until is None else until()

    cluster.run_until(is_there, 6 * H)
    return found


def recreate(cluster, count):
    """Delete the topic and create it again with more records than it had."""
    cluster.kafka.recreate_topic("t", 1)
    for number in range(count):
        cluster.kafka.produce(T0, b"new %d" % number)


NEW = [b"new %d" % number for number in range(60)]


@pytest.mark.parametrize("refresh_ms", [REFRESH_MS, 100 * H])
@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_a_recreated_topic_is_consumed_from_its_beginning(delivery, refresh_ms):
    cluster = world(records=[20])
    node = cluster.node(
        "a", spec=spec(delivery=delivery, metadata_refresh_ms=refresh_ms)
    )
    assert len(taken(cluster, node, 20)) == 20
    node.consumer.poll(0)
    first = node.held[KEY].claim.token
    recreate(cluster, 60)
    got = taken(cluster, node, 60)
    assert got == NEW
    assert node.held[KEY].claim.token > first
    cluster.run(2 * H)
    assert node.consumer.poll(0) == {}
    (event,) = node.observer.named("topic_recreated")
    assert event.fields == {"topic": "t", "partition_count": 1}
    assert node.observer.named("position_jumped") == []
    claims = of(cluster, "a", ClaimingPartition)
    assert claims[-1].record.expected_epoch == claims[0].offset
    assert claims[-1].record.topic_id == cluster.kafka.topic("t").topic_id


def test_grants_of_a_deleted_topic_are_reported_and_not_handed_out():
    cluster = world(records=[20])
    node = cluster.node(
        "a", spec=spec(delivery=AMO, most=5, metadata_refresh_ms=REFRESH_MS)
    )
    got = taken(cluster, node, 5)
    assert node.consumer.poll(0) == {}  # which requests the next ones
    cluster.run_until(lambda: node.held[KEY].progress.granted is not None, H)
    recreate(cluster, 60)
    cluster.run_until(lambda: node.observer.named("topic_recreated"), 4 * REFRESH_MS)
    (event,) = node.observer.named("grant_lost")
    assert event.fields["ranges"] == [(5, 9)]
    got += taken(cluster, node, 60)
    assert got == [b"0", b"1", b"2", b"3", b"4", *NEW]


def test_a_position_beyond_a_recreated_topic_is_no_error():
    """The id is compared first: the range belongs to another topic."""
    cluster = world(records=[20])
    node = cluster.node("a", spec=spec(metadata_refresh_ms=100 * H))
    taken(cluster, node, 20)
    node.consumer.commit()
    cluster.run(H)
    cluster.crash(node)
    cluster.kafka.recreate_topic("t", 1)
    cluster.kafka.produce(T0, b"new")
    life = cluster.node("a", spec=spec(metadata_refresh_ms=100 * H), lives=node.lives)
    assert taken(cluster, life, 1) == [b"new"]
    assert life.observer.named("position_out_of_range") == []
    effects = [line.transition.effect for line in of(cluster, "a", ClaimingPartition)]
    assert effects == ["claimed", "resumed", "claimed"]


def test_a_range_of_the_new_topic_does_not_judge_a_position_in_the_old_one():
    cluster = world(records=[20])
    node = cluster.node("a", spec=spec(metadata_refresh_ms=100 * H))
    taken(cluster, node, 20)
    reader = node.consumer._dispatcher._reader
    poll, refused = reader.poll, []

    def outside(timeout_ms, most):
        if refused:
            return poll(timeout_ms, most)
        refused.append(True)
        raise PositionError(
            "outside", requested=20, log_start=0, log_end=1, partition=T0
        )

    reader.poll = outside
    recreate(cluster, 60)
    assert taken(cluster, node, 60) == NEW
    assert refused
    assert node.observer.named("position_out_of_range") == []


def test_a_lagging_broker_does_not_restore_an_earlier_topic():
    cluster = world(records=[20])
    node = cluster.node("a", spec=spec(metadata_refresh_ms=REFRESH_MS))
    taken(cluster, node, 20)
    data = cluster.kafka.data_log()
    earlier = data.describe(["t"], 10)
    recreate(cluster, 60)
    assert taken(cluster, node, 60) == NEW
    token = node.held[KEY].claim.token
    describe = node.data.describe
    answers = iter([earlier, earlier, {}, earlier])
    node.data.describe = lambda topics, ms: next(answers, None) or describe(topics, ms)
    cluster.run(6 * REFRESH_MS)
    assert node.held[KEY].claim.token == token
    assert len(node.observer.named("topic_recreated")) == 1


def left_behind(cluster):
    """Return a member that knows an earlier topic; the later one has no owner."""
    nodes = [
        cluster.node(name, spec=spec(metadata_refresh_ms=100 * H)) for name in "ab"
    ]
    cluster.run_until(lambda: any(node.held for node in nodes), 3 * H)
    late, owner = sorted(nodes, key=lambda node: len(node.held))
    cluster.run(H)
    recreate(cluster, 5)
    assert taken(cluster, owner, 5) == NEW[:5]
    owner.leave()
    cluster.run_until(lambda: owner.has_left, H)
    cluster.crash(owner)
    return late


def refusals(cluster, client_id):
    lines = of(cluster, client_id, ClaimingPartition)
    return [each.transition.reason for each in lines if each.transition.reason]


def test_a_member_that_missed_a_recreation_checks_before_it_claims():
    """The log has retired its topic: a claim would be refused."""
    cluster = world(records=[1])
    late = left_behind(cluster)
    cluster.run_until(held_by(late, 1), H)
    assert refusals(cluster, late.owner.client_id) == []
    assert len(taken(cluster, late, 5)) == 5


def test_a_member_with_a_lagging_broker_claims_nothing():
    cluster = world(records=[1])
    earlier = cluster.kafka.data_log().describe(["t"], 10)
    late = left_behind(cluster)
    describe, asked = late.data.describe, []

    def lagging(topics, timeout_ms):
        asked.append(cluster.clock.now_ms())
        return earlier

    late.data.describe = lagging
    cluster.run(2 * H)
    assert not late.held
    assert refusals(cluster, late.owner.client_id) == []
    looks = 2 * H // topics.RECHECK_MS
    assert looks - 2 <= len(asked) <= looks + 1
    late.data.describe = describe
    cluster.run_until(held_by(late, 1), H)


def test_an_earlier_topic_is_not_claimed_though_nobody_ever_claimed_it():
    """Its claim would be accepted, and claims of the new topic never again."""
    cluster = world(records=[1])
    late = cluster.node("late", spec=spec(metadata_refresh_ms=100 * H))
    late.cut(is_cut=True)
    recreate(cluster, 5)
    owner = cluster.node("owner", spec=spec(metadata_refresh_ms=100 * H))
    assert taken(cluster, owner, 5) == NEW[:5]
    owner.leave()
    cluster.run_until(lambda: owner.has_left, H)
    cluster.crash(owner)
    late.cut(is_cut=False)
    assert taken(cluster, late, 5) == NEW[:5]
    (claimed,) = of(cluster, "late", ClaimingPartition)
    assert claimed.record.topic_id == cluster.kafka.topic("t").topic_id


def test_a_topic_id_seen_since_the_last_claim_needs_one_look_up():
    """A member that ends its claims of an earlier topic has just looked it up."""
    cluster = world(records=[1])
    node = cluster.node("a", spec=spec(metadata_refresh_ms=100 * H))
    cluster.run_until(held_by(node, 1), H)
    cluster.run(H)
    describe, asked = node.data.describe, []

    def counted(names, timeout_ms):
        asked.append(names)
        return describe(names, timeout_ms)

    node.data.describe = counted
    recreate(cluster, 5)
    assert taken(cluster, node, 5) == NEW[:5]
    assert len([names for names in asked if names == ["t"]]) == 1


def test_a_doubted_topic_that_is_unchanged_continues():
    cluster = world(records=[1])
    node = cluster.node("a", spec=spec(metadata_refresh_ms=100 * H))
    cluster.run_until(held_by(node, 1), H)
    token = node.held[KEY].claim.token
    (sub,) = node.session.subscriptions
    sub.doubt("t")
    assert sub.all_keys() == []
    assert sub.has_doubts
    cluster.run_until(lambda: not sub.has_doubts, H)
    assert sub.all_keys() == [KEY]
    cluster.run(H)
    assert node.held[KEY].claim.token == token


def test_unknown_topics_cannot_be_doubted():
    cluster = world(records=[1])
    node = cluster.node("a", spec=spec())
    (sub,) = node.session.subscriptions
    sub.doubt("other")
    assert not sub.has_doubts


# --- Whole topics are reported once for each change ---


def test_a_topic_callback_reports_only_changes():
    reported = []
    callback = TopicCallback(reported.append)
    t0, t1, u0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)
    for held in ([], [t1], [t0], [t0, t1], [t1, t0], [t0, u0], [u0], [], []):
        callback.follow(held)
    assert reported == [{"t"}, {"t", "u"}, {"u"}, set()]


def test_a_consumer_reports_its_topics_and_none_after_the_close():
    cluster = world(records=[1, 1])
    cluster.fill("u", [1])
    reported = []
    topical = spec("t", "u", policy="topic", on_topics=reported.append)
    node = cluster.node("a", spec=topical)
    cluster.run_until(held_by(node, 3), H)
    for _ in range(20):
        node.consumer.poll(0)
        cluster.run(20)
    assert reported[-1] == {"t", "u"}
    node.consumer.close(timeout_ms=0)
    assert reported[-1] == set()
    assert all(a != b for a, b in itertools.pairwise(reported))
