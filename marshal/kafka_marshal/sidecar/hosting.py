"""The session of a group whose claims are used by other processes.

It claims, beats and releases as any other. The one difference: what a client has is
not released before that has confirmed, or cannot use it any more.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from kafka_marshal.engine import Context, Delivery, Holding, Session, StartRule
from kafka_marshal.engine.holding import Drain
from kafka_marshal.engine.holdings import LEASE_EXPIRED
from kafka_marshal.engine.releases import ReleaseRetrier
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.errors import MarshalError, PositionError
from kafka_marshal.protocol.claiming import Claimant, Ending, PreviousLife
from kafka_marshal.protocol.planner import Plan
from kafka_marshal.protocol.types import Key

NAME_CHARS_MAX = 60

OnRound = Callable[[int], None]
OnNoPosition = Callable[[Key, PositionError], None]
Foresee = Callable[[Subscription, Iterable[Key]], Mapping[Key, str]]


class _ReleaseRetrier(ReleaseRetrier):
    """Releases no claim whose key a client may use by an earlier one."""

    __slots__ = ("is_reserved",)

    is_reserved: Callable[[Key], bool]

    def release_ghost(self, key: Key, epoch: int) -> None:
        """Release a claim that was won unwanted, or have it go stale."""
        if not self.is_reserved(key):
            super().release_ghost(key, epoch)


class HostSession(Session):
    """A session that lends what it holds. Called under the engine's lock.

    Attributes:
        on_round: Called with local time after each round.
        is_reserved: Tells whether a client of an earlier claim may still use a key.
        on_no_position: Called with a key that nobody may say where to begin, once
            it was given up.
        foresee: Tells which client a key will probably be for.
    """

    def __init__(
        self,
        context: Context,
        claimant: Claimant,
        *,
        host: str = "",
        lives: tuple[PreviousLife, ...] = (),
    ) -> None:
        super().__init__(context, claimant, host=host, lives=lives)
        self.on_round: OnRound = lambda _: None
        self.is_reserved: Callable[[Key], bool] = lambda _: False
        self.on_no_position: OnNoPosition = lambda _, __: None
        self.foresee: Foresee = lambda _, __: {}
        self._foreseen: Mapping[Key, str] = {}
        leaver = self._releases = _ReleaseRetrier(context, self._outbox)
        leaver.is_reserved = self._may_be_used

    def tick(self, now_ms: int) -> None:
        """Do everything that is due, then let the clients know."""
        super().tick(now_ms)
        self.on_round(now_ms)

    def fence(self, failure: MarshalError) -> None:
        """End everything without a word to the log; there are no more rounds."""
        super().fence(failure)
        self.on_round(self._context.now_ms)

    def fail(self, failure: MarshalError) -> None:
        """End everything for good; what is wrong with one key ends that key alone."""
        if isinstance(failure, PositionError) and failure.partition is not None:
            key = Key(self.claimant.group_id, *failure.partition)
            holding = self.holdings.get(key)
            if holding is not None:
                self.release(holding, reason="failed")
                self.on_no_position(key, failure)
                return
        super().fail(failure)

    def reconsider(self) -> None:
        """Look at what is wanted at once: who wants it has changed."""
        self._announcer.announce_soon()
        self._policy_at_ms = 0

    # --- what is lent

    def delays_release(self, holding: Holding, drain: Drain) -> bool:
        """Have a key given back first by whoever may use it; return whether any may."""
        if not self._is_in_use(holding):
            return False
        if holding.drain is None:
            self._drain(holding, drain)
        return True

    def send_release(self, holding: Holding, drain: Drain) -> None:
        """Write a release, unless a lease has ended that a client may count longer.

        A client that was told of a longer deadline, before a clock stepped, may not
        know yet: the log finds the claim stale.
        """
        if drain.reason != LEASE_EXPIRED or not self._is_in_use(holding):
            super().send_release(holding, drain)

    def _may_be_used(self, key: Key) -> bool:
        return self.is_reserved(key)

    def _is_in_use(self, holding: Holding) -> bool:
        """Return whether a client may use a key: by this claim, or one resumed."""
        return holding.is_lent or self.is_reserved(holding.key)

    def drain(
        self,
        holding: Holding,
        *,
        reason: str,
        successor: str | None = None,
        detail: str = "",
    ) -> None:
        """Have a key given back; one that is on its way out stays on it."""
        if holding.drain is None:
            self._drain(holding, Drain(reason, successor, None, detail))

    def drop(self, subscription: Subscription, *, reason: str) -> None:
        """Pursue a subscription no more; say why what it has is given up."""
        mine = [h for h in self.holdings.values() if h.key.topic in subscription.topics]
        for holding in mine:
            if holding.claim.is_owned:
                # What is lent goes when whoever has it has confirmed.
                self.release(holding, reason=reason)
        self.unsubscribe(subscription, release=True)

    def drop_want(self, holding: Holding, *, reason: str) -> None:
        """Want a key no more; say why it is given up."""
        if holding.claim.is_owned:
            self.release(holding, reason=reason)
        self.unwant(holding)

    def forget_want(self, key: Key) -> None:
        """Want a key no more that is not held: its topic may be consumed then."""
        self._wanted.explicit.pop(key, None)

    def abandon(self, holding: Holding, *, reason: str) -> None:
        """End a claim here and leave the log to find it stale."""
        self._held.end(holding, Ending(reason))

    def check_clock(self, partitions: Collection[int], now_ms: int) -> None:
        """Shorten leases where a leader's clock stepped, and have that told."""
        held = self.holdings.values()
        if self._heartbeater.check_clock(held, partitions, now_ms=now_ms):
            self._index.recheck_leases()
            self._wanted.bump_all()

    def is_leaving(self, keys: Iterable[Key]) -> bool:
        """Return whether a release of any of these awaits its read-back."""
        return not self._is_mute and any(self._releases.is_leaving(key) for key in keys)

    # --- for people

    def _follow(self, sub: Subscription, plan: Plan, now_ms: int) -> None:
        self._foreseen = self.foresee(sub, plan.claim) if plan.claim else {}
        super()._follow(sub, plan, now_ms)

    def _contend_for(
        self, key: Key, delivery: Delivery, rule: StartRule, *, why: str
    ) -> Holding:
        name = self._foreseen.get(key)
        if name is not None:
            why = f"for {name[:NAME_CHARS_MAX]}; {why}"
        return super()._contend_for(key, delivery, rule, why=why)
