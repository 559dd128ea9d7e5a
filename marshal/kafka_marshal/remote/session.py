"""What a client has by its sidecar: stands in for a session of an engine's own.

The sidecar claims, beats to the log and releases; this keeps what the application
sees of it. The claim, the holding and both ladders of delivery are those of the
engine, and so are the deadlines: they run out by themselves where nobody renews them
(PROTOCOL 5.2), so that a dead sidecar stops its clients.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kafka_marshal.engine import Delivery, Holding, StartRule, Subscription
from kafka_marshal.engine.holding import Drain
from kafka_marshal.engine.holdings import Holder, Holdings
from kafka_marshal.engine.poll_watchdog import was_stopped
from kafka_marshal.engine.session import TOPIC_GONE
from kafka_marshal.engine.subscription import SubscriptionSet
from kafka_marshal.ports import TopicInfo
from kafka_marshal.protocol.claiming import Claim, Claimant, Ending, Sublease
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.protocol.state import WEDGED
from kafka_marshal.protocol.types import Key, Owner, Token
from kafka_marshal.remote import api
from kafka_marshal.remote.context import RemoteContext
from kafka_marshal.remote.errors import error_of
from kafka_marshal.remote.grants import SidecarGrantRequester

RESTARTED = "sidecar_restarted"
REASSIGNED = "reassigned"
OVER_MAX = 100_000


class Commands(Protocol):
    """Who carries to the sidecar what the session says. Never blocks."""

    def give_back(self, returned: Sequence[api.Release]) -> None:
        """Tell what is not used any more, until the sidecar knows."""
        ...

    def end(self, name: str, returned: Sequence[api.Release], *, keep: bool) -> int:
        """Tell that a subscription is over; return what to wait for."""
        ...

    def unclaim(self, key: Key) -> None:
        """Tell that a key is wanted no more."""
        ...

    def flush(self) -> int:
        """Tell every position; return what to wait for."""
        ...

    def is_pending(self, seqs: Iterable[int], *, late: bool) -> bool:
        """Return whether any is still to be waited for."""
        ...

    @property
    def returning_count(self) -> int:
        """Number of keys given back that the sidecar has not confirmed."""
        ...


class RemoteSession(Holder):
    """A client of a group, by a sidecar. Called under the engine's lock.

    Attributes:
        claimant: Who claims, as the log has it: the sidecar.
        client_id: The client's own name.
        holdings: What it contends for or holds, by key.
        grants: Asks for ranges of offsets at most once.
        commands: Carries what is said.
    """

    commands: Commands
    grants: SidecarGrantRequester

    def __init__(
        self,
        context: RemoteContext,
        claimant: Claimant,
        *,
        client_id: str,
        grantee: bytes,
    ) -> None:
        self.claimant = claimant
        self.client_id = client_id
        self.holdings = context.holdings
        self._context = context
        self._grantee = grantee
        self._wanted = SubscriptionSet()
        self._held = Holdings(
            context,
            self,
            client_id=client_id,
            by_key=self.holdings,
            wanted=self._wanted,
        )
        self._names: dict[str, Subscription] = {}
        # Every name that was ever used here, and what came for others: an earlier
        # process that this one goes on for had them, and will have them again.
        self._had: set[str] = set()
        self._early: dict[Key, api.Assignment] = {}
        # Which life of the sidecar has told of each claim.
        self._givers: dict[Key, Owner] = {}
        # Newest claim of each key that ended here: what is told of it comes late.
        self._over: dict[Key, int] = {}
        self._told: dict[Key, api.Progress] = {}
        self._deadlines_ms = 0
        # Topics that another live member could take partitions of.
        self._takers: frozenset[str] = frozenset()
        self._stuck_counts: dict[Key, int] = {}
        self._ticked_ms = context.now_ms

    # --- wishes

    @property
    def names(self) -> dict[str, Subscription]:
        """What is pursued now, as the sidecar calls it."""
        return dict(self._names)

    @property
    def wanted(self) -> list[Key]:
        """Keys that are wanted without a policy."""
        return list(self._wanted.explicit)

    def subscribe(self, name: str, subscription: Subscription) -> None:
        """Begin to pursue a subscription.

        Raises:
            InvalidTransition: A topic is consumed in this session already.
        """
        self._wanted.add(subscription, client_id=self.client_id)
        self._names[name] = subscription
        self._had.add(name)
        for key, said in list(self._early.items()):
            if said.subscription == name:
                del self._early[key]
                self._on_assigned(said)

    def forget(self, name: str) -> None:
        """Pursue a subscription no more, which the sidecar may never have had."""
        subscription = self._names.pop(name, None)
        if subscription is not None:
            self._wanted.subs.remove(subscription)
            self.commands.end(name, (), keep=False)

    def unsubscribe(self, subscription: Subscription, *, release: bool) -> list[int]:
        """Stop to pursue a subscription; give up all that it holds, or keep that."""
        name = next((n for n, s in self._names.items() if s is subscription), None)
        if name is None:
            return []
        del self._names[name]
        self._wanted.subs.remove(subscription)
        returned = []
        mine = [h for h in self.holdings.values() if h.key.topic in subscription.topics]
        for holding in mine:
            if release:
                returned.append(_returned(holding, "closed"))
                self._held.end(holding, Ending("closed", was_lost=False))
            elif isinstance(holding.progress, AtLeastOnce):
                # What is in hand was this consumer's; the next starts below it.
                holding.forget_hands(holding.progress)
        seqs = [self.commands.end(name, returned, keep=not release)]
        return seqs if release else [*seqs, *self.beat_now()]

    def want(self, key: Key) -> Holding:
        """Contend for one key without a policy.

        Raises:
            InvalidTransition: The key is wanted in this session already.
        """
        self._held.require_unclaimed(key)
        self._wanted.explicit[key] = None
        rule = StartRule(is_needed=False)
        holding = Holding(Claim(self.claimant, key), Delivery.AT_LEAST_ONCE, rule)
        holding.why = "asked for by the application"
        self.holdings[key] = holding
        return holding

    def unwant(self, holding: Holding) -> None:
        """Stop to contend for a key that was wanted; release it where held."""
        if holding.claim.is_owned:
            self.release(holding, reason="released")
        elif self.holdings.get(holding.key) is holding:
            self._held.end(holding, Ending("given_up", was_lost=False))

    # --- what the sidecar says

    def on_event(self, said: api.EventBody) -> None:
        """Take an event; one that was taken before changes nothing (row KA28)."""
        match said:
            case api.Snapshot():
                self._on_snapshot(said)
            case api.Assignment():
                self._on_assigned(said)
            case api.Releasing():
                self._on_releasing(said)
            case api.Lost():
                self._on_lost(said)
            case api.Paused():
                self._context.pause = said.is_paused
            case api.Failed():
                self.fail(error_of(said.failure))

    def _on_snapshot(self, said: api.Snapshot) -> None:
        named = {(self._key(each), each.epoch) for each in said.assigned}
        for holding in list(self.holdings.values()):
            key, claim = holding.key, holding.claim
            if not claim.is_owned or (key, claim.epoch) in named:
                continue
            is_same = self._givers.get(key) == self.claimant.owner
            if is_same or not self._may_go_on(holding):
                self._held.end(holding, Ending(REASSIGNED if is_same else RESTARTED))
        self._early.clear()
        for each in said.assigned:
            self._on_assigned(each)
        draining = {(self._key(each), each.epoch) for each in said.releasing}
        for holding in self.holdings.values():
            drain = holding.drain
            if drain is None or drain.reason == WEDGED:
                continue
            if (holding.key, holding.claim.epoch) not in draining:
                holding.drain = None
                self._wanted.bump(holding.key)
        for leaving in said.releasing:
            self._on_releasing(leaving)
        self._context.pause = said.paused.is_paused

    def _on_assigned(self, said: api.Assignment) -> None:
        key = self._key(said)
        if said.epoch <= self._over.get(key, -1):
            return  # it has ended here, and the sidecar is being told
        holding = self.holdings.get(key)
        if holding is not None and holding.claim.is_owned:
            if holding.claim.epoch == said.epoch:
                # Sent again where a deadline has come forward (PROTOCOL S4).
                holding.claim.limit(_lease_of(said))
                return
            if said.epoch < (holding.claim.epoch or 0):
                return  # a later claim has ended that one
            if not said.subscription and self._may_go_on(holding):
                self._go_on(holding, said)
                return
            self._held.end(holding, Ending(REASSIGNED))
            holding = None
        if said.subscription and said.subscription not in self._had:
            self._early[key] = said
            return
        found = self._holding_for(said, key, holding)
        if found is None or self.failure is not None:
            self._over[key] = said.epoch
            self.commands.give_back([_unused(said)])
            return
        self._begin(found, said)

    def _holding_for(
        self, said: api.Assignment, key: Key, waiting: Holding | None
    ) -> Holding | None:
        """Return what a claim is used by, None where nobody wants it any more."""
        if not said.subscription:
            return waiting if key in self._wanted.explicit else None
        sub = self._names.get(said.subscription)
        if sub is None or said.position is None:
            return None
        if key.topic not in sub.topics:
            sub.topics[key.topic] = TopicInfo(key.partition + 1, None)
        return Holding(Claim(self.claimant, key), sub.delivery, sub.start_rule)

    def _may_go_on(self, holding: Holding) -> bool:
        """Return whether a later claim of ours goes on where this one was.

        Claims without consumption have nothing in hand, and say their token anew
        with each ``check``. Up to the old deadline nobody else can have had the key
        in between (PROTOCOL 12).
        """
        is_explicit = holding.key in self._wanted.explicit
        return is_explicit and holding.claim.is_valid(self._context.now_ms)

    def _go_on(self, holding: Holding, said: api.Assignment) -> None:
        self._note_over(holding.key, holding.claim.epoch or 0)
        holding.claim.reassign(self._sublease(said))
        self._note_terms(holding, said)
        progress = holding.progress
        if isinstance(progress, AtLeastOnce) and said.position is not None:
            progress.position = max(said.position, progress.position or 0)
        self._told.pop(holding.key, None)
        self._held.note_won(holding, effect="resumed", why=holding.why, log_ms=0)

    def _sublease(self, said: api.Assignment) -> Sublease:
        owner = Owner(said.client_id, bytes.fromhex(said.incarnation))
        return Sublease(
            claimant=Claimant(owner, self.claimant.group_id, master=b""),
            epoch=said.epoch,
            token=Token.parse(said.token),
            secret=bytes.fromhex(said.secret),
            lease=_lease_of(said),
            heartbeat_interval_ms=self._context.heartbeat_interval_ms,
        )

    def _note_terms(self, holding: Holding, said: api.Assignment) -> None:
        holding.why = said.why
        topic_id = said.topic_id
        holding.topic_id = None if topic_id is None else bytes.fromhex(topic_id)
        self._givers[holding.key] = self.claimant.owner

    def _begin(self, holding: Holding, said: api.Assignment) -> None:
        key = holding.key
        holding.claim.assign(self._sublease(said))
        self._note_terms(holding, said)
        holding.begin(said.position, grantee=self._grantee)
        if isinstance(holding.progress, AtMostOnce):
            holding.progress.is_anchored = said.is_anchored
        self.holdings[key] = holding
        self._context.follows[key] = said.follows
        self._stuck_counts[key] = said.stuck
        self._held.watchdog.watch(holding, self._context.now_ms)
        self._held.note_won(holding, effect="claimed", why=holding.why, log_ms=0)
        self._wanted.bump(key)

    def _on_releasing(self, said: api.Releasing) -> None:
        early = self._early.pop(self._key(said), None)
        if early is not None:
            self._over[self._key(said)] = early.epoch
            self.commands.give_back([_unused(early)])
        holding = self._find(said, said.epoch)
        if holding is None:
            return
        old = holding.drain
        until_ms = said.until_ms
        if until_ms is None and old is not None:
            until_ms = old.until_ms
        holding.drain = Drain(said.reason, said.successor, until_ms)
        if old is None:
            self._wanted.bump(holding.key)

    def _on_lost(self, said: api.Lost) -> None:
        key = self._key(said)
        self._note_over(key, said.epoch)
        self._early.pop(key, None)
        holding = self._find(said, said.epoch)
        if holding is not None:
            ending = Ending(
                said.reason, said.winner, said.at_offset, was_lost=said.was_lost
            )
            self._held.end(holding, ending)

    def on_deadlines(
        self, said: api.HeartbeatResponse, *, told: Iterable[api.Progress]
    ) -> None:
        """Take the answer to a beat.

        Args:
            said: The answer; an earlier one that comes late changes nothing.
            told: What the beat told.
        """
        if said.now_ms < self._deadlines_ms:
            return
        self._deadlines_ms = said.now_ms
        self._takers = frozenset(said.takers)
        for each in told:
            self._told[self._key(each)] = each
        for deadline in said.deadlines:
            holding = self._find(deadline, deadline.epoch)
            if holding is not None:
                holding.claim.renew_until(_lease_of(deadline))

    def on_flushed(
        self, said: api.HeartbeatResponse, *, told: Iterable[api.Progress]
    ) -> None:
        """Take the answer to a flush: what it does not list is not ours any more."""
        listed = {(self._key(each), each.epoch) for each in said.deadlines}
        for each in told:
            holding = self._find(each, each.epoch)
            is_gone = (self._key(each), each.epoch) not in listed
            if holding is not None and is_gone and holding.drain is None:
                self._held.end(holding, Ending("beat_ignored"))
        self.on_deadlines(said, told=told)

    # --- what is told

    def standings(self, *, everything: bool) -> tuple[api.Progress, ...]:
        """Return how far what is held is; what has changed, or everything."""
        found = []
        for key, holding in self.holdings.items():
            epoch = holding.claim.epoch
            if epoch is None or not holding.claim.is_owned:
                continue
            standing = api.Progress(
                topic=key.topic,
                partition=key.partition,
                epoch=epoch,
                position=holding.position,
                in_hand=holding.in_hand_count,
                handed=holding.handed_count,
                done=holding.mark,
            )
            if everything or self._told.get(key) != standing:
                found.append(standing)
        return tuple(found)

    def beat_now(self) -> list[int]:
        """Tell every position at once; return what to wait for."""
        return [self.commands.flush()]

    def is_pending(self, seqs: Iterable[int], *, late: bool = True) -> bool:
        """Return whether any is still to be waited for."""
        return self.commands.is_pending(seqs, late=late)

    @property
    def leaving_count(self) -> int:
        """Number of keys given back that the sidecar has not confirmed."""
        return self.commands.returning_count

    # --- the round

    def tick(self, now_ms: int) -> bool:
        """Do everything that is due; return whether more is to come in a moment."""
        for holding in list(self.holdings.values()):
            if holding.claim.is_owned:
                self._held.check_lease(holding, now_ms)
            if holding.claim.is_owned:
                self._held.drive(holding, now_ms)
        gap_ms, interval_ms = (
            now_ms - self._ticked_ms,
            self._context.heartbeat_interval_ms,
        )
        for sub in self._wanted.subs:
            if was_stopped(gap_ms, heartbeat_interval_ms=interval_ms):
                sub.moved_at_ms = now_ms
            self._drain_stuck(sub, now_ms)
        self._ticked_ms = now_ms
        self._held.look_at_ends(now_ms)
        for sub in self._wanted.subs:
            if sub.has_doubts:
                self._look_at_topics(sub, now_ms)
        return any(holding.drain is not None for holding in self.holdings.values())

    def _drain_stuck(self, sub: Subscription, now_ms: int) -> None:
        """Give up what the application has stopped polling for."""
        watchdog = self._held.watchdog
        held = [
            holding
            for holding in self.holdings.values()
            if holding.claim.is_owned and holding.key.topic in sub.topics
        ]
        watchdog.note_signs(sub, held, now_ms=now_ms)
        for stuck in watchdog.find_stuck(sub, held, now_ms=now_ms):
            stuck.holding.drain = stuck.drain(now_ms)
            self._wanted.bump(stuck.holding.key)

    def taker_of(self, sub: Subscription, topic: str) -> str | None:
        """Return "" where another live member could take a partition of a topic."""
        del sub
        return "" if topic in self._takers else None

    def stuck_count(self, key: Key) -> int:
        """Return how many owners in a row gave a key up because they were stuck."""
        return self._stuck_counts.get(key, 0)

    def _look_at_topics(self, sub: Subscription, now_ms: int) -> None:
        """Give back what is of a topic that was deleted, or created again."""
        look = sub.look_again(self._context, now_ms, taken=set())
        if not (look.has_changed or look.ended):
            return
        for holding in [h for h in self.holdings.values() if h.key.topic in sub.topics]:
            if holding.claim.is_owned and sub.is_over(holding):
                self.release(holding, reason=TOPIC_GONE)
        for topic in look.ended:
            if sub.is_gone(topic):
                sub.drop_topic(topic)

    # --- endings

    def release(self, holding: Holding, *, reason: str) -> None:
        """Give a held key up at its position."""
        self._held.release(holding, Drain(reason, None, None))

    def send_release(self, holding: Holding, drain: Drain) -> None:
        """Return a claim to the sidecar."""
        self.commands.give_back([_returned(holding, drain.reason, drain.detail)])

    def on_release(self, key: Key, reason: str) -> None:
        """Do nothing: the sidecar lets it cool down."""

    def remove(self, holding: Holding) -> bool:
        """Forget a holding that has ended; return whether it was there."""
        key = holding.key
        was_there = self.holdings.get(key) is holding
        if was_there:
            del self.holdings[key]
            self._stuck_counts.pop(key, None)
            self._told.pop(key, None)
            self._givers.pop(key, None)
            self._context.heads.pop(key, None)
            self._context.follows.pop(key, None)
        if self._wanted.explicit.pop(key, 0) is None:
            self.commands.unclaim(key)
        return was_there

    def on_end(self, holding: Holding, ending: Ending) -> None:
        """Refuse what is sent of this claim from here on."""
        del ending
        self._note_over(holding.key, holding.claim.epoch or 0)

    def after_verdict(self, holding: Holding) -> None:
        """Take that a verdict on a request has ended a claim."""
        self._held.after_end(holding)

    def _note_over(self, key: Key, epoch: int) -> None:
        over = self._over
        over[key] = max(epoch, over.pop(key, -1))
        if len(over) > OVER_MAX:
            del over[next(iter(over))]

    def begin_close(self, *, release: bool) -> tuple[api.Release, ...]:
        """Stop wanting anything; return what is left, with its final positions."""
        left = [h for h in self.holdings.values() if h.claim.is_owned]
        reason = "closed" if release else "kept"
        returned = tuple(_returned(holding, reason) for holding in left)
        self._wanted.explicit.clear()
        for holding in list(self.holdings.values()):
            self._held.end(holding, Ending("closed", was_lost=False))
        return returned

    # --- looking

    def _key(self, said: "_OfPartition") -> Key:
        return Key(self.claimant.group_id, said.topic, said.partition)

    def _find(self, said: "_OfPartition", epoch: int) -> Holding | None:
        """Return what is held under just that claim."""
        holding = self.holdings.get(self._key(said))
        if holding is None or not holding.claim.is_owned:
            return None
        return holding if holding.claim.epoch == epoch else None


class _OfPartition(Protocol):
    """What is said of one partition."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...


def _lease_of(said: api.Assignment | api.Lease) -> Lease:
    return Lease(said.soft_until_ms, said.hard_until_ms)


def _returned(holding: Holding, reason: str, detail: str = "") -> api.Release:
    return api.Release(
        topic=holding.key.topic,
        partition=holding.key.partition,
        epoch=holding.claim.epoch or 0,
        position=holding.position,
        reason=reason,
        detail=detail,
        done=holding.mark,
    )


def _unused(said: api.Assignment) -> api.Release:
    return api.Release(
        topic=said.topic,
        partition=said.partition,
        epoch=said.epoch,
        position=None,
        reason="unused",
    )
