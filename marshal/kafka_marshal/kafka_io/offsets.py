"""Offsets of data partitions: what can be read now, and where a time begins."""

from collections.abc import Collection, Mapping, Sequence

from kafka import TopicPartition as KafkaTopicPartition
from kafka.admin import OffsetSpec
from kafka.protocol.consumer import IsolationLevel

from kafka_marshal.kafka_io.faults import Access, needed
from kafka_marshal.kafka_io.lookups import Lookups
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.untyped import Untyped
from kafka_marshal.ports import READ_COMMITTED, READ_UNCOMMITTED
from kafka_marshal.protocol.types import TopicPartition

LEVELS = {
    READ_UNCOMMITTED: IsolationLevel.READ_UNCOMMITTED,
    READ_COMMITTED: IsolationLevel.READ_COMMITTED,
}


class KafkaOffsets:
    """Asks where logs start, end and reach a time. Thread-safe, blocking."""

    def __init__(
        self, settings: ConnectionSettings, *, isolation_level: str = READ_UNCOMMITTED
    ) -> None:
        """Remember how to connect; the first question does.

        Args:
            settings: Where the cluster is.
            isolation_level: With ``read_committed`` a log ends where its first open
                transaction begins: no reader gets further.
        """
        self._lookups = Lookups(settings)
        self._level = LEVELS[isolation_level]

    def starts(
        self, partitions: Sequence[TopicPartition], timeout_ms: int
    ) -> dict[TopicPartition, int]:
        """Return the first offset that exists, by partition."""
        spec = {each: int(OffsetSpec.EARLIEST) for each in partitions}
        return {p: o or 0 for p, o in self._ask(spec, timeout_ms).items()}

    def ends(
        self, partitions: Sequence[TopicPartition], timeout_ms: int
    ) -> dict[TopicPartition, int]:
        """Return the next offset that a reader cannot have yet, by partition."""
        spec = {each: int(OffsetSpec.LATEST) for each in partitions}
        return {p: o or 0 for p, o in self._ask(spec, timeout_ms).items()}

    def known_ends(
        self, partitions: Collection[TopicPartition], timeout_ms: int
    ) -> dict[TopicPartition, int]:
        """Return where logs end, of the partitions that can be asked at all.

        One without a topic, a leader or the right to see it is absent; none of them
        spoils the answer for the others.

        Raises:
            CoordinationError: There was no answer in time.
        """
        topics = sorted({each.topic for each in partitions})
        if not topics:
            return {}

        def ask(admin: Untyped) -> dict[TopicPartition, int]:
            led = {
                TopicPartition(row["name"], found["partition_index"])
                for row in admin.describe_topics(topics)
                for found in row["partitions"]
                if found["leader_id"] >= 0
            }
            places = [KafkaTopicPartition(*each) for each in partitions if each in led]
            if not places:
                return {}
            ends = admin.list_partition_offsets(
                dict.fromkeys(places, OffsetSpec.LATEST),
                isolation_level=self._level,
                timeout_ms=timeout_ms,
            )
            return {TopicPartition(*place): row.offset for place, row in ends.items()}

        return self._lookups.call(
            ask,
            doing="Asking where logs end",
            access=Access.READ,
            needs=needed(Access.READ, *topics),
            timeout_ms=timeout_ms,
        )

    def at_times(
        self, times_ms: Mapping[TopicPartition, int], timeout_ms: int
    ) -> dict[TopicPartition, int | None]:
        """Return the first offset that is not older; None where all are."""
        return self._ask(times_ms, timeout_ms)

    def close(self, timeout_ms: int) -> None:
        """Let go of the connection. Idempotent."""
        self._lookups.close(timeout_ms=timeout_ms)

    def _ask(
        self, specs: Mapping[TopicPartition, int], timeout_ms: int
    ) -> dict[TopicPartition, int | None]:
        if not specs:
            return {}
        places = {KafkaTopicPartition(*each): spec for each, spec in specs.items()}

        def ask(admin: Untyped) -> dict[TopicPartition, int | None]:
            found = admin.list_partition_offsets(
                places, isolation_level=self._level, timeout_ms=timeout_ms
            )
            return {
                TopicPartition(*place): (
                    row.offset if row is not None and row.offset >= 0 else None
                )
                for place, row in found.items()
            }

        return self._lookups.call(
            ask,
            doing="Asking for offsets of data partitions",
            access=Access.READ,
            needs=needed(Access.READ, *{place.topic for place in specs}),
            timeout_ms=timeout_ms,
        )
