"""Questions to the cluster, each with a deadline that holds.

kafka-python's admin client blocks for as many request timeouts as a question
has round trips, and offers no deadline for the whole. Each question therefore
runs on a thread of its own, which is left behind when the deadline passes; the
request timeout ends it soon after.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kafka import errors as kafka_errors
from kafka.admin import KafkaAdminClient

from kafka_marshal.errors import CoordinationError, InvalidTransition, MarshalError
from kafka_marshal.kafka_io.connecting import ConnectionWatch, connected
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.translate import Access, translated
from kafka_marshal.kafka_io.untyped import Untyped

T = TypeVar("T")

_REQUEST_TIMEOUT_MS = 5_000
_RETRY_INTERVAL_S = 0.1
_LOOK_S = 0.1
# Who was refused might be let in elsewhere: where passwords change, say, and not every
# broker has heard.
_REFUSED_PATIENCE_S = 2.0
# Questions under way at once, abandoned ones included: bounds the threads.
_CALLS_MAX = 16


class Lookups:
    """An admin client made on first use, asked from any thread."""

    def __init__(self, settings: ConnectionSettings) -> None:
        """Remember how to connect; nothing is opened yet."""
        self._settings = settings
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_CALLS_MAX)
        self._client: Any = None
        self._is_closed = False

    def call(
        self,
        work: Callable[[Any], T],
        *,
        doing: str,
        access: Access,
        timeout_ms: int,
        needs: str | None = None,
    ) -> T:
        """Ask one question and return its answer.

        Args:
            work: Called with a ``KafkaAdminClient``; repeated after faults that
                pass, so it must be idempotent.
            doing: What is tried, for messages.
            access: Whether it reads or writes, for messages.
            timeout_ms: When to give up.
            needs: The right that it needs, for messages.

        Returns:
            What ``work`` returned.

        Raises:
            CoordinationError: It failed, or there was no answer in time.
        """
        if os.getpid() != self._pid:
            raise forked(doing)
        deadline = time.monotonic() + timeout_ms / 1000
        if not self._places.acquire(timeout=max(0.0, timeout_ms / 1000)):
            raise self._late(doing, timeout_ms)
        box: dict[str, Any] = {}
        with ConnectionWatch() as watch:
            thread = threading.Thread(
                target=self._run,
                args=(work, deadline, box, watch),
                name="marshal-lookup",
                daemon=True,
            )
            thread.start()
            _await(thread, deadline, watch)
        error = box.get("error")
        is_timeout = isinstance(error, kafka_errors.KafkaTimeoutError)
        if is_timeout or not box or watch.is_ended:
            error = watch.refused or watch.refusal or error
        if error is not None:
            addresses = self._settings.addresses
            raise translated(
                error, doing=doing, access=access, addresses=addresses, needs=needs
            )
        if "answer" not in box:
            raise self._late(doing, timeout_ms, why=watch.reason())
        answer: T = box["answer"]
        return answer

    def close(self, *, timeout_ms: int) -> None:
        """Close the client. Idempotent; questions under way fail."""
        with self._lock:
            client, self._client, self._is_closed = self._client, None, True
        if client is not None and os.getpid() == self._pid:
            thread = threading.Thread(target=client.close, daemon=True)
            thread.start()
            thread.join(timeout=max(0.0, timeout_ms / 1000))

    def _run(
        self,
        work: Callable[[Any], Any],
        deadline: float,
        box: dict[str, Any],
        watch: ConnectionWatch,
    ) -> None:
        """Do the work until it succeeds, fails for good, or is late."""
        try:
            while True:
                try:
                    box["answer"] = work(self._connected(deadline, watch))
                except Exception as error:  # noqa: BLE001 - told to the caller
                    left_s = deadline - time.monotonic()
                    is_passing = getattr(error, "retriable", False)
                    is_over = watch.is_ended or left_s <= _RETRY_INTERVAL_S
                    if not is_passing or is_over:
                        box["error"] = error
                        return
                    self._drop_if_spoilt(error)
                    time.sleep(_RETRY_INTERVAL_S)
                else:
                    return
        finally:
            self._places.release()

    def _connected(self, deadline: float, watch: ConnectionWatch) -> Untyped:
        """Return the client, connecting it first where there is none."""
        with self._lock:
            if self._is_closed:
                raise InvalidTransition("The connection is closed; open a new one.")
            if self._client is None:
                left_ms = max(1, int((deadline - time.monotonic()) * 1000))
                timeouts = {
                    "request_timeout_ms": _REQUEST_TIMEOUT_MS,
                    "bootstrap_timeout_ms": left_ms,
                }
                config = self._settings.client_config() | timeouts
                self._client = connected(KafkaAdminClient, config, watch=watch)
                watch.refused = None
            return self._client

    def _drop_if_spoilt(self, error: Exception) -> None:
        """Let go of a client whose knowledge of the cluster may be out of date.

        kafka-python remembers a group's coordinator for ever, and never returns
        to the bootstrap addresses once all brokers that it knows are gone.
        """
        is_answer = isinstance(error, kafka_errors.BrokerResponseError)
        if is_answer and not isinstance(error, kafka_errors.NotCoordinatorError):
            return
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _late(self, doing: str, timeout_ms: int, *, why: str = "") -> CoordinationError:
        return CoordinationError(
            f"{doing} failed: no answer within {timeout_ms} ms from "
            f"{self._settings.addresses}.{why} Check the addresses, the network and "
            "that the brokers run."
        )


def _await(thread: threading.Thread, deadline: float, watch: ConnectionWatch) -> None:
    """Wait until it has ended, it is late, or it is refused for good."""
    give_up = deadline
    while thread.is_alive() and time.monotonic() < give_up:
        thread.join(timeout=min(_LOOK_S, max(0.0, deadline - time.monotonic())))
        if watch.refused is None:
            give_up = deadline
        elif give_up == deadline:
            give_up = min(deadline, time.monotonic() + _REFUSED_PATIENCE_S)
    if thread.is_alive() and watch.refused is not None:
        watch.end()


def forked(doing: str) -> MarshalError:
    """Return the error for use from another process than the one that opened it."""
    # PROTOCOL 1.7: nothing inherits.
    return InvalidTransition(
        f"{doing} failed: the connection was opened by the parent process, and a "
        "forked child must not use it. Open a new one in this process."
    )
