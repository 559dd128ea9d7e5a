"""A key that stays where a log loses a change of the count (PROTOCOL 10.9).

Partition 1 of two, which become four. Its log goes back once behind its Config, to any
record but a claim, in a new leader epoch. A member claims the key by what it has read,
which may be old: of partition 1, and of the others apart from that. Its claim lands at
any time later. What the member may claim, the records of the change, and the fold are
the product's.

Judged are the claims of a member that has read of the change, in any partition. One
that has not read of it, and whose claim is late or that reads late, is excused: its
token may be below those of the change.
"""

from functools import cache
from typing import NamedTuple

from logkit import (
    Log,
    claim,
    layout_done,
    layout_fence,
    layout_final,
    release,
)
from search import Broken

from kafka_marshal.engine.placement import Placement
from kafka_marshal.engine.replica import Replica
from kafka_marshal.protocol import layout_steps
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.placement import newest
from kafka_marshal.protocol.types import Key, Token

BEFORE, AFTER = 2, 4
PLACE = 1
KEY = next(
    key
    for key in (Key("g", "t", number) for number in range(99))
    if place_of(key, partition_count=BEFORE) == PLACE
    and place_of(key, partition_count=AFTER) == PLACE
)
NONE, OPEN, OVER = range(3)
"""How far the change is in the other partitions."""
EARLY_MAX, LATE_MAX = 2, 8
"""Behind how many entries claims land before the change is in the partition, and later.
There is room for the change, and for a claim behind it."""
SENDER = {"client_id": "m1", "group_id": "marshal", "incarnation": b"m" * 16, "seq": 1}
Entries = tuple[tuple[int, bytes], ...]
"""Leader epoch and value of each entry behind the Config."""


class World(NamedTuple):
    """The logs, what the member has read, and its claim that is on its way.

    Attributes:
        others: How far the change is elsewhere.
        entries: What partition 1 has.
        has_lost: Whether its log went back.
        best: The largest token of the key.
        seen: What the member has read of partition 1.
        knows: How far the change is in what it has read of the others.
        sent: Generation of its claim, and whether it had read of the change.
    """

    others: int = NONE
    entries: Entries = ()
    has_lost: bool = False
    best: Token | None = None
    seen: Entries = ()
    knows: int = NONE
    sent: tuple[int, bool] | None = None


class LostChangeModel:
    """S7, and a way to a claim under the change."""

    def __init__(self):
        self.fold = cache(_fold)
        self.elsewhere = cache(_elsewhere)
        self.due = cache(self._due)
        self.generation = cache(self._generation)

    def start(self):
        return World()

    def broken(self, world):
        del world

    def is_over(self, world):
        """Return whether the change has ended, and the key is claimed under it."""
        state = self.fold(world.entries)
        is_new = world.best is not None and world.best.era == state.config.era
        return world.others == OVER and state.config.generation > 1 and is_new

    def steps(self, world):
        yield "the member reads its partition", world._replace(seen=world.entries)
        yield "it reads the others", world._replace(knows=world.others)
        state = self.fold(world.entries)
        if world.others == NONE:
            yield "fence the others", world._replace(others=OPEN)
        elif world.others == OPEN and state.config.generation > 1:
            yield "end the change in the others", world._replace(others=OVER)
        for value in self.due(world.entries, world.others):
            yield "the next record of the change", self._appended(world, value)
        is_late = state.config.generation > 1
        if len(world.entries) <= (LATE_MAX if is_late else EARLY_MAX):
            yield from self._claims(world)
        if not world.has_lost:
            for kept in range(len(world.entries)):
                back = world._replace(entries=world.entries[:kept], has_lost=True)
                known = self.fold(back.entries).keys.get(KEY)
                if known is None or known.owner is None:
                    yield f"the log goes back to {kept}", back

    def _appended(self, world, *values):
        epoch = int(world.has_lost)
        added = tuple((epoch, value) for value in values)
        return world._replace(entries=world.entries + added)

    def _claims(self, world):
        if world.sent is None:
            generation = self.generation(world.seen, world.knows)
            if generation is not None:
                has_read = world.knows > NONE or generation > 1
                sent = world._replace(sent=(generation, has_read))
                yield "the member sends a claim", sent
            return
        yield "its claim is lost", world._replace(sent=None)
        generation, has_read = world.sent
        state = self.fold(world.entries)
        if generation != state.config.generation:
            return  # refused
        offset = state.next_offset
        values = claim(key=KEY, generation=generation), release(offset, key=KEY)
        after = self._appended(world, *(encode(value) for value in values))
        token = self.fold(after.entries).token(KEY)
        if has_read and world.best is not None and token <= world.best:
            raise Broken("S7: a token that does not grow")
        best = token if world.best is None else max(world.best, token)
        yield "its claim lands", after._replace(best=best, sent=None)

    def _generation(self, seen, knows):
        """Return the generation of the claim of a member, None if it may not claim."""
        worlds = {**self.elsewhere(knows), PLACE: self.fold(seen)}
        replicas = {t: Replica(t, now_ms=0) for t in worlds}
        for t, replica in replicas.items():
            replica.world = worlds[t]
        places = Placement(replicas)
        places.follow(newest(worlds[0].config, worlds.values()))
        return None if places.is_between(KEY) else worlds[PLACE].config.generation

    def _due(self, entries, others):
        """Return the records of the change that somebody appends to partition 1."""
        worlds = {**self.elsewhere(others), PLACE: self.fold(entries)}
        reading = layout_steps.read(worlds)
        if reading is None:
            return ()
        steps = layout_steps.next_steps(reading)
        records = [
            layout_steps.fence_of(steps.change, sender=SENDER)
            for t in steps.fences
            if t == PLACE
        ]
        records += [
            layout_steps.final_of(each, sender=SENDER)
            for each in steps.finals
            if each.partition == PLACE
        ]
        return tuple(encode(record) for record in records)


def _fold(entries):
    log = Log(PLACE, k=BEFORE, level=2)
    for epoch, value in entries:
        log.append(value, epoch=epoch)
    return log.state


def _elsewhere(step):
    """Return the other partitions, as far as the change is there."""
    logs = {
        t: Log(t, configured=t < BEFORE, k=BEFORE, level=2)
        for t in range(AFTER)
        if t != PLACE
    }
    records = [layout_fence(AFTER, BEFORE)] if step > NONE else []
    for t, log in logs.items():
        for record in records:
            assert log.outcome_of(record) == "layout_fenced"
        if step == OVER:
            if t >= BEFORE:
                log.append(layout_done(0, source=t - BEFORE))
            assert log.outcome_of(layout_final()) == "layout_final"
    return {t: log.state for t, log in logs.items()}


# --- what members do wrong


def claim_where_the_fence_is_lost(patch):
    """A key that stays is claimed while its partition lacks the open change."""
    between = Placement.is_between

    def trusting(places, key):
        is_open = places.from_count is not None
        return between(places, key) and not (is_open and key == KEY)

    patch.setattr(Placement, "is_between", trusting)


def claim_where_a_change_that_has_ended_is_lost(patch):
    """Nobody notices that a partition lacks a change that has ended."""
    patch.setattr("kafka_marshal.engine.placement.unclaimed", lambda _: frozenset())


def leave_what_is_lost(patch):
    """Nobody restores a change that has ended."""
    patch.setattr(layout_steps, "lost_change", lambda _: None)
