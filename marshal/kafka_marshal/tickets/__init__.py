"""At most once in another process than the owner's (PROTOCOL 6.2).

A query's driver holds the claims, its tasks process. Each attempt of a task asks
for its offsets itself: a ClaimingMessages under the driver's claim, with a grantee
that nobody else has ever used. Grants of a key are pairwise disjoint whatever is
late, doubled or lost, so of all attempts at a range, retried, speculative or of a
driver long gone, at most one is given it. What is not given is not processed.

The verdict comes from the fold of the log, read back here or by the sidecar of this
host. It is found by the grantee: sequence numbers are the owner's business.
"""

from .office import ClaimRef, Standing, TicketOffice, Verdict
from .opening import close_offices, open_office

__all__ = [
    "ClaimRef",
    "Standing",
    "TicketOffice",
    "Verdict",
    "close_offices",
    "open_office",
]
