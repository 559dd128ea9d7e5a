"""Whether a planner would read the same of a group's keys as in the round before."""

from collections.abc import Mapping
from typing import NamedTuple

from kafka_marshal.engine.replica import Replica
from kafka_marshal.ports import FAR_MS
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.plans import is_reserved
from kafka_marshal.protocol.settings import Settings
from kafka_marshal.protocol.state import KeyNote, KeyState, WorldState


class _Span(NamedTuple):
    """Log time in which no key changes without a record."""

    since_ms: int
    until_ms: int

    def has(self, log_ms: int) -> bool:
        """Return whether a log time is in it."""
        return self.since_ms <= log_ms < self.until_ms


_NEVER = _Span(FAR_MS, 0)


class SettledKeys:
    """Follows the keys of one group.

    The keys of a coordinating partition are settled while each owner is live, nothing
    is offered, no free key waits for somebody, and no pause or directive of the group
    lasts or is scheduled. Then only records that name keys change what a planner reads.

    Attributes:
        are_settled: Whether all keys are, as of the last round.
    """

    __slots__ = ("_group_id", "_read", "_spans", "_terms", "are_settled")

    def __init__(self, group_id: str) -> None:
        self._group_id = group_id
        # By coordinating partition: how far its changes were read.
        self._read: dict[int, int] = {}
        self._spans: dict[int, _Span] = {}
        # For how long keys wait, by the settings of the group.
        self._terms = (0, 0)
        self.are_settled = False

    def have_changed(
        self, replicas: Mapping[int, Replica], settings: Settings, *, now_ms: int
    ) -> bool:
        """Return whether a planner may read anything else than in the round before.

        Args:
            replicas: Every coordinating partition.
            settings: Those of the group.
            now_ms: Local time.
        """
        terms = settings.value("grace_ms"), settings.value("handoff_ms")
        if terms != self._terms:
            self._terms = terms
            self._spans.clear()
        have_changed = False
        self.are_settled = True
        for number, replica in replicas.items():
            log_ms = replica.log_ms(now_ms)
            end, span = replica.changes.end, self._spans.get(number, _NEVER)
            is_new = span is _NEVER or self._read.get(number) != end
            if is_new or not span.has(log_ms):
                span = self._span_of(replica.world, log_ms)
            self._read[number], self._spans[number] = end, span
            is_settled = span is not _NEVER
            have_changed |= is_new or not is_settled
            self.are_settled &= is_settled
        return have_changed

    def _span_of(self, world: WorldState, log_ms: int) -> _Span:
        for group_id in (self._group_id, CHECKPOINT_GROUP):
            group = world.groups.get(group_id)
            if group is not None and group.lapses_ms is not None:
                return _NEVER
        since_ms, until_ms, notes = 0, FAR_MS, world.soft.notes
        for key, known in world.keys.items():
            if key.group_id != self._group_id:
                continue
            if known.owner is not None:
                stale_ms = known.renewed_ms + 2 * known.heartbeat_interval_ms + 1
                until_ms = min(until_ms, stale_ms)
            if known.owner is None or known.offer is not None:
                waits_ms = self._waits_until_ms(known, notes.get(key))
                since_ms = max(since_ms, waits_ms)
        span = _Span(since_ms, until_ms)
        return span if span.has(log_ms) else _NEVER

    def _waits_until_ms(self, known: KeyState, note: KeyNote | None) -> int:
        """Return the log time until which a key waits for somebody; 0: it does not."""
        grace_ms, handoff_ms = self._terms
        if known.offer is not None:
            # Its successor is not asked again for a while.
            return known.offer.until_ms + handoff_ms
        until_ms = 0 if known.handoff is None else known.handoff[1]
        active_ms = known.active_ms
        if is_reserved(known, note, now_ms=active_ms, grace_ms=grace_ms):
            until_ms = max(until_ms, active_ms + grace_ms)
        return until_ms
