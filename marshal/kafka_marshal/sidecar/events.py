"""The events of a client: a bounded buffer, a cursor, and the SSE response.

A reader that fell behind the buffer, or was connected to an earlier process of the
sidecar, gets a snapshot instead of the missed events. The sidecar keeps for each reader
a position, the connection's buffer and one batch of events, so a slow reader needs
little memory and still reaches the present state.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import msgspec

from kafka_marshal.protocol.types import whole_number
from kafka_marshal.remote.api import EventBody, Failed, Frame, Snapshot, frame_id

# --- Buffer and cursor -----------------------------------------------------------


EVENTS_MAX = 1_024

LogPosition = tuple[int, int]
"""A coordinating partition and an offset in it."""


class EventBuffer:
    """The latest events of one client. Used under the engine's lock.

    Attributes:
        number: Number of the last event. The first number is above the numbers of any
            earlier buffer of the client, so that ids are unique.
        end: Event of the final failure, None before; sent after every snapshot.
    """

    __slots__ = ("_cursor", "_frames", "_incarnation", "_snapshot", "end", "number")

    def __init__(
        self,
        incarnation: str,
        *,
        snapshot: Callable[[], tuple[Snapshot, LogPosition]],
        begin: int = 0,
    ) -> None:
        self.number = begin
        self.end: Frame | None = None
        self._incarnation = incarnation
        self._snapshot = snapshot
        self._frames: deque[Frame] = deque(maxlen=EVENTS_MAX)
        self._cursor: EventCursor | None = None

    def push(self, body: EventBody, at: LogPosition) -> None:
        """Append an event; ``at`` is the log entry that caused it."""
        self.number += 1
        frame = Frame(self._id(self.number, at), body)
        self._frames.append(frame)
        if isinstance(body, Failed):
            self.end = frame
        if self._cursor is not None:
            self._cursor.notify()

    def snapshot(self) -> Frame:
        """Return a snapshot as of the last event."""
        body, at = self._snapshot()
        return Frame(self._id(self.number, at), body)

    def since(self, number: int) -> list[Frame] | None:
        """Return the events after a number, None if some are no longer kept."""
        missing = self.number - number
        if missing > len(self._frames):
            return None
        first = len(self._frames) - missing
        return [frame for index, frame in enumerate(self._frames) if index >= first]

    def number_of(self, event_id: str | None) -> int | None:
        """Return the number in an event id, None if another process made the id."""
        name, _, rest = (event_id or "").partition(Frame.SEPARATOR)
        text, _, _ = rest.partition(Frame.SEPARATOR)
        is_own = name == self._incarnation[:8]
        return whole_number(text, most=self.number) if is_own else None

    def open(
        self, lock: AbstractContextManager[object], *, after: str | None
    ) -> "EventCursor":
        """Return a cursor after an event; the previous cursor is closed."""
        if self._cursor is not None:
            self._cursor.close()
        self._cursor = EventCursor(self, lock, self.number_of(after))
        return self._cursor

    def close(self) -> None:
        """Close the cursor, because there will be no more events."""
        if self._cursor is not None:
            self._cursor.close()

    def _id(self, number: int, at: LogPosition) -> str:
        return frame_id(self._incarnation, number, t=at[0], offset=at[1])


class EventCursor:
    """A position in one client's events. Thread-safe.

    Attributes:
        on_news: Called on any thread, perhaps under the engine's lock, when there are
            events or the cursor is closed. It must not block.
        is_closed: Whether it was closed, a newer cursor has replaced it, or its client
            is gone. Earlier events can still be taken.
    """

    def __init__(
        self,
        buffer: EventBuffer,
        lock: AbstractContextManager[object],
        number: int | None,
    ) -> None:
        self.on_news: Callable[[], None] | None = None
        self.is_closed = False
        self._buffer = buffer
        self._lock = lock
        self._number = number

    def take(self) -> list[Frame]:
        """Return the new events, oldest first, without waiting.

        If events were missed, returns a snapshot instead, and any final failure.
        """
        with self._lock:
            missed = None if self._number is None else self._buffer.since(self._number)
            if missed is None:
                frame = self._buffer.snapshot()
                self._number = self._buffer.number
                end = self._buffer.end
                return [frame] if end is None else [frame, end]
            self._number = self._buffer.number
            return missed

    def notify(self) -> None:
        """Call ``on_news``."""
        if self.on_news is not None:
            self.on_news()

    def close(self) -> None:
        """Close the cursor. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self.notify()


# --- Server-sent events ----------------------------------------------------------


CHUNK_BYTES = 16_384
RETRY_MS = 200
# Number of moments within ``keep_alive_s`` at which streams may send a keep-alive.
KEEP_ALIVE_SLOTS = 16
KEEP_ALIVE = b": keep-alive\n\n"
HELLO = b"retry: %d\n\n" % RETRY_MS

Take = Callable[[Callable[[], list[Frame]]], Awaitable[list[Frame]]]


def encode_event(frame: Frame) -> bytes:
    """Return one event in the format of server-sent events."""
    kind = str(frame.body.__struct_config__.tag)
    data = msgspec.json.encode(frame.body)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (frame.id.encode(), kind.encode(), data)


def chunks(frames: Sequence[Frame]) -> Iterator[bytes]:
    """Yield encoded events in pieces of bounded size; a larger event is one piece."""
    waiting = bytearray()
    for frame in frames:
        waiting += encode_event(frame)
        if len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)


class EventStream:
    """The server-sent events of one client.

    Args:
        feed: The client's events; closed with the stream.
        take: Runs a function that may block on another thread.
        keep_alive_s: Longest time without sending anything.
        on_sent: Called with the number of events sent, and the number of snapshots
            among them that were not the first event: the client had fallen behind.
    """

    def __init__(
        self,
        feed: EventCursor,
        *,
        take: Take,
        keep_alive_s: float,
        on_sent: Callable[[int, int], None] = lambda _, __: None,
    ) -> None:
        self._cursor = feed
        self._take = take
        self._keep_alive_s = keep_alive_s
        self._on_sent = on_sent
        self._sent_count = 0
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._news.set()
        self._is_ended = False
        self._is_closed = False
        feed.on_news = self._on_news

    def end(self) -> None:
        """End the stream after the current piece. On the event loop only."""
        self._is_ended = True
        self._news.set()

    def _on_news(self) -> None:
        """Wake up the response; called on any thread."""
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:
            # The loop is closed.
            self._is_ended = True

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the response; each piece is made once the one before it was sent."""
        try:
            yield HELLO
            while not (self._is_ended or self._cursor.is_closed):
                try:
                    # Unlike wait_for, this creates no task.
                    async with asyncio.timeout(self._silence_s()):
                        await self._news.wait()
                except TimeoutError:
                    yield KEEP_ALIVE
                    continue
                self._news.clear()
                async for chunk in self._next():
                    yield chunk
            # The last events, such as the end of a drain, are still sent.
            if not self._is_closed:
                async for chunk in self._next():
                    yield chunk
        finally:
            self.close()

    def _silence_s(self) -> float:
        """Return how long to wait before the next keep-alive.

        The wait ends at one of a few moments that all streams share: waking the process
        for each stream separately takes several times as long.
        """
        pace_s = self._keep_alive_s / KEEP_ALIVE_SLOTS
        return self._keep_alive_s - self._loop.time() % pace_s

    async def _next(self) -> AsyncIterator[bytes]:
        frames = await self._take(self._cursor.take)
        for chunk in chunks(frames):
            yield chunk
        snapshots = sum(isinstance(frame.body, Snapshot) for frame in frames)
        is_first = self._sent_count == 0 and bool(frames)
        self._sent_count += len(frames)
        self._on_sent(len(frames), snapshots - (is_first and snapshots > 0))

    def close(self) -> None:
        """Close the cursor; nothing more is sent. Idempotent, on the event loop."""
        self._is_closed = True
        self.end()
        self._cursor.close()
