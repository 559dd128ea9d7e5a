"""Transactions over librdkafka: their steps, deadlines and errors."""

import threading
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafka_marshal import deadline
from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    LogUnwritable,
)
from kafka_marshal.kafka_io.fast import transactions
from kafka_marshal.kafka_io.fast.clients import Client
from kafka_marshal.kafka_io.fast.transactions import Outgoing, Transactions
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.protocol.types import TopicPartition

T0 = TopicPartition("t", 0)


class Handle:
    """A scripted producer and consumer that record their calls."""

    def __init__(self):
        self.did = []
        self.clients = []
        self.configs = []
        self.consumer_configs = []
        self.partitions = []
        self.fails = {}
        self.offset = -1001
        self.metadata = ""
        # Errors of the next metadata requests; None if the topic is found.
        self.errors = []
        # Called by each poll.
        self.report = lambda: None

    def _do(self, name):
        self.did.append(name)
        if name in self.fails:
            raise self.fails[name]

    def init_transactions(self, timeout_s):
        self._do("init")

    def list_topics(self, topic, *, timeout):
        self._do("find")
        error = self.errors.pop(0) if self.errors else None
        return SimpleNamespace(topics={topic: SimpleNamespace(error=error)})

    def begin_transaction(self):
        self._do("begin")

    def produce(self, topic, *, value, key, headers, partition):
        self.partitions.append(partition)
        self._do("produce")

    def poll(self, timeout_s):
        self._do("poll")
        self.report()

    def send_offsets_to_transaction(self, places, group, timeout_s):
        self._do("offsets")
        self.metadata = places[0].metadata

    def commit_transaction(self, timeout_s):
        self._do("commit")

    def abort_transaction(self, timeout_s):
        self._do("abort")

    def committed(self, places, *, timeout):
        self._do("committed")
        found = SimpleNamespace(error=None, offset=self.offset, metadata=self.metadata)
        return [found]

    def consumer_group_metadata(self):
        return "metadata"


@pytest.fixture
def handle(monkeypatch):
    found = Handle()

    def release(client):
        client.handle = None
        found.did.append("forget")

    monkeypatch.setattr(Client, "release", release)

    def new_producer(_, config):
        found.configs.append(config)
        found.clients.append(Client(handle=found))
        return found.clients[-1]

    monkeypatch.setattr(transactions, "new_producer", new_producer)

    def new_consumer(_, config):
        found.consumer_configs.append(config)
        return Client(handle=found)

    monkeypatch.setattr(transactions, "new_consumer", new_consumer)
    monkeypatch.setattr(transactions, "close_consumer", lambda _: None)
    return found


def begun(timeout_ms=1_000):
    settings = ConnectionConfig("localhost:1")
    return Transactions(settings, "an id", group_id="g", timeout_ms=timeout_ms)


def translated(code):
    return KafkaException(KafkaError(code))


def write(some, **rest):
    records = [Outgoing("out", None, b"1"), Outgoing("out", b"k", b"2")]
    some.write(records, partition=T0, position=2, **rest)


def test_records_and_position_are_written_in_one_transaction(handle):
    with begun() as some:
        assert some.position(T0) is None
        handle.offset = 7
        assert some.position(T0) == 7
        handle.did.clear()
        write(some)
        write(some)
    steps = [step for step in handle.did if step != "poll"]
    transaction = ["begin", "produce", "produce", "offsets", "commit"]
    assert steps == ["find", *transaction, *transaction, "forget"]


def test_nothing_is_written_to_the_coordination_topic(handle):
    with begun() as some:
        handle.did.clear()
        records = [Outgoing("out", None, b"1"), Outgoing("__marshal", None, b"2")]
        with pytest.raises(ConfigurationError, match="'__marshal' is the coordination"):
            some.write(records, partition=T0, position=2)
        assert handle.did == []


def test_the_partitioner_is_that_of_the_java_client(handle):
    with begun():
        assert handle.configs[0]["partitioner"] == "murmur2_random"


def test_a_write_waits_for_a_topic_just_created(handle, monkeypatch):
    monkeypatch.setattr(transactions.time, "sleep", lambda _: None)
    handle.errors = [KafkaError(code) for code in transactions._ABSENT]
    with begun() as some:
        write(some)
    assert handle.did.count("find") == 3


def test_a_write_to_an_absent_topic_names_the_topic(handle):
    handle.errors = [KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)] * 10
    with (
        begun(timeout_ms=1) as some,
        pytest.raises(CoordinationError, match=r"Writing to out .* does not exist"),
    ):
        write(some)
    assert "begin" not in handle.did


def test_a_topic_without_authorization_is_not_retried(handle):
    handle.errors = [KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)]
    with begun() as some, pytest.raises(CoordinationError):
        write(some)
    assert handle.did.count("find") == 1


def test_the_position_is_read_with_read_committed_isolation(handle):
    begun().close()
    (config,) = handle.consumer_configs
    assert config == {"group.id": "g", "isolation.level": "read_committed"}


def test_progress_returns_the_position_and_its_metadata(handle):
    with begun() as some:
        assert some.progress(T0, timeout_ms=1_000) is None
        handle.offset = 7
        assert some.progress(T0, timeout_ms=1_000) == (7, "")
        write(some, metadata="mark")
        assert some.progress(T0, timeout_ms=1_000) == (7, "mark")


def test_a_position_with_unreadable_metadata_of_another_tool_is_ignored(
    handle, monkeypatch
):
    """confluent-kafka reads beyond the end of metadata that it did not write."""

    def committed(*_, **__):
        return b"\x82".decode()

    monkeypatch.setattr(handle, "committed", committed)
    with begun() as some:
        assert some.progress(T0, timeout_ms=1_000) is None
        assert some.position(T0, topic_id="aa") is None


def test_a_record_may_name_its_partition(handle):
    records = [Outgoing("out", b"k", b"v"), Outgoing("out", b"k", b"v", partition=0)]
    with begun() as some:
        some.write(records, partition=T0, position=2)
    assert handle.partitions == [-1, 0]


def test_a_write_error_names_every_target_topic(handle):
    handle.fails["commit"] = translated(KafkaError.MSG_SIZE_TOO_LARGE)
    records = [Outgoing("one", None, b""), Outgoing("two", None, b"")]
    with begun() as some, pytest.raises(LogUnwritable, match="Writing to one, two as"):
        some.write(records, partition=T0, position=2)


def test_a_position_stored_for_another_topic_id_is_ignored(handle):
    handle.offset = 7
    with begun() as some:
        assert some.position(T0, topic_id="aa") == 7, "an earlier version kept no id"
        write(some, metadata="aa")
        assert some.position(T0, topic_id="aa") == some.position(T0) == 7
        assert some.position(T0, topic_id="bb") is None


@pytest.mark.parametrize("code", transactions._FENCED)
@pytest.mark.parametrize("step", ["produce", "offsets", "commit"])
def test_a_later_producer_fences_this_one(handle, step, code):
    with begun() as some:
        handle.fails[step] = translated(code)
        with pytest.raises(ClaimLost, match="a later producer") as lost:
            write(some)
        assert lost.value.reason == "fenced"


def test_an_absent_source_topic_is_named_instead_of_the_target(handle):
    handle.fails["offsets"] = translated(KafkaError.UNKNOWN_TOPIC_OR_PART)
    with begun() as some, pytest.raises(CoordinationError) as refused:
        write(some)
    assert "Adding the position of t-0" in str(refused.value)
    assert "out" not in str(refused.value)


@pytest.mark.parametrize("step", ["produce", "commit"])
def test_a_bare_kafka_error_is_translated(handle, step):
    handle.fails[step] = KafkaError(KafkaError._FENCED)
    with begun() as some, pytest.raises(ClaimLost, match="a later producer"):
        write(some)


@pytest.mark.parametrize("code", transactions._REFUSED)
def test_a_refused_record_names_the_target_topic_and_its_size_limit(handle, code):
    """The advice about the coordination topic, marshal doctor, would not help."""
    handle.fails["commit"] = translated(code)
    with begun() as some, pytest.raises(LogUnwritable) as refused:
        write(some)
    assert "Writing to out" in str(refused.value)
    assert "max.message.bytes of the topic" in str(refused.value)
    assert "doctor" not in str(refused.value)


def test_the_producer_allows_records_of_almost_any_size(handle):
    begun().close()
    (config,) = handle.configs
    assert config["message.max.bytes"] == 1_000_000_000


def test_the_cause_of_a_fatal_error_is_polled(handle):
    """After a fatal error in the background, calls report only that there was one."""
    handle.fails = {"produce": translated(KafkaError._FATAL)}
    handle.fails["poll"] = translated(KafkaError._FENCED)
    with begun() as some, pytest.raises(ClaimLost, match="a later producer"):
        write(some)
    del handle.fails["poll"]
    with begun() as some, pytest.raises(CoordinationError, match="_FATAL"):
        write(some)


EXPIRED = KafkaError(
    KafkaError._SSL, "ssl/tls alert certificate expired: SSL alert number 45"
)


def test_a_timeout_names_the_connection_error(handle):
    """Without it, an expired certificate looks like a broker that does not answer."""
    handle.fails["offsets"] = translated(KafkaError._TIMED_OUT)
    with begun() as some:
        handle.report = lambda: some._producer.on_error(EXPIRED)
        with pytest.raises(CoordinationError, match="certificate of this client"):
            write(some)


def test_a_connection_error_before_the_transaction_is_not_its_cause(handle):
    with begun() as some:
        some._producer.on_error(EXPIRED)
        write(some)
        handle.fails["offsets"] = translated(KafkaError._TIMED_OUT)
        with pytest.raises(CoordinationError, match="no broker answered"):
            write(some)


def test_a_timeout_names_a_refused_connection(handle):
    refused = KafkaError(KafkaError._TRANSPORT, "b:1/bootstrap: Connection refused")
    handle.fails["commit"] = translated(KafkaError._TIMED_OUT)
    with begun() as some:
        handle.report = lambda: some._producer.on_error(refused)
        with pytest.raises(CoordinationError, match="Connection refused"):
            write(some)


def test_renewed_tls_files_outdate_a_producer_that_cannot_connect(handle):
    with begun() as some:
        some._producer.files = SimpleNamespace(are_renewed=lambda: True)
        assert not some.is_outdated
        handle.report = lambda: some._producer.on_error(EXPIRED)
        assert some.is_outdated


def test_close_aborts_an_open_transaction(handle):
    handle.fails["commit"] = translated(KafkaError._TIMED_OUT)
    with pytest.raises(CoordinationError), begun() as some:
        write(some)
    assert handle.did[-2:] == ["abort", "forget"]


@pytest.mark.usefixtures("handle")
def test_close_destroys_the_handle_on_another_thread(monkeypatch):
    threads = []

    def release(_):
        threads.append(threading.current_thread())

    monkeypatch.setattr(Client, "release", release)
    begun().close()
    (thread,) = threads
    assert thread is not threading.current_thread()


def test_an_interrupted_abort_still_releases_the_producer(handle):
    handle.fails["commit"] = translated(KafkaError._TIMED_OUT)
    handle.fails["abort"] = KeyboardInterrupt()
    some = begun()
    with pytest.raises(CoordinationError):
        write(some)
    with pytest.raises(KeyboardInterrupt):
        some.close()
    assert handle.did[-2:] == ["abort", "forget"]
    some.close()
    assert handle.did.count("abort") == 1


def test_all_steps_of_a_transaction_share_one_deadline(handle, monkeypatch):
    """Each step takes 6 of 20 seconds; the abort at the end gets one second."""
    now_s, given_s = [100.0], []

    def step(timeout_s):
        given_s.append(timeout_s)
        now_s[0] += 6

    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(deadline, "time", clock)
    find, fail = handle.list_topics, translated(KafkaError._TIMED_OUT)
    handle.fails["commit"] = fail
    handle.list_topics = lambda topic, timeout: (step(timeout), find(topic, timeout=1))[
        1
    ]
    handle.send_offsets_to_transaction = lambda _, __, timeout_s: step(timeout_s)
    handle.abort_transaction = given_s.append
    commit = handle.commit_transaction
    handle.commit_transaction = lambda timeout_s: (step(timeout_s), commit(timeout_s))
    with pytest.raises(CoordinationError), begun(timeout_ms=20_000) as some:
        write(some)
    assert given_s == [20.0, 14.0, 8.0, 1.0]


def test_a_failed_open_releases_the_producer(handle):
    handle.fails["init"] = translated(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    with pytest.raises(CoordinationError):
        begun()
    assert handle.did == ["init", "forget"]


def test_a_failed_open_names_the_connection_error(handle):
    handle.fails["init"] = translated(KafkaError._TIMED_OUT)
    handle.report = lambda: handle.clients[0].on_error(EXPIRED)
    with pytest.raises(CoordinationError, match="certificate of this client"):
        begun()
    assert handle.did[-1] == "forget"


@pytest.mark.parametrize(
    ("code", "right"),
    [
        (KafkaError.GROUP_AUTHORIZATION_FAILED, "READ on group g;"),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "WRITE on transactional id"),
    ],
)
def test_a_refused_position_names_the_missing_right(handle, code, right):
    with begun() as some:
        handle.fails["offsets"] = translated(code)
        with pytest.raises(LogUnwritable, match=right):
            write(some)


def test_a_failed_position_query_raises(handle):
    with begun() as some:
        handle.fails["committed"] = translated(KafkaError._TIMED_OUT)
        with pytest.raises(CoordinationError):
            some.position(T0)


def test_a_full_producer_queue_raises_at_the_deadline(handle):
    handle.fails["produce"] = BufferError()
    with pytest.raises(DeadlineExceeded), begun(timeout_ms=0) as some:
        write(some)
