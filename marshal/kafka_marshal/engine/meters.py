"""What an engine counts as it goes, for whoever asks later.

Plain integers, kept under the engine's lock, and never read by anything that
decides: without a reader they cost a few additions a round.
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
# Topics come and go where patterns are consumed; the oldest figures go first.
ENTRIES_MAX = 10_000
OTHER = "other"


class Histogram:
    """Durations, counted by size.

    Attributes:
        bounds_ms: Upper bound of each class, inclusive; one more has none.
        counts: Durations in each class.
        sum_ms: All of them together.
    """

    __slots__ = ("bounds_ms", "counts", "sum_ms")

    def __init__(self, bounds_ms: Sequence[int]) -> None:
        self.bounds_ms = tuple(bounds_ms)
        self.counts = [0] * (len(bounds_ms) + 1)
        self.sum_ms = 0

    def observe(self, duration_ms: int) -> None:
        """Count one duration; a clock that went back counts as none."""
        duration_ms = max(0, duration_ms)
        self.counts[bisect_left(self.bounds_ms, duration_ms)] += 1
        self.sum_ms += duration_ms

    def copy(self) -> "Histogram":
        """Return it as it is now."""
        twin = Histogram(self.bounds_ms)
        twin.counts, twin.sum_ms = list(self.counts), self.sum_ms
        return twin


class EngineMeters:
    """What one engine counts, whatever its sessions.

    Attributes:
        rounds: Durations of folding and acting, without the wait for the log.
        read_backs: From sending an own record to reading it back.
        failed_appends: Appends of which the outcome is unknown, or a refusal.
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
        """Count one event that was told to the observer."""
        with self._events_lock:
            self._events[name] = self._events.get(name, 0) + 1

    def events(self) -> dict[str, int]:
        """Return how often each event was told."""
        with self._events_lock:
            return dict(self._events)


class Tally(NamedTuple):
    """Records of one key: handed out, and done with as far as the log is told."""

    handed: int = 0
    committed: int = 0

    def plus(self, other: "Tally") -> "Tally":
        """Return both together."""
        return Tally(self.handed + other.handed, self.committed + other.committed)


class Vacancy(NamedTuple):
    """Since when, in log time, nobody had renewed a key that we claim.

    Attributes:
        after: ``stale``, ``resumed`` or ``released``: how its owner went.
        since_ms: Log time of the last renewal, or of the release.
    """

    after: str
    since_ms: int


def vacancy(known: KeyState | None, *, resumes: bool) -> Vacancy | None:
    """Return what a claim of this key would take over; None where nobody had it."""
    if known is None:
        return None
    if known.owner is None:
        return Vacancy("released", known.active_ms)
    return Vacancy("resumed" if resumes else "stale", known.renewed_ms)


class SessionMeters:
    """What one session counts of its claims.

    Attributes:
        won: Claims won, by topic and effect.
        lost: Claims that were taken or ran out, by topic and reason.
        released: Claims given up, by topic and reason.
        takeovers: From the earlier owner's last renewal to our claim, in log
            time, by topic and how that owner went.
        tallies: Records under claims that have ended, by key.
    """

    def __init__(self) -> None:
        self.won: dict[tuple[str, str], int] = {}
        self.lost: dict[tuple[str, str], int] = {}
        self.released: dict[tuple[str, str], int] = {}
        self.takeovers: dict[tuple[str, str], Histogram] = {}
        self.tallies: dict[Key, Tally] = {}

    def claim_won(
        self, key: Key, effect: str | None, *, before: Vacancy | None, log_ms: int
    ) -> None:
        """Count a claim that was won, at a log time."""
        _count(self.won, key.topic, effect or OTHER)
        if before is not None:
            place = (key.topic, before.after)
            found = self.takeovers.setdefault(place, Histogram(TAKEOVER_MS))
            found.observe(log_ms - before.since_ms)
            _trim(self.takeovers)

    def claim_ended(self, key: Key, ending: Ending, *, tally: Tally) -> None:
        """Count a claim that was won and is over, and what was done under it."""
        counts = self.lost if ending.was_lost else self.released
        _count(counts, key.topic, ending.reason)
        self.tallies[key] = self.tallies.pop(key, Tally()).plus(tally)
        _trim(self.tallies)


def _count(counts: dict[tuple[str, str], int], topic: str, reason: str) -> None:
    """Count a reason; policies of others may bring any number of them."""
    if (topic, reason) not in counts:
        known = sum(1 for place in counts if place[0] == topic)
        reason = OTHER if known >= REASONS_MAX else reason
    counts[topic, reason] = counts.get((topic, reason), 0) + 1
    _trim(counts)


def _trim(figures: dict[Any, Any]) -> None:
    if len(figures) > ENTRIES_MAX:
        del figures[next(iter(figures))]
