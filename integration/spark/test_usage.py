"""Documented uses: sinks that fail, splits, joins of two streams, two sources."""

from functools import partial
from pathlib import Path

import pytest
import spark_program
from domain import opened
from kafka import KafkaProducer
from pyspark import cloudpickle
from pyspark.sql import functions as f
from sparkkit import cells, every, keeping

from kafka_marshal.grants import close_grant_clients
from kafka_marshal.spark.sinks_files import FileSink
from kafka_marshal.spark.sinks_table import TableSink

H_MS = 10_000
EACH = 40


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS) as domain:
        yield domain
    close_grant_clients()


@pytest.fixture(scope="module", autouse=True)
def by_value():
    cloudpickle.register_pickle_by_value(spark_program)
    yield
    cloudpickle.unregister_pickle_by_value(spark_program)


def stumbling(mark):
    """Return a writer of rows that fails once, in the midst of a task's rows."""

    def write(cursor, rows):
        spark_program.insert(cursor, rows)
        if rows[0].offset and not Path(mark).exists():
            Path(mark).touch()
            raise ValueError("the database is down")

    return write


def options_of(kit, topic, group):
    return {
        **kit.cluster,
        "subscribe": topic,
        "group": group,
        "startingOffsets": "earliest",
        "stateDir": "",
        "includeToken": "true",
        "maxOffsetsPerTrigger": "50",
    }


def loaded(kit, options):
    return kit.spark.readStream.format("marshal").options(**options).load()


def test_a_table_whose_write_fails_has_each_row_once(
    kit, domain, database, group, tmp_path
):
    """Spark runs the task again, on the table that was rolled back."""
    topic, mark = domain.data_topic(2, records_each=EACH), tmp_path / "failed"
    sink = TableSink(
        partial(spark_program.connect, database.dsn),
        stumbling(str(mark)),
        group,
        rows_at_once=5,
    )
    sink.create()
    kit.ended(loaded(kit, options_of(kit, topic, group)), sink)
    assert mark.exists()
    with database.connect() as connection:
        found = connection.execute(
            "SELECT part, number FROM rows_of_spark WHERE topic = %s", (topic,)
        ).fetchall()
    assert sorted(found) == every(EACH, EACH)


class Failing(FileSink):
    """Files whose driver fails between two partitions of a batch."""

    left = 1

    def publish(self, spark, place, *, link, batch_id):
        if place.partition == 1 and Failing.left:
            Failing.left -= 1
            raise ValueError("the disk is full")
        return super().publish(spark, place, link=link, batch_id=batch_id)


def test_files_of_a_batch_that_fails_between_partitions_have_each_row_once(
    kit, domain, group, tmp_path
):
    topic = domain.data_topic(3, records_each=EACH)
    options = options_of(kit, topic, group)
    sink = FileSink.of(options, path=tmp_path / "files")
    frame = loaded(kit, options)
    with pytest.raises(Exception, match="the disk is full"):
        kit.ended(frame, Failing(sink.path, sink.fence))
    kit.ended(frame, sink)
    rows = sink.read(kit.spark).select("partition", "offset").collect()
    assert sorted(map(tuple, rows)) == every(EACH, EACH, EACH)
    named = {Path(link.folder) for links in sink.links().values() for link in links}
    written = {
        file.parent.relative_to(sink.path)
        for file in sink.path.rglob("data/*/*/**/*.parquet")
    }
    # All are published, except perhaps the one that the failure interrupted.
    assert len(written - named) <= 1


@pytest.mark.parametrize(
    ("option", "tasks"), [("minPartitions", 6), ("maxRecordsPerPartition", 8)]
)
def test_a_micro_batch_is_split_by_min_partitions_or_max_records(
    kit, domain, group, option, tasks
):
    topic = domain.data_topic(2, records_each=20)
    value = {"minPartitions": "6", "maxRecordsPerPartition": "5"}[option]
    found = []

    def note(rows, batch_id):
        rows = rows.withColumn("task", f.spark_partition_id())
        found.extend(rows.select("task", "partition", "offset").collect())

    kit.ended(kit.stream(group, subscribe=topic, **{option: value}), note)
    assert sorted((row.partition, row.offset) for row in found) == every(20, 20)
    assert len({row.task for row in found}) == tasks


def test_two_streams_are_joined(kit, domain, unique):
    """Both sources are members of one group, with different topics."""
    orders, payments = domain.data_topic(2), domain.data_topic(2)
    producer = KafkaProducer(bootstrap_servers=domain.servers)
    for number in range(60):
        at = {"key": b"%d" % number, "partition": number % 2}
        producer.send(orders, value=b"order", headers=[("n", b"%d" % number)], **at)
        if number % 3 == 0:
            producer.send(payments, value=b"payment", **at)
    producer.flush(timeout=60)
    producer.close(timeout=5)
    group, found = unique("join"), []
    options = {"includeHeaders": "true"}
    left = kit.stream(group, subscribe=orders, maxOffsetsPerTrigger="25", **options)
    right = kit.stream(group, subscribe=payments)
    joined = left.alias("o").join(right.alias("p"), f.expr("o.key = p.key"))
    wanted = joined.select("o.key", "o.headers", f.col("p.value").alias("paid"))

    def keep(rows, batch_id):
        found.extend(rows.collect())

    kit.ended(wanted, keep)
    assert sorted(int(row.key) for row in found) == list(range(0, 60, 3))
    assert {bytes(row.paid) for row in found} == {b"payment"}
    assert all(bytes(row.headers[0].value) == bytes(row.key) for row in found)
    assert cells(kit.drained(left, name="again")) == []


def test_two_sources_with_one_client_id_end_the_query_when_it_starts(
    kit, domain, group
):
    """Also without a state directory, whose lock would reveal the conflict."""
    sources = [
        kit.stream(
            group, subscribe=domain.data_topic(1, records_each=5), clientId="one"
        )
        for _ in range(2)
    ]
    with pytest.raises(Exception, match="two sources need a clientId each"):
        kit.ended(sources[0].union(sources[1]), lambda rows, _: rows.collect())


def test_at_most_once_two_branches_of_one_stream_end_the_query(kit, domain, group):
    """Spark plans a batch for each: each would miss what the other is granted."""
    topic, found = domain.data_topic(1, records_each=10), []
    stream = kit.stream(group, subscribe=topic, delivery="amo")
    halves = [stream.filter(f"offset % 2 = {rest}") for rest in (0, 1)]
    with pytest.raises(Exception, match=r"reads one load\(\) in two places"):
        kit.ended(halves[0].union(halves[1]), keeping(found))
    assert found == []
    kit.ended(stream, keeping(found), name="again")
    assert cells(found) == every(10), "nothing was granted"
