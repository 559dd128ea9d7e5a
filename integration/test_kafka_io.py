"""The Kafka side under faults: restarts, pauses, refusals, forks, odd records."""

import os
import threading
import time
from collections.abc import Callable

import attrs
import pytest
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaPartition
from kafka.admin import KafkaAdminClient

from kafka_marshal.errors import (
    CoordinationError,
    InvalidTransition,
    LogTruncated,
    LogUnreadable,
    LogUnwritable,
    MarshalError,
    TopicMisconfigured,
)
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin, problems
from kafka_marshal.kafka_io.transport import open_coordination_log, open_data_log
from kafka_marshal.kafka_io.writer import writer_timeouts
from kafka_marshal.ports import CoordinationLog
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.testing.broker import EmbeddedBroker, free_ports

TIMEOUT_MS = 10_000
LATE_S = 2.0


class BadText(str):
    """A header name that no decoder accepts."""

    __slots__ = ()

    def encode(self, *_):
        return b"\xff\xfe"


def until(condition: Callable[[], bool], *, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def read(log: CoordinationLog, count: int, *, timeout_s: float = 30) -> list:
    found: list = []

    def has_all() -> bool:
        found.extend(log.poll(100))
        return len(found) >= count

    until(has_all, timeout_s=timeout_s)
    return found


def fails(call: Callable[[], object], kind: type[MarshalError]) -> MarshalError:
    """Call until it raises; return what it raised."""
    caught: list[MarshalError] = []

    def is_refused() -> bool:
        try:
            call()
        except kind as error:
            caught.append(error)
        return bool(caught)

    until(is_refused)
    return caught[0]


@pytest.fixture
def place(bootstrap_servers, unique):
    """A topic's name on the broker, whichever the transport."""
    return ConnectionSettings(bootstrap_servers, coordination_topic=unique("marshal"))


@pytest.fixture
def settings(place, transport):
    return attrs.evolve(place, transport=transport)


@pytest.fixture
def topics(place):
    with KafkaTopicAdmin(place) as admin:
        yield admin


@pytest.fixture
def producer(bootstrap_servers):
    made = KafkaProducer(bootstrap_servers=bootstrap_servers)
    yield made
    made.close(timeout=5)


@pytest.fixture
def log(settings, topics):
    topics.create_coordination_topic(partitions=2)
    with_log = open_coordination_log(settings)
    yield with_log
    with_log.close(TIMEOUT_MS)


# --- Topics --------------------------------------------------------------------------


def test_coordination_topic_is_made_right(topics, place):
    info = topics.cluster()
    assert len(info.brokers) == 1
    assert info.controller_id == 1
    assert topics.cluster_id() == info.cluster_id
    topics.create_coordination_topic(partitions=4)
    found = topics.describe(place.coordination_topic)
    assert (found.exists, found.partition_count, found.replication) == (True, 4, 1)
    assert problems(found, broker_count=1) == ()
    assert len(found.topic_id) == 16
    with pytest.raises(TopicMisconfigured, match="already exists"):
        topics.create_coordination_topic(partitions=4)


def test_wrong_settings_are_named(topics, unique):
    name = unique("wrong")
    topics.create(
        name,
        partitions=1,
        replication=1,
        configs={
            "cleanup.policy": "compact",
            "message.timestamp.type": "CreateTime",
            "retention.ms": "1000",
            "retention.bytes": "1000",
            "unclean.leader.election.enable": "true",
            "max.message.bytes": "1000",
        },
    )
    found = problems(topics.describe(name), broker_count=1)
    assert [line.split()[0] for line in found] == [
        "cleanup.policy",
        "compression.type",
        "message.timestamp.type",
        "unclean.leader.election.enable",
        "retention.ms",
        "retention.bytes",
        "max.message.bytes",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"replication": 7}, "[Rr]eplication", id="replication"),
        pytest.param({"configs": {"no.such": "1"}}, "no.such", id="config"),
        pytest.param({"partitions": 0}, "0 partitions", id="partitions"),
    ],
)
def test_impossible_topics_are_refused(topics, unique, change, words):
    spec = {"partitions": 1, "replication": 1, "configs": {}} | change
    with pytest.raises(TopicMisconfigured, match=words):
        topics.create(unique("odd"), **spec)


# --- Opening -------------------------------------------------------------------------


def test_missing_topic_names_the_command(settings):
    with pytest.raises(TopicMisconfigured, match="marshal topic format"):
        open_coordination_log(settings)


def test_unreachable_cluster_is_told_in_time():
    (port,) = free_ports(1)
    settings = ConnectionSettings(f"127.0.0.1:{port}")
    start = time.monotonic()
    with pytest.raises(CoordinationError, match=str(port)):
        open_coordination_log(settings, timeout_ms=500)
    data = open_data_log(settings)
    with pytest.raises(CoordinationError, match=str(port)):
        data.describe(["x"], 500)
    data.close(500)
    reader = open_data_log(settings).reader()
    place = TopicPartition("x", 0)
    reader.assign([place])
    reader.seek(place, 0)
    assert reader.poll(500, 1) == {}
    reader.close(500)
    assert time.monotonic() - start < 2 + 3 * LATE_S
    # kafka-python leaves the thread of a client that could not be made.
    until(lambda: not any("marshal" in each.name for each in threading.enumerate()))


def test_log_knows_where_it_is(log, topics, settings):
    assert log.partition_count == 2
    assert log.cluster_id == topics.cluster_id()
    assert log.topic_id == topics.describe(settings.coordination_topic).topic_id


def test_configure_keeps_order(log):
    log.append(0, b"before")
    log.configure(2_000)
    log.configure(2_000)
    assert log.writer.timeouts == writer_timeouts(2_000)
    # Refused while what went before it has no outcome.
    until(lambda: _sent(log, b"after"))
    assert [entry.value for _, entry in read(log, 2)] == [b"before", b"after"]


@pytest.mark.parametrize("heartbeat_interval_ms", [1, 20, 100, 2_000, 60_000, 600_000])
def test_writer_timeouts_suit_the_producer(settings, topics, heartbeat_interval_ms):
    topics.create_coordination_topic(partitions=1)
    log = open_coordination_log(settings, heartbeat_interval_ms=heartbeat_interval_ms)
    assert log.writer.timeouts == writer_timeouts(heartbeat_interval_ms)
    append = log.append(0, b"x")
    until(append.is_done)
    # Not all of these leave time for an answer.
    assert append.error() is None or append.error().retriable
    log.close(TIMEOUT_MS)


# --- Odd records ---------------------------------------------------------------------


def test_control_records_are_passed(log, settings, bootstrap_servers, unique):
    writer = KafkaProducer(
        bootstrap_servers=bootstrap_servers, transactional_id=unique("transaction")
    )
    writer.init_transactions()
    writer.begin_transaction()
    writer.send(settings.coordination_topic, b"x", partition=0).get(10)
    writer.commit_transaction()
    writer.close(timeout=5)
    entries = []

    def is_at_end() -> bool:
        entries.extend(log.poll(100))
        # The marker follows the commit's answer; it is an offset of its own.
        end = log.end_offsets(TIMEOUT_MS)[0]
        return end == 2 == log.positions()[0]

    until(is_at_end)
    assert [entry.value for _, entry in entries] == [b"x"]


def test_open_transaction_does_not_hold_up_readers(
    log, settings, bootstrap_servers, unique
):
    writer = KafkaProducer(
        bootstrap_servers=bootstrap_servers, transactional_id=unique("transaction")
    )
    writer.init_transactions()
    writer.begin_transaction()
    writer.send(settings.coordination_topic, b"open", partition=0).get(10)
    log.append(0, b"ours")
    assert [entry.value for _, entry in read(log, 2)] == [b"open", b"ours"]
    assert log.end_offsets(TIMEOUT_MS)[0] == 2
    writer.abort_transaction()
    writer.close(timeout=5)


def test_header_name_that_is_no_text_stops_no_reader(log, settings, producer):
    producer.send(
        settings.coordination_topic, b"x", headers=[(BadText("h"), b"v")], partition=0
    ).get(10)
    log.append(0, b"ours")
    assert [entry.value for _, entry in read(log, 2)] == [b"x", b"ours"]


def test_codec_that_readers_lack_is_unpacked_by_the_broker(
    log, settings, bootstrap_servers
):
    packed = KafkaProducer(bootstrap_servers=bootstrap_servers, compression_type="gzip")
    packed.send(settings.coordination_topic, b"x" * 1_000, partition=0).get(10)
    packed.close(timeout=5)
    with KafkaTopicAdmin(settings) as admin:
        found = admin.describe(settings.coordination_topic)
    assert found.configs["compression.type"] == "uncompressed"
    assert [entry.value for _, entry in read(log, 1)] == [b"x" * 1_000]


def test_header_name_of_a_data_record_is_shown_with_marks(
    settings, topics, producer, unique
):
    topic = unique("data")
    topics.create_data_topic(topic, partitions=1)
    place = TopicPartition(topic, 0)
    producer.send(topic, b"x", headers=[(BadText("h"), b"v")], partition=0).get(10)
    producer.send(topic, b"y", partition=0).get(10)
    reader = open_data_log(settings).reader()
    reader.assign([place])
    reader.seek(place, 0)
    found = []
    until(lambda: found.extend(reader.poll(200, 10).get(place, ())) or len(found) == 2)
    assert [record.value for record in found] == [b"x", b"y"]
    ((name, value),) = found[0].headers
    assert "\ufffd" in name
    assert value == b"v"
    reader.close(TIMEOUT_MS)


def test_read_committed_hides_what_was_aborted(
    settings, topics, bootstrap_servers, unique
):
    topic = unique("data")
    topics.create_data_topic(topic, partitions=1)
    place = TopicPartition(topic, 0)
    writer = KafkaProducer(
        bootstrap_servers=bootstrap_servers, transactional_id=unique("transaction")
    )
    writer.init_transactions()
    for value in (b"aborted", b"committed"):
        writer.begin_transaction()
        writer.send(topic, value, partition=0).get(10)
        end = (
            writer.abort_transaction
            if value == b"aborted"
            else writer.commit_transaction
        )
        end()
    writer.close(timeout=5)
    for level, wanted in (
        ("read_committed", [b"committed"]),
        ("read_uncommitted", [b"aborted", b"committed"]),
    ):
        reader = open_data_log(settings, isolation_level=level).reader()
        reader.assign([place])
        reader.seek(place, 0)
        found: list[bytes | None] = []

        def has_all(reader=reader, found=found, wanted=wanted) -> bool:
            for records in reader.poll(200, 10).values():
                found.extend(record.value for record in records)
            return len(found) >= len(wanted)

        until(has_all)
        assert found == wanted
        reader.close(TIMEOUT_MS)


# --- Groups, processes ---------------------------------------------------------------


def test_commit_beside_active_members_is_refused(
    settings, topics, bootstrap_servers, unique
):
    topic, group = unique("data"), unique("group")
    topics.create_data_topic(topic, partitions=1)
    place = TopicPartition(topic, 0)
    # Brokers may not know the new topic yet: look again soon.
    member = KafkaConsumer(
        topic,
        bootstrap_servers=bootstrap_servers,
        group_id=group,
        metadata_max_age_ms=500,
    )
    until(lambda: member.poll(100) == {} and bool(member.assignment()))
    data = open_data_log(settings)
    with pytest.raises(CoordinationError, match="active members"):
        data.commit(group, {place: 1}, timeout_ms=5_000)
    member.close()
    data.commit(group, {place: 1}, timeout_ms=TIMEOUT_MS)
    assert data.committed(group, [place], timeout_ms=TIMEOUT_MS) == {place: 1}
    data.close(TIMEOUT_MS)


def test_forked_child_is_refused(log, settings, topics, unique):
    topic = unique("data")
    topics.create_data_topic(topic, partitions=1)
    data = open_data_log(settings)
    reader = data.reader()
    calls = [
        lambda: log.append(0, b"child"),
        lambda: log.poll(0),
        lambda: log.end_offsets(100),
        lambda: log.configure(1_000),
        lambda: data.describe([topic], 100),
        lambda: reader.assign([TopicPartition(topic, 0)]),
    ]
    child = os.fork()
    if child == 0:
        refused = 0
        for call in calls:
            try:
                call()
            except InvalidTransition:
                refused += 1
        # Closing is allowed, and touches nothing of the parent's.
        log.close(100)
        data.close(100)
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(calls)
    log.append(0, b"parent")
    assert [entry.value for _, entry in read(log, 1)] == [b"parent"]
    data.close(TIMEOUT_MS)


# --- Faults of the broker ------------------------------------------------------------


@pytest.fixture(scope="module")
def own_broker():
    """A broker for tests that break it, and leave it running."""
    with EmbeddedBroker() as started:
        yield started


@pytest.fixture
def own_settings(own_broker, unique, transport):
    return ConnectionSettings(
        own_broker.bootstrap_servers, unique("marshal"), transport=transport
    )


@pytest.fixture
def own_log(own_settings):
    settings = own_settings
    with KafkaTopicAdmin(settings) as admin:
        admin.create_coordination_topic(partitions=2)
    log = open_coordination_log(settings, heartbeat_interval_ms=2_000)
    yield log
    log.close(1_000)


def test_killed_broker_comes_back(own_broker, own_log):
    own_log.append(0, b"first")
    ((_, first),) = read(own_log, 1)
    own_broker.kill()
    start = time.monotonic()
    append = own_log.append(0, b"while away")
    assert time.monotonic() - start < LATE_S
    until(append.is_done, timeout_s=5)
    assert isinstance(append.error(), CoordinationError)
    start = time.monotonic()
    assert list(own_log.poll(300)) == []
    with pytest.raises(CoordinationError):
        own_log.end_offsets(500)
    assert time.monotonic() - start < 0.8 + 2 * LATE_S
    own_broker.restart()
    until(lambda: _sent(own_log, b"second"))
    entries = [entry for _, entry in read(own_log, 1) if entry.value == b"second"]
    # Each start is a new leader epoch, and the log goes on where it was.
    assert entries[0].leader_epoch > first.leader_epoch
    assert entries[0].offset > first.offset


def _sent(log: CoordinationLog, value: bytes, *, partition: int = 0) -> bool:
    append = log.append(partition, value)
    until(append.is_done)
    return append.error() is None


def test_append_reported_failed_may_land(own_broker, own_log):
    """PROTOCOL 1.4: a failed append is unknown; the log answers."""
    assert _sent(own_log, b"warm")
    read(own_log, 1)
    own_broker.pause()
    append = own_log.append(0, b"late")
    until(append.is_done, timeout_s=5)
    assert append.error() is not None
    assert append.offset() is None
    own_broker.resume()
    # Sent into a socket that stayed open: it lands although it was given up.
    entries = read(own_log, 1)
    assert entries[0][1].value == b"late"


def test_writer_recovers_from_a_pause(own_broker, own_log):
    """kafka-python's own producer sends nothing more after this."""
    own_broker.pause()
    append = own_log.append(0, b"lost or late")
    until(append.is_done, timeout_s=3)
    assert append.error() is not None
    assert own_log.append(0, b"refused at once").is_done()
    own_broker.resume()
    for partition in (0, 1):
        until(lambda p=partition: _sent(own_log, b"after", partition=p))
    until(lambda: any(e.value == b"after" for _, e in own_log.poll(100)))
    assert append.error() is not None


def test_close_is_in_time_while_the_broker_is_away(own_broker, own_settings, own_log):
    data = open_data_log(own_settings)
    data.describe(["x"], TIMEOUT_MS)
    own_broker.pause()
    own_log.append(0, b"never mind")
    start = time.monotonic()
    own_log.close(300)
    with pytest.raises(CoordinationError):
        data.describe(["x"], 300)
    data.close(300)
    assert time.monotonic() - start < 0.9 + 2 * LATE_S
    own_broker.resume()


def test_recreated_topic_is_no_continuation(own_broker, own_settings, own_log):
    name = own_settings.coordination_topic
    for _ in range(5):
        own_log.append(0, b"old")
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
) -> ConnectionSettings:
    return ConnectionSettings(
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
        assert _sent(log, b"x")
        log.close(TIMEOUT_MS)
        _allow_reading(broker, "reader")
        yield broker


def test_refusals_are_told_apart(guarded, transport):
    wrong = as_user(guarded, "admin", password="guess", transport=transport)
    with pytest.raises(LogUnreadable, match="sasl_mechanism") as caught:
        open_coordination_log(wrong, timeout_ms=3_000)
    assert "guess" not in str(caught.value)
    # Who may not describe a topic is told that there is none.
    with pytest.raises((LogUnreadable, TopicMisconfigured)):
        open_coordination_log(
            as_user(guarded, "app", transport=transport), timeout_ms=5_000
        )
    settings = as_user(guarded, "reader", transport=transport)
    log = open_coordination_log(settings, timeout_ms=10_000)
    assert [entry.value for _, entry in read(log, 1)] == [b"x"]
    append = log.append(0, b"forbidden")
    until(append.is_done)
    assert isinstance(append.error(), LogUnwritable)
    log.close(TIMEOUT_MS)


def test_who_may_not_create_topics_is_told(guarded):
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


def test_data_partition_that_was_deleted_is_asked_for_again(topics, settings, unique):
    """A reader of a topic that goes away finds nothing; it does not fail for good."""
    topic = unique("data")
    topics.create_data_topic(topic, partitions=1)
    place = TopicPartition(topic, 0)
    reader = open_data_log(settings).reader()
    reader.assign([place])
    reader.seek(place, 0)
    assert reader.poll(200, 1) == {}
    admin = KafkaAdminClient(bootstrap_servers=list(settings.bootstrap_servers))
    admin.delete_topics([topic])
    admin.close()
    assert reader.poll(200, 1) == {}
    reader.close(TIMEOUT_MS)
    assert KafkaPartition(*place) == place
