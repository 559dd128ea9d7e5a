"""The log's end as a stream: each micro-batch says up to where to fold.

The entries themselves are read by the tasks that fold them, each its own partition,
from the state that the last run left. So what travels through Spark is one row for
each coordinating partition, however much was appended.
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
    """Return the data source of one log's end, to be registered.

    The class carries how to connect, so that no plan of Spark's shows it.
    """

    class LogTail(DataSource):
        """Where one coordination topic ends."""

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
    """The one task of a batch, which hands the batch's end on."""

    def __init__(self, offset: Offset) -> None:
        super().__init__(None)
        self.offset = offset


class TailReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Tells where the log ends; its offsets are what a run needs to know of it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._target: Offset | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return where a new stream starts: nothing was folded."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return that a batch takes all there is: a fold's memory does not grow."""
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Take where the log ends now as all there is to do."""
        self._target = to_offset(log_ends(self._source), SystemClock().wall_ms())

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: Offset, limit: ReadLimit
    ) -> Offset:
        """Return where the log ends; ``start`` where nothing was appended.

        Brokers that are away are waited for: the next look comes with the next
        trigger.
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
        """Return the one task of a batch."""
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
    """Return an offset of Spark."""
    return {
        "as_of_ms": as_of_ms,
        "cluster_id": log.cluster_id,
        "ends": {str(t): end for t, end in sorted(log.ends.items())},
        "topic_id": log.topic_id,
    }


def newer(start: Offset, end: Offset) -> Offset:
    """Return an end, or the start where it says the same but for the time."""
    is_same = {**end, "as_of_ms": None} == {**start, "as_of_ms": None}
    return start if is_same else end
