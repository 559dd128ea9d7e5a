"""Claims without consumption: for loops that fetch by other means."""

import threading
from itertools import pairwise

import pytest
from domain import opened
from kafka import KafkaConsumer
from kafka import TopicPartition as Place
from waiting import eventually

from kafka_marshal import (
    ClaimRejected,
)

RACERS = 20
SHARERS = 10
# How long each tries: the winner needs far less, also on a busy machine.
RACE_MS = 5_000


@pytest.fixture(scope="module")
def domain(broker, unique, transport, via):
    with opened(broker, unique, transport=transport, via=via) as domain:
        yield domain


def test_a_plain_kafka_consumer_keeps_its_position_in_a_claim(domain, unique):
    """The framework-less loop: fetch with kafka-python, work under the claim."""
    topic = domain.data_topic(1, records_each=10)
    group = unique("plain")
    with domain.marshal(group, "w1") as marshal, marshal.claim(topic, 0) as claim:
        assert claim.position is None
        consumer = KafkaConsumer(bootstrap_servers=domain.servers, group_id=None)
        consumer.assign([Place(topic, 0)])
        consumer.seek(Place(topic, 0), claim.position or 0)
        for record in consumer:
            token = claim.check()
            claim.set_position(record.offset + 1)
            if record.offset == 9:
                break
        consumer.close(autocommit=False)
    (known,) = domain.states(group).values()
    assert (known.owner, known.position) == (None, 10)
    with domain.marshal(group, "w2") as marshal, marshal.claim(topic, 0) as claim:
        assert claim.position == 10
        assert claim.token > token


def test_a_claim_is_renewed_without_calls(domain, unique):
    group = unique("kept")
    topic = domain.data_topic(1)
    with domain.marshal(group, "w1") as marshal, marshal.claim(topic, 0) as claim:
        token = claim.token

        def beats():
            steps = domain.history().of("renewed", group_id=group)
            return len(steps) > 0 and (
                steps[-1].timestamp_ms - steps[0].timestamp_ms > 3 * domain.h_ms
            )

        eventually(beats, "three H of beats")
        assert claim.check() == token
        at = [s.timestamp_ms for s in domain.history().of("renewed", group_id=group)]
        gaps = [two - one for one, two in pairwise(at)]
        assert max(gaps) < domain.h_ms


@pytest.mark.direct(reason="clients of one sidecar do not race in the log")
def test_of_many_concurrent_claims_one_is_accepted(domain, unique):
    """The earliest claim wins, and all others report its owner."""
    group = unique("race")
    topic = domain.data_topic(1)
    marshals = [domain.marshal(group, f"w{n}") for n in range(RACERS)]
    start = threading.Barrier(RACERS)
    won, reported = [], []

    def race(marshal):
        start.wait(timeout=60)
        try:
            won.append(marshal.claim(topic, 0, timeout_ms=RACE_MS))
        except ClaimRejected as rejected:
            reported.append(rejected.holder)

    try:
        threads = [threading.Thread(target=race, args=(m,)) for m in marshals]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        (claim,) = won
        (owner,) = domain.owners(group).values()
        assert reported == [owner] * (RACERS - 1)
        steps = [s for s in domain.history().steps if s.key == (group, topic, 0)]
        assert steps[0].effect == "claimed"
        assert steps[0].offset == claim.token.offset
        assert [s.effect for s in steps].count("claimed") == 1
    finally:
        for marshal in marshals:
            marshal.close()


def test_many_clients_get_one_partition_each(domain, unique):
    """No livelock."""
    group = unique("many")
    topic = domain.data_topic(SHARERS)
    marshals = [domain.marshal(group, f"w{n:02}") for n in range(SHARERS)]
    try:
        consumers = [marshal.consumer(topic) for marshal in marshals]
        eventually(
            lambda: [len(c.assignment()) for c in consumers] == [1] * SHARERS,
            "each has one",
        )
    finally:
        for marshal in marshals:
            marshal.close()
