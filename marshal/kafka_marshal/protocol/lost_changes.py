"""A change of the partition count that one partition has lost (PROTOCOL 10.9).

While the change is open anywhere, its fence is known from there. Once it has ended
everywhere, what is left of it is the Config that it brought: a partition in use with an
earlier one, of another count, gets a fence with that Config again.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.layout import is_step
from kafka_marshal.protocol.placement import leading
from kafka_marshal.protocol.records import Config
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
    config = _newest(worlds)
    return {
        t: count
        for t, state in worlds.items()
        if (count := count_before(t, state.config, newest=config)) is not None
    }


def _newest(worlds: Mapping[int, WorldState]) -> Config:
    found = leading(worlds)
    assert found is not None
    assert found.config is not None
    return found.config


def restored_op(config: Config) -> bytes:
    """Return the operation of fences that restore what has brought a Config."""
    return blake2b(encode(config), digest_size=16).digest()


def count_before(
    partition: int, config: Config | None, *, newest: Config
) -> int | None:
    """Return the count from which a fence leads a partition to the newest Config.

    None where it has lost no change, or several with no single step between; also
    without any Config, where formatting again writes one (PROTOCOL 2.2).
    """
    if config is None or partition >= newest.partition_count:
        return None
    is_behind = (
        config.format_id == newest.format_id
        and config.generation < newest.generation
        and is_step(config.partition_count, newest.partition_count)
    )
    return config.partition_count if is_behind else None


def keeps_state(partition: int, config: Config | None, *, from_count: int) -> bool:
    """Return whether a partition without a fence has keys that it would not move.

    It is in use by its own Config, and that has another count than the fence.
    """
    if config is None or config.partition_count == from_count:
        return False
    return partition < max(config.partition_count, from_count)
