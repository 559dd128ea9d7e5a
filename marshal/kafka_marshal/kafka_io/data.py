"""Offsets of data partitions, consumer groups, and ``ports.DataLog`` over them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import attrs
from kafka import TopicPartition as KafkaTopicPartition
from kafka import errors as kafka_errors
from kafka.admin import OffsetSpec
from kafka.protocol.consumer import IsolationLevel
from kafka.structs import OffsetAndMetadata

from kafka_marshal.kafka_io.clients import AdminClient
from kafka_marshal.kafka_io.faults import Access, required_right
from kafka_marshal.kafka_io.reader import KafkaDataReader
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topic_rules import problems, set_command
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin, described
from kafka_marshal.outgoing import TransactionalWriter
from kafka_marshal.ports import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    DataLog,
    DataReader,
    LogRange,
    TopicInfo,
    WrongSetting,
)
from kafka_marshal.protocol.types import TopicPartition

LEVELS = {
    READ_UNCOMMITTED: IsolationLevel.READ_UNCOMMITTED,
    READ_COMMITTED: IsolationLevel.READ_COMMITTED,
}
T = TypeVar("T")

TIMEOUT_MS = 30_000
CLOSE_MS = 2_000
# States of a group without members (the same in KIP-848).
_IDLE_STATES = ("EMPTY", "DEAD")
_ABSENT = "ABSENT"
# Metadata of commits, which marks them as those of this package (PROTOCOL 5.7).
COMMIT_METADATA = "kafka-marshal"


class KafkaOffsets:
    """Queries offsets by start, end and time. Thread-safe, blocking.

    The first query connects.

    Args:
        settings: Connection.
        isolation_level: With ``read_committed`` a log ends at its last stable offset.
    """

    def __init__(
        self, settings: ConnectionConfig, *, isolation_level: str = READ_UNCOMMITTED
    ) -> None:
        self._admin = AdminClient(settings)
        self._level = LEVELS[isolation_level]

    def starts(
        self, partitions: Sequence[TopicPartition], timeout_ms: int
    ) -> dict[TopicPartition, int]:
        """Return the log start offset by partition."""
        spec = {each: int(OffsetSpec.EARLIEST) for each in partitions}
        return {p: o or 0 for p, o in self._query(spec, timeout_ms).items()}

    def ends(
        self, partitions: Sequence[TopicPartition], timeout_ms: int
    ) -> dict[TopicPartition, int]:
        """Return the log end offset by partition, at the isolation level."""
        spec = {each: int(OffsetSpec.LATEST) for each in partitions}
        return {p: o or 0 for p, o in self._query(spec, timeout_ms).items()}

    def known_ends(
        self, partitions: Collection[TopicPartition], timeout_ms: int
    ) -> dict[TopicPartition, int]:
        """Return the log end offset of each partition that can be queried.

        Partitions without a topic, a leader or the right to see it are absent.

        Raises:
            CoordinationError: There was no answer in time.
        """
        topics = sorted({each.topic for each in partitions})
        if not topics:
            return {}

        def request(admin: Any) -> dict[TopicPartition, int]:
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

        return self._admin.call(
            request,
            doing="Querying log ends",
            access=Access.READ,
            needs=required_right(Access.READ, *topics),
            timeout_ms=timeout_ms,
        )

    def at_times(
        self, times_ms: Mapping[TopicPartition, int], timeout_ms: int
    ) -> dict[TopicPartition, int | None]:
        """Return the first offset at or after each time; None if there is none."""
        return self._query(times_ms, timeout_ms)

    def close(self, timeout_ms: int) -> None:
        """Close the connection. Idempotent."""
        self._admin.close(timeout_ms=timeout_ms)

    def _query(
        self, specs: Mapping[TopicPartition, int], timeout_ms: int
    ) -> dict[TopicPartition, int | None]:
        if not specs:
            return {}
        places = {KafkaTopicPartition(*each): spec for each, spec in specs.items()}

        def request(admin: Any) -> dict[TopicPartition, int | None]:
            found = admin.list_partition_offsets(
                places, isolation_level=self._level, timeout_ms=timeout_ms
            )
            return {
                TopicPartition(*place): (
                    row.offset if row is not None and row.offset >= 0 else None
                )
                for place, row in found.items()
            }

        return self._admin.call(
            request,
            doing="Querying offsets of data partitions",
            access=Access.READ,
            needs=required_right(Access.READ, *{place.topic for place in specs}),
            timeout_ms=timeout_ms,
        )


@attrs.frozen
class GroupOffsets:
    """State and committed offsets of one of Kafka's own consumer groups.

    Attributes:
        group_id: The group.
        state: Kafka's state in capitals, or ABSENT.
        offsets: Committed offsets by partition.
    """

    group_id: str
    state: str
    offsets: Mapping[TopicPartition, int]

    @property
    def is_active(self) -> bool:
        """Whether it has members or is rebalancing."""
        return self.state not in (*_IDLE_STATES, _ABSENT)


class KafkaGroups:
    """Reads consumer groups. Thread-safe, blocking; the first call connects."""

    def __init__(self, settings: ConnectionConfig) -> None:
        self._admin = AdminClient(settings)

    def read(self, group_id: str, *, timeout_ms: int = TIMEOUT_MS) -> GroupOffsets:
        """Return state and committed offsets; an absent group has none.

        Raises:
            LogUnreadable: DESCRIBE on the group is missing.
            CoordinationError: The cluster did not answer.
        """

        def request(admin: Any) -> GroupOffsets:
            # The state first: if the group starts working later, its offsets differ
            # when they are read again.
            listed = admin.list_groups()
            states = {row["group_id"]: str(row["group_state"]) for row in listed}
            found = admin.list_group_offsets({group_id: None})[group_id]
            return GroupOffsets(
                group_id,
                states.get(group_id, _ABSENT).upper(),
                {
                    TopicPartition(*place): entry.offset
                    for place, entry in sorted(found.items())
                    if entry.offset >= 0
                },
            )

        return self._admin.call(
            request,
            doing=f"Querying the committed offsets of group {group_id}",
            access=Access.READ,
            needs=f"DESCRIBE on group {group_id}",
            timeout_ms=timeout_ms,
        )

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._admin.close(timeout_ms=CLOSE_MS)


class KafkaDataLog(DataLog):
    """Queries of data topics and group offsets. Thread-safe, blocking.

    The first query connects.

    Args:
        settings: Connection.
        admin: A client to use, and to close in the end; None for one of its own.
    """

    def __init__(
        self, settings: ConnectionConfig, *, admin: AdminClient | None = None
    ) -> None:
        self._settings = settings
        self._admin = admin or AdminClient(settings)

    def describe(
        self, topics: Sequence[str], timeout_ms: int
    ) -> Mapping[str, TopicInfo]:
        """Return partition count and id by topic; missing topics are absent."""
        if not topics:
            return {}
        names = sorted(set(topics))

        def request(admin: Any) -> dict[str, TopicInfo]:
            rows = [described(row) for row in admin.describe_topics(names)]
            return {
                row.name: TopicInfo(row.partition_count, row.topic_id)
                for row in rows
                if row.exists
            }

        return self._admin.call(
            request,
            doing=f"Describing topics {', '.join(names)}",
            access=Access.READ,
            needs=f"DESCRIBE on topic{'s' * (len(names) > 1)} {', '.join(names)}, or "
            "READ to consume",
            timeout_ms=timeout_ms,
        )

    def wrong_settings(
        self, topic: str, *, has_checkpoints: bool, timeout_ms: int
    ) -> Sequence[WrongSetting]:
        """Return the settings of a coordination topic that break PROTOCOL 2.1."""
        topics = KafkaTopicAdmin(self._settings, client=self._admin)
        found = topics.describe(topic, timeout_ms=timeout_ms)
        if not found.exists:
            return ()
        servers = self._settings.addresses
        # Members do not check the number of replicas; admins do.
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
        """Return the names of all visible topics, internal ones included."""

        def request(admin: Any) -> list[str]:
            return sorted(str(name) for name in admin.list_topics())

        return self._admin.call(
            request,
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

        def request(admin: Any, places: list[Any]) -> dict[TopicPartition, LogRange]:
            # Ends first; retention may then move a start above the end, hence max().
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

        return self._of_existing(
            partitions, request, doing="Querying the ranges", timeout_ms=timeout_ms
        )

    def ends(
        self,
        partitions: Sequence[TopicPartition],
        timeout_ms: int,
        *,
        isolation_level: str = READ_UNCOMMITTED,
    ) -> Mapping[TopicPartition, int]:
        """Return the log-end offset of each partition; see ``ports.DataLog``."""

        def request(admin: Any, places: list[Any]) -> dict[TopicPartition, int]:
            found = admin.list_partition_offsets(
                dict.fromkeys(places, OffsetSpec.LATEST),
                isolation_level=LEVELS[isolation_level],
                timeout_ms=timeout_ms,
            )
            return {TopicPartition(*place): found[place].offset for place in places}

        return self._of_existing(
            partitions, request, doing="Querying the ends", timeout_ms=timeout_ms
        )

    def _of_existing(
        self,
        partitions: Sequence[TopicPartition],
        request: Callable[[Any, list[Any]], dict[TopicPartition, T]],
        *,
        doing: str,
        timeout_ms: int,
    ) -> dict[TopicPartition, T]:
        """Make a request about partitions; repeat it without those that are missing."""
        if not partitions:
            return {}
        wanted = [KafkaTopicPartition(*each) for each in partitions]

        def call(admin: Any) -> dict[TopicPartition, T]:
            try:
                return request(admin, wanted)
            except kafka_errors.UnknownTopicOrPartitionError:
                places = _existing(admin, wanted)
                if len(places) == len(wanted):
                    raise
                return request(admin, places) if places else {}

        return self._admin.call(
            call,
            doing=f"{doing} of data partitions",
            access=Access.READ,
            needs=required_right(Access.READ, *{place.topic for place in partitions}),
            timeout_ms=timeout_ms,
        )

    def committed(
        self, group_id: str, partitions: Sequence[TopicPartition], *, timeout_ms: int
    ) -> Mapping[TopicPartition, int | None]:
        """Return the group's committed offsets in Kafka (None: no commit)."""
        if not partitions:
            return {}
        places = [KafkaTopicPartition(*each) for each in partitions]
        topics = {place.topic for place in partitions}

        def request(admin: Any) -> dict[TopicPartition, int | None]:
            found = admin.list_group_offsets({group_id: places})[group_id]
            offsets: dict[TopicPartition, int | None] = {}
            for place in places:
                entry = found.get(place)
                # -1: no commit.
                is_known = entry is not None and entry.offset >= 0
                offsets[TopicPartition(*place)] = entry.offset if is_known else None
            return offsets

        return self._admin.call(
            request,
            doing=f"Querying the committed offsets of group {group_id}",
            access=Access.READ,
            needs=f"DESCRIBE on group {group_id}",
            needs_on_topics=required_right(Access.READ, *topics),
            timeout_ms=timeout_ms,
        )

    def commit(
        self, group_id: str, offsets: Mapping[TopicPartition, int], *, timeout_ms: int
    ) -> None:
        """Mirror positions to the group's committed offsets (PROTOCOL 5.7).

        Raises:
            CoordinationError: The cluster did not answer, or the group has active
                members of Kafka's own protocol, which alone may commit.
        """
        if not offsets:
            return
        wanted = {
            KafkaTopicPartition(*place): OffsetAndMetadata(offset, COMMIT_METADATA, -1)
            for place, offset in offsets.items()
        }

        def request(admin: Any) -> None:
            results = admin.alter_group_offsets(group_id, wanted)
            for place, kind in results.items():
                if kind is not kafka_errors.NoError:
                    raise kind(f"{place.topic}-{place.partition}")

        self._admin.call(
            request,
            doing=f"Committing offsets of group {group_id}",
            access=Access.WRITE,
            needs=f"READ on group {group_id}",
            needs_on_topics=required_right(Access.READ, *{p.topic for p in offsets}),
            timeout_ms=timeout_ms,
        )

    def reader(self, *, isolation_level: str = READ_UNCOMMITTED) -> DataReader:
        """Return a new reader with nothing assigned; it connects when polled."""
        return KafkaDataReader(self._settings, isolation_level=isolation_level)

    def transactions(
        self, transactional_id: str, *, group_id: str, timeout_ms: int
    ) -> TransactionalWriter:
        """Return a producer, which fences every earlier one of the same id.

        It uses this log's connections. A key selects the same partition as in Java's
        clients.
        """
        from kafka_marshal.kafka_io.transactions import KafkaTransactions

        return KafkaTransactions(
            self._admin,
            transactional_id,
            group_id=group_id,
            timeout_ms=timeout_ms,
            coordination_topic=self._settings.coordination_topic,
        )

    def close(self, timeout_ms: int) -> None:
        """Close the connection, not the readers. Idempotent."""
        self._admin.close(timeout_ms=timeout_ms)


def _existing(admin: Any, places: Sequence[Any]) -> list[Any]:
    """Return the partitions that exist."""
    names = sorted({place.topic for place in places})
    rows = [described(row) for row in admin.describe_topics(names)]
    counts = {row.name: row.partition_count for row in rows if row.exists}
    return [place for place in places if place.partition < counts.get(place.topic, 0)]
