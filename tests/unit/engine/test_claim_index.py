import pytest
from enginekit import ALO, AMO, KEY

from kafka_marshal.engine.claim_index import FAR_MS, LOOKUP_POLL_MS, ClaimIndex
from kafka_marshal.engine.holding import Drain, Holding, StartRule
from kafka_marshal.protocol.claiming import Claim, Claimant, Ending, Phase
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.protocol.types import Owner

H = 1_000
ME = Claimant(Owner("a", b"a" * 16), "g", master=bytes(32))


@pytest.fixture
def index():
    return ClaimIndex()


def wanted(index, partition=0, delivery=ALO):
    key = KEY._replace(partition=partition)
    holding = Holding(Claim(ME, key), delivery, StartRule())
    index.add(holding)
    return holding


def won(index, partition=0, *, sent_ms=0, delivery=ALO):
    holding = wanted(index, partition, delivery)
    holding.claim.phase = Phase.HELD
    holding.claim.epoch = 10 + partition
    holding.claim.lease = Lease.since(sent_ms, H)
    index.won(holding, 3)
    return holding


def test_a_wanted_key_is_contended_for_until_it_is_won(index):
    holding = wanted(index)
    assert index.all == index.contending == {KEY: holding}
    assert index.of_epoch(3, 10) is None
    other = won(index, 1)
    assert list(index.contending) == [KEY]
    assert index.won_count == 1
    assert list(index.active) == [other.key]
    assert index.of_epoch(3, 11) is other
    assert index.of_epoch(4, 11) is None


def test_a_removed_holding_is_in_no_index(index):
    holding = won(index)
    assert index.remove(holding)
    assert not index.remove(holding)
    assert (index.all, index.contending, index.active) == ({}, {}, {})
    assert index.of_epoch(3, 10) is None


def test_removing_an_earlier_holding_keeps_the_later_one_of_its_key(index):
    before = won(index)
    index.remove(before)
    again = won(index)
    assert not index.remove(before)
    assert index.all == {KEY: again}
    assert index.of_epoch(3, 10) is again


def test_compact_keeps_only_holdings_with_work_active(index):
    resting = won(index)
    leaving = won(index, 1)
    leaving.drain = Drain("surplus", None, None)
    starting = won(index, 2)
    starting.lookup = object()
    requesting = won(index, 3, delivery=AMO)
    assert len(index.active) == 4
    index.compact()
    assert list(index.active.values()) == [leaving, starting, requesting]
    index.mark_active(resting)
    assert resting.key in index.active
    index.compact()
    wanted(index, 4)
    index.mark_all_active()
    assert list(index.active.values()) == [resting, leaving, starting, requesting]


def test_leases_are_checked_when_the_earliest_ends(index):
    first, second = won(index, 0, sent_ms=0), won(index, 1, sent_ms=500)
    wanted(index, 2)
    ends_ms = first.claim.lease.hard_until_ms
    assert index.expired(ends_ms - 1) == []
    first.claim.lease = Lease.since(400, H)  # renewed meanwhile
    assert index.expired(ends_ms) == []
    assert index.expired(ends_ms + 399) == []
    assert index.expired(ends_ms + 400) == [first]
    first.claim.end(Ending("lease_expired"))
    index.remove(first)
    assert index.expired(ends_ms + 500) == [second]
    second.claim.end(Ending("lease_expired"))
    assert index.expired(FAR_MS) == []


def test_a_shortened_lease_is_checked_after_recheck_leases(index):
    holding = won(index, sent_ms=1_000)
    assert index.expired(1_000) == []
    holding.claim.lease = Lease.since(-2 * H, H)
    assert index.expired(1_000) == []
    index.recheck_leases()
    assert index.expired(1_000) == [holding]


def test_due_ms_is_the_earliest_claim_attempt_or_look_up(index):
    assert index.due_ms(0) == FAR_MS
    wanted(index, 0)
    assert index.due_ms(0) == FAR_MS
    wanted(index, 1).claim.attempt_at_ms = 70
    wanted(index, 2).claim.attempt_at_ms = 90
    assert index.due_ms(0) == 70
    won(index, 3).lookup = object()
    assert index.due_ms(0) == LOOKUP_POLL_MS
