"""How long a record takes through a streaming query of Spark, beside its own source.

A query of each side follows a topic, and begins the next batch as soon as one has
ended. Each record is written once the one before it has arrived. It is timed from the
broker's acknowledgment until ``foreachBatch`` has collected it. The batch that contains
it is timed as Spark reports it (``triggerExecution``). Sides take turns. A new query
starts for each round, and its first records are not counted.

*native, tuned* has ``kafka.fetch.max.wait.ms=10``, as in ``spark_source``. Our source
runs at least once and at most once.
"""

import os
import queue
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from confluent_kafka import Producer
from spark_source import H_MS, NATIVE, TUNED, connector, session
from support import (
    alternate,
    arguments,
    broker_argument,
    cluster,
    document,
    figure,
    ratios,
    show_figures,
    write_document,
)

from kafka_marshal import Admin
from kafka_marshal.admin.formatting import Format
from kafka_marshal.testing.producing import create_topic

PARTITIONS = 2
COME_S = 60
WARM = 5
AT_LEAST_ONCE, AT_MOST_ONCE = "at least once", "at most once"
OURS = {AT_LEAST_ONCE: "alo", AT_MOST_ONCE: "amo"}


@attrs.frozen
class Bench:
    """Data for every round, and its results.

    Attributes:
        spark: The session.
        servers: The cluster.
        log: The coordination topic.
        home: Folder for checkpoints.
        records: Number of records that are timed in a round.
        latencies_ms: Times from acknowledgment to collection of records, by side.
        batches_ms: Times of batches with records, by side.
    """

    spark: Any
    servers: str
    log: str
    home: Path
    records: int
    latencies_ms: dict[str, list[float]] = attrs.field(
        factory=lambda: defaultdict(list)
    )
    batches_ms: dict[str, list[float]] = attrs.field(factory=lambda: defaultdict(list))

    def round(self, side: str) -> float:
        """Time one query; return the median of its records, in ms."""
        topic = f"batches-{os.urandom(4).hex()}"
        create_topic(self.servers, topic, partitions=PARTITIONS)
        came: queue.Queue[bytes] = queue.Queue()
        with self._query(side, topic, came) as query:
            taken = self._follow(topic, came)[WARM:]
            progress = list(query.recentProgress)
        self.latencies_ms[side] += taken
        self.batches_ms[side] += [
            each["durationMs"]["triggerExecution"]
            for each in progress
            if each["numInputRows"]
        ][WARM:]
        return sorted(taken)[len(taken) // 2]

    @contextmanager
    def _query(
        self, side: str, topic: str, came: "queue.Queue[bytes]"
    ) -> Iterator[Any]:
        """Run a query that puts each value into a queue."""

        def collect(rows: Any, _: int) -> None:  # noqa: ANN401 - a frame of Spark
            for row in rows.select("value").collect():
                came.put(bytes(row.value))

        reader = self.spark.readStream.options(
            **{"kafka.bootstrap.servers": self.servers},
            subscribe=topic,
            startingOffsets="earliest",
        )
        if side in OURS:
            reader = reader.format("marshal").options(
                coordinationTopic=self.log,
                group=topic,
                delivery=OURS[side],
                stateDir="",
            )
        else:
            reader = reader.format("kafka").options(**NATIVE[side])
        query = (
            reader.load()
            .writeStream.foreachBatch(collect)
            .option("checkpointLocation", str(self.home / topic))
            .trigger(processingTime="0 seconds")
            .start()
        )
        try:
            yield query
        finally:
            query.stop()

    def _follow(self, topic: str, came: "queue.Queue[bytes]") -> list[float]:
        """Write records one by one; return the time of each until it arrives, in ms."""
        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 0})
        taken = []
        for number in range(WARM + self.records):
            value = b"%d" % number
            producer.produce(topic, value, partition=number % PARTITIONS)
            if producer.flush(COME_S):
                raise SystemExit(f"a record of {topic} could not be written")
            began = time.perf_counter()
            try:
                found = came.get(timeout=COME_S)
            except queue.Empty:
                raise SystemExit(f"a record of {topic} did not come") from None
            taken.append((time.perf_counter() - began) * 1_000)
            if found != value:
                raise SystemExit(f"{found!r} came instead of {value!r}")
        return taken


def measure(bench: Bench, sides: list[str], rounds: int) -> list[dict[str, Any]]:
    """Run all sides in turns and return the figures."""
    runs = {each: partial(bench.round, each) for each in sides}
    alternate(runs, 1)  # warms up the JVM's compiler, and caches
    bench.latencies_ms.clear()
    bench.batches_ms.clear()
    medians = alternate(runs, rounds)
    found = []
    for each in sides:
        latencies = bench.latencies_ms[each]
        found.append(figure(f"a record until it came, {each}", "ms", latencies))
        found.append(figure(f"a batch, {each}", "ms", bench.batches_ms[each]))
    for each in OURS:
        if TUNED in medians:
            label = f"a record until it came, {each}, beside Spark's tuned source"
            found.append(figure(label, "ratio", ratios(medians[each], medians[TUNED])))
    return found


def main() -> None:
    """Run the benchmark and print its document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    parser.add_argument("--jars", type=Path, help="folder of the connector's jars")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    records = 3 if options.quick else 20
    jars = [] if options.quick and options.jars is None else connector(options.jars)
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(options.bootstrap_servers) as servers,
    ):
        log = f"marshal-{os.urandom(4).hex()}"
        with Admin(servers, coordination_topic=log) as admin:
            admin.format_topic(Format(partition_count=4, heartbeat_interval_ms=H_MS))
        spark = session(jars, Path(folder))
        try:
            bench = Bench(spark, servers, log, home=Path(folder), records=records)
            found = measure(bench, [*OURS, *(NATIVE if jars else ())], rounds)
        finally:
            spark.stop()
    show_figures(found)
    settings = {"rounds": rounds, "records": records, "partitions": PARTITIONS}
    write_document(
        document("spark_batches", found, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
