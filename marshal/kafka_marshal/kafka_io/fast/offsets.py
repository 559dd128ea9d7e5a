"""Log ends of data partitions over librdkafka."""

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as FastPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import MarshalError
from kafka_marshal.kafka_io.fast.clients import (
    LOSSES,
    Client,
    close_admin,
    new_admin,
)
from kafka_marshal.kafka_io.fast.translate import Access, cause_of, translate_error
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.protocol.types import TopicPartition

_TIMED_OUT = KafkaError._TIMED_OUT  # noqa: SLF001 - its public name


class FastOffsets:
    """Queries log ends; the last stable offsets play no part. Thread-safe, blocking.

    The first query connects.
    """

    def __init__(self, settings: ConnectionConfig) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._client: Client | None = None
        # Requests of the last query.
        self._sent: tuple[Future[Any], ...] = ()

    def known_ends(
        self, partitions: Collection[TopicPartition], timeout_ms: int
    ) -> dict[TopicPartition, int]:
        """Return the log end offset of each partition that can be queried.

        Partitions without a topic, a leader or the right to see it are absent.

        Raises:
            CoordinationError: There was no answer in time.
        """
        if not partitions:
            return {}
        deadline = Deadline(timeout_ms)
        with self._lock:
            if self._client is None:
                self._client = new_admin(self._settings)
            handle = self._client.handle
            topics = TopicCollection(sorted({each.topic for each in partitions}))
            described = handle.describe_topics(
                topics, request_timeout=_left_s(deadline)
            )
            led = {
                TopicPartition(topic, found.id)
                for topic, row in self._results(described, deadline)
                for found in row.partitions
                if found.leader is not None
            }
            end = OffsetSpec.latest()  # type: ignore[no-untyped-call]
            places = {FastPartition(*each): end for each in partitions if each in led}
            if not places:
                return {}
            listed = handle.list_offsets(places, request_timeout=_left_s(deadline))
            return {
                TopicPartition(place.topic, place.partition): row.offset
                for place, row in self._results(listed, deadline)
            }

    def close(self, timeout_ms: int) -> None:
        """Close the connection in the background. Idempotent."""
        del timeout_ms
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            close_admin(client, self._sent)

    def _results(
        self, futures: "Mapping[Any, Future[Any]]", deadline: Deadline
    ) -> list[tuple[Any, Any]]:
        """Wait for all requests, and return the results of those that succeeded."""
        self._sent = tuple(futures.values())
        _, late = wait(self._sent, timeout=deadline.left_s)
        if late:
            raise self._error(KafkaException(KafkaError(_TIMED_OUT)))
        found = []
        for name, future in futures.items():
            error = future.exception(0)
            if error is None:
                found.append((name, future.result(0)))
            elif cause_of(error) is None or cause_of(error).code() in LOSSES:
                raise self._error(error)
        return found

    def _error(self, error: Any) -> MarshalError:
        return translate_error(
            error,
            doing="Querying log ends",
            access=Access.READ,
            addresses=self._settings.addresses,
        )


def _left_s(deadline: Deadline) -> float:
    """Return the time until a deadline, for a request: at least a millisecond."""
    return max(0.001, deadline.left_s)
