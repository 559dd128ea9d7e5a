"""What librdkafka's producer is made with, and how it reports."""

import threading
import time

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafka_marshal.kafka_io.fast import clients
from kafka_marshal.kafka_io.fast import writer as module
from kafka_marshal.kafka_io.fast.clients import Client
from kafka_marshal.kafka_io.fast.writer import fast_outlets, writer_config
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.writer import writer_timeouts

NOBODY = ConnectionSettings("127.0.0.1:1")


class Message:
    def __init__(self, offset):
        self._offset = offset

    def offset(self):
        return self._offset


class Producer:
    """Stands in for librdkafka's; what was produced waits for the test."""

    def __init__(self):
        self.produced = []
        self.outcomes = []
        self.told = []
        self.asked = []
        self.purged = threading.Event()
        self.unsent = 0
        self.faults = []
        self.refusal = None

    def produce(self, topic, value, *, partition, on_delivery):
        if self.refusal is not None:
            raise KafkaException(KafkaError(self.refusal))
        self.produced.append((topic, value, partition))
        self.outcomes.append(on_delivery)

    def poll(self, timeout):
        assert timeout <= 1
        for outcome in self.told:
            outcome(KafkaError(KafkaError._PURGE_INFLIGHT), Message(-1001))
        self.told = []
        threading.Event().wait(0.001)
        if self.faults:
            raise self.faults.pop()

    def flush(self, timeout):
        assert timeout > 0
        return self.unsent

    def purge(self):
        self.purged.set()
        # As librdkafka does it: told when the producer is polled.
        outcomes, self.outcomes = self.outcomes, []
        self.told += outcomes

    def list_topics(self, topic, timeout):
        assert topic == "__marshal"
        self.asked.append(timeout)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def client(monkeypatch):
    made = Client(Producer())
    made.is_looking.set()
    made.is_numbered.set()
    monkeypatch.setattr(module, "new_producer", lambda *_: made)
    return made


@pytest.fixture
def outlet(client):
    made = fast_outlets(NOBODY)(writer_timeouts(2_000), 1_000)
    yield made
    made.end().join(timeout=30)
    made.collector.join(timeout=30)
    assert client.handle is None


def test_producer_is_idempotent_and_in_order():
    assert writer_config(writer_timeouts(2_000)) == {
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": 2,
        "compression.type": "none",
        "request.timeout.ms": 500,
        "socket.timeout.ms": 750,
        "delivery.timeout.ms": 1_000,
    }


@pytest.mark.parametrize("heartbeat_interval_ms", [1, 20, 2_000, 60_000, 600_000])
def test_librdkafka_takes_it_and_is_let_go_where_nobody_answers(heartbeat_interval_ms):
    before = set(clients._live)
    with pytest.raises(KafkaException) as caught:
        fast_outlets(NOBODY)(writer_timeouts(heartbeat_interval_ms), 1)
    assert caught.value.args[0].name() in {"_TRANSPORT", "_TIMED_OUT"}
    for thread in threading.enumerate():
        if thread.name == "marshal-deliveries":
            thread.join(timeout=30)
    assert set(clients._live) <= before


def test_outcomes_are_reported(outlet, client):
    outcomes = []
    outlet.send(1, b"x", report=outcomes.append)
    outlet.send(0, b"y", report=outcomes.append)
    well, badly = client.handle.outcomes
    assert client.handle.produced == [("__marshal", b"x", 1), ("__marshal", b"y", 0)]
    well(None, Message(7))
    badly(KafkaError(KafkaError._MSG_TIMED_OUT), Message(-1001))
    assert outcomes[0] == 7
    assert outcomes[1].args[0].name() == "_MSG_TIMED_OUT"


def test_a_fatal_fault_ends_what_waits_and_what_comes(outlet, client):
    """Reported, so that the writer makes a fresh producer."""
    outcomes = []
    outlet.send(0, b"x", report=outcomes.append)
    fatal = KafkaException(KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED))
    client.handle.faults.append(fatal)
    assert client.handle.purged.wait(timeout=30)
    until(lambda: outcomes)
    client.handle.refusal = KafkaError._FATAL
    outlet.send(0, b"y", report=outcomes.append)
    assert outcomes == [fatal, fatal]


def test_dropped_it_gives_up_what_is_under_way(outlet, client):
    outcomes = []
    outlet.send(0, b"x", report=outcomes.append)
    handle = client.handle
    outlet.drop().join(timeout=30)
    assert handle.purged.is_set()
    assert [each.args[0].name() for each in outcomes] == ["_PURGE_INFLIGHT"]
    assert client.handle is None


def test_leaders_are_asked_for_once_a_broker_is_lost(outlet, client):
    at_first = len(client.handle.asked)
    client.note(KafkaError(KafkaError._TRANSPORT))
    until(lambda: len(client.handle.asked) > at_first)


def test_what_is_not_taken_is_raised(outlet, client):
    client.handle.refusal = KafkaError._UNKNOWN_PARTITION
    with pytest.raises(KafkaException):
        outlet.send(99, b"x", report=pytest.fail)


def test_what_cannot_be_sent_in_time_is_given_up(outlet, client):
    client.handle.unsent = 1
    handle = client.handle
    outlet.end().join(timeout=30)
    assert handle.purged.is_set()
