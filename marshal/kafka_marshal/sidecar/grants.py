"""Checks requests for offsets at most once.

PROTOCOL 12: a process touches only what it claimed. So each request shows the secret of
its claim, and reaches no further than the end of the data partition.
"""

import hmac
import threading
from collections import OrderedDict

from kafka_marshal.engine import Context
from kafka_marshal.engine.grant_requests import (
    GrantRequests,
    OnGranted,
    RangeRequest,
    Ticket,
    Verdict,
)
from kafka_marshal.errors import ClaimRejected, ConfigurationError, CoordinationError
from kafka_marshal.ports import DataLog
from kafka_marshal.protocol.claiming import grant_secret
from kafka_marshal.protocol.granting import why_over
from kafka_marshal.protocol.state import IGNORED, KeyState
from kafka_marshal.protocol.types import Key, Owner, TopicPartition
from kafka_marshal.remote.api import GrantRequest
from kafka_marshal.sidecar.http_errors import WRONG_SECRET
from kafka_marshal.sidecar.idempotency import IdempotencyCache

ENDS_MAX = 10_000


class Grants:
    """Checks requests for offsets, and appends those that are allowed.

    Args:
        context: State of the coordination log.
        tickets: Appends requests.
        data: Answers where data partitions end.
    """

    def __init__(
        self, context: Context, tickets: GrantRequests, *, data: DataLog
    ) -> None:
        self._context = context
        self._data = data
        self._repeats = IdempotencyCache(tickets)
        self._lock = threading.Lock()
        self._ends: OrderedDict[TopicPartition, int] = OrderedDict()

    def has_read(self, key: Key, ask: GrantRequest) -> bool:
        """Return whether the claim has been read. Under the engine's lock."""
        known = self._known(key)
        return known is not None and known.epoch >= ask.epoch

    def is_over(self, key: Key, ask: GrantRequest) -> bool:
        """Return whether the claim has ended. Under the engine's lock."""
        return self._why_over(key, ask) is not None

    def ticket(self, key: Key, ask: GrantRequest, *, note: OnGranted) -> Ticket:
        """Append a request, or find the ticket of an earlier one.

        Called under the engine's lock. A request under a claim that has ended is
        answered at once, without a record in the log.

        Args:
            key: The key.
            ask: The request.
            note: Called with the granted range.

        Raises:
            ClaimRejected: It does not show the secret of the claim.
            ConfigurationError: Its number was used for another request.
            CoordinationError: The claim is not read yet; or too many requests have no
                verdict.
        """
        wish = RangeRequest(
            *(key, _owner(ask), ask.epoch, bytes.fromhex(ask.grantee)),
            *(ask.first, ask.last, ask.done),
        )
        reason = self._why_over(key, ask)
        if reason is None:
            self.require_secret(key, ask)
            return self._repeats.ticket(ask, wish, note=note)
        before = self._repeats.find(ask, wish)
        if before is not None:
            return before
        known = self._known(key)
        head = None if known is None else known.next_unclaimed()
        verdict = Verdict(IGNORED, reason, None, head, None)
        return Ticket(wish, self._context.now_ms, None, verdict=verdict)

    def require_secret(self, key: Key, ask: GrantRequest) -> None:
        """Require that a request shows the secret of its claim.

        Called under the engine's lock.

        Raises:
            ClaimRejected: It does not.
            CoordinationError: The claim is not read yet.
        """
        known = self._known(key)
        if known is None or known.epoch < ask.epoch:
            raise CoordinationError(
                f"this sidecar has not read the claim of {key.topic_partition} at log "
                f"offset {ask.epoch} yet; ask again in a moment"
            )
        given = bytes.fromhex(ask.secret)
        known_hash = known.resume_hash
        if known_hash is None or not hmac.compare_digest(
            given, grant_secret(known_hash, key, epoch=ask.epoch)
        ):
            raise ClaimRejected(
                f"the request does not show the secret of the claim of "
                f"{key.topic_partition} that {ask.client_id!r} holds; take it from the "
                "event 'assigned', or from the ticket of the claim's holder",
                holder=ask.client_id,
                at_offset=ask.epoch,
                reason=WRONG_SECRET,
            )

    def require_end(self, key: Key, ask: GrantRequest, *, timeout_ms: int) -> None:
        """Require that a request ends within the data partition.

        The cluster is only asked about offsets beyond the known end, because an end
        only grows. Blocks; called without the engine's lock.

        Raises:
            ConfigurationError: It reaches beyond the end.
            CoordinationError: The cluster did not answer.
        """
        place = key.topic_partition
        with self._lock:
            if ask.last < self._ends.get(place, 0):
                return
        end = self._data.ends([place], timeout_ms).get(place, 0)
        with self._lock:
            self._ends[place] = end
            self._ends.move_to_end(place)
            while len(self._ends) > ENDS_MAX:
                self._ends.popitem(last=False)
        if ask.last >= end:
            raise ConfigurationError(
                f"the request reaches offset {ask.last} of {place}, whose log ends at "
                f"{end}: offsets granted before they are written are lost for the "
                "group; request only what was fetched",
                setting="last",
            )

    def _known(self, key: Key) -> KeyState | None:
        return self._context.replica_of(key).world.keys.get(key)

    def _why_over(self, key: Key, ask: GrantRequest) -> str | None:
        return why_over(self._known(key), _owner(ask), epoch=ask.epoch)


def _owner(ask: GrantRequest) -> Owner:
    return Owner(ask.client_id, bytes.fromhex(ask.incarnation))
