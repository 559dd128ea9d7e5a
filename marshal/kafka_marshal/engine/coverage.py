"""Keeps every key claimed, whatever a policy advises (PROTOCOL 9.6).

At worst a policy costs balance and time. Keys that stay claimable are claimed by a rule
that needs no policy. A policy from another package cannot release a key that no other
member can take, or release the same key again and again.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
import msgspec

from kafka_marshal.protocol.planner import (
    KeyView,
    MemberView,
    Plan,
    Release,
    View,
    fair,
    greedy,
    topic,
)
from kafka_marshal.protocol.types import Key

WHY_ONE = "claimable for more than one heartbeat interval"
WHY_TWO = "claimable for more than two heartbeat intervals"


class CoverageRule:
    """The rule of one subscription.

    Keys that were claimable for one interval are claimed as under ``fair``; after two
    intervals any member with room claims them. With whole topics this only concerns
    partition 0, because its owner claims the other partitions.
    """

    __slots__ = ("_counts_topics", "_released_ms")

    def __init__(self, *, counts_topics: bool) -> None:
        self._counts_topics = counts_topics
        # Local time of the last release of each key that a policy asked for.
        self._released_ms: dict[Key, int] = {}

    def claims(
        self, view: View, plan: Plan, *, abandoned: Collection[Key]
    ) -> dict[Key, str]:
        """Return the keys to claim beside those of the plan, each with the reason.

        Args:
            view: The view of the policy; ``is_orphan`` marks one interval.
            plan: The plan of the policy.
            abandoned: Keys that were claimable for two intervals.
        """
        if not view.can_take:
            return {}
        named = frozenset(plan.claim)
        if not any(key.is_orphan and key.key not in named for key in view.keys):
            return {}
        keys = tuple(_only_orphans(key) for key in view.keys)
        rest = attrs.evolve(view, keys=keys)
        as_fair = (topic if self._counts_topics else fair)(rest).claim
        found = dict.fromkeys(as_fair, WHY_ONE)
        if not self._counts_topics and abandoned:
            late = [key for key in keys if key.is_mine or key.key in abandoned]
            for key in greedy(attrs.evolve(view, keys=tuple(late))).claim:
                found.setdefault(key, WHY_TWO)
        return self._within(view, found, named)

    def _within(
        self, view: View, found: Mapping[Key, str], named: Collection[Key]
    ) -> dict[Key, str]:
        kept = set(self.within_limits(view, (*named, *found))).difference(named)
        return {key: why for key, why in found.items() if key in kept}

    def within_limits(self, view: View, claims: Iterable[Key]) -> tuple[Key, ...]:
        """Return the claims that fit the member's limit, in order.

        With a limit, keys that cannot be claimed yet are left out: they would take
        the place of those that can.
        """
        if not view.claims_max:
            return tuple(claims)
        by_key = {key.key: key for key in view.keys}
        used = {self._unit(key.key) for key in view.keys if key.is_mine}
        kept = []
        for key in claims:
            row, unit = by_key[key], self._unit(key)
            if row.is_mine or not (row.is_claimable or row.is_held_by_earlier_process):
                continue
            if unit in used or len(used) < view.claims_max:
                used.add(unit)
                kept.append(key)
        return tuple(kept)

    def _unit(self, key: Key) -> object:
        return key.topic if self._counts_topics else key

    def releases(
        self, view: View, wanted: Sequence[Release], *, now_ms: int, interval_ms: int
    ) -> tuple[Release, ...]:
        """Return which releases of a foreign policy to follow, with successors.

        A key goes to another member that can take it; without such a member it is kept.
        The same key is released at most once in an interval.

        Args:
            view: The view of the policy.
            wanted: The releases that the policy asks for.
            now_ms: Local time.
            interval_ms: The heartbeat interval.
        """
        since_ms = now_ms - interval_ms
        self._released_ms = {k: t for k, t in self._released_ms.items() if t > since_ms}
        found = []
        for release in wanted:
            name = self._taker(view, release)
            if name is None or release.key in self._released_ms:
                continue
            self._released_ms[release.key] = now_ms
            # Parts of a whole topic go to the owner of its partition 0.
            is_part = self._counts_topics and release.successor is None
            found.append(release if is_part else attrs.evolve(release, successor=name))
        return tuple(found)

    @staticmethod
    def _taker(view: View, release: Release) -> str | None:
        name, topic_name = release.successor, release.key.topic
        for member in view.members:
            if member.client_id == name and is_able(member, topic_name, me=view.me):
                return name
        return best_taker(view.members, topic_name, me=view.me, may_be_behind=True)


def _only_orphans(key: KeyView) -> KeyView:
    """Return a key as the rule sees it: claimable only if it is an orphan."""
    is_open = key.is_orphan and key.is_claimable
    return msgspec.structs.replace(
        key, is_claimable=is_open, is_held_by_earlier_process=False
    )


def is_able(member: MemberView, topic_name: str, *, me: str) -> bool:
    """Return whether another member could take a partition of a topic."""
    return (
        member.client_id != me
        and topic_name in member.topics
        and member.can_take
        and (not member.claims_max or member.held < member.claims_max)
    )


def best_taker(
    members: Iterable[MemberView], topic: str, *, me: str, may_be_behind: bool
) -> str | None:
    """Return the live member with the most room for a partition, if any.

    Args:
        members: Live members of the group.
        topic: Topic of the partition.
        me: Own client_id; this member does not count.
        may_be_behind: Whether a member that lags may be returned if no other is able.
    """
    able = [
        member
        for member in members
        if is_able(member, topic, me=me) and (may_be_behind or not member.is_behind)
    ]
    best = min(
        able, key=lambda m: (m.is_behind, m.held // m.weight, m.client_id), default=None
    )
    return None if best is None else best.client_id
