"""What commands share that go on until they are told to end.

They end in order on SIGTERM, with 130 on Ctrl-C, and when the reader of their
output is gone, also while there is nothing to write. An outage of the brokers
is told once and waited out.
"""

import os
import select
import signal
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from kafka_marshal import CoordinationError
from kafka_marshal_cli.shared import tell

POLL_MS = 200


class Terminated(BaseException):
    """SIGTERM came; no handler of errors eats it."""


@contextmanager
def ending_in_order() -> Iterator[None]:
    """End the block at a SIGTERM, as if it had come to its end."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Terminated

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    except Terminated:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


class Idle:
    """Tells when nothing has come for too long.

    Args:
        limit_ms: For how long; None for ever.
    """

    def __init__(self, limit_ms: int | None) -> None:
        self._limit_ms = limit_ms
        self._since = time.monotonic()

    def touch(self) -> None:
        """Note that something came."""
        self._since = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        idle_ms = (time.monotonic() - self._since) * 1000
        return self._limit_ms is not None and idle_ms >= self._limit_ms

    @property
    def wait_ms(self) -> int:
        """How long the next wait may take."""
        if self._limit_ms is None:
            return POLL_MS
        idle_ms = int((time.monotonic() - self._since) * 1000)
        return max(0, min(POLL_MS, self._limit_ms - idle_ms))


class Outages:
    """Tells people on stderr when brokers go away and come back."""

    def __init__(self) -> None:
        self._is_away = False

    def tell(self, outage: CoordinationError | None) -> None:
        """Take the state of now; say it where it is news."""
        if (outage is not None) == self._is_away:
            return
        self._is_away = outage is not None
        if outage is None:
            tell("marshal: the brokers answer again")
        else:
            tell(f"marshal: the brokers do not answer, waiting for them: {outage}")


def check_reader(stream: TextIO | None = None) -> None:
    """Look whether somebody still reads what we write.

    A pipe says so only when it is written to, which may be hours away.

    Raises:
        BrokenPipeError: Nobody does.
    """
    try:
        number = (stream or sys.stdout).fileno()
        if not stat.S_ISFIFO(os.fstat(number).st_mode):
            return
    except (OSError, ValueError):
        return  # not a file at all, as in tests
    poller = select.poll()
    poller.register(number, 0)
    if any(event & select.POLLERR for _, event in poller.poll(0)):
        raise BrokenPipeError
