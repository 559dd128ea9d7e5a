"""A data topic that is deleted and created again while it is consumed."""

import pytest
from domain import Recorder, opened
from kafka import KafkaProducer
from recreating import recreate_topic
from waiting import eventually

from kafka_marshal import Delivery

OLD = 20


@pytest.fixture(scope="module")
def domain(broker, unique, transport, via):
    with opened(broker, unique, transport=transport, via=via) as domain:
        yield domain


def taken(consumer, count, *, commits):
    """Consume until there are at least so many records; return their values."""
    found = []

    def is_there():
        for records in consumer.poll(200).values():
            found.extend(record.value for record in records)
        if found and commits:
            consumer.commit()
        return len(found) >= count

    eventually(is_there, f"{count} records")
    return found


def write(domain, topic, values):
    producer = KafkaProducer(bootstrap_servers=domain.servers)
    for value in values:
        producer.send(topic, value, partition=0)
    producer.close(timeout=30)


@pytest.mark.parametrize("count", [60, OLD, 5], ids=["longer", "equal", "shorter"])
@pytest.mark.parametrize("delivery", list(Delivery), ids=lambda each: each.value)
def test_a_recreated_topic_is_consumed_once_from_its_beginning(domain, delivery, count):
    """However many records the new one has: positions of the old one do not count."""
    topic = domain.data_topic(1, records_each=OLD)
    group = domain.unique("group")
    recorder = Recorder()
    commits = delivery is Delivery.AT_LEAST_ONCE
    with (
        domain.marshal(group, "a", observer=recorder) as marshal,
        marshal.consumer(topic, delivery=delivery) as consumer,
    ):
        before = taken(consumer, OLD, commits=commits)
        assert before == [b"%d" % number for number in range(OLD)]
        recreate_topic(domain.topics, domain.kafka, topic, 1)
        new = [b"new %d" % number for number in range(count)]
        write(domain, topic, new)
        assert taken(consumer, count, commits=commits) == new
        write(domain, topic, [b"last"])
        assert taken(consumer, 1, commits=commits) == [b"last"]
    (known,) = domain.states(group).values()
    assert len(known.retired_topic_ids) == 1
    assert known.position == count + 1
    endings = [event.fields["ending"] for event in recorder.named("claim_ended")]
    assert endings[0].reason == "topic_gone"
    assert recorder.named("position_jumped") == []
    assert recorder.named("position_out_of_range") == []


@pytest.mark.direct
def test_a_deleted_topic_is_reported_as_gone(domain):
    """It is subscribed by name, so it is consumed again once it exists."""
    topic = domain.data_topic(1, records_each=1)
    recorder = Recorder()
    with (
        domain.marshal(domain.unique("group"), "a", observer=recorder) as marshal,
        marshal.consumer(topic, metadata_refresh_ms=1_000) as consumer,
    ):
        taken(consumer, 1, commits=True)
        domain.kafka.delete_topics([topic])
        eventually(
            lambda: consumer.poll(50) or recorder.named("topic_gone"),
            "the topic is reported",
        )
        assert not consumer.assignment()
        domain.topics.create_data_topic(topic, partitions=1)
        write(domain, topic, [b"again"])
        assert taken(consumer, 1, commits=True) == [b"again"]
    assert len(recorder.named("topic_gone")) == 1
    assert recorder.named("lag_unknown") == []
