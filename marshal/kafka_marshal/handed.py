"""What the application is handed, and gives back as processed."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, Self

import attrs
import msgspec

from kafka_marshal.ports import Record
from kafka_marshal.protocol.types import Token, TopicPartition


class CommitRange(Protocol):
    """Notes what was handed out of a partition as processed, both ends inclusive."""

    def __call__(
        self, partition: tuple[str, int], token: Token | None, *, first: int, last: int
    ) -> None:
        """Note it; see ``Consumer.commit`` for what it raises."""
        ...


@attrs.frozen
class Batch:
    """Records of one partition, handed out together under one claim.

    Attributes:
        partition: Data partition.
        records: At least one record, in offset order.
        token: Fencing token of the claim.
    """

    partition: TopicPartition
    records: tuple[Record, ...]
    token: Token
    _commit: CommitRange

    @property
    def first_offset(self) -> int:
        """Offset of the first record."""
        return self.records[0].offset

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return self.records[-1].offset

    def commit(self) -> None:
        """Note every record of the batch as processed; see ``Consumer.commit``."""
        self._commit(
            self.partition, self.token, first=self.first_offset, last=self.last_offset
        )


class CommitToken(msgspec.Struct, frozen=True, gc=False):
    """What committing a record takes, without the record; see ``Consumer.commit``.

    A few dozen bytes, which can be pickled: whatever does the work may hand it
    back to the process that has the claim, long after the record was dropped.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        offset: Offset of the record.
        token: Fencing token of the claim that it was handed out under.
    """

    topic: str
    partition: int
    offset: int
    token: Token | None

    @classmethod
    def of(cls, record: Record) -> Self:
        """Return the token of a record that was handed out."""
        return cls(record.topic, record.partition, record.offset, record.token)


Committable = Record | CommitToken


class Run(NamedTuple):
    """Offsets of one partition and claim that follow each other, both ends in it."""

    partition: tuple[str, int]
    token: Token | None
    first: int
    last: int


def runs_of(records: Iterable[Committable]) -> Iterator[Run]:
    """Return the fewest runs that hold exactly these records, in their order."""
    topic, number, first, last = "", -1, -1, -1
    token: Token | None = None
    for record in records:
        offset = record.offset
        if (
            offset == last + 1
            and record.partition == number
            and record.token == token
            and record.topic == topic
        ):
            last = offset
            continue
        if number >= 0:
            yield Run((topic, number), token, first, last)
        topic, number, token = record.topic, record.partition, record.token
        first = last = offset
    if number >= 0:
        yield Run((topic, number), token, first, last)
