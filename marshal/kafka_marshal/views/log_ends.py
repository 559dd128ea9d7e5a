"""Log ends of data partitions, for views that show lag."""

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kafka_marshal.closing import Closing
from kafka_marshal.defaults import COORDINATION_TOPIC, SERVERS
from kafka_marshal.errors import CoordinationError
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import open_offsets
from kafka_marshal.protocol.types import TopicPartition

if TYPE_CHECKING:
    from kafka_marshal.kafka_io.data import KafkaOffsets
    from kafka_marshal.kafka_io.fast.topics import FastOffsets

TIMEOUT_MS = 30_000
LOG_ENDS_MS_MAX = 5_000


class LogEnds(Closing):
    """Queries log ends for display. Thread-safe, blocking, a context manager.

    The first query connects.

    Args:
        bootstrap_servers: Addresses of the cluster.
        coordination_topic: Name of the coordination topic.
        options: Security and connection options.
        transport: ``auto``, ``fast`` or ``kafka-python``; see ``Marshal``.
        timeout_ms: Longest time of a query; at most ``LOG_ENDS_MS_MAX`` applies.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        self._settings = ConnectionConfig(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
        )
        self._lock = threading.Lock()
        self._query: FastOffsets | KafkaOffsets | None = None
        self._timeout_ms = min(timeout_ms, LOG_ENDS_MS_MAX)

    def of(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the log ends of data partitions, as far as they are known.

        Partitions that do not exist, have no leader or may not be described are absent;
        without an answer in time the result is empty.

        Raises:
            ConfigurationError: The requested transport cannot be used.
        """
        with self._lock:
            if self._query is None:
                self._query = open_offsets(self._settings)
            query = self._query
        try:
            return query.known_ends(partitions, self._timeout_ms)
        except CoordinationError:
            return {}

    def close(self, *, timeout_ms: int = 1_000) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            query, self._query = self._query, None
        if query is not None:
            query.close(timeout_ms)
