"""The example program of the Go original, translated: ten workers share one consumer.

    export BOOTSTRAP_SERVER=localhost:9092
    python examples/migration/go_original.py some-topic example-group example-client

Any free worker takes the next message, and commits it when it is processed, in any
order. As in the original, the position moves up to the first message that is not done.
"""

import argparse
import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from kafka_marshal import Consumer, Marshal, Record

WORKERS = 10
UNDER_WAY_MAX = 100


def work(consumer: Consumer, record: Record) -> None:
    """Process one message on a worker's thread, and commit it there."""
    # One string in one call, so that the threads do not mix their output.
    print(f"done {record.partition} {record.offset}\n", end="", flush=True)
    consumer.commit(record)


def main() -> None:
    """Process records until none arrives for ``--idle-ms``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("group")
    parser.add_argument("client_id")
    parser.add_argument("--idle-ms", type=int, default=5_000)
    options = parser.parse_args()
    # In the original: NewMarshaler with client, group and brokers, and a deferred
    # Terminate.
    with (
        ThreadPoolExecutor(WORKERS) as pool,
        Marshal(
            os.environ.get("BOOTSTRAP_SERVER", "localhost:9092"),
            group_id=options.group,
            client_id=options.client_id,
            coordination_topic=os.environ.get(
                "MARSHAL_COORDINATION_TOPIC", "__marshal"
            ),
        ) as marshal,
    ):
        # In the original: NewConsumer with GreedyClaims.
        consumer = marshal.consumer(
            options.topic, policy="greedy", consumer_timeout_ms=options.idle_ms
        )
        # In the original: messages from ConsumeChannel, which any free worker takes.
        under_way: set[Future[None]] = set()
        for record in consumer:
            under_way.add(pool.submit(work, consumer, record))
            if len(under_way) >= UNDER_WAY_MAX:
                done, under_way = wait(under_way, 60, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result(0)  # raises the error of the worker
        for each in under_way:
            each.result(60)


if __name__ == "__main__":
    main()
