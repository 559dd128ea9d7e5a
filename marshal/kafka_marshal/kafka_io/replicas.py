"""Who leads partitions and who follows them, for those who look after brokers."""

import attrs
from kafka import errors as kafka_errors

from kafka_marshal.closing import Closing
from kafka_marshal.kafka_io.lookups import Lookups
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.translate import Access
from kafka_marshal.kafka_io.untyped import Untyped

TIMEOUT_MS = 15_000


@attrs.frozen
class Replicas:
    """Where the copies of one partition are, as the brokers tell it.

    Attributes:
        partition: Its number.
        leader: Node id of the broker that leads it, or None.
        nodes: Node ids of all brokers that have a copy, the preferred one first.
        in_sync: Those whose copy is complete.
    """

    partition: int
    leader: int | None
    nodes: tuple[int, ...]
    in_sync: frozenset[int]


class KafkaReplicas(Closing):
    """Looks at copies and at the controllers. Thread-safe, blocking."""

    def __init__(self, settings: ConnectionSettings) -> None:
        """Remember how to connect; the first question opens the connection."""
        self._lookups = Lookups(settings)

    def of(self, topic: str, *, timeout_ms: int = TIMEOUT_MS) -> tuple[Replicas, ...]:
        """Return where each partition of a topic has its copies.

        Args:
            topic: Name of the topic.
            timeout_ms: When to give up.

        Returns:
            Its partitions by number; none where there is no such topic.

        Raises:
            CoordinationError: There was no answer.
        """

        def ask(admin: Untyped) -> tuple[Replicas, ...]:
            row = admin.describe_topics([topic])[0]
            kind = kafka_errors.for_code(row["error_code"])
            if kind is kafka_errors.UnknownTopicOrPartitionError:
                return ()
            if kind is not kafka_errors.NoError:
                raise kind(f"topic {topic}")
            found = [
                Replicas(
                    each["partition_index"],
                    each["leader_id"] if each["leader_id"] >= 0 else None,
                    tuple(each["replica_nodes"]),
                    frozenset(each["isr_nodes"]),
                )
                for each in row["partitions"]
            ]
            return tuple(sorted(found, key=lambda each: each.partition))

        return self._lookups.call(
            ask,
            doing=f"Looking at the copies of topic {topic}",
            access=Access.READ,
            needs=f"DESCRIBE on topic {topic}",
            timeout_ms=timeout_ms,
        )

    def controller(self, *, timeout_ms: int = TIMEOUT_MS) -> int | None:
        """Return the node id of the controller that leads the others, if any.

        Raises:
            CoordinationError: There was no answer.
        """

        def ask(admin: Untyped) -> int | None:
            raw = admin.describe_metadata_quorum()
            leader: int = raw["topics"][0]["partitions"][0]["leader_id"]
            return leader if leader >= 0 else None

        return self._lookups.call(
            ask,
            doing="Looking for the active controller",
            access=Access.READ,
            needs="DESCRIBE on the cluster",
            timeout_ms=timeout_ms,
        )

    def close(self, *, timeout_ms: int = TIMEOUT_MS) -> None:
        """Close the connection. Idempotent."""
        self._lookups.close(timeout_ms=timeout_ms)
