"""Brokers that return at other addresses: only the bootstrap address remains."""

from contextlib import ExitStack

import pytest
from domain import opened
from forwarding import Forwarder
from waiting import WAIT_MS, eventually, poll_all

from kafka_marshal import Marshal
from kafka_marshal.testing.broker import EmbeddedBroker, free_ports


@pytest.fixture(scope="module")
def moving():
    """A broker with two listeners, each of which advertises a port of a forwarder."""
    plain, before, after, controller, old, new = free_ports(6)
    properties = {
        "listeners": f"PLAINTEXT://127.0.0.1:{plain},BEFORE://127.0.0.1:{before},"
        f"AFTER://127.0.0.1:{after},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{plain},"
        f"BEFORE://127.0.0.1:{old},AFTER://127.0.0.1:{new}",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,"
        "BEFORE:PLAINTEXT,AFTER:PLAINTEXT",
    }
    with EmbeddedBroker(port=plain, properties=properties) as broker:
        yield broker, (before, old), (after, new)


def test_members_follow_brokers_to_other_addresses(moving, unique, transport):
    """The reader of data and that of the log, of one and the same client library."""
    broker, (before, old), (after, new) = moving
    (bootstrap,) = free_ports(1)
    with (
        opened(broker, unique, transport=transport) as domain,
        Forwarder(bootstrap) as first,
        ExitStack() as moved,
    ):
        topic = domain.data_topic(2, records_each=3)
        first.target = before
        at_old = moved.enter_context(Forwarder(old))
        at_old.target = before
        with Marshal(
            f"127.0.0.1:{bootstrap}",
            group_id=unique("moving"),
            client_id="w1",
            coordination_topic=domain.topic,
            transport=transport,
            state_dir="",
        ) as marshal:
            consumer = marshal.consumer(topic)
            found = {(r.partition, r.offset) for r in poll_all(consumer, 6)}
            consumer.commit()
            moved.close()
            at_new = moved.enter_context(Forwarder(new))
            at_new.target = after
            first.redirect(after)
            domain.produce(topic, 3)

            def has_all() -> bool:
                for records in consumer.poll(timeout_ms=200).values():
                    found.update((r.partition, r.offset) for r in records)
                return len(found) == 12

            eventually(has_all, "records after the move")
            consumer.commit()
            consumer.flush(timeout_ms=WAIT_MS)
