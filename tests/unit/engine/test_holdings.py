"""Holdings over a source that only notes its calls."""

import pytest
from enginekit import KEY
from remotekit import RemoteRig

from kafka_marshal.config import ConsumerConfig, Delivery
from kafka_marshal.engine import Holding, StartRule
from kafka_marshal.engine.holding import Drain
from kafka_marshal.engine.holdings import LEASE_EXPIRED, Holdings
from kafka_marshal.engine.subscription import Subscription, SubscriptionSet
from kafka_marshal.errors import ClaimLost, InvalidTransition
from kafka_marshal.ports import TopicInfo
from kafka_marshal.protocol.claiming import Claim, Claimant, Ending, Sublease
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.protocol.planner import fair
from kafka_marshal.protocol.state import STUCK
from kafka_marshal.protocol.types import Key, Owner, Token

ME = Claimant(Owner("c", b"i" * 16), "g", master=b"m")
SOFT_MS, HARD_MS = 1_000_000, 2_000_000
CLOSED = Drain("closed", None, None)


def subscription():
    return Subscription(
        group_id="g",
        topics={"t": TopicInfo(2, None)},
        policy=fair,
        config=ConsumerConfig(topics=("t",)),
    )


class Grants:
    def __init__(self, calls):
        self.calls = calls

    def expire(self, holding, now_ms):
        self.calls.append(("expire", holding.key))

    def report_unused(self, holding):
        self.calls.append(("report_unused", holding.key))


class Source:
    """Notes calls; ``used_elsewhere`` are keys that another process may use."""

    def __init__(self):
        self.calls = []
        self.grants = Grants(self.calls)
        self.used_elsewhere = set()
        self.by_key = {}

    def delays_release(self, holding, drain):
        if holding.key in self.used_elsewhere:
            holding.drain = holding.drain or drain
            return True
        return False

    def send_release(self, holding, drain):
        self.calls.append(("send_release", holding.key, drain.reason))

    def on_release(self, key, reason):
        self.calls.append(("on_release", key, reason))

    def remove(self, holding):
        return self.by_key.pop(holding.key, None) is holding

    def on_end(self, holding, ending):
        self.calls.append(("on_end", holding.key, ending.reason))


class Bench:
    def __init__(self):
        self.rig = RemoteRig()
        self.source = Source()
        self.subscriptions = SubscriptionSet()
        self.held = Holdings(
            self.rig.context,
            self.source,
            client_id="c",
            by_key=self.source.by_key,
            wanted=self.subscriptions,
        )

    def own(self, key=KEY, *, position=0):
        holding = Holding(Claim(ME, key), Delivery.AT_LEAST_ONCE, StartRule())
        holding.claim.assign(
            Sublease(
                claimant=ME,
                epoch=5,
                token=Token(1, 0, 5),
                secret=b"",
                lease=Lease(SOFT_MS, HARD_MS),
                heartbeat_interval_ms=SOFT_MS,
            )
        )
        holding.begin(position, grantee=b"")
        self.source.by_key[key] = holding
        return holding

    def names(self):
        return [call[0] for call in self.source.calls]


@pytest.fixture
def bench():
    return Bench()


def test_a_release_is_sent_and_noted_before_the_claim_ends(bench):
    holding = bench.own()
    bench.held.release(holding, CLOSED)
    assert bench.names() == ["send_release", "on_release", "report_unused", "on_end"]
    assert holding.claim.ending == Ending("closed", was_lost=False)
    assert bench.held.by_key == {}
    (ended,) = bench.rig.events("claim_ended")
    assert (ended["client"], ended["epoch"]) == ("c", 5)
    assert bench.held.meters.released == {("t", "closed"): 1}


def test_a_key_that_another_process_uses_is_drained_first(bench):
    holding = bench.own()
    bench.source.used_elsewhere.add(KEY)
    bench.held.release(holding, CLOSED)
    assert holding.drain == CLOSED
    assert holding.claim.is_owned
    assert bench.source.calls == []


def test_a_claim_that_was_not_won_is_ended_without_a_release(bench):
    waiting = Holding(Claim(ME, KEY), Delivery.AT_LEAST_ONCE, StartRule())
    bench.source.by_key[KEY] = waiting
    bench.held.release(waiting, CLOSED)
    assert bench.names() == ["report_unused"]
    assert bench.rig.events("claim_ended") == []


def test_a_claim_with_an_expired_lease_is_released_and_counts_as_lost(bench):
    holding = bench.own()
    bench.held.check_lease(holding, HARD_MS - 1)
    assert holding.claim.is_owned
    bench.held.check_lease(holding, HARD_MS)
    assert ("send_release", KEY, LEASE_EXPIRED) in bench.source.calls
    assert "on_release" not in bench.names()
    assert bench.held.meters.lost == {("t", LEASE_EXPIRED): 1}


def test_a_drain_waits_for_uncommitted_records(bench):
    holding = bench.own()
    holding.progress.hand_out(0, 1)
    holding.drain = Drain("surplus", "d", None)
    bench.held.drive(holding, 10)
    assert holding.claim.is_owned
    holding.progress.commit_all()
    bench.held.drive(holding, 11)
    assert holding.claim.ending == Ending("surplus", was_lost=False)


@pytest.mark.parametrize("reason", ["paused", STUCK])
def test_a_drain_at_its_deadline_releases_uncommitted_records(bench, reason):
    holding = bench.own()
    holding.progress.hand_out(0, 1)
    holding.drain = Drain(reason, None, 10)
    bench.held.drive(holding, 9)
    assert holding.claim.is_owned
    bench.held.drive(holding, 10)
    # Only an application that is stuck has to learn that its work is repeated.
    assert holding.claim.ending == Ending(reason, was_lost=reason == STUCK)


def test_only_the_first_failure_releases_the_claims(bench):
    bench.own()
    bench.own(Key("g", "t", 1))
    sub = subscription()
    bench.subscriptions.subs.append(sub)
    first, second = ClaimLost("one"), ClaimLost("two")
    bench.held.fail(first)
    bench.held.fail(second)
    assert bench.held.failure is first
    assert bench.names().count("send_release") == 2
    assert len(bench.rig.events("session_failed")) == 1
    assert sub.version > 0


def test_a_fence_ends_claims_without_a_release(bench):
    holding = bench.own()
    bench.held.fence(ClaimLost("gone"))
    assert holding.claim.ending == Ending("fenced")
    assert "send_release" not in bench.names()
    assert isinstance(bench.held.failure, ClaimLost)


def test_a_key_cannot_be_claimed_twice_in_a_process(bench):
    bench.held.require_unclaimed(KEY)
    bench.own()
    with pytest.raises(InvalidTransition, match="already claimed"):
        bench.held.require_unclaimed(KEY)
    bench.subscriptions.subs.append(subscription())
    with pytest.raises(InvalidTransition, match="already claimed"):
        bench.held.require_unclaimed(Key("g", "t", 9))
    assert bench.held.subscriptions == tuple(bench.subscriptions.subs)


def test_a_won_claim_is_reported(bench):
    holding = bench.own()
    bench.held.note_won(holding, effect="claimed", why="free", log_ms=0)
    (won,) = bench.rig.events("claimed")
    assert (won["token"], won["why"]) == (Token(1, 0, 5), "free")
    assert bench.held.meters.won == {("t", "claimed"): 1}


def test_lag_counts_from_the_position_of_a_holding(bench):
    bench.own(position=4)
    assert bench.held.lag_of(KEY) is None
    bench.held.look_at_ends(0)
    bench.held.look_at_ends(1)
    assert (bench.held.end_of(KEY), bench.held.lag_of(KEY)) == (10, 6)
    assert bench.held.lag_of(Key("g", "t", 9)) is None
    assert bench.held.end_of(Key("g", "t", 9)) is None
