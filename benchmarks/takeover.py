"""How long after the death of a process another process hands out its records.

With sidecars: two hosts with a sidecar each, at a heartbeat interval of 60 s. A client
of one sidecar is killed with SIGKILL. Its sidecar detects that and releases its
partitions, and a client of the other sidecar takes them over. Without sidecars: two
processes hold their claims themselves, at a short heartbeat interval, because the
survivor waits for two intervals. The two sides run in turns.

Each sample is one kill: from just before the signal is sent until the survivor has
handed out a record of the *last* of the victim's partitions. A producer writes to all
partitions all the time.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support import (
    HANG_S,
    SidecarProcess,
    alternate,
    arguments,
    at_most,
    broker_argument,
    cluster,
    document,
    figure,
    ratios,
    show_figures,
    show_progress,
    write_document,
)

from kafka_marshal import Admin, Marshal
from kafka_marshal.admin.formatting import Format
from kafka_marshal.testing.producing import Producing, create_topic

H_MS = 60_000
SMALL_H_MS = 2_000
PARTITIONS = 4
PER_SECOND = 400
KILLS, KILLS_QUICK = 30, 1
TARGET_P99_MS = 1_000
POLL_MS = 100

_run = uuid.uuid4().hex[:8]


class Survivor:
    """A consumer on a thread, which notes the first record of each partition.

    Attributes:
        seen: Time of the first record of each partition since the last ``forget``.
    """

    def __init__(self, marshal: Marshal, topic: str) -> None:
        self.seen: dict[int, float] = {}
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._marshal = marshal
        self._topic = topic
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Clear ``seen``."""
        with self._changed:
            self.seen.clear()

    def wait_for(self, partitions: set[int]) -> float:
        """Wait for records of some partitions; return the time of the last one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure or partitions <= self.seen.keys(), HANG_S
            )
            if not partitions <= self.seen.keys():
                lost = sorted(partitions - self.seen.keys())
                why = self.failure or f"not within {HANG_S} s"
                raise SystemExit(f"partitions {lost} were not taken over: {why}")
            return max(self.seen[partition] for partition in partitions)

    def close(self) -> None:
        """Stop consuming."""
        self._is_over = True
        self._thread.join(HANG_S)

    def _run(self) -> None:
        try:
            with self._marshal.consumer(self._topic) as consumer:
                while not self._is_over:
                    polled = consumer.poll(POLL_MS)
                    now = time.perf_counter()
                    with self._changed:
                        for place in polled:
                            self.seen.setdefault(place.partition, now)
                        self._changed.notify_all()
                    consumer.commit()
        except BaseException as error:  # noqa: BLE001 - raised by the waiting process
            with self._changed:
                self.failure = error
                self._changed.notify_all()


class Side:
    """A group of two: a survivor in this process, and victims one after the other.

    Args:
        servers: The cluster.
        settings: Settings of the victim's client, and its names.
        survivor: The open client that takes over.
    """

    def __init__(
        self, servers: str, settings: dict[str, Any], *, survivor: Marshal
    ) -> None:
        self.topic = f"data-{settings['group']}"
        create_topic(servers, self.topic, partitions=PARTITIONS)
        self._settings = {**settings, "servers": servers, "topic": self.topic}
        self._number = 0
        self._producing = Producing(servers, self.topic, partitions=PARTITIONS)
        self._producing.fill(PARTITIONS)
        self._producing.start(per_second=PER_SECOND)
        self._marshal = survivor
        self._survivor = Survivor(survivor, self.topic)

    def kill(self) -> float:
        """Start a victim, let it work, kill it; return the takeover time in ms."""
        self._number += 1
        settings = {**self._settings, "client": f"victim-{self._number}"}
        victim = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(settings)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            partitions = share_of(victim)
            self._survivor.forget()
            began = time.perf_counter()
            os.kill(victim.pid, signal.SIGKILL)
            took_ms = (self._survivor.wait_for(partitions) - began) * 1_000
        finally:
            victim.kill()
            victim.wait(HANG_S)
        return took_ms

    def close(self) -> None:
        """End the survivor and the producer."""
        self._survivor.close()
        self._marshal.close()
        self._producing.finish()


def share_of(victim: "subprocess.Popen[str]") -> set[int]:
    """Return the partitions of a victim, once it has its whole share."""
    timer = threading.Timer(HANG_S, victim.kill)
    timer.start()
    try:
        assert victim.stdout is not None
        line = victim.stdout.readline()
    finally:
        timer.cancel()
    if not line:
        raise SystemExit(f"a victim had no share within {HANG_S} s, or failed")
    return set(json.loads(line))


def child(settings: dict[str, Any]) -> None:
    """Consume until killed; report once it processes half of the partitions."""
    share, is_reported = PARTITIONS // 2, False
    worked_on: set[int] = set()
    with (
        opened(settings, settings["client"]) as marshal,
        marshal.consumer(settings["topic"]) as consumer,
    ):
        while True:
            polled = consumer.poll(POLL_MS)
            held = {place.partition for place in consumer.assignment()}
            worked_on |= {place.partition for place in polled}
            worked_on &= held
            consumer.commit()
            if not is_reported and len(held) == len(worked_on) == share:
                is_reported = True
                print(json.dumps(sorted(held)), flush=True)


def opened(settings: dict[str, Any], client_id: str) -> Marshal:
    """Return a client, with or without a sidecar."""
    names = {"group_id": settings["group"], "client_id": client_id}
    if settings["sidecar"] is not None:
        return Marshal(sidecar=settings["sidecar"], **names)
    log = settings["log"]
    return Marshal(settings["servers"], **names, coordination_topic=log, state_dir="")


def measure(servers: str, kills: int, home: Path) -> list[dict[str, Any]]:
    """Return the figures of both sides."""
    logs = {}
    for h_ms in (H_MS, SMALL_H_MS):
        logs[h_ms] = f"marshal-takeover-{h_ms}-{_run}"
        with Admin(servers, coordination_topic=logs[h_ms]) as admin:
            admin.format_topic(Format(heartbeat_interval_ms=h_ms))
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(SidecarProcess(servers, logs[H_MS], home=home / name))
            for name in ("host-a", "host-b")
        ]
        options = {"group": f"with-{_run}", "log": logs[H_MS]}
        there = {**options, "sidecar": hosts[1].url, "servers": servers}
        watched = Side(
            servers,
            {**options, "sidecar": hosts[0].url},
            survivor=opened(there, "survivor"),
        )
        stack.callback(watched.close)
        alone = {"group": f"without-{_run}", "log": logs[SMALL_H_MS], "sidecar": None}
        bare = Side(
            servers, alone, survivor=opened({**alone, "servers": servers}, "survivor")
        )
        stack.callback(bare.close)
        took = alternate({"with": watched.kill, "without": bare.kill}, kills)
    return figures_of(took["with"], took["without"])


def figures_of(watched: list[float], bare: list[float]) -> list[dict[str, Any]]:
    """Return the figures of the samples of both sides."""
    name = f"kill -9 of a client beside a sidecar, H = {H_MS // 1_000} s"
    plain = f"kill -9 of a process without one, H = {SMALL_H_MS // 1_000} s"
    tail = at_most(TARGET_P99_MS)
    return [
        figure(name, "ms", watched),
        figure(f"{name}: 99th percentile", "ms", [p99(watched)], target=tail),
        figure(f"{name}: longest", "ms", [max(watched)]),
        figure(plain, "ms", bare),
        figure(f"{plain}: 99th percentile", "ms", [p99(bare)]),
        figure(
            "with beside without, though H is 30 times as long",
            "ratio",
            ratios(watched, bare),
        ),
    ]


def p99(samples: list[float]) -> float:
    """Return the 99th percentile, or the largest of fewer than 100 samples."""
    if len(samples) < 100:  # noqa: PLR2004 - the word says it
        return max(samples)
    return statistics.quantiles(samples, n=100, method="inclusive")[98]


def main() -> None:
    """Run the benchmark and print its document."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    parser.add_argument("--kills", type=int, help="how many, on each side")
    options = parser.parse_args()
    kills = options.kills or options.rounds
    kills = kills or (KILLS_QUICK if options.quick else KILLS)
    with cluster(options.bootstrap_servers) as servers, TemporaryDirectory() as home:
        show_progress(f"{kills} kills on each side ...")
        figures = measure(servers, kills, Path(home))
    show_figures(figures)
    settings = {
        "kills": kills,
        "heartbeat_interval_ms": {"with": H_MS, "without": SMALL_H_MS},
        "partitions": PARTITIONS,
        "records_per_second": PER_SECOND,
    }
    write_document(
        document("takeover", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
