"""Calls what is due, in the order of virtual time."""

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
        """Start with nothing to do."""
        self.clock = clock
        self._heap: list[tuple[int, int, Call]] = []
        self._numbers = itertools.count()

    def at(self, at_ms: int, call: Call) -> None:
        """Call at a true time, or at once where that is past.

        What is due at the same time is called in the order that it was asked for.
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
            duration_ms: How much at most.
            after: Called after each call.
            is_done: Ends it early; asked after each call.

        Returns:
            How long it took until ``is_done``, None if that never held.
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
