"""Restores coordinating partitions from kept states (PROTOCOL 7.3).

A kept state is evidence, never authority: it is used only if the log still contains the
last entry that the state includes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import msgspec

from kafka_marshal.errors import CoordinationError, LogTruncated, MalformedRecord
from kafka_marshal.ports import CONFIGURE_MS, Append, CoordinationLog, LogRange
from kafka_marshal.protocol.codec import decode, encode
from kafka_marshal.protocol.items import PlanNote, UndecodableEntry
from kafka_marshal.protocol.records import SUPPORTED_LEVEL, Member, Plan
from kafka_marshal.protocol.snapshot import digest, from_bytes
from kafka_marshal.protocol.state import (
    KeyNote,
    MemberState,
    SoftState,
    WorldState,
)
from kafka_marshal.protocol.types import Key, LogEntry

from .pause_notes import PauseName, PauseNote

ASK_MS_MAX = 10_000
POLL_MS = 100
# Successive polls without a result before the search fails.
POLLS_MAX = 100


def polls_in(timeout_ms: int) -> int:
    """Return the number of successive polls without a result to allow in a search."""
    return max(1, min(POLLS_MAX, timeout_ms // POLL_MS))


@attrs.frozen(kw_only=True)
class KeptState:
    """The state of one coordinating partition after every entry below ``offset``.

    Attributes:
        partition: Number of the coordinating partition.
        offset: Next offset to fold.
        leader_epoch: Leader epoch of the last entry that was folded.
        digest: Digest of the state, as its writer recorded it.
        state: Its canonical bytes (``protocol.snapshot.to_bytes``).
        source: Description of its source, for people.
        is_in_log: Whether it was read from this log, at ``offset`` or later: then no
            truncation can separate the two. Any other state fits only if the entry
            before ``offset`` still has ``leader_epoch``.
        soft: Soft state as bytes, if it was kept as well.
    """

    partition: int
    offset: int
    leader_epoch: int
    digest: str
    state: bytes = attrs.field(repr=False)
    source: str
    is_in_log: bool = False
    soft: bytes | None = attrs.field(default=None, repr=False)


class KeptStates(Protocol):
    """A source of kept states: files, or checkpoints in the log."""

    def find(
        self, wanted: Mapping[int, LogRange], *, log: CoordinationLog, timeout_ms: int
    ) -> Mapping[int, KeptState]:
        """Return the newest kept state of each partition that has one.

        Called on the engine's thread before it reads, without its lock. The source may
        read the log with ``read_from``, and may leave it at any offset.

        Args:
            wanted: Offset ranges of the partitions to restore.
            log: The log.
            timeout_ms: Timeout of the search.

        Raises:
            CoordinationError: The log did not answer; the engine tries again.
        """
        ...

    def discard(self, state: KeptState) -> None:
        """Discard a state that does not fit the log, if this source can."""
        del state


@attrs.frozen
class Restored:
    """The starting point of one coordinating partition.

    Attributes:
        world: State to start from; reading starts at its ``next_offset``.
        source: Its source, None if the log is read from its start.
        log_start: First offset of the log.
        notes: Notes about the pauses of the state.
    """

    world: WorldState
    source: str | None
    log_start: int
    notes: Mapping[PauseName, PauseNote] = attrs.field(factory=dict)

    @property
    def is_log_start_missing(self) -> bool:
        """Whether entries are gone and no kept state replaces them (PROTOCOL 7.3)."""
        return self.source is None and self.log_start > 0


class WentBack(str):
    """Why a state does not fit: the log has lost entries that the state contains."""

    __slots__ = ()


def world_of(kept: KeptState, log_range: LogRange) -> WorldState | str:
    """Return the state, or why it does not fit a log with these offsets.

    Makes all checks that need no reading of the log.
    """
    if not log_range.start <= kept.offset <= log_range.end:
        why = (
            f"it ends at offset {kept.offset}, and the log has the offsets from "
            f"{log_range.start} to {log_range.end}"
        )
        return WentBack(why) if kept.offset > log_range.end else why
    if not kept.is_in_log and kept.offset <= log_range.start:
        return (
            f"the log no longer has the entry before offset {kept.offset}, so the "
            "state cannot be verified"
        )
    try:
        world = from_bytes(kept.state)
    except MalformedRecord as error:
        return str(error)
    names = (world.partition, world.next_offset, world.leader_epoch)
    if names != (kept.partition, kept.offset, kept.leader_epoch):
        return "its header and its content differ in partition, offset or leader epoch"
    if digest(world) != kept.digest:
        return f"its content has digest {digest(world)}, its header {kept.digest}"
    if world.feature_level > SUPPORTED_LEVEL:
        return (
            f"it needs feature level {world.feature_level}, which this release does "
            "not know"
        )
    if kept.soft is not None:
        world.soft = soft_from_bytes(kept.soft)
    return world


def restore(
    log: CoordinationLog,
    partitions: Iterable[int],
    *,
    sources: Sequence[KeptStates],
    from_offsets: Mapping[int, int] | None = None,
    on_unfit: Callable[[KeptState, str], None],
    aside: list[tuple[int, LogEntry]] | None = None,
    discards: bool = True,
    timeout_ms: int = ASK_MS_MAX,
) -> dict[int, Restored]:
    """Choose the start of each coordinating partition, and move the log there.

    The first source with a fitting state wins; without one, the partition is read
    from its start.

    Args:
        log: The log. Only the read offsets of these partitions change.
        partitions: The coordinating partitions to restore.
        sources: Sources of kept states, in order of preference.
        from_offsets: Offsets at which to read partitions without a kept state,
            instead of their starts.
        on_unfit: Called with each state that does not fit, and why (``WentBack`` if
            the log has lost entries).
        aside: Receives entries of other partitions that are read meanwhile, also if
            this call fails: the log does not return them again.
        discards: Whether sources discard states that do not fit. Read-only views do
            not. A state that shows lost entries is kept in any case: it is evidence
            until the loss is reported (PROTOCOL 7.5).
        timeout_ms: Timeout of each request.

    Returns:
        The start of each partition.

    Raises:
        CoordinationError: The log did not answer; nothing is decided.
        LogTruncated: A partition that is not being restored was truncated, or the
            error names no partition; nothing is decided.
    """
    starts = log.start_offsets(timeout_ms)
    ends = log.end_offsets(timeout_ms)
    ranges = {t: LogRange(starts[t], ends[t]) for t in sorted(partitions)}
    view = RestoreLog(log, ranges, [] if aside is None else aside)
    found: dict[int, Restored] = {}
    for source in sources:
        wanted = {t: spans for t, spans in ranges.items() if t not in found}
        if not wanted:
            break
        kept = _fitting(source, wanted, log=view, timeout_ms=timeout_ms)
        for t, (state, world) in kept.items():
            if isinstance(world, str):
                on_unfit(state, world)
                is_evidence = isinstance(world, WentBack)
                if discards and not is_evidence:
                    source.discard(state)
            else:
                notes = {} if state.soft is None else notes_from_bytes(state.soft)
                found[t] = Restored(world, state.source, starts[t], notes)
    for t in ranges.keys() - found.keys():
        found[t] = Restored(WorldState(t), None, starts[t])
    first_offsets = dict(starts) | dict(from_offsets or {})
    log.read_from(
        {
            t: first_offsets[t] if each.source is None else each.world.next_offset
            for t, each in found.items()
        }
    )
    return found


def _fitting(
    source: KeptStates,
    wanted: Mapping[int, LogRange],
    *,
    log: CoordinationLog,
    timeout_ms: int,
) -> dict[int, tuple[KeptState, WorldState | str]]:
    """Return a source's kept states, each with its world or why it does not fit."""
    # Partitions at their ends return no entries during the search.
    ends = {t: spans.end for t, spans in wanted.items()}
    log.read_from(ends)
    kept = source.find(wanted, log=log, timeout_ms=timeout_ms)
    found = {t: (state, world_of(state, wanted[t])) for t, state in kept.items()}
    log.read_from(ends)
    fitting = [state for state, world in found.values() if not isinstance(world, str)]
    for t, why in _unproven(log, fitting, timeout_ms=timeout_ms):
        found[t] = (found[t][0], why)
    return found


def _unproven(
    log: CoordinationLog, states: Sequence[KeptState], *, timeout_ms: int
) -> list[tuple[int, str]]:
    """Return the states whose last entry is not in the log, and why.

    An offset and its leader epoch identify one entry for ever, and all entries before
    it: a log that was truncated and has grown again has another epoch.
    """
    awaited = {state.partition: state for state in states if not state.is_in_log}
    if not awaited:
        return []
    log.read_from({t: state.offset - 1 for t, state in awaited.items()})
    unproven: list[tuple[int, str]] = []
    for _ in range(polls_in(timeout_ms)):
        for t, entry in log.poll(POLL_MS):
            state = awaited.pop(t, None)
            if state is None:
                continue
            at = (entry.offset, entry.leader_epoch)
            if at != (state.offset - 1, state.leader_epoch):
                why = (
                    f"its last entry is offset {state.offset - 1} of leader epoch "
                    f"{state.leader_epoch}; the log has offset {at[0]} of leader "
                    f"epoch {at[1]}"
                )
                unproven.append((t, WentBack(why)))
        if not awaited:
            return unproven
    raise CoordinationError(
        f"the coordinating partitions {sorted(awaited)} sent nothing more before "
        "they were read to their ends; check the brokers with: marshal doctor"
    )


class LogView(CoordinationLog):
    """A view of a log that passes on every call; subclasses change some."""

    def __init__(self, log: CoordinationLog) -> None:
        self._log = log
        self.topic, self.topic_id = log.topic, log.topic_id

    @property
    def partition_count(self) -> int:
        """Number of partitions of the log."""
        return self._log.partition_count

    def read_added(
        self, partition_count: int, *, timeout_ms: int = CONFIGURE_MS
    ) -> None:
        """Read partitions that were added, as the log."""
        self._log.read_added(partition_count, timeout_ms=timeout_ms)

    def append(self, partition: int, value: bytes) -> Append:
        """Append to the log."""
        return self._log.append(partition, value)

    def configure(
        self, heartbeat_interval_ms: int, *, timeout_ms: int = CONFIGURE_MS
    ) -> None:
        """Adapt the timeouts of appends, as the log."""
        self._log.configure(heartbeat_interval_ms, timeout_ms=timeout_ms)

    def poll(self, timeout_ms: int) -> Sequence[tuple[int, LogEntry]]:
        """Return new entries, as the log."""
        return self._log.poll(timeout_ms)

    def read_from(self, offsets: Mapping[int, int]) -> None:
        """Change the read offsets, as the log."""
        self._log.read_from(offsets)

    def positions(self) -> Mapping[int, int]:
        """Return the next offsets, as the log."""
        return self._log.positions()

    def start_offsets(self, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offsets, as the log."""
        return self._log.start_offsets(timeout_ms)

    def offsets_for_times(self, time_ms: int, timeout_ms: int) -> Mapping[int, int]:
        """Return the first offsets with this timestamp or a later one, as the log."""
        return self._log.offsets_for_times(time_ms, timeout_ms)

    def end_offsets(
        self, timeout_ms: int, partitions: Collection[int] | None = None
    ) -> Mapping[int, int]:
        """Return the next offsets to be written, as the log."""
        return self._log.end_offsets(timeout_ms, partitions)

    def close(self, timeout_ms: int) -> None:
        """Close the log."""
        self._log.close(timeout_ms)


class RestoreLog(LogView):
    """A view of the log that shows only the partitions that are being restored.

    Attributes:
        entries: Entries of other partitions, set aside.
    """

    def __init__(
        self,
        log: CoordinationLog,
        partitions: Collection[int],
        entries: list[tuple[int, LogEntry]],
    ) -> None:
        super().__init__(log)
        self._partitions = frozenset(partitions)
        self.entries = entries

    def poll(self, timeout_ms: int) -> Sequence[tuple[int, LogEntry]]:
        """Return new entries of the partitions that are being restored.

        Raises:
            CoordinationError: As the log; also if a partition that is being restored
                was truncated: its start and end must be requested again.
            LogTruncated: Another partition was truncated. The log repeats this error
                until that partition is restored, so the engine must get it.
        """
        return self._mine(lambda: self._log.poll(timeout_ms))

    def skim(self, timeout_ms: int, *, head: bytes) -> Sequence[tuple[int, LogEntry]]:
        """Return new entries as ``poll``; values without ``head`` may be left out.

        Raises: as ``poll``.
        """
        if len(self._partitions) < self._log.partition_count:
            return self.poll(timeout_ms)  # entries to set aside must be complete
        return self._mine(lambda: self._log.skim(timeout_ms, head=head))

    def _mine(
        self, read: Callable[[], Sequence[tuple[int, LogEntry]]]
    ) -> Sequence[tuple[int, LogEntry]]:
        try:
            entries = read()
        except LogTruncated as error:
            if error.partition not in self._partitions:
                raise
            raise CoordinationError(f"while a state is restored: {error}") from error
        mine = [each for each in entries if each[0] in self._partitions]
        self.entries += [each for each in entries if each[0] not in self._partitions]
        return mine

    def read_from(self, offsets: Mapping[int, int]) -> None:
        """Change the read offsets of partitions that are being restored."""
        assert offsets.keys() <= self._partitions
        super().read_from(offsets)

    def close(self, timeout_ms: int) -> None:
        """Leave the log open, for its owner."""


FORMAT_VERSION = 1

_encode = msgspec.msgpack.Encoder().encode


class _Soft(msgspec.Struct, array_like=True, forbid_unknown_fields=True, kw_only=True):
    version: int
    counters: dict[str, int]
    undecodable: list[UndecodableEntry]
    members: list[tuple[bytes, int, int, int]]
    notes: list[tuple[Key, KeyNote]]
    pauses: list[tuple[str, bytes, PauseNote]] = []
    offers: list[tuple[Key, tuple[int, int]]] = []
    plans: list[tuple[list[bytes], int, int, int]] = []


_decode = msgspec.msgpack.Decoder(_Soft).decode


def freeze_soft(
    soft: SoftState, pauses: Mapping[PauseName, PauseNote] | None = None
) -> Callable[[], bytes]:
    """Copy the soft state, with the notes about pauses.

    Returns:
        A function that encodes the copy, on any thread.
    """
    members: list[Any] = [
        (encode(each.record), each.since_offset, each.offset, each.seen_ms)
        for each in soft.members.values()
    ]
    plans: list[Any] = [
        ([encode(record) for record in note.records], *note[1:])
        for note in soft.plans.values()
    ]
    frozen = _Soft(
        version=FORMAT_VERSION,
        counters=dict(soft.counters),
        undecodable=list(soft.undecodable),
        members=members,
        notes=list(soft.notes.items()),
        pauses=[(*name, note) for name, note in (pauses or {}).items()],
        offers=list(soft.offered_ms.items()),
        plans=plans,
    )
    return lambda: _encode(frozen)


def _read(value: bytes) -> _Soft | None:
    try:
        read = _decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return read if read.version == FORMAT_VERSION else None


def notes_from_bytes(value: bytes) -> dict[PauseName, PauseNote]:
    """Return the notes of ``freeze_soft``; none if the bytes are invalid."""
    read = _read(value)
    pauses = () if read is None else read.pauses
    return {(group_id, op_id): note for group_id, op_id, note in pauses}


def soft_from_bytes(value: bytes) -> SoftState:
    """Return the soft state of ``freeze_soft``; empty if the bytes are invalid."""
    soft, read = SoftState(), _read(value)
    if read is None:
        return soft
    for raw, since_offset, offset, seen_ms in read.members:
        record = decode(raw)
        if isinstance(record, Member):
            name = (record.group_id, record.client_id, record.incarnation)
            soft.members[name] = MemberState(
                record=record, since_offset=since_offset, offset=offset, seen_ms=seen_ms
            )
    soft.counters.update(read.counters)
    soft.notes.update(read.notes)
    soft.offered_ms.update(read.offers)
    for values, *rest in read.plans:
        decoded = (decode(value) for value in values)
        records = tuple(each for each in decoded if isinstance(each, Plan))
        if records:
            soft.plans[records[0].group_id] = PlanNote(records, *rest)
    soft.undecodable.extend(read.undecodable)  # keeps the last ones
    return soft
