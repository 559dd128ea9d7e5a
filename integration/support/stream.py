"""A steady stream of records, and how long the cluster alone interrupts it.

A bare producer and a bare consumer of each client library, with no part of the
product: only brokers and client libraries can delay them.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PythonPlace
from kafka.errors import KafkaError
from waiting import eventually, wall_ms

from kafka_marshal import TopicPartition as Place

INTERVAL_S = 0.05
DELIVERY_MS = 120_000
LOOK_S = 5.0
ASK_EACH = 4
ASKED_S = 0.001
# How long kafka-python's producer waits for metadata, which delays the thread's end.
MAX_BLOCK_MS = 2_000
QUICK = {"reconnect.backoff.max.ms": 500, "topic.metadata.refresh.interval.ms": 5_000}


class Stream:
    """Writes to every partition of some topics, so many records a second, and reads.

    Attributes:
        arrived: When the bare consumer saw records, wall time by partition.
        taken: When brokers acknowledged records, on all replicas, likewise.
    """

    def __init__(
        self,
        servers: str,
        places: Iterable[Place],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._interval_s = interval_s
        self._places = sorted(places)
        self.arrived: dict[Place, list[int]] = {place: [] for place in self._places}
        self.taken: dict[Place, list[int]] = {place: [] for place in self._places}
        self._failed: list[str] = []
        common = {"bootstrap.servers": servers, "log_level": 0} | QUICK
        self._producer = Producer(
            common
            | {
                "enable.idempotence": True,
                "delivery.timeout.ms": DELIVERY_MS,
                "retry.backoff.max.ms": 200,
            }
        )
        self._consumer = Consumer(
            common
            | {
                "group.id": "nobody",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=each, name="chaos-stream", daemon=True)
            for each in (self._write, self._read)
        ]

    def _write(self) -> None:
        number = 0
        while not self._is_over.wait(self._interval_s):
            for place in self._places:
                self._producer.produce(
                    place.topic,
                    b"%d" % number,
                    partition=place.partition,
                    on_delivery=self._note,
                )
            if number % ASK_EACH == 0:
                # Readers are measured, so the writer must find new leaders at once: it
                # requests metadata often.
                for topic in {place.topic for place in self._places}:
                    with suppress(KafkaException):
                        self._producer.list_topics(topic, timeout=ASKED_S)
            self._producer.poll(0)
            number += 1

    def _note(self, error, message) -> None:
        if error is not None:
            self._failed.append(str(error))
        else:
            place = Place(message.topic(), message.partition())
            self.taken[place].append(wall_ms())

    def _read(self) -> None:
        self._consumer.assign([TopicPartition(*place, 0) for place in self._places])
        while not self._is_over.is_set():
            message = self._consumer.poll(0.2)
            if message is not None and message.error() is None:
                place = Place(message.topic(), message.partition())
                self.arrived[place].append(wall_ms())

    def wait_flowing(self, since_ms: int, timeout_ms: int = 60_000) -> None:
        """Wait until every partition has delivered something written lately."""
        eventually(
            lambda: all(seen and seen[-1] > since_ms for seen in self.arrived.values()),
            "records flow in every partition",
            timeout_ms,
        )

    def stop(self) -> dict[Place, int]:
        """Stop writing; return how many records each partition has."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(LOOK_S)
        assert self._producer.flush(60) == 0, "records that nobody took"
        assert not self._failed, self._failed[:3]
        return {place: self.end(place) for place in self._places}

    def end(self, place: Place) -> int:
        """Return where a partition ends now; any partition of the cluster."""
        deadline = time.monotonic() + 30
        while True:
            try:
                _, end = self._consumer.get_watermark_offsets(
                    TopicPartition(*place), timeout=LOOK_S
                )
            except KafkaException:
                assert time.monotonic() < deadline
            else:
                return end

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(LOOK_S)
        self._producer.purge()
        self._consumer.close()


class PythonPair:
    """The same pair of kafka-python, on a topic of its own; it reads the others', too.

    Attributes:
        arrived: When its consumer saw records, wall time by partition.
    """

    def __init__(self, servers: str, own: Iterable[Place], all_: Iterable[Place]):
        self._own = sorted(own)
        self.arrived: dict[Place, list[int]] = {place: [] for place in sorted(all_)}
        common = {
            "bootstrap_servers": servers,
            "reconnect_backoff_max_ms": 500,
            "metadata_max_age_ms": 5_000,
        }
        self._producer = KafkaProducer(
            **common,
            acks="all",
            delivery_timeout_ms=DELIVERY_MS,
            max_block_ms=MAX_BLOCK_MS,
        )
        self._consumer = KafkaConsumer(
            **common, group_id=None, auto_offset_reset="earliest", fetch_max_wait_ms=100
        )
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._go, args=(each,), name="chaos-python", daemon=True
            )
            for each in (self._write, self._read)
        ]

    def _go(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            # It was closed while it still waited for brokers that are gone.
            if not self._is_over.is_set():
                raise

    def _write(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            for place in self._own:
                # Waits for metadata in vain at times: the next one may not.
                with suppress(KafkaError):
                    self._producer.send(place.topic, b"bare", partition=place.partition)

    def _read(self) -> None:
        self._consumer.assign([PythonPlace(*place) for place in self.arrived])
        while not self._is_over.is_set():
            with suppress(KafkaError):
                for place, records in self._consumer.poll(timeout_ms=200).items():
                    self.arrived[Place(*place)] += [wall_ms()] * len(records)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(LOOK_S)
        try:
            self._producer.close(timeout=1)
        except KafkaError:
            # What cannot be sent any more is of no interest, and would keep it open.
            self._producer._sender.force_close()
            with suppress(KafkaError):
                self._producer.close(timeout=1)
        with suppress(KafkaError):
            self._consumer.close(autocommit=False)


def longest_gap_ms(times: list[int], since_ms: int) -> int:
    """Return the longest interval between two events, from one moment on."""
    before = [at for at in times if at <= since_ms][-1:] or [since_ms]
    row = [*before, *(at for at in times if at > since_ms)]
    return max((two - one for one, two in pairwise(row)), default=0)
