"""One consumer of the demo, a minimal program that runs in a process of its own.

Run as ``python -m kafka_marshal_cli.demo.worker``. It writes to its journal when it is
ready, begins when it reads a line from standard input, and ends on SIGTERM or at the
end of standard input, so it never outlives the demo.
"""

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Consume until SIGTERM; return the exit code."""
    given = _parse(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("kafka").setLevel(logging.WARNING)
    writer = journal.JournalWriter(given.journal)
    with Marshal(
        given.bootstrap_server,
        group_id=given.group,
        client_id=given.client_id,
        state_dir=given.state_dir,
    ) as marshal:
        writer.write(journal.READY)
        if not sys.stdin.readline():
            return 0
        _consume(marshal, given, writer)
    writer.write(journal.END)
    return 0


def _consume(
    marshal: Marshal, given: argparse.Namespace, writer: journal.JournalWriter
) -> None:
    def on_claimed(place: TopicPartition, token: Token) -> None:
        writer.write(journal.CLAIMED, place.partition, token=str(token))

    def on_lost(place: TopicPartition, ending: object) -> None:
        reason = str(getattr(ending, "reason", ending))
        writer.write(journal.LOST, place.partition, note=reason)

    with marshal.consumer(
        given.topic,
        delivery=Delivery(given.delivery),
        max_poll_records=given.batch,
        # A crash may lose exactly one batch, which the verdict checks.
        max_granted_batches=1,
        on_claimed=on_claimed,
        on_lost=on_lost,
    ) as consumer:
        marshal.stop_on_signals((signal.SIGTERM,))
        _call_at_end_of_input(consumer.stop)
        # At most once, the grant was the commit.
        is_alo = given.delivery == Delivery.AT_LEAST_ONCE.value
        commit = consumer.commit if is_alo else None
        for batch in consumer.batches():
            try:
                _handle(batch, writer, work_s=given.work_ms / 1000, commit=commit)
            except ClaimLost as lost:
                # The next owner continues from the last accepted position.
                place = batch.partition.partition
                writer.write(journal.LOST, place, note=lost.reason)


def _handle(
    batch: Batch,
    writer: journal.JournalWriter,
    *,
    work_s: float,
    commit: Callable[[Record], None] | None,
) -> None:
    """Process one batch: the work is a sleep, its effect a journal line."""
    partition, token = batch.partition.partition, str(batch.token)
    writer.write(
        journal.BATCH,
        partition,
        offset=batch.first_offset,
        last=batch.last_offset,
        token=token,
    )
    for record in batch.records:
        time.sleep(work_s)
        text = (record.value or b"").decode(errors="replace")
        writer.write(
            journal.RECORD, partition, offset=record.offset, token=token, note=text
        )
        if commit is not None:
            commit(record)


def _call_at_end_of_input(stop: Callable[[], None]) -> None:
    def wait() -> None:
        while sys.stdin.readline():
            pass
        stop()

    threading.Thread(target=wait, name="watch-parent", daemon=True).start()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("bootstrap-server", "group", "client-id", "topic"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument(
        "--delivery", required=True, choices=[each.value for each in Delivery]
    )
    parser.add_argument("--journal", required=True, type=Path)
    parser.add_argument("--state-dir", required=True, type=Path)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--work-ms", type=float, default=3.0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
