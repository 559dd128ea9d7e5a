"""An audit that follows the log: runs as micro-batches of Spark.

Spark's checkpoint has the end of each batch; the directory has the end of each
published run. A batch is one run, published by one rename. A batch that Spark repeats
after a crash is recognized by its ends and skipped, so no row is doubled or lost,
whether the checkpoint or the directory is ahead.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.history.historian import SAMPLE_MS_DEFAULT
from kafka_marshal.spark.audit import schema
from kafka_marshal.spark.audit.folding import (
    Bounds,
    LogEnds,
    Source,
    log_ends,
    require_coordination_log,
)
from kafka_marshal.spark.audit.job import Step, require_same, run_next, translate_error
from kafka_marshal.spark.audit.store import Run, Store
from kafka_marshal.spark.audit.tail import NAME, tail_of

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

EVERY_MS_DEFAULT = 60_000

OnRun = Callable[[Run], None]


def follow(
    spark: SparkSession,
    out: str,
    *,
    source: Source | None = None,
    sample_ms: int = SAMPLE_MS_DEFAULT,
    every_ms: int = EVERY_MS_DEFAULT,
    available_now: bool = False,
    on_run: OnRun | None = None,
) -> "StreamingQuery":
    """Start a stream that audits the log as it grows, run after run.

    It continues at the end of the last run in the directory. Open ``Audit(spark, out)``
    again to see later runs.

    Args:
        spark: The session to run in, as for ``audit``.
        out: Directory of the tables, and of the stream's checkpoint.
        source: Connection to the log; localhost by default.
        sample_ms: Log time between two rows of a key in ``positions``.
        every_ms: Time between two runs, if the log has grown.
        available_now: End at the current end of the log.
        on_run: Called with each published run, on a thread of the query.

    Returns:
        The query; ``await_end`` waits for it and translates its errors.

    Raises:
        ConfigurationError: The directory holds something else, or the audit of
            another log, or of a part of one.
        TopicMisconfigured: The topic does not exist, or is no coordination topic.
        CoordinationError: The cluster did not answer.
    """
    if every_ms < 1:
        raise ConfigurationError(
            f"every_ms is {every_ms}; it must be at least 1", setting="every_ms"
        )
    source = source or Source()
    session = spark.newSession()
    store = Store(session, out)
    runs = store.runs()
    if not runs:
        require_coordination_log(source)
    log = log_ends(source)
    step = Step(source, Bounds(), sample_ms=sample_ms)
    last = runs[-1] if runs else None
    if last is not None:
        require_same(last, log, sample_ms=sample_ms)
    session.dataSource.register(tail_of(source))
    writer = (
        session.readStream.format(NAME)
        .load()
        .writeStream.queryName("marshal_audit")
        .option("checkpointLocation", store.checkpoint)
        .foreachBatch(_Batches(step=step, store=store, last=last, on_run=on_run))
    )
    if available_now:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{every_ms} milliseconds").start()


def await_end(query: "StreamingQuery", timeout_s: float) -> bool:
    """Wait for the end of a stream; return whether it has ended.

    Raises:
        CoordinationError: The stream failed. Published runs stay, and ``follow``
            continues after them.
        MarshalError: The stream failed for another reason; the same applies.
    """
    try:
        return bool(query.awaitTermination(timeout_s))  # type: ignore[arg-type]
    except PySparkException as error:
        raise translate_error(error) from error


@attrs.define(eq=False)
class _Batches:
    """Makes a run of each micro-batch.

    Attributes:
        step: What to read and report.
        store: Directory of the runs.
        last: The last run.
        on_run: Called with each run.
    """

    step: Step
    store: Store
    last: Run | None
    on_run: OnRun | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Publish the run of a batch, unless it was published before a crash."""
        del batch_id  # a new checkpoint counts from 0 again
        rows = [row.asDict() for row in frame.collect()]
        if not rows:
            return
        log, as_of_ms = _log_of(rows), rows[0]["as_of_ms"]
        if self.last is not None:
            require_same(self.last, log, sample_ms=self.step.sample_ms)
            done = {int(t): n for t, n in self.last.facts["as_of"]["offsets"].items()}
            if all(done.get(t, -1) >= end for t, end in log.ends.items()):
                return
            # A run of ``audit`` may have read further in some partitions.
            ends = {t: max(end, done.get(t, 0)) for t, end in log.ends.items()}
            log = attrs.evolve(log, ends=ends)
        run = run_next(
            self.step, log, store=self.store, last=self.last, as_of_ms=as_of_ms
        )
        self.last = run
        if self.on_run is not None:
            self.on_run(run)


def _log_of(rows: list[dict[str, Any]]) -> LogEnds:
    first = rows[0]
    ends = {row[schema.T.name]: row["end"] for row in rows}
    return LogEnds(first["cluster_id"], first["topic_id"], ends)
