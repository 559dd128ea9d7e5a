"""A partition that a consumer reads: its holding and what was fetched."""

from collections.abc import Sequence

from kafka_marshal.ports import DataReader, Record
from kafka_marshal.protocol.types import TopicPartition

from .holding import Holding


class Place:
    """A partition that this consumer reads: its holding and what was fetched."""

    __slots__ = ("at", "fetched", "has_warned", "holding", "next_offset", "partition")

    def __init__(self, partition: TopicPartition, holding: Holding, start: int) -> None:
        self.partition = partition
        self.holding = holding
        self.next_offset = start
        self.fetched: Sequence[Record] = ()
        self.at = 0
        self.has_warned = False

    @property
    def buffered_count(self) -> int:
        """Number of records fetched and not handed out."""
        return len(self.fetched) - self.at

    def take(self, count: int) -> Sequence[Record]:
        """Remove and return up to ``count`` fetched records."""
        taken = self.fetched[self.at : self.at + count]
        self.at += len(taken)
        if self.at >= len(self.fetched):
            self.drop()
        return taken

    def drop(self) -> None:
        """Forget what was fetched."""
        self.fetched, self.at = (), 0

    def go_to(self, reader: DataReader, offset: int) -> None:
        """Fetch from ``offset`` on; what was fetched is forgotten."""
        self.drop()
        self.next_offset = offset
        reader.seek(self.partition, offset, token=self.holding.claim.token)

    def put_back(self, reader: DataReader) -> None:
        """Forget what was fetched and not handed out; it can be fetched again."""
        self.go_to(reader, self.next_offset)
