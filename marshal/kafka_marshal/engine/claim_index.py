"""The holdings of a session, and the few of them that a round has to look at.

Of thousands that are held, nearly all only wait for their next beat: a round that
looked at each would cost more than everything that happens in it.
"""

from typing import TYPE_CHECKING

from .holding import Delivery, Holding

if TYPE_CHECKING:
    from kafka_marshal.protocol.types import Key

FAR_MS = 2**63
LOOKUP_LOOK_MS = 5


class ClaimIndex:
    """Everything that a session contends for or holds.

    Attributes:
        all: Every holding, by key.
        contending: Those that the log does not call ours, as far as it is read.
        active: Those that are ours and on their way in or out. Those of at most
            once always: their requests for grants may go unanswered.
        won_count: Number of claims that were ever won.
    """

    __slots__ = (
        "_by_epoch",
        "_expire_at_ms",
        "active",
        "all",
        "contending",
        "won_count",
    )

    def __init__(self) -> None:
        self.all: dict[Key, Holding] = {}
        self.contending: dict[Key, Holding] = {}
        self.active: dict[Key, Holding] = {}
        self.won_count = 0
        self._by_epoch: dict[tuple[int, int | None], Holding] = {}
        self._expire_at_ms = FAR_MS

    def add(self, holding: Holding) -> None:
        """Take up a key to contend for."""
        self.all[holding.key] = self.contending[holding.key] = holding

    def won(self, holding: Holding, partition: int) -> None:
        """Note that the log calls a key ours, as T ``partition`` says."""
        self.contending.pop(holding.key, None)
        self.active[holding.key] = holding
        self.won_count += 1
        self._by_epoch[partition, holding.claim.epoch] = holding
        until_ms = holding.claim.lease.hard_until_ms
        self._expire_at_ms = min(self._expire_at_ms, until_ms)

    def remove(self, holding: Holding, partition: int) -> bool:
        """Drop a holding that has ended; return whether it was there."""
        key = holding.key
        place = (partition, holding.claim.epoch)
        if self._by_epoch.get(place) is holding:
            del self._by_epoch[place]
        if self.all.get(key) is not holding:
            return False
        del self.all[key]
        self.contending.pop(key, None)
        self.active.pop(key, None)
        return True

    def of_epoch(self, partition: int, epoch: int) -> Holding | None:
        """Return what is held under an epoch of a T."""
        return self._by_epoch.get((partition, epoch))

    def mark_active(self, holding: Holding) -> None:
        """Have an owned holding looked at until it rests again."""
        self.active[holding.key] = holding

    def mark_all_active(self) -> None:
        """Have every owned holding looked at once."""
        self.active = {k: h for k, h in self.all.items() if h.claim.is_owned}

    def compact(self) -> None:
        """Let those rest that nothing is to be done about."""
        if self.active:
            self.active = {k: h for k, h in self.active.items() if _is_active(h)}

    def expired(self, now_ms: int) -> list[Holding]:
        """Return those whose hard stop has come.

        Leases are only ever extended, but for ``recheck_leases``: so the earliest
        end of all says when to look again.
        """
        if now_ms < self._expire_at_ms:
            return []
        ends = {k: h.claim.lease.hard_until_ms for k, h in self.all.items()}
        owned = [key for key in ends if self.all[key].claim.is_owned]
        later = (ends[key] for key in owned if now_ms < ends[key])
        self._expire_at_ms = min(later, default=FAR_MS)
        return [self.all[key] for key in owned if now_ms >= ends[key]]

    def due_ms(self, now_ms: int) -> int:
        """Return when the next claim is to be sent, or a look-up to be looked at."""
        due_ms = FAR_MS
        for holding in self.contending.values():
            at_ms = holding.claim.attempt_at_ms
            if at_ms is not None and at_ms < due_ms:
                due_ms = at_ms
        for holding in self.active.values():
            if holding.lookup is not None:
                return min(due_ms, now_ms + LOOKUP_LOOK_MS)
        return due_ms

    def recheck_leases(self) -> None:
        """Take that some lease has become shorter."""
        self._expire_at_ms = 0


def _is_active(holding: Holding) -> bool:
    return (
        holding.drain is not None
        or holding.lookup is not None
        or holding.delivery is Delivery.AT_MOST_ONCE
    )
