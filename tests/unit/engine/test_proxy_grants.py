"""Grants requested on behalf of other processes (PROTOCOL 6.2), over a whole log."""

import pytest
import variants
from enginekit import (
    AMO,
    KEY,
    H,
    claim_of,
    fold,
    of,
    owning,
    spec,
    values,
    world,
    write,
)

from kafka_marshal.engine import proxy_grants
from kafka_marshal.engine.proxy_grants import SEQ_FIRST
from kafka_marshal.errors import CoordinationError, LogUnwritable
from kafka_marshal.protocol.granting import GrantRequest, GrantVerdict
from kafka_marshal.protocol.losses import marks_of
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.types import OffsetRange
from simulator.fakestore import AppendFate

TASK = b"task".ljust(16, b".")


@pytest.fixture
def cluster():
    return world(records=(20,))


@pytest.fixture
def owner(cluster):
    """A node that owns the key at most once, and requests no offsets itself."""
    return owning(cluster, delivery=AMO)


@pytest.fixture
def requests(cluster):
    """A process without any claim, whose engine reads the log."""
    node = cluster.node("helper")
    cluster.run_until(lambda: node.engine.is_ready, H)
    return node.engine.proxy_grants


def wanted(owner, first, last, *, grantee=TASK, **rest):
    epoch = rest.pop("epoch", claim_of(owner).epoch)
    return GrantRequest(
        key=KEY,
        owner=owner.owner,
        epoch=epoch,
        grantee=grantee,
        first=first,
        last=last,
        **rest,
    )


def test_another_process_is_granted_a_range_under_a_claim(cluster, owner, requests):
    granted = []
    pending = requests.send(wanted(owner, 0, 4, mark=0), on_granted=granted.append)
    assert pending.verdict is None
    assert len(requests._pending) == 1
    cluster.run(40)
    line = of(cluster, "a", ClaimingMessages)[0]
    assert pending.verdict == GrantVerdict(
        outcome="accepted",
        reason=None,
        granted=OffsetRange.through(0, 4),
        head=5,
        offset=line.offset,
    )
    assert granted == [OffsetRange.through(0, 4)]
    assert not requests._pending
    assert line.record.seq >= SEQ_FIRST
    assert marks_of(line.record) == {0: 0}
    assert owner.held, "the owner goes on"


def test_callbacks_get_a_verdict_once_after_it_is_set(cluster, owner, requests):
    pending = requests.send(wanted(owner, 0, 4))
    seen = []
    for _ in range(2):
        pending.on_verdict.append(seen.append)
    cluster.run(40)
    assert seen == [pending.verdict] * 2
    assert pending.verdict is not None
    assert pending.on_verdict == []


def test_only_one_of_two_requests_for_the_same_offsets_is_granted(
    cluster, owner, requests
):
    other = b"other".ljust(16, b".")
    asked = [requests.send(wanted(owner, 0, 4, grantee=g)) for g in (TASK, other)]
    cluster.run(40)
    assert [t.verdict.granted for t in asked] == [OffsetRange(0, 5), None]
    assert (asked[1].verdict.outcome, asked[1].verdict.reason) == (
        "refused",
        "nothing_left",
    )
    assert asked[1].verdict.head == 5


def test_a_request_under_another_epoch_is_ignored(cluster, owner, requests):
    pending = requests.send(wanted(owner, 0, 4, epoch=claim_of(owner).epoch + 1))
    cluster.run(40)
    assert pending.verdict.granted is None
    assert (pending.verdict.outcome, pending.verdict.reason) == ("ignored", "old_epoch")


def foreign(owner, *, grantee, seq):
    """Return a request of another process under the same claim."""
    claim = claim_of(owner)
    return ClaimingMessages(
        client_id=owner.owner.client_id,
        group_id="g",
        incarnation=owner.owner.incarnation,
        seq=seq,
        topic="t",
        partition=0,
        epoch=claim.epoch,
        grantee=grantee,
        first=0,
        proposed_last_offset=4,
    )


def answered_by_a_foreign_record(cluster, owner, requests, *, is_same_number):
    """Send a request, and append a similar record of another process before it."""
    cluster.nodes[-1].entropy.random_bytes = bytes
    cluster.fates["helper"] = AppendFate(delay_ms=200)
    pending = requests.send(wanted(owner, 0, 9))
    if is_same_number:
        other = foreign(owner, grantee=b"other".ljust(16, b"."), seq=SEQ_FIRST)
    else:
        other = foreign(owner, grantee=TASK, seq=SEQ_FIRST + 1)
    write(cluster, other)
    cluster.run(40)
    assert fold(cluster).keys[KEY].granted == 5
    assert pending.verdict is None
    cluster.run(400)
    assert pending.verdict.granted == OffsetRange(5, 10)  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_same_number", [True, False])
def test_a_request_is_answered_by_its_own_record_only(
    cluster, owner, requests, is_same_number
):
    """PROTOCOL 6.2: numbers are drawn at random, so two may be equal."""
    answered_by_a_foreign_record(
        cluster, owner, requests, is_same_number=is_same_number
    )


def test_a_variant_that_matches_requests_by_number_fails(
    cluster, owner, requests, monkeypatch
):
    variants.match_requests_by_number(monkeypatch)
    with pytest.raises(AssertionError):
        answered_by_a_foreign_record(cluster, owner, requests, is_same_number=True)


def test_a_variant_that_matches_requests_by_grantee_fails(
    cluster, owner, requests, monkeypatch
):
    variants.match_requests_by_grantee(monkeypatch)
    with pytest.raises(AssertionError):
        answered_by_a_foreign_record(cluster, owner, requests, is_same_number=False)


def test_requests_of_others_do_not_answer_those_of_the_owner(cluster, owner, requests):
    """Its requests and heartbeats count as answered by their own records only."""
    for _ in range(5):
        requests.send(wanted(owner, 0, 1))
        requests.send(wanted(owner, 0, 1))
    cluster.run(40)
    handed = []
    for _ in range(100):
        for offsets in values(owner.consumer.poll(0)).values():
            handed += offsets
        cluster.run(20)
    assert handed == list(range(2, 20)), "all but what others were granted"


def test_the_grant_of_a_request_given_up_is_reported_as_lost(cluster, owner, requests):
    observer = cluster.nodes[-1].observer
    granted = []
    pending = requests.send(wanted(owner, 0, 4), on_granted=granted.append)
    requests.give_up(pending)
    cluster.run(40)
    assert not granted
    (event,) = observer.named("grant_lost")
    assert event.fields == {"key": KEY, "ranges": [(0, 4)]}


def test_a_request_given_up_after_its_verdict_reports_no_loss(cluster, owner, requests):
    pending = requests.send(wanted(owner, 0, 4))
    cluster.run(40)
    requests.give_up(pending)
    assert not cluster.nodes[-1].observer.named("grant_lost")


def test_the_number_of_pending_requests_is_bounded(
    cluster, owner, requests, monkeypatch
):
    monkeypatch.setattr(proxy_grants, "PENDING_MAX", 2)
    cluster.fates["helper"] = AppendFate(is_lost=True)
    for _ in range(2):
        requests.send(wanted(owner, 0, 4))
    with pytest.raises(CoordinationError, match="2 requests for offsets"):
        requests.send(wanted(owner, 0, 4))
    cluster.run(2 * H + 100)
    requests.send(wanted(owner, 0, 4))
    assert len(requests._pending) == 1, "what was never answered is forgotten"


def test_a_refused_append_raises_its_error(cluster, owner, requests):
    class Refused:
        def error(self):
            return LogUnwritable("no right to write")

    pending = requests.send(wanted(owner, 0, 4))
    pending.raise_refusal()
    pending.append = Refused()
    with pytest.raises(LogUnwritable):
        pending.raise_refusal()


def test_a_request_for_a_group_without_a_session_is_answered(cluster, requests):
    """No session of the group is open here: the log answers all the same."""
    owner = cluster.node("z", group_id="h", spec=spec(delivery=AMO))
    cluster.run_until(lambda: owner.held, 3 * H)
    (holding,) = owner.held.values()
    pending = requests.send(
        GrantRequest(
            key=holding.key,
            owner=owner.owner,
            epoch=holding.claim.epoch,
            grantee=TASK,
            first=0,
            last=1,
        )
    )
    cluster.run(40)
    assert pending.verdict.granted == OffsetRange(0, 2)
