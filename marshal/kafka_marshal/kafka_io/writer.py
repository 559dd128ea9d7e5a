"""The writing half of the coordination log: an idempotent producer, kept alive.

No producer survives everything. After a batch has timed out, or after any error
that it does not retry, kafka-python's may fail all further sends for ever, or hold
them for ever without an outcome (seen with 3.0.12 and a broker that was paused for
two seconds); librdkafka's may end with a fatal error. A claimant that cannot beat
loses all it holds, so the writer does not trust it: every append has a deadline of
our own, and after the first append that fails or is overdue, the producer is
replaced by a fresh one, made in the background from the bootstrap addresses.

With the old one all is given up that it has not delivered, or its successor would
have to wait for outcomes that may never come. What was under way may land all the
same, after what is sent later: so may any append that was given up on, and this is
what the protocol is made for. An append that failed is unknown (PROTOCOL 1.4), its
lease counts from its sending (5.2), the fold asks each record whether its epoch still
holds and takes no position back unasked (4.5), of two requests for offsets the lower
one that lands late gets nothing (4.7), and a claim that nobody waits for any more is
released (5.3). Simulated logs let what was given up land late, too, and in any order.

What is sent while the successor is made is held until then, for a quarter of an H.

What differs between client libraries stands behind ``Outlet``.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

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
# What waits for a fresh producer, as many as a busy process sends in that time.
QUEUE_MAX = 10_000


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

    def drop(self) -> threading.Thread:
        """Give up on what is under way, and let go; return at once.

        What a broker has been sent already may still land.

        Returns:
            The thread that does it.
        """
        ...


# Makes a connected outlet with these timeouts, within so many milliseconds.
Connect = Callable[[Mapping[str, int], int], Outlet]
# Says in our own words what a library raised or reported while doing something.
Translate = Callable[[Exception, str, Access], MarshalError]


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
        self.is_broken = False
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

    def take(self, held: "_Queued") -> bool:
        """Have the outlet send a record; return whether it has taken it."""
        held.append.begin(self)
        try:
            self.outlet.send(held.partition, held.value, report=held.append.report)
        except Exception as error:  # noqa: BLE001 - reported by the Append
            held.append.fail(error)
            return False
        self.pending.setdefault(held.partition, deque()).append(held.append)
        return True

    def abandon(self) -> None:
        """Count what has no outcome as failed, and let the outlet go."""
        for waiting in self.pending.values():
            for append in waiting:
                append.fail(TimeoutError("given up with its connection"))
        self.pending = {}
        self.outlet.drop()


class _SentAppend(Append):
    """An append that an outlet has taken, or is to take; overdue, it has failed."""

    __slots__ = (
        "_deadline",
        "_doing",
        "_outcomes",
        "_sender",
        "_settings",
        "_translate",
    )

    def __init__(
        self,
        *,
        limit_s: float,
        settings: ConnectionSettings,
        doing: str,
        told: Translate,
    ) -> None:
        self._sender: _Sender | None = None
        self._settings = settings
        self._doing = doing
        self._translate = told
        self._deadline = time.monotonic() + limit_s
        # The first counts: once told, an outcome stays.
        self._outcomes: list[int | Exception] = []

    def begin(self, sender: _Sender) -> None:
        """Note that it is sent now."""
        self._sender = sender
        self._deadline = time.monotonic() + sender.limit_s

    def report(self, outcome: int | Exception) -> None:
        """Take the outcome, on any thread."""
        self._outcomes.append(outcome)
        if self._sender is not None and not isinstance(outcome, int):
            self._sender.is_broken = True

    def fail(self, error: Exception) -> None:
        """Take that nobody tries any more; that spoils no outlet."""
        self._outcomes.append(error)

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
        return self._translate(outcome, self._doing, Access.WRITE)


@attrs.frozen
class _Queued:
    """A record on its way to an outlet."""

    partition: int
    value: bytes
    append: _SentAppend


class Writer:
    """Appends to one topic. ``append`` may be called from any thread."""

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        connect: Connect,
        told: Translate,
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
        self._translate = told
        self._timeouts = writer_timeouts(heartbeat_interval_ms)
        self._lock = threading.Lock()
        self._is_closed = False
        self._renewed_at = time.monotonic()
        self._wake = threading.Event()
        # Replaced while nothing was wrong with them, and not yet through.
        self._stale: list[_Sender] = []
        self._held = deque[_Queued]()
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
            if self._is_closed:
                return FailedAppend(InvalidTransition(f"{doing} failed: it is closed."))
            if len(self._held) >= QUEUE_MAX:
                return FailedAppend(
                    CoordinationError(
                        f"{doing} failed: {QUEUE_MAX} records wait for the connection "
                        f"to {self._settings.addresses}. Try again."
                    )
                )
            append = _SentAppend(
                # Held and then sent, it is over before an H is: who waits for it
                # longer waits for nothing.
                limit_s=self._timeouts["delivery_timeout_ms"] / 2000,
                settings=self._settings,
                doing=doing,
                told=self._translate,
            )
            self._held.append(_Queued(partition, value, append))
            self._release()
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
            for held in self._held:
                held.append.fail(TimeoutError("closed before it was sent"))
            self._held.clear()
        self._wake.set()
        closer = self._sender.outlet.end()
        closer.join(timeout=max(0.0, deadline - time.monotonic()))

    def _watch(self) -> None:
        """Start a renewal where one is due (with the lock held)."""
        self._sender.sweep()
        for sender in self._stale:
            sender.sweep()
        self._stale = [sender for sender in self._stale if sender.pending]
        if self._sender.is_broken and not self._is_renewing and not self._is_closed:
            self._is_renewing = True
            threading.Thread(
                target=self._renew, name="marshal-renew", daemon=True
            ).start()
        self._release()

    def _release(self) -> None:
        """Send what is held, as far as it may be (with the lock held).

        In order: nothing overtakes an append of an outlet that is as good as ever.
        """
        while self._held and self._held[0].append.is_done():
            self._held.popleft()
        if self._sender.is_broken:
            return
        waiting, self._held = self._held, deque()
        kept: set[int] = set()
        is_taking = True
        for held in waiting:
            number = held.partition
            if (
                not is_taking
                or number in kept
                or any(sender.has_pending(number) for sender in self._stale)
            ):
                kept.add(number)
                self._held.append(held)
            elif not held.append.is_done():
                # What one is refused for, as a library that knows no leader yet, may
                # have taken a moment: the others go on with the next look.
                is_taking = self._sender.take(held)

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
                fresh.outlet.end()
                return
            old, self._sender = self._sender, fresh
            if old.is_broken:
                old.abandon()
            else:
                self._stale.append(old)
                old.outlet.end()
            self._release()

    def _new_sender(self, timeout_ms: int) -> _Sender:
        outlet = self._connect(self._timeouts, timeout_ms)
        return _Sender(outlet, self._timeouts["delivery_timeout_ms"])
