"""Sinks on Spark write no replayed and no stale rows."""

from functools import partial

import pytest
import spark_program
from domain import opened
from pyspark import cloudpickle
from pyspark.sql.functions import col, element_at, lit
from sparkkit import committed, committed_records

from kafka_marshal.grants import close_grant_clients
from kafka_marshal.spark.fencing import fenced
from kafka_marshal.spark.sinks_files import FileSink
from kafka_marshal.spark.sinks_kafka import KafkaSink
from kafka_marshal.spark.sinks_table import TableSink

SCHEMA = (
    "key binary, value binary, topic string, partition int, offset long, token string,"
    " topicId string"
)
FIRST, SECOND = "1" * 32, "2" * 32


@pytest.fixture(scope="module", autouse=True)
def by_value():
    cloudpickle.register_pickle_by_value(spark_program)
    yield
    cloudpickle.unregister_pickle_by_value(spark_program)


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=20_000) as domain:
        yield domain
    close_grant_clients()


class Stream:
    """A topic with two partitions that a process holds, as a query's driver does."""

    def __init__(self, domain, marshal):
        self.topic = domain.data_topic(2)
        self.claims = [marshal.claim(self.topic, number) for number in range(2)]
        self.options = {
            "kafka.bootstrap.servers": domain.servers,
            "coordinationTopic": domain.topic,
            "subscribe": self.topic,
            "group": marshal.group_id,
            "includeToken": "true",
        }

    def rows(self, spark, first, end, *, tokens=None, topic_id=FIRST):
        """Return a batch of rows of both partitions, as a query would read it."""
        tokens = tokens or [str(claim.token) for claim in self.claims]
        return spark.createDataFrame(
            [
                (None, b"%d" % n, self.topic, part, n, tokens[part], topic_id)
                for part in range(2)
                for n in range(first, end)
            ],
            SCHEMA,
        )


@pytest.fixture
def stream(domain):
    with domain.marshal(domain.unique("sinks"), "driver") as marshal:
        yield Stream(domain, marshal)


def offsets(rows):
    return sorted((row["partition"], row["offset"]) for row in rows)


def both(first, end):
    return [(part, n) for part in range(2) for n in range(first, end)]


def test_a_fenced_batch_omits_rows_of_released_claims(spark, stream):
    batch = stream.rows(spark, 0, 5)
    alive = fenced(batch, 3, options=stream.options).collect()
    assert offsets(alive) == both(0, 5)
    stream.claims[1].release()
    rest = fenced(batch, 3, options=stream.options).collect()
    assert offsets(rest) == [(0, n) for n in range(5)]
    stream.claims[0].release()
    assert fenced(batch, 3, options=stream.options).collect() == []


def test_a_table_has_each_row_once(spark, stream, database):
    sink = TableSink(
        partial(spark_program.connect, database.dsn),
        spark_program.insert,
        stream.options["group"],
    )
    sink.create()
    for batch in ((0, 5), (0, 5), (3, 8)):
        sink(stream.rows(spark, *batch), 1)
    sink(stream.rows(spark, 8, 9, tokens=["0.0.1", "0.0.1"]), 2)
    with database.connect() as connection:
        found = connection.execute(
            "SELECT part, number FROM rows_of_spark WHERE topic = %s", (stream.topic,)
        ).fetchall()
    assert sorted(found) == both(0, 8)


def test_a_table_of_positions_of_an_earlier_version_is_upgraded(
    spark, stream, database
):
    place = (stream.options["group"], stream.topic)
    with database.connect() as connection:
        connection.execute(
            "CREATE TABLE old_fence (group_id text NOT NULL, topic text NOT NULL,"
            " part integer NOT NULL, era bigint NOT NULL, leader_epoch bigint NOT NULL,"
            " epoch bigint NOT NULL, next_offset bigint NOT NULL,"
            " PRIMARY KEY (group_id, topic, part))"
        )
        for part in range(2):
            values = (*place, part, 5)
            connection.execute(
                "INSERT INTO old_fence VALUES (%s, %s, %s, 0, 0, 0, %s)", values
            )
    sink = TableSink(
        partial(spark_program.connect, database.dsn),
        spark_program.insert,
        stream.options["group"],
        table="old_fence",
    )
    sink.create()
    sink.create()
    sink(stream.rows(spark, 3, 8), 1)
    sink(stream.rows(spark, 0, 2, topic_id=SECOND), 2)
    with database.connect() as connection:
        found = connection.execute(
            "SELECT part, number FROM rows_of_spark WHERE topic = %s", (stream.topic,)
        ).fetchall()
    assert sorted(found) == sorted(both(5, 8) + both(0, 2))
    assert set(sink.positions().values()) == {2}


def test_files_have_each_row_once(spark, stream, tmp_path):
    # For Spark this name is a pattern, unless escaped.
    sink = FileSink.of(stream.options, path=tmp_path / "bills [eu], *")
    for batch in ((0, 5), (0, 5), (3, 8)):
        sink(stream.rows(spark, *batch), 1)
    sink(stream.rows(spark, 8, 9, tokens=["0.0.1", "0.0.1"]), 2)
    found = sink.read(spark)
    assert offsets(found.collect()) == both(0, 8)
    columns = stream.rows(spark, 0, 1).columns
    assert found.columns == columns
    # Later batches have one more column, whichever file Spark takes the schema from.
    sink(stream.rows(spark, 8, 9).withColumn("amount", lit(7)), 3)
    found = sink.read(spark)
    assert found.columns == [*columns, "amount"]
    assert sorted(row.offset for row in found.where("amount = 7").collect()) == [8, 8]
    assert found.where("amount IS NULL").count() == 16


def test_a_batch_of_files_runs_as_many_jobs_for_one_partition_as_for_two(
    spark, stream, tmp_path
):
    sink = FileSink.of(stream.options, path=tmp_path)
    counts = []
    for number, rows in enumerate(
        [
            stream.rows(spark, 0, 5, topic_id=None).where("partition = 1"),
            stream.rows(spark, 0, 5, topic_id=None),
            stream.rows(spark, 0, 0),
        ]
    ):
        spark.sparkContext.setJobGroup(f"{stream.topic}-{number}", "a batch")
        try:
            sink(rows, number)
        finally:
            spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
        tracker = spark.sparkContext.statusTracker()
        counts.append(len(tracker.getJobIdsForGroup(f"{stream.topic}-{number}")))
    assert counts[0] == counts[1]
    assert offsets(sink.read(spark).collect()) == both(0, 5)


def test_keys_are_written_to_the_partitions_that_java_clients_choose(
    spark, stream, domain
):
    """Of 64 partitions, by the hashes in UtilsTest.testMurmur2 of Kafka."""
    out = domain.data_topic(64)
    hashes = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    rows = stream.rows(spark, 0, len(hashes)).where("partition = 0")
    keys = [key.decode() for key in hashes]
    keyed = rows.withColumn("key", element_at(lit(keys), col("offset").cast("int") + 1))
    KafkaSink.of(stream.options, topic=out)(keyed, 1)
    found = committed_records(domain, out, len(hashes))
    assert {record.key: record.partition for record in found} == {
        key: (number & 0x7FFFFFFF) % 64 for key, number in hashes.items()
    }


def test_a_topic_has_each_row_once(spark, stream, domain):
    out = domain.data_topic(1)
    sink = KafkaSink.of(stream.options, topic=out)
    for batch in ((0, 5), (0, 5), (3, 8)):
        sink(stream.rows(spark, *batch), 1)
    sink(stream.rows(spark, 8, 9, tokens=["0.0.1", "0.0.1"]), 2)
    assert committed(domain, out, 16) == sorted([*range(8)] * 2)
