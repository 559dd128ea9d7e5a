"""The columns of ``format("marshal")``, and Arrow batches of what was fetched."""

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kafka_marshal.kafka_io.slices import Headers, Slice
from kafka_marshal.protocol.types import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


def columns(*, has_headers: bool, has_token: bool) -> "StructType":
    """Return the columns: those of Spark's own Kafka source, in its order, and more."""
    from pyspark.sql import types as of

    header = of.StructType().add("key", of.StringType()).add("value", of.BinaryType())
    found = (
        of.StructType()
        .add("key", of.BinaryType())
        .add("value", of.BinaryType())
        .add("topic", of.StringType())
        .add("partition", of.IntegerType())
        .add("offset", of.LongType())
        .add("timestamp", of.TimestampType())
        .add("timestampType", of.IntegerType())
    )
    if has_headers:
        found = found.add("headers", of.ArrayType(header))
    return found.add("token", of.StringType()) if has_token else found


def arrow_schema(schema: "StructType") -> "pa.Schema":
    """Return the Arrow schema that Spark expects for its own."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def batch_maker(
    schema: "pa.Schema", partition: TopicPartition, *, token: str | None
) -> Callable[[Slice], "pa.RecordBatch"]:
    """Return what makes record batches of the slices of one partition.

    Args:
        schema: Their schema.
        partition: Data partition, for two columns that never change.
        token: Fencing token, for the column of that name.
    """
    import pyarrow as pa

    types = {field.name: field.type for field in schema}

    # Slices are as long as the one before, but for the first and the last.
    @lru_cache(maxsize=len(types))
    def same(name: str, value: object, count: int) -> Any:  # noqa: ANN401
        return pa.repeat(pa.scalar(value, types[name]), count)

    def make(rows: Slice) -> "pa.RecordBatch":
        count = len(rows.offsets)
        times = _numbers(rows.times_ms, pa.timestamp("ms", "UTC"))
        columns: dict[str, Any] = {
            "key": _bytes(rows.keys, types["key"]),
            "value": _bytes(rows.values, types["value"]),
            "topic": same("topic", partition.topic, count),
            "partition": same("partition", partition.partition, count),
            "offset": _numbers(rows.offsets, types["offset"]),
            "timestamp": times.cast(types["timestamp"]),
            "timestampType": _numbers(rows.kinds, types["timestampType"]),
        }
        if rows.headers is not None:
            columns["headers"] = _headers(rows.headers, types["headers"])
        if "token" in types:
            columns["token"] = same("token", token, count)
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in schema.names], schema=schema
        )

    return make


def _numbers(values: Sequence[int], kind: Any) -> Any:  # noqa: ANN401
    """Return a column; what lies in memory as Arrow wants it is taken as it is."""
    import numpy as np
    import pyarrow as pa

    if isinstance(values, range):
        return pa.array(np.arange(values.start, values.stop), kind)
    if isinstance(values, array) and 8 * values.itemsize == kind.bit_width:
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
    return pa.array(values, kind)


def _bytes(values: Sequence[bytes | None], kind: Any) -> Any:  # noqa: ANN401
    import pyarrow as pa

    # A column without keys is common, and need not be looked at one by one.
    if values[0] is None and values.count(None) == len(values):
        return pa.nulls(len(values), kind)
    return pa.array(values, kind)


def _headers(headers: Sequence[Headers], kind: Any) -> Any:  # noqa: ANN401
    import pyarrow as pa

    # Spark's own source has null where a record has none.
    rows = [
        [{"key": name, "value": value} for name, value in pairs] if pairs else None
        for pairs in headers
    ]
    return pa.array(rows, kind)
