"""What one consumer wants: topics, a policy, and the view the policy decides on."""

from collections.abc import Mapping
from functools import partial

import attrs

from kafka_marshal.ports import Pending, TopicInfo
from kafka_marshal.protocol.claiming import PreviousLife, estimate, resumable
from kafka_marshal.protocol.planner import KeyView, MemberView, Policy, View
from kafka_marshal.protocol.types import Key, Owner, TopicPartition

from .context import Context
from .holding import Delivery, Holding, StartRule

LOOK_MS_MAX = 10_000
POLICY_MS_MAX = 500
POLICY_MS_MIN = 20


@attrs.define(eq=False)
class Subscription:
    """One consumer's wishes.

    Attributes:
        group_id: Group of the session.
        topics: What is known of each topic, in the order given.
        policy: Decides what to try and what to give up.
        delivery: Guarantee of every holding.
        start_rule: How start positions are found.
        claims_max: Most keys to hold, 0 = no limit.
        refresh_ms: Time between two looks at the topics' metadata.
        paused: Partitions that the application holds back; the consumer's thread
            changes it.
        back_at_ms: Local time at which the application last asked for records,
            which says that it is done with what it was handed; 0 = never yet.
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
    paused: set[TopicPartition] = attrs.field(factory=set)
    back_at_ms: int = 0
    version: int = 0
    refresh: Pending[Mapping[str, TopicInfo]] | None = None
    refresh_at_ms: int = 0
    claimable_at_ms: int = 0
    _shunned: set[Key] = attrs.field(factory=set)
    _claimable_since: dict[Key, int] = attrs.field(factory=dict)

    def all_keys(self) -> list[Key]:
        """Return every wanted key of the topics, in order."""
        return [
            key
            for topic, info in self.topics.items()
            for partition in range(info.partition_count)
            if (key := Key(self.group_id, topic, partition)) not in self._shunned
        ]

    def look_again(self, context: Context, now_ms: int) -> bool:
        """Look the topics up where that is due; return whether any has changed."""
        changed = False
        if self.refresh is not None and self.refresh.done():
            if self.refresh.exception(0) is None:
                changed = self._adopt(context, self.refresh.result(0))
            self.refresh = None
        if self.refresh is None and now_ms >= self.refresh_at_ms:
            is_first = self.refresh_at_ms == 0
            self.refresh_at_ms = now_ms + self.refresh_ms
            if not is_first:
                look = partial(context.ports.data.describe, [*self.topics], LOOK_MS_MAX)
                self.refresh = context.ports.background.submit(look)
        return changed

    def _adopt(self, context: Context, found: Mapping[str, TopicInfo]) -> bool:
        changed = False
        for topic, info in found.items():
            if info != self.topics[topic]:
                fields = {"topic": topic, "partition_count": info.partition_count}
                context.observe("topic_changed", fields)
                self.topics[topic] = info
                changed = True
        return changed

    def shun(self, key: Key) -> None:
        """Want a key no more: it cannot be consumed from its position."""
        self._shunned.add(key)

    def view(
        self,
        context: Context,
        owner: Owner,
        *,
        holdings: dict[Key, Holding],
        lives: tuple[PreviousLife, ...],
        now_ms: int,
    ) -> View:
        """Return what the policy may look at now."""
        keys = []
        suspects = set()
        self.claimable_at_ms = now_ms + context.heartbeat_interval_ms
        for key in self.all_keys():
            replica = context.replica_of(key)
            elapsed_ms = replica.elapsed_ms(now_ms)
            guess = estimate(replica.world, key, elapsed_ms=elapsed_ms, claimant=owner)
            known = guess.known
            holding = holdings.get(key)
            log_ms = replica.world.now_ms + elapsed_ms
            before = resumable(
                known, lives, client_id=owner.client_id, log_time_ms=log_ms
            )
            who = None if known is None or known.owner is None else known.owner
            if who is not None and guess.wait_ms == 0:
                suspects.add(who.client_id)
                who = None
            is_claimable = guess.wait_ms == 0
            if guess.wait_ms:
                soon_ms = now_ms + guess.wait_ms
                self.claimable_at_ms = min(self.claimable_at_ms, soon_ms)
            keys.append(
                KeyView(
                    key,
                    None if who is None else who.client_id,
                    is_mine=_is_mine(holding),
                    is_claimable=is_claimable,
                    is_ours_before=before is not None,
                    is_orphan=self._is_orphan(
                        context, key, is_claimable=is_claimable, now_ms=now_ms
                    ),
                )
            )
        members = self._members(context, suspects - {owner.client_id}, now_ms=now_ms)
        return View(owner.client_id, tuple(keys), members, self.claims_max)

    def _is_orphan(
        self, context: Context, key: Key, *, is_claimable: bool, now_ms: int
    ) -> bool:
        if not is_claimable:
            self._claimable_since.pop(key, None)
            return False
        since_ms = self._claimable_since.setdefault(key, now_ms)
        return now_ms - since_ms > context.heartbeat_interval_ms

    def _members(
        self, context: Context, suspects: set[str], *, now_ms: int
    ) -> tuple[MemberView, ...]:
        """Return live members; an owner that went stale counts as gone."""
        replica = context.replicas[context.home_of(self.group_id)]
        elapsed_ms = replica.elapsed_ms(now_ms)
        limit_ms = 2 * context.heartbeat_interval_ms
        log_ms = replica.world.now_ms + elapsed_ms
        views = {}
        for member in replica.world.live_members(self.group_id):
            record = member.record
            gone = log_ms - member.seen_ms > limit_ms or record.client_id in suspects
            if not gone:
                views[record.client_id] = MemberView(
                    record.client_id,
                    frozenset(record.topics),
                    is_draining=record.draining,
                    claims_max=record.capacity,
                    held=record.load,
                )
        return tuple(view for _, view in sorted(views.items()))


def policy_interval_ms(context: Context) -> int:
    """Return how often policies are asked though nothing seems to have changed."""
    tenth_ms = context.heartbeat_interval_ms // 10
    return max(POLICY_MS_MIN, min(tenth_ms, POLICY_MS_MAX))


def _is_mine(holding: Holding | None) -> bool:
    if holding is None:
        return False
    return holding.claim.is_owned or holding.claim.is_under_way
