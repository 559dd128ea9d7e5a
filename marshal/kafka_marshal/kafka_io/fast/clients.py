"""Making librdkafka's clients: what all of them need, and how they are let go.

Its log lines go to the logger ``kafka_marshal.librdkafka`` and never to stderr.
Its threads do not survive a fork, and destroying a handle in a child would wait
for them for ever: there every handle is kept, untouched, to the end.
"""

import ctypes
import logging
import os
import re
import threading
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
)

from kafka_marshal.kafka_io.fast.leaders import LOSSES, LeaderSearch
from kafka_marshal.kafka_io.fast.settings import fast_config
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.untyped import Untyped

LOGGER = "kafka_marshal.librdkafka"
_LOGGER = logging.getLogger(LOGGER)
# Parts of debug lines. Were they worded otherwise, opening would wait longer.
_LOOKING, _NUMBERED = "Coordinator not up", "Acquired PID"
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

_live: dict[int, Untyped] = {}


def _keep_for_ever() -> None:
    """See that no handle of the parent is ever destroyed in this child."""
    for handle in _live.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
    _live.clear()


os.register_at_fork(after_in_child=_keep_for_ever)


@attrs.define(eq=False)
class Client:
    """A client of librdkafka, and what it told of its connections.

    Attributes:
        handle: confluent-kafka's object.
        refusal: The last refusal that no further attempt will change, or None.
        is_looking: Whether a producer knows the brokers, and looks for one that
            numbers its records.
        is_numbered: Whether it has been given numbers.
        leaders: Asks for new leaders after a loss, by whoever polls.
        topic_ids: Id of each topic that is read, where ``TOPIC_IDS`` are asked for.
            A line about one comes before all records of the topic of that id, because
            it goes through the same queue, and before the first fetch by that id.
        is_outdated: Whether a topic has got another id since the client was made.
    """

    handle: Untyped = None
    refusal: Exception | None = None
    is_looking: threading.Event = attrs.field(factory=threading.Event)
    is_numbered: threading.Event = attrs.field(factory=threading.Event)
    leaders: LeaderSearch = attrs.field(factory=LeaderSearch)
    topic_ids: dict[str, bytes] = attrs.field(factory=dict)
    is_outdated: bool = False

    def note_topic_id(self, topic: str, topic_id: bytes) -> None:
        """Take the id by which a topic is fetched from now on."""
        if self.topic_ids.setdefault(topic, topic_id) != topic_id:
            self.topic_ids[topic] = topic_id
            self.is_outdated = True

    def note(self, error: Untyped) -> None:
        """Take a report of librdkafka, which comes while the client is polled."""
        if error.code() in _REFUSALS:
            self.refusal = KafkaException(error)
        elif error.code() in LOSSES:
            self.leaders.begin()

    def forget(self) -> None:
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
            self._client.note_topic_id(topic, b64decode(topic_id + "=="))
        elif not self._client.is_numbered.is_set():
            if _LOOKING in line or _NUMBERED in line:
                self._client.is_looking.set()
            if _NUMBERED in line:
                self._client.is_numbered.set()
        _LOGGER.log(level, text, *values)


def _made(
    kind: Callable[..., Untyped],
    settings: ConnectionSettings,
    config: Mapping[str, Any],
) -> Client:
    client = Client()
    whole = {
        "allow.auto.create.topics": False,
        "error_cb": client.note,
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
    return _made(Consumer, settings, fixed | dict(config))


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
    return _made(Producer, settings, {"debug": "eos", **config})


def close_consumer(client: Client) -> threading.Thread:
    """Close a consumer on a thread that nobody need wait for.

    In a forked child nothing may be closed; whoever calls this sees to it.
    """

    def close() -> None:
        client.handle.close()
        client.forget()

    thread = threading.Thread(target=close, name="marshal-close", daemon=True)
    thread.start()
    return thread
