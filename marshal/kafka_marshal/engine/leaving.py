"""Gives keys up for certain: a release is repeated until it is read back."""

import attrs

from kafka_marshal.protocol.losses import mark_to_tags
from kafka_marshal.protocol.records import ReleasingPartition
from kafka_marshal.protocol.types import Key

from .context import Context
from .holding import Holding
from .outbox import Outbox

REASON_CHARS_MAX = 250  # a reason is 1 KiB at most, a character 4 bytes at most


@attrs.define
class _Leave:
    epoch: int
    position: int | None
    reason: str
    successor: str | None
    mark: int | None = None
    due_ms: int = 0


class Leaver:
    """Keys that the log calls ours and that we no longer use.

    Among them are ghosts: claims that were given up as unanswered and won all
    the same (PROTOCOL 5.3).
    """

    __slots__ = ("_context", "_leaving", "_outbox")

    def __init__(self, context: Context, outbox: Outbox) -> None:
        self._context = context
        self._outbox = outbox
        self._leaving: dict[Key, _Leave] = {}

    @property
    def count(self) -> int:
        """Number of releases that have not been read back."""
        return len(self._leaving)

    def is_leaving(self, key: Key) -> bool:
        """Return whether a release of the key awaits its read-back."""
        return key in self._leaving

    def release(
        self,
        holding: Holding,
        *,
        reason: str,
        successor: str | None = None,
        detail: str = "",
    ) -> None:
        """Release a claim, now and again until the log shows it.

        At most once, the release also tells how far the application was.
        """
        claim = holding.claim
        if claim.epoch is None:
            return
        ghost = self._leaving.get(claim.key)
        if ghost is not None and ghost.epoch > claim.epoch:
            return  # the log has forgotten this claim for one that is ours as well
        told = f"{reason}: {detail}"[:REASON_CHARS_MAX] if detail else reason
        leave = _Leave(claim.epoch, holding.position, told, successor, holding.mark)
        self._leaving[claim.key] = leave
        self.send_due(self._context.now_ms)

    def release_ghost(self, key: Key, epoch: int) -> None:
        """Release a claim that was won without being wanted any more."""
        self._leaving[key] = _Leave(epoch, None, "ghost", None)
        self.send_due(self._context.now_ms)

    def forget(self, partition: int) -> None:
        """Forget releases to a T that is folded anew; what is ours then is told."""
        place_of = self._context.partition_of
        left = {k: v for k, v in self._leaving.items() if place_of(k) != partition}
        self._leaving = left

    def send_due(self, now_ms: int) -> None:
        """Send what has not been answered for H/3."""
        for key, leave in self._leaving.items():
            if now_ms >= leave.due_ms:
                leave.due_ms = now_ms + self._context.heartbeat_interval_ms // 3
                self._send(key, leave)

    def on_verdict(self, key: Key, epoch: int) -> None:
        """Take the read-back of a release: accepted or not, it is over."""
        leave = self._leaving.get(key)
        if leave is not None and leave.epoch == epoch:
            del self._leaving[key]

    def on_taken(self, key: Key) -> None:
        """Take that somebody else owns the key now."""
        self._leaving.pop(key, None)

    def _send(self, key: Key, leave: _Leave) -> None:
        owner = self._outbox.claimant.owner
        self._outbox.send(
            self._context.partition_of(key),
            lambda seq: ReleasingPartition(
                owner.client_id,
                key.group_id,
                owner.incarnation,
                seq,
                key.topic,
                key.partition,
                leave.epoch,
                leave.position,
                leave.successor,
                leave.reason,
                mark_to_tags(leave.mark),
            ),
            key=key,
        )
