"""``spark.readStream.format("marshal")``: a query's part of its group's topics.

One Python process of the driver lives as long as the query. It holds the claims,
plans each batch and confirms what is committed; tasks read.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from kafka_marshal.client import Marshal
from kafka_marshal.engine import Delivery
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.tickets import ClaimRef

from . import fetch
from .batch import TaskPartition
from .claims import Claims, Limit, Rules
from .fetch import Task
from .offsets import to_marks, to_offset
from .options import EARLIEST, LATEST, Bound, Options
from .planning import cut
from .starting import Cluster

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

LOGGER = logging.getLogger("kafka_marshal")
CLOSE_MS_MAX = 5_000
PATIENCE_MS = 10_000
RANDOM_BYTES = 4


class MarshalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads micro-batches of what the query holds.

    Nothing is opened before it is used: Spark makes such readers to plan, too, and
    sends them to its workers.
    """

    def __init__(self, options: Options, schema: "StructType") -> None:
        self._options = options
        self._schema = schema
        self._query: _Query | None = None
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
        return fetch.read(partition.task, self._options, schema=self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Confirm a batch that Spark has committed."""
        self._opened().claims.confirm(to_marks(end))

    def stop(self) -> None:
        """Give every partition up at its confirmed position."""
        query, self._query = self._query, None
        if query is not None:
            _end_undisturbed()
            query.close()

    # --- opening

    def _opened(self) -> "_Query":
        if self._query is None:
            self._query = _Query.open(self._options, is_new=self._is_new)
        return self._query


@attrs.define(eq=False)
class _Query:
    """What the driver's process of one query has open."""

    marshal: Marshal
    cluster: Cluster
    claims: Claims

    @classmethod
    def open(cls, options: Options, *, is_new: bool) -> "_Query":
        """Join the group, and begin to claim.

        Raises:
            MarshalError: What went wrong; nothing is left open.
        """
        _end_in_order()
        settings = options.settings
        cluster = Cluster(options)
        opened: list[Marshal | Cluster] = [cluster]
        try:
            starts = _starts(options, cluster, is_new=is_new)
            marshal = Marshal(
                settings.bootstrap_servers,
                group_id=options.group or "",
                client_id=options.client_id or _drawn_name(),
                coordination_topic=settings.coordination_topic,
                options=settings.options,
                transport=settings.transport,
                state_dir=options.state_dir,
                sidecar=options.sidecar,
                sidecar_token_file=options.sidecar_token_file,
            )
            opened.append(marshal)
            ranges = marshal.ranges(
                *options.topics,
                pattern=options.pattern,
                delivery=Delivery(options.delivery),
                policy=options.policy,
                claims_max=options.claims_max,
                starts=starts,
                isolation_level=options.isolation_level,
            )
        except BaseException:
            for each in reversed(opened):
                each.close()
            raise
        rules = Rules(
            is_at_most_once=options.delivery == "amo",
            fails_on_data_loss=options.fails_on_data_loss,
            max_delay_ms=options.max_delay_ms,
            patience_ms=2 * marshal.engine.context.heartbeat_interval_ms + PATIENCE_MS,
            claims_max=options.claims_max,
        )
        if options.delivery == "amo" and (
            options.min_partitions or options.max_task_offsets
        ):
            LOGGER.warning(
                "minPartitions and maxRecordsPerPartition are ignored at most once: a "
                "range is granted as a whole, to one task"
            )
        claims = Claims(ranges, cluster, rules)
        return cls(marshal, cluster, claims)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self.marshal.close(timeout_ms=CLOSE_MS_MAX)
        self.cluster.close()


def _starts(
    options: Options, cluster: Cluster, *, is_new: bool
) -> dict[TopicPartition, int]:
    """Return where to begin what the group has no position of, but at the earliest.

    As in Spark's own source, "latest" is the end when the query first starts: what
    comes later, of new partitions too, is read from its beginning.
    """
    bound = options.start or Bound(LATEST)
    if bound.is_plain and (bound.everywhere == EARLIEST or not is_new):
        return {}
    return cluster.resolve(bound, cluster.partitions(), name="startingOffsets")


def _drawn_name() -> str:
    """Return a name that no other query has.

    Only a name that stays lets a restart resume at once what it held.
    """
    host = "".join(
        c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname()
    )
    return f"spark-{host[:100] or 'host'}-{os.urandom(RANDOM_BYTES).hex()}"


def _exit(number: int, _frame: object) -> None:
    # Once: the same comes again at once, and would end the way to ``stop``.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(0)


def _end_in_order() -> None:
    """Have Spark's way of ending this process run ``stop``, which releases claims."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit)


def _end_undisturbed() -> None:
    """Let nothing cut short what ``stop`` does.

    Spark asks this process to end more than once, and closes its connection, which
    alone ends it in order.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
