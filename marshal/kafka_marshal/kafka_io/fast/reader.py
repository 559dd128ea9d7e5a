"""Data partitions over librdkafka: ``ports.DataReader``, and its records.

librdkafka fetches ahead on its own threads, into one queue for all partitions. The
queue may still hold records of an earlier position; a seek makes librdkafka drop them,
so every change of position begins with a seek.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, repeat
from operator import methodcaller
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message, libversion
from confluent_kafka import TopicPartition as FastPartition

from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    InvalidTransition,
    MarshalError,
)
from kafka_marshal.kafka_io.fast.clients import (
    TOPIC_IDS,
    Client,
    close_consumer,
    new_consumer,
)
from kafka_marshal.kafka_io.fast.translate import Access, translate_error
from kafka_marshal.kafka_io.faults import (
    forked_error,
    is_interrupt,
    required_right,
)
from kafka_marshal.kafka_io.positions import (
    Positions,
    outside_error,
    unknown_topic_error,
)
from kafka_marshal.kafka_io.reader import FETCH_WAIT_MS, REQUEST_TIMEOUT_MS
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.ports import (
    READ_UNCOMMITTED,
    DataReader,
    Record,
    Records,
    SourceKind,
)
from kafka_marshal.protocol.types import Token, TopicPartition

# Its type allows None, for messages that are errors.
_offset: Callable[[Any], int] = Message.offset  # type: ignore[assignment]
# Not called as a method: it fails by an exception beside a result, which Python no
# longer looks for once it has optimized a method call that runs often.
_headers = methodcaller("headers")
_NO_TEXT = "\ufffd"
# Limits of librdkafka's queue: once one of them is reached it fetches no more, but
# fetches under way still arrive. A queue of several fetches hides all latency that can
# be hidden, since a broker is asked for one fetch at a time. More of them are read from
# memory instead of the processor's cache, which costs a tenth of all CPU time;
# librdkafka's default is 64 MB.
QUEUE_KBYTES = 8_192
QUEUE_RECORDS = 100_000
# A queue this small empties quickly, so librdkafka checks a full one again soon.
QUEUE_BACKOFF_MS = 5
# Limits for one partition in a response, and for a response. With 1 MB for a response,
# brokers took more CPU time for each record, and this process no less
# (docs/BENCHMARKS.md).
FETCH_BYTES = 1_048_576
ANSWER_BYTES = 4 * FETCH_BYTES
# Bytes to buffer for a paused partition before it is paused in librdkafka, which then
# drops the records that it has fetched.
KEPT_BYTES = FETCH_BYTES
# For more seeks than this, a new client is made, which gets all positions at once:
# librdkafka visits all assigned partitions for each seek, which takes minutes for
# thousands.
SEEKS_MAX = 200
# Messages taken at once: below the 700 new objects that start Python's garbage
# collector.
MESSAGES_AT_ONCE = 500
# Bytes of messages retained beyond the last poll; estimated from some messages.
SPARE_BYTES = 16 * FETCH_BYTES
SIZED_EACH = 64
# The broker responds to the query only after the fetch under way.
_RANGE_TIMEOUT_S = 0.5 + FETCH_WAIT_MS / 1000
_UNKNOWN = -1
# How long further refusals of the login are not raised: there are several a second.
_REFUSED_QUIET_MS = 10_000
# Errors for a topic or partition that no longer exists.
_GONE = (
    KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - its public name
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
)
FETCHING = {
    **TOPIC_IDS,
    # As in kafka-python and Java; off by default in librdkafka.
    "check.crcs": True,
    "fetch.wait.max.ms": FETCH_WAIT_MS,
    "fetch.max.bytes": ANSWER_BYTES,
    "fetch.message.max.bytes": FETCH_BYTES,
    "queued.max.messages.kbytes": QUEUE_KBYTES,
    "queued.min.messages": QUEUE_RECORDS,
    "fetch.queue.backoff.ms": QUEUE_BACKOFF_MS,
    "socket.timeout.ms": REQUEST_TIMEOUT_MS,
    # Reports offsets behind control records, which are not returned.
    "enable.partition.eof": True,
}

# The group is not used, so no right to it is needed.
_NO_GROUP = KafkaError.GROUP_AUTHORIZATION_FAILED
_CUT_OFF = KafkaError._LOG_TRUNCATION  # noqa: SLF001 - its public name
_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001
_OUT_OF_PLACE = (
    _CUT_OFF,
    KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001
    KafkaError.OFFSET_OUT_OF_RANGE,
)


class FastRecord(Record, msgspec.Struct, frozen=True, gc=False):
    """A record that librdkafka fetched."""

    offset: int
    value: bytes | None
    token: Token | None
    _source: Any

    @property
    def topic(self) -> str:
        """Data topic."""
        name: str = self._source.topic()
        return name

    @property
    def partition(self) -> int:
        """Data partition."""
        number: int = self._source.partition()
        return number

    @property
    def timestamp_ms(self) -> int:
        """Timestamp in epoch milliseconds."""
        time_ms: int = self._source.timestamp()[1]
        return time_ms

    @property
    def timestamp_type(self) -> int:
        """A ``TimestampType`` value."""
        # PROTOCOL 2.1: librdkafka counts from 1.
        kind: int = self._source.timestamp()[0] - 1
        return kind

    @property
    def key(self) -> bytes | None:
        """Key bytes or None."""
        key: bytes | None = self._source.key()
        return key

    @property
    def headers(self) -> tuple[tuple[str, bytes], ...]:
        """Pairs of name and value."""
        return headers_of(self._source)

    @property
    def leader_epoch(self) -> int | None:
        """Leader epoch of the batch, or None."""
        epoch: int | None = self._source.leader_epoch()
        return epoch


def headers_of(message: Any) -> tuple[tuple[str, bytes], ...]:
    """Return a message's headers; names may be any bytes.

    If a name is not UTF-8, confluent-kafka raises at the first access. Later ones
    return pairs with a null pointer instead of the name: they may be printed, and the
    value may be used, but touching the name crashes. So the message gets valid headers
    before its next access.
    """
    try:
        return tuple(_headers(message) or ())
    except (SystemError, UnicodeDecodeError):
        pairs = _headers(message) or ()
    sound = [
        (_NO_TEXT, pair[1]) if repr(pair).startswith("(<NULL>") else pair
        for pair in pairs
    ]
    message.set_headers(sound)
    return tuple(sound)


def fast_records(messages: Sequence[Any], token: Token | None) -> Iterator[Record]:
    """Make records from messages of one partition."""
    if not messages:
        return iter(())
    first, last = messages[0].offset(), messages[-1].offset()
    is_whole = last - first == len(messages) - 1
    offsets: Iterable[int] = (
        # Offsets ascend, so none between these two is missing.
        range(first, last + 1) if is_whole else map(_offset, messages)
    )
    # All callables are built in: no Python frame per record.
    return map(
        FastRecord, offsets, map(Message.value, messages), repeat(token), messages
    )


def _timestamp_ms(message: Any) -> int:
    time_ms: int = message.timestamp()[1]
    return time_ms


MESSAGES = SourceKind(
    make=fast_records,
    offset=_offset,
    timestamp_ms=_timestamp_ms,
    key=Message.key,
    value=Message.value,
)


class FastDataReader(DataReader):
    """One librdkafka consumer with assigned partitions. One thread at a time.

    ``Positions`` holds assignment, positions and pauses; ``poll`` applies changes to
    librdkafka first. The first poll makes the consumer.

    Args:
        settings: Connection.
        isolation_level: ``read_uncommitted`` or ``read_committed``.
    """

    fetches_ahead = True

    def __init__(
        self, settings: ConnectionConfig, *, isolation_level: str = READ_UNCOMMITTED
    ) -> None:
        self._settings = settings
        self._config = {
            **FETCHING,
            "isolation.level": isolation_level,
        }
        self._pid = os.getpid()
        self._client: Client | None = None
        self._is_closed = False
        self._polling_thread = 0
        self._positions = Positions()
        # Every topic so far: if there is only one, messages need not be asked for it.
        self._topics: set[str] = set()
        # Topics, each with an id that its partitions are, or were, claimed under.
        self._wanted_ids: set[tuple[str, bytes]] = set()
        # State of librdkafka: assigned partitions, and paused ones.
        self._active: set[TopicPartition] = set()
        self._has_new_set = False
        self._paused_in_client: set[TopicPartition] = set()
        # Partitions to seek in librdkafka.
        self._to_seek: set[TopicPartition] = set()
        # Whether a broker has answered a fetch, so that it once accepted the login.
        self._has_read = False
        self._is_refusal_known = Deadline(0)
        # Partitions whose position librdkafka refused once.
        self._refused: set[TopicPartition] = set()
        # Messages that arrived while their partition was paused.
        self._buffered: dict[TopicPartition, list[Any]] = {}
        # Errors to raise, by partition (None: of no partition). Messages of these
        # partitions are dropped until then.
        self._errors: dict[TopicPartition | None, Any] = {}
        # Recent messages, as many as a poll may return; each new one frees an old one.
        # Python's garbage collector runs after 700 more allocations than releases, so
        # releasing whole polls of varying sizes would run it every third poll.
        self._retained: list[Any] = []
        self._most = 0

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Make this the exact set of partitions; see ``ports.DataReader``."""
        self._require_usable()
        self._positions.assign(partitions)
        self._has_new_set = True
        wanted = self._positions.next
        self._topics.update(each.topic for each in wanted)
        self._retained = []
        self._to_seek &= wanted.keys()
        for gone in self._buffered.keys() - wanted.keys():
            del self._buffered[gone]
        for unheard in self._errors.keys() - wanted.keys():
            del self._errors[unheard]

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
        if topic_id is not None:
            self._wanted_ids.add((partition.topic, topic_id))
        self._to_seek.add(partition)
        self._buffered.pop(partition, None)
        self._errors.pop(partition, None)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop fetching these until resumed; positions and buffers are kept."""
        self._require_usable()
        self._positions.pause(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Undo ``pause``; unknown or running partitions are left alone."""
        self._require_usable()
        self._positions.resume(partitions)

    def poll(
        self, timeout_ms: int, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Return up to ``max_records`` records; see ``ports.DataReader``."""
        self._require_usable()
        self._positions.require_all()
        deadline = Deadline(timeout_ms)
        self._polling_thread = threading.get_ident()
        try:
            if self._client is not None and self._client.is_outdated:
                self._renew_client()
            self._apply_changes()
            if not self._positions.next:
                if self._client is not None:
                    # librdkafka keeps errors and log lines until it is polled.
                    self._consume(max(1, max_records), {})
                time.sleep(deadline.left_s)
                return {}
            found = self._poll_until(deadline, max(1, max_records))
        except (KafkaException, RuntimeError) as error:
            if is_interrupt(error):
                raise
            raise self._translate(error) from error
        finally:
            self._polling_thread = 0
        tokens = self._positions.tokens
        return {
            partition: Records.of_sources(
                messages, token=tokens[partition], kind=MESSAGES
            )
            for partition, messages in found.items()
        }

    def positions(self) -> Mapping[TopicPartition, int]:
        """Return the next offset of each partition; see ``ports.DataReader``."""
        self._require_usable()
        found = {
            each: at for each, at in self._positions.next.items() if at is not None
        }
        for partition, kept in self._buffered.items():
            found[partition] = kept[0].offset()
        return found

    def ends(self) -> Mapping[TopicPartition, int]:
        """Return the log ends known from fetches; see ``ports.DataReader``."""
        self._require_usable()
        found = {}
        for partition in self._active & self._positions.next.keys():
            place = FastPartition(*partition)
            with suppress(KafkaException):
                _, end = self._handle().get_watermark_offsets(place, cached=True)
                if end >= 0:
                    found[partition] = end
        return found

    def disconnect(self) -> None:
        """Close the client in the background; the next poll makes another one."""
        self._retained = []
        self._discard_client()

    def close(self, timeout_ms: int) -> None:
        """Close every resource. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._retained = []
        client, self._client = self._client, None
        if client is not None and os.getpid() == self._pid:
            # A signal handler does not wait for the poll that it interrupts.
            is_in_poll = self._polling_thread == threading.get_ident()
            left_ms = 0 if is_in_poll else max(0, timeout_ms)
            close_consumer(client).join(timeout=left_ms / 1000)

    # --- applying changes to librdkafka

    def _handle(self) -> Any:
        if self._client is None:
            self._client = new_consumer(self._settings, self._config)
        return self._client.handle

    def _apply_changes(self) -> None:
        """Apply changes since the last poll to librdkafka; mostly there are none."""
        try:
            self._assign_and_seek()
        except KafkaException:
            # The client's state is unknown now; a new client gets all partitions.
            self._discard_client()
            raise

    def _renew_client(self) -> None:
        """Continue with a new client, from the same positions."""
        with suppress(MarshalError):  # files are changing: the next poll retries
            fresh = new_consumer(self._settings, self._config)
            self._discard_client()
            self._client = fresh

    def _discard_client(self) -> None:
        if self._client is not None:
            close_consumer(self._client)
        self._client = None
        self._active.clear()
        self._paused_in_client.clear()
        self._refused.clear()
        self._to_seek = set(self._positions.next)

    def _has_no_client(self) -> bool:
        return self._client is None

    def _assign_and_seek(self) -> None:
        if self._has_new_set:
            gone = self._active - self._positions.next.keys()
            if len(gone) > SEEKS_MAX:
                self._discard_client()
            elif gone:
                self._unassign(gone)
            self._has_new_set = False
        if resumed := self._paused_in_client - self._positions.paused:
            # Do not rely on librdkafka's own position.
            self._to_seek |= resumed
            self._handle().resume([FastPartition(*each) for each in resumed])
            self._paused_in_client -= resumed
        if len(self._to_seek & self._active) > SEEKS_MAX:
            self._discard_client()
        if self._to_seek:
            moved = [each for each in self._to_seek if not self._seek(each)]
            self._handle().incremental_assign(
                [self._to_partition(each) for each in moved]
            )
            self._active.update(moved)
            self._to_seek.clear()

    def _to_partition(self, partition: TopicPartition) -> FastPartition:
        offset = self._positions.next[partition]
        assert offset is not None
        return FastPartition(partition.topic, partition.partition, offset)

    def _seek(self, partition: TopicPartition) -> bool:
        """Seek in an assigned partition; return False if it must be assigned."""
        if partition not in self._active:
            return False
        try:
            self._handle().seek(self._to_partition(partition))
        except KafkaException:
            # Fetching has not started, so the queue has none of its records.
            self._unassign({partition})
            return False
        return True

    def _unassign(self, partitions: set[TopicPartition]) -> None:
        """Remove partitions from librdkafka, and their messages from its queue."""
        handle = self._handle()
        places = [FastPartition(*each, 0) for each in partitions]
        for place in places:
            # Only a seek empties the queue at once; it fails before the first fetch.
            with suppress(KafkaException):
                handle.seek(place)
        handle.resume(
            [FastPartition(*each) for each in self._paused_in_client & partitions]
        )
        handle.incremental_unassign(places)
        self._active -= partitions
        self._paused_in_client -= partitions

    # --- reading

    def _poll_until(
        self, deadline: Deadline, most: int
    ) -> dict[TopicPartition, list[Any]]:
        """Return messages by partition."""
        if self._errors:
            self._raise_error()
        found = self._resumed_messages(most) if self._buffered else {}
        assert self._client is not None
        handle, leaders = self._client.handle, self._client.leaders
        while not found:
            leaders.ask_if_due(handle, self._topics)
            is_taken = self._consume(most, found)
            if self._has_no_client():
                break
            left_s = deadline.left_s
            if not is_taken and left_s:
                # consume() waits until a batch is full: so poll for one, then take the
                # rest.
                first = handle.poll(leaders.max_wait_s(left_s))
                if first is None:
                    self._retained.clear()
                else:
                    self._add_messages([first], found)
                    if not self._has_no_client():
                        self._consume(most - 1, found)
            if self._has_no_client():
                break
            if not found:
                self._raise_error()
                self._raise_replaced()
                if not left_s:
                    break
        return found

    def _consume(self, most: int, found: dict[TopicPartition, list[Any]]) -> bool:
        """Add up to ``most`` waiting messages; return whether there were any."""
        self._most = max(self._most, most)
        handle = self._handle()
        left = most
        while left > 0:
            asked = min(left, MESSAGES_AT_ONCE)
            messages: list[Any] = handle.consume(asked, 0)
            self._add_messages(messages, found)
            if self._has_no_client():
                break
            self._retain(messages)
            left -= len(messages)
            if len(messages) < asked:
                break
        return left < most

    def _retain(self, messages: list[Any]) -> None:
        """Retain new messages and release as many old ones.

        Callers with large polls hold some records for long, for instance until they are
        granted; those would then be freed all at once. So more messages are retained
        than callers hold, up to ``SPARE_BYTES``.
        """
        if not messages:
            return
        spare = 0
        if self._most > MESSAGES_AT_ONCE:
            size = max(1, *map(len, messages[::SIZED_EACH]))
            spare = min(self._most + 2 * MESSAGES_AT_ONCE, SPARE_BYTES // size)
        self._retained += messages
        del self._retained[: -(self._most + spare)]

    def _resumed_messages(self, most: int) -> dict[TopicPartition, list[Any]]:
        """Return buffered messages of partitions that are no longer paused."""
        found: dict[TopicPartition, list[Any]] = {}
        for partition in [
            each for each in self._buffered if each not in self._positions.paused
        ]:
            if most <= 0:
                break
            kept = self._buffered.pop(partition)
            if len(kept) > most:
                self._buffered[partition] = kept[most:]
            found[partition] = kept[:most]
            most -= len(found[partition])
        return found

    def _add_messages(
        self, messages: list[Any], found: dict[TopicPartition, list[Any]]
    ) -> None:
        """Add messages to those to return. Hot path: calls cover whole runs.

        If the id of a topic has changed, messages of both topics are mixed: drop them
        all, and let a new client fetch them again.
        """
        assert self._client is not None
        if self._client.has_other_topic:
            self._discard_client()
            return
        ends: dict[TopicPartition, int] = {}
        if self._errors or any(map(Message.error, messages)):
            messages = self._without_errors(messages, ends)
        self._has_read = self._has_read or bool(messages or ends)
        for topic, number, run in self._runs(messages):
            partition = TopicPartition(topic, number)
            place = self._positions.next.get(partition)
            if place is None:
                continue
            if self._is_of_other_topic(partition):
                self._require_topic_id(partition)
                self._to_seek.add(partition)
                continue
            if run[0].offset() < place:
                run = [each for each in run if each.offset() >= place]  # noqa: PLW2901
            if not run:
                continue
            self._positions.next[partition] = run[-1].offset() + 1
            if partition in self._buffered or partition in self._positions.paused:
                self._buffer(partition, run)
            elif partition in found:
                found[partition] += run
            else:
                found[partition] = run
        for partition, end in ends.items():
            place = self._positions.next.get(partition)
            if place is not None and not self._is_of_other_topic(partition):
                self._positions.next[partition] = max(place, end)

    def _runs(self, messages: list[Any]) -> Iterator[tuple[str, int, list[Any]]]:
        """Split messages by partition; they arrive in long runs."""
        for number, numbered in _runs(messages, Message.partition):
            if len(self._topics) == 1:
                yield next(iter(self._topics)), number, numbered
            else:
                for topic, named in _runs(numbered, Message.topic):
                    yield topic, number, named

    def _buffer(self, partition: TopicPartition, messages: list[Any]) -> None:
        """Buffer messages of a paused partition; above a limit pause in librdkafka."""
        kept = self._buffered.setdefault(partition, [])
        kept += messages
        if sum(map(len, kept)) >= KEPT_BYTES or len(kept) >= QUEUE_RECORDS:
            self._handle().pause([FastPartition(*partition)])
            self._paused_in_client.add(partition)

    # --- faults

    def _without_errors(
        self, messages: list[Any], ends: dict[TopicPartition, int]
    ) -> list[Any]:
        """Record errors, and drop the messages behind one in its partition.

        librdkafka skips what it cannot read and continues behind it, or even elsewhere.
        Here the partition is set back, so that the error recurs.

        Args:
            messages: Messages and errors of librdkafka.
            ends: Gets the offset of each partition that was read to its end.
        """
        sound = []
        for message in messages:
            topic, error = message.topic(), message.error()
            partition = TopicPartition(topic or "", message.partition() or 0)
            if error is None:
                if partition not in self._errors:
                    sound.append(message)
            elif error.code() == _EOF:
                if partition not in self._errors:
                    ends[partition] = message.offset()
            elif partition in self._positions.next:
                self._errors.setdefault(partition, error)
            elif topic is None and error.code() != _NO_GROUP:
                self._errors[None] = error
        return sound

    def _raise_error(self) -> None:
        """Raise a refused login or a recorded error, if there is one.

        A login that was accepted before may be accepted again, for example once the
        broker can verify passwords again: the error is retriable, as that of an append
        is. Without rights to the log as well, the claims end with their leases.
        """
        assert self._client is not None
        refusal = self._client.refusal
        if refusal is not None:
            if not self._has_read:
                raise refusal
            self._client.refusal = None  # librdkafka reports each further attempt
            if self._is_refusal_known.is_over:
                self._is_refusal_known = Deadline(_REFUSED_QUIET_MS)
                raise CoordinationError(str(self._translate(refusal))) from refusal
        for partition in list(self._errors):
            error = self._errors.pop(partition)
            if partition is None:
                raise KafkaException(error)
            is_gone = error.code() in _GONE
            if self._is_of_other_topic(partition) or (
                is_gone and self._is_by_id(partition)
            ):
                self._to_seek.add(partition)
                raise unknown_topic_error(partition)
            if error.code() in _OUT_OF_PLACE:
                self._raise_outside(partition, is_cut_off=error.code() == _CUT_OFF)
            self._to_seek.add(partition)
            raise KafkaException(error)

    def _is_by_id(self, partition: TopicPartition) -> bool:
        return self._positions.topic_ids[partition] is not None

    def _is_of_other_topic(self, partition: TopicPartition) -> bool:
        """Return whether librdkafka fetches another topic than the one wanted."""
        wanted = self._positions.topic_ids[partition]
        assert self._client is not None
        return wanted is not None and wanted != self._client.topic_ids.get(
            partition.topic
        )

    def _require_topic_id(self, partition: TopicPartition) -> None:
        """Raise for records of a topic whose id librdkafka has not reported.

        Raises:
            ConfigurationError: This release does not report it.
        """
        assert self._client is not None
        if partition.topic not in self._client.topic_ids:
            raise ConfigurationError(
                f"librdkafka {libversion()[0]} does not report which topic it reads as "
                f"{partition.topic!r}, so records of an earlier topic of this name "
                "could be taken for its own. Use transport='kafka-python', or a "
                "release of confluent-kafka that kafka-marshal is tested with.",
                setting="transport",
            )

    def _raise_replaced(self) -> None:
        """Raise for a partition whose topic has another id than the one wanted.

        Each poll without records calls this, so it visits partitions only if a topic
        has another id.

        Raises:
            UnknownTopicId: There is one.
        """
        assert self._client is not None
        ids = self._client.topic_ids
        if all(ids.get(topic, wanted) == wanted for topic, wanted in self._wanted_ids):
            return
        wanted_ids = self._positions.topic_ids.items()
        self._wanted_ids = {(each.topic, of) for each, of in wanted_ids if of}
        for partition in self._positions.next.keys() - self._positions.paused:
            is_known = partition.topic in self._client.topic_ids
            if is_known and self._is_of_other_topic(partition):
                raise unknown_topic_error(partition)

    def _raise_outside(self, partition: TopicPartition, *, is_cut_off: bool) -> None:
        """Raise the error for a position outside its log, with the log's range."""
        requested = self._positions.next[partition]
        assert requested is not None
        start = end = _UNKNOWN
        # Without an answer, report the error without the range.
        with suppress(KafkaException):
            start, end = self._handle().get_watermark_offsets(
                FastPartition(*partition), timeout=_RANGE_TIMEOUT_S
            )
        if start <= requested <= end and not is_cut_off:
            if partition in self._refused:
                # librdkafka stays at another offset, for example behind a record that
                # it could not read.
                self._discard_client()
            else:
                self._refused.add(partition)
                self._to_seek.add(partition)
            raise CoordinationError(
                f"Position {requested} of {partition} was refused, but its log has it "
                f"(offsets {start} to {end}). Poll again."
            )
        what = "was cut off by a truncation" if is_cut_off else "is outside its log"
        raise outside_error(partition, requested, what=what, start=start, end=end)

    def _translate(self, error: Exception) -> Exception:
        return translate_error(
            error,
            doing="Reading data partitions",
            access=Access.READ,
            needs=required_right(
                Access.READ, *{place.topic for place in self._positions.next}
            ),
            addresses=self._settings.addresses,
        )

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise forked_error("Reading data partitions")
        if self._is_closed:
            raise InvalidTransition("The reader is closed; open a new one.")


def _runs(
    messages: list[Any], what: Callable[[Any], Any]
) -> Iterator[tuple[Any, list[Any]]]:
    """Split messages where ``what`` changes; a single run is not copied."""
    if not messages:
        return
    marks = list(map(what, messages))
    if marks.count(marks[0]) == len(marks):
        yield marks[0], messages
        return
    start = 0
    for mark, group in groupby(marks):
        end = start + len(list(group))
        yield mark, messages[start:end]
        start = end
