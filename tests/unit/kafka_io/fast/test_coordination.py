"""The coordination log over librdkafka: producer, entries, queries, backlogs."""

import gc
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest
from batchkit import packed
from confluent_kafka import OFFSET_END, KafkaError, KafkaException
from conformancekit import WAIT_S, until

from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    InvalidTransition,
    LogTruncated,
    LogUnreadable,
)
from kafka_marshal.kafka_io.fast import clients
from kafka_marshal.kafka_io.fast import coordination as module
from kafka_marshal.kafka_io.fast.clients import Client
from kafka_marshal.kafka_io.fast.coordination import (
    BACKLOG,
    MESSAGES_AT_ONCE,
    FastCoordinationLog,
    FastProducerHandle,
    writer_config,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.writer import writer_timeouts
from kafka_marshal.native import compiled
from kafka_marshal.protocol.types import LogEntry

needs_native = pytest.mark.skipif(compiled is None, reason="nothing was compiled here")
NOBODY = ConnectionConfig("127.0.0.1:1")
# By default the garbage collector starts after this number of new objects.
PYTHONS_NEWEST_MAX = 700


class Delivered:
    def __init__(self, offset):
        self._offset = offset

    def offset(self):
        return self._offset


class Producer:
    """A fake of librdkafka's producer; the test reports the outcomes."""

    def __init__(self):
        self.produced = []
        self.outcomes = []
        self.reports = []
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
        for outcome in self.reports:
            outcome(KafkaError(KafkaError._PURGE_INFLIGHT), Delivered(-1001))
        self.reports = []
        threading.Event().wait(0.001)
        if self.faults:
            raise self.faults.pop()

    def flush(self, timeout):
        assert timeout > 0
        return self.unsent

    def purge(self):
        self.purged.set()
        # Like librdkafka, report them at the next poll.
        outcomes, self.outcomes = self.outcomes, []
        self.reports += outcomes

    def list_topics(self, topic, timeout):
        assert topic == "__marshal"
        self.asked.append(timeout)


@pytest.fixture
def client(monkeypatch):
    made = Client(handle=Producer())
    made.requests_pid.set()
    made.has_pid.set()
    monkeypatch.setattr(module, "new_producer", lambda *_: made)
    return made


@pytest.fixture
def producer(client):
    timeouts = writer_timeouts(2_000)
    made = FastProducerHandle(NOBODY, timeouts, lingers=True, timeout_ms=1_000)
    yield made
    made.end().join(timeout=30)
    made.collector.join(timeout=30)  # type: ignore[attr-defined]
    assert client.handle is None


def test_the_producer_is_idempotent_and_has_short_timeouts():
    assert writer_config(writer_timeouts(2_000), lingers=True) == {
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": 0.5,
        "batch.size": 48 * 1024,
        "compression.type": "none",
        "request.timeout.ms": 500,
        "socket.timeout.ms": 750,
        "delivery.timeout.ms": 1_000,
    }


def test_without_linger_each_record_is_sent_at_once():
    timeouts = writer_timeouts(2_000)
    config = writer_config(timeouts, lingers=False)
    assert config == writer_config(timeouts, lingers=True) | {"linger.ms": 0}


@pytest.mark.parametrize("heartbeat_interval_ms", [1, 20, 2_000, 60_000, 600_000])
def test_librdkafka_accepts_the_configuration(heartbeat_interval_ms):
    before = set(clients._live)
    timeouts = writer_timeouts(heartbeat_interval_ms)
    with pytest.raises(KafkaException) as caught:
        FastProducerHandle(NOBODY, timeouts, lingers=True, timeout_ms=1)
    assert caught.value.args[0].name() in {"_TRANSPORT", "_TIMED_OUT"}
    for thread in threading.enumerate():
        if thread.name == "marshal-deliveries":
            thread.join(timeout=30)
    assert set(clients._live) <= before


def test_a_send_reports_its_offset_or_its_error(producer, client):
    outcomes = []
    producer.send(1, b"x", report=outcomes.append)
    producer.send(0, b"y", report=outcomes.append)
    well, badly = client.handle.outcomes
    assert client.handle.produced == [("__marshal", b"x", 1), ("__marshal", b"y", 0)]
    well(None, Delivered(7))
    badly(KafkaError(KafkaError.INVALID_RECORD), Delivered(-1001))
    assert outcomes[0] == 7
    assert outcomes[1].args[0].name() == "INVALID_RECORD"


def test_an_append_without_an_answer_reports_a_timeout(producer, client):
    outcomes = []
    producer.send(0, b"x", report=outcomes.append)
    client.handle.outcomes.pop()(KafkaError(KafkaError._MSG_TIMED_OUT), Delivered(-1))
    assert [type(each) for each in outcomes] == [TimeoutError]
    assert "_MSG_TIMED_OUT" in str(outcomes[0])


def test_a_connection_error_is_cleared_by_a_written_record(producer, client):
    client.on_error(KafkaError(KafkaError._TRANSPORT, "certificate expired"))
    assert "certificate expired" in str(producer.connection_error)
    producer.send(0, b"x", report=lambda _: None)
    client.handle.outcomes.pop()(None, Delivered(7))
    assert producer.connection_error is None


def test_a_failed_connect_has_the_last_connection_error_as_its_cause(
    client, monkeypatch
):
    def fail(topic, timeout):
        client.on_error(KafkaError(KafkaError._TRANSPORT, "certificate expired"))
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    monkeypatch.setattr(client.handle, "list_topics", fail)
    timeouts = writer_timeouts(2_000)
    with pytest.raises(KafkaException) as raised:
        FastProducerHandle(NOBODY, timeouts, lingers=True, timeout_ms=1_000)
    assert "certificate expired" in str(raised.value.__cause__)


def test_ctrl_c_while_connecting_destroys_the_producer(client, monkeypatch):
    def interrupt(topic, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(client.handle, "list_topics", interrupt)
    timeouts = writer_timeouts(2_000)
    with pytest.raises(KeyboardInterrupt):
        FastProducerHandle(NOBODY, timeouts, lingers=True, timeout_ms=1_000)
    until(lambda: client.handle is None, "it is destroyed")


def test_a_fatal_error_fails_pending_and_later_sends(producer, client):
    """The reported error makes the writer replace the producer."""
    outcomes = []
    producer.send(0, b"x", report=outcomes.append)
    fatal = KafkaException(KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED))
    client.handle.faults.append(fatal)
    assert client.handle.purged.wait(timeout=30)
    until(lambda: outcomes, "an outcome is reported")
    client.handle.refusal = KafkaError._FATAL
    producer.send(0, b"y", report=outcomes.append)
    assert outcomes == [fatal, fatal]


def test_drop_purges_pending_sends(producer, client):
    outcomes = []
    producer.send(0, b"x", report=outcomes.append)
    handle = client.handle
    producer.drop().join(timeout=30)
    assert handle.purged.is_set()
    assert [each.args[0].name() for each in outcomes] == ["_PURGE_INFLIGHT"]
    assert client.handle is None


def test_the_producer_requests_leaders_after_the_loss_of_a_broker(producer, client):
    at_first = len(client.handle.asked)
    client.on_error(KafkaError(KafkaError._TRANSPORT))
    until(lambda: len(client.handle.asked) > at_first, "leaders are asked for again")


def test_a_record_that_librdkafka_refuses_raises(producer, client):
    client.handle.refusal = KafkaError._UNKNOWN_PARTITION
    with pytest.raises(KafkaException):
        producer.send(99, b"x", report=pytest.fail)


def test_unsent_records_are_purged_at_the_deadline(producer, client):
    client.handle.unsent = 1
    handle = client.handle
    producer.end().join(timeout=30)
    assert handle.purged.is_set()


class Message:
    def __init__(self, partition, offset, *, error=None, epoch=0, kind=2):
        self._partition = partition
        self._offset = offset
        self._error = None if error is None else KafkaError(error)
        self._epoch = epoch
        self._kind = kind

    def partition(self):
        return self._partition

    def offset(self):
        return self._offset

    def error(self):
        return self._error

    def leader_epoch(self):
        return self._epoch

    def timestamp(self):
        return self._kind, 1_000 + self._offset

    def value(self):
        return b"%d" % self._offset


class Handle:
    """A fake of librdkafka's consumer; the test fills its queue."""

    def __init__(self):
        self.queue = []
        self.assigned = []
        self.starts = {0: 0, 1: 0}
        self.ends = {0: 0, 1: 0}
        self.knows = True
        self.asked = 0
        # Number of metadata requests that are answered without the topic.
        self.unknown = 0
        self.queries = 0
        self.waits = []

    def list_topics(self, topic, timeout):
        assert timeout > 0
        self.knows = True
        self.asked += 1
        partitions = dict.fromkeys(self.starts) if self.asked > self.unknown else {}
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions=partitions)})

    def assign(self, places):
        self.assigned.append({each.partition: each.offset for each in places})

    def poll(self, timeout):
        self.waits.append(timeout)
        return self.queue.pop(0) if self.queue else None

    def consume(self, count, timeout):
        assert timeout == 0
        taken, self.queue = self.queue[:count], self.queue[count:]
        return taken

    def offsets_for_times(self, places, timeout):
        assert timeout > 0
        if not self.knows:
            raise KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION))
        self.queries += 1
        for place in places:
            known = self.ends if place.offset == OFFSET_END else self.starts
            place.offset = known[place.partition]
        return places

    def close(self):
        pass


class Log(FastCoordinationLog):
    unknown = 0

    def _new_clients(self):
        self.handle = Handle()
        self.handle.unknown = self.unknown
        self.limits = []
        self._querier, self._reader = self._new_querier(), self._new_reader()

    def _new_querier(self):
        return Client(handle=self.handle)

    def _new_reader(self):
        self.limits.append(self._reader_timeout_ms)
        return Client(handle=self.handle)

    def _describe_topic(self, deadline, client):
        for thread in self._connecting:
            thread.join()
        self.asked_meanwhile = self.handle.asked, self.handle.queries
        self._partition_count = 2


@pytest.fixture
def log():
    made = Log(ConnectionConfig("127.0.0.1:1"), heartbeat_interval_ms=None)
    assert made.handle.assigned == [], "nothing is fetched before it is read"
    assert made.poll(0) == []
    assert made.handle.assigned == [{0: 0, 1: 0}]
    yield made
    made.close(1_000)


def test_leaders_are_connected_while_the_topic_is_described(log):
    """The reader and the query client connect once each, and not again later."""
    assert log.asked_meanwhile == (2, 1)
    assert log.handle.asked == 2


def test_ctrl_c_while_opening_closes_the_log(closed):
    opened = []

    class Interrupted(Log):
        def _connect(self, deadline):
            opened.extend((self._reader, self._querier))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupted(NOBODY, heartbeat_interval_ms=None)
    until(lambda: closed == opened, "both clients are closed")


def test_metadata_of_a_new_topic_is_requested_until_it_is_known():
    class New(Log):
        unknown = 2

    made = New(ConnectionConfig("127.0.0.1:1"), heartbeat_interval_ms=None)
    assert made.asked_meanwhile == (2, 0)
    assert made.handle.asked == 3
    made.close(1_000)


def test_entries_have_timestamp_types_of_the_wire_format(log):
    log.handle.queue = [Message(1, 4, epoch=3), Message(1, 5, epoch=3, kind=1)]
    (partition, entry), (_, other) = log.poll(0)
    assert (partition, entry.offset, entry.leader_epoch) == (1, 4, 3)
    assert (entry.timestamp_ms, entry.timestamp_type, entry.value) == (1_004, 1, b"4")
    assert other.timestamp_type == 0
    assert log.positions() == {0: 0, 1: 6}


def test_a_poll_waits_whole_milliseconds(log):
    """librdkafka rounds a timeout below one millisecond down to none."""
    log.handle.waits.clear()
    for timeout_ms in (0, 1, 2, 97):
        assert log.poll(timeout_ms) == []
    assert log.handle.waits[0] == 0
    for wait_s, timeout_ms in zip(log.handle.waits[1:], (1, 2, 97), strict=True):
        assert wait_s * 1_000 == pytest.approx(round(wait_s * 1_000))
        assert 1 <= round(wait_s * 1_000) <= timeout_ms


def test_the_reader_requests_leaders_after_the_loss_of_a_broker(log):
    at_first = log.handle.asked
    assert log.poll(0) == []
    assert log.handle.asked == at_first
    log._reader.on_error(KafkaError(KafkaError._TRANSPORT))
    assert log.poll(0) == []
    assert log.handle.asked == at_first + 1


def test_a_poll_returns_too_few_entries_to_start_the_garbage_collector(log):
    """Each entry makes two objects; a collection would visit the whole state."""
    count = 3 * MESSAGES_AT_ONCE
    messages = [Message(0, offset) for offset in range(count)]
    log.handle.queue = [*messages]
    taken, newest = [], []
    gc.disable()
    try:
        while len(taken) < count:
            gc.collect()
            polled = log.poll(0)
            newest.append(gc.get_count()[0])
            assert len(polled) == MESSAGES_AT_ONCE
            taken += polled
    finally:
        gc.enable()
    assert [entry.offset for _, entry in taken] == list(range(count))
    assert min(newest) >= MESSAGES_AT_ONCE
    # The client of Kafka makes as many messages during the poll; here they exist.
    assert max(newest) + MESSAGES_AT_ONCE < PYTHONS_NEWEST_MAX


def test_the_position_skips_control_records_up_to_the_known_end(log):
    log.handle.ends = {0: 3, 1: 0}
    log.handle.queue = [
        Message(0, 0),
        Message(0, 2, error=KafkaError._PARTITION_EOF),
        Message(1, 0, error=KafkaError._PARTITION_EOF),
    ]
    assert [entry.offset for _, entry in log.poll(0)] == [0]
    assert log.positions() == {0: 1, 1: 0}
    assert log.end_offsets(1_000) == {0: 3, 1: 0}
    assert log.positions() == {0: 2, 1: 0}


def test_metadata_is_refreshed_after_a_failed_query(log):
    """Without a refresh, librdkafka would report the partition as unknown for ever."""
    log.handle.ends = {0: 3, 1: 0}
    log.handle.knows = False
    assert log.end_offsets(1_000) == {0: 3, 1: 0}


def test_a_query_of_an_unknown_partition_raises_at_its_deadline(log, monkeypatch):
    monkeypatch.setattr(log.handle, "list_topics", lambda topic, timeout: None)
    log.handle.knows = False
    with pytest.raises(CoordinationError, match="does not exist"):
        log.end_offsets(200)


def test_the_query_handle_is_closed_after_its_last_query(log, monkeypatch):
    """Any thread may query while another one closes the log."""
    is_asked, may_answer = threading.Event(), threading.Event()
    closed, found = [], []
    monkeypatch.setattr(
        "kafka_marshal.kafka_io.fast.coordination.close_consumer", closed.append
    )
    answer = log.handle.offsets_for_times

    def slowly(places, timeout):
        is_asked.set()
        assert may_answer.wait(WAIT_S)
        return answer(places, timeout)

    monkeypatch.setattr(log.handle, "offsets_for_times", slowly)
    query = threading.Thread(target=lambda: found.append(log.end_offsets(9_000)))
    query.start()
    assert is_asked.wait(WAIT_S)
    log.close(0)
    with pytest.raises(InvalidTransition, match="closed"):
        log.end_offsets(9_000)
    assert log._querier not in closed
    may_answer.set()
    query.join(WAIT_S)
    assert found == [{0: 0, 1: 0}]
    until(lambda: closed == [log._reader, log._querier], "both are closed")


@pytest.fixture
def closed(monkeypatch):
    """Return the consumers that were closed."""
    found = []
    monkeypatch.setattr(module, "close_consumer", found.append)
    return found


def test_a_reader_with_new_limits_continues_at_the_same_positions(log, closed):
    log.handle.queue = [Message(1, 4, epoch=3)]
    assert len(log.poll(0)) == 1
    first = log._reader
    log._limit_requests(2_000)
    log._limit_requests(2_000)
    assert log.limits == [10_000, 2_000]
    assert (log._reader, closed) == (first, []), "another thread may poll it"
    assert log.poll(0) == []
    assert log.handle.assigned[1:] == [{0: 0, 1: 5}]
    assert closed == [first]


def test_new_limits_are_set_again_after_a_failed_attempt(log, closed, monkeypatch):
    def refuse():
        raise ConfigurationError("the key does not belong to the certificate")

    with monkeypatch.context() as patch:
        patch.setattr(log, "_new_reader", refuse)
        with pytest.raises(ConfigurationError):
            log._limit_requests(2_000)
    log._limit_requests(2_000)
    assert log.limits == [10_000, 2_000]


def test_a_later_reader_replaces_one_not_used_yet(log, closed):
    log._limit_requests(2_000)
    unused = log._next_reader
    log._limit_requests(3_000)
    assert closed == [unused]
    last = log._next_reader
    assert log.poll(0) == []
    assert log._reader is last


def test_a_closed_log_opens_no_new_reader(log, closed):
    log._limit_requests(2_000)
    made = [log._reader, log._next_reader]
    log.close(1_000)
    log._limit_requests(3_000)
    log._use_next_reader()
    assert log.limits == [10_000, 2_000]
    until(lambda: closed == [*made, log._querier], "all are closed")


def test_a_reader_opened_during_a_close_is_closed(log, closed):
    asked = log.handle.list_topics
    log.handle.list_topics = lambda *args, **more: (
        log.close(1_000) or asked(*args, **more)
    )
    log._limit_requests(2_000)
    until(lambda: len(closed) == 3, "all are closed")
    assert log._next_reader is None


def outdate(client):
    """Renew the TLS files of a client, and make its connections fail."""
    client.files = SimpleNamespace(are_renewed=lambda: True)
    client.on_error(KafkaError(KafkaError._SSL, "certificate expired"))


def test_the_producer_reports_that_its_client_is_outdated(producer, client):
    assert not producer.is_outdated
    outdate(client)
    assert producer.is_outdated


def test_an_outdated_reader_is_replaced_at_the_same_positions(log, closed):
    log.handle.queue = [Message(1, 4, epoch=3)]
    assert len(log.poll(0)) == 1
    first = log._reader
    outdate(first)
    log.handle.queue = [Message(1, 5, epoch=3)]
    assert [entry.offset for _, entry in log.poll(0)] == [5]
    assert log.handle.assigned[1:] == [{0: 0, 1: 5}]
    assert log.poll(0) == []
    assert (log._reader is not first, closed) == (True, [first])


def test_an_outdated_querier_is_closed_after_its_last_query(log, closed, monkeypatch):
    is_asked, may_answer = threading.Event(), threading.Event()
    found, answer = [], log.handle.offsets_for_times

    def slowly(places, timeout):
        is_asked.set()
        assert may_answer.wait(WAIT_S)
        return answer(places, timeout)

    monkeypatch.setattr(log.handle, "offsets_for_times", slowly)
    query = threading.Thread(target=lambda: found.append(log.start_offsets(9_000)))
    query.start()
    assert is_asked.wait(WAIT_S)
    old = log._querier
    outdate(old)
    monkeypatch.setattr(log.handle, "offsets_for_times", answer)
    assert log.end_offsets(9_000) == {0: 0, 1: 0}
    assert (log._querier is not old, closed) == (True, [])
    may_answer.set()
    query.join(WAIT_S)
    assert (found, closed) == ([{0: 0, 1: 0}], [old])
    outdate(old := log._querier)
    log.end_offsets(9_000)
    assert closed[1:] == [old], "one without a query at once"


def test_outdated_clients_stay_while_the_renewed_files_are_invalid(
    log, closed, monkeypatch
):
    """Each further call tries to replace them again."""

    def refuse():
        raise ConfigurationError("the key does not belong to the certificate")

    clients = log._reader, log._querier
    for client in clients:
        outdate(client)
    with monkeypatch.context() as patch:
        patch.setattr(log, "_new_reader", refuse)
        patch.setattr(log, "_new_querier", refuse)
        assert log.poll(0) == []
        assert log.end_offsets(9_000) == {0: 0, 1: 0}
        assert (log._reader, log._querier) == clients
    assert log.poll(0) == []
    assert log.end_offsets(9_000) == {0: 0, 1: 0}
    assert closed == [*clients]


def test_a_smaller_log_end_does_not_replace_a_larger_one(log, monkeypatch):
    log.handle.ends = {0: 3, 1: 0}
    log.end_offsets(1_000)
    log.handle.ends = {0: 2, 1: 0}
    log.end_offsets(1_000)
    log.handle.queue = [Message(0, 0), Message(0, 3, error=KafkaError._PARTITION_EOF)]
    log.poll(0)
    assert log.positions() == {0: 3, 1: 0}


def test_a_missing_right_to_the_group_is_ignored(log):
    log.handle.queue = [
        Message(None, -1001, error=KafkaError.GROUP_AUTHORIZATION_FAILED),
        Message(0, 0),
    ]
    assert len(log.poll(0)) == 1


def test_entries_are_returned_before_errors_are_raised(log):
    log.handle.queue = [
        Message(0, 0),
        Message(1, -1001, error=KafkaError._TRANSPORT),
        Message(0, 1),
    ]
    assert [entry.offset for _, entry in log.poll(0)] == [0, 1]
    with pytest.raises(CoordinationError):
        log.poll(0)
    assert log.poll(0) == []


def test_a_first_read_below_the_log_start_begins_at_the_log_start(log):
    log.handle.starts = {0: 7, 1: 0}
    log.handle.queue = [Message(0, -1001, error=KafkaError._AUTO_OFFSET_RESET)]
    assert log.poll(0) == []
    assert log.poll(0) == []  # reads from the new log start
    assert log.handle.assigned[-1] == {0: 7, 1: 0}
    log.handle.queue = [Message(0, 7)]
    assert [entry.offset for _, entry in log.poll(0)] == [7]


@pytest.mark.parametrize(
    ("later", "kind"),
    [
        (Message(0, -1001, error=KafkaError._AUTO_OFFSET_RESET), LogTruncated),
        (Message(0, -1001, error=KafkaError._LOG_TRUNCATION), LogTruncated),
        (Message(0, 4), LogTruncated),
        (Message(0, 5, epoch=1), LogTruncated),
        (Message(0, 5, epoch=None), LogUnreadable),
        (Message(0, 0, error=KafkaError.TOPIC_AUTHORIZATION_FAILED), LogUnreadable),
    ],
)
def test_permanent_faults_are_raised_by_every_poll(log, later, kind):
    log.handle.starts = {0: 9, 1: 0}
    log.handle.queue = [Message(0, 4, epoch=2), later]
    with pytest.raises(kind):
        list(map(log.poll, (0, 0)))
    log.handle.queue = [Message(0, 9, epoch=2)]
    with pytest.raises(kind):
        log.poll(0)


def test_a_log_without_a_heartbeat_interval_refuses_appends(log):
    append = log.append(0, b"x")
    assert append.is_done()
    assert isinstance(append.error(), InvalidTransition)


def test_queries_are_retried_until_their_deadline(log, monkeypatch):
    faults = [KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION))]
    ask = log.handle.offsets_for_times

    def answer(places, timeout):
        if faults:
            raise faults.pop()
        return ask(places, timeout)

    monkeypatch.setattr(log.handle, "offsets_for_times", answer)
    assert log.start_offsets(10_000) == {0: 0, 1: 0}
    monkeypatch.setattr(
        log._querier, "refusal", KafkaException(KafkaError(KafkaError._AUTHENTICATION))
    )
    faults += [KafkaException(KafkaError(KafkaError._TIMED_OUT))] * 1_000
    with pytest.raises(CoordinationError, match="no broker answered"):
        log.end_offsets(60)


def test_seeks_before_a_poll_assign_once(log):
    log.read_from({0: 5})
    log.read_from({0: 9, 1: 2})
    assert len(log.handle.assigned) == 1
    log.poll(0)
    assert log.handle.assigned[1:] == [{0: 9, 1: 2}]


# --- a backlog, over kafka-python


class Bulk:
    """A fake of the reader over kafka-python; the test fills ``runs``."""

    made: ClassVar[list] = []

    def __init__(self, settings, *, fetch_wait_ms, timeout_ms):
        assert fetch_wait_ms > 0
        assert timeout_ms > 0
        self.at = {}
        self.runs = []
        self.fault = None
        self.closed = threading.Event()
        Bulk.made.append(self)

    def seek(self, partitions, offsets):
        assert set(offsets) <= set(partitions)
        self.at |= offsets

    def poll(self, timeout_ms):
        if self.fault is not None:
            raise self.fault
        return self.runs.pop(0) if self.runs else []

    def position(self, partition):
        if self.fault is not None:
            raise self.fault
        return self.at[partition]

    def close(self):
        self.closed.set()


def entry(offset, *, epoch=0):
    return LogEntry(
        offset=offset,
        leader_epoch=epoch,
        timestamp_ms=1,
        timestamp_type=1,
        value=b"%d" % offset,
    )


@pytest.fixture
def behind(log, monkeypatch):
    """Return a log with a backlog, to be read from offset 0."""
    Bulk.made = []
    monkeypatch.setattr("kafka_marshal.kafka_io.entries.EntryReader", Bulk)
    monkeypatch.setattr(
        "kafka_marshal.kafka_io.fast.switching.can_switch", lambda _: True
    )
    log.handle.ends = {0: BACKLOG, 1: 2}
    assert log.end_offsets(1_000) == {0: BACKLOG, 1: 2}
    log.read_from({0: 0, 1: 0})
    return log


def test_kafka_python_reads_the_backlog_and_librdkafka_the_rest(behind):
    assigned = len(behind.handle.assigned)
    assert behind.poll_runs(0) == []
    (bulk,) = Bulk.made
    assert bulk.at == {0: 0, 1: 0}
    both = [(0, [entry(at) for at in range(9)]), (1, [entry(0), entry(1)])]
    bulk.runs = [both]
    assert behind.poll_runs(0) == both
    assert behind.positions() == {0: 9, 1: 2}
    behind.read_from({0: BACKLOG - 1})
    assert bulk.at == {0: BACKLOG - 1, 1: 0}
    bulk.runs = [[(0, [entry(BACKLOG - 1)])]]
    assert [each.offset for _, each in behind.poll(0)] == [BACKLOG - 1]
    assert len(behind.handle.assigned) == assigned
    behind.handle.queue = [Message(0, BACKLOG)]
    assert [each.offset for _, each in behind.poll(0)] == [BACKLOG]
    assert behind.handle.assigned[assigned:] == [{0: BACKLOG, 1: 2}]
    assert bulk.closed.wait(WAIT_S)


@needs_native
def test_skim_returns_matching_entries_and_the_last_of_a_run(behind):
    assert behind.skim(0, head=b"7") == []
    run = packed([entry(at) for at in range(9)])
    Bulk.made[0].runs = [[(0, run)]]
    found = behind.skim(0, head=b"7")
    assert found == [(0, entry(7)), (0, entry(8))]
    assert behind.positions()[0] == 9


def test_librdkafka_takes_over_a_backlog_ending_in_control_records(behind):
    assert behind.poll_runs(0) == []
    bulk = Bulk.made[0]
    behind.end_offsets(1_000)
    bulk.at = {0: BACKLOG, 1: 2}
    assert behind.positions() == {0: BACKLOG, 1: 2}
    assert behind.poll_runs(0) == []
    assert bulk.closed.wait(WAIT_S)
    assert behind.handle.assigned[-1] == {0: BACKLOG, 1: 2}


@pytest.mark.parametrize("reason", ["fault", "silence"])
def test_librdkafka_takes_over_if_kafka_python_fails_or_is_silent(
    behind, monkeypatch, reason
):
    assert behind.poll_runs(0) == []
    bulk = Bulk.made[0]
    if reason == "fault":
        bulk.fault = ValueError("whatever it is")
    else:
        monkeypatch.setattr(module, "_BULK_SILENT_S", 0.0)
    behind.end_offsets(1_000)
    if reason == "fault":
        assert behind.positions() == {0: 0, 1: 0}
    behind.handle.queue = [Message(0, 0)]
    assert [each.offset for _, each in behind.poll(0)] == [0]
    assert bulk.closed.wait(WAIT_S)
    behind.read_from({0: 0})
    assert behind.poll_runs(0) == []
    assert len(Bulk.made) == 1, "it is not tried again"


@pytest.mark.parametrize("reason", ["settings", "connection", "short"])
def test_librdkafka_reads_if_kafka_python_cannot_or_need_not(
    behind, monkeypatch, reason
):
    def refuse(*_, **__):
        raise CoordinationError("no broker answered")

    if reason == "settings":
        monkeypatch.setattr(
            "kafka_marshal.kafka_io.fast.switching.can_switch", lambda _: False
        )
    elif reason == "connection":
        monkeypatch.setattr("kafka_marshal.kafka_io.entries.EntryReader", refuse)
    else:
        behind.read_from({0: 3})
    behind.handle.queue = [Message(0, 3)]
    assert [each.offset for _, each in behind.poll(0)] == [3]
    assert not Bulk.made


@needs_native
def test_a_packed_run_below_the_position_raises_log_truncated(behind):
    behind.poll_runs(0)
    Bulk.made[0].runs = [
        [(0, packed([entry(4)])), (1, packed([entry(0), entry(1)]))],
        [(0, packed([entry(4), entry(5)])), (1, packed([entry(7)]))],
    ]
    assert [(t, [each.offset for each in run]) for t, run in behind.poll_runs(0)] == [
        (0, [4]),
        (1, [0, 1]),
    ]
    assert [(t, [each.offset for each in run]) for t, run in behind.poll_runs(0)] == [
        (1, [7])
    ]
    with pytest.raises(LogTruncated, match="offset 4 of leader epoch 0"):
        behind.poll_runs(0)
