"""How long it takes to get the first record of a partition, beside consumer groups.

Warm: a running process with open connections; from the call to the first record handed
out. ``Marshal.consumer`` and ``Marshal.claim`` of a partition that was never claimed
are compared with a kafka-python ``KafkaConsumer`` and a confluent-kafka consumer under
KIP-848, which each join a group of their own. The broker has default settings: a new
classic group waits for ``group.initial.rebalance.delay.ms``, 3 s.

Opening: a running process that has imported everything, without connections; from the
constructor to the first record. The coordination log has some thousand entries.

Cold: from the constructor to the first record in a new process, on an almost empty log;
imports are not counted. Opening and cold are compared with groups on a broker with a
rebalance delay of 0.
"""

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from itertools import count

from audit import write
from confluent_kafka import Consumer as ConfluentConsumer
from confluent_kafka.admin import AdminClient, ConfigResource
from kafka import KafkaConsumer
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

from kafka_marshal import Admin, Marshal
from kafka_marshal.admin.formatting import Format
from kafka_marshal.testing.producing import Producing, create_topic

GROUP_DELAY = "group.initial.rebalance.delay.ms"
GROUP_DELAY_DEFAULT_MS = "3000"
H_MS = (2_000, 60_000)
CHILD_TIMEOUT_S = 120
POLL_MS = 100
RECORDS = 10
# Entries of the log that an opening reads, and its number of partitions.
ENTRIES, COORDINATING = 4_000, 8
OPENING_MAX_MS = 80

_run = uuid.uuid4().hex[:8]
_numbers = count(1)


def unique(stem: str) -> str:
    """Return a name that is unique on the cluster."""
    return f"{stem}-{_run}-{next(_numbers)}"


def milliseconds_until(poll: Callable[[], bool], start: float) -> float:
    """Poll until a record arrives; return the time since ``start``."""
    wait_until(poll, "a record", start)
    return (time.perf_counter() - start) * 1_000


def wait_until(
    condition: Callable[[], bool], what: str, start: float | None = None
) -> None:
    """Wait until a condition is true, at most ``HANG_S`` from ``start`` or now."""
    late = (time.perf_counter() if start is None else start) + HANG_S
    while not condition():
        if time.perf_counter() > late:
            raise SystemExit(f"not within {HANG_S} s: {what}")


# --- the ways to the first record; each takes what stands already, if anything does


def by_marshal(marshal: Marshal, topic: str, start: float) -> float:
    """Consume a topic by claims; return the time to its first record."""
    with marshal.consumer(topic) as consumer:
        return milliseconds_until(lambda: bool(consumer.poll(POLL_MS)), start)


def by_claim(marshal: Marshal, topic: str, start: float) -> float:
    """Claim a partition without consuming it; return the time until it is held."""
    with marshal.claim(topic, 0):
        return (time.perf_counter() - start) * 1_000


def by_kafka_python(consumer: KafkaConsumer, topic: str, start: float) -> float:
    """Join a group with kafka-python; return the time to the first record."""
    # Load metadata first: a group leader without it assigns nothing, and stays so.
    wait_until(lambda: bool(consumer.partitions_for_topic(topic)), topic, start)
    consumer.subscribe([topic])
    took_ms = milliseconds_until(lambda: bool(consumer.poll(timeout_ms=POLL_MS)), start)
    consumer.close(autocommit=False)
    return took_ms


def by_confluent(consumer: ConfluentConsumer, topic: str, start: float) -> float:
    """Join a group with confluent-kafka; return the time to the first record."""
    consumer.subscribe([topic])

    def poll() -> bool:
        message = consumer.poll(POLL_MS / 1_000)
        return message is not None and message.error() is None

    took_ms = milliseconds_until(poll, start)
    consumer.close()
    return took_ms


def kafka_python_consumer(servers: str, group: str) -> KafkaConsumer:
    """Return a kafka-python consumer of a group, with default settings."""
    return KafkaConsumer(
        bootstrap_servers=servers, group_id=group, auto_offset_reset="earliest"
    )


def confluent_consumer(servers: str, group: str) -> ConfluentConsumer:
    """Return a confluent-kafka consumer under KIP-848, with default settings."""
    return ConfluentConsumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
        }
    )


# --- warm


class Warm:
    """One process with open connections."""

    def __init__(self, servers: str, marshals: dict[int, Marshal]) -> None:
        self._servers = servers
        self._marshals = marshals

    def topic(self) -> str:
        """Return a new topic of one partition with some records."""
        name = unique("data")
        create_topic(self._servers, name, partitions=1)
        with Producing(self._servers, name, partitions=1) as producing:
            producing.fill(RECORDS)
        return name

    def marshal(self, h_ms: int) -> float:
        """Time a consumer by claims."""
        topic = self.topic()
        return by_marshal(self._marshals[h_ms], topic, time.perf_counter())

    def claim(self, h_ms: int) -> float:
        """Time a claim without consumption."""
        topic = self.topic()
        return by_claim(self._marshals[h_ms], topic, time.perf_counter())

    def kafka_python(self) -> float:
        """Time a classic group, with a connected consumer."""
        topic = self.topic()
        consumer = kafka_python_consumer(self._servers, unique("group"))
        # Load metadata first: a group leader without it assigns nothing.
        wait_until(lambda: bool(consumer.partitions_for_topic(topic)), topic)
        return by_kafka_python(consumer, topic, time.perf_counter())

    def confluent(self) -> float:
        """Time a group under KIP-848, with a connected consumer."""
        topic = self.topic()
        consumer = confluent_consumer(self._servers, unique("group"))
        wait_until(lambda: topic in consumer.list_topics(timeout=HANG_S).topics, topic)
        return by_confluent(consumer, topic, time.perf_counter())

    def sides(self) -> dict[str, Callable[[], float]]:
        """Return the sides by name."""
        ours = {f"consumer {h}": partial(self.marshal, h) for h in H_MS}
        claims = {f"claim {h}": partial(self.claim, h) for h in H_MS}
        groups = {"kafka-python": self.kafka_python, "KIP-848": self.confluent}
        return {**ours, **claims, **groups}


def measure_warm(servers: str, logs: dict[int, str], rounds: int) -> list[dict]:
    """Return the figures of a warm process."""
    marshals = {
        h_ms: Marshal(
            servers,
            group_id=unique("group"),
            client_id="claimant",
            coordination_topic=log,
            state_dir="",
        )
        for h_ms, log in logs.items()
    }
    try:
        warm = Warm(servers, marshals)
        for side in warm.sides().values():  # opens connections
            side()
        took = alternate(warm.sides(), rounds)
    finally:
        for marshal in marshals.values():
            marshal.close()
    classic, kip848 = took["kafka-python"], took["KIP-848"]
    figures = []
    for h_ms in H_MS:
        h = f"H = {h_ms // 1_000} s"
        ours = took[f"consumer {h_ms}"]
        name = f"first record by a claim, warm, {h}"
        beside = f"{name}, beside a classic group"
        share = ratios(ours, classic)
        figures += [
            figure(name, "ms", ours),
            figure(beside, "ratio", share, target=at_most(0.1)),
            figure(f"{name}, beside KIP-848", "ratio", ratios(ours, kip848)),
            figure(f"claim alone, warm, {h}", "ms", took[f"claim {h_ms}"]),
        ]
    return [
        *figures,
        figure("first record by a classic group, kafka-python, warm", "ms", classic),
        figure("first record by KIP-848, confluent-kafka, warm", "ms", kip848),
    ]


# --- opening and cold


def cold_child(way: str, servers: str, topic: str, log: str) -> float:
    """Return the time from a constructor to the first record, in this process."""
    group = unique("group")
    start = time.perf_counter()
    if way == "marshal":
        with Marshal(
            servers,
            group_id=group,
            client_id="claimant",
            coordination_topic=log,
            state_dir="",
        ) as marshal:
            return by_marshal(marshal, topic, start)
    if way == "kafka-python":
        return by_kafka_python(kafka_python_consumer(servers, group), topic, start)
    return by_confluent(confluent_consumer(servers, group), topic, start)


def cold(way: str, servers: str, topic: str, log: str) -> float:
    """Run ``cold_child`` in a new process."""
    command = [sys.executable, __file__, "--child", way, servers, topic, log]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
    return float(json.loads(done.stdout))


def measure_cold(servers: str, logs: dict[int, str], rounds: int) -> list[dict]:
    """Return the figures of new processes."""
    topic = Warm(servers, {}).topic()
    ways = {h: partial(cold, "marshal", servers, topic, log) for h, log in logs.items()}
    names = {f"marshal {h_ms}": way for h_ms, way in ways.items()}
    for group in ("kafka-python", "KIP-848"):
        names[group] = partial(cold, group, servers, topic, "none")
    took = alternate(names, rounds)
    group = took["kafka-python"]
    figures = []
    for h_ms in logs:
        ours = took[f"marshal {h_ms}"]
        name = f"first record, cold, H = {h_ms // 1_000} s"
        beside = f"{name}, beside a group with rebalance delay 0"
        figures += [
            figure(name, "ms", ours),
            figure(beside, "ratio", ratios(ours, group)),
        ]
    return [
        *figures,
        figure("first record by a classic group, rebalance delay 0, cold", "ms", group),
        figure("first record by KIP-848, cold", "ms", took["KIP-848"]),
    ]


def measure_opening(servers: str, rounds: int) -> list[dict]:
    """Return the figures of opening, in a process that has imported everything."""
    topic, log = unique("data"), unique("marshal")
    create_topic(servers, topic, partitions=COORDINATING)
    with Producing(servers, topic, partitions=COORDINATING) as producing:
        producing.fill(RECORDS * COORDINATING)
    write(servers, log, records=ENTRIES, count=COORDINATING, h_ms=H_MS[-1])
    ways = ("marshal", "kafka-python", "KIP-848")
    sides = {way: partial(cold_child, way, servers, topic, log) for way in ways}
    for side in sides.values():  # imports
        side()
    took = alternate(sides, rounds)
    ours, classic, kip848 = (took[way] for way in ways)
    name = f"first record, opening, log of {ENTRIES} entries"
    return [
        figure(name, "ms", ours, target=at_most(OPENING_MAX_MS)),
        figure(f"{name}, beside a classic group", "ratio", ratios(ours, classic)),
        figure(f"{name}, beside KIP-848", "ratio", ratios(ours, kip848)),
        figure("first record by a classic group, opening", "ms", classic),
        figure("first record by KIP-848, opening", "ms", kip848),
    ]


def group_delay_ms(servers: str) -> int:
    """Return the rebalance delay in the configuration of the brokers."""
    admin = AdminClient({"bootstrap.servers": servers})
    node = next(iter(admin.list_topics(timeout=HANG_S).brokers))
    resource = ConfigResource(ConfigResource.Type.BROKER, str(node))
    configs = admin.describe_configs([resource])[resource].result(timeout=HANG_S)
    return int(configs[GROUP_DELAY].value)


def formatted(servers: str) -> dict[int, str]:
    """Format a coordination topic for each heartbeat interval."""
    logs = {}
    for h_ms in H_MS:
        logs[h_ms] = unique("marshal")
        with Admin(servers, coordination_topic=logs[h_ms]) as admin:
            admin.format_topic(Format(heartbeat_interval_ms=h_ms))
    return logs


def main() -> None:
    """Run the benchmark and print its document."""
    if sys.argv[1:2] == ["--child"]:
        way, servers, topic, log = sys.argv[2:6]
        print(json.dumps(cold_child(way, servers, topic, log)))
        return
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 9)
    delays = {}
    with cluster(
        options.bootstrap_servers, {GROUP_DELAY: GROUP_DELAY_DEFAULT_MS}
    ) as servers:
        show_progress("warm ...")
        delays["warm"] = group_delay_ms(servers)
        figures = measure_warm(servers, formatted(servers), rounds)
    with cluster(options.bootstrap_servers, {GROUP_DELAY: "0"}) as servers:
        delays["opening"] = delays["cold"] = group_delay_ms(servers)
        show_progress("opening ...")
        figures += measure_opening(servers, rounds)
        show_progress("cold ...")
        figures += measure_cold(servers, formatted(servers), rounds)
    settings = {"rounds": rounds, "records": RECORDS, "entries": ENTRIES}
    settings[GROUP_DELAY] = delays
    write_document(
        document("claim_latency", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
