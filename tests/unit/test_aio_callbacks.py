"""Callbacks of a consumer for an event loop run on the loop."""

import asyncio
import threading

import pytest
from aiokit import WAIT_S, face, run, stepping, taken
from enginekit import KEY, T0, H, Stepping, world
from threadkit import in_thread

from kafka_marshal.errors import ClaimLost

CALLS = {
    "lag": lambda it: it.lag(),
    "seek": lambda it: it.seek(T0, 3),
    "transactions": lambda it: anext(it.transactions()),
}


@pytest.mark.parametrize("name", CALLS)
def test_on_claimed_and_on_topics_run_on_the_event_loop(name):
    cluster = world()
    reported = []

    def note(*_):
        reported.append(asyncio.get_running_loop())

    node = stepping(cluster, on_claimed=note, on_topics=note)
    node.engine.changed = Stepping(cluster)

    async def work():
        consumer = face(node)
        await CALLS[name](consumer)
        assert len(reported) == 2
        await consumer.close()
        assert len(reported) == 3, "no topic is held"

    run(work)


def test_a_claim_lost_during_a_blocking_call_is_reported_on_the_loop(cluster):
    reported = []
    node = stepping(cluster, on_lost=lambda *_: reported.append(threading.get_ident()))
    data = node.engine.context.ports.data
    plain = data.ranges

    def ranges(*given, **rest):
        found = plain(*given, **rest)
        node.cut(is_cut=True)
        cluster.run(2 * H)
        return found

    async def work():
        consumer = face(node)
        await taken(consumer, 1)
        data.ranges = ranges
        with pytest.raises(ClaimLost):
            await consumer.seek(T0, 3)
        assert reported == []
        assert await consumer.assignment() == set()
        assert reported == [threading.get_ident()]

    run(work)


def test_a_commit_by_another_thread_runs_no_callback(cluster):
    """Else the loop would report nothing, and return partitions that are lost."""
    reported = []
    node = stepping(cluster, on_lost=lambda *_: reported.append(threading.get_ident()))
    begins, may_end = threading.Event(), threading.Event()

    def slow(*_, **__):
        begins.set()
        assert may_end.wait(WAIT_S)

    async def work():
        consumer = face(node)
        record = await anext(consumer)
        node.consumer.seek = slow
        waiting = asyncio.ensure_future(consumer.seek(T0, 3))
        assert await asyncio.to_thread(begins.wait, WAIT_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        asked = asyncio.ensure_future(consumer.assignment())
        await asyncio.sleep(0)
        in_thread(lambda: asyncio.run(consumer.commit(record)))
        assert node.session.holdings[KEY].uncommitted_count == 0
        node.cut(is_cut=True)
        cluster.run(2 * H)
        may_end.set()
        assert await asked == set()
        assert reported == [threading.get_ident()]

    run(work)
