"""Finishes set positions that their admin has left unfinished (PROTOCOL 8.5).

Every member reads every coordinating partition, so any member can resolve an operation
of another group, even if no member of that group is alive.
"""

from collections.abc import Iterable, Mapping

import attrs

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import ResolvePosition
from kafka_marshal.protocol.resolving import (
    COMMITTED,
    PositionOperation,
    decided_at,
    home_of,
    left_to_resolve,
    may_be_decided,
    outcome_of,
    unresolved,
)

from .awaited_ends import AwaitedEnds
from .context import Context
from .heartbeats import INTERVALS_PER_H
from .session import Session

# The part of the interval in which only a live admin acts.
ADMIN_PART = 4
REASON = "finished by a member, because the admin did not"


@attrs.define(eq=False, kw_only=True)
class _Work:
    """An operation that this process may have to finish.

    Attributes:
        is_committed: Whether the home showed a commit when this began.
        due_ms: Local time before which nothing is done.
        ends: Log ends requested after the operation was seen; they must be folded
            before any record is sent.
        sent_ms: Local time of the last record to each partition.
    """

    is_committed: bool
    due_ms: int
    ends: AwaitedEnds | None = None
    sent_ms: dict[int, int] = attrs.field(factory=dict)


class Resolver:
    """Resolves operations for an engine, which drives it once a round under its lock.

    It acts for sessions that are alive; without any it only reads. While the state of
    any coordinating partition is not known, it does nothing.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._works: dict[PositionOperation, _Work] = {}
        self._look_at_ms = 0
        self._incarnation = b""
        self._seq = 0

    def drive(
        self, now_ms: int, *, sessions: Iterable[Session], folded: Mapping[int, int]
    ) -> None:
        """Resolve the operations that are due.

        Args:
            now_ms: Local time.
            sessions: The sessions of the engine.
            folded: Next offset to fold of each coordinating partition.
        """
        if now_ms < self._look_at_ms and not self._works:
            return
        interval_ms = self._context.heartbeat_interval_ms
        self._look_at_ms = now_ms + interval_ms // INTERVALS_PER_H
        if self._context.is_behind:
            self._works.clear()
            return
        worlds = {t: each.world for t, each in self._context.replicas.items()}
        found = unresolved(worlds.values())
        for operation in self._works.keys() - found:
            self._end(operation)
        alive = [each for each in sessions if each.failure is None]
        for operation in sorted(found if alive else ()):
            work = self._work_on(operation, now_ms)
            if work is not None and self._is_ready(work, now_ms, folded):
                client_id = self._client_id(alive, operation)
                self._resolve(operation, work, now_ms, client_id=client_id)

    def _client_id(self, alive: list[Session], operation: PositionOperation) -> str:
        """Return the sender of records: a client of the group, else of any other."""
        if not self._incarnation:
            self._incarnation = self._context.ports.entropy.random_bytes(16)
        mine = [each for each in alive if each.claimant.group_id == operation.group_id]
        return min(each.claimant.owner.client_id for each in mine or alive)

    def _end(self, operation: PositionOperation) -> None:
        work = self._works.pop(operation)
        if work.sent_ms:
            home = self._home_of(operation)
            world = self._context.replicas[home].world
            fields = {
                "group_id": operation.group_id,
                "op_id": operation.op_id.hex(),
                "outcome": outcome_of(world, operation),
            }
            self._context.observe("position_resolved", fields)

    def _work_on(self, operation: PositionOperation, now_ms: int) -> _Work | None:
        """Return the work on an operation, None while its admin may decide.

        It begins again if the home shows a commit that it did not show before: only
        ends requested from then on include every Stage of the operation.
        """
        home = self._context.replicas[self._home_of(operation)]
        elapsed_ms = home.elapsed_ms(now_ms)
        if may_be_decided(home.world, operation, elapsed_ms=elapsed_ms):
            self._works.pop(operation, None)
            return None
        is_committed = outcome_of(home.world, operation) == COMMITTED
        work = self._works.get(operation)
        if work is None or is_committed != work.is_committed:
            due_ms = now_ms + self._random_ms()
            work = self._works[operation] = _Work(
                is_committed=is_committed, due_ms=due_ms
            )
        return work

    def _home_of(self, operation: PositionOperation) -> int:
        worlds = {t: each.world for t, each in self._context.replicas.items()}
        return home_of(worlds, operation, home=self._home_by_count(operation))

    def _home_by_count(self, operation: PositionOperation) -> int:
        # PROTOCOL 10.2: while the partition count changes, the home before the change.
        return self._context.homes_of(operation.group_id)[-1]

    def _random_ms(self) -> int:
        interval_ms = self._context.heartbeat_interval_ms
        least_ms = interval_ms // ADMIN_PART
        return least_ms + self._context.ports.entropy.below(interval_ms - least_ms)

    def _is_ready(self, work: _Work, now_ms: int, folded: Mapping[int, int]) -> bool:
        """Return whether the work is due and the requested log ends are folded."""
        if now_ms < work.due_ms:
            return False
        if work.ends is None:
            work.ends = AwaitedEnds(self._context.ports)
            work.ends.add_unknown(folded)
        return work.ends.are_reached(folded)

    def _resolve(
        self,
        operation: PositionOperation,
        work: _Work,
        now_ms: int,
        *,
        client_id: str,
    ) -> None:
        worlds = {t: each.world for t, each in self._context.replicas.items()}
        home = self._home_of(operation)
        now_home = self._home_by_count(operation)
        again_ms = self._context.heartbeat_interval_ms // 2
        for t in left_to_resolve(worlds, operation, home=home):
            if t in work.sent_ms and now_ms - work.sent_ms[t] < again_ms:
                continue
            work.sent_ms[t] = now_ms
            self._seq += 1
            # A home without the commit refuses it: locks that came back are aborted.
            decided = decided_at(worlds[now_home if t == now_home else home], operation)
            record = ResolvePosition(
                client_id=client_id,
                group_id=operation.group_id,
                incarnation=self._incarnation,
                seq=self._seq,
                op_id=operation.op_id,
                commit=decided is not None,
                decided=decided,
                reason=REASON,
            )
            self._context.ports.log.append(t, encode(record))
