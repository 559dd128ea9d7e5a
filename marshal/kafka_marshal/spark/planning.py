"""Plan of a query: marks in its checkpoint, ranges of a batch, tasks.

An offset of Spark is a dictionary: ``{"orders:0": "1.0.55 100 240 0 ID"}`` means that
under the claim with that token the query began at offset 100 of the topic with that id,
and that everything below 240 is planned. A batch is the difference of two offsets. How
much a batch takes follows the rules of Spark's own Kafka source.

Loads nothing of Kafka, so that planners and workers start fast.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Self

import attrs
from pyspark.sql.datasource import InputPartition

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import Token, TopicPartition

if TYPE_CHECKING:
    from kafka_marshal.tickets import ClaimRef

Span = tuple[int, int]


class Mark(NamedTuple):
    """How far one partition is planned, and under which claim.

    Attributes:
        token: Fencing token of the claim.
        begin: Where this query began under it.
        next: Everything below is planned.
        restarts: How often reading restarted at the start of the log, because the
            log was cut off below ``next``, or the topic was recreated.
        topic_id: Kafka's id of the topic in hex; empty where it is not known.
    """

    token: Token
    begin: int
    next: int
    restarts: int = 0
    topic_id: str = ""

    def is_of_another(self, topic_id: str) -> bool:
        """Return whether these offsets are of another topic than that of an id."""
        return bool(self.topic_id and topic_id) and self.topic_id != topic_id

    def is_continued_by(self, other: "Mark") -> bool:
        """Return whether ``other`` continues this range, under the same claim."""
        return (self.token, self.restarts) == (other.token, other.restarts)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str`` wrote.

        Raises:
            ValueError: It is something else.
        """
        token, *numbers, topic_id = text.split(" ")
        begin, end, restarts = map(int, numbers)
        return cls(Token.parse(token), begin, end, restarts, topic_id)

    def __str__(self) -> str:
        numbers = f"{self.begin} {self.next} {self.restarts}"
        return f"{self.token} {numbers} {self.topic_id}"


Marks = dict[TopicPartition, Mark]


class Stretch(NamedTuple):
    """A range of one partition, ``first <= o < end``, its claim if any, its topic."""

    partition: TopicPartition
    token: Token | None
    first: int
    end: int
    topic_id: str = ""


def to_offset(marks: Mapping[TopicPartition, Mark]) -> dict[str, str]:
    """Return marks as an offset of Spark, in order: Spark compares texts."""
    return {f"{p.topic}:{p.partition}": str(marks[p]) for p in sorted(marks)}


def to_marks(offset: Mapping[str, object]) -> Marks:
    """Read an offset of Spark.

    Raises:
        ConfigurationError: The checkpoint is that of another source.
    """
    marks = {}
    for name, text in offset.items():
        topic, _, number = name.rpartition(":")
        try:
            marks[TopicPartition(topic, int(number))] = Mark.parse(str(text))
        except ValueError as error:
            raise ConfigurationError(
                f"the checkpoint has {name!r}: {text!r}, which is no offset of format "
                "marshal of this version; use a new checkpointLocation",
                setting="checkpointLocation",
            ) from error
    return marks


def stretches(start: Marks, end: Marks) -> list[Stretch]:
    """Return what lies between two offsets, in order."""
    found = []
    for partition, mark in sorted(end.items()):
        before = start.get(partition)
        is_continued = before is not None and before.is_continued_by(mark)
        first = before.next if before is not None and is_continued else mark.begin
        if first < mark.next:
            span = (first, mark.next)
            found.append(Stretch(partition, mark.token, *span, mark.topic_id))
    return found


@attrs.frozen
class Limit:
    """How much one batch takes.

    Attributes:
        most: Most offsets, None = no limit.
        least: Fewest that are worth a batch, None = any.
    """

    most: int | None = None
    least: int | None = None


def within(
    spans: Mapping[TopicPartition, Span], most: int
) -> dict[TopicPartition, int]:
    """Return where each partition ends so that about ``most`` offsets are taken.

    Each gets a share in proportion to what waits there, and at least one offset: none
    is starved by another's backlog.

    Args:
        spans: First offset and end of what waits, by partition.
        most: Most offsets; at least one a partition is taken all the same.
    """
    total = sum(max(0, end - first) for first, end in spans.values())
    if total <= most:
        return {partition: end for partition, (_, end) in spans.items()}
    ends = {}
    for partition, (first, end) in spans.items():
        share = most * max(0, end - first) / total
        whole = math.ceil(share) if share < 1 else math.floor(share)
        ends[partition] = min(end, first + whole)
    return ends


def cut(stretches: Sequence[Stretch], least: int, *, most: int = 0) -> list[Stretch]:
    """Cut stretches so that there are at least ``least`` of them, where they can be.

    Larger ones are cut into more parts. Parts are as long as each other, but for one
    offset, and have ``most`` offsets at most; 0 is no limit.
    """
    if most:
        stretches = [
            part
            for each in stretches
            for part in _parts(each, math.ceil((each.end - each.first) / most))
        ]
    if not stretches or len(stretches) >= least:
        return list(stretches)
    total = sum(each.end - each.first for each in stretches)
    found: list[Stretch] = []
    for each in stretches:
        size = each.end - each.first
        found += _parts(each, min(size, max(1, round(size / total * least))))
    return found


def _parts(stretch: Stretch, count: int) -> list[Stretch]:
    """Cut a stretch into some parts that are as long as each other."""
    size = stretch.end - stretch.first
    edges = [stretch.first + size * at // count for at in range(count + 1)]
    return [stretch._replace(first=first, end=end) for first, end in pairwise(edges)]


@attrs.frozen
class Task:
    """What one task reads; it travels to the executor.

    Attributes:
        partition: Data partition.
        first: First offset.
        end: Where it ends; not read.
        claim: Claim that it is read under; None for a batch read.
        topic_id: Kafka's id of the topic in hex; empty where it is not known.
    """

    partition: TopicPartition
    first: int
    end: int
    claim: "ClaimRef | None" = None
    topic_id: str = ""


class TaskPartition(InputPartition):
    """A task, as Spark carries it; None for a read of nothing."""

    def __init__(self, task: Task | None) -> None:
        super().__init__(None)
        self.task = task
