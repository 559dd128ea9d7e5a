"""Checks a log against what must hold (PROTOCOL 11), entry by entry. Pure.

Each partition is folded twice: one entry at a time, and in chunks with a
snapshot taken and restored on the way. Both must end alike (S2, S5). Besides,
epochs and tokens of a key only grow (S1, S7), an accepted claim makes its
sender the one owner (S1), grants are disjoint between position changes (S3),
and no position falls inside an epoch without a rewind (S10).
"""

from typing import Any, Protocol

import attrs

from kafka_marshal.protocol.checkpoints import Watch
from kafka_marshal.protocol.rationalizer import apply, replay
from kafka_marshal.protocol.records import ClaimingPartition, Heartbeat
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.transition import ACCEPTED, Transition, Transitions
from kafka_marshal.protocol.types import Key, LogEntry, Token

FINDINGS_MAX = 20


class KeptLike(Protocol):
    """What is compared of a kept state."""

    @property
    def offset(self) -> int:
        """Next offset."""
        ...

    @property
    def leader_epoch(self) -> int:
        """Leader epoch of the entry before it."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the state."""
        ...


_CLAIMS = frozenset({"claimed", "resumed"})


@attrs.define
class _Seen:
    """What a key was like after the last record that it accepted.

    Attributes:
        token: Token of its last claim.
        position: Its position then.
        granted_to: First offset above every grant since the last reset.
        topic_id: Topic id that the grants are of.
    """

    token: Token
    position: int | None = None
    granted_to: int = 0
    topic_id: bytes | None = None


@attrs.define
class Verifier:
    """Verifies one coordinating partition.

    Attributes:
        begun: State to begin at: empty, or that of a checkpoint where the start of
            the log is gone. It belongs to the verifier from then on.
        split: Offset at or after which the second fold goes by a snapshot.
        chunk_max: Entries that the second fold takes at once.
        kept: A state that somebody kept, to be compared with ours at its offset.
        findings: What is broken, one line each; bounded.
        entries_count: Entries folded.
    """

    begun: WorldState
    split: int
    chunk_max: int = 100
    kept: KeptLike | None = None
    findings: list[str] = attrs.field(factory=list)
    entries_count: int = 0
    snapshot_offset: int | None = None
    checkpoints_count: int = 0
    _kept_result: str | None = None
    _watch: Watch = attrs.field(factory=Watch)
    _seen: dict[Key, _Seen] = attrs.field(factory=dict)
    _chunk: list[LogEntry] = attrs.field(factory=list)
    _first: WorldState = attrs.field(init=False)
    _second: WorldState = attrs.field(init=False)
    _begin_offset: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._first = self.begun
        self._second = WorldState(self.partition)
        self._begin_offset = self.begun.next_offset
        if self._begin_offset:
            self._second = from_bytes(to_bytes(self.begun))
        for key, known in self.begun.keys.items():
            token = self.begun.token(key)
            if token is not None:
                granted_to, topic_id = known.granted or 0, known.topic_id
                self._seen[key] = _Seen(token, known.position, granted_to, topic_id)

    @property
    def partition(self) -> int:
        """The coordinating partition that is verified."""
        return self.begun.partition

    @property
    def state(self) -> WorldState:
        """The world of the partition."""
        return self._first

    def take(self, entry: LogEntry) -> None:
        """Fold one more entry and look at what it did."""
        self.entries_count += 1
        if self._kept_result is None and self.kept is not None:
            self._compare_kept(entry.offset)
        transitions = apply(self._first, entry)
        self._compare_checkpoint(transitions)
        if transitions and transitions[0].effect == "reset":
            self._begin_anew()
        for transition in transitions:
            if transition.effect == "forgotten" and transition.key is not None:
                self._seen.pop(transition.key, None)  # it may begin anew
            elif transition.outcome == ACCEPTED and transition.key is not None:
                self._check(transition, transition.key)
        if self.snapshot_offset is None and entry.offset >= self.split:
            self._restore()
        self._chunk.append(entry)
        if len(self._chunk) >= self.chunk_max:
            self._flush()

    def finish(self) -> dict[str, Any]:
        """Compare both folds and return the result as a JSON object."""
        if self.snapshot_offset is None:
            self._restore()
        self._flush()
        first, second = digest(self._first), digest(self._second)
        if first != second:
            self._found(
                f"S2: folded twice, once by a snapshot at {self.snapshot_offset}, the "
                f"digests differ: {first} and {second}"
            )
        self._compare_kept(None)
        halted = self._first.halted
        result = "ok" if halted is None else "halted"
        return {
            "partition": self.partition,
            "result": "broken" if self.findings else result,
            "begin_offset": self._begin_offset,
            "entries_count": self.entries_count,
            "next_offset": self._first.next_offset,
            "snapshot_offset": self.snapshot_offset,
            "undecodable_count": self._first.soft.counters.get("undecodable", 0),
            "checkpoints_count": self.checkpoints_count,
            "kept": self._kept_result,
            "digest": first,
            "findings": list(self.findings),
        }

    def _compare_kept(self, before: int | None) -> None:
        """Compare the kept state, once all below its offset is folded.

        Args:
            before: Offset of the entry that is folded next; None at the end.
        """
        kept, state = self.kept, self._first
        if kept is None or self._kept_result is not None:
            return
        if before is not None and before < kept.offset:
            return
        if kept.offset < self._begin_offset:
            self._kept_result = "unknown"  # the log has lost what leads up to it
            return
        names = (state.next_offset, state.leader_epoch, digest(state))
        is_same = names == (kept.offset, kept.leader_epoch, kept.digest)
        self._kept_result = "ok" if is_same else "differs"

    def _compare_checkpoint(self, transitions: Transitions) -> None:
        found = self._watch.on_entry(self._first, transitions)
        if found is None:
            return
        self.checkpoints_count += 1
        if not found.is_equal:
            self._found(
                f"S2: checkpoint {found.checkpoint_id.hex()} of {found.client_id} at "
                f"offset {found.begin_offset} says {found.theirs}, and the log folds "
                f"to {found.ours}"
            )

    def _begin_anew(self) -> None:
        """Take that a Reset may bring back positions and grants (PROTOCOL 7.6).

        Tokens grow all the same.
        """
        for key, seen in self._seen.items():
            known = self._first.keys.get(key)
            seen.position = None if known is None else known.position
            seen.granted_to = 0

    def _flush(self) -> None:
        replay(self._second, self._chunk)
        self._chunk.clear()

    def _restore(self) -> None:
        """Go on with a copy that went through bytes (PROTOCOL 7.4)."""
        self._flush()
        self.snapshot_offset = self._second.next_offset
        if self._second.halted is None:
            value = to_bytes(self._second)
            self._second = from_bytes(value)
            if to_bytes(self._second) != value:
                self._found(f"S5: the snapshot at {self.snapshot_offset} changed")

    def _check(self, transition: Transition, key: Key) -> None:
        known = self._first.keys.get(key)
        if known is None:
            self._found(f"S1: offset {transition.offset}: {key} is accepted and gone")
            return
        if transition.effect in _CLAIMS:
            self._check_claim(transition, key, known=known)
        seen = self._seen.get(key)
        if seen is None:
            self._found(f"S1: offset {transition.offset}: {key} was never claimed")
            return
        if transition.effect == "granted":
            self._check_grant(transition, key, seen=seen)
        self._check_position(transition, key, known=known)
        seen.position = known.position

    def _check_claim(
        self, transition: Transition, key: Key, *, known: KeyState
    ) -> None:
        token = self._first.token(key)
        record = transition.record
        before = self._seen.get(key)
        at = f"offset {transition.offset}: {key}"
        if token is None:
            self._found(f"S7: {at} is owned without a token")
            return
        if known.epoch != transition.offset:
            self._found(f"S1: {at} has epoch {known.epoch}")
        if before is not None and (
            token <= before.token or token.offset <= before.token.offset
        ):
            self._found(f"S7: {at} has token {token} after {before.token}")
        if isinstance(record, ClaimingPartition) and (
            known.owner != (record.client_id, record.incarnation)
        ):
            self._found(f"S1: {at} belongs to {known.owner}, not to who won it")
        if before is None or before.topic_id != known.topic_id:
            # Another topic of that name, or its id was learnt: positions start anew
            # where the fold says so.
            reset = known.granted is None
            kept = 0 if before is None or reset else before.granted_to
            before = _Seen(token, known.position, kept, known.topic_id)
        before.token = token
        before.position = known.position
        self._seen[key] = before

    def _check_grant(self, transition: Transition, key: Key, *, seen: _Seen) -> None:
        detail = transition.detail or {}
        first, last = detail.get("first", 0), detail.get("last", -1)
        if first < seen.granted_to or last < first:
            self._found(
                f"S3: offset {transition.offset}: {key} was granted {first} to {last}, "
                f"and all below {seen.granted_to} before"
            )
        seen.granted_to = max(seen.granted_to, last + 1)

    def _check_position(
        self, transition: Transition, key: Key, *, known: KeyState
    ) -> None:
        before = self._seen[key].position
        record = transition.record
        is_rewind = isinstance(record, Heartbeat) and record.rewind
        fell = before is not None and (
            known.position is None or known.position < before
        )
        if fell and not is_rewind:
            self._found(
                f"S10: offset {transition.offset}: {key} fell from position {before} "
                f"to {known.position}"
            )

    def _found(self, text: str) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(text)
