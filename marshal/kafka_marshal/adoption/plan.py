"""What adopting a group would do, partition by partition: pure functions."""

from collections.abc import Iterable
from enum import Enum

import attrs

from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.types import TopicPartition


class Action(Enum):
    """What becomes of one partition."""

    SET = "set"
    """Its position will be set."""
    DONE = "done"
    """It has this position already."""
    KEEP = "keep"
    """It has another position, which stands: the log is authoritative."""
    GONE = "gone"
    """The partition does not exist any more; there is nothing to set."""
    HELD = "held"
    """A live member of the group holds it: nothing may be set under its feet."""
    BEYOND = "beyond"
    """The offset lies beyond the log's end: it is of another log of this name."""


BLOCKING = frozenset({Action.HELD, Action.BEYOND})


@attrs.frozen
class Finding:
    """What is known of one partition before it is adopted.

    Attributes:
        partition: Data partition.
        offset: Next offset to process, by the group that is left.
        source: Where that stands: ``committed`` or ``heartbeat``.
        log_range: Offsets that exist; None where the partition does not.
        position: Position that the coordination log has, None where it has none.
        owner: client_id of a live owner in the coordination log, or None.
    """

    partition: TopicPartition
    offset: int
    source: str
    log_range: LogRange | None
    position: int | None = None
    owner: str | None = None


@attrs.frozen
class Step:
    """What becomes of one partition, with the figures that decide it.

    Attributes:
        partition: Data partition.
        action: What becomes of it.
        source: Where the offset stands: ``committed`` or ``heartbeat``.
        offset: Next offset to process, by the group that is left.
        position: Position afterwards; None where the partition is gone.
        before: Position that the coordination log has now, None where it has none.
        lag: Records between the position afterwards and the log's end.
        note: A sentence for people where something is out of the ordinary.
    """

    partition: TopicPartition
    action: Action
    source: str
    offset: int
    position: int | None
    before: int | None
    lag: int | None
    note: str | None = None


@attrs.frozen
class AdoptionPlan:
    """Everything that adopting a group would do.

    Attributes:
        group_id: Group of the coordination log that is to go on.
        from_group: Consumer group in Kafka that is left.
        from_topic: Coordination topic of the Go original, if that was read too.
        is_source_active: Whether the group that is left still works.
        steps: One per partition, in order.
        unreadable_count: Records of ``from_topic`` that were no records.
    """

    group_id: str
    from_group: str
    from_topic: str | None
    is_source_active: bool
    steps: tuple[Step, ...]
    unreadable_count: int = 0

    def of(self, *actions: Action) -> tuple[Step, ...]:
        """Return the steps with one of these actions."""
        return tuple(step for step in self.steps if step.action in actions)

    @property
    def blocked(self) -> tuple[Step, ...]:
        """The steps that keep the whole plan from being carried out."""
        return self.of(*BLOCKING)


def steps_of(findings: Iterable[Finding]) -> tuple[Step, ...]:
    """Decide what becomes of each partition."""
    return tuple(_step(each) for each in sorted(findings, key=lambda f: f.partition))


def _step(found: Finding) -> Step:
    log_range = found.log_range
    if log_range is None:
        return _made(found, Action.GONE, None, note="no such partition any more")
    if found.owner is not None:
        note = f"held by {found.owner!r}; stop it first"
        return _made(found, Action.HELD, found.position, note=note)
    if found.position is not None:
        if found.position == found.offset:
            return _made(found, Action.DONE, found.position)
        note = "the coordination log has a position already, which stands"
        return _made(found, Action.KEEP, found.position, note=note)
    if found.offset > log_range.end:
        note = f"the log ends at {log_range.end}: was the topic created anew?"
        return _made(found, Action.BEYOND, None, note=note)
    if found.offset < log_range.start:
        gone = log_range.start - found.offset
        note = f"retention took {gone} unprocessed offsets; starts at the log's start"
        return _made(found, Action.SET, log_range.start, note=note)
    return _made(found, Action.SET, found.offset)


def _made(
    found: Finding, action: Action, position: int | None, *, note: str | None = None
) -> Step:
    lag = None
    if position is not None and found.log_range is not None:
        lag = max(0, found.log_range.end - max(position, found.log_range.start))
    return Step(
        found.partition,
        action,
        found.source,
        found.offset,
        position,
        found.position,
        lag,
        note,
    )
