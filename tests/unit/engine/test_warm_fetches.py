"""Partitions are fetched while this client warms up for them (PROTOCOL 9.5)."""

import gc

import pytest
from enginekit import ALO, AMO, H, spec, values, world

from kafka_marshal.engine import warm_fetches
from kafka_marshal.engine.warm_fetches import (
    RECORD_BYTES,
    REST_MS,
    WarmFetcher,
    WarmRecords,
)
from kafka_marshal.errors import CoordinationError
from kafka_marshal.ports import PlainRecord
from kafka_marshal.protocol.types import Token, TopicPartition
from simulator.clock import InlineBackground
from simulator.fakedata import FakeDataReader

PLACE = TopicPartition("t", 0)
OTHER = TopicPartition("t", 1)
TOKEN = Token(1, 2, 3)
MOST = 8
LARGE = 1 << 20


class Rig:
    """A fetcher of a cluster in memory, and what it observed."""

    def __init__(self, cluster, *, bytes_max=LARGE, is_held=False):
        self.cluster, self.kafka = cluster, cluster.kafka
        self.data = cluster.kafka.data_log()
        self.background = InlineBackground(is_held=is_held)
        self.readers = []
        self.events = []
        self.now_ms = 0
        self.fetcher = WarmFetcher(
            open_reader=self._open,
            background=self.background,
            bytes_max=bytes_max,
            observe=lambda name, fields: self.events.append((name, fields)),
        )

    def _open(self):
        self.readers.append(self.data.reader())
        return self.readers[-1]

    @property
    def topic_id(self):
        return self.kafka.topic("t").topic_id

    def follow(self, position, place=PLACE, **rest):
        fields = {"topic_id": self.topic_id, "most": MOST, "now_ms": self.now_ms}
        self.fetcher.follow(place, position=position, **(fields | rest))

    def offsets(self, position, place=PLACE):
        """Return the offsets that a claim at a position would use."""
        taken = self.fetcher.take(place)
        if taken is None:
            return None
        records = taken.since(position, topic_id=self.topic_id, token=TOKEN)
        assert all(record.token == TOKEN for record in records)
        return [record.offset for record in records]


@pytest.fixture
def rig():
    return Rig(world(records=(10, 10)))


def size(count):
    """Return the bytes of so many records, whose values have one byte."""
    return count * (RECORD_BYTES + 1)


def test_a_claim_uses_the_records_from_its_position_on(rig):
    rig.follow(3)
    assert rig.offsets(3) == [3, 4, 5, 6, 7, 8, 9]
    rig.follow(3)
    assert rig.offsets(7) == [7, 8, 9]


def test_taken_records_are_forgotten(rig):
    rig.follow(3)
    rig.offsets(3)
    assert rig.fetcher.take(PLACE) is None
    assert rig.fetcher.held_bytes == 0


@pytest.mark.parametrize("position", [2, 10, 11])
def test_a_claim_at_another_position_uses_nothing(rig, position):
    rig.follow(3)
    assert rig.offsets(position) == []


def test_a_claim_of_another_topic_of_the_name_uses_nothing(rig):
    rig.follow(3)
    taken = rig.fetcher.take(PLACE)
    assert not taken.since(3, topic_id=b"another".ljust(16, b"."), token=TOKEN)
    assert not taken.since(3, topic_id=None, token=TOKEN)


def test_a_claim_after_the_last_record_uses_nothing():
    record = PlainRecord("t", 0, 5, 0, 0, None, b"")
    warm = WarmRecords(topic_id=b"id", first=5, next_offset=9, chunks=[[record]])
    assert len(warm.since(5, topic_id=b"id", token=TOKEN)) == 1
    assert not warm.since(6, topic_id=b"id", token=TOKEN)


def test_records_that_arrive_later_are_fetched_by_the_next_round(rig):
    rig.follow(8)
    rig.kafka.produce(PLACE, b"new")
    rig.follow(8)
    assert rig.offsets(8) == [8, 9, 10]
    assert len(rig.readers) == 1


def test_records_below_the_position_are_dropped(rig):
    rig.follow(0)
    before = rig.fetcher.held_bytes
    rig.kafka.produce(PLACE, b"new")
    rig.follow(0)
    rig.follow(10)
    assert rig.fetcher.held_bytes < before
    assert rig.offsets(10) == [10]


def test_a_chunk_that_contains_the_position_is_kept(rig):
    rig.follow(0)
    rig.follow(4)
    assert rig.offsets(2) == []
    rig.follow(0)
    rig.follow(4)
    assert rig.offsets(4) == [4, 5, 6, 7, 8, 9]


def test_a_lower_position_restarts_the_fetch(rig):
    rig.follow(5)
    rig.follow(2)
    assert rig.offsets(2) == [2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("near", [3, 500])
def test_a_position_beyond_what_was_fetched_is_fetched(rig, monkeypatch, near):
    monkeypatch.setattr(warm_fetches, "FETCH_RECORDS", near)
    sought = []
    seek = FakeDataReader.seek

    def noting(reader, partition, offset, **rest):
        sought.append(offset)
        seek(reader, partition, offset, **rest)

    monkeypatch.setattr(FakeDataReader, "seek", noting)
    rig.follow(5)
    for _ in range(10):
        rig.kafka.produce(PLACE, b"new")
    rig.background.is_held = True
    rig.follow(15)
    rig.background.run_waiting(count=1)
    assert rig.offsets(15) == [15, 16, 17, 18, 19]
    # The reader has it already, unless it is far away.
    assert sought == ([5] if near > 5 else [5, 15])


def test_an_unknown_position_or_topic_fetches_nothing(rig):
    rig.follow(None)
    rig.follow(0, topic_id=None)
    assert not rig.readers
    rig.follow(0)
    rig.follow(None)
    assert rig.fetcher.held_bytes == 0


def test_no_more_bytes_are_held_than_allowed():
    rig = Rig(world(records=(10,)), bytes_max=size(4) + 10)
    rig.follow(0)
    assert rig.fetcher.held_bytes == size(4)
    assert rig.offsets(0) == [0, 1, 2, 3]


def test_room_is_used_again_once_half_of_it_is_free(monkeypatch):
    monkeypatch.setattr(warm_fetches, "FETCH_RECORDS", 1)
    rig = Rig(world(records=(10,)), bytes_max=size(4))
    rig.follow(0)
    rig.follow(1)
    assert rig.fetcher.held_bytes == size(3)
    rig.follow(2)
    assert rig.fetcher.held_bytes == size(4)
    assert rig.offsets(2) == [2, 3, 4, 5]


def test_a_record_larger_than_the_room_is_left_out():
    cluster = world(records=(1,))
    rig = Rig(cluster, bytes_max=size(2))
    rig.kafka.produce(PLACE, b"x" * LARGE)
    rig.kafka.produce(PLACE, b"y")
    rig.follow(1)
    rig.follow(1)
    assert rig.fetcher.held_bytes == 0
    assert rig.fetcher.take(PLACE) is None
    rig.follow(2)
    assert rig.offsets(2) == [2]


def test_the_size_of_a_record_counts_key_value_and_headers():
    record = PlainRecord(
        "t", 0, 0, 0, 0, b"ab", None, headers=(("n", b"v"), ("m", b""))
    )
    assert warm_fetches._size_of(record) == RECORD_BYTES + 2 + 3


def test_the_number_of_fetched_partitions_is_bounded(rig):
    rig.follow(0, most=1)
    rig.follow(0, OTHER, most=1)
    assert rig.fetcher.take(OTHER) is None
    taken = rig.fetcher.take(PLACE)
    # A partition that is claimed and not used yet counts as well.
    rig.follow(0, OTHER, most=1)
    assert rig.fetcher.take(OTHER) is None
    del taken
    gc.collect()
    rig.follow(0, OTHER, most=1)
    assert rig.fetcher.take(OTHER) is not None


def test_one_reader_fetches_all_partitions(rig):
    rig.follow(0)
    rig.follow(5, OTHER)
    rig.follow(0)
    assert rig.offsets(0) == list(range(10))
    assert rig.offsets(5, OTHER) == [5, 6, 7, 8, 9]
    assert len(rig.readers) == 1


def test_the_reader_closes_when_nothing_is_offered(rig):
    rig.follow(0)
    rig.follow(0, OTHER)
    rig.fetcher.end(PLACE)
    assert not rig.readers[0]._is_closed
    rig.fetcher.end(OTHER)
    assert rig.readers[0]._is_closed
    assert rig.fetcher.held_bytes == 0
    rig.follow(0)
    assert rig.offsets(0) == list(range(10))
    assert all(reader._is_closed for reader in rig.readers)


def test_a_fetch_of_a_partition_no_longer_offered_is_dropped(rig, monkeypatch):
    poll = FakeDataReader.poll

    def slow(reader, *args):
        found = poll(reader, *args)
        rig.fetcher.end(PLACE)
        return found

    monkeypatch.setattr(FakeDataReader, "poll", slow)
    rig.follow(0)
    assert rig.fetcher.held_bytes == 0
    assert rig.readers[0]._is_closed


def test_a_queued_fetch_does_nothing_after_the_close():
    rig = Rig(world(records=(10,)), is_held=True)
    rig.follow(0)
    rig.follow(0)
    assert rig.background.waiting_count == 1
    rig.fetcher.close()
    rig.fetcher.close()
    rig.fetcher._run()
    rig.follow(0)
    assert not rig.readers


def test_closing_closes_the_reader_and_drops_records(rig):
    rig.follow(0)
    rig.fetcher.close()
    assert rig.readers[0]._is_closed
    assert rig.fetcher.take(PLACE) is None


def test_a_topic_that_was_created_again_is_not_fetched(rig):
    rig.follow(0)
    before = rig.topic_id
    rig.kafka.delete_topic("t")
    rig.kafka.create_topic("t", 2)
    for _ in range(20):
        rig.kafka.produce(PLACE, b"other")
    rig.follow(0, topic_id=before)
    assert rig.fetcher.held_bytes == 0
    assert [fields["partition"] for _, fields in rig.events] == [PLACE]
    rig.follow(0, topic_id=before)
    assert len(rig.events) == 1  # not before the position moves
    rig.follow(0)
    assert rig.offsets(0) == list(range(20))


def test_a_position_that_retention_removed_is_fetched_once_it_moves(rig):
    rig.kafka.delete_records(PLACE, before=5)
    rig.follow(2)
    assert len(rig.events) == 1
    rig.follow(6)
    assert rig.offsets(6) == [6, 7, 8, 9]


def test_a_failed_fetch_is_repeated_after_a_rest(rig, monkeypatch):
    errors = [CoordinationError("no broker")]
    poll = FakeDataReader.poll

    def failing(reader, *args):
        if errors:
            raise errors.pop()
        return poll(reader, *args)

    monkeypatch.setattr(FakeDataReader, "poll", failing)
    rig.follow(0)
    rig.follow(0)
    assert [name for name, _ in rig.events] == ["warm_fetch_failed"]
    rig.now_ms += REST_MS - 1
    rig.follow(0)
    assert rig.fetcher.held_bytes == 0
    rig.now_ms += 1
    rig.follow(0)
    assert rig.offsets(0) == list(range(10))


def test_a_fetch_with_a_permanent_error_is_not_repeated(rig, monkeypatch):
    class Refused(CoordinationError):
        retriable = False

    def refused(_reader, *_):
        raise Refused("no rights")

    monkeypatch.setattr(FakeDataReader, "poll", refused)
    for _ in range(3):
        rig.follow(0)
        rig.now_ms += REST_MS
    assert len(rig.events) == 1


# --- in an engine


def joined(cluster, delivery, **rest):
    """Return an owner of two partitions, and a member that warms up for one."""
    a = cluster.node("a", spec=spec(delivery=delivery, most=2))
    cluster.run_until(lambda: len(a.held) == 2, 3 * H)
    b = cluster.node("b")
    b.warming.is_held = True
    wanted = spec(delivery=delivery, on_warm=lambda *_: None, **rest)
    b.consume(wanted)
    cluster.run_until(lambda: b.warming.waiting_count == 1, 3 * H)
    return a, b


def claimed(cluster, b):
    """Let a member end its warm-up, without any fetch from then on."""
    b.data.cut = True
    b.warming.run_waiting()
    cluster.run_until(lambda: len(b.held) == 1, 2 * H)


@pytest.mark.parametrize("delivery", [ALO, AMO])
def test_the_first_poll_after_the_claim_needs_no_fetch(delivery):
    cluster = world(records=(4, 4))
    _, b = joined(cluster, delivery)
    assert not b.consumer.poll(0)
    claimed(cluster, b)
    found = b.consumer.poll(0)
    if delivery is AMO:
        # Nothing is handed out before it is granted.
        assert not found
        cluster.run(100)
        found = b.consumer.poll(0)
    ((partition, offsets),) = values(found).items()
    assert offsets == [0, 1, 2, 3]
    # Later records are fetched.
    b.data.cut = False
    cluster.kafka.produce(TopicPartition("t", partition), b"next")
    b.consumer.poll(0)
    cluster.run(200)
    assert values(b.consumer.poll(0)) in ({partition: [4]}, {})


def test_records_that_the_owner_processed_meanwhile_are_dropped():
    cluster = world(records=(8, 8))
    a, b = joined(cluster, ALO)
    for _ in range(3):
        a.consumer.poll(0, max_records=2)
        a.consumer.commit()
    cluster.run(H)
    claimed(cluster, b)
    ((key, holding),) = b.held.items()
    assert 0 < holding.position < 8
    expected = list(range(holding.position, 8))
    assert values(b.consumer.poll(0)) == {key.partition: expected}


def test_a_withdrawn_offer_frees_the_memory():
    cluster = world(records=(4, 4))
    a, b = joined(cluster, ALO)
    (sub,) = b.session.subscriptions
    assert sub.warm_fetcher.held_bytes > 0
    a.session._offers.withdraw_unwanted(a.clock.now_ms() + H + 1)
    cluster.run_until(lambda: sub.warm_fetcher.held_bytes == 0, H)


def test_another_owner_of_the_key_frees_the_memory():
    cluster = world(records=(4, 4))
    a, b = joined(cluster, ALO)
    (sub,) = b.session.subscriptions
    cluster.crash(a)
    b.cut(is_cut=True)
    c = cluster.node("c", spec=spec())
    cluster.run_until(lambda: len(c.held) == 2, 6 * H)
    b.cut(is_cut=False)
    cluster.run_until(lambda: sub.warm_fetcher.held_bytes == 0, H)


def test_a_position_that_was_set_back_is_fetched_again():
    cluster = world(records=(6, 6))
    a, b = joined(cluster, ALO)
    a.consumer.poll(0, max_records=12)
    a.consumer.commit()
    cluster.run(H)
    (offered,) = b.session._warmer._tasks
    for key in list(a.held):
        a.session.seek(a.held[key], 1)
    cluster.run(H // 2)
    claimed(cluster, b)
    assert values(b.consumer.poll(0)) == {offered.partition: [1, 2, 3, 4, 5]}


def test_a_seek_after_the_claim_drops_the_fetched_records():
    cluster = world(records=(6, 6))
    _, b = joined(cluster, ALO)
    claimed(cluster, b)
    (partition,) = b.consumer.assignment()
    place = b.consumer._fetch_states[partition]
    assert place.buffered_count == 6
    with b.engine.changed:
        b.consumer._dispatcher.seek(place, 4)
    assert not b.consumer.poll(0)
    cluster.run(100)
    b.data.cut = False
    assert values(b.consumer.poll(0)) == {partition.partition: [4, 5]}


def test_a_paused_partition_keeps_the_fetched_records():
    cluster = world(records=(6, 6))
    _, b = joined(cluster, ALO)
    claimed(cluster, b)
    (partition,) = b.consumer.assignment()
    b.consumer.pause(partition)
    assert not b.consumer.poll(0)
    b.consumer.resume(partition)
    assert values(b.consumer.poll(0)) == {partition.partition: [0, 1, 2, 3, 4, 5]}


def test_a_claim_that_ends_before_a_poll_hands_out_no_records():
    cluster = world(records=(6, 6))
    a, b = joined(cluster, ALO)
    claimed(cluster, b)
    cluster.nodes.remove(b)
    cluster.run_until(lambda: len(a.held) == 2, 6 * H)
    assert not b.consumer.poll(0)
    cluster.nodes.append(b)
    cluster.run(100)
    assert not b.consumer.poll(0)
    assert not b.consumer.assignment()


def test_warm_records_are_handed_out_up_to_max_fetched():
    cluster = world(records=(6, 6))
    _, b = joined(cluster, ALO, max_fetched=2)
    claimed(cluster, b)
    ((partition, offsets),) = values(b.consumer.poll(0)).items()
    assert offsets == [0, 1]
    b.data.cut = False
    assert values(b.consumer.poll(0)) == {partition: [2, 3]}


def test_a_failed_warm_up_frees_the_memory():
    cluster = world(records=(4, 4))

    def fail(*_):
        raise ValueError("no disk")

    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 2, 3 * H)
    b = cluster.node("b")
    b.warming.is_held = True
    b.consume(spec(on_warm=fail))
    cluster.run_until(lambda: b.warming.waiting_count == 1, 3 * H)
    (sub,) = b.session.subscriptions
    cluster.run(H)
    assert sub.warm_fetcher.held_bytes > 0
    b.warming.run_waiting()
    cluster.run(100)
    assert sub.warm_fetcher.held_bytes == 0


def test_warm_bytes_of_zero_disable_warm_fetches():
    cluster = world(records=(4, 4))
    _, b = joined(cluster, ALO, warm_bytes=0)
    (sub,) = b.session.subscriptions
    assert sub.warm_fetcher is None
    claimed(cluster, b)
    assert not b.consumer.poll(0)
