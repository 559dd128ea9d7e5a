"""The data reader over kafka-python: records, fetches, interruptions."""

import gc
import pickle
import signal
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from aiokafka.record.default_records import DefaultRecord
from kafka import TopicPartition as KafkaTopicPartition
from kafka import errors as kafka_errors

from kafka_marshal.errors import CoordinationError, MarshalError, PositionError
from kafka_marshal.kafka_io import reader as module
from kafka_marshal.kafka_io.packed_records import (
    Origin,
    PackedPiece,
    PackedRun,
    ParsedRecord,
    parsed_records,
)
from kafka_marshal.kafka_io.reader import (
    MADE_RECORDS,
    REPOLL_S,
    KafkaDataReader,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.ports import PlainRecord, Record, Records, column_of
from kafka_marshal.protocol.types import Token, TopicPartition

PLACE = TopicPartition("t", 2)
TOKEN = Token(1, 0, 5)


def records(*offsets):
    origin = Origin("t", 2, 3)
    rows = [parsed(each) for each in offsets]
    sources = list(parsed_records(rows, TOKEN, origin=origin))
    return Records.of_sources(sources, token=TOKEN, kind=MADE_RECORDS)


def parsed(offset, *, headers=()):
    return DefaultRecord(offset, 99, 1, b"k", b"v%d" % offset, list(headers))


def test_a_parsed_record_equals_a_plain_record_in_every_field():
    sources = [parsed(7, headers=[("h", b"1")])]
    (record,) = parsed_records(sources, TOKEN, origin=Origin("t", 2, 3))
    plain = PlainRecord("t", 2, 7, 99, 1, b"k", b"v7", (("h", b"1"),), 3, TOKEN)
    assert isinstance(record, ParsedRecord)
    assert record == plain
    assert repr(record) == repr(plain)
    assert pickle.loads(pickle.dumps(record)) == plain


def test_missing_fields_of_parsed_records_are_none():
    (bare,) = parsed_records([parsed(1)], None, origin=Origin("t", 2, -1))
    assert (bare.leader_epoch, bare.headers, bare.token) == (None, (), None)
    with pytest.raises(AttributeError):
        bare.value = b"other"


def test_parsed_records_are_not_tracked_by_the_garbage_collector():
    sources = [parsed(at) for at in range(9)]
    for record in parsed_records(sources, TOKEN, origin=Origin("t", 2, 3)):
        assert not gc.is_tracked(record)


def test_polled_records_are_a_sequence():
    found = records(3, 5, 6)
    assert [record.offset for record in found] == [3, 5, 6]
    assert [record.offset for record in found] == [3, 5, 6]
    assert (found[0].offset, found[-1].offset, len(found)) == (3, 6, 3)
    assert [record.offset for record in found[1:]] == [5, 6]
    assert [record.offset for record in reversed(found)] == [6, 5, 3]
    assert found[1] in found
    assert not records()
    assert list(records()[:1]) == []
    with pytest.raises(IndexError):
        found[3]
    assert repr(found[:1]) == f"Records([{found[0]!r}])"


def test_slices_keep_the_token():
    assert {record.token for record in records(1, 2, 3)[::2]} == {TOKEN}


def test_records_are_immutable():
    record: Record = records(1)[0]
    with pytest.raises(AttributeError):
        record.value = b"other"
    with pytest.raises(AttributeError):
        record.key = b"other"


class FakeConsumer:
    """A fake of kafka-python's consumer whose polls return given answers.

    Attributes:
        answers: What the next polls return.
        sent: How often fetches were sent after a poll.
        flushed: How many of these were also flushed to the network.
        driven: How often available bytes were received.
    """

    def __init__(self, *answers, fetched=(), begun=None, error=None, under_way=False):
        self.answers = list(answers)
        self.sent = self.flushed = 0
        self.config = {}
        self._error = error
        self.driven = 0
        selector = SimpleNamespace(drive=self._drive, flush=self._flush)
        self._client = SimpleNamespace(
            cluster=SimpleNamespace(config={}), selector=selector
        )
        self._fetcher = SimpleNamespace(
            config={},
            _completed_fetches=fetched,
            _next_partition_records=begun,
            in_flight_fetches=lambda: under_way,
            _create_fetch_requests=dict,
            _handle_fetch_response=lambda *_: None,
            send_fetches=self._send_fetches,
        )

    def _drive(self):
        self.driven += 1

    def _flush(self):
        self.flushed = self.sent

    def _send_fetches(self):
        self.sent += 1
        if self._error is not None:
            raise self._error

    def assign(self, places):
        pass

    def seek(self, place, offset):
        pass

    def poll(self, timeout_ms, max_records):
        return self.answers.pop(0)

    def close(self, *, autocommit):
        pass


def batches(*offsets):
    return {KafkaTopicPartition(*PLACE): list(records(*offsets))}


@pytest.fixture
def polled(monkeypatch):
    """Poll a fake consumer once with a new reader; return the offsets found."""
    made = []

    def poll(consumer):
        reader = KafkaDataReader(ConnectionConfig("nowhere:1"))
        made.append(reader)
        monkeypatch.setattr(reader, "_new_consumer", lambda: consumer)
        reader.assign([PLACE])
        reader.seek(PLACE, 0)
        found = reader.poll(10_000, 10)
        return [record.offset for record in found.get(PLACE, ())]

    yield poll
    for each in made:
        each.close(1_000)


@pytest.mark.parametrize(
    ("count", "wait_ms"), [(1, 100), (2_000, 100), (6_000, 300), (15_000, 500)]
)
def test_fetches_of_many_partitions_wait_longer(polled, count, wait_ms, monkeypatch):
    consumer = FakeConsumer(batches(0))
    polled(consumer)
    waits = consumer._fetcher.config
    assert waits == {"fetch_max_wait_ms": 100}
    reader = KafkaDataReader(ConnectionConfig("nowhere:1"))
    monkeypatch.setattr(reader, "_new_consumer", lambda: consumer)
    reader.assign([PLACE])
    reader.seek(PLACE, 0)
    consumer.answers = [{}]
    reader.poll(10_000, 1)
    reader.assign([TopicPartition("t", number) for number in range(count)])
    assert waits == {"fetch_max_wait_ms": wait_ms}
    reader.close(0)


def test_the_next_fetch_is_sent_once_all_records_are_taken(polled):
    consumer = FakeConsumer(batches(0, 1))
    assert polled(consumer) == [0, 1]
    assert consumer.flushed == consumer.sent == 1


def test_an_empty_poll_sends_no_further_fetch(polled):
    consumer = FakeConsumer({})
    assert polled(consumer) == []
    assert consumer.sent == 0


@pytest.mark.parametrize("rest", [{"fetched": ["whole"]}, {"begun": ["rest"]}])
def test_the_next_fetch_is_not_sent_while_records_are_left(polled, rest):
    consumer = FakeConsumer(batches(0, 1), **rest)
    assert polled(consumer) == [0, 1]
    assert consumer.sent == 0


def test_a_fetch_that_cannot_be_sent_loses_no_record(polled):
    consumer = FakeConsumer(batches(0, 1), error=RuntimeError("closed"))
    assert polled(consumer) == [0, 1]
    assert consumer.sent == 1


@pytest.mark.parametrize(
    ("state", "is_asked"),
    [
        ({"under_way": True}, False),
        ({}, True),
        ({"under_way": True, "fetched": ["whole"]}, True),
        ({"under_way": True, "begun": ["rest"]}, True),
    ],
)
def test_a_poll_without_a_wait_skips_kafka_python_if_nothing_arrived(
    monkeypatch, state, is_asked
):
    consumer = FakeConsumer({}, batches(0), **state)
    reader = KafkaDataReader(ConnectionConfig("nowhere:1"))
    monkeypatch.setattr(reader, "_new_consumer", lambda: consumer)
    now = [1_000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    reader.assign([PLACE])
    reader.seek(PLACE, 0)
    reader.poll(10_000, 10)
    assert bool(reader.poll(0, 10)) == is_asked
    assert consumer.driven == 1
    if not is_asked:
        now[0] += REPOLL_S * 1.01
        assert reader.poll(0, 10), "changes are noticed after a moment"
    reader.close(1_000)


def test_parsed_and_packed_records_form_one_sequence():
    reader = KafkaDataReader(ConnectionConfig("nowhere:1"))
    reader.assign([PLACE])
    reader.seek(PLACE, 0, token=TOKEN)
    run = PackedRun(
        origin=Origin("t", 2, 3), base=5, data=b"", places=bytes(16), fields=0
    )
    piece = PackedPiece(run, 0, 2)
    made = list(parsed_records([parsed(3), parsed(8)], TOKEN, origin=Origin("t", 2, 3)))
    found = reader._to_records(PLACE, [made[0], piece, made[1]])
    assert found.column("offset") == [3, 5, 6, 8]
    assert (found[:1][0], found[3:][0]) == (made[0], made[1])
    assert list(reader._to_records(PLACE, made)) == made
    assert reader._to_records(PLACE, [piece]).pieces == [piece]
    assert column_of(found[3:], "value") == [b"v8"]
    reader.close(0)


class SlowConsumer(FakeConsumer):
    """A fake consumer whose poll runs a call first.

    Attributes:
        closed: Set once it is closed.
        was_polled: Whether it was closed during a poll.
    """

    def __init__(self, call):
        super().__init__()
        self.closed = threading.Event()
        self.is_polled = self.was_polled = False
        self._call = call

    def poll(self, timeout_ms, max_records):
        self.is_polled = True
        self._call()
        self.is_polled = False
        return batches(0)

    def close(self, *, autocommit):
        self.was_polled = self.is_polled
        self.closed.set()


@pytest.fixture
def slow(monkeypatch):
    """Return a function that makes a reader and its slow consumer."""

    def make(call):
        consumer = SlowConsumer(call)
        reader = KafkaDataReader(ConnectionConfig("nowhere:1"))
        monkeypatch.setattr(reader, "_new_consumer", lambda: consumer)
        reader.assign([PLACE])
        reader.seek(PLACE, 0)
        return reader, consumer

    return make


def test_a_consumer_polled_by_another_thread_is_closed_after_the_poll(slow):
    begun, may_end = threading.Event(), threading.Event()

    def wait():
        begun.set()
        may_end.wait(60)

    reader, consumer = slow(wait)
    found = []
    polling = threading.Thread(target=lambda: found.append(reader.poll(10_000, 10)))
    polling.start()
    assert begun.wait(60)
    reader.close(0)
    assert not consumer.closed.is_set()
    may_end.set()
    polling.join(60)
    assert consumer.closed.wait(60)
    assert not consumer.was_polled
    assert found == [{}]


def test_a_close_by_a_signal_handler_does_not_wait_for_the_poll(slow):
    reader, consumer = slow(lambda: reader.close(600_000))
    assert reader.poll(10_000, 10) == {}
    assert consumer.closed.wait(60)
    assert not consumer.was_polled


def test_an_error_of_a_poll_during_a_close_is_translated(slow):
    def close_and_fail():
        reader.close(0)
        raise kafka_errors.OffsetOutOfRangeError({KafkaTopicPartition(*PLACE): 7})

    reader, _ = slow(close_and_fail)
    with pytest.raises(PositionError, match=r"Position 7 of .* is outside its log"):
        reader.poll(10_000, 10)


class OverTimeError(Exception):
    """An exception of an application's signal handler."""


def raise_over_time(*_):
    raise OverTimeError


class OnSignal:
    """Signal handlers that are not plain functions."""

    def __call__(self, *_):
        raise OverTimeError

    def method(self, *_):
        raise OverTimeError


@pytest.fixture
def on_signal():
    """Return a function that installs a SIGUSR1 handler and returns its sender."""
    before = signal.getsignal(signal.SIGUSR1)

    def install(handler):
        signal.signal(signal.SIGUSR1, handler)
        return partial(signal.raise_signal, signal.SIGUSR1)

    yield install
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "handler",
    [raise_over_time, OnSignal(), OnSignal().method, partial(raise_over_time, 1)],
    ids=["function", "callable", "method", "partial"],
)
def test_an_exception_of_a_signal_handler_replaces_the_consumer(
    slow, on_signal, handler
):
    """The interrupted consumer may be in any state, so another one replaces it."""
    reader, consumer = slow(on_signal(handler))
    with pytest.raises(OverTimeError):
        reader.poll(10_000, 10)
    assert consumer.closed.wait(60)
    consumer._call = lambda: None
    assert [record.offset for record in reader.poll(10_000, 10)[PLACE]] == [0]
    reader.close(1_000)


def test_an_exception_of_the_signal_enumeration_is_translated(slow):
    """Default signal handlers are members of this enumeration, which is callable."""
    reader, consumer = slow(lambda: signal.Handlers(77))
    with pytest.raises(MarshalError, match="77 is not a valid Handlers"):
        reader.poll(10_000, 10)
    assert not consumer.closed.is_set()
    reader.close(1_000)


def test_ctrl_c_in_a_poll_closes_the_consumer(slow):
    def interrupt():
        raise KeyboardInterrupt

    reader, consumer = slow(interrupt)
    with pytest.raises(KeyboardInterrupt):
        reader.poll(10_000, 10)
    assert consumer.closed.wait(60)
    reader.close(1_000)


def test_an_exception_of_a_signal_handler_in_a_flush_is_raised(monkeypatch, on_signal):
    consumer = FakeConsumer(batches(0))
    consumer._client.selector.flush = on_signal(raise_over_time)
    reader = KafkaDataReader(ConnectionConfig("nowhere:1"))
    monkeypatch.setattr(reader, "_new_consumer", lambda: consumer)
    reader.assign([PLACE])
    reader.seek(PLACE, 0)
    with pytest.raises(OverTimeError):
        reader.poll(10_000, 10)
    reader.close(1_000)


def test_any_other_exception_of_a_poll_is_translated(slow):
    def fail():
        raise OverTimeError

    reader, consumer = slow(fail)
    with pytest.raises(CoordinationError, match="OverTimeError"):
        reader.poll(10_000, 10)
    assert not consumer.closed.is_set()
    reader.close(1_000)
