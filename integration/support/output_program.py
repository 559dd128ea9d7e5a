"""A process that copies a topic in transactions, and is stopped at one moment.

Run as ``python output_program.py SETTINGS``, settings being one JSON object; see
``integration/test_output_kills.py``. At the moment it reports so, and continues when a
line arrives on its standard input.
"""

import json
import sys
from types import SimpleNamespace

from kafka import TopicPartition as Place
from kafka.structs import OffsetAndMetadata

from kafka_marshal import Marshal
from kafka_marshal.kafka_io.fast.transactions import Transactions
from kafka_marshal.kafka_io.faults import Access
from kafka_marshal.kafka_io.transactions import KafkaTransactions

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


class Stopping:
    """A producer that stops at moments, and may have a fault."""

    stops: Stops
    fault: str | None
    client_id: str

    def __init__(self, given, transactional_id, **rest):
        self.stops.reach("before opening")
        if self.fault == "no fence":
            transactional_id += f"/{self.client_id}"
        super().__init__(given, transactional_id, **rest)  # type: ignore[call-arg]
        self.stops.reach("opened")

    def progress(self, partition, **rest):
        found = super().progress(partition, **rest)
        return None if self.fault == "no progress" else found


class StoppingPlain(Stopping, KafkaTransactions):
    """One of kafka-python."""

    def _add_partitions(self, places, **rest):
        self.stops.reach("before begin")
        super()._add_partitions(places, **rest)

    def _keep(self, progress, partition, deadline):
        self.stops.reach("sent")
        if self.fault == "progress outside":
            self._admin.call(
                lambda admin: admin.alter_group_offsets(
                    self._group_id,
                    {Place(*partition): OffsetAndMetadata(*progress, -1)},
                ),
                doing="Committing",
                access=Access.WRITE,
                timeout_ms=FLUSH_S * 1000,
            )
        else:
            super()._keep(progress, partition, deadline)
        self.stops.reach("marked")

    def _end(self, *, is_committed, **rest):
        super()._end(is_committed=is_committed, **rest)
        if is_committed:
            self.stops.reach("committed")


class StoppingFast(Stopping, Transactions):
    """One of librdkafka."""

    def __init__(self, given, transactional_id, **rest):
        super().__init__(given, transactional_id, **rest)
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
        plain.commit_transaction(timeout_s)
        self.stops.reach("committed")


def main(settings: dict) -> None:
    from kafka_marshal.kafka_io import transactions as plain
    from kafka_marshal.kafka_io.fast import transactions as fast

    Stopping.stops = Stops(settings["moment"], settings["after"])
    Stopping.fault = settings["fault"]
    Stopping.client_id = settings["client_id"]
    plain.KafkaTransactions = StoppingPlain
    fast.Transactions = StoppingFast
    with (
        Marshal(
            settings["servers"],
            group_id=settings["group"],
            client_id=settings["client_id"],
            coordination_topic=settings["coordination_topic"],
            sidecar=settings["sidecar"],
            state_dir="",
            transport=settings["transport"],
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
