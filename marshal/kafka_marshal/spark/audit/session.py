"""A Spark session for a command of ours, or one clear sentence why there is none."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.spark.needs import require_java, require_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APP_NAME = "marshal spark audit"
MASTER_DEFAULT = "local[*]"


@contextmanager
def spark_session(master: str | None = None) -> Iterator["SparkSession"]:
    """Give the session that is active, else one of our own, stopped at the end.

    Args:
        master: Where a session of our own runs; by default on all cores here, or
            where ``spark-submit`` says.

    Raises:
        ConfigurationError: Spark cannot start.
    """
    require_spark()
    require_java()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    builder = SparkSession.builder.appName(APP_NAME)
    if master is not None or "PYSPARK_GATEWAY_PORT" not in os.environ:
        builder = builder.master(master or MASTER_DEFAULT)
    builder = builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    if master is None or master.startswith("local"):
        builder = builder.config("spark.driver.host", "localhost")
        builder = builder.config("spark.sql.shuffle.partitions", "8")
        # Workers run what we run, whatever python3 is on the PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        spark = builder.getOrCreate()
    except (PySparkException, OSError, ValueError) as error:
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationError(
            f"Spark did not start with master {master or MASTER_DEFAULT!r}: "
            f"{told[0]}; its own words are on standard error",
            setting="master",
        ) from error
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()
