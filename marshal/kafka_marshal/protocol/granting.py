"""The ladder of at most once, for one held claim, sans IO (PROTOCOL 6.2, 6.3).

It counts offsets only; whoever fetches keeps the records. Several requests may
be under way, and the log may take them in another order than they were sent, or
take some of them never. What is granted is therefore what the fold says, and
never what was asked: the first of two requests that lands second finds that the
other was granted both ranges.
"""

from collections import deque
from enum import Enum

import attrs

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.state import ACCEPTED, KeyState, Transition
from kafka_marshal.protocol.types import Owner

REQUESTS_IN_FLIGHT_MAX = 64
DEPTH_MAX_DEFAULT = 4
# One batch ahead gains less than this part of the time, so it is not worth its risk.
GAIN_MIN = 20
SAMPLES_PER_AVERAGE = 4
FEWER_IN_A_ROW = 8
WORK_PER_REQUEST_US = 20_000
US_PER_MS = 1_000


class Refusal(Enum):
    """What the fold's refusal of a request means for the sender (PROTOCOL 4.7)."""

    TAKEN = "taken"
    """Every offset that was wanted is granted already."""
    LATER = "later"
    """The same offsets may be granted to another request."""
    OVER = "over"
    """The claim has ended: nothing is granted under it any more."""
    UNEXPECTED = "unexpected"
    """The log judges by a Config that the sender does not know."""


ENDING = frozenset({Refusal.OVER, Refusal.UNEXPECTED})
"""Refusals after which an owner gives up its claim."""

_REFUSALS = {
    "nothing_left": Refusal.TAKEN,
    "paused": Refusal.LATER,
    "span": Refusal.LATER,
    "not_owner": Refusal.OVER,
    "old_epoch": Refusal.OVER,
}


def refusal_of(
    reason: str | None, *, last: int = -1, head: int | None = None
) -> Refusal:
    """Classify the refusal of a request for offsets.

    Args:
        reason: The fold's reason.
        last: Last offset wanted. The request may have asked for fewer, because
            ``span`` cut it.
        head: Next offset that nobody was granted, as of the verdict; None if
            unknown.
    """
    refusal = _REFUSALS.get(reason or "", Refusal.UNEXPECTED)
    if refusal is Refusal.TAKEN and head is not None and head <= last:
        return Refusal.LATER
    return refusal


def why_over(known: KeyState | None, owner: Owner, *, epoch: int) -> str | None:
    """Return why nothing is granted under a claim any more, None if it may stand.

    Epochs of a key only grow, so a claim that has ended stays ended. A key that is
    unknown here, or has an earlier epoch, shows nothing: the claim may be yet to
    be read.

    Args:
        known: The key of the claim, as far as the log is read.
        owner: Who claimed.
        epoch: Epoch of the claim.
    """
    if known is None or known.epoch < epoch:
        return None
    if known.epoch == epoch and known.owner == owner:
        return None
    return "old_epoch" if known.owner == owner else "not_owner"


def last_within(last: int, head: int, *, span: int) -> int:
    """Return ``last``, or the last offset that ``span`` lets the log grant.

    Args:
        last: Last offset wanted.
        head: First offset that the log can grant: the next that nobody was
            granted, else the first one of the request.
        span: Limit of the Config.
    """
    return min(last, head + span - 1)


@attrs.frozen
class GrantRequest:
    """A ClaimingMessages that was sent: inclusive range of offsets.

    Attributes:
        seq: Its sequence number.
        first: First offset that it asks for.
        last: Last one.
        sent_ms: Local time of sending.
    """

    seq: int
    first: int
    last: int
    sent_ms: int = 0


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
        grantee: The process that may use what is granted.
        next_first: First offset that has not been asked for.
        done: Everything granted below it was handed out and is done with.
        is_anchored: Whether the log is known to have a position of the key.
        round_trip_us: Average time from asking to the verdict; 0 before the first.
    """

    __slots__ = (
        "_grants",
        "_handed",
        "_is_over",
        "_requests",
        "done",
        "grantee",
        "is_anchored",
        "next_first",
        "round_trip_us",
    )

    def __init__(self, start: int, *, grantee: bytes) -> None:
        self.next_first = self.done = self._handed = start
        self.grantee = grantee
        self.is_anchored = False
        self.round_trip_us = 0
        self._is_over = False
        self._requests: deque[GrantRequest] = deque()
        self._grants: deque[Grant] = deque()

    # --- questions

    @property
    def outstanding_count(self) -> int:
        """Number of requests without a verdict."""
        return len(self._requests)

    @property
    def oldest_sent_ms(self) -> int | None:
        """Local time at which the oldest request without a verdict was sent."""
        return self._requests[0].sent_ms if self._requests else None

    @property
    def granted(self) -> Grant | None:
        """The grant to hand out from now, None where there is none."""
        return self._grants[0] if self._grants and not self._is_over else None

    @property
    def unused(self) -> tuple[Grant, ...]:
        """Everything granted and not handed out: what a crash now would lose."""
        return tuple(self._grants)

    @property
    def unused_count(self) -> int:
        """Number of offsets granted and not handed out."""
        return sum(grant.last - grant.first + 1 for grant in self._grants)

    @property
    def resume_at(self) -> int:
        """First offset that is granted, asked for, or yet to be: where to fetch."""
        if self._grants:
            return self._grants[0].first
        return self._requests[0].first if self._requests else self.next_first

    def may_request(self, depth: int) -> bool:
        """Return whether one more request may be sent now.

        While the log has no position of the key, a grant begins where its own
        request says. One that overtook an earlier one would then leave out what
        the earlier one asks for, for ever; so there is only one at a time.
        """
        return len(self._requests) < (depth if self.is_anchored else 1)

    # --- asking

    def request(self, seq: int, last: int, *, sent_ms: int = 0) -> GrantRequest:
        """Note a request for everything up to ``last``.

        Raises:
            InvalidTransition: Nothing new would be asked for, or too many
                requests are under way.
        """
        may = self.may_request(REQUESTS_IN_FLIGHT_MAX)
        if last < self.next_first or not may:
            raise InvalidTransition(f"cannot ask for offsets up to {last}")
        request = GrantRequest(seq, self.next_first, last, sent_ms)
        self._requests.append(request)
        self.next_first = last + 1
        return request

    def last_within(self, last: int, span: int) -> int:
        """Return ``last``, or the last offset that ``span`` lets the log grant.

        A request covers what is under way before it as well: should those be
        lost, it is granted all of it (PROTOCOL 4.7).
        """
        first = self._requests[0].first if self._requests else self.next_first
        return last_within(last, first, span=span)

    def on_verdict(
        self,
        transition: Transition,
        *,
        head: int | None = None,
        now_ms: int | None = None,
    ) -> str | None:
        """Take the fold's verdict on an own ClaimingMessages.

        Only a record that names this very process as grantee counts: another
        process may send under the same incarnation (PROTOCOL 6.2).

        Args:
            transition: What the record did.
            head: First offset that nobody was granted, as of that record.
            now_ms: Local time, to measure the round trip.

        Returns:
            None where the range is granted or the record is not ours; else the
            reason of the refusal.
        """
        record = transition.record
        if not isinstance(record, ClaimingMessages) or record.grantee != self.grantee:
            return None
        detail = transition.detail
        if transition.outcome == ACCEPTED and detail is not None:
            if now_ms is not None:
                self._measure(record.seq, now_ms)
            self._take(Grant(detail["first"], detail["last"]), seq=record.seq)
            return None
        self._refused(record.seq, transition.reason, head)
        return transition.reason or "refused"

    def _measure(self, seq: int, now_ms: int) -> None:
        for request in self._requests:
            if request.seq == seq:
                # Clocks of whole milliseconds: less than one is not nothing.
                sample_us = max(1, (now_ms - request.sent_ms) * US_PER_MS)
                self.round_trip_us = averaged(self.round_trip_us, sample_us)

    def _take(self, grant: Grant, *, seq: int | None = None) -> None:
        self._grants.append(grant)
        self.is_anchored = True
        # A request for less has landed, or can be granted nothing any more.
        left = [r for r in self._requests if r.last > grant.last]
        # A sidecar cuts a request where ``span`` was lowered meanwhile. What the
        # request did not get, the next one is granted.
        self._requests = deque(r for r in left if r.seq != seq)
        if left and not self._requests:
            self.next_first = grant.last + 1
        else:
            self.next_first = max(self.next_first, grant.last + 1)

    def _refused(self, seq: int, reason: str | None, head: int | None) -> None:
        refused = next((r for r in self._requests if r.seq == seq), None)
        last = -1 if refused is None else refused.last
        if refusal_of(reason, last=last, head=head) is Refusal.TAKEN:
            self._requests = deque(r for r in self._requests if r.seq != seq)
            self.next_first = max(self.next_first, head or 0)
        elif refused is not None:
            # It must be asked for again, and so must what was asked for after it
            # on the assumption that it would be granted.
            self._requests.clear()
            self.next_first = refused.first if head is None else head

    def forget_requests(self) -> None:
        """Give unanswered requests up: a later one covers the same offsets.

        Should one of them still be accepted, its grant counts all the same.
        """
        if self._requests:
            self.next_first = self._requests[0].first
            self._requests.clear()

    # --- using

    def hand_out(self, offset: int) -> None:
        """Note that ``offset`` is handed out; everything before it is used up.

        Raises:
            InvalidTransition: The offset was not granted to this process.
        """
        while self._grants and self._grants[0].last < offset:
            self._grants.popleft()
        granted = self.granted
        if granted is None or offset < granted.first:
            raise InvalidTransition(f"offset {offset} was not granted")
        self._use_up(offset)

    def skip_through(self, offset: int) -> None:
        """Drop granted offsets up to ``offset``: no records exist there.

        They are done with once everything before them is.
        """
        is_done = self.done == self._handed
        while self._grants and self._grants[0].first <= offset:
            self._use_up(min(offset, self._grants[0].last))
        if is_done:
            self.done = self._handed

    def _use_up(self, offset: int) -> None:
        grant = self._grants.popleft()
        if grant.last > offset:
            self._grants.appendleft(Grant(offset + 1, grant.last))
        self._handed = offset + 1

    def take_back(self) -> None:
        """Note that all that was handed out is done with."""
        self.done = self._handed

    def discard(self) -> tuple[Grant, ...]:
        """Give up what is granted and unused; return it once, for the report.

        From here on nothing can be handed out.
        """
        lost = () if self._is_over else tuple(self._grants)
        self._is_over = True
        self._requests.clear()
        return lost


def lead_for(round_trip_us: int, batch_us: int) -> int:
    """Return how many batches must be at hand so that no round trip is waited for.

    None but the one in hand, 0 here, where a round trip is next to nothing beside
    the work of a batch: what is asked for ahead is what a crash loses.

    Args:
        round_trip_us: From asking to the verdict.
        batch_us: From one batch of the partition to the next, waiting left out;
            at least 1.
    """
    if round_trip_us * GAIN_MIN <= batch_us:
        return 0
    return -(-round_trip_us // batch_us)


def step_for(work_us: int) -> int:
    """Return how many batches to ask for at once.

    A request costs every thread a little, so they do not come more often than
    the work of some milliseconds.

    Args:
        work_us: Work of one batch, of whatever partition; at least 1.
    """
    return -(-WORK_PER_REQUEST_US // work_us)


def averaged(average: int, sample: int) -> int:
    """Return a running average with one more sample; the first stands alone."""
    if not average:
        return sample
    return max(1, average + (sample - average) // SAMPLES_PER_AVERAGE)


class Pace:
    """How many batches of a partition to have at risk: 1 at first (PROTOCOL 6.3).

    It moves by one at a time, up at once and down only after it was too many for
    several batches in a row, so that it does not follow every single figure.

    Attributes:
        depth: Batches in hand, granted and asked for, together.
        step: How many of them to ask for at once.
        most: Upper bound of the depth.
        batch_us: Average of what a batch takes; 0 before the first.
    """

    __slots__ = ("_fewer", "batch_us", "depth", "most", "step")

    def __init__(self, most: int) -> None:
        self.depth = self.step = 1
        self.most = most
        self.batch_us = 0
        self._fewer = 0

    def on_batch(self, batch_ms: int, *, round_trip_us: int, work_us: int) -> None:
        """Take how long it was from one batch to the next.

        Args:
            batch_ms: Of this partition; waiting for grants left out.
            round_trip_us: Average time from asking to the verdict.
            work_us: Average work of a batch, of whatever partition.
        """
        if not round_trip_us:
            return
        # A long silence must not hide for long that work has come.
        longest_us = 2 * GAIN_MIN * round_trip_us
        sample_us = max(1, min(batch_ms * US_PER_MS, longest_us))
        self.batch_us = averaged(self.batch_us, sample_us)
        lead = lead_for(round_trip_us, self.batch_us)
        step = step_for(max(1, work_us))
        self._move(min(self.most, lead + step if lead else 1))
        self.step = max(1, min(step, self.depth - lead))

    def _move(self, wanted: int) -> None:
        self._fewer = self._fewer + 1 if wanted < self.depth else 0
        if wanted > self.depth:
            self.depth += 1
        elif self._fewer >= FEWER_IN_A_ROW:
            self.depth -= 1
            self._fewer = 0
