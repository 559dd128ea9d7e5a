"""A key that moves between coordinating partitions, and two clients (PROTOCOL 10).

The fold is the product's ``apply``; the product also judges whether a key is final. The
model decides which claims, heartbeats, requests and records of changes may be sent. Any
process fences, imports and ends. A crash is a lease that is never used again.

A log may go back once, to any record (PROTOCOL 7.5, 10.9). Its owners have read that,
as has the owner in a source that lost its fence, once the target knows the key; 10.9
excuses others. Grants by lost records, or in such a source, may be repeated.

Records land at once; still the worlds cover any number of records in flight. A delayed
claim, heartbeat or request of the current epoch could have been sent right before, with
a longer lease; one of an earlier epoch, by any process, is appended at any time;
imports carry keys as they were at any time when they were final. With ``in_flight``,
records are delayed instead, so that a test can compare.

Three more reductions. Worlds that differ only by the names of the clients are one, so
names may swap in a trace. Each log gets an entry in each interval: a clock that stands
still without appends changes nothing, because the next entry moves it before its record
is judged; except in a log that went back (4.1), where a process must append an entry.
Times, in heartbeat intervals, saturate where they change nothing: an owner is stale
above two, a lease lasts two from its sending.
"""

from functools import cache
from typing import NamedTuple

from layoutfold import (
    CLIENTS,
    DONE,
    ENTRY,
    GRANTS,
    LEASE,
    NOBODY,
    OPEN,
    OVER,
    STALE,
    TICK,
    LayoutFold,
    Part,
    head_of,
)
from search import Broken

# Mistakes of tools and readers in the model.
# A key is imported that its owner may still use.
IMPORT_BEFORE_FINAL = "import_before_final"
# A key is imported before a Reset has waited for leases.
IMPORT_THOUGH_QUIET = "import_though_quiet"
# A key is imported before a set position is resolved.
IMPORT_THOUGH_LOCKED = "import_though_locked"
DONE_UNCHECKED = "done_unchecked"  # A Done has too few keys.
# A Done is sent although keys are missing; planted with count_no_imports.
DONE_EARLY = "done_early"
# A Final is sent although a source is not done; planted with end_with_an_open_source.
END_EARLY = "end_early"
END_BEFORE_DONE = "end_before_done"  # A Final is sent before all sources are done.
# A fence has the era of the Config before it; planted with keep_the_era.
KEEP_THE_ERA = "keep_the_era"
KEEP_THE_LEASE = "keep_the_lease"  # An owner continues although its log went back.
# An owner in a source without its fence continues although the target has the key.
USE_WHAT_IS_IMPORTED = "use_what_is_imported"
# After the next fence, no process restores a Final that partition 0 has lost.
FORGET_THE_END = "forget_the_end"

NO_LEASE = (NOBODY, 0)
TRAVELS = frozenset({"claim", "beat", "grant"})


class Cut(NamedTuple):
    """The truncation of a log (PROTOCOL 7.5)."""

    at: int  # index of the partition
    lost_fence: bool
    done: int  # change whose target some process may have read as done


class World(NamedTuple):
    """The partitions, and facts that no log shows."""

    parts: tuple[Part, ...]
    leases: tuple  # of each client: index of a partition, and the remaining time
    final: tuple | None = None  # change, and the key when it was first final
    finals: frozenset = frozenset()  # keys that imports may carry, with the change
    handed: tuple = ()  # of each partition: offsets that it granted, as bits
    best: tuple | None = None  # partition and token of the last claim
    mark: tuple | None = None  # partition whose log may go back, with its state then
    cut: Cut | None = None
    sent: frozenset = frozenset()  # records in flight: index, record, age


class LayoutModel:
    """S1, S3, S4, S7 over all partitions, and a final key never changes.

    Args:
        counts: The partition counts, in order.
        begin: The first change has ended, except for the Final in its source.
        resets: Whether the key's partition may be Reset before the first fence.
        stages: Whether a set position has locked the key, and is resolved later.
        handoffs: Whether owners name successors, and offer them the key before.
        cuts: Partitions of which one may lose the end of its log, once.
        others: Whether partition 0 may get the fence of another operation with the
            same count, after its log went back.
        losses: Kinds of records that may be the first lost one; None for all.
        grants: Number of offsets that can be granted.
        in_flight: Most records in flight; 0 if records land at once.
        mistake: The mistake of a writer or reader, if any.
    """

    def __init__(
        self,
        *,
        counts=(1, 2),
        begin=0,
        resets=False,
        stages=False,
        handoffs=False,
        cuts=(),
        others=False,
        losses=None,
        grants=GRANTS,
        in_flight=0,
        mistake=None,
    ):
        self.counts, self.begin = counts, begin
        self.resets, self.stages, self.handoffs = resets, stages, handoffs
        self.cuts, self.losses, self.in_flight = cuts, losses, in_flight
        self.others, self.mistake = others, mistake
        self.fold = LayoutFold(
            counts, grants=grants, keeps_the_era=mistake == KEEP_THE_ERA
        )
        self.places = self.fold.places
        self.append = cache(self.fold.append)
        self.of_clients = cache(self._of_clients)
        self.judge = cache(self._judge)
        self.token = cache(self.fold.token)

    def start(self):
        parts = []
        for at, place in enumerate(self.fold.partitions):
            step = self.begin if place < max(self.counts[: self.begin + 1]) else -1
            is_there = at == self.places[self.begin]
            is_left = self.begin > 0 and at == self.places[self.begin - 1]
            parts.append(
                Part(
                    step,
                    phase=OPEN if is_left else OVER,
                    knows=is_there or is_left,
                    claimed=self.begin if is_there else self.begin - is_left,
                    is_locked=self.stages and is_there,
                )
            )
        leases = tuple(NO_LEASE for _ in CLIENTS)
        return World(tuple(parts), leases, handed=(0,) * len(parts))

    def is_there(self, world):
        """Return whether the key has an owner in its last partition."""
        part = world.parts[self.places[-1]]
        return part.owner != NOBODY and part.step == len(self.counts) - 1

    # --- invariants

    def broken(self, world):
        used = [at for at, left in world.leases if left]
        if len(used) > 1:
            return "S4: two use the key at one instant"
        if any(self._target_knows(world, at) for at in used):
            return "S4: the key is used in its source after it was imported"
        for at, part in enumerate(world.parts):
            if world.final is not None and self._change_from(part, at):
                step, data = world.final
                if part.knows and part.step == step and data != _data(part):
                    return "10.3: what is final has changed"
        return None

    def _change_from(self, part, at):
        """Return the change by which the key moves away from a partition, else 0."""
        is_source = part.step > 0 and at == self.places[part.step - 1]
        return part.step if is_source and at != self.places[part.step] else 0

    def _target_knows(self, world, at):
        """Return whether the target of the key's move from here knows the key."""
        part = world.parts[at]
        if self._is_behind(world, at):
            return any(each.step > part.step and each.knows for each in world.parts)
        step = self._change_from(part, at)
        target = world.parts[self.places[step]]
        return step > 0 and target.step == step and target.knows

    def _is_behind(self, world, at):
        """Return whether a partition has lost a fence that another one has."""
        part, cut = world.parts[at], world.cut
        is_cut = cut is not None and cut.at == at and cut.lost_fence
        return is_cut and any(each.step > part.step for each in world.parts)

    def _judge(self, at, part):
        """Return whether the key is final for a process that imports."""
        if not part.knows or not self._change_from(part, at) or part.phase == OVER:
            return False
        if self.mistake == IMPORT_BEFORE_FINAL:
            return True
        if self.mistake == IMPORT_THOUGH_QUIET:
            part = part._replace(quiet=0)
        if self.mistake == IMPORT_THOUGH_LOCKED:
            part = part._replace(is_locked=False)
        return self.fold.is_final(at, part)

    # --- possible steps

    def steps(self, world):
        for label, after in self._steps(world):
            noted = after if after.parts is world.parts else self._noted(after)
            yield label, _renamed(noted)

    def _noted(self, world):
        """Return the world with the key, if it is final now, added to ``finals``."""
        for at, part in enumerate(world.parts):
            if self.judge(at, part):
                found = (part.step, _data(part))
                if world.final is None or world.final[0] != part.step:
                    world = world._replace(final=found)
                if found not in world.finals:
                    world = world._replace(finals=world.finals | {found})
        return world

    def _steps(self, world):
        yield "a tick", self._tick(world)
        if world.mark is not None:
            yield "the log goes back", self._cut(world)
        if self.resets:
            yield from self._reset(world)
        for at, part in enumerate(world.parts):
            for what in self.of_clients(at, part):
                if self.in_flight and what[0] in TRAVELS:
                    yield from self._is_sent(world, at, what)
                else:
                    yield from self._lands(world, at, what)
            for what in self._of_change(world, at):
                yield from self._lands(world, at, what)
        for step, data in world.finals:
            at, what = self.places[step], ("import", step, data)
            if self.in_flight:
                yield from self._is_sent(world, at, what)
            else:
                yield from self._lands(world, at, what)
        for each in world.sent:
            at, what, age = each
            rest = world._replace(sent=world.sent - {each})
            yield (at, what, "is lost"), rest
            yield from self._lands(rest, at, what, age=age)

    def _is_sent(self, world, at, what):
        if len(world.sent) < self.in_flight:
            sent = world.sent | {(at, what, 0)}
            yield (at, what, "is sent"), world._replace(sent=sent)

    def _tick(self, world):
        parts = tuple(
            self.append(at, part, TICK)[0] if part.has_clock else part
            for at, part in enumerate(world.parts)
        )
        leases = tuple(
            (at, left - 1) if left > 1 else NO_LEASE for at, left in world.leases
        )
        sent = frozenset(
            (at, what, min(LEASE, age + 1)) if what[0] in {"claim", "beat"} else each
            for each in world.sent
            for at, what, age in (each,)
        )
        return world._replace(parts=parts, leases=leases, sent=sent)

    def _reset(self, world):
        at = self.places[0]
        part = world.parts[at]
        if part.step == 0 and part.knows and not part.quiet:
            part = part._replace(owner=NOBODY, age=0, quiet=STALE)
            parts = _with(world.parts, at, part)
            yield "the source is Reset", world._replace(parts=parts)

    # --- appended records

    def _of_clients(self, at, part):
        """Return the records of clients that may change a partition.

        They do not depend on other partitions.
        """
        records = [("resolve",)] if part.is_locked else []
        if part.is_cut:
            records.append(ENTRY)
        for client in CLIENTS:
            records += [("claim", client), ("beat", client, True)]
            records.append(("grant", client, True))
            if part.owner == client:
                records += [("beat", client, False), ("grant", client, False)]
                records.append(("release", client, NOBODY))
            if self.handoffs:
                records.append(("ready", client))
                for kind in ("release", "offer") if part.owner == client else ():
                    records += [(kind, client, other) for other in CLIENTS]
        if self.in_flight:
            return records
        return [what for what in records if self._matters(at, part, what)]

    def _matters(self, at, part, what):
        after, effect = self.append(at, part, what)
        return after != part or effect in EFFECTS

    def _of_change(self, world, at):
        """Yield the fence, Done and Final that a process may append to a partition."""
        part, first = world.parts[at], world.parts[0]
        step = max(1, part.step + 1)
        while at and step < len(self.counts) and not self.fold.is_fenced(at, step):
            step += 1
        if step < len(self.counts) and (at == 0 or step <= first.step):
            yield "fence", step, first.op if at else 0
            if at == 0 and self.others and world.cut is not None:
                yield "fence", step, 1
        step = part.step
        if step < 1 or part.phase == OVER:
            return
        source = world.parts[self.places[step - 1]]
        target = world.parts[self.places[step]]
        if at == self.places[step] and part.phase == OPEN:
            has_been_final = any(each == step for each, _ in world.finals)
            is_due = target.knows or (source.step == step and not source.knows)
            is_quiet = source.quiet and not has_been_final
            is_due = is_due or self.mistake in {DONE_UNCHECKED, DONE_EARLY}
            if is_due and source.step >= step and not is_quiet:
                is_counted = source.knows and self.mistake != DONE_UNCHECKED
                yield "done", int(is_counted)
            if world.cut is not None and has_been_final:
                yield "done", 1  # by a process that has read a lost import
        if self._may_end(world, at):
            yield ("final",)

    def _may_end(self, world, at):
        """Return whether a process may have read all Dones, and append a Final."""
        step = world.parts[at].step
        target = world.parts[self.places[step]]
        if at == self.places[step]:
            return target.phase == DONE or self.mistake == END_EARLY
        if target.step == step and target.phase in {DONE, OVER}:
            return True
        if self.mistake == END_BEFORE_DONE:
            return True
        if world.cut is not None and world.cut.done == step:
            return True
        # There is a later fence, so partition 0 has ended this change.
        is_over = any(part.step > step for part in world.parts)
        return is_over and self.mistake != FORGET_THE_END

    # --- effects of a record

    def _lands(self, world, at, what, *, age=0):
        before = world.parts[at]
        part, effect = self.append(at, before, what)
        after = world
        if part != before:
            after = world._replace(parts=_with(world.parts, at, part))
        if effect in EFFECTS:
            after = EFFECTS[effect](self, after, at, what, part=before, age=age)
        if after is world:
            return
        yield (at, what, effect), after
        may_be_lost = world.mark is None and world.cut is None and at in self.cuts
        if may_be_lost and (self.losses is None or what[0] in self.losses):
            mark = (at, before._replace(is_cut=True, leader=2))
            yield (at, what, f"{effect}, may be lost"), after._replace(mark=mark)

    def _renewed(self, world, at, what, *, part, age):
        del part
        client, left = what[1], LEASE - age
        is_longer = world.leases[client][0] != at or world.leases[client][1] < left
        if left <= 0 or not is_longer:
            return world
        is_used = self.mistake == USE_WHAT_IS_IMPORTED
        if self._is_behind(world, at) and self._target_knows(world, at) and not is_used:
            return world  # the owner reads that the key is in the target
        return world._replace(leases=_with(world.leases, client, (at, left)))

    def _claimed(self, world, at, what, *, part, age):
        world = self._renewed(world, at, what, part=part, age=age)
        token = self.token(at, world.parts[at])
        if world.best is not None:
            where, best = world.best
            # Offsets grow within a leader epoch; here all claims have one offset.
            if where != (at, part.leader) and token <= best:
                if self._is_behind(world, at):
                    return world  # sinks refuse this token
                raise Broken("S7: a token that does not grow")
        late = frozenset(
            (t, (kind[0], kind[1], True), sent_age)
            if t == at and kind[0] in {"beat", "grant"}
            else (t, kind, sent_age)
            for t, kind, sent_age in world.sent
        )
        return world._replace(best=((at, part.leader), token), sent=late)

    def _granted(self, world, at, what, *, part, age):
        del what, age
        offset = head_of(part)
        if self._is_behind(world, at) and self._target_knows(world, at):
            return world
        if any(bits >> offset & 1 for bits in world.handed):
            raise Broken("S3: granted twice")
        bits = world.handed[at] | 1 << offset
        return world._replace(handed=_with(world.handed, at, bits))

    def _released(self, world, at, what, *, part, age):
        del at, part, age
        return world._replace(leases=_with(world.leases, what[1], NO_LEASE))

    def _imported(self, world, at, what, *, part, age):
        """Apply an import: if its source lost the fence, the key was not final."""
        del at, part, age
        source = self.places[what[1] - 1]
        cut = world.cut
        if cut is None or cut.at != source or not cut.lost_fence:
            return world
        if self.mistake != USE_WHAT_IS_IMPORTED:
            world = world._replace(leases=_without(world.leases, source))
        bits = _below(world.handed[source], _head(what[2]))
        return world._replace(handed=_with(world.handed, source, bits))

    def _ended(self, world, at, what, *, part, age):
        del at, what, part, age
        return world if world.cut is None else self._without_lost(world)

    # --- a log that goes back

    def _cut(self, world):
        """Truncate a partition; an owner there reads that, and stops."""
        at, mark = world.mark
        part, final = world.parts[at], world.final
        is_target = part.step > 0 and at == self.places[part.step]
        is_done = is_target and part.phase in {DONE, OVER}
        lost_fence = any(each.step > mark.step for each in world.parts)
        if final is not None and at == self.places[final[0] - 1]:
            final = None
        bits = _below(world.handed[at], head_of(mark)) if mark.knows else 0
        is_read = self.mistake != KEEP_THE_LEASE
        after = world._replace(
            parts=_with(world.parts, at, mark),
            leases=_without(world.leases, at) if is_read else world.leases,
            final=final,
            handed=_with(world.handed, at, bits),
            mark=None,
            cut=Cut(at, lost_fence, part.step if is_done else NOBODY),
        )
        return self._without_lost(after)

    def _without_lost(self, world):
        """Drop all grants where the only copy of the key is lost."""
        last = max(part.step for part in world.parts)
        copies = (
            part.knows and (part.step == last or at == self.places[part.step])
            for at, part in enumerate(world.parts)
        )
        return world if any(copies) else world._replace(handed=(0,) * len(world.parts))


EFFECTS = {
    "renewed": LayoutModel._renewed,
    "claimed": LayoutModel._claimed,
    "granted": LayoutModel._granted,
    "released": LayoutModel._released,
    "imported": LayoutModel._imported,
    "layout_final": LayoutModel._ended,
}


def _data(part):
    """Return the part of the key that an import carries."""
    return (part.position, part.granted, part.successor)


def _head(data):
    return max(data[0] or 0, data[1] or 0)


def _below(bits, offset):
    return bits & ((1 << offset) - 1)


def _with(items, number, item):
    return (*items[:number], item, *items[number + 1 :])


def _without(leases, at):
    return tuple(NO_LEASE if lease[0] == at else lease for lease in leases)


def _renamed(world):
    """Return the same one of two worlds that differ only by names of clients."""
    parts, leases = tuple(map(_swap_part, world.parts)), world.leases[::-1]
    names, others = (world.parts, world.leases), (parts, leases)
    if names != others:  # the worlds differ only by the names of clients
        return world if names < others else _swapped(world)
    other = _swapped(world)
    return world if _names(world) <= _names(other) else other


def uncovered(worlds, others):
    """Return the ``others`` that no world covers.

    A world covers another one if they are equal except for the records in flight, and
    its leases are at least as long, which is less safe.
    """
    known = {}
    for world in worlds:
        for each in (world, _swapped(world)):
            known.setdefault(_apart(each), set()).add(each.leases)
    return [
        other
        for other in others
        if not any(
            _last_as_long(leases, other.leases)
            for leases in known.get(_apart(other), ())
        )
    ]


def _apart(world):
    return world._replace(leases=(), sent=frozenset())


def _last_as_long(leases, others):
    return all(
        not left or (lease[0] == at and lease[1] >= left)
        for lease, (at, left) in zip(leases, others, strict=True)
    )


def _names(world):
    """Return the fields with names of clients, in a form that can be ordered."""
    return (
        world.mark and world.mark[1],
        sorted((step, data[2]) for step, data in world.finals),
        sorted(str(each) for each in world.sent),
    )


def _swapped(world):
    mark = world.mark
    return world._replace(
        parts=tuple(map(_swap_part, world.parts)),
        leases=world.leases[::-1],
        final=world.final and (world.final[0], _swap_data(world.final[1])),
        finals=frozenset((step, _swap_data(data)) for step, data in world.finals),
        mark=mark and (mark[0], _swap_part(mark[1])),
        sent=frozenset(_swap_sent(each) for each in world.sent),
    )


def _other(client):
    return client if client == NOBODY else 1 - client


@cache
def _swap_part(part):
    return part._replace(
        owner=_other(part.owner),
        successor=_other(part.successor),
        offered=_other(part.offered),
    )


def _swap_data(data):
    return (*data[:2], _other(data[2]))


def _swap_sent(sent):
    at, what, age = sent
    if what[0] == "import":
        return at, (*what[:2], _swap_data(what[2])), age
    return at, (what[0], _other(what[1]), *what[2:]), age
