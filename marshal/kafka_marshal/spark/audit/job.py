"""The Spark job of an audit: plans, folds in parallel, writes and publishes tables."""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from kafka_marshal import errors
from kafka_marshal.clock import SystemClock
from kafka_marshal.errors import ConfigurationError, CoordinationError, MarshalError
from kafka_marshal.history.historian import SAMPLE_MS_DEFAULT
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.spark.audit import schema
from kafka_marshal.spark.audit.folding import (
    Bounds,
    LogEnds,
    Source,
    Work,
    fold,
    log_ends,
    require_coordination_log,
)
from kafka_marshal.spark.audit.invariants import Finding, check
from kafka_marshal.spark.audit.rows import batches
from kafka_marshal.spark.audit.store import AS_OF, ROWS, Run, Store
from kafka_marshal.spark.paths import for_reader

if TYPE_CHECKING:
    import pyarrow as pa

# Number of tables written at once: the jobs are short, and mostly wait.
WRITERS = 4
_PLAN = f"{schema.T.name} int, end bigint, is_new boolean"
# Errors of this package in a task's traceback; their messages have one line.
_MARSHAL_ERROR = re.compile(r"^kafka_marshal\.errors\.(\w+): (.+)$", re.MULTILINE)
_RAISED = re.compile(r"^[\w.]+(?:Error|Exception): .+$", re.MULTILINE)
# Reserved keys are claimed for a moment every few minutes, to write checkpoints. Their
# gaps are no takeover times, and they would be the keys that change owners most.
IS_DATA = f"topic NOT IN {tuple(sorted(RESERVED_TOPICS))}"
_TAKEOVERS = f"""
SELECT ending, COUNT(*) AS handoffs_count, PERCENTILE(gap_ms, 0.5) AS p50_ms,
       PERCENTILE(gap_ms, 0.99) AS p99_ms, MAX(gap_ms) AS max_ms,
       MAX(late_ms) AS late_ms_max
FROM handoffs WHERE {IS_DATA} GROUP BY ending ORDER BY ending
"""  # noqa: S608 - of constants


@attrs.frozen
class Step:
    """What one run reads and reports; sent to every task.

    Attributes:
        source: Connection to the log.
        bounds: The part of the log to report.
        sample_ms: Log time between two rows of a key in ``positions``.
    """

    source: Source
    bounds: Bounds
    sample_ms: int = attrs.field(kw_only=True)


class Audit:
    """A written audit: its runs, and its tables.

    Attributes:
        out: Directory of the audit.
        runs: The published runs, in order.
        spark: Session of the tables, with a view for each table.
    """

    def __init__(self, spark: SparkSession, out: str) -> None:
        """Open an existing audit.

        Args:
            spark: A session; the audit gets a new session of it, with its own views.
            out: Directory of the audit.

        Raises:
            ConfigurationError: The directory has no audit.
        """
        self.spark = spark.newSession()
        self._store = Store(self.spark, out)
        self.out = self._store.out
        self.runs = self._store.runs()
        if not self.runs:
            raise ConfigurationError(
                f"{self.out} has no audit; write one with: marshal spark audit --out",
                setting="out",
            )
        self._tables = {
            table.name: self._store.table(table, self.runs) for table in schema.TABLES
        }
        for name, table in self._tables.items():
            table.createOrReplaceTempView(name)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts of the last run: topic, cluster, time."""
        return self.runs[-1].facts

    @property
    def tables(self) -> dict[str, DataFrame]:
        """The tables by name; ``spark`` has a view for each."""
        return dict(self._tables)

    def partitions(self) -> list[dict[str, Any]]:
        """Return the end state of every coordinating partition, in order."""
        rows = self._tables[schema.PARTITIONS.name].collect()
        found = [row.asDict() for row in rows]
        return sorted(found, key=lambda row: int(row[schema.T.name]))

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each history table."""
        names = [table.name for table in schema.TABLES if not table.is_final]
        parts = " UNION ALL ".join(
            f"SELECT '{name}' AS name, COUNT(*) AS count FROM {name}"  # noqa: S608
            for name in names
        )
        found = {row["name"]: row["count"] for row in self.spark.sql(parts).collect()}
        return {name: found[name] for name in names}

    def takeovers(self) -> list[dict[str, Any]]:
        """Return how long data partitions had no owner, by the last claim's ending."""
        return [row.asDict() for row in self.spark.sql(_TAKEOVERS).collect()]

    def check(self, *, tolerance_ms: int | None = None) -> list[Finding]:
        """Return violations of invariants; see ``invariants.check``."""
        return check(self._tables, tolerance_ms=tolerance_ms)


def audit(
    spark: SparkSession,
    out: str,
    *,
    source: Source | None = None,
    bounds: Bounds | None = None,
    incremental: bool = False,
    sample_ms: int = SAMPLE_MS_DEFAULT,
) -> Audit:
    """Read the coordination log, fold it in parallel, and write its tables.

    One task folds one coordinating partition, so an audit uses as many executor cores
    as there are partitions. Memory does not grow with the length of the log.

    Args:
        spark: The session to run in. Executors need this package and access to the
            brokers.
        out: Directory of the tables: new or empty, or with ``incremental`` that of
            the audit to continue. Every executor needs access to it.
        source: Connection to the log; localhost by default.
        bounds: The part of the log to report; all by default.
        incremental: Continue at the end of the last run in this directory, if there is
            one. The tables equal those of a single run over the whole log.
        sample_ms: Log time between two rows of a key in ``positions``.

    Raises:
        ConfigurationError: The directory holds something else, or bounds and
            ``incremental`` are both given.
        TopicMisconfigured: The topic does not exist, or is no coordination topic.
        LogTruncated: The log has lost entries after the last run.
        CoordinationError: The cluster did not answer, or the job failed.
    """
    source, bounds = source or Source(), bounds or Bounds()
    session = spark.newSession()
    store = Store(session, out)
    last = _last(store, bounds, incremental=incremental)
    if last is None:
        require_coordination_log(source)
    began_ms = SystemClock().wall_ms()
    log = log_ends(source)
    step = Step(source, bounds, sample_ms=sample_ms)
    run_next(step, log, store=store, last=last, as_of_ms=began_ms)
    return Audit(spark, out)


def run_next(
    step: Step, log: LogEnds, *, store: Store, last: Run | None, as_of_ms: int
) -> Run:
    """Fold the entries since the last run, and publish the next run.

    Args:
        step: What to read and report.
        log: Log ends up to which to fold.
        store: Directory of the runs.
        last: The run to continue, None for the first one.
        as_of_ms: When ``log`` was looked up, epoch ms.

    Raises:
        ConfigurationError: The last run read another log, or had other settings.
        CoordinationError: The job failed.
    """
    if last is not None:
        require_same(last, log, sample_ms=step.sample_ms)
    facts = {
        "schema": schema.SCHEMA,
        "coordination_topic": step.source.coordination_topic,
        "cluster_id": log.cluster_id,
        "topic_id": log.topic_id,
        "sample_ms": step.sample_ms,
        "bounds": attrs.asdict(step.bounds),
        "as_of": {
            "time_ms": as_of_ms,
            "offsets": {str(t): end for t, end in sorted(log.ends.items())},
        },
    }
    session = store.session
    staging = store.stage()
    run = f"{staging}/run"
    try:
        plan = _plan(session, log, state=None if last is None else store.state(last))
        folded = plan.mapInArrow(partial(_fold_all, step=step), schema.staged_ddl())
        folded.write.parquet(f"{staging}/folded")
        _write(session.read.parquet(for_reader(f"{staging}/folded")), run)
        number = 1 if last is None else last.number + 1
        return store.publish(run, number, facts=facts)
    except PySparkException as error:
        raise translate_error(error) from error
    finally:
        store.drop(staging)


def _last(store: Store, bounds: Bounds, *, incremental: bool) -> Run | None:
    """Return the run to continue, None without one."""
    if incremental and bounds != Bounds():
        raise ConfigurationError(
            "a range and incremental exclude each other: an incremental run reports "
            "all that was appended since the last run",
            setting="incremental",
        )
    runs = store.runs()
    if runs and not incremental:
        raise ConfigurationError(
            f"{store.out} has an audit already; continue it (--incremental), or "
            "name another directory",
            setting="out",
        )
    return runs[-1] if runs else None


def require_same(last: Run, log: LogEnds, *, sample_ms: int) -> None:
    """Raise unless the last run read this log, as a whole, with these samples."""
    facts = last.facts
    if (facts["cluster_id"], facts["topic_id"]) != (log.cluster_id, log.topic_id):
        raise ConfigurationError(
            f"{last.path} is of topic id {facts['topic_id']} of cluster "
            f"{facts['cluster_id']}, and this is {log.topic_id} of {log.cluster_id}; "
            "audit it into another directory",
            setting="out",
        )
    if facts["bounds"] != attrs.asdict(Bounds()) or facts["sample_ms"] != sample_ms:
        raise ConfigurationError(
            f"{last.path} was run with bounds {facts['bounds']} and a sample each "
            f"{facts['sample_ms']} ms; only a run over the whole log, with the same "
            "samples, can be continued",
            setting="incremental",
        )


def _plan(spark: SparkSession, log: LogEnds, *, state: DataFrame | None) -> DataFrame:
    """Return a row for the ``Work`` of each coordinating partition, one per task."""
    number = schema.T.name
    rows = [(t, end, state is None) for t, end in sorted(log.ends.items())]
    plan = spark.createDataFrame(rows, _PLAN)
    if state is None:
        plan = plan.withColumn("saved", f.lit(None).cast("binary"))
    else:
        # A coordinating partition that the last run lacks is new.
        kept = state.select(number, "saved", "next_offset")
        plan = plan.drop("is_new").join(kept, number, "left")
        is_new = f.col("next_offset").isNull().alias("is_new")
        plan = plan.select(number, "end", is_new, "saved")
    return plan.repartitionById(len(rows), number)


def _fold_all(
    given: Iterator["pa.RecordBatch"], *, step: Step
) -> Iterator["pa.RecordBatch"]:
    """Fold the coordinating partitions of a task: by the plan, one."""
    for batch in given:
        for row in batch.to_pylist():
            work = Work(
                partition=row[schema.T.name],
                end=row["end"],
                saved=row["saved"],
                is_new=row["is_new"],
            )
            found = fold(
                work, step.source, bounds=step.bounds, sample_ms=step.sample_ms
            )
            yield from batches(found)


def _write(folded: DataFrame, run: str) -> None:
    """Split the rows of the tasks into tables, a few tables at a time."""
    aims: list[tuple[DataFrame, str]] = []
    for table in schema.ALL:
        found = folded.where(f.col("table") == table.name)
        rows = found.select(f"{table.name}.*", f.col("is_open").alias("_is_open"))
        closed, still = rows.where("not _is_open"), rows.where("_is_open")
        part = AS_OF if table.is_final else ROWS
        aims.append((closed, f"{run}/{part}/{table.name}"))
        if table.has_open_rows:
            aims.append((still, f"{run}/{AS_OF}/{table.name}"))
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda aim: aim[0].drop("_is_open").write.parquet(aim[1]), aims))


def translate_error(error: PySparkException) -> MarshalError:
    """Return the error of this package that made a job fail, else one with Spark's."""
    text = str(error)
    for name, message in _MARSHAL_ERROR.findall(text):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, MarshalError):
            try:
                made: MarshalError = kind(message)
            except TypeError:  # its constructor needs more than a message
                made = CoordinationError(message)
            return made
    raised = _RAISED.findall(text)
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    return CoordinationError(f"the Spark job failed: {raised[-1] if raised else first}")
