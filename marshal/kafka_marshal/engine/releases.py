"""Repeats releases until they are read back, and delays claims of released keys.

After a release this client does not claim the key again for one heartbeat interval.
"""

import attrs

from kafka_marshal.engine.context import GROWTH, Context
from kafka_marshal.engine.holding import Holding
from kafka_marshal.engine.outbox import Outbox
from kafka_marshal.protocol.layout import MOVING
from kafka_marshal.protocol.losses import mark_to_tags
from kafka_marshal.protocol.planner import DRAINED, PLANNED, SURPLUS
from kafka_marshal.protocol.plans import RESTART
from kafka_marshal.protocol.records import ReleasingPartition
from kafka_marshal.protocol.state import Transition
from kafka_marshal.protocol.types import Key, encodable

REASON_CHARS_MAX = 250  # a reason is 1 KiB at most, a character 4 bytes at most


@attrs.define(kw_only=True)
class _PendingRelease:
    partition: int
    epoch: int
    position: int | None
    reason: str
    successor: str | None
    mark: int | None = None
    grantee: bytes | None = None
    due_ms: int = 0


class ReleaseRetrier:
    """Pending releases of keys that the log still assigns to this client.

    Among them are ghosts: claims that this client gave up as unanswered and that were
    won later (PROTOCOL 5.3).
    """

    __slots__ = ("_context", "_outbox", "_pending")

    def __init__(self, context: Context, outbox: Outbox) -> None:
        self._context = context
        self._outbox = outbox
        self._pending: dict[Key, _PendingRelease] = {}

    @property
    def count(self) -> int:
        """Number of releases not read back yet."""
        return len(self._pending)

    def is_leaving(self, key: Key) -> bool:
        """Return whether a release of the key is pending."""
        return key in self._pending

    def release(
        self,
        holding: Holding,
        *,
        reason: str,
        successor: str | None = None,
        detail: str = "",
    ) -> None:
        """Release a claim, repeated until the log shows the release.

        With at-most-once delivery, it also carries the mark of finished grants.
        """
        claim = holding.claim
        if claim.epoch is None:
            return
        ghost = self._pending.get(claim.key)
        is_there = ghost is not None and ghost.partition == holding.coordinator
        if is_there and ghost is not None and ghost.epoch > claim.epoch:
            return  # a later claim of this client has replaced this one in the log
        text = f"{reason}: {encodable(detail)}"[:REASON_CHARS_MAX] if detail else reason
        pending = _PendingRelease(
            partition=holding.coordinator,
            epoch=claim.epoch,
            position=holding.position,
            reason=text,
            successor=successor,
            mark=holding.mark,
            grantee=holding.marked_grantee,
        )
        self._pending[claim.key] = pending
        self.send_due(self._context.now_ms)

    def release_ghost(self, key: Key, epoch: int, *, partition: int) -> None:
        """Release a claim that was won but is no longer wanted.

        Args:
            key: The key.
            epoch: Epoch of the claim.
            partition: Its coordinating partition.
        """
        self._pending[key] = _PendingRelease(
            partition=partition,
            epoch=epoch,
            position=None,
            reason="ghost",
            successor=None,
        )
        self.send_due(self._context.now_ms)

    def forget(self, partition: int) -> None:
        """Drop pending releases of a coordinating partition that is folded again.

        Ownership is compared again afterwards (``Rebuilder.compare``).
        """
        self._pending = {
            key: each
            for key, each in self._pending.items()
            if each.partition != partition
        }

    def send_due(self, now_ms: int) -> None:
        """Repeat releases that are unanswered for a third of a heartbeat interval."""
        for key, pending in self._pending.items():
            if now_ms >= pending.due_ms:
                pending.due_ms = now_ms + self._context.heartbeat_interval_ms // 3
                self._send(key, pending)

    def on_verdict(self, key: Key, epoch: int, *, partition: int) -> None:
        """Handle the read-back of a release: accepted or not, it is complete."""
        pending = self._pending.get(key)
        if pending is not None and (pending.partition, pending.epoch) == (
            partition,
            epoch,
        ):
            del self._pending[key]

    def on_taken(self, key: Key, *, partition: int) -> None:
        """Drop a release: another member owns the key now in this partition."""
        pending = self._pending.get(key)
        if pending is not None and pending.partition == partition:
            del self._pending[key]

    def _send(self, key: Key, pending: _PendingRelease) -> None:
        self._outbox.send(
            pending.partition,
            lambda seq: ReleasingPartition(
                **self._outbox.claimant.sender(seq),
                topic=key.topic,
                partition=key.partition,
                epoch=pending.epoch,
                position=pending.position,
                successor=pending.successor,
                reason=pending.reason,
                tags=mark_to_tags(pending.mark, grantee=pending.grantee),
            ),
            key=key,
        )


# Release reasons that are independent of the holder.
ORDERLY = frozenset(
    {
        *("closed", RESTART, "failed", "paused", "topic_gone", "fenced_by_admin"),
        *("seek_unconfirmed", MOVING, GROWTH),
        # Reasons of a sidecar, whose other clients may take the key at once.
        *("moved", "client_died", "client_left", "client_silent", "shutdown"),
    }
)
EXPECTED = ORDERLY | {SURPLUS, DRAINED, PLANNED, "given_up"}
"""Orderly reasons, and those of releases that policies and plans ask for."""


class ReleaseCooldowns:
    """Keys that this client released and does not claim again before a deadline.

    The deadline is one heartbeat interval of local time after the read-back of the
    release. In log time it is never shorter, except for clock drift. A restarted
    process does not remember these keys, and does not need to.
    """

    __slots__ = ("_until_ms",)

    def __init__(self) -> None:
        self._until_ms: dict[Key, int] = {}

    def begin(self, key: Key, reason: str, *, until_ms: int) -> None:
        """Start the cooldown of a key whose release was sent."""
        if reason not in ORDERLY:
            self._until_ms[key] = until_ms

    def extend(self, key: Key, *, until_ms: int) -> None:
        """Extend the cooldown when the release is read back, if the key has one."""
        if key in self._until_ms:
            self._until_ms[key] = until_ms

    def end(self, key: Key) -> None:
        """End the cooldown of a key: its owner names this client as successor."""
        self._until_ms.pop(key, None)

    def ends_by(self, transition: Transition) -> bool:
        """End the cooldown if another member released the key for an orderly reason.

        That member owned the key after this client, and its reason has nothing to do
        with the key: perhaps no other member is left to claim it.

        Args:
            transition: An accepted record of another member.

        Returns:
            Whether the cooldown ended.
        """
        key, record = transition.key, transition.record
        if key not in self._until_ms or not isinstance(record, ReleasingPartition):
            return False
        if (record.reason or "").partition(":")[0] not in ORDERLY:
            return False
        del self._until_ms[key]
        return True

    def is_in_cooldown(self, key: Key, now_ms: int) -> bool:
        """Return whether a key is in its cooldown at this local time."""
        until_ms = self._until_ms.get(key)
        return until_ms is not None and now_ms < until_ms

    def forget_past(self, now_ms: int) -> int | None:
        """Drop past cooldowns; return the end of the next one, None without any."""
        if not self._until_ms:
            return None
        self._until_ms = {k: ms for k, ms in self._until_ms.items() if now_ms < ms}
        return min(self._until_ms.values(), default=None)
