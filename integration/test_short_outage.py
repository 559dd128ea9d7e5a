"""The broker of the log does not answer for less than an interval (PROTOCOL 5.2)."""

import pytest
from domain import Domain
from waiting import eventually, wall_ms

from kafka_marshal.testing.broker import EmbeddedBroker

# The lease outlasts the outage by 38 % of it, which is what a busy machine may be late.
H_MS = 10_000
RECORDS = 2_000


@pytest.fixture(scope="module")
def broken():
    """A broker that is stopped by the test."""
    with EmbeddedBroker() as broker:
        yield broker


@pytest.mark.slow
def test_an_owner_hands_out_records_during_an_outage_below_an_interval(
    broken, unique, transport
):
    domain = Domain(broken.bootstrap_servers, unique, h_ms=H_MS, transport=transport)
    try:
        topic, group = domain.data_topic(1, records_each=RECORDS), unique("short")
        with domain.marshal(group, "w") as marshal:
            # One broker has all topics here: only fetched records are handed out.
            consumer = marshal.consumer(topic, max_poll_records=1)

            def handed():
                found = [r for rs in consumer.poll(50).values() for r in rs]
                consumer.commit(found)
                return found

            (first,) = eventually(handed, "it works")
            eventually(lambda: handed() and consumer.lag(), "records are fetched")
            broken.pause()
            began_ms = wall_ms()
            try:
                eventually(
                    lambda: wall_ms() - began_ms >= 0.97 * H_MS, "nearly an interval"
                )
                (last,) = handed()
            finally:
                broken.resume()
            assert last.token == first.token
            for _ in range(3):
                (after,) = eventually(handed, "it works on")
                assert after.token == first.token
        assert [len(t) for t in domain.history().tenures(group).values()] == [1]
    finally:
        domain.close()
