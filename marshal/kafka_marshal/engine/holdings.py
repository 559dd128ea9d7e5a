"""The keys that the application of one client holds, and how they end.

A ``ClaimSession`` wins, renews and releases claims, with an engine in this process or
over a connection to a sidecar. ``Holdings`` does what is the same in both cases: it
ends claims whose leases have expired, releases drained keys, and reports claims that
were won or have ended. All methods are called under the engine's lock.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from kafka_marshal.errors import InvalidTransition, MarshalError, PositionError
from kafka_marshal.protocol.claiming import Claimant, Ending
from kafka_marshal.protocol.state import STUCK
from kafka_marshal.protocol.types import Key

from .grants import GrantRequester
from .holding import Drain, Holding
from .interfaces import ClaimContext
from .lag import LagWatch
from .meters import SessionMeters
from .poll_watchdog import PollWatchdog
from .subscription import Subscription, SubscriptionSet

LEASE_EXPIRED = "lease_expired"


class Holdings:
    """The keys that one client wants or holds.

    Attributes:
        by_key: Every holding; the ``ClaimSession`` adds them.
        failure: Set once nothing more can be held; consumers raise it.
        lags: Where the logs of held partitions end.
        watchdog: Finds partitions whose application has stopped polling.
        meters: Counts of claims won, lost and released.
    """

    def __init__(
        self,
        context: ClaimContext,
        source: "ClaimSession",
        *,
        client_id: str,
        by_key: dict[Key, Holding],
        wanted: SubscriptionSet,
    ) -> None:
        """Begin without holdings.

        Args:
            context: State shared by all parts of one engine.
            source: Wins and releases the claims.
            client_id: The client's name.
            by_key: The client's holdings.
            wanted: The client's subscriptions and wanted keys.
        """
        self.by_key = by_key
        self.failure: MarshalError | None = None
        self.lags = LagWatch(context)
        self.watchdog = PollWatchdog(context, self.lags, source)
        self.meters = SessionMeters()
        self._context = context
        self._source = source
        self._client_id = client_id
        self._wanted = wanted

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        """The subscriptions of the client's open consumers."""
        return tuple(self._wanted.subs)

    def require_unclaimed(self, key: Key) -> None:
        """Check that a key may be claimed without a consumer.

        Raises:
            InvalidTransition: It is claimed or consumed in this process already.
        """
        if key in self.by_key or self._wanted.sub_of(key) is not None:
            raise InvalidTransition(
                f"{key.topic_partition} is already claimed by client "
                f"{self._client_id!r} in this process"
            )

    def note_won(
        self, holding: Holding, *, effect: str | None, why: str | None, log_ms: int
    ) -> None:
        """Report a claim that was won.

        Args:
            holding: Its holding.
            effect: ``claimed`` or ``resumed``.
            why: Why it was claimed.
            log_ms: Log time of the claim.
        """
        key, claim = holding.key, holding.claim
        fields = {
            "key": key,
            "client": self._client_id,
            "epoch": claim.epoch,
            "effect": effect,
            "token": claim.token,
            "why": why,
        }
        self._context.observe("claimed", fields)
        self.meters.claim_won(key, effect, before=holding.vacancy, log_ms=log_ms)

    # --- the round

    def drive(self, holding: Holding, now_ms: int) -> None:
        """Repeat requests without a verdict; release a drained key."""
        self._source.grants.expire(holding, now_ms)
        drain = holding.drain
        if drain is None:
            return
        is_due = drain.is_due(now_ms) and not holding.has_requests
        if is_due or holding.uncommitted_count == 0:
            # Report to an application that is stuck in its handler that another owner
            # may repeat its work.
            was_lost = drain.reason == STUCK and holding.uncommitted_count > 0
            self.release(holding, drain, was_lost=was_lost)

    def end_drain(self, holding: Holding) -> None:
        """Release a draining key if none of its records is uncommitted.

        Called when the last record may have been committed: the next round may be far
        away.
        """
        drain = holding.drain
        if drain is None or holding.uncommitted_count or not holding.claim.is_owned:
            return
        self.release(holding, drain)

    def look_at_ends(self, now_ms: int) -> None:
        """Look up the ends of logs; have topics with missing partitions checked."""
        self.lags.drive(self.by_key.values(), now_ms)
        self._wanted.doubt(self.lags.take_missing())

    # --- endings

    def release(
        self, holding: Holding, drain: Drain, *, was_lost: bool = False
    ) -> None:
        """Release a key at its position, or drain it while another process uses it.

        Args:
            holding: Its holding.
            drain: Reason and successor.
            was_lost: Whether to report it to the application as lost work.
        """
        if holding.claim.is_owned:
            if self._source.delays_release(holding, drain):
                return
            self._source.send_release(holding, drain)
            self._source.on_release(holding.key, drain.reason)
        self.end(holding, Ending(drain.reason, was_lost=was_lost))

    def check_lease(self, holding: Holding, now_ms: int) -> None:
        """End a claim whose hard deadline has passed, and release it in the log."""
        if holding.claim.check_lease(now_ms):
            self._source.send_release(holding, Drain(LEASE_EXPIRED, None, None))
            self.after_end(holding)

    def end(self, holding: Holding, ending: Ending) -> None:
        """End a claim without notifying its source."""
        holding.claim.end(ending)
        self.after_end(holding)

    def after_end(self, holding: Holding) -> None:
        """Forget a holding whose claim has ended, and report the ending."""
        key, claim = holding.key, holding.claim
        if self._source.remove(holding):
            self.watchdog.forget(key)
            self._wanted.bump(key)
        self._source.grants.report_unused(holding)
        if claim.ending is None or claim.epoch is None:
            return
        self._source.on_end(holding, claim.ending)
        fields = {
            "key": key,
            "client": self._client_id,
            "epoch": claim.epoch,
            "ending": claim.ending,
        }
        self._context.observe("claim_ended", fields)
        self.meters.claim_ended(key, claim.ending, tally=holding.tally)

    def fail(
        self, failure: MarshalError, *, reason: str = "failed", was_lost: bool = False
    ) -> None:
        """Release everything for good; consumers raise ``failure``.

        Args:
            failure: The error.
            reason: Reason of the releases.
            was_lost: Whether to report the keys as lost work.
        """
        if self.failure is None:
            self.failure = failure
            self._context.observe("session_failed", {"error": failure})
        for holding in list(self.by_key.values()):
            self.release(holding, Drain(reason, None, None), was_lost=was_lost)
        self._wanted.bump_all()

    def fence(self, failure: MarshalError) -> None:
        """End every claim for good without notifying the source."""
        self.failure = self.failure or failure
        for holding in list(self.by_key.values()):
            self.end(holding, Ending("fenced"))

    # --- for metrics

    def lag_of(self, key: Key) -> int | None:
        """Return how far a held key is behind the end of its log, None if unknown."""
        holding = self.by_key.get(key)
        return None if holding is None else self.lags.lag_of(holding)

    def end_of(self, key: Key) -> int | None:
        """Return where the log of a held key ended, None if not known."""
        end = self.lags.end_of(key)
        return None if end is None else end.offset


class Subleaser(Protocol):
    """Grants subleases of a session's claims to other processes (in a sidecar).

    Called under the engine's lock.
    """

    def drive(self, now_ms: int) -> None:
        """Act after each round of the session, and after it was fenced."""
        ...

    def is_reserved(self, key: Key) -> bool:
        """Return whether a process may still use a key under an earlier claim."""
        ...

    def foresee(self, sub: Subscription, keys: Collection[Key]) -> Mapping[Key, str]:
        """Return the process that each key will probably be subleased to."""
        ...

    def on_no_position(self, key: Key, error: PositionError) -> None:
        """Note that a key was released because it has no start position."""
        ...

    def has_warmed(self, key: Key) -> bool:
        """Return whether the process that a key moves to has warmed up for it."""
        ...

    def acted_on(self, generation: int) -> int:
        """Return the least Config generation that these processes act on.

        Args:
            generation: The generation that this process acts on; the result is no
                higher.
        """
        ...

    @property
    def handoff_counts(self) -> Mapping[str, int]:
        """Open handoffs between these processes, by phase."""
        ...


class ClaimSession(ABC):
    """One client of a group, which holds its claims in its ``Holdings``.

    Every method is called under the engine's lock.

    Attributes:
        claimant: Identity of the claimant in the log.
        holdings: Keys that the client contends for or holds.
        grants: Requests grants of offsets, for at-most-once delivery.
    """

    claimant: Claimant
    holdings: Mapping[Key, Holding]
    grants: GrantRequester
    _held: Holdings

    # --- for its holdings

    @abstractmethod
    def taker_of(self, sub: Subscription, topic: str) -> str | None:
        """Return the live member with most room for a partition of a topic.

        Returns None if no member has room, "" if one has and its name is unknown here.
        """

    @abstractmethod
    def stuck_count(self, key: Key) -> int:
        """Return how many owners in a row released a key because they were stuck."""

    def delays_release(self, holding: Holding, drain: Drain) -> bool:
        """Drain an owned key if another process may use it; return whether one may."""
        del holding, drain
        return False

    @abstractmethod
    def send_release(self, holding: Holding, drain: Drain) -> None:
        """Release a claim; repeat until the release is confirmed."""

    @abstractmethod
    def on_release(self, key: Key, reason: str) -> None:
        """Note that an owned key is released, before its claim ends."""

    @abstractmethod
    def remove(self, holding: Holding) -> bool:
        """Forget a holding that has ended; return whether it was there."""

    @abstractmethod
    def on_end(self, holding: Holding, ending: Ending) -> None:
        """Note why a won claim has ended."""

    # --- for consumers

    @property
    @abstractmethod
    def handoff_counts(self) -> Mapping[str, int]:
        """Open handoffs of this client by phase; empty if the sidecar does them."""

    @property
    @abstractmethod
    def leaving_count(self) -> int:
        """Number of releases that are not yet confirmed."""

    @abstractmethod
    def unsubscribe(self, subscription: Subscription, *, release: bool) -> list[int]:
        """End a subscription; return the numbers to wait for."""

    @abstractmethod
    def unwant(self, holding: Holding) -> None:
        """Stop contending for a wanted key; release it if held."""

    @abstractmethod
    def release(self, holding: Holding, *, reason: str) -> None:
        """Release a held key at its position."""

    @abstractmethod
    def seek(self, holding: Holding, position: int) -> None:
        """Move the position of a held key anywhere (PROTOCOL 6.6).

        At-least-once delivery only. ``holding.rewind`` is None again once the log has
        the position.
        """

    @abstractmethod
    def beat_now(self) -> list[int]:
        """Send every position at once; return the numbers to wait for."""

    @abstractmethod
    def is_pending(self, seqs: Iterable[int], *, late: bool = True) -> bool:
        """Return whether any of the numbers is unconfirmed.

        Args:
            seqs: The numbers.
            late: Whether records that were given up count as pending.
        """

    def require_reachable(self) -> None:  # noqa: B027 - an engine always is
        """Check that pending records may be confirmed soon.

        Raises:
            CoordinationError: The sidecar that holds the claims is gone.
        """

    @property
    def failure(self) -> MarshalError | None:
        """Set once nothing more can be held; consumers raise it."""
        return self._held.failure

    @property
    def meters(self) -> SessionMeters:
        """Counts of claims won, lost and released."""
        return self._held.meters

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        """The subscriptions of the client's open consumers."""
        return self._held.subscriptions

    def check_lease(self, holding: Holding, now_ms: int) -> None:
        """End a claim whose hard deadline has passed, and release it in the log."""
        self._held.check_lease(holding, now_ms)

    def end_drain(self, holding: Holding) -> None:
        """Release a draining key at once if none of its records is uncommitted."""
        self._held.end_drain(holding)

    def fail(self, failure: MarshalError) -> None:
        """Release everything for good; consumers raise ``failure``."""
        self._held.fail(failure)

    def lag_of(self, key: Key) -> int | None:
        """Return how far a held key is behind the end of its log, None if unknown."""
        return self._held.lag_of(key)

    def end_of(self, key: Key) -> int | None:
        """Return where the log of a held key ended, None if not known."""
        return self._held.end_of(key)
