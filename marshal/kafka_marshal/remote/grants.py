"""Asks the sidecar for ranges of offsets at most once (PROTOCOL 6.2, 6.3).

A request without an answer may have been granted, so it is sent again with the same
number, and the sidecar returns the original answer. If that fails for too long, or the
sidecar was restarted meanwhile, the grant is lost: nobody processes it.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import attrs

from kafka_marshal.engine import Holding
from kafka_marshal.engine.grants import GrantRequester
from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    MarshalError,
)
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.state import ACCEPTED, Transition
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote.api import GrantRequest, GrantResponse
from kafka_marshal.remote.context import RemoteContext

VERDICT_MS_MAX = 10_000

Ask = Callable[[GrantRequest], GrantResponse]
Run = Callable[[Callable[[], None]], bool]
Under = Callable[[Callable[[], None]], None]


@attrs.define(eq=False, kw_only=True)
class _Asked:
    """A request whose answer is not yet applied."""

    holding: Holding
    record: ClaimingMessages
    done: int
    sent_ms: int
    answer: GrantResponse | MarshalError | None = None


class SidecarGrantRequester(GrantRequester):
    """Sends one client's requests. Called under the lock.

    Args:
        context: State shared by the client's parts.
        ask: Sends a request to the sidecar, and waits for the verdict.
        run: Queues a call for another thread; returns whether there was room.
        under: Makes a call under the lock, and notifies the waiting threads.
        on_end: Called with a holding whose claim a verdict has ended.
        rest: Waits briefly, after a request without an answer.
    """

    def __init__(
        self,
        context: RemoteContext,
        *,
        ask: Ask,
        run: Run,
        under: Under,
        on_end: Callable[[Holding], None],
        rest: Callable[[], object],
    ) -> None:
        super().__init__(context, context.holdings, on_end=on_end)
        self._remote = context
        self._ask_sidecar = ask
        self._run = run
        self._under = under
        self._rest = rest
        self._seq = 0
        self._asked: dict[Key, deque[_Asked]] = {}

    @property
    def _span(self) -> int:
        return self._remote.span

    @property
    def _verdict_ms_max(self) -> int:
        return max(VERDICT_MS_MAX, self._remote.heartbeat_interval_ms)

    def look(self, holding: Holding) -> None:
        """Do nothing: the ``assigned`` event states whether the log has a position."""

    def _send(self, holding: Holding, first: int, last: int) -> tuple[int, int] | None:
        progress, claim, key = holding.progress, holding.claim, holding.key
        assert isinstance(progress, AtMostOnce)
        assert claim.epoch is not None
        self._seq += 1
        owner = claim.claimant.owner
        record = ClaimingMessages(
            client_id=owner.client_id,
            group_id=key.group_id,
            incarnation=owner.incarnation,
            seq=self._seq,
            topic=key.topic,
            partition=key.partition,
            epoch=claim.epoch,
            grantee=progress.grantee,
            first=first,
            proposed_last_offset=last,
        )
        asked = _Asked(
            holding=holding,
            record=record,
            done=progress.done,
            sent_ms=self._remote.now_ms,
        )
        if not self._run(partial(self._fetch, asked)):
            return None
        self._asked.setdefault(key, deque()).append(asked)
        return self._seq, asked.sent_ms

    def _fetch(self, asked: "_Asked") -> None:
        """Send a request and apply the verdict. Runs on a worker thread."""
        half_ms = self._context.heartbeat_interval_ms // 2
        record = asked.record
        ask = GrantRequest(
            client_id=record.client_id,
            incarnation=record.incarnation.hex(),
            topic=record.topic,
            partition=record.partition,
            epoch=record.epoch,
            grantee=record.grantee.hex(),
            secret=asked.holding.claim.secret.hex(),
            first=record.first,
            last=record.proposed_last_offset,
            timeout_ms=min(half_ms, VERDICT_MS_MAX),
            done=asked.done,
            request=record.seq,
        )
        answer: GrantResponse | MarshalError
        try:
            answer = self._ask_sidecar(ask)
        except MarshalError as error:
            answer = error
            fields = {"key": asked.holding.key, "error": error}
            self._context.observe("grant_unanswered", fields)
            self._rest()
        self._under(partial(self._on_outcome, asked, answer))

    def _on_outcome(
        self, asked: "_Asked", answer: GrantResponse | MarshalError
    ) -> None:
        """Apply an answer; without one, send again until the verdict is overdue."""
        held = self._holdings.get(asked.holding.key)
        may_repeat = (
            isinstance(answer, CoordinationError | DeadlineExceeded)
            and held is asked.holding
            and self._context.now_ms - asked.sent_ms <= self._verdict_ms_max
        )
        if not (may_repeat and self._run(partial(self._fetch, asked))):
            self._on_answer(asked, answer)

    def _on_answer(self, asked: "_Asked", answer: GrantResponse | MarshalError) -> None:
        """Apply the answers of a key in the order of the requests: ranges ascend."""
        asked.answer = answer
        key = asked.holding.key
        waiting = self._asked.get(key, deque())
        while waiting and waiting[0].answer is not None:
            first = waiting.popleft()
            if isinstance(first.answer, GrantResponse):
                self._on_verdict(first.holding, first.record, granted=first.answer)
            elif isinstance(first.holding.progress, AtMostOnce):
                first.holding.progress.forget_requests()
        if not waiting:
            self._asked.pop(key, None)

    def _on_verdict(
        self, holding: Holding, record: ClaimingMessages, *, granted: GrantResponse
    ) -> None:
        key, heads = holding.key, self._remote.heads
        held = holding if self._holdings.get(key) is holding else None
        if held is not None and granted.head is not None:
            heads[key] = max(heads.get(key, 0), granted.head)
        transition = _transition(key, record, granted)
        head, offset = granted.head, granted.offset
        self._apply(key, transition, holding=held, head=head, offset=offset)


def _transition(
    key: Key, record: ClaimingMessages, granted: GrantResponse
) -> Transition:
    """Return a verdict in the form of a fold in this process."""
    is_granted = granted.outcome == ACCEPTED and granted.first is not None
    detail = None
    if is_granted and granted.first is not None and granted.last is not None:
        detail = {"first": granted.first, "last": granted.last}
    return Transition(
        offset=record.epoch if granted.offset is None else granted.offset,
        outcome=granted.outcome,
        effect="granted" if is_granted else None,
        reason=granted.reason,
        key=key,
        epoch=record.epoch,
        detail=detail,
        record=record,
    )
