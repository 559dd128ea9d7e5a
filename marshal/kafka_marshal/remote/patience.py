"""Gives up what the application does not come back for, where others could take it.

The process that hands out sees its application, so it judges that itself; the sidecar
says whether there is anybody else, and how many were stuck there before.
"""

from collections.abc import Sequence

import attrs

from kafka_marshal.engine import Holding, Subscription
from kafka_marshal.engine.holding import Drain
from kafka_marshal.engine.keeping import Absence
from kafka_marshal.engine.lags import LagWatch
from kafka_marshal.protocol.health import is_wedged, patience_ms
from kafka_marshal.protocol.notes import WEDGED
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote.engine import RemoteContext

AWAY_SHARE = 4


@attrs.define(eq=False)
class _Watch:
    """What is known of one partition over time."""

    since_ms: int
    stuck: int
    mark: tuple[int, int | None, int] | None = None
    is_told: bool = False


class Patience:
    """Judges what one client has. Called under the lock.

    Attributes:
        takers: Topics that another live member could take partitions of.
    """

    def __init__(self, context: RemoteContext, lags: LagWatch) -> None:
        self.takers: frozenset[str] = frozenset()
        self._context = context
        self._lags = lags
        self._watches: dict[Key, _Watch] = {}
        self._ended_ms = context.now_ms

    def begin(self, key: Key, now_ms: int, *, stuck: int) -> None:
        """Watch a partition that is held from now on."""
        self._watches[key] = _Watch(now_ms, stuck)

    def forget(self, key: Key) -> None:
        """Watch a partition no more."""
        self._watches.pop(key, None)

    def end_round(self, now_ms: int) -> None:
        """Note when everything was judged last."""
        self._ended_ms = now_ms

    def judge(
        self, sub: Subscription, mine: Sequence[Holding], *, now_ms: int
    ) -> list[Holding]:
        """Have what one consumer does not come back for go; return what that is."""
        self._note_signs(sub, mine, now_ms)
        if sub.wedged_at_ms is not None and sub.alive_at_ms > sub.wedged_at_ms:
            sub.wedged_at_ms = None
        base_ms = sub.handling_limit_ms(self._context.heartbeat_interval_ms)
        if not base_ms or now_ms - sub.alive_at_ms < base_ms:
            for holding in mine:
                if holding.key in self._watches:
                    self._watches[holding.key].is_told = False
            return []
        gone = []
        for holding in mine:
            if holding.drain is not None and holding.drain.is_due(now_ms):
                continue
            detail = self._verdict(sub, holding, now_ms=now_ms, base_ms=base_ms)
            if detail is not None:
                # Who is in its handler is not waited for.
                holding.drain = Drain(WEDGED, None, now_ms, detail)
                sub.wedged_at_ms = now_ms
                gone.append(holding)
        return gone

    def _note_signs(
        self, sub: Subscription, mine: Sequence[Holding], now_ms: int
    ) -> None:
        interval_ms = self._context.heartbeat_interval_ms
        # A process that was stopped says nothing of its handlers.
        if now_ms - self._ended_ms > interval_ms // AWAY_SHARE:
            sub.moved_at_ms = now_ms
        for holding in mine:
            watch = self._watches.get(holding.key)
            if watch is None:
                continue
            hand = holding.in_hand_count
            mark = (holding.handed_count, holding.position, hand)
            if watch.mark is not None and watch.mark != mark:
                sub.moved_at_ms = now_ms
            watch.mark = mark

    def _verdict(
        self, sub: Subscription, holding: Holding, *, now_ms: int, base_ms: int
    ) -> str | None:
        """Return why a partition is to go, in figures; None where it stays."""
        watch = self._watches.get(holding.key)
        if watch is None:
            return None
        quiet_ms = now_ms - max(sub.alive_at_ms, watch.since_ms)
        limit_ms = patience_ms(base_ms, stuck_count=watch.stuck)
        hand, lag = holding.in_hand_count, self._lags.lag_of(holding)
        if not is_wedged(quiet_ms, limit_ms=limit_ms, in_hand=hand, lag=lag):
            return None
        absence = Absence(holding.key, quiet_ms, limit_ms, hand, lag)
        has_taker = holding.key.topic in self.takers
        if has_taker or not watch.is_told:
            watch.is_told = True
            self._context.observe("stuck", absence.fields(None))
        return absence.detail if has_taker else None
