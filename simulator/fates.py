"""Draws the fates of appends in a simulated world, from open windows of trouble."""

from typing import TYPE_CHECKING

import attrs

from simulator.fakestore import AppendFate
from simulator.plan import chance

if TYPE_CHECKING:
    import random

HARDNESS = (0.1, 0.4, 0.9)
KINDS = frozenset({"delay", "late", "loss", "copies", "slow", "mute"})


@attrs.frozen
class Window:
    """A time in which appends may be lost, late or duplicated.

    Attributes:
        kind: Kind of trouble, one of ``KINDS``.
        writer: client_id of the process that is hit, None for all.
        hardness: Probability that an append is hit.
        partition: Coordinating partition that is hit, None for all.
    """

    kind: str
    writer: str | None
    hardness: float
    partition: int | None = None


class Fates:
    """Draws the fate of every append; a ``FatePolicy``."""

    def __init__(self, seed: int, *, h_ms: int, latency_ms: int) -> None:
        """Start without open windows."""
        self._seed = seed
        self._h_ms = h_ms
        self._latency_ms = latency_ms
        self._windows: list[Window] = []
        self._rngs: dict[str, random.Random] = {}

    def open(self, window: Window) -> None:
        """Open a window of trouble."""
        self._windows.append(window)

    def heal(self) -> None:
        """Close all windows; appends in flight keep the fates that were drawn."""
        self._windows.clear()

    def close(self, window: Window) -> None:
        """Close one window; it may have been closed before."""
        if window in self._windows:
            self._windows.remove(window)

    def of_append(self, writer: str, partition: int) -> AppendFate:
        """Return the fate of the next append."""
        rng = self._rngs.get(writer)
        if rng is None:
            rng = self._rngs[writer] = chance(self._seed, f"fates/{writer}")
        # The number of draws is fixed: leaving out a window must not change later ones.
        luck, size = rng.random(), rng.random()
        latency_ms = int(size * self._latency_ms)
        for window in self._windows:
            is_near = window.partition in {None, partition}
            is_hit = window.writer in {None, writer} and luck < window.hardness
            if is_near and is_hit:
                return self._hit(window.kind, size, latency_ms)
        return AppendFate(delay_ms=latency_ms)

    def _hit(self, kind: str, size: float, latency_ms: int) -> AppendFate:
        h_ms = self._h_ms
        if kind == "delay":
            return AppendFate(delay_ms=1 + int(size * h_ms / 2))
        if kind == "late":
            # A ghost: reported as failed, but appended up to three intervals later.
            fails_ms = 1 + int(size * h_ms / 2)
            late_ms = 1 + int((size * 7 % 1) * 3 * h_ms)
            return AppendFate(delay_ms=late_ms, fails_after_ms=fails_ms)
        if kind == "copies":
            return AppendFate(delay_ms=latency_ms, copies=2)
        if kind == "slow":
            replicates_ms = 1 + int(size * h_ms / 3)
            return AppendFate(delay_ms=latency_ms, replicates_ms=replicates_ms)
        return AppendFate(is_lost=True)
