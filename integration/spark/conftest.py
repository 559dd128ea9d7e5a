"""One Spark session a module, and checkpoints of each test's own."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import postgres
import pytest
from sparkkit import DEFAULTS, FORKING, Kit

from kafka_marshal.spark import register
from kafka_marshal.spark.requirements import require_java, require_spark

# In addition to JAVA_OPTIONS of integration/conftest.py: with the first compiler alone
# Java has a small code cache, which it would clean again and again.
JAVA = "-XX:ReservedCodeCacheSize=240m -XX:MetaspaceSize=256m"
SETTINGS = {
    "spark.driver.memory": "700m",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.driver.extraJavaOptions": JAVA,
    # A stage that is to be tried again: the tests of delivery force it.
    "spark.task.maxFailures": "4",
    "spark.stage.maxConsecutiveAttempts": "4",
}


@pytest.fixture(scope="session", autouse=True)
def processes():
    """Have every driver start with the tests' defaults."""
    defaults = " ".join(f"-D{name}={value}" for name, value in DEFAULTS.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_SUBMIT_OPTS", defaults)
        yield


@pytest.fixture
def kit(spark, domain, tmp_path):
    """Queries of one test; its module has the domain."""
    return Kit(spark, domain, tmp_path)


@pytest.fixture
def group(unique):
    """A group of one test."""
    return unique("group")


@pytest.fixture(scope="module")
def python():
    """The Python of Spark's processes: one that forks them, which saves imports.

    Some modules use this Python instead, which imports for a second in each process.
    """
    return FORKING


@pytest.fixture(scope="module")
def spark(tmp_path_factory, python):
    """A local session with two cores, whose tasks may be tried four times.

    It ends with the module, so that it uses no memory while other modules run;
    the next one uses the same Java process.

    A missing Java fails the run: a skip would look like a pass.
    """
    from pyspark.sql import SparkSession

    require_spark()
    require_java()
    before = {name: os.environ.get(name) for name in PYTHONS}
    os.environ.update(dict.fromkeys(PYTHONS, python))
    builder = SparkSession.builder.master("local[2,4]").appName("kafka-marshal tests")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    home = tmp_path_factory.mktemp("spark")
    builder = builder.config("spark.sql.warehouse.dir", str(home / "warehouse"))
    builder = builder.config("spark.local.dir", str(home / "local"))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    register(session)
    try:
        yield session
    finally:
        for query in session.streams.active:
            query.stop()
        session.stop()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@pytest.fixture(scope="module")
def database():
    """A database server with an empty table ``rows_of_spark``."""
    with postgres.running() as server, server.connect() as connection:
        connection.execute(
            "CREATE TABLE rows_of_spark (topic text, part int, number bigint)"
        )
        yield server


PYTHONS = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A folder for the checkpoint of the test's one query."""
    return str(tmp_path / "checkpoint")


@pytest.fixture
def running(spark) -> Iterator[Callable]:
    """Start queries that are stopped whatever the test does."""
    started = []

    @contextmanager
    def run(writer):
        query = writer.start()
        started.append(query)
        try:
            yield query
        finally:
            query.stop()

    yield run
    for query in started:
        query.stop()
