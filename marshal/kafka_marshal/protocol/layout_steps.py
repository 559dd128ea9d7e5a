"""The next records of an open change of the partition count (PROTOCOL 10).

Any process may write them: an admin, a member that needs one, a member after a while.
All are judged again where they stand, and all may come twice. So only three things must
hold of what a reader knows when it writes one, and the functions here see to these:

- An import carries keys that are final in the source as read. Nothing changes a final
  key any more (10.3), so it does not matter how old that reading is.
- A LayoutDone follows imports that were read back of every key that moves from that
  source to this target, and of settings and directives of groups whose home moves
  there. From the source's fence on it gets no new ones.
- A LayoutFinal of partition 0 follows every LayoutDone, and one of another partition
  follows that of partition 0. Both were read back.

A reader that does not know the whole state of a partition names it ``unread``; nothing
is concluded from it. A reader may be ahead in one partition and behind in another: then
some of the steps are superfluous, and refused.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import attrs
import msgspec

from kafka_marshal.protocol.codec import FRAME_BYTES_MAX, encode
from kafka_marshal.protocol.items import Layout
from kafka_marshal.protocol.judging import (
    has_all_directives,
    lacks_room_for_group,
)
from kafka_marshal.protocol.labels import LAYOUT_LABEL, number_of
from kafka_marshal.protocol.layout import (
    digest_of,
    group_items,
    is_moving,
    is_settled,
    item_of,
    place_of,
    sources_of,
)
from kafka_marshal.protocol.lost_changes import (
    LostChange,
    keeps_state,
    lost_before,
    lost_by,
    lost_change,
    restored_op,
)
from kafka_marshal.protocol.records import (
    IMPORTED_MAX,
    Config,
    ImportedDirective,
    ImportedKey,
    ImportedSettings,
    LayoutDone,
    LayoutFence,
    LayoutFinal,
    LayoutGroups,
    LayoutImport,
)
from kafka_marshal.protocol.state import (
    GroupState,
    MemberName,
    MemberState,
    WorldState,
)
from kafka_marshal.protocol.types import Key

Worlds = Mapping[int, WorldState]
Fields = Mapping[str, Any]
"""Sender and tags of a record, by name."""

Item = TypeVar("Item", ImportedKey, ImportedSettings, ImportedDirective)

FINAL_AFTER_MS = 30_000
"""How long after the last LayoutDone the change ends though members lag behind it."""
_ITEMS_BYTES_MAX = FRAME_BYTES_MAX - 2_048
"""What the items of an import may have; the rest is for its sender and tags."""
_encode = msgspec.msgpack.Encoder().encode


@attrs.frozen(kw_only=True)
class Change:
    """A change of the partition count, as its fence has it.

    Attributes:
        op_id: The operation.
        from_count: The count before.
        config: The Config that it brings.
    """

    op_id: bytes
    from_count: int
    config: Config

    @property
    def to_count(self) -> int:
        """The count after it."""
        return self.config.partition_count

    @property
    def generation(self) -> int:
        """The Config generation that it brings."""
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


class Import(NamedTuple):
    """Keys of a source that one record brings to a target.

    Attributes:
        target: The partition that the record goes to.
        source: Where the keys are final.
        source_offset: Offset up to which it was read.
        keys: The keys.
        items: What travels of them, in the same order.
    """

    target: int
    source: int
    source_offset: int
    keys: tuple[Key, ...]
    items: tuple[ImportedKey, ...]


class GroupImport(NamedTuple):
    """Settings and directives of groups that one record brings to their new home.

    Attributes:
        target: The partition that the record goes to.
        source: The home before the change.
        source_offset: Offset up to which the source was read.
        settings: Settings of groups.
        directives: Directives in force.
    """

    target: int
    source: int
    source_offset: int
    settings: tuple[ImportedSettings, ...]
    directives: tuple[ImportedDirective, ...]


class Done(NamedTuple):
    """A source whose keys a target has imported.

    Attributes:
        target: The partition that the record goes to.
        source: The source.
        source_offset: Offset up to which the source was read.
        key_count: Keys that moved from there to the target.
        digest: Digest of their items.
    """

    target: int
    source: int
    source_offset: int
    key_count: int
    digest: bytes


class Final(NamedTuple):
    """The end of a change in one partition; maybe of an earlier change.

    Attributes:
        partition: The partition that the record goes to.
        op_id: The operation.
    """

    partition: int
    op_id: bytes


class Wait(NamedTuple):
    """What the change waits for, other than a record that could be written.

    Attributes:
        reason: ``owned`` (the owner of moving keys finishes, or becomes stale),
            ``unresolved`` (a set position has locks or a verdict), ``quiet`` (a Reset),
            ``adoption`` (members act on an earlier generation), ``unread`` (the state
            of the partition is not known here), or ``behind`` (partition 0 has lost
            records that the fence follows).
        partition: The partition.
        client_id: The owner, None for other reasons.
        key_count: Keys that wait for it.
        left_ms: How long at most, by an estimate; None if that is unknown.
    """

    reason: str
    partition: int
    client_id: str | None = None
    key_count: int = 0
    left_ms: int | None = None


# --- which change is open


def change_of(worlds: Worlds) -> Change | None:
    """Return the change that is open in any partition, None without one.

    That of partition 0 if it has one, as partition 0 decides; else the newest; else one
    that a partition has lost.
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

    It refuses another Config and another fence before. So it is not over where
    partition 0 has an earlier generation: then its log has lost the fence.
    """
    first = worlds.get(0)
    if first is None or first.config is None or change.is_open_in(first):
        return False
    return first.config.generation >= change.generation


def is_torn(worlds: Worlds, change: Change) -> bool:
    """Return whether two changes, or Configs, have the generation of this one."""
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
        # A Config behind its fence has another generation than its change.
        if each.layout and (not each.eras or each.eras[-1][0] <= each.layout.offset)
    }
    if len(ops) > 1:
        ops.discard(restored_op(change.config))  # it is of no other change
    return len(ops) > 1 or any(each.config != change.config for each in others)


# --- what moves


class Moving:
    """Remembers the moving keys of each source by target, which a fence settles.

    For one thread. Without it a reader of many keys would place each of them again for
    each step.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[WorldState, Layout, dict[int, list[Key]]]] = {}

    def of(self, state: WorldState) -> Mapping[int, list[Key]]:
        """Return the moving keys of a source by their target, each list sorted.

        A change must be open there.
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


def grouped(
    source: WorldState, keys: Iterable[Key], *, target: int
) -> Iterator[Import]:
    """Yield imports of final keys, each of as many as fit a record.

    Args:
        source: The source; all keys are final there.
        keys: The keys, those that are needed first in front.
        target: The partition that all of them move to.
    """
    for some in _fitting(item_of(key, source.keys[key]) for key in keys):
        yield Import(
            target=target,
            source=source.partition,
            source_offset=source.next_offset,
            keys=tuple(Key(each.group_id, each.topic, each.partition) for each in some),
            items=some,
        )


def _fitting(items: Iterable[Item]) -> Iterator[tuple[Item, ...]]:
    """Yield items, each time as many as fit a record."""
    some: list[Item] = []
    size_bytes = 0
    for item in items:
        length = len(_encode(item))
        if len(some) == IMPORTED_MAX or size_bytes + length > _ITEMS_BYTES_MAX:
            yield tuple(some)
            some, size_bytes = [], 0
        some.append(item)
        size_bytes += length
    if some:
        yield tuple(some)


# --- who acts on it already


def members_of(
    worlds: Iterable[WorldState], elapsed_ms: Mapping[int, int] | None = None
) -> dict[MemberName, MemberState]:
    """Return the live members that have not announced their end.

    Of one that announces itself to two homes, as members do while a change is open
    (PROTOCOL 10.2), the newest announcement counts.

    Args:
        worlds: The coordinating partitions.
        elapsed_ms: Time since the last entry of each, by an estimate.
    """
    found: dict[MemberName, MemberState] = {}
    for world in worlds:
        limit_ms = 2 * world.config.heartbeat_interval_ms if world.config else 0
        now_ms = world.now_ms + (elapsed_ms or {}).get(world.partition, 0)
        for name, member in world.soft.members.items():
            if now_ms - member.seen_ms > limit_ms:
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
        known: The coordinating partitions of which it knows the state.
        elapsed_ms: Local time since the last entry of each (PROTOCOL 4.11).
        moving: Remembers moving keys from one reading to the next.
        unknown: What it has read of the others.
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
        """Return whether a target is done with a source; None where it is not open."""
        state = self.open(target)
        layout = None if state is None else state.layout
        found = None if layout is None else layout.source(source)
        return None if found is None else found.done_ms is not None

    def has_ended(self, partition: int) -> bool:
        """Return whether a partition has a Final of the change, or a later fence.

        Both follow the Final of partition 0. If the change is open there, its log has
        lost that (PROTOCOL 10.9).
        """
        state = self.known.get(partition)
        if state is None or state.config is None or self.change.is_open_in(state):
            return False
        return state.config.generation >= self.change.generation

    def lacks_done(self, partition: int) -> bool:
        """Return whether a pair of a partition is not done where it is open."""
        pairs = (pair for pair in self.change.pairs if partition in pair)
        return any(self.is_done(*pair) is False for pair in pairs)

    def lost_dones(self) -> Iterator[tuple[int, WorldState]]:
        """Yield targets that are not done with a source which has ended the change.

        Or has lost it, and does not get it back, once partition 0 has ended it.
        """
        over, due = is_over(self.known, self.change), fences_of(self)
        for source, target in self.change.pairs:
            is_gone = over and source in self.known and self.open(source) is None
            is_gone = (is_gone and source not in due) or self.has_ended(source)
            if is_gone and self.is_done(source, target) is False:
                yield target, self.known[source]

    def undone(self) -> Iterator[tuple[WorldState, WorldState, list[Key]]]:
        """Yield source, target and moving keys of each pair that is not done.

        Only where the change is open in both: a source that has ended it has dropped
        its keys, and would look as if it had none.
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
        unread: Those of which the state is not known, as their logs have lost it.
        elapsed_ms: Local time since the last entry of each.
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


# --- the steps


@attrs.frozen(kw_only=True)
class Steps:
    """The next records of a change; they may be written in any order.

    Attributes:
        change: The change.
        is_over: Whether partition 0 has ended it, so that only Finals are left.
        is_torn: Whether partitions have Configs of two changes of one generation. Then
            there are no steps, nobody may claim, and a person decides.
        fences: Partitions that lack the fence; only partition 0, if that lacks it.
        earlier: Partitions that lack the change before, and get its fence first.
        imports: Imports of final keys.
        groups: Imports of settings and directives, which are final from the fence on.
        dones: Sources with nothing left for a target.
        finals: Where a change ends.
        nudges: Partitions whose log time must move before anything else can happen
            there; appending the fence again moves it, and is refused.
        waits: What the rest waits for.
    """

    change: Change
    is_over: bool = False
    is_torn: bool = False
    fences: tuple[int, ...] = ()
    earlier: tuple[tuple[int, LostChange], ...] = ()
    imports: tuple[Import, ...] = ()
    groups: tuple[GroupImport, ...] = ()
    dones: tuple[Done, ...] = ()
    finals: tuple[Final, ...] = ()
    nudges: tuple[int, ...] = ()
    waits: tuple[Wait, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is no record to write now."""
        some = (self.fences, self.earlier, self.imports, self.groups, self.dones)
        return not any((*some, self.finals, self.nudges))


def next_steps(reading: Reading, *, wanted: Collection[Key] = ()) -> Steps:
    """Return the next steps of a change.

    Args:
        reading: What is known of it.
        wanted: Keys that are imported before others.
    """
    change, known = reading.change, reading.known
    if is_torn(known, change):
        return Steps(change=change, is_torn=True)
    over = is_over(known, change)
    fences = fences_of(reading)
    if 0 not in known or (not over and reading.open(0) is None):
        # Partition 0 decides: without it, nothing else is done.
        lost = () if fences else (Wait("behind" if 0 in known else "unread", 0),)
        return Steps(change=change, fences=fences, waits=lost)
    waits = list(waits_of(reading))
    nudges = {each.partition for each in waits if each.left_ms == 0}
    return Steps(
        change=change,
        is_over=over,
        fences=fences,
        earlier=tuple(sorted(lost_before(known).items())),
        imports=tuple(imports_of(reading, wanted=wanted)),
        groups=tuple(groups_of(reading)),
        dones=tuple(dones_of(reading)),
        finals=tuple(finals_of(reading)),
        nudges=tuple(sorted(nudges)),
        waits=tuple(waits),
    )


def fences_of(reading: Reading) -> tuple[int, ...]:
    """Return the partitions to which the fence is appended.

    Once it was read in partition 0, which decides: all others without it. Where others
    have it and partition 0 has not, the log of partition 0 was truncated. One that
    comes into use begins with the fence: its state before is no matter (PROTOCOL 10.2).
    """
    change, known = reading.change, reading.known
    if 0 not in known:
        return ()
    if reading.open(0) is None and not is_over(known, change):
        config = known[0].config
        is_next = config is not None and (
            config.generation + 1 == change.generation
            and config.partition_count == change.from_count
        )
        return (0,) if is_next else ()
    added = {t: one for t, one in reading.unknown.items() if t >= change.from_count}
    states = {**known, **added}
    lost, earlier, count = lost_by(known), lost_before(known), change.from_count
    over = is_over(known, change)
    return tuple(
        t
        for t in change.partitions
        if (state := states.get(t)) is not None
        and (state.config is None or state.config.generation < change.generation)
        and t not in earlier
        and (
            not over
            or lost.get(t) == count
            or not keeps_state(t, state.config, from_count=count)
        )
    )


def imports_of(reading: Reading, *, wanted: Collection[Key] = ()) -> Iterator[Import]:
    """Yield imports of keys that are final, and that their target does not know."""
    first = frozenset(wanted)
    for source, target, keys in reading.undone():
        due = [
            key
            for key in keys
            if key not in target.keys and is_settled(source, source.keys[key])
        ]
        due.sort(key=lambda key: key not in first)
        yield from grouped(source, due, target=target.partition)


def groups_of(reading: Reading) -> Iterator[GroupImport]:
    """Yield imports of settings and directives that their new home does not know.

    A directive may end meanwhile: in the source, or in the target once it was imported.
    """
    for source, target, _ in reading.undone():
        make = partial(
            GroupImport, target.partition, source.partition, source.next_offset
        )
        settings, directives = _lacking_groups(source, target)
        yield from (make(some, ()) for some in _fitting(settings))
        yield from (make((), some) for some in _fitting(directives))


def _lacking_groups(
    source: WorldState, target: WorldState
) -> tuple[list[ImportedSettings], list[ImportedDirective]]:
    """Return settings and directives that a target is to have and does not know."""
    settings, directives = group_items(source, target.partition)
    config, none = target.config, GroupState()
    assert config is not None

    def is_lacking(item: ImportedDirective) -> bool:
        group = target.groups.get(item.group_id, none)
        is_known = group.directive(item.op_id) or group.is_over(item.op_id)
        return not (is_known or has_all_directives(target, group, config=config))

    return (
        [
            each
            for each in settings
            if target.groups.get(each.group_id, none).settings is None
            and not lacks_room_for_group(target, each.group_id, config=config)
        ],
        [each for each in directives if is_lacking(each)],
    )


def dones_of(reading: Reading) -> Iterator[Done]:
    """Yield the sources that are read as final and imported, for each target.

    While a source is quiet, a Reset may have made keys unknown that are owned. One that
    has ended the change has no keys any more: its target has lost the LayoutDone, and
    maybe imports (PROTOCOL 10.9).
    """
    for source, target, keys in reading.undone():
        is_imported = source.quiet_until_ms is None and all(
            key in target.keys and is_settled(source, source.keys[key]) for key in keys
        )
        if is_imported and not any(_lacking_groups(source, target)):
            yield Done(
                target=target.partition,
                source=source.partition,
                source_offset=source.next_offset,
                key_count=len(keys),
                digest=digest_of(item_of(key, source.keys[key]) for key in keys),
            )
    for t, ended in reading.lost_dones():
        yield Done(
            target=t,
            source=ended.partition,
            source_offset=ended.next_offset,
            key_count=0,
            digest=digest_of(()),
        )


def finals_of(reading: Reading) -> Iterator[Final]:
    """Yield where changes end: in partition 0 first, then in all others.

    Also of earlier changes, in partitions that this one does not concern.
    """
    change, known = reading.change, reading.known
    if reading.open(0) is not None and not list(final_waits_of(reading)):
        yield Final(0, change.op_id)
    for t, state in sorted(known.items()):
        if t == 0 or state.layout is None:
            continue
        if not change.is_open_in(state):
            if t not in change.partitions:
                yield Final(t, state.layout.op_id)
        elif is_over(known, change) and not reading.lacks_done(t):
            yield Final(t, change.op_id)


# --- what is waited for


def waits_of(reading: Reading) -> Iterator[Wait]:
    """Yield what the change waits for; with no time left, only log time must move."""
    known, change = reading.known, reading.change
    for t in change.partitions:
        if t not in known:
            yield Wait("unread", t)
    seen: dict[tuple[int, str], Wait] = {}
    for source, _, keys in reading.undone():
        if source.quiet_until_ms is not None:
            left_ms = source.quiet_until_ms - reading.log_ms(source)
            yield Wait("quiet", source.partition, left_ms=max(0, left_ms))
            continue
        for key in keys:
            known_key = source.keys[key]
            owner = known_key.owner
            if owner is None or is_settled(source, known_key):
                continue
            left_ms = known_key.remaining_ms(reading.log_ms(source))
            name = (source.partition, owner.client_id)
            before = seen.get(name, Wait("owned", *name, left_ms=left_ms))
            seen[name] = before._replace(
                key_count=before.key_count + 1,
                left_ms=min(before.left_ms or 0, left_ms),
            )
    yield from (wait for _, wait in sorted(seen.items()))
    if reading.open(0) is not None:
        others = {"undone", "unread"}
        yield from (w for w in final_waits_of(reading) if w.reason not in others)


def final_waits_of(reading: Reading) -> Iterator[Wait]:
    """Yield what the LayoutFinal of partition 0 waits for (PROTOCOL 10.6).

    The change must be open there. It may be written where nothing is yielded. No safety
    rests on adoption: a member that lags behind is refused.
    """
    change, known = reading.change, reading.known
    ended = {target for _, target in change.pairs if reading.has_ended(target)}
    undone = [
        (source, target)
        for source, target in change.pairs
        if target not in ended and not reading.is_done(source, target)
    ]
    yield from (Wait("undone", target) for _, target in undone)
    for t in change.partitions:
        state = known.get(t)
        if state is None:
            yield Wait("unread", t)
            continue
        locked = sum(len(keys) for keys in state.locked.values())
        if locked or any(group.unresolved for group in state.groups.values()):
            yield Wait("unresolved", t, key_count=locked)
    if undone or ended:
        return
    done_ms = max(
        source.done_ms or 0
        for state in known.values()
        if (layout := change.layout_of(state)) is not None
        for source in layout.sources
    )
    floor = min(reading.generations().values(), default=None)
    waited_ms = known[0].append_time_ms - done_ms
    if not is_adopted(floor, generation=change.generation, waited_ms=waited_ms):
        left_ms = FINAL_AFTER_MS - waited_ms - reading.elapsed_ms.get(0, 0)
        yield Wait("adoption", 0, left_ms=max(0, left_ms))


def is_adopted(floor: int | None, *, generation: int, waited_ms: int) -> bool:
    """Return whether members follow a change, or it waits no longer for them.

    Args:
        floor: Least generation that a live member acts on, None if none reports any.
        generation: Generation of the change.
        waited_ms: Append time of partition 0 since the last LayoutDone.
    """
    return (floor is not None and floor >= generation) or waited_ms >= FINAL_AFTER_MS


# --- progress


@attrs.frozen(kw_only=True)
class Progress:
    """How far a change is, as far as its partitions were read.

    Attributes:
        partition_count: Coordinating partitions that take part.
        fenced_count: Those that have the fence.
        ended_count: Those in which the change has ended.
        moving_count: Keys that move, of the sources in which it has not ended.
        final_count: Those of them that nothing can change any more.
        imported_count: Keys that were imported.
        pair_count: Pairs of a source and a target.
        done_count: Those of them that are done.
        floor: Least generation that a live member acts on, None if none reports any.
        lagging: Group and client of members that act on an earlier one, sorted.
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


def progress_of(reading: Reading) -> Progress:
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
    return Progress(
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


# --- the records


def fence_of(change: Change | LostChange, *, sender: Fields) -> LayoutFence:
    """Return the fence of a change; the same one for all partitions."""
    return LayoutFence(
        **sender,
        op_id=change.op_id,
        from_count=change.from_count,
        config=encode(change.config),
    )


def import_of(change: Change, step: Import, *, sender: Fields) -> LayoutImport:
    """Return the record of an import."""
    return LayoutImport(
        **sender,
        op_id=change.op_id,
        source=step.source,
        source_offset=step.source_offset,
        items=step.items,
    )


def groups_import_of(
    change: Change, step: GroupImport, *, sender: Fields
) -> LayoutGroups:
    """Return the record of an import of settings and directives."""
    return LayoutGroups(
        **sender,
        op_id=change.op_id,
        source=step.source,
        source_offset=step.source_offset,
        settings=step.settings,
        directives=step.directives,
    )


def done_of(change: Change, step: Done, *, sender: Fields) -> LayoutDone:
    """Return the record of a source that is done."""
    return LayoutDone(
        **sender,
        op_id=change.op_id,
        source=step.source,
        source_offset=step.source_offset,
        key_count=step.key_count,
        digest=step.digest,
    )


def final_of(step: Final, *, sender: Fields) -> LayoutFinal:
    """Return the record that ends a change in a partition."""
    return LayoutFinal(**sender, op_id=step.op_id)
