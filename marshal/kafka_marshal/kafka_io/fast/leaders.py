"""Finds new leaders sooner than librdkafka does by itself.

Once a broker is lost, librdkafka asks once a second who leads its partitions now.
And as it lets go of a broker that an answer does not name any more, it often takes
the broker's partitions away from their new leader in the same moment, and finds that
out with the next of its looks, another second later (seen with 2.16). So whoever
polls one of its clients has it ask more often, for a while after a loss.

A cluster is not asked for long: so many times after each loss, on each client, then
librdkafka's own second holds again. Where no broker can be reached, nothing is sent.
"""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import islice

from confluent_kafka import KafkaError, KafkaException

from kafka_marshal.kafka_io.untyped import Untyped

ASK_INTERVAL_S = 0.25
# Longer than the death of a broker and of the leading controller usually takes:
# brokers' sessions last 9 s by default.
ASKED_FOR_S = 20.0
# One request each: of more topics, some are asked about each time.
TOPICS_AT_ONCE = 8
# The question is sent in this time; the answer is taken whenever it comes.
_SENT_S = 0.001
LOSSES = (
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001 - its public names
    KafkaError._TIMED_OUT,  # noqa: SLF001
    KafkaError._TRANSPORT,  # noqa: SLF001
)


class LeaderSearch:
    """When to ask for leaders, of one client. To be used by whoever polls it.

    A consumer can be asked by nobody else: its binding lets only one call go on at
    a time, and those of a thread that polls all the time come first.
    """

    __slots__ = ("_ask_at_s", "_clock_s", "_first", "_until_s")

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Begin without a loss.

        Args:
            clock_s: What time it is, in seconds.
        """
        self._clock_s = clock_s
        self._until_s = 0.0
        self._ask_at_s = 0.0
        self._first = 0

    def begin(self) -> None:
        """Take that a broker was lost."""
        self._until_s = self._clock_s() + ASKED_FOR_S

    def patience_s(self, wait_s: float) -> float:
        """Return how long to wait for records at most, so that asking goes on."""
        return min(wait_s, ASK_INTERVAL_S) if self._until_s else wait_s

    def go_on(self, handle: Untyped, topics: Collection[str]) -> None:
        """Ask who leads partitions of these topics, where that is due.

        It does not wait for answers, and costs next to nothing where no broker
        was lost of late.

        Args:
            handle: confluent-kafka's object.
            topics: The topics; few of very many are asked about each time.
        """
        if not self._until_s:
            return
        now_s = self._clock_s()
        if now_s < self._ask_at_s:
            return
        self._ask_at_s = now_s + ASK_INTERVAL_S
        if now_s >= self._until_s:
            self._until_s = 0.0
            return
        first = self._first if self._first < len(topics) else 0
        for topic in islice(topics, first, first + TOPICS_AT_ONCE):
            with suppress(KafkaException):  # late, as it has to be
                handle.list_topics(topic, timeout=_SENT_S)
        self._first = first + TOPICS_AT_ONCE
