"""Asks for ranges of offsets, and takes the verdicts (PROTOCOL 6.2, 6.3)."""

from collections.abc import Iterable, Mapping

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.granting import ENDING, AtMostOnce, Grant, refusal_of
from kafka_marshal.protocol.losses import mark_to_tags
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.transition import ACCEPTED, Transition
from kafka_marshal.protocol.types import Key

from .context import Context
from .faces import ContextFace
from .holding import Holding
from .outbox import Outbox


class Granter:
    """Sends a session's ClaimingMessages. Called under the engine's lock."""

    __slots__ = ("_context", "_outbox")

    def __init__(self, context: Context, outbox: Outbox) -> None:
        self._context = context
        self._outbox = outbox

    def look(self, holding: Holding) -> None:
        """Note whether the log has a position of the key.

        It has one once the beat of the start is read back. Positions of a held
        key never go, so what was seen once stays true (PROTOCOL 6.3).
        """
        progress = holding.progress
        if isinstance(progress, AtMostOnce) and not progress.is_anchored:
            progress.is_anchored = self._head(holding.key) is not None

    def _head(self, key: Key) -> int | None:
        known = self._context.replica_of(key).world.keys.get(key)
        return None if known is None else known.next_unclaimed()

    def request(self, holding: Holding, last: int) -> None:
        """Ask for every offset up to ``last`` at most once (PROTOCOL 6.2).

        Raises:
            InvalidTransition: It is consumed otherwise, or not held.
        """
        progress = holding.progress
        claim = holding.claim
        if not isinstance(progress, AtMostOnce) or claim.epoch is None:
            raise InvalidTransition(f"{claim.key} is not consumed at most once")
        first = progress.next_first
        last = progress.last_within(last, self._context.settled.limit("span"))
        if last < first:
            return  # what is under way must be answered first
        owner = self._outbox.claimant.owner
        epoch = claim.epoch
        key = claim.key
        seq, sent_ms = self._outbox.send(
            self._context.partition_of(key),
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
        progress.request(seq, last, sent_ms=sent_ms)

    def expire(self, holding: Holding, now_ms: int) -> None:
        """Ask anew for what got no verdict for half an H."""
        progress = holding.progress
        if isinstance(progress, AtMostOnce) and progress.oldest_sent_ms is not None:
            waited_ms = now_ms - progress.oldest_sent_ms
            if waited_ms > self._context.heartbeat_interval_ms // 2:
                progress.forget_requests()

    def on_verdict(
        self,
        record: ClaimingMessages,
        transition: Transition,
        *,
        holdings: Mapping[Key, Holding],
    ) -> Holding | None:
        """Take the fold's verdict; return the holding whose claim it ended."""
        key = Key(record.group_id, record.topic, record.partition)
        holding = holdings.get(key)
        progress = None if holding is None else holding.progress
        if (
            holding is None
            or not isinstance(progress, AtMostOnce)
            or holding.claim.epoch != record.epoch
        ):
            self._on_late(key, record, transition)
            return None
        reason = progress.on_verdict(
            transition, head=self._head(key), now_ms=self._context.now_ms
        )
        if reason is not None and refusal_of(reason) in ENDING:
            holding.claim.end(Ending("grant_ignored", at_offset=transition.offset))
            return holding
        return None

    def _on_late(
        self, key: Key, record: ClaimingMessages, transition: Transition
    ) -> None:
        """Report what was granted under a claim that was given up here meanwhile."""
        is_ours = record.grantee == self._outbox.claimant.owner.incarnation
        detail = transition.detail
        if is_ours and transition.outcome == ACCEPTED and detail is not None:
            self._report(key, [Grant(detail["first"], detail["last"])])

    def report_unused(self, holding: Holding) -> None:
        """Tell which granted offsets nobody will ever process (PROTOCOL 6.2)."""
        if isinstance(holding.progress, AtMostOnce):
            self._report(holding.key, holding.progress.discard())

    def _report(self, key: Key, grants: Iterable[Grant]) -> None:
        report_unprocessed(self._context, key, grants=grants)


def report_unprocessed(
    context: ContextFace, key: Key, *, grants: Iterable[Grant]
) -> None:
    """Tell of granted offsets that nobody will ever process, if there are any."""
    ranges = [(grant.first, grant.last) for grant in grants]
    if ranges:
        context.observe("grant_lost", {"key": key, "ranges": ranges})
