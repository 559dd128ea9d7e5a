"""Finds the partitions whose application has stopped polling.

Each process judges its own application. Whether another live member of the group could
take a partition, and how often owners were stuck there before, comes from the log,
directly or through a sidecar.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kafka_marshal.protocol.health import handler_limit_ms, is_stuck
from kafka_marshal.protocol.state import STUCK
from kafka_marshal.protocol.types import Key

from .holding import Drain, Holding
from .interfaces import PARTITIONS_NAMED_MAX, ClaimContext
from .lag import LagWatch
from .subscription import Subscription

if TYPE_CHECKING:
    from .holdings import ClaimSession

AWAY_SHARE = 4


def was_stopped(gap_ms: int, *, heartbeat_interval_ms: int) -> bool:
    """Return whether the gap between two rounds shows that the process was stopped.

    The silence of a stopped process does not count against its application.
    """
    return gap_ms > heartbeat_interval_ms // AWAY_SHARE


@attrs.frozen(kw_only=True)
class Stuck:
    """A partition whose application has stopped polling.

    Attributes:
        holding: Its holding.
        quiet_ms: Time since the last sign of life.
        limit_ms: Limit of that time.
        uncommitted_count: Number of uncommitted records.
        lag: Lag of the position, None if unknown.
        taker: client_id of the member that can take it; as ``ClaimSession.taker_of``.
    """

    holding: Holding
    quiet_ms: int
    limit_ms: int
    uncommitted_count: int
    lag: int | None
    taker: str | None

    def drain(self, now_ms: int) -> Drain:
        """Return a drain that is due at once: it does not wait for a stuck handler."""
        lag = "unknown" if self.lag is None else str(self.lag)
        detail = (
            f"the application has neither polled nor committed for {self.quiet_ms} ms "
            f"(limit {self.limit_ms} ms), {self.uncommitted_count} uncommitted, "
            f"lag {lag}"
        )
        return Drain(
            reason=STUCK, successor=self.taker or None, until_ms=now_ms, detail=detail
        )


@attrs.define(eq=False)
class _Watch:
    """Watch of one held partition: start, last progress, whether it was reported."""

    epoch: int | None
    since_ms: int
    mark: tuple[int, int | None, int] | None = None
    is_reported: bool = False


class PollWatchdog:
    """Watches the partitions that one client holds. Called under the engine's lock."""

    __slots__ = ("_context", "_lags", "_session", "_watches")

    def __init__(
        self, context: ClaimContext, lags: LagWatch, session: "ClaimSession"
    ) -> None:
        self._context = context
        self._lags = lags
        self._session = session
        self._watches: dict[Key, _Watch] = {}

    def watch(self, holding: Holding, now_ms: int) -> None:
        """Start watching a claim, unless it is watched already."""
        self._watch(holding, now_ms)

    def forget(self, key: Key) -> None:
        """Stop watching a partition."""
        self._watches.pop(key, None)

    def note_signs(
        self, sub: Subscription, held: Sequence[Holding], *, now_ms: int
    ) -> None:
        """Record the signs of life of one consumer's application."""
        for holding in held:
            watch = self._watch(holding, now_ms)
            mark = (holding.handed_count, holding.position, holding.uncommitted_count)
            if mark != watch.mark:
                if watch.mark is not None:
                    sub.moved_at_ms = now_ms
                watch.mark = mark
        if sub.stuck_since_ms is not None and sub.alive_at_ms > sub.stuck_since_ms:
            sub.stuck_since_ms = None

    def find_stuck(
        self, sub: Subscription, held: Sequence[Holding], *, now_ms: int
    ) -> list[Stuck]:
        """Return the partitions to release because the application does not poll."""
        base_ms = sub.handling_limit_ms(self._context.heartbeat_interval_ms)
        if base_ms == 0 or now_ms - sub.alive_at_ms < base_ms:
            for holding in held:
                self._watch(holding, now_ms).is_reported = False
            return []
        found, news = [], []
        for holding in held:
            if holding.drain is not None and holding.drain.is_due(now_ms):
                continue
            watch = self._watch(holding, now_ms)
            stuck = self._judge(sub, holding, watch, now_ms=now_ms, base_ms=base_ms)
            if stuck is None:
                continue
            if stuck.taker is not None or not watch.is_reported:
                watch.is_reported = True
                news.append(stuck)
            if stuck.taker is not None:
                found.append(stuck)
        self._report(news)
        if found:
            sub.stuck_since_ms = now_ms
        return found

    def _report(self, found: Sequence[Stuck]) -> None:
        """Report stuck partitions; those of a topic with one successor together."""
        alike: dict[tuple[str, str | None], list[Stuck]] = {}
        for each in found:
            alike.setdefault((each.holding.key.topic, each.taker or None), []).append(
                each
            )
        for (topic, successor), stuck in alike.items():
            numbers = [each.holding.key.partition for each in stuck]
            lags = [each.lag for each in stuck if each.lag is not None]
            fields = {
                "group": stuck[0].holding.key.group_id,
                "topic": topic,
                "count": len(numbers),
                "partitions": numbers[:PARTITIONS_NAMED_MAX],
                "quiet_ms": max(each.quiet_ms for each in stuck),
                "limit_ms": max(each.limit_ms for each in stuck),
                "uncommitted_count": sum(each.uncommitted_count for each in stuck),
                "lag": sum(lags) if lags else None,
                "successor": successor,
            }
            self._context.observe("stuck", fields)

    def _judge(
        self,
        sub: Subscription,
        holding: Holding,
        watch: _Watch,
        *,
        now_ms: int,
        base_ms: int,
    ) -> Stuck | None:
        quiet_ms = now_ms - max(sub.alive_at_ms, watch.since_ms)
        stuck_count = self._session.stuck_count(holding.key)
        limit_ms = handler_limit_ms(base_ms, stuck_count=stuck_count)
        hand, lag = holding.uncommitted_count, self._lags.lag_of(holding)
        if not is_stuck(quiet_ms, limit_ms=limit_ms, uncommitted_count=hand, lag=lag):
            return None
        taker = self._session.taker_of(sub, holding.key.topic)
        return Stuck(
            holding=holding,
            quiet_ms=quiet_ms,
            limit_ms=limit_ms,
            uncommitted_count=hand,
            lag=lag,
            taker=taker,
        )

    def _watch(self, holding: Holding, now_ms: int) -> _Watch:
        watch = self._watches.get(holding.key)
        if watch is None or watch.epoch != holding.claim.epoch:
            watch = self._watches[holding.key] = _Watch(holding.claim.epoch, now_ms)
        return watch
