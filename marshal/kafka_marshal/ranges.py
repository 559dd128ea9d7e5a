"""Holds partitions and their positions without fetching, for planners of ranges.

A planner, such as a Spark driver, holds partitions of a topic as a consumer does, while
other processes read the records. It asks which partitions may be processed now
(``held``), and reports which ranges have begun (``begin``) and are processed
(``commit``).
"""

import os
from collections.abc import Callable

import attrs

from kafka_marshal.closing import Closing
from kafka_marshal.engine import Holding, Subscription
from kafka_marshal.engine.holdings import ClaimSession
from kafka_marshal.engine.interfaces import ClaimEngine
from kafka_marshal.engine.replica import LastClaim
from kafka_marshal.engine.waits import await_left, await_news
from kafka_marshal.errors import (
    ClaimLost,
    DeadlineExceeded,
    InvalidTransition,
)
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.types import Key, Owner, Token, TopicPartition

ASK_MS_MAX = 10_000
CLOSE_MS_MAX = 10_000


@attrs.frozen(kw_only=True)
class HeldRange:
    """A partition that may be processed now, and where to start.

    Attributes:
        token: Fencing token of the claim.
        epoch: Offset of the claim in the log.
        owner: client_id and incarnation of the owner.
        position: Next offset that is not processed; under at most once, the next one
            that is not granted. None while the group has no position.
        uncommitted_count: Number of offsets that were begun, but neither committed nor
            given back.
        follows: Epoch of the claim before this one, None if unknown. If that claim was
            the client's own, its state of the partition is still valid: no other
            process held the partition in between.
        secret: Sent to a sidecar with requests for offsets under this claim, in hex.
        topic_id: Kafka's id of the claimed topic, in hex; empty if it is not known.
            Only ranges of that topic may be processed.
    """

    token: Token
    epoch: int
    owner: Owner
    position: int | None
    uncommitted_count: int
    follows: int | None
    secret: str = attrs.field(repr=False)
    topic_id: str = ""

    def is_of_another(self, topic_id: str) -> bool:
        """Return whether the claim is of a topic with another id (in hex)."""
        return bool(self.topic_id and topic_id) and self.topic_id != topic_id


class RangeConsumer(Closing):
    """The partitions of some topics that one client holds; made by ``Marshal.ranges``.

    The engine renews the claims in the background. One thread plans; every method may
    be called from any thread.

    Attributes:
        is_close_confirmed: False if the log did not confirm the close in time.
    """

    def __init__(
        self,
        engine: ClaimEngine,
        session: ClaimSession,
        *,
        subscription: Subscription,
        last_claims: Callable[[int], dict[TopicPartition, LastClaim]],
    ) -> None:
        self._engine = engine
        self._last_claims = last_claims
        self._session = session
        self._subscription = subscription
        self._clock = engine.context.ports.clock
        self._seen_version = -1
        self._is_closed = False
        self.is_close_confirmed = True
        self._pid = os.getpid()

    # --- planning

    def held(self, *, is_poll: bool = True) -> dict[TopicPartition, HeldRange]:
        """Return the partitions that may be processed now, in order.

        Partitions that are being drained, or whose leases are about to expire, are
        absent.

        Args:
            is_poll: Whether this call counts as a poll, so that ranges in progress
                should be finished. Drained partitions are then released at the latest
                one heartbeat interval later, as with a consumer.

        Raises:
            CoordinationError: The engine failed for good.
            IdentityConflict: Another live process uses this client_id.
        """
        self._require_usable()
        found = {}
        with self._engine.changed:
            now_ms = self._clock.now_ms()
            subscription = self._subscription
            if is_poll:
                subscription.back_at_ms = now_ms
            self._seen_version = subscription.version
            for holding in self._mine():
                drain = holding.drain
                if is_poll and drain is not None and drain.until_ms is None:
                    until_ms = now_ms + self._engine.context.heartbeat_interval_ms
                    holding.drain = attrs.evolve(drain, until_ms=until_ms)
                if holding.may_hand_out(now_ms):
                    found[holding.key.topic_partition] = self._held_range(holding)
        return dict(sorted(found.items()))

    def partitions(self) -> list[TopicPartition]:
        """Return every partition of the subscription, held or not, in order."""
        self._require_usable()
        with self._engine.changed:
            wanted = self._subscription.wanted_keys()
            return sorted(key.topic_partition for key in wanted)

    def tokens(self) -> dict[TopicPartition, Token]:
        """Return the token of every valid claim, including drained ones.

        Ranges that were begun under such a claim may be finished and committed.
        """
        self._require_usable()
        with self._engine.changed:
            now_ms = self._clock.now_ms()
            return {
                holding.key.topic_partition: holding.claim.token
                for holding in self._mine()
                if holding.claim.token is not None and holding.claim.is_valid(now_ms)
            }

    def secrets(self) -> dict[TopicPartition, str]:
        """Return the secret of every valid claim; see ``HeldRange``."""
        self._require_usable()
        with self._engine.changed:
            now_ms = self._clock.now_ms()
            return {
                holding.key.topic_partition: holding.claim.secret.hex()
                for holding in self._mine()
                if holding.claim.is_valid(now_ms)
            }

    def pending(self) -> set[TopicPartition]:
        """Return partitions whose claim is sent or won, and that are not yet ready."""
        self._require_usable()
        topics = self._subscription.topics
        with self._engine.changed:
            return {
                key.topic_partition
                for key, holding in self._session.holdings.items()
                if key.topic in topics
                and (holding.claim.is_verdict_pending or holding.claim.is_owned)
                and holding.claim.phase is not Phase.HELD
            }

    def last_claims(
        self, timeout_ms: int = ASK_MS_MAX
    ) -> dict[TopicPartition, LastClaim]:
        """Return the newest claim of each of the group's partitions, by the log.

        The result is not older than this call, and may be newer than ``tokens`` and
        ``pending``: with a sidecar those are updated by events.

        Raises:
            DeadlineExceeded: The log was not read to its end in time.
        """
        self._require_usable()
        return self._last_claims(timeout_ms)

    def begin(
        self, partition: TopicPartition, token: Token, *, first: int, end: int
    ) -> None:
        """Note that processing of the offsets from ``first`` to before ``end`` begins.

        Raises:
            ClaimLost: The claim of that token has ended, or no new work may start
                under it.
            InvalidTransition: An offset is already in progress.
        """
        self._require_usable()
        with self._engine.changed:
            holding = self._require(partition, token)
            if not holding.may_hand_out(self._clock.now_ms()):
                raise ClaimLost(
                    f"{TopicPartition(*partition)} cannot start new work under token "
                    f"{token}: its lease is about to expire, or it is being released",
                    reason="lease_expiring",
                )
            progress = holding.progress
            if not isinstance(progress, AtLeastOnce):
                # The grantees process it (PROTOCOL 6.2).
                holding.unfinished_count += max(0, end - first)
            else:
                # Offsets below a position that is already confirmed need no commit.
                first = max(first, progress.position or 0)
                if first < end:
                    progress.hand_out(first, end - 1)
            holding.handed_count += max(0, end - first)

    def commit(self, partition: TopicPartition, token: Token, *, end: int) -> None:
        """Note that all offsets below ``end`` are processed, for the next heartbeat.

        Under at most once, the grants were the commit, and this call only ends the
        ranges that were begun.

        Raises:
            ClaimLost: The claim of that token has ended. The next owner starts at the
                last confirmed position.
        """
        self._require_usable()
        with self._engine.changed:
            holding = self._require(partition, token)
            if isinstance(holding.progress, AtLeastOnce):
                holding.progress.commit_below(end)
            else:
                holding.take_back()
            self._session.end_drain(holding)

    def give_back(self, partition: TopicPartition, token: Token) -> None:
        """Note that the ranges begun in a partition were abandoned.

        Raises:
            ClaimLost: The claim of that token has ended.
        """
        self._require_usable()
        with self._engine.changed:
            holding = self._require(partition, token)
            if isinstance(holding.progress, AtLeastOnce):
                holding.forget_hands(holding.progress)
            holding.unfinished_count = 0
            self._session.end_drain(holding)

    def send(self) -> None:
        """Write every position to the log soon, without waiting."""
        self._require_usable()
        with self._engine.changed:
            self._session.beat_now()

    def flush(self, timeout_ms: int = CLOSE_MS_MAX) -> None:
        """Write every position to the log and wait until it is read back.

        Raises:
            DeadlineExceeded: The positions were not read back in time; the log may
                still get them.
        """
        self._require_usable()
        with self._engine.changed:
            seqs = self._session.beat_now()
        self._await(lambda: not self._session.is_pending(seqs), timeout_ms)

    def wait_for_change(self, timeout_ms: int) -> bool:
        """Wait until claims have changed since the last call of this or of ``held``.

        Returns:
            Whether claims have changed.
        """
        self._require_usable()
        seen = self._seen_version
        try:
            self._await(lambda: self._subscription.version != seen, timeout_ms)
        except DeadlineExceeded:
            return False
        self._seen_version = self._subscription.version
        return True

    # --- ending

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def stop(self) -> None:
        """Do nothing: a planner stops by not beginning ranges. For ``Marshal.stop``."""

    def close(self, *, release: bool = True, timeout_ms: int = CLOSE_MS_MAX) -> None:
        """Release every partition at its committed position. Idempotent.

        Args:
            release: False keeps the claims for a restart of the same client_id within
                one heartbeat interval.
            timeout_ms: How long to wait for the confirmation of the log.
        """
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        session = self._session
        with self._engine.changed:
            seqs = session.unsubscribe(self._subscription, release=release)
        self.is_close_confirmed = await_left(
            self._engine, session, seqs=seqs, wait=self._await, timeout_ms=timeout_ms
        )

    # --- look-ups

    def _mine(self) -> list[Holding]:
        topics = self._subscription.topics
        return [
            holding
            for key, holding in self._session.holdings.items()
            if key.topic in topics and holding.claim.phase is Phase.HELD
        ]

    def _held_range(self, holding: Holding) -> HeldRange:
        claim = holding.claim
        assert claim.token is not None
        assert claim.epoch is not None
        progress = holding.progress
        position = progress.position if isinstance(progress, AtLeastOnce) else None
        if self._subscription.config.is_at_most_once:
            position = self._granted_up_to(holding.key, claim.start_position)
        return HeldRange(
            token=claim.token,
            epoch=claim.epoch,
            # With a sidecar this is the owner in the log, not a name of this process.
            owner=claim.claimant.owner,
            position=position,
            uncommitted_count=holding.uncommitted_count,
            follows=self._follows(holding.key, claim.epoch),
            secret=claim.secret.hex(),
            topic_id="" if holding.topic_id is None else holding.topic_id.hex(),
        )

    def _granted_up_to(self, key: Key, start: int | None) -> int | None:
        seen = self._engine.context.glance(key)
        granted = None if seen is None else seen.position
        return start if granted is None else granted

    def _follows(self, key: Key, epoch: int) -> int | None:
        """Return the epoch of the previous claim, if this process folds the log."""
        seen = self._engine.context.glance(key)
        return seen.follows if seen is not None and seen.noted == epoch else None

    def _require(self, partition: TopicPartition, token: Token) -> Holding:
        """Return the holding of a valid claim."""
        topic, number = partition
        key = Key(self._session.claimant.group_id, topic, number)
        holding = self._session.holdings.get(key)
        now_ms = self._clock.now_ms()
        if holding is not None and holding.claim.token == token:
            if holding.claim.is_valid(now_ms):
                return holding
            # A claim reported as lost stays lost, as in the consumer.
            self._session.check_lease(holding, now_ms)
        raise ClaimLost(
            f"{TopicPartition(topic, number)} is no longer held under token {token}; "
            "its next owner starts at the last position that was confirmed",
            reason="stale_token",
        )

    def _require_usable(self) -> None:
        if self._pid != os.getpid():
            # PROTOCOL 1.7: a forked child inherits no claims.
            raise InvalidTransition(
                "these ranges belong to the parent process; open a Marshal after the "
                "fork"
            )
        failure = self._engine.failure or self._session.failure
        if failure is not None:
            raise failure
        if self._is_closed:
            raise InvalidTransition("the range consumer is closed")

    def _await(self, is_done: Callable[[], bool], timeout_ms: int) -> None:
        def look() -> bool:
            failure = self._engine.failure or self._session.failure
            if failure is not None:
                raise failure
            return is_done()

        await_news(self._engine, look, timeout_ms=timeout_ms)
