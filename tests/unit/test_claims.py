"""Claims without consumption, over whole nodes in memory."""

import os
import re
from types import SimpleNamespace

import pytest
from enginekit import (
    KEY,
    T0,
    H,
    Stepping,
    fail_engine,
    fold,
    holders,
    owning,
    pause_for,
    spec,
)

from kafka_marshal.claims import HeldClaim
from kafka_marshal.errors import (
    ClaimLost,
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    InvalidTransition,
    LogTruncated,
)


def claim_of(node):
    session, glance = node.session, node.engine.context.glance
    return HeldClaim(node.engine, session, holding=session.want(KEY), glance=glance)


def wanting(cluster, client_id="a"):
    node = cluster.node(client_id)
    node.engine.changed = Stepping(cluster)
    return node, claim_of(node)


def winning(cluster, client_id="a"):
    node, claim = wanting(cluster, client_id)
    claim.wait_held(H)
    return node, claim


def test_a_claim_is_won_used_and_released(cluster):
    _node, claim = winning(cluster)
    assert claim.partition == T0
    assert claim.check() == claim.token
    assert claim.is_valid()
    assert claim.position is None
    claim.set_position(7)
    claim.set_position(3)  # never back
    cluster.run(H)
    assert fold(cluster).keys[KEY].position == 7
    claim.release()
    claim.release()
    known = fold(cluster).keys[KEY]
    assert (known.owner, known.position) == (None, 7)
    for call in (claim.check, lambda: claim.set_position(8), lambda: claim.seek(8)):
        with pytest.raises(ClaimLost, match="released"):
            call()
    assert not claim.is_valid()


def test_a_seek_back_returns_once_the_log_has_the_position(cluster):
    node, claim = winning(cluster)
    claim.set_position(7)
    node.session.beat_now()
    cluster.run(100)
    claim.seek(3)
    assert claim.position == fold(cluster).keys[KEY].position == 3
    claim.set_position(4)
    cluster.run(H)
    assert fold(cluster).keys[KEY].position == 4
    assert claim.check() == claim.token


def test_a_seek_that_the_log_does_not_confirm_has_a_deadline(cluster):
    node, claim = winning(cluster)
    node.cut(is_cut=True)
    with pytest.raises(DeadlineExceeded, match="confirmed at the new position"):
        claim.seek(3, timeout_ms=100)
    with pytest.raises(ClaimLost, match="lease_expiring"):
        claim.seek(3, timeout_ms=10 * H)


@pytest.mark.parametrize("position", [-3, 2**63, 10**30, "7", 1.5, None])
def test_a_position_that_is_no_offset_is_refused(cluster, position):
    node, claim = winning(cluster)
    for move in (claim.seek, claim.set_position):
        with pytest.raises(ConfigurationError, match="not an offset"):
            move(position)
    cluster.run(H)
    assert claim.position is None
    assert claim.is_valid()
    assert node.engine.failure is None


def test_the_largest_offset_is_a_position(cluster):
    node, claim = winning(cluster)
    claim.set_position(2**63 - 1)
    cluster.run(H)
    assert fold(cluster).keys[KEY].position == 2**63 - 1
    assert node.engine.failure is None


def test_the_end_of_a_with_block_releases_the_claim(cluster):
    _, claim = winning(cluster)
    with claim as held:
        assert held is claim
    assert fold(cluster).keys[KEY].owner is None


def test_a_token_needs_a_claim_that_was_won(cluster):
    _, claim = wanting(cluster)
    with pytest.raises(InvalidTransition, match="not held yet"):
        _ = claim.token
    assert not claim.is_valid()


def test_a_claim_not_won_in_time_names_the_owner(cluster):
    owning(cluster, "b")
    _, claim = wanting(cluster)
    with pytest.raises(ClaimRejected) as caught:
        claim.wait_held(H)
    assert (caught.value.holder, caught.value.freshness) == ("b", "fresh")
    assert caught.value.reason == "held"
    assert "in time (held): it is held by 'b' (fresh); see: " in str(caught.value)
    assert holders(cluster) == ["b"]


def test_an_interrupted_wait_claims_nothing(cluster):
    """Otherwise the claim would be won later, with nobody to use or release it."""
    owner = owning(cluster, "b")
    node, claim = wanting(cluster)

    def interrupt(_timeout_s):
        raise KeyboardInterrupt

    waiting, node.engine.changed.wait = node.engine.changed.wait, interrupt
    with pytest.raises(KeyboardInterrupt):
        claim.wait_held(H)
    node.engine.changed.wait = waiting
    cluster.crash(owner)
    cluster.run(4 * H)
    assert holders(cluster) == []
    claim_of(node).wait_held(H)


def test_a_paused_group_is_named_as_the_reason(cluster):
    node, claim = wanting(cluster)
    pause_for(cluster, 10 * H)
    node.step()
    with pytest.raises(ClaimRejected) as caught:
        claim.wait_held(H)
    assert (caught.value.reason, caught.value.holder) == ("paused", None)
    assert "(paused): it has no owner, and claims of it are" in str(caught.value)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("limits", "in time (limits): it has no owner; the claim was refused; see: "),
        (None, "in time: it has no owner; the log did not confirm the claim; see: "),
    ],
)
def test_a_claim_not_won_in_time_without_an_owner_names_none(cluster, reason, text):
    node, claim = wanting(cluster)
    node.step()
    if reason is not None:
        claim._holding.claim.refusal = SimpleNamespace(reason=reason, offset=5)
    with pytest.raises(ClaimRejected, match=re.escape(text)) as caught:
        claim.wait_held(0)
    assert caught.value.holder is None


def test_a_lost_claim_reports_that_its_lease_expired(cluster):
    node, claim = winning(cluster)
    node.cut(is_cut=True)
    cluster.run_until(lambda: not claim.is_valid(), 2 * H)
    with pytest.raises(ClaimLost) as caught:
        claim.check()
    assert caught.value.reason == "lease_expiring"
    cluster.run(H)
    with pytest.raises(ClaimLost) as caught:
        claim.check()
    assert caught.value.reason == "lease_expired"


def test_a_release_does_nothing_while_the_interpreter_ends(cluster, monkeypatch):
    _, claim = winning(cluster)
    with monkeypatch.context() as ending:
        ending.setattr("sys.is_finalizing", lambda: True)
        claim.release()
    cluster.run(100)
    assert fold(cluster).keys[KEY].owner is not None


def test_a_release_with_an_unreachable_log_ends_at_its_deadline(cluster):
    node, claim = winning(cluster)
    node.cut(is_cut=True)
    with pytest.raises(DeadlineExceeded):
        claim.release(timeout_ms=500)


def test_waiting_for_a_claim_raises_the_failure_of_the_engine(cluster):
    node, claim = wanting(cluster)
    node.step()
    fail_engine(node)
    with pytest.raises(LogTruncated):
        claim.wait_held(H)


def test_a_lost_claim_can_be_won_again(cluster):
    node, claim = winning(cluster)
    node.cut(is_cut=True)
    cluster.run(3 * H)
    node.cut(is_cut=False)
    assert not claim.is_valid()
    again = claim_of(node)
    again.wait_held(4 * H)
    assert again.token > claim.token


def test_a_forked_child_cannot_use_the_claim(cluster, monkeypatch):
    _, claim = winning(cluster)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not claim.is_valid()
    with pytest.raises(InvalidTransition, match="parent process"):
        claim.check()
    claim.release()
    monkeypatch.undo()
    assert claim.is_valid()


def test_a_consumer_of_the_group_does_not_get_a_claimed_partition(cluster):
    _, claim = winning(cluster)
    other = cluster.node("b", spec=spec())
    cluster.run(5 * H)
    assert not other.held
    assert claim.is_valid()
