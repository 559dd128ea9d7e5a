"""Checks of what callers give, before anything is done with it."""

from operator import index
from typing import SupportsIndex

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal.protocol.types import TopicPartition


def require_name(setting: str, name: object) -> None:
    """Refuse a setting that is no name of a client or group (PROTOCOL 3.5).

    Raises:
        ConfigurationError: It is none.
    """
    # None is what a missing environment variable gives.
    if not isinstance(name, str) or not is_identifier(name):
        raise ConfigurationError(
            f"{setting} {name!r} is no valid name: "
            "1 to 200 of A-Z a-z 0-9 . _ : -, not . or ..",
            setting=setting,
        )


def require_number(setting: str, value: object, *, least: float | None = None) -> None:
    """Raise unless a setting is a number, and not too small.

    Raises:
        ConfigurationError: It is something else, such as the text of a duration, or
            less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(
            f"{setting} must be a number, not {value!r}", setting=setting
        )
    if least is not None and value < least:
        raise _too_small(setting, least)


def to_whole(setting: str, value: object) -> int:
    """Return a whole number, also one of NumPy, as columns of a batch become.

    Raises:
        ConfigurationError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigurationError(
            f"{setting} must be a whole number, not {value!r}", setting=setting
        )
    return index(value)


def require_count(setting: str, value: object, *, least: float = 1) -> None:
    """Raise unless a setting is a whole number, and not too small.

    Raises:
        ConfigurationError: It is something else, or less than ``least``.
    """
    if to_whole(setting, value) < least:
        raise _too_small(setting, least)


def _too_small(setting: str, least: float) -> ConfigurationError:
    return ConfigurationError(f"{setting} must be at least {least}", setting=setting)


def to_partition(given: object) -> TopicPartition:
    """Return a partition as a ``TopicPartition``, also one of kafka-python.

    Raises:
        TypeError: It is something else, such as a name or a list of partitions.
    """
    if isinstance(given, tuple) and len(given) == len(TopicPartition._fields):
        topic, partition = given
        if isinstance(topic, str) and isinstance(partition, SupportsIndex):
            return TopicPartition(topic, int(partition))
    raise TypeError(
        f"{given!r} is no partition; give partitions one by one, like "
        "TopicPartition('orders', 0)"
    )
