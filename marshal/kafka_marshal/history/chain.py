"""Collects the records that led to one key's state, in log order.

``KeyChain`` observes the fold of the key's coordinating partition and decides nothing.
Claims and pauses come from the same ``Historian`` that the audit uses; the chain adds
the attempts that failed, and the actions of admins on the key.
"""

from collections import deque
from operator import attrgetter
from typing import NamedTuple

import attrs
import msgspec

from kafka_marshal.history.historian import Historian
from kafka_marshal.history.rows import RAN_OUT, RESTORED, Interval, Moment, PauseRow
from kafka_marshal.protocol.codec import person_of
from kafka_marshal.protocol.fold_beats import NO_EPOCH
from kafka_marshal.protocol.items import Layout, is_in_scope
from kafka_marshal.protocol.judging import scope_of
from kafka_marshal.protocol.layout import config_of
from kafka_marshal.protocol.losses import RESET, STALE
from kafka_marshal.protocol.placement import place_under
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingMessages,
    ClaimingPartition,
    Config,
    DecidePosition,
    FencingClient,
    ForgettingPartition,
    HandoffOffer,
    HandoffReady,
    LayoutDone,
    LayoutFence,
    LayoutFinal,
    LayoutImport,
    PauseGroup,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Reset,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.state import (
    ACCEPTED,
    REFUSED,
    KeyState,
    Transition,
    Transitions,
    WorldState,
    why_of,
)
from kafka_marshal.protocol.text import scope_texts
from kafka_marshal.protocol.types import Key, LogEntry, Owner, Token

EVENTS_MAX = 10_000
CLAIMS_MAX = 10_000
EPOCHS_MAX = 1_000
_BEATS = frozenset({"renewed", "position_only"})
_OPERATIONS = (StagePosition, ResolvePosition)

# What happened to a key (``KeyEvent.what``), besides the effects and outcomes of
# PROTOCOL 3.8, which keep their names.
TAKEN = "taken_over"
RENEWED_LATE = "renewed_late"
PAUSE_EXPIRED = "pause_expired"
UNSCHEDULED = "unscheduled"
DROPPED = "dropped"
# Effects that include dropping the key.
_DROPS = frozenset({"forgotten", "reset", "layout_fenced", "layout_final"})
_MOVES = (LayoutFence, LayoutDone, LayoutFinal)


class KeyEvent(msgspec.Struct, kw_only=True, gc=False):
    """Something that happened to a key, or a refused or ignored record about it.

    Attributes:
        what: ``claimed``, ``taken_over``, ``resumed``, ``released``, ``stale``,
            ``renewed_late``, ``refused``, ``ignored``, ``scheduled`` (a pause),
            ``unscheduled``, ``paused``, ``unpaused``, ``pause_expired``, ``staged``,
            ``decided``, ``position_set``, ``unlocked``, ``forgotten``, ``dropped`` (for
            its silence), ``offered``, ``offer_withdrawn``, ``ready``, ``fenced``,
            ``reset``, ``configured``, ``layout_fenced`` (a change of the partition
            count moves the key), ``imported``, ``layout_done`` (a key not imported by
            then is new), ``layout_final``, or ``restored`` if the history begins at a
            checkpoint.
        partition: Coordinating partition of the record.
        offset: Offset of the record, or of the first one if it was repeated; None if
            time alone caused the event.
        at_ms: Append time of that record, epoch ms; an estimate without an offset.
        record: Name of the record kind, None without a record.
        client_id: Sender of the record; for ``stale`` the owner.
        incarnation: The sender's process.
        person: Person in the tags of an admin's record, or None.
        reason: Reason in the record, or why it was refused or ignored.
        owner: Owner of the key before the event, None without one.
        token: Token of the claim that begins or ends, else None.
        position: Position after the event, None if unknown.
        before: Position before a set position, None if unknown.
        begin_ms: Begin of a scheduled pause.
        until_ms: End of a pause, a reservation or an offer, of the quiet time after a
            Reset, or of the owner's lease, each on the clock that judges it.
        op_id: The operation of an admin, None without one.
        topics: Topics that a pause is limited to, like ``orders:0,1``.
        successor: Client that a release or an offer names.
        count: Number of such records until the next change.
        renewed_by: Person, else client, that renewed a pause last; None if it also
            began the pause.
        last_offset: Offset of the last such record.
        last_ms: Append time of the last such record, epoch ms.
        move: The last change of the partition count that moves the key, as the log of
            this partition shows it so far; None before the first one.
        is_moved: Whether that move was over here: the key had arrived, or was dropped.
    """

    what: str
    partition: int
    offset: int | None
    at_ms: int
    record: str | None = None
    client_id: str | None = None
    incarnation: bytes | None = None
    person: str | None = None
    reason: str | None = None
    owner: str | None = None
    token: Token | None = None
    position: int | None = None
    before: int | None = None
    topics: tuple[str, ...] = ()
    begin_ms: int | None = None
    until_ms: int | None = None
    op_id: bytes | None = None
    successor: str | None = None
    count: int = 1
    last_offset: int | None = None
    last_ms: int | None = None
    renewed_by: str | None = None
    move: "Move | None" = None
    is_moved: bool = False


class Move(NamedTuple):
    """A change of the partition count that moves a key.

    Attributes:
        generation: Generation of the Config that the change put in force.
        op_id: The operation.
        source: Coordinating partition that the key moves from.
        target: Coordinating partition that it moves to.
    """

    generation: int
    op_id: bytes
    source: int
    target: int


@attrs.frozen(kw_only=True)
class KeyPath:
    """The past of a key, joined from the chains of its partitions.

    Attributes:
        key: The key.
        world: State of its coordinating partition at the moment of the view; while the
            key moves, of the partition that shows it (see ``World.partition_of``).
        events: The last events, oldest first; at most ``EVENTS_MAX``.
        events_count: Number of all events.
        claims: The last claims, by token; at most ``CLAIMS_MAX``.
        claims_count: Number of all claims.
        refused_count: Number of refused or ignored records about the key.
        began_at: Next offset of the checkpoint at which the history begins, None at the
            log's start. Earlier events are not known here. If the history is of several
            partitions, this is the offset in the first one.
        pause: The active pause of the key that ends last, None without one.
    """

    key: Key
    world: WorldState
    events: tuple[KeyEvent, ...]
    events_count: int
    claims: tuple[Interval, ...]
    claims_count: int
    refused_count: int
    began_at: int | None
    pause: PauseRow | None


class _Lease(msgspec.Struct, gc=False):
    """The key's owner, lease and position in the state before an entry."""

    owner: Owner | None
    renewed_ms: int
    heartbeat_interval_ms: int
    position: int | None

    @classmethod
    def of(cls, known: KeyState | None) -> "_Lease":
        if known is None:
            return cls(None, 0, 0, None)
        return cls(
            known.owner, known.renewed_ms, known.heartbeat_interval_ms, known.position
        )


class KeyChain:
    """Collects the events and claims of one key from the fold of its partition.

    Attributes:
        key: The key.
        events: The last ``EVENTS_MAX`` events, oldest first.
        events_count: Number of all events.
        claims: The last ``CLAIMS_MAX`` claims, oldest first; the open one is the last.
        claims_count: Number of all claims.
        refused_count: Number of refused or ignored records about the key.
        began_at: Next offset of the checkpoint at which the chain began, None at the
            log's start.
        moves: Changes of the partition count that move the key, oldest first.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.events: deque[KeyEvent] = deque(maxlen=EVENTS_MAX)
        self.events_count = 0
        self._claims: deque[Interval] = deque(maxlen=CLAIMS_MAX)
        self._claims_count = 0
        self.refused_count = 0
        self.began_at: int | None = None
        self._historian = Historian()
        # All epochs of the key: ignored heartbeats in batches may name earlier ones.
        self._epochs: dict[int, None] = {}
        self._was = _Lease.of(None)
        self._is_known = False
        self._scheduled: frozenset[bytes] = frozenset()
        self._op_id: bytes | None = None
        self._is_stale = False
        self.moves: list[Move] = []
        self._partition = 0
        self._is_moved = False
        # Repeated events since the last change, by the fields that make them equal.
        self._repeated: dict[tuple[str | bytes | None, ...], KeyEvent] = {}

    @property
    def claims(self) -> list[Interval]:
        """The claims, oldest first, the open one included."""
        return [*self._claims, *self._open()]

    @property
    def claims_count(self) -> int:
        """Number of all claims."""
        return self._claims_count + len(self._open())

    @property
    def pause(self) -> PauseRow | None:
        """The active pause of the key that ends last, None without one."""
        return max(self._pauses(), key=attrgetter("until_ms"), default=None)

    def _pauses(self) -> list[PauseRow]:
        every = self._historian.pauses.lasting.values()
        return [row for row in every if self._is_of_the_key(row)]

    def _is_of_the_key(self, row: PauseRow) -> bool:
        is_mine = row.group_id == self.key.group_id
        return is_mine and (row.scope is None or is_in_scope(row.scope, self.key))

    def begin(self, world: WorldState) -> None:
        """Start from the state of a checkpoint, before the first ``take``."""
        self.began_at = world.next_offset
        historian = self._historian
        historian.begin(world)
        historian.tracks = {
            key: track for key, track in historian.tracks.items() if key == self.key
        }
        scheduled = historian.pauses.scheduled
        historian.pauses.scheduled = {
            name: planned
            for name, planned in scheduled.items()
            if name[0] == self.key.group_id
        }
        known = world.keys.get(self.key)
        self._note_state(known)
        layout, config = world.layout, world.config
        if layout is not None and config is not None:
            is_there = bool(layout.sources) and known is not None
            self._note_move(self._move_by(layout, config), is_moved=is_there)
        begun = KeyEvent(
            what=RESTORED,
            partition=world.partition,
            offset=world.next_offset - 1,
            at_ms=world.append_time_ms,
            position=None if known is None else known.position,
            token=world.token(self.key),
        )
        if known is not None and known.owner is not None:
            begun.client_id, begun.incarnation = known.owner
        if known is not None and known.lock is not None:
            begun.op_id = known.lock.op_id
        self._add(begun)

    def epoch(self, world: WorldState) -> int:
        """Return the key's epoch: ``take`` needs no Heartbeats of other epochs.

        A Heartbeat that names an earlier epoch of the key always has a transition.
        """
        known = world.keys.get(self.key)
        return NO_EPOCH if known is None else known.epoch

    def take(
        self, world: WorldState, entry: LogEntry, *, transitions: Transitions
    ) -> None:
        """Observe an entry that was folded.

        Args:
            world: The state after the entry.
            entry: The entry.
            transitions: Its transitions.
        """
        self._partition = world.partition
        mine = self._mine(transitions)
        for each in mine:
            if isinstance(each.record, LayoutFence):
                self._note_move(self._move_by(each.record, config_of(each.record)))
        pause = self.pause
        is_there = self.key in world.keys
        self._scheduled = frozenset(
            op_id for _, op_id in self._historian.pauses.scheduled
        )
        has_pause = pause is not None or self._scheduled
        if not mine and not has_pause and is_there >= self._is_known:
            return
        ends_pause = () if mine or pause is None else _resolving(transitions, self.key)
        rows = self._historian.take(world, entry, transitions=mine or ends_pause)
        at = Moment(entry.offset, world.now_ms, entry.timestamp_ms)
        was = self._was
        for row in rows:
            if isinstance(row, PauseRow) and self._is_of_the_key(row):
                self._unpaused(world, row, transitions=transitions)
        if not any(each.effect == "paused" for each in mine):
            self._begun(world, at=at)
        for transition in mine:
            self._note_staleness(world, at, was=was)
            self._one(world, transition, at=at)
        for row in rows:
            if isinstance(row, Interval) and row.key == self.key:
                self._claims.append(row)
                self._claims_count += 1
        is_explained = any(each.effect in _DROPS for each in mine)
        if self._is_known and not is_there and not is_explained:
            self._change(world, DROPPED, at=at, record=None)
        self._note_state(world.keys.get(self.key))

    # --- which transitions concern the key

    def _mine(self, transitions: Transitions) -> Transitions:
        key, found = self.key, []
        for index, each in enumerate(transitions):
            is_open = each.key is None or each.outcome == REFUSED
            if each.key == key or (is_open and self._is_about(each, index)):
                found.append(each)
        return tuple(found)

    def _is_about(self, transition: Transition, index: int) -> bool:
        """Return whether a transition without this key concerns it all the same."""
        record = transition.record
        if isinstance(record, BatchHeartbeat):
            # A heartbeat in a batch names only an epoch. An earlier epoch of this key
            # shows that a former owner still believes that it owns the key.
            is_mine = record.group_id == self.key.group_id
            has_beats = len(record.beats) > index and transition.reason == "not_owner"
            return is_mine and has_beats and record.beats[index][0] in self._epochs
        if isinstance(record, Reset):
            return transition.effect == "reset"
        if isinstance(record, FencingClient):
            fenced = (record.fenced, record.fenced_incarnation)
            is_mine = record.group_id == self.key.group_id
            is_accepted = transition.outcome == ACCEPTED
            return is_mine and is_accepted and fenced == self._was.owner
        if isinstance(record, Config):
            place = place_under(self.key, record.partition_count)
            return transition.outcome == ACCEPTED and place == self._partition
        if isinstance(record, _MOVES):
            return transition.outcome == ACCEPTED and self._is_moved_by(record)
        if isinstance(record, ReleaseGroup | PauseGroup):
            is_mine = record.group_id == self.key.group_id
            scope = scope_of(record)
            is_mine = is_mine and (scope is None or is_in_scope(scope, self.key))
            return is_mine and transition.outcome == ACCEPTED
        if isinstance(record, DecidePosition):
            is_mine = record.group_id == self.key.group_id
            return is_mine and record.op_id == self._op_id
        return isinstance(record, StagePosition) and self._is_named_by(record)

    def _is_moved_by(self, record: LayoutFence | LayoutDone | LayoutFinal) -> bool:
        """Return whether an accepted record of a change concerns the key."""
        if isinstance(record, LayoutFence):
            move = self._move_by(record, config_of(record))
            return move is not None or self._is_known
        move = self.moves[-1] if self.moves else None
        if move is None or move.op_id != record.op_id:
            return False
        return isinstance(record, LayoutFinal) or (
            record.source == move.source and not self._is_known
        )

    def _move_by(self, change: LayoutFence | Layout, config: Config) -> Move | None:
        """Return how a change of the partition count moves the key, or None."""
        counts = change.from_count, config.partition_count
        source, target = (place_under(self.key, count) for count in counts)
        if source == target:
            return None
        return Move(config.generation, change.op_id, source, target)

    def _note_move(self, move: Move | None, *, is_moved: bool = False) -> None:
        if move is not None:
            self.moves.append(move)
            self._is_moved = is_moved

    def _is_named_by(self, record: StagePosition) -> bool:
        return record.group_id == self.key.group_id and any(
            topic.topic == self.key.topic and position[0] == self.key.partition
            for topic in record.topics
            for position in topic.positions
        )

    def _open(self) -> list[Interval]:
        track = self._historian.tracks.get(self.key)
        is_open = track is not None and track.interval.end is None
        return [track.interval] if track is not None and is_open else []

    # --- what they are

    def _one(self, world: WorldState, transition: Transition, *, at: Moment) -> None:
        record = transition.record
        assert record is not None
        if transition.outcome != ACCEPTED:
            self._unsuccessful(world, transition, at=at)
        elif isinstance(record, ClaimingPartition):
            self._won(world, transition, at=at)
        elif transition.effect in _BEATS or isinstance(record, ClaimingMessages):
            if self._is_stale and transition.effect == "renewed":
                self._is_stale = False
                self._change(world, RENEWED_LATE, at=at, record=record)
        elif isinstance(record, ReleaseGroup | PauseGroup):
            self._paused(world, transition, at=at)
        else:
            self._changed(world, transition, at=at)

    def _won(self, world: WorldState, transition: Transition, *, at: Moment) -> None:
        record, was = transition.record, self._was.owner
        assert isinstance(record, ClaimingPartition)
        what = transition.effect or ""
        if what == "claimed" and was is not None:
            what = TAKEN
        event = self._change(world, what, at=at, record=record)
        event.reason, event.token = why_of(record), world.token(self.key)
        self._is_stale = False
        self._note_arrival(event)
        self._epochs[at.offset] = None
        if len(self._epochs) > EPOCHS_MAX:
            del self._epochs[next(iter(self._epochs))]

    def _note_arrival(self, event: KeyEvent) -> None:
        """Record that the key has arrived here, if a change moves it here."""
        if event.move is not None and event.move.target == event.partition:
            event.is_moved = self._is_moved = True

    def _paused(self, world: WorldState, transition: Transition, *, at: Moment) -> None:
        record = transition.record
        assert isinstance(record, ReleaseGroup | PauseGroup)
        pause = self._historian.pauses.lasting.get((record.group_id, record.op_id))
        is_scheduled = record.op_id in self._scheduled
        if transition.effect == "unpaused" and is_scheduled:
            event = self._change(world, UNSCHEDULED, at=at, record=record)
            event.reason, event.op_id = record.reason, record.op_id
            planned = self._planned(record.op_id)
            event.topics = () if planned is None else planned.topics
        elif transition.effect == "scheduled" and not is_scheduled:
            event = self._change(world, "scheduled", at=at, record=record)
            event.reason, event.op_id = record.reason, record.op_id
            event.topics = scope_texts(scope_of(record))
            event.begin_ms = getattr(record, "begin_time", None)
            event.until_ms = record.msg_expire_time
        is_first = transition.effect == "paused" and pause is not None
        if not is_first or pause is None:
            return  # the end of a pause is a row of the historian
        if pause.start.offset == at.offset:
            event = self._change(world, "paused", at=at, record=record)
            event.reason, event.op_id = record.reason, record.op_id
            event.until_ms, event.topics = pause.until_ms, scope_texts(pause.scope)
            return
        for event in reversed(self.events):
            if event.what == "paused" and event.op_id == pause.op_id:
                event.until_ms, event.count = pause.until_ms, event.count + 1
                event.last_offset, event.last_ms = at.offset, at.append_ms
                event.renewed_by = pause.renewed_by
                return

    def _begun(self, world: WorldState, *, at: Moment) -> None:
        """Record the begin of a scheduled pause, for which there is no record."""
        for pause in self._pauses():
            if pause.op_id not in self._scheduled:
                continue
            event = self._change(world, "paused", at=at, record=None)
            event.client_id, event.reason = pause.client_id, pause.reason
            event.op_id, event.until_ms = pause.op_id, pause.until_ms
            event.topics = scope_texts(pause.scope)
            planned = self._planned(pause.op_id)
            if planned is not None:
                event.person, event.incarnation = planned.person, planned.incarnation

    def _planned(self, op_id: bytes) -> KeyEvent | None:
        """Return the event that scheduled a pause, None if it was dropped."""
        for event in reversed(self.events):
            if event.what == "scheduled" and event.op_id == op_id:
                return event
        return None

    def _unpaused(
        self, world: WorldState, row: PauseRow, *, transitions: Transitions
    ) -> None:
        assert row.end is not None
        if row.ending == RESET:
            return  # the Reset is an event of its own
        is_expired = row.ending == RAN_OUT
        record = None if is_expired else transitions[0].record
        what = PAUSE_EXPIRED if is_expired else "unpaused"
        event = self._change(world, what, at=row.end, record=record)
        event.op_id, event.until_ms = row.op_id, row.until_ms
        event.topics = scope_texts(row.scope)
        event.reason = getattr(record, "reason", None)

    def _changed(
        self, world: WorldState, transition: Transition, *, at: Moment
    ) -> None:
        record = transition.record
        assert record is not None
        known, was = world.keys.get(self.key), self._was
        event = self._change(world, transition.effect or "", at=at, record=record)
        event.op_id = getattr(record, "op_id", None)
        event.reason = getattr(record, "reason", None)
        if isinstance(record, ReleasingPartition):
            event.token = world.token(self.key)
            if known is not None and known.handoff is not None:
                event.successor, event.until_ms = known.handoff
        elif known is not None and isinstance(record, HandoffOffer | HandoffReady):
            if known.offer is not None:
                event.successor, event.until_ms = known.offer[:2]
        elif isinstance(record, Reset):
            event.until_ms = world.quiet_until_ms
        elif isinstance(record, _OPERATIONS):
            event.before = was.position
            event.position = (transition.detail or {}).get("position")
        elif isinstance(record, ForgettingPartition):
            event.before = was.position
        elif isinstance(record, Config):
            event.reason = (
                f"generation {record.generation}, heartbeat interval "
                f"{record.heartbeat_interval_ms} ms, level {record.feature_level}"
            )
        else:
            self._changed_by_layout(event, record, known=known)

    def _changed_by_layout(
        self, event: KeyEvent, record: Record, *, known: KeyState | None
    ) -> None:
        """Complete an event of a change of the partition count."""
        if isinstance(record, LayoutFence):
            count = config_of(record).partition_count
            event.reason = f"from {record.from_count} to {count}"
        elif isinstance(record, LayoutImport):
            self._note_arrival(event)
            if known is not None and known.handoff is not None:
                event.successor, event.until_ms = known.handoff
        elif isinstance(record, LayoutDone | LayoutFinal):
            event.is_moved = self._is_moved = True

    def _unsuccessful(
        self, world: WorldState, transition: Transition, *, at: Moment
    ) -> None:
        """Record a refused or ignored record; repeated ones share an event."""
        record = transition.record
        assert record is not None
        self.refused_count += 1
        who = getattr(record, "incarnation", None)
        name = type(record).__name__
        place = (transition.outcome, name, who, transition.reason)
        event = self._repeated.get(place)
        if event is None:
            event = self._new(world, transition.outcome, at=at, record=record)
            event.reason = transition.reason
            event.op_id = getattr(record, "op_id", None)
            self._repeated[place] = event
            self._add(event)
        else:
            event.count += 1
        event.last_offset, event.last_ms = at.offset, at.append_ms
        left_ms = (transition.detail or {}).get("remaining_ms")
        if left_ms is not None:
            event.until_ms = at.append_ms + left_ms

    def _note_staleness(self, world: WorldState, at: Moment, *, was: _Lease) -> None:
        """Record that the owner went stale before this entry, once per renewal."""
        since_ms = self._stale_ms(at, was)
        if since_ms is None or self._is_stale:
            return
        assert was.owner is not None
        self._is_stale = True
        self._add(
            KeyEvent(
                what=STALE,
                partition=world.partition,
                offset=None,
                at_ms=since_ms,
                client_id=was.owner.client_id,
                incarnation=was.owner.incarnation,
                owner=was.owner.client_id,
                position=was.position,
            )
        )

    @staticmethod
    def _stale_ms(at: Moment, was: _Lease) -> int | None:
        """Return the append time since which an owner is stale (PROTOCOL 4.2)."""
        if was.owner is None:
            return None
        over_ms = at.log_ms - was.renewed_ms - 2 * was.heartbeat_interval_ms
        return at.append_ms - over_ms + 1 if over_ms > 0 else None

    # --- events

    def _change(
        self, world: WorldState, what: str, *, at: Moment, record: Record | None
    ) -> KeyEvent:
        """Add an event after which later attempts may be judged differently."""
        event = self._new(world, what, at=at, record=record)
        self._repeated = {}
        self._add(event)
        return event

    def _new(
        self, world: WorldState, what: str, *, at: Moment, record: Record | None
    ) -> KeyEvent:
        known, owner = world.keys.get(self.key), self._was.owner
        return KeyEvent(
            what=what,
            partition=world.partition,
            offset=at.offset,
            at_ms=at.append_ms,
            record=None if record is None else type(record).__name__,
            client_id=getattr(record, "client_id", None),
            incarnation=getattr(record, "incarnation", None),
            person=None if record is None else person_of(record),
            owner=None if owner is None else owner.client_id,
            position=None if known is None else known.position,
        )

    def _add(self, event: KeyEvent) -> None:
        event.move = self.moves[-1] if self.moves else None
        event.is_moved = self._is_moved
        self.events.append(event)
        self.events_count += 1

    def _note_state(self, known: KeyState | None) -> None:
        self._was, self._is_known = _Lease.of(known), known is not None
        lock = None if known is None else known.lock
        self._op_id = None if lock is None else lock.op_id


def _resolving(transitions: Transitions, key: Key) -> Transitions:
    """Return a transition of a Resolve of the key's group, which may end its pause."""
    found = (
        each
        for each in transitions[:1]
        if isinstance(each.record, ResolvePosition)
        and each.record.group_id == key.group_id
    )
    return tuple(found)
