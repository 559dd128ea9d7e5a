"""Follows the log live: each entry with its transitions, and the changes of claims.

Nothing here writes, or joins a group. All work runs on the thread of the caller.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import attrs

from kafka_marshal.arguments import to_ms
from kafka_marshal.clock import SystemClock
from kafka_marshal.closing import Closing
from kafka_marshal.deadline import Deadline
from kafka_marshal.defaults import COORDINATION_TOPIC, SERVERS
from kafka_marshal.engine.checkpoint_reader import RetainedCheckpoints, kept_in
from kafka_marshal.engine.follower import Follower
from kafka_marshal.engine.kept_states import POLL_MS, KeptState, KeptStates
from kafka_marshal.errors import CoordinationError, DeadlineExceeded
from kafka_marshal.identity import home_of
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.ports import Clock, CoordinationLog, LogRange
from kafka_marshal.protocol.codec import person_of
from kafka_marshal.protocol.items import Pause
from kafka_marshal.protocol.judging import scope_of
from kafka_marshal.protocol.placement import (
    by_partition,
    place_under,
    standing_keys,
)
from kafka_marshal.protocol.records import (
    ClaimingPartition,
    ForgettingPartition,
    HandoffOffer,
    HandoffReady,
    LayoutImport,
    PauseGroup,
    ReleaseGroup,
    ReleasingPartition,
    Reset,
    StagePosition,
)
from kafka_marshal.protocol.state import (
    ACCEPTED,
    Transition,
    Transitions,
    WorldState,
)
from kafka_marshal.protocol.text import scope_texts
from kafka_marshal.protocol.types import Key, LogEntry, Owner, Token
from kafka_marshal.snapshots import open_store
from kafka_marshal.views.log_scan import TIMEOUT_MS
from kafka_marshal.views.past import Prefix
from kafka_marshal.views.world import World

# After this time without an entry, check that the brokers still answer.
PROBE_EVERY_MS = 5_000
PROBE_MS = 2_000


@attrs.frozen
class Folded:
    """One entry of the log, and its effects.

    Attributes:
        partition: Coordinating partition.
        entry: The entry.
        transitions: One for each key that the entry affected; none after a halt.
    """

    partition: int
    entry: LogEntry
    transitions: Transitions


@attrs.frozen(kw_only=True)
class Change:
    """A change of a claim or a pause, at one entry of the log.

    Attributes:
        what: ``claimed``, ``resumed``, ``released``, ``lost`` (ended without a
            release), ``scheduled`` (a pause that begins later), ``unscheduled`` (such a
            pause was cancelled), ``paused``, ``renewed`` (a pause, by another process),
            ``unpaused``, ``offered`` (to a successor, which may warm up), ``ready``
            (the successor has warmed up), ``withdrawn`` (an offer), or ``moved`` (to
            another coordinating partition).
        group_id: The group.
        key: The claim; None for a change of the whole group.
        client_id: Client of the claim or pause.
        incarnation: Process of that client, None for the end of a pause.
        token: Fencing token of a claim that begins, else None.
        position: Next offset to process, None if unknown.
        by: Client that took over a lost claim, or ended it as an admin; None if the
            key moved to another coordinating partition.
        successor: Client that an offer or a release names.
        reason: Reason in the log, if there is one.
        person: Person who paused, if the log names one.
        begin_ms: Begin of a scheduled pause.
        until_ms: End of a pause.
        topics: Topics that a pause is limited to, like ``orders:0,1``.
        partition: Coordinating partition of the entry.
        offset: Offset of the entry.
        time_ms: Time of the append, in epoch ms.
    """

    what: str
    group_id: str
    partition: int
    offset: int
    time_ms: int
    key: Key | None = None
    client_id: str | None = None
    incarnation: bytes | None = None
    token: Token | None = None
    position: int | None = None
    by: str | None = None
    successor: str | None = None
    reason: str | None = None
    begin_ms: int | None = None
    until_ms: int | None = None
    person: str | None = None
    topics: tuple[str, ...] = ()


_Place = tuple[str, bytes | None]
"""Group, and op_id of a pause of some of its partitions; None for the whole group."""


class Changes:
    """Derives changes from transitions.

    A state does not have the previous owner of a key, so this object stores the owner
    of each key. It also stores offers, because an offer or the answer to it may be sent
    again without a change.
    """

    def __init__(self, worlds: Sequence[WorldState] = ()) -> None:
        """Begin with the states before the first entry; with none, at the log start."""
        keys = {
            key: world.keys[key]
            for key, world in standing_keys(by_partition(worlds)).items()
        }
        self._owners: dict[Key, Owner] = {
            key: known.owner for key, known in keys.items() if known.owner is not None
        }
        self._offers: dict[Key, tuple[str, bytes | None]] = {
            key: (known.offer.successor, known.offer.ready)
            for key, known in keys.items()
            if known.offer is not None
        }
        self._paused: dict[_Place, Pause] = {
            _place(group_id, pause): pause
            for world in worlds
            for group_id, group in world.groups.items()
            for pause in group.pauses
        }
        self._scheduled: dict[tuple[str, bytes], Change | None] = {
            (group_id, each.op_id): None
            for world in worlds
            for group_id, group in world.groups.items()
            for each in group.scheduled
        }

    def apply(self, folded: Folded, *, worlds: Sequence[WorldState]) -> list[Change]:
        """Return the changes of an entry.

        Args:
            folded: The next entry.
            worlds: State of every coordinating partition. They may be ahead of the
                entry; positions and ends of pauses are taken from them.
        """
        changes: list[Change] = []
        for transition in folded.transitions:
            if transition.outcome == ACCEPTED:
                changes += self._of(folded, transition, worlds)
        changes += self._ended(folded, worlds)
        return [*changes, *self._begun(folded, worlds)]

    def _of(
        self, folded: Folded, transition: Transition, worlds: Sequence[WorldState]
    ) -> Iterator[Change]:
        key, record = transition.key, transition.record
        if isinstance(record, ReleaseGroup | PauseGroup):
            yield from self._of_pause(folded, record, effect=transition.effect)
        elif key is not None and isinstance(record, HandoffOffer | HandoffReady):
            yield from self._of_offer(folded, key, record)
        elif key is not None and isinstance(record, ClaimingPartition):
            self._offers.pop(key, None)
            owner = Owner(record.client_id, record.incarnation)
            before, self._owners[key] = self._owners.get(key), owner
            at = attrs.evolve(_change(folded, "lost", key.group_id), key=key)
            if before is not None and transition.effect == "claimed":
                yield attrs.evolve(
                    at,
                    client_id=before.client_id,
                    incarnation=before.incarnation,
                    by=record.client_id,
                )
            yield attrs.evolve(
                at,
                what=transition.effect or "claimed",
                client_id=owner.client_id,
                incarnation=owner.incarnation,
                token=_token(worlds[folded.partition], folded.entry),
                position=_position(worlds[folded.partition], key),
            )
        elif key is not None and isinstance(record, LayoutImport):
            yield from self._of_import(folded, key, worlds)
        elif key is not None and isinstance(
            record, ForgettingPartition | StagePosition
        ):
            yield from self._dropped(folded, key, by=record.client_id)
        elif isinstance(record, Reset) and transition.effect == "reset":
            config = worlds[folded.partition].config
            assert config is not None  # else the state would be foreign
            for each in sorted(self._owners):
                count = config.partition_count
                if place_under(each, count) == folded.partition:
                    yield from self._dropped(folded, each, by=record.client_id)
        elif key is not None and isinstance(record, ReleasingPartition):
            _ = self._owners.pop(key, None), self._offers.pop(key, None)
            yield attrs.evolve(
                _change(folded, "released", key.group_id),
                key=key,
                client_id=record.client_id,
                incarnation=record.incarnation,
                position=_position(worlds[folded.partition], key),
                successor=record.successor,
                reason=record.reason,
            )

    def _dropped(self, folded: Folded, key: Key, *, by: str) -> Iterator[Change]:
        """Yield the change of an admin's record after which a key has no owner."""
        before = self._owners.pop(key, None)
        self._offers.pop(key, None)
        if before is not None:
            yield attrs.evolve(
                _change(folded, "lost", key.group_id),
                key=key,
                client_id=before.client_id,
                incarnation=before.incarnation,
                by=by,
            )

    def _of_import(
        self, folded: Folded, key: Key, worlds: Sequence[WorldState]
    ) -> Iterator[Change]:
        """Yield the changes of a key that came to another coordinating partition."""
        at = attrs.evolve(_change(folded, "moved", key.group_id), key=key)
        before = self._owners.pop(key, None)
        self._offers.pop(key, None)
        if before is not None:
            # The owner was stale, and its claim does not move with the key.
            yield attrs.evolve(
                at,
                what="lost",
                client_id=before.client_id,
                incarnation=before.incarnation,
            )
        position = _position(worlds[folded.partition], key)
        yield attrs.evolve(at, position=position)

    def _of_pause(
        self, folded: Folded, record: ReleaseGroup | PauseGroup, *, effect: str | None
    ) -> Iterator[Change]:
        change = attrs.evolve(
            _change(folded, effect or "", record.group_id),
            client_id=record.client_id,
            incarnation=record.incarnation,
            reason=record.reason,
            until_ms=record.msg_expire_time,
            person=person_of(record),
            topics=scope_texts(scope_of(record)),
        )
        name = (record.group_id, record.op_id)
        if change.what == "paused":
            pause = _pause(record)
            place = _place(record.group_id, pause)
            known = self._paused.get(place)
            if known is None:
                self._paused[place] = pause
                yield change
            elif (
                known.op_id == pause.op_id
                and pause.incarnation not in known.incarnations
            ):
                seen = (*known.incarnations, pause.incarnation)
                self._paused[place] = attrs.evolve(known, incarnations=seen)
                yield attrs.evolve(change, what="renewed")
        elif isinstance(record, PauseGroup) and change.what == "scheduled":
            change = attrs.evolve(change, begin_ms=record.begin_time)
            is_new = name not in self._scheduled
            self._scheduled[name] = change
            if is_new:
                yield change

    def _of_offer(
        self, folded: Folded, key: Key, record: HandoffOffer | HandoffReady
    ) -> Iterator[Change]:
        before = self._offers.pop(key, None)
        successor: str | None
        if isinstance(record, HandoffReady):
            what, successor = "ready", record.client_id
            now: tuple[str, bytes | None] | None = (successor, record.incarnation)
        elif record.successor is None:
            what, successor, now = "withdrawn", before and before[0], None
        else:
            what, successor, now = "offered", record.successor, (record.successor, None)
        if now is not None:
            self._offers[key] = now
        if now != before:
            yield attrs.evolve(
                _change(folded, what, key.group_id),
                key=key,
                client_id=record.client_id,
                incarnation=record.incarnation,
                successor=successor,
            )

    def _ended(self, folded: Folded, worlds: Sequence[WorldState]) -> list[Change]:
        """Return changes for pauses that are over in every partition."""
        over = []
        for place, pause in self._paused.items():
            groups = (world.groups.get(place[0]) for world in worlds)
            if not any(group and group.lasting(pause.op_id) for group in groups):
                change = _change(folded, "unpaused", place[0])
                topics = scope_texts(pause.scope)
                over.append((place, attrs.evolve(change, topics=topics)))
        for place, _ in over:
            del self._paused[place]
        return [change for _, change in over]

    def _begun(self, folded: Folded, worlds: Sequence[WorldState]) -> Iterator[Change]:
        """Yield changes for scheduled pauses that have begun, or will not."""
        for (group_id, op_id), planned in list(self._scheduled.items()):
            groups = [w.groups[group_id] for w in worlds if group_id in w.groups]
            pauses = [pause for group in groups if (pause := group.lasting(op_id))]
            is_scoped = any(pause.scope is not None for pause in pauses)
            if not pauses:
                if not any(group.scheduled_as(op_id) for group in groups):
                    del self._scheduled[group_id, op_id]
                    yield _change(folded, "unscheduled", group_id)
                continue
            other = None if is_scoped else self._paused.get((group_id, None))
            if other is None or other.op_id == op_id:  # else another still lasts
                del self._scheduled[group_id, op_id]
                place = _place(group_id, pauses[0])
                if place not in self._paused:
                    self._paused[place] = pauses[0]
                    yield attrs.evolve(
                        _change(folded, "paused", group_id),
                        client_id=pauses[0].client_id,
                        incarnation=pauses[0].incarnation,
                        reason=None if planned is None else planned.reason,
                        until_ms=pauses[0].until_ms,
                        person=None if planned is None else planned.person,
                        topics=scope_texts(pauses[0].scope),
                    )


def _place(group_id: str, pause: Pause) -> _Place:
    return group_id, None if pause.scope is None else pause.op_id


def _pause(record: ReleaseGroup | PauseGroup) -> Pause:
    """Return the pause that a record of an operation began."""
    return Pause(
        op_id=record.op_id,
        client_id=record.client_id,
        incarnation=record.incarnation,
        seq=record.seq,
        incarnations=(record.incarnation,),
        until_ms=record.msg_expire_time,
        scope=scope_of(record),
    )


def _change(folded: Folded, what: str, group_id: str) -> Change:
    entry = folded.entry
    return Change(
        what=what,
        group_id=group_id,
        partition=folded.partition,
        offset=entry.offset,
        time_ms=entry.timestamp_ms,
    )


def _token(world: WorldState, entry: LogEntry) -> Token | None:
    era = world.era_at(entry.offset)
    if era is None or entry.leader_epoch is None:
        return None
    return Token(era, entry.leader_epoch, entry.offset)


def _position(world: WorldState, key: Key) -> int | None:
    known = world.keys.get(key)
    return None if known is None else known.position


class EarlyStates(KeptStates):
    """Source of stored states, limited to states before the first entry to read.

    Args:
        source: Source of stored states.
        first: Called with a partition's offsets, returns the first that must be read.
    """

    def __init__(self, source: KeptStates, first: Callable[[LogRange], int]) -> None:
        self._source = source
        self._first = first

    def find(
        self, wanted: Mapping[int, LogRange], *, log: CoordinationLog, timeout_ms: int
    ) -> Mapping[int, KeptState]:
        """Return the newest state of each partition, if it is early enough.

        Raises:
            CoordinationError: The log did not answer.
        """
        early = {
            t: LogRange(span.start, max(span.start, min(self._first(span), span.end)))
            for t, span in wanted.items()
        }
        found = self._source.find(early, log=log, timeout_ms=timeout_ms)
        return {t: kept for t, kept in found.items() if kept.offset <= early[t].end}

    def discard(self, state: KeptState) -> None:
        """Report to the source that a state does not fit the log."""
        self._source.discard(state)


class WorldWatch(Closing):
    """Follows the world live, read-only; ``open`` returns one.

    A context manager for one thread. Nothing happens between calls: if ``read`` or
    ``changes`` is called rarely, changes are returned late, but none is lost.

    Attributes:
        starts: First offset in the log when the watch was opened, per partition.
        ends: Next offset at that time, per partition.
        outage: Why the log cannot be reached now, None if it can. The watch continues
            by itself when the brokers answer again.
    """

    def __init__(
        self,
        log: CoordinationLog,
        clock: Clock,
        *,
        sources: Sequence[KeptStates] = (),
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        """Follow a log. Users call ``open`` instead.

        Args:
            log: The log.
            clock: Local time.
            sources: Sources of stored states to start from, in order of preference;
                without any, the log is read from its start.
            timeout_ms: How long to wait for the cluster.

        Raises:
            CoordinationError: The cluster did not return the end of the log.
        """
        self._log = log
        self._clock = clock
        self._follower = Follower(log, clock, sources=sources)
        self._prefix = Prefix(None, None)
        self._changes: Changes | None = None
        self._live: set[int] = set()
        self._probed_ms = clock.now_ms()
        self.outage: CoordinationError | None = None
        self.starts = dict(log.start_offsets(timeout_ms))
        self.ends = dict(log.end_offsets(timeout_ms))

    @classmethod
    def open(
        cls,
        bootstrap_servers: str | Sequence[str] = SERVERS,
        *,
        coordination_topic: str = COORDINATION_TOPIC,
        options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        first: Callable[[LogRange], int] | None = None,
        timeout_ms: int = TIMEOUT_MS,
    ) -> Self:
        """Open the log for following the world as it changes.

        Args:
            bootstrap_servers: Addresses of the cluster.
            coordination_topic: Name of the log.
            options: Further options of the transport.
            transport: ``auto``, ``fast`` or ``kafka-python``.
            first: Called with a partition's offsets, returns the first that must be
                read: a state stored on this host or in the log may replace earlier
                entries. None for the whole log, or from the first checkpoint on, if
                the log has lost its start.
            timeout_ms: How long to wait for the cluster.

        Raises:
            TopicMisconfigured: There is no such topic.
            CoordinationError: The cluster did not answer.
        """
        settings = ConnectionConfig(
            bootstrap_servers,
            coordination_topic=coordination_topic,
            options=options,
            transport=transport,
        )
        timeout_ms = to_ms("timeout_ms", timeout_ms)
        log = open_coordination_log(
            settings, heartbeat_interval_ms=None, timeout_ms=timeout_ms
        )
        try:
            sources: Sequence[KeptStates] = (RetainedCheckpoints(),)
            if first is not None:
                where, topic_id = home_of(None), log.topic_id
                kept = kept_in(open_store(where, log.cluster_id, topic_id=topic_id))
                sources = [EarlyStates(source, first) for source in kept]
            return cls(log, SystemClock(), sources=sources, timeout_ms=timeout_ms)
        except BaseException:
            log.close(0)
            raise

    @property
    def is_caught_up(self) -> bool:
        """Whether all entries that were in the log at the start have been read."""
        at = self._log.positions()
        return all(at.get(t, 0) >= end for t, end in self.ends.items())

    def read(self, timeout_ms: int) -> list[Folded]:
        """Return the next entries with their transitions, waiting up to a deadline.

        While no entries arrive, some calls check the brokers, which takes up to two
        seconds more; see ``outage``.

        Raises:
            LogTruncated: The log went back: earlier results may be invalid.
            LogUnreadable: The log cannot be read.
        """
        was_caught_up = self.is_caught_up
        entries: list[tuple[int, LogEntry]] = []

        def accept(partition: int, entry: LogEntry) -> bool:
            entries.append((partition, entry))
            return self._prefix.accept(partition, entry)

        if not self._has_begun():
            return []
        transitions: dict[tuple[int, int], list[Transition]] = {}
        for partition, transition in self._follower.step(timeout_ms, accept=accept):
            place = (partition, transition.offset)
            transitions.setdefault(place, []).append(transition)
        if entries:
            self.outage = None
            self._probed_ms = self._clock.now_ms()
        else:
            self._probe()
        if was_caught_up:
            self._live.update(partition for partition, _ in entries)
        return [
            Folded(
                partition, entry, tuple(transitions.get((partition, entry.offset), ()))
            )
            for partition, entry in entries
        ]

    def changes(self, timeout_ms: int) -> list[Change]:
        """Return the next changes, waiting up to a deadline; often there are none.

        The first calls return all changes since the log start, or since the state from
        which the watch started; ``catch_up`` skips these. Raises as ``read`` does.
        """
        entries, changes = self.read(timeout_ms), self._changes
        worlds = self._follower.worlds
        if changes is None:
            return []
        return [c for folded in entries for c in changes.apply(folded, worlds=worlds)]

    def catch_up(self, timeout_ms: int) -> None:
        """Read the entries that were in the log at the start, without their changes.

        Raises:
            DeadlineExceeded: The entries were not read in time.
        """
        deadline = Deadline(timeout_ms, self._clock.now_ms)
        while not self.is_caught_up:
            left_ms = deadline.require_ms(
                lambda: DeadlineExceeded(
                    f"the coordination log was not read within {timeout_ms} ms; check "
                    "the brokers with: marshal doctor"
                )
            )
            self.changes(min(POLL_MS, left_ms))

    def world(self) -> World:
        """Return the world as read so far; the next read changes it."""
        now_ms, wall_ms = self._clock.now_ms(), self._clock.wall_ms()
        return World(
            self._follower.worlds,
            {
                # The local clock has timed entries that arrived during the watch.
                t: replica.elapsed_ms(now_ms)
                if t in self._live
                else replica.idle_ms(now_ms, wall_ms=wall_ms)
                for t, replica in self._follower.replicas.items()
            },
            cluster_id=getattr(self._log, "cluster_id", None),
            read_at_ms=wall_ms,
            notes=self._prefix.notes,
            log_start_missing=self._follower.log_start_missing,
        )

    def _has_begun(self) -> bool:
        """Choose where to start, if not done; return whether the log has answered."""
        if self._changes is not None:
            return True
        try:
            self._follower.begin()
            if self._follower.is_pause_unknown and not any(self.starts.values()):
                # The reason of a pause is only in the log.
                self._log.read_from(self.starts)
                self._follower = Follower(self._log, self._clock)
            self._prefix.begin(self._follower.began_notes)
        except CoordinationError as error:
            if not error.retriable:
                raise
            self.outage = error
            return False
        self._changes = Changes(self._follower.worlds)
        return True

    def _probe(self) -> None:
        """Check whether the brokers answer when no entries arrive."""
        if self._clock.now_ms() - self._probed_ms < PROBE_EVERY_MS:
            return
        try:
            self._log.end_offsets(PROBE_MS)
        except CoordinationError as error:
            if not error.retriable:
                raise
            self.outage = error
        else:
            self.outage = None
        self._probed_ms = self._clock.now_ms()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._follower.close(2_000)
