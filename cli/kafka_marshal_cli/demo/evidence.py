"""Evidence from journals and the log, in one form. Pure: no IO, no clock.

A *tenure* is one accepted claim of one partition with all records that the log
accepted under it; its epoch relates it to the journal lines of its work.
"""

from collections.abc import Iterable, Iterator, Mapping

import attrs

from kafka_marshal.protocol.types import OffsetRange
from kafka_marshal.testing.watching import Fact
from kafka_marshal_cli.demo.journal import BATCH, RECORD, Line

HELD = "held"
RELEASED = "released"
TAKEN = "taken"


@attrs.define(kw_only=True)
class Tenure:
    """One accepted claim of one data partition.

    Attributes:
        partition: Data partition.
        epoch: Offset of the winning claim; the last part of its token.
        client_id: Its owner.
        start: Position of the partition when it was claimed: by the log, all below
            was processed.
        claimed_ms: When the claim was appended, by the broker's clock.
        renewed_ms: When the last record that renewed it was appended.
        ending: ``held`` (still), ``released`` or ``taken`` by another claim.
        grants: Granted offsets.
    """

    partition: int
    epoch: int
    client_id: str
    start: int
    claimed_ms: int
    renewed_ms: int
    ending: str = HELD
    grants: list[OffsetRange] = attrs.field(factory=list)

    def was_granted(self, offset: int) -> bool:
        """Return whether an offset was granted under this claim."""
        return any(each.first <= offset < each.end for each in self.grants)

    def granted(self) -> Iterator[int]:
        """Iterate over every offset that was granted."""
        for each in self.grants:
            yield from range(each.first, each.end)


@attrs.frozen
class Takeover:
    """A claim that ended without a release, and the one that followed it."""

    before: Tenure
    after: Tenure

    @property
    def took_ms(self) -> int:
        """Time from the last accepted beat to the accepted claim, by the log."""
        return self.after.claimed_ms - self.before.renewed_ms


@attrs.frozen(kw_only=True)
class Work:
    """One record that one worker processed, by its journal."""

    client_id: str
    partition: int
    offset: int
    epoch: int
    at_ms: int


@attrs.frozen
class Pause:
    """A pause of the group; times by the machine's monotonic clock.

    Attributes:
        asked_at_ms: When the pause was requested.
        drained_at_ms: When no partition had an owner, by the log.
        ended_at_ms: When the group was resumed.
    """

    asked_at_ms: int
    drained_at_ms: int
    ended_at_ms: int


@attrs.frozen(kw_only=True)
class Evidence:
    """All that is known of one round.

    Attributes:
        delivery: ``alo`` or ``amo``.
        produced: Number of records that each partition acknowledged.
        journals: Every whole line of each worker's journal.
        tenures: Every claim of the group, in the order of the log.
        killed: client_id of the worker that was killed, or None.
        pause: The pause, or None if the round ended before.
        heartbeat_interval_ms: Heartbeat interval.
        jitter_ms: The longest random delay before a claim.
        round_trip_ms: Slowest round trip to the log during the takeover.
        batch: Most records of a batch.
        problems: A sentence for each step that failed or missed its deadline, and
            what the log judge found.
    """

    delivery: str
    produced: Mapping[int, int]
    journals: Mapping[str, tuple[Line, ...]]
    tenures: tuple[Tenure, ...]
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

    def takeovers(self) -> list[Takeover]:
        """Return every claim that was taken over, with the one that followed it."""
        found = []
        last: dict[int, Tenure] = {}
        for tenure in self.tenures:
            before = last.get(tenure.partition)
            if before is not None and before.ending == TAKEN:
                found.append(Takeover(before, tenure))
            last[tenure.partition] = tenure
        return found

    def uncommitted_count(self, tenure: Tenure) -> int:
        """Return how many records of its last batch a worker did not process."""
        batch, done = self._last_batch(tenure)
        if batch is None:
            return 0
        return max(0, batch.last - batch.offset + 1 - len(done))

    def last_batch_ms(self, tenure: Tenure) -> int:
        """Return how long a worker had processed its last batch when it stopped."""
        batch, done = self._last_batch(tenure)
        return done[-1].at - batch.at if batch is not None and done else 0

    def _last_batch(self, tenure: Tenure) -> tuple[Line | None, list[Line]]:
        """Return the last batch under a claim, and its records that were done."""
        batch: Line | None = None
        done: list[Line] = []
        for line in self.journals.get(tenure.client_id, ()):
            if line.partition != tenure.partition:
                continue
            if epoch_of(line.token) != tenure.epoch:
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


def tenures_of(facts: Iterable[Fact]) -> tuple[Tenure, ...]:
    """Return every claim that the log accepted, in order of its append.

    Args:
        facts: Records that the log accepted of one group and topic; those of one
            partition are in log order.
    """
    found: list[Tenure] = []
    current: dict[int, Tenure] = {}
    for fact in facts:
        partition = fact.key.partition
        tenure = current.get(partition)
        if fact.effect in {"claimed", "resumed"}:
            if tenure is not None and tenure.ending == HELD:
                tenure.ending = TAKEN
            tenure = Tenure(
                partition=partition,
                epoch=fact.epoch,
                client_id=fact.client_id,
                start=fact.position or 0,
                claimed_ms=fact.timestamp_ms,
                renewed_ms=fact.timestamp_ms,
            )
            current[partition] = tenure
            found.append(tenure)
        elif tenure is None or tenure.epoch != fact.epoch:
            continue
        elif fact.effect == "renewed":
            tenure.renewed_ms = fact.timestamp_ms
        elif fact.effect == "released":
            tenure.ending = RELEASED
        elif fact.effect == "granted" and fact.granted is not None:
            tenure.grants.append(fact.granted)
    return tuple(found)
