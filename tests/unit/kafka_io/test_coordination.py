"""The producer of kafka-python: configuration, outcomes, closing."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
from kafka import errors as kafka_errors
from kafka.future import Future
from slowness import until

from kafka_marshal.kafka_io import coordination as module
from kafka_marshal.kafka_io.coordination import KafkaProducerHandle
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.writer import writer_timeouts

SETTINGS = ConnectionConfig("a:1")


class Metadata:
    offset = 7


class Sender:
    is_forced = False

    def force_close(self):
        self.is_forced = True


class Producer:
    """A fake of kafka-python's producer; ``faults`` has the errors of each call."""

    made: ClassVar[list] = []
    faults: ClassVar[dict] = {}

    def __init__(self, **config):
        assert callable(config.pop("kafka_client"))
        self.config = config | {"acks": -1}
        self.futures = []
        self.closed = []
        self._sender = Sender()
        self._metadata = SimpleNamespace(request_update=print)
        Producer.made.append(self)

    def _fail(self, call):
        if Producer.faults.get(call):
            raise Producer.faults[call].pop(0)

    def partitions_for(self, topic):
        self._fail("partitions_for")
        return {0, 1}

    def send(self, topic, value, key, partition):
        self._fail("send")
        assert (topic, key) == ("__marshal", None)
        self.futures.append((partition, value, Future()))
        return self.futures[-1][2]

    def close(self, timeout):
        self.closed.append(timeout)
        self._fail("close")


@pytest.fixture
def producers(monkeypatch):
    Producer.made, Producer.faults = [], {}
    monkeypatch.setattr(module, "KafkaProducer", Producer)
    return Producer.made


def producer(timeout_ms=1_000, lingers=True):
    timeouts = writer_timeouts(2_000)
    return KafkaProducerHandle(
        SETTINGS, timeouts, lingers=lingers, timeout_ms=timeout_ms
    )


def test_the_producer_is_idempotent_and_has_short_timeouts(producers):
    config = producer().config
    assert config is producers[0].config
    assert config["enable_idempotence"] is True
    assert config["linger_ms"] <= 5
    assert config["max_block_ms"] <= 100
    assert config["allow_auto_create_topics"] is False
    assert (config["request_timeout_ms"], config["delivery_timeout_ms"]) == (500, 1_000)
    assert not {"retries", "max_in_flight_requests_per_connection"} & set(config)
    assert producer(lingers=False).config == config | {"linger_ms": 0}
    # Patched: it would use a whole processor while a partition has no leader.
    assert producers[0]._metadata.request_update is not print


def test_a_send_reports_its_offset_or_its_error(producers):
    outcomes = []
    made = producer()
    made.send(1, b"x", report=outcomes.append)
    made.send(0, b"y", report=outcomes.append)
    (*first, well), (*second, badly) = producers[0].futures
    assert (first, second) == ([1, b"x"], [0, b"y"])
    assert outcomes == []
    well.success(Metadata())
    error = kafka_errors.NotLeaderForPartitionError("t")
    badly.failure(error)
    assert outcomes == [7, error]


def test_an_append_without_an_answer_reports_a_timeout(producers):
    outcomes = []
    made = producer()
    made.send(1, b"x", report=outcomes.append)
    late = kafka_errors.KafkaTimeoutError("late")
    producers[0].futures[0][2].failure(late)
    Producer.faults = {"send": [late]}
    with pytest.raises(TimeoutError, match="late"):
        made.send(9, b"x", report=pytest.fail)
    assert [(type(each), str(each)) for each in outcomes] == [(TimeoutError, str(late))]


def test_a_connection_error_is_cleared_by_a_written_record(producers):
    made = producer()
    assert made.connection_error is None
    failed = kafka_errors.KafkaConnectionError("certificate expired")
    made._watch.note(None, failed)
    assert made.connection_error is failed
    made.send(1, b"x", report=lambda _: None)
    producers[0].futures[0][2].success(Metadata())
    assert made.connection_error is None


def test_ctrl_c_while_connecting_closes_the_producer(producers):
    Producer.faults = {"partitions_for": [KeyboardInterrupt()]}
    with pytest.raises(KeyboardInterrupt):
        producer()
    until(lambda: producers[0].closed)


def test_a_failed_connect_has_the_last_connection_error_as_its_cause(
    producers, monkeypatch
):
    failed = kafka_errors.KafkaConnectionError("certificate expired")

    def connect(*_, watch, **__):
        watch.note(None, failed)
        raise kafka_errors.KafkaTimeoutError("no bootstrap")

    monkeypatch.setattr(module, "new_client", connect)
    with pytest.raises(kafka_errors.KafkaTimeoutError) as raised:
        producer()
    assert raised.value.__cause__ is failed


def test_a_record_that_kafka_python_refuses_raises(producers):
    Producer.faults = {"send": [ValueError("Unrecognized partition")]}
    with pytest.raises(ValueError, match="Unrecognized"):
        producer().send(9, b"x", report=pytest.fail)


def test_the_producer_waits_for_metadata(producers):
    late = kafka_errors.KafkaTimeoutError("late")
    Producer.faults = {"partitions_for": [late, late]}
    producer()
    assert producers[0].closed == []


@pytest.mark.parametrize(
    "error",
    [
        kafka_errors.KafkaTimeoutError("late"),
        kafka_errors.TopicAuthorizationFailedError("t"),
    ],
)
def test_a_producer_that_gets_no_metadata_is_closed(producers, error):
    Producer.faults = {"partitions_for": [error]}
    with pytest.raises(type(error)):
        producer(timeout_ms=0)
    assert len(producers) == 1


def test_a_dropped_producer_is_closed_by_force_at_once(producers):
    producer().drop().join(timeout=60)
    assert producers[0]._sender.is_forced
    assert max(producers[0].closed) <= 1


def test_a_producer_that_does_not_close_is_closed_by_force(producers):
    made = producer()
    Producer.faults = {"close": [kafka_errors.KafkaTimeoutError("held")]}
    made.end().join(timeout=60)
    assert producers[0]._sender.is_forced
    assert len(producers[0].closed) == 2
