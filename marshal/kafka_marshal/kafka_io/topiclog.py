"""The coordination log over a real cluster: the part without a client library.

It enforces the rules of PROTOCOL 2.1: offset and leader epoch never go back, a broken
log stays broken, nothing is used after a fork, every query has a deadline. A transport
adds fetching and appending.
"""

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kafka_marshal.closing import in_background
from kafka_marshal.deadline import Deadline
from kafka_marshal.defaults import format_command
from kafka_marshal.errors import (
    InvalidTransition,
    LogTruncated,
    LogUnreadable,
    MarshalError,
    TopicMisconfigured,
)
from kafka_marshal.kafka_io.faults import Access, forked_error
from kafka_marshal.kafka_io.settings import (
    FETCH_WAIT_MS,
    FETCH_WAIT_ONCE_MS,
    HEARTBEAT_INTERVAL_MS_DEFAULT,
    OPEN_TIMEOUT_MS,
    ConnectionConfig,
)
from kafka_marshal.kafka_io.single_flight import SingleFlight
from kafka_marshal.kafka_io.topic_rules import TopicDescription
from kafka_marshal.kafka_io.writer import (
    FailedAppend,
    ProducerHandle,
    Writer,
    no_answer,
)
from kafka_marshal.ports import Append, CoordinationLog, Run
from kafka_marshal.protocol.packed_entries import PackedEntries
from kafka_marshal.protocol.types import LogEntry

if TYPE_CHECKING:
    from kafka_marshal.kafka_io.clients import AdminClient

READER_REQUEST_TIMEOUT_MS = 10_000
# Time that a busy broker may need for a response.
_READER_REQUEST_TIMEOUT_MS_MIN = 2_000
EPOCH_NONE = -1

Runs = list[Run]


def reader_timeout_ms(heartbeat_interval_ms: int) -> int:
    """Return the limit of a reader's requests for a heartbeat interval.

    Half of the interval, so that a reader whose connection is dead, but not closed,
    uses another one before leases end; but at least 2 s and at most 10 s.
    """
    most_ms = max(heartbeat_interval_ms // 2, _READER_REQUEST_TIMEOUT_MS_MIN)
    return min(most_ms, READER_REQUEST_TIMEOUT_MS)


class TopicLog(CoordinationLog):
    """All partitions of the coordination topic, read from their starts.

    Opening it connects. ``append``, ``end_offsets``, ``read_added`` and ``close`` may
    be called from any thread, the other calls from one thread at a time, all from the
    process that opened it.

    Attributes:
        cluster_id: Id of the cluster.
        topic: Name of the topic.
        topic_id: Id of the topic (16 bytes) when it was opened, or None.
        description: Description of the topic when it was opened.
        writer: The writer, None until the heartbeat interval is known.
    """

    # Whether the caller has a state of the entries below the positions.
    _has_state = False

    def __init__(
        self,
        settings: ConnectionConfig,
        *,
        heartbeat_interval_ms: int | None = HEARTBEAT_INTERVAL_MS_DEFAULT,
        timeout_ms: int = OPEN_TIMEOUT_MS,
        only: Callable[[int], Collection[int]] | None = None,
        follows: bool = True,
        lingers: bool = True,
        admin: "AdminClient | None" = None,
    ) -> None:
        """Connect, and start at each partition's log start.

        Args:
            settings: Connection and name of the topic.
            heartbeat_interval_ms: None if unknown; ``configure`` changes it. While it
                is None nothing can be appended: readers need neither a producer nor
                the right to write.
            timeout_ms: Limit for the whole call.
            only: Gets the number of partitions and returns those to read; without it
                all are read. ``read_also`` adds a partition.
            follows: Whether to wait for new entries; False to read what is there.
            lingers: Whether an append waits a moment to share a request with others.
            admin: A client of kafka-python that describes the topic, and stays open;
                None for a client of the transport's own.

        Raises:
            TopicMisconfigured: There is no such topic.
            LogUnreadable: Access is denied.
            CoordinationError: The cluster did not answer.
        """
        deadline = Deadline(timeout_ms)
        self._settings = settings
        self._lingers = lingers
        self._fetch_wait_ms = FETCH_WAIT_MS if follows else FETCH_WAIT_ONCE_MS
        self.topic = self._topic = settings.coordination_topic
        self.topic_id: bytes | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._fault: MarshalError | None = None
        # Errors of partitions whose log went back, until read_from().
        self._truncated: dict[int, LogTruncated] = {}
        # Starts of added partitions that the next poll begins to read.
        self._added: Mapping[int, int] = {}
        self._is_closed = False
        self._end_flight: SingleFlight[Mapping[int, int]] = SingleFlight()
        self.writer: Writer | None = None
        try:
            self._prepare()
            self._describe_topic(deadline, admin)
        except BaseException:
            self.close(0)
            raise
        every = range(self._partition_count)
        self._read = sorted(every if only is None else only(len(every)))
        # Next offset, last leader epoch and last known end of each partition.
        self._next = [0] * self._partition_count
        self._epochs = [EPOCH_NONE] * self._partition_count
        self._ends = [0] * self._partition_count
        try:
            self._connect_all(heartbeat_interval_ms, deadline)
        except BaseException as error:
            self.close(0)
            if not isinstance(error, Exception):
                raise  # such as Ctrl-C
            doing = f"Opening the coordination topic {self._topic}"
            raise self._translate(error, doing, Access.READ) from error

    def _connect_all(
        self, heartbeat_interval_ms: int | None, deadline: Deadline
    ) -> None:
        """Connect writer and reader; continue at each partition's log start."""
        if heartbeat_interval_ms is not None:
            left_ms = deadline.require_ms(no_answer)
            self.writer = self._new_writer(heartbeat_interval_ms, left_ms)
        self._connect(deadline)
        starts = self._query_offsets(deadline.require_ms(no_answer), is_end=False)
        self._seek(starts)

    @property
    def partition_count(self) -> int:
        """Number of the topic's partitions when it was opened, and of added ones."""
        return self._partition_count

    def append(self, partition: int, value: bytes) -> Append:
        """Start appending one record; see ``ports.CoordinationLog``."""
        self._require_process("Appending")
        if self.writer is None:
            why = (
                f"Appending to {self._topic} failed: this log is open only for reading."
            )
            return FailedAppend(InvalidTransition(why))
        return self.writer.append(partition, value)

    def poll(self, timeout_ms: int) -> Sequence[tuple[int, LogEntry]]:
        """Return new entries; see ``ports.CoordinationLog``.

        After LogUnreadable, or a LogTruncated without a partition, every further poll
        raises the same error: close the log and open another, which reads from the
        start.
        """
        return _flat(self.poll_runs(timeout_ms))

    def poll_runs(self, timeout_ms: int) -> Runs:
        """Return new entries in runs, as ``poll``; see ``ports.CoordinationLog``."""
        return self._new_runs(lambda: self._fetch(max(0, timeout_ms)))

    def skim(self, timeout_ms: int, *, head: bytes) -> Sequence[tuple[int, LogEntry]]:
        """Return new entries for a search; see ``ports.CoordinationLog``."""
        return _flat(
            self._new_runs(lambda: self._fetch_heads(max(0, timeout_ms), head))
        )

    def _new_runs(self, fetch: Callable[[], Runs]) -> Runs:
        self._require_process("Reading")
        self._raise_fault()
        self._require_open()
        if self.writer is not None:
            self.writer.watch()
        self._begin_added()
        try:
            runs = fetch()
        except Exception as error:
            translated = self._translate(error, f"Reading {self._topic}", Access.READ)
            self._record_fault(translated, error)
            raise translated from error
        runs = self._validated(runs)
        if not runs:
            self._raise_fault()
        return runs

    def read_from(self, offsets: Mapping[int, int]) -> None:
        """Continue at other offsets; see ``ports.CoordinationLog``."""
        self._require_process("Reading")
        self._require_open()
        before = {number: self._next[number] for number in offsets}
        try:
            self._reset_positions(offsets)
            self._seek(offsets)
        except Exception as error:
            for number, offset in before.items():
                self._next[number] = offset
            raise self._translate(
                error, f"Reading {self._topic}", Access.READ
            ) from error
        for number in offsets:
            self._truncated.pop(number, None)
            self._ends[number] = 0  # the log may be shorter than when it was queried
        self._has_state = True

    def positions(self) -> Mapping[int, int]:
        """Return the next offset to poll, by partition."""
        self._require_process("Reading")
        # A poll passes control records without returning anything, so ask the client
        # about partitions that seem to be behind.
        behind = [
            number
            for number in self._read
            if self._next[number] < self._ends[number] and not self._is_closed
        ]
        for number, place in self._fetch_positions(behind).items():
            self._next[number] = max(self._next[number], place)
        return dict(enumerate(self._next))

    def start_offsets(self, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offset that exists, by partition.

        Compaction deletes records and leaves Kafka's log start where it was, so the
        first offset with any timestamp is the start.
        """
        deadline = Deadline(timeout_ms)
        starts = self._offsets(timeout_ms, is_end=False)
        firsts = self.offsets_for_times(0, deadline.left_ms)
        timeless = sorted(starts.keys() - firsts.keys())
        if timeless:
            ends = self._offsets(deadline.left_ms, is_end=True, partitions=timeless)
            filled = [t for t in timeless if ends[t] > starts[t]]
            if filled:
                # Perhaps their first records were appended meanwhile. Otherwise Kafka
                # searches in vain in a first segment that compaction has emptied.
                later = self.offsets_for_times(0, deadline.left_ms)
                emptied = {t: starts[t] + 1 for t in filled}
                firsts = {**emptied, **firsts, **later}
        return {t: max(start, firsts.get(t, start)) for t, start in starts.items()}

    def offsets_for_times(self, time_ms: int, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offset with this timestamp or a later one, by partition."""
        self._require_process("Reading")
        self._require_open()
        try:
            # In Kafka negative times have special meanings: -1 is the end of the log.
            return self._query_time(max(0, time_ms), max(1, timeout_ms))
        except Exception as error:
            doing = f"Querying offsets by time in {self._topic}"
            raise self._translate(error, doing, Access.READ) from error

    def end_offsets(
        self, timeout_ms: int, partitions: Collection[int] | None = None
    ) -> Mapping[int, int]:
        """Return the log end offset by partition (a barrier). Any thread."""
        self._require_process("Reading")
        self._require_open()
        offsets = self._end_flight.call(
            lambda asked, left_ms: self._offsets(
                left_ms, is_end=True, partitions=sorted(asked)
            ),
            max(1, timeout_ms),
            wanted=self._read if partitions is None else partitions,
        )
        for number, offset in offsets.items():
            # Answers of concurrent callers may arrive out of order.
            self._ends[number] = max(self._ends[number], offset)
        return offsets

    def close(self, timeout_ms: int) -> None:
        """Flush appends for up to ``timeout_ms``, then close. Idempotent.

        Appends still under way end within the delivery timeout, in the background. In a
        forked child it does nothing.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if os.getpid() != self._pid:
            return
        deadline = Deadline(timeout_ms)
        closer = in_background(self._disconnect)
        if self.writer is not None:
            self.writer.close(timeout_ms)
        closer.join(timeout=deadline.left_s)

    def configure(
        self, heartbeat_interval_ms: int, *, timeout_ms: int = OPEN_TIMEOUT_MS
    ) -> None:
        """Set the timeouts of requests; do nothing if the interval is unchanged.

        Best called before the first append. Later, to keep the order, an append waits
        for the outcome of earlier ones to its partition, sent with the old timeouts.

        Args:
            heartbeat_interval_ms: Heartbeat interval in force.
            timeout_ms: Limit for the new connection; on failure the old one stays.

        Raises:
            CoordinationError: The cluster did not answer.
            InvalidTransition: The log was closed meanwhile; so is the new writer.
        """
        self._require_process("Configuring")
        fresh: Writer | None = None
        try:
            if self.writer is None:
                fresh = self._new_writer(heartbeat_interval_ms, timeout_ms)
            else:
                self.writer.configure(heartbeat_interval_ms, timeout_ms=timeout_ms)
        except Exception as error:
            doing = f"Connecting a writer to {self._topic}"
            raise self._translate(error, doing, Access.WRITE) from error
        if fresh is not None and not self._keep(fresh):
            fresh.close(0)
            self._require_open("Configuring")
            self.configure(heartbeat_interval_ms, timeout_ms=timeout_ms)
        self._limit_requests(reader_timeout_ms(heartbeat_interval_ms))

    def _keep(self, fresh: Writer) -> bool:
        """Keep a new writer unless the log was closed, or got another, meanwhile."""
        with self._lock:
            is_kept = not self._is_closed and self.writer is None
            if is_kept:
                self.writer = fresh
        return is_kept

    def read_also(self, partition: int, *, timeout_ms: int = OPEN_TIMEOUT_MS) -> None:
        """Read one more partition from its start, unless it is read already.

        Raises:
            CoordinationError: The cluster did not answer; nothing has changed.
        """
        self._require_process("Reading")
        self._require_open()
        if partition in self._read:
            return
        try:
            starts = self._query_offsets(
                max(1, timeout_ms), is_end=False, partitions=[partition]
            )
        except Exception as error:
            doing = f"Querying the start of {self._topic}"
            raise self._translate(error, doing, Access.READ) from error
        self._read = sorted((*self._read, partition))
        self._seek(starts)

    def read_added(
        self, partition_count: int, *, timeout_ms: int = OPEN_TIMEOUT_MS
    ) -> None:
        """Read partitions that were added; see ``ports.CoordinationLog``."""
        self._require_process("Reading")
        self._require_open()
        added = range(self._partition_count, partition_count)
        if not added:
            return
        deadline = Deadline(timeout_ms)
        try:
            starts = self._find_added(added, deadline.require_ms(no_answer))
        except Exception as error:
            doing = f"Querying the added partitions of {self._topic}"
            raise self._translate(error, doing, Access.READ) from error
        if self.writer is not None:
            try:
                self.writer.reconnect(timeout_ms=deadline.require_ms(no_answer))
            except Exception as error:
                doing = f"Connecting a writer to {self._topic}"
                raise self._translate(error, doing, Access.WRITE) from error
        self._added = starts

    def _begin_added(self) -> None:
        """Begin to read partitions that ``read_added`` has found."""
        added, self._added = self._added, {}
        new = {t: start for t, start in added.items() if t >= self._partition_count}
        if not new:
            return
        self._next += [0] * len(new)
        self._epochs += [EPOCH_NONE] * len(new)
        self._ends += [0] * len(new)
        self._partition_count += len(new)
        self._read = sorted({*self._read, *new})
        self._refresh_reader()
        self._seek(new)

    def start_at(self, offsets: Mapping[int, int], *, timeout_ms: int) -> None:
        """Start at these offsets, before the first poll.

        For callers that have a state of the entries below. From then on, records that
        retention has deleted are an error; they are never skipped.

        Raises:
            LogTruncated: One of the offsets is not within the log.
            CoordinationError: The cluster did not answer.
        """
        starts = self._offsets(timeout_ms, is_end=False)
        ends = self._offsets(timeout_ms, is_end=True)
        for number, offset in offsets.items():
            if not starts[number] <= offset <= ends[number]:
                raise LogTruncated(
                    f"{self._topic}-{number} has offsets {starts[number]} to "
                    f"{ends[number]}, so reading cannot continue at {offset}. Read "
                    "it again from its start."
                )
        self._has_state = True
        self._seek(offsets)

    # Implemented by a transport.

    @abstractmethod
    def _new_producer_handle(
        self, timeouts: Mapping[str, int], timeout_ms: int
    ) -> ProducerHandle:
        """Connect a producer; see ``Connect``."""

    def _prepare(self) -> None:
        """Start connecting, before the topic is described."""

    @abstractmethod
    def _describe(
        self, client: "AdminClient | None", timeout_ms: int
    ) -> tuple[str, TopicDescription]:
        """Return the cluster's id, and its description of the topic.

        It uses this client, or one of the transport's own if there is none.
        """

    @abstractmethod
    def _connect(self, deadline: Deadline) -> None:
        """Make the reader, without positions."""

    @abstractmethod
    def _limit_requests(self, timeout_ms: int) -> None:
        """Set how long later requests of the reader may take; on any thread."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close the reader if there is one."""

    @abstractmethod
    def _seek(self, offsets: Mapping[int, int]) -> None:
        """Continue at these offsets, and read all partitions in ``_read``."""

    @abstractmethod
    def _fetch(self, timeout_ms: int) -> Runs:
        """Return new entries; wait up to ``timeout_ms`` for the first."""

    def _fetch_heads(self, timeout_ms: int, head: bytes) -> Runs:
        """Return new entries; those whose value has another head may be left out.

        The last entry of each run is always returned: positions follow it.
        """
        return [(t, entries_with_head(run, head)) for t, run in self._fetch(timeout_ms)]

    @abstractmethod
    def _fetch_positions(self, partitions: Collection[int]) -> Mapping[int, int]:
        """Return the client's positions; partitions without a known one are absent."""

    @abstractmethod
    def _query_offsets(
        self, timeout_ms: int, *, is_end: bool, partitions: Iterable[int] | None = None
    ) -> Mapping[int, int]:
        """Return log ends or starts, by default of the partitions in ``_read``."""

    @abstractmethod
    def _find_added(
        self, partitions: Sequence[int], timeout_ms: int
    ) -> Mapping[int, int]:
        """Return the starts of added partitions, and make the client know them.

        On any thread.
        """

    def _refresh_reader(self) -> None:
        """Make the reading client learn of added partitions; on the polling thread."""

    @abstractmethod
    def _query_time(self, time_ms: int, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offset at or after a time; absent where there is none."""

    @abstractmethod
    def _lost_partitions(self, error: Exception) -> Sequence[int]:
        """Return the partitions that lost records according to an error."""

    @abstractmethod
    def _translate(self, error: Exception, doing: str, access: Access) -> MarshalError:
        """Translate an error of the client library."""

    def _new_writer(self, heartbeat_interval_ms: int, timeout_ms: int) -> Writer:
        return Writer(
            self._settings,
            connect=self._new_producer_handle,
            translate=self._translate,
            heartbeat_interval_ms=heartbeat_interval_ms,
            timeout_ms=timeout_ms,
        )

    def _describe_topic(self, deadline: Deadline, client: "AdminClient | None") -> None:
        """Get the partitions and ids of the topic."""
        self.cluster_id, found = self._describe(client, deadline.require_ms(no_answer))
        if not found.exists:
            raise TopicMisconfigured(
                f"There is no coordination topic {self._topic} on "
                f"{self._settings.addresses}. Check its name; for a new one, run: "
                + format_command(self._topic),
                problems=(f"topic {self._topic} does not exist",),
            )
        self._partition_count = found.partition_count
        self.topic_id = found.topic_id
        self.description = found

    def _reset_positions(self, numbers: Iterable[int]) -> None:
        """Drop what is known from reading these partitions."""
        for number in numbers:
            self._epochs[number] = EPOCH_NONE

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault
        for fault in self._truncated.values():
            raise fault

    def _record_fault(self, translated: MarshalError, error: Exception) -> None:
        """Keep a permanent fault, so that every later poll raises it."""
        if translated.retriable:
            return
        lost = (
            self._lost_partitions(error) if isinstance(translated, LogTruncated) else ()
        )
        for number in lost:
            self._truncated[number] = LogTruncated(str(translated), partition=number)
        if isinstance(translated, LogTruncated) and lost:
            translated.partition = lost[0]
        else:
            self._fault = translated

    def _validated(self, runs: Runs) -> Runs:
        """Check new entries by PROTOCOL 2.1 and advance the positions.

        Returns:
            The runs, without those of partitions whose log went back.
        """
        for partition, run in runs:
            if partition not in self._truncated:
                self._validate(partition, _checked(run))
        if not self._truncated:
            return runs
        # Return the entries of other partitions; the next poll raises the fault.
        return [each for each in runs if each[0] not in self._truncated]

    def _validate(self, partition: int, entries: Iterable[LogEntry]) -> None:
        next_offsets, epochs = self._next, self._epochs
        for entry in entries:
            offset, epoch = entry.offset, entry.leader_epoch
            if epoch is None or epoch < 0:
                self._fault = LogUnreadable(
                    f"{self._topic}-{partition} has a record at offset {offset} "
                    "without a leader epoch. Its brokers are older than Apache Kafka "
                    "0.11, or its message format is; use a newer cluster."
                )
                raise self._fault
            if offset < next_offsets[partition] or epoch < epochs[partition]:
                self._truncated[partition] = LogTruncated(
                    f"{self._topic}-{partition} went back: offset {offset} of leader "
                    f"epoch {epoch} came after offset {next_offsets[partition] - 1} "
                    f"of leader epoch {epochs[partition]}. Read the log again from "
                    "its start.",
                    partition=partition,
                )
                return
            next_offsets[partition], epochs[partition] = offset + 1, epoch

    def _skips_deleted(self, partitions: Iterable[int], timeout_ms: int) -> bool:
        """Move to the new log start if retention moved it before the first fetch.

        The broker may delete records between the query of the start and the first
        fetch. Nothing was folded yet, so nothing is lost.

        Returns:
            True if retention moved it, or the log start cannot be queried yet.
        """
        partitions = list(partitions)
        if self._has_state or any(
            self._epochs[number] != EPOCH_NONE for number in partitions
        ):
            return False
        try:
            starts = self._query_offsets(
                max(1, timeout_ms), is_end=False, partitions=partitions
            )
        except Exception as error:
            if self._translate(error, "Asking", Access.READ).retriable:
                # The next poll tries again.
                return True
            raise
        if any(starts[number] <= self._next[number] for number in partitions):
            return False
        self._seek(starts)
        return True

    def _offsets(
        self, timeout_ms: int, *, is_end: bool, partitions: Iterable[int] | None = None
    ) -> Mapping[int, int]:
        self._require_process("Reading")
        self._require_open()
        try:
            return self._query_offsets(
                max(1, timeout_ms), is_end=is_end, partitions=partitions
            )
        except Exception as error:
            which = "end" if is_end else "start"
            doing = f"Querying the {which} of {self._topic}"
            raise self._translate(error, doing, Access.READ) from error

    def _require_open(self, doing: str = "Reading") -> None:
        if self._is_closed:
            raise InvalidTransition(
                f"{doing} {self._topic} failed: this log is closed."
            )

    def _require_process(self, doing: str) -> None:
        if os.getpid() != self._pid:
            raise forked_error(f"{doing} {self._topic}")


def entries_with_head(run: Sequence[LogEntry], head: bytes) -> Sequence[LogEntry]:
    """Return the entries of a run whose value begins with a head, and the last entry.

    A run that is not packed is returned whole.
    """
    if not isinstance(run, PackedEntries):
        return run
    found, last = run.with_head(head), run[-1]
    return found if found and found[-1].offset == last.offset else [*found, last]


def _checked(run: Sequence[LogEntry]) -> Sequence[LogEntry]:
    """Return the entries to check: first and last of a packed run, which ascends."""
    if not isinstance(run, PackedEntries):
        return run
    return [run[0], run[-1]] if len(run) > 1 else [run[0]]


def _flat(runs: Runs) -> list[tuple[int, LogEntry]]:
    return [(partition, entry) for partition, run in runs for entry in run]
