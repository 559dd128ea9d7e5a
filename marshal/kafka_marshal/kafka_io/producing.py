"""Writes records to data topics, for tests, the demo and development.

In this package because ``testing`` may not import a Kafka client. Production code does
not use it: it writes data records only in transactions.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaError

from kafka_marshal.closing import Closing
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import DeadlineExceeded, MarshalError
from kafka_marshal.kafka_io.clients import close_by_force, new_client
from kafka_marshal.kafka_io.patches import request_updates_once
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.translate import Access, translate_error

LINGER_MS = 5
CLOSE_MS_MAX = 2_000
ACKS_KEPT_MAX = 20_000
_LOOK_INTERVAL_S = 0.01
_CLOSE_S = 1.0


class KafkaRecordWriter(Closing):
    """Writes to a data topic and counts acknowledged records. Thread-safe.

    An idempotent producer with acks=all: no record is written twice, and the records of
    a partition keep the order in which they were sent.
    """

    def __init__(self, settings: ConnectionConfig, topic: str) -> None:
        """Connect.

        Args:
            settings: Connection.
            topic: The topic; it exists.

        Raises:
            CoordinationError: The cluster did not answer.
        """
        self._addresses = settings.addresses
        self._topic = topic
        self._lock = threading.Lock()
        self._sent = 0
        self._done = 0
        self._written: Counter[int] = Counter()
        self._acks: deque[tuple[float, int]] = deque(maxlen=ACKS_KEPT_MAX)
        self._failure: MarshalError | None = None
        config = settings.client_config() | {
            "acks": "all",
            "enable_idempotence": True,
            "linger_ms": LINGER_MS,
        }
        try:
            self._producer: Any = new_client(KafkaProducer, config)
        except Exception as error:
            raise self._translate(error, "Connecting a producer") from error
        request_updates_once(self._producer)

    def send(self, value: bytes, *, partition: int) -> None:
        """Start writing one record; ``flush`` waits for it.

        Raises:
            CoordinationError: This record or an earlier one could not be written.
        """
        self._raise_failure()
        sent_at, doing = time.monotonic(), f"Writing to {self._topic}-{partition}"
        try:
            future = self._producer.send(self._topic, value=value, partition=partition)
        except Exception as error:
            raise self._translate(error, doing) from error
        with self._lock:
            self._sent += 1
        future.add_callback(self._on_written, sent_at)
        future.add_errback(self._on_failed, doing)

    def written(self) -> Mapping[int, int]:
        """Return the number of acknowledged records by partition."""
        with self._lock:
            return dict(sorted(self._written.items()))

    def slowest_ack_ms(self, *, since_s: float) -> int:
        """Return the longest time from a send to its acknowledgment.

        Args:
            since_s: Ignore acknowledgments before this ``time.monotonic``.
        """
        with self._lock:
            return max((took for at, took in self._acks if at >= since_s), default=0)

    def flush(self, timeout_ms: int) -> None:
        """Wait until everything sent is acknowledged.

        Raises:
            CoordinationError: A record could not be written.
            DeadlineExceeded: Some were not acknowledged in time; they may be written.
        """
        deadline = Deadline(timeout_ms)
        while True:
            self._raise_failure()
            with self._lock:
                left = self._sent - self._done
            if not left:
                return
            if deadline.is_over:
                raise DeadlineExceeded(
                    f"{left} records were not acknowledged within {timeout_ms} ms; "
                    "look at the broker's log"
                )
            # kafka-python's flush() has no deadline for the whole.
            time.sleep(_LOOK_INTERVAL_S)

    def close(self) -> None:
        """Flush for up to ``CLOSE_MS_MAX``, then close. Idempotent."""
        with suppress(MarshalError):
            self.flush(CLOSE_MS_MAX)
        try:
            self._producer.close(timeout=_CLOSE_S)
        except KafkaError:
            close_by_force(self._producer)

    def _on_written(self, sent_at: float, metadata: Any) -> None:
        now = time.monotonic()
        with self._lock:
            self._done += 1
            self._written[metadata.partition] += 1
            self._acks.append((now, int((now - sent_at) * 1000)))

    def _on_failed(self, doing: str, error: Exception) -> None:
        translated = self._translate(error, doing)
        with self._lock:
            self._done += 1
            self._failure = self._failure or translated

    def _raise_failure(self) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def _translate(self, error: Exception, doing: str) -> MarshalError:
        return translate_error(
            error, doing=doing, access=Access.WRITE, addresses=self._addresses
        )
