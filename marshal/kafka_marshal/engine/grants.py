"""Asks for ranges of offsets, and takes the verdicts (PROTOCOL 6.2)."""

from collections.abc import Mapping

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.transition import Transition
from kafka_marshal.protocol.types import Key

from .context import Context
from .holding import Holding
from .outbox import Outbox


class Granter:
    """Sends a session's ClaimingMessages. Called under the engine's lock."""

    __slots__ = ("_context", "_outbox")

    def __init__(self, context: Context, outbox: Outbox) -> None:
        self._context = context
        self._outbox = outbox

    def request(self, holding: Holding, last: int) -> None:
        """Ask for every offset up to ``last`` at most once (PROTOCOL 6.2).

        Raises:
            InvalidTransition: It is consumed otherwise, or not held.
        """
        progress = holding.progress
        claim = holding.claim
        if not isinstance(progress, AtMostOnce) or claim.epoch is None:
            raise InvalidTransition(f"{claim.key} is not consumed at most once")
        span = self._context.settled.limit("span")
        first = progress.next_first
        last = min(last, first + span - 1)
        owner = self._outbox.claimant.owner
        epoch = claim.epoch
        key = claim.key
        seq, holding.requested_at_ms = self._outbox.send(
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
            ),
            key=key,
        )
        progress.request(seq, last)

    def expire(self, holding: Holding, now_ms: int) -> None:
        """Ask anew for what got no verdict for half an H."""
        progress = holding.progress
        if isinstance(progress, AtMostOnce) and progress.outstanding_count:
            waited_ms = now_ms - holding.requested_at_ms
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
        if holding is None or not isinstance(holding.progress, AtMostOnce):
            return None
        if holding.claim.epoch != record.epoch:
            return None
        reason = holding.progress.on_verdict(transition)
        if reason in {"nothing_left", "span"}:
            head = self._context.replica_of(key).world.keys[key].next_unclaimed()
            holding.progress.next_first = max(holding.progress.next_first, head or 0)
        elif reason is not None and transition.outcome != "refused":
            holding.claim.end(Ending("grant_ignored", at_offset=transition.offset))
            return holding
        return None
