"""Configs and changes of the partition count that a partition has lost (PROTOCOL 10.9).

While the change is open anywhere, its fence is known from there. Once it has ended
everywhere, what is left of it is the Config that it brought: a partition in use with an
earlier one, of another count, gets a fence with that Config again. Where the next
change is open already, that Config is the one before in partition 0. Where the count
is the same, the Config itself is written again.
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
    """A change that a partition has lost, as the fence that restores it has it.

    Attributes:
        op_id: The operation; the same in all fences that restore the change.
        from_count: The count of the partition.
        config: The Config that it lacks.
    """

    op_id: bytes
    from_count: int
    config: Config


def lost_change(worlds: Mapping[int, WorldState]) -> LostChange | None:
    """Return the change that a partition in use has lost, None without one.

    Of several partitions that with the largest count is first: others have followed it
    from there.
    """
    lost = lost_by(worlds)
    if not lost:
        return None
    config = _newest(worlds)
    assert config is not None
    return LostChange(restored_op(config), max(lost.values()), config)


def lost_by(worlds: Mapping[int, WorldState]) -> dict[int, int]:
    """Return the partitions in use that have lost a change, with their counts.

    While a change is open in partition 0, others may not have it yet.
    """
    first, newest = worlds.get(0), _newest(worlds)
    if first is None or first.config is None or first.layout is not None:
        return {}
    assert newest is not None
    return _lacking(worlds, newest)


def unclaimed(
    worlds: Mapping[int, WorldState], read: Config | None = None
) -> frozenset[int]:
    """Return the partitions in use that have an earlier Config than another one.

    They may have lost the newest one, and claims under it: a claim would get a token
    below those.

    Args:
        worlds: The coordinating partitions.
        read: The newest Config that the process has ever read, which all of them may
            have lost.
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
    """Return whether partition 0 has the newest Config, by a change that is open."""
    config = first.config
    is_newest = config is not None and config.generation >= newest.generation
    return is_newest and first.layout is not None


def lost_configs(
    worlds: Mapping[int, WorldState], read: Config | None = None
) -> dict[int, Config]:
    """Return the Configs that partitions lack and get next.

    That is the newest one where a partition keeps its count, or has no Config. Others
    get one with their own count before a fence that they would refuse or ignore. No key
    moves by any of these.

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
    """Return the Config that partition 0 gets, which has lost all of its log.

    Where a change is open elsewhere, that before it: its fence is next.
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
    """Return the Config that partition 0 gets, which is behind the newest one.

    It accepts the next generation alone, so what is between them is written again. None
    where a fence or a Final is next, or no single step leads to the newest count.
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
    """Return the Config with which a partition judges a fence, None if it does.

    It has lost that of a higher level, and ignores fences (PROTOCOL 3.3).
    """
    if config is None or config.feature_level >= SECOND_LEVEL:
        return None
    count = max(config.partition_count, newest.partition_count)
    is_below = partition < count and newest.feature_level >= SECOND_LEVEL
    return _between(config, newest) if is_below else None


def _between(config: Config, newest: Config) -> Config | None:
    """Return the next Config of a partition, with its own count, before the newest one.

    It has what the newest one has besides. None where there is none between the two.
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
    """Return whether a partition accepts a Config behind the one that it has (4.12)."""
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

    They refuse the fence of the open one, and get that of the change before first. Of
    its Config partition 0 has what differs: the count, and the era.
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
    """Return the partitions in use that a fence leads to a Config, with their counts.

    One that the change brought into use may have an earlier life, of any other count.
    It begins again: the count is the one before the change. One with the same count
    keeps its state: it may lack nothing but other settings.
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
    """Return the count before a change that brought partitions into use.

    They have no earlier era, and all others have one. None where they do not show it.
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
    """Return the newest Config of the log of partition 0, of any if that has none.

    One that was read, and that all have lost since, counts once partition 0 has all
    before it: it comes next there.
    """
    configs = (state.config for _, state in sorted(worlds.items()))
    config = next((each for each in configs if each is not None), None)
    if config is None:
        return read
    found, first = newest_of(config, worlds.values()), worlds.get(0)
    is_next = first is not None and first.layout is None and first.config == found
    return read if is_next and read is not None and _follows(read, found) else found


def restored_op(config: Config) -> bytes:
    """Return the operation of fences that restore what has brought a Config."""
    return blake2b(encode(config), digest_size=16).digest()


def count_before(
    partition: int,
    config: Config | None,
    *,
    newest: Config,
    from_count: int | None = None,
) -> int | None:
    """Return the count from which a fence leads a partition to the newest Config.

    None where it has lost no change, or several with no single step between; also
    without any Config, where formatting again writes one (PROTOCOL 2.2).

    Args:
        partition: The partition.
        config: What it has.
        newest: The newest Config.
        from_count: With what count it begins again; None where it keeps its state.
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
    """Return whether a partition without a fence has keys that it would not move.

    It is in use by its own Config, and that has another count than the fence.
    """
    if config is None or config.partition_count == from_count:
        return False
    return partition < max(config.partition_count, from_count)
