"""Every program under examples/spark/ does what it says."""

import importlib.util
import json
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import kafka
import postgres
import pytest
from domain import opened
from drivers import Supervised
from pyspark import cloudpickle
from waiting import eventually

from kafka_marshal.grants import close_grant_clients
from kafka_marshal.spark.fencing import Fence
from kafka_marshal.spark.sinks_files import FileSink

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "spark"
TESTED = {"billing", "notifier", "shared_topic"}
PARTITIONS, RECORDS = 2, 20
WAIT_MS = 150_000


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=3_000) as domain:
        yield domain
    close_grant_clients()


@contextmanager
def example(name):
    """Load a program as a module that workers cannot import."""
    spec = importlib.util.spec_from_file_location(
        f"example_{name}", EXAMPLES / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    try:
        yield module
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[spec.name]


@contextmanager
def started(spark, module, domain, *arguments):
    common = [
        *("--bootstrap-servers", domain.servers),
        *("--coordination-topic", domain.topic),
    ]
    parsed = module.parse([*common, *map(str, arguments)])
    query = Supervised(partial(module.start, spark, parsed))
    try:
        yield query
    finally:
        query.stop()


def wait(queries, condition, what):
    """Wait for a condition while queries run."""

    def look():
        return all(query.live() for query in queries) and condition()

    return eventually(look, what, WAIT_MS)


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED


def test_billing_bills_each_order_once(spark, domain, tmp_path):
    topic = domain.data_topic(PARTITIONS)
    producer = kafka.KafkaProducer(bootstrap_servers=domain.servers)
    for number in range(RECORDS):
        order = {"customer": f"c{number % 3}", "cents": number}
        producer.send(topic, json.dumps(order).encode(), partition=number % PARTITIONS)
    producer.flush(timeout=30)
    producer.close(timeout=5)
    with (
        postgres.running() as server,
        server.connect() as connection,
        example("billing") as program,
        started(
            spark,
            program,
            domain,
            *("--topic", topic, "--group", domain.unique("billing")),
            *("--dsn", server.dsn, "--checkpoint", tmp_path / "checkpoint"),
        ) as query,
    ):
        total = sum(range(RECORDS))
        read = "SELECT coalesce(sum(cents), 0) FROM bills"
        wait(
            [query],
            lambda: connection.execute(read).fetchone()[0] >= total,
            "everything is billed",
        )
        bills = dict(connection.execute("SELECT * FROM bills").fetchall())
    assert bills == {f"c{k}": sum(range(k, RECORDS, 3)) for k in range(3)}


def test_the_notifier_sends_each_message_once(spark, domain, tmp_path):
    topic = domain.data_topic(PARTITIONS, records_each=RECORDS)
    outbox = tmp_path / "outbox"
    with (
        example("notifier") as program,
        started(
            spark,
            program,
            domain,
            *("--topic", topic, "--group", domain.unique("notifier")),
            *("--outbox", outbox, "--checkpoint", tmp_path / "checkpoint"),
        ) as query,
    ):
        wait(
            [query],
            lambda: (
                outbox.exists()
                and len(outbox.read_text().split()) >= PARTITIONS * RECORDS
            ),
            "everything is sent",
        )
    sent = sorted(map(int, outbox.read_text().split()))
    assert sent == sorted([*range(RECORDS)] * PARTITIONS)


def test_two_jobs_share_a_topic_and_a_folder(spark, domain, tmp_path):
    topic = domain.data_topic(PARTITIONS, records_each=RECORDS)
    group = domain.unique("clicks")
    sink = FileSink(tmp_path, Fence(group, {}))

    def counted():
        return sum(links[-1].end for links in sink.links().values())

    with example("shared_topic") as program, ExitStack() as stack:
        queries = [
            stack.enter_context(
                started(
                    spark,
                    program,
                    domain,
                    *("--topic", topic, "--group", group),
                    *("--path", tmp_path, "--name", name),
                )
            )
            for name in ("one", "two")
        ]
        by = {"clicks-one", "clicks-two"}
        wait(
            queries,
            lambda: set(domain.owners(group).values()) == by,
            "each has a partition",
        )
        domain.produce(topic, RECORDS)
        wait(
            queries,
            lambda: counted() == 2 * PARTITIONS * RECORDS,
            "everything is written",
        )
        rows = sink.read(spark).select("partition", "offset").collect()
    assert sorted(map(tuple, rows)) == [
        (part, n) for part in range(PARTITIONS) for n in range(2 * RECORDS)
    ]
