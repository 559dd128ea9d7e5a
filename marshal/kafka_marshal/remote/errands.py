"""Threads that ask the sidecar for what may take a while, so that no lock waits."""

import queue
import threading
from collections.abc import Callable

CALLS_MAX = 1_024
IDLE_S = 60.0


class Errands:
    """A few daemon threads for calls, which begin in the order they came.

    Args:
        name: Name of the threads.
        threads: How many calls run at a time. They start with the first call.
    """

    def __init__(self, name: str, *, threads: int) -> None:
        self._name = name
        self._most = threads
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(CALLS_MAX)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._is_closed = False

    def submit(self, call: Callable[[], None]) -> bool:
        """Have a call made soon; return whether there was room. Never blocks.

        What it raises ends nothing but itself: calls take care of their errors.
        """
        with self._lock:
            if self._is_closed:
                return False
            try:
                self._queue.put_nowait(call)
            except queue.Full:
                return False
            self._unfinished += 1
            # Counted until they end: the length of the queue would count a thread that
            # has just taken a call as one that is free for the next.
            if len(self._threads) < min(self._unfinished, self._most):
                thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return True

    def close(self, timeout_ms: int) -> None:
        """End after the calls under way; what queues is not begun. Idempotent."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
            while True:
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    break
            for _ in threads:
                self._queue.put_nowait(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_ms / 1000)

    def _run(self) -> None:
        while True:
            try:
                # The deadline only bounds one wait; a daemon thread may idle.
                call = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                continue
            if call is None:
                return
            try:
                call()
            finally:
                with self._lock:
                    self._unfinished -= 1
