"""The operation judge: judges workers by the operations that they noted.

It is the same for simulated fleets and for real clusters. Workers note each operation
when it begins (``invoke``) and when it ends (``ok``, ``fail``). The notes are in the
order of one clock; the ends of claims, beats and grants are in the order of the log.
An operation without an end is ``unknown``: it may have happened, or may still happen,
and a later end decides. Only records that were read back count (PROTOCOL 1.4).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import attrs
import msgspec

from kafka_marshal.config import Delivery
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.protocol.log_judge import Finding
from kafka_marshal.protocol.types import Key, Token

CLAIM, BEAT, GRANT = "claim", "beat", "grant"
HAND_OUT, PROCESS = "hand_out", "process"
PAUSE, UNPAUSE, RESET, SET = "pause", "unpause", "reset", "set"
SEEK, SOUGHT = "seek", "sought"
KINDS = frozenset(
    {CLAIM, BEAT, GRANT, HAND_OUT, PROCESS, PAUSE, UNPAUSE, RESET, SET, SEEK, SOUGHT}
)
OK, INVOKE, UNKNOWN, FAIL = "ok", "invoke", "unknown", "fail"
OUTCOMES = frozenset({OK, INVOKE, UNKNOWN, FAIL})
NAMED_MAX = 10
# Clocks drift by at most one part in DRIFT, and count whole milliseconds.
DRIFT, ROUNDING_MS = 1_000, 2


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of one process on one key, or the attempt.

    Attributes:
        kind: ``claim``, ``beat``, ``grant``, ``hand_out`` or ``process``; by admins,
            ``pause`` and ``unpause`` of the key's group, ``reset`` of the key to a
            position, from which on all may be granted and handed out again, and
            ``set`` of its position, after which claims are judged independently of
            earlier claims. An owner's ``seek`` sets the position of its key; once the
            owner has read ``sought``, no other record can set it.
        outcome: ``ok``; ``invoke``, begun, more may follow; ``unknown``, the outcome
            is not known; ``fail``, it did not happen.
        process: The process; no two processes have the same name.
        key: The key.
        token: Token of the claim under which the operation was done.
        at_ms: Time on the clock of the process. Differences within one process are
            judged; between processes, the order of the history counts.
        first: First offset; for a claim or a beat, the position after it, and for
            the invoke of a beat the position that it sends.
        last: Last offset, both ends inclusive.
        number: Identifies a record of a process, so that its end can be matched; None
            if records are not numbered.
        done: For a beat at most once: everything granted below is processed.
        renews: Whether a beat renewed the lease, as its process read back.
        topic_id: For a claim that was won, id of its topic; for a hand-out, id of the
            topic of its records, if known. Offsets of topics with different ids are
            unrelated.
    """

    kind: str
    outcome: str
    process: str
    key: Key
    token: Token | None
    at_ms: int
    first: int | None = None
    last: int | None = None
    number: int | None = None
    done: int | None = None
    renews: bool = False
    topic_id: bytes | None = None

    @property
    def offsets(self) -> range:
        """Every offset that the operation concerns."""
        if self.first is None:
            return range(0)
        return range(self.first, (self.first if self.last is None else self.last) + 1)


@attrs.frozen
class Verdict:
    """The result of judging a history.

    Attributes:
        findings: All broken rules, in order.
        handed: Number of records handed out.
        processed: Number of records processed, each counted once.
        duplicates: Number of records handed out again.
        takeovers: Number of claims after the first of each key.
        duplicates_max: Maximum number of records handed out again under one claim.
    """

    findings: tuple[Finding, ...]
    handed: int
    processed: int
    duplicates: int
    takeovers: int
    duplicates_max: int


@attrs.define(kw_only=True)
class TopicHistory:
    """The history so far of the offsets of one key, in one topic of its name."""

    begun: dict[int, tuple[str, Token | None]] = attrs.field(factory=dict)
    base: int = 0  # position set before any claim; nothing below it must be processed
    position: int | None = None
    handed: set[int] = attrs.field(factory=set)
    granted_again: set[tuple[str, Token | None, int]] = attrs.field(factory=set)
    granted: dict[int, tuple[str, Token | None]] = attrs.field(factory=dict)
    processed: set[int] = attrs.field(factory=set)
    back: set[int] = attrs.field(factory=set)
    again: dict[Token | None, int] = attrs.field(factory=lambda: defaultdict(int))
    count: int = 0
    sought: int | None = None  # target of the owner's seek that it has not read back
    furthest: int = 0  # target of that seek, or of one before that it overtook
    undone: set[int] = attrs.field(factory=set)  # processed before that seek
    ever: set[int] = attrs.field(factory=set)  # processed before any seek or reset


@attrs.define(kw_only=True)
class KeyHistory:
    """The history so far of one key."""

    tokens: list[Token] = attrs.field(factory=list)
    owner: str | None = None
    is_paused: bool = False
    sent: dict[tuple[str, str, int], int] = attrs.field(factory=dict)
    bases: dict[tuple[str, Token], int] = attrs.field(factory=dict)
    starts: dict[Token, int | None] = attrs.field(factory=dict)
    topic_ids: dict[Token, bytes | None] = attrs.field(factory=dict)
    rounds: dict[Token, int] = attrs.field(factory=dict)
    round: int = 0
    topics: dict[tuple[bytes | None, int], TopicHistory] = attrs.field(
        factory=lambda: defaultdict(TopicHistory)
    )
    handing: Token | None = None
    last: dict[tuple[str, Token], int] = attrs.field(factory=dict)

    def topic(self, token: Token | None = None) -> TopicHistory:
        """Return the history of a claim's topic.

        Without a token, and for a claim whose outcome is not known yet, this is the
        topic of the last claim: a new topic has no position, so nothing is judged by
        it. Each set position begins another history.
        """
        if token is None or token not in self.topic_ids:
            return self.topics[self.topic_id, self.round]
        return self.topics[self.topic_ids[token], self.rounds[token]]

    @property
    def topic_id(self) -> bytes | None:
        """Id of the topic of the last claim."""
        return self.topic_ids.get(self.tokens[-1]) if self.tokens else None

    def set_position(self, topic_id: bytes | None, position: int) -> None:
        """Begin another history, at a position."""
        self.round += 1
        history = self.topics[topic_id, self.round]
        history.position = history.base = position


class OperationJudge:
    """Judges operations one by one, in their order.

    Attributes:
        findings: All broken rules so far.
        keys: The history of each key.
    """

    def __init__(
        self, *, is_at_most_once: bool, h_ms: int | None = None, late_ms: int = 0
    ) -> None:
        """Begin without a history; see ``check`` for ``h_ms`` and ``late_ms``."""
        self.findings: list[Finding] = []
        self.keys: dict[Key, KeyHistory] = defaultdict(KeyHistory)
        self._is_amo = is_at_most_once
        noted_ms = ROUNDING_MS + late_ms
        self._lease_ms = None
        if h_ms is not None:
            soft_ms = Lease.since(0, h_ms).soft_until_ms
            self._lease_ms = soft_ms + soft_ms // DRIFT + noted_ms
        self._takes = {
            CLAIM: self._claim,
            BEAT: self._beat,
            GRANT: self._grant,
            HAND_OUT: self._hand_out,
            PROCESS: self._process,
            PAUSE: self._pause,
            UNPAUSE: self._pause,
            RESET: self._reset,
            SET: self._set,
            SEEK: self._seek,
            SOUGHT: self._sought,
        }

    def _find(self, invariant: str, key: Key, text: str) -> None:
        self.findings.append(
            Finding(invariant, f"{key.group_id}/{key.topic}-{key.partition}: {text}")
        )

    def take(self, operation: Operation) -> list[Finding]:
        """Judge the next operation; return the rules that it breaks."""
        before = len(self.findings)
        known = self.keys[operation.key]
        if operation.number is not None:
            self._match(known, operation)
        self._takes[operation.kind](known, operation)
        return self.findings[before:]

    def _match(self, known: KeyHistory, operation: Operation) -> None:
        """Match ends with begun operations; report an end without a begin."""
        number = operation.number or 0
        sent = (operation.kind, operation.process, number)
        if operation.outcome == INVOKE:
            known.sent.setdefault(sent, operation.at_ms)
        elif sent not in known.sent:
            text = f"{operation.kind} {number} of {operation.process} never begun"
            self._find("1.4", operation.key, text)

    def _renew(self, known: KeyHistory, operation: Operation) -> None:
        """Count the lease from the time at which its record was sent (PROTOCOL 5.2)."""
        sent_ms = known.sent.get(
            (operation.kind, operation.process, operation.number or 0)
        )
        if sent_ms is not None and operation.token is not None:
            lease = (operation.process, operation.token)
            known.bases[lease] = max(sent_ms, known.bases.get(lease, sent_ms))

    def _pause(self, known: KeyHistory, operation: Operation) -> None:
        if operation.outcome == OK:
            known.is_paused = operation.kind == PAUSE

    def _reset(self, known: KeyHistory, operation: Operation) -> None:
        """Apply a Reset: a position goes back, and grants above it are taken back."""
        known.owner = None
        for (topic_id, _), topic in known.topics.items():
            head = operation.first if topic_id == operation.topic_id else None
            topic.position = head
            topic.back.update(
                offset for offset in topic.granted if offset >= (head or 0)
            )
            if not self._is_amo:
                _bring_back(topic, head)

    def _set(self, known: KeyHistory, operation: Operation) -> None:
        """Apply a set position: S3 and 6.1 count from here on."""
        if operation.first is None:
            self._find("8.5", operation.key, "set without a position")
            return
        known.owner = None
        known.set_position(operation.topic_id, operation.first)

    def _seek(self, known: KeyHistory, operation: Operation) -> None:
        """Apply a seek: all from its position on must be processed again (6.6)."""
        key, token, to = operation.key, operation.token, operation.first
        if token is None or to is None or operation.outcome in {UNKNOWN, FAIL}:
            return
        if self._is_amo:
            self._find("6.6", key, f"sought to {to} at most once")
            return
        if known.tokens and known.owner is None and operation.outcome == INVOKE:
            return  # overtaken by a reset or a set position: the log ignores it
        if known.tokens and token != known.tokens[-1]:
            if operation.outcome == OK:
                self._find("S1", key, f"sought under {token}, which is over")
            return
        topic = known.topic(token)
        # The record of an earlier seek may land after the next one has begun.
        if operation.outcome == INVOKE or topic.sought is None:
            topic.furthest = max(to, 0 if topic.sought is None else topic.furthest)
            topic.sought = to
        if operation.outcome == INVOKE:
            return
        above = {offset for offset in topic.processed if offset >= to}
        topic.undone |= above
        topic.ever |= above
        topic.processed = set(range(to)) | (topic.processed - above)
        topic.position = known.starts[token] = to
        # All from there on must be processed, also offsets a set position left out.
        topic.base = min(topic.base, to)
        if operation.renews:
            self._renew(known, operation)

    def _sought(self, known: KeyHistory, operation: Operation) -> None:
        """Judge the end of a seek: the log must have the position sought."""
        token = operation.token
        if token is None or not known.tokens or token != known.tokens[-1]:
            return
        if known.owner is None:
            return  # overtaken by a set position or a reset that it has not read yet
        topic = known.topic(token)
        if topic.position != operation.first:
            text = f"sought to {operation.first}, and the log has {topic.position}"
            self._find("6.6", operation.key, text)
        topic.sought, topic.undone = None, set()
        for who in [who for who in known.last if who[1] == token]:
            del known.last[who]

    def _claim(self, known: KeyHistory, operation: Operation) -> None:
        token = operation.token
        if operation.outcome != OK or token is None:
            return
        if known.is_paused:
            self._find("8.1", operation.key, f"won under {token} in a pause")
        if known.tokens and token <= known.tokens[-1]:
            self._find("S7", operation.key, f"token {token} after {known.tokens[-1]}")
        known.tokens.append(token)
        known.owner = operation.process
        known.topic_ids[token] = operation.topic_id
        known.rounds[token] = known.round
        topic = known.topic(token)
        if operation.first is not None and topic.sought is not None:
            # A release had the position of a seek that its owner has not read back.
            _pass_over(topic, operation.first)
        known.starts[token] = topic.position
        topic.sought, topic.undone = None, set()
        self._renew(known, operation)

    def _beat(self, known: KeyHistory, operation: Operation) -> None:
        position, key = operation.first, operation.key
        if operation.outcome == INVOKE:
            self._check_marks(known, operation)
        if operation.outcome != OK:
            return
        token, owner = operation.token, operation.process
        if known.tokens and (token, owner) != (known.tokens[-1], known.owner):
            self._find("S1", key, f"beat of {owner} under {token} counts")
        if operation.renews and known.is_paused:
            self._find("8.1", key, f"beat of {owner} renews in a pause")
        elif operation.renews:
            self._renew(known, operation)
        if position is not None:
            self._move(known, operation, position)

    def _check_marks(self, known: KeyHistory, operation: Operation) -> None:
        """Demand that offsets which a process reports as processed are."""
        who, done = (operation.process, operation.token), operation.done
        topic = known.topic(operation.token)
        early = [
            offset
            for offset in (topic.handed - topic.processed if done is not None else ())
            if offset < (done or 0) and (*who, offset) in topic.granted_again
        ]
        if early:
            shown = sorted(early)[:NAMED_MAX]
            self._find(
                "6.3", operation.key, f"reported as processed, and is not: {shown}"
            )
        if operation.first is not None and not self._is_amo:
            # A position only moves forward: all below the present one was checked.
            self._check_skipped(known, operation, operation.first)

    def _move(self, known: KeyHistory, operation: Operation, position: int) -> None:
        if not self._is_amo:
            self._check_skipped(known, operation, position)
        topic = known.topic(operation.token)
        if topic.sought is not None:
            _pass_over(topic, position)
        topic.position = max(topic.position or 0, position)

    def _check_skipped(
        self, known: KeyHistory, operation: Operation, position: int
    ) -> None:
        """Demand that every offset below a position was processed by some process."""
        topic = known.topic(operation.token)
        skipped = set(range(topic.position or 0, position)) - topic.processed
        if topic.sought is not None:
            skipped -= topic.undone | set(range(topic.furthest))
        if skipped:
            shown = sorted(skipped)[:NAMED_MAX]
            self._find("6.1", operation.key, f"position {position} skips {shown}")

    def _grant(self, known: KeyHistory, operation: Operation) -> None:
        if operation.outcome != OK:
            return
        token = operation.token
        if known.tokens and token != known.tokens[-1]:
            self._find("S1", operation.key, f"granted under {token}, which is over")
        topic = known.topic(token)
        granted = topic.granted
        for offset in operation.offsets:
            if offset in granted and offset not in topic.back:
                self._find("S3", operation.key, f"{offset} granted twice")
            granted[offset] = (operation.process, token)

    def _hand_out(self, known: KeyHistory, operation: Operation) -> None:
        key, token = operation.key, operation.token
        if operation.outcome == FAIL or token is None:
            return
        who = (operation.process, token)
        if known.handing is not None and token < known.handing:
            self._find("S4", key, f"handed out under {token} after {known.handing}")
        known.handing = token if known.handing is None else max(known.handing, token)
        if token not in known.starts:
            self._find("S4", key, f"handed out under {token}, which nobody won")
        base_ms = known.bases.get(who)
        if base_ms is not None and self._lease_ms is not None:
            over_ms = operation.at_ms - base_ms - self._lease_ms
            if over_ms > 0:
                self._find("S4", key, f"handed out under {token}, {over_ms} ms late")
        topic_ids = {operation.topic_id, known.topic_ids.get(token)}
        if None not in topic_ids and len(topic_ids) > 1:
            self._find("5.6", key, f"handed out under {token}, of another topic")
        self._hand(known, operation, token)

    def _hand(self, known: KeyHistory, operation: Operation, token: Token) -> None:
        """Judge the offsets of a hand-out."""
        key, who = operation.key, (operation.process, token)
        start, topic = known.starts.get(token), known.topic(token)
        for offset in operation.offsets:
            topic.count += 1
            if offset <= known.last.get(who, -1):
                self._find("S3", key, f"{offset} handed out twice under {token}")
            known.last[who] = offset
            if start is not None and offset < start:
                self._find("6.1", key, f"{offset} handed out below {start}")
            if offset in topic.handed:
                topic.again[token] += 1
                if self._is_amo and offset not in topic.back:
                    self._find("S3", key, f"{offset} handed out twice")
            topic.handed.add(offset)
            topic.granted_again.add((*who, offset))
            if self._is_amo and topic.granted.get(offset) != who:
                self._find("6.2", key, f"{offset} handed out without its grant")

    def _process(self, known: KeyHistory, operation: Operation) -> None:
        if operation.outcome == FAIL:
            return
        key, who = operation.key, (operation.process, operation.token)
        topic = known.topic(operation.token)
        for offset in operation.offsets:
            if (*who, offset) not in topic.granted_again:
                self._find("6.2", key, f"{offset} processed, not handed out")
            is_once = self._is_amo and offset not in topic.back
            # A record that was begun may have been processed, whatever its outcome.
            if is_once and topic.begun.setdefault(offset, who) != who:
                other = topic.begun[offset][0]
                self._find("S3", key, f"{offset} begun by {other}, and then {who[0]}")
            if operation.outcome == OK:
                if is_once and offset in topic.processed:
                    self._find("S3", key, f"{offset} processed twice")
                topic.processed.add(offset)

    def check_complete(self, ends: Mapping[Key, tuple[int, int]]) -> None:
        """Report offsets that no process has processed, of keys whose work is done.

        Args:
            ends: First and next offset of each key, in the topic of its last claim.
        """
        for key, (start, end) in ends.items():
            topic = self.keys[key].topic()
            missed = set(range(max(start, topic.base), end)) - topic.processed
            if missed:
                shown = sorted(missed)[:NAMED_MAX]
                self._find(
                    "6.1", key, f"{len(missed)} records never processed: {shown}"
                )

    def verdict(self) -> Verdict:
        """Return the result for the history so far."""
        keys = self.keys.values()
        topics = [topic for known in keys for topic in known.topics.values()]
        again = [count for topic in topics for count in topic.again.values()]
        return Verdict(
            findings=tuple(self.findings),
            handed=sum(topic.count for topic in topics),
            processed=sum(len(topic.processed) for topic in topics),
            duplicates=sum(again),
            takeovers=sum(max(0, len(known.tokens) - 1) for known in keys),
            duplicates_max=max(again, default=0),
        )


def _bring_back(topic: TopicHistory, head: int | None) -> None:
    """Demand that all from a position on is processed again, and nothing below it.

    Without a position, claims begin with the committed offset of the group, below which
    everything was processed or skipped once.
    """
    topic.sought, topic.undone = None, set()
    topic.ever |= topic.processed
    topic.processed = {*topic.ever} if head is None else set(range(head))


def _pass_over(topic: TopicHistory, position: int) -> None:
    """Move the position while a seek is not read back.

    Offsets that the seek skips or undoes count as processed: records sent before and
    after the seek may be written in another order. So do those that an earlier seek
    skips which this one overtook.
    """
    topic.processed |= set(range(min(topic.furthest, position)))
    topic.processed |= {each for each in topic.undone if each < position}
    topic.position = max(topic.position or 0, position)


def check(
    history: Iterable[Operation],
    *,
    delivery: Delivery,
    ends: Mapping[Key, tuple[int, int]] | None = None,
    h_ms: int | None = None,
    late_ms: int = 0,
) -> Verdict:
    """Judge a history: S1, S3, S4, S7, completeness and the bound on duplicates.

    At least once, repeated records lie at or beyond the last position that the log
    had accepted before the claim that repeats them (PROTOCOL 6.1), so one takeover
    repeats no more than was handled since then.

    Args:
        history: All operations, in order.
        delivery: The guarantee of delivery.
        ends: First and next offset of every key whose work is done, in the topic of
            its last claim; at least once, each record between them must have been
            processed.
        h_ms: The heartbeat interval. With it, hand-outs must be within the leases of
            the process's own claims and heartbeats, which must have numbers
            (PROTOCOL 5.2).
        late_ms: Maximum time between the check of the lease and the note of the
            hand-out; 0 if they are one step.
    """
    is_amo = delivery is Delivery.AT_MOST_ONCE
    judge = OperationJudge(is_at_most_once=is_amo, h_ms=h_ms, late_ms=late_ms)
    for operation in history:
        assert operation.kind in KINDS, operation.kind
        assert operation.outcome in OUTCOMES, operation.outcome
        judge.take(operation)
    if not is_amo and ends is not None:
        judge.check_complete(ends)
    return judge.verdict()
