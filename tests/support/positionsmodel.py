"""Two coordinating partitions, and admins that set the positions of a group.

The fold is the product's ``apply``; the model decides which records admins and other
processes may send (PROTOCOL 8.1 to 8.5). An admin sends at any time, repeatedly, each
record that the log ever allowed: so it may crash at each step and have old readings.
Records in flight land late, twice or never, in any order. Any process resolves by the
state of the group's home. The pause ends in each partition independently. Owners
release, become stale, claim and are granted offsets, and a heartbeat of an earlier
owner lands late.

There is no clock: steps make an owner stale and end a pause. Epochs count claims. The
model keeps the product's state, except for fields that decide nothing here: times,
sequence numbers, offsets of ended operations and of verdicts, digests of plans (each
operation has one plan).
"""

from functools import cache
from itertools import islice
from typing import NamedTuple

import attrs
from logkit import (
    beat,
    claim,
    config,
    decide,
    forgetting,
    ident,
    messages,
    pause,
    release,
    resolve,
)
from search import Broken

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import coordinating_partition, home_partition
from kafka_marshal.protocol.items import Lock, Pause, Verdict
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    SECOND_LEVEL,
    StagedTopic,
    StagePosition,
)
from kafka_marshal.protocol.state import (
    ACCEPTED,
    GroupState,
    KeyState,
    Previous,
    WorldState,
)
from kafka_marshal.protocol.types import Key, LogEntry, Owner

GROUP, TOPIC = "g", "t"
HOME, OTHER = 0, 1
PARTITIONS = (HOME, OTHER)
H_MS = 1_000
NOW_MS = 10**10  # more than ``forget_ms``
PAUSED_MS = NOW_MS + 10
"""When each pause ends: after every record, before the entry that ends it."""
NEXT_OFFSET = 10_000
EPOCHS = 100  # the epochs of a key begin at a multiple of it
CONFIG = config(h=H_MS, k=len(PARTITIONS), level=SECOND_LEVEL)
NO_OP = 0
NOBODY, LIVE, STALE = "nobody", "live", "stale"
NO_BEAT = -1
START = 5  # position of every key at first
FIRST_TOPIC, SECOND_TOPIC = 0, 1
OVER_BY_TIME = None
"""What lands to end a pause: an entry that no reader can decode."""
ROUNDS_MAX = 6

# Mistakes of the admin's tool in the model.
COMMIT_PER_PARTITION = "commit_per_partition"  # It commits without the home.
# It aborts because the pause has ended in this partition.
RESOLVE_WITHOUT_HOME = "resolve_without_home"
# It resolves the home before the other partitions.
RESOLVE_HOME_FIRST = "resolve_home_first"
# It aborts by a state of the home from before the pause.
RESOLVE_BY_AN_OLD_HOME = "resolve_by_an_old_home"
# It pauses another partition before the home.
PAUSE_THE_OTHER_FIRST = "pause_the_other_first"
# It compares positions with grants only before the pause.
ASK_BEFORE_THE_PAUSE = "ask_before_the_pause"
DECIDE_EARLY = "decide_early"  # It decides before all keys are staged.


class KeyFold(NamedTuple):
    """A key in the log."""

    owner: str
    epoch: int  # claims so far
    position: int | None
    granted: int | None
    topic: int | None
    retired: tuple[int, ...]
    lock: tuple[int, int, int] | None  # operation, position, topic
    previous: tuple[int, int | None, int | None] | None


class Fold(NamedTuple):
    """A coordinating partition, as ``apply`` left it."""

    pause: int
    over: frozenset[int]
    verdict: tuple[int, bool] | None
    keys: tuple[KeyFold, ...]


class KeyPast(NamedTuple):
    """Facts about a key that the log does not show."""

    late_beat: int  # epoch of a heartbeat in flight
    has_lease: bool  # whether a former owner, unknown to the log, holds a lease
    moved: frozenset[int]  # operations that have set it
    set_to: int | None  # start of the next owner, if an operation set it
    floor: int  # nothing below it may be granted


class Part(NamedTuple):
    """A coordinating partition, with facts that its log does not show."""

    fold: Fold
    keys: tuple[KeyPast, ...]
    paused: frozenset[int]  # operations whose pause was ever accepted here
    staged: frozenset[tuple[int, int]]  # operations and numbers of their Stages


class World(NamedTuple):
    """Numbers of parts and records, so that worlds are cheap to compare."""

    home: int
    other: int
    in_flight: tuple[int, ...]


class Sent(NamedTuple):
    """A record about the group; ``what`` depends on the kind, see ``_record``."""

    kind: str
    at: int
    op: int
    what: tuple = ()


@attrs.frozen(kw_only=True)
class Operation:
    """An operation of an admin.

    Attributes:
        stages: Per coordinating partition, the keys of each Stage record.
        position: Position to set.
        may_go_back: Whether it may set a position below what was granted.
        undoes: The operation whose ``previous`` it sets instead, or None.
    """

    stages: tuple[tuple[tuple[int, ...], ...], ...] = (((0,),), ((0,),))
    position: int = 0
    may_go_back: bool = True
    undoes: int | None = None

    def keys(self, at):
        return [number for stage in self.stages[at] for number in stage]

    @property
    def key_count(self):
        return sum(len(self.keys(at)) for at in PARTITIONS)

    @property
    def all_staged(self):
        """The coordinating partition of each Stage record, and its number there."""
        return [(at, n) for at in PARTITIONS for n in range(len(self.stages[at]))]


def partitions_of(at, count):
    """Return data partitions that a coordinating partition arbitrates."""
    mine = (
        number
        for number in range(1_000)
        if coordinating_partition(TOPIC, number, partition_count=2) == at
    )
    return tuple(islice(mine, count))


assert home_partition(GROUP, partition_count=2) == HOME


def op_ident(op):
    return ident(f"operation {op}")


def op_of(op_id):
    return int(op_id.decode().strip(".").split()[1])


def topic_ident(topic):
    return None if topic is None else ident(f"topic {topic}")


def topic_of(topic_id):
    return None if topic_id is None else int(topic_id.decode().strip(".").split()[1])


def client_of(epoch):
    return f"c{epoch}"


def next_unclaimed(key):
    if key.granted is None or key.position is None:
        return key.position if key.granted is None else key.granted
    return max(key.position, key.granted)


class PositionsModel:
    """S8 and S4 while positions are set and records are late, lost or repeated.

    Options set the size of the world; ``mistake`` breaks a rule of the tool, and
    ``variants`` plants broken rules of the product.
    """

    def __init__(
        self,
        *,
        operations,
        key_counts=(1, 1),
        in_flight=1,
        claims=0,
        owned=False,
        granted=((None,), (None,)),
        grants_from=(),
        topics=((FIRST_TOPIC,), (FIRST_TOPIC,)),
        recreated=False,
        mistake=None,
    ):
        self.operations = dict(enumerate(operations, 1))
        self.names = tuple(
            tuple(Key(GROUP, TOPIC, n) for n in partitions_of(at, key_counts[at]))
            for at in PARTITIONS
        )
        self.in_flight, self.claims, self.owned = in_flight, claims, owned
        self.granted, self.grants_from = granted, grants_from
        self.topics, self.recreated = topics, recreated
        self.mistake = mistake
        self.numbers: dict = {}
        self.kept: list = []
        self.fold = cache(self._fold)
        self.is_dropped = cache(self._is_dropped)
        self.land = cache(self._land)
        self.alone = cache(self._alone)
        self.sends = cache(self._sends)
        self.faulty = cache(self._faulty)

    def number(self, what):
        """Return the number of a part or record; a new one gets the next number."""
        found = self.numbers.setdefault(what, len(self.kept))
        if found == len(self.kept):
            self.kept.append(what)
        return found

    def parts(self):
        """Return all parts so far, of either coordinating partition."""
        return [each for each in self.kept if isinstance(each, Part)]

    def moved(self):
        """Return the operations that ever set a key in any partition."""
        found = (key.moved for part in self.parts() for key in part.keys)
        return frozenset().union(*found)

    def start(self):
        return World(self.number(self._part(HOME)), self.number(self._part(OTHER)), ())

    def _part(self, at):
        count = len(self.names[at])
        # A tuple that is too short repeats its last value.
        granted = (self.granted[at] + self.granted[at][-1:] * count)[:count]
        topics = (self.topics[at] + self.topics[at][-1:] * count)[:count]
        keys = tuple(
            KeyFold(
                owner=LIVE if self.owned else NOBODY,
                epoch=0,
                position=START,
                granted=granted[n],
                topic=topics[n],
                retired=(),
                lock=None,
                previous=None,
            )
            for n in range(count)
        )
        late_beat = 0 if self.owned else NO_BEAT
        past = KeyPast(
            late_beat=late_beat,
            has_lease=False,
            moved=frozenset(),
            set_to=None,
            floor=START,
        )
        fold = Fold(NO_OP, frozenset(), None, keys)
        return Part(fold, (past,) * count, frozenset(), frozenset())

    # --- possible steps

    def steps(self, world):
        home, other, in_flight = world
        if len(in_flight) < self.in_flight:
            for label, sent in self.sends(home, other):
                if sent not in in_flight:
                    flying = tuple(sorted((*in_flight, sent)))
                    yield label, World(home, other, flying)
        for sent in in_flight:
            yield from self._arrives(world, sent)
        for label, after in self.alone(home, HOME):
            yield label, World(after, other, in_flight)
        for label, after in self.alone(other, OTHER):
            yield label, World(home, after, in_flight)

    def _arrives(self, world, sent):
        """Yield a record's landing, its landing with a copy in flight, and its loss."""
        home, other, in_flight = world
        if self.kept[sent].at == HOME:
            label, home = self.land(home, sent)
        else:
            label, other = self.land(other, sent)
        yield label, World(home, other, in_flight)
        rest = tuple(each for each in in_flight if each != sent)
        yield "the last copy on its way is gone", world._replace(in_flight=rest)

    def _land(self, number, sent):
        part, record = self.kept[number], self.kept[sent]
        after, outcome = self.append(part, record.at, record)
        name = self._named(record)
        return f"{name} lands: {outcome}", self.number(after)

    def _named(self, sent):
        what = f" {sent.what}" if sent.what else ""
        return f"{sent.kind}{what} of operation {sent.op} at {sent.at}"

    def _alone(self, number, at):
        """Return steps of one coordinating partition, with its number after each."""
        part = self.kept[number]
        found = []
        if part.fold.pause != NO_OP:
            after, _ = self.append(part, at, OVER_BY_TIME)
            found.append((f"the pause at {at} runs out", after))
        for n in range(len(part.keys)):
            found += self._owners(part, at, n)
        return tuple((label, self.number(after)) for label, after in found)

    def _owners(self, part, at, n):
        """Yield the steps of owners of a key, and those of time."""
        known, past = part.fold.keys[n], part.keys[n]
        name = f"key {n} at {at}"
        if known.lock is not None and self.is_dropped(at, part.fold, n):
            raise Broken("8.3: a locked key is forgotten")
        if known.owner == LIVE:
            stale = known._replace(owner=STALE)
            fold = part.fold._replace(keys=_with(part.fold.keys, n, stale))
            yield f"the owner of {name} is stale", part._replace(fold=fold)
        if past.has_lease:
            ended = past._replace(has_lease=False)
            after = part._replace(keys=_with(part.keys, n, ended))
            yield f"the lease of the old owner of {name} ends", after
        sent = []
        if known.owner != NOBODY:
            sent.append(("release", n, known.epoch))
        if past.late_beat != NO_BEAT:
            position = known.granted
            if position is None:
                position = 11 + past.late_beat
            sent.append(("beat", n, past.late_beat, position))
        if known.epoch < self.claims:
            sent += self._claims(known, n)
        if (next_unclaimed(known) or 0) in self.grants_from:
            sent.append(("grant", n, known.epoch, next_unclaimed(known) or 0))
        for record in sent:
            after, outcome = self.append(part, at, record)
            yield f"{record[0]} of {name}: {outcome}", after

    def _claims(self, known, n):
        if known.topic != SECOND_TOPIC:
            yield ("claim", n, known.epoch + 1, FIRST_TOPIC, None)
        if self.recreated and known.topic != SECOND_TOPIC:
            expected = None if known.topic is None else known.epoch
            yield ("claim", n, known.epoch + 1, SECOND_TOPIC, expected)

    # --- records about the group

    def _sends(self, home, other):
        """Return the records that any process may send now, with labels."""
        parts = self.kept[home], self.kept[other]
        found = [("the admin", sent) for sent in self._admin(parts)]
        found += [("anybody", sent) for sent in self._resolves(parts)]
        return tuple(
            (f"{who} sends {self._named(sent)}", self.number(sent))
            for who, sent in found
        )

    def _admin(self, parts):
        home, other = parts
        locks = [key.lock for part in parts for key in part.fold.keys]
        is_open = home.fold.verdict is not None and not home.fold.verdict[1]
        is_idle = not any(locks) and not is_open
        unordered = self.mistake == PAUSE_THE_OTHER_FIRST
        for op, operation in self.operations.items():
            is_known = op in home.paused or unordered
            is_possible = self._is_undoable(parts, operation)
            if op not in _seen(home) and is_idle and is_possible:
                yield Sent("pause", HOME, op)
            if is_known and op not in _seen(other):
                yield Sent("pause", OTHER, op)
            is_decided = home.fold.verdict is not None and home.fold.verdict[0] == op
            if is_decided:
                continue
            if is_known and op in other.paused:
                yield from self._stages(parts, op)
            yield from self._decides(parts, op)

    def _is_undoable(self, parts, operation):
        if operation.undoes is None:
            return True
        return all(
            (key.previous or (NO_OP,))[0] == operation.undoes
            for at in PARTITIONS
            for key in (parts[at].fold.keys[n] for n in operation.keys(at))
        )

    def _stages(self, parts, op):
        operation = self.operations[op]
        for at, number in operation.all_staged:
            part = parts[at]
            if (op, number) in part.staged:
                continue
            keys = operation.stages[at][number]
            named = [(n, self._target(part.fold.keys[n], operation)) for n in keys]
            if all(target is not None for _, target in named):
                yield Sent("stage", at, op, (number, tuple(named)))

    def _target(self, known, operation):
        """Return the position to set, None if the operation must not set the key.

        The admin checks after the drain: the pause keeps the result valid.
        """
        target = operation.position
        if operation.undoes is not None:
            if known.previous is None or known.previous[0] != operation.undoes:
                return None
            old = [at for at in known.previous[1:] if at is not None]
            return max(old, default=None)
        may_go_back = operation.may_go_back or self.mistake == ASK_BEFORE_THE_PAUSE
        if may_go_back or known.granted is None or known.granted <= target:
            return target
        return None

    def _decides(self, parts, op):
        staged = [
            (op, n) in parts[at].staged for at, n in self.operations[op].all_staged
        ]
        is_ready = any if self.mistake == DECIDE_EARLY else all
        if not is_ready(staged):
            return
        if self.mistake == COMMIT_PER_PARTITION:
            yield from (Sent("resolve", at, op, (True,)) for at in PARTITIONS)
        else:
            yield Sent("decide", HOME, op)

    def _resolves(self, parts):
        home, other = parts
        for op in self.operations:
            is_done = op in other.fold.over and not _locks(other, op)
            commit = self._outcome(parts, op, OTHER)
            if not is_done and commit is not None:
                yield Sent("resolve", OTHER, op, (commit,))
            commit = self._outcome(parts, op, HOME)
            if commit:
                is_open = home.fold.verdict == (op, False)
                if is_open and (is_done or self.mistake == RESOLVE_HOME_FIRST):
                    yield Sent("resolve", HOME, op, (True,))
            elif commit is False and _locks(home, op):
                yield Sent("resolve", HOME, op, (False,))
            elif (
                commit is None
                and home.fold.pause == op
                and self.mistake != COMMIT_PER_PARTITION
            ):
                # A Resolve ends the operation; on the home it is the decision.
                yield Sent("resolve", HOME, op, (False,))

    def _outcome(self, parts, op, at):
        """Return whether an operation was committed, None while that is undecided."""
        home, here = parts[HOME], parts[at]
        is_locked = _locks(here, op)
        if self.mistake == COMMIT_PER_PARTITION:
            return False if is_locked and op in here.fold.over else None
        if at == OTHER and is_locked:
            if self.mistake == RESOLVE_WITHOUT_HOME and op in here.fold.over:
                return False
            if self.mistake == RESOLVE_BY_AN_OLD_HOME:
                return False
        if home.fold.verdict is not None and home.fold.verdict[0] == op:
            return True
        is_unknown = home.fold.pause != op and op not in home.fold.over
        if op in home.fold.over or (is_unknown and is_locked):
            return False
        return None

    # --- invariants

    def broken(self, world):
        return self.faulty(world.home, world.other)

    def _faulty(self, home, other):
        parts = self.kept[home], self.kept[other]
        for op, operation in self.operations.items():
            if any(_locks(part, op) for part in parts):
                continue
            moved = {
                op in parts[at].keys[n].moved
                for at in PARTITIONS
                for n in operation.keys(at)
            }
            if len(moved) > 1:
                return f"S8: operation {op} has moved some of its keys"
        for part in parts:
            for known, past in zip(part.fold.keys, part.keys, strict=True):
                if past.set_to not in {None, next_unclaimed(known)}:
                    return "8.5: the next owner starts elsewhere than was set"
        try:
            is_unlocked = self._is_unlocked_in_the_end(parts)
        except Broken as what:  # such steps are possible, too
            return str(what)
        return None if is_unlocked else "liveness: keys stay locked for ever"

    def _is_unlocked_in_the_end(self, parts):
        """Return whether members unlock it without the admin and its records."""
        parts = [
            self.append(part, at, OVER_BY_TIME)[0] if part.fold.pause else part
            for at, part in enumerate(parts)
        ]
        for _ in range(ROUNDS_MAX):
            if not _is_unfinished(parts):
                return True
            for sent in list(self._resolves(parts)):
                parts[sent.at], _ = self.append(parts[sent.at], sent.at, sent)
        return not _is_unfinished(parts)

    # --- the log

    def append(self, part, at, record):
        """Append a record; return the part after it, and the outcome.

        Raises:
            Broken: The step itself breaks an invariant.
        """
        fold, outcome, is_accepted = self.fold(at, part.fold, record)
        keys = tuple(
            self._key_after(record, past, before=before, after=after)
            for past, before, after in zip(
                part.keys, part.fold.keys, fold.keys, strict=True
            )
        )
        if record is not OVER_BY_TIME and record[0] == "beat":
            number = record[1]
            spent = keys[number]._replace(late_beat=NO_BEAT)
            was, past = part.fold.keys[number], keys[number]
            is_owners = was.owner != NOBODY and was.epoch == record[2]
            if is_accepted and is_owners and was.granted is None:
                spent = spent._replace(set_to=None)  # the owner has a new position
            if past.late_beat == record[2]:
                keys = _with(keys, number, spent)
        paused, staged = part.paused, part.staged
        if isinstance(record, Sent) and is_accepted:
            if record.kind == "pause":
                paused |= {record.op}
            elif record.kind == "stage":
                staged |= {(record.op, record.what[0])}
        return Part(fold, keys, paused, staged), outcome

    def _key_after(self, record, past, *, before, after):
        """Return the past of a key after a record; judge the effect of the record."""
        if before == after:
            return past
        assert record is not OVER_BY_TIME
        kind = record[0]
        if after.epoch > before.epoch:
            return self._claimed(past, before=before, after=after)
        if before.owner == LIVE and after.owner == NOBODY and kind == "stage":
            past = past._replace(has_lease=True)
        if kind == "grant":
            start = after.granted - 1
            if before.lock is not None:
                raise Broken("8.3: a grant on a locked key")
            if start < past.floor:
                raise Broken("S3: granted below a grant or a position that was set")
            return past._replace(floor=after.granted, set_to=None)
        if kind == "resolve" and record.what[0] and before.lock and not after.lock:
            return self._committed(past, before=before, after=after)
        return past

    def _claimed(self, past, *, before, after):
        if before.lock is not None:
            raise Broken("8.3: a locked key is claimed")
        if before.owner == LIVE or past.has_lease:
            raise Broken("S4: claimed while the lease of the old owner runs")
        if past.late_beat == NO_BEAT:
            past = past._replace(late_beat=after.epoch)
        if len(after.retired) > len(before.retired):
            past = past._replace(set_to=None, floor=0)
        return past

    def _committed(self, past, *, before, after):
        op, position, topic = before.lock
        operation = self.operations[op]
        if op in past.moved:
            raise Broken("S8: set again by an operation that is over")
        if before.topic not in {None, topic} or after.topic != topic:
            raise Broken("8.3: a position of another topic is set")
        if after.previous != (op, before.position, before.granted):
            raise Broken("8.5: previous is not what was replaced")
        is_back = before.granted is not None and position < past.floor
        if is_back and not operation.may_go_back:
            raise Broken("S3: set back below a grant, which nobody allowed")
        floor = position if operation.may_go_back else max(past.floor, position)
        return past._replace(moved=past.moved | {op}, set_to=position, floor=floor)

    def _fold(self, at, fold, record):
        """Fold one record with the product."""
        state = self.state(at, fold)
        is_late = record is OVER_BY_TIME
        value = b"?" if is_late else encode(self._record(at, record))
        entry = _entry(value, PAUSED_MS if is_late else NOW_MS + 1)
        transitions = apply(state, entry)
        first = transitions[0]
        outcome = first.effect or first.reason
        return self.view(at, state), outcome, first.outcome == ACCEPTED

    def _is_dropped(self, at, fold, number):
        """Return whether a ForgettingPartition, or the expiry of the key, drops it."""
        key = self.names[at][number]
        drop = forgetting(_offset(number, fold.keys[number].epoch), key=key)
        for value in (encode(drop), b"?"):
            state = self.state(at, fold)
            state.keys[key].active_ms = 0
            state.index_forgettable()
            apply(state, _entry(value, NOW_MS + 1))
            if key not in state.keys:
                return True
        return False

    def view(self, at, state):
        """Return a state of the product in the form of the model."""
        group = state.groups[GROUP]
        verdict = group.verdict
        if verdict is not None:
            verdict = op_of(verdict.op_id), verdict.is_resolved
        return Fold(
            pause=NO_OP if group.pause is None else op_of(group.pause.op_id),
            over=frozenset(op_of(op_id) for _, op_id in group.over),
            verdict=verdict,
            keys=tuple(
                self._key_fold(state, key, n) for n, key in enumerate(self.names[at])
            ),
        )

    def _key_fold(self, state, key, number):
        known = state.keys[key]
        epoch = known.epoch
        owner = NOBODY
        if known.owner is not None:
            owner = LIVE if known.remaining_ms(state.now_ms) > 0 else STALE
        if epoch == NEXT_OFFSET:  # a claim folded just now
            assert known.owner is not None
            epoch = int(known.owner.client_id[1:])
        else:
            epoch -= _offset(number, 0)
        lock, previous = known.lock, known.previous
        return KeyFold(
            owner=owner,
            epoch=epoch,
            position=known.position,
            granted=known.granted,
            topic=topic_of(known.topic_id),
            retired=tuple(map(topic_of, known.retired_topic_ids)),
            lock=lock and (op_of(lock.op_id), lock.position, topic_of(lock.topic_id)),
            previous=previous and (op_of(previous.op_id), *previous[1:]),
        )

    def state(self, at, fold):
        """Return the state of the product for a fold of the model."""
        state = WorldState(
            at,
            next_offset=NEXT_OFFSET,
            leader_epoch=1,
            epoch_time_ms=NOW_MS,
            log_time_ms=NOW_MS,
            append_time_ms=NOW_MS,
            config=CONFIG,
        )
        group = GroupState()
        if fold.pause != NO_OP:
            group.pause = Pause(
                op_id=op_ident(fold.pause),
                client_id="admin",
                incarnation=ident("admin"),
                seq=0,
                incarnations=(ident("admin"),),
                until_ms=PAUSED_MS,
            )
        group.over = tuple((op, op_ident(op)) for op in sorted(fold.over))
        if fold.verdict is not None:
            op, is_resolved = fold.verdict
            count = self.operations[op].key_count
            group.verdict = Verdict(
                op_ident(op), ident(f"plan {op}"), count, 1, is_resolved=is_resolved
            )
        state.groups[GROUP] = group
        for n, key in enumerate(self.names[at]):
            state.keys[key] = self._key_state(n, fold.keys[n])
        state.rebuild_derived()
        return state

    def _key_state(self, number, key):
        age_ms = 2 * H_MS + 1 if key.owner == STALE else 0
        known = KeyState(
            owner=None,
            epoch=_offset(number, key.epoch),
            epoch_leader_epoch=0,
            renewed_ms=NOW_MS - age_ms,
            heartbeat_interval_ms=H_MS,
            active_ms=NOW_MS,
            position=key.position,
            granted=key.granted,
            topic_id=topic_ident(key.topic),
            retired_topic_ids=tuple(map(topic_ident, key.retired)),
        )
        if key.owner != NOBODY:
            name = client_of(key.epoch)
            known.owner = Owner(name, ident(name))
        if key.lock is not None:
            op, position, topic = key.lock
            known.lock = Lock(
                op_ident(op), ident(f"plan {op}"), position, topic_ident(topic)
            )
        if key.previous is not None:
            op, position, granted = key.previous
            known.previous = Previous(op_ident(op), position, granted)
        return known

    def _record(self, at, record):
        if isinstance(record, Sent):
            return self._group_record(at, record)
        kind, number, epoch, *rest = record
        key = self.names[at][number]
        client, offset = client_of(epoch), _offset(number, epoch)
        if kind == "claim":
            topic, expected = rest
            known = None if expected is None else _offset(number, expected)
            return claim(client, key=key, topic_id=topic_ident(topic), expected=known)
        if kind == "beat":
            return beat(offset, *rest, key=key, client=client)
        if kind == "release":
            return release(offset, key=key, client=client)
        return messages(offset, *rest, *rest, key=key, client=client)

    def _group_record(self, at, sent):
        op_id, plan = op_ident(sent.op), ident(f"plan {sent.op}")
        if sent.kind == "pause":
            return pause(PAUSED_MS, op=op_id)
        if sent.kind == "decide":
            count = self.operations[sent.op].key_count
            return decide(count, op=op_id, plan=plan)
        if sent.kind == "resolve":
            return resolve(commit=sent.what[0], op=op_id)
        _, named = sent.what
        positions = tuple((self.names[at][n].partition, to) for n, to in named)
        return StagePosition(
            client_id="admin",
            group_id=GROUP,
            incarnation=ident("admin"),
            seq=1,
            op_id=op_id,
            plan_digest=plan,
            topics=(StagedTopic(TOPIC, topic_ident(FIRST_TOPIC), positions),),
        )


def _entry(value, at_ms):
    return LogEntry(
        offset=NEXT_OFFSET,
        leader_epoch=1,
        timestamp_ms=at_ms,
        timestamp_type=1,
        value=value,
    )


def _offset(number, epoch):
    """Return the offset of a claim of a key."""
    return EPOCHS * (number + 1) + epoch


def _with(items, number, item):
    return (*items[:number], item, *items[number + 1 :])


def _seen(part):
    """Return the operations that occur in the state of a partition."""
    return part.fold.over | {part.fold.pause}


def _locks(part, op):
    return any(key.lock is not None and key.lock[0] == op for key in part.fold.keys)


def _is_unfinished(parts):
    verdict = parts[HOME].fold.verdict
    return (
        (verdict is not None and not verdict[1])
        or any(part.fold.pause != NO_OP for part in parts)
        or any(key.lock is not None for part in parts for key in part.fold.keys)
    )
