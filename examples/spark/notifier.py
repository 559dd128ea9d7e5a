"""Notify each customer at most once, whatever is retried, restarted or taken over.

A message that was sent cannot be taken back, and here sending it twice is worse than
never. So each attempt of each task requests its rows from the log, which grants each
row only once: a retried task gets no rows. Messages of a failed task are not sent.

    python notifier.py --topic events --outbox /data/outbox --checkpoint /data/n1
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StreamingQuery

from kafka_marshal.spark import register


def send(rows: Iterator[Row], outbox: str) -> None:
    """Send the rows of a task; here a line of a file stands for a message."""
    file = os.open(outbox, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for row in rows:
            os.write(file, b"%s\n" % bytes(row.value))
    finally:
        os.close(file)


def notify(df: DataFrame, _: int, *, outbox: str) -> None:
    """Send a batch. It can be read only once, so use ``df`` only once."""
    df.foreachPartition(partial(send, outbox=outbox))


def start(spark: SparkSession, arguments: argparse.Namespace) -> StreamingQuery:
    """Start the query."""
    events = spark.readStream.format("marshal").options(
        **{"kafka.bootstrap.servers": arguments.bootstrap_servers},
        coordinationTopic=arguments.coordination_topic,
        subscribe=arguments.topic,
        group=arguments.group,
        delivery="amo",
        startingOffsets="earliest",
    )
    return (
        events.load()
        .writeStream.foreachBatch(partial(notify, outbox=arguments.outbox))
        .option("checkpointLocation", arguments.checkpoint)
        .start()
    )


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap-servers", default="localhost:9092")
    parser.add_argument("--coordination-topic", default="__marshal")
    parser.add_argument("--group", default="notifier")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--outbox", required=True)
    parser.add_argument("--checkpoint", required=True)
    return parser.parse_args(given)


if __name__ == "__main__":
    session = SparkSession.builder.appName("notifier").getOrCreate()
    register(session)
    start(session, parse()).awaitTermination()
