"""When a wait gives up: the timeout of a call, for all that the call waits for."""

import time
from collections.abc import Callable


def monotonic_ms() -> float:
    """Return ``time.monotonic`` in milliseconds."""
    return time.monotonic() * 1000


class Deadline:
    """A moment of a clock, some time after it was made. Thread-safe.

    Attributes:
        timeout_ms: The time that there was at first, for messages.
    """

    __slots__ = ("_now_ms", "_until_ms", "timeout_ms")

    def __init__(
        self, timeout_ms: int, now_ms: Callable[[], float] = monotonic_ms
    ) -> None:
        """Begin now.

        Args:
            timeout_ms: Time until the deadline; it has passed if that is not positive.
            now_ms: The clock, in milliseconds; that of the ports for code that a
                simulator runs.
        """
        self.timeout_ms = timeout_ms
        self._now_ms = now_ms
        self._until_ms = now_ms() + timeout_ms

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self._now_ms() >= self._until_ms

    @property
    def left_ms(self) -> int:
        """Whole milliseconds until it; 0 once it has passed."""
        return max(0, int(self._until_ms - self._now_ms()))

    @property
    def left_s(self) -> float:
        """Seconds until it; 0 once it has passed."""
        return max(0.0, (self._until_ms - self._now_ms()) / 1000)

    def require_ms(self, late: Callable[[], Exception]) -> int:
        """Return the whole milliseconds until it, at least 1.

        Args:
            late: Returns the error to raise otherwise.

        Raises:
            Exception: Less than a millisecond is left.
        """
        left_ms = self.left_ms
        if not left_ms:
            raise late()
        return left_ms

    def within(self, timeout_ms: int) -> "Deadline":
        """Return the deadline so long after now, or this one if that is earlier."""
        return Deadline(min(timeout_ms, self.left_ms), self._now_ms)
