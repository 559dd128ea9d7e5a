"""Copy a topic with a fence in the broker: a zombie's writes fail there.

    export MARSHAL_BOOTSTRAP_SERVER=localhost:9092
    python examples/kafka_sink.py payments receipts copier worker-1

Each partition has a transactional producer of its own, initialised when the
partition is claimed. The broker then refuses everything from earlier producers of
that id: a process that lost its claim and does not know it yet cannot commit.
Read the target with ``isolation_level="read_committed"``. A crash between the
transaction and the commit of the batch copies that batch again: at least once.
"""

import argparse
import os
from contextlib import closing

from kafka import KafkaProducer
from kafka.errors import KafkaError

from kafka_marshal import Batch, ClaimLost, Marshal, Token, TopicPartition

BATCH = 100


class Sink:
    """One transactional producer for each partition that is held."""

    def __init__(self, server: str, target: str, *, group: str) -> None:
        """Remember where to write."""
        self._server = server
        self._target = target
        self._group = group
        self._producers: dict[TopicPartition, KafkaProducer] = {}

    def on_claimed(self, place: TopicPartition, _token: Token) -> None:
        """Fence every earlier owner of the partition, then be ready to write."""
        self.forget(place)
        producer = KafkaProducer(
            bootstrap_servers=self._server,
            transactional_id=f"{self._group}/{place}",
            acks="all",
            enable_idempotence=True,
        )
        producer.init_transactions()
        self._producers[place] = producer

    def on_lost(self, place: TopicPartition, _ending: object) -> None:
        """Close a partition's producer."""
        self.forget(place)

    def write(self, batch: Batch) -> None:
        """Copy a batch as one transaction.

        Raises:
            KafkaError: Not written; a fenced producer can never write again.
        """
        producer = self._producers[batch.partition]
        producer.begin_transaction()
        try:
            for record in batch.records:
                producer.send(self._target, key=record.key, value=record.value)
            producer.commit_transaction()
        except KafkaError:
            self.forget(batch.partition)
            raise

    def close(self) -> None:
        """Close every producer."""
        for place in list(self._producers):
            self.forget(place)

    def forget(self, place: TopicPartition) -> None:
        """Close a partition's producer, if there is one."""
        producer = self._producers.pop(place, None)
        if producer is not None:
            producer.close(timeout=5)


def main() -> None:
    """Copy until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("topic", "target", "group", "client_id"):
        parser.add_argument(name)
    given = parser.parse_args()
    server = os.environ.get("MARSHAL_BOOTSTRAP_SERVER", "localhost:9092")
    sink = Sink(server, given.target, group=given.group)
    with (
        closing(sink),
        Marshal(server, group_id=given.group, client_id=given.client_id) as marshal,
        marshal.consumer(
            given.topic, on_claimed=sink.on_claimed, on_lost=sink.on_lost
        ) as consumer,
    ):
        marshal.stop_on_signals()
        for batch in consumer.batches(max_records=BATCH):
            try:
                sink.write(batch)
                batch.commit()
            except ClaimLost as lost:
                print(f"lost {batch.partition}: {lost}", flush=True)
                continue
            print(f"copied {len(batch.records)} of {batch.partition}", flush=True)


if __name__ == "__main__":
    main()
