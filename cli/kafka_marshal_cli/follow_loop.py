"""Shared parts of commands that run until they are stopped.

These commands end in order on SIGTERM, with exit code 130 on Ctrl-C, and when the
reader of their output is gone, even while there is nothing to write. They report an
outage of the brokers once and wait until it ends.
"""

import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from kafka_marshal import CoordinationError
from kafka_marshal_cli.shared import notify

POLL_MS = 200
Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handling(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handle signals in the block; restore the earlier handlers after it."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Terminated(BaseException):
    """SIGTERM was received. Not an Exception, so no error handler catches it."""


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Leave the block on SIGTERM as if it had finished."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Terminated

    with suppress(Terminated), handling((signal.SIGTERM,), on_signal):
        yield


class Idle:
    """A limit on the time without activity.

    Args:
        limit_ms: The limit; None for no limit.
    """

    def __init__(self, limit_ms: int | None) -> None:
        self._limit_ms = limit_ms
        self._since = time.monotonic()

    def touch(self) -> None:
        """Restart the idle time, after activity."""
        self._since = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        idle_ms = (time.monotonic() - self._since) * 1000
        return self._limit_ms is not None and idle_ms >= self._limit_ms

    @property
    def wait_ms(self) -> int:
        """Longest time for the next wait; shorter if the limit is near."""
        if self._limit_ms is None:
            return POLL_MS
        idle_ms = int((time.monotonic() - self._since) * 1000)
        return max(0, min(POLL_MS, self._limit_ms - idle_ms))


class Outages:
    """Reports on stderr when brokers stop answering and answer again."""

    def __init__(self) -> None:
        self._is_away = False

    def report(self, outage: CoordinationError | None) -> None:
        """Report the present state if it has changed."""
        if (outage is not None) == self._is_away:
            return
        self._is_away = outage is not None
        if outage is None:
            notify("marshal: the brokers answer again")
        else:
            notify(f"marshal: the brokers do not answer, waiting for them: {outage}")


def check_reader() -> None:
    """Check that the reader of our output is still there.

    A write to the pipe would also fail, but the next write may be hours away.

    Raises:
        BrokenPipeError: The reader is gone.
    """
    try:
        number = sys.stdout.fileno()
        if not stat.S_ISFIFO(os.fstat(number).st_mode):
            return
    except (OSError, ValueError):
        return  # not a file, as in tests
    poller = select.poll()
    poller.register(number, 0)
    if any(event & select.POLLERR for _, event in poller.poll(0)):
        raise BrokenPipeError
