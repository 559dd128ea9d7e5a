"""The time that claims and grants add to a Spark micro-batch, with a sidecar or not.

The driver looks up which partitions are held, begins a range of each, and confirms it.
A task checks its claim at least once, and requests a grant of its range at most once;
tasks of a batch run in parallel, one per core. The two ways to the log take turns, with
one broker. The rest of a batch's time is that of Spark.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
from consume import fill
from support import (
    SidecarProcess,
    arguments,
    at_most,
    broker_argument,
    cluster,
    document,
    figure,
    show_figures,
    write_document,
)

from kafka_marshal import Admin, Delivery, Marshal
from kafka_marshal.admin.formatting import Format
from kafka_marshal.config import ConsumerConfig
from kafka_marshal.grants import (
    ClaimRef,
    GrantClient,
    close_grant_clients,
    open_grant_client,
)
from kafka_marshal.protocol.types import OffsetRange
from kafka_marshal.ranges import RangeConsumer
from kafka_marshal.testing.producing import create_topic

PARTITIONS = 12
H_MS = 10_000
WAIT_S = 60
ASK_MS = 30_000
STEP = 100
ADDED_MS_MAX = 20


@attrs.frozen
class Side:
    """One way to the log, with one kind of delivery.

    Attributes:
        ranges: Claimed partitions of the driver.
        client: Grant client of a task.
        group_id: The group.
        is_granted: Whether tasks request grants.
    """

    ranges: RangeConsumer
    client: GrantClient
    group_id: str
    is_granted: bool

    def batch(self, number: int) -> tuple[float, float]:
        """Play one batch; return the times of the driver and of a task, in ms."""
        first, end = number * STEP, (number + 1) * STEP
        began = time.perf_counter()
        held = self.ranges.held()
        for place, each in held.items():
            self.ranges.begin(place, each.token, first=first, end=end)
        planned = time.perf_counter()
        place, each = next(iter(held.items()))
        ref = ClaimRef(
            group_id=self.group_id,
            client_id=each.owner.client_id,
            incarnation=each.owner.incarnation,
            topic=place.topic,
            partition=place.partition,
            epoch=each.epoch,
            token=str(each.token),
            secret=each.secret,
        )
        if self.is_granted:
            granted = self.client.acquire(
                ref, OffsetRange(first, end), timeout_ms=ASK_MS
            )
            if granted is None:
                raise SystemExit(f"nothing of {first} to {end - 1} was granted")
        elif not self.client.is_current(ref, timeout_ms=ASK_MS):
            raise SystemExit(f"the claim of {place} is not current")
        asked = time.perf_counter()
        for place, each in held.items():
            self.ranges.commit(place, each.token, end=end)
        self.ranges.send()
        driver_s = planned - began + time.perf_counter() - asked
        return driver_s * 1_000, (asked - planned) * 1_000


@contextmanager
def side(
    connection: Mapping[str, str], topic: str, *, sidecar: str | None, is_granted: bool
) -> Iterator[Side]:
    """Hold every partition of the topic in a group of its own."""
    group = f"latency-{os.urandom(4).hex()}"
    with Marshal(
        connection["bootstrap_servers"],
        group_id=group,
        client_id="driver",
        coordination_topic=connection["coordination_topic"],
        state_dir="" if sidecar is None else None,
        sidecar=sidecar,
    ) as marshal:
        kind = Delivery.AT_MOST_ONCE if is_granted else Delivery.AT_LEAST_ONCE
        ranges = marshal.ranges(
            ConsumerConfig(
                topics=(topic,), delivery=kind, max_handling_ms=0, release_behind=False
            )
        )
        deadline = time.monotonic() + WAIT_S
        while len(ranges.held()) < PARTITIONS:
            if time.monotonic() > deadline:
                raise SystemExit(f"only {len(ranges.held())} partitions were won")
            ranges.wait_for_change(100)
        yield Side(
            ranges=ranges,
            client=open_grant_client(connection, sidecar=sidecar),
            group_id=group,
            is_granted=is_granted,
        )


def measure(sides: Mapping[str, Side], rounds: int) -> list[dict[str, Any]]:
    """Play batches, the sides in turns, and return the figures."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, each in sides.items():
            found = each.batch(number)
            if number:  # the first batch connects, and does not count
                took[name].append(found)
    figures = []
    for name, pairs in took.items():
        driver, task = zip(*pairs, strict=True)
        figures += [
            figure(f"the driver's part, {name}", "ms", driver),
            figure(f"a task's part, {name}", "ms", task),
            figure(
                f"added to a batch, {name}",
                "ms",
                [sum(pair) for pair in pairs],
                target=at_most(ADDED_MS_MAX) if "sidecar" in name else None,
            ),
        ]
    return figures


def main() -> None:
    """Run the benchmark and print its document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (5 if options.quick else 200)
    with ExitStack() as open_ones:
        home = Path(open_ones.enter_context(tempfile.TemporaryDirectory()))
        servers = open_ones.enter_context(cluster(options.bootstrap_servers))
        log, topic = (f"{kind}-{os.urandom(4).hex()}" for kind in ("marshal", "data"))
        with Admin(servers, coordination_topic=log) as admin:
            admin.format_topic(Format(partition_count=4, heartbeat_interval_ms=H_MS))
        create_topic(servers, topic, partitions=PARTITIONS)
        # A sidecar grants no offsets beyond the end of a partition.
        count = PARTITIONS * STEP * (rounds + 1)
        fill(servers, topic, count, partitions=PARTITIONS)
        connection = {"bootstrap_servers": servers, "coordination_topic": log}
        daemon = open_ones.enter_context(
            SidecarProcess(servers, log, home=home / "sidecar")
        )
        sides = {
            f"{what}, {way}": open_ones.enter_context(
                side(connection, topic, sidecar=url, is_granted=what == "granted")
            )
            for what in ("looked at", "granted")
            for way, url in (("by a sidecar", daemon.url), ("by the log", None))
        }
        found = measure(sides, rounds)
        close_grant_clients()
    show_figures(found)
    settings = {"rounds": rounds, "partitions": PARTITIONS, "H_ms": H_MS}
    write_document(
        document("spark_latency", found, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
