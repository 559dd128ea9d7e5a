"""Follows the Plan of a group, and writes it in this member's turn (PROTOCOL 9.2)."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import attrs

from kafka_marshal.engine.context import Context
from kafka_marshal.engine.outbox import Outbox
from kafka_marshal.engine.replica import Replica
from kafka_marshal.errors import MalformedRecord
from kafka_marshal.ports import FAR_MS
from kafka_marshal.protocol.group_plan import PlanInput, plan
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.planner import MemberView
from kafka_marshal.protocol.plans import (
    NO_PLAN,
    TURN_MS,
    Reading,
    Situation,
    Slice,
    Standing,
    digest_of,
    entries_of,
    is_reserved,
    is_valid_for,
    situation_of,
    slices_of,
    standing_of,
    turn_of,
    version_of,
)
from kafka_marshal.protocol.records import SECOND_LEVEL, Plan
from kafka_marshal.protocol.settings import PLANNER, Settings
from kafka_marshal.protocol.state import KeyNote, KeyState, MemberState, WorldState
from kafka_marshal.protocol.types import Key

# If only keys have changed, the delay is the debounce time divided by this.
KEY_DEBOUNCES = 10
DEBOUNCES_MAX = 5  # longest delay after the first change, in debounce times
ORPHAN_MS_MAX = 5_000
"""How long a free key waits at most for the member that a Plan names."""


class PlanFollower:
    """The Plan that a member follows.

    Attributes:
        is_in_force: Whether the settings of the group ask for Plans.
        standing: The entries of the Plan, whether they are still valid or not.
    """

    __slots__ = ("_coordinators", "_note", "is_in_force", "standing")

    def __init__(self) -> None:
        self.is_in_force = False
        self._note: object = None
        self._coordinators = 0
        self.standing: Standing = NO_PLAN

    def read(
        self,
        home: WorldState,
        group_id: str,
        *,
        settings: Settings,
        coordinators: int,
    ) -> None:
        """Read the Plan of a group, if it changed.

        Args:
            home: The group's home.
            group_id: The group.
            settings: Its settings, which another home may have (PROTOCOL 10.4).
            coordinators: Number of coordinating partitions; a Plan of another number
                of them is void.
        """
        self.is_in_force = settings.policy == PLANNER
        note = home.soft.plans.get(group_id) if self.is_in_force else None
        if note is not self._note or coordinators != self._coordinators:
            self._note, self._coordinators = note, coordinators
            found = standing_of(note)
            self.standing = found if len(found.vector) == coordinators else NO_PLAN

    def named(self, key: Key, world: WorldState) -> str | None:
        """Return the member that a valid entry of the Plan names for a key, or None.

        Args:
            key: The key.
            world: Its coordinating partition.
        """
        if not self.standing.entries:
            return None  # the common case
        name = self.standing.entries.get(key.topic_partition)
        next_offset = self.standing.vector[world.partition][0]
        is_valid = is_valid_for(world.keys.get(key), next_offset)
        return name if is_valid else None


@attrs.define
class Debounce:
    """Delays the release of surplus until the members of a group stay the same.

    A burst of joins then moves each key once. Free keys are claimed meanwhile.
    """

    _members: frozenset[object] | None = None
    _first_ms: int = 0
    _until_ms: int = 0

    def update(
        self, members: Iterable[MemberView], now_ms: int, *, debounce_ms: int
    ) -> int | None:
        """Compare the members with the last ones; return the end of the delay.

        Args:
            members: The members now.
            now_ms: Local time.
            debounce_ms: Length of the delay; changes may renew it a few times.
        """
        seen = frozenset(
            (each.client_id, each.topics, each.is_draining, each.weight)
            for each in members
        )
        if self._members is not None and self._members != seen:
            if not self.is_on(now_ms):
                self._first_ms = now_ms
            latest_ms = self._first_ms + DEBOUNCES_MAX * debounce_ms
            self._until_ms = min(now_ms + debounce_ms, latest_ms)
        self._members = seen
        return self._until_ms if self.is_on(now_ms) else None

    def is_on(self, now_ms: int) -> bool:
        """Return whether surplus is kept at this local time."""
        return now_ms < self._until_ms


class _Span(NamedTuple):
    """A span of log time in which no key changes without a record."""

    since_ms: int
    until_ms: int

    def has(self, log_ms: int) -> bool:
        """Return whether a log time is in it."""
        return self.since_ms <= log_ms < self.until_ms


_NEVER = _Span(FAR_MS, 0)


class SettledKeys:
    """Detects whether a planner may read a new state of a group's keys.

    The keys of a coordinating partition are settled while each owner is live, nothing
    is offered, no free key waits for a member, and no pause or directive of the group
    lasts or is scheduled. Then only records that name keys change what a planner reads.

    Attributes:
        are_settled: Whether all keys are settled, as of the last round.
    """

    __slots__ = ("_group_id", "_read", "_spans", "_terms", "are_settled")

    def __init__(self, group_id: str) -> None:
        self._group_id = group_id
        # By coordinating partition: how far its changes were read.
        self._read: dict[int, int] = {}
        self._spans: dict[int, _Span] = {}
        # How long keys wait, by the settings of the group.
        self._terms = (0, 0)
        self.are_settled = False

    def have_changed(
        self, replicas: Mapping[int, Replica], settings: Settings, *, now_ms: int
    ) -> bool:
        """Return whether a planner may read another state than in the last round.

        Args:
            replicas: Every coordinating partition.
            settings: Settings of the group.
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
                until_ms = min(until_ms, known.stale_at_ms)
            if known.owner is None or known.offer is not None:
                waits_ms = self._waits_until_ms(known, notes.get(key))
                since_ms = max(since_ms, waits_ms)
        span = _Span(since_ms, until_ms)
        return span if span.has(log_ms) else _NEVER

    def _waits_until_ms(self, known: KeyState, note: KeyNote | None) -> int:
        """Return the log time until which a key waits for a member; 0 = it does not."""
        grace_ms, handoff_ms = self._terms
        if known.offer is not None:
            # The key is not offered to this successor again before that.
            return known.offer.until_ms + handoff_ms
        until_ms = 0 if known.handoff is None else known.handoff[1]
        active_ms = known.active_ms
        if is_reserved(known, note, now_ms=active_ms, grace_ms=grace_ms):
            until_ms = max(until_ms, active_ms + grace_ms)
        return until_ms


class GroupPlanner:
    """Plans for one group after it has changed, in turn with two other members.

    Every method is called under the engine's lock. For 10,000 keys a plan takes up to
    100 ms, and reading their state half of that: both only happen if a Plan may be due.
    """

    __slots__ = (
        "_basis",
        "_changed_ms",
        "_context",
        "_first_ms",
        "_given",
        "_has_news",
        "_is_pending",
        "_keys",
        "_outbox",
        "_unwritten",
        "_wait_ms",
        "can_plan",
        "due_ms",
    )

    def __init__(self, context: Context, outbox: Outbox, *, can_plan: bool) -> None:
        self._context = context
        self._outbox = outbox
        self._given: PlanInput | None = None
        self._is_pending = False
        self._keys = SettledKeys(outbox.claimant.group_id)
        self._has_news = True
        # Everything that the planner's input depends on, except keys.
        self._basis: object = None
        self._first_ms = 0
        self._changed_ms = 0
        self._wait_ms = 0
        self._unwritten: str | None = None
        self.can_plan = can_plan
        # Local time at which a plan may be due; None while nothing has changed.
        self.due_ms: int | None = None

    def is_in_force(self) -> bool:
        """Return whether the members of the group follow Plans."""
        return self._context.settings_of(self._group_id).policy == PLANNER

    def drive(self, counts: Mapping[str, int], now_ms: int) -> None:
        """Write a Plan if one is due and differs from the Plan in force.

        Args:
            counts: Number of partitions of each topic that this member knows.
            now_ms: Local time.
        """
        self.due_ms = None
        context = self._context
        level = context.settled.feature_level
        if not self.can_plan or level < SECOND_LEVEL or not self.is_in_force():
            return
        if context.is_behind or context.is_paused(self._group_id):
            return
        if context.has_layout:
            return
        settings, replicas = context.settings_of(self._group_id), context.replicas
        self._has_news |= self._keys.have_changed(replicas, settings, now_ms=now_ms)
        reading = self._reading(counts, now_ms)
        members = reading.members(has_stale=not self._keys.are_settled)
        turn = turn_of(members, self._outbox.claimant.owner.client_id)
        if turn is None:
            return
        basis = _terms(reading, members), counts
        if not (self._has_news or self._is_pending) and basis == self._basis:
            return
        self._has_news, self._basis = False, basis
        situation = situation_of(reading, members)
        debounce_ms = settings.value("debounce_ms")
        self._note_change(situation, now_ms, debounce_ms=debounce_ms)
        if not self._is_pending:
            return
        wait_ms = self._wait_ms
        latest_ms = self._first_ms + DEBOUNCES_MAX * wait_ms
        due_ms = min(self._changed_ms + wait_ms, latest_ms) + turn * TURN_MS
        if now_ms < due_ms:
            self.due_ms = due_ms
            return
        self._is_pending = False
        if version_of(reading, members) >= 1:
            self._write(reading, situation, now_ms)

    def _reading(self, counts: Mapping[str, int], now_ms: int) -> Reading:
        replicas = [replica for _, replica in sorted(self._context.replicas.items())]
        return Reading(
            group_id=self._group_id,
            worlds=tuple(replica.world for replica in replicas),
            elapsed_ms=tuple(replica.elapsed_ms(now_ms) for replica in replicas),
            counts=counts,
            partition_of=self._context.partition_of,
        )

    def _note_change(
        self, situation: Situation, now_ms: int, *, debounce_ms: int
    ) -> None:
        """Note a change of the input, and how long to wait for further changes.

        Changes of members come in bursts. If only keys have changed, such as one that a
        slow member released, a part of that delay is enough: if the member is leaving,
        its end is read by then.
        """
        before, given = self._given, situation.given
        if given == before:
            return
        is_key_alone = (
            before is not None
            and _others(before) == _others(given)
            and situation.has_unnamed_key
        )
        self._given = given
        if not self._is_pending:
            self._first_ms, self._wait_ms = now_ms, 0
        self._is_pending = True
        self._changed_ms = now_ms
        wait_ms = debounce_ms // KEY_DEBOUNCES if is_key_alone else debounce_ms
        self._wait_ms = max(self._wait_ms, wait_ms)

    def _write(self, reading: Reading, situation: Situation, now_ms: int) -> None:
        result = plan(situation.given)
        entries = situation.entries(result)
        if entries == situation.standing:
            return
        # An append may be lost: then the missing entries are written later.
        self._given = None
        self._first_ms = self._changed_ms = (
            now_ms + self._context.heartbeat_interval_ms // 2
        )
        self._is_pending = True
        self._wait_ms = self._context.settings_of(self._group_id).value("debounce_ms")
        try:
            slices = slices_of(situation.counts, entries, vector=reading.vector)
        except MalformedRecord as error:
            self._report_unwritten(str(error))
            return
        entries = entries_of(slices)
        if entries == situation.standing:
            return  # more does not fit until some of these have moved
        self._send(reading, situation, slices)
        fields = {
            "group": self._group_id,
            "moves": len(entries),
            "slices": len(slices),
            "uncovered": len(result.uncovered),
        }
        self._context.observe("plan_written", fields)

    def _send(
        self, reading: Reading, situation: Situation, slices: list[Slice]
    ) -> None:
        home = reading.home
        follows = reading.worlds[home].plan_generation(self._group_id)
        digest, vector = digest_of(situation.given), reading.vector
        for number, each in enumerate(slices):

            def record(seq: int, *, number: int = number, each: Slice = each) -> Plan:
                return Plan(
                    **self._outbox.claimant.sender(seq),
                    follows=follows + number,
                    number=number,
                    slice_count=len(slices),
                    planner_version=1,
                    vector=vector,
                    input_digest=digest,
                    topics=each.topics,
                    moves=each.moves,
                )

            self._outbox.send(home, record)

    def _report_unwritten(self, error: str) -> None:
        if error != self._unwritten:
            self._unwritten = error
            fields = {"group": self._group_id, "error": error}
            self._context.observe("plan_unwritten", fields)

    @property
    def _group_id(self) -> str:
        return self._outbox.claimant.group_id


def _terms(reading: Reading, members: Mapping[str, MemberState]) -> object:
    """Return the hosts of all known members, and what a plan reads of live members."""
    home = reading.worlds[reading.home]
    hosts = {
        name: each.record.host
        for name, each in home.soft.members.items()
        if name[0] == reading.group_id
    }
    terms = {}
    for name, each in members.items():
        record = each.record
        terms[name] = record.topics, record.capacity, record.labels, record.host
    return hosts, terms


def _others(given: PlanInput) -> object:
    """Return everything of an input except its keys."""
    return given.members, given.failing, given.barred
