"""Reading exact ranges of one partition after another, as columns.

For tasks that read a range and are done: a reader is kept by its process and lives
through many of them.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from kafka import TopicPartition as KafkaTopicPartition

from kafka_marshal.errors import DeadlineExceeded, PositionError
from kafka_marshal.kafka_io.reader import KafkaDataReader
from kafka_marshal.kafka_io.records import Records
from kafka_marshal.kafka_io.settings import FAST, ConnectionSettings
from kafka_marshal.kafka_io.transport import choose
from kafka_marshal.protocol.types import TopicPartition

# What is handed on at a time. A megabyte stays in the processor's cache while it is
# made, sent and read; ten of them cost twice the time for each byte.
CHUNK_BYTES = 1_048_576
CHUNK_RECORDS = 10_000
# Before anything is known of their size.
FIRST_RECORDS = 1_000
# Beside key and value: what the other columns come to.
_RECORD_BYTES = 50
_LOOKED_AT = 16
POLL_MS = 50
_CLOSE_MS = 5_000

Headers = Sequence[tuple[str, bytes | None]]


class Slice(NamedTuple):
    """Consecutive records of one partition, column by column.

    Attributes:
        offsets: Offsets, growing.
        times_ms: Timestamps in epoch milliseconds.
        kinds: A ``TimestampType`` value each.
        keys: Keys.
        values: Values.
        headers: Headers, None where they were not asked for.
    """

    offsets: Sequence[int]
    times_ms: Sequence[int]
    kinds: Sequence[int]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Headers] | None


class SliceReader(Protocol):
    """Reads ranges, one at a time, on one thread."""

    def read(
        self,
        partition: TopicPartition,
        span: tuple[int, int],
        *,
        timeout_ms: int,
        with_headers: bool,
    ) -> Iterator[Slice]:
        """Read every record of a range, in order; offsets without one are passed.

        Args:
            partition: Data partition.
            span: First offset, and the end, which is not read.
            timeout_ms: How long to wait for the next record, or for the proof that
                there is none.
            with_headers: Whether to return headers.

        Raises:
            PositionError: The range is not within the log.
            DeadlineExceeded: Nothing came in time.
            CoordinationError: The cluster could not be read.
        """
        ...

    def close(self) -> None:
        """Let go of every resource. Idempotent."""
        ...


def open_slices(
    settings: ConnectionSettings, *, isolation_level: str, client_rack: str = ""
) -> SliceReader:
    """Return a reader of ranges over the transport that is chosen.

    Raises:
        ConfigurationError: The transport that is asked for cannot be used.
    """
    if choose(settings).name == FAST:
        from kafka_marshal.kafka_io.fast.slices import FastSliceReader

        return FastSliceReader(
            settings, isolation_level=isolation_level, client_rack=client_rack
        )
    return KafkaSliceReader(
        settings, isolation_level=isolation_level, client_rack=client_rack
    )


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from looking at records that are about to go.

    A chunk is thousands of objects that live for milliseconds and hold no cycles.
    Looking through them, and through all else that a worker of Spark has loaded, takes
    longer than fetching them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def chunk_like(rows: Slice) -> int:
    """Return how many records like these make a chunk, by the size of some of them."""
    step = max(1, len(rows.values) // _LOOKED_AT)
    some = [*rows.keys[::step], *rows.values[::step]]
    size = 2 * sum(len(each or b"") for each in some) // len(some) + _RECORD_BYTES
    return max(1, min(CHUNK_RECORDS, CHUNK_BYTES // size))


class Patience:
    """How long to wait on without a sign of progress."""

    def __init__(self, partition: TopicPartition, end: int, timeout_ms: int) -> None:
        """Begin to wait."""
        self._partition = partition
        self._end = end
        self._timeout_ms = timeout_ms
        self._since = time.monotonic()

    def renew(self) -> None:
        """Note progress."""
        self._since = time.monotonic()

    def check(self, at: int, client: str) -> None:
        """Raise once nothing has come for too long.

        Raises:
            DeadlineExceeded: Now is that time.
        """
        if (time.monotonic() - self._since) * 1000 < self._timeout_ms:
            return
        raise DeadlineExceeded(
            f"{self._partition} is to be read up to offset {self._end}, and nothing "
            f"came from offset {at} on within {self._timeout_ms} ms ({client}); check "
            "that brokers can be reached from where this task runs, and with "
            "read_committed that no transaction is left open"
        )


class KafkaSliceReader:
    """``SliceReader`` over kafka-python."""

    def __init__(
        self, settings: ConnectionSettings, *, isolation_level: str, client_rack: str
    ) -> None:
        """Remember how to connect; the first range does."""
        self._reader = _Reader(
            settings, isolation_level=isolation_level, client_rack=client_rack
        )

    def read(
        self,
        partition: TopicPartition,
        span: tuple[int, int],
        *,
        timeout_ms: int,
        with_headers: bool,
    ) -> Iterator[Slice]:
        """Read every record of a range; see ``SliceReader``."""
        at, end = span
        reader = self._reader
        reader.assign([partition])
        reader.seek(partition, at)
        patience = Patience(partition, end, timeout_ms)
        while at < end:
            with uncollected():
                sources = reader.take(POLL_MS, min(CHUNK_RECORDS, end - at))
                sound = [each for each in sources if at <= each.offset < end]
                rows = _kafka_columns(sound, with_headers=with_headers)
                del sources, sound
            if rows is not None:
                yield rows
            # It passes over what holds no record, which is the proof of it.
            ahead = reader.place_of(partition)
            if ahead > at:
                at = ahead
                patience.renew()
            else:
                patience.check(at, "kafka-python")
        # Nothing more of it is wanted.
        reader.assign([])

    def close(self) -> None:
        """Let go of every resource. Idempotent."""
        self._reader.close(_CLOSE_MS)


class _Reader(KafkaDataReader):
    """A reader whose records are taken as kafka-python made them."""

    def take(self, timeout_ms: int, most: int) -> Sequence[Any]:
        """Return records of the one partition that is assigned."""
        found = self.poll(timeout_ms, most)
        for records in found.values():
            assert isinstance(records, Records)
            return records.sources
        return ()

    def place_of(self, partition: TopicPartition) -> int:
        """Return the next offset that a poll looks at, gaps passed."""
        known = self._places.next[partition] or 0
        if self._consumer is None:
            return known
        place = self._consumer.position(KafkaTopicPartition(*partition), timeout_ms=0)
        return max(known, place or 0)


_FIELDS: tuple[Callable[[Any], Any], ...] = tuple(
    map(attrgetter, ("offset", "timestamp", "timestamp_type", "key", "value"))
)


def _kafka_columns(sources: Sequence[Any], *, with_headers: bool) -> Slice | None:
    if not sources:
        return None
    offsets, times_ms, kinds, keys, values = (
        list(map(field, sources)) for field in _FIELDS
    )
    headers = [each.headers or () for each in sources] if with_headers else None
    return Slice(offsets, times_ms, kinds, keys, values, headers)


class Slices:
    """The readers of this process, one for each way to connect, made when needed.

    A process that reads one range after another, as Spark's workers do, keeps its
    connections. A forked child makes its own.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._readers: dict[tuple[object, ...], SliceReader] = {}
        self._pid = os.getpid()

    def reader(
        self, settings: ConnectionSettings, *, isolation_level: str, client_rack: str
    ) -> SliceReader:
        """Return the reader for some settings."""
        if self._pid != os.getpid():
            # PROTOCOL 1.7: nothing inherits.
            self._readers, self._pid = {}, os.getpid()
        options = tuple(sorted((k, repr(v)) for k, v in settings.options.items()))
        key = (
            settings.bootstrap_servers,
            options,
            settings.transport,
            isolation_level,
            client_rack,
        )
        found = self._readers.get(key)
        if found is None:
            found = open_slices(
                settings, isolation_level=isolation_level, client_rack=client_rack
            )
            self._readers[key] = found
        return found

    def drop(self) -> None:
        """Close them all: whatever is wrong with one, a new one knows nothing of it."""
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.close()


def outside(
    partition: TopicPartition, span: tuple[int, int], *, log: tuple[int, int]
) -> PositionError:
    """Return the error for a range that is not within its log any more."""
    return PositionError(
        f"offsets {span[0]} to {span[1] - 1} of {partition} are to be read, but its "
        f"log has {log[0]} to {log[1] - 1}",
        partition=partition,
        requested=span[0],
        log_start=log[0],
        log_end=log[1],
    )
