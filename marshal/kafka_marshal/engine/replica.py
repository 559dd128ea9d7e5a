"""Holds the world state of one coordinating partition, with local timing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kafka_marshal.errors import LogUnreadable
from kafka_marshal.protocol.checkpoints import Comparison, Watch
from kafka_marshal.protocol.fold_beats import fold_beats
from kafka_marshal.protocol.layout import Probes
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingMessages,
    Heartbeat,
    Member,
)
from kafka_marshal.protocol.state import ACCEPTED, KeyState, Transition, WorldState
from kafka_marshal.protocol.types import Key, LogEntry, Token

from .pause_notes import PauseName, PauseNote, PauseNotes

_PAUSING = frozenset({"paused", "scheduled", "directed"})
# Frequent records that change no owner, and neither locks nor reserves a key.
_ROUTINE = (Heartbeat, BatchHeartbeat, ClaimingMessages, Member)
CHANGES_KEPT_MAX = 1_000


class Changes:
    """The keys that changed, in order. Each reader remembers how far it has read.

    Used under the engine's lock. A reader that falls too far behind, and each reader
    after ``note_all``, has to assume that every key has changed.

    Attributes:
        end: Number of changes so far; a reader that has read all continues there.
    """

    __slots__ = ("_keys", "end")

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self.end = 0

    def note(self, key: Key) -> None:
        """Note that a key has changed."""
        self._keys.append(key)
        self.end += 1
        if len(self._keys) > 2 * CHANGES_KEPT_MAX:
            del self._keys[:CHANGES_KEPT_MAX]

    def note_all(self) -> None:
        """Note that every key may have changed."""
        self._keys.clear()
        self.end += 1

    def since(self, end: int) -> Sequence[Key] | None:
        """Return the keys that changed after an earlier ``end``; None = every key."""
        count = self.end - end
        if not count:
            return ()
        return self._keys[-count:] if count <= len(self._keys) else None


class Glance(NamedTuple):
    """The state of a key as this process knows it.

    Attributes:
        holder: client_id of the owner in the log, None without an owner.
        freshness: ``fresh``, ``unknown`` or ``stale``; None without an owner.
        age_ms: Time since the owner's last renewal, None if unknown.
        position: Next offset that is neither processed nor granted, None if unknown.
        noted: Offset of the record that last changed its owner, None if unknown.
        follows: Epoch before that change, None if unknown.
    """

    holder: str | None
    freshness: str | None = None
    age_ms: int | None = None
    position: int | None = None
    noted: int | None = None
    follows: int | None = None


class LastClaim(NamedTuple):
    """The newest claim of a key in the log.

    Attributes:
        owner: client_id that holds it, None if it was released.
        epoch: Offset of the claim in the log.
        may_be_ours: Whether it belongs to the caller's session, or to the sidecar but
            to no other client there: it may be won and not assigned yet.
        token: Its fencing token, None if unknown. Epochs of a key that moved to another
            coordinating partition cannot be compared.
    """

    owner: str | None
    epoch: int
    may_be_ours: bool = False
    token: Token | None = None

    def is_of(self, token: Token) -> bool:
        """Return whether it is the claim of a token."""
        return self.epoch == token.offset and self.token in {None, token}


class Replica:
    """World state of one coordinating partition, and the local time of its last entry.

    Attributes:
        world: The fold so far.
        began_at: Next offset of the state that the fold started from.
        folded_at_ms: Local time at which the last entry was folded.
        checkpoints: Checkpoints seen in the log.
        compared: The last comparison of a checkpoint with our own state.
        notes: Notes about pauses, from the entries folded here.
        changes: Keys named by records other than renewals, positions and grants.
    """

    __slots__ = (
        "_is_unreported",
        "_probes",
        "began_at",
        "changes",
        "checkpoints",
        "compared",
        "folded_at_ms",
        "notes",
        "world",
    )

    def __init__(self, partition: int, *, now_ms: int) -> None:
        self.notes = PauseNotes()
        self.changes = Changes()
        self.begin(WorldState(partition), now_ms)

    def begin(
        self,
        world: WorldState,
        now_ms: int,
        *,
        notes: Mapping[PauseName, PauseNote] | None = None,
        is_known: bool = True,
    ) -> None:
        """Replace the state; own notes on pauses stay, ``notes`` are added to them.

        Args:
            world: The state.
            now_ms: Local time.
            notes: Notes about its pauses.
            is_known: Whether it is the state of the whole log up to there; False if the
                start of the log is missing (PROTOCOL 7.3).
        """
        self.world = world
        self._probes = None if is_known else Probes(world.partition)
        self.changes.note_all()
        self.notes.begin(world, notes)
        self.began_at = world.next_offset
        self.folded_at_ms = now_ms
        self.checkpoints = Watch()
        self.compared: Comparison | None = None
        self._is_unreported = False

    @property
    def is_known(self) -> bool:
        """Whether the state is that of the whole log (PROTOCOL 7.3)."""
        return self._probes is None

    def fold(self, entry: LogEntry, now_ms: int) -> tuple[Transition, ...]:
        """Fold one entry received at local time ``now_ms``."""
        transitions = apply(self.world, entry)
        self.folded_at_ms = now_ms
        probes = self._probes
        if probes is not None and any(map(probes.take, transitions)):
            self._probes = None
        if transitions and transitions[0].effect in _PAUSING:
            assert transitions[0].record is not None
            self.notes.take(transitions[0].record, entry.timestamp_ms)
        self._note_changes(transitions)
        compared = self.checkpoints.on_entry(self.world, transitions)
        if compared is not None:
            self.compared = compared
            self._is_unreported = True
        return transitions

    def _note_changes(self, transitions: Iterable[Transition]) -> None:
        for transition in transitions:
            if isinstance(transition.record, _ROUTINE):
                return
            if transition.outcome != ACCEPTED:
                continue
            if transition.key is None:
                self.changes.note_all()
            else:
                self.changes.note(transition.key)

    def fold_run(
        self, entries: Sequence[LogEntry], now_ms: int
    ) -> Iterator[tuple[LogEntry, tuple[Transition, ...]]]:
        """Fold entries in order, for replays up to an end.

        Yields:
            Each entry with its transitions, right after it was folded. Ordinary
            heartbeats are folded, and not yielded.
        """
        start = 0
        while True:
            stop = fold_beats(self.world, entries, start=start)
            if stop > start:
                self.checkpoints.pass_beats(stop - start)
                self.folded_at_ms = now_ms
            if stop == len(entries):
                return
            yield entries[stop], self.fold(entries[stop], now_ms)
            start = stop + 1

    def take_compared(self) -> Comparison | None:
        """Return the comparison of the last checkpoint, once."""
        compared = self.compared if self._is_unreported else None
        self._is_unreported = False
        return compared

    @property
    def heartbeat_interval_ms(self) -> int:
        """The heartbeat interval as of the last folded entry; 0 without a Config."""
        config = self.world.config
        return 0 if config is None else config.heartbeat_interval_ms

    def renewed_by_ms(self, key: Key | None) -> int | None:
        """Return the interval by which the last folded record renewed a key.

        None if the lease would have ended earlier, so that the key kept its lease and
        interval (PROTOCOL 4.5).
        """
        known = None if key is None else self.world.keys.get(key)
        interval_ms = self.heartbeat_interval_ms
        is_kept = known is None or known.heartbeat_interval_ms != interval_ms
        return None if is_kept else interval_ms

    def glance(self, key: Key, now_ms: int) -> Glance | None:
        """Return the state of a key at a local time, None for an unknown key."""
        known = self.world.keys.get(key)
        if known is None:
            return None
        log_ms = self.log_ms(now_ms)
        age_ms, position = known.age_ms(log_ms), known.next_unclaimed()
        note = self.world.soft.notes.get(key)
        owner = known.owner
        return Glance(
            holder=None if owner is None else owner.client_id,
            freshness=None if owner is None else known.freshness(log_ms).value,
            age_ms=age_ms,
            position=position,
            noted=None if note is None else note.offset,
            follows=None if note is None else note.follows,
        )

    def elapsed_ms(self, now_ms: int) -> int:
        """Return the local time since the last entry (PROTOCOL 4.11)."""
        return max(0, now_ms - self.folded_at_ms)

    def idle_ms(self, now_ms: int, *, wall_ms: int) -> int:
        """Return the time since the last entry of a log that was just read, for people.

        A new reader has not measured how long nothing was appended; this estimate uses
        the wall clock, so nothing may be decided by it.
        """
        return max(self.elapsed_ms(now_ms), wall_ms - self.world.append_time_ms)

    def log_ms(self, now_ms: int) -> int:
        """Return an estimate of log time at a local time (PROTOCOL 4.11)."""
        return self.world.now_ms + self.elapsed_ms(now_ms)

    def held(self, now_ms: int) -> Iterator[tuple[Key, KeyState]]:
        """Yield the keys with an owner that is not stale, by estimate."""
        log_ms = self.log_ms(now_ms)
        for key, known in self.world.keys.items():
            if known.owner is None:
                continue
            if known.freshness(log_ms) is not Freshness.STALE:
                yield key, known


def check_halt(replica: Replica) -> None:
    """Check that the log has no Config that this release cannot follow.

    Raises:
        LogUnreadable: The partition halted (PROTOCOL 3.3).
    """
    halt = replica.world.halted
    if halt is not None:
        raise LogUnreadable(
            f"from offset {halt.offset} on, coordinating partition "
            f"{replica.world.partition} needs feature level {halt.feature_level}, "
            "which this release does not know; upgrade kafka-marshal"
        )
