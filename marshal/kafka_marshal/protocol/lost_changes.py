"""A change of the partition count that one partition has lost (PROTOCOL 10.9).

While the change is open anywhere, its fence is known from there. Once it has ended
everywhere, what is left of it is the Config that it brought: a partition in use with an
earlier one, of another count, gets a fence with that Config again. Where the next
change is open already, that Config is the one before in partition 0.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.layout import is_step
from kafka_marshal.protocol.placement import leading
from kafka_marshal.protocol.records import Config, Limits
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
    return LostChange(restored_op(config), max(lost.values()), config)


def lost_by(worlds: Mapping[int, WorldState]) -> dict[int, int]:
    """Return the partitions in use that have lost a change, with their counts.

    While a change is open in partition 0, others may not have it yet.
    """
    first = worlds.get(0)
    if first is None or first.config is None or first.layout is not None:
        return {}
    return _lacking(worlds, _newest(worlds))


def unclaimed(worlds: Mapping[int, WorldState]) -> frozenset[int]:
    """Return the partitions in use that have lost changes, or several.

    Their count differs from the newest one, or nothing but the generation and the era:
    where a change of other settings has not arrived, those do. And another partition
    shows that the count has changed.
    """
    first = worlds.get(0)
    if first is None or first.config is None or first.layout is not None:
        return frozenset()
    newest = _newest(worlds)
    return frozenset(
        t
        for t, state in worlds.items()
        if t < newest.partition_count
        and (config := state.config) is not None
        and config.format_id == newest.format_id
        and config.generation < newest.generation
        and (
            config.partition_count != newest.partition_count
            or (
                _settings(config) == _settings(newest)
                and any(
                    _shows_change(other, newest=newest, since=config.era)
                    for other in worlds.values()
                )
            )
        )
    )


def _shows_change(state: WorldState, *, newest: Config, since: int) -> bool:
    """Return whether a partition is in use no more, or only came into use since."""
    config = state.config
    if config is None or config.format_id != newest.format_id:
        return False
    if state.partition >= newest.partition_count:
        return True
    is_new = all(era > since for _, era in state.eras)
    return is_new and config.generation == newest.generation


def _settings(config: Config) -> tuple[int, int, Limits]:
    return config.heartbeat_interval_ms, config.feature_level, config.limits


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
    """Return the partitions in use by a Config that have an earlier one, with counts.

    One that the change brought into use may have an earlier life, of any count. It
    begins again: the count is the one before the change.
    """
    begun = _begun_from(worlds, config)
    found: dict[int, int] = {}
    for t, state in worlds.items():
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


def _newest(worlds: Mapping[int, WorldState]) -> Config:
    found = leading(worlds)
    assert found is not None
    assert found.config is not None
    return found.config


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
