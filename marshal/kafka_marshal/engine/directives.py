"""Applies directives to members of a group, and drains this client (PROTOCOL 9.7)."""

from collections.abc import Sequence

import msgspec

from kafka_marshal.engine.context import Context
from kafka_marshal.engine.outbox import Outbox
from kafka_marshal.protocol.codec import OP_ID_BYTES
from kafka_marshal.protocol.items import StandingDirective
from kafka_marshal.protocol.planner import MemberView
from kafka_marshal.protocol.records import (
    CORDON,
    DRAIN,
    SECOND_LEVEL,
    Directive,
)
from kafka_marshal.protocol.state import WorldState


def directed(
    members: Sequence[MemberView], homes: Sequence[WorldState], *, group_id: str
) -> Sequence[MemberView]:
    """Return members, marked as drained or cordoned if a directive says so.

    Args:
        members: Live members.
        homes: Worlds of their group's homes; for each member the first with a directive
            decides.
        group_id: The group.
    """
    homes = [home for home in homes if home.directed]
    if not homes:
        return members  # the common case
    found = []
    for each in members:
        name = (group_id, each.client_id)
        actions = (home.action_for(name, host=each.host) for home in homes)
        action = next((action for action in actions if action is not None), None)
        found.append(
            msgspec.structs.replace(
                each, is_drained=action == DRAIN, is_cordoned=action == CORDON
            )
        )
    return found


ENDED_MS = 0
WHY = "it shuts down"


class SelfDrain:
    """Drains this client by a directive, as while it shuts down (PROTOCOL 9.7).

    Other members read the directive, so they give nothing back to this client. If this
    process dies, the next process of its client_id ends the directive; it also ends by
    itself. Every method is called under the engine's lock.
    """

    __slots__ = (
        "_context",
        "_host",
        "_op_id",
        "_outbox",
        "_sent_ms",
        "_until_ms",
        "_why",
    )

    def __init__(self, context: Context, outbox: Outbox, *, host: str) -> None:
        self._context = context
        self._host = host
        self._outbox = outbox
        self._op_id: bytes | None = None
        self._until_ms = 0
        self._sent_ms = 0
        self._why = WHY

    @property
    def is_in_force(self) -> bool:
        """Whether any directive drains this client."""
        owner, group_id = self._outbox.claimant.owner, self._outbox.claimant.group_id
        name = (group_id, owner.client_id)
        return self._home.action_for(name, host=self._host) == DRAIN

    @property
    def why(self) -> str | None:
        """Why this process drains its client, None while it does not."""
        return None if self._op_id is None else self._why

    def begin(self, for_ms: int, *, why: str = WHY) -> bool:
        """Begin to drain; return whether the log supports directives. Idempotent.

        Args:
            for_ms: Time after which the directive ends by itself.
            why: The reason, for people.
        """
        home = self._home
        if home.feature_level < SECOND_LEVEL or home.config is None:
            return False
        if self._op_id is None:
            self._op_id = self._context.ports.entropy.random_bytes(OP_ID_BYTES)
            wall_ms = max(self._context.ports.clock.wall_ms(), home.append_time_ms)
            for_ms = min(for_ms, home.config.limit("max_pause_ms"))
            self._until_ms, self._why = wall_ms + for_ms, why
            self._send(self._op_id, self._until_ms)
        return True

    def drive(self, now_ms: int) -> None:
        """Repeat the directive if the log lacks it; end one of an earlier process."""
        answer_ms, home = self._context.heartbeat_interval_ms // 2, self._home
        is_idle = self._op_id is None and not home.directed  # the common case
        if is_idle or now_ms - self._sent_ms <= answer_ms:
            return
        shown = self._shown()
        if self._op_id is None:
            owner = self._outbox.claimant.owner
            for each in shown:
                name = owner.client_id
                is_own = (each.client_id, each.client) == (name, name)
                if is_own and each.incarnation != owner.incarnation:
                    self._send(each.op_id, ENDED_MS)
            return
        is_over = home.append_time_ms >= self._until_ms
        if not is_over and all(each.op_id != self._op_id for each in shown):
            self._send(self._op_id, self._until_ms)

    def end(self) -> list[int]:
        """End the directive; return the sequence numbers to wait for."""
        if self._op_id is None:
            return []
        seqs = [self._send(self._op_id, ENDED_MS)]
        self._op_id = None
        return seqs

    def _send(self, op_id: bytes, until_ms: int) -> int:
        claimant = self._outbox.claimant
        self._sent_ms = self._context.now_ms
        seq, _ = self._outbox.send(
            self._context.home_of(claimant.group_id),
            lambda seq: Directive(
                **claimant.sender(seq),
                op_id=op_id,
                client=claimant.owner.client_id,
                host=None,
                action=DRAIN,
                msg_expire_time=until_ms,
                reason=self._why,
            ),
        )
        return seq

    @property
    def _home(self) -> WorldState:
        group_id = self._outbox.claimant.group_id
        return self._context.replicas[self._context.home_of(group_id)].world

    def _shown(self) -> Sequence[StandingDirective]:
        group = self._home.groups.get(self._outbox.claimant.group_id)
        return () if group is None else tuple(group.directives)
