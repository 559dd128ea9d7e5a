"""Committing from anywhere, lag and load, on a real broker."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from domain import opened
from kafka import KafkaConsumer
from kafka import TopicPartition as Place
from waiting import eventually, poll_all

from kafka_marshal import ClaimLost, TopicPartition


@pytest.fixture(scope="module")
def domain(broker, unique, transport, via):
    with opened(broker, unique, h_ms=5_000, transport=transport, via=via) as domain:
        yield domain


def test_other_threads_commit_tokens_in_any_order(domain, unique):
    """Tokens are pickled, and the records need not exist any more."""
    topic = domain.data_topic(3, records_each=100)
    group = unique("pool")
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, max_poll_records=40)
        tokens = [
            pickle.dumps(consumer.commit_token(record))
            for record in poll_all(consumer, 300)
        ]

        def work(token):
            consumer.commit(pickle.loads(token))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, sorted(tokens, key=hash), timeout=60))
        consumer.flush()
        positions = {k.partition: s.position for k, s in domain.states(group).items()}
        assert positions == dict.fromkeys(range(3), 100)


def test_a_commit_token_is_stale_after_a_takeover(domain, unique):
    topic = domain.data_topic(1, records_each=10)
    group = unique("stale")
    with domain.marshal(group, "w1") as one, domain.marshal(group, "w2") as two:
        consumer = one.consumer(topic)
        token = consumer.commit_token(poll_all(consumer, 10)[0])
        consumer.close()
        other = two.consumer(topic)
        assert poll_all(other, 10)[0].offset == token.offset
        with pytest.raises(ClaimLost) as caught:
            other.commit(token)
        assert caught.value.reason == "stale_token"
        assert other.committed(TopicPartition(topic, 0)) == 0


def test_lag_equals_log_end_less_committed_offset_of_kafka(domain, unique):
    """Log end less committed offset, as ``kafka-consumer-groups`` counts."""
    topic = domain.data_topic(2, records_each=30)
    group = unique("lag")
    plain = KafkaConsumer(bootstrap_servers=domain.servers, group_id=None)
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, max_poll_records=7)
        eventually(lambda: consumer.load() == 2, "both are held")
        for _ in range(3):
            consumer.commit(poll_all(consumer, 1))
        domain.produce(topic, 5)
        consumer.flush()

        def lag_of_kafka():
            committed = domain.committed(group, topic)
            ends = plain.end_offsets([Place(*place) for place in domain.of(topic)])
            return {
                place: ends[Place(*place)] - committed.get(place, 0)
                for place in domain.of(topic)
            }

        eventually(lambda: consumer.lag() == lag_of_kafka(), "the same lag")
        assert 0 < sum(consumer.lag().values()) < 70
        consumer.commit(poll_all(consumer, sum(consumer.lag().values())))
        assert set(consumer.lag().values()) == {0}
    plain.close()
