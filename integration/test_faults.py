"""Faults of the world around: what happens is an error that says so, or nothing."""

import pytest
from domain import opened
from waiting import eventually

from kafka_marshal import TopicPartition
from kafka_marshal.kafka_io import ConnectionSettings, KafkaDataLog


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique) as domain:
        yield domain


# --- faults of the Kafka client that we build on


def test_a_resumed_partition_is_read_on(domain):
    """kafka-python forgets what it set aside while another is read to its end."""
    topic = domain.data_topic(2)
    long, short = TopicPartition(topic, 0), TopicPartition(topic, 1)
    domain.produce_to(long, 100)
    domain.produce_to(short, 5)
    data = KafkaDataLog(ConnectionSettings(domain.servers))
    reader = data.reader()
    try:
        reader.assign([long])
        reader.seek(long, 0)
        found = []

        def look():
            found.extend(
                (record.partition, record.offset)
                for records in reader.poll(200, 10).values()
                for record in records
            )
            return found

        eventually(look, "the first ten")
        reader.pause([long])
        reader.assign([long, short])
        reader.seek(short, 0)
        eventually(lambda: (1, 4) in look(), "the short one is read to its end")
        reader.resume([long])
        eventually(lambda: (0, 99) in look(), "the long one is read on")
        assert len(set(found)) == len(found) == 105
    finally:
        reader.close(1_000)
        data.close(1_000)
