"""Fencing for ``foreachBatch``: drops rows whose claim is lost (PROTOCOL 6.5).

A batch may be written long after it was read: its query was suspended, restarted from
an old checkpoint, or disconnected while other members took over its partitions. Each
row has the token of its claim. In the tasks that write, ``fenced`` drops rows whose
token is no longer current.

A claim may still end between this check and the write. A sink that compares tokens
itself closes that gap: see ``sinks_table``, ``sinks_files`` and ``sinks_kafka``.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import groupby
from typing import TYPE_CHECKING, Any

import attrs

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.grants import GrantClient, open_grant_client
from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal.spark.java import python_options
from kafka_marshal.spark.options import parse

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, Row

LOOK_MS_MAX = 30_000
COLUMNS = ("topic", "partition", "offset", "token")
# For sinks that store positions: after a topic is recreated, its offsets begin again.
SINK_COLUMNS = (*COLUMNS, "topicId")

_LOGGER = logging.getLogger("kafka_marshal")

WriteBatch = Callable[["DataFrame", int], None]

WriteClaim = Callable[..., object]
"""Writes rows of one claim: ``write(place, token=TEXT, topic_id=HEX, rows=ROWS)``."""


@attrs.frozen
class Fence:
    """Checks tokens of a group. Can be pickled; connects from the host that uses it.

    Attributes:
        group: The group.
        connection: Connection to the coordination log; see ``open_grant_client``.
        sidecar: Address of the sidecar on the current host, or None.
    """

    group: str
    connection: Mapping[str, str] = attrs.field(repr=False)
    sidecar: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Fence":
        """Return the fence of a stream, from its options.

        Raises:
            ConfigurationError: The options have no group, or are not for a stream.
        """
        parsed = parse(options)
        parsed.require_stream()
        assert parsed.group is not None
        return cls(parsed.group, parsed.connection, parsed.sidecar)

    def holds(self, topic: str, partition: int, *, token: str) -> bool:
        """Return whether a token is that of the partition's current claim.

        Raises:
            DeadlineExceeded: The log was not read to its end in time.
            CoordinationError: The log or the sidecar did not answer.
        """
        found = self.grant_client().newest(
            Key(self.group, topic, partition), timeout_ms=LOOK_MS_MAX
        )
        return found is not None and found.owner is not None and found.token == token

    def grant_client(self) -> GrantClient:
        """Return this process's client for grants."""
        return open_grant_client(python_options(self.connection), sidecar=self.sidecar)


def fenced(
    df: "DataFrame", batch_id: int, *, options: Mapping[str, str]
) -> "DataFrame":
    """Return a batch without the rows whose claim has ended.

    The writing tasks check the tokens of each Arrow batch against an up-to-date fold of
    the log. The current owner of a partition processes the dropped rows. The frame is
    read once, as its rows are written: at most once, a second read would be empty.

    Args:
        df: Frame of ``foreachBatch``, or one derived from it, with the columns
            ``topic``, ``partition``, ``offset`` and ``token`` (``includeToken``).
        batch_id: Batch id of ``foreachBatch``.
        options: Options of the stream.

    Raises:
        ConfigurationError: A column is missing, or an option is wrong. Tasks raise it
            for a row without a token.
    """
    require_columns(df)
    return df.mapInArrow(_Guard(Fence.of(options), batch_id), schema=df.schema)


def fenced_by(options: Mapping[str, str]) -> Callable[[WriteBatch], WriteBatch]:
    """Decorate a function for ``foreachBatch``, so that it gets fenced batches.

    ::

        @fenced_by(OPTIONS)
        def write(df, batch_id):
            df.write.mode("append").parquet(PATH)


        stream.writeStream.foreachBatch(write)
    """

    def decorate(write: WriteBatch) -> WriteBatch:
        @wraps(write)
        def guarded(df: "DataFrame", batch_id: int) -> None:
            write(fenced(df, batch_id, options=options), batch_id)

        return guarded

    return decorate


def require_columns(df: "DataFrame", columns: Sequence[str] = COLUMNS) -> None:
    """Require the columns with the source and the token of each row.

    Args:
        df: The batch.
        columns: Names of the required columns.

    Raises:
        ConfigurationError: A column is missing.
    """
    missing = [name for name in columns if name not in df.columns]
    if missing:
        raise ConfigurationError(
            f"the batch has no column {' and no column '.join(missing)}, without which "
            "no sink can find stale rows; read with option includeToken = true, and "
            f"keep the columns {', '.join(columns)}",
            setting="includeToken",
        )


def require_token(
    topic: str | None, partition: int | None, *, offset: int | None, token: str | None
) -> str:
    """Return the token of a row, or raise: nobody holds a claim for a row without one.

    Args:
        topic: Topic of the row, None if the row is of no topic.
        partition: Its partition.
        offset: Its offset.
        token: Its token.

    Raises:
        ConfigurationError: The row has no token.
    """
    if token is not None:
        return token
    raise ConfigurationError(
        f"the row at offset {offset} of {topic}-{partition} has no token, so no sink "
        "can find out whether it is stale or repeated: spark.read made it, which holds "
        "no claims, or a union or an outer join added it. Write rows of a stream of "
        "format marshal only, or write these rows with a writer of Spark",
        setting="token",
    )


def warn_of_written_rows(place: TopicPartition, position: int, *, option: str) -> None:
    """Log that a sink wrote no row of a batch, because all are below its position.

    Args:
        place: The topic partition.
        position: The position that the sink has stored.
        option: What chooses where the sink stores positions.
    """
    _LOGGER.warning(
        "rows_already_written %s: all rows of this batch are below the sink's position "
        "%d, so it writes none of them: the batch is repeated, or another sink of this "
        "batch stores its positions in the same place; give each sink a %s of its own",
        *(place, position, option),
    )


def write_by_claim(df: "DataFrame", write: WriteClaim) -> None:
    """Write the rows of each topic partition in one task, in offset order.

    Each claim's rows are written by a separate call. ``write`` is sent to the
    executors. A row without a token ends the job.
    """
    place = ("topic", "partition")
    ordered = df.repartition(*place).sortWithinPartitions(*place, "offset")
    ordered.foreachPartition(partial(_write_task, write))


def _write_task(write: WriteClaim, rows: "Iterator[Row]") -> None:
    """Write the rows of one task, in Spark's Python workers."""
    for place, of_place in groupby(rows, lambda row: (row.topic, row.partition)):
        # In offset order, rows of a later claim follow.
        claims = groupby(of_place, _claim_of)
        for (token, topic_id), of_claim in claims:
            write(
                TopicPartition(*place),
                token=token,
                topic_id=topic_id or "",
                rows=of_claim,
            )


def _claim_of(row: "Row") -> tuple[str, str | None]:
    place = (row.topic, row.partition)
    return require_token(*place, offset=row.offset, token=row.token), row.topicId


@attrs.frozen
class _Guard:
    """Passes on the rows of current claims; runs in Spark's Python workers."""

    fence: Fence
    batch_id: int

    def __call__(self, batches: Iterator["pa.RecordBatch"]) -> Iterator[Any]:
        for batch in batches:
            current = self._current_rows(batch)
            if current.num_rows:
                yield current

    def _current_rows(self, batch: "pa.RecordBatch") -> "pa.RecordBatch":
        for topic, partition, token in _distinct(batch):
            if self.fence.holds(topic, partition, token=token):
                continue
            _LOGGER.warning(
                "batch %d: rows of %s-%d under token %s are dropped: the claim has "
                "ended, and the current owner of the partition processes them",
                *(self.batch_id, topic, partition, token),
            )
            batch = _without(batch, topic, partition=partition, token=token)
        return batch


def _distinct(batch: "pa.RecordBatch") -> list[tuple[str, int, str]]:
    import pyarrow as pa

    rows = pa.Table.from_batches([batch])
    groups = rows.group_by(["topic", "partition", "token"])
    found = []
    for each in groups.aggregate([("offset", "min")]).to_pylist():
        place = (each["topic"], each["partition"])
        token = require_token(*place, offset=each["offset_min"], token=each["token"])
        found.append((*place, token))
    return found


def _without(
    batch: "pa.RecordBatch", topic: str, *, partition: int, token: str
) -> "pa.RecordBatch":
    import pyarrow.compute as pc

    is_theirs = pc.and_(
        pc.equal(batch.column("topic"), topic),
        pc.equal(batch.column("partition"), partition),
    )
    is_theirs = pc.and_(is_theirs, pc.equal(batch.column("token"), token))
    return batch.filter(pc.invert(pc.fill_null(is_theirs, fill_value=False)))
