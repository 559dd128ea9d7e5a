"""Descriptions of topics, and checks of their settings by PROTOCOL 2.1.

Needs no client library, so each transport can import it without the other's library.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import attrs

from kafka_marshal.addresses import bracketed

REPLICATION_WANTED = 3
REPLICATION = "replication factor"
MIN_INSYNC_WANTED = 2
WEEK_MS = 7 * 24 * 60 * 60 * 1000
# Settings of the coordination topic that PROTOCOL 2.1 fixes. A record has at most
# 48 KiB, so a message limit below 64 KiB could refuse some. New topics get Kafka's
# default: producers of earlier releases make batches of up to 1 MB.
MESSAGE_BYTES_MIN = 64 * 1024
MESSAGE_BYTES = 1_048_588
CONFIGS_READ = (
    "cleanup.policy",
    "compression.type",
    "max.message.bytes",
    "message.timestamp.type",
    "min.insync.replicas",
    "remote.storage.enable",
    "retention.bytes",
    "retention.ms",
    "unclean.leader.election.enable",
)
_WANTED = {
    "cleanup.policy": ("delete", "compaction drops records that the fold needs"),
    "compression.type": (
        "uncompressed",
        "a writer could shut out readers that lack its codec",
    ),
    "message.timestamp.type": (
        "LogAppendTime",
        "clients could set the time that claims are judged by",
    ),
    "unclean.leader.election.enable": ("false", "acknowledged claims could be lost"),
}
_DELETED = "records of claims that are still held would be deleted"
_DANGEROUS = (
    "cleanup.policy",
    "message.timestamp.type",
    "unclean.leader.election.enable",
)


@attrs.frozen(kw_only=True)
class TopicDescription:
    """A topic as described by the cluster.

    Attributes:
        name: The topic.
        exists: Whether it exists; if not, everything else is empty.
        partition_count: Number of partitions.
        replication: Smallest number of replicas of any partition.
        leaderless: Partitions without a leader.
        in_sync: Smallest number of in-sync replicas of any partition.
        behind: Partitions with replicas that are not in sync.
        leaders: Node ids of leaders by partition.
        configs: The settings in ``CONFIGS_READ`` as text; empty if not requested or
            not permitted.
        topic_id: 16 bytes, or None from brokers without topic ids.
        can_write: Whether this principal may write to it; True if it is not known.
    """

    name: str
    exists: bool = attrs.field(kw_only=True)
    partition_count: int = attrs.field(default=0, kw_only=True)
    replication: int = attrs.field(default=0, kw_only=True)
    leaderless: tuple[int, ...] = attrs.field(default=(), kw_only=True)
    in_sync: int = attrs.field(default=0, kw_only=True)
    behind: tuple[int, ...] = attrs.field(default=(), kw_only=True)
    leaders: Mapping[int, int] = attrs.field(factory=dict, kw_only=True)
    configs: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)
    topic_id: bytes | None = attrs.field(default=None, kw_only=True)
    can_write: bool = attrs.field(default=True, kw_only=True)


@attrs.frozen(kw_only=True)
class Broker:
    """One broker of the cluster."""

    node_id: int
    host: str
    port: int
    rack: str | None = None

    @property
    def address(self) -> str:
        """Its ``host:port``, which ``bootstrap_servers`` accepts; IPv6 has brackets."""
        return f"{bracketed(self.host)}:{self.port}"


@attrs.frozen
class ClusterInfo:
    """The cluster as described by itself.

    Attributes:
        cluster_id: Its id.
        controller_id: Node id of a broker that reaches the controller, or None.
        brokers: Live brokers, by node id.
        has_fetch_by_id: Whether brokers can be asked for a topic by its id: not before
            Kafka 3.1.
    """

    cluster_id: str
    controller_id: int | None
    brokers: tuple[Broker, ...]
    has_fetch_by_id: bool = True


def coordination_configs(broker_count: int) -> dict[str, str]:
    """Return Kafka's settings for a new coordination topic (PROTOCOL 2.1)."""
    enough = broker_count >= REPLICATION_WANTED
    return {
        "cleanup.policy": "delete",
        # The broker decompresses, so no writer can exclude readers without its codec.
        "compression.type": "uncompressed",
        # Brokers may have another default.
        "max.message.bytes": str(MESSAGE_BYTES),
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "unclean.leader.election.enable": "false",
        "min.insync.replicas": str(MIN_INSYNC_WANTED if enough else 1),
    }


def _number(configs: Mapping[str, str], name: str) -> int | None:
    """Return a setting as an integer, None if absent or not a number."""
    try:
        return int(configs[name])
    except (KeyError, ValueError):
        return None


class Problem(NamedTuple):
    """A topic that breaks a rule, and its repair.

    Attributes:
        text: What is wrong, what is required and why.
        setting: The setting to change, if a setting repairs it; or ``REPLICATION``.
        value: The required value.
    """

    text: str
    setting: str | None = None
    value: str = ""


def _replication_problems(found: TopicDescription, broker_count: int) -> list[Problem]:
    """Return problems with the number of replicas."""
    problems = []
    name = "min.insync.replicas"
    least = _number(found.configs, name)
    if broker_count >= REPLICATION_WANTED:
        if found.replication < REPLICATION_WANTED:
            text = (
                f"{REPLICATION} is {found.replication}, must be at least "
                f"{REPLICATION_WANTED} in a cluster of {broker_count} brokers: the "
                "loss of a broker could lose claims"
            )
            problems.append(Problem(text, REPLICATION, str(REPLICATION_WANTED)))
        if least is not None and least < MIN_INSYNC_WANTED:
            text = (
                f"{name} is {least}, must be at least {MIN_INSYNC_WANTED}: an "
                "acknowledged claim could be lost"
            )
            problems.append(Problem(text, name, str(MIN_INSYNC_WANTED)))
    if least is not None and found.replication and least > found.replication:
        text = (
            f"{name} is {least}, above the replication factor of "
            f"{found.replication}: nothing can be written"
        )
        enough = min(found.replication, MIN_INSYNC_WANTED)
        problems.append(Problem(text, name, str(enough)))
    return problems


def _deviations(configs: Mapping[str, str], names: Iterable[str]) -> list[Problem]:
    """Return a problem for each of these settings with another value."""
    found = []
    for name in names:
        value, why = _WANTED[name]
        actual = configs.get(name)
        if actual is None:
            text = f"{name} is not known, must be {value}: {why}"
        elif actual.lower() != value.lower():
            text = f"{name} is {actual}, must be {value}: {why}"
        else:
            continue
        found.append(Problem(text, name, value))
    return found


def dangers(description: TopicDescription) -> tuple[str, ...]:
    """Name the settings that break the guarantees of claims at once.

    A subset of ``problems``.
    """
    found = _deviations(description.configs, _DANGEROUS)
    return tuple(problem.text for problem in found)


def is_retention_finite(description: TopicDescription) -> bool:
    """Return whether records are deleted by age."""
    return (_number(description.configs, "retention.ms") or -1) != -1


def problems(
    description: TopicDescription,
    *,
    broker_count: int,
    has_checkpoints: bool = False,
) -> tuple[Problem, ...]:
    """Name every setting of a coordination topic that breaks PROTOCOL 2.1.

    Args:
        description: The topic.
        broker_count: Number of brokers in the cluster.
        has_checkpoints: Whether the log has checkpoints, with which retention may be
            finite (at least a week).
    """
    if not description.exists:
        return (Problem(f"topic {description.name} does not exist"),)
    configs = description.configs
    found = _deviations(configs, _WANTED)
    retention = _number(configs, "retention.ms")
    is_enough = retention == -1 or (
        has_checkpoints and retention is not None and retention >= WEEK_MS
    )
    if not is_enough:
        shown = configs.get("retention.ms", "not known")
        rule = f"-1 or at least {WEEK_MS}" if has_checkpoints else "-1"
        text = f"retention.ms is {shown}, must be {rule}: {_DELETED}"
        found.append(Problem(text, "retention.ms", "-1"))
    size = _number(configs, "retention.bytes")
    if size is not None and size != -1:
        text = f"retention.bytes is {size}, must be -1: {_DELETED}"
        found.append(Problem(text, "retention.bytes", "-1"))
    largest = _number(configs, "max.message.bytes")
    if largest is not None and largest < MESSAGE_BYTES_MIN:
        text = (
            f"max.message.bytes is {largest}, must be at least {MESSAGE_BYTES_MIN}: "
            "large records would be refused"
        )
        found.append(Problem(text, "max.message.bytes", str(MESSAGE_BYTES_MIN)))
    found += _replication_problems(description, broker_count)
    found += [
        Problem(f"partition {each} has no leader") for each in description.leaderless
    ]
    return tuple(found)


def set_command(topic: str, servers: str, *, setting: str, value: str) -> str:
    """Return the command of Kafka's own tools that sets a setting of a topic.

    Args:
        topic: The topic.
        servers: Bootstrap addresses, with commas between.
        setting: Name of the setting.
        value: New value.
    """
    return (
        f"kafka-configs --bootstrap-server {servers} --alter --entity-type topics "
        f"--entity-name {topic} --add-config {setting}={value}"
    )
