"""Ranges that a planner begins and commits, over whole nodes in memory."""

import os

import pytest
from enginekit import (
    ALO,
    AMO,
    KEY,
    T0,
    H,
    Stepping,
    fail_engine,
    fold,
    held_by,
    spec,
    world,
    write,
)

from kafka_marshal.engine import StartRule
from kafka_marshal.engine.replica import LastClaim
from kafka_marshal.errors import (
    ClaimLost,
    DeadlineExceeded,
    InvalidTransition,
    LogTruncated,
)
from kafka_marshal.protocol.claiming import grant_secret
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.types import Token, TopicPartition
from kafka_marshal.ranges import RangeConsumer

# The last claims in the log, by the timeout of the query.
LOG = {1_000: {T0: LastClaim("b", 3)}}


def planning(cluster, client_id="a", **rest):
    """Return a node and its ranges; it claims from the next step on."""
    node = cluster.node(client_id, spec=spec(**rest))
    node.engine.changed = Stepping(cluster)
    (subscription,) = node.session.subscriptions
    ranges = RangeConsumer(
        node.engine,
        node.session,
        subscription=subscription,
        last_claims=LOG.__getitem__,
    )
    return node, ranges


def winning(cluster, client_id="a", **rest):
    """Return a node, its ranges and the token of the one partition it holds."""
    node, ranges = planning(cluster, client_id, **rest)
    cluster.run_until(lambda: T0 in ranges.held(), 4 * H)
    return node, ranges, ranges.held()[T0].token


def position_of(ranges):
    return ranges.held()[T0].position


def test_partitions_of_a_topic_in_doubt_are_listed(cluster):
    """The planner waits for them; without them it would have no work."""
    node, ranges = planning(cluster)
    (subscription,) = node.session.subscriptions
    with node.engine.lock:
        subscription.doubt("t")
        assert subscription.all_keys() == []
    assert ranges.partitions() == [T0]


def test_a_range_of_a_held_partition_is_begun_and_committed(cluster):
    node, ranges, token = winning(cluster)
    held = ranges.held()[T0]
    assert (held.position, held.uncommitted_count, held.follows) == (0, 0, None)
    assert (held.owner, held.epoch) == (node.owner, token.offset)
    known = fold(cluster).keys[KEY]
    secret = grant_secret(known.resume_hash, KEY, epoch=known.epoch).hex()
    assert (held.secret, ranges.secrets()) == (secret, {T0: secret})
    assert secret not in repr(held)
    ranges.begin(T0, token, first=0, end=4)
    assert ranges.held()[T0].uncommitted_count == 4
    ranges.commit(T0, token, end=4)
    assert (position_of(ranges), ranges.held()[T0].uncommitted_count) == (4, 0)
    ranges.flush(H)
    assert fold(cluster).keys[KEY].position == 4
    ranges.commit(T0, token, end=6)
    ranges.send()
    cluster.run(60)
    assert fold(cluster).keys[KEY].position == 6, "not only with the next beat"


def test_a_won_partition_without_a_position_is_pending(cluster):
    node, ranges = planning(cluster)
    node.data.cut = True
    cluster.run_until(ranges.pending, 4 * H)
    cluster.run(H)
    assert ranges.pending() == {T0}
    assert not ranges.held()
    node.data.cut = False
    cluster.run_until(ranges.held, 4 * H)
    assert not ranges.pending()


def test_a_commit_confirms_only_ranges_below_its_end(cluster):
    _, ranges, token = winning(cluster)
    ranges.begin(T0, token, first=0, end=4)
    ranges.begin(T0, token, first=4, end=8)
    ranges.commit(T0, token, end=4)
    assert (position_of(ranges), ranges.held()[T0].uncommitted_count) == (4, 4)
    with pytest.raises(InvalidTransition, match="twice"):
        ranges.begin(T0, token, first=5, end=9)


def test_repeating_a_committed_range_does_not_move_the_position_back(cluster):
    _, ranges, token = winning(cluster)
    ranges.commit(T0, token, end=7)
    ranges.begin(T0, token, first=2, end=5)
    ranges.commit(T0, token, end=5)
    assert position_of(ranges) == 7
    ranges.begin(T0, token, first=2, end=9)
    assert ranges.held()[T0].uncommitted_count == 2
    ranges.commit(T0, token, end=9)
    assert position_of(ranges) == 9


def test_a_returned_range_can_be_begun_again(cluster):
    _, ranges, token = winning(cluster)
    ranges.begin(T0, token, first=0, end=4)
    ranges.give_back(T0, token)
    assert (position_of(ranges), ranges.held()[T0].uncommitted_count) == (0, 0)
    ranges.begin(T0, token, first=0, end=2)


def leaving(ranges):
    """Return the partitions that are held and must not be processed further."""
    return ranges.tokens().keys() - ranges.held(is_poll=False).keys()


def test_a_partition_to_release_waits_for_its_uncommitted_range():
    cluster = world(records=(10, 10))
    node, ranges = planning(cluster)
    cluster.run_until(lambda: len(ranges.held()) == 2, 4 * H)
    for partition, held in ranges.held().items():
        ranges.begin(partition, held.token, first=0, end=5)
    tokens = {partition: held.token for partition, held in ranges.held().items()}
    cluster.node("b", spec=spec())
    cluster.run_until(lambda: leaving(ranges), 4 * H)
    (going,) = leaving(ranges)
    assert set(ranges.held()) == set(tokens) - {going}
    assert ranges.tokens() == tokens
    assert ranges.partitions() == sorted(tokens)
    with pytest.raises(ClaimLost) as caught:
        ranges.begin(going, tokens[going], first=5, end=6)
    assert caught.value.reason == "lease_expiring"
    ranges.commit(going, tokens[going], end=5)
    assert node.session.leaving_count == 1  # at once, not in the next round
    assert ranges.wait_for_change(H)
    assert not leaving(ranges)
    assert len(node.held) == 1
    with pytest.raises(ClaimLost, match="no longer held") as caught:
        ranges.commit(going, tokens[going], end=6)
    assert caught.value.reason == "stale_token"


def test_an_unfinished_range_delays_a_release_only_for_a_time():
    cluster = world(records=(10, 10))
    node, ranges = planning(cluster)
    cluster.run_until(lambda: len(ranges.held()) == 2, 4 * H)
    for partition, held in ranges.held().items():
        ranges.begin(partition, held.token, first=0, end=5)
    cluster.node("b", spec=spec())
    cluster.run_until(lambda: leaving(ranges), 4 * H)
    ranges.held()
    cluster.run_until(held_by(node, 1), 2 * H)


def test_a_claim_with_an_expired_lease_stays_lost(cluster):
    node, ranges, token = winning(cluster)
    ranges.begin(T0, token, first=0, end=5)
    node.cut(is_cut=True)
    cluster.run_until(lambda: not ranges.held(), 2 * H)
    with pytest.raises(ClaimLost) as caught:
        ranges.begin(T0, token, first=5, end=6)
    assert caught.value.reason == "lease_expiring"
    node.session.holdings[KEY].claim.lease = type(
        node.session.holdings[KEY].claim.lease
    )(0, 0)
    with pytest.raises(ClaimLost):
        ranges.commit(T0, token, end=5)
    assert not node.held
    node.cut(is_cut=False)
    cluster.run_until(lambda: T0 in ranges.held(), 4 * H)
    held = ranges.held()[T0]
    assert (held.position, held.follows) == (0, token.offset)
    assert held.token > token


def test_a_claim_names_the_claim_that_it_follows(cluster):
    node, ranges, token = winning(cluster)
    cluster.crash(node)
    other, _, between = winning(cluster, "b")
    cluster.crash(other)
    _, ranges, _ = winning(cluster)
    assert ranges.held()[T0].follows == between.offset != token.offset


def test_at_most_once_grants_to_other_processes_move_the_position(cluster):
    node, ranges, token = winning(cluster, delivery=AMO)
    assert position_of(ranges) == 0
    ranges.begin(T0, token, first=0, end=4)
    assert ranges.held()[T0].uncommitted_count == 4
    grantee = b"somebody else..."
    owner = node.owner
    write(
        cluster,
        ClaimingMessages(
            client_id=owner.client_id,
            group_id="g",
            incarnation=owner.incarnation,
            seq=2**40,
            topic="t",
            partition=0,
            epoch=token.offset,
            grantee=grantee,
            first=0,
            proposed_last_offset=3,
        ),
    )
    cluster.run(100)
    assert position_of(ranges) == 4
    ranges.commit(T0, token, end=4)
    assert ranges.held()[T0].uncommitted_count == 0
    ranges.begin(T0, token, first=4, end=6)
    ranges.give_back(T0, token)
    assert ranges.held()[T0].uncommitted_count == 0


@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_a_start_offset_applies_to_a_partition_without_position(delivery):
    cluster = world(records=(10, 10))
    node, ranges = planning(cluster, delivery=delivery)
    (subscription,) = node.session.subscriptions
    subscription.start_rule = StartRule(offset_reset="none", offsets={T0: 6})
    with pytest.raises(Exception, match="no position"):
        cluster.run_until(lambda: len(ranges.held()) == 2, 4 * H)
    cluster = world()
    node, ranges = planning(cluster, delivery=delivery)
    (subscription,) = node.session.subscriptions
    subscription.start_rule = StartRule(offset_reset="none", offsets={T0: 6})
    cluster.run_until(lambda: T0 in ranges.held(), 4 * H)
    assert position_of(ranges) == 6


def test_waiting_for_a_change_ends_at_its_timeout(cluster):
    _, ranges, _ = winning(cluster)
    assert not ranges.wait_for_change(100)


def test_last_claims_are_read_from_the_log(cluster):
    _, ranges = planning(cluster)
    assert ranges.last_claims(1_000) == {T0: LastClaim("b", 3)}


def test_flush_raises_if_positions_are_not_appended_in_time(cluster):
    node, ranges, token = winning(cluster)
    ranges.commit(T0, token, end=3)
    node.cut(is_cut=True)
    with pytest.raises(DeadlineExceeded):
        ranges.flush(200)


def test_closing_releases_at_the_position(cluster):
    _, ranges, token = winning(cluster)
    with ranges:
        ranges.begin(T0, token, first=0, end=5)
        ranges.commit(T0, token, end=3)
        ranges.stop()
        assert not ranges.is_closed
    known = fold(cluster).keys[KEY]
    assert (known.owner, known.position) == (None, 3)
    assert (ranges.is_closed, ranges.is_close_confirmed) == (True, True)
    ranges.close()
    with pytest.raises(InvalidTransition, match="closed"):
        ranges.held()


def test_closing_with_an_unreachable_log_is_reported(cluster):
    node, ranges, _ = winning(cluster)
    node.cut(is_cut=True)
    ranges.close(timeout_ms=200)
    assert not ranges.is_close_confirmed
    assert node.observer.named("close_unconfirmed")


def test_ranges_raise_the_failure_of_the_engine(cluster):
    node, ranges, _ = winning(cluster)
    fail_engine(node)
    with pytest.raises(LogTruncated):
        ranges.wait_for_change(H)
    with pytest.raises(LogTruncated):
        ranges.held()


def test_a_forked_child_cannot_use_ranges(cluster, monkeypatch):
    _, ranges, _ = winning(cluster)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(InvalidTransition, match="parent process"):
        ranges.held()
    ranges.close()
    assert not ranges.is_closed


def test_a_commit_for_a_partition_not_held_is_refused(cluster):
    _, ranges, token = winning(cluster)
    with pytest.raises(ClaimLost):
        ranges.commit(TopicPartition("t", 7), token, end=1)


def test_a_last_claim_is_compared_by_its_token():
    """An equal epoch with another era is another claim."""
    claim = LastClaim("b", 3, token=Token(2, 0, 3))
    assert claim.is_of(Token(2, 0, 3))
    assert not claim.is_of(Token(1, 0, 3))
    assert not claim.is_of(Token(2, 0, 4))
    assert LastClaim("b", 3).is_of(Token(1, 0, 3)), "its token is not known"
