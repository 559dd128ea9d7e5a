"""Interfaces to everything that the engine needs from its environment.

Two sets of implementations exist: ``kafka_io`` over a real cluster, and
``testing`` in memory with a virtual clock. The conformance checks of the tests hold
both to the same behavior. All timeouts are milliseconds; no call may outlast its
timeout by more than a scheduling delay.
"""

from bisect import bisect_left, bisect_right
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Protocol, Self, TypeVar, overload

import attrs
import msgspec

from kafka_marshal.errors import MarshalError
from kafka_marshal.outgoing import TransactionalWriter
from kafka_marshal.protocol.types import LogEntry, Token, TopicPartition

READ_UNCOMMITTED = "read_uncommitted"
READ_COMMITTED = "read_committed"
ISOLATION_LEVELS = (READ_UNCOMMITTED, READ_COMMITTED)

# Number of records made at once, for access by one index after the other.
MADE_AT_ONCE = 100

FAR_MS = 2**63
"""A time after any other."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Append(Protocol):
    """An append in flight. Only reading the record back proves that it is in the log.

    PROTOCOL 1.4: the outcome of an append that failed or timed out is *unknown*. The
    engine uses it only for messages and counters.
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


CONFIGURE_MS = 30_000
"""Default limit for calls that may open connections with new settings."""


Run = tuple[int, Sequence[LogEntry]]
"""Number of a coordinating partition, and successive entries of it; at least one."""


def runs_of(entries: Iterable[tuple[int, LogEntry]]) -> Iterator[Run]:
    """Yield each run of successive entries of one partition."""
    for partition, run in groupby(entries, key=itemgetter(0)):
        yield partition, [entry for _, entry in run]


class CoordinationLog(Protocol):
    """All coordinating partitions of one ``__marshal`` topic, as one session.

    ``append``, ``end_offsets``, ``read_added`` and ``close`` may be called from any
    thread; the other calls come from one thread at a time.

    Attributes:
        topic: Name of the topic.
        topic_id: Its id when it was opened, None if brokers have no ids.
    """

    topic: str
    topic_id: bytes | None

    @property
    def partition_count(self) -> int:
        """Number of the topic's partitions that are read; not all need to coordinate.

        At first these are all that the topic had at opening; ``read_added`` adds more.
        """
        ...

    def read_added(
        self, partition_count: int, *, timeout_ms: int = CONFIGURE_MS
    ) -> None:
        """Also read partitions that were added to the topic, up to this number.

        For any thread; blocks. From the next poll on, the added partitions are read
        from their starts. Appends to them are possible.

        Raises:
            CoordinationError: The cluster does not show the partitions; nothing has
                changed.
        """
        ...

    def append(self, partition: int, value: bytes) -> Append:
        """Start appending one record (null key, acks=all, idempotent, in order).

        Returns at once. Never raises for a broker's error: the returned Append
        reports it.
        """
        ...

    def configure(
        self, heartbeat_interval_ms: int, *, timeout_ms: int = CONFIGURE_MS
    ) -> None:
        """Adapt the timeouts of appends to the heartbeat interval (PROTOCOL 2.1).

        For any thread. It may connect, which takes a while.

        Raises:
            CoordinationError: The cluster did not answer; the old timeouts stay.
        """
        ...

    def poll(self, timeout_ms: int) -> Sequence[tuple[int, LogEntry]]:
        """Return new entries of all partitions, waiting up to ``timeout_ms``.

        Entries of one partition are returned in offset order without gaps, from the
        start of the log or the offset set by ``read_from``. Empty results are normal.

        Raises:
            LogTruncated: Offset or leader epoch went back in the partition that the
                error names. Raised again until ``read_from`` sets its offset; other
                partitions lose nothing.
            LogUnreadable: An entry has no leader epoch, or access is denied.
            CoordinationError: A transient error; poll again.
        """
        ...

    def poll_runs(self, timeout_ms: int) -> Sequence[Run]:
        """Return new entries like ``poll``, in runs, for readers that fold them.

        A run may decode its entries from the fetched bytes only on access.
        """
        return list(runs_of(self.poll(timeout_ms)))

    def skim(self, timeout_ms: int, *, head: bytes) -> Sequence[tuple[int, LogEntry]]:
        """Return new entries like ``poll``; entries not sought may be left out.

        For searches, which skip most entries. ``positions`` moves as after ``poll``.

        Args:
            timeout_ms: How long to wait for an entry.
            head: Entries whose value begins with this are sought.
        """
        del head
        return self.poll(timeout_ms)

    def read_from(self, offsets: Mapping[int, int]) -> None:
        """Continue to read these partitions at other offsets; others are unaffected.

        For readers that have a state of the entries below the offset, or that start
        from the beginning. Entries below the offset are not checked: a reader that
        depends on them must read one of them. If an offset is outside the log, the next
        ``poll`` raises LogTruncated.

        Raises:
            CoordinationError: A transient error; nothing has changed.
        """
        ...

    def positions(self) -> Mapping[int, int]:
        """Return the next offset that ``poll`` will read, per partition.

        Offsets without a record for readers (control records) are skipped.
        """
        ...

    def start_offsets(self, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offset that exists, per partition."""
        ...

    def offsets_for_times(self, time_ms: int, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offset with this timestamp or a later one, per partition.

        A partition without such an entry is absent. Timestamps set by clients count,
        too, if the topic's ``message.timestamp.type`` was wrong for a while.
        """
        ...

    def end_offsets(
        self, timeout_ms: int, partitions: Collection[int] | None = None
    ) -> Mapping[int, int]:
        """Return the next offset to be written, per partition (a barrier).

        The result has at least these partitions, by default all that are read. May be
        called from any thread, also while another thread polls or closes: a wait for
        the end of the log must not wait for a poll.
        """
        ...

    def close(self, timeout_ms: int) -> None:
        """Flush appends and release every resource. Idempotent."""
        ...


class TopicInfo(NamedTuple):
    """The cluster's description of one data topic."""

    partition_count: int
    topic_id: bytes | None


class WrongSetting(NamedTuple):
    """A setting of the coordination topic that breaks PROTOCOL 2.1.

    Attributes:
        setting: Its name in Kafka.
        problem: Its value, the value that it must have, and why.
        command: The command of Kafka's tools that corrects it.
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

    Immutable. Two records are equal if all their fields are equal, whatever reader made
    them; they can be hashed, copied and pickled. Readers return records that decode
    rarely used fields on access. A ``PlainRecord`` stores all fields: unpickling gives
    one, and tests of handlers can make one.
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
        """Pairs of name and value; U+FFFD replaces bytes of names that are no UTF-8."""
        raise NotImplementedError

    @property
    def leader_epoch(self) -> int | None:
        """Leader epoch of the batch, or None."""
        raise NotImplementedError

    @property
    def token(self) -> Token | None:
        """Fencing token of the claim under which it was fetched."""
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


@attrs.frozen(kw_only=True, eq=False)
class SourceKind:
    """Functions that read *sources*: the records of a client library.

    Attributes:
        make: Makes ``Record`` objects of some sources, with a token.
        offset: Returns the offset of a source.
        timestamp_ms: Returns its timestamp, in epoch milliseconds.
        key: Returns its key.
        value: Returns its value.
    """

    make: Callable[[Sequence[Any], Token | None], Iterator[Record]]
    offset: Callable[[Any], int]
    timestamp_ms: Callable[[Any], int]
    key: Callable[[Any], bytes | None]
    value: Callable[[Any], bytes | None]


class Piece(Protocol):
    """Consecutive records of one partition, of one kind; at least one, immutable."""

    @property
    def size(self) -> int:
        """Number of records."""
        ...

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        ...

    def offset_at(self, index: int) -> int:
        """Return the offset of a record."""
        ...

    def index_of(self, offset: int) -> int:
        """Return the index of the first record at or above offset (<= last_offset)."""
        ...

    def cut(self, start: int, stop: int) -> "Piece":
        """Return a part: ``0 <= start < stop <= size``."""
        ...

    def column(self, name: str) -> list[Any]:
        """Return one field of every record; see ``Records.column``."""
        ...

    def records(self, token: Token | None) -> Iterator[Record]:
        """Make the records, with a token."""
        ...

    def join(self, other: "Piece") -> "Piece | None":
        """Return this and the next piece as one piece; None if that saves nothing."""
        ...


@attrs.frozen(eq=False)
class SourcePiece:
    """Records that a client library has made; see ``Piece``.

    Attributes:
        sources: Its records, at least one.
        kind: Makes ``Record`` objects of them.
    """

    sources: Sequence[Any]
    kind: SourceKind

    @property
    def size(self) -> int:
        """Number of records."""
        return len(self.sources)

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return self.kind.offset(self.sources[-1])

    def offset_at(self, index: int) -> int:
        """Return the offset of a record."""
        return self.kind.offset(self.sources[index])

    def index_of(self, offset: int) -> int:
        """Return the index of the first record at or above an offset."""
        return bisect_left(self.sources, offset, key=self.kind.offset)

    def cut(self, start: int, stop: int) -> "SourcePiece":
        """Return a part."""
        return SourcePiece(self.sources[start:stop], self.kind)

    def column(self, name: str) -> list[Any]:
        """Return one field of every record."""
        return list(map(getattr(self.kind, name), self.sources))

    def records(self, token: Token | None) -> Iterator[Record]:
        """Make the records."""
        return self.kind.make(self.sources, token)

    def join(self, other: Piece) -> None:
        """Return None: joining would copy."""
        del other


class Records(Sequence[Record]):
    """Records of one partition, in offset order, each made on access.

    Accessing an index twice may give two equal objects. A record does not keep the
    sequence alive. Making records takes as long as fetching them; ``column`` returns
    single fields without making records.

    Args:
        pieces: The records.
        token: Token of the claim, for each record.

    Attributes:
        token: Token of the claim.
        pieces: The records.
    """

    __slots__ = ("_ends", "_made", "_made_from", "pieces", "token")

    def __init__(self, pieces: Sequence[Piece], *, token: Token | None) -> None:
        self.token = token
        # Records made last, for access by one index after the other.
        self._made: list[Record] = []
        self._made_from = 0
        self._set([*pieces])

    def _set(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        # Number of records up to the end of each piece.
        self._ends: list[int] = []
        end = 0
        for piece in pieces:
            end += piece.size
            self._ends.append(end)

    @classmethod
    def of_sources(
        cls, sources: Sequence[Any], *, token: Token | None, kind: SourceKind
    ) -> Self:
        """Return records of a client library, which are not copied."""
        return cls([SourcePiece(sources, kind)] if sources else [], token=token)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Record]:
        if len(self.pieces) == 1:
            return self.pieces[0].records(self.token)
        return chain.from_iterable(each.records(self.token) for each in self.pieces)

    @overload
    def __getitem__(self, at: int) -> Record: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Record]: ...

    def __getitem__(self, at: int | slice) -> Record | Sequence[Record]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                return list(self)[at]
            return type(self)(self._cut(start, stop), token=self.token)
        made = at - self._made_from
        if not 0 <= made < len(self._made):
            at, made = range(len(self))[at], 0
            self._made, self._made_from = list(self[at : at + MADE_AT_ONCE]), at
        return self._made[made]

    def __repr__(self) -> str:
        return f"Records({list(self)!r})"

    def column(self, name: str) -> list[Any]:
        """Return one field of every record.

        Args:
            name: ``offset``, ``timestamp_ms``, ``key`` or ``value``.
        """
        if len(self.pieces) == 1:
            return self.pieces[0].column(name)
        return [found for each in self.pieces for found in each.column(name)]

    def offset_at(self, index: int) -> int:
        """Return the offset of one record."""
        if index == -1 and self.pieces:
            return self.pieces[-1].last_offset
        if self.pieces and 0 <= index < self._ends[0]:
            return self.pieces[0].offset_at(index)
        at = range(len(self))[index]
        number = bisect_right(self._ends, at)
        piece = self.pieces[number]
        return piece.offset_at(at - self._ends[number] + piece.size)

    def index_of(self, offset: int, start: int) -> int:
        """Return the index, at least start, of the first record at or above offset."""
        number = bisect_left(self.pieces, offset, key=_last_offset)
        if number == len(self.pieces):
            return len(self)
        piece = self.pieces[number]
        found = self._ends[number] - piece.size + piece.index_of(offset)
        return max(start, found)

    def replace(self, count: int, others: Sequence[Record]) -> bool:
        """Remove the first records and append others, in place.

        Args:
            count: How many to remove.
            others: Records that follow.

        Returns:
            False, with nothing changed, if they are not ``Records`` with this token.
        """
        if not isinstance(others, Records) or others.token is not self.token:
            return False
        pieces = self._cut(count, len(self))
        for each in others.pieces:
            joined = pieces[-1].join(each) if pieces else None
            if joined is None:
                pieces.append(each)
            else:
                pieces[-1] = joined
        self._made, self._made_from = [], 0
        self._set(pieces)
        return True

    def _cut(self, start: int, stop: int) -> list[Piece]:
        if start >= stop:
            return []
        if len(self.pieces) == 1:
            (piece,) = self.pieces
            return [piece if stop - start == piece.size else piece.cut(start, stop)]
        found: list[Piece] = []
        for number in range(bisect_right(self._ends, start), len(self._ends)):
            piece, end = self.pieces[number], self._ends[number]
            before = end - piece.size
            if max(before, start) >= stop:
                break
            if start <= before and end <= stop:
                found.append(piece)
            else:
                found.append(piece.cut(max(0, start - before), min(end, stop) - before))
        return found


def _last_offset(piece: Piece) -> int:
    return piece.last_offset


def _under(records: Sequence[Any], token: Token | None) -> Iterator[Record]:
    for each in records:
        names = PlainRecord.__struct_fields__
        fields = dict(zip(names, _fields(each), strict=True))
        yield PlainRecord(**fields | {"token": token})


# Sources that are ``Record`` objects already, with another token or none.
_FINISHED = SourceKind(
    make=_under,
    offset=attrgetter("offset"),
    timestamp_ms=attrgetter("timestamp_ms"),
    key=attrgetter("key"),
    value=attrgetter("value"),
)


def joined_records(parts: Sequence[Sequence[Record]], token: Token | None) -> Records:
    """Return successive records as one sequence, with a new token.

    Args:
        parts: Records of one partition, which are not changed.
        token: Token of the claim; replaces the token that the records have.
    """
    pieces: list[Piece] = []
    for part in parts:
        if isinstance(part, Records):
            pieces += part.pieces
        elif part:
            pieces.append(SourcePiece(part, _FINISHED))
    return Records(pieces, token=token)


def column_of(records: Sequence[Record], name: str) -> list[Any]:
    """Return one field of every record, if possible without making records.

    Args:
        records: The records.
        name: ``offset``, ``timestamp_ms``, ``key`` or ``value``.
    """
    if isinstance(records, Records):
        return records.column(name)
    return list(map(attrgetter(name), records))


def index_from(records: Sequence[Record], offset: int, *, start: int = 0) -> int:
    """Return the index, at least start, of the first record at or above offset."""
    if isinstance(records, Records):
        return records.index_of(offset, start)
    return bisect_left(records, offset, start, key=attrgetter("offset"))


def offset_at(records: Sequence[Record], index: int) -> int:
    """Return the offset of one record, if possible without making the record."""
    if isinstance(records, Records):
        return records.offset_at(index)
    return records[index].offset


class DataReader(Protocol):
    """Fetches records of data partitions. Used by one thread at a time.

    Attributes:
        fetches_ahead: Whether it continues to fetch while fetched records are waiting,
            so that callers need not poll more records than they use.
        fetched_max: Number of records that are best polled at once, because the reader
            holds their memory anyway; 0 if each polled record takes more memory.
    """

    fetches_ahead: bool = False
    fetched_max: int = 0

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Set the assigned partitions; partitions that stay keep their positions.

        A new partition needs a ``seek`` before the next ``poll``. Buffered records of
        removed partitions are dropped.
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
        """Continue at ``offset``; buffered records of the partition are dropped.

        Args:
            partition: An assigned partition.
            offset: First offset to return.
            token: Fencing token of the records of the partition from here on.
            topic_id: Kafka's id of the topic to read. Records of another topic of
                this name are never returned. None reads any topic of the name.
        """
        ...

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop fetching these partitions until resumed; keep positions and buffers."""
        ...

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Undo ``pause``; partitions that are unknown or not paused are ignored."""
        ...

    def poll(
        self, timeout_ms: int, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Return up to ``max_records`` records, in offset order per partition.

        Raises:
            PositionError: A partition's position is outside its log; the error
                has an attribute ``partition`` (TopicPartition). Other
                partitions are unaffected; seek before polling again.
            UnknownTopicId: The queried brokers do not have the topic id that was given
                to ``seek``. Other partitions are unaffected; poll again.
            CoordinationError: A transient error; poll again.
        """
        ...

    def positions(self) -> Mapping[TopicPartition, int]:
        """Return the next offset that ``poll`` will read, of assigned partitions.

        The offsets between the last record that ``poll`` returned, or the last
        ``seek``, and this offset have no record for this reader: they are control
        records, records of aborted transactions under ``read_committed``, or removed by
        compaction. A partition without a ``seek`` is absent. Does not block.
        """
        ...

    def ends(self) -> Mapping[TopicPartition, int]:
        """Return the log ends from the last fetches, of assigned partitions.

        An end is the next offset to be written; under ``read_committed`` it may be the
        first offset of an open transaction. It is as old as the last fetch. A partition
        that was never fetched is absent. Does not block.
        """
        ...

    def close(self, timeout_ms: int) -> None:
        """Release every resource. Idempotent."""
        ...


class DataLog(Protocol):
    """Look-ups about data topics and group offsets. Thread-safe, blocking."""

    def describe(
        self, topics: Sequence[str], timeout_ms: int
    ) -> Mapping[str, TopicInfo]:
        """Describe topics; a topic that does not exist is absent."""
        ...

    def wrong_settings(
        self, topic: str, *, has_checkpoints: bool, timeout_ms: int
    ) -> Sequence[WrongSetting]:
        """Return the settings of a coordination topic that break PROTOCOL 2.1.

        Args:
            topic: The coordination topic.
            has_checkpoints: Whether each partition has a checkpoint, so that
                retention may be a week or more.
            timeout_ms: Longest time of the call.

        Raises:
            LogUnreadable: This principal may not see the settings.
            CoordinationError: The cluster did not answer.
        """
        ...

    def topics(self, timeout_ms: int) -> Sequence[str]:
        """Return the names of all visible topics, including internal ones."""
        ...

    def ranges(
        self,
        partitions: Sequence[TopicPartition],
        timeout_ms: int,
        *,
        isolation_level: str = READ_UNCOMMITTED,
    ) -> Mapping[TopicPartition, LogRange]:
        """Return log-start and log-end offsets of each partition.

        The end is the next offset to be written, the upper bound of a position. Under
        ``read_committed`` it is the last stable offset: readers get no further until
        the first open transaction ends.

        A partition that does not exist is absent.
        """
        ...

    def ends(
        self,
        partitions: Sequence[TopicPartition],
        timeout_ms: int,
        *,
        isolation_level: str = READ_UNCOMMITTED,
    ) -> Mapping[TopicPartition, int]:
        """Return the log-end offset of each partition, as ``ranges`` does.

        It needs half the requests, and half the time.
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

        Under ``read_committed`` it returns records of transactions only after their
        commit.
        """
        ...

    def transactions(
        self, transactional_id: str, *, group_id: str, timeout_ms: int
    ) -> TransactionalWriter:
        """Return a producer, which fences every earlier one of the same id.

        Args:
            transactional_id: Transactional id.
            group_id: Group whose committed offsets are the progress.
            timeout_ms: Limit for this and each transaction.

        Raises:
            MarshalError: The cluster did not answer, or a right is missing.
        """
        ...

    def close(self, timeout_ms: int) -> None:
        """Release every resource. Idempotent."""
        ...


class Clock(Protocol):
    """Local and wall time. ``now_ms`` advances while the machine is suspended."""

    def now_ms(self) -> int:
        """Return the boot clock in milliseconds: local time, for leases."""
        ...

    def wall_ms(self) -> int:
        """Return wall time in epoch milliseconds: for display and admins only."""
        ...


class Entropy(Protocol):
    """Source of random numbers, which the simulator can replay."""

    def random_bytes(self, count: int) -> bytes:
        """Return ``count`` random bytes fit for secrets."""
        ...

    def below(self, limit: int) -> int:
        """Return an integer 0 <= n < ``limit`` (0 if limit < 1)."""
        ...


class Pending(Protocol[T_co]):
    """The outcome of a background call: the part of a Future that is used."""

    def done(self) -> bool:
        """Return whether the call has ended."""
        ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception that the call raised, or None."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """Return the result of the call, or raise its exception."""
        ...


class Background(Protocol):
    """Runs blocking look-ups away from the engine's thread, in order."""

    def submit(self, call: Callable[[], T]) -> Pending[T]:
        """Run ``call`` soon; return its pending outcome."""
        ...

    def close(self, timeout_ms: int) -> None:
        """Stop after the running call. Idempotent."""
        ...


@attrs.frozen
class Event:
    """An event for operators; see ``observability`` for the names."""

    name: str
    fields: Mapping[str, Any] = attrs.field(factory=dict)


class Observer(Protocol):
    """Receives events. Called on the engine's thread: must not block or raise."""

    def observe(self, event: Event) -> None:
        """Handle one event."""
        ...
