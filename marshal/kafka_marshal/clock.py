"""The only readers of time and random numbers, and the thread for blocking calls.

All other code gets a ``ports.Clock``, ``ports.Entropy`` and ``ports.Background``, so
that a simulator can replace them.
"""

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kafka_marshal.errors import CoordinationError, InvalidTransition
from kafka_marshal.ports import Background, Clock, Entropy

T = TypeVar("T")

NS_PER_MS = 1_000_000
QUEUE_CALLS_MAX = 64


class _Elapsed:
    """A boot clock for systems that have none.

    PROTOCOL 5.2: the larger of elapsed monotonic and elapsed realtime. It adds up the
    larger of the two for each interval between two readings. If it compared totals,
    time would stop after a wall clock jumps ahead and is set back, and a lease would
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
    return lambda: time.clock_gettime_ns(boottime)


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


class SystemEntropy(Entropy):
    """Random numbers of the operating system. Thread-safe, also after a fork."""

    def random_bytes(self, count: int) -> bytes:
        """Return ``count`` random bytes fit for secrets."""
        return os.urandom(count)

    def below(self, limit: int) -> int:
        """Return an integer 0 <= n < ``limit`` (0 where limit < 1)."""
        return secrets.randbelow(limit) if limit > 1 else 0


class ThreadBackground(Background):
    """One daemon thread that makes blocking calls in the order of submission.

    Its queue is bounded: otherwise calls that no caller waits for any more would pile
    up while a cluster does not answer.
    """

    def __init__(self, *, name: str = "marshal-background") -> None:
        """Prepare; the thread starts with the first call."""
        self._name = name
        self._queue: queue.Queue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.Queue(maxsize=QUEUE_CALLS_MAX)
        )
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run ``call`` soon; return its pending outcome. Never blocks.

        If the queue is full or closed, the outcome is an error at once.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                future.set_exception(InvalidTransition("The background is closed."))
                return future
            try:
                self._queue.put_nowait((future, call))
            except queue.Full:
                future.set_exception(
                    CoordinationError(
                        f"{QUEUE_CALLS_MAX} look-ups are queued, so the cluster does "
                        "not answer. Check the addresses, the network and that the "
                        "brokers run."
                    )
                )
                return future
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                self._thread.start()
        return future

    def close(self, timeout_ms: int) -> None:
        """Stop after the running call; queued calls fail. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._fail_waiting()
                self._queue.put_nowait(None)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=max(0.0, timeout_ms / 1000))

    def _fail_waiting(self) -> None:
        """Empty the queue and fail its calls."""
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[0].set_exception(InvalidTransition("The background was closed."))

    def _run(self) -> None:
        while True:
            try:
                # The deadline only bounds one wait; a daemon thread may idle.
                item = self._queue.get(timeout=60)
            except queue.Empty:
                continue
            if item is None:
                return
            future, call = item
            try:
                outcome = call()
            except BaseException as error:  # noqa: BLE001 - belongs to the caller
                future.set_exception(error)
            else:
                future.set_result(outcome)
