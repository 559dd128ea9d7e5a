"""Delays that brokers impose on requests if a quota is exceeded.

A quota counts all connections of a user or client id together. If data exhausts it,
heartbeats and reads of the log are delayed as well: leases then run out with no sign of
a fault. Each client library keeps its delays to itself, so both report them here.
"""

import logging
import threading
import time
from collections.abc import Callable

import attrs

_LOGGER = logging.getLogger("kafka_marshal")
NOTED_MS_MIN = 100
"""Shorter delays endanger no lease, and are part of every quota in use."""
REPEATED_AFTER_S = 60.0


@attrs.define(eq=False)
class Throttling:
    """The delays of all clients of a process. Thread-safe.

    Attributes:
        longest_ms: The longest delay so far, 0 without any.
    """

    longest_ms: int = 0
    _clock_s: Callable[[], float] = time.monotonic
    _due_s: float = 0.0
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def note(self, broker: str, delay_ms: float) -> None:
        """Record how long a broker delays a client; log the first of a minute.

        Args:
            broker: The broker, for the message.
            delay_ms: The delay; 0 if there is none.
        """
        if delay_ms < NOTED_MS_MIN:
            return
        with self._lock:
            self.longest_ms = max(self.longest_ms, round(delay_ms))
            now_s = self._clock_s()
            if now_s < self._due_s:
                return
            self._due_s = now_s + REPEATED_AFTER_S
        _LOGGER.warning(
            "throttled: %s delays requests by %d ms, for a quota of this user or "
            "client id: claims may be lost, as heartbeats are late. Run: "
            "kafka-configs --describe --entity-type users (and clients)",
            broker,
            round(delay_ms),
        )


throttling = Throttling()
