"""Pauses a group in all coordinating partitions and renews it (PROTOCOL 8.1)."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kafka_marshal.engine.follower import Awaited, Follower
from kafka_marshal.errors import (
    ClaimRejected,
    DeadlineExceeded,
    GroupPaused,
    LogUnwritable,
)
from kafka_marshal.ports import Clock
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import ReleaseGroup
from kafka_marshal.protocol.state import ACCEPTED
from kafka_marshal.protocol.types import Key

POLL_MS = 100
RENEWALS_PER_PAUSE = 3
ENDED = 0
"""Expiry of a record that ends a pause."""


class Sender:
    """The sender of records about groups; it numbers them."""

    def __init__(self, client_id: str) -> None:
        """Begin a new incarnation.

        Args:
            client_id: Name of the sender in the log.
        """
        self.client_id = client_id
        self._incarnation = secrets.token_bytes(16)
        self._seq = 0

    def fields(self, group_id: str) -> dict[str, Any]:
        """Return the leading fields of the next record about a group."""
        self._seq += 1
        return {
            "client_id": self.client_id,
            "group_id": group_id,
            "incarnation": self._incarnation,
            "seq": self._seq,
        }

    def record(
        self, group_id: str, op_id: bytes, *, expire_ms: int, reason: str | None
    ) -> ReleaseGroup:
        """Return the next record, which pauses a group until ``expire_ms``."""
        return ReleaseGroup(
            **self.fields(group_id),
            op_id=op_id,
            msg_expire_time=expire_ms,
            reason=reason,
        )


class PauseOperation:
    """One pause of a group, renewed while its caller waits.

    For one thread. If the process dies, the pause ends by itself, at most its length
    after the last renewal.

    Attributes:
        op_id: Identifies the operation.
    """

    def __init__(
        self,
        follower: Follower,
        clock: Clock,
        sender: Sender,
        *,
        group_id: str,
        partition_count: int,
        for_ms: int,
        reason: str | None = None,
        op_id: bytes | None = None,
    ) -> None:
        """Prepare a pause; ``begin`` writes it.

        Args:
            follower: Follows the log, and has read it to its end.
            clock: Local and wall time.
            sender: Sender of the records.
            group_id: The group.
            partition_count: Number of coordinating partitions.
            for_ms: Length of the pause, and of each renewal.
            reason: Stored in the log, for people.
            op_id: The operation that the pause belongs to; by default a new one.
        """
        self.op_id = secrets.token_bytes(16) if op_id is None else op_id
        self._follower = follower
        self._clock = clock
        self._sender = sender
        self._group_id = group_id
        self._for_ms = for_ms
        self._reason = reason
        self._home = home_partition(group_id, partition_count=partition_count)
        self._others = [t for t in range(partition_count) if t != self._home]
        self._open: dict[int, Awaited] = {}
        self._paused: set[int] = set()
        self._due_ms = 0

    def begin(self, timeout_ms: int) -> None:
        """Pause the group: in its home partition, then in all others.

        Of two concurrent operations, the one that the home partition accepts wins; the
        other writes nothing else. If another partition refuses, the pause is ended.

        Raises:
            GroupPaused: Another operation holds the group.
            ClaimRejected: The pause was ended, or ran out, before it was complete.
            LogUnwritable: A partition refuses the operation.
            DeadlineExceeded: Not all partitions answered within ``timeout_ms``.
        """
        self._due_ms = self._next_due_ms()
        for partitions in ([self._home], self._others):
            for t in partitions:
                self._send(t)
            if not self.hold_until(self._is_paused_in(partitions), timeout_ms):
                raise DeadlineExceeded(
                    f"not every coordinating partition accepted the pause of group "
                    f"{self._group_id!r} within {timeout_ms} ms; it ends by itself, or "
                    f"with: marshal groups resume {self._group_id}"
                )

    def hold_until(self, is_done: Callable[[], bool], timeout_ms: int) -> bool:
        """Renew the pause until ``is_done``; return False after ``timeout_ms``.

        Raises:
            ClaimRejected: Another operation ended the pause, or it ran out.
            LogUnwritable: A partition refuses it.
        """
        deadline_ms = self._clock.now_ms() + timeout_ms
        while True:
            self._handle_verdicts(timeout_ms)
            if is_done():
                return True
            now_ms = self._clock.now_ms()
            if now_ms >= deadline_ms:
                return False
            if now_ms >= self._due_ms:
                self._renew()
            self._follower.step(min(POLL_MS, deadline_ms - now_ms))

    def _is_paused_in(self, partitions: Sequence[int]) -> Callable[[], bool]:
        return lambda: self._paused.issuperset(partitions)

    def _next_due_ms(self) -> int:
        return self._clock.now_ms() + self._for_ms // RENEWALS_PER_PAUSE

    def _renew(self) -> None:
        """Renew the pause in every partition without a record in flight."""
        self._due_ms = self._next_due_ms()
        for t in sorted(self._paused | self._open.keys()):
            awaited = self._open.get(t)
            if awaited is None or awaited.append.error() is not None:
                self._send(t)

    def _send(self, partition: int) -> None:
        world = self._follower.replicas[partition].world
        now_ms = max(self._clock.wall_ms(), world.append_time_ms)
        self._open[partition] = self._write(partition, now_ms + self._for_ms)

    def _write(self, partition: int, expire_ms: int) -> Awaited:
        record = self._sender.record(
            self._group_id, self.op_id, expire_ms=expire_ms, reason=self._reason
        )
        return self._follower.append(partition, record)

    def _handle_verdicts(self, timeout_ms: int) -> None:
        self._follower.require_folding(self._open.values())
        for t, awaited in list(self._open.items()):
            verdict = awaited.transition
            if verdict is None:
                continue
            del self._open[t]
            if verdict.outcome == ACCEPTED:
                self._paused.add(t)
            elif verdict.reason == "expired":
                self._send(t)  # it took longer than the pause lasts
            else:
                self._paused.discard(t)
                error = refusal(self._follower, awaited, group_id=self._group_id)
                self._undo(timeout_ms)
                raise error

    def _undo(self, timeout_ms: int) -> None:
        """End the pause: in the home partition last, which keeps other pauses out."""
        left = self._paused | self._open.keys()
        self._open = {}
        for partitions in (left - {self._home}, left & {self._home}):
            sent = [self._write(t, ENDED) for t in sorted(partitions)]
            self._follower.await_all(sent, timeout_ms)


def refusal(
    follower: Follower, awaited: Awaited, *, group_id: str
) -> GroupPaused | ClaimRejected | LogUnwritable:
    """Return the error for a record about a group that was refused."""
    verdict, world = awaited.transition, follower.replicas[awaited.partition].world
    reason = "unknown" if verdict is None else verdict.reason
    pause = world.active_pause(group_id)
    if pause is not None:
        return GroupPaused(
            f"group {group_id!r} is held by another operation of "
            f"{pause.client_id!r} ({reason}); end it first with: marshal "
            f"groups resume {group_id}",
            until_ms=pause.until_ms,
            by=pause.client_id,
        )
    if reason == "op_over":
        return ClaimRejected(
            f"the pause of group {group_id!r} is over in coordinating partition "
            f"{awaited.partition}: another operation ended it, or a renewal took "
            "longer than it lasts; pause the group again, for longer",
            reason="op_over",
        )
    return LogUnwritable(
        f"coordinating partition {awaited.partition} refused the operation "
        f"on group {group_id!r} ({reason}); see: marshal topic info"
    )


def held_keys(follower: Follower, group_id: str, *, now_ms: int) -> tuple[Key, ...]:
    """Return the keys of a group that are owned and not stale, by estimate.

    Args:
        follower: Follows the log.
        group_id: The group.
        now_ms: Local time.
    """
    found = []
    for replica in follower.replicas.values():
        log_ms = replica.world.now_ms + replica.elapsed_ms(now_ms)
        for key, known in replica.world.keys.items():
            is_alive = known.freshness(log_ms) is not Freshness.STALE
            if key.group_id == group_id and known.owner is not None and is_alive:
                found.append(key)
    return tuple(sorted(found))


def in_order(partitions: Iterable[int], *, home: int) -> list[int]:
    """Return partitions in the order for ending a pause: home last."""
    return sorted(partitions, key=lambda t: (t == home, t))
