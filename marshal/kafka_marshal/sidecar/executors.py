"""Threads for requests, with a limit on requests that run or queue."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kafka_marshal.sidecar.http_errors import SHUTTING_DOWN, unavailable

T = TypeVar("T")


class BoundedExecutor:
    """Threads for calls, with a limit on calls that run or queue.

    Args:
        name: Name of the threads.
        threads: How many calls run at a time.
        calls_max: How many calls may run or queue.
    """

    def __init__(self, name: str, *, threads: int, calls_max: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._calls_max = calls_max
        self._lock = threading.Lock()
        # Calls that run, queue, or have reserved a place.
        self._count = 0

    def reserve(self) -> None:
        """Reserve a place for one call, which ``submit`` uses or ``leave`` gives back.

        Raises:
            HttpError: The limit of calls is reached.
        """
        with self._lock:
            if self._count >= self._calls_max:
                raise unavailable(
                    f"the sidecar is busy with {self._count} requests; try again soon"
                )
            self._count += 1

    def leave(self) -> None:
        """Give a reserved place back."""
        with self._lock:
            self._count -= 1

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call in a reserved place.

        Raises:
            HttpError: The executor was closed; the place is given back.
        """
        try:
            future = self._executor.submit(call)
        except RuntimeError:
            self.leave()
            raise unavailable(SHUTTING_DOWN) from None
        future.add_done_callback(lambda _: self.leave())
        return future

    async def run(self, call: Callable[[], T], *, timeout_s: float) -> T:
        """Run a call on a thread and return its result.

        Raises:
            HttpError: The limit of calls is reached.
            TimeoutError: The call took too long; it continues on its thread.
        """
        self.reserve()
        future = self.submit(call)
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)

    def close(self) -> None:
        """Accept no further call; queued calls are cancelled, running ones continue."""
        self._executor.shutdown(wait=False, cancel_futures=True)
