"""Ends operations that set positions, as a group's home decided (PROTOCOL 8.4, 8.5).

An admin ends its own operation, or one of an admin that died. Members do so, too.
"""

from collections.abc import Callable, Iterable, Mapping

import attrs

from kafka_marshal.admin.pausing import Sender, ignore_progress
from kafka_marshal.engine.follower import Follower
from kafka_marshal.errors import ClaimRejected
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.placement import keys_of
from kafka_marshal.protocol.records import Config, ResolvePosition
from kafka_marshal.protocol.resolving import (
    ABORTED,
    COMMITTED,
    UNDECIDED,
    PositionOperation,
    decided_at,
    home_of,
    in_order,
    outcome_of,
    unresolved,
)
from kafka_marshal.protocol.state import KeyState, Previous, WorldState
from kafka_marshal.protocol.types import Key, TopicPartition

UNKNOWN = "unknown"
"""The operation is over, and the log no longer shows whether it was committed."""


@attrs.frozen(kw_only=True)
class OpenOperation:
    """An operation that sets positions and is not resolved in every partition.

    Attributes:
        group_id: The group.
        op_id: Identifies the operation, in hex.
        is_committed: Whether the group's home has committed the operation.
        locked: The keys that the operation has locked, sorted.
        client_id: client_id of the admin while the operation's pause lasts, else None.
    """

    group_id: str
    op_id: str
    is_committed: bool
    locked: tuple[Key, ...]
    client_id: str | None


def open_operations(
    worlds: Iterable[WorldState], group_id: str | None = None
) -> tuple[OpenOperation, ...]:
    """Return the operations with locked keys, or whose commit is not resolved.

    Args:
        worlds: All coordinating partitions.
        group_id: Only operations of this group; None for all.
    """
    worlds = list(worlds)
    committed, admins = set(), {}
    for world in worlds:
        for name, state in world.groups.items():
            if state.verdict is not None:
                committed.add(PositionOperation(name, state.verdict.op_id))
            if state.pause is not None:
                operation = PositionOperation(name, state.pause.op_id)
                admins[operation] = state.pause.client_id
    return tuple(
        OpenOperation(
            group_id=each.group_id,
            op_id=each.op_id.hex(),
            is_committed=each in committed,
            locked=tuple(sorted(k for w in worlds for k in w.locked.get(each, ()))),
            client_id=admins.get(each),
        )
        for each in sorted(unresolved(worlds))
        if group_id in {None, each.group_id}
    )


def require_resolved(worlds: Iterable[WorldState], group_id: str | None = None) -> None:
    """Refuse to continue while operations are not resolved.

    Args:
        worlds: All coordinating partitions.
        group_id: Only operations of this group.

    Raises:
        ClaimRejected: An operation has locked keys, or its commit is not applied
            everywhere.
    """
    for each in open_operations(worlds, group_id):
        raise ClaimRejected(
            f"operation {each.op_id} sets positions of group {each.group_id!r} and is "
            "not resolved in every coordinating partition; wait until it is, continue "
            f"it with its plan, or end it with: marshal groups finish {each.group_id}",
            reason="busy",
        )


@attrs.frozen(kw_only=True)
class ResetResult:
    """Result of a reset that was executed, or ended.

    Attributes:
        op_id: Identifies the operation for its undo, in hex.
        group_id: The group.
        outcome: ``committed`` or ``aborted``; ``unknown`` if the operation ended so
            long ago that the log no longer shows its outcome.
        moved: Position before and after, by partition, for the partitions that no later
            operation has set. Under at most once, the position before is the larger of
            position and granted.
        mirror_error: Why Kafka's committed offsets were not written; None if they were,
            or if nothing was committed.
    """

    op_id: str
    group_id: str
    outcome: str
    moved: Mapping[TopicPartition, tuple[int | None, int]]
    mirror_error: str | None = None

    def require_committed(self) -> None:
        """Refuse a result that set nothing, or may have set nothing.

        Raises:
            ClaimRejected: The operation was not committed, or its outcome is unknown.
        """
        if self.outcome == UNKNOWN:
            raise ClaimRejected(
                f"operation {self.op_id} ended before, and later operations have "
                "replaced its outcome in the log's state; nothing was written; to see "
                f"whether it set positions: marshal groups history {self.group_id}",
                reason=self.outcome,
            )
        if self.outcome != COMMITTED:
            raise ClaimRejected(
                f"operation {self.op_id} was {self.outcome}: it set nothing; plan it "
                "again",
                reason=self.outcome,
            )


@attrs.frozen(kw_only=True)
class ResetProgress:
    """How far an operation that sets positions is.

    Attributes:
        step: ``pause``, ``drain``, ``lock``, ``commit`` or ``resolve``.
        left_count: How many things the step still waits for: keys with an owner
            (``drain``), records (``lock``, ``commit``) or coordinating partitions
            (``pause``, ``resolve``).
    """

    step: str
    left_count: int


OnProgress = Callable[[ResetProgress], None]


class Resolution:
    """Ends an operation as the home of its group decided. For one thread.

    It needs no plan: the log has the new position of each key that is locked.
    """

    def __init__(
        self,
        follower: Follower,
        sender: Sender,
        *,
        group_id: str,
        op_id: str,
        config: Config,
        reason: str | None = None,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        """Prepare to end an operation; nothing is written yet.

        Args:
            follower: Follows the log, and has read it to its end.
            sender: Sender of the records.
            group_id: The group.
            op_id: The operation, in hex.
            config: The Config of all coordinating partitions.
            reason: Stored in the log, for people.
            on_progress: Called with each step.
        """
        self._follower = follower
        self._sender = sender
        self._group_id = group_id
        self._op_id = bytes.fromhex(op_id)
        self._operation = PositionOperation(group_id, self._op_id)
        self._reason = reason
        self._on_progress = on_progress
        count = config.partition_count
        self._partitions = range(count)
        self._home_by_count = home_partition(group_id, partition_count=count)

    @property
    def _home(self) -> int:
        """The partition that decides: the group's home, or another with the commit."""
        worlds = self._follower.by_partition
        return home_of(worlds, self._operation, home=self._home_by_count)

    @property
    def outcome(self) -> str:
        """The outcome of the operation, by the log as far as it was read.

        ``committed``, ``aborted``, ``undecided``, or ``unknown`` if the operation is
        over and neither the home nor any key shows it any more.
        """
        home = self._world(self._home)
        shown = outcome_of(home, self._operation)
        if shown == COMMITTED or self._moved_keys():
            return COMMITTED
        if shown == UNDECIDED or self.locked:
            return shown
        # The home keeps only the group's last verdict. If that was decided after this
        # operation was over, it may have replaced a verdict of this operation.
        group = home.groups[self._group_id]
        ended_at = next(at for at, op_id in group.over if op_id == self._op_id)
        verdict = group.verdict
        is_shown = verdict is None or verdict.offset < ended_at
        return ABORTED if is_shown else UNKNOWN

    @property
    def locked(self) -> tuple[Key, ...]:
        """Keys that the operation has locked."""
        return tuple(
            key
            for world in self._follower.worlds
            for key in world.locked.get(self._operation, ())
        )

    def finish(self, timeout_ms: int) -> ResetResult:
        """End the operation as the home decided; an undecided one is aborted.

        Raises:
            DeadlineExceeded: The log did not answer; call it again.
        """
        self._follower.catch_up(timeout_ms)
        if self.outcome == UNDECIDED:
            self._resolve([self._home], timeout_ms, commit=False)
        outcome = self.outcome
        staged = self._staged()
        if outcome != UNKNOWN:
            is_commit, home = outcome == COMMITTED, self._home
            partitions = sorted({*self._partitions, home})
            for step in in_order(outcome, home=home, partitions=partitions):
                self._resolve(step, timeout_ms, commit=is_commit)
        moved = {
            key.topic_partition: (
                before.next_unclaimed(),
                staged.get(key, known.position),
            )
            for key, (before, known) in self._moved_keys().items()
            if known.position is not None
        }
        return ResetResult(
            op_id=self._op_id.hex(),
            group_id=self._group_id,
            outcome=outcome,
            moved=moved,
        )

    def _world(self, partition: int) -> WorldState:
        return self._follower.replicas[partition].world

    def _moved_keys(self) -> dict[Key, tuple[Previous, KeyState]]:
        """Return the keys whose position before the operation is still in the log."""
        known = keys_of(self._follower.worlds, self._group_id)
        return {
            key: (before, each)
            for key, each in known.items()
            if (before := each.before(self._op_id))
        }

    def _staged(self) -> dict[Key, int]:
        """Return the positions that a commit gives to the locked keys."""
        return {
            key: known.lock.position
            for world in self._follower.worlds
            for key in world.locked.get(self._operation, ())
            if (known := world.keys[key]).lock is not None
        }

    def _resolve(
        self, partitions: Iterable[int], timeout_ms: int, *, commit: bool
    ) -> None:
        waiting = [t for t in partitions if not self._is_resolved(t)]
        self._on_progress(ResetProgress(step="resolve", left_count=len(waiting)))
        sent = []
        for t in waiting:
            # The present home, which has no verdict, refuses a commit (PROTOCOL 8.5).
            is_refused = t == self._home_by_count != self._home
            record = self._resolve_record(commit=commit and not is_refused)
            sent.append(self._follower.append(t, record))
        self._follower.await_all(sent, timeout_ms)

    def _is_resolved(self, partition: int) -> bool:
        """Return whether a Resolve would change nothing (PROTOCOL 8.5, `op_over`)."""
        world = self._world(partition)
        group = world.groups.get(self._group_id)
        if group is None or not group.is_over(self._op_id):
            return False
        verdict = group.unresolved
        is_open = verdict is not None and verdict.op_id == self._op_id
        return not is_open and not world.locked.get(self._operation)

    def _resolve_record(self, *, commit: bool) -> ResolvePosition:
        return ResolvePosition(
            **self._sender.fields(self._group_id),
            op_id=self._op_id,
            commit=commit,
            decided=decided_at(self._world(self._home), self._operation)
            if commit
            else None,
            reason=self._reason,
        )
