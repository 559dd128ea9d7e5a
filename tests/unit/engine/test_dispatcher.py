"""Records are fetched and handed out, over a whole log."""

from collections import Counter
from types import SimpleNamespace

import pytest
import variants
from enginekit import (
    ALO,
    AMO,
    KEY,
    T0,
    H,
    claim_of,
    fold,
    held_by,
    of,
    owning,
    pause_for,
    spec,
    values,
    world,
    write,
)

from kafka_marshal.engine.dispatcher import FETCH_SLICE_MS, WAIT_SLICE_MS
from kafka_marshal.engine.fetch_state import FetchState
from kafka_marshal.engine.holding import Holding
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.records import (
    ClaimingMessages,
    ReleasingPartition,
)
from kafka_marshal.protocol.types import OffsetRange, TopicPartition
from simulator.fakestore import AppendFate

T1 = TopicPartition("t", 1)

# --- Partitions that are won together ---


def test_a_won_partition_does_not_count_the_records_of_all_others(
    monkeypatch,
):
    """Otherwise a member with 15,000 partitions needs half a minute."""
    cluster = world(records=[1] * 100)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 100), 4 * H)
    plain, counts = vars(FetchState)["buffered_count"].fget, []

    def counted(place):
        counts.append(place)
        return plain(place)

    monkeypatch.setattr(FetchState, "buffered_count", property(counted))
    assert len(node.consumer.assignment()) == 100
    assert len(counts) <= 10 * 100


def test_polls_pass_over_no_offsets_in_idle_partitions(monkeypatch):
    """Otherwise each of thousands of idle partitions would take the lock."""
    cluster = world(records=[1] * 20)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 20), 4 * H)
    while node.consumer.poll(0):
        cluster.run(20)
    skipped = []
    monkeypatch.setattr(Holding, "skip", lambda *args: skipped.append(args))
    for _ in range(20):
        node.consumer.poll(0)
        cluster.run(50)
    assert not skipped


# --- At most once (PROTOCOL 6.2) ---


@pytest.mark.parametrize("waited_ms", [0, int(0.75 * H)], ids=["asked", "granted"])
def test_a_late_grant_counts_once(cluster, waited_ms):
    """Either request may arrive first, the late one or the repeated one."""
    node = owning(cluster, delivery=AMO, most=3)
    cluster.fates["a"] = AppendFate(delay_ms=int(0.7 * H), fails_after_ms=10)
    assert node.consumer.poll(0) == {}
    cluster.fates.clear()
    cluster.run(waited_ms)
    got = []
    for _ in range(200):
        cluster.run(20)
        for records in node.consumer.poll(0).values():
            got.extend(record.offset for record in records)
    assert got == list(range(10))
    asked = of(cluster, "a", ClaimingMessages)
    again = [x.transition.effect for x in asked if x.record.first == 0]
    assert again == (["granted"] if waited_ms else ["granted", None])


def test_records_are_handed_out_only_after_their_grant_is_read_back(cluster):
    node = owning(cluster, delivery=AMO, most=3)
    assert node.consumer.poll(0) == {}
    assert of(cluster, "a", ClaimingMessages)[0].transition.effect == "granted"
    assert node.consumer.poll(0) == {}
    cluster.run(20)
    assert values(node.consumer.poll(0)) == {0: [0, 1, 2]}


def handed_out_within_the_lease(cluster):
    """Run to the lease's soft stop with granted records to hand out."""
    node = owning(cluster, delivery=AMO, most=3)
    assert node.consumer.poll(0) == {}
    cluster.run(20)
    claim = claim_of(node)
    progress = node.session.holdings[KEY].progress
    node.log.cut = True
    soft_ms = claim.lease.soft_until_ms
    cluster.run_until(lambda: node.clock.now_ms() >= soft_ms, 2 * H)
    assert claim.is_owned
    assert progress.unused_count == 3
    assert node.consumer.poll(0) == {}
    node.log.cut = False
    cluster.run_until(lambda: claim.lease.soft_until_ms > soft_ms, H)
    assert values(node.consumer.poll(0)) == {0: [0, 1, 2]}


def test_granted_records_are_handed_out_only_within_the_lease(cluster):
    """PROTOCOL 5.2: a grant does not renew the claim that it was made under."""
    handed_out_within_the_lease(cluster)


def test_a_variant_that_hands_out_after_the_soft_stop_fails(cluster, monkeypatch):
    variants.hand_out_after_the_soft_stop(monkeypatch)
    with pytest.raises(AssertionError):
        handed_out_within_the_lease(cluster)


def test_a_replaced_owner_hands_out_no_more_granted_records(cluster):
    endings = []
    node = owning(cluster, delivery=AMO, most=3, on_lost=lambda *it: endings.append(it))
    node.consumer.poll(0)
    node.log.cut = True
    b = cluster.node("b", spec=spec(delivery=AMO))
    got = []
    for _ in range(int(4 * H / 20)):
        cluster.run(20)
        for records in b.consumer.poll(0).values():
            got.extend(record.offset for record in records)
    node.log.cut = False
    cluster.run(20)
    assert node.consumer.poll(0) == {}
    assert [ending.reason for _, ending in endings] == ["lease_expired"]
    # 0 to 2 were granted to a process that never read that: lost, not repeated.
    assert got == [3, 4, 5, 6, 7, 8, 9]


def test_an_ignored_grant_request_ends_the_claim(cluster):
    node = owning(cluster, delivery=AMO, most=3)
    claim = claim_of(node)
    owner = node.owner
    write(
        cluster,
        ReleasingPartition(
            client_id=owner.client_id,
            group_id="g",
            incarnation=owner.incarnation,
            seq=0,
            topic="t",
            partition=0,
            epoch=claim.epoch,
            position=None,
            successor=None,
            reason=None,
        ),
    )
    node.consumer.poll(0)
    cluster.run(20)
    assert claim.phase is Phase.ENDED
    assert claim.ending.reason == "grant_ignored"


def test_a_drain_waits_for_granted_records(cluster):
    node = owning(cluster, delivery=AMO, most=3)
    node.consumer.poll(0)
    cluster.run(20)
    pause_for(cluster, 10 * H)
    cluster.run(100)
    assert claim_of(node).phase is Phase.HELD
    assert values(node.consumer.poll(0)) == {0: [0, 1, 2]}
    # The application processes them until its next poll.
    cluster.run(100)
    assert claim_of(node).phase is Phase.HELD
    assert node.consumer.poll(0) == {}
    cluster.run(40)
    known = fold(cluster).keys[KEY]
    assert (known.owner, known.granted) == (None, 3)


def test_fetched_records_stay_within_max_fetched(monkeypatch):
    cluster = world(records=(400, 400, 400))
    frugal = spec(delivery=AMO, most=10, batches=2, max_fetched=50)
    node = cluster.node("a", spec=frugal)
    cluster.run_until(lambda: len(node.held) == 3, 4 * H)
    reader = node.consumer._reader
    fetched = []
    plain = reader.poll

    def poll(timeout_ms, max_records):
        places = node.consumer._fetch_states.values()
        fetched.append(max_records + sum(place.buffered_count for place in places))
        return plain(timeout_ms, max_records)

    monkeypatch.setattr(reader, "poll", poll)
    got = 0
    for _ in range(400):
        cluster.run(20)
        got += sum(map(len, node.consumer.poll(0).values()))
    assert got == 1_200
    assert 40 < max(fetched) <= 50


@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_records_that_the_reader_holds_are_read_at_once(monkeypatch, delivery):
    cluster = world(records=(40,))
    node = owning(cluster, delivery=delivery, most=10)
    reader = node.consumer._reader
    sizes = []
    plain = reader.poll

    def poll(timeout_ms, max_records):
        sizes.append(max_records)
        return plain(timeout_ms, max_records)

    monkeypatch.setattr(reader, "poll", poll)
    reader.fetched_max = 30
    got = 0
    for _ in range(40):
        got += sum(map(len, node.consumer.poll(0).values()))
        node.consumer.commit()
        cluster.run(20)
    assert got == 40
    assert min(sizes) >= 30


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_a_partition_with_fetched_records_is_paused_in_the_reader(
    monkeypatch, isolation
):
    """At most once, a partition without a grant must not keep others from a fetch."""
    cluster = world(records=(60, 60))
    rest = {"max_fetched": 10, "isolation_level": isolation}
    node = cluster.node("a", spec=spec(delivery=AMO, most=10, **rest))
    cluster.run_until(lambda: len(node.held) == 2, 4 * H)
    reader, dispatcher = node.consumer._reader, node.consumer._dispatcher
    reader.fetched_max = 30
    pauses = []
    plain = reader.poll

    def poll(timeout_ms, max_records):
        found = plain(timeout_ms, max_records)
        pauses.append((set(dispatcher._reader_paused), set(found)))
        return found

    monkeypatch.setattr(reader, "poll", poll)
    got = Counter()
    for _ in range(60):
        got.update({at: len(each) for at, each in node.consumer.poll(0).items()})
        cluster.run(20)
    assert got == {T0: 60, T1: 60}
    assert not any(paused & found for paused, found in pauses)
    paused = [each for each, _ in pauses]
    assert {T0} in paused or {T1} in paused


def test_small_polls_request_grants_at_most_once_a_millisecond(monkeypatch):
    cluster = world(records=(40,))
    node = owning(cluster, delivery=AMO, most=20)
    looks = []
    pipeline = node.consumer._dispatcher._pipeline
    plain = pipeline.request_grants

    def request_grants(places):
        looks.append(cluster.clock.now_ms())
        return plain(places)

    node.consumer.poll(0)
    cluster.run(40)
    monkeypatch.setattr(pipeline, "request_grants", request_grants)
    got = sum(len(node.consumer.poll(0, 1)[KEY.topic_partition]) for _ in range(10))
    assert got == 10
    assert len(looks) == 1
    cluster.run(20)
    assert node.consumer.poll(0, 1)
    assert len(looks) == 2


def test_a_fetch_waits_for_granted_records_while_verdicts_are_pending(
    monkeypatch,
):
    cluster = world(records=(40,))
    node = owning(cluster, delivery=AMO, most=10)
    dispatcher = node.consumer._dispatcher
    dispatcher.follow()
    (place,) = dispatcher.fetch_states.values()
    progress = place.holding.progress
    progress._grants.append(OffsetRange(0, 5))
    progress.request(1, 9)
    reads, waits = [], []
    monkeypatch.setattr(dispatcher, "_read", lambda wait_ms, *_: reads.append(wait_ms))
    monkeypatch.setattr(dispatcher, "_wait", waits.append)
    dispatcher.fetch(1_000)
    assert (reads, waits) == ([FETCH_SLICE_MS], [])
    dispatcher.fetch(0)
    assert (reads[1:], waits) == ([0], [0])
    place.fetched = [SimpleNamespace(offset=9)]
    dispatcher.fetch(1_000)
    assert (reads[2:], waits[1:]) == ([0], [WAIT_SLICE_MS])
    place.fetched = []
    dispatcher.pause([place.partition])
    dispatcher.fetch(1_000)
    assert FETCH_SLICE_MS not in reads[3:]


@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_a_reader_with_nothing_to_fetch_is_polled_from_time_to_time(
    monkeypatch, delivery
):
    """Otherwise a client library keeps its errors and log lines for ever."""
    cluster = world(records=(40,))
    node = owning(cluster, delivery=delivery, most=10)
    node.consumer.pause(*node.consumer.assignment())
    node.consumer.poll(0)
    reader = node.consumer._reader
    polls = []
    plain = reader.poll

    def poll(timeout_ms, max_records):
        polls.append(timeout_ms)
        return plain(timeout_ms, max_records)

    monkeypatch.setattr(reader, "poll", poll)
    for _ in range(30):
        assert node.consumer.poll(0) == {}
        cluster.run(100)
    assert len(polls) == 2
    assert not any(polls)


@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_a_partition_with_many_records_does_not_delay_an_empty_one(delivery):
    cluster = world(records=(5_000, 0))
    node = cluster.node("a", spec=spec(delivery=delivery, most=10, max_fetched=50))
    cluster.run_until(lambda: len(node.held) == 2, 4 * H)
    node.consumer._reader.fetched_max = 100_000
    cluster.run(40)
    got = []
    for turn in range(40):
        cluster.run(20)
        got += node.consumer.poll(0)
        node.consumer.commit()
        if turn == 10:
            assert set(got) == {T0}
            assert node.consumer._fetch_states[T0].buffered_count > 4_000
            cluster.kafka.produce(T1, b"late")
    assert T1 in got
    assert got.count(T0) > 30
    if delivery is ALO:
        # Single records are handed out by the fast path meanwhile.
        assert node.consumer.next_fetched() is not None
