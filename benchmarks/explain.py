"""How long it takes to explain one key, on a log of one key and on one of many keys.

Two logs with one coordinating partition are written through the product's codec to a
real broker: one has a claim and Heartbeats of one key; the other has as many records of
that key among those of 99 other keys. These are timed in turns: ``KeyHistory.open``,
which connects, reads and folds, in this process; and ``marshal claims explain`` in a
process of its own. Both read the whole coordinating partition, so the second log shows
the cost of records of other keys.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from audit import BROKER, GROUP, TOPIC, partitions_by_t, write
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

from kafka_marshal import Key, KeyHistory

TIMEOUT_S = 600
KEYS = 100
MARSHAL = Path(sys.executable).with_name("marshal")


def library(servers: str, topic: str, *, key: Key, records: int) -> float:
    """Explain in this process; return the seconds."""
    start = time.monotonic()
    found = KeyHistory.open(
        servers, key=key, coordination_topic=topic, timeout_ms=TIMEOUT_S * 1_000
    )
    took_s = time.monotonic() - start
    assert found.entries_count >= records, found.entries_count
    assert found.claims[-1].beats_count, found.why
    show_progress(f"{topic}: {took_s:.2f} s")
    return took_s


def command(servers: str, topic: str, *, key: Key, records: int) -> float:
    """Explain with the command; return the seconds."""
    start = time.monotonic()
    done = subprocess.run(
        [
            *(MARSHAL, "claims", "explain", key.group_id),
            *(f"{key.topic}:{key.partition}", "-o", "json"),
            *("-b", servers, "--coordination-topic", topic),
            *("--timeout", f"{TIMEOUT_S}s"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    took_s = time.monotonic() - start
    assert json.loads(done.stdout)["as_of"]["offsets"]["0"] >= records
    return took_s


def measure(
    servers: str, *, records: int, rounds: int, is_quick: bool
) -> dict[str, Any]:
    """Write both logs and explain the same key in turns; return the document."""
    key = Key(GROUP, TOPIC, partitions_by_t(1, each=1)[0][0])
    now = time.time_ns()
    alone, among = f"marshal-alone-{now}", f"marshal-among-{now}"
    write(servers, alone, records=records, count=1, each=1)
    write(servers, among, records=KEYS * records, count=1, each=KEYS)

    def side(
        explain: Callable[..., float], topic: str, count: int
    ) -> Callable[[], float]:
        return lambda: explain(servers, topic, key=key, records=count)

    sides = {
        "explain, a log of this key": side(library, alone, records),
        "explain, a log of 100 keys": side(library, among, KEYS * records),
        "marshal claims explain, a log of this key": side(command, alone, records),
        "marshal claims explain, a log of 100 keys": side(
            command, among, KEYS * records
        ),
    }
    took = alternate(sides, rounds)
    targets = {} if is_quick else {"explain, a log of this key": at_most(1.0)}
    figures = [figure(name, "s", took[name], target=targets.get(name)) for name in took]
    conditions = {
        "records_of_the_key": records,
        "records_of_the_long_log": KEYS * records,
        "keys": KEYS,
        "rounds": rounds,
    }
    return document("explain", figures, settings=conditions, is_quick=is_quick)


def main() -> None:
    """Run the benchmark and print its document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    parser.add_argument("--records", type=int, help="records of the key")
    options = parser.parse_args()
    records = options.records or (200 if options.quick else 10_000)
    rounds = options.rounds or (1 if options.quick else 5)
    with cluster(options.bootstrap_servers, BROKER) as servers:
        found = measure(servers, records=records, rounds=rounds, is_quick=options.quick)
    write_document(found, options.out)


if __name__ == "__main__":
    main()
