"""How fast Spark reads micro-batches by claims, beside its own Kafka source.

All sides use one session, one topic and one aggregate, which accesses every key and
value. A side is a streaming query over the same backlog, in batches of the same size.
It is timed as Spark reports its batches (``addBatch``), without the first batch, in
which processes start. Sides run in turns. Spark's connector is downloaded from Maven by
``mvn``; a smoke run works without it, unless its jars are named.

Spark's source runs twice: with defaults, and with the one option that makes it faster
(`kafka.fetch.max.wait.ms`: without it each task waits for half a second at the end of
its range). Processor time is that of the session and all its processes. The time of a
query beyond its triggers is its whole time without that of its batches: to begin, to
stop, and to find that nothing is left.

Python and the JVM are connected by Unix domain sockets, and a query's process is
forked, as docs/SPARK.md advises.

One more side reads nothing: its tasks return one prepared Arrow batch again and again,
which is about as fast as a data source in Python can be.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pyarrow as pa
from confluent_kafka import Producer
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType
from support import (
    alternate,
    arguments,
    at_least,
    at_most,
    broker_argument,
    cluster,
    document,
    figure,
    ratios,
    show_figures,
    show_progress,
    write_document,
)

from kafka_marshal import Admin
from kafka_marshal.admin.formatting import Format
from kafka_marshal.kafka_io.columns import Slice
from kafka_marshal.kafka_io.slices import CHUNK_BYTES
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark import register
from kafka_marshal.spark.launcher import SERVER
from kafka_marshal.spark.requirements import require_java, require_spark
from kafka_marshal.spark.rows import arrow_schema, batch_maker, columns
from kafka_marshal.testing.jars import cache_dir
from kafka_marshal.testing.producing import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable

PARTITIONS = 2
BATCHES = 5
H_MS = 10_000
RUN_S = 300
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
JARS = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.commons:commons-pool2:2.12.0",
    "org.apache.kafka:kafka-clients:4.3.0",
)
# Records of a round, by their size in bytes: enough for some seconds, so that the JVM's
# compilers take a small part. With a fifth of these records, compilers would take more
# time than all readers.
LOAD = {1_000: 2_000_000, 100: 8_000_000}
WARM_UPS = 2
QUICK = {1_000: 2_000}
READY = "ready"
TUNED = "native, tuned"
NATIVE = {"native": {}, TUNED: {"kafka.fetch.max.wait.ms": "10"}}
# Seconds that a query may take beyond its triggers.
BEYOND_S = 0.4
# Least ratio of our rate to that of Spark's tuned source, by size of a record.
TARGETS = {1_000: 1.3, 100: 2.0}


def cpu_s() -> float:
    """Return the processor time of this process and all processes that it started.

    Includes the servers of planners, which are detached from their parents.
    """
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            command = path.with_name("cmdline").read_text().split("\0")
            is_server = command[1:3] == ["-c", SERVER]
            parents[pid] = int(command[-2] if is_server else fields[1])
            # User and system time, also of children that have ended.
            used[pid] = sum(map(int, fields[11:15]))
    mine = {os.getpid()}
    while more := {pid for pid, of in parents.items() if of in mine} - mine:
        mine |= more
    return sum(used[pid] for pid in mine) / os.sysconf("SC_CLK_TCK")


@attrs.frozen
class Bench:
    """Data for every round, and its results.

    Attributes:
        spark: The session.
        servers: The cluster.
        log: The coordination topic.
        home: Folder for checkpoints.
        used: Processor time of each run, in microseconds a row, by side.
        beyond: Seconds of each run beyond its triggers, by side.
    """

    spark: Any
    servers: str
    log: str
    home: Path
    used: dict[str, list[float]] = attrs.field(factory=lambda: defaultdict(list))
    beyond: dict[str, list[float]] = attrs.field(factory=lambda: defaultdict(list))

    def rate(self, source: str, topic: str, *, most: int, size: int) -> float:
        """Run one side over a topic; return rows a second.

        Adds its other times to ``used`` and ``beyond``.
        """
        started_s = cpu_s()
        reader = self.spark.readStream.options(
            **{"kafka.bootstrap.servers": self.servers},
            subscribe=topic,
            startingOffsets="earliest",
            maxOffsetsPerTrigger=str(most // BATCHES),
        )
        name = f"{source}-{os.urandom(4).hex()}"
        if source in NATIVE:
            reader = reader.format("kafka").options(**NATIVE[source])
        elif source == READY:
            # This source does not know options of Kafka.
            reader = self.spark.readStream.format(READY)
            reader = reader.options(rows=str(most // PARTITIONS), size=str(size))
        else:
            reader = reader.format("marshal").options(
                coordinationTopic=self.log,
                group=name,
                stateDir="",
                transport=source,
            )
        loaded, began = reader.load(), time.perf_counter()
        query = (
            loaded.writeStream.foreachBatch(_look_at_all)
            .option("checkpointLocation", str(self.home / name))
            .trigger(availableNow=True)
            .start()
        )
        if not query.awaitTermination(RUN_S):
            raise SystemExit(f"{name} did not end within {RUN_S} s")
        took_s = time.perf_counter() - began
        triggers_ms = [
            p["durationMs"]["triggerExecution"] for p in query.recentProgress
        ]
        self.beyond[source].append(took_s - sum(triggers_ms) / 1_000)
        batches = [each for each in query.recentProgress if each["numInputRows"]]
        timed = batches[1:] or batches
        cpu_us = (cpu_s() - started_s) * 1e6
        self.used[source].append(cpu_us / sum(b["numInputRows"] for b in batches))
        rows = sum(each["numInputRows"] for each in timed)
        return rows / sum(each["durationMs"]["addBatch"] for each in timed) * 1_000


class _Range(InputPartition):
    """Number of rows that a task returns."""

    def __init__(self, count: int) -> None:
        super().__init__(None)
        self.count = count


class _ReadyReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Returns prepared batches, until each task has returned its rows."""

    def __init__(self, schema: StructType, *, rows: int, size: int) -> None:
        self.schema, self.rows, self.size = schema, rows, size

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"rows": 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        pass

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, int], limit: ReadLimit
    ) -> dict[str, int]:
        del limit
        return {"rows": min(self.rows, start["rows"] + self.rows // BATCHES)}

    def partitions(
        self, start: dict[str, int], end: dict[str, int]
    ) -> Sequence[InputPartition]:
        return [_Range(end["rows"] - start["rows"]) for _ in range(PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Range)
        left = partition.count
        whole = self._made()
        while left > 0:
            yield whole.slice(0, left)
            left -= whole.num_rows

    def _made(self) -> pa.RecordBatch:
        key, value = b"%08d" % 0, bytes(self.size - 8)
        count = CHUNK_BYTES // self.size
        same = [0] * count
        rows = Slice(
            offsets=range(count),
            times_ms=same,
            kinds=same,
            keys=[key] * count,
            values=[value] * count,
            headers=None,
        )
        place = TopicPartition(READY, 0)
        return batch_maker(arrow_schema(self.schema), place, token=None)(rows)


class _Ready(DataSource):
    """A source whose reading takes almost no time."""

    @classmethod
    def name(cls) -> str:
        return READY

    def schema(self) -> StructType:
        return columns(has_headers=False, has_token=False)

    def streamReader(  # noqa: N802 - Spark's name
        self, schema: StructType
    ) -> DataSourceStreamReader:
        found = self.options
        rows, size = int(found["rows"]), int(found["size"])
        return _ReadyReader(schema, rows=rows, size=size)


def _look_at_all(rows: Any, _: int) -> None:  # noqa: ANN401 - a frame of Spark
    from pyspark.sql import functions as of

    size = of.sum(of.length("key") + of.length("value"))
    rows.agg(size, of.max("offset"), of.max("timestamp")).collect()


def connector(folder: Path | None) -> list[Path]:
    """Return the jars of Spark's own connector; download them once."""
    home = folder or cache_dir() / "spark-kafka"
    home.mkdir(parents=True, exist_ok=True)
    for each in JARS:
        _, name, number = each.split(":")
        if not (home / f"{name}-{number}.jar").is_file():
            command = ["mvn", "-q", "-B", COPY, f"-Dartifact={each}"]
            command.append(f"-DoutputDirectory={home}")
            subprocess.run(command, check=True, stdout=sys.stderr, timeout=RUN_S)
    return sorted(home.glob("*.jar"))


def session(jars: list[Path], home: Path) -> Any:  # noqa: ANN401 - Spark's
    """Return a session with as many cores as there are partitions."""
    from pyspark.sql import SparkSession

    require_spark()
    require_java()
    launcher = Path(sys.executable).with_name("marshal-spark-python")
    os.environ.setdefault("PYSPARK_PYTHON", str(launcher))
    builder = (
        SparkSession.builder.master(f"local[{PARTITIONS}]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(home / "local"))
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.jars", ",".join(map(str, jars)))
    )
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    spark.dataSource.register(_Ready)
    return spark


def fill(servers: str, topic: str, *, size: int, count: int) -> None:
    """Write records of a size, evenly over the partitions."""
    create_topic(servers, topic, partitions=PARTITIONS)
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 20})
    value = os.urandom(size - 8)
    for number in range(count):
        while True:
            try:
                producer.produce(
                    topic, value, b"%08d" % number, partition=number % PARTITIONS
                )
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush(RUN_S)


def compare(
    bench: Bench, load: dict[int, int], *, rounds: int, has_native: bool
) -> list[dict[str, Any]]:
    """Run all sides over all sizes and return the figures."""
    found = []
    for size, count in load.items():
        show_progress(f"{count} records of {size} bytes")
        topic = f"whole-{size}"
        fill(bench.servers, topic, size=size, count=count)
        names = ["fast", "kafka-python", READY, *(NATIVE if has_native else [])]
        sides: dict[str, Callable[[], float]] = {
            name: partial(bench.rate, name, topic, most=count, size=size)
            for name in names
        }
        for _ in range(WARM_UPS):
            for side in sides.values():
                side()  # warms up the JVM's compiler, and caches
        bench.used.clear()
        bench.beyond.clear()
        rates = alternate(sides, rounds)
        for name, samples in rates.items():
            label = f"{name}, {size} bytes"
            found.append(figure(label, "records/s", samples))
            found.append(figure(f"CPU, {label}", "us/row", bench.used[name]))
            label = f"beyond its triggers, {label}"
            target = at_most(BEYOND_S) if name == "fast" else None
            found.append(figure(label, "s", bench.beyond[name], target=target))
        if has_native:
            found += beside(rates, bench, size)
    return found


def beside(
    rates: dict[str, list[float]], bench: Bench, size: int
) -> list[dict[str, Any]]:
    """Return the figures of each side beside Spark's own sources."""
    found = []
    for name in ("fast", "kafka-python", READY):
        for peer, what in ((TUNED, "tuned source"), ("native", "source as it is")):
            is_asked = peer == TUNED and name == "fast"
            shares = ratios(rates[name], rates[peer])
            label = f"{name} beside Spark's {what}, {size} bytes"
            target = at_least(TARGETS[size]) if is_asked else None
            found.append(figure(label, "ratio", shares, target=target))
        label = f"CPU, {name} beside Spark's tuned source, {size} bytes"
        target = at_most(1.0) if name == "fast" else None
        shares = ratios(bench.used[name], bench.used[TUNED])
        found.append(figure(label, "ratio", shares, target=target))
        label = f"beyond its triggers, {name} beside Spark's tuned source, {size} bytes"
        shares = ratios(bench.beyond[name], bench.beyond[TUNED])
        found.append(figure(label, "ratio", shares))
    return found


def main() -> None:
    """Run the benchmark and print its document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of a full run's records"
    )
    parser.add_argument("--jars", type=Path, help="folder of the connector's jars")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    whole = QUICK if options.quick else LOAD
    load = {size: int(count * options.share) for size, count in whole.items()}
    is_bare = options.quick and options.jars is None
    jars = [] if is_bare else connector(options.jars)
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(options.bootstrap_servers) as servers,
    ):
        home = Path(folder)
        log = f"marshal-{os.urandom(4).hex()}"
        with Admin(servers, coordination_topic=log) as admin:
            admin.format_topic(Format(partition_count=4, heartbeat_interval_ms=H_MS))
        spark = session(jars, home)
        try:
            bench = Bench(spark, servers, log, home)
            found = compare(bench, load, rounds=rounds, has_native=bool(jars))
        finally:
            spark.stop()
    show_figures(found)
    settings = {
        "rounds": rounds,
        "partitions": PARTITIONS,
        "batches": BATCHES,
        "records": json.loads(json.dumps(load)),
    }
    write_document(
        document("spark_source", found, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
