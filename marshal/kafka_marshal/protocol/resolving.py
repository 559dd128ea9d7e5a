"""How a set position ends: as the home of its group decided (PROTOCOL 8.4, 8.5).

Used by the admin that sets positions, and by members that finish what an admin left.
A replica may lag behind the log. The caller has folded the home, and for a commit every
partition, up to an end that it requested after it saw the lock or the verdict.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kafka_marshal.protocol.state import WorldState

COMMITTED, ABORTED, UNDECIDED = "committed", "aborted", "undecided"


class PositionOperation(NamedTuple):
    """A set position of a group.

    Attributes:
        group_id: The group.
        op_id: Identifies the operation.
    """

    group_id: str
    op_id: bytes


def outcome_of(home: WorldState, operation: PositionOperation) -> str:
    """Return ``committed``, ``aborted`` or ``undecided``, as the home shows it.

    An operation that the home does not know is undecided: an abort of it there is the
    decision, and is judged by the home itself.
    """
    group = home.groups.get(operation.group_id)
    verdict = None if group is None else group.verdict
    if verdict is not None and verdict.op_id == operation.op_id:
        return COMMITTED
    is_over = group is not None and group.is_over(operation.op_id)
    return ABORTED if is_over else UNDECIDED


def decided_at(home: WorldState, operation: PositionOperation) -> int | None:
    """Return the offset of the commit on the home, None without one."""
    if outcome_of(home, operation) != COMMITTED:
        return None
    verdict = home.groups[operation.group_id].verdict
    assert verdict is not None
    return verdict.offset


def in_order(
    outcome: str, *, home: int, partitions: Iterable[int]
) -> tuple[tuple[int, ...], ...]:
    """Return the partitions to resolve, in steps.

    The records of a step are read back before those of the next step are sent. A commit
    reaches the home last: other partitions are resolved by what the home shows.
    """
    others = tuple(t for t in partitions if t != home)
    if outcome == COMMITTED:
        return (others, (home,))
    return ((home,), others)


def unresolved(worlds: Iterable[WorldState]) -> frozenset[PositionOperation]:
    """Return the operations that have locked keys or an unresolved verdict."""
    found: set[PositionOperation] = set()
    for world in worlds:
        found.update(PositionOperation(*name) for name in world.locked)
        for group_id, group in world.groups.items():
            if group.unresolved is not None:
                found.add(PositionOperation(group_id, group.unresolved.op_id))
    return frozenset(found)


def home_of(
    worlds: Mapping[int, WorldState], operation: PositionOperation, *, home: int
) -> int:
    """Return the partition that shows the outcome of an operation.

    That is the home of its group, unless another partition has its commit: then the
    home has moved since, and a log has lost a record that resolved it (PROTOCOL 8.5).
    """
    having = (
        t for t, each in worlds.items() if decided_at(each, operation) is not None
    )
    return next(having, home)


def may_be_decided(
    home: WorldState, operation: PositionOperation, *, elapsed_ms: int
) -> bool:
    """Return whether the admin may still commit or abort: its pause is active at home.

    Args:
        home: The home of the group.
        operation: The operation.
        elapsed_ms: Local time since the last entry of the home (PROTOCOL 4.11).
    """
    pause = home.active_pause(operation.group_id)
    if pause is None or pause.op_id != operation.op_id:
        return False
    if outcome_of(home, operation) != UNDECIDED:
        return False
    return home.append_time_ms + elapsed_ms < pause.until_ms


def left_to_resolve(
    worlds: Mapping[int, WorldState], operation: PositionOperation, *, home: int
) -> Sequence[int]:
    """Return the partitions that a member resolves next; empty at the end.

    These are partitions where the operation has locked keys or pauses the group.
    """
    outcome = outcome_of(worlds[home], operation)
    for step in in_order(outcome, home=home, partitions=worlds):
        left = [t for t in step if _is_open(worlds[t], operation)]
        if outcome == UNDECIDED or left:
            return left or step
    return ()


def _is_open(world: WorldState, operation: PositionOperation) -> bool:
    if operation in world.locked:
        return True
    group = world.groups.get(operation.group_id)
    if group is None:
        return False
    pause, verdict = group.pause, group.unresolved
    is_pausing = pause is not None and pause.op_id == operation.op_id
    return is_pausing or (verdict is not None and verdict.op_id == operation.op_id)
