"""Topics and the cluster as kafka-python describes them."""

import asyncio
import uuid
from types import SimpleNamespace

import pytest
from kafka import errors as kafka_errors
from kafka.admin import KafkaAdminClient
from kafka.protocol.admin import DescribeClusterResponse
from kafka.protocol.metadata import MetadataResponse

from kafka_marshal.errors import CoordinationError, TopicMisconfigured
from kafka_marshal.kafka_io import clients
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topic_rules import Broker
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin, described


class OldBroker:
    """Fake connections of kafka-python to a broker of Kafka 2.8 to 3.6."""

    def __init__(self, *, fetch_version):
        self.broker_version_data = SimpleNamespace(
            api_version=lambda request: fetch_version
        )

    def run(self, work, *arguments):
        return asyncio.run(work(*arguments))

    async def send(self, request):
        same = {"cluster_id": "c", "controller_id": 2}
        place = {"host": "h", "port": 9092, "rack": None}
        if request.name == "DescribeClusterRequest":
            kind = DescribeClusterResponse
            broker = kind.DescribeClusterBroker(version=0, broker_id=1, **place)
            return kind(version=0, error_code=0, brokers=[broker], **same)
        kind = MetadataResponse
        broker = kind.MetadataResponseBroker(version=11, node_id=1, **place)
        return kind(version=11, brokers=[broker], topics=[], **same)


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


def test_a_described_topic_has_its_partitions_and_leaders():
    found = described(row())
    assert (found.partition_count, found.replication) == (2, 2)
    assert found.leaderless == (1,)
    assert (found.in_sync, found.behind) == (1, (1,))
    assert found.leaders == {0: 1, 1: -1}
    assert found.topic_id == uuid.UUID(int=5).bytes


@pytest.mark.parametrize(
    ("operations", "can_write"),
    [(["READ", "WRITE"], True), (["DESCRIBE", "READ"], False), ([], True)],
)
def test_reported_operations_show_the_right_to_write(operations, can_write):
    assert described(row(authorized_operations=operations)).can_write is can_write
    assert described(row()).can_write


@pytest.mark.parametrize("raw", [None, str(uuid.UUID(int=0)), uuid.UUID(int=0)])
def test_a_missing_or_zero_topic_id_becomes_none(raw):
    assert described(row(topic_id=raw)).topic_id is None


def test_a_missing_topic_is_described_and_a_denied_topic_raises():
    missing = row(error_code=kafka_errors.UnknownTopicOrPartitionError.errno)
    assert not described(missing).exists
    refused = row(error_code=kafka_errors.TopicAuthorizationFailedError.errno)
    with pytest.raises(kafka_errors.TopicAuthorizationFailedError):
        described(refused)


@pytest.mark.parametrize("count", [0, -1, 2**31])
def test_invalid_partition_counts_are_refused_without_connecting(count):
    with (
        KafkaTopicAdmin(ConnectionConfig("nowhere.invalid")) as admin,
        pytest.raises(TopicMisconfigured),
    ):
        admin.create("t", partitions=count, replication=1, configs={})


@pytest.mark.parametrize("version", [12, 13])
def test_an_old_broker_describes_its_cluster(version):
    handle = KafkaAdminClient.__new__(KafkaAdminClient)
    handle._manager = OldBroker(fetch_version=version)
    handle._client = SimpleNamespace(manager=handle._manager)
    client = SimpleNamespace(call=lambda work, **_: work(handle))
    found = KafkaTopicAdmin(ConnectionConfig("b:1"), client=client).cluster()
    assert (found.cluster_id, found.controller_id) == ("c", 2)
    assert found.brokers == (Broker(node_id=1, host="h", port=9092, rack=None),)
    assert found.has_fetch_by_id == (version == 13)


class SlowCluster:
    """A client whose brokers learn of a new topic only after some requests."""

    def __init__(self, *rows):
        self.rows = list(rows)
        self.created_count = 0

    def create_topics(self, specs, **_):
        self.created_count += 1
        return {"topics": [{"name": name, "error_code": 0} for name in specs]}

    def describe_topics(self, _):
        return [self.rows.pop(0) if len(self.rows) > 1 else self.rows[0]]


def unknown():
    kind = kafka_errors.UnknownTopicOrPartitionError
    return row(error_code=kind.errno, partitions=[])


def led():
    return row(partitions=[row()["partitions"][0]])


def topics_of(cluster, monkeypatch):
    monkeypatch.setattr(clients, "new_client", lambda *_, **__: cluster)
    return KafkaTopicAdmin(ConnectionConfig("127.0.0.1:1"))


def test_creation_waits_until_all_partitions_have_leaders(monkeypatch):
    both = row(partitions=[row()["partitions"][0]] * 2)
    cluster = SlowCluster(unknown(), led(), row(), both)
    topics_of(cluster, monkeypatch).create(
        "t", partitions=2, replication=1, configs={}, timeout_ms=60_000
    )
    assert cluster.rows == [both]
    assert cluster.created_count == 1


@pytest.mark.parametrize(
    ("found", "led_count"), [(unknown(), 0), (led(), 1), (row(), 1)]
)
def test_a_new_topic_without_leaders_in_time_is_reported(monkeypatch, found, led_count):
    admin = topics_of(SlowCluster(found), monkeypatch)
    with pytest.raises(CoordinationError) as caught:
        admin.create("t", partitions=2, replication=1, configs={}, timeout_ms=300)
    assert f"{led_count} of 2 partitions have one" in str(caught.value)
    assert "no leader" in str(caught.value)
    assert "no broker" not in str(caught.value)
