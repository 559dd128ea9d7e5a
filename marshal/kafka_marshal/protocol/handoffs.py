"""Offers of keys: when an owner acts on an offer, and its phase (PROTOCOL 9.5)."""

from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.types import Key

OFFERED = "offered"
READY = "ready"


def is_ready_for(known: KeyState, *, epoch: int, living: bytes | None) -> bool:
    """Return whether to release a key to the successor that it is offered to.

    Args:
        known: The key, as folded.
        epoch: Epoch of the owner's claim.
        living: Incarnation of the successor if it is live and not leaving, else None.
    """
    offer = known.offer
    if offer is None or known.epoch != epoch or living is None:
        return False
    return offer.ready == living


def phase_of(known: KeyState, log_time_ms: int) -> str | None:
    """Return ``offered`` or ``ready``, or None without an open offer.

    An offer that is ready stays open beyond its end: its key drains until the release.
    """
    offer = known.offer
    if offer is None:
        return None
    if offer.ready is not None:
        return READY
    return OFFERED if log_time_ms < offer.until_ms else None


def offered_since_ms(state: WorldState, key: Key) -> int | None:
    """Return the log time of a key's offer; None if this reader did not fold it."""
    offer, noted = state.keys[key].offer, state.soft.offered_ms.get(key)
    if offer is None or noted is None or noted[0] != offer.offset:
        return None
    return noted[1]
