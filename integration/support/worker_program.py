"""A consumer in a process of its own that writes down everything it does.

Run as ``python worker_program.py SETTINGS``, settings being one JSON object; see
``fleet.Worker``. Every line goes out in one write, so that a kill leaves whole
lines. Processing a record *is* writing its line: what a real worker would do to
the world outside.
"""

import json
import os
import signal
import socket
import sys
import time

from worker_notes import Noting

from kafka_marshal import ClaimLost, Delivery, Marshal, MarshalError, runtime
from kafka_marshal.engine import snapshotter
from kafka_marshal.ports import Observer

PLAIN = (str, int, float, bool, type(None))


class Pen:
    """Writes lines to the journal."""

    def __init__(self, path: str, client_id: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._client_id = client_id

    def write(self, event: str, **fields: object) -> None:
        head = {
            "event": event,
            "at_ms": time.time_ns() // 1_000_000,
            "client_id": self._client_id,
            "pid": os.getpid(),
        }
        os.write(self._file, json.dumps(head | fields, default=str).encode() + b"\n")


class PenObserver(Observer):
    """Writes down every event of the engine."""

    def __init__(self, pen: Pen) -> None:
        self._pen = pen

    def observe(self, event) -> None:
        self._pen.write("observed", name=event.name, fields=dict(event.fields))


def consume(
    pen: Pen, consumer, *, handle_ms: int, commit: bool, noting: Noting | None
) -> None:
    """Handle one record after the other until stopped."""
    for record in consumer:
        place = {"topic": record.topic, "partition": record.partition}
        token = str(record.token)
        at = {"first": record.offset, "last": record.offset, "token": token}
        if noting:
            noting.handed(place, **at)
        pen.write("handled", offset=record.offset, token=token, **place)
        if noting:
            noting.done(place, **at)
        if handle_ms:
            time.sleep(handle_ms / 1000)
        if commit:
            try:
                consumer.commit(record)
            except ClaimLost as lost:
                pen.write("claim_lost", offset=record.offset, says=str(lost), **place)


def consume_batches(pen: Pen, consumer, *, handle_ms: int) -> None:
    """Handle batch after batch until stopped; ``handle_ms`` is of a batch."""
    for batch in consumer.batches():
        place = {"topic": batch.partition.topic, "partition": batch.partition.partition}
        token = str(batch.token)
        for record in batch.records:
            pen.write("handled", offset=record.offset, token=token, **place)
        if handle_ms:
            time.sleep(handle_ms / 1000)


def warming(pen: Pen, warm_ms: int | None):
    """Return an ``on_warm`` that takes ``warm_ms``, None for no callback."""
    if warm_ms is None:
        return None

    def warm(partition, position, owner) -> None:
        time.sleep(warm_ms / 1000)
        place = {"topic": partition.topic, "partition": partition.partition}
        pen.write("warmed", position=position, owner=owner, **place)

    return warm


def main() -> int:
    """Consume as the settings say; return 0 after an orderly end."""
    settings = json.loads(sys.argv[1])
    pen = Pen(settings["journal"], settings["client_id"])
    pen.write("started")
    try:
        run(settings, pen)
    except MarshalError as error:
        pen.write("failed", kind=type(error).__name__, says=str(error))
        return 3
    pen.write("ended")
    return 0


def run(settings: dict, pen: Pen) -> None:
    """Open everything, consume, close."""
    noting = Noting(settings["notes"], runtime) if settings["notes"] else None
    if settings["hostname"]:
        socket.gethostname = lambda: settings["hostname"]
    if settings["keep_ms"]:
        snapshotter.PERIOD_MS = settings["keep_ms"]

    def place_of(partition) -> dict:
        return {"topic": partition.topic, "partition": partition.partition}

    with Marshal(
        settings["servers"],
        group_id=settings["group_id"],
        client_id=settings["client_id"],
        coordination_topic=settings["coordination_topic"],
        transport=settings["transport"],
        state_dir=settings["state_dir"],
        observer=PenObserver(pen),
        sidecar=settings["sidecar"],
        mirror_offsets=settings["mirror_offsets"],
    ) as marshal:
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        consumer = marshal.consumer(
            *settings["topics"],
            delivery=Delivery(settings["delivery"]),
            policy=settings["policy"],
            claims_max=settings["claims_max"],
            max_poll_records=settings["max_poll_records"],
            max_granted_batches=settings["max_granted_batches"],
            on_claimed=lambda p, token: pen.write(
                "claimed", token=str(token), **place_of(p)
            ),
            on_warm=warming(pen, settings["warm_ms"]),
            on_lost=lambda p, ending: pen.write(
                "lost", reason=ending.reason, winner=ending.winner, **place_of(p)
            ),
        )
        pen.write("ready")
        if settings["reads"] == "batches":
            consume_batches(pen, consumer, handle_ms=settings["handle_ms"])
        else:
            consume(
                pen,
                consumer,
                handle_ms=settings["handle_ms"],
                commit=settings["commit"],
                noting=noting,
            )
        pen.write("stopping")
        marshal.close(release=settings["release"])


if __name__ == "__main__":
    sys.exit(main())
