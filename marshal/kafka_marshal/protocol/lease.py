"""How fresh an owner is in the log, and how long it may act by its own clock.

Freshness judges owners in log time (PROTOCOL 4.2). The lease limits an owner in local
time, and ends before the owner can be stale (PROTOCOL 5.2).
"""

from enum import Enum
from functools import lru_cache

import attrs


class Freshness(Enum):
    """State of an owner by the age of its last renewal."""

    FRESH = "fresh"
    UNKNOWN = "unknown"
    STALE = "stale"


def freshness(age_ms: int, heartbeat_interval_ms: int) -> Freshness:
    """Return how fresh an owner is at an age.

    An owner is fresh below one heartbeat interval, stale above two, and unknown in
    between, both ends included. At exactly two intervals it is not stale, because it
    may rely on both. It is fresh at a negative age (a clock that went back).
    """
    if age_ms < heartbeat_interval_ms:
        return Freshness.FRESH
    if age_ms <= 2 * heartbeat_interval_ms:
        return Freshness.UNKNOWN
    return Freshness.STALE


def is_stale(age_ms: int, heartbeat_interval_ms: int) -> bool:
    """Return whether another claimant may win the key at this age."""
    return age_ms > 2 * heartbeat_interval_ms


MARGIN_MS_MIN = 50


@attrs.frozen
class Lease:
    """Local deadlines in ms: for hand-outs (soft), and for all work (hard)."""

    soft_until_ms: int
    hard_until_ms: int

    @classmethod
    @lru_cache(maxsize=16)  # a batch of heartbeats renews many claims alike
    def since(cls, base_ms: int, heartbeat_interval_ms: int) -> "Lease":
        """Return the lease of a renewal that was **sent** at ``base_ms``.

        PROTOCOL 5.2: two heartbeat intervals, less 0.1 % for drift, less a margin
        for a step of the leader's clock. Hand-outs may end a little earlier, but late
        enough that outages of a coordinating partition shorter than one interval do
        not interrupt them.
        """
        span_ms = 2 * heartbeat_interval_ms
        drift_ms = -(-span_ms // 1000)
        margin_ms = max(MARGIN_MS_MIN, -(-span_ms // 20))
        hard_ms = max(0, span_ms - drift_ms - margin_ms)
        soft_ms = min(7 * heartbeat_interval_ms // 4, hard_ms)
        return cls(base_ms + soft_ms, base_ms + hard_ms)


NO_LEASE = Lease(-1, -1)
