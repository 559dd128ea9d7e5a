"""The consumer over whole nodes in memory, on virtual time."""

from functools import partial

import pytest
from enginekit import (
    ALO,
    AMO,
    KEY,
    T0,
    H,
    Stepping,
    fold,
    held_by,
    holders,
    of,
    spec,
    values,
    world,
)
from interrupting import interrupted

from kafka_marshal import CommitToken
from kafka_marshal.batches import Batch
from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    DeadlineExceeded,
    InvalidTransition,
    PositionError,
)
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.types import TopicPartition
from simulator.fakestore import AppendFate


def owning(cluster, client_id="a", **rest):
    node = cluster.node(client_id, spec=spec(**rest))
    cluster.run_until(held_by(node, 1), 3 * H)
    cluster.run(40)
    return node


def polled(node):
    """Poll once; return the records of the one partition."""
    found = node.consumer.poll(0)
    return found.get(T0, [])


# --- Handing out and committing ---


def test_records_arrive_once_in_order_with_their_token(cluster):
    node = owning(cluster, most=4)
    got = polled(node) + polled(node) + polled(node)
    assert [record.offset for record in got] == list(range(10))
    assert {record.token for record in got} == set(node.consumer.tokens().values())
    assert node.consumer.position(T0) == 10
    assert polled(node) == []


def test_the_position_covers_only_contiguous_commits(cluster):
    node = owning(cluster, most=4)
    records = polled(node)
    node.consumer.commit(records[2])
    assert node.consumer.committed(T0) == 0
    node.consumer.commit([records[0], records[1]])
    assert node.consumer.committed(T0) == 3
    cluster.run(H)
    assert fold(cluster).keys[KEY].position == 3


def test_commit_without_arguments_commits_all_returned_records(cluster):
    node = owning(cluster, most=4)
    polled(node)
    node.consumer.commit()
    node.consumer.commit()
    assert node.consumer.committed(T0) == 4


@pytest.mark.parametrize("most", [0, -1, 1.5, "1", True])
def test_max_records_must_be_a_positive_whole_number(cluster, most):
    """With a negative limit, records would count as handed out that never were."""
    node = owning(cluster, most=4)
    for call in (node.consumer.poll, node.consumer.poll_fetched):
        with pytest.raises(ConfigurationError, match="max_records"):
            call(max_records=most)
    with pytest.raises(ConfigurationError, match="max_records"):
        next(node.consumer.batches(most))
    assert [each.offset for each in polled(node)] == [0, 1, 2, 3]


@pytest.mark.parametrize("timeout_ms", [None, "100"])
def test_a_timeout_must_be_a_number(cluster, timeout_ms):
    node = owning(cluster)
    for call in (node.consumer.poll, node.consumer.flush):
        with pytest.raises(ConfigurationError, match="timeout_ms must be a number"):
            call(timeout_ms)


@pytest.mark.parametrize("given", ["t-0", [T0], ("t", "0"), ("t",), None])
def test_a_value_that_is_not_a_partition_is_refused(cluster, given):
    consumer = owning(cluster).consumer
    calls = [consumer.pause, consumer.resume, consumer.position, consumer.committed]
    for call in (*calls, consumer.seek_to_end, lambda each: consumer.seek(each, 1)):
        with pytest.raises(TypeError, match="is not a partition; give partitions"):
            call(given)
    assert consumer.paused() == set()


def test_a_seek_offset_must_be_a_whole_number(cluster):
    with pytest.raises(ConfigurationError, match="offset must be a whole number"):
        owning(cluster).consumer.seek(T0, "1")


def test_a_record_never_handed_out_cannot_be_committed(cluster):
    node = owning(cluster, most=4)
    (record, *_) = polled(node)
    with pytest.raises(InvalidTransition, match="7"):
        node.consumer.commit(
            CommitToken(topic="t", partition=0, offset=7, token=record.token)
        )


def test_a_record_of_an_earlier_claim_cannot_be_committed(cluster):
    node = owning(cluster, most=4)
    records = polled(node)
    node.cut(is_cut=True)
    cluster.run(2 * H)
    node.cut(is_cut=False)
    cluster.run_until(held_by(node, 1), 4 * H)
    with pytest.raises(ClaimLost):
        node.consumer.poll(0)
    assert [r.offset for r in polled(node)] == [0, 1, 2, 3]
    with pytest.raises(ClaimLost) as caught:
        node.consumer.commit(records[0])
    assert caught.value.reason == "stale_token"


def test_a_claim_reported_as_lost_stays_lost(cluster):
    """At least once, with an engine that is too slow to renew its lease in time.

    A heartbeat that is read back after the lease's hard end must not renew a claim
    whose records the application has dropped: they would never be committed.
    """
    node = owning(cluster, most=4)
    (record, *_) = polled(node)
    node.log.read_lag_ms = 10 * H
    hard_ms = node.session.holdings[KEY].claim.lease.hard_until_ms
    cluster.run(hard_ms - node.clock.now_ms() - 20)  # beats land, unread
    node.log.read_lag_ms = 0
    cluster.clock.advance(40)
    with pytest.raises(ClaimLost, match="lease_expired"):
        node.consumer.commit(record)
    cluster.run_until(held_by(node, 1), 4 * H)
    cluster.run(40)
    with pytest.raises(ClaimLost):
        node.consumer.poll(0)
    again = polled(node)
    assert [r.offset for r in again] == [0, 1, 2, 3]
    node.consumer.commit(again)
    assert node.consumer.committed(T0) == 4


def test_hand_out_stops_at_max_uncommitted_records(cluster):
    node = owning(cluster, most=2, max_uncommitted=4)
    first, second = polled(node), polled(node)
    assert polled(node) == []
    node.consumer.commit(first + second)
    assert [r.offset for r in polled(node)] == [4, 5]


def test_pausing_a_partition_keeps_its_claim(cluster):
    node = owning(cluster, most=2)
    polled(node)
    node.consumer.pause(T0)
    assert node.consumer.paused() == {T0}
    cluster.run(3 * H)
    assert polled(node) == []
    assert node.held
    node.consumer.resume(T0)
    assert [r.offset for r in polled(node)] == [2, 3]


def test_callbacks_report_claimed_and_lost_partitions(cluster):
    reported = []
    node = owning(
        cluster,
        most=2,
        on_claimed=lambda tp, token: reported.append((tp, str(token))),
        on_lost=lambda tp, ending: reported.append((tp, ending.reason)),
    )
    polled(node)
    node.cut(is_cut=True)
    cluster.run(2 * H)
    assert polled(node) == []
    assert [what for _, what in reported] == [str(reported[0][1]), "lease_expired"]


def test_an_exception_of_a_callback_leaves_the_consumer_usable():
    """All partitions are fetched, and the others are reported by later calls."""
    cluster = world(records=[2, 2, 2])
    claimed, lost = [], []

    def on_claimed(partition, _token):
        claimed.append(partition.partition)
        raise ValueError(partition)

    def on_lost(partition, _ending):
        lost.append(partition.partition)
        raise KeyError(partition)

    node = cluster.node("a", spec=spec(on_claimed=on_claimed, on_lost=on_lost))
    cluster.run_until(held_by(node, 3), H)
    cluster.run(40)
    for _ in range(3):
        with pytest.raises(ValueError, match="t-"):
            node.consumer.poll(0)
    found = {}
    for _ in range(3):
        found |= values(node.consumer.poll(0))
    assert found == {number: [0, 1] for number in range(3)}
    assert sorted(claimed) == [0, 1, 2]
    node.cut(is_cut=True)
    cluster.run(2 * H)
    for _ in range(3):
        with pytest.raises(KeyError):
            node.consumer.poll(0)
    assert node.consumer.poll(0) == {}
    assert sorted(lost) == [0, 1, 2]


def test_losing_a_claim_without_uncommitted_records_raises_nothing(cluster):
    node = owning(cluster)
    node.consumer.commit(polled(node))
    node.cut(is_cut=True)
    cluster.run(2 * H)
    assert polled(node) == []
    assert node.consumer.assignment() == set()
    assert node.consumer.position(T0) is node.consumer.committed(T0) is None


def test_several_partitions_take_turns():
    cluster = world(records=[50, 50, 50])
    node = cluster.node("a", spec=spec(most=10))
    cluster.run_until(held_by(node, 3), H)
    cluster.run(40)
    seen = set()
    for _ in range(6):
        seen.update(values(node.consumer.poll(0)))
    assert seen == {0, 1, 2}


def test_flush_waits_until_the_log_has_the_position(cluster):
    node = owning(cluster, most=4)
    node.engine.changed = Stepping(cluster)
    node.consumer.commit(polled(node))
    node.consumer.flush()
    assert fold(cluster).keys[KEY].position == 4


def test_flush_with_an_unreachable_log_raises_at_its_deadline(cluster):
    node = owning(cluster, most=4)
    node.engine.changed = Stepping(cluster)
    node.consumer.commit(polled(node))
    node.cut(is_cut=True)
    with pytest.raises(DeadlineExceeded):
        node.consumer.flush(500)


# --- Lag, load and memory ---


def test_lag_counts_unprocessed_records_and_load_held_partitions(cluster):
    node = owning(cluster, most=4)
    assert node.consumer.load() == 1
    assert node.consumer.lag() == {T0: 10}
    node.consumer.commit(polled(node))
    assert node.consumer.lag() == {T0: 6}
    cluster.kafka.produce(T0, b"x")
    assert node.consumer.lag() == {T0: 7}
    node.leave()
    idle = cluster.node("idle", spec=spec(policy="greedy"))
    assert (idle.consumer.load(), idle.consumer.lag()) == (0, {})


def test_lag_at_most_once_counts_from_the_granted_position(cluster):
    node = owning(cluster, delivery=AMO, most=4)
    polled(node)
    cluster.run(40)
    granted = node.consumer.committed(T0)
    assert granted >= 4
    assert node.consumer.lag() == {T0: 10 - granted}


# --- Transactions ---


def drained(node, cluster, rounds=60):
    """Poll and commit every 20 ms; return the offsets that were handed out."""
    got = []
    for _ in range(rounds):
        records = polled(node)
        got += [record.offset for record in records]
        if records:
            node.consumer.commit(records)
        cluster.run(20)
    return got


def test_the_position_moves_past_control_records():
    cluster = world(records=[0])
    cluster.kafka.produce_transaction(T0, [b"x"] * 5, is_committed=True)
    node = owning(cluster)
    got = node.consumer.poll(0)[T0]
    for _ in range(20):
        assert polled(node) == []
        cluster.run(20)
    assert node.consumer.committed(T0) == 0, "nothing is committed yet"
    assert node.consumer.position(T0) == 6
    node.consumer.commit(got[:4])
    assert node.consumer.committed(T0) == 4
    node.consumer.commit(got)
    assert node.consumer.committed(T0) == 6
    assert node.consumer.lag() == {T0: 0}
    cluster.run_until(lambda: cluster.kafka.groups.get("g") == {T0: 6}, 2 * H)
    cluster.run_until(lambda: node.session.lag_of(KEY) == 0, H)
    cluster.kafka.produce_transaction(T0, [b"x"], is_committed=False)
    assert drained(node, cluster) == [6]
    assert node.consumer.lag() == {T0: 0}


def test_the_released_position_is_past_control_records():
    cluster = world(records=[0])
    cluster.kafka.produce_transaction(T0, [b"x"] * 5, is_committed=True)
    node = owning(cluster)
    node.consumer.commit(node.consumer.poll(0)[T0])
    assert node.consumer.poll(0) == {}
    node.leave()
    cluster.run_until(lambda: node.has_left, 3 * H)
    assert fold(cluster).keys[KEY].position == 6


def test_control_records_are_passed_beside_a_busy_partition():
    cluster = world(2, records=[2_000, 0])
    busy, quiet = T0, TopicPartition("t", 1)
    cluster.kafka.produce_transaction(quiet, [b"x"], is_committed=False)
    node = cluster.node(
        "a", spec=spec(most=10, isolation_level="read_committed", policy="greedy")
    )
    cluster.run_until(held_by(node, 2), 3 * H)
    cluster.run(100)  # both have their start positions
    for _ in range(40):
        found = node.consumer.poll(0)
        assert list(found) == [busy]
        node.consumer.commit(found[busy])
        cluster.run(20)
    assert node.consumer.committed(quiet) == 2


@pytest.mark.parametrize(
    ("isolation", "requests"),
    [
        # Some time after the last record: no fetch shows that control records follow.
        pytest.param("read_committed", [(0, 4), (5, 5)], id="after the records"),
        pytest.param("read_uncommitted", [(0, 5)], id="with the records"),
    ],
)
def test_at_most_once_control_records_are_granted(isolation, requests):
    """They are granted once, and not again while no record arrives."""
    cluster = world(records=[0])
    cluster.kafka.produce_transaction(T0, [b"x"] * 5, is_committed=True)
    node = owning(cluster, delivery=AMO, isolation_level=isolation)
    assert drained(node, cluster, H // 20) == [0, 1, 2, 3, 4]
    assert node.consumer.lag() == {T0: 0}
    assert node.consumer.committed(T0) == 6
    cluster.run_until(lambda: cluster.kafka.groups.get("g") == {T0: 6}, 2 * H)
    holding = node.session.holdings[KEY]
    assert (holding.uncommitted_count, holding.mark) == (0, 6)
    assert drained(node, cluster, 5 * H // 20) == []
    asked = [
        (line.record.first, line.record.proposed_last_offset)
        for line in of(cluster, "a", ClaimingMessages)
    ]
    assert asked == requests
    cluster.kafka.produce(T0, b"x")
    assert drained(node, cluster) == [6]


@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_aborted_records_are_skipped(delivery):
    cluster = world(records=[1])
    kafka = cluster.kafka
    kafka.produce_transaction(T0, [b"aborted"] * 4, is_committed=False)
    kafka.produce_transaction(T0, [b"x"] * 3, is_committed=True)
    kafka.produce_transaction(T0, [b"aborted"] * 4, is_committed=False)
    kafka.begin_transaction(T0, [b"open"] * 2)
    stable = kafka.range(T0, isolation_level="read_committed").end
    node = owning(cluster, delivery=delivery, isolation_level="read_committed")
    assert drained(node, cluster, 2 * H // 20) == [0, 6, 7, 8]
    assert node.consumer.committed(T0) == stable == 15
    assert node.consumer.lag() == {T0: 0}
    cluster.run_until(lambda: node.session.lag_of(KEY) == 0, H)
    kafka.end_transaction(T0, is_committed=True)
    assert drained(node, cluster, 2 * H // 20) == [15, 16]
    assert node.consumer.lag() == {T0: 0}


def test_aborted_and_open_records_are_handed_out_by_default():
    cluster = world(records=[0])
    cluster.kafka.produce_transaction(T0, [b"aborted"] * 2, is_committed=False)
    cluster.kafka.begin_transaction(T0, [b"open"])
    node = owning(cluster)
    assert drained(node, cluster) == [0, 1, 3]


def test_latest_is_the_last_stable_offset_for_read_committed():
    """As in Kafka's clients: an open transaction is read once it is committed."""
    cluster = world(records=[3])
    cluster.kafka.begin_transaction(T0, [b"open"])
    node = owning(cluster, auto_offset_reset="latest", isolation_level="read_committed")
    cluster.kafka.end_transaction(T0, is_committed=True)
    assert drained(node, cluster) == [3]


def test_granted_and_aborted_records_do_not_block():
    """Records granted under read_uncommitted, then read under read_committed."""
    cluster = world(records=[0])
    cluster.kafka.produce_transaction(T0, [b"aborted"] * 4, is_committed=False)
    node = owning(cluster, delivery=AMO, most=4)
    assert polled(node) == []
    cluster.run(60)
    assert node.session.holdings[KEY].progress.unused_count == 4
    node.consumer.close(release=False, timeout_ms=0)
    node.consume(spec(delivery=AMO, isolation_level="read_committed"))
    cluster.run(60)
    assert drained(node, cluster, H // 20) == []
    assert node.session.holdings[KEY].uncommitted_count == 0


def test_a_stuck_handler_does_not_increase_memory():
    """The backlog is reported once, and the kept state does not grow."""
    cluster = world(records=[6_000])
    node = owning(cluster, most=500, max_uncommitted=4_000)
    handed = 0
    for _ in range(40):
        handed += len(polled(node))
        cluster.run(100)
    assert handed == 4_000
    (events,) = node.observer.named("uncommitted_backlog")
    assert events.fields["uncommitted"] == 1_500
    progress = node.session.holdings[KEY].progress
    assert len(progress._runs) == 1
    assert node.held


# --- Interrupted by a signal handler ---

CALLS = {
    "poll": lambda it: it.poll(0),
    "poll one": lambda it: it.poll(0, 1),
    "poll fetched": lambda it: it.prefetch(0) or it.poll_fetched(),
    "next": next,
    "batches": lambda it: next(it.batches()),
}


def offsets_in(found):
    """Return the offsets of what a call returned, by partition."""
    if isinstance(found, dict):
        return values(found)
    if isinstance(found, Batch):
        return {found.partition.partition: [*found.offsets]}
    return {found.partition: [found.offset]}


class Received:
    """What an application received of each partition: all below an offset."""

    def __init__(self, call):
        self.ends = {0: 0, 1: 0}
        self._call = call

    def take(self, *, at=None):
        """Make a call; return whether it was interrupted at a place."""
        is_interrupted, found = False, None
        if at is None:
            found = self._call()
        else:
            is_interrupted, found = interrupted(self._call, at)
        for partition, offsets in offsets_in(found).items() if found else ():
            end = self.ends[partition]
            assert offsets == list(range(end, end + len(offsets))), (at, partition)
            self.ends[partition] += len(offsets)
        return is_interrupted


def holding_two(most, fetched, **rest):
    """Return a node that holds two long partitions."""
    cluster = world(records=[5_000, 5_000])
    node = cluster.node("a", spec=spec(most=most, max_fetched=fetched, **rest))
    cluster.run_until(held_by(node, 2), 3 * H)
    cluster.run(40)
    return cluster, node


@pytest.mark.parametrize(("most", "fetched"), [(1, 1), (3, 3), (3, 40)])
@pytest.mark.parametrize("name", CALLS)
def test_records_of_an_interrupted_call_are_handed_out_again(name, most, fetched):
    """Records that an interrupted call marked as handed out must not be lost."""
    cluster, node = holding_two(most, fetched, max_uncommitted=1_000_000)
    it, at = node.consumer, 0
    received = Received(partial(CALLS[name], it))
    received.take()
    while received.take(at=at):
        for partition, end in received.ends.items():
            assert it.position(TopicPartition("t", partition)) == end, at
        it.commit()
        for partition, end in received.ends.items():
            assert it.committed(TopicPartition("t", partition)) == end, at
        received.take()
        received.take()
        at += 1
    assert at > 9
    it.commit()
    it.close(timeout_ms=0)
    cluster.run(H)
    keys = fold(cluster).keys.items()
    assert {key.partition: known.position for key, known in keys} == received.ends


@pytest.mark.parametrize("fetched", [8, 60])
def test_granted_records_of_an_interrupted_poll_are_returned_later(fetched):
    """And they are not marked as processed before."""
    cluster, node = holding_two(3, fetched, delivery=AMO)
    received, at = Received(partial(node.consumer.poll, 0)), 0

    def take_granted():
        before = dict(received.ends)
        for _ in range(50):
            received.take()
            cluster.run(20)
            if received.ends != before:
                return
        raise AssertionError(at)

    take_granted()
    while received.take(at=at):
        holdings = node.session.holdings.items()
        for key, each in holdings:
            assert each.mark <= received.ends[key.partition], at
        take_granted()
        for _, each in holdings:
            progress = each.progress
            assert progress.unused_count == sum(x.count for x in progress.unused)
        at += 1
    assert at > 50


def test_a_close_after_an_interrupt_leaves_the_records_to_the_next_owner():
    for at in range(0, 200, 10):
        cluster, node = holding_two(3, 40)
        node.consumer.poll(0)
        node.consumer.commit()
        interrupted(partial(node.consumer.poll, 0), at)
        node.consumer.close(timeout_ms=0)
        cluster.run(H)
        positions = [each.position or 0 for each in fold(cluster).keys.values()]
        assert sum(positions) == 3, at


@pytest.mark.parametrize("name", ["poll", "poll one", "next", "batches"])
def test_a_signal_handler_may_close_the_consumer_that_it_interrupts(
    cluster, name, monkeypatch
):
    """The application must not get the error of the reader, which is closed."""
    node = owning(cluster)
    it, plain = node.consumer, node.consumer._reader.poll
    while it.poll(0):
        it.commit()

    def poll(*args):
        if not it.is_closed:
            it.close(timeout_ms=0)
        return plain(*args)

    monkeypatch.setattr(it._reader, "poll", poll)
    if "poll" in name:
        assert CALLS[name](it) == {}
    else:
        with pytest.raises(StopIteration):
            CALLS[name](it)
    assert it.is_closed


# --- Iterating ---


def test_iteration_hands_out_one_record_at_a_time(cluster):
    node = owning(cluster)
    for offset in range(3):
        assert next(node.consumer).offset == offset
        assert node.session.holdings[KEY].uncommitted_count == offset + 1
    assert node.consumer.position(T0) == 3
    assert next(node.consumer).offset == 3


def test_iteration_checks_the_lease_before_each_record(cluster):
    """Fetched records are not handed out after the soft end of the lease."""
    node = owning(cluster)
    assert next(node.consumer).offset == 0
    node.cut(is_cut=True)
    soft_ms = node.session.holdings[KEY].claim.lease.soft_until_ms
    cluster.clock.advance(soft_ms - node.clock.now_ms() - 1)
    assert next(node.consumer).offset == 1
    cluster.clock.advance(1)
    assert node.consumer.next_fetched() is None
    assert node.consumer.poll(0) == {}
    cluster.run(2 * H)
    with pytest.raises(ClaimLost):
        next(node.consumer)


def test_iteration_skips_paused_partitions():
    cluster = world(records=[5, 5])
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 2), H)
    cluster.run(40)
    first = next(node.consumer)
    node.consumer.pause(TopicPartition("t", first.partition))
    seen = [next(node.consumer) for _ in range(5)]
    assert {record.partition for record in seen} == {1 - first.partition}
    node.consumer.resume(TopicPartition("t", first.partition))
    rest = [next(node.consumer) for _ in range(4)]
    assert [record.offset for record in rest] == [1, 2, 3, 4]


def test_iteration_hands_over_a_surplus_partition():
    """An orderly handoff also works if records are handed out one by one."""
    cluster = world(records=[50, 50])
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 2), H)
    cluster.run(40)
    a.consumer.commit(next(a.consumer))
    b = cluster.node("b", spec=spec())

    def shared():
        a.consumer.commit(next(a.consumer))
        return len(a.held) == len(b.held) == 1

    cluster.run_until(shared, H)
    assert not a.observer.named("lease_expired")


def test_batches_are_handed_out_one_by_one():
    cluster = world(records=[5, 5])
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 2), H)
    cluster.run(40)
    batches = node.consumer.batches()
    first = next(batches)
    holdings = node.session.holdings.items()
    uncommitted = {key.partition: each.uncommitted_count for key, each in holdings}
    assert uncommitted == {first.partition[1]: 5, 1 - first.partition[1]: 0}
    node.cut(is_cut=True)
    cluster.clock.advance(2 * H)
    node.step()
    with pytest.raises(ClaimLost):
        next(batches)


def test_a_batch_with_offset_gaps_commits_all_its_records():
    cluster = world(records=[0])
    for _ in range(3):
        cluster.kafka.produce(T0, b"x")
        cluster.kafka.skip_offsets(T0)
    node = owning(cluster)
    batch = next(node.consumer.batches())
    assert [record.offset for record in batch.records] == [0, 2, 4]
    batch.commit()
    assert node.consumer.committed(T0) == 5
    assert node.session.holdings[KEY].uncommitted_count == 0


# --- For event loops ---


def test_prefetched_records_are_not_handed_out(cluster):
    node = owning(cluster, most=4)
    assert node.consumer.poll_fetched() == {}
    node.consumer.prefetch(0)
    assert node.session.holdings[KEY].uncommitted_count == 0
    (records,) = node.consumer.poll_fetched(2).values()
    assert [record.offset for record in records] == [0, 1]
    assert not node.consumer.is_finished
    node.consumer.stop()
    node.consumer.prefetch(0)
    assert node.consumer.is_finished


# --- Positions outside the log ---


@pytest.mark.parametrize("delivery", ["alo", "amo"])
def test_a_position_below_the_log_start_moves_to_the_start(cluster, delivery):
    options = {"delivery": AMO} if delivery == "amo" else {}
    a = owning(cluster, most=2, **options)
    got = polled(a)
    cluster.run(40)
    got = got or polled(a)
    a.consumer.commit(got)
    a.leave()
    cluster.run(200)
    cluster.kafka.delete_records(T0, before=6)
    b = owning(cluster, "b", **options)
    offsets = []
    for _ in range(5):
        offsets += [record.offset for record in polled(b)]
        cluster.run(20)
    assert offsets == [6, 7, 8, 9]
    assert b.observer.named("position_jumped")
    assert b.held


def test_a_position_beyond_the_log_end_raises_and_releases_the_claim(cluster):
    a = owning(cluster)
    a.consumer.commit(polled(a))
    a.leave()
    cluster.run(200)
    cluster.kafka.truncate(T0, end=3, leader=1)
    b = owning(cluster, "b")
    # Whether the topic is still the same is looked up first.
    with pytest.raises(PositionError) as caught:
        cluster.run_until(lambda: b.consumer.poll(0), H)
    assert (caught.value.requested, caught.value.log_end) == (10, 3)
    cluster.run(3 * H)
    assert not b.held  # released, and not claimed again by this client
    assert fold(cluster).keys[KEY].position == 10


# --- Topics that change ---


def test_new_partitions_are_claimed_and_consumed(cluster):
    node = owning(cluster, metadata_refresh_ms=H)
    cluster.kafka.add_partitions("t", 2)
    assert cluster.run_until(held_by(node, 3), 3 * H) <= H + H // 2
    cluster.run(40)
    cluster.kafka.produce(TopicPartition("t", 2), b"x")
    assert values(node.consumer.poll(0))[2] == [0]


def test_unavailable_metadata_is_requested_again(cluster):
    node = owning(cluster, metadata_refresh_ms=H)
    node.data.cut = True
    cluster.kafka.add_partitions("t", 1)
    cluster.run(3 * H)
    assert len(node.held) == 1
    node.data.cut = False
    cluster.run_until(held_by(node, 2), 2 * H)


# --- Ending ---


def test_a_close_does_nothing_while_the_interpreter_ends(cluster, monkeypatch):
    node = owning(cluster, most=4)
    with monkeypatch.context() as ending:
        ending.setattr("sys.is_finalizing", lambda: True)
        node.consumer.close()
    assert not node.consumer.is_closed
    cluster.run(100)
    assert fold(cluster).keys[KEY].owner is not None


def test_closing_releases_at_the_position(cluster):
    node = owning(cluster, most=4)
    node.consumer.commit(polled(node))
    node.consumer.close(timeout_ms=0)
    node.consumer.close(timeout_ms=0)
    cluster.run(100)
    known = fold(cluster).keys[KEY]
    assert (known.owner, known.position) == (None, 4)
    with pytest.raises(InvalidTransition, match="closed"):
        node.consumer.poll(0)


@pytest.mark.parametrize(
    "call",
    [
        lambda it: it.close(timeout_ms="5s"),
        lambda it: it.close(release="no"),
        lambda it: it.lag("5s"),
        lambda it: it.seek(T0, 0, timeout_ms=None),
    ],
)
def test_an_invalid_argument_changes_nothing(cluster, call):
    node = owning(cluster)
    with pytest.raises(ConfigurationError, match=r"^(timeout_ms|release) must be"):
        call(node.consumer)
    assert not node.consumer.is_closed
    assert node.consumer.assignment() == {T0}


@pytest.mark.parametrize("timeout_ms", [0, -1, -1_000, float("-inf")])
def test_close_with_an_unreachable_log_ends_at_its_deadline(cluster, timeout_ms):
    node = owning(cluster)
    node.cut(is_cut=True)
    node.consumer.close(timeout_ms=timeout_ms)
    assert node.observer.named("close_unconfirmed")
    assert not node.consumer.is_close_confirmed


def test_stop_ends_iteration_over_records_and_batches(cluster):
    node = owning(cluster)
    node.consumer.stop()
    assert list(node.consumer) == []
    assert list(node.consumer.batches()) == []


def test_granted_records_are_handed_out_after_a_stop(cluster):
    node = owning(cluster, delivery=AMO, most=4)
    polled(node)
    cluster.run(40)
    assert [record.offset for record in node.consumer.poll(0, 1).get(T0, ())] == [0]
    node.consumer.stop()
    assert [record.offset for record in node.consumer] == [1, 2, 3]
    node.leave()
    cluster.run(200)
    assert not node.observer.named("grant_lost")
    assert fold(cluster).keys[KEY].granted == 4


def test_a_batch_has_one_partition_and_commits_itself(cluster):
    node = owning(cluster, most=4)
    batch = next(node.consumer.batches())
    assert (batch.partition, batch.first_offset, batch.last_offset) == (T0, 0, 3)
    batch.commit()
    assert node.consumer.committed(T0) == 4
    assert len(next(node.consumer.batches(2)).records) == 2


def test_a_truncated_log_is_refolded(cluster):
    """PROTOCOL 7.5: the owner is fenced at once, then wins the claim again."""
    node = owning(cluster)
    cluster.run(H)
    cluster.kafka.truncate(cluster.place(0), end=2, leader=1)
    cluster.run(40)
    assert holders(cluster) == []
    assert node.consumer.poll(0) == {}
    cluster.run(3 * H)
    assert holders(cluster) == ["a"]
    assert node.consumer.poll(0)


def test_at_most_once_nothing_is_handed_out_while_appends_are_lost(cluster):
    node = owning(cluster, delivery=AMO)
    cluster.fates["a"] = AppendFate(is_lost=True)
    for _ in range(100):
        assert node.consumer.poll(0) == {}
        cluster.clock.advance(100)
        node.step()
    assert not node.held
