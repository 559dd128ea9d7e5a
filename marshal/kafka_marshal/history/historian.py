"""Derives from the fold who owned which key, when and why, as rows.

The state has the present; a historian keeps the past. It observes transitions and
decides nothing, so that an audit uses the same fold as the members. It keeps its own
account of each claim (the epoch that a record named, the position before), which
detects a fold that breaks a rule.
"""

from collections.abc import Iterator, Sequence

import msgspec

from kafka_marshal.history.pauses import Pauses
from kafka_marshal.history.rows import (
    GRANTED,
    OPEN,
    RESTORED,
    WON,
    Attempt,
    GrantRow,
    Handoff,
    ImportRow,
    Interval,
    Moment,
    PauseRow,
    PositionRow,
    Rejected,
    Row,
)
from kafka_marshal.protocol.fold_beats import Beat, fold_beats
from kafka_marshal.protocol.losses import (
    FORGOTTEN,
    MOVED,
    POSITION_SET,
    RELEASED,
    RESET,
    RESUMED,
    TAKEN_OVER,
)
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingMessages,
    ClaimingPartition,
    DecidePosition,
    ForgettingPartition,
    HandoffOffer,
    HandoffReady,
    Heartbeat,
    LayoutFence,
    LayoutFinal,
    LayoutImport,
    PauseGroup,
    ReleaseGroup,
    ReleasingPartition,
    Reset,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.state import (
    ACCEPTED,
    REFUSED,
    SKIPPED,
    UNDECODABLE,
    Transition,
    Transitions,
    WorldState,
    why_of,
)
from kafka_marshal.protocol.types import Key, LogEntry

CONTENDERS_MAX = 8
# A process that is refused for one of these reasons waits for the key.
_WAITING = ("held", "handoff")


class Track(msgspec.Struct, gc=False, kw_only=True):
    """The last claim of a key, and the processes that wait to claim the key next.

    Attributes:
        interval: The current claim, or the last one.
        epoch: Epoch of that claim.
        sample_due_ms: Log time from which the next position row is due.
        rewinds_count: Number of rewinds under all claims of the key.
        kept_ms: Log time until which a release reserves the key for its successor.
        waiting: Processes refused since the last renewal, and when, oldest first.
    """

    interval: Interval
    epoch: int
    sample_due_ms: int
    rewinds_count: int = 0
    kept_ms: int = 0
    waiting: list[tuple[bytes, int]] = []


_STATES = (Reset, LayoutFence, LayoutImport, LayoutFinal)
_OWNERS = (Heartbeat, ReleasingPartition, ClaimingMessages, HandoffOffer)


def note_stray(interval: Interval, transition: Transition) -> None:
    """Count an accepted record that the owner cannot have sent."""
    record, epoch = transition.record, transition.epoch
    # The transition of a batch does not have the index of the heartbeat.
    if isinstance(record, _OWNERS):
        epoch = record.epoch
    who = getattr(record, "incarnation", None)
    is_owner = epoch == interval.token.offset and who == interval.incarnation
    if not is_owner or interval.ending != OPEN:
        interval.stray_count += 1


def move(track: Track, position: int | None, *, rewinds: bool) -> None:
    """Record the position after an accepted record."""
    interval = track.interval
    before = interval.position
    if before == position:
        return
    if before is not None and (position is None or position < before):
        if rewinds:
            interval.rewinds_count += 1
            track.rewinds_count += 1
        else:
            interval.steps_back_count += 1
    interval.position = position
    if interval.first_position is None:
        interval.first_position = position


def note_waiting(
    track: Track, incarnation: bytes, *, reason: str | None, at: Moment
) -> None:
    """Record that a process was refused, if it waits for the key from now on."""
    waiting = [each for each in track.waiting if each[0] != incarnation]
    if reason in _WAITING:
        waiting.append((incarnation, at.log_ms))
    track.waiting = waiting[-CONTENDERS_MAX:]


def release(interval: Interval, by: str, *, reason: str | None, at: Moment) -> Interval:
    """End a claim whose key has no owner afterwards; return the claim."""
    interval.ending, interval.ended_by = RELEASED, by
    interval.reason, interval.end = reason, at
    return interval


def handoff(before: Interval, after: Interval, *, track: Track) -> Handoff:
    """Return how a key went from one claim to the next."""
    assert before.end is not None
    h_ms, at = before.heartbeat_interval_ms, after.start
    is_released = before.ending == RELEASED
    since_ms = before.end.log_ms if is_released else before.renewed_ms
    # PROTOCOL 4.2: stale is more than two heartbeat intervals.
    free_ms = track.kept_ms if is_released else since_ms + 2 * h_ms + 1
    refused_ms = dict(track.waiting).get(after.incarnation)
    late_ms = None
    if refused_ms is not None:
        late_ms = max(0, at.log_ms - max(free_ms, refused_ms))
    return Handoff(
        key=after.key,
        from_client_id=before.client_id,
        to_client_id=after.client_id,
        token=after.token,
        ending=before.ending,
        reason=before.reason if is_released else None,
        why=after.why,
        at=at,
        gap_ms=at.log_ms - since_ms,
        heartbeat_interval_ms=h_ms,
        late_ms=late_ms,
        position=after.position,
    )


SAMPLE_MS_DEFAULT = 60_000
AGES_PER_H = 20
AGES_MAX = 4 * AGES_PER_H
GONE_KEYS_MIN = 64
_BEATS = (Heartbeat, BatchHeartbeat)
_ADMINS = (ForgettingPartition, StagePosition, DecidePosition, ResolvePosition)


class Historian(msgspec.Struct, gc=False, kw_only=True):
    """Observes the fold of one coordinating partition.

    It starts at the first entry, or at a checkpoint (``begin``). An audit stores it
    between two runs.

    Attributes:
        sample_ms: Log time between two samples of a key's position.
        tracks: The track of every key of the state.
        pauses: The pauses of the state.
        ages: Ages of claims at their renewals, by group: the number of renewals in each
            twentieth of the heartbeat interval, the last number for all above.
        entries_count: Number of entries observed.
        first_offset: Offset of the first entry, or next offset of the start state.
        resets_count: Number of events after which offsets may be granted again: Resets,
            forgotten keys and committed set positions.
    """

    sample_ms: int = SAMPLE_MS_DEFAULT
    tracks: dict[Key, Track] = {}
    pauses: Pauses = msgspec.field(default_factory=Pauses)
    ages: dict[str, list[int]] = {}
    entries_count: int = 0
    first_offset: int | None = None
    resets_count: int = 0

    def begin(self, world: WorldState) -> None:
        """Start from a state with an unknown history, before the first ``take``.

        Its claims and pauses start here, with effect ``restored``.
        """
        at = Moment(world.next_offset - 1, world.now_ms, world.append_time_ms)
        self.first_offset = world.next_offset
        for key, known in world.keys.items():
            token = world.token(key)
            if known.owner is None or token is None:
                continue
            interval = Interval(
                key=key,
                client_id=known.owner.client_id,
                incarnation=known.owner.incarnation,
                token=token,
                effect=RESTORED,
                why=None,
                start=at,
                heartbeat_interval_ms=known.heartbeat_interval_ms,
                renewed_offset=at.offset,
                renewed_ms=known.renewed_ms,
                topic_id=known.topic_id,
                start_position=known.position,
                first_position=known.position,
                position=known.position,
            )
            self.tracks[key] = Track(
                interval=interval, epoch=known.epoch, sample_due_ms=at.log_ms
            )
        self.pauses.restore(world, at=at)

    def take(
        self, world: WorldState, entry: LogEntry, *, transitions: Transitions
    ) -> list[Row]:
        """Return the rows that an entry completes.

        Args:
            world: The state after the entry.
            entry: The entry.
            transitions: Its transitions.
        """
        rows: list[Row] = []
        self._count(entry.offset)
        at = Moment(entry.offset, world.now_ms, entry.timestamp_ms)
        is_beat = bool(transitions) and isinstance(transitions[0].record, _BEATS)
        if self.pauses or not is_beat:
            rows += self._pauses_at(world, at, transitions=transitions)
        if is_beat:
            rows += self._beats(world, transitions, at=at)
        else:
            for transition in transitions:
                rows += self._other(world, transition, at=at)
        self._drop_gone(world)
        return rows

    def take_run(self, world: WorldState, run: Sequence[LogEntry]) -> Iterator[Row]:
        """Fold entries into a world, up to a halt; yield the rows that they complete.

        The rows equal those of ``apply`` and ``take``, but ordinary heartbeats are
        folded without transitions.
        """
        at, is_beat = 0, True
        while at < len(run) and world.halted is None:
            # Heartbeats come in runs. A pause may begin and end with any entry.
            if is_beat and not self.pauses:
                beats: list[Beat] = []
                at = fold_beats(world, run, start=at, beats=beats)
                if beats:
                    yield from self._run_of_beats(world, beats)
                if at == len(run):
                    return
            entry = run[at]
            transitions = apply(world, entry)
            yield from self.take(world, entry, transitions=transitions)
            is_beat = bool(transitions) and isinstance(transitions[0].record, Heartbeat)
            at += 1

    def _count(self, offset: int, entries_count: int = 1) -> None:
        self.entries_count += entries_count
        if self.first_offset is None:
            self.first_offset = offset

    def _drop_gone(self, world: WorldState) -> None:
        if len(self.tracks) > GONE_KEYS_MIN + len(world.keys) * 9 // 8:
            # The fold drops keys without a transition, so this cleans up in bulk.
            kept = self.tracks.items()
            self.tracks = {key: each for key, each in kept if key in world.keys}

    def open_rows(self) -> Iterator[Row]:
        """Yield open claims, sorted by key, then active pauses, sorted by group."""
        for _, track in sorted(self.tracks.items()):
            if track.interval.ending == OPEN:
                yield track.interval
        for _, pause in sorted(self.pauses.lasting.items()):
            yield pause

    def _beats(
        self, world: WorldState, transitions: Transitions, *, at: Moment
    ) -> list[Row]:
        record = transitions[0].record
        assert isinstance(record, _BEATS)
        sender, named, rewinds = record.incarnation, None, False
        if isinstance(record, Heartbeat):
            named, rewinds = record.epoch, record.rewind
        rows: list[Row] = []
        for transition in transitions:
            key, epoch = transition.key, transition.epoch
            if transition.effect is None or key is None:
                rows.append(_rejected(world, transition, at=at))
                continue
            track, known = self.tracks[key], world.keys[key]
            interval = track.interval
            if (
                epoch != track.epoch
                or sender != interval.incarnation
                or interval.end is not None
                or (named is not None and named != epoch)
            ):
                interval.stray_count += 1
            if known.position != interval.position:
                move(track, known.position, rewinds=rewinds)
            if transition.effect == "renewed":
                self._renew(track, at.log_ms)
                # PROTOCOL 4.5: a heartbeat never shortens the lease.
                if known.renewed_ms == at.log_ms:
                    interval.renewed_offset, interval.renewed_ms = at.offset, at.log_ms
                    interval.heartbeat_interval_ms = known.heartbeat_interval_ms
            if at.log_ms >= track.sample_due_ms and known.position is not None:
                rows.append(self._sample(world, track, at=at))
        return rows

    def _run_of_beats(self, world: WorldState, beats: list[Beat]) -> list[Row]:
        """Observe ordinary heartbeats, which change no owner, interval or epoch.

        This is the busiest loop of an audit.
        """
        self._count(beats[0][0], len(beats))
        rows: list[Row] = []
        tracks, keys, epochs = self.tracks, world.keys, world.epochs
        for offset, append_ms, epoch, now_ms, position in beats:
            key = epochs[epoch]
            track, known = tracks[key], keys[key]
            interval, owner = track.interval, known.owner
            if (
                epoch != track.epoch
                or owner is None
                or owner.incarnation != interval.incarnation
                or interval.end is not None
            ):
                interval.stray_count += 1
            if position != interval.position:
                move(track, position, rewinds=False)
            self._renew(track, now_ms)
            interval.renewed_offset, interval.renewed_ms = offset, now_ms
            interval.heartbeat_interval_ms = known.heartbeat_interval_ms
            if now_ms >= track.sample_due_ms and position is not None:
                at = Moment(offset, now_ms, append_ms)
                rows.append(self._sample(world, track, at=at))
        self._drop_gone(world)
        return rows

    def _renew(self, track: Track, now_ms: int) -> None:
        """Record the age of a claim at its renewal."""
        interval = track.interval
        age_ms = now_ms - interval.renewed_ms
        ages = self.ages.get(interval.key.group_id)
        if ages is None:
            ages = self.ages[interval.key.group_id] = [0] * (AGES_MAX + 1)
        age = age_ms * AGES_PER_H // interval.heartbeat_interval_ms
        ages[min(AGES_MAX, age)] += 1
        interval.beats_count += 1
        if age_ms > interval.gap_ms_max:  # noqa: PLR1730 - a call less
            interval.gap_ms_max = age_ms
        if track.waiting:
            track.waiting = []

    def _other(
        self, world: WorldState, transition: Transition, *, at: Moment
    ) -> Iterator[Row]:
        record, key = transition.record, transition.key
        if isinstance(record, ClaimingPartition):
            yield self._attempt(world, transition, at=at)
        if transition.outcome == SKIPPED:
            return
        if transition.outcome != ACCEPTED:
            is_refused = transition.outcome == REFUSED
            if is_refused and isinstance(record, ClaimingMessages):
                yield self._grant(world, transition, at=at)
            yield _rejected(world, transition, at=at)
        elif isinstance(record, _ADMINS):
            yield from self._administered(transition, at=at)
        elif isinstance(record, _STATES):
            yield from self._of_state(world, transition, at=at)
        elif isinstance(record, ClaimingPartition):
            yield from self._won(world, transition, at=at)
        elif key is not None and not isinstance(record, HandoffReady):
            yield from self._of_owner(world, transition, at=at)

    def _of_state(
        self, world: WorldState, transition: Transition, *, at: Moment
    ) -> Iterator[Row]:
        """Apply a record that replaces, drops or imports keys."""
        record, key = transition.record, transition.key
        if isinstance(record, LayoutFence | LayoutFinal):
            yield from self._moved_away(world, record, at=at)
        elif isinstance(record, Reset) and transition.effect == "reset":
            yield from self._reset(world, record, at=at)
        elif key is not None and isinstance(record, LayoutImport):
            self.tracks.pop(key, None)  # from an earlier use of this partition
            yield self._imported(world, record, key=key, at=at)

    def _imported(
        self, world: WorldState, record: LayoutImport, *, key: Key, at: Moment
    ) -> ImportRow:
        known, config = world.keys[key], world.config
        assert config is not None  # a change is open
        return ImportRow(
            key=key,
            at=at,
            source=record.source,
            op_id=record.op_id,
            topic_id=known.topic_id,
            era=config.era,
            position=known.position,
            granted=known.granted,
            resets_count=self.resets_count,
        )

    def _moved_away(
        self, world: WorldState, record: LayoutFence | LayoutFinal, *, at: Moment
    ) -> Iterator[Row]:
        """End claims of keys that a change of the partition count dropped (10)."""
        for key in sorted(self.tracks.keys() - world.keys.keys()):
            interval = self.tracks.pop(key).interval
            if interval.ending == OPEN:
                yield release(interval, record.client_id, reason=MOVED, at=at)

    def _of_owner(
        self, world: WorldState, transition: Transition, *, at: Moment
    ) -> Iterator[Row]:
        key, record = transition.key, transition.record
        assert key is not None
        track = self.tracks[key]
        note_stray(track.interval, transition)
        move(track, world.keys[key].position, rewinds=False)
        if isinstance(record, ReleasingPartition):
            yield self._released(world, track, record=record, at=at)
        elif isinstance(record, ClaimingMessages):
            yield self._grant(world, transition, at=at)
            if at.log_ms >= track.sample_due_ms:
                yield self._sample(world, track, at=at)

    def _attempt(
        self, world: WorldState, transition: Transition, *, at: Moment
    ) -> Attempt:
        record = transition.record
        assert isinstance(record, ClaimingPartition)
        key = Key(record.group_id, record.topic, record.partition)
        known = world.keys.get(key)
        owner = None if known is None else known.owner
        is_won = transition.outcome == ACCEPTED
        track = self.tracks.get(key)
        if track is not None and not is_won:
            note_waiting(track, record.incarnation, reason=transition.reason, at=at)
        return Attempt(
            key=key,
            client_id=record.client_id,
            incarnation=record.incarnation,
            at=at,
            outcome=WON if is_won else transition.outcome,
            reason=transition.reason,
            holder=None if owner is None else owner.client_id,
            remaining_ms=(transition.detail or {}).get("remaining_ms"),
            why=why_of(record),
        )

    def _won(
        self, world: WorldState, transition: Transition, *, at: Moment
    ) -> Iterator[Row]:
        key, record = transition.key, transition.record
        assert key is not None
        assert isinstance(record, ClaimingPartition)
        known, token = world.keys[key], world.token(key)
        assert token is not None
        interval = Interval(
            key=key,
            client_id=record.client_id,
            incarnation=record.incarnation,
            token=token,
            effect=transition.effect or "",
            why=why_of(record),
            start=at,
            heartbeat_interval_ms=known.heartbeat_interval_ms,
            renewed_offset=at.offset,
            renewed_ms=at.log_ms,
            topic_id=known.topic_id,
            start_position=known.position,
            first_position=known.position,
            position=known.position,
            resets_count=self.resets_count,
        )
        track = self.tracks.get(key)
        if track is None:
            self.tracks[key] = Track(
                interval=interval, epoch=at.offset, sample_due_ms=at.log_ms
            )
            return
        before, track.interval, track.epoch = track.interval, interval, at.offset
        if before.ending == OPEN:
            before.ending = TAKEN_OVER if record.resume is None else RESUMED
            before.ended_by, before.reason = record.client_id, interval.why
            before.end = at
            yield before
        yield handoff(before, interval, track=track)
        track.waiting = []

    def _released(
        self,
        world: WorldState,
        track: Track,
        *,
        record: ReleasingPartition,
        at: Moment,
    ) -> Interval:
        interval = track.interval
        kept = world.keys[interval.key].handoff
        track.kept_ms = at.log_ms if kept is None else kept[1]
        track.waiting = []
        return release(interval, record.client_id, reason=record.reason, at=at)

    def _administered(self, transition: Transition, *, at: Moment) -> Iterator[Row]:
        """Apply an admin's record about keys, which may end the claims of owners."""
        record, key = transition.record, transition.key
        if isinstance(record, ResolvePosition):
            # As after a Reset, offsets may be granted again after a commit.
            self.resets_count += record.commit and key is not None
        if key is None or isinstance(record, ResolvePosition):
            return
        assert isinstance(record, _ADMINS)
        track, reason = self.tracks.get(key), POSITION_SET
        if isinstance(record, ForgettingPartition):
            # Like a Reset, it discards the key's position and grants.
            self.resets_count += 1
            self.tracks.pop(key, None)
            reason = FORGOTTEN
        if track is not None and track.interval.ending == OPEN:
            track.kept_ms = at.log_ms
            yield release(track.interval, record.client_id, reason=reason, at=at)

    def _sample(self, world: WorldState, track: Track, *, at: Moment) -> PositionRow:
        track.sample_due_ms = at.log_ms + self.sample_ms
        interval = track.interval
        known = world.keys[interval.key]
        return PositionRow(
            key=interval.key,
            client_id=interval.client_id,
            epoch=known.epoch,
            topic_id=known.topic_id,
            at=at,
            position=interval.position,
            granted=known.granted,
            rewinds_count=track.rewinds_count,
        )

    def _grant(
        self, world: WorldState, transition: Transition, *, at: Moment
    ) -> GrantRow:
        key, record = transition.key, transition.record
        assert key is not None
        assert isinstance(record, ClaimingMessages)
        detail = transition.detail or {}
        return GrantRow(
            key=key,
            client_id=record.client_id,
            grantee=record.grantee,
            epoch=record.epoch,
            topic_id=world.keys[key].topic_id,
            at=at,
            outcome=transition.reason or GRANTED,
            first=detail.get("first", record.first),
            last=detail.get("last", record.proposed_last_offset),
            resets_count=self.resets_count,
        )

    def _pauses_at(
        self, world: WorldState, at: Moment, *, transitions: Transitions
    ) -> list[PauseRow]:
        """Return the pauses that an entry ended."""
        accepted = [each for each in transitions if each.outcome == ACCEPTED]
        record = accepted[0].record if accepted else None
        rows = self.pauses.take(world, at=at, record=record)
        for (group_id, _), row in self.pauses.lasting.items():
            if row.start == at:
                self._forget_waiting(group_id)
        is_scheduled = bool(accepted) and accepted[0].effect == "scheduled"
        if isinstance(record, ReleaseGroup | PauseGroup) and not is_scheduled:
            self._forget_waiting(record.group_id)
        return rows

    def _forget_waiting(self, group_id: str) -> None:
        # During a pause no process can claim a free key.
        for key, track in self.tracks.items():
            if key.group_id == group_id:
                track.waiting = []

    def _reset(self, world: WorldState, record: Reset, *, at: Moment) -> Iterator[Row]:
        """End all open claims: the carried state has no owners (PROTOCOL 7.6)."""
        self.resets_count += 1
        quiet_ms = world.quiet_until_ms
        for _, track in sorted(self.tracks.items()):
            # Log time is now that of the carried state, which may be much lower.
            track.sample_due_ms = min(track.sample_due_ms, at.log_ms)
            if track.interval.ending == OPEN:
                track.kept_ms = at.log_ms if quiet_ms is None else quiet_ms
                track.waiting = []
                yield release(track.interval, record.client_id, reason=RESET, at=at)


def _rejected(world: WorldState, transition: Transition, *, at: Moment) -> Rejected:
    record = transition.record
    detail = None
    if transition.outcome == UNDECODABLE:
        detail = world.soft.undecodable[-1].reason
    return Rejected(
        at=at,
        outcome=transition.outcome,
        reason=transition.reason or "",
        detail=detail,
        record_type=None if record is None else type(record).__name__,
        client_id=getattr(record, "client_id", None),
        group_id=getattr(record, "group_id", None),
        key=transition.key,
    )
