"""Which coordinating partition each key is shown from (PROTOCOL 10).

While the partition count changes, two partitions may know a moving key: its source,
which no longer changes it, and its target. Readers show the key once: from the target
as soon as the target knows it, otherwise from the source. Pure functions of the worlds
of one view, which may have been read at slightly different moments, and may lack
partitions.
"""

from collections.abc import Iterable, Mapping

from kafka_marshal.protocol.hashing import home_partition, key_partition
from kafka_marshal.protocol.layout import is_final, is_moving, place_of
from kafka_marshal.protocol.records import Config
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.types import Key

Worlds = Mapping[int, WorldState]
"""Worlds by coordinating partition."""


def leading(worlds: Worlds) -> WorldState | None:
    """Return the partition whose Config is the newest one in force, or None.

    Partition 0 decides. If it is behind, after a loss of its last entries or in a view
    of a past moment, another partition in use shows the newer Config.
    """
    first = worlds.get(0)
    config = None if first is None else first.config
    found = None if config is None else first
    for _, world in sorted(worlds.items()):
        if world.config is None:
            continue
        if config is not None and (
            world.partition >= config.partition_count
            or world.config.format_id != config.format_id
        ):
            continue  # the Config of an unused partition decides nothing
        if found is None or world.config.generation > _generation(found):
            found = world
    return found


def _generation(world: WorldState) -> int:
    return 0 if world.config is None else world.config.generation


def newest(config: Config, worlds: Iterable[WorldState]) -> Config:
    """Return the Config with the highest generation, of the same log.

    Usually that of partition 0. If its log has lost the end, other partitions may have
    a newer one, also partitions that it no longer has in use.
    """
    for world in worlds:
        other = world.config
        if other is not None and other.format_id == config.format_id:
            config = max(config, other, key=lambda each: each.generation)
    return config


def counts_of(worlds: Worlds) -> tuple[int, ...]:
    """Return the count in force, then the one before it while a change is open."""
    found = leading(worlds)
    if found is None or found.config is None:
        return ()
    counts = (found.config.partition_count,)
    return counts if found.layout is None else (*counts, found.layout.from_count)


def homes_of(worlds: Worlds, group_id: str) -> tuple[int, ...]:
    """Return the homes of a group: that of the count in force first."""
    homes = (home_partition(group_id, partition_count=n) for n in counts_of(worlds))
    return tuple(dict.fromkeys(homes))


def target_of(state: WorldState, key: Key) -> int | None:
    """Return the partition that a key of this one moves to, None if it stays."""
    if state.layout is None or state.config is None or not is_moving(state, key):
        return None
    return place_of(key, partition_count=state.config.partition_count)


def progress_of(worlds: Worlds, key: Key, *, state: WorldState) -> str | None:
    """Return how far the move of a key is, None if it does not move.

    ``draining``: it has an owner that may still release it. ``final``: nothing can
    change it any more, and it may be imported.
    """
    if target_of(state, key) is None or not is_shown(worlds, key, state=state):
        return None
    return "final" if is_final(state, key) else "draining"


def is_shown(worlds: Worlds, key: Key, *, state: WorldState) -> bool:
    """Return whether readers show a key from this partition.

    They do not if the key has moved away: its target knows it, or has nothing left to
    import from here.
    """
    place = target_of(state, key)
    target = None if place is None else worlds.get(place)
    if target is None or not _is_after(target.config, state.config):
        return True
    if key in target.keys:
        return False
    if target.layout is None:
        return False
    source = target.layout.source(state.partition)
    return source is not None and source.done_ms is None


def _is_after(target: Config | None, source: Config | None) -> bool:
    """Return whether a target was fenced by the change that is open in its source."""
    # A target that was not fenced has another count, from earlier use, or none.
    return (
        target is not None
        and source is not None
        and target.partition_count == source.partition_count
    )


def standing_keys(worlds: Worlds) -> dict[Key, WorldState]:
    """Return every key with the partition that it is shown from, each key once."""
    found: dict[Key, WorldState] = {}
    for _, state in sorted(worlds.items()):
        for key in state.keys:
            other = found.get(key)
            if not is_shown(worlds, key, state=state):
                continue
            # Two show it only if they were read at different moments.
            if other is None or _generation(state) > _generation(other):
                found[key] = state
    return found


def standing_of(worlds: Worlds, key: Key) -> WorldState | None:
    """Return the partition that a key is shown from, None if none knows it."""
    knowing = (state for state in worlds.values() if key in state.keys)
    shown = [state for state in knowing if is_shown(worlds, key, state=state)]
    return max(shown, key=_generation, default=None)


def partition_of(worlds: Worlds, key: Key) -> int | None:
    """Return the partition that knows a key, else the one in which it is claimed.

    None without a Config.
    """
    found = standing_of(worlds, key)
    if found is not None:
        return found.partition
    counts = counts_of(worlds)
    return None if not counts else place_under(key, counts[0])


def place_under(key: Key, count: int) -> int:
    """Return the coordinating partition of a key under a count."""
    return key_partition(*key.topic_partition, partition_count=count)


def keys_of(states: Iterable[WorldState], group_id: str) -> dict[Key, KeyState]:
    """Return the keys of a group in these coordinating partitions, each key once."""
    return {
        key: state.keys[key]
        for key, state in standing_keys(by_partition(states)).items()
        if key.group_id == group_id
    }


def by_partition(states: Iterable[WorldState]) -> dict[int, WorldState]:
    """Return worlds by their coordinating partition."""
    return {state.partition: state for state in states}
