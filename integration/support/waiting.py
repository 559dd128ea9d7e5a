"""Bounded waits on conditions."""

import time
from collections.abc import Callable
from typing import TypeVar

from kafka import KafkaConsumer
from slowness import until

from kafka_marshal import Consumer, Record

T = TypeVar("T")

LOOK_INTERVAL_S = 0.02
# Generous: a wait ends as soon as its condition holds, so only failures pay.
WAIT_MS = 60_000


def eventually(condition: Callable[[], T], what: str, timeout_ms: int = WAIT_MS) -> T:
    """Return what ``condition`` returns as soon as it is true.

    Raises:
        AssertionError: Not within the time.
    """
    return until(condition, what, timeout_s=timeout_ms / 1000, pause_s=LOOK_INTERVAL_S)


def wall_ms() -> int:
    """Return wall time in epoch milliseconds."""
    return time.time_ns() // 1_000_000


def poll_all(consumer: Consumer, count: int) -> list[Record]:
    """Return at least ``count`` records of a consumer, polled until they are there."""
    found: list[Record] = []

    def look() -> bool:
        for records in consumer.poll(timeout_ms=200).values():
            found.extend(records)
        return len(found) >= count

    eventually(look, f"{count} records")
    return found


def read_out(consumer: Consumer, count: int) -> list[Record]:
    """Return the records of a consumer with a ``consumer_timeout_ms``.

    They are at least ``count``: a timeout before that does not end the wait, because on
    a busy machine it may take long to win a claim.
    """
    found: list[Record] = []

    def look() -> bool:
        found.extend(consumer)
        return len(found) >= count

    eventually(look, f"{count} records")
    return found


def subscribed(topic: str, **options: object) -> KafkaConsumer:
    """Return an ordinary consumer of a group, which knows its topic before it joins.

    As the leader it would otherwise assign nothing; and if it learns of the topic at
    that moment, it never checks again.
    """
    consumer = KafkaConsumer(**options)
    eventually(lambda: consumer.partitions_for_topic(topic), f"{topic} is known")
    consumer.subscribe([topic])
    return consumer
