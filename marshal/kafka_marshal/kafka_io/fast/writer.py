"""librdkafka's producer as an ``Outlet`` of the writer."""

import threading
from collections.abc import Callable, Mapping

from confluent_kafka import KafkaException

from kafka_marshal.kafka_io.fast.clients import new_producer
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.untyped import Untyped
from kafka_marshal.kafka_io.writer import LINGER_MS, OVERDUE_GRACE_MS, Connect, Outlet

# How long one look for outcomes waits; an outcome ends it at once.
_LOOK_S = 0.25


class FastOutlet(Outlet):
    """One producer with a thread that collects the outcomes of its sends.

    Attributes:
        collector: The thread.
    """

    def __init__(
        self, settings: ConnectionSettings, timeouts: Mapping[str, int]
    ) -> None:
        """Start connecting; records that are sent before wait for it.

        Args:
            settings: Where the cluster is, and the topic's name.
            timeouts: Request and delivery timeout, as kafka-python names them.

        Raises:
            KafkaException: librdkafka does not accept a setting.
        """
        self._topic = settings.coordination_topic
        delivery_ms = timeouts["delivery_timeout_ms"]
        self._limit_s = (delivery_ms + OVERDUE_GRACE_MS) / 1000
        # PROTOCOL 2.1.
        self.config = {
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": LINGER_MS,
            "compression.type": "none",
            "request.timeout.ms": timeouts["request_timeout_ms"],
            "delivery.timeout.ms": delivery_ms,
        }
        self._client = new_producer(settings, self.config)
        self._is_over = threading.Event()
        self.collector = threading.Thread(
            target=self._collect, name="marshal-deliveries", daemon=True
        )
        self.collector.start()

    def send(
        self,
        partition: int,
        value: bytes,
        *,
        report: Callable[[int | Exception], None],
    ) -> None:
        """Start sending one record; see ``Outlet``."""

        def delivered(error: Untyped, message: Untyped) -> None:
            report(message.offset() if error is None else KafkaException(error))

        self._client.handle.produce(
            self._topic, value, partition=partition, on_delivery=delivered
        )

    def end(self) -> threading.Thread:
        """Flush and let go on a thread that has bounds of its own."""
        thread = threading.Thread(target=self._end, name="marshal-close", daemon=True)
        thread.start()
        return thread

    def _collect(self) -> None:
        """Have outcomes reported until all is over; then destroy the producer."""
        handle = self._client.handle
        while not self._is_over.is_set():
            handle.poll(_LOOK_S)
        self._client.forget()

    def _end(self) -> None:
        handle = self._client.handle
        if handle.flush(self._limit_s) > 0:
            handle.purge()
        self._is_over.set()


def fast_outlets(settings: ConnectionSettings) -> Connect:
    """Return what makes outlets to one cluster."""

    def connect(timeouts: Mapping[str, int], _: int) -> Outlet:
        return FastOutlet(settings, timeouts)

    return connect
