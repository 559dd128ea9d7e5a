"""Notes of a worker about its operations, for the checker of histories.

Each operation is noted when it begins, before anything of it is done, and when it
ends; by the boot clock, which all processes of a machine share. A process
that is killed in between leaves an operation without an end.
"""

import json
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import ModuleType

from kafka_marshal.clock import NS_PER_MS, SystemClock
from kafka_marshal.protocol.codec import decode

# Workers are programs of their own; the simulator is in the repository alone.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from simulator.chronicle import SENT


def boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Notes:
    """A file of lines, each written at once."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **fields: object) -> None:
        line = {"event": event, "ns": boot_ns()} | fields
        os.write(self._file, json.dumps(line).encode() + b"\n")


class NotingClock(SystemClock):
    """Remembers each thread's last reading: for a hand-out, the check of its lease."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = threading.local()

    def now_ms(self) -> int:
        self._seen.ns = boot_ns()
        return self._seen.ns // NS_PER_MS

    def take(self) -> int:
        """Return this thread's last reading, and forget it; now where there is none."""
        seen = getattr(self._seen, "ns", None) or boot_ns()
        self._seen.ns = None
        return seen


class NotingLog:
    """A coordination log that notes what is sent, what failed, what was read."""

    def __init__(self, log, notes: Notes) -> None:
        self._log = log
        self._notes = notes
        self._lock = threading.Lock()
        self._open: deque = deque()
        self._sent = 0

    def __getattr__(self, name: str):
        return getattr(self._log, name)

    def append(self, partition: int, value: bytes):
        self._look()
        if not isinstance(decode(value), SENT):
            return self._log.append(partition, value)
        with self._lock:
            self._sent += 1
            number = self._sent
        self._notes.write("sent", number=number, t=partition, value=value.hex())
        append = self._log.append(partition, value)
        self._open.append((number, append))
        return append

    def _look(self) -> None:
        """Note which appends have failed, as far as the process knows."""
        with self._lock:
            for _ in range(len(self._open)):
                number, append = self._open.popleft()
                if not append.is_done():
                    self._open.append((number, append))
                elif append.error() is not None:
                    self._notes.write("failed", number=number)

    def poll(self, timeout_ms: int):
        return [(t, entry) for t, run in self.poll_runs(timeout_ms) for entry in run]

    def poll_runs(self, timeout_ms: int):
        runs = self._log.poll_runs(timeout_ms)
        self._look()
        if runs:
            # Noted before it is folded: nobody acts on it earlier.
            ends = {str(t): run[len(run) - 1].offset for t, run in runs}
            self._notes.write("read", ends=ends)
        return runs


class Noting:
    """Makes this process write notes; create it before any client opens.

    Attributes:
        clock: The clock of its engine.
    """

    def __init__(self, path: str, runtime: ModuleType) -> None:
        self._notes = Notes(path)
        self.clock = NotingClock()
        runtime.SystemClock = lambda: self.clock  # type: ignore[attr-defined]
        opened = runtime.open_coordination_log

        def open_log(*args, **settings):
            return NotingLog(opened(*args, **settings), self._notes)

        runtime.open_coordination_log = open_log  # type: ignore[attr-defined]

    def handed(self, place: dict, *, first: int, last: int, token: str) -> None:
        """Note a hand-out, and that work on it begins."""
        at = {"first": first, "last": last, "token": token}
        self._notes.write("handed", looked_ns=self.clock.take(), **place, **at)

    def done(self, place: dict, *, first: int, last: int, token: str) -> None:
        """Note that the work is done."""
        self._notes.write("done", first=first, last=last, token=token, **place)
