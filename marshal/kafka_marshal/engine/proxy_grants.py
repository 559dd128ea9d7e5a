"""Requests grants on behalf of other processes (PROTOCOL 6.2).

A Spark task, for example, requests offsets under the claim of its driver, which may run
on another host. Its sequence numbers are random, so that they differ from the owner's,
and a verdict belongs to the request with the same grantee and number.
"""

from collections.abc import Callable
from functools import partial

import attrs

from kafka_marshal.errors import CoordinationError, LogUnwritable, MarshalError
from kafka_marshal.ports import Append, Entropy
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.granting import GrantRequest, GrantVerdict, verdict_of
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.state import Transition
from kafka_marshal.protocol.types import Key, OffsetRange

from .context import Context

OnGranted = Callable[[OffsetRange], None]
OnVerdict = Callable[[GrantVerdict], None]

PENDING_MAX = 10_000
GRANTEE_BYTES = 16
# An owner counts from 1, so that its own numbers never reach these.
SEQ_FIRST = 2**62


def draw_grantee(entropy: Entropy) -> bytes:
    """Return a grantee that no other process has."""
    return entropy.random_bytes(GRANTEE_BYTES)


def draw_seq(entropy: Entropy) -> int:
    """Return a sequence number for a request under another process's claim."""
    number = int.from_bytes(entropy.random_bytes(8), "big")
    return SEQ_FIRST + number % SEQ_FIRST


@attrs.define(eq=False, kw_only=True)
class PendingGrant:
    """One request in flight.

    Attributes:
        request: The request.
        sent_ms: Local time of sending.
        append: Result of the append, which shows whether the log accepts records of
            this process; None if nothing was appended.
        on_granted: Called with the granted range.
        on_late: Called instead with a range that is granted after ``give_up``; None
            reports it as lost.
        verdict: The fold's verdict, None before.
        waiting_count: Number of callers that wait for it; maintained by them.
        on_verdict: Functions to call once with the verdict. They run under the lock, in
            the round of the engine, and must not block.
    """

    request: GrantRequest
    sent_ms: int
    append: Append | None
    on_granted: OnGranted | None = None
    on_late: OnGranted | None = None
    verdict: GrantVerdict | None = None
    waiting_count: int = 0
    on_verdict: list[OnVerdict] = attrs.field(factory=list)

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


class ProxyGrants:
    """Requests of one engine on behalf of other processes. Called under its lock."""

    __slots__ = ("_context", "_pending")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pending: dict[tuple[bytes, int], PendingGrant] = {}

    def send(
        self, request: GrantRequest, *, on_granted: OnGranted | None = None
    ) -> PendingGrant:
        """Append a request; ``on_record`` handles the fold's verdict.

        The request is cut to the Config's ``span``, so less may be granted than wanted.

        Args:
            request: The request.
            on_granted: Called with the granted range, until ``give_up``.

        Raises:
            CoordinationError: Too many requests are without a verdict.
        """
        self._forget_old()
        if len(self._pending) >= PENDING_MAX:
            raise CoordinationError(
                f"{PENDING_MAX} requests for offsets await the log's verdict; check "
                "the brokers with: marshal doctor, and try again"
            )
        seq = draw_seq(self._context.ports.entropy)
        span = self._context.settled.limit("span")
        cut = request.within(span, head=self._head(request.key))
        partition = self._context.partition_of(request.key)
        sent_ms = self._context.now_ms
        value = encode(cut.to_record(seq))
        pending = PendingGrant(
            request=request,
            sent_ms=sent_ms,
            append=self._context.ports.log.append(partition, value),
            on_granted=on_granted,
        )
        self._pending[request.grantee, seq] = pending
        return pending

    def give_up(self, pending: PendingGrant) -> None:
        """Stop waiting for a verdict; see ``PendingGrant.on_late``."""
        report = partial(self.report_lost, pending.request.key)
        pending.on_granted = pending.on_late or report

    def on_record(self, record: ClaimingMessages, transition: Transition) -> None:
        """Match a folded record of any process to a pending request by its grantee."""
        pending = self._pending.pop((record.grantee, record.seq), None)
        if pending is None:
            return
        verdict = verdict_of(transition, head=self._head(pending.request.key))
        pending.verdict = verdict
        if verdict.granted is not None and pending.on_granted is not None:
            pending.on_granted(verdict.granted)
        calls, pending.on_verdict = pending.on_verdict, []
        for call in calls:
            call(verdict)

    def _head(self, key: Key) -> int | None:
        """Return the next offset of a key that is not granted, None if unknown."""
        known = self._context.replica_of(key).world.keys.get(key)
        return None if known is None else known.next_unclaimed()

    def report_lost(self, key: Key, lost: OffsetRange) -> None:
        """Report granted offsets that nobody will process."""
        fields = {"key": key, "ranges": [(lost.first, lost.last)]}
        self._context.observe("grant_lost", fields)

    def _forget_old(self) -> None:
        """Forget requests older than two heartbeat intervals.

        Sending was given up after half an interval.
        """
        before_ms = self._context.now_ms - 2 * self._context.heartbeat_interval_ms
        for name, pending in list(self._pending.items()):
            if pending.sent_ms >= before_ms:
                break
            del self._pending[name]
