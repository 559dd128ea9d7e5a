"""A partition that a consumer reads: its holding and what was fetched."""

from collections.abc import Sequence

from kafka_marshal.ports import DataReader, Record
from kafka_marshal.protocol.types import TopicPartition

from .holding import Holding


class Place:
    """A partition that this consumer reads: its holding and what was fetched."""

    __slots__ = (
        "at",
        "fetched",
        "has_warned",
        "holding",
        "is_in_doubt",
        "is_ready",
        "next_offset",
        "partition",
    )

    def __init__(self, partition: TopicPartition, holding: Holding, start: int) -> None:
        self.partition = partition
        self.holding = holding
        self.next_offset = start
        self.fetched: list[Record] = []
        self.at = 0
        self.has_warned = False
        # Whether its topic is looked up because a position is outside the log.
        self.is_in_doubt = False
        # Whether it stands in the row of those that have something fetched.
        self.is_ready = False

    @property
    def buffered_count(self) -> int:
        """Number of records fetched and not handed out."""
        return len(self.fetched) - self.at

    def add(self, records: Sequence[Record]) -> None:
        """Keep records that follow those fetched before."""
        # A reader may make a record anew each time it is looked at: so each once.
        if self.buffered_count:
            del self.fetched[: self.at]
            self.fetched.extend(records)
        else:
            self.fetched = list(records)
        self.at = 0

    def take(self, count: int) -> list[Record]:
        """Remove and return up to ``count`` fetched records."""
        fetched, at = self.fetched, self.at
        if count >= len(fetched) - at:
            self.drop()
            # What was fetched is handed on as it is: nobody else keeps it.
            return fetched[at:] if at else fetched
        self.at = at + count
        return fetched[at : at + count]

    def drop(self) -> None:
        """Forget what was fetched."""
        self.fetched, self.at = [], 0

    def go_to(self, reader: DataReader, offset: int) -> None:
        """Fetch from ``offset`` on; what was fetched is forgotten."""
        self.drop()
        self.next_offset = offset
        self.read_on(reader, offset)

    def read_on(self, reader: DataReader, offset: int) -> None:
        """Fetch from ``offset`` on, behind what was fetched."""
        holding = self.holding
        reader.seek(
            self.partition,
            offset,
            token=holding.claim.token,
            topic_id=holding.topic_id,
        )

    def put_back(self, reader: DataReader) -> None:
        """Forget what was fetched and not handed out; it can be fetched again."""
        self.go_to(reader, self.next_offset)
