"""Gives up what an owner does not keep up with, or does not come back for.

Only where another live member could do better by all that is known: a partition
that nobody else can take stays where it is, however slow that is.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import attrs

from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.health import (
    CYCLES_MAX,
    Health,
    Pace,
    Sample,
    is_wedged,
    patience_ms,
)
from kafka_marshal.protocol.notes import WEDGED, stuck_count
from kafka_marshal.protocol.planner import MemberView
from kafka_marshal.protocol.types import Key

from .context import Context
from .holding import Drain, Holding
from .lags import LagWatch, reached
from .subscription import Subscription

BEHIND = "behind"
LOOKS_PER_H = 20
AWAY_SHARE = 4
AWAY_PARTS = 20


class Verdict(NamedTuple):
    """A partition that is to be given up.

    Attributes:
        holding: Its holding.
        reason: ``behind`` or ``wedged``.
        detail: The figures, for people.
        successor: client_id that can take it.
    """

    holding: Holding
    reason: str
    detail: str
    successor: str

    def drain(self, now_ms: int) -> Drain:
        """Return how it goes: the slow finish their work, others are not waited for."""
        until_ms = now_ms if self.reason == WEDGED else None
        return Drain(self.reason, self.successor, until_ms, self.detail)


class _Watch:
    """What is known of one held partition over time."""

    __slots__ = ("asked_ms", "epoch", "health", "mark", "since_ms", "told")

    def __init__(self, epoch: int | None, since_ms: int) -> None:
        self.epoch = epoch
        self.since_ms = since_ms
        self.health = Health()
        self.asked_ms = 0
        self.mark: tuple[int, int | None, int] | None = None
        self.told: set[str] = set()


@attrs.frozen
class Absence:
    """How long an application does not come back for a partition, and with what.

    Attributes:
        key: The partition.
        quiet_ms: Time without a sign of life.
        limit_ms: How much of it is allowed.
        in_hand: Records handed out and not done with.
        lag: How far the position is behind, None where that is not known.
    """

    key: Key
    quiet_ms: int
    limit_ms: int
    in_hand: int
    lag: int | None

    def fields(self, successor: str | None) -> dict[str, object]:
        """Return what the event tells."""
        return {**attrs.asdict(self, recurse=False), "successor": successor}

    @property
    def detail(self) -> str:
        """The same in words, for the log."""
        lag = "unknown" if self.lag is None else str(self.lag)
        return (
            f"the application is away for {self.quiet_ms} ms of at most "
            f"{self.limit_ms}, {self.in_hand} in hand, lag {lag}"
        )


class Keeper:
    """Judges what one session holds. Called under the engine's lock."""

    __slots__ = (
        "_answers",
        "_context",
        "_has_news",
        "_is_back",
        "_lags",
        "_look_at_ms",
        "_watches",
    )

    def __init__(self, context: Context, lags: LagWatch) -> None:
        self._context = context
        self._lags = lags
        self._look_at_ms = 0
        self._is_back = False
        self._has_news = False
        self._answers = 0
        self._watches: dict[Key, _Watch] = {}

    def is_due(self, now_ms: int) -> bool:
        """Return whether it is time for another look, and note this one."""
        if now_ms < self._look_at_ms:
            return False
        interval_ms = self._context.heartbeat_interval_ms
        # A process that was stopped, engine and all, says nothing of its handlers.
        self._is_back = now_ms - self._look_at_ms > interval_ms // AWAY_SHARE
        self._look_at_ms = now_ms + max(1, interval_ms // LOOKS_PER_H)
        answers = self._lags.answer_count
        self._has_news = answers != self._answers
        self._answers = answers
        return True

    def judge(
        self,
        sub: Subscription,
        holdings: Iterable[Holding],
        *,
        me: str,
        now_ms: int,
    ) -> list[Verdict]:
        """Return what one consumer is to give up now.

        Args:
            sub: The consumer's subscription.
            holdings: What the session wants or holds, of all consumers.
            me: Own client_id.
            now_ms: Local time.
        """
        members = sub.members
        if self._is_back:
            sub.moved_at_ms = now_ms
        if not self._has_news and not self._may_be_away(sub, now_ms):
            return []
        held = [
            (holding, self._watch(holding, now_ms))
            for holding in holdings
            if holding.claim.is_owned and holding.key.topic in sub.topics
        ]
        for holding, watch in held:
            self._note_signs(sub, holding, watch, now_ms=now_ms)
        if sub.wedged_at_ms is not None and sub.alive_at_ms > sub.wedged_at_ms:
            sub.wedged_at_ms = None
        verdicts = self._find_wedged(sub, held, members=members, me=me, now_ms=now_ms)
        if verdicts:
            sub.wedged_at_ms = now_ms
        elif sub.releases_behind and not sub.counts_topics:
            verdicts = self._find_behind(held, members=members, me=me)
        if verdicts:
            interval_ms = self._context.heartbeat_interval_ms
            sub.backoff.strike(now_ms, interval_ms=interval_ms)
            for _, watch in held:
                watch.health.restart()
        return verdicts

    def _may_be_away(self, sub: Subscription, now_ms: int) -> bool:
        """Return whether to look for signs of life, as long as there is no poll."""
        if sub.wedged_at_ms is not None:
            return True
        limit_ms = sub.handling_limit_ms(self._context.heartbeat_interval_ms)
        return 0 < limit_ms <= AWAY_PARTS * (now_ms - sub.back_at_ms)

    def forget(self, key: Key) -> None:
        """Forget a partition that is not held any more."""
        self._watches.pop(key, None)

    def behind_count(self) -> int:
        """Return how many partitions were behind at their last judgement."""
        return sum(watch.health.bad_cycles > 0 for watch in self._watches.values())

    def _watch(self, holding: Holding, now_ms: int) -> _Watch:
        watch = self._watches.get(holding.key)
        if watch is None or watch.epoch != holding.claim.epoch:
            watch = self._watches[holding.key] = _Watch(holding.claim.epoch, now_ms)
        return watch

    def _note_signs(
        self, sub: Subscription, holding: Holding, watch: _Watch, *, now_ms: int
    ) -> None:
        """Note what the application did, and how the log's end moved."""
        mark = (holding.handed_count, holding.position, holding.in_hand_count)
        if mark != watch.mark:
            if watch.mark is not None:
                sub.moved_at_ms = now_ms
            watch.mark = mark
        is_held_back = holding.key.topic_partition in sub.paused
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

    # --- wedged

    def _find_wedged(
        self,
        sub: Subscription,
        held: Sequence[tuple[Holding, _Watch]],
        *,
        members: Sequence[MemberView],
        me: str,
        now_ms: int,
    ) -> list[Verdict]:
        base_ms = sub.handling_limit_ms(self._context.heartbeat_interval_ms)
        if base_ms == 0 or now_ms - sub.alive_at_ms < base_ms:
            for _, watch in held:
                watch.told.discard(WEDGED)
            return []
        verdicts = []
        for holding, watch in held:
            quiet_ms = now_ms - max(sub.alive_at_ms, watch.since_ms)
            limit_ms = patience_ms(base_ms, stuck_count=self._stuck_count(holding.key))
            lag = self._lags.lag_of(holding)
            hand = holding.in_hand_count
            if holding.drain is not None and holding.drain.is_due(now_ms):
                continue
            if not is_wedged(quiet_ms, limit_ms=limit_ms, in_hand=hand, lag=lag):
                continue
            taker = best_taker(members, holding.key.topic, me=me, may_be_behind=True)
            absence = Absence(holding.key, quiet_ms, limit_ms, hand, lag)
            if _is_news(watch, WEDGED, taker=taker):
                self._context.observe("stuck", absence.fields(taker))
            if taker is not None:
                verdicts.append(Verdict(holding, WEDGED, absence.detail, taker))
        return verdicts

    def _stuck_count(self, key: Key) -> int:
        world = self._context.replica_of(key).world
        known = world.keys.get(key)
        return 0 if known is None else stuck_count(world.soft.notes.get(key), known)

    # --- behind

    def _find_behind(
        self,
        held: Sequence[tuple[Holding, _Watch]],
        *,
        members: Sequence[MemberView],
        me: str,
    ) -> list[Verdict]:
        """Return the partition that is furthest behind: one goes at a time."""
        behind = [
            (pace.lag, holding, watch, pace)
            for holding, watch in held
            if watch.health.is_behind and (pace := watch.health.pace) is not None
        ]
        for _, watch in held:
            if not watch.health.is_behind:
                watch.told.discard(BEHIND)
        if not behind or any(holding.drain is not None for holding, _ in held):
            return []
        _, holding, watch, pace = max(behind, key=lambda row: (row[0], row[1].key))
        taker = best_taker(members, holding.key.topic, me=me, may_be_behind=False)
        if _is_news(watch, BEHIND, taker=taker):
            fields = {
                "key": holding.key,
                "lag": pace.lag,
                "consumed_per_s": pace.consumed_per_s,
                "produced_per_s": pace.produced_per_s,
                "cycles": watch.health.bad_cycles,
                "successor": taker,
            }
            self._context.observe("lagging", fields)
        if taker is None:
            return []
        return [Verdict(holding, BEHIND, _figures(pace), taker)]


def _is_news(watch: _Watch, name: str, *, taker: str | None) -> bool:
    """Return whether to tell a judgement: a release, or the first without a taker."""
    is_news = taker is not None or name not in watch.told
    watch.told.add(name)
    return is_news


def _figures(pace: Pace) -> str:
    return (
        f"lag {pace.lag}, consumes {pace.consumed_per_s}/s, {pace.produced_per_s}/s "
        f"arrive, {CYCLES_MAX} cycles"
    )


def best_taker(
    members: Iterable[MemberView], topic: str, *, me: str, may_be_behind: bool
) -> str | None:
    """Return the live member that has most room for a partition, if any has.

    Args:
        members: Live members of the group.
        topic: Topic of the partition.
        me: Own client_id, which is none of them.
        may_be_behind: Whether one that does not keep up itself is better than
            nobody.
    """
    able = [
        member
        for member in members
        if member.client_id != me
        and topic in member.topics
        and not member.is_draining
        and (not member.claims_max or member.held < member.claims_max)
        and (may_be_behind or not member.is_behind)
    ]
    best = min(
        able, key=lambda m: (m.is_behind, m.held // m.weight, m.client_id), default=None
    )
    return None if best is None else best.client_id
