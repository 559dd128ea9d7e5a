"""Releases partitions of applications that are too slow or do not poll.

A partition is released only if another live member of the group is likely to do better.
Otherwise it stays with its owner, however slow that is.
"""

from collections.abc import Iterable, Sequence

from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.health import CYCLES_MAX, Health, LagTrend, Sample
from kafka_marshal.protocol.types import Key

from .context import Context
from .coverage import best_taker
from .holding import Drain, Holding
from .lag import LagWatch, reached
from .poll_watchdog import PollWatchdog, was_stopped
from .subscription import Subscription

LAGGING = "lagging"
CHECKS_PER_H = 20
AWAY_PARTS = 20

Drains = list[tuple[Holding, Drain]]


class _Watch:
    """Health of one held partition over time."""

    __slots__ = ("asked_ms", "epoch", "health", "is_reported")

    def __init__(self, epoch: int | None) -> None:
        self.epoch = epoch
        self.health = Health()
        self.asked_ms = 0
        self.is_reported = False


class SlowConsumerPolicy:
    """Judges the partitions that one client holds. Called under the engine's lock."""

    __slots__ = (
        "_answers",
        "_check_at_ms",
        "_context",
        "_has_news",
        "_lags",
        "_was_stopped",
        "_watchdog",
        "_watches",
    )

    def __init__(
        self, context: Context, lags: LagWatch, watchdog: PollWatchdog
    ) -> None:
        self._context = context
        self._lags = lags
        self._watchdog = watchdog
        self._check_at_ms = 0
        self._was_stopped = False
        self._has_news = False
        self._answers = 0
        self._watches: dict[Key, _Watch] = {}

    def is_due(self, now_ms: int) -> bool:
        """Return whether a check is due; if so, schedule the next one."""
        if now_ms < self._check_at_ms:
            return False
        interval_ms = self._context.heartbeat_interval_ms
        gap_ms = now_ms - self._check_at_ms
        self._was_stopped = was_stopped(gap_ms, heartbeat_interval_ms=interval_ms)
        self._check_at_ms = now_ms + max(1, interval_ms // CHECKS_PER_H)
        answers = self._lags.answer_count
        self._has_news = answers != self._answers
        self._answers = answers
        return True

    def judge(
        self, sub: Subscription, holdings: Iterable[Holding], *, me: str, now_ms: int
    ) -> Drains:
        """Return the drains that one consumer must start now.

        Args:
            sub: The consumer's subscription.
            holdings: All holdings of the client, of all consumers.
            me: Own client_id.
            now_ms: Local time.
        """
        if self._was_stopped:
            sub.moved_at_ms = now_ms
        if not self._has_news and not self._may_be_away(sub, now_ms):
            return []
        since_ms = self._context.now_ms
        held = [
            holding
            for holding in holdings
            if holding.claim.is_owned and holding.key.topic in sub.topics
        ]
        for holding in held:
            self._sample(sub, holding, now_ms)
        self._watchdog.note_signs(sub, held, now_ms=now_ms)
        stuck = self._watchdog.find_stuck(sub, held, now_ms=now_ms)
        drains = [(each.holding, each.drain(now_ms)) for each in stuck]
        if not drains and sub.config.release_behind and not sub.counts_topics:
            drains = self._find_lagging(sub, held, me=me)
        if drains:
            interval_ms = self._context.heartbeat_interval_ms
            sub.backoff.strike(now_ms, interval_ms=interval_ms)
            for holding in held:
                self._watch(holding).health.restart()
        self._check_at_ms = max(
            self._check_at_ms, self._context.next_check_ms(since_ms)
        )
        return drains

    def _may_be_away(self, sub: Subscription, now_ms: int) -> bool:
        """Return whether to check for signs of life because there are no polls."""
        if sub.stuck_since_ms is not None:
            return True
        limit_ms = sub.handling_limit_ms(self._context.heartbeat_interval_ms)
        return 0 < limit_ms <= AWAY_PARTS * (now_ms - sub.back_at_ms)

    def forget(self, key: Key) -> None:
        """Forget a partition that is no longer held."""
        self._watches.pop(key, None)

    def lagging_count(self) -> int:
        """Return the number of partitions that lagged at their last check."""
        return sum(watch.health.bad_cycles > 0 for watch in self._watches.values())

    def _watch(self, holding: Holding) -> _Watch:
        watch = self._watches.get(holding.key)
        if watch is None or watch.epoch != holding.claim.epoch:
            watch = self._watches[holding.key] = _Watch(holding.claim.epoch)
        return watch

    def _sample(self, sub: Subscription, holding: Holding, now_ms: int) -> None:
        """Record the positions of the log's end and of the application."""
        watch = self._watch(holding)
        paused = sub.paused  # mostly empty: this saves a look-up for each partition
        is_held_back = bool(paused) and holding.key.topic_partition in paused
        if is_held_back or holding.drain or holding.claim.phase is not Phase.HELD:
            watch.health.restart()
            return
        end, at = self._lags.end_of(holding.key), reached(holding)
        if end is None or at is None or end.asked_ms <= watch.asked_ms:
            return
        watch.asked_ms = end.asked_ms
        sample = Sample(now_ms, at, end.offset)
        interval_ms = self._context.heartbeat_interval_ms
        watch.health.add(sample, interval_ms=interval_ms)

    def _find_lagging(
        self, sub: Subscription, held: Sequence[Holding], *, me: str
    ) -> Drains:
        """Return the partition with the largest lag: one is released at a time."""
        watches = [(holding, self._watch(holding)) for holding in held]
        behind = [
            (trend.lag, holding, watch, trend)
            for holding, watch in watches
            if watch.health.is_behind and (trend := watch.health.trend) is not None
        ]
        for _, watch in watches:
            if not watch.health.is_behind:
                watch.is_reported = False
        if not behind or any(holding.drain is not None for holding in held):
            return []
        _, holding, watch, trend = max(behind, key=lambda row: (row[0], row[1].key))
        topic = holding.key.topic
        taker = best_taker(sub.members, topic, me=me, may_be_behind=False)
        if taker is not None or not watch.is_reported:
            watch.is_reported = True
            fields = {
                "key": holding.key,
                "lag": trend.lag,
                "consumed_per_s": trend.consumed_per_s,
                "produced_per_s": trend.produced_per_s,
                "cycles": watch.health.bad_cycles,
                "successor": taker,
            }
            self._context.observe("lagging", fields)
        if taker is None:
            return []
        # A slow application first finishes its uncommitted records.
        return [
            (
                holding,
                Drain(
                    reason=LAGGING,
                    successor=taker,
                    until_ms=None,
                    detail=_figures(trend),
                ),
            )
        ]


def _figures(trend: LagTrend) -> str:
    return (
        f"lag {trend.lag} records, consumed {trend.consumed_per_s}/s, produced "
        f"{trend.produced_per_s}/s, behind in {CYCLES_MAX} checks in a row"
    )
