"""Formats a coordination topic: writes its Configs (PROTOCOL 2.2)."""

import secrets
from collections.abc import Mapping, Sequence

import attrs
import msgspec
from msgspec import UNSET, UnsetType

from kafka_marshal.arguments import to_plain, to_whole
from kafka_marshal.counting import counted
from kafka_marshal.engine.config_check import require_cluster, require_no_change
from kafka_marshal.engine.follower import Follower
from kafka_marshal.errors import (
    ConfigurationError,
    LogUnreadable,
    TopicMisconfigured,
)
from kafka_marshal.kafka_io.topic_rules import ClusterInfo, Problem, TopicDescription
from kafka_marshal.protocol.layout import used_count
from kafka_marshal.protocol.lost_changes import lost_configs
from kafka_marshal.protocol.records import (
    LIMIT_DEFAULTS,
    SUPPORTED_LEVEL,
    Config,
    Limits,
)
from kafka_marshal.protocol.state import WorldState

PARTITIONS_DEFAULT = 8
HEARTBEAT_MS_DEFAULT = 60_000
HEARTBEAT_MS_MIN = 200
HEARTBEAT_MS_LONGEST = 3_600_000


@attrs.frozen
class Format:
    """The settings of a new coordination topic.

    Attributes:
        partition_count: Number of coordinating partitions.
        heartbeat_interval_ms: Heartbeat interval of all clients.
        limits: Limits that differ from the defaults, by name.
    """

    partition_count: int = PARTITIONS_DEFAULT
    heartbeat_interval_ms: int = HEARTBEAT_MS_DEFAULT
    limits: Mapping[str, int] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for name in ("partition_count", "heartbeat_interval_ms"):
            # Convert NumPy numbers, which cannot be encoded.
            object.__setattr__(self, name, to_whole(name, getattr(self, name)))
        object.__setattr__(self, "limits", to_plain(dict(self.limits)))
        if not 1 <= self.partition_count <= 10_000:  # noqa: PLR2004 - a sane bound
            raise ConfigurationError(
                f"partitions must be 1 to 10000, not {self.partition_count}",
                setting="partition_count",
            )
        check_interval(self.heartbeat_interval_ms)
        check_limits(self.limits)


def check_interval(heartbeat_interval_ms: int) -> None:
    """Check the bounds of a heartbeat interval.

    Raises:
        ConfigurationError: The interval is too short or too long.
    """
    least, most = HEARTBEAT_MS_MIN, HEARTBEAT_MS_LONGEST
    if not least <= heartbeat_interval_ms <= most:
        raise ConfigurationError(
            f"heartbeat_interval_ms must be {least} to {most}, not "
            f"{heartbeat_interval_ms}",
            setting="heartbeat_interval_ms",
        )


def check_limits(limits: Mapping[str, int]) -> None:
    """Check limits; the value None stands for the default.

    Raises:
        ConfigurationError: There is no such limit, or a value is no whole number or out
            of its range.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(Limits)}
    for name, value in limits.items():
        if name not in types:
            raise ConfigurationError(
                f"unknown limit {name!r}; the limits are: {', '.join(sorted(types))}",
                setting="limits",
            )
        try:
            if value is not None:
                msgspec.convert(to_whole(name, value), type=types[name])
        except msgspec.ValidationError as error:
            raise ConfigurationError(
                f"limit {name} cannot be {value}: {error}; see docs/PROTOCOL.md, 3.6",
                setting="limits",
            ) from error


def format_log(
    follower: Follower,
    wanted: Format,
    *,
    cluster_id: str,
    ignore_formatted: bool,
    timeout_ms: int,
    tags: bytes | UnsetType = UNSET,
) -> Config:
    """Write the Configs of a coordination log; see ``Admin.format_topic``.

    A torn format is completed with the tags of its first Config.
    """
    follower.catch_up(timeout_ms)
    count = used_count(follower.worlds[0])
    missing = [t for t in follower.log_start_missing if count is None or t < count]
    if missing:
        raise LogUnreadable(
            f"the log of coordinating partitions {missing} begins "
            "above offset 0, and no checkpoint replaces the missing records, so it is "
            "unknown whether they are formatted; do not delete the topic while members "
            "run: see docs/reference.md, The log of __marshal has lost its start"
        )
    worlds = follower.worlds
    if len(worlds) < wanted.partition_count and worlds[0].config is None:
        raise TopicMisconfigured(
            f"the coordination topic has {counted(len(worlds), 'partition')} "
            f"and {wanted.partition_count} are requested; request fewer, or create the "
            "topic again"
        )
    if worlds[0].config is None:
        first = lost_configs(follower.by_partition).get(0)
        if first is None:
            first = _new_config(wanted, cluster_id, era=follower.wall_s, tags=tags)
        follower.await_all([follower.append(0, first)], timeout_ms)
        was_formatted = worlds[0].config != first
    else:
        was_formatted = True
    config = worlds[0].config
    if config is None:
        raise LogUnreadable(
            "coordinating partition 0 refused the Config: is the clock of this machine "
            "more than a day ahead of the brokers? See: marshal log dump --partition 0"
        )
    require_cluster(config, cluster_id)
    require_no_change(follower.by_partition)
    restored = _restore_first(follower, config, timeout_ms=timeout_ms)
    was_formatted, config = was_formatted and config == restored, restored
    lacking = [t for t in range(config.partition_count) if not _agrees(worlds, t)]
    if was_formatted and not lacking and not ignore_formatted:
        raise TopicMisconfigured(
            f"the coordination topic is already formatted (format_id "
            f"{config.format_id.hex()}, {config.partition_count} coordinating "
            f"partitions, heartbeat interval {config.heartbeat_interval_ms} ms); "
            "ignore_formatted=True accepts that"
        )
    follower.await_all([follower.append(t, config) for t in lacking], timeout_ms)
    torn = [t for t in range(config.partition_count) if not _agrees(worlds, t)]
    if torn:
        raise TopicMisconfigured(
            f"torn_format: coordinating partitions {torn} disagree with partition 0 on "
            "the format; delete the topic and format it again"
        )
    return config


def _restore_first(follower: Follower, config: Config, *, timeout_ms: int) -> Config:
    """Write to partition 0 the Configs that only others have; return its new Config."""
    while (lost := lost_configs(follower.by_partition).get(0)) is not None:
        follower.await_all([follower.append(0, lost)], timeout_ms)
        before, config = config, follower.worlds[0].config or config
        if config == before:
            break
    return config


def _agrees(worlds: Sequence[WorldState], partition: int) -> bool:
    return partition < len(worlds) and worlds[partition].config == worlds[0].config


def _new_config(
    wanted: Format, cluster_id: str, *, era: int, tags: bytes | UnsetType
) -> Config:
    return Config(
        generation=1,
        format_id=secrets.token_bytes(16),
        era=era,
        cluster_id=cluster_id,
        heartbeat_interval_ms=wanted.heartbeat_interval_ms,
        partition_count=wanted.partition_count,
        feature_level=SUPPORTED_LEVEL,
        limits=Limits(**{name: wanted.limits.get(name) for name in LIMIT_DEFAULTS}),
        tags=tags,
    )


@attrs.frozen
class TopicReport:
    """Description of the coordination topic, and its problems.

    Attributes:
        cluster: The cluster.
        topic: The cluster's description of the topic.
        found: Violations of PROTOCOL 2.1.
        note: Why the settings could not be read, None if they could.
    """

    cluster: ClusterInfo
    topic: TopicDescription
    found: tuple[Problem, ...]
    note: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """One line per violated setting."""
        return tuple(each.text for each in self.found)
