"""The data source: names, columns, and what it refuses; no session."""

import pickle
import subprocess
import sys

import pytest
from pyspark.sql.types import StringType, StructType

import kafka_marshal.spark as package
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.spark.batch import MarshalBatchReader
from kafka_marshal.spark.source import MarshalDataSource
from kafka_marshal.spark.stream import MarshalStreamReader

BASE = {"kafka.bootstrap.servers": "b:1", "subscribe": "t"}


def test_it_is_found_by_its_names():
    assert MarshalDataSource.name() == "marshal"
    assert package.MarshalDataSource is MarshalDataSource
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing


def test_columns_are_those_that_were_asked_for():
    names = ["key", "value", "topic", "partition", "offset", "timestamp"]
    source = MarshalDataSource(BASE)
    assert source.schema().names == [*names, "timestampType"]
    options = BASE | {"includeHeaders": "true", "includeToken": "true"}
    source = MarshalDataSource(options)
    assert source.schema().names == [*names, "timestampType", "headers", "token"]


def test_readers_are_made_without_a_connection_and_can_be_sent():
    source = pickle.loads(pickle.dumps(MarshalDataSource(BASE)))
    reader = pickle.loads(pickle.dumps(source.reader(source.schema())))
    assert isinstance(reader, MarshalBatchReader)
    source = MarshalDataSource(BASE | {"group": "g"})
    reader = source.streamReader(source.schema())
    assert isinstance(pickle.loads(pickle.dumps(reader)), MarshalStreamReader)


def test_options_are_checked_when_the_source_is_made():
    with pytest.raises(ConfigurationError, match="there is none of that"):
        MarshalDataSource(BASE | {"nonsense": "1"})
    source = MarshalDataSource(BASE)
    with pytest.raises(ConfigurationError, match="name the group"):
        source.streamReader(source.schema())
    source = MarshalDataSource(BASE | {"group": "g"})
    with pytest.raises(ConfigurationError, match="availableNow"):
        source.reader(source.schema())


def test_another_schema_is_refused():
    source = MarshalDataSource(BASE)
    with pytest.raises(ConfigurationError, match=r"leave schema\(\) out"):
        source.reader(StructType().add("value", StringType()))


PLANNERS = ("kafka_marshal.spark.source", "kafka_marshal.spark.stream")
READERS = ("kafka_marshal.spark.fetch", "kafka_marshal.tickets")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ((*PLANNERS, "kafka_marshal.spark.batch"), ["kafka", "kafka_marshal.engine"]),
        (READERS, ["kafka_marshal.client", "kafka_marshal.engine.engine"]),
    ],
)
def test_a_worker_loads_only_what_it_uses(modules, unwanted):
    """Spark starts processes that only plan; each pays for all that it loads."""
    program = (
        f"import sys, {', '.join(modules)}\n"
        f"print(*(name for name in {unwanted!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == ""
