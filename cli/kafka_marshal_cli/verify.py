"""Checks the invariants of a log (PROTOCOL 11), entry by entry. Pure.

Each partition is folded twice: one entry at a time, and in runs as members replay it,
with a snapshot that is taken and restored. Both results must be equal (S2, S5).
``protocol.log_judge`` checks the transitions of each entry.
"""

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Protocol

import attrs

from kafka_marshal.protocol.checkpoints import Watch
from kafka_marshal.protocol.log_judge import LogJudge
from kafka_marshal.protocol.rationalizer import apply, replay
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import Transitions, WorldState
from kafka_marshal.protocol.types import LogEntry

FINDINGS_MAX = 20


class KeptLike(Protocol):
    """A stored state to compare with."""

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


@attrs.define(kw_only=True)
class Verifier:
    """Verifies one coordinating partition.

    Attributes:
        begun: State to begin at: empty, or that of a checkpoint if the start of the
            log is gone. The verifier changes it.
        split: Offset at or after which the second fold restores a snapshot.
        chunk_max: Entries that the second fold applies at once.
        kept: A stored state, compared with the fold at its offset.
        findings: Broken invariants, one line each, at most FINDINGS_MAX.
        entries_count: Number of folded entries.
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
    _first: WorldState = attrs.field(init=False)
    _second: WorldState = attrs.field(init=False)
    _judge: LogJudge = attrs.field(init=False)
    _begin_offset: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._first = self.begun
        self._second = WorldState(self.partition)
        self._begin_offset = self.begun.next_offset
        if self._begin_offset:
            self._second = from_bytes(to_bytes(self.begun))
        self._judge = LogJudge(self.begun)

    @property
    def partition(self) -> int:
        """The coordinating partition that is verified."""
        return self.begun.partition

    @property
    def state(self) -> WorldState:
        """The world of the partition."""
        return self._first

    def fold(self, entry: LogEntry) -> Transitions:
        """Fold one more entry, check its transitions, and return them.

        ``repeat`` follows with the run that it belongs to.
        """
        self.entries_count += 1
        if self._kept_result is None and self.kept is not None:
            self._compare_kept(entry.offset)
        transitions = apply(self._first, entry)
        self._compare_checkpoint(transitions)
        for transition in transitions:
            for finding in self._judge.take(transition):
                self.report(f"{finding.invariant}: {finding.message}")
        return transitions

    def repeat(self, run: Sequence[LogEntry]) -> None:
        """Fold entries the second time, in runs."""
        at = 0
        if self.snapshot_offset is None:
            at = bisect_left(run, self.split, key=attrgetter("offset"))
            self._replay(run[:at])
            if at < len(run):
                self._restore()
        self._replay(run[at:])

    def _replay(self, run: Sequence[LogEntry]) -> None:
        for start in range(0, len(run), self.chunk_max):
            replay(self._second, run[start : start + self.chunk_max])

    def finish(self) -> dict[str, Any]:
        """Compare both folds and return the result as a JSON object."""
        if self.snapshot_offset is None:
            self._restore()
        first, second = digest(self._first), digest(self._second)
        if first != second:
            self.report(
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
        """Compare the stored state when all entries below its offset are folded.

        Args:
            before: Offset of the next entry; None at the end.
        """
        kept, state = self.kept, self._first
        if kept is None or self._kept_result is not None:
            return
        if before is not None and before < kept.offset:
            return
        if kept.offset < self._begin_offset:
            self._kept_result = "unknown"  # the log has lost the entries before it
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
            self.report(
                f"S2: checkpoint {found.checkpoint_id.hex()} of {found.client_id} at "
                f"offset {found.begin_offset} says {found.theirs}, and the log folds "
                f"to {found.ours}"
            )

    def _restore(self) -> None:
        """Replace the second state by its copy from bytes (PROTOCOL 7.4)."""
        self.snapshot_offset = self._second.next_offset
        if self._second.halted is None:
            value = to_bytes(self._second)
            self._second = from_bytes(value)
            if to_bytes(self._second) != value:
                self.report(f"S5: the snapshot at {self.snapshot_offset} changed")

    def report(self, text: str) -> None:
        """Add a broken invariant, up to the limit."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(text)
