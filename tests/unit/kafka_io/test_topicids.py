"""Requests of kafka-python that name topics by id, and what is answered to them."""

import uuid
from types import SimpleNamespace

import pytest
from kafka.protocol.consumer import FetchRequest, FetchResponse

from kafka_marshal.errors import ConfigurationError, UnknownTopicId
from kafka_marshal.kafka_io.topicids import FETCH_VERSION, TopicIds, fetch_by_id
from kafka_marshal.protocol.types import TopicPartition

A, B, C = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)
OLD, NEW, OTHER = (uuid.UUID(int=number) for number in (1, 2, 3))
UNKNOWN_TOPIC_ID, INCONSISTENT_TOPIC_ID = 100, 103


class Fetcher:
    """kafka-python's fetcher, as far as it is used."""

    def __init__(self):
        self.taken = []
        self.wanted = [A, B]
        self.forgotten = []

    def _create_fetch_requests(self):
        topics = {}
        for name, number in self.wanted:
            part = FetchRequest.FetchTopic.FetchPartition(
                partition=number, fetch_offset=7, partition_max_bytes=1
            )
            topics.setdefault(name, []).append(part)
        request = FetchRequest(
            topics=[
                FetchRequest.FetchTopic(topic=name, partitions=parts)
                for name, parts in topics.items()
            ],
            forgotten_topics_data=[
                FetchRequest.ForgottenTopic(topic=name, partitions=[number])
                for name, number in self.forgotten
            ],
            min_version=4,
            max_version=12,
        )
        return {1: (request, {})}

    def _handle_fetch_response(self, node, offsets, sent, response):
        self.taken.append(response)


class Known:
    """What the cluster says the ids are."""

    def topic_id(self, name):
        return {"u": OTHER}.get(name)


@pytest.fixture
def ids():
    return TopicIds()


@pytest.fixture
def fetcher(ids):
    made = Fetcher()
    fetch_by_id(SimpleNamespace(_fetcher=made, _cluster=Known()), ids)
    return made


def asked(fetcher):
    ((request, _),) = fetcher._create_fetch_requests().values()
    return request


def named(topics):
    return [
        (topic.topic, topic.topic_id, [getattr(p, "partition", p) for p in each])
        for topic in topics
        for each in [topic.partitions]
    ]


def answer(version, *topics):
    """Return a response; each topic is name or id, partition and error."""
    kind = FetchResponse.FetchableTopicResponse
    found = []
    for name, number, code in topics:
        part = kind.PartitionData(partition_index=number, error_code=code)
        how = {"topic": name} if isinstance(name, str) else {"topic_id": name}
        found.append(kind(partitions=[part], **how))
    return SimpleNamespace(API_VERSION=version, responses=found)


def test_without_ids_requests_stay_as_they_are(ids, fetcher):
    ids.want(A, None)
    request = asked(fetcher)
    assert request._max_version == 12
    assert named(request.topics) == [("t", None, [0, 1])]


def test_partitions_are_asked_for_by_the_id_of_their_claim(ids, fetcher):
    fetcher.wanted = [A, B, C]
    fetcher.forgotten = [TopicPartition("u", 4)]
    ids.want(A, OLD.bytes)
    ids.want(B, NEW.bytes)
    request = asked(fetcher)
    assert request._max_version == FETCH_VERSION
    # Of what has no id of its own, the cluster says it.
    assert named(request.topics) == [
        ("t", OLD, [0]),
        ("t", NEW, [1]),
        ("u", OTHER, [0]),
    ]
    assert named(request.forgotten_topics_data) == [("u", OTHER, [4])]


def test_answers_get_the_names_that_were_asked_for(ids, fetcher):
    ids.want(A, OLD.bytes)
    ids.want(B, NEW.bytes)
    asked(fetcher)
    # Later requests of a session leave out what has not changed.
    fetcher.wanted = []
    asked(fetcher)
    response = answer(FETCH_VERSION, (OLD, 0, 0), (NEW, 1, 0), (OTHER, 9, 0))
    fetcher._handle_fetch_response(1, {}, 0, response)
    assert [topic.topic for topic in fetcher.taken[0].responses] == ["t", "t", ""]
    ids.raise_refused([A, B])


@pytest.mark.parametrize("code", [UNKNOWN_TOPIC_ID, INCONSISTENT_TOPIC_ID])
def test_a_partition_without_a_topic_of_its_id_is_reported_once(ids, fetcher, code):
    ids.want(A, OLD.bytes)
    asked(fetcher)
    for _ in range(2):
        response = answer(FETCH_VERSION, (OLD, 0, code))
        fetcher._handle_fetch_response(1, {}, 0, response)
        ids.raise_refused([B])
        fetcher._handle_fetch_response(1, {}, 0, response)
        with pytest.raises(UnknownTopicId) as caught:
            ids.raise_refused([A, B])
        assert caught.value.partition == A
        assert caught.value.retriable
        ids.raise_refused([A, B])
    fetcher._handle_fetch_response(1, {}, 0, answer(FETCH_VERSION, (OLD, 0, code)))
    fetcher._handle_fetch_response(1, {}, 0, answer(FETCH_VERSION, (OLD, 0, 0)))
    ids.raise_refused([A, B])


def test_brokers_that_know_no_ids_in_fetches_are_answered_by_name(ids, fetcher):
    ids.want(A, OLD.bytes)
    asked(fetcher)
    fetcher._handle_fetch_response(1, {}, 0, answer(12, ("t", 0, 0)))
    assert [topic.topic for topic in fetcher.taken[0].responses] == ["t"]


def test_another_id_of_a_partition_is_told(ids):
    assert not ids.want(A, None)
    assert not ids.want(A, OLD.bytes)
    assert not ids.want(A, OLD.bytes)
    assert ids.want(A, NEW.bytes)
    assert ids.want(A, None)
    assert ids.wanted == {}


def test_a_kafka_python_of_another_make_is_refused(ids):
    with pytest.raises(ConfigurationError, match=r"kafka-python 3\.0"):
        fetch_by_id(SimpleNamespace(_fetcher=object(), _cluster=Known()), ids)
