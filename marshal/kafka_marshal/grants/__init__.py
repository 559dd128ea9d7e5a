"""At most once in another process than the owner's (PROTOCOL 6.2).

The driver of a query holds the claims, and its tasks process. Each attempt of a task
requests its offsets itself: with a ClaimingMessages under the driver's claim, and a
grantee that no other attempt uses. Grants of a key are pairwise disjoint even if
records are late, duplicated or lost. So of all attempts at a range (retried,
speculative, or of an earlier driver) at most one is granted it, and only that one
processes it.

The verdict comes from the fold of the log, in this process or in the sidecar of this
host. It is found by the grantee, because sequence numbers belong to the owner.
"""

from kafka_marshal.protocol.types import OffsetRange

from .client import ClaimRef, ClaimState, GrantClient
from .connect import close_grant_clients, open_grant_client

__all__ = [
    "ClaimRef",
    "ClaimState",
    "GrantClient",
    "OffsetRange",
    "close_grant_clients",
    "open_grant_client",
]
