"""Follows changes of the heartbeat interval while the engine runs (PROTOCOL 4.12).

A change reaches the coordinating partitions one by one, and each key is judged by the
interval of its own partition. This process paces itself by the least of them.
"""

from typing import TYPE_CHECKING

from kafka_marshal.errors import CoordinationError

from .context import Context

if TYPE_CHECKING:
    from kafka_marshal.ports import Pending

UNKNOWN_MS = -1


class IntervalFollower:
    """Keeps the pace of a process, and the timeouts of its appends, at the interval.

    For the engine's thread, under its lock.
    """

    __slots__ = ("_call", "_configured_ms", "_context", "_due_ms")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._configured_ms: int | None = None  # by a call of this class
        self._call: Pending[None] | None = None
        self._due_ms = 0

    def follow(self, before_ms: int) -> bool:
        """Set the pace by the Configs in force; return whether it has changed.

        Args:
            before_ms: The pace before.
        """
        context = self._context
        settled = context.settled
        least_ms = min(
            replica.heartbeat_interval_ms or before_ms
            for t, replica in context.replicas.items()
            if t < settled.partition_count
        )
        is_of_all = least_ms == settled.heartbeat_interval_ms
        context.least_interval_ms = None if is_of_all else least_ms
        if least_ms == before_ms:
            return False
        fields = {"before_ms": before_ms, "interval_ms": least_ms}
        context.observe("interval_changed", fields)
        self._configured_ms = before_ms
        return True

    def drive(self, now_ms: int) -> None:
        """Set the timeouts of appends in the background, again if that failed."""
        if self._call is not None:
            if not self._call.done():
                return
            error, self._call = self._call.exception(0), None
            if isinstance(error, CoordinationError):
                self._context.observe("timeouts_unchanged", {"error": error})
                self._configured_ms = UNKNOWN_MS
                self._due_ms = now_ms + self._context.heartbeat_interval_ms
        wanted_ms = self._context.heartbeat_interval_ms
        if self._configured_ms in {None, wanted_ms} or now_ms < self._due_ms:
            return
        self._configured_ms = wanted_ms
        log = self._context.ports.log
        self._call = self._context.ports.background.submit(
            lambda: log.configure(wanted_ms)
        )
