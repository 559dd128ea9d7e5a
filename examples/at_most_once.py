"""Send notices at most once: a missing notice is better than one sent twice.

    export MARSHAL_BOOTSTRAP_SERVER=localhost:9092
    python examples/at_most_once.py notices notifier worker-1

The log grants a range of offsets to this process *before* any of its records is
handed out, and never grants it to another process. That grant is the commit, so
there is nothing to commit afterwards. A crash loses records that were granted and
not yet processed: in each partition at most ``max_granted_batches`` batches of
``max_poll_records`` records. ``marshal grants losses`` lists their offsets.
"""

import argparse
import os

from kafka_marshal import Delivery, Marshal, Record

BATCH = 20


def notify(record: Record) -> None:
    """Stand in for work that must not be done twice, such as sending a message."""
    text = (record.value or b"").decode(errors="replace")
    print(f"notify {record.partition}/{record.offset} {text!r}", flush=True)


def main() -> None:
    """Consume until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("topic", "group", "client_id"):
        parser.add_argument(name)
    given = parser.parse_args()
    server = os.environ.get("MARSHAL_BOOTSTRAP_SERVER", "localhost:9092")
    with (
        Marshal(server, group_id=given.group, client_id=given.client_id) as marshal,
        marshal.consumer(
            given.topic, delivery=Delivery.AT_MOST_ONCE, max_poll_records=BATCH
        ) as consumer,
    ):
        marshal.stop_on_signals()
        for record in consumer:
            notify(record)


if __name__ == "__main__":
    main()
