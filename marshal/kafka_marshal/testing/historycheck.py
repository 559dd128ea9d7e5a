"""Judges what workers say that they did: a pure function over their operations.

The same for simulated fleets and for real clusters: whoever runs workers has them
note each operation when it begins (``invoke``) and when it ends (``ok``), and puts
the notes of all in the order of one clock, the claims, beats and grants in the
order of the log. What has no end is ``unknown``: it may have happened, or may yet.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import attrs
import msgspec

from kafka_marshal.engine import Delivery
from kafka_marshal.protocol.types import Key, Token

CLAIM, BEAT, GRANT = "claim", "beat", "grant"
HAND_OUT, PROCESS = "hand_out", "process"
KINDS = frozenset({CLAIM, BEAT, GRANT, HAND_OUT, PROCESS})
OK, INVOKE, UNKNOWN, FAIL = "ok", "invoke", "unknown", "fail"
OUTCOMES = frozenset({OK, INVOKE, UNKNOWN, FAIL})
NAMED_MAX = 10


class Operation(msgspec.Struct, frozen=True):
    """One thing that one process did to one key, or tried to.

    Attributes:
        kind: ``claim``, ``beat``, ``grant``, ``hand_out`` or ``process``.
        outcome: ``ok``; ``invoke``, begun, and more may follow; ``unknown``, it
            never became known; ``fail``, it did not happen.
        process: Who; no two processes have the same name.
        key: What it is about.
        token: Token of the claim that it was done under.
        at_ms: When, for people; the order of the history is what counts.
        first: First offset; of a claim or a beat, the position after it.
        last: Last offset, both ends inclusive.
    """

    kind: str
    outcome: str
    process: str
    key: Key
    token: Token | None
    at_ms: int
    first: int | None = None
    last: int | None = None

    @property
    def offsets(self) -> range:
        """Every offset that it is about."""
        if self.first is None:
            return range(0)
        return range(self.first, (self.first if self.last is None else self.last) + 1)


class Finding(NamedTuple):
    """Something that must not be.

    Attributes:
        invariant: What it breaks, such as ``S3``.
        message: Key, offsets and tokens.
    """

    invariant: str
    message: str


@attrs.frozen
class Verdict:
    """What a history comes to.

    Attributes:
        findings: Everything that must not be, in order.
        handed: Records handed out.
        processed: Records processed, each counted once.
        duplicates: Records handed out again.
        takeovers: Claims after the first of each key.
        duplicates_max: Most records handed out again under one claim.
    """

    findings: tuple[Finding, ...]
    handed: int
    processed: int
    duplicates: int
    takeovers: int
    duplicates_max: int


@attrs.define
class _KeyHistory:
    """What is known of one key so far."""

    tokens: list[Token] = attrs.field(factory=list)
    position: int | None = None
    starts: dict[Token, int | None] = attrs.field(factory=dict)
    handing: Token | None = None
    last: dict[Token, int] = attrs.field(factory=dict)
    handed: set[int] = attrs.field(factory=set)
    lent: set[tuple[str, Token | None, int]] = attrs.field(factory=set)
    granted: dict[int, tuple[str, Token | None]] = attrs.field(factory=dict)
    processed: set[int] = attrs.field(factory=set)
    again: dict[Token | None, int] = attrs.field(factory=lambda: defaultdict(int))
    count: int = 0


class _Judge:
    def __init__(self, *, is_at_most_once: bool) -> None:
        self.findings: list[Finding] = []
        self.keys: dict[Key, _KeyHistory] = defaultdict(_KeyHistory)
        self._is_amo = is_at_most_once

    def find(self, invariant: str, key: Key, text: str) -> None:
        self.findings.append(
            Finding(invariant, f"{key.group_id}/{key.topic}-{key.partition}: {text}")
        )

    def take(self, operation: Operation) -> None:
        known = self.keys[operation.key]
        if operation.kind == CLAIM:
            self._claim(known, operation)
        elif operation.kind == BEAT:
            self._beat(known, operation)
        elif operation.kind == GRANT:
            self._grant(known, operation)
        elif operation.kind == HAND_OUT:
            self._hand_out(known, operation)
        else:
            self._process(known, operation)

    def _claim(self, known: _KeyHistory, operation: Operation) -> None:
        token = operation.token
        if operation.outcome != OK or token is None:
            return
        if known.tokens and token <= known.tokens[-1]:
            self.find("S7", operation.key, f"token {token} after {known.tokens[-1]}")
        known.tokens.append(token)
        known.starts[token] = known.position

    def _beat(self, known: _KeyHistory, operation: Operation) -> None:
        position = operation.first
        if operation.outcome != OK or position is None:
            return
        if not self._is_amo:
            # Every offset below it must be done with, by whomever.
            skipped = set(range(known.position or 0, position)) - known.processed
            if skipped:
                told = sorted(skipped)[:NAMED_MAX]
                self.find("6.1", operation.key, f"position {position} skips {told}")
        known.position = max(known.position or 0, position)

    def _grant(self, known: _KeyHistory, operation: Operation) -> None:
        if operation.outcome != OK:
            return
        for offset in operation.offsets:
            if offset in known.granted:
                self.find("S3", operation.key, f"{offset} granted twice")
            known.granted[offset] = (operation.process, operation.token)

    def _hand_out(self, known: _KeyHistory, operation: Operation) -> None:
        key, token = operation.key, operation.token
        if operation.outcome == FAIL or token is None:
            return
        if known.handing is not None and token < known.handing:
            self.find("S4", key, f"handed out under {token} after {known.handing}")
        known.handing = token if known.handing is None else max(known.handing, token)
        if token not in known.starts:
            self.find("S4", key, f"handed out under {token}, which nobody won")
        start = known.starts.get(token)
        for offset in operation.offsets:
            known.count += 1
            if offset <= known.last.get(token, -1):
                self.find("S3", key, f"{offset} handed out twice under {token}")
            known.last[token] = offset
            if start is not None and offset < start:
                self.find("6.1", key, f"{offset} handed out below {start}")
            if offset in known.handed:
                known.again[token] += 1
                if self._is_amo:
                    self.find("S3", key, f"{offset} handed out twice")
            known.handed.add(offset)
            known.lent.add((operation.process, token, offset))
            if self._is_amo and known.granted.get(offset) != (operation.process, token):
                self.find("6.2", key, f"{offset} handed out without its grant")

    def _process(self, known: _KeyHistory, operation: Operation) -> None:
        if operation.outcome == FAIL:
            return
        for offset in operation.offsets:
            if (operation.process, operation.token, offset) not in known.lent:
                self.find("6.2", operation.key, f"{offset} processed, not handed out")
            if operation.outcome == OK:
                if self._is_amo and offset in known.processed:
                    self.find("S3", operation.key, f"{offset} processed twice")
                known.processed.add(offset)


def check(
    history: Iterable[Operation],
    *,
    delivery: Delivery,
    ends: Mapping[Key, tuple[int, int]] | None = None,
) -> Verdict:
    """Judge a history: S3, S4, S7, completeness and the bound on duplicates.

    At least once, what is repeated lies at or beyond the last position that the log
    had accepted before the claim that repeats it (PROTOCOL 6.1), so one takeover
    repeats no more than was handled since then.

    Args:
        history: All operations, in order.
        delivery: The guarantee that was asked for.
        ends: First and next offset of every key that all work is done of; at least
            once, each record between them must have been processed.
    """
    is_amo = delivery is Delivery.AT_MOST_ONCE
    judge = _Judge(is_at_most_once=is_amo)
    for operation in history:
        assert operation.kind in KINDS, operation.kind
        assert operation.outcome in OUTCOMES, operation.outcome
        judge.take(operation)
    for key, (start, end) in ({} if is_amo or ends is None else ends).items():
        missed = set(range(start, end)) - judge.keys[key].processed
        if missed:
            told = sorted(missed)[:NAMED_MAX]
            judge.find("6.1", key, f"{len(missed)} records never processed: {told}")
    keys = judge.keys.values()
    again = [count for known in keys for count in known.again.values()]
    return Verdict(
        tuple(judge.findings),
        sum(known.count for known in keys),
        sum(len(known.processed) for known in keys),
        sum(again),
        sum(max(0, len(known.tokens) - 1) for known in keys),
        max(again, default=0),
    )
