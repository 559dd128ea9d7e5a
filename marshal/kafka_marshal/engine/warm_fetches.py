"""Fetches records of partitions that this client warms up for (PROTOCOL 9.5).

While the application warms up, and until the claim, a thread fetches the offered
partition from the owner's position on. No record is handed out before the claim is
accepted. Then the records from the claim's position on count as fetched under it.
Records that do not fit its position or topic id are dropped and fetched again.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from weakref import WeakSet

import attrs

from kafka_marshal.config import ConsumerConfig
from kafka_marshal.errors import MarshalError
from kafka_marshal.ports import (
    Background,
    DataLog,
    DataReader,
    Pending,
    Record,
    index_from,
    joined_records,
    offset_at,
)
from kafka_marshal.protocol.types import Token, TopicPartition

FETCH_MS = 100
FETCH_RECORDS = 500
# Pause after a failed fetch.
REST_MS = 1_000
# Memory that a fetched record takes beside its key, value and headers.
RECORD_BYTES = 256


@attrs.frozen(kw_only=True, eq=False)
class WarmRecords:
    """Records of a partition that were fetched before its claim.

    Attributes:
        topic_id: Kafka's id of the topic.
        first: First offset of a range of which every record is here.
        next_offset: End of that range, exclusive.
        chunks: The records in offset order, without a token; some may be below
            ``first``.
    """

    topic_id: bytes
    first: int
    next_offset: int
    chunks: Sequence[Sequence[Record]]

    def since(
        self, position: int, *, topic_id: bytes | None, token: Token | None
    ) -> Sequence[Record]:
        """Return the records from a position on, under the token of a claim.

        Returns no record if the claim is of another topic, or the position is outside
        of the range.
        """
        if topic_id != self.topic_id:
            return ()
        if not self.first <= position < self.next_offset:
            return ()
        parts = [each for each in self.chunks if offset_at(each, -1) >= position]
        if not parts:
            return ()
        parts[0] = parts[0][index_from(parts[0], position) :]
        return joined_records(parts, token)


@attrs.define(kw_only=True, eq=False)
class _Range:
    """The fetched records of a partition, up to a limit of bytes.

    Attributes:
        first: Position of the owner; above ``next_offset`` while the fetch lags.
        next_offset: Offset to fetch next.
        size: Bytes of its records.
        is_full: Whether the next record has no room, or cannot be fetched, until the
            position moves.
    """

    topic_id: bytes
    first: int
    next_offset: int
    bytes_max: int
    chunks: deque[tuple[Sequence[Record], int]] = attrs.field(factory=deque)
    size: int = 0
    is_full: bool = False

    def reaches(self, topic_id: bytes, position: int) -> bool:
        """Return whether a position is fetched, or soon will be."""
        is_near = self.first <= position <= self.next_offset + FETCH_RECORDS
        return topic_id == self.topic_id and is_near

    def move_to(self, position: int) -> None:
        """Drop records below a position; fetch more once half of the room is free."""
        if position == self.first:
            return
        self.first = position
        while self.chunks and offset_at(self.chunks[0][0], -1) < position:
            self.size -= self.chunks.popleft()[1]
        if self.is_full and self.size <= self.bytes_max // 2:
            self.is_full = False
            if not self.chunks:
                self.next_offset = max(self.next_offset, position)

    def add(self, records: Sequence[Record], end: int) -> None:
        """Append records that were fetched up to ``end``, as many as have room."""
        if records and offset_at(records, 0) < self.first:
            records = records[index_from(records, self.first) :]
        count, before = 0, self.size
        for record in records:
            size = _size_of(record)
            if self.size + size > self.bytes_max:
                self.is_full = True
                end = record.offset
                break
            count, self.size = count + 1, self.size + size
        if count:
            self.chunks.append((records[:count], self.size - before))
        self.next_offset = end

    def give_up(self) -> None:
        """Drop everything, and fetch nothing until the position moves."""
        self.chunks.clear()
        self.size, self.next_offset, self.is_full = 0, self.first, True


# The range of each partition, and the offset at which the reader continues.
_Aims = Mapping[TopicPartition, tuple[_Range, int]]


def _size_of(record: Record) -> int:
    size = RECORD_BYTES + len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += len(name) + len(value or b"")
    return size


class WarmFetcher:
    """Fetches the partitions that one consumer warms up for.

    Its reader is used by one background call at a time, which ends when nothing more
    has arrived or everything is full; each ``follow`` starts the next one. No method
    blocks; ``follow`` is called under the engine's lock, the others on any thread.
    """

    __slots__ = (
        *("_aimed", "_background", "_bytes_max", "_call", "_is_closed", "_is_running"),
        *("_lock", "_observe", "_open_reader", "_ranges", "_reader", "_rest_until_ms"),
        "_taken",
    )

    def __init__(
        self,
        *,
        open_reader: Callable[[], DataReader],
        background: Background,
        bytes_max: int,
        observe: Callable[[str, Mapping[str, object]], None],
    ) -> None:
        """Begin without partitions.

        Args:
            open_reader: Opens a reader, with the consumer's isolation level.
            background: Runs the calls, one at a time.
            bytes_max: Most bytes to hold of a partition.
            observe: Receives the event ``warm_fetch_failed``.
        """
        self._open_reader = open_reader
        self._background = background
        self._bytes_max = bytes_max
        self._observe = observe
        self._lock = threading.Lock()
        self._ranges: dict[TopicPartition, _Range] = {}
        # Records of claimed partitions that are not used yet and still take memory.
        self._taken: WeakSet[WarmRecords] = WeakSet()
        self._call: Pending[None] | None = None
        self._is_running = False
        self._is_closed = False
        self._rest_until_ms = 0
        self._reader: DataReader | None = None
        self._aimed: _Aims = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of the records that are fetched and not claimed."""
        with self._lock:
            return sum(each.size for each in self._ranges.values())

    def follow(
        self,
        partition: TopicPartition,
        *,
        topic_id: bytes | None,
        position: int | None,
        most: int,
        now_ms: int,
    ) -> None:
        """Fetch a partition from a position on, and drop what lies below.

        Args:
            partition: The partition that is offered.
            topic_id: Kafka's id of the topic; None fetches nothing, since records of
                an earlier topic of that name could not be distinguished.
            position: The next offset to process; None fetches nothing.
            most: Most partitions to hold records of; above it nothing is fetched.
            now_ms: Local time.
        """
        with self._lock:
            if self._is_closed:
                return
            found = self._ranges.get(partition)
            if topic_id is None or position is None:
                self._ranges.pop(partition, None)
            elif found is not None and found.reaches(topic_id, position):
                found.move_to(position)
            elif found is not None or len(self._ranges) + len(self._taken) < most:
                self._ranges[partition] = _Range(
                    topic_id=topic_id,
                    first=position,
                    next_offset=position,
                    bytes_max=self._bytes_max,
                )
            is_wanted = not all(each.is_full for each in self._ranges.values())
        if self._may_call(now_ms) and is_wanted:
            self._call = self._background.submit(self._run)

    def _may_call(self, now_ms: int) -> bool:
        """Return whether no call is pending, and none has just failed."""
        call = self._call
        if call is not None:
            if not call.done():
                return False
            self._call = None
            error = call.exception()
            if error is not None:
                self._rest_until_ms = now_ms + REST_MS
                self._observe("warm_fetch_failed", {"error": error})
        return now_ms >= self._rest_until_ms

    def take(self, partition: TopicPartition) -> WarmRecords | None:
        """Return and forget the records fetched of a partition that was claimed."""
        with self._lock:
            found = self._ranges.pop(partition, None)
            taken = None
            if found is not None and found.chunks:
                taken = WarmRecords(
                    topic_id=found.topic_id,
                    first=found.first,
                    next_offset=found.next_offset,
                    chunks=[records for records, _ in found.chunks],
                )
                self._taken.add(taken)
            reader = self._idle_reader()
        _close(reader)
        return taken

    def end(self, partition: TopicPartition) -> None:
        """Drop a partition that is not offered any more."""
        with self._lock:
            self._ranges.pop(partition, None)
            reader = self._idle_reader()
        _close(reader)

    def close(self) -> None:
        """Drop everything. Idempotent; a call that runs ends by itself."""
        with self._lock:
            self._is_closed = True
            self._ranges.clear()
            reader = self._idle_reader()
        _close(reader)
        self._background.close(0)

    def _idle_reader(self) -> DataReader | None:
        """Remove and return a reader that is no longer used; called with the lock."""
        if self._is_running or self._ranges:
            return None
        reader, self._reader = self._reader, None
        self._aimed = {}
        return reader

    # --- the background call

    def _run(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_running = True
        try:
            while self._fetch():
                pass
        finally:
            with self._lock:
                self._is_running = False
                reader = self._idle_reader()
            _close(reader)

    def _fetch(self) -> bool:
        """Fetch once; return whether there is probably more."""
        with self._lock:
            aims = {
                partition: (found, found.next_offset)
                for partition, found in self._ranges.items()
                if not found.is_full
            }
        if not aims:
            return False
        try:
            if self._reader is None:
                self._reader = self._open_reader()
            self._aim(self._reader, aims)
            fetched = self._reader.poll(FETCH_MS, FETCH_RECORDS)
            self._store(fetched, self._reader.positions(), aims)
        except MarshalError as error:
            self._on_error(error, aims)
            return False
        return sum(map(len, fetched.values())) >= FETCH_RECORDS

    def _aim(self, reader: DataReader, aims: _Aims) -> None:
        # After an error the reader's offsets are unknown: then all are set again.
        before, self._aimed = self._aimed, {}
        if aims.keys() != before.keys():
            reader.assign(list(aims))
        for partition, (found, position) in aims.items():
            if before.get(partition) != (found, position):
                reader.seek(partition, position, topic_id=found.topic_id)

    def _store(
        self,
        fetched: Mapping[TopicPartition, Sequence[Record]],
        reached: Mapping[TopicPartition, int],
        aims: _Aims,
    ) -> None:
        aimed = {}
        with self._lock:
            for partition, (found, begin) in aims.items():
                if self._ranges.get(partition) is not found:
                    continue  # no longer offered, or fetched from another offset
                end = max(begin, reached.get(partition, begin))
                found.add(fetched.get(partition, ()), end)
                if not found.is_full:
                    aimed[partition] = (found, end)
        self._aimed = aimed

    def _on_error(self, error: MarshalError, aims: _Aims) -> None:
        """Drop the partition that an error names: it is fetched after the claim.

        If the error names none and cannot be retried, drop all.

        Raises:
            MarshalError: The error names no partition.
        """
        named = getattr(error, "partition", None)
        found = list(_named(aims, named))
        if found:
            self._observe("warm_fetch_failed", {"partition": named, "error": error})
        elif not error.retriable:
            found = [each for each, _ in aims.values()]
        with self._lock:
            for each in found:
                each.give_up()
        if named is None:
            raise error


def new_fetcher(
    config: ConsumerConfig,
    *,
    data: DataLog,
    background: Background,
    observe: Callable[[str, Mapping[str, object]], None],
) -> WarmFetcher | None:
    """Return the fetcher of a consumer that warms up, None if it fetches nothing."""
    if not config.warm_bytes:
        return None
    return WarmFetcher(
        open_reader=partial(data.reader, isolation_level=config.isolation_level),
        background=background,
        bytes_max=config.warm_bytes,
        observe=observe,
    )


def _named(aims: _Aims, partition: tuple[str, int] | None) -> Iterator[_Range]:
    for place, (found, _) in aims.items():
        if place == partition:
            yield found


def _close(reader: DataReader | None) -> None:
    if reader is not None:
        reader.close(0)
