"""Hands keys to successors that warm up first (PROTOCOL 9.5): both sides of an offer.

The owner offers a key, and continues as before until the log shows that the successor
is ready; then it drains the key as for any release. The successor calls the application
on another thread than the engine's, and reports when that call has returned. No
guarantee depends on offers or reports: the release and the next claim decide.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import attrs

from kafka_marshal.engine.context import Context
from kafka_marshal.engine.holding import Drain, Holding, OfferedKey
from kafka_marshal.engine.outbox import Outbox
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.warm_ups import WarmUp, WarmUps
from kafka_marshal.protocol.handoffs import OFFERED, READY, is_ready_for
from kafka_marshal.protocol.labels import WARMS_LABEL
from kafka_marshal.protocol.planner import Release
from kafka_marshal.protocol.records import (
    SECOND_LEVEL,
    HandoffOffer,
    HandoffReady,
    Member,
)
from kafka_marshal.protocol.settings import Settings
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.types import Key


@attrs.define(kw_only=True)
class _Offered:
    """A key that this client offers."""

    release: Release
    successor: str
    epoch: int
    sent_ms: int
    begun_ms: int
    wanted_ms: int
    within_ms: int


class Offers:
    """The owner's side: offers keys, and drains those whose successor is ready.

    Every method is called under the engine's lock.
    """

    __slots__ = (
        "_barred",
        "_context",
        "_drain",
        "_drained",
        "_holdings",
        "_living",
        "_offered_to",
        "_open",
        "_outbox",
    )

    def __init__(
        self,
        context: Context,
        outbox: Outbox,
        holdings: Mapping[Key, Holding],
        *,
        drain: Callable[[Holding, Drain], None],
    ) -> None:
        """Begin without offers.

        Args:
            context: State shared by all parts of one engine.
            outbox: Sends the records.
            holdings: Keys of this client.
            drain: Begins the planned release of a key.
        """
        self._context = context
        self._outbox = outbox
        self._holdings = holdings
        self._drain = drain
        self._open: dict[Key, _Offered] = {}
        # Keys whose successor was ready, for metrics; those released are dropped later.
        self._drained: set[Key] = set()
        # Until when a key is not offered to a client that was not ready in time.
        self._barred: dict[tuple[Key, str], int] = {}
        # Computed when first needed in a round.
        self._living: dict[str, Member] | None = None
        self._offered_to: Counter[str] | None = None

    def counts(self) -> dict[str, int]:
        """Return how many keys are offered, and how many drain for a successor."""
        ready = 0
        for key in self._drained:
            holding = self._holdings.get(key)
            ready += holding is not None and holding.drain is not None
        return {OFFERED: len(self._open), READY: ready}

    def offer(self, holding: Holding, release: Release, *, now_ms: int) -> bool:
        """Offer a key that a policy releases; return False to release it at once."""
        key, successor = release.key, release.successor
        if key in self._open:
            self._open[key].wanted_ms = now_ms
            return True
        epoch = holding.claim.epoch
        world = self._context.replica_of(key).world
        if successor is None or epoch is None or world.feature_level < SECOND_LEVEL:
            return False
        member = self._member(successor)
        if member is None or WARMS_LABEL not in member.labels:
            return False
        if now_ms < self._barred.get((key, successor), now_ms):
            return True  # the key stays here: the successor was not ready in time
        if len(self._open) >= self._offers_max or self._is_busy(successor):
            return True  # the key is offered when another offer ends
        within_ms = _settings(self._context, self._outbox).value("handoff_ms")
        self._open[key] = _Offered(
            release=release,
            successor=successor,
            epoch=epoch,
            sent_ms=now_ms,
            begun_ms=now_ms,
            wanted_ms=now_ms,
            within_ms=within_ms,
        )
        fields = {"key": key, "epoch": epoch, "successor": successor}
        self._context.observe("handoff_offered", fields)
        self._send(key, self._open[key])
        return True

    def withdraw_unwanted(self, now_ms: int) -> None:
        """Withdraw offers of keys that no policy has released for an interval.

        They stay that long, because the plan of a policy that is still computing
        releases nothing.
        """
        self._living = self._offered_to = None
        limit_ms = self._context.heartbeat_interval_ms
        for key, offered in list(self._open.items()):
            if now_ms - offered.wanted_ms > limit_ms:
                self._withdraw(key, "unwanted")

    def drive(self, now_ms: int) -> None:
        """Drain keys whose successors are ready; withdraw offers that have failed."""
        if not self._open:
            return
        self._living = None
        for key, offered in list(self._open.items()):
            holding = self._holdings.get(key)
            if (
                holding is None
                or holding.claim.epoch != offered.epoch
                or holding.drain is not None
            ):
                del self._open[key]
                continue
            self._drive(key, offered, holding, now_ms=now_ms)

    def _drive(
        self, key: Key, offered: _Offered, holding: Holding, *, now_ms: int
    ) -> None:
        replica = self._context.replica_of(key)
        known = replica.world.keys.get(key)
        member = self._member(offered.successor)
        living = None if member is None else member.incarnation
        if known is None or known.epoch != offered.epoch:
            return  # the partition of the key is being folded again
        if is_ready_for(known, epoch=offered.epoch, living=living):
            del self._open[key]
            took_ms = now_ms - offered.begun_ms
            fields = {"key": key, "successor": offered.successor, "warm_ms": took_ms}
            self._context.observe("handoff_ready", fields)
            release = offered.release
            drain = Drain(
                reason=release.reason,
                successor=offered.successor,
                until_ms=None,
                detail=release.detail,
            )
            self._drained = {each for each in self._drained if each in self._holdings}
            self._drained.add(key)
            self._drain(holding, drain)
            return
        if living is None:
            self._withdraw(key, "successor_gone")
            return
        log_ms = replica.log_ms(now_ms)
        is_shown = known.offer is not None
        if known.offer is not None and log_ms >= known.offer.until_ms:
            self._bar(key, offered, now_ms)
            self._withdraw(key, "late")
        elif not is_shown and now_ms - offered.sent_ms > self._answer_ms:
            offered.sent_ms = now_ms
            self._send(key, offered)

    @property
    def _answer_ms(self) -> int:
        return self._context.heartbeat_interval_ms // 2

    def _bar(self, key: Key, offered: _Offered, now_ms: int) -> None:
        self._barred = {pair: ms for pair, ms in self._barred.items() if now_ms < ms}
        self._barred[key, offered.successor] = now_ms + offered.within_ms

    def _withdraw(self, key: Key, reason: str) -> None:
        offered = self._open.pop(key)
        fields = {"key": key, "successor": offered.successor, "reason": reason}
        self._context.observe("handoff_withdrawn", fields)
        self._send(key, offered, is_withdrawn=True)

    def _send(self, key: Key, offered: _Offered, *, is_withdrawn: bool = False) -> None:
        self._outbox.send(
            self._context.partition_of(key),
            lambda seq: HandoffOffer(
                **self._outbox.claimant.sender(seq),
                topic=key.topic,
                partition=key.partition,
                epoch=offered.epoch,
                successor=None if is_withdrawn else offered.successor,
                within_ms=offered.within_ms,
            ),
            key=key,
        )

    def _member(self, client_id: str) -> Member | None:
        """Return the living process of a client that takes keys, or None."""
        group_id = self._outbox.claimant.group_id
        homes = [
            self._context.replicas[home].world
            for home in self._context.homes_of(group_id)
        ]
        if self._living is None:
            members = [each for home in homes for each in home.live_members(group_id)]
            members.sort(key=lambda member: member.since_offset)
            # If a client has several processes, only the last counts.
            self._living = {each.record.client_id: each.record for each in members}
        found = self._living.get(client_id)
        if found is None or found.draining:
            return None
        name = (group_id, client_id)
        is_directed = any(
            home.action_for(name, host=found.host) is not None for home in homes
        )
        return None if is_directed else found

    def _is_busy(self, successor: str) -> bool:
        """Return whether a client has as many open offers as it may get."""
        group_id = self._outbox.claimant.group_id
        if self._offered_to is None:
            self._offered_to = Counter(
                known.offer.successor
                for replica in self._context.replicas.values()
                for key, known in replica.world.keys.items()
                if known.offer is not None and key.group_id == group_id
            )
        return self._offered_to[successor] >= self._offers_max

    @property
    def _offers_max(self) -> int:
        """Most open offers of this client, and to one successor."""
        return _settings(self._context, self._outbox).value("handoffs_max")


def _settings(context: Context, outbox: Outbox) -> Settings:
    return context.settings_of(outbox.claimant.group_id)


class Warmer(WarmUps):
    """The successor's side: has the application warm up, and reports ready."""

    __slots__ = ("_is_full", "_is_new", "_outbox")

    _context: Context

    def __init__(self, context: Context, outbox: Outbox) -> None:
        super().__init__(context)
        self._outbox = outbox
        self._is_new = True
        # Whether an offer was not followed, because there were too many at a time.
        self._is_full = False

    @property
    def warming_count(self) -> int:
        """Number of offered keys that this client warms up for."""
        return len(self._tasks)

    def take(self, key: Key, sub: Subscription | None, *, now_ms: int) -> None:
        """Begin to warm up for a key if it is offered to this client.

        Before the engine is ready, the partition of the key is not known: ``look``
        finds the offer later.
        """
        if sub is None or not sub.can_warm or self._context.config is None:
            return
        known = self._context.replica_of(key).world.keys.get(key)
        if known is None or known.offer is None:
            return
        task = self._tasks.get(key)
        if not self._is_open(key, known, now_ms) or known.owner is None:
            return
        if task is not None and task.offered.epoch == known.epoch:
            return
        most = _settings(self._context, self._outbox).value("handoffs_max")
        if len(self._tasks) >= most:
            self._is_full = True
            return
        replica = self._context.replica_of(key)
        log_ms = replica.log_ms(now_ms)
        offered = OfferedKey(
            key=key,
            epoch=known.epoch,
            owner=known.owner.client_id,
            position=known.next_unclaimed(),
            until_ms=now_ms + known.offer.until_ms - log_ms,
            topic_id=known.topic_id,
        )
        self._begin(offered, sub)

    def look_again(self) -> None:
        """Look for open offers in the next round: a subscription has changed."""
        self._is_new = True

    def look(self, sub_of: Callable[[Key], Subscription | None], now_ms: int) -> None:
        """Find open offers that ``take`` left out: once after each subscription.

        It looks again when there is room for offers that exceeded the limit.
        """
        most = _settings(self._context, self._outbox).value("handoffs_max")
        has_room = self._is_full and len(self._tasks) < most
        if not (self._is_new or has_room):
            return
        self._is_new = self._is_full = False
        group_id = self._outbox.claimant.group_id
        for replica in self._context.replicas.values():
            for key, known in replica.world.keys.items():
                if key.group_id == group_id and known.offer is not None:
                    self.take(key, sub_of(key), now_ms=now_ms)

    def drive(self, now_ms: int) -> None:
        """Report keys that have warmed up; drop keys that are no longer offered."""
        for key, task in list(self._tasks.items()):
            known = self._context.replica_of(key).world.keys.get(key)
            if known is None or known.epoch != task.offered.epoch:
                self._drop(key)
                continue
            is_open = self._is_open(key, known, now_ms)
            if not (
                is_open or (task.is_ready and self._is_reserved(key, known, now_ms))
            ):
                self._drop(key)
                continue
            self._fetch(
                task,
                known.next_unclaimed(),
                topic_id=known.topic_id,
                most=_settings(self._context, self._outbox).value("handoffs_max"),
            )
            if is_open and self._is_ready(task):
                self._send_ready(task, known, now_ms)

    def _is_reserved(self, key: Key, known: KeyState, now_ms: int) -> bool:
        """Return whether a key is released to this client, and awaits its claim."""
        if known.owner is not None or known.handoff is None:
            return False
        successor, until_ms = known.handoff
        replica = self._context.replica_of(key)
        log_ms = replica.log_ms(now_ms)
        return successor == self._outbox.claimant.owner.client_id and log_ms < until_ms

    def _send_ready(self, task: WarmUp, known: KeyState, now_ms: int) -> None:
        """Report that the application is ready, until the log shows it."""
        owner, key = self._outbox.claimant.owner, task.offered.key
        if known.offer is not None and known.offer.ready == owner.incarnation:
            return  # the log has it; the owner drains now
        answer_ms = self._context.heartbeat_interval_ms // 2
        if task.sent_ms is not None and now_ms - task.sent_ms <= answer_ms:
            return
        task.sent_ms = now_ms
        self._outbox.send(
            self._context.partition_of(key),
            lambda seq: HandoffReady(
                **self._outbox.claimant.sender(seq),
                topic=key.topic,
                partition=key.partition,
                epoch=task.offered.epoch,
            ),
            key=key,
        )

    def _is_open(self, key: Key, known: KeyState, now_ms: int) -> bool:
        offer = known.offer
        if offer is None or offer.successor != self._outbox.claimant.owner.client_id:
            return False
        replica = self._context.replica_of(key)
        return replica.log_ms(now_ms) < offer.until_ms
