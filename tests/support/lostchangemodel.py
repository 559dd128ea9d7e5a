"""A key that stays where a log loses changes of the count, or Configs (PROTOCOL 10.9).

The key is in partition 1. Its log goes back once, to any record after its first Config
but a claim, in a new leader epoch. A member claims the key by its readings of partition
1 and of the other partitions, which may be old, each independently. Its claim lands at
any later time. The fold, the records of the changes, and whether the member may claim
are the product's.

The model judges the claims of a member that has read of the Config with the largest
token, in any partition. A member that has not, because it reads late or its claim is
late, is excused: its token may be lower.
"""

from functools import cache
from typing import NamedTuple

from logkit import (
    Log,
    claim,
    config,
    ident,
    layout_done,
    layout_fence,
    layout_final,
    release,
)
from search import Broken

from kafka_marshal.engine.placement import Placement
from kafka_marshal.engine.replica import Replica
from kafka_marshal.protocol import layout_reading, layout_steps, lost_changes
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.placement import newest
from kafka_marshal.protocol.types import Key, Token

PLACE = 1
KEY = next(
    key
    for key in (Key("g", "t", number) for number in range(99))
    if {place_of(key, partition_count=count) for count in (2, 4, 8)} == {PLACE}
)


class Stage(NamedTuple):
    """The next records of the other partitions.

    Attributes:
        generation: Generation of the new Config, or of the change that ends.
        before: The old count.
        after: The new count; the same if only other settings change.
        is_end: Whether the stage ends the change.
    """

    generation: int
    before: int
    after: int
    is_end: bool = False


def change(generation, before, after):
    """Return the two stages of a change of the count."""
    fenced = Stage(generation, before, after)
    return fenced, fenced._replace(is_end=True)


HISTORIES = {
    "a change": change(2, 2, 4),
    "two changes": (*change(2, 2, 4), *change(3, 4, 8)),
    "a change and back": (*change(2, 2, 4), *change(3, 4, 2)),
    "settings": (Stage(2, 2, 2),),
    "settings and a change": (Stage(2, 2, 2), *change(3, 2, 4)),
    "a change and settings": (*change(2, 2, 4), Stage(3, 4, 4)),
}
EARLY_MAX, LATE_MAX = 2, 8
"""Behind how many entries claims land at first, and under the second Config. There is
room for the change, and for a claim behind it. Of three Configs, each has one claim."""
SENDER = {"client_id": "m1", "group_id": "marshal", "incarnation": b"m" * 16, "seq": 1}
Entries = tuple[tuple[int, bytes], ...]
"""Leader epoch and value of each entry behind the Config."""


class Best(NamedTuple):
    """The largest token of the key, and the generation in force then."""

    token: Token
    generation: int


class World(NamedTuple):
    """The logs, the readings of the member, and its claim in flight.

    Attributes:
        others: Number of stages in the other partitions.
        entries: The log of partition 1.
        has_lost: Whether that log went back.
        best: The largest token of the key.
        seen: The entries of partition 1 that the member has read.
        knows: The number of stages of the others that the member has read.
        sent: Generation of the claim in flight, and the highest one read before.
    """

    others: int = 0
    entries: Entries = ()
    has_lost: bool = False
    best: Best | None = None
    seen: Entries = ()
    knows: int = 0
    sent: tuple[int, int] | None = None


class LostChangeModel:
    """S7, and a claim under the last Config stays reachable."""

    def __init__(self, history="a change"):
        self.stages = HISTORIES[history]
        self.fold = cache(_fold)
        self.elsewhere = cache(self._elsewhere)
        self.worlds = cache(self._worlds)
        self.due = cache(self._due)
        self.generation = cache(self._generation)

    def start(self):
        return World()

    def broken(self, world):
        del world

    def is_over(self, world):
        """Return whether all changes ended, and the last Config has a claim."""
        state, last = self.fold(world.entries), self.stages[-1].generation
        is_claimed = world.best is not None and world.best.generation == last
        return (
            world.others == len(self.stages)
            and (state.config.generation, state.layout) == (last, None)
            and is_claimed
        )

    def steps(self, world):
        yield "the member reads its partition", world._replace(seen=world.entries)
        yield "it reads the others", world._replace(knows=world.others)
        state = self.fold(world.entries)
        if self._may_continue(world, state):
            yield (
                "the others get the next stage",
                world._replace(others=world.others + 1),
            )
        for value in self.due(world.entries, world.others):
            after = self._appended(world, value)
            if _progress(self.fold(after.entries)) != _progress(state):  # not refused
                yield "the next record of the change", after
        if self._has_room(world.entries, state.config.generation):
            yield from self._claims(world)
        if not world.has_lost:
            for kept in range(len(world.entries)):
                back = world._replace(entries=world.entries[:kept], has_lost=True)
                known = self.fold(back.entries).keys.get(KEY)
                if known is None or known.owner is None:
                    yield f"the log goes back to {kept}", back

    def _has_room(self, entries, generation):
        if self.stages[-1].generation > 2:
            claimed = encode(claim(key=KEY, generation=generation))
            return all(value != claimed for _, value in entries)
        return len(entries) <= (LATE_MAX if generation > 1 else EARLY_MAX)

    def _may_continue(self, world, state):
        """Return whether the next stage may follow; an end needs partition 1 done."""
        if world.others == len(self.stages):
            return False
        stage, layout = self.stages[world.others], state.layout
        if not stage.is_end:
            return True
        is_done = layout is None or all(
            source.done_ms is not None for source in layout.sources
        )
        return state.config.generation >= stage.generation and is_done

    def _appended(self, world, *values):
        epoch = int(world.has_lost)
        added = tuple((epoch, value) for value in values)
        return world._replace(entries=world.entries + added)

    def _claims(self, world):
        if world.sent is None:
            generation = self.generation(world.seen, world.knows)
            if generation is not None:
                known = self.elsewhere(world.knows)[0].config.generation
                sent = world._replace(sent=(generation, max(generation, known)))
                yield "the member sends a claim", sent
            return
        yield "its claim is lost", world._replace(sent=None)
        generation, known = world.sent
        state, best = self.fold(world.entries), world.best
        if generation != state.config.generation:
            return  # refused
        offset = state.next_offset
        values = claim(key=KEY, generation=generation), release(offset, key=KEY)
        after = self._appended(world, *(encode(value) for value in values))
        token = self.fold(after.entries).token(KEY)
        has_grown = best is None or token > best.token
        if best is not None and not has_grown and known >= best.generation:
            raise Broken("S7: a token that does not grow")
        best = Best(token, generation) if has_grown else best
        yield "its claim lands", after._replace(best=best, sent=None)

    def _generation(self, seen, knows):
        """Return the generation for the member's claim, None if it may not claim."""
        worlds = self.worlds(seen, knows)
        replicas = {t: Replica(t, now_ms=0) for t in worlds}
        for t, replica in replicas.items():
            replica.world = worlds[t]
        placement = Placement(replicas)
        placement.follow(newest(worlds[0].config, worlds.values()))
        return None if placement.awaits_import(KEY) else worlds[PLACE].config.generation

    def _worlds(self, entries, others):
        return {**self.elsewhere(others), PLACE: self.fold(entries)}

    def _due(self, entries, others):
        """Return the records of changes that are due in partition 1."""
        worlds = self.worlds(entries, others)
        records = [lost_changes.lost_configs(worlds).get(PLACE)]
        reading = layout_reading.read(worlds)
        if reading is not None:
            records += self._of_change(layout_steps.next_steps(reading))
        return tuple(encode(record) for record in records if record is not None)

    def _of_change(self, steps):
        for t in steps.fences:
            if t == PLACE:
                yield layout_steps.fence_of(steps.change, sender=SENDER)
        for t, lost in steps.earlier:
            if t == PLACE:
                yield layout_steps.fence_of(lost, sender=SENDER)
        for each in steps.dones:
            if each.target == PLACE:
                yield layout_steps.done_of(steps.change, each, sender=SENDER)
        for each in steps.finals:
            if each.partition == PLACE:
                yield layout_steps.final_of(each, sender=SENDER)

    def _elsewhere(self, count):
        """Return the other partitions after ``count`` stages."""
        most = max(stage.after for stage in self.stages)
        logs = {
            t: Log(t, configured=t < 2, k=2, level=2) for t in range(most) if t != PLACE
        }
        for stage in self.stages[:count]:
            for t, log in logs.items():
                if t < max(stage.before, stage.after):
                    _append(log, stage)
        return {t: log.state for t, log in logs.items()}


def _progress(state):
    return state.config, state.layout


def _append(log, stage):
    generation, before, after, is_end = stage
    op = ident(f"change {generation}")
    settings = {"era": generation, "level": 2}
    if before == after:
        record = config(generation, k=after, **settings)
        assert log.outcome_of(record) == "configured"
    elif not is_end:
        record = layout_fence(after, before, generation=generation, op=op, **settings)
        assert log.outcome_of(record) == "layout_fenced"
    else:
        for source in log.state.layout.sources:
            log.append(layout_done(0, source=source.partition, op=op))
        assert log.outcome_of(layout_final(op=op)) == "layout_final"


def _fold(entries):
    log = Log(PLACE, k=2, level=2)
    for epoch, value in entries:
        log.append(value, epoch=epoch)
    return log.state


# --- mistakes of members


def claim_where_the_fence_is_lost(patch):
    """A key that stays is claimed while its partition lacks the open change."""
    between = Placement.awaits_import

    def trusting(placement, key):
        is_open = placement.from_count is not None
        return between(placement, key) and not (is_open and key == KEY)

    patch.setattr(Placement, "awaits_import", trusting)


def claim_where_a_config_is_lost(patch):
    """A member also claims in a partition that lacks the newest Config."""
    patch.setattr("kafka_marshal.engine.placement.unclaimed", lambda *_: frozenset())


def leave_what_is_lost(patch):
    """No member restores a change that has ended."""
    patch.setattr(layout_reading, "lost_change", lambda _: None)


def forget_the_change_before(patch):
    """No member restores a change that was lost as the next one began."""
    patch.setattr(layout_steps, "lost_before", lambda _: {})


def forget_a_config(patch):
    """No member writes a lost Config again."""
    patch.setattr(lost_changes, "lost_configs", lambda *_: {})
