"""The invariants of PROTOCOL 11, as checks that run along with any test.

``LogWatcher`` reads the coordination log like any other reader and passes it to the
log judge; ``HandOuts`` passes hand-outs, and what the log shows of their claims, to the
operation judge; ``check_leases`` judges the clients' own leases. Each raises
``Violation``, which names the invariant and the judge.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.engine import Engine
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.layout import is_final
from kafka_marshal.protocol.log_judge import CLAIMS, LogJudge, Place
from kafka_marshal.protocol.losses import Loss, LossBook
from kafka_marshal.protocol.placement import place_under
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import Heartbeat, LayoutFinal
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import (
    KeyState,
    Transition,
    Transitions,
    WorldState,
)
from kafka_marshal.protocol.types import Key, Owner, Token, TopicPartition
from simulator.fakelog import FakeKafka
from simulator.fakestore import Stored
from simulator.node import Node
from simulator.operation_judge import (
    BEAT,
    CLAIM,
    GRANT,
    HAND_OUT,
    INVOKE,
    OK,
    PROCESS,
    RESET,
    SEEK,
    SET,
    SOUGHT,
    Operation,
    OperationJudge,
)
from simulator.skips import Skips

LOG, OPERATIONS, SIMULATOR = "log", "operations", "simulator"


class Violation(AssertionError):
    """An invariant of PROTOCOL 11 does not hold.

    Attributes:
        invariant: Its name, such as ``S4``.
        judge: The judge that found it: the log judge, the operation judge, or the
            simulator, which also reads the memory of processes and has true time.
    """

    def __init__(self, invariant: str, message: str, *, judge: str = SIMULATOR) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant
        self.judge = judge


Head = tuple[int | None, int | None, bytes | None]
"""Position, first offset not granted and topic id of a key."""
NO_HEAD: Head = (None, None, None)
Sets = tuple[tuple[bytes, int], ...]
"""Set positions of a key, the last one last: op_id and position (PROTOCOL 8.5)."""
Heads = tuple[int, ...]
"""First offset of a key that is not granted, after each Reset (PROTOCOL 7.6)."""
EntryCheck = Callable[[int, Stored, Transitions], None]
"""Called with every record: coordinating partition, record, its transitions."""
TokenCheck = Callable[[Transition, Token | None], bool]


class Folded(NamedTuple):
    """One record that was folded and checked.

    Attributes:
        partition: Coordinating partition.
        stored: The record as stored there.
        transition: Its effect on one key, or on none.
        owner: Owner of that key before the record.
        age_ms: Time since that owner's last renewal, at this record.
        moved: Whether it moved the position.
        head: First offset that was neither processed nor granted before the record.
    """

    partition: int
    stored: Stored
    transition: Transition
    owner: Owner | None
    age_ms: int
    moved: bool
    head: int | None = None


class LogWatcher:
    """Folds every coordinating partition, and checks S2 and all that ``LogJudge`` does.

    Attributes:
        worlds: The fold so far, one per coordinating partition.
        topic_ids: Id of the topic that a claim names, by key and token.
        sets: Set positions of a claim's key before the claim, in the log that accepted
            it, by key and token. A log that goes back may lose them.
        resets: Resets that were read before a claim, by key and token; also Resets that
            the log has lost since.
        starts: Highest position that a key without a position has begun with, by key
            and set positions: the group's committed offset (PROTOCOL 5.6).
        claims: Number of accepted claims and resumes so far, except for checkpoints.
        losses: Offsets that ended claims were granted and did not report as processed.
        skips: Offsets that seeks of owners have skipped.
        is_strict: Whether findings are raised; otherwise they are ignored.
        on_entry: Called with each record, once it is folded and checked.
        may_fall: Called with a claim whose token does not exceed the greatest token of
            its key, and with that token; returns whether this is allowed.
    """

    def __init__(
        self,
        kafka: FakeKafka,
        partitions: int,
        *,
        note: Callable[[str], None] | None = None,
        on_fold: Callable[[Folded], None] | None = None,
    ) -> None:
        """Start at the log's beginning.

        Args:
            kafka: The cluster.
            partitions: Number of coordinating partitions.
            note: Called with one line for every transition.
            on_fold: Called with every transition.
        """
        self.worlds = [WorldState(number) for number in range(partitions)]
        self.topic_ids: dict[tuple[Key, Token], bytes | None] = {}
        self.sets: dict[tuple[Key, Token], Sets] = {}
        self.resets: dict[tuple[Key, Token], Heads] = {}
        self.starts: dict[tuple[Key, Sets], int] = {}
        self.claims = 0
        self.losses: list[Loss] = []
        self.skips = Skips(self.worlds)
        self.is_strict = True
        self.on_entry: EntryCheck | None = None
        self.may_fall: TokenCheck | None = None
        # Set positions up to each operation, itself the last; also if it only locked.
        self._sets: dict[tuple[Key, bytes], Sets] = {}
        # The keys after each Reset, by its partition, leader epoch and offset.
        self._resets: dict[tuple[int, int | None, int], dict[Key, Head]] = {}
        self._by_partition = [LossBook(number) for number in range(partitions)]
        self._judges = [LogJudge(world) for world in self.worlds]
        self._kafka = kafka
        places = [TopicPartition(COORDINATION_TOPIC, t) for t in range(partitions)]
        self._logs = [kafka.log(place) for place in places]
        # Next offsets to read; not those of the worlds, because a halted one stays.
        self._next = [0] * partitions
        self._note = note
        self._on_fold = on_fold
        self._digests: list[dict[int, str]] = [
            {0: digest(world)} for world in self.worlds
        ]

    def catch_up(self) -> bool:
        """Fold and check newly committed records; return whether there were any."""
        self._kafka.settle()
        self._grow()
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

    def _grow(self) -> None:
        """Begin to read partitions that were added."""
        count = len(self._kafka.topic(COORDINATION_TOPIC).partitions)
        for number in range(len(self.worlds), count):
            world = WorldState(number)
            self.worlds.append(world)
            self._by_partition.append(LossBook(number))
            self._judges.append(LogJudge(world))
            self._logs.append(
                self._kafka.log(TopicPartition(COORDINATION_TOPIC, number))
            )
            self._next.append(0)
            self._digests.append({0: digest(world)})

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
            self.skips.take(stored, transition, partition=number, old=old)
            if key is not None and old is None and new is not None:
                place = key, self.sets_of(key, world)
                self.starts[place] = max(new, self.starts.get(place, 0))
            if self._on_fold is not None:
                owner = None if was is None else was.owner
                age_ms = 0 if was is None else world.now_ms - was.renewed_ms
                heads = () if was is None else (was.position, was.granted)
                head = max((each for each in heads if each is not None), default=None)
                folded = Folded(
                    partition=number,
                    stored=stored,
                    transition=transition,
                    owner=owner,
                    age_ms=age_ms,
                    moved=moved,
                    head=head,
                )
                self._on_fold(folded)
        self.losses += self._by_partition[number].take(
            entry, transitions, keys=world.keys
        )
        if world.halted is None:
            self._digests[number][world.next_offset] = digest(world)
        if self.on_entry is not None:
            self.on_entry(number, stored, transitions)

    def _take(
        self, world: WorldState, transition: Transition, *, judge: LogJudge
    ) -> None:
        """Judge a record, and note the facts by which hand-outs are judged."""
        if self._note is not None:
            what = transition.effect or transition.reason
            kind = type(transition.record).__name__
            who = getattr(transition.record, "client_id", "-")
            where = f"{world.partition}/{transition.offset}"
            self._note(f"  log {where} {kind} of {who}: {what} {transition.detail}")
        key = transition.key
        latest = None if key is None else judge.tokens.get(key)
        for finding in judge.take(transition):
            if finding.invariant == "S7" and self._may_fall(transition, latest):
                assert key is not None
                assert latest is not None
                judge.tokens[key] = latest
            elif self.is_strict:
                raise Violation(finding.invariant, finding.message, judge=LOG)
        token = None if key is None else world.token(key)
        if transition.effect in CLAIMS and key is not None and token is not None:
            self.claims += key.group_id != CHECKPOINT_GROUP
            self.topic_ids[key, token] = world.keys[key].topic_id
            self.sets[key, token] = self.sets_of(key, world)
            self.resets.setdefault((key, token), self._heads_of(key, world))
        elif transition.effect == "reset":
            place = world.partition, world.leader_epoch, transition.offset
            self._resets.setdefault(
                place, {key: _head_of(known) for key, known in world.keys.items()}
            )
        lock = None if key not in world.keys else world.keys[key].lock
        if transition.effect == "staged" and key is not None and lock is not None:
            one = lock.op_id, lock.position
            self._sets[key, lock.op_id] = (*self.sets_of(key, world), one)

    def _may_fall(self, transition: Transition, latest: Token | None) -> bool:
        return self.may_fall is not None and self.may_fall(transition, latest)

    def set_to(self, key: Key) -> int:
        """Return the highest position to which any operation was to set a key."""
        ends = (each[-1][1] for (of, _), each in self._sets.items() if of == key)
        return max(ends, default=0)

    def sets_of(self, key: Key, world: WorldState) -> Sets:
        """Return the set positions of a key, as far as its log still has them."""
        known = world.keys.get(key)
        if known is None or known.previous is None:
            return ()
        return self._sets.get((key, known.previous.op_id), ())

    def _heads_of(self, key: Key, world: WorldState) -> Heads:
        """Return the head of a key after each Reset so far, in its claim's topic."""
        topic_id = world.keys[key].topic_id
        found = [
            heads.get(key, NO_HEAD)
            for (partition, _, _), heads in self._resets.items()
            if partition == world.partition
        ]
        return tuple(
            max(position or 0, granted or 0) if of == topic_id else 0
            for position, granted, of in found
        )

    def refold(self, partition: int) -> None:
        """Forget a partition that was truncated, and read it from its start.

        Positions, grants and owners go back with the log; tokens do not (PROTOCOL
        4.10).
        """
        self._by_partition[partition] = LossBook(partition)
        self._next[partition] = 0
        self.skips.forget(partition)
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
        """Return the topic id that the log has for a key now, None for none."""
        found = (world.keys[key] for world in self.worlds if key in world.keys)
        return next((known.topic_id for known in found), None)

    def unconfirmed(self) -> list[Loss]:
        """Return the offsets that are lost, or at risk now, according to the log."""
        found = list(self.losses)
        for book, world in zip(self._by_partition, self.worlds, strict=True):
            found += book.open_ones(world)
        return found

    def check_reader(
        self, engine: Engine, checked: dict[int, int], *, may_lag: bool = False
    ) -> bool:
        """S2: demand that a reader that folded the same prefix has the same digest.

        Args:
            engine: The reader.
            checked: Offsets up to which it was checked before, by partition; updated.
            may_lag: Whether it may not have noticed yet that the log went back.

        Returns:
            Whether the reader has folded anything since the last check.
        """
        has_folded = False
        for number, replica in engine.context.replicas.items():
            at = replica.world.next_offset
            if checked.get(number) == at or not replica.is_known:
                continue
            checked[number] = at
            has_folded = True
            is_same = replica.world.leader_epoch == self.worlds[number].leader_epoch
            if may_lag and not (is_same and at in self._digests[number]):
                continue
            if digest(replica.world) != self._digests[number].get(at):
                raise Violation("S2", f"digests differ at {number}/{at}")
        return has_folded


def _head_of(known: KeyState) -> Head:
    return known.position, known.granted, known.topic_id


def _never(key: Key) -> bool:
    del key
    return False


def check_leases(
    held: Iterable[tuple[Node, Iterable[Key]]],
    *,
    is_excused: Callable[[Key], bool] = _never,
) -> None:
    """S4: demand that at most one live process passes its lease check for a key now.

    Args:
        held: The live processes, each with the keys it may use by its own lease.
        is_excused: Whether a key is not checked, because its log's clock stepped by
            more than any lease allows for.
    """
    holders: dict[Key, Node] = {}
    for node, keys in held:
        for key in keys:
            other = holders.setdefault(key, node)
            if other is not node and not is_excused(key):
                names = f"{other.owner.client_id} and {node.owner.client_id}"
                raise Violation("S4", f"{key} is held by {names} at one instant")


class HandOuts:
    """Passes events of the log and of applications to the operation judge.

    Offsets are judged within the topic of the claim under which they were handed out.
    The owner of a claim is named by its token.

    Attributes:
        processed: Offsets that applications have processed.
        count: Number of records handed out.
        duplicate_count: Number of these that had been handed out before.
    """

    def __init__(self, watcher: LogWatcher, *, is_at_most_once: bool) -> None:
        """Judge with the watcher's knowledge of the log."""
        self.processed: dict[Place, set[int]] = {}
        self.count = 0
        self.duplicate_count = 0
        self._watcher = watcher
        self._is_amo = is_at_most_once
        self._judge = OperationJudge(is_at_most_once=is_at_most_once)
        self._claimed: dict[int, set[Key]] = defaultdict(set)
        # Imports whose source has not been read far enough.
        self._imports: list[tuple[Key, Head, bytes]] = []

    def on_fold(self, folded: Folded, *, other: str | None = None) -> None:
        """Pass on the effect of a record.

        Args:
            folded: The record.
            other: Name of the process that a grant is for, if it is not the owner's; it
                processes at once what it is granted.
        """
        transition, world = folded.transition, self._watcher.worlds[folded.partition]
        key, effect = transition.key, transition.effect
        self._check_imports(folded)
        if effect == "reset":
            self._on_reset(world)
        token = None if key is None else world.token(key)
        if key is None or token is None:
            return
        known = world.keys[key]
        if effect in CLAIMS:
            self._claimed[folded.partition].add(key)
            self._on_claim(key, token, known)
        if effect == "granted" and transition.detail is not None:
            first, last = transition.detail["first"], transition.detail["last"]
            kinds = (GRANT,) if other is None else (GRANT, HAND_OUT)
            for kind in kinds:
                self._judge_one(
                    kind, key, token=token, first=first, last=last, process=other
                )
        if effect == "position_set":
            self._on_set(key, known)
        elif isinstance(transition.record, Heartbeat) and transition.record.rewind:
            if effect is not None:
                self._move(SEEK, key, token, known)
        elif effect == "imported":
            self._check_import(key, known, partition=folded.partition)
        elif folded.moved and known.position is not None:
            is_sought = self._judge.keys[key].topic(token).sought is not None
            if is_sought:
                self._move(BEAT, key, token, known)
                return
            self._judge_one(BEAT, key, token=token, first=known.position)

    def _on_reset(self, world: WorldState) -> None:
        config = world.config
        assert config is not None
        for each in self._claimed[world.partition]:
            if place_under(each, config.partition_count) != world.partition:
                continue  # it has moved away since
            known = world.keys.get(each)
            head = None if known is None else known.next_unclaimed()
            topic_id = None if known is None else known.topic_id
            self._judge_one(RESET, each, first=head, topic_id=topic_id)
            if not self._is_amo:
                judged = self._judge.keys[each]
                topic = judged.topics[topic_id, judged.round]
                self.processed[each, topic_id] = {*range(topic.base), *topic.processed}

    def _check_import(self, key: Key, known: KeyState, *, partition: int) -> None:
        """PROTOCOL 10.4: demand that a key is in its target as it was in its source."""
        layout = self._watcher.worlds[partition].layout
        assert layout is not None
        head = _head_of(known)
        heads = self._final_heads(key, layout.op_id)
        if not heads:
            # Records of both partitions were committed at once: judge it later.
            self._imports.append((key, head, layout.op_id))
        elif heads != {head}:
            raise Violation("10.4", f"{key} is imported as {known}, and was {heads}")

    def _check_imports(self, folded: Folded) -> None:
        """Judge imports whose source had not been read, at the latest at the Final."""
        if not self._imports:
            return
        record = folded.transition.record
        is_end = folded.transition.effect == "layout_final" and folded.partition == 0
        ended = record.op_id if is_end and isinstance(record, LayoutFinal) else None
        for each in list(self._imports):
            key, head, op_id = each
            heads = self._final_heads(key, op_id)
            if heads or op_id == ended:
                self._imports.remove(each)
                if heads != {head}:
                    raise Violation("10.4", f"{key} came as {head}, and was {heads}")

    def _final_heads(self, key: Key, op_id: bytes) -> set[Head]:
        """Return the head of a key in the source from which a change moves it."""
        others = [
            other.keys[key]
            for other in self._watcher.worlds
            if other.layout is not None
            and other.layout.op_id == op_id
            and is_final(other, key)
        ]
        return {_head_of(each) for each in others}

    def _on_claim(self, key: Key, token: Token, known: KeyState) -> None:
        is_sought = self._judge.keys[key].topic().sought is not None
        first = known.position if is_sought else None
        self._judge_one(CLAIM, key, token=token, first=first, topic_id=known.topic_id)
        if is_sought:
            self._keep_processed(key, token, known)

    def seeking(self, key: Key, token: Token, *, offset: int) -> None:
        """Record that an owner begins to seek: its records may carry the position."""
        self._judge.take(
            Operation(
                kind=SEEK,
                outcome=INVOKE,
                process=f"owner {token}",
                key=key,
                token=token,
                at_ms=0,
                first=offset,
            )
        )

    def sought(self, key: Key, token: Token, *, offset: int) -> None:
        """Record that an owner has read that its seek is done."""
        self._judge_one(SOUGHT, key, token=token, first=offset)

    def _move(self, kind: str, key: Key, token: Token, known: KeyState) -> None:
        """Record a seek: what it skips needs no processing, what it repeats does."""
        self._judge_one(kind, key, token=token, first=known.position)
        self._keep_processed(key, token, known)

    def _keep_processed(self, key: Key, token: Token, known: KeyState) -> None:
        topic = self._judge.keys[key].topic(token)
        self.processed[key, known.topic_id] = {*range(topic.base), *topic.processed}

    def _on_set(self, key: Key, known: KeyState) -> None:
        """Record a set position: all above it must be processed, nothing below it."""
        head, place = known.position or 0, (key, known.topic_id)
        self.processed[place] = set(range(head))
        self._judge_one(SET, key, first=known.position, topic_id=known.topic_id)

    def handed_out(
        self, key: Key, token: Token, *, offset: int, is_excused: bool = False
    ) -> None:
        """Judge one record that was handed out just now; see ``check_leases``."""
        self.count += 1
        known = self._judge.keys[key]
        self.duplicate_count += offset in known.topic(token).handed
        excused = {"S4"} if is_excused else frozenset()
        self._judge_one(HAND_OUT, key, token=token, first=offset, excused=excused)

    def done(self, key: Key, token: Token | None, *, offset: int) -> None:
        """Record that an application has processed a record."""
        assert token is not None
        place = key, self._watcher.topic_ids.get((key, token))
        known = self._judge.keys[key]
        # It counts only if no position was set since.
        if known.rounds.get(token, known.round) == known.round:
            self.processed.setdefault(place, set()).add(offset)
        self._judge_one(PROCESS, key, token=token, first=offset)

    def check_losses(self, *, most: int) -> None:
        """Demand that offsets granted and not handed out are listed, within a bound.

        Args:
            most: Maximum number of offsets that one claim may have at risk.
        """
        listed: dict[Place, set[int]] = {}
        claimed = self._watcher.topic_ids.items()
        topics = {
            (key, token.offset): topic_id
            for (key, token), topic_id in claimed
            if self._judge.keys[key].rounds.get(token) == self._judge.keys[key].round
        }
        for loss in self._watcher.unconfirmed():
            if loss.count > most:
                raise Violation("6.3", f"{loss.key}: {loss.ranges} at risk, not {most}")
            if (loss.key, loss.epoch) not in topics:
                continue  # granted before a position was set
            place = loss.key, topics[loss.key, loss.epoch]
            for each in loss.ranges:
                listed.setdefault(place, set()).update(range(each.first, each.end))
        for world in self._watcher.worlds:
            for key, known in world.keys.items():
                place, judged = (key, known.topic_id), self._judge.keys[key]
                history = judged.topics[known.topic_id, judged.round]
                granted = set(range(history.base, known.granted or 0))
                missed = granted - history.handed - listed.get(place, set())
                if missed:
                    raise Violation(
                        "6.3", f"{key}: {sorted(missed)} not listed as lost"
                    )

    def _judge_one(
        self,
        kind: str,
        key: Key,
        *,
        token: Token | None = None,
        first: int | None = None,
        last: int | None = None,
        topic_id: bytes | None = None,
        process: str | None = None,
        excused: Collection[str] = (),
    ) -> None:
        operation = Operation(
            kind=kind,
            outcome=OK,
            process=process or f"owner {token}",
            key=key,
            token=token,
            at_ms=0,
            first=first,
            last=last,
            topic_id=topic_id,
        )
        for finding in self._judge.take(operation):
            if finding.invariant not in excused:
                raise Violation(finding.invariant, finding.message, judge=OPERATIONS)
