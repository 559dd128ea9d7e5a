"""The coordination topic as confluent-kafka describes it; refusals and deadlines."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, Uuid

from kafka_marshal.errors import CoordinationError, LogUnreadable, TopicMisconfigured
from kafka_marshal.kafka_io.fast import topics as module
from kafka_marshal.kafka_io.fast.clients import Client
from kafka_marshal.kafka_io.fast.topics import describe_log, described
from kafka_marshal.kafka_io.settings import ConnectionConfig

SETTINGS = ConnectionConfig("a:1")
TOPIC = SETTINGS.coordination_topic
HOURS_MS = 3_600_000


def node(number):
    return SimpleNamespace(id=number)


def partition(number, leader, isr):
    return SimpleNamespace(
        id=number, leader=leader, replicas=[node(1), node(2)], isr=[*map(node, isr)]
    )


def topic(**changes):
    whole = {
        "name": TOPIC,
        "partitions": [partition(0, node(1), (1, 2)), partition(1, None, (2,))],
        "topic_id": Uuid(-1, 5),
    }
    return SimpleNamespace(**whole | changes)


def failure(name, text="why"):
    return KafkaException(KafkaError(getattr(KafkaError, name), text))


def ended(result):
    future = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


class Handle:
    """Answers each attempt with the next row of results; None stands for no answer."""

    def __init__(self, *rows):
        self.rows = list(rows)
        self.attempts = 0
        self.on_poll = lambda: None

    def _future(self, place):
        result = self.rows[min(self.attempts, len(self.rows)) - 1][place]
        return Future() if result is None else ended(result)

    def describe_cluster(self, request_timeout):
        assert 0 < request_timeout <= 5
        self.attempts += 1
        return self._future(0)

    def describe_topics(self, names, request_timeout):
        return {TOPIC: self._future(1)}

    def describe_configs(self, resources, request_timeout):
        return {resources[0]: self._future(2)}

    def poll(self, timeout):
        assert timeout == 0
        self.on_poll()


CLUSTER = SimpleNamespace(cluster_id="c")
CONFIGS = {
    "retention.ms": SimpleNamespace(value="-1"),
    "segment.ms": SimpleNamespace(value="1"),
}


@pytest.fixture
def describe(monkeypatch):
    """Return a function that describes by rows of results.

    It returns the handle, which counts attempts, and the description.
    """
    monkeypatch.setattr(module, "_RETRY_S", 0.001)
    monkeypatch.setattr(module, "_CHECK_S", 0.001)
    monkeypatch.setattr(module, "_ATTEMPT_S", 0.001)
    monkeypatch.setattr(module, "_REFUSED_RETRY_MS", 20)

    def run(*rows, timeout_ms=HOURS_MS, reports=()):
        handle = Handle(*rows)
        client = Client(handle=handle)
        handle.on_poll = lambda: [client.on_error(each) for each in reports]
        monkeypatch.setattr(module, "new_admin", lambda _: client)
        return handle, describe_log(SETTINGS, timeout_ms=timeout_ms)

    return run


def test_a_described_topic_has_its_partitions_and_settings():
    found = described(topic(), {"retention.ms": "-1"})
    assert (found.name, found.exists, found.partition_count) == (TOPIC, True, 2)
    assert (found.replication, found.in_sync, found.behind) == (2, 1, (1,))
    assert found.leaders == {0: 1, 1: -1}
    assert found.leaderless == (1,)
    assert found.configs == {"retention.ms": "-1"}
    assert found.topic_id == b"\xff" * 8 + b"\0" * 7 + b"\5"


@pytest.mark.parametrize("raw", [None, Uuid(0, 0)])
def test_a_missing_or_zero_topic_id_becomes_none(raw):
    assert described(topic(topic_id=raw), {}).topic_id is None


def test_only_the_checked_topic_settings_are_returned(describe):
    handle, (cluster_id, found) = describe((CLUSTER, topic(), CONFIGS))
    assert (cluster_id, found.partition_count) == ("c", 2)
    assert found.configs == {"retention.ms": "-1"}
    assert handle.attempts == 1


def test_a_missing_topic_is_no_error(describe):
    missing = failure("UNKNOWN_TOPIC_OR_PART")
    _, (cluster_id, found) = describe((CLUSTER, missing, missing))
    assert cluster_id == "c"
    assert not found.exists


def test_a_topic_whose_settings_are_denied_is_described_without_them(describe):
    denied = failure("TOPIC_AUTHORIZATION_FAILED")
    _, (_, found) = describe((CLUSTER, topic(), denied))
    assert found.exists
    assert found.configs == {}


def test_a_denied_description_names_the_missing_right(describe):
    denied = failure("TOPIC_AUTHORIZATION_FAILED")
    with pytest.raises(LogUnreadable, match=f"DESCRIBE on topic {TOPIC}"):
        describe((CLUSTER, denied, denied))


def test_a_permanent_error_is_not_retried(describe):
    with pytest.raises(TopicMisconfigured):
        describe((CLUSTER, failure("TOPIC_EXCEPTION"), CONFIGS))


def test_transient_errors_are_retried(describe):
    late, moved = failure("_TIMED_OUT"), failure("LEADER_NOT_AVAILABLE")
    handle, (_, found) = describe(
        (late, late, late), (CLUSTER, moved, CONFIGS), (CLUSTER, topic(), CONFIGS)
    )
    assert handle.attempts == 3
    assert found.exists


def test_a_description_past_its_deadline_names_the_connection_error(describe):
    down = KafkaError(KafkaError._TRANSPORT, "Connection refused")
    nobody = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")
    with pytest.raises(CoordinationError, match="no broker answered at a:1") as raised:
        describe((None, None, None), timeout_ms=20, reports=(down, nobody))
    assert "no answer within 20 ms; the last attempt ended with" in str(raised.value)
    assert "Connection refused" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("_AUTHENTICATION", "Authentication failed", "refused the login"),
        (
            "_AUTHENTICATION",
            f"x: {KafkaError(KafkaError.ILLEGAL_SASL_STATE).str()}: y",
            "does not use SASL",
        ),
        (
            "_SSL",
            "error:0A000086:SSL routines::certificate verify failed",
            "certificate of the broker is not trusted",
        ),
    ],
)
def test_a_refused_login_or_certificate_raises_before_the_deadline(
    describe, name, text, words
):
    refusal = KafkaError(getattr(KafkaError, name), text)
    with pytest.raises(CoordinationError, match=words):
        describe((None, None, None), reports=(refusal,))


def test_a_transient_refusal_does_not_end_the_description(describe, monkeypatch):
    """Such as a new password that some brokers do not know yet."""
    monkeypatch.setattr(module, "_REFUSED_RETRY_MS", HOURS_MS)
    late = failure("_TIMED_OUT")
    refusal = KafkaError(KafkaError._AUTHENTICATION, "not yet")
    cluster = Future()
    handle = Handle((late, late, late), (CLUSTER, topic(), CONFIGS))
    client = Client(handle=handle)
    monkeypatch.setattr(module, "new_admin", lambda _: client)
    monkeypatch.setattr(handle, "describe_cluster", lambda request_timeout: cluster)
    handle.attempts = 2

    def on_poll():
        client.on_error(refusal)
        if not cluster.done():
            cluster.set_result(CLUSTER)

    handle.on_poll = on_poll
    assert describe_log(SETTINGS, timeout_ms=HOURS_MS)[1].exists
