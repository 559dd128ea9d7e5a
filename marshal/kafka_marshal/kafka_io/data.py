"""Data topics and group offsets on a real cluster: ``ports.DataLog``."""

from collections.abc import Mapping, Sequence

from kafka import TopicPartition as KafkaTopicPartition
from kafka import errors as kafka_errors
from kafka.admin import OffsetSpec
from kafka.structs import OffsetAndMetadata

from kafka_marshal.kafka_io.faults import Access, needed
from kafka_marshal.kafka_io.lookups import Lookups
from kafka_marshal.kafka_io.offsets import LEVELS
from kafka_marshal.kafka_io.reader import KafkaDataReader
from kafka_marshal.kafka_io.settings import ConnectionSettings
from kafka_marshal.kafka_io.topics import (
    describe_topic,
    described,
    problems,
    set_command,
)
from kafka_marshal.kafka_io.untyped import Untyped
from kafka_marshal.ports import (
    READ_UNCOMMITTED,
    DataLog,
    DataReader,
    LogRange,
    TopicInfo,
    WrongSetting,
)
from kafka_marshal.protocol.types import TopicPartition

# Told apart from other writers of group offsets by whoever looks (PROTOCOL 5.7).
COMMIT_METADATA = "kafka-marshal"


class KafkaDataLog(DataLog):
    """Look-ups about data topics and group offsets. Thread-safe, blocking.

    The first question opens the connection.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        client_rack: str = "",
    ) -> None:
        """Remember how to connect and read.

        Args:
            settings: Where the cluster is.
            client_rack: Rack of this process, to fetch from a near replica.
        """
        self._settings = settings
        self._client_rack = client_rack
        self._lookups = Lookups(settings)

    def describe(
        self, topics: Sequence[str], timeout_ms: int
    ) -> Mapping[str, TopicInfo]:
        """Return what is known of each topic; a topic that does not exist is absent."""
        if not topics:
            return {}
        names = sorted(set(topics))

        def ask(admin: Untyped) -> dict[str, TopicInfo]:
            rows = [described(row) for row in admin.describe_topics(names)]
            return {
                row.name: TopicInfo(row.partition_count, row.topic_id)
                for row in rows
                if row.exists
            }

        return self._lookups.call(
            ask,
            doing=f"Describing topics {', '.join(names)}",
            access=Access.READ,
            needs=needed(Access.READ, *names),
            timeout_ms=timeout_ms,
        )

    def wrong_settings(
        self, topic: str, *, has_checkpoints: bool, timeout_ms: int
    ) -> Sequence[WrongSetting]:
        """Return which settings of a coordination topic break PROTOCOL 2.1."""
        found = describe_topic(self._lookups, topic, timeout_ms=timeout_ms)
        if not found.exists:
            return ()
        servers = self._settings.addresses
        # How many copies there can be, a member does not ask; an admin does.
        wrong = problems(found, broker_count=1, has_checkpoints=has_checkpoints)
        return [
            WrongSetting(
                each.setting,
                each.text,
                set_command(topic, servers, setting=each.setting, value=each.value),
            )
            for each in wrong
            if each.setting is not None
        ]

    def topics(self, timeout_ms: int) -> Sequence[str]:
        """Return the names of all topics that may be seen, internal ones included."""

        def ask(admin: Untyped) -> list[str]:
            return sorted(str(name) for name in admin.list_topics())

        return self._lookups.call(
            ask,
            doing="Listing topics",
            access=Access.READ,
            timeout_ms=timeout_ms,
        )

    def ranges(
        self,
        partitions: Sequence[TopicPartition],
        timeout_ms: int,
        *,
        isolation_level: str = READ_UNCOMMITTED,
    ) -> Mapping[TopicPartition, LogRange]:
        """Return log-start and log-end offsets; see ``ports.DataLog``."""
        if not partitions:
            return {}
        wanted = [KafkaTopicPartition(*each) for each in partitions]

        def ask(admin: Untyped) -> dict[TopicPartition, LogRange]:
            try:
                return ask_of(admin, wanted)
            except kafka_errors.UnknownTopicOrPartitionError:
                places = _existing(admin, wanted)
                if len(places) == len(wanted):
                    raise
                return ask_of(admin, places) if places else {}

        def ask_of(
            admin: Untyped, places: list[Untyped]
        ) -> dict[TopicPartition, LogRange]:
            # The end first: a start read later is never above it by retention.
            ends = admin.list_partition_offsets(
                dict.fromkeys(places, OffsetSpec.LATEST),
                isolation_level=LEVELS[isolation_level],
                timeout_ms=timeout_ms,
            )
            starts = admin.list_partition_offsets(
                dict.fromkeys(places, OffsetSpec.EARLIEST), timeout_ms=timeout_ms
            )
            return {
                TopicPartition(*place): LogRange(
                    starts[place].offset, max(starts[place].offset, ends[place].offset)
                )
                for place in places
            }

        return self._lookups.call(
            ask,
            doing="Asking for the ranges of data partitions",
            access=Access.READ,
            needs=needed(Access.READ, *{place.topic for place in partitions}),
            timeout_ms=timeout_ms,
        )

    def ends(
        self, partitions: Sequence[TopicPartition], timeout_ms: int
    ) -> Mapping[TopicPartition, int]:
        """Return the next offset to be written of each partition."""
        if not partitions:
            return {}
        places = [KafkaTopicPartition(*each) for each in partitions]

        def ask(admin: Untyped) -> dict[TopicPartition, int]:
            found = admin.list_partition_offsets(
                dict.fromkeys(places, OffsetSpec.LATEST), timeout_ms=timeout_ms
            )
            return {TopicPartition(*place): found[place].offset for place in places}

        return self._lookups.call(
            ask,
            doing="Asking for the ends of data partitions",
            access=Access.READ,
            needs=needed(Access.READ, *{place.topic for place in partitions}),
            timeout_ms=timeout_ms,
        )

    def committed(
        self, group_id: str, partitions: Sequence[TopicPartition], *, timeout_ms: int
    ) -> Mapping[TopicPartition, int | None]:
        """Return the group's committed offsets in Kafka (None: no commit)."""
        if not partitions:
            return {}
        places = [KafkaTopicPartition(*each) for each in partitions]

        def ask(admin: Untyped) -> dict[TopicPartition, int | None]:
            found = admin.list_group_offsets({group_id: places})[group_id]
            offsets: dict[TopicPartition, int | None] = {}
            for place in places:
                entry = found.get(place)
                # Kafka says -1 where there is no commit.
                is_known = entry is not None and entry.offset >= 0
                offsets[TopicPartition(*place)] = entry.offset if is_known else None
            return offsets

        return self._lookups.call(
            ask,
            doing=f"Asking for the committed offsets of group {group_id}",
            access=Access.READ,
            needs=f"DESCRIBE on group {group_id}",
            timeout_ms=timeout_ms,
        )

    def commit(
        self, group_id: str, offsets: Mapping[TopicPartition, int], *, timeout_ms: int
    ) -> None:
        """Mirror positions to the group's committed offsets (PROTOCOL 5.7).

        Raises:
            CoordinationError: The cluster did not answer, or the group has
                active members in Kafka's own sense, whose commits count alone.
        """
        if not offsets:
            return
        wanted = {
            KafkaTopicPartition(*place): OffsetAndMetadata(offset, COMMIT_METADATA, -1)
            for place, offset in offsets.items()
        }

        def ask(admin: Untyped) -> None:
            results = admin.alter_group_offsets(group_id, wanted)
            for place, kind in results.items():
                if kind is not kafka_errors.NoError:
                    raise kind(f"{place.topic}-{place.partition}")

        self._lookups.call(
            ask,
            doing=f"Committing offsets of group {group_id}",
            access=Access.WRITE,
            needs=f"READ on group {group_id}",
            timeout_ms=timeout_ms,
        )

    def reader(self, *, isolation_level: str = READ_UNCOMMITTED) -> DataReader:
        """Return a new reader with nothing assigned; it connects when polled."""
        return KafkaDataReader(
            self._settings,
            isolation_level=isolation_level,
            client_rack=self._client_rack,
        )

    def close(self, timeout_ms: int) -> None:
        """Let go of the connection; readers live on. Idempotent."""
        self._lookups.close(timeout_ms=timeout_ms)


def _existing(admin: Untyped, places: Sequence[Untyped]) -> list[Untyped]:
    """Return those of some partitions that exist."""
    names = sorted({place.topic for place in places})
    rows = [described(row) for row in admin.describe_topics(names)]
    counts = {row.name: row.partition_count for row in rows if row.exists}
    return [place for place in places if place.partition < counts.get(place.topic, 0)]
