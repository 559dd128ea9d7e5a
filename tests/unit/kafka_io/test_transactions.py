"""Requests of a transactional producer over kafka-python to fake brokers."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
from kafka import errors as kafka_errors
from kafka.protocol.metadata import CoordinatorType
from kafka.record.memory_records import MemoryRecords

from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    LogUnwritable,
)
from kafka_marshal.kafka_io import transactions
from kafka_marshal.kafka_io.clients import AdminClient
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transactions import KafkaTransactions
from kafka_marshal.outgoing import Outgoing
from kafka_marshal.protocol.types import TopicPartition

T0 = TopicPartition("t", 0)
FIRST, SECOND = 1, 2
TOPIC_ID = "00000000-0000-0000-0000-000000000000"


class Broker:
    """A fake client of kafka-python, and two brokers behind it.

    Attributes:
        asked: Names of the requests, in order.
        faults: Error codes or exceptions of the next requests, by request name.
        written: Value, key and headers of each written record, by partition.
        sequences: First sequence number of each batch, by partition.
    """

    def __init__(self):
        self.asked, self.faults = [], {}
        self.written, self.sequences, self.nodes = {}, {}, {}
        self.leaders = {0: FIRST, 1: SECOND}
        self.epoch, self.kept = -1, None
        self.topics = {"out"}
        self.manager = self.cluster = self
        self.requests = []

    # --- the interface that AdminClient and KafkaTransactions use

    @property
    def _client(self):
        return self

    def close(self):
        pass

    def describe_topics(self, names):
        self.asked.append("describe")
        code = 0 if set(names) <= self.topics else 3
        return [
            {
                "name": name,
                "error_code": code,
                "topic_id": TOPIC_ID,
                "partitions": [
                    {
                        "partition_index": number,
                        "leader_id": leader,
                        "replica_nodes": [leader],
                        "isr_nodes": [leader],
                    }
                    for number, leader in self.leaders.items()
                ],
            }
            for name in names
        ]

    def add_coordinator(self, found, kind, key, *, synthesize_node_id):
        assert not synthesize_node_id
        if found.error_code:
            raise kafka_errors.for_code(found.error_code)
        return found.node_id

    def run(self, call):
        coroutine = call()
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("it waits")

    async def send(self, request, node_id=None, request_timeout_ms=None):
        name = type(request).__name__.removesuffix("Request")
        self.asked.append(name)
        self.requests.append(request)
        self.nodes.setdefault(name, []).append(node_id)
        fault = self.fault(name)
        method = re.sub("(?<!^)([A-Z])", r"_\1", name).lower()
        return getattr(self, method)(request, fault)

    def fault(self, name):
        faults = self.faults.get(name)
        fault = faults.pop(0) if faults else 0
        if isinstance(fault, Exception):
            raise fault
        return fault

    # --- responses

    def find_coordinator(self, request, code):
        is_of_group = request.key_type == CoordinatorType.GROUP.value
        node = SECOND if is_of_group else FIRST
        found = SimpleNamespace(error_code=code, node_id=node)
        return SimpleNamespace(coordinators=[found])

    def init_producer_id(self, request, code):
        self.epoch += 1
        return SimpleNamespace(
            error_code=code, producer_id=7, producer_epoch=self.epoch
        )

    def add_partitions_to_txn(self, request, code):
        topics = request.v3_and_below_topics
        results = [(each.name, [(n, code) for n in each.partitions]) for each in topics]
        return SimpleNamespace(results_by_topic_v3_and_below=results)

    def produce(self, request, code):
        assert request.acks == -1
        responses = []
        for topic in request.topic_data:
            results = []
            for each in topic.partition_data:
                place = TopicPartition(topic.name, each.index)
                if not code:
                    self.append(place, each.records)
                results.append(SimpleNamespace(index=each.index, error_code=code))
            responses.append(
                SimpleNamespace(name=topic.name, partition_responses=results)
            )
        return SimpleNamespace(responses=responses)

    def append(self, place, data):
        (batch,) = MemoryRecords(data)
        assert batch.is_transactional
        assert (batch.producer_id, batch.producer_epoch) == (7, self.epoch)
        self.sequences.setdefault(place, []).append(batch.base_sequence)
        kept = self.written.setdefault(place, [])
        kept.extend((each.value, each.key, each.headers) for each in batch)

    def add_offsets_to_txn(self, request, code):
        return SimpleNamespace(error_code=code)

    def txn_offset_commit(self, request, code):
        (topic,) = request.topics
        (place,) = topic.partitions
        self.kept = place.committed_offset, place.committed_metadata
        return SimpleNamespace(topics=[(topic.name, [(place.partition_index, code)])])

    def end_txn(self, request, code):
        self.asked[-1] += " commit" if request.committed else " abort"
        return SimpleNamespace(error_code=code)

    def offset_fetch(self, request, code):
        assert request.require_stable
        offset, metadata = self.kept or (-1, "")
        found = SimpleNamespace(
            error_code=code, committed_offset=offset, metadata=metadata
        )
        topic = SimpleNamespace(partitions=[found])
        return SimpleNamespace(groups=[SimpleNamespace(error_code=0, topics=[topic])])


@pytest.fixture
def broker(monkeypatch):
    monkeypatch.setattr(transactions.time, "sleep", lambda _: None)
    return Broker()


def begun(broker, monkeypatch=None, timeout_ms=5_000):
    admin = AdminClient(ConnectionConfig("b:1"))
    admin._client = broker
    if monkeypatch is not None:  # for a connection that is lost and made again
        monkeypatch.setattr(admin, "_connect", lambda *_: broker)
    return KafkaTransactions(
        admin,
        "an id",
        group_id="g",
        timeout_ms=timeout_ms,
        coordination_topic="__marshal",
    )


def write(some, records=(), **rest):
    some.write(records, partition=T0, position=2, **rest)


def records(count, partition=0, size=1):
    return [
        Outgoing("out", None, b"%d" % number * size, partition=partition)
        for number in range(count)
    ]


STEPS = [
    "AddPartitionsToTxn",
    "Produce",
    "AddOffsetsToTxn",
    "TxnOffsetCommit",
    "EndTxn commit",
]


def test_records_and_position_are_written_in_one_transaction(broker):
    with begun(broker) as some:
        assert some.progress(T0, timeout_ms=1_000) is None
        broker.asked.clear()
        write(some, records(2), metadata="mark")
        assert broker.asked == ["describe", *STEPS]
        broker.asked.clear()
        write(some, records(2))
        assert broker.asked == STEPS
        write(some, metadata="mark")
        assert broker.asked[-3:] == STEPS[-3:], "the position alone"
        assert some.progress(T0, timeout_ms=1_000) == (2, "mark")
        assert broker.kept == (2, "mark\0"), "as confluent-kafka writes it"
    assert broker.sequences == {("out", 0): [0, 2]}
    assert "EndTxn abort" not in broker.asked


def test_nothing_is_written_to_the_coordination_topic(broker):
    with begun(broker) as some:
        broker.asked.clear()
        with pytest.raises(ConfigurationError, match="'__marshal' is the coordination"):
            write(some, [*records(1), Outgoing("__marshal", None, b"2")])
        assert broker.asked == []


def test_each_request_goes_to_its_coordinator_or_leader(broker):
    with begun(broker) as some:
        both = records(1, partition=0) + records(1, partition=1)
        write(some, both)
        some.progress(T0, timeout_ms=1_000)
    assert broker.nodes == {
        "FindCoordinator": [None, None],
        "InitProducerId": [FIRST],
        "AddPartitionsToTxn": [FIRST],
        "Produce": [FIRST, SECOND],
        "AddOffsetsToTxn": [FIRST],
        "TxnOffsetCommit": [SECOND],
        "EndTxn": [FIRST],
        "OffsetFetch": [SECOND],
    }


def test_keys_select_the_partitions_of_the_java_client(broker):
    # From the test of org.apache.kafka.common.utils.Utils.murmur2.
    hashes = {b"21": -973932308, b"foobar": -790332482, b"abc": 479470107}
    broker.leaders = dict.fromkeys(range(7), FIRST)
    with begun(broker) as some:
        write(some, [Outgoing("out", key, b"v") for key in hashes])
    places = {
        key: place.partition
        for place, found in broker.written.items()
        for _, key, _ in found
    }
    assert places == {key: (each & 0x7FFFFFFF) % 7 for key, each in hashes.items()}


def test_records_without_a_key_go_to_one_partition(broker):
    with begun(broker) as some:
        write(some, [Outgoing("out", None, b"%d" % number) for number in range(9)])
    ((_, found),) = broker.written.items()
    assert [value for value, _, _ in found] == [b"%d" % number for number in range(9)]


def test_a_record_keeps_null_fields_and_headers(broker):
    with begun(broker) as some:
        headers = (("a", b"1"), ("b", None))
        write(some, [Outgoing("out", None, None, headers, 1)])
    assert broker.written == {("out", 1): [(None, None, list(headers))]}


def test_a_large_output_is_written_in_batches_in_order(broker, monkeypatch):
    monkeypatch.setattr(transactions, "BATCH_BYTES", 300)
    with begun(broker) as some:
        write(some, records(10, size=50))
        write(some, records(1))
    found = [value[:1] for value, _, _ in broker.written["out", 0]]
    assert found == [b"%d" % number for number in (*range(10), 0)]
    starts = broker.sequences["out", 0]
    assert starts[0] == 0
    assert starts[-1] == 10
    assert len(starts) > 3


def test_a_batch_that_is_too_large_is_halved(broker):
    broker.faults["Produce"] = [10, 10]  # MESSAGE_TOO_LARGE
    with begun(broker) as some:
        write(some, records(4))
    assert [value for value, _, _ in broker.written["out", 0]] == [
        b"0",
        b"1",
        b"2",
        b"3",
    ]
    assert broker.sequences["out", 0] == [0, 1, 2]


@pytest.mark.parametrize("code", [10, 87])
def test_a_refused_record_names_the_size_limit_of_the_topic(broker, code):
    broker.faults["Produce"] = [code]
    with (
        pytest.raises(LogUnwritable, match=r"max\.message\.bytes of the topic"),
        begun(broker) as some,
    ):
        write(some, records(1))
    assert broker.asked[-1] == "EndTxn abort"


def test_sequence_numbers_wrap_after_the_largest(broker):
    with begun(broker) as some:
        some._sequences["out", 0] = 2**31 - 1
        write(some, records(2))
        write(some, records(1))
    assert broker.sequences["out", 0] == [2**31 - 1, 1]


@pytest.mark.parametrize("code", [47, 49, 90])
@pytest.mark.parametrize(
    "step",
    ["AddPartitionsToTxn", "Produce", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn"],
)
def test_a_later_producer_fences_this_one(broker, step, code):
    some = begun(broker)
    broker.faults[step] = [code]
    with pytest.raises(ClaimLost, match="a later producer") as lost:
        write(some, records(1))
    assert lost.value.reason == "fenced"
    assert broker.asked.count("InitProducerId") == 1, "or it would fence that one"
    some.close()
    assert broker.asked[-1] == "EndTxn abort"
    some.close()
    assert broker.asked.count("EndTxn abort") == 1


@pytest.mark.parametrize(
    ("step", "code"),
    [
        ("FindCoordinator", 15),  # COORDINATOR_NOT_AVAILABLE
        ("InitProducerId", 51),  # CONCURRENT_TRANSACTIONS
        ("InitProducerId", 16),  # NOT_COORDINATOR
        ("AddPartitionsToTxn", 51),
        ("AddPartitionsToTxn", 3),  # UNKNOWN_TOPIC_OR_PARTITION
        ("Produce", 6),  # NOT_LEADER_OR_FOLLOWER
        ("Produce", 7),  # REQUEST_TIMED_OUT
        ("AddOffsetsToTxn", 51),
        ("TxnOffsetCommit", 14),  # COORDINATOR_LOAD_IN_PROGRESS
        ("EndTxn", 51),
    ],
)
def test_a_transient_fault_is_retried(broker, step, code):
    broker.faults[step] = [code, code]
    with begun(broker) as some:
        write(some, records(2))
        write(some, records(1))
    assert Counter(broker.asked)["EndTxn commit"] == 2 + 2 * (step == "EndTxn")
    assert broker.sequences == {("out", 0): [0, 2]}


def test_an_unstable_position_is_requested_again(broker):
    broker.faults["OffsetFetch"] = [88]  # UNSTABLE_OFFSET_COMMIT
    broker.kept = 7, None
    with begun(broker) as some:
        assert some.progress(T0, timeout_ms=1_000) == (7, "")


def test_a_batch_reported_as_a_duplicate_counts_as_written(broker):
    broker.faults["Produce"] = [7, 46]  # REQUEST_TIMED_OUT, DUPLICATE_SEQUENCE_NUMBER
    with begun(broker) as some:
        write(some, records(2))
        write(some, records(1))
    assert broker.sequences == {("out", 0): [2]}


def test_a_permanent_fault_is_raised_before_a_transient_one(broker):
    codes = {0: 6, 1: 29}  # NOT_LEADER_OR_FOLLOWER, TOPIC_AUTHORIZATION_FAILED
    plain = broker.produce

    def produce(request, code):
        (topic,) = request.topic_data
        (each,) = topic.partition_data
        return plain(request, codes[each.index])

    broker.produce = produce
    with begun(broker) as some, pytest.raises(LogUnwritable, match="on the topic"):
        write(some, records(1) + records(1, partition=1))


def test_a_write_to_an_absent_topic_names_the_topic(broker, monkeypatch):
    monkeypatch.setattr(transactions, "_CREATED_MS", 0)
    broker.topics.clear()
    with (
        begun(broker) as some,
        pytest.raises(CoordinationError, match=r"Writing to out .* does not exist"),
    ):
        write(some, records(1))
    assert not {"AddPartitionsToTxn", "EndTxn abort"} & set(broker.asked)


def test_a_write_to_an_absent_partition_raises(broker, monkeypatch):
    monkeypatch.setattr(transactions, "_CREATED_MS", 0)
    with begun(broker) as some, pytest.raises(CoordinationError, match="not exist"):
        write(some, records(1, partition=9))
    assert "Produce" not in broker.asked


def test_a_write_waits_for_a_leader(broker):
    broker.leaders = {0: -1}
    plain, asked = broker.describe_topics, []

    def describe(names):
        asked.append(names)
        if len(asked) == 3:
            broker.leaders = {0: FIRST}
        return plain(names)

    broker.describe_topics = describe
    with begun(broker) as some:
        write(some, records(1))
    assert len(asked) == 3


def test_an_absent_source_topic_is_named_instead_of_the_target(broker, monkeypatch):
    monkeypatch.setattr(transactions, "_CREATED_MS", 0)
    broker.faults["TxnOffsetCommit"] = [3]
    with begun(broker) as some, pytest.raises(CoordinationError) as refused:
        write(some, records(1))
    assert "Adding the position of t-0" in str(refused.value)
    assert "out" not in str(refused.value)


@pytest.mark.parametrize(
    ("step", "code", "right"),
    [
        ("FindCoordinator", 53, "WRITE on transactional id an id"),
        ("InitProducerId", 53, "WRITE on transactional id an id"),
        ("TxnOffsetCommit", 30, "READ on group g"),
    ],
)
def test_an_authorization_error_names_the_missing_right(broker, step, code, right):
    broker.faults[step] = [code]
    with pytest.raises(LogUnwritable, match=right), begun(broker) as some:
        write(some, records(1))


def test_the_partition_that_failed_determines_the_error(broker):
    """The other partitions get OPERATION_NOT_ATTEMPTED, which explains nothing."""
    plain = broker.add_partitions_to_txn

    def add(request, code):
        found = plain(request, code)
        found.results_by_topic_v3_and_below = [("out", [(0, 55), (1, 29)])]
        return found

    broker.add_partitions_to_txn = add
    with begun(broker) as some, pytest.raises(LogUnwritable):
        write(some, records(1) + records(1, partition=1))


@pytest.mark.parametrize("step", ["Produce", "EndTxn"])
def test_a_lost_response_is_repeated_and_ends_the_producer(broker, monkeypatch, step):
    """The first request may arrive late, and would end the next transaction early.

    The producer must not fence earlier producers again by itself: a process that has
    lost its claim meanwhile would fence the new owner, and write.
    """
    some = begun(broker, monkeypatch)
    broker.faults[step] = [kafka_errors.KafkaConnectionError("lost")]
    write(some, records(2))
    assert broker.sequences == {("out", 0): [0]}
    count = len(broker.asked)
    with pytest.raises(ClaimLost, match="another producer") as lost:
        write(some, records(1))
    assert lost.value.reason == "fenced"
    some.close()
    assert len(broker.asked) == count


def test_a_lasting_error_raises_at_the_deadline(broker):
    broker.faults["EndTxn"] = [51] * 1_000_000
    some = begun(broker, timeout_ms=20)
    with pytest.raises(CoordinationError, match="Writing to out as an id failed"):
        write(some, records(1))
    some.close()


def test_a_write_past_its_deadline_stops_between_batches(broker, monkeypatch):
    monkeypatch.setattr(transactions, "BATCH_BYTES", 100)
    with (
        begun(broker, timeout_ms=0) as some,
        pytest.raises(DeadlineExceeded, match="write less in a transaction"),
    ):
        write(some, records(9, size=50))
    assert broker.asked.count("Produce") == 1
    assert "EndTxn commit" not in broker.asked
