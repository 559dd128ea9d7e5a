"""The writer over a producer that does what real ones were seen to do."""

import time
from typing import ClassVar

import pytest
from kafka import errors as kafka_errors
from kafka.future import Future

from kafka_marshal.errors import CoordinationError, InvalidTransition, LogUnwritable
from kafka_marshal.kafka_io import writer as module
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.writer import Writer, left_ms, writer_timeouts


class Metadata:
    def __init__(self, offset):
        self.offset = offset


class Producer:
    """Takes what is sent, and leaves the outcome to the test."""

    made: ClassVar[list] = []
    unreachable = 0

    def __init__(self, **config):
        if Producer.unreachable:
            Producer.unreachable -= 1
            raise kafka_errors.KafkaTimeoutError("nobody there")
        assert callable(config.pop("kafka_client"))
        self.config = config | {"acks": -1}
        self.sent = []
        self.is_closed = False
        self.refusal = None
        Producer.made.append(self)

    def partitions_for(self, topic):
        return {0, 1}

    def send(self, topic, value, key, partition):
        if self.refusal:
            raise self.refusal
        future = Future()
        self.sent.append((topic, partition, key, value, future))
        return future

    def close(self, timeout):
        self.is_closed = True

    def finish(self, number, offset):
        self.sent[number][4].success(Metadata(offset))

    def fail(self, number, error):
        self.sent[number][4].failure(error)


@pytest.fixture(autouse=True)
def producers(monkeypatch):
    Producer.made, Producer.unreachable = [], 0
    monkeypatch.setattr(module, "KafkaProducer", Producer)
    monkeypatch.setattr(module, "RENEW_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "OVERDUE_GRACE_MS", 0)
    return Producer.made


@pytest.fixture
def writer():
    made = Writer(
        ConnectionSettings("a:1"), heartbeat_interval_ms=10_000, timeout_ms=1_000
    )
    yield made
    made.close(1_000)


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("heartbeat_interval_ms", "request_ms", "delivery_ms"),
    [
        (60_000, 10_000, 30_000),
        (40_000, 10_000, 20_000),
        (2_000, 500, 1_000),
        (8, 2, 4),
        (1, 1, 3),
    ],
)
def test_timeouts_follow_the_protocol(heartbeat_interval_ms, request_ms, delivery_ms):
    timeouts = writer_timeouts(heartbeat_interval_ms)
    assert timeouts == {
        "request_timeout_ms": request_ms,
        "delivery_timeout_ms": delivery_ms,
    }
    assert delivery_ms >= request_ms + module.LINGER_MS


def test_producer_is_idempotent_and_in_order(writer, producers):
    config = producers[0].config
    assert config["enable_idempotence"] is True
    assert config["linger_ms"] <= 5
    assert config["max_block_ms"] <= 100
    assert config["allow_auto_create_topics"] is False
    assert not {"retries", "max_in_flight_requests_per_connection"} & set(config)
    assert writer.config is config


def test_acknowledged_append(writer, producers):
    append = writer.append(1, b"x")
    assert producers[0].sent[0][:4] == ("__marshal", 1, None, b"x")
    assert (append.is_done(), append.offset(), append.error()) == (False, None, None)
    producers[0].finish(0, 7)
    assert (append.is_done(), append.offset(), append.error()) == (True, 7, None)


def test_unknown_offset_is_none(writer, producers):
    append = writer.append(1, b"x")
    producers[0].finish(0, -1)
    assert (append.is_done(), append.offset(), append.error()) == (True, None, None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (kafka_errors.KafkaTimeoutError("late"), CoordinationError),
        (kafka_errors.TopicAuthorizationFailedError("t"), LogUnwritable),
    ],
)
def test_failed_append_replaces_the_producer(writer, producers, error, kind):
    append = writer.append(0, b"x")
    producers[0].fail(0, error)
    assert type(append.error()) is kind
    refused = writer.append(0, b"y")
    assert refused.is_done()
    assert refused.offset() is None
    assert "made anew" in str(refused.error())
    until(lambda: len(producers) == 2 and producers[0].is_closed)
    writer.append(0, b"z")
    assert [sent[3] for sent in producers[1].sent] == [b"z"]


def test_overdue_append_fails_for_good_and_replaces_the_producer(producers):
    writer = Writer(
        ConnectionSettings("a:1"), heartbeat_interval_ms=20, timeout_ms=1_000
    )
    append = writer.append(0, b"x")
    until(append.is_done)
    assert isinstance(append.error(), CoordinationError)
    producers[0].finish(0, 3)
    assert append.offset() is None
    assert append.error() is not None
    writer.watch()
    until(lambda: len(producers) == 2)
    writer.close(1_000)


def test_nothing_overtakes_an_append_of_an_old_producer(writer, producers):
    slow = writer.append(0, b"slow")
    failed = writer.append(1, b"failed")
    producers[0].fail(1, kafka_errors.KafkaTimeoutError("late"))
    assert failed.is_done()
    writer.watch()
    until(lambda: len(producers) == 2)
    until(lambda: writer.config is producers[1].config)
    # Partition 1 goes on at once, partition 0 when its append has an outcome.
    assert not writer.append(1, b"on").is_done()
    assert writer.append(0, b"too early").is_done()
    producers[0].finish(0, 0)
    assert slow.offset() == 0
    writer.append(0, b"now")
    assert [sent[3] for sent in producers[1].sent] == [b"on", b"now"]


def test_renewal_goes_on_until_the_cluster_answers(writer, producers):
    Producer.unreachable = 3
    writer.append(0, b"x")
    producers[0].fail(0, kafka_errors.KafkaConnectionError("gone"))
    writer.watch()
    until(lambda: len(producers) == 2)
    assert Producer.unreachable == 0


def test_send_that_is_refused_does_not_raise(writer, producers):
    producers[0].refusal = ValueError("Unrecognized partition")
    append = writer.append(9, b"x")
    assert isinstance(append.error(), CoordinationError)
    producers[0].refusal = None
    assert not writer.append(0, b"y").is_done()
    assert len(producers) == 1


def test_configure_swaps_once(writer, producers):
    writer.configure(10_000, timeout_ms=1_000)
    assert len(producers) == 1
    writer.configure(2_000, timeout_ms=1_000)
    assert writer.config["delivery_timeout_ms"] == 1_000
    until(lambda: producers[0].is_closed)
    Producer.unreachable = 1
    with pytest.raises(kafka_errors.KafkaTimeoutError):
        writer.configure(4_000, timeout_ms=10)
    assert writer.config["delivery_timeout_ms"] == 1_000
    writer.configure(4_000, timeout_ms=1_000)
    assert writer.config["delivery_timeout_ms"] == 2_000


def test_closed_writer_refuses(writer, producers):
    writer.close(1_000)
    writer.close(0)
    until(lambda: producers[0].is_closed)
    append = writer.append(0, b"x")
    assert append.is_done()
    assert isinstance(append.error(), InvalidTransition)


def test_deadlines_run_out():
    assert left_ms(time.monotonic() + 10) > 9_000
    with pytest.raises(CoordinationError, match="in time"):
        left_ms(time.monotonic())
