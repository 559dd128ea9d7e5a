"""Stands by for keys of other members, and takes them over first (PROTOCOL 9.9).

The application loads the state of such a key before its owner dies. No guarantee
depends on that: the claim decides, as always.
"""

from collections.abc import Collection, Iterator, Sequence

import attrs

from kafka_marshal.config import OnStandby
from kafka_marshal.engine.context import Context
from kafka_marshal.engine.coverage import CoverageRule
from kafka_marshal.engine.interfaces import ClaimContext
from kafka_marshal.engine.subscription import StandingBy, Subscription
from kafka_marshal.ports import Background, Pending
from kafka_marshal.protocol.labels import standbys_label
from kafka_marshal.protocol.planner import MemberView, Plan, View
from kafka_marshal.protocol.standbys import Candidate, standbys_of
from kafka_marshal.protocol.types import Key

# Most keys and digests in one round of policies; a digest takes about a microsecond.
KEYS_MAX = 1_000
DIGESTS_MAX = 4_000
# Applications load the state of this many keys at a time; other keys wait.
LOADING_MAX = 8
HOSTS_MAX = 10_000


class StandbyThread(StandingBy):
    """Calls ``on_standby`` of a consumer on a thread of its own.

    Args:
        on_standby: The callback.
        background: Makes the calls, one after the other.
    """

    def __init__(self, on_standby: OnStandby, background: Background) -> None:
        self._on_standby = on_standby
        self._background = background

    def begin(self, key: Key, *, owner: str, position: int | None) -> Pending[None]:
        """Call the application soon."""
        partition = key.topic_partition
        return self._background.submit(
            lambda: self._on_standby(partition, position, owner)
        )

    def end(self, key: Key, *, is_owner: bool) -> None:
        """Call the application soon, without an owner."""
        if not is_owner:
            partition = key.topic_partition
            self._background.submit(lambda: self._on_standby(partition, None, None))

    def close(self) -> None:
        """Make no more calls. Idempotent."""
        self._background.close(0)


@attrs.define(kw_only=True)
class _Duty:
    """A key that this process stands by for."""

    sub: Subscription
    application: StandingBy
    outcome: Pending[None]


class StandbyDuties:
    """Has the application stand by for keys; subclasses know for which.

    Every method is called under the engine's lock.
    """

    __slots__ = ("_context", "_duties", "_loading")

    def __init__(self, context: ClaimContext) -> None:
        self._context = context
        self._duties: dict[Key, _Duty] = {}
        # Keys for which the call of the application has not ended, as far as is known.
        self._loading: dict[Key, _Duty] = {}

    @property
    def keys(self) -> Collection[Key]:
        """The keys that the application stands by for."""
        return self._duties.keys()

    @property
    def _has_room(self) -> bool:
        return len(self._loading) < LOADING_MAX

    def _begin(
        self, key: Key, sub: Subscription, *, owner: str, position: int | None
    ) -> None:
        """Call the application of a subscription, if it stands by."""
        if sub.standby is None:
            return
        self._duties[key] = self._loading[key] = _Duty(
            sub=sub,
            application=sub.standby,
            outcome=sub.standby.begin(key, owner=owner, position=position),
        )
        fields = {"key": key, "from": owner, "position": position}
        self._context.observe("standby_begun", fields)

    def _report(self) -> None:
        """Report the calls that failed."""
        for key, duty in list(self._loading.items()):
            if duty.outcome.done():
                del self._loading[key]
                error = duty.outcome.exception()
                if error is not None and not duty.sub.is_closing:
                    fields = {"key": key, "error": error}
                    self._context.observe("standby_failed", fields)

    def _end(self, key: Key, *, is_owner: bool) -> None:
        """End standing by for a key; do nothing if that has not begun."""
        self._loading.pop(key, None)
        duty = self._duties.pop(key, None)
        if duty is not None:
            duty.application.end(key, is_owner=is_owner)
            self._context.observe("standby_ended", {"key": key, "is_owner": is_owner})


class Standbys(StandbyDuties):
    """The standbys of the keys of a group, as one member sees them."""

    __slots__ = ("_candidates", "_hosts", "_me", "_names", "_queue", "_seen")

    _context: Context

    def __init__(self, context: Context, *, me: str) -> None:
        """Begin without members.

        Args:
            context: State shared by all parts of one engine.
            me: client_id of this member.
        """
        super().__init__(context)
        self._me = me
        self._candidates: dict[str, tuple[Candidate, ...]] = {}
        # Hosts of members, also of members that are gone and still own keys.
        self._hosts: dict[str, str] = {}
        self._names: dict[Key, tuple[str, tuple[str, ...]]] = {}
        self._queue: Iterator[tuple[Key, Subscription]] = iter(())
        self._seen: object = None

    # --- who stands by

    def _update(self, subs: Sequence[Subscription]) -> None:
        """Read the live members, if they changed."""
        seen = [(sub.members, tuple(sub.topics)) for sub in subs]
        if seen == self._seen:
            return
        self._seen = seen
        hosts = {each.client_id: each.host for sub in subs for each in sub.members}
        if len(self._hosts) > HOSTS_MAX:
            self._hosts.clear()
        is_same = hosts.items() <= self._hosts.items()
        self._hosts |= hosts
        candidates: dict[str, tuple[Candidate, ...]] = {}
        for sub in subs:
            able = _able(sub.members)
            for topic in sub.topics if able else ():
                candidates[topic] = tuple(
                    each for topics, each in able if topic in topics
                )
        if candidates != self._candidates or not is_same:
            self._candidates = candidates
            self._names.clear()

    def _names_of(self, key: Key, owner: str) -> tuple[str, ...]:
        """Return who stands by for a key of this owner, in order."""
        candidates = self._candidates.get(key.topic)
        if not candidates:
            return ()
        known = self._names.get(key)
        if known is not None and known[0] == owner:
            return known[1]
        host = self._hosts.get(owner, "")
        names = standbys_of(key, owner=owner, host=host, candidates=candidates)
        self._names[key] = owner, names
        return names

    def delay_ms(self, key: Key, owner: str, *, limit_ms: int) -> tuple[int, int]:
        """Return for how long to delay the takeover of a key whose owner is stale.

        Args:
            key: The key.
            owner: The owner.
            limit_ms: Longest jitter if nobody stands by.

        Returns:
            The least delay, and the longest jitter added to it. Both are 0 for the
            first standby; the least delay of others gives it time to claim the key.
        """
        names = self._names_of(key, owner)
        if not names:
            return 0, limit_ms
        if self._me not in names:
            return limit_ms, limit_ms
        return (0, 0) if names[0] == self._me else (limit_ms // 2, limit_ms // 2)

    def joined_to(self, plan: Plan, *, sub: Subscription, view: View) -> Plan:
        """Return a plan that also claims stale keys which this member stands by for.

        The member may exceed its share, within its limit: surplus keys go to others
        later, which warm up first.
        """
        self._update([sub])
        can_take = view.can_take and sub.stuck_since_ms is None
        if sub.standby is None or not can_take or sub.counts_topics:
            return plan
        found: dict[Key, str] = {}
        for each in view.keys:
            if each.is_mine or not each.is_claimable or each.planned is not None:
                continue
            known = self._context.replica_of(each.key).world.keys.get(each.key)
            if known is not None and known.owner is not None:
                owner = known.owner.client_id
                if self._me in self._names_of(each.key, owner):
                    found[each.key] = f"standby of {owner}"
        if not found:
            return plan
        named = dict.fromkeys((*found, *plan.claim))
        rule = CoverageRule(counts_topics=False)
        claim = rule.within_limits(view, named)
        return attrs.evolve(plan, claim=claim, why={**plan.why, **found})

    # --- what this member stands by for

    def drive(self, subs: Sequence[Subscription]) -> None:
        """Begin and end standing by as needed, for some keys in each call."""
        self._update(subs)
        active = [sub for sub in subs if sub.standby is not None]
        if not active and not self._duties:
            return
        self._report()
        for key, duty in list(self._duties.items()):
            if duty.sub not in active or key.topic not in duty.sub.topics:
                self._end(key, is_owner=False)
        digests = DIGESTS_MAX
        for _ in range(KEYS_MAX):
            if digests <= 0:
                return
            found = next(self._queue, None)
            if found is None:
                self._queue = _pairs(active)
                return
            digests -= self._check(*found)

    def _check(self, key: Key, sub: Subscription) -> int:
        """Begin or end standing by for a key; return how many digests that took."""
        replica = self._context.replica_of(key)
        known = replica.world.keys.get(key)
        is_unknown = replica.world.partition in self._context.rebuilding
        if is_unknown or known is None or known.owner is None or sub.standby is None:
            return 0  # no owner is known: the next claim decides
        owner = known.owner.client_id
        before = self._names.get(key)
        is_owner = owner == self._me
        is_standby = not is_owner and self._me in self._names_of(key, owner)
        digests = 0
        if before is not self._names.get(key):
            digests = len(self._candidates[key.topic])
        if not is_standby:
            self._end(key, is_owner=is_owner)
        elif key not in self._duties and self._has_room:
            self._begin(key, sub, owner=owner, position=known.next_unclaimed())
        return digests


def _able(
    members: Collection[MemberView],
) -> list[tuple[frozenset[str], Candidate]]:
    """Return the members that stand by, each with its topics."""
    found = []
    for each in members:
        count = standbys_label(dict(each.labels)) if each.can_take else 0
        if count:
            candidate = Candidate(each.client_id, each.host, count)
            found.append((each.topics, candidate))
    return found


def _pairs(subs: Sequence[Subscription]) -> Iterator[tuple[Key, Subscription]]:
    """Return the keys of subscriptions, as of now."""
    return iter([(key, sub) for sub in subs for key in sub.all_keys()])
