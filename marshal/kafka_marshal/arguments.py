"""Checks of arguments that callers give, made before any work."""

from collections.abc import Callable
from functools import wraps
from math import ceil, isnan
from operator import index
from typing import Any, Concatenate, ParamSpec, SupportsIndex, TypeGuard, TypeVar

from kafka_marshal.errors import ConfigurationError, PositionError
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal.protocol.types import Key, TopicPartition

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

REASON_CHARS_MAX = 1_024
"""Longest reason that a record has room for (text1024 of PROTOCOL 3.5)."""
WRITES = frozenset({"dry_run", "execute"})
"""Names of arguments of admins: the text ``"no"`` must not write."""
FOREVER_MS = 2**42
"""139 years, which threads still accept as a timeout."""


def require_name(setting: str, name: object) -> None:
    """Refuse a setting that is not a valid name of a client or group (PROTOCOL 3.5).

    Raises:
        ConfigurationError: It is not a valid name.
    """
    # A missing environment variable gives None.
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


def to_person(person: object) -> str | None:
    """Return the name of the person for whom records are written; None for nobody.

    Raises:
        ConfigurationError: It is not a text.
    """
    if person is None:
        return None
    if not isinstance(person, str):
        raise ConfigurationError(
            f"person must be a text, such as a name, not {person!r}", setting="person"
        )
    return to_text(person)


def require_text(setting: str, value: object) -> None:
    """Refuse what is no text, such as a missing setting.

    Raises:
        ConfigurationError: It is not a text.
    """
    if not isinstance(value, str):
        raise ConfigurationError(
            f"{setting} must be a text, not {value!r}", setting=setting
        )


def require_instance(setting: str, value: object, *, kind: type) -> None:
    """Refuse an object of another class, such as the text of a topic for settings.

    Raises:
        ConfigurationError: It is no instance of the class.
    """
    if not isinstance(value, kind):
        raise ConfigurationError(
            f"{setting} must be a {kind.__name__}, not {value!r}", setting=setting
        )


def to_text(text: str) -> str:
    """Return a text as a plain ``str``: a NumPy text cannot be encoded."""
    return str.__str__(text)


def to_plain(value: Any) -> Any:  # noqa: ANN401 - any argument
    """Convert a NumPy number or text to Python's own type, also in a collection.

    Any other value is returned as it is.
    """
    if isinstance(value, str):
        return to_text(value)
    if type(value) is dict:
        return {to_plain(name): to_plain(each) for name, each in value.items()}
    if type(value) in {list, tuple, set, frozenset}:
        return type(value)(map(to_plain, value))
    if not _is_whole(value):
        return value
    try:
        return index(value)
    except TypeError:  # an array
        return value


def _is_whole(value: object) -> TypeGuard[SupportsIndex]:
    """Return whether a value is a whole number, also of NumPy, but not a Boolean."""
    # ``isinstance`` of a protocol takes longer than the rest of a poll's checks.
    return hasattr(type(value), "__index__") and not isinstance(value, bool)


def require_reason(reason: object) -> None:
    """Refuse a reason that a record has no room for.

    Raises:
        ConfigurationError: It is not a text, or is too long.
    """
    if reason is None:
        return
    if not isinstance(reason, str):
        raise ConfigurationError(
            f"reason must be a text, not {reason!r}", setting="reason"
        )
    if len(reason) > REASON_CHARS_MAX:
        raise ConfigurationError(
            f"reason has {len(reason)} characters, and the log has room for "
            f"{REASON_CHARS_MAX}; give a shorter one",
            setting="reason",
        )


def with_plain_arguments(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """Return the method with each argument first converted by ``to_plain``.

    The argument ``reason``, if there is one, is checked by ``require_reason``; those
    that decide whether anything is written, by ``require_flag``.
    """

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        require_reason(kwargs.get("reason"))
        for name in kwargs.keys() & WRITES:
            require_flag(name, kwargs[name])
        plain: dict[str, Any] = {name: to_plain(kwargs[name]) for name in kwargs}
        return method(self, *map(to_plain, args), **plain)

    return call


def require_flag(setting: str, value: object) -> None:
    """Raise unless a setting is True or False: the text ``"no"`` would count as True.

    Raises:
        ConfigurationError: It is neither.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(
            f"{setting} must be True or False, not {value!r}", setting=setting
        )


def to_ms(setting: str, value: object, *, least: float | None = None) -> int:
    """Return a time in whole milliseconds, rounded up; accepts NumPy's numbers.

    A longer time than 139 years, such as an infinite one (kafka-python's default
    ``consumer_timeout_ms``) or ``sys.maxsize``, becomes 139 years.

    Raises:
        ConfigurationError: It is not a number, for example the text of a duration, or
            is less than ``least``.
    """
    number: float | None = None
    if isinstance(value, float) and not isnan(value):
        number = value
    elif _is_whole(value):
        number = index(value)
    if number is None:
        raise ConfigurationError(
            f"{setting} must be a number, not {value!r}", setting=setting
        )
    if least is not None and number < least:
        raise _too_small(setting, least)
    return ceil(max(-FOREVER_MS, min(number, FOREVER_MS)))


def to_whole(setting: str, value: object) -> int:
    """Return a whole number as ``int``, also one of NumPy, such as from a column.

    Raises:
        ConfigurationError: It is not a whole number.
    """
    if not _is_whole(value):
        raise ConfigurationError(
            f"{setting} must be a whole number, not {value!r}", setting=setting
        )
    return index(value)


def to_count(setting: str, value: object, *, least: float = 1) -> int:
    """Return a whole number that is not too small; see ``to_whole``.

    Raises:
        ConfigurationError: It is not a whole number, or is less than ``least``.
    """
    count = to_whole(setting, value)
    if count < least:
        raise _too_small(setting, least)
    return count


def _too_small(setting: str, least: float) -> ConfigurationError:
    return ConfigurationError(f"{setting} must be at least {least}", setting=setting)


def require_key(key: object) -> None:
    """Refuse what is no key, such as a tuple.

    Raises:
        TypeError: It is no ``Key``.
    """
    if not isinstance(key, Key):
        raise TypeError(f"{key!r} is no key; give Key(group_id, topic, partition)")


def to_partition(given: object) -> TopicPartition:
    """Convert a partition, also one of kafka-python, to a ``TopicPartition``.

    Raises:
        TypeError: It is not a partition, but for example a name, or a list.
    """
    if isinstance(given, tuple) and len(given) == len(TopicPartition._fields):
        topic, partition = given
        if isinstance(topic, str) and hasattr(type(partition), "__index__"):
            return TopicPartition(topic, int(partition))
    raise TypeError(
        f"{given!r} is not a partition; give partitions one by one, like "
        "TopicPartition('orders', 0)"
    )


def to_offset_in(
    partition: TopicPartition, offset: int, *, log: tuple[int, int] | None
) -> int:
    """Return an offset, checked to lie from the start to the end of a log.

    With a position beyond the end, the claim would be released and the partition not
    claimed again (PROTOCOL 5.6).

    Args:
        partition: The partition.
        offset: The offset.
        log: Start and end of its log, None if it does not exist.

    Raises:
        PositionError: The offset is outside the log, or the partition does not exist.
    """
    start, end = log or (-1, -1)
    if log is not None and start <= offset <= end:
        return offset
    has = "does not exist" if log is None else f"has the offsets {start} to {end}"
    raise PositionError(
        f"{partition} {has}, so it cannot seek to {offset}; its position is unchanged",
        requested=offset,
        log_start=start,
        log_end=end,
        partition=partition,
    )
