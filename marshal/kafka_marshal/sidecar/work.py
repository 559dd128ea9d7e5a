"""Where requests do what may block: bounded pools of threads.

What only looks or notes has a pool of its own, so that those who wait for the log
never keep a beat from being taken. Whoever finds a pool full is told to come again.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kafka_marshal.sidecar.failures import not_ready

T = TypeVar("T")


class Pool:
    """Threads for calls, with a limit to how many may queue.

    Args:
        name: Name of the threads.
        threads: How many calls run at a time.
        calls_max: How many may run or queue.
    """

    def __init__(self, name: str, *, threads: int, calls_max: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._calls_max = calls_max
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Number of calls that run or queue."""
        return self._count

    async def run(self, call: Callable[[], T], *, timeout_s: float) -> T:
        """Return what a call returns, made on a thread.

        Raises:
            Answered: Too many calls wait; come again.
            TimeoutError: It took too long; it goes on all the same.
        """
        with self._lock:
            if self._count >= self._calls_max:
                raise not_ready(
                    f"the sidecar is busy with {self._count} requests; try again soon"
                )
            self._count += 1
        try:
            future = self._executor.submit(call)
        except RuntimeError:
            self._done(None)
            raise not_ready("the sidecar is about to end; look for its next") from None
        future.add_done_callback(self._done)
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)

    def close(self) -> None:
        """Take no further call; what runs goes on, what queues does not begin."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: Future[T] | None) -> None:
        del future
        with self._lock:
            self._count -= 1
