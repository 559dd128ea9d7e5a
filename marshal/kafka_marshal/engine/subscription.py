"""Subscriptions of consumers: topics, policy, and the view the policy decides on."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from kafka_marshal.config import ConsumerConfig, Matches, OnWarm
from kafka_marshal.engine.context import Context
from kafka_marshal.engine.coverage import CoverageRule
from kafka_marshal.engine.directives import directed
from kafka_marshal.engine.holding import Holding, OfferedKey, StartRule
from kafka_marshal.engine.interfaces import PARTITIONS_NAMED_MAX, ClaimContext
from kafka_marshal.engine.key_rows import KeyRows, RowInputs
from kafka_marshal.engine.planning import Debounce, PlanFollower
from kafka_marshal.engine.policy_runner import PolicyRunner
from kafka_marshal.engine.releases import ReleaseCooldowns
from kafka_marshal.engine.replica import Changes
from kafka_marshal.engine.topics import TopicChanges, TopicWatch
from kafka_marshal.engine.warm_fetches import WarmFetcher
from kafka_marshal.errors import InvalidTransition
from kafka_marshal.ports import FAR_MS, Background, Pending, TopicInfo
from kafka_marshal.protocol.claiming import PreviousLife
from kafka_marshal.protocol.growths import Source
from kafka_marshal.protocol.health import Backoff
from kafka_marshal.protocol.labels import (
    LAGGING_LABEL,
    PLANS_LABEL,
    WEIGHT_MAX,
    weight_of,
)
from kafka_marshal.protocol.planner import (
    SURPLUS,
    KeyView,
    MemberView,
    Plan,
    Policy,
    Release,
    View,
    fair,
    why_uncovered,
)
from kafka_marshal.protocol.planner import planned as follow_plan
from kafka_marshal.protocol.planner import topic as whole_topics
from kafka_marshal.protocol.state import MemberState, WorldState
from kafka_marshal.protocol.types import (
    Key,
    Owner,
    TopicPartition,
    may_be_same_topic,
)

POLICY_MS_MAX = 500
POLICY_MS_MIN = 20


def _without_surplus(releases: Iterable[Release]) -> tuple[Release, ...]:
    return tuple(each for each in releases if each.reason != SURPLUS)


class StandingBy(Protocol):
    """An application that stands by, in this process or in another one.

    Called under the engine's lock.
    """

    def begin(self, key: Key, *, owner: str, position: int | None) -> Pending[None]:
        """Make it load the state of a key; return the outcome."""
        ...

    def end(self, key: Key, *, is_owner: bool) -> None:
        """Make it forget a key, unless this member owns the key now."""
        ...

    def close(self) -> None:
        """Make no more calls. Idempotent."""
        ...


@attrs.define(eq=False, kw_only=True)
class Subscription:
    """One consumer's subscription and its progress.

    Attributes:
        group_id: Group of the session.
        topics: Metadata of each topic, in the order given.
        policy: Decides which keys to claim and which to release.
        config: The settings of the consumer.
        matches: The pattern that selects topics; None if topics were named.
        start_rule: How start positions are found.
        claims_max: Most keys to hold, 0 = no limit; most topics, if the policy
            counts topics. A sidecar sets the sum of its clients' limits.
        paused: Partitions that the application has paused; the consumer's thread
            changes it.
        back_at_ms: Local time of the application's last poll, which shows that it
            has finished the records of earlier polls; 0 = never yet.
        moved_at_ms: Local time at which a hand-out or commit was last seen.
        stuck_since_ms: Local time of a release because the application did not poll;
            None after its next poll.
        backoff: Keeps this member from claiming keys of others after such a release.
        lost: Lost partitions of topics that are still held in part.
        members: Live members of the group as of the last view.
        weight: Share of this subscription's topics, relative to other members.
        on_warm: Called with a partition, its position and its owner, before the owner
            releases it to this member; None if the application does not warm up.
        warming: Runs the calls of ``on_warm``.
        warm_fetcher: Fetches records of the partitions meanwhile; None fetches nothing.
        expects_claim: Whether it has warmed up for a partition to be claimed soon.
        warm_by: Makes another process, a client of the sidecar, warm up instead; None
            if no client does.
        standby: The application that stands by for keys of other members, or None.
        standby_count: Announced number of standbys of a key (PROTOCOL 9.9).
        is_closing: Whether calls of ``on_warm`` and ``on_standby`` are dropped.
        version: Grows whenever a holding of this subscription is added or removed.
        claimable_at_ms: Local time at which the next key may become claimable, as
            of the last view; at most one heartbeat interval after it.
        is_planned: Whether the group follows Plans, whatever its own policy is.
        uncovered: Keys that have been claimable for more than one heartbeat interval
            and that no live member can claim, with the reason, as of the last view.
    """

    group_id: str
    topics: dict[str, TopicInfo]
    policy: Policy
    config: ConsumerConfig
    matches: Matches | None = None
    start_rule: StartRule = attrs.field(init=False)
    claims_max: int = attrs.field(init=False)
    standby_count: int = attrs.field(init=False)
    paused: set[TopicPartition] = attrs.field(factory=set)
    back_at_ms: int = 0
    moved_at_ms: int = 0
    stuck_since_ms: int | None = None
    backoff: Backoff = attrs.field(factory=Backoff)
    lost: set[Key] = attrs.field(factory=set)
    members: tuple[MemberView, ...] = ()
    weight: int = 1
    on_warm: OnWarm | None = None
    warming: Background | None = None
    warm_fetcher: WarmFetcher | None = None
    expects_claim: bool = False
    warm_by: Callable[[OfferedKey], Pending[None]] | None = None
    standby: StandingBy | None = None
    is_closing: bool = False
    version: int = 0
    claimable_at_ms: int = 0
    is_planned: bool = False
    uncovered: dict[Key, str] = attrs.field(factory=dict)
    _waiting: frozenset[Key] = frozenset()
    # The uncovered keys as last reported, and the local time of that report.
    _reported: tuple[dict[Key, str], int] = attrs.field(factory=lambda: ({}, 0))
    # Local time at which keys were last uncovered.
    _uncovered_ms: int = 0
    _policy_runner: PolicyRunner = attrs.field(init=False)
    _watch: TopicWatch = attrs.field(init=False)
    _keys: list[Key] | None = None
    _excluded: set[Key] = attrs.field(factory=set)
    _rule: CoverageRule = attrs.field(init=False)
    _debounce: Debounce = attrs.field(factory=Debounce)
    _rows: KeyRows = attrs.field(factory=KeyRows)
    _live: list[MemberState] = attrs.field(factory=list)
    _live_views: list[MemberView] = attrs.field(factory=list)
    _seen_ms: dict[str, int] = attrs.field(factory=dict)
    _suspected: dict[str, int | None] = attrs.field(factory=dict)
    _plans: PlanFollower = attrs.field(factory=PlanFollower)

    def __attrs_post_init__(self) -> None:
        config = self.config
        self.start_rule = StartRule(
            offset_reset=config.auto_offset_reset,
            offsets=config.starts,
            isolation_level=config.isolation_level,
        )
        self.claims_max = config.claims_max
        self.standby_count = config.standbys
        self._policy_runner = PolicyRunner(self.policy)
        self._rule = CoverageRule(counts_topics=self.counts_topics)
        self._watch = TopicWatch(
            self.topics, refresh_ms=config.metadata_refresh_ms, matches=self.matches
        )

    @property
    def can_warm(self) -> bool:
        """Whether the application warms up, in this process or in another one."""
        return self.warm_by is not None or self.on_warm is not None

    def warm_up(self, offered: OfferedKey) -> Pending[None] | None:
        """Have the application warm up; return the outcome, None if it does not."""
        if self.warm_by is not None:
            return self.warm_by(offered)
        on_warm, place = self.on_warm, offered.key.topic_partition
        if on_warm is None or self.warming is None:
            return None
        return self.warming.submit(
            lambda: on_warm(place, offered.position, offered.owner)
        )

    @property
    def has_doubts(self) -> bool:
        """Whether the look-up of a doubted topic is pending."""
        return bool(self._watch.doubted)

    @property
    def named(self) -> Collection[Key]:
        """Free keys that this member is the named successor of, as of the last view."""
        return self._rows.named

    @property
    def named_by_plan(self) -> Collection[Key]:
        """Claimable keys that the Plan assigns to this member, as of the last view."""
        return self._rows.named_by_plan

    @property
    def counts_topics(self) -> bool:
        """Whether the policy assigns whole topics, and limits count topics."""
        if self.is_planned:
            return False
        own = self.policy is whole_topics
        return own or bool(getattr(self.policy, "counts_topics", False))

    @property
    def alive_at_ms(self) -> int:
        """Local time of the application's last sign of life."""
        return max(self.back_at_ms, self.moved_at_ms)

    def handling_limit_ms(self, heartbeat_interval_ms: int) -> int:
        """Return how long the application may go without a poll, 0 = without limit."""
        limit_ms = self.config.max_handling_ms
        return heartbeat_interval_ms if limit_ms is None else limit_ms

    def load(self, holdings: Iterable[Holding]) -> int:
        """Return the number of held keys, or topics, that count for the limit."""
        owned = [
            holding.key
            for holding in holdings
            if holding.claim.is_owned and holding.key.topic in self.topics
        ]
        return len({k.topic for k in owned}) if self.counts_topics else len(owned)

    def has_room_for(self, key: Key, holdings: Mapping[Key, Holding]) -> bool:
        """Return whether the limit allows a key beside those held or contended for."""
        if not self.claims_max:
            return True
        mine = [each for each in holdings if each.topic in self.topics]
        if self.counts_topics:
            return len({each.topic for each in (*mine, key)}) <= self.claims_max
        return len(mine) < self.claims_max

    def may_succeed(
        self, key: Key, holdings: Mapping[Key, Holding], *, now_ms: int
    ) -> bool:
        """Return whether to claim a key that this member is the named successor of."""
        info = self.topics.get(key.topic)
        return (
            info is not None
            and key.partition < info.partition_count
            and key not in self._excluded
            and not self.is_doubted(key.topic)
            and self.stuck_since_ms is None
            and not self.backoff.is_on(now_ms)
            and self.has_room_for(key, holdings)
        )

    # --- topics

    def all_keys(self) -> list[Key]:
        """Return every wanted key of topics without doubt, in order."""
        if self._keys is None:
            doubted = self._watch.doubted
            self._keys = [k for k in self.wanted_keys() if k.topic not in doubted]
        return self._keys

    def wanted_keys(self) -> list[Key]:
        """Return every wanted key, including those of doubted topics."""
        return [
            key
            for topic, info in self.topics.items()
            for number in range(info.partition_count)
            if (key := Key(self.group_id, topic, number)) not in self._excluded
        ]

    def refresh(
        self, context: ClaimContext, now_ms: int, *, taken: set[str]
    ) -> TopicChanges:
        """Refresh the topics' metadata when due; see ``TopicWatch.refresh``."""
        changes = self._watch.refresh(context, now_ms, taken=taken)
        if changes.has_changed:
            self._keys = None
        return changes

    def doubt(self, topic: str) -> None:
        """Look a topic up at once, and claim none of its keys before the response."""
        if self._watch.doubt(topic):
            self._keys = None

    def seen_ms(self, topic: str) -> int:
        """Return the start of the last look-up that confirmed a topic's metadata."""
        return self._watch.seen_ms(topic)

    def is_doubted(self, topic: str) -> bool:
        """Return whether the look-up of a doubted topic is pending."""
        return topic in self._watch.doubted

    def is_gone(self, topic: str) -> bool:
        """Return whether the topic was missing in the last look-ups."""
        return self._watch.is_gone(topic)

    def is_over(self, holding: Holding) -> bool:
        """Return whether the topic of a claim was deleted, or created again."""
        info = self.topics.get(holding.key.topic)
        if info is None or self.is_gone(holding.key.topic):
            return True
        return not may_be_same_topic(info.topic_id, holding.topic_id)

    def drop_topic(self, topic: str) -> None:
        """Drop a topic that was deleted, or that another consumer reads.

        A topic that was named is wanted again once it exists.
        """
        self._watch.drop(topic)
        self._keys = None
        self.version += 1

    def exclude(self, key: Key) -> None:
        """Exclude a key: it cannot be consumed from its position."""
        self._excluded.add(key)
        self._keys = None

    @property
    def failing(self) -> list[TopicPartition]:
        """The partitions that are excluded, in order."""
        return sorted(key.topic_partition for key in self._excluded)

    def want_all(self) -> None:
        """Include excluded keys again: their positions may be valid now."""
        if self._excluded:
            self._excluded.clear()
            self._keys = None

    # --- the view

    def plan(self, view: View, context: Context, *, now_ms: int) -> Plan:
        """Return what to claim and release: the policy's plan, and claims of orphans.

        Returns an empty plan while the application does not poll.
        """
        if self.stuck_since_ms is not None:
            return Plan()
        rule = self._rule
        is_pure = self.is_planned or self._policy_runner.is_pure
        has_planner = any(PLANS_LABEL in dict(m.labels) for m in self.members)
        if self.is_planned and (has_planner or not view.is_drained):
            plan = follow_plan(view)
            claim = rule.within_limits(view, plan.claim)
            plan = attrs.evolve(plan, claim=claim)
        elif view.is_drained:
            # PROTOCOL 9.7: under any policy.
            plan = (whole_topics if self.counts_topics else fair)(view)
        else:
            plan = self._policy_runner.plan(view, context)
        if not (view.is_drained or is_pure):
            plan = attrs.evolve(
                plan,
                claim=rule.within_limits(view, plan.claim),
                release=rule.releases(
                    view,
                    plan.release,
                    now_ms=now_ms,
                    interval_ms=context.heartbeat_interval_ms,
                ),
            )
        if view.is_cordoned:
            before = {key.key for key in view.keys if key.is_held_by_earlier_process}
            claim = tuple(key for key in plan.claim if key in before)
            plan = attrs.evolve(plan, claim=claim)
        if self._debounce.is_on(now_ms):
            plan = attrs.evolve(plan, release=_without_surplus(plan.release))
        if not self._rows.has_orphans:
            return plan
        more = rule.claims(view, plan, abandoned=self._rows.abandoned)
        if not more:
            return plan
        return Plan((*plan.claim, *more), plan.release, {**plan.why, **more})

    def awaits_policy(self, now_ms: int) -> bool:
        """Return whether the policy was called and will probably return soon."""
        return self._policy_runner.is_awaited(now_ms)

    def view(
        self,
        context: Context,
        owner: Owner,
        *,
        holdings: Mapping[Key, Holding],
        changes: Changes,
        lives: tuple[PreviousLife, ...],
        cooldowns: ReleaseCooldowns,
        now_ms: int,
        replaces: str | None = None,
    ) -> View:
        """Return the policy's input.

        Args:
            context: State shared by all parts of one engine.
            owner: This process.
            holdings: Keys that its client holds or contends for.
            changes: Keys whose holdings have changed.
            lives: Earlier processes of this client.
            cooldowns: Keys that this client has released.
            now_ms: Local time.
            replaces: The client whose place this one takes, if any.
        """
        homes = context.homes_of(self.group_id)
        home = context.replicas[homes[0]].world
        directors = [context.replicas[t].world for t in homes]
        live = self._members(context)
        members = directed(live, directors, group_id=self.group_id)
        is_alone = not any(member.client_id != owner.client_id for member in members)
        self._follow_plans(home, context)
        rows, settings = self._rows, context.settings_of(self.group_id)
        rows.update(
            self.all_keys(),
            RowInputs(
                context=context,
                owner=owner,
                holdings=holdings,
                changes=changes,
                lives=lives,
                cooldowns=cooldowns,
                now_ms=now_ms,
                is_off=self.backoff.is_on(now_ms) and not is_alone,
                may_replace=(owner.client_id, replaces),
                grace_ms=settings.value("grace_ms"),
                plans=self._plans,
                lost=self.lost,
                topics=self.topics,
            ),
        )
        keys = rows.rows
        gone = rows.suspects | self._still_suspect(rows.suspects)
        gone.discard(owner.client_id)
        self.members = tuple(m for m in members if m.client_id not in gone)
        until_ms = self._debounce.update(
            self.members, now_ms, debounce_ms=settings.value("debounce_ms")
        )
        self.claimable_at_ms = min(rows.claimable_at_ms, until_ms or FAR_MS)
        self._note_uncovered(keys if rows.has_orphans else (), context)
        self._note_waiting(rows.waiting, context)
        me = self._member(owner.client_id, directors)
        return View(
            me=owner.client_id,
            keys=keys,
            members=self.members,
            claims_max=self.claims_max,
            weight=min(self.weight, WEIGHT_MAX),
            is_drained=me.is_drained,
            is_cordoned=me.is_cordoned,
        )

    def _member(self, client_id: str, directors: Sequence[WorldState]) -> MemberView:
        """Return a member as of the last view, even if it is not announced yet."""
        for member in self.members:
            if member.client_id == client_id:
                return member
        me = MemberView(client_id=client_id, topics=frozenset())
        (me,) = directed([me], directors, group_id=self.group_id)
        return me

    def _follow_plans(self, home: WorldState, context: Context) -> None:
        settings, count = context.settings_of(self.group_id), len(context.replicas)
        self._plans.read(home, self.group_id, settings=settings, coordinators=count)
        if self.is_planned != self._plans.is_in_force:
            self.is_planned = self._plans.is_in_force
            self._rule = CoverageRule(counts_topics=self.counts_topics)

    def _note_uncovered(self, keys: Iterable[KeyView], context: Context) -> None:
        """Find the keys that no member can claim; report when they change.

        While members are cut off from the brokers, each claim that a member tries
        covers a key for a moment. So while some keys are uncovered, changes are
        reported at most once in a heartbeat interval, and that all are covered only
        once they have been for an interval.

        Under a policy of whole topics, the owner of a topic claims its other
        partitions, whatever its limit.
        """
        orphans = [each.key for each in keys if each.is_orphan and not each.is_mine]
        reasons = {key.topic: "" for key in orphans}
        if self.counts_topics and orphans:
            for each in keys:
                if each.is_mine or each.owner is not None:
                    reasons.pop(each.key.topic, None)
        for topic in reasons:
            reasons[topic] = why_uncovered(topic, self.members) or ""
        found = {key: why for key in orphans if (why := reasons.get(key.topic))}
        self.uncovered = found
        (known, known_ms), now_ms = self._reported, context.now_ms
        if found:
            self._uncovered_ms = now_ms
        since_ms = known_ms if found else self._uncovered_ms
        is_late = now_ms - since_ms >= context.heartbeat_interval_ms
        if found == known or (known and not is_late):
            return
        self._reported = found, now_ms
        if not found:
            context.observe("partitions_covered", {"group": self.group_id})
            return
        first = [f"{key.topic}-{key.partition}" for key in found]
        fields = {
            "group": self.group_id,
            "count": len(found),
            "reasons": sorted(set(found.values())),
            "partitions": first[:PARTITIONS_NAMED_MAX],
        }
        context.observe("partitions_uncovered", fields)

    def _note_waiting(self, waiting: Mapping[Key, Source], context: Context) -> None:
        """Report which new partitions of grown topics wait, when that changes."""
        if waiting.keys() == self._waiting:
            return
        self._waiting = frozenset(waiting)
        first = list(waiting.items())[:PARTITIONS_NAMED_MAX]
        named = [(key.topic, key.partition, wait.key.partition) for key, wait in first]
        fields = {
            "group": self.group_id,
            "count": len(waiting),
            "partitions": [f"{topic}-{new} for {old}" for topic, new, old in named],
        }
        context.observe("partitions_waiting", fields)

    def _still_suspect(self, suspects: set[str]) -> set[str]:
        """Return the members found stale that have not announced themselves since.

        A dead member's keys go stale one coordinating partition after the other.
        Without this, the member would count as alive again after the takeover of the
        first, and this client would release the keys it has just taken over.
        """
        for client_id in suspects:
            self._suspected[client_id] = self._seen_ms.get(client_id)
        self._suspected = {
            client_id: seen_ms
            for client_id, seen_ms in self._suspected.items()
            if client_id in self._seen_ms and self._seen_ms[client_id] == seen_ms
        }
        return set(self._suspected)

    def _members(self, context: Context) -> list[MemberView]:
        """Return the live members, in order of client_id."""
        live = context.living(self.group_id)
        if live != self._live:
            self._live = live
            # If a client has several processes, only the last counts.
            last = {
                member.record.client_id: member
                for member in sorted(live, key=lambda member: member.since_offset)
            }
            self._seen_ms = {name: member.seen_ms for name, member in last.items()}
            self._live_views = [member_view(last[name]) for name in sorted(last)]
        return self._live_views

    # --- losses

    def note_loss(self, key: Key) -> None:
        """Record a loss, or a release that the policy did not ask for."""
        if self.counts_topics:
            self.lost.add(key)

    def settle_losses(self, holdings: Mapping[Key, Holding]) -> None:
        """Forget losses of topics of which no partition is held."""
        if self.lost:
            held = {h.key.topic for h in holdings.values() if h.claim.is_owned}
            self.lost = {key for key in self.lost if key.topic in held}


def policy_interval_ms(context: Context) -> int:
    """Return the interval at which policies run although nothing has changed."""
    tenth_ms = context.heartbeat_interval_ms // 10
    return max(POLICY_MS_MIN, min(tenth_ms, POLICY_MS_MAX))


def member_view(member: MemberState) -> MemberView:
    """Return a member as policies see it, without directives."""
    record = member.record
    return MemberView(
        client_id=record.client_id,
        topics=frozenset(record.topics),
        is_draining=record.draining,
        claims_max=record.capacity,
        held=record.load,
        is_behind=LAGGING_LABEL in record.labels,
        weight=weight_of(record.labels),
        host=record.host,
        labels=tuple(sorted(record.labels.items())),
    )


KEYS_PER_MS = 20
CHECKS_PER_REST = 2


@attrs.define
class SubscriptionSet:
    """All subscriptions of one client_id in this process.

    Attributes:
        subs: The subscriptions of its consumers.
        explicit: Keys that were requested without a policy.
    """

    subs: list[Subscription] = attrs.field(factory=list)
    explicit: dict[Key, None] = attrs.field(factory=dict)

    @property
    def soon_ms(self) -> int:
        """Time until policies run again after a change."""
        return max(POLICY_MS_MIN, self._check_ms)

    def rest_ms(self, context: Context) -> int:
        """Return the time until policies run again without a change."""
        return max(policy_interval_ms(context), CHECKS_PER_REST * self._check_ms)

    def next_check_ms(self, now_ms: int, *, since_ms: int) -> int:
        """Return when all wanted keys may be checked again.

        Checks take at most half of the time: with a thousand clients of a sidecar that
        subscribe to thousands of partitions, they would leave none for anything else.

        Args:
            now_ms: Local time; the end of the last check.
            since_ms: When that check began.
        """
        return now_ms + max(self._check_ms, now_ms - since_ms)

    @property
    def _check_ms(self) -> int:
        """Estimated time of a check of all wanted keys."""
        count = 0
        for sub in self.subs:
            for info in sub.topics.values():
                count += info.partition_count
        return count // KEYS_PER_MS

    def taken_beside(self, sub: Subscription) -> set[str]:
        """Return the topics that other consumers and explicit claims use."""
        taken = {key.topic for key in self.explicit}
        return taken.union(*(s.topics for s in self.subs if s is not sub))

    def add(self, sub: Subscription, *, client_id: str) -> None:
        """Add a subscription; a pattern leaves out topics that are already used.

        Raises:
            InvalidTransition: A named topic is consumed already.
        """
        taken = self.taken_beside(sub)
        for topic in list(sub.topics):
            if topic in taken and sub.matches is not None:
                sub.drop_topic(topic)
            elif topic in taken:
                raise InvalidTransition(
                    f"topic {topic!r} is already consumed by client {client_id!r} in "
                    "this process; close that consumer first or use another client_id"
                )
        self.subs.append(sub)

    def sub_of(self, key: Key) -> Subscription | None:
        """Return the subscription of a key."""
        for sub in self.subs:
            if key.topic in sub.topics:
                return sub
        return None

    def is_named_by_plan(self, key: Key) -> bool:
        """Return whether the Plan of the group names this client for a free key."""
        return any(key in sub.named_by_plan for sub in self.subs)

    def topic_id(self, key: Key) -> bytes | None:
        """Return the id of a key's topic as of the last look-up."""
        sub = self.sub_of(key)
        return None if sub is None else sub.topics[key.topic].topic_id

    def seen_ms(self, key: Key) -> int:
        """Return the start of the last look-up that confirmed a key's topic."""
        sub = self.sub_of(key)
        return 0 if sub is None else sub.seen_ms(key.topic)

    def bump(self, key: Key) -> None:
        """Make the consumer of a key check its holdings."""
        sub = self.sub_of(key)
        if sub is not None:
            sub.version += 1

    def bump_all(self) -> None:
        """Make every consumer check its holdings."""
        for sub in self.subs:
            sub.version += 1

    def doubt(self, topics: Iterable[str]) -> None:
        """Look topics up at once, in every subscription with them."""
        for sub in self.subs:
            for topic in topics:
                sub.doubt(topic)

    def hold_back(self, key: Key, *, until_ms: int) -> None:
        """Claim nothing from others for the consumer of a key until then."""
        sub = self.sub_of(key)
        if sub is not None:
            sub.backoff.hold(until_ms)

    def note_loss(self, key: Key) -> None:
        """Record a loss, or a release that the policy did not ask for."""
        sub = self.sub_of(key)
        if sub is not None:
            sub.note_loss(key)
