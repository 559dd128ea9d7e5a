"""How long a command takes from its start to its end, and an import.

Processes run in turns: ``marshal --version`` and ``--help`` beside a Python that does
nothing; ``log replay`` of a dump; ``groups list`` and ``claims list`` on a log with
some thousand entries, beside a Python that lists and describes Kafka's consumer groups
with confluent-kafka. Each import is timed within a new process.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from audit import write
from confluent_kafka import Consumer as ConfluentConsumer
from support import (
    alternate,
    arguments,
    broker_argument,
    cluster,
    document,
    figure,
    ratios,
    show_figures,
    write_document,
)

from kafka_marshal.testing.producing import create_topic

MARSHAL = Path(sys.executable).with_name("marshal")
COMMAND_S = 60
JOIN_S = 60
H_MS = 60_000
ENTRIES, COORDINATING = 4_000, 8
IMPORTS = {
    "kafka_marshal": "Consumer, Marshal",
    "kafka": "KafkaConsumer",
    "confluent_kafka": "Consumer",
}
IMPORT = """
import time
began = time.perf_counter()
from {name} import {what}
print((time.perf_counter() - began) * 1e3)
"""
LIST = """
import sys
from confluent_kafka.admin import AdminClient
admin = AdminClient({{"bootstrap.servers": "{servers}"}})
names = [each.group_id for each in admin.list_consumer_groups().result().valid]
{more}
print(names)
"""
DESCRIBE = """
for each in admin.describe_consumer_groups(names).values():
    print(each.result().members)
"""
# Commands and their peers; other commands are only reported.
PAIRS = {
    "marshal --version": "python",
    "marshal --help": "python",
    "marshal log replay": "python",
    "marshal groups list": "groups by confluent-kafka",
    "marshal claims list": "members by confluent-kafka",
    "import kafka_marshal": "import confluent_kafka",
}


def output(command: Sequence[str | Path]) -> str:
    """Run a process to its end; return its output."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed: {done.stderr}")
    return done.stdout


def took_ms(command: Sequence[str | Path]) -> float:
    """Run a process to its end; return the milliseconds."""
    began = time.perf_counter()
    output(command)
    return (time.perf_counter() - began) * 1_000


def import_ms(name: str) -> float:
    """Import the consumer of a package in a new process; return the milliseconds."""
    script = IMPORT.format(name=name, what=IMPORTS[name])
    return float(output([sys.executable, "-c", script]))


@contextmanager
def group(servers: str) -> Iterator[None]:
    """Keep a consumer group with one member while the block runs."""
    topic = f"commands-{os.urandom(4).hex()}"
    create_topic(servers, topic, partitions=COORDINATING)
    consumer = ConfluentConsumer({"bootstrap.servers": servers, "group.id": topic})
    consumer.subscribe([topic])
    deadline = time.monotonic() + JOIN_S
    try:
        while len(consumer.assignment()) < COORDINATING:
            if time.monotonic() > deadline:
                raise SystemExit(f"the group {topic} was not joined in {JOIN_S} s")
            consumer.poll(0.1)
        yield
    finally:
        consumer.close()


def sides_of(servers: str, log: str, dump: Path) -> dict[str, Callable[[], float]]:
    """Return the processes to run, by name."""
    at = ("-b", servers, "--coordination-topic", log)
    groups = LIST.format(servers=servers, more="")
    members = LIST.format(servers=servers, more=DESCRIBE)
    commands: dict[str, list[str | Path]] = {
        "python": [sys.executable, "-c", "pass"],
        "marshal --version": [MARSHAL, "--version"],
        "marshal --help": [MARSHAL, "--help"],
        "marshal log replay": [MARSHAL, "log", "replay", dump],
        "marshal groups list": [MARSHAL, "groups", "list", *at],
        "groups by confluent-kafka": [sys.executable, "-c", groups],
        "marshal claims list": [MARSHAL, "claims", "list", *at],
        "members by confluent-kafka": [sys.executable, "-c", members],
    }
    return {
        **{name: partial(took_ms, each) for name, each in commands.items()},
        **{f"import {name}": partial(import_ms, name) for name in IMPORTS},
    }


def measure(servers: str, rounds: int) -> list[dict[str, Any]]:
    """Return the figures of all commands and imports."""
    log = f"marshal-commands-{os.urandom(4).hex()}"
    write(servers, log, records=ENTRIES, count=COORDINATING, h_ms=H_MS)
    with TemporaryDirectory() as home, group(servers):
        dump = Path(home) / "dump.jsonl"
        at = ("-b", servers, "--coordination-topic", log)
        dump.write_text(output((MARSHAL, "log", "dump", *at)))
        sides = sides_of(servers, log, dump)
        for side in sides.values():  # compiles the imported modules
            side()
        took = alternate(sides, rounds)
    figures = [figure(name, "ms", samples) for name, samples in took.items()]
    for name, peer in PAIRS.items():
        shares = ratios(took[name], took[peer])
        figures.append(figure(f"{name} beside {peer}", "ratio", shares))
    show_figures(figures)
    return figures


def main() -> None:
    """Run the benchmark and print its document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 15)
    with cluster(options.bootstrap_servers) as servers:
        figures = measure(servers, rounds)
    settings = {"rounds": rounds, "entries": ENTRIES, "partitions": COORDINATING}
    write_document(
        document("commands", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
