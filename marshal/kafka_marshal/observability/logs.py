"""Events as lines of the standard library's logging."""

import logging
from collections.abc import Mapping
from typing import Any

from kafka_marshal.ports import Event, Observer

LOGGER_NAME = "kafka_marshal"
VALUE_CHARS_MAX = 500

_WARNINGS = frozenset(
    {
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
        "topic_gone",
        "topic_recreated",
        "topic_unchecked",
        "topics_limit",
        "uncommitted_backlog",
    }
)
_ERRORS = frozenset(
    {
        "engine_failed",
        "grant_exposed",
        "log_start_missing",
        "log_truncated",
        "position_out_of_range",
        "replica_diverged",
        "session_failed",
        "topic_misconfigured",
    }
)


class LoggingObserver(Observer):
    """Writes each event as one line to the logger ``kafka_marshal``."""

    def __init__(self) -> None:
        self._logger = logging.getLogger(LOGGER_NAME)

    def observe(self, event: Event) -> None:
        """Log one event at the level that its name calls for."""
        level = level_of(event.name)
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", to_line(event.name, event.fields))


def level_of(name: str) -> int:
    """Return the level of the standard library's logging that an event calls for."""
    if name in _ERRORS:
        return logging.ERROR
    return logging.WARNING if name in _WARNINGS else logging.INFO


class NullObserver(Observer):
    """Takes events and forgets them."""

    def observe(self, event: Event) -> None:
        """Forget one event."""


def to_line(name: str, fields: Mapping[str, Any]) -> str:
    """Return ``name key=value ...``; values come from the log, so are escaped."""
    return " ".join(
        [name, *(f"{key}={_shown(value)}" for key, value in fields.items())]
    )


def _shown(value: object) -> str:
    text = str(value)[:VALUE_CHARS_MAX]
    safe = text.isprintable() and " " not in text and text
    return text if safe else ascii(text)
