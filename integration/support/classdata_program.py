"""Uses Spark as the tests do, so that Java loads its classes.

Run as ``python classdata_program.py FOLDER``; see ``classdata``.
"""

import sys

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    SimpleDataSourceStreamReader,
)

SCHEMA = "number int, text string"


class Reader(DataSourceReader):
    """Reads nothing."""

    def read(self, partition):
        return iter([])


class Stream(SimpleDataSourceStreamReader):
    """Ten rows a batch."""

    def initialOffset(self):  # noqa: N802 - Spark
        return {"at": 0}

    def read(self, start):
        at = start["at"]
        end = min(at + 10, 20)
        return iter([(number, "") for number in range(at, end)]), {"at": end}

    def readBetweenOffsets(self, start, end):  # noqa: N802 - Spark
        return iter([(number, "") for number in range(start["at"], end["at"])])


class Source(DataSource):
    """A data source with both readers."""

    @classmethod
    def name(cls):
        return "numbers"

    def schema(self):
        return SCHEMA

    def reader(self, schema):
        return Reader()

    def simpleStreamReader(self, schema):  # noqa: N802 - Spark
        return Stream()


def same(batches):
    """Return the batches unchanged."""
    yield from batches


def main(folder: str) -> None:
    """Read, write, query and stream once."""
    builder = SparkSession.builder.master("local[1]")
    builder = builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1")
    builder = builder.config("spark.sql.codegen.wholeStage", "false")
    builder = builder.config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    builder = builder.config("spark.sql.execution.arrow.pyspark.enabled", "true")
    spark = builder.config("spark.sql.warehouse.dir", f"{folder}/tables").getOrCreate()
    spark.dataSource.register(Source)
    spark.read.format("numbers").load().collect()
    rows = spark.createDataFrame([(number, "") for number in range(10)], SCHEMA)
    rows.write.parquet(f"{folder}/rows")
    rows = spark.read.parquet(f"{folder}/rows").mapInArrow(same, SCHEMA)
    rows.createOrReplaceTempView("rows")
    spark.sql(
        "SELECT text, count(*), sum(number) OVER (ORDER BY text) FROM rows "
        "JOIN rows AS more USING (number, text) GROUP BY text, number ORDER BY text"
    ).collect()
    stream = spark.readStream.format("numbers").load()
    writer = stream.writeStream.foreachBatch(lambda found, _: found.collect())
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
    query = writer.start()
    query.processAllAvailable()
    query.stop()
    java = spark.sparkContext._gateway.proc
    spark.stop()
    java.stdin.close()
    java.wait()  # the caller has a deadline


if __name__ == "__main__":
    main(sys.argv[1])
