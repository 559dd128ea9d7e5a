"""The conformance kit over a real broker."""

import pytest
from conformance import CHECKS
from kafka import KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient
from recreating import recreate_topic
from switchkit import switch_always

from kafka_marshal.kafka_io import entries, fetched_records, packed_records, responses
from kafka_marshal.kafka_io.fast import coordination as fast_coordination
from kafka_marshal.kafka_io.reader import KafkaDataReader
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.kafka_io.transport import open_coordination_log, open_data_log


class KafkaRig:
    waits = True

    def __init__(self, cluster, unique, transport):
        self._cluster = cluster
        self._unique = unique
        self.coordination_topic = unique("marshal")
        self._settings = ConnectionConfig(
            cluster.servers,
            coordination_topic=self.coordination_topic,
            transport=transport,
        )
        cluster.topics.create(
            self.coordination_topic,
            partitions=3,
            replication=1,
            configs={"message.timestamp.type": "LogAppendTime"},
        )

    def coordination_log(self):
        return open_coordination_log(self._settings)

    def data_log(self):
        return open_data_log(self._settings)

    def new_data_topic(self, partitions):
        name = self._unique("data")
        self._cluster.topics.create_data_topic(name, partitions=partitions)
        return name

    def new_group(self):
        return self._unique("group")

    def add_partitions(self, topic, count):
        there = self._cluster.topics.describe_bare(topic).partition_count
        self._cluster.admin.create_partitions({topic: there + count})
        self._cluster.admin.wait_for_topics([topic])
        self._cluster.renew_producer()

    def recreate_topic(self, topic, partitions):
        recreate_topic(self._cluster.topics, self._cluster.admin, topic, partitions)
        self._cluster.renew_producer()

    def delete_records(self, place, *, before):
        self._cluster.admin.delete_records({TopicPartition(*place): before})

    def write(self, place, value, *, key=None, headers=(), timestamp_ms=None):
        sent = self._cluster.producer.send(
            place.topic,
            value,
            key=key,
            headers=list(headers),
            partition=place.partition,
            timestamp_ms=timestamp_ms,
        )
        return sent.get(timeout=60).offset

    def begin_transaction(self, place, values):
        writer = KafkaProducer(
            bootstrap_servers=self._cluster.servers,
            transactional_id=self._unique("transaction"),
        )
        writer.init_transactions()
        writer.begin_transaction()
        for value in values:
            writer.send(place.topic, value, partition=place.partition).get(60)

        def end(*, is_committed):
            if is_committed:
                writer.commit_transaction()
            else:
                writer.abort_transaction()
            writer.close(timeout=5)

        return end


class Cluster:
    """Clients that tests share: making them takes longer than using them."""

    def __init__(self, servers):
        self.servers = servers
        self.topics = KafkaTopicAdmin(ConnectionConfig(servers))
        self.admin = KafkaAdminClient(bootstrap_servers=servers)
        self.producer = KafkaProducer(bootstrap_servers=servers)

    def renew_producer(self):
        """Make a new producer: one looks for new partitions every five minutes only."""
        self.producer.close(timeout=5)
        self.producer = KafkaProducer(bootstrap_servers=self.servers)


@pytest.fixture(scope="module")
def cluster(bootstrap_servers):
    made = Cluster(bootstrap_servers)
    yield made
    made.producer.close(timeout=5)
    made.admin.close()
    made.topics.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_real_broker_conforms(cluster, unique, transport, check):
    check(KafkaRig(cluster, unique, transport))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_kafka_python_conforms_without_the_compiled_parser(
    cluster, unique, monkeypatch, check
):
    monkeypatch.setattr(fetched_records, "compiled_parser", lambda: None)
    check(KafkaRig(cluster, unique, "kafka-python"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_kafka_python_conforms_without_the_compiled_part(
    cluster, unique, monkeypatch, check
):
    monkeypatch.setattr(packed_records, "compiled", None)
    monkeypatch.setattr(entries, "compiled", None)
    monkeypatch.setattr(responses, "compiled", None)
    monkeypatch.setattr(KafkaDataReader, "fetched_max", 0)
    check(KafkaRig(cluster, unique, "kafka-python"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_fast_transport_conforms_while_readers_switch(
    cluster, unique, monkeypatch, check
):
    switch_always(monkeypatch)
    monkeypatch.setattr(fast_coordination, "BACKLOG", 1)
    check(KafkaRig(cluster, unique, "fast"))
