"""Runs the command `marshal`: in this process, or as one of its own."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import forked
from typer.testing import CliRunner
from waiting import WAIT_MS, eventually

from kafka_marshal.testing.jars import cache_dir
from kafka_marshal_cli.assembly import app

MARSHAL = Path(sys.executable).with_name("marshal")
RUN_S = 600


class Cli:
    """Runs `marshal` against one coordination domain."""

    def __init__(self, domain, state_dir):
        self.domain = domain
        self.env = {
            "MARSHAL_BOOTSTRAP_SERVER": domain.servers,
            "MARSHAL_COORDINATION_TOPIC": domain.topic,
            "MARSHAL_STATE_DIR": str(state_dir),
            # The jars of Kafka are 120 MB: every test uses those of the machine.
            "KAFKA_MARSHAL_CACHE": str(cache_dir()),
            "XDG_CACHE_HOME": str(state_dir / "cache"),
            "XDG_CONFIG_HOME": str(state_dir / "config"),
        }
        self._logs = state_dir

    def run(self, *arguments, code=0):
        """Run to the end, in this process; the exit code must be the one expected."""
        done = CliRunner().invoke(app, list(arguments), env=self.env)
        assert done.exit_code == code, (done.exit_code, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        for line in (done.stdout + done.stderr).splitlines():
            assert line.isprintable(), line
        return done

    def json(self, *arguments, code=0):
        found = json.loads(self.run(*arguments, "-o", "json", code=code).stdout)
        assert found["schema"] == 1
        assert found["as_of"]["time_ms"]
        return found

    @contextmanager
    def started(self, *arguments, env=None):
        """A process in the background, with its output in files."""
        out, err = (self._logs / self.domain.unique(kind) for kind in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = forked.start(
                [MARSHAL, *arguments],
                env=self.env | (env or {}),
                stdout=stdout,
                stderr=stderr,
            )
        started = Started(process, out, err)
        try:
            yield started
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=RUN_S)


class Started:
    def __init__(self, process, out, err):
        self.process = process
        self._out = out
        self._err = err

    @property
    def stderr(self):
        return self._err.read_text()

    def lines(self):
        """Return every whole line of stdout."""
        return self._out.read_text().splitlines()

    def records(self):
        return [json.loads(line) for line in self.lines()]

    def wait_lines(self, count, timeout_ms=WAIT_MS):
        eventually(
            lambda: len(self.lines()) >= count or self.process.poll() is not None,
            f"{count} lines; {self.stderr}",
            timeout_ms,
        )
        assert len(self.lines()) >= count, self.stderr

    def end(self, signum=None):
        """Return the exit code, after a signal where one is given."""
        if signum is not None:
            self.process.send_signal(signum)
        return self.process.wait(timeout=RUN_S)
