"""A Spark driver in a process of its own, with two queries of two groups.

Run as ``python spark_program.py SETTINGS``, settings being one JSON object; see
``drivers.Drivers``. One query is at most once, and its tasks write down each
row as they get it. The other is at least once, into a database. Queries that end are
started again from their checkpoints, until standard input is closed.

Accidents happen as configured, once each; the folder ``accidents`` records them.
"""

import json
import os
import select
import signal
import sys
import time
from functools import partial
from pathlib import Path

SLOW_S = 30.0
LOOK_S = 0.05
# Between two restarts of queries: one that cannot start must not try all the time.
AGAIN_S = 0.5


class Accidents:
    """Faults that happen once each; a file records that it happened."""

    def __init__(self, folder: str, kinds: list[str]) -> None:
        self.folder = Path(folder)
        self.kinds = kinds

    def strikes(self, kind: str) -> bool:
        if kind not in self.kinds:
            return False
        try:
            (self.folder / kind).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def append(path: str, lines: list[str]) -> None:
    """Append lines in one write, so that a kill leaves only whole lines."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(file)


def take(batches, *, query: str, batch_id: int, journal: str, accidents: Accidents):
    """Process the rows of a task, which means to write a line for each."""
    from pyspark import TaskContext

    context = TaskContext.get()
    task = f"{query} {batch_id} {context.partitionId()} {context.attemptNumber()}"
    append(f"{journal}.tasks", [task])
    for batch in batches:
        rows = batch.select(["partition", "offset"]).to_pylist()
        lines = [f"{row['partition']} {row['offset']}" for row in rows]
        half = len(lines) // 2
        append(f"{journal}.{query}", lines[:half])
        if accidents.strikes(f"{query}-fail"):
            raise RuntimeError("this task fails once, as told")
        if accidents.strikes(f"{query}-slow"):
            await_twin(journal, task)
        append(f"{journal}.{query}", lines[half:])
        yield batch


def await_twin(journal: str, task: str) -> None:
    """Be slow until another attempt at the same task has begun."""
    mine = task.rsplit(" ", 1)[0] + " "
    deadline = time.monotonic() + SLOW_S
    while time.monotonic() < deadline:
        begun = Path(f"{journal}.tasks").read_text().splitlines()
        if sum(line.startswith(mine) for line in begun) > 1:
            return
        time.sleep(LOOK_S)


def lose_shuffle(batches, *, query: str, accidents: Accidents, local: str):
    """After a shuffle, delete its files, or kill the executor that wrote them."""
    for batch in batches:
        if accidents.strikes(f"{query}-shuffle"):
            for path in Path(local).rglob("shuffle_*"):
                path.unlink(missing_ok=True)
        if accidents.strikes(f"{query}-executor"):
            daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(daemon.rpartition(")")[2].split()[1]), signal.SIGKILL)
        yield batch


def processed(df, batch_id: int, *, query: str, settings: dict):
    """Return the rows of a batch that `take` processes, perhaps after a shuffle."""
    accidents = Accidents(settings["accidents"], settings["kinds"])
    work = partial(
        take,
        query=query,
        batch_id=batch_id,
        journal=settings["journal"],
        accidents=accidents,
    )
    done = df.mapInArrow(work, df.schema)
    if not {f"{query}-executor", f"{query}-shuffle"} & set(settings["kinds"]):
        return done
    local = settings["conf"]["spark.local.dir"]
    after = partial(lose_shuffle, query=query, accidents=accidents, local=local)
    # More tasks than cores: some begin to fetch only after the accident.
    return done.repartition(6, "offset").mapInArrow(after, df.schema)


def journaled(df, batch_id: int, *, settings: dict) -> None:
    work = processed(df, batch_id, query="amo", settings=settings)
    work.write.format("noop").mode("overwrite").save()


def connect(dsn: str):
    import psycopg

    return psycopg.connect(dsn)


def insert(cursor, rows) -> None:
    cursor.executemany(
        "INSERT INTO rows_of_spark VALUES (%s, %s, %s)",
        [(row.topic, row.partition, row.offset) for row in rows],
    )


def tabled(df, batch_id: int, *, settings: dict) -> None:
    from kafka_marshal.spark.sinks_table import TableSink

    sink = TableSink(
        partial(connect, settings["dsn"]),
        insert,
        settings["queries"]["alo"]["group"],
        idle_ms_max=5_000,
    )
    sink(processed(df, batch_id, query="alo", settings=settings), batch_id)


WRITES = {"amo": journaled, "alo": tabled}


def start(spark, name: str, settings: dict):
    stream = spark.readStream.format("marshal").options(**settings["queries"][name])
    return (
        stream.load()
        .writeStream.queryName(name)
        .foreachBatch(partial(WRITES[name], settings=settings))
        .option("checkpointLocation", f"{settings['checkpoint']}/{name}")
        .start()
    )


def main(settings: dict) -> None:
    from pyspark.sql import SparkSession

    from kafka_marshal.spark import register

    builder = SparkSession.builder.master(settings["master"])
    for name, value in settings["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("FATAL")
    register(spark)
    running = {name: start(spark, name, settings) for name in settings["queries"]}
    append(f"{settings['journal']}.tasks", ["started"])
    again = 0.0
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        for name, query in running.items():
            if not query.isActive and time.monotonic() > again:
                again = time.monotonic() + AGAIN_S
                append(f"{settings['journal']}.ends", [f"{name} {query.exception()}"])
                running[name] = start(spark, name, settings)
    for query in running.values():
        query.stop()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
