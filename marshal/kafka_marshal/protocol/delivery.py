"""The ladder of at least once, for one held claim, sans IO (PROTOCOL 6.1).

It counts offsets only; whoever fetches keeps the records. An offset is *in
hand* from its hand-out until it is committed.
"""

from collections import deque
from collections.abc import Iterable

from kafka_marshal.errors import InvalidTransition


class AtLeastOnce:
    """Position over the contiguous prefix of what was processed (PROTOCOL 6.1).

    Attributes:
        position: Next offset to process: everything below is committed. None
            while no start is known.
    """

    __slots__ = ("_done", "_in_hand", "_last", "position")

    def __init__(self, start: int | None) -> None:
        self.position = start
        self._in_hand: deque[int] = deque()
        self._done: set[int] = set()
        self._last = -1

    @property
    def in_hand_count(self) -> int:
        """Number of offsets handed out and not yet committed."""
        return len(self._in_hand) - len(self._done)

    @property
    def tracked_count(self) -> int:
        """Number of offsets kept: those in hand, and those done out of order."""
        return len(self._in_hand)

    def hand_out(self, offsets: Iterable[int]) -> None:
        """Note offsets handed out, in increasing order.

        Raises:
            InvalidTransition: An offset is not beyond the last one handed out.
        """
        for offset in offsets:
            if offset <= self._last:
                raise InvalidTransition(f"offset {offset} handed out twice")
            self._last = offset
            self._in_hand.append(offset)

    def commit(self, offset: int) -> None:
        """Note that ``offset`` is processed; out of order is fine, twice too.

        Raises:
            InvalidTransition: The offset was never handed out under this claim.
        """
        in_hand = self._in_hand
        if in_hand and offset == in_hand[0]:
            in_hand.popleft()
            self.position = offset + 1
            while in_hand and in_hand[0] in self._done:
                self._done.remove(in_hand[0])
                self.position = in_hand.popleft() + 1
            return
        if in_hand and in_hand[0] < offset <= self._last:
            if offset in self._done:
                return
            if offset in in_hand:
                self._done.add(offset)
                return
        if offset > self._last or self.position is None or offset >= self.position:
            raise InvalidTransition(f"offset {offset} was not handed out")

    def commit_all(self) -> None:
        """Note that everything handed out so far is processed."""
        if self._in_hand:
            self.position = self._in_hand[-1] + 1
            self._in_hand.clear()
            self._done.clear()

    def jump(self, position: int) -> None:
        """Move to a later position because the log begins there (PROTOCOL 5.6)."""
        if self._in_hand:
            raise InvalidTransition("a jump needs empty hands")
        self.position = position
