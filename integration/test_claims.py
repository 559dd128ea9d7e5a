"""Claims without consumption: for loops that fetch by other means."""

import threading
from itertools import pairwise

import pytest
from domain import opened
from kafka import KafkaConsumer
from kafka import TopicPartition as Place
from waiting import WAIT_MS, eventually

from kafka_marshal import (
    ClaimLost,
    ClaimRejected,
    ConfigurationError,
    InvalidTransition,
)
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import ReleasingPartition

RACERS = 20
SHARERS = 10
# How long each tries: the winner needs far less, also on a busy machine.
RACE_MS = 5_000


@pytest.fixture(scope="module")
def domain(broker, unique, transport, via):
    with opened(broker, unique, transport=transport, via=via) as domain:
        yield domain


def test_a_plain_consumer_loop_under_a_claim(domain, unique):
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


def test_a_rejected_claim_names_holder_and_freshness(domain, unique):
    group = unique("rejected")
    topic = domain.data_topic(1)
    with domain.marshal(group, "w1") as one, domain.marshal(group, "w2") as two:
        with one.claim(topic, 0):
            with pytest.raises(ClaimRejected, match="'w1'") as raised:
                two.claim(topic, 0, timeout_ms=500)
            assert raised.value.holder == "w1"
            assert raised.value.freshness == "fresh"
            assert raised.value.reason == "held"
        with two.claim(topic, 0, timeout_ms=WAIT_MS) as claim:
            assert claim.is_valid()


def test_a_released_claim_is_over(domain, unique):
    topic = domain.data_topic(1)
    with domain.marshal(unique("over"), "w1") as marshal:
        claim = marshal.claim(topic, 0)
        claim.release()
        claim.release()
        assert not claim.is_valid()
        with pytest.raises(ClaimLost, match="released"):
            claim.check()
        with pytest.raises(ClaimLost):
            claim.set_position(5)
        with marshal.claim(topic, 0) as again:
            assert again.token > claim.token


def test_one_claim_of_a_key_in_a_process(domain, unique):
    """PROTOCOL 5.3: a second is refused locally."""
    topic = domain.data_topic(2)
    with domain.marshal(unique("twice"), "w1") as marshal, marshal.claim(topic, 0):
        with pytest.raises(InvalidTransition, match="already"):
            marshal.claim(topic, 0)
        with pytest.raises(InvalidTransition, match="already"):
            marshal.consumer(topic)
        with pytest.raises(ConfigurationError):
            marshal.claim(topic, -1)
        with pytest.raises(ConfigurationError):
            marshal.claim("no/topic", 0)


@pytest.mark.direct(reason="clients of one sidecar do not race in the log")
def test_many_racers_one_winner(domain, unique):
    """The earliest claim wins, and everybody agrees on who that is."""
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


def test_many_clients_share_many_partitions(domain, unique):
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


def test_a_foreign_release_is_ignored(domain, unique):
    """It needs the same client, group and incarnation; counted otherwise."""
    group = unique("forged")
    topic = domain.data_topic(1)
    with domain.marshal(group, "w1") as marshal, marshal.claim(topic, 0) as claim:
        (known,) = domain.states(group).values()
        world = next(
            w for w in domain.world().partitions if any(k[0] == group for k in w.keys)
        )
        for incarnation, client_id in ((b"\0" * 16, "w1"), (b"\1" * 16, "w2")):
            forged = ReleasingPartition(
                client_id=client_id,
                group_id=group,
                incarnation=incarnation,
                seq=1,
                topic=topic,
                partition=0,
                epoch=known.epoch,
                position=99,
                successor=None,
                reason="forged",
            )
            domain.append(encode(forged), t=world.partition)
        after = domain.world().partitions[world.partition]
        before = world.soft.counters.get("not_owner", 0)
        assert after.soft.counters["not_owner"] == before + 2
        assert claim.is_valid()
    (known,) = domain.states(group).values()
    assert known.position is None
