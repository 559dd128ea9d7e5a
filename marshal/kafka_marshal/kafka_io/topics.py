"""Topics over kafka-python: description and creation."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import attrs
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType

from kafka_marshal.closing import Closing
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import LogUnreadable, TopicMisconfigured
from kafka_marshal.kafka_io.clients import AdminClient
from kafka_marshal.kafka_io.patches import describe_cluster
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topic_rules import (
    CONFIGS_READ,
    REPLICATION_WANTED,
    Broker,
    ClusterInfo,
    TopicDescription,
    coordination_configs,
)
from kafka_marshal.kafka_io.translate import Access
from kafka_marshal.kafka_io.writer import no_answer
from kafka_marshal.protocol.types import PARTITION_MAX

TIMEOUT_MS = 15_000


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
    operations = row.get("authorized_operations")
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
        # A principal that may describe the topic has an operation: none means unknown.
        can_write=not operations or "WRITE" in operations,
    )


def describe_log(
    settings: ConnectionConfig, *, client: AdminClient | None, timeout_ms: int
) -> tuple[str, TopicDescription]:
    """Return the cluster's id, and its description of the coordination topic.

    The description has no settings if this principal may not see them.

    Args:
        settings: Connection and name of the topic.
        client: A client that stays open; None for one of its own.
        timeout_ms: Limit for the whole call.

    Raises:
        LogUnreadable: This principal may not describe the topic.
        CoordinationError: There was no answer.
    """
    deadline = Deadline(timeout_ms)
    topic = settings.coordination_topic
    admin = KafkaTopicAdmin(settings, client=client)
    try:
        cluster_id = admin.cluster_id(timeout_ms=deadline.require_ms(no_answer))
        try:
            found = admin.describe(topic, timeout_ms=deadline.require_ms(no_answer))
        except LogUnreadable:
            # Members need not see the settings.
            found = admin.describe_bare(
                topic, timeout_ms=deadline.require_ms(no_answer)
            )
    finally:
        if client is None:
            admin.close()
    return cluster_id, found


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
            describe_cluster,
            doing="Describing the cluster",
            access=Access.READ,
            timeout_ms=timeout_ms,
        )
        controller = raw["controller_id"]
        brokers = [
            Broker(
                node_id=b["node_id"],
                host=b["host"],
                port=b["port"],
                rack=b.get("rack"),
            )
            for b in raw["brokers"]
        ]
        return ClusterInfo(
            cluster_id=raw["cluster_id"],
            controller_id=controller if controller >= 0 else None,
            brokers=tuple(sorted(brokers, key=lambda broker: broker.node_id)),
            has_fetch_by_id=raw["has_fetch_by_id"],
        )

    def describe(self, topic: str, *, timeout_ms: int = TIMEOUT_MS) -> TopicDescription:
        """Describe a topic, which need not exist, with settings in ``CONFIGS_READ``.

        Raises:
            LogUnreadable: This principal may not describe the topic.
            CoordinationError: There was no answer.
        """
        deadline = Deadline(timeout_ms)
        found = self.describe_bare(topic, timeout_ms=timeout_ms)
        if not found.exists:
            return found

        def request(admin: Any) -> dict[str, str]:
            resource = ConfigResource(ConfigResourceType.TOPIC, topic)
            raw = admin.describe_configs([resource], config_filter="all")
            rows = raw["topic"][topic]
            if not rows:
                # kafka-python drops the error of the response together with its rows.
                raise kafka_errors.TopicAuthorizationFailedError(topic)
            return {
                name: str(rows[name]["value"]) for name in CONFIGS_READ if name in rows
            }

        configs = self._admin.call(
            request,
            doing=f"Describing the settings of topic {topic}",
            access=Access.READ,
            needs=f"DESCRIBE_CONFIGS on topic {topic}",
            timeout_ms=deadline.left_ms,
        )
        return attrs.evolve(found, configs=configs)

    def describe_bare(
        self, topic: str, *, timeout_ms: int = TIMEOUT_MS
    ) -> TopicDescription:
        """Describe a topic without its settings.

        Settings need the right to DESCRIBE_CONFIGS, which members may not have.

        Raises:
            LogUnreadable: This principal may not describe the topic.
            CoordinationError: There was no answer.
        """
        return self._admin.call(
            lambda admin: described(admin.describe_topics([topic])[0]),
            doing=f"Describing topic {topic}",
            access=Access.READ,
            needs=f"DESCRIBE on topic {topic}",
            timeout_ms=timeout_ms,
        )

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

        deadline = Deadline(timeout_ms)
        self._admin.call(
            request,
            doing=f"Creating topic {topic}",
            access=Access.WRITE,
            needs=f"CREATE on topic {topic}",
            timeout_ms=timeout_ms,
        )
        self._wait_for_leaders(topic, count=partitions, deadline=deadline)

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

    def add_partitions(
        self,
        topic: str,
        *,
        count: int,
        timeout_ms: int = TIMEOUT_MS,
        validate_only: bool = False,
    ) -> None:
        """Add partitions to a topic and wait until each one has a leader.

        Args:
            topic: The topic.
            count: New total number of partitions.
            timeout_ms: Limit for the whole call.
            validate_only: Whether the cluster only checks whether it would add them.

        Raises:
            TopicMisconfigured: The cluster refuses that number.
            LogUnwritable: This principal may not alter the topic.
            CoordinationError: There was no answer; they may have been added.
        """

        def request(admin: Any) -> None:
            # A retry after a lost response finds the partitions that it added.
            if described(admin.describe_topics([topic])[0]).partition_count < count:
                admin.create_partitions(
                    {topic: count}, timeout_ms=timeout_ms, validate_only=validate_only
                )

        deadline = Deadline(timeout_ms)
        self._admin.call(
            request,
            doing=f"Adding partitions to topic {topic}",
            access=Access.WRITE,
            needs=f"ALTER on topic {topic}",
            timeout_ms=timeout_ms,
        )
        if not validate_only:
            self._wait_for_leaders(topic, count=count, deadline=deadline)

    def _wait_for_leaders(self, topic: str, *, count: int, deadline: Deadline) -> None:
        """Wait until brokers know the partitions of a topic, and each has a leader."""

        def request(admin: Any) -> None:
            found = described(admin.describe_topics([topic])[0])
            if found.partition_count < count or found.leaderless:
                led = found.partition_count - len(found.leaderless)
                raise kafka_errors.LeaderNotAvailableError(
                    f"{led} of {count} partitions have one"
                )

        self._admin.call(
            request,
            doing=f"Waiting for the leaders of topic {topic}",
            access=Access.READ,
            needs=f"DESCRIBE on topic {topic}",
            timeout_ms=deadline.require_ms(no_answer),
        )

    def close(self, *, timeout_ms: int = 2_000) -> None:
        """Close the connection. Idempotent."""
        self._admin.close(timeout_ms=timeout_ms)
