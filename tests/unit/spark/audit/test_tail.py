"""The stream of the log's ends, whose offset moves only when the log grows."""

import json

import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadAllAvailable

from kafka_marshal.errors import CoordinationError, TopicMisconfigured
from kafka_marshal.spark.audit import Source, tail
from kafka_marshal.spark.audit.folding import LogEnds

ALL = ReadAllAvailable()
SOURCE = Source(
    bootstrap_servers="b:1",
    options={
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "me",
        "sasl.password": "hush",
    },
)


@pytest.fixture
def log(monkeypatch):
    """The ends of the log, or the error that the query for them raises."""
    now = {"found": LogEnds("c", "ab", {1: 7, 0: 5})}

    def log_ends(source):
        assert source is SOURCE
        if isinstance(now["found"], Exception):
            raise now["found"]
        return now["found"]

    monkeypatch.setattr(tail, "log_ends", log_ends)
    return now


def test_an_offset_has_ends_time_and_ids_of_the_log(log):
    reader = tail.TailReader(SOURCE)
    assert reader.initialOffset() == {}
    offset = reader.latestOffset({}, reader.getDefaultReadLimit())
    assert offset["ends"] == {"0": 5, "1": 7}
    assert json.loads(json.dumps(offset)) == offset
    (task,) = reader.partitions({}, offset)
    at_ms = offset["as_of_ms"]
    assert list(reader.read(task)) == [
        (0, 5, at_ms, "c", "ab"),
        (1, 7, at_ms, "c", "ab"),
    ]


def test_an_offset_changes_with_ends_or_topic_id_but_not_with_time(log):
    reader = tail.TailReader(SOURCE)
    start = reader.latestOffset({}, ALL) | {"as_of_ms": 1}
    assert reader.latestOffset(start, ALL) == start
    log["found"] = LogEnds("c", "ab", {0: 5, 1: 8})
    assert reader.latestOffset(start, ALL)["ends"] == {"0": 5, "1": 8}
    log["found"] = LogEnds("c", "cd", {0: 5, 1: 7})
    assert reader.latestOffset(start, ALL)["topic_id"] == "cd"


def test_available_now_reads_to_the_ends_at_its_start(log):
    reader = tail.TailReader(SOURCE)
    reader.prepareForTriggerAvailableNow()
    log["found"] = LogEnds("c", "ab", {0: 50, 1: 70})
    offset = reader.latestOffset({}, ALL)
    assert offset["ends"] == {"0": 5, "1": 7}
    assert reader.latestOffset(offset, ALL) == offset


def test_a_running_stream_waits_for_brokers(log, caplog):
    reader = tail.TailReader(SOURCE)
    start = reader.latestOffset({}, ALL)
    log["found"] = CoordinationError("nobody answers")
    assert reader.latestOffset(start, ALL) == start
    assert "nobody answers" in caplog.text
    with pytest.raises(CoordinationError):
        reader.latestOffset({}, ALL)
    log["found"] = TopicMisconfigured("gone", problems=("gone",))
    with pytest.raises(TopicMisconfigured):
        reader.latestOffset(start, ALL)


def test_the_connection_is_pickled_with_the_class_and_not_shown():
    made = tail.tail_of(SOURCE)
    source = cloudpickle.loads(cloudpickle.dumps(made))({})
    assert (source.name(), source.schema()) == (tail.NAME, tail.DDL)
    assert source.streamReader(None)._source == SOURCE
    assert "hush" not in repr(made) + repr(source)
