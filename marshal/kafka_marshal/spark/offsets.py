"""What a query remembers in its checkpoint: per partition a claim, and a range of it.

An offset of Spark is a dictionary: ``{"orders:0": "1.0.55 100 240 0 ID"}`` says that
under the claim of that token this query began at offset 100 of the topic with that id,
and that all below 240 is planned. A batch is the difference of two of them.
"""

from collections.abc import Mapping
from typing import NamedTuple, Self

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import Token, TopicPartition


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
