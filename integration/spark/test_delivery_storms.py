"""Both deliveries on Spark while tasks, attempts, stages and drivers fail.

Each fault is forced, and checked to have happened. At most once, no row is given to two
attempts; at least once into a sink that compares tokens, each row is there once.
``make test`` has retried tasks and stages in test_delivery.py, and kills a query in
test_sharing.py.
"""

import postgres
import pytest
from domain import opened
from drivers import Drivers
from waiting import eventually

H_MS = 3_000
PARTITIONS, RECORDS = 4, 100
WAIT_MS = 400_000
# Which driver is killed, at how many rows that were processed at most once.
KILLS = [(name, 200 * n + 40) for n, name in enumerate(("one", "two") * 3)]
RECORDS_STORM = 600
ACCIDENTS = ["amo-fail", "amo-executor", "amo-slow", "alo-fail", "alo-executor"]


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS) as domain:
        yield domain


@pytest.fixture
def drivers(tmp_path, database):
    found = Drivers(tmp_path, database.dsn)
    yield found
    found.end()


def queries(domain, topic, group, **rest):
    """Two queries of one topic, in a group for each guarantee."""
    common = {
        "kafka.bootstrap.servers": domain.servers,
        "coordinationTopic": domain.topic,
        "subscribe": topic,
        "maxOffsetsPerTrigger": "100",
        "startingOffsets": "earliest",
        "includeToken": "true",
    }
    return {
        "amo": common | {"group": f"{group}-amo", "delivery": "amo"} | rest,
        "alo": common | {"group": f"{group}-alo", "delivery": "alo"} | rest,
    }


def sink_of(database, group):
    from kafka_marshal.spark.sinks_table import TableSink

    sink = TableSink(lambda: postgres.psycopg.connect(database.dsn), None, group)
    sink.create()
    return sink


def is_done(domain, database, group, topic):
    """Return whether all offsets are granted in one group, and written by the other."""
    ends = domain.of(topic)
    granted = {
        key.topic_partition: known.granted
        for key, known in domain.states(f"{group}-amo").items()
    }
    written = sink_of(database, f"{group}-alo").positions()
    return all(
        granted.get(place) == end and written.get(tuple(place)) == end
        for place, end in ends.items()
    )


def judge(domain, database, drivers, topic, *, lost_max):
    """Check both deliveries, by the journals and the table."""
    ends = domain.of(topic)
    rows = drivers.rows()
    assert max(rows.values()) == 1, "a row was given to two attempts"
    assert sum(ends.values()) - len(rows) <= lost_max
    with database.connect() as connection:
        found = connection.execute(
            "SELECT part, number FROM rows_of_spark WHERE topic = %s", (topic,)
        ).fetchall()
    assert sorted(found) == [
        (place.partition, number)
        for place in sorted(ends)
        for number in range(ends[place])
    ]


def wait_done(domain, database, drivers, group, topic):
    try:
        eventually(
            lambda: drivers.live() and is_done(domain, database, group, topic),
            "all is granted, and written",
            WAIT_MS,
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{drivers.output()}") from error


@pytest.mark.proof
def test_retried_tasks_and_stages_keep_both_delivery_guarantees(
    domain, database, drivers, record_property
):
    topic = domain.data_topic(PARTITIONS, records_each=RECORDS)
    group = domain.unique("tries")
    sink_of(database, f"{group}-alo")
    drivers.start(
        "one",
        queries(domain, topic, group),
        master="local-cluster[2,1,600]",
        kinds=ACCIDENTS,
        conf={
            "spark.executor.memory": "512m",
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.multiplier": "1.1",
            "spark.speculation.quantile": "0.3",
            "spark.speculation.minTaskRuntime": "200ms",
        },
    )
    wait_done(domain, database, drivers, group, topic)
    assert drivers.struck() == set(ACCIDENTS)
    # A task was retried, and a stage, whose tasks begin again at attempt 0.
    assert max(drivers.attempts("amo")) > 0
    assert max(drivers.tries("amo").values()) > 1
    judge(domain, database, drivers, topic, lost_max=4 * 100)
    record_property("records", PARTITIONS * RECORDS)
    record_property("accidents", len(ACCIDENTS))


@pytest.mark.proof
@pytest.mark.slow
def test_killed_and_restarted_drivers_keep_both_delivery_guarantees(
    domain, database, drivers, record_property
):
    topic = domain.data_topic(PARTITIONS, records_each=RECORDS_STORM)
    group = domain.unique("storm")
    sink_of(database, f"{group}-alo")
    both = queries(domain, topic, group, maxOffsetsPerTrigger="20")

    def has_begun(count):
        return lambda: drivers.live() and len(drivers.rows()) >= count

    drivers.start("one", both)
    drivers.start("two", both)
    for name, count in KILLS:
        eventually(has_begun(count), f"{count} rows are processed", WAIT_MS)
        drivers.kill(name)
        drivers.start(name, both)
    wait_done(domain, database, drivers, group, topic)
    lost_max = 2 * len(KILLS) * 20 * PARTITIONS
    judge(domain, database, drivers, topic, lost_max=lost_max)
    record_property("records", PARTITIONS * RECORDS_STORM)
    record_property("kills", len(KILLS))
