"""Judges set positions: all keys of an operation move, or none (S8)."""

from collections.abc import Iterable, Mapping

import attrs

from kafka_marshal.protocol.records import (
    DecidePosition,
    ReleaseGroup,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key
from simulator.checkers import Folded, Violation

OF_OPERATION = (ReleaseGroup, StagePosition, DecidePosition, ResolvePosition)
"""Records that a set position consists of."""


@attrs.define(eq=False)
class Asked:
    """A set position that was requested of an admin, and its effects in the log.

    Attributes:
        targets: The positions to set.
        locked: Keys that it has locked.
        moved: Keys that it has moved, with their earlier positions.
        kept: Keys that it had locked and did not move.
        has_lost: Whether a log has lost a record of it, so that it may be mixed (8.6).
    """

    targets: Mapping[Key, int]
    locked: set[Key] = attrs.field(factory=set)
    moved: dict[Key, int | None] = attrs.field(factory=dict)
    kept: set[Key] = attrs.field(factory=set)
    has_lost: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether some keys moved and others never will, without a lost record."""
        if self.has_lost:
            return False
        if self.moved and self.kept:
            return True
        is_over = bool(self.moved) and not self.locked
        return is_over and self.moved.keys() != self.targets.keys()


class PositionJudge:
    """Judges the operations of all admins, record by record, over all partitions.

    Attributes:
        operations: Each operation, by its op_id.
    """

    def __init__(self) -> None:
        """Start without operations."""
        self.operations: dict[bytes, Asked] = {}

    def ask(self, op_id: bytes, targets: Mapping[Key, int]) -> None:
        """Add an operation that was requested of an admin; repeats change nothing."""
        self.operations.setdefault(op_id, Asked(targets))

    def on_lost(self, record: object) -> None:
        """Record that a log has lost a record."""
        if isinstance(record, OF_OPERATION) and record.op_id in self.operations:
            self.operations[record.op_id].has_lost = True

    def take(self, folded: Folded) -> None:
        """Judge a transition.

        Raises:
            Violation: An operation moved only some of its keys, or to other positions.
        """
        transition = folded.transition
        key, record = transition.key, transition.record
        if key is None or not isinstance(record, StagePosition | ResolvePosition):
            return
        asked = self.operations.get(record.op_id)
        if asked is None:
            return
        effect, detail = transition.effect, transition.detail or {}
        is_wrong = detail.get("position") != asked.targets.get(key)
        if effect == "staged":
            asked.locked.add(key)
        elif effect == "position_set":
            asked.locked.discard(key)
            asked.moved[key] = folded.head
        elif effect == "unlocked":
            asked.locked.discard(key)
            asked.kept.add(key)
            is_wrong = False
        else:
            return
        name = name_of(record.op_id.hex())
        if is_wrong:
            raise Violation("8.3", f"{key} is {effect} at {detail} by {name}")
        if asked.is_mixed:
            moved, kept = sorted(asked.moved), sorted(asked.kept)
            text = f"{name!r} moved {moved}, not {kept}, of {sorted(asked.targets)}"
            raise Violation("S8", text)


def unresolved_in(worlds: Iterable[WorldState]) -> list[str]:
    """Return what keeps a group from continuing: locks, and unresolved commits."""
    found = []
    for world in worlds:
        found += [f"locks of {name_of(op_id.hex())!r}" for _, op_id in world.locked]
        for group in world.groups.values():
            if group.unresolved is not None:
                name = name_of(group.unresolved.op_id.hex())
                found.append(f"commit of {name!r}")
    return found


def name_of(op_id: str) -> str:
    """Return an operation's name, for people."""
    return bytes.fromhex(op_id).decode(errors="replace").rstrip(".")
