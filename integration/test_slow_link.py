"""Readers fetch while a batch is handled, also from a distant broker."""

import pytest
from confluent_kafka import Producer
from domain import Domain
from waiting import eventually

from kafka_marshal.kafka_io.reader import KafkaDataReader
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.testing.broker import EmbeddedBroker
from simulator.slowlink import SlowLink

DELAY_MS = 50
VALUE_BYTES = 1_000
RECORDS = 12_000
# More than the broker puts in one answer, so that a poll takes all of it.
POLL_RECORDS = 3_000
PART_BYTES = 300 * VALUE_BYTES


@pytest.fixture(scope="module")
def link():
    link = SlowLink(delay_ms=DELAY_MS)
    listeners = {"advertised.listeners": f"PLAINTEXT://{link.address}"}
    with link, EmbeddedBroker(properties=listeners) as broker:
        link.lead_to(broker.bootstrap_servers)
        yield link


@pytest.fixture(scope="module")
def domain(link, unique):
    domain = Domain(link.address, unique, partitions=1)
    yield domain
    domain.close()


@pytest.fixture(scope="module")
def topic(domain):
    name = domain.data_topic(1)
    producer = Producer({"bootstrap.servers": domain.servers, "linger.ms": 20})
    for _ in range(RECORDS):
        producer.produce(name, bytes(VALUE_BYTES), partition=0)
    assert producer.flush(60) == 0
    return name


def test_the_next_batch_is_fetched_while_one_is_handled(
    link, domain, topic, unique, transport
):
    """Times are not checked: bytes must arrive although there is no poll."""
    group = unique("far")
    with domain.marshal(group, "w", transport=transport) as marshal:
        began = link.delivered_bytes
        consumer = marshal.consumer(topic, max_poll_records=POLL_RECORDS)
        handled = 0
        while handled < RECORDS // 2:
            records = eventually(
                lambda: [r for rs in consumer.poll(1_000).values() for r in rs],
                "a first batch",
            )
            taken = handled + len(records)

            def comes_by_itself(taken=taken):
                """Return whether more bytes have arrived than were handed out."""
                arrived = link.delivered_bytes - began
                return arrived >= min(
                    RECORDS * VALUE_BYTES, taken * VALUE_BYTES + PART_BYTES
                )

            eventually(comes_by_itself, "the next batch arrives during this one")
            handled += len(records)
            consumer.commit(records)
        assert consumer.lag() == dict.fromkeys(consumer.assignment(), RECORDS - handled)


def test_a_poll_that_waited_for_its_records_starts_the_next_fetch(link, domain, topic):
    """That one poll waits and returns; no other call requests more."""
    place = TopicPartition(topic, 0)
    reader = KafkaDataReader(ConnectionConfig(domain.servers))
    try:
        reader.assign([place])
        reader.seek(place, 0)
        began = link.delivered_bytes
        found = eventually(lambda: reader.poll(60_000, RECORDS), "a first batch")
        taken = len(found[place]) * VALUE_BYTES
        assert taken + PART_BYTES < RECORDS * VALUE_BYTES

        def comes_by_itself():
            return link.delivered_bytes - began >= taken + PART_BYTES

        eventually(comes_by_itself, "the next batch arrives though nobody polls")
    finally:
        reader.close(1_000)
