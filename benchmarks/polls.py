"""How fast the consumer hands out in other ways than by polls and batches of 500.

In polls of one and of 5,000; record by record, with a commit of each and of each 500th.
*held* is at least once, but holds as many records before it accesses them as at most
once does: records must be fetched before a grant is requested, however fast grants are.
All sides read records of 1 KB, as in ``consume``.

Finally a distant broker: a link delays all that it sends. A batch should take as long
as its handler or its fetch, whichever is longer, but not as long as both together.
"""

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from consume import (
    GIVE_UP_S,
    NAMES,
    PARTITIONS,
    POLL_MS,
    POLL_RECORDS,
    Beside,
    Side,
    Stopwatch,
    bare_fast,
    bare_python,
    batches_ours,
    compare,
    format_and_fill,
    ours,
    poll_bare_fast,
    poll_bare_python,
    poll_ours,
)
from support import (
    arguments,
    at_most,
    broker_argument,
    cluster,
    document,
    figure,
    show_figures,
    write_document,
)

from kafka_marshal import Batch, Delivery, Marshal
from kafka_marshal.config import ConsumerConfig
from kafka_marshal.testing.broker import EmbeddedBroker
from simulator.slowlink import SlowLink

# Records that a side reads in a round: in polls of 5,000 (many), in polls of one (one),
# by iteration (each).
LOADS = {
    "fast": {"many": 2_000_000, "one": 400_000, "each": 1_000_000},
    "kafka-python": {"many": 200_000, "one": 20_000, "each": 200_000},
}
QUICK = {"many": 5_000, "one": 2_000, "each": 5_000}
FAR_MS = 100
FAR_RECORDS, FAR_RECORDS_QUICK = 8_000, 2_000


def iterate_bare_fast(servers: str, topic: str, *, watch: Stopwatch) -> None:
    """Read message by message, with bare confluent-kafka."""
    with bare_fast(servers, topic) as consumer:
        while True:
            message = consumer.poll(POLL_MS / 1000)
            if message is not None:
                message.value()
                message.offset()
            if not watch.note(0 if message is None else 1):
                return


def iterate_bare_python(servers: str, topic: str, *, watch: Stopwatch) -> None:
    """Read message by message, with bare kafka-python."""
    with bare_python(servers, topic) as consumer:
        for message in consumer:
            message.value  # noqa: B018
            message.offset  # noqa: B018
            if not watch.note(1):
                return


def held_ours(
    servers: str, topic: str, *, transport: str, watch: Stopwatch, size: int
) -> None:
    """Read in batches at least once, and access each as late as at most once does.

    Requests no grants and waits for none, but holds as many records as at most once
    fetches ahead of their grants.
    """
    config = ConsumerConfig(topics=(topic,))
    most = max(config.max_fetched, size * config.max_granted_batches)
    settings = {"max_poll_records": size, "max_uncommitted": 2 * most}
    held: deque[Batch] = deque()
    count = 0
    with ours(servers, topic, transport, **settings) as consumer:
        for fetched in consumer.batches():
            held.append(fetched)
            count += len(fetched.records)
            while count > most:
                batch = held.popleft()
                count -= len(batch.records)
                for record in batch.records:
                    record.value  # noqa: B018
                    record.offset  # noqa: B018
                batch.commit()
            # Once it holds that many, it accesses as many as it fetches: count these.
            if not watch.note(len(fetched.records)):
                return


def iterate_ours(
    servers: str, topic: str, *, transport: str, commits: bool, watch: Stopwatch
) -> None:
    """Read record by record, and commit each of them or only some."""
    with ours(servers, topic, transport, max_poll_records=POLL_RECORDS) as consumer:
        for number, record in enumerate(consumer, 1):
            record.value  # noqa: B018
            record.offset  # noqa: B018
            if commits:
                consumer.commit(record)
            elif number % POLL_RECORDS == 0:
                consumer.commit()
            if not watch.note(1):
                return


def handled_far_away(
    servers: str, topic: str, *, records: int, transport: str, handle_s: float
) -> float:
    """Return the seconds per 500 records, with a handler that takes ``handle_s``.

    Reads three quarters of the records in the topic.
    """
    group = f"far-{time.time_ns()}"
    with (
        Marshal(
            servers, group_id=group, client_id="one", state_dir="", transport=transport
        ) as marshal,
        marshal.consumer(topic) as consumer,
    ):
        began, before, count = 0.0, 0, 0
        late = time.monotonic() + GIVE_UP_S
        while count < records * 3 // 4 and time.monotonic() < late:
            polled = sum(map(len, consumer.poll(POLL_MS).values()))
            count += polled
            time.sleep(handle_s * polled / POLL_RECORDS)
            consumer.commit()
            if count >= records // 4 and not before:
                # By now the reader has adapted to the link.
                began, before = time.perf_counter(), count
        return (time.perf_counter() - began) / (count - before) * POLL_RECORDS


def far_away(
    transports: Sequence[str], *, records: int, rounds: int
) -> list[dict[str, Any]]:
    """Compare the time of a batch with the longer one of handling and fetching it."""
    link = SlowLink(delay_ms=FAR_MS)
    listeners = {"advertised.listeners": f"PLAINTEXT://{link.address}"}
    figures = []
    with link, EmbeddedBroker(properties=listeners) as broker:
        link.lead_to(broker.bootstrap_servers)
        topic = format_and_fill(link.address, records, partitions=1)
        for transport in transports:
            run = partial(
                handled_far_away,
                link.address,
                topic,
                records=records,
                transport=transport,
            )
            beside: dict[str, list[float]] = {"quick": [], "even": [], "slow": []}
            for _ in range(rounds):
                fetch_s = run(handle_s=0.0)
                for name, factor in (("quick", 0.5), ("even", 1.0), ("slow", 2.0)):
                    handle_s = factor * fetch_s
                    took_s = run(handle_s=handle_s)
                    beside[name].append(took_s / max(handle_s, fetch_s))
            figures += [
                figure(
                    f"{NAMES[transport]}, {FAR_MS} ms away, {name} handler: time of a "
                    "batch beside the larger of handling and fetching",
                    "ratio",
                    samples,
                    target=at_most(1.2),
                )
                for name, samples in beside.items()
            ]
    show_figures(figures)
    return figures


# --- measuring


def measure(
    servers: str, topic: str, transport: str, *, is_quick: bool, rounds: int
) -> list[dict[str, Any]]:
    """Return the figures of one transport."""
    load = QUICK if is_quick else LOADS[transport]
    is_fast = transport == "fast"
    bare: dict[str, Any] = {"servers": servers, "topic": topic}
    our = {**bare, "transport": transport}
    if is_fast:
        name, poll_bare = "tuned", partial(poll_bare_fast, **bare, is_tuned=True)
    else:
        name, poll_bare = "bare", partial(poll_bare_python, **bare)
    figures = []
    for size, wanted in ((5_000, load["many"]), (1, load["one"])):
        figures += compare(
            f"{NAMES[transport]}, polls of {size}",
            {
                name: Side(partial(poll_bare, size=size), wanted),
                "poll": Side(partial(poll_ours, **our, size=size), wanted),
            },
            pairs=[Beside(name="poll", peer=name)],
            rounds=rounds,
        )
    iterate_bare = iterate_bare_fast if is_fast else iterate_bare_python
    figures += compare(
        f"{NAMES[transport]}, record by record",
        {
            "bare": Side(partial(iterate_bare, **bare), load["each"]),
            "commit": Side(partial(iterate_ours, **our, commits=True), load["each"]),
            "iteration": Side(
                partial(iterate_ours, **our, commits=False), load["each"]
            ),
        },
        pairs=[Beside(name=each, peer="bare") for each in ("commit", "iteration")],
        rounds=rounds,
    )
    amo = partial(batches_ours, **our, delivery=Delivery.AT_MOST_ONCE, size=5_000)
    figures += compare(
        f"{NAMES[transport]}, batches of 5000",
        {
            "alo": Side(partial(batches_ours, **our, size=5_000), load["many"]),
            "amo": Side(amo, load["many"]),
            "held": Side(partial(held_ours, **our, size=5_000), load["many"]),
        },
        pairs=[Beside(name=each, peer="alo") for each in ("amo", "held")],
        rounds=rounds,
    )
    return figures


def main() -> None:
    """Run it all and print one document."""
    parser = arguments(__doc__ or "")
    broker_argument(parser)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    figures: list[dict[str, Any]] = []
    with cluster(options.bootstrap_servers) as servers:
        stored = QUICK if options.quick else LOADS["fast"]
        topic = format_and_fill(servers, stored["many"], partitions=PARTITIONS)
        for transport in NAMES:
            figures += measure(
                servers, topic, transport, is_quick=options.quick, rounds=rounds
            )
    records = FAR_RECORDS_QUICK if options.quick else FAR_RECORDS
    figures += far_away(list(NAMES), records=records, rounds=max(1, rounds // 2))
    settings = {"partitions": PARTITIONS, "rounds": rounds, "delay_ms": FAR_MS}
    made = document("polls", figures, settings=settings, is_quick=options.quick)
    write_document(made, options.out)


if __name__ == "__main__":
    main()
