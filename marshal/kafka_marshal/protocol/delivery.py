"""Progress of a claim with at-least-once delivery, as a sans-IO machine (PROTOCOL 6.1).

It counts offsets only; the fetching code keeps the records. An offset is
*uncommitted* from its hand-out until its commit. Offsets are kept as runs of
consecutive offsets: a batch costs as much memory as one record, and a stuck handler
does not add to it.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from operator import itemgetter

from kafka_marshal.errors import InvalidTransition

_FIRST = itemgetter(0)
_LAST = itemgetter(1)


class AtLeastOnce:
    """The position: the end of the contiguous processed prefix (PROTOCOL 6.1).

    Attributes:
        position: Next offset to process: everything below is committed. None
            while no start is known.
        tracked_count: Number of offsets kept: the uncommitted ones, and those that
            were committed out of order.
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
        # Offsets handed out at or above the position. A gap between two runs has no
        # records: compaction or a transaction marker.
        self._runs: deque[list[int]] = deque()
        # Committed parts of runs above the first uncommitted offset, ascending.
        self._done: list[tuple[int, int]] = []
        self._done_count = 0
        self._last = -1
        # No record exists between the last uncommitted offset and this one.
        self._empty_below = 0

    @property
    def uncommitted_count(self) -> int:
        """Number of offsets handed out and not yet committed."""
        return self.tracked_count - self._done_count

    def hand_out(self, first: int, last: int) -> None:
        """Record that every offset from ``first`` to ``last`` is handed out.

        Raises:
            InvalidTransition: An offset is not above the last one handed out.
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

    def put_back(self, first: int) -> int:
        """Undo the hand-out of every offset from ``first`` on: nobody received them.

        Call it only if none of them is committed. ``hand_out`` of them may have been
        interrupted.

        Returns:
            Number of offsets taken back.
        """
        runs, before = self._runs, self.tracked_count
        while runs and runs[-1][0] >= first:
            runs.pop()
        if runs:
            runs[-1][1] = min(runs[-1][1], first - 1)
        self._last = min(self._last, first - 1)
        self._empty_below = min(self._empty_below, first)
        self.tracked_count = sum(last - begin + 1 for begin, last in runs)
        return before - self.tracked_count

    def commit(self, first: int, last: int) -> None:
        """Record that the offsets from ``first`` to ``last`` are processed.

        Commits may come out of order and more than once. Offsets without a record
        are skipped.

        Raises:
            InvalidTransition: ``first`` or ``last`` was never handed out under this
                claim. Nothing changes.
        """
        runs = self._runs
        is_one = first == last
        if runs and first == runs[0][0] and (is_one or not self._done):
            head = runs[0]
            if last <= head[1]:
                # The common case: commits in the order of the hand-outs.
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

    def commit_all(self, *, below: int | None = None) -> None:
        """Record that everything handed out so far is processed.

        Args:
            below: Only offsets below this one, if later records did not reach the
                application. None for all.
        """
        if below is not None:
            if self._runs and self._runs[0][0] < below:
                self.commit_below(below)
        elif self._runs:
            self.position = max(self._last + 1, self._empty_below)
            self._runs.clear()
            self._done.clear()
            self.tracked_count = self._done_count = 0

    def commit_below(self, end: int) -> None:
        """Record that everything below ``end`` is processed, handed out here or not."""
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
        """Record that no records exist from ``first`` to ``last``.

        The position passes them once all handed out is committed (PROTOCOL 6.1).
        A range that is not adjacent to the known offsets changes nothing.
        """
        if self._runs:
            if first <= max(self._last + 1, self._empty_below):
                self._empty_below = max(self._empty_below, last + 1)
        elif self.position is not None and first <= self.position:
            self.position = max(self.position, last + 1)

    def jump(self, position: int) -> None:
        """Move to a later position, where the log now starts (PROTOCOL 5.6)."""
        if self._runs:
            raise InvalidTransition("cannot jump while offsets are uncommitted")
        self.position = position

    def _was_handed_out(self, offset: int) -> bool:
        if self.position is not None and offset < self.position:
            return True
        at = bisect_right(self._runs, offset, key=_FIRST) - 1
        return at >= 0 and offset <= self._runs[at][1]

    def _mark(self, first: int, last: int) -> None:
        """Add a part of one run to the committed parts, merged with adjacent ones."""
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
        """Move the position over the committed parts at the front."""
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
