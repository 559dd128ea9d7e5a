"""Makes due calls, in the order of virtual time."""

import heapq
import itertools
from collections.abc import Callable

from simulator.clock import VirtualClock

Call = Callable[[], None]


class Loop:
    """A queue of calls; nothing happens between two of them.

    Time moves straight to the next call, so an hour in which nothing is due costs
    nothing.
    """

    def __init__(self, clock: VirtualClock) -> None:
        """Start without calls."""
        self.clock = clock
        self._heap: list[tuple[int, int, Call]] = []
        self._numbers = itertools.count()

    def at(self, at_ms: int, call: Call) -> None:
        """Schedule a call at a true time, or at once if that is past.

        Calls that are due at the same time are made in the order of scheduling.
        """
        heapq.heappush(self._heap, (at_ms, next(self._numbers), call))

    def run(
        self,
        duration_ms: int,
        *,
        after: Call,
        is_done: Callable[[], bool] | None = None,
    ) -> int | None:
        """Let time pass.

        Args:
            duration_ms: Maximum time.
            after: Called after each call.
            is_done: Ends the run early if it returns True; called after each call.

        Returns:
            Time until ``is_done`` returned True, None if it never did.
        """
        clock, heap = self.clock, self._heap
        start_ms = clock.at_ms
        end_ms = start_ms + duration_ms
        while heap and heap[0][0] <= end_ms:
            at_ms, _, call = heapq.heappop(heap)
            if at_ms > clock.at_ms:
                clock.advance(at_ms - clock.at_ms)
            call()
            after()
            if is_done is not None and is_done():
                return clock.at_ms - start_ms
        clock.advance(end_ms - clock.at_ms)
        return None
