"""Writes records to a real data topic: a first fill, then more at a steady rate.

Not part of the demo, because tests use it, too.
"""

import threading
import time
from collections.abc import Mapping

from kafka_marshal.errors import InvalidTransition, MarshalError
from kafka_marshal.kafka_io.producing import KafkaRecordWriter
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin

TICK_S = 0.05
TIMEOUT_MS = 15_000


def create_topic(
    bootstrap_servers: str,
    topic: str,
    *,
    partitions: int,
    timeout_ms: int = TIMEOUT_MS,
) -> None:
    """Make a data topic with the cluster's own settings.

    Raises:
        TopicMisconfigured: The topic exists, or the cluster refuses it.
        CoordinationError: The cluster did not answer; the topic may exist anyway.
    """
    with KafkaTopicAdmin(ConnectionConfig(bootstrap_servers)) as admin:
        admin.create_data_topic(topic, partitions=partitions, timeout_ms=timeout_ms)


class Producing(KafkaRecordWriter):
    """Writes numbered records to the partitions of a topic in turn. A context manager.

    Record ``n`` has its number in decimal as value, and goes to partition ``n mod
    partitions``. Used by one thread; ``start`` starts another, which writes until
    ``finish``.
    """

    def __init__(self, bootstrap_servers: str, topic: str, *, partitions: int) -> None:
        """Connect.

        Args:
            bootstrap_servers: Addresses of the cluster.
            topic: The topic; it exists.
            partitions: Its number of partitions.

        Raises:
            CoordinationError: The cluster did not answer.
        """
        super().__init__(ConnectionConfig(bootstrap_servers), topic)
        self._partitions = partitions
        self._next = 0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def fill(self, count: int, *, timeout_ms: int = TIMEOUT_MS) -> None:
        """Write ``count`` records and wait until they are acknowledged.

        Raises:
            CoordinationError: A record could not be written.
            DeadlineExceeded: They were not acknowledged in time.
        """
        self._send(count)
        self.flush(timeout_ms)

    def start(self, *, per_second: int) -> None:
        """Continue writing at a steady rate, in the background, until ``finish``."""
        if self._thread is not None:
            raise InvalidTransition("records are being written already")
        self._thread = threading.Thread(
            target=self._run, args=(per_second,), name="marshal-producing", daemon=True
        )
        self._thread.start()

    def finish(self, *, timeout_ms: int = TIMEOUT_MS) -> Mapping[int, int]:
        """Stop writing; return how many records each partition has now.

        Raises:
            CoordinationError: A record could not be written.
            DeadlineExceeded: They were not acknowledged in time.
        """
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(timeout=timeout_ms / 1000)
        self.flush(timeout_ms)
        return self.written()

    def close(self) -> None:
        """Stop, and wait for appends in flight. Idempotent."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        super().close()

    def _run(self, per_second: int) -> None:
        began = time.monotonic()
        sent = 0
        try:
            while not self._is_over.wait(TICK_S):
                due = int((time.monotonic() - began) * per_second)
                self._send(due - sent)
                sent = max(sent, due)
        except MarshalError as error:
            self._failure = self._failure or error

    def _send(self, count: int) -> None:
        for _ in range(count):
            number = self._next
            self._next += 1
            self.send(str(number).encode(), partition=number % self._partitions)
