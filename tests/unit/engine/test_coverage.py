"""Every key is claimed, whatever a policy says (PROTOCOL 9.6)."""

import pytest
from enginekit import H, held_by, of, spec, world

from kafka_marshal.engine.coverage import CoverageRule, best_taker
from kafka_marshal.policies import KeyView, MemberView, Plan, Release, View, fair
from kafka_marshal.protocol.records import ClaimingPartition, ReleasingPartition
from kafka_marshal.protocol.types import Key

STRANGER = Key("g", "unknown", 3)
PACE_MS = H // 10


def nothing(_view):
    return Plan()


def raises(_view):
    raise RuntimeError("broken")


def no_plan(_view):
    return "t-0"


def stranger(_view):
    return Plan((STRANGER, Key("other", "t", 0), Key("g", "t", -1)))


def releases_all(view):
    mine = [each.key for each in view.keys if each.is_mine]
    return Plan((), tuple(Release(key, None) for key in mine))


def releases_to_nobody(view):
    mine = [each.key for each in view.keys if each.is_mine]
    return Plan((), tuple(Release(key, "nobody") for key in mine))


def passes_on(view):
    """Hand everything to another member, again and again."""
    mine = [each.key for each in view.keys if each.is_mine]
    others = [m.client_id for m in view.members if m.client_id != view.me]
    return Plan((), tuple(Release(key, others[0]) for key in mine if others))


GARBAGE = [
    *(nothing, raises, no_plan, stranger),
    *(releases_all, releases_to_nobody, passes_on),
]


def is_covered(cluster, count):
    return lambda: sum(len(node.held) for node in cluster.nodes) == count


@pytest.mark.parametrize("policy", GARBAGE)
def test_a_bad_policy_leaves_no_key_unclaimed(policy):
    """L6 with the wait of 9.6: within an interval, also after a member dies."""
    cluster = world(partitions=2, records=[1] * 6)
    for name in "abc":
        cluster.node(name, spec=spec(policy=policy))
    cluster.run_until(is_covered(cluster, 6), H + 2 * PACE_MS)
    cluster.run(2 * H)
    cluster.crash(max(cluster.nodes, key=lambda node: len(node.held)))
    cluster.run(2 * H)
    cluster.run_until(is_covered(cluster, 6), H + 3 * PACE_MS)


def test_a_policy_that_never_returns_leaves_no_key_unclaimed():
    cluster = world(partitions=2, records=[1] * 6)
    for name in "abc":
        node = cluster.node(name, spec=spec(policy=nothing))
        node.policies.is_held = True
    cluster.run_until(is_covered(cluster, 6), H + 2 * PACE_MS)
    cluster.run(H)
    assert all(node.observer.named("policy_failed") for node in cluster.nodes)


@pytest.mark.parametrize("policy", [releases_all, releases_to_nobody, passes_on])
def test_a_policy_releases_a_key_once_in_an_interval(policy):
    cluster = world(records=[1] * 2)
    nodes = [cluster.node(name, spec=spec(policy=policy)) for name in "ab"]
    cluster.run_until(is_covered(cluster, 2), H + 2 * PACE_MS)
    cluster.run(3 * H)
    released = [x for node in nodes for x in of(cluster, node.owner.client_id)]
    released = [x for x in released if isinstance(x.record, ReleasingPartition)]
    assert len(released) <= 2 * 2 * 4  # keys, members, intervals


def test_the_only_member_of_a_group_releases_no_key():
    cluster = world(records=[1])
    node = cluster.node("a", spec=spec(policy=releases_all))
    cluster.run_until(held_by(node, 1), H + 2 * PACE_MS)
    cluster.run(3 * H)
    assert not of(cluster, "a", ReleasingPartition)


def test_claims_max_holds_for_the_claims_of_a_policy():
    cluster = world(records=[1] * 4)

    def everything(view):
        return Plan(tuple(each.key for each in view.keys))

    node = cluster.node("a", spec=spec(policy=everything, claims_max=3))
    cluster.run(3 * H)
    assert len(node.held) == 3
    assert len(of(cluster, "a", ClaimingPartition)) == 3


# --- The rule ---


A, B, C = (Key("g", "t", number) for number in range(3))
PEER = MemberView(client_id="b", topics=frozenset({"t"}))
ME = MemberView(client_id="me", topics=frozenset({"t"}))


def row(key, **rest):
    return KeyView(
        **{"key": key, "owner": None, "is_mine": False, "is_claimable": True} | rest
    )


def look(*keys, members=(PEER, ME), **rest):
    return View(me="me", keys=keys, members=members, **rest)


def claims(view, plan=None, *, abandoned=(), counts_topics=False):
    rule = CoverageRule(counts_topics=counts_topics)
    return rule.claims(view, Plan() if plan is None else plan, abandoned=abandoned)


def test_the_rule_claims_no_key_before_an_interval_has_passed():
    assert claims(look(row(A), row(B))) == {}


def test_keys_claimable_for_an_interval_are_claimed_as_under_fair():
    keys = [row(key, is_orphan=True) for key in (A, B)]
    found = claims(look(*keys))
    assert len(found) == 1
    assert all("claimable for more than" in why for why in found.values())


def test_the_rule_adds_no_key_that_the_policy_claims():
    keys = [row(key, is_orphan=True) for key in (A, B)]
    chosen = fair(look(*keys))
    assert claims(look(*keys), chosen) == {}


def test_an_abandoned_key_is_claimed_beyond_the_share():
    """Another member is below its share, and evidently does not claim the key."""
    mine = row(B, is_mine=True, is_claimable=False, owner="me")
    more = row(C, is_mine=True, is_claimable=False, owner="me")
    third = MemberView(client_id="c", topics=frozenset({"t"}))
    view = look(row(A, is_orphan=True), mine, more, members=(PEER, third, ME))
    assert claims(view) == {}
    assert set(claims(view, abandoned=[A])) == {A}


def test_the_rule_claims_no_key_beyond_claims_max():
    mine = row(B, is_mine=True, is_claimable=False, owner="me")
    view = look(row(A, is_orphan=True), mine, members=(ME,), claims_max=1)
    assert claims(view, abandoned=[A]) == {}
    named = look(row(A, is_orphan=True), row(B), members=(ME,), claims_max=1)
    assert claims(named, Plan((B,)), abandoned=[A]) == {}


def test_the_rest_of_a_whole_topic_is_not_claimed_without_partition_0():
    """Only the owner of partition 0 claims the rest."""
    orphans = [row(key, is_orphan=True) for key in (A, B)]
    alone = look(*orphans, members=(ME,))
    assert set(claims(alone, counts_topics=True)) == {A}
    lead = row(A, owner="b", is_claimable=False)
    other = look(lead, row(B, is_orphan=True))
    assert claims(other, abandoned=[B], counts_topics=True) == {}


# --- Releases of foreign policies ---


def releases(rule, *wanted, view=None, now_ms=0):
    held = [row(key, is_mine=True, is_claimable=False) for key in (A, B)]
    found = rule.releases(view or look(*held), wanted, now_ms=now_ms, interval_ms=H)
    return [(each.key, each.successor) for each in found]


@pytest.mark.parametrize("successor", [None, "nobody", "me"])
def test_a_release_goes_to_a_member_that_can_take_it(successor):
    rule = CoverageRule(counts_topics=False)
    assert releases(rule, Release(A, successor)) == [(A, "b")]


@pytest.mark.parametrize(
    "peer",
    [
        pytest.param({"is_draining": True}, id="leaves"),
        pytest.param({"topics": frozenset({"u"})}, id="other-topics"),
        pytest.param({"claims_max": 2, "held": 2}, id="full"),
    ],
)
def test_a_key_that_no_member_can_take_is_not_released(peer):
    fields = {"client_id": "b", "topics": frozenset({"t"})} | peer
    view = look(row(A, is_mine=True), members=(MemberView(**fields), ME))
    rule = CoverageRule(counts_topics=False)
    assert releases(rule, Release(A, "b"), view=view) == []
    assert best_taker(view.members, "t", me="me", may_be_behind=True) is None


def test_a_key_is_released_once_in_an_interval():
    rule = CoverageRule(counts_topics=False)
    assert releases(rule, Release(A, "b"), now_ms=5) == [(A, "b")]
    assert releases(rule, Release(A, "b"), Release(B, "b"), now_ms=6) == [(B, "b")]
    # A policy requests the same drain until it has ended.
    assert releases(rule, Release(A, "b"), now_ms=H + 4) == []
    assert releases(rule, Release(A, "b"), now_ms=H + 5) == [(A, "b")]


def test_a_release_under_whole_topics_gets_no_successor():
    rule = CoverageRule(counts_topics=True)
    assert releases(rule, Release(B, None)) == [(B, None)]
