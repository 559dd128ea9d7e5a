"""How a new reader gets its first record fast, and by how few connections."""

from collections import Counter

import pytest
from domain import opened

from kafka_marshal.kafka_io import reader as module
from kafka_marshal.kafka_io.fast.coordination import FastProducerHandle
from kafka_marshal.kafka_io.patches import Admin
from kafka_marshal.kafka_io.reader import KafkaDataReader
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.writer import writer_timeouts
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.testing.producing import Producing, create_topic


@pytest.fixture
def place(bootstrap_servers, unique):
    topic = unique("data")
    create_topic(bootstrap_servers, topic, partitions=1)
    with Producing(bootstrap_servers, topic, partitions=1) as producing:
        producing.fill(3)
    return TopicPartition(topic, 0)


@pytest.fixture
def reader(bootstrap_servers):
    made = KafkaDataReader(ConnectionConfig(bootstrap_servers))
    yield made
    made.close(1_000)


def backoffs(reader):
    consumer = reader._consumer
    return {each.config["retry_backoff_ms"] for each in (consumer, consumer._cluster)}


def test_a_reader_retries_fast_until_its_first_record(reader, place):
    reader.assign([place])
    reader.seek(place, 0)
    assert reader.poll(0, 10) == {}
    while not (found := reader.poll(1, 10)):
        assert reader._consumer is None or backoffs(reader) == {module.FIRST_BACKOFF_MS}
    assert [record.offset for record in found[place]] == [0, 1, 2]
    assert backoffs(reader) == {module.BACKOFF_MS}


def test_a_reader_without_records_stops_retrying_fast(reader, place, monkeypatch):
    monkeypatch.setattr(module, "_FAST_RETRY_S", 0.0)
    reader.assign([place])
    reader.seek(place, 3)
    while reader._consumer is None:
        assert reader.poll(10, 10) == {}
    reader.poll(10, 10)
    assert backoffs(reader) == {module.BACKOFF_MS}


class Counted:
    """Counts the objects made of some classes, and keeps the arguments of the last."""

    def __init__(self, monkeypatch, *classes):
        self.made, self.last = Counter(), {}
        for each in classes:
            monkeypatch.setattr(each, "__init__", self._counting(each.__init__))

    def _counting(self, init):
        def counted(made, *args, **options):
            self.made[type(made).__name__] += 1
            self.last[type(made).__name__] = args
            init(made, *args, **options)

        return counted


@pytest.mark.parametrize(("h_ms", "writers"), [(60_000, 1), (5_000, 2)])
def test_a_client_opens_by_few_connections(broker, unique, monkeypatch, h_ms, writers):
    """One for look-ups of both logs; how many writers depends on the interval."""
    with opened(broker, unique, transport="fast", partitions=2, h_ms=h_ms) as domain:
        topic = domain.data_topic(1, 1)
        counted = Counted(monkeypatch, Admin, FastProducerHandle)
        with domain.marshal("g", "one") as marshal, marshal.consumer(topic):
            assert counted.last["FastProducerHandle"][1] == writer_timeouts(h_ms)
            assert counted.made == {"Admin": 1, "FastProducerHandle": writers}
