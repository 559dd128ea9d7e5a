"""The state that the log of one coordinating partition folds to (PROTOCOL 4).

Hard state (covered by the digest) and soft state (counters, undecodable entries,
members, notes) are different classes, so that neither leaks into the other. Only
``rationalizer`` changes them. Also here: the transition, which is the fold's only
output, and the notes about why keys changed hands.
"""

from collections import deque
from heapq import heapify, heappush
from operator import attrgetter
from typing import NamedTuple

import attrs
import msgspec
from msgspec import UnsetType

from kafka_marshal.protocol.codec import BY, PERSON_BYTES_MAX, decode_tags, person_text
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.items import (
    Eras,
    Fence,
    Growth,
    Halt,
    Layout,
    Lock,
    Offer,
    Pause,
    Planned,
    PlanNote,
    Scheduled,
    StandingDirective,
    UndecodableEntry,
    Verdict,
    end_era,
    era_at,
    is_in_scope,
)
from kafka_marshal.protocol.lease import Freshness, freshness
from kafka_marshal.protocol.records import (
    CORDON,
    DRAIN,
    Action,
    ClaimingPartition,
    Config,
    Member,
    Record,
    ReleasingPartition,
)
from kafka_marshal.protocol.settings import NO_SETTINGS, Settings
from kafka_marshal.protocol.types import Key, LogEntry, Owner, Token, shared

RING_ENTRIES_MAX = 32
RING_VALUE_BYTES = 64
RETIRED_TOPIC_IDS_MAX = 4
SCHEDULED_MAX = 4
"""Maximum number of scheduled pauses of a group."""
SCOPED_MAX = 8
"""Maximum number of pauses with a scope of a group, active or scheduled."""
FENCES_MAX = 64
"""Maximum number of fenced processes that a group remembers."""
DIRECTIVES_MAX = 64
"""Maximum number of directives in force of a group."""
QUIET, STAGING, ERAS, LAYOUT = "/quiet", "/reset", "/eras", "/layout"
GROWTHS = "/growths"
OPERATIONS = (QUIET, STAGING, ERAS, LAYOUT, GROWTHS)
"""Items of the digest other than keys and groups; no group can have these names."""


class Previous(NamedTuple):
    """What a set position replaced in a key, for its undo (PROTOCOL 8.6).

    Attributes:
        op_id: The operation that set the position.
        position: Position before it.
        granted: First offset that was not granted before it, or None.
    """

    op_id: bytes
    position: int | None
    granted: int | None

    def next_unclaimed(self) -> int | None:
        """Return the first offset that could still be granted then, if known."""
        return _larger(self.position, self.granted)


@attrs.define(kw_only=True)
class KeyState:
    """One key: its owner, and how far it is processed.

    Attributes:
        owner: Current owner, None once released.
        epoch: Offset of the last accepted claim.
        epoch_leader_epoch: Leader epoch of that claim's entry.
        renewed_ms: Log time of the last renewal.
        heartbeat_interval_ms: Heartbeat interval in force at that renewal.
        active_ms: Log time of the last accepted record about the key.
        position: Next offset to process, None while unknown.
        granted: First offset that is not granted (at most once), or None.
        topic_id: Kafka's id of the data topic, if a claim named it.
        retired_topic_ids: Earlier ids, oldest first.
        resume_hash: SHA-256 of the secret that a restarted process needs to resume.
        lock: Set by the operation that locked the key, or None.
        previous: What the last set position replaced, or None.
        handoff: Successor and the log time until which it is preferred.
        offer: The successor that the owner offers the key to, or None.
    """

    owner: Owner | None
    epoch: int
    epoch_leader_epoch: int
    renewed_ms: int
    heartbeat_interval_ms: int
    active_ms: int
    position: int | None = None
    granted: int | None = None
    topic_id: bytes | None = None
    retired_topic_ids: tuple[bytes, ...] = ()
    resume_hash: bytes | None = None
    lock: Lock | None = None
    previous: Previous | None = None
    handoff: tuple[str, int] | None = None
    offer: Offer | None = None

    @property
    def stale_at_ms(self) -> int:
        """First log time at which the owner is stale unless it renews its claim."""
        return self.renewed_ms + 2 * self.heartbeat_interval_ms + 1

    def age_ms(self, log_time_ms: int) -> int:
        """Return the log time since the last renewal."""
        return log_time_ms - self.renewed_ms

    def freshness(self, log_time_ms: int) -> Freshness:
        """Return the freshness, by the interval of the last renewal (PROTOCOL 4.2)."""
        return freshness(self.age_ms(log_time_ms), self.heartbeat_interval_ms)

    def remaining_ms(self, log_time_ms: int) -> int:
        """Return the log time left until the owner is stale."""
        return max(0, self.stale_at_ms - log_time_ms)

    def renew(self, now_ms: int, heartbeat_interval_ms: int) -> None:
        """Renew the lease, unless it would then end earlier (PROTOCOL 4.5)."""
        ends_ms = self.renewed_ms + 2 * self.heartbeat_interval_ms
        if now_ms + 2 * heartbeat_interval_ms >= ends_ms:
            self.renewed_ms = now_ms
            self.heartbeat_interval_ms = heartbeat_interval_ms

    def next_unclaimed(self) -> int | None:
        """Return the first offset that can still be granted at most once, if known."""
        return _larger(self.position, self.granted)

    def repeats_from(self, position: int) -> bool:
        """Return whether setting this position grants offsets again (at most once)."""
        return self.granted is not None and position < (self.next_unclaimed() or 0)

    def before(self, op_id: bytes) -> Previous | None:
        """Return what an operation replaced, None if it did not set the key last."""
        previous = self.previous
        return previous if previous is not None and previous.op_id == op_id else None


def _larger(position: int | None, granted: int | None) -> int | None:
    if granted is None or position is None:
        return position if granted is None else granted
    return max(position, granted)


@attrs.define
class GroupState:
    """One group: its pause, the operations that have ended, and fenced processes.

    Attributes:
        pause: The active pause of the whole group; None once the latest append time
            reaches its end.
        over: Operations that ended: offset at which the end was recorded, and op_id.
        verdict: The last set position that was committed, on the group's home.
        scheduled: Pauses that have not begun, by begin and op_id.
        scoped: Active pauses with a scope, by op_id (PROTOCOL 4.15).
        fences: Fenced processes of clients, oldest first.
        directives: Directives in force, by op_id (PROTOCOL 9.7).
        settings: The settings in force, on the group's home, or None.
        planned: Its Plans, on the group's home, or None.
        key_count: Number of keys of the group in this partition (derived).
    """

    pause: Pause | None = None
    over: tuple[tuple[int, bytes], ...] = ()
    verdict: Verdict | None = None
    scheduled: tuple[Scheduled, ...] = ()
    fences: tuple[Fence, ...] = ()
    scoped: tuple[Pause, ...] = ()
    directives: tuple[StandingDirective, ...] = ()
    settings: Settings | None = None
    planned: Planned | None = None
    key_count: int = 0

    def is_over(self, op_id: bytes) -> bool:
        """Return whether an operation is remembered as ended."""
        return any(op_id == each for _, each in self.over)

    def scheduled_as(self, op_id: bytes) -> Scheduled | None:
        """Return the scheduled pause of an operation, or None."""
        return next((each for each in self.scheduled if each.op_id == op_id), None)

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """The active pauses: that of the whole group first."""
        return self.scoped if self.pause is None else (self.pause, *self.scoped)

    @property
    def scoped_operations(self) -> tuple[Pause | Scheduled, ...]:
        """The pauses with a scope, active or scheduled."""
        later = (each for each in self.scheduled if each.scope is not None)
        return (*self.scoped, *later)

    def lasting(self, op_id: bytes) -> Pause | None:
        """Return the active pause of an operation, or None."""
        return next((each for each in self.pauses if each.op_id == op_id), None)

    def directive(self, op_id: bytes) -> StandingDirective | None:
        """Return the directive in force of an operation, or None."""
        return next((each for each in self.directives if each.op_id == op_id), None)

    @property
    def due(self) -> tuple[Scheduled, ...]:
        """The scheduled pauses that do not wait for the end of another one."""
        if self.pause is None:
            return self.scheduled
        return tuple(each for each in self.scheduled if each.scope is not None)

    @property
    def lapses_ms(self) -> int | None:
        """Append time at which the next pause or directive begins or ends, or None."""
        ends = [each.until_ms for each in self.pauses]
        ends += [each.until_ms for each in self.directives]
        return min([*ends, *(each.begin_ms for each in self.due)], default=None)

    @property
    def unresolved(self) -> Verdict | None:
        """The committed set position whose keys are not all unlocked, or None."""
        verdict = self.verdict
        return None if verdict is None or verdict.is_resolved else verdict


@attrs.frozen(kw_only=True)
class MemberState:
    """A member's last announcement.

    Attributes:
        record: The announcement.
        since_offset: Offset of the first announcement of this incarnation.
        offset: Offset of the last announcement.
        seen_ms: Log time of the last announcement.
    """

    record: Member
    since_offset: int
    offset: int
    seen_ms: int


class Staging(NamedTuple):
    """The parts of a Reset received so far (PROTOCOL 7.6).

    Attributes:
        op_id: The operation.
        client_id: Its sender.
        incarnation: The sender's process.
        part_count: Number of parts of the whole Reset.
        size_bytes: Size of the whole Reset.
        digest: Digest of the carried state.
        until_ms: Log time at which the parts are dropped.
        parts: The parts, in order.
        chain: Hash over the parts, each hashed with the hash of those before it.
    """

    op_id: bytes
    client_id: str
    incarnation: bytes
    part_count: int
    size_bytes: int
    digest: bytes
    until_ms: int
    parts: tuple[bytes, ...]
    chain: bytes


class KeyNote(NamedTuple):
    """Why a key changed hands last; soft, for people and plans.

    Attributes:
        client_id: Client that claimed or released it.
        offset: Offset of that record.
        reason: Reason in the record.
        before: The owner before that client, None if unknown.
        stuck: Position at which the last owners released the key because they were
            stuck, and how many owners in a row did so.
        follows: Epoch of the claim before the last one, of any client; None if there
            was none, after a release, and if a set position was in between, or may
            have been.
    """

    client_id: str
    offset: int
    reason: str | None
    before: str | None
    stuck: tuple[int, int] | None
    follows: int | None = None


MemberName = tuple[str, str, bytes]
"""Group, client and incarnation of a member."""


@attrs.define
class SoftState:
    """State that decides nothing (PROTOCOL 3.2); outside digest and canonical bytes."""

    counters: dict[str, int] = attrs.field(factory=dict)
    undecodable: deque[UndecodableEntry] = attrs.field(
        factory=lambda: deque(maxlen=RING_ENTRIES_MAX)
    )
    members: dict[MemberName, MemberState] = attrs.field(factory=dict)
    notes: dict[Key, KeyNote] = attrs.field(factory=dict)
    offered_ms: dict[Key, tuple[int, int]] = attrs.field(factory=dict)
    plans: dict[str, PlanNote] = attrs.field(factory=dict)


@attrs.define
class WorldState:
    """The world of one coordinating partition, and how far its log was folded.

    Attributes:
        partition: Number of the coordinating partition.
        next_offset: Offset after the last folded entry.
        leader_epoch: Leader epoch of the last entry, None before the first.
        epoch_time_ms: Largest LogAppendTime of this leader epoch (``W``).
        log_time_ms: Log time, by which freshness is judged (``C``).
        append_time_ms: Largest LogAppendTime of all (``M``).
        config: The Config in force, or None.
        eras: Eras of earlier Configs, oldest first, at most ``ERAS_MAX``: offset of
            the Config that ended each, and the era.
        keys: Every key that was ever claimed and not forgotten.
        groups: Every group with keys, a pause, remembered operations, fences or
            settings.
        staging: An unfinished Reset, or None.
        quiet_until_ms: Log time before which nothing can be claimed after a Reset.
        layout: The open change of the partition count, or None.
        growths: Data topics that grow or have grown, by topic and old count; only on
            partition 0.
        halted: Set when a Config needs a level that this release does not support.
        soft: Soft state.
        epochs: Keys by their current epoch (derived).
        over: Ended operations of all groups: offset, group and op_id (derived).
        fences: Fenced processes of all groups, with the offset of each fence (derived).
        scopes: Group and op_id of the pauses with a scope, active or scheduled
            (derived).
        directed: Group and op_id of the directives in force (derived).
        locked: Keys that each operation of a group has locked (derived).
        ends_ms: Log time at which staging or quiet time ends, or None (derived).
        plans_ms: Groups with nothing but a Plan have none from before this log time
            (derived).
        lapses_ms: Append time before which no pause or directive begins or ends by
            itself; None if there is none (derived).
        forgettable: Heap of keys that may be forgotten, each with the log time of its
            last activity when it was added; possibly also keys that no longer may be,
            or that were dropped (derived).
        awaiting: The keys in that heap that were not dropped (derived).
        stale_count: Number of entries of dropped keys in that heap (derived).
        dirty: Keys and groups changed since the last digest (derived).
        item_hashes: Hashes of keys and groups as of the last digest (derived).
        item_sum: Their sum (derived).
    """

    partition: int
    next_offset: int = 0
    leader_epoch: int | None = None
    epoch_time_ms: int | None = None
    log_time_ms: int | None = None
    append_time_ms: int = 0
    config: Config | None = None
    eras: Eras = ()
    keys: dict[Key, KeyState] = attrs.field(factory=dict)
    groups: dict[str, GroupState] = attrs.field(factory=dict)
    staging: Staging | None = None
    quiet_until_ms: int | None = None
    layout: Layout | None = None
    growths: tuple[Growth, ...] = ()
    halted: Halt | None = None
    soft: SoftState = attrs.field(factory=SoftState, eq=False)
    epochs: dict[int, Key] = attrs.field(factory=dict, eq=False)
    over: dict[tuple[int, str, bytes], None] = attrs.field(factory=dict, eq=False)
    fences: dict[MemberName, int] = attrs.field(factory=dict, eq=False)
    scopes: dict[tuple[str, bytes], None] = attrs.field(factory=dict, eq=False)
    directed: dict[tuple[str, bytes], None] = attrs.field(factory=dict, eq=False)
    locked: dict[tuple[str, bytes], dict[Key, None]] = attrs.field(
        factory=dict, eq=False
    )
    ends_ms: int | None = attrs.field(default=None, eq=False)
    lapses_ms: int | None = attrs.field(default=None, eq=False)
    plans_ms: int | None = attrs.field(default=None, eq=False)
    forgettable: list[tuple[int, Key]] = attrs.field(factory=list, eq=False)
    awaiting: set[Key] = attrs.field(factory=set, eq=False)
    stale_count: int = attrs.field(default=0, eq=False)
    dirty: dict[Key | str, None] = attrs.field(factory=dict, eq=False)
    item_hashes: dict[Key | str, int] = attrs.field(factory=dict, eq=False)
    item_sum: int = attrs.field(default=0, eq=False)

    @property
    def now_ms(self) -> int:
        """Log time; 0 before the first entry, when nothing can be judged by it."""
        return self.log_time_ms or 0

    @property
    def feature_level(self) -> int:
        """The feature level in force: 1 without a Config."""
        return 1 if self.config is None else self.config.feature_level

    def settings_of(self, group_id: str) -> Settings:
        """Return the settings of a group whose home is this partition."""
        group = self.groups.get(group_id)
        return (None if group is None else group.settings) or NO_SETTINGS

    def plan_generation(self, group_id: str) -> int:
        """Return the number of accepted Plans of a group; this must be its home."""
        group = self.groups.get(group_id)
        planned = None if group is None else group.planned
        return 0 if planned is None else planned.generation

    def active_pause(self, group_id: str) -> Pause | None:
        """Return the active pause of a whole group, or None."""
        group = self.groups.get(group_id)
        return None if group is None else group.pause

    def lasting_pause(self, group_id: str, op_id: bytes) -> Pause | None:
        """Return the active pause of an operation, or None."""
        group = self.groups.get(group_id)
        return None if group is None else group.lasting(op_id)

    def pause_of(self, key: Key) -> Pause | None:
        """Return the active pause of a key that ends last, or None (PROTOCOL 4.15)."""
        if self.lapses_ms is None:
            return None  # the common case: no group is paused
        group = self.groups.get(key.group_id)
        pauses = () if group is None else group.pauses
        found = [each for each in pauses if is_in_scope(each.scope, key)]
        return max(found, key=attrgetter("until_ms"), default=None)

    def is_paused_by_scope(self, key: Key, append_ms: int) -> bool:
        """Return whether only pauses with a scope pause a key, by an estimate."""
        # Few pauses have a scope.
        group = self.groups.get(key.group_id) if self.scopes else None
        if group is None or group.pause is not None:
            return False
        due = (each for each in group.scheduled if each.begin_ms <= append_ms)
        every: list[Pause | Scheduled] = [*group.scoped, *due]
        return any(
            append_ms < each.until_ms
            and each.scope is not None
            and is_in_scope(each.scope, key)
            for each in every
        )

    def estimated_pause_end(self, key: Key, append_ms: int) -> int | None:
        """Return when a key's pause ends, by an estimated append time, or None."""
        group = self.groups.get(key.group_id)
        if group is None or not (group.pause or group.scoped or group.scheduled):
            return None
        due = [each for each in group.scheduled if each.begin_ms <= append_ms]
        every: list[Pause | Scheduled] = [*group.pauses, *due]
        found = [
            each
            for each in every
            if append_ms < each.until_ms and is_in_scope(each.scope, key)
        ]
        # Pauses of the whole group follow each other; pauses with a scope overlap.
        whole = [each.until_ms for each in found if each.scope is None][:1]
        scoped = (each.until_ms for each in found if each.scope is not None)
        return max([*whole, *scoped], default=None)

    def action_for(self, client: tuple[str, str], *, host: str) -> Action | None:
        """Return whether a member is drained or cordoned (PROTOCOL 9.7).

        Args:
            client: Group and client; this must be the world of the group's home.
            host: The host that it announced.
        """
        group_id, client_id = client
        if not self.directed:
            return None  # the common case
        groups = (self.groups.get(name) for name in (group_id, CHECKPOINT_GROUP))
        found: set[Action] = {
            each.action
            for group in groups
            if group is not None
            for each in group.directives
            if each.names(client_id, host)
        }
        return DRAIN if DRAIN in found else CORDON if found else None

    def token(self, key: Key) -> Token | None:
        """Return the fencing token of a key's current epoch (PROTOCOL 4.10)."""
        state = self.keys.get(key)
        era = None if state is None else self.era_at(state.epoch)
        if state is None or era is None:
            return None
        return Token(era, state.epoch_leader_epoch, state.epoch)

    def era_at(self, offset: int) -> int | None:
        """Return the era in force at an offset, None without a Config.

        An imported key has the epoch 0 until it is claimed, and the newest era
        (PROTOCOL 4.10).
        """
        if self.config is None:
            return None
        earlier = era_at(self.eras, offset) if offset else None
        return self.config.era if earlier is None else earlier

    def end_era(self, offset: int) -> None:
        """Keep the era of the Config in force, which a Config at ``offset`` ends."""
        assert self.config is not None
        epochs = (key.epoch for key in self.keys.values() if key.owner is not None)
        self.eras = end_era(self.eras, (offset, self.config.era), epochs=epochs)

    def live_members(self, group_id: str) -> list[MemberState]:
        """Return the group's live members, sorted by client and incarnation."""
        return [
            member
            for name, member in sorted(self.soft.members.items())
            if name[0] == group_id and self.is_live(member, self.now_ms)
        ]

    def has_other_member(self, group_id: str, owner: Owner) -> bool:
        """Return whether a group has a live member other than this owner."""
        return any(
            name[0] == group_id
            and name[1:] != owner
            and self.is_live(member, self.now_ms)
            for name, member in self.soft.members.items()
        )

    def is_live(self, member: MemberState, log_ms: int) -> bool:
        """Return whether a member announced itself within two heartbeat intervals."""
        if self.config is None:
            return False
        return log_ms - member.seen_ms <= 2 * self.config.heartbeat_interval_ms

    def become(self, other: "WorldState") -> None:
        """Adopt another state, but keep the own place in the log and soft state.

        The other state must not be used afterwards, because its parts are shared.
        """
        kept = {"partition", "next_offset", "soft"}
        for field in attrs.fields(WorldState):
            if field.name not in kept:
                setattr(self, field.name, getattr(other, field.name))

    def rebuild_derived(self) -> None:
        """Recompute the derived attributes after keys and groups were replaced."""
        self.epochs = {known.epoch: key for key, known in self.keys.items()}
        self.epochs.pop(0, None)  # imported keys, which nobody has claimed yet
        for group in self.groups.values():
            group.key_count = 0
        for key in self.keys:
            self.groups[key.group_id].key_count += 1
        self.over = {
            (offset, group_id, op_id): None
            for group_id, group in self.groups.items()
            for offset, op_id in group.over
        }
        self.fences = {
            (group_id, fence.client_id, fence.incarnation): fence.offset
            for group_id, group in self.groups.items()
            for fence in group.fences
        }
        self.scopes = {
            (group_id, each.op_id): None
            for group_id, group in self.groups.items()
            for each in group.scoped_operations
        }
        self.directed = {
            (group_id, each.op_id): None
            for group_id, group in self.groups.items()
            for each in group.directives
        }
        self.locked = {}
        for key, state in self.keys.items():
            if state.lock is not None:
                self.locked.setdefault((key.group_id, state.lock.op_id), {})[key] = None
        self.note_next_lapse()
        self.plans_ms = None
        for group in self.groups.values():
            if group.planned is not None:
                self.note_plan(group.planned.log_time_ms)
        self.index_forgettable()
        self.item_hashes = {}
        self.item_sum = 0
        self.dirty = {
            **dict.fromkeys(self.keys),
            **dict.fromkeys(self.groups),
        }
        if self.quiet_until_ms is not None:
            self.dirty[QUIET] = None
        if self.staging is not None:
            self.dirty[STAGING] = None
        if self.eras:
            self.dirty[ERAS] = None
        if self.layout is not None:
            self.dirty[LAYOUT] = None
        if self.growths:
            self.dirty[GROWTHS] = None
        self.note_next_end()

    def note_next_end(self) -> None:
        """Recompute when staging or quiet time ends."""
        staged_ms = None if self.staging is None else self.staging.until_ms
        ends_ms = (staged_ms, self.quiet_until_ms)
        self.ends_ms = min((end for end in ends_ms if end is not None), default=None)

    def note_next_lapse(self) -> None:
        """Recompute when the next pause begins or ends by itself."""
        every = (group.lapses_ms for group in self.groups.values())
        self.lapses_ms = min((ms for ms in every if ms is not None), default=None)

    def note_plan(self, log_time_ms: int) -> None:
        """Record that a group with a Plan of this log time may have nothing else."""
        now_ms = self.plans_ms
        self.plans_ms = log_time_ms if now_ms is None else min(log_time_ms, now_ms)

    def note_lapse(self, append_ms: int) -> None:
        """Record that a pause begins or ends by itself at an append time."""
        now_ms = self.lapses_ms
        self.lapses_ms = append_ms if now_ms is None else min(append_ms, now_ms)

    def index_forgettable(self) -> None:
        """Recompute which keys may be dropped for their silence."""
        self.forgettable = [
            (state.active_ms, key)
            for key, state in self.keys.items()
            if is_forgettable(state)
        ]
        heapify(self.forgettable)
        self.awaiting = {key for _, key in self.forgettable}
        self.stale_count = 0

    def note_forgotten(self, key: Key) -> None:
        """Record that a record dropped a key, whose entry stays in the heap."""
        if key in self.awaiting:
            self.awaiting.discard(key)
            self.stale_count += 1
        self.bound_forgettable()

    def bound_forgettable(self) -> None:
        """Remove entries of keys that records dropped, once they exceed the keys.

        Removing each at once would cost a scan of all entries. Without removal, a flood
        of keys that are claimed and dropped would make the heap grow without bound.
        """
        if self.stale_count > len(self.keys):
            self.index_forgettable()

    def note_forgettable(self, key: Key, state: KeyState) -> None:
        """Record that a key may be dropped once it has been silent long enough."""
        # One entry per key, however often it is released: its due time only grows, so
        # an old entry is at worst popped too early, and put back.
        if is_forgettable(state) and key not in self.awaiting:
            self.awaiting.add(key)
            heappush(self.forgettable, (state.active_ms, key))

    def note_gone(self, name: Key | str) -> None:
        """Mark a dropped key or group as changed, if the digest includes it."""
        if name in self.item_hashes:
            self.dirty[name] = None
        else:
            self.dirty.pop(name, None)


def is_forgettable(state: KeyState) -> bool:
    """Return whether silence alone may drop the key (PROTOCOL 4.9)."""
    return state.owner is None and state.lock is None and state.granted is None


# --- what a record did (PROTOCOL 3.8)

ACCEPTED = "accepted"
REFUSED = "refused"
IGNORED = "ignored"
UNDECODABLE = "undecodable"
HALTED = "halted"
SKIPPED = "skipped"

Detail = dict[str, int]


class Transition(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Effect of one record on a key, a group or the whole state.

    Attributes:
        offset: Offset of the entry.
        outcome: accepted, refused, ignored, undecodable, skipped or halted.
        effect: Effect of an accepted record, else None.
        reason: Why another record had no effect, also the name of its counter; or None.
        key: The key that the record names, or None.
        epoch: The key's epoch after the record, None without a key.
        detail: Figures for the sender: time left or the granted range.
        record: The record itself, None if the value is not a record.
    """

    offset: int
    outcome: str
    effect: str | None
    reason: str | None
    key: Key | None
    epoch: int | None
    detail: Detail | None
    record: Record | None


Transitions = tuple[Transition, ...]


class Step(msgspec.Struct, gc=False):
    """One record being folded. Its methods count the outcome and make transitions."""

    state: WorldState
    entry: LogEntry
    record: Record | None

    def accepted(
        self, effect: str, key: Key | None = None, *, detail: Detail | None = None
    ) -> Transition:
        """Count the effect; return the transition of a record that took effect."""
        count(self.state, effect)
        return self._make(ACCEPTED, (effect, None), key=key, detail=detail)

    def refused(
        self, reason: str, key: Key | None = None, *, detail: Detail | None = None
    ) -> Transition:
        """Count the reason; return the transition of a refused request."""
        count(self.state, reason)
        return self._make(REFUSED, (None, reason), key=key, detail=detail)

    def ignored(self, reason: str, key: Key | None = None) -> Transition:
        """Count the reason; return the transition of a record that does not apply."""
        count(self.state, reason)
        return self._make(IGNORED, (None, reason), key=key)

    def undecodable(self) -> Transition:
        """Count it; return the transition of a value that is not a record."""
        count(self.state, UNDECODABLE)
        return self._make(UNDECODABLE, (None, UNDECODABLE))

    def skipped(self) -> Transition:
        """Count it; return the transition of a checkpoint's record, without effect."""
        count(self.state, SKIPPED)
        return self._make(SKIPPED, (None, None))

    def halted(self) -> Transition:
        """Count it; return the transition of a record too new for this reader."""
        count(self.state, HALTED)
        return self._make(HALTED, (None, HALTED))

    def _make(
        self,
        outcome: str,
        why: tuple[str | None, str | None],
        *,
        key: Key | None = None,
        detail: Detail | None = None,
    ) -> Transition:
        known = None if key is None else self.state.keys.get(key)
        epoch = None if known is None else known.epoch
        effect, reason = why
        offset = self.entry.offset
        return Transition(
            offset=offset,
            outcome=outcome,
            effect=effect,
            reason=reason,
            key=key,
            epoch=epoch,
            detail=detail,
            record=self.record,
        )


def count(state: WorldState, name: str, *, times: int = 1) -> None:
    """Add to a counter of the soft state; adding 0 does not create the counter."""
    if times:
        counters = state.soft.counters
        counters[name] = counters.get(name, 0) + times


# --- notes: why a key changed hands last, and from whom (soft, PROTOCOL 3.2).

STUCK = "stuck"
WHY = "why"
WHY_CHARS_MAX = 200
CLAIM_TAGS_BYTES_MAX = 1_000  # of the texts; tags have up to 1,024 bytes

_ENCODER = msgspec.msgpack.Encoder()


def why_to_tags(why: str, person: str | None = None) -> bytes:
    """Return the tags of a claim, cut to the maximum length.

    Args:
        why: Its reason.
        person: Person for whom it is made, None for none.
    """
    tags = {WHY: why[:WHY_CHARS_MAX]}
    if person:
        left = CLAIM_TAGS_BYTES_MAX - len(tags[WHY].encode())
        tags[BY] = person_text(person, min(PERSON_BYTES_MAX, left))
    return _ENCODER.encode(tags)


def why_of(record: ClaimingPartition) -> str | None:
    """Return the reason in the tags of a claim, or None. Bounded; never raises."""
    tags = record.tags
    found = None if isinstance(tags, UnsetType) else decode_tags(tags)
    why = (found or {}).get(WHY)
    # Shared, because a client claims many keys for the same reason.
    return shared(why[:WHY_CHARS_MAX]) if isinstance(why, str) else None


def note_claim(
    state: WorldState,
    key: Key,
    *,
    record: ClaimingPartition,
    before: Owner | None,
    follows: int | None,
) -> None:
    """Record an accepted claim or resume.

    Args:
        state: State after the claim.
        key: The claimed key.
        record: The claim.
        before: The previous owner.
        follows: Epoch of the claim before this one.
    """
    notes = state.soft.notes
    known = state.keys[key]
    owner = known.owner
    assert owner is not None
    old = notes.get(key)
    last = None if before is None else before.client_id
    stuck: tuple[int, int] | None = None
    if old is not None:
        last = last or old.client_id
        if last == owner.client_id:
            last = old.before
        stuck = old.stuck
    elif known.previous is not None:
        follows = None
    reason = why_of(record)
    notes[key] = KeyNote(
        client_id=owner.client_id,
        offset=known.epoch,
        reason=reason,
        before=last,
        stuck=stuck,
        follows=follows,
    )


def note_release(
    state: WorldState, key: Key, *, record: ReleasingPartition, offset: int
) -> None:
    """Record an accepted release."""
    notes = state.soft.notes
    old = notes.get(key)
    before = None if old is None else old.before
    stuck = None if old is None else old.stuck
    if record.reason is not None and record.reason.startswith(STUCK):
        at = state.keys[key].next_unclaimed() or 0
        times = stuck[1] if stuck is not None and stuck[0] == at else 0
        stuck = (at, times + 1)
    notes[key] = KeyNote(
        client_id=record.client_id,
        offset=offset,
        reason=record.reason,
        before=before,
        stuck=stuck,
    )


def stuck_count(note: KeyNote | None, known: KeyState) -> int:
    """Return how many owners in a row were stuck at the present position."""
    if note is None or note.stuck is None:
        return 0
    at, times = note.stuck
    return times if at == (known.next_unclaimed() or 0) else 0
