"""How fast the consumer hands out, beside the bare clients that it stands on.

Both sides read the same records from their start, in polls of the same size, look
at the value and the offset of each, and commit as their users do: the bare client by
its own auto commit, ours by ``commit``. Each round every side has a consumer of its
own; its time runs from when a tenth of its records came to its last, so that neither
connecting and claiming count nor the filling of buffers. At most once is set beside
at least once, and so is at least once that holds as many records before it looks at
them: who fetches before he asks for a grant holds them, however fast grants are.
*tuned* is confluent-kafka with ``fetch.queue.backoff.ms=10``: by default it stalls for
up to a second whenever its queue is full, which is no bar. *columns* and *arrow* are
batches handed out without an object for each record. Beside each ratio of rates stands
one of the processor times of all threads, which says more on a busy machine.
Last, a broker that is far away: a batch should take as long as its
handler or as its fetch, not as both together.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import attrs
from confluent_kafka import Consumer as FastConsumer
from confluent_kafka import Message, Producer
from confluent_kafka import TopicPartition as FastPartition
from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaPartition
from support import (
    Target,
    alternate,
    arguments,
    at_least,
    at_most,
    broker_argument,
    cluster,
    document,
    figure,
    ratios,
    show_figures,
    write_document,
)

from kafka_marshal import Admin, Batch, Consumer, Delivery, Marshal
from kafka_marshal.admin import Format
from kafka_marshal.config import ConsumerConfig
from kafka_marshal.testing.broker import EmbeddedBroker
from kafka_marshal.testing.producing import create_topic
from kafka_marshal.testing.slowlink import SlowLink

PARTITIONS = 4
POLL_RECORDS = 500
POLL_MS = 1_000
VALUE_BYTES = 1_000
H_MS = 5_000
GIVE_UP_S = 120.0
# Part of the records after which the watch starts.
WARM_PART = 10
# Of the tuned peer; the default is 1000.
TUNED_BACKOFF_MS = 10
FAR_MS = 100
FAR_RECORDS = 8_000
# Of polls and batches of 500 records of 1 KB, beside the tuned or bare client.
TARGETS: Mapping[str, Mapping[str, Target]] = {
    "fast": {
        "poll": at_least(1.0),
        "batches": at_least(1.0),
        "columns": at_least(1.3),
        "arrow": at_least(1.3),
    },
    "kafka-python": {"poll": at_least(4.0), "batches": at_least(4.0)},
}
NAMES = {"fast": "confluent-kafka", "kafka-python": "kafka-python"}


@attrs.frozen
class Load:
    """How many records a side reads in a round: for some seconds, in earnest.

    Attributes:
        many: In polls or batches of many, by transport; as many are stored.
        one: One by one, iterating.
        polled: In polls of one.
    """

    many: Mapping[str, int]
    one: Mapping[str, int]
    polled: Mapping[str, int]


LOAD = Load(
    many={"fast": 2_000_000, "kafka-python": 200_000},
    one={"fast": 1_000_000, "kafka-python": 200_000},
    polled={"fast": 400_000, "kafka-python": 20_000},
)
QUICK = Load(
    many={"fast": 20_000, "kafka-python": 5_000},
    one={"fast": 20_000, "kafka-python": 5_000},
    polled={"fast": 2_000, "kafka-python": 2_000},
)


class Stopwatch:
    """Counts records, and times them from when a side is under way."""

    def __init__(self, wanted: int) -> None:
        """Wait for ``wanted`` records, and time all but the first of them."""
        self.wanted = wanted
        self.warm = wanted // WARM_PART
        self.count = 0
        self.rate = self.cpu_us = 0.0
        self._late = time.monotonic() + GIVE_UP_S
        self._start: tuple[int, float, float] | None = None

    def note(self, count: int) -> bool:
        """Note what a poll brought, and return whether more is to come."""
        self.count += count
        if self._start is None and self.count >= self.warm:
            self._start = (self.count, time.perf_counter(), time.process_time())
        if self.count < self.wanted:
            if not count and time.monotonic() > self._late:
                raise SystemExit(f"only {self.count} of {self.wanted} records came")
            return True
        assert self._start is not None
        before, began, cpu = self._start
        timed = max(1, self.count - before)
        self.rate = timed / (time.perf_counter() - began)
        self.cpu_us = (time.process_time() - cpu) / timed * 1e6
        return False


# --- the bare clients


@contextmanager
def bare_fast(
    servers: str, topic: str, *, is_tuned: bool = False
) -> Iterator[FastConsumer]:
    """Give confluent-kafka's Consumer, with every partition and auto commit."""
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
    """Give kafka-python's KafkaConsumer, with every partition and auto commit."""
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
    """Read in polls, by the bare fast client."""
    with bare_fast(servers, topic, is_tuned=is_tuned) as consumer:
        while True:
            messages = consumer.consume(size, POLL_MS / 1000)
            for message in messages:
                message.value()
                message.offset()
            if not watch.note(len(messages)):
                return


def poll_least_fast(servers: str, topic: str, *, size: int, watch: Stopwatch) -> None:
    """Read in polls, by the bare fast client and the least that claims ask for.

    To hand out under claims a client has to check each message for an error and its
    partition, to check the lease of that under a lock, and to note the position.
    Messages are handed out as they are, and without a commit.
    """
    lock, leased_until_s = threading.RLock(), time.monotonic() + GIVE_UP_S
    places: dict[int | None, int | None] = {}
    with bare_fast(servers, topic) as consumer:
        while True:
            messages = consumer.consume(size, POLL_MS / 1000)
            if any(map(Message.error, messages)):
                raise SystemExit("a message is an error")
            runs = [
                (number, list(run))
                for number, run in groupby(messages, Message.partition)
            ]
            with lock:
                if time.monotonic() > leased_until_s:
                    raise SystemExit("the lease ran out")
                places.update((number, run[-1].offset()) for number, run in runs)
            for _, run in runs:
                for message in run:
                    message.value()
                    message.offset()
            if not watch.note(len(messages)):
                return


def poll_bare_python(servers: str, topic: str, *, size: int, watch: Stopwatch) -> None:
    """Read in polls, by the bare kafka-python."""
    with bare_python(servers, topic) as consumer:
        while True:
            count = 0
            for records in consumer.poll(POLL_MS, max_records=size).values():
                for record in records:
                    record.value  # noqa: B018 - looking is what is timed
                    record.offset  # noqa: B018
                count += len(records)
            if not watch.note(count):
                return


def iterate_bare_fast(servers: str, topic: str, *, watch: Stopwatch) -> None:
    """Read message by message, by the bare fast client."""
    with bare_fast(servers, topic) as consumer:
        while True:
            message = consumer.poll(POLL_MS / 1000)
            if message is not None:
                message.value()
                message.offset()
            if not watch.note(0 if message is None else 1):
                return


def iterate_bare_python(servers: str, topic: str, *, watch: Stopwatch) -> None:
    """Read message by message, by the bare kafka-python."""
    with bare_python(servers, topic) as consumer:
        for message in consumer:
            message.value  # noqa: B018
            message.offset  # noqa: B018
            if not watch.note(1):
                return


# --- ours


@contextmanager
def ours(
    servers: str,
    topic: str,
    transport: str,
    **settings: Any,  # noqa: ANN401
) -> Iterator[Consumer]:
    """Give a consumer of ours that holds every partition."""
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
    """Read in polls, and commit what each brought."""
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


def held_ours(
    servers: str, topic: str, *, transport: str, watch: Stopwatch, size: int
) -> None:
    """Read in batches, at least once, and look at each as late as at most once does.

    It waits for nothing and asks for nothing, but holds as many records as are fetched
    ahead of their grants.
    """
    config = ConsumerConfig(topics=(topic,))
    most = max(config.max_fetched, size * config.max_granted_batches)
    settings = {"max_poll_records": size, "max_uncommitted": 2 * most}
    held: deque[Batch] = deque()
    count = 0
    with ours(servers, topic, transport, **settings) as consumer:
        for fetched in consumer.batches():
            held.append(fetched)
            count += len(fetched.records)
            while count > most:
                batch = held.popleft()
                count -= len(batch.records)
                for record in batch.records:
                    record.value  # noqa: B018
                    record.offset  # noqa: B018
                batch.commit()
            # Once it holds that many it looks at as many as come; these are counted.
            if not watch.note(len(fetched.records)):
                return


def iterate_ours(
    servers: str, topic: str, *, transport: str, commits: bool, watch: Stopwatch
) -> None:
    """Read record by record, and commit each of them or only some."""
    with ours(servers, topic, transport, max_poll_records=POLL_RECORDS) as consumer:
        for number, record in enumerate(consumer, 1):
            record.value  # noqa: B018
            record.offset  # noqa: B018
            if commits:
                consumer.commit(record)
            elif number % POLL_RECORDS == 0:
                consumer.commit()
            if not watch.note(1):
                return


# --- measuring

Side = Callable[..., None]


def timed(side: Side, wanted: int, cpu: list[float]) -> Callable[[], float]:
    """Return what runs a side once: its records a second, and CPU time of each."""

    def run() -> float:
        watch = Stopwatch(wanted)
        side(watch=watch)
        cpu.append(watch.cpu_us)
        return watch.rate

    return run


def compare(
    what: str, sides: Mapping[str, Side], *, wanted: int, rounds: int, **targets: Target
) -> list[dict[str, Any]]:
    """Run sides in turns; each but the first is set beside the first."""
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    runs = {name: timed(side, wanted, cpu[name]) for name, side in sides.items()}
    found = alternate(runs, rounds)
    first, *others = sides
    figures = []
    for other in others:
        beside = ratios(found[other], found[first])
        target = targets.get(other)
        name = f"{what}: {other} beside {first}"
        figures.append(figure(name, "ratio", beside, target=target))
        # How many of the first's records fit into the processor time of one of this.
        beside = ratios(cpu[first], cpu[other])
        figures.append(figure(f"{name}, by CPU time", "ratio", beside))
    figures += [
        figure(f"{what}: {name}", "records/s", rates) for name, rates in found.items()
    ]
    # Of all threads: what a machine with other work to do has less of.
    figures += [
        figure(f"{what}: CPU, {name}", "us/record", times)
        for name, times in cpu.items()
    ]
    show_figures(figures)
    return figures


def measure(
    servers: str, topic: str, transport: str, *, load: Load, rounds: int, only: str
) -> list[dict[str, Any]]:
    """Return the figures of one transport."""
    name = NAMES[transport]
    poll_bare: Side = poll_bare_fast if transport == "fast" else poll_bare_python
    iterate_bare: Side = (
        iterate_bare_fast if transport == "fast" else iterate_bare_python
    )
    our = {"servers": servers, "topic": topic, "transport": transport}
    bare = {"servers": servers, "topic": topic}
    figures: list[dict[str, Any]] = []
    for size in (500, 5_000, 1):
        sides: dict[str, Side] = {
            "bare": partial(poll_bare, **bare, size=size),
            "poll": partial(poll_ours, **our, size=size),
        }
        if transport == "fast":
            tuned = partial(poll_bare_fast, **bare, size=size, is_tuned=True)
            sides = {"tuned": tuned, **sides}
        if transport == "fast" and size > 1:
            sides["least"] = partial(poll_least_fast, **bare, size=size)
        if size == POLL_RECORDS:
            sides["batches"] = partial(batches_ours, **our)
            sides["columns"] = partial(columns_ours, **our)
            sides["arrow"] = partial(columns_ours, **our, is_arrow=True)
        if "poll" in only:
            figures += compare(
                f"{name}, at least once, polls of {size}",
                sides,
                wanted=(load.polled if size == 1 else load.many)[transport],
                rounds=rounds,
                **(TARGETS[transport] if size == POLL_RECORDS else {}),
            )
    if "iterate" in only:
        least = {"commit": at_least(0.8)} if transport == "kafka-python" else {}
        figures += compare(
            f"{name}, at least once, record by record",
            {
                "bare": partial(iterate_bare, **bare),
                "commit": partial(iterate_ours, **our, commits=True),
                "iteration": partial(iterate_ours, **our, commits=False),
            },
            wanted=load.one[transport],
            rounds=rounds,
            **least,
        )
    for size in (500, 5_000) if "amo" in only else ():
        at_most_once = partial(batches_ours, delivery=Delivery.AT_MOST_ONCE)
        figures += compare(
            f"{name}, batches of {size}",
            {
                "alo": partial(batches_ours, **our, size=size),
                "amo": partial(at_most_once, **our, size=size),
                "held": partial(held_ours, **our, size=size),
            },
            wanted=load.many[transport],
            rounds=rounds,
            amo=at_least(0.90),
        )
    return figures


def handled_far_away(
    servers: str, topic: str, *, transport: str, handle_s: float
) -> float:
    """Return seconds for each 500 records, with a handler that takes so long."""
    group = f"far-{time.time_ns()}"
    with (
        Marshal(
            servers, group_id=group, client_id="one", state_dir="", transport=transport
        ) as marshal,
        marshal.consumer(topic) as consumer,
    ):
        began, before, count = 0.0, 0, 0
        late = time.monotonic() + GIVE_UP_S
        while count < FAR_RECORDS * 3 // 4 and time.monotonic() < late:
            polled = sum(map(len, consumer.poll(POLL_MS).values()))
            count += polled
            time.sleep(handle_s * polled / POLL_RECORDS)
            consumer.commit()
            if count >= FAR_RECORDS // 4 and not before:
                # What the reader had to learn of the link it has learnt by now.
                began, before = time.perf_counter(), count
        return (time.perf_counter() - began) / (count - before) * POLL_RECORDS


def far_away(transports: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Set the time of a batch beside the larger of handling and fetching it."""
    link = SlowLink(delay_ms=FAR_MS)
    listeners = {"advertised.listeners": f"PLAINTEXT://{link.address}"}
    figures = []
    with link, EmbeddedBroker(properties=listeners) as broker:
        link.lead_to(broker.bootstrap_servers)
        topic = format_and_fill(link.address, FAR_RECORDS, partitions=1)
        for transport in transports:
            run = partial(handled_far_away, link.address, topic, transport=transport)
            beside: dict[str, list[float]] = {"quick": [], "even": [], "slow": []}
            for _ in range(rounds):
                fetch_s = run(handle_s=0.0)
                for name, factor in (("quick", 0.5), ("even", 1.0), ("slow", 2.0)):
                    handle_s = factor * fetch_s
                    took_s = run(handle_s=handle_s)
                    beside[name].append(took_s / max(handle_s, fetch_s))
            figures += [
                figure(
                    f"{NAMES[transport]}, {FAR_MS} ms away, {name} handler: time of a "
                    "batch beside the larger of handling and fetching",
                    "ratio",
                    samples,
                    target=at_most(1.2),
                )
                for name, samples in beside.items()
            ]
    show_figures(figures)
    return figures


def format_and_fill(
    servers: str, count: int, *, partitions: int, value_bytes: int = VALUE_BYTES
) -> str:
    """Make the coordination topic and a data topic, and return the latter's name."""
    with Admin(servers) as admin:
        form = Format(partition_count=PARTITIONS, heartbeat_interval_ms=H_MS)
        admin.format_topic(form, ignore_formatted=True)
    topic = f"consume-{time.time_ns()}"
    create_topic(servers, topic, partitions=partitions)
    fill(servers, topic, count, partitions=partitions, value_bytes=value_bytes)
    return topic


def fill(
    servers: str,
    topic: str,
    count: int,
    *,
    partitions: int,
    value_bytes: int = VALUE_BYTES,
) -> None:
    """Write the topic's records, by the fast client."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50})
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


def run(
    servers: str,
    *,
    transports: Sequence[str],
    load: Load,
    rounds: int,
    only: str,
    value_bytes: int,
) -> list[dict[str, Any]]:
    """Return the figures of every transport, from one topic."""
    stored = max(load.many[transport] for transport in transports)
    topic = format_and_fill(
        servers, stored, partitions=PARTITIONS, value_bytes=value_bytes
    )
    figures = []
    for transport in transports:
        figures += measure(
            servers, topic, transport, load=load, rounds=rounds, only=only
        )
    return figures


def main() -> None:
    """Run it all and print one document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    parser.add_argument("--transport", choices=sorted(NAMES), action="append")
    parser.add_argument(
        "--only",
        default="poll,iterate,amo,far",
        help="parts to run: poll, iterate, amo, far, with commas",
    )
    parser.add_argument("--value-bytes", type=int, default=VALUE_BYTES)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    transports = options.transport or list(NAMES)
    figures: list[dict[str, Any]] = []
    if options.only != "far":
        with cluster(options.bootstrap_servers) as servers:
            figures += run(
                servers,
                transports=transports,
                load=QUICK if options.quick else LOAD,
                rounds=rounds,
                only=options.only,
                value_bytes=options.value_bytes,
            )
    if "far" in options.only:
        figures += far_away(transports, max(1, rounds // 2))
    settings = {
        "partitions": PARTITIONS,
        "value_bytes": options.value_bytes,
        "rounds": rounds,
        "heartbeat_interval_ms": H_MS,
    }
    made = document("consume", figures, settings=settings, is_quick=options.quick)
    write_document(made, options.out)


if __name__ == "__main__":
    main()
