"""The writing half of the coordination log: an idempotent producer, kept alive.

kafka-python's idempotent producer does not survive everything. After a batch has
timed out, or after any error that it does not retry, it may fail all further
sends for ever, or hold them for ever without an outcome (seen with 3.0.12 and a
broker that was paused for two seconds). A claimant that cannot beat loses all it
holds, so the writer does not trust it: every append has a deadline of our own,
and after the first append that fails or is overdue, the producer is replaced by a
fresh one, made in the background from the bootstrap addresses.
"""

import threading
import time
from collections import deque
from typing import Any

from kafka import KafkaProducer
from kafka import errors as kafka_errors

from kafka_marshal.errors import CoordinationError, InvalidTransition, MarshalError
from kafka_marshal.kafka_io.connecting import connected
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.translate import Access, translated
from kafka_marshal.kafka_io.untyped import Untyped
from kafka_marshal.ports import Append

# PROTOCOL 2.1: request timeout min(H/4, 10 s), delivery timeout H/2, linger <= 5 ms.
REQUEST_TIMEOUT_MS_MAX = 10_000
LINGER_MS = 2
# kafka-python ends what is late once per turn of its loop.
OVERDUE_GRACE_MS = 250
RENEW_TIMEOUT_MS = 10_000
RENEW_INTERVAL_S = 1.0
# A send that misses metadata fails at once, and the engine sends again.
_SEND_BLOCK_MS = 50


def writer_timeouts(heartbeat_interval_ms: int) -> dict[str, int]:
    """Return the producer's timeouts for a heartbeat interval (PROTOCOL 2.1).

    kafka-python wants the delivery timeout to cover linger and one request;
    with H/2 and H/4 it does from an H of a few milliseconds on.

    Args:
        heartbeat_interval_ms: H.
    """
    request_ms = max(1, min(heartbeat_interval_ms // 4, REQUEST_TIMEOUT_MS_MAX))
    return {
        "request_timeout_ms": request_ms,
        "delivery_timeout_ms": max(heartbeat_interval_ms // 2, request_ms + LINGER_MS),
    }


def left_ms(deadline: float) -> int:
    """Return the milliseconds until a deadline of ``time.monotonic``.

    Raises:
        CoordinationError: There are none left.
    """
    left = int((deadline - time.monotonic()) * 1000)
    if left <= 0:
        raise CoordinationError(
            "The cluster did not answer in time. Check the addresses, the network and "
            "that the brokers run."
        )
    return left


class FailedAppend(Append):
    """An append that did not get as far as being sent."""

    def __init__(self, error: MarshalError) -> None:
        """Remember why."""
        self._error = error

    def is_done(self) -> bool:
        """Return True: nothing is under way."""
        return True

    def offset(self) -> int | None:
        """Return None: nothing was written."""
        return None

    def error(self) -> MarshalError | None:
        """Return why it was not sent."""
        return self._error


class _Sender:
    """One producer, and whether it may still be trusted."""

    def __init__(self, producer: Untyped) -> None:
        self.producer = producer
        self.is_spoilt = False
        # Appends without an outcome, oldest first, by partition.
        self.pending: dict[int, deque[_SentAppend]] = {}

    def spoil(self, _: object = None) -> None:
        """Note that something failed; also called on the producer's own thread."""
        self.is_spoilt = True

    def has_pending(self, partition: int) -> bool:
        """Tell whether an append to a partition is still without an outcome."""
        waiting = self.pending.get(partition)
        while waiting and waiting[0].is_done():
            waiting.popleft()
        return bool(waiting)

    def sweep(self) -> None:
        """Forget appends that have an outcome; notice those that are overdue."""
        self.pending = {
            number: waiting
            for number, waiting in self.pending.items()
            if self.has_pending(number)
        }


class _SentAppend(Append):
    """An append that a producer has taken; overdue, it counts as failed."""

    __slots__ = ("_deadline", "_future", "_is_overdue", "_sender", "_texts")

    def __init__(
        self,
        future: Untyped,
        *,
        sender: _Sender,
        deadline: float,
        texts: tuple[str, str],
    ) -> None:
        self._future = future
        self._sender = sender
        self._deadline = deadline
        self._texts = texts
        self._is_overdue = False

    def is_done(self) -> bool:
        if self._future.is_done or self._is_overdue:
            return True
        if time.monotonic() < self._deadline:
            return False
        # Once told, an outcome stays, whatever the producer says later.
        self._is_overdue = True
        self._sender.spoil()
        return True

    def offset(self) -> int | None:
        if not self.is_done() or self._is_overdue or not self._future.succeeded():
            return None
        offset: int = self._future.value.offset
        # A broker that recognised a duplicate may not know the offset any more.
        return offset if offset >= 0 else None

    def error(self) -> MarshalError | None:
        if not self.is_done() or (not self._is_overdue and self._future.succeeded()):
            return None
        doing, addresses = self._texts
        cause = self._future.exception
        if self._is_overdue:
            cause = kafka_errors.KafkaTimeoutError("no outcome in time")
        return translated(cause, doing=doing, access=Access.WRITE, addresses=addresses)


class Writer:
    """Appends to one topic. ``append`` may be called from any thread."""

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        heartbeat_interval_ms: int,
        timeout_ms: int,
    ) -> None:
        """Connect.

        Args:
            settings: Where the cluster is, and the topic's name.
            heartbeat_interval_ms: H.
            timeout_ms: When to give up.

        Raises:
            KafkaError: No connection could be made.
        """
        self._settings = settings
        self._topic = settings.coordination_topic
        self._timeouts = writer_timeouts(heartbeat_interval_ms)
        self._lock = threading.Lock()
        self._is_closed = False
        self._renewed_at = time.monotonic()
        self._wake = threading.Event()
        self._stale: list[_Sender] = []
        self._is_renewing = False
        self._sender = _Sender(self._new_producer(timeout_ms))

    @property
    def config(self) -> dict[str, Any]:
        """What the producer in use was made with."""
        config: dict[str, Any] = self._sender.producer.config
        return config

    def append(self, partition: int, value: bytes) -> Append:
        """Start appending one record; return at once, and never raise."""
        doing = f"Appending to {self._topic}-{partition}"
        with self._lock:
            self._watch()
            sender = self._sender
            if self._is_closed:
                return FailedAppend(InvalidTransition(f"{doing} failed: it is closed."))
            if sender.is_spoilt or any(s.has_pending(partition) for s in self._stale):
                # In order: nothing overtakes an append whose outcome is open.
                return FailedAppend(
                    CoordinationError(
                        f"{doing} failed: an earlier append failed, and the connection "
                        f"to {self._settings.addresses} is made anew. Try again."
                    )
                )
            try:
                # PROTOCOL 2.1: null key, explicit partition.
                future = sender.producer.send(
                    self._topic, value=value, key=None, partition=partition
                )
            except Exception as error:  # noqa: BLE001 - reported by the Append
                addresses = self._settings.addresses
                return FailedAppend(
                    translated(
                        error, doing=doing, access=Access.WRITE, addresses=addresses
                    )
                )
            limit_ms = sender.producer.config["delivery_timeout_ms"] + OVERDUE_GRACE_MS
            append = _SentAppend(
                future,
                sender=sender,
                deadline=time.monotonic() + limit_ms / 1000,
                texts=(doing, self._settings.addresses),
            )
            sender.pending.setdefault(partition, deque()).append(append)
        # Outside the lock: it runs at once where the future has failed already.
        future.add_errback(sender.spoil)
        return append

    def watch(self) -> None:
        """Notice failures; called often, so that renewal does not await an append."""
        with self._lock:
            self._watch()

    def configure(self, heartbeat_interval_ms: int, *, timeout_ms: int) -> None:
        """Adapt the timeouts to H; without a change it does nothing.

        Raises:
            KafkaError: No connection could be made; the old one stays in use.
        """
        timeouts = writer_timeouts(heartbeat_interval_ms)
        if timeouts == self._timeouts:
            return
        old, self._timeouts = self._timeouts, timeouts
        try:
            fresh = self._new_producer(timeout_ms)
        except Exception:
            self._timeouts = old
            raise
        self._use(fresh)

    def close(self, timeout_ms: int) -> None:
        """Flush for up to ``timeout_ms``, then let go. Idempotent.

        What is still under way ends by itself within the delivery timeout.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._wake.set()
        closer = _end_in_background(self._sender.producer)
        closer.join(timeout=max(0.0, deadline - time.monotonic()))

    def _watch(self) -> None:
        """Start a renewal where one is due (with the lock held)."""
        self._sender.sweep()
        for sender in self._stale:
            sender.sweep()
        self._stale = [sender for sender in self._stale if sender.pending]
        if self._sender.is_spoilt and not self._is_renewing and not self._is_closed:
            self._is_renewing = True
            threading.Thread(
                target=self._renew, name="marshal-renew", daemon=True
            ).start()

    def _renew(self) -> None:
        """Make a fresh producer, trying until it succeeds or we are closed."""
        while not self._is_closed:
            wait_s = self._renewed_at + RENEW_INTERVAL_S - time.monotonic()
            self._wake.wait(timeout=max(0.0, wait_s))
            self._renewed_at = time.monotonic()
            try:
                fresh = self._new_producer(RENEW_TIMEOUT_MS)
            except (kafka_errors.KafkaError, CoordinationError, OSError):
                continue
            self._use(fresh)
            break
        with self._lock:
            self._is_renewing = False

    def _use(self, fresh: Untyped) -> None:
        """Send with another producer from now on."""
        with self._lock:
            if self._is_closed:
                stale = fresh
            else:
                self._stale.append(self._sender)
                stale, self._sender = self._sender.producer, _Sender(fresh)
        _end_in_background(stale)

    def _new_producer(self, timeout_ms: int) -> Untyped:
        """Return a connected producer that has the topic's metadata."""
        deadline = time.monotonic() + timeout_ms / 1000
        settings = {
            **self._settings.client_config(),
            **self._timeouts,
            "acks": "all",
            "enable_idempotence": True,
            "linger_ms": LINGER_MS,
            "max_block_ms": _SEND_BLOCK_MS,
            "allow_auto_create_topics": False,
            "metrics_enabled": False,
            "bootstrap_timeout_ms": timeout_ms,
        }
        producer = connected(KafkaProducer, settings)
        # An option that conflicts turns idempotence off without an error.
        assert producer.config["enable_idempotence"] is True
        assert producer.config["acks"] == -1
        while True:
            try:
                producer.partitions_for(self._topic)
            except kafka_errors.KafkaTimeoutError:
                if time.monotonic() < deadline:
                    continue
                _end_in_background(producer)
                raise
            except kafka_errors.KafkaError:
                _end_in_background(producer)
                raise
            else:
                return producer


def _end_in_background(producer: Untyped) -> threading.Thread:
    """Flush and close a producer on a thread that has bounds of its own.

    kafka-python's ``close`` fails where its ``flush`` does, and then closes
    nothing. A producer that holds batches for ever can only be ended by force,
    for which there is no public call.
    """
    limit_s = (producer.config["delivery_timeout_ms"] + OVERDUE_GRACE_MS) / 1000

    def end() -> None:
        try:
            producer.close(timeout=limit_s)
        except kafka_errors.KafkaError:
            producer._sender.force_close()  # noqa: SLF001 - the only way to end it
            producer.close(timeout=1)

    thread = threading.Thread(target=end, name="marshal-close", daemon=True)
    thread.start()
    return thread
