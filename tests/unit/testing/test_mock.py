"""The mock behaves like a consumer of a cluster in memory."""

import asyncio
import threading
import time

import pytest
from enginekit import ALO, AMO, KEY, T0, H, Stepping, fold, held_by, spec, world

from kafka_marshal import Consumer
from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    IdentityConflict,
    InvalidTransition,
)
from kafka_marshal.testing.mock import MockConsumer


class OnCluster:
    """A consumer of an engine, on a cluster in memory, that owns one partition."""

    def __init__(self, **settings):
        self.cluster = world(records=[6])
        self.cluster.kafka.create_topic("out", 1)
        self.node = self.cluster.node("a", spec=spec(consumer_timeout_ms=0, **settings))
        self.node.engine.changed = Stepping(self.cluster)
        self._hold()
        self.consumer = self.node.consumer
        reader = self.consumer._reader
        self._poll, reader.poll = reader.poll, self._step

    def _step(self, timeout_ms, max_records):
        """Advance the time by the wait of a poll that found no records."""
        found = self._poll(timeout_ms, max_records)
        if timeout_ms and not found:
            self.cluster.run(timeout_ms)
        return found

    def _hold(self):
        self.cluster.run_until(held_by(self.node, 1), 6 * H)
        self.cluster.run(40)

    def lose(self):
        self.node.cut(is_cut=True)
        self.cluster.run(2 * H)

    def win(self):
        self.node.cut(is_cut=False)
        self._hold()

    def add(self, value):
        self.cluster.kafka.produce(T0, value)

    @property
    def position(self):
        self.cluster.run(H)
        return fold(self.cluster).keys[KEY].next_unclaimed()

    @property
    def sent(self):
        return [each.value for each in self.cluster.kafka.log(("out", 0)).records]


class OnMock:
    """The same operations on a ``MockConsumer``."""

    def __init__(self, *, most=500, **settings):
        self.consumer = MockConsumer("t", max_poll_records=most, **settings)
        self.consumer.add("t", 0, *[b"%d" % number for number in range(6)])

    def lose(self):
        self.consumer.lose(T0, "lease_expired")

    def win(self):
        self.consumer.claim(T0)

    def add(self, value):
        self.consumer.add("t", 0, value)

    @property
    def position(self):
        return self.consumer.position_in_log(T0)

    @property
    def sent(self):
        return [each.value for each in self.consumer.sent]


def offsets(records):
    return [each.offset for each in records]


def polled(consumer):
    for _ in range(3):  # at most once, the first call only requests grants
        if found := consumer.poll(200):
            return offsets(found[T0])
    return []


def reads_and_commits(given):
    consumer = given.consumer
    records = consumer.poll(100)[T0]
    yield offsets(records)
    consumer.commit(records[1])
    yield consumer.committed(T0), consumer.position(T0)
    consumer.commit([records[0]])
    yield consumer.committed(T0), given.position
    consumer.commit()
    consumer.flush()
    yield consumer.committed(T0), given.position, consumer.lag()
    yield offsets(consumer)
    consumer.close()
    yield given.position


def iterates(given):
    consumer = given.consumer
    yield [offsets(each.records) for each in consumer.batches(4)]
    yield consumer.committed(T0) in (0, 6), consumer.position(T0)
    yield offsets(consumer)
    given.add(b"more")
    yield [each.value for each in consumer]
    consumer.stop()
    yield list(consumer)
    consumer.close()
    yield given.position


def loses_its_claim(given):
    consumer = given.consumer
    record = next(consumer)
    given.lose()
    with pytest.raises(ClaimLost) as caught:
        next(consumer)
    yield caught.value.reason, consumer.assignment()
    given.win()
    with pytest.raises(ClaimLost) as caught:
        consumer.commit(record)
    yield caught.value.reason
    again = next(consumer)
    yield again.offset, again.token > record.token


def loses_grants(given):
    consumer = given.consumer
    yield polled(consumer)
    given.lose()
    yield polled(consumer), consumer.assignment()
    given.win()
    yield polled(consumer)


def seeks(given):
    consumer = given.consumer
    records = consumer.poll(100)[T0]
    consumer.seek(T0, 2)
    yield consumer.position(T0), consumer.committed(T0), given.position
    with pytest.raises(ClaimLost) as caught:
        consumer.commit(records)
    yield caught.value.reason
    yield offsets(consumer)
    consumer.seek_to_end()
    yield consumer.committed(T0), polled(consumer)


def pauses(given):
    consumer = given.consumer
    consumer.pause(T0)
    yield consumer.poll(100), consumer.paused()
    consumer.resume(T0)
    yield polled(consumer), consumer.load()


def writes(given):
    for transaction in given.consumer.transactions(4):
        with transaction:
            for record in transaction.records:
                transaction.send("out", record.value)
        yield offsets(transaction.records), transaction.is_committed
    yield given.sent, given.position


def misuses(given):
    consumer = given.consumer
    for call in (
        lambda: consumer.seek(("t", 5), 0),
        lambda: consumer.seek(T0, 7),
        lambda: consumer.commit(3),
        lambda: consumer.poll(0, 0),
        lambda: (consumer.close(), consumer.poll()),
    ):
        with pytest.raises(Exception) as caught:
            call()
        yield str(caught.value).replace("mock-group", "g")


PROGRAMS = [
    (reads_and_commits, ALO),
    (iterates, ALO),
    (iterates, AMO),
    (loses_its_claim, ALO),
    (loses_grants, AMO),
    (seeks, ALO),
    (pauses, ALO),
    (pauses, AMO),
    (writes, ALO),
    (misuses, ALO),
    (misuses, AMO),
]


@pytest.mark.parametrize(("program", "delivery"), PROGRAMS)
def test_a_program_gets_the_same_results_on_mock_and_cluster(program, delivery):
    found, wanted = (
        list(program(kind(delivery=delivery, most=3))) for kind in (OnMock, OnCluster)
    )
    assert found == wanted
    assert found


def test_callbacks_are_the_same_on_mock_and_cluster():
    def run(kind):
        found = []
        given = kind(
            on_claimed=lambda place, _: found.append(place),
            on_lost=lambda place, ending: found.append((place, ending.reason)),
        )
        next(given.consumer)
        given.lose()
        given.consumer.poll()
        return found

    assert run(OnMock) == run(OnCluster) == [T0, (T0, "lease_expired")]


def test_a_mock_is_a_consumer_with_the_same_settings():
    consumer = MockConsumer("t", "u", max_poll_records=1)
    assert isinstance(consumer, Consumer)
    consumer.add("t", 0, b"1", key=b"k", headers=(("h", b"v"),), timestamp_ms=5)
    consumer.add("u", 3, None)
    first, second = consumer
    assert (first.key, first.headers, first.timestamp_ms) == (b"k", (("h", b"v"),), 5)
    assert (second.topic, second.partition, second.value) == ("u", 3, None)
    with pytest.raises(ConfigurationError, match="max_poll_records"):
        MockConsumer("t", max_poll_records=0)
    with pytest.raises(TypeError, match="max_records"):
        MockConsumer("t", max_records=0)  # type: ignore[call-arg]
    replaced = vars(MockConsumer).keys() & vars(Consumer).keys()
    assert all(name.startswith("_") for name in replaced)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"on_lost": 5}, "on_lost must be a function"),
        ({"standbys": 1}, "on_standby"),
        ({"on_topics": print}, "policy='topic'"),
        ({"policy": "nope"}, "unknown policy 'nope'"),
        ({"timeout_ms": "5s"}, "timeout_ms must be a number"),
    ],
)
def test_a_mock_refuses_the_settings_that_a_consumer_refuses(settings, error):
    with pytest.raises(ConfigurationError, match=error):
        MockConsumer("t", **settings)


def test_a_mock_consumes_the_topics_of_its_pattern():
    consumer = MockConsumer(pattern="pay.*")
    consumer.add("payments", 1, b"1")
    consumer.add("payouts", 0, b"2")
    assert [each.topic for each in consumer] == ["payments", "payouts"]
    for name in ("orders", "__marshal"):
        with pytest.raises(InvalidTransition, match="does not consume"):
            consumer.add(name, 0, b"1")


def test_a_mock_has_records_of_bytes_as_kafka_has():
    consumer = MockConsumer("t")
    with pytest.raises(TypeError, match="bytes or None, not str"):
        consumer.add("t", 0, b"1", "2")
    with pytest.raises(TypeError, match="bytes or None, not int"):
        consumer.add("t", 0, b"1", key=5)
    assert list(consumer) == []


def test_a_test_adds_records_and_claims_or_loses_partitions():
    consumer = MockConsumer("t")
    with pytest.raises(InvalidTransition, match="does not consume 'u'"):
        consumer.add("u", 0, b"1")
    with pytest.raises(InvalidTransition, match="not held"):
        consumer.lose(T0)
    consumer.claim(T0, 2)
    with pytest.raises(InvalidTransition, match="held already"):
        consumer.claim(T0)
    consumer.add("t", 0, b"0", b"1", b"2")
    assert offsets(consumer) == [2]
    assert consumer.position_in_log(T0) == 2
    consumer.close(release=False)
    assert consumer.position_in_log(T0) == 2


def test_a_failed_mock_raises_from_every_call():
    consumer = MockConsumer("t")
    consumer.add("t", 0, b"1")
    consumer.fail(IdentityConflict("twin", holder="b"))
    for call in (consumer.poll, consumer.commit, lambda: next(consumer)):
        with pytest.raises(IdentityConflict, match="twin"):
            call()
    consumer.close()
    assert consumer.is_closed


def test_a_poll_never_waits_and_any_thread_may_add_records():
    consumer = MockConsumer("t", consumer_timeout_ms=None)
    began_s = time.monotonic()
    assert consumer.poll(60_000) == {}
    found = []

    def run():
        for record in consumer:
            found.append(record.offset)
            consumer.commit(record)

    thread = threading.Thread(target=run)
    thread.start()
    consumer.add("t", 0, b"1", b"2")
    while consumer.position_in_log(T0) < 2 and time.monotonic() < began_s + 60:
        time.sleep(0.001)
    consumer.stop()
    thread.join(30)
    assert found == [0, 1]


def test_a_mock_can_be_used_with_asyncio():
    consumer = MockConsumer("t")
    consumer.add("t", 0, b"1", b"2")

    async def work():
        found = []
        async with consumer.as_async() as ours:
            async for record in ours:
                found.append(record.value)
                await ours.commit(record)
            await ours.flush()
        return found

    assert asyncio.run(work()) == [b"1", b"2"]
    assert (consumer.is_closed, consumer.position_in_log(T0)) == (True, 2)
