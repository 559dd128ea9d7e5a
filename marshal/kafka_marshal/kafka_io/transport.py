"""Which client library carries the logs: librdkafka where it can, else pure Python.

Topics are created and described over kafka-python always; the coordination log
and data records go over what is chosen here. Both keep the same ports, so members
of one group may differ.
"""

import logging
from collections.abc import Callable, Collection

import attrs

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.coordination import KafkaCoordinationLog
from kafka_marshal.kafka_io.data import KafkaDataLog
from kafka_marshal.kafka_io.fast.settings import fast_config, impossible
from kafka_marshal.kafka_io.settings import (
    FAST,
    KAFKA_PYTHON,
    ConnectionSettings,
)
from kafka_marshal.kafka_io.topiclog import (
    HEARTBEAT_INTERVAL_MS_DEFAULT,
    OPEN_TIMEOUT_MS,
    TopicLog,
)
from kafka_marshal.ports import DataLog

_LOGGER = logging.getLogger("kafka_marshal")


@attrs.frozen
class Choice:
    """A transport, and why it is the one.

    Attributes:
        name: ``fast`` or ``kafka-python``.
        reason: Why, in words.
    """

    name: str
    reason: str


def _missing() -> str | None:
    """Return why librdkafka cannot be loaded, or None if it can."""
    try:
        import confluent_kafka  # noqa: F401 - an optional extra
    except ImportError as error:
        return f"confluent-kafka cannot be imported ({error})"
    return None


def choose(settings: ConnectionSettings) -> Choice:
    """Return the transport that these settings ask for, or the fastest possible.

    Raises:
        ConfigurationError: ``fast`` is asked for, and is not installed or cannot
            take an option.
    """
    if settings.transport == KAFKA_PYTHON:
        return Choice(KAFKA_PYTHON, "it is asked for")
    missing = _missing()
    if settings.transport == FAST:
        if missing is not None:
            raise ConfigurationError(
                f"transport is 'fast', but {missing}. Install it with "
                "pip install 'kafka-marshal[fast]', or use transport='kafka-python'.",
                setting="transport",
            )
        fast_config(settings)
        return Choice(FAST, "it is asked for")
    if missing is not None:
        return Choice(KAFKA_PYTHON, f"{missing}; pip install 'kafka-marshal[fast]'")
    for option, reason in impossible(settings).items():
        return Choice(KAFKA_PYTHON, f"option {option} rules the other out: {reason}")
    return Choice(FAST, "confluent-kafka is installed")


def open_coordination_log(
    settings: ConnectionSettings,
    *,
    heartbeat_interval_ms: int | None = HEARTBEAT_INTERVAL_MS_DEFAULT,
    timeout_ms: int = OPEN_TIMEOUT_MS,
    only: Callable[[int], Collection[int]] | None = None,
) -> TopicLog:
    """Open the coordination log over the transport that is chosen.

    Args:
        settings: Where the cluster is, the topic's name, and the transport.
        heartbeat_interval_ms: H where it is known; ``configure`` changes it. With
            None nothing can be appended before that.
        timeout_ms: When to give up.
        only: Told how many partitions there are, says which of them to read;
            without it all are.

    Raises:
        ConfigurationError: The transport that is asked for cannot be used.
        TopicMisconfigured: There is no such topic.
        LogUnreadable: Access is denied.
        CoordinationError: The cluster did not answer.
    """
    kind: type[TopicLog] = KafkaCoordinationLog
    choice = choose(settings)
    _LOGGER.debug("transport %s: %s", choice.name, choice.reason)
    if choice.name == FAST:
        from kafka_marshal.kafka_io.fast.coordination import (
            FastCoordinationLog,
        )

        kind = FastCoordinationLog
    return kind(
        settings,
        heartbeat_interval_ms=heartbeat_interval_ms,
        timeout_ms=timeout_ms,
        only=only,
    )


def open_data_log(settings: ConnectionSettings, *, client_rack: str = "") -> DataLog:
    """Return look-ups and readers over the transport that is chosen.

    Args:
        settings: Where the cluster is, and the transport.
        client_rack: Rack of this process, to fetch from a near replica.

    Raises:
        ConfigurationError: The transport that is asked for cannot be used.
    """
    kind: type[KafkaDataLog] = KafkaDataLog
    if choose(settings).name == FAST:
        from kafka_marshal.kafka_io.fast.reader import FastDataLog

        kind = FastDataLog
    return kind(settings, client_rack=client_rack)
