"""Members of one group on different transports: each takes over from the other."""

from contextlib import ExitStack
from itertools import product

import pytest
from domain import opened
from fleet import Fleet
from waiting import eventually, read_out

from kafka_marshal import TopicPartition, World
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import open_data_log

TRANSPORTS = ("fast", "kafka-python")
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique) as domain:
        yield domain


def test_members_on_different_transports_take_over_from_each_other(
    domain, unique, tmp_path
):
    """The log does not depend on the transport of its writers."""
    topic = domain.data_topic(4, records_each=300)
    group = unique("mixed")
    with Fleet(domain, tmp_path, group_id=group, topics=[topic]) as fleet:
        fast = fleet.start("fast-1", transport="fast")
        slow = fleet.start("slow-1", transport="kafka-python")
        domain.wait_owned(group, topic, by={"fast-1", "slow-1"})
        fast.kill()
        domain.wait_owned(group, topic, by={"slow-1"})
        again = fleet.start("fast-2", transport="fast")
        domain.wait_owned(group, topic, by={"slow-1", "fast-2"})
        slow.kill()
        domain.wait_owned(group, topic, by={"fast-2"})
        eventually(lambda: not fleet.journal.lost(domain.of(topic)), "all is handled")
        again.ask_to_end()


@pytest.mark.parametrize(("writer", "reader"), [*product(TRANSPORTS, repeat=2)])
def test_progress_of_a_transaction_is_read_over_either_transport(
    domain, unique, writer, reader
):
    """Otherwise the next owner would write the same output again."""
    place, name = TopicPartition(domain.data_topic(1), 0), unique("copy")
    found = []
    for transport in (writer, reader):
        log = open_data_log(ConnectionConfig(domain.servers, transport=transport))
        with ExitStack() as cleanup:
            cleanup.callback(log.close, WAIT_MS)
            output = log.transactions(name, group_id=name, timeout_ms=WAIT_MS)
            cleanup.callback(output.close)
            found.append(output.progress(place, timeout_ms=WAIT_MS))
            output.write([], partition=place, position=7, metadata="mark")
    assert found == [None, (7, "mark")]


def test_both_transports_read_the_same_state(domain, unique):
    """S2: the same digests from the same log."""
    topic = domain.data_topic(2, records_each=5)
    group = unique("seen")
    with domain.marshal(group, "w1") as marshal:
        consumer = marshal.consumer(topic, consumer_timeout_ms=500)
        assert len(read_out(consumer, 10)) == 10
        consumer.commit()
    worlds = [
        World.open(
            domain.servers, coordination_topic=domain.topic, transport=transport
        ).to_object()
        for transport in ("fast", "kafka-python")
    ]
    assert worlds[0] == worlds[1]
    assert any(part["claims"] for part in worlds[0]["partitions"].values())
