"""Data topics and group offsets of a ``FakeKafka``."""

from collections.abc import Iterable, Mapping, Sequence

from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import (
    ClaimLost,
    CoordinationError,
    InvalidTransition,
    PositionError,
    UnknownTopicId,
)
from kafka_marshal.outgoing import Outgoing, SourceProgress, TransactionalWriter
from kafka_marshal.ports import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    DataLog,
    DataReader,
    LogRange,
    Record,
    TopicInfo,
    WrongSetting,
)
from kafka_marshal.protocol.types import Token, TopicPartition
from simulator.fakelog import FakeKafka


class FakeDataLog(DataLog):
    """One client's look-ups about data topics and group offsets.

    Attributes:
        cut: Whether the network between this client and the cluster is cut;
            its readers share it.
        wrong: Wrong settings of coordination topics; a test sets them, for all clients
            or for one.
    """

    wrong: Sequence[WrongSetting] = ()

    def __init__(self, cluster: FakeKafka) -> None:
        """Open a session; this cannot fail."""
        self.cut = False
        self._cluster = cluster
        self._is_closed = False

    def describe(
        self, topics: Sequence[str], timeout_ms: int
    ) -> Mapping[str, TopicInfo]:
        """Describe topics; a topic that does not exist is absent."""
        with self._cluster.lock:
            self._require_answer(timeout_ms)
            found = [each for each in topics if self._cluster.has_topic(each)]
            return {
                name: TopicInfo(
                    len(self._cluster.topic(name).partitions),
                    self._cluster.topic(name).topic_id,
                )
                for name in found
            }

    def wrong_settings(
        self, topic: str, *, has_checkpoints: bool, timeout_ms: int
    ) -> Sequence[WrongSetting]:
        """Return the wrong settings that the test has set."""
        del topic, has_checkpoints
        with self._cluster.lock:
            self._require_answer(timeout_ms)
            return self.wrong

    def topics(self, timeout_ms: int) -> Sequence[str]:
        """Return the names of all topics."""
        with self._cluster.lock:
            self._require_answer(timeout_ms)
            return self._cluster.topic_names()

    def ranges(
        self,
        partitions: Sequence[TopicPartition],
        timeout_ms: int,
        *,
        isolation_level: str = READ_UNCOMMITTED,
    ) -> Mapping[TopicPartition, LogRange]:
        """Return log-start and log-end offsets; see ``ports.DataLog``."""
        cluster = self._cluster
        with cluster.lock:
            self._require_answer(timeout_ms)
            return {
                each: cluster.range(each, isolation_level=isolation_level)
                for each in partitions
                if cluster.has_partition(each)
            }

    def ends(
        self,
        partitions: Sequence[TopicPartition],
        timeout_ms: int,
        *,
        isolation_level: str = READ_UNCOMMITTED,
    ) -> Mapping[TopicPartition, int]:
        """Return the log-end offset of each partition; see ``ports.DataLog``."""
        found = self.ranges(partitions, timeout_ms, isolation_level=isolation_level)
        return {place: each.end for place, each in found.items()}

    def committed(
        self, group_id: str, partitions: Sequence[TopicPartition], *, timeout_ms: int
    ) -> Mapping[TopicPartition, int | None]:
        """Return the group's committed offsets (None: no commit)."""
        with self._cluster.lock:
            self._require_answer(timeout_ms)
            offsets = self._cluster.groups.get(group_id, {})
            return {each: offsets.get(each) for each in partitions}

    def commit(
        self, group_id: str, offsets: Mapping[TopicPartition, int], *, timeout_ms: int
    ) -> None:
        """Set the group's committed offsets, of partitions that exist."""
        with self._cluster.lock:
            self._require_answer(timeout_ms)
            if group_id in self._cluster.busy_groups:
                raise CoordinationError(
                    f"Committing offsets of group {group_id} failed: the group has "
                    "active members of its own. Stop them."
                )
            has = self._cluster.has_partition
            known = {each: at for each, at in offsets.items() if has(each)}
            self._cluster.groups.setdefault(group_id, {}).update(known)
            if missing := sorted(offsets.keys() - known.keys()):
                raise CoordinationError(
                    f"Committing offsets of group {group_id} failed: {missing[0]} does "
                    "not exist"
                )

    def reader(self, *, isolation_level: str = READ_UNCOMMITTED) -> "FakeDataReader":
        """Return a new reader with nothing assigned."""
        return FakeDataReader(self, self._cluster, isolation_level=isolation_level)

    def transactions(
        self, transactional_id: str, *, group_id: str, timeout_ms: int
    ) -> "FakeWriter":
        """Return a producer, which fences every earlier one of the same id."""
        with self._cluster.lock:
            self._require_answer(timeout_ms)
            return FakeWriter(self._cluster, transactional_id, group_id=group_id)

    def close(self, timeout_ms: int) -> None:
        """Close the session. Idempotent; readers stay open."""
        del timeout_ms
        self._is_closed = True

    def _require_answer(self, timeout_ms: int) -> None:
        if self._is_closed:
            raise InvalidTransition("The connection is closed; open a new one.")
        if self.cut:
            raise CoordinationError(f"No answer within {timeout_ms} ms: cut off.")
        self._cluster.settle()


class FakeWriter(TransactionalWriter):
    """A transactional producer. A record without a partition goes to partition 0."""

    def __init__(
        self, cluster: FakeKafka, transactional_id: str, *, group_id: str
    ) -> None:
        """Fence the earlier producers of this id."""
        self._cluster = cluster
        self._id = transactional_id
        self._group_id = group_id
        cluster.writers[transactional_id] = self

    def progress(
        self, partition: TopicPartition, *, timeout_ms: int
    ) -> SourceProgress | None:
        """Return what the last committed transaction wrote, None before the first."""
        del timeout_ms
        return self._cluster.progress.get((self._group_id, partition))

    def write(
        self,
        records: Iterable[Outgoing],
        *,
        partition: TopicPartition,
        position: int,
        metadata: str = "",
    ) -> None:
        """Write records and progress; see ``outgoing.TransactionalWriter``."""
        with self._cluster.lock:
            if self._cluster.writers.get(self._id) is not self:
                raise ClaimLost(f"{self._id} has a later producer", reason="fenced")
            for each in records:
                place = TopicPartition(each.topic, each.partition or 0)
                self._cluster.produce(place, each.value, key=each.key)
            found = SourceProgress(position, metadata)
            self._cluster.progress[self._group_id, partition] = found

    def close(self) -> None:
        """Do nothing: there is no open transaction."""


class FakeDataReader(DataReader):
    """Fetches records of data partitions of a ``FakeKafka``."""

    def __init__(
        self, session: FakeDataLog, cluster: FakeKafka, *, isolation_level: str
    ) -> None:
        """Start with nothing assigned."""
        self._isolation_level = isolation_level
        self._session = session
        self._cluster = cluster
        self._places: dict[TopicPartition, int | None] = {}
        self._tokens: dict[TopicPartition, Token | None] = {}
        self._topic_ids: dict[TopicPartition, bytes | None] = {}
        self._paused: set[TopicPartition] = set()
        self._ends: dict[TopicPartition, int] = {}
        self._is_closed = False

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Set the assigned partitions; see ``ports.DataReader``."""
        self._require_open()
        wanted = dict.fromkeys(partitions)
        self._places = {each: self._places.get(each) for each in wanted}
        self._tokens = {each: self._tokens.get(each) for each in wanted}
        self._paused &= self._places.keys()
        self._ends = {each: end for each, end in self._ends.items() if each in wanted}

    def seek(
        self,
        partition: TopicPartition,
        offset: int,
        *,
        token: Token | None = None,
        topic_id: bytes | None = None,
    ) -> None:
        """Continue at ``offset``; see ``ports.DataReader``."""
        self._require_open()
        if partition not in self._places or offset < 0:
            raise InvalidTransition(f"Cannot seek to {offset} in {partition}.")
        self._places[partition] = offset
        self._tokens[partition] = token
        self._topic_ids[partition] = topic_id

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop fetching these partitions until they are resumed."""
        self._require_open()
        self._paused.update(each for each in partitions if each in self._places)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Undo ``pause``; unknown or running partitions are ignored."""
        self._require_open()
        self._paused.difference_update(partitions)

    def poll(
        self, timeout_ms: int, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Return up to ``max_records`` records; see ``ports.DataReader``."""
        deadline = Deadline(timeout_ms)
        with self._cluster.lock:
            while True:
                self._require_open()
                for partition, place in self._places.items():
                    if place is None:
                        raise InvalidTransition(
                            f"Cannot poll: {partition} is new and has no position."
                        )
                self._cluster.settle()
                found = {} if self._session.cut else self._read(max(1, max_records))
                if found or not self._cluster.wait(deadline):
                    return found

    def positions(self) -> Mapping[TopicPartition, int]:
        """Return the next offset of each partition; see ``ports.DataReader``."""
        self._require_open()
        return {each: at for each, at in self._places.items() if at is not None}

    def ends(self) -> Mapping[TopicPartition, int]:
        """Return the log ends at the last fetches; see ``ports.DataReader``."""
        self._require_open()
        return dict(self._ends)

    def close(self, timeout_ms: int) -> None:
        """Close the reader. Idempotent."""
        del timeout_ms
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise InvalidTransition("The reader is closed; open a new one.")

    def _read(self, room: int) -> dict[TopicPartition, Sequence[Record]]:
        found: dict[TopicPartition, Sequence[Record]] = {}
        refused: list[TopicPartition] = []
        for partition in list(self._places):
            if partition in self._paused or room == 0:
                continue
            if self._is_foreign(partition):
                refused.append(partition)
                continue
            if not self._cluster.has_partition(partition):
                continue  # the partition may be created later
            records = self._read_one(partition, room)
            if records:
                found[partition] = records
                room -= len(records)
                # Move the partition to the end, so that no partition starves.
                self._places[partition] = self._places.pop(partition)
        if refused and not found:
            raise UnknownTopicId(
                f"{refused[0]} was not read: there is no topic with the id of its "
                "claim.",
                partition=refused[0],
            )
        return found

    def _is_foreign(self, partition: TopicPartition) -> bool:
        """Return whether the topic has another id than the one requested."""
        wanted = self._topic_ids.get(partition)
        if wanted is None:
            return False
        name = partition.topic
        has_topic = self._cluster.has_topic(name)
        return not has_topic or self._cluster.topic(name).topic_id != wanted

    def _read_one(self, partition: TopicPartition, room: int) -> list[Record]:
        place = self._places[partition]
        assert place is not None
        log = self._cluster.log(partition)
        self._ends[partition] = log.end
        if not log.start <= place <= log.end:
            raise PositionError(
                f"Position {place} of {partition} is outside its log, which has "
                f"offsets {log.start} to {log.end}.",
                partition=partition,
                requested=place,
                log_start=log.start,
                log_end=log.end,
            )
        end = log.end_for(self._isolation_level)
        hidden = log.aborted if self._isolation_level == READ_COMMITTED else ()
        stored = [
            each
            for each in log.read(place, room + len(hidden))
            if each.offset < end and each.offset not in hidden
        ][:room]
        if not stored:
            self._places[partition] = max(place, end)
            return []
        self._places[partition] = stored[-1].offset + 1
        token = self._tokens.get(partition)
        return [each.record(partition, token) for each in stored]
