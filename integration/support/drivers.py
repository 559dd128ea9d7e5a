"""Spark drivers in processes of their own, and the files that they write."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pyspark.sql.streaming import StreamingQuery

PROGRAM = Path(__file__).with_name("spark_program.py")
END_S = 60
CONF = {
    "spark.driver.memory": "500m",
    "spark.stage.maxConsecutiveAttempts": "8",
    "spark.task.maxFailures": "8",
}


# Spark gives a Python worker ten seconds to start, however busy the machine is.
BUSY = "failed to connect back"
# Spark does not rerun a stage after one that it cannot undo: the job fails.
UNDONE = "indeterminate"


class Supervised:
    """A query that is restarted from its checkpoint, as an operator would do.

    Attributes:
        query: The query now.
        reasons: Texts of which one must be in the error that ended it.
    """

    def __init__(self, start: Callable[[], StreamingQuery], *reasons: str) -> None:
        self._start = start
        self.reasons = (BUSY, *reasons)
        self.query = start()

    def live(self) -> bool:
        """Return True; start the query again if it ended for one of the reasons.

        Raises:
            AssertionError: It ended for another reason.
        """
        if not self.query.isActive:
            why = str(self.query.exception())
            assert any(reason in why for reason in self.reasons), why
            self.query = self._start()
        return True

    def stop(self) -> None:
        self.query.stop()


class QueryFolder:
    """The journals and accidents of queries in a folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.journal = home / "journal"
        self.accidents = home / "accidents"
        self.accidents.mkdir()

    def lines(self, kind: str) -> list[list[str]]:
        path = Path(f"{self.journal}.{kind}")
        text = path.read_text() if path.exists() else ""
        return [line.split() for line in text.splitlines()]

    def rows(self) -> Counter:
        """Return how often each row was processed by queries with delivery amo."""
        return Counter((int(p), int(o)) for p, o in self.lines("amo"))

    def tries(self, query: str) -> Counter:
        """Return how often each task of each batch was begun."""
        tasks = [line for line in self.lines("tasks") if line[0] == query]
        return Counter((batch, number) for _, batch, number, _ in tasks)

    def attempts(self, query: str) -> set[int]:
        """Return the attempt numbers of tasks that were begun."""
        return {int(line[3]) for line in self.lines("tasks") if line[0] == query}

    def struck(self) -> set[str]:
        """Return the accidents that happened."""
        return {path.name for path in self.accidents.iterdir()}


class Drivers(QueryFolder):
    """The drivers of one test, which share a journal and a database."""

    def __init__(self, home: Path, dsn: str) -> None:
        super().__init__(home)
        self._dsn = dsn
        self._running: dict[str, subprocess.Popen] = {}

    def start(self, name: str, queries: dict, *, master="local[2,4]", **rest) -> None:
        """Start a driver, or start it again from its checkpoints."""
        own = {"clientId": f"driver-{name}", "stateDir": str(self.home / "state")}
        settings = {
            "master": master,
            "conf": CONF | rest.pop("conf", {}) | self._folders(name),
            "queries": {each: own | options for each, options in queries.items()},
            "checkpoint": str(self.home / f"checkpoint-{name}"),
            "journal": str(self.journal),
            "accidents": str(self.accidents),
            "kinds": rest.pop("kinds", []),
            "dsn": self._dsn,
        }
        log = (self.home / f"{name}.stderr").open("ab")
        with log:
            self._running[name] = subprocess.Popen(
                [sys.executable, str(PROGRAM), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYSPARK_PYTHON": sys.executable},
                # A group of its own, so that a kill takes all that it started.
                start_new_session=True,
            )

    def _folders(self, name: str) -> dict:
        return {
            "spark.local.dir": str(self.home / f"local-{name}"),
            "spark.sql.warehouse.dir": str(self.home / "warehouse"),
        }

    def kill(self, name: str) -> None:
        """Kill a driver and all its processes, as a machine that fails does."""
        process = self._running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=END_S)
        process.stdin.close()

    def end(self) -> None:
        """Have every driver end in order, or else kill it."""
        for process in self._running.values():
            process.stdin.close()
        for name, process in list(self._running.items()):
            try:
                process.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                self.kill(name)
        self._running.clear()

    def live(self) -> bool:
        """Return True as long as every driver runs.

        Raises:
            AssertionError: One has ended by itself.
        """
        ended = [
            n for n, process in self._running.items() if process.poll() is not None
        ]
        assert not ended, f"{ended} ended: {self.output()}"
        return True

    def output(self) -> str:
        """Return the ends of the drivers' logs, for the message of a failure."""
        return "\n".join(p.read_text()[-3_000:] for p in self.home.glob("*.stderr"))
