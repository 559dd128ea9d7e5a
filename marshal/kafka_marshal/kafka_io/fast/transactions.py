"""Transactions of librdkafka: records and how far they go, all or nothing.

The broker knows one producer by each transactional id: whoever begins with it last.
An earlier one can write nothing any more, whatever it believes of itself.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kafka_marshal.closing import Closing
from kafka_marshal.errors import ClaimLost, DeadlineExceeded, MarshalError
from kafka_marshal.kafka_io.fast.clients import (
    Client,
    close_consumer,
    new_consumer,
    new_producer,
)
from kafka_marshal.kafka_io.fast.translate import Access, cause_of, translate_error
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.protocol import types

_FENCED = (
    KafkaError._FENCED,  # noqa: SLF001 - its public name
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
)
_FATAL = KafkaError._FATAL  # noqa: SLF001 - its public name
_POLL_S = 0.1


class Outgoing(NamedTuple):
    """A record to be written."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Transactions(Closing):
    """A producer with a transactional id, and the positions that go with it.

    Beginning fences every earlier producer of the same id. Used by one thread.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        transactional_id: str,
        *,
        group_id: str,
        timeout_ms: int,
    ) -> None:
        """Begin with the id.

        Args:
            settings: Where the cluster is.
            transactional_id: What the broker fences by.
            group_id: Consumer group of Kafka's that keeps the positions.
            timeout_ms: How long this and each later call may take.

        Raises:
            MarshalError: The cluster did not answer, or does not let us.
        """
        self._id = transactional_id
        self._settings = settings
        self._timeout_ms = timeout_ms
        self._is_under_way = False
        self._consumer: Client | None = None
        config = {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": max(1_000, timeout_ms),
        }
        self._producer = new_producer(settings, config)
        try:
            self._consumer = new_consumer(settings, {"group.id": group_id})
            self._producer.handle.init_transactions(timeout_ms / 1000)
        except BaseException as error:
            self.close()
            if isinstance(error, KafkaException):
                raise self._translate(error, "Beginning") from error
            raise

    def position(self, partition: types.TopicPartition) -> int | None:
        """Return the position that the last transaction left, None before the first.

        Raises:
            MarshalError: The cluster did not answer.
        """
        assert self._consumer is not None
        doing = "Looking up the position"
        try:
            (found,) = self._consumer.handle.committed(
                [TopicPartition(*partition)], timeout=self._timeout_ms / 1000
            )
        except KafkaException as error:
            raise self._translate(error, doing) from error
        if found.error is not None:
            raise self._translate(KafkaException(found.error), doing)
        return None if found.offset < 0 else int(found.offset)

    def write(
        self,
        topic: str,
        records: Iterable[Outgoing],
        *,
        partition: types.TopicPartition,
        position: int,
    ) -> None:
        """Write records and leave a position, in one transaction.

        Args:
            topic: Where to.
            records: What; partitions are chosen by key.
            partition: What they were made of.
            position: How far it is done with, then.

        Raises:
            ClaimLost: A later producer of this id has begun; nothing was written.
            MarshalError: It was not confirmed. Begin anew, and look at the position.
        """
        assert self._consumer is not None
        handle = self._producer.handle
        try:
            handle.begin_transaction()
            self._is_under_way = True
            for record in records:
                self._produce(topic, record)
            handle.send_offsets_to_transaction(
                [TopicPartition(*partition, position)],
                self._consumer.handle.consumer_group_metadata(),
                self._timeout_ms / 1000,
            )
            handle.commit_transaction(self._timeout_ms / 1000)
            self._is_under_way = False
        except KafkaException as error:
            raise self._translate(error, f"Writing to {topic}") from error

    def _produce(self, topic: str, record: Outgoing) -> None:
        deadline = time.monotonic() + self._timeout_ms / 1000
        handle = self._producer.handle
        while True:
            try:
                handle.produce(
                    topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                )
            except BufferError:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{topic} took no record within {self._timeout_ms} ms; look "
                        "at the broker's log"
                    ) from None
                handle.poll(_POLL_S)
            else:
                handle.poll(0)
                return

    def close(self) -> None:
        """Let go; what is not committed is undone. Idempotent."""
        if self._is_under_way:
            self._is_under_way = False
            with suppress(KafkaException):
                self._producer.handle.abort_transaction(self._timeout_ms / 1000)
        if self._consumer is not None:
            close_consumer(self._consumer)
            self._consumer = None
        self._producer.release()

    def _why_fatal(self) -> KafkaException | None:
        # Once it is over, librdkafka tells why only to who polls.
        try:
            self._producer.handle.poll(_POLL_S)
        except KafkaException as why:
            return why
        return None

    def _translate(self, error: KafkaException, doing: str) -> MarshalError:
        cause = cause_of(error)
        if cause is not None and cause.code() == _FATAL:
            error = self._why_fatal() or error
            cause = cause_of(error)
        if cause is not None and cause.code() in _FENCED:
            return ClaimLost(
                f"{doing} as {self._id} is over: a later producer of that id has "
                "begun, and the broker takes nothing from this one",
                reason="fenced",
            )
        return translate_error(
            error,
            doing=f"{doing} as {self._id}",
            access=Access.WRITE,
            needs=f"WRITE on transactional id {self._id}, and on the topic",
            addresses=self._settings.addresses,
        )
