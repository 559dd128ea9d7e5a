"""How a task checks its claim, gets grants, reads, and handles missing offsets."""

import pytest
from pyspark import TaskContext

from kafka_marshal.errors import ClaimLost, CoordinationError, PositionError
from kafka_marshal.grants import ClaimRef
from kafka_marshal.kafka_io.columns import Slice
from kafka_marshal.kafka_io.slices import TopicReplaced
from kafka_marshal.protocol.types import OffsetRange, TopicPartition
from kafka_marshal.spark import fetch
from kafka_marshal.spark.options import parse
from kafka_marshal.spark.planning import Task
from kafka_marshal.spark.rows import columns
from simulator.clock import VirtualClock

T0 = TopicPartition("t", 0)
CLAIM = ClaimRef(
    group_id="g",
    client_id="c",
    incarnation=b"i" * 16,
    topic="t",
    partition=0,
    epoch=5,
    token="1.0.5",
    secret="5e" * 16,
)
BASE = {"kafka.bootstrap.servers": "b:1", "subscribe": "t", "group": "g"}


def task_of(partition, first, end, claim=None, topic_id=""):
    return Task(
        partition=partition, first=first, end=end, claim=claim, topic_id=topic_id
    )


class FakeGrants:
    """A grant client with the given answers."""

    def __init__(self, *, is_current=True, grants=()):
        self.current = is_current
        self.grants = list(grants)
        self.asked = []
        self.looks = 0

    def is_current(self, ref, *, timeout_ms):
        assert ref == CLAIM
        assert timeout_ms > 0
        self.looks += 1
        return self.current

    def acquire(self, ref, wanted, *, timeout_ms):
        self.asked.append(wanted)
        return self.grants.pop(0) if self.grants else None


class Reader:
    """A log of offsets 0 to 9, of which some are gone."""

    def __init__(self, start=0, fault=None, end=10, topic_id="", truncated_at=None):
        self.start = start
        self.fault = fault
        self.end = end
        self.topic_id = topic_id
        self.truncated_at = truncated_at

    def read(self, partition, span, *, timeout_ms, with_headers, topic_id):
        assert partition == T0
        first, end = span.first, span.end
        if topic_id != self.topic_id:
            raise TopicReplaced(
                "recreated", requested=first, log_start=-1, log_end=-1, partition=T0
            )
        if self.truncated_at is not None:
            at, self.truncated_at = self.truncated_at, None
            raise PositionError(
                "cut off",
                requested=at,
                log_start=0,
                log_end=self.end,
                partition=T0,
            )
        if self.fault is not None:
            raise self.fault
        if first < self.start:
            raise PositionError(
                "gone", requested=first, log_start=self.start, log_end=10
            )
        for at in range(first, min(end, self.end), 4):
            offsets = list(range(at, min(at + 4, end, self.end)))
            same = [None] * len(offsets)
            yield Slice(
                offsets=offsets,
                times_ms=[0 for _ in same],
                kinds=[0 for _ in same],
                keys=same,
                values=same,
                headers=None,
            )
        if end > self.end:
            raise PositionError(
                *("cut off",),
                requested=max(first, self.end),
                log_start=0,
                log_end=self.end,
                partition=T0,
            )


@pytest.fixture
def world(monkeypatch):
    """Give tasks a grant client and a reader of the test."""
    dropped = []

    def meet(client=None, reader=None):
        monkeypatch.setattr(fetch, "_grant_client", lambda _: client)
        monkeypatch.setattr(
            fetch._slices, "reader", lambda *_, **__: reader or Reader()
        )
        monkeypatch.setattr(fetch._slices, "drop", lambda: dropped.append(True))
        return dropped

    return meet


def offsets(task, **more):
    options = parse(BASE | more)
    schema = columns(has_headers=False, has_token=options.has_token)
    found = fetch.read(task, options, schema=schema)
    return [row["offset"] for batch in found for row in batch.to_pylist()]


def test_a_range_without_a_claim_is_read(world):
    world()
    assert offsets(task_of(T0, 2, 9)) == [2, 3, 4, 5, 6, 7, 8]


def test_rows_have_the_token_of_their_claim_and_the_topic_id(world):
    world(FakeGrants(), Reader(topic_id="a1"))
    found = fetch.read(
        task_of(T0, 0, 2, CLAIM, topic_id="a1"),
        parse(BASE | {"includeToken": "true"}),
        schema=columns(has_headers=False, has_token=True),
    )
    rows = [row for batch in found for row in batch.to_pylist()]
    assert {(row["token"], row["topicId"]) for row in rows} == {("1.0.5", "a1")}


def test_an_ended_claim_fails_the_task_before_its_first_row(world):
    world(FakeGrants(is_current=False))
    with pytest.raises(ClaimLost, match="no longer held under token") as caught:
        offsets(task_of(T0, 0, 2, CLAIM))
    assert caught.value.reason == "stale_token"


def test_a_claim_is_checked_again_during_a_task(world, monkeypatch):
    """By then the driver may have died and another owner may be working."""
    client, clock = FakeGrants(), VirtualClock()
    world(client)
    monkeypatch.setattr(fetch, "_clock", clock)
    schema = columns(has_headers=False, has_token=False)
    found = fetch.read(task_of(T0, 0, 10, CLAIM), parse(BASE), schema=schema)
    assert next(found).num_rows == 4
    clock.advance(fetch.CHECK_MS - 1)
    assert next(found).num_rows == 4
    assert client.looks == 1
    clock.advance(1)
    client.current = False
    with pytest.raises(ClaimLost, match="reads no further"):
        next(found)
    assert client.looks == 2


def test_granted_offsets_are_read_without_checking_the_claim(world, monkeypatch):
    client, clock = (
        FakeGrants(is_current=False, grants=[OffsetRange(0, 10)]),
        VirtualClock(),
    )
    world(client)
    monkeypatch.setattr(fetch, "_clock", clock)
    options = parse(BASE | {"delivery": "amo"})
    schema = columns(has_headers=False, has_token=False)
    rows = 0
    for batch in fetch.read(task_of(T0, 0, 10, CLAIM), options, schema=schema):
        rows += batch.num_rows
        clock.advance(10 * fetch.CHECK_MS)
    assert (rows, client.looks) == (10, 0)


def test_at_most_once_only_granted_offsets_are_read(world, caplog):
    client = FakeGrants(grants=[OffsetRange(1, 4), OffsetRange(4, 7)])
    world(client)
    assert offsets(task_of(T0, 2, 7, CLAIM), delivery="amo") == [1, 2, 3, 4, 5, 6]
    assert client.asked == [OffsetRange(2, 7), OffsetRange(4, 7)]
    assert caplog.text == ""
    world(FakeGrants(grants=[OffsetRange(2, 5)]))
    assert offsets(task_of(T0, 2, 7, CLAIM), delivery="amo") == [2, 3, 4]
    assert "range_not_granted t-0 offsets 5 to 6" in caplog.text
    world(FakeGrants())
    assert offsets(task_of(T0, 2, 7, CLAIM), delivery="amo") == []
    assert "range_not_granted t-0 offsets 2 to 6" in caplog.text


def test_offsets_below_the_log_start_fail_or_are_skipped(world):
    world(reader=Reader(start=5))
    with pytest.raises(PositionError, match="set failOnDataLoss to false"):
        offsets(task_of(T0, 2, 9))
    assert offsets(task_of(T0, 2, 9), failOnDataLoss="false") == [5, 6, 7, 8]
    world(reader=Reader(start=9))
    assert offsets(task_of(T0, 2, 7), failOnDataLoss="false") == []


def test_offsets_beyond_the_log_end_fail_or_are_not_read(world, caplog):
    world(reader=Reader(end=4))
    with pytest.raises(PositionError, match="its log has offsets 0 to 3"):
        offsets(task_of(T0, 2, 9))
    assert offsets(task_of(T0, 2, 9), failOnDataLoss="false") == [2, 3]
    assert offsets(task_of(T0, 6, 9), failOnDataLoss="false") == []
    assert "position_jumped" in caplog.text


def test_after_a_truncation_another_reader_is_used(world):
    dropped = world(reader=Reader(truncated_at=2))
    assert offsets(task_of(T0, 2, 5), failOnDataLoss="false") == [2, 3, 4]
    assert dropped


def test_nothing_is_read_from_a_topic_that_was_recreated(world):
    world(reader=Reader(topic_id="new"))
    task = task_of(T0, 2, 9, topic_id="old")
    with pytest.raises(PositionError, match="recreated"):
        offsets(task)
    assert offsets(task, failOnDataLoss="false") == []


def test_a_repeated_error_at_one_offset_ends_the_task(world):
    fault = PositionError("?", requested=2, log_start=0, log_end=10, partition=T0)
    world(reader=Reader(fault=fault))
    with pytest.raises(PositionError):
        offsets(task_of(T0, 2, 9), failOnDataLoss="false")


def test_a_position_error_without_a_log_range_is_raised(world):
    fault = PositionError("?", requested=2, log_start=-1, log_end=-1)
    world(reader=Reader(fault=fault))
    with pytest.raises(PositionError):
        offsets(task_of(T0, 2, 9), failOnDataLoss="false")


def test_a_reader_that_failed_is_not_used_again(world):
    dropped = world(reader=Reader(fault=CoordinationError("away")))
    with pytest.raises(CoordinationError, match="away"):
        offsets(task_of(T0, 0, 2))
    assert dropped


@pytest.fixture
def frozen(monkeypatch):
    """Count how often the heap is frozen; it is not."""
    calls = []
    monkeypatch.setattr(fetch.gc, "freeze", lambda: calls.append(True))
    monkeypatch.setattr(fetch, "_frozen", set())
    return calls


def test_a_spark_worker_freezes_its_heap_once(world, frozen, monkeypatch):
    world()
    monkeypatch.setattr(TaskContext, "get", object)
    offsets(task_of(T0, 0, 2))
    offsets(task_of(T0, 2, 4))
    assert len(frozen) == 1


def test_the_heap_of_another_process_is_left_alone(world, frozen):
    world()
    offsets(task_of(T0, 0, 2))
    assert not frozen
