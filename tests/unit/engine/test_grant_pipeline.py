"""Grants are requested ahead, at most once (PROTOCOL 6.3), over a whole log."""

from types import SimpleNamespace

import pytest
from enginekit import (
    AMO,
    KEY,
    T0,
    H,
    Stepping,
    claim_of,
    fold,
    held_by,
    of,
    owning,
    pause_for,
    pause_record,
    spec,
    world,
    write,
)

from kafka_marshal.engine import grant_pipeline
from kafka_marshal.engine.fetch_state import FetchState
from kafka_marshal.engine.grant_pipeline import GrantPipeline
from kafka_marshal.errors import ClaimLost
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.granting import AtMostOnce, GrantDepth, GrantVerdict
from kafka_marshal.protocol.losses import marks_of
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.types import OffsetRange, TopicPartition
from simulator.fakedata import FakeDataReader
from simulator.fakestore import AppendFate

T1 = TopicPartition("t", 1)


class Eager(GrantDepth):
    """Uses the full depth of the pipeline from the start."""

    def __init__(self, most):
        super().__init__(most)
        self.depth = most

    def on_sample(self, work_us, **measured):
        super().on_sample(work_us, **measured)
        self.depth = self.most


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setattr(grant_pipeline, "GrantDepth", Eager)


@pytest.fixture
def ahead(monkeypatch):
    """Make readers fetch ahead by themselves."""
    monkeypatch.setattr(FakeDataReader, "fetches_ahead", True)


def asked(cluster, client_id="a"):
    return [
        (line.record.first, line.record.proposed_last_offset)
        for line in of(cluster, client_id, ClaimingMessages)
    ]


def consumed(node, cluster, times=60):
    """Poll; return every offset that was handed out."""
    got = []
    for _ in range(times):
        for records in node.consumer.poll(0).values():
            got += [record.offset for record in records]
        cluster.run(20)
    return got


def polled_of(node, cluster, partition, *, times=10):
    """Poll; return the offsets of one partition that were handed out."""
    got = []
    for _ in range(times):
        got += [record.offset for record in node.consumer.poll(0).get(partition, ())]
        cluster.run(20)
    return got


def outstanding(node):
    return node.session.holdings[KEY].progress.outstanding_count


# --- depth


def test_requests_start_with_one_batch_and_grow():
    cluster = world(records=(200,))
    node = owning(cluster, delivery=AMO, most=2)
    node.consumer.poll(0)
    assert outstanding(node) == 1
    node.consumer.poll(0)
    assert asked(cluster) == [(0, 1)]
    assert consumed(node, cluster, 150) == list(range(200))
    # Batches that are consumed at once are requested several at a time.
    sizes = {last - first + 1 for first, last in asked(cluster)}
    assert max(sizes) > 2


def test_several_requests_in_flight_stay_within_the_bound_of_batches(eager):
    cluster = world(records=(100,))
    node = owning(cluster, delivery=AMO, most=3)
    cluster.fates["a"] = AppendFate(delay_ms=100)
    holding = node.session.holdings[KEY]
    got, worst = [], 0
    for _ in range(60):
        for records in node.consumer.poll(0).values():
            got += [record.offset for record in records]
            holding_now = holding.progress
            at_risk = holding_now.next_first - holding_now.done
            worst = max(worst, at_risk)
        cluster.run(20)
    assert got == list(range(len(got)))
    assert len(got) > 20
    assert worst == 4 * 3


def test_a_bound_of_one_batch_requests_each_after_the_last_is_processed(eager):
    cluster = world(records=(20,))
    node = owning(cluster, delivery=AMO, most=3, batches=1)
    assert consumed(node, cluster, 40) == list(range(20))
    granted_before = 0
    for line in of(cluster, "a", ClaimingMessages):
        assert marks_of(line.record)[0] == granted_before
        granted_before = line.record.proposed_last_offset + 1


def test_single_record_polls_do_not_request_single_records(eager):
    cluster = world(records=(100,))
    node = owning(cluster, delivery=AMO, most=10)
    got = []
    for _ in range(120):
        for records in node.consumer.poll(0, 1).values():
            got += [record.offset for record in records]
        cluster.run(20)
    assert got == list(range(100))
    assert len(asked(cluster)) <= 12


def test_small_requests_wait_while_grants_are_pending(monkeypatch):
    monkeypatch.setattr(grant_pipeline, "GROW_MS", 500)
    cluster = world(records=(20, 4))
    node = cluster.node("a", spec=spec(delivery=AMO, most=4))
    cluster.run_until(held_by(node, 2), 3 * H)
    cluster.run(40)
    node.consumer.pause(T1)
    cluster.fates["a"] = AppendFate(delay_ms=2_000)
    node.consumer.poll(0)
    cluster.fates.clear()
    node.consumer.resume(T1)
    assert [*polled_of(node, cluster, T1)] == [0, 1, 2, 3]
    before = len(asked(cluster))
    cluster.kafka.produce(T1, b"more")
    assert polled_of(node, cluster, T1, times=3) == []
    assert len(asked(cluster)) == before
    # The request waits only briefly, even if others are pending elsewhere.
    assert polled_of(node, cluster, T1, times=30) == [4]
    assert outstanding(node) == 1


def sizes_of(cluster, partition):
    return [
        line.record.proposed_last_offset - line.record.first + 1
        for line in of(cluster, "a", ClaimingMessages)
        if line.record.partition == partition
    ]


@pytest.mark.parametrize(
    ("records", "fetched", "at_once"),
    [
        pytest.param((120,), 100, 6, id="alone"),
        pytest.param((120, 120), 100, 9, id="covered"),
        pytest.param((120, 120), 12, 9, id="covered, little fetched"),
    ],
)
def test_requests_grow_while_grants_outlast_the_round_trip(
    records, fetched, at_once, eager
):
    cluster = world(records=records)
    node = cluster.node("a", spec=spec(delivery=AMO, most=3, max_fetched=fetched))
    cluster.run_until(held_by(node, len(records)), 3 * H)
    cluster.run(40)
    got = []
    for _ in range(150):
        for handed in node.consumer.poll(0).values():
            got += [record.offset for record in handed]
        assert all(
            holding.progress.next_first - holding.progress.done <= 4 * 3
            for holding in node.session.holdings.values()
        )
        cluster.run(20)
    assert sorted(got) == sorted([*range(120)] * len(records))
    # The first requests precede all measurements, the last are the rest.
    middle = sizes_of(cluster, 0)[3:-3]
    assert max(middle) == at_once


def test_partitions_send_their_requests_in_the_same_round(eager):
    cluster = world(records=(200, 200, 200))
    node = cluster.node("a", spec=spec(delivery=AMO, most=3))
    cluster.run_until(held_by(node, 3), 3 * H)
    cluster.run(40)
    rounds = []
    for _ in range(60):
        before = [len(sizes_of(cluster, each)) for each in range(3)]
        node.consumer.poll(0)
        cluster.run(20)
        after = [len(sizes_of(cluster, each)) for each in range(3)]
        if after != before:
            rounds.append([b - a for a, b in zip(before, after, strict=True)])
    # The partition whose turn it was has less room than the others.
    assert len(rounds) <= 30
    assert sum(sum(each) >= 2 for each in rounds) >= len(rounds) // 2


@pytest.mark.parametrize(
    ("places", "is_due"),
    [
        pytest.param([(0, 40), (0, 40)], False, id="nothing is fetched"),
        pytest.param([(30, 40), (0, 40)], False, id="all that is fetched is granted"),
        pytest.param([(30, 25), (0, 40)], False, id="it lasts long enough"),
        pytest.param([(30, 15), (0, 40)], True, id="what is granted is not fetched"),
        pytest.param([(30, 15), (30, 40)], False, id="the other is fetched, too"),
        pytest.param([(30, 15), (4, 40)], True, id="little of the other is fetched"),
        pytest.param([(0, 9), (0, 9)], True, id="little is granted"),
    ],
)
def test_grants_of_unfetched_records_do_not_delay_requests(places, is_due):
    pipeline = made(most=5, batches_max=9, is_end_readable=True)
    # Twenty records last as long as two round trips.
    pipeline._pace.work_us, pipeline._round_trip_us = 5_000, 10_000
    pairs = []
    for partition, (fetched, granted) in zip((T0, T1), places, strict=True):
        progress = AtMostOnce(0, grantee=b"me")
        progress.on_verdict(grant_of(0, granted), grantee=b"me", seq=1)
        place = FetchState(partition, SimpleNamespace(progress=progress), 0)
        place.fetched = [SimpleNamespace(offset=offset) for offset in range(fetched)]
        pairs.append((place, progress))
    assert pipeline._is_due(pairs, 0) == is_due


def test_a_fetch_ends_the_time_without_requests():
    pipeline = made(most=5, batches_max=9, is_end_readable=True)
    pipeline._quiet_until_ms = 100
    assert pipeline._is_quiet()
    pipeline.note_fetched()
    assert not pipeline._is_quiet()


# --- no position in the log yet


def test_without_a_position_requests_are_sent_one_at_a_time(eager):
    cluster = world(records=(40,))
    node = cluster.node("a", spec=spec(delivery=AMO, most=3))
    cluster.run_until(lambda: KEY in node.session.holdings, H)
    cluster.run_until(lambda: claim_of(node).is_verdict_pending, H)
    # The claim is sent; all later records arrive late, heartbeats included.
    cluster.fates["a"] = AppendFate(delay_ms=H, fails_after_ms=10)
    cluster.run_until(lambda: claim_of(node).phase is Phase.HELD, H)
    assert fold(cluster).keys[KEY].next_unclaimed() is None
    cluster.fates.clear()
    node.consumer.poll(0)
    node.consumer.poll(0)
    assert outstanding(node) == 1
    assert consumed(node, cluster) == list(range(40))


def test_a_request_that_overtakes_another_is_granted_the_offsets_of_both(eager):
    cluster = world(records=(12,))
    node = owning(cluster, delivery=AMO, most=3)
    got = consumed(node, cluster, 1)
    cluster.fates["a"] = AppendFate(delay_ms=H // 3, fails_after_ms=10)
    got += consumed(node, cluster, 1)
    cluster.fates.clear()
    got += consumed(node, cluster, 100)
    assert got == list(range(12))


# --- refusals


def test_requests_stay_within_a_small_span(eager):
    cluster = world(records=(50,), span=5)
    node = owning(cluster, delivery=AMO, most=3)
    cluster.fates["a"] = AppendFate(delay_ms=60)
    assert consumed(node, cluster, 120) == list(range(50))
    refused = [x for x in of(cluster, "a", ClaimingMessages) if x.transition.reason]
    assert refused == []


def test_a_short_pause_loses_no_granted_records(eager):
    cluster = world(records=(30,))
    node = owning(cluster, delivery=AMO, most=3)
    got = consumed(node, cluster, 3)
    until_ms = pause_for(cluster, 10 * H)
    got += [r.offset for rs in node.consumer.poll(0).values() for r in rs]
    write(cluster, pause_record(cluster, until_ms - 20 * H, seq=2))
    got += consumed(node, cluster, 200)
    assert got == list(range(30))
    assert not node.observer.named("grant_lost")


def test_a_drain_hands_out_all_granted_records(eager):
    cluster = world(records=(60,))
    node = owning(cluster, delivery=AMO, most=3)
    got = consumed(node, cluster, 2)
    pause_for(cluster, 10 * H)
    got += consumed(node, cluster, 40)
    known = fold(cluster).keys[KEY]
    assert known.owner is None
    assert got == list(range(known.granted))
    assert not node.observer.named("grant_lost")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_poll_waits_while_the_lease_is_past_its_soft_stop(eager, is_stopped):
    """Time passes only in waits: a poll that does not wait would never return."""
    cluster = world(records=(60,))
    node = owning(cluster, delivery=AMO, most=3)
    consumed(node, cluster, 4)
    node.engine.changed = Stepping(cluster)
    node.cut(is_cut=True)
    soft_ms = claim_of(node).lease.soft_until_ms
    cluster.run_until(lambda: cluster.clock.now_ms() >= soft_ms, 2 * H)
    if is_stopped:
        node.consumer.stop()
    before_ms = cluster.clock.now_ms()
    assert node.consumer.poll(100) == {}
    assert cluster.clock.now_ms() - before_ms >= 100
    assert not node.consumer.is_finished


def shared_slowly(cluster, *, rounds):
    """Own two partitions, process four records an interval; another member joins."""
    node = cluster.node("a", spec=spec(delivery=AMO, most=3))
    cluster.run_until(held_by(node, 2), 3 * H)
    consumed(node, cluster, 4)
    cluster.node("b", spec=spec(delivery=AMO, most=3))
    for _ in range(rounds):
        node.consumer.poll(0, max_records=1)
        cluster.run(H // 4)
    return node


def test_surplus_waits_for_a_slow_application(eager):
    """The granted records last for several intervals, and none is lost."""
    cluster = world(records=(60, 60))
    node = shared_slowly(cluster, rounds=60)
    assert len(node.session.holdings) == 1
    assert not node.observer.named("grant_lost")


def test_surplus_waits_a_limited_time_for_records_that_cannot_be_fetched(eager, ahead):
    cluster = world(records=(60, 60))
    node = shared_slowly(cluster, rounds=0)
    node.data.cut = True
    before = cluster.clock.now_ms()
    while len(node.session.holdings) == 2:
        node.consumer.poll(0)
        cluster.run(20)
    assert H < cluster.clock.now_ms() - before < 3 * H
    assert node.observer.named("grant_lost")


# --- endings


def test_records_granted_to_another_process_are_skipped(eager):
    cluster = world(records=(30,))
    node = owning(cluster, delivery=AMO, most=4)
    owner, epoch = node.owner, claim_of(node).epoch
    write(
        cluster,
        ClaimingMessages(
            client_id=owner.client_id,
            group_id="g",
            incarnation=owner.incarnation,
            seq=9_999,
            topic="t",
            partition=0,
            epoch=epoch,
            grantee=b"task".ljust(16, b"."),
            first=0,
            proposed_last_offset=13,
        ),
    )
    assert consumed(node, cluster) == list(range(14, 30))


def test_a_batch_ends_before_records_granted_to_another_process():
    pipeline = made(most=9, batches_max=3, is_end_readable=True)
    progress = AtMostOnce(0, grantee=b"me")
    for seq, (first, end) in enumerate([(0, 2), (3, 5)]):
        progress.on_verdict(grant_of(first, end), grantee=b"me", seq=seq)
    place = FetchState(T0, SimpleNamespace(progress=progress), 0)
    place.fetched = [SimpleNamespace(offset=offset) for offset in range(6)]
    for expected in ([0, 1], [3, 4], []):
        taken = pipeline.take(place, progress, most=9)
        assert [record.offset for record in taken] == expected


def test_a_paused_partition_sends_no_requests(eager):
    cluster = world(records=(10,))
    node = owning(cluster, delivery=AMO, most=2)
    node.consumer.pause(T0)
    assert consumed(node, cluster, 5) == []
    assert asked(cluster) == []
    node.consumer.resume(T0)
    assert consumed(node, cluster) == list(range(10))


def test_a_later_consumer_hands_out_records_granted_to_an_earlier_one(eager):
    cluster = world(records=(40,))
    node = owning(cluster, delivery=AMO, most=3)
    got = consumed(node, cluster, 3)
    assert node.session.holdings[KEY].progress.unused
    node.consumer.close(release=False, timeout_ms=0)
    cluster.run(100)
    node.consume(spec(delivery=AMO, most=3))
    got += consumed(node, cluster)
    assert got == list(range(40))
    assert not node.observer.named("grant_lost")


def test_grants_outlast_a_lease_past_its_soft_stop(eager):
    cluster = world(records=(40,))
    node = owning(cluster, delivery=AMO, most=3)
    got = consumed(node, cluster, 3)
    node.log.read_lag_ms = H  # beyond the soft stop, not beyond the hard one
    got += consumed(node, cluster, int(1.5 * H / 20))
    node.log.read_lag_ms = 0
    got += consumed(node, cluster)
    assert got == list(range(40))


def test_retention_does_not_affect_fetched_records(eager):
    cluster = world(records=(40,))
    node = owning(cluster, delivery=AMO, most=3)
    got = consumed(node, cluster, 2)
    end = node.consumer.position(T0)
    cluster.kafka.delete_records(T0, before=30)
    got += consumed(node, cluster)
    assert got == sorted(set(got))
    assert set(got) >= set(range(end)) | set(range(30, 40))


def test_a_lost_claim_with_granted_records_raises_and_reports_them(eager):
    cluster = world(records=(40,))
    node = owning(cluster, delivery=AMO, most=3)
    consumed(node, cluster, 3)
    node.log.cut = True
    cluster.run(3 * H)
    with pytest.raises(ClaimLost):
        node.consumer.poll(0)
    (event,) = node.observer.named("grant_lost")
    assert event.fields["key"] == KEY


def test_a_stop_requests_no_grants_and_hands_out_the_granted_records(eager):
    cluster = world(records=(60,))
    node = owning(cluster, delivery=AMO, most=3)
    got = consumed(node, cluster, 3)
    before = asked(cluster)
    node.consumer.stop()
    got += [record.offset for record in node.consumer]
    assert asked(cluster) == before
    assert got == list(range(before[-1][1] + 1))
    node.leave()
    cluster.run(100)
    assert not node.observer.named("grant_lost")


@pytest.mark.parametrize(
    ("most", "batches_max", "fetched_max", "depth_max"),
    [
        (500, 32, 16_000, 32),
        (500, 4, 5_000, 4),
        (1, 32, 5_000, 32),
        (5_000, 32, 20_000, 4),
        (5_000, 1, 5_000, 1),
        (100_000, 32, 400_000, 4),
    ],
)
def test_the_limits_of_a_pipeline_follow_the_batch_size(
    most, batches_max, fetched_max, depth_max
):
    pipeline = made(most=most, batches_max=batches_max, is_end_readable=False)
    assert pipeline.fetched_max == fetched_max
    assert pipeline._pace.most == depth_max
    assert pipeline.most_at_once(700) == 700
    # Where log ends are readable, fetched records do not bound requests.
    pipeline = made(most=most, batches_max=batches_max, is_end_readable=True)
    assert pipeline._pace.most == batches_max
    assert pipeline.most_at_once(700) == min(most, 700)


def made(*, most, batches_max, is_end_readable):
    clock = SimpleNamespace(now_ms=lambda: 0)
    engine = SimpleNamespace(
        context=SimpleNamespace(ports=SimpleNamespace(clock=clock))
    )
    return GrantPipeline(
        engine,
        None,
        reader=None,
        most=most,
        batches_max=batches_max,
        fetched_max=5_000,
        is_end_readable=is_end_readable,
    )


def test_the_wait_for_granted_records_begins_after_the_fetched_are_handed_out():
    """Handling fetched records may take longer than the wait for the rest."""
    pipeline = made(most=500, batches_max=32, is_end_readable=True)
    engine, at = pipeline._engine, [0]
    engine.context.ports.clock.now_ms = lambda: at[0]
    engine.context.heartbeat_interval_ms = H
    pipeline._clock = engine.context.ports.clock
    progress = AtMostOnce(0, grantee=b"g" * 16)
    progress._grants.append(OffsetRange(0, 9))
    holding = SimpleNamespace(progress=progress)
    place = SimpleNamespace(holding=holding, buffered_count=5, fetched_end=5)
    for now_ms in (0, 2 * H, 4 * H):
        at[0] = now_ms
        assert pipeline.holds([place])
    place.buffered_count = 0
    assert pipeline.holds([place])
    at[0] += H
    assert not pipeline.holds([place])


# --- records in the log that are not fetched


def fetched_until(node, partition=T0):
    return node.consumer._fetch_states[partition].fetched_end


def test_records_are_requested_before_they_are_fetched(eager, ahead):
    cluster = world(records=(100,))
    node = owning(cluster, delivery=AMO, most=3)
    got = consumed(node, cluster, 4)
    progress = node.session.holdings[KEY].progress
    assert progress.next_first > fetched_until(node)
    assert consumed(node, cluster) == list(range(got[-1] + 1, 100))


def test_only_fetched_records_are_requested_under_read_committed(eager):
    cluster = world(records=(100,))
    options = {"max_fetched": 12, "isolation_level": "read_committed"}
    node = owning(cluster, delivery=AMO, most=3, **options)
    got = []
    for _ in range(60):
        got += consumed(node, cluster, 1)
        assert node.session.holdings[KEY].progress.next_first <= fetched_until(node)
    assert got == list(range(100))


@pytest.mark.parametrize(
    ("fetched", "log_end", "granted", "is_ahead", "needs"),
    [
        pytest.param(2, 0, 0, True, True, id="too little is known"),
        pytest.param(9, 0, 0, True, False, id="as much is fetched as can be used"),
        pytest.param(5, 99, 0, True, False, id="the end shows more"),
        pytest.param(5, 99, 0, False, True, id="and nothing else fetches it"),
        pytest.param(2, 99, 0, True, True, id="less than a batch"),
        pytest.param(5, 99, 5, True, False, id="a batch is granted"),
        pytest.param(5, 99, 2, True, False, id="the rest is not granted"),
        pytest.param(20, 99, 0, True, False, id="no room"),
    ],
)
def test_records_are_needed_while_too_few_can_be_requested_or_handed_out(
    fetched, log_end, granted, is_ahead, needs
):
    pipeline = made(most=3, batches_max=3, is_end_readable=True)
    pipeline._reader = SimpleNamespace(fetches_ahead=is_ahead, fetched_max=0)
    pipeline._pace.depth, pipeline.fetched_max = 3, 12
    progress = AtMostOnce(0, grantee=b"me")
    if granted:
        progress.on_verdict(grant_of(0, granted), grantee=b"me", seq=1)
    holding = SimpleNamespace(progress=progress, granted_count=progress.unused_count)
    place = FetchState(T0, holding, 0)
    place.fetched = [SimpleNamespace(offset=offset) for offset in range(fetched)]
    place.log_end = log_end
    assert pipeline.needs_records([place]) == needs


@pytest.mark.parametrize(
    ("counts", "is_end_readable", "room", "enough", "needs"),
    [
        pytest.param([(5, 0), (0, 9)], True, 99, 1, True, id="nothing is both"),
        pytest.param([(5, 1), (0, 9)], True, 99, 1, False, id="something is both"),
        pytest.param([(5, 3), (0, 0)], True, 99, 1, False, id="a batch can be used"),
        pytest.param([(2, 2), (2, 1)], True, 99, 1, False, id="of several partitions"),
        pytest.param([(5, 5), (9, 9)], False, 99, 9, True, id="more can be requested"),
        pytest.param([(9, 5), (9, 9)], False, 99, 9, False, id="enough of each"),
        pytest.param([(5, 5), (9, 9)], False, 16, 1, False, id="no room for more"),
        pytest.param([(5, 0), (9, 0)], False, 16, 1, True, id="but for others"),
    ],
)
def test_records_held_by_the_reader_are_fetched_when_needed(
    counts, is_end_readable, room, enough, needs
):
    pipeline = made(most=3, batches_max=3, is_end_readable=is_end_readable)
    pipeline._reader = SimpleNamespace(fetches_ahead=True, fetched_max=1_000)
    pipeline._pace.depth, pipeline.fetched_max = 3, room
    places = []
    for partition, (fetched, granted) in zip((T0, T1), counts, strict=True):
        progress = AtMostOnce(0, grantee=b"me")
        if granted:
            progress.on_verdict(grant_of(0, granted), grantee=b"me", seq=1)
        holding = SimpleNamespace(progress=progress, granted_count=granted)
        place = FetchState(partition, holding, 0)
        place.fetched = [SimpleNamespace(offset=offset) for offset in range(fetched)]
        places.append(place)
    assert pipeline.enough_fetched(places) == enough
    assert pipeline.needs_records(places) == needs


def test_granted_records_are_fetched_despite_ungranted_ones_elsewhere():
    pipeline = made(most=3, batches_max=3, is_end_readable=True)
    pipeline._reader = SimpleNamespace(fetches_ahead=True, fetched_max=0)
    places = []
    for partition, fetched, granted in ((T0, 5, 0), (T1, 0, 4)):
        progress = AtMostOnce(0, grantee=b"me")
        if granted:
            progress.on_verdict(grant_of(0, granted), grantee=b"me", seq=1)
        holding = SimpleNamespace(progress=progress, granted_count=granted)
        place = FetchState(partition, holding, 0)
        place.fetched = [SimpleNamespace(offset=offset) for offset in range(fetched)]
        place.log_end = 99
        places.append(place)
    assert pipeline.needs_records(places)


def grant_of(first, end):
    return GrantVerdict(
        outcome="accepted",
        reason=None,
        granted=OffsetRange(first, end),
        head=end,
        offset=7,
    )


def test_a_log_end_counts_only_after_a_fetch_under_the_claim():
    cluster = world(records=(10,))
    node = owning(cluster, delivery=AMO, most=3)
    dispatcher = node.consumer._dispatcher
    dispatcher.follow()
    (place,) = dispatcher.fetch_states.values()
    dispatcher._reader._ends[T0] = 1_000  # that of an earlier topic of this name
    dispatcher._pipeline.request_grants([place])
    assert place.log_end == 0
    assert asked(cluster) == []
    assert consumed(node, cluster) == list(range(10))
    assert asked(cluster)[-1][1] == 9


def test_a_seek_forgets_the_log_end(eager):
    cluster = world(records=(40,))
    node = owning(cluster, delivery=AMO, most=3)
    consumed(node, cluster, 3)
    (place,) = node.consumer._fetch_states.values()
    assert place.log_end == 40
    node.consumer._dispatcher._seek(place, place.next_offset)
    assert (place.is_read, place.log_end) == (False, 0)


def with_unfetched(cluster, **options):
    """Return a node that was granted records which it has not fetched."""
    node = owning(cluster, delivery=AMO, most=3, **options)
    got = consumed(node, cluster, 4)
    progress = node.session.holdings[KEY].progress
    assert progress.unused[-1].last >= fetched_until(node)
    return node, got


def test_a_stop_fetches_and_hands_out_granted_records(eager, ahead):
    cluster = world(records=(60,))
    node, got = with_unfetched(cluster)
    before = asked(cluster)
    node.consumer.stop()
    while records := node.consumer.poll(0):
        got += [record.offset for record in records[T0]]
    assert asked(cluster) == before
    assert got == list(range(before[-1][1] + 1))
    assert node.consumer.is_finished
    node.leave()
    assert not node.observer.named("grant_lost")


def test_a_stop_waits_for_verdicts_on_unfetched_records(eager, ahead):
    """The verdicts on several requests come one by one, each after a hand-out."""
    cluster = world(records=(60,))
    node = owning(cluster, delivery=AMO, most=3)
    cluster.fates["a"] = AppendFate(delay_ms=200)
    got = []

    def polled():
        got.extend(r.offset for r in node.consumer.poll(0).get(T0, ()))
        return outstanding(node)

    cluster.run_until(lambda: polled() > 2, H, step_ms=50)
    node.consumer.stop()
    while not node.consumer.is_finished:
        polled()
        cluster.run(10)
    assert got == list(range(asked(cluster)[-1][1] + 1))
    node.leave()
    cluster.run(200)
    assert not node.observer.named("grant_lost")


def test_a_stop_waits_half_an_interval_for_a_missing_verdict(eager, ahead):
    cluster = world(records=(60,))
    node = owning(cluster, delivery=AMO, most=3)
    consumed(node, cluster, 4)
    node.log.cut = True
    cluster.run_until(lambda: node.consumer.poll(0) == {} and outstanding(node), H)
    node.consumer.stop()
    assert not node.consumer.is_finished
    cluster.run(H // 2 + 100)
    assert not outstanding(node)
    assert node.consumer.is_finished


def test_a_stop_fetches_no_batch_beyond_the_granted_records(eager, ahead):
    cluster = world(records=(60, 60))
    node = cluster.node("a", spec=spec(delivery=AMO, most=3))
    cluster.run_until(held_by(node, 2), 3 * H)
    cluster.run(40)
    polled_of(node, cluster, T0, times=6)
    node.consumer.stop()
    granted = {
        key.topic_partition: holding.progress.unused[-1].end
        for key, holding in node.session.holdings.items()
    }
    while node.consumer.poll(0):
        pass
    # The last batch may begin within the granted range and end beyond it.
    for partition, end in granted.items():
        assert fetched_until(node, partition) < end + 3


def test_a_stop_waits_an_interval_for_records_that_cannot_be_fetched(eager, ahead):
    cluster = world(records=(60,))
    node, _ = with_unfetched(cluster)
    node.consumer.stop()
    node.data.cut = True
    while node.consumer.poll(0):
        pass
    assert not node.consumer.is_finished
    cluster.run(H)
    assert node.consumer.is_finished


def test_a_drain_fetches_and_hands_out_granted_records(eager, ahead):
    cluster = world(records=(60,))
    node, got = with_unfetched(cluster)
    pause_for(cluster, 10 * H)
    got += consumed(node, cluster, 40)
    known = fold(cluster).keys[KEY]
    assert known.owner is None
    assert got == list(range(known.granted))
    assert not node.observer.named("grant_lost")


def test_ungranted_records_do_not_prevent_the_fetch_of_granted_ones(eager, ahead):
    cluster = world(records=(60,))
    node, got = with_unfetched(cluster)
    node.consumer._dispatcher._pipeline.fetched_max = 0
    pause_for(cluster, 10 * H)
    got += consumed(node, cluster, 40)
    assert got == list(range(fold(cluster).keys[KEY].granted))
    assert not node.observer.named("grant_lost")


@pytest.mark.parametrize(
    ("fetched", "end", "fresh", "room", "last"),
    [
        pytest.param(range(10, 20), 0, 4, 3, 16, id="fetched"),
        pytest.param(range(10, 20), 0, 4, 9, 19, id="all that is fetched"),
        pytest.param(range(10, 20), 100, 4, 9, 22, id="and some of the log"),
        pytest.param(range(10, 20), 21, 4, 9, 20, id="and the rest of the log"),
        pytest.param(range(10, 30, 2), 100, 8, 4, 30, id="gaps"),
        pytest.param((), 100, 0, 9, 18, id="nothing is fetched"),
        pytest.param((), 0, 0, 9, 9, id="nothing is known"),
    ],
)
def test_last_known_is_the_last_offset_to_request(fetched, end, fresh, room, last):
    place = FetchState(T0, None, 10)
    place.fetched = [SimpleNamespace(offset=offset) for offset in fetched]
    place.log_end = end
    first = place.fetched[fresh].offset if fetched else 10
    assert grant_pipeline.last_known(place, fresh, room=room, first=first) == last
