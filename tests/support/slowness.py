"""The slowness of the machine, for bounds and deadlines in real time.

A bound that holds on an idle machine fails on a busy one, and a bound that holds on
every machine proves nothing. So tests measure both the time of an action and the time
that a fixed piece of work takes meanwhile. A wait after its deadline continues for as
many times longer as the machine is slow at that moment.
"""

import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

T = TypeVar("T")

# The work below takes 15 ms on an idle core of the machines for which the bounds were
# written; a machine that needs no more than this counts as fast.
REFERENCE_MS = 22.0
ROUNDS = 210_000
PAUSE_S = 0.5
LOOK_PAUSES = 3
JOIN_S = 60


def work_ms() -> float:
    """Do a fixed piece of work; return its time in milliseconds."""
    began = time.perf_counter()
    number = 0
    for step in range(ROUNDS):
        number = (number * 31 + step) & 0xFFFF_FFFF
    return (time.perf_counter() - began) * 1000


def factor_now() -> float:
    """Return the slowness of the machine relative to the reference, at least 1."""
    return max(1.0, work_ms() / REFERENCE_MS)


def is_over(since_s: float, allowed_s: float) -> bool:
    """Return whether more time has passed than is allowed at the current slowness.

    Args:
        since_s: The start, by `time.monotonic`.
        allowed_s: The allowed time on a machine that is not busy.
    """
    took_s = time.monotonic() - since_s
    return took_s >= allowed_s and took_s >= allowed_s * factor_now()


def until(
    condition: Callable[[], T],
    what: str = "the condition",
    *,
    timeout_s: float = 60,
    pause_s: float = 0.01,
) -> T:
    """Call ``condition`` until its result is true; return the result.

    Pauses between calls, longer if a call uses much processor time.

    Raises:
        AssertionError: The condition was not true in time.
    """
    since_s = time.monotonic()
    while True:
        before_s = time.thread_time()
        if found := condition():
            return found
        look_s = time.thread_time() - before_s
        assert not is_over(since_s, timeout_s), f"not within {timeout_s} s: {what}"
        time.sleep(max(pause_s, LOOK_PAUSES * look_s))


class Slowness:
    """Measures the machine on its own thread, as a context manager.

    Attributes:
        factor: The longest measurement relative to the reference, at least 1; bounds in
            real time are multiplied by it.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slowness", daemon=True)

    def __enter__(self) -> Self:
        self._note()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(JOIN_S)
        self._note()

    def _note(self) -> None:
        self.factor = max(self.factor, factor_now())

    def _run(self) -> None:
        while not self._ended.wait(PAUSE_S):
            self._note()
