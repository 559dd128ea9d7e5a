"""Releases, and claims accepted too late: ghosts (PROTOCOL 5.3)."""

from enginekit import (
    KEY,
    H,
    claim_of,
    fold,
    holders,
    of,
    owning,
    spec,
    write,
)

from kafka_marshal.policies import Plan, Release
from kafka_marshal.protocol.records import (
    ClaimingPartition,
    ReleasingPartition,
)
from kafka_marshal.protocol.state import why_of
from simulator.fakestore import AppendFate


def test_texts_of_a_policy_that_are_not_utf_8_are_written_all_the_same(cluster):
    def policy(view):
        keys = {each.key: each.is_mine for each in view.keys}
        release = tuple(
            Release(key=key, successor=None, reason="tired", detail="d\udc80")
            for key, is_mine in keys.items()
            if is_mine
        )
        return Plan(tuple(keys), release, dict.fromkeys(keys, "w\udc80"))

    cluster.node("a", spec=spec(policy=policy))
    cluster.node("b", spec=spec())
    cluster.run_until(lambda: of(cluster, "a", ReleasingPartition), 4 * H)
    (claimed, *_) = of(cluster, "a", ClaimingPartition)
    assert why_of(claimed.record).startswith("w?; ")
    assert of(cluster, "a", ReleasingPartition)[0].record.reason == "tired: d?"


# --- Ghosts (PROTOCOL 5.3) ---


def test_a_ghost_claim_is_released_at_once(cluster):
    """The client gives the claim up as unanswered; then it arrives and wins."""
    cluster.fates["a"] = AppendFate(delay_ms=H, fails_after_ms=10)
    node = cluster.node("a", spec=spec())
    cluster.run(H // 2)
    cluster.fates.clear()
    node.consumer.close(timeout_ms=0)
    assert not node.session.holdings or claim_of(node).is_verdict_pending
    cluster.run_until(lambda: KEY in fold(cluster).keys, 2 * H)
    cluster.run(100)
    assert fold(cluster).keys[KEY].owner is None
    assert of(cluster, "a", ReleasingPartition)[0].record.reason in {"ghost", "closed"}


def test_a_claim_that_arrives_after_its_lease_is_retried(cluster):
    cluster.fates["a"] = AppendFate(delay_ms=2 * H, fails_after_ms=10)
    node = cluster.node("a", spec=spec())
    cluster.run(H // 4)
    cluster.fates.clear()
    cluster.run(4 * H)
    assert node.held


def test_a_ghost_whose_release_is_lost_is_released_again(cluster):
    node = owning(cluster)
    cluster.fates["a"] = AppendFate(is_lost=True)
    node.leave()
    cluster.run(H)
    assert fold(cluster).keys[KEY].owner is not None
    assert not node.has_left
    cluster.fates.clear()
    cluster.run(H)
    assert fold(cluster).keys[KEY].owner is None
    assert node.has_left


def test_the_end_of_an_old_claim_does_not_hide_a_newer_ghost(cluster):
    """A late claim wins while the old one expires: both must be released."""
    node = owning(cluster)
    claim = claim_of(node)
    old_epoch = claim.epoch
    # An earlier claim record of this owner arrives again when the owner is stale.
    again = of(cluster, "a", ClaimingPartition)[0].record
    node.log.cut = True
    cluster.clock.advance(2 * H + 10)
    ghost = write(cluster, again)
    cluster.fates["a"] = AppendFate(is_lost=True)
    node.log.cut = False
    node.step()
    cluster.fates.clear()
    cluster.run_until(lambda: fold(cluster).keys[KEY].epoch > ghost, 2 * H)
    assert old_epoch < ghost
    cluster.run(H)
    assert holders(cluster) == ["a"]
