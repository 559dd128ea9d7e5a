"""How fast both transports read the coordination log, and append to it.

One broker, and one partition of the log with full Heartbeats. Each transport in turn
reads it from its start, once only polling, and once folding as well, as a client does
when it opens. A read is measured by the CPU time of all threads, from the first poll
with entries to the last entry: connecting does not count, and other processes have
little influence. An append is measured from the call until a poll returns the entry, by
elapsed time.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fold import K, T, heartbeats
from support import (
    alternate,
    arguments,
    broker_argument,
    cluster,
    document,
    figure,
    ratios,
    show_figures,
    write_document,
)

from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topics import KafkaTopicAdmin
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState

TRANSPORTS = ("fast", "kafka-python")
POLL_MS = 1_000
GIVE_UP_S = 120.0
CLOSE_MS = 5_000
UNDER_WAY_MAX = 1_000


def filled(servers: str, records: int) -> str:
    """Make a coordination topic; fill one partition with claims and Heartbeats."""
    topic = f"coordination-{time.time_ns()}"
    settings = ConnectionConfig(servers, coordination_topic=topic, transport="fast")
    with KafkaTopicAdmin(settings) as admin:
        admin.create_coordination_topic(partitions=K)
    claims, beats = heartbeats(records)
    log = open_coordination_log(settings)
    deadline = time.monotonic() + GIVE_UP_S
    under_way = []
    for entry in (*claims, *beats):
        assert entry.value is not None
        under_way.append(log.append(T, entry.value))
        while len(under_way) >= UNDER_WAY_MAX and not under_way[0].is_done():
            _require_before(deadline)
            time.sleep(0.001)
        del under_way[:-UNDER_WAY_MAX]
    log.close(CLOSE_MS)
    return topic


def read_rate(settings: ConnectionConfig, records: int, *, is_folded: bool) -> float:
    """Read a log to its end; return the entries per second of CPU time.

    The first poll waits for connections, so it does not count, unless it returns all.
    """
    opened = time.process_time()
    log = open_coordination_log(settings, heartbeat_interval_ms=None)
    world = WorldState(T)
    deadline = time.monotonic() + GIVE_UP_S
    taken, uncounted, began = 0, 0, 0.0
    try:
        while taken < records:
            entries = log.poll(POLL_MS)
            if is_folded:
                for _, entry in entries:
                    apply(world, entry)
            taken += len(entries)
            if entries and not uncounted:
                uncounted, began = taken, time.process_time()
            _require_before(deadline)
        if uncounted == taken:
            return taken / (time.process_time() - opened)
        return (taken - uncounted) / (time.process_time() - began)
    finally:
        log.close(CLOSE_MS)


def _require_before(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the log was not read in time")


def round_trips(settings: ConnectionConfig, count: int) -> list[float]:
    """Append records one by one; return the milliseconds until each entry is read."""
    log = open_coordination_log(settings)
    taken: list[float] = []
    deadline = time.monotonic() + GIVE_UP_S
    try:
        for number in range(count + 1):
            value = b"%d" % number
            began = time.monotonic()
            log.append(0, value)
            while not any(each.value == value for _, each in log.poll(POLL_MS)):
                _require_before(deadline)
            taken.append((time.monotonic() - began) * 1000)
        return taken[1:]  # the first append waits for connections
    finally:
        log.close(CLOSE_MS)


def measured(
    servers: str, *, records: int, appends: int, rounds: int
) -> list[Mapping[str, Any]]:
    """Return the figures of both transports."""
    topic = filled(servers, records)
    settings = {
        name: ConnectionConfig(servers, coordination_topic=topic, transport=name)
        for name in TRANSPORTS
    }
    figures: list[Mapping[str, Any]] = []
    for what, is_folded in (("polled", False), ("polled and folded", True)):
        sides: dict[str, Callable[[], float]] = {
            name: partial(read_rate, each, records, is_folded=is_folded)
            for name, each in settings.items()
        }
        rates = alternate(sides, rounds)
        both = ratios(*rates.values())
        figures.append(figure(f"{what}: fast beside kafka-python", "ratio", both))
        for name, samples in rates.items():
            figures.append(figure(f"{what}: {name}", "records/CPU s", samples))
    tails: dict[str, list[float]] = {name: [] for name in settings}

    def trips(name: str) -> float:
        taken = round_trips(fresh[name], appends)
        tails[name].append(statistics.quantiles(taken, n=100)[98])
        return statistics.median(taken)

    fresh = {
        name: ConnectionConfig(
            servers, coordination_topic=filled(servers, 1), transport=name
        )
        for name in TRANSPORTS
    }
    medians = alternate({name: partial(trips, name) for name in fresh}, rounds)
    for name in fresh:
        title = f"append and read back: {name}"
        figures.append(figure(f"{title}, median", "ms", medians[name]))
        figures.append(figure(f"{title}, 99th percentile", "ms", tails[name]))
    show_figures(figures)
    return figures


def main() -> None:
    """Run it all and print one document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 9)
    load = {
        "records": 20_000 if options.quick else 200_000,
        "appends": 30 if options.quick else 200,
        "rounds": rounds,
    }
    with cluster(options.bootstrap_servers) as servers:
        figures = measured(servers, **load)
    made = document("coordination", figures, settings=load, is_quick=options.quick)
    write_document(made, options.out)


if __name__ == "__main__":
    main()
