"""Transactions over kafka-python: the requests of a transactional producer.

kafka-python's own producer is not used. It drops a batch that has expired, and lets the
transaction commit without it. If the broker refuses a sequence number, it resumes with
another epoch, and reports a commit that was never sent. Once fenced, it may fence the
later producer in turn. And most of its calls have no deadline.

Here each request waits for its response, and each fault in it is raised. After an error
the application opens another producer, which ends the transaction that this one has
begun, so there is no state to recover. The connections are those of an admin client,
which repeats a request whose response was lost: that is safe, because a request has the
epoch of the producer, and its records have sequence numbers.
"""

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kafka import errors as kafka_errors
from kafka.partitioner import murmur2
from kafka.protocol.consumer import OffsetFetchRequest
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)
from kafka.record.memory_records import MemoryRecordsBuilder

from kafka_marshal.closing import Closing
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import ClaimLost, DeadlineExceeded, MarshalError
from kafka_marshal.kafka_io.clients import AdminClient
from kafka_marshal.kafka_io.faults import Access, fenced_error, refused_error
from kafka_marshal.kafka_io.patches import network_of
from kafka_marshal.kafka_io.topics import described
from kafka_marshal.outgoing import Outgoing, SourceProgress, require_data_topics
from kafka_marshal.protocol.types import TopicPartition

T = TypeVar("T")

_FENCED = (
    kafka_errors.InvalidProducerEpochError,
    kafka_errors.ProducerFencedError,
    # The broker forgets an id that is not used for a week; opening restores it.
    kafka_errors.InvalidProducerIdMappingError,
)
_REFUSED = (
    kafka_errors.InvalidRecordError,
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
)
_TOO_LARGE = _REFUSED[1:]
# Error for a batch that was sent again, and was written before.
_REPEATED = kafka_errors.DuplicateSequenceNumberError
_ABSENT = kafka_errors.UnknownTopicOrPartitionError
# Versions of requests. Later ones are for transactions that change the epoch at their
# end.
_INIT_VERSION, _ADD_VERSION, _END_VERSION = 4, 3, 4
_PRODUCE_VERSIONS, _OFFSET_FETCH_VERSION, _FIND_VERSION = (3, 9), 8, 4
# Time after its creation from which all brokers know a topic.
_CREATED_MS = 3_000
# Least time of a step. Even if a suspension of the process has used up the deadline, a
# broker that answers can report in this time what became of a transaction.
_STEP_MS = 1_000
_WAIT_S_MIN, _WAIT_S_MAX = 0.005, 0.1
# Size of a batch. A request has one batch of each partition; the next request is sent
# after the response.
BATCH_BYTES = 262_144
# How long partitions and leaders of a topic are used: as long as by default in clients.
_TOPIC_MS = 300_000
# Longest wait for a leader's response; the leader waits half of that for its followers.
_PRODUCE_MS = 10_000
_ALL_REPLICAS = -1
_POSITIVE = 0x7FFFFFFF
_SEQUENCES = 1 << 31
_FORMAT = 2
_UNKNOWN = -1
# Ends metadata of a position: confluent-kafka writes it, and reads beyond text without.
_END_OF_METADATA = "\0"


class _Producer(NamedTuple):
    """Identity of a producer at the broker."""

    id: int
    epoch: int


class _Topic(NamedTuple):
    """The leaders of a topic's partitions, and how long they are used."""

    leaders: Mapping[int, int]
    valid: Deadline


class KafkaTransactions(Closing):
    """A producer with a transactional id, and its positions. For one thread.

    Opening it fences every earlier producer of the same id.
    """

    is_outdated = False  # kafka-python loads files of TLS for each connection

    def __init__(
        self,
        admin: AdminClient,
        transactional_id: str,
        *,
        group_id: str,
        timeout_ms: int,
        coordination_topic: str,
    ) -> None:
        """Fence earlier producers.

        Args:
            admin: Client whose connections are used.
            transactional_id: Transactional id.
            group_id: Kafka consumer group that keeps the positions.
            coordination_topic: Name of the topic that may not be written to.
            timeout_ms: Limit for this, and for each transaction. A transaction that is
                open for longer is aborted by the broker.

        Raises:
            MarshalError: The cluster did not answer, or a right is missing.
        """
        self._admin = admin
        self._id = transactional_id
        self._group_id = group_id
        self._coordination_topic = coordination_topic
        self._timeout_ms = timeout_ms
        self._is_under_way = False
        # Whether a request was repeated: the first copy may still arrive, and end the
        # next transaction too early.
        self._has_repeated_request = False
        self._topics: dict[str, _Topic] = {}
        self._coordinators: dict[CoordinatorType, Any] = {}
        self._sequences: dict[TopicPartition, int] = {}
        self._producer = self._begin(Deadline(timeout_ms))

    def progress(
        self, partition: TopicPartition, *, timeout_ms: int
    ) -> SourceProgress | None:
        """Return what the last committed transaction wrote, None before the first.

        Raises:
            MarshalError: The cluster did not answer.
        """

        def request() -> Any:
            kind = OffsetFetchRequest.OffsetFetchRequestGroup
            topic = kind.OffsetFetchRequestTopics(
                name=partition.topic, partition_indexes=[partition.partition]
            )
            # Waits for a position whose transaction is being committed.
            return OffsetFetchRequest(
                groups=[kind(group_id=self._group_id, topics=[topic])],
                require_stable=True,
                min_version=_OFFSET_FETCH_VERSION,
                max_version=_OFFSET_FETCH_VERSION,
            )

        def read(response: Any) -> SourceProgress | None:
            (group,) = response.groups
            _check(group.error_code)
            for topic in group.topics:
                for each in topic.partitions:
                    _check(each.error_code)
                    if each.committed_offset >= 0:
                        metadata = (each.metadata or "").rstrip(_END_OF_METADATA)
                        return SourceProgress(each.committed_offset, metadata)
            return None

        return self._send(
            request,
            read,
            to=CoordinatorType.GROUP,
            doing="Querying the position",
            deadline=Deadline(timeout_ms),
        )

    def write(
        self,
        records: Iterable[Outgoing],
        *,
        partition: TopicPartition,
        position: int,
        metadata: str = "",
    ) -> None:
        """Write records and a position in one transaction.

        Args:
            records: Records.
            partition: Source partition.
            position: Its next position after these records.
            metadata: Text that is kept with the position.

        Raises:
            ClaimLost: A later producer has this id; nothing was written.
            ConfigurationError: A record is for the coordination topic; nothing was
                written.
            MarshalError: The outcome is unknown. Open again, and check the progress.
        """
        records = list(records)
        deadline = Deadline(self._timeout_ms)
        topics = dict.fromkeys(record.topic for record in records)
        require_data_topics(topics, self._coordination_topic)
        doing = f"Writing to {', '.join(topics) or 'no topic'}"
        if self._has_repeated_request:
            # The caller must open it, because it checks its claim afterwards.
            raise ClaimLost(
                f"{doing} as {self._id} failed: a response of the broker was lost, and "
                "its request may still arrive; open another producer",
                reason="fenced",
            )
        placed = self._placed(records, doing=doing, deadline=deadline)
        self._is_under_way = True
        if placed:
            self._add_partitions(placed.keys(), doing=doing, deadline=deadline)
            self._produce(placed, doing=doing, deadline=deadline)
        self._keep(SourceProgress(position, metadata), partition, deadline)
        self._end(doing=doing, deadline=deadline, is_committed=True)
        self._is_under_way = False

    def close(self) -> None:
        """Close; an open transaction is aborted. Idempotent.

        If no broker answers, closing takes a second at most. The next producer of this
        id then aborts the transaction, or the broker does after its timeout.
        """
        if self._is_under_way:
            self._is_under_way = False
            deadline = Deadline(min(_STEP_MS, self._timeout_ms))
            with suppress(MarshalError):
                self._end(doing="Aborting", deadline=deadline, is_committed=False)

    # --- the steps of a transaction

    def _begin(self, deadline: Deadline) -> _Producer:
        def request() -> Any:
            return InitProducerIdRequest(
                transactional_id=self._id,
                transaction_timeout_ms=max(_STEP_MS, self._timeout_ms),
                producer_id=_UNKNOWN,
                producer_epoch=_UNKNOWN,
                max_version=_INIT_VERSION,
            )

        def read(response: Any) -> _Producer:
            _check(response.error_code)
            return _Producer(response.producer_id, response.producer_epoch)

        found = self._send(request, read, doing="Beginning", deadline=deadline)
        self._has_repeated_request = False
        return found

    def _add_partitions(
        self, places: Iterable[TopicPartition], *, doing: str, deadline: Deadline
    ) -> None:
        numbers = _by_topic(places)

        def request() -> Any:
            kind = AddPartitionsToTxnRequest
            return kind(
                v3_and_below_transactional_id=self._id,
                v3_and_below_producer_id=self._producer.id,
                v3_and_below_producer_epoch=self._producer.epoch,
                v3_and_below_topics=[
                    kind.AddPartitionsToTxnTopic(name=name, partitions=found)
                    for name, found in numbers.items()
                ],
                max_version=_ADD_VERSION,
            )

        def read(response: Any) -> None:
            for _, results in response.results_by_topic_v3_and_below:
                for _, code in results:
                    # Another partition of the request has the error.
                    if code != kafka_errors.OperationNotAttemptedError.errno:
                        _check(code)

        self._send(request, read, doing=doing, deadline=deadline)

    def _keep(
        self, progress: SourceProgress, partition: TopicPartition, deadline: Deadline
    ) -> None:
        doing = f"Adding the position of {partition} to a transaction"

        def add() -> Any:
            return AddOffsetsToTxnRequest(
                transactional_id=self._id,
                producer_id=self._producer.id,
                producer_epoch=self._producer.epoch,
                group_id=self._group_id,
                max_version=_ADD_VERSION,
            )

        def commit() -> Any:
            kind = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
            place = kind.TxnOffsetCommitRequestPartition(
                partition_index=partition.partition,
                committed_offset=progress.position,
                committed_leader_epoch=_UNKNOWN,
                committed_metadata=progress.metadata + _END_OF_METADATA,
            )
            return TxnOffsetCommitRequest(
                transactional_id=self._id,
                group_id=self._group_id,
                producer_id=self._producer.id,
                producer_epoch=self._producer.epoch,
                generation_id=_UNKNOWN,
                member_id="",
                group_instance_id=None,
                topics=[kind(name=partition.topic, partitions=[place])],
                max_version=_ADD_VERSION,
            )

        def read(response: Any) -> None:
            for _, results in response.topics:
                for _, code in results:
                    _check(code)

        self._send(add, _check_response, doing=doing, deadline=deadline)
        self._send(
            commit, read, to=CoordinatorType.GROUP, doing=doing, deadline=deadline
        )

    def _end(self, *, doing: str, deadline: Deadline, is_committed: bool) -> None:
        def request() -> Any:
            return EndTxnRequest(
                transactional_id=self._id,
                producer_id=self._producer.id,
                producer_epoch=self._producer.epoch,
                committed=is_committed,
                max_version=_END_VERSION,
            )

        self._send(request, _check_response, doing=doing, deadline=deadline)

    # --- records

    def _placed(
        self, records: Sequence[Outgoing], *, doing: str, deadline: Deadline
    ) -> dict[TopicPartition, list[Outgoing]]:
        """Return the records of each partition, in their order."""
        counts: dict[str, int] = {}
        for topic in dict.fromkeys(record.topic for record in records):
            find = partial(self._leaders, topic=topic)
            counts[topic] = len(self._call(find, doing=doing, deadline=deadline))
        # One partition for all records of a topic without a key: large batches are
        # faster.
        keyless = {
            topic: random.randrange(count)  # noqa: S311 - spreads load
            for topic, count in counts.items()
        }
        placed: defaultdict[TopicPartition, list[Outgoing]] = defaultdict(list)
        for record in records:
            number, count = record.partition, counts[record.topic]
            if number is None and record.key is not None:
                number = (murmur2(record.key) & _POSITIVE) % count
            elif number is None:
                number = keyless[record.topic]
            placed[TopicPartition(record.topic, number)].append(record)
        return placed

    def _leaders(self, admin: Any, topic: str) -> Mapping[int, int]:
        known = self._topics.get(topic)
        if known is None or known.valid.is_over:
            (row,) = admin.describe_topics([topic])
            if not described(row).exists:
                raise _ABSENT(topic)
            rows = row["partitions"]
            leaders = {each["partition_index"]: each["leader_id"] for each in rows}
            known = self._topics[topic] = _Topic(leaders, Deadline(_TOPIC_MS))
        return known.leaders

    def _produce(
        self,
        placed: Mapping[TopicPartition, Sequence[Outgoing]],
        *,
        doing: str,
        deadline: Deadline,
    ) -> None:
        """Write all records: a batch of each partition at a time, until none is left.

        So each partition has one batch under way, which the broker recognizes if it is
        sent again.
        """
        left = {place: deque([list(records)]) for place, records in placed.items()}
        while left:
            batches = {place: self._batch(place, runs) for place, runs in left.items()}
            results: dict[TopicPartition, Exception | None] = {}
            self._call(
                partial(self._send_batches, batches=batches, results=results),
                doing=doing,
                deadline=deadline,
            )
            for place, error in results.items():
                runs = left[place]
                run = runs.popleft()
                if error is None:
                    sequence = self._sequences.get(place, 0) + len(run)
                    self._sequences[place] = sequence % _SEQUENCES
                elif len(run) > 1:
                    half = len(run) // 2
                    runs.extendleft((run[half:], run[:half]))
                else:
                    raise refused_error(f"{doing} as {self._id}", error)
                if not runs:
                    del left[place]
            if left and deadline.is_over:
                raise DeadlineExceeded(
                    f"{doing} as {self._id} took more than {self._timeout_ms} ms; "
                    "write less in a transaction, or give it a longer timeout_ms"
                )

    def _send_batches(
        self,
        admin: Any,
        *,
        batches: Mapping[TopicPartition, bytes],
        results: dict[TopicPartition, Exception | None],
    ) -> None:
        """Send the batches that have no result yet.

        The result of a written batch is None; of one that is too large, the error.

        Raises:
            KafkaError: A batch was not written, for another reason.
        """
        by_leader: defaultdict[int, list[TopicPartition]] = defaultdict(list)
        for place in batches:
            if place in results:
                continue
            leader = self._leaders(admin, place.topic).get(place.partition)
            if leader is None:
                raise _ABSENT(str(place))
            if leader < 0:
                raise kafka_errors.LeaderNotAvailableError(str(place))
            by_leader[leader].append(place)
        manager = network_of(admin).manager

        async def send_all() -> list[Any]:
            sent = [
                manager.send(
                    self._produce_request(places, batches),
                    node_id=leader,
                    request_timeout_ms=_PRODUCE_MS,
                )
                for leader, places in by_leader.items()
            ]
            return [await each for each in sent]

        faults: list[Exception] = []
        for response in manager.run(send_all):
            for topic in response.responses:
                for each in topic.partition_responses:
                    place = TopicPartition(topic.name, each.index)
                    error = _error_of(each.error_code)
                    if isinstance(error, _REPEATED):
                        error = None
                    if error is None or isinstance(error, _TOO_LARGE):
                        results[place] = error
                    else:
                        faults.append(error)
        if faults:  # preferably an error that no retry changes
            raise min(faults, key=_is_passing)

    def _produce_request(
        self, places: Sequence[TopicPartition], batches: Mapping[TopicPartition, bytes]
    ) -> Any:
        kind = ProduceRequest.TopicProduceData
        return ProduceRequest(
            transactional_id=self._id,
            acks=_ALL_REPLICAS,
            timeout_ms=_PRODUCE_MS // 2,
            topic_data=[
                kind(
                    name=topic,
                    partition_data=[
                        kind.PartitionProduceData(
                            index=number,
                            records=batches[TopicPartition(topic, number)],
                        )
                        for number in numbers
                    ],
                )
                for topic, numbers in _by_topic(places).items()
            ],
            min_version=_PRODUCE_VERSIONS[0],
            max_version=_PRODUCE_VERSIONS[1],
        )

    def _batch(self, place: TopicPartition, runs: deque[list[Outgoing]]) -> bytes:
        """Return the first run as a batch; what does not fit becomes another run."""
        builder = MemoryRecordsBuilder(
            _FORMAT,
            0,
            BATCH_BYTES,
            transactional=True,
            producer_id=self._producer.id,
            producer_epoch=self._producer.epoch,
            base_sequence=self._sequences.get(place, 0),
        )
        run = runs.popleft()
        for number, record in enumerate(run):
            sent = builder.append(None, record.key, record.value, list(record.headers))
            if sent is None:
                runs.extendleft((run[number:], run[:number]))
                break
        else:
            runs.appendleft(run)
        builder.close()
        return bytes(builder.buffer())

    # --- requests

    def _send(
        self,
        make: Callable[[], Any],
        read: Callable[[Any], T],
        *,
        doing: str,
        deadline: Deadline,
        to: CoordinatorType = CoordinatorType.TRANSACTION,
    ) -> T:
        """Send a request to a coordinator, and return what is read of the response."""

        def send(admin: Any) -> T:
            manager = network_of(admin).manager
            node = self._coordinators.get(to)
            if node is None:
                node = self._coordinators[to] = self._find_coordinator(manager, to)
            return read(manager.run(lambda: _sent(manager, make(), node)))

        needs = None
        if to is CoordinatorType.GROUP:
            needs = f"READ on group {self._group_id}"
        return self._call(send, doing=doing, deadline=deadline, needs=needs)

    def _find_coordinator(self, manager: Any, kind: CoordinatorType) -> Any:
        key = self._id if kind is CoordinatorType.TRANSACTION else self._group_id
        request = FindCoordinatorRequest(
            key_type=kind.value, coordinator_keys=[key], min_version=_FIND_VERSION
        )
        response = manager.run(lambda: _sent(manager, request))
        (found,) = response.coordinators
        return manager.cluster.add_coordinator(
            found, kind, key, synthesize_node_id=False
        )

    def _call(
        self,
        work: Callable[[Any], T],
        *,
        doing: str,
        deadline: Deadline,
        needs: str | None = None,
    ) -> T:
        """Call ``work`` with a client; repeat it after transient errors.

        Raises:
            ClaimLost: A later producer has this id.
            MarshalError: Another fault, or no result in time.
        """
        limit = Deadline(max(self._least_ms, deadline.left_ms))
        created = limit.within(_CREATED_MS)
        has_begun = False

        def attempt(admin: Any) -> T:
            nonlocal has_begun
            if has_begun:  # and its response was lost
                self._has_repeated_request = True
                self._forget_places()
            has_begun = True
            wait_s = _WAIT_S_MIN
            while True:
                try:
                    return work(admin)
                except kafka_errors.BrokerResponseError as error:
                    last = created if isinstance(error, _ABSENT) else limit
                    if not _is_passing(error) or last.is_over:
                        raise self._final(error, doing) from error
                    if not isinstance(error, kafka_errors.ConcurrentTransactionsError):
                        self._forget_places()
                time.sleep(min(wait_s, limit.left_s))
                wait_s = min(2 * wait_s, _WAIT_S_MAX)

        return self._admin.call(
            attempt,
            doing=f"{doing} as {self._id}",
            access=Access.WRITE,
            needs=needs or f"WRITE on transactional id {self._id}, and on the topic",
            timeout_ms=limit.left_ms,
        )

    def _final(self, error: Any, doing: str) -> Exception:
        """Return what to raise for an error after which the client must not retry."""
        doing = f"{doing} as {self._id}"
        if isinstance(error, _FENCED):
            return fenced_error(doing)
        if isinstance(error, _REFUSED):
            return refused_error(doing, error)
        error.retriable = False
        final: Exception = error
        return final

    def _forget_places(self) -> None:
        self._topics.clear()
        self._coordinators.clear()

    @property
    def _least_ms(self) -> int:
        return min(_STEP_MS, self._timeout_ms)


async def _sent(manager: Any, request: Any, node: Any = None) -> Any:
    return await manager.send(request, node_id=node)


def _error_of(code: int) -> Exception | None:
    error: Exception | None = kafka_errors.for_code(code)() if code else None
    return error


def _is_passing(error: Any) -> bool:
    return bool(error.retriable)


def _check(code: int) -> None:
    error = _error_of(code)
    if error is not None:
        raise error


def _check_response(response: Any) -> None:
    _check(response.error_code)


def _by_topic(places: Iterable[TopicPartition]) -> Mapping[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place in places:
        found[place.topic].append(place.partition)
    return found
