"""Holds the fetched records of a partition, and sizes the next fetch."""

from collections.abc import Sequence

from kafka_marshal.engine.holding import Holding
from kafka_marshal.ports import DataReader, Record, Records, index_from, offset_at
from kafka_marshal.protocol.types import Token, TokenAfterSeek, TopicPartition


class FetchState:
    """A partition that this consumer reads: its holding and its fetched records."""

    __slots__ = (
        "at",
        "fetched",
        "has_warned",
        "holding",
        "is_in_doubt",
        "is_read",
        "is_ready",
        "log_end",
        "next_offset",
        "partition",
        "requested_ms",
        "rest_since_ms",
        "taken_at",
    )

    def __init__(self, partition: TopicPartition, holding: Holding, start: int) -> None:
        self.partition = partition
        self.holding = holding
        self.next_offset = start
        self.fetched: Sequence[Record] = []
        self.at = 0
        self.has_warned = False
        # Whether its topic is being looked up because a position is outside the log.
        self.is_in_doubt = False
        # Whether it is in the dispatcher's queue of states with fetched records.
        self.is_ready = False
        # At most once: local time of the last request for grants.
        self.requested_ms = 0
        # At most once, while it drains: since when nothing granted could be handed out.
        self.rest_since_ms: int | None = None
        # Whether a fetch under this claim has brought records. With at-most-once
        # delivery, the end of the log as of the last look-up after that; 0 before.
        self.is_read = False
        self.log_end = 0
        # For a state in ``Dispatcher.taken``: the first offset that the call in
        # progress has handed out. None if unknown: then nothing is handed out yet.
        self.taken_at: int | None = None

    @property
    def buffered_count(self) -> int:
        """Number of records fetched and not handed out."""
        return len(self.fetched) - self.at

    @property
    def fetched_end(self) -> int:
        """The offset after the fetched records; ``next_offset`` if there are none."""
        if self.buffered_count:
            return offset_at(self.fetched, -1) + 1
        return self.next_offset

    @property
    def token(self) -> Token | None:
        """The token of the records that are fetched now."""
        token, seek_count = self.holding.claim.token, self.holding.seek_count
        if token is None or not seek_count:
            return token
        return TokenAfterSeek.of(token, seek_count)

    def add(self, records: Sequence[Record]) -> None:
        """Append records that follow those fetched before."""
        if not self.buffered_count:
            # Copied, as readers may keep their list, unless it makes records on access.
            is_lazy = isinstance(records, Records)
            self.fetched = records if is_lazy else list(records)
        elif isinstance(self.fetched, list):
            # In place: a copy would visit each record, most of them not in any cache.
            del self.fetched[: self.at]
            self.fetched.extend(records)
        elif not (
            isinstance(self.fetched, Records) and self.fetched.replace(self.at, records)
        ):
            self.fetched = [*self.fetched[self.at :], *records]
        self.at = 0

    def find(self, offset: int) -> int:
        """Return the index of the first fetched record from ``offset`` on."""
        return index_from(self.fetched, offset, start=self.at)

    def take(self, count: int) -> Sequence[Record]:
        """Remove and return up to ``count`` fetched records."""
        fetched, at = self.fetched, self.at
        if count >= len(fetched) - at:
            self.drop()
            # No copy is needed: nothing else refers to this list.
            return fetched[at:] if at else fetched
        self.at = at + count
        return fetched[at : at + count]

    def take_back(self) -> None:
        """Undo the hand-out of records that did not reach the application.

        May be called again if it was interrupted. Called under the engine's lock.
        """
        first, holding = self.taken_at, self.holding
        if first is None:
            return
        self.next_offset = first
        holding.put_back(first)
        self.taken_at = None

    def drop(self) -> None:
        """Drop the fetched records."""
        self.fetched, self.at = [], 0

    def begin(self, reader: DataReader, *, room: int) -> None:
        """Start with records that were fetched before the claim, and fetch the next.

        Args:
            reader: Has the partition assigned.
            room: Most of these records to use; the others are fetched again.
        """
        warm, self.holding.warm_records = self.holding.warm_records, None
        records: Sequence[Record] = ()
        if warm is not None:
            topic_id = self.holding.topic_id
            records = warm.since(self.next_offset, topic_id=topic_id, token=self.token)
        if warm is None or not records or room <= 0:
            self.restart(reader, self.next_offset)
            return
        end = warm.next_offset
        if len(records) > room:
            end, records = offset_at(records, room), records[:room]
        self.drop()
        self.add(records)
        self.seek(reader, end)

    def restart(self, reader: DataReader, offset: int) -> None:
        """Drop the fetched records and fetch from ``offset`` on."""
        self.drop()
        self.next_offset = offset
        self.seek(reader, offset)

    def seek(self, reader: DataReader, offset: int) -> None:
        """Fetch from ``offset`` on and keep the fetched records."""
        holding = self.holding
        reader.seek(
            self.partition,
            offset,
            token=self.token,
            topic_id=holding.topic_id,
        )

    def put_back(self, reader: DataReader) -> None:
        """Drop the records not handed out; they are fetched again later."""
        self.restart(reader, self.next_offset)


SLOW_MS = 20
CALM_READS = 32
FAIR_READ_MS = 100


class Prefetch:
    """Sizes the next read, and schedules reads while enough is fetched.

    Attributes:
        least: Records to read when the application does not wait.
        due_ms: Local time of the next read for partitions without fetched records,
            however many the others have.
    """

    __slots__ = (
        *("_calm", "_is_needed", "_most", "_size", "_waited_ms"),
        *("due_ms", "least"),
    )

    def __init__(self, poll_records: int, most: int, *, is_needed: bool = True) -> None:
        """Start with the size of a poll.

        Args:
            poll_records: Most records that a poll hands out.
            most: Most records that may be fetched and not handed out.
            is_needed: Whether to read more than a poll when the application waits.
        """
        self.least = min(poll_records, most)
        self.due_ms = 0
        self._is_needed = is_needed
        self._most = most
        self._size = self.least
        self._calm = 0
        self._waited_ms = 0

    def most(self, fetched: int) -> int:
        """Return how many records to read when ``fetched`` are buffered."""
        return min(self._size, self._most - fetched)

    def note(self, now_ms: int, *, waited_ms: int, is_found: bool) -> bool:
        """Adapt to the outcome of a read; return whether more records may be ready.

        A read that waited without a result shows nothing by itself: there may be no
        records, or the fetch takes longer than one read. Its wait counts with the next
        result.
        """
        self.due_ms = now_ms + FAIR_READ_MS
        if not self._is_needed:
            return False
        waited_ms += self._waited_ms
        self._waited_ms = 0 if is_found else waited_ms
        if not is_found:
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
