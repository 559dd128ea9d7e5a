"""The interface of ``transactions`` to a Kafka client that writes transactions."""

from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import TopicPartition

MURMUR2_RANDOM = "murmur2_random"
"""librdkafka's partitioner that chooses as Java's clients and kafka-python do."""
PARTITIONERS = (
    MURMUR2_RANDOM,
    "consistent_random",
    "fnv1a_random",
    "murmur2",
    "consistent",
    "fnv1a",
    "random",
)


class Outgoing(NamedTuple):
    """A record to be written.

    Attributes:
        topic: Target topic.
        key: Key; it selects the partition, if ``partition`` is None.
        value: Value.
        headers: Headers.
        partition: Partition of the target topic; None lets the key select it.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None


def require_data_topics(topics: Collection[str], coordination_topic: str) -> None:
    """Check that no record is for the coordination topic.

    Raises:
        ConfigurationError: A record is; it could only damage the log (PROTOCOL 2.1).
    """
    if coordination_topic in topics:
        raise ConfigurationError(
            f"{coordination_topic!r} is the coordination topic, to which no output may "
            "be written; send to another topic",
            setting="topic",
        )


class SourceProgress(NamedTuple):
    """How far the transactions of a transactional id have processed a partition.

    Attributes:
        position: Next offset of the source partition to process.
        metadata: The text that was written with the position.
    """

    position: int
    metadata: str


class TransactionalWriter(Protocol):
    """A producer with a transactional id, which also stores progress. For one thread.

    Opening it fences every earlier producer of the same id.
    """

    @property
    def is_outdated(self) -> bool:
        """Whether its connections fail, but those of a new writer may not."""
        return False

    def progress(
        self, partition: TopicPartition, *, timeout_ms: int
    ) -> SourceProgress | None:
        """Return what the last committed transaction wrote, None before the first.

        Args:
            partition: Source partition.
            timeout_ms: Limit. Implementations may wait longer: a second, or as long
                as a transaction may take.

        Raises:
            MarshalError: The cluster did not answer.
        """
        ...

    def write(
        self,
        records: Iterable[Outgoing],
        *,
        partition: TopicPartition,
        position: int,
        metadata: str = "",
    ) -> None:
        """Write records and the progress of a source partition in one transaction.

        Raises:
            ClaimLost: A later producer has this id; nothing was written.
            ConfigurationError: A record is for the coordination topic; nothing was
                written.
            MarshalError: The outcome is unknown. Open again, and check the progress.
        """
        ...

    def close(self) -> None:
        """Close; an open transaction is aborted. Idempotent."""
        ...
