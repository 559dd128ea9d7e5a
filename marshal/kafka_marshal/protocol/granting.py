"""The ladder of at most once, for one held claim, sans IO (PROTOCOL 6.2, 6.3).

It counts offsets only; whoever fetches keeps the records.
"""

from collections import deque

import attrs

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.transition import ACCEPTED, Transition

REQUESTS_IN_FLIGHT_MAX = 64


@attrs.frozen
class GrantRequest:
    """A ClaimingMessages that was sent: inclusive range of offsets."""

    seq: int
    first: int
    last: int


@attrs.frozen
class Grant:
    """A range that the log gave to this process, both ends inclusive."""

    first: int
    last: int


class AtMostOnce:
    """Ranges asked for and granted, used in log order (PROTOCOL 6.2).

    The accepted ClaimingMessages *is* the commit: what was granted and is not
    handed out is lost, never repeated.

    Attributes:
        next_first: First offset that has not been asked for.
    """

    __slots__ = ("_grants", "_requests", "grantee", "next_first")

    def __init__(self, start: int, *, grantee: bytes) -> None:
        self.next_first = start
        self.grantee = grantee
        self._requests: deque[GrantRequest] = deque()
        self._grants: deque[Grant] = deque()

    @property
    def outstanding_count(self) -> int:
        """Number of requests without a verdict."""
        return len(self._requests)

    @property
    def granted(self) -> Grant | None:
        """The grant to hand out from now, None where there is none."""
        return self._grants[0] if self._grants else None

    @property
    def unused(self) -> tuple[Grant, ...]:
        """Everything granted and not handed out: what a crash now would lose."""
        return tuple(self._grants)

    def request(self, seq: int, last: int) -> GrantRequest:
        """Note a request for everything up to ``last``.

        Raises:
            InvalidTransition: Nothing new would be asked for, or too many
                requests are under way.
        """
        if last < self.next_first or len(self._requests) >= REQUESTS_IN_FLIGHT_MAX:
            raise InvalidTransition(f"cannot ask for offsets up to {last}")
        request = GrantRequest(seq, self.next_first, last)
        self._requests.append(request)
        self.next_first = last + 1
        return request

    def on_verdict(self, transition: Transition) -> str | None:
        """Take the fold's verdict on an own ClaimingMessages.

        Only a record that names this very process as grantee counts: another
        process may send under the same incarnation (PROTOCOL 6.2).

        Returns:
            None where the range is granted or the record is not ours; else the
            reason of the refusal.
        """
        record = transition.record
        if not isinstance(record, ClaimingMessages) or record.grantee != self.grantee:
            return None
        self._requests = deque(r for r in self._requests if r.seq != record.seq)
        detail = transition.detail
        if transition.outcome != ACCEPTED or detail is None:
            return transition.reason or "refused"
        grant = Grant(detail["first"], detail["last"])
        self._grants.append(grant)
        self.next_first = max(self.next_first, grant.last + 1)
        return None

    def forget_requests(self) -> None:
        """Give unanswered requests up: a later one covers the same offsets.

        Should one of them still be accepted, its grant counts all the same.
        """
        if self._requests:
            self.next_first = self._requests[0].first
            self._requests.clear()

    def hand_out(self, offset: int) -> None:
        """Note that ``offset`` is handed out; everything before it is used up.

        Raises:
            InvalidTransition: The offset was not granted to this process.
        """
        while self._grants and self._grants[0].last < offset:
            self._grants.popleft()
        if not self._grants or offset < self._grants[0].first:
            raise InvalidTransition(f"offset {offset} was not granted")
        last = self._grants[0].last
        if offset == last:
            self._grants.popleft()
        else:
            self._grants[0] = Grant(offset + 1, last)

    def skip_through(self, offset: int) -> None:
        """Drop granted offsets up to ``offset``: no records exist there."""
        while self._grants and self._grants[0].first <= offset:
            grant = self._grants.popleft()
            if grant.last > offset:
                self._grants.appendleft(Grant(offset + 1, grant.last))

    def discard(self) -> tuple[Grant, ...]:
        """Give up everything granted and unused; return it, for the report."""
        lost = tuple(self._grants)
        self._grants.clear()
        self._requests.clear()
        return lost
