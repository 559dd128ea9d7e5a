"""Clocks, random numbers and background work under control of a test."""

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.ports import Background, Clock, Entropy

T = TypeVar("T")

EPOCH_MS = 1_700_000_000_000
_MILLION = 1_000_000


class VirtualClock(Clock):
    """True time of a simulated world, which advances only by ``advance``.

    Attributes:
        at_ms: The virtual boot clock, for callers that read it a million times a run.
    """

    def __init__(self, *, now_ms: int = 0, wall_ms: int = EPOCH_MS) -> None:
        """Start at a boot time and a wall time."""
        self.at_ms = now_ms
        self._wall_offset_ms = wall_ms - now_ms

    def now_ms(self) -> int:
        """Return the virtual boot clock."""
        return self.at_ms

    def wall_ms(self) -> int:
        """Return the virtual wall clock."""
        return self.at_ms + self._wall_offset_ms

    def advance(self, duration_ms: int) -> None:
        """Advance the time.

        Args:
            duration_ms: By how much, at least 0.
        """
        assert duration_ms >= 0
        self.at_ms += duration_ms

    def step_wall(self, by_ms: int) -> None:
        """Step the wall clock forward or back, as an administrator or NTP does."""
        self._wall_offset_ms += by_ms

    def view(
        self, *, drift_ppm: int = 0, offset_ms: int = 0, wall_offset_ms: int = 0
    ) -> "ClockView":
        """Return the clock of one simulated machine.

        Args:
            drift_ppm: How much faster it runs, in parts per million (or slower,
                below 0).
            offset_ms: Its boot clock is this much ahead at the moment.
            wall_offset_ms: Its wall clock is this much ahead.
        """
        return ClockView(
            self,
            drift_ppm=drift_ppm,
            offset_ms=offset_ms,
            wall_offset_ms=wall_offset_ms,
        )


class ClockView(Clock):
    """A machine's clock: true time with a drift and an offset, in integers."""

    def __init__(
        self, base: VirtualClock, *, drift_ppm: int, offset_ms: int, wall_offset_ms: int
    ) -> None:
        """Store when this clock was exact; see ``VirtualClock.view``."""
        self._base = base
        self._drift_ppm = drift_ppm
        self._start_ms = base.now_ms()
        self._offset_ms = offset_ms
        self._wall_offset_ms = wall_offset_ms

    def now_ms(self) -> int:
        """Return this machine's boot clock."""
        true_ms = self._base.at_ms
        gained_ms = (true_ms - self._start_ms) * self._drift_ppm // _MILLION
        return true_ms + gained_ms + self._offset_ms

    def wall_ms(self) -> int:
        """Return this machine's wall clock."""
        return self._base.wall_ms() + self._wall_offset_ms


class SeededEntropy(Entropy):
    """Random numbers that a seed reproduces. Never for secrets."""

    def __init__(self, seed: int) -> None:
        """Start the sequence of ``seed``."""
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose

    def random_bytes(self, count: int) -> bytes:
        """Return the next ``count`` bytes of the sequence."""
        return self._random.randbytes(count)

    def below(self, limit: int) -> int:
        """Return an integer 0 <= n < ``limit`` (0 where limit < 1)."""
        return self._random.randrange(limit) if limit > 1 else 0


class InlineBackground(Background):
    """Background work without a thread: at once, or by ``run_waiting``."""

    def __init__(self, *, is_held: bool = False) -> None:
        """Choose when calls run.

        Args:
            is_held: Whether calls wait until ``run_waiting``.
        """
        self.is_held = is_held
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_closed = False

    @property
    def waiting_count(self) -> int:
        """Number of waiting calls."""
        return len(self._waiting)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run ``call`` now, or queue it; return its outcome, which may be pending."""
        future: Future[T] = Future()
        if self._is_closed:
            future.set_exception(InvalidTransition("The background is closed."))
        else:
            self._waiting.append((future, call))
            if not self.is_held:
                self.run_waiting()
        return future

    def run_waiting(self, *, count: int | None = None) -> int:
        """Run waiting calls, oldest first.

        Args:
            count: Maximum number of calls to run; None for all that wait now.

        Returns:
            Number of calls that ran.
        """
        chosen = min(len(self._waiting), len(self._waiting) if count is None else count)
        for _ in range(chosen):
            future, call = self._waiting.popleft()
            try:
                outcome = call()
            except Exception as error:  # noqa: BLE001 - belongs to the caller
                future.set_exception(error)
            else:
                future.set_result(outcome)
        return chosen

    def close(self, timeout_ms: int) -> None:
        """Fail the waiting calls. Idempotent.

        Args:
            timeout_ms: Ignored: no call is ever running.
        """
        del timeout_ms
        self._is_closed = True
        while self._waiting:
            future, _ = self._waiting.popleft()
            future.set_exception(InvalidTransition("The background was closed."))


@attrs.define
class _Hand:
    """One broker's clock relative to true time, from a moment on."""

    ahead_ms: int = 0
    drift_ppm: int = 0
    since_ms: int = 0

    def ahead_at(self, at_ms: int) -> int:
        return self.ahead_ms + (at_ms - self.since_ms) * self.drift_ppm // _MILLION


class BrokerClocks:
    """The wall clocks for timestamps by leaders."""

    def __init__(self, clock: Clock) -> None:
        """Start with exact clocks."""
        self._clock = clock
        self._hands: dict[int, _Hand] = {}

    def wall_ms(self, broker: int, at_ms: int) -> int:
        """Return a broker's wall clock at a moment of true time."""
        wall_ms = self._clock.wall_ms() - (self._clock.now_ms() - at_ms)
        hand = self._hands.get(broker)
        return wall_ms if hand is None else wall_ms + hand.ahead_at(at_ms)

    def ahead_ms(self, broker: int) -> int:
        """Return by how much a broker's clock is ahead of true time now."""
        hand = self._hands.get(broker)
        return 0 if hand is None else hand.ahead_at(self._clock.now_ms())

    def set_ahead(self, broker: int, ahead_ms: int) -> None:
        """Step a broker's clock to be ahead by ``ahead_ms`` now."""
        hand = self._hands.setdefault(broker, _Hand())
        hand.ahead_ms, hand.since_ms = ahead_ms, self._clock.now_ms()

    def set_drift(self, broker: int, drift_ppm: int) -> None:
        """Let a broker's clock run faster from now on, or slower below 0.

        Args:
            broker: The broker.
            drift_ppm: Parts per million.
        """
        ahead_ms = self.ahead_ms(broker)
        self._hands[broker] = _Hand(ahead_ms, drift_ppm, self._clock.now_ms())
