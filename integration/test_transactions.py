"""Records of transactional producers: which are handed out, and lag that reaches 0."""

import json

import pytest
from clikit import Cli
from domain import opened
from kafka import KafkaProducer
from waiting import eventually

from kafka_marshal import Delivery, TopicPartition

COMMITTED, ABORTED, EACH = 12, 3, 5
WAYS = {
    "fast": {"transport": "fast"},
    "kafka-python": {"transport": "kafka-python"},
    "sidecar": {"transport": "fast", "via": "sidecar"},
}


@pytest.fixture(scope="module", params=WAYS)
def domain(request, broker, unique):
    with opened(broker, unique, **WAYS[request.param]) as domain:
        yield domain


@pytest.fixture(scope="module")
def place(domain):
    """A partition that ends with a transaction that was aborted."""
    place = TopicPartition(domain.data_topic(1), 0)
    writer = KafkaProducer(
        bootstrap_servers=domain.servers,
        transactional_id=domain.unique("transaction"),
    )
    writer.init_transactions()
    for number in range(COMMITTED + ABORTED):
        writer.begin_transaction()
        is_aborted = number % 5 == 4
        for _ in range(EACH):
            value = b"aborted" if is_aborted else b"committed"
            writer.send(place.topic, value, partition=0)
        # Otherwise records that are not sent yet would not be written at an abort.
        writer.flush(timeout=60)
        if is_aborted:
            writer.abort_transaction()
        else:
            writer.commit_transaction()
    writer.close(timeout=5)
    return place


@pytest.mark.parametrize("delivery", list(Delivery))
@pytest.mark.parametrize("level", ["read_uncommitted", "read_committed"])
def test_every_record_is_read_once_and_the_position_reaches_the_end(
    domain, place, level, delivery
):
    group = domain.unique("readers")
    end = (COMMITTED + ABORTED) * (EACH + 1)
    values = []
    with (
        domain.marshal(group, "a") as marshal,
        marshal.consumer(
            place.topic, delivery=delivery, isolation_level=level
        ) as consumer,
    ):

        def has_no_lag():
            for records in consumer.poll(100).values():
                values.extend(record.value for record in records)
                consumer.commit(records)
            return consumer.position(place) == end and consumer.lag() == {place: 0}

        eventually(has_no_lag, "the consumer has no lag", 60_000)
        eventually(
            lambda: domain.committed(group, place.topic) == {place: end},
            "other tools see no lag",
            60_000,
        )
    assert values.count(b"committed") == COMMITTED * EACH
    aborted = ABORTED * EACH if level == "read_uncommitted" else 0
    assert values.count(b"aborted") == aborted
    (state,) = domain.states(group).values()
    assert state.next_unclaimed() == end


def test_the_command_reads_committed_records_with_isolation_level(
    domain, place, tmp_path
):
    options = ("--group", domain.unique("readers"), "--client-id", "c")
    found = Cli(domain, tmp_path).run(
        *("consume", place.topic, *options),
        *("--isolation-level", "read_committed"),
        *("--max-records", str(COMMITTED * EACH)),
    )
    values = [json.loads(line)["value"] for line in found.stdout.splitlines()]
    assert values == ["committed"] * COMMITTED * EACH


@pytest.mark.parametrize("delivery", list(Delivery))
def test_an_open_transaction_holds_back_its_records_and_later_ones(domain, delivery):
    """Later records are those of any producer, until it ends."""
    place = TopicPartition(domain.data_topic(1, records_each=EACH), 0)
    writer = KafkaProducer(
        bootstrap_servers=domain.servers,
        transactional_id=domain.unique("open"),
    )
    writer.init_transactions()
    writer.begin_transaction()
    writer.send(place.topic, b"open", partition=0).get(timeout=60)
    plain = KafkaProducer(bootstrap_servers=domain.servers)
    plain.send(place.topic, b"behind", partition=0).get(timeout=60)
    plain.close(timeout=5)
    group, values = domain.unique("open"), []
    with (
        domain.marshal(group, "a") as marshal,
        marshal.consumer(
            place.topic, delivery=delivery, isolation_level="read_committed"
        ) as consumer,
    ):

        def has(position):
            for records in consumer.poll(100).values():
                values.extend(record.value for record in records)
                consumer.commit(records)
            return consumer.position(place) == position

        eventually(lambda: has(EACH), "what is before the transaction")
        eventually(lambda: has(EACH) and consumer.lag() == {place: 0}, "no lag")
        for _ in range(10):
            assert has(EACH)
        assert len(values) == EACH
        (state,) = domain.states(group).values()
        assert state.next_unclaimed() in {EACH, None}
        writer.commit_transaction()
        eventually(
            lambda: has(EACH + 3) and consumer.lag() == {place: 0}, "all of it", 60_000
        )
        assert values[EACH:] == [b"open", b"behind"]
        eventually(
            lambda: domain.committed(group, place.topic) == {place: EACH + 3},
            "other tools see no lag",
            60_000,
        )
    writer.close(timeout=5)
