"""Bill each order once, whatever is retried, restarted or taken over.

At least once, into PostgreSQL. The sink keeps a table of positions. It changes them in
one transaction with the bills, and only under the newest token. So only the owner of a
partition bills its orders, each of them once. Start it on as many machines as you like;
each takes its share of the partitions.

    python billing.py --topic orders --dsn "host=db dbname=bills" --checkpoint /data/b1
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial

import psycopg
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StreamingQuery

from kafka_marshal.spark import register
from kafka_marshal.spark.sinks_table import TableSink


def connect(dsn: str) -> psycopg.Connection:
    """Return a connection; called by each task that writes."""
    return psycopg.connect(dsn)


def bill(cursor: psycopg.Cursor, rows: Sequence[Row]) -> None:
    """Add some orders to the bills of their customers."""
    orders = [json.loads(row.value) for row in rows]
    cursor.executemany(
        "INSERT INTO bills VALUES (%s, %s) ON CONFLICT (customer) DO UPDATE"
        " SET cents = bills.cents + excluded.cents",
        [(order["customer"], order["cents"]) for order in orders],
    )


def start(spark: SparkSession, arguments: argparse.Namespace) -> StreamingQuery:
    """Start the query."""
    with connect(arguments.dsn) as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS bills (customer text PRIMARY KEY, cents bigint)"
        )
    sink = TableSink(partial(connect, arguments.dsn), bill, arguments.group)
    sink.create()
    orders = spark.readStream.format("marshal").options(
        **{"kafka.bootstrap.servers": arguments.bootstrap_servers},
        coordinationTopic=arguments.coordination_topic,
        subscribe=arguments.topic,
        group=arguments.group,
        delivery="alo",
        startingOffsets="earliest",
        includeToken="true",
    )
    return (
        orders.load()
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", arguments.checkpoint)
        .start()
    )


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap-servers", default="localhost:9092")
    parser.add_argument("--coordination-topic", default="__marshal")
    parser.add_argument("--group", default="billing")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--checkpoint", required=True)
    return parser.parse_args(given)


if __name__ == "__main__":
    session = SparkSession.builder.appName("billing").getOrCreate()
    register(session)
    start(session, parse()).awaitTermination()
