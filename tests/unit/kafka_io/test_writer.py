"""The writer over fake producers, which fail as real producers do."""

import threading

import pytest
from kafka import errors as kafka_errors
from slowness import until

from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import CoordinationError, InvalidTransition, LogUnwritable
from kafka_marshal.kafka_io import writer as module
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.translate import translate_error
from kafka_marshal.kafka_io.writer import Writer, no_answer, writer_timeouts


class FakeProducer:
    """Notes sent records; the test reports their outcomes."""

    def __init__(self, timeouts):
        self.config = dict(timeouts)
        self.sent = []
        self.is_closed = False
        self.is_dropped = False
        self.is_outdated = False
        self.connection_error = None
        self.refusal = None

    def send(self, partition, value, *, report):
        if self.refusal:
            raise self.refusal
        self.sent.append((partition, value, report))

    def drop(self):
        self.is_dropped = True
        return self.end()

    def end(self):
        self.is_closed = True
        thread = threading.Thread(target=int, daemon=True)
        thread.start()
        return thread

    def finish(self, number, outcome):
        self.sent[number][2](outcome)


class FakeProducers(list):
    """All producers that were made; the next ``unreachable`` attempts fail."""

    unreachable = 0
    cause = None

    def connect(self, timeouts, timeout_ms):
        assert timeout_ms > 0
        if self.unreachable:
            self.unreachable -= 1
            raise kafka_errors.KafkaTimeoutError("nobody there") from self.cause
        self.append(FakeProducer(timeouts))
        return self[-1]


def translated(error, doing, access):
    return translate_error(error, doing=doing, access=access, addresses="a:1")


@pytest.fixture(autouse=True)
def haste(monkeypatch):
    monkeypatch.setattr(module, "RENEW_INTERVAL_MS", 10)
    monkeypatch.setattr(module, "OVERDUE_GRACE_MS", 0)


@pytest.fixture
def producers():
    return FakeProducers()


def new_writer(producers, *, heartbeat_interval_ms):
    return Writer(
        ConnectionConfig("a:1"),
        connect=producers.connect,
        translate=translated,
        heartbeat_interval_ms=heartbeat_interval_ms,
        timeout_ms=60_000,
    )


@pytest.fixture
def writer(producers):
    made = new_writer(producers, heartbeat_interval_ms=10_000)
    yield made
    made.close(1_000)


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
def test_timeouts_follow_from_the_heartbeat_interval(
    heartbeat_interval_ms, request_ms, delivery_ms
):
    timeouts = writer_timeouts(heartbeat_interval_ms)
    assert timeouts == {
        "request_timeout_ms": request_ms,
        "delivery_timeout_ms": delivery_ms,
    }
    assert delivery_ms >= request_ms + module.LINGER_MS


def test_an_acknowledged_append_is_done_with_its_offset(writer, producers):
    append = writer.append(1, b"x")
    assert producers[0].sent[0][:2] == (1, b"x")
    assert (append.is_done(), append.offset(), append.error()) == (False, None, None)
    producers[0].finish(0, 7)
    assert (append.is_done(), append.offset(), append.error()) == (True, 7, None)


def test_an_append_with_an_unknown_offset_is_done_without_one(writer, producers):
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
def test_a_failed_append_replaces_the_producer(writer, producers, error, kind):
    append = writer.append(0, b"x")
    producers[0].finish(0, error)
    assert type(append.error()) is kind
    held = writer.append(0, b"y")
    until(lambda: len(producers) == 2 and producers[0].is_dropped)
    writer.append(0, b"z")
    until(lambda: [sent[1] for sent in producers[1].sent] == [b"y", b"z"])
    assert len(producers[0].sent) == 1
    producers[1].finish(0, 5)
    assert held.offset() == 5


def test_an_overdue_append_fails_and_replaces_the_producer(producers):
    writer = new_writer(producers, heartbeat_interval_ms=20)
    append = writer.append(0, b"x")
    until(append.is_done)
    assert isinstance(append.error(), CoordinationError)
    producers[0].finish(0, 3)
    assert append.offset() is None
    assert append.error() is not None
    writer.watch()
    until(lambda: len(producers) == 2)
    writer.close(1_000)


def test_an_outdated_producer_is_replaced_at_once(writer, producers):
    pending = writer.append(0, b"x")
    producers[0].is_outdated = True
    writer.watch()
    held = writer.append(0, b"y")
    until(lambda: len(producers) == 2 and producers[0].is_dropped)
    assert pending.error() is not None, "it may be written, and may not"
    until(lambda: producers[1].sent)
    producers[1].finish(0, 5)
    assert held.offset() == 5
    writer.watch()
    assert len(producers) == 2


REFUSED = kafka_errors.KafkaConnectionError("sslv3 alert certificate expired")
NO_LOGIN = kafka_errors.SaslAuthenticationFailedError("wrong password")


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (REFUSED, "does not accept the certificate of this client"),
        (NO_LOGIN, "the broker refused the login"),
        (None, "confirmed it in time"),
    ],
)
def test_an_append_without_an_answer_names_the_connection_error(
    writer, producers, cause, words
):
    """The error is retriable, whatever the cause, so it does not end the engine."""
    append, other = writer.append(0, b"x"), writer.append(1, b"x")
    producers[0].connection_error = cause
    producers[0].finish(0, TimeoutError("late"))
    producers[0].connection_error = None
    producers[0].finish(1, TimeoutError("late"))
    assert type(append.error()) is CoordinationError
    assert words in str(append.error())
    assert "confirmed it in time (late)" in str(other.error())


def test_a_queued_append_names_the_connection_error(producers):
    writer = new_writer(producers, heartbeat_interval_ms=100)
    first = writer.append(0, b"x")
    producers.unreachable, producers.cause = 1_000_000, REFUSED
    producers[0].finish(0, kafka_errors.NotLeaderForPartitionError())
    assert "certificate" not in str(first.error())
    before = producers.unreachable
    writer.watch()
    until(lambda: producers.unreachable < before - 1)
    queued = writer.append(0, b"y")
    until(queued.is_done)
    assert "does not accept the certificate" in str(queued.error())
    producers.unreachable = 0
    until(lambda: len(producers) == 2)
    until(lambda: not writer._is_renewing)
    last = writer.append(0, b"z")
    until(last.is_done)
    assert "confirmed it in time (no outcome in time)" in str(last.error())
    writer.close(1_000)


def test_an_abandoned_append_names_the_connection_error(writer, producers):
    appends = [writer.append(partition, b"x") for partition in range(2)]
    producers[0].connection_error = REFUSED
    producers[0].finish(0, kafka_errors.KafkaTimeoutError("late"))
    writer.watch()
    until(appends[1].is_done)
    assert "does not accept the certificate" in str(appends[1].error())


def test_pending_appends_of_a_failed_producer_are_abandoned(writer, producers):
    """Their later outcomes neither delay nor replace the new producer."""
    slow = writer.append(0, b"slow")
    writer.append(1, b"failed")
    producers[0].finish(1, kafka_errors.KafkaTimeoutError("late"))
    writer.watch()
    until(lambda: writer._sender.producer is not producers[0])
    assert slow.is_done()
    assert "abandoned" in str(slow.error())
    producers[0].finish(0, kafka_errors.KafkaTimeoutError("purged"))
    assert not writer.append(0, b"on").is_done()
    producers[0].finish(0, 3)
    assert slow.offset() is None
    writer.watch()
    assert [sent[1] for sent in producers[1].sent] == [b"on"]
    assert len(producers) == 2


def test_a_new_producer_waits_for_pending_appends_per_partition(writer, producers):
    slow = writer.append(0, b"slow")
    writer.configure(12_000, timeout_ms=60_000)
    # Partition 1 continues at once, partition 0 once its append has an outcome.
    assert not writer.append(1, b"on").is_done()
    early = [writer.append(0, b"early"), writer.append(0, b"next")]
    writer.watch()
    assert [sent[1] for sent in producers[1].sent] == [b"on"]
    assert not any(append.is_done() for append in early)
    producers[0].finish(0, 0)
    assert slow.offset() == 0
    writer.watch()
    assert [sent[1] for sent in producers[1].sent] == [b"on", b"early", b"next"]
    assert not producers[0].is_dropped


def test_an_append_queued_for_too_long_is_never_sent(producers):
    writer = new_writer(producers, heartbeat_interval_ms=200)
    producers.unreachable = 10_000
    writer.append(0, b"x")
    producers[0].finish(0, kafka_errors.KafkaConnectionError("gone"))
    held = writer.append(0, b"held")
    assert not held.is_done()
    until(held.is_done)
    assert "no broker answered" in str(held.error())
    producers.unreachable = 0
    until(lambda: len(producers) == 2)
    until(lambda: writer._sender.producer is producers[1])
    writer.append(0, b"new")
    assert [sent[1] for sent in producers[1].sent] == [b"new"]
    writer.close(1_000)


def test_an_append_beyond_the_queue_limit_fails(writer, producers, monkeypatch):
    monkeypatch.setattr(module, "QUEUE_MAX", 2)
    producers.unreachable = 10_000
    writer.append(0, b"x")
    producers[0].finish(0, kafka_errors.KafkaConnectionError("gone"))
    held = [writer.append(0, b"held") for _ in range(3)]
    assert [append.is_done() for append in held] == [False, False, True]
    assert "wait for the connection" in str(held[2].error())
    writer.close(0)
    assert all("closed" in str(append.error()) for append in held[:2])


def test_a_replacement_is_retried_until_the_cluster_answers(writer, producers):
    producers.unreachable = 3
    writer.append(0, b"x")
    producers[0].finish(0, kafka_errors.KafkaConnectionError("gone"))
    writer.watch()
    until(lambda: len(producers) == 2)
    assert producers.unreachable == 0


def test_a_replacement_waits_until_a_thread_can_be_started(
    writer, producers, monkeypatch
):
    """Memory or the number of processes may be exhausted; calls do not raise."""

    def refuse(call, *, name):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(module, "in_background", refuse)
        writer.append(0, b"x")
        producers[0].finish(0, kafka_errors.KafkaConnectionError("gone"))
        writer.watch()
        held = writer.append(0, b"held")
    writer.watch()
    until(lambda: len(producers) == 2 and producers[1].sent)
    assert not held.is_done()


def test_a_producer_is_replaced_again_after_a_failed_replacement(
    writer, producers, monkeypatch
):
    """Here the old producer cannot be dropped."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(producers[0], "drop", lambda: 1 / 0)
    writer.append(0, b"x")
    producers[0].finish(0, kafka_errors.KafkaConnectionError("gone"))
    writer.watch()
    until(lambda: len(producers) == 2 and writer.append(0, b"y") and producers[1].sent)
    producers[1].finish(0, kafka_errors.KafkaConnectionError("gone"))
    until(lambda: writer.watch() or len(producers) == 3)


def test_a_refused_send_fails_its_append_without_raising(writer, producers):
    producers[0].refusal = ValueError("Unrecognized partition")
    append = writer.append(9, b"x")
    assert isinstance(append.error(), CoordinationError)
    producers[0].refusal = None
    assert not writer.append(0, b"y").is_done()
    assert len(producers) == 1


def test_a_refused_queued_append_does_not_block_later_ones(writer, producers):
    writer.append(0, b"slow")
    writer.configure(12_000, timeout_ms=60_000)
    held = [writer.append(0, b"%d" % number) for number in range(3)]
    producers[1].refusal = ValueError("no leader")
    producers[0].finish(0, 0)
    writer.watch()
    assert [append.is_done() for append in held] == [True, False, False]
    assert "no leader" in str(held[0].error())
    producers[1].refusal = None
    writer.watch()
    assert [sent[1] for sent in producers[1].sent] == [b"1", b"2"]


def test_configure_replaces_the_producer_only_for_new_timeouts(writer, producers):
    writer.configure(10_000, timeout_ms=60_000)
    assert len(producers) == 1
    writer.configure(2_000, timeout_ms=60_000)
    assert producers[-1].config["delivery_timeout_ms"] == 1_000
    until(lambda: producers[0].is_closed)
    producers.unreachable = 1
    with pytest.raises(kafka_errors.KafkaTimeoutError):
        writer.configure(4_000, timeout_ms=10)
    assert len(producers) == 2
    writer.configure(4_000, timeout_ms=60_000)
    assert producers[-1].config["delivery_timeout_ms"] == 2_000


def test_a_closed_writer_refuses_appends(writer, producers):
    writer.close(1_000)
    writer.close(0)
    until(lambda: producers[0].is_closed)
    append = writer.append(0, b"x")
    assert append.is_done()
    assert isinstance(append.error(), InvalidTransition)


def test_a_deadline_raises_once_no_time_is_left():
    assert Deadline(10_000).require_ms(no_answer) > 9_000
    with pytest.raises(CoordinationError, match="in time"):
        Deadline(0).require_ms(no_answer)
