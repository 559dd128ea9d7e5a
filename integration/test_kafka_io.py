"""The Kafka clients: topics, opening, odd records, groups, processes."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest
from domain import opened
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient
from logs import LATE_S, TIMEOUT_MS, read, sent
from slices import HANG_S
from slowness import is_over, until
from waiting import subscribed

from kafka_marshal.errors import (
    CoordinationError,
    InvalidTransition,
    TopicMisconfigured,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topic_rules import MESSAGE_BYTES_MIN, problems
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.kafka_io.transport import open_coordination_log, open_data_log
from kafka_marshal.kafka_io.writer import writer_timeouts
from kafka_marshal.protocol.codec import FRAME_BYTES_MAX
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.testing.broker import free_ports

UNTOUCHED = Path(__file__).parents[1] / "tests" / "support" / "untouched.py"


class BadText(str):
    """A header name that no decoder accepts."""

    __slots__ = ()

    def encode(self, *_):
        return b"\xff\xfe"


@pytest.fixture
def place(bootstrap_servers, unique):
    """A topic's name on the broker, whichever the transport."""
    return ConnectionConfig(bootstrap_servers, coordination_topic=unique("marshal"))


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


def test_a_created_coordination_topic_has_no_problems(topics, place):
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


def test_wrong_topic_settings_are_named(topics, unique):
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
    assert [problem.setting for problem in found] == [
        "cleanup.policy",
        "compression.type",
        "message.timestamp.type",
        "unclean.leader.election.enable",
        "retention.ms",
        "retention.bytes",
        "max.message.bytes",
    ]


def test_a_burst_of_appends_fits_the_least_message_limit(topics, settings):
    """A batch that the topic refuses would end the process and its claims."""
    limit = {"max.message.bytes": str(MESSAGE_BYTES_MIN)}
    name = settings.coordination_topic
    topics.create(name, partitions=1, replication=1, configs=limit)
    log = open_coordination_log(settings)
    sizes = [FRAME_BYTES_MAX] * 3 + [10_000] * 30 + [100] * 1_000
    appends = [log.append(0, os.urandom(size)) for size in sizes]
    until(lambda: all(each.is_done() for each in appends), "they are done")
    log.close(TIMEOUT_MS)
    assert {str(each.error()) for each in appends} == {"None"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"replication": 7}, "[Rr]eplication", id="replication"),
        pytest.param({"configs": {"no.such": "1"}}, "no.such", id="config"),
        pytest.param({"partitions": 0}, "0 partitions", id="partitions"),
    ],
)
def test_topics_that_cannot_be_created_are_refused(topics, unique, change, words):
    spec = {"partitions": 1, "replication": 1, "configs": {}} | change
    with pytest.raises(TopicMisconfigured, match=words):
        topics.create(unique("odd"), **spec)


# --- Opening -------------------------------------------------------------------------


def test_a_missing_topic_raises_with_the_format_command(settings):
    with pytest.raises(TopicMisconfigured, match="marshal topic format"):
        open_coordination_log(settings)


def test_an_unreachable_cluster_is_an_error_in_time():
    (port,) = free_ports(1)
    settings = ConnectionConfig(f"127.0.0.1:{port}")
    before = set(threading.enumerate())
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
    assert not is_over(start, 2 + 3 * LATE_S)
    # kafka-python does not end the thread of a client that could not be made.
    until(
        lambda: (
            not any(
                "marshal" in each.name for each in set(threading.enumerate()) - before
            )
        )
    )


def test_a_log_has_its_partition_count_cluster_id_and_topic_id(log, topics, settings):
    assert log.partition_count == 2
    assert log.cluster_id == topics.cluster_id()
    assert log.topic_id == topics.describe(settings.coordination_topic).topic_id


def test_configure_keeps_the_order_of_appends(log):
    log.append(0, b"before")
    log.configure(2_000)
    log.configure(2_000)
    assert log.writer._timeouts == writer_timeouts(2_000)
    # Appends are refused while an earlier one has no outcome.
    until(lambda: sent(log, b"after"))
    assert [entry.value for _, entry in read(log, 2)] == [b"before", b"after"]


@pytest.mark.parametrize("heartbeat_interval_ms", [1, 20, 100, 2_000, 60_000, 600_000])
def test_the_producer_accepts_writer_timeouts_of_any_interval(
    settings, topics, heartbeat_interval_ms
):
    topics.create_coordination_topic(partitions=1)
    log = open_coordination_log(settings, heartbeat_interval_ms=heartbeat_interval_ms)
    assert log.writer._timeouts == writer_timeouts(heartbeat_interval_ms)
    append = log.append(0, b"x")
    until(append.is_done)
    # Not all of these leave time for an answer.
    assert append.error() is None or append.error().retriable
    log.close(TIMEOUT_MS)


# --- Odd records ---------------------------------------------------------------------


def test_control_records_are_skipped(log, settings, bootstrap_servers, unique):
    writer = KafkaProducer(
        bootstrap_servers=bootstrap_servers, transactional_id=unique("transaction")
    )
    writer.init_transactions()
    writer.begin_transaction()
    writer.send(settings.coordination_topic, b"x", partition=0).get(60)
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
    writer.send(settings.coordination_topic, b"open", partition=0).get(60)
    log.append(0, b"ours")
    assert [entry.value for _, entry in read(log, 2)] == [b"open", b"ours"]
    assert log.end_offsets(TIMEOUT_MS)[0] == 2
    writer.abort_transaction()
    writer.close(timeout=5)


def test_a_header_name_that_is_not_text_stops_no_reader(log, settings, producer):
    producer.send(
        settings.coordination_topic, b"x", headers=[(BadText("h"), b"v")], partition=0
    ).get(60)
    log.append(0, b"ours")
    assert [entry.value for _, entry in read(log, 2)] == [b"x", b"ours"]


def test_compressed_records_are_stored_uncompressed(log, settings, bootstrap_servers):
    packed = KafkaProducer(bootstrap_servers=bootstrap_servers, compression_type="gzip")
    packed.send(settings.coordination_topic, b"x" * 1_000, partition=0).get(60)
    packed.close(timeout=5)
    with KafkaTopicAdmin(settings) as admin:
        found = admin.describe(settings.coordination_topic)
    assert found.configs["compression.type"] == "uncompressed"
    assert [entry.value for _, entry in read(log, 1)] == [b"x" * 1_000]


def test_invalid_bytes_of_a_header_name_become_replacement_characters(
    settings, topics, producer, unique
):
    topic = unique("data")
    topics.create_data_topic(topic, partitions=1)
    place = TopicPartition(topic, 0)
    producer.send(topic, b"x", headers=[(BadText("h"), b"v")], partition=0).get(60)
    producer.send(topic, b"y", partition=0).get(60)
    reader = open_data_log(settings).reader()
    reader.assign([place])
    reader.seek(place, 0)
    found = []
    until(lambda: found.extend(reader.poll(200, 10).get(place, ())) or len(found) == 2)
    assert [record.value for record in found] == [b"x", b"y"]
    # Often, because Python optimizes code that has run often.
    assert all(found[1].headers == () for _ in range(200))
    ((name, value),) = found[0].headers
    assert "\ufffd" in name
    assert value == b"v"
    reader.close(TIMEOUT_MS)


def test_read_committed_omits_aborted_records(
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
        writer.send(topic, value, partition=0).get(60)
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
        reader = open_data_log(settings).reader(isolation_level=level)
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


def test_opening_clients_changes_nothing_in_kafka_python(broker, unique):
    """An application that uses the library as well finds it unchanged."""
    with opened(broker, unique) as domain:
        topic = domain.data_topic(1, records_each=1)
        names = (domain.servers, topic, domain.topic)
        done = subprocess.run(
            [sys.executable, UNTOUCHED, *names],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=HANG_S,
        )
    assert done.stdout == ""


# --- Groups, processes ---------------------------------------------------------------


def test_commit_beside_active_members_is_refused(
    settings, topics, bootstrap_servers, unique
):
    topic, group = unique("data"), unique("group")
    topics.create_data_topic(topic, partitions=1)
    place = TopicPartition(topic, 0)
    member = subscribed(topic, bootstrap_servers=bootstrap_servers, group_id=group)
    until(lambda: member.poll(100) == {} and bool(member.assignment()))
    data = open_data_log(settings)
    with pytest.raises(CoordinationError, match="active members"):
        data.commit(group, {place: 1}, timeout_ms=TIMEOUT_MS)
    member.close()
    data.commit(group, {place: 1}, timeout_ms=TIMEOUT_MS)
    assert data.committed(group, [place], timeout_ms=TIMEOUT_MS) == {place: 1}
    data.close(TIMEOUT_MS)


def test_clients_are_refused_in_a_forked_child(log, settings, topics, unique):
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
        # Closing is allowed, and does not affect the parent.
        log.close(100)
        data.close(100)
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(calls)
    log.append(0, b"parent")
    assert [entry.value for _, entry in read(log, 1)] == [b"parent"]
    data.close(TIMEOUT_MS)


def test_reading_a_deleted_data_partition_returns_no_records(topics, settings, unique):
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
