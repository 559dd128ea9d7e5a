"""Event buffer, cursors and server-sent events: ordered, bounded, and converging."""

import asyncio
import threading
from types import SimpleNamespace

import msgspec
import pytest
from fakeservice import RING, SNAPSHOT, FakeEventReader, assigned

from kafka_marshal.remote import api
from kafka_marshal.sidecar import events
from kafka_marshal.sidecar.events import (
    CHUNK_BYTES,
    EVENTS_MAX,
    HELLO,
    KEEP_ALIVE,
    EventBuffer,
    EventStream,
)

# --- Buffer and cursor ---


NAME = "0123456789abcdef" * 2


@pytest.fixture
def buffer():
    def snapshot():
        return (
            api.Snapshot(
                assigned=(),
                releasing=(),
                paused=api.Paused(is_paused=False),
                subscriptions=(),
            ),
            (3, 17),
        )

    return EventBuffer(NAME, snapshot=snapshot)


def opened(buffer, after=None):
    return buffer.open(threading.RLock(), after=after)


def lost(number):
    return api.Lost(topic="t", partition=number, epoch=1, reason="paused")


def numbers(frames):
    return [getattr(frame.body, "partition", "snapshot") for frame in frames]


def test_event_ids_have_number_and_log_position(buffer):
    feed = opened(buffer)
    (first,) = feed.take()
    assert first.id == "01234567.0.3.17"
    buffer.push(lost(0), (2, 5))
    buffer.push(lost(1), (4, 6))
    assert [frame.id for frame in feed.take()] == ["01234567.1.2.5", "01234567.2.4.6"]
    assert feed.take() == []


def test_a_reader_resumes_after_its_last_event(buffer):
    for number in range(5):
        buffer.push(lost(number), (0, number))
    assert numbers(opened(buffer, "01234567.3.0.2").take()) == [3, 4]
    assert numbers(opened(buffer, "01234567.5.0.4").take()) == []


@pytest.mark.parametrize(
    "after",
    [
        None,
        "",
        "01234567",
        "01234567.",
        "01234567.6.0.0",
        "fedcba98.1.0.0",
        "01234567.-1.0",
    ],
)
def test_a_reader_with_an_unknown_event_id_gets_a_snapshot(buffer, after):
    buffer.push(lost(0), (0, 0))
    assert numbers(opened(buffer, after).take()) == ["snapshot"]


def test_a_reader_that_missed_events_gets_a_snapshot(buffer):
    feed = opened(buffer)
    feed.take()
    for number in range(EVENTS_MAX):
        buffer.push(lost(number), (0, 0))
    assert len(feed.take()) == EVENTS_MAX, "as many as there is room for"
    for number in range(EVENTS_MAX + 1):
        buffer.push(lost(number), (0, 0))
    assert numbers(feed.take()) == ["snapshot"]
    buffer.push(lost(7), (0, 0))
    assert numbers(feed.take()) == [7]


def test_the_final_failure_follows_every_snapshot(buffer):
    failed = api.Failed(failure=api.Failure(error="E", message="over"))
    buffer.push(failed, (0, 0))
    for _ in range(2):
        first, second = opened(buffer).take()
        assert isinstance(first.body, api.Snapshot)
        assert second.body == failed


def test_readers_are_notified_until_they_are_closed(buffer):
    rung = []
    feed = opened(buffer)
    buffer.push(lost(0), (0, 0))
    feed.on_news = lambda: rung.append(1)
    buffer.push(lost(1), (0, 0))
    assert len(rung) == 1
    buffer.close()
    buffer.close()
    assert len(rung) == 2
    assert feed.is_closed
    assert numbers(feed.take()) == ["snapshot"], "what came before can be taken"


# --- Server-sent events ---


async def at_once(take):
    return take()


def open_stream(feed, keep_alive_s=30.0):
    return EventStream(feed, take=at_once, keep_alive_s=keep_alive_s)


def test_an_encoded_event_has_id_kind_and_one_line_of_data():
    frame = api.Frame(
        "01234567.7.3.4711",
        api.Failed(
            failure=api.Failure(error="LogUnreadable", message="two\nlines\r\n\n")
        ),
    )
    lines = events.encode_event(frame).decode().split("\n")
    assert lines[:2] == ["id: 01234567.7.3.4711", "event: failed"]
    assert lines[3:] == ["", ""]
    data = lines[2].removeprefix("data: ")
    assert msgspec.json.decode(data, type=api.EventBody) == frame.body


def test_chunks_of_encoded_events_are_bounded_and_complete():
    frames = [api.Frame(f"a.{n}.0.0", assigned(n)) for n in range(500)]
    pieces = list(events.chunks(frames))
    assert b"".join(pieces) == b"".join(map(events.encode_event, frames))
    assert len(pieces) > 1
    assert max(map(len, pieces)) < CHUNK_BYTES + 1_000
    assert list(events.chunks([])) == []


def test_pending_events_are_sent_before_new_ones():
    async def main():
        feed = FakeEventReader(None)
        body = open_stream(feed).body()
        assert await anext(body) == HELLO
        assert b"event: snapshot" in await anext(body)
        feed.push(assigned())
        assert b"event: assigned" in await anext(body)
        await body.aclose()
        assert feed.is_closed

    asyncio.run(main())


def test_a_silent_stream_sends_keep_alives():
    async def main():
        body = open_stream(FakeEventReader(None), keep_alive_s=0.001).body()
        found = [await anext(body) for _ in range(4)]
        assert found[2:] == [KEEP_ALIVE, KEEP_ALIVE]
        await body.aclose()

    asyncio.run(main())


def test_keep_alives_of_all_streams_are_due_at_the_same_time():
    """Separate times would wake the process for each stream."""

    async def main():
        loop = asyncio.get_running_loop()
        streams = [open_stream(FakeEventReader(None), keep_alive_s=16) for _ in "ab"]
        found = []
        for stream, began in zip(streams, (1000.25, 1000.75), strict=True):
            stream._loop = SimpleNamespace(time=lambda began=began: began)
            found.append(began + stream._silence_s())
            stream._loop = loop
        assert found == [1016, 1016]

    asyncio.run(main())


def test_no_events_are_taken_for_a_stalled_reader():
    async def main():
        feed = FakeEventReader(None)
        body = open_stream(feed).body()
        await anext(body)
        await anext(body)
        for number in range(10 * RING):
            feed.push(assigned(number % 7))
        await asyncio.sleep(0)
        assert feed.taken == 1
        # Once it reads again, a snapshot replaces the missed events.
        text = await anext(body)
        assert text.index(b"event: snapshot") < 100
        assert text.count(b"event: ") <= RING
        await body.aclose()

    asyncio.run(main())


def test_an_ending_stream_sends_the_last_events():
    async def main():
        feed = FakeEventReader(None)
        found = open_stream(feed)
        body = found.body()
        await anext(body)
        await anext(body)
        feed.push(assigned())
        found.end()
        assert b"event: assigned" in b"".join([piece async for piece in body])
        assert feed.is_closed

    asyncio.run(main())


def test_snapshots_that_replace_missed_events_are_counted():
    async def main():
        feed, counts = FakeEventReader(None), []
        found = EventStream(
            feed,
            take=at_once,
            keep_alive_s=30,
            on_sent=lambda *sent: counts.append(sent),
        )
        body = found.body()
        for _ in range(2):
            await anext(body)
        feed.push(assigned())
        await anext(body)
        for _ in range(RING + 1):
            feed.push(assigned())
        await anext(body)
        found.end()
        assert [piece async for piece in body] == []
        # The snapshot, and the event that did not fit.
        assert counts[:3] == [(1, 0), (1, 0), (2, 1)]

    asyncio.run(main())


def test_a_stream_ends_when_its_cursor_is_closed():
    async def main():
        feed = FakeEventReader(None)
        body = open_stream(feed).body()
        await anext(body)
        await anext(body)
        feed.push(assigned())
        feed.close()
        assert b"event: assigned" in b"".join([piece async for piece in body])

    asyncio.run(main())


def test_a_closed_stream_sends_nothing_more():
    async def main():
        feed = FakeEventReader(None)
        found = open_stream(feed)
        body = found.body()
        await anext(body)
        await anext(body)
        found.close()
        feed.push(SNAPSHOT)
        assert [piece async for piece in body] == []

    asyncio.run(main())


def test_events_after_the_end_of_the_event_loop_are_ignored():
    feed = FakeEventReader(None)

    async def main():
        open_stream(feed)

    asyncio.run(main())
    feed.push(assigned())
