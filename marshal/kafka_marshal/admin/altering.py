"""Changes of the Config by an admin: interval, limits, feature level (PROTOCOL 4.12).

Each change writes the next Config, first to coordinating partition 0, which decides.
Each key is judged by the Config of its own partition, so an interrupted change is safe,
and repeating it completes it.
"""

from collections.abc import Iterable, Mapping, Sequence

import attrs
import msgspec

from kafka_marshal.admin.connection import AdminConnection
from kafka_marshal.admin.formatting import check_interval, check_limits
from kafka_marshal.arguments import with_plain_arguments
from kafka_marshal.counting import counted
from kafka_marshal.engine.config_check import (
    require_level,
    require_newest,
    require_no_change,
)
from kafka_marshal.errors import ClaimRejected, ConfigurationError, LogUnwritable
from kafka_marshal.protocol.placement import by_partition
from kafka_marshal.protocol.records import LIMIT_DEFAULTS, SUPPORTED_LEVEL, Config
from kafka_marshal.protocol.state import WorldState, is_forgettable

COUNTED = ("keys", "groups")


@attrs.frozen(kw_only=True)
class Exceeded:
    """A coordinating partition that has more keys or groups than a limit allows.

    Attributes:
        partition: The coordinating partition.
        limit: Name of the limit.
        count: Number of keys or groups now. They stay; only new ones are refused.
    """

    partition: int
    limit: str
    count: int


@attrs.frozen(kw_only=True)
class AlterPlan:
    """The effect of a change of heartbeat interval and limits.

    Attributes:
        config: The Config that is written; the one in force if nothing changes.
        before: The Config of coordinating partition 0 now.
        partitions: Coordinating partitions that the Config is written to.
        forgotten_count: Number of keys that a lower ``forget_ms`` drops soon.
        exceeded: Limits that are already exceeded.
    """

    config: Config
    before: Config
    partitions: tuple[int, ...]
    forgotten_count: int
    exceeded: tuple[Exceeded, ...]

    @property
    def changes(self) -> dict[str, tuple[int, int]]:
        """Name of each changed value, with the value now and after the change."""
        before, then = self.before, self.config
        values = {
            "heartbeat_interval_ms": (
                before.heartbeat_interval_ms,
                then.heartbeat_interval_ms,
            )
        }
        values |= {
            name: (before.limit(name), then.limit(name)) for name in LIMIT_DEFAULTS
        }
        return {name: (one, two) for name, (one, two) in values.items() if one != two}


def plan_alter(
    worlds: Sequence[WorldState],
    *,
    heartbeat_interval_ms: int | None,
    limits: Mapping[str, int],
    era: int,
    tags: bytes | msgspec.UnsetType = msgspec.UNSET,
) -> AlterPlan:
    """Return the plan of a change, which also completes an interrupted change.

    Args:
        worlds: The worlds of the coordinating partitions.
        heartbeat_interval_ms: The new interval; None keeps it.
        limits: New limits by name; others stay.
        era: Wall time in seconds.
        tags: Tags of a new Config.

    Raises:
        ConfigurationError: A value is not allowed, or the topic's level is too low.
    """
    states = by_partition(worlds)
    first = settled_config(states, 0)
    interval_ms = heartbeat_interval_ms or first.heartbeat_interval_ms
    if heartbeat_interval_ms is not None:
        check_interval(heartbeat_interval_ms)
    check_limits(limits)
    if interval_ms < first.heartbeat_interval_ms:
        require_level(first, "a lower heartbeat interval")
    wanted = msgspec.structs.replace(
        first,
        heartbeat_interval_ms=interval_ms,
        limits=msgspec.structs.replace(first.limits, **limits),
    )
    if wanted != first:
        wanted = msgspec.structs.replace(
            wanted,
            generation=first.generation + 1,
            era=max(first.era + 1, era),
            tags=tags,
        )
    own = [states[t] for t in range(first.partition_count)]
    return AlterPlan(
        config=wanted,
        before=first,
        partitions=_behind(states, wanted),
        forgotten_count=sum(_forgotten_count(world, first, wanted) for world in own),
        exceeded=tuple(each for world in own for each in _exceeded(world, wanted)),
    )


def _behind(worlds: Mapping[int, WorldState], config: Config) -> tuple[int, ...]:
    """Return the coordinating partitions that do not have this Config yet."""
    return tuple(
        t
        for t in range(config.partition_count)
        if settled_config(worlds, t).generation < config.generation
    )


def _forgotten_count(world: WorldState, before: Config, config: Config) -> int:
    """Return how many inactive keys a Config drops that the present Config keeps."""
    if config.limit("forget_ms") >= before.limit("forget_ms"):
        return 0
    latest_ms = world.now_ms - config.limit("forget_ms")
    return sum(
        is_forgettable(known) and known.active_ms < latest_ms
        for known in world.keys.values()
    )


def _exceeded(world: WorldState, config: Config) -> list[Exceeded]:
    counts = {"keys": len(world.keys), "groups": len(world.groups)}
    return [
        Exceeded(partition=world.partition, limit=name, count=counts[name])
        for name in COUNTED
        if counts[name] > config.limit(name)
    ]


@attrs.frozen(kw_only=True)
class UpgradePlan:
    """The effect of an upgrade of the coordination topic.

    Attributes:
        config: The Config that is written; the one in force if its level suffices.
        level: Feature level in force, the lowest of all partitions.
        level_then: Feature level after the upgrade.
        partitions: Coordinating partitions without the new Config.
        too_old: Live members whose release does not support the level.
    """

    config: Config
    level: int
    level_then: int
    partitions: tuple[int, ...]
    too_old: tuple[str, ...]


def plan_upgrade(
    worlds: Mapping[int, WorldState],
    *,
    era: int,
    tags: bytes | msgspec.UnsetType = msgspec.UNSET,
) -> UpgradePlan:
    """Return the plan of an upgrade, which also completes an interrupted upgrade.

    Coordinating partition 0 decides; others may lag behind it.

    Args:
        worlds: The worlds of the coordinating partitions.
        era: Wall time in seconds.
        tags: Tags of a new Config.
    """
    config = first = settled_config(worlds, 0)
    if first.feature_level < SUPPORTED_LEVEL:
        config = msgspec.structs.replace(
            first,
            generation=first.generation + 1,
            era=max(first.era + 1, era),
            feature_level=SUPPORTED_LEVEL,
            tags=tags,
        )
    too_old = sorted(
        f"{member.record.group_id}/{member.record.client_id}"
        for world in worlds.values()
        for group_id in {name[0] for name in world.soft.members}
        for member in world.live_members(group_id)
        if member.record.feature_level_max < SUPPORTED_LEVEL
    )
    levels = [
        settled_config(worlds, t).feature_level for t in range(first.partition_count)
    ]
    return UpgradePlan(
        config=config,
        level=min(levels),
        level_then=SUPPORTED_LEVEL,
        partitions=_behind(worlds, config),
        too_old=tuple(too_old),
    )


def settled_config(worlds: Mapping[int, WorldState], partition: int) -> Config:
    """Return the Config of a coordinating partition.

    Raises:
        ConfigurationError: The partition has no Config.
    """
    config = worlds[partition].config
    if config is None:
        raise ConfigurationError(
            f"partition {partition} is not formatted; run: marshal topic format",
            setting="coordination_topic",
        )
    return config


def require_members(plan: UpgradePlan) -> None:
    """Refuse an upgrade that would stop live members.

    Raises:
        ClaimRejected: Releases of live members do not support the level.
    """
    if plan.too_old:
        raise ClaimRejected(
            f"{counted(len(plan.too_old), 'live member')} would stop, for example "
            f"{plan.too_old[0]}: their release does not support feature level "
            f"{plan.level_then}; upgrade them first",
            reason="level",
        )


class Altering(AdminConnection):
    """Changes the Config of the topic, as a part of ``Admin``; for one thread."""

    @with_plain_arguments
    def alter_topic(
        self,
        *,
        heartbeat_interval_ms: int | None = None,
        limits: Mapping[str, int] | None = None,
        execute: bool = False,
    ) -> AlterPlan:
        """Change the heartbeat interval or limits of the topic while members run.

        A lower interval never ends a running lease earlier. So it applies to a key only
        from a later renewal on, after up to two old intervals; until then takeovers of
        the key take as long as before.

        Args:
            heartbeat_interval_ms: The new interval; None keeps it.
            limits: New limits by name; others stay.
            execute: Whether to execute the plan.

        Raises:
            ConfigurationError: A value is not allowed, or the topic has a feature level
                below 2.
            ClaimRejected: A change of the number of partitions is open, or partition 0
                has lost the newest Config.
            LogUnwritable: A partition accepted another Config; repeat the call.
            DeadlineExceeded: No verdict in time; repeating the call completes it.
        """
        follower = self._read()
        require_no_change(follower.by_partition)
        require_newest(follower.by_partition, follower.topic)
        plan = plan_alter(
            follower.worlds,
            heartbeat_interval_ms=heartbeat_interval_ms,
            limits=limits or {},
            era=follower.wall_s,
            tags=self._sender.tags,
        )
        if execute:
            self._write_config(plan.config, plan.partitions)
        return plan

    def upgrade_topic(
        self, *, execute: bool = False, ignore_members: bool = False
    ) -> UpgradePlan:
        """Raise the feature level of the topic to the level of this release.

        Args:
            execute: Whether to execute the plan.
            ignore_members: Whether to continue although live members would halt.

        Raises:
            ClaimRejected: Live members would halt, a change of the number of
                partitions is open, or partition 0 has lost the newest Config.
        """
        follower = self._read()
        require_no_change(follower.by_partition)
        require_newest(follower.by_partition, follower.topic)
        plan = plan_upgrade(
            follower.by_partition, era=follower.wall_s, tags=self._sender.tags
        )
        if execute:
            if not ignore_members:
                require_members(plan)
            self._write_config(plan.config, plan.partitions)
        return plan

    def _write_config(self, config: Config, partitions: Iterable[int]) -> None:
        """Write a Config to partitions in their order; the first one decides.

        Raises:
            LogUnwritable: A partition accepted another Config.
        """
        worlds = self._follow().by_partition
        for t in partitions:
            self._write((t, config))
            if worlds[t].config != config:
                raise LogUnwritable(
                    f"coordinating partition {t} does not have this Config: another "
                    "admin may have changed it meanwhile, or the clock of this machine "
                    "is more than a day ahead of the brokers; see: marshal topic info, "
                    "and marshal doctor, then repeat the change"
                )
