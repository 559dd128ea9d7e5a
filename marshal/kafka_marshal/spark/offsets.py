"""What a query remembers in its checkpoint: per partition a claim, and a range of it.

An offset of Spark is a dictionary: ``{"orders:0": "1.0.55 100 240"}`` says that under
the claim of that token this query began at offset 100, and that all below 240 is
planned. A batch is the difference of two of them.
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
    """

    token: Token
    begin: int
    next: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str`` wrote.

        Raises:
            ValueError: It is something else.
        """
        token, begin, end = text.split(" ")
        return cls(Token.parse(token), int(begin), int(end))

    def __str__(self) -> str:
        return f"{self.token} {self.begin} {self.next}"


Marks = dict[TopicPartition, Mark]


class Stretch(NamedTuple):
    """A range of one partition, ``first <= o < end``, and its claim, if any."""

    partition: TopicPartition
    token: Token | None
    first: int
    end: int


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
                "marshal; use a new checkpointLocation for this source",
                setting="checkpointLocation",
            ) from error
    return marks


def stretches(start: Marks, end: Marks) -> list[Stretch]:
    """Return what lies between two offsets, in order."""
    found = []
    for partition, mark in sorted(end.items()):
        before = start.get(partition)
        is_same = before is not None and before.token == mark.token
        first = before.next if before is not None and is_same else mark.begin
        if first < mark.next:
            found.append(Stretch(partition, mark.token, first, mark.next))
    return found
