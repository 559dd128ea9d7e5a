"""A sink that writes each row to a PostgreSQL database exactly once.

The database stores the position and the token of each topic partition, and changes them
in one transaction with the data. It refuses writes under an older token, independently
of clocks and of the log. Rows below the position are not written again. If a topic was
deleted and created again, which Kafka's id of the topic shows, it starts at position 0.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import attrs

from kafka_marshal.arguments import to_count
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import Token, TopicPartition
from kafka_marshal.spark.fencing import (
    SINK_COLUMNS,
    require_columns,
    warn_of_written_rows,
    write_by_claim,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")

Connect = Callable[[], Any]
"""Returns a new connection of a DB-API 2.0 driver for PostgreSQL, such as psycopg."""
WriteRows = Callable[[Any, Sequence["Row"]], None]
"""Writes rows of one topic partition, in offset order, by a cursor."""


@attrs.frozen
class TableSink:
    """A function for ``foreachBatch`` that writes each row once.

    ::

        def connect():
            return psycopg.connect(DSN)


        def write(cursor, rows):
            cursor.executemany(
                "INSERT INTO bills VALUES (%s, %s)",
                [(row.customer, row.amount) for row in rows],
            )


        sink = TableSink(connect, write, group="billing")
        sink.create()
        stream.writeStream.foreachBatch(sink).start()

    One task writes the rows of a topic partition in one transaction. ``write`` need not
    be idempotent, because the transaction is committed once or rolled back. ``connect``
    and ``write`` are sent to the executors.

    Attributes:
        connect: Returns a new connection.
        write: Writes rows by a cursor; must not commit.
        group: Group of the stream; each group has its own positions.
        table: Name of the table of positions, with an optional schema. Two sinks in one
            ``foreachBatch`` need a table each: with the same positions, the second one
            takes the rows for written.
        rows_at_once: Most rows in one call of ``write``.
        idle_ms_max: How long the database waits for the next statement of a
            transaction. A process that is suspended in a transaction blocks the next
            owner for that long; the next owner waits at most twice as long.
    """

    connect: Connect
    write: WriteRows
    group: str
    table: str = attrs.field(default="marshal_fence", kw_only=True)
    rows_at_once: int = attrs.field(default=1_000, kw_only=True)
    idle_ms_max: int = attrs.field(default=60_000, kw_only=True)

    @table.validator
    def _is_name(self, _: object, value: str) -> None:
        if not _NAME.fullmatch(value):
            raise ConfigurationError(
                f"table {value!r} is no plain name of a table", setting="table"
            )

    @rows_at_once.validator
    @idle_ms_max.validator
    def _is_count(self, field: Any, value: object) -> None:  # noqa: ANN401 - of attrs
        # Without rows in a call none is written; 0 ms are no limit to PostgreSQL.
        to_count(field.name, value)

    def create(self) -> None:
        """Create the table of positions, or add the column ``topic_id``.

        Call it before each start: tables of earlier versions lack that column.
        """
        with _transaction(self.connect) as cursor:
            cursor.execute(_CREATE.format(table=self.table))
            # Not ADD COLUMN IF NOT EXISTS, which would wait for all open transactions
            # that write.
            cursor.execute(_HAS_TOPIC_ID, (self.table,))
            if cursor.fetchone() is None:
                cursor.execute(_ADD_TOPIC_ID.format(table=self.table))

    def __call__(self, df: "DataFrame", batch_id: int) -> None:  # noqa: ARG002
        """Write a batch without rows that are stale or written already.

        Raises:
            ConfigurationError: A column is missing.
        """
        require_columns(df, SINK_COLUMNS)
        # One transaction needs all rows of a partition in one task, in order.
        write_by_claim(df, self._write)

    def _write(
        self,
        place: TopicPartition,
        *,
        token: str,
        topic_id: str,
        rows: "Iterator[Row]",
    ) -> None:
        with _transaction(self.connect) as cursor:
            write_rows(
                self,
                cursor,
                place=(self.group, *place),
                token=token,
                topic_id=topic_id,
                rows=rows,
            )

    def positions(self) -> dict[tuple[str, int], int]:
        """Return the position of each topic partition of the group."""
        with _transaction(self.connect) as cursor:
            cursor.execute(_POSITIONS.format(table=self.table), (self.group,))
            return {(topic, part): next_ for topic, part, next_ in cursor.fetchall()}


def write_rows(
    sink: TableSink,
    cursor: Any,  # noqa: ANN401 - of whatever driver
    *,
    place: tuple[str, str, int],
    token: str,
    rows: "Iterator[Row]",
    topic_id: str = "",
) -> int:
    """Write rows of one topic partition, read under one claim, in offset order.

    Runs in the caller's transaction. Consumers without Spark may call it, too.

    Args:
        sink: The sink.
        cursor: Cursor of the transaction.
        place: Group, topic and partition.
        token: Token of the claim.
        rows: Rows with the attribute ``offset`` and those that ``write`` uses.
        topic_id: Kafka's id of the rows' topic in hex, empty if unknown. If it differs
            from the stored id, the position is 0.

    Returns:
        Number of written rows; 0 if the token is stale.
    """
    names = {"table": sink.table}
    bound = _BOUND.format(idle_ms=int(sink.idle_ms_max))
    cursor.execute(bound)
    cursor.execute(f"SET LOCAL lock_timeout = {2 * int(sink.idle_ms_max)}")
    # The row of this partition stays locked until the transaction ends, so no other
    # process writes for it.
    values = (*place, *Token.parse(token), topic_id)
    cursor.execute(_ENTER.format_map(names), values)
    found = cursor.fetchone()
    if found is None:
        return 0
    first = position = found[0]
    seen = count = 0

    def unwritten() -> "Iterator[Row]":
        nonlocal seen
        for seen, row in enumerate(rows, 1):  # noqa: B007 - it counts
            # Several rows may have one offset: compare with the position at the start.
            if row.offset >= first:
                yield row

    new = unwritten()
    while batch := list(islice(new, sink.rows_at_once)):
        sink.write(cursor, batch)
        # Set it again: after pipelined statements the server does not count idle time.
        cursor.execute(bound)
        position = batch[-1].offset + 1
        count += len(batch)
    if seen and not count:
        warn_of_written_rows(TopicPartition(*place[1:]), first, option="table")
    cursor.execute(_LEAVE.format_map(names), (position, *place))
    return count


class _transaction:  # noqa: N801 - used like a function
    """A cursor; commits at the end, or rolls back on an error."""

    def __init__(self, connect: Connect) -> None:
        self._connection = connect()

    def __enter__(self) -> Any:  # noqa: ANN401
        return self._connection.cursor()

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._connection.commit()
            else:
                # After a lost connection this raises, too, and would hide the cause.
                with suppress(Exception):
                    self._connection.rollback()
        finally:
            self._connection.close()


_CREATE = """
CREATE TABLE IF NOT EXISTS {table} (
    group_id text NOT NULL,
    topic text NOT NULL,
    part integer NOT NULL,
    era bigint NOT NULL,
    leader_epoch bigint NOT NULL,
    epoch bigint NOT NULL,
    next_offset bigint NOT NULL,
    topic_id text NOT NULL DEFAULT '',
    PRIMARY KEY (group_id, topic, part)
)
"""
_HAS_TOPIC_ID = """
SELECT 1 FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attname = 'topic_id' AND NOT attisdropped
"""
_ADD_TOPIC_ID = "ALTER TABLE {table} ADD COLUMN topic_id text NOT NULL DEFAULT ''"
_BOUND = "SET LOCAL idle_in_transaction_session_timeout = {idle_ms}"
_ENTER = """
INSERT INTO {table} AS known
    (group_id, topic, part, era, leader_epoch, epoch, topic_id, next_offset)
VALUES (%s, %s, %s, %s, %s, %s, %s, 0)
ON CONFLICT (group_id, topic, part) DO UPDATE
SET era = excluded.era, leader_epoch = excluded.leader_epoch, epoch = excluded.epoch,
    topic_id = COALESCE(NULLIF(excluded.topic_id, ''), known.topic_id),
    next_offset = CASE
        WHEN known.topic_id IN ('', excluded.topic_id) OR excluded.topic_id = ''
        THEN known.next_offset
        ELSE 0
    END
WHERE (known.era, known.leader_epoch, known.epoch)
   <= (excluded.era, excluded.leader_epoch, excluded.epoch)
RETURNING next_offset
"""
_LEAVE = """
UPDATE {table} SET next_offset = %s WHERE (group_id, topic, part) = (%s, %s, %s)
"""
_POSITIONS = "SELECT topic, part, next_offset FROM {table} WHERE group_id = %s"
