"""``format("marshal")``: the data source with its batch and stream readers.

For each stream, Spark runs a Python process on the driver as long as the query lives.
It holds the claims, plans batches and confirms committed batches; tasks read. A batch
read plans a range of every partition, without claims.
"""

import sys
from collections.abc import Iterator, Sequence
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from kafka_marshal.errors import ConfigurationError, PositionError
from kafka_marshal.spark.options import EARLIEST, LATEST, Bound, Options, parse
from kafka_marshal.spark.planning import (
    Limit,
    PlannedRange,
    Task,
    TaskPartition,
    split_ranges,
    to_marks,
    to_offset,
)
from kafka_marshal.spark.requirements import require_spark
from kafka_marshal.spark.rows import columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafka_marshal.protocol.types import TopicPartition
    from kafka_marshal.spark.planning import Marks
    from kafka_marshal.spark.query import Query


def _rows_of(
    partition: InputPartition, options: Options, *, schema: "StructType"
) -> Iterator["pa.RecordBatch"]:
    if not isinstance(partition, TaskPartition) or partition.task is None:
        return iter(())
    from kafka_marshal.spark import fetch

    return fetch.read(partition.task, options, schema=schema)


class MarshalBatchReader(DataSourceReader):
    """Plans and reads a batch like Spark's own Kafka source."""

    def __init__(self, options: Options, schema: "StructType") -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[TaskPartition]:
        """Return the tasks; the only queries to the cluster happen here."""
        from kafka_marshal.spark.query import Cluster

        options = self._options
        cluster = Cluster(options)
        try:
            places = cluster.partitions()
            ids = cluster.topic_ids({place.topic for place in places})
            start = options.start or Bound(EARLIEST)
            firsts = cluster.within(start, cluster.resolve(start, places))
            end = options.end or Bound(LATEST)
            ends = cluster.within(end, cluster.resolve(end, places))
            starts = cluster.resolve(Bound(EARLIEST), places)
        finally:
            cluster.close()
        planned_ranges = [
            PlannedRange(
                partition=place,
                token=None,
                first=self._from(place, firsts[place], starts),
                end=ends[place],
                topic_id=ids.get(place.topic, ""),
            )
            for place in places
        ]
        planned_ranges = [each for each in planned_ranges if each.first < each.end]
        parts = split_ranges(
            planned_ranges, options.min_partitions, most=options.max_task_offsets
        )
        tasks = [
            Task(
                partition=each.partition,
                first=each.first,
                end=each.end,
                topic_id=each.topic_id,
            )
            for each in parts
        ]
        # Without tasks Spark would add one of its own, so return an empty one.
        return [TaskPartition(task) for task in tasks] or [TaskPartition(None)]

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """Read one range, in a worker."""
        return _rows_of(partition, self._options, schema=self._schema)

    def _from(
        self,
        place: "TopicPartition",
        first: int,
        starts: "dict[TopicPartition, int]",
    ) -> int:
        if first >= starts[place]:
            return first
        if self._options.fails_on_data_loss:
            raise PositionError(
                f"startingOffsets has {first} for {place}, whose log begins at "
                f"{starts[place]}; start later, or set failOnDataLoss to false",
                partition=place,
                requested=first,
                log_start=starts[place],
                log_end=-1,
            )
        return starts[place]


class MarshalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads micro-batches of the partitions that the query holds.

    Connections are opened on first use: Spark also creates such readers in other
    processes, for planning and in its workers.
    """

    def __init__(self, options: Options, schema: "StructType") -> None:
        self._options = options
        self._schema = schema
        self._query: Query | None = None
        self._is_new = False
        self._has_target = False
        # With at most once: the end of the last planned batch.
        self._planned_once: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the connections of this process; a task needs only options."""
        return self.__dict__ | {"_query": None}

    # --- offsets

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return the offset of a new query, which is empty: nothing is planned."""
        self._is_new = True
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the size limit of a batch from the options."""
        options = self._options
        if options.max_offsets is not None:
            return ReadMaxRows(options.max_offsets)
        if options.min_offsets is not None:
            return ReadMinRows(options.min_offsets)
        return ReadAllAvailable()

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, str]:
        """Plan a batch; Spark has committed everything below ``start``."""
        query = self._opened()
        marks = self._marks(start)
        planned = query.claims.latest(marks, self._limit(limit))
        # If there is nothing to read, return the same text: Spark compares it.
        return start if planned == marks else to_offset(planned, query.origin)

    def _marks(self, offset: dict[str, Any]) -> "Marks":
        """Parse an offset of the checkpoint.

        Raises:
            ConfigurationError: The offset belongs to another query.
            PositionError: The query does not read all its partitions, and
                ``failOnDataLoss`` is set.
        """
        query = self._opened()
        query.origin.require(offset)
        return query.claims.without_unread(to_marks(offset))

    def _limit(self, limit: ReadLimit) -> Limit:
        least = self._options.min_offsets
        if isinstance(limit, ReadMaxRows):
            return Limit(limit.max_rows, least)
        if isinstance(limit, ReadMinRows):
            return Limit(None, limit.min_rows)
        return Limit()

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802 - Spark's name
        """Return the last known log ends, for Spark's metrics."""
        if self._query is None:
            return None
        ends = self._query.claims.ends
        return {f"{p.topic}:{p.partition}": ends[p] for p in sorted(ends)}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """End the query at the log ends at the time when it opens.

        They are looked up later: when Spark calls this, it is not yet known whether the
        query is new.
        """
        self._has_target = True

    # --- batches

    def partitions(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Sequence[TaskPartition]:
        """Return the tasks of a batch.

        Raises:
            ConfigurationError: At most once, the query reads the batch in two places.
        """
        from kafka_marshal.grants import ClaimRef

        options = self._options
        query = self._opened()
        # Parse the end first: it has all partitions of the start.
        marks = self._marks(end)
        parts = query.claims.parts(self._marks(start), marks)
        of = {part.planned.partition: part for part in parts}
        ranges = [part.planned for part in parts]
        if not options.config.is_at_most_once:
            most = options.max_task_offsets
            ranges = split_ranges(ranges, options.min_partitions, most=most)
        elif ranges:
            self._require_one_use(end)
        tasks = []
        for each in ranges:
            part = of[each.partition]
            owner = part.owner
            assert each.token is not None
            claim = ClaimRef(
                group_id=query.marshal.group_id,
                client_id=owner.client_id,
                incarnation=owner.incarnation,
                topic=each.partition.topic,
                partition=each.partition.partition,
                epoch=each.token.offset,
                token=str(each.token),
                secret=part.secret,
            )
            task = Task(
                partition=each.partition,
                first=each.first,
                end=each.end,
                claim=claim,
                topic_id=each.topic_id,
            )
            tasks.append(task)
        return [TaskPartition(task) for task in tasks]

    def _require_one_use(self, end: dict[str, Any]) -> None:
        """Raise if a batch is planned twice: Spark does so if a frame is used twice."""
        if end == self._planned_once:
            raise ConfigurationError(
                "with delivery = amo each row is granted to one reader only, and the "
                "query reads one load() in two places, for example in a union of two "
                "filters: each would miss what the other reads. Call load() for each "
                "of them, with a group of its own, or persist the batch in "
                "foreachBatch and use it twice there, or set delivery to alo",
                setting="delivery",
            )
        self._planned_once = end

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """Read one range, in a worker."""
        return _rows_of(partition, self._options, schema=self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Confirm a batch that Spark has committed."""
        self._opened().claims.confirm(self._marks(end))

    def stop(self) -> None:
        """Release every partition at its confirmed position.

        Raises:
            ConfigurationError: The query ends because PySpark, which itself parses
                offsets of the checkpoint, cannot parse one.
        """
        self._close()
        # PySpark calls this while it handles its own error.
        error = sys.exc_info()[1]
        if isinstance(error, JSONDecodeError):
            raise ConfigurationError(
                f"the checkpoint has {error.doc[-80:]!r} as the end of an offset: the "
                "last file in its folder offsets was written only in part, for "
                "example because a disk was full or failed. Delete that file, that of "
                "the same number in the folder commits if there is one, and their .crc "
                "files, and start the query again: it plans that batch again, with "
                "delivery = alo including rows that it may have written already",
                setting="checkpointLocation",
            ) from error

    def _close(self) -> None:
        query = self._query
        if query is None:
            return
        try:
            from kafka_marshal.spark.query import ignore_termination

            ignore_termination()
        finally:
            # Also if a SIGTERM interrupts the lines above: it does so only once.
            self._query = None
            query.close()

    # --- opening

    def _opened(self) -> "Query":
        if self._query is None:
            self._options.require_stream()
            _require_own(self._schema, self._options)
            from kafka_marshal.spark.query import Query

            self._query = Query.open(self._options, is_new=self._is_new)
            if self._has_target:
                self._query.claims.fix_target()
        return self._query


class MarshalDataSource(DataSource):
    """Topics shared by claims, with the columns and options of Spark's Kafka source.

    docs/SPARK.md lists the options.

    Raises:
        ConfigurationError: An option is unknown, impossible, or contradicts another.
    """

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        require_spark()
        # Check the options when the frame is created, not when the query runs.
        self._parsed: Options = parse(dict(options.items()))

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "marshal"

    def schema(self) -> "StructType":
        """Return the columns."""
        return _columns(self._parsed)

    def reader(self, schema: "StructType") -> "DataSourceReader":
        """Return the reader of ``spark.read``."""
        from kafka_marshal.spark.source import MarshalBatchReader

        self._parsed.require_batch()
        _require_own(schema, self._parsed)
        return MarshalBatchReader(self._parsed, schema)

    def streamReader(  # noqa: N802 - Spark's name
        self, schema: "StructType"
    ) -> "DataSourceStreamReader":
        """Return the reader of ``spark.readStream``; it checks options on first use.

        If this method raised, PySpark would end with an UnboundLocalError of its own.
        """
        from kafka_marshal.spark.source import MarshalStreamReader

        return MarshalStreamReader(self._parsed, schema)


def _columns(options: Options) -> "StructType":
    return columns(has_headers=options.has_headers, has_token=options.has_token)


def _require_own(schema: "StructType", options: Options) -> None:
    own = _columns(options)
    if own.simpleString() != schema.simpleString():
        raise ConfigurationError(
            f"format marshal has the columns {own.simpleString()}, and was given "
            f"{schema.simpleString()}; leave schema() out, and select columns",
            setting="schema",
        )
