"""Handle records in batches: each has one partition, one claim and one commit.

    export MARSHAL_BOOTSTRAP_SERVER=localhost:9092
    python examples/batches.py payments totals worker-1

All records of a batch come from one partition and were handed out under one
token, so a batch can be stored in one transaction.
"""

import argparse
import os

from kafka_marshal import Batch, ClaimLost, Marshal

BATCH = 100


def handle(batch: Batch) -> None:
    """Stand in for one transaction that stores a whole batch."""
    size = sum(len(record.value or b"") for record in batch.records)
    print(
        f"{batch.partition}: {len(batch.records)} records, {size} bytes, offsets "
        f"{batch.first_offset} to {batch.last_offset}, token {batch.token}",
        flush=True,
    )


def main() -> None:
    """Consume until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("topic", "group", "client_id"):
        parser.add_argument(name)
    given = parser.parse_args()
    server = os.environ.get("MARSHAL_BOOTSTRAP_SERVER", "localhost:9092")
    with (
        Marshal(server, group_id=given.group, client_id=given.client_id) as marshal,
        marshal.consumer(given.topic) as consumer,
    ):
        marshal.stop_on_signals()
        for batch in consumer.batches(max_records=BATCH):
            handle(batch)
            try:
                batch.commit()
            except ClaimLost as lost:
                # The next owner starts from the last position in the log.
                print(f"lost {batch.partition}: {lost}", flush=True)


if __name__ == "__main__":
    main()
