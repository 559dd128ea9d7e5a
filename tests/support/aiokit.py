"""Asynchronous consumers over nodes in memory, and calls cancelled at each await."""

import asyncio
import contextlib
import threading

from cancelling import Cut
from enginekit import ALO, Stepping, owning, world

from kafka_marshal.aio import AsyncConsumer, AsyncMarshal
from kafka_marshal.errors import DeadlineExceeded
from kafka_marshal.protocol.types import TopicPartition

WAIT_S = 60
# Members of ``Consumer`` that ``AsyncConsumer`` replaces, or is made of.
NOT_ASYNC = {
    "batch_fetched",
    "batch_of",
    "batches_kept",
    "config",
    "holding_of",
    "is_finished",
    "is_handed_out_again",
    "next_fetched",
    "open_output",
    "poll_fetched",
    "prefetch",
    "report_closed",
    "report_here",
    "require_no_transactions",
}


def stepping(cluster, **rest):
    """Return a node that holds the key, and whose waits advance the cluster."""
    node = owning(cluster, **rest)
    node.engine.changed = Stepping(cluster)
    return node


def face(node):
    return AsyncConsumer(lambda: node.consumer)


def run(work):
    """Run a coroutine function to its end, within a bound."""
    return asyncio.run(asyncio.wait_for(work(), WAIT_S))


async def until(condition):
    while not condition():  # noqa: ASYNC110 - nothing notifies
        await asyncio.sleep(0)


async def taken(consumer, count):
    return [(await anext(consumer)).offset for _ in range(count)]


def every_cut(*, delivery=ALO, used, most=3, out=None):
    """Yield a node, its consumer and a canceller for each suspension of a call.

    Args:
        used: Records that the caller consumes first; with 0, the call must suspend.
        out: Topic to create for the output.
    """
    for is_late in (False, True):
        at, is_cut = 0, True
        while is_cut:
            cluster = world()
            if out is not None:
                cluster.kafka.create_topic(out, 1)
            node = stepping(cluster, delivery=delivery, most=most)
            consumer, cuts = face(node), []

            async def cut(call, at=at, cuts=cuts, is_late=is_late):
                """Return the result of a call, None if it was cancelled."""
                cuts.append(Cut(call, at, late=is_late))
                with contextlib.suppress(asyncio.CancelledError):
                    return await cuts[0]

            yield node, consumer, cut
            is_cut = cuts[0].is_cut
            at += 1
        assert used or at > 1


class SlowToClose:
    """A consumer whose close takes until the test lets it end."""

    is_closed = is_finished = False

    def __init__(self):
        self.begins, self.may_end = threading.Event(), threading.Event()
        self.fails = False

    def stop(self):
        pass

    def abandon(self):
        pass

    def report_here(self):
        pass

    def report_closed(self):
        pass

    def assignment(self):
        return set()

    def close(self, **_):
        self.begins.set()
        assert self.may_end.wait(WAIT_S)
        self.is_closed = True
        if self.fails:
            raise DeadlineExceeded("too late")


class Client:
    """The part of a ``Marshal`` that ``AsyncMarshal`` uses, over one node."""

    def __init__(self, node):
        self.node = node
        self.closed = 0
        self.calls = []

    def expect_restart(self):
        assert not self.node.consumer.is_closed
        self.calls.append("expect_restart")

    def close(self, **settings):
        self.closed += 1

    def owners(self, topic, *, timeout_ms):
        return {TopicPartition(topic, 0): "a"}

    def claim(self, topic, partition, *, timeout_ms):
        return self.node.claim


def opened_over(client):
    marshal = AsyncMarshal("nowhere:1", group_id="g", client_id="c")
    marshal.prepare(client)
    return marshal
