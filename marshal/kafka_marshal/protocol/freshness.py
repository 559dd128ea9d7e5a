"""How alive an owner is, from the age of its last renewal (PROTOCOL 4.2)."""

from enum import Enum


class Freshness(Enum):
    """What the age of the last renewal says of an owner."""

    FRESH = "fresh"
    UNKNOWN = "unknown"
    STALE = "stale"


def freshness(age_ms: int, heartbeat_interval_ms: int) -> Freshness:
    """Judge an age: fresh below H, stale above 2H, unknown between, inclusive.

    Exactly 2H is not stale: an owner may count on the whole of 2H. A negative
    age (a clock that went back) is fresh, never free.
    """
    if age_ms < heartbeat_interval_ms:
        return Freshness.FRESH
    if age_ms <= 2 * heartbeat_interval_ms:
        return Freshness.UNKNOWN
    return Freshness.STALE


def is_stale(age_ms: int, heartbeat_interval_ms: int) -> bool:
    """Return whether another claimant may take the key at this age."""
    return age_ms > 2 * heartbeat_interval_ms


def remaining_ms(age_ms: int, heartbeat_interval_ms: int) -> int:
    """Return the log time until the owner is stale; 0 where it is already."""
    return max(0, 2 * heartbeat_interval_ms - age_ms + 1)
