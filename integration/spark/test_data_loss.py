"""Offsets that became invalid: topics recreated or deleted, logs truncated."""

import shutil
from functools import partial

import pytest
import spark_program
from domain import opened
from pyspark import cloudpickle
from sparkkit import cells, committed, every, keeping
from waiting import eventually

from kafka_marshal import PositionError, TopicPartition
from kafka_marshal.grants import close_grant_clients
from kafka_marshal.spark import fetch
from kafka_marshal.spark.options import parse
from kafka_marshal.spark.planning import Task
from kafka_marshal.spark.query import Cluster
from kafka_marshal.spark.rows import columns
from kafka_marshal.spark.sinks_files import FileSink
from kafka_marshal.spark.sinks_kafka import KafkaSink
from kafka_marshal.spark.sinks_table import TableSink
from kafka_marshal.testing.broker import EmbeddedBroker

H_MS = 2_000


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Where the broker keeps its data."""
    return tmp_path_factory.mktemp("broker")


@pytest.fixture(scope="module")
def own_broker(files):
    """A broker whose files a test may change while it is down."""
    with EmbeddedBroker(data_dir=files) as broker:
        yield broker


@pytest.fixture(scope="module")
def domain(own_broker, unique):
    with opened(own_broker, unique, h_ms=H_MS) as domain:
        yield domain


def recreate(domain, topic, count):
    domain.kafka.delete_topics([topic])
    eventually(lambda: not domain.topics.describe(topic).exists, "the topic's end")
    domain.topics.create_data_topic(topic, partitions=1, replication=1)
    domain.produced[TopicPartition(topic, 0)] = 0
    domain.produce(topic, count)


@pytest.mark.parametrize("count", [60, 20], ids=["longer", "equal"])
def test_a_restart_on_a_recreated_topic_ends_or_reads_all_of_it(
    kit, domain, unique, count
):
    topic, group = domain.data_topic(1, records_each=20), unique("group")
    found = kit.drained(kit.stream(group, subscribe=topic))
    assert cells(found) == every(20)
    recreate(domain, topic, count)
    with pytest.raises(Exception, match="deleted and created again"):
        kit.drained(kit.stream(group, subscribe=topic))
    lenient = kit.stream(group, subscribe=topic, failOnDataLoss="false")
    assert cells(kit.drained(lenient)) == every(count)
    assert kit.drained(lenient) == []


@pytest.fixture
def by_value():
    cloudpickle.register_pickle_by_value(spark_program)
    yield
    cloudpickle.unregister_pickle_by_value(spark_program)
    close_grant_clients()


@pytest.mark.usefixtures("by_value")
def test_sinks_write_all_of_a_recreated_topic(kit, domain, database, unique, tmp_path):
    topic, out = domain.data_topic(1, records_each=20), domain.data_topic(1)
    options = {
        **kit.cluster,
        "subscribe": topic,
        "group": unique("group"),
        "startingOffsets": "earliest",
        "stateDir": "",
        "includeToken": "true",
        "failOnDataLoss": "false",
    }
    table = TableSink(
        partial(spark_program.connect, database.dsn),
        spark_program.insert,
        options["group"],
    )
    table.create()
    files = FileSink.of(options, path=tmp_path / "files")
    sinks = [table, files, KafkaSink.of(options, topic=out)]

    def write(rows, batch_id):
        for sink in sinks:
            sink(rows, batch_id)

    frame = kit.spark.readStream.format("marshal").options(**options).load()
    kit.ended(frame, write)
    # Not longer than the first: all of its offsets were written before.
    recreate(domain, topic, 12)
    kit.ended(frame, write)
    wanted = sorted([*range(20), *range(12)])
    with database.connect() as connection:
        found = connection.execute(
            "SELECT number FROM rows_of_spark WHERE topic = %s", (topic,)
        ).fetchall()
    assert sorted(number for (number,) in found) == wanted
    rows = files.read(kit.spark).select("offset", "topicId").collect()
    assert sorted(row.offset for row in rows) == wanted
    assert len({row.topicId for row in rows}) == 2
    assert committed(domain, out, len(wanted)) == wanted


def test_a_query_continues_without_a_deleted_topic_of_its_pattern(kit, domain, unique):
    gone, kept = domain.data_topic(1, records_each=20), domain.data_topic(1)
    found = []
    pattern = {"subscribePattern": f"{gone}|{kept}"}
    group = unique("group")
    frame = kit.stream(group, **pattern, failOnDataLoss="false")
    query = kit.started(frame, keeping(found))
    try:
        query.processAllAvailable()
        domain.kafka.delete_topics([gone])
        eventually(lambda: not domain.topics.describe(gone).exists, "the topic's end")
        domain.produce(kept, 5)
        eventually(lambda: len(found) == 25 or not query.isActive, "the other topic")
        query.processAllAvailable()
    finally:
        query.stop()
    assert cells(found) == sorted([*every(20), *every(5)])
    with pytest.raises(Exception, match="the query does not read it"):
        kit.drained(kit.stream(group, **pattern))
    assert kit.drained(frame) == []


def test_partitions_of_a_deleted_topic_have_no_ends(domain):
    """A query plans its next batch without them, at once."""
    gone, kept = domain.data_topic(1, records_each=20), domain.data_topic(1)
    places = [TopicPartition(name, 0) for name in (gone, kept)]
    servers = {"kafka.bootstrap.servers": domain.servers}
    cluster = Cluster(parse(servers | {"subscribe": f"{gone},{kept}"}))
    try:
        assert cluster.ends(places) == {places[0]: 20, places[1]: 0}
        domain.kafka.delete_topics([gone])
        eventually(lambda: not domain.topics.describe(gone).exists, "the topic's end")
        assert cluster.ends(places) == cluster.starts(places) == {places[1]: 0}
    finally:
        cluster.close()


def test_reading_a_deleted_topic_raises_with_its_name(domain):
    """Also over a connection that has read the topic before."""
    place = TopicPartition(domain.data_topic(1, records_each=20), 0)
    task = Task(partition=place, first=0, end=20)
    given = {"kafka.bootstrap.servers": domain.servers, "subscribe": place.topic}
    schema = columns(has_headers=False, has_token=False)
    assert sum(rows.num_rows for rows in fetch.read(task, parse(given), schema=schema))
    domain.kafka.delete_topics([place.topic])
    eventually(lambda: not domain.topics.describe(place.topic).exists, "its end")
    with pytest.raises(PositionError, match=f"topic {place.topic} was deleted"):
        list(fetch.read(task, parse(given), schema=schema))
    lenient = parse(given | {"failOnDataLoss": "false"})
    assert list(fetch.read(task, lenient, schema=schema)) == []


def cut_off(domain, broker, *, files, topic):
    """Let a log start again empty, as after the loss of a disk."""
    broker.stop()
    shutil.rmtree(files / "data" / f"{topic}-0")
    broker.start()
    domain.produced[TopicPartition(topic, 0)] = 0


def test_a_truncated_log_ends_the_query_or_is_read_from_its_start(
    kit, domain, own_broker, files, unique
):
    topic, group = domain.data_topic(1, records_each=20), unique("group")
    found = []
    frame = kit.stream(
        group, subscribe=topic, failOnDataLoss="false", clientId=unique("client")
    )
    assert cells(kit.drained(frame)) == every(20)
    cut_off(domain, own_broker, files=files, topic=topic)
    domain.produce(topic, 5)
    with pytest.raises(Exception, match="its log ends at 5"):
        kit.drained(kit.stream(group, subscribe=topic))
    query = kit.started(frame, keeping(found))
    try:
        query.processAllAvailable()
        domain.produce(topic, 20)
        query.processAllAvailable()
    finally:
        query.stop()
    assert cells(found) == every(25)


def test_a_batch_planned_before_its_topic_was_recreated_is_not_read(kit, domain):
    """A worker that is reused has read the old topic over the same connection."""
    topic = domain.data_topic(1, records_each=20)
    whole = kit.batch(subscribe=topic, failOnDataLoss="false")
    assert whole.count() == 20
    strict = kit.batch(subscribe=topic)
    lenient = kit.batch(subscribe=topic, failOnDataLoss="false")
    assert strict.rdd.getNumPartitions() == lenient.rdd.getNumPartitions() == 1
    recreate(domain, topic, 60)
    with pytest.raises(Exception, match="deleted and created again"):
        strict.collect()
    assert lenient.collect() == []
    assert kit.batch(subscribe=topic).count() == 60
