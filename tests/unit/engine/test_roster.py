import pytest
from enginekit import ALO, AMO, KEY

from kafka_marshal.engine.holding import Drain, Holding, StartRule
from kafka_marshal.engine.roster import FAR_MS, LOOKUP_LOOK_MS, Roster
from kafka_marshal.protocol.claiming import Claim, Claimant, Ending, Phase
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.protocol.types import Owner

H = 1_000
ME = Claimant(Owner("a", b"a" * 16), "g", master=bytes(32))


@pytest.fixture
def roster():
    return Roster()


def wanted(roster, partition=0, delivery=ALO):
    key = KEY._replace(partition=partition)
    holding = Holding(Claim(ME, key), delivery, StartRule())
    roster.add(holding)
    return holding


def won(roster, partition=0, *, sent_ms=0, delivery=ALO):
    holding = wanted(roster, partition, delivery)
    holding.claim.phase = Phase.HELD
    holding.claim.epoch = 10 + partition
    holding.claim.lease = Lease.since(sent_ms, H)
    roster.won(holding, 3)
    return holding


def test_what_is_wanted_is_contended_for_until_it_is_won(roster):
    holding = wanted(roster)
    assert roster.all == roster.contending == {KEY: holding}
    assert roster.of_epoch(3, 10) is None
    other = won(roster, 1)
    assert list(roster.contending) == [KEY]
    assert roster.won_count == 1
    assert list(roster.restless) == [other.key]
    assert roster.of_epoch(3, 11) is other
    assert roster.of_epoch(4, 11) is None


def test_what_was_removed_is_nowhere(roster):
    holding = won(roster)
    assert roster.remove(holding, 3)
    assert not roster.remove(holding, 3)
    assert (roster.all, roster.contending, roster.restless) == ({}, {}, {})
    assert roster.of_epoch(3, 10) is None


def test_a_successor_is_not_removed_for_what_was_there_before(roster):
    before = won(roster)
    roster.remove(before, 3)
    again = won(roster)
    assert not roster.remove(before, 3)
    assert roster.all == {KEY: again}
    assert roster.of_epoch(3, 10) is again


def test_what_is_on_its_way_is_looked_at_until_it_rests(roster):
    resting = won(roster)
    leaving = won(roster, 1)
    leaving.drain = Drain("surplus", None, None)
    starting = won(roster, 2)
    starting.lookup = object()
    asking = won(roster, 3, delivery=AMO)
    assert len(roster.restless) == 4
    roster.settle()
    assert list(roster.restless.values()) == [leaving, starting, asking]
    roster.stir(resting)
    assert resting.key in roster.restless
    roster.settle()
    wanted(roster, 4)
    roster.stir_all()
    assert list(roster.restless.values()) == [resting, leaving, starting, asking]


def test_leases_are_looked_at_when_the_earliest_ends(roster):
    first, second = won(roster, 0, sent_ms=0), won(roster, 1, sent_ms=500)
    wanted(roster, 2)
    ends_ms = first.claim.lease.hard_until_ms
    assert roster.expired(ends_ms - 1) == []
    first.claim.lease = Lease.since(400, H)  # renewed meanwhile
    assert roster.expired(ends_ms) == []
    assert roster.expired(ends_ms + 399) == []
    assert roster.expired(ends_ms + 400) == [first]
    first.claim.end(Ending("lease_expired"))
    roster.remove(first, 3)
    assert roster.expired(ends_ms + 500) == [second]
    second.claim.end(Ending("lease_expired"))
    assert roster.expired(FAR_MS) == []


def test_a_lease_that_became_shorter_is_looked_at_at_once(roster):
    holding = won(roster, sent_ms=1_000)
    assert roster.expired(1_000) == []
    holding.claim.lease = Lease.since(-2 * H, H)
    assert roster.expired(1_000) == []
    roster.look_at_leases()
    assert roster.expired(1_000) == [holding]


def test_the_next_attempt_or_look_up_is_due(roster):
    assert roster.due_ms(0) == FAR_MS
    wanted(roster, 0)
    assert roster.due_ms(0) == FAR_MS
    wanted(roster, 1).claim.attempt_at_ms = 70
    wanted(roster, 2).claim.attempt_at_ms = 90
    assert roster.due_ms(0) == 70
    won(roster, 3).lookup = object()
    assert roster.due_ms(0) == LOOKUP_LOOK_MS
