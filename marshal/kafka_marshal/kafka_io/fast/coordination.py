"""The coordination topic over librdkafka: ``ports.CoordinationLog``.

As with kafka-python, the defaults break PROTOCOL 2.1: librdkafka hides records of open
transactions, and jumps to the end of the log if its position no longer exists. It also
counts timestamp types from 1, while the wire format counts from 0.

Two handles: one fetches, the other queries offsets. A broker answers the requests of a
connection in turn, so a query would wait behind a fetch that waits for records. Any
number of threads may query at once.

librdkafka makes an object for each entry. A large backlog is read over kafka-python
instead, which leaves entries packed in the fetched bytes (``entries``).
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from kafka_marshal.closing import in_background
from kafka_marshal.conditions import Condition
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import CoordinationError, InvalidTransition, MarshalError
from kafka_marshal.kafka_io.fast.clients import (
    Client,
    close_consumer,
    new_consumer,
    new_producer,
)
from kafka_marshal.kafka_io.fast.topics import describe_log
from kafka_marshal.kafka_io.fast.translate import Access, cause_of, translate_error
from kafka_marshal.kafka_io.faults import required_right
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topic_rules import TopicDescription
from kafka_marshal.kafka_io.topiclog import (
    EPOCH_NONE,
    READER_REQUEST_TIMEOUT_MS,
    Runs,
    TopicLog,
    entries_with_head,
)
from kafka_marshal.kafka_io.writer import OVERDUE_GRACE_MS, ProducerHandle
from kafka_marshal.ports import runs_of
from kafka_marshal.protocol.codec import FRAME_BYTES_MAX
from kafka_marshal.protocol.types import LogEntry

if TYPE_CHECKING:
    from kafka_marshal.kafka_io.clients import AdminClient
    from kafka_marshal.kafka_io.entries import EntryReader

_LOGGER = logging.getLogger(__name__)

# Longest wait of one poll for outcomes; an outcome ends it at once.
_POLL_S = 0.25
# A new cluster may need a second for its first producer id.
_PID_WAIT_S = 1.5
# librdkafka counts milliseconds in 32 bits, and takes a longer wait for none.
_WAIT_S_MAX = 2_000_000.0
_FATAL = KafkaError._FATAL  # noqa: SLF001 - its public name
_UNANSWERED = KafkaError._MSG_TIMED_OUT  # noqa: SLF001 - its public name
_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001 - its public name
# Errors for a position outside the log, after which the partition is not fetched.
_OUT_OF_PLACE = (
    KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001
    KafkaError._LOG_TRUNCATION,  # noqa: SLF001
    KafkaError.OFFSET_OUT_OF_RANGE,
)
# Messages taken at once. With an entry for each they are fewer than the 700 new objects
# that start Python's garbage collector. With thousands at once, a cold start spent a
# quarter of its time in the collector, and read each message from memory instead of the
# processor's cache.
MESSAGES_AT_ONCE = 300
# Least backlog, in entries, that is read over kafka-python. Loading and connecting
# kafka-python takes as long as it saves for this many entries.
BACKLOG = 200_000
_BULK_CONNECT_MS = 5_000
# If kafka-python returns no entry for this time, librdkafka reads the backlog.
_BULK_SILENT_S = 5.0
# Longest attempt of a query; refusals are checked after each attempt.
_QUERY_S = 2.0
_RETRY_S = 0.05
# Longest wait of close() for queries under way: longer than they take to end.
_QUERIES_S_MAX = 3 * _QUERY_S
# Within this time a round of the engine makes all its appends, so they share a request.
# librdkafka waits for whole milliseconds; each further one would delay every claim and
# every grant.
FAST_LINGER_MS = 0.5
# Queries need it as well: as a log end, the last stable offset would be no barrier.
_UNCOMMITTED = {"isolation.level": "read_uncommitted"}

_Entries = list[tuple[int, LogEntry]]


def writer_config(timeouts: Mapping[str, int], *, lingers: bool) -> dict[str, Any]:
    """Return the configuration of the producer (PROTOCOL 2.1).

    Args:
        timeouts: Request and delivery timeout, as kafka-python names them.
        lingers: Whether a record waits a moment for others.
    """
    return {
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": FAST_LINGER_MS if lingers else 0,
        # A broker refuses a batch above max.message.bytes, however small its records.
        "batch.size": FRAME_BYTES_MAX,
        "compression.type": "none",
        # The request timeout is sent to the broker; the socket timeout ends the wait
        # for its response. By default a stalled leader would block until the delivery
        # timeout.
        "request.timeout.ms": timeouts["request_timeout_ms"],
        "socket.timeout.ms": timeouts["request_timeout_ms"] + OVERDUE_GRACE_MS,
        "delivery.timeout.ms": timeouts["delivery_timeout_ms"],
    }


class FastProducerHandle(ProducerHandle):
    """One producer with a thread that polls for outcomes.

    Attributes:
        collector: The thread.
    """

    def __init__(
        self,
        settings: ConnectionConfig,
        timeouts: Mapping[str, int],
        *,
        lingers: bool,
        timeout_ms: int,
    ) -> None:
        """Connect, fetch the topic's metadata, and wait for a producer id.

        In this order: if metadata is requested before librdkafka knows the brokers, or
        not at all, it retries its request for a producer id only every 500 ms, which
        delays the first append.

        Args:
            settings: Connection and name of the topic.
            timeouts: Request and delivery timeout, as kafka-python names them.
            lingers: Whether a record waits a moment for others.
            timeout_ms: Limit for the whole call.

        Raises:
            KafkaException: No connection could be made, or librdkafka does not
                accept a setting.
        """
        self._topic = settings.coordination_topic
        delivery_ms = timeouts["delivery_timeout_ms"]
        self._limit_s = (delivery_ms + OVERDUE_GRACE_MS) / 1000
        self.config = writer_config(timeouts, lingers=lingers)
        self._client = new_producer(settings, self.config)
        self._is_over = threading.Event()
        # The fatal error of the producer; set before ``_has_failed``.
        self._fatal: Exception | None = None
        self._has_failed = threading.Event()
        self.collector = in_background(self._collect, name="marshal-deliveries")
        deadline = Deadline(timeout_ms)
        try:
            self._client.requests_pid.wait(timeout=min(deadline.left_s, _PID_WAIT_S))
            self._client.handle.list_topics(
                self._topic, timeout=min(max(0.001, deadline.left_s), _WAIT_S_MAX)
            )
            self._client.has_pid.wait(timeout=min(deadline.left_s, _PID_WAIT_S))
        except BaseException as error:
            self._is_over.set()
            if isinstance(error, KafkaException):
                raise error from self._client.last
            raise  # such as Ctrl-C

    @property
    def is_outdated(self) -> bool:
        """See ``ProducerHandle``."""
        return self._client.is_outdated

    @property
    def connection_error(self) -> Exception | None:
        """See ``ProducerHandle``."""
        return self._client.last

    def send(
        self,
        partition: int,
        value: bytes,
        *,
        report: Callable[[int | Exception], None],
    ) -> None:
        """Start sending one record; see ``ProducerHandle``."""

        def delivered(error: Any, message: Any) -> None:
            if error is None:
                self._client.on_answer()
                report(message.offset())
            elif self._fatal is None and error.code() == _UNANSWERED:
                report(TimeoutError(f"{error.name()}: {error.str()}"))
            else:
                report(self._fatal or KafkaException(error))

        handle = self._client.handle
        try:
            handle.produce(
                self._topic, value, partition=partition, on_delivery=delivered
            )
        except KafkaException as error:
            if error.args[0].code() != _FATAL:
                raise
            # Report instead of raising, so that the writer replaces the producer. The
            # collector gets the cause in a moment.
            self._has_failed.wait(timeout=_POLL_S)
            report(self._fatal or error)

    def end(self) -> threading.Thread:
        """Flush and close in the background, within the delivery timeout."""
        return in_background(self._end)

    def drop(self) -> threading.Thread:
        """Make the collector destroy the producer with its pending sends."""
        self._is_over.set()
        return self.collector

    def _collect(self) -> None:
        """Poll for outcomes until the end, then destroy the producer."""
        handle = self._client.handle
        while not self._is_over.is_set():
            try:
                self._client.leaders.ask_if_due(handle, (self._topic,))
                handle.poll(_POLL_S)
            except KafkaException as error:
                # poll() raises only a fatal error, and once. Without a purge, unsent
                # records would stay until the delivery timeout.
                self._fatal = error
                self._has_failed.set()
                self._client.requests_pid.set()
                self._client.has_pid.set()
                handle.purge()
        # Pending sends, if any, would keep the handle alive.
        with suppress(KafkaException):
            handle.purge()
            handle.poll(0)
        self._client.release()

    def _end(self) -> None:
        handle = self._client.handle
        if handle is None:
            return  # the collector has destroyed it already
        with suppress(KafkaException):
            if handle.flush(self._limit_s) > 0:
                handle.purge()
        self._is_over.set()


class FastCoordinationLog(TopicLog):
    """All partitions of the coordination topic, read by librdkafka."""

    _reader: Client | None = None
    _querier: Client | None = None
    _bulk: "EntryReader | None" = None

    def _new_producer_handle(
        self, timeouts: Mapping[str, int], timeout_ms: int
    ) -> ProducerHandle:
        return FastProducerHandle(
            self._settings, timeouts, lingers=self._lingers, timeout_ms=timeout_ms
        )

    def _prepare(self) -> None:
        # Number of queries under way by client. To destroy the handle of a client with
        # queries would crash the process.
        self._queries = Counter[Client]()
        self._query_ended = Condition()
        # Whether the reader has the current positions.
        self._is_assigned = False
        # The last queried end of each partition.
        self._seen_ends: Mapping[int, int] = {}
        self._can_read_bulk = True
        self._bulk_s = 0.0  # when ``_bulk`` returned entries last
        # Log end at which each partition was last read, also behind control records.
        self._ends_reached: dict[int, int] = {}
        # Partition of the last error raised.
        self._raised_for: int | None = None
        # Errors to raise after the entries are returned.
        self._errors: list[tuple[int | None, Exception]] = []
        self._connecting: list[threading.Thread] = []
        self._has_leaders = False
        self._reader_timeout_ms = READER_REQUEST_TIMEOUT_MS
        # A reader with other timeouts, which the next poll begins to use.
        self._next_reader: Client | None = None
        self._new_clients()
        # Both connect while the topic is described.
        self._connecting = [
            in_background(connect, name="marshal-connect")
            for connect in (self._find_leaders, self._reach_leaders)
        ]

    def _new_clients(self) -> None:
        self._querier = self._new_querier()
        self._reader = self._new_reader()

    def _new_querier(self) -> Client:
        # A response that arrives after its query has ended is useless.
        limit_ms = round(_QUERY_S * 1_000) + OVERDUE_GRACE_MS
        return new_consumer(
            self._settings, {**_UNCOMMITTED, "socket.timeout.ms": limit_ms}
        )

    def _new_reader(self) -> Client:
        return new_consumer(
            self._settings,
            {
                **_UNCOMMITTED,
                "socket.timeout.ms": self._reader_timeout_ms,
                # Reports offsets behind control records, which are not returned.
                "enable.partition.eof": True,
                "fetch.wait.max.ms": self._fetch_wait_ms,
            },
        )

    def _limit_requests(self, timeout_ms: int) -> None:
        """Make another reader: librdkafka cannot change the limit of the old one."""
        with self._lock:
            if self._is_closed or timeout_ms == self._reader_timeout_ms:
                return
            before, self._reader_timeout_ms = self._reader_timeout_ms, timeout_ms
        try:
            fresh = self._new_reader()
        except BaseException:
            self._reader_timeout_ms = before  # so that another call tries again
            raise
        with suppress(KafkaException):  # it finds the leaders by itself, later
            fresh.handle.list_topics(self._topic, timeout=_QUERY_S)
        self._keep_reader(fresh)

    def _keep_reader(self, fresh: Client) -> None:
        """Make the next poll use a new reader; close the one that stays unused."""
        unused: Client | None = fresh
        with self._lock:
            if not self._is_closed:
                unused, self._next_reader = self._next_reader, fresh
        if unused is not None:
            close_consumer(unused)

    def _use_next_reader(self) -> None:
        """Continue with the reader that was made last, from the same offsets."""
        with self._lock:
            if self._is_closed or self._next_reader is None:
                return
            old, self._reader = self._reader, self._next_reader
            self._next_reader = None
        self._is_assigned = False
        if old is not None:
            close_consumer(old)

    def _describe(
        self, client: "AdminClient | None", timeout_ms: int
    ) -> tuple[str, TopicDescription]:
        if client is None:
            return describe_log(self._settings, timeout_ms=timeout_ms)
        # The caller has loaded kafka-python, and uses this client for more requests.
        from kafka_marshal.kafka_io import topics

        return topics.describe_log(self._settings, client=client, timeout_ms=timeout_ms)

    def _connect(self, deadline: Deadline) -> None:
        """Wait until the leaders are known and connected, or time is up."""
        for thread in self._connecting:
            thread.join(timeout=deadline.left_s)
        if not self._has_leaders:  # perhaps the topic is new
            self._find_leaders()

    def _find_leaders(self) -> None:
        """Fetch the leaders, which librdkafka would do only once a second."""
        assert self._reader is not None
        with suppress(KafkaException):  # the next query raises the cause
            found = self._reader.handle.list_topics(self._topic, timeout=_QUERY_S)
            self._has_leaders = bool(found.topics[self._topic].partitions)

    def _reach_leaders(self) -> None:
        """Query an offset of each partition: that connects to its leader."""
        # The next query raises the cause.
        with suppress(KafkaException, InvalidTransition), self._querying() as client:
            found = client.handle.list_topics(self._topic, timeout=_QUERY_S)
            places = [
                TopicPartition(self._topic, number, OFFSET_BEGINNING)
                for number in found.topics[self._topic].partitions
            ]
            if places:
                client.handle.offsets_for_times(places, timeout=_QUERY_S)

    def _disconnect(self) -> None:
        for thread in self._connecting:
            thread.join(timeout=_QUERIES_S_MAX)
            if thread.is_alive():
                return  # destroying its handle would crash the process
        self._end_bulk()
        for reader in (self._reader, self._next_reader):
            if reader is not None:
                close_consumer(reader)
        with self._query_ended:
            is_free = self._query_ended.wait_for(
                lambda: not self._queries, timeout=_QUERIES_S_MAX
            )
        if self._querier is not None and is_free:
            close_consumer(self._querier)

    def _seek(self, offsets: Mapping[int, int]) -> None:
        for number, offset in offsets.items():
            self._next[number] = offset
        # The next poll assigns: librdkafka would fetch at once, and a reader that then
        # continues from a kept state would have fetched the log's start for nothing.
        self._is_assigned = False
        if self._bulk is not None:
            self._bulk.seek(self._read, offsets)

    def _to_partition(self, number: int) -> Any:
        epoch, offset = self._epochs[number], self._next[number]
        if epoch == EPOCH_NONE:
            return TopicPartition(self._topic, number, offset)
        return TopicPartition(self._topic, number, offset, leader_epoch=epoch)

    def _fetch(self, timeout_ms: int) -> Runs:
        found = self._fetch_bulk(timeout_ms)
        if found is None:
            return self._fetch_by(self._add_messages, timeout_ms)
        return found

    def _fetch_heads(self, timeout_ms: int, head: bytes) -> Runs:
        def add(messages: Iterable[Any], entries: _Entries) -> None:
            self._add_messages(self._with_head(messages, head), entries)

        found = self._fetch_bulk(timeout_ms)
        if found is None:
            return self._fetch_by(add, timeout_ms)
        return [(t, entries_with_head(run, head)) for t, run in found]

    def _fetch_bulk(self, timeout_ms: int) -> Runs | None:
        """Return new entries over kafka-python; None if librdkafka must read them.

        Errors of kafka-python are not raised: librdkafka continues at its positions.
        """
        backlog = self._backlog()
        if self._bulk is None and (self._is_assigned or backlog < BACKLOG):
            return None
        now_s = time.monotonic()
        try:
            if self._bulk is None and self._can_read_bulk:
                self._bulk, self._bulk_s = self._new_bulk(), now_s
            if self._bulk is not None and backlog:
                found = self._bulk.poll(timeout_ms)
                if found:
                    self._bulk_s = now_s
                if found or now_s - self._bulk_s < _BULK_SILENT_S:
                    return found
                self._can_read_bulk = False
        except Exception as error:  # noqa: BLE001 - librdkafka reports what lasts
            _LOGGER.debug(
                "kafka-python cannot read the backlog, so librdkafka reads it: %s",
                error,
            )
            self._can_read_bulk = False
        self._end_bulk()
        return None

    def _backlog(self) -> int:
        """Return how many offsets lie between positions and last queried ends."""
        ends = self._seen_ends
        return sum(max(0, ends.get(t, 0) - self._next[t]) for t in self._read)

    def _new_bulk(self) -> "EntryReader | None":
        # Loaded here: not every process needs it.
        from kafka_marshal.kafka_io.entries import EntryReader
        from kafka_marshal.kafka_io.fast.switching import can_switch

        if not can_switch(self._settings):
            self._can_read_bulk = False
            return None
        made = EntryReader(
            self._settings,
            fetch_wait_ms=self._fetch_wait_ms,
            timeout_ms=_BULK_CONNECT_MS,
        )
        made.seek(self._read, {t: self._next[t] for t in self._read})
        return made

    def _end_bulk(self) -> None:
        bulk, self._bulk = self._bulk, None
        if bulk is not None:
            in_background(bulk.close)  # it may wait for a fetch

    @staticmethod
    def _with_head(messages: Iterable[Any], head: bytes) -> Iterator[Any]:
        """Yield errors, messages whose value has a head, and each partition's last.

        To make an entry of every message takes several times as long.
        """
        last: dict[int, Any] = {}
        for message in messages:
            if message.error() is not None:
                yield message
                continue
            value = message.value()
            if value is not None and value.startswith(head):
                last.pop(message.partition(), None)
                yield message
            else:
                last[message.partition()] = message
        yield from last.values()

    def _fetch_by(
        self, add: Callable[[Iterable[Any], _Entries], None], timeout_ms: int
    ) -> Runs:
        assert self._reader is not None
        if self._reader.is_outdated:
            with suppress(MarshalError):  # files are changing: the next poll retries
                self._keep_reader(self._new_reader())
        if self._next_reader is not None:
            self._use_next_reader()
        handle = self._reader.handle
        if not self._is_assigned:
            handle.assign([self._to_partition(number) for number in self._read])
            self._is_assigned = True
        deadline = Deadline(timeout_ms)
        entries: _Entries = []
        while not self._errors and not entries:
            # consume() waits until a batch is full: poll for one, then take the rest.
            self._reader.leaders.ask_if_due(handle, (self._topic,))
            first = handle.poll(self._reader.leaders.max_wait_s(deadline.left_s))
            if first is None:
                break
            add((first,), entries)
            add(handle.consume(MESSAGES_AT_ONCE - 1, 0), entries)
        if not entries and self._errors:
            self._raise_error(timeout_ms)
        return list(runs_of(entries))

    def _add_messages(self, messages: Iterable[Any], entries: _Entries) -> None:
        """Split messages into entries, ends and errors."""
        for message in messages:
            error = message.error()
            if error is None:
                kind, timestamp_ms = message.timestamp()
                entry = LogEntry(
                    offset=message.offset(),
                    leader_epoch=message.leader_epoch(),
                    timestamp_ms=timestamp_ms,
                    timestamp_type=kind - 1,  # librdkafka counts from 1
                    value=message.value(),
                )
                entries.append((message.partition(), entry))
            elif error.code() == _EOF:
                self._ends_reached[message.partition()] = message.offset()
            elif error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
                # (The group is not used, so no right to it is needed.)
                self._errors.append((message.partition(), KafkaException(error)))

    def _raise_error(self, timeout_ms: int) -> None:
        """Raise the first error, unless its partition can skip to a new log start."""
        partition, error = self._errors.pop(0)
        self._raised_for = partition
        is_out = cause_of(error).code() in _OUT_OF_PLACE
        if not is_out or partition is None:
            raise error
        if not self._skips_deleted([partition], timeout_ms):
            raise error

    def _fetch_positions(self, partitions: Collection[int]) -> Mapping[int, int]:
        if self._bulk is not None:
            with suppress(Exception):  # the next poll handles it
                return {number: self._bulk.position(number) for number in partitions}
        return {
            number: self._ends_reached[number]
            for number in partitions
            if number in self._ends_reached
        }

    def _query_offsets(
        self, timeout_ms: int, *, is_end: bool, partitions: Iterable[int] | None = None
    ) -> Mapping[int, int]:
        # Special timestamps for the end and the start.
        which = OFFSET_END if is_end else OFFSET_BEGINNING
        numbers = self._read if partitions is None else partitions
        found = self._query_with_retries(numbers, timeout_ms, which=which)
        if is_end:
            self._seen_ends = {**self._seen_ends, **found}
        return found

    def _find_added(
        self, partitions: Sequence[int], timeout_ms: int
    ) -> Mapping[int, int]:
        limit_s = min(timeout_ms / 1000, _QUERY_S)
        with self._querying() as client:
            # Makes the handle know the partitions at once, before librdkafka's refresh.
            found = client.handle.list_topics(self._topic, timeout=limit_s)
        if not found.topics[self._topic].partitions.keys() >= {*partitions}:
            raise CoordinationError(
                f"The brokers do not list partitions {[*partitions]} of "
                f"{self._topic} yet; try again."
            )
        return self._query_with_retries(partitions, timeout_ms, which=OFFSET_BEGINNING)

    def _refresh_reader(self) -> None:
        # On the polling thread: a handle serves one call at a time, so another thread
        # would wait seconds for its turn between polls on a busy machine.
        self._find_leaders()

    def _query_time(self, time_ms: int, timeout_ms: int) -> Mapping[int, int]:
        found = self._query_with_retries(self._read, timeout_ms, which=time_ms)
        return {number: offset for number, offset in found.items() if offset >= 0}

    @contextmanager
    def _querying(self) -> Iterator[Client]:
        """Provide the client for a query, and keep it alive during the query."""
        with self._query_ended:
            self._require_open()
            client = self._renewed_querier()
            self._queries[client] += 1
        try:
            yield client
        finally:
            with self._query_ended:
                self._queries[client] -= 1
                self._close_unused(client)
                self._query_ended.notify_all()

    def _renewed_querier(self) -> Client:
        """Return the client for queries, a new one if it is outdated."""
        assert self._querier is not None
        if self._querier.is_outdated:
            with suppress(MarshalError):  # files are changing: the next query retries
                old, self._querier = self._querier, self._new_querier()
                self._close_unused(old)
        return self._querier

    def _close_unused(self, client: Client) -> None:
        """Close a client for queries if it was replaced and no query uses it."""
        if not self._queries[client]:
            del self._queries[client]
            if client is not self._querier:
                close_consumer(client)

    def _query_with_retries(
        self, numbers: Iterable[int], timeout_ms: int, *, which: int
    ) -> Mapping[int, int]:
        """Retry a query until success, a permanent error or the deadline."""
        places = [TopicPartition(self._topic, number, which) for number in numbers]
        deadline = Deadline(timeout_ms)
        while True:
            left_s = max(0.001, deadline.left_s)
            with self._querying() as client:
                try:
                    return self._query_once(client, places, min(left_s, _QUERY_S))
                except KafkaException as error:
                    # A moved leader is reported at once; the new one is found later.
                    is_late = left_s <= _RETRY_S
                    translated = self._translate(error, "Asking", Access.READ)
                    if is_late or not translated.retriable:
                        raise
                self._refresh_leaders(client, min(left_s, _QUERY_S))
            time.sleep(_RETRY_S)

    def _refresh_leaders(self, client: Client, timeout_s: float) -> None:
        """Refresh the leaders of a handle for queries.

        librdkafka keeps asking a leader that is gone. If its metadata was fetched while
        there was no leader, it treats the partition as unknown and never asks again.
        """
        with suppress(KafkaException):  # the next query raises the cause
            client.handle.list_topics(self._topic, timeout=timeout_s)

    def _query_once(
        self, client: Client, places: Sequence[Any], timeout_s: float
    ) -> Mapping[int, int]:
        handle, client.refusal = client.handle, None
        try:
            found = handle.offsets_for_times(places, timeout=timeout_s)
        except KafkaException:
            # The error is only a timeout; polling reports refusals.
            handle.poll(0)
            if client.refusal is not None:
                raise client.refusal from None
            raise
        for place in found:
            if place.error is not None:
                raise KafkaException(place.error)
        return {place.partition: place.offset for place in found}

    def _lost_partitions(self, error: Exception) -> Sequence[int]:
        del error  # it does not name the partition; _raise_error() does
        return [] if self._raised_for is None else [self._raised_for]

    def _reset_positions(self, numbers: Iterable[int]) -> None:
        numbers = frozenset(numbers)
        super()._reset_positions(numbers)
        for number in numbers:
            self._ends_reached.pop(number, None)
        self._errors = [each for each in self._errors if each[0] not in numbers]

    def _translate(self, error: Exception, doing: str, access: Access) -> MarshalError:
        return translate_error(
            error,
            doing=doing,
            access=access,
            addresses=self._settings.addresses,
            needs=required_right(access, self._topic),
        )
