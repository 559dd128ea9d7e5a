"""Counters of an engine and its sessions, for metrics.

Plain integers, kept under the engine's lock. No decision reads them. They cost a few
additions a round.
"""

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.types import Key

ROUND_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
READ_BACK_MS = (*ROUND_MS, 10_000, 30_000)
TAKEOVER_MS = (
    *(10, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 20_000),
    *(30_000, 60_000, 120_000, 180_000, 240_000, 300_000, 600_000),
)
REASONS_MAX = 64
# Pattern subscriptions see any number of topics; the oldest figures are dropped first.
ENTRIES_MAX = 10_000
OTHER = "other"


class Histogram:
    """A histogram of durations.

    Attributes:
        bounds_ms: Inclusive upper bound of each bucket; one more bucket has none.
        counts: Durations in each bucket.
        sum_ms: Sum of all durations.
    """

    __slots__ = ("bounds_ms", "counts", "sum_ms")

    def __init__(self, bounds_ms: Sequence[int]) -> None:
        self.bounds_ms = tuple(bounds_ms)
        self.counts = [0] * (len(bounds_ms) + 1)
        self.sum_ms = 0

    def observe(self, duration_ms: int) -> None:
        """Count one duration; a negative one, after a clock step, counts as 0."""
        duration_ms = max(0, duration_ms)
        self.counts[bisect_left(self.bounds_ms, duration_ms)] += 1
        self.sum_ms += duration_ms

    def copy(self) -> "Histogram":
        """Return a copy, which does not change."""
        twin = Histogram(self.bounds_ms)
        twin.counts, twin.sum_ms = list(self.counts), self.sum_ms
        return twin


class EngineMeters:
    """The counters of one engine.

    Attributes:
        rounds: Durations of folding and acting, without the wait for the log.
        read_backs: From sending an own record to reading it back.
        failed_appends: Appends that failed, or whose outcome is unknown.
        round_at_ms: Local time of the end of the last round, None before the first.
    """

    def __init__(self) -> None:
        self.rounds = Histogram(ROUND_MS)
        self.read_backs = Histogram(READ_BACK_MS)
        self.failed_appends = 0
        self.round_at_ms: int | None = None
        self._events: dict[str, int] = {}
        # Events come from any thread, with and without the engine's lock.
        self._events_lock = threading.Lock()

    def count_event(self, name: str) -> None:
        """Count one event that was sent to the observer."""
        with self._events_lock:
            self._events[name] = self._events.get(name, 0) + 1

    def events(self) -> dict[str, int]:
        """Return the number of times each event was sent."""
        with self._events_lock:
            return dict(self._events)


class Tally(NamedTuple):
    """Records of one key: handed out, and committed in the log."""

    handed: int = 0
    committed: int = 0

    def plus(self, other: "Tally") -> "Tally":
        """Return the sum of two tallies."""
        return Tally(self.handed + other.handed, self.committed + other.committed)


class Vacancy(NamedTuple):
    """How long a key that we claim was without an active owner, in log time.

    Attributes:
        after: ``stale``, ``resumed`` or ``released``: how its ownership ended.
        since_ms: Log time of the last renewal, or of the release.
    """

    after: str
    since_ms: int


def vacancy(known: KeyState | None, *, resumes: bool) -> Vacancy | None:
    """Return the vacancy that a claim of this key ends; None if it had no owner."""
    if known is None:
        return None
    if known.owner is None:
        return Vacancy("released", known.active_ms)
    return Vacancy("resumed" if resumes else "stale", known.renewed_ms)


class SessionMeters:
    """The counters of one session.

    Attributes:
        won: Claims won, by topic and effect.
        lost: Claims lost or expired, by topic and reason.
        released: Claims released, by topic and reason.
        takeovers: Log time from the earlier owner's last renewal or release to our
            claim, by topic and how that ownership ended.
        handoff_gaps: Log time from the release to our claim of a key for which the
            application had warmed up, by topic.
        tallies: Records of claims that have ended, by key.
    """

    def __init__(self) -> None:
        self.won: dict[tuple[str, str], int] = {}
        self.lost: dict[tuple[str, str], int] = {}
        self.released: dict[tuple[str, str], int] = {}
        self.takeovers: dict[tuple[str, str], Histogram] = {}
        self.handoff_gaps: dict[str, Histogram] = {}
        self.tallies: dict[Key, Tally] = {}

    def claim_won(
        self, key: Key, effect: str | None, *, before: Vacancy | None, log_ms: int
    ) -> None:
        """Count a won claim."""
        _count(self.won, key.topic, effect or OTHER)
        if before is not None:
            place = (key.topic, before.after)
            found = self.takeovers.setdefault(place, Histogram(TAKEOVER_MS))
            found.observe(log_ms - before.since_ms)
            _trim(self.takeovers)

    def handed_over(self, key: Key, *, gap_ms: int) -> None:
        """Count a claim of a key that its owner had offered, and its gap."""
        self.handoff_gaps.setdefault(key.topic, Histogram(READ_BACK_MS)).observe(gap_ms)
        _trim(self.handoff_gaps)

    def claim_ended(self, key: Key, ending: Ending, *, tally: Tally) -> None:
        """Count the end of a claim, and its records."""
        counts = self.lost if ending.was_lost else self.released
        _count(counts, key.topic, ending.reason)
        self.tallies[key] = self.tallies.pop(key, Tally()).plus(tally)
        _trim(self.tallies)


def _count(counts: dict[tuple[str, str], int], topic: str, reason: str) -> None:
    """Count a reason; custom policies may use any number of them."""
    if (topic, reason) not in counts:
        known = sum(1 for place in counts if place[0] == topic)
        reason = OTHER if known >= REASONS_MAX else reason
    counts[topic, reason] = counts.get((topic, reason), 0) + 1
    _trim(counts)


def _trim(figures: dict[Any, Any]) -> None:
    if len(figures) > ENTRIES_MAX:
        del figures[next(iter(figures))]
