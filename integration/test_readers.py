"""Both readers on a real broker: fetching ahead, pauses, seeks with full queues."""

import logging
import random
import select

import pytest
from confluent_kafka import Producer
from kafka import KafkaProducer
from slowness import until
from switchkit import switch_always

from kafka_marshal.errors import CoordinationError, LogUnreadable, PositionError
from kafka_marshal.kafka_io.fast.reader import FastDataReader
from kafka_marshal.kafka_io.reader import KafkaDataReader
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.kafka_io.transport import open_data_log
from kafka_marshal.native import compiled
from kafka_marshal.protocol.types import Token, TopicPartition

TIMEOUT_MS = 30_000
PARTITIONS = 3
RECORDS = 3_000


@pytest.fixture(scope="module")
def producer(bootstrap_servers):
    made = KafkaProducer(bootstrap_servers=bootstrap_servers, linger_ms=5)
    yield made
    made.close(timeout=5)


@pytest.fixture(scope="module")
def topics(bootstrap_servers):
    with KafkaTopicAdmin(ConnectionConfig(bootstrap_servers)) as admin:
        yield admin


def value_of(place, offset):
    return f"{place.topic}/{place.partition}/{offset}/".encode().ljust(1_000, b".")


def write(producer, place, first, count):
    for offset in range(first, first + count):
        producer.send(place.topic, value_of(place, offset), partition=place.partition)


@pytest.fixture(scope="module")
def places(producer, topics, unique):
    """Two topics whose partitions have the same numbers, full of known records."""
    names = [unique("full"), unique("full")]
    for name in names:
        topics.create_data_topic(name, partitions=PARTITIONS)
    made = [TopicPartition(name, each) for name in names for each in range(PARTITIONS)]
    for place in made:
        write(producer, place, 0, RECORDS)
    producer.flush(timeout=60)
    return made


@pytest.fixture(params=["fast", "kafka-python"])
def reader(request, bootstrap_servers):
    settings = ConnectionConfig(bootstrap_servers, transport=request.param)
    made = open_data_log(settings).reader()
    yield made
    made.close(TIMEOUT_MS)


class Account:
    """Keeps the next offset of each partition, and checks the records against it."""

    def __init__(self, reader):
        self.reader = reader
        self.nexts = {}
        self.tokens = {}

    def assign(self, places):
        self.reader.assign(places)
        self.nexts = {each: self.nexts.get(each) for each in places}

    def seek(self, place, offset, token=None):
        self.reader.seek(place, offset, token=token)
        self.nexts[place] = offset
        self.tokens[place] = token

    def poll(self, most=500, but=()):
        found = self.reader.poll(100, most)
        assert sum(map(len, found.values())) <= most
        for place, records in found.items():
            assert place in self.nexts
            assert place not in but
            for record in records:
                assert record.offset == self.nexts[place]
                assert record.value == value_of(place, record.offset)
                assert (record.topic, record.partition) == place
                assert record.token == self.tokens[place]
                self.nexts[place] += 1
        return found


def test_every_record_is_read_once_despite_seeks_pauses_and_assignments(reader, places):
    read_through_changes(reader, places, steps=60)


@pytest.mark.skipif(compiled is None, reason="nothing was compiled here")
def test_every_record_is_read_once_despite_switches_of_readers(
    bootstrap_servers, places, monkeypatch
):
    switches = switch_always(monkeypatch)
    settings = ConnectionConfig(bootstrap_servers, transport="fast")
    reader = open_data_log(settings).reader()
    try:
        read_through_changes(reader, places, steps=60)
    finally:
        reader.close(TIMEOUT_MS)
    assert set(switches) == {KafkaDataReader, FastDataReader}


def read_through_changes(reader, places, *, steps):
    chance = random.Random(7)
    account = Account(reader)
    for step in range(steps):
        held = list(account.nexts)
        paused = chance.sample(held, len(held) // 2)
        match step % 4:
            case 0:
                wanted = chance.sample(places, chance.randint(1, len(places)))
                account.assign(wanted)
                for place in wanted:
                    if account.nexts[place] is None or chance.random() < 0.3:
                        token = Token(1, 0, step)
                        account.seek(place, chance.randrange(RECORDS), token)
                paused = []
            case 1:
                reader.pause(paused)
                account.poll(chance.choice([1, 50, 500]), but=paused)
                account.poll(500, but=paused)
                reader.resume(paused)
            case 2:
                account.seek(chance.choice(held), chance.randrange(RECORDS))
        account.poll(chance.choice([1, 7, 500, 2_000]))
    account.assign(places)
    for place in places:
        if account.nexts[place] is None:
            account.seek(place, 0)
    until(lambda: account.poll() == {} and set(account.nexts.values()) == {RECORDS})


def test_a_paused_partition_continues_at_its_next_offset(reader, places):
    account = Account(reader)
    first, *rest = places[:PARTITIONS]
    account.assign([first, *rest])
    for place in (first, *rest):
        account.seek(place, 0)
    until(lambda: bool(account.poll(100)) and account.nexts[first] > 0)
    at = account.nexts[first]
    reader.pause([first])
    until(
        lambda: (
            not account.poll(but=[first])
            and all(account.nexts[each] == RECORDS for each in rest)
        )
    )
    assert account.nexts[first] == at
    reader.resume([first])
    until(lambda: not account.poll() and account.nexts[first] == RECORDS)


@pytest.mark.parametrize("reader", ["fast"], indirect=True)
def test_librdkafka_fetches_while_the_application_handles(
    reader, producer, topics, unique
):
    topic = unique("ahead")
    topics.create_data_topic(topic, partitions=1)
    place = TopicPartition(topic, 0)
    write(producer, place, 0, 100)
    producer.flush(timeout=60)
    account = Account(reader)
    account.assign([place])
    account.seek(place, 0)
    until(lambda: bool(account.poll(1)))
    write(producer, place, 100, 50)
    producer.flush(timeout=60)
    # There is no poll: only a fetch in the background shows the new end.
    until(lambda: reader.ends() == {place: 150})
    # A poll without waiting returns the fetched records.
    found = reader.poll(0, 500)
    assert [record.offset for record in found[place]] == list(range(1, 150))


@pytest.mark.parametrize("reader", ["kafka-python"], indirect=True)
def test_kafka_python_fetches_while_the_application_handles(reader, places):
    account = Account(reader)
    account.assign(places[:1])
    account.seek(places[0], 0)
    until(lambda: bool(account.poll(1)))
    fetcher = reader._consumer._fetcher
    # The next fetch is sent before the last records of one are handed out.
    until(lambda: bool(account.poll(100)) and not fetcher._next_partition_records)
    connections = reader._consumer._client.manager.least_used_connections()
    sockets = [each.transport._sock for each in connections]

    def is_there() -> bool:
        return bool(fetcher._completed_fetches or select.select(sockets, [], [], 0)[0])

    until(is_there)
    assert account.poll(1)


@pytest.mark.parametrize("reader", ["kafka-python"], indirect=True)
def test_a_reader_by_topic_id_keeps_its_fetch_session(
    bootstrap_servers, reader, places, caplog
):
    """Also requests that name no partition, or forget some, belong to the session."""
    caplog.set_level(logging.INFO, logger="kafka.consumer.fetcher")
    log = open_data_log(ConnectionConfig(bootstrap_servers, transport="kafka-python"))
    try:
        ids = log.describe([places[0].topic], timeout_ms=TIMEOUT_MS)
    finally:
        log.close(TIMEOUT_MS)
    ours = [each for each in places if each.topic == places[0].topic]
    reader.assign(ours)
    for each in ours:
        reader.seek(each, RECORDS, topic_id=ids[each.topic].topic_id)
    for paused in ([], ours[:1], [], ours[1:]):
        reader.resume(ours)
        reader.pause(paused)
        for _ in range(4):
            assert reader.poll(150, 10) == {}
    refused = [each for each in caplog.messages if "unable to process" in each]
    assert not refused


def test_a_position_out_of_range_raises_while_other_partitions_are_read(reader, places):
    bad, *good = places[:PARTITIONS]
    account = Account(reader)
    account.assign([bad, *good])
    for place in good:
        account.seek(place, 0)
    account.seek(bad, RECORDS + 10)
    caught: list[PositionError] = []

    def is_reported() -> bool:
        try:
            account.poll(10)
        except PositionError as error:
            caught.append(error)
        return bool(caught)

    until(is_reported)
    assert (caught[0].partition, caught[0].requested) == (bad, RECORDS + 10)
    assert (caught[0].log_start, caught[0].log_end) == (0, RECORDS)
    # The error is raised before all other records are read.
    assert min(account.nexts[each] for each in good) < RECORDS


def test_a_topic_created_after_its_assignment_is_read(reader, producer, topics, unique):
    place = TopicPartition(unique("later"), 0)
    account = Account(reader)
    account.assign([place])
    account.seek(place, 0)

    def poll() -> bool:
        try:
            return bool(account.poll())
        except CoordinationError as error:
            if not error.retriable:
                raise
            return False

    assert not poll()
    topics.create_data_topic(place.topic, partitions=1)
    write(producer, place, 0, 1)
    producer.flush(timeout=60)
    until(poll)


def test_a_record_larger_than_a_fetch_is_read(
    reader, topics, unique, bootstrap_servers
):
    topic = unique("large")
    topics.create(
        topic,
        partitions=1,
        replication=1,
        configs={"max.message.bytes": str(8 << 20)},
    )
    writer = KafkaProducer(
        bootstrap_servers=bootstrap_servers, max_request_size=8 << 20
    )
    for size in (3 << 20, 10):
        writer.send(topic, bytes(size), partition=0).get(60)
    writer.close(timeout=5)
    place = TopicPartition(topic, 0)
    reader.assign([place])
    reader.seek(place, 0)
    sizes = []

    def has_both() -> bool:
        for records in reader.poll(100, 10).values():
            sizes.extend(len(record.value) for record in records)
        return len(sizes) == 2

    until(has_both)
    assert sizes == [3 << 20, 10]


def _spoil(broker, place, word: bytes) -> None:
    """Change one byte of a record on the broker's disk."""
    name = f"{place.topic}-{place.partition}"
    (segment,) = broker.log_path.parent.glob(f"data/{name}/*.log")
    with segment.open("r+b") as log:
        at = log.read().index(word)
        log.seek(at)
        log.write(b"X")


def test_a_damaged_record_is_reported_until_a_seek_skips_it(
    reader, broker, producer, topics, unique
):
    topic = unique("damaged")
    topics.create_data_topic(topic, partitions=2)
    bad, good = TopicPartition(topic, 0), TopicPartition(topic, 1)
    for offset in range(3):
        # Each record is a batch of its own.
        write(producer, bad, offset, 1)
        producer.flush(timeout=60)
    write(producer, good, 0, 3)
    producer.flush(timeout=60)
    _spoil(broker, bad, value_of(bad, 1))
    account = Account(reader)
    account.assign([bad, good])
    account.seek(bad, 0)
    account.seek(good, 0)
    reported: list[LogUnreadable] = []

    def is_any_found() -> bool:
        try:
            return bool(account.poll())
        except LogUnreadable as error:
            reported.append(error)
        except CoordinationError as error:
            # librdkafka may lose its position by it, and is reset.
            if not error.retriable:
                raise
        return False

    def is_reported_again() -> bool:
        is_any_found()
        return len(reported) >= 3 and account.nexts[good] == 3

    until(is_reported_again)
    assert account.nexts == {bad: 1, good: 3}
    account.seek(bad, 2)
    until(is_any_found)
    assert account.nexts[bad] == 3


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_every_compression_is_read(bootstrap_servers, topics, unique, reader, codec):
    topic = unique("packed")
    topics.create_data_topic(topic, partitions=1)
    place = TopicPartition(topic, 0)
    writer = Producer(
        {"bootstrap.servers": bootstrap_servers, "compression.type": codec}
    )
    for offset in range(2_000):
        writer.produce(topic, value_of(place, offset), partition=0)
    assert writer.flush(60) == 0
    reader.assign([place])
    reader.seek(place, 0)
    found = []

    def read():
        found.extend(reader.poll(1_000, 300).get(place, ()))
        return len(found) >= 2_000

    until(read)
    assert [record.offset for record in found] == list(range(2_000))
    assert [record.value for record in found] == [
        value_of(place, each) for each in range(2_000)
    ]
