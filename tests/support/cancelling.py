"""Cancels a coroutine at one of its suspensions."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class Cut:
    """Awaits a coroutine, and cancels the task at one suspension.

    Args:
        coroutine: Run once.
        at: Number of the suspension, from 0.
        late: Whether the awaited future is already done when the task is cancelled.

    Attributes:
        is_cut: Whether the coroutine reached this suspension.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, *, late: bool):
        self._coroutine, self._left, self._is_late = coroutine, at, late
        self.is_cut = False

    def __await__(self) -> Generator[Any, Any, Any]:
        """Run the coroutine as part of the current task."""
        step, value = self._coroutine.send, None
        while True:
            try:
                future = step(value)
            except StopIteration as end:
                return end.value
            self._left -= 1
            if self._left == -1:
                self._cancel(future)
            try:
                yield future
            except BaseException as error:  # noqa: BLE001 - for the coroutine
                step, value = self._coroutine.throw, error
            else:
                step, value = self._coroutine.send, None

    def _cancel(self, future: "asyncio.Future[Any] | None") -> None:
        self.is_cut = True
        task = asyncio.current_task()
        assert task is not None
        if self._is_late and future is not None:
            future.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()
