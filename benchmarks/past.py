"""How soon a moment of the past is shown, on a long log with checkpoints.

The log is written through the product's codec to a real broker: Configs, the claims of
a fleet, then full Heartbeats in turn. Each coordinating partition gets a checkpoint
every 50,000 entries, as from members; the partitions take turns. Then random moments
are shown, by time and by offset, of all partitions and of a single key: by the library
in this process, with connecting, and by the command in a process of its own. States at
known offsets are compared with the states in a fold of the whole log.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from itertools import islice
from typing import Any

from audit import BROKER, GROUP, TOPIC, beats, claims, partitions_by_t
from support import (
    alternate,
    arguments,
    at_most,
    broker_argument,
    cluster,
    document,
    figure,
    show_progress,
    write_document,
)

from kafka_marshal import Admin, Key, World
from kafka_marshal.admin.formatting import Format
from kafka_marshal.clock import SystemClock
from kafka_marshal.engine.follower import Follower
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.protocol.checkpoints import checkpoint_key, split
from kafka_marshal.protocol.records import (
    CheckpointBegin,
    CheckpointChunk,
    CheckpointEnd,
    ClaimingPartition,
    Record,
    ReleasingPartition,
)
from kafka_marshal.protocol.snapshot import digest, to_bytes

TIMEOUT_MS = 600_000
H_MS = 60_000
WRITER = {"client_id": "writer", "incarnation": bytes(16)}
Digests = dict[int, dict[int, str]]


class Builder:
    """Writes the log, and folds it to write its checkpoints.

    Attributes:
        digests: Digest of the state, by coordinating partition and offset.
        times_ms: Wall time of the first and of the last heartbeat.
    """

    def __init__(self, servers: str, topic: str, *, count: int, each: int) -> None:
        """Format the topic, and write the claims."""
        from confluent_kafka import Producer

        with Admin(servers, coordination_topic=topic) as admin:
            admin.format_topic(
                Format(partition_count=count, heartbeat_interval_ms=H_MS)
            )
        self._topic = topic
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "enable.idempotence": True,
                "linger.ms": 20,
                "batch.num.messages": 20_000,
                "queue.buffering.max.messages": 200_000,
            }
        )
        settings = ConnectionConfig(servers, coordination_topic=topic)
        log = open_coordination_log(settings, heartbeat_interval_ms=H_MS)
        self._follower = Follower(log, SystemClock())
        self._seq = 0
        self.digests: Digests = {t: {} for t in range(count)}
        self._beats = {}
        for t, data in partitions_by_t(count, each=each).items():
            for value in claims(data):
                self._produce(t, value)
            self._beats[t] = beats(data, 1)  # the Config has offset 0
        self._producer.flush(TIMEOUT_MS / 1000)
        self.times_ms = (SystemClock().wall_ms(), 0)

    def write(self, entries: int) -> None:
        """Write this many heartbeats to each coordinating partition, and fold them."""
        for t, values in self._beats.items():
            for value in islice(values, entries):
                self._produce(t, value)
        self._producer.flush(TIMEOUT_MS / 1000)
        self.times_ms = (self.times_ms[0], SystemClock().wall_ms())
        self._follower.catch_up(TIMEOUT_MS)
        for world in self._follower.worlds:
            self.digests[world.partition][world.next_offset - 1] = digest(world)

    def checkpoint(self, t: int) -> None:
        """Write a checkpoint of one coordinating partition, as a member does."""
        key = checkpoint_key(t)
        place = {"topic": key.topic, "partition": key.partition}
        claim = ClaimingPartition(
            **self._sender(),
            **place,
            generation=1,
            topic_id=None,
            resume_hash=None,
            expected_epoch=None,
            resume=None,
        )
        epoch = self._append(t, claim)
        head = {"epoch": epoch, "checkpoint_id": self._seq.to_bytes(16, "big")}
        begin = self._append(t, CheckpointBegin(**self._sender(), **head))
        world = self._follower.worlds[t]
        value, checksum = to_bytes(world), bytes.fromhex(digest(world))
        assert world.leader_epoch is not None
        parts = split(value)
        for number, data in enumerate(parts):
            chunk = CheckpointChunk(**self._sender(), **head, number=number, data=data)
            self._append(t, chunk)
        end = CheckpointEnd(
            **self._sender(),
            **head,
            begin_offset=begin,
            begin_leader_epoch=world.leader_epoch,
            part_count=len(parts),
            size_bytes=len(value),
            digest=checksum,
        )
        self._append(t, end)
        release = ReleasingPartition(
            **self._sender(),
            **place,
            epoch=epoch,
            position=None,
            successor=None,
            reason="checkpointed",
        )
        self._append(t, release)

    def close(self) -> None:
        """Close the log."""
        self._follower.close()

    def _sender(self) -> dict[str, Any]:
        self._seq += 1
        return {**WRITER, "group_id": "marshal", "seq": self._seq}

    def _append(self, t: int, record: Record) -> int:
        awaited = self._follower.append(t, record)
        self._follower.await_all([awaited], TIMEOUT_MS)
        assert awaited.transition is not None
        return awaited.transition.offset

    def _produce(self, t: int, value: bytes) -> None:
        while True:
            try:
                self._producer.produce(self._topic, value, partition=t)
                break
            except BufferError:
                self._producer.poll(0.1)


def build(
    servers: str, topic: str, *, records: int, options: argparse.Namespace
) -> Builder:
    """Write the log with its checkpoints."""
    count = options.partitions
    each = options.keys // count
    builder = Builder(servers, topic, count=count, each=each)
    step = max(1, options.checkpoint_entries // count)
    left, turn = records // count, 0
    while left > 0:
        builder.write(min(step, left))
        left -= step
        builder.checkpoint(turn % count)
        turn += 1
        if turn % count == 0:
            show_progress(f"{records - max(0, left) * count} records are written")
    builder.close()
    return builder


def cpu_s() -> float:
    """Return the processor time of this process and its ended children."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class Side:
    """Shows random moments, one after the other.

    Attributes:
        cpu_s: Processor time of each.
    """

    def __init__(
        self, servers: str, topic: str, builder: Builder, *, name: str, key: Key
    ) -> None:
        """Remember what to show."""
        self._servers = servers
        self._topic = topic
        self._builder = builder
        self._name = name
        self._key = key
        self.cpu_s: list[float] = []
        self._random = random.Random(name)  # noqa: S311 - no secret

    def __call__(self) -> float:
        """Show a moment; return the seconds that it took."""
        before = cpu_s()
        took_s = self._once()
        self.cpu_s.append(cpu_s() - before)
        show_progress(f"{self._name}: {took_s:.2f} s")
        return took_s

    def _once(self) -> float:
        first_ms, last_ms = self._builder.times_ms
        time_ms = self._random.randint(first_ms, last_ms)
        if self._name in COMMANDS:
            took_s = self._run(time_ms)
        elif self._name == "offset":
            took_s = self._check()
        else:
            key = self._key if self._name == "key" else None
            took_s, world = self._show(time_ms=time_ms, key=key)
            world.require_known()
        return took_s

    def _show(self, **moment: Any) -> tuple[float, World]:  # noqa: ANN401
        start = time.monotonic()
        world = World.at(
            self._servers,
            coordination_topic=self._topic,
            timeout_ms=TIMEOUT_MS,
            **moment,
        )
        return time.monotonic() - start, world

    def _check(self) -> float:
        """Show the state after a known offset, and compare it."""
        digests = self._builder.digests
        offsets = {t: self._random.choice(list(each)) for t, each in digests.items()}
        took_s, world = self._show(offset=offsets)
        for state in world.partitions:
            t = state.partition
            assert digest(state) == digests[t][offsets[t]]
        return took_s

    def _run(self, time_ms: int) -> float:
        words = list(COMMANDS[self._name])
        if self._name == "who":
            words += list(map(str, self._key))
        seconds, ms = divmod(time_ms, 1_000)
        at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{ms:03}Z"
        where = ("-b", self._servers, "--coordination-topic", self._topic)
        command = [sys.executable, "-m", "kafka_marshal_cli", *words, *where]
        start = time.monotonic()
        subprocess.run(
            [*command, "--at", at, "-o", "json", "--timeout", str(TIMEOUT_MS)],
            stdout=subprocess.DEVNULL,
            timeout=TIMEOUT_MS / 1000,
            check=True,
        )
        return time.monotonic() - start


TARGETS = {"key": at_most(2.0), "who": at_most(2.0), "list": at_most(2.0)}
COMMANDS = {"who": ("claims", "who"), "list": ("claims", "list")}
LABELS = {
    "key": "the state of one key at a time",
    "time": "the state of all partitions at a time",
    "offset": "the state of all partitions at offsets",
    "who": "marshal claims who --at, the whole command",
    "list": "marshal claims list --at, the whole command",
}


def show(
    servers: str, topic: str, builder: Builder, *, partitions: int, rounds: int
) -> list[dict[str, Any]]:
    """Show moments in turns; return the figures."""
    data = partitions_by_t(partitions, each=1)
    key = Key(GROUP, TOPIC, data[partitions - 1][0])
    sides = {name: Side(servers, topic, builder, name=name, key=key) for name in LABELS}
    took = alternate(sides, rounds)
    return [
        *(
            figure(label, "s", took[name], target=TARGETS.get(name))
            for name, label in LABELS.items()
        ),
        *(
            figure(f"{label}: processor", "s", sides[name].cpu_s)
            for name, label in LABELS.items()
        ),
    ]


def measure(
    servers: str, options: argparse.Namespace, *, records: int, rounds: int
) -> dict[str, Any]:
    """Write the log, show moments, and return the document."""
    topic = f"marshal-past-{time.time_ns()}"
    builder = build(servers, topic, records=records, options=options)
    count = options.partitions
    figures = show(servers, topic, builder, partitions=count, rounds=rounds)
    conditions = {
        "records": records,
        "coordinating_partitions": count,
        "keys": options.keys // count * count,
        "checkpoint_entries": options.checkpoint_entries,
        "rounds": rounds,
    }
    more = {"digests_equal": True}
    return document(
        "past", figures, settings=conditions, is_quick=options.quick, more=more
    )


def main() -> None:
    """Run the benchmark and print its document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    parser.add_argument("--records", type=int, help="length of the log")
    parser.add_argument("--keys", type=int, help="number of keys")
    parser.add_argument("--partitions", type=int, default=8, help="K")
    parser.add_argument(
        "--checkpoint-entries", type=int, help="entries from a checkpoint to the next"
    )
    options = parser.parse_args()
    is_quick = options.quick
    records = options.records or (40_000 if is_quick else 10_000_000)
    options.keys = options.keys or (800 if is_quick else 10_000)
    entries = options.checkpoint_entries or (2_000 if is_quick else 50_000)
    options.checkpoint_entries = entries
    rounds = options.rounds or (1 if is_quick else 5)
    with cluster(options.bootstrap_servers, BROKER) as servers:
        found = measure(servers, options, records=records, rounds=rounds)
    write_document(found, options.out)


if __name__ == "__main__":
    main()
