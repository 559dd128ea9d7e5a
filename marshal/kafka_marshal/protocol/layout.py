"""A change of the partition count: which keys move where, and when (PROTOCOL 10).

Pure functions of the world of one coordinating partition. While a change is open
there, its keys that belong elsewhere under the new count are *moving*, and *final* once
nothing can change them any more. Only final keys are imported by their new partition.
"""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import msgspec

from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.hashing import (
    CHECKPOINT_GROUP,
    RESERVED_TOPICS,
    coordinating_partition,
    home_partition,
)
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.records import (
    Config,
    ImportedDirective,
    ImportedKey,
    ImportedPrevious,
    ImportedSettings,
    LayoutFence,
    Member,
)
from kafka_marshal.protocol.state import ACCEPTED, KeyState, Transition, WorldState
from kafka_marshal.protocol.types import Key

COUNT_MAX = 10_000
"""Maximum number of coordinating partitions before or after a change."""
_CONFIGS_MAX = 64
_PROBES_MAX = 64
MOVING = "moving"
"""Why an owner releases a key that moves, and why its requests are refused."""
_encode = msgspec.msgpack.Encoder().encode


def is_step(from_count: int, to_count: int) -> bool:
    """Return whether two counts differ, and one is a multiple of the other.

    Also False for a count above ``COUNT_MAX``: a partition may have as many sources.
    """
    less, more = sorted((from_count, to_count))
    return less != more and more % less == 0 and more <= COUNT_MAX


def sources_of(partition: int, *, from_count: int, to_count: int) -> tuple[int, ...]:
    """Return the partitions whose keys may move to this one; a source has none."""
    if partition >= to_count:
        return ()
    if from_count < to_count:
        return (partition % from_count,) if partition >= from_count else ()
    return tuple(range(partition + to_count, from_count, to_count))


@lru_cache(maxsize=_CONFIGS_MAX)
def _read(frame: bytes) -> Config:
    config = decode(frame)
    assert isinstance(config, Config)  # the codec accepts no other frame
    return config


def config_of(record: LayoutFence) -> Config:
    """Return the Config that a fence brings."""
    return _read(record.config)


def place_of(key: Key, *, partition_count: int) -> int:
    """Return the coordinating partition of a data partition under a count."""
    return coordinating_partition(
        key.topic, key.partition, partition_count=partition_count
    )


def is_retired(state: WorldState) -> bool:
    """Return whether the partition is not in use any more, or not yet."""
    config = state.config
    return config is not None and state.partition >= config.partition_count


def is_moving(state: WorldState, key: Key) -> bool:
    """Return whether a key of this partition moves to another by an open change."""
    layout, config = state.layout, state.config
    if layout is None or config is None or key.topic in RESERVED_TOPICS:
        return False
    if place_of(key, partition_count=config.partition_count) == state.partition:
        return False
    return place_of(key, partition_count=layout.from_count) == state.partition


def is_final(state: WorldState, key: Key) -> bool:
    """Return whether a key moves and nothing can change it any more (PROTOCOL 10.3)."""
    known = state.keys.get(key)
    return known is not None and is_moving(state, key) and is_settled(state, known)


def is_settled(state: WorldState, known: KeyState) -> bool:
    """Return whether nothing can change a moving key any more (PROTOCOL 10.3)."""
    if known.lock is not None or state.quiet_until_ms is not None:
        return False
    return known.owner is None or known.freshness(state.now_ms) is Freshness.STALE


def is_importing(state: WorldState, key: Key) -> bool:
    """Return whether an unknown key may exist in a source that is not done."""
    layout = state.layout
    if layout is None or key.topic in RESERVED_TOPICS:
        return False
    source = layout.source(place_of(key, partition_count=layout.from_count))
    return source is not None and source.done_ms is None


def is_importing_group(state: WorldState, group_id: str) -> bool:
    """Return whether settings or directives of a group may be in a source not done."""
    layout = state.layout
    if layout is None:
        return False
    if group_id == CHECKPOINT_GROUP and state.partition >= layout.from_count:
        return any(each.done_ms is None for each in layout.sources)
    source = layout.source(home_partition(group_id, partition_count=layout.from_count))
    return source is not None and source.done_ms is None


def is_home_moving(state: WorldState, group_id: str) -> bool:
    """Return whether this partition stops being a group's home by the open change."""
    layout, config = state.layout, state.config
    if layout is None or config is None:
        return False
    homes = (
        home_partition(group_id, partition_count=count)
        for count in (layout.from_count, config.partition_count)
    )
    return [home == state.partition for home in homes] == [True, False]


def group_items(
    state: WorldState, target: int
) -> tuple[list[ImportedSettings], list[ImportedDirective]]:
    """Return the settings and directives that move from a source to a target, sorted.

    Directives of the group ``marshal``, for members of all groups, are in every
    partition: a partition that comes into use gets them from its source.
    """
    layout, config = state.layout, state.config
    assert layout is not None
    assert config is not None
    settings: list[ImportedSettings] = []
    directives: list[ImportedDirective] = []
    for group_id, group in sorted(state.groups.items()):
        home = home_partition(group_id, partition_count=config.partition_count)
        is_moving_there = home == target and is_home_moving(state, group_id)
        if group.settings is not None and is_moving_there:
            fields = group.settings._asdict()
            settings.append(ImportedSettings(group_id=group_id, **fields))
        if group_id == CHECKPOINT_GROUP:
            is_moving_there = target >= layout.from_count
        if is_moving_there:
            directives += [
                ImportedDirective(group_id=group_id, **each._asdict())
                for each in group.directives
            ]
    return settings, directives


def moving_keys(state: WorldState) -> list[Key]:
    """Return the moving keys, sorted."""
    return [key for key in sorted(state.keys) if is_moving(state, key)]


def item_of(key: Key, known: KeyState) -> ImportedKey:
    """Return what an import carries of a key: no offset or time of the source's log."""
    previous = known.previous
    return ImportedKey(
        group_id=key.group_id,
        topic=key.topic,
        partition=key.partition,
        position=known.position,
        granted=known.granted,
        topic_id=known.topic_id,
        retired_topic_ids=known.retired_topic_ids,
        previous=None if previous is None else ImportedPrevious(*previous),
        successor=None if known.handoff is None else known.handoff[0],
    )


def digest_of(items: Iterable[ImportedKey]) -> bytes:
    """Return the digest of items in their order, for a LayoutDone."""
    return blake2b(_encode(list(items)), digest_size=16).digest()


def used_count(first: WorldState) -> int | None:
    """Return how many partitions are in use according to partition 0, or None.

    While a change is open there, partitions of either count are in use. Others, such as
    those of a change that was given up, hold nothing that is needed (PROTOCOL 7.3).
    """
    if first.config is None:
        return None
    count = first.config.partition_count
    return count if first.layout is None else max(count, first.layout.from_count)


class Probes:
    """Finds the record from which on a state is known, if the log's start is missing.

    A partition that comes into use begins with the first fence of the change (PROTOCOL
    10.2). A probe, whose incarnation is the op_id of the change, was read back before
    any fence of the change was written (10.7). So the first fence behind the probe is
    the first of all. A fence without a probe before it may be a repeated one, with
    imports between the two.
    """

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._seen: deque[bytes] = deque(maxlen=_PROBES_MAX)

    def take(self, transition: Transition) -> bool:
        """Return whether the state of the partition is known from this record on."""
        record = transition.record
        if isinstance(record, Member) and record.group_id == CHECKPOINT_GROUP:
            self._seen.append(record.incarnation)
        elif isinstance(record, LayoutFence) and record.op_id in self._seen:
            self._seen.remove(record.op_id)
            is_accepted = transition.outcome == ACCEPTED
            return is_accepted and self._partition >= record.from_count
        return False
