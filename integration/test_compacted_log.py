"""A compacted coordination topic: the broker refuses records without a key.

Its cleaner deletes those that are there, and leaves Kafka's log start where it was.
"""

import time
from functools import partial

import pytest
from domain import Domain
from logs import fails
from waiting import eventually

from kafka_marshal.errors import LogUnreadable, LogUnwritable, TopicMisconfigured
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import open_coordination_log


@pytest.fixture
def compacted(broker, unique):
    domain = Domain(broker.bootstrap_servers, unique, partitions=1)
    domain.alter_coordination_topic("cleanup.policy", "compact")
    yield domain
    domain.close()


def test_an_append_to_a_compacted_log_fails_with_the_command_to_run(
    compacted, transport
):
    """PROTOCOL 2.1: its cleaner drops records without a key, so the error is final."""
    settings = ConnectionConfig(
        compacted.servers, coordination_topic=compacted.topic, transport=transport
    )
    log = open_coordination_log(settings, heartbeat_interval_ms=2_000)

    def send():
        append = log.append(0, b"anything")
        while not append.is_done():
            log.poll(50)
        if (error := append.error()) is not None:
            raise error

    try:
        error = fails(send, LogUnwritable)
    finally:
        log.close(1_000)
    assert not error.retriable
    assert "marshal doctor" in str(error)
    assert "cleanup.policy" in str(error)


def test_no_client_starts_on_a_compacted_log(compacted):
    def start():
        compacted.marshal("g", "late").close()

    error = fails(start, TopicMisconfigured)
    assert isinstance(error, TopicMisconfigured)
    assert any("cleanup.policy" in problem for problem in error.problems)


def test_no_client_starts_on_a_log_that_was_compacted_for_a_while(broker, unique):
    """PROTOCOL 7.3: the records that decide who owns a partition may be gone."""
    domain = Domain(broker.bootstrap_servers, unique, partitions=1)
    settings = {
        each: ConnectionConfig(
            domain.servers, coordination_topic=domain.topic, transport=each
        )
        for each in ("fast", "kafka-python")
    }
    logs = {each: open_coordination_log(found) for each, found in settings.items()}
    log = logs["fast"]

    def append(value):
        sent = log.append(0, value)
        eventually(lambda: log.poll(50) is not None and sent.is_done(), "the append")
        assert sent.error() is None

    def first_offset():
        log.read_from({0: 0})
        return next((entry.offset for _, entry in log.poll(500)), 0)

    try:
        log.configure(2_000)
        for each in logs.values():
            assert each.start_offsets(5_000) == {0: 0}
        domain.alter_coordination_topic("segment.ms", "100")
        time.sleep(0.2)  # the age of a segment that the next append replaces
        append(b"begins a new segment")
        domain.alter_coordination_topic("min.cleanable.dirty.ratio", "0")
        domain.alter_coordination_topic("cleanup.policy", "compact")
        eventually(first_offset, "the cleaner has deleted the first records")
        domain.alter_coordination_topic("cleanup.policy", "delete")
        for each in logs.values():
            assert each.start_offsets(5_000)[0] > 0
        for transport in logs:
            start = partial(domain.marshal, "g", "late", transport=transport)
            assert "no checkpoint" in str(fails(start, LogUnreadable))
    finally:
        for each in logs.values():
            each.close(1_000)
        domain.close()
