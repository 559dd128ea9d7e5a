"""Ends of coordinating partitions that a process must fold before it acts."""

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from .context import Ports

if TYPE_CHECKING:
    from kafka_marshal.ports import Pending

RETRY_MS = 5_000
TIMEOUT_MS = 5_000
UNKNOWN = sys.maxsize


class AwaitedEnds:
    """Log ends that must be folded (PROTOCOL 7.5). Used by one thread.

    A log may be cut back to an end that its reader has not reached: no reader sees
    that, and the log may never reach its earlier end. So ends that are not reached are
    requested again every 5 s, in the background. A lower end then counts, because the
    rest of the log lies below it. An end below the folded offset is ignored: it is that
    of a leader that lags.
    """

    __slots__ = ("_ends", "_folded", "_ports", "_request", "_request_at_ms")

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._ends: dict[int, int] = {}
        self._request: Pending[Mapping[int, int]] | None = None
        self._request_at_ms = 0
        # Next offset to fold of each partition at the time of the request.
        self._folded: Mapping[int, int] = {}

    def add(self, ends: Mapping[int, int]) -> None:
        """Wait for these ends, too; they replace other ends of the same partitions."""
        self._ends |= ends
        self._request, self._request_at_ms = None, self._ports.clock.now_ms() + RETRY_MS

    def add_unknown(self, partitions: Iterable[int]) -> None:
        """Wait for the ends that partitions have when ``reached`` is called next."""
        self._ends |= dict.fromkeys(partitions, UNKNOWN)
        self._request, self._request_at_ms = None, 0

    def __bool__(self) -> bool:
        """Return whether any end is waited for."""
        return bool(self._ends)

    def discard(self, partition: int) -> None:
        """Wait no longer for the end of a partition."""
        self._ends.pop(partition, None)

    def is_reached(self, partition: int, folded: Mapping[int, int]) -> bool:
        """Return whether a partition's end is folded, or no end is waited for."""
        return folded.get(partition, 0) >= self._ends.get(partition, 0)

    def reached(self, folded: Mapping[int, int]) -> list[int]:
        """Return the partitions whose ends are folded; call this in each round.

        Args:
            folded: Next offset to fold of each partition.
        """
        self._drive(folded)
        return [t for t in self._ends if self.is_reached(t, folded)]

    def are_reached(self, folded: Mapping[int, int]) -> bool:
        """Return whether all ends are folded; call this in each round."""
        return len(self.reached(folded)) == len(self._ends)

    def _drive(self, folded: Mapping[int, int]) -> None:
        """Request ends that are not reached, if due, and lower them by the response."""
        late = [t for t in self._ends if not self.is_reached(t, folded)]
        now_ms = self._ports.clock.now_ms()
        if self._request is None and late and now_ms >= self._request_at_ms:
            call = partial(self._ports.log.end_offsets, TIMEOUT_MS, late)
            self._folded = {t: folded.get(t, 0) for t in late}
            self._request_at_ms = now_ms + RETRY_MS
            self._request = self._ports.background.submit(call)
        request = self._request
        if request is None or not request.done():
            return
        self._request = None
        if request.exception() is None:
            for t, end in request.result(0).items():
                if t in self._ends and end >= self._folded.get(t, end):
                    self._ends[t] = min(end, self._ends[t])
