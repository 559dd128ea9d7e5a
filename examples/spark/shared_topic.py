"""Two Spark jobs share one topic, and one folder of Parquet files.

Start it twice with different names, on one machine or on two that mount the folder.
Each job reads its share of the partitions, and takes the rest once the other job ends.
Together they write each record once.

    python shared_topic.py --topic clicks --path /data/clicks --name one
    python shared_topic.py --topic clicks --path /data/clicks --name two
"""

import argparse

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from kafka_marshal.spark import register
from kafka_marshal.spark.sinks_files import FileSink


def start(spark: SparkSession, arguments: argparse.Namespace) -> StreamingQuery:
    """Start one of the jobs."""
    options = {
        "kafka.bootstrap.servers": arguments.bootstrap_servers,
        "coordinationTopic": arguments.coordination_topic,
        "subscribe": arguments.topic,
        "group": arguments.group,
        # With a fixed name, a restart within a heartbeat interval resumes its claims.
        "clientId": f"clicks-{arguments.name}",
        "startingOffsets": "earliest",
        "includeToken": "true",
    }
    clicks = spark.readStream.format("marshal").options(**options).load()
    return (
        clicks.writeStream.foreachBatch(FileSink.of(options, path=arguments.path))
        .option("checkpointLocation", f"{arguments.path}/checkpoints/{arguments.name}")
        .start()
    )


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap-servers", default="localhost:9092")
    parser.add_argument("--coordination-topic", default="__marshal")
    parser.add_argument("--group", default="clicks")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--name", required=True)
    return parser.parse_args(given)


if __name__ == "__main__":
    session = SparkSession.builder.appName("clicks").getOrCreate()
    register(session)
    start(session, parse()).awaitTermination()
