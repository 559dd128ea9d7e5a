"""Read-only views of the coordination log: the world, and the log itself.

Nothing here writes or joins a group. A view is never older than its request.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kafka_marshal.clock import SystemClock
from kafka_marshal.closing import Closing
from kafka_marshal.config import COORDINATION_TOPIC, SERVERS
from kafka_marshal.engine.checkpoint_reader import RetainedCheckpoints, kept_in
from kafka_marshal.engine.config_check import agreed_config
from kafka_marshal.engine.follower import Follower
from kafka_marshal.engine.kept_states import Restored, restore
from kafka_marshal.engine.replica import Replica
from kafka_marshal.engine.snapshotter import capture
from kafka_marshal.errors import CoordinationError, DeadlineExceeded, LogUnreadable
from kafka_marshal.identity import home_of
from kafka_marshal.kafka_io import ConnectionConfig, open_coordination_log
from kafka_marshal.kafka_io.topiclog import TopicLog
from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.lease import Freshness, freshness
from kafka_marshal.protocol.losses import LIVE, Loss, LossBook
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import Config, ReleaseGroup
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.text import world_to_object
from kafka_marshal.protocol.types import Key, LogEntry
from kafka_marshal.snapshots import SnapshotFolder, open_store

TIMEOUT_MS = 30_000
POLL_MS = 100
CLOSE_MS = 5_000
REASONS_MAX = 1_000
# A reader of this many entries stores the state, to shorten the next start.
KEEP_ENTRIES_MIN = 20_000
# Frame version, record type and record version of a ReleaseGroup (PROTOCOL 3.1).
_RELEASE_GROUP_HEAD = b"\x01\x05\x00"


class World:
    """The world as of one moment: read only, no writes, no group.

    Attributes:
        partitions: State of every coordinating partition, in order.
        cluster_id: Cluster of the log, None if unknown.
        read_at_ms: Wall time at the end of reading.
        reasons: Reasons of pauses, by group and op_id; states do not have them, so
            they are collected while the log is read.
        log_start_missing: Partitions whose logs begin above offset 0 without a
            complete checkpoint before the moment of this view: their state is
            unknown, and that in ``partitions`` is incomplete.
    """

    def __init__(
        self,
        partitions: Sequence[WorldState],
        elapsed: Mapping[int, int],
        *,
        cluster_id: str | None = None,
        read_at_ms: int = 0,
        reasons: Mapping[tuple[str, bytes], str] | None = None,
        log_start_missing: Sequence[int] = (),
    ) -> None:
        self.partitions = tuple(partitions)
        self.cluster_id = cluster_id
        self.read_at_ms = read_at_ms
        self.reasons = dict(reasons or {})
        self.log_start_missing = tuple(log_start_missing)
        self._elapsed = elapsed

    @classmethod
    def open(
        cls,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        state_dir: str | Path | None = None,
        timeout_ms: int = TIMEOUT_MS,
    ) -> "World":
        """Read the log to its end and return the world now."""
        return cls.at(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
            state_dir=state_dir,
            timeout_ms=timeout_ms,
        )

    @classmethod
    def at(
        cls,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        offset: Mapping[int, int] | None = None,
        time_ms: int | None = None,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        state_dir: str | Path | None = None,
        timeout_ms: int = TIMEOUT_MS,
    ) -> "World":
        """Return the world as of an offset or a time, by default now.

        If the start of a log is gone, the fold of that partition begins at the newest
        checkpoint that is complete before the moment. Without one, the partition is in
        ``log_start_missing``.

        Args:
            bootstrap_servers: Addresses of the cluster.
            offset: Per coordinating partition, the last offset to fold; others are not
                folded.
            time_ms: Fold the entries before the first one that was appended later
                than this, in epoch ms.
            coordination_topic: Name of the coordination topic.
            options: Security and connection options.
            transport: ``auto``, ``fast`` or ``kafka-python``; see ``Marshal``.
            state_dir: Directory of stored states, which shorten views of now; None for
                that of the user, ``""`` for none.
            timeout_ms: Longest time of the call.

        Raises:
            TopicMisconfigured: There is no such topic.
            DeadlineExceeded: The log was not read in time.
        """
        settings = ConnectionConfig(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
        )
        clock = SystemClock()
        log = open_coordination_log(
            settings, heartbeat_interval_ms=None, timeout_ms=timeout_ms
        )
        live = offset is None and time_ms is None
        home = home_of(state_dir) if live else None
        store = open_store(home, log.cluster_id, topic_id=log.topic_id)
        try:
            follower, prefix = _read(
                log, Prefix(offset, time_ms), store=store, timeout_ms=timeout_ms
            )
        finally:
            log.close(CLOSE_MS)
        now_ms, wall_ms = clock.now_ms(), clock.wall_ms()
        elapsed = {
            t: elapsed_ms_of(replica, now_ms, wall_ms=wall_ms) if live else 0
            for t, replica in follower.replicas.items()
        }
        return cls(
            follower.worlds,
            elapsed,
            cluster_id=log.cluster_id,
            read_at_ms=wall_ms,
            reasons=prefix.reasons,
            log_start_missing=[
                t for t in follower.log_start_missing if prefix.is_included(t)
            ],
        )

    def require_known(self, partitions: Iterable[int] | None = None) -> None:
        """Raise if the state of partitions is unknown (``log_start_missing``).

        Args:
            partitions: The coordinating partitions; None for all.

        Raises:
            LogUnreadable: The state of one of them is unknown.
        """
        wanted = self.log_start_missing if partitions is None else partitions
        unknown = sorted(set(self.log_start_missing).intersection(wanted))
        if unknown:
            raise LogUnreadable(unknown_text(unknown))

    def config(self) -> Config:
        """Return the Config that all coordinating partitions agree on.

        Raises:
            WrongCluster: The topic was formatted for another cluster.
            TopicMisconfigured: It is unformatted or torn.
            LogUnreadable: The state of a partition is unknown (``log_start_missing``).
        """
        self.require_known()
        worlds = {world.partition: world for world in self.partitions}
        return agreed_config(worlds, cluster_id=self.cluster_id)

    def to_object(self) -> dict[str, Any]:
        """Return the document that all commands print (PROTOCOL 3.8)."""
        return world_to_object(self.partitions)

    def claims(self, group_id: str | None = None) -> list[tuple[Key, KeyState]]:
        """Return every key that was ever claimed, of one group or of all, sorted."""
        return sorted(
            (
                (key, known)
                for world in self.partitions
                for key, known in world.keys.items()
                if group_id is None or key.group_id == group_id
            ),
            key=lambda row: row[0],
        )

    def elapsed_ms(self, partition: int) -> int:
        """Return an estimate of the time since a partition's last entry.

        By local time and the wall clock, for people; 0 in a view of the past.
        """
        return max(0, self._elapsed.get(partition, 0))

    def estimated_age_ms(self, world: WorldState, known: KeyState) -> int:
        """Return an owner's age plus the time since the last entry."""
        return known.age_ms(world.now_ms) + self.elapsed_ms(world.partition)

    def estimated_freshness(self, world: WorldState, known: KeyState) -> Freshness:
        """Return the freshness by the estimated age; by log time it may be fresher."""
        age_ms = self.estimated_age_ms(world, known)
        return freshness(age_ms, known.heartbeat_interval_ms)


def unknown_text(partitions: Sequence[int]) -> str:
    """Return why the state of these coordinating partitions is unknown."""
    return (
        f"the log of coordinating partitions {list(partitions)} begins above offset "
        "0, and no checkpoint lies between its start and the requested moment: the "
        "owners of its keys are unknown; see: marshal doctor"
    )


def _read(
    log: TopicLog, prefix: "Prefix", *, store: SnapshotFolder | None, timeout_ms: int
) -> tuple[Follower, "Prefix"]:
    """Read the log to its end, from stored states if there are any."""
    clock = SystemClock()
    # A view of the past cannot begin at a later state.
    past = RetainedCheckpoints(newest=True, is_past=prefix.is_past)
    sources = kept_in(store) if prefix.is_whole else (past,)
    follower = Follower(log, clock, sources=sources)
    follower.catch_up(timeout_ms, accept=prefix.accept)
    is_complete = prefix.is_whole and follower.began_paused
    if is_complete and not any(log.start_offsets(timeout_ms).values()):
        # The reason of a pause is only in the log.
        log.read_from(log.start_offsets(timeout_ms))
        prefix = Prefix(None, None)
        follower = Follower(log, clock)
        follower.catch_up(timeout_ms, accept=prefix.accept)
    if store is not None:
        for world in follower.worlds:
            count = world.next_offset - follower.began_at.get(world.partition, 0)
            beside = (*follower.log_start_missing, *follower.unfit)
            is_whole = world.halted is None and world.partition not in beside
            if count >= KEEP_ENTRIES_MIN and is_whole:
                with suppress(OSError):  # the next view reads as much again
                    store.save(capture(world, source="this process"))
    return follower, prefix


def elapsed_ms_of(replica: Replica, now_ms: int, *, wall_ms: int) -> int:
    """Return the time since the last entry of a log that was just read.

    PROTOCOL 4.11: log time stops while nothing is appended. A new reader has not
    measured how long; the estimate for people uses the wall clock.
    """
    return max(replica.elapsed_ms(now_ms), wall_ms - replica.world.append_time_ms)


class Prefix:
    """Selects the entries of a view; collects the reasons of pauses."""

    def __init__(self, offset: Mapping[int, int] | None, time_ms: int | None) -> None:
        self.reasons: dict[tuple[str, bytes], str] = {}
        self._offset = offset
        self._time_ms = time_ms
        self._ended: set[int] = set()

    @property
    def is_whole(self) -> bool:
        """Whether the view has all entries."""
        return self._offset is None and self._time_ms is None

    def accept(self, partition: int, entry: LogEntry) -> bool:
        """Return whether the view folds an entry."""
        # After the first later entry all are excluded: a leader's clock may go back,
        # and with a gap the view would be a state that never existed.
        if partition in self._ended or self.is_past(partition, entry):
            self._ended.add(partition)
            return False
        value = entry.value
        if value is not None and value.startswith(_RELEASE_GROUP_HEAD):
            self._note(decode(value))
        return True

    def is_included(self, partition: int) -> bool:
        """Return whether the view includes a coordinating partition."""
        return self._offset is None or partition in self._offset

    def is_past(self, partition: int, entry: LogEntry) -> bool:
        """Return whether an entry is later than the moment of the view."""
        if self._offset is not None and entry.offset > self._offset.get(partition, -1):
            return True
        return self._time_ms is not None and entry.timestamp_ms > self._time_ms

    def _note(self, record: object) -> None:
        if not isinstance(record, ReleaseGroup) or record.reason is None:
            return
        # The first reason of an operation counts; renewals and the end may have
        # others. Only the newest operations are stored.
        name = (record.group_id, record.op_id)
        self.reasons.setdefault(name, record.reason)
        if len(self.reasons) > REASONS_MAX:
            del self.reasons[next(iter(self.reasons))]


class LogScan(Closing):
    """All entries that the coordination log has when it is opened, read once.

    A context manager; iterate over it for pairs of coordinating partition and entry,
    in offset order within each partition.

    Args:
        bootstrap_servers: Addresses of the cluster.
        coordination_topic: Name of the coordination topic.
        options: Security and connection options.
        transport: ``auto``, ``fast`` or ``kafka-python``; see ``Marshal``.
        timeout_ms: Longest time to open, and longest wait for the next entries.

    Attributes:
        cluster_id: Cluster of the log.
        topic_id: Id of the coordination topic, None if brokers have no ids.
        starts: First offset that exists, per coordinating partition.
        ends: Next offset when the log was opened, per coordinating partition.

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
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        settings = ConnectionConfig(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
        )
        self._timeout_ms = timeout_ms
        self._clock = SystemClock()
        self._log = open_coordination_log(
            settings, heartbeat_interval_ms=None, timeout_ms=timeout_ms
        )
        self.cluster_id: str = self._log.cluster_id
        self.topic_id: bytes | None = self._log.topic_id
        try:
            self.starts = dict(self._log.start_offsets(timeout_ms))
            self.ends = dict(self._log.end_offsets(timeout_ms))
        except BaseException:
            self.close()
            raise

    def restore(
        self, *, is_past: Callable[[int, LogEntry], bool] | None = None
    ) -> dict[int, Restored]:
        """Begin at the first remaining checkpoint of logs whose start is gone.

        Call it before iterating: the scan then yields the entries after these states,
        or from the log start without a state.

        Args:
            is_past: Whether an entry is later than the requested moment; checkpoints
                count only if they end before the first such entry.

        Returns:
            The start of each coordinating partition. One whose ``is_log_start_missing``
            has lost its start and has no checkpoint.

        Raises:
            CoordinationError: The cluster did not answer.
        """
        return restore(
            self._log,
            self.ends,
            sources=(RetainedCheckpoints(is_past=is_past),),
            on_unfit=lambda *_: None,
            timeout_ms=self._timeout_ms,
        )

    def latest_ends(self) -> dict[int, int]:
        """Return the next offset of each partition, from the brokers.

        Raises:
            CoordinationError: The cluster did not answer.
        """
        return dict(self._log.end_offsets(self._timeout_ms))

    def __iter__(self) -> Iterator[tuple[int, LogEntry]]:
        """Yield every entry below ``ends``.

        Raises:
            DeadlineExceeded: The end was not reached and no entry came in time.
            LogTruncated: The log went back.
            LogUnreadable: The log cannot be read.
        """
        since_ms = self._clock.now_ms()
        while not self._is_read():
            try:
                entries = self._log.poll(POLL_MS)
            except CoordinationError as error:
                if not error.retriable:
                    raise
                entries = ()
            for partition, entry in entries:
                if entry.offset < self.ends[partition]:
                    yield partition, entry
            if entries:
                since_ms = self._clock.now_ms()
            elif self._clock.now_ms() - since_ms > self._timeout_ms:
                raise DeadlineExceeded(
                    f"the coordination log returned nothing for {self._timeout_ms} ms "
                    "before its end was reached; check the brokers with: marshal "
                    "doctor"
                )

    def _is_read(self) -> bool:
        at = self._log.positions()
        return all(at.get(t, 0) >= end for t, end in self.ends.items())

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._log.close(2_000)


class Losses:
    """Offsets that were granted at most once and never processed.

    An owner records its progress in the log when the application polls again or closes
    in order (PROTOCOL 6.3). Offsets granted beyond that are listed: after a crash up to
    ``max_granted_batches`` times ``max_poll_records`` records, some of which the
    application may have processed since its process last wrote to the log.

    If the start of the log is gone, the list begins at the first remaining checkpoint:
    earlier grants are not listed.

    Attributes:
        lost: Losses of claims that have ended, or whose owner is stale; in the order
            in which they ended, stale ones last.
        at_risk: Offsets of live claims that a crash of their owners would lose now.
        world: The world at the end of reading.
        began_at: First offset of each partition whose start is gone; earlier grants
            are not listed.
    """

    def __init__(
        self,
        lost: Sequence[Loss],
        at_risk: Sequence[Loss],
        *,
        world: World,
        began_at: Mapping[int, int] | None = None,
    ) -> None:
        self.lost = tuple(lost)
        self.at_risk = tuple(at_risk)
        self.world = world
        self.began_at = dict(began_at or {})

    @classmethod
    def open(
        cls,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        group_id: str | None = None,
        topic: str | None = None,
        time_ms: int | None = None,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        timeout_ms: int = TIMEOUT_MS,
    ) -> "Losses":
        """Read the log to its end and return the losses.

        Args:
            bootstrap_servers: Addresses of the cluster.
            group_id: Only this group.
            topic: Only this data topic.
            time_ms: As of this time, see ``World.at``; by default now.
            coordination_topic: Name of the coordination topic.
            options: Security and connection options.
            transport: ``auto``, ``fast`` or ``kafka-python``; see ``Marshal``.
            timeout_ms: Longest time of the call.

        Raises:
            TopicMisconfigured: There is no such topic.
            DeadlineExceeded: The log was not read in time.
        """
        with LogScan(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
            timeout_ms=timeout_ms,
        ) as scan:
            return cls.of(scan, group_id=group_id, topic=topic, time_ms=time_ms)

    @classmethod
    def of(
        cls,
        scan: LogScan,
        *,
        group_id: str | None = None,
        topic: str | None = None,
        time_ms: int | None = None,
    ) -> "Losses":
        """Return the losses in the log of a scan; see ``open``.

        Raises:
            LogUnreadable: The state of a partition is unknown: the start of its log
                is gone, and it has no checkpoint.
        """
        prefix = Prefix(None, time_ms)
        restored = dict(sorted(scan.restore(is_past=prefix.is_past).items()))
        unknown = [number for number, at in restored.items() if at.is_log_start_missing]
        if unknown:
            raise LogUnreadable(unknown_text(unknown))
        worlds = {number: at.world for number, at in restored.items()}
        books = {
            number: LossBook(number, group_id=group_id, topic=topic, begun=world)
            for number, world in worlds.items()
        }
        began_at = {
            number: at.world.next_offset
            for number, at in restored.items()
            if at.source is not None
        }
        lost: list[Loss] = []
        for number, entry in scan:
            if prefix.accept(number, entry):
                transitions = apply(worlds[number], entry)
                lost += books[number].take(entry, transitions)
        wall_ms = SystemClock().wall_ms()
        elapsed = {
            number: max(0, wall_ms - world.append_time_ms) if time_ms is None else 0
            for number, world in worlds.items()
        }
        lost.sort(key=lambda loss: (loss.at_ms, loss.partition, loss.at_offset))
        at_risk: list[Loss] = []
        for loss in _open_losses(books, worlds, elapsed=elapsed):
            (at_risk if loss.ending == LIVE else lost).append(loss)
        world = World(
            list(worlds.values()),
            elapsed,
            cluster_id=scan.cluster_id,
            read_at_ms=wall_ms,
            reasons=prefix.reasons,
        )
        return cls(lost, at_risk, world=world, began_at=began_at)


def _open_losses(
    books: Mapping[int, LossBook],
    worlds: Mapping[int, WorldState],
    *,
    elapsed: Mapping[int, int],
) -> Iterable[Loss]:
    for number, book in books.items():
        yield from book.open_ones(worlds[number], elapsed_ms=elapsed[number])
