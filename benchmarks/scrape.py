"""The cost of metrics: a scrape, how long it holds the engine's lock, and consumption.

Clients use a cluster in memory, so that only the work of this library counts. One side
consumes while it is scraped ten times a second, which is 150 times as often as usual;
the other side has no collector. The CPU time of the process is compared, so that other
processes have little influence. The parts of a scrape are timed as well.
"""

import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from support import alternate, arguments, document, figure, ratios, write_document

from kafka_marshal.config import ConsumerConfig
from kafka_marshal.metrics import MarshalCollector
from kafka_marshal.protocol.types import TopicPartition
from simulator.node import Cluster, ConsumerSpec, Node

EVERY_S = 0.1
POLL_RECORDS = 500
VALUE = b"x" * 1_000
H_MS = 60_000
CLAIM_MS_MAX = 20 * H_MS


class Client:
    """The part of ``Marshal`` that a collector uses, for a node in memory."""

    coordination_topic = "__marshal"
    is_closed = False

    def __init__(self, node: Node) -> None:
        """Stand in for the client of a node."""
        self.engine, self.session = node.engine, node.session
        self.group_id = node.session.claimant.group_id
        self.client_id = node.session.claimant.owner.client_id

    def call_on_close(self, function: Callable[[], None]) -> None:
        """Do nothing, because this client never closes."""


class Timed(threading.Condition):
    """The engine's lock; notes how much CPU time each hold took, in seconds."""

    def __init__(self) -> None:
        """Start with no hold."""
        super().__init__(threading.RLock())
        self.holds: list[float] = []
        self._since = 0.0
        plain_acquire, plain_release = self.acquire, self.release

        def acquire(*, timeout: float = -1) -> bool:
            is_had = plain_acquire(timeout=timeout)
            self._since = time.thread_time()
            return is_had

        def release() -> None:
            self.holds.append(time.thread_time() - self._since)
            plain_release()

        self.acquire, self.release = acquire, release


def holding(partitions: int) -> tuple[Cluster, Node]:
    """Return a node that holds every partition of a topic."""
    cluster = Cluster(heartbeat_interval_ms=H_MS, partitions=8)
    cluster.fill("t", [0] * partitions)
    node = cluster.node(
        "a",
        spec=ConsumerSpec(
            ConsumerConfig(topics=("t",), max_handling_ms=0, release_behind=False)
        ),
    )
    cluster.run_until(lambda: len(node.held) == partitions, CLAIM_MS_MAX, step_ms=1_000)
    cluster.run(1_000)  # all have their start positions
    return cluster, node


def scrapes(partitions: int, count: int) -> tuple[list[float], list[float], int]:
    """Return CPU times of scrapes and longest holds, in ms, and the size in bytes."""
    _, node = holding(partitions)
    registry = CollectorRegistry()
    MarshalCollector(Client(node), registry=registry)
    took_ms, held_ms, size = [], [], 0
    for _ in range(count):
        lock = Timed()
        node.engine.changed = lock
        since = time.thread_time()
        size = len(generate_latest(registry))
        took_ms.append((time.thread_time() - since) * 1_000)
        held_ms.append(max(lock.holds) * 1_000)
    return took_ms, held_ms, size


def consuming(partitions: int, records: int, *, is_scraped: bool) -> float:
    """Return records per second of CPU time, handed out and committed."""
    cluster, node = holding(partitions)
    for number in range(records):
        cluster.kafka.produce(TopicPartition("t", number % partitions), VALUE)
    is_over = threading.Event()
    registry = CollectorRegistry()
    if is_scraped:
        MarshalCollector(Client(node), registry=registry)

    def scrape() -> None:
        while not is_over.wait(EVERY_S):
            generate_latest(registry)

    scraper = threading.Thread(target=scrape, daemon=True)
    consumer = node.consumer
    assert consumer is not None
    scraper.start()
    since = time.process_time()
    left = records
    while left:
        handed = consumer.poll(0, POLL_RECORDS)
        consumer.commit()
        left -= sum(map(len, handed.values()))
    took_s = time.process_time() - since
    is_over.set()
    scraper.join(timeout=30)
    return records / took_s


def main() -> None:
    """Run the benchmark and print its document."""
    options = arguments(__doc__ or "").parse_args()
    rounds = options.rounds or (2 if options.quick else 7)
    records = 20_000 if options.quick else 1_000_000
    sizes = (10, 100) if options.quick else (10, 100, 1_000)
    found = []
    for partitions in sizes:
        took_ms, held_ms, size = scrapes(partitions, rounds * 3)
        found.append(figure(f"a scrape of {partitions} claims", "ms", took_ms))
        what = f"longest hold of the lock, {partitions} claims"
        found.append(figure(what, "ms", held_ms))
        found.append(figure(f"exposition, {partitions} claims", "bytes", [size]))
    rates = alternate(
        {
            "scraped": lambda: consuming(100, records, is_scraped=True),
            "alone": lambda: consuming(100, records, is_scraped=False),
        },
        rounds,
    )
    found += [
        figure("records handed out, scraped", "records/s", rates["scraped"]),
        figure("records handed out, not scraped", "records/s", rates["alone"]),
        figure(
            "hand-outs beside ten scrapes a second of 100 claims",
            "ratio",
            ratios(rates["scraped"], rates["alone"]),
        ),
    ]
    settings = {
        "rounds": rounds,
        "records": records,
        "partitions": 100,
        "scrape_every_s": EVERY_S,
    }
    write_document(
        document("scrape", found, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
