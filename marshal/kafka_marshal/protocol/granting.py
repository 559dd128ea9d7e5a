"""Grants of a claim with at-most-once delivery, as a sans-IO machine (PROTOCOL 6.2).

It counts offsets only; the fetching code keeps the records. Several requests may be
in flight (PROTOCOL 6.3), and the log may have them in another order than they were
sent, or lack some of them. So only the fold's verdict counts as a grant, never the
request: if two requests swap places, the first one in the log is granted both ranges.
"""

from collections import deque
from enum import Enum

import attrs

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.losses import mark_to_tags
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.state import ACCEPTED, IGNORED, KeyState, Transition
from kafka_marshal.protocol.types import Key, OffsetRange, Owner, Token

REQUESTS_IN_FLIGHT_MAX = 64
# Upper bound of the batches that a crash may lose with fast handlers. Fewer are used if
# they are enough to hide a round trip and to fill WORK_PER_ROUND_US; all, only if an
# application takes a hundred thousand records of a partition in this time.
DEPTH_MAX_DEFAULT = 256
# A batch is requested ahead only if that saves more than 1/20 of the time.
GAIN_MIN = 20
SAMPLES_PER_AVERAGE = 4
FEWER_IN_A_ROW = 8
# Besides the round trip, the requests of all partitions together cover this much work.
# Each round of requests costs brokers and readers of the log as much as fetching
# thousands of records.
WORK_PER_ROUND_US = 80_000
US_PER_MS = 1_000


class Refusal(Enum):
    """What a refused request means for its sender (PROTOCOL 4.7)."""

    TAKEN = "taken"
    """Every requested offset is already granted."""
    LATER = "later"
    """The same offsets may be granted to another request."""
    OVER = "over"
    """The claim has ended: nothing more is granted under it."""
    UNEXPECTED = "unexpected"
    """The log applies a Config that the sender does not know."""


ENDING = frozenset({Refusal.OVER, Refusal.UNEXPECTED})
"""Refusals after which an owner releases its claim."""

_REFUSALS = {
    "nothing_left": Refusal.TAKEN,
    "moving": Refusal.LATER,
    "paused": Refusal.LATER,
    "span": Refusal.LATER,
    "not_owner": Refusal.OVER,
    "old_epoch": Refusal.OVER,
    "wrong_partition": Refusal.OVER,
    "retired": Refusal.OVER,
}


def refusal_of(
    reason: str | None, *, last: int = -1, head: int | None = None
) -> Refusal:
    """Classify the refusal of a request for offsets.

    Args:
        reason: The fold's reason.
        last: Last offset wanted. The request may have ended earlier, because
            ``span`` cut it.
        head: First offset that is not granted after the verdict; None if unknown.
    """
    refusal = _REFUSALS.get(reason or "", Refusal.UNEXPECTED)
    if refusal is Refusal.TAKEN and head is not None and head <= last:
        return Refusal.LATER
    return refusal


def last_within(last: int, head: int, *, span: int) -> int:
    """Return ``last``, limited to what ``span`` allows the log to grant.

    Args:
        last: Last offset wanted.
        head: First offset that the log can grant: the first that is not granted,
            else the first one of the request.
        span: Limit of the Config.
    """
    return min(last, head + span - 1)


@attrs.frozen(kw_only=True)
class GrantRequest:
    """A request for a range of offsets under a claim (PROTOCOL 6.2).

    Attributes:
        key: The key.
        owner: Its owner.
        epoch: Epoch of the claim.
        grantee: Id of the process that will process the granted offsets.
        first: First offset wanted.
        last: Last offset wanted.
        mark: All granted offsets below it are processed, for the tags; None if unknown.
        token: Token of the claim, None if unknown. It is not in the record: a process
            that appends a request of another process first compares it with the key's
            token, because after a move of the key the epoch may be the same
            (PROTOCOL 12).
    """

    key: Key
    owner: Owner
    epoch: int
    grantee: bytes
    first: int
    last: int
    mark: int | None = None
    token: Token | None = None

    def within(self, span: int, *, head: int | None) -> "GrantRequest":
        """Return the request cut to what ``span`` allows the log to grant.

        Args:
            span: Limit of the Config.
            head: First offset that is not granted, None if unknown.
        """
        start = self.first if head is None else head
        return attrs.evolve(self, last=last_within(self.last, start, span=span))

    def to_record(self, seq: int) -> ClaimingMessages:
        """Return the record for the log."""
        return ClaimingMessages(
            client_id=self.owner.client_id,
            group_id=self.key.group_id,
            incarnation=self.owner.incarnation,
            seq=seq,
            topic=self.key.topic,
            partition=self.key.partition,
            epoch=self.epoch,
            grantee=self.grantee,
            first=self.first,
            proposed_last_offset=self.last,
            tags=mark_to_tags(self.mark),
        )

    def verdict_if_over(self, known: KeyState | None) -> "GrantVerdict | None":
        """Return the verdict if the claim has ended, None if the log must decide.

        Epochs of a key only grow, so a claim that has ended stays ended. An unknown key
        or an earlier epoch proves nothing: the claim may not be read yet.

        Args:
            known: The key, as far as the log is read.
        """
        if known is None or known.epoch < self.epoch:
            return None
        if known.epoch == self.epoch and known.owner == self.owner:
            return None
        return GrantVerdict(
            outcome=IGNORED,
            reason="old_epoch" if known.owner == self.owner else "not_owner",
            head=known.next_unclaimed(),
            offset=None,
        )


@attrs.frozen(kw_only=True)
class GrantVerdict:
    """The fold's verdict on a request for offsets.

    Attributes:
        outcome: ``accepted``, ``refused`` or ``ignored``.
        reason: Why it was not accepted, such as ``nothing_left`` or ``not_owner``.
        granted: Offsets granted, None if none are.
        head: Next offset that is not granted, after this request; None if unknown.
        offset: Log offset of the request; None if it was not appended, because the
            claim had ended before.
    """

    outcome: str
    reason: str | None
    granted: OffsetRange | None = None
    head: int | None
    offset: int | None


def verdict_of(transition: Transition, *, head: int | None) -> GrantVerdict:
    """Return the verdict on a ClaimingMessages that was folded.

    Args:
        transition: What the record did.
        head: First offset that is not granted, as of that record.
    """
    detail = transition.detail
    granted = None
    if transition.outcome == ACCEPTED and detail is not None:
        granted = OffsetRange.through(detail["first"], detail["last"])
    return GrantVerdict(
        outcome=transition.outcome,
        reason=transition.reason,
        granted=granted,
        head=head,
        offset=transition.offset,
    )


@attrs.frozen
class SentRequest:
    """A request that has no verdict yet.

    Attributes:
        seq: Its sequence number.
        offsets: Requested offsets.
        sent_ms: Local time of sending.
    """

    seq: int
    offsets: OffsetRange
    sent_ms: int = 0


class AtMostOnce:
    """Requested and granted ranges, used in log order (PROTOCOL 6.2).

    The accepted ClaimingMessages *is* the commit: what was granted and not handed
    out is lost, never repeated.

    Attributes:
        grantee: The process that may use the grants.
        next_first: First offset that was not requested yet.
        done: Everything granted below this offset was handed out and processed.
        reporter: The process that ``done`` is about, None if that is the grantee.
        is_anchored: Whether the log is known to have a position of the key.
        round_trip_us: Average time from request to verdict; 0 before the first.
        unused_count: Number of offsets granted and not handed out.
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
        "reporter",
        "round_trip_us",
        "unused_count",
    )

    def __init__(self, start: int, *, grantee: bytes) -> None:
        self.next_first = self.done = self._handed = start
        self.grantee = grantee
        self.reporter: bytes | None = None
        self.is_anchored = False
        self.round_trip_us = self.unused_count = 0
        self._is_over = False
        self._requests: deque[SentRequest] = deque()
        self._grants: deque[OffsetRange] = deque()

    # --- state

    @property
    def outstanding_count(self) -> int:
        """Number of requests without a verdict."""
        return len(self._requests)

    @property
    def oldest_sent_ms(self) -> int | None:
        """Local time at which the oldest request without a verdict was sent."""
        return self._requests[0].sent_ms if self._requests else None

    @property
    def granted(self) -> OffsetRange | None:
        """The grant to hand out from now, None if there is none."""
        return self._grants[0] if self._grants and not self._is_over else None

    @property
    def granted_end(self) -> int:
        """The offset behind everything granted that may be handed out, 0 if none."""
        return self._grants[-1].end if self._grants and not self._is_over else 0

    @property
    def unused(self) -> tuple[OffsetRange, ...]:
        """Everything granted and not handed out: what a crash would lose."""
        return tuple(self._grants)

    @property
    def ahead_count(self) -> int:
        """Number of offsets granted and not handed out, or requested."""
        if not self._requests:
            return self.unused_count
        return self.unused_count + self.next_first - self._requests[0].offsets.first

    @property
    def resume_at(self) -> int:
        """First offset to fetch: granted, requested, or next to be requested."""
        if self._grants:
            return self._grants[0].first
        return self._requests[0].offsets.first if self._requests else self.next_first

    def may_request(self, depth: int) -> bool:
        """Return whether one more request may be sent now.

        While the log has no position of the key, a grant starts at the first offset of
        its own request. A request that overtook an earlier one would then skip the
        earlier one's range for ever, so only one may be in flight.
        """
        most = min(depth, REQUESTS_IN_FLIGHT_MAX) if self.is_anchored else 1
        return len(self._requests) < most

    # --- requesting

    def request(self, seq: int, last: int, *, sent_ms: int = 0) -> SentRequest:
        """Record a request for everything up to ``last``.

        Raises:
            InvalidTransition: It requests nothing new, or too many requests are in
                flight.
        """
        may = self.may_request(REQUESTS_IN_FLIGHT_MAX)
        if last < self.next_first or not may:
            raise InvalidTransition(f"cannot request offsets up to {last}")
        wanted = OffsetRange.through(self.next_first, last)
        request = SentRequest(seq=seq, offsets=wanted, sent_ms=sent_ms)
        self._requests.append(request)
        self.next_first = wanted.end
        return request

    def last_within(self, last: int, span: int) -> int:
        """Return ``last``, limited to what ``span`` allows the log to grant.

        A request also covers the requests in flight before it: if they are lost, it
        is granted their ranges, too (PROTOCOL 4.7).
        """
        first = self._requests[0].offsets.first if self._requests else self.next_first
        return last_within(last, first, span=span)

    def on_verdict(
        self,
        verdict: GrantVerdict,
        *,
        grantee: bytes,
        seq: int,
        now_ms: int | None = None,
    ) -> str | None:
        """Apply the fold's verdict on a request.

        Only a request of this grantee counts: another process may send under the same
        incarnation (PROTOCOL 6.2).

        Args:
            verdict: The verdict.
            grantee: Grantee of the request.
            seq: Its sequence number.
            now_ms: Local time, to measure the round trip.

        Returns:
            The reason of a refusal; None if the range is granted, or the request is
            that of another grantee.
        """
        if grantee != self.grantee:
            return None
        if verdict.granted is not None:
            if now_ms is not None:
                self._measure(seq, now_ms)
            self._take(verdict.granted, seq=seq)
            return None
        self._refused(seq, verdict.reason, verdict.head)
        return verdict.reason or "refused"

    def _measure(self, seq: int, now_ms: int) -> None:
        for request in self._requests:
            if request.seq == seq:
                # The clock counts whole milliseconds, and 0 would mean no sample.
                sample_us = max(1, (now_ms - request.sent_ms) * US_PER_MS)
                self.round_trip_us = averaged(self.round_trip_us, sample_us)

    def _take(self, grant: OffsetRange, *, seq: int | None = None) -> None:
        self.unused_count += grant.count
        _join(self._grants, grant)
        self.is_anchored = True
        # Requests that end within the grant have landed, or can get no grant any more.
        left = [r for r in self._requests if r.offsets.end > grant.end]
        # A sidecar cuts a request if ``span`` was lowered meanwhile. The next request
        # is granted the rest.
        self._requests = deque(r for r in left if r.seq != seq)
        if left and not self._requests:
            self.next_first = grant.end
        else:
            self.next_first = max(self.next_first, grant.end)

    def _refused(self, seq: int, reason: str | None, head: int | None) -> None:
        refused = next((r for r in self._requests if r.seq == seq), None)
        last = -1 if refused is None else refused.offsets.last
        if refusal_of(reason, last=last, head=head) is Refusal.TAKEN:
            self._requests = deque(r for r in self._requests if r.seq != seq)
            self.next_first = max(self.next_first, head or 0)
        elif refused is not None:
            # Its range must be requested again, and so must the later ranges, which
            # were requested on the assumption that it would be granted.
            self._requests.clear()
            self.next_first = refused.offsets.first if head is None else head

    def forget_requests(self) -> None:
        """Drop pending requests: a later one covers the same offsets.

        If one of them is still accepted, its grant counts.
        """
        if self._requests:
            self.next_first = self._requests[0].offsets.first
            self._requests.clear()

    # --- using

    def hand_out(self, offset: int) -> None:
        """Record that ``offset`` is handed out; everything before it is used.

        Raises:
            InvalidTransition: The offset was not granted to this process.
        """
        while self._grants and self._grants[0].last < offset:
            self._use_up(self._grants[0].last)
        granted = self.granted
        if granted is None or offset < granted.first:
            raise InvalidTransition(f"offset {offset} was not granted")
        self._use_up(offset)

    def put_back(self, first: int) -> None:
        """Undo the hand-out of everything from ``first`` on: nobody received it.

        ``hand_out`` may have been interrupted.

        Args:
            first: Offset of the first of these records.
        """
        end, rest = self._handed, self._grants
        if first >= end:
            return
        later = [OffsetRange(max(end, x.first), x.end) for x in rest if x.end > end]
        grants = deque([OffsetRange(first, end)])
        for each in later:
            _join(grants, each)
        self._grants = grants
        self.unused_count = sum(each.count for each in self._grants)
        self._handed = first

    def skip_through(self, offset: int) -> None:
        """Drop granted offsets up to ``offset``: no records exist there.

        They count as processed once everything before them is.
        """
        is_done = self.done == self._handed
        while self._grants and self._grants[0].first <= offset:
            self._use_up(min(offset, self._grants[0].last))
        if is_done:
            self.done = self._handed

    def _use_up(self, offset: int) -> None:
        # This order lets ``put_back`` undo the steps wherever a signal handler raises.
        grant, end = self._grants[0], offset + 1
        rest = OffsetRange(end, grant.end) if grant.end > end else None
        self._handed = end
        if rest is None:
            self._grants.popleft()
        else:
            self._grants[0] = rest
        self.unused_count -= end - grant.first

    def drop_grants(self) -> None:
        """Drop unused grants without a report: another process accounts for them."""
        self._grants.clear()
        self.unused_count = 0

    def mark_processed(self) -> None:
        """Record that everything handed out is processed."""
        self.done = self._handed

    def discard(self) -> tuple[OffsetRange, ...]:
        """Discard unused grants; return them on the first call, for the report.

        Nothing can be handed out afterwards.
        """
        lost = () if self._is_over else self.unused
        self._is_over = True
        self._requests.clear()
        return lost


def _join(grants: deque[OffsetRange], grant: OffsetRange) -> None:
    """Append a grant, or extend the last one if the grant adjoins it.

    In one step, because the consumer's thread also reads ``grants`` without the lock.
    """
    if grants and grants[-1].end == grant.first:
        grants[-1] = OffsetRange(grants[-1].first, grant.end)
    else:
        grants.append(grant)


def lead_for(round_trip_us: int, batch_us: int) -> int:
    """Return how many batches to request ahead so that no round trip causes a wait.

    Returns 0 if a round trip is short compared with the work of a batch, because a
    crash loses what was requested ahead.

    Args:
        round_trip_us: Time from request to verdict.
        batch_us: Time from one batch of the partition to the next, without waits; at
            least 1.
    """
    if round_trip_us * GAIN_MIN <= batch_us:
        return 0
    return -(-round_trip_us // batch_us)


def step_for(batch_us: int) -> int:
    """Return how many batches of a partition to request at once.

    Args:
        batch_us: Time from one batch of the partition to the next, without waits; at
            least 1.
    """
    return -(-WORK_PER_ROUND_US // batch_us)


def averaged(average: int, sample: int) -> int:
    """Return a running average with one more sample; 0 stands for no average yet."""
    if not average:
        return sample
    return max(1, average + (sample - average) // SAMPLES_PER_AVERAGE)


FASTER_AT_ONCE = 2
"""The average work of a batch is at most this multiple of the last sample."""


class GrantDepth:
    """How many batches of a partition to have at risk (PROTOCOL 6.3).

    The depth covers a round trip and the partition's part of 80 ms of work. It is 1 at
    first, and while a round trip is at most a twentieth of the time between batches. It
    rises at once, at most to twice its value, and falls by one after several samples in
    a row needed fewer, so that it does not follow single samples.

    Attributes:
        depth: Batches of each partition that are uncommitted, granted or requested.
        most: Upper bound of the depth.
        work_us: Average work of a batch of any partition; 0 before the first.
    """

    __slots__ = ("_fewer", "depth", "most", "work_us")

    def __init__(self, most: int) -> None:
        self.depth = 1
        self.most = most
        self.work_us = 0
        self._fewer = 0

    def on_sample(self, work_us: int, *, round_trip_us: int, partitions: int) -> None:
        """Record the work of a batch.

        Args:
            work_us: Time of a batch of any partition, without waits for grants.
            round_trip_us: Average time from request to verdict.
            partitions: Number of partitions with records, at least 1: their batches
                are handed out in turn.
        """
        if not round_trip_us:
            return
        # Bounded, so that after a long silence the average soon follows new work.
        longest_us = 2 * GAIN_MIN * round_trip_us
        found_us = max(1, min(work_us, longest_us))
        # Bounded again, so that one wait, as for a fetch, does not slow down the next.
        self.work_us = min(averaged(self.work_us, found_us), FASTER_AT_ONCE * found_us)
        batch_us = self.work_us * partitions
        lead = lead_for(round_trip_us, batch_us)
        self._move(min(self.most, lead + step_for(batch_us) if lead else 1))

    def _move(self, wanted: int) -> None:
        self._fewer = self._fewer + 1 if wanted < self.depth else 0
        if wanted > self.depth:
            self.depth = min(wanted, 2 * self.depth)
        elif self._fewer >= FEWER_IN_A_ROW:
            self.depth -= 1
            self._fewer = 0
