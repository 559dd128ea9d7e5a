"""The state that all parts of one engine share: ports, replicas and the Config."""

from collections.abc import Mapping
from typing import Any

import attrs

from kafka_marshal.errors import MarshalError
from kafka_marshal.ports import (
    Background,
    CoordinationLog,
    Event,
    Pending,
    WrongSetting,
)
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.growths import Source, awaited_source
from kafka_marshal.protocol.layout import used_count
from kafka_marshal.protocol.records import Config
from kafka_marshal.protocol.settings import NO_SETTINGS, Settings
from kafka_marshal.protocol.state import KeyState, MemberState
from kafka_marshal.protocol.types import Key

from .interfaces import ClaimPorts
from .meters import EngineMeters
from .pause_notes import joined, pause_rows
from .placement import Placement
from .replica import Glance, Replica

# Pause after a check of all held partitions, as a multiple of its duration.
RESTS_PER_CHECK = 9
GROWTH = "growth"
"""Reason of a release: a new partition waits for the one that had its keys."""


@attrs.frozen(kw_only=True)
class Ports(ClaimPorts):
    """The ports of an engine.

    ``policies`` runs the policies of other packages: one that never returns delays
    neither look-ups nor the engine.
    """

    log: CoordinationLog
    policies: Background


@attrs.frozen
class FailedAppend:
    """The last append that failed.

    Attributes:
        at_ms: Local time when that was noticed.
        reported_ms: Local time of the last event about failed appends.
        error: Why it failed.
    """

    at_ms: int
    reported_ms: int
    error: MarshalError


@attrs.define
class Context:
    """Ports, replicas and Config of one engine.

    Attributes:
        ports: The ports.
        replicas: One replica per coordinating partition.
        config: The Config that all coordinating partitions agree on, or the newest one
            while a change reaches them one by one; None until the engine is ready.
        rebuilding: Partitions that are being folded up to the end that their logs had
            when that began; nothing is decided or sent for them meanwhile.
        meters: The engine's counters.
        least_interval_ms: The least heartbeat interval of all coordinating partitions
            while a change of it has not reached all of them, None otherwise.
        wrong_settings: Settings of the coordination topic that break PROTOCOL 2.1,
            as of the last check.
        log_starts: First offset of each coordinating partition, as of that check.
        unreported: Partitions whose kept state shows grants that the log has lost
            and that are not reported yet; it is not replaced until then.
        folded: Next offset to fold of each coordinating partition; a partition whose
            log went back is absent. Replaced in each round under the engine's lock.
        start_requests: Pending requests for start positions, of all sessions.
        failed_append: The last append that failed, None before there is one.
        placement: Finds the coordinating partitions of keys and groups.
    """

    ports: Ports
    replicas: dict[int, Replica]
    config: Config | None = None
    rebuilding: set[int] = attrs.field(factory=set)
    meters: EngineMeters = attrs.field(factory=EngineMeters)
    least_interval_ms: int | None = None
    wrong_settings: tuple[WrongSetting, ...] = ()
    log_starts: dict[int, int] = attrs.field(factory=dict)
    unreported: set[int] = attrs.field(factory=set)
    folded: Mapping[int, int] = attrs.field(factory=dict)
    start_requests: list[Pending[Any]] = attrs.field(factory=list)
    failed_append: FailedAppend | None = None
    placement: Placement = attrs.field(
        init=False,
        default=attrs.Factory(lambda self: Placement(self.replicas), takes_self=True),
    )

    @property
    def now_ms(self) -> int:
        """The local time of the clock port."""
        return self.ports.clock.now_ms()

    def next_check_ms(self, since_ms: int) -> int:
        """Return when a check that began then, and ends now, may run again.

        Checks of all held partitions take at most a tenth of the time: with thousands
        of partitions they would otherwise occupy a processor.
        """
        now_ms = self.now_ms
        return now_ms + RESTS_PER_CHECK * (now_ms - since_ms)

    @property
    def heartbeat_interval_ms(self) -> int:
        """The least heartbeat interval in force; the engine must be ready.

        It paces this process. Keys are judged by the interval of their partition.
        """
        if self.least_interval_ms is not None:
            return self.least_interval_ms
        return self.settled.heartbeat_interval_ms

    @property
    def settled(self) -> Config:
        """The Config; only for use once the engine is ready."""
        assert self.config is not None
        return self.config

    def partition_of(self, key: Key) -> int:
        """Return the coordinating partition of a key; see ``Placement``."""
        return self.placement.partition_of(key)

    def replica_of(self, key: Key) -> Replica:
        """Return the replica that judges a key."""
        return self.replicas[self.placement.partition_of(key)]

    def is_written_to(self, partition: int) -> bool:
        """Return whether the log client has a partition: one may have been added."""
        return partition < self.ports.log.partition_count

    @property
    def is_behind(self) -> bool:
        """Whether a partition in use is being folded up to its end.

        A partition that a given-up change left behind, without its log start, does not
        count: it may never be known.
        """
        if not self.rebuilding:
            return False  # the common case
        count = used_count(self.replicas[0].world)
        return count is None or min(self.rebuilding) < count

    @property
    def has_layout(self) -> bool:
        """Whether a change of the partition count is open, as far as the log is read.

        Also if a change has ended, and a partition has lost it since.
        """
        return self.placement.from_count is not None or bool(self.placement.lost)

    def home_of(self, group_id: str) -> int:
        """Return the coordinating partition with a group's Member records."""
        return self.placement.homes_of(group_id)[0]

    def homes_of(self, group_id: str) -> tuple[int, ...]:
        """Return the homes of a group: while the count changes, under both counts."""
        return self.placement.homes_of(group_id)

    def settings_of(self, group_id: str) -> Settings:
        """Return the settings of a group, as folded."""
        for home in self.placement.homes_of(group_id):
            found = self.replicas[home].world.settings_of(group_id)
            if found.generation:
                return found
        return NO_SETTINGS

    def has_company(self, claimant: Claimant) -> bool:
        """Return whether the group has other members, which may want the same keys."""
        group_id, owner = claimant.group_id, claimant.owner
        return any(
            self.replicas[home].world.has_other_member(group_id, owner)
            for home in self.placement.homes_of(group_id)
        )

    def living(self, group_id: str) -> list[MemberState]:
        """Return the members of a group that were seen within two intervals.

        A member that announced itself to two homes counts once.
        """
        now_ms = self.now_ms
        found: dict[tuple[str, bytes], MemberState] = {}
        for home in self.placement.homes_of(group_id):
            replica = self.replicas[home]
            world, log_ms = replica.world, replica.log_ms(now_ms)
            for member in world.live_members(group_id):
                if world.is_live(member, log_ms):
                    record = member.record
                    found.setdefault((record.client_id, record.incarnation), member)
        return [*found.values()]

    def glance(self, key: Key) -> Glance | None:
        """Return the state of a key for display; None for an unknown key."""
        return self.replica_of(key).glance(key, self.now_ms)

    def member_count(self, group_id: str) -> int:
        """Return the number of live members of a group."""
        return len({member.record.client_id for member in self.living(group_id)})

    def plan_generation(self, group_id: str) -> int:
        """Return the number of Plans that a group had, as folded."""
        return self.replicas[self.home_of(group_id)].world.plan_generation(group_id)

    def is_paused(self, group_id: str) -> bool:
        """Return whether a whole group is paused, as far as the log is read."""
        replicas = self.replicas.values()
        return any(replica.world.active_pause(group_id) for replica in replicas)

    def is_key_paused(self, key: Key) -> bool:
        """Return whether a key is paused, as far as the log is read."""
        return self.replica_of(key).world.pause_of(key) is not None

    def pauses(self, group_id: str | None = None) -> list[dict[str, Any]]:
        """Return every pause of a group, or of all, as ``pause_rows`` does."""
        replicas, now_ms = self.replicas, self.now_ms
        worlds = [replica.world for replica in replicas.values()]
        if group_id is not None:
            groups = [world.groups.get(group_id) for world in worlds]
            if not any(each and (each.pauses or each.scheduled) for each in groups):
                return []
        return pause_rows(
            worlds,
            joined({t: replica.notes for t, replica in replicas.items()}),
            elapsed_ms=lambda t: replicas[t].elapsed_ms(now_ms),
            group_id=group_id,
        )

    @property
    def has_pause(self) -> bool:
        """Whether any group is paused, as far as the log is read."""
        # Runs in every round, where a generator would cost more than this loop.
        for replica in self.replicas.values():
            if replica.world.lapses_ms is not None:
                return True
        return False

    def note_failed_append(self, error: MarshalError) -> None:
        """Count a failed append; report it, at most once in a heartbeat interval."""
        self.meters.failed_appends += 1
        now_ms, last = self.now_ms, self.failed_append
        reported_ms = None if last is None else last.reported_ms
        if reported_ms is None or now_ms - reported_ms >= self.heartbeat_interval_ms:
            self.observe("append_failed", {"error": error})
            reported_ms = now_ms
        self.failed_append = FailedAppend(now_ms, reported_ms, error)

    def observe(self, name: str, fields: Mapping[str, Any]) -> None:
        """Count an event and send it to the observer."""
        self.meters.count_event(name)
        self.ports.observer.observe(Event(name, fields))


def awaited(context: Context, key: Key, *, topic_id: bytes | None) -> Source | None:
    """Return what a new partition of a data topic waits for, as far as the log is read.

    See ``growths.awaited_source``.
    """
    growths = context.replicas[0].world.growths
    if not growths:
        return None  # the common case

    def state_of(key: Key) -> KeyState | None:
        return context.replica_of(key).world.keys.get(key)

    return awaited_source(growths, key, topic_id=topic_id, state_of=state_of)
