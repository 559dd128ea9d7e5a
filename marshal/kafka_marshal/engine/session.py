"""One claimant in an engine: acquires, renews and releases its claims."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from kafka_marshal.config import Delivery
from kafka_marshal.errors import MarshalError, PositionError
from kafka_marshal.protocol.claiming import (
    Claim,
    Claimant,
    Ending,
    PreviousLife,
    estimate,
)
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.labels import REPLACES_LABEL
from kafka_marshal.protocol.layout import MOVING, is_moving
from kafka_marshal.protocol.planner import Plan, Release
from kafka_marshal.protocol.plans import RESTART
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingMessages,
    ClaimingPartition,
    Config,
    Directive,
    FencingClient,
    GroupSettings,
    Heartbeat,
    Member,
    ReleasingPartition,
)
from kafka_marshal.protocol.records import Plan as PlanRecord
from kafka_marshal.protocol.state import ACCEPTED, Transition, WorldState, stuck_count
from kafka_marshal.protocol.types import Key

from .acquirer import Acquirer
from .claim_index import ClaimIndex
from .context import Context
from .coverage import best_taker
from .directives import SelfDrain
from .grants import LogGrantRequester
from .handoffs import Offers, Warmer
from .heartbeats import Heartbeater
from .holding import Drain, Holding, StartRule
from .holdings import LEASE_EXPIRED, ClaimSession, Holdings, Subleaser
from .members import Announcer, client_fenced, identity_conflict
from .mirror import Mirror
from .outbox import Outbox, Sent, grantee_of
from .planning import GroupPlanner
from .releases import EXPECTED, ReleaseCooldowns, ReleaseRetrier
from .slow_consumers import SlowConsumerPolicy
from .standbys import Standbys
from .start_positions import StartPositions
from .subscription import Subscription, SubscriptionSet

TOPIC_GONE = "topic_gone"
FENCED_BY_ADMIN = "fenced_by_admin"
SENDER_FENCED = "sender_fenced"
NAME_CHARS_MAX = 60
SEEK_UNCONFIRMED = "seek_unconfirmed"


class Session(ClaimSession):
    """A client_id in a group, for the life of this process.

    With a ``Subleaser``, a key that another process may use is not released until that
    process has confirmed that it stopped, or can no longer use the key.

    Attributes:
        self_drain: Drains this client before it ends.
    """

    grants: LogGrantRequester

    def __init__(
        self,
        context: Context,
        claimant: Claimant,
        *,
        host: str = "",
        lives: tuple[PreviousLife, ...] = (),
        mirrors_offsets: bool = True,
        can_plan: bool = True,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.claimant = claimant
        self._context = context
        self._index = ClaimIndex()
        self._wanted = SubscriptionSet()
        self.holdings = self._index.all
        self._held = Holdings(
            context,
            self,
            client_id=claimant.owner.client_id,
            by_key=self.holdings,
            wanted=self._wanted,
        )
        self._lives = lives
        self._outbox = Outbox(context, claimant)
        self.grants = LogGrantRequester(
            context, self._outbox, self.holdings, on_end=self._held.after_end
        )
        self._heartbeater = Heartbeater(context, self._outbox)
        self._releases = ReleaseRetrier(context, self._outbox)
        self._planner = GroupPlanner(context, self._outbox, can_plan=can_plan)
        self._announcer = Announcer(
            context, self._outbox, host=host, labels=labels or {}
        )
        self._start_positions = StartPositions(
            context, self._heartbeater, claimant, release=self.release
        )
        self._mirror = Mirror(context, claimant) if mirrors_offsets else None
        self._slow = SlowConsumerPolicy(context, self._held.lags, self._held.watchdog)
        self._standbys = Standbys(context, me=claimant.owner.client_id)
        self._acquirer = Acquirer(
            context, self._outbox, lives=lives, standbys=self._standbys
        )
        self._cooldowns = ReleaseCooldowns()
        self._offers = Offers(context, self._outbox, self.holdings, drain=self._drain)
        self._warmer = Warmer(context, self._outbox)
        self.self_drain = SelfDrain(context, self._outbox, host=host)
        self._policy_at_ms = self._policy_rests_until_ms = 0
        self._is_closing = False
        self._closed = "closed"
        self._replaces = (labels or {}).get(REPLACES_LABEL)
        self._is_mute = False
        self._subleaser: Subleaser | None = None
        self._foreseen: Mapping[Key, str] = {}

    def sublease_by(self, subleaser: Subleaser) -> None:
        """Sublease claims to other processes from now on."""
        self._subleaser = subleaser
        self._announcer.acted_on = subleaser.acted_on

    def announce_soon(self) -> None:
        """Announce this member in the next round."""
        self._announcer.announce_soon()

    # --- subscriptions

    def subscribe(self, subscription: Subscription) -> None:
        """Start to pursue a subscription.

        Raises:
            InvalidTransition: A topic is consumed in this session already
                (PROTOCOL 5.3: one consumer per key in a process). Topics that a pattern
                matches are skipped instead.
        """
        self._wanted.add(subscription, client_id=self.claimant.owner.client_id)
        self.reconsider()

    def unsubscribe(self, subscription: Subscription, *, release: bool) -> list[int]:
        """End a subscription; release its claims, or keep them.

        Kept claims are renewed, for a later subscription or until the session closes.

        Returns:
            Sequence numbers to wait for: those of claims in flight, which are released
            as ghosts if they are won, and of the last beats of kept claims.
        """
        if subscription not in self._wanted.subs:
            return []
        self._wanted.subs.remove(subscription)
        self._announcer.announce_soon()
        mine = [h for h in self.holdings.values() if h.key.topic in subscription.topics]
        seqs = self._outbox.pending_of({holding.key for holding in mine})
        for holding in mine:
            if not holding.claim.is_owned:
                self._held.end(holding, Ending("given_up", was_lost=False))
            elif release:
                self.release(holding, reason=self._closed)
            elif isinstance(holding.progress, AtLeastOnce):
                # The next consumer starts at the position, below the uncommitted
                # records of this one.
                holding.forget_hands(holding.progress)
        return seqs if release else [*seqs, *self.beat_now()]

    def want(self, key: Key) -> Holding:
        """Contend for one key without a subscription (claims without consumption).

        Raises:
            InvalidTransition: The key is wanted in this session already.
        """
        self._held.require_unclaimed(key)
        self._wanted.explicit[key] = None
        anywhere = StartRule(is_needed=False)
        return self._contend_for(
            key, Delivery.AT_LEAST_ONCE, anywhere, why="asked for by the application"
        )

    def restart(self) -> None:
        """Release for a restart from now on.

        The keys wait for this client or its replacement (PROTOCOL 9.8).
        """
        self._closed = RESTART

    def unwant(self, holding: Holding) -> None:
        """Stop contending for a wanted key; release it if held."""
        self._wanted.explicit.pop(holding.key, None)
        if holding.claim.is_owned:
            self.release(holding, reason="released")
        elif self.holdings.get(holding.key) is holding:
            self._held.end(holding, Ending("given_up", was_lost=False))

    def drop(self, subscription: Subscription, *, reason: str) -> None:
        """End a subscription; release its claims with this reason."""
        mine = [h for h in self.holdings.values() if h.key.topic in subscription.topics]
        for holding in mine:
            if holding.claim.is_owned:
                # Subleased keys are released once their process has confirmed.
                self.release(holding, reason=reason)
        self.unsubscribe(subscription, release=True)

    def drop_want(self, holding: Holding, *, reason: str) -> None:
        """Stop contending for a key; release it with this reason if held."""
        if holding.claim.is_owned:
            self.release(holding, reason=reason)
        self.unwant(holding)

    def forget_want(self, key: Key) -> None:
        """Stop wanting a key that is not held, so that its topic may be consumed."""
        self._wanted.explicit.pop(key, None)

    def abandon(self, holding: Holding, *, reason: str) -> None:
        """End a claim here without a release; it becomes stale in the log."""
        self._held.end(holding, Ending(reason))

    def reconsider(self) -> None:
        """Run the policies as soon as their pace allows: subscriptions have changed."""
        self._announcer.announce_soon()
        self._warmer.look_again()
        self._policy_at_ms = min(self._policy_at_ms, self._policy_rests_until_ms)

    def next_check_ms(self, since_ms: int) -> int:
        """Return when all keys may be checked again; see ``SubscriptionSet``."""
        return self._wanted.next_check_ms(self._context.now_ms, since_ms=since_ms)

    def on_layout(self, *, is_new: bool) -> None:
        """Drain keys that a change of the partition count moves; run the policies."""
        self._index.mark_all_active()
        self._policy_at_ms = 0
        if is_new:
            self.reconsider()

    def on_imported(self, key: Key, now_ms: int) -> None:
        """Handle the import of a key of this group, which can be claimed again."""
        holding = self.holdings.get(key)
        if holding is not None and holding.claim.is_owned:
            self._index.mark_active(holding)
        self._plan_soon(now_ms)
        self._succeed(key, now_ms)

    def is_wanted(self, key: Key) -> bool:
        """Return whether this client wants a key that it may not hold yet."""
        return key in self._wanted.explicit or self._wanted.sub_of(key) is not None

    def on_interval(self) -> None:
        """Renew and announce at once, because the heartbeat interval has changed."""
        self._heartbeater.beat_soon()
        self._announcer.announce_soon()

    # --- the round

    def tick(self, now_ms: int) -> None:
        """Do everything that is due at this local time."""
        self._run_round(now_ms)
        if self._subleaser is not None:
            self._subleaser.drive(now_ms)

    def _run_round(self, now_ms: int) -> None:
        for holding in self._index.expired(now_ms):
            self._held.check_lease(holding, now_ms)
        self._releases.send_due(now_ms)
        refusal = self._outbox.refusal()
        if refusal is not None and self.failure is None:
            self._context.observe("session_failed", {"error": refusal})
            self.fence(refusal)
        if self.failure is not None:
            return
        self._offers.drive(now_ms)
        self.self_drain.drive(now_ms)
        self._drive_active(now_ms)
        self._heartbeater.beat_due(self.holdings.values(), now_ms)
        if self._mirror is not None:
            self._mirror.drive(now_ms)
        if not self._is_closing:
            self._held.look_at_ends(now_ms)
            if self._slow.is_due(now_ms):
                self._judge(now_ms)
            if self._announcer.is_due(now_ms):
                is_behind = self._slow.lagging_count() > 0
                self._announcer.announce(
                    self._wanted.subs,
                    self.holdings,
                    is_behind=is_behind,
                    can_plan=self._planner.can_plan,
                    is_planned=self._planner.is_in_force(),
                )
            self._refresh_topics(now_ms)
            self._warmer.look(self._wanted.sub_of, now_ms)
            self._warmer.drive(now_ms)
            if now_ms >= self._policy_at_ms:
                self._policy_at_ms = now_ms + self._wanted.rest_ms(self._context)
                self._apply_policies(now_ms)
                self._policy_rests_until_ms = self.next_check_ms(now_ms)
            self._acquirer.drive(self._index, self._wanted, now_ms=now_ms)

    def next_due_ms(self) -> int | None:
        """Return when the next round is due if nothing is read; None = no deadline."""
        if self._is_closing or self.failure is not None:
            return None
        return min(self._policy_at_ms, self._index.due_ms(self._context.now_ms))

    def _drive_active(self, now_ms: int) -> None:
        if self._context.has_pause:
            self._index.mark_all_active()
        for holding in list(self._index.active.values()):
            if holding.claim.is_owned:
                self._drive_owned(holding, now_ms)
        self._start_positions.report_failures()
        self._index.compact()

    def _drive_owned(self, holding: Holding, now_ms: int) -> None:
        if self._context.placement.is_known_elsewhere(holding.key, holding.coordinator):
            self._held.end(holding, Ending("fenced"))
            return
        world = self._context.replicas[holding.coordinator].world
        until_ms = holding.claim.lease.hard_until_ms
        is_open = holding.drain is None and world.layout is not None
        if is_open and is_moving(world, holding.key):
            # PROTOCOL 10.3: as for a pause; the key is claimed where it moves to.
            me = self.claimant.owner.client_id
            self._drain(holding, Drain(MOVING, me, until_ms))
        if holding.drain is None and world.pause_of(holding.key) is not None:
            # PROTOCOL 8.1: finish the uncommitted records, beat, release.
            self._drain(holding, Drain("paused", None, until_ms))
        try:
            if self._start_positions.drive(holding, now_ms):
                self._wanted.bump(holding.key)
        except PositionError as error:
            self.fail(error)
            return
        if self._heartbeater.confirm_rewind(holding):
            if self._heartbeater.may_undo_rewind(holding):
                self._end_sought(holding)
                return
            holding.rewind = None
            self._wanted.bump(holding.key)
        self._held.drive(holding, now_ms)

    def _end_sought(self, holding: Holding) -> None:
        """End a claim whose earlier heartbeats may land after a seek (PROTOCOL 6.6).

        The next claim, probably by this client, makes the log ignore them. A key that
        another process uses until its own deadline is left to become stale first.
        """
        if self._is_subleased(holding):
            self.abandon(holding, reason=SEEK_UNCONFIRMED)
        else:
            me = self.claimant.owner.client_id
            self.release(holding, reason=SEEK_UNCONFIRMED, successor=me)

    def _refresh_topics(self, now_ms: int) -> None:
        for sub in self._wanted.subs:
            taken = self._wanted.taken_beside(sub) if sub.matches is not None else set()
            changes = sub.refresh(self._context, now_ms, taken=taken)
            for topic in changes.ended:
                self._give_topic_up(sub, topic)
            if changes.has_changed or changes.ended:
                self._policy_at_ms = 0
                self._announcer.announce_soon()

    def _give_topic_up(self, sub: Subscription, topic: str) -> None:
        """End the claims of a topic that was deleted, or deleted and created again."""
        is_gone = sub.is_gone(topic)
        if is_gone:
            self._context.observe("topic_gone", {"topic": topic})
        for holding in [h for h in self.holdings.values() if h.key.topic == topic]:
            self.release(holding, reason=TOPIC_GONE)
        if is_gone:
            sub.drop_topic(topic)

    # --- keeping up

    def _judge(self, now_ms: int) -> None:
        """Drain partitions that the application is too slow for, or does not poll."""
        for sub in self._wanted.subs:
            was_stuck = sub.stuck_since_ms is not None
            me = self.claimant.owner.client_id
            held = self.holdings.values()
            drains = self._slow.judge(sub, held, me=me, now_ms=now_ms)
            for holding, drain in drains:
                self._drain(holding, drain)
            if drains or was_stuck != (sub.stuck_since_ms is not None):
                # Announce the lower capacity before others see the free keys.
                self._announcer.announce_soon()
                self._plan_soon(now_ms)

    def taker_of(self, sub: Subscription, topic: str) -> str | None:
        """Return the live member with most room for a partition, if there is one."""
        me = self.claimant.owner.client_id
        return best_taker(sub.members, topic, me=me, may_be_behind=True)

    def stuck_count(self, key: Key) -> int:
        """Return how many owners in a row released a key because they were stuck."""
        world = self._context.replica_of(key).world
        known = world.keys.get(key)
        return 0 if known is None else stuck_count(world.soft.notes.get(key), known)

    # --- policies and contending

    def _apply_policies(self, now_ms: int) -> None:
        cooled_at_ms = self._cooldowns.forget_past(now_ms)
        if cooled_at_ms is not None:
            self._policy_at_ms = min(self._policy_at_ms, cooled_at_ms)
        for sub in self._wanted.subs:
            sub.settle_losses(self.holdings)
            view = sub.view(
                self._context,
                self.claimant.owner,
                holdings=self.holdings,
                changes=self._index.changes,
                lives=self._lives,
                cooldowns=self._cooldowns,
                now_ms=now_ms,
                replaces=self._replaces,
            )
            self._policy_at_ms = min(self._policy_at_ms, sub.claimable_at_ms)
            plan = sub.plan(view, self._context, now_ms=now_ms)
            plan = self._standbys.joined_to(plan, sub=sub, view=view)
            if sub.awaits_policy(now_ms):
                self._plan_soon(now_ms)
            self._follow(sub, plan, now_ms)
        self._standbys.drive(self._wanted.subs)
        counts = {
            topic: info.partition_count
            for sub in self._wanted.subs
            for topic, info in sub.topics.items()
        }
        self._planner.drive(counts, now_ms)
        if self._planner.due_ms is not None:
            self._policy_at_ms = min(self._policy_at_ms, self._planner.due_ms)

    def _follow(self, sub: Subscription, plan: Plan, now_ms: int) -> None:
        self._foresee(sub, plan.claim)
        wanted = {
            key: plan.why.get(key, "")
            for key in plan.claim
            if key in sub.named_by_plan
            or not self._cooldowns.is_in_cooldown(key, now_ms)
        }
        self._drop_contenders(sub, wanted.keys() | sub.named)
        for key, why in wanted.items():
            if key not in self.holdings and not self._releases.is_leaving(key):
                delivery = sub.config.delivery
                self._contend_for(key, delivery, sub.start_rule, why=why)
        for release in plan.release:
            self._give_up(release, now_ms)
        self._offers.withdraw_unwanted(now_ms)

    def _foresee(self, sub: Subscription, keys: Sequence[Key]) -> None:
        """Note for which processes these keys are claimed, to name them in claims."""
        if self._subleaser is not None:
            has_new = any(key not in self.holdings for key in keys)
            self._foreseen = self._subleaser.foresee(sub, keys) if has_new else {}

    def _give_up(self, release: Release, now_ms: int) -> None:
        holding = self.holdings.get(release.key)
        if holding is None or not holding.claim.is_owned or holding.drain is not None:
            return
        if self._offers.offer(holding, release, now_ms=now_ms):
            return
        self._context.observe("release_planned", attrs.asdict(release, recurse=False))
        drain = Drain(
            reason=release.reason,
            successor=release.successor,
            until_ms=None,
            detail=release.detail,
        )
        self._drain(holding, drain)

    def drain(
        self,
        holding: Holding,
        *,
        reason: str,
        successor: str | None = None,
    ) -> None:
        """Start to drain a key, unless a drain is in progress."""
        if holding.drain is None:
            self._drain(holding, Drain(reason, successor, None))

    def _drain(self, holding: Holding, drain: Drain) -> None:
        holding.drain = drain
        self._index.mark_active(holding)
        self._wanted.bump(holding.key)

    def _succeed(self, key: Key, now_ms: int) -> None:
        """Contend at once for a key whose release names this client as successor.

        Neither the pace of policies nor a cooldown delays the claim: until the handoff
        ends, no other member can claim the key.
        """
        if self._context.config is None or self._context.placement.awaits_import(key):
            return  # its partition is not known yet, or must import it first
        replica = self._context.replica_of(key)
        elapsed_ms = replica.elapsed_ms(now_ms)
        owner = self.claimant.owner
        guess = estimate(replica.world, key, elapsed_ms=elapsed_ms, claimant=owner)
        sub = self._wanted.sub_of(key)
        if not guess.is_named or sub is None or self._is_closing or self.failure:
            return
        self._cooldowns.end(key)
        if key not in self.holdings and sub.may_succeed(
            key, self.holdings, now_ms=now_ms
        ):
            note = replica.world.soft.notes.get(key)
            why = "handed over" if note is None else f"handed over by {note.client_id}"
            self._foresee(sub, [key])
            self._contend_for(key, sub.config.delivery, sub.start_rule, why=why)

    def _drop_contenders(self, sub: Subscription, wanted: Collection[Key]) -> None:
        for key, holding in list(self._index.contending.items()):
            if key in wanted or key.topic not in sub.topics:
                continue
            if not holding.claim.is_verdict_pending:
                self._held.end(holding, Ending("given_up", was_lost=False))

    def _contend_for(
        self, key: Key, delivery: Delivery, rule: StartRule, *, why: str
    ) -> Holding:
        holding = Holding(Claim(self.claimant, key), delivery, rule)
        name = self._foreseen.get(key)
        holding.why = why if name is None else f"for {name[:NAME_CHARS_MAX]}; {why}"
        self._index.add(holding)
        return holding

    # --- records that were read back

    def on_own(
        self, transitions: tuple[Transition, ...], now_ms: int, *, partition: int
    ) -> None:
        """Handle the verdict on an own record that was read back from a partition."""
        record = transitions[0].record
        assert record is not None
        assert not isinstance(record, Config)
        sent = self._outbox.read_back(record.seq, grantee=grantee_of(record))
        if transitions[0].reason == SENDER_FENCED:
            self._fail_as_fenced(transitions[0])
        if isinstance(record, ClaimingPartition):
            self._on_claim(record, transitions[0], partition=partition)
            self._plan_soon(now_ms)
        elif isinstance(record, Heartbeat):
            self._on_beats(sent, [(record.epoch, transitions[0])])
        elif isinstance(record, BatchHeartbeat) and transitions[0].reason == "limits":
            self._heartbeater.beat_soon()  # nothing was renewed: split by the new limit
        elif isinstance(record, BatchHeartbeat):
            epochs = (epoch for epoch, _ in record.beats)
            self._on_beats(sent, zip(epochs, transitions, strict=False))
        elif isinstance(record, ReleasingPartition):
            key = Key(record.group_id, record.topic, record.partition)
            self._releases.on_verdict(key, record.epoch, partition=partition)
            cool_ms = now_ms + self._context.heartbeat_interval_ms
            self._cooldowns.extend(key, until_ms=cool_ms)
            self._plan_soon(now_ms)
            self._succeed(key, now_ms)
        elif isinstance(record, ClaimingMessages):
            self.grants.on_verdict(record, transitions[0], partition=partition)
        elif isinstance(record, Member):
            self._announcer.on_own(transitions[0], partition=partition)
            self._plan_soon(now_ms)
        elif isinstance(record, Directive | PlanRecord):
            self._plan_soon(now_ms)

    def _plan_soon(self, now_ms: int) -> None:
        """Run the policies soon, because some of their input has changed.

        Beats and grants, which arrive many times a second, are not part of that input.
        """
        self._policy_at_ms = min(self._policy_at_ms, now_ms + self._wanted.soon_ms)

    def _on_claim(
        self, record: ClaimingPartition, transition: Transition, *, partition: int
    ) -> None:
        now_ms = self._context.now_ms
        key = Key(record.group_id, record.topic, record.partition)
        if transition.outcome == ACCEPTED:
            self._acquirer.note_claim(key, now_ms)
        holding = self.holdings.get(key)
        sub = self._wanted.sub_of(key)
        replica = self._context.replicas[partition]
        is_won = holding is not None and holding.claim.on_claim_verdict(
            transition,
            seq=record.seq,
            now_ms=now_ms,
            heartbeat_interval_ms=replica.heartbeat_interval_ms,
            token=replica.world.token(key),
        )
        if is_won and holding is not None:
            self._index.won(holding, partition)
            self._announcer.note_won(holding)
            self._heartbeater.note_lead(partition, holding.claim.base_ms)
            if self._mirror is not None:
                self._mirror.follow(holding)
            self._note_won(holding, transition.effect, world=replica.world)
            known = replica.world.keys[key]
            holding.note_key(known)
            self._start_positions.begin(holding, known)
            self._wanted.bump(key)
            if sub is not None and sub.is_over(holding):
                # An earlier instance claimed it; a resume keeps the topic id.
                self.release(holding, reason=TOPIC_GONE)
        elif transition.outcome == ACCEPTED:
            at = transition.offset
            if holding is not None and holding.claim.is_owned:
                # An earlier claim is in use here, and was stale by the log's clock.
                self._held.end(holding, Ending("taken_over", record.client_id, at))
            self.release_ghost(key, at, partition=partition)
        else:
            self._acquirer.on_refused(key, record)

    def _note_won(
        self, holding: Holding, effect: str | None, *, world: WorldState
    ) -> None:
        why, log_ms = world.soft.notes[holding.key].reason, world.now_ms
        self._held.note_won(holding, effect=effect, why=why, log_ms=log_ms)
        before, subleaser = holding.vacancy, self._subleaser
        is_warm = self._warmer.finish(holding) or (
            subleaser is not None and subleaser.has_warmed(holding.key)
        )
        if is_warm and before is not None:
            self.meters.handed_over(holding.key, gap_ms=log_ms - before.since_ms)

    def _on_beats(
        self, sent: Sent | None, beats: Iterable[tuple[int, Transition]]
    ) -> None:
        if sent is not None:
            for ended in self._heartbeater.on_verdicts(sent, beats, index=self._index):
                self._held.after_end(ended)

    def on_foreign(self, transition: Transition, *, partition: int) -> None:
        """Handle an accepted record of another claimant, read from a partition."""
        key, record = transition.key, transition.record
        if isinstance(record, FencingClient):
            self._on_fence(record, transition)
        if isinstance(record, PlanRecord):
            self._plan_soon(self._context.now_ms)
        elif isinstance(record, GroupSettings):
            # Another policy may be in force, for which members announce more.
            self.reconsider()
        if key is None:
            return
        if transition.effect in {"claimed", "resumed"}:
            self._releases.on_taken(key, partition=partition)
            self._acquirer.note_claim(key, self._context.now_ms)
        if self._cooldowns.ends_by(transition):
            self._plan_soon(self._context.now_ms)
        if transition.effect == "released":
            self._succeed(key, self._context.now_ms)
        elif transition.effect == "offered":
            now_ms = self._context.now_ms
            self._warmer.take(key, self._wanted.sub_of(key), now_ms=now_ms)
        holding = self.holdings.get(key)
        if holding is not None and holding.coordinator == partition:
            holding.claim.on_foreign(transition)
            if holding.claim.ending is not None:
                self._held.after_end(holding)
        if self._announcer.is_replaced(transition, partition=partition):
            self._fail_as_twin(transition, partition, host="")

    def _on_fence(self, record: FencingClient, transition: Transition) -> None:
        """Handle a fence of any process of this group (PROTOCOL 4.13)."""
        if self.claimant.owner == (record.fenced, record.fenced_incarnation):
            self._fail_as_fenced(transition)
        else:
            # One member less: this one's share may have grown.
            self._plan_soon(self._context.now_ms)

    def _fail_as_fenced(self, transition: Transition) -> None:
        """Fail because an admin fenced this process; nothing more is handed out."""
        if self.failure is None:
            error = client_fenced(self.claimant, transition)
            self._held.fail(error, reason=FENCED_BY_ADMIN, was_lost=True)

    def on_member(self, transition: Transition, now_ms: int, *, partition: int) -> None:
        """Handle the announcement of another member, read from a partition."""
        if self._announcer.is_news(transition):
            self._plan_soon(now_ms)
        other = self._announcer.older_twin(transition, partition=partition)
        if other is not None and self.failure is None:
            self._fail_as_twin(transition, partition, host=other)

    def _fail_as_twin(
        self, transition: Transition, partition: int, *, host: str
    ) -> None:
        """Fail because of a record of another process with our client_id."""
        # The record is the newest folded there; its age is by the wall clock.
        written_ms = self._context.replicas[partition].world.append_time_ms
        age_ms = max(0, self._context.ports.clock.wall_ms() - written_ms)
        offset = transition.offset
        self.fail(identity_conflict(self.claimant, offset, host=host, age_ms=age_ms))

    # --- endings

    def release(
        self,
        holding: Holding,
        *,
        reason: str,
        successor: str | None = None,
        detail: str = "",
        was_lost: bool = False,
    ) -> None:
        """Release a held key at its position.

        Args:
            holding: Its holding.
            reason: Reason in one word.
            successor: client_id that should claim it next.
            detail: Figures behind the reason.
            was_lost: Whether to report it to the application as lost work.
        """
        drain = Drain(reason=reason, successor=successor, until_ms=None, detail=detail)
        self._held.release(holding, drain, was_lost=was_lost)

    def fail(self, failure: MarshalError) -> None:
        """End every claim for good.

        With subleases, only the key without a start position ends: other processes
        keep their keys.
        """
        if (
            self._subleaser is not None
            and isinstance(failure, PositionError)
            and failure.partition is not None
        ):
            key = Key(self.claimant.group_id, *failure.partition)
            holding = self.holdings.get(key)
            if holding is not None:
                self.release(holding, reason="failed")
                self._subleaser.on_no_position(key, failure)
                return
        super().fail(failure)

    def delays_release(self, holding: Holding, drain: Drain) -> bool:
        """Drain a key if another process may use it; return whether one may."""
        if not self._is_subleased(holding):
            return False
        if holding.drain is None:
            self._drain(holding, drain)
        return True

    def _is_subleased(self, holding: Holding) -> bool:
        """Return whether another process may use a key, by this or an earlier claim."""
        if self._subleaser is None:
            return False
        return holding.is_subleased or self._subleaser.is_reserved(holding.key)

    def send_release(self, holding: Holding, drain: Drain) -> None:
        """Append a release; repeat until it is read back.

        Appends nothing if the lease has expired but another process may rely on a later
        deadline, sent before a clock step: the claim becomes stale in the log instead.
        """
        if drain.reason == LEASE_EXPIRED and self._is_subleased(holding):
            return
        self._releases.release(
            holding, reason=drain.reason, successor=drain.successor, detail=drain.detail
        )

    def on_release(self, key: Key, reason: str) -> None:
        """Start the cooldown of a released key, and announce an unexpected release."""
        cool_ms = self._context.now_ms + self._context.heartbeat_interval_ms
        self._cooldowns.begin(key, reason, until_ms=cool_ms)
        if reason not in EXPECTED:
            # Announce that the key is not reserved for this member.
            self._wanted.hold_back(key, until_ms=cool_ms)
            self._announcer.announce_soon()

    def remove(self, holding: Holding) -> bool:
        """Forget a holding that has ended; return whether it was there."""
        key = holding.key
        self._announcer.note_end(holding)
        if not self._index.remove(holding):
            return False
        self._slow.forget(key)
        return True

    def on_end(self, holding: Holding, ending: Ending) -> None:
        """Run the policies soon, and report an unexpected loss to them."""
        if ending.reason not in EXPECTED | {"topic"}:
            self._wanted.note_loss(holding.key)
        self._plan_soon(self._context.now_ms)

    def check_clock(self, partitions: Collection[int], now_ms: int) -> None:
        """Shorten leases where a leader's clock stepped forward (PROTOCOL S4)."""
        held = self.holdings.values()
        if self._heartbeater.check_clock(held, partitions, now_ms=now_ms):
            self._index.recheck_leases()
            if self._subleaser is not None:
                self._wanted.bump_all()

    def forget(self, partition: int) -> None:
        """End the claims of a partition whose log went back, without records (7.5)."""
        for holding in list(self.holdings.values()):
            if holding.coordinator == partition:
                self._held.end(holding, Ending("fenced"))
        self._releases.forget(partition)
        self._heartbeater.forget(partition)
        self._announcer.forget(partition)

    def release_ghost(self, key: Key, epoch: int, *, partition: int) -> None:
        """Release a claim that has no holding here, in its partition (PROTOCOL 5.3).

        If another process may use its key under an earlier claim, nothing is appended
        and the claim becomes stale.
        """
        if self._subleaser is None or not self._subleaser.is_reserved(key):
            self._releases.release_ghost(key, epoch, partition=partition)

    def fence(self, failure: MarshalError) -> None:
        """End every claim without a record to the log, which cannot be trusted now."""
        self._is_mute = True
        self._held.fence(failure)
        if self._subleaser is not None:
            self._subleaser.drive(self._context.now_ms)

    # --- requests of the consumer's thread

    def seek(self, holding: Holding, position: int) -> None:
        """Move the position of a held key anywhere (PROTOCOL 6.6).

        At-least-once delivery only. No record of the key is handed out until
        ``holding.rewind`` is None again: then the log has the position.
        """
        holding.seek(position)
        self._slow.forget(holding.key)
        self._heartbeater.send_rewind(holding)
        self._index.mark_active(holding)

    def beat_now(self) -> list[int]:
        """Send a beat for every held key; return the numbers to wait for."""
        return self._heartbeater.beat_now(self.holdings.values())

    def is_pending(self, seqs: Iterable[int], *, late: bool = True) -> bool:
        """Return whether any of these records has not been read back.

        Args:
            seqs: Sequence numbers.
            late: Whether records that may never be read back count as pending.
        """
        pending = any(self._outbox.is_pending(seq, late=late) for seq in seqs)
        return pending and not self._is_mute

    def begin_close(self, *, release: bool) -> list[int]:
        """Start to close: release every claim, or send a last beat for it.

        Returns:
            Sequence numbers to wait for.
        """
        self._is_closing = True
        if self._mirror is not None:
            self._mirror.hurry()
        seqs = self._announcer.announce_leaving(self._wanted.subs, self.holdings)
        seqs += self.self_drain.end()
        seqs += self._outbox.pending_of(self.holdings)
        for holding in list(self.holdings.values()):
            if not holding.claim.is_owned:
                self._held.end(holding, Ending("given_up", was_lost=False))
            elif release:
                self.release(holding, reason=self._closed)
            else:
                self.grants.report_unused(holding)
        return seqs if release else [*seqs, *self.beat_now()]

    @property
    def is_mirror_behind(self) -> bool:
        """Whether Kafka's committed offsets lag behind the positions in the log."""
        return self._mirror is not None and self._mirror.is_behind

    def is_leaving(self, keys: Iterable[Key]) -> bool:
        """Return whether a release of any of these keys is not yet read back."""
        return not self._is_mute and any(self._releases.is_leaving(key) for key in keys)

    @property
    def handoff_counts(self) -> Mapping[str, int]:
        """Open handoffs by phase; ``warming`` counts keys of other owners."""
        found = Counter(self._offers.counts())
        found["warming"] = self._warmer.warming_count
        if self._subleaser is not None:
            found.update(self._subleaser.handoff_counts)
        return found

    @property
    def leaving_count(self) -> int:
        """Number of releases that have not been read back."""
        return 0 if self._is_mute else self._releases.count
