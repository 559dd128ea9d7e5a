"""Which partitions to claim, keep or release: pure functions of a view (PROTOCOL 1.6).

A plan is advice; only a claim decides. Two members with different views may plan
against each other for a moment. No record is at risk, and the next plan corrects it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import msgspec

from kafka_marshal.protocol.group_plan import LIMITS, NO_MEMBERS, TOPICS
from kafka_marshal.protocol.types import Key

SURPLUS = "surplus"
DRAINED = "drained"
PLANNED = "planned"
"""Why a key is released: the member has more than its share, an admin drains the
member, or the Plan of the group names another member."""


# Created for every wanted partition at each plan: not tracked by the garbage collector.
class KeyView(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One wanted key in the view of a member.

    Attributes:
        key: The key.
        owner: client_id of the owner in the log, or of the successor that a release
            reserves the key for; None if it is free or stale.
        is_mine: Whether this member holds it, or is about to.
        is_claimable: Whether a claim is likely to be accepted now.
        is_held_by_earlier_process: Whether an earlier process of this member still owns
            it.
        is_orphan: Whether it has been claimable for so long that the member whose
            share it is evidently does not claim it.
        is_leaving: Whether this member is releasing it already.
        is_lost: Whether this member lost it and still holds other partitions of the
            topic.
        last_owner: client_id of the previous owner, or of the last one if it is
            free; None if the log names none.
        planned: client_id that the Plan of the group names for it (PROTOCOL 9.2), None
            without one.
    """

    key: Key
    owner: str | None
    is_mine: bool
    is_claimable: bool
    is_held_by_earlier_process: bool = False
    is_orphan: bool = False
    is_leaving: bool = False
    is_lost: bool = False
    last_owner: str | None = None
    planned: str | None = None


class MemberView(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One live member of the group, as it announced itself.

    Attributes:
        client_id: Its name.
        topics: Topics it subscribes to.
        is_draining: Whether it is leaving, and claims nothing new.
        claims_max: Maximum number of keys it will hold, 0 = no limit.
        held: How many keys it holds, also of topics that this member does not read.
        is_behind: Whether it announced that it does not keep up.
        weight: How many members it counts as: a sidecar counts as one for each of its
            clients.
        host: Where it runs, as it announced; empty if unknown.
        labels: What else it announced, in order of names.
        is_drained: Whether an admin drains it: its share is 0 (PROTOCOL 9.7).
        is_cordoned: Whether an admin lets it take nothing new.
    """

    client_id: str
    topics: frozenset[str]
    is_draining: bool = False
    claims_max: int = 0
    held: int = 0
    is_behind: bool = False
    weight: int = 1
    host: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    is_drained: bool = False
    is_cordoned: bool = False

    @property
    def can_take(self) -> bool:
        """Whether it claims anything new."""
        return not (self.is_draining or self.is_drained or self.is_cordoned)


def why_uncovered(topic: str, members: Iterable[MemberView]) -> str | None:
    """Return why no member can claim a partition of a topic now, None if one can.

    Args:
        topic: Topic of the partition.
        members: The live members of the group, with the numbers of keys they hold.
    """
    staying = [member for member in members if member.can_take]
    if not staying:
        return NO_MEMBERS
    takers = [member for member in staying if topic in member.topics]
    if not takers:
        return TOPICS
    is_full = all(m.claims_max and m.held >= m.claims_max for m in takers)
    return LIMITS if is_full else None


@attrs.frozen(kw_only=True)
class View:
    """Everything that a policy may use.

    Attributes:
        me: Own client_id.
        keys: Every key of the subscribed topics, in order.
        members: Live members, self included, in order of client_id.
        claims_max: Maximum number of keys to hold, 0 = no limit.
        weight: How many members this one counts as.
        is_drained: Whether an admin drains this member (PROTOCOL 9.7).
        is_cordoned: Whether an admin lets it take nothing new.
    """

    me: str
    keys: tuple[KeyView, ...]
    members: tuple[MemberView, ...]
    claims_max: int = 0
    weight: int = 1
    is_drained: bool = False
    is_cordoned: bool = False

    @property
    def can_take(self) -> bool:
        """Whether this member may claim anything new."""
        return not (self.is_drained or self.is_cordoned)


@attrs.frozen
class Release:
    """A key to release.

    Attributes:
        key: The key; this member holds it.
        successor: client_id of the member that should claim it, None = any.
        reason: Why, in one word.
        detail: Why, in figures, for people.
    """

    key: Key
    successor: str | None
    reason: str = SURPLUS
    detail: str = ""


@attrs.frozen
class Plan:
    """What a policy advises.

    Attributes:
        claim: Keys to claim, claimable now or later. Claims that are no longer named
            and not yet won are dropped.
        release: Keys to release.
        why: Why a key is claimed, in figures, for people.
    """

    claim: tuple[Key, ...] = ()
    release: tuple[Release, ...] = ()
    why: Mapping[Key, str] = attrs.field(factory=dict, eq=False)


def planned(view: View) -> Plan:
    """Claim the keys for which the group's Plan names this member, release the others.

    A key goes to another member only while that member is live and takes keys. Keys
    that the Plan does not name stay where they are; if free, they are not claimed.
    """
    takers = {
        member.client_id: member.topics for member in view.members if member.can_take
    }
    claim: list[Key] = []
    release: list[Release] = []
    for key in view.keys:
        to = key.planned
        if not key.is_mine:
            is_named = to == view.me and key.is_claimable
            if key.is_held_by_earlier_process or (is_named and view.can_take):
                claim.append(key.key)
        elif to is not None and to != view.me and key.key.topic in takers.get(to, ()):
            release.append(Release(key.key, to, reason=PLANNED))
    why = "planner: named by the plan"
    return Plan(tuple(claim), tuple(release), dict.fromkeys(claim, why))


_ALL_ALIKE: Mapping[str, int] = {}

Policy = Callable[[View], Plan]
"""Plans for one member: deterministic, quick, without side effects."""


def greedy(view: View) -> Plan:
    """Claim all free keys, up to the limit, and release nothing."""
    held = sum(key.is_mine for key in view.keys)
    chosen = _pick(view, view.keys, room=_cap(view, len(view.keys)) - held)
    limit = f" of at most {view.claims_max}" if view.claims_max else ""
    why = f"greedy: {held}{limit} held"
    return Plan(chosen, why=dict.fromkeys(chosen, why))


def fair(view: View) -> Plan:
    """Hold an equal share of each topic; release surplus to members below theirs.

    Topics with the same subscribers are shared together, so that many topics of one
    partition each spread like one topic of many. Keys that no member claims are
    claimed beyond the share.
    """
    claim: list[Key] = []
    release: list[Release] = []
    why: dict[Key, str] = {}
    held_total = sum(key.is_mine for key in view.keys)
    for members, keys in _cohorts(view):
        plan = _share(view, members, keys, room=_cap(view, len(view.keys)) - held_total)
        claim.extend(plan.claim)
        release.extend(plan.release)
        why.update(plan.why)
        held_total += len(plan.claim)
    return Plan(tuple(claim), tuple(release), why)


def targets(
    members: Sequence[str],
    held: Mapping[str, int],
    *,
    count: int,
    caps: Mapping[str, int],
    weights: Mapping[str, int] = _ALL_ALIKE,
) -> dict[str, int]:
    """Return how many of ``count`` keys each member should hold.

    Every member gets the floor; the remainder goes to the members that hold more than
    the floor, so that as few keys as possible move, then by name. So members that claim
    their shares one after the other do not change the shares of others. A member of
    weight n counts as n members that hold equal parts of its keys. A member with a cap
    gets no more than that, and the others share the rest.
    """
    share: dict[str, int] = {}
    open_members = sorted(members)
    while open_members:
        weighed = [(name, weights.get(name, 1)) for name in open_members]
        parts = sum(weight for _, weight in weighed)
        base, extra = divmod(count - sum(share.values()), parts)
        wanted = {name: base * weight for name, weight in weighed}
        for _, name, number in _ranked(weighed, held, base):
            taken = min(extra, number)
            wanted[name] += taken
            extra -= taken
        full = [n for n in open_members if n in caps and caps[n] < wanted[n]]
        if not full:
            return share | wanted
        share.update((name, caps[name]) for name in full)
        open_members = [name for name in open_members if name not in share]
    return share


def _ranked(
    weighed: Sequence[tuple[str, int]], held: Mapping[str, int], base: int
) -> list[tuple[int, str, int]]:
    """Return members in the order in which the remainder goes to them.

    Members that hold more than ``base`` come first, most held first. Each member is
    listed twice: for its parts that hold one more key than its other parts, and for
    these others.
    """
    rows = []
    for name, weight in weighed:
        floor, more = divmod(held.get(name, 0), weight)
        rows.append((-max(floor + 1, base), name, more))
        rows.append((-max(floor, base), name, weight - more))
    return sorted(rows)


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
    weights = {member.client_id: member.weight for member in view.members}
    weights[view.me] = view.weight
    share = targets(
        members, held, count=len(keys), caps=_caps(view, held), weights=weights
    )
    mine = sum(key.is_mine for key in keys)
    lacks = {
        name: share[name] - held.get(name, 0)
        for name in members
        if held.get(name, 0) < share[name] and name != view.me
    }
    surplus = mine - share[view.me]
    parts = sum(weights[name] for name in members)
    detail = f"{mine} held, share {share[view.me]} of {len(keys)} among {parts}"
    if surplus > 0 and lacks:
        given = _give_up(keys, surplus, lacks=lacks)
        reason = DRAINED if view.is_drained else SURPLUS
        return Plan(
            release=tuple(
                attrs.evolve(each, reason=reason, detail=detail) for each in given
            )
        )
    if not view.can_take:
        own = tuple(
            key.key
            for key in keys
            if key.is_held_by_earlier_process and not key.is_mine
        )
        return Plan(
            own, why=dict.fromkeys(own, f"fair: {detail}, held by its earlier process")
        )
    wanted = share[view.me] - mine
    if wanted > 0:
        lacks[view.me] = wanted
        others = _turns_of_others(view, members, keys, lacks)
        open_keys = [key for key in keys if key.is_orphan or key.key not in others]
        chosen = _pick(view, open_keys, room=min(wanted, room))
        return Plan(chosen, why=dict.fromkeys(chosen, f"fair: {detail}"))
    # Coverage comes before balance: no member lacks keys, or none claims these.
    left = [key for key in keys if not lacks or key.is_orphan]
    chosen = _pick(view, left, room=min(len(left), room))
    return Plan(
        chosen,
        why=dict.fromkeys(chosen, f"fair: {detail}, unclaimed beyond the shares"),
    )


def _turns_of_others(
    view: View,
    members: tuple[str, ...],
    keys: tuple[KeyView, ...],
    lacks: Mapping[str, int],
) -> set[Key]:
    """Return the keys of members that are gone which other members should claim.

    The keys become claimable one after the other. Which member claims which key depends
    neither on that order nor on earlier claims, so nobody races for them, and a
    simulation can predict it: a member first gets keys whose number falls to it; then
    members get the rest, by name.
    """
    live = {member.client_id for member in view.members} | {view.me}
    left = {name: lacks.get(name, 0) for name in members}
    rest: list[Key] = []
    others: set[Key] = set()
    for index, key in enumerate(keys):
        last = key.owner or key.last_owner
        if key.is_mine or last is None or last in live:
            continue
        name = members[index % len(members)]
        if not left[name]:
            rest.append(key.key)
            continue
        left[name] -= 1
        if name != view.me:
            others.add(key.key)
    turns = (name for name in members for _ in range(left[name]))
    for item, name in zip(rest, turns, strict=False):
        if name != view.me:
            others.add(item)
    return others


def _held(view: View, keys: Sequence[KeyView]) -> dict[str, int]:
    held: dict[str, int] = {}
    for key in keys:
        name = view.me if key.is_mine else key.owner
        if name is not None:
            held[name] = held.get(name, 0) + 1
    return held


def _caps(view: View, held: Mapping[str, int]) -> dict[str, int]:
    """Return how many keys of one cohort each limited member can hold.

    Keys of other topics count against its limit: a key released to a member that is
    full would come back and be released again, without end.
    """
    in_all = _held(view, view.keys)
    limits = {m.client_id: (m.claims_max, m.held) for m in view.members}
    limits[view.me] = (view.claims_max, 0)
    caps = {}
    for name, (most, announced) in limits.items():
        if most:
            elsewhere = max(announced, in_all.get(name, 0)) - held.get(name, 0)
            caps[name] = max(0, most - elsewhere)
    # PROTOCOL 9.7: a drained member has no share, a cordoned one no more than it holds.
    drained = {m.client_id for m in view.members if m.is_drained}
    cordoned = {m.client_id for m in view.members if m.is_cordoned}
    drained |= {view.me} if view.is_drained else set()
    cordoned |= {view.me} if view.is_cordoned else set()
    for name in cordoned:
        caps[name] = min(caps.get(name, len(held)), held.get(name, 0))
    return caps | dict.fromkeys(drained, 0)


def _give_up(
    keys: tuple[KeyView, ...], surplus: int, *, lacks: Mapping[str, int]
) -> tuple[Release, ...]:
    """Release surplus, in turn to each member that lacks keys.

    A key goes back to its previous owner if possible; of the other keys, the last ones
    are released. Keys that are being released already count.
    """
    turns = sorted((turn, name) for name, lack in lacks.items() for turn in range(lack))
    leaving = sum(key.is_mine and key.is_leaving for key in keys)
    turns = turns[leaving:surplus]
    mine = [key for key in keys if key.is_mine and not key.is_leaving]
    before: dict[str, list[Key]] = {name: [] for name in lacks}
    for key in mine:
        if key.last_owner in before:
            before[key.last_owner].append(key.key)
    given: dict[Key, str] = {}
    others: list[str] = []
    for _, name in turns:
        if before[name]:
            given[before[name].pop()] = name
        else:
            others.append(name)
    rest = [key.key for key in mine if key.key not in given]
    given.update(zip(rest[len(rest) - len(others) :], others, strict=False))
    return tuple(Release(key.key, given[key.key]) for key in mine if key.key in given)


def _pick(view: View, keys: Sequence[KeyView], *, room: int) -> tuple[Key, ...]:
    """Choose free keys, own earlier ones first; each member starts at another key.

    Keys that another live member held last come last: that member may resume them.
    """
    if room <= 0:
        return ()
    before = [
        key.key for key in keys if key.is_held_by_earlier_process and not key.is_mine
    ]
    free = [
        key
        for key in keys
        if key.is_claimable and not key.is_mine and not key.is_held_by_earlier_process
    ]
    live = {member.client_id for member in view.members} - {view.me}
    names = sorted(live | {view.me})
    rank = names.index(view.me)

    def order(index: int) -> tuple[int, bool, int]:
        last_owner = free[index].last_owner
        whose = 0 if last_owner == view.me else 2 if last_owner in live else 1
        return whose, (index - rank) % len(names) != 0, index

    spread = sorted(range(len(free)), key=order)
    return tuple([*before, *(free[index].key for index in spread)][:room])


LEAD = 0


def topic(view: View) -> Plan:
    """Policy ``topic``: an equal share of whole topics (PROTOCOL 1.6).

    The owner of a topic's partition 0 claims all its other partitions, as they become
    free; no other member claims any of them. A member that loses one partition
    releases the whole topic, because a topic must not be split between members.
    Limits count topics.
    """
    topics: dict[str, list[KeyView]] = {}
    for key in view.keys:
        topics.setdefault(key.key.topic, []).append(key)
    torn = {name for name, keys in topics.items() if any(key.is_lost for key in keys)}
    leads = tuple(
        keys[0]
        for name, keys in topics.items()
        if keys[0].key.partition == LEAD and name not in torn
    )
    plan = fair(attrs.evolve(view, keys=leads))
    given = {release.key.topic: release for release in plan.release}
    claim = list(plan.claim)
    release: list[Release] = []
    why = {key: f"topic, {text}" for key, text in plan.why.items()}
    for name, keys in topics.items():
        reason = _why_not(view, keys, is_given=name in given)
        if reason is None:
            parts = [key.key for key in keys if _is_open(key)]
            claim.extend(parts)
            why.update(dict.fromkeys(parts, f"topic: {name}-{LEAD} is held"))
            continue
        for key in keys:
            if key.is_mine and key.owner == view.me and not key.is_leaving:
                # Partition 0 goes to the successor; its owner then claims the rest.
                is_lead = key.key.partition == LEAD and name in given
                successor = given[name].successor if is_lead else None
                name_of = given[name].reason if name in given else "topic"
                release.append(
                    Release(
                        key=key.key, successor=successor, reason=name_of, detail=reason
                    )
                )
    return Plan(tuple(claim), tuple(release), why)


def _is_open(key: KeyView) -> bool:
    return not key.is_mine and (key.is_claimable or key.is_held_by_earlier_process)


def _why_not(view: View, keys: list[KeyView], *, is_given: bool) -> str | None:
    """Return why a topic should not be held now, None if this member owns it."""
    lead = keys[0]
    name = lead.key.topic
    lost = [str(key.key.partition) for key in keys if key.is_lost]
    if lost:
        return f"lost {name}-{','.join(lost)}"
    if is_given:
        return f"{name} is another member's share"
    if lead.key.partition == LEAD and lead.is_mine:
        if lead.is_leaving:
            return f"{name}-{LEAD} is given up"
        if lead.owner == view.me:
            return None
    return f"{name}-{LEAD} is not held"
