"""What librdkafka's producer is made with, and how it reports."""

import threading

import pytest
from confluent_kafka import KafkaException

from kafka_marshal.kafka_io.fast import clients
from kafka_marshal.kafka_io.fast.writer import FastOutlet, fast_outlets
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.writer import writer_timeouts

NOBODY = ConnectionSettings("127.0.0.1:1")


@pytest.mark.parametrize("heartbeat_interval_ms", [1, 20, 2_000, 60_000, 600_000])
def test_producer_is_idempotent_and_in_order(heartbeat_interval_ms):
    timeouts = writer_timeouts(heartbeat_interval_ms)
    outlet = fast_outlets(NOBODY)(timeouts, 1_000)
    assert outlet.config == {
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": 2,
        "compression.type": "none",
        "request.timeout.ms": timeouts["request_timeout_ms"],
        "delivery.timeout.ms": timeouts["delivery_timeout_ms"],
    }
    outlet.end().join(timeout=30)


def test_what_is_not_delivered_is_reported_once_and_the_producer_let_go():
    outlet = FastOutlet(NOBODY, writer_timeouts(100))
    handle = outlet._client.handle
    outcomes, is_told = [], threading.Event()

    def report(outcome):
        outcomes.append(outcome)
        is_told.set()

    outlet.send(0, b"x", report=report)
    outlet.end().join(timeout=30)
    assert is_told.wait(timeout=30)
    (outcome,) = outcomes
    assert isinstance(outcome, KafkaException)
    assert outcome.args[0].name() in {"_MSG_TIMED_OUT", "_PURGE_QUEUE"}
    outlet.collector.join(timeout=30)
    assert id(handle) not in clients._live
