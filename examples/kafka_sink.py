"""Copy a topic to another topic exactly once.

    export MARSHAL_BOOTSTRAP_SERVER=localhost:9092
    python examples/kafka_sink.py payments receipts copier worker-1

Output and position of a batch are written in one Kafka transaction. Start several
processes with different client ids, and kill one: another process continues where its
output ends. The broker refuses a process that has lost its claim and does not know it
yet. Read the target with ``isolation_level="read_committed"``.
"""

import argparse
import os

from kafka_marshal import Marshal

BATCH = 100


def main() -> None:
    """Copy until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("topic", "target", "group", "client_id"):
        parser.add_argument(name)
    given = parser.parse_args()
    server = os.environ.get("MARSHAL_BOOTSTRAP_SERVER", "localhost:9092")
    with (
        Marshal(server, group_id=given.group, client_id=given.client_id) as marshal,
        marshal.consumer(given.topic) as consumer,
    ):
        marshal.stop_on_signals()
        for transaction in consumer.transactions(max_records=BATCH):
            with transaction:
                for record in transaction.records:
                    transaction.send(given.target, record.value, key=record.key)
            if transaction.is_committed:
                count = len(transaction.records)
                print(f"copied {count} of {transaction.partition}", flush=True)
            else:
                print(f"lost {transaction.partition}", flush=True)


if __name__ == "__main__":
    main()
