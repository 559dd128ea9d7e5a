"""PySpark integration: the data source, its sinks, and the audit of the log.

``register(spark)`` registers the format ``marshal`` with a session. Spark is imported
on first use.
"""

# In place of typing.TYPE_CHECKING: to import typing would double the time that a
# launcher takes to start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyspark.sql import SparkSession

    from kafka_marshal.spark.source import MarshalDataSource

__all__ = ["MarshalDataSource", "register"]


def register(spark: "SparkSession") -> None:
    """Register ``format("marshal")`` with a Spark session.

    Raises:
        ConfigurationError: The extra ``spark`` is missing or too old, or the Python of
            Spark's workers cannot load the data source.
    """
    from kafka_marshal.spark.requirements import require_worker_python

    source = _data_source()
    python = _worker_python(spark)
    if python is not None:
        require_worker_python(python)
    spark.dataSource.register(source)


def _data_source() -> "type[MarshalDataSource]":
    from kafka_marshal.spark.requirements import require_spark

    require_spark()
    from kafka_marshal.spark.source import MarshalDataSource

    return MarshalDataSource


def _worker_python(spark: "SparkSession") -> str | None:
    """Return the Python command of Spark's workers; None with Spark Connect."""
    from pyspark.sql.utils import is_remote

    return None if is_remote() else str(spark.sparkContext.pythonExec)


def __getattr__(name: str) -> "Any":  # noqa: ANN401
    if name != "MarshalDataSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _data_source()
