"""How slow the machine is while a test measures, for bounds in real time.

A bound that holds on an idle machine fails on one that is busy with something else, and
a bound that holds on every machine says nothing. So tests measure both: what took how
long, and how long a fixed piece of work took meanwhile.
"""

import threading
import time
from typing import Self

# The work below takes 15 ms on an idle core of the machines that the bounds were
# written on; up to this, a machine counts as fast.
REFERENCE_MS = 22.0
ROUNDS = 210_000
PAUSE_S = 0.5
JOIN_S = 60


def work_ms() -> float:
    """Do a fixed piece of work; return how long it took, in milliseconds."""
    began = time.perf_counter()
    number = 0
    for step in range(ROUNDS):
        number = (number * 31 + step) & 0xFFFF_FFFF
    return (time.perf_counter() - began) * 1000


class Slowness:
    """Measures the machine on a thread of its own while it is entered.

    Attributes:
        factor: The longest measurement by the reference, at least 1: what bounds in
            real time are to be multiplied by.
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
        self.factor = max(self.factor, work_ms() / REFERENCE_MS)

    def _run(self) -> None:
        while not self._ended.wait(PAUSE_S):
            self._note()
