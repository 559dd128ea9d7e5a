"""What a query plans and confirms: restarts, takeovers and losses, in memory.

`Query` imitates Spark: it keeps offsets in a checkpoint, plans a batch, reads it, and
confirms it by planning the next one.
"""

import pytest
from enginekit import AMO, H, Stepping, fold, of, pause_for, spec, world, write
from positionkit import TIMEOUT_MS, operation
from positionkit import plan as new_positions

from kafka_marshal.engine.replica import LastClaim
from kafka_marshal.errors import ClaimLost, CoordinationError, PositionError
from kafka_marshal.protocol.records import ClaimingMessages, HandoffOffer
from kafka_marshal.protocol.types import Key, Token, TopicPartition
from kafka_marshal.ranges import RangeConsumer
from kafka_marshal.spark.claims import Claims, Rules
from kafka_marshal.spark.planning import Limit, Mark

ANY = Limit()
T = [TopicPartition("t", number) for number in range(4)]
TOKEN = Token(1, 0, 5)


class Logs:
    """Data logs of a cluster in memory."""

    def __init__(self, node):
        self.data = node.data

    def partitions(self):
        found = self.data.describe(self.data.topics(1_000), 1_000)
        return [
            TopicPartition(topic, number)
            for topic, info in found.items()
            for number in range(info.partition_count)
        ]

    def starts(self, partitions):
        found = self.data.ranges(list(partitions), 1_000)
        return {place: there.start for place, there in found.items()}

    def ends(self, partitions):
        return self.data.ends(list(partitions), 1_000)

    def ranges(self, partitions):
        return self.data.ranges(list(partitions), 1_000)

    def topic_ids(self, topics):
        found = self.data.describe(sorted(topics), 1_000)
        return {name: info.topic_id.hex() for name, info in found.items()}


class Query:
    """One process of a query; its checkpoint outlives it."""

    def __init__(self, cluster, checkpoint, name="q", **rules):
        self.cluster = cluster
        self.checkpoint = checkpoint
        is_amo = rules.pop("is_amo", False)
        topics = rules.pop("topics", ())
        wanted = spec(*topics, delivery=AMO) if is_amo else spec(*topics)
        self.node = cluster.node(name, spec=wanted)
        self.node.engine.changed = Stepping(cluster)
        (subscription,) = self.node.session.subscriptions
        self.ranges = RangeConsumer(
            self.node.engine,
            self.node.session,
            subscription=subscription,
            last_claims=self.last_claims,
        )
        settings = {
            "is_at_most_once": is_amo,
            "fails_on_data_loss": True,
            "max_delay_ms": 10_000,
            "outcome_ms": 3 * H,
        }
        self.claims = Claims(
            ranges=self.ranges,
            logs=Logs(self.node),
            rules=Rules(**(settings | rules)),
            now=lambda: cluster.clock.now_ms() / 1000,
        )

    def last_claims(self, _timeout_ms):
        ours = self.node.session.claimant.owner
        return {
            key.topic_partition: LastClaim(
                known.owner and known.owner.client_id,
                known.epoch,
                may_be_ours=known.owner == ours,
                token=fold(self.cluster).token(key),
            )
            for key, known in fold(self.cluster).keys.items()
        }

    def leaving(self):
        """Return the partitions that are held and in no further batch."""
        return self.ranges.tokens().keys() - self.ranges.held(is_poll=False).keys()

    def plan(self, limit=ANY):
        """Append the next batch to the checkpoint; return False if there is none."""
        start = self.checkpoint[-1] if self.checkpoint else {}
        end = self.claims.latest(start, limit)
        if end == start:
            return False
        self.checkpoint.append(end)
        return True

    def read(self):
        """Return the offsets of the last batch in the checkpoint, by partition."""
        start = self.checkpoint[-2] if len(self.checkpoint) > 1 else {}
        return {
            part.planned.partition.partition: list(
                range(part.planned.first, part.planned.end)
            )
            for part in self.claims.parts(start, self.checkpoint[-1])
        }

    def batch(self, limit=ANY):
        return self.read() if self.plan(limit) else None

    def crash(self):
        self.cluster.crash(self.node)

    def stop(self):
        self.ranges.close()


class LateRanges:
    """Ranges of a process that reads its claims back late."""

    def __init__(self, ranges, cluster, delay_ms):
        self._ranges = ranges
        self._clock, self._until_ms = cluster.clock, cluster.clock.now_ms() + delay_ms

    def __getattr__(self, name):
        is_early = self._clock.now_ms() < self._until_ms
        if is_early and name in {"held", "tokens", "pending"}:
            return dict
        return getattr(self._ranges, name)


def position(cluster, number=0):
    return fold(cluster).keys[Key("g", "t", number)].position


def other_works(cluster, upto, name="other"):
    """Let a consumer claim t-0, commit at least up to an offset, and leave."""
    node = cluster.node(name, spec=spec(most=1))
    cluster.run_until(lambda: node.held, 6 * H)
    cluster.run(40)
    while (node.consumer.committed(T[0]) or 0) < upto:
        node.consumer.poll(0)
        node.consumer.commit()
        cluster.run(20)
    node.leave()
    cluster.run_until(lambda: node.has_left, H)
    cluster.crash(node)


# --- planning


def test_a_batch_is_confirmed_when_the_next_one_is_planned():
    cluster = world(records=(10, 4))
    query = Query(cluster, [])
    assert query.batch(Limit(most=7)) == {0: [0, 1, 2, 3, 4], 1: [0, 1]}
    assert position(cluster) == 0
    assert query.batch(Limit(most=7)) == {0: [5, 6, 7, 8, 9], 1: [2, 3]}
    assert query.ranges.held()[T[0]].position == 5
    assert query.batch() is None
    # Asking for more confirmed the second batch, too.
    query.stop()
    assert (position(cluster, 0), position(cluster, 1)) == (10, 4)


def test_a_batch_missing_from_the_checkpoint_is_planned_again():
    query = Query(world(), [])
    assert query.plan()
    query.checkpoint.clear()
    assert query.batch(Limit(most=3)) == {0: [0, 1, 2]}
    assert query.ranges.held()[T[0]].uncommitted_count == 3


def test_a_small_backlog_waits_for_a_limited_time():
    cluster = world(records=(4,))
    query = Query(cluster, [])
    assert query.batch(Limit(least=5)) == {0: [0, 1, 2, 3]}, "the first batch of a run"
    cluster.kafka.produce(T[0], b"4")
    assert query.batch(Limit(least=5)) is None
    cluster.run(10_000)
    assert query.batch(Limit(least=5)) == {0: [4]}
    cluster.kafka.produce(T[0], b"5")
    assert query.batch(Limit(least=5)) is None
    for _ in range(4):
        cluster.kafka.produce(T[0], b"6")
    assert query.batch(Limit(least=5)) == {0: [5, 6, 7, 8, 9]}


def test_a_fixed_target_excludes_records_that_arrive_later():
    cluster = world(records=(4,))
    query = Query(cluster, [])
    query.claims.fix_target()
    cluster.kafka.produce(T[0], b"later")
    assert query.batch(Limit(least=50)) == {0: [0, 1, 2, 3]}
    assert query.batch() is None


def test_a_fixed_target_covers_only_partitions_held_at_first():
    cluster = world(records=(4, 4))
    other = cluster.node("b", spec=spec(claims_max=1))
    cluster.run_until(lambda: len(other.held) == 1, 4 * H)
    query = Query(cluster, [])
    query.claims.fix_target()
    (mine,) = query.batch(Limit(most=2))
    other.leave()
    cluster.run_until(lambda: len(query.ranges.held()) == 2, 4 * H)
    assert query.batch() == {mine: [2, 3]}
    assert query.batch() is None, "what was gained later is for the next run"


def test_a_query_at_its_claims_max_does_not_wait_for_partitions():
    cluster = world(records=(4, 4))
    query = Query(cluster, [], claims_max=1)
    (subscription,) = query.node.session.subscriptions
    subscription.claims_max = 1
    began_ms = cluster.clock.now_ms()
    assert len(query.batch()) == 1
    assert cluster.clock.now_ms() - began_ms < H


def test_a_query_that_starts_without_partitions_reports_no_partition_held(caplog):
    """With availableNow the query would end as if there were nothing to read."""
    cluster = world(records=(4, 4))
    other = cluster.node("other", spec=spec())
    cluster.run_until(lambda: len(other.held) == 2, 4 * H)
    query = Query(cluster, [], outcome_ms=0)
    assert query.batch() is None
    assert query.batch() is None
    found = "no_partition_held: the query holds 0 of 2 partitions"
    (reported,) = [r for r in caplog.records if found in r.message]
    assert "marshal groups describe" in reported.message
    assert "another source of this query with the same group" in reported.message


def test_a_query_reports_each_loss_of_all_partitions_once(caplog):
    """Spark shows such a query as one that waits for records."""
    cluster = world(records=(4, 4))
    query = Query(cluster, [])
    assert query.batch()
    pause_for(cluster, 10 * H)
    for _ in range(3):
        cluster.run(2 * H)
        query.plan()
    assert caplog.text.count("no_partition_held: the query holds 0 of 2") == 1
    cluster.run_until(query.ranges.held, 20 * H)
    query.plan()
    pause_for(cluster, 10 * H, op=b"2" * 16, seq=2)
    for _ in range(3):
        cluster.run(2 * H)
        query.plan()
    assert caplog.text.count("no_partition_held: the query holds 0 of 2") == 2


def test_no_partition_held_is_not_reported_by_a_query_that_holds_one(caplog):
    query = Query(world(), [])
    query.batch()
    assert "no_partition_held" not in caplog.text


def test_a_batch_that_begins_while_its_partitions_are_drained_keeps_them():
    """As when the query's other source joins the group between plan and read."""
    cluster = world(records=(6, 6))
    query = Query(cluster, [])
    assert query.plan()
    other = cluster.node("other", spec=spec())
    cluster.run_until(query.leaving, 6 * H)
    assert query.read() == {0: [*range(6)], 1: [*range(6)]}
    cluster.run(3 * H)
    assert len(query.ranges.tokens()) == 2, "its tasks check their claims"
    query.plan()
    cluster.run_until(lambda: len(other.held) == 1, 2 * H)


def test_queries_share_a_topic_and_one_takes_over_after_the_other_stops():
    cluster = world(records=(6, 6))
    one = Query(cluster, [], "one")
    two = Query(cluster, [], "two")
    cluster.run_until(lambda: one.ranges.held() and two.ranges.held(), 4 * H)
    found = {**one.batch(Limit(most=1)), **two.batch(Limit(most=1))}
    assert found == {0: [0], 1: [0]}
    two.batch()
    two.stop()
    cluster.crash(two.node)
    cluster.run_until(lambda: len(one.ranges.held()) == 2, 4 * H)
    late = one.batch()
    (own,) = {0, 1} - {next(iter(two.checkpoint[0])).partition}
    assert late == {own: [1, 2, 3, 4, 5], 1 - own: [1, 2, 3, 4, 5]}, (
        "the batch that nobody said was committed is done again"
    )


# --- restarts


def test_a_restart_repeats_an_unfinished_batch_exactly():
    cluster, checkpoint = world(), []
    query = Query(cluster, checkpoint)
    query.batch(Limit(most=4))
    query.plan(Limit(most=3))
    query.crash()
    query = Query(cluster, checkpoint)
    assert query.read() == {0: [4, 5, 6]}, "although more has come since"
    assert query.batch() == {0: [7, 8, 9]}


def test_a_restart_continues_after_offsets_committed_but_not_confirmed():
    cluster, checkpoint = world(), []
    query = Query(cluster, checkpoint)
    query.batch(Limit(most=4))  # committed by Spark; the driver died at once
    query.crash()
    assert position(cluster) == 0
    query = Query(cluster, checkpoint)
    assert query.batch() == {0: [4, 5, 6, 7, 8, 9]}
    cluster.run(H)
    assert position(cluster) == 4


def test_a_restart_does_not_repeat_a_range_that_another_owner_consumed():
    cluster, checkpoint = world(), []
    query = Query(cluster, checkpoint)
    query.plan(Limit(most=4))
    query.crash()
    other_works(cluster, 7)
    query = Query(cluster, checkpoint)
    assert query.read() == {}
    assert query.batch() == {0: [7, 8, 9]}


def test_offsets_not_consumed_by_an_interim_owner_are_in_the_next_batch():
    """To trust the checkpoint would lose records: its last range was not processed."""
    cluster, checkpoint = world(), []
    query = Query(cluster, checkpoint)
    query.plan(Limit(most=6))
    query.crash()
    other_works(cluster, 2)
    query = Query(cluster, checkpoint)
    assert query.read() == {}
    query.crash()  # after the empty batch was committed, before the next was planned
    query = Query(cluster, checkpoint)
    assert query.batch() == {0: [2, 3, 4, 5, 6, 7, 8, 9]}


def test_a_range_held_by_another_owner_is_dropped_at_once():
    cluster, checkpoint = world(), []
    query = Query(cluster, checkpoint)
    query.plan()
    query.crash()
    other = cluster.node("other", spec=spec())
    cluster.run_until(lambda: other.held, 6 * H)
    query = Query(cluster, checkpoint)
    assert query.read() == {}
    assert other.held


def a_run_ends_before_its_first_batch(cluster):
    query = Query(cluster, [])
    cluster.run_until(query.ranges.held, 6 * H)
    query.crash()


def an_admin_sets_the_position(cluster):
    plan = new_positions(2, count=1)
    done = operation(cluster, wanted=plan).run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert done.outcome == "committed"


@pytest.mark.parametrize(
    ("between", "position"),
    [
        (lambda cluster: other_works(cluster, 5), 5),
        (a_run_ends_before_its_first_batch, 0),
        (an_admin_sets_the_position, 2),
    ],
    ids=["another member", "a run of the query", "a set position"],
)
def test_a_dropped_range_is_reported_with_all_that_may_follow(
    between, position, caplog
):
    """Also if this query itself reads the range again."""
    cluster, checkpoint = world(), []
    query = Query(cluster, checkpoint)
    query.plan(Limit(most=6))
    query.crash()
    between(cluster)
    query = Query(cluster, checkpoint)
    assert query.read() == {}
    (dropped,) = [r for r in caplog.records if "batch_overtaken" in r.message]
    assert "t-0 offsets 0 to 5, which this batch omits" in dropped.message
    assert "which may be this query, continues at the position" in dropped.message
    cluster.run_until(query.ranges.held, 6 * H)
    assert query.batch() == {0: [*range(position, 10)]}


def query_with_late_ranges(cluster, checkpoint, delay_ms):
    """Return a query whose claims are in the log before it is notified of them."""
    query = Query(cluster, checkpoint)
    cluster.run_until(query.ranges.held, 6 * H)
    query.claims.ranges = LateRanges(query.ranges, cluster, delay_ms)
    assert not query.claims.ranges.held()
    return query


def test_a_range_under_a_pending_own_claim_is_read():
    cluster, checkpoint = world(), []
    query = Query(cluster, checkpoint)
    query.plan(Limit(most=4))
    query.crash()
    query = query_with_late_ranges(cluster, checkpoint, H // 2)
    assert query.read() == {0: [0, 1, 2, 3]}


def test_planning_waits_for_a_pending_own_claim():
    """Otherwise a run with availableNow would end without records."""
    cluster = world(records=(4,))
    query = query_with_late_ranges(cluster, [], H // 2)
    query.claims.fix_target()
    assert query.batch() == {0: [0, 1, 2, 3]}


def test_an_unfinished_batch_that_no_member_claims_raises():
    cluster, checkpoint = world(), []
    query = Query(cluster, checkpoint)
    query.plan()
    query.crash()
    query = Query(cluster, checkpoint, outcome_ms=H)
    cluster.run(40)
    query.node.session.unsubscribe(*query.node.session.subscriptions, release=True)
    with pytest.raises(CoordinationError, match="unfinished batch"):
        query.read()


def test_a_claim_won_again_continues_after_the_planned_batch():
    cluster = world()
    query = Query(cluster, [])
    query.batch(Limit(most=4))
    query.node.cut(is_cut=True)
    cluster.run(2 * H)
    query.node.cut(is_cut=False)
    cluster.run_until(query.ranges.held, 5 * H)
    assert query.ranges.held()[T[0]].position == 0
    assert query.batch(Limit(most=2)) == {0: [4, 5]}
    assert query.ranges.held()[T[0]].position == 4


def test_a_batch_whose_claim_was_taken_over_is_logged_as_unconfirmed(caplog):
    cluster = world()
    query = Query(cluster, [])
    query.batch(Limit(most=4))
    query.node.cut(is_cut=True)
    other_works(cluster, 6)
    query.node.cut(is_cut=False)
    cluster.run_until(query.ranges.held, 5 * H)
    assert query.batch() == {0: [6, 7, 8, 9]}
    assert "batch_unconfirmed" in caplog.text


def test_a_batch_is_read_under_the_token_of_a_claim_won_again():
    cluster = world()
    query = Query(cluster, [])
    query.plan(Limit(most=4))
    query.node.cut(is_cut=True)
    cluster.run(2 * H)
    query.node.cut(is_cut=False)
    (part,) = query.claims.parts({}, query.checkpoint[-1])
    assert part.planned.token > query.checkpoint[-1][T[0]].token
    assert (part.planned.first, part.planned.end) == (0, 4)
    assert query.batch() == {0: [4, 5, 6, 7, 8, 9]}
    assert query.ranges.held()[T[0]].position == 4


def test_a_leaving_partition_is_read_and_confirmed_before_its_release():
    cluster = world(records=(6, 6))
    query = Query(cluster, [], "one")
    assert query.plan(Limit(most=4))
    two = cluster.node("two", spec=spec())
    cluster.run_until(query.leaving, 4 * H)
    assert set(query.read()) == {0, 1}, "it was begun, so it is read"
    holdings = query.node.session.holdings.values()
    secrets = {holding.claim.secret.hex() for holding in holdings}
    parts = query.claims.parts({}, query.checkpoint[-1])
    assert {part.secret for part in parts} == secrets, "also of what is leaving"
    assert not two.held
    assert len(query.batch(Limit(most=1))) == 1
    cluster.run_until(lambda: len(two.held) == 1, 2 * H)
    (key,) = two.held
    assert position(cluster, key.partition) == 2


def test_a_partition_is_read_until_its_successor_is_warm_and_the_batch_ends():
    cluster = world(records=(6, 6))
    query = Query(cluster, [], "one")
    assert query.plan(Limit(most=4))
    assert set(query.read()) == {0, 1}
    two = cluster.node("two")
    two.warming.is_held = True
    two.consume(spec(on_warm=lambda *_: None))
    cluster.run_until(lambda: two.warming.waiting_count, 4 * H)
    # The query plans batches while the successor warms up.
    assert not query.leaving()
    assert query.plan(Limit(most=4))
    assert set(query.read()) == {0, 1}
    two.warming.run_waiting()
    cluster.run_until(query.leaving, H)
    cluster.run(H)
    assert not two.held, "the batch is not over"
    query.plan(Limit(most=4))
    cluster.run_until(lambda: len(two.held) == 1, 2 * H)
    (key,) = two.held
    assert position(cluster, key.partition) == 4


def test_a_query_as_successor_gets_a_partition_without_an_offer():
    cluster = world(records=(6, 6))
    one = cluster.node("one", spec=spec())
    cluster.run_until(lambda: len(one.held) == 2, 4 * H)
    query = Query(cluster, [], "two")
    cluster.run_until(lambda: len(query.node.held) == 1, 4 * H)
    assert not of(cluster, "one", HandoffOffer)


# --- at most once


def grant(query, last):
    """Request a grant as a task does, under the driver's claim."""
    owner = query.node.owner
    known = query.ranges.held()[T[0]]
    record = ClaimingMessages(
        client_id=owner.client_id,
        group_id="g",
        incarnation=owner.incarnation,
        seq=2**62,
        topic="t",
        partition=0,
        epoch=known.epoch,
        grantee=b"task".ljust(16, b"."),
        first=0,
        proposed_last_offset=last,
    )
    write(query.cluster, record)
    query.cluster.run(40)


def test_at_most_once_a_restart_continues_after_the_granted_offsets():
    cluster, checkpoint = world(), []
    query = Query(cluster, checkpoint, is_amo=True)
    assert query.batch(Limit(most=4)) == {0: [0, 1, 2, 3]}
    grant(query, 1)
    query.crash()
    query = Query(cluster, checkpoint, is_amo=True)
    assert query.batch() == {0: [2, 3, 4, 5, 6, 7, 8, 9]}


# --- missing offsets


def test_a_position_below_the_log_start_raises_or_is_moved_to_it(caplog):
    cluster = world()
    query = Query(cluster, [])
    query.batch(Limit(most=2))
    query.stop()
    cluster.kafka.delete_records(T[0], before=5)
    strict = Query(cluster, [], "strict")
    with pytest.raises(PositionError, match="begins at 5") as caught:
        strict.batch()
    assert caught.value.partition == T[0]
    # Without a checkpoint, the message does not suggest a new one.
    assert "groups reset GROUP --topic t:0 --to-earliest" in str(caught.value)
    assert "checkpointLocation" not in str(caught.value)
    strict.stop()
    lenient = Query(cluster, [], "lenient", fails_on_data_loss=False)
    assert lenient.batch() == {0: [5, 6, 7, 8, 9]}
    assert "position_jumped" in caplog.text


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_limited_batch_passes_records_that_were_deleted(is_strict, caplog):
    """No batches are planned of deleted records only."""
    cluster, limit = world(records=(100,)), Limit(most=10)
    query = Query(cluster, [], fails_on_data_loss=is_strict)
    assert query.batch(limit) == {0: list(range(10))}
    cluster.kafka.delete_records(T[0], before=50)
    if is_strict:
        with pytest.raises(PositionError, match=r"position 10 of t-0.* begins at 50"):
            query.plan(limit)
        return
    assert query.batch(limit) == {0: list(range(50, 60))}
    assert query.read() == {0: list(range(50, 60))}, "repeated by a restart"
    assert query.batch(limit) == {0: list(range(60, 70))}
    (reported,) = jumps(caplog)
    assert "position 10 of t-0 cannot be read" in reported.message
    cluster.kafka.delete_records(T[0], before=100)
    assert query.batch(limit) == {}
    assert query.batch(limit) is None
    fill(cluster, 5)
    query.crash()
    again = Query(cluster, query.checkpoint, fails_on_data_loss=False)
    assert again.batch(limit) == {0: list(range(100, 105))}


def test_a_readable_end_below_the_position_plans_no_batch(monkeypatch):
    """As with read_committed, while a transaction is open."""
    query = Query(world(), [])
    query.batch()
    monkeypatch.setattr(query.claims.logs, "ends", lambda places: {T[0]: 4})
    assert query.batch() is None


def fill(cluster, count):
    for number in range(count):
        cluster.kafka.produce(T[0], b"%d" % number)


def cut_off(cluster, end):
    cluster.kafka.truncate(T[0], end=end, leader=2)


def recreate(cluster, count):
    cluster.kafka.delete_topic("t")
    cluster.kafka.create_topic("t", 1)
    fill(cluster, count)


def test_a_checkpoint_with_a_partition_that_is_not_read_ends_the_query(caplog):
    """As with Spark's own source, unless loss is allowed."""
    cluster = world(records=(20,))
    query = Query(cluster, [])
    query.batch()
    gone = query.checkpoint[-1] | {TopicPartition("gone", 1): Mark(TOKEN, 0, 7)}
    strict = Query(cluster, [], "strict")
    assert strict.claims.without_unread({}) == {}, "a new query has nothing to compare"
    with pytest.raises(PositionError, match=r"position 7 of gone-1.* not read"):
        strict.claims.without_unread(gone)
    lenient = Query(cluster, [], "lenient", fails_on_data_loss=False)
    assert lenient.claims.without_unread(gone) == query.checkpoint[-1]
    later = query.checkpoint[-1] | {T[1]: Mark(TOKEN, 0, 7)}
    assert lenient.claims.without_unread(later) == later, "added since"
    (reported,) = jumps(caplog)
    assert "continues without it" in reported.message


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_running_query_notices_a_deleted_topic(is_strict, caplog):
    """Not at once, because the metadata of a broker may be late."""
    cluster = world(records=(20,))
    cluster.fill("u", (5,))
    query = Query(cluster, [], fails_on_data_loss=is_strict, topics=("t", "u"))
    cluster.run_until(lambda: len(query.ranges.held()) == 2, 4 * H)
    query.batch()
    cluster.kafka.delete_topic("t")
    assert query.batch() is None
    assert jumps(caplog) == []
    cluster.run(11_000)
    if is_strict:
        with pytest.raises(PositionError, match=r"position 20 of t-0.*was deleted"):
            query.plan()
        return
    assert query.batch() is None
    cluster.kafka.produce(TopicPartition("u", 0), b"later")
    assert query.batch() == {0: [5]}
    (reported,) = jumps(caplog)
    assert "was deleted" in reported.message


@pytest.mark.parametrize("look", ["starts", "ends", "ranges"])
def test_a_topic_deleted_during_planning_is_omitted_from_the_batch(monkeypatch, look):
    """The deletion falls between two requests; the batch has the other topic only."""
    cluster = world(records=(20,))
    cluster.fill("u", (5,))
    query = Query(cluster, [], fails_on_data_loss=False, topics=("t", "u"))
    cluster.run_until(lambda: len(query.ranges.held()) == 2, 4 * H)
    if look != "starts":
        query.batch()
    if look == "ranges":
        cut_off(cluster, 0)
    cluster.kafka.produce(TopicPartition("u", 0), b"later")
    ask = getattr(query.claims.logs, look)

    def deleting(partitions):
        cluster.kafka.delete_topic("t")
        return ask(partitions)

    monkeypatch.setattr(query.claims.logs, look, deleting)
    assert query.plan()
    monkeypatch.undo()
    (first,) = {min(offsets) for offsets in query.read().values()}
    assert first == (0 if look == "starts" else 5)


def jumps(caplog):
    return [r for r in caplog.records if r.message.startswith("position_jumped")]


def test_a_position_beyond_the_log_ends_the_query():
    cluster = world(records=(20,))
    query = Query(cluster, [])
    query.batch()
    cut_off(cluster, 0)
    fill(cluster, 5)
    with pytest.raises(PositionError, match="its log ends at 5") as caught:
        query.plan()
    assert (caught.value.requested, caught.value.log_end) == (20, 5)
    assert "failOnDataLoss" in str(caught.value)
    assert "groups reset GROUP --topic t:0 --to-earliest" in str(caught.value)


def test_a_truncated_log_is_read_from_its_start_if_loss_is_allowed(caplog):
    cluster = world(records=(20,))
    query = Query(cluster, [], fails_on_data_loss=False)
    query.batch()
    cut_off(cluster, 0)
    assert query.batch() is None
    assert query.batch() is None
    assert len(jumps(caplog)) == 1, "reported once, not at every look"
    fill(cluster, 25)
    assert query.batch(Limit(most=9)) == {0: list(range(9))}
    assert query.batch() == {0: list(range(9, 25))}
    assert query.batch() is None
    assert position(cluster) in {20, 25}
    query.stop()
    assert position(cluster) == 25
    assert len(jumps(caplog)) == 1


def test_a_restart_continues_within_a_truncated_log():
    """The coordination log still has the position from before the truncation."""
    cluster, checkpoint = world(records=(20,)), []
    query = Query(cluster, checkpoint, fails_on_data_loss=False)
    query.batch()
    query.batch()
    cluster.run_until(lambda: position(cluster) == 20, 4 * H)
    cut_off(cluster, 0)
    query.batch()
    fill(cluster, 25)
    assert query.batch(Limit(most=9)) == {0: list(range(9))}
    query.crash()
    query = Query(cluster, checkpoint, fails_on_data_loss=False)
    assert query.read() == {0: list(range(9))}
    assert query.batch() == {0: list(range(9, 25))}


def test_a_claim_won_again_reads_a_truncated_log_from_its_start():
    cluster = world(records=(20,))
    query = Query(cluster, [], fails_on_data_loss=False)
    query.batch()
    query.batch()
    cut_off(cluster, 0)
    query.batch()
    query.node.cut(is_cut=True)
    cluster.run(2 * H)
    query.node.cut(is_cut=False)
    cluster.run_until(query.ranges.held, 5 * H)
    fill(cluster, 22)
    assert query.batch() == {0: list(range(22))}


def test_at_most_once_a_truncated_log_is_read_once_it_passes_the_position(caplog):
    cluster = world(records=(20,))
    query = Query(cluster, [], is_amo=True, fails_on_data_loss=False)
    query.batch()
    grant(query, 19)
    cut_off(cluster, 0)
    fill(cluster, 5)
    assert query.batch() is None
    assert query.batch() is None
    (reported,) = jumps(caplog)
    assert "no offset below the position is granted again" in reported.message
    fill(cluster, 17)
    assert query.batch() == {0: [20, 21]}


def test_a_restart_on_a_recreated_topic_ends_the_query():
    cluster, checkpoint = world(records=(20,)), []
    query = Query(cluster, checkpoint)
    query.batch()
    query.batch()
    query.stop()
    cluster.crash(query.node)
    recreate(cluster, 60)
    query = Query(cluster, checkpoint)
    with pytest.raises(PositionError, match="deleted and created again"):
        query.plan()
    assert len(checkpoint) == 1


def test_a_restart_on_a_recreated_topic_reads_all_of_it_if_loss_is_allowed(caplog):
    cluster, checkpoint = world(records=(20,)), []
    query = Query(cluster, checkpoint)
    query.batch()
    query.batch()
    query.stop()
    cluster.crash(query.node)
    recreate(cluster, 60)
    query = Query(cluster, checkpoint, fails_on_data_loss=False)
    assert query.batch() == {0: list(range(60))}
    assert query.batch() is None
    query.stop()
    assert position(cluster) == 60
    assert len(jumps(caplog)) == 1


def test_an_unfinished_batch_is_not_read_from_a_recreated_topic(caplog):
    cluster, checkpoint = world(records=(20,)), []
    query = Query(cluster, checkpoint)
    query.plan(Limit(most=5))
    query.crash()
    recreate(cluster, 60)
    strict = Query(cluster, checkpoint, "q")
    with pytest.raises(PositionError, match="deleted and created again"):
        strict.read()
    strict.crash()
    lenient = Query(cluster, checkpoint, "q", fails_on_data_loss=False)
    assert lenient.read() == {}
    assert lenient.batch() == {0: list(range(60))}


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_running_query_notices_a_recreated_topic(is_strict):
    cluster = world(records=(20,))
    query = Query(cluster, [], fails_on_data_loss=is_strict)
    query.batch()
    recreate(cluster, 60)
    if is_strict:
        with pytest.raises(PositionError, match="deleted and created again"):
            query.plan()
        return
    (earlier,) = query.checkpoint[-1].values()
    found = []
    until_ms = cluster.clock.now_ms() + 20 * H
    while len(found) < 60 and cluster.clock.now_ms() < until_ms:
        found += (query.batch(Limit(most=25)) or {}).get(0, [])
    assert found == list(range(60))
    for marks in query.checkpoint[1:]:
        # So a sink that compares tokens knows which of two topics is the later one.
        assert marks[T[0]].token > earlier.token
        assert marks[T[0]].topic_id == cluster.kafka.topic("t").topic_id.hex()


def test_a_mark_has_the_topic_id_of_the_claim_if_the_lookup_fails(monkeypatch):
    """A broker that lags behind does not know a new topic yet."""
    cluster = world(records=(20,))
    query = Query(cluster, [])
    known = query.claims.logs.topic_ids
    monkeypatch.setattr(query.claims.logs, "topic_ids", lambda _: {})
    query.batch(Limit(most=5))
    monkeypatch.setattr(query.claims.logs, "topic_ids", known)
    query.batch()
    topic_id = cluster.kafka.topic("t").topic_id.hex()
    assert [marks[T[0]].topic_id for marks in query.checkpoint] == [topic_id] * 2


@pytest.mark.parametrize("is_amo", [False, True])
def test_a_recreated_topic_is_not_planned_under_the_old_topics_claim(is_amo):
    """Otherwise offsets could be granted twice: again under the new topic's claim."""
    cluster = world(records=(20,))
    query = Query(cluster, [], is_amo=is_amo)
    cluster.run_until(query.ranges.held, 4 * H)
    earlier = query.ranges.held()[T[0]]
    assert earlier.topic_id == cluster.kafka.topic("t").topic_id.hex()
    recreate(cluster, 60)
    until_ms = cluster.clock.now_ms() + 40 * H
    while not (planned := query.batch()) and cluster.clock.now_ms() < until_ms:
        assert query.checkpoint == []
    assert planned == {0: list(range(60))}
    mark = query.checkpoint[-1][T[0]]
    assert mark.token > earlier.token
    assert mark.topic_id == query.ranges.held()[T[0]].topic_id


def test_a_claim_lost_while_planning_is_omitted(monkeypatch):
    query = Query(world(), [])

    def begin(partition, token, *, first, end):
        raise ClaimLost("gone", reason="lease_expiring")

    query.claims.await_claims({})
    monkeypatch.setattr(query.ranges, "begin", begin)
    assert not query.plan()
