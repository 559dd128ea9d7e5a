"""A process that copies a topic in transactions, and is stopped at one moment.

Run as ``python output_program.py SETTINGS``, settings being one JSON object; see
``integration/test_output_kills.py``. At the moment it reports so, and continues when a
line arrives on its standard input.
"""

import json
import sys
from types import SimpleNamespace

from kafka_marshal import Marshal
from kafka_marshal.kafka_io.fast.transactions import Transactions

FLUSH_S = 60


def report(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Stops:
    """Stops this process at a moment of a transaction, once.

    Args:
        moment: When, or None.
        after: Number of transactions before it.
    """

    def __init__(self, moment: str | None, after: int) -> None:
        self.moment, self.left = moment, after

    def reach(self, moment: str) -> None:
        if moment != self.moment:
            return
        self.left -= 1
        if self.left < 0:
            self.moment = None
            report(event="reached")
            sys.stdin.readline()


class Stopping(Transactions):
    """A producer that stops at moments, and may have a fault."""

    stops: Stops
    fault: str | None
    client_id: str

    def __init__(self, settings, transactional_id, **rest):
        self.stops.reach("before opening")
        if self.fault == "no fence":
            transactional_id += f"/{self.client_id}"
        super().__init__(settings, transactional_id, **rest)
        self.stops.reach("opened")
        plain = self._producer.handle
        names = [
            "produce",
            "poll",
            "list_topics",
            "init_transactions",
            "abort_transaction",
        ]
        self._producer.handle = SimpleNamespace(
            **{name: getattr(plain, name) for name in names},
            begin_transaction=lambda: self.begin(plain),
            send_offsets_to_transaction=lambda *given: self.mark(plain, *given),
            commit_transaction=lambda timeout_s: self.commit(plain, timeout_s),
        )

    def progress(self, partition):
        found = super().progress(partition)
        return None if self.fault == "no progress" else found

    def begin(self, plain):
        self.stops.reach("before begin")
        plain.begin_transaction()

    def mark(self, plain, offsets, group, timeout_s):
        plain.flush(FLUSH_S)
        self.stops.reach("sent")
        if self.fault == "progress outside":
            self._consumer.handle.commit(offsets=offsets, asynchronous=False)
        else:
            plain.send_offsets_to_transaction(offsets, group, timeout_s)
        self.stops.reach("marked")

    def commit(self, plain, timeout_s):
        self.stops.reach("before commit")
        plain.commit_transaction(timeout_s)
        self.stops.reach("committed")


def main(settings: dict) -> None:
    from kafka_marshal.kafka_io.fast import transactions

    Stopping.stops = Stops(settings["moment"], settings["after"])
    Stopping.fault = settings["fault"]
    Stopping.client_id = settings["client_id"]
    transactions.Transactions = Stopping
    with (
        Marshal(
            settings["servers"],
            group_id=settings["group"],
            client_id=settings["client_id"],
            coordination_topic=settings["coordination_topic"],
            sidecar=settings["sidecar"],
            state_dir="",
            transport="fast",
        ) as marshal,
        marshal.consumer(
            settings["topic"], max_poll_records=settings["batch"], max_handling_ms=0
        ) as consumer,
    ):
        marshal.stop_on_signals()
        for transaction in consumer.transactions():
            with transaction:
                for record in transaction.records:
                    transaction.send(settings["out"], record.value, key=record.value)
    report(event="ended")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
