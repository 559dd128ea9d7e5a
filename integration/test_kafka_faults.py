"""The logs while the broker fails, loses a topic, or refuses a user."""

import time

import pytest
from kafka.admin import KafkaAdminClient
from logs import LATE_S, TIMEOUT_MS, fails, read, sent
from slowness import is_over, until

from kafka_marshal.errors import (
    CoordinationError,
    LogTruncated,
    LogUnreadable,
    LogUnwritable,
    TopicMisconfigured,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.kafka_io.transport import open_coordination_log, open_data_log
from kafka_marshal.testing.broker import EmbeddedBroker

# --- Faults of the broker ------------------------------------------------------------


@pytest.fixture(scope="module")
def own_broker():
    """A broker for tests that break it, and leave it running."""
    with EmbeddedBroker() as started:
        yield started


@pytest.fixture
def own_settings(own_broker, unique, transport):
    return ConnectionConfig(
        own_broker.bootstrap_servers,
        coordination_topic=unique("marshal"),
        transport=transport,
    )


@pytest.fixture
def own_log(own_settings):
    settings = own_settings
    with KafkaTopicAdmin(settings) as admin:
        admin.create_coordination_topic(partitions=2)
    log = open_coordination_log(settings, heartbeat_interval_ms=2_000)
    yield log
    log.close(1_000)


def test_the_log_is_read_and_written_after_a_broker_restart(own_broker, own_log):
    until(lambda: sent(own_log, b"first"))
    (_, first), *_ = read(own_log, 1)
    own_broker.kill()
    start = time.monotonic()
    append = own_log.append(0, b"while away")
    assert not is_over(start, LATE_S)
    until(append.is_done)
    assert isinstance(append.error(), CoordinationError)
    start = time.monotonic()
    assert list(own_log.poll(300)) == []
    with pytest.raises(CoordinationError):
        own_log.end_offsets(500)
    assert not is_over(start, 0.8 + 2 * LATE_S)
    own_broker.restart()
    until(lambda: sent(own_log, b"second"))
    entries = [entry for _, entry in read(own_log, 1) if entry.value == b"second"]
    # Each start is a new leader epoch, and the log continues at its end.
    assert entries[0].leader_epoch > first.leader_epoch
    assert entries[0].offset > first.offset


def test_an_append_that_was_reported_failed_may_be_in_the_log(own_broker, own_log):
    """PROTOCOL 1.4: the outcome of a failed append is unknown until the log is read."""
    until(lambda: sent(own_log, b"warm"))
    read(own_log, 1)
    own_broker.pause()
    append = own_log.append(0, b"late")
    until(append.is_done)
    assert append.error() is not None
    assert append.offset() is None
    own_broker.resume()
    # It was sent into a socket that stayed open, so it arrives after its time-out.
    entries = read(own_log, 1)
    assert entries[0][1].value == b"late"


def test_a_writer_recovers_from_a_broker_pause(own_broker, own_log):
    """kafka-python's own producer sends nothing more after this."""
    own_broker.pause()
    append = own_log.append(0, b"lost or late")
    until(append.is_done)
    assert append.error() is not None
    # An append while a new producer is made waits for that producer.
    own_log.append(0, b"held, and given up in time")
    own_broker.resume()
    for partition in (0, 1):
        until(lambda p=partition: sent(own_log, b"after", partition=p))
    until(lambda: any(e.value == b"after" for _, e in own_log.poll(100)))


def test_close_meets_its_deadline_while_the_broker_is_paused(
    own_broker, own_settings, own_log
):
    data = open_data_log(own_settings)
    data.describe(["x"], TIMEOUT_MS)
    own_broker.pause()
    own_log.append(0, b"never mind")
    start = time.monotonic()
    own_log.close(300)
    with pytest.raises(CoordinationError):
        data.describe(["x"], 300)
    data.close(300)
    assert not is_over(start, 0.9 + 2 * LATE_S)
    own_broker.resume()


def test_reading_a_recreated_topic_raises_log_truncated(
    own_broker, own_settings, own_log
):
    name = own_settings.coordination_topic
    for _ in range(5):
        until(lambda: sent(own_log, b"old"))
    read(own_log, 5)
    admin = KafkaAdminClient(bootstrap_servers=own_broker.bootstrap_servers)
    admin.delete_topics([name])
    with KafkaTopicAdmin(own_settings) as topics:
        until(lambda: not topics.describe_bare(name).exists)
        topics.create_coordination_topic(partitions=2)
        assert topics.describe_bare(name).topic_id != own_log.topic_id
    admin.close()
    fails(lambda: own_log.poll(200), LogTruncated)


# --- Security ------------------------------------------------------------------------

JAAS = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    'username="admin" password="admin-secret" '
    'user_admin="admin-secret" user_app="app-secret" user_reader="reader-secret";'
)
SECURED = {
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN",
    "sasl.mechanism.inter.broker.protocol": "PLAIN",
    "listener.name.plaintext.plain.sasl.jaas.config": JAAS,
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:admin;User:ANONYMOUS",
}


def as_user(
    broker, user: str, *, password: str = "", transport: str = "auto"
) -> ConnectionConfig:
    return ConnectionConfig(
        broker.bootstrap_servers,
        transport=transport,
        options={
            "security.protocol": "sasl_plaintext",
            "sasl.mechanisms": "PLAIN",
            "sasl.username": user,
            "sasl.password": password or f"{user}-secret",
        },
    )


@pytest.fixture(scope="module")
def guarded():
    """A broker with users, whose log has one record and may be read by a reader."""
    with EmbeddedBroker(properties=SECURED) as broker:
        with KafkaTopicAdmin(as_user(broker, "admin")) as admin:
            admin.create_coordination_topic(partitions=1)
        log = open_coordination_log(as_user(broker, "admin"))
        until(lambda: sent(log, b"x"))
        log.close(TIMEOUT_MS)
        _allow_reading(broker, "reader")
        yield broker


def test_kinds_of_refusals_are_distinguished(guarded, transport):
    wrong = as_user(guarded, "admin", password="guess", transport=transport)
    with pytest.raises(LogUnreadable, match="sasl_mechanism") as caught:
        open_coordination_log(wrong, timeout_ms=TIMEOUT_MS)
    assert "guess" not in str(caught.value)
    # Without the right to describe it, a topic seems not to exist.
    with pytest.raises((LogUnreadable, TopicMisconfigured)):
        open_coordination_log(
            as_user(guarded, "app", transport=transport), timeout_ms=TIMEOUT_MS
        )
    settings = as_user(guarded, "reader", transport=transport)
    log = open_coordination_log(settings, timeout_ms=TIMEOUT_MS)
    assert [entry.value for _, entry in read(log, 1)] == [b"x"]
    append = log.append(0, b"forbidden")
    until(append.is_done)
    assert isinstance(append.error(), LogUnwritable)
    log.close(TIMEOUT_MS)


def test_a_missing_right_to_create_topics_is_an_error(guarded):
    with (
        KafkaTopicAdmin(as_user(guarded, "app")) as admin,
        pytest.raises(LogUnwritable),
    ):
        admin.create("mine", partitions=1, replication=1, configs={})


def _allow_reading(broker, user: str) -> None:
    from kafka.admin import (
        ACL,
        ACLOperation,
        ACLPermissionType,
        ACLResourcePatternType,
        ResourcePattern,
        ResourceType,
    )

    admin = KafkaAdminClient(**as_user(broker, "admin").client_config())
    pattern = ResourcePattern(
        ResourceType.TOPIC, "__marshal", ACLResourcePatternType.LITERAL
    )
    admin.create_acls(
        [
            ACL(
                principal=f"User:{user}",
                host="*",
                operation=operation,
                permission_type=ACLPermissionType.ALLOW,
                resource_pattern=pattern,
            )
            for operation in (ACLOperation.READ, ACLOperation.DESCRIBE)
        ]
    )
    admin.close()
