"""Configs and changes of the partition count that a partition has lost (PROTOCOL 10.9).

While a lost change is open in any partition, its fence is known from there. Once it has
ended everywhere, only its Config is left: a partition in use that has an earlier Config
of another count gets a fence with that Config again. If the next change is already
open, that Config is the one before it in partition 0. If the count is the same, the
Config itself is written again.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.layout import is_step
from kafka_marshal.protocol.placement import newest as newest_of
from kafka_marshal.protocol.records import SECOND_LEVEL, Config
from kafka_marshal.protocol.state import WorldState


class LostChange(NamedTuple):
    """A change that a partition has lost, as the fence that restores it states it.

    Attributes:
        op_id: The operation; the same in all fences that restore the change.
        from_count: The count of the partition.
        config: The Config that the partition lacks.
    """

    op_id: bytes
    from_count: int
    config: Config


def lost_change(worlds: Mapping[int, WorldState]) -> LostChange | None:
    """Return the change that a partition in use has lost, None without one.

    If several partitions have lost one, the largest of their counts comes first: the
    others have followed the change from that count.
    """
    lost = lost_by(worlds)
    if not lost:
        return None
    config = _newest(worlds)
    assert config is not None
    return LostChange(restored_op(config), max(lost.values()), config)


def lost_by(worlds: Mapping[int, WorldState]) -> dict[int, int]:
    """Return the partitions in use that have lost a change, with their counts.

    Empty while a change is open in partition 0: others may not have it yet.
    """
    first, newest = worlds.get(0), _newest(worlds)
    if first is None or first.config is None or first.layout is not None:
        return {}
    assert newest is not None
    return _lacking(worlds, newest)


def unclaimed(
    worlds: Mapping[int, WorldState], read: Config | None = None
) -> frozenset[int]:
    """Return the partitions in use that lack the newest Config: nobody claims there.

    They may have lost that Config, and claims under it. A new claim would get a token
    below the tokens of those claims.

    Args:
        worlds: The coordinating partitions.
        read: The newest Config that the process has ever read, which all partitions
            may have lost.
    """
    first, newest = worlds.get(0), _newest(worlds)
    if newest is None or (read is not None and _follows(read, newest)):
        newest = read
    if first is None or newest is None or _is_opening(first, newest):
        return frozenset()
    return frozenset(
        t
        for t, state in worlds.items()
        if t < newest.partition_count
        and (
            (config := state.config) is None
            or (
                config.format_id == newest.format_id
                and config.generation < newest.generation
            )
        )
    )


def _is_opening(first: WorldState, newest: Config) -> bool:
    """Return whether partition 0 has the newest Config, and a change is open there."""
    config = first.config
    is_newest = config is not None and config.generation >= newest.generation
    return is_newest and first.layout is not None


def lost_configs(
    worlds: Mapping[int, WorldState], read: Config | None = None
) -> dict[int, Config]:
    """Return the Configs that partitions lack and get next.

    A partition that keeps its count, or has no Config, gets the newest one. Others get
    a Config with their own count, before a fence that they would otherwise refuse or
    ignore. None of these Configs moves a key.

    Args:
        worlds: The coordinating partitions.
        read: As for ``unclaimed``.
    """
    first, newest = worlds.get(0), _newest(worlds, read)
    if first is None or newest is None:
        return {}
    if first.config is None:
        return {0: _first_of(worlds, newest=newest)}
    if first.config.generation < newest.generation:
        config = _next_of_first(worlds, first, newest=newest)
        return {} if config is None else {0: config}
    found = {
        t: between
        for t, state in worlds.items()
        if (between := _before_fence(t, state.config, newest=newest)) is not None
    }
    if not found and not any(state.layout is not None for state in worlds.values()):
        fenced = lost_by(worlds)
        found = {
            t: newest
            for t, state in worlds.items()
            if t < newest.partition_count
            and t not in fenced
            and (state.config is None or _follows(newest, state.config))
        }
    return found


def _first_of(worlds: Mapping[int, WorldState], *, newest: Config) -> Config:
    """Return the Config that partition 0 gets if it has lost all of its log.

    If a change is open elsewhere, that is the Config before it: its fence is next.
    """
    for state in worlds.values():
        if state.layout is not None and state.config == newest:
            return msgspec.structs.replace(
                newest,
                generation=newest.generation - 1,
                era=newest.era - 1,
                partition_count=state.layout.from_count,
            )
    return newest


def _next_of_first(
    worlds: Mapping[int, WorldState], first: WorldState, *, newest: Config
) -> Config | None:
    """Return the next Config of partition 0 if it is behind the newest one.

    Partition 0 accepts only the next generation, so all in between are written again.
    None if a fence or a Final is next, or no single step leads to the newest count.
    """
    config = first.config
    assert config is not None
    if first.layout is not None:
        return None
    count = config.partition_count
    froms = {
        state.layout.from_count
        for state in worlds.values()
        if state.layout is not None and state.config == newest
    }
    if count == newest.partition_count and _follows(newest, config):
        # The change that is open has brought its Config to partition 0 before.
        is_next = config.generation + 1 == newest.generation
        if is_next or not froms:
            return newest if is_next else _between(config, newest)
    is_stepping = is_step(count, newest.partition_count)
    return _between(config, newest) if is_stepping and froms <= {count} else None


def _before_fence(
    partition: int, config: Config | None, *, newest: Config
) -> Config | None:
    """Return the Config that a partition needs to judge a fence, None if it needs none.

    A partition that has lost the Config of level 2 ignores fences (PROTOCOL 3.3).
    """
    if config is None or config.feature_level >= SECOND_LEVEL:
        return None
    count = max(config.partition_count, newest.partition_count)
    is_below = partition < count and newest.feature_level >= SECOND_LEVEL
    return _between(config, newest) if is_below else None


def _between(config: Config, newest: Config) -> Config | None:
    """Return the next Config of a partition, with its own count, before the newest one.

    All else is as in the newest one. None if there is no generation between the two.
    """
    between = msgspec.structs.replace(
        newest,
        generation=config.generation + 1,
        era=config.era + 1,
        partition_count=config.partition_count,
    )
    is_same_log = (newest.format_id, newest.cluster_id) == (
        config.format_id,
        config.cluster_id,
    )
    is_before = between.generation < newest.generation and between.era < newest.era
    return between if is_same_log and is_before else None


def _follows(newest: Config, config: Config) -> bool:
    """Return whether a partition that has ``config`` accepts ``newest`` (4.12)."""
    return (
        newest.generation > config.generation
        and newest.era > config.era
        and (
            newest.format_id,
            newest.cluster_id,
            newest.partition_count,
        )
        == (config.format_id, config.cluster_id, config.partition_count)
    )


def lost_before(worlds: Mapping[int, WorldState]) -> dict[int, LostChange]:
    """Return the partitions that lack the change before the one open in partition 0.

    They refuse the fence of the open change, and first get that of the change before.
    Its Config differs from the present one only in what partition 0 knows: generation,
    count and era.
    """
    first = worlds.get(0)
    if first is None or first.config is None or first.layout is None:
        return {}
    config = msgspec.structs.replace(
        first.config,
        generation=first.config.generation - 1,
        partition_count=first.layout.from_count,
        era=first.eras[-1][1],
    )
    op_id = restored_op(config)
    return {
        t: LostChange(op_id, count, config)
        for t, count in _lacking(worlds, config).items()
    }


def _lacking(worlds: Mapping[int, WorldState], config: Config) -> dict[int, int]:
    """Return the partitions in use that a fence leads to a Config, each with its count.

    A partition that the change brought into use may be left from earlier use, under any
    other count. It begins again, so its count is the one before the change. A partition
    with the count of the Config keeps its state: it may lack nothing but other
    settings.
    """
    begun = _begun_from(worlds, config)
    found: dict[int, int] = {}
    for t, state in worlds.items():
        if (
            state.config is not None
            and state.config.partition_count == config.partition_count
        ):
            continue
        count = begun if begun is not None and t >= begun else None
        count = count_before(t, state.config, newest=config, from_count=count)
        if count is not None:
            found[t] = count
    return found


def _begun_from(worlds: Mapping[int, WorldState], config: Config) -> int | None:
    """Return the partition count before the change that added partitions.

    Added partitions have no earlier era, all others have one. None if the partitions
    that have the Config do not show the count.
    """
    begun: list[int] = []
    before = [-1]
    for t, state in worlds.items():
        now = state.config
        if now is None or now.format_id != config.format_id:
            continue
        if t < config.partition_count and now.generation >= config.generation:
            is_begun = all(era >= config.era for _, era in state.eras)
            (begun if is_begun else before).append(t)
    if not begun:
        return None
    counts = range(min(begun), max(before), -1)
    return next((n for n in counts if n and is_step(n, config.partition_count)), None)


def _newest(
    worlds: Mapping[int, WorldState], read: Config | None = None
) -> Config | None:
    """Return the newest Config with the ``format_id`` of partition 0.

    If partition 0 has no Config, the first partition that has one counts instead. A
    Config ``read`` that all have lost since counts once partition 0 has all before it,
    so that it comes next there.
    """
    configs = (state.config for _, state in sorted(worlds.items()))
    config = next((each for each in configs if each is not None), None)
    if config is None:
        return read
    found, first = newest_of(config, worlds.values()), worlds.get(0)
    is_next = first is not None and first.layout is None and first.config == found
    return read if is_next and read is not None and _follows(read, found) else found


def restored_op(config: Config) -> bytes:
    """Return the op_id of fences that restore the change which brought a Config."""
    return blake2b(encode(config), digest_size=16).digest()


def count_before(
    partition: int,
    config: Config | None,
    *,
    newest: Config,
    from_count: int | None = None,
) -> int | None:
    """Return the count from which a fence leads a partition to the newest Config.

    None if it has lost no change, or several with no single step between; also if it
    has no Config, because formatting again writes one (PROTOCOL 2.2).

    Args:
        partition: The partition.
        config: The Config that it has.
        newest: The newest Config.
        from_count: The count with which it begins again; None if it keeps its state.
    """
    if config is None or partition >= newest.partition_count:
        return None
    count = config.partition_count if from_count is None else from_count
    is_behind = (
        config.format_id == newest.format_id
        and config.generation < newest.generation
        and is_step(count, newest.partition_count)
    )
    return count if is_behind else None


def keeps_state(partition: int, config: Config | None, *, from_count: int) -> bool:
    """Return whether a partition has keys that a fence which it lacks would not move.

    That is so if its own Config has it in use, with another count than the fence.
    """
    if config is None or config.partition_count == from_count:
        return False
    return partition < max(config.partition_count, from_count)
