"""Keys are handed to successors that warm up first (PROTOCOL 9.5)."""

import pytest
from enginekit import ALO, AMO, H, fold, held_by, of, spec, values, world, write
from logkit import offer, settings

from kafka_marshal.protocol.records import (
    ClaimingPartition,
    HandoffOffer,
    HandoffReady,
    ReleasingPartition,
)
from kafka_marshal.protocol.settings import TUNABLES
from simulator import node
from simulator.fakedata import FakeDataReader
from simulator.fakestore import AppendFate

WITHIN_MS = TUNABLES["handoff_ms"].default
OFFERS_MAX = TUNABLES["handoffs_max"].default
LOST = AppendFate(is_lost=True)


class Warm:
    """A warm-up of an application, which notes its calls and may fail."""

    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def __call__(self, partition, position, from_client):
        self.calls.append((partition, position, from_client))
        if self.error is not None:
            raise self.error


@pytest.fixture
def cluster():
    return world(partitions=1, records=(4, 4))


def joined(cluster, warm, *, is_held=True):
    """Return an owner of both partitions, and a member that joins and warms up."""
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 2, 3 * H)
    b = cluster.node("b")
    b.warming.is_held = is_held
    b.consume(spec(on_warm=warm))
    return a, b


def warming(cluster, b):
    return lambda: b.warming.waiting_count == 1


def offers(cluster, client_id="a"):
    return of(cluster, client_id, HandoffOffer)


def test_the_owner_keeps_the_key_until_the_successor_is_ready(cluster):
    warm = Warm()
    a, b = joined(cluster, warm)
    cluster.run_until(warming(cluster, b), 3 * H)
    cluster.run(3 * H)
    assert len(a.held) == 2
    assert not of(cluster, "a", ReleasingPartition)
    assert not warm.calls
    b.warming.run_waiting()
    cluster.run_until(lambda: len(b.held) == 1, H)
    assert [call[2] for call in warm.calls] == ["a"]
    (ready,) = of(cluster, "b", HandoffReady)
    assert ready.transition.effect == "ready"
    (offer,) = offers(cluster)
    (release,) = of(cluster, "a", ReleasingPartition)
    assert offer.offset < ready.offset < release.offset
    assert release.record.successor == "b"
    (claim,) = of(cluster, "b", ClaimingPartition)
    assert claim.transition.effect == "claimed"
    # Only a round trip lies between them: no jitter, no wait for a policy.
    assert claim.time_ms - release.time_ms < 100


def test_an_offer_read_before_the_engine_is_ready_is_followed_later():
    """The successor restarts, and reads one coordinating partition late."""
    cluster = world(partitions=2, records=[4] * 8)
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 8), 3 * H)
    key = next(key for key, each in a.session.holdings.items() if not each.coordinator)
    b = cluster.node("b", spec=spec(on_warm=Warm()))
    b.warming.is_held = True
    b.log.lags_ms[1] = 2 * H
    b.step()
    assert not b.engine.is_ready
    found = fold(cluster).keys[key]
    sender = {"client": "a", "inc": found.owner.incarnation}
    write(cluster, offer(found.epoch, "b", key=key, within_ms=30 * H, **sender))
    cluster.run(200)
    assert not b.engine.is_ready
    assert b.engine.failure is None
    b.log.lags_ms.clear()
    cluster.run_until(lambda: b.warming.waiting_count, 3 * H)
    b.warming.run_waiting()
    cluster.run_until(lambda: of(cluster, "b", HandoffReady), H)
    ready = of(cluster, "b", HandoffReady)[0].record
    assert (ready.partition, ready.epoch) == (key.partition, found.epoch)


def test_on_warm_is_called_with_partition_position_and_owner(cluster):
    warm = Warm()
    a, b = joined(cluster, warm)
    a.consumer.poll(1000)
    a.consumer.commit()
    cluster.run_until(warming(cluster, b), 3 * H)
    b.warming.run_waiting()
    ((partition, position, owner),) = warm.calls
    assert partition.topic == "t"
    assert owner == "a"
    assert position in {0, 4}


def test_a_member_without_on_warm_gets_the_key_without_an_offer(cluster):
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 2, 3 * H)
    b = cluster.node("b", spec=spec())
    cluster.run_until(lambda: len(b.held) == 1, 3 * H)
    assert not offers(cluster)


def test_a_key_with_uncommitted_records_is_drained_first(cluster):
    warm = Warm()
    a, b = joined(cluster, warm)
    polled = values(a.consumer.poll(1000))
    assert polled
    cluster.run_until(warming(cluster, b), 3 * H)
    b.warming.run_waiting()
    cluster.run(H // 2)
    held = {key.partition for key in a.held}
    assert len(held) == 2  # both have uncommitted records
    a.consumer.commit()
    cluster.run_until(lambda: len(b.held) == 1, H)


@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_a_drain_ends_as_soon_as_nothing_is_uncommitted(cluster, delivery):
    a = cluster.node("a", spec=spec(delivery=delivery))
    cluster.run_until(lambda: len(a.held) == 2, 3 * H)
    a.consumer.poll(0)
    cluster.run(100)
    a.consumer.poll(0)
    b = cluster.node("b")
    b.warming.is_held = True
    b.consume(spec(delivery=delivery, on_warm=Warm()))
    cluster.run_until(warming(cluster, b), 3 * H)
    (sub,) = b.session.subscriptions
    assert not sub.expects_claim
    b.warming.run_waiting()
    cluster.run(200)
    assert sub.expects_claim
    assert not a.session.leaving_count
    # Without another round of the engine: it may be waiting for the log.
    if delivery is ALO:
        a.consumer.commit()
    else:
        a.consumer.poll(0)
    assert a.session.leaving_count == 1
    cluster.run_until(lambda: len(b.held) == 1, H)
    assert not sub.expects_claim


def test_a_prefetch_does_not_wait_for_records_while_a_claim_is_expected(
    cluster, monkeypatch
):
    _, b = joined(cluster, Warm())
    cluster.fill("other", (1,))
    cluster.run_until(warming(cluster, b), 3 * H)
    waited = []
    poll = FakeDataReader.poll

    def noting(reader, timeout_ms, most):
        waited.append(timeout_ms)
        return poll(reader, timeout_ms, most)

    c = cluster.node("c", group_id="another", spec=spec("other"))
    cluster.run_until(lambda: len(c.held) == 1, 3 * H)
    c.consumer.poll(0)
    monkeypatch.setattr(FakeDataReader, "poll", noting)
    c.consumer.prefetch(50)
    assert max(waited) == 50
    waited.clear()
    (sub,) = c.session.subscriptions
    sub.expects_claim = True
    c.consumer.prefetch(50)
    assert waited == [0]


def test_a_claim_is_not_expected_after_its_offer_ends(cluster):
    a, b = joined(cluster, Warm())
    a.consumer.poll(0)
    cluster.run_until(warming(cluster, b), 3 * H)
    b.warming.run_waiting()
    (sub,) = b.session.subscriptions
    cluster.run_until(lambda: sub.expects_claim, H)
    cluster.crash(a)
    c = cluster.node("c", spec=spec())
    cluster.nodes.remove(b)
    cluster.run_until(lambda: len(c.held) == 2, 6 * H)
    cluster.nodes.append(b)
    cluster.run_until(lambda: not sub.expects_claim, H)


def test_an_offer_to_a_successor_that_dies_is_withdrawn(cluster):
    a, b = joined(cluster, Warm())
    cluster.run_until(warming(cluster, b), 3 * H)
    cluster.crash(b)
    cluster.run_until(lambda: len(offers(cluster)) == 2, 5 * H)
    assert offers(cluster)[-1].record.successor is None
    assert len(a.held) == 2
    (withdrawn,) = a.observer.named("handoff_withdrawn")
    assert withdrawn.fields["reason"] == "successor_gone"


def test_a_restarted_successor_warms_up_again(cluster):
    a, b = joined(cluster, Warm())
    cluster.run_until(warming(cluster, b), 3 * H)
    cluster.crash(b)
    warm = Warm()
    again = cluster.node("b", spec=spec(on_warm=warm))
    cluster.run_until(lambda: len(again.held) == 1, 5 * H)
    assert len(warm.calls) >= 1
    assert len(a.held) == 1


def test_the_successor_takes_over_the_keys_of_a_dead_owner(cluster):
    a, b = joined(cluster, Warm())
    cluster.run_until(warming(cluster, b), 3 * H)
    cluster.crash(a)
    cluster.run_until(lambda: len(b.held) == 2, 5 * H)


def test_a_call_of_on_warm_that_a_close_drops_is_not_reported(cluster):
    _, b = joined(cluster, Warm())
    cluster.run_until(warming(cluster, b), 3 * H)
    b.consumer.close(timeout_ms=0)
    cluster.run(H)
    assert not b.observer.named("warm_failed")


def test_a_failed_warm_up_leaves_the_key_with_its_owner(cluster):
    warm = Warm(ValueError("no disk"))
    a, b = joined(cluster, warm, is_held=False)
    cluster.run_until(lambda: b.observer.named("warm_failed"), 3 * H)
    cluster.run(2 * H)
    assert len(a.held) == 2
    assert len(warm.calls) == 1


def test_a_key_is_not_offered_again_soon_after_a_late_warm_up(cluster):
    a, b = joined(cluster, Warm())
    cluster.run_until(warming(cluster, b), 3 * H)
    cluster.run(WITHIN_MS + H, step_ms=200)
    (withdrawn,) = a.observer.named("handoff_withdrawn")
    assert withdrawn.fields["reason"] == "late"
    cluster.run(10 * H)
    assert len(offers(cluster)) == 2
    assert len(a.held) == 2
    b.warming.run_waiting()
    cluster.run(H)
    assert len(a.held) == 2


def test_a_lost_offer_is_sent_again(cluster):
    a, b = joined(cluster, Warm(), is_held=False)
    cluster.fates["a"] = LOST
    cluster.run_until(lambda: a.observer.named("handoff_offered"), H)
    cluster.run(100)
    del cluster.fates["a"]
    assert not offers(cluster)
    cluster.run_until(lambda: len(b.held) == 1, 2 * H)


def test_a_lost_handoff_ready_is_sent_again(cluster):
    _, b = joined(cluster, Warm())
    cluster.run_until(warming(cluster, b), 3 * H)
    cluster.fates["b"] = LOST
    b.warming.run_waiting()
    cluster.run_until(lambda: b.observer.named("warmed"), H)
    cluster.run(100)
    del cluster.fates["b"]
    assert not of(cluster, "b", HandoffReady)
    cluster.run_until(lambda: len(b.held) == 1, 2 * H)


def test_handoff_ms_of_the_group_limits_the_time_to_warm_up(cluster):
    a, b = joined(cluster, Warm())
    write(cluster, settings(handoff_ms=H))
    cluster.run_until(lambda: a.observer.named("handoff_withdrawn"), 4 * H)
    (offer, _) = offers(cluster)
    assert offer.record.within_ms == H
    # The key is not offered to this successor for as long, and then again.
    cluster.run_until(lambda: len(offers(cluster)) == 3, 4 * H)
    b.warming.run_waiting()
    cluster.run_until(lambda: len(b.held) == 1, 4 * H)


def test_a_late_successor_is_barred_for_the_time_its_offer_allowed(cluster):
    a, _ = joined(cluster, Warm())
    write(cluster, settings(handoff_ms=H))
    cluster.run_until(lambda: offers(cluster), 4 * H)
    write(cluster, settings(2))
    cluster.run_until(lambda: a.observer.named("handoff_withdrawn"), 4 * H)
    cluster.run_until(lambda: len(offers(cluster)) == 3, 4 * H)
    assert offers(cluster)[-1].record.within_ms == WITHIN_MS


def test_refused_settings_do_not_change_the_time_to_warm_up(cluster):
    joined(cluster, Warm())
    write(cluster, settings(2, handoff_ms=H))
    cluster.run_until(lambda: offers(cluster), 4 * H)
    assert offers(cluster)[0].record.within_ms == WITHIN_MS
    assert fold(cluster).settings_of("g").generation == 0


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (11, 11)])
def test_handoffs_max_of_the_group_limits_the_open_offers(most, expected):
    cluster = world(partitions=2, records=(1,) * 24)
    write(cluster, settings(handoffs_max=most))
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 24, 5 * H)
    b = cluster.node("b")
    b.warming.is_held = True
    b.consume(spec(on_warm=Warm()))
    cluster.run(4 * H)
    assert b.warming.waiting_count == expected


def test_simultaneous_offers_of_two_owners_are_followed_one_by_one():
    cluster = world(partitions=2, records=(1,) * 12)
    write(cluster, settings(handoffs_max=1))
    a, b = cluster.node("a", spec=spec()), cluster.node("b", spec=spec())
    cluster.run_until(lambda: len(a.held) == len(b.held) == 6, 5 * H)
    # Neither reads the other's offer before it sends its own.
    for name in "ab":
        cluster.fates[name] = AppendFate(delay_ms=300)
    c = cluster.node("c")
    c.warming.is_held = True
    c.consume(spec(on_warm=Warm()))

    def offered():
        return [
            *offers(cluster, "a"),
            *offers(cluster, "b"),
            *of(cluster, "a", HandoffOffer, partition=1),
            *of(cluster, "b", HandoffOffer, partition=1),
        ]

    cluster.run_until(lambda: len(offered()) == 2, 4 * H)
    cluster.fates.clear()
    cluster.run(H)
    assert c.warming.waiting_count == 1
    c.warming.run_waiting()
    cluster.run_until(lambda: c.warming.waiting_count == 1, H)
    c.warming.is_held = False
    c.warming.run_waiting()
    cluster.run_until(lambda: len(c.held) == 4, 9 * H)


def test_an_owner_has_handoffs_max_offers_open_by_default():
    cluster = world(partitions=2, records=(1,) * 24)
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 24, 5 * H)
    b = cluster.node("b")
    b.warming.is_held = True
    b.consume(spec(on_warm=Warm()))
    cluster.run(4 * H)
    assert b.warming.waiting_count == OFFERS_MAX
    assert len(a.held) == 24
    b.warming.is_held = False
    b.warming.run_waiting()
    cluster.run_until(lambda: len(b.held) == 12, 5 * H)


def test_an_offer_to_a_successor_that_leaves_is_withdrawn(cluster):
    a, b = joined(cluster, Warm())
    cluster.run_until(warming(cluster, b), 3 * H)
    b.consumer.close(timeout_ms=0)
    cluster.run_until(lambda: len(offers(cluster)) == 2, 3 * H)
    assert offers(cluster)[-1].record.successor is None
    assert len(a.held) == 2


def test_an_offer_that_no_policy_asks_for_is_withdrawn_after_an_interval(cluster):
    a, b = joined(cluster, Warm())
    cluster.run_until(warming(cluster, b), 3 * H)
    a.session._offers.withdraw_unwanted(a.clock.now_ms() + H // 2)
    assert not a.observer.named("handoff_withdrawn")
    a.session._offers.withdraw_unwanted(a.clock.now_ms() + H + 1)
    (withdrawn,) = a.observer.named("handoff_withdrawn")
    assert withdrawn.fields["reason"] == "unwanted"


def test_below_level_2_a_key_is_released_without_a_warm_up(monkeypatch):
    monkeypatch.setattr(node, "SUPPORTED_LEVEL", 1)
    cluster = world(partitions=1, records=(4, 4))
    _, b = joined(cluster, Warm())
    cluster.run_until(lambda: len(b.held) == 1, 3 * H)
