"""The Go original's own example program, as it looks here: ten workers, one claim set.

    export BOOTSTRAP_SERVER=localhost:9092
    python examples/migration/go_original.py some-topic example-group example-client

Messages go to whichever worker is free and are committed in whatever order they are
done; the position moves over what is done without a gap, as in the original.
"""

import argparse
import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from kafka_marshal import Consumer, Marshal, Record

WORKERS = 10
UNDER_WAY_MAX = 100


def work(consumer: Consumer, record: Record) -> None:
    """Process one message on a worker's thread, and commit it there."""
    # One string in one call, so that ten threads do not mix their words.
    print(f"done {record.partition} {record.offset}\n", end="", flush=True)
    consumer.commit(record)


def main() -> None:
    """Process records until none came for a while."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("group")
    parser.add_argument("client_id")
    parser.add_argument("--idle-ms", type=int, default=5_000)
    options = parser.parse_args()
    # The original: NewMarshaler with client, group and brokers, and a deferred
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
        # The original: NewConsumer with GreedyClaims.
        consumer = marshal.consumer(
            options.topic, policy="greedy", consumer_timeout_ms=options.idle_ms
        )
        # The original: messages from ConsumeChannel, to whichever worker is free.
        under_way: set[Future[None]] = set()
        for record in consumer:
            under_way.add(pool.submit(work, consumer, record))
            if len(under_way) >= UNDER_WAY_MAX:
                done, under_way = wait(under_way, 60, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result(0)  # raises what the worker raised
        for each in under_way:
            each.result(60)


if __name__ == "__main__":
    main()
