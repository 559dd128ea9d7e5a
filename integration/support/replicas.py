"""Where a real cluster has the replicas of a topic, and its controller."""

from typing import Any

import attrs
from kafka import errors as kafka_errors

from kafka_marshal.closing import Closing
from kafka_marshal.kafka_io.clients import AdminClient
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.translate import Access

TIMEOUT_MS = 15_000


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
