"""How fast the log is audited on Spark, on one core and on two.

The log is written through the product's codec to a real broker: Configs, the claims of
a fleet, then full Heartbeats in turn, spread evenly over the coordinating partitions.
It is audited in turns with ``local[1]`` and ``local[2]``, each in a process of its own,
because a JVM has only one Spark. The time is that of ``audit()`` as a whole, with
planning, tables and publishing, but without the start of Spark. After each audit its
digests are compared with those of the live system.

``--floor`` also times the smallest possible audit, of the same partitions with a few
records. It shows the cost of planning and writing tables, which the length of the log
does not change.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from support import (
    alternate,
    arguments,
    at_least,
    broker_argument,
    cluster,
    document,
    figure,
    ratios,
    run_again,
    show_progress,
    write_document,
)

from kafka_marshal import Admin, World
from kafka_marshal.admin.formatting import Format
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import coordinating_partition
from kafka_marshal.protocol.records import ClaimingPartition, Heartbeat
from kafka_marshal.protocol.snapshot import digest

H_MS = 600_000
CLIENTS = 10
KEYS_PER_T = 50
GROUP = "payments-enrichment"
TOPIC = "eu-west-1.payments.transactions"
TIMEOUT_S = 3_600
BROKER = {
    # Segments of 256 MiB; the whole log fits into the page cache.
    "log.segment.bytes": "268435456",
}


def incarnation(client: int) -> bytes:
    """Return sixteen bytes that look random."""
    return blake2b(b"%d" % client, digest_size=16).digest()


def partitions_by_t(count: int, *, each: int) -> dict[int, list[int]]:
    """Return ``each`` data partitions for every coordinating partition."""
    found: dict[int, list[int]] = {t: [] for t in range(count)}
    number = 0
    while any(len(mine) < each for mine in found.values()):
        mine = found[coordinating_partition(TOPIC, number, partition_count=count)]
        if len(mine) < each:
            mine.append(number)
        number += 1
    return found


def beats(data: list[int], first_epoch: int) -> Iterator[bytes]:
    """Yield Heartbeats for the keys of one coordinating partition, without end."""
    seq = 0
    while True:
        for at, partition in enumerate(data):
            client = at % CLIENTS
            record = Heartbeat(
                client_id=f"worker-{client:04}",
                group_id=GROUP,
                incarnation=incarnation(client),
                seq=seq,
                topic=TOPIC,
                partition=partition,
                epoch=first_epoch + at,
                position=50_000_000 + seq,
                rewind=False,
            )
            yield encode(record)
            seq += 1


def claims(data: list[int]) -> Iterator[bytes]:
    """Yield claims for the keys of one coordinating partition."""
    for at, partition in enumerate(data):
        client = at % CLIENTS
        record = ClaimingPartition(
            client_id=f"worker-{client:04}",
            group_id=GROUP,
            incarnation=incarnation(client),
            seq=at,
            generation=1,
            topic=TOPIC,
            partition=partition,
            topic_id=bytes(16),
            resume_hash=bytes(32),
            expected_epoch=None,
            resume=None,
        )
        yield encode(record)


def write(
    servers: str,
    topic: str,
    *,
    records: int,
    count: int,
    each: int = KEYS_PER_T,
    h_ms: int = H_MS,
) -> None:
    """Format a coordination topic and fill it."""
    from confluent_kafka import Producer

    with Admin(servers, coordination_topic=topic) as admin:
        admin.format_topic(Format(partition_count=count, heartbeat_interval_ms=h_ms))
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "linger.ms": 20,
            "batch.num.messages": 20_000,
            "queue.buffering.max.messages": 200_000,
        }
    )
    for t, data in partitions_by_t(count, each=each).items():
        # The Config has offset 0, so the claims have the epochs from 1 on.
        ours = beats(data, 1)
        for value in claims(data):
            producer.produce(topic, value, partition=t)
        for value in islice(ours, records // count - each):
            while True:
                try:
                    producer.produce(topic, value, partition=t)
                    break
                except BufferError:
                    producer.poll(0.1)
        producer.flush(TIMEOUT_S)
        show_progress(f"coordinating partition {t} is written")


def run_one(options: argparse.Namespace) -> None:
    """Audit once in this process, and print the time; runs in a child process."""
    from kafka_marshal.spark.audit import Source, audit, spark_session

    source = Source(
        bootstrap_servers=options.bootstrap_servers,
        coordination_topic=options.topic,
        timeout_ms=120_000,
    )
    with (
        tempfile.TemporaryDirectory() as home,
        spark_session(f"local[{options.cores}]") as spark,
    ):
        # Let workers start and import before, as in a session in use.
        spark.range(options.cores, numPartitions=options.cores).mapInArrow(
            _warm, "id bigint"
        ).collect()
        start = time.monotonic()
        found = audit(spark, f"{home}/out", source=source)
        took_s = time.monotonic() - start
        rows = found.partitions()
        result = {
            "took_s": took_s,
            "digests": [row["digest"] for row in rows],
            "entries": sum(row["entries_count"] for row in rows),
            "findings": len(found.check()) if options.check else None,
        }
    print(json.dumps(result))


def _warm(batches: Iterator[Any]) -> Iterator[Any]:
    from kafka_marshal.spark.audit import folding

    assert folding.VERSION
    yield from batches


class Side:
    """One side of the comparison, with its number of cores."""

    def __init__(self, servers: str, topic: str, *, cores: int, check: bool) -> None:
        """Remember what to run."""
        self.command = [
            *(sys.executable, str(Path(__file__).resolve())),
            *("--cores", str(cores), "--topic", topic, "--bootstrap-servers", servers),
            *(["--check"] if check else []),
        ]
        self.result: dict[str, Any] = {}

    def __call__(self) -> float:
        """Audit once; return the seconds."""
        self.result = run_again(self.command, timeout_s=TIMEOUT_S)
        show_progress(f"{self.command[3]} cores: {self.result['took_s']:.1f} s")
        return float(self.result["took_s"])


def measure(
    servers: str, options: argparse.Namespace, *, records: int, rounds: int
) -> dict[str, Any]:
    """Write the log, audit it in turns, and return the document."""
    topic = f"marshal-audit-{time.time_ns()}"
    write(servers, topic, records=records, count=options.partitions)
    live = World.open(servers, coordination_topic=topic, timeout_ms=TIMEOUT_S * 1000)
    expected = [digest(world) for world in live.partitions]
    entries = sum(world.next_offset for world in live.partitions)
    sides = {
        cores: Side(servers, topic, cores=cores, check=options.check)
        for cores in (1, 2)
    }
    took = alternate({str(cores): side for cores, side in sides.items()}, rounds)
    for side in sides.values():
        assert side.result["digests"] == expected, "the digests differ"
        assert side.result["entries"] == entries, "records are missing"
    figures = [
        figure(
            f"audit, local[{cores}]", "records/s", [entries / s for s in took[cores]]
        )
        for cores in ("1", "2")
    ]
    figures.append(
        figure(
            "two cores beside one",
            "ratio",
            ratios(took["1"], took["2"]),
            target=at_least(1.7),
        )
    )
    figures += [
        figure(f"audit, local[{cores}]", "s", took[cores]) for cores in ("1", "2")
    ]
    if options.floor:
        figures.append(floor(servers, options, rounds=rounds))
    settings = {
        "records": entries,
        "coordinating_partitions": options.partitions,
        "keys": KEYS_PER_T * options.partitions,
        "rounds": rounds,
    }
    more = {"digests_equal": True, "findings": sides[2].result["findings"]}
    return document(
        "audit", figures, settings=settings, is_quick=options.quick, more=more
    )


def floor(servers: str, options: argparse.Namespace, *, rounds: int) -> dict[str, Any]:
    """Time the audit of an almost empty log."""
    topic = f"marshal-floor-{time.time_ns()}"
    least = 2 * KEYS_PER_T * options.partitions
    write(servers, topic, records=least, count=options.partitions)
    side = Side(servers, topic, cores=2, check=False)
    found = [side() for _ in range(rounds)]
    return figure(f"audit of {least} records, local[2]", "s", found)


def main() -> None:
    """Run the benchmark and print its document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    parser.add_argument("--records", type=int, help="length of the log")
    parser.add_argument("--partitions", type=int, default=8, help="K")
    parser.add_argument(
        "--check", action="store_true", help="check invariants, untimed"
    )
    parser.add_argument("--floor", action="store_true", help="also time a tiny log")
    parser.add_argument("--cores", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--topic", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cores is not None:
        run_one(options)
        return
    records = options.records or (8_000 if options.quick else 10_000_000)
    rounds = options.rounds or (1 if options.quick else 2)
    with cluster(options.bootstrap_servers, BROKER) as servers:
        found = measure(servers, options, records=records, rounds=rounds)
    write_document(found, options.out)


if __name__ == "__main__":
    main()
