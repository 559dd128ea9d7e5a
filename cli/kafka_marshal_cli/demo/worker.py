"""One consumer of the demo, a minimal program that runs in a process of its own.

Run as ``python -m kafka_marshal_cli.demo.worker``, with its settings as JSON. It writes
to its journal when it is ready, begins when it reads a line from standard input, and
ends on SIGTERM or at the end of standard input, so it never outlives the demo.
"""

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kafka_marshal import (
    Batch,
    ClaimLost,
    Delivery,
    Marshal,
    Record,
    Token,
    TopicPartition,
)
from kafka_marshal_cli.demo import journal
from kafka_marshal_cli.demo.journal import Line


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a worker.

    Attributes:
        bootstrap_servers: Addresses of the cluster.
        group_id: Its group.
        client_id: Its name, also that of its journal.
        topic: Data topic.
        delivery: The guarantee.
        batch: Most records of a batch.
        work_ms: How long it works on a record.
        folder: Folder of journals, logs and identities.
    """

    bootstrap_servers: str
    group_id: str
    client_id: str
    topic: str
    delivery: Delivery
    batch: int
    work_ms: float
    folder: str

    @property
    def journal_path(self) -> Path:
        """Path of its journal."""
        return Path(self.folder, f"{self.client_id}.journal")


def main(argument: str) -> int:
    """Consume until SIGTERM; return the exit code."""
    given = msgspec.json.decode(argument, type=WorkerSettings)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("kafka").setLevel(logging.WARNING)
    writer = journal.JournalWriter(given.journal_path)
    with Marshal(
        given.bootstrap_servers,
        group_id=given.group_id,
        client_id=given.client_id,
        state_dir=Path(given.folder, "state"),
    ) as marshal:
        writer.write(Line(kind=journal.READY))
        if not sys.stdin.readline():
            return 0
        _consume(marshal, given, writer)
    writer.write(Line(kind=journal.END))
    return 0


def _consume(
    marshal: Marshal, given: WorkerSettings, writer: journal.JournalWriter
) -> None:
    def on_claimed(place: TopicPartition, token: Token) -> None:
        line = Line(kind=journal.CLAIMED, partition=place.partition, token=str(token))
        writer.write(line)

    def on_lost(place: TopicPartition, ending: object) -> None:
        reason = str(getattr(ending, "reason", ending))
        line = Line(kind=journal.LOST, partition=place.partition, note=reason)
        writer.write(line)

    with marshal.consumer(
        given.topic,
        delivery=given.delivery,
        max_poll_records=given.batch,
        # A crash may lose exactly one batch, which the verdict checks.
        max_granted_batches=1,
        on_claimed=on_claimed,
        on_lost=on_lost,
    ) as consumer:
        marshal.stop_on_signals((signal.SIGTERM,))
        _call_at_end_of_input(consumer.stop)
        # With delivery at most once, the grant was the commit.
        is_alo = given.delivery is Delivery.AT_LEAST_ONCE
        commit = consumer.commit if is_alo else None
        for batch in consumer.batches():
            try:
                _handle(batch, writer, work_s=given.work_ms / 1000, commit=commit)
            except ClaimLost as lost:
                # The next owner continues from the last accepted position.
                on_lost(batch.partition, lost)


def _handle(
    batch: Batch,
    writer: journal.JournalWriter,
    *,
    work_s: float,
    commit: Callable[[Record], None] | None,
) -> None:
    """Process one batch: the work is a sleep, its effect a journal line."""
    partition, token = batch.partition.partition, str(batch.token)
    begun = Line(
        kind=journal.BATCH,
        partition=partition,
        offset=batch.first_offset,
        last=batch.last_offset,
        token=token,
    )
    writer.write(begun)
    for record in batch.records:
        time.sleep(work_s)
        text = (record.value or b"").decode(errors="replace")
        done = Line(
            kind=journal.RECORD,
            partition=partition,
            offset=record.offset,
            token=token,
            note=text,
        )
        writer.write(done)
        if commit is not None:
            commit(record)


def _call_at_end_of_input(stop: Callable[[], None]) -> None:
    def wait() -> None:
        while sys.stdin.readline():
            pass
        stop()

    threading.Thread(target=wait, name="watch-parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
