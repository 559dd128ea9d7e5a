"""Observers of events: log lines of the standard library and of structlog."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from kafka_marshal.errors import ConfigurationError, MarshalError
from kafka_marshal.ports import Event, Observer
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.types import Key, TopicPartition

LOGGER_NAME = "kafka_marshal"
VALUE_CHARS_MAX = 500

_WARNINGS = frozenset(
    {
        "append_failed",
        "client_silent",
        "clock_step",
        "close_unconfirmed",
        "config_torn",
        "fetch_failed",
        "grant_lost",
        "grant_unanswered",
        "identity_unavailable",
        "lag_unknown",
        "lagging",
        "lease_journal_damaged",
        "lease_journal_unwritable",
        "log_poll_failed",
        "mirror_drift",
        "mirror_failed",
        "partition_unknown",
        "partitions_uncovered",
        "plan_unwritten",
        "policy_failed",
        "position_jumped",
        "range_unknown",
        "sidecar_unreachable",
        "snapshot_failed",
        "start_lookup_failed",
        "state_reset",
        "state_unfit",
        "stuck",
        "subscription_not_restored",
        "timeouts_unchanged",
        "topic_gone",
        "topic_recreated",
        "topic_unchecked",
        "topics_limit",
        "uncommitted_backlog",
        "standby_failed",
        "warm_failed",
        "warm_fetch_failed",
    }
)
_ERRORS = frozenset(
    {
        "engine_failed",
        "grant_exposed",
        "import_diverged",
        "layout_torn",
        "log_start_missing",
        "log_truncated",
        "position_out_of_range",
        "replica_diverged",
        "session_failed",
        "topic_misconfigured",
    }
)

SERIOUS = _WARNINGS | _ERRORS
"""Names of the events of level warning and above."""


class LoggingObserver(Observer):
    """Writes each event as one line to the logger ``kafka_marshal``.

    For formatters that write JSON, a record also has the attribute ``kafka_marshal``: a
    dict of the event's name and its fields, those of ``StructuredObserver``.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger(LOGGER_NAME)

    def observe(self, event: Event) -> None:
        """Log one event at the level of its name."""
        level = level_of(event.name)
        if self._logger.isEnabledFor(level):
            line = to_line(event.name, event.fields)
            found = {"event": event.name, **flat(event.fields)}
            self._logger.log(level, "%s", line, extra={LOGGER_NAME: found})


def level_of(name: str) -> int:
    """Return the level of an event for the standard library's logging."""
    if name in _ERRORS:
        return logging.ERROR
    return logging.WARNING if name in _WARNINGS else logging.INFO


class NullObserver(Observer):
    """Ignores events."""

    def observe(self, event: Event) -> None:
        """Ignore one event."""


def to_line(name: str, fields: Mapping[str, Any]) -> str:
    """Return ``name key=value ...``, with values escaped: they come from the log."""
    return " ".join(
        [name, *(f"{key}={_shown(value)}" for key, value in fields.items())]
    )


def _shown(value: object) -> str:
    if isinstance(value, Key):
        value = f"{value.group_id}/{value.topic_partition}"
    elif isinstance(value, Ending):
        winner = value.winner
        value = value.reason if winner is None else f"{value.reason} by {winner}"
    text = str(value)[:VALUE_CHARS_MAX]
    safe = text.isprintable() and " " not in text and text
    return text if safe else ascii(text)


# --- text from the log (PROTOCOL 12)

TEXT_CHARS_MAX = 500


def escaped(text: str) -> str:
    """Return a text without control characters, cut at TEXT_CHARS_MAX.

    Characters that affect a terminal or a log reader (control characters, line breaks,
    direction marks) become escape sequences; letters of any language are unchanged.
    """
    text = text[:TEXT_CHARS_MAX]
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text
    )


# --- several observers


class FanOut(Observer):
    """Passes each event to every observer, in the order in which they were added.

    The clients of a process share one engine, and each may have an observer. An
    observer that several clients have gets each event once.
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def add(self, observer: Observer) -> None:
        """Add an observer."""
        self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> None:
        """Remove an observer; unknown ones are ignored."""
        kept = list(self._observers)
        if observer in kept:
            kept.remove(observer)
        self._observers = tuple(kept)

    def observe(self, event: Event) -> None:
        """Pass one event on; an observer that raises is removed."""
        for observer in {id(each): each for each in self._observers}.values():
            try:
                observer.observe(event)
            except Exception:  # noqa: BLE001 - observers are code of the application
                self.remove(observer)


# --- structlog

ITEMS_MAX = 100
NESTING_MAX = 3
HIDDEN = "***"
_SECRETS = ("secret", "password", "credential", "master", "resume_hash")
# Names of structlog's own fields; an event's field of that name would replace them.
_TAKEN = frozenset({"event", "level", "logger", "timestamp"})


class _Logger(Protocol):
    """The part of structlog's loggers that is used."""

    def log(self, level: int, event: str, **fields: object) -> object: ...


class StructuredObserver(Observer):
    """Writes each event as one line to a logger of structlog.

    Fields are flat and have the same names in every event: ``group``, ``topic``,
    ``partition``, ``client``, ``epoch``, ``token``, ``reason``, ``error``.
    Values are numbers, booleans, None, text without control characters, or
    lists of these, so that any renderer of structlog can write them.

    Args:
        logger: A logger of structlog; by default ``structlog.get_logger`` of the
            name ``kafka_marshal``. The configuration of structlog selects the
            renderer.

    Raises:
        ConfigurationError: The extra ``logs`` is not installed.
    """

    def __init__(self, logger: _Logger | None = None) -> None:
        self._logger = _default_logger() if logger is None else logger

    def observe(self, event: Event) -> None:
        """Log one event at the level of its name."""
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
    """Return an event's fields under stable names, with plain values."""
    found: dict[str, object] = {}
    for name, value in fields.items():
        for part, each in _parts(name, value):
            safe = f"{part}_" if part in _TAKEN else part
            found[safe] = HIDDEN if _is_secret(part) else _plain(each)
    return found


def _parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of a field."""
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
    """Return a value that JSON supports, of bounded size."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes):
        return value[:ITEMS_MAX].hex()
    # Tokens and partitions are tuples with a text form of their own.
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
