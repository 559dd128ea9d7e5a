"""The only code that reads clocks and random numbers; threads for blocking calls.

All other code gets a ``ports.Clock``, ``ports.Entropy`` and ``ports.Background``, so
that a simulator can replace them.
"""

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from kafka_marshal.conditions import Condition
from kafka_marshal.errors import CoordinationError, InvalidTransition
from kafka_marshal.ports import Background, Clock, Entropy

T = TypeVar("T")

NS_PER_MS = 1_000_000
QUEUE_CALLS_MAX = 64
IDLE_S = 60.0

# A call, and what to call instead if it is dropped.
_Call = tuple[Callable[[], None], Callable[[], None] | None]


def instant(value_ms: int) -> str:
    """Return a time for people, in UTC: ``2026-01-31T12:00:00.000Z``."""
    try:
        moment = datetime.fromtimestamp(value_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{value_ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_UNITS_MS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000))


def duration(value_ms: int) -> str:
    """Return a duration for people: ``850ms``, ``12.3s``, ``4m10s``, ``2h``."""
    sign, left_ms = ("-" if value_ms < 0 else ""), abs(value_ms)
    if left_ms < 1_000:  # noqa: PLR2004 - a second
        return f"{sign}{left_ms}ms"
    if left_ms < 60_000:  # noqa: PLR2004 - a minute
        return f"{sign}{left_ms / 1000:.1f}".removesuffix(".0") + "s"
    parts = []
    for unit, unit_ms in _UNITS_MS:
        count, left_ms = divmod(left_ms, unit_ms)
        if count:
            parts.append(f"{count}{unit}")
    return sign + "".join(parts[:2])


class _Elapsed:
    """A boot clock for systems that have none.

    PROTOCOL 5.2: the larger of elapsed monotonic and elapsed realtime. It adds up the
    larger of the two for each interval between two readings. If it compared totals, its
    time would stop after the wall clock jumps ahead and is set back, and a lease would
    seem to last.
    """

    def __init__(
        self, monotonic_ns: Callable[[], int], realtime_ns: Callable[[], int]
    ) -> None:
        self._monotonic_ns = monotonic_ns
        self._realtime_ns = realtime_ns
        self._lock = threading.Lock()
        self._last = (monotonic_ns(), realtime_ns())
        self._total_ns = self._last[0]

    def __call__(self) -> int:
        """Return nanoseconds, which advance while the machine is suspended."""
        with self._lock:
            reading = (self._monotonic_ns(), self._realtime_ns())
            elapsed = [new - old for new, old in zip(reading, self._last, strict=True)]
            self._last = reading
            self._total_ns += max(0, *elapsed)
            return self._total_ns


def _boot_clock() -> Callable[[], int]:
    """Return the system's boot clock, in nanoseconds."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    if boottime is None:
        return _Elapsed(time.monotonic_ns, time.time_ns)
    return partial(time.clock_gettime_ns, boottime)


def boot_id() -> str:
    """Return the id of the machine's current boot, "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


class SystemClock(Clock):
    """The clocks of this machine. Thread-safe."""

    def __init__(self) -> None:
        """Choose the boot clock of this system."""
        self._boot_ns = _boot_clock()

    def now_ms(self) -> int:
        """Return the boot clock in milliseconds: local time, for leases."""
        return self._boot_ns() // NS_PER_MS

    def wall_ms(self) -> int:
        """Return wall time in epoch milliseconds."""
        return time.time_ns() // NS_PER_MS


# For jitter only; no other code seeds it. A system call for each number would release
# the interpreter's lock, and thousands of claims may be won in a row.
_jitter = random.Random()  # noqa: S311 - no secret
os.register_at_fork(after_in_child=_jitter.seed)


class SystemEntropy(Entropy):
    """Random numbers. Thread-safe, also after a fork."""

    def random_bytes(self, count: int) -> bytes:
        """Return ``count`` random bytes from the system, fit for secrets."""
        return os.urandom(count)

    def below(self, limit: int) -> int:
        """Return an integer 0 <= n < ``limit`` (0 if limit < 1)."""
        return _jitter.randrange(limit) if limit > 1 else 0


class WorkerPool:
    """A few daemon threads that start calls in the order of submission.

    The queue is bounded: otherwise, if nothing answers, calls that no caller waits for
    any more would pile up.
    """

    def __init__(self, name: str, *, threads: int, calls_max: int) -> None:
        """Prepare; threads start with the calls that need them.

        Args:
            name: Name of the threads.
            threads: Most calls that run at a time.
            calls_max: Most calls that wait.
        """
        self._name = name
        self._most = threads
        self._calls_max = calls_max
        # Not a queue.Queue, which an exception of a signal handler can leave locked.
        self._changed = Condition()
        self._calls: deque[_Call] = deque()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self.is_closed = False

    def submit(
        self, call: Callable[[], None], *, on_drop: Callable[[], None] | None = None
    ) -> bool:
        """Queue a call; return whether there was room. Never blocks.

        Args:
            call: Handles its own errors: an exception ends the worker thread.
            on_drop: Called instead if the pool closes before the call starts.
        """
        with self._changed:
            if self.is_closed or len(self._calls) >= self._calls_max:
                return False
            self._calls.append((call, on_drop))
            # Running calls count, too: otherwise a thread that has just taken a call
            # would count as free.
            unfinished = len(self._calls) + self._running
            if len(self._threads) < min(unfinished, self._most):
                self._start_thread()
            self._changed.notify()
        return True

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            self._threads.append(thread)
            thread.start()
        except BaseException:
            # For example Ctrl-C. The next call starts another thread. If this one runs
            # after all, it ends, because it is not listed.
            if thread in self._threads:
                self._threads.remove(thread)
            raise

    def close(self, timeout_ms: int) -> None:
        """End after the running calls; drop the queued ones. Idempotent."""
        with self._changed:
            self.is_closed = True
            threads = list(self._threads)
            dropped = list(self._calls)
            self._calls.clear()
            self._changed.notify_all()
        for _, on_drop in dropped:
            if on_drop is not None:
                on_drop()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=max(0.0, timeout_ms / 1000))

    def _run(self) -> None:
        while (call := self._next_call()) is not None:
            try:
                call()
            finally:
                with self._changed:
                    self._running -= 1

    def _next_call(self) -> Callable[[], None] | None:
        """Wait for a call; return None if the thread must end."""
        with self._changed:
            if threading.current_thread() not in self._threads:
                return None
            while not self._calls:
                if self.is_closed:
                    return None
                # The deadline only bounds one wait; a daemon thread may idle.
                self._changed.wait(IDLE_S)
            self._running += 1
            return self._calls.popleft()[0]


class ThreadBackground(Background):
    """One daemon thread that makes blocking calls in the order of submission."""

    def __init__(self, *, name: str = "marshal-background") -> None:
        """Prepare; the thread starts with the first call."""
        self._pool = WorkerPool(name, threads=1, calls_max=QUEUE_CALLS_MAX)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run ``call`` soon; return its pending outcome. Never blocks.

        If the queue is full or closed, the outcome is an error at once.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                outcome = call()
            except BaseException as error:  # noqa: BLE001 - belongs to the caller
                future.set_exception(error)
            else:
                future.set_result(outcome)

        def drop() -> None:
            future.set_exception(InvalidTransition("The background is closed."))

        if not self._pool.submit(run, on_drop=drop):
            if self._pool.is_closed:
                drop()
            else:
                future.set_exception(
                    CoordinationError(
                        f"{QUEUE_CALLS_MAX} look-ups are queued, because the cluster "
                        "does not respond. Check the addresses, the network and that "
                        "the brokers run."
                    )
                )
        return future

    def close(self, timeout_ms: int) -> None:
        """Stop after the running call; queued calls fail. Idempotent."""
        self._pool.close(timeout_ms)
