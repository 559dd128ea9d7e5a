"""How fast the consumer hands out, beside the bare clients that it is built on.

All sides read the same records from their start, in polls of the same size, access the
value and the offset of each record, and commit as usual: a bare client by auto commit,
ours by ``commit``. In each round every side has a new consumer. Time begins once it has
read a tenth of its records and ends with the last one, so that connecting, claiming and
filling of buffers do not count.

*tuned* is confluent-kafka with ``fetch.queue.backoff.ms=10``. With the default (*bare*)
it stalls for up to a second whenever its queue is full, which is no fair comparison.
kafka-python checks records with the package crc32c, which this library installs.
Producers send large batches in a busy topic, and batches of some records (*in 10s*) in
others. *columns* and *arrow* are batches handed out without an object for each record;
*amo* are batches at most once. Two ratios of processor times stand beside each ratio of
rates. One is that of all threads, which is more reliable on a busy machine. The other
is that of the broker, if it runs on this machine, without its compilers: for each
record after the first tenth, which another consumer reads, and for the start.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
from confluent_kafka import Consumer as FastConsumer
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as FastPartition
from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaPartition
from kafka.record.util import crc32c_c
from support import (
    Target,
    alternate,
    arguments,
    at_least,
    at_most,
    broker_argument,
    broker_pid,
    cluster,
    document,
    figure,
    ratios,
    show_figures,
    steady_cpu_s,
    write_document,
)

from kafka_marshal import Admin, Consumer, Delivery, Marshal
from kafka_marshal.admin.formatting import Format
from kafka_marshal.testing.producing import create_topic

PARTITIONS = 8
POLL_RECORDS = 500
POLL_MS = 1_000
SIZES = (1_000, 100)
SMALL_BATCH = 10
H_MS = 5_000
GIVE_UP_S = 120.0
# Time begins after one record in this many was read.
WARM_PART = 10
# Rounds that do not count: meanwhile the broker compiles its code for fetches, which
# takes several times the processor time of the fetches.
WARM_UPS = 2
# ``fetch.queue.backoff.ms`` of the tuned peer; the default is 1000.
TUNED_BACKOFF_MS = 10
NAMES = {"fast": "confluent-kafka", "kafka-python": "kafka-python"}
# Least ratios of rates to the peer's, by load.
FAST_LEAST = {
    "1000 bytes": {"poll": 1.0, "batches": 1.0, "columns": 1.3, "arrow": 1.3},
    "100 bytes": {"poll": 1.5, "batches": 2.0, "columns": 4.0, "arrow": 4.0},
    "100 bytes in 10s": {"poll": 1.0, "batches": 1.0},
}
PYTHON_LEAST = {"poll": 4.0, "batches": 4.0}
AMO_LEAST = 0.9
# Largest ratios of the broker's processor time per record to that of the tuned peer.
BROKER_MOST = {"poll": 1.1, "amo": 1.3}


@attrs.frozen(kw_only=True)
class Load:
    """How many records are stored, and how many a side reads in a round.

    Attributes:
        stored: Records in the topic; sides with librdkafka read all.
        python: Records that our consumer on kafka-python reads.
        bare: Records that bare kafka-python reads.
        value_bytes: Size of a value.
        batch_max: Records of a batch; None for as many as fit.
    """

    stored: int
    python: int
    bare: int
    value_bytes: int
    batch_max: int | None = None

    def __str__(self) -> str:
        """Return its name in the figures."""
        size = f"{self.value_bytes} bytes"
        return size if self.batch_max is None else f"{size} in {self.batch_max}s"


LOADS = (
    Load(stored=2_000_000, python=800_000, bare=200_000, value_bytes=1_000),
    Load(stored=8_000_000, python=8_000_000, bare=300_000, value_bytes=100),
    Load(
        stored=3_000_000,
        python=1_500_000,
        bare=200_000,
        value_bytes=100,
        batch_max=SMALL_BATCH,
    ),
)
QUICK_STORED, QUICK_READ = 20_000, 5_000


class Stopwatch:
    """Counts records, and times them after the first ``1 / WARM_PART`` of them.

    Attributes:
        rate: Records a second.
        cpu_us: Processor time of this process for a record.
        broker_s: Processor time of the broker since the start of the side, for all
            records, because it sends some ahead. 0 if unknown.
    """

    def __init__(self, wanted: int, *, broker: int | None = None) -> None:
        """Expect ``wanted`` records; ``broker`` is the process id of the broker."""
        self.wanted = wanted
        self.warm = wanted // WARM_PART
        self.count = 0
        self.rate = self.cpu_us = self.broker_s = 0.0
        self._broker, self._broker_start_s = broker, self._used_by_broker_s(broker)
        self._late = time.monotonic() + GIVE_UP_S
        self._start: tuple[int, tuple[float, float]] | None = None

    def note(self, count: int) -> bool:
        """Count the records of a poll; return whether more are expected."""
        self.count += count
        if self._start is None and self.count >= self.warm:
            self._start = (self.count, self._now())
        if self.count < self.wanted:
            if not count and time.monotonic() > self._late:
                raise SystemExit(f"only {self.count} of {self.wanted} records came")
            return True
        assert self._start is not None
        before, start = self._start
        timed = max(1, self.count - before)
        took_s, cpu = (
            end - begin for end, begin in zip(self._now(), start, strict=True)
        )
        self.rate, self.cpu_us = timed / took_s, cpu / timed * 1e6
        used_s = self._used_by_broker_s(self._broker)
        self.broker_s = used_s - self._broker_start_s
        return False

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    @staticmethod
    def _used_by_broker_s(broker: int | None) -> float:
        return 0.0 if broker is None else steady_cpu_s(broker)


# --- the bare clients


@contextmanager
def bare_fast(
    servers: str, topic: str, *, is_tuned: bool = False
) -> Iterator[FastConsumer]:
    """Yield confluent-kafka's Consumer, with every partition and auto commit."""
    settings: dict[str, Any] = {
        "bootstrap.servers": servers,
        "group.id": f"bare-{time.time_ns()}",
    }
    if is_tuned:
        settings["fetch.queue.backoff.ms"] = TUNED_BACKOFF_MS
    consumer = FastConsumer(settings)
    consumer.assign([FastPartition(topic, each, 0) for each in range(PARTITIONS)])
    try:
        yield consumer
    finally:
        consumer.close()


@contextmanager
def bare_python(servers: str, topic: str) -> Iterator[KafkaConsumer]:
    """Yield kafka-python's KafkaConsumer, with every partition and auto commit."""
    consumer = KafkaConsumer(
        bootstrap_servers=servers, group_id=f"bare-{time.time_ns()}"
    )
    places = [KafkaPartition(topic, each) for each in range(PARTITIONS)]
    consumer.assign(places)
    for place in places:
        consumer.seek(place, 0)
    try:
        yield consumer
    finally:
        consumer.close(autocommit=False)


def poll_bare_fast(
    servers: str, topic: str, *, size: int, watch: Stopwatch, is_tuned: bool = False
) -> None:
    """Read in polls, with bare confluent-kafka."""
    with bare_fast(servers, topic, is_tuned=is_tuned) as consumer:
        while True:
            messages = consumer.consume(size, POLL_MS / 1000)
            for message in messages:
                message.value()
                message.offset()
            if not watch.note(len(messages)):
                return


def poll_bare_python(servers: str, topic: str, *, size: int, watch: Stopwatch) -> None:
    """Read in polls, with bare kafka-python."""
    with bare_python(servers, topic) as consumer:
        while True:
            count = 0
            for records in consumer.poll(POLL_MS, max_records=size).values():
                for record in records:
                    record.value  # noqa: B018 - the access is timed, too
                    record.offset  # noqa: B018
                count += len(records)
            if not watch.note(count):
                return


# --- ours


@contextmanager
def ours(
    servers: str,
    topic: str,
    transport: str,
    **settings: Any,  # noqa: ANN401
) -> Iterator[Consumer]:
    """Yield a consumer of this library that holds every partition."""
    group = f"ours-{time.time_ns()}"
    with (
        Marshal(
            servers, group_id=group, client_id="one", state_dir="", transport=transport
        ) as marshal,
        marshal.consumer(topic, **settings) as consumer,
    ):
        late = time.monotonic() + GIVE_UP_S
        while len(consumer.assignment()) < PARTITIONS:
            if time.monotonic() > late:
                raise SystemExit("the partitions could not be claimed")
            time.sleep(0.01)
        yield consumer


def poll_ours(
    servers: str, topic: str, *, transport: str, size: int, watch: Stopwatch
) -> None:
    """Read in polls, and commit each."""
    at_once = max(size, POLL_RECORDS)
    with ours(servers, topic, transport, max_poll_records=at_once) as consumer:
        while True:
            count = 0
            for records in consumer.poll(POLL_MS, size).values():
                for record in records:
                    record.value  # noqa: B018
                    record.offset  # noqa: B018
                count += len(records)
            consumer.commit()
            if not watch.note(count):
                return


def batches_ours(
    servers: str,
    topic: str,
    *,
    transport: str,
    watch: Stopwatch,
    delivery: Delivery = Delivery.AT_LEAST_ONCE,
    size: int = POLL_RECORDS,
) -> None:
    """Read in batches, and commit each."""
    with ours(
        servers, topic, transport, delivery=delivery, max_poll_records=size
    ) as consumer:
        for batch in consumer.batches():
            for record in batch.records:
                record.value  # noqa: B018
                record.offset  # noqa: B018
            batch.commit()
            if not watch.note(len(batch.records)):
                return


def columns_ours(
    servers: str,
    topic: str,
    *,
    transport: str,
    watch: Stopwatch,
    is_arrow: bool = False,
    size: int = POLL_RECORDS,
) -> None:
    """Read in batches as columns, and commit each."""
    with ours(servers, topic, transport, max_poll_records=size) as consumer:
        for batch in consumer.batches():
            if is_arrow:
                batch.to_arrow()
            else:
                batch.values  # noqa: B018
                batch.offsets  # noqa: B018
            batch.commit()
            if not watch.note(len(batch)):
                return


# --- measuring


@attrs.frozen
class Side:
    """One way to read.

    Attributes:
        read: Function that reads; called with a ``watch``.
        wanted: Number of records that it reads.
    """

    read: Callable[..., None]
    wanted: int


@attrs.frozen
class Beside:
    """A side and the peer with which it is compared.

    Attributes:
        name: Name of the side.
        peer: Name of the peer.
        target: Target for the ratio of their rates.
        broker: Target for the ratio of the broker's processor times per record.
    """

    name: str
    peer: str
    target: Target | None = None
    broker: Target | None = None


def compare(
    what: str,
    sides: Mapping[str, Side],
    *,
    pairs: Sequence[Beside],
    rounds: int,
    warm_ups: int = 0,
    broker: int | None = None,
) -> list[dict[str, Any]]:
    """Run sides in turns and return the figures of each, and of the pairs.

    Args:
        what: Common part of the figures' names.
        sides: The sides by name.
        pairs: The comparisons.
        rounds: Number of rounds.
        warm_ups: Number of rounds before that, which do not count.
        broker: Process id of the broker, to count its processor time; or None.
    """
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    brokers: dict[str, list[float]] = {name: [] for name in sides}
    starts: dict[str, list[float]] = {name: [] for name in sides}

    def read(name: str, wanted: int) -> Stopwatch:
        watch = Stopwatch(wanted, broker=broker)
        sides[name].read(watch=watch)
        return watch

    def run(name: str) -> float:
        watch = read(name, sides[name].wanted)
        cpu[name].append(watch.cpu_us)
        if broker is not None:
            begun = read(name, watch.warm)
            used_s = watch.broker_s - begun.broker_s
            each_s = used_s / (watch.count - begun.count)
            brokers[name].append(each_s * 1e6)
            starts[name].append((begun.broker_s - begun.count * each_s) * 1e3)
        return watch.rate

    found = alternate({name: partial(run, name) for name in sides}, warm_ups + rounds)
    for samples in (found, cpu, brokers, starts):
        for each in samples.values():
            del each[:warm_ups]
    figures = []
    for pair in pairs:
        name, peer = pair.name, pair.peer
        label = f"{what}: {name} beside {peer}"
        shares = ratios(found[name], found[peer])
        figures.append(figure(label, "ratio", shares, target=pair.target))
        # Processor time of a record with the peer, divided by that with this side.
        shares = ratios(cpu[peer], cpu[name])
        figures.append(figure(f"{label}, by CPU time", "ratio", shares))
        if broker is not None:
            shares = ratios(brokers[name], brokers[peer])
            label = f"{label}, the broker's CPU"
            figures.append(figure(label, "ratio", shares, target=pair.broker))
    for name in sides:
        figures.append(figure(f"{what}: {name}", "records/s", found[name]))
        # Processor time of all threads, which matters on a machine with other load.
        figures.append(figure(f"{what}: CPU, {name}", "us/record", cpu[name]))
        if broker is not None:
            label = f"{what}: the broker's CPU, {name}"
            figures.append(figure(label, "us/record", brokers[name]))
            label = f"{what}: the broker's CPU, start of {name}"
            figures.append(figure(label, "ms", starts[name]))
    show_figures(figures)
    return figures


def sides_of(servers: str, topic: str, transport: str, load: Load) -> dict[str, Side]:
    """Return the sides of a transport by name, the peers first."""
    bare: dict[str, Any] = {
        "servers": servers,
        "topic": topic,
        "size": POLL_RECORDS,
    }
    our: dict[str, Any] = {"servers": servers, "topic": topic, "transport": transport}
    if transport == "fast":
        wanted = load.stored
        tuned = partial(poll_bare_fast, **bare, is_tuned=True)
        sides = {
            "tuned": Side(tuned, wanted),
            "bare": Side(partial(poll_bare_fast, **bare), wanted),
        }
    else:
        if crc32c_c is None:
            raise SystemExit("kafka-python does not find crc32c; install it: make env")
        wanted = load.python
        sides = {"bare": Side(partial(poll_bare_python, **bare), load.bare)}
    amo = partial(batches_ours, **our, delivery=Delivery.AT_MOST_ONCE)
    return {
        **sides,
        "poll": Side(partial(poll_ours, **our, size=POLL_RECORDS), wanted),
        "batches": Side(partial(batches_ours, **our), wanted),
        "columns": Side(partial(columns_ours, **our), wanted),
        "arrow": Side(partial(columns_ours, **our, is_arrow=True), wanted),
        "amo": Side(amo, wanted),
    }


def pairs_of(transport: str, load: Load) -> list[Beside]:
    """Return the comparisons of a transport, with their targets."""
    is_fast = transport == "fast"
    peer = "tuned" if is_fast else "bare"
    least = FAST_LEAST[str(load)] if is_fast else PYTHON_LEAST
    pairs = [
        Beside(
            name=name,
            peer=peer,
            target=at_least(least[name]) if name in least else None,
            broker=at_most(BROKER_MOST[name])
            if is_fast and name in BROKER_MOST
            else None,
        )
        for name in ("poll", "batches", "columns", "arrow", "amo")
    ]
    amo = at_least(AMO_LEAST)
    pairs.append(Beside(name="amo", peer="batches", target=amo))
    if is_fast:
        pairs.append(Beside(name="poll", peer="bare"))
    return pairs


def format_and_fill(
    servers: str,
    count: int,
    *,
    partitions: int,
    value_bytes: int = SIZES[0],
    batch_max: int | None = None,
) -> str:
    """Make a coordination topic and a data topic; return the data topic's name."""
    with Admin(servers) as admin:
        form = Format(partition_count=PARTITIONS, heartbeat_interval_ms=H_MS)
        admin.format_topic(form, ignore_formatted=True)
    topic = f"consume-{time.time_ns()}"
    create_topic(servers, topic, partitions=partitions)
    fill(
        *(servers, topic, count),
        partitions=partitions,
        value_bytes=value_bytes,
        batch_max=batch_max,
    )
    return topic


def fill(
    servers: str,
    topic: str,
    count: int,
    *,
    partitions: int,
    value_bytes: int = SIZES[0],
    batch_max: int | None = None,
) -> None:
    """Write the topic's records with confluent-kafka."""
    settings: dict[str, Any] = {"bootstrap.servers": servers, "linger.ms": 50}
    if batch_max is not None:
        settings["batch.num.messages"] = batch_max
    producer = Producer(settings)
    value = bytes(value_bytes)
    for number in range(count):
        while True:
            try:
                producer.produce(topic, value, partition=number % partitions)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 1_000 == 0:
            producer.poll(0)
    if producer.flush(GIVE_UP_S):
        raise SystemExit("the topic could not be filled")


def measure(
    servers: str,
    *,
    transports: Sequence[str],
    sizes: Sequence[int],
    is_quick: bool,
    rounds: int,
) -> list[dict[str, Any]]:
    """Return the figures of every load and transport."""
    broker = broker_pid(servers)
    figures = []
    for load in LOADS:
        if load.value_bytes not in sizes:
            continue
        if is_quick:
            load = attrs.evolve(  # noqa: PLW2901
                load, stored=QUICK_STORED, python=QUICK_READ, bare=QUICK_READ
            )
        topic = format_and_fill(
            servers,
            load.stored,
            partitions=PARTITIONS,
            value_bytes=load.value_bytes,
            batch_max=load.batch_max,
        )
        for transport in transports:
            figures += compare(
                f"{NAMES[transport]}, {load}",
                sides_of(servers, topic, transport, load),
                pairs=pairs_of(transport, load),
                rounds=rounds,
                warm_ups=0 if is_quick else WARM_UPS,
                broker=broker,
            )
    return figures


def main() -> None:
    """Run it all and print one document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    parser.add_argument("--transport", choices=sorted(NAMES), action="append")
    parser.add_argument("--value-bytes", type=int, choices=SIZES, action="append")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    sizes = options.value_bytes or SIZES
    with cluster(options.bootstrap_servers) as servers:
        figures = measure(
            servers,
            transports=options.transport or list(NAMES),
            sizes=sizes,
            is_quick=options.quick,
            rounds=rounds,
        )
    settings = {
        "partitions": PARTITIONS,
        "poll_records": POLL_RECORDS,
        "value_bytes": sizes,
        "rounds": rounds,
        "heartbeat_interval_ms": H_MS,
    }
    made = document("consume", figures, settings=settings, is_quick=options.quick)
    write_document(made, options.out)


if __name__ == "__main__":
    main()
