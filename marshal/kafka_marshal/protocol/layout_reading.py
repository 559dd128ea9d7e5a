"""What a reader knows of an open change of the partition count (PROTOCOL 10).

A partition whose whole state the reader does not know is ``unread``: nothing is
concluded from what was read of it. ``layout_steps`` has the records to write next.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

import attrs

from kafka_marshal.protocol.items import Layout
from kafka_marshal.protocol.labels import LAYOUT_LABEL, number_of
from kafka_marshal.protocol.layout import (
    is_moving,
    is_settled,
    place_of,
    sources_of,
)
from kafka_marshal.protocol.lost_changes import lost_change, restored_op
from kafka_marshal.protocol.records import Config
from kafka_marshal.protocol.state import (
    MemberName,
    MemberState,
    WorldState,
)
from kafka_marshal.protocol.types import Key

Worlds = Mapping[int, WorldState]


@attrs.frozen(kw_only=True)
class Change:
    """A change of the partition count, as its fence states it.

    Attributes:
        op_id: The operation.
        from_count: The partition count before.
        config: The Config that it puts in force.
    """

    op_id: bytes
    from_count: int
    config: Config

    @property
    def to_count(self) -> int:
        """The partition count after the change."""
        return self.config.partition_count

    @property
    def generation(self) -> int:
        """The Config generation that the change puts in force."""
        return self.config.generation

    @property
    def partitions(self) -> range:
        """The coordinating partitions that take part in it."""
        return range(max(self.from_count, self.to_count))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Each source with each of its targets, sorted."""
        counts = {"from_count": self.from_count, "to_count": self.to_count}
        return sorted(
            (source, target)
            for target in self.partitions
            for source in sources_of(target, **counts)
        )

    def is_open_in(self, state: WorldState) -> bool:
        """Return whether this change is open in a partition."""
        return state.layout is not None and state.layout.op_id == self.op_id

    def layout_of(self, state: WorldState) -> Layout | None:
        """Return the layout of this change in a partition, or None."""
        return state.layout if self.is_open_in(state) else None


# --- which change is open


def change_of(worlds: Worlds) -> Change | None:
    """Return the open change, None if no partition has one.

    Partition 0 decides: its open change comes first. Without one, return the newest
    change that is open in another partition, or that a partition has lost.
    """
    found = [
        Change(
            op_id=state.layout.op_id,
            from_count=state.layout.from_count,
            config=state.config,
        )
        for _, state in sorted(worlds.items())
        if state.layout is not None and state.config is not None
    ]
    if 0 in worlds and worlds[0].layout is not None:
        return found[0]
    lost = lost_change(worlds)
    if lost is not None:
        found.append(Change(**lost._asdict()))
    return max(found, key=lambda each: each.generation, default=None)


def is_over(worlds: Worlds, change: Change) -> bool:
    """Return whether partition 0 has ended a change (PROTOCOL 10.6).

    Partition 0 refuses any other Config or fence before. If it has an earlier
    generation, its log has lost the fence, and the change is not over.
    """
    first = worlds.get(0)
    if first is None or first.config is None or change.is_open_in(first):
        return False
    return first.config.generation >= change.generation


def is_torn(worlds: Worlds, change: Change) -> bool:
    """Return whether another change or Config has the generation of this one."""
    others = [
        state
        for t in change.partitions
        if (state := worlds.get(t)) is not None
        and state.config is not None
        and state.config.generation == change.generation
    ]
    ops = {change.op_id} | {
        each.layout.op_id
        for each in others
        # After a Config that follows the fence, the generation is not the change's.
        if each.layout and (not each.eras or each.eras[-1][0] <= each.layout.offset)
    }
    if len(ops) > 1:
        ops.discard(restored_op(change.config))  # op_id of a restored fence
    return len(ops) > 1 or any(each.config != change.config for each in others)


# --- what moves


class Moving:
    """Remembers the moving keys of each source by target, which its fence determines.

    Use it in one thread only. Without it, a reader of many keys would place each key
    again for each step.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[WorldState, Layout, dict[int, list[Key]]]] = {}

    def of(self, state: WorldState) -> Mapping[int, list[Key]]:
        """Return the moving keys of a source by their target, each list sorted.

        A change must be open in the source.
        """
        layout, config = state.layout, state.config
        assert layout is not None
        assert config is not None
        seen = self._seen.get(state.partition)
        if seen is not None and seen[0] is state and seen[1] is layout:
            return seen[2]
        found: dict[int, list[Key]] = {}
        for key in sorted(key for key in state.keys if is_moving(state, key)):
            target = place_of(key, partition_count=config.partition_count)
            found.setdefault(target, []).append(key)
        self._seen[state.partition] = (state, layout, found)
        return found


# --- who acts on it already


def members_of(
    worlds: Iterable[WorldState], elapsed_ms: Mapping[int, int] | None = None
) -> dict[MemberName, MemberState]:
    """Return the live members that have not announced their end.

    While a change is open, members announce themselves to two homes (PROTOCOL 10.2):
    the newest announcement of each member counts.

    Args:
        worlds: The coordinating partitions.
        elapsed_ms: Time since the last entry of each, by an estimate.
    """
    found: dict[MemberName, MemberState] = {}
    for world in worlds:
        now_ms = world.now_ms + (elapsed_ms or {}).get(world.partition, 0)
        for name, member in world.soft.members.items():
            if not world.is_live(member, now_ms):
                continue
            if name not in found or found[name].record.seq < member.record.seq:
                found[name] = member
    return {name: one for name, one in found.items() if not one.record.draining}


def generations_of(
    worlds: Iterable[WorldState], elapsed_ms: Mapping[int, int] | None = None
) -> dict[MemberName, int]:
    """Return the generation that each live member acts on, if it reports one."""
    return {
        name: generation
        for name, member in members_of(worlds, elapsed_ms).items()
        if (generation := number_of(member.record.labels, LAYOUT_LABEL)) is not None
    }


@attrs.frozen
class Reading:
    """What one reader knows of an open change.

    Attributes:
        change: The change.
        known: The coordinating partitions whose state it knows.
        elapsed_ms: Local time since the last entry of each (PROTOCOL 4.11).
        moving: Remembers moving keys from one reading to the next.
        unknown: The other partitions, as far as they were read.
    """

    change: Change
    known: Worlds
    elapsed_ms: Mapping[int, int] = attrs.field(factory=dict)
    moving: Moving = attrs.field(factory=Moving)
    unknown: Worlds = attrs.field(factory=dict)

    def open(self, partition: int) -> WorldState | None:
        """Return a partition in which the change is open, else None."""
        state = self.known.get(partition)
        return state if state is not None and self.change.is_open_in(state) else None

    def log_ms(self, state: WorldState) -> int:
        """Return an estimate of the log time of a partition."""
        return state.now_ms + self.elapsed_ms.get(state.partition, 0)

    def generations(self) -> dict[MemberName, int]:
        """Return the generation that each live member acts on, if it reports one."""
        return generations_of(self.known.values(), self.elapsed_ms)

    def is_done(self, source: int, target: int) -> bool | None:
        """Return whether a target is done with a source; None if not open in it."""
        state = self.open(target)
        layout = None if state is None else state.layout
        found = None if layout is None else layout.source(source)
        return None if found is None else found.done_ms is not None

    def has_ended(self, partition: int) -> bool:
        """Return whether a partition has a Final of the change, or a later fence.

        Both follow the Final of partition 0. If the change is still open in partition
        0, its log has lost that Final (PROTOCOL 10.9).
        """
        state = self.known.get(partition)
        if state is None or state.config is None or self.change.is_open_in(state):
            return False
        return state.config.generation >= self.change.generation

    def lacks_done(self, partition: int) -> bool:
        """Return whether a pair with this partition is not done in an open target."""
        pairs = (pair for pair in self.change.pairs if partition in pair)
        return any(self.is_done(*pair) is False for pair in pairs)

    def undone(self) -> Iterator[tuple[WorldState, WorldState, list[Key]]]:
        """Yield source, target and moving keys of each pair that is not done.

        Only pairs in which the change is open in both: a source that has ended it has
        dropped its keys, and would look as if it had none.
        """
        for one, other in self.change.pairs:
            source, target = self.open(one), self.open(other)
            if source is None or target is None or self.is_done(one, other):
                continue
            yield source, target, self.moving.of(source).get(other, [])


def read(
    worlds: Worlds,
    *,
    unread: Collection[int] = (),
    elapsed_ms: Mapping[int, int] | None = None,
    moving: Moving | None = None,
) -> Reading | None:
    """Return what is known of the open change, None without one.

    Args:
        worlds: The coordinating partitions as read.
        unread: The partitions whose state is unknown, as their logs have lost it.
        elapsed_ms: Local time since the last entry of each partition.
        moving: Remembers moving keys from one call to the next.
    """
    known = {
        t: state
        for t, state in worlds.items()
        if t not in unread and state.halted is None
    }
    change = change_of(known)
    if change is None:
        return None
    rest = {t: worlds[t] for t in unread if t in worlds and worlds[t].halted is None}
    return Reading(change, known, elapsed_ms or {}, moving or Moving(), rest)


# --- progress


@attrs.frozen(kw_only=True)
class LayoutProgress:
    """How far a change is, as far as its partitions were read.

    Attributes:
        partition_count: Coordinating partitions that take part.
        fenced_count: Partitions that have the fence.
        ended_count: Partitions in which the change has ended.
        moving_count: Keys that move, in sources in which the change has not ended.
        final_count: Moving keys that nothing can change any more.
        imported_count: Keys that were imported.
        pair_count: Pairs of a source and a target.
        done_count: Pairs that are done.
        floor: Least generation that a live member acts on; None if no member reports
            any.
        lagging: Group and client of members that act on an earlier generation, sorted.
    """

    partition_count: int
    fenced_count: int
    ended_count: int
    moving_count: int
    final_count: int
    imported_count: int
    pair_count: int
    done_count: int
    floor: int | None
    lagging: tuple[tuple[str, str], ...]


def progress_of(reading: Reading) -> LayoutProgress:
    """Return how far a change is."""
    change = reading.change
    states = [reading.known[t] for t in change.partitions if t in reading.known]
    opened = [state for state in states if change.is_open_in(state)]
    ended = [state for state in states if reading.has_ended(state.partition)]
    moving = [
        (source, key)
        for source in opened
        for keys in reading.moving.of(source).values()
        for key in keys
    ]
    sources = [
        source
        for state in opened
        if (layout := state.layout) is not None
        for source in layout.sources
    ]
    acting = reading.generations()
    lagging = {name[:2] for name, at in acting.items() if at < change.generation}
    pairs = [reading.is_done(*pair) for pair in change.pairs]
    has_ended = {state.partition for state in ended}
    return LayoutProgress(
        partition_count=len(change.partitions),
        fenced_count=len(opened) + len(ended),
        ended_count=len(ended),
        moving_count=len(moving),
        final_count=sum(is_settled(state, state.keys[key]) for state, key in moving),
        imported_count=sum(source.imported_count for source in sources),
        pair_count=len(pairs),
        done_count=sum(
            bool(done) or target in has_ended
            for (_, target), done in zip(change.pairs, pairs, strict=True)
        ),
        floor=min(acting.values(), default=None),
        lagging=tuple(sorted(lagging)),
    )
