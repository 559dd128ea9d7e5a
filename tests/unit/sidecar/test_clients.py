"""A client's leases, and the progress that it reports."""

import pytest

from kafka_marshal.config import Delivery
from kafka_marshal.engine import Holding, StartRule
from kafka_marshal.protocol.claiming import Claim, Claimant, Phase
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.protocol.types import Key, OffsetRange, Owner
from kafka_marshal.remote import api
from kafka_marshal.sidecar.clients import (
    AWAY_MS_MIN,
    GRACE_MS_MAX,
    Client,
    ClientLease,
    DelegatedGrants,
    mark_subleased,
    reclaim,
)
from kafka_marshal.sidecar.events import EventBuffer
from kafka_marshal.sidecar.process_monitor import UNKNOWN_PEER

KEY = Key("g", "t", 0)


def holding(delivery=Delivery.AT_LEAST_ONCE, start=0):
    claim = Claim(Claimant(Owner("host", b"i" * 16), "g", master=b"m" * 32), KEY)
    claim.phase, claim.epoch, claim.lease = Phase.STARTING, 5, Lease(1_000, 2_000)
    held = Holding(claim, delivery, StartRule())
    held.begin(start, grantee=b"i" * 16)
    return held


def client(beat_ms=100):
    return Client(
        client_id="a",
        instance="00" * 16,
        beat_ms=beat_ms,
        peer=UNKNOWN_PEER,
        events=EventBuffer("0" * 32, snapshot=None),
        seen_ms=0,
    )


def lease(held):
    mark_subleased(held)
    return ClientLease(
        key=KEY,
        client=client(),
        holding=held,
        epoch=5,
        name="s",
        journaled_until_ms=9_999,
    )


def progress(position=None, **rest):
    return api.Progress(topic="t", partition=0, epoch=5, position=position, **rest)


# --- At least once ---


def test_a_subleased_claim_counts_as_uncommitted_until_reclaimed():
    held = holding()
    given = lease(held)
    assert held.uncommitted_count == 1
    given.record_progress(progress(3, uncommitted_count=7, handed=10))
    assert (held.position, held.uncommitted_count, held.tally) == (3, 7, (10, 3))
    given.record_progress(progress(2, handed=4))
    assert (held.position, held.handed_count) == (3, 10), "nothing goes back"
    given.record_progress(progress(None))
    assert held.position == 3
    reclaim(held, is_settled=True)
    assert held.uncommitted_count == 0


def test_deadlines_are_bounded_by_lease_and_journal():
    given = lease(holding())
    assert given.deadline().hard_until_ms == 2_000
    given.journaled_until_ms = 900
    deadline = given.deadline()
    assert (deadline.soft_until_ms, deadline.hard_until_ms) == (900, 900)
    assert (given.sent_until_ms, given.last_sent_ms) == (2_000, 900), (
        "the latest sent deadline stays"
    )


def test_a_position_reported_before_a_seek_is_ignored():
    held = holding()
    given = lease(held)
    given.record_progress(progress(8, handed=8))
    held.seek(3)
    given.record_progress(progress(9, handed=9))
    assert held.position == 3
    given.record_progress(progress(4, handed=10, seek_count=1))
    assert (held.position, held.handed_count) == (4, 10)


# --- At most once ---


def test_granted_offsets_that_are_not_done_are_lost():
    held = holding(Delivery.AT_MOST_ONCE, start=4)
    given = lease(held)
    assert isinstance(held.progress, DelegatedGrants)
    assert (held.position, held.mark) == (None, 4)
    given.record_grant(OffsetRange.through(4, 9), is_late=False)
    given.record_grant(OffsetRange.through(10, 12), is_late=False)
    given.record_progress(progress(done=7))
    given.record_progress(progress(done=5))
    given.record_progress(progress())
    assert (held.mark, held.marked_grantee) == (7, None)
    given.record_progress(progress(done=7, grantee="ab" * 16))
    given.record_progress(progress(done=7))  # of an earlier release
    assert held.marked_grantee == b"\xab" * 16
    assert held.uncommitted_count == 6
    reclaim(held, is_settled=False)
    assert [(g.first, g.last) for g in held.progress.discard()] == [(7, 12)]


def test_a_settled_claim_loses_no_grants():
    held = holding(Delivery.AT_MOST_ONCE)
    given = lease(held)
    given.record_grant(OffsetRange.through(0, 9), is_late=False)
    reclaim(held, is_settled=True)
    assert held.uncommitted_count == 0
    assert held.progress.discard() == ()


def test_subleasing_a_claim_again_keeps_its_grants():
    held = holding(Delivery.AT_MOST_ONCE)
    lease(held).record_grant(OffsetRange.through(0, 9), is_late=False)
    before = held.progress
    mark_subleased(held)
    assert held.progress is before


def test_a_grant_to_a_claim_at_least_once_is_not_recorded():
    held = holding()
    lease(held).record_grant(OffsetRange.through(0, 9), is_late=False)
    assert held.uncommitted_count == 1


# --- Silence and removal ---


@pytest.mark.parametrize(("beat_ms", "limit_ms"), [(100, AWAY_MS_MIN), (900, 2_700)])
def test_a_client_that_misses_several_heartbeats_is_away(beat_ms, limit_ms):
    one = client(beat_ms)
    assert not one.is_away(limit_ms)
    assert one.is_away(limit_ms + 1)
    assert (one.state(0), one.state(limit_ms + 1)) == ("ready", "silent")
    one.mark_away(50_000)
    assert one.is_away(50_000)
    one.is_leaving = True
    assert one.state(0) == "leaving"


def test_a_silent_client_is_kept_for_a_grace_period():
    one = client()
    assert not one.is_gone(GRACE_MS_MAX, grace_ms=60_000)
    assert one.is_gone(GRACE_MS_MAX + 1, grace_ms=60_000)
    assert one.is_gone(501, grace_ms=500)
    one.leases[KEY] = None
    assert not one.is_gone(GRACE_MS_MAX + 1, grace_ms=60_000)
    one.reserved_until_ms = 70_000
    assert not one.is_gone(69_999, grace_ms=0)
    assert one.is_gone(70_000, grace_ms=0)
    assert (one.is_away(0), one.state(0)) == (True, "restarting")
