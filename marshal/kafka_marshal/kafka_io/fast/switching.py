"""The data log over librdkafka, whose readers read a backlog over kafka-python.

librdkafka makes an object for each record, which takes longer than everything else if
there are many small ones. ``KafkaDataReader`` leaves records in the fetched bytes, but
each of its fetches takes most of a millisecond, which is much for a few records. So it
reads while records are small, partitions are far behind the ends of their logs, and its
fetches return many records; otherwise librdkafka reads.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

from kafka_marshal.errors import MarshalError
from kafka_marshal.kafka_io.data import KafkaDataLog
from kafka_marshal.kafka_io.fast.reader import FastDataReader
from kafka_marshal.kafka_io.positions import Positions
from kafka_marshal.kafka_io.reader import KafkaDataReader
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.native import compiled
from kafka_marshal.outgoing import TransactionalWriter
from kafka_marshal.ports import READ_UNCOMMITTED, DataReader, Record, column_of
from kafka_marshal.protocol.types import Token, TopicPartition

_LOGGER = logging.getLogger(__name__)
# Least backlog, in records, that is read over kafka-python. To connect takes as long as
# it saves for some 200,000 records.
BACKLOG = 200_000
# Larger values, on average, take as long with either reader; records to average.
SMALL_BYTES, SIZED = 2_048, 16
# librdkafka reads again after FEW_POLLS polls with fewer records than this on average.
FEW_RECORDS, FEW_POLLS = 2_000, 8
# Time between two checks of the backlog: at least, for each partition, and after
# librdkafka has begun to read again.
LOOK_S, LOOK_EACH_S, REST_S = 0.1, 0.001, 30.0
# The part of this time between two checks while the other reader connects.
CONNECTING_PART = 0.05


def can_switch(settings: ConnectionConfig) -> bool:
    """Return whether kafka-python reads a backlog faster over a connection.

    It does not without the compiled functions; over TLS it is not known to.
    """
    protocol = str(settings.client_config().get("security_protocol", ""))
    return compiled is not None and "SSL" not in protocol.upper()


class SwitchingReader(DataReader):
    """Two readers, one of them in use. One thread at a time.

    The reader in use has the positions. A switch moves them to the other reader, which
    then fetches again the records that the first one held and had not returned.

    Args:
        settings: Connection.
        isolation_level: ``read_uncommitted`` or ``read_committed``.
    """

    fetches_ahead = True

    def __init__(
        self, settings: ConnectionConfig, *, isolation_level: str = READ_UNCOMMITTED
    ) -> None:
        self._new_bulk = partial(
            KafkaDataReader,
            settings,
            isolation_level=isolation_level,
        )
        self._steady = FastDataReader(settings, isolation_level=isolation_level)
        self._bulk: KafkaDataReader | None = None
        self._reader: DataReader = self._steady
        # Assignment, tokens, topic ids and pauses; the reader in use has the offsets.
        self._positions = Positions()
        self._can_switch = True
        self._look_s = 0.0
        self._are_small = False
        # Polls since the last check that returned all records there were, and the
        # number of these records.
        self._polls = self._records = 0

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Make this the exact set of partitions; see ``ports.DataReader``."""
        self._reader.assign(partitions)
        self._positions.assign(partitions)

    def seek(
        self,
        partition: TopicPartition,
        offset: int,
        *,
        token: Token | None = None,
        topic_id: bytes | None = None,
    ) -> None:
        """Continue at ``offset``; see ``ports.DataReader``."""
        self._reader.seek(partition, offset, token=token, topic_id=topic_id)
        self._positions.seek(partition, offset, token=token, topic_id=topic_id)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop fetching these until resumed; positions and buffers are kept."""
        self._reader.pause(partitions)
        self._positions.pause(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Undo ``pause``; unknown or running partitions are left alone."""
        self._reader.resume(partitions)
        self._positions.resume(partitions)

    def poll(
        self, timeout_ms: int, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Return up to ``max_records`` records; see ``ports.DataReader``."""
        if self._can_switch:
            self._look()
        found = self._reader.poll(timeout_ms, max_records)
        if found and self._bulk is self._reader:
            count = sum(map(len, found.values()))
            if count < max_records:  # else there may be more
                self._polls += 1
                self._records += count
        elif found and not self._are_small:
            self._are_small = _are_small(found)
        return found

    def positions(self) -> Mapping[TopicPartition, int]:
        """Return the next offset of each partition; see ``ports.DataReader``."""
        return self._reader.positions()

    def ends(self) -> Mapping[TopicPartition, int]:
        """Return the log ends known from fetches; see ``ports.DataReader``."""
        return self._reader.ends()

    def close(self, timeout_ms: int) -> None:
        """Close every resource. Idempotent."""
        self._can_switch = False
        if self._bulk is not None:
            self._bulk.close(0)
        self._steady.close(timeout_ms)

    # --- switching

    def _look(self) -> None:
        """Switch to the other reader if it is better now."""
        if self._bulk is self._reader:
            if self._polls >= FEW_POLLS:
                if self._records < FEW_RECORDS * self._polls:
                    self._return()
                self._polls = self._records = 0
            return
        now_s = time.monotonic()
        if not self._are_small or now_s < self._look_s:
            return
        self._are_small = False
        wait_s = max(LOOK_S, LOOK_EACH_S * len(self._positions.next))
        self._look_s = now_s + wait_s
        if self._backlog() < BACKLOG:
            return
        if not self._is_connected():
            self._look_s = now_s + CONNECTING_PART * wait_s
        elif self._bulk is not None and self._use(self._bulk):
            self._steady.assign([])
            self._steady.disconnect()

    def _return(self) -> None:
        """Return to librdkafka, at least for ``REST_S``."""
        assert self._bulk is not None
        if self._use(self._steady):
            self._look_s = time.monotonic() + REST_S
            self._bulk.close(0)
            self._bulk = None

    def _backlog(self) -> int:
        """Return how many offsets running partitions are behind their known ends."""
        at, ends = self._reader.positions(), self._reader.ends()
        running = ends.keys() & at.keys() - self._positions.paused
        return sum(max(0, ends[each] - at[each]) for each in running)

    def _is_connected(self) -> bool:
        """Return whether the other reader is connected; connect it in the background.

        If it cannot connect, librdkafka reads everything.
        """
        if self._bulk is None:
            self._bulk = self._new_bulk()
        try:
            return self._bulk.connect()
        except MarshalError as error:
            _LOGGER.debug(
                "kafka-python cannot read the backlog, so librdkafka reads it: %s",
                error,
            )
            self._can_switch = False
            self._bulk.close(0)
            self._bulk = None
            return False

    def _use(self, reader: DataReader) -> bool:
        """Switch to another reader; return whether it is in use.

        It is not while a partition waits for its first seek.
        """
        state, at = self._positions, self._reader.positions()
        if at.keys() != state.next.keys():
            return False
        reader.assign(list(at))
        for partition, offset in at.items():
            reader.seek(
                partition,
                offset,
                token=state.tokens[partition],
                topic_id=state.topic_ids[partition],
            )
        reader.pause(list(state.paused))
        self._reader = reader
        self.fetched_max = reader.fetched_max
        return True


def _are_small(found: Mapping[TopicPartition, Sequence[Record]]) -> bool:
    """Return whether the values of some polled records are small on average."""
    records = next(iter(found.values()))
    sizes = [len(value or b"") for value in column_of(records[:SIZED], "value")]
    return sum(sizes) <= SMALL_BYTES * len(sizes)


class FastDataLog(KafkaDataLog):
    """``ports.DataLog`` with readers over librdkafka, and kafka-python's queries.

    Queries are few and small, so librdkafka would gain nothing.
    """

    def reader(self, *, isolation_level: str = READ_UNCOMMITTED) -> DataReader:
        """Return a new reader with nothing assigned; it connects when polled."""
        kind = SwitchingReader if can_switch(self._settings) else FastDataReader
        return kind(self._settings, isolation_level=isolation_level)

    def transactions(
        self, transactional_id: str, *, group_id: str, timeout_ms: int
    ) -> TransactionalWriter:
        """Return a producer, which fences every earlier one of the same id.

        A key selects the same partition as in the clients of Java and kafka-python.
        """
        from kafka_marshal.kafka_io.fast.transactions import Transactions

        return Transactions(
            self._settings,
            transactional_id,
            group_id=group_id,
            timeout_ms=timeout_ms,
        )
