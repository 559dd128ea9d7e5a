"""Checks that all coordinating partitions carry the same Config.

A module of its own, because administrative commands check Configs without an engine.
"""

from collections.abc import Iterable, Mapping

from kafka_marshal.counting import counted
from kafka_marshal.defaults import COORDINATION_TOPIC, format_command
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    TopicMisconfigured,
    WrongCluster,
)
from kafka_marshal.protocol.lost_changes import count_before
from kafka_marshal.protocol.placement import newest
from kafka_marshal.protocol.records import SECOND_LEVEL, Config
from kafka_marshal.protocol.state import WorldState


def agreed_config(
    worlds: Mapping[int, WorldState],
    *,
    cluster_id: str | None,
    topic: str = COORDINATION_TOPIC,
) -> Config:
    """Return the Config of all coordinating partitions (PROTOCOL 2.2).

    Partition 0 decides. Other partitions may be behind it for a while in interval and
    limits, or while the partition count changes.

    Args:
        worlds: The world of each partition, folded to its end.
        cluster_id: Id of the cluster that the log was read from; None skips the check.
        topic: The coordination topic, for messages.

    Raises:
        WrongCluster: The topic was formatted for another cluster.
        TopicMisconfigured: The topic is unformatted, torn, or has too few partitions.
    """
    config = worlds[0].config
    if config is None:
        raise unformatted(worlds.values(), topic)
    require_cluster(config, cluster_id)
    if config.partition_count > len(worlds) and worlds[0].layout is None:
        problem = (
            f"the coordination topic has {counted(len(worlds), 'partition')} and its "
            f"Config says {config.partition_count}; the topic was deleted and created "
            "again, or lost partitions"
        )
        raise TopicMisconfigured(problem, problems=(problem,))
    torn = [
        t
        for t in range(min(config.partition_count, len(worlds)))
        if not _is_of(worlds[t].config, config)
        and t not in behind(worlds)
        and not _is_changing(worlds, t)
    ]
    if torn:
        raise TopicMisconfigured(
            f"torn_format: coordinating partitions {torn} do not agree with "
            f"partition 0 about the Config; run: {format_command(topic)}",
            problems=tuple(
                f"torn_format: partition {t} does not carry partition 0's Config"
                for t in torn
            ),
        )
    return config


def require_level(config: Config | None, what: str) -> None:
    """Refuse an operation of feature level 2 while level 1 is in force (PROTOCOL 3.3).

    Args:
        config: The Config in force.
        what: The operation that needs level 2, for the message.

    Raises:
        ConfigurationError: Level 1 is in force.
    """
    level = 1 if config is None else config.feature_level
    if level < SECOND_LEVEL:
        raise ConfigurationError(
            f"the coordination topic has feature level {level}, and {what} needs level "
            f"{SECOND_LEVEL}; run: marshal topic upgrade --execute",
            setting="coordination_topic",
        )


def behind(worlds: Mapping[int, WorldState]) -> tuple[int, ...]:
    """Return the partitions that are behind partition 0 in interval and limits only.

    A change of interval or limits reaches the partitions one by one, and each partition
    is judged by its own Config meanwhile (PROTOCOL 4.12).
    """
    first = worlds[0].config
    if first is None:
        return ()
    name = _name(first)
    return tuple(
        t
        for t in range(min(first.partition_count, len(worlds)))
        if (c := worlds[t].config) is not None
        and c.generation < first.generation
        and _name(c) == name
    )


def _is_changing(worlds: Mapping[int, WorldState], t: int) -> bool:
    """Return whether a change of the partition count may still reach a partition.

    Also if the partition shows a change or another Config that partition 0 has lost
    with the end of its log (PROTOCOL 10). A partition that has lost a change or a
    Config gets it again while any member runs (10.9).
    """
    first, world = worlds[0], worlds[t]
    assert first.config is not None
    layout, config = first.layout, world.config
    if config is None:
        layouts = [layout] if layout else [each.layout for each in worlds.values()]
        return any(each and t >= each.from_count for each in layouts)
    if count_before(t, config, newest=first.config):
        return True
    if count_before(0, first.config, newest=config):
        return True
    if _name(config) == _name(first.config):
        before = first.config
        return config.generation > before.generation and config.era > before.era
    is_of_this_log = config.format_id == first.config.format_id
    is_behind = config.generation < first.config.generation
    return is_of_this_log and (layout if is_behind else world.layout) is not None


def require_no_change(worlds: Mapping[int, WorldState]) -> None:
    """Refuse to write a Config while a change of the partition count is open.

    Partition 0 refuses it. Another partition would accept it, and refuse the fence.

    Raises:
        ClaimRejected: A change is open in a partition.
    """
    first = worlds[0].config
    for world in worlds.values():
        config = world.config
        if world.layout is None or config is None or first is None:
            continue
        if world.partition == 0 or config.generation >= first.generation:
            raise ClaimRejected(
                f"a change to {config.partition_count} coordinating partitions is "
                "open; complete it first: marshal topic resize --partitions "
                f"{config.partition_count} --execute",
                reason="busy",
            )


def require_newest(worlds: Mapping[int, WorldState], topic: str) -> None:
    """Refuse to write a Config if partition 0 has lost the newest one.

    The new Config would have the generation of the lost one, which other partitions
    still have and would keep.

    Args:
        worlds: The world of each partition, folded to its end.
        topic: The coordination topic, for the message.

    Raises:
        ClaimRejected: Another partition has a newer Config than partition 0.
    """
    first = worlds[0].config
    if first is None:
        return
    found = newest(first, worlds.values())
    if found.generation > first.generation:
        raise ClaimRejected(
            "coordinating partition 0 has lost the newest Config (generation "
            f"{found.generation}), which another one has; to write it again, run: "
            + format_command(topic),
            reason="busy",
        )


def lagging(partitions: tuple[int, ...], topic: str) -> TopicMisconfigured:
    """Return the description of partitions that are behind partition 0."""
    problem = (
        f"coordinating partitions {list(partitions)} are behind partition 0's Config; "
        f"to complete its change, run: {format_command(topic)}"
    )
    return TopicMisconfigured(problem, problems=(problem,))


def _name(config: Config) -> tuple[bytes, int, int]:
    return config.format_id, config.partition_count, config.feature_level


def _is_of(config: Config | None, first: Config) -> bool:
    """Return whether a partition has the Config of partition 0.

    After a log went back, two Configs of one generation may differ in interval and
    limits: each key is judged by the Config of its partition. They must not differ in
    the count, by which claims are placed, or in the feature level.
    """
    return config is not None and (config.generation, _name(config)) == (
        first.generation,
        _name(first),
    )


def unformatted(
    worlds: Iterable[WorldState], topic: str = COORDINATION_TOPIC
) -> TopicMisconfigured:
    """Return the error for a topic without a Config.

    Records that do not belong to the protocol show that the topic has another use, and
    records that do show that the Config was deleted, so it must not be formatted.
    If other partitions have a Config, the format completes the first.
    """
    problem = "not formatted: partition 0 carries no Config"
    found = tuple(worlds)
    count = sum(world.soft.counters.get("undecodable", 0) for world in found)
    if count:
        return TopicMisconfigured(
            f"this is not a coordination topic: it has no Config, and {count} of its "
            "records are not kafka-marshal's; check the name of the coordination topic",
            problems=(problem,),
        )
    has_records = any(world.next_offset for world in found)
    if has_records and not any(world.config for world in found):
        return TopicMisconfigured(
            "the coordination topic has records of kafka-marshal and no Config: Kafka "
            "has deleted its first records, as it does in a compacted topic; do not "
            "format it: see docs/reference.md, The log of __marshal has lost its start",
            problems=(problem,),
        )
    return TopicMisconfigured(
        "the coordination topic is not formatted; check its name, then run: "
        + format_command(topic),
        problems=(problem,),
    )


def require_cluster(config: Config, cluster_id: str | None) -> None:
    """Check the cluster that a Config was written for.

    Raises:
        WrongCluster: It was written for another cluster.
    """
    if cluster_id is not None and config.cluster_id != cluster_id:
        raise WrongCluster(
            f"the coordination topic was formatted for cluster "
            f"{config.cluster_id!r}, and this is cluster {cluster_id!r}; "
            "check the bootstrap servers",
            problems=(f"cluster_id is {cluster_id}, must be {config.cluster_id}",),
        )
