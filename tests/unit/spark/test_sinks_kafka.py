"""What KafkaSink writes in a transaction, and which rows it does not write."""

from types import SimpleNamespace

import attrs
import pytest
from opening import Opened
from sinkkit import Frame

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.fast import transactions
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark import fencing, sinks_kafka
from kafka_marshal.spark.fencing import SINK_COLUMNS
from kafka_marshal.spark.sinks_kafka import KafkaSink, _bytes

OPTIONS = {
    "kafka.bootstrap.servers": "localhost:1",
    "subscribe": "t",
    "group": "g",
    "includeToken": "true",
}
T0 = TopicPartition("t", 0)


class Transactions(Opened):
    """What the broker stores for one transactional id."""

    made: list = []  # noqa: RUF012 - created for each test
    left = None

    def __init__(
        self, settings, transactional_id, *, group_id, timeout_ms, partitioner
    ):
        self.partitioner = partitioner
        self.name = (transactional_id, group_id)
        self.written = []
        self.headers = []
        self.asked = []
        self.made.append(self)

    def position(self, partition, *, topic_id):
        self.asked.append(topic_id)
        return self.left

    def write(self, records, *, partition, position, metadata):
        records = list(records)
        self.asked.append(metadata)
        (topic,) = {r.topic for r in records}
        self.written.append((topic, [r.value for r in records], partition, position))
        self.headers += [r.headers for r in records]


@pytest.fixture
def broker(monkeypatch):
    monkeypatch.setattr(Transactions, "made", [])
    monkeypatch.setattr(Transactions, "left", None)
    monkeypatch.setattr(transactions, "Transactions", Transactions)
    return Transactions


@pytest.fixture
def sink(monkeypatch):
    monkeypatch.setattr(fencing.Fence, "holds", lambda *_, token: token == "1.0.7")
    return KafkaSink.of(OPTIONS, topic="out")


def rows(*offsets, token="1.0.7", partition=0):
    return [
        SimpleNamespace(
            offset=n,
            token=token,
            topic="t",
            topicId="1" * 32,
            partition=partition,
            key=None,
            value=b"%d" % n,
        )
        for n in offsets
    ]


def test_rows_and_their_position_are_one_transaction(sink, broker):
    assert sink.write(T0, token="1.0.7", rows=iter(rows(4, 5))) == 2
    (made,) = broker.made
    assert made.name == ("g.out/g/t/0", "g.out")
    assert made.written == [("out", [b"4", b"5"], T0, 6)]


def test_the_partitioner_is_that_of_java_unless_another_is_named(sink, broker):
    other = KafkaSink.of(OPTIONS, topic="out", partitioner="consistent_random")
    for each in (sink, attrs.evolve(sink, partitioner=other.partitioner)):
        each.write(T0, token="1.0.7", rows=iter(rows(4)))
    chosen = [made.partitioner for made in broker.made]
    assert chosen == ["murmur2_random", "consistent_random"]
    with pytest.raises(ConfigurationError, match=r"'murmur3' is none of murmur2_ran"):
        KafkaSink.of(OPTIONS, topic="out", partitioner="murmur3")


def test_written_rows_are_not_written_again(sink, broker, monkeypatch, caplog):
    monkeypatch.setattr(broker, "left", 5)
    assert sink.write(T0, token="1.0.7", rows=iter(rows(4, 5))) == 1
    assert broker.made[0].written == [("out", [b"5"], T0, 6)]
    assert not caplog.text
    assert sink.write(T0, token="1.0.7", rows=iter(rows(3, 4))) == 0
    assert broker.made[1].written == []
    assert "rows_already_written t-0: all rows" in caplog.text


def test_an_ended_claim_writes_nothing(sink, broker, caplog):
    assert sink.write(T0, token="1.0.3", rows=iter(rows(4))) == 0
    assert broker.made[0].written == []
    assert "dropped" in caplog.text


def test_each_topic_partition_has_its_own_transactional_id(sink, broker):
    sink(Frame([*rows(1), *rows(0, partition=1), *rows(0)]), 0)
    assert [made.name[0] for made in broker.made] == ["g.out/g/t/0", "g.out/g/t/1"]
    assert [[rows for _, rows, *_ in made.written] for made in broker.made] == [
        [[b"0", b"1"]],
        [[b"0"]],
    ]
    # The position is that of this topic id, even if an earlier topic had the name.
    assert {each for made in broker.made for each in made.asked} == {"1" * 32}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, None),
        (b"a", b"a"),
        (bytearray(b"b"), b"b"),
        ("ä", b"\xc3\xa4"),
        (7, b"7"),
    ],
)
def test_columns_are_written_as_bytes(value, written):
    assert _bytes(value) == written


def test_an_invalid_topic_name_raises():
    with pytest.raises(ConfigurationError, match="no valid topic"):
        KafkaSink.of(OPTIONS, topic="no topic")


HEADERS = "array<struct<key:string,value:binary>>"


def test_headers_are_written_with_their_records(sink, broker):
    batch = rows(0, 1, 2)
    batch[0].headers = [
        {"key": "a", "value": bytearray(b"1")},
        {"key": "a", "value": None},
    ]
    batch[1].headers = None
    sink(Frame(batch, (*SINK_COLUMNS, "value", "headers"), {"headers": HEADERS}), 0)
    assert broker.made[0].headers == [(("a", b"1"), ("a", None)), (), ()]


def test_a_headers_column_of_another_type_raises(sink):
    frame = Frame(rows(0), (*SINK_COLUMNS, "value", "headers"), {"headers": "string"})
    with pytest.raises(ConfigurationError, match="headers has the type string"):
        sink(frame, 0)


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("kind", ["struct<a:int>", "array<string>", "map<int,int>"])
def test_a_key_or_value_of_a_nested_type_raises(sink, name, kind):
    """Their text would be the repr of a Python object."""
    with pytest.raises(ConfigurationError, match=f"column {name} has the type {kind}"):
        sink(Frame(rows(0), types={name: kind}), 0)


def test_a_batch_without_a_value_column_raises(sink):
    with pytest.raises(ConfigurationError, match="no column value"):
        sink(Frame([], SINK_COLUMNS), 0)


def test_a_missing_extra_raises(monkeypatch):
    monkeypatch.setattr(sinks_kafka, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[fast\]"):
        KafkaSink.of(OPTIONS, topic="out")
