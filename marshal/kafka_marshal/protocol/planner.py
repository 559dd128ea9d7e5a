"""Which partitions to try, keep or give up: pure functions of a view (PROTOCOL 1.6).

A plan is advice; the claim is the gate. Two members that see different worlds
may plan against each other for a moment; no record is at risk, and the next
plan mends it.
"""

from collections.abc import Mapping, Sequence

import attrs

from kafka_marshal.protocol.types import Key


@attrs.frozen
class KeyView:
    """One wanted key as a member sees it.

    Attributes:
        key: The key.
        owner: client_id of the owner by the log, None where it is free or stale.
        is_mine: Whether this member holds it, or is about to.
        is_claimable: Whether a claim is likely to be accepted now.
        is_ours_before: Whether an earlier life of this member still owns it.
        is_orphan: Whether it has been claimable for so long that whoever should
            have taken it evidently does not.
    """

    key: Key
    owner: str | None
    is_mine: bool
    is_claimable: bool
    is_ours_before: bool = False
    is_orphan: bool = False


@attrs.frozen
class MemberView:
    """One live member of the group, as it announced itself.

    Attributes:
        client_id: Its name.
        topics: What it subscribes to.
        is_draining: Whether it is leaving, and takes nothing new.
        claims_max: Most keys it will hold, 0 = no limit.
        held: How many keys it holds, of topics that we may not even see.
    """

    client_id: str
    topics: frozenset[str]
    is_draining: bool = False
    claims_max: int = 0
    held: int = 0


@attrs.frozen
class View:
    """Everything a policy may look at.

    Attributes:
        me: Own client_id.
        keys: Every key of the subscribed topics, in order.
        members: Live members, self included, in order of client_id.
        claims_max: Most keys to hold, 0 = no limit.
    """

    me: str
    keys: tuple[KeyView, ...]
    members: tuple[MemberView, ...]
    claims_max: int = 0


@attrs.frozen
class Release:
    """A key to give up, and the member that should have it."""

    key: Key
    successor: str | None


@attrs.frozen
class Plan:
    """What a policy advises: keys to contend for, keys to give up."""

    claim: tuple[Key, ...] = ()
    release: tuple[Release, ...] = ()


def greedy(view: View) -> Plan:
    """Take whatever is free, up to the limit, and give nothing up."""
    held = sum(key.is_mine for key in view.keys)
    return Plan(_pick(view, view.keys, room=_cap(view, len(view.keys)) - held))


def fair(view: View) -> Plan:
    """Hold an equal share of each topic; give surplus up to those below theirs.

    Topics with the same subscribers are shared out together, so that many
    topics of one partition each spread like one topic of many. Keys that
    nobody takes are taken beyond the share.
    """
    claim: list[Key] = []
    release: list[Release] = []
    held_total = sum(key.is_mine for key in view.keys)
    for members, keys in _cohorts(view):
        plan = _share(view, members, keys, room=_cap(view, len(view.keys)) - held_total)
        claim.extend(plan.claim)
        release.extend(plan.release)
        held_total += len(plan.claim)
    return Plan(tuple(claim), tuple(release))


POLICIES = {"fair": fair, "greedy": greedy}


def targets(
    members: Sequence[str],
    held: Mapping[str, int],
    *,
    count: int,
    caps: Mapping[str, int],
) -> dict[str, int]:
    """Return how many of ``count`` keys each member should hold.

    Everybody gets the floor; the remainder goes to those who hold most, so
    that as little as possible moves; ties by name. A member with a cap gets no
    more than that, and the others share what it leaves.
    """
    share: dict[str, int] = {}
    open_members = sorted(members, key=lambda name: (-held.get(name, 0), name))
    while open_members:
        base, extra = divmod(count - sum(share.values()), len(open_members))
        wanted = {n: base + (rank < extra) for rank, n in enumerate(open_members)}
        full = [n for n in open_members if n in caps and caps[n] < wanted[n]]
        if not full:
            return share | wanted
        share.update((name, caps[name]) for name in full)
        open_members = [name for name in open_members if name not in share]
    return share


def _cap(view: View, everything: int) -> int:
    return view.claims_max or everything


def _cohorts(view: View) -> list[tuple[tuple[str, ...], tuple[KeyView, ...]]]:
    """Group keys by the set of members that subscribe to their topic."""
    cohorts: dict[tuple[str, ...], list[KeyView]] = {}
    subscribers: dict[str, tuple[str, ...]] = {}
    for key in view.keys:
        topic = key.key.topic
        if topic not in subscribers:
            names = {m.client_id for m in view.members if topic in m.topics}
            gone = {m.client_id for m in view.members if m.is_draining}
            subscribers[topic] = tuple(sorted(names - gone | {view.me}))
        cohorts.setdefault(subscribers[topic], []).append(key)
    return [(members, tuple(keys)) for members, keys in sorted(cohorts.items())]


def _share(
    view: View, members: tuple[str, ...], keys: tuple[KeyView, ...], *, room: int
) -> Plan:
    held = _held(view, keys)
    share = targets(members, held, count=len(keys), caps=_caps(view, held))
    mine = sum(key.is_mine for key in keys)
    lacks = {
        name: share[name] - held.get(name, 0)
        for name in members
        if held.get(name, 0) < share[name] and name != view.me
    }
    surplus = mine - share[view.me]
    if surplus > 0 and lacks:
        return Plan(release=_give_up(keys, surplus, lacks=lacks))
    wanted = share[view.me] - mine
    if wanted > 0:
        return Plan(claim=_pick(view, keys, room=min(wanted, room)))
    # Coverage comes before balance: nobody lacks any, or nobody cares.
    left = [key for key in keys if not lacks or key.is_orphan]
    return Plan(claim=_pick(view, left, room=min(len(left), room)))


def _held(view: View, keys: Sequence[KeyView]) -> dict[str, int]:
    held: dict[str, int] = {}
    for key in keys:
        name = view.me if key.is_mine else key.owner
        if name is not None:
            held[name] = held.get(name, 0) + 1
    return held


def _caps(view: View, held: Mapping[str, int]) -> dict[str, int]:
    """Return how many keys of one cohort each limited member can hold.

    What it holds of other topics is no room here: a key given up to a member
    that is full would come back, and be given up again, without end.
    """
    in_all = _held(view, view.keys)
    limits = {m.client_id: (m.claims_max, m.held) for m in view.members}
    limits[view.me] = (view.claims_max, 0)
    caps = {}
    for name, (most, announced) in limits.items():
        if most:
            elsewhere = max(announced, in_all.get(name, 0)) - held.get(name, 0)
            caps[name] = max(0, most - elsewhere)
    return caps


def _give_up(
    keys: tuple[KeyView, ...], surplus: int, *, lacks: Mapping[str, int]
) -> tuple[Release, ...]:
    """Give the last keys up, in turn to each member that lacks some."""
    turns = sorted((turn, name) for name, lack in lacks.items() for turn in range(lack))
    mine = [key.key for key in keys if key.is_mine]
    given = mine[len(mine) - surplus :]
    return tuple(
        Release(key, name) for key, (_, name) in zip(given, turns, strict=False)
    )


def _pick(view: View, keys: Sequence[KeyView], *, room: int) -> tuple[Key, ...]:
    """Choose free keys, own earlier ones first; members start at other places."""
    if room <= 0:
        return ()
    before = [key.key for key in keys if key.is_ours_before and not key.is_mine]
    free = [
        key.key
        for key in keys
        if key.is_claimable and not key.is_mine and not key.is_ours_before
    ]
    names = sorted({member.client_id for member in view.members} | {view.me})
    rank = names.index(view.me)
    spread = sorted(
        range(len(free)), key=lambda index: ((index - rank) % len(names) != 0, index)
    )
    return tuple([*before, *(free[index] for index in spread)][:room])
