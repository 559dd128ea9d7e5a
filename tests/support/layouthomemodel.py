"""A set position beside a change of the partition count, which moves its home.

The model has every order of these steps: an admin pauses a group, stages its keys and
decides; processes fence, import and end the change; the pause expires in each
partition; members resolve the rest (PROTOCOL 8.3 to 8.5, 10.2, 10.6). The fold is the
product's; a state is its canonical bytes. The admin may crash at each step; its records
land late or never. While a change is open in the partition that they resolve, members
use the home under the old count (10.2).
"""

from functools import cache
from typing import NamedTuple

import msgspec
from logkit import (
    H,
    Log,
    decide,
    ident,
    layout_done,
    layout_fence,
    layout_final,
    layout_import,
    pause,
    release,
    resolve,
    stage,
)

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.layout import is_final, item_of, place_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.resolving import (
    ABORTED,
    COMMITTED,
    UNDECIDED,
    PositionOperation,
    outcome_of,
)
from kafka_marshal.protocol.snapshot import from_bytes, to_bytes
from kafka_marshal.protocol.types import Key, LogEntry

START_MS = 1_000_000
UNTIL_MS, OVER_MS = START_MS + 10, START_MS + 20
SOURCE, SET = 1, ident("set")

# A mistake of the admin in the model: the pause of a partition that is behind counts.
COUNT_ANY_PAUSE = "count_any_pause"
STAYS, MOVES, ELSEWHERE = "stays", "moves", "elsewhere"


class World(NamedTuple):
    """The partitions, and the progress of the admin."""

    logs: tuple[bytes, ...]
    count: int = 0  # the count when the admin began, 0 before
    paused: frozenset = frozenset()  # paused partitions, each with its generation
    may_stage: bool = False
    staged: frozenset = frozenset()
    is_decided: bool = False
    ends: frozenset = frozenset()  # outcomes with which keys were unlocked


class LayoutHomeModel:
    """S8 and 8.4: all keys are set if and only if the Decide was accepted.

    The home is first the source, then the target of the change.

    Args:
        counts: Partition count before and after.
        keys: The keys that the admin sets: one of the source that stays or moves, and
            one that stays in another partition.
        mistake: The mistake of the admin, if any.
    """

    def __init__(self, counts=(2, 4), keys=(STAYS, ELSEWHERE), *, mistake=None):
        self.before, self.after = self.counts = counts
        self.target = SOURCE + self.before
        elsewhere = self.before - 2  # 0, where a lock delays fences, or 2
        self.partitions = tuple(sorted({0, SOURCE, elsewhere, self.target}))
        self.named = {
            STAYS: self._key(SOURCE, SOURCE),
            MOVES: self._key(SOURCE, self.target),
            ELSEWHERE: self._key(elsewhere, elsewhere),
        }
        self.keys = [self.named[name] for name in keys]
        self.moves = self.named[MOVES]
        self.group = self.moves.group_id
        self.operation = PositionOperation(self.group, SET)
        self.mistake = mistake
        self.append = cache(self._append)
        self.read = cache(from_bytes)

    def _key(self, *places):
        group_id = next(
            name
            for name in map(str, range(999))
            if home_partition(name, partition_count=self.before) == SOURCE
            and home_partition(name, partition_count=self.after) == self.target
        )
        keys = (Key(group_id, "t", number) for number in range(999))
        return next(
            key
            for key in keys
            if tuple(_place(key, count) for count in self.counts) == places
        )

    def start(self):
        logs = []
        for place in self.partitions:
            log = Log(place, configured=place < self.before, k=self.before, level=2)
            for key in self.named.values():
                if place == _place(key, self.before):
                    epoch = log.claimed(key=key)
                    log.append(release(epoch, key=key))
            logs.append(to_bytes(log.state))
        return World(tuple(logs))

    def is_over(self, world):
        """Return whether the change has ended and no lock or verdict is left."""
        return all(
            state.layout is None
            and state.config is not None
            and state.config.partition_count == self.after
            and not self._is_left(state)
            for state in self._states(world)
        )

    def broken(self, world):
        if world.ends == {"position_set", "unlocked"}:
            return "S8: some keys are set, and some are not"
        if world.is_decided and "unlocked" in world.ends:
            return "8.4: a key is left as it was, though the Decide was accepted"
        if not world.is_decided and "position_set" in world.ends:
            return "8.4: a key is set without a Decide"
        return None

    # --- possible steps

    def steps(self, world):
        if not world.count:
            count = self._state(world, 0).config.partition_count
            yield f"the admin begins with {count}", world._replace(count=count)
        for at, place in enumerate(self.partitions):
            for kind, record in self._records(world, place):
                log, effects = self.append(world.logs[at], encode(record))
                if effects:
                    logs = (*world.logs[:at], log, *world.logs[at + 1 :])
                    after = self._after(world._replace(logs=logs), place, kind, effects)
                    yield f"{kind} in {place}: {', '.join(effects)}", after
            if self._state(world, place).active_pause(self.group) is not None:
                log, _ = self.append(world.logs[at], b"")
                logs = (*world.logs[:at], log, *world.logs[at + 1 :])
                yield f"the pause runs out in {place}", world._replace(logs=logs)

    def _append(self, log, value):
        """Fold a record, or a clock entry after the end of the pause.

        Returns:
            The log, unchanged if the record has no effect, and the effects.
        """
        state = from_bytes(log)
        entry = LogEntry(
            offset=state.next_offset,
            leader_epoch=state.leader_epoch or 0,
            timestamp_ms=max(state.append_time_ms, START_MS if value else OVER_MS),
            timestamp_type=1,
            value=value,
        )
        transitions = apply(state, entry)
        effects = tuple(sorted({each.effect for each in transitions if each.effect}))
        return (to_bytes(state) if effects or not value else log), effects

    def _records(self, world, place):
        yield from self._of_change(world, place)
        yield from self._of_admin(world, place)
        yield from self._of_members(world, place)

    def _after(self, world, place, kind, effects):
        """Return the world after the admin has read the effects."""
        if kind == "pause":
            config = self._state(world, place).config
            generation = config.generation
            if self.mistake == COUNT_ANY_PAUSE:
                generation = 1 if world.count == self.before else 2
            paused = world.paused | {(place, generation)}
            expected = 1 if world.count == self.before else 2
            places = [each for each in self.partitions if each < world.count]
            may_stage = all((each, expected) in paused for each in places)
            return world._replace(paused=paused, may_stage=may_stage)
        if kind == "stage":
            return world._replace(staged=world.staged | {place})
        if kind == "decide":
            return world._replace(is_decided=True)
        ends = {"position_set", "unlocked"}.intersection(effects)
        return world._replace(ends=world.ends | ends)

    # --- appended records

    def _of_change(self, world, place):
        first, state = self._state(world, 0), self._state(world, place)
        source, target = self._state(world, SOURCE), self._state(world, self.target)
        is_fenced = state.config is not None and state.config.generation == 2
        if not is_fenced and (place == 0 or first.config.generation == 2):
            yield "fence", layout_fence(self.after, self.before, generation=2, h=H)
        if not is_fenced or state.layout is None:
            return
        if place == self.target and is_final(source, self.moves):
            item = item_of(self.moves, source.keys[self.moves])
            yield "import", layout_import(item, source=SOURCE)
            if self.moves in target.keys:
                yield "done", layout_done(1, source=SOURCE)
        is_done = target.layout is None or target.layout.sources[0].done_ms is not None
        is_first = place == 0 or first.layout is None
        if target.config is not None and is_done and is_first:
            yield "final", layout_final()

    def _of_admin(self, world, place):
        """Yield pauses; once all are accepted, also Stages and the Decide."""
        count = world.count
        if not count:
            return
        named = {"group": self.group, "op": SET}
        if place < count and place not in dict(world.paused):
            yield "pause", pause(UNTIL_MS, **named)
        mine = [key for key in self.keys if _place(key, count) == place]
        if world.may_stage and mine and place not in world.staged:
            positions = [(key.partition, 5) for key in mine]
            record = stage(*positions, op=SET)
            yield "stage", msgspec.structs.replace(record, group_id=self.group)
        every = {_place(key, count) for key in self.keys}
        home = home_partition(self.group, partition_count=count)
        if world.staged >= every and place == home and not world.is_decided:
            yield "decide", decide(len(self.keys), **named)

    def _of_members(self, world, place):
        """Yield the Resolves of remaining locks and verdicts of the operation."""
        states = [self._state(world, each) for each in self.partitions]
        named = {"group": self.group, "op": SET}
        for state in states:
            if not self._is_left(state):
                continue
            home = self._state(world, self._home(state))
            outcome, is_home = outcome_of(home, self.operation), place == home.partition
            is_mine = place == state.partition
            if outcome == COMMITTED:
                others = (each for each in states if each is not home)
                is_last = not any(self.operation in each.locked for each in others)
                if is_last if is_home else is_mine:
                    yield "resolve", resolve(commit=True, **named)
                continue
            is_over = home.active_pause(self.group) is None
            may_abort = is_home and is_over and outcome == UNDECIDED
            if may_abort or (is_mine and outcome == ABORTED):
                yield "resolve", resolve(commit=False, **named)

    def _is_left(self, state):
        """Return whether a lock or a verdict is left."""
        group = state.groups.get(self.group)
        return self.operation in state.locked or bool(group and group.unresolved)

    def _home(self, state):
        """Return the home by the count that holds in this partition (PROTOCOL 10.2)."""
        layout = state.layout
        count = state.config.partition_count if layout is None else layout.from_count
        return home_partition(self.group, partition_count=count)

    def _state(self, world, place):
        return self.read(world.logs[self.partitions.index(place)])

    def _states(self, world):
        return [self._state(world, place) for place in self.partitions]


def _place(key, count):
    return place_of(key, partition_count=count)
