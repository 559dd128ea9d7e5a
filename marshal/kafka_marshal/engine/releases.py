"""Releases keys for certain, and leaves them to others for a while.

A release is repeated until it is read back. What was released cools down for an H
before this client claims it again.
"""

import attrs

from kafka_marshal.engine.context import Context
from kafka_marshal.engine.holding import Holding
from kafka_marshal.engine.outbox import Outbox
from kafka_marshal.protocol.losses import mark_to_tags
from kafka_marshal.protocol.records import ReleasingPartition
from kafka_marshal.protocol.state import Transition
from kafka_marshal.protocol.types import Key

REASON_CHARS_MAX = 250  # a reason is 1 KiB at most, a character 4 bytes at most


@attrs.define
class _Leave:
    epoch: int
    position: int | None
    reason: str
    successor: str | None
    mark: int | None = None
    due_ms: int = 0


class ReleaseRetrier:
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


# Given up for a reason that has nothing to do with who holds it.
ORDERLY = frozenset(
    {
        *("closed", "failed", "paused", "topic_gone"),
        # By a sidecar, whose other clients may take it at once.
        *("moved", "client_died", "client_left", "client_silent", "shutdown"),
    }
)


class ReleaseCooldowns:
    """Own released keys, and until when they are left to others.

    An H of local time, from the moment at which the release was read back: by the
    log's time it is never less (but for the drift of clocks). Whoever comes back
    as a new process has no memory of it, and needs none.
    """

    __slots__ = ("_until_ms",)

    def __init__(self) -> None:
        self._until_ms: dict[Key, int] = {}

    def begin(self, key: Key, reason: str, *, until_ms: int) -> None:
        """Note a release that is on its way."""
        if reason not in ORDERLY:
            self._until_ms[key] = until_ms

    def extend(self, key: Key, *, until_ms: int) -> None:
        """Note that a release was read back, if the key is to cool down at all."""
        if key in self._until_ms:
            self._until_ms[key] = until_ms

    def ends_by(self, transition: Transition) -> bool:
        """Take an accepted record of somebody else about a key.

        Where they had the key since, and released it for a reason that has nothing
        to do with it, our turn was over and so is theirs: nobody else may be there.

        Returns:
            Whether the key cools down no longer.
        """
        key, record = transition.key, transition.record
        if key not in self._until_ms or not isinstance(record, ReleasingPartition):
            return False
        if (record.reason or "").partition(":")[0] not in ORDERLY:
            return False
        del self._until_ms[key]
        return True

    def is_cooling(self, key: Key, now_ms: int) -> bool:
        """Return whether to leave a key to others at this local time."""
        until_ms = self._until_ms.get(key)
        return until_ms is not None and now_ms < until_ms

    def forget_past(self, now_ms: int) -> int | None:
        """Forget what is over; return when the next ends, None without any."""
        if not self._until_ms:
            return None
        self._until_ms = {k: ms for k, ms in self._until_ms.items() if now_ms < ms}
        return min(self._until_ms.values(), default=None)
