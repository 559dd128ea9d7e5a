"""Batches of records, and what an application commits."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, Self

import attrs
import msgspec

from kafka_marshal.ports import Record
from kafka_marshal.protocol.types import Token, TopicPartition, seek_count_of


class CommitRange(Protocol):
    """Commits a range of records of a partition, both ends inclusive."""

    def __call__(
        self, partition: tuple[str, int], token: Token | None, *, first: int, last: int
    ) -> None:
        """Commit the range; raises as ``Consumer.commit`` does."""
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
        """Commit every record of the batch; see ``Consumer.commit``."""
        self._commit(
            self.partition, self.token, first=self.first_offset, last=self.last_offset
        )


class CommitToken(msgspec.Struct, frozen=True, gc=False):
    """Identifies a record to commit, without its content; see ``Consumer.commit``.

    It has a few dozen bytes and can be pickled: another process that does the work can
    return it to the process that holds the claim.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        offset: Offset of the record.
        token: Fencing token of the claim under which it was handed out.
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


def _is_same(one: Token | None, other: Token | None) -> bool:
    """Return whether two records are of one claim and of the same seek."""
    if one is other:
        return True
    return one == other and seek_count_of(one) == seek_count_of(other)


class Run(NamedTuple):
    """Consecutive offsets of one partition, claim and seek, both ends inclusive."""

    partition: tuple[str, int]
    token: Token | None
    first: int
    last: int


def runs_of(records: Iterable[Committable]) -> Iterator[Run]:
    """Return the fewest runs with exactly these records, in their order."""
    topic, number, first, last = "", -1, -1, -1
    token: Token | None = None
    for record in records:
        offset = record.offset
        if (
            offset == last + 1
            and record.partition == number
            and record.topic == topic
            and _is_same(record.token, token)
        ):
            last = offset
            continue
        if number >= 0:
            yield Run(partition=(topic, number), token=token, first=first, last=last)
        topic, number, token = record.topic, record.partition, record.token
        first = last = offset
    if number >= 0:
        yield Run(partition=(topic, number), token=token, first=first, last=last)
