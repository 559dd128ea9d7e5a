"""librdkafka's producer as an ``Outlet`` of the writer."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kafka_marshal.kafka_io.fast.clients import new_producer
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.untyped import Untyped
from kafka_marshal.kafka_io.writer import LINGER_MS, OVERDUE_GRACE_MS, Connect, Outlet

# How long one look for outcomes waits; an outcome ends it at once.
_LOOK_S = 0.25
# A new cluster may need a second for the first producer of its life.
_NUMBERED_S = 1.5
_FATAL = KafkaError._FATAL  # noqa: SLF001 - its public name


def writer_config(timeouts: Mapping[str, int]) -> dict[str, Any]:
    """Return what the producer is made with (PROTOCOL 2.1).

    Args:
        timeouts: Request and delivery timeout, as kafka-python names them.
    """
    return {
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": LINGER_MS,
        "compression.type": "none",
        # The broker is told the first, and the second is when its answer is overdue:
        # by default a leader that stands still would be waited for until the end.
        "request.timeout.ms": timeouts["request_timeout_ms"],
        "socket.timeout.ms": timeouts["request_timeout_ms"] + OVERDUE_GRACE_MS,
        "delivery.timeout.ms": timeouts["delivery_timeout_ms"],
    }


class FastOutlet(Outlet):
    """One producer with a thread that collects the outcomes of its sends.

    Attributes:
        collector: The thread.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        timeouts: Mapping[str, int],
        *,
        timeout_ms: int,
    ) -> None:
        """Connect, learn the topic's partitions, and have records numbered.

        In this order and no sooner: who asks for a topic while librdkafka does not
        know the brokers has it look for one that numbers records every 500 ms only,
        and who asks for nothing the same. The first append would take that long.

        Args:
            settings: Where the cluster is, and the topic's name.
            timeouts: Request and delivery timeout, as kafka-python names them.
            timeout_ms: When to give up.

        Raises:
            KafkaException: No connection could be made, or librdkafka does not
                accept a setting.
        """
        self._topic = settings.coordination_topic
        delivery_ms = timeouts["delivery_timeout_ms"]
        self._limit_s = (delivery_ms + OVERDUE_GRACE_MS) / 1000
        self.config = writer_config(timeouts)
        self._client = new_producer(settings, self.config)
        self._is_over = threading.Event()
        # The fault after which the producer does nothing more; then the event.
        self._fatal: Exception | None = None
        self._has_failed = threading.Event()
        self.collector = threading.Thread(
            target=self._collect, name="marshal-deliveries", daemon=True
        )
        self.collector.start()
        deadline = time.monotonic() + timeout_ms / 1000
        self._client.is_looking.wait(timeout=min(timeout_ms / 1000, _NUMBERED_S))
        try:
            self._client.handle.list_topics(
                self._topic, timeout=max(0.001, deadline - time.monotonic())
            )
        except KafkaException:
            self._is_over.set()
            raise
        left_s = max(0.0, deadline - time.monotonic())
        self._client.is_numbered.wait(timeout=min(left_s, _NUMBERED_S))

    def send(
        self,
        partition: int,
        value: bytes,
        *,
        report: Callable[[int | Exception], None],
    ) -> None:
        """Start sending one record; see ``Outlet``."""

        def delivered(error: Untyped, message: Untyped) -> None:
            if error is None:
                report(message.offset())
            else:
                report(self._fatal or KafkaException(error))

        handle = self._client.handle
        try:
            handle.produce(
                self._topic, value, partition=partition, on_delivery=delivered
            )
        except KafkaException as error:
            if error.args[0].code() != _FATAL:
                raise
            # Reported rather than raised, so that the writer makes a fresh one.
            # The collector is told of the cause in a moment.
            self._has_failed.wait(timeout=_LOOK_S)
            report(self._fatal or error)

    def end(self) -> threading.Thread:
        """Flush and let go on a thread that has bounds of its own."""
        thread = threading.Thread(target=self._end, name="marshal-close", daemon=True)
        thread.start()
        return thread

    def drop(self) -> threading.Thread:
        """Have the collector let go, of what is under way too."""
        self._is_over.set()
        return self.collector

    def _collect(self) -> None:
        """Have outcomes reported until all is over; then destroy the producer."""
        handle = self._client.handle
        while not self._is_over.is_set():
            try:
                self._client.leaders.go_on(handle, (self._topic,))
                handle.poll(_LOOK_S)
            except KafkaException as error:
                # Only a fatal fault is raised, and once. What cannot be sent any
                # more would be kept until the delivery timeout.
                self._fatal = error
                self._has_failed.set()
                self._client.is_looking.set()
                self._client.is_numbered.set()
                handle.purge()
        # Who ended in order has nothing left; of the others, what is under way is
        # given up, or the handle would not go.
        with suppress(KafkaException):
            handle.purge()
            handle.poll(0)
        self._client.forget()

    def _end(self) -> None:
        handle = self._client.handle
        if handle is None:
            return  # a producer that was over is gone by now
        with suppress(KafkaException):
            if handle.flush(self._limit_s) > 0:
                handle.purge()
        self._is_over.set()


def fast_outlets(settings: ConnectionSettings) -> Connect:
    """Return what makes outlets to one cluster."""

    def connect(timeouts: Mapping[str, int], timeout_ms: int) -> Outlet:
        return FastOutlet(settings, timeouts, timeout_ms=timeout_ms)

    return connect
