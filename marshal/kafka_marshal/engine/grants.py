"""Requests grants of offsets, and applies the verdicts (PROTOCOL 6.2, 6.3).

Several requests may be in flight, and the fold judges each. A request without a verdict
in time is forgotten, and a later request covers the same offsets. If the first request
is granted after all, that grant counts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.granting import (
    ENDING,
    AtMostOnce,
    GrantRequest,
    GrantVerdict,
    refusal_of,
    verdict_of,
)
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.state import Transition
from kafka_marshal.protocol.types import Key, OffsetRange

from .context import Context
from .holding import Holding
from .interfaces import ClaimContext
from .outbox import Outbox


class GrantRequester(ABC):
    """Requests offsets for one client's holdings. Called under the engine's lock.

    Subclasses send requests to the log and receive verdicts.
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
            context: State shared by the parts of one client.
            holdings: The client's holdings, by key.
            on_end: Called with a holding whose claim a verdict has ended.
        """
        self._context = context
        self._holdings = holdings
        self._on_end = on_end

    @property
    @abstractmethod
    def _span(self) -> int:
        """Most offsets in one request, by the Config."""

    @property
    @abstractmethod
    def _verdict_ms_max(self) -> int:
        """How long to wait for a verdict."""

    @abstractmethod
    def _send(self, holding: Holding, request: GrantRequest) -> tuple[int, int] | None:
        """Send a request; return its number and local time, None if it has no room."""

    @abstractmethod
    def update_anchor(self, holding: Holding) -> None:
        """Update whether the log has a position of the key."""

    def request(self, holding: Holding, last: int) -> None:
        """Request a grant of every offset up to ``last`` (PROTOCOL 6.2).

        Raises:
            InvalidTransition: The key is not held, or is consumed at least once.
        """
        progress, claim = holding.progress, holding.claim
        if not isinstance(progress, AtMostOnce) or claim.epoch is None:
            raise InvalidTransition(f"{claim.key} is not consumed at most once")
        first = progress.next_first
        last = progress.last_within(last, self._span)
        if last < first:
            return  # requests in flight cover it
        request = GrantRequest(
            key=holding.key,
            owner=claim.claimant.owner,
            epoch=claim.epoch,
            grantee=progress.grantee,
            first=first,
            last=last,
            mark=progress.done,
            token=claim.token,
        )
        sent = self._send(holding, request)
        if sent is None:
            progress.forget_requests()
        else:
            seq, sent_ms = sent
            progress.request(seq, last, sent_ms=sent_ms)

    def expire(self, holding: Holding, now_ms: int) -> None:
        """Forget requests without a verdict in time, so that they are repeated."""
        progress = holding.progress
        if not isinstance(progress, AtMostOnce) or progress.oldest_sent_ms is None:
            return
        if now_ms - progress.oldest_sent_ms > self._verdict_ms_max:
            progress.forget_requests()

    def _apply(
        self,
        key: Key,
        verdict: GrantVerdict,
        *,
        grantee: bytes,
        seq: int,
        holding: Holding | None,
    ) -> None:
        """Apply the verdict on a request that was made under a holding's claim.

        Args:
            key: The key.
            verdict: The fold's verdict.
            grantee: Grantee of the request.
            seq: Its sequence number.
            holding: The holding of that claim; None if it has ended.
        """
        progress = None if holding is None else holding.progress
        if holding is None or not isinstance(progress, AtMostOnce):
            if verdict.granted is not None:
                self._report(key, [verdict.granted])
            return
        now_ms = self._context.now_ms
        reason = progress.on_verdict(verdict, grantee=grantee, seq=seq, now_ms=now_ms)
        if reason is not None and refusal_of(reason) in ENDING:
            holding.claim.end(Ending("grant_ignored", at_offset=verdict.offset))
            self._on_end(holding)

    def report_unused(self, holding: Holding) -> None:
        """Report granted offsets that will never be processed (PROTOCOL 6.2)."""
        if isinstance(holding.progress, AtMostOnce):
            self._report(holding.key, holding.progress.discard())

    def _report(self, key: Key, grants: Iterable[OffsetRange]) -> None:
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

    def update_anchor(self, holding: Holding) -> None:
        """Update whether the log has a position of the key.

        It has one once the beat with the start position is read back. The log never
        drops the position of a held key, so the flag stays set (PROTOCOL 6.3).
        """
        progress = holding.progress
        if isinstance(progress, AtMostOnce) and not progress.is_anchored:
            head = self._head(holding.key, holding.coordinator)
            progress.is_anchored = head is not None

    def _head(self, key: Key, partition: int) -> int | None:
        known = self._log.replicas[partition].world.keys.get(key)
        return None if known is None else known.next_unclaimed()

    def _send(self, holding: Holding, request: GrantRequest) -> tuple[int, int] | None:
        return self._outbox.send(
            holding.coordinator, request.to_record, key=holding.key
        )

    def on_verdict(
        self, record: ClaimingMessages, transition: Transition, *, partition: int
    ) -> None:
        """Apply the fold's verdict on an own record, read back from a partition."""
        key = Key(record.group_id, record.topic, record.partition)
        holding = self._holdings.get(key)
        if (
            holding is None
            or not isinstance(holding.progress, AtMostOnce)
            or holding.claim.epoch != record.epoch
            or holding.coordinator != partition
        ):
            holding = None
        is_own = record.grantee == self._outbox.claimant.owner.incarnation
        if is_own or holding is not None:
            verdict = verdict_of(transition, head=self._head(key, partition))
            grantee, seq = record.grantee, record.seq
            self._apply(key, verdict, grantee=grantee, seq=seq, holding=holding)
