"""What consumers subscribe to: topics, a policy, and the view the policy decides on."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from kafka_marshal.engine.context import Context
from kafka_marshal.engine.holding import Delivery, Holding, StartRule
from kafka_marshal.engine.releases import ReleaseCooldowns
from kafka_marshal.engine.topics import Look, Matches, TopicWatch
from kafka_marshal.errors import InvalidTransition
from kafka_marshal.ports import TopicInfo
from kafka_marshal.protocol.claiming import PreviousLife, estimate, resumable
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal.protocol.health import Backoff
from kafka_marshal.protocol.planner import (
    KeyView,
    MemberView,
    Plan,
    Policy,
    Release,
    View,
    fair,
    greedy,
)
from kafka_marshal.protocol.planner import topic as whole_topics
from kafka_marshal.protocol.state import KeyNote, KeyState, MemberState
from kafka_marshal.protocol.types import Key, Owner, TopicPartition

if TYPE_CHECKING:
    from kafka_marshal.engine.interfaces import ClaimContext

REASON_CHARS_MAX = 64
ERROR_CHARS_MAX = 300
# Those that see nothing but the view: what they said of one, they say of its like.
FORGETFUL: tuple[Policy, ...] = (fair, greedy, whole_topics)


class PolicyRunner:
    """One consumer's policy: its last plan that made sense stands until the next.

    Our own are not even asked again as long as the view stays as it is. Policies
    come from other packages too: one that raises, or returns what is no plan, is
    told and asked again; it ends neither engine nor consumer.
    """

    __slots__ = ("_claim", "_is_forgetful", "_last", "_policy", "_told", "_why")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # By identity: what others bring may have no hash, or any idea of equality.
        self._is_forgetful = any(policy is each for each in FORGETFUL)
        self._claim: tuple[Key, ...] = ()
        self._why: Mapping[Key, str] = {}
        self._told: str | None = None
        self._last: tuple[View, Plan] | None = None

    def plan(self, view: View, context: Context) -> Plan:
        """Return what to do now."""
        if self._last is not None and self._last[0] == view:
            return self._last[1]
        problem: str | None
        try:
            plan = self._policy(view)
            problem = _problem(plan, view)
        except Exception as error:  # noqa: BLE001 - whatever a foreign policy raises
            problem = repr(error)
        if problem is not None:
            self._tell(problem[:ERROR_CHARS_MAX], context)
            # What it gave up is given up; only what it wanted stands.
            wanted = {key.key for key in view.keys}
            kept = tuple(key for key in self._claim if key in wanted)
            return Plan(kept, why=self._why)
        self._told = None
        self._claim, self._why = plan.claim, plan.why
        if self._is_forgetful:
            self._last = view, plan
        return plan

    def _tell(self, problem: str, context: Context) -> None:
        if problem != self._told:
            self._told = problem
            name = getattr(self._policy, "__name__", type(self._policy).__name__)
            context.observe("policy_failed", {"policy": name, "error": problem})


def _problem(plan: object, view: View) -> str | None:
    """Return why a plan cannot be followed, None where it can."""
    if not isinstance(plan, Plan):
        return f"it returned {type(plan).__name__}, no Plan"
    # Types are promises, and others may not keep them.
    claim: Any = plan.claim
    release: Any = plan.release
    why: Any = plan.why
    if not (isinstance(claim, tuple) and isinstance(release, tuple)):
        return "claim and release must be tuples"
    if not isinstance(why, Mapping):
        return "why must be a mapping"
    mine = {key.key: key.is_mine for key in view.keys} if claim or release else {}
    for key in claim:
        if key not in mine:
            return f"it claims {key!r}, which is not in the view"
    for each in release:
        problem = _release_problem(each, mine)
        if problem is not None:
            return problem
    return None


def _release_problem(release: object, mine: Mapping[Key, bool]) -> str | None:
    if not isinstance(release, Release) or not mine.get(release.key):
        return f"it gives up {release!r}, which is not held"
    successor: Any = release.successor
    reason: Any = release.reason
    detail: Any = release.detail
    if successor is not None and not _is_name(successor):
        return f"{successor!r} cannot be a successor"
    if not _is_name(reason) or len(reason) > REASON_CHARS_MAX:
        return f"{reason!r} cannot be a reason"
    return None if isinstance(detail, str) else f"{detail!r} is no text"


def _is_name(value: object) -> bool:
    return isinstance(value, str) and is_identifier(value)


POLICY_MS_MAX = 500
POLICY_MS_MIN = 20
BEHIND_LABEL = "behind"
WEIGHT_LABEL = "weight"
WEIGHT_MAX = 1_000  # what others say of themselves is bounded


@attrs.define(eq=False)
class Subscription:
    """One consumer's wanted, and what was seen of how it does.

    Attributes:
        group_id: Group of the session.
        topics: What is known of each topic, in the order given.
        policy: Decides what to try and what to give up.
        delivery: Guarantee of every holding.
        start_rule: How start positions are found.
        claims_max: Most keys to hold, 0 = no limit; topics, where the policy
            counts these.
        refresh_ms: Time between two looks at the topics' metadata.
        matches: Which topics join by themselves; None where they were named.
        max_handling_ms: How long the application may be away with work waiting
            before its partitions are given up; None = H, 0 = without limit.
        releases_behind: Whether to give up what the application is too slow for.
        paused: Partitions that the application holds back; the consumer's thread
            changes it.
        back_at_ms: Local time at which the application last asked for records,
            which says that it is done with what it was handed; 0 = never yet.
        moved_at_ms: Local time at which something was last seen to be handed out
            or committed.
        wedged_at_ms: Local time at which something was given up because the
            application did not come back; None once it has.
        backoff: Until when nothing is taken from others, after giving up.
        lost: Partitions that were taken from us while the rest of the topic is
            held.
        members: Live members of the group as of the last view.
        weight: As how many members we count in this subscription's topics.
        version: Grows whenever a holding of this subscription came or went.
        claimable_at_ms: Local time at which the next key may become claimable,
            as of the last view; H later where none is about to.
    """

    group_id: str
    topics: dict[str, TopicInfo]
    policy: Policy
    delivery: Delivery
    start_rule: StartRule
    claims_max: int = 0
    refresh_ms: int = 30_000
    matches: Matches | None = None
    max_handling_ms: int | None = None
    releases_behind: bool = True
    paused: set[TopicPartition] = attrs.field(factory=set)
    back_at_ms: int = 0
    moved_at_ms: int = 0
    wedged_at_ms: int | None = None
    backoff: Backoff = attrs.field(factory=Backoff)
    lost: set[Key] = attrs.field(factory=set)
    members: tuple[MemberView, ...] = ()
    weight: int = 1
    version: int = 0
    claimable_at_ms: int = 0
    _policy_runner: PolicyRunner = attrs.field(init=False)
    _watch: TopicWatch = attrs.field(init=False)
    _keys: list[Key] | None = None
    _shunned: set[Key] = attrs.field(factory=set)
    _claimable_since: dict[Key, int] = attrs.field(factory=dict)
    _live: list[MemberState] = attrs.field(factory=list)
    _live_views: list[MemberView] = attrs.field(factory=list)
    _seen_ms: dict[str, int] = attrs.field(factory=dict)
    _suspected: dict[str, int | None] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._policy_runner = PolicyRunner(self.policy)
        self._watch = TopicWatch(
            self.topics, refresh_ms=self.refresh_ms, matches=self.matches
        )

    @property
    def has_doubts(self) -> bool:
        """Whether a topic is yet to be looked up after it was doubted."""
        return bool(self._watch.doubted)

    @property
    def counts_topics(self) -> bool:
        """Whether the policy deals in whole topics, and limits count these."""
        own = self.policy is whole_topics
        return own or bool(getattr(self.policy, "counts_topics", False))

    @property
    def alive_at_ms(self) -> int:
        """Local time of the application's last sign of life."""
        return max(self.back_at_ms, self.moved_at_ms)

    def handling_limit_ms(self, heartbeat_interval_ms: int) -> int:
        """Return how long the application may be away, 0 = without limit."""
        limit_ms = self.max_handling_ms
        return heartbeat_interval_ms if limit_ms is None else limit_ms

    def load(self, holdings: Iterable[Holding]) -> int:
        """Return how much of its limit is used."""
        owned = [
            holding.key
            for holding in holdings
            if holding.claim.is_owned and holding.key.topic in self.topics
        ]
        return len({k.topic for k in owned}) if self.counts_topics else len(owned)

    # --- topics

    def all_keys(self) -> list[Key]:
        """Return every wanted key of topics that are not in doubt, in order."""
        if self._keys is None:
            doubted = self._watch.doubted
            self._keys = [k for k in self.wanted_keys() if k.topic not in doubted]
        return self._keys

    def wanted_keys(self) -> list[Key]:
        """Return every wanted key, also of topics that are being looked up again."""
        return [
            key
            for topic, info in self.topics.items()
            for number in range(info.partition_count)
            if (key := Key(self.group_id, topic, number)) not in self._shunned
        ]

    def look_again(
        self, context: "ClaimContext", now_ms: int, *, taken: set[str]
    ) -> Look:
        """Look the topics up where that is due; see ``TopicWatch.look_again``."""
        look = self._watch.look_again(context, now_ms, taken=taken)
        if look.has_changed:
            self._keys = None
        return look

    def doubt(self, topic: str) -> None:
        """Look a topic up at once, and claim nothing of it before the answer."""
        if self._watch.doubt(topic):
            self._keys = None

    def seen_ms(self, topic: str) -> int:
        """Return when the last look began that found a topic as it is known."""
        return self._watch.seen_ms(topic)

    def is_doubted(self, topic: str) -> bool:
        """Return whether a topic is yet to be looked up after it was doubted."""
        return topic in self._watch.doubted

    def is_gone(self, topic: str) -> bool:
        """Return whether the topic does not exist as of the last look."""
        return self._watch.is_gone(topic)

    def is_over(self, holding: Holding) -> bool:
        """Return whether the topic that a claim is of is known to exist no more."""
        info = self.topics.get(holding.key.topic)
        if info is None or self.is_gone(holding.key.topic):
            return True
        ids = {info.topic_id, holding.topic_id}
        return None not in ids and len(ids) > 1

    def drop_topic(self, topic: str) -> None:
        """Want a topic no more: it is gone, or consumed otherwise.

        One that was named is wanted again once it exists.
        """
        self._watch.drop(topic)
        self._keys = None
        self.version += 1

    def shun(self, key: Key) -> None:
        """Want a key no more: it cannot be consumed from its position."""
        self._shunned.add(key)
        self._keys = None

    def want_all(self) -> None:
        """Want again what was shunned: somebody may know where to begin by now."""
        self._shunned.clear()
        self._keys = None

    # --- the view

    def plan(self, view: View, context: Context) -> Plan:
        """Return what to do; nothing new while the application does not come back."""
        if self.wedged_at_ms is not None:
            return Plan()
        return self._policy_runner.plan(view, context)

    def view(
        self,
        context: Context,
        owner: Owner,
        *,
        holdings: Mapping[Key, Holding],
        lives: tuple[PreviousLife, ...],
        cooldowns: ReleaseCooldowns,
        now_ms: int,
    ) -> View:
        """Return what the policy may look at now."""
        keys = []
        suspects = set()
        members = self._members(context, now_ms=now_ms)
        is_alone = not any(member.client_id != owner.client_id for member in members)
        is_off = self.backoff.is_on(now_ms) and not is_alone
        interval_ms = context.heartbeat_interval_ms
        self.claimable_at_ms = now_ms + interval_ms
        for key in self.all_keys():
            replica = context.replica_of(key)
            world = replica.world
            elapsed_ms = replica.elapsed_ms(now_ms)
            guess = estimate(world, key, elapsed_ms=elapsed_ms, claimant=owner)
            known, wait_ms = guess.known, guess.wait_ms
            who = None if known is None or known.owner is None else known.owner
            is_claimable = wait_ms == 0
            if who is not None and is_claimable:
                suspects.add(who.client_id)
                who = None
            if wait_ms:
                self.claimable_at_ms = min(self.claimable_at_ms, now_ms + wait_ms)
            is_orphan = is_left = False
            if is_claimable:
                since_ms = self._claimable_since.setdefault(key, now_ms)
                is_orphan = now_ms - since_ms > interval_ms
                # What was given up is left to others; what nobody takes is not.
                is_cooling = cooldowns.is_cooling(key, now_ms)
                is_left = is_cooling or (is_off and not is_orphan)
            else:
                self._claimable_since.pop(key, None)
            holding = holdings.get(key)
            keys.append(
                KeyView(
                    key,
                    None if who is None else who.client_id,
                    is_mine=_is_mine(holding),
                    is_claimable=is_claimable and not is_left,
                    is_ours_before=bool(lives)
                    and _is_ours_before(
                        known, lives, owner, log_ms=world.now_ms + elapsed_ms
                    ),
                    is_orphan=is_orphan,
                    is_leaving=holding is not None and holding.drain is not None,
                    is_lost=key in self.lost,
                    last_owner=_last_owner(
                        known, world.soft.notes.get(key), is_owned=who is not None
                    ),
                )
            )
        suspects |= self._still_suspect(suspects)
        suspects.discard(owner.client_id)
        self.members = tuple(m for m in members if m.client_id not in suspects)
        return View(
            owner.client_id,
            tuple(keys),
            self.members,
            self.claims_max,
            min(self.weight, WEIGHT_MAX),
        )

    def _still_suspect(self, suspects: set[str]) -> set[str]:
        """Return who was found stale and has not announced itself since.

        A dead member's keys go stale one coordinating partition after the other;
        with the first of them taken over it would count as alive again, and what
        was taken would be given up for it.
        """
        for client_id in suspects:
            self._suspected[client_id] = self._seen_ms.get(client_id)
        self._suspected = {
            client_id: seen_ms
            for client_id, seen_ms in self._suspected.items()
            if client_id in self._seen_ms and self._seen_ms[client_id] == seen_ms
        }
        return set(self._suspected)

    def _members(self, context: Context, *, now_ms: int) -> list[MemberView]:
        """Return live members, in order of client_id."""
        replica = context.replicas[context.home_of(self.group_id)]
        elapsed_ms = replica.elapsed_ms(now_ms)
        limit_ms = 2 * context.heartbeat_interval_ms
        log_ms = replica.world.now_ms + elapsed_ms
        found = replica.world.live_members(self.group_id)
        live = [member for member in found if log_ms - member.seen_ms <= limit_ms]
        if live != self._live:
            self._live = live
            # Of several lives of one client the last counts, and not a leave before.
            last = {
                member.record.client_id: member
                for member in sorted(live, key=lambda member: member.since_offset)
            }
            self._seen_ms = {name: member.seen_ms for name, member in last.items()}
            self._live_views = [_member_view(last[name]) for name in sorted(last)]
        return self._live_views

    # --- losses

    def note_loss(self, key: Key) -> None:
        """Note that a partition was lost, or given up against the policy's will."""
        if self.counts_topics:
            self.lost.add(key)

    def settle_losses(self, holdings: Mapping[Key, Holding]) -> None:
        """Forget losses of topics that nothing is held of any more."""
        if self.lost:
            held = {h.key.topic for h in holdings.values() if h.claim.is_owned}
            self.lost = {key for key in self.lost if key.topic in held}


def policy_interval_ms(context: Context) -> int:
    """Return how often policies are asked though nothing seems to have changed."""
    tenth_ms = context.heartbeat_interval_ms // 10
    return max(POLICY_MS_MIN, min(tenth_ms, POLICY_MS_MAX))


def weight_of(labels: Mapping[str, str]) -> int:
    """Return as how many members somebody counts, by its own account. Total."""
    text = labels.get(WEIGHT_LABEL)
    if text is None:
        return 1
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(WEIGHT_MAX))
    return min(max(1, int(text)), WEIGHT_MAX) if is_number else 1


def _member_view(member: MemberState) -> MemberView:
    record = member.record
    return MemberView(
        record.client_id,
        frozenset(record.topics),
        is_draining=record.draining,
        claims_max=record.capacity,
        held=record.load,
        is_behind=BEHIND_LABEL in record.labels,
        weight=weight_of(record.labels),
    )


def _is_mine(holding: Holding | None) -> bool:
    if holding is None:
        return False
    return holding.claim.is_owned or holding.claim.is_under_way


def _is_ours_before(
    known: KeyState | None,
    lives: tuple[PreviousLife, ...],
    owner: Owner,
    *,
    log_ms: int,
) -> bool:
    life = resumable(known, lives, client_id=owner.client_id, log_time_ms=log_ms)
    return life is not None


def _last_owner(
    known: KeyState | None, note: KeyNote | None, *, is_owned: bool
) -> str | None:
    """Return who had a key before its owner, or last where nobody has it now."""
    if is_owned:
        return None if note is None else note.before
    if known is not None and known.owner is not None:
        return known.owner.client_id  # gone stale
    return None if note is None else note.client_id


KEYS_PER_MS = 20
LOOKS_PER_REST = 2


@attrs.define
class SubscriptionSet:
    """Everything that one client_id pursues in this process.

    Attributes:
        subs: What its consumers want.
        explicit: Keys that were asked for without a policy.
    """

    subs: list[Subscription] = attrs.field(factory=list)
    explicit: dict[Key, None] = attrs.field(factory=dict)

    @property
    def soon_ms(self) -> int:
        """Time until policies are asked again after something has moved."""
        return max(POLICY_MS_MIN, self._look_ms)

    def rest_ms(self, context: Context) -> int:
        """Return the time until they are asked though nothing seems to have moved."""
        return max(policy_interval_ms(context), LOOKS_PER_REST * self._look_ms)

    @property
    def _look_ms(self) -> int:
        """A time that grows as a look at all that is wanted does."""
        count = 0
        for sub in self.subs:
            for info in sub.topics.values():
                count += info.partition_count
        return count // KEYS_PER_MS

    def taken_beside(self, sub: Subscription) -> set[str]:
        """Return the topics that are consumed otherwise."""
        taken = {key.topic for key in self.explicit}
        return taken.union(*(s.topics for s in self.subs if s is not sub))

    def add(self, sub: Subscription, *, client_id: str) -> None:
        """Add a consumer's wanted; what else takes is left out of a pattern's.

        Raises:
            InvalidTransition: A topic is consumed already.
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
        """Return the consumer that wants a key."""
        for sub in self.subs:
            if key.topic in sub.topics:
                return sub
        return None

    def topic_id(self, key: Key) -> bytes | None:
        """Return Kafka's id of a key's topic, as last looked up."""
        sub = self.sub_of(key)
        return None if sub is None else sub.topics[key.topic].topic_id

    def seen_ms(self, key: Key) -> int:
        """Return when the last look began that found a key's topic as it is known."""
        sub = self.sub_of(key)
        return 0 if sub is None else sub.seen_ms(key.topic)

    def bump(self, key: Key) -> None:
        """Let the consumer of a key look at what it holds."""
        sub = self.sub_of(key)
        if sub is not None:
            sub.version += 1

    def bump_all(self) -> None:
        """Let every consumer look at what it holds."""
        for sub in self.subs:
            sub.version += 1

    def doubt(self, topics: Iterable[str]) -> None:
        """Have topics looked up at once, by whichever consumer wants them."""
        for sub in self.subs:
            for topic in topics:
                sub.doubt(topic)

    def hold_back(self, key: Key, *, until_ms: int) -> None:
        """Take nothing from others for the consumer of a key, until then."""
        sub = self.sub_of(key)
        if sub is not None:
            sub.backoff.hold(until_ms)

    def note_loss(self, key: Key) -> None:
        """Note that a key was lost, or given up against its policy's will."""
        sub = self.sub_of(key)
        if sub is not None:
            sub.note_loss(key)
