"""Log ends over librdkafka, of all partitions that can be queried."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafka_marshal.errors import CoordinationError
from kafka_marshal.kafka_io.fast import topics as module
from kafka_marshal.kafka_io.fast.clients import Client
from kafka_marshal.kafka_io.fast.topics import FastOffsets
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.protocol.types import TopicPartition

A, B, GONE = (TopicPartition(*each) for each in (("t", 0), ("t", 1), ("gone", 0)))


def failure(name):
    return KafkaException(KafkaError(getattr(KafkaError, name)))


def ended(result):
    future = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    elif result is not None:
        future.set_result(result)
    return future


class Handle:
    """A fake admin client.

    ``topics`` has the leaders of partitions, or an error, by topic; ``ends`` has the
    log end, or an error, by partition.
    """

    def __init__(self, topics, ends):
        self.topics, self.ends = topics, ends
        self.asked = []
        self.polls = 0

    def poll(self, timeout):
        assert timeout == 0
        self.polls += 1

    def describe_topics(self, names, request_timeout):
        assert request_timeout > 0
        return {
            name: ended(
                SimpleNamespace(
                    partitions=[
                        SimpleNamespace(id=n, leader=leader)
                        for n, leader in enumerate(self.topics[name])
                    ]
                )
                if isinstance(self.topics[name], list)
                else self.topics[name]
            )
            for name in names.topic_names
        }

    def list_offsets(self, places, request_timeout):
        assert request_timeout > 0
        self.asked.append(sorted((p.topic, p.partition) for p in places))
        return {
            place: ended(self.ends[place.topic, place.partition]) for place in places
        }


@pytest.fixture
def over(monkeypatch):
    """Return a function that makes queries over a handle with these topics and ends."""

    def make(topics, ends):
        handle = Handle(topics, ends)
        made = []

        def new_admin(_):
            made.append(Client(handle=handle))
            return made[-1]

        monkeypatch.setattr(module, "new_admin", new_admin)
        return FastOffsets(ConnectionConfig("a:1")), handle, made

    return make


def row(offset):
    return SimpleNamespace(offset=offset)


def test_only_partitions_with_a_leader_are_queried(over):
    topics = {"t": ["leader", None], "gone": failure("UNKNOWN_TOPIC_OR_PART")}
    offsets, handle, made = over(topics, {A: row(3)})
    assert offsets.known_ends([A, B, GONE], 60_000) == {A: 3}
    assert handle.asked == [[A]]
    assert offsets.known_ends([GONE], 60_000) == offsets.known_ends([], 60_000) == {}
    assert (len(handle.asked), len(made)) == (1, 1)


def test_a_partition_without_read_access_has_no_known_end(over):
    denied = failure("TOPIC_AUTHORIZATION_FAILED")
    offsets, _, _ = over({"t": ["leader", "leader"]}, {A: row(3), B: denied})
    assert offsets.known_ends([A, B], 60_000) == {A: 3}


@pytest.mark.parametrize("error", [failure("_TIMED_OUT"), ValueError("x"), None])
def test_a_failed_or_unanswered_query_raises(over, error):
    offsets, handle, _ = over({"t": ["leader"]}, {A: error})
    with pytest.raises(CoordinationError, match="Querying log ends failed"):
        offsets.known_ends([A], 60_000 if error else 1)
    assert handle.polls == 1, "errors of connections are reported to a poll"


def test_a_query_after_a_close_opens_another_client(over):
    offsets, _, made = over({"t": ["leader"]}, {A: row(3)})
    offsets.close(1)
    assert offsets.known_ends([A], 60_000) == {A: 3}
    offsets.close(1)
    offsets.close(1)
    assert offsets.known_ends([A], 60_000) == {A: 3}
    assert len(made) == 2


def test_an_outdated_client_is_replaced(over, monkeypatch):
    offsets, _, made = over({"t": ["leader"]}, {A: row(3)})
    offsets.known_ends([A], 60_000)
    closed = []
    monkeypatch.setattr(module, "close_admin", lambda client, _: closed.append(client))
    made[0].files = SimpleNamespace(are_renewed=lambda: True)
    made[0].on_error(KafkaError(KafkaError._SSL, "certificate expired"))
    assert offsets.known_ends([A], 60_000) == {A: 3}
    assert offsets.known_ends([A], 60_000) == {A: 3}
    assert (len(made), closed) == (2, [made[0]])
