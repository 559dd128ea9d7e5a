"""Directory of an audit's tables: runs, each published by one rename.

::

    OUT/runs/00000001/run.json          what the run read, and when
                     /rows/TABLE/       complete rows
                     /as_of/TABLE/      open rows and the state at its end
       /runs/00000002/...               continues at the end of the first one
       /_staging-.../                   a run in progress, or one that crashed
       /_checkpoint/                    Spark's checkpoint of a stream

A run reads ``as_of`` of the last run and writes its files into a staging directory,
which a rename publishes. A run that crashes leaves the tables unchanged, and the next
run repeats its work.

The directory needs an atomic rename by Spark's Hadoop client: local file systems and
HDFS have it, object stores do not.
"""

import json
import re
import uuid
from typing import Any

import attrs
from pyspark.sql import DataFrame, SparkSession

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.spark.audit import schema
from kafka_marshal.spark.audit.schema import Table
from kafka_marshal.spark.paths import for_hadoop, for_reader

ROWS = "rows"
AS_OF = "as_of"
_RUN = re.compile(r"\d{8}")
_STAGING = "_staging-"
_CHECKPOINT = "_checkpoint"


@attrs.frozen
class Run:
    """A published run.

    Attributes:
        number: Counts from 1.
        path: Its directory.
        facts: Content of ``run.json``.
    """

    number: int
    path: str
    facts: dict[str, Any]


class Store:
    """The directory of one audit. Used by the driver, for one run at a time.

    Attributes:
        session: The session to read and write with.
        out: Absolute URI of the directory.
    """

    def __init__(self, spark: SparkSession, out: str) -> None:
        """Open a directory, which need not exist.

        Args:
            spark: The session to read and write with.
            out: Path or URI of the directory.
        """
        self.session = spark
        session: Any = spark
        self._jvm = session._jvm  # noqa: SLF001 - for Hadoop's client
        self._hadoop = self._jvm.org.apache.hadoop.fs
        self._conf = session._jsc.hadoopConfiguration()  # noqa: SLF001 - the same
        self._gateway = session._sc._gateway  # noqa: SLF001 - the same
        at = self._hadoop.Path(for_hadoop(out))
        self._files = at.getFileSystem(self._conf)
        # Absolute, because executors may have other working directories.
        self.out: str = self._files.makeQualified(at).toString().rstrip("/")

    @property
    def checkpoint(self) -> str:
        """Directory for Spark's checkpoint of a stream that follows the log."""
        return f"{self.out}/{_CHECKPOINT}"

    def runs(self) -> list[Run]:
        """Return the published runs, in order.

        Raises:
            ConfigurationError: The directory holds something else, or an audit of
                another release.
        """
        names = set(self._names(self.out)) - {_CHECKPOINT}
        here = {name for name in names if not name.startswith(_STAGING)}
        numbers = self._names(f"{self.out}/runs") if "runs" in here else []
        others = here - {"runs"} | {n for n in numbers if not _RUN.fullmatch(n)}
        if others:
            raise ConfigurationError(
                f"{self.out} is no directory of an audit: it holds "
                f"{', '.join(sorted(others)[:3])}; name one that is empty or new",
                setting="out",
            )
        found = []
        for name in sorted(numbers):
            path = f"{self.out}/runs/{name}"
            found.append(Run(int(name), path, self._facts(f"{path}/run.json")))
        for run in found:
            if run.facts.get("schema") != schema.SCHEMA:
                raise ConfigurationError(
                    f"{run.path} has tables of schema {run.facts.get('schema')}, and "
                    f"this release writes {schema.SCHEMA}; audit into a new directory",
                    setting="out",
                )
        return found

    def stage(self) -> str:
        """Return a new staging directory; delete those of crashed runs."""
        for name in self._names(self.out):
            if name.startswith(_STAGING):
                self.drop(f"{self.out}/{name}")
        return f"{self.out}/{_STAGING}{uuid.uuid4().hex}"

    def publish(self, staging: str, number: int, *, facts: dict[str, Any]) -> Run:
        """Publish a staged run atomically.

        Raises:
            ConfigurationError: Another run has this number already.
        """
        fs = self._hadoop
        text = json.dumps(facts, indent=1) + "\n"
        out = self._files.create(fs.Path(f"{staging}/run.json"), False)  # noqa: FBT003
        try:
            out.write(bytearray(text.encode()))
        finally:
            out.close()
        runs = fs.Path(f"{self.out}/runs")
        self._files.mkdirs(runs)
        aim = f"{self.out}/runs/{number:08}"
        context = fs.FileContext.getFileContext(runs.toUri(), self._conf)
        # This rename of the JVM refuses any existing target.
        plain = self._gateway.new_array(fs.Options.Rename, 0)
        try:
            context.rename(fs.Path(staging), fs.Path(aim), plain)
        except Exception as error:
            if not self._files.exists(fs.Path(aim)):
                raise
            raise ConfigurationError(
                f"another run has written {aim} meanwhile; start again, one at a time",
                setting="out",
            ) from error
        return Run(number, aim, facts)

    def drop(self, path: str) -> None:
        """Delete a directory and its content."""
        self._files.delete(self._hadoop.Path(path), True)  # noqa: FBT003

    def state(self, run: Run) -> DataFrame:
        """Return the checkpoints of the folds at the end of a run."""
        path = f"{run.path}/{AS_OF}/{schema.STATE.name}"
        return self.session.read.schema(schema.STATE.ddl).parquet(for_reader(path))

    def table(self, table: Table, runs: list[Run]) -> DataFrame:
        """Return a table as of the end of the last of these runs."""
        paths = []
        if not table.is_final:
            paths += [f"{run.path}/{ROWS}/{table.name}" for run in runs]
        if table.is_final or table.has_open_rows:
            paths.append(f"{runs[-1].path}/{AS_OF}/{table.name}")
        # Runs of earlier releases lack tables that were added later.
        there = [path for path in paths if self._files.exists(self._hadoop.Path(path))]
        if not there:
            return self.session.createDataFrame([], table.ddl)
        return self.session.read.schema(table.ddl).parquet(*map(for_reader, there))

    def _names(self, path: str) -> list[str]:
        at = self._hadoop.Path(path)
        if not self._files.exists(at):
            return []
        if not self._files.getFileStatus(at).isDirectory():
            raise ConfigurationError(f"{path} is no directory", setting="out")
        found = (each.getPath().getName() for each in self._files.listStatus(at))
        # Hadoop's local file system adds checksum files, whose names begin with a dot.
        return [str(name) for name in found if not name.startswith(".")]

    def _facts(self, path: str) -> dict[str, Any]:
        at = self._hadoop.Path(path)
        if not self._files.exists(at):
            return {}
        source = self._files.open(at)
        try:
            text = bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(source))
        finally:
            source.close()
        facts = json.loads(text)
        return facts if isinstance(facts, dict) else {}
