"""The coordination topic over kafka-python: ``ports.CoordinationLog``.

One consumer with all partitions assigned (a single fetch session) reads; a ``Writer``
writes; an admin client queries log ends, for any thread, without waiting behind a fetch
that waits for records. Reader and writer set the options that PROTOCOL 2.1 requires:
the defaults of kafka-python would rewind silently after a truncation, and could turn
idempotence off without an error.
"""

import threading
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any

from kafka import KafkaProducer
from kafka import errors as kafka_errors

from kafka_marshal.closing import in_background
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import MarshalError
from kafka_marshal.kafka_io.clients import (
    AdminClient,
    ConnectionWatch,
    close_by_force,
    new_client,
)
from kafka_marshal.kafka_io.data import KafkaOffsets
from kafka_marshal.kafka_io.entries import EntryReader
from kafka_marshal.kafka_io.faults import required_right
from kafka_marshal.kafka_io.patches import request_updates_once
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topic_rules import TopicDescription
from kafka_marshal.kafka_io.topiclog import Runs, TopicLog
from kafka_marshal.kafka_io.topics import describe_log
from kafka_marshal.kafka_io.translate import Access, translate_error
from kafka_marshal.kafka_io.writer import (
    LINGER_MS,
    OVERDUE_GRACE_MS,
    ProducerHandle,
    no_answer,
)
from kafka_marshal.protocol.types import TopicPartition

# Without metadata a send fails after this time, and the engine sends again.
_SEND_BLOCK_MS = 50


class KafkaProducerHandle(ProducerHandle):
    """One connected producer that has the topic's metadata."""

    is_outdated = False  # kafka-python loads files of TLS for each connection

    def __init__(
        self,
        settings: ConnectionConfig,
        timeouts: Mapping[str, int],
        *,
        lingers: bool,
        timeout_ms: int,
    ) -> None:
        """Connect, and fetch the topic's metadata.

        Args:
            settings: Connection and name of the topic.
            timeouts: Request and delivery timeout, as kafka-python names them.
            lingers: Whether a record waits a moment for others.
            timeout_ms: Limit for the whole call.

        Raises:
            KafkaError: No connection could be made.
        """
        deadline = Deadline(timeout_ms)
        self._topic = settings.coordination_topic
        self._watch = ConnectionWatch()
        config = {
            **settings.client_config(),
            **timeouts,
            "acks": "all",
            "enable_idempotence": True,
            "linger_ms": LINGER_MS if lingers else 0,
            "max_block_ms": _SEND_BLOCK_MS,
            "allow_auto_create_topics": False,
            "metrics_enabled": False,
            "bootstrap_timeout_ms": timeout_ms,
        }
        try:
            self._producer = new_client(
                KafkaProducer, config, topic=self._topic, watch=self._watch
            )
        except kafka_errors.KafkaError as error:
            raise error from self._watch.last
        request_updates_once(self._producer)
        self.config = self._producer.config
        # Conflicting options turn idempotence off without an error.
        assert self.config["enable_idempotence"] is True
        assert self.config["acks"] == -1
        while True:
            try:
                self._producer.partitions_for(self._topic)
            except kafka_errors.KafkaTimeoutError as error:
                if not deadline.is_over:
                    continue
                self.end()
                raise error from self._watch.last
            except BaseException:  # such as Ctrl-C
                self.end()
                raise
            else:
                return

    @property
    def connection_error(self) -> Exception | None:
        """See ``ProducerHandle``."""
        return self._watch.last

    def send(
        self,
        partition: int,
        value: bytes,
        *,
        report: Callable[[int | Exception], None],
    ) -> None:
        """Start sending one record; see ``ProducerHandle``."""

        def written(sent: Any) -> None:
            self._watch.last = None
            report(sent.offset)

        try:
            # PROTOCOL 2.1: null key, explicit partition.
            future = self._producer.send(
                self._topic, value=value, key=None, partition=partition
            )
        except kafka_errors.KafkaTimeoutError as error:
            raise _unanswered(error) from error
        future.add_callback(written)
        future.add_errback(lambda error: report(_unanswered(error)))

    def end(self) -> threading.Thread:
        """Flush and close on a background thread, within the delivery timeout."""
        limit_s = (self.config["delivery_timeout_ms"] + OVERDUE_GRACE_MS) / 1000

        def end() -> None:
            try:
                self._producer.close(timeout=limit_s)
            except kafka_errors.KafkaError:
                close_by_force(self._producer)

        return in_background(end)

    def drop(self) -> threading.Thread:
        """Close by force on a background thread."""
        return in_background(lambda: close_by_force(self._producer))


def _unanswered(error: Exception) -> Exception:
    """Return an error as a ``TimeoutError`` if it only states that time is up."""
    is_late = isinstance(error, kafka_errors.KafkaTimeoutError)
    return TimeoutError(str(error)) if is_late else error


class KafkaCoordinationLog(TopicLog):
    """All partitions of the coordination topic, read by kafka-python."""

    _reader: EntryReader | None = None
    _querier: KafkaOffsets | None = None

    def _new_producer_handle(
        self, timeouts: Mapping[str, int], timeout_ms: int
    ) -> ProducerHandle:
        return KafkaProducerHandle(
            self._settings, timeouts, lingers=self._lingers, timeout_ms=timeout_ms
        )

    def _describe(
        self, client: AdminClient | None, timeout_ms: int
    ) -> tuple[str, TopicDescription]:
        return describe_log(self._settings, client=client, timeout_ms=timeout_ms)

    def _connect(self, deadline: Deadline) -> None:
        self._reader = EntryReader(
            self._settings,
            fetch_wait_ms=self._fetch_wait_ms,
            timeout_ms=deadline.require_ms(no_answer),
        )

    def _limit_requests(self, timeout_ms: int) -> None:
        assert self._reader is not None
        self._reader.limit_requests(timeout_ms)

    def _prepare(self) -> None:
        self._querier = KafkaOffsets(self._settings)

    def _disconnect(self) -> None:
        if self._querier is not None:
            self._querier.close(0)
        if self._reader is not None:
            self._reader.close()

    def _seek(self, offsets: Mapping[int, int]) -> None:
        assert self._reader is not None
        for number, offset in offsets.items():
            self._next[number] = offset
        self._reader.seek(self._read, offsets)

    def _fetch(self, timeout_ms: int) -> Runs:
        assert self._reader is not None
        try:
            return self._reader.poll(timeout_ms)
        except kafka_errors.OffsetOutOfRangeError as error:
            places = error.args[0] if error.args else ()
            if places and self._skips_deleted(
                (p.partition for p in places), timeout_ms
            ):
                return []
            raise

    def _fetch_positions(self, partitions: Collection[int]) -> Mapping[int, int]:
        assert self._reader is not None
        found: dict[int, int] = {}
        for number in partitions:
            try:
                found[number] = self._reader.position(number)
            except kafka_errors.LogTruncationError as error:
                # kafka-python raises it only once; the next poll must raise it.
                self._record_fault(
                    self._translate(error, "Reading", Access.READ), error
                )
                break
            except kafka_errors.KafkaError:
                continue
        return found

    def _query_offsets(
        self, timeout_ms: int, *, is_end: bool, partitions: Iterable[int] | None = None
    ) -> Mapping[int, int]:
        numbers = self._read if partitions is None else partitions
        if is_end:
            assert self._querier is not None
            asked = [TopicPartition(self._topic, number) for number in numbers]
            ends = self._querier.ends(asked, timeout_ms)
            return {place.partition: offset for place, offset in ends.items()}
        assert self._reader is not None
        return self._reader.starts(numbers, timeout_ms=timeout_ms)

    def _find_added(
        self, partitions: Sequence[int], timeout_ms: int
    ) -> Mapping[int, int]:
        assert self._querier is not None
        asked = [TopicPartition(self._topic, number) for number in partitions]
        starts = self._querier.starts(asked, timeout_ms)
        return {place.partition: offset for place, offset in starts.items()}

    def _query_time(self, time_ms: int, timeout_ms: int) -> Mapping[int, int]:
        assert self._querier is not None
        asked = {TopicPartition(self._topic, number): time_ms for number in self._read}
        found = self._querier.at_times(asked, timeout_ms)
        return {
            place.partition: offset
            for place, offset in found.items()
            if offset is not None
        }

    def _lost_partitions(self, error: Exception) -> Sequence[int]:
        if isinstance(error, kafka_errors.OffsetOutOfRangeError):
            places = error.args[0] if error.args else ()
        elif isinstance(error, kafka_errors.LogTruncationError):
            places = error.divergent_offsets
        else:
            places = ()
        return [place.partition for place in places]

    def _translate(self, error: Exception, doing: str, access: Access) -> MarshalError:
        return translate_error(
            error,
            doing=doing,
            access=access,
            addresses=self._settings.addresses,
            needs=required_right(access, self._topic),
        )
