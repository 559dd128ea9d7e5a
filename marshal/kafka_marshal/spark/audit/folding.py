"""The fold of one coordinating partition in a task, and its checkpoint.

A task holds the state of the fold, the open part of the history and one batch, so its
memory does not grow with the log. The fold is the one that clients run.

A checkpoint has the canonical snapshot (PROTOCOL 7.1), the open history, and members.
Members are soft state and not in the snapshot, but later verdicts depend on them:
without them an incremental run would write other rows than a run over the whole log.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import msgspec

from kafka_marshal.clock import SystemClock
from kafka_marshal.engine.checkpoint_reader import RetainedCheckpoints, entries_in
from kafka_marshal.engine.config_check import unformatted
from kafka_marshal.engine.kept_states import restore
from kafka_marshal.errors import (
    LogTruncated,
    LogUnreadable,
    MalformedRecord,
)
from kafka_marshal.history.historian import Historian
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.topiclog import TopicLog
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.ports import CoordinationLog, LogRange
from kafka_marshal.protocol.codec import Undecodable, decode, encode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import Member
from kafka_marshal.protocol.snapshot import from_bytes, to_bytes
from kafka_marshal.protocol.state import MemberState, WorldState
from kafka_marshal.protocol.types import LogEntry
from kafka_marshal.spark.audit import schema
from kafka_marshal.spark.audit.rows import (
    Staged,
    age_rows,
    staged,
    state_row,
)
from kafka_marshal.views.log_scan import runs_to, unknown_text

# Among this many entries at the start of a partition one must be a protocol record.
FIRST_ENTRIES = 1_000
VERSION = 2
Fields = tuple[int, bytes, msgspec.Raw, list[tuple[bytes, int, int, int]]]
_DECODER = msgspec.msgpack.Decoder(Fields)


@attrs.frozen
class Source(ConnectionConfig):
    """Connection to the log; sent to every task.

    Attributes:
        timeout_ms: Longest time to open the log, and to wait for missing entries.
    """

    timeout_ms: int = attrs.field(default=30_000, kw_only=True)


@attrs.frozen
class Bounds:
    """The part of the log to report.

    The fold always starts at the log start, or at the first checkpoint if retention has
    deleted the start. So ``from_offset`` and ``from_ms`` only omit rows. ``to_offset``
    and ``to_ms`` end the fold, and the end state is the state there.

    Attributes:
        from_offset: Omit rows that were complete below this offset.
        from_ms: Omit rows that were complete before this time of a record, epoch ms.
        to_offset: The last offset to fold.
        to_ms: Fold the entries before the first one later than this, epoch ms.
    """

    from_offset: int | None = None
    from_ms: int | None = None
    to_offset: int | None = None
    to_ms: int | None = None

    def is_reached(self, entry: LogEntry) -> bool:
        """Return whether rows are reported from this entry on."""
        if self.from_offset is not None and entry.offset < self.from_offset:
            return False
        return self.from_ms is None or entry.timestamp_ms >= self.from_ms

    def first_reached(self, run: Sequence[LogEntry]) -> int:
        """Return the index of the first entry that ``is_reached``, else the length."""
        reached = (at for at, each in enumerate(run) if self.is_reached(each))
        return next(reached, len(run))

    def cut(self, run: Sequence[LogEntry]) -> Sequence[LogEntry]:
        """Return the entries of a run before the first one that ``is_past``."""
        if self.to_offset is None and self.to_ms is None:
            return run
        past = (at for at, each in enumerate(run) if self.is_past(each))
        return run[: next(past, len(run))]

    def is_past(self, entry: LogEntry) -> bool:
        """Return whether the fold ends before this entry."""
        if self.to_offset is not None and entry.offset > self.to_offset:
            return True
        return self.to_ms is not None and entry.timestamp_ms > self.to_ms


@attrs.frozen(kw_only=True)
class Work:
    """The part of an audit that one task does.

    Attributes:
        partition: Coordinating partition.
        end: Exclusive end of the offsets to fold.
        saved: Checkpoint of the last run, None without one.
        is_new: Whether the last run, if any, lacks this partition.
    """

    partition: int
    end: int
    saved: bytes | None = None
    is_new: bool = True


def fold(
    work: Work, source: Source, *, bounds: Bounds, sample_ms: int
) -> Iterator[Staged]:
    """Yield the complete rows of a partition, then its open rows, then its end state.

    Args:
        work: The partition, with the checkpoint of the last run.
        source: Connection to the log.
        bounds: The part of the log to report.
        sample_ms: Log time between two samples of a key's position.
    """
    number, start = work.partition, None
    if work.is_new:
        world, historian = (
            begin(source, work, bounds=bounds),
            Historian(sample_ms=sample_ms),
        )
        if world.next_offset:
            historian.begin(world)
            start = world.next_offset
    else:
        world, historian = from_checkpoint(work.saved, partition=number)
        start = world.next_offset
    is_reached = False
    for run in read(source, work, start=start):
        mine = bounds.cut(run)
        # Once reached, report everything: a leader's clock may go back, and rows must
        # not refer to omitted rows.
        first = 0 if is_reached else bounds.first_reached(mine)
        is_reached = is_reached or first < len(mine)
        if first:
            deque(historian.take_run(world, mine[:first]), maxlen=0)
        for row in historian.take_run(world, mine[first:]):
            yield staged(number, row)
        if len(mine) < len(run) or world.halted is not None:
            break
    for row in historian.open_rows():
        yield staged(number, row, is_open=True)
    yield from age_rows(number, historian.ages)
    yield state_row(world, historian)
    names = schema.STATE.names
    values = (number, world.next_offset, to_checkpoint(world, historian))
    yield Staged(schema.STATE, dict(zip(names, values, strict=True)))


def begin(source: Source, work: Work, *, bounds: Bounds) -> WorldState:
    """Return the start state of a first run: the empty state, if the log has its start.

    If retention has deleted the start, return the state of the first checkpoint in the
    log that is complete within the bounds.

    Raises:
        LogUnreadable: There is no such checkpoint.
        CoordinationError: The cluster did not answer.
    """
    number = work.partition
    with _opened(source, number) as log:
        restored = restore(
            log,
            [number],
            sources=(RetainedCheckpoints(is_past=lambda _, e: bounds.is_past(e)),),
            on_unfit=lambda *_: None,
            timeout_ms=source.timeout_ms,
        )[number]
    if restored.is_log_start_missing:
        raise LogUnreadable(unknown_text([number]))
    return restored.world


@contextmanager
def _opened(source: Source, *partitions: int) -> Iterator[TopicLog]:
    """Open the log, or some of its partitions; close it after the block."""
    log = open_coordination_log(
        source,
        heartbeat_interval_ms=None,
        timeout_ms=source.timeout_ms,
        only=(lambda _: partitions) if partitions else None,
    )
    try:
        yield log
    finally:
        log.close(0)


def read(
    source: Source, work: Work, *, start: int | None
) -> Iterator[Sequence[LogEntry]]:
    """Open the log, yield the entries of one coordinating partition in runs, close it.

    Args:
        source: Connection to the log.
        work: The partition, and its end.
        start: First offset; None for the log start.

    Raises:
        LogTruncated: The log does not reach ``work.end``, or does not have ``start``.
        DeadlineExceeded: The end was not reached, and no entry arrived in time.
    """
    number = work.partition
    with _opened(source, number) as log:
        if start is not None:
            log.start_at({number: start}, timeout_ms=source.timeout_ms)
        yield from runs_of(log, work, timeout_ms=source.timeout_ms)


def runs_of(
    log: CoordinationLog, work: Work, *, timeout_ms: int
) -> Iterator[Sequence[LogEntry]]:
    """Yield the entries of a partition from an open log, up to the planned end."""
    number = work.partition
    if log.end_offsets(timeout_ms)[number] < work.end:
        raise LogTruncated(
            f"coordinating partition {number} ends before offset {work.end}, which "
            "it had when this run was planned; audit the log again into another "
            "directory"
        )
    ends, clock = {number: work.end}, SystemClock()
    for _, run in runs_to(log, ends, clock=clock, timeout_ms=timeout_ms):
        yield run


@attrs.frozen
class LogEnds:
    """The ends of the log at one moment.

    Attributes:
        cluster_id: The cluster.
        topic_id: Kafka's id of the topic in hex, or None if unknown.
        ends: Log end offset by coordinating partition.
    """

    cluster_id: str
    topic_id: str | None
    ends: Mapping[int, int]


def log_ends(source: Source) -> LogEnds:
    """Query the ends of the log.

    Raises:
        TopicMisconfigured: There is no such topic.
        CoordinationError: The cluster did not answer.
    """
    with _opened(source) as log:
        ends = dict(log.end_offsets(source.timeout_ms))
    topic_id = log.topic_id
    return LogEnds(log.cluster_id, None if topic_id is None else topic_id.hex(), ends)


def require_coordination_log(source: Source) -> None:
    """Raise unless a partition begins with records of the protocol.

    The fold accepts any bytes: without this check, a topic with another use would be
    read to its end.

    Raises:
        TopicMisconfigured: There is no such topic, it is empty, or it has another use.
        CoordinationError: The cluster did not answer.
    """
    with _opened(source) as log:
        starts = log.start_offsets(source.timeout_ms)
        ends = log.end_offsets(source.timeout_ms)
        windows = {
            t: LogRange(starts[t], min(end, starts[t] + FIRST_ENTRIES))
            for t, end in ends.items()
            if starts[t] < end
        }
        worlds = {t: WorldState(t) for t in windows}
        for t, entry in entries_in(log, windows, timeout_ms=source.timeout_ms):
            if not isinstance(decode(entry.value), Undecodable):
                return
            apply(worlds[t], entry)
    raise unformatted(worlds.values(), source.coordination_topic)


def to_checkpoint(world: WorldState, historian: Historian) -> bytes | None:
    """Return a checkpoint; None if the fold has halted."""
    if world.halted is not None:
        return None
    members = [
        (encode(each.record), each.since_offset, each.offset, each.seen_ms)
        for each in world.soft.members.values()
    ]
    return msgspec.msgpack.encode((VERSION, to_bytes(world), historian, members))


def from_checkpoint(
    value: bytes | None, *, partition: int
) -> tuple[WorldState, Historian]:
    """Return the fold and the history of a checkpoint.

    Raises:
        LogUnreadable: The fold halted in the last run, so there is no checkpoint.
        MalformedRecord: This release cannot read these bytes.
    """
    if value is None:
        raise LogUnreadable(
            f"coordinating partition {partition} halted in the last run: it needs a "
            "feature level that the release which ran it did not know; upgrade "
            "kafka-marshal and audit into a new directory"
        )
    try:
        version, snapshot, history, members = _DECODER.decode(value)
    except msgspec.MsgspecError as error:
        raise MalformedRecord(f"not a saved audit: {error}") from error
    if version != VERSION:
        raise MalformedRecord(
            f"the last run was saved in version {version}, and this release reads "
            f"{VERSION}; audit into a new directory"
        )
    world = from_bytes(snapshot)
    try:
        historian = msgspec.msgpack.decode(history, type=Historian)
    except msgspec.MsgspecError as error:
        raise MalformedRecord(f"not a history: {error}") from error
    for frame, since_offset, offset, seen_ms in members:
        record = decode(frame)
        if not isinstance(record, Member):
            raise MalformedRecord("not a saved audit: a member is no Member")
        name = (record.group_id, record.client_id, record.incarnation)
        world.soft.members[name] = MemberState(
            record=record, since_offset=since_offset, offset=offset, seen_ms=seen_ms
        )
    return world, historian
