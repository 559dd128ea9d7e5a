"""A client's events as server-sent events.

Nothing is kept here: what has not been sent stands in the hub's ring, which is
bounded and answers a reader that fell behind with a new snapshot. So a slow reader
costs what its connection's buffer holds, and one lot of events taken from the ring.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

import msgspec

from kafka_marshal.remote.api import Frame, Snapshot
from kafka_marshal.sidecar.face import FeedFace

CHUNK_BYTES = 16_384
RETRY_MS = 200
KEEP_ALIVE = b": keep-alive\n\n"
HELLO = b"retry: %d\n\n" % RETRY_MS

Take = Callable[[Callable[[], list[Frame]]], Awaitable[list[Frame]]]


def to_bytes(frame: Frame) -> bytes:
    """Return one event as it goes over the wire."""
    kind = str(frame.body.__struct_config__.tag)
    data = msgspec.json.encode(frame.body)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (
        frame.id.encode(),
        kind.encode(),
        data,
    )


def chunks(frames: Sequence[Frame]) -> Iterator[bytes]:
    """Return events in pieces of a bounded size, or of one event that is larger."""
    waiting = bytearray()
    for frame in frames:
        waiting += to_bytes(frame)
        if len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)


class Stream:
    """One open stream of one client.

    Args:
        feed: The client's events; closed with the stream.
        take: Calls a function that may block, elsewhere.
        keep_alive_s: Longest silence.
        on_sent: Told how many events were sent, and how many of them were snapshots
            in the middle of a stream: the client had fallen behind.
    """

    def __init__(
        self,
        feed: FeedFace,
        *,
        take: Take,
        keep_alive_s: float,
        on_sent: Callable[[int, int], None] = lambda _, __: None,
    ) -> None:
        self._feed = feed
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
        """End it after what it is sending. On the event loop only."""
        self._is_ended = True
        self._news.set()

    def _on_news(self) -> None:
        """Look for events; on whichever thread they came."""
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:
            # The loop is closed: nobody reads any more.
            self._is_ended = True

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the stream; asking for the next piece waits until one was sent."""
        try:
            yield HELLO
            while not (self._is_ended or self._feed.is_closed):
                try:
                    await asyncio.wait_for(self._news.wait(), self._keep_alive_s)
                except TimeoutError:
                    yield KEEP_ALIVE
                    continue
                self._news.clear()
                async for chunk in self._next():
                    yield chunk
            # What was told last, such as the end of a drain, still goes out.
            if not self._is_closed:
                async for chunk in self._next():
                    yield chunk
        finally:
            self.close()

    async def _next(self) -> AsyncIterator[bytes]:
        frames = await self._take(self._feed.take)
        for chunk in chunks(frames):
            yield chunk
        anew = sum(isinstance(frame.body, Snapshot) for frame in frames)
        is_first = self._sent_count == 0 and bool(frames)
        self._sent_count += len(frames)
        self._on_sent(len(frames), anew - (is_first and anew > 0))

    def close(self) -> None:
        """Let go of the feed; nothing more goes out. Idempotent, on the event loop."""
        self._is_closed = True
        self.end()
        self._feed.close()
