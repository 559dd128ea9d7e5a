"""Topics as kafka-python describes them."""

import uuid

import pytest
from kafka import errors as kafka_errors

from kafka_marshal.errors import TopicMisconfigured
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin, described


def row(**changes):
    partition = {
        "partition_index": 0,
        "leader_id": 1,
        "replica_nodes": [1, 2],
        "isr_nodes": [1, 2],
    }
    return {
        "name": "t",
        "error_code": 0,
        "topic_id": str(uuid.UUID(int=5)),
        "partitions": [
            partition,
            partition | {"partition_index": 1, "leader_id": -1, "isr_nodes": [2]},
        ],
    } | changes


def test_topics_are_described():
    found = described(row())
    assert (found.partition_count, found.replication) == (2, 2)
    assert found.leaderless == (1,)
    assert (found.in_sync, found.behind) == (1, (1,))
    assert found.leaders == {0: 1, 1: -1}
    assert found.topic_id == uuid.UUID(int=5).bytes


@pytest.mark.parametrize("raw", [None, str(uuid.UUID(int=0)), uuid.UUID(int=0)])
def test_no_topic_id_is_none(raw):
    assert described(row(topic_id=raw)).topic_id is None


def test_only_a_missing_topic_is_no_error():
    missing = row(error_code=kafka_errors.UnknownTopicOrPartitionError.errno)
    assert not described(missing).exists
    refused = row(error_code=kafka_errors.TopicAuthorizationFailedError.errno)
    with pytest.raises(kafka_errors.TopicAuthorizationFailedError):
        described(refused)


@pytest.mark.parametrize("count", [0, -1, 2**31])
def test_impossible_counts_are_refused_before_any_connection(count):
    with (
        KafkaTopicAdmin(ConnectionConfig("nowhere.invalid")) as admin,
        pytest.raises(TopicMisconfigured),
    ):
        admin.create("t", partitions=count, replication=1, configs={})
