"""New partitions wait for the ones that had their record keys (PROTOCOL 9.10)."""

import pytest
from enginekit import AMO, H, fold, held_by, lines, spec, world, write
from logkit import growth

from kafka_marshal.engine import acquirer, key_rows
from kafka_marshal.engine.awaited_ends import RETRY_MS
from kafka_marshal.engine.context import GROWTH, awaited
from kafka_marshal.protocol.growths import Source
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.records import ClaimingPartition, ReleasingPartition
from kafka_marshal.protocol.types import Key, TopicPartition

REFRESH_MS = H // 4
FAR = next(
    key
    for key in (Key("g", f"t{n}", 0) for n in range(9))
    if place_of(key, partition_count=2) == 1
)


def grow(cluster, *, ends=None, old=2, new=4):
    """Announce a growth of t, add its partitions, and write the old ends if given."""
    write(cluster, growth(new, old))
    cluster.kafka.add_partitions("t", new - old)
    if ends is not None:
        write(cluster, growth(new, old, ends=ends))


def numbers(node):
    return sorted(key.partition for key in node.held)


def started(cluster, **rest):
    node = cluster.node("a", spec=spec(metadata_refresh_ms=REFRESH_MS, **rest))
    cluster.run_until(held_by(node, 2), 2 * H)
    return node


def claimed(cluster):
    """Return the partitions that were ever claimed, in order."""
    return [
        line.record.partition
        for line in lines(cluster)
        if isinstance(line.record, ClaimingPartition)
    ]


def process(cluster, node, *, until_ms):
    """Poll and commit every 100 ms for a while."""
    for _ in range(until_ms // 100):
        node.consumer.poll(timeout_ms=0)
        node.consumer.commit()
        cluster.run(100)


@pytest.mark.parametrize("delivery", [pytest.param(None, id="alo"), AMO])
def test_a_new_partition_is_claimed_once_its_source_is_processed_to_its_end(delivery):
    cluster = world(records=[4, 4])
    rest = {} if delivery is None else {"delivery": delivery}
    node = started(cluster, **rest)
    grow(cluster)
    cluster.run(3 * H)
    assert numbers(node) == [0, 1]
    write(cluster, growth(4, 2, ends=(4, 6)))
    process(cluster, node, until_ms=2 * H)
    # Partition 0 has 4 records, so its end is passed; 1 waits for two more.
    assert numbers(node) == [0, 1, 2]
    assert 3 not in claimed(cluster)
    for _ in range(2):
        cluster.kafka.produce(TopicPartition("t", 1), b"more")
    process(cluster, node, until_ms=2 * H)
    assert numbers(node) == [0, 1, 2, 3]


def test_waiting_partitions_are_reported_with_their_sources_on_changes():
    cluster = world(records=[4, 4])
    node = started(cluster)
    grow(cluster, ends=(4, 4))
    cluster.run(H)
    events = node.observer.named("partitions_waiting")
    assert events[0].fields == {
        "group": "g",
        "count": 2,
        "partitions": ["t-2 for 0", "t-3 for 1"],
    }
    process(cluster, node, until_ms=2 * H)
    assert node.observer.named("partitions_waiting")[-1].fields["count"] == 0
    assert not node.observer.named("partitions_uncovered")


def test_a_member_that_starts_after_the_growth_waits_too():
    cluster = world(records=[4, 4])
    grow(cluster, ends=(4, 4))
    node = cluster.node("b", spec=spec())
    cluster.run(2 * H)
    assert numbers(node) == [0, 1]
    process(cluster, node, until_ms=3 * H)
    assert numbers(node) == [0, 1, 2, 3]


def test_a_partition_with_a_position_does_not_wait_for_its_source():
    cluster = world(records=[4, 4, 4, 4])
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 4), 2 * H)
    process(cluster, node, until_ms=H)
    write(cluster, growth(4, 2))
    cluster.run(H)
    assert numbers(node) == [0, 1, 2, 3]
    context = node.engine.context
    assert awaited(context, Key("g", "t", 2), topic_id=None) is None
    assert awaited(context, Key("h", "t", 2), topic_id=None) == Source(
        Key("h", "t", 0), None
    )
    assert awaited(context, Key("h", "t", 0), topic_id=None) is None


def test_the_start_of_a_claim_releases_a_partition_that_must_wait(monkeypatch):
    """As if the claim preceded the growth in the log: the start checks again."""
    cluster = world(records=[4, 4])
    started(cluster)
    for module in (acquirer, key_rows):
        monkeypatch.setattr(module, "awaited", lambda *_, **__: None)
    grow(cluster, ends=(9, 9))
    cluster.run(2 * H)
    releases = [
        line.record
        for line in lines(cluster)
        if isinstance(line.record, ReleasingPartition)
    ]
    assert {each.partition for each in releases} == {2, 3}
    assert {each.reason for each in releases} == {GROWTH}
    assert all(each.position is None for each in releases)
    keys = fold(cluster).keys
    assert all(keys[Key("g", "t", n)].position is None for n in (2, 3))


def elsewhere():
    """Return a cluster, and a node that has won a key judged in partition 1."""
    cluster = world(2, records=[4], topic=FAR.topic)
    node = cluster.node("a", spec=spec(FAR.topic))
    node.background.is_held = True
    cluster.run_until(held_by(node, 1), 2 * H)
    return cluster, node


def test_a_key_judged_in_partition_0_starts_without_a_log_end():
    cluster = world(records=[4])
    node = cluster.node("a", spec=spec())
    node.background.is_held = True
    cluster.run_until(held_by(node, 1), 2 * H)
    node.engine.context.ports.log.end_offsets = None
    node.background.is_held = False
    node.background.run_waiting()
    cluster.run(100)
    (holding,) = node.session.holdings.values()
    assert holding.progress is not None


def test_a_start_waits_until_partition_0_is_read_to_its_end():
    cluster, node = elsewhere()
    context = node.engine.context
    node.background.is_held = False
    ends = context.ports.log.end_offsets
    ahead = ends(100)[0] + 1
    context.ports.log.end_offsets = lambda _timeout_ms, _partitions=None: {0: ahead}
    node.background.run_waiting()
    cluster.run(H // 8)
    (holding,) = node.session.holdings.values()
    assert holding.lookup is not None
    assert holding.progress is None
    write(cluster, growth(4, 2))  # partition 0 reaches that end
    cluster.run(H)
    assert holding.progress is not None


def test_a_log_end_from_a_lagging_leader_is_looked_up_again():
    cluster, node = elsewhere()
    log = node.engine.context.ports.log
    ends, answers = log.end_offsets, iter([{0: 0}])
    log.end_offsets = lambda timeout_ms: next(answers, None) or ends(timeout_ms)
    node.background.is_held = False
    node.background.run_waiting()
    cluster.run(H)
    (event,) = node.observer.named("start_lookup_failed")
    assert "an end below what was read" in str(event.fields["error"])
    (holding,) = node.session.holdings.values()
    assert holding.progress is not None


@pytest.mark.parametrize("is_read", [True, False])
def test_a_log_end_that_a_truncation_removed_is_looked_up_again(is_read):
    """Partition 0 lost its last entries after the look-up: it may never get so far.

    If they had not been read, no error reports the truncation.
    """
    cluster, node = elsewhere()
    for number in range(2, 9):
        write(cluster, growth(2 * number, number, topic=f"u{number}"))
    cluster.run(100)
    log = node.engine.context.ports.log
    ends = log.end_offsets
    log.end_offsets = lambda timeout_ms: {0: ends(timeout_ms)[0] + 100}
    node.background.is_held = False
    node.background.run_waiting()
    cluster.run(100)
    (holding,) = node.session.holdings.values()
    assert holding.progress is None
    log.end_offsets = ends
    if is_read:
        cluster.kafka.truncate(cluster.place(0), end=1, leader=1)
    cluster.run(RETRY_MS + H)
    assert holding.progress is not None
