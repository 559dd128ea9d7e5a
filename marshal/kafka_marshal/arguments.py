"""Checks of what callers give, before anything is done with it."""

from math import ceil, isnan
from operator import index
from typing import SupportsIndex

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal.protocol.types import TopicPartition

FOREVER_MS = 2**42
"""139 years: what a thread can still be asked to wait."""


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


def to_name(setting: str, name: object) -> str:
    """Return a name of a client or group; raises as ``require_name``."""
    require_name(setting, name)
    assert isinstance(name, str)
    return to_text(name)


def to_text(text: str) -> str:
    """Return a text as one of Python's own: NumPy's cannot be encoded."""
    return str.__str__(text)


def require_flag(setting: str, value: object) -> None:
    """Raise unless a setting is True or False: the text ``"no"`` would be true.

    Raises:
        ConfigurationError: It is something else.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(
            f"{setting} must be True or False, not {value!r}", setting=setting
        )


def to_ms(setting: str, value: object, *, least: float | None = None) -> int:
    """Return a time in whole milliseconds, rounded up; NumPy's numbers are numbers.

    An infinite time, as ``consumer_timeout_ms`` is in kafka-python, is 139 years.

    Raises:
        ConfigurationError: It is something else, such as the text of a duration, or
            less than ``least``.
    """
    number: float | None = None
    if isinstance(value, float) and not isnan(value):
        number = max(-FOREVER_MS, min(value, FOREVER_MS))
    elif isinstance(value, SupportsIndex) and not isinstance(value, bool):
        number = index(value)
    if number is None:
        raise ConfigurationError(
            f"{setting} must be a number, not {value!r}", setting=setting
        )
    if least is not None and number < least:
        raise _too_small(setting, least)
    return ceil(number)


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


def to_count(setting: str, value: object, *, least: float = 1) -> int:
    """Return a whole number that is not too small; as ``to_whole``.

    Raises:
        ConfigurationError: It is something else, or less than ``least``.
    """
    count = to_whole(setting, value)
    if count < least:
        raise _too_small(setting, least)
    return count


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
