"""``spark.readStream.format("marshal")``: a query's part of its group's topics.

One Python process of the driver lives as long as the query. It holds the claims,
plans each batch and confirms what is committed; tasks read.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from .offsets import to_marks, to_offset
from .options import Options
from .planning import Limit, cut
from .task import Task, TaskPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from .query import Query


class MarshalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads micro-batches of what the query holds.

    Nothing is opened before it is used: Spark makes such readers to plan, too, and
    sends them to its workers.
    """

    def __init__(self, options: Options, schema: "StructType") -> None:
        self._options = options
        self._schema = schema
        self._query: Query | None = None
        self._is_new = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: a task needs options only."""
        return self.__dict__ | {"_query": None}

    # --- offsets

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return where a new query starts: nothing is planned."""
        self._is_new = True
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return how much one batch takes by the options."""
        options = self._options
        if options.max_offsets is not None:
            return ReadMaxRows(options.max_offsets)
        if options.min_offsets is not None:
            return ReadMinRows(options.min_offsets)
        return ReadAllAvailable()

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, str]:
        """Plan a batch; everything below ``start`` is committed by now."""
        claims = self._opened().claims
        return to_offset(claims.latest(to_marks(start), self._limit(limit)))

    def _limit(self, limit: ReadLimit) -> Limit:
        least = self._options.min_offsets
        if isinstance(limit, ReadMaxRows):
            return Limit(limit.max_rows, least)
        if isinstance(limit, ReadMinRows):
            return Limit(None, limit.min_rows)
        return Limit()

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802 - Spark's name
        """Return up to where logs can be read, as last seen, for Spark's metrics."""
        if self._query is None:
            return None
        ends = self._query.claims.ends
        return {f"{p.topic}:{p.partition}": ends[p] for p in sorted(ends)}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Take where logs end now as all there is to do."""
        self._opened().claims.aim()

    # --- batches

    def partitions(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Sequence[TaskPartition]:
        """Return what each task of a batch reads."""
        from kafka_marshal.tickets import ClaimRef

        options = self._options
        query = self._opened()
        parts = query.claims.parts(to_marks(start), to_marks(end))
        of = {part.stretch.partition: part for part in parts}
        ranges = [part.stretch for part in parts]
        if options.delivery == "alo":
            most = options.max_task_offsets
            ranges = cut(ranges, options.min_partitions, most=most)
        tasks = []
        for each in ranges:
            part = of[each.partition]
            owner = part.owner
            assert each.token is not None
            claim = ClaimRef(
                query.marshal.group_id,
                owner.client_id,
                owner.incarnation,
                each.partition.topic,
                each.partition.partition,
                each.token.offset,
                str(each.token),
                part.secret,
            )
            span = (each.first, each.end)
            tasks.append(Task(each.partition, *span, claim, each.topic_id))
        return [TaskPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """Read one range, in a worker."""
        if not isinstance(partition, TaskPartition) or partition.task is None:
            return iter(())
        from . import fetch

        return fetch.read(partition.task, self._options, schema=self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Confirm a batch that Spark has committed."""
        self._opened().claims.confirm(to_marks(end))

    def stop(self) -> None:
        """Give every partition up at its confirmed position."""
        query, self._query = self._query, None
        if query is not None:
            from .query import end_undisturbed

            end_undisturbed()
            query.close()

    # --- opening

    def _opened(self) -> "Query":
        if self._query is None:
            from .query import Query

            self._query = Query.open(self._options, is_new=self._is_new)
        return self._query
