"""kafka-python's clients: making them, and requests to the cluster with a deadline.

kafka-python retries the bootstrap addresses until its timeout, whatever the error, and
then raises a timeout without a reason: a wrong password looks like a network that is
down. Only the failed connections know the reason; a ``ConnectionWatch`` collects it. A
failed client also leaves its thread and sockets open; ``new_client`` closes them.

kafka-python's admin client blocks for as many request timeouts as a call has round
trips: the call as a whole has no deadline. ``AdminClient`` stops waiting at its
deadline; the request timeout ends the abandoned request soon after.
"""

import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from kafka import errors as kafka_errors
from kafka.net.sasl.oauth import AbstractTokenProvider
from kafka.net.selector import NetworkSelector

from kafka_marshal.closing import in_background
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    InvalidTransition,
)
from kafka_marshal.kafka_io.driving import TimedSelector
from kafka_marshal.kafka_io.faults import (
    UNREACHABLE,
    forked_error,
    is_certificate_refused,
    is_interrupt,
)
from kafka_marshal.kafka_io.oauth import extensions_of
from kafka_marshal.kafka_io.patches import Admin, Network, force_close
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.tls_files import check_tls_files, stores
from kafka_marshal.kafka_io.translate import (
    Access,
    AdvertisedAddressError,
    NoTokenError,
    fault_of_connection,
    translate_error,
)

# Refusals that no retry changes.
REFUSALS = (
    kafka_errors.SaslAuthenticationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
    kafka_errors.IllegalSaslStateError,
)
T = TypeVar("T")

_REQUEST_TIMEOUT_MS = 5_000
_RETRY_INTERVAL_S = 0.1
_CHECK_S = 0.1
# Retry authentication failures briefly: after a credential change some brokers still
# reject the new password.
_REFUSED_RETRY_MS = 2_000
# Concurrent calls; bounds the number of requests in flight.
_CALLS_MAX = 16
# Longest wait for the end of a network, whose thread may be resolving a name.
_CLOSE_S = 1.0


def new_client(
    kind: Any,
    config: Mapping[str, Any],
    *,
    topic: str | None = None,
    watch: "ConnectionWatch | None" = None,
    selector: Callable[[Mapping[str, Any]], NetworkSelector] | None = None,
) -> Any:
    """Return a connected client of kafka-python; close everything on failure.

    Args:
        kind: ``KafkaConsumer``, ``KafkaProducer`` or ``Admin``.
        config: Its configuration; with a topic it needs ``bootstrap_timeout_ms``.
        topic: Included in the first metadata request. For a topic that is added later
            kafka-python waits 100 ms before its next request.
        watch: Collects the refusals of this client.
        selector: Makes the event loop of the connections; gets the configuration.

    Raises:
        ConfigurationError: Python runs without assertions.
        KafkaError: No connection could be made.
    """
    if sys.flags.optimize:
        # kafka-python reads bytes within an assertion: it would misread every response.
        raise ConfigurationError(
            "kafka-python cannot decode responses under python -O or with "
            "PYTHONOPTIMIZE: it relies on assertions. Run Python without them."
        )
    network: list[Network] = []

    def make(**options: Any) -> Any:
        made = Network(options, selector and selector(options))
        network.append(made)
        made.manager.failed = partial(_note_failure, made, watch)
        if watch is not None:
            watch.add(made)
        if topic is not None:
            # Connect with a limit first: otherwise add_topic() connects without one.
            made.manager.bootstrap_async(config["bootstrap_timeout_ms"])
            made.cluster.add_topic(topic)
        return made

    options = dict(config)
    provider = options.get("sasl_oauth_token_provider")
    if provider is not None:
        options["sasl_oauth_token_provider"] = _Tokens(provider)
    try:
        return kind(**options, kafka_client=make)
    except BaseException:
        # The constructor failed, so there is no client to close, only its network.
        for each in network:
            in_background(each.close).join(timeout=_CLOSE_S)
        raise


class _Tokens(AbstractTokenProvider):  # type: ignore[misc] # untyped library
    """Tokens of any provider; an exception of the provider fails the connection."""

    def __init__(self, provider: Any) -> None:
        super().__init__()
        self._provider = provider

    def token(self) -> str:
        """Return a token, on the thread of the network."""
        try:
            return str(self._provider.token())
        except Exception as error:
            raise NoTokenError(f"{type(error).__name__}: {error}") from error

    def extensions(self) -> dict[str, str]:
        """Return the SASL extensions."""
        return extensions_of(self._provider)


def close_by_force(producer: Any) -> None:
    """Close a producer that may hold batches for ever; blocks for a second at most.

    kafka-python's ``close`` closes nothing if its ``flush`` fails.
    """
    force_close(producer)
    producer.close(timeout=1)


class ConnectionWatch:
    """Collects errors of connections to brokers.

    Those of the watched clients; as a context manager those of all clients.

    Attributes:
        refused: Permanent refusal of a watched client, None once it has connected.
        refusal: Last refusal.
        last: Last error.
        is_stopped: Whether the watched clients were stopped.
    """

    def __init__(self) -> None:
        self.refused: Exception | None = None
        self.refusal: Exception | None = None
        self.last: Exception | None = None
        self.is_stopped = False
        self._networks: list[Network] = []

    def add(self, network: Network) -> None:
        """Watch the connections of this network."""
        self._networks.append(network)

    def stop(self) -> None:
        """Stop the watched clients from retrying; return at once.

        Each is closed on its own thread, so the call that connects it fails.
        """
        self.is_stopped = True
        for each in self._networks:
            with suppress(Exception):  # already closed
                each.stop()

    def note(
        self, network: Network, error: Exception, *, address: str | None = None
    ) -> None:
        """Record why a connection of a network was not established.

        Args:
            network: The network.
            error: The error.
            address: The broker's address, if only the cluster names it.
        """
        self.last = error
        if address is not None and fault_of_connection(error) is None:
            self.last = AdvertisedAddressError(f"{address}: {error}")
        if isinstance(error, REFUSALS):
            self.refusal = error
        why = _final(error)
        if why is not None and network in self._networks:
            self.refused = why

    def explained(self) -> Exception | None:
        """Return the last error if it shows what is wrong with the connection."""
        return None if fault_of_connection(self.last) is None else self.last

    def reason(self) -> str:
        """Return the last error as a sentence for a message, or an empty text."""
        return f" The last attempt ended with: {self.last}." if self.last else ""

    def __enter__(self) -> Self:
        _watches.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _watches.remove(self)


# Watches of the calls that are under way, on any thread.
_watches: list[ConnectionWatch] = []


def _note_failure(
    network: Network,
    own: ConnectionWatch | None,
    error: Exception,
    address: str | None,
) -> None:
    stores.renew()  # for the next attempt
    for watch in {*_watches, *([own] if own else [])}:
        watch.note(network, error, address=address)


def _final(error: object) -> Exception | None:
    """Return the cause that makes retries useless, if there is one."""
    while isinstance(error, Exception):
        is_final = isinstance(error, (*REFUSALS, ssl.SSLCertVerificationError))
        if is_final or is_certificate_refused(str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


class AdminClient:
    """kafka-python's admin client with a deadline on each call. Thread-safe.

    The first call connects, and holds ``_connecting`` up to its deadline. ``_lock``
    guards the fields and is never held in a wait, so ``close`` waits for no broker.
    """

    def __init__(self, settings: ConnectionConfig) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._connecting = threading.Lock()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(_CALLS_MAX)
        self._limits = _Limits()
        self._client: Any = None
        self._has_connected = False
        self._is_closed = False

    def call(
        self,
        work: Callable[[Any], T],
        *,
        doing: str,
        access: Access,
        timeout_ms: int,
        needs: str | None = None,
        needs_on_topics: str | None = None,
    ) -> T:
        """Run one request and return its result.

        Args:
            work: Called with an ``Admin``; repeated after transient faults,
                so it must be idempotent.
            doing: Name of the operation, for messages.
            access: Whether it reads or writes, for messages.
            timeout_ms: Limit for the whole call.
            needs: The right that it needs, for messages.
            needs_on_topics: The right on topics that it needs as well, if ``needs`` is
                one on a group.

        Raises:
            ConfigurationError: A file of TLS cannot be used.
            CoordinationError: It failed, or there was no answer in time.
        """
        if os.getpid() != self._pid:
            raise forked_error(doing)
        deadline = Deadline(timeout_ms)
        if not self._slots.acquire(timeout=max(0.0, timeout_ms / 1000)):
            raise self._late(doing, timeout_ms)
        error: Exception | None = None
        try:
            with ConnectionWatch() as watch:
                self._limits.deadline, self._limits.watch = deadline, watch
                return self._run(work, deadline, watch)
        except Exception as raised:
            if is_interrupt(raised):
                raise
            error = raised
        finally:
            self._slots.release()
        if isinstance(error, _VAGUE) or watch.is_stopped:
            error = watch.refused or watch.refusal or watch.explained() or error
        if isinstance(error, _GaveUp):
            raise self._late(doing, timeout_ms, why=watch.reason())
        if isinstance(error, kafka_errors.TopicAuthorizationFailedError):
            needs = needs_on_topics or needs
        addresses = self._settings.addresses
        raise translate_error(
            error, doing=doing, access=access, addresses=addresses, needs=needs
        )

    def close(self, *, timeout_ms: int) -> None:
        """Close the client. Idempotent; calls under way fail.

        A call that is connecting fails once it has connected.
        """
        with self._lock:
            client, self._client, self._is_closed = self._client, None, True
        if client is not None and os.getpid() == self._pid:
            in_background(client.close).join(timeout=max(0.0, timeout_ms / 1000))

    def _run(
        self, work: Callable[[Any], T], deadline: Deadline, watch: ConnectionWatch
    ) -> T:
        """Retry until success, a permanent error or the deadline."""
        while True:
            client = None
            try:
                client = self._connect(deadline, watch)
                return work(client)
            except Exception as error:
                # Another call may have closed the client while this one used it.
                was_dropped = client is not None and self._is_dropped(client)
                # Nothing was sent: the metadata does not list the broker, such as a
                # controller that has just started.
                is_unlisted = isinstance(error, kafka_errors.UnknownBrokerIdError)
                is_passing = (
                    was_dropped or is_unlisted or getattr(error, "retriable", False)
                )
                is_over = watch.is_stopped or deadline.left_s <= _RETRY_INTERVAL_S
                if not is_passing or is_over or isinstance(error, _GaveUp):
                    raise
                self._drop_if_outdated(client, error)
            time.sleep(_RETRY_INTERVAL_S)

    def _connect(self, deadline: Deadline, watch: ConnectionWatch) -> Any:
        """Return the client; connect it if there is none."""
        client = self._connected()
        if client is not None:
            return client
        if not self._connecting.acquire(timeout=deadline.left_s):
            raise _GaveUp
        try:
            client = self._connected()
            if client is not None:
                return client
            if not self._has_connected:
                # Checked once: later the files may be in the middle of a renewal.
                check_tls_files(self._settings.options)
            timeouts = {
                "request_timeout_ms": _REQUEST_TIMEOUT_MS,
                # Ends after the call, whose own error has the reason.
                "bootstrap_timeout_ms": deadline.left_ms + _REQUEST_TIMEOUT_MS,
                # The default is five: a sixth concurrent call would fail at once.
                "max_in_flight_requests_per_connection": 2 * _CALLS_MAX,
            }
            client = new_client(
                Admin,
                self._settings.client_config() | timeouts,
                watch=watch,
                selector=partial(TimedSelector, wait=self._limits.wait),
            )
            watch.refused = None
            self._has_connected = True
            with self._lock:
                is_closed = self._is_closed
                if not is_closed:
                    self._client = client
        finally:
            self._connecting.release()
        if is_closed:  # meanwhile
            client.close()
            raise _closed()
        return client

    def _connected(self) -> Any:
        with self._lock:
            if self._is_closed:
                raise _closed()
            return self._client

    def _is_dropped(self, client: Any) -> bool:
        """Return whether a call has dropped this client, and a new one may be made."""
        with self._lock:
            return not self._is_closed and self._client is not client

    def _drop_if_outdated(self, client: Any, error: Exception) -> None:
        """Drop a client whose metadata may be out of date, unless it was dropped.

        kafka-python caches a group's coordinator for ever, and never returns to the
        bootstrap addresses once all brokers that it knows are gone.
        """
        is_answer = isinstance(error, kafka_errors.BrokerResponseError)
        if is_answer and not isinstance(error, kafka_errors.NotCoordinatorError):
            return
        with self._lock:
            if client is None or self._client is not client:
                return
            self._client = None
        in_background(client.close).join(timeout=_CLOSE_S)

    def _late(self, doing: str, timeout_ms: int, *, why: str = "") -> CoordinationError:
        return CoordinationError(
            f"{doing} failed: no answer within {timeout_ms} ms from "
            f"{self._settings.addresses}.{why} {UNREACHABLE.next_step}"
        )


def _closed() -> InvalidTransition:
    return InvalidTransition("The connection is closed; open a new one.")


class _GaveUp(Exception):
    """The deadline has passed, or retries would only be refused again."""


# Errors with less information than that of the last failed connection.
_VAGUE = (
    _GaveUp,
    kafka_errors.KafkaTimeoutError,
    kafka_errors.KafkaConnectionError,
)


class _Limits(threading.local):
    """How long the call of this thread waits for its network.

    Attributes:
        deadline: Deadline of the call.
        watch: Errors of its connections.
    """

    deadline: Deadline
    watch: ConnectionWatch

    def wait(self, is_over: threading.Event) -> None:
        """Wait for an event.

        Raises:
            _GaveUp: The deadline or a permanent refusal came first.
        """
        deadline, watch = self.deadline, self.watch
        give_up = deadline
        while not give_up.is_over:
            if is_over.wait(min(_CHECK_S, deadline.left_s)):
                return
            if watch.refused is None:
                give_up = deadline
            elif give_up is deadline:
                give_up = deadline.within(_REFUSED_RETRY_MS)
        if is_over.is_set():
            return
        if watch.refused is not None:
            watch.stop()
        raise _GaveUp
