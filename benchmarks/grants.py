"""How long a Spark task waits for its offsets, and for the newest token of its key.

One process holds the partitions of a topic at most once; the log also has claims of
other groups. Another process does what a task on a Spark executor does: it requests
ranges of offsets under a claim, and looks up whether the claim is the newest. It uses
the log, which it follows itself, and the sidecar of its host, in turns; both are
connected before.
"""

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from audit import write
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
    write_document,
)

from kafka_marshal import Delivery, Marshal
from kafka_marshal.grants import ClaimRef, GrantClient, open_grant_client
from kafka_marshal.protocol.types import OffsetRange
from kafka_marshal.testing.producing import Producing, create_topic

H_MS = 10_000
PARTITIONS = 8
CALL_MS = 10_000
SPAN = 10
# Number of other entries in the coordination log, and of coordinating partitions.
ENTRIES, COORDINATING = 4_000, 8

_run = uuid.uuid4().hex[:8]


def child(settings: Mapping[str, Any]) -> None:
    """Hold all partitions and print their claims; end when stdin is closed."""
    with (
        Marshal(
            settings["servers"],
            group_id="tasks",
            client_id="driver",
            coordination_topic=settings["log"],
            state_dir="",
        ) as marshal,
        marshal.consumer(settings["topic"], delivery=Delivery.AT_MOST_ONCE) as consumer,
    ):
        deadline = time.monotonic() + HANG_S
        while len(consumer.assignment()) < PARTITIONS:
            if time.monotonic() > deadline:
                sys.exit("not all partitions were claimed")
            time.sleep(0.05)
        found = []
        session = marshal._backend.session  # noqa: SLF001 - as the source does
        for key, holding in sorted(session.holdings.items()):
            claim = holding.claim
            found.append(
                {
                    "group_id": key.group_id,
                    "client_id": claim.claimant.owner.client_id,
                    "incarnation": claim.claimant.owner.incarnation.hex(),
                    "topic": key.topic,
                    "partition": key.partition,
                    "epoch": claim.epoch,
                    "token": str(claim.token),
                    "secret": claim.secret.hex(),
                }
            )
        print(json.dumps(found), flush=True)
        sys.stdin.read()


class Task:
    """Requests offsets of each partition in turn, and looks up its claim."""

    def __init__(self, claims: list[ClaimRef]) -> None:
        """Begin at the first offset."""
        self._claims = claims
        self._count = 0

    def grant(self, client: GrantClient) -> float:
        """Request a range; return the milliseconds."""
        claim = self._claims[self._count % len(self._claims)]
        first = self._count // len(self._claims) * SPAN
        self._count += 1
        began = time.perf_counter()
        verdict = client.request(
            claim, OffsetRange(first, first + SPAN - 1), timeout_ms=CALL_MS
        )
        took_ms = 1_000 * (time.perf_counter() - began)
        assert verdict.granted is not None, verdict
        return took_ms

    def look(self, client: GrantClient) -> float:
        """Look up whether a claim is the newest; return the milliseconds."""
        began = time.perf_counter()
        is_current = client.is_current(self._claims[0], timeout_ms=CALL_MS)
        took_ms = 1_000 * (time.perf_counter() - began)
        assert is_current
        return took_ms


def measure(servers: str, rounds: int) -> list[dict[str, Any]]:
    """Return the figures of both ways."""
    log, topic = f"marshal-grants-{_run}", f"data-{_run}"
    write(servers, log, records=ENTRIES, count=COORDINATING, h_ms=H_MS)
    create_topic(servers, topic, partitions=PARTITIONS)
    with Producing(servers, topic, partitions=PARTITIONS) as producing:
        producing.fill(PARTITIONS * SPAN * (4 * rounds + 10))
    settings = {"servers": servers, "log": log, "topic": topic}
    command = [sys.executable, __file__, "--child", json.dumps(settings)]
    connection = {"bootstrap_servers": servers, "coordination_topic": log}
    with (
        TemporaryDirectory() as home,
        SidecarProcess(servers, log, home=Path(home) / "host") as sidecar,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            line = process.stdout.readline()
            claims = [
                ClaimRef(**{**each, "incarnation": bytes.fromhex(each["incarnation"])})
                for each in json.loads(line)
            ]
            clients = {
                "log": open_grant_client(connection),
                "sidecar": open_grant_client(connection, sidecar=sidecar.url),
            }
            task = Task(claims)
            sides = {
                f"{kind} {name}": lambda call=call, client=client: call(client)
                for name, client in clients.items()
                for kind, call in (("grant", task.grant), ("look", task.look))
            }
            for _ in range(2):
                for side in sides.values():
                    side()
            took = alternate(sides, rounds)
            process.stdin.close()
            process.wait(HANG_S)
        finally:
            process.kill()
    figures = []
    for kind, what in (("grant", "a range of offsets"), ("look", "the newest token")):
        by_log, by_sidecar = took[f"{kind} log"], took[f"{kind} sidecar"]
        figures += [
            figure(f"{what}, by the log", "ms", by_log),
            figure(f"{what}, by the sidecar", "ms", by_sidecar),
            figure(
                f"{what}, by the sidecar beside the log",
                "ratio",
                ratios(by_sidecar, by_log),
                target=at_most(1.0),
            ),
        ]
    return figures


def main() -> None:
    """Run the benchmark and print its document."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 100)
    with cluster(options.bootstrap_servers) as servers:
        figures = measure(servers, rounds)
    settings = {
        "rounds": rounds,
        "heartbeat_interval_ms": H_MS,
        "partitions": PARTITIONS,
        "entries": ENTRIES,
    }
    write_document(
        document("grants", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
