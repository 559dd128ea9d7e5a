"""What a consumer has fetched of a partition, and how far to fetch ahead."""

from collections.abc import Sequence

from kafka_marshal.engine.holding import Holding
from kafka_marshal.ports import DataReader, Record
from kafka_marshal.protocol.types import TopicPartition


class FetchState:
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


SLOW_MS = 20
CALM_READS = 32
LOOK_MS = 100


class Prefetch:
    """The size of the next read, and when it is due although enough is fetched.

    Attributes:
        least: Records to read where nothing has to be waited for.
        due_ms: Local time at which to look for partitions that have nothing
            fetched, whatever others have.
    """

    __slots__ = ("_calm", "_is_needed", "_most", "_size", "due_ms", "least")

    def __init__(self, poll_records: int, most: int, *, is_needed: bool = True) -> None:
        """Begin with what a poll hands out.

        Args:
            poll_records: Most records that a poll hands out.
            most: Most that may be fetched and not handed out.
            is_needed: Whether more than that is to be taken where it is waited for.
        """
        self.least = min(poll_records, most)
        self.due_ms = 0
        self._is_needed = is_needed
        self._most = most
        self._size = self.least
        self._calm = 0

    def most(self, fetched: int) -> int:
        """Return how many records to read, with so many fetched already."""
        return min(self._size, self._most - fetched)

    def note(self, now_ms: int, *, waited_ms: int, is_found: bool) -> bool:
        """Take what a read was like; return whether there may be more at once.

        One that waited without a record says nothing: there was none.
        """
        self.due_ms = now_ms + LOOK_MS
        if not is_found or not self._is_needed:
            return False
        if waited_ms >= SLOW_MS:
            self._size = min(2 * self._size, self._most)
            self._calm = 0
            return self._size > self.least
        self._calm += 1
        if self._calm >= CALM_READS:
            self._size = max(self._size // 2, self.least)
            self._calm = 0
        return waited_ms > 0 and self._size > self.least
