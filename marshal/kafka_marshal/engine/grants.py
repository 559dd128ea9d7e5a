"""Asks for ranges of offsets at most once, and applies verdicts (PROTOCOL 6.2, 6.3).

Several requests may be under way. What is granted is what the fold says of each: a
request whose verdict does not come in time is forgotten, and a later one covers the
same offsets. Should it be granted after all, that grant counts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.granting import ENDING, AtMostOnce, Grant, refusal_of
from kafka_marshal.protocol.losses import mark_to_tags
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.state import ACCEPTED, Transition
from kafka_marshal.protocol.types import Key

from .context import Context
from .holding import Holding
from .interfaces import ClaimContext
from .outbox import Outbox


class GrantRequester(ABC):
    """Requests offsets for what one client holds. Called under the engine's lock.

    How a request reaches the log, and its verdict comes back, is a subclass' business.
    """

    def __init__(
        self,
        context: ClaimContext,
        holdings: Mapping[Key, Holding],
        *,
        on_end: Callable[[Holding], None],
    ) -> None:
        """Begin without requests.

        Args:
            context: What the parts of one client share.
            holdings: What it holds, by key.
            on_end: Called with a holding whose claim a verdict has ended.
        """
        self._context = context
        self._holdings = holdings
        self._on_end = on_end

    @property
    @abstractmethod
    def _span(self) -> int:
        """Most offsets that the Config allows in one request."""

    @property
    @abstractmethod
    def _verdict_ms_max(self) -> int:
        """How long a verdict may take."""

    @abstractmethod
    def _send(self, holding: Holding, first: int, last: int) -> tuple[int, int] | None:
        """Send a request; return its number and the local time, None without room."""

    @abstractmethod
    def look(self, holding: Holding) -> None:
        """Note whether the log has a position of the key."""

    def request(self, holding: Holding, last: int) -> None:
        """Ask for every offset up to ``last`` at most once (PROTOCOL 6.2).

        Raises:
            InvalidTransition: It is consumed otherwise, or not held.
        """
        progress, claim = holding.progress, holding.claim
        if not isinstance(progress, AtMostOnce) or claim.epoch is None:
            raise InvalidTransition(f"{claim.key} is not consumed at most once")
        first = progress.next_first
        last = progress.last_within(last, self._span)
        if last < first:
            return  # what is under way must be answered first
        sent = self._send(holding, first, last)
        if sent is None:
            progress.forget_requests()
        else:
            seq, sent_ms = sent
            progress.request(seq, last, sent_ms=sent_ms)

    def expire(self, holding: Holding, now_ms: int) -> None:
        """Forget requests that got no verdict in time, so that they are repeated."""
        progress = holding.progress
        if not isinstance(progress, AtMostOnce) or progress.oldest_sent_ms is None:
            return
        if now_ms - progress.oldest_sent_ms > self._verdict_ms_max:
            progress.forget_requests()

    def _apply(
        self,
        key: Key,
        transition: Transition,
        *,
        holding: Holding | None,
        head: int | None,
        offset: int | None,
    ) -> None:
        """Apply the verdict on a request that was made under a holding's claim.

        Args:
            key: The key.
            transition: The fold's verdict.
            holding: What is held under that claim; None where it has ended.
            head: Next offset that nobody was granted, as of the verdict.
            offset: Log offset of the request; None where none was appended, because
                the claim had ended before.
        """
        progress = None if holding is None else holding.progress
        if holding is None or not isinstance(progress, AtMostOnce):
            detail = transition.detail
            if transition.outcome == ACCEPTED and detail is not None:
                self._report(key, [Grant(detail["first"], detail["last"])])
            return
        now_ms = self._context.now_ms
        reason = progress.on_verdict(transition, head=head, now_ms=now_ms)
        if reason is not None and refusal_of(reason) in ENDING:
            holding.claim.end(Ending("grant_ignored", at_offset=offset))
            self._on_end(holding)

    def report_unused(self, holding: Holding) -> None:
        """Report granted offsets that nobody will ever process (PROTOCOL 6.2)."""
        if isinstance(holding.progress, AtMostOnce):
            self._report(holding.key, holding.progress.discard())

    def _report(self, key: Key, grants: Iterable[Grant]) -> None:
        ranges = [(grant.first, grant.last) for grant in grants]
        if ranges:
            fields = {"key": key, "ranges": ranges}
            self._context.observe("grant_lost", fields)


class LogGrantRequester(GrantRequester):
    """Appends requests to the log that this process folds."""

    def __init__(
        self,
        context: Context,
        outbox: Outbox,
        holdings: Mapping[Key, Holding],
        *,
        on_end: Callable[[Holding], None],
    ) -> None:
        """Begin without requests; ``outbox`` appends them."""
        super().__init__(context, holdings, on_end=on_end)
        self._log = context
        self._outbox = outbox

    @property
    def _span(self) -> int:
        return self._log.settled.limit("span")

    @property
    def _verdict_ms_max(self) -> int:
        return self._log.heartbeat_interval_ms // 2

    def look(self, holding: Holding) -> None:
        """Note whether the log has a position of the key.

        It has one once the beat of the start is read back. Positions of a held
        key never go, so what was seen once stays true (PROTOCOL 6.3).
        """
        progress = holding.progress
        if isinstance(progress, AtMostOnce) and not progress.is_anchored:
            progress.is_anchored = self._head(holding.key) is not None

    def _head(self, key: Key) -> int | None:
        known = self._log.replica_of(key).world.keys.get(key)
        return None if known is None else known.next_unclaimed()

    def _send(self, holding: Holding, first: int, last: int) -> tuple[int, int] | None:
        progress, key, epoch = holding.progress, holding.key, holding.claim.epoch
        assert isinstance(progress, AtMostOnce)
        assert epoch is not None
        owner = self._outbox.claimant.owner
        return self._outbox.send(
            self._log.partition_of(key),
            lambda seq: ClaimingMessages(
                owner.client_id,
                key.group_id,
                owner.incarnation,
                seq,
                key.topic,
                key.partition,
                epoch,
                progress.grantee,
                first,
                last,
                mark_to_tags(progress.done),
            ),
            key=key,
        )

    def on_verdict(self, record: ClaimingMessages, transition: Transition) -> None:
        """Apply the fold's verdict on an own record that was read back."""
        key = Key(record.group_id, record.topic, record.partition)
        holding = self._holdings.get(key)
        if (
            holding is None
            or not isinstance(holding.progress, AtMostOnce)
            or holding.claim.epoch != record.epoch
        ):
            holding = None
        is_ours = record.grantee == self._outbox.claimant.owner.incarnation
        if is_ours or holding is not None:
            head, offset = self._head(key), transition.offset
            self._apply(key, transition, holding=holding, head=head, offset=offset)
