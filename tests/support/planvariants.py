"""Broken variants of how members use Plans and offers (PROTOCOL 9.2, 9.5)."""

from kafka_marshal.engine import handoffs, planning
from kafka_marshal.protocol import plans


def follow_entries_after_a_claim(patch):
    """Entries of a Plan stay valid after a claim of their key."""
    for module in (plans, planning):
        patch.setattr(module, "is_valid_for", lambda known, next_offset: True)


def offer_a_lapsed_pair_at_once(patch):
    """A successor that was not ready in time is offered the key again at once."""
    patch.setattr(handoffs.Offers, "_bar", lambda self, key, offered, now_ms: None)
