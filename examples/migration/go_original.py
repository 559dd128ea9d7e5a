"""The Go original's own example program, as it looks here: ten workers, one claim set.

    export BOOTSTRAP_SERVER=localhost:9092
    python examples/migration/go_original.py some-topic example-group example-client

Messages go to whichever worker is free and are committed in whatever order they are
done; the position moves over what is done without a gap, as in the original.
"""

import argparse
import os
from concurrent.futures import Future, ThreadPoolExecutor

from kafka_marshal import Marshal, Record

WORKERS = 10


def work(record: Record) -> Record:
    """Process one message, on a worker's thread."""
    print("done", record.partition, record.offset, flush=True)
    return record


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
        under_way: set[Future[Record]] = set()
        # The original: messages from ConsumeChannel.
        for record in consumer:
            under_way.add(pool.submit(work, record))
            for done in {each for each in under_way if each.done()}:
                under_way.discard(done)
                consumer.commit(done.result(0))
        for done in under_way:
            consumer.commit(done.result(30))


if __name__ == "__main__":
    main()
