"""Before: a worker of an ordinary consumer group, with kafka-python.

    export BOOTSTRAP_SERVER=localhost:9092
    python examples/migration/kafka_group.py payments billing

``marshal_group.py`` in this folder is the same worker after the migration;
docs/MIGRATION.md explains how to migrate, and how to go back.
"""

import argparse
import os

from kafka import ConsumerRebalanceListener, KafkaConsumer, TopicPartition


class Report(ConsumerRebalanceListener):  # type: ignore[misc] # it has no types
    """Prints the partitions that are assigned and revoked."""

    def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """Print the revoked partitions: all, whenever a member joins or leaves."""
        for place in revoked:
            print("lost", place.topic, place.partition, flush=True)

    def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        """Print the assigned partitions."""
        for place in assigned:
            print("got", place.topic, place.partition, flush=True)


def main() -> None:
    """Process records until none arrives for ``--idle-ms``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("group")
    parser.add_argument("--max-records", type=int, default=1_000_000)
    parser.add_argument("--idle-ms", type=int, default=5_000)
    options = parser.parse_args()
    consumer = KafkaConsumer(
        bootstrap_servers=os.environ.get("BOOTSTRAP_SERVER", "localhost:9092"),
        group_id=options.group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        max_poll_records=10,
    )
    # Load metadata first: a group leader that does not know the topic assigns nothing.
    consumer.partitions_for_topic(options.topic)
    consumer.subscribe([options.topic], listener=Report())
    left = options.max_records
    try:
        while left > 0:
            batches = consumer.poll(timeout_ms=options.idle_ms)
            if not batches:
                break
            for records in batches.values():
                for record in records:
                    print("done", record.partition, record.offset, flush=True)
                    left -= 1
            consumer.commit()
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
