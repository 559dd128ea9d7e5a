"""The interface that conformance checks use, with helpers to wait and read."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kafka_marshal.deadline import Deadline
from kafka_marshal.ports import CoordinationLog, DataLog, DataReader, Record
from kafka_marshal.protocol.types import LogEntry, TopicPartition

WAIT_S = 60
POLL_MS = 200
TIMEOUT_MS = 30_000
# A wait may be late by a scheduling delay and one response of the broker.
LATE_S = 8.0


class Rig(Protocol):
    """The interface of an implementation that the checks use.

    Attributes:
        waits: Whether an empty poll waits in real time (not with virtual time).
        coordination_topic: A fresh coordination topic with three partitions.
    """

    waits: bool
    coordination_topic: str

    def coordination_log(self) -> CoordinationLog:
        """Return a new session with the coordination topic."""
        ...

    def data_log(self) -> DataLog:
        """Return a new session for data topics and group offsets."""
        ...

    def new_data_topic(self, partitions: int) -> str:
        """Create a data topic and return its name."""
        ...

    def new_group(self) -> str:
        """Return an unused group id."""
        ...

    def add_partitions(self, topic: str, count: int) -> None:
        """Add ``count`` partitions to a topic."""
        ...

    def recreate_topic(self, topic: str, partitions: int) -> None:
        """Delete a data topic and create it again, empty, with another topic id."""
        ...

    def delete_records(self, place: TopicPartition, *, before: int) -> None:
        """Delete the records of a partition below an offset."""
        ...

    def write(
        self,
        place: TopicPartition,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: tuple[tuple[str, bytes], ...] = (),
        timestamp_ms: int | None = None,
    ) -> int:
        """Write a record as a client outside the protocol; return its offset."""
        ...

    def begin_transaction(
        self, place: TopicPartition, values: Sequence[bytes]
    ) -> "EndTransaction":
        """Write records in a transaction; return the function that ends it."""
        ...


class EndTransaction(Protocol):
    """Commits or aborts an open transaction."""

    def __call__(self, *, is_committed: bool) -> None:
        """End the transaction."""
        ...


Check = Callable[[Rig], None]
Entries = list[tuple[int, LogEntry]]


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a deadline."""
    deadline = Deadline(WAIT_S * 1_000)
    while not condition():
        assert not deadline.is_over, f"never came true: {what}"
        time.sleep(0.005)


def read_entries(log: CoordinationLog, count: int) -> Entries:
    """Read exactly ``count`` entries."""
    found: Entries = []

    def has_all() -> bool:
        found.extend(log.poll(POLL_MS))
        return len(found) >= count

    until(has_all, f"{count} entries read")
    assert len(found) == count
    return found


def values_of(entries: Entries, partition: int) -> list[bytes | None]:
    """Return the values of one partition's entries."""
    return [entry.value for number, entry in entries if number == partition]


def read_records(reader: DataReader, count: int, *, at_once: int = 100) -> list[Record]:
    """Read exactly ``count`` records."""
    found: list[Record] = []

    def has_all() -> bool:
        for records in reader.poll(POLL_MS, at_once).values():
            found.extend(records)
        return len(found) >= count

    until(has_all, f"{count} records read")
    assert len(found) == count
    return found


def filled(rig: Rig, counts: Sequence[int]) -> list[TopicPartition]:
    """Create a data topic with the given number of records in each partition."""
    topic = rig.new_data_topic(len(counts))
    places = [TopicPartition(topic, number) for number in range(len(counts))]
    for place, count in zip(places, counts, strict=True):
        for number in range(count):
            rig.write(place, b"%d" % number)
    return places
