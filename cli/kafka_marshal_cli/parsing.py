"""Parses option values: durations, times, properties, limits.

Pure functions; each failure is a ConfigurationError that names the option.
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from kafka_marshal import ConfigurationError

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PART = re.compile(r"(\d{1,12})(ms|s|m|h|d)", re.ASCII)
_WHOLE = re.compile(r"\d{1,15}", re.ASCII)
_JAAS = re.compile(r'(username|password)\s*=\s*"((?:[^"\\]|\\.)*)"')
_PLAIN_MODULES = ("PlainLoginModule", "ScramLoginModule")


def duration_ms(option: str, text: str, *, is_bare_ms: bool = True) -> int:
    """Return the milliseconds of ``500ms``, ``10s``, ``10m``, ``2h`` or ``1h30m``.

    Args:
        option: Name of the option, for messages.
        text: Value of the option.
        is_bare_ms: Whether a plain number means milliseconds.
    """
    value = text.strip().lower()
    if is_bare_ms and _WHOLE.fullmatch(value):
        return int(value)
    parts = list(_PART.finditer(value))
    if not parts or "".join(part[0] for part in parts) != value:
        also = ", or a number of milliseconds" if is_bare_ms else ""
        raise ConfigurationError(
            f"{option} is {text!r}, which is not a duration; write it like 500ms, 10s, "
            f"10m or 2h{also}",
            setting=option,
        )
    return sum(int(part[1]) * _UNITS_MS[part[2]] for part in parts)


def pairs(option: str, given: Iterable[str]) -> dict[str, str]:
    """Return ``name=value`` options as a dictionary; the last value of a name wins."""
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name.strip():
            # Do not show the text: it may be a mistyped password.
            raise ConfigurationError(
                f"{option} must be written name=value", setting=option
            )
        found[name.strip()] = value.strip()
    return found


def limits(given: Iterable[str]) -> dict[str, int]:
    """Return ``--limit name=value`` options with whole values."""
    found = {}
    for name, value in pairs("--limit", given).items():
        if not _WHOLE.fullmatch(value):
            raise ConfigurationError(
                f"--limit {name} is {value!r}, which is not a whole number",
                setting="--limit",
            )
        found[name] = int(value)
    return found


def properties(path: Path) -> dict[str, str]:
    """Read a properties file of a Kafka client, librdkafka's or Java's.

    Of Java's own forms, ``sasl.jaas.config`` of PLAIN and SCRAM and PEM trust
    stores are supported.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--command-config {str(path)!r} cannot be read: {error}",
            setting="--command-config",
        ) from error
    found: dict[str, str] = {}
    # A backslash at the end of a line continues it.
    for number, raw in enumerate(re.sub(r"\\\r?\n\s*", "", text).splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in "#!":
            continue
        split = re.match(r"([^=:\s]+)(?:\s*[=:]\s*|\s+)(.*)", line)
        if split is None:
            raise ConfigurationError(
                f"--command-config {str(path)!r} line {number} is not name=value",
                setting="--command-config",
            )
        found[split[1]] = split[2]
    return _from_java(found)


def _from_java(found: dict[str, str]) -> dict[str, str]:
    """Replace options that only Java's clients have by those of the others."""
    jaas = found.pop("sasl.jaas.config", None)
    if jaas is not None:
        if not any(module in jaas for module in _PLAIN_MODULES):
            raise ConfigurationError(
                "sasl.jaas.config is supported for PLAIN and SCRAM only; write "
                "sasl.mechanism and its options instead",
                setting="sasl.jaas.config",
            )
        for name, value in _JAAS.findall(jaas):
            found.setdefault(f"sasl.{name}", re.sub(r"\\(.)", r"\1", value))
    kind = found.pop("ssl.truststore.type", "")
    store = found.get("ssl.truststore.location", "")
    if store and (kind.upper() == "PEM" or store.endswith(".pem")):
        found.setdefault("ssl.ca.location", found.pop("ssl.truststore.location"))
    return found


def moment(option: str, text: str, *, now_ms: int) -> tuple[int | None, int | None]:
    """Return an offset, or a time in epoch milliseconds; the other one is None.

    A plain number is an offset; ``-5m`` and ``-PT5M`` are relative to now; all else
    is an ISO time, in UTC if it has no zone.
    """
    value = text.strip()
    if _WHOLE.fullmatch(value):
        return int(value), None
    if value.startswith("-"):
        ago = value[1:].upper().removeprefix("P").replace("T", "").lower()
        return None, now_ms - duration_ms(option, ago, is_bare_ms=False)
    try:
        found = datetime.fromisoformat(value)
    except ValueError as error:
        raise ConfigurationError(
            f"{option} is {text!r}; write an offset, a time like "
            "2026-01-31T12:00:00Z, or how long ago, like -5m",
            setting=option,
        ) from error
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    return None, round(found.timestamp() * 1000)
