"""Topics: description, settings that break PROTOCOL 2.1, creation, replicas."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from uuid import UUID

import attrs
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType

from kafka_marshal.closing import Closing
from kafka_marshal.errors import TopicMisconfigured
from kafka_marshal.kafka_io.clients import AdminClient
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.translate import Access
from kafka_marshal.protocol.types import PARTITION_MAX

TIMEOUT_MS = 15_000
REPLICATION_WANTED = 3
MIN_INSYNC_WANTED = 2
WEEK_MS = 7 * 24 * 60 * 60 * 1000
# Settings of the coordination topic that PROTOCOL 2.1 fixes. A record has at most
# 48 KiB, so a message limit below 64 KiB could refuse some.
MESSAGE_BYTES_MIN = 64 * 1024
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
_DANGEROUS = (
    "cleanup.policy",
    "message.timestamp.type",
    "unclean.leader.election.enable",
)
TIMEOUT_MS = 15_000


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


@attrs.frozen(kw_only=True)
class Broker:
    """One broker of the cluster."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


@attrs.frozen
class ClusterInfo:
    """The cluster as described by itself.

    Attributes:
        cluster_id: Its id.
        controller_id: Node id of a broker that reaches the controller, or None.
        brokers: Live brokers, by node id.
    """

    cluster_id: str
    controller_id: int | None
    brokers: tuple[Broker, ...]


def coordination_configs(broker_count: int) -> dict[str, str]:
    """Return Kafka's settings for a new coordination topic (PROTOCOL 2.1)."""
    enough = broker_count >= REPLICATION_WANTED
    return {
        "cleanup.policy": "delete",
        # The broker decompresses, so no writer can exclude readers without its codec.
        "compression.type": "uncompressed",
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
        setting: The setting to change, if a setting repairs it.
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
            problems.append(
                Problem(
                    f"replication factor is {found.replication}, must be at least "
                    f"{REPLICATION_WANTED} in a cluster of {broker_count} brokers: the "
                    "loss of a broker could lose claims"
                )
            )
        if least is not None and least < MIN_INSYNC_WANTED:
            told = (
                f"{name} is {least}, must be at least {MIN_INSYNC_WANTED}: an "
                "acknowledged claim could be lost"
            )
            problems.append(Problem(told, name, str(MIN_INSYNC_WANTED)))
    if least is not None and found.replication and least > found.replication:
        told = (
            f"{name} is {least}, above the replication factor of "
            f"{found.replication}: nothing can be written"
        )
        enough = min(found.replication, MIN_INSYNC_WANTED)
        problems.append(Problem(told, name, str(enough)))
    return problems


def _deviations(configs: Mapping[str, str], names: Iterable[str]) -> list[Problem]:
    """Return a problem for each of these settings with another value."""
    found = []
    for name in names:
        value, why = _WANTED[name]
        actual = configs.get(name)
        if actual is None:
            told = f"{name} is not known, must be {value}: {why}"
        elif actual.lower() != value.lower():
            told = f"{name} is {actual}, must be {value}: {why}"
        else:
            continue
        found.append(Problem(told, name, value))
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
        told = f"retention.ms is {shown}, must be {rule}: long-held claims would expire"
        found.append(Problem(told, "retention.ms", "-1"))
    size = _number(configs, "retention.bytes")
    if size is not None and size != -1:
        told = f"retention.bytes is {size}, must be -1: long-held claims would expire"
        found.append(Problem(told, "retention.bytes", "-1"))
    largest = _number(configs, "max.message.bytes")
    if largest is not None and largest < MESSAGE_BYTES_MIN:
        told = (
            f"max.message.bytes is {largest}, must be at least {MESSAGE_BYTES_MIN}: "
            "large records would be refused"
        )
        found.append(Problem(told, "max.message.bytes", str(MESSAGE_BYTES_MIN)))
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


def _topic_id(raw: object) -> bytes | None:
    """Return a topic id as 16 bytes; None if absent or all zeros."""
    if raw is None:
        return None
    value = raw if isinstance(raw, UUID) else UUID(str(raw))
    return value.bytes if value.int else None


def described(row: Mapping[str, Any]) -> TopicDescription:
    """Return one topic of kafka-python's ``describe_topics``, without settings.

    Raises:
        KafkaError: The broker reported a fault for this topic.
    """
    kind = kafka_errors.for_code(row["error_code"])
    if kind is kafka_errors.UnknownTopicOrPartitionError:
        return TopicDescription(name=row["name"], exists=False)
    if kind is not kafka_errors.NoError:
        raise kind(f"topic {row['name']}")
    partitions = row["partitions"]
    return TopicDescription(
        name=row["name"],
        exists=True,
        partition_count=len(partitions),
        replication=min((len(p["replica_nodes"]) for p in partitions), default=0),
        leaderless=tuple(
            sorted(p["partition_index"] for p in partitions if p["leader_id"] < 0)
        ),
        in_sync=min((len(p["isr_nodes"]) for p in partitions), default=0),
        behind=tuple(
            sorted(
                p["partition_index"]
                for p in partitions
                if len(p["isr_nodes"]) < len(p["replica_nodes"])
            )
        ),
        leaders={p["partition_index"]: p["leader_id"] for p in partitions},
        topic_id=_topic_id(row.get("topic_id")),
    )


def describe_topic(
    client: AdminClient, topic: str, *, timeout_ms: int
) -> TopicDescription:
    """Describe a topic; see ``KafkaTopicAdmin.describe``."""
    deadline = time.monotonic() + timeout_ms / 1000
    found = _describe_bare(client, topic, timeout_ms=timeout_ms)
    if not found.exists:
        return found

    def request(admin: Any) -> dict[str, str]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        raw = admin.describe_configs([resource], config_filter="all")
        rows = raw["topic"][topic]
        if not rows:
            # kafka-python drops the error of the response together with its rows.
            raise kafka_errors.TopicAuthorizationFailedError(topic)
        return {name: str(rows[name]["value"]) for name in CONFIGS_READ if name in rows}

    configs = client.call(
        request,
        doing=f"Describing the settings of topic {topic}",
        access=Access.READ,
        needs=f"DESCRIBE_CONFIGS on topic {topic}",
        timeout_ms=max(0, int((deadline - time.monotonic()) * 1000)),
    )
    return attrs.evolve(found, configs=configs)


def _describe_bare(
    client: AdminClient, topic: str, *, timeout_ms: int
) -> TopicDescription:
    return client.call(
        lambda admin: described(admin.describe_topics([topic])[0]),
        doing=f"Describing topic {topic}",
        access=Access.READ,
        needs=f"DESCRIBE on topic {topic}",
        timeout_ms=timeout_ms,
    )


class KafkaTopicAdmin(Closing):
    """Describes and creates topics. Thread-safe, blocking, a context manager.

    The first call connects, or uses the connection of the client that is given.
    """

    def __init__(
        self, settings: ConnectionConfig, *, client: AdminClient | None = None
    ) -> None:
        self._settings = settings
        self._admin = client or AdminClient(settings)

    def cluster_id(self, *, timeout_ms: int = TIMEOUT_MS) -> str:
        """Return the cluster's id."""
        return self.cluster(timeout_ms=timeout_ms).cluster_id

    def cluster(self, *, timeout_ms: int = TIMEOUT_MS) -> ClusterInfo:
        """Return the cluster's id, controller and brokers.

        Raises:
            CoordinationError: There was no answer.
        """
        raw = self._admin.call(
            lambda admin: admin.describe_cluster(),
            doing="Describing the cluster",
            access=Access.READ,
            timeout_ms=timeout_ms,
        )
        controller = raw["controller_id"]
        brokers = [
            Broker(
                node_id=b["broker_id"],
                host=b["host"],
                port=b["port"],
                rack=b.get("rack"),
            )
            for b in raw["brokers"]
            if not b.get("is_fenced", False)
        ]
        return ClusterInfo(
            cluster_id=raw["cluster_id"],
            controller_id=controller if controller >= 0 else None,
            brokers=tuple(sorted(brokers, key=lambda broker: broker.node_id)),
        )

    def describe(self, topic: str, *, timeout_ms: int = TIMEOUT_MS) -> TopicDescription:
        """Describe a topic, which need not exist, with the settings that matter.

        Raises:
            LogUnreadable: This principal may not describe the topic.
            CoordinationError: There was no answer.
        """
        return describe_topic(self._admin, topic, timeout_ms=timeout_ms)

    def describe_bare(
        self, topic: str, *, timeout_ms: int = TIMEOUT_MS
    ) -> TopicDescription:
        """Describe a topic without its settings.

        Settings need the right to DESCRIBE_CONFIGS, which members may not have.

        Raises:
            LogUnreadable: This principal may not describe the topic.
            CoordinationError: There was no answer.
        """
        return _describe_bare(self._admin, topic, timeout_ms=timeout_ms)

    def create(
        self,
        topic: str,
        *,
        partitions: int,
        replication: int,
        configs: Mapping[str, str],
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        """Create a topic and wait until each partition has a leader.

        Args:
            topic: Name of the new topic.
            partitions: Number of partitions.
            replication: Number of replicas of each; -1 for the cluster's default.
            configs: Topic settings by Kafka's names.
            timeout_ms: Limit for the whole call.

        Raises:
            TopicMisconfigured: It exists, or the cluster refuses these settings.
            LogUnwritable: This principal may not create topics.
            CoordinationError: There was no answer; the topic may exist.
        """
        if not 0 < partitions <= PARTITION_MAX:
            raise TopicMisconfigured(f"A topic cannot have {partitions} partitions.")
        spec = {
            "num_partitions": partitions,
            "replication_factor": replication,
            "configs": dict(configs),
        }

        attempts: list[int] = []

        def request(admin: Any) -> None:
            attempts.append(1)
            raw = admin.create_topics(
                {topic: spec}, timeout_ms=timeout_ms, raise_errors=False
            )
            (row,) = raw["topics"]
            kind = kafka_errors.for_code(row["error_code"])
            # A retry after a lost response finds the topic that it created.
            is_ours = kind is kafka_errors.TopicAlreadyExistsError and len(attempts) > 1
            if kind is not kafka_errors.NoError and not is_ours:
                raise kind(row.get("error_message") or topic)
            admin.wait_for_topics([topic], timeout_ms=timeout_ms)

        self._admin.call(
            request,
            doing=f"Creating topic {topic}",
            access=Access.WRITE,
            needs=f"CREATE on topic {topic}",
            timeout_ms=timeout_ms,
        )

    def create_data_topic(
        self,
        topic: str,
        *,
        partitions: int,
        replication: int = -1,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        """Create a data topic with the cluster's default settings."""
        self.create(
            topic,
            partitions=partitions,
            replication=replication,
            configs={},
            timeout_ms=timeout_ms,
        )

    def create_coordination_topic(
        self, *, partitions: int, timeout_ms: int = TIMEOUT_MS
    ) -> None:
        """Create the coordination topic with the settings of PROTOCOL 2.1."""
        brokers = len(self.cluster(timeout_ms=timeout_ms).brokers)
        self.create(
            self._settings.coordination_topic,
            partitions=partitions,
            replication=min(brokers, REPLICATION_WANTED),
            configs=coordination_configs(brokers),
            timeout_ms=timeout_ms,
        )

    def close(self, *, timeout_ms: int = 2_000) -> None:
        """Close the connection. Idempotent."""
        self._admin.close(timeout_ms=timeout_ms)


@attrs.frozen(kw_only=True)
class Replicas:
    """Replicas of one partition.

    Attributes:
        partition: Its number.
        leader: Node id of the leader, or None.
        nodes: Node ids of all replicas, the preferred leader first.
        in_sync: Node ids of the in-sync replicas.
    """

    partition: int
    leader: int | None
    nodes: tuple[int, ...]
    in_sync: frozenset[int]


class KafkaReplicas(Closing):
    """Queries replicas and the controller. Thread-safe, blocking.

    The first call connects.
    """

    def __init__(self, settings: ConnectionConfig) -> None:
        self._admin = AdminClient(settings)

    def of(self, topic: str, *, timeout_ms: int = TIMEOUT_MS) -> tuple[Replicas, ...]:
        """Return the replicas of a topic by partition; none for a missing topic.

        Raises:
            CoordinationError: There was no answer.
        """

        def request(admin: Any) -> tuple[Replicas, ...]:
            row = admin.describe_topics([topic])[0]
            kind = kafka_errors.for_code(row["error_code"])
            if kind is kafka_errors.UnknownTopicOrPartitionError:
                return ()
            if kind is not kafka_errors.NoError:
                raise kind(f"topic {topic}")
            found = [
                Replicas(
                    partition=each["partition_index"],
                    leader=each["leader_id"] if each["leader_id"] >= 0 else None,
                    nodes=tuple(each["replica_nodes"]),
                    in_sync=frozenset(each["isr_nodes"]),
                )
                for each in row["partitions"]
            ]
            return tuple(sorted(found, key=lambda each: each.partition))

        return self._admin.call(
            request,
            doing=f"Describing the replicas of topic {topic}",
            access=Access.READ,
            needs=f"DESCRIBE on topic {topic}",
            timeout_ms=timeout_ms,
        )

    def controller(self, *, timeout_ms: int = TIMEOUT_MS) -> int | None:
        """Return the node id of the active controller, if any.

        Raises:
            CoordinationError: There was no answer.
        """

        def request(admin: Any) -> int | None:
            raw = admin.describe_metadata_quorum()
            leader: int = raw["topics"][0]["partitions"][0]["leader_id"]
            return leader if leader >= 0 else None

        return self._admin.call(
            request,
            doing="Querying the active controller",
            access=Access.READ,
            needs="DESCRIBE on the cluster",
            timeout_ms=timeout_ms,
        )

    def close(self, *, timeout_ms: int = TIMEOUT_MS) -> None:
        """Close the connection. Idempotent."""
        self._admin.close(timeout_ms=timeout_ms)
