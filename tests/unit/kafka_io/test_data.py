"""Queries of offsets, and the offsets of consumer groups."""

from typing import NamedTuple

import pytest
from kafka import TopicPartition as KafkaPlace
from kafka import errors

from kafka_marshal.errors import LogUnreadable, LogUnwritable
from kafka_marshal.kafka_io import transactions
from kafka_marshal.kafka_io.data import KafkaDataLog, KafkaOffsets
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.protocol.types import TopicPartition


class Row(NamedTuple):
    offset: int
    timestamp: int


A, B = TopicPartition("t", 0), TopicPartition("t", 1)


class Admin:
    """A fake of kafka-python's admin client, with one row per partition number."""

    def __init__(self, rows):
        self.rows = rows
        self.asked = []
        self.leaders = {}

    def describe_topics(self, topics):
        return [
            {
                "name": name,
                "partitions": [
                    {"partition_index": number, "leader_id": leader}
                    for number, leader in enumerate(self.leaders[name])
                ],
            }
            for name in topics
        ]

    def list_partition_offsets(self, specs, *, isolation_level, timeout_ms):
        self.asked.append((dict(specs), isolation_level.name))
        return {place: self.rows[place.partition] for place in specs}


@pytest.fixture
def fetching(monkeypatch):
    def ask(rows, level="read_uncommitted"):
        offsets = KafkaOffsets(ConnectionConfig("b:1"), isolation_level=level)
        admin = Admin(rows)
        monkeypatch.setattr(offsets._admin, "call", lambda work, **_: work(admin))
        return offsets, admin

    return ask


def test_starts_and_ends_request_earliest_and_latest_offsets(fetching):
    offsets, admin = fetching([Row(3, -1), Row(0, -1)], "read_committed")
    assert offsets.starts([A, B], 100) == {A: 3, B: 0}
    assert offsets.ends([A], 100) == {A: 3}
    earliest, latest = {KafkaPlace(*A): -2, KafkaPlace(*B): -2}, {KafkaPlace(*A): -1}
    assert admin.asked == [(earliest, "READ_COMMITTED"), (latest, "READ_COMMITTED")]


def test_only_partitions_with_a_leader_are_queried(fetching):
    offsets, admin = fetching([Row(3, -1), Row(4, -1)])
    gone = TopicPartition("gone", 0)
    admin.leaders = {"t": [1, -1], "gone": []}
    assert offsets.known_ends([A, B, gone], 100) == {A: 3}
    assert admin.asked == [({KafkaPlace(*A): -1}, "READ_UNCOMMITTED")]
    assert offsets.known_ends([gone], 100) == offsets.known_ends([], 100) == {}
    assert len(admin.asked) == 1


def test_a_time_after_the_last_record_has_no_offset(fetching):
    offsets, admin = fetching([Row(7, 50), Row(-1, -1)])
    assert offsets.at_times({A: 40, B: 60}, 100) == {A: 7, B: None}
    assert admin.asked[0][1] == "READ_UNCOMMITTED"


def test_an_empty_query_sends_nothing(fetching):
    offsets, admin = fetching([])
    assert offsets.at_times({}, 100) == {}
    assert admin.asked == []
    offsets.close(0)


class Refusing:
    """A fake of kafka-python's admin client whose principal lacks a right."""

    def __init__(self, kind):
        self.kind = kind

    def list_group_offsets(self, _):
        raise self.kind("refused")

    def alter_group_offsets(self, _, offsets):
        return dict.fromkeys(offsets, self.kind)


@pytest.mark.parametrize(
    ("kind", "reading", "writing"),
    [
        (errors.GroupAuthorizationFailedError, "DESCRIBE on group g", "READ on group"),
        (errors.TopicAuthorizationFailedError, "READ on topic t", "READ on topic t"),
    ],
)
def test_a_denied_group_offset_names_the_missing_right(
    monkeypatch, kind, reading, writing
):
    """Either the right on the group or that on the topic may be missing."""
    data = KafkaDataLog(ConnectionConfig("b:1"))
    monkeypatch.setattr(data._admin, "_client", Refusing(kind))
    with pytest.raises(LogUnreadable, match=f"grant {reading}"):
        data.committed("g", [A, B], timeout_ms=60_000)
    with pytest.raises(LogUnwritable, match=f"grant {writing}"):
        data.commit("g", {A: 1}, timeout_ms=60_000)


def test_a_transactional_producer_uses_the_connections_of_the_log(monkeypatch):
    data, made = KafkaDataLog(ConnectionConfig("b:1")), []

    def make(*given, **rest):
        made.append((given, rest))

    monkeypatch.setattr(transactions, "KafkaTransactions", make)
    data.transactions("an id", group_id="g", timeout_ms=1_000)
    rest = {"timeout_ms": 1_000, "coordination_topic": "__marshal"}
    assert made == [((data._admin, "an id"), {"group_id": "g", **rest})]
