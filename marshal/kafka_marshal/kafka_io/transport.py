"""Choice of the client library for the logs: librdkafka if possible, else kafka-python.

Topics are always created, and data topics described, over kafka-python; the
coordination log and data records use the chosen library. Both implement the same ports,
so members of a group may use different ones. A client library is imported when a log is
opened.
"""

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import attrs

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.fast.settings import fast_config, impossible
from kafka_marshal.kafka_io.settings import (
    FAST,
    HEARTBEAT_INTERVAL_MS_DEFAULT,
    KAFKA_PYTHON,
    OPEN_TIMEOUT_MS,
    ConnectionConfig,
)
from kafka_marshal.kafka_io.tls_files import check_tls_files
from kafka_marshal.ports import DataLog

if TYPE_CHECKING:
    from kafka_marshal.kafka_io.clients import AdminClient
    from kafka_marshal.kafka_io.data import KafkaOffsets
    from kafka_marshal.kafka_io.fast.topics import FastOffsets
    from kafka_marshal.kafka_io.topiclog import TopicLog

_LOGGER = logging.getLogger("kafka_marshal")
_SELECTED = "the setting transport selects it"


@attrs.frozen
class Choice:
    """The chosen transport.

    Attributes:
        name: ``fast`` or ``kafka-python``.
        reason: Reason for the choice, in words.
    """

    name: str
    reason: str


def _missing() -> str | None:
    """Return why librdkafka cannot be loaded, or None."""
    try:
        import confluent_kafka  # noqa: F401 - an optional extra
    except ImportError as error:
        return f"confluent-kafka cannot be imported ({error})"
    return None


def choose(settings: ConnectionConfig) -> Choice:
    """Return the transport set in the settings, or the fastest possible one.

    Raises:
        ConfigurationError: ``fast`` is set, and is not installed or does not support an
            option.
    """
    if settings.transport == KAFKA_PYTHON:
        return Choice(KAFKA_PYTHON, _SELECTED)
    missing = _missing()
    if settings.transport == FAST:
        if missing is not None:
            raise ConfigurationError(
                f"transport is 'fast', but {missing}. Install it with "
                "pip install 'kafka-marshal[fast]', or use transport='kafka-python'.",
                setting="transport",
            )
        fast_config(settings)
        return Choice(FAST, _SELECTED)
    if missing is not None:
        return Choice(KAFKA_PYTHON, f"{missing}; pip install 'kafka-marshal[fast]'")
    for option, reason in impossible(settings).items():
        return Choice(
            KAFKA_PYTHON, f"librdkafka cannot be used with option {option}: {reason}"
        )
    return Choice(FAST, "confluent-kafka is installed")


def _choose_to_open(settings: ConnectionConfig, *, uses_both: bool = False) -> Choice:
    """Return the transport of a log that is opened; check the files of TLS.

    Args:
        settings: Connection and transport.
        uses_both: Whether a log over librdkafka also uses kafka-python.
    """
    choice = choose(settings)
    is_fast_alone = choice.name == FAST and not uses_both
    check_tls_files(settings.options, by_librdkafka=is_fast_alone)
    return choice


def open_coordination_log(
    settings: ConnectionConfig,
    *,
    heartbeat_interval_ms: int | None = HEARTBEAT_INTERVAL_MS_DEFAULT,
    timeout_ms: int = OPEN_TIMEOUT_MS,
    only: Callable[[int], Collection[int]] | None = None,
    follows: bool = True,
    lingers: bool = True,
    admin: "AdminClient | None" = None,
) -> "TopicLog":
    """Open the coordination log over the chosen transport.

    Args:
        settings: Connection, name of the topic, and transport.
        heartbeat_interval_ms: None if unknown; see ``TopicLog``.
        timeout_ms: Limit for the whole call.
        only: Gets the number of partitions and returns those to read.
        follows: Whether to wait for new entries; False to read what is there.
        lingers: Whether an append waits a moment for others; see ``TopicLog``.
        admin: A client of kafka-python that describes the topic; see ``TopicLog``.

    Raises:
        ConfigurationError: The transport in the settings, or a file of TLS, cannot be
            used.
        TopicMisconfigured: There is no such topic.
        LogUnreadable: Access is denied.
        CoordinationError: The cluster did not answer.
    """
    kind: type[TopicLog]
    choice = _choose_to_open(settings)
    _LOGGER.debug("transport %s: %s", choice.name, choice.reason)
    if choice.name == FAST:
        from kafka_marshal.kafka_io.fast.coordination import FastCoordinationLog

        kind = FastCoordinationLog
    else:
        from kafka_marshal.kafka_io.coordination import KafkaCoordinationLog

        kind = KafkaCoordinationLog
    return kind(
        settings,
        heartbeat_interval_ms=heartbeat_interval_ms,
        timeout_ms=timeout_ms,
        only=only,
        follows=follows,
        lingers=lingers,
        admin=admin,
    )


def open_data_log(
    settings: ConnectionConfig, *, admin: "AdminClient | None" = None
) -> DataLog:
    """Return the data log over the chosen transport.

    Args:
        settings: Connection and transport.
        admin: A client to use, and to close in the end; None for one of its own.

    Raises:
        ConfigurationError: The transport in the settings, or a file of TLS, cannot be
            used.
    """
    if _choose_to_open(settings, uses_both=True).name == FAST:
        from kafka_marshal.kafka_io.fast.switching import FastDataLog

        return FastDataLog(settings, admin=admin)
    from kafka_marshal.kafka_io.data import KafkaDataLog

    return KafkaDataLog(settings, admin=admin)


def open_offsets(settings: ConnectionConfig) -> "FastOffsets | KafkaOffsets":
    """Return queries of log ends over the chosen transport; the first one connects.

    Raises:
        ConfigurationError: The transport in the settings, or a file of TLS, cannot be
            used.
    """
    if _choose_to_open(settings).name == FAST:
        from kafka_marshal.kafka_io.fast.topics import FastOffsets

        return FastOffsets(settings)
    from kafka_marshal.kafka_io.data import KafkaOffsets

    return KafkaOffsets(settings)
