"""Reads states of the past from the log (PROTOCOL 7.3 and 13).

Each coordinating partition is read from the newest checkpoint before the moment up to
the moment, never to the end of its log.
"""

import time
from bisect import bisect_right
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from operator import attrgetter
from typing import TypeVar

import attrs

from kafka_marshal.counting import counted
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine.checkpoint_reader import (
    FirstKnown,
    LogCheckpoints,
    RetainedCheckpoints,
    entries_in,
    first_known,
)
from kafka_marshal.engine.config_check import unformatted
from kafka_marshal.engine.kept_states import POLL_MS, restore
from kafka_marshal.engine.pause_notes import (
    PauseName,
    PauseNote,
    PauseNotes,
    joined,
)
from kafka_marshal.engine.replica import Replica
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    LogUnreadable,
)
from kafka_marshal.ports import Clock, CoordinationLog, LogRange, Run
from kafka_marshal.protocol.codec import Undecodable, decode, header_of
from kafka_marshal.protocol.packed_entries import PackedEntries
from kafka_marshal.protocol.placement import counts_of, partition_of, place_under
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import Config, Directive, PauseGroup, ReleaseGroup
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key, LogEntry, TimestampType

# How many entries before a checkpoint are searched for the reasons of its pauses.
SEARCHED_MAX = 2_000_000
RETRY_S = 0.05
_PAUSE_HEADS = (header_of(ReleaseGroup), header_of(PauseGroup), header_of(Directive))
_offset_of = attrgetter("offset")
T = TypeVar("T")


def up_to(run: Sequence[LogEntry], offset: int) -> Sequence[LogEntry]:
    """Return the entries of a run up to an offset."""
    if not run or run[-1].offset <= offset:
        return run
    return run[: bisect_right(run, offset, key=_offset_of)]


def _is_later(entry: LogEntry, time_ms: int) -> bool:
    return (
        entry.timestamp_ms > time_ms
        and entry.timestamp_type == TimestampType.LOG_APPEND_TIME
    )


def _first_later(run: Sequence[LogEntry], time_ms: int) -> int:
    """Return the index of the first entry appended after a time, else the length."""
    if isinstance(run, PackedEntries):
        return run.first_later(time_ms)
    later = (number for number, each in enumerate(run) if _is_later(each, time_ms))
    return next(later, len(run))


class Prefix:
    """Selects the entries of a view; collects why, and by whom, groups are paused.

    Args:
        offset: Per coordinating partition, the last offset of the view; partitions
            that are not named have no entries. None for all entries.
        time_ms: The view has the entries before the first one that was appended later
            than this, epoch ms. An entry with its client's timestamp never ends it.
            None for all entries.

    Attributes:
        time_ms: As given.
    """

    def __init__(self, offset: Mapping[int, int] | None, time_ms: int | None) -> None:
        self.time_ms = time_ms
        self._offset = offset
        self._ended: set[int] = set()
        self._notes: dict[int, PauseNotes] = {}

    @property
    def notes(self) -> dict[PauseName, PauseNote]:
        """Reason, person and begin of the pauses in the entries, by group and op_id."""
        return joined(self._notes)

    def begin(self, notes: Mapping[int, Mapping[PauseName, PauseNote]]) -> None:
        """Add notes on pauses that began before the entries, by partition."""
        for partition, known in notes.items():
            self._notes.setdefault(partition, PauseNotes()).add(known)

    def accept(self, partition: int, entry: LogEntry) -> bool:
        """Return whether the view folds an entry; note the reason of a pause."""
        # All entries after the first later one are excluded: a leader's clock may go
        # back, and with a gap the view would be a state that never existed.
        if partition in self._ended or self.is_past(partition, entry):
            self._ended.add(partition)
            return False
        self.note(partition, entry)
        return True

    def cut(self, partition: int, run: Sequence[LogEntry]) -> Sequence[LogEntry]:
        """Return the entries of a run that the view folds, without noting reasons."""
        if partition in self._ended:
            return ()
        mine = run
        if self._offset is not None:
            mine = up_to(run, self._offset.get(partition, -1))
        if self.time_ms is not None:
            count = _first_later(mine, self.time_ms)
            mine = mine if count == len(mine) else mine[:count]
        if len(mine) < len(run):
            self._ended.add(partition)
        return mine

    def has_ended(self, partition: int) -> bool:
        """Return whether an entry after the view was read."""
        return partition in self._ended

    def is_included(self, partition: int) -> bool:
        """Return whether the view includes a coordinating partition."""
        return self._offset is None or partition in self._offset

    def is_past(self, partition: int, entry: LogEntry) -> bool:
        """Return whether an entry is later than the moment of the view."""
        if self._offset is not None and entry.offset > self._offset.get(partition, -1):
            return True
        return self.time_ms is not None and _is_later(entry, self.time_ms)

    def has_no_later_entry(self, world: WorldState) -> bool:
        """Return whether no entry below a state was appended after the moment.

        A state has the latest append time of all entries below it (PROTOCOL 4.1).
        """
        return self.time_ms is None or world.append_time_ms <= self.time_ms

    def bounds(
        self, log: CoordinationLog, ends: Mapping[int, int], *, timeout_ms: int
    ) -> dict[int, int]:
        """Return an upper bound of the view's offsets in each partition, exclusive.

        For a time the brokers look it up: it is the end of the view, unless entries
        have timestamps of clients. Checkpoints are searched below it.

        Raises:
            CoordinationError: The brokers did not answer.
        """
        if self._offset is not None:
            after = {t: offset + 1 for t, offset in self._offset.items()}
            return {t: min(after.get(t, 0), end) for t, end in ends.items()}
        if self.time_ms is None:
            return dict(ends)
        later = log.offsets_for_times(self.time_ms + 1, timeout_ms)
        return {t: min(later.get(t, end), end) for t, end in ends.items()}

    def require_written(self, ends: Mapping[int, int], *, now_ms: int) -> None:
        """Check that the moment is not in the future.

        Args:
            ends: Next offset of each partition.
            now_ms: Wall time, epoch ms.

        Raises:
            ConfigurationError: It is in the future, or a partition does not exist.
        """
        for t, offset in (self._offset or {}).items():
            if t not in ends:
                raise ConfigurationError(
                    f"there is no coordinating partition {t}: the coordination topic "
                    f"has {counted(len(ends), 'partition')}; see: marshal topic info",
                    setting="offset",
                )
            if offset >= ends[t]:
                raise ConfigurationError(
                    f"offset {offset} is not written yet, and coordinating partition "
                    f"{t} ends at {ends[t]}; see: marshal topic info",
                    setting="offset",
                )
        if self.time_ms is not None and self.time_ms > now_ms:
            raise ConfigurationError(
                f"the moment is {self.time_ms - now_ms} ms in the future; choose an "
                "earlier one",
                setting="time_ms",
            )

    def forget(
        self, partition: int, *, pauses: Collection[PauseName] | None = None
    ) -> None:
        """Forget the end and the notes of a partition, to read it again.

        Args:
            partition: The coordinating partition.
            pauses: Forget only the reasons of these pauses; None for all.
        """
        self._ended.discard(partition)
        self._notes.setdefault(partition, PauseNotes()).forget(pauses)

    def notes_of(self, partition: int) -> dict[PauseName, PauseNote]:
        """Return the notes on pauses in a partition, by group and op_id."""
        found = self._notes.get(partition)
        return {} if found is None else dict(found.by_name)

    def add_later(self, partition: int, later: Mapping[PauseName, PauseNote]) -> None:
        """Add notes on pauses from entries after those noted so far."""
        for name, note in later.items():
            self._notes.setdefault(partition, PauseNotes()).add_later(name, note)

    def note(
        self,
        partition: int,
        entry: LogEntry,
        *,
        wanted: Collection[PauseName] | None = None,
    ) -> None:
        """Note reason, person and begin of a pause, if the entry has one.

        Args:
            partition: The coordinating partition.
            entry: An entry of the view.
            wanted: Only these pauses; None for all.
        """
        value = entry.value
        if value is None or not value.startswith(_PAUSE_HEADS):
            return
        notes = self._notes.setdefault(partition, PauseNotes())
        record = decode(value)
        if not isinstance(record, Undecodable):
            notes.take(record, entry.timestamp_ms, wanted=wanted)


@attrs.frozen(kw_only=True)
class Since:
    """Start of reading: the newest checkpoint before a moment.

    Every entry below that checkpoint is earlier than the moment.

    Attributes:
        offsets: The moment as an offset per coordinating partition; other partitions
            are read from their first entry on. None if the moment is a time.
        time_ms: The moment, epoch ms; None if it is given by offsets.
        fits: Further condition on the state of a checkpoint, or None.
    """

    offsets: Mapping[int, int] | None = None
    time_ms: int | None = None
    fits: Callable[[WorldState], bool] | None = None

    def checkpoints(
        self, log: CoordinationLog, ends: Mapping[int, int], *, timeout_ms: int
    ) -> LogCheckpoints:
        """Return the source of these checkpoints.

        Args:
            log: The log.
            ends: Offsets of each partition that the checkpoints must be below.
            timeout_ms: Timeout of the request.

        Raises:
            CoordinationError: The brokers did not answer.
        """
        if self.time_ms is None:
            offsets = self.offsets or {}
            before = {t: min(end, offsets.get(t, 0)) for t, end in ends.items()}
        else:
            # Timestamps of clients can make this offset too small, never too large.
            later = log.offsets_for_times(self.time_ms, timeout_ms)
            before = {t: min(end, later.get(t, end)) for t, end in ends.items()}
        return LogCheckpoints(before=before, fits=self.is_after)

    def is_after(self, world: WorldState) -> bool:
        """Return whether reading may begin at this state.

        It may if the moment is after every entry that the state contains.
        """
        if self.time_ms is None:
            offset = (self.offsets or {}).get(world.partition, 0)
            is_early = world.next_offset <= offset
        else:
            is_early = world.append_time_ms < self.time_ms
        return is_early and (self.fits is None or self.fits(world))


@attrs.define(kw_only=True)
class Begun:
    """One coordinating partition of a view of the past.

    Attributes:
        replica: Its fold.
        offset: Next offset of the checkpoint where the fold began; 0 without one.
        log_time_ms: Log time of that checkpoint.
        pauses: Pauses in that checkpoint; their reasons are in earlier entries.
    """

    replica: Replica
    offset: int
    log_time_ms: int
    pauses: frozenset[PauseName]


class PastReader:
    """Reads the states of one moment from a log.

    Attributes:
        missing: Partitions whose logs begin above offset 0 and have no complete
            checkpoint before the moment: their state is unknown.
        ends: Next offset of each partition when the reading began.
    """

    def __init__(
        self, log: CoordinationLog, prefix: Prefix, *, clock: Clock, timeout_ms: int
    ) -> None:
        """Look up the end of each partition.

        Args:
            log: The log, from which nothing was read yet.
            prefix: The moment.
            clock: Local and wall time.
            timeout_ms: Longest time of the whole reading.

        Raises:
            ConfigurationError: The moment is in the future.
            CoordinationError: The brokers did not answer.
        """
        self._log = log
        self._prefix = prefix
        self._clock = clock
        self._deadline = Deadline(timeout_ms, clock.now_ms)
        self.missing: list[int] = []
        self.ends = dict(log.end_offsets(self._left_ms()))
        prefix.require_written(self.ends, now_ms=clock.wall_ms())
        self._bounds = prefix.bounds(log, self.ends, timeout_ms=self._left_ms())
        # Put partitions at their ends, where they return nothing, until each is read.
        log.read_from(self.ends)

    def read(
        self, partitions: Iterable[int], *, has_members: bool
    ) -> dict[int, WorldState]:
        """Return the states of some partitions; those in ``missing`` are empty.

        Args:
            partitions: The coordinating partitions.
            has_members: Whether the states must have all members that announced
                themselves within two heartbeat intervals. Checkpoints have no members.

        Raises:
            DeadlineExceeded: The log was not read in time.
            CoordinationError: The brokers did not answer.
        """
        begun = self._begin(partitions, self._prefix.has_no_later_entry)
        self._fold(begun)
        if has_members:
            begun |= self._begin_earlier(begun)
        self._find_reasons(begun)
        return {t: each.replica.world for t, each in sorted(begun.items())}

    def read_key(self, key: Key, *, has_members: bool) -> dict[int, WorldState]:
        """Return the states of the partitions that may know a key; see ``read``.

        Partition 0 has the counts in force at the moment (PROTOCOL 10).
        """
        found = self.read([0], has_members=has_members)
        missing, wanted = set(self.missing), set(self._places(found[0], key))
        while left := sorted(wanted - found.keys()):
            more = self.read(left, has_members=has_members)
            missing.update(self.missing)
            found |= more
            for state in more.values():
                # This partition's moment may be before or after that of partition 0.
                wanted.update(_places_in(state, key))
        self.missing = sorted(missing & wanted)
        return {t: found[t] for t in sorted(wanted)}

    def partition_of(self, key: Key) -> int:
        """Return the coordinating partition of a key at the moment.

        Raises: as ``read``.
        """
        worlds = self.read_key(key, has_members=False)
        found = partition_of(worlds, key)
        return next(iter(worlds)) if found is None else found

    def _places(self, first: WorldState, key: Key) -> Iterable[int]:
        """Return the partitions that may have a key, by the state of partition 0."""
        if found := _places_in(first, key):
            return found
        # The moment is before the first Config, or its state is unknown.
        return (place_under(key, self.first_count()),)

    def first_count(self) -> int:
        """Return the first number of coordinating partitions that the log shows.

        Raises: as ``partition_count_of``.
        """
        return retried(
            lambda: partition_count_of(self._log, timeout_ms=self._left_ms()),
            deadline=self._deadline,
        )

    def known_from(self) -> dict[int, FirstKnown]:
        """Return the first known state of each partition in ``missing`` that has one.

        Raises:
            CoordinationError: The brokers did not answer.
        """
        starts = self._log.start_offsets(self._left_ms())
        wanted = {t: LogRange(starts[t], self.ends[t]) for t in self.missing}
        return first_known(self._log, wanted, timeout_ms=self._left_ms())

    def _begin(
        self, partitions: Iterable[int], fits: Callable[[WorldState], bool]
    ) -> dict[int, Begun]:
        """Restore partitions at their newest checkpoints, and move the log there."""
        source = LogCheckpoints(before=self._bounds, fits=fits)
        wanted = list(partitions)
        found = retried(
            lambda: restore(
                self._log,
                wanted,
                sources=(source,),
                on_unfit=lambda *_: None,
                discards=False,
                timeout_ms=max(1, self._deadline.left_ms),
            ),
            deadline=self._deadline,
        )
        begun = {}
        now_ms = self._clock.now_ms()
        for t, restored in found.items():
            world, replica = restored.world, Replica(t, now_ms=now_ms)
            replica.begin(world, now_ms)
            begun[t] = Begun(
                replica=replica,
                offset=world.next_offset,
                log_time_ms=world.now_ms,
                pauses=frozenset(_pauses(world)),
            )
        self.missing = [t for t, each in found.items() if each.is_log_start_missing]
        return begun

    def _fold(self, begun: Mapping[int, Begun]) -> None:
        """Fold partitions from the log's position up to the moment."""
        left = {t for t in begun if self._end(t) > 0} - set(self.missing)
        self._log.read_from({t: self.ends[t] for t in begun.keys() - left})
        while left:
            for t, run in self._poll():
                if t in left:
                    entries = self._prefix.cut(t, run)
                    replica = begun[t].replica
                    for entry, _ in replica.fold_run(entries, self._clock.now_ms()):
                        self._prefix.note(t, entry)
            places = self._log.positions()
            over = {t for t in left if self._is_over(t, places.get(t, 0))}
            left -= over
            if over and left:
                self._log.read_from({t: self.ends[t] for t in over})

    def _end(self, partition: int) -> int:
        """Return the offset at which the fold of a partition ends at the latest."""
        # With timestamps of clients, a bound by time may be too small.
        by_time = self._prefix.time_ms is not None
        return self.ends[partition] if by_time else self._bounds[partition]

    def _is_over(self, partition: int, position: int) -> bool:
        return position >= self._end(partition) or self._prefix.has_ended(partition)

    def _poll(self) -> Sequence[Run]:
        left_ms = self._left_ms()
        try:
            return self._log.poll_runs(min(POLL_MS, left_ms))
        except CoordinationError as error:
            if not error.retriable:
                raise
            return ()

    def _left_ms(self) -> int:
        """Return the remaining time.

        Raises:
            DeadlineExceeded: No time is left.
        """
        return self._deadline.require_ms(
            lambda: DeadlineExceeded(
                "the coordination log was not read in time; check the brokers with: "
                "marshal doctor, or allow more with --timeout"
            )
        )

    def _begin_earlier(self, begun: Mapping[int, Begun]) -> dict[int, Begun]:
        """Fold again if the checkpoint is less than two heartbeat intervals old.

        A member announces itself several times within two intervals. So from an earlier
        checkpoint the fold reads each member that was live at the moment.
        """
        latest_ms = {
            t: each.replica.world.now_ms - 2 * each.replica.heartbeat_interval_ms
            for t, each in begun.items()
            if each.offset
        }
        early = {t for t, ms in latest_ms.items() if begun[t].log_time_ms > ms}
        if not early:
            return {}
        missing = self.missing
        again = self._begin(
            early,
            lambda world: (
                self._prefix.has_no_later_entry(world)
                and world.now_ms <= latest_ms[world.partition]
            ),
        )
        # Without an earlier checkpoint, keep the first fold.
        again = {t: each for t, each in again.items() if t not in self.missing}
        self.missing = missing
        for t in again:
            self._prefix.forget(t)
        self._fold(again)
        return again

    def _find_reasons(self, begun: Mapping[int, Begun]) -> None:
        """Find the reasons of pauses that are in the checkpoints and still last.

        Searches from an earlier checkpoint without the pause: it is before all records
        of the pause.
        """
        wanted: dict[int, set[PauseName]] = {}
        for t, each in begun.items():
            lasting = each.pauses.intersection(_pauses(each.replica.world))
            if lasting:
                wanted[t] = set(lasting)
        if not wanted:
            return
        starts = self._log.start_offsets(self._left_ms())
        self._log.read_from(self.ends)
        before = {t: begun[t].offset - 1 for t in wanted}
        source = LogCheckpoints(
            before=before,
            fits=lambda world: wanted[world.partition].isdisjoint(_pauses(world)),
        )
        ranges = {t: LogRange(starts[t], self.ends[t]) for t in wanted}
        kept = source.find(ranges, log=self._log, timeout_ms=self._left_ms())
        windows = {}
        for t, end in before.items():
            first = max(starts[t], end - SEARCHED_MAX)
            windows[t] = LogRange(kept[t].offset if t in kept else first, end + 1)
        later = {t: self._prefix.notes_of(t) for t in wanted}
        for t, names in wanted.items():
            self._prefix.forget(t, pauses=names)  # these are from renewals
        for t, entry in entries_in(self._log, windows, timeout_ms=self._left_ms()):
            self._prefix.note(t, entry, wanted=wanted[t])
        for t, names in wanted.items():
            self._prefix.add_later(t, {n: later[t][n] for n in names if n in later[t]})


def retried(call: Callable[[], T], *, deadline: Deadline) -> T:
    """Repeat a call after retriable errors, until a deadline.

    Raises: as the call, for other errors, and for any after the deadline.
    """
    while True:
        try:
            return call()
        except CoordinationError as error:
            if not error.retriable or deadline.is_over:
                raise
            time.sleep(RETRY_S)


def _pauses(world: WorldState) -> Iterable[PauseName]:
    for group_id, group in world.groups.items():
        for pause in group.pauses:
            yield group_id, pause.op_id
        for each in group.scheduled:
            yield group_id, each.op_id
        for directive in group.directives:
            yield group_id, directive.op_id


def _places_in(state: WorldState, key: Key) -> tuple[int, ...]:
    """Return the partitions that may have a key, by the counts in one state."""
    places = (place_under(key, count) for count in counts_of({0: state}))
    return tuple(dict.fromkeys(places))


def partition_count_of(log: CoordinationLog, *, timeout_ms: int) -> int:
    """Return the first number of coordinating partitions that the log still shows.

    It is in the first checkpoint of partition 0, or in its first entries.

    Raises:
        TopicMisconfigured: The topic is not formatted.
        LogUnreadable: Partition 0 has lost its start, and has no checkpoint.
        CoordinationError: The brokers did not answer.
    """
    ends = log.end_offsets(timeout_ms)
    log.read_from(ends)
    restored = restore(
        log,
        [0],
        sources=(RetainedCheckpoints(),),
        on_unfit=lambda *_: None,
        discards=False,
        timeout_ms=timeout_ms,
    )[0]
    if restored.is_log_start_missing:
        known = "the number of coordinating partitions is not known"
        raise LogUnreadable(
            f"the log of coordinating partition 0 begins at offset "
            f"{restored.log_start} and has no checkpoint: {known}; see: marshal doctor"
        )
    config = restored.world.config
    if config is None:
        config = _first_config(log, restored.world, ends[0], timeout_ms=timeout_ms)
    log.read_from({0: ends[0]})
    if config is None:
        raise unformatted([restored.world])
    return config.partition_count


def _first_config(
    log: CoordinationLog, world: WorldState, end: int, *, timeout_ms: int
) -> Config | None:
    start = world.next_offset
    if start == end:
        return None
    window = {world.partition: LogRange(start, end)}
    for _, entry in entries_in(log, window, timeout_ms=timeout_ms):
        apply(world, entry)
        if world.config is not None:
            return world.config
    return None
