"""How fast both readers are beside the bare clients that they are built on.

One broker, one topic of four partitions. Each side reads the same records from their
start, in polls of the same size, and accesses the value and the offset of each. Time
runs from the first record to the last, so connecting does not count. The bare clients
have default settings, except for those that reading without a group needs. Bare
librdkafka runs a second time with the reader's settings: the difference to that is the
cost of sorting messages by partition and making records. CPU times of all threads, and
of the reading thread, show where a side spends its time.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as FastPartition
from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaPartition
from support import (
    alternate,
    arguments,
    at_least,
    broker_argument,
    cluster,
    document,
    figure,
    ratios,
    show_figures,
    write_document,
)

from kafka_marshal.kafka_io.data import KafkaDataLog
from kafka_marshal.kafka_io.fast.clients import new_consumer
from kafka_marshal.kafka_io.fast.reader import FETCHING
from kafka_marshal.kafka_io.fast.switching import FastDataLog
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.ports import DataLog, DataReader
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.testing.producing import create_topic

PARTITIONS = 4
POLL_RECORDS = 500
POLL_MS = 1_000
GIVE_UP_S = 120.0
CLOSE_MS = 5_000
TARGET = at_least(0.97)


@attrs.frozen
class Load:
    """The records of one round.

    Attributes:
        size: Bytes of a value.
        stored: Records in the topic.
        slow: Number of records that kafka-python reads in a round.
    """

    size: int
    stored: int
    slow: int


LOADS = (Load(1_000, 400_000, 50_000), Load(100, 1_000_000, 80_000))
QUICK = (Load(1_000, 20_000, 5_000),)

Read = Callable[[str, str, "Stopwatch"], None]


class Stopwatch:
    """Counts records, and times them from the first poll that returns any."""

    def __init__(self, wanted: int) -> None:
        """Expect ``wanted`` records."""
        self.wanted = wanted
        self.count = 0
        self.late = time.monotonic() + GIVE_UP_S
        self._start: tuple[int, tuple[float, ...]] | None = None
        self.spent = (0.0, 0.0, 0.0)

    def note(self, count: int) -> bool:
        """Count the records of a poll; return whether more are expected."""
        self.count += count
        if self._start is None and count:
            self._start = (self.count, self._now())
        if self.count < self.wanted:
            if time.monotonic() > self.late:
                raise SystemExit(f"only {self.count} of {self.wanted} records came")
            return True
        assert self._start is not None
        before, start = self._start
        timed = max(1, self.count - before)
        wall, cpu, thread = (
            (end - begin) / timed for end, begin in zip(self._now(), start, strict=True)
        )
        self.spent = (wall, cpu, thread)
        return False

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time()


def bare_fast(servers: str, topic: str, watch: Stopwatch) -> None:
    """Read with bare confluent-kafka, at default settings."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "bare",
            "enable.auto.commit": False,
        }
    )
    consume(consumer, topic, watch)


def tuned_fast(servers: str, topic: str, watch: Stopwatch) -> None:
    """Read with bare confluent-kafka, with the settings of our reader."""
    client = new_consumer(ConnectionConfig(servers), FETCHING)
    consume(client.handle, topic, watch)


def consume(consumer: Consumer, topic: str, watch: Stopwatch) -> None:
    """Read with a consumer of confluent-kafka."""
    consumer.assign([FastPartition(topic, each, 0) for each in range(PARTITIONS)])
    while True:
        messages = consumer.consume(POLL_RECORDS, POLL_MS / 1000)
        for message in messages:
            message.value()
            message.offset()
        if not watch.note(len(messages)):
            break
    consumer.close()


def bare_slow(servers: str, topic: str, watch: Stopwatch) -> None:
    """Read with bare kafka-python."""
    consumer = KafkaConsumer(
        bootstrap_servers=servers, group_id=None, enable_auto_commit=False
    )
    places = [KafkaPartition(topic, each) for each in range(PARTITIONS)]
    consumer.assign(places)
    for place in places:
        consumer.seek(place, 0)
    while True:
        count = 0
        for records in consumer.poll(POLL_MS, max_records=POLL_RECORDS).values():
            for record in records:
                record.value  # noqa: B018 - the access is timed, too
                record.offset  # noqa: B018
            count += len(records)
        if not watch.note(count):
            break
    consumer.close(autocommit=False)


def ours(reader: DataReader, topic: str, watch: Stopwatch) -> None:
    """Read with a reader of this library."""
    places = [TopicPartition(topic, each) for each in range(PARTITIONS)]
    reader.assign(places)
    for place in places:
        reader.seek(place, 0)
    while True:
        count = 0
        for records in reader.poll(POLL_MS, POLL_RECORDS).values():
            for record in records:
                record.value  # noqa: B018
                record.offset  # noqa: B018
            count += len(records)
        if not watch.note(count):
            break
    reader.close(CLOSE_MS)


def fill(servers: str, topic: str, load: Load) -> None:
    """Write the topic's records with confluent-kafka."""
    create_topic(servers, topic, partitions=PARTITIONS)
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "linger.ms": 50,
            "queue.buffering.max.messages": 100_000,
        }
    )
    value = bytes(load.size)
    for number in range(load.stored):
        while True:
            try:
                producer.produce(topic, value, partition=number % PARTITIONS)
            except BufferError:
                producer.poll(0.1)
            else:
                break
        if number % 1_000 == 0:
            producer.poll(0)
    if producer.flush(GIVE_UP_S):
        raise SystemExit("the topic could not be filled")


def sides_of(servers: str) -> Mapping[str, Mapping[str, Read]]:
    """Return the sides to compare, by the client that they are built on."""
    settings = ConnectionConfig(servers)

    def of(log: DataLog) -> Read:
        return lambda _, topic, watch: ours(log.reader(), topic, watch)

    fast, slow = FastDataLog(settings), KafkaDataLog(settings)
    return {
        "confluent-kafka": {"bare": bare_fast, "tuned": tuned_fast, "ours": of(fast)},
        "kafka-python": {"bare": bare_slow, "ours": of(slow)},
    }


def compare(
    servers: str, topic: str, *, load: Load, rounds: int
) -> list[Mapping[str, Any]]:
    """Return the figures of all sides on one topic."""
    figures: list[Mapping[str, Any]] = []
    for client, reads in sides_of(servers).items():
        wanted = load.stored if client == "confluent-kafka" else load.slow
        spent: dict[str, list[tuple[float, float, float]]] = {
            name: [] for name in reads
        }

        def one(name: str, read: Read, wanted: int = wanted) -> float:
            watch = Stopwatch(wanted)
            read(servers, topic, watch)
            spent[name].append(watch.spent)  # noqa: B023 - called within the round
            return 1 / watch.spent[0]

        runs = {name: partial(one, name, read) for name, read in reads.items()}
        # The first round warms up caches, also those of the broker.
        alternate(runs, 1)
        for each in spent.values():
            each.clear()
        rates = alternate(runs, rounds)
        figures += figures_of(f"{client}, {load.size} bytes", rates, spent)
    return figures


def figures_of(
    what: str,
    rates: Mapping[str, list[float]],
    spent: Mapping[str, list[tuple[float, float, float]]],
) -> list[Mapping[str, Any]]:
    """Return the figures of one client: ratios first."""
    figures: list[Mapping[str, Any]] = []
    for other in [each for each in rates if each != "ours"]:
        beside = f"{what}: ours beside {other}"
        both = ratios(rates["ours"], rates[other])
        target = TARGET if other == "bare" else None
        figures.append(figure(beside, "ratio", both, target=target))
        for index, part in ((1, "all threads"), (2, "the reading thread")):
            costs = [
                theirs[index] / own[index]
                for own, theirs in zip(spent["ours"], spent[other], strict=True)
            ]
            figures.append(figure(f"{beside}, CPU of {part}", "ratio", costs))
    for name, samples in rates.items():
        figures.append(figure(f"{what}: {name}", "records/s", samples))
        for index, part in ((1, "all threads"), (2, "the reading thread")):
            costs = [1e6 * each[index] for each in spent[name]]
            figures.append(figure(f"{what}: {name}, CPU of {part}", "us", costs))
    show_figures(figures)
    return figures


def main() -> None:
    """Run it all and print one document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 9)
    figures: list[Mapping[str, Any]] = []
    with cluster(options.bootstrap_servers) as servers:
        for load in QUICK if options.quick else LOADS:
            topic = f"readers-{load.size}-{time.time_ns()}"
            fill(servers, topic, load)
            figures += compare(servers, topic, load=load, rounds=rounds)
    settings = {
        "partitions": PARTITIONS,
        "poll_records": POLL_RECORDS,
        "rounds": rounds,
    }
    made = document("readers", figures, settings=settings, is_quick=options.quick)
    write_document(made, options.out)


if __name__ == "__main__":
    main()
