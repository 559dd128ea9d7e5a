"""Indexes a session's holdings by state, so that a round visits only a few of them.

Nearly all of thousands of held keys only wait for their next heartbeat. A round that
visited each of them would cost more than everything else it does.
"""

from typing import TYPE_CHECKING

from kafka_marshal.config import Delivery
from kafka_marshal.ports import FAR_MS

from .holding import Holding
from .replica import Changes

if TYPE_CHECKING:
    from kafka_marshal.protocol.types import Key

LOOKUP_POLL_MS = 5


class ClaimIndex:
    """All keys that a session contends for or holds.

    Attributes:
        all: Every holding, by key.
        contending: Holdings that the log, as far as it is read, does not assign to
            this client.
        active: Owned holdings that are starting, seeking or draining, and all owned
            holdings with at-most-once delivery: their grant requests may go unanswered.
        changes: Keys whose holdings were added, won or removed, or began to drain.
        won_count: Number of claims ever won.
    """

    __slots__ = (
        "_by_epoch",
        "_expire_at_ms",
        "active",
        "all",
        "changes",
        "contending",
        "won_count",
    )

    def __init__(self) -> None:
        self.all: dict[Key, Holding] = {}
        self.contending: dict[Key, Holding] = {}
        self.active: dict[Key, Holding] = {}
        self.changes = Changes()
        self.won_count = 0
        self._by_epoch: dict[tuple[int, int | None], Holding] = {}
        self._expire_at_ms = FAR_MS

    def add(self, holding: Holding) -> None:
        """Add a key to contend for."""
        self.all[holding.key] = self.contending[holding.key] = holding
        self.changes.note(holding.key)

    def won(self, holding: Holding, partition: int) -> None:
        """Record a won claim, on coordinating partition ``partition``."""
        holding.coordinator = partition
        self.contending.pop(holding.key, None)
        self.mark_active(holding)
        self.won_count += 1
        self._by_epoch[partition, holding.claim.epoch] = holding
        until_ms = holding.claim.lease.hard_until_ms
        self._expire_at_ms = min(self._expire_at_ms, until_ms)

    def remove(self, holding: Holding) -> bool:
        """Remove a holding that has ended; return whether it was present."""
        key = holding.key
        place = (holding.coordinator, holding.claim.epoch)
        if self._by_epoch.get(place) is holding:
            del self._by_epoch[place]
        if self.all.get(key) is not holding:
            return False
        del self.all[key]
        self.changes.note(key)
        self.contending.pop(key, None)
        self.active.pop(key, None)
        return True

    def of_epoch(self, partition: int, epoch: int) -> Holding | None:
        """Return the holding with an epoch of a coordinating partition."""
        return self._by_epoch.get((partition, epoch))

    def mark_active(self, holding: Holding) -> None:
        """Visit an owned holding in each round until ``compact`` finds it idle."""
        self.active[holding.key] = holding
        self.changes.note(holding.key)

    def mark_all_active(self) -> None:
        """Visit every owned holding in the next round."""
        self.active = {k: h for k, h in self.all.items() if h.claim.is_owned}

    def compact(self) -> None:
        """Drop idle holdings from ``active``."""
        if self.active:
            self.active = {k: h for k, h in self.active.items() if _is_active(h)}

    def expired(self, now_ms: int) -> list[Holding]:
        """Return the owned holdings whose hard stop has passed.

        Leases are only ever extended, except as ``recheck_leases`` reports: so the
        earliest end of all leases is the time of the next check.
        """
        if now_ms < self._expire_at_ms:
            return []
        ends = {k: h.claim.lease.hard_until_ms for k, h in self.all.items()}
        owned = [key for key in ends if self.all[key].claim.is_owned]
        later = (ends[key] for key in owned if now_ms < ends[key])
        self._expire_at_ms = min(later, default=FAR_MS)
        return [self.all[key] for key in owned if now_ms >= ends[key]]

    def due_ms(self, now_ms: int) -> int:
        """Return the local time of the next claim or check of a look-up."""
        due_ms = FAR_MS
        for holding in self.contending.values():
            at_ms = holding.claim.attempt_at_ms
            if at_ms is not None and at_ms < due_ms:
                due_ms = at_ms
        for holding in self.active.values():
            if holding.lookup is not None:
                return min(due_ms, now_ms + LOOKUP_POLL_MS)
        return due_ms

    def recheck_leases(self) -> None:
        """Check all leases in the next round: one has become shorter."""
        self._expire_at_ms = 0


def _is_active(holding: Holding) -> bool:
    return (
        holding.drain is not None
        or holding.lookup is not None
        or holding.rewind is not None
        or holding.delivery is Delivery.AT_MOST_ONCE
    )
