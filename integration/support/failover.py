"""How long brokers themselves take to replace a leader, partition by partition.

Two times are measured from a kill on: when a running broker names a new leader for
every partition, and when each partition of the coordination topic acknowledges a record
on all in-sync replicas. Every reader ignores these records (PROTOCOL 1.5), one in
100 ms for each partition. `stream` measures the same for data partitions.

With its default settings librdkafka would find new leaders late, so this client
requests metadata in each round.
"""

import threading
from collections.abc import Iterable
from contextlib import suppress

from confluent_kafka import KafkaException, Producer
from waiting import wall_ms

TURN_S = 0.1
SENT_S = 0.001
ANSWER_S = 0.5
FIRST_S = 30.0
LONGEST_MS = 120_000
KNOCK = b"knock"


class Failover:
    """Watches one election after the other, each on a thread of its own.

    Args:
        servers: The brokers.
        log: The coordination topic.
        topics: All topics whose leaders count.
    """

    def __init__(self, servers: str, log: str, topics: Iterable[str]) -> None:
        self._servers = servers
        self._log = log
        self._topics = sorted({log, *topics})
        # Two producers: a request for metadata would wait behind pending writes.
        self._looker: Producer | None = None
        self._knocker: Producer | None = None
        self._numbers: list[int] = []
        self._taken: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._took_ms: int | None = None

    def watch(self, victim: int) -> None:
        """Begin to measure; called right before a broker is killed."""
        if self._looker is None:
            common = {"bootstrap.servers": self._servers, "log_level": 0}
            self._looker = Producer(common)
            self._knocker = Producer(common | {"enable.idempotence": True})
            self._numbers = sorted(self._look(FIRST_S)[self._log])
        since_ms = wall_ms()
        self._took_ms = None
        self._taken = {}
        self._thread = threading.Thread(
            target=self._go, args=(victim, since_ms), name="failover", daemon=True
        )
        self._thread.start()

    def took_ms(self) -> int:
        """Return how long the replacement took, once it is complete."""
        assert self._thread is not None
        self._thread.join(LONGEST_MS / 1000)
        assert self._took_ms is not None, "no new leaders, or none that takes records"
        return self._took_ms

    def _go(self, victim: int, since_ms: int) -> None:
        named_ms = None
        while wall_ms() < since_ms + LONGEST_MS:
            for number in self._numbers:
                self._knocker.produce(
                    self._log, KNOCK, partition=number, on_delivery=self._note
                )
            with suppress(KafkaException):
                self._knocker.list_topics(self._log, timeout=SENT_S)
            self._knocker.poll(TURN_S)
            if named_ms is None and self._are_replaced(victim):
                named_ms = wall_ms()
                # Earlier records may have been acknowledged by the old leader.
                self._taken.clear()
            if named_ms is not None and self._taken.keys() == set(self._numbers):
                self._took_ms = max(named_ms, *self._taken.values()) - since_ms
                self._knocker.flush(ANSWER_S)
                return

    def _note(self, error, message) -> None:
        if error is None:
            self._taken.setdefault(message.partition(), wall_ms())

    def _are_replaced(self, victim: int) -> bool:
        try:
            found = self._look(ANSWER_S)
        except KafkaException:
            return False
        leaders = {leader for each in found.values() for leader in each.values()}
        return not leaders & {victim, -1}

    def _look(self, timeout_s: float) -> dict[str, dict[int, int]]:
        found = self._looker.list_topics(timeout=timeout_s).topics
        return {
            topic: {n: each.leader for n, each in found[topic].partitions.items()}
            for topic in self._topics
        }

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(LONGEST_MS / 1000)
        if self._knocker is not None:
            self._knocker.purge()
