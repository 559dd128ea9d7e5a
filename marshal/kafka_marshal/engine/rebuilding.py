"""Starts coordinating partitions, and starts them again after a truncation.

PROTOCOL 7.3 and 7.5. Runs on the engine's thread: requests to the log are made without
the lock, and replicas are changed under it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import attrs

from kafka_marshal.defaults import format_command
from kafka_marshal.errors import (
    CoordinationError,
    LogUnreadable,
    MalformedRecord,
    MarshalError,
    TopicMisconfigured,
)
from kafka_marshal.ports import Pending, TopicInfo, WrongSetting
from kafka_marshal.protocol.granting import GrantRequest
from kafka_marshal.protocol.layout import used_count
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.snapshot import digest, from_bytes
from kafka_marshal.protocol.state import KeyState, Transition, WorldState
from kafka_marshal.protocol.types import Key, LogEntry, Owner, TopicPartition

from .awaited_ends import AwaitedEnds
from .context import Context
from .kept_states import (
    ASK_MS_MAX,
    KeptState,
    KeptStates,
    Restored,
    WentBack,
    restore,
)
from .proxy_grants import PendingGrant, ProxyGrants, draw_grantee
from .session import Session

# Interval between searches for a checkpoint in a log that begins above 0.
LOG_START_RETRY_MS = 10_000
# Interval between checks that the coordination topic was not replaced.
TOPIC_CHECK_MS = 30_000
# Effects that begin an ownership.
OWNERSHIP_STARTS = frozenset({"claimed", "resumed"})
# Most ends of grants to remember of a key: one for each topic id and set position.
OWN_GRANTS_MAX = 8
# Most keys with ends of grants to remember: a sidecar may run for years.
OWN_KEYS_MAX = 100_000

_Count = tuple[bytes | None, bytes | None]


def _count_of(known: KeyState) -> _Count:
    """Return topic id and last set position: grants only compare within the same."""
    previous = known.previous
    return known.topic_id, None if previous is None else previous.op_id


class OwnGrants:
    """The ends of the grants to this process, by key, for as long as it runs.

    The log does not show which process was granted offsets of a released key. And a set
    position replaces earlier grants: if the log loses it, they count again.
    """

    def __init__(self) -> None:
        self._ends: dict[Key, dict[_Count, int]] = {}

    def take(self, world: WorldState, key: Key) -> None:
        """Record that a session of this process was granted offsets of a key."""
        known = world.keys[key]
        ends, count = self._ends.pop(key, {}), _count_of(known)
        ends.pop(count, None)
        ends[count] = known.granted or 0
        if len(ends) > OWN_GRANTS_MAX:
            del ends[next(iter(ends))]
        self._ends[key] = ends
        if len(self._ends) > OWN_KEYS_MAX:
            del self._ends[next(iter(self._ends))]

    def end(self, key: Key, known: KeyState) -> int:
        """Return the end of the grants by the topic id and set position of a state."""
        return self._ends.get(key, {}).get(_count_of(known), 0)

    def end_by_lock(self, key: Key, known: KeyState) -> int:
        """Return the end of the grants after a set position of which a lock is left."""
        lock = known.lock
        if lock is None:
            return 0
        topic_id = lock.topic_id if known.topic_id is None else known.topic_id
        return self._ends.get(key, {}).get((topic_id, lock.op_id), 0)

    def forget(self, is_reset: Callable[[Key], bool]) -> None:
        """Forget keys whose grants a Reset has taken back (PROTOCOL 7.6)."""
        for key in [key for key in self._ends if is_reset(key)]:
            del self._ends[key]


@attrs.define(eq=False, kw_only=True)
class _LostGrant:
    """A key of this process whose grants the log has lost (PROTOCOL 7.5).

    Attributes:
        session: The session that owns the key.
        key: The key.
        partition: The coordinating partition of the claim.
        epoch: Epoch of the claim.
        granted: End of the grants before: the next offset, granted to nobody.
        reached: Highest position in the log while this session owned the key.
        pending: The request that restores the grants in the log.
        topic_id: Topic id of the claim.
    """

    session: Session
    key: Key
    partition: int
    epoch: int
    granted: int
    reached: int = 0
    pending: PendingGrant | None = None
    topic_id: bytes | None = None


@attrs.define(eq=False)
class _ForeignGrant:
    """Grants of another member that the log has lost and that a kept state shows.

    Attributes:
        key: The key.
        owner: The owner, before the truncation and in the log now.
        granted: End of the grants before: the next offset, granted to nobody.
        reached: Highest position in the log while that member owned the key.
    """

    key: Key
    owner: Owner
    granted: int
    reached: int


_TopicKey = tuple[Key, bytes | None]


class _Granted(NamedTuple):
    """The grants of one key before a truncation.

    Attributes:
        owner: The owner of the key.
        granted: End of the grants: the next offset, granted to nobody.
    """

    owner: Owner | None
    granted: int


@attrs.define(eq=False)
class _Truncated:
    """The grants of one partition before a truncation, and later takeovers.

    Attributes:
        leader_epoch: Leader epoch at the truncation; new entries have a higher one.
        is_kept: Whether the grants come from a kept state and not from our own
            memory: then they include grants of members that cannot report losses
            because they have ended.
        keys: Grants of each key, by topic id: offsets of a topic mean nothing for
            another topic of the same name.
        own: Ends of the grants to this process, whether it is the owner or not.
        taken: Lowest start offset of new owners since, in the same topic.
    """

    leader_epoch: int
    is_kept: bool = False
    keys: dict[_TopicKey, _Granted] = attrs.field(factory=dict)
    own: dict[_TopicKey, int] = attrs.field(factory=dict)
    taken: dict[_TopicKey, int] = attrs.field(factory=dict)

    def remember(self, topic_key: _TopicKey, owner: Owner | None, granted: int) -> None:
        """Record grants; the first owner and the highest offset count."""
        before = self.keys.get(topic_key, _Granted(owner, 0))
        self.keys[topic_key] = _Granted(before.owner, max(before.granted, granted))

    def remember_own(self, keys: Mapping[Key, KeyState], own: OwnGrants) -> None:
        """Record the ends of the grants to this process, by the keys of a state."""
        for key, known in keys.items():
            topic_key, end = (key, known.topic_id), own.end(key, known)
            if end > self.own.get(topic_key, 0):
                self.own[topic_key] = end

    def granted(self, topic_key: _TopicKey) -> int:
        """Return the end of the grants before the truncation."""
        granted = self.keys[topic_key].granted if topic_key in self.keys else 0
        return max(granted, self.own.get(topic_key, 0))

    def skip_to(self, world: WorldState) -> None:
        """Start from a state; a takeover in skipped entries counts from offset 0."""
        if (world.leader_epoch or 0) > self.leader_epoch:
            for (key, topic_id), before in self.keys.items():
                known = world.keys.get(key)
                if known is None or known.topic_id != topic_id:
                    continue
                if known.owner != before.owner:
                    self.taken[key, topic_id] = 0


class Rebuilder:
    """Starts partitions, tracks their progress, and restores lost grants.

    Attributes:
        log_start_missing: Partitions whose logs begin above 0 without a fitting kept
            state, with the first offset of their logs.
        sources: Sources of kept states, in order of preference.
        grants: The ends of the grants to sessions of this process.
    """

    def __init__(
        self,
        context: Context,
        requests: ProxyGrants,
        *,
        sources: Sequence[KeptStates],
    ) -> None:
        self.log_start_missing: dict[int, int] = {}
        self.sources = tuple(sources)
        self.grants = OwnGrants()
        self._context = context
        self._requests = requests
        self._unplaced = set(context.replicas)
        # Partitions added to the topic that the log client does not read yet.
        self._unread: set[int] = set()
        self._ends = AwaitedEnds(context.ports)
        self._truncated: dict[int, _Truncated] = {}
        self._lost_grants: list[_LostGrant] = []
        self._foreign_grants: list[_ForeignGrant] = []
        # Kept states beyond a truncated log's end, until all losses are reported.
        self._evidence: dict[int, KeptState] = {}
        self._aside: list[tuple[int, LogEntry]] = []
        self._retry_at_ms = 0
        # The last state of each partition that was reported as unfit.
        self._unfit: dict[int, tuple[str, int]] = {}
        self._topic = TopicWatch(context)
        context.rebuilding.update(context.replicas)

    # --- starting partitions

    def add(self, partition: int) -> None:
        """Start a partition that was added to the topic, once the log reads it."""
        self._unread.add(partition)
        self._context.rebuilding.add(partition)

    def is_lost(self, partition: int) -> bool:
        """Return whether a partition has no start yet, so that it cannot be folded."""
        return partition in self._unplaced or partition in self._unread

    def is_due(self, now_ms: int) -> bool:
        """Return whether to look for the start of a partition now."""
        if self._unread:
            count = self._context.ports.log.partition_count
            found = {t for t in self._unread if t < count}
            self._unplaced |= found
            self._unread -= found
        return bool(self._unplaced) or (
            bool(self.log_start_missing) and now_ms >= self._retry_at_ms
        )

    def find_starts(self) -> tuple[dict[int, Restored], dict[int, int]]:
        """Find the starts of partitions that have none yet; needs no lock.

        Returns:
            The start of each, and the end offset to fold up to. ``take_aside``
            returns entries of other partitions that are read meanwhile.

        Raises:
            CoordinationError: The log did not answer; try again.
            LogTruncated: Another partition was truncated; see ``on_truncated``.
        """
        log = self._context.ports.log
        if self._context.config is not None:
            self._topic.require_same()
        positions = log.positions()
        found = restore(
            log,
            self._unplaced | self.log_start_missing.keys(),
            sources=self.sources,
            from_offsets={t: positions[t] for t in self.log_start_missing},
            on_unfit=self._on_unfit,
            aside=self._aside,
        )
        ends = log.end_offsets(ASK_MS_MAX)
        return found, {t: ends[t] for t in found}

    def take_aside(self) -> list[tuple[int, LogEntry]]:
        """Return and clear the entries of other partitions that were read meanwhile."""
        aside, self._aside = self._aside, []
        return aside

    def begin(
        self, found: Mapping[int, Restored], ends: Mapping[int, int], *, now_ms: int
    ) -> None:
        """Start partitions."""
        for t, restored in found.items():
            was_log_start_missing = self.log_start_missing.pop(t, None) is not None
            if restored.is_log_start_missing:
                self.log_start_missing[t] = restored.log_start
                self._retry_at_ms = now_ms + LOG_START_RETRY_MS
                if was_log_start_missing:
                    continue  # it keeps observing from its offset
                fields = {"partition": t, "log_start": restored.log_start}
                self._context.observe("log_start_missing", fields)
            elif restored.source is not None:
                at = {"partition": t, "offset": restored.world.next_offset}
                self._context.observe("restored", at | {"source": restored.source})
            replica = self._context.replicas[t]
            replica.begin(
                restored.world,
                now_ms,
                notes=restored.notes,
                is_known=not restored.is_log_start_missing,
            )
            self._ends.add({t: ends[t]})
            if t in self._truncated:
                self._truncated[t].skip_to(restored.world)
        self._unplaced -= found.keys()

    def _on_unfit(self, kept: KeptState, why: str) -> None:
        unfit = (kept.source, kept.offset)
        if self._unfit.get(kept.partition) == unfit:
            return
        self._unfit[kept.partition] = unfit
        fields = {"partition": kept.partition, "source": kept.source, "why": why}
        self._context.observe("state_unfit", fields)
        if isinstance(why, WentBack):
            self._evidence[kept.partition] = kept
            self._context.unreported.add(kept.partition)
            if kept.partition not in self._truncated:
                self._remember(kept)

    def _remember(self, kept: KeptState) -> None:
        """Record the grants of a kept state that the log may have lost."""
        try:
            world = from_bytes(kept.state)
        except MalformedRecord:
            return
        if digest(world) != kept.digest:
            return
        truncated = _Truncated(kept.leader_epoch, is_kept=True)
        for key, known in world.keys.items():
            if known.granted is not None:
                truncated.remember((key, known.topic_id), known.owner, known.granted)
        self._truncated[kept.partition] = truncated

    def finish(self, positions: Mapping[int, int]) -> list[int]:
        """Return the partitions that have just been read to their ends."""
        if not self._ends:
            return []  # the common case
        self._find_known()
        reached = self._ends.reached(positions)
        done = [t for t in reached if t not in self.log_start_missing]
        for t in done:
            self._ends.discard(t)
            self._context.rebuilding.discard(t)
        return done

    def _find_known(self) -> None:
        """Find partitions whose state is known although their start is missing."""
        for t in [*self.log_start_missing]:
            replica = self._context.replicas[t]
            if replica.is_known:
                del self.log_start_missing[t]
                at = {"partition": t, "offset": replica.world.next_offset}
                source = "fence of a partition count change"
                self._context.observe("restored", at | {"source": source})

    def _missing(self) -> list[int]:
        """Return the partitions in use whose log start is missing, as far as read.

        Partitions that are not in use were added for a change of the partition count
        that was given up. They have no state, and begin with the fence of a later
        change (PROTOCOL 10.2).
        """
        count = used_count(self._context.replicas[0].world)
        return sorted(t for t in self.log_start_missing if count is None or t < count)

    def missing(self) -> list[int]:
        """Return the partitions in use whose log start is missing.

        A partition is reported only once its log is read, which may show from where on
        its state is known, and once partition 0 is read, which shows what is in use.
        """
        found, rebuilding = self._missing(), self._context.rebuilding
        if 0 in rebuilding and 0 not in found:
            return []
        folded = self._context.folded
        return [t for t in found if self._ends.is_reached(t, folded)]

    def is_ended(self) -> bool:
        """Return whether all partitions in use were read to their ends."""
        unused = self.log_start_missing.keys() - self._missing()
        return self._context.rebuilding <= unused

    def require_log_start(self) -> None:
        """Refuse claims while the start of the log is missing.

        Raises:
            LogUnreadable: PROTOCOL 7.3: a process that cannot see all claims
                claims nothing.
        """
        missing = self.missing()
        if missing:
            raise LogUnreadable(
                f"the log of coordinating partitions {missing} begins above offset 0, "
                "and no checkpoint or snapshot replaces the missing records, which may "
                "decide who owns a partition, so nothing is claimed; see: marshal "
                "doctor"
            )

    # --- truncation

    def on_truncated(self, partition: int, error: Exception) -> None:
        """Drop the state of a truncated partition and remember its grants."""
        self._context.observe("log_truncated", {"partition": partition, "error": error})
        replica = self._context.replicas[partition]
        truncated = self._truncated.get(partition)
        if truncated is None:
            epoch = replica.world.leader_epoch
            truncated = self._truncated[partition] = _Truncated(
                -1 if epoch is None else epoch
            )
        for key, known in replica.world.keys.items():
            if known.granted is not None:
                truncated.remember((key, known.topic_id), known.owner, known.granted)
        truncated.remember_own(replica.world.keys, self.grants)
        for lost in list(self._lost_grants):
            if lost.partition == partition:
                # Grants not restored in the log yet are still lost.
                owner, topic_key = (
                    lost.session.claimant.owner,
                    (lost.key, lost.topic_id),
                )
                truncated.remember(topic_key, owner, lost.granted)
                self._lost_grants.remove(lost)
        self._context.rebuilding.add(partition)
        self._ends.discard(partition)
        self._unplaced.add(partition)
        replica.begin(WorldState(partition), self._context.now_ms)

    def watch(
        self, partition: int, entry: LogEntry, *, transitions: Iterable[Transition]
    ) -> None:
        """Record takeovers since a truncation, while the partition is folded again.

        At the end of the fold the grants of a new owner may reach beyond the lost ones:
        then the state does not show that offsets were granted twice.
        """
        truncated = self._truncated.get(partition)
        epoch = entry.leader_epoch
        if truncated is None or epoch is None or epoch <= truncated.leader_epoch:
            return
        keys = self._context.replicas[partition].world.keys
        for transition in transitions:
            key = transition.key
            if key is None or transition.effect not in OWNERSHIP_STARTS:
                continue
            known = keys.get(key)
            if known is None:
                continue
            topic_key = key, known.topic_id
            before = truncated.keys.get(topic_key)
            if before is not None and known.owner != before.owner:
                begun = known.next_unclaimed() or 0
                truncated.taken[topic_key] = min(
                    truncated.taken.get(topic_key, begun), begun
                )

    def compare(self, partition: int, sessions: Iterable[Session]) -> None:
        """Compare a refolded partition with the grants before the truncation."""
        world = self._context.replicas[partition].world
        truncated = self._truncated.pop(partition, None) or _Truncated(-1)
        if truncated.keys and not truncated.is_kept:
            # Grants that a lost set position had replaced count again.
            truncated.remember_own(world.keys, self.grants)
            self._expose_locked(world)
        ours = {session.claimant.owner: session for session in sessions}
        self._restore_ours(world, truncated, ours=ours)
        for topic_key, (owner, _) in truncated.keys.items():
            granted = 0
            if owner in ours or truncated.is_kept:
                granted = truncated.granted(topic_key)
            elif self._context.partition_of(topic_key[0]) == partition:
                granted = truncated.own.get(topic_key, 0)
            if granted:
                self._report(
                    world, truncated, topic_key=topic_key, granted=granted, ours=ours
                )

    def _restore_ours(
        self,
        world: WorldState,
        truncated: _Truncated,
        *,
        ours: Mapping[Owner, Session],
    ) -> None:
        """Find lost grants of keys that this process owns, to request them again."""
        partition = world.partition
        for key, known in world.keys.items():
            session = None if known.owner is None else ours.get(known.owner)
            if session is None or session.claimant.group_id != key.group_id:
                continue
            topic_key = key, known.topic_id
            granted = truncated.granted(topic_key)
            reached = known.next_unclaimed() or 0
            if self._context.partition_of(key) != partition:
                # PROTOCOL 10.9: it has moved; an epoch says nothing in another log.
                session.release_ghost(key, known.epoch, partition=partition)
            elif granted > reached:
                lost = _LostGrant(
                    session=session,
                    key=key,
                    partition=partition,
                    epoch=known.epoch,
                    granted=granted,
                    reached=reached,
                )
                lost.topic_id = known.topic_id
                self._lost_grants.append(lost)
            else:
                session.release_ghost(key, known.epoch, partition=partition)

    def _report(
        self,
        world: WorldState,
        truncated: _Truncated,
        *,
        topic_key: _TopicKey,
        granted: int,
        ours: Mapping[Owner, Session],
    ) -> None:
        """Report lost grants of a key, unless an owner restores them."""
        (key, topic_id), owner = topic_key, truncated.keys[topic_key].owner
        now = world.keys.get(key)
        if topic_key in truncated.taken:
            self._expose(key, truncated.taken[topic_key], granted)
        elif now is not None and now.topic_id != topic_id:
            # The log has another topic, and claims of earlier ones do not count.
            if topic_id not in now.retired_topic_ids:
                self._expose(key, None, granted)
        elif now is None or now.owner not in ours:
            head = None if now is None else now.next_unclaimed()
            if owner is not None and now is not None and now.owner == owner:
                # A live owner restores its grants in the log itself.
                self._foreign_grants.append(
                    _ForeignGrant(
                        key=key, owner=owner, granted=granted, reached=head or 0
                    )
                )
            else:
                self._expose(key, head, granted)

    def _expose_locked(self, world: WorldState) -> None:
        """Report grants after a set position that the log lost and a lock repeats."""
        for key, known in world.keys.items():
            if known.lock is not None:
                end = self.grants.end_by_lock(key, known)
                self._expose(key, known.lock.position, end)

    def compare_all(self, sessions: Iterable[Session]) -> None:
        """Compare all started partitions with the grants that kept states show."""
        for partition in list(self._truncated):
            self.compare(partition, sessions)

    def drive(self, now_ms: int) -> None:
        """Request lost grants again, without processing the records.

        Raises:
            TopicMisconfigured: The coordination topic was replaced.
        """
        self._topic.drive(now_ms)
        if self._evidence:
            self._discard_evidence()
        for foreign in list(self._foreign_grants):
            if self._is_resolved(foreign, now_ms):
                self._foreign_grants.remove(foreign)
        if not self._lost_grants:
            return
        half_ms = self._context.heartbeat_interval_ms // 2
        for lost in list(self._lost_grants):
            pending = lost.pending
            if self._context.partition_of(lost.key) != lost.partition:
                self._lost_grants.remove(lost)  # it has moved, with what was granted
            elif pending is not None and pending.verdict is not None:
                self._close(lost, pending)
            elif pending is None or now_ms - pending.sent_ms > half_ms:
                self._request(lost)

    def _discard_evidence(self) -> None:
        """Remove kept states whose losses have been reported, in the background."""
        keys = [foreign.key for foreign in self._foreign_grants]
        keys += [lost.key for lost in self._lost_grants]
        awaited = {self._context.partition_of(key) for key in keys}
        awaited |= self._truncated.keys() | self._context.rebuilding
        for partition in self._evidence.keys() - awaited:
            kept = self._evidence.pop(partition)
            self._context.unreported.discard(partition)
            self._context.ports.background.submit(partial(self._discard, kept))

    def _discard(self, kept: KeptState) -> None:
        for source in self.sources:
            source.discard(kept)

    def _is_resolved(self, foreign: _ForeignGrant, now_ms: int) -> bool:
        """Return whether an owner has restored its grants, or never will.

        In the second case, report the exposed grants.
        """
        if self._context.partition_of(foreign.key) in self._context.rebuilding:
            return False
        replica = self._context.replica_of(foreign.key)
        known = replica.world.keys.get(foreign.key)
        if known is not None and known.owner == foreign.owner:
            foreign.reached = max(foreign.reached, known.next_unclaimed() or 0)
            log_ms = replica.log_ms(now_ms)
            is_there = known.freshness(log_ms) is not Freshness.STALE
            if is_there and foreign.reached < foreign.granted:
                return False
        self._expose(foreign.key, foreign.reached, foreign.granted)
        return True

    def _request(self, lost: _LostGrant) -> None:
        first = self._update_reached(lost)
        request = GrantRequest(
            key=lost.key,
            owner=lost.session.claimant.owner,
            epoch=lost.epoch,
            # No process uses this grant.
            grantee=draw_grantee(self._context.ports.entropy),
            first=min(first, lost.granted - 1),
            last=lost.granted - 1,
        )
        try:
            lost.pending = self._requests.send(request)
        except CoordinationError:
            lost.pending = None  # too many pending requests: retry in a later round

    def _update_reached(self, lost: _LostGrant) -> int:
        """Update and return the highest position in the log under our own claim."""
        known = self._context.replica_of(lost.key).world.keys.get(lost.key)
        owner = lost.session.claimant.owner
        if known is not None and (known.owner, known.epoch) == (owner, lost.epoch):
            lost.reached = max(lost.reached, known.next_unclaimed() or 0)
        return lost.reached

    def _close(self, lost: _LostGrant, pending: PendingGrant) -> None:
        verdict = pending.verdict
        granted = None if verdict is None else verdict.granted
        if granted is not None:
            lost.reached = max(lost.reached, granted.end)
        if self._update_reached(lost) < lost.granted:
            if granted is not None:
                lost.pending = None  # one request was not enough: send another
                return
            # A new owner started at this position, however far it is by now.
            self._expose(lost.key, lost.reached, lost.granted)
        self._lost_grants.remove(lost)
        lost.session.release_ghost(lost.key, lost.epoch, partition=lost.partition)

    def _expose(self, key: Key, head: int | None, granted: int) -> None:
        if granted > (head or 0):
            # The present owner may be granted offsets that were already processed.
            fields = {"key": key, "first": head or 0, "last": granted - 1}
            self._context.observe("grant_exposed", fields)


class _TopicReport(NamedTuple):
    """The coordination topic as the cluster describes it.

    Attributes:
        info: The topic, None if it does not exist.
        starts: First offset of each partition; empty if unknown.
        wrong: Settings that break PROTOCOL 2.1; None if unknown.
    """

    info: TopicInfo | None
    starts: Mapping[int, int]
    wrong: tuple[WrongSetting, ...] | None


class TopicWatch:
    """Checks the coordination topic every 30 s.

    A topic that was deleted and created again has another id and no record of the
    owners (PROTOCOL 7.5). Settings that break 2.1 may change while members run; each
    is reported once (``topic_misconfigured``) and counted.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lookup: Pending[_TopicReport] | None = None
        self._due_ms = context.now_ms + TOPIC_CHECK_MS

    def drive(self, now_ms: int) -> None:
        """Check the topic in the background when due; handle the response.

        Raises:
            TopicMisconfigured: The topic was replaced.
        """
        lookup = self._lookup
        if lookup is not None and lookup.done():
            self._lookup = None
            if lookup.exception() is None:
                self._on_response(lookup.result(0))
        elif lookup is None and now_ms >= self._due_ms:
            self._due_ms = now_ms + TOPIC_CHECK_MS
            # A process that started from a state file has not read the last checkpoint
            # before it. If there is none, it writes one within its interval.
            has_all = all(
                replica.checkpoints.last_offset is not None or replica.began_at > 0
                for replica in self._context.replicas.values()
            )
            call = partial(self._report_topic, has_checkpoints=has_all)
            self._lookup = self._context.ports.background.submit(call)

    def require_same(self) -> None:
        """Check the topic now; needs no lock.

        Raises:
            TopicMisconfigured: The topic was replaced.
            CoordinationError: The cluster did not answer.
        """
        info = self._describe()
        if info is None:
            raise CoordinationError(
                f"the coordination topic {self._context.ports.log.topic} does not "
                "exist; check the brokers with: marshal doctor"
            )
        self._compare(info)

    def _describe(self) -> TopicInfo | None:
        name = self._context.ports.log.topic
        return self._context.ports.data.describe([name], ASK_MS_MAX).get(name)

    def _report_topic(self, *, has_checkpoints: bool) -> _TopicReport:
        """Describe topic, offsets and settings; runs in the background."""
        info, name = self._describe(), self._context.ports.log.topic
        starts: dict[int, int] = {}
        wrong = None
        data = self._context.ports.data
        with suppress(MarshalError):
            partitions = [TopicPartition(name, t) for t in self._context.replicas]
            ranges = data.ranges(partitions, ASK_MS_MAX)
            starts = {each.partition: span.start for each, span in ranges.items()}
        with suppress(MarshalError):  # reading settings needs a permission
            wrong = tuple(
                data.wrong_settings(
                    name, has_checkpoints=has_checkpoints, timeout_ms=ASK_MS_MAX
                )
            )
        return _TopicReport(info, starts, wrong)

    def _on_response(self, report: _TopicReport) -> None:
        self._compare(report.info)
        context = self._context
        context.log_starts.update(report.starts)
        if report.wrong is None:
            return
        known = set(context.wrong_settings)
        context.wrong_settings = report.wrong
        for each in report.wrong:
            if each not in known:
                fields = {"topic": context.ports.log.topic, **each._asdict()}
                context.observe("topic_misconfigured", fields)

    def _compare(self, info: TopicInfo | None) -> None:
        log = self._context.ports.log
        if info is None or info.topic_id is None or log.topic_id is None:
            return
        if info.topic_id != log.topic_id:
            problem = (
                f"the coordination topic {log.topic} was deleted and created again; "
                "the record of all owners is lost: stop every member, then run: "
                + format_command(log.topic)
            )
            raise TopicMisconfigured(problem, problems=(problem,))
