"""The writing half of the coordination log: an idempotent producer, kept alive.

No producer survives everything. After a batch has timed out, or after any error
that it does not retry, kafka-python's may fail all further sends for ever, or hold
them for ever without an outcome (seen with 3.0.12 and a broker that was paused for
two seconds); librdkafka's may end with a fatal error. A claimant that cannot beat
loses all it holds, so the writer does not trust it: every append has a deadline of
our own, and after the first append that fails or is overdue, the producer is
replaced by a fresh one, made in the background from the bootstrap addresses.

What differs between client libraries stands behind ``Outlet``.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kafka_marshal.errors import CoordinationError, InvalidTransition, MarshalError
from kafka_marshal.kafka_io import faults
from kafka_marshal.kafka_io.faults import Access, Failure
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.ports import Append

# PROTOCOL 2.1: request timeout min(H/4, 10 s), delivery timeout H/2, linger <= 5 ms.
REQUEST_TIMEOUT_MS_MAX = 10_000
LINGER_MS = 2
# Client libraries end what is late once per turn of their loop.
OVERDUE_GRACE_MS = 250
RENEW_TIMEOUT_MS = 10_000
RENEW_INTERVAL_S = 1.0


class Outlet(Protocol):
    """One producer of a client library, bound to the coordination topic.

    Attributes:
        config: What the library's producer was made with.
    """

    config: Mapping[str, Any]

    def send(
        self,
        partition: int,
        value: bytes,
        *,
        report: Callable[[int | Exception], None],
    ) -> None:
        """Start sending one record with a null key; return at once.

        Args:
            partition: Where to.
            value: The record's value.
            report: Called once, on any thread, with the offset (negative where
                the broker does not know it any more) or with what went wrong.

        Raises:
            Exception: The record was not taken; ``report`` is not called.
        """
        ...

    def end(self) -> threading.Thread:
        """Let what is under way end by itself, then let go; return at once.

        Returns:
            The thread that does it, within the delivery timeout.
        """
        ...


# Makes a connected outlet with these timeouts, within so many milliseconds.
Connect = Callable[[Mapping[str, int], int], Outlet]
# Says in our own words what a library raised or reported while doing something.
Told = Callable[[Exception, str, Access], MarshalError]


def writer_timeouts(heartbeat_interval_ms: int) -> dict[str, int]:
    """Return the producer's timeouts for a heartbeat interval (PROTOCOL 2.1).

    Client libraries want the delivery timeout to cover linger and one request;
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
    """One outlet, and whether it may still be trusted."""

    def __init__(self, outlet: Outlet, delivery_timeout_ms: int) -> None:
        self.outlet = outlet
        self.limit_s = (delivery_timeout_ms + OVERDUE_GRACE_MS) / 1000
        self.is_spoilt = False
        # Appends without an outcome, oldest first, by partition.
        self.pending: dict[int, deque[_SentAppend]] = {}

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
    """An append that an outlet has taken; overdue, it counts as failed."""

    __slots__ = ("_deadline", "_doing", "_outcomes", "_sender", "_settings", "_told")

    def __init__(
        self, *, sender: _Sender, settings: ConnectionSettings, doing: str, told: Told
    ) -> None:
        self._sender = sender
        self._settings = settings
        self._doing = doing
        self._told = told
        self._deadline = time.monotonic() + sender.limit_s
        # The first counts: once told, an outcome stays.
        self._outcomes: list[int | Exception] = []

    def report(self, outcome: int | Exception) -> None:
        """Take the outcome, on any thread."""
        self._outcomes.append(outcome)
        if not isinstance(outcome, int):
            self._sender.is_spoilt = True

    def is_done(self) -> bool:
        if not self._outcomes and time.monotonic() >= self._deadline:
            self.report(TimeoutError("no outcome in time"))
        return bool(self._outcomes)

    def offset(self) -> int | None:
        outcome = self._outcomes[0] if self.is_done() else None
        # A broker that recognised a duplicate may not know the offset any more.
        return outcome if isinstance(outcome, int) and outcome >= 0 else None

    def error(self) -> MarshalError | None:
        outcome = self._outcomes[0] if self.is_done() else None
        if outcome is None or isinstance(outcome, int):
            return None
        if isinstance(outcome, TimeoutError):
            addresses = self._settings.addresses
            failure = Failure(self._doing, access=Access.WRITE, addresses=addresses)
            return failure.told(faults.UNREACHABLE, error=outcome, said=str(outcome))
        return self._told(outcome, self._doing, Access.WRITE)


class Writer:
    """Appends to one topic. ``append`` may be called from any thread."""

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        connect: Connect,
        told: Told,
        heartbeat_interval_ms: int,
        timeout_ms: int,
    ) -> None:
        """Connect.

        Args:
            settings: Where the cluster is, and the topic's name.
            connect: Makes an outlet.
            told: Says in our words what an outlet raised or reported.
            heartbeat_interval_ms: H.
            timeout_ms: When to give up.

        Raises:
            Exception: No connection could be made, in the library's own words.
        """
        self._settings = settings
        self._topic = settings.coordination_topic
        self._connect = connect
        self._told = told
        self._timeouts = writer_timeouts(heartbeat_interval_ms)
        self._lock = threading.Lock()
        self._is_closed = False
        self._renewed_at = time.monotonic()
        self._wake = threading.Event()
        self._stale: list[_Sender] = []
        self._is_renewing = False
        self._sender = self._new_sender(timeout_ms)

    @property
    def timeouts(self) -> Mapping[str, int]:
        """The timeouts in use."""
        return self._timeouts

    @property
    def config(self) -> Mapping[str, Any]:
        """What the producer in use was made with."""
        return self._sender.outlet.config

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
            append = _SentAppend(
                sender=sender, settings=self._settings, doing=doing, told=self._told
            )
            try:
                sender.outlet.send(partition, value, report=append.report)
            except Exception as error:  # noqa: BLE001 - reported by the Append
                return FailedAppend(self._told(error, doing, Access.WRITE))
            sender.pending.setdefault(partition, deque()).append(append)
        return append

    def watch(self) -> None:
        """Notice failures; called often, so that renewal does not await an append."""
        with self._lock:
            self._watch()

    def configure(self, heartbeat_interval_ms: int, *, timeout_ms: int) -> None:
        """Adapt the timeouts to H; without a change it does nothing.

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
        closer = self._sender.outlet.end()
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
                fresh = self._new_sender(RENEW_TIMEOUT_MS)
            except Exception:  # noqa: BLE001, S112 - the next attempt may succeed
                continue
            self._use(fresh)
            break
        with self._lock:
            self._is_renewing = False

    def _use(self, fresh: _Sender) -> None:
        """Send with another producer from now on."""
        with self._lock:
            if self._is_closed:
                stale = fresh
            else:
                self._stale.append(self._sender)
                stale, self._sender = self._sender, fresh
        stale.outlet.end()

    def _new_sender(self, timeout_ms: int) -> _Sender:
        outlet = self._connect(self._timeouts, timeout_ms)
        return _Sender(outlet, self._timeouts["delivery_timeout_ms"])
