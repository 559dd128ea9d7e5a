"""Transactions of librdkafka: records and a position, written atomically.

The broker fences by transactional id: only the last producer that was initialized with
an id can write.
"""

import time
from collections.abc import Iterable
from contextlib import suppress

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kafka_marshal.closing import Closing, in_background
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import DeadlineExceeded, MarshalError
from kafka_marshal.kafka_io.fast.clients import (
    LOSSES,
    Client,
    close_consumer,
    new_consumer,
    new_producer,
)
from kafka_marshal.kafka_io.fast.translate import (
    Access,
    cause_of,
    is_refusal,
    translate_error,
)
from kafka_marshal.kafka_io.faults import fenced_error, refused_error
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.outgoing import (
    MURMUR2_RANDOM,
    Outgoing,
    SourceProgress,
    require_data_topics,
)
from kafka_marshal.ports import READ_COMMITTED
from kafka_marshal.protocol import types

_FENCED = (
    KafkaError._FENCED,  # noqa: SLF001 - its public name
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
)
_REFUSED = (
    KafkaError.INVALID_RECORD,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
)
_ABSENT = (KafkaError.LEADER_NOT_AVAILABLE, KafkaError.UNKNOWN_TOPIC_OR_PART)
_FATAL = KafkaError._FATAL  # noqa: SLF001 - its public name
_POLL_S = 0.1
# Time after its creation from which all brokers know a topic.
_CREATED_MS = 3_000
# Least time of a step. Even if a suspension of the process has used up the deadline, a
# broker that answers can report in this time what became of a transaction.
_STEP_S = 1.0
_BY_KEY = -1
# The largest value that librdkafka accepts: the topic decides which records are too
# large.
_RECORD_BYTES_MAX = 1_000_000_000


class Transactions(Closing):
    """A producer with a transactional id, and its positions. For one thread.

    Opening it fences every earlier producer of the same id.
    """

    def __init__(
        self,
        settings: ConnectionConfig,
        transactional_id: str,
        *,
        group_id: str,
        timeout_ms: int,
        partitioner: str = MURMUR2_RANDOM,
    ) -> None:
        """Connect, and fence earlier producers.

        Args:
            settings: Connection.
            transactional_id: Transactional id.
            group_id: Kafka consumer group that keeps the positions.
            timeout_ms: Limit for this and each later call. A transaction that is open
                for longer is aborted by the broker.
            partitioner: How librdkafka chooses a partition by a key; by default as
                the clients of Java and kafka-python do.

        Raises:
            MarshalError: The cluster did not answer, or a right is missing.
        """
        self._id = transactional_id
        self._settings = settings
        self._timeout_ms = timeout_ms
        self._is_under_way = False
        # Topics that are known to exist.
        self._found: set[str] = set()
        self._consumer: Client | None = None
        self._group_id = group_id
        config = {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": max(1_000, timeout_ms),
            "message.max.bytes": _RECORD_BYTES_MAX,
            "partitioner": partitioner,
        }
        self._producer = new_producer(settings, config)
        try:
            # Waits for a position whose transaction is being committed.
            level = {"isolation.level": READ_COMMITTED}
            self._consumer = new_consumer(settings, {"group.id": group_id, **level})
            self._producer.handle.init_transactions(timeout_ms / 1000)
            self._producer.on_answer()
        except KafkaException as error:
            failure = self._translate(error, "Beginning")
            self.close()
            raise failure from error
        except BaseException:
            self.close()
            raise

    @property
    def is_outdated(self) -> bool:
        """Whether its connections fail, and a new one would load renewed files."""
        self._poll()
        return self._producer.is_outdated

    def position(
        self, partition: types.TopicPartition, *, topic_id: str = ""
    ) -> int | None:
        """Return the position of the last transaction, None before the first.

        Args:
            partition: Source partition.
            topic_id: Kafka's id of its topic in hex. The position of another topic of
                that name is ignored. If the id is unknown (empty), any counts.

        Raises:
            MarshalError: The cluster did not answer.
        """
        found = self.progress(partition, timeout_ms=self._timeout_ms)
        if found is None:
            return None
        is_of_another = topic_id and found.metadata and topic_id != found.metadata
        return None if is_of_another else found.position

    def progress(
        self, partition: types.TopicPartition, *, timeout_ms: int
    ) -> SourceProgress | None:
        """Return what the last committed transaction wrote, None before the first.

        Raises:
            MarshalError: The cluster did not answer.
        """
        assert self._consumer is not None
        doing = "Querying the position"
        try:
            (found,) = self._consumer.handle.committed(
                [TopicPartition(*partition)],
                timeout=max(self._least_s, timeout_ms / 1000),
            )
        except KafkaException as error:
            raise self._translate(error, doing) from error
        except UnicodeDecodeError:
            return None  # another tool committed it
        if found.error is not None:
            raise self._translate(KafkaException(found.error), doing)
        if found.offset < 0:
            return None
        return SourceProgress(int(found.offset), found.metadata or "")

    def write(
        self,
        records: Iterable[Outgoing],
        *,
        partition: types.TopicPartition,
        position: int,
        metadata: str = "",
    ) -> None:
        """Write records and a position in one transaction.

        Args:
            records: Records.
            partition: Source partition.
            position: Its next position after these records.
            metadata: ASCII text that is kept with the position. ``position`` expects
                Kafka's id of the source topic in hex, or nothing if it is unknown.

        Raises:
            ClaimLost: A later producer has this id; nothing was written.
            ConfigurationError: A record is for the coordination topic; nothing was
                written.
            MarshalError: The outcome is unknown. Open again, and check the position.
        """
        assert self._consumer is not None
        handle, records = self._producer.handle, list(records)
        topics = dict.fromkeys(record.topic for record in records)
        require_data_topics(topics, self._settings.coordination_topic)
        doing = writing = f"Writing to {', '.join(topics) or 'no topic'}"
        deadline = Deadline(self._timeout_ms)
        try:
            for topic in topics.keys() - self._found:
                self._find(topic, deadline)
            handle.begin_transaction()
            self._is_under_way = True
            for record in records:
                self._produce(record, deadline)
            doing = f"Adding the position of {partition} to a transaction"
            handle.send_offsets_to_transaction(
                [TopicPartition(*partition, position, metadata)],
                self._consumer.handle.consumer_group_metadata(),
                self._left_s(deadline),
            )
            doing = writing
            handle.commit_transaction(self._left_s(deadline))
            self._is_under_way = False
            self._producer.on_answer()
        except KafkaException as error:
            raise self._translate(error, doing) from error
        except KafkaError as error:  # type: ignore[misc] # as the binding rarely does
            raise self._translate(KafkaException(error), doing) from error

    def _find(self, topic: str, deadline: Deadline) -> None:
        """Find a topic: librdkafka would wait for it longer than for a commit."""
        created = deadline.within(_CREATED_MS)
        handle = self._producer.handle
        while True:
            found = handle.list_topics(topic, timeout=self._left_s(deadline))
            error = found.topics[topic].error
            if error is None:
                self._found.add(topic)
                return
            if error.code() not in _ABSENT or created.is_over:
                raise KafkaException(error)
            time.sleep(_POLL_S)

    def _produce(self, record: Outgoing, deadline: Deadline) -> None:
        handle = self._producer.handle
        while True:
            try:
                handle.produce(
                    record.topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                    partition=_BY_KEY if record.partition is None else record.partition,
                )
            except BufferError:
                if deadline.is_over:
                    raise DeadlineExceeded(
                        f"{record.topic} accepted no record within "
                        f"{self._timeout_ms} ms; check the broker's log"
                    ) from None
                handle.poll(_POLL_S)
            else:
                handle.poll(0)
                return

    @property
    def _least_s(self) -> float:
        return min(_STEP_S, self._timeout_ms / 1000)

    def _left_s(self, deadline: Deadline) -> float:
        return max(self._least_s, deadline.left_s)

    def close(self) -> None:
        """Close; an open transaction is aborted. Idempotent.

        If no broker answers, closing takes a second at most. The next producer of this
        id then aborts the transaction, or the broker does after its timeout.
        """
        try:
            if self._is_under_way:
                self._is_under_way = False
                with suppress(KafkaException):
                    self._producer.handle.abort_transaction(self._least_s)
        finally:  # also after Ctrl-C
            consumer, self._consumer = self._consumer, None
            if consumer is not None:
                close_consumer(consumer)
            # On another thread, where no signal handlers run: if one raises while a
            # handle is destroyed, Python raises a SystemError.
            in_background(self._producer.release).join(self._least_s)

    def _poll(self, timeout_s: float = 0.0) -> KafkaException | None:
        """Handle reports of failed connections; return a fatal error, if any."""
        try:
            self._producer.handle.poll(timeout_s)
        except KafkaException as why:
            return why
        return None

    def _explained(self, error: Exception) -> Exception:
        """Return an error with the reason of the last failed connection, if known."""
        self._poll()
        last, cause = self._producer.last, cause_of(error)
        if last is None or is_refusal(last):
            return last or error
        text = f"{cause.str()}; the last attempt to connect: {cause_of(last).str()}"
        return KafkaException(KafkaError(cause.code(), text))

    def _translate(self, error: Exception, doing: str) -> MarshalError:
        cause = cause_of(error)
        if cause is not None and cause.code() == _FATAL:
            error = self._poll(_POLL_S) or error
            cause = cause_of(error)
        elif cause is not None and cause.code() in LOSSES:
            error = self._explained(error)
        if cause is not None and cause.code() in _FENCED:
            return fenced_error(f"{doing} as {self._id}")
        if cause is not None and cause.code() in _REFUSED:
            return refused_error(f"{doing} as {self._id}", cause.name())
        needs = f"WRITE on transactional id {self._id}, and on the topic"
        if cause is not None and cause.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            needs = f"READ on group {self._group_id}"
        return translate_error(
            error,
            doing=f"{doing} as {self._id}",
            access=Access.WRITE,
            needs=needs,
            addresses=self._settings.addresses,
        )
