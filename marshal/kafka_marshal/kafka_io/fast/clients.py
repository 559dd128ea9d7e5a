"""librdkafka's clients: making them, closing them, and finding new leaders.

Log lines go to the logger ``kafka_marshal.librdkafka``, never to stderr. The threads of
librdkafka do not survive a fork, and destroying a handle in a child would wait for them
for ever: a child keeps every handle, untouched, to its end.

After the loss of a broker librdkafka asks once a second who leads its partitions.
While it removes a broker that a response no longer names, it often takes the partitions
away from their new leader as well, and notices at the next request, a second later
(seen with 2.16). So the thread that polls a client asks more often for a while after a
loss. The number of requests is bounded for each loss and client; then librdkafka's own
interval of a second applies again. If no broker can be reached, nothing is sent.
"""

import ctypes
import logging
import math
import os
import re
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import islice
from typing import Any
from weakref import WeakSet

import attrs
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
)
from confluent_kafka.admin import AdminClient

from kafka_marshal.closing import in_background
from kafka_marshal.kafka_io.fast.settings import fast_config
from kafka_marshal.kafka_io.fast.translate import (
    GUESS_NO_TLS,
    GUESS_ONLY_TLS,
    Access,
    cause_of,
    is_login_refused,
    no_token_error,
    translate_error,
    without_guess,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.throttling import throttling
from kafka_marshal.kafka_io.tls_files import TlsFiles

ASK_INTERVAL_S = 0.25
# Interval of requests about a broker that stays away: each request that times out costs
# the binding some memory for good.
AWAY_INTERVAL_S = 2.0
# A broker is away if its last error was this recent; librdkafka repeats it every 30 s.
AWAY_S = 40.0
BROKERS_MAX = 1_000
# Longer than failover of a broker and the active controller usually takes: broker
# sessions last 9 s by default.
ASKED_FOR_S = 20.0
# Topics to request at once, with one request each; further topics take turns.
TOPICS_AT_ONCE = 8
# Connections count as failing this long after an error; librdkafka repeats a lasting
# error every 30 s.
FAILING_S = 60.0
# Enough to send the request; librdkafka handles the response whenever it arrives.
_SENT_S = 0.001
_TRANSPORT = KafkaError._TRANSPORT  # noqa: SLF001 - its public name
LOSSES = (
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001 - its public names
    KafkaError._TIMED_OUT,  # noqa: SLF001
    _TRANSPORT,
)
# Longer than requests of an admin client take.
_REQUESTS_S_MAX = 10.0
LOGGER = "kafka_marshal.librdkafka"
_LOGGER = logging.getLogger(LOGGER)
# Without a handler, Python writes warnings to stderr if logging is not configured.
_LOGGER.addHandler(logging.NullHandler())
# Parts of debug lines. If a release words them differently, opening takes longer.
_PID_REQUESTED, _PID_ACQUIRED = "Coordinator not up", "Acquired PID"
# Debug line about a topic's id, the same since release 2.6, also for the first id. A
# reader accepts no records of a topic without such a line.
_TOPIC_ID = re.compile(r"Topic (\S+) changed id from \S* to ([A-Za-z0-9+/]{22})\b")
# Debug line about an answer with metadata, in the same context.
_BROKERS_LISTED = re.compile(r": (\d+) brokers, \d+ topics")
# A broker that lists none shuts down: how long a new client waits before it asks again.
NO_BROKERS_S = 1.0
# The debug context that has that line, and the fewest others: one for each partition of
# a topic and metadata request. Each line takes the interpreter lock, and a poll lasts
# until all lines are handled.
TOPIC_IDS = {"debug": "metadata"}
# The part in which two lines about the same cause differ.
_ATTEMPT = re.compile(r" \(after \d+ms in state [^)]*\)")
# Line of level INFO if a TLS listener closes the connection of a client without TLS; no
# error reports that.
_CLOSED_AT_ONCE = re.compile(r"\S+: Disconnected: .* in state APIVERSION_QUERY\)")
# Error if a listener without TLS ends a handshake; librdkafka sometimes reports its
# guess of the reason instead.
_ENDED = "SSL connection closed by peer"
REPEATED_AFTER_S = 60.0
CAUSES_MAX = 100
# librdkafka requires a group even for assigned partitions without commits. It only
# finds the group's coordinator.
GROUP_ID = "kafka-marshal-assigned"
# Weak references: a client that an interrupted call dropped is destroyed as garbage.
_live: "WeakSet[Client]" = WeakSet()


class LeaderSearch:
    """Schedule of metadata requests of one client, for the thread that polls it.

    No other thread could send them: the binding serializes calls on a consumer, and a
    thread that polls all the time would always come first.
    """

    __slots__ = (
        "_ask_at_s",
        "_clock_s",
        "_first",
        "_lost_s",
        "_often_until_s",
        "_until_s",
    )

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._until_s = self._often_until_s = 0.0
        self._ask_at_s = 0.0
        self._first = 0
        # Local time of the last error of each broker.
        self._lost_s: dict[str, float] = {}

    def start(self, broker: str) -> None:
        """Start asking after the loss of a broker, less often if it was lost before."""
        now_s = self._clock_s()
        self._until_s = now_s + ASKED_FOR_S
        if now_s - self._lost_s.get(broker, -AWAY_S) >= AWAY_S:
            self._often_until_s = self._until_s
            self._ask_at_s = min(self._ask_at_s, now_s + ASK_INTERVAL_S)
        if len(self._lost_s) >= BROKERS_MAX:
            self._lost_s.clear()
        self._lost_s[broker] = now_s

    def _interval_s(self) -> float:
        is_new = self._clock_s() < self._often_until_s
        return ASK_INTERVAL_S if is_new else AWAY_INTERVAL_S

    def max_wait_s(self, wait_s: float) -> float:
        """Limit a wait for records so that requests go out in time.

        Rounded up, because librdkafka cuts off fractions of a millisecond: a caller
        with less than a millisecond left would call dozens of times without a wait.
        """
        most_s = min(wait_s, self._interval_s()) if self._until_s else wait_s
        return math.ceil(most_s * 1_000) / 1_000

    def ask_if_due(self, handle: Any, topics: Collection[str]) -> None:
        """Request metadata of these topics if due, without waiting for the response.

        Costs next to nothing unless a broker was lost recently.
        """
        if not self._until_s:
            return
        now_s = self._clock_s()
        if now_s < self._ask_at_s:
            return
        self._ask_at_s = now_s + self._interval_s()
        if now_s >= self._until_s:
            self._until_s = 0.0
            return
        first = self._first if self._first < len(topics) else 0
        for topic in islice(topics, first, first + TOPICS_AT_ONCE):
            with suppress(KafkaException):  # always times out
                handle.list_topics(topic, timeout=_SENT_S)
        self._first = first + TOPICS_AT_ONCE


def _keep_in_child() -> None:
    """Keep all handles of the parent alive in this child."""
    for client in _live:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client.handle))
    _live.clear()


os.register_at_fork(after_in_child=_keep_in_child)


@attrs.define(eq=False, kw_only=True)
class Client:
    """A client of librdkafka and what it has reported.

    Attributes:
        handle: confluent-kafka's object.
        refusal: Last permanent refusal, or None.
        last: Last error that names a cause, or None.
        has_answered: Whether a broker has answered: its listener is the right one.
        requests_pid: Set when a producer knows the brokers and requests an id.
        has_pid: Set when it has a producer id.
        leaders: Search for new leaders, for the polling thread.
        topic_ids: Ids of topics, with the configuration ``TOPIC_IDS``. An id is set
            before all records of that topic, because its log line goes through the same
            queue, and before the first fetch by that id.
        has_other_topic: Whether the id of a topic has changed.
        files: Files of TLS that it has loaded, None without TLS.
    """

    handle: Any = None
    refusal: Exception | None = None
    last: Exception | None = None
    has_answered: bool = False
    requests_pid: threading.Event = attrs.field(factory=threading.Event)
    has_pid: threading.Event = attrs.field(factory=threading.Event)
    leaders: LeaderSearch = attrs.field(factory=LeaderSearch)
    topic_ids: dict[str, bytes] = attrs.field(factory=dict)
    has_other_topic: bool = False
    files: TlsFiles | None = None
    _failed_s: float | None = None  # local time of the last error
    # Local time of the answer that listed no broker, None if the last one listed some.
    _unlisted_s: float | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether connections fail, and those of a new client would probably not.

        After an answer that lists no broker, as of one that shuts down, librdkafka
        connects to none any more, also none of the bootstrap addresses. (Only a client
        with ``TOPIC_IDS`` notices.) It loads files of TLS once. Open connections
        outlive their certificates; a renewed certificate that brokers do not accept
        must not end them.
        """
        if self._unlisted_s is not None:
            return time.monotonic() - self._unlisted_s >= NO_BROKERS_S
        if self._failed_s is None or self.files is None:
            return False
        is_failing = time.monotonic() - self._failed_s < FAILING_S
        return is_failing and self.files.are_renewed()

    def on_topic_id(self, topic: str, topic_id: bytes) -> None:
        """Set the id by which a topic is fetched from now on."""
        if self.topic_ids.setdefault(topic, topic_id) != topic_id:
            self.topic_ids[topic] = topic_id
            self.has_other_topic = True

    def on_answer(self) -> None:
        """Handle the answer of a broker: earlier errors of connections are over."""
        self.last = None
        self.has_answered = True

    def on_brokers(self, count: int) -> None:
        """Handle an answer with metadata, which lists some brokers."""
        self._unlisted_s = None if count else time.monotonic()

    def on_error(self, error: Any) -> None:
        """Handle an error reported while the client is polled."""
        # An exception of the token callback is still set in Python when the binding
        # reports it, and fails the first access.
        with suppress(SystemError):
            error.code()
        if self.has_answered:
            error = without_guess(error)
        self._failed_s = time.monotonic()
        is_vague = error.code() == KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001
        if not (is_vague or (_ENDED in error.str() and self._has_no_tls_guess)):
            self.last = KafkaException(error)
        if is_login_refused(error):
            self.refusal = KafkaException(error)
        elif error.code() in LOSSES:
            # Errors of one broker begin with its name.
            self.leaders.start("" if is_vague else error.str().partition(": ")[0])

    @property
    def _has_no_tls_guess(self) -> bool:
        last = cause_of(self.last)
        return last is not None and GUESS_NO_TLS in last.str()

    def release(self) -> None:
        """Drop the last reference, which destroys the handle.

        This may block; call it on a background thread.
        """
        self.handle = None
        _live.discard(self)


class _Log:
    """Forwards log lines, and extracts what is reported nowhere else.

    While a broker is down, librdkafka reports every attempt to connect, some 75 a
    second; unpolled lines arrive when the client is destroyed. The first line of each
    cause in a minute keeps its level; the others get the level DEBUG.

    Args:
        client: Its client.
        is_quiet: Whether all lines get the level DEBUG: errors name the last cause.
        has_tls: Whether the client uses TLS.
        clock_s: Returns local time.
    """

    def __init__(
        self,
        client: Client,
        *,
        is_quiet: bool = False,
        has_tls: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._is_quiet = is_quiet
        self._has_tls = has_tls
        self._clock_s = clock_s
        self._due_s: dict[str, float] = {}

    def log(self, level: int, text: str, *values: object) -> None:
        """Handle a line, while the client is polled."""
        line = text % values
        renamed = _TOPIC_ID.search(line)
        if renamed is not None:
            topic, topic_id = renamed.groups()
            self._client.on_topic_id(topic, b64decode(topic_id + "=="))
        elif not self._client.has_pid.is_set():
            if _PID_REQUESTED in line or _PID_ACQUIRED in line:
                self._client.requests_pid.set()
            if _PID_ACQUIRED in line:
                self._client.has_pid.set()
        listed = _BROKERS_LISTED.search(line)
        if listed is not None:
            self._client.on_brokers(int(listed[1]))
        closed = None if self._has_tls else _CLOSED_AT_ONCE.search(line)
        if closed is not None and not self._client.has_answered:
            guess = f"{closed[0]}: {GUESS_ONLY_TLS}"
            self._client.last = KafkaException(KafkaError(_TRANSPORT, guess))
        is_repeated = level >= logging.INFO and self._is_repeated(line)
        is_for_debugging = self._is_quiet or is_repeated
        _LOGGER.log(logging.DEBUG if is_for_debugging else level, text, *values)

    def _is_repeated(self, line: str) -> bool:
        cause, now_s = _ATTEMPT.sub("", line), self._clock_s()
        if now_s < self._due_s.get(cause, 0.0):
            return True
        if len(self._due_s) >= CAUSES_MAX:
            self._due_s.clear()
        self._due_s[cause] = now_s + REPEATED_AFTER_S
        return False


def _note_delay(event: Any) -> None:
    """Handle the delay of a response, reported while the client is polled."""
    throttling.note(f"broker {event.broker_id}", event.throttle_time * 1_000)


def _new_client(
    kind: Callable[..., Any],
    settings: ConnectionConfig,
    config: Mapping[str, Any],
    *,
    is_quiet: bool = False,
) -> Client:
    has_tls = "SSL" in settings.client_config().get("security_protocol", "")
    client = Client(files=TlsFiles(settings.options) if has_tls else None)
    _live.add(client)
    whole = {
        "allow.auto.create.topics": False,
        "error_cb": client.on_error,
        "throttle_cb": _note_delay,
        # librdkafka waits half of this, at least 11 ms, before it connects to a leader.
        "reconnect.backoff.ms": 20,
        **fast_config(settings),
        **config,
    }
    log = _Log(client, is_quiet=is_quiet, has_tls=has_tls)
    try:
        client.handle = kind(whole, logger=log)
    except (KafkaException, SystemError) as error:
        # The constructor waits for a token; if it gets none, it does not report why.
        failure = getattr(whole.get("oauth_cb"), "failure", None)
        if failure is not None:
            raise no_token_error(failure, addresses=settings.addresses) from failure
        raise translate_error(
            error,
            doing="Making a client",
            access=Access.READ,
            addresses=settings.addresses,
        ) from error
    return client


def new_consumer(settings: ConnectionConfig, config: Mapping[str, Any]) -> Client:
    """Return a consumer for assigned partitions, which connects in the background.

    PROTOCOL 2.1: no commits, and no silent jump to another offset.

    Args:
        settings: Connection.
        config: More configuration of librdkafka.

    Raises:
        ConfigurationError: An option has no equivalent in librdkafka, or is not
            accepted by it.
    """
    fixed = {
        "group.id": GROUP_ID,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "fetch.min.bytes": 1,
        # How long to stop fetching while the queue is full; a second by default.
        "fetch.queue.backoff.ms": 10,
        "fetch.error.backoff.ms": 100,
    }
    return _new_client(Consumer, settings, fixed | dict(config))


def new_producer(settings: ConnectionConfig, config: Mapping[str, Any]) -> Client:
    """Return an idempotent producer, which connects in the background.

    Args:
        settings: Connection.
        config: More configuration of librdkafka.

    Raises:
        ConfigurationError: An option has no equivalent in librdkafka, or is not
            accepted by it.
    """
    # A few debug lines for each connection; none for records.
    return _new_client(Producer, settings, {"debug": "eos", **config})


def new_admin(settings: ConnectionConfig) -> Client:
    """Return a client for queries to the cluster, which connects in the background.

    Raises:
        ConfigurationError: An option has no equivalent in librdkafka, or is not
            accepted by it.
    """
    return _new_client(AdminClient, settings, {}, is_quiet=True)


def close_admin(client: Client, pending: "Collection[Future[Any]]") -> threading.Thread:
    """Close a client on a background thread once these requests, or 10 s, are over."""

    def close() -> None:
        wait(pending, timeout=_REQUESTS_S_MAX)
        client.release()

    return in_background(close)


def close_consumer(client: Client) -> threading.Thread:
    """Close a consumer on a background thread. Never call it in a forked child."""

    def close() -> None:
        client.handle.close()
        client.release()

    return in_background(close)
