"""The events of one client: a bounded ring, and whoever reads along.

A reader that fell behind the ring, or comes from an earlier life of the sidecar, is
told everything anew by a snapshot. Nothing is kept for a reader but its place, so a
slow one costs nothing and still converges.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from kafka_marshal.remote.api import EventBody, Failed, Frame, Snapshot, frame_id

EVENTS_MAX = 1_024
DIGITS_MAX = 20

Place = tuple[int, int]
"""A coordinating partition, and an offset of it."""


class Ring:
    """The last events of one client. Called under the engine's lock.

    Attributes:
        number: Number of the last event. It begins above those of any earlier
            ring of the client: an id of that must not be taken for one of this.
        end: That it is all over, once it is: told behind every snapshot.
    """

    __slots__ = ("_feed", "_frames", "_incarnation", "_snapshot", "end", "number")

    def __init__(
        self,
        incarnation: str,
        *,
        snapshot: Callable[[], tuple[Snapshot, Place]],
        begin: int = 0,
    ) -> None:
        self.number = begin
        self.end: Frame | None = None
        self._incarnation = incarnation
        self._snapshot = snapshot
        self._frames: deque[Frame] = deque(maxlen=EVENTS_MAX)
        self._feed: Feed | None = None

    def push(self, body: EventBody, at: Place) -> None:
        """Add an event that follows from an entry of the log, and tell the reader."""
        self.number += 1
        frame = Frame(self._id(self.number, at), body)
        self._frames.append(frame)
        if isinstance(body, Failed):
            self.end = frame
        if self._feed is not None:
            self._feed.ring_up()

    def snapshot(self) -> Frame:
        """Return everything as of the last event."""
        body, at = self._snapshot()
        return Frame(self._id(self.number, at), body)

    def since(self, number: int) -> list[Frame] | None:
        """Return the events behind a number; None where some are gone."""
        missing = self.number - number
        if missing > len(self._frames):
            return None
        first = len(self._frames) - missing
        return [frame for index, frame in enumerate(self._frames) if index >= first]

    def place_of(self, event_id: str | None) -> int | None:
        """Return the number that an id names, None where it is not of this ring."""
        name, _, rest = (event_id or "").partition(Frame.SEPARATOR)
        text, _, _ = rest.partition(Frame.SEPARATOR)
        if name != self._incarnation[:8] or not (text.isascii() and text.isdigit()):
            return None
        number = int(text[:DIGITS_MAX])
        return number if number <= self.number else None

    def open(
        self, lock: AbstractContextManager[object], *, after: str | None
    ) -> "Feed":
        """Return a reader from behind an event on; the one before it ends."""
        if self._feed is not None:
            self._feed.close()
        self._feed = Feed(self, lock, self.place_of(after))
        return self._feed

    def close(self) -> None:
        """End the reader: nothing more will come."""
        if self._feed is not None:
            self._feed.close()

    def _id(self, number: int, at: Place) -> str:
        return frame_id(self._incarnation, number, t=at[0], offset=at[1])


class Feed:
    """The events of one client, from where it was. Thread-safe.

    Attributes:
        on_news: Called on any thread, perhaps under the engine's lock, when there
            is something to take or it has ended: it must not block.
        is_closed: Whether it has ended: closed, replaced by a newer one, or its
            client gone. What came before can still be taken.
    """

    def __init__(
        self, ring: Ring, lock: AbstractContextManager[object], number: int | None
    ) -> None:
        self.on_news: Callable[[], None] | None = None
        self.is_closed = False
        self._ring = ring
        self._lock = lock
        self._number = number

    def take(self) -> list[Frame]:
        """Return what has come since, oldest first, without waiting.

        Starts with a snapshot where what was missed cannot be told one by one.
        """
        with self._lock:
            missed = None if self._number is None else self._ring.since(self._number)
            if missed is None:
                frame = self._ring.snapshot()
                self._number = self._ring.number
                end = self._ring.end
                return [frame] if end is None else [frame, end]
            self._number = self._ring.number
            return missed

    def ring_up(self) -> None:
        """Tell the reader that there is news."""
        if self.on_news is not None:
            self.on_news()

    def close(self) -> None:
        """End it. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self.ring_up()
