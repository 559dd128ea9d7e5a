"""Arrow batches made of fetched slices."""

import subprocess
import sys
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from kafka_marshal.errors import LogUnreadable
from kafka_marshal.kafka_io.columns import Slice
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark.rows import (
    arrow_schema,
    batch_maker,
    columns,
    times_column,
)

T3 = TopicPartition("t", 3)


def made(rows, **extra):
    schema = arrow_schema(
        columns(
            has_headers=extra.get("has_headers", False),
            has_token=extra.get("has_token", False),
        )
    )
    batch = batch_maker(schema, T3, token="1.0.5", topic_id="a1")(rows)
    assert batch.schema.equals(schema), "Spark refuses any other"
    return batch.to_pylist()


def test_a_slice_becomes_rows():
    rows = Slice(
        offsets=[5, 9],
        times_ms=[1_700_000_000_123, 0],
        kinds=[0, 1],
        keys=[b"k", None],
        values=[b"v", b""],
        headers=None,
    )
    first, second = made(rows)
    assert first == {
        "key": b"k",
        "value": b"v",
        "topic": "t",
        "partition": 3,
        "offset": 5,
        "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC),
        "timestampType": 0,
    }
    assert (second["key"], second["value"], second["offset"]) == (None, b"", 9)


def test_lists_and_arrays_give_the_same_rows():
    times, kinds = [1_700_000_000_123, 0, -1], [1, 0, 1]
    kept = [None, b"k", None]
    as_lists = made(
        Slice(
            offsets=[5, 6, 7],
            times_ms=times,
            kinds=kinds,
            keys=kept,
            values=kept,
            headers=None,
        )
    )
    ready = pa.array(kept, pa.binary())
    arrays = np.array(times), np.array(kinds, np.int32), ready, ready
    assert made(Slice(np.array([5, 6, 7]), *arrays, None)) == as_lists


@pytest.mark.parametrize(
    "time_ms", [1_700_000_000_123_000_000, -1_700_000_000_123_000_000, -(2**63)]
)
def test_a_timestamp_out_of_sparks_range_raises_with_its_offset(time_ms):
    """As from a producer that sets nanoseconds, which a topic may allow."""
    times = np.array([1_700_000_000_123, time_ms])
    none = pa.nulls(2, pa.binary())
    kinds = np.zeros(2, np.int32)
    rows = Slice(np.array([5, 9]), times, kinds, none, none, None)
    with pytest.raises(LogUnreadable, match=r"offset 9 of t-3 .* t:3 --to-offset 10"):
        made(rows)


@pytest.mark.parametrize("time_ms", [(2**63 - 1) // 1_000, -((2**63 - 1) // 1_000)])
def test_the_last_timestamps_that_spark_can_hold_are_kept(time_ms):
    found = times_column(np.array([time_ms]), [5], partition=T3)
    assert found.cast(pa.int64()).to_pylist() == [time_ms * 1_000]


def test_slices_of_any_length_have_their_own_partition_and_token():
    schema = arrow_schema(columns(has_headers=False, has_token=True))
    make = batch_maker(schema, T3, token="1.0.5", topic_id="a1")
    for count in (2, 3, 2):
        none = [None] * count
        batch = make(
            Slice(
                offsets=range(count),
                times_ms=[0] * count,
                kinds=[0] * count,
                keys=none,
                values=none,
                headers=None,
            )
        )
        assert batch.column("token").to_pylist() == ["1.0.5"] * count
        assert batch.column("topicId").to_pylist() == ["a1"] * count
        assert batch.column("partition").to_pylist() == [3] * count


def test_headers_and_tokens_are_optional():
    headers = [[("a", b"1"), ("b", None)], ()]
    rows = Slice(
        offsets=[5, 6],
        times_ms=[0, 0],
        kinds=[0, 0],
        keys=[None, None],
        values=[None, None],
        headers=headers,
    )
    first, second = made(rows, has_headers=True, has_token=True)
    assert first["headers"] == [
        {"key": "a", "value": b"1"},
        {"key": "b", "value": None},
    ]
    assert second["headers"] is None
    assert (first["token"], first["key"], first["value"]) == ("1.0.5", None, None)


def test_a_column_of_nulls_keeps_its_type():
    rows = Slice(
        offsets=[1], times_ms=[0], kinds=[0], keys=[None], values=[None], headers=None
    )
    schema = arrow_schema(columns(has_headers=False, has_token=False))
    batch = batch_maker(schema, T3, token=None, topic_id=None)(rows)
    assert batch.column("key").type == pa.binary()


WITHOUT_PANDAS = """
import sys

import numpy as np
import pyarrow as pa

from kafka_marshal.kafka_io.columns import Slice
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark.rows import arrow_schema, batch_maker, columns

schema = arrow_schema(columns(has_headers=False, has_token=True))
make = batch_maker(schema, TopicPartition("t", 3), token="1.0.5", topic_id="a1")
numbers = np.arange(3)
rows = Slice(
    offsets=numbers,
    times_ms=numbers,
    kinds=numbers.astype(np.int32),
    keys=pa.nulls(3, pa.binary()),
    values=pa.nulls(3, pa.binary()),
    headers=None,
)
make(rows).validate(full=True)
print("pandas" in sys.modules)
"""


def test_columns_of_arrays_are_made_without_loading_pandas():
    command = [sys.executable, "-c", WITHOUT_PANDAS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_constant_columns_are_valid_of_any_length():
    schema = arrow_schema(columns(has_headers=False, has_token=True))
    make = batch_maker(schema, T3, token=None, topic_id=None)
    for count in (0, 1, 3):
        none = [None] * count
        rows = Slice(
            offsets=range(count),
            times_ms=[0] * count,
            kinds=[0] * count,
            keys=none,
            values=none,
            headers=None,
        )
        batch = make(rows)
        batch.validate(full=True)
        assert batch["topic"].to_pylist() == ["t"] * count
        assert batch["partition"].to_pylist() == [3] * count
        assert batch["token"].to_pylist() == batch["topicId"].to_pylist() == none
