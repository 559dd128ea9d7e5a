"""librdkafka's clients: making them, closing them, and finding new leaders.

Log lines go to the logger ``kafka_marshal.librdkafka``, never to stderr. The threads of
librdkafka do not survive a fork, and destroying a handle in a child would wait for them
for ever: a child keeps every handle, untouched, to its end.

After the loss of a broker librdkafka asks once a second who leads its partitions.
While it removes a broker that a response no longer names, it often takes the partitions
away from their new leader as well, and notices at the next request, a second later
(seen with 2.16). So the thread that polls a client asks more often for a while after a
loss. The number of requests is bounded for each loss and client; then librdkafka's own
second applies again. Where no broker can be reached, nothing is sent.
"""

import ctypes
import logging
import os
import re
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import attrs
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
)

from kafka_marshal.kafka_io.fast.settings import fast_config
from kafka_marshal.kafka_io.settings import ConnectionSettings

ASK_INTERVAL_S = 0.25
# Longer than the death of a broker and of the leading controller usually takes:
# brokers' sessions last 9 s by default.
ASKED_FOR_S = 20.0
# One request each: of more topics, some are asked about each time.
TOPICS_AT_ONCE = 8
# The question is sent in this time; the answer is taken whenever it comes.
_SENT_S = 0.001
LOSSES = (
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001 - its public names
    KafkaError._TIMED_OUT,  # noqa: SLF001
    KafkaError._TRANSPORT,  # noqa: SLF001
)
LOGGER = "kafka_marshal.librdkafka"
_LOGGER = logging.getLogger(LOGGER)
# Parts of debug lines. Were they worded otherwise, opening would wait longer.
_PID_REQUESTED, _PID_ACQUIRED = "Coordinator not up", "Acquired PID"
# The line about a topic's id, the first one included. Its words have been the same
# from release 2.6 on; a reader takes no records of a topic whose id it was not told.
_TOPIC_ID = re.compile(r"Topic (\S+) changed id from \S* to ([A-Za-z0-9+/]{22})\b")
# Debug lines that are needed for that: one or two for each partition and request for
# metadata, none for records.
TOPIC_IDS = {"debug": "topic"}
# librdkafka wants a group even where partitions are assigned and nothing is
# committed. It only looks for the group's coordinator.
GROUP_ID = "kafka-marshal-assigned"
_REFUSALS = (
    KafkaError._AUTHENTICATION,  # noqa: SLF001 - its public name
    KafkaError.SASL_AUTHENTICATION_FAILED,
)

_live: dict[int, Any] = {}


class LeaderSearch:
    """When to ask for leaders, of one client. To be used by whoever polls it.

    A consumer can be asked by nobody else: its binding lets only one call go on at
    a time, and those of a thread that polls all the time come first.
    """

    __slots__ = ("_ask_at_s", "_clock_s", "_first", "_until_s")

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Begin without a loss.

        Args:
            clock_s: What time it is, in seconds.
        """
        self._clock_s = clock_s
        self._until_s = 0.0
        self._ask_at_s = 0.0
        self._first = 0

    def start(self) -> None:
        """Take that a broker was lost."""
        self._until_s = self._clock_s() + ASKED_FOR_S

    def max_wait_s(self, wait_s: float) -> float:
        """Return how long to wait for records at most, so that asking goes on."""
        return min(wait_s, ASK_INTERVAL_S) if self._until_s else wait_s

    def ask_if_due(self, handle: Any, topics: Collection[str]) -> None:
        """Ask who leads partitions of these topics, where that is due.

        It does not wait for answers, and costs next to nothing where no broker
        was lost of late.

        Args:
            handle: confluent-kafka's object.
            topics: The topics; few of very many are asked about each time.
        """
        if not self._until_s:
            return
        now_s = self._clock_s()
        if now_s < self._ask_at_s:
            return
        self._ask_at_s = now_s + ASK_INTERVAL_S
        if now_s >= self._until_s:
            self._until_s = 0.0
            return
        first = self._first if self._first < len(topics) else 0
        for topic in islice(topics, first, first + TOPICS_AT_ONCE):
            with suppress(KafkaException):  # late, as it has to be
                handle.list_topics(topic, timeout=_SENT_S)
        self._first = first + TOPICS_AT_ONCE


def _keep_in_child() -> None:
    """See that no handle of the parent is ever destroyed in this child."""
    for handle in _live.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
    _live.clear()


os.register_at_fork(after_in_child=_keep_in_child)


@attrs.define(eq=False)
class Client:
    """A client of librdkafka, and what it told of its connections.

    Attributes:
        handle: confluent-kafka's object.
        refusal: The last refusal that no further attempt will change, or None.
        requests_pid: Whether a producer knows the brokers, and looks for one that
            numbers its records.
        has_pid: Whether it has been given numbers.
        leaders: Asks for new leaders after a loss, by whoever polls.
        topic_ids: Id of each topic that is read, where ``TOPIC_IDS`` are asked for.
            A line about one comes before all records of the topic of that id, because
            it goes through the same queue, and before the first fetch by that id.
        is_outdated: Whether a topic has got another id since the client was made.
    """

    handle: Any = None
    refusal: Exception | None = None
    requests_pid: threading.Event = attrs.field(factory=threading.Event)
    has_pid: threading.Event = attrs.field(factory=threading.Event)
    leaders: LeaderSearch = attrs.field(factory=LeaderSearch)
    topic_ids: dict[str, bytes] = attrs.field(factory=dict)
    is_outdated: bool = False

    def on_topic_id(self, topic: str, topic_id: bytes) -> None:
        """Take the id by which a topic is fetched from now on."""
        if self.topic_ids.setdefault(topic, topic_id) != topic_id:
            self.topic_ids[topic] = topic_id
            self.is_outdated = True

    def on_error(self, error: Any) -> None:
        """Take a report of librdkafka, which comes while the client is polled."""
        if error.code() in _REFUSALS:
            self.refusal = KafkaException(error)
        elif error.code() in LOSSES:
            self.leaders.start()

    def release(self) -> None:
        """Drop the last reference: the handle is destroyed, which may take a while.

        To be called on a thread that nobody waits for.
        """
        handle, self.handle = self.handle, None
        _live.pop(id(handle), None)


class _Log:
    """Hands log lines on, and takes from them what nothing else tells."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def log(self, level: int, text: str, *values: object) -> None:
        """Take a line, while the client is polled."""
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
        _LOGGER.log(level, text, *values)


def _new_client(
    kind: Callable[..., Any],
    settings: ConnectionSettings,
    config: Mapping[str, Any],
) -> Client:
    client = Client()
    whole = {
        "allow.auto.create.topics": False,
        "error_cb": client.on_error,
        # Half of this, at least 11 ms, it waits before it connects to a leader.
        "reconnect.backoff.ms": 20,
        **fast_config(settings),
        **config,
    }
    client.handle = kind(whole, logger=_Log(client))
    _live[id(client.handle)] = client.handle
    return client


def new_consumer(settings: ConnectionSettings, config: Mapping[str, Any]) -> Client:
    """Make a consumer for assigned partitions, without a group of its own.

    It connects in the background. PROTOCOL 2.1: no commits, and no silent
    jump where an offset does not exist.

    Args:
        settings: Where the cluster is.
        config: More settings of librdkafka.

    Raises:
        ConfigurationError: An option has no equivalent in librdkafka.
        KafkaException: librdkafka does not accept a setting.
    """
    fixed = {
        "group.id": GROUP_ID,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "fetch.min.bytes": 1,
        # Where its queue is full it looks again after this; a second by default.
        "fetch.queue.backoff.ms": 10,
        "fetch.error.backoff.ms": 100,
    }
    return _new_client(Consumer, settings, fixed | dict(config))


def new_producer(settings: ConnectionSettings, config: Mapping[str, Any]) -> Client:
    """Make an idempotent producer; it connects in the background.

    Args:
        settings: Where the cluster is.
        config: More settings of librdkafka.

    Raises:
        ConfigurationError: An option has no equivalent in librdkafka.
        KafkaException: librdkafka does not accept a setting.
    """
    # A few debug lines for each connection; none for records.
    return _new_client(Producer, settings, {"debug": "eos", **config})


def close_consumer(client: Client) -> threading.Thread:
    """Close a consumer on a thread that nobody need wait for.

    In a forked_error child nothing may be closed; whoever calls this sees to it.
    """

    def close() -> None:
        client.handle.close()
        client.release()

    thread = threading.Thread(target=close, name="marshal-close", daemon=True)
    thread.start()
    return thread
