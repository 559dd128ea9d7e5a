"""The asyncio API on a real broker."""

import asyncio
import contextlib
import random
import signal
import time

import pytest
from domain import opened

from kafka_marshal import AsyncMarshal, ClaimRejected, Delivery, TopicPartition

WAIT_S = 120


@pytest.fixture(scope="module")
def domain(broker, unique, transport, via):
    with opened(broker, unique, transport=transport, via=via) as domain:
        yield domain


def client(domain, group, name="w1"):
    return AsyncMarshal(
        domain.servers,
        group_id=group,
        client_id=name,
        coordination_topic=domain.topic,
        transport=domain.transport,
        state_dir="",
    )


def run(work):
    return asyncio.run(asyncio.wait_for(work(), WAIT_S))


def test_cancelled_workers_process_every_record_once(domain, unique):
    """Calls of three tasks time out again and again."""
    topic = domain.data_topic(3, records_each=60)
    total = sum(domain.of(topic).values())
    group = unique("storm")
    chance = random.Random(7)
    seen = []

    async def work():
        async with client(domain, group) as marshal:
            consumer = marshal.consumer(topic, max_poll_records=20)

            async def impatient():
                while len(seen) < total:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(chance.choice([0, 0.001, 0.05])):
                            record = await anext(consumer)
                        seen.append((record.partition, record.offset))
                        await consumer.commit(consumer.commit_token(record))
                    await asyncio.sleep(0.001)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(3):
                    tasks.create_task(impatient())
            await consumer.flush()
            assert set((await consumer.lag()).values()) == {0}

    run(work)
    assert sorted(seen) == [(p, n) for p in range(3) for n in range(60)]
    states = domain.states(group)
    assert {k.partition: s.position for k, s in states.items()} == dict.fromkeys(
        range(3), 60
    )
    assert {s.owner for s in states.values()} == {None}


def test_cancelled_transactions_write_every_record_once(domain, unique):
    """None stays open, which would block readers of the output."""
    topic, out = domain.data_topic(3, records_each=60), domain.data_topic(1)
    chance = random.Random(7)
    group = unique("copy")

    async def work():
        async with client(domain, group) as marshal:
            consumer = marshal.consumer(topic, max_poll_records=20)
            transactions = consumer.transactions()
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(chance.choice([0, 0.01, 0.05, 5])):
                        async with await anext(transactions) as transaction:
                            for record in transaction.records:
                                transaction.send(out, b"%d" % record.partition)
                lag = await consumer.lag()
                if len(lag) == 3 and not any(lag.values()):
                    break

    run(work)
    assert domain.read_committed(out) == {b"%d" % n: 60 for n in range(3)}


def test_a_handler_that_blocks_the_loop_does_not_cost_the_claim(domain, unique):
    """The engine sends heartbeats on its own thread, for three intervals here."""
    topic = domain.data_topic(1, records_each=20)

    async def work():
        async with (
            client(domain, unique("slow")) as marshal,
            marshal.consumer(topic, max_handling_ms=0) as consumer,
        ):
            first = await anext(consumer)
            time.sleep(3 * domain.h_ms / 1000)  # noqa: ASYNC251 - the point
            await consumer.commit(first)
            second = await anext(consumer)
            assert second.token == first.token

    run(work)


@pytest.mark.parametrize("delivery", list(Delivery), ids=lambda d: d.value)
def test_batches_return_all_records_and_end_at_the_timeout(domain, unique, delivery):
    topic = domain.data_topic(2, records_each=60)
    group = unique("batches")
    seen = []

    async def work():
        async with (
            client(domain, group) as marshal,
            marshal.consumer(
                topic,
                delivery=delivery,
                max_poll_records=25,
                consumer_timeout_ms=1_000,
            ) as consumer,
        ):
            while len(seen) < 120:  # a silence before that is a busy machine's
                async for batch in consumer.batches():
                    seen.extend((r.partition, r.offset) for r in batch.records)
                    batch.commit()

    run(work)
    assert sorted(seen) == [(p, n) for p in (0, 1) for n in range(60)]
    positions = {k.partition: s.position for k, s in domain.states(group).items()}
    assert positions == {0: 60, 1: 60}


def test_a_keyboard_interrupt_releases_claims_and_keeps_commits(domain, unique):
    topic = domain.data_topic(1, records_each=20)
    group = unique("interrupt")

    async def interrupted():
        async with client(domain, group) as marshal:
            consumer = marshal.consumer(topic)
            async for record in consumer:
                await consumer.commit(record)
                if record.offset == 4:
                    signal.raise_signal(signal.SIGINT)
                    await asyncio.sleep(WAIT_S)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    ((_, state),) = domain.states(group).items()
    assert (state.owner, state.position) == (None, 5)


def test_a_claim_without_a_consumer_excludes_others_until_released(domain, unique):
    topic = domain.data_topic(1)
    group = unique("claim")

    async def work():
        async with client(domain, group) as one, client(domain, group, "w2") as other:
            async with one.claim(topic, 0) as claim:
                claim.set_position(7)
                assert claim.check() == claim.token
                place = TopicPartition(topic, 0)
                assert await other.owners(topic) == {place: "w1"}
                with pytest.raises(ClaimRejected):
                    async with other.claim(topic, 0, timeout_ms=300):
                        pass
            assert await other.owners(topic) == {place: None}

    run(work)
    ((_, state),) = domain.states(group).items()
    assert (state.owner, state.position) == (None, 7)
