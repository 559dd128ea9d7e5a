"""The ladder of at least once, for one held claim, sans IO (PROTOCOL 6.1).

It counts offsets only; whoever fetches keeps the records. An offset is *in
hand* from its hand-out until it is committed. Offsets are kept as runs, a first
and a last of offsets that follow each other: a whole batch costs as much as one
record, and a handler that is stuck costs nothing more.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from operator import itemgetter

from kafka_marshal.errors import InvalidTransition

_FIRST = itemgetter(0)
_LAST = itemgetter(1)


class AtLeastOnce:
    """Position over the contiguous prefix of what was processed (PROTOCOL 6.1).

    Attributes:
        position: Next offset to process: everything below is committed. None
            while no start is known.
        tracked_count: Number of offsets kept: those in hand, and those done out
            of order.
    """

    __slots__ = (
        "_done",
        "_done_count",
        "_empty_below",
        "_last",
        "_runs",
        "position",
        "tracked_count",
    )

    def __init__(self, start: int | None) -> None:
        self.position = start
        self.tracked_count = 0
        # What was handed out and is not below the position. A hole between two
        # runs has no records: compaction or a transaction's marker.
        self._runs: deque[list[int]] = deque()
        # Parts of runs that were committed ahead of the first one in hand, in order.
        self._done: list[tuple[int, int]] = []
        self._done_count = 0
        self._last = -1
        # No record lies between the last one in hand and this offset.
        self._empty_below = 0

    @property
    def in_hand_count(self) -> int:
        """Number of offsets handed out and not yet committed."""
        return self.tracked_count - self._done_count

    def hand_out(self, first: int, last: int) -> None:
        """Note that every offset from ``first`` to ``last`` is handed out.

        Raises:
            InvalidTransition: One is not beyond the last one handed out.
        """
        if not self._last < first <= last:
            raise InvalidTransition(f"offset {first} handed out twice")
        runs = self._runs
        if runs and runs[-1][1] == first - 1:
            runs[-1][1] = last
        else:
            runs.append([first, last])
        self._last = last
        self.tracked_count += last - first + 1

    def commit(self, first: int, last: int) -> None:
        """Note that what was handed out from ``first`` to ``last`` is processed.

        Out of order is fine, twice too. Offsets between the two that have no
        record are nobody's to commit, and are passed over.

        Raises:
            InvalidTransition: An end was never handed out under this claim;
                nothing is noted then.
        """
        runs = self._runs
        is_one = first == last
        if runs and first == runs[0][0] and (is_one or not self._done):
            head = runs[0]
            if last <= head[1]:
                # The ordinary case: what was handed out first is done first.
                self._pass(head, last)
                self._advance()
                return
        for offset in (first, last):
            if not self._was_handed_out(offset):
                raise InvalidTransition(f"offset {offset} was not handed out")
        at = max(0, bisect_right(runs, first, key=_FIRST) - 1)
        while at < len(runs) and runs[at][0] <= last:
            self._mark(max(first, runs[at][0]), min(last, runs[at][1]))
            at += 1
        self._advance()

    def commit_all(self) -> None:
        """Note that everything handed out so far is processed."""
        if self._runs:
            self.position = max(self._last + 1, self._empty_below)
            self._runs.clear()
            self._done.clear()
            self.tracked_count = self._done_count = 0

    def commit_below(self, end: int) -> None:
        """Note that everything below ``end`` is processed, handed out here or not."""
        at = 0
        while at < len(self._runs) and self._runs[at][0] < end:
            first, last = self._runs[at]
            self._mark(first, min(last, end - 1))
            at += 1
        self._advance()
        if self.position is None or self.position < end:
            self.position = end
        self._last = max(self._last, end - 1)

    def skip(self, first: int, last: int) -> None:
        """Note that no records exist from ``first`` to ``last``.

        The position passes them once everything before is committed (PROTOCOL 6.1).
        A range that does not follow what is known so far changes nothing.
        """
        if self._runs:
            if first <= max(self._last + 1, self._empty_below):
                self._empty_below = max(self._empty_below, last + 1)
        elif self.position is not None and first <= self.position:
            self.position = max(self.position, last + 1)

    def jump(self, position: int) -> None:
        """Move to a later position because the log begins there (PROTOCOL 5.6)."""
        if self._runs:
            raise InvalidTransition("a jump needs empty hands")
        self.position = position

    def _was_handed_out(self, offset: int) -> bool:
        if self.position is not None and offset < self.position:
            return True
        at = bisect_right(self._runs, offset, key=_FIRST) - 1
        return at >= 0 and offset <= self._runs[at][1]

    def _mark(self, first: int, last: int) -> None:
        """Add a part of one run to what is done, joined with what it touches."""
        done = self._done
        low = bisect_left(done, first - 1, key=_LAST)
        high = bisect_right(done, last + 1, key=_FIRST)
        if low < high:
            first = min(first, done[low][0])
            last = max(last, done[high - 1][1])
        known = sum(end - begin + 1 for begin, end in done[low:high])
        done[low:high] = [(first, last)]
        self._done_count += last - first + 1 - known

    def _advance(self) -> None:
        """Move the position over everything that is done at the front."""
        done, runs = self._done, self._runs
        while done and done[0][0] == runs[0][0]:
            first, last = done.pop(0)
            self._done_count -= last - first + 1
            self._pass(runs[0], last)

    def _pass(self, head: list[int], last: int) -> None:
        """Move the position over the first run's offsets up to ``last``."""
        self.tracked_count -= last - head[0] + 1
        self.position = last + 1
        if last == head[1]:
            self._runs.popleft()
            if not self._runs:
                self.position = max(self.position, self._empty_below)
        else:
            head[0] = last + 1
