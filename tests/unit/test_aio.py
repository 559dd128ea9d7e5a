"""The asyncio API over whole nodes in memory."""

import asyncio
import inspect
import random
import threading

import attrs
import pytest
from aiokit import (
    NOT_ASYNC,
    WAIT_S,
    Client,
    SlowToClose,
    every_cut,
    face,
    opened_over,
    run,
    stepping,
    taken,
    until,
)
from enginekit import ALO, AMO, KEY, T0, H, Stepping, fold, held_by, spec, world

from kafka_marshal.aio import AsyncConsumer, AsyncMarshal, _Hop
from kafka_marshal.client import Marshal
from kafka_marshal.consumer import Consumer
from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    DeadlineExceeded,
    InvalidTransition,
)
from kafka_marshal.ports import Record

# --- Reading ---


def test_records_arrive_in_order_and_are_committed(cluster):
    node = stepping(cluster, most=4)

    async def work():
        consumer = face(node)
        seen = []
        async for record in consumer:
            seen.append(record.offset)
            await consumer.commit(record)
            if len(seen) == 10:
                consumer.stop()
        await consumer.flush()
        assert await consumer.committed(T0) == await consumer.position(T0) == 10
        assert await consumer.lag() == {T0: 0}
        return seen

    assert run(work) == list(range(10))
    assert fold(cluster).keys[KEY].position == 10


def test_seeks_move_the_position(cluster):
    node = stepping(cluster, most=4)

    async def work():
        consumer = face(node)
        await taken(consumer, 6)
        await consumer.commit()
        await consumer.flush()
        await consumer.seek(T0, 2)
        assert fold(cluster).keys[KEY].position == 2
        assert await taken(consumer, 2) == [2, 3]
        await consumer.seek_to_end(T0)
        assert await consumer.position(T0) == 10
        await consumer.seek_to_beginning()
        return await taken(consumer, 2)

    assert run(work) == [0, 1]


def test_batches_are_limited_and_tokens_cover_the_assignment(cluster):
    node = stepping(cluster, most=4)

    async def work():
        consumer = face(node)
        sizes = []
        async for batch in consumer.batches():
            sizes.append(len(batch.records))
            batch.commit()
            if batch.last_offset == 9:
                consumer.stop()
        assert await consumer.assignment() == {T0}
        assert set(await consumer.tokens()) == {T0}
        return sizes

    assert run(work) == [4, 4, 2]


def test_poll_refuses_a_timeout_that_is_not_a_number(cluster):
    """With None, poll would wait for ever."""
    node = stepping(cluster)

    async def work():
        async with face(node) as consumer:
            for given in (None, "1"):
                with pytest.raises(ConfigurationError, match="timeout_ms"):
                    await consumer.poll(given)

    run(work)


def test_poll_respects_its_limit_pauses_and_timeout(cluster):
    node = stepping(cluster)

    async def work():
        consumer = face(node)
        (records,) = (await consumer.poll(500, 3)).values()
        assert [record.offset for record in records] == [0, 1, 2]
        token = consumer.commit_token(records[2])
        await consumer.commit(records[:2])
        await consumer.commit(token)
        assert await consumer.committed(T0) == 3
        await consumer.pause(T0)
        assert await consumer.poll(0) == {}
        await consumer.resume(T0)
        (rest,) = (await consumer.poll(0)).values()
        assert len(rest) == 7
        assert await consumer.poll(0) == {}
        assert await consumer.poll(150) == {}

    run(work)


def test_iteration_ends_after_consumer_timeout_ms(cluster):
    node = stepping(cluster)
    node.consumer._config = attrs.evolve(node.consumer.config, consumer_timeout_ms=50)

    async def work():
        return [record.offset async for record in face(node)]

    assert run(work) == list(range(10))


def test_at_most_once_all_granted_records_are_handed_out(cluster):
    node = stepping(cluster, delivery=AMO, most=3)

    async def work():
        consumer = face(node)
        seen = await taken(consumer, 10)
        await consumer.close()
        return seen

    assert run(work) == list(range(10))
    cluster.run(200)
    assert fold(cluster).keys[KEY].granted == 10


def test_the_event_loop_runs_while_a_consumer_waits(cluster):
    node = stepping(cluster)

    async def work():
        consumer = face(node)
        await taken(consumer, 10)
        waiting = asyncio.ensure_future(anext(consumer))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        cluster.kafka.produce(T0, b"late")
        assert (await waiting).offset == 10

    run(work)


def test_tasks_of_one_consumer_get_each_record_once():
    cluster = world(records=[200])
    node = stepping(cluster, most=7)

    async def work():
        consumer = face(node)
        seen = []

        async def worker():
            async for record in consumer:
                seen.append(record.offset)
                await asyncio.sleep(0)
                await consumer.commit(record)
                if len(seen) == 200:
                    consumer.stop()

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(worker())
        assert await consumer.committed(T0) == 200
        return seen

    assert sorted(run(work)) == list(range(200))


# --- Cancelling ---


@pytest.mark.parametrize("seed", range(5))
def test_a_cancelled_wait_loses_no_record(seed):
    cluster = world(records=[0])
    node = stepping(cluster)
    chance = random.Random(seed)

    async def work():
        consumer = face(node)
        seen = []
        for number in range(40):
            waiting = asyncio.ensure_future(anext(consumer))
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(chance.choice([0, 0, 0.001]))
            cluster.kafka.produce(T0, b"%d" % number)
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(chance.choice([0, 0.001]))
            waiting.cancel()
            try:
                seen.append((await waiting).offset)
            except asyncio.CancelledError:
                uncommitted = node.session.holdings[KEY].uncommitted_count
                assert uncommitted == len(seen)
        seen += await taken(consumer, 40 - len(seen))
        return seen

    assert run(work) == list(range(40))


def test_cancelling_at_the_end_of_a_fetch_loses_no_record(cluster):
    """The thread has finished; the waiting task is cancelled before it runs again."""
    node = stepping(cluster)
    go_on = threading.Event()
    fetch = node.consumer.prefetch

    def late(timeout_ms):
        assert go_on.wait(WAIT_S)
        fetch(timeout_ms)

    node.consumer.prefetch = late

    async def work():
        consumer = face(node)
        waiting = asyncio.ensure_future(anext(consumer))
        await until(lambda: consumer._hop.is_busy)
        running = consumer._hop._running
        instant = asyncio.Event()
        loop = asyncio.get_running_loop()
        running.add_done_callback(
            lambda _: loop.call_soon_threadsafe(
                lambda: (waiting.cancel(), instant.set())
            )
        )
        go_on.set()
        await instant.wait()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert node.session.holdings[KEY].uncommitted_count == 0
        return await taken(consumer, 10)

    assert run(work) == list(range(10))


def test_close_waits_for_a_call_that_an_ended_event_loop_started(cluster):
    """As when main is interrupted and a second asyncio.run closes the consumer."""
    node = stepping(cluster)
    consumer, begins, may_end = face(node), threading.Event(), threading.Event()
    fetch = node.consumer.prefetch

    def slow(timeout_ms):
        begins.set()
        assert may_end.wait(WAIT_S)
        fetch(timeout_ms)

    async def leave():
        node.consumer.prefetch = slow
        waiting = asyncio.ensure_future(anext(consumer))
        assert await asyncio.to_thread(begins.wait, WAIT_S)
        waiting.cancel()

    async def close():
        may_end.set()
        await consumer.close()

    run(leave)
    run(close)
    assert node.consumer.is_closed


def test_a_timeout_loses_no_record(cluster):
    node = stepping(cluster)

    async def work():
        consumer = face(node)
        await taken(consumer, 10)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(consumer)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 0.01)
        cluster.kafka.produce(T0, b"late")
        return await taken(consumer, 1)

    assert run(work) == [10]


def test_iteration_over_batches_continues_after_a_timeout(cluster):
    """As in a loop that does other work while no records arrive."""
    node = stepping(cluster)

    async def work():
        batches = face(node).batches()
        first = await anext(batches)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(batches)
        cluster.kafka.produce(T0, b"late")
        late = await anext(batches)
        await batches.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
        return len(first), late.first_offset

    assert run(work) == (10, 10)


def test_an_error_after_a_cancelled_wait_is_raised_by_the_next_call(cluster):
    node = stepping(cluster)
    go_on = threading.Event()

    def failing(_):
        assert go_on.wait(WAIT_S)
        raise DeadlineExceeded("told once")

    fetch, node.consumer.prefetch = node.consumer.prefetch, failing

    async def work():
        consumer = face(node)
        waiting = asyncio.ensure_future(anext(consumer))
        await until(lambda: consumer._hop.is_busy)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        with pytest.raises(DeadlineExceeded, match="told once"):
            await anext(consumer)
        node.consumer.prefetch = fetch
        return await taken(consumer, 1)

    assert run(work) == [0]


# --- Lost claims ---


def test_fetched_records_are_dropped_after_the_claim_is_lost(cluster):
    node = stepping(cluster)

    async def work():
        consumer = face(node)
        await taken(consumer, 2)
        node.cut(is_cut=True)
        cluster.run(2 * H)
        with pytest.raises(ClaimLost):
            await anext(consumer)
        assert await consumer.assignment() == set()

    run(work)


# --- Ending ---


def test_closing_ends_all_waits(cluster):
    node = stepping(cluster)

    async def work():
        consumer = face(node)
        await taken(consumer, 10)
        await consumer.commit()

        async def iterate():
            return [record async for record in consumer]

        waiting = asyncio.ensure_future(iterate())
        await asyncio.sleep(0.01)
        await consumer.close()
        await consumer.close()
        assert await waiting == []
        for call in (consumer.commit, consumer.lag, consumer.flush):
            with pytest.raises(InvalidTransition, match="closed"):
                await call()

    run(work)
    known = fold(cluster).keys[KEY]
    assert (known.owner, known.position) == (None, 10)


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_the_block_releases_the_claim_also_on_an_error(cluster, fails):
    node = stepping(cluster, delivery=AMO, most=3)

    async def work():
        async with face(node) as consumer:
            await taken(consumer, 1)
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            run(work)
    else:
        run(work)
    assert node.session.leaving_count == 0
    assert (node.consumer.is_closed, fold(cluster).keys[KEY].owner) == (True, None)


def test_iteration_hands_out_nothing_after_a_stop(cluster):
    node = stepping(cluster)

    async def work():
        consumer = face(node)
        assert await taken(consumer, 2) == [0, 1]
        consumer.stop()
        assert [record async for record in consumer] == []
        assert [batch async for batch in consumer.batches()] == []
        assert node.session.holdings[KEY].uncommitted_count == 2
        await consumer.close()
        with pytest.raises(InvalidTransition, match="closed"):
            await consumer.poll()

    run(work)


def test_a_consumer_closed_before_its_first_use_never_opens():
    async def work():
        made = []
        consumer = AsyncConsumer(lambda: made.append(1))
        await consumer.close()
        with pytest.raises(InvalidTransition, match="closed"):
            await anext(consumer)
        assert made == []

    run(work)


# --- The client ---


def test_async_methods_have_the_signatures_of_marshal():
    for ours, theirs in (
        (AsyncMarshal.__init__, Marshal.__init__),
        (AsyncMarshal.consumer, Marshal.consumer),
        (AsyncMarshal.open_consumer, Marshal.open_consumer),
        (AsyncMarshal.close, Marshal.close),
    ):
        found = inspect.signature(ours).parameters
        assert found == inspect.signature(theirs).parameters


def test_async_consumers_have_the_methods_of_consumers():
    """The reference states this."""
    theirs = {name for name in vars(Consumer) if not name.startswith("_")}
    assert theirs - set(vars(AsyncConsumer)) == NOT_ASYNC
    found = inspect.signature(AsyncConsumer.commit).parameters
    assert found == inspect.signature(Consumer.commit).parameters


def test_a_repr_shows_the_wrapped_object_or_not_open(cluster):
    node = stepping(cluster)
    marshal = opened_over(lambda: node.consumer)  # any object with a text form

    async def work():
        consumer = face(node)
        assert repr(consumer) == "<AsyncConsumer not open>"
        assert await consumer.load() == 1
        await consumer.pause(T0)
        assert await consumer.paused() == {T0}
        wanted = f"<Async{repr(node.consumer)[1:]}"
        assert repr(consumer) == wanted
        assert repr(marshal) == "<AsyncMarshal not open>"
        marshal._open()
        assert repr(marshal) == wanted

    run(work)


def test_a_client_is_open_only_inside_async_with(cluster):
    node = stepping(cluster)
    client = Client(node)
    marshal = opened_over(lambda: client)
    with pytest.raises(InvalidTransition, match="async with"):
        _ = marshal.marshal

    async def work():
        async with marshal:
            consumer = marshal.adopt(lambda: node.consumer)
            assert await taken(consumer, 1) == [0]
            assert await marshal.owners("t") == {T0: "a"}
        assert node.consumer.is_closed
        assert client.closed == 1
        await marshal.close()
        assert client.closed == 1
        with pytest.raises(InvalidTransition, match="closed, or did not open"):
            await marshal.owners("t")
        with pytest.raises(InvalidTransition, match="closed, or did not open"):
            async with marshal:
                pass

    run(work)


def test_closed_consumers_are_forgotten(cluster):
    """A service may open one for each request, for weeks."""
    node = stepping(cluster)
    marshal = opened_over(lambda: Client(node))

    async def work():
        async with marshal:
            for _ in range(5):
                async with marshal.adopt(lambda: node.consumer):
                    pass
            last = marshal.adopt(lambda: node.consumer)
            assert marshal._consumers == [last]

    run(work)


def test_a_client_that_is_open_is_not_opened_again(cluster):
    node, clients = stepping(cluster), []

    def make():
        clients.append(Client(node))
        return clients[-1]

    marshal = opened_over(make)

    async def work():
        async with marshal, marshal:
            pass

    run(work)
    assert [each.closed for each in clients] == [1]


@pytest.mark.parametrize("restarts", [True, False])
def test_a_client_expects_a_restart_before_its_consumers_close(cluster, restarts):
    node = stepping(cluster)
    client = Client(node)
    marshal = opened_over(lambda: client)

    async def work():
        async with marshal:
            await taken(marshal.adopt(lambda: node.consumer), 1)
            await marshal.close(restarts=restarts)
        assert client.calls == ["expect_restart"] * restarts
        assert client.closed == 1

    run(work)


def test_an_error_while_opening_is_raised():
    def fail():
        raise DeadlineExceeded("no broker")

    async def work():
        marshal = opened_over(fail)
        with pytest.raises(DeadlineExceeded, match="no broker"):
            async with marshal:
                pass
        with pytest.raises(InvalidTransition, match="did not open"):
            async with marshal:
                pass

    run(work)


def test_a_client_opened_after_a_cancelled_call_is_closed(cluster):
    client = Client(stepping(cluster))
    go_on, is_closed = threading.Event(), threading.Event()
    client.close = lambda **_: is_closed.set()

    def late():
        assert go_on.wait(WAIT_S)
        return client

    async def work():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), opened_over(late):
                pass
        go_on.set()

    run(work)
    assert is_closed.wait(WAIT_S)


@pytest.mark.parametrize("cancels", [1, 2])
def test_a_cancelled_exit_closes_the_consumer_then_the_client(cluster, cancels):
    consumer, client, is_closed = SlowToClose(), Client(cluster), threading.Event()
    closed_in_order = []

    def close(**_):
        closed_in_order.append(consumer.is_closed)
        is_closed.set()

    client.close = close

    async def body(marshal):
        async with marshal, marshal.adopt(lambda: consumer):
            pass

    async def work():
        marshal = opened_over(lambda: client)
        running = asyncio.ensure_future(body(marshal))
        assert await asyncio.to_thread(consumer.begins.wait, WAIT_S)
        for _ in range(cancels):
            running.cancel()
            await asyncio.sleep(0.01)
        consumer.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        await marshal.close()

    run(work)
    assert is_closed.wait(WAIT_S)
    assert closed_in_order == [True]


def test_the_client_closes_though_a_consumer_fails_to_close(cluster):
    consumer, client, is_closed = SlowToClose(), Client(cluster), threading.Event()
    consumer.may_end.set()
    consumer.fails = True
    client.close = lambda **_: is_closed.set()

    async def work():
        marshal = opened_over(lambda: client)
        with pytest.raises(DeadlineExceeded):
            async with marshal:
                await marshal.adopt(lambda: consumer).assignment()

    run(work)
    assert is_closed.wait(WAIT_S)


def test_two_tasks_that_close_a_client_close_it_once(cluster):
    """The second task must not need threads that the first has ended."""
    closed = []

    async def work():
        client = Client(cluster)
        client.close = lambda **_: closed.append(client)
        marshal = await opened_over(lambda: client).__aenter__()
        await asyncio.gather(marshal.close(), marshal.close())

    run(work)
    assert len(closed) == 1


def test_a_thread_stays_busy_with_a_call_after_an_earlier_one_ends():
    """Else the event loop would use the consumer while the thread uses it."""

    async def work():
        hop, ends = _Hop("calls"), [threading.Event(), threading.Event()]
        first = asyncio.ensure_future(hop.run(ends[0].wait))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(hop.run(ends[1].wait))
        await asyncio.sleep(0)
        noticing = asyncio.ensure_future(hop.settle())
        await asyncio.sleep(0)
        ends[0].set()
        await asyncio.gather(first, noticing)
        assert hop.is_busy
        ends[1].set()
        assert await second
        assert not hop.is_busy
        hop.end()

    run(work)


class Claimed:
    def __init__(self):
        self.released = threading.Event()

    def release(self):
        self.released.set()


@pytest.mark.parametrize("ending", ["ordinary", "error", "cancelled"])
def test_a_claim_is_released_however_the_block_ends(cluster, ending):
    node = stepping(cluster)
    node.claim = Claimed()
    client = Client(node)
    go_on = threading.Event()
    if ending == "cancelled":

        def late(topic, partition, *, timeout_ms):
            assert go_on.wait(WAIT_S)
            return node.claim

        client.claim = late

    async def hold(marshal):
        async with marshal.claim("t", 0) as claim:
            assert claim is node.claim
            assert not claim.released.is_set()
            if ending == "error":
                raise KeyError

    async def work():
        async with opened_over(lambda: client) as marshal:
            if ending == "cancelled":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await hold(marshal)
                go_on.set()
            elif ending == "error":
                with pytest.raises(KeyError):
                    await hold(marshal)
            else:
                await hold(marshal)
                assert node.claim.released.is_set()

    run(work)
    assert node.claim.released.wait(WAIT_S)


def test_stopping_reaches_consumers_that_are_not_open_yet(cluster):
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 1), H)
    node.engine.changed = Stepping(cluster)

    async def work():
        async with opened_over(lambda: Client(node)) as marshal:
            consumer = marshal.adopt(lambda: node.consumer)
            async with consumer:
                marshal.stop()
                assert [record async for record in consumer] == []

    run(work)


@pytest.mark.parametrize("is_made", [True, False])
def test_a_consumer_stopped_before_it_opens_ends_at_once(cluster, is_made):
    """As by a signal while the program starts."""
    node = stepping(cluster)

    async def work():
        async with opened_over(lambda: Client(node)) as marshal:
            if not is_made:
                marshal.stop()
            consumer = marshal.adopt(lambda: node.consumer)
            marshal.stop()
            async with consumer:
                return [record async for record in consumer]

    assert run(work) == []


def test_the_lag_is_looked_up_within_the_time_given(cluster):
    node, asked = stepping(cluster), []
    ranges = node.data.ranges

    def note(partitions, timeout_ms, **level):
        asked.append(timeout_ms)
        return ranges(partitions, timeout_ms, **level)

    node.data.ranges = note

    async def work():
        consumer = face(node)
        await consumer.lag(timeout_ms=2 * H)
        with pytest.raises(ConfigurationError, match="timeout_ms"):
            await consumer.lag("5s")

    run(work)
    assert asked == [2 * H]


@pytest.mark.parametrize(
    ("name", "given"), [("timeout_ms", "5s"), ("restarts", "no"), ("release", "no")]
)
def test_an_async_close_with_an_invalid_argument_closes_nothing(cluster, name, given):
    node = stepping(cluster)

    async def work():
        async with opened_over(lambda: Client(node)) as marshal:
            consumer = marshal.adopt(lambda: node.consumer)
            for each in [marshal, consumer][: 1 if name == "restarts" else 2]:
                with pytest.raises(ConfigurationError, match=name):
                    await each.close(**{name: given})
            return await taken(consumer, 10)

    assert run(work) == list(range(10))


# --- Cancelled at every await ---


async def first_batch(consumer):
    batch = await anext(consumer.batches(2))
    return {batch.partition: batch.records}


READS = {
    "anext": lambda it: it.__anext__(),
    "poll": lambda it: it.poll(H, 2),
    "batches": first_batch,
}
OTHERS = {
    "enter": lambda it: it.__aenter__(),
    "commit": lambda it: it.commit(),
    "flush": lambda it: it.flush(),
    "assignment": lambda it: it.assignment(),
    "tokens": lambda it: it.tokens(),
    "position": lambda it: it.position(T0),
    "committed": lambda it: it.committed(T0),
    "lag": lambda it: it.lag(),
    "pause": lambda it: it.pause(T0),
    "resume": lambda it: it.resume(T0),
}
SEEKS = {
    "seek": lambda it: it.seek(T0, 0),
    "seek_to_beginning": lambda it: it.seek_to_beginning(T0),
}


def offsets_of(found):
    """Return the offsets that a call has handed out."""
    if isinstance(found, dict):
        return [each.offset for records in found.values() for each in records]
    return [found.offset] if isinstance(found, Record) else []


@pytest.mark.parametrize("delivery", [ALO, AMO])
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("used", [0, 4])
def test_a_read_cancelled_anywhere_loses_and_repeats_nothing(delivery, name, used):
    async def work(consumer, cut):
        seen = await taken(consumer, used)
        seen += offsets_of(await cut(READS[name](consumer)))
        seen += offsets_of(await READS[name](consumer))
        seen += await taken(consumer, 10 - len(seen))
        await consumer.close()
        return seen

    for node, consumer, cut in every_cut(delivery=delivery, used=used):
        found = run(lambda consumer=consumer, cut=cut: work(consumer, cut))
        assert found == list(range(10))
        assert node.consumer.is_closed


@pytest.mark.parametrize("delivery", [ALO, AMO])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("used", [0, 4])
def test_a_call_cancelled_anywhere_can_be_repeated(delivery, name, used):
    async def work(consumer, cut):
        seen = await taken(consumer, used)
        await cut(OTHERS[name](consumer))
        await OTHERS[name](consumer)
        await consumer.resume(T0)
        seen += await taken(consumer, 10 - used)
        await consumer.close()
        return seen

    for node, consumer, cut in every_cut(delivery=delivery, used=used):
        found = run(lambda consumer=consumer, cut=cut: work(consumer, cut))
        assert found == list(range(10))
        assert node.consumer.is_closed


@pytest.mark.parametrize("name", SEEKS)
@pytest.mark.parametrize("used", [0, 4])
def test_a_seek_cancelled_anywhere_can_be_repeated(name, used):
    async def work(consumer, cut):
        await taken(consumer, used)
        await cut(SEEKS[name](consumer))
        await SEEKS[name](consumer)
        seen = await taken(consumer, 10)
        await consumer.close()
        return seen

    for node, consumer, cut in every_cut(used=used):
        found = run(lambda consumer=consumer, cut=cut: work(consumer, cut))
        assert found == list(range(10))
        assert node.consumer.is_closed


@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_a_close_cancelled_anywhere_can_be_repeated(delivery):
    async def work(consumer, cut):
        await taken(consumer, 4)
        await consumer.commit()
        await cut(consumer.close())
        await consumer.close()
        await consumer.close()
        with pytest.raises(InvalidTransition):
            await consumer.position(T0)

    for node, consumer, cut in every_cut(delivery=delivery, used=4):
        run(lambda consumer=consumer, cut=cut: work(consumer, cut))
        assert consumer.is_closed
        assert node.consumer.is_closed
