"""Requests offsets at most once for other processes, and applies the verdicts.

PROTOCOL 6.2: the process that will process the offsets sends its own ClaimingMessages
under the owner's claim, and finds its record by the grantee. A sidecar does so for its
clients, and for tasks that work under a claim of another host.
"""

from collections.abc import Callable
from functools import partial

import attrs

from kafka_marshal.errors import CoordinationError, LogUnwritable, MarshalError
from kafka_marshal.ports import Append
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.granting import last_within
from kafka_marshal.protocol.losses import mark_to_tags
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.state import ACCEPTED, Transition
from kafka_marshal.protocol.types import Key, Owner

from .context import Context

OnGranted = Callable[[int, int], None]

TICKETS_MAX = 10_000
# The owner counts from 1, so that its own numbers never come up here.
SEQ_FIRST = 2**62


@attrs.frozen
class RangeRequest:
    """The range of offsets that a request asks for.

    Attributes:
        key: The key.
        owner: Its owner.
        epoch: Epoch of the claim.
        grantee: Id of the process that will process the granted offsets.
        first: First offset wanted.
        last: Last offset wanted.
        mark: All granted offsets below are processed, for the tags; None if unknown.
    """

    key: Key
    owner: Owner
    epoch: int
    grantee: bytes
    first: int
    last: int
    mark: int | None = None


@attrs.frozen
class Verdict:
    """The fold's verdict on a request.

    Attributes:
        outcome: ``accepted``, ``refused`` or ``ignored``.
        reason: Why it was not accepted.
        granted: First and last offset granted, None if none is.
        head: Next offset that is not granted, as of the request.
        offset: Log offset of the request; None if none was appended, because the
            claim had ended before.
    """

    outcome: str
    reason: str | None
    granted: tuple[int, int] | None
    head: int | None
    offset: int | None


@attrs.define(eq=False)
class Ticket:
    """One request in flight.

    Attributes:
        wish: The range that it asks for.
        sent_ms: Local time of sending.
        append: Result of the append, which shows whether the log accepts records of
            this process; None if none was appended.
        on_granted: Called with the granted range.
        verdict: The fold's verdict, None before.
        waiting_count: Number of callers that wait for it; maintained by them.
    """

    wish: RangeRequest
    sent_ms: int
    append: Append | None
    on_granted: OnGranted | None = None
    verdict: Verdict | None = None
    waiting_count: int = 0

    def raise_refusal(self) -> None:
        """Raise the error of the append if the cluster refuses records of this process.

        Raises:
            LogUnwritable: There will never be a verdict.
        """
        if isinstance(self.error, LogUnwritable):
            raise self.error

    @property
    def error(self) -> MarshalError | None:
        """Why the log did not take the request, as far as is known (PROTOCOL 1.4)."""
        return None if self.append is None else self.append.error()


class GrantRequests:
    """The requests of one engine. Called under its lock."""

    __slots__ = ("_context", "_open")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._open: dict[tuple[bytes, int], Ticket] = {}

    @property
    def open_count(self) -> int:
        """Number of requests without a verdict."""
        return len(self._open)

    def ask(self, wish: RangeRequest, *, on_granted: OnGranted | None = None) -> Ticket:
        """Append a request; ``on_record`` handles the fold's verdict.

        The request is cut to the Config's ``span``, so less may be granted than wanted.

        Args:
            wish: The range to ask for.
            on_granted: Called with the granted range, until ``give_up``.

        Raises:
            CoordinationError: Too many requests are without a verdict.
        """
        self._forget_old()
        if len(self._open) >= TICKETS_MAX:
            raise CoordinationError(
                f"{TICKETS_MAX} requests for offsets await the log's verdict; check "
                "that the brokers answer, and ask again"
            )
        entropy = self._context.ports.entropy
        number = int.from_bytes(entropy.random_bytes(8), "big")
        seq = SEQ_FIRST + number % SEQ_FIRST
        key, owner = wish.key, wish.owner
        head = self._head(key)
        first = wish.first if head is None else head
        span = self._context.settled.limit("span")
        record = ClaimingMessages(
            client_id=owner.client_id,
            group_id=key.group_id,
            incarnation=owner.incarnation,
            seq=seq,
            topic=key.topic,
            partition=key.partition,
            epoch=wish.epoch,
            grantee=wish.grantee,
            first=wish.first,
            proposed_last_offset=last_within(wish.last, first, span=span),
            tags=mark_to_tags(wish.mark),
        )
        partition = self._context.partition_of(key)
        sent_ms = self._context.now_ms
        append = self._context.ports.log.append(partition, encode(record))
        ticket = Ticket(wish, sent_ms, append, on_granted)
        self._open[wish.grantee, seq] = ticket
        return ticket

    def give_up(self, ticket: Ticket) -> None:
        """Stop waiting for a verdict; a late grant is reported as lost."""
        ticket.on_granted = partial(self._report, ticket.wish.key)

    def on_record(self, record: ClaimingMessages, transition: Transition) -> None:
        """Match a folded record of any process to a pending request by its grantee."""
        ticket = self._open.pop((record.grantee, record.seq), None)
        if ticket is None:
            return
        head = self._head(ticket.wish.key)
        detail = transition.detail
        granted = None
        if transition.outcome == ACCEPTED and detail is not None:
            granted = (detail["first"], detail["last"])
        ticket.verdict = Verdict(
            transition.outcome, transition.reason, granted, head, transition.offset
        )
        if granted is not None and ticket.on_granted is not None:
            ticket.on_granted(*granted)

    def _head(self, key: Key) -> int | None:
        """Return the next offset of a key that is not granted, None if unknown."""
        known = self._context.replica_of(key).world.keys.get(key)
        return None if known is None else known.next_unclaimed()

    def _report(self, key: Key, first: int, last: int) -> None:
        fields = {"key": key, "ranges": [(first, last)]}
        self._context.observe("grant_lost", fields)

    def _forget_old(self) -> None:
        """Forget requests older than two heartbeat intervals.

        Sending was given up after half an interval.
        """
        before_ms = self._context.now_ms - 2 * self._context.heartbeat_interval_ms
        for name, ticket in list(self._open.items()):
            if ticket.sent_ms >= before_ms:
                break
            del self._open[name]
