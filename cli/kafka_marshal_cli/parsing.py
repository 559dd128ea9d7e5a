"""Parses option values: durations, times, properties, limits.

Pure functions; each failure is a ConfigurationError that names the option.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import attrs

from kafka_marshal.arguments import require_name
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.codec import is_key_topic
from kafka_marshal.protocol.types import Key

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PART = re.compile(r"(\d{1,12})(ms|s|m|h|d)", re.ASCII)
_ISO_DURATION = re.compile(
    r"P(?:(?P<d>\d{1,9})D)?"
    r"(?:T(?:(?P<h>\d{1,9})H)?(?:(?P<m>\d{1,9})M)?(?:(?P<s>\d{1,9}(?:\.\d{1,3})?)S)?)?",
    re.ASCII,
)
_WHOLE = re.compile(r"\d{1,15}", re.ASCII)
_OFFSETS = re.compile(r"\d{1,10}:\d{1,19}(,\d{1,10}:\d{1,19})*", re.ASCII)
DURATION_MS_MAX = 36_500 * _UNITS_MS["d"]
"""A century; times that long ago or ahead still have a date."""
TIMEOUT_MS_MAX = 20 * _UNITS_MS["d"]
"""librdkafka and poll take milliseconds of 31 bits, which are 24 days."""
_SPARK_PREFIX = re.compile(r"(?<![\w.])kafka\.(?=[a-z])")


def duration_ms(option: str, text: str, *, is_bare_ms: bool = True) -> int:
    """Return the milliseconds of ``500ms``, ``10s``, ``10m``, ``2h`` or ``1h30m``.

    Args:
        option: Name of the option, for messages.
        text: Value of the option.
        is_bare_ms: Whether a plain number means milliseconds.

    Raises:
        ConfigurationError: The text is not a duration, or one of over a century.
    """
    value = text.strip().lower()
    if is_bare_ms and _WHOLE.fullmatch(value):
        return _within_century(option, text, int(value))
    parts = list(_PART.finditer(value))
    if not parts or "".join(part[0] for part in parts) != value:
        also = ", or a number of milliseconds" if is_bare_ms else ""
        raise ConfigurationError(
            f"{option} is {text!r}, which is not a duration; write it like 500ms, 10s, "
            f"10m or 2h{also}",
            setting=option,
        )
    found = sum(int(part[1]) * _UNITS_MS[part[2]] for part in parts)
    return _within_century(option, text, found)


def _within_century(option: str, text: str, found_ms: int) -> int:
    if found_ms > DURATION_MS_MAX:
        raise ConfigurationError(
            f"{option} is {text!r}; a duration is at most 36500d", setting=option
        )
    return found_ms


def timeout_ms(option: str, text: str) -> int:
    """Return the milliseconds that a request may take.

    Raises:
        ConfigurationError: The text is not a duration of 1 ms to 20 days.
    """
    found_ms = duration_ms(option, text)
    if not 1 <= found_ms <= TIMEOUT_MS_MAX:
        raise ConfigurationError(
            f"{option} is {text!r}; it must be 1ms to 20d", setting=option
        )
    return found_ms


def whole_number(option: str, text: str) -> int:
    """Return the whole number in an option's text.

    Raises:
        ConfigurationError: The text is not a whole number.
    """
    if not _WHOLE.fullmatch(text):
        raise ConfigurationError(
            f"{option} is {text!r}; write a whole number", setting=option
        )
    return int(text)


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


def counts(option: str, given: Iterable[str]) -> dict[str, int]:
    """Return ``name=value`` options whose values are whole numbers."""
    found = {}
    for name, value in pairs(option, given).items():
        if not _WHOLE.fullmatch(value):
            raise ConfigurationError(
                f"{option} {name} is {value!r}, which is not a whole number",
                setting=option,
            )
        found[name] = int(value)
    return found


def properties(path: Path) -> dict[str, str]:
    """Read a properties file of a Kafka client in Java, or of librdkafka.

    Properties for timeouts, fetches and metrics of Java's clients are omitted.
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
    from kafka_marshal.spark.kafka_options import IGNORED, meaning_of

    meanings = {name: meaning_of(f"kafka.{name}") for name in found}
    ignored = {name for name, each in meanings.items() if each and each.kind == IGNORED}
    return {name: value for name, value in found.items() if name not in ignored}


def without_java(options: Mapping[str, str]) -> dict[str, str]:
    """Return connection options with those of Java's clients translated.

    As for Spark, these are logins, and keystores in the formats PEM and PKCS12.

    Raises:
        ConfigurationError: A login or a keystore cannot be used.
    """
    from kafka_marshal.spark.java import python_options

    try:
        return python_options(options)
    except ConfigurationError as error:
        text, name = (_SPARK_PREFIX.sub("", str(e)) for e in (error, error.setting))
        raise ConfigurationError(text, setting=name) from error


@attrs.frozen(kw_only=True)
class Moment:
    """The moment of ``--at``: an offset, offsets by partition, or a time.

    Attributes:
        text: The moment for people: a time in UTC, or as it was given.
        option: Name of the option, for messages.
        offset: Last offset, for a command about one coordinating partition.
        offsets: Last offset by coordinating partition.
        time_ms: Time in epoch milliseconds.
    """

    text: str
    option: str = attrs.field(default="--at", eq=False)
    offset: int | None = None
    offsets: Mapping[int, int] | None = None
    time_ms: int | None = None

    def require_partition(self) -> None:
        """Refuse an offset without its coordinating partition.

        Raises:
            ConfigurationError: The moment is such an offset.
        """
        if self.offset is not None:
            raise ConfigurationError(
                f"{self.option} is {self.text}, and each coordinating partition has "
                f"its own offsets; write 0:{self.text} for partition 0, or a time",
                setting=self.option,
            )

    def of_partition(self, partition: int | None) -> "Moment":
        """Return the moment with its offset, if any, assigned to the partition."""
        if partition is None or self.offset is None:
            return self
        offsets = {partition: self.offset}
        return Moment(text=self.text, option=self.option, offsets=offsets)


def upcoming_ms(option: str, text: str, *, now_ms: int) -> int:
    """Return a time in epoch ms.

    ``2h`` is two hours from now; other text is an ISO time, in UTC if it has no zone.
    """
    value = text.strip()
    if _PART.match(value.lower()) and "-" not in value and ":" not in value:
        return now_ms + duration_ms(option, value, is_bare_ms=False)
    wanted = "a time like 2026-01-31T12:00:00Z, or how long from now, like 2h"
    return _iso_ms(option, text, wanted=wanted)


def moment(option: str, text: str, *, now_ms: int) -> tuple[int | None, int | None]:
    """Return an offset, or a time in epoch milliseconds; the other one is None.

    A plain number is an offset; ``-5m`` and ``-PT5M`` are relative to now; other text
    is an ISO time, in UTC if it has no zone.
    """
    value = text.strip()
    if _WHOLE.fullmatch(value):
        return int(value), None
    if value.startswith("-"):
        with suppress(ConfigurationError):
            return None, now_ms - iso_duration_ms(option, value[1:])
    wanted = "an offset, a time like 2026-01-31T12:00:00Z, or how long ago, like -5m"
    return None, _iso_ms(option, text, wanted=wanted)


def since_ms(text: str, *, now_ms: int) -> int:
    """Return the time of ``--since``, for several coordinating partitions, epoch ms.

    Raises:
        ConfigurationError: The text is not a time: each partition has other offsets.
    """
    offset, time_ms = moment("--since", text, now_ms=now_ms)
    if time_ms is None:
        raise ConfigurationError(
            f"--since is {offset}, and each coordinating partition has its own "
            "offsets; write a time like 2026-01-31T12:00:00Z, or like -5m",
            setting="--since",
        )
    return time_ms


def _iso_ms(option: str, text: str, *, wanted: str) -> int:
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise ConfigurationError(
            f"{option} is {text!r}; write {wanted}", setting=option
        ) from error
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    return round(found.timestamp() * 1000)


def past_moment(option: str, text: str, *, now_ms: int) -> Moment:
    """Return a moment of the past, in a form of ``moment``, or like ``3:100``.

    ``3:100`` is offset 100 of coordinating partition 3; several such offsets are
    separated by commas.

    Raises:
        ConfigurationError: The text has none of these forms, names a partition twice,
            or is in the future.
    """
    value = text.strip()
    if _OFFSETS.fullmatch(value):
        each = [one.split(":") for one in value.split(",")]
        offsets = {int(t): int(at) for t, at in each}
        if len(offsets) < len(each):
            raise ConfigurationError(
                f"{option} is {text!r}, which has two offsets of one partition; give "
                "one of each",
                setting=option,
            )
        return Moment(text=value, option=option, offsets=offsets)
    offset, time_ms = moment(option, value, now_ms=now_ms)
    if time_ms is None:
        return Moment(text=value, option=option, offset=offset)
    if time_ms > now_ms:
        raise ConfigurationError(
            f"{option} is {text!r}, which is in the future", setting=option
        )
    from kafka_marshal.clock import instant

    return Moment(text=instant(time_ms), option=option, time_ms=time_ms)


def datetime_ms(option: str, text: str) -> int:
    """Return the epoch milliseconds of an ISO time, in UTC if it has no zone."""
    return _iso_ms(option, text, wanted="a time like 2026-01-31T12:00:00Z")


def iso_duration_ms(option: str, text: str) -> int:
    """Return the milliseconds of ``PT10M`` or ``P1DT2H``, or of ``10m``.

    As in Kafka's tools: days, hours, minutes and seconds, no years and months.
    """
    match = _ISO_DURATION.fullmatch(text.strip().upper())
    if match is None:
        return duration_ms(option, text, is_bare_ms=False)
    parts = {unit: float(value) for unit, value in match.groupdict().items() if value}
    if not parts:
        raise ConfigurationError(
            f"{option} is {text!r}, which has no length; write it like PT10M or 10m",
            setting=option,
        )
    found_ms = round(sum(value * _UNITS_MS[unit] for unit, value in parts.items()))
    return _within_century(option, text, found_ms)


def key_of(group: str, topic: str, *, partition: int | None) -> Key:
    """Return the key that GROUP TOPIC PARTITION or GROUP TOPIC:PARTITION names.

    Raises:
        ConfigurationError: They name no partition, or two, or a name is invalid.
    """
    name, colon, text = topic.rpartition(":")
    number: int | None = None
    if not colon:
        name, number = topic, partition
    elif partition is None and _WHOLE.fullmatch(text):
        number = int(text)
    if number is None:
        named = "no partition" if partition is None else f"one beside {partition}"
        raise ConfigurationError(
            f"{topic!r} names {named}; write it like payments 3, or payments:3",
            setting="PARTITION",
        )
    require_name("GROUP", group)
    if not is_key_topic(name):
        raise ConfigurationError(
            f"{name!r} cannot be the name of a topic; write it like payments 3, or "
            "payments:3",
            setting="TOPIC",
        )
    return Key(group, name, number)
