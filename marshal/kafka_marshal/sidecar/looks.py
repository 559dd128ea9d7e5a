"""Looks at claims that repeat, answered together.

Each look asks the log for its end. Of looks that come at the same time, two groups are
under way, as two queries are: while one group waits for its answer, the other begins to
wait. All further looks wait for the end of a group, and are the next one. So many tasks
need few threads and few queries, and a task alone waits for nobody.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs

from kafka_marshal.sidecar.executors import BoundedExecutor
from kafka_marshal.sidecar.http_errors import HttpError, unavailable
from kafka_marshal.sidecar.repeated_requests import Later
from kafka_marshal.sidecar.requests import ApiRequest

if TYPE_CHECKING:
    from concurrent.futures import Future

GROUPS_MAX = 2
# Looks that have waited so long for the end of a group get a thread of their own.
WAIT_S = 0.05


@attrs.frozen
class Look:
    """One look in progress."""

    call: ApiRequest
    later: Later


class Respond(Protocol):
    """Makes the response to a look; any thread."""

    def __call__(self, look: Look, found: bytes | Exception, /) -> None:
        """Make it of a JSON document, or of the error."""
        ...


class Looks:
    """Answers looks in groups, each of which has one timeout.

    Args:
        executor: Threads for what waits.
        call: Answers looks of one timeout, in order; on a thread.
        respond: Makes each response.
    """

    def __init__(
        self,
        *,
        executor: BoundedExecutor,
        call: Callable[[Sequence[ApiRequest]], Iterable[bytes]],
        respond: Respond,
    ) -> None:
        self._executor = executor
        self._call = call
        self._respond = respond
        self._lock = threading.Lock()
        self._group_count = 0
        # By their timeout, in milliseconds; the oldest first.
        self._waiting: dict[int, list[Look]] = {}
        # Of the groups that were taken from the waiting looks.
        self._taken_count = 0

    def add(self, call: ApiRequest) -> Later | None:
        """Answer a look; None if too many requests are at work. On the event loop."""
        look = Look(call, Later())
        with self._lock:
            if self._group_count >= GROUPS_MAX:
                if not self._waiting:
                    asyncio.get_running_loop().call_later(
                        WAIT_S, self._start_late, self._taken_count
                    )
                # Each is of another connection, so that there is a limit.
                self._waiting.setdefault(call.timeout_ms, []).append(look)
                return look.later
            self._group_count += 1
        return look.later if self._start([look]) else None

    def _start(self, looks: list[Look]) -> bool:
        """Start a group that was counted; return whether there was a thread for it."""
        try:
            self._executor.reserve()
            future = self._executor.submit(partial(self._run, looks))
        except HttpError:
            with self._lock:
                self._group_count -= 1
            return False
        future.add_done_callback(partial(self._on_end, looks))
        return True

    def _start_late(self, taken_count: int) -> None:
        """Start the looks that still wait since then, behind groups that are slow."""
        with self._lock:
            if self._taken_count != taken_count:
                return
            late, self._waiting = self._waiting, {}
            self._taken_count += 1
            self._group_count += len(late)
        for looks in late.values():
            if not self._start(looks):
                self._fail(looks, unavailable("the sidecar is busy; try again soon"))

    def _run(self, looks: list[Look]) -> None:
        """Answer a group, and those that came meanwhile; on a thread."""
        while looks:
            self._answer(looks)
            looks = self._next()

    def _next(self) -> list[Look]:
        """Return the next group, none where the thread has nothing more to do."""
        with self._lock:
            if self._waiting and self._group_count <= GROUPS_MAX:
                self._taken_count += 1
                return self._waiting.pop(next(iter(self._waiting)))
            self._group_count -= 1
            return []

    def _answer(self, looks: list[Look]) -> None:
        left = iter(looks)
        try:
            contents = self._call([look.call for look in looks])
            # In this order: an error takes no look from those that are left.
            for content, look in zip(contents, left, strict=True):
                self._respond(look, content)
        except Exception as error:  # noqa: BLE001 - answered, whatever it is
            self._fail(left, error)

    def _on_end(self, looks: list[Look], ended: "Future[None]") -> None:
        """Refuse looks whose thread will not run any more."""
        if not ended.cancelled():
            return
        with self._lock:
            late, self._waiting = self._waiting, {}
        for each in (looks, *late.values()):
            self._fail(each, unavailable("the sidecar is shutting down"))

    def _fail(self, looks: Iterable[Look], error: Exception) -> None:
        for look in looks:
            self._respond(look, error)
