"""kafka-python's producer as an ``Outlet`` of the writer."""

import threading
import time
from collections.abc import Callable, Mapping

from kafka import KafkaProducer
from kafka import errors as kafka_errors

from kafka_marshal.kafka_io.connecting import connected
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.writer import LINGER_MS, OVERDUE_GRACE_MS, Connect, Outlet

# A send that misses metadata fails at once, and the engine sends again.
_SEND_BLOCK_MS = 50


class KafkaOutlet(Outlet):
    """One connected producer that has the topic's metadata."""

    def __init__(
        self,
        settings: ConnectionSettings,
        timeouts: Mapping[str, int],
        *,
        timeout_ms: int,
    ) -> None:
        """Connect, and learn the topic's partitions.

        Args:
            settings: Where the cluster is, and the topic's name.
            timeouts: Request and delivery timeout, as kafka-python names them.
            timeout_ms: When to give up.

        Raises:
            KafkaError: No connection could be made.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        self._topic = settings.coordination_topic
        self._producer = connected(
            KafkaProducer,
            {
                **settings.client_config(),
                **timeouts,
                "acks": "all",
                "enable_idempotence": True,
                "linger_ms": LINGER_MS,
                "max_block_ms": _SEND_BLOCK_MS,
                "allow_auto_create_topics": False,
                "metrics_enabled": False,
                "bootstrap_timeout_ms": timeout_ms,
            },
            topic=self._topic,
        )
        self.config = self._producer.config
        # An option that conflicts turns idempotence off without an error.
        assert self.config["enable_idempotence"] is True
        assert self.config["acks"] == -1
        while True:
            try:
                self._producer.partitions_for(self._topic)
            except kafka_errors.KafkaTimeoutError:
                if time.monotonic() < deadline:
                    continue
                self.end()
                raise
            except kafka_errors.KafkaError:
                self.end()
                raise
            else:
                return

    def send(
        self,
        partition: int,
        value: bytes,
        *,
        report: Callable[[int | Exception], None],
    ) -> None:
        """Start sending one record; see ``Outlet``."""
        # PROTOCOL 2.1: null key, explicit partition.
        future = self._producer.send(
            self._topic, value=value, key=None, partition=partition
        )
        future.add_callback(lambda sent: report(sent.offset))
        future.add_errback(report)

    def end(self) -> threading.Thread:
        """Flush and close on a thread that has bounds of its own.

        kafka-python's ``close`` fails where its ``flush`` does, and then closes
        nothing. A producer that holds batches for ever can only be ended by
        force, for which there is no public call.
        """
        limit_s = (self.config["delivery_timeout_ms"] + OVERDUE_GRACE_MS) / 1000

        def end() -> None:
            try:
                self._producer.close(timeout=limit_s)
            except kafka_errors.KafkaError:
                self._force()

        return _in_background(end)

    def drop(self) -> threading.Thread:
        """Close by force, on a thread that nobody need wait for."""
        return _in_background(self._force)

    def _force(self) -> None:
        self._producer._sender.force_close()  # noqa: SLF001 - the only way to end it
        self._producer.close(timeout=1)


def _in_background(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, name="marshal-close", daemon=True)
    thread.start()
    return thread


def kafka_outlets(settings: ConnectionSettings) -> Connect:
    """Return what makes outlets to one cluster."""

    def connect(timeouts: Mapping[str, int], timeout_ms: int) -> Outlet:
        return KafkaOutlet(settings, timeouts, timeout_ms=timeout_ms)

    return connect
