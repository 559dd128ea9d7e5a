"""Server-sent events: in order, in bounded pieces, and never more than is read."""

import asyncio

import msgspec
from fakehub import RING, SNAPSHOT, FakeFeed, assigned

from kafka_marshal.remote import api
from kafka_marshal.sidecar import stream
from kafka_marshal.sidecar.stream import CHUNK_BYTES, HELLO, KEEP_ALIVE, Stream


async def at_once(take):
    return take()


def opened(feed, keep_alive_s=30.0):
    return Stream(feed, take=at_once, keep_alive_s=keep_alive_s)


def test_an_event_has_its_id_its_kind_and_one_line_of_data():
    frame = api.Frame(
        "01234567.7.3.4711",
        api.Failed(
            failure=api.Failure(error="LogUnreadable", message="two\nlines\r\n\n")
        ),
    )
    lines = stream.to_bytes(frame).decode().split("\n")
    assert lines[:2] == ["id: 01234567.7.3.4711", "event: failed"]
    assert lines[3:] == ["", ""]
    data = lines[2].removeprefix("data: ")
    assert msgspec.json.decode(data, type=api.EventBody) == frame.body


def test_pieces_are_bounded_and_whole():
    frames = [api.Frame(f"a.{n}.0.0", assigned(n)) for n in range(500)]
    pieces = list(stream.chunks(frames))
    assert b"".join(pieces) == b"".join(map(stream.to_bytes, frames))
    assert len(pieces) > 1
    assert max(map(len, pieces)) < CHUNK_BYTES + 1_000
    assert list(stream.chunks([])) == []


def test_what_is_there_goes_first_and_then_what_comes():
    async def main():
        feed = FakeFeed(None)
        body = opened(feed).body()
        assert await anext(body) == HELLO
        assert b"event: snapshot" in await anext(body)
        feed.push(assigned())
        assert b"event: assigned" in await anext(body)
        await body.aclose()
        assert feed.is_closed

    asyncio.run(main())


def test_silence_is_broken():
    async def main():
        body = opened(FakeFeed(None), keep_alive_s=0.001).body()
        found = [await anext(body) for _ in range(4)]
        assert found[2:] == [KEEP_ALIVE, KEEP_ALIVE]
        await body.aclose()

    asyncio.run(main())


def test_nothing_is_taken_for_a_reader_that_does_not_read():
    async def main():
        feed = FakeFeed(None)
        body = opened(feed).body()
        await anext(body)
        await anext(body)
        for number in range(10 * RING):
            feed.push(assigned(number % 7))
        await asyncio.sleep(0)
        assert feed.taken == 1
        # It comes back, and goes on from a snapshot of what stands now.
        text = await anext(body)
        assert text.index(b"event: snapshot") < 100
        assert text.count(b"event: ") <= RING
        await body.aclose()

    asyncio.run(main())


def test_an_end_sends_what_was_told_last():
    async def main():
        feed = FakeFeed(None)
        found = opened(feed)
        body = found.body()
        await anext(body)
        await anext(body)
        feed.push(assigned())
        found.end()
        assert b"event: assigned" in b"".join([piece async for piece in body])
        assert feed.is_closed

    asyncio.run(main())


def test_snapshots_amid_a_stream_are_told_apart():
    async def main():
        feed, told = FakeFeed(None), []
        found = Stream(
            feed, take=at_once, keep_alive_s=30, on_sent=lambda *sent: told.append(sent)
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
        assert told[:3] == [(1, 0), (1, 0), (1, 1)]

    asyncio.run(main())


def test_a_stream_ends_with_its_feed():
    async def main():
        feed = FakeFeed(None)
        body = opened(feed).body()
        await anext(body)
        await anext(body)
        feed.push(assigned())
        feed.close()
        assert b"event: assigned" in b"".join([piece async for piece in body])

    asyncio.run(main())


def test_a_closed_stream_sends_nothing_more():
    async def main():
        feed = FakeFeed(None)
        found = opened(feed)
        body = found.body()
        await anext(body)
        await anext(body)
        found.close()
        feed.push(SNAPSHOT)
        assert [piece async for piece in body] == []

    asyncio.run(main())


def test_news_after_the_end_of_the_loop_harm_nobody():
    feed = FakeFeed(None)

    async def main():
        opened(feed)

    asyncio.run(main())
    feed.push(assigned())
