"""Announces a session to its group, and notices a twin of it (PROTOCOL 3.6)."""

from collections.abc import Mapping, Sequence

from kafka_marshal.protocol.records import SUPPORTED_LEVEL, Member
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.transition import ACCEPTED, Transition
from kafka_marshal.protocol.types import Key

from .beats import INTERVALS_PER_H
from .context import Context
from .holding import Holding
from .outbox import Outbox
from .subscription import Subscription


class Announcer:
    """Sends Member records, each H/3 and whenever the subscriptions change."""

    __slots__ = (
        "_context",
        "_due_ms",
        "_first_ms",
        "_first_offset",
        "_host",
        "_outbox",
    )

    def __init__(self, context: Context, outbox: Outbox, *, host: str) -> None:
        self._context = context
        self._outbox = outbox
        self._host = host[:255]
        self._due_ms = 0
        self._first_offset: int | None = None
        self._first_ms = 0

    def announce_soon(self) -> None:
        """Announce at the next round."""
        self._due_ms = 0

    def announce_due(
        self,
        subs: Sequence[Subscription],
        holdings: Mapping[Key, Holding],
        *,
        now_ms: int,
    ) -> None:
        """Announce where it is due."""
        if now_ms >= self._due_ms:
            third_ms = self._context.heartbeat_interval_ms // INTERVALS_PER_H
            self._due_ms = now_ms + third_ms
            self._announce(subs, holdings, draining=False)

    def announce_leaving(
        self, subs: Sequence[Subscription], holdings: Mapping[Key, Holding]
    ) -> list[int]:
        """Announce that nothing new is wanted; return what to wait for."""
        return [self._announce(subs, holdings, draining=True)]

    def on_own(self, transition: Transition) -> None:
        """Take the read-back of an own announcement.

        Whoever was silent for so long that the group forgot it joins anew, and
        is younger than a twin that took its place meanwhile.
        """
        if transition.outcome != ACCEPTED:
            return
        since_offset = self._since_offset() or transition.offset
        if since_offset != self._first_offset:
            self._first_offset = since_offset
            self._first_ms = self._home_world().now_ms

    def _since_offset(self) -> int | None:
        owner, group_id = self._outbox.claimant.owner, self._outbox.claimant.group_id
        members = self._home_world().soft.members
        known = members.get((group_id, owner.client_id, owner.incarnation))
        return None if known is None else known.since_offset

    def _home_world(self) -> WorldState:
        home = self._context.home_of(self._outbox.claimant.group_id)
        return self._context.replicas[home].world

    def older_twin(self, transition: Transition) -> str | None:
        """Return the host of a twin that was here before us and lives, if shown.

        The evidence is an announcement of our client_id under another
        incarnation that began before ours and was renewed well after it: what a
        dead process had sent may land for as long as sending is tried, H/2.
        """
        record = transition.record
        owner = self._outbox.claimant.owner
        if (
            not isinstance(record, Member)
            or record.client_id != owner.client_id
            or record.draining
            or self._first_offset is None
        ):
            return None
        members = self._home_world().soft.members
        twin = members.get((record.group_id, record.client_id, record.incarnation))
        if twin is None or twin.since_offset > self._first_offset:
            return None
        if twin.seen_ms - self._first_ms < self._context.heartbeat_interval_ms // 2:
            return None
        return record.host or "unknown"

    def _announce(
        self,
        subs: Sequence[Subscription],
        holdings: Mapping[Key, Holding],
        *,
        draining: bool,
    ) -> int:
        claimant = self._outbox.claimant
        owner = claimant.owner
        topics = tuple(sorted({topic for sub in subs for topic in sub.topics}))
        caps = [sub.claims_max for sub in subs]
        held = sum(holding.claim.is_owned for holding in holdings.values())
        seq, _ = self._outbox.send(
            self._context.home_of(claimant.group_id),
            lambda seq: Member(
                owner.client_id,
                claimant.group_id,
                owner.incarnation,
                seq,
                topics,
                self._host,
                sum(caps) if caps and all(caps) else 0,
                held,
                {},
                draining,
                SUPPORTED_LEVEL,
                None,
            ),
        )
        return seq
