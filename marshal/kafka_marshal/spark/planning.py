"""Plan of a query: marks in its checkpoint, ranges of a batch, tasks.

An offset of Spark is a dictionary. ``{"orders:0": "1.0.55 100 240 0 ID"}`` means: under
the claim with token 1.0.55 the query began at offset 100 of the topic with this id, and
everything below 240 is planned; 0 counts restarts at the log start. Names without a
colon state to which group and log the claims belong (``Origin``). A batch is the
difference of two offsets. Its size follows the rules of Spark's own Kafka source.

Imports no Kafka client, so that planners and workers start fast.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Self

import attrs
from pyspark.sql.datasource import InputPartition

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import OffsetRange, Token, TopicPartition

if TYPE_CHECKING:
    from kafka_marshal.grants import ClaimRef


class Mark(NamedTuple):
    """How far one partition is planned, and under which claim.

    Attributes:
        token: Fencing token of the claim.
        begin: First offset that the query planned under the claim, or the log start if
            it passed records that were deleted.
        next: Next offset to plan: everything from ``begin`` up to here is planned.
        restarts: Number of restarts at the log start, after the log was truncated below
            ``next`` or the topic was recreated.
        topic_id: Kafka's id of the topic in hex, or empty if unknown.
    """

    token: Token
    begin: int
    next: int
    restarts: int = 0
    topic_id: str = ""

    def is_of_other_topic(self, topic_id: str) -> bool:
        """Return whether these offsets belong to a topic with another id."""
        return bool(self.topic_id and topic_id) and self.topic_id != topic_id

    def is_continued_by(self, other: "Mark") -> bool:
        """Return whether ``other`` is a later mark of the same claim and restart."""
        return (self.token, self.restarts) == (other.token, other.restarts)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a mark.

        Raises:
            ValueError: The text is no mark.
        """
        token, *numbers, topic_id = text.split(" ")
        begin, end, restarts = map(int, numbers)
        return cls(Token.parse(token), begin, end, restarts, topic_id)

    def __str__(self) -> str:
        numbers = f"{self.begin} {self.next} {self.restarts}"
        return f"{self.token} {numbers} {self.topic_id}"


Marks = dict[TopicPartition, Mark]


@attrs.frozen(kw_only=True)
class PlannedRange:
    """Offsets from ``first`` to before ``end``, with the token of the claim, if any."""

    partition: TopicPartition
    token: Token | None
    first: int
    end: int
    topic_id: str = ""


@attrs.frozen(kw_only=True)
class Origin:
    """To which group and log the claims in a checkpoint belong.

    For any other group or log the offsets of the checkpoint mean nothing.

    Attributes:
        group: The group.
        delivery: Its delivery, ``alo`` or ``amo``.
        coordination: Kafka's id of the coordination topic in hex, or empty if unknown.
    """

    group: str
    delivery: str
    coordination: str

    def require(self, offset: object) -> None:
        """Raise if an offset has another origin; unknown parts are not compared.

        Raises:
            ConfigurationError: The checkpoint belongs to another query or source.
        """
        if not isinstance(offset, Mapping):
            raise _not_ours(repr(offset))
        for name, ours in attrs.asdict(self).items():
            theirs = offset.get(name, "")
            if ours and theirs and ours != theirs:
                raise ConfigurationError(
                    f"the checkpoint was written with {_NAMES[name]} {theirs}, and the "
                    f"query has {ours}: positions and claims of one mean nothing in "
                    "the other. Correct the option, or start the query with a new "
                    "checkpointLocation, which continues at the group's positions",
                    setting="checkpointLocation",
                )


_NAMES = {
    "group": "group",
    "delivery": "delivery",
    "coordination": "a coordination topic of the id",
}


def to_offset(marks: Mapping[TopicPartition, Mark], origin: Origin) -> dict[str, str]:
    """Return marks as a Spark offset, sorted, because Spark compares its text."""
    if not marks:
        return {}
    places = {f"{p.topic}:{p.partition}": str(marks[p]) for p in sorted(marks)}
    return attrs.asdict(origin) | places


def to_marks(offset: Mapping[str, object]) -> Marks:
    """Parse a Spark offset.

    Raises:
        ConfigurationError: The checkpoint belongs to another source.
    """
    marks = {}
    for name, text in offset.items():
        if name in _NAMES:
            continue
        topic, _, number = name.rpartition(":")
        try:
            marks[TopicPartition(topic, int(number))] = Mark.parse(str(text))
        except ValueError as error:
            raise _not_ours(f"{name!r}: {text!r}") from error
    return marks


def _not_ours(found: str) -> ConfigurationError:
    return ConfigurationError(
        f"the checkpoint has {found}, which is no offset of format marshal of this "
        "version; use a new checkpointLocation",
        setting="checkpointLocation",
    )


def planned_ranges(start: Marks, end: Marks) -> list[PlannedRange]:
    """Return the ranges between two offsets, in order."""
    found = []
    for partition, mark in sorted(end.items()):
        before = start.get(partition)
        is_continued = before is not None and before.is_continued_by(mark)
        first = mark.begin
        if before is not None and is_continued:
            # Records between the two were deleted.
            first = max(before.next, mark.begin)
        if first < mark.next:
            planned = PlannedRange(
                partition=partition,
                token=mark.token,
                first=first,
                end=mark.next,
                topic_id=mark.topic_id,
            )
            found.append(planned)
    return found


@attrs.frozen
class Limit:
    """Size limits of a batch.

    Attributes:
        most: Most offsets, None = no limit.
        least: Fewest offsets, None = any.
    """

    most: int | None = None
    least: int | None = None


def limited_ends(
    spans: Mapping[TopicPartition, OffsetRange], most: int
) -> dict[TopicPartition, int]:
    """Return the end of each partition for a batch of about ``most`` offsets.

    Each partition gets a share in proportion to its backlog, and at least one offset,
    so that no backlog starves another.

    Args:
        spans: The backlog, by partition.
        most: Most offsets in total; more if there are more partitions than that.
    """
    total = sum(span.count for span in spans.values())
    if total <= most:
        return {partition: span.end for partition, span in spans.items()}
    ends = {}
    for partition, span in spans.items():
        share = most * span.count / total
        whole = math.ceil(share) if share < 1 else math.floor(share)
        ends[partition] = min(span.end, span.first + whole)
    return ends


def split_ranges(
    planned_ranges: Sequence[PlannedRange], least: int, *, most: int = 0
) -> list[PlannedRange]:
    """Split ranges into about ``least`` parts, as Spark's own Kafka source does.

    Larger ranges get more parts. The parts of a range differ in size by at most one
    offset. A part has at most ``most`` offsets; 0 = no limit.
    """
    if most:
        planned_ranges = [
            part
            for each in planned_ranges
            for part in _split(each, math.ceil((each.end - each.first) / most))
        ]
    if not planned_ranges or len(planned_ranges) >= least:
        return list(planned_ranges)
    total = sum(each.end - each.first for each in planned_ranges)
    found: list[PlannedRange] = []
    for each in planned_ranges:
        size = each.end - each.first
        found += _split(each, min(size, max(1, round(size / total * least))))
    return found


def _split(planned: PlannedRange, count: int) -> list[PlannedRange]:
    """Split a range into parts of almost equal size."""
    size = planned.end - planned.first
    edges = [planned.first + size * at // count for at in range(count + 1)]
    return [
        attrs.evolve(planned, first=first, end=end) for first, end in pairwise(edges)
    ]


@attrs.frozen(kw_only=True)
class Task:
    """The range of one task; sent to the executor.

    Attributes:
        partition: Data partition.
        first: First offset.
        end: Exclusive end.
        claim: Claim under which the range is read; None for a batch read.
        topic_id: Kafka's id of the topic in hex, or empty if unknown.
    """

    partition: TopicPartition
    first: int
    end: int
    claim: "ClaimRef | None" = None
    topic_id: str = ""


class TaskPartition(InputPartition):
    """A task as Spark's ``InputPartition``; the task is None to read nothing."""

    def __init__(self, task: Task | None) -> None:
        super().__init__(None)
        self.task = task
