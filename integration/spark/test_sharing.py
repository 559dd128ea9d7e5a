"""Queries and plain consumers of one group: sharing, leaving, dying."""

import json
import threading

import pytest
from domain import opened
from sparkkit import RUN_S, Far
from waiting import eventually as soon

from kafka_marshal import ClaimLost

# Longer than a busy machine may keep the driver of a query from its heartbeats.
H_MS = 10_000
# A session of its own takes long to start on a busy machine.
LONG_MS = 150_000
PARTITIONS = 12
EACH = 100


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS) as domain:
        yield domain


def eventually(condition, what):
    return soon(condition, what, LONG_MS)


class Ledger:
    """A sink that compares tokens, as a fenced table does, and keeps every write."""

    def __init__(self):
        self.highest = {}
        self.seen = {}
        self.refused = []
        self._lock = threading.Lock()

    def write(self, who, partition, offset, *, token):
        token = tuple(map(int, str(token).split(".")))
        with self._lock:
            if token < self.highest.get(partition, token):
                self.refused.append((who, partition, offset))
                return
            self.highest[partition] = token
            self.seen.setdefault((partition, offset), []).append(who)

    def sink(self, who):
        def write(rows, batch_id):
            for row in rows.select("partition", "offset", "token").collect():
                self.write(who, row.partition, row.offset, token=row.token)

        return write

    def writers(self, since=0):
        """Return the writers of records, without the first ``since`` records."""
        return {who for names in list(self.seen.values())[since:] for who in names}


class Plain(threading.Thread):
    """A plain consumer of the group, until it is stopped."""

    def __init__(self, domain, group, topic, *, ledger):
        super().__init__(daemon=True)
        self._of = (domain, group, topic, ledger)
        self._end = threading.Event()
        self.start()

    def run(self):
        domain, group, topic, ledger = self._of
        with domain.marshal(group, "plain") as marshal:
            consumer = marshal.consumer(topic, on_lost=lambda *_: None)
            while not self._end.is_set():
                for place, records in consumer.poll(100, 50).items():
                    for record in records:
                        ledger.write(
                            "plain", place.partition, record.offset, token=record.token
                        )
                    try:
                        consumer.commit(records)
                    except ClaimLost:
                        continue

    def stop(self):
        self._end.set()
        self.join(timeout=RUN_S)


# A query in a process and session of its own, which prints what it reads.
PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
from kafka_marshal.spark import register

options, checkpoint = json.loads(sys.argv[1]), sys.argv[2]
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.driver.memory", "500m").getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")
register(spark)

def write(rows, batch_id):
    for row in rows.select("partition", "offset", "token").collect():
        print(json.dumps([row.partition, row.offset, row.token]), flush=True)

frame = spark.readStream.format("marshal").options(**options).load()
(frame.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
 .start().awaitTermination())
"""


def far_query(kit, options, ledger):
    """Start a query in a process of its own, which can be killed."""

    def take(line):
        if line.startswith("["):
            partition, offset, token = json.loads(line)
            ledger.write("far", partition, offset, token=token)

    arguments = (json.dumps(kit.cluster | options), kit.checkpoint("far"))
    return Far(PROGRAM, *arguments, on_line=take)


@pytest.mark.slow
def test_two_queries_and_a_plain_consumer_share_and_one_is_killed(kit, domain, unique):
    """1 -> 3 -> 1 members, 12 partitions: all is processed, no token is stale."""
    topic = domain.data_topic(PARTITIONS, records_each=EACH)
    group = unique("shared")
    ledger = Ledger()
    options = {"subscribe": topic, "includeToken": "true", "maxOffsetsPerTrigger": "60"}
    far_options = options | {
        "group": group,
        "startingOffsets": "earliest",
        "stateDir": "",
    }
    near = kit.started(kit.stream(group, **options), ledger.sink("near"))
    far = None
    try:
        eventually(lambda: len(owners(domain, group)) == 1, "one owns something")
        far = far_query(kit, far_options, ledger)
        eventually(lambda: len(owners(domain, group)) == 2, "two own something")
        plain = Plain(domain, group, topic, ledger=ledger)
        eventually(lambda: fair(domain, group), "three hold four partitions each")
        domain.produce(topic, EACH)
        eventually(lambda: ledger.writers() >= {"far", "near", "plain"}, "all work")
        far.kill()
        plain.stop()
        domain.produce(topic, EACH)
        everything = {(p, o) for p in range(PARTITIONS) for o in range(3 * EACH)}
        eventually(lambda: set(ledger.seen) >= everything, "every record is processed")
        assert set(ledger.seen) == everything
        assert len(owners(domain, group)) == 1
        assert near.exception() is None
    finally:
        near.stop()
        if far is not None and far.process.poll() is None:
            far.kill()
    assert not ledger.refused, "what is stale was not even read"


def owners(domain, group):
    return {who for who in domain.owners(group).values() if who is not None}


def fair(domain, group):
    holders = list(domain.owners(group).values())
    counts = [holders.count(who) for who in set(holders)]
    return sorted(counts) == [4, 4, 4] and None not in holders
