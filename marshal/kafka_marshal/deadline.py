"""Deadlines: the timeout of a call, shared by all waits of the call."""

import time
from collections.abc import Callable


def monotonic_ms() -> float:
    """Return ``time.monotonic`` in milliseconds."""
    return time.monotonic() * 1000


class Deadline:
    """A time of a clock by which a call must end. Thread-safe.

    Attributes:
        timeout_ms: The time from its creation to the deadline, for messages.
    """

    __slots__ = ("_now_ms", "_until_ms", "timeout_ms")

    def __init__(
        self, timeout_ms: int, now_ms: Callable[[], float] = monotonic_ms
    ) -> None:
        """Start the time now.

        Args:
            timeout_ms: Time until the deadline; 0 or less if it has passed.
            now_ms: The clock, in milliseconds. Code that a simulator runs must give
                the clock of its ports.
        """
        self.timeout_ms = timeout_ms
        self._now_ms = now_ms
        self._until_ms = now_ms() + timeout_ms

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self._now_ms() >= self._until_ms

    @property
    def left_ms(self) -> int:
        """Whole milliseconds until the deadline; 0 once it has passed."""
        return max(0, int(self._until_ms - self._now_ms()))

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return max(0.0, (self._until_ms - self._now_ms()) / 1000)

    def require_ms(self, late: Callable[[], Exception]) -> int:
        """Return the whole milliseconds until the deadline, at least 1.

        Args:
            late: Returns the error to raise if less is left.

        Raises:
            Exception: Less than a millisecond is left.
        """
        left_ms = self.left_ms
        if not left_ms:
            raise late()
        return left_ms

    def within(self, timeout_ms: int) -> "Deadline":
        """Return a deadline this long from now, but no later than this one."""
        return Deadline(min(timeout_ms, self.left_ms), self._now_ms)
