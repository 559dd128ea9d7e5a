"""How soon a process is ready on a long log: by kept states, by checkpoints, without.

The log is written through the product's codec to a real broker: Configs, the claims of
a fleet, then full Heartbeats in turn. These are timed in turns, each in a new process:
a client's engine, from connecting to ready, with the states that an earlier process has
kept in the host's state directory; the engine without kept states; and the transport
alone, which reads the log and folds nothing. The admin's view of the world is timed
with kept states, too. Then checkpoints are appended to the log. A start from these
alone, as on a host without kept states, is timed in turns with one from kept states.
The digests of all starts are compared.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from audit import BROKER, write
from support import (
    alternate,
    arguments,
    at_most,
    broker_argument,
    cluster,
    document,
    figure,
    ratios,
    run_again,
    show_progress,
    write_document,
)

from kafka_marshal import World
from kafka_marshal.engine import Engine
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.observability import FanOut, LoggingObserver
from kafka_marshal.ports import Event, Observer
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.runtime import Runtime

TIMEOUT_S = 3_600
SIDES = ("snapshot", "start", "transport", "view")
AFTERWARDS = ("checkpoint", "snapshot")
# In seconds, for a log of 10 million records.
TARGETS = {"snapshot": at_most(1.0), "checkpoint": at_most(1.0), "start": at_most(5.0)}
CHECKPOINT_MS = 1_000


def run_one(options: argparse.Namespace) -> None:
    """Become ready once in this process, and print the time."""
    settings = ConnectionConfig(
        options.bootstrap_servers, coordination_topic=options.topic
    )
    home = Path(options.home) if options.home else None
    result = {"transport": transport, "view": view}.get(options.side, engine)(
        settings, home
    )
    print(json.dumps(result))


def engine(settings: ConnectionConfig, home: Path | None) -> dict[str, Any]:
    """Open the engine of a client, without claiming anything."""
    start, cpu = time.monotonic(), time.process_time()
    runtime = Runtime.open(
        settings,
        LoggingObserver(),
        timeout_ms=60_000,
        read_ms=TIMEOUT_S * 1_000,
        state_home=home,
        checkpoint_interval_ms=0,
    )
    took_s, cpu_s = time.monotonic() - start, time.process_time() - cpu
    replicas = runtime.engine.context.replicas
    with runtime.engine.changed:
        digests = [digest(replicas[t].world) for t in sorted(replicas)]
    runtime.stop()
    return {"took_s": took_s, "cpu_s": cpu_s, "digests": digests}


def view(settings: ConnectionConfig, home: Path | None) -> dict[str, Any]:
    """Open a view of the world, as ``marshal claims list`` does."""
    start, cpu = time.monotonic(), time.process_time()
    world = World.open(
        settings.bootstrap_servers,
        coordination_topic=settings.coordination_topic,
        state_dir=home,
        timeout_ms=TIMEOUT_S * 1_000,
    )
    took_s, cpu_s = time.monotonic() - start, time.process_time() - cpu
    digests = [digest(each) for each in world.partitions]
    return {"took_s": took_s, "cpu_s": cpu_s, "digests": digests}


def transport(settings: ConnectionConfig, home: Path | None) -> dict[str, Any]:
    """Read every entry and fold none."""
    del home
    start, cpu = time.monotonic(), time.process_time()
    log = open_coordination_log(settings, heartbeat_interval_ms=None)
    ends = log.end_offsets(60_000)
    deadline = start + TIMEOUT_S
    count = 0
    while any(log.positions()[t] < end for t, end in ends.items()):
        assert time.monotonic() < deadline, "not read in time"
        count += len(log.poll(100))
    took_s, cpu_s = time.monotonic() - start, time.process_time() - cpu
    log.close(1_000)
    return {"took_s": took_s, "cpu_s": cpu_s, "entries": count}


class Written(Observer):
    """Notes the partitions that have a checkpoint."""

    def __init__(self) -> None:
        """Begin with no partitions."""
        self.partitions: set[object] = set()

    def observe(self, event: Event) -> None:
        """Note a checkpoint that was written to its end."""
        if event.name == "checkpoint_written":
            self.partitions.add(event.fields["partition"])


def write_checkpoints(settings: ConnectionConfig, home: Path, count: int) -> None:
    """Let one client write a checkpoint of each coordinating partition."""
    written = Written()

    def attach(engine: Engine) -> None:
        observer = engine.context.ports.observer
        assert isinstance(observer, FanOut)
        observer.add(written)

    runtime = Runtime.open(
        settings,
        LoggingObserver(),
        timeout_ms=60_000,
        read_ms=TIMEOUT_S * 1_000,
        state_home=home,
        checkpoint_interval_ms=CHECKPOINT_MS,
        on_connected=attach,
    )
    deadline = time.monotonic() + TIMEOUT_S
    while len(written.partitions) < count:
        assert time.monotonic() < deadline, "checkpoints were not written in time"
        time.sleep(0.1)
    runtime.stop()


class Side:
    """One way to become ready, each time in a new process."""

    def __init__(self, servers: str, topic: str, *, side: str, home: str) -> None:
        """Remember what to run."""
        self.side = side
        self.command = [
            *(sys.executable, str(Path(__file__).resolve())),
            *("--side", side, "--topic", topic, "--bootstrap-servers", servers),
            *(["--home", home] if home else []),
        ]
        self.result: dict[str, Any] = {}
        self.cpu_s: list[float] = []

    def __call__(self) -> float:
        """Start once; return the seconds until ready."""
        self.result = run_again(self.command, timeout_s=TIMEOUT_S)
        self.cpu_s.append(float(self.result["cpu_s"]))
        show_progress(f"{self.side}: {self.result['took_s']:.2f} s")
        return float(self.result["took_s"])


LABELS = {
    "snapshot": "ready, with kept states",
    "start": "ready, from the log's start",
    "transport": "the transport alone",
    "view": "the world for an admin, with kept states",
    "checkpoint": "ready, from checkpoints alone",
}


def in_turns(
    sides: dict[str, Side], digests: list[str], *, rounds: int
) -> dict[str, list[float]]:
    """Run sides in turns, and require their digests to be these; return the seconds."""
    took = alternate(sides, rounds)
    for name, side in sides.items():
        assert side.result.get("digests", digests) == digests, name
    return took


def measure(
    servers: str, options: argparse.Namespace, *, records: int, rounds: int
) -> dict[str, Any]:
    """Write the log, keep its states, start in turns, and return the document."""
    topic = f"marshal-cold-{time.time_ns()}"
    each = options.keys // options.partitions
    write(servers, topic, records=records, count=options.partitions, each=each)
    with tempfile.TemporaryDirectory() as home:
        homes = {"snapshot": home, "view": home}

        def side(name: str) -> Side:
            return Side(servers, topic, side=name, home=homes.get(name, ""))

        # An earlier process, which ends in order and keeps its states.
        first = side("snapshot")
        first()
        kept_bytes = sum(path.stat().st_size for path in Path(home).rglob("*.snapshot"))
        sides = {name: side(name) for name in SIDES}
        took = in_turns(sides, first.result["digests"], rounds=rounds)
        settings = ConnectionConfig(servers, coordination_topic=topic)
        write_checkpoints(settings, Path(home), options.partitions)
        # The checkpoints have made the log longer; keep the states at its new end.
        first()
        afterwards = {name: side(name) for name in AFTERWARDS}
        took_afterwards = in_turns(afterwards, first.result["digests"], rounds=rounds)
    assert sides["transport"].result["entries"] >= records
    assert kept_bytes or options.quick, "no state was kept"
    beside = {
        "from checkpoints alone beside with kept states": ratios(
            took_afterwards["checkpoint"], took_afterwards["snapshot"]
        ),
        "from the start beside with kept states": ratios(
            took["start"], took["snapshot"]
        ),
        "from the start beside the transport alone": ratios(
            took["start"], took["transport"]
        ),
    }
    took["checkpoint"] = took_afterwards["checkpoint"]
    sides["checkpoint"] = afterwards["checkpoint"]
    targets = {} if options.quick else TARGETS
    figures = [
        *(
            figure(LABELS[name], "s", took[name], target=targets.get(name))
            for name in sides
        ),
        *(
            figure(f"{LABELS[name]}: processor", "s", side.cpu_s)
            for name, side in sides.items()
        ),
        *(figure(what, "ratio", found) for what, found in beside.items()),
    ]
    conditions = {
        "records": records,
        "coordinating_partitions": options.partitions,
        "keys": each * options.partitions,
        "rounds": rounds,
    }
    more = {"digests_equal": True, "kept_bytes": kept_bytes}
    return document(
        "cold_start", figures, settings=conditions, is_quick=options.quick, more=more
    )


def main() -> None:
    """Run the benchmark and print its document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    parser.add_argument("--records", type=int, help="length of the log")
    parser.add_argument("--keys", type=int, help="number of keys")
    parser.add_argument("--partitions", type=int, default=8, help="K")
    parser.add_argument("--side", choices=(*SIDES, *AFTERWARDS), help=argparse.SUPPRESS)
    parser.add_argument("--topic", help=argparse.SUPPRESS)
    parser.add_argument("--home", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        run_one(options)
        return
    records = options.records or (40_000 if options.quick else 10_000_000)
    options.keys = options.keys or (800 if options.quick else 10_000)
    rounds = options.rounds or (1 if options.quick else 3)
    with cluster(options.bootstrap_servers, BROKER) as servers:
        found = measure(servers, options, records=records, rounds=rounds)
    write_document(found, options.out)


if __name__ == "__main__":
    main()
