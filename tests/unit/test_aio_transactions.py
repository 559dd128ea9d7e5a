"""Exactly once into Kafka from an event loop, over whole nodes in memory."""

import asyncio
import contextlib
import threading

import pytest
from aiokit import WAIT_S, every_cut, face, run, stepping
from enginekit import KEY, T0, fold, world

from kafka_marshal.errors import DeadlineExceeded, InvalidTransition
from kafka_marshal.protocol.types import TopicPartition


def copying(**rest):
    """Return a world with a topic for the output, and a node that holds the key."""
    cluster = world()
    cluster.kafka.create_topic("out", 1)
    return cluster, stepping(cluster, most=4, **rest)


def output_of(cluster):
    log = cluster.kafka.log(TopicPartition("out", 0))
    return [int(record.value) for record in log.records]


def send_all(transaction):
    for record in transaction.records:
        transaction.send("out", b"%d" % record.offset)


async def copy(consumer, end=10):
    """Copy until the records before an offset are written."""
    async for transaction in consumer.transactions():
        async with transaction:
            send_all(transaction)
        assert transaction.is_committed
        if transaction.records[-1].offset == end - 1:
            return


def test_transactions_write_output_and_progress():
    cluster, node = copying()

    async def work():
        async with face(node) as consumer:
            await copy(consumer)
            assert await consumer.committed(T0) == 10

    run(work)
    assert output_of(cluster) == list(range(10))
    assert cluster.kafka.progress["g.transactions", T0].position == 10
    assert fold(cluster).keys[KEY].position == 10


def test_output_of_a_block_that_raises_is_not_written():
    cluster, node = copying()

    async def work():
        consumer = face(node)

        async def fail():
            async with await anext(consumer.transactions()) as transaction:
                send_all(transaction)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert output_of(cluster) == []
        await copy(consumer)

    run(work)
    assert output_of(cluster) == list(range(10))


def test_an_async_transaction_left_open_makes_the_next_one_raise():
    cluster, node = copying()

    async def work():
        consumer = face(node)
        transactions = consumer.transactions()
        left = await anext(transactions)
        with pytest.raises(InvalidTransition, match="neither committed"):
            await anext(transactions)
        with pytest.raises(InvalidTransition, match="has ended"):
            await left.commit()
        await copy(consumer)

    run(work)
    assert output_of(cluster) == list(range(10))


def test_an_async_consumer_with_transactions_refuses_other_reads():
    _, node = copying()

    async def work():
        consumer = face(node)
        async with await anext(consumer.transactions()):
            pass
        for call in (
            lambda: anext(consumer),
            consumer.poll,
            consumer.commit,
            lambda: anext(consumer.batches()),
        ):
            with pytest.raises(
                InvalidTransition, match="this consumer has transactions"
            ):
                await call()

    run(work)


def test_tasks_that_iterate_over_transactions_together_write_nothing_twice():
    cluster, node = copying()
    refused = []

    async def work():
        consumer = face(node)

        async def worker():
            while len(output_of(cluster)) < 10:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        try:
                            await copy(consumer)
                        except InvalidTransition as error:
                            refused.append(error)

        await asyncio.gather(worker(), worker())

    run(work)
    assert output_of(cluster) == list(range(10))


def test_a_transaction_of_a_closed_consumer_is_not_written():
    cluster, node = copying()

    async def work():
        consumer = face(node)
        transactions = consumer.transactions()
        async with await anext(transactions) as open_one:
            send_all(open_one)
            await consumer.close()
        assert not open_one.is_committed
        assert [each async for each in transactions] == []

    run(work)
    assert output_of(cluster) == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_commit_that_is_cancelled_ends_on_its_thread(fails):
    cluster, node = copying()
    begins, may_end = threading.Event(), threading.Event()

    async def commit(transaction):
        async with transaction:
            send_all(transaction)

    async def work():
        consumer = face(node)
        first = await anext(consumer.transactions())
        writer = cluster.kafka.writers["g.transactions/t/0"]
        plain = writer.write

        def write(records, **rest):
            begins.set()
            assert may_end.wait(WAIT_S)
            if fails:
                raise DeadlineExceeded("no answer")
            plain(records, **rest)

        writer.write = write
        running = asyncio.ensure_future(commit(first))
        assert await asyncio.to_thread(begins.wait, WAIT_S)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not first.is_committed
        may_end.set()
        if fails:
            with pytest.raises(DeadlineExceeded):
                await copy(consumer)
        await copy(consumer)
        assert first.is_committed is not fails

    run(work)
    assert output_of(cluster) == list(range(10))


@pytest.mark.parametrize("used", [0, 4])
def test_transactions_cancelled_anywhere_write_everything_once(used):
    async def step(consumer):
        async with await anext(consumer.transactions()) as transaction:
            send_all(transaction)

    async def work(consumer, cut):
        if used:
            await step(consumer)
        await cut(step(consumer))
        await copy(consumer)
        await consumer.close()

    for node, consumer, cut in every_cut(used=used, most=4, out="out"):
        run(lambda consumer=consumer, cut=cut: work(consumer, cut))
        assert output_of(node.engine.changed.cluster) == list(range(10))
