"""Data partitions over kafka-python: ``ports.DataReader``, and its records."""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import Any

from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaTopicPartition
from kafka import errors as kafka_errors

from kafka_marshal.closing import begin, in_background
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import InvalidTransition, PositionError
from kafka_marshal.kafka_io.clients import new_client
from kafka_marshal.kafka_io.driving import CallerSelector
from kafka_marshal.kafka_io.faults import (
    forked_error,
    is_interrupt,
    required_right,
)
from kafka_marshal.kafka_io.fetched_records import parse_records
from kafka_marshal.kafka_io.packed_records import (
    Origin,
    PackedPiece,
    parsed_records,
)
from kafka_marshal.kafka_io.patches import (
    TopicIds,
    fetch_ahead,
    fetch_by_id,
    fetcher_of,
    has_fetched,
    network_of,
    position_of,
    read_in_place,
    set_fetch_wait,
    unblock_resumed,
    validate_after_changes,
)
from kafka_marshal.kafka_io.positions import Positions, outside_error
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.translate import Access, translate_error
from kafka_marshal.native import compiled
from kafka_marshal.ports import (
    READ_UNCOMMITTED,
    DataReader,
    Piece,
    Record,
    Records,
    SourceKind,
    SourcePiece,
    offset_at,
)
from kafka_marshal.protocol.types import Token, TopicPartition

_offset = attrgetter("offset")
_value = attrgetter("value")
_key = attrgetter("key")
# A broker answers one fetch at a time, so new partitions wait for the one under way.
FETCH_WAIT_MS = 100
# With many partitions, a broker waits about as long as kafka-python takes to make a
# request, for which it visits all partitions: otherwise an idle reader would do little
# else.
FETCH_WAIT_MS_MAX = 500
PARTITIONS_PER_WAIT_MS = 20
REQUEST_TIMEOUT_MS = 10_000
# kafka-python's pause between two metadata requests. A new consumer has just made one,
# before it had any topic, and would stay idle for the pause: so it starts with a short
# pause.
BACKOFF_MS = 100
FIRST_BACKOFF_MS = 10
_FAST_RETRY_S = 1.0
# For this time after a poll, polls that do not wait are skipped while a response is
# awaited.
REPOLL_S = 0.005
# Limit of a query after an error that the broker has just reported.
_RANGE_TIMEOUT_MS = 500 + FETCH_WAIT_MS_MAX
_UNKNOWN = -1
# Limits for one partition in a response, and for a response. A response stays in memory
# until its last record is handed out.
FETCH_BYTES = 2_097_152
RESPONSE_BYTES = 4 * FETCH_BYTES
# Records of one poll, however small they are; a fetch is bounded by its bytes.
RECORDS_MAX = 100_000


def _made(sources: Sequence[Any], token: Token | None) -> Iterator[Record]:
    """Return records that were already made, with their token."""
    del token
    return iter(sources)


MADE_RECORDS = SourceKind(
    make=_made,
    offset=_offset,
    value=_value,
    key=_key,
    timestamp_ms=attrgetter("timestamp_ms"),
)


def _close_made(connecting: Future[Any]) -> None:
    """Close a consumer that nobody waits for any more."""
    if connecting.exception(0) is None:
        connecting.result(0).close(autocommit=False)


class KafkaDataReader(DataReader):
    """One consumer with assigned partitions and no group. One thread at a time.

    ``Positions`` holds assignment, positions and pauses apart from the consumer.
    kafka-python cannot continue after a record that it fails to decode (its next poll
    would spin for ever), so the consumer is then replaced and restored from there. The
    first poll connects.

    Args:
        settings: Connection.
        isolation_level: ``read_uncommitted`` or ``read_committed``.
        client_rack: Rack of this process, to fetch from the nearest replica.
    """

    fetched_max = RECORDS_MAX if compiled is not None else 0
    # Whether large responses are received in the background.
    has_receiver = True

    def __init__(
        self,
        settings: ConnectionConfig,
        *,
        isolation_level: str = READ_UNCOMMITTED,
        client_rack: str = "",
    ) -> None:
        self._settings = settings
        self._isolation_level = isolation_level
        self._client_rack = client_rack
        self._pid = os.getpid()
        self._consumer: Any = None
        self._connecting: Future[Any] | None = None
        # Held while this consumer is polled, and while it is closed, perhaps by another
        # thread: kafka-python refuses to close during a poll, and would stay open.
        self._turn = threading.RLock()
        self._polling_thread = 0
        self._fast_retry_until = 0.0
        self._polled_s = 0.0
        self._is_closed = False
        # Assigned partitions by kafka-python's type.
        self._partitions: dict[Any, TopicPartition] = {}
        self._positions = Positions()
        self._topic_ids = TopicIds()

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Make this the exact set of partitions; see ``ports.DataReader``."""
        self._require_usable()
        self._positions.assign(partitions)
        self._partitions = {
            KafkaTopicPartition(*each): each for each in self._positions.next
        }
        if self._consumer is not None:
            # kafka-python keeps the state of remaining partitions and drops the
            # buffers of removed ones.
            self._consumer.assign(list(self._partitions))
            self._pace_fetches(self._consumer)

    def _pace_fetches(self, consumer: Any) -> None:
        wait_ms = len(self._partitions) // PARTITIONS_PER_WAIT_MS
        wait_ms = min(max(FETCH_WAIT_MS, wait_ms), FETCH_WAIT_MS_MAX)
        set_fetch_wait(consumer, wait_ms)

    def seek(
        self,
        partition: TopicPartition,
        offset: int,
        *,
        token: Token | None = None,
        topic_id: bytes | None = None,
    ) -> None:
        """Continue at ``offset``; see ``ports.DataReader``."""
        self._require_usable()
        self._positions.seek(partition, offset, token=token, topic_id=topic_id)
        if self._topic_ids.set_id(partition, topic_id):
            # The consumer has the state of the earlier topic.
            self._drop_consumer(0)
        if self._consumer is not None:
            self._consumer.seek(KafkaTopicPartition(*partition), offset)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop fetching these until resumed; positions and buffers are kept."""
        self._require_usable()
        known = self._positions.pause(partitions)
        if self._consumer is not None:
            self._consumer.pause(*(KafkaTopicPartition(*each) for each in known))

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Undo ``pause``; unknown or running partitions are left alone."""
        self._require_usable()
        known = self._positions.resume(partitions)
        if self._consumer is not None:
            self._consumer.resume(*(KafkaTopicPartition(*each) for each in known))

    def poll(
        self, timeout_ms: int, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Return up to ``max_records`` records; see ``ports.DataReader``."""
        self._require_usable()
        timeout_ms = max(0, timeout_ms)
        self._positions.require_all()
        if not self._positions.next:
            time.sleep(timeout_ms / 1000)
            return {}
        with self._turn:
            self._polling_thread = threading.get_ident()
            try:
                return self._poll(timeout_ms, max_records)
            except BaseException as error:
                if is_interrupt(error):
                    # It may have interrupted kafka-python within any step.
                    self._drop_consumer(0)
                raise
            finally:
                self._polling_thread = 0

    def _poll(
        self, timeout_ms: int, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        deadline = Deadline(timeout_ms)
        try:
            if not timeout_ms and self._awaits_answer():
                return {}
            if not self._connect(timeout_ms):
                return {}
            unblock_resumed(self._consumer)
            batches = self._consumer.poll(
                timeout_ms=deadline.left_ms, max_records=max(1, max_records)
            )
        except Exception as error:
            if is_interrupt(error):
                raise
            raise self._translate(error) from error
        if self._is_closed:
            return {}
        self._polled_s = time.monotonic()
        if self._fast_retry_until and (
            batches or time.monotonic() > self._fast_retry_until
        ):
            self._fast_retry_until = 0.0
            self._set_backoff(BACKOFF_MS)
        if not batches:
            self._topic_ids.raise_refused(self._positions.next)
        found: dict[TopicPartition, Sequence[Record]] = {}
        for place, fetched in batches.items():
            partition = self._partitions[place]
            records = self._to_records(partition, fetched)
            self._positions.next[partition] = offset_at(records, -1) + 1
            found[partition] = records
        self._send_on(has_found=bool(found))
        return found

    def positions(self) -> Mapping[TopicPartition, int]:
        """Return the next offset of each partition; see ``ports.DataReader``."""
        self._require_usable()
        found = {
            each: at for each, at in self._positions.next.items() if at is not None
        }
        if self._consumer is None:
            return found
        for place, ours in self._partitions.items():
            position = position_of(self._consumer, place)
            if ours in found and position is not None:
                found[ours] = max(found[ours], position)
        return found

    def ends(self) -> Mapping[TopicPartition, int]:
        """Return the log ends known from fetches; see ``ports.DataReader``."""
        self._require_usable()
        if self._consumer is None:
            return {}
        ends = {
            ours: self._consumer.highwater(place)
            for place, ours in self._partitions.items()
        }
        return {ours: end for ours, end in ends.items() if end is not None}

    def close(self, timeout_ms: int) -> None:
        """Close every resource. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.add_done_callback(_close_made)
        self._drop_consumer(timeout_ms)

    def connect(self) -> bool:
        """Connect in the background; return whether the reader is connected.

        Raises:
            MarshalError: It cannot connect.
        """
        self._require_usable()
        try:
            return self._connect(0)
        except Exception as error:
            raise self._translate(error) from error

    def _connect(self, timeout_ms: int) -> bool:
        """Connect a consumer and restore its state; return False if not yet."""
        if self._consumer is not None:
            return True
        if self._connecting is None:
            self._connecting = begin(self._new_consumer, name="marshal-connect")
        if wait((self._connecting,), timeout_ms / 1000).not_done:
            return False
        connecting, self._connecting = self._connecting, None
        consumer = connecting.result(0)
        fetch_by_id(consumer, self._topic_ids)
        consumer.assign(list(self._partitions))
        self._pace_fetches(consumer)
        for place, ours in self._partitions.items():
            consumer.seek(place, self._positions.next[ours])
            if ours in self._positions.paused:
                consumer.pause(place)
        self._consumer = consumer
        self._fast_retry_until = time.monotonic() + _FAST_RETRY_S
        self._set_backoff(FIRST_BACKOFF_MS)
        return True

    def _set_backoff(self, backoff_ms: int) -> None:
        """Set the pause between two metadata requests; no option changes it later."""
        for each in (self._consumer, network_of(self._consumer).cluster):
            each.config["retry_backoff_ms"] = backoff_ms

    def _new_consumer(self) -> Any:
        settings = {
            **self._settings.client_config(),
            "group_id": None,
            "enable_auto_commit": False,
            # Retention and truncation raise; positions never jump silently.
            "auto_offset_reset": "none",
            "isolation_level": self._isolation_level,
            "client_rack": self._client_rack,
            "allow_auto_create_topics": False,
            "fetch_min_bytes": 1,
            "fetch_max_bytes": RESPONSE_BYTES,
            "max_partition_fetch_bytes": FETCH_BYTES,
            "fetch_max_wait_ms": FETCH_WAIT_MS,
            "request_timeout_ms": REQUEST_TIMEOUT_MS,
            "metrics_enabled": False,
            "bootstrap_timeout_ms": REQUEST_TIMEOUT_MS,
        }
        consumer = new_client(KafkaConsumer, settings, selector=CallerSelector)
        selector = network_of(consumer).selector
        read_in_place(consumer, selector=selector if self.has_receiver else None)
        parse_records(consumer, self._records, can_pack=True)
        fetch_ahead(consumer)
        validate_after_changes(consumer)
        return consumer

    def _to_records(self, partition: TopicPartition, fetched: list[Any]) -> Records:
        """Return what a poll of the consumer returned as records."""
        token = self._positions.tokens[partition]
        kinds = set(map(type, fetched))
        if PackedPiece not in kinds:
            return Records.of_sources(fetched, token=token, kind=MADE_RECORDS)
        if len(kinds) == 1:
            return Records(fetched, token=token)
        pieces: list[Piece] = []
        for kind, run in groupby(fetched, type):
            if kind is PackedPiece:
                pieces += run
            else:
                pieces.append(SourcePiece(list(run), MADE_RECORDS))
        return Records(pieces, token=token)

    def _records(self, origin: Origin, sources: Sequence[Any]) -> Iterator[Record]:
        """Make records of one batch, under the token that their partition has now."""
        partition = TopicPartition(origin.topic, origin.partition)
        token = self._positions.tokens[partition]
        return parsed_records(sources, token, origin=origin)

    def _awaits_answer(self) -> bool:
        """Return whether a poll without a wait would again find nothing.

        Such a poll takes longer than handing out a hundred records. It is skipped only
        for a moment: polls also notice changes, and fetch from other brokers.
        """
        if self._consumer is None or time.monotonic() > self._polled_s + REPOLL_S:
            return False
        network_of(self._consumer).selector.drive()
        is_under_way = fetcher_of(self._consumer).in_flight_fetches()
        return is_under_way and not has_fetched(self._consumer)

    def _send_on(self, *, has_found: bool) -> None:
        """Send pending requests, and the next fetch if all fetched records are taken.

        kafka-python sends the next fetch when a poll begins. After a poll that waited
        for its records no fetch would be under way until the next poll, however long
        the records are processed. Errors are not raised, so that no record is lost: the
        next poll sends the same and raises.
        """
        try:
            if has_found and not has_fetched(self._consumer):
                fetcher_of(self._consumer).send_fetches()
            network_of(self._consumer).selector.flush()
        except Exception as error:
            if is_interrupt(error):
                raise

    def _translate(self, error: Exception) -> Exception:
        """Translate an error of the consumer, and keep the reader usable."""
        if isinstance(error, kafka_errors.OffsetOutOfRangeError) and error.args:
            place, requested = next(iter(error.args[0].items()))
            return self._position_error(place, requested, "is outside its log")
        if isinstance(error, kafka_errors.LogTruncationError):
            place = next(iter(error.divergent_offsets))
            ours = self._partitions.get(place)
            requested = self._positions.next.get(ours) if ours is not None else None
            if requested is not None:
                return self._position_error(
                    place, requested, "was cut off by a truncation"
                )
        if isinstance(error, kafka_errors.CorruptRecordError | UnicodeDecodeError):
            self._drop_consumer(0)
            # The error does not name its partition. Rotate the partitions, so that the
            # sound ones make progress.
            first = next(iter(self._partitions))
            self._partitions[first] = self._partitions.pop(first)
        return translate_error(
            error,
            doing="Reading data partitions",
            access=Access.READ,
            needs=required_right(
                Access.READ, *{place.topic for place in self._positions.next}
            ),
            addresses=self._settings.addresses,
        )

    def _position_error(self, place: Any, requested: int, what: str) -> PositionError:
        """Return the error for a position outside its log, with the log's range."""
        start = end = _UNKNOWN
        consumer = self._consumer  # None if the reader was closed during the poll
        # Without an answer, report the error without the range.
        with suppress(kafka_errors.KafkaError):
            if consumer is not None:
                timeout_ms = _RANGE_TIMEOUT_MS
                start = consumer.beginning_offsets([place], timeout_ms)[place]
                end = consumer.end_offsets([place], timeout_ms)[place]
        partition = TopicPartition(*place)
        return outside_error(partition, requested, what=what, start=start, end=end)

    def _drop_consumer(self, timeout_ms: int) -> None:
        consumer, self._consumer = self._consumer, None
        turn, self._turn = self._turn, threading.RLock()
        if consumer is None or os.getpid() != self._pid:
            return

        def close() -> None:
            with turn:
                consumer.close(autocommit=False)

        closer = in_background(close)
        # A signal handler does not wait for the poll that it interrupts.
        is_in_poll = self._polling_thread == threading.get_ident()
        closer.join(timeout=0.0 if is_in_poll else max(0.0, timeout_ms / 1000))

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise forked_error("Reading data partitions")
        if self._is_closed:
            raise InvalidTransition("The reader is closed; open a new one.")
