import random
from collections import Counter

import pytest

from kafka_marshal.protocol.planner import (
    LIMITS,
    NO_MEMBERS,
    TOPICS,
    KeyView,
    MemberView,
    Plan,
    Release,
    View,
    fair,
    greedy,
    planned,
    targets,
    topic,
    why_uncovered,
)
from kafka_marshal.protocol.types import Key
from kafka_marshal.testing.policies import SimulatedGroup, Subject, random_group

T = frozenset({"t"})


def key(number, topic="t"):
    return Key("g", topic, number)


def view(me, owners, *, members=None, topic="t", claims_max=0, **special):
    """Return the view of ``me``; ``owners`` by partition, None for a free key."""
    names = sorted({o for o in owners if o} | {me}) if members is None else members
    keys = [
        KeyView(
            key=key(number, topic),
            owner=owner,
            is_mine=owner == me,
            is_claimable=owner is None,
            is_held_by_earlier_process=number in special.get("before", ()),
            is_orphan=owner is None and bool(special.get("orphans")),
        )
        for number, owner in enumerate(owners)
    ]
    views = tuple(
        name if isinstance(name, MemberView) else MemberView(client_id=name, topics=T)
        for name in names
    )
    mine = next((each for each in views if each.client_id == me), None)
    return View(
        me=me,
        keys=tuple(keys),
        members=views,
        claims_max=claims_max,
        is_drained=mine is not None and mine.is_drained,
        is_cordoned=mine is not None and mine.is_cordoned,
    )


def numbers(keys):
    return sorted(item.partition for item in keys)


# --- Shares ---


@pytest.mark.parametrize(
    ("members", "held", "count", "caps", "expected"),
    [
        pytest.param("abc", {}, 6, {}, (2, 2, 2), id="even"),
        pytest.param("abc", {}, 8, {}, (3, 3, 2), id="remainder-by-name"),
        pytest.param("abc", {"c": 3}, 7, {}, (2, 2, 3), id="remainder-to-who-has-most"),
        pytest.param(
            "abc", {"b": 1, "c": 1}, 2, {}, (0, 1, 1), id="fewer-than-members"
        ),
        pytest.param("abc", {}, 0, {}, (0, 0, 0), id="nothing"),
        pytest.param("abc", {}, 9, {"a": 1}, (1, 4, 4), id="cap"),
        pytest.param("abc", {}, 9, {"a": 1, "b": 3}, (1, 3, 5), id="two-caps"),
        pytest.param(
            "abc", {}, 9, {"a": 1, "b": 1, "c": 1}, (1, 1, 1), id="all-capped"
        ),
        pytest.param("abc", {}, 9, {"a": 0, "b": 9}, (0, 5, 4), id="no-room-at-all"),
        pytest.param("a", {}, 5, {"a": 2}, (2,), id="alone-and-capped"),
        pytest.param("", {}, 5, {}, (), id="nobody"),
    ],
)
def test_targets_split_keys_evenly_within_the_caps_of_members(
    members, held, count, caps, expected
):
    share = targets(list(members), held, count=count, caps=caps)
    assert tuple(share[name] for name in members) == expected


@pytest.mark.parametrize(
    ("held", "count", "caps", "weights", "expected"),
    [
        pytest.param({}, 8, {}, {"a": 3}, (6, 2), id="three-as-one"),
        pytest.param({}, 9, {}, {"a": 3}, (7, 2), id="remainder-by-name"),
        pytest.param({"b": 4}, 9, {}, {"a": 3}, (6, 3), id="remainder-to-who-has-most"),
        # Each of the three parts of a has two, and so has b: the rest goes by name.
        pytest.param({"a": 6, "b": 2}, 10, {}, {"a": 3}, (8, 2), id="alike"),
        # One of the three parts of a has one key more than b.
        pytest.param({"a": 7, "b": 2}, 9, {}, {"a": 3}, (7, 2), id="part-of-a-member"),
        pytest.param({"b": 1}, 2, {}, {"a": 3}, (1, 1), id="fewer-than-parts"),
        pytest.param({}, 8, {"a": 4}, {"a": 3}, (4, 4), id="cap"),
        pytest.param({}, 8, {}, {"a": 2, "b": 2}, (4, 4), id="both"),
    ],
)
def test_targets_follow_the_weights_of_members(held, count, caps, weights, expected):
    share = targets(["a", "b"], held, count=count, caps=caps, weights=weights)
    assert (share["a"], share["b"]) == expected


def test_a_member_of_weight_n_gets_the_share_of_n_members():
    chance = random.Random(5)
    for _ in range(300):
        weights = {name: chance.randint(1, 4) for name in "abc"}
        count = chance.randint(0, 30)
        heavy = targets(list("abc"), {}, count=count, caps={}, weights=weights)
        parts = [f"{name}{n}" for name in "abc" for n in range(weights[name])]
        light = targets(parts, {}, count=count, caps={})
        for name in "abc":
            assert heavy[name] == sum(light[p] for p in parts if p[0] == name)


def test_fair_shares_keys_by_the_weights_of_members():
    members = (MemberView(client_id="a", topics=T), MemberView(client_id="b", topics=T))
    seen = view("a", ["a"] * 4 + ["b"] * 4, members=members)
    assert fair(seen) == Plan()
    heavy = View(me="a", keys=seen.keys, members=members, weight=3)
    assert fair(heavy) == Plan(), "b gives up first"
    members = (members[0], MemberView(client_id="b", topics=T, weight=3))
    plan = fair(View(me="a", keys=seen.keys, members=members))
    assert [release.successor for release in plan.release] == ["b", "b"]
    assert plan.release[0].detail == "4 held, share 2 of 8 among 4"


def test_targets_assign_all_keys_evenly_within_random_caps():
    rng = random.Random(1)
    for _ in range(300):
        members = [f"m{n}" for n in range(rng.randint(1, 7))]
        held = {name: rng.randint(0, 5) for name in members}
        caps = {name: rng.choice([0, 1, 3]) for name in members if rng.random() < 0.4}
        count = rng.randint(0, 30)
        share = targets(members, held, count=count, caps=caps)
        limits = [caps.get(name, count) for name in members]
        assert sum(share.values()) == min(count, sum(limits))
        free = [n for n in members if n not in caps or share[n] < caps[n]]
        assert not free or max(share[n] for n in free) - min(share[n] for n in free) < 2
        for name in members:
            assert share[name] <= caps.get(name, count)


# --- Greedy ---


def test_greedy_claims_free_keys_and_releases_none():
    assert numbers(greedy(view("a", [None, "b", None])).claim) == [0, 2]
    everything = view("a", ["a"] * 5, members=["a", "b"])
    assert greedy(everything) == Plan()


def test_greedy_claims_up_to_its_limit():
    assert len(greedy(view("a", [None] * 5, claims_max=2)).claim) == 2
    assert len(greedy(view("a", ["a", None, None], claims_max=2)).claim) == 1
    assert greedy(view("a", ["a", "a", None], claims_max=2)) == Plan()
    assert greedy(view("a", ["a", "a", None], claims_max=1)) == Plan()


def test_keys_held_by_an_earlier_process_are_claimed_first():
    it = view("b", [None, None, "b", None], members=["a", "b"], before={2})
    mine = tuple(
        KeyView(
            key=k.key,
            owner=k.owner,
            is_mine=False,
            is_claimable=False,
            is_held_by_earlier_process=True,
        )
        if k.key.partition == 2
        else k
        for k in it.keys
    )
    resumed = View(me="b", keys=mine, members=it.members, claims_max=1)
    assert numbers(greedy(resumed).claim) == [2]
    assert numbers(fair(resumed).claim) == [2]


def test_greedy_members_claim_different_keys_first():
    free = [None] * 6
    first = {greedy(view(me, free, members=list("abc"))).claim[0] for me in "abc"}
    assert len(first) == 3


# --- Fair: one decision ---


def test_fair_claims_its_share():
    assert len(fair(view("a", [None] * 6, members=list("abc"))).claim) == 2
    assert len(fair(view("c", [None] * 7, members=list("abc"))).claim) == 2
    assert len(fair(view("a", [None] * 7, members=list("abc"))).claim) == 3


def test_fair_releases_surplus_to_members_below_their_share():
    plan = fair(view("a", ["a"] * 6, members=list("abc")))
    assert plan.claim == ()
    assert [(r.key.partition, r.successor) for r in plan.release] == [
        (2, "b"),
        (3, "c"),
        (4, "b"),
        (5, "c"),
    ]


def test_a_successor_gets_no_more_keys_than_it_lacks():
    plan = fair(view("a", ["a"] * 8 + ["b"] * 2, members=list("abc")))
    assert Counter(r.successor for r in plan.release) == {"b": 1, "c": 3}


@pytest.mark.parametrize(
    "owners",
    [
        ["a", "a", "b", "b"],
        ["a", "a", "b"],
        ["a", "b", "b"],
        ["a"],
        [],
    ],
)
@pytest.mark.parametrize("me", ["a", "b"])
def test_a_balanced_group_claims_and_releases_nothing(me, owners):
    """A group is balanced if shares differ by one key at most."""
    assert fair(view(me, owners, members=["a", "b"])) == Plan()


def test_surplus_is_kept_while_no_other_member_has_room():
    capped = MemberView(client_id="b", topics=T, claims_max=1)
    it = view(
        "a", ["a", "a", "a", "b"], members=[MemberView(client_id="a", topics=T), capped]
    )
    assert fair(it) == Plan()


def test_a_free_key_goes_to_the_member_that_is_not_leaving():
    leaving = MemberView(client_id="b", topics=T, is_draining=True)
    it = view(
        "a",
        ["a", "b", "b", None],
        members=[MemberView(client_id="a", topics=T), leaving],
    )
    assert numbers(fair(it).claim) == [3]


def drained(name):
    return MemberView(client_id=name, topics=T, is_drained=True)


def cordoned(name):
    return MemberView(client_id=name, topics=T, is_cordoned=True)


def test_a_drained_member_releases_all_its_keys_to_the_others():
    it = view("a", ["a", "a", "a", "b"], members=[drained("a"), "b", "c"])
    given = {each.key.partition: each.successor for each in fair(it).release}
    assert (sorted(given), sorted(given.values())) == ([0, 1, 2], ["b", "c", "c"])
    assert {each.reason for each in fair(it).release} == {"drained"}
    assert not fair(it).claim


def test_a_drained_member_has_no_share_in_the_view_of_others():
    it = view("b", ["b", "b", None, None], members=[drained("a"), "b"])
    assert numbers(fair(it).claim) == [2, 3]
    assert not fair(it).release


@pytest.mark.parametrize("other", [drained("b"), cordoned("b")])
def test_a_drained_member_keeps_keys_that_no_other_member_may_claim(other):
    assert fair(view("a", ["a", "b", None], members=[drained("a"), other])) == Plan()


def test_a_drained_member_keeps_keys_that_others_have_no_room_for():
    full = MemberView(client_id="b", topics=T, claims_max=2)
    given = fair(view("a", ["a", "a", "b"], members=[drained("a"), full])).release
    assert [each.successor for each in given] == ["b"]


def test_a_key_released_to_a_successor_counts_against_its_limit():
    """A released key counts as its successor's (see ``KeyView.owner``)."""
    full = MemberView(client_id="b", topics=T, claims_max=2)
    it = view("a", ["a", "a", "b", "b"], members=[drained("a"), full])
    assert fair(it) == Plan()
    less = view("a", ["a", "a", "b", "c"], members=[drained("a"), full])
    assert [each.successor for each in fair(less).release] == ["b"]


def test_a_cordoned_member_keeps_its_share_and_claims_nothing():
    it = view("a", ["a", "a", "b", None], members=[cordoned("a"), "b"])
    assert fair(it) == Plan()
    more = view("a", ["a", "a", "a", "b"], members=[cordoned("a"), "b"])
    assert [each.successor for each in fair(more).release] == ["b"]
    other = view("b", ["a", "b", None, None], members=[cordoned("a"), "b"])
    assert numbers(fair(other).claim) == [2, 3]
    assert not fair(other).release


@pytest.mark.parametrize("me", [drained("a"), cordoned("a")])
def test_a_restarted_drained_or_cordoned_member_claims_only_its_former_keys(me):
    it = view("a", [None, None, "b"], members=[me, "b"], before=[0], orphans=True)
    assert numbers(fair(it).claim) == [0]


def test_a_drained_member_releases_whole_topics_under_policy_topic():
    plan = topic(view("a", ["a", "a"], members=[drained("a"), "b"]))
    found = {(each.key.partition, each.successor, each.reason) for each in plan.release}
    assert found == {(0, "b", "drained"), (1, None, "drained")}


def test_a_member_that_is_not_yet_announced_has_a_share():
    assert len(fair(view("z", [None] * 4, members=["a"])).claim) == 2


def test_a_free_key_goes_to_the_member_that_has_room():
    # b is at its limit.
    capped = [
        MemberView(client_id="a", topics=T),
        MemberView(client_id="b", topics=T, claims_max=1),
    ]
    it = view("a", ["a", "a", "b", None], members=capped)
    assert numbers(fair(it).claim) == [3]


def test_an_orphan_is_claimed_although_another_member_lacks_keys():
    fresh = view("a", ["a", "a", None, None], members=["a", "b"])
    assert fair(fresh) == Plan()
    orphans = view("a", ["a", "a", None, None], members=["a", "b"], orphans=True)
    assert numbers(fair(orphans).claim) == [2, 3]


def test_fair_claims_up_to_its_limit():
    assert len(fair(view("a", [None] * 9, claims_max=2)).claim) == 2
    it = view("a", ["a", "a", None], claims_max=2, orphans=True)
    assert fair(it) == Plan()


def test_the_limit_counts_keys_of_all_topics():
    keys = tuple(
        KeyView(key=key(0, topic), owner=None, is_mine=False, is_claimable=True)
        for topic in ("t", "u", "v")
    )
    members = (
        MemberView(client_id="a", topics=frozenset({"t", "u", "v"})),
        MemberView(client_id="b", topics=frozenset({"u"})),
        MemberView(client_id="c", topics=frozenset({"v"})),
    )
    assert len(fair(View(me="a", keys=keys, members=members, claims_max=2)).claim) <= 2
    assert (
        len(fair(View(me="a", keys=keys, members=members[:1], claims_max=2)).claim) == 2
    )


def test_topics_with_the_same_members_are_shared_out_together():
    keys = tuple(
        KeyView(key=key(0, f"t{n}"), owner=None, is_mine=False, is_claimable=True)
        for n in range(6)
    )
    topics = frozenset(f"t{n}" for n in range(6))
    members = tuple(MemberView(client_id=name, topics=topics) for name in "abc")
    assert [
        len(fair(View(me=me, keys=keys, members=members)).claim) for me in "abc"
    ] == [2, 2, 2]


def test_surplus_is_kept_if_the_other_member_is_full_with_another_topic():
    """Member b is at its limit with another topic, and would claim no more keys."""
    keys = tuple(
        KeyView(
            key=key(n, topic), owner=owner, is_mine=owner == "a", is_claimable=False
        )
        for topic, owner in (("t", "a"), ("u", "b"))
        for n in range(3)
    )
    members = (
        MemberView(client_id="a", topics=frozenset({"t", "u"})),
        MemberView(client_id="b", topics=frozenset({"t", "u"}), claims_max=3),
    )
    assert fair(View(me="a", keys=keys, members=members)) == Plan()
    hidden = (
        MemberView(client_id="a", topics=frozenset({"t"})),
        MemberView(client_id="b", topics=frozenset({"t", "w"}), claims_max=3, held=3),
    )
    assert fair(View(me="a", keys=keys[:3], members=hidden)) == Plan()


def test_plans_are_compared_without_their_reasons():
    assert Plan() == Plan((), (), {key(0): "for no reason"})
    assert Release(key(0), None) == Release(
        key=key(0), successor=None, reason="surplus", detail=""
    )


def test_reasons_of_claims_and_releases_state_counts_and_shares():
    plan = fair(view("a", [None] * 6, members=list("abc")))
    assert plan.why[plan.claim[0]] == "fair: 0 held, share 2 of 6 among 3"
    (given, *_) = fair(view("a", ["a"] * 6, members=list("abc"))).release
    assert given.detail == "6 held, share 2 of 6 among 3"
    plan = greedy(view("a", [None] * 3, claims_max=2))
    assert plan.why[plan.claim[0]] == "greedy: 0 of at most 2 held"


# --- The last owner ---


def recalled(me, rows, *, members):
    """Return a view of keys given as (owner, last owner, is leaving)."""
    keys = tuple(
        KeyView(
            key=key(number),
            owner=owner,
            is_mine=owner == me,
            is_claimable=owner is None,
            is_leaving=leaving,
            last_owner=last,
        )
        for number, (owner, last, leaving) in enumerate(rows)
    )
    return View(
        me=me,
        keys=keys,
        members=tuple(MemberView(client_id=name, topics=T) for name in members),
    )


def test_free_keys_go_to_their_last_owner():
    rows = [(None, "b", False), (None, "z", False), (None, "a", False)] * 2
    plan = fair(recalled("a", rows, members="abc"))
    assert numbers(plan.claim) == [2, 5]
    # Keys whose last owner is gone come before those of b, which is live.
    order = [k.partition for k in greedy(recalled("a", rows, members="abc")).claim]
    assert set(order[:2]) == {2, 5}
    assert set(order[4:]) == {0, 3}


def test_a_returning_member_gets_its_partitions_back():
    rows = [("a", "b", False)] + [("a", None, False)] * 2 + [("a", "b", False)]
    plan = fair(recalled("a", rows, members="ab"))
    assert [(r.key.partition, r.successor) for r in plan.release] == [
        (0, "b"),
        (3, "b"),
    ]


def test_a_partition_being_released_counts_as_released():
    rows = [("a", None, False)] * 3 + [("a", None, True)]
    plan = fair(recalled("a", rows, members="ab"))
    assert [(r.key.partition, r.successor) for r in plan.release] == [(2, "b")]
    rows = [("a", None, False)] * 2 + [("a", None, True)] * 2
    assert fair(recalled("a", rows, members="ab")) == Plan()


# --- Fair: keys of members that are gone ---


def taken_over(chance, owners, *, gone):
    """Return the owners after live members have claimed the keys of ``gone``.

    Its keys go stale in random order, and members claim in random order.
    """
    owners = list(owners)
    live = sorted(set(owners) - {gone})
    members = tuple(MemberView(client_id=name, topics=T) for name in live)
    stale = set()
    while gone in owners:
        lost = [n for n, owner in enumerate(owners) if owner == gone]
        stale |= set(chance.sample(lost, chance.randint(0, len(lost))))
        me = chance.choice(live)
        keys = tuple(
            KeyView(
                key=key(n),
                owner=None if n in stale else owner,
                is_mine=owner == me,
                is_claimable=n in stale,
                last_owner=gone if n in stale else None,
            )
            for n, owner in enumerate(owners)
        )
        for each in fair(View(me=me, keys=keys, members=members)).claim:
            if chance.random() < 0.5:
                owners[each.partition] = me
                stale.discard(each.partition)
    return owners


@pytest.mark.parametrize("seed", range(30))
def test_keys_of_a_gone_member_get_the_same_owners_in_any_order_of_claims(seed):
    """Members need not race: the result is the same in whatever order keys go stale."""
    chance = random.Random(seed)
    owners = (list("abcd") * 6)[: chance.randint(4, 24)]
    chance.shuffle(owners)
    found = {tuple(taken_over(chance, owners, gone="d")) for _ in range(20)}
    assert len(found) == 1


def test_a_key_in_the_share_of_another_is_claimed_once_it_is_an_orphan():
    rows = ["a", "b", None, None]
    seen = recalled(
        "a", [(o, "z" if o is None else None, False) for o in rows], members="ab"
    )
    assert numbers(fair(seen).claim) == [2]
    keys = tuple(
        KeyView(
            key=k.key,
            owner=k.owner,
            is_mine=k.is_mine,
            is_claimable=k.key.partition == 3,
            is_orphan=k.key.partition == 3,
            last_owner=k.last_owner,
        )
        for k in seen.keys
    )
    assert numbers(fair(View(me="a", keys=keys, members=seen.members)).claim) == [3]


# --- Fair: all members together, until no key moves ---


def test_twenty_clients_share_twenty_partitions():
    members = [MemberView(client_id=f"c{n:02}", topics=T) for n in range(20)]
    group = SimulatedGroup({"t": 20}, members, subject=Subject(fair))
    assert group.settle() <= 10
    assert set(Counter(group.owners.values()).values()) == {1}


@pytest.mark.parametrize("owners", [0, 1, 3])
def test_a_new_member_gets_its_share_by_as_few_moves_as_possible(owners):
    names = [f"c{n}" for n in range(owners + 1)]
    held = {key(n): names[n % max(1, owners)] for n in range(24)} if owners else {}
    members = [MemberView(client_id=name, topics=T) for name in names]
    group = SimulatedGroup({"t": 24}, members, held, subject=Subject(fair))
    group.settle()
    counts = Counter(group.owners.values())
    assert set(counts.values()) == {24 // (owners + 1)}
    assert group.moves == (24 // (owners + 1) if owners else 0)


@pytest.mark.parametrize("seed", range(200))
def test_the_fair_assignment_converges(seed):
    """In bounded rounds, for good; a key stays free only if no member has room."""
    group = random_group(random.Random(seed), Subject(fair))
    group.settle()
    before = dict(group.owners)
    for _ in range(5):
        assert not group.round()
    assert group.owners == before
    for item, owner in group.owners.items():
        able = [m for m in group.members if item.topic in m.topics]
        has_room = [
            m
            for m in able
            if not m.claims_max or len(group.held(m.client_id)) < m.claims_max
        ]
        assert owner is not None or not has_room, item
    for member in group.members:
        assert (
            not member.claims_max
            or len(group.held(member.client_id)) <= member.claims_max
        )


@pytest.mark.parametrize("seed", range(20))
def test_the_greedy_assignment_converges_without_moves(seed):
    group = random_group(random.Random(seed), Subject(greedy))
    assert group.settle() <= 10
    assert group.moves == 0


# --- topic policy


def keys(name, row, *, me="a", start=0):
    """Return the keys of a topic, one for each mark.

    ``a`` is owned by me, ``b`` by another member, ``.`` by none; ``!`` was lost to b;
    ``+`` is being claimed by me, ``-`` being released; ``^`` is owned by an earlier
    process of mine.
    """
    owners = {".": None, "!": "b", "+": None, "-": me, "^": me}
    return tuple(
        KeyView(
            key=Key("g", name, number),
            owner=owners.get(mark, mark),
            is_mine=mark in {me, "+", "-"},
            is_claimable=mark in ".+",
            is_held_by_earlier_process=mark == "^",
            is_leaving=mark == "-",
            is_lost=mark == "!",
        )
        for number, mark in enumerate(row, start)
    )


def topic_view(*rows, members="ab", claims_max=0):
    names = frozenset(f"t{n}" for n in range(len(rows)))
    found = sum((keys(f"t{n}", row) for n, row in enumerate(rows)), ())
    return View(
        me="a",
        keys=found,
        members=tuple(MemberView(client_id=m, topics=names) for m in members),
        claims_max=claims_max,
    )


def parts(names):
    return [f"{key.topic[1:]}-{key.partition}" for key in names]


@pytest.mark.parametrize(
    ("rows", "claim", "release"),
    [
        pytest.param(["..."], ["0-0"], [], id="partition-0-first"),
        pytest.param(["+.."], [], [], id="until-it-is-won-nothing-else"),
        pytest.param(["a.."], ["0-1", "0-2"], [], id="then-the-rest"),
        pytest.param(["a.b"], ["0-1"], [], id="what-is-free-of-it"),
        pytest.param(["a+^"], ["0-2"], [], id="what-an-earlier-life-had"),
        pytest.param(["b.."], [], [], id="never-of-anothers-topic"),
        pytest.param(["baa"], [], ["0-1", "0-2"], id="losing-the-key-loses-all"),
        pytest.param(["aa!"], [], ["0-0", "0-1"], id="losing-a-part-loses-all"),
        pytest.param(["!a."], [], ["0-1"], id="and-so-does-the-key"),
        pytest.param(["..!"], [], [], id="nothing-again-before-all-is-given-up"),
        pytest.param(["-a."], [], ["0-1"], id="the-rest-follows-the-key"),
    ],
)
def test_policy_topic_claims_and_releases_a_topic_as_a_whole(rows, claim, release):
    plan = topic(topic_view(*rows, members="a"))
    assert parts(plan.claim) == claim
    assert parts(r.key for r in plan.release) == release
    assert {r.reason for r in plan.release} <= {"topic"}
    assert set(plan.why) >= set(plan.claim)


def test_policy_topic_shares_topics_among_members():
    free = ["...", "...", "...", "..."]
    assert len(topic(topic_view(*free)).claim) == 2
    assert len(topic(topic_view(*free, claims_max=1)).claim) == 1
    assert len(topic(topic_view(*free, members="a")).claim) == 4


def test_the_limit_of_policy_topic_counts_topics():
    """Three partitions of one topic count as one."""
    held = topic_view("aaa", "...", "...", members="a", claims_max=2)
    assert parts(topic(held).claim) == ["1-0"]
    assert topic(topic_view("aaa", "aaa", "...", members="a", claims_max=2)) == Plan()


def test_a_surplus_topic_is_released_whole():
    plan = topic(topic_view("aa", "aa"))
    assert [(parts([r.key])[0], r.successor) for r in plan.release] == [
        ("1-0", "b"),
        ("1-1", None),
    ]
    assert plan.release[0].detail == "t1 is another member's share"
    assert {r.reason for r in plan.release} == {"surplus"}


def test_the_reason_of_a_release_names_the_missing_partitions():
    (first, *_) = topic(topic_view("aa!!", members="a")).release
    assert first.detail == "lost t0-2,3"
    (only,) = topic(topic_view("ba")).release
    assert only.detail == "t0-0 is not held"
    (only,) = topic(topic_view("-a", members="a")).release
    assert only.detail == "t0-0 is given up"


def test_a_topic_whose_partition_0_is_not_in_the_view_is_released():
    """The owner of partition 0 has the topic; without it, no member can have it."""
    rest = keys("t0", "a.", start=1)
    plan = topic(
        View(
            me="a",
            keys=rest,
            members=(MemberView(client_id="a", topics=frozenset({"t0"})),),
        )
    )
    assert parts(plan.claim) == []
    assert parts(r.key for r in plan.release) == ["0-1"]


# --- Partitions that nobody can claim ---


def taker(held=0, claims_max=2, topics=T, **rest):
    return MemberView(
        client_id="a", topics=topics, held=held, claims_max=claims_max, **rest
    )


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        pytest.param([], NO_MEMBERS, id="nobody"),
        pytest.param([taker(is_draining=True)], NO_MEMBERS, id="all leave"),
        pytest.param([taker(is_drained=True)], NO_MEMBERS, id="all are drained"),
        pytest.param([taker(is_cordoned=True)], NO_MEMBERS, id="all are cordoned"),
        pytest.param([taker(topics=frozenset("u"))], TOPICS, id="no subscriber"),
        pytest.param(
            [taker(is_draining=True), taker(topics=frozenset("u"))],
            TOPICS,
            id="the subscriber leaves",
        ),
        pytest.param([taker(2), taker(3)], LIMITS, id="all full"),
        pytest.param(
            [taker(2), taker(topics=frozenset("u"))], LIMITS, id="room elsewhere"
        ),
        pytest.param([taker(2), taker(1)], None, id="room for one more"),
        pytest.param([taker(9, claims_max=0)], None, id="without a limit"),
    ],
)
def test_why_uncovered_names_the_reason_that_no_member_can_claim(members, expected):
    assert why_uncovered("t", members) == expected


# --- a group with policy planner


def named(number, *, owner=None, planned=None, me="a", **rest):
    """Return a key that a Plan names a member for."""
    return KeyView(
        key=Key("g", "t", number),
        owner=owner,
        is_mine=owner == me,
        is_claimable=owner is None,
        planned=planned,
        **rest,
    )


def of_group(*keys, **others):
    members = tuple(
        MemberView(client_id=name, topics=frozenset({"t"}), **others.get(name, {}))
        for name in ("a", "b")
    )
    return View(
        me="a", keys=keys, members=members, is_drained=others.get("drained", False)
    )


def test_free_keys_that_the_plan_names_and_former_keys_are_claimed():
    view = of_group(
        named(0, planned="a"),
        named(1, planned="b"),
        named(2),
        named(3, owner="b", planned="a"),
        named(4, is_held_by_earlier_process=True),
    )
    assert [key.partition for key in planned(view).claim] == [0, 4]


def test_a_drained_member_claims_only_keys_of_its_earlier_process():
    view = of_group(
        named(0, planned="a"), named(1, is_held_by_earlier_process=True), drained=True
    )
    assert [key.partition for key in planned(view).claim] == [1]


def test_held_keys_are_released_to_the_member_that_the_plan_names():
    view = of_group(
        named(0, owner="a", planned="b"),
        named(1, owner="a", planned="a"),
        named(2, owner="a"),
        named(3, owner="a", planned="nobody"),
    )
    (release,) = planned(view).release
    assert (release.key.partition, release.successor) == (0, "b")
    assert release.reason == "planned"


def test_no_key_is_released_to_a_cordoned_member():
    view = of_group(named(0, owner="a", planned="b"), b={"is_cordoned": True})
    assert planned(view).release == ()
