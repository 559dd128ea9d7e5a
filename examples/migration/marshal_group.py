"""After: the worker of ``kafka_group.py``, with claims instead of a consumer group.

export BOOTSTRAP_SERVER=localhost:9092
python examples/migration/marshal_group.py payments billing worker-1
"""

import argparse
import os

from kafka_marshal import Ending, Marshal, Token, TopicPartition


def on_claimed(place: TopicPartition, token: Token) -> None:
    """Take the place of ``on_partitions_assigned``, one partition at a time."""
    print("got", place.topic, place.partition, token, flush=True)


def on_lost(place: TopicPartition, ending: Ending) -> None:
    """Take the place of ``on_partitions_revoked``, one partition at a time."""
    print("lost", place.topic, place.partition, ending.reason, flush=True)


def main() -> None:
    """Process records until none arrives for ``--idle-ms``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("group")
    parser.add_argument("client_id")
    parser.add_argument("--max-records", type=int, default=1_000_000)
    parser.add_argument("--idle-ms", type=int, default=5_000)
    options = parser.parse_args()
    marshal = Marshal(
        os.environ.get("BOOTSTRAP_SERVER", "localhost:9092"),
        group_id=options.group,
        client_id=options.client_id,
        coordination_topic=os.environ.get("MARSHAL_COORDINATION_TOPIC", "__marshal"),
    )
    left = options.max_records
    with marshal:
        consumer = marshal.consumer(
            options.topic,
            auto_offset_reset="earliest",
            max_poll_records=10,
            on_claimed=on_claimed,
            on_lost=on_lost,
        )
        while left > 0:
            batches = consumer.poll(timeout_ms=options.idle_ms)
            if not batches:
                break
            for records in batches.values():
                for record in records:
                    print("done", record.partition, record.offset, flush=True)
                    left -= 1
            consumer.commit()


if __name__ == "__main__":
    main()
