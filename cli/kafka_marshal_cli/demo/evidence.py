"""Evidence from journals and the log, in one form. Pure: no IO, no clock.

Journal lines have the epoch of the claim under which a worker wrote them.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import attrs

from kafka_marshal.history.historian import Historian
from kafka_marshal.history.rows import GRANTED, GrantRow, Interval, Row
from kafka_marshal.protocol.log_judge import LogJudge
from kafka_marshal.protocol.losses import TAKEN_OVER
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import LogEntry, OffsetRange
from kafka_marshal_cli.demo.journal import BATCH, RECORD, Line

FINDINGS_MAX = 20
Place = tuple[int, int]
"""A data partition, and the epoch of a claim of it."""


def place_of(claim: Interval) -> Place:
    """Return the partition and epoch of a claim."""
    return claim.key.partition, claim.token.offset


@attrs.frozen
class Takeover:
    """A claim that ended without a release, and the one that followed it."""

    before: Interval
    after: Interval

    @property
    def took_ms(self) -> int:
        """Log time from the last accepted heartbeat to the accepted claim."""
        return self.after.start.log_ms - self.before.renewed_ms


@attrs.frozen(kw_only=True)
class LogEvidence:
    """What the log shows about one group.

    Attributes:
        claims: Every claim, in the order of its partition's log.
        grants: Granted offsets, by claim.
        findings: Violated invariants of the log, a line each; only the last ones.
    """

    claims: tuple[Interval, ...] = ()
    grants: Mapping[Place, Sequence[OffsetRange]] = attrs.field(factory=dict)
    findings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, entries: Iterable[tuple[int, LogEntry]], group_id: str
    ) -> "LogEvidence":
        """Fold a log from its start, as pairs of coordinating partition and entry."""
        parts: dict[int, tuple[WorldState, Historian, LogJudge]] = {}
        rows: list[Row] = []
        findings: list[str] = []
        for t, entry in entries:
            if t not in parts:
                world = WorldState(t)
                parts[t] = world, Historian(), LogJudge(world)
            world, historian, judge = parts[t]
            transitions = apply(world, entry)
            for each in transitions:
                found = judge.take(each)
                findings += [f"{f.invariant}: {f.message}" for f in found]
            rows += historian.take(world, entry, transitions=transitions)
        for _, historian, _ in parts.values():
            rows += historian.open_rows()
        mine = [
            row
            for row in rows
            if isinstance(row, Interval | GrantRow) and row.key.group_id == group_id
        ]
        grants: dict[Place, list[OffsetRange]] = {}
        for row in mine:
            if isinstance(row, GrantRow) and row.outcome == GRANTED:
                granted = OffsetRange.through(row.first, row.last)
                place = row.key.partition, row.epoch
                grants.setdefault(place, []).append(granted)
        claims = [row for row in mine if isinstance(row, Interval)]
        return cls(
            claims=tuple(sorted(claims, key=attrgetter("token"))),
            grants=grants,
            findings=tuple(findings[-FINDINGS_MAX:]),
        )

    def takeovers(self) -> list[Takeover]:
        """Return every claim that was taken over, with the one that followed it."""
        found = []
        last: dict[int, Interval] = {}
        for claim in self.claims:
            before = last.get(claim.key.partition)
            if before is not None and before.ending == TAKEN_OVER:
                found.append(Takeover(before, claim))
            last[claim.key.partition] = claim
        return found


@attrs.frozen(kw_only=True)
class Work:
    """One record that one worker processed, by its journal."""

    client_id: str
    partition: int
    offset: int
    epoch: int
    at_ms: int

    @property
    def claim(self) -> Place:
        """The claim that its token names."""
        return self.partition, self.epoch


@attrs.frozen
class Pause:
    """A pause of the group; times by the machine's monotonic clock.

    Attributes:
        asked_at_ms: When the pause was requested.
        drained_at_ms: When the log showed that no partition had an owner.
        ended_at_ms: When the group was resumed.
    """

    asked_at_ms: int
    drained_at_ms: int
    ended_at_ms: int


@attrs.frozen(kw_only=True)
class Evidence:
    """Everything that is known about one round.

    Attributes:
        delivery: ``alo`` or ``amo``.
        produced: Number of records that each partition acknowledged.
        journals: Every whole line of each worker's journal.
        log: What the log shows about the group.
        killed: client_id of the worker that was killed, or None.
        pause: The pause, or None if the round ended before.
        heartbeat_interval_ms: Heartbeat interval.
        jitter_ms: The longest random delay before a claim.
        round_trip_ms: Slowest round trip to the log during the takeover.
        batch: Most records of a batch.
        problems: A sentence for each step that failed or missed its deadline.
    """

    delivery: str
    produced: Mapping[int, int]
    journals: Mapping[str, tuple[Line, ...]]
    log: LogEvidence
    killed: str | None
    pause: Pause | None
    heartbeat_interval_ms: int
    jitter_ms: int
    round_trip_ms: int
    batch: int
    problems: tuple[str, ...] = ()

    def works(self) -> list[Work]:
        """Return every processing of a record, in order of time."""
        found = [
            Work(
                client_id=client_id,
                partition=line.partition,
                offset=line.offset,
                epoch=epoch_of(line.token),
                at_ms=line.at,
            )
            for client_id, lines in self.journals.items()
            for line in lines
            if line.kind == RECORD
        ]
        return sorted(found, key=lambda work: work.at_ms)

    def uncommitted_count(self, claim: Interval) -> int:
        """Return how many records of its last batch a worker did not process."""
        batch, done = self._last_batch(claim)
        if batch is None:
            return 0
        return max(0, batch.last - batch.offset + 1 - len(done))

    def last_batch_ms(self, claim: Interval) -> int:
        """Return how long a worker had processed its last batch when it stopped."""
        batch, done = self._last_batch(claim)
        return done[-1].at - batch.at if batch is not None and done else 0

    def _last_batch(self, claim: Interval) -> tuple[Line | None, list[Line]]:
        """Return the last batch under a claim, and its processed records."""
        batch: Line | None = None
        done: list[Line] = []
        for line in self.journals.get(claim.client_id, ()):
            if (line.partition, epoch_of(line.token)) != place_of(claim):
                continue
            if line.kind == BATCH:
                batch, done = line, []
            elif line.kind == RECORD:
                done.append(line)
        return batch, done


def epoch_of(token: str) -> int:
    """Return the claim's epoch, the last part of its token; -1 without one."""
    last = token.rpartition(".")[2]
    return int(last) if last.isdecimal() else -1
