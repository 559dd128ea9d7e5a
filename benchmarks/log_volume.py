"""How much a held partition writes to the coordination log in an hour.

One client holds partitions, with the production engine, over a cluster in memory and
in virtual time. Once nothing changes any more, the encoded size of each heartbeat and
announcement is counted. Kafka's overhead per record is measured on a real broker, by
the size of its log: records are appended one by one, like heartbeats of different
coordinating partitions. Measured with BatchHeartbeat, as in the product, and for
comparison with a full Heartbeat for each partition.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
from kafka.admin import KafkaAdminClient
from support import (
    arguments,
    broker_argument,
    cluster,
    document,
    figure,
    show_progress,
    write_document,
)

from kafka_marshal import Admin
from kafka_marshal.admin.formatting import Format
from kafka_marshal.config import ConsumerConfig
from kafka_marshal.engine import Holding
from kafka_marshal.engine.heartbeats import Heartbeater
from kafka_marshal.kafka_io.coordination import KafkaCoordinationLog
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.protocol.codec import decode, encode
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.records import Heartbeat, Member
from simulator.node import Cluster, ConsumerSpec

K = 8
HOUR_MS = 3_600_000
H_MS = (5_000, 60_000)
HELD = (1, 10, 100)
STEP_MS = 250
# Heartbeat intervals that are counted: some 180 heartbeats and announcements; fewer in
# a smoke run.
WINDOW_H, WINDOW_H_QUICK = 60, 6
POSITION = 5_000_000_000
TOPIC = "eu-west-1.payments.transactions"
GROUP = "payments-enrichment"
APPENDS = 200
LIMIT_MS = 30_000


@attrs.frozen
class Volume:
    """The records that one client writes in an hour.

    Attributes:
        held: Partitions that the client holds.
        heartbeat_interval_ms: The heartbeat interval.
        is_batched: Whether heartbeats in a coordinating partition are batched.
        beat_records: Number of records with heartbeats.
        beat_bytes: Size of their encoded values.
        member_records: Number of announcements.
        member_bytes: Size of their encoded values.
    """

    held: int
    heartbeat_interval_ms: int
    is_batched: bool
    beat_records: float
    beat_bytes: float
    member_records: float
    member_bytes: float

    @property
    def records_each(self) -> float:
        """Records per held partition and hour."""
        return (self.beat_records + self.member_records) / self.held

    def bytes_each(self, overhead: float) -> float:
        """Bytes of log per held partition and hour, with Kafka's overhead."""
        values = self.beat_bytes + self.member_bytes
        return values / self.held + self.records_each * overhead


@contextmanager
def beats_one_by_one(*, is_batched: bool) -> Iterator[None]:
    """Unless ``is_batched``, send a Heartbeat for each partition in the block."""
    product = Heartbeater._send  # noqa: SLF001 - replaced for the comparison

    def send(beater: Heartbeater, partition: int, held: list[Holding]) -> list[int]:
        one = beater._send_one  # noqa: SLF001 - the same
        return [one(partition, each, each.position) for each in held]

    try:
        if not is_batched:
            Heartbeater._send = send  # noqa: SLF001
        yield
    finally:
        Heartbeater._send = product  # noqa: SLF001


def hour(
    held: int, heartbeat_interval_ms: int, *, window_h: int, is_batched: bool
) -> Volume:
    """Hold partitions for ``window_h`` intervals, and return the volume of an hour."""
    cluster = Cluster(heartbeat_interval_ms=heartbeat_interval_ms, partitions=K)
    cluster.kafka.create_topic(TOPIC, held)
    with beats_one_by_one(is_batched=is_batched):
        node = cluster.node(
            "worker-0001",
            group_id=GROUP,
            spec=ConsumerSpec(
                ConsumerConfig(topics=(TOPIC,), max_handling_ms=0, release_behind=False)
            ),
        )
        limit_ms = 4 * heartbeat_interval_ms
        holdings = node.session.holdings

        def started() -> list[AtLeastOnce]:
            progress = (each.progress for each in holdings.values())
            return [each for each in progress if isinstance(each, AtLeastOnce)]

        cluster.run_until(lambda: len(started()) == held, limit_ms, step_ms=STEP_MS)
        for progress in started():
            progress.position = POSITION
        cluster.run(heartbeat_interval_ms, step_ms=STEP_MS)
        since_ms = cluster.clock.wall_ms()
        window_ms = window_h * heartbeat_interval_ms
        cluster.run(window_ms, step_ms=STEP_MS)
    assert len(node.held) == held
    beats, members = [], []
    for partition in range(K):
        for stored in cluster.kafka.log(cluster.place(partition)).records:
            if stored.timestamp_ms > since_ms:
                is_member = isinstance(decode(stored.value), Member)
                (members if is_member else beats).append(len(stored.value or b""))
    counted = (len(beats), sum(beats), len(members), sum(members))
    of_an_hour = [each * HOUR_MS / window_ms for each in counted]
    return Volume(held, heartbeat_interval_ms, is_batched, *of_an_hour)


def overhead_bytes(servers: str) -> float:
    """Return the bytes of a record in Kafka's log in addition to its value."""
    topic = f"marshal-volume-{time.time_ns()}"
    with Admin(servers, coordination_topic=topic) as admin:
        admin.format_topic(Format(partition_count=1))
    settings = ConnectionConfig(servers, coordination_topic=topic)
    value = encode(
        Heartbeat(
            client_id="worker-0001",
            group_id=GROUP,
            incarnation=bytes(16),
            seq=1,
            topic=TOPIC,
            partition=0,
            epoch=1,
            position=POSITION,
            rewind=True,
        )
    )
    before = _log_size(servers, topic)
    log = KafkaCoordinationLog(settings, heartbeat_interval_ms=LIMIT_MS)
    try:
        for _ in range(APPENDS):
            append = log.append(0, value)
            deadline = time.monotonic() + LIMIT_MS / 1_000
            while not append.is_done():
                if time.monotonic() > deadline:
                    raise SystemExit("the broker does not acknowledge")
                time.sleep(0.001)
    finally:
        log.close(LIMIT_MS)
    return (_log_size(servers, topic) - before) / APPENDS - len(value)


def _log_size(servers: str, topic: str) -> int:
    admin = KafkaAdminClient(bootstrap_servers=servers)
    try:
        answer = admin.describe_log_dirs({topic: [0]})
    finally:
        admin.close()
    return sum(
        partition["partition_size"]
        for broker in answer
        for log_dir in broker["log_dirs"]
        for found in log_dir["topics"]
        if found["name"] == topic
        for partition in found["partitions"]
    )


def main() -> None:
    """Run the benchmark and print its document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    with cluster(options.bootstrap_servers) as servers:
        overhead = overhead_bytes(servers)
    show_progress(f"Kafka adds {overhead:.1f} bytes to a record")
    figures = [figure("what Kafka adds to a record", "bytes", [overhead])]
    volumes = []
    window_h = WINDOW_H_QUICK if options.quick else WINDOW_H
    for h_ms in H_MS:
        for held in HELD[:2] if options.quick else HELD:
            for is_batched in (True, False):
                volume = hour(held, h_ms, window_h=window_h, is_batched=is_batched)
                how = "batched" if is_batched else "one by one"
                name = f"H = {h_ms // 1_000} s, {held} held, {how}"
                records = [volume.records_each]
                taken = [volume.bytes_each(overhead) / 1_024]
                figures.append(figure(name, "records/partition/h", records))
                figures.append(figure(name, "KiB/partition/h", taken))
                volumes.append(attrs.asdict(volume))
                show_progress(f"{name}: {records[0]:.0f} records, {taken[0]:.0f} KiB")
    settings = {"coordinating_partitions": K, "window_in_h": window_h}
    write_document(
        document(
            "log_volume",
            figures,
            settings=settings,
            is_quick=options.quick,
            more={"volumes": volumes},
        ),
        options.out,
    )


if __name__ == "__main__":
    main()
