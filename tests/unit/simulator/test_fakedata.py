"""Faults of the fake data log; the conformance kit tests the rest."""

import pytest

from kafka_marshal.errors import CoordinationError, InvalidTransition
from kafka_marshal.protocol.types import TopicPartition
from simulator.fakelog import FakeKafka

PLACE = TopicPartition("data", 0)


@pytest.fixture
def cluster():
    made = FakeKafka()
    made.create_topic("data", 2)
    return made


@pytest.fixture
def data(cluster):
    return cluster.data_log()


def test_a_disconnected_client_gets_no_answers(cluster, data):
    cluster.produce(PLACE, b"x")
    reader = data.reader()
    reader.assign([PLACE])
    reader.seek(PLACE, 0)
    data.cut = True
    calls = [
        lambda: data.describe(["data"], 10),
        lambda: data.ranges([PLACE], 10),
        lambda: data.committed("g", [PLACE], timeout_ms=10),
        lambda: data.commit("g", {PLACE: 1}, timeout_ms=10),
    ]
    for call in calls:
        with pytest.raises(CoordinationError, match="cut off"):
            call()
    assert reader.poll(0, 1) == {}
    data.cut = False
    assert [record.value for record in reader.poll(0, 1)[PLACE]] == [b"x"]


def test_a_group_with_active_members_refuses_commits(cluster, data):
    cluster.busy_groups.add("g")
    with pytest.raises(CoordinationError, match="active members"):
        data.commit("g", {PLACE: 1}, timeout_ms=10)
    cluster.busy_groups.clear()
    data.commit("g", {PLACE: 1}, timeout_ms=10)
    assert cluster.groups == {"g": {PLACE: 1}}


def test_the_reader_skips_control_records(cluster, data):
    cluster.produce(PLACE, b"x")
    cluster.skip_offsets(PLACE, count=2)
    reader = data.reader()
    reader.assign([PLACE])
    reader.seek(PLACE, 1)
    assert reader.poll(0, 10) == {}
    assert cluster.produce(PLACE, b"y") == 3
    assert [record.offset for record in reader.poll(0, 10)[PLACE]] == [3]


def test_a_reader_waits_for_a_deleted_topic(cluster, data):
    reader = data.reader()
    reader.assign([PLACE])
    reader.seek(PLACE, 0)
    cluster.delete_topic("data")
    assert reader.poll(0, 1) == {}
    cluster.create_topic("data", 1)
    cluster.produce(PLACE, b"new")
    assert [record.value for record in reader.poll(0, 1)[PLACE]] == [b"new"]


def test_polls_serve_partitions_in_turns(cluster, data):
    other = TopicPartition("data", 1)
    for _ in range(3):
        cluster.produce(PLACE, b"a")
        cluster.produce(other, b"b")
    reader = data.reader()
    reader.assign([PLACE, other])
    reader.seek(PLACE, 0)
    reader.seek(other, 0)
    served = [next(iter(reader.poll(0, 1))).partition for _ in range(6)]
    assert served == [0, 1, 0, 1, 0, 1]


def test_a_closed_reader_refuses_calls(data):
    reader = data.reader()
    reader.close(0)
    for call in (
        lambda: reader.assign([]),
        lambda: reader.seek(PLACE, 0),
        lambda: reader.pause([]),
        lambda: reader.resume([]),
    ):
        with pytest.raises(InvalidTransition):
            call()
