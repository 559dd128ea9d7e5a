"""The options of ``format("marshal")``: those of Spark's Kafka source, and a few more.

All options are checked before anything starts. Names are case-insensitive, as in Spark.
"""

import difflib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self, TypeVar

import attrs

from kafka_marshal.config import ConsumerConfig
from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.settings import AUTO, ConnectionConfig
from kafka_marshal.protocol.codec import is_identifier, is_topic
from kafka_marshal.protocol.types import OFFSET_MAX, TopicPartition, whole_number
from kafka_marshal.remote.transport import UNIX, Address
from kafka_marshal.spark.java import settings_of
from kafka_marshal.spark.kafka_options import (
    IGNORED,
    ONLY_READS,
    REFUSED,
    meaning_of,
)

K = TypeVar("K")
LOGGER = logging.getLogger("kafka_marshal")


EARLIEST, LATEST = -2, -1
KAFKA_PREFIX = "kafka."
TOPICS = ("subscribe", "subscribePattern", "assign")
ENDINGS = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
STARTS = ("startingOffsets", "startingOffsetsByTimestamp", "startingTimestamp")
CLAIMS = (
    "claimsMax",
    "clientId",
    "delivery",
    "group",
    "policy",
    "sidecar",
    "sidecarTokenFile",
    "stateDir",
)
# Only a batch read has an end; only a stream has sizes of micro-batches, and claims.
BATCH_ONLY = ENDINGS
STREAM_ONLY = (
    "maxOffsetsPerTrigger",
    "maxTriggerDelay",
    "minOffsetsPerTrigger",
    *CLAIMS,
)
EITHER = (
    "coordinationTopic",
    "failOnDataLoss",
    "includeHeaders",
    "includeToken",
    "kafkaConsumer.pollTimeoutMs",
    "maxRecordsPerPartition",
    "minPartitions",
    "startingOffsetsByTimestampStrategy",
    "transport",
    *STARTS,
    *TOPICS,
)
NAMES = tuple(sorted({*BATCH_ONLY, *STREAM_ONLY, *EITHER}, key=str.lower))
_BY_LOWER = {name.lower(): name for name in NAMES}
_UNITS_MS = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
_DURATION = re.compile(r"([0-9]{1,12})\s*([a-z]*)")
# Options that Spark itself adds, for features that this format does not have.
_OF_SPARK = {
    "checkpointlocation": f"it is an option of writeStream, and {ONLY_READS}",
    "path": "the option subscribe names the topics; call load() without a path",
    "provider": "Spark sets it for CREATE TABLE, and passes no options of a table to a "
    "Python data source that reads it; write CREATE TEMPORARY VIEW ... USING marshal "
    "OPTIONS (...)",
}
# Longest time between two checks for new partitions; Spark's own source checks in each
# trigger.
REFRESH_MS_MAX = 30_000
ISOLATION = "kafka.isolation.level"
RACK = "kafka.client.rack"
SERVERS = "kafka.bootstrap.servers"
METADATA_AGE = "kafka.metadata.max.age.ms"
# Settings of the connection whose options have other names.
_CONNECTION = {"coordination_topic": "coordinationTopic", "transport": "transport"}


@attrs.frozen
class Bound:
    """Start or end of reading.

    Attributes:
        everywhere: ``EARLIEST`` or ``LATEST``, for partitions that are not named.
        offsets: Offset of each named partition, also ``EARLIEST`` or ``LATEST``.
        times_ms: Or a time for each named partition, epoch ms: the first record that is
            not older.
        time_ms: Or one such time for all partitions.
        is_strict: Whether a time after the last record is an error; if not, it stands
            for the log end.
        option: Name of the option that gave this bound, for errors.
    """

    everywhere: int
    offsets: Mapping[TopicPartition, int] = attrs.field(factory=dict)
    times_ms: Mapping[TopicPartition, int] = attrs.field(factory=dict)
    time_ms: int | None = None
    is_strict: bool = True
    option: str = attrs.field(default="", eq=False)

    @property
    def is_plain(self) -> bool:
        """Whether it is the start or the end of every log."""
        return not self.offsets and not self.times_ms and self.time_ms is None

    def of_restart(self, partitions: Collection[TopicPartition]) -> Self:
        """Return the start for a query that starts again, with these partitions.

        Partitions, and records in them, may have been deleted since its first start.
        ``LATEST`` meant the log end at the first start: later records are read.
        """
        offsets = {p: at for p, at in self.offsets.items() if at != LATEST}
        return attrs.evolve(
            self,
            offsets={p: offsets[p] for p in partitions if p in offsets},
            times_ms={p: self.times_ms[p] for p in partitions if p in self.times_ms},
            is_strict=False,
        )


@attrs.frozen(kw_only=True)
class Options:
    """The options of one source, checked.

    Attributes:
        settings: Connection.
        connection: The connection as text, for other hosts; with Java's security
            settings as given (``java.python_options``).
        config: The topics, also those of ``assign``, and settings of the claims; for a
            batch read only topics, pattern and isolation level apply.
        assigned: Partitions to read, without a group only; empty for all.
        start: Start of a new query or a batch read. None = as in Spark's own source: a
            batch starts at the earliest offsets, a stream at the latest.
        end: End of a batch read; None = the latest offsets.
        group: The group that shares the topics; None for a batch read.
        client_id: Name in the group; None for a random one.
        sidecar: Address of the sidecar that holds the claims, or None.
        sidecar_token_file: File with the sidecar's token on each host, for TCP.
        state_dir: Directory of the identity; None for the user's.
        max_offsets: Most offsets of a micro-batch, None = no limit.
        min_offsets: Fewest offsets of a micro-batch, None = any.
        max_delay_ms: Longest wait for ``min_offsets``.
        min_partitions: Fewest tasks of a batch, 0 = one for each partition.
        max_task_offsets: Most offsets of a task, 0 = no limit.
        fails_on_data_loss: Whether lost offsets end the query.
        has_headers: Whether to add the column ``headers``.
        has_token: Whether to add the columns ``token`` and ``topicId``.
        rack: Rack of the executors.
        poll_timeout_ms: Longest wait of a task for the next record of its range.
    """

    settings: ConnectionConfig
    connection: Mapping[str, str] = attrs.field(repr=False)
    config: ConsumerConfig
    assigned: tuple[TopicPartition, ...]
    start: Bound | None
    end: Bound | None
    group: str | None
    client_id: str | None
    sidecar: str | None
    sidecar_token_file: str | None
    state_dir: str | None
    max_offsets: int | None
    min_offsets: int | None
    max_delay_ms: int
    min_partitions: int
    max_task_offsets: int
    fails_on_data_loss: bool
    has_headers: bool
    has_token: bool
    rack: str
    poll_timeout_ms: int

    def require_batch(self) -> None:
        """Raise for options that ``spark.read`` does not support."""
        if self.group is not None:
            raise _wrong(
                "group",
                "a batch read holds no claims, because it has no process that runs as "
                "long as its job; omit group to read without claims, or use "
                "readStream with trigger(availableNow=True) to read as a member of "
                "the group",
            )
        if self.start == Bound(LATEST):
            raise _wrong(
                "startingOffsets",
                "a batch read from the latest offsets has no rows; use earliest or "
                "JSON, or readStream for later records",
            )
        for name, value in (
            ("maxOffsetsPerTrigger", self.max_offsets),
            ("minOffsetsPerTrigger", self.min_offsets),
        ):
            if value is not None:
                LOGGER.warning(
                    "option_ignored %s of format marshal: a batch read has no triggers",
                    name,
                )

    def require_stream(self) -> None:
        """Raise for options that ``spark.readStream`` does not support."""
        if self.group is None:
            raise _wrong(
                "group",
                "a stream shares its topics with other members of its group by "
                "claims; name the group",
            )
        if self.end is not None:
            raise _wrong(
                self.end.option,
                "a stream has no end; use spark.read with it, or readStream with "
                "trigger(availableNow=True) to end where the logs end now",
            )
        if self.assigned:
            raise _wrong(
                "assign",
                "which partitions a stream reads is decided by claims; use subscribe, "
                "or assign with spark.read",
            )


def parse(given: Mapping[str, str]) -> Options:
    """Check and parse options.

    Raises:
        ConfigurationError: An option is unknown, impossible, or contradicts another.
    """
    return _Reader(given).options()


class _Reader:
    """Checks the names of options, then parses their values."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given: dict[str, str] = {}
        self._kafka: dict[str, str] = {}
        for name in {each.lower() for each in given} & _OF_SPARK.keys():
            raise _wrong(name, _OF_SPARK[name])
        for name, value in given.items():
            low = name.lower()
            meaning = meaning_of(low)
            if meaning is not None and meaning.kind == REFUSED:
                raise _wrong(meaning.name, meaning.note)
            if meaning is not None and meaning.kind == IGNORED:
                LOGGER.warning(
                    "option_ignored %s of format marshal: %s",
                    *(meaning.name, meaning.note),
                )
            elif low.startswith(KAFKA_PREFIX):
                self._kafka[low] = value
            elif low in _BY_LOWER:
                self._given[_BY_LOWER[low]] = value
            else:
                raise _unknown(name)

    def options(self) -> Options:
        """Return the parsed options."""
        self._at_most_one(TOPICS, must=True)
        self._at_most_one(STARTS)
        self._at_most_one(ENDINGS)
        assigned = self._take("assign", _assigned, ())
        config = self._config(assigned)
        rack = self._kafka.pop(RACK, "")
        connection = self._connection()
        settings = _settings(connection)
        is_placed = any(name in self._given for name in STARTS)
        has_end = any(name in self._given for name in ENDINGS)
        self._take("startingOffsetsByTimestampStrategy", _strategy, default=True)
        return Options(
            settings=settings,
            connection=connection,
            config=config,
            assigned=assigned,
            start=self._bound("starting", everywhere=EARLIEST) if is_placed else None,
            end=self._bound("ending", everywhere=LATEST) if has_end else None,
            **self._claims(),
            **self._limits(),
            fails_on_data_loss=self._take("failOnDataLoss", _flag, default=True),
            has_headers=self._take("includeHeaders", _flag, default=False),
            has_token=self._take("includeToken", _flag, default=False),
            rack=rack,
            poll_timeout_ms=self._take("kafkaConsumer.pollTimeoutMs", _whole, 120_000),
        )

    def _config(self, assigned: tuple[TopicPartition, ...]) -> ConsumerConfig:
        given = dict(self._given)
        if ISOLATION in self._kafka:
            given[ISOLATION] = self._kafka.pop(ISOLATION)
        settings = {
            setting: read(name, given[name])
            for name, (setting, read) in _SETTINGS.items()
            if name in given
        }
        # This is also a setting of the connection, which checks the value.
        age_ms = whole_number(self._kafka.get(METADATA_AGE, "").strip())
        if age_ms is not None:
            settings["metadata_refresh_ms"] = min(max(age_ms, 1), REFRESH_MS_MAX)
        if assigned:
            settings["topics"] = tuple(sorted({each.topic for each in assigned}))
        try:
            return ConsumerConfig(max_handling_ms=0, release_behind=False, **settings)
        except ConfigurationError as error:
            raise _wrong(_OPTION_OF[error.setting], str(error)) from error

    def _connection(self) -> dict[str, str]:
        servers = self._kafka.pop(SERVERS, None)
        if not servers:
            raise _wrong(SERVERS, "name at least one broker, such as broker-1:9092")
        return {
            **{name.removeprefix(KAFKA_PREFIX): v for name, v in self._kafka.items()},
            "bootstrap_servers": servers,
            "coordination_topic": self._given.get(
                "coordinationTopic", COORDINATION_TOPIC
            ),
            "transport": self._given.get("transport", AUTO),
            **self._token_file(),
        }

    def _token_file(self) -> dict[str, str]:
        """Return the option that names the file of a sidecar's token on each host."""
        path = self._take("sidecarTokenFile", _text, None)
        sidecar = self._take("sidecar", _sidecar, None)
        if path is not None and sidecar is None:
            raise _wrong(
                "sidecarTokenFile", "it needs the option sidecar with a TCP address"
            )
        if path is None and sidecar is not None and not sidecar.startswith(UNIX):
            raise _wrong(
                "sidecarTokenFile",
                f"a sidecar at {sidecar} requires a token; name its file on each host, "
                "or use the Unix socket",
            )
        return {} if path is None else {"sidecar_token_file": path}

    def _claims(self) -> dict[str, Any]:
        found = {
            "group": self._take("group", _identifier, None),
            "client_id": self._take("clientId", _identifier, None),
            "sidecar": self._take("sidecar", _sidecar, None),
            "sidecar_token_file": self._take("sidecarTokenFile", _text, None),
            "state_dir": self._take("stateDir", _as_is, None),
        }
        if found["group"] is None:
            for name in CLAIMS:
                if name in self._given and name != "group":
                    raise _wrong(
                        name,
                        "it configures claims; set the option group of a stream, or "
                        "omit this one in a batch read",
                    )
        return found

    def _limits(self) -> dict[str, Any]:
        most = self._take("maxOffsetsPerTrigger", _whole, None)
        least = self._take("minOffsetsPerTrigger", _whole, None)
        if most is not None and least is not None and least > most:
            raise _wrong(
                "minOffsetsPerTrigger", f"{least} is more than maxOffsetsPerTrigger"
            )
        if "maxTriggerDelay" in self._given and least is None:
            raise _wrong("maxTriggerDelay", "it needs minOffsetsPerTrigger")
        return {
            "max_offsets": most,
            "min_offsets": least,
            "max_delay_ms": self._take("maxTriggerDelay", _duration_ms, 900_000),
            "min_partitions": self._take("minPartitions", _whole, 0),
            "max_task_offsets": self._take("maxRecordsPerPartition", _whole, 0),
        }

    def _take(
        self,
        name: str,
        read: Callable[[str, str], Any],
        default: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        value = self._given.get(name)
        return default if value is None else read(name, value)

    def _at_most_one(self, names: tuple[str, ...], *, must: bool = False) -> None:
        found = [name for name in names if name in self._given]
        if must and not found:
            raise ConfigurationError(
                f"name the topics to read with one of {', '.join(names)}; {ONLY_READS}",
                setting=names[0],
            )
        if len(found) > 1:
            what = "exactly one" if must else "at most one"
            raise ConfigurationError(
                f"{what} of {', '.join(names)} may be set, but "
                f"{' and '.join(found)} are set and contradict each other; keep one",
                setting=found[-1],
            )

    def _bound(self, which: str, *, everywhere: int) -> Bound:
        text = self._given.get(f"{which}Offsets")
        is_strict = self._take(
            "startingOffsetsByTimestampStrategy", _strategy, default=True
        )
        if text is not None:
            return _offsets(f"{which}Offsets", text, everywhere=everywhere)
        name = f"{which}Timestamp"
        if (text := self._given.get(name)) is not None:
            return Bound(
                everywhere,
                time_ms=_whole_or_none(name, text),
                is_strict=is_strict,
                option=name,
            )
        name = f"{which}OffsetsByTimestamp"
        if (text := self._given.get(name)) is not None:
            times = _by_partition(name, text, least=0)
            return Bound(everywhere, times_ms=times, is_strict=is_strict, option=name)
        return Bound(everywhere)


def _settings(connection: Mapping[str, str]) -> ConnectionConfig:
    try:
        return settings_of(connection)
    except ConfigurationError as error:
        setting = error.setting
        if setting.startswith(KAFKA_PREFIX):
            raise
        dotted = f"{KAFKA_PREFIX}{setting.replace('_', '.')}"
        raise _wrong(_CONNECTION.get(setting, dotted), str(error)) from error


def _wrong(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"option {name} of format marshal: {why}", setting=name)


def _unknown(name: str) -> ConfigurationError:
    known = {low: own for own in (*NAMES, SERVERS) for low in (own.lower(),)}
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = (
        f"did you mean {known[near[0]]}?"
        if near
        else f"the options are {_listed(known)}"
    )
    return _wrong(name, f"unknown option; {hint}")


def _listed(known: Mapping[str, str]) -> str:
    return ", ".join(sorted(known.values()))


def _offsets(name: str, text: str, *, everywhere: int) -> Bound:
    plain = {"earliest": EARLIEST, "latest": LATEST}.get(text.strip().lower())
    if plain is not None:
        if name == "endingOffsets" and plain == EARLIEST:
            raise _wrong(name, "a read cannot end at earliest; use latest or JSON")
        return Bound(plain, option=name)
    offsets = _by_partition(name, text, least=EARLIEST)
    if name == "endingOffsets" and EARLIEST in offsets.values():
        raise _wrong(name, f"a read cannot end at {EARLIEST}, the earliest offset")
    return Bound(everywhere, offsets=offsets, option=name)


def _by_partition(name: str, text: str, *, least: int) -> dict[TopicPartition, int]:
    """Parse ``{"topic": {"0": 23}}``."""
    hint = 'use earliest, latest or JSON such as {"orders": {"0": 23, "1": -2}}'
    try:
        found = json.loads(text, object_pairs_hook=_unique)
        pairs = _unique(
            (TopicPartition(topic, _number(number)), value)
            for topic, numbers in found.items()
            for number, value in numbers.items()
        )
    except AttributeError as error:
        raise _wrong(
            name, f"{text!r} cannot be read (it has another form); {hint}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _wrong(name, f"{text!r} cannot be read ({error}); {hint}") from error
    for place, value in pairs.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        is_place = is_topic(place.topic) and place.partition >= 0
        if not is_place or not is_whole or not least <= value <= OFFSET_MAX:
            raise _wrong(name, f"{place} cannot be at {value!r}; {hint}")
    if not pairs:
        raise _wrong(name, f"it names no partition; {hint}")
    return pairs


def _unique(pairs: Iterable[tuple[K, Any]]) -> dict[K, Any]:
    """Return pairs as a dict; raise ValueError if a key is there twice."""
    found: dict[K, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{str(key)!r} is there twice")
        found[key] = value
    return found


def _number(text: str) -> int:
    """Return the number in a text; raise ValueError for anything but digits."""
    found = whole_number(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no whole number")
    return found


def _topics(name: str, text: str) -> tuple[str, ...]:
    """Parse names separated by commas; empty ones are ignored, as Spark does."""
    found = filter(None, (part.strip() for part in text.split(",")))
    topics = tuple(dict.fromkeys(found))
    if not topics:
        raise _wrong(name, "it names no topic")
    return topics


def _assigned(name: str, text: str) -> tuple[TopicPartition, ...]:
    """Parse ``{"topic": [0, 1]}``."""
    try:
        found = [
            TopicPartition(topic, number)
            for topic, numbers in json.loads(text, object_pairs_hook=_unique).items()
            for number in numbers
        ]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        hint = 'use JSON such as {"orders": [0, 1]}'
        raise _wrong(name, f"{text!r} cannot be read ({error}); {hint}") from error
    for topic, number in found:
        if not is_topic(topic) or type(number) is not int or number < 0:
            raise _wrong(name, f"{topic!r} partition {number!r} is no partition")
    if not found:
        raise _wrong(name, "it names no partition")
    return tuple(sorted(set(found)))


def _text(name: str, text: str) -> str:
    if not text.strip():
        raise _wrong(name, "it is empty; leave it out instead")
    return text.strip()


def _sidecar(name: str, text: str) -> str:
    try:
        return Address.parse(_text(name, text)).text
    except ConfigurationError as error:
        raise _wrong(name, str(error)) from error


def _as_is(_: str, text: str) -> str:
    return text


def _identifier(name: str, text: str) -> str:
    if not is_identifier(text):
        raise _wrong(
            name,
            f"{text!r} is not a valid name: use 1 to 200 of A-Z a-z 0-9 . _ : -, "
            "not . or ..",
        )
    return text


def _policy(name: str, text: str) -> str:
    from kafka_marshal.policies import find_policy

    try:
        find_policy(text)
    except ConfigurationError as error:
        raise _wrong(name, str(error)) from error
    return text


def _flag(name: str, text: str) -> bool:
    low = text.strip().lower()
    if low not in {"true", "false"}:
        raise _wrong(name, f"{text!r} is neither true nor false")
    return low == "true"


def _whole(name: str, text: str) -> int:
    found = _whole_or_none(name, text)
    if found == 0:
        raise _wrong(name, "it must be at least 1")
    return found


def _whole_or_none(name: str, text: str) -> int:
    found = whole_number(text.strip())
    if found is None:
        raise _wrong(name, f"{text!r} is no whole number")
    return found


def _duration_ms(name: str, text: str) -> int:
    found = _DURATION.fullmatch(text.strip().lower())
    unit = (found[2] or "ms") if found else ""
    if found is None or unit not in _UNITS_MS:
        raise _wrong(name, f"{text!r} is no time such as 15m, 30s or 500ms")
    return int(found[1]) * _UNITS_MS[unit]


def _strategy(name: str, text: str) -> bool:
    if text not in {"error", "latest"}:
        raise _wrong(name, f"{text!r} is neither error nor latest")
    return text == "error"


# Options that set a field of ``ConsumerConfig``: the field, and the parser of the text.
_SETTINGS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "subscribe": ("topics", _topics),
    "subscribePattern": ("pattern", _text),
    "delivery": ("delivery", _as_is),
    "policy": ("policy", _policy),
    "claimsMax": ("claims_max", _whole_or_none),
    ISOLATION: ("isolation_level", _as_is),
}
_OPTION_OF = {setting: name for name, (setting, _) in _SETTINGS.items()}
