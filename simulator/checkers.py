"""The invariants of PROTOCOL 11, as checks that run beside anything.

``LogWatcher`` reads the coordination log like any other reader and judges what
it says; ``HandOuts`` judges what applications got; ``check_leases`` judges the
clients' own beliefs. Each raises ``Violation``, which names the invariant.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kafka_marshal.engine import Engine
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.losses import Loss, LossBook
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import Heartbeat
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.transition import ACCEPTED, Transition, Transitions
from kafka_marshal.protocol.types import Key, Owner, Token, TopicPartition
from kafka_marshal.testing.fakelog import FakeKafka
from kafka_marshal.testing.fakestore import Stored
from kafka_marshal.testing.node import COORDINATION_TOPIC, Node


class Violation(AssertionError):
    """An invariant of PROTOCOL 11 does not hold.

    Attributes:
        invariant: Its name, such as ``S4``.
    """

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class _Before(NamedTuple):
    """One key before a record was folded."""

    owner: Owner | None
    epoch: int
    position: int | None
    granted: int | None
    token: Token | None
    topic_id: bytes | None
    renewed_ms: int = 0


_NOBODY = _Before(None, -1, None, None, None, None)


def _before(world: WorldState, key: Key, *, known: KeyState) -> _Before:
    """Return what is to be remembered of a key until the next record about it."""
    return _Before(
        known.owner,
        known.epoch,
        known.position,
        known.granted,
        world.token(key),
        known.topic_id,
        known.renewed_ms,
    )


Place = tuple[Key, bytes | None]
"""What offsets belong to: a key, and the id of its topic. A topic that is created again
under its name has another id."""

PositionCheck = Callable[[Key, int | None, int], None]
"""Told of every position that moved: key, old position, new position."""

EntryCheck = Callable[[int, Stored, Transitions], None]
"""Told of every record: coordinating partition, record, what it did."""


class Folded(NamedTuple):
    """One record that was folded and checked.

    Attributes:
        partition: Coordinating partition.
        stored: The record as it lies there.
        transition: What it did to one key, or to none.
        owner: Who owned that key before.
        age_ms: How long before that owner had renewed, at this record.
        moved: Whether it moved the position.
    """

    partition: int
    stored: Stored
    transition: Transition
    owner: Owner | None
    age_ms: int
    moved: bool


class LogWatcher:
    """Folds every coordinating partition and checks S1, S2, S3, S7 and S10.

    Attributes:
        worlds: The fold so far, one per coordinating partition.
        starts: Position of a key when it was won under a token; keys of two T may
            have equal tokens.
        topic_ids: Id of the topic that a claim is of, by key and token.
        claims: Number of accepted claims and resumes so far, but for checkpoints.
        losses: What ended claims were granted and did not say they were done with.
        taken_back: Offsets whose grants a Reset took back: they may be granted, and
            handed out, again.
        is_strict: Whether what it finds is raised; without, it only goes on.
        on_entry: Told of each record, once it is folded and checked.
    """

    def __init__(
        self,
        kafka: FakeKafka,
        partitions: int,
        *,
        on_position: PositionCheck | None = None,
        note: Callable[[str], None] | None = None,
        on_fold: Callable[[Folded], None] | None = None,
    ) -> None:
        """Start at the log's beginning.

        Args:
            kafka: The cluster.
            partitions: Number of coordinating partitions.
            on_position: Called for every position that moved.
            note: Called with one line for every transition.
            on_fold: Called with every transition.
        """
        self.worlds = [WorldState(number) for number in range(partitions)]
        self.starts: dict[tuple[Key, Token], int | None] = {}
        self.topic_ids: dict[tuple[Key, Token], bytes | None] = {}
        self.claims = 0
        self.losses: list[Loss] = []
        self.is_strict = True
        self.on_entry: EntryCheck | None = None
        self.taken_back: dict[Place, set[int]] = {}
        self._books = [LossBook(number) for number in range(partitions)]
        self._kafka = kafka
        places = [TopicPartition(COORDINATION_TOPIC, t) for t in range(partitions)]
        self._logs = [kafka.log(place) for place in places]
        # Not where the worlds are: one that has halted stays where it is.
        self._next = [0] * partitions
        self._on_position = on_position
        self._note = note
        self._on_fold = on_fold
        self._granted: dict[Place, int] = {}
        self._tokens: dict[Key, Token] = {}
        # What each key was before the record that is being folded.
        self._before: list[dict[Key, _Before]] = [{} for _ in range(partitions)]
        self._digests: list[dict[int, str]] = [
            {0: digest(world)} for world in self.worlds
        ]

    def catch_up(self) -> bool:
        """Fold and check what was committed since; return whether it was anything."""
        self._kafka.settle()
        now_ms = self._kafka.clock.now_ms()
        has_folded = False
        for number, (world, log) in enumerate(
            zip(self.worlds, self._logs, strict=True)
        ):
            if self._next[number] >= log.end:
                continue
            for stored in log.read(self._next[number], log.end):
                if stored.landed_ms > now_ms:
                    break
                has_folded = True
                self._next[number] = stored.offset + 1
                self._fold(number, world, stored)
        return has_folded

    def _fold(self, number: int, world: WorldState, stored: Stored) -> None:
        entry = stored.entry()
        transitions = apply(world, entry)
        before = self._before[number]
        for transition in transitions:
            key = transition.key
            was = None if key is None else before.get(key)
            try:
                self._check(world, transition, was)
            except Violation:
                if self.is_strict:
                    raise
            known = None if key is None else world.keys.get(key)
            moved = known is not None and known.position != (was or _NOBODY).position
            if self._on_fold is not None:
                owner = None if was is None else was.owner
                age_ms = 0 if was is None else world.now_ms - was.renewed_ms
                self._on_fold(Folded(number, stored, transition, owner, age_ms, moved))
            if key is not None and known is not None:
                before[key] = _before(world, key, known=known)
        if transitions and transitions[0].effect == "reset":
            self._take_reset(number, world)
        self.losses += self._books[number].take(entry, transitions)
        if world.halted is None:
            self._digests[number][world.next_offset] = digest(world)
        if self.on_entry is not None:
            self.on_entry(number, stored, transitions)

    def _take_reset(self, number: int, world: WorldState) -> None:
        """Take that a T's state was replaced: an admin meant it (PROTOCOL 7.6)."""
        keys = self._before[number]
        for place, granted in self._granted.items():
            key, topic_id = place
            if key not in keys:
                continue
            known, head = world.keys.get(key), 0
            if known is not None and known.topic_id == topic_id:
                head = known.next_unclaimed() or 0
            self.taken_back.setdefault(place, set()).update(range(head, granted))
            self._granted[place] = head
        self._before[number] = {
            key: _before(world, key, known=known) for key, known in world.keys.items()
        }

    def refold(self, partition: int) -> None:
        """Forget a partition that was truncated, and read it from its start.

        Positions, grants and owners go back with it; tokens do not (PROTOCOL
        4.10).
        """
        gone = self._before[partition]
        self._granted = {p: to for p, to in self._granted.items() if p[0] not in gone}
        self._before[partition] = {}
        self._books[partition] = LossBook(partition)
        self._next[partition] = 0
        world = self.worlds[partition] = WorldState(partition)
        self._digests[partition] = {0: digest(world)}
        note, self._note = self._note, None
        on_fold, self._on_fold = self._on_fold, None
        tokens, self._tokens = self._tokens, {}
        self.catch_up()
        self._note, self._on_fold = note, on_fold
        for key, token in tokens.items():
            self._tokens[key] = max(token, self._tokens.get(key, token))

    def topic_id(self, key: Key) -> bytes | None:
        """Return the id of the topic that the log has a key of now, None for none."""
        found = (world.keys[key] for world in self.worlds if key in world.keys)
        return next((known.topic_id for known in found), None)

    def unconfirmed(self) -> list[Loss]:
        """Return what is lost, or at risk now, by what the log says."""
        found = list(self.losses)
        for book, world in zip(self._books, self.worlds, strict=True):
            found += book.open_ones(world)
        return found

    def check_reader(
        self, engine: Engine, checked: dict[int, int], *, may_lag: bool = False
    ) -> bool:
        """S2: a reader that folded the same prefix has the same digest.

        Args:
            engine: The reader.
            checked: Up to where it was checked before, by partition; updated.
            may_lag: Whether it may yet have to notice that the log went back.

        Returns:
            Whether it has folded anything since.
        """
        has_folded = False
        for number, replica in engine.context.replicas.items():
            at = replica.world.next_offset
            if checked.get(number) == at:
                continue
            checked[number] = at
            has_folded = True
            is_same = replica.world.leader_epoch == self.worlds[number].leader_epoch
            if may_lag and not (is_same and at in self._digests[number]):
                continue
            if digest(replica.world) != self._digests[number].get(at):
                raise Violation("S2", f"digests differ at {number}/{at}")
        return has_folded

    def _check(
        self, world: WorldState, transition: Transition, was: _Before | None
    ) -> None:
        if self._note is not None:
            what = transition.effect or transition.reason
            kind = type(transition.record).__name__
            who = getattr(transition.record, "client_id", "-")
            where = f"{world.partition}/{transition.offset}"
            self._note(f"  log {where} {kind} of {who}: {what} {transition.detail}")
        key = transition.key
        if key is None or key not in world.keys:
            return
        known = world.keys[key]
        if transition.outcome != ACCEPTED:
            now = (known.owner, known.epoch, known.position, known.granted)
            if was is None or now != was[:4]:
                raise Violation("S1", f"{key} changed by a record without effect")
            return
        if transition.effect in {"claimed", "resumed"}:
            self._check_claim(world, key, was)
        elif was is not None and known.owner not in {was.owner, None}:
            raise Violation("S1", f"{key} got an owner by {transition.effect}")
        elif was is None or known.epoch != was.epoch:
            raise Violation("S1", f"{key} got an epoch by {transition.effect}")
        else:
            self._check_sender(world, transition, was)
        if transition.effect == "granted":
            self._check_grant((key, known.topic_id), transition)
        self._check_position(key, transition, was, known.position)

    def _check_claim(self, world: WorldState, key: Key, was: _Before | None) -> None:
        self.claims += key.group_id != CHECKPOINT_GROUP
        known, token = world.keys[key], world.token(key)
        if was is not None and known.epoch <= was.epoch:
            raise Violation("S1", f"{key}: epoch {known.epoch} after {was.epoch}")
        earlier_id = None if was is None else was.topic_id
        is_changed = earlier_id is not None and known.topic_id != earlier_id
        if is_changed and known.next_unclaimed() is not None:
            told = f"{known.next_unclaimed()} of an earlier topic"
            raise Violation("4.3", f"{key}: the position is still {told}")
        latest = self._tokens.get(key)
        if token is None or (latest is not None and token <= latest):
            raise Violation("S7", f"{key}: token {token} after {latest}")
        self._tokens[key] = token
        self.starts[key, token] = known.next_unclaimed()
        self.topic_ids[key, token] = known.topic_id

    def _check_sender(
        self, world: WorldState, transition: Transition, was: _Before
    ) -> None:
        """Only its owner moves a key, and in a pause nobody renews (PROTOCOL 8.1)."""
        record, key = transition.record, transition.key
        sender = getattr(record, "client_id", ""), getattr(record, "incarnation", b"")
        if was.owner != sender:
            raise Violation("S1", f"{key}: {transition.effect} by {sender[0]}")
        assert key is not None
        known = world.keys[key]
        is_renewed = known.renewed_ms != was.renewed_ms
        if is_renewed and world.active_pause(key.group_id) is not None:
            raise Violation("8.1", f"{key}: renewed while its group is paused")

    def _check_grant(self, place: Place, transition: Transition) -> None:
        detail = transition.detail or {}
        first, last = detail["first"], detail["last"]
        if first < self._granted.get(place, 0) or last < first:
            raise Violation("S3", f"{place[0]}: {first} to {last} granted again")
        self._granted[place] = last + 1

    def _check_position(
        self, key: Key, transition: Transition, was: _Before | None, now: int | None
    ) -> None:
        old = None if was is None else was.position
        if old == now:
            return
        record = transition.record
        rewinds = isinstance(record, Heartbeat) and record.rewind
        renamed = was is not None and was.topic_id is not None and now is None
        if now is None or (old is not None and now < old):
            if not (rewinds or renamed):
                raise Violation("S10", f"{key}: position fell from {old} to {now}")
        elif self._on_position is not None:
            self._on_position(key, old, now)


def _never(key: Key) -> bool:
    del key
    return False


def check_leases(
    held: Iterable[tuple[Node, Iterable[Key]]],
    *,
    is_excused: Callable[[Key], bool] = _never,
) -> None:
    """S4: at one instant, at most one live process passes its lease check.

    Args:
        held: The live processes, each with what it may use by its own lease.
        is_excused: Whether a key is none to check: its log's clock stepped by more
            than any lease allows for.
    """
    holders: dict[Key, Node] = {}
    for node, keys in held:
        for key in keys:
            other = holders.setdefault(key, node)
            if other is not node and not is_excused(key):
                names = f"{other.owner.client_id} and {node.owner.client_id}"
                raise Violation("S4", f"{key} is held by {names} at one instant")


class HandOuts:
    """Judges what applications were handed, and what they processed.

    Offsets are judged by the topic of the claim that they were handed out under.

    Attributes:
        processed: Offsets that an application has done.
        count: Number of records handed out.
        duplicate_count: How many of them had been handed out before.
    """

    def __init__(self, watcher: LogWatcher, *, is_at_most_once: bool) -> None:
        """Judge by what the watcher knows of the log."""
        self.processed: dict[Place, set[int]] = {}
        self.count = 0
        self.duplicate_count = 0
        self._watcher = watcher
        self._is_at_most_once = is_at_most_once
        self._handed: dict[Place, set[int]] = {}
        self._last: dict[tuple[Key, Token], int] = {}
        self._tokens: dict[Key, Token] = {}

    def handed_out(
        self, key: Key, token: Token, *, offset: int, is_excused: bool = False
    ) -> None:
        """Take one record that was handed out just now; see ``check_leases``."""
        latest = self._tokens.get(key)
        if latest is not None and token < latest and not is_excused:
            raise Violation("S4", f"{key}: handed out under {token} after {latest}")
        self._tokens[key] = token if latest is None else max(token, latest)
        if offset <= self._last.get((key, token), -1):
            raise Violation("S3", f"{key}: {offset} handed out twice under {token}")
        self._last[key, token] = offset
        start = self._watcher.starts.get((key, token))
        if start is not None and offset < start:
            # What is repeated lies at or beyond the last accepted position.
            raise Violation("6.1", f"{key}: {offset} handed out below {start}")
        place = key, self._watcher.topic_ids.get((key, token))
        handed = self._handed.setdefault(place, set())
        self.count += 1
        if offset in handed:
            self.duplicate_count += 1
            is_back = offset in self._watcher.taken_back.get(place, ())
            if self._is_at_most_once and not is_back:
                raise Violation("S3", f"{key}: {offset} handed out twice")
        handed.add(offset)

    def handed_elsewhere(self, key: Key, *, first: int, last: int) -> None:
        """Take that another process was granted offsets, and has processed them."""
        place = key, self._watcher.topic_id(key)
        handed = self._handed.setdefault(place, set())
        back = self._watcher.taken_back.get(place, set())
        again = (handed & set(range(first, last + 1))) - back
        if again:
            raise Violation("S3", f"{key}: {sorted(again)} handed out twice")
        handed.update(range(first, last + 1))

    def check_losses(self, *, most: int) -> None:
        """What was granted and never handed out is listed, and within the bound.

        Args:
            most: Offsets that one claim may have at risk.
        """
        listed: dict[Place, set[int]] = {}
        claimed = self._watcher.topic_ids.items()
        topics = {(key, token.offset): topic_id for (key, token), topic_id in claimed}
        for loss in self._watcher.unconfirmed():
            if loss.count > most:
                raise Violation("6.3", f"{loss.key}: {loss.ranges} at risk, not {most}")
            place = loss.key, topics.get((loss.key, loss.epoch))
            for first, last in loss.ranges:
                listed.setdefault(place, set()).update(range(first, last + 1))
        for world in self._watcher.worlds:
            for key, known in world.keys.items():
                place, granted = (key, known.topic_id), set(range(known.granted or 0))
                handed = self._handed.get(place, set())
                missed = granted - handed - listed.get(place, set())
                if missed:
                    raise Violation(
                        "6.3", f"{key}: {sorted(missed)} not listed as lost"
                    )

    def done(self, key: Key, token: Token | None, *, offset: int) -> None:
        """Take that an application has processed a record."""
        assert token is not None
        place = key, self._watcher.topic_ids.get((key, token))
        self.processed.setdefault(place, set()).add(offset)

    def check_moved(self, key: Key, old: int | None, *, new: int) -> None:
        """At least once, a position moves over nothing that nobody processed."""
        if self._is_at_most_once:
            return
        place = key, self._watcher.topic_id(key)
        missed = set(range(old or 0, new)) - self.processed.get(place, set())
        if missed:
            raise Violation("6.1", f"{key}: position {new} skips {sorted(missed)}")
