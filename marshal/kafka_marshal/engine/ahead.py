"""How far to fetch ahead of hand-outs, at least once.

A client library that fetches on only once all that it had fetched is taken from it
may be waited for, as over a slow link. Then more is taken at once, so that the next
fetch is under way while the application works on the last. Where it is not, as little
is taken as a poll hands out: what was used a moment ago is still near the processor.
"""

SLOW_MS = 20
CALM_READS = 32
LOOK_MS = 100


class ReadAhead:
    """The size of the next read, and when it is due although enough is fetched.

    Attributes:
        least: Records to read where nothing has to be waited for.
        due_ms: Local time at which to look for partitions that have nothing
            fetched, whatever others have.
    """

    __slots__ = ("_calm", "_is_needed", "_most", "_size", "due_ms", "least")

    def __init__(self, poll_records: int, most: int, *, is_needed: bool = True) -> None:
        """Begin with what a poll hands out.

        Args:
            poll_records: Most records that a poll hands out.
            most: Most that may be fetched and not handed out.
            is_needed: Whether more than that is to be taken where it is waited for.
        """
        self.least = min(poll_records, most)
        self.due_ms = 0
        self._is_needed = is_needed
        self._most = most
        self._size = self.least
        self._calm = 0

    def most(self, fetched: int) -> int:
        """Return how many records to read, with so many fetched already."""
        return min(self._size, self._most - fetched)

    def note(self, now_ms: int, *, waited_ms: int, is_found: bool) -> bool:
        """Take what a read was like; return whether there may be more at once.

        One that waited without a record says nothing: there was none.
        """
        self.due_ms = now_ms + LOOK_MS
        if not is_found or not self._is_needed:
            return False
        if waited_ms >= SLOW_MS:
            self._size = min(2 * self._size, self._most)
            self._calm = 0
            return self._size > self.least
        self._calm += 1
        if self._calm >= CALM_READS:
            self._size = max(self._size // 2, self.least)
            self._calm = 0
        return waited_ms > 0 and self._size > self.least
