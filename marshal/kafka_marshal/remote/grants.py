"""Requests offsets at most once through the sidecar (PROTOCOL 6.2, 6.3).

A request without an answer may have been granted, so it is sent again with the same
number, and the sidecar returns the original answer. If that fails for too long, or the
sidecar was restarted meanwhile, the grant is lost: nobody processes its offsets. They
are reported as soon as a later answer shows the loss.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import attrs

from kafka_marshal.engine import Holding
from kafka_marshal.engine.grants import GrantRequester
from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    MarshalError,
)
from kafka_marshal.protocol.granting import (
    AtMostOnce,
    GrantRequest,
    GrantVerdict,
    Refusal,
    refusal_of,
)
from kafka_marshal.protocol.state import ACCEPTED
from kafka_marshal.protocol.types import Key, OffsetRange, Owner, Token
from kafka_marshal.remote import api
from kafka_marshal.remote.context import RemoteContext
from kafka_marshal.remote.transport import NotRunning

VERDICT_MS_MAX = 10_000

Send = Callable[[api.GrantRequest], api.GrantResponse]
Run = Callable[[Callable[[], None]], bool]
Under = Callable[[Callable[[], None]], None]


@attrs.frozen
class _Gap:
    """Offsets that the log has granted, but that no answer so far contains.

    Attributes:
        offsets: The offsets.
        after: Number of the last request that may have been granted them.
    """

    offsets: OffsetRange
    after: int


@attrs.define(eq=False, kw_only=True)
class GrantAccount:
    """The grants under one claim, as far as this process knows. Under the lock.

    Only this process requests offsets under the claim. So all offsets that the log
    grants under it were granted to this process.

    Attributes:
        epoch: Epoch of the claim.
        set_by: The last operation that set the position before it, None if unknown.
        end: Every offset below was granted before the claim, was granted to a request
            with an answer, is in ``gaps``, or was reported.
        asked_end: End of the requests that were given up without an answer, and that
            no later grant covers.
        gaps: Offsets that may only have been granted to requests in flight.
        next_position: Position at which the next claim of the key began, if no other
            process had the key in between; None if that is not known.
    """

    epoch: int
    set_by: str | None
    end: int
    asked_end: int = 0
    gaps: list[_Gap] = attrs.field(factory=list)
    next_position: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether a request was given up that may have been granted."""
        return self.asked_end > self.end

    def on_verdict(self, verdict: GrantVerdict, *, after: int) -> None:
        """Record an answer.

        Args:
            verdict: The answer.
            after: Number of the last request in flight, or of the answered request.
        """
        granted = verdict.granted
        if granted is None and refusal_of(verdict.reason) not in {
            Refusal.TAKEN,
            Refusal.LATER,
        }:
            return  # the claim is over: later offsets may be granted to others
        limit = verdict.head if granted is None else granted.first
        if limit is not None and limit > self.end:
            self.gaps.append(_Gap(OffsetRange(self.end, limit), after))
            self.end = limit
        if granted is not None:
            self.gaps = [
                _Gap(rest, gap.after)
                for gap in self.gaps
                for rest in _without(gap.offsets, granted)
            ]
            self.end = max(self.end, granted.end)
            self.asked_end = 0

    def on_no_answer(self, asked: OffsetRange) -> None:
        """Record that a request was given up."""
        self.asked_end = max(self.asked_end, asked.end)

    def on_next_claim(
        self, position: int, *, follows: int | None, set_by: str | None
    ) -> None:
        """Record the next claim of the key in this process.

        Args:
            position: Position at which it begins.
            follows: Epoch of the claim before it, by the log.
            set_by: The last operation that set the position before it.
        """
        is_same = set_by is not None and set_by == self.set_by
        if follows == self.epoch and is_same:
            self.next_position = position

    def take_lost(self, *, through: int, is_last: bool) -> list[OffsetRange]:
        """Return the offsets that are lost, each of them once.

        Args:
            through: Requests up to this number are answered or given up.
            is_last: Whether no request is in flight.
        """
        lost = [gap.offsets for gap in self.gaps if gap.after <= through]
        self.gaps = [gap for gap in self.gaps if gap.after > through]
        position = self.next_position
        if is_last and position is not None:
            end = min(position, self.asked_end)
            if end > self.end:
                lost.append(OffsetRange(self.end, end))
            self.asked_end = 0
        return lost


def _without(offsets: OffsetRange, granted: OffsetRange) -> list[OffsetRange]:
    """Return the parts of a range that a grant does not contain."""
    parts = [
        OffsetRange(offsets.first, min(offsets.end, granted.first)),
        OffsetRange(max(offsets.first, granted.end), offsets.end),
    ]
    return [each for each in parts if each.end > each.first]


def encode_request(
    request: GrantRequest, *, secret: bytes, number: int, timeout_ms: int
) -> api.GrantRequest:
    """Return the message to the sidecar.

    Args:
        request: The request.
        secret: Secret of the claim.
        number: Number of the request among those of its grantee.
        timeout_ms: How long the sidecar waits for the verdict.
    """
    return api.GrantRequest(
        client_id=request.owner.client_id,
        incarnation=request.owner.incarnation.hex(),
        topic=request.key.topic,
        partition=request.key.partition,
        epoch=request.epoch,
        grantee=request.grantee.hex(),
        secret=secret.hex(),
        first=request.first,
        last=request.last,
        timeout_ms=timeout_ms,
        done=request.mark,
        request=number,
        token=None if request.token is None else str(request.token),
    )


def decode_request(group_id: str, message: api.GrantRequest) -> GrantRequest:
    """Return the request of a client of the sidecar.

    Raises:
        ValueError: A number of its token is out of range.
    """
    return GrantRequest(
        key=Key(group_id, message.topic, message.partition),
        owner=Owner(message.client_id, bytes.fromhex(message.incarnation)),
        epoch=message.epoch,
        grantee=bytes.fromhex(message.grantee),
        first=message.first,
        last=message.last,
        mark=message.done,
        token=None if message.token is None else Token.parse(message.token),
    )


def encode_verdict(verdict: GrantVerdict) -> api.GrantResponse:
    """Return the response of the sidecar."""
    granted = verdict.granted
    return api.GrantResponse(
        outcome=verdict.outcome,
        reason=verdict.reason,
        first=None if granted is None else granted.first,
        last=None if granted is None else granted.last,
        head=verdict.head,
        offset=verdict.offset,
    )


def decode_verdict(response: api.GrantResponse) -> GrantVerdict:
    """Return the verdict in a response of the sidecar."""
    first, last = response.first, response.last
    is_granted = response.outcome == ACCEPTED
    granted = None
    if is_granted and first is not None and last is not None:
        granted = OffsetRange.through(first, last)
    return GrantVerdict(
        outcome=response.outcome,
        reason=response.reason,
        granted=granted,
        head=response.head,
        offset=response.offset,
    )


@attrs.define(eq=False, kw_only=True)
class _Sent:
    """A request whose answer is not yet applied."""

    holding: Holding
    request: GrantRequest
    seq: int
    sent_ms: int
    account: GrantAccount
    answer: GrantVerdict | MarshalError | None = None


def _is_granted(sent: _Sent) -> bool:
    return isinstance(sent.answer, GrantVerdict) and sent.answer.granted is not None


def _is_awaited(waiting: Iterable[_Sent]) -> bool:
    """Return whether a later request of the first one's holding has no answer."""
    first, *others = waiting
    return any(s.answer is None and s.holding is first.holding for s in others)


class SidecarGrantRequester(GrantRequester):
    """Sends one client's requests. Called under the lock.

    Args:
        context: State shared by the client's parts.
        send: Sends a request to the sidecar, and waits for the verdict.
        run: Queues a call for another thread; returns whether there was room.
        under: Makes a call under the lock, and notifies the waiting threads.
        on_end: Called with a holding whose claim a verdict has ended.
        rest: Waits briefly, after a request without an answer.
    """

    def __init__(
        self,
        context: RemoteContext,
        *,
        send: Send,
        run: Run,
        under: Under,
        on_end: Callable[[Holding], None],
        rest: Callable[[], object],
    ) -> None:
        super().__init__(context, context.holdings, on_end=on_end)
        self._remote = context
        self._send_message = send
        self._run = run
        self._under = under
        self._rest = rest
        self._seq = 0
        self._sent: dict[Key, deque[_Sent]] = {}
        # Accounts of the last claim of each key.
        self._accounts: dict[Key, GrantAccount] = {}

    @property
    def _span(self) -> int:
        return self._remote.span

    @property
    def _verdict_ms_max(self) -> int:
        return max(VERDICT_MS_MAX, self._remote.heartbeat_interval_ms)

    def update_anchor(self, holding: Holding) -> None:
        """Do nothing: the ``assigned`` event states whether the log has a position."""

    def on_begin(
        self, holding: Holding, *, epoch: int, position: int, follows: int | None
    ) -> None:
        """Begin to account for the grants under a claim.

        Args:
            holding: Its holding.
            epoch: Epoch of the claim.
            position: Position at which it begins.
            follows: Epoch of the key's claim before it, by the log; None if unknown.
        """
        key, set_by = holding.key, holding.set_by
        before = self._accounts.get(key)
        account = GrantAccount(epoch=epoch, set_by=set_by, end=position)
        self._accounts[key] = account
        if before is not None:
            before.on_next_claim(position, follows=follows, set_by=set_by)
            self._report_lost(key, before)

    def report_unused(self, holding: Holding) -> None:
        """Report granted offsets that will never be processed (PROTOCOL 6.2)."""
        super().report_unused(holding)
        key = holding.key
        account = self._accounts.get(key)
        if account is not None and key not in self._sent and not account.is_open:
            del self._accounts[key]

    def _report_lost(
        self, key: Key, account: GrantAccount, *, through: int = 0
    ) -> None:
        """Report offsets that were granted to requests whose answers are lost."""
        waiting = self._sent.get(key, ())
        is_last = not any(each.account is account for each in waiting)
        self._report(key, account.take_lost(through=through, is_last=is_last))

    def _send(self, holding: Holding, request: GrantRequest) -> tuple[int, int] | None:
        self._seq += 1
        sent = _Sent(
            holding=holding,
            request=request,
            seq=self._seq,
            sent_ms=self._remote.now_ms,
            account=self._accounts[holding.key],
        )
        if not self._run(partial(self._fetch, sent)):
            return None
        self._sent.setdefault(holding.key, deque()).append(sent)
        return sent.seq, sent.sent_ms

    def _fetch(self, sent: "_Sent") -> None:
        """Send a request and apply the verdict. Runs on a worker thread."""
        half_ms = self._context.heartbeat_interval_ms // 2
        message = encode_request(
            sent.request,
            secret=sent.holding.claim.secret,
            number=sent.seq,
            timeout_ms=min(half_ms, VERDICT_MS_MAX),
        )
        answer: GrantVerdict | MarshalError
        try:
            answer = decode_verdict(self._send_message(message))
        except MarshalError as error:
            answer = error
            asked = [(sent.request.first, sent.request.last)]
            fields = {"key": sent.holding.key, "error": error, "ranges": asked}
            self._context.observe("grant_unanswered", fields)
            self._rest()
        self._under(partial(self._on_outcome, sent, answer))

    def _on_outcome(self, sent: "_Sent", answer: GrantVerdict | MarshalError) -> None:
        """Apply an answer; without an answer, send again until the verdict is overdue.

        If no sidecar runs, the request is not repeated: the next process of the sidecar
        does not know it, and a stop must not wait for that process.
        """
        held = self._holdings.get(sent.holding.key)
        may_repeat = (
            isinstance(answer, CoordinationError | DeadlineExceeded)
            and not isinstance(answer, NotRunning)
            and held is sent.holding
            and self._context.now_ms - sent.sent_ms <= self._verdict_ms_max
        )
        if not (may_repeat and self._run(partial(self._fetch, sent))):
            self._on_answer(sent, answer)

    def _on_answer(self, sent: "_Sent", answer: GrantVerdict | MarshalError) -> None:
        """Apply the answers of a key in the order of the requests: ranges ascend.

        An answer without a grant makes the holding forget the later requests. One of
        these may have overtaken the refused request, and be granted. So the answer is
        applied only after theirs; otherwise the key could be given back before them.
        """
        sent.answer = answer
        key = sent.holding.key
        waiting = self._sent.get(key, deque())
        while waiting and waiting[0].answer is not None:
            if not _is_granted(waiting[0]) and _is_awaited(waiting):
                return
            first = waiting.popleft()
            if isinstance(first.answer, GrantVerdict):
                last = max(
                    (s.seq for s in waiting if s.account is first.account), default=0
                )
                first.account.on_verdict(first.answer, after=max(first.seq, last))
                self._on_verdict(first, first.answer)
            else:
                asked = OffsetRange.through(first.request.first, first.request.last)
                first.account.on_no_answer(asked)
                if isinstance(first.holding.progress, AtMostOnce):
                    first.holding.progress.forget_requests()
            self._report_lost(key, first.account, through=first.seq)
        if not waiting:
            self._sent.pop(key, None)

    def _on_verdict(self, sent: "_Sent", verdict: GrantVerdict) -> None:
        key, heads = sent.holding.key, self._remote.heads
        held = sent.holding if self._holdings.get(key) is sent.holding else None
        if held is not None and verdict.head is not None:
            heads[key] = max(heads.get(key, 0), verdict.head)
        grantee, seq = sent.request.grantee, sent.seq
        self._apply(key, verdict, grantee=grantee, seq=seq, holding=held)
