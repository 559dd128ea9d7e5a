"""Where an audit's tables stand: run after run, each published by one rename.

::

    OUT/runs/00000001/run.json          what it read, as of when
                     /rows/TABLE/       rows that are complete
                     /as_of/TABLE/      what was open, and the state, at its end
       /runs/00000002/...               went on where the first one ended
       /_staging-.../                   a run under way, or one that died
       /_checkpoint/                    Spark's notes, where a stream follows the log

A run reads the last one's ``as_of`` and writes all of its own beside it; until it is
renamed into its place nothing of it is there. So a run that dies, wherever it does,
leaves the tables as they were, and the next one does its work again.

The directory may be any that Spark's Hadoop client knows, as long as a rename there
is atomic: local ones and HDFS, but no object store.
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

ROWS = "rows"
AS_OF = "as_of"
_RUN = re.compile(r"\d{8}")
_STAGING = "_staging-"
_CHECKPOINT = "_checkpoint"


@attrs.frozen
class Run:
    """A run that is published.

    Attributes:
        number: Counts from 1.
        path: Its directory.
        facts: What ``run.json`` says.
    """

    number: int
    path: str
    facts: dict[str, Any]


class Store:
    """The directory of one audit. Used by the driver, by one run at a time.

    Attributes:
        session: The session to read and write with.
        out: The directory, whole.
    """

    def __init__(self, spark: SparkSession, out: str) -> None:
        """Look at a directory; it need not exist.

        Args:
            spark: The session to read and write with.
            out: Path or address of the directory.
        """
        self.session = spark
        session: Any = spark
        self._jvm = session._jvm  # noqa: SLF001 - the way to Hadoop's client
        self._hadoop = self._jvm.org.apache.hadoop.fs
        self._conf = session._jsc.hadoopConfiguration()  # noqa: SLF001 - the same
        self._gateway = session._sc._gateway  # noqa: SLF001 - the same
        at = self._hadoop.Path(out)
        self._files = at.getFileSystem(self._conf)
        # Whole, because a relative path means another thing on each executor.
        self.out: str = self._files.makeQualified(at).toString().rstrip("/")

    @property
    def checkpoint(self) -> str:
        """Where a stream that follows the log keeps its checkpoint."""
        return f"{self.out}/{_CHECKPOINT}"

    def runs(self) -> list[Run]:
        """Return the runs that are published, in order.

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
        """Return a new directory to write a run to; those of dead runs go."""
        for name in self._names(self.out):
            if name.startswith(_STAGING):
                self.drop(f"{self.out}/{name}")
        return f"{self.out}/{_STAGING}{uuid.uuid4().hex}"

    def publish(self, staging: str, number: int, *, facts: dict[str, Any]) -> Run:
        """Make a staged run the next one, all at once.

        Raises:
            ConfigurationError: Another run has taken that place meanwhile.
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
        # The JVM's rename that refuses an aim which exists, whatever it is.
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
        """Delete a directory with all that is in it."""
        self._files.delete(self._hadoop.Path(path), True)  # noqa: FBT003

    def state(self, run: Run) -> DataFrame:
        """Return what a run left for the next one."""
        path = f"{run.path}/{AS_OF}/{schema.STATE.name}"
        return self.session.read.schema(schema.STATE.ddl).parquet(path)

    def table(self, table: Table, runs: list[Run]) -> DataFrame:
        """Return a table as of the end of the last of these runs."""
        paths = []
        if not table.is_final:
            paths += [f"{run.path}/{ROWS}/{table.name}" for run in runs]
        if table.is_final or table.has_open_rows:
            paths.append(f"{runs[-1].path}/{AS_OF}/{table.name}")
        return self.session.read.schema(table.ddl).parquet(*paths)

    def _names(self, path: str) -> list[str]:
        at = self._hadoop.Path(path)
        if not self._files.exists(at):
            return []
        if not self._files.getFileStatus(at).isDirectory():
            raise ConfigurationError(f"{path} is no directory", setting="out")
        found = (each.getPath().getName() for each in self._files.listStatus(at))
        # Checksums of Hadoop's local file system stand beside the files.
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
