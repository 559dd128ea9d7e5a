"""Events as lines of structlog, with the same names for the same things."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from kafka_marshal.errors import ConfigurationError, MarshalError
from kafka_marshal.observability.logs import LOGGER_NAME, level_of
from kafka_marshal.observability.text import escaped
from kafka_marshal.ports import Event, Observer
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.types import Key, TopicPartition

ITEMS_MAX = 100
NESTING_MAX = 3
HIDDEN = "***"
_SECRETS = ("secret", "password", "credential", "master", "resume_hash")
# structlog's own name for the event; a field of that name would replace it.
_TAKEN = frozenset({"event", "level", "logger", "timestamp"})


class _Logger(Protocol):
    """The part of structlog's loggers that is used."""

    def log(self, level: int, event: str, **fields: object) -> object: ...


class StructuredObserver(Observer):
    """Writes each event as one line to a logger of structlog.

    Fields are flat and named alike in every event: ``group``, ``topic``,
    ``partition``, ``client``, ``epoch``, ``token``, ``reason``, ``error``.
    Values are numbers, booleans, None, text without control characters, or
    lists of these, so that any renderer of structlog can write them.

    Args:
        logger: A logger of structlog; by default ``structlog.get_logger`` of the
            name ``kafka_marshal``. Which renderer writes is structlog's to
            configure.

    Raises:
        ConfigurationError: The extra ``logs`` is not installed.
    """

    def __init__(self, logger: _Logger | None = None) -> None:
        self._logger = _default_logger() if logger is None else logger

    def observe(self, event: Event) -> None:
        """Log one event at the level that its name calls for."""
        self._logger.log(level_of(event.name), event.name, **flat(event.fields))


def _default_logger() -> _Logger:
    try:
        import structlog
    except ImportError as missing:
        raise ConfigurationError(
            "structured logs need structlog; run: pip install 'kafka-marshal[logs]'",
            setting="observer",
        ) from missing
    logger: _Logger = structlog.get_logger(LOGGER_NAME)
    return logger


def flat(fields: Mapping[str, Any]) -> dict[str, object]:
    """Return an event's fields under stable names, fit to be written anywhere."""
    found: dict[str, object] = {}
    for name, value in fields.items():
        for part, each in _parts(name, value):
            safe = f"{part}_" if part in _TAKEN else part
            found[safe] = HIDDEN if _is_secret(part) else _plain(each)
    return found


def _parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield what a field is made of."""
    if isinstance(value, Key):
        yield "group", value.group_id
        yield from _parts(name, value.topic_partition)
    elif isinstance(value, TopicPartition):
        yield "topic", value.topic
        yield "partition", value.partition
    elif isinstance(value, Ending):
        yield "reason", value.reason
        yield "was_lost", value.was_lost
        yield "winner", value.winner
        yield "at_offset", value.at_offset
    elif isinstance(value, BaseException):
        yield name, str(value)
        yield f"{name}_type", type(value).__name__
        if isinstance(value, MarshalError):
            yield "retriable", value.retriable
    else:
        yield name, value


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in _SECRETS)


def _plain(value: object, depth: int = 0) -> object:
    """Return a value as JSON knows it; nothing grows without bound."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes):
        return value[:ITEMS_MAX].hex()
    # Tokens and partitions are tuples, and have a form of their own.
    is_named = hasattr(value, "_fields")
    if isinstance(value, list | tuple) and not is_named and depth < NESTING_MAX:
        return [_plain(each, depth + 1) for each in value[:ITEMS_MAX]]
    if isinstance(value, Mapping) and depth < NESTING_MAX:
        return {
            escaped(str(name)): HIDDEN
            if _is_secret(str(name))
            else _plain(each, depth + 1)
            for name, each in list(value.items())[:ITEMS_MAX]
        }
    return escaped(str(value))
