"""How a batch read is planned; the cluster is played."""

import json

import pytest
from pyspark.sql.datasource import InputPartition

from kafka_marshal.errors import PositionError
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark import fetch, starting
from kafka_marshal.spark.batch import MarshalBatchReader
from kafka_marshal.spark.options import EARLIEST, LATEST, parse
from kafka_marshal.spark.task import Task, TaskPartition

BASE = {"kafka.bootstrap.servers": "b:1", "subscribe": "t"}
T = [TopicPartition("t", number) for number in range(2)]


class Logs:
    """Two logs, from 10 to 20 and from 10 to 12."""

    is_closed = False

    def __init__(self, options):
        Logs.is_closed = False

    def partitions(self):
        return T

    def resolve(self, bound, partitions, *, name):
        at = {EARLIEST: [10, 10], LATEST: [20, 12]}[bound.everywhere]
        return {p: bound.offsets.get(p, at[p.partition]) for p in partitions}

    def starts(self, partitions):
        return dict.fromkeys(partitions, 10)

    def topic_ids(self, topics):
        return dict.fromkeys(topics, "ab")

    def close(self):
        Logs.is_closed = True


@pytest.fixture
def planned(monkeypatch):
    monkeypatch.setattr(starting, "Cluster", Logs)

    def plan(**more):
        reader = MarshalBatchReader(parse(BASE | more), None)
        return [each.task for each in reader.partitions()]

    return plan


def task(partition, first, end):
    return Task(partition, first, end, topic_id="ab")


def test_each_partition_is_a_task(planned):
    assert planned() == [task(T[0], 10, 20), task(T[1], 10, 12)]
    assert Logs.is_closed
    assert planned(minPartitions="4") == [
        task(T[0], 10, 13),
        task(T[0], 13, 16),
        task(T[0], 16, 20),
        task(T[1], 10, 12),
    ]


def test_nothing_to_read_is_one_task_without_a_range(planned):
    assert planned(startingOffsets="latest") == [None]
    reader = MarshalBatchReader(parse(BASE), None)
    assert list(reader.read(TaskPartition(None))) == []
    assert list(reader.read(InputPartition(None))) == []


def test_a_start_below_the_log_fails_or_is_moved(planned):
    below = {"startingOffsets": json.dumps({"t": {"0": 3}})}
    with pytest.raises(PositionError, match="log begins at 10"):
        planned(**below)
    assert Logs.is_closed
    assert planned(**below, failOnDataLoss="false")[0] == task(T[0], 10, 20)


def test_a_task_is_read_by_its_options(monkeypatch):
    seen = []
    monkeypatch.setattr(fetch, "read", lambda *a, **k: iter([seen.append((a, k))]))
    options, one = parse(BASE), task(T[0], 1, 2)
    list(MarshalBatchReader(options, "schema").read(TaskPartition(one)))
    assert seen == [((one, options), {"schema": "schema"})]
