"""The columns of ``format("marshal")``, and Arrow batches of fetched slices.

Not part of ``fetch``, so that planning imports no Kafka client.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kafka_marshal.errors import LogUnreadable
from kafka_marshal.protocol.types import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafka_marshal.kafka_io.columns import Headers, Slice


_BITS = 8
# Spark's timestamps are 64-bit numbers of microseconds.
_TIME_MS_MAX = (2**63 - 1) // 1000


def columns(*, has_headers: bool, has_token: bool) -> "StructType":
    """Return the columns of Spark's own Kafka source, in its order.

    ``has_token`` adds the columns that sinks need: ``token``, and ``topicId``, Kafka's
    id of the topic.
    """
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
    if has_token:
        found = found.add("token", of.StringType()).add("topicId", of.StringType())
    return found


def arrow_schema(schema: "StructType") -> "pa.Schema":
    """Return the Arrow schema that Spark expects for a schema."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def batch_maker(
    schema: "pa.Schema",
    partition: TopicPartition,
    *,
    token: str | None,
    topic_id: str | None = None,
) -> Callable[["Slice"], "pa.RecordBatch"]:
    """Return a function that makes record batches of slices of one partition.

    Args:
        schema: Schema of the batches.
        partition: Data partition, for the columns ``topic`` and ``partition``.
        token: Fencing token, for the column ``token``.
        topic_id: Kafka's id of the topic in hex, for the column ``topicId``.

    Returns:
        The function. It raises ``LogUnreadable`` for a timestamp that Spark cannot
        represent.
    """
    import pyarrow as pa

    types = {field.name: field.type for field in schema}

    # Most slices have the same length, so constant columns can be reused.
    @lru_cache(maxsize=len(types))
    def same(name: str, value: str | int | None, count: int) -> Any:  # noqa: ANN401
        return _repeated(value, types[name], count)

    def make(rows: "Slice") -> "pa.RecordBatch":
        count = len(rows.offsets)
        times = times_column(rows.times_ms, rows.offsets, partition=partition)
        columns: dict[str, Any] = {
            "key": _column(rows.keys, types["key"]),
            "value": _column(rows.values, types["value"]),
            "topic": same("topic", partition.topic, count),
            "partition": same("partition", partition.partition, count),
            "offset": _column(rows.offsets, types["offset"]),
            "timestamp": times,
            "timestampType": _column(rows.kinds, types["timestampType"]),
        }
        if rows.headers is not None:
            columns["headers"] = _headers(rows.headers, types["headers"])
        if "token" in types:
            columns["token"] = same("token", token, count)
            columns["topicId"] = same("topicId", topic_id, count)
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in schema.names], schema=schema
        )

    return make


def times_column(
    times_ms: Sequence[int], offsets: Sequence[int], *, partition: TopicPartition
) -> "pa.Array":
    """Return timestamps of records in microseconds, the unit of Spark.

    Args:
        times_ms: Epoch milliseconds; may be an array of NumPy or Arrow.
        offsets: Offsets of the records, for the error.
        partition: Data partition, for the error.

    Raises:
        LogUnreadable: Spark cannot represent a timestamp.
    """
    import numpy as np
    import pyarrow as pa

    times = np.asarray(times_ms, np.int64)
    if times.size and not -_TIME_MS_MAX <= times.min() <= times.max() <= _TIME_MS_MAX:
        found = np.flatnonzero((times < -_TIME_MS_MAX) | (times > _TIME_MS_MAX))[0]
        offset = int(offsets[found])
        place = f"{partition.topic}:{partition.partition}"
        raise LogUnreadable(
            f"offset {offset} of {partition} has the timestamp {times[found]} ms, "
            "which a column of Spark cannot hold: its producer probably sets "
            "microseconds or nanoseconds. Correct the producer, and skip the record: "
            f"in a stream with marshal groups reset GROUP --topic {place} "
            f"--to-offset {offset + 1} --execute, in a batch with startingOffsets"
        )
    # Arrow's cast takes three times as long for a slice.
    return _of_numbers(times * 1_000, pa.timestamp("us", "UTC"))


# ``pa.array`` and ``pa.scalar`` import pandas, to check for values of its types. That
# takes each worker half a second, so columns are made from buffers if possible.


def _column(values: Any, kind: Any) -> Any:  # noqa: ANN401 - Arrow's
    """Return values as an Arrow array."""
    import numpy as np
    import pyarrow as pa

    if isinstance(values, pa.Array):
        return values
    if (
        isinstance(values, np.ndarray)
        and values.dtype.kind == "i"
        and values.dtype.itemsize * _BITS == kind.bit_width
    ):
        return _of_numbers(values, kind)
    return pa.array(values, kind)


def _repeated(value: str | int | None, kind: Any, count: int) -> Any:  # noqa: ANN401
    """Return an Arrow array that repeats one string or 32-bit number."""
    import numpy as np
    import pyarrow as pa

    if value is None:
        return pa.nulls(count, kind)
    if isinstance(value, int):
        return _of_numbers(np.full(count, value, np.int32), kind)
    data = value.encode()
    edges = pa.py_buffer(np.array([0, len(data)], np.int32))
    one = pa.Array.from_buffers(kind, 1, [None, edges, pa.py_buffer(data)])
    return pa.repeat(one[0], count)


def _of_numbers(values: Any, kind: Any) -> Any:  # noqa: ANN401 - NumPy's, Arrow's
    """Return a NumPy array of numbers as an Arrow array; both have one bit width."""
    import numpy as np
    import pyarrow as pa

    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def _headers(headers: Sequence["Headers"], kind: Any) -> Any:  # noqa: ANN401
    import pyarrow as pa

    # Spark's own source has null for a record without headers.
    rows = [
        [{"key": name, "value": value} for name, value in pairs] if pairs else None
        for pairs in headers
    ]
    return pa.array(rows, kind)
