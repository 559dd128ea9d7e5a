"""A compacted coordination topic: the broker refuses records without a key."""

import pytest
from domain import Domain
from logs import fails

from kafka_marshal.errors import LogUnwritable, TopicMisconfigured
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
