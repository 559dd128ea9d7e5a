"""How long a reset of a live group takes, beside stopping and starting its consumers.

Each side has a group of consumers on one topic, in processes of their own, which have
read it to its end. Measured is the time from the command until the last partition has
handed out its first record again:

- ``marshal groups reset`` by ``Admin``; the consumers keep running.
- Stop all consumers in order, set the offsets as ``kafka-consumer-groups
  --reset-offsets`` does, without the start of its JVM, and start all again.
"""

import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Self

from kafka import KafkaConsumer
from kafka import TopicPartition as Place
from kafka.admin import KafkaAdminClient
from kafka.structs import OffsetAndMetadata
from support import (
    HANG_S,
    alternate,
    arguments,
    at_most,
    broker_argument,
    cluster,
    document,
    figure,
    ratios,
    show_progress,
    write_document,
)

from kafka_marshal import Admin, Marshal, PositionSpec
from kafka_marshal.admin.formatting import Format
from kafka_marshal.testing.producing import Producing, create_topic

H_MS = 5_000
ALLOWANCE_MS = 5_000
POLL_MS = 100


# --- a consumer in a process of its own


def by_marshal(settings: dict[str, Any], is_over: threading.Event) -> Iterator[int]:
    """Consume by claims; yield the partition of each first record."""
    with (
        Marshal(
            settings["servers"],
            group_id=settings["group"],
            client_id=settings["client"],
            coordination_topic=settings["log"],
            state_dir="",
        ) as marshal,
        marshal.consumer(settings["topic"]) as consumer,
    ):
        while not is_over.is_set():
            for place, records in consumer.poll(POLL_MS).items():
                if records[0].offset == 0:
                    yield place.partition
            consumer.commit()


def by_group(settings: dict[str, Any], is_over: threading.Event) -> Iterator[int]:
    """Consume as a member of a consumer group; yield as ``by_marshal``."""
    consumer = KafkaConsumer(
        settings["topic"],
        bootstrap_servers=settings["servers"],
        group_id=settings["group"],
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    try:
        while not is_over.is_set():
            polled = consumer.poll(timeout_ms=POLL_MS)
            for place, records in polled.items():
                if records[0].offset == 0:
                    yield place.partition
            if polled:
                consumer.commit()
    finally:
        consumer.close(autocommit=False)


def child(settings: dict[str, Any]) -> None:
    """Consume until SIGTERM; write a line for each first record of a partition."""
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    way = by_marshal if settings["log"] else by_group
    for partition in way(settings, is_over):
        sys.stdout.write(f"{partition}\n")
        sys.stdout.flush()


class Fleet:
    """Consumers in processes of their own; notes what they read. Context manager."""

    def __init__(self, settings: dict[str, Any], *, count: int) -> None:
        self._settings = settings
        self._count = count
        self._seen: set[int] = set()
        self._changed = threading.Condition()
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start all."""
        for number in range(self._count):
            settings = {**self._settings, "client": f"consumer-{number}"}
            process = subprocess.Popen(
                [sys.executable, __file__, "--child", json.dumps(settings)],
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def stop(self) -> None:
        """End all consumers in order, and wait for that."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(HANG_S)
        self._processes.clear()

    def forget(self) -> None:
        """Forget which partitions had their first record."""
        with self._changed:
            self._seen.clear()

    def wait_for(self, partitions: int) -> None:
        """Wait until each partition has had its first record since ``forget``."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self._seen) == partitions, HANG_S)
            if not done:
                raise SystemExit(f"{len(self._seen)} of {partitions} partitions read")

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._changed:
                self._seen.add(int(line))
                self._changed.notify_all()

    def __enter__(self) -> Self:
        """Start all."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all."""
        self.stop()


# --- the two sides


class Sides:
    """Both groups, at the end of one topic."""

    def __init__(
        self,
        admin: Admin,
        servers: str,
        *,
        topic: str,
        partitions: int,
        fleets: dict[str, Fleet],
    ) -> None:
        self._admin = admin
        self._topic = topic
        self._servers = servers
        self._partitions = partitions
        self._fleets = fleets

    def marshal(self) -> float:
        """Reset the live group; return the milliseconds until all continue."""
        fleet = self._fleets["marshal"]
        fleet.forget()
        start = time.perf_counter()
        plan = self._admin.plan_reset(GROUPS["marshal"], PositionSpec.earliest())
        result = self._admin.execute(plan)
        if result.outcome != "committed":
            raise SystemExit(f"the reset was {result.outcome}")
        fleet.wait_for(self._partitions)
        return (time.perf_counter() - start) * 1_000

    def restart(self) -> float:
        """Stop, reset and start the consumer group; return the same."""
        fleet = self._fleets["group"]
        fleet.forget()
        start = time.perf_counter()
        fleet.stop()
        starts = {
            Place(self._topic, number): OffsetAndMetadata(0, "", -1)
            for number in range(self._partitions)
        }
        with closing(KafkaAdminClient(bootstrap_servers=self._servers)) as kafka:
            kafka.alter_group_offsets(GROUPS["group"], starts)
        fleet.start()
        fleet.wait_for(self._partitions)
        return (time.perf_counter() - start) * 1_000


GROUPS = {"marshal": f"marshal-{uuid.uuid4().hex[:8]}", "group": uuid.uuid4().hex[:8]}


@contextmanager
def sides(servers: str, *, partitions: int, consumers: int) -> Iterator[Sides]:
    """Yield both groups, running, with all records read."""
    topic, log = (f"{stem}-{uuid.uuid4().hex[:8]}" for stem in ("data", "marshal"))
    create_topic(servers, topic, partitions=partitions)
    with Producing(servers, topic, partitions=partitions) as producing:
        producing.fill(partitions, timeout_ms=HANG_S * 1_000)
    with Admin(servers, coordination_topic=log) as admin:
        admin.format_topic(Format(heartbeat_interval_ms=H_MS))
        shared = {"servers": servers, "topic": topic}
        fleets = {
            name: Fleet(
                {**shared, "group": group, "log": log if name == "marshal" else ""},
                count=consumers,
            )
            for name, group in GROUPS.items()
        }
        with fleets["marshal"], fleets["group"]:
            for fleet in fleets.values():
                fleet.wait_for(partitions)
            yield Sides(
                admin, servers, topic=topic, partitions=partitions, fleets=fleets
            )


def main() -> None:
    """Run the benchmark and print its document."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    partitions, consumers = (20, 2) if options.quick else (1_000, 4)
    with cluster(options.bootstrap_servers) as servers:
        show_progress(f"{partitions} partitions, {consumers} consumers ...")
        with sides(servers, partitions=partitions, consumers=consumers) as both:
            took = alternate({"marshal": both.marshal, "restart": both.restart}, rounds)
    ours, restart = took["marshal"], took["restart"]
    count = f"{partitions:,} partitions"
    figures = [
        figure(
            f"reset of a live group, {count}, H = {H_MS // 1_000} s",
            "ms",
            ours,
            target=at_most(H_MS + ALLOWANCE_MS),
        ),
        figure(f"stop, reset offsets, start: {count}", "ms", restart),
        figure(
            "reset of a live group, beside a restart", "ratio", ratios(ours, restart)
        ),
    ]
    settings = {
        "rounds": rounds,
        "partitions": partitions,
        "consumers": consumers,
        "heartbeat_interval_ms": H_MS,
    }
    write_document(
        document("reset", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
