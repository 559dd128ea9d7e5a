"""Tasks and stages that are retried, in one session, with both deliveries."""

import sys
from functools import partial

import postgres
import pytest
import spark_program
from domain import opened
from drivers import UNDONE, QueryFolder, Supervised
from pyspark import cloudpickle
from waiting import eventually

from kafka_marshal.spark.sinks_table import TableSink

PARTITIONS, RECORDS, BATCH = 2, 120, 60
WAIT_MS = 150_000


@pytest.fixture(scope="module", autouse=True)
def by_value():
    """Workers cannot import the modules of the tests."""
    cloudpickle.register_pickle_by_value(spark_program)
    yield
    cloudpickle.unregister_pickle_by_value(spark_program)


@pytest.fixture(scope="module")
def python():
    """Python itself, without a fork server."""
    return sys.executable


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=3_000) as domain:
        yield domain


def run(spark, domain, database, *, query, home, kinds):
    """Run a query through all records; return its journals, and the topic."""
    topic = domain.data_topic(PARTITIONS, records_each=RECORDS)
    group = domain.unique("tries")
    options = {
        "kafka.bootstrap.servers": domain.servers,
        "coordinationTopic": domain.topic,
        "subscribe": topic,
        "group": group,
        "delivery": query,
        "startingOffsets": "earliest",
        "clientId": "driver",
        "stateDir": str(home / "state"),
        "includeToken": "true",
        "maxOffsetsPerTrigger": str(BATCH),
    }
    left = QueryFolder(home)
    local = spark.sparkContext.getConf().get("spark.local.dir")
    settings = {
        "queries": {query: options},
        "checkpoint": str(home / "checkpoint"),
        "journal": str(left.journal),
        "accidents": str(left.accidents),
        "kinds": kinds,
        "conf": {"spark.local.dir": local},
        "dsn": database.dsn,
    }
    TableSink(lambda: postgres.psycopg.connect(database.dsn), None, group).create()
    running = Supervised(partial(spark_program.start, spark, query, settings), UNDONE)
    try:
        eventually(
            lambda: is_done(domain, database, running, left, group=group, topic=topic),
            "everything is granted, or written",
            WAIT_MS,
        )
    finally:
        running.stop()
    assert left.struck() == set(kinds)
    return left, topic


def is_done(domain, database, running, left, *, group, topic):
    running.live()
    if running.query.name == "alo":
        return len(written(database, topic)) >= PARTITIONS * RECORDS
    known = domain.states(group).values()
    if len(known) < PARTITIONS or any(k.granted != RECORDS for k in known):
        return False
    # The last batch is granted before it is processed.
    return len(left.rows()) >= PARTITIONS * RECORDS - BATCH


def written(database, topic):
    with database.connect() as connection:
        rows = connection.execute(
            "SELECT part, number FROM rows_of_spark WHERE topic = %s", (topic,)
        )
        return sorted(rows.fetchall())


EVERY_ROW = [(p, n) for p in range(PARTITIONS) for n in range(RECORDS)]


@pytest.mark.parametrize("accident", ["fail", "shuffle"])
def test_at_most_once_retries_process_no_row_twice(
    spark, domain, database, tmp_path, accident
):
    left, _ = run(
        spark, domain, database, query="amo", home=tmp_path, kinds=[f"amo-{accident}"]
    )
    rows = left.rows()
    assert max(rows.values()) == 1
    # The accident happened: a task was started twice. It cost at most one batch.
    assert max(left.tries("amo").values()) > 1
    if accident == "fail":
        assert max(left.attempts("amo")) == 1
    assert PARTITIONS * RECORDS - BATCH <= len(rows) <= PARTITIONS * RECORDS


def test_at_least_once_a_sink_has_each_row_once(spark, domain, database, tmp_path):
    kinds = ["alo-fail", "alo-shuffle"]
    left, topic = run(spark, domain, database, query="alo", home=tmp_path, kinds=kinds)
    assert max(left.tries("alo").values()) > 1
    assert written(database, topic) == EVERY_ROW
