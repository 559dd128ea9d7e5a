"""Reads all entries of the coordination log once, from its start or a checkpoint."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kafka_marshal.arguments import to_ms
from kafka_marshal.clock import SystemClock, instant
from kafka_marshal.closing import Closing
from kafka_marshal.deadline import Deadline
from kafka_marshal.defaults import COORDINATION_TOPIC, SERVERS
from kafka_marshal.engine.checkpoint_reader import (
    FirstKnown,
    LogCheckpoints,
    RetainedCheckpoints,
)
from kafka_marshal.engine.config_check import (
    unformatted,
)
from kafka_marshal.engine.kept_states import POLL_MS, KeptStates, Restored, restore
from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    LogUnreadable,
)
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.ports import Clock, CoordinationLog, LogRange, Run
from kafka_marshal.protocol.layout import used_count
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import from_bytes, to_bytes
from kafka_marshal.protocol.state import (
    WorldState,
)
from kafka_marshal.protocol.types import LogEntry, TimestampType
from kafka_marshal.views.past import (
    Prefix,
    Since,
    up_to,
)

TIMEOUT_MS = 30_000


@attrs.frozen
class Arrival:
    """A record that was read as soon as it was appended.

    Attributes:
        partition: Coordinating partition of the record.
        append_ms: Time of the append by the broker's clock, epoch ms.
        read_ms: Time of reading by this machine's clock, epoch ms.
    """

    partition: int
    append_ms: int
    read_ms: int


class LogScan(Closing):
    """Reads once all entries that the coordination log has when it is opened.

    A context manager. Iterate over it for pairs of coordinating partition and entry, in
    offset order within each partition.

    Args:
        bootstrap_servers: Addresses of the cluster.
        coordination_topic: Name of the coordination topic.
        options: Security and connection options.
        transport: ``auto``, ``fast`` or ``kafka-python``; see ``Marshal``.
        only: Called with the number of partitions, returns those to read; None for all.
        timeout_ms: Longest time to open, and longest wait for the next entries.

    Attributes:
        cluster_id: Cluster of the log.
        topic_id: Id of the coordination topic, None if brokers have no ids.
        starts: First offset that exists, per coordinating partition.
        ends: Next offset when the log was opened, per coordinating partition.
        read_at_ms: Wall time when ``ends`` was looked up, epoch ms. Estimates of the
            time since the last entry use it, however long reading takes.
        prefix: Selects the entries of the scan, and has the reasons of their pauses.

    Raises:
        TopicMisconfigured: There is no such topic.
        CoordinationError: The cluster did not answer.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        only: Callable[[int], Collection[int]] | None = None,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        settings = ConnectionConfig(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
        )
        self._timeout_ms = timeout_ms = to_ms("timeout_ms", timeout_ms)
        self._clock = SystemClock()
        self.prefix = Prefix(None, None)
        self._log = open_coordination_log(
            settings,
            heartbeat_interval_ms=None,
            timeout_ms=timeout_ms,
            only=only,
            follows=False,
        )
        self.cluster_id: str = self._log.cluster_id
        self.topic_id: bytes | None = self._log.topic_id
        try:
            self.starts = dict(self._log.start_offsets(timeout_ms))
            self.read_at_ms = self._clock.wall_ms()
            self.ends = dict(self._log.end_offsets(timeout_ms))
        except BaseException:
            self.close()
            raise

    def until(
        self, *, offset: Mapping[int, int] | None = None, time_ms: int | None = None
    ) -> None:
        """End the scan at a moment, see ``World.at``; call it before other methods.

        Partitions that ``offset`` does not name are not read.

        Raises:
            ConfigurationError: The moment is in the future.
        """
        prefix = Prefix(offset, time_ms)
        prefix.require_written(self.ends, now_ms=self._clock.wall_ms())
        self.prefix = prefix
        if offset is not None:
            after = {t: last + 1 for t, last in offset.items()}
            self._log.read_from({t: e for t, e in self.ends.items() if t not in after})
            self.starts = {t: self.starts[t] for t in after}
            self.ends = {t: min(after[t], self.ends[t]) for t in after}

    def select(
        self, partition: int | None = None, *, first: int = 0, last: int | None = None
    ) -> None:
        """Read only these entries; call it after ``until``, and without ``restore``.

        Args:
            partition: Only this coordinating partition; None for all.
            first: Entries below this offset may be left out.
            last: The last offset; None for the end of the scan.
        """
        bounds = self._bounds()
        for t, end in self.ends.items():
            is_wanted = partition in {None, t}
            self.ends[t] = end if last is None else min(end, last + 1)
            # The first entry after the moment ends the scan, so it must be read.
            begin = max(self.starts[t], min(first, bounds[t]))
            self._log.read_from({t: begin if is_wanted else end})
            if not is_wanted:
                self.ends[t] = 0

    def restore(
        self,
        *,
        first: Callable[[LogRange], int] | None = None,
        since: Since | None = None,
    ) -> dict[int, Restored]:
        """Begin at the first remaining checkpoint of logs that have lost their start.

        Call it before iterating: the scan then yields the entries after these states;
        without a state, from the log start. Only checkpoints that are complete before
        the end of the scan count.

        Args:
            first: Called with a partition's offsets from its start to the end of the
                scan, returns the first offset that must be read. Begin at the newest
                checkpoint before it, even if the log has its start. None: read all that
                remains.
            since: Begin at the newest checkpoint before this moment, if there is one,
                even if the log has its start.

        Returns:
            The start state of each coordinating partition. If its
            ``is_log_start_missing`` is set, the state is unknown: the log has lost its
            start and has no checkpoint, and the partition is in use at some moment of
            the scan, as partition 0 shows. One that is never in use begins empty.

        Raises:
            CoordinationError: The cluster did not answer.
        """
        sources: list[KeptStates] = [RetainedCheckpoints(is_past=self.prefix.is_past)]
        if first is not None:
            sources.insert(0, self._newest_before(first))
        if since is not None:
            bounds = self._bounds()
            sources.insert(
                0, since.checkpoints(self._log, bounds, timeout_ms=self._timeout_ms)
            )
        found = restore(
            self._log,
            self.ends,
            sources=sources,
            on_unfit=lambda *_: None,
            timeout_ms=self._timeout_ms,
        )
        missing = [t for t, each in found.items() if each.is_log_start_missing]
        if missing and 0 in found and 0 not in missing:
            count = self._most_used(found)
            for t in missing:
                if count is not None and t >= count:
                    start = found[t].log_start
                    world = WorldState(t, next_offset=start)
                    found[t] = Restored(world, "a partition not in use", start)
        return found

    def _most_used(self, found: Mapping[int, Restored]) -> int | None:
        """Return the largest number of partitions in use, None if unknown.

        Reads partition 0 for that; the scan reads it again.
        """
        first = found[0]
        state = WorldState(0)
        if first.source is not None:
            state = from_bytes(to_bytes(first.world))
        starts = {
            t: each.log_start if each.source is None else each.world.next_offset
            for t, each in found.items()
        }
        counts = {used_count(state)}
        self._log.read_from({**self.ends, 0: starts[0]})
        for _, run in runs_to(
            self._log,
            {0: self.ends[0]},
            clock=self._clock,
            timeout_ms=self._timeout_ms,
        ):
            for entry in run:
                if apply(state, entry):
                    counts.add(used_count(state))
        self._log.read_from(starts)
        return max((count for count in counts if count is not None), default=None)

    def _newest_before(self, first: Callable[[LogRange], int]) -> LogCheckpoints:
        bounds = self._bounds()
        firsts = {
            t: first(LogRange(self.starts[t], max(bounds[t], self.starts[t])))
            for t in self.ends
        }
        return LogCheckpoints(
            before={
                t: bounds[t] if at > self.starts[t] else 0 for t, at in firsts.items()
            },
            fits=lambda world: (
                world.next_offset <= firsts[world.partition]
                and self.prefix.has_no_later_entry(world)
            ),
        )

    def _bounds(self) -> dict[int, int]:
        return self.prefix.bounds(self._log, self.ends, timeout_ms=self._timeout_ms)

    def latest_ends(self) -> dict[int, int]:
        """Return the next offset of each partition, from the brokers.

        Raises:
            CoordinationError: The cluster did not answer.
        """
        return dict(self._log.end_offsets(self._timeout_ms))

    def next_append(self, timeout_ms: int) -> Arrival | None:
        """Wait for a record appended from now on, with a timestamp of the broker.

        The scan cannot be continued afterwards.

        Args:
            timeout_ms: Longest wait.

        Returns:
            The record; None if none arrived in time.

        Raises:
            CoordinationError: The cluster did not answer.
        """
        deadline = Deadline(timeout_ms, self._clock.now_ms)
        self._log.read_from(self.latest_ends())
        while left_ms := deadline.left_ms:
            for partition, entry in self._log.poll(min(POLL_MS, left_ms)):
                if entry.timestamp_type == TimestampType.LOG_APPEND_TIME:
                    wall_ms = self._clock.wall_ms()
                    return Arrival(partition, entry.timestamp_ms, wall_ms)
        return None

    def __iter__(self) -> Iterator[tuple[int, LogEntry]]:
        """Yield every entry of ``runs``, and note the reasons of pauses.

        Raises: as ``runs``.
        """
        for partition, run in self.runs():
            for entry in run:
                self.prefix.note(partition, entry)
                yield partition, entry

    def runs(self) -> Iterator[Run]:
        """Yield every entry below ``ends``, or up to the moment of ``until``, in runs.

        Raises:
            DeadlineExceeded: The end was not reached and no entry came in time.
            LogTruncated: The log went back.
            LogUnreadable: The log cannot be read.
        """
        for partition, run in runs_to(
            self._log,
            self.ends,
            clock=self._clock,
            timeout_ms=self._timeout_ms,
            has_ended=self.prefix.has_ended,
        ):
            mine = self.prefix.cut(partition, run)
            if mine:
                yield partition, mine

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._log.close(2_000)


def runs_to(
    log: CoordinationLog,
    ends: Mapping[int, int],
    *,
    clock: Clock,
    timeout_ms: int,
    has_ended: Callable[[int], bool] = lambda _: False,
) -> Iterator[Run]:
    """Yield the entries of some partitions, from the log's positions to their ends.

    Args:
        log: The log.
        ends: Exclusive end in each partition to read.
        clock: Local time.
        timeout_ms: Longest time without an entry. Until then, retriable errors of the
            cluster are ignored.
        has_ended: Returns whether a partition need not be read any further.

    Raises:
        DeadlineExceeded: No entry came in time.
        LogTruncated: The log went back.
        LogUnreadable: The log cannot be read.
    """
    since_ms = clock.now_ms()
    while True:
        at = log.positions()
        left = [t for t, end in ends.items() if at.get(t, 0) < end and not has_ended(t)]
        if not left:
            return
        runs: Sequence[Run] = ()
        try:
            runs = log.poll_runs(POLL_MS)
        except CoordinationError as error:
            if not error.retriable:
                raise
        for partition, run in runs:
            below = up_to(run, ends.get(partition, 0) - 1)
            if below:
                yield partition, below
        if runs:
            since_ms = clock.now_ms()
        elif clock.now_ms() - since_ms > timeout_ms:
            raise DeadlineExceeded(
                f"coordinating partitions {left} sent nothing for {timeout_ms} ms "
                "before their ends were reached; check the brokers with: marshal doctor"
            )


def require_formatted(worlds: Sequence[WorldState]) -> None:
    """Raise unless a partition has a Config.

    Raises:
        TopicMisconfigured: None has one: this is no formatted coordination topic.
    """
    if all(world.config is None for world in worlds):
        raise unformatted(worlds)


def unknown_text(
    partitions: Sequence[int], known_from: Mapping[int, FirstKnown] | None = None
) -> str:
    """Return why the state of these coordinating partitions is unknown.

    Args:
        partitions: The coordinating partitions.
        known_from: First moment with a known state, by partition; partitions without
            checkpoint are absent.
    """
    known = known_from or {}
    why = (
        f"the log of coordinating partitions {list(partitions)} begins above offset "
        "0, and no checkpoint lies between its start and the requested moment: the "
        "owners of its keys are unknown"
    )
    if not all(t in known for t in partitions):
        return f"{why}; see: marshal doctor"
    text = instant(max(known[t].time_ms for t in partitions))
    offsets = ", ".join(f"{t}:{known[t].offset}" for t in partitions)
    return f"{why}. The earliest moment that can be shown is {text}, or {offsets}"


def require_restored(found: Mapping[int, Restored]) -> dict[int, Restored]:
    """Return the start states of a scan in order of partition; require them all.

    Raises:
        LogUnreadable: A log has lost its start, and has no checkpoint.
    """
    unknown = sorted(t for t, each in found.items() if each.is_log_start_missing)
    if unknown:
        raise LogUnreadable(unknown_text(unknown))
    return dict(sorted(found.items()))
