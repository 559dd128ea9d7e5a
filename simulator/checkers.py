"""The invariants of PROTOCOL 11, as checks that run beside anything.

``LogWatcher`` reads the coordination log like any other reader and judges what
it says; ``HandOuts`` judges what applications got; ``check_leases`` judges the
clients' own beliefs. Each raises ``Violation``, which names the invariant.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kafka_marshal.engine import Engine
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.log_judge import CLAIMS, LogJudge, Place
from kafka_marshal.protocol.losses import Loss, LossBook
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.transition import Transition, Transitions
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
    """Folds every coordinating partition: S2, and what ``LogJudge`` judges.

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
        on_position: PositionCheck = lambda _key, _old, _new: None,
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
        self._judges = [LogJudge(world) for world in self.worlds]
        self._kafka = kafka
        places = [TopicPartition(COORDINATION_TOPIC, t) for t in range(partitions)]
        self._logs = [kafka.log(place) for place in places]
        # Not where the worlds are: one that has halted stays where it is.
        self._next = [0] * partitions
        self._on_position = on_position
        self._note = note
        self._on_fold = on_fold
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
        transitions, judge = apply(world, entry), self._judges[number]
        for transition in transitions:
            key = transition.key
            was = None if key is None else judge.known.get(key)
            self._take(world, transition, judge=judge)
            known = None if key is None else world.keys.get(key)
            old, new = (
                None if each is None else each.position for each in (was, known)
            )
            moved = known is not None and new != old
            if moved and key is not None and new is not None and new > (old or 0):
                self._on_position(key, old, new)
            if self._on_fold is not None:
                owner = None if was is None else was.owner
                age_ms = 0 if was is None else world.now_ms - was.renewed_ms
                self._on_fold(Folded(number, stored, transition, owner, age_ms, moved))
        self.losses += self._books[number].take(entry, transitions)
        if world.halted is None:
            self._digests[number][world.next_offset] = digest(world)
        if self.on_entry is not None:
            self.on_entry(number, stored, transitions)

    def _take(
        self, world: WorldState, transition: Transition, *, judge: LogJudge
    ) -> None:
        """Judge what a record did, and note what hand-outs are judged by."""
        if self._note is not None:
            what = transition.effect or transition.reason
            kind = type(transition.record).__name__
            who = getattr(transition.record, "client_id", "-")
            where = f"{world.partition}/{transition.offset}"
            self._note(f"  log {where} {kind} of {who}: {what} {transition.detail}")
        granted = dict(judge.granted) if transition.effect == "reset" else {}
        for finding in judge.take(transition):
            if self.is_strict:
                raise Violation(finding.invariant, finding.message)
        for place, head in granted.items():
            back = range(judge.granted[place], head)
            self.taken_back.setdefault(place, set()).update(back)
        key = transition.key
        token = None if key is None else world.token(key)
        if transition.effect in CLAIMS and key is not None and token is not None:
            self.claims += key.group_id != CHECKPOINT_GROUP
            self.starts[key, token] = world.keys[key].next_unclaimed()
            self.topic_ids[key, token] = world.keys[key].topic_id

    def refold(self, partition: int) -> None:
        """Forget a partition that was truncated, and read it from its start.

        Positions, grants and owners go back with it; tokens do not (PROTOCOL
        4.10).
        """
        self._books[partition] = LossBook(partition)
        self._next[partition] = 0
        world = self.worlds[partition] = WorldState(partition)
        before, judge = self._judges[partition], LogJudge(world)
        self._judges[partition] = judge
        self._digests[partition] = {0: digest(world)}
        note, self._note = self._note, None
        on_fold, self._on_fold = self._on_fold, None
        self.catch_up()
        self._note, self._on_fold = note, on_fold
        for key, token in before.tokens.items():
            judge.tokens[key] = max(token, judge.tokens.get(key, token))

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
