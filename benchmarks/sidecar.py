"""What the number of clients costs a sidecar, and the coordination log.

One sidecar holds a hundred partitions of one group, for one client and for fifty.
While nothing changes, these are measured: its appends to the coordination log, its
connections to the brokers, its CPU time and its memory. Sidecar and clients are
restarted for each sample, and the two sides take turns. Clients share a process; each
has its own connection and sends a heartbeat once a second. Their topic is empty.
"""

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
from kafka import KafkaConsumer, TopicPartition
from support import (
    HANG_S,
    SidecarProcess,
    arguments,
    at_most,
    broker_argument,
    cluster,
    cpu_s,
    document,
    figure,
    ratios,
    show_figures,
    show_progress,
    write_document,
)

from kafka_marshal import Admin, Marshal
from kafka_marshal.admin.formatting import Format
from kafka_marshal.testing.producing import create_topic

H_MS = 6_000
ROUNDS = 5
POLL_MS = 1_000
RATIO_MAX = 1.25  # of records: windows may differ by a heartbeat at their edges
ESTABLISHED = "01"
MEBIBYTE = 1024 * 1024

_run = uuid.uuid4().hex[:8]


@attrs.frozen
class Load:
    """Numbers of partitions and clients, and how long they are measured."""

    partitions: int
    few: int
    many: int
    settle_s: float
    window_s: float


FULL = Load(partitions=100, few=1, many=50, settle_s=2.0, window_s=30.0)
QUICK = Load(partitions=10, few=1, many=5, settle_s=0.5, window_s=2.0)

# --- the clients, in a process of their own


def child(settings: Mapping[str, Any]) -> None:
    """Consume with some clients; report once all partitions are held."""
    held: list[int] = [0] * settings["clients"]
    is_over = threading.Event()

    def consume(number: int) -> None:
        with (
            Marshal(
                group_id=settings["group"],
                client_id=f"client-{number}",
                sidecar=settings["url"],
            ) as marshal,
            marshal.consumer(settings["topic"]) as consumer,
        ):
            while not is_over.is_set():
                consumer.poll(POLL_MS)
                held[number] = len(consumer.assignment())

    threads = [
        threading.Thread(target=consume, args=(number,), daemon=True)
        for number in range(settings["clients"])
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + HANG_S
    while sum(held) != settings["partitions"] or min(held) == 0:
        if time.monotonic() > deadline or not all(t.is_alive() for t in threads):
            sys.exit(f"not all is held: {held}")
        time.sleep(0.05)
    print(json.dumps({"most": max(held), "least": min(held)}), flush=True)
    sys.stdin.read()  # until the measuring process closes it
    is_over.set()
    for thread in threads:
        thread.join(HANG_S)


# --- what is looked at


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE


def connection_count(pid: int, port: int) -> int:
    """Return how many connections a process has to a port."""
    there = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            is_ours = fields[3] == ESTABLISHED
            if is_ours and int(fields[2].rpartition(":")[2], 16) == port:
                there.add(f"socket:[{fields[9]}]")
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += str(fd.readlink()) in there
        except OSError:  # closed meanwhile
            continue
    return count


def log_end(servers: str, log: str) -> int:
    """Return the sum of the log ends of the coordination topic."""
    consumer = KafkaConsumer(bootstrap_servers=servers)
    try:
        partitions = consumer.partitions_for_topic(log) or set()
        places = [TopicPartition(log, number) for number in partitions]
        return sum(consumer.end_offsets(places).values())
    finally:
        consumer.close()


# --- the samples


def sample(servers: str, clients: int, *, load: Load, home: Path) -> dict:
    """Hold all partitions for ``clients`` clients; return the costs."""
    name = f"{clients}-{uuid.uuid4().hex[:6]}"
    log, topic = f"marshal-sidecar-{name}-{_run}", f"data-{name}-{_run}"
    create_topic(servers, topic, partitions=load.partitions)
    with Admin(servers, coordination_topic=log) as admin:
        admin.format_topic(Format(heartbeat_interval_ms=H_MS))
    with SidecarProcess(servers, log, home=home / name) as sidecar:
        settings = {
            "group": f"group-{name}",
            "topic": topic,
            "clients": clients,
            "partitions": load.partitions,
            "url": sidecar.url,
        }
        command = [sys.executable, __file__, "--child", json.dumps(settings)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                if not process.stdout.readline():
                    raise SystemExit(f"{clients} clients did not get all partitions")
                time.sleep(load.settle_s)
                found = window(servers, log, pid=sidecar.pid, seconds=load.window_s)
                process.stdin.close()
                process.wait(HANG_S)
            finally:
                process.kill()
    return found


def window(servers: str, log: str, *, pid: int, seconds: float) -> dict:
    """Measure a sidecar before and after some seconds; return the differences."""
    port = int(servers.rpartition(":")[2])
    records, cpu, began = log_end(servers, log), cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    cpu, took_s = cpu_s(pid) - cpu, time.monotonic() - began
    return {
        "records": (log_end(servers, log) - records) / took_s,
        "cpu": 100 * cpu / took_s,
        "memory": memory_mib(pid),
        "connections": connection_count(pid, port),
    }


def measure(servers: str, rounds: int, load: Load) -> list[dict[str, Any]]:
    """Return the figures of both sides."""
    few, many = load.few, load.many
    samples: dict[int, list[dict]] = {few: [], many: []}
    with TemporaryDirectory() as home:
        for number in range(rounds):
            for clients in (few, many) if number % 2 == 0 else (many, few):
                show_progress(f"round {number + 1}: {clients} clients ...")
                found = sample(servers, clients, load=load, home=Path(home))
                samples[clients].append(found)
    figures = []
    for what, unit, target in (
        ("records", "records/s", at_most(RATIO_MAX)),
        ("connections", "connections", at_most(1)),
        ("cpu", "% of a core", None),
        ("memory", "MiB", None),
    ):
        below, above = ([each[what] for each in samples[n]] for n in (few, many))
        name = NAMES[what]
        both = ratios(above, below)
        figures += [
            figure(
                f"{name}: {many} clients beside {few}", "ratio", both, target=target
            ),
            figure(f"{name}: {few} client", unit, below),
            figure(f"{name}: {many} clients", unit, above),
        ]
    return figures


NAMES = {
    "records": "appended to the coordination log",
    "connections": "connections of the sidecar to the broker",
    "cpu": "CPU of the sidecar",
    "memory": "memory of the sidecar",
}


def main() -> None:
    """Run the benchmark and print its document."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    load = QUICK if options.quick else FULL
    with cluster(options.bootstrap_servers) as servers:
        figures = measure(servers, rounds, load)
    show_figures(figures)
    settings = {
        "rounds": rounds,
        "heartbeat_interval_ms": H_MS,
        **attrs.asdict(load),
    }
    write_document(
        document("sidecar", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
