"""Reads the history of a key, or of admins' actions, from the log; read-only.

Each change of the number of coordinating partitions may move a key: its earlier records
stay in the log of the partition that it came from (PROTOCOL 10).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, Protocol

import attrs

from kafka_marshal.arguments import require_key
from kafka_marshal.defaults import COORDINATION_TOPIC, SERVERS
from kafka_marshal.engine.config_check import unformatted
from kafka_marshal.errors import ConfigurationError, LogUnreadable
from kafka_marshal.history import wording
from kafka_marshal.history.actions import Action, ActionLog
from kafka_marshal.history.chain import (
    CLAIMS_MAX,
    EVENTS_MAX,
    KeyChain,
    KeyEvent,
    KeyPath,
    Move,
)
from kafka_marshal.protocol.codec import person_of
from kafka_marshal.protocol.fold_beats import fold_beats
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP, home_partition
from kafka_marshal.protocol.placement import counts_of, partition_of, place_under
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import DecidePosition
from kafka_marshal.protocol.state import ACCEPTED, GroupState, Transitions, WorldState
from kafka_marshal.protocol.types import Key, LogEntry
from kafka_marshal.views.log_scan import (
    TIMEOUT_MS,
    LogScan,
    require_restored,
    unknown_text,
)
from kafka_marshal.views.past import Since
from kafka_marshal.views.world import World

# Searches assume that the clocks of brokers differ by at most this.
CLOCKS_APART_MS_MAX = 60_000
Chains = Mapping[int, tuple[KeyChain, WorldState]]
"""The chain of a key, and the world at its end, by coordinating partition."""


def places_of(key: Key, chains: Chains) -> set[int]:
    """Return the partitions that a key is or was in, as far as these chains show.

    Partition 0 if none of them has a Config: it has the first one.
    """
    found, has_config = set[int](), False
    for chain, world in chains.values():
        has_config = has_config or world.config is not None
        found.update(place_under(key, count) for count in counts_of({0: world}))
        for move in chain.moves:
            found.update((move.source, move.target))
    return found if has_config else {0}


def counts_in(chains: Chains) -> set[int]:
    """Return the partition counts that these chains show."""
    return {count for _, world in chains.values() for count in counts_of({0: world})}


def joined(key: Key, chains: Chains, *, at: int | None = None) -> KeyPath:
    """Return the past of a key from the chains of its partitions.

    Args:
        key: The key.
        chains: The chains.
        at: The partition of the view, None for the partition that shows the key.
    """
    worlds = {t: world for t, (_, world) in chains.items()}
    place = partition_of(worlds, key) if at is None else at
    found = worlds.get(place or 0, next(iter(worlds.values())))
    shown = {
        t: chain
        for t, (chain, _) in chains.items()
        if t == found.partition or _is_part(chain)
    }
    moves = sorted({move for chain in shown.values() for move in chain.moves})
    numbers = {op_id: index + 1 for index, op_id in enumerate(_operations(moves))}
    events = sorted(
        (pair for chain in shown.values() for pair in _placed(chain, numbers)),
        key=lambda pair: pair[0],
    )
    claims = sorted(
        (claim for chain in shown.values() for claim in chain.claims),
        key=attrgetter("token"),
    )
    first = events[0][1].partition if events else found.partition
    return KeyPath(
        key=key,
        world=found,
        events=tuple(event for _, event in events)[-EVENTS_MAX:],
        events_count=sum(chain.events_count for chain in shown.values()),
        claims=tuple(claims[-CLAIMS_MAX:]),
        claims_count=sum(chain.claims_count for chain in shown.values()),
        refused_count=sum(chain.refused_count for chain in shown.values()),
        began_at=chains[first][0].began_at,
        pause=chains[found.partition][0].pause,
    )


def _operations(moves: Sequence[Move]) -> list[bytes]:
    """Return the operations of moves, each once, in order of their generations."""
    return list(dict.fromkeys(move.op_id for move in moves))


def _is_part(chain: KeyChain) -> bool:
    """Return whether a partition's events show anything about the key."""
    return any(event.what != "restored" or event.client_id for event in chain.events)


def _placed(
    chain: KeyChain, numbers: Mapping[bytes, int]
) -> Iterator[tuple[tuple[int, int], KeyEvent]]:
    """Yield the events of a partition, with sort keys over all partitions.

    Clocks of leaders differ, so times order only events between two moves of the key:
    events in its target after the import come after all events in its source.
    """
    times = accumulate((event.at_ms for event in chain.events), max)
    for event, at_ms in zip(chain.events, times, strict=True):
        stay = 0
        if event.move is not None:
            stay = numbers[event.move.op_id] - (not event.is_moved)
        yield (stay, at_ms), event


@attrs.frozen(kw_only=True)
class KeyHistory(KeyPath):
    """What happened to one key, and why its state is what it is.

    If the start of the log is gone, the history begins at the first remaining
    checkpoint; with ``since_offset`` or ``since_ms``, at the newest one before that
    moment.

    Attributes:
        state: ``owned``, ``stale`` (it has an owner that any member may replace),
            ``free``, ``locked``, ``unclaimed`` or ``halted``.
        why: Reason for this state, in one sentence.
        entries_count: Number of entries that were read.
        read_at_ms: Wall time at the end of reading.
    """

    state: str
    why: str
    entries_count: int
    read_at_ms: int

    @classmethod
    def open(
        cls,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        key: Key,
        offset: Mapping[int, int] | int | None = None,
        time_ms: int | None = None,
        since_offset: int | None = None,
        since_ms: int | None = None,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        timeout_ms: int = TIMEOUT_MS,
    ) -> "KeyHistory":
        """Read the log of the key's coordinating partition.

        If the partition count has changed (PROTOCOL 10), the log of each partition that
        the key was in before is read, too. So is the log of the group's home if an
        operation set the key's position.

        Args:
            bootstrap_servers: Addresses of the cluster.
            key: The key.
            offset: As of this offset of the key's coordinating partition; a mapping
                names another partition, if the key was there then.
            time_ms: As of this time, see ``World.at``; by default now.
            since_offset: Only events from this offset on are needed: the reading begins
                at the newest checkpoint before it. By default all are read.
            since_ms: As ``since_offset``, but a time, epoch ms.
            coordination_topic: Name of the coordination topic.
            options: Security and connection options.
            transport: ``auto``, ``fast`` or ``kafka-python``; see ``Marshal``.
            timeout_ms: Longest time to open, and longest wait for the next entries.

        Raises:
            TopicMisconfigured: There is no such topic, or it is not formatted.
            LogUnreadable: The state at that moment is unknown: the start of the log is
                gone, and no checkpoint lies before it.
            DeadlineExceeded: The log was not read in time.
            TypeError: ``key`` is no ``Key``.
        """
        require_key(key)

        def opened(number: int | None) -> LogScan:
            def only(count: int) -> list[int]:
                return [place_under(key, count) if number is None else number]

            return LogScan(
                bootstrap_servers,
                coordination_topic=coordination_topic,
                options=options,
                transport=transport,
                only=only,
                timeout_ms=timeout_ms,
            )

        since = None
        if since_offset is not None or since_ms is not None:
            since = _Beginning(offset=since_offset, time_ms=since_ms)
        return _Reader(
            key, opened, offset=offset, time_ms=time_ms, beginning=since
        ).read()


@attrs.frozen(kw_only=True)
class GroupHistory:
    """The actions of admins on a group, or on all, from all their records in the log.

    If the start of a coordinating partition's log is gone, the history of that
    partition begins at its first remaining checkpoint.

    Attributes:
        group_id: The group, None for all. Actions on all groups are part of both.
        actions: The actions, by the append time of their first records; at most
            ``ACTIONS_MAX``.
        records_count: Number of records of admins that were read.
        dropped_count: Actions beyond ``ACTIONS_MAX``, the earliest ones.
        world: The world at the moment of the view.
        began_at: For each partition whose earlier entries were deleted by retention,
            next offset of the checkpoint at which it begins.
    """

    group_id: str | None
    actions: tuple[Action, ...]
    records_count: int
    dropped_count: int
    world: World
    began_at: Mapping[int, int]

    @classmethod
    def open(
        cls,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        group_id: str | None = None,
        time_ms: int | None = None,
        since_ms: int | None = None,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        timeout_ms: int = TIMEOUT_MS,
    ) -> "GroupHistory":
        """Read the log of all coordinating partitions.

        Args:
            bootstrap_servers: Addresses of the cluster.
            group_id: Only actions on this group, or on all groups.
            time_ms: As of this time, see ``World.at``; by default now.
            since_ms: Only actions that lasted beyond this time, epoch ms, are needed.
                The log is read from the newest earlier checkpoint at which no action
                on the group was in progress. By default all is read.
            coordination_topic: Name of the coordination topic.
            options: Security and connection options.
            transport: ``auto``, ``fast`` or ``kafka-python``; see ``Marshal``.
            timeout_ms: Longest time to open, and longest wait for the next entries.

        Raises:
            TopicMisconfigured: There is no such topic.
            LogUnreadable: The state of a partition is unknown: the start of its log is
                gone, and it has no checkpoint before the moment of the view.
            DeadlineExceeded: The log was not read in time.
        """
        with LogScan(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
            timeout_ms=timeout_ms,
        ) as scan:
            return cls.of(scan, group_id=group_id, time_ms=time_ms, since_ms=since_ms)

    @classmethod
    def of(
        cls,
        scan: LogScan,
        *,
        group_id: str | None = None,
        time_ms: int | None = None,
        since_ms: int | None = None,
    ) -> "GroupHistory":
        """Return the actions in the log of a scan; see ``open``."""
        log = ActionLog(group_id)
        scan.until(time_ms=time_ms)
        since = None
        if since_ms is not None:
            since = Since(
                time_ms=since_ms, fits=lambda world: not _is_acted_on(world, group_id)
            )
        restored = require_restored(scan.restore(since=since))
        worlds = {number: at.world for number, at in restored.items()}
        begun = {n: at.world for n, at in restored.items() if at.source is not None}
        began_at = {
            number: world.next_offset
            for number, world in begun.items()
            if since is None or not since.is_after(world)
        }
        for world in begun.values():
            log.begin(world)
        for number, run in scan.runs():
            fold_run(log, worlds[number], entries=run)
        now_ms = scan.read_at_ms if time_ms is None else time_ms
        elapsed = {
            number: max(0, now_ms - world.append_time_ms)
            for number, world in worlds.items()
        }
        ends = {n: world.append_time_ms + elapsed[n] for n, world in worlds.items()}
        return cls(
            group_id=group_id,
            actions=tuple(log.actions(ends)),
            records_count=log.records_count,
            dropped_count=log.dropped_count,
            world=World(
                list(worlds.values()),
                elapsed if time_ms is None else {},
                cluster_id=scan.cluster_id,
                read_at_ms=scan.read_at_ms,
            ),
            began_at=began_at,
        )


def _is_acted_on(world: WorldState, group_id: str | None) -> bool:
    """Return whether an action on a group, or on any, is in progress in a state."""
    if world.layout is not None or any(each.ends is None for each in world.growths):
        return True
    groups = (
        group
        for name, group in world.groups.items()
        if group_id is None or name in {group_id, CHECKPOINT_GROUP}
    )
    locked = (
        known.lock is not None
        for key, known in world.keys.items()
        if group_id is None or key.group_id == group_id
    )
    return any(_is_in_progress(group) for group in groups) or any(locked)


def _is_in_progress(group: GroupState) -> bool:
    is_open = group.verdict is not None and not group.verdict.is_resolved
    is_ahead = bool(group.scheduled or group.directives)
    return group.pause is not None or is_ahead or is_open


@attrs.frozen(kw_only=True)
class _Beginning:
    """The moment from which on a key's past is needed: an offset, or epoch ms."""

    offset: int | None
    time_ms: int | None

    def since(self, key: Key, partition: int) -> Since:
        """Return where to begin in the key's coordinating partition."""
        offsets = None if self.offset is None else {partition: self.offset}
        return Since(
            offsets=offsets,
            time_ms=self.time_ms,
            fits=lambda world: not _is_acted_on(world, key.group_id),
        )


class _Reader:
    """One reading of the past of a key.

    Args:
        key: The key.
        opened: Opens a coordinating partition for reading; with None the partition of
            the key if all partitions of the topic coordinate.
        offset: The last offset of the view; a mapping also names its partition. None
            without one.
        time_ms: The time of the view, or None.
        beginning: The moment from which on the past is needed; None for all.
    """

    def __init__(
        self,
        key: Key,
        opened: Callable[[int | None], LogScan],
        *,
        offset: Mapping[int, int] | int | None,
        time_ms: int | None,
        beginning: _Beginning | None,
    ) -> None:
        self._key = key
        self._opened = opened
        self._beginning = beginning
        self._offset = offset
        self._time_ms = time_ms
        self._chains: dict[int, tuple[KeyChain, WorldState]] = {}
        self._read_at_ms: dict[int, int] = {}
        self._last_ms = 0
        self._count = 0

    def read(self) -> KeyHistory:
        """Return what the log shows of the key."""
        at = self._place_of_offset()
        number = at
        while number is not None or not self._chains:
            with self._opened(number) as scan:
                place = next((t for t in scan.ends if number in {None, t}), None)
                if place is None:
                    raise ConfigurationError(
                        f"there is no coordinating partition {number}; write the "
                        "offset of one that the key was in, or a time",
                        setting="offset",
                    )
                self._fold(scan, place, is_first=not self._chains)
            left = places_of(self._key, self._chains) - self._chains.keys()
            number = min(left, default=None)
        path = joined(self._key, self._chains, at=at)
        world = path.world
        if world.config is None and self._is_now:
            raise unformatted([world])
        events = self._with_decisions(path)
        read_at_ms = self._read_at_ms[world.partition]
        elapsed_ms = max(0, read_at_ms - world.append_time_ms) if self._is_now else 0
        known = attrs.asdict(path, recurse=False) | {
            "events": tuple(events),
            "events_count": path.events_count + len(events) - len(path.events),
        }
        return KeyHistory(
            **known,
            state=wording.state_of(path, world, elapsed_ms=elapsed_ms),
            why=wording.why(path, world, elapsed_ms=elapsed_ms),
            entries_count=self._count,
            read_at_ms=read_at_ms,
        )

    def _place_of_offset(self) -> int | None:
        """Return the partition of the view's offset, None without one."""
        if self._offset is None:
            return None
        if not isinstance(self._offset, int):
            return next(iter(self._offset))
        # The present partition of the key: partition 0 has the newest Config.
        with self._opened(0) as scan:
            world = scan.restore(first=lambda span: span.end)[0].world
            for _, run in scan.runs():
                for entry in run:
                    apply(world, entry)
        if world.config is None:
            raise unformatted([world])
        return place_under(self._key, world.config.partition_count)

    @property
    def _is_now(self) -> bool:
        return self._offset is None and self._time_ms is None

    def _fold(self, scan: LogScan, number: int, *, is_first: bool) -> None:
        """Fold one coordinating partition up to the moment of the view."""
        time_ms = self._time_ms
        offsets = None
        if self._offset is not None and is_first:
            end, last = scan.ends[number], self._offset
            last = last if isinstance(last, int) else last[number]
            if last >= end:
                raise ConfigurationError(
                    f"offset {last} is not in the log yet: coordinating partition "
                    f"{number} ends at {end}; see: marshal topic info",
                    setting="offset",
                )
            offsets = {number: last}
        elif self._offset is not None:
            time_ms = self._last_ms  # an offset means nothing in another partition
        scan.until(offset=offsets, time_ms=time_ms)
        restored = scan.restore(since=self._since(number, is_first=is_first))[number]
        if restored.is_log_start_missing:
            raise LogUnreadable(unknown_text([number]))
        world, chain = restored.world, KeyChain(self._key)
        if restored.source is not None:
            chain.begin(world)
        last_ms = world.append_time_ms
        for _, run in scan.runs():
            fold_run(chain, world, entries=run)
            self._count += len(run)
            last_ms = run[-1].timestamp_ms
            if world.halted is not None:
                break
        self._last_ms = max(self._last_ms, last_ms)
        self._chains[number] = chain, world
        self._read_at_ms[number] = scan.read_at_ms

    def _since(self, number: int, *, is_first: bool) -> Since | None:
        """Return where to begin; an offset counts only in the first partition read."""
        beginning = self._beginning
        if beginning is None:
            return None
        if beginning.offset is not None and not is_first:
            chains = [chain for chain, _ in self._chains.values()]
            times = (event.at_ms for chain in chains for event in chain.events)
            first_ms = min(times, default=self._last_ms) - CLOCKS_APART_MS_MAX
            beginning = _Beginning(offset=None, time_ms=max(0, first_ms))
        return beginning.since(self._key, number)

    def _with_decisions(self, path: KeyPath) -> list[KeyEvent]:
        """Return the events, with commits of operations on another home partition."""
        events = list(path.events)
        staged = {e.op_id for e in events if e.what == "staged"}
        decided = {e.op_id for e in events if e.what == "decided"}
        group_id = self._key.group_id
        homes = {
            home_partition(group_id, partition_count=count)
            for count in counts_in(self._chains)
        }
        for home in sorted(homes - self._chains.keys()):
            if staged <= decided:
                break
            since = None
            if self._beginning is not None:
                first_ms = min(e.at_ms for e in events if e.what == "staged")
                before_ms = first_ms - CLOCKS_APART_MS_MAX
                of_home = _Beginning(offset=None, time_ms=before_ms)
                since = of_home.since(self._key, home)
            with self._opened(home) as scan:
                restored = scan.restore(since=since)[home]
                for found in self._decisions(scan, restored.world, staged - decided):
                    decided.add(found.op_id)
                    places = [
                        i
                        for i, e in enumerate(events)
                        if e.what == "staged" and e.op_id == found.op_id
                    ]
                    events.insert(places[-1] + 1, found)
        return events

    def _decisions(
        self, scan: LogScan, world: WorldState, wanted: Collection[bytes | None]
    ) -> Iterator[KeyEvent]:
        """Yield the first commit of each of these operations on the group's home."""
        # An offset of another partition means nothing here, so its time is used.
        until_ms = self._last_ms if self._time_ms is None else self._time_ms
        home, found = world.partition, set[bytes]()
        for _, run in scan.runs():
            for entry in run:
                for transition in apply(world, entry):
                    record = transition.record
                    if (
                        not isinstance(record, DecidePosition)
                        or transition.outcome != ACCEPTED
                        or record.group_id != self._key.group_id
                        or record.op_id not in wanted
                        or record.op_id in found
                        or (not self._is_now and entry.timestamp_ms > until_ms)
                    ):
                        continue
                    found.add(record.op_id)
                    yield KeyEvent(
                        what="decided",
                        partition=home,
                        offset=entry.offset,
                        at_ms=entry.timestamp_ms,
                        record=type(record).__name__,
                        client_id=record.client_id,
                        incarnation=record.incarnation,
                        person=person_of(record),
                        op_id=record.op_id,
                    )


class Observer(Protocol):
    """Observes the fold of coordinating partitions."""

    def epoch(self, world: WorldState) -> int:
        """Return the epoch whose Heartbeats ``take`` needs, ``NO_EPOCH`` for none."""
        ...

    def take(
        self, world: WorldState, entry: LogEntry, *, transitions: Transitions
    ) -> None:
        """Observe an entry that was folded into a world."""
        ...


def fold_run(
    observer: Observer, world: WorldState, *, entries: Sequence[LogEntry]
) -> None:
    """Fold entries of one partition, and pass on those that may concern the observer.

    Runs of Heartbeats that it does not need are folded without transitions, to the same
    state.
    """
    at = 0
    while at < len(entries):
        at = fold_beats(world, entries, start=at, except_epoch=observer.epoch(world))
        if at < len(entries):
            transitions = apply(world, entries[at])
            observer.take(world, entries[at], transitions=transitions)
            at += 1
