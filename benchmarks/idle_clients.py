"""The cost of idle clients for a sidecar.

The clients of one group share an empty topic, and one process drives them all. Each has
a stream of events and a connection for heartbeats to the sidecar, on which it sends the
bytes that the library sends, once a second. While nothing changes, the processor time
of the sidecar is measured without clients, with some, and with a thousand. From that
follows how much each heartbeat takes.
"""

import json
import selectors
import socket
import time
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
from sidecar import H_MS
from support import (
    SidecarProcess,
    arguments,
    at_most,
    broker_argument,
    cluster,
    cpu_s,
    document,
    figure,
    show_figures,
    show_progress,
    write_document,
)

from kafka_marshal import Admin
from kafka_marshal.admin.formatting import Format
from kafka_marshal.testing.producing import create_topic

GROUP = "idle"
BEAT_MS = 1_000
ANSWER_S = 30.0
READ_BYTES = 65_536
# A busy sidecar may refuse a heartbeat (503), because the next one is in time.
ANSWERS = (b"HTTP/1.1 200", b"HTTP/1.1 503")
# Clients that join at once; then all send heartbeats for this time, in seconds, or for
# as long as the joins took.
JOIN_AT_ONCE, JOIN_S = 10, 0.1
CPU_MAX = {60: 2.0, 1_000: 15.0}

_run = uuid.uuid4().hex[:8]


@attrs.frozen
class Load:
    """Numbers of clients, and how long they are measured."""

    counts: tuple[int, ...]
    partitions: int
    settle_s: float
    window_s: float


FULL = Load(counts=(0, 60, 1_000), partitions=60, settle_s=4.0, window_s=15.0)
QUICK = Load(counts=(0, 5), partitions=5, settle_s=0.5, window_s=2.0)


class Client:
    """One client, with two connections like the library."""

    def __init__(self, path: str, number: int) -> None:
        """Connect twice."""
        self.place = f"/v1/groups/{GROUP}/clients/client-{number}"
        self.instance = uuid.uuid4().hex
        self.beats = self._connect(path)
        self.events = self._connect(path)

    @staticmethod
    def _connect(path: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        connection.settimeout(ANSWER_S)
        return connection

    def head(self, method: str, place: str, length: int | None) -> bytes:
        """Return the head of a request, with the headers that httpx sends."""
        lines = [
            f"{method} {self.place}{place} HTTP/1.1",
            "Host: sidecar",
            "Accept: */*",
            "Accept-Encoding: gzip, deflate",
            "Connection: keep-alive",
            "User-Agent: python-httpx/0.28.1",
            f"Marshal-Instance: {self.instance}",
        ]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        if length:
            lines.append("Content-Type: application/json")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def ask(self, method: str, place: str, body: dict[str, Any]) -> None:
        """Send a request, read its answer by Content-Length, and require success."""
        content = json.dumps(body).encode()
        self.beats.sendall(self.head(method, place, len(content)) + content)
        answer = b""
        while not is_whole(answer):
            piece = self.beats.recv(READ_BYTES)
            if not piece:
                break
            answer += piece
        if b" 200 " not in answer[:20]:
            raise SystemExit(f"{method} {self.place}{place}: {answer[:500]!r}")

    def join(self, topic: str) -> None:
        """Register, subscribe and open the stream of events."""
        self.ask("PUT", "", {"instance": self.instance, "beat_ms": BEAT_MS})
        wants = {"topics": [topic], "claims_max": 1}
        self.ask("PUT", "/subscriptions/main", wants)
        self.events.sendall(self.head("GET", "/events", None))

    def beat(self) -> None:
        """Send a heartbeat without positions."""
        self.beats.sendall(self.head("POST", "/beat", 0))

    def close(self) -> None:
        """Close both connections."""
        self.beats.close()
        self.events.close()


def is_whole(answer: bytes) -> bool:
    """Return whether an answer is complete."""
    head, found, body = answer.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return bool(found) and len(body) >= int(line.partition(b":")[2])
    return bool(found)


class Fleet:
    """Clients that send a heartbeat once a second, driven by one thread."""

    def __init__(self, path: str, count: int, topic: str) -> None:
        """Let all clients join; clients that have joined send heartbeats meanwhile."""
        self.answers = self.refusals = 0
        self.leased: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._clients: list[Client] = []
        self._next = -1
        joined = time.monotonic()
        for number in range(count):
            client = Client(path, number)
            client.join(topic)
            for connection in (client.beats, client.events):
                connection.settimeout(0)
                self._selector.register(connection, selectors.EVENT_READ, number)
            self._clients.append(client)
            if number % JOIN_AT_ONCE == 0:
                self.run(max(JOIN_S, time.monotonic() - joined))
                joined = time.monotonic()

    def run(self, seconds: float) -> None:
        """Send heartbeats for some seconds, and read all answers and events."""
        step_s = BEAT_MS / 1_000 / max(1, len(self._clients))
        due = began = time.monotonic()
        while (now := time.monotonic()) - began < seconds:
            while self._clients and due <= now:
                self._next = (self._next + 1) % len(self._clients)
                self._clients[self._next].beat()
                due += step_s
            wait_s = min(max(0.0, due - now), 0.1) if self._clients else 0.1
            for key, _ in self._selector.select(wait_s):
                self._read(key.fileobj, key.data)  # type: ignore[arg-type]

    def _read(self, connection: socket.socket, number: int) -> None:
        data = connection.recv(READ_BYTES)
        if not data:
            raise SystemExit("the sidecar closed a connection")
        if connection is self._clients[number].beats:
            if not data.startswith((*ANSWERS, b"{")):
                raise SystemExit(f"a beat was answered with {data[:300]!r}")
            self.answers += data.startswith(ANSWERS[0])
            self.refusals += data.startswith(ANSWERS[1])
            if b'"epoch"' in data:
                self.leased.add(number)

    def close(self) -> None:
        """Close every connection."""
        for client in self._clients:
            client.close()
        self._selector.close()


def sample(servers: str, count: int, *, load: Load, home: Path) -> dict[str, float]:
    """Run a sidecar with ``count`` clients for a while; return the costs."""
    name = f"{count}-{uuid.uuid4().hex[:6]}"
    log, topic = f"marshal-idle-{name}-{_run}", f"data-{name}-{_run}"
    create_topic(servers, topic, partitions=load.partitions)
    with Admin(servers, coordination_topic=log) as admin:
        admin.format_topic(Format(heartbeat_interval_ms=H_MS))
    with SidecarProcess(servers, log, home=home / name) as sidecar:
        fleet = Fleet(sidecar.url.removeprefix("unix:"), count, topic)
        try:
            fleet.run(load.settle_s + count / 500)
            fleet.answers = fleet.refusals = 0
            cpu, began = cpu_s(sidecar.pid), time.monotonic()
            fleet.run(load.window_s)
            cpu, took_s = cpu_s(sidecar.pid) - cpu, time.monotonic() - began
        finally:
            fleet.close()
    show_progress(
        f"{count} clients: {100 * cpu / took_s:.2f} % of a core, "
        f"{fleet.answers / took_s:.0f} beats/s and {fleet.refusals} refused, "
        f"{len(fleet.leased)} with partitions"
    )
    return {"cpu": 100 * cpu / took_s, "beats": fleet.answers / took_s}


def measure(servers: str, rounds: int, load: Load) -> list[dict[str, Any]]:
    """Return the figures for all numbers of clients."""
    cpu: dict[int, list[float]] = {count: [] for count in load.counts}
    beats: dict[int, list[float]] = {count: [] for count in load.counts}
    with TemporaryDirectory() as home:
        for _ in range(rounds):
            for count in load.counts:
                found = sample(servers, count, load=load, home=Path(home))
                cpu[count].append(found["cpu"])
                beats[count].append(found["beats"])
    figures = []
    for count in load.counts:
        most = CPU_MAX.get(count)
        name = f"CPU of the sidecar: {count} idle clients"
        target = None if most is None else at_most(most)
        figures.append(figure(name, "% of a core", cpu[count], target=target))
        if count:
            each = [
                10 * (used - without) / rate
                for used, without, rate in zip(
                    cpu[count], cpu[0], beats[count], strict=True
                )
            ]
            figures.append(figure(f"CPU of a beat: {count} clients", "ms", each))
    return figures


def main() -> None:
    """Run the benchmark and print its document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    load = QUICK if options.quick else FULL
    with cluster(options.bootstrap_servers) as servers:
        figures = measure(servers, rounds, load)
    show_figures(figures)
    settings = {
        "rounds": rounds,
        "heartbeat_interval_ms": H_MS,
        "beat_ms": BEAT_MS,
        **attrs.asdict(load),
    }
    write_document(
        document("idle_clients", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
