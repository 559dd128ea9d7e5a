"""A key that moves from one coordinating partition to another, and two clients.

The fold is the product's ``apply``, and so is the judgement of what is final; what
writers of claims, heartbeats, requests and of the change may send is modelled. Records
land late or never, anybody fences, imports and ends, and a log's clock stands still
while nothing is appended to it (PROTOCOL 10). A lease that is never used again is a
crash.

Times are counted in heartbeat intervals and saturate where they make no difference any
more: an owner is stale above two, a lease lasts two from the sending.
"""

from functools import cache
from typing import NamedTuple

from logkit import (
    KEY,
    OP,
    beat,
    claim,
    config,
    ident,
    imported,
    layout_done,
    layout_fence,
    layout_final,
    layout_import,
    messages,
    release,
    resolve,
)
from search import Broken

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.items import Layout, LayoutSource, Lock
from kafka_marshal.protocol.layout import is_final, is_moving
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import GroupState, KeyState, WorldState
from kafka_marshal.protocol.types import LogEntry, Owner

H_MS = 1_000
NOW_MS = 10**9
NEXT_OFFSET, EPOCH, LATE_EPOCH = 0, 1, 2
OFFSETS = {"S": (1_000, 900, 800), "D": (60, 50, 40)}
"""Offset of the next entry, of the key's claim, and of an earlier one: the target's log
is shorter, so that only the era makes its tokens larger."""
NOBODY = -1
CLIENTS = (0, 1)
GRANTS = 2  # offsets that can be granted
STALE, LEASE = 3, 2
UNFENCED, OPEN, DONE, OVER = "unfenced", "open", "done", "over"
BASE, NEXT = 2, 3  # generations before and after the fence

# What the tools of the model do wrong.
IMPORT_BEFORE_FINAL = "import_before_final"
IMPORT_THOUGH_QUIET = "import_though_quiet"
IMPORT_THOUGH_LOCKED = "import_though_locked"
DONE_UNCHECKED = "done_unchecked"
DONE_EARLY = "done_early"
END_EARLY = "end_early"
END_BEFORE_DONE = "end_before_done"
KEEP_THE_ERA = "keep_the_era"


class Part(NamedTuple):
    """A coordinating partition, as ``apply`` left it."""

    phase: str
    knows: bool  # whether it has the key
    owner: int = NOBODY
    is_claimed: bool = False  # whether the key has an epoch here
    age: int = 0  # of the last renewal, in log time
    gap: int = 0  # true time since the last entry
    quiet: int = 0
    is_locked: bool = False
    position: int | None = None
    granted: int | None = None


class Sent(NamedTuple):
    """A record on its way."""

    kind: str  # claim, beat, grant or import
    at: str  # "S" or "D"
    client: int
    age: int = 0
    is_late: bool = False  # whether it names an earlier epoch than the key's
    data: tuple = ()  # position and granted of an import


class World(NamedTuple):
    """Both partitions, and what no log shows."""

    source: Part
    target: Part
    sent: frozenset
    leases: tuple  # of each client: where, and what is left; or None
    final: tuple | None  # what the key was when it was final first
    handed: int  # offsets that were granted, as bits


class LayoutModel:
    """S1, S3, S4, S7 over both partitions, and that what is final never changes.

    Args:
        shrinks: Whether the key moves to partition 0, from one that is retired.
        resets: Whether the source may be Reset before the fence.
        stages: Whether a set position has locked the key, and is resolved later.
        again: Whether the target knows the key from an earlier life: the Final of a
            change to fewer partitions never reached it.
        in_flight: Most records on their way.
        mistake: What a writer does wrong.
    """

    def __init__(
        self,
        *,
        shrinks=False,
        resets=False,
        stages=False,
        again=False,
        in_flight=1,
        mistake=None,
    ):
        self.shrinks, self.resets, self.stages = shrinks, resets, stages
        self.again, self.in_flight, self.mistake = again, in_flight, mistake
        self.places = {"S": 1, "D": 0} if shrinks else {"S": 0, "D": 1}
        self.counts = (2, 1) if shrinks else (1, 2)
        self.append = cache(self._append)
        self.judge = cache(self._judge)

    def start(self):
        lock = self.stages
        source = Part(UNFENCED, knows=True, is_claimed=True, is_locked=lock)
        target = Part(UNFENCED, knows=self.again)
        return World(source, target, frozenset(), (None, None), None, 0)

    # --- what must hold

    def broken(self, world):
        if sum(lease is not None for lease in world.leases) > 1:
            return "S4: two use the key at one instant"
        _, data = self.judge(world.source)
        if world.final is not None and world.source.knows and world.final != data:
            return "10.3: what is final has changed"
        return None

    def _judge(self, part):
        """Return whether an importer finds the key final, and what it finds."""
        data = (part.position, part.granted)
        if not part.knows or part.phase == UNFENCED:
            return False, data
        state = self.state("S", part)
        if self.mistake == IMPORT_BEFORE_FINAL:
            return is_moving(state, KEY), data
        if self.mistake == IMPORT_THOUGH_QUIET:
            state.quiet_until_ms = None
        if self.mistake == IMPORT_THOUGH_LOCKED:
            state.keys[KEY].lock = None
        return is_final(state, KEY), data

    # --- what may happen

    def steps(self, world):
        for label, after in self._steps(world):
            is_fixed, data = self.judge(after.source)
            if is_fixed and after.final is None:
                yield label, after._replace(final=data)
            else:
                yield label, after

    def _steps(self, world):
        yield "a tick", self._tick(world)
        for at in "SD":
            part = self.part(world, at)
            if part.gap and (part.owner != NOBODY or part.quiet):
                yield f"any entry in {at}", self._land(world, at, None)[0]
        yield from self._before(world)
        yield from self._change(world)
        if len(world.sent) < self.in_flight:
            for sent in self._sends(world):
                if sent not in world.sent:
                    after = world._replace(sent=world.sent | {sent})
                    yield f"{sent.kind} of {sent.client} sent to {sent.at}", after
        for sent in world.sent:
            yield from self._arrives(world, sent)

    def _tick(self, world):
        parts = [
            part._replace(gap=min(STALE, part.gap + 1))
            if part.owner != NOBODY or part.quiet
            else part
            for part in (world.source, world.target)
        ]
        leases = tuple(
            None if lease is None or lease[1] == 1 else (lease[0], lease[1] - 1)
            for lease in world.leases
        )
        sent = frozenset(
            each._replace(age=min(LEASE, each.age + 1))
            if each.kind in {"claim", "beat"}
            else each
            for each in world.sent
        )
        return world._replace(
            source=parts[0], target=parts[1], leases=leases, sent=sent
        )

    def _before(self, world):
        """Yield what may happen to the source apart from clients."""
        source = world.source
        if self.resets and source.phase == UNFENCED and not source.quiet:
            after = source._replace(owner=NOBODY, age=0, gap=0, quiet=STALE)
            yield "the source is Reset", world._replace(source=after)
        if source.is_locked:
            after, _ = self._land(world, "S", ("resolve",))
            yield "the set position is resolved", after
        if source.owner != NOBODY:
            client = source.owner
            after, effect = self._land(world, "S", ("release", client))
            if effect == "released":
                leases = _with(after.leases, client, None)
                yield f"{client} releases in S", after._replace(leases=leases)

    def _change(self, world):
        """Yield the records of the change; partition 0 is fenced first."""
        source, target = world.source, world.target
        first, other = ("D", "S") if self.shrinks else ("S", "D")
        if self.part(world, first).phase == UNFENCED:
            yield "the first fence", self._land(world, first, ("fence",))[0]
        elif self.part(world, other).phase == UNFENCED:
            yield "the other fence", self._land(world, other, ("fence",))[0]
        if UNFENCED in {source.phase, target.phase}:
            return
        is_fixed, _ = self.judge(source)
        is_imported = target.knows or not source.knows
        is_due = (is_fixed or not source.knows) and is_imported and not source.quiet
        is_wrong = self.mistake in {DONE_UNCHECKED, DONE_EARLY}
        if target.phase == OPEN and (is_due or is_wrong):
            count = int(source.knows) if self.mistake != DONE_UNCHECKED else 0
            yield "the source is done", self._land(world, "D", ("done", count))[0]
        may_end = target.phase != OPEN or self.mistake == END_BEFORE_DONE
        if source.phase == OPEN and may_end:
            yield "the change ends in S", self._land(world, "S", ("final",))[0]
        if target.phase == DONE or (target.phase == OPEN and self.mistake == END_EARLY):
            yield "the change ends in D", self._land(world, "D", ("final",))[0]

    def _sends(self, world):
        for at in "SD":
            part = self.part(world, at)
            for client in CLIENTS:
                yield Sent("claim", at, client)
                if part.owner == client:
                    yield Sent("beat", at, client)
                    yield Sent("grant", at, client)
        is_fixed, data = self.judge(world.source)
        if is_fixed:
            yield Sent("import", "D", NOBODY, data=data)

    def _arrives(self, world, sent):
        gone = world._replace(sent=world.sent - {sent})
        after, effect = self._land(gone, sent.at, sent)
        label = f"{sent.kind} of {sent.client} lands in {sent.at}: {effect}"
        if effect in {"claimed", "renewed"}:
            after = self._renewed(after, sent)
        if effect == "claimed":
            after = self._claimed(after, sent)
        if effect == "granted":
            before = _head(self.part(world, sent.at))
            if world.handed >> before & 1:
                raise Broken("S3: granted twice")
            after = after._replace(handed=world.handed | 1 << before)
        yield label, after

    def _renewed(self, world, sent):
        left = LEASE - sent.age
        lease = world.leases[sent.client]
        is_longer = lease is None or lease[0] != sent.at or lease[1] < left
        if left <= 0 or not is_longer:
            return world
        return world._replace(leases=_with(world.leases, sent.client, (sent.at, left)))

    def _claimed(self, world, sent):
        """Records of earlier claims of the key here name another epoch from now on."""
        if sent.at == "D" and world.source.knows and world.source.is_claimed:
            source = self.state("S", world.source).token(KEY)
            if not self.state("D", world.target).token(KEY) > source:
                raise Broken("S7: a token that does not grow")
        late = frozenset(
            each._replace(is_late=True)
            if each.at == sent.at and each.kind in {"beat", "grant"}
            else each
            for each in world.sent
        )
        return world._replace(sent=late)

    # --- the fold

    def part(self, world, at):
        return world.source if at == "S" else world.target

    def _land(self, world, at, what):
        if isinstance(what, Sent):
            what = (what.kind, what.client, what.is_late, what.data)
        part, effect = self.append(at, self.part(world, at), what)
        if at == "S":
            return world._replace(source=part), effect
        return world._replace(target=part), effect

    def _append(self, at, part, what):
        """Fold one entry with the product; return the partition and the verdict."""
        state = self.state(at, part)
        record = None if what is None else self._record(at, part, what)
        entry = LogEntry(
            offset=OFFSETS[at][NEXT_OFFSET],
            leader_epoch=1,
            timestamp_ms=NOW_MS + part.gap * H_MS,
            timestamp_type=1,
            value=b"" if record is None else encode(record),
        )
        (transition,) = apply(state, entry)
        return self._view(state), transition.effect or transition.reason

    def _record(self, at, part, what):
        kind, *rest = what
        before, after = self.counts
        if kind == "fence":
            era = BASE if self.mistake == KEEP_THE_ERA else NEXT
            return layout_fence(after, before, generation=NEXT, era=era, h=H_MS)
        if kind == "done":
            return layout_done(rest[0], source=self.places["S"])
        if kind == "final":
            return layout_final()
        if kind == "resolve":
            return resolve(commit=True)
        client = f"c{rest[0]}"
        if kind == "claim":
            generation = BASE if part.phase == UNFENCED else NEXT
            return claim(client, generation=generation)
        if kind == "import":
            position, granted = rest[2]
            item = imported(KEY, position, granted)
            return layout_import(item, source=self.places["S"])
        if kind == "release":
            return release(OFFSETS[at][EPOCH], client=client)
        epoch = OFFSETS[at][LATE_EPOCH if rest[1] else EPOCH]
        if kind == "beat":
            return beat(epoch, 1 if at == "S" else None, client=client)
        offset = _head(part)
        return messages(epoch, offset, min(offset, GRANTS - 1), client=client)

    def state(self, at, part):
        """Return the product's state of a partition."""
        before, after = self.counts
        place, is_source = self.places[at], at == "S"
        state = WorldState(
            place,
            next_offset=OFFSETS[at][NEXT_OFFSET],
            leader_epoch=1,
            epoch_time_ms=NOW_MS,
            log_time_ms=NOW_MS,
            append_time_ms=NOW_MS,
        )
        if part.phase == UNFENCED:
            self._set_before(state, at)
        else:
            era = BASE if self.mistake == KEEP_THE_ERA else NEXT
            state.config = config(NEXT, era=era, h=H_MS, k=after, level=2)
            state.eras = ((OFFSETS[at][EPOCH] + 1, BASE),) if is_source else ()
            sources = ()
            if not is_source:
                done_ms = None if part.phase == OPEN else NOW_MS
                sources = (LayoutSource(self.places["S"], int(part.knows), done_ms),)
            if part.phase != OVER:
                state.layout = Layout(OP, before, 10, sources)
        if part.quiet:
            state.quiet_until_ms = NOW_MS + (part.quiet - 1) * H_MS + 1
        if part.knows:
            state.keys[KEY] = self._key_state(at, part)
            state.groups["g"] = GroupState()
        state.rebuild_derived()
        return state

    def _set_before(self, state, at):
        """Set what a partition has before its fence."""
        before, _ = self.counts
        if at == "D" and not self.shrinks and not self.again:
            return  # a partition that was never used
        state.config = config(BASE, era=BASE, h=H_MS, k=before, level=2)
        if at == "D" and self.again:
            state.layout = Layout(ident("earlier"), 2, 10, ())

    def _key_state(self, at, part):
        known = KeyState(
            owner=None,
            epoch=OFFSETS[at][EPOCH] if part.is_claimed else 0,
            epoch_leader_epoch=1 if part.is_claimed else 0,
            renewed_ms=NOW_MS - part.age * H_MS,
            heartbeat_interval_ms=H_MS,
            active_ms=NOW_MS,
            position=part.position,
            granted=part.granted,
        )
        if part.owner != NOBODY:
            name = f"c{part.owner}"
            known.owner = Owner(name, ident(name))
        if part.is_locked:
            known.lock = Lock(OP, ident("plan"), 0, None)
        return known

    def _view(self, state):
        """Return what matters of the product's state."""
        layout, known = state.layout, state.keys.get(KEY)
        is_new = state.config is not None and state.config.generation == NEXT
        phase = OVER if is_new else UNFENCED
        if is_new and layout is not None:
            is_done = all(each.done_ms is not None for each in layout.sources)
            phase = DONE if layout.sources and is_done else OPEN
        quiet_ms = 0
        if state.quiet_until_ms is not None:
            quiet_ms = state.quiet_until_ms - state.now_ms
        quiet = min(STALE, -(-quiet_ms // H_MS))
        if known is None:
            return Part(phase, knows=False, quiet=quiet)
        owner = NOBODY if known.owner is None else int(known.owner.client_id[1:])
        age = min(STALE, known.age_ms(state.now_ms) // H_MS)
        return Part(
            phase,
            knows=True,
            owner=owner,
            is_claimed=known.epoch != 0,
            age=age if owner != NOBODY else 0,
            quiet=quiet,
            is_locked=known.lock is not None,
            position=known.position,
            granted=known.granted,
        )

    def has_owner_there(self, world):
        """Return whether the key has arrived: somebody owns it in the target."""
        return world.target.owner != NOBODY


def _head(part):
    """Return the first offset that can still be granted."""
    return max(part.position or 0, part.granted or 0)


def _with(items, number, item):
    return (*items[:number], item, *items[number + 1 :])


def stuck_states(model, *, states_max=2_000_000):
    """Return how many states there are, and those without a way to an owner."""
    first = model.start()
    before, queue = {first: []}, [first]
    while queue:
        state = queue.pop()
        assert len(before) < states_max, "the bounds are too wide"
        for _, after in model.steps(state):
            if after not in before:
                before[after] = []
                queue.append(after)
            before[after].append(state)
    reached = {state for state in before if model.has_owner_there(state)}
    queue = list(reached)
    while queue:
        for state in before[queue.pop()]:
            if state not in reached:
                reached.add(state)
                queue.append(state)
    return len(before), [state for state in before if state not in reached]
