"""Session of a client whose claims a sidecar holds, in place of an engine's session.

The sidecar claims, sends heartbeats to the log and releases; the session keeps the
state that the application sees. It uses the engine's claims, holdings, delivery modes
and deadlines. A deadline that is not renewed expires here (PROTOCOL 5.2), so that the
clients of a dead sidecar stop.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from kafka_marshal.config import Delivery
from kafka_marshal.engine import Holding, StartRule, Subscription
from kafka_marshal.engine.holding import Drain, Rewind
from kafka_marshal.engine.holdings import ClaimSession, Holdings
from kafka_marshal.engine.poll_watchdog import was_stopped
from kafka_marshal.engine.session import TOPIC_GONE
from kafka_marshal.engine.subscription import SubscriptionSet
from kafka_marshal.ports import TopicInfo
from kafka_marshal.protocol.claiming import Claim, Claimant, Ending, Sublease
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.protocol.records import ScopedTopic
from kafka_marshal.protocol.state import STUCK
from kafka_marshal.protocol.types import Key, Owner, Token
from kafka_marshal.remote import api
from kafka_marshal.remote.command_queue import CommandQueue
from kafka_marshal.remote.context import RemoteContext
from kafka_marshal.remote.grants import SidecarGrantRequester
from kafka_marshal.remote.transport import error_of
from kafka_marshal.remote.warming import RemoteStandbys, RemoteWarmer

RESTARTED = "sidecar_restarted"
REASSIGNED = "reassigned"
OVER_MAX = 100_000
NO_TOKEN = Token(-1, -1, -1)


class RemoteSession(ClaimSession):
    """A client of a group behind a sidecar. Called under the engine's lock.

    Attributes:
        claimant: Claimant in the log: the sidecar.
        client_id: The client's own name.
        commands: Sends the session's commands to the sidecar. Never blocks.
    """

    commands: CommandQueue
    holdings: dict[Key, Holding]
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
        # Names of all subscriptions so far, and assignments for other names. Those
        # belong to subscriptions of the process that this one replaces; the application
        # is about to subscribe again.
        self._had: set[str] = set()
        self._early: dict[Key, api.Assignment] = {}
        # Sidecar incarnation that announced each claim.
        self._announced_by: dict[Key, Owner] = {}
        # Newest claim of each key that ended here: later events about it are ignored.
        # Tokens compare, epochs of two coordinating partitions do not (PROTOCOL 10).
        self._over: dict[Key, Token] = {}
        self._reported: dict[Key, api.Progress] = {}
        self._deadlines_ms = 0
        # Config generation of the events applied so far, and the last one reported.
        self._generation: int | None = None
        self._reported_generation: int | None = None
        # Topics that another live member could take partitions of.
        self._topics_with_takers: frozenset[str] = frozenset()
        self._stuck_counts: dict[Key, int] = {}
        self._warmer = RemoteWarmer(context, send_ready=self._send_ready)
        self._standbys = RemoteStandbys(context)
        self._ticked_ms = context.now_ms

    # --- subscriptions

    @property
    def names(self) -> dict[str, Subscription]:
        """The current subscriptions, by their names at the sidecar."""
        return dict(self._names)

    @property
    def wanted(self) -> list[Key]:
        """Keys that are wanted without a subscription."""
        return list(self._wanted.explicit)

    def subscribe(self, name: str, subscription: Subscription) -> None:
        """Begin a subscription, and apply assignments that arrived before it.

        Raises:
            InvalidTransition: A topic is consumed in this session already.
        """
        self._wanted.add(subscription, client_id=self.client_id)
        self._names[name] = subscription
        self._had.add(name)
        for key, assignment in list(self._early.items()):
            if assignment.subscription == name:
                del self._early[key]
                self._on_assigned(assignment)

    def unsubscribe(self, subscription: Subscription, *, release: bool) -> list[int]:
        """End a subscription; release its keys, or keep them.

        Also ends a subscription that the sidecar does not know, or that never began.
        """
        if subscription in self._wanted.subs:
            self._wanted.subs.remove(subscription)
        name = next((n for n, s in self._names.items() if s is subscription), None)
        if name is None:
            return []
        del self._names[name]
        returned = []
        mine = [h for h in self.holdings.values() if h.key.topic in subscription.topics]
        for holding in mine:
            if release:
                returned.append(_returned(holding, "closed"))
                self._held.end(holding, Ending("closed", was_lost=False))
            elif isinstance(holding.progress, AtLeastOnce):
                # The next consumer starts at the position, below the uncommitted
                # records of this consumer.
                holding.forget_hands(holding.progress)
        seqs = [self.commands.end(name, returned, keep=not release)]
        return seqs if release else [*seqs, *self.beat_now()]

    def want(self, key: Key) -> Holding:
        """Contend for one key without a subscription.

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
        """Stop contending for a wanted key; release it if held."""
        if holding.claim.is_owned:
            self.release(holding, reason="released")
        elif self.holdings.get(holding.key) is holding:
            self._held.end(holding, Ending("given_up", was_lost=False))

    def forget_want(self, key: Key) -> None:
        """Stop wanting a key, even if ``want`` did not complete."""
        holding = self.holdings.get(key)
        if key in self._wanted.explicit and holding is not None:
            self.unwant(holding)
        elif self._wanted.explicit.pop(key, 0) is None:
            self.commands.unclaim(key)

    # --- events and answers of the sidecar

    def on_event(self, event: api.EventBody) -> None:
        """Apply an event; a repeated event changes nothing."""
        match event:
            case api.Snapshot():
                self._on_snapshot(event)
            case api.Assignment():
                self._on_assigned(event)
            case api.Releasing():
                self._on_releasing(event)
            case api.Warm():
                self._on_warm(event)
            case api.Standby():
                self._on_standby(event)
            case api.Lost():
                self._on_lost(event)
            case api.Paused():
                self._on_paused(event)
            case api.Layout():
                self._generation = event.generation
            case api.Failed():
                self.fail(error_of(event.failure))

    def _on_snapshot(self, snapshot: api.Snapshot) -> None:
        named = {(self._key(each), each.epoch) for each in snapshot.assigned}
        for holding in list(self.holdings.values()):
            key, claim = holding.key, holding.claim
            if not claim.is_owned or (key, claim.epoch) in named:
                continue
            is_same = self._announced_by.get(key) == self.claimant.owner
            if is_same or not self._may_continue(holding):
                self._held.end(holding, Ending(REASSIGNED if is_same else RESTARTED))
        self._early.clear()
        for each in snapshot.assigned:
            self._on_assigned(each)
        draining = {(self._key(each), each.epoch) for each in snapshot.releasing}
        for holding in self.holdings.values():
            drain = holding.drain
            if drain is None or drain.reason == STUCK:
                continue
            if (holding.key, holding.claim.epoch) not in draining:
                holding.drain = None
                self._wanted.bump(holding.key)
        for leaving in snapshot.releasing:
            self._on_releasing(leaving)
        self._on_paused(snapshot.paused)
        for offered in snapshot.warming:
            self._on_warm(offered)
        self._standbys.keep(self._key(each) for each in snapshot.standbys)
        for standby in snapshot.standbys:
            self._on_standby(standby)
        self._generation = snapshot.generation

    def _on_paused(self, event: api.Paused) -> None:
        self._context.pause = event.is_paused
        self._context.scope = tuple(
            ScopedTopic(each.topic, each.partitions) for each in event.topics
        )

    def _on_assigned(self, assignment: api.Assignment) -> None:
        key = self._key(assignment)
        token = Token.parse(assignment.token)
        if token <= self._over.get(key, NO_TOKEN):
            return  # the claim has ended here, and its release is being sent
        if self._is_outdated(assignment, key):
            return  # the end of its request is being sent
        holding = self.holdings.get(key)
        if holding is not None and holding.claim.is_owned:
            if holding.claim.token == token:
                # Sent again when a deadline was shortened (PROTOCOL S4).
                holding.claim.limit(_lease_of(assignment))
                return
            if token < (holding.claim.token or NO_TOKEN):
                return  # the held claim is later than the assignment's
            if not assignment.subscription and self._may_continue(holding):
                self._continue(holding, assignment)
                return
            self._held.end(holding, Ending(REASSIGNED))
            holding = None
        if assignment.subscription and assignment.subscription not in self._had:
            self._early[key] = assignment
            return
        found = self._holding_for(assignment, key, holding)
        if found is None or self.failure is not None:
            self._over[key] = token
            self.commands.give_back([_unused(assignment)])
            return
        self._begin(found, assignment)

    def _is_outdated(self, assignment: api.Assignment, key: Key) -> bool:
        """Return whether an assignment answers a request that was withdrawn since.

        The sidecar releases the claim that this request has won, and claims the key
        again for the request that followed.
        """
        if assignment.subscription or assignment.request is None:
            return False
        return assignment.request < self.commands.want_number(key)

    def _holding_for(
        self, assignment: api.Assignment, key: Key, waiting: Holding | None
    ) -> Holding | None:
        """Return the holding for a claim, None if the key is not wanted any more."""
        if not assignment.subscription:
            return waiting if key in self._wanted.explicit else None
        sub = self._names.get(assignment.subscription)
        if sub is None or assignment.position is None:
            return None
        if key.topic not in sub.topics:
            sub.topics[key.topic] = TopicInfo(key.partition + 1, None)
        return Holding(Claim(self.claimant, key), sub.config.delivery, sub.start_rule)

    def _may_continue(self, holding: Holding) -> bool:
        """Return whether a later claim of the sidecar may continue this holding.

        True up to the old deadline for claims without consumption, which have no
        uncommitted records and return the current token with each ``check``: before
        that deadline no other process can have held the key in between (PROTOCOL 12).
        """
        is_explicit = holding.key in self._wanted.explicit
        return is_explicit and holding.claim.is_valid(self._context.now_ms)

    def _continue(self, holding: Holding, assignment: api.Assignment) -> None:
        self._note_over(holding.key, holding.claim.token)
        holding.claim.reassign(self._sublease(assignment))
        self._note_terms(holding, assignment)
        progress = holding.progress
        if isinstance(progress, AtLeastOnce) and assignment.position is not None:
            progress.position = max(assignment.position, progress.position or 0)
        self._reported.pop(holding.key, None)
        self._held.note_won(holding, effect="resumed", why=holding.why, log_ms=0)

    def _sublease(self, assignment: api.Assignment) -> Sublease:
        owner = Owner(assignment.client_id, bytes.fromhex(assignment.incarnation))
        return Sublease(
            claimant=Claimant(owner, self.claimant.group_id, master=b""),
            epoch=assignment.epoch,
            token=Token.parse(assignment.token),
            secret=bytes.fromhex(assignment.secret),
            lease=_lease_of(assignment),
            heartbeat_interval_ms=self._context.heartbeat_interval_ms,
        )

    def _note_terms(self, holding: Holding, assignment: api.Assignment) -> None:
        holding.why = assignment.why
        topic_id = assignment.topic_id
        holding.topic_id = None if topic_id is None else bytes.fromhex(topic_id)
        holding.set_by = assignment.set_by
        self._announced_by[holding.key] = self.claimant.owner

    def _begin(self, holding: Holding, assignment: api.Assignment) -> None:
        key = holding.key
        holding.claim.assign(self._sublease(assignment))
        self._note_terms(holding, assignment)
        holding.begin(assignment.position, grantee=self._grantee)
        if isinstance(holding.progress, AtMostOnce):
            holding.progress.is_anchored = assignment.is_anchored
            self.grants.on_begin(
                holding,
                epoch=assignment.epoch,
                position=holding.progress.next_first,
                follows=assignment.follows,
            )
        self.holdings[key] = holding
        self._warmer.finish(holding)
        self._standbys.on_assigned(key)
        self._context.follows[key] = assignment.follows
        self._stuck_counts[key] = assignment.stuck
        self._held.watchdog.watch(holding, self._context.now_ms)
        self._held.note_won(holding, effect="claimed", why=holding.why, log_ms=0)
        self._wanted.bump(key)

    def _send_ready(self, key: Key, epoch: int) -> None:
        self.commands.ready(key, epoch)

    def _on_warm(self, event: api.Warm) -> None:
        sub = self._names.get(event.subscription)
        self._warmer.on_warm(event, key=self._key(event), sub=sub)

    def _on_standby(self, event: api.Standby) -> None:
        sub = self._names.get(event.subscription)
        self._standbys.on_event(event, key=self._key(event), sub=sub)

    def _on_releasing(self, event: api.Releasing) -> None:
        early = self._early.pop(self._key(event), None)
        if early is not None:
            self._over[self._key(event)] = Token.parse(early.token)
            self.commands.give_back([_unused(early)])
        holding = self._find(event, event.epoch)
        if holding is None:
            return
        old = holding.drain
        until_ms = event.until_ms
        if until_ms is None and old is not None:
            until_ms = old.until_ms
        holding.drain = Drain(event.reason, event.successor, until_ms)
        if old is None:
            self._wanted.bump(holding.key)

    def _on_lost(self, event: api.Lost) -> None:
        key = self._key(event)
        early = self._early.pop(key, None)
        holding = self._find(event, event.epoch)
        if event.token is not None:
            self._note_over(key, Token.parse(event.token))
        elif early is not None and early.epoch == event.epoch:
            self._note_over(key, Token.parse(early.token))
        if holding is not None:
            ending = Ending(
                event.reason, event.winner, event.at_offset, was_lost=event.was_lost
            )
            self._held.end(holding, ending)

    def acknowledgment(self) -> int | None:
        """Return the Config generation to report, None if the sidecar knows it."""
        is_known = self._generation == self._reported_generation
        return None if is_known else self._generation

    def on_acknowledged(self, generation: int | None) -> None:
        """Record that a beat with this generation was answered; None: report again."""
        self._reported_generation = generation

    def on_deadlines(
        self, response: api.HeartbeatResponse, *, reported: Iterable[api.Progress]
    ) -> None:
        """Apply the answer to a beat.

        Args:
            response: The answer; ignored if it is older than the last answer.
            reported: Progress that the beat reported.
        """
        if response.now_ms < self._deadlines_ms:
            return
        self._deadlines_ms = response.now_ms
        self._topics_with_takers = frozenset(response.topics_with_takers)
        for each in reported:
            self._reported[self._key(each)] = each
        for deadline in response.deadlines:
            holding = self._find(deadline, deadline.epoch)
            if holding is not None:
                holding.claim.renew_until(_lease_of(deadline))

    def on_flushed(
        self, response: api.HeartbeatResponse, *, reported: Iterable[api.Progress]
    ) -> None:
        """Apply the answer to a flush; end the claims that it does not list."""
        listed = {(self._key(each), each.epoch) for each in response.deadlines}
        for each in reported:
            holding = self._find(each, each.epoch)
            is_gone = (self._key(each), each.epoch) not in listed
            if holding is not None and is_gone and holding.drain is None:
                self._held.end(holding, Ending("beat_ignored"))
        self.on_deadlines(response, reported=reported)

    # --- progress

    def progress(self, *, everything: bool) -> tuple[api.Progress, ...]:
        """Return the progress of all held keys, or of those whose progress changed."""
        found = []
        for key, holding in self.holdings.items():
            epoch = holding.claim.epoch
            if epoch is None or not holding.claim.is_owned:
                continue
            progress = api.Progress(
                topic=key.topic,
                partition=key.partition,
                epoch=epoch,
                position=holding.position,
                uncommitted_count=holding.uncommitted_count,
                handed=holding.handed_count,
                done=holding.mark,
                grantee=_grantee_of(holding),
                seek_count=holding.seek_count,
            )
            if everything or self._reported.get(key) != progress:
                found.append(progress)
        return tuple(found)

    def seek(self, holding: Holding, position: int) -> None:
        """Move the position of a held key anywhere, at least once (PROTOCOL 6.6).

        The sidecar answers the report of all positions once the log has them.
        """
        holding.seek(position)
        holding.rewind = Rewind((self.commands.flush(),))

    def _confirm_rewind(self, holding: Holding) -> None:
        """Hand out records again once the sidecar has confirmed a seek."""
        rewind = holding.rewind
        if rewind is None or self.is_pending(rewind.seqs, late=False):
            return
        if self.is_pending(rewind.seqs):  # given up without an answer
            holding.rewind = Rewind((self.commands.flush(),))
            return
        holding.rewind = None
        self._wanted.bump(holding.key)

    def beat_now(self) -> list[int]:
        """Report every position at once; return the numbers to wait for."""
        return [self.commands.flush()]

    def is_pending(self, seqs: Iterable[int], *, late: bool = True) -> bool:
        """Return whether any is unconfirmed; with ``late``, also if it was given up."""
        return self.commands.is_pending(seqs, late=late)

    def require_reachable(self) -> None:
        """Require that the sidecar runs, or may be back in a moment."""
        self.commands.require_reachable()

    @property
    def handoff_counts(self) -> Mapping[str, int]:
        """How many keys warm up here; the sidecar has the metrics of other handoffs."""
        return {"warming": self._warmer.warming_count}

    @property
    def leaving_count(self) -> int:
        """Number of releases that the sidecar has not confirmed."""
        return self.commands.returning_count

    # --- the round

    def tick(self, now_ms: int) -> bool:
        """Do everything that is due; return whether a key is being drained."""
        for holding in list(self.holdings.values()):
            if holding.claim.is_owned:
                self._held.check_lease(holding, now_ms)
            if holding.claim.is_owned:
                self._confirm_rewind(holding)
                self._held.drive(holding, now_ms)
        is_back = was_stopped(
            now_ms - self._ticked_ms,
            heartbeat_interval_ms=self._context.heartbeat_interval_ms,
        )
        for sub in self._wanted.subs:
            if is_back:
                sub.moved_at_ms = now_ms
            self._drain_stuck(sub, now_ms)
        self._ticked_ms = now_ms
        self._held.look_at_ends(now_ms)
        self._warmer.drive(now_ms)
        self._standbys.drive()
        for sub in self._wanted.subs:
            if sub.has_doubts:
                self._check_topics(sub, now_ms)
        return any(holding.drain is not None for holding in self.holdings.values())

    def _drain_stuck(self, sub: Subscription, now_ms: int) -> None:
        """Drain the partitions that the application has stopped polling."""
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
        """Return "" if another live member could take a partition of a topic."""
        del sub
        return "" if topic in self._topics_with_takers else None

    def stuck_count(self, key: Key) -> int:
        """Return how many owners in a row gave a key up because they were stuck."""
        return self._stuck_counts.get(key, 0)

    def _check_topics(self, sub: Subscription, now_ms: int) -> None:
        """Release the keys of a topic that was deleted, or created again."""
        changes = sub.refresh(self._context, now_ms, taken=set())
        if not (changes.has_changed or changes.ended):
            return
        for holding in [h for h in self.holdings.values() if h.key.topic in sub.topics]:
            if holding.claim.is_owned and sub.is_over(holding):
                self.release(holding, reason=TOPIC_GONE)
        for topic in changes.ended:
            if sub.is_gone(topic):
                sub.drop_topic(topic)

    # --- endings

    def release(self, holding: Holding, *, reason: str) -> None:
        """Release a held key at its position."""
        self._held.release(holding, Drain(reason, None, None))

    def send_release(self, holding: Holding, drain: Drain) -> None:
        """Return a claim to the sidecar."""
        self.commands.give_back([_returned(holding, drain.reason, drain.detail)])

    def on_release(self, key: Key, reason: str) -> None:
        """Do nothing: the sidecar delays the next claim of the key."""

    def remove(self, holding: Holding) -> bool:
        """Forget a holding that has ended; return whether it was there."""
        key = holding.key
        was_there = self.holdings.get(key) is holding
        if was_there:
            del self.holdings[key]
            self._stuck_counts.pop(key, None)
            self._reported.pop(key, None)
            self._announced_by.pop(key, None)
            self._context.heads.pop(key, None)
            self._context.follows.pop(key, None)
        if self._wanted.explicit.pop(key, 0) is None:
            self.commands.unclaim(key)
        return was_there

    def on_end(self, holding: Holding, ending: Ending) -> None:
        """Ignore later events of this claim."""
        del ending
        self._note_over(holding.key, holding.claim.token)

    def after_verdict(self, holding: Holding) -> None:
        """Remove a holding whose claim a verdict has ended."""
        self._held.after_end(holding)

    def _note_over(self, key: Key, token: Token | None) -> None:
        over = self._over
        over[key] = max(token or NO_TOKEN, over.pop(key, NO_TOKEN))
        if len(over) > OVER_MAX:
            del over[next(iter(over))]

    def begin_close(self, *, release: bool) -> tuple[api.Release, ...]:
        """Drop all subscriptions; return the held keys with their final positions."""
        left = [h for h in self.holdings.values() if h.claim.is_owned]
        reason = "closed" if release else "kept"
        returned = tuple(_returned(holding, reason) for holding in left)
        self._wanted.explicit.clear()
        for holding in list(self.holdings.values()):
            self._held.end(holding, Ending("closed", was_lost=False))
        return returned

    # --- look-ups

    def _key(self, message: "_PartitionMessage") -> Key:
        return Key(self.claimant.group_id, message.topic, message.partition)

    def _find(self, message: "_PartitionMessage", epoch: int) -> Holding | None:
        """Return the holding of a key under exactly that claim."""
        holding = self.holdings.get(self._key(message))
        if holding is None or not holding.claim.is_owned:
            return None
        return holding if holding.claim.epoch == epoch else None


class _PartitionMessage(Protocol):
    """A message about one partition."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...


def _lease_of(lease: api.Assignment | api.Lease) -> Lease:
    return Lease(lease.soft_until_ms, lease.hard_until_ms)


def _returned(holding: Holding, reason: str, detail: str = "") -> api.Release:
    return api.Release(
        topic=holding.key.topic,
        partition=holding.key.partition,
        epoch=holding.claim.epoch or 0,
        position=holding.position,
        reason=reason,
        detail=detail,
        done=holding.mark,
        grantee=_grantee_of(holding),
    )


def _grantee_of(holding: Holding) -> str | None:
    progress = holding.progress
    return progress.grantee.hex() if isinstance(progress, AtMostOnce) else None


def _unused(assignment: api.Assignment) -> api.Release:
    return api.Release(
        topic=assignment.topic,
        partition=assignment.partition,
        epoch=assignment.epoch,
        position=None,
        reason="unused",
    )
