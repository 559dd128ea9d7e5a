"""Reading exact ranges of one partition after another, as columns.

For tasks that read a range and are done: a reader is kept by its process and lives
through many of them.
"""

import os
import time
from collections.abc import Iterator, Sequence

from kafka import TopicPartition as KafkaTopicPartition

from kafka_marshal.collecting import uncollected
from kafka_marshal.errors import DeadlineExceeded, PositionError, UnknownTopicId
from kafka_marshal.kafka_io.columns import Slice
from kafka_marshal.kafka_io.fetched import (
    CHUNK_RECORDS,
    Aim,
    Fetched,
    as_columns,
    from_records,
    is_known,
)
from kafka_marshal.kafka_io.inplace import read_in_place
from kafka_marshal.kafka_io.reader import KafkaDataReader
from kafka_marshal.kafka_io.records import Records
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.untyped import Untyped
from kafka_marshal.protocol.types import TopicPartition

POLL_MS = 50
# How long nothing comes before a log is asked whether it still reaches the range.
LOOK_MS = 1_000
_CLOSE_MS = 5_000


class TopicReplaced(PositionError):
    """The topic of a range was deleted, and another of its name was created."""


class Patience:
    """How long to wait on without a sign of progress."""

    def __init__(self, partition: TopicPartition, end: int, timeout_ms: int) -> None:
        """Begin to wait."""
        self._partition = partition
        self._end = end
        self._timeout_ms = timeout_ms
        self._since = self._looked = time.monotonic()

    def renew(self) -> None:
        """Note progress."""
        self._since = self._looked = time.monotonic()

    def is_look_due(self) -> bool:
        """Return whether nothing has come for another ``LOOK_MS``."""
        now = time.monotonic()
        is_due = (now - self._looked) * 1000 >= LOOK_MS
        if is_due:
            self._looked = now
        return is_due

    def check(self, at: int) -> None:
        """Raise once nothing has come for too long.

        Raises:
            DeadlineExceeded: Now is that time.
        """
        if (time.monotonic() - self._since) * 1000 < self._timeout_ms:
            return
        raise DeadlineExceeded(
            f"{self._partition} is to be read up to offset {self._end}, and nothing "
            f"came from offset {at} on within {self._timeout_ms} ms; check "
            "that brokers can be reached from where this task runs, and with "
            "read_committed that no transaction is left open"
        )


class SliceReader:
    """Reads ranges, one at a time, on one thread, by kafka-python.

    kafka-python fetches, and does not look at records: what a fetch brings becomes
    columns at once. This serves every transport. librdkafka hands on an object for
    each record, which costs more than all that is done here. Of a release of
    kafka-python whose inner parts are not known, its records are taken.
    """

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
        topic_id: str = "",
    ) -> Iterator[Slice]:
        """Read every record of a range, in order; offsets without one are passed.

        Args:
            partition: Data partition.
            span: First offset, and the end, which is not read.
            timeout_ms: How long to wait for the next record, or for the proof that
                there is none.
            with_headers: Whether to return headers.
            topic_id: Kafka's id of the topic in hex; empty for any of the name.

        Raises:
            TopicReplaced: The topic has another id.
            PositionError: The range is not within the log.
            DeadlineExceeded: Nothing came in time.
            CoordinationError: The cluster could not be read.
        """
        at, end = span
        if at >= end:
            return
        reader = self._reader
        reader.aim(partition, span, topic_id=topic_id)
        patience = Patience(partition, end, timeout_ms)
        while at < end:
            for fetched in reader.take(POLL_MS):
                for group in fetched.groups:
                    with uncollected():
                        rows = group((at, end), with_headers=with_headers)
                    if rows is not None:
                        yield rows
            # It passes over what holds no record, which is the proof of it.
            ahead = reader.place_of(partition)
            if ahead > at:
                at = ahead
                patience.renew()
            else:
                if patience.is_look_due():
                    reader.require_reach(partition, (at, end))
                patience.check(at)
        # Nothing more of it is wanted.
        reader.assign([])

    def close(self) -> None:
        """Let go of every resource. Idempotent."""
        self._reader.close(_CLOSE_MS)


class _Reader(KafkaDataReader):
    """A reader that takes what a fetch brings as a whole, up to the end of a range."""

    def __init__(
        self, settings: ConnectionSettings, *, isolation_level: str, client_rack: str
    ) -> None:
        super().__init__(
            settings, isolation_level=isolation_level, client_rack=client_rack
        )
        self._aim = Aim()
        self._topic_id = ""
        self._hands_on_fetches = is_known()

    def aim(
        self, partition: TopicPartition, span: tuple[int, int], *, topic_id: str = ""
    ) -> None:
        """Read this range next."""
        self._topic_id = topic_id
        self.assign([partition])
        wanted = bytes.fromhex(topic_id) or None
        self.seek(partition, span[0], topic_id=wanted)
        self._aim.take(span)

    def take(self, timeout_ms: int) -> Sequence[Fetched]:
        """Return what one fetch brought, if there is one."""
        most = 1 if self._hands_on_fetches else CHUNK_RECORDS
        try:
            found = self.poll(timeout_ms, most)
        except UnknownTopicId as error:
            # It may be that this broker does not know the topic yet.
            self._require_topic(TopicPartition(*error.partition))
            return ()
        for records in found.values():
            assert isinstance(records, Records)
            sources = records.sources
            return sources if self._hands_on_fetches else [from_records(sources)]
        return ()

    def place_of(self, partition: TopicPartition) -> int:
        """Return the next offset that a poll looks at, gaps passed.

        Raises:
            PositionError: The log was cut off below it.
        """
        known = self._places.next[partition] or 0
        if self._consumer is None:
            return known
        try:
            place = self._consumer.position(
                KafkaTopicPartition(*partition), timeout_ms=0
            )
        except Exception as error:
            raise self._told(error) from error
        return max(known, place or 0)

    def require_reach(self, partition: TopicPartition, span: tuple[int, int]) -> None:
        """Raise if the log ends within a range, so that the rest never comes.

        Raises:
            TopicReplaced: The topic has another id.
            PositionError: It does.
        """
        self._require_topic(partition)
        at, end = span
        if self.ends().get(partition, end) >= end:
            return
        # What a follower says may be late: the leader is asked.
        error = self._outside(KafkaTopicPartition(*partition), at, "is to be read on")
        if -1 < error.log_end < end:
            raise error

    def _require_topic(self, partition: TopicPartition) -> None:
        if self._consumer is None or not self._topic_id:
            return
        cluster = self._consumer._cluster  # noqa: SLF001 - there is no other way in
        known = cluster.topic_id(partition.topic)
        if known is not None and known.hex != self._topic_id:
            at = self._places.next[partition] or 0
            raise TopicReplaced(
                f"topic {partition.topic} was deleted and created again: its id was "
                f"{self._topic_id} and is {known.hex}",
                partition=partition,
                requested=at,
                log_start=-1,
                log_end=-1,
            )

    def _new_consumer(self) -> Untyped:
        consumer = super()._new_consumer()
        if self._hands_on_fetches:
            read_in_place(consumer)
            as_columns(consumer, self._aim)
        return consumer


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
            isolation_level,
            client_rack,
        )
        found = self._readers.get(key)
        if found is None:
            found = SliceReader(
                settings, isolation_level=isolation_level, client_rack=client_rack
            )
            self._readers[key] = found
        return found

    def drop(self) -> None:
        """Close them all: whatever is wrong with one, a new one knows nothing of it."""
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.close()
