"""Spark jobs over one coordination domain, for tests of the data source."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import kafka
from waiting import eventually

# The Python that forks planners from a process which has loaded their modules.
FORKING = str(Path(sys.executable).with_name("marshal-spark-python"))
RUN_S = 600
# Spark waits 10 s for a query's process, whatever is set. On a busy machine it is
# started again, as an operator would.
STARTS_MAX = 5
INITIALIZING = ("Initializing StreamExecution", "Initializing sources")
LATE = "failed to connect back"
# Settings of each driver, also of programs and of the command.
DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    # Otherwise a query without new records polls its process 100 times a second.
    "spark.sql.streaming.pollingDelay": "50ms",
    # Queries of a few rows: to compile each costs a fifth of Java's time.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # On a busy machine, a query's process takes long to load what it needs.
    "spark.python.authenticate.socketTimeout": "120s",
}


class Kit:
    """Reads and streams of one domain, in one session."""

    def __init__(self, spark, domain, home: Path) -> None:
        self.spark = spark
        self.domain = domain
        self.home = home
        self.cluster = {
            "kafka.bootstrap.servers": domain.servers,
            "coordinationTopic": domain.topic,
        }

    def batch(self, **more):
        return self.spark.read.format("marshal").options(**self.cluster, **more).load()

    def stream(self, group, **more):
        """A stream of a group, from the earliest offsets by default."""
        options = {"startingOffsets": "earliest", "stateDir": ""} | more
        reader = self.spark.readStream.format("marshal")
        return reader.options(**self.cluster, group=group, **options).load()

    def checkpoint(self, name="checkpoint"):
        return str(self.home / name)

    def started(self, frame, sink, *, name="checkpoint", **trigger):
        """Start a query whose sink is a function of a frame and a batch's number."""
        writer = frame.writeStream.foreachBatch(sink)
        writer = writer.option("checkpointLocation", self.checkpoint(name))
        if trigger:
            writer = writer.trigger(**trigger)
        for _ in range(STARTS_MAX):
            query = writer.start()
            eventually(lambda each=query: has_begun(each), "the process", RUN_S * 1_000)
            if LATE not in str(query.exception()):
                break
        return query

    def ended(self, frame, sink, *, name="checkpoint", **trigger):
        """Run a query to its end, by default that of the available records."""
        trigger = trigger or {"availableNow": True}
        query = self.started(frame, sink, name=name, **trigger)
        try:
            assert query.awaitTermination(RUN_S), "the query did not end"
        finally:
            query.stop()
        return query

    def drained(self, frame, *, name="checkpoint", **trigger):
        """Return what a query found, as batch, partition and offset."""
        found = []
        self.ended(frame, keeping(found), name=name, **trigger)
        return found


def has_begun(query):
    """Return whether a query has its process, or has failed."""
    return not query.isActive or query.status["message"] not in INITIALIZING


class Far:
    """A driver in a process of its own, which prints lines and can be killed.

    Attributes:
        process: The driver's process.
    """

    def __init__(self, program, *arguments, on_line):
        """Start it.

        Args:
            program: Its source.
            arguments: Its arguments.
            on_line: Called with each line that it prints, on a thread.
        """
        self._on_line = on_line
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._on_line(line)

    def kill(self):
        """Kill the driver and all that it started (SIGKILL)."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=RUN_S)
        self._reader.join(timeout=RUN_S)
        self.process.stdout.close()


def keeping(found):
    """A sink that notes batch, partition and offset of each row."""

    def keep(rows, batch_id):
        for row in rows.select("partition", "offset").collect():
            found.append((batch_id, row.partition, row.offset))

    return keep


def failing(rows, batch_id):
    """A sink that is down, after its rows were read."""
    rows.collect()
    raise ValueError("the sink is down")


def cells(found):
    """Return partition and offset of what a query found, in order."""
    return sorted((partition, offset) for _, partition, offset in found)


def every(*counts):
    """Return partition and offset of so many records in each partition."""
    return [(n, o) for n, count in enumerate(counts) for o in range(count)]


def environment():
    """The environment of a job in a process of its own."""
    names = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    return os.environ | dict.fromkeys(names, sys.executable)


def committed(domain, topic, count):
    """Return the numbers that readers of a sink's topic get, once there are so many."""
    return sorted(int(each.value) for each in committed_records(domain, topic, count))


def committed_records(domain, topic, count):
    """Return the records that readers of a sink's topic get, once there are so many."""
    consumer = kafka.KafkaConsumer(
        topic,
        bootstrap_servers=domain.servers,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        consumer_timeout_ms=1_000,
        metadata_max_age_ms=500,
    )
    records = []

    def look():
        records.extend(consumer)
        return len(records) >= count

    try:
        eventually(look, "all records")
    finally:
        consumer.close()
    return records
