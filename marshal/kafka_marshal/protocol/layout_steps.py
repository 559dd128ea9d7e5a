"""The next records of an open change of the partition count (PROTOCOL 10).

Any process may write them: an admin, a member that needs one, a member after a while.
Each record is judged again where it stands, and may come twice. So only three things
must hold for what a process has read before it writes one, and the functions here
ensure them:

- An import carries keys that are final in the source as read. Nothing changes a final
  key any more (10.3), so it does not matter how old that reading is.
- A LayoutDone follows imports, read back, of every key that moves from that source to
  this target, and of settings and directives of groups whose home moves there. After
  its fence, the source gets no new ones.
- A LayoutFinal of partition 0 follows every LayoutDone, and a LayoutFinal of another
  partition follows that of partition 0. The earlier records were read back.

A reader may be ahead in one partition and behind in another: then some of the steps are
superfluous, and refused.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import attrs
import msgspec

from kafka_marshal.protocol.codec import FRAME_BYTES_MAX, encode
from kafka_marshal.protocol.judging import (
    has_all_directives,
    lacks_room_for_group,
)
from kafka_marshal.protocol.layout import (
    digest_of,
    group_items,
    is_settled,
    item_of,
)
from kafka_marshal.protocol.layout_reading import (
    Change,
    Reading,
    is_over,
    is_torn,
)
from kafka_marshal.protocol.lost_changes import (
    LostChange,
    keeps_state,
    lost_before,
    lost_by,
)
from kafka_marshal.protocol.records import (
    IMPORTED_MAX,
    ImportedDirective,
    ImportedKey,
    ImportedSettings,
    LayoutDone,
    LayoutFence,
    LayoutFinal,
    LayoutGroups,
    LayoutImport,
)
from kafka_marshal.protocol.state import GroupState, WorldState
from kafka_marshal.protocol.types import Key

Fields = Mapping[str, Any]
"""Sender and tags of a record, by name."""

Item = TypeVar("Item", ImportedKey, ImportedSettings, ImportedDirective)

FINAL_AFTER_MS = 30_000
"""Time after the last LayoutDone from which the change no longer waits for members."""
_ITEMS_BYTES_MAX = FRAME_BYTES_MAX - 2_048
"""Maximum size of the items of an import; the rest is for its sender and tags."""
_encode = msgspec.msgpack.Encoder().encode


class Import(NamedTuple):
    """Keys of a source that one record brings to a target.

    Attributes:
        target: The partition that the record goes to.
        source: The partition in which the keys are final.
        source_offset: Offset up to which the source was read.
        keys: The keys.
        items: What the record carries of each key, in the same order.
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
    """The end of a change in one partition, possibly of an earlier change.

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
        key_count: Number of keys that wait for it.
        left_ms: Estimate of the longest time left; None if unknown.
    """

    reason: str
    partition: int
    client_id: str | None = None
    key_count: int = 0
    left_ms: int | None = None


# --- the steps


@attrs.frozen(kw_only=True)
class Steps:
    """The next records of a change; they may be written in any order.

    Attributes:
        change: The change.
        is_over: Whether partition 0 has ended the change, so that only Finals are left.
        is_torn: Whether partitions have Configs of two changes of one generation. Then
            there are no steps, nobody may claim, and a person decides.
        fences: Partitions that lack the fence; only partition 0, if that lacks it.
        earlier: Partitions that lack the change before, and get its fence first.
        imports: Imports of final keys.
        groups: Imports of settings and directives, which are final from the fence on.
        dones: Sources with nothing left for a target.
        finals: The partitions in which a change ends.
        repeat_fences: Partitions to which the fence is appended again. It is refused,
            but moves their log time, without which nothing else can happen there.
        waits: What the other steps wait for.
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
    repeat_fences: tuple[int, ...] = ()
    waits: tuple[Wait, ...] = ()


def next_steps(reading: Reading, *, wanted: Collection[Key] = ()) -> Steps:
    """Return the next steps of a change.

    Args:
        reading: What is known of the change.
        wanted: Keys to import before others.
    """
    change, known = reading.change, reading.known
    if is_torn(known, change):
        return Steps(change=change, is_torn=True)
    over = is_over(known, change)
    fences = fences_of(reading)
    if 0 not in known or (not over and reading.open(0) is None):
        # Partition 0 decides: until it has the change, nothing else is written.
        lost = () if fences else (Wait("behind" if 0 in known else "unread", 0),)
        return Steps(change=change, fences=fences, waits=lost)
    waits = list(waits_of(reading))
    stalled = {each.partition for each in waits if each.left_ms == 0}
    return Steps(
        change=change,
        is_over=over,
        fences=fences,
        earlier=tuple(sorted(lost_before(known).items())),
        imports=tuple(imports_of(reading, wanted=wanted)),
        groups=tuple(groups_of(reading)),
        dones=tuple(dones_of(reading)),
        finals=tuple(finals_of(reading)),
        repeat_fences=tuple(sorted(stalled)),
        waits=tuple(waits),
    )


def fences_of(reading: Reading) -> tuple[int, ...]:
    """Return the partitions to which the fence is appended.

    If partition 0, which decides, has the fence: all other partitions without it. If
    only others have it, the log of partition 0 was truncated: partition 0, once it has
    all before the fence. The state of a partition that comes into use need not be
    known: the partition begins with the fence (PROTOCOL 10.2).
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
    """Return settings and directives that move to a target and are unknown there."""
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
    """Yield, for each target, the sources whose moving keys are final and imported.

    A quiet source is not done: a Reset may have removed keys that still have owners. If
    a source has ended the change, it has no moving keys any more, and its target has
    lost the LayoutDone, and maybe imports (PROTOCOL 10.9).
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
    for t, ended in lost_dones_of(reading):
        yield Done(
            target=t,
            source=ended.partition,
            source_offset=ended.next_offset,
            key_count=0,
            digest=digest_of(()),
        )


def lost_dones_of(reading: Reading) -> Iterator[tuple[int, WorldState]]:
    """Yield targets that are not done with a source in which the change has ended.

    Also with a source that lost the fence and gets it no more, because partition 0 has
    ended the change. Each target comes with the state of the source.
    """
    change, known = reading.change, reading.known
    over, due = is_over(known, change), fences_of(reading)
    for source, target in change.pairs:
        is_gone = over and source in known and reading.open(source) is None
        is_gone = (is_gone and source not in due) or reading.has_ended(source)
        if is_gone and reading.is_done(source, target) is False:
            yield target, known[source]


def finals_of(reading: Reading) -> Iterator[Final]:
    """Yield the Finals that are due: in partition 0 first, then in all others.

    Includes Finals of earlier changes, in partitions that are not part of this one.
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


# --- records of as many items as fit


def grouped(
    source: WorldState, keys: Iterable[Key], *, target: int
) -> Iterator[Import]:
    """Yield imports of final keys, each of as many as fit a record.

    Args:
        source: The source; all keys are final there.
        keys: The keys, in the order in which they are needed.
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


# --- what is waited for


def waits_of(reading: Reading) -> Iterator[Wait]:
    """Yield what the change waits for; after ``left_ms``, only log time must move."""
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

    The change must be open there. If nothing is yielded, the LayoutFinal may be
    written. Safety does not depend on adoption: claims of members that act on an
    earlier generation are refused.
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
    """Return whether members act on a change, or it waits no longer for them.

    Args:
        floor: Least generation that a live member acts on; None if no member reports
            any.
        generation: Generation of the change.
        waited_ms: Append time of partition 0 since the last LayoutDone.
    """
    return (floor is not None and floor >= generation) or waited_ms >= FINAL_AFTER_MS


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
