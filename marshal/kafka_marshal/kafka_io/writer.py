"""The writing half of the coordination log: an idempotent producer, kept alive.

No producer survives everything. After a batch has timed out, or after an error that
it does not retry, kafka-python's producer may fail all further sends for ever, or hold
them for ever without an outcome (seen with 3.0.12 and a broker that was paused for
two seconds). librdkafka's producer may end with a fatal error. A claimant that cannot
send heartbeats loses all it holds, so the writer does not trust the producer: every
append has its own deadline, and after the first append that fails or is overdue, the
producer is replaced by a new one, connected in the background from the bootstrap
addresses.

Undelivered appends of the old producer are abandoned; otherwise the new one would have
to wait for outcomes that may never come. An abandoned append may still land, even after
later appends. The protocol allows for that: a failed append is unknown (PROTOCOL 1.4),
its lease counts from its sending (5.2), the fold checks the epoch of each record and
never moves a position back (4.5), a request for offsets that lands after a request for
higher offsets gets nothing (4.7), and a claim that nobody waits for is released (5.3).
The simulator also lets abandoned appends land late and in any order.

While the producer is replaced, appends are queued for up to a quarter of the heartbeat
interval.

``ProducerHandle`` hides the differences between client libraries.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import attrs

from kafka_marshal.closing import in_background
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import CoordinationError, InvalidTransition, MarshalError
from kafka_marshal.kafka_io import faults
from kafka_marshal.kafka_io.faults import Access, Failure
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.ports import Append

# PROTOCOL 2.1: a quarter of the heartbeat interval or 10 s for a request, half of the
# interval for the delivery, linger 2 ms at most.
REQUEST_TIMEOUT_MS_MAX = 10_000
LINGER_MS = 2
# Client libraries expire late requests once per turn of their loop.
OVERDUE_GRACE_MS = 250
RENEW_TIMEOUT_MS = 10_000
RENEW_INTERVAL_MS = 1_000
# Queued appends: as many as a busy process makes while a producer is replaced.
QUEUE_MAX = 10_000


class ProducerHandle(Protocol):
    """One producer of a client library, bound to the coordination topic."""

    @property
    def connection_error(self) -> Exception | None:
        """Error of its last failed connection; None once a record is confirmed."""
        ...

    @property
    def is_outdated(self) -> bool:
        """Whether its connections fail, and a new producer would probably connect."""
        ...

    def send(
        self,
        partition: int,
        value: bytes,
        *,
        report: Callable[[int | Exception], None],
    ) -> None:
        """Start sending one record with a null key; return at once.

        Args:
            partition: Partition of the topic.
            value: The record's value.
            report: Called once, on any thread, with the offset (negative if the broker
                no longer knows it) or the error, a ``TimeoutError`` if no answer came.

        Raises:
            Exception: The record was refused; ``report`` is not called.
        """
        ...

    def end(self) -> threading.Thread:
        """Flush and close in the background, within the delivery timeout.

        Returns:
            The thread that does it.
        """
        ...

    def drop(self) -> threading.Thread:
        """Close in the background without flushing; sent records may still land.

        Returns:
            The thread that does it.
        """
        ...


# Connects a producer: gets its timeouts and the limit of the call in milliseconds. If
# it raises, the error's cause is the error of the last connection, if that is known.
Connect = Callable[[Mapping[str, int], int], ProducerHandle]
# Translates an error of a client library: gets the error, the operation, and whether
# the operation read or wrote.
Translate = Callable[[Exception, str, Access], MarshalError]


def writer_timeouts(heartbeat_interval_ms: int) -> dict[str, int]:
    """Return the producer's timeouts for a heartbeat interval (PROTOCOL 2.1).

    Client libraries require the delivery timeout to cover linger and one request. Half
    of the interval covers a quarter and linger, unless it is only a few milliseconds.
    """
    request_ms = max(1, min(heartbeat_interval_ms // 4, REQUEST_TIMEOUT_MS_MAX))
    return {
        "request_timeout_ms": request_ms,
        "delivery_timeout_ms": max(heartbeat_interval_ms // 2, request_ms + LINGER_MS),
    }


def no_answer() -> CoordinationError:
    """Return the error of a call whose deadline has passed."""
    return CoordinationError(
        "The cluster did not answer in time. Check the addresses, the network and "
        "that the brokers run."
    )


class FailedAppend(Append):
    """An append that was never sent."""

    def __init__(self, error: MarshalError) -> None:
        self._error = error

    def is_done(self) -> bool:
        """Return True."""
        return True

    def offset(self) -> int | None:
        """Return None."""
        return None

    def error(self) -> MarshalError | None:
        """Return why it was not sent."""
        return self._error


class _Sender:
    """One producer with its pending appends."""

    def __init__(self, producer: ProducerHandle, delivery_timeout_ms: int) -> None:
        self.producer = producer
        self.limit_ms = delivery_timeout_ms + OVERDUE_GRACE_MS
        self.is_broken = False
        # Pending appends by partition, oldest first.
        self.pending: dict[int, deque[_SentAppend]] = {}

    def has_pending(self, partition: int) -> bool:
        """Return whether an append to a partition has no outcome yet."""
        waiting = self.pending.get(partition)
        while waiting and waiting[0].is_done():
            waiting.popleft()
        return bool(waiting)

    def sweep(self) -> None:
        """Drop appends with an outcome, and fail overdue ones."""
        self.pending = {
            number: waiting
            for number, waiting in self.pending.items()
            if self.has_pending(number)
        }

    def send(self, queued: "_Queued") -> bool:
        """Send a record; return whether the producer accepted it."""
        queued.append.begin(self)
        try:
            self.producer.send(
                queued.partition, queued.value, report=queued.append.report
            )
        except Exception as error:  # noqa: BLE001 - reported by the Append
            queued.append.fail(error)
            return False
        self.pending.setdefault(queued.partition, deque()).append(queued.append)
        return True

    def abandon(self) -> None:
        """Fail pending appends, and drop the producer."""
        for waiting in self.pending.values():
            for append in waiting:
                append.fail(TimeoutError("abandoned when its producer was replaced"))
        self.pending = {}
        self.producer.drop()


class _SentAppend(Append):
    """An append that is queued or sent. It fails at its deadline."""

    __slots__ = (
        "_deadline",
        "_doing",
        "_explain",
        "_outcomes",
        "_sender",
        "_settings",
        "_translate",
    )

    def __init__(
        self,
        *,
        limit_ms: int,
        settings: ConnectionConfig,
        doing: str,
        translate: Translate,
        explain: Callable[[_Sender | None], Exception | None],
    ) -> None:
        self._sender: _Sender | None = None
        self._settings = settings
        self._doing = doing
        self._translate = translate
        # Returns the error of the last failed connection.
        self._explain = explain
        self._deadline = Deadline(limit_ms)
        # The first outcome counts; later ones are ignored.
        self._outcomes: list[int | Exception] = []

    def begin(self, sender: _Sender) -> None:
        """Start the deadline of a sent append."""
        self._sender = sender
        self._deadline = Deadline(sender.limit_ms)

    def report(self, outcome: int | Exception) -> None:
        """Set the outcome; any thread. An error marks the producer as broken."""
        self._add(outcome)
        if self._sender is not None and not isinstance(outcome, int):
            self._sender.is_broken = True

    def fail(self, error: Exception) -> None:
        """Set an error that does not mark the producer as broken."""
        self._add(error)

    def _add(self, outcome: int | Exception) -> None:
        if isinstance(outcome, TimeoutError):
            # Ask now: once a connection succeeds, the error is no longer known.
            outcome.__cause__ = self._explain(self._sender)
        self._outcomes.append(outcome)

    def is_done(self) -> bool:
        if not self._outcomes and self._deadline.is_over:
            self.report(TimeoutError("no outcome in time"))
        return bool(self._outcomes)

    def offset(self) -> int | None:
        outcome = self._outcomes[0] if self.is_done() else None
        # For a duplicate the broker may no longer know the offset.
        return outcome if isinstance(outcome, int) and outcome >= 0 else None

    def error(self) -> MarshalError | None:
        outcome = self._outcomes[0] if self.is_done() else None
        if outcome is None or isinstance(outcome, int):
            return None
        if isinstance(outcome, TimeoutError):
            if isinstance(why := outcome.__cause__, Exception):
                found = self._translate(why, self._doing, Access.WRITE)
                # An append without an answer is retriable, whatever the error says.
                return found if found.retriable else CoordinationError(str(found))
            addresses = self._settings.addresses
            failure = Failure(
                doing=self._doing, access=Access.WRITE, addresses=addresses
            )
            return failure.to_error(
                faults.UNCONFIRMED, error=outcome, cause=str(outcome)
            )
        return self._translate(outcome, self._doing, Access.WRITE)


@attrs.frozen
class _Queued:
    """A record that waits for a producer."""

    partition: int
    value: bytes
    append: _SentAppend


class Writer:
    """Appends to one topic. ``append`` may be called from any thread."""

    def __init__(
        self,
        settings: ConnectionConfig,
        *,
        connect: Connect,
        translate: Translate,
        heartbeat_interval_ms: int,
        timeout_ms: int,
    ) -> None:
        """Connect.

        Args:
            settings: Connection and name of the topic.
            connect: Connects producers.
            translate: Translates errors of a producer.
            heartbeat_interval_ms: Heartbeat interval in force.
            timeout_ms: Limit for the connection.

        Raises:
            Exception: No connection could be made; an error of the library.
        """
        self._settings = settings
        self._topic = settings.coordination_topic
        self._connect = connect
        self._translate = translate
        self._timeouts = writer_timeouts(heartbeat_interval_ms)
        self._lock = threading.Lock()
        self._is_closed = False
        self._may_renew = Deadline(RENEW_INTERVAL_MS)
        self._wake = threading.Event()
        # Healthy producers that were replaced and still have pending appends.
        self._stale: list[_Sender] = []
        self._queued = deque[_Queued]()
        self._is_renewing = False
        # Why the last attempt at a new producer failed, until one succeeds.
        self._connect_error: Exception | None = None
        self._sender = self._new_sender(timeout_ms)

    def append(self, partition: int, value: bytes) -> Append:
        """Start appending one record; return at once, and never raise."""
        doing = f"Appending to {self._topic}-{partition}"
        with self._lock:
            self._watch()
            if self._is_closed:
                return FailedAppend(
                    InvalidTransition(f"{doing} failed: this log is closed.")
                )
            if len(self._queued) >= QUEUE_MAX:
                return FailedAppend(
                    CoordinationError(
                        f"{doing} failed: {QUEUE_MAX} records wait for the connection "
                        f"to {self._settings.addresses}. Try again."
                    )
                )
            append = _SentAppend(
                # A quarter of the heartbeat interval in the queue and half once it is
                # sent: it ends within the interval, for which callers wait.
                limit_ms=self._timeouts["delivery_timeout_ms"] // 2,
                settings=self._settings,
                doing=doing,
                translate=self._translate,
                explain=self._explain,
            )
            self._queued.append(_Queued(partition, value, append))
            self._release()
        return append

    def watch(self) -> None:
        """Replace a failed producer; called often, without waiting for an append."""
        with self._lock:
            self._watch()

    def configure(self, heartbeat_interval_ms: int, *, timeout_ms: int) -> None:
        """Adapt the timeouts; do nothing if the interval is unchanged.

        Raises:
            Exception: No connection could be made; the old one stays in use.
        """
        timeouts = writer_timeouts(heartbeat_interval_ms)
        if timeouts == self._timeouts:
            return
        old, self._timeouts = self._timeouts, timeouts
        try:
            fresh = self._new_sender(timeout_ms)
        except Exception:
            self._timeouts = old
            raise
        self._use(fresh)

    def reconnect(self, *, timeout_ms: int) -> None:
        """Connect again, to append to partitions that were added to the topic.

        Raises:
            Exception: No connection could be made; the old one stays in use.
        """
        self._use(self._new_sender(timeout_ms))

    def close(self, timeout_ms: int) -> None:
        """Flush for up to ``timeout_ms``, then close. Idempotent.

        Appends still under way end within the delivery timeout.
        """
        deadline = Deadline(timeout_ms)
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for queued in self._queued:
                queued.append.fail(TimeoutError("closed before it was sent"))
            self._queued.clear()
        self._wake.set()
        closer = self._sender.producer.end()
        closer.join(timeout=deadline.left_s)

    def _watch(self) -> None:
        """Start a renewal if one is due (with the lock held)."""
        self._sender.sweep()
        self._sender.is_broken |= self._sender.producer.is_outdated
        for sender in self._stale:
            sender.sweep()
        self._stale = [sender for sender in self._stale if sender.pending]
        if self._sender.is_broken and not self._is_renewing and not self._is_closed:
            # Without memory, or at a limit, no thread starts: the next call retries.
            with suppress(RuntimeError):
                in_background(self._renew, name="marshal-renew")
                self._is_renewing = True
        self._release()

    def _release(self) -> None:
        """Send queued records (with the lock held).

        In order: no record overtakes an append to its partition that is pending in a
        healthy producer.
        """
        while self._queued and self._queued[0].append.is_done():
            self._queued.popleft()
        if self._sender.is_broken:
            return
        waiting, self._queued = self._queued, deque()
        kept: set[int] = set()
        is_accepting = True
        for queued in waiting:
            number = queued.partition
            if (
                not is_accepting
                or number in kept
                or any(sender.has_pending(number) for sender in self._stale)
            ):
                kept.add(number)
                self._queued.append(queued)
            elif not queued.append.is_done():
                # A refused send, for instance without a leader, may have blocked for a
                # moment: the next call sends the other records.
                is_accepting = self._sender.send(queued)

    def _renew(self) -> None:
        """Connect a new producer; retry until success or close()."""
        try:
            while not self._is_closed:
                self._wake.wait(timeout=self._may_renew.left_s)
                self._may_renew = Deadline(RENEW_INTERVAL_MS)
                try:
                    fresh = self._new_sender(RENEW_TIMEOUT_MS)
                except Exception as error:  # noqa: BLE001 - the next one may succeed
                    cause = error.__cause__
                    self._connect_error = (
                        cause if isinstance(cause, Exception) else error
                    )
                    continue
                self._use(fresh)
                break
        finally:
            with self._lock:
                self._is_renewing = False

    def _use(self, fresh: _Sender) -> None:
        """Replace the producer."""
        with self._lock:
            if self._is_closed:
                fresh.producer.end()
                return
            old, self._sender = self._sender, fresh
            if old.is_broken:
                old.abandon()
            else:
                self._stale.append(old)
                old.producer.end()
            self._connect_error = None
            self._release()

    def _explain(self, sender: _Sender | None) -> Exception | None:
        """Return why connections fail, as far as it is known."""
        return self._connect_error or (sender or self._sender).producer.connection_error

    def _new_sender(self, timeout_ms: int) -> _Sender:
        producer = self._connect(self._timeouts, timeout_ms)
        return _Sender(producer, self._timeouts["delivery_timeout_ms"])
