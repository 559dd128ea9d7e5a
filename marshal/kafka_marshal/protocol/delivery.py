"""The two delivery ladders of one held claim, sans IO (PROTOCOL 6).

Both count offsets only; whoever fetches keeps the records. An offset is
*in hand* from its hand-out until it is committed.
"""

from collections import deque
from collections.abc import Iterable

import attrs

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.transition import ACCEPTED, Transition

REQUESTS_IN_FLIGHT_MAX = 64


class AtLeastOnce:
    """Position over the contiguous prefix of what was processed (PROTOCOL 6.1).

    Attributes:
        position: Next offset to process: everything below is committed. None
            while no start is known.
    """

    __slots__ = ("_done", "_in_hand", "_last", "position")

    def __init__(self, start: int | None) -> None:
        self.position = start
        self._in_hand: deque[int] = deque()
        self._done: set[int] = set()
        self._last = -1

    @property
    def in_hand_count(self) -> int:
        """Number of offsets handed out and not yet committed."""
        return len(self._in_hand) - len(self._done)

    @property
    def tracked_count(self) -> int:
        """Number of offsets kept: those in hand, and those done out of order."""
        return len(self._in_hand)

    def hand_out(self, offsets: Iterable[int]) -> None:
        """Note offsets handed out, in increasing order.

        Raises:
            InvalidTransition: An offset is not beyond the last one handed out.
        """
        for offset in offsets:
            if offset <= self._last:
                raise InvalidTransition(f"offset {offset} handed out twice")
            self._last = offset
            self._in_hand.append(offset)

    def commit(self, offset: int) -> None:
        """Note that ``offset`` is processed; out of order is fine, twice too.

        Raises:
            InvalidTransition: The offset was never handed out under this claim.
        """
        in_hand = self._in_hand
        if in_hand and offset == in_hand[0]:
            in_hand.popleft()
            self.position = offset + 1
            while in_hand and in_hand[0] in self._done:
                self._done.remove(in_hand[0])
                self.position = in_hand.popleft() + 1
            return
        if in_hand and in_hand[0] < offset <= self._last:
            if offset in self._done:
                return
            if offset in in_hand:
                self._done.add(offset)
                return
        if offset > self._last or self.position is None or offset >= self.position:
            raise InvalidTransition(f"offset {offset} was not handed out")

    def commit_all(self) -> None:
        """Note that everything handed out so far is processed."""
        if self._in_hand:
            self.position = self._in_hand[-1] + 1
            self._in_hand.clear()
            self._done.clear()

    def jump(self, position: int) -> None:
        """Move to a later position because the log begins there (PROTOCOL 5.6)."""
        if self._in_hand:
            raise InvalidTransition("a jump needs empty hands")
        self.position = position


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
