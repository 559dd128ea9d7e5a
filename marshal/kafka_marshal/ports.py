"""What the engine needs from the world outside, as Protocols.

Two sets of implementations exist: ``kafka_io`` over a real cluster, and
``testing`` over memory with a virtual clock. One conformance kit
(``kafka_marshal.testing.conformance``) holds both to the same behaviour.
All timeouts are milliseconds; no call may outlast its timeout by more than a
scheduling delay.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import attrs
import msgspec

from kafka_marshal.errors import MarshalError
from kafka_marshal.protocol.types import LogEntry, Token, TopicPartition

READ_UNCOMMITTED = "read_uncommitted"
READ_COMMITTED = "read_committed"
ISOLATION_LEVELS = (READ_UNCOMMITTED, READ_COMMITTED)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Append(Protocol):
    """An append under way. It informs; what counts is reading the record back.

    PROTOCOL 1.4: an append that failed or timed out is *unknown*. The engine
    uses the outcome only for messages and counters.
    """

    def is_done(self) -> bool:
        """Return whether an outcome is known."""
        ...

    def offset(self) -> int | None:
        """Return the acknowledged offset, or None (not done, or failed)."""
        ...

    def error(self) -> MarshalError | None:
        """Return why the append failed, or None (not done, or succeeded)."""
        ...


class CoordinationLog(Protocol):
    """All coordinating partitions of one ``__marshal`` topic, as one session.

    ``append``, ``end_offsets`` and ``close`` may be called from any thread; the
    other calls come from one thread at a time.

    Attributes:
        topic: Name of the topic.
        topic_id: Id that it had when it was opened, None where there are none.
    """

    topic: str
    topic_id: bytes | None

    @property
    def partition_count(self) -> int:
        """Number of partitions that the topic has in Kafka (at least K)."""
        ...

    def append(self, partition: int, value: bytes) -> Append:
        """Start appending one record (null key, acks=all, idempotent, in order).

        Returns at once. Never raises for a broker's fault: the returned Append
        reports it.
        """
        ...

    def poll(self, timeout_ms: int) -> Sequence[tuple[int, LogEntry]]:
        """Return new entries of all partitions, waiting up to ``timeout_ms``.

        Entries of one partition come in offset order without omission, from
        the log's start on, or from where ``read_from`` has set it. An empty
        result is ordinary.

        Raises:
            LogTruncated: Offset or leader epoch went back in the partition that
                the error names. Raised again until ``read_from`` has set that
                one anew; the others have lost nothing.
            LogUnreadable: An entry has no leader epoch, or access is denied.
            CoordinationError: A fault that passes; poll again.
        """
        ...

    def read_from(self, offsets: Mapping[int, int]) -> None:
        """Go on reading these partitions at other offsets; the others stay.

        For whoever has kept what lies below, or begins anew. Nothing is known
        then of the entries before, so whoever needs that they are still the same
        reads one of them. Offsets are to lie within the log; one that does not is
        a LogTruncated of the next ``poll``.

        Raises:
            CoordinationError: A fault that passes; nothing has changed.
        """
        ...

    def positions(self) -> Mapping[int, int]:
        """Return the next offset that ``poll`` will look at, per partition.

        Offsets that hold no record for readers (control records) are passed.
        """
        ...

    def start_offsets(self, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offset that exists, per partition."""
        ...

    def end_offsets(self, timeout_ms: int) -> Mapping[int, int]:
        """Return the next offset to be written, per partition (a barrier).

        For any thread, also while another one polls or closes: whoever waits for
        the log's end must not wait for a poll first.
        """
        ...

    def close(self, timeout_ms: int) -> None:
        """Flush appends and let go of every resource. Idempotent."""
        ...


class TopicInfo(NamedTuple):
    """What the cluster says of one data topic."""

    partition_count: int
    topic_id: bytes | None


class WrongSetting(NamedTuple):
    """A setting of the coordination topic that breaks PROTOCOL 2.1.

    Attributes:
        setting: Its name in Kafka.
        problem: What it is, what it must be, and why.
        command: The command of Kafka's tools that mends it.
    """

    setting: str
    problem: str
    command: str


class LogRange(NamedTuple):
    """The offsets that exist: ``start <= offset < end``."""

    start: int
    end: int


class Record:
    """One record of a data topic, as it is handed to the application.

    Immutable. Two records are equal if all their fields are, whoever read them;
    they can be hashed, copied and pickled. Those that readers make look up what
    is rarely asked for when it is; ``PlainRecord`` holds everything, and is what
    a pickle comes back as. A test of a handler makes that one.
    """

    __slots__ = ()

    @property
    def topic(self) -> str:
        """Data topic."""
        raise NotImplementedError

    @property
    def partition(self) -> int:
        """Data partition."""
        raise NotImplementedError

    @property
    def offset(self) -> int:
        """Offset of this record."""
        raise NotImplementedError

    @property
    def timestamp_ms(self) -> int:
        """Timestamp in epoch milliseconds."""
        raise NotImplementedError

    @property
    def timestamp_type(self) -> int:
        """A ``TimestampType`` value."""
        raise NotImplementedError

    @property
    def key(self) -> bytes | None:
        """Key bytes or None."""
        raise NotImplementedError

    @property
    def value(self) -> bytes | None:
        """Value bytes or None."""
        raise NotImplementedError

    @property
    def headers(self) -> tuple[tuple[str, bytes], ...]:
        """Pairs of name and value; U+FFFD stands for what is no text in a name."""
        raise NotImplementedError

    @property
    def leader_epoch(self) -> int | None:
        """Leader epoch of the batch, or None."""
        raise NotImplementedError

    @property
    def token(self) -> Token | None:
        """Fencing token of the claim that it was fetched under."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return _fields(self) == _fields(other)

    def __hash__(self) -> int:
        return hash((self.topic, self.partition, self.offset))

    def __reduce__(self) -> tuple[type["Record"], tuple[object, ...]]:
        return PlainRecord, _fields(self)

    def __repr__(self) -> str:
        pairs = zip(PlainRecord.__struct_fields__, _fields(self), strict=True)
        return f"Record({', '.join(f'{name}={value!r}' for name, value in pairs)})"


class PlainRecord(Record, msgspec.Struct, frozen=True, gc=False):
    """A record that holds all its fields; see ``Record`` for their meaning."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    leader_epoch: int | None = None
    token: Token | None = None


_fields = attrgetter(*PlainRecord.__struct_fields__)


class DataReader(Protocol):
    """Fetches records of data partitions. Used by one thread at a time.

    Attributes:
        fetches_ahead: Whether it fetches on though what it has fetched is not
            taken from it yet, so that nobody need take more than is used.
    """

    fetches_ahead: bool = False

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Make this the exact set of partitions; those that stay keep their place.

        A partition that is new needs a ``seek`` before the next ``poll``.
        Buffered records of partitions that went are dropped.
        """
        ...

    def seek(
        self,
        partition: TopicPartition,
        offset: int,
        *,
        token: Token | None = None,
        topic_id: bytes | None = None,
    ) -> None:
        """Continue at ``offset``; what was buffered of the partition is dropped.

        Args:
            partition: An assigned partition.
            offset: First offset to return.
            token: What records of the partition carry from here on.
            topic_id: Kafka's id of the topic to read. Records of another topic of
                this name are never returned. None reads any topic of the name.
        """
        ...

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop fetching these until resumed; positions and buffers are kept."""
        ...

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Undo ``pause``; unknown or running partitions are left alone."""
        ...

    def poll(
        self, timeout_ms: int, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Return up to ``max_records`` records, in offset order per partition.

        Raises:
            PositionError: A partition's position is outside its log; the error
                has an attribute ``partition`` (TopicPartition). Other
                partitions are unaffected; seek before polling again.
            UnknownTopicId: No broker that was asked has the topic of the id that
                was given to ``seek``. Other partitions are unaffected; poll again.
            CoordinationError: A fault that passes; poll again.
        """
        ...

    def positions(self) -> Mapping[TopicPartition, int]:
        """Return the next offset that ``poll`` will look at, of assigned partitions.

        Everything between the last record that ``poll`` returned, or the place of
        the last ``seek``, and this offset holds no record for this reader: control
        records, records of aborted transactions under ``read_committed``, and what
        compaction removed. A partition that was never sought is absent. Asks nobody.
        """
        ...

    def ends(self) -> Mapping[TopicPartition, int]:
        """Return the log ends that fetches told of, of assigned partitions.

        An end is the next offset to be written; under ``read_committed`` it may
        be the first of an open transaction. It is as old as the last fetch, and
        a partition of which nothing was fetched yet is absent. Asks nobody.
        """
        ...

    def close(self, timeout_ms: int) -> None:
        """Let go of every resource. Idempotent."""
        ...


class DataLog(Protocol):
    """Look-ups about data topics and group offsets. Thread-safe, blocking."""

    def describe(
        self, topics: Sequence[str], timeout_ms: int
    ) -> Mapping[str, TopicInfo]:
        """Return what is known of each topic; a topic that does not exist is absent."""
        ...

    def wrong_settings(
        self, topic: str, *, has_checkpoints: bool, timeout_ms: int
    ) -> Sequence[WrongSetting]:
        """Return which settings of a coordination topic break PROTOCOL 2.1.

        Args:
            topic: The coordination topic.
            has_checkpoints: Whether each partition has a checkpoint, so that
                retention may be a week or more.
            timeout_ms: When to give up.

        Raises:
            LogUnreadable: This principal may not see the settings.
            CoordinationError: The cluster did not answer.
        """
        ...

    def topics(self, timeout_ms: int) -> Sequence[str]:
        """Return the names of all topics that may be seen, internal ones included."""
        ...

    def ranges(
        self,
        partitions: Sequence[TopicPartition],
        timeout_ms: int,
        *,
        isolation_level: str = READ_UNCOMMITTED,
    ) -> Mapping[TopicPartition, LogRange]:
        """Return log-start and log-end offsets of each partition.

        The end is the next offset to be written, which bounds what a position may
        be; under ``read_committed`` it is the last stable offset: a reader gets no
        further before the first open transaction ends.

        A partition that does not exist is absent.
        """
        ...

    def ends(
        self, partitions: Sequence[TopicPartition], timeout_ms: int
    ) -> Mapping[TopicPartition, int]:
        """Return the next offset to be written of each partition.

        Half of what ``ranges`` asks, in half of the time.
        """
        ...

    def committed(
        self, group_id: str, partitions: Sequence[TopicPartition], *, timeout_ms: int
    ) -> Mapping[TopicPartition, int | None]:
        """Return the group's committed offsets in Kafka (None: no commit)."""
        ...

    def commit(
        self, group_id: str, offsets: Mapping[TopicPartition, int], *, timeout_ms: int
    ) -> None:
        """Mirror positions to the group's committed offsets (PROTOCOL 5.7)."""
        ...

    def reader(self, *, isolation_level: str = READ_UNCOMMITTED) -> DataReader:
        """Return a new reader with nothing assigned.

        Under ``read_committed`` it returns records of transactions once these are
        committed, and none of aborted ones.
        """
        ...

    def close(self, timeout_ms: int) -> None:
        """Let go of every resource. Idempotent."""
        ...


class Clock(Protocol):
    """Local and wall time. ``now_ms`` goes on while the machine is suspended."""

    def now_ms(self) -> int:
        """Return the boot clock in milliseconds: local time, for leases."""
        ...

    def wall_ms(self) -> int:
        """Return wall time in epoch milliseconds: for people and admins only."""
        ...


class Entropy(Protocol):
    """Chance, so that the simulator can replay it."""

    def random_bytes(self, count: int) -> bytes:
        """Return ``count`` random bytes fit for secrets."""
        ...

    def below(self, limit: int) -> int:
        """Return an integer 0 <= n < ``limit`` (0 where limit < 1)."""
        ...


class Pending(Protocol[T_co]):
    """The outcome of a background call: the part of a Future that we use."""

    def done(self) -> bool:
        """Return whether the call has ended."""
        ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what it raised, or None."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """Return what it returned, or raise what it raised."""
        ...


class Background(Protocol):
    """Runs blocking look-ups away from the engine's thread, in order."""

    def submit(self, call: Callable[[], T]) -> Pending[T]:
        """Run ``call`` soon and return its outcome-to-be."""
        ...

    def close(self, timeout_ms: int) -> None:
        """Stop after the call under way. Idempotent."""
        ...


@attrs.frozen
class Event:
    """Something an operator may want to know; see ``observability`` for names."""

    name: str
    fields: Mapping[str, Any] = attrs.field(factory=dict)


class Observer(Protocol):
    """Receives events. Called on the engine's thread: must not block or raise."""

    def observe(self, event: Event) -> None:
        """Take one event."""
        ...
