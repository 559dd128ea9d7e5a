"""Worker processes: start and signal them, and read their journals."""

import json
import os
import signal
import subprocess
import sys
from bisect import bisect_right
from operator import itemgetter
from pathlib import Path

import forked
from journal import Journal
from waiting import WAIT_MS, eventually

PROGRAM = Path(__file__).with_name("worker_program.py")


class Worker:
    """One process of ``worker_program``; its name is its client_id."""

    def __init__(self, domain, home: Path, client_id: str, **settings: object) -> None:
        self.client_id = client_id
        self.journal_path = home / f"{client_id}.{len(list(home.iterdir()))}.jsonl"
        self.stderr_path = self.journal_path.with_suffix(".stderr")
        state_dir = home / "state"
        state_dir.mkdir(exist_ok=True)
        self.settings = {
            "servers": domain.servers,
            "coordination_topic": domain.topic,
            "transport": domain.transport,
            "client_id": client_id,
            "state_dir": str(state_dir),
            "sidecar": domain.sidecar_address,
            "journal": str(self.journal_path),
            "delivery": "alo",
            "policy": "fair",
            "claims_max": 0,
            "max_poll_records": 50,
            "max_granted_batches": 4,
            "reads": "records",
            "handle_ms": 2,
            "commit": True,
            "release": True,
            "notes": "",
            "keep_ms": 0,
            "mirror_offsets": True,
            "warm_ms": None,
            "hostname": "",
        } | settings
        # Its notes for the checker of histories, if requested.
        self.notes_path = self.journal_path.with_suffix(".notes")
        if self.settings["notes"]:
            self.settings["notes"] = str(self.notes_path)
        # A command that runs it, such as in a network namespace; it must exec Python.
        launcher = self.settings.pop("launcher", ())
        self.journal_path.touch()
        self._lines: list[dict] = []
        self._read_bytes = 0
        program = [str(PROGRAM), json.dumps(self.settings)]
        with self.stderr_path.open("wb") as stderr:
            self._process: forked.Forked | subprocess.Popen = (
                subprocess.Popen(
                    [*launcher, sys.executable, *program],
                    stdin=subprocess.DEVNULL,
                    stderr=stderr,
                )
                if launcher
                else forked.start(program, stderr=stderr)
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def journal(self) -> Journal:
        return Journal.merged(self.lines())

    def lines(self) -> list[dict]:
        """Return every line that it has written; each is read and parsed once.

        A line cut off by a kill does not count.
        """
        with self.journal_path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(complete)
        self._lines += [json.loads(line) for line in complete.splitlines()]
        return self._lines

    def since(self, at_ms: int) -> list[dict]:
        """Return the lines written since then, without parsing older lines again."""
        lines = self.lines()
        return lines[bisect_right(lines, at_ms, key=itemgetter("at_ms")) :]

    def wait_for(
        self, event: str, *, timeout_ms: int = WAIT_MS, **fields: object
    ) -> dict:
        """Wait until the worker has written such a line; return the first."""

        def look():
            lines = self.journal.of(event, **fields)
            assert lines or self._process.poll() is None, self.last_words()
            return lines

        what = f"{self.client_id} writes {event} {fields}"
        return eventually(look, what, timeout_ms)[0]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.signal(signal.SIGKILL)
        self._process.wait(60)

    def ask_to_end(self) -> None:
        """SIGTERM, and wait for the orderly end of a worker that still runs."""
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            assert self.wait() == 0, self.last_words()

    def wait(self, timeout_s: int = 60) -> int:
        """Wait for the end; return the exit status."""
        return self._process.wait(timeout_s)

    def last_words(self) -> str:
        tail = self.stderr_path.read_text()[-2_000:]
        return f"{self.client_id} ended ({self._process.returncode}): {tail}"

    def close(self) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.kill()


class Fleet:
    """Workers that are all killed when the ``with`` block ends."""

    def __init__(self, domain, home: Path, **settings: object) -> None:
        self._domain = domain
        self._home = home
        self.settings = settings
        self.workers: list[Worker] = []

    def start(self, client_id: str, **settings: object) -> Worker:
        worker = Worker(
            self._domain, self._home, client_id, **(self.settings | settings)
        )
        self.workers.append(worker)
        return worker

    def handled_since(self, at_ms: int) -> list[dict]:
        """Return what was processed since then, by all of them."""
        return [
            line
            for worker in self.workers
            for line in worker.since(at_ms)
            if line["event"] == "handled"
        ]

    @property
    def journal(self) -> Journal:
        return Journal.merged(*(worker.lines() for worker in self.workers))

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.close()
