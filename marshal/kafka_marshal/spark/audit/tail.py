"""The log's end as a stream: each micro-batch has the log ends up to which to fold.

The tasks that fold read the entries themselves, each for its coordinating partition,
from the checkpoint of the last run. So Spark transports one row for each partition,
however much was appended. Not part of ``following``, because Spark's planners import
this module.
"""

import logging
from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)

from kafka_marshal.clock import SystemClock
from kafka_marshal.errors import CoordinationError
from kafka_marshal.spark.audit import schema
from kafka_marshal.spark.audit.folding import LogEnds, Source, log_ends

NAME = "marshal_log"
DDL = (
    f"{schema.T.name} int, end bigint, as_of_ms bigint, cluster_id string, "
    "topic_id string"
)
LOGGER = logging.getLogger("kafka_marshal")

Offset = dict[str, Any]


def tail_of(source: Source) -> type[DataSource]:
    """Return a data source for the end of one log, to be registered.

    The class contains the connection, so that Spark's plans do not show it.
    """

    class LogTail(DataSource):
        """The end of one coordination topic."""

        @classmethod
        def name(cls) -> str:
            return NAME

        def schema(self) -> str:
            return DDL

        def streamReader(  # noqa: N802 - Spark's name
            self, schema: object
        ) -> DataSourceStreamReader:
            del schema
            return TailReader(source)

    return LogTail


class Ends(InputPartition):
    """The only task of a batch; it carries the offset at the batch's end."""

    def __init__(self, offset: Offset) -> None:
        super().__init__(None)
        self.offset = offset


class TailReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the end of the log; its Spark offsets have all that a run needs."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._target: Offset | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the offset of a new stream, which is empty: nothing is folded."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return no limit: the memory of a fold does not grow with the log."""
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """End the stream at the current end of the log."""
        self._target = to_offset(log_ends(self._source), SystemClock().wall_ms())

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: Offset, limit: ReadLimit
    ) -> Offset:
        """Return the end of the log; ``start`` if nothing was appended.

        If brokers do not answer, return ``start``; the next trigger retries.
        """
        del limit
        if self._target is not None:
            return newer(start, self._target)
        at_ms = SystemClock().wall_ms()
        try:
            found = log_ends(self._source)
        except CoordinationError as error:
            if not error.retriable or not start:
                raise
            LOGGER.warning("audit_waits for brokers that do not answer: %s", error)
            return start
        return newer(start, to_offset(found, at_ms))

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the only task of a batch."""
        del start
        return [Ends(end)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Yield a row for each coordinating partition."""
        assert isinstance(partition, Ends)
        offset = partition.offset
        about = (offset["as_of_ms"], offset["cluster_id"], offset["topic_id"])
        for number, end in offset["ends"].items():
            yield (int(number), end, *about)


def to_offset(log: LogEnds, as_of_ms: int) -> Offset:
    """Return log ends as a Spark offset."""
    return {
        "as_of_ms": as_of_ms,
        "cluster_id": log.cluster_id,
        "ends": {str(t): end for t, end in sorted(log.ends.items())},
        "topic_id": log.topic_id,
    }


def newer(start: Offset, end: Offset) -> Offset:
    """Return ``end``, or ``start`` if they differ only in time."""
    is_same = {**end, "as_of_ms": None} == {**start, "as_of_ms": None}
    return start if is_same else end
