"""The data reader over librdkafka: records, positions, pauses, faults."""

import gc
import itertools
import pickle
import signal
import threading
from collections import deque
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from kafka_marshal.closing import in_background
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    InvalidTransition,
    LogUnreadable,
    MarshalError,
    PositionError,
    UnknownTopicId,
)
from kafka_marshal.kafka_io.fast import reader as module
from kafka_marshal.kafka_io.fast.clients import Client
from kafka_marshal.kafka_io.fast.reader import FastRecord, fast_records, headers_of
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.ports import PlainRecord
from kafka_marshal.protocol.types import Token, TopicPartition

A, B, C = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)
TOKEN = Token(1, 0, 5)
OLD, NEW = bytes(15) + b"1", bytes(15) + b"2"
BAD = KafkaError(KafkaError._BAD_MSG, "CRC mismatch")
OUT = KafkaError(KafkaError._AUTO_OFFSET_RESET, "out of range")
END = KafkaError(KafkaError._PARTITION_EOF, "end")
CUT = KafkaError(KafkaError._LOG_TRUNCATION, "truncated")


def message(offset, *, headers=None, epoch=3):
    return Message(
        topic="t",
        partition=2,
        offset=offset,
        key=b"k",
        value=b"v%d" % offset,
        headers=headers,
        timestamp=(2, 99),
        leader_epoch=epoch,
    )


def test_a_fast_record_equals_a_plain_record_in_every_field():
    (record,) = fast_records([message(7, headers=[("h", b"1")])], TOKEN)
    plain = PlainRecord("t", 2, 7, 99, 1, b"k", b"v7", (("h", b"1"),), 3, TOKEN)
    assert isinstance(record, FastRecord)
    assert record == plain
    assert pickle.loads(pickle.dumps(record)) == plain


def test_missing_fields_of_a_message_become_none():
    (record,) = fast_records(
        [Message(topic="t", partition=0, offset=0, timestamp=(0, 0))], None
    )
    assert (record.key, record.value, record.token) == (None, None, None)
    assert (record.headers, record.timestamp_type) == ((), -1)


def test_records_keep_their_offsets_with_and_without_gaps():
    for offsets in ([], [4], [4, 5, 6], [4, 5, 7], [4, 6, 7, 9]):
        found = list(fast_records([message(each) for each in offsets], None))
        assert [record.offset for record in found] == offsets
        assert [record.value for record in found] == [b"v%d" % each for each in offsets]


class Unreadable:
    """A message of confluent-kafka with a header name that is not UTF-8.

    Its name is a null pointer: reading it ends the process.
    """

    class Pair(tuple):
        __slots__ = ()

        def __repr__(self):
            return "(<NULL>, b'2')"

        def __getitem__(self, at):
            assert at == 1, "this would end the process"
            return super().__getitem__(at)

    def __init__(self):
        self.asked = 0
        self.now = [("good", b"1"), self.Pair((None, b"2"))]

    def headers(self):
        self.asked += 1
        if self.asked == 1:
            raise SystemError("returned a result with an exception set")
        return self.now

    def set_headers(self, headers):
        self.now = headers


def test_invalid_header_names_are_replaced_without_reading_them():
    unreadable = Unreadable()
    assert headers_of(unreadable) == (("good", b"1"), ("\ufffd", b"2"))
    assert headers_of(unreadable) == (("good", b"1"), ("\ufffd", b"2"))


class Handle:
    """A fake of librdkafka's consumer; notes calls, and returns queued messages."""

    def __init__(self):
        self.queue = deque()
        self.calls = []
        self.assigned = set()
        self.range = (0, 100)
        self.refuses_seeks = False
        self.asked = []

    def list_topics(self, topic, timeout):
        self.asked.append(topic)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    def consume(self, count, timeout):
        assert timeout == 0
        found = []
        while self.queue and len(found) < count:
            found.append(self.queue.popleft())
        return found

    def poll(self, timeout):
        assert timeout > 0
        return self.queue.popleft() if self.queue else None

    def _note(self, name, places):
        self.calls.append((name, sorted((p.topic, p.partition) for p in places)))

    def incremental_assign(self, places):
        for place in places:
            self.calls.append(("start", (place.topic, place.partition, place.offset)))
            assert (place.topic, place.partition) not in self.assigned
            self.assigned.add((place.topic, place.partition))

    def incremental_unassign(self, places):
        self._note("unassign", places)
        self.assigned -= {(place.topic, place.partition) for place in places}

    def seek(self, place):
        if self.refuses_seeks:
            raise KafkaException(KafkaError(KafkaError._STATE))
        self.calls.append(("seek", (place.topic, place.partition, place.offset)))

    def pause(self, places):
        self._note("pause", places)

    def resume(self, places):
        if places:
            self._note("resume", places)

    def get_watermark_offsets(self, place, *, timeout=None, cached=False):
        if self.range is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return self.range

    def made(self, *messages):
        self.queue.extend(messages)


def of(place, *offsets, size=1):
    return [
        Message(topic=place[0], partition=place[1], offset=each, value=bytes(size))
        for each in offsets
    ]


def offsets(records):
    return [record.offset for record in records]


def error(place, kind, offset=-1):
    topic, number = place
    return Message(topic=topic, partition=number, offset=offset, error=kind, value=b"!")


@pytest.fixture
def handle(monkeypatch):
    made = Handle()
    monkeypatch.setattr(module, "new_consumer", lambda *_: Client(handle=made))
    return made


@pytest.fixture
def by_id(handle, monkeypatch):
    """A reader of A, by topic id, and of B; and its clients, oldest first."""
    made = []

    def make(*_):
        made.append(Client(handle=handle))
        made[-1].on_topic_id("t", OLD)
        return made[-1]

    monkeypatch.setattr(module, "new_consumer", make)
    monkeypatch.setattr(module, "close_consumer", lambda _: handle.assigned.clear())
    reader = module.FastDataReader(ConnectionConfig("nobody:1"))
    reader.assign([A, B])
    reader.seek(A, 0, topic_id=OLD)
    reader.seek(B, 0)
    return reader, made


def test_a_client_without_partitions_is_still_polled_for_events(by_id, handle):
    """Without polls, librdkafka would keep its events and log lines for ever."""
    reader, _ = by_id
    polled(reader)
    reader.assign([])
    assert polled(reader) == {}  # unassigns both
    events = error(("", 0), KafkaError(KafkaError._ALL_BROKERS_DOWN)), *of(A, 7)
    handle.made(*events)
    assert polled(reader) == {}
    assert not handle.queue


def test_records_of_the_wanted_topic_id_are_returned(by_id, handle):
    reader, _ = by_id
    handle.made(*of(A, 0, 1))
    assert polled(reader) == {A: [0, 1]}


def test_a_changed_topic_id_is_fetched_by_a_new_client(by_id, handle):
    reader, made = by_id
    handle.made(*of(A, 0, 1), *of(B, 0))
    assert polled(reader) == {A: [0, 1], B: [0]}
    # Records from before and after the change cannot be distinguished.
    made[0].on_topic_id("t", NEW)
    handle.made(*of(A, 2, 3), *of(B, 1))
    assert polled(reader) == {}
    handle.made(*of(B, 1), *of(A, 2))
    assert polled(reader) == {A: [2], B: [1]}
    assert len(made) == 2


def test_records_of_another_topic_id_are_never_returned(by_id, handle):
    reader, _ = by_id
    reader.seek(A, 5, topic_id=NEW)
    handle.made(*of(A, 5, 6), *of(B, 0))
    assert polled(reader) == {B: [0]}
    handle.made(*of(A, 5))
    for kind in (None, OUT, CUT):
        if kind is not None:
            handle.made(error(A, kind))
        assert fails(reader, UnknownTopicId).partition == A
    assert ("seek", ("t", 0, 5)) in handle.calls
    reader.pause([A])
    assert polled(reader) == {}
    # The end of the other topic does not move the position in this one.
    handle.made(error(A, KafkaError(KafkaError._PARTITION_EOF), 9))
    assert polled(reader) == {}
    assert reader.positions()[A] == 5


def test_polls_without_records_visit_no_partition(by_id, handle, monkeypatch):
    """With thousands of partitions, visits would be most of an idle member's load."""
    reader, _ = by_id
    visited = []
    plain = module.FastDataReader._is_of_other_topic

    def is_of_other_topic(self, partition):
        visited.append(partition)
        return plain(self, partition)

    monkeypatch.setattr(module.FastDataReader, "_is_of_other_topic", is_of_other_topic)
    reader.poll(5, 100)
    reader.pause([A])
    reader.poll(5, 100)
    assert not visited
    reader.seek(A, 5, topic_id=NEW)
    assert polled(reader) == {}
    reader.resume([A])
    assert fails(reader, UnknownTopicId).partition == A
    reader.seek(A, 5, topic_id=OLD)
    visited.clear()
    assert polled(reader) == {}
    assert visited, "the former id is only now forgotten"
    visited.clear()
    reader.poll(5, 100)
    assert not visited


def test_a_deleted_topic_raises_unknown_topic_id(by_id, handle):
    reader, _ = by_id
    polled(reader)
    handle.made(error(A, KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
    assert fails(reader, UnknownTopicId).partition == A
    handle.made(error(B, KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
    assert not isinstance(fails(reader, CoordinationError), UnknownTopicId)


def test_a_topic_without_a_reported_id_is_not_read(by_id, handle):
    reader, made = by_id
    polled(reader)
    made[0].topic_ids.clear()
    assert polled(reader) == {}
    handle.made(*of(A, 0))
    assert "does not report which topic" in str(fails(reader, ConfigurationError))


@pytest.fixture
def reader(handle):
    made = module.FastDataReader(ConnectionConfig("nobody:1"))
    made.assign([A, B])
    made.seek(A, 0, token=TOKEN)
    made.seek(B, 0)
    return made


def polled(reader, most=100):
    return {
        place: [record.offset for record in records]
        for place, records in reader.poll(0, most).items()
    }


def fails(reader, kind):
    with pytest.raises(kind) as caught:
        reader.poll(0, 100)
    return caught.value


def test_messages_are_split_by_partition(reader, handle):
    handle.made(*of(A, 0, 1), *of(B, 0), *of(A, 2, 5), *of(B, 3))
    found = reader.poll(0, 100)
    assert {place: [r.offset for r in rs] for place, rs in found.items()} == {
        A: [0, 1, 2, 5],
        B: [0, 3],
    }
    assert {record.token for record in found[A]} == {TOKEN}
    assert {record.token for record in found[B]} == {None}


def test_leaders_are_requested_after_the_loss_of_a_broker(reader, handle):
    """They are requested even while records arrive; polls then wait less than 1 s."""
    reader.poll(0, 100)
    assert handle.asked == []
    reader._client.on_error(KafkaError(KafkaError._TRANSPORT))
    handle.made(*of(A, 0))
    assert polled(reader) == {A: [0]}
    assert handle.asked == ["t"]
    assert reader._client.leaders.max_wait_s(60) < 1


def test_topics_with_equal_partition_numbers_are_kept_apart(reader, handle):
    reader.assign([A, C])
    reader.seek(C, 7)
    handle.made(*of(A, 0), *of(C, 7, 8), *of(A, 1))
    assert polled(reader) == {A: [0, 1], C: [7, 8]}


def test_messages_of_other_partitions_or_earlier_offsets_are_dropped(reader, handle):
    reader.assign([A])
    reader.seek(A, 5)
    handle.made(*of(A, 3, 4, 5), *of(B, 0, 1), *of(A, 6))
    assert polled(reader) == {A: [5, 6]}


def test_a_new_position_is_a_seek(reader, handle):
    reader.poll(0, 1)
    handle.calls.clear()
    reader.seek(A, 9)
    reader.assign([A])
    reader.poll(0, 1)
    # Unassigning begins with a seek, too: only a seek drops buffered messages.
    assert handle.calls == [
        ("seek", ("t", 1, 0)),
        ("unassign", [("t", 1)]),
        ("seek", ("t", 0, 9)),
    ]


@pytest.fixture
def many(handle, monkeypatch):
    """A reader of many partitions, and the partitions."""
    monkeypatch.setattr(module, "close_consumer", lambda _: handle.assigned.clear())
    places = [TopicPartition("t", number) for number in range(3 * module.SEEKS_MAX)]
    made = module.FastDataReader(ConnectionConfig("nobody:1"))
    made.assign(places)
    for place in places:
        made.seek(place, 1)
    polled(made)
    handle.calls.clear()
    return made, places


def test_unassigning_many_partitions_needs_no_seeks(many, handle):
    """With a seek for each, a pause of 15,000 partitions blocked a poll for minutes."""
    reader, places = many
    reader.assign(places[:2])
    handle.made(*of(places[0], 1), *of(places[2], 1))
    assert polled(reader) == {places[0]: [1]}
    assert [name for name, _ in handle.calls] == ["start"] * 2
    reader.assign([])
    assert polled(reader) == {}
    assert handle.assigned == set()


def test_many_new_positions_need_no_seeks(many, handle):
    reader, places = many
    for place in places:
        reader.seek(place, 7)
    polled(reader)
    assert sorted(handle.calls) == [("start", (*place, 7)) for place in places]


def test_a_partition_is_assigned_again_after_a_refused_seek(reader, handle):
    reader.poll(0, 1)
    handle.calls.clear()
    handle.refuses_seeks = True
    reader.seek(A, 9)
    reader.poll(0, 1)
    assert handle.calls == [("unassign", [("t", 0)]), ("start", ("t", 0, 9))]


def test_a_new_client_gets_all_positions_after_a_refused_assignment(
    reader, handle, monkeypatch
):
    handle.made(*of(A, 0), *of(B, 0, 1))
    polled(reader)
    closed = []
    monkeypatch.setattr(module, "close_consumer", closed.append)
    second = Handle()
    monkeypatch.setattr(module, "new_consumer", lambda *_: Client(handle=second))

    def refuse(_):
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "no"))

    handle.incremental_assign = refuse
    reader.assign([A, B, C])
    reader.seek(C, 4)
    with pytest.raises(MarshalError, match="no"):
        reader.poll(0, 1)
    assert [client.handle for client in closed] == [handle]
    polled(reader)
    assert sorted(second.calls) == [
        ("start", ("t", 0, 1)),
        ("start", ("t", 1, 2)),
        ("start", ("u", 0, 4)),
    ]


def test_an_outdated_client_is_replaced_at_the_same_positions(
    reader, handle, monkeypatch
):
    """Records buffered in the old client are fetched again; none is returned twice."""
    handle.made(*of(A, 0), *of(B, 0, 1))
    assert polled(reader, most=2) == {A: [0], B: [0]}
    closed, second = [], Handle()
    monkeypatch.setattr(module, "close_consumer", closed.append)
    old = reader._client
    old.files = SimpleNamespace(are_renewed=lambda: True)
    old.on_error(KafkaError(KafkaError._SSL, "certificate expired"))

    def refuse(*_):
        raise ConfigurationError("the key does not belong to the certificate")

    monkeypatch.setattr(module, "new_consumer", refuse)
    assert polled(reader, most=1) == {B: [1]}
    monkeypatch.setattr(module, "new_consumer", lambda *_: Client(handle=second))
    second.made(*of(B, 1, 2))
    assert polled(reader) == {B: [2]}
    assert closed == [old]
    assert sorted(second.calls) == [("start", ("t", 0, 1)), ("start", ("t", 1, 2))]


def test_a_short_pause_is_not_applied_to_librdkafka(reader, handle):
    reader.poll(0, 1)
    handle.calls.clear()
    reader.pause([A])
    handle.made(*of(A, 0, 1, 2), *of(B, 0))
    assert polled(reader) == {B: [0]}
    reader.resume([A])
    handle.made(*of(A, 3))
    assert polled(reader, most=2) == {A: [0, 1]}
    # Buffered records are returned before new ones.
    assert polled(reader, most=2) == {A: [2]}
    assert polled(reader) == {A: [3]}
    assert handle.calls == []


def test_a_long_pause_is_applied_and_the_reader_resumes_by_a_seek(reader, handle):
    reader.poll(0, 1)
    handle.calls.clear()
    reader.pause([A])
    big = module.KEPT_BYTES // 2
    handle.made(*of(A, 0, size=big), *of(A, 1, size=big))
    assert polled(reader) == {}
    assert handle.calls == [("pause", [("t", 0)])]
    reader.resume([A])
    assert polled(reader) == {A: [0, 1]}
    assert handle.calls[1:] == [("resume", [("t", 0)]), ("seek", ("t", 0, 2))]


def test_a_seek_drops_buffered_messages(reader, handle):
    reader.pause([A])
    handle.made(*of(A, 0, 1))
    polled(reader)
    reader.seek(A, 5)
    reader.resume([A])
    assert polled(reader) == {}
    reader.pause([A])
    handle.made(*of(A, 5))
    polled(reader)
    reader.assign([B])
    reader.assign([A, B])
    reader.seek(A, 8)
    assert polled(reader) == {}


def test_an_unreadable_record_raises_and_is_fetched_again(reader, handle):
    handle.made(*of(A, 0), error(A, BAD, 1), *of(A, 2, 3), *of(B, 0))
    assert polled(reader) == {A: [0], B: [0]}
    handle.made(*of(A, 4), *of(B, 1))
    raised = fails(reader, LogUnreadable)
    assert "CRC mismatch" in str(raised)
    handle.calls.clear()
    handle.queue.clear()
    handle.made(*of(A, 1, 2))
    assert polled(reader) == {A: [1, 2]}
    assert handle.calls == [("seek", ("t", 0, 1))]


def test_an_error_is_raised_while_other_partitions_continue(reader, handle):
    handle.made(error(A, OUT), *of(B, 0))
    handle.range = (5, 9)
    assert polled(reader) == {B: [0]}
    handle.made(*of(B, 1))
    raised = fails(reader, PositionError)
    assert (raised.partition, raised.requested) == (A, 0)
    assert (raised.log_start, raised.log_end) == (5, 9)
    handle.calls.clear()
    assert polled(reader) == {B: [1]}
    # The caller has to choose the position to continue from.
    assert handle.calls == []
    reader.seek(A, 5)
    handle.made(*of(A, 5))
    assert polled(reader) == {A: [5]}


def test_an_unknown_range_is_reported_as_unknown(reader, handle):
    handle.made(error(A, OUT))
    handle.range = None
    raised = fails(reader, PositionError)
    assert (raised.log_start, raised.log_end) == (-1, -1)


def test_a_refused_position_inside_the_log_is_retried(reader, handle):
    handle.made(error(A, OUT))
    raised = fails(reader, CoordinationError)
    assert raised.retriable
    handle.calls.clear()
    polled(reader)
    assert handle.calls == [("seek", ("t", 0, 0))]


def test_a_truncated_position_raises(reader, handle):
    handle.made(error(A, CUT))
    raised = fails(reader, PositionError)
    assert "truncation" in str(raised)


def test_a_group_error_is_ignored_and_a_transport_error_raises(reader, handle):
    handle.made(
        Message(error=KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)), *of(A, 0)
    )
    assert polled(reader) == {A: [0]}
    handle.made(Message(error=KafkaError(KafkaError._TRANSPORT)))
    assert fails(reader, CoordinationError).retriable


@pytest.fixture
def refused(handle, monkeypatch):
    """The client of a reader whose login a broker has refused."""
    refusal = KafkaException(KafkaError(KafkaError._AUTHENTICATION, "no"))
    client = Client(handle=handle, refusal=refusal)
    monkeypatch.setattr(module, "new_consumer", lambda *_: client)
    return client


def test_a_login_that_was_never_accepted_is_raised_for_good(reader, refused):
    for _ in range(2):
        fails(reader, LogUnreadable)
    assert refused.refusal is not None


def test_a_login_that_is_refused_after_records_is_retriable(reader, handle, refused):
    handle.made(*of(A, 0))
    assert polled(reader) == {A: [0]}
    raised = fails(reader, CoordinationError)
    assert raised.retriable
    assert "refused the login" in str(raised)
    handle.made(*of(A, 1))
    assert polled(reader) == {A: [1]}


def test_a_login_that_is_refused_at_the_end_of_a_log_is_retriable(
    reader, handle, refused
):
    refusal = refused.refusal
    handle.made(error(A, KafkaError(KafkaError._PARTITION_EOF), offset=0))
    assert fails(reader, CoordinationError).retriable
    refused.refusal = refusal  # a second later: not reported again
    assert polled(reader) == {}


def test_ends_returns_the_known_ends_of_assigned_partitions(reader, handle):
    assert reader.ends() == {}
    reader.poll(0, 1)
    assert reader.ends() == {A: 100, B: 100}
    reader.assign([B])
    assert reader.ends() == {B: 100}
    handle.range = (-1001, -1001)
    assert reader.ends() == {}
    handle.range = None
    assert reader.ends() == {}


def test_a_poll_without_partitions_returns_no_records(reader, handle):
    reader.poll(0, 1)
    reader.assign([])
    assert reader.poll(1, 10) == {}
    assert handle.assigned == set()


def test_invalid_seeks_and_polls_are_refused(reader):
    with pytest.raises(InvalidTransition, match="not assigned"):
        reader.seek(C, 0)
    with pytest.raises(InvalidTransition, match="-1"):
        reader.seek(A, -1)
    reader.assign([A, C])
    with pytest.raises(InvalidTransition, match="u-0 is new"):
        reader.poll(0, 1)


def test_the_queue_and_fetch_sizes_are_limited():
    config = module.FastDataReader(ConnectionConfig("nobody:1"))._config
    assert config["queued.max.messages.kbytes"] == 8_192
    assert config["fetch.max.bytes"] == module.ANSWER_BYTES
    assert config["fetch.message.max.bytes"] == module.FETCH_BYTES


def test_polls_do_not_start_the_garbage_collector(reader, handle, monkeypatch):
    at = dict.fromkeys((A, B), 0)

    def of_both(count, timeout):
        # Fetches and polls differ in size, so every second poll has two partitions.
        shares = {A: count} if (at[A] + at[B]) % (2 * count) else {A: 280, B: 220}
        made = []
        for place, share in shares.items():
            made += [
                Message(
                    topic=place[0],
                    partition=place[1],
                    offset=at[place] + each,
                    value=b"v",
                )
                for each in range(share)
            ]
            at[place] += share
        return made

    monkeypatch.setattr(handle, "consume", of_both)
    threshold = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        before = gc.get_stats()[0]["collections"]
        for _ in range(40):
            for records in reader.poll(0, 500).values():
                for record in records:
                    assert record.value
            with monkeypatch.context() as dry:
                dry.setattr(handle, "consume", lambda *_: [])
                assert not reader.poll(0, 500)
        assert gc.get_stats()[0]["collections"] - before < 10
    finally:
        gc.set_threshold(*threshold)


def test_retained_messages_are_released_when_nothing_more_arrives(reader, handle):
    handle.made(*of(A, 0, 1))
    reader.poll(0, 100)
    assert not reader.poll(0, 100)
    assert [message.offset() for message in reader._retained] == [0, 1]
    assert not reader.poll(1, 100)
    assert reader._retained == []


def test_polls_of_varying_sizes_do_not_start_the_garbage_collector(
    reader, handle, monkeypatch
):
    """Small and large polls alternate; as many objects are freed as are created."""
    at = 0
    sizes = itertools.cycle((500, 500, 20))

    def some(count, _):
        nonlocal at
        first, at = at, at + min(count, next(sizes))
        return of(A, *range(first, at))

    monkeypatch.setattr(handle, "consume", some)
    threshold = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        before = gc.get_stats()[0]["collections"]
        for _ in range(100):
            for records in reader.poll(0, 500).values():
                for record in records:
                    assert record.value
        assert gc.get_stats()[0]["collections"] - before < 5
    finally:
        gc.set_threshold(*threshold)


def test_records_held_for_long_do_not_start_the_garbage_collector(
    reader, handle, monkeypatch
):
    """Some records wait for a grant while later ones are handed out."""
    at = 0

    def all_of_it(count, _):
        nonlocal at
        first, at = at, at + count
        return of(A, *range(first, at))

    monkeypatch.setattr(handle, "consume", all_of_it)
    held = []
    threshold = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        for turn in range(60):
            if turn == 10:
                before = gc.get_stats()[0]["collections"]
            for records in reader.poll(0, 5_000 - len(held)).values():
                held += records
            with monkeypatch.context() as dry:
                dry.setattr(handle, "consume", lambda *_: [])
                assert not reader.poll(0, 500)
            if turn % 3:
                del held[2_000:]
            else:
                held.clear()
        assert gc.get_stats()[0]["collections"] - before < 20
    finally:
        gc.set_threshold(*threshold)


def test_fewer_large_messages_are_retained(reader, handle, monkeypatch):
    monkeypatch.setattr(module, "SPARE_BYTES", 10_000)
    monkeypatch.setattr(module, "MESSAGES_AT_ONCE", 8)

    def kept(size):
        for _ in range(20):
            handle.made(*(Message("t", 0, offset=0, value=bytes(size)),) * 10)
            reader.poll(0, 10)
        return len(reader._retained)

    assert [kept(1), kept(1_000), kept(20_000)] == [36, 20, 10]


def test_retained_messages_are_bounded(reader, handle):
    handle.made(*of(A, *range(30)))
    for _ in range(3):
        reader.poll(0, 10)
    assert [message.offset() for message in reader._retained] == list(range(20, 30))


def test_a_large_poll_consumes_in_parts(reader, handle, monkeypatch):
    monkeypatch.setattr(module, "MESSAGES_AT_ONCE", 4)
    handle.made(*of(A, *range(6)), *of(B, *range(5)))
    assert {p: offsets(r) for p, r in reader.poll(0, 100).items()} == {
        A: [*range(6)],
        B: [*range(5)],
    }
    handle.made(*of(A, *range(6, 20)))
    assert offsets(reader.poll(0, 10)[A]) == [*range(6, 16)]
    assert offsets(reader.poll(0, 10)[A]) == [*range(16, 20)]


# --- positions


def test_control_records_at_the_end_are_skipped(reader, handle):
    handle.made(*of(A, 0, 1), error(A, END, 3), *of(B, 0), error(B, END, 7))
    assert polled(reader) == {A: [0, 1], B: [0]}
    assert reader.positions() == {A: 3, B: 7}
    handle.made(*of(A, 3))
    assert polled(reader) == {A: [3]}
    assert reader.positions() == {A: 4, B: 7}
    reader.seek(A, 1)
    assert reader.positions() == {A: 1, B: 7}
    reader.assign([B])
    handle.made(error(A, END, 9))
    assert polled(reader) == {}
    assert reader.positions() == {B: 7}


class OverTimeError(RuntimeError):
    """An exception of an application's signal handler."""


def test_a_poll_raises_an_exception_of_a_signal_handler_unchanged(
    reader, handle, monkeypatch
):
    """It is not translated, though errors of librdkafka may have the same class."""

    def end(*_):
        raise OverTimeError

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(
                handle, "consume", lambda *_, **__: signal.raise_signal(signal.SIGUSR1)
            )
            with pytest.raises(OverTimeError):
                reader.poll(0, 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    handle.made(*of(A, 0))
    assert polled(reader) == {A: [0]}


def test_a_close_by_a_signal_handler_does_not_wait_for_the_poll(
    reader, handle, monkeypatch
):
    """It used to wait until its timeout, here for ten minutes."""
    has_polled = threading.Event()

    def close(_):
        # librdkafka closes a consumer after the poll in progress.
        return in_background(lambda: has_polled.wait(60))

    def poll(_):
        reader.close(600_000)

    monkeypatch.setattr(module, "close_consumer", close)
    monkeypatch.setattr(handle, "poll", poll)
    assert reader.poll(10_000, 10) == {}
    has_polled.set()
    with pytest.raises(InvalidTransition, match="closed"):
        reader.poll(0, 10)


def test_a_partition_end_does_not_skip_messages_dropped_in_a_pause(reader, handle):
    reader.pause([A])
    handle.made(*of(A, 0, 1), error(A, END, 3))
    assert polled(reader) == {}
    assert reader.positions() == {A: 0, B: 0}
    reader.resume([A])
    assert polled(reader, 1) == {A: [0]}
    assert reader.positions() == {A: 1, B: 0}
    assert polled(reader) == {A: [1]}
    assert reader.positions() == {A: 3, B: 0}


def test_a_partition_end_after_unreadable_records_is_ignored(reader, handle):
    handle.made(*of(A, 0), error(A, BAD), error(A, END, 9))
    assert polled(reader) == {A: [0]}
    assert reader.positions()[A] == 1
    fails(reader, MarshalError)
    assert reader.positions()[A] == 1
