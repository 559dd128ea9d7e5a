"""A consumer of the demo, as the process that started it sees it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs

from kafka_marshal_cli.demo import journal

STOP_S = 15.0
TAIL_LINES = 5


@attrs.frozen
class WorkerSettings:
    """What a worker is told on its command line; see ``worker``."""

    bootstrap_servers: str
    group_id: str
    topic: str
    delivery: str
    batch: int
    work_ms: float
    folder: Path


class WorkerProcess:
    """A consumer process, and what it wrote.

    Attributes:
        name: Its client_id.
        reader: Its journal.
        was_killed: Whether we killed it.
        processed: Records that it processed.
        done_of_batch: Records that it processed of its last batch.
    """

    def __init__(self, name: str, settings: WorkerSettings) -> None:
        """Start the process; it waits for ``go`` before it consumes."""
        self.name = name
        self.was_killed = False
        self.reader = journal.JournalReader(settings.folder / f"{name}.journal")
        self.processed = 0
        self.done_of_batch = 0
        self._batch: journal.Line | None = None
        self._log_path = settings.folder / f"{name}.log"
        command = [
            *(sys.executable, "-m", "kafka_marshal_cli.demo.worker"),
            *("--bootstrap-server", settings.bootstrap_servers),
            *("--group", settings.group_id),
            *("--client-id", name),
            *("--topic", settings.topic),
            *("--delivery", settings.delivery),
            *("--journal", str(self.reader.path)),
            *("--state-dir", str(settings.folder / "state")),
            *("--batch", str(settings.batch)),
            *("--work-ms", str(settings.work_ms)),
        ]
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # An interrupt from the terminal is the demo's to handle.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def state(self) -> str:
        """One word for people."""
        if self.was_killed:
            return "killed"
        return "running" if self._process.poll() is None else "ended"

    @property
    def is_ready(self) -> bool:
        """Whether it has connected."""
        return bool(self.reader.lines)

    @property
    def left_of_batch(self) -> int:
        """Records of its last batch that it has yet to process."""
        batch = self._batch
        if batch is None:
            return 0
        return max(0, batch.last - batch.offset + 1 - self.done_of_batch)

    def read(self) -> list[journal.Line]:
        """Take in what it wrote since the last look, and return it."""
        found = self.reader.read()
        for line in found:
            if line.kind == journal.BATCH:
                self._batch, self.done_of_batch = line, 0
            elif line.kind == journal.RECORD:
                self.done_of_batch += 1
                self.processed += 1
        return found

    def go(self) -> None:
        """Let it consume."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait until it is gone."""
        self.was_killed = True
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=STOP_S)

    def ask_to_stop(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def trouble(self) -> str | None:
        """Return why it should not have ended, or None."""
        code = self._process.poll()
        if code is None or self.was_killed:
            return None
        if code == 0:
            return f"{self.name} ended before it was told to."
        return f"{self.name} ended by itself ({code}): {self._last_words()}"

    def wait_stopped(self, until: float) -> str | None:
        """Wait for an orderly end; return what went wrong, or None."""
        try:
            code = self._process.wait(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"{self.name} did not stop within {STOP_S:.0f} s of SIGTERM."
        if code and not self.was_killed:
            return f"{self.name} failed while it stopped ({code}): {self._last_words()}"
        return None

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=STOP_S)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return " | ".join(lines[-TAIL_LINES:]) or "it said nothing."
