"""Reads the whole coordination log without claiming: for admins and views."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import CoordinationError, DeadlineExceeded, LogUnwritable
from kafka_marshal.ports import Append, Clock, CoordinationLog, Run
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.placement import by_partition
from kafka_marshal.protocol.records import Record
from kafka_marshal.protocol.state import ACCEPTED, Transition, WorldState
from kafka_marshal.protocol.types import LogEntry

from .kept_states import ASK_MS_MAX, POLL_MS, KeptStates, restore
from .pause_notes import PauseName, PauseNote, names_in
from .replica import Replica, check_halt

NO_ANSWER = "the coordination log did not answer in time"
CHECK = "check the brokers with: marshal doctor"


@attrs.define
class Awaited:
    """An own record that awaits its verdict.

    Attributes:
        partition: Coordinating partition it went to.
        append: The broker's response, used only in error messages.
        transition: The fold's verdict, None until it is read back.
    """

    partition: int
    append: Append
    transition: Transition | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether it was read back and accepted."""
        return self.transition is not None and self.transition.outcome == ACCEPTED

    def unwritable(self, what: str, *, left: str | None = None) -> LogUnwritable:
        """Return the error for a refusal that only a fault explains.

        Args:
            what: What was refused, for the message.
            left: What the refusal leaves, for the message.
        """
        reason = None if self.transition is None else self.transition.reason
        after = "" if left is None else f"{left}; "
        return LogUnwritable(
            f"coordinating partition {self.partition} refused {what} ({reason}); "
            f"{after}see: marshal topic info"
        )


class Follower:
    """Folds every coordinating partition, driven by its caller's thread.

    Attributes:
        replicas: One per coordinating partition.
        began_at: Offset of the kept state that each partition started from, if any.
        began_notes: Notes about pauses that were kept with these states, by partition.
        is_pause_unknown: Whether one of these states has a pause without a note: its
            reason and begin are only in the log before that state.
        log_start_missing: Partitions whose logs begin above 0, that have no fitting
            kept state, and that no change has brought into use since; none without
            sources. Their fold is incomplete and must never be saved (PROTOCOL 7.3).
        unfit: Partitions with a kept state that does not fit the log. It is not
            removed: it may show grants that the log has lost (7.5).
    """

    def __init__(
        self, log: CoordinationLog, clock: Clock, *, sources: Sequence[KeptStates] = ()
    ) -> None:
        """Start at the log's start, or at kept states with the first read.

        Args:
            log: The log; nothing was read from it yet.
            clock: Local time.
            sources: Sources of kept states, in order of preference.
        """
        self._sources = sources
        self.began_at: dict[int, int] = {}
        self.began_notes: dict[int, Mapping[PauseName, PauseNote]] = {}
        self.is_pause_unknown = False
        self.log_start_missing: list[int] = []
        self.unfit: list[int] = []
        self._log = log
        self._clock = clock
        self._awaited: list[tuple[Record, Awaited]] = []
        now_ms = clock.now_ms()
        self.replicas = {
            t: Replica(t, now_ms=now_ms) for t in range(log.partition_count)
        }

    @property
    def topic(self) -> str:
        """Name of the coordination topic."""
        return self._log.topic

    @property
    def worlds(self) -> list[WorldState]:
        """The state of every coordinating partition, in order."""
        return [replica.world for replica in self.replicas.values()]

    @property
    def by_partition(self) -> dict[int, WorldState]:
        """The state of every coordinating partition, by its number."""
        return by_partition(self.worlds)

    @property
    def wall_s(self) -> int:
        """Wall time in seconds, for eras."""
        return self._clock.wall_ms() // 1_000

    def step(
        self,
        timeout_ms: int,
        *,
        accept: Callable[[int, LogEntry], bool] | None = None,
    ) -> list[tuple[int, Transition]]:
        """Read once and fold; return the transitions with their partition.

        Args:
            timeout_ms: How long to wait for entries.
            accept: Entries for which it returns False are skipped.

        Raises:
            LogTruncated: The log was truncated.
            LogUnreadable: The log cannot be read.
        """
        runs, now_ms = self._read(timeout_ms), self._clock.now_ms()
        folded = []
        for partition, run in runs:
            replica = self.replicas.get(partition)
            if replica is None:
                continue
            for entry in run:
                if accept is None or accept(partition, entry):
                    transitions = self._fold(replica, entry, now_ms=now_ms)
                    folded += [(partition, transition) for transition in transitions]
        self._find_known()
        return folded

    def catch_up(
        self, timeout_ms: int, *, note: Callable[[int, LogEntry], None] | None = None
    ) -> Mapping[int, int]:
        """Fold everything that is in the log now.

        Args:
            timeout_ms: Limit for the whole call.
            note: Called with each entry except ordinary heartbeats, after its fold.

        Returns:
            The barrier: next offset to be written, per partition, at the call.

        Raises:
            DeadlineExceeded: The log's end was not reached in time.
        """
        deadline = Deadline(timeout_ms, self._clock.now_ms)
        self.begin(timeout_ms)
        barrier = self._log.end_offsets(timeout_ms)

        def left_count() -> int:
            positions = self._log.positions()
            return sum(max(0, end - positions.get(t, 0)) for t, end in barrier.items())

        total = left_count()

        def late() -> str:
            left = left_count()
            if left == total:
                return f"{NO_ANSWER}; {CHECK}"
            return (
                f"the coordination log was not read to its end in time: {left} of "
                f"{total} records are left; allow more with --timeout, or {CHECK}"
            )

        self._step_until(lambda: not left_count(), deadline, note=note, late=late)
        return barrier

    def append(self, partition: int, record: Record) -> Awaited:
        """Append a record; ``await_all`` waits for its verdict."""
        value = encode(record)
        awaited = Awaited(partition, self._log.append(partition, value))
        self._awaited.append((record, awaited))
        return awaited

    def await_all(self, awaited: list[Awaited], timeout_ms: int) -> None:
        """Wait until every one of these records has been read back.

        Raises:
            DeadlineExceeded: Not in time. They may still land (PROTOCOL 1.4).
            LogUnwritable: The broker refuses to append one of them, and always will.
            LogUnreadable: A partition needs a newer release from some offset on.
        """
        self._step_until(
            lambda: all(item.transition is not None for item in awaited),
            Deadline(timeout_ms, self._clock.now_ms),
            note=None,
            late=lambda: f"{NO_ANSWER}{_why(awaited)}; {CHECK}",
            awaited=awaited,
        )

    def require_folding(self, awaited: Iterable[Awaited]) -> None:
        """Raise an error if a record can never get a verdict.

        Raises:
            LogUnwritable: The broker refuses to append one of them, and always will.
            LogUnreadable: A partition needs a newer release from some offset on.
        """
        for item in awaited:
            check_halt(self.replicas[item.partition])
            refusal = item.append.error()
            if item.transition is None and isinstance(refusal, LogUnwritable):
                raise refusal

    def follow_until(self, is_done: Callable[[], bool], timeout_ms: int) -> bool:
        """Follow the log until ``is_done``; return False after the timeout."""
        deadline = Deadline(timeout_ms, self._clock.now_ms)
        while not is_done():
            if deadline.is_over:
                return False
            self.step(min(POLL_MS, deadline.left_ms))
        return True

    def close(self, timeout_ms: int = 5_000) -> None:
        """Close the log."""
        self._log.close(timeout_ms)

    def begin(self, timeout_ms: int = ASK_MS_MAX) -> None:
        """Start from kept states, if any; ``step`` does so once.

        Args:
            timeout_ms: Longest time of each request.

        Raises:
            CoordinationError: The log did not answer; try again.
        """
        if self._sources:
            self.restore(self.replicas, sources=self._sources, timeout_ms=timeout_ms)
            self._sources = ()

    def restore(
        self,
        partitions: Iterable[int],
        *,
        sources: Sequence[KeptStates],
        timeout_ms: int = ASK_MS_MAX,
    ) -> None:
        """Start some partitions, which have folded nothing yet, from kept states.

        Entries of other partitions that arrive meanwhile are folded.

        Raises:
            CoordinationError: The log did not answer; nothing is decided.
        """
        aside: list[tuple[int, LogEntry]] = []
        try:
            found = restore(
                self._log,
                partitions,
                sources=sources,
                on_unfit=lambda kept, _: self.unfit.append(kept.partition),
                aside=aside,
                discards=False,
                timeout_ms=timeout_ms,
            )
        finally:
            now_ms = self._clock.now_ms()
            for t, entry in aside:
                if t in self.replicas:
                    self._fold(self.replicas[t], entry, now_ms=now_ms)
        for t, restored in found.items():
            if restored.source is not None:
                self.replicas[t].begin(restored.world, now_ms, notes=restored.notes)
                self.began_at[t] = restored.world.next_offset
                self.began_notes[t] = notes = {
                    name: note
                    for name, note in restored.notes.items()
                    if note.begin_ms is not None
                }
                if not notes.keys() >= {*names_in(restored.world)}:
                    self.is_pause_unknown = True
            elif restored.is_log_start_missing:
                self.replicas[t].begin(restored.world, now_ms, is_known=False)
                self.log_start_missing.append(t)

    def _step_until(
        self,
        is_done: Callable[[], bool],
        deadline: Deadline,
        *,
        note: Callable[[int, LogEntry], None] | None,
        late: Callable[[], str],
        awaited: list[Awaited] | None = None,
    ) -> None:
        while not is_done():
            self.require_folding(awaited or ())
            left_ms = deadline.require_ms(lambda: DeadlineExceeded(late()))
            if self._awaited and note is None:
                self.step(min(POLL_MS, left_ms))  # an awaited record may be a heartbeat
            else:
                self._fold_silently(self._read(min(POLL_MS, left_ms)), note)

    def _read(self, timeout_ms: int) -> Sequence[Run]:
        try:
            self.begin()
            return self._log.poll_runs(timeout_ms)
        except CoordinationError as error:
            if not error.retriable:
                raise
            return []

    def _fold_silently(
        self,
        runs: Iterable[Run],
        note: Callable[[int, LogEntry], None] | None,
    ) -> None:
        """Fold entries, ordinary heartbeats in runs, and return no transitions."""
        now_ms = self._clock.now_ms()
        for partition, run in runs:
            replica = self.replicas.get(partition)
            if replica is None:
                continue
            for entry, transitions in replica.fold_run(run, now_ms):
                if note is not None:
                    note(partition, entry)
                for transition in transitions if self._awaited else ():
                    self._match(partition, transition)
        self._find_known()

    def _find_known(self) -> None:
        """Find partitions whose state is known although their start is missing."""
        for t in [*self.log_start_missing]:
            if t in self.replicas and self.replicas[t].is_known:
                self.log_start_missing.remove(t)

    def _fold(
        self, replica: Replica, entry: LogEntry, *, now_ms: int
    ) -> tuple[Transition, ...]:
        transitions = replica.fold(entry, now_ms)
        for transition in transitions:
            self._match(replica.world.partition, transition)
        return transitions

    def _match(self, partition: int, transition: Transition) -> None:
        # Records are compared, not hashed: those of others may have dictionaries.
        for index, (record, awaited) in enumerate(self._awaited):
            if awaited.partition == partition and record == transition.record:
                awaited.transition = transition
                del self._awaited[index]
                return


def _why(awaited: list[Awaited]) -> str:
    errors = [error for item in awaited if (error := item.append.error()) is not None]
    return f" ({errors[0]})" if errors else ""
