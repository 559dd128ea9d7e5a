"""Begins coordinating partitions, and begins them anew where a log went back.

PROTOCOL 7.3 and 7.5. Driven by the engine's thread: what asks the log runs without
the lock, what changes a replica under it.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import attrs

from kafka_marshal.errors import (
    CoordinationError,
    LogUnreadable,
    MalformedRecord,
    MarshalError,
    TopicMisconfigured,
)
from kafka_marshal.ports import Pending, TopicInfo, WrongSetting
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.snapshot import digest, from_bytes
from kafka_marshal.protocol.state import Transition, WorldState
from kafka_marshal.protocol.types import Key, LogEntry, Owner, TopicPartition

from .context import Context
from .kept_states import (
    ASK_MS_MAX,
    Discards,
    KeptState,
    KeptStates,
    Restored,
    WentBack,
    restore,
)
from .session import Session
from .tickets import Ticket, Tickets, Wish

# How often a log that begins above 0 is searched again for a checkpoint.
AMNESIAC_RETRY_MS = 10_000
# How often it is asked whether the topic is still the one that was opened.
TOPIC_CHECK_MS = 30_000
# What makes somebody an owner.
BEGINNINGS = frozenset({"claimed", "resumed"})


@attrs.define(eq=False)
class _Owed:
    """A key that is ours by a log that has lost what we were granted (7.5).

    Attributes:
        session: Whose it is.
        key: The key.
        epoch: Under which claim.
        granted: Next offset that nobody had been granted.
        reached: How far the log knew of it while it was ours.
        ticket: The request that makes the log know of it again.
        topic_id: Id of the topic that the claim is of.
    """

    session: Session
    key: Key
    epoch: int
    granted: int
    reached: int = 0
    ticket: Ticket | None = None
    topic_id: bytes | None = None


@attrs.define(eq=False)
class _Doubt:
    """Grants of another member that the log has lost, and that a kept state knows.

    Attributes:
        key: The key.
        owner: Whose it is by the log, and was.
        granted: Next offset that nobody had been granted.
        reached: How far the log knew of it while it was that owner's.
    """

    key: Key
    owner: Owner
    granted: int
    reached: int


_Place = tuple[Key, bytes | None]


class _Granted(NamedTuple):
    """What a log that went back knew to be granted.

    Attributes:
        owner: Whose the key was.
        granted: Next offset that nobody had been granted.
    """

    owner: Owner | None
    granted: int


@attrs.define(eq=False)
class _Gone:
    """What was granted by a log that is gone, and what came of it since.

    Attributes:
        leader_epoch: The log's when it went back; what is new has a higher one.
        is_kept: Whether a kept state says so, and not our own memory: then it is of
            all members of the log, and those that have ended report nothing.
        keys: What each key's owner had been granted, by topic id: offsets of a topic
            say nothing of another one of its name.
        taken: Where others began since in the same topic: the lowest offset.
    """

    leader_epoch: int
    is_kept: bool = False
    keys: dict[_Place, _Granted] = attrs.field(factory=dict)
    taken: dict[_Place, int] = attrs.field(factory=dict)

    def remember(self, place: _Place, owner: Owner | None, granted: int) -> None:
        """Take what was granted; the first owner told of and the highest count."""
        before = self.keys.get(place, _Granted(owner, 0))
        self.keys[place] = _Granted(before.owner, max(before.granted, granted))

    def skip_to(self, world: WorldState) -> None:
        """Go on from a state; where others began in what it skips, nobody can say."""
        if (world.leader_epoch or 0) > self.leader_epoch:
            for (key, topic_id), before in self.keys.items():
                known = world.keys.get(key)
                if known is None or known.topic_id != topic_id:
                    continue
                if known.owner != before.owner:
                    self.taken[key, topic_id] = 0


class Rebuilder:
    """What is begun, how far it is, and what is owed to the log then.

    Attributes:
        log_start_missing: Partitions whose logs begin above 0 without a kept state that
            fits, with the first offset that they have.
        sources: Where kept states may be, in the order in which to ask.
    """

    def __init__(
        self, context: Context, tickets: Tickets, *, sources: Sequence[KeptStates]
    ) -> None:
        self.log_start_missing: dict[int, int] = {}
        self.sources = tuple(sources)
        self._context = context
        self._tickets = tickets
        self._unplaced = set(context.replicas)
        self._barriers: dict[int, int] = {}
        self._gone: dict[int, _Gone] = {}
        self._owed: list[_Owed] = []
        self._doubts: list[_Doubt] = []
        # Kept states that the log went back behind, until all of it is reported.
        self._evidence: dict[int, KeptState] = {}
        self._aside: list[tuple[int, LogEntry]] = []
        self._retry_at_ms = 0
        # The last state of each T that was told of as unfit.
        self._told: dict[int, tuple[str, int]] = {}
        self._topic = TopicWatch(context)
        context.rebuilding.update(context.replicas)

    # --- beginning

    def is_lost(self, partition: int) -> bool:
        """Return whether a T has no place yet: nothing of it can be folded."""
        return partition in self._unplaced

    def is_due(self, now_ms: int) -> bool:
        """Return whether the log is to be asked where a partition begins."""
        return bool(self._unplaced) or (
            bool(self.log_start_missing) and now_ms >= self._retry_at_ms
        )

    def look(self) -> tuple[dict[int, Restored], dict[int, int]]:
        """Find where the partitions begin that have no place yet; needs no lock.

        Returns:
            Where each begins, and how far each is to be read. What came of others
            meanwhile is for ``take_aside``.

        Raises:
            CoordinationError: The log did not answer; try again.
            LogTruncated: Another partition went back meanwhile; see ``lose``.
        """
        log = self._context.ports.log
        if self._context.config is not None:
            self._topic.require_same()
        positions = log.positions()
        found = restore(
            log,
            self._unplaced | self.log_start_missing.keys(),
            sources=self.sources,
            places={t: positions[t] for t in self.log_start_missing},
            on_unfit=self._on_unfit,
            aside=self._aside,
        )
        ends = log.end_offsets(ASK_MS_MAX)
        return found, {t: ends[t] for t in found}

    def take_aside(self) -> list[tuple[int, LogEntry]]:
        """Return what came of other partitions while some were looked for."""
        aside, self._aside = self._aside, []
        return aside

    def begin(
        self, found: Mapping[int, Restored], ends: Mapping[int, int], *, now_ms: int
    ) -> None:
        """Take where partitions begin."""
        for t, restored in found.items():
            was_log_start_missing = self.log_start_missing.pop(t, None) is not None
            if restored.is_log_start_missing:
                self.log_start_missing[t] = restored.log_start
                self._retry_at_ms = now_ms + AMNESIAC_RETRY_MS
                if was_log_start_missing:
                    continue  # it goes on observing where it is
                fields = {"partition": t, "log_start": restored.log_start}
                self._context.observe("log_start_missing", fields)
            elif restored.source is not None:
                at = {"partition": t, "offset": restored.world.next_offset}
                self._context.observe("restored", at | {"source": restored.source})
            self._context.replicas[t].begin(restored.world, now_ms)
            self._barriers[t] = ends[t]
            if t in self._gone:
                self._gone[t].skip_to(restored.world)
        self._unplaced -= found.keys()

    def _on_unfit(self, kept: KeptState, why: str) -> None:
        told = (kept.source, kept.offset)
        if self._told.get(kept.partition) == told:
            return
        self._told[kept.partition] = told
        fields = {"partition": kept.partition, "source": kept.source, "why": why}
        self._context.observe("state_unfit", fields)
        if isinstance(why, WentBack):
            self._evidence[kept.partition] = kept
            self._context.unreported.add(kept.partition)
            if kept.partition not in self._gone:
                self._remember(kept)

    def _remember(self, kept: KeptState) -> None:
        """Note what a kept state says was granted by entries that the log has lost."""
        try:
            world = from_bytes(kept.state)
        except MalformedRecord:
            return
        if digest(world) != kept.digest:
            return
        gone = _Gone(kept.leader_epoch, is_kept=True)
        for key, known in world.keys.items():
            if known.granted is not None:
                gone.remember((key, known.topic_id), known.owner, known.granted)
        self._gone[kept.partition] = gone

    def settle(self, positions: Mapping[int, int]) -> list[int]:
        """Return the partitions that have just reached their barrier."""
        if not self._barriers:
            return []  # as in nearly every round
        done = [
            t
            for t, end in self._barriers.items()
            if t not in self.log_start_missing and positions.get(t, 0) >= end
        ]
        for t in done:
            del self._barriers[t]
            self._context.rebuilding.discard(t)
        return done

    def require_memory(self) -> None:
        """Refuse whoever wants to claim, where the log has lost its beginning.

        Raises:
            LogUnreadable: PROTOCOL 7.3: whoever cannot see the winning claims
                claims nothing.
        """
        if self.log_start_missing:
            raise LogUnreadable(
                "the log of coordinating partitions "
                f"{sorted(self.log_start_missing)} begins above offset 0, and no "
                "checkpoint or snapshot leads up to it: records that decide who owns "
                "what may be gone, so nothing is claimed; see: marshal doctor"
            )

    # --- going back

    def lose(self, partition: int, error: Exception) -> None:
        """Take that a log went back: what was known of it is gone."""
        self._context.observe("log_truncated", {"partition": partition, "error": error})
        replica = self._context.replicas[partition]
        gone = self._gone.get(partition)
        if gone is None:
            epoch = replica.world.leader_epoch
            gone = self._gone[partition] = _Gone(-1 if epoch is None else epoch)
        for key, known in replica.world.keys.items():
            if known.granted is not None:
                gone.remember((key, known.topic_id), known.owner, known.granted)
        for owed in list(self._owed):
            if self._context.partition_of(owed.key) == partition:
                # What the log was not told yet is owed still.
                place, owner = (owed.key, owed.topic_id), owed.session.claimant.owner
                gone.remember(place, owner, owed.granted)
                self._owed.remove(owed)
        self._context.rebuilding.add(partition)
        self._barriers.pop(partition, None)
        self._unplaced.add(partition)
        replica.begin(WorldState(partition), self._context.now_ms)

    def watch(
        self, partition: int, entry: LogEntry, *, transitions: Iterable[Transition]
    ) -> None:
        """Note where others begin since a log went back, while it is folded anew.

        Their grants may have passed ours by the time that its end is reached, and
        nothing would tell then that offsets were granted twice.
        """
        gone = self._gone.get(partition)
        epoch = entry.leader_epoch
        if gone is None or epoch is None or epoch <= gone.leader_epoch:
            return
        keys = self._context.replicas[partition].world.keys
        for transition in transitions:
            key = transition.key
            if key is None or transition.effect not in BEGINNINGS:
                continue
            known = keys.get(key)
            if known is None:
                continue
            place = key, known.topic_id
            before = gone.keys.get(place)
            if before is not None and known.owner != before.owner:
                begun = known.next_unclaimed() or 0
                gone.taken[place] = min(gone.taken.get(place, begun), begun)

    def repay(self, partition: int, sessions: Iterable[Session]) -> None:
        """Compare a T that was folded anew with what it said before (PROTOCOL 7.5)."""
        world = self._context.replicas[partition].world
        gone = self._gone.pop(partition, None) or _Gone(-1)
        ours = {session.claimant.owner: session for session in sessions}
        for key, known in world.keys.items():
            session = None if known.owner is None else ours.get(known.owner)
            if session is None or session.claimant.group_id != key.group_id:
                continue
            place = key, known.topic_id
            granted = gone.keys[place].granted if place in gone.keys else 0
            reached = known.next_unclaimed() or 0
            if granted > reached:
                owed = _Owed(session, key, known.epoch, granted, reached)
                owed.topic_id = known.topic_id
                self._owed.append(owed)
            else:
                session.release_ghost(key, known.epoch)
        for place, (owner, granted) in gone.keys.items():
            key, topic_id = place
            now = world.keys.get(key)
            if owner not in ours and not gone.is_kept:
                continue
            if place in gone.taken:
                self._expose(key, gone.taken[place], granted)
            elif now is not None and now.topic_id != topic_id:
                # The log knows another topic, and of an earlier one no claim counts.
                if topic_id not in now.retired_topic_ids:
                    self._expose(key, None, granted)
            elif now is None or now.owner not in ours:
                head = None if now is None else now.next_unclaimed()
                if owner is not None and now is not None and now.owner == owner:
                    # It tells the log again by itself, if it lives.
                    self._doubts.append(_Doubt(key, owner, granted, head or 0))
                else:
                    self._expose(key, head, granted)

    def repay_all(self, sessions: Iterable[Session]) -> None:
        """Compare what was begun with what kept states say that the log has lost."""
        for partition in list(self._gone):
            self.repay(partition, sessions)

    def drive(self, now_ms: int) -> None:
        """Have the log know again of what was granted, and process none of it.

        Raises:
            TopicMisconfigured: The coordination topic is another one now.
        """
        self._topic.drive(now_ms)
        if self._evidence:
            self._discard_evidence()
        for doubt in list(self._doubts):
            if self._is_settled(doubt, now_ms):
                self._doubts.remove(doubt)
        if not self._owed:
            return
        half_ms = self._context.heartbeat_interval_ms // 2
        for owed in list(self._owed):
            ticket = owed.ticket
            if ticket is not None and ticket.verdict is not None:
                self._close(owed, ticket)
            elif ticket is None or now_ms - ticket.sent_ms > half_ms:
                self._ask(owed)

    def _discard_evidence(self) -> None:
        """Remove kept states whose losses have been reported, in the background."""
        keys = [doubt.key for doubt in self._doubts]
        keys += [owed.key for owed in self._owed]
        awaited = {self._context.partition_of(key) for key in keys}
        awaited |= self._gone.keys() | self._context.rebuilding
        for partition in self._evidence.keys() - awaited:
            kept = self._evidence.pop(partition)
            self._context.unreported.discard(partition)
            self._context.ports.background.submit(partial(self._discard, kept))

    def _discard(self, kept: KeptState) -> None:
        for source in self.sources:
            if isinstance(source, Discards):
                source.discard(kept)

    def _is_settled(self, doubt: _Doubt, now_ms: int) -> bool:
        """Return whether an owner has told the log again, or never will: say so."""
        if self._context.partition_of(doubt.key) in self._context.rebuilding:
            return False
        replica = self._context.replica_of(doubt.key)
        known = replica.world.keys.get(doubt.key)
        if known is not None and known.owner == doubt.owner:
            doubt.reached = max(doubt.reached, known.next_unclaimed() or 0)
            log_ms = replica.world.now_ms + replica.elapsed_ms(now_ms)
            is_there = known.freshness(log_ms) is not Freshness.STALE
            if is_there and doubt.reached < doubt.granted:
                return False
        self._expose(doubt.key, doubt.reached, doubt.granted)
        return True

    def _ask(self, owed: _Owed) -> None:
        first = self._reach(owed)
        wish = Wish(
            owed.key,
            owed.session.claimant.owner,
            owed.epoch,
            self._context.ports.entropy.random_bytes(16),  # nobody processes it
            min(first, owed.granted - 1),
            owed.granted - 1,
        )
        try:
            owed.ticket = self._tickets.ask(wish)
        except CoordinationError:
            owed.ticket = None  # too many at once: in a later round

    def _reach(self, owed: _Owed) -> int:
        """Return how far the log knows of what is owed, by our own doing."""
        known = self._context.replica_of(owed.key).world.keys.get(owed.key)
        owner = owed.session.claimant.owner
        if known is not None and (known.owner, known.epoch) == (owner, owed.epoch):
            owed.reached = max(owed.reached, known.next_unclaimed() or 0)
        return owed.reached

    def _close(self, owed: _Owed, ticket: Ticket) -> None:
        verdict = ticket.verdict
        granted = None if verdict is None else verdict.granted
        if granted is not None:
            owed.reached = max(owed.reached, granted[1] + 1)
        if self._reach(owed) < owed.granted:
            if granted is not None:
                owed.ticket = None  # more than one request may claim; go on
                return
            # Whoever took it meanwhile began there, however far it is by now.
            self._expose(owed.key, owed.reached, owed.granted)
        self._owed.remove(owed)
        owed.session.release_ghost(owed.key, owed.epoch)

    def _expose(self, key: Key, head: int | None, granted: int) -> None:
        if granted > (head or 0):
            # Whoever has it now may be granted again what was processed already.
            fields = {"key": key, "first": head or 0, "last": granted - 1}
            self._context.observe("grant_exposed", fields)


class _Look(NamedTuple):
    """What the cluster says of the coordination topic.

    Attributes:
        info: The topic, None where there is none.
        starts: First offset of each partition; empty where unknown.
        wrong: Settings that break PROTOCOL 2.1; None where unknown.
    """

    info: TopicInfo | None
    starts: Mapping[int, int]
    wrong: tuple[WrongSetting, ...] | None


class TopicWatch:
    """Asks every 30 s whether the coordination topic is still fit for use.

    A topic that was deleted and created again has another id, and knows nothing of
    who owns what: PROTOCOL 7.5. Settings that break 2.1 may be changed under running
    members; each is reported once (``topic_misconfigured``) and counted.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lookup: Pending[_Look] | None = None
        self._due_ms = context.now_ms + TOPIC_CHECK_MS

    def drive(self, now_ms: int) -> None:
        """Ask in the background when it is time; take the answer.

        Raises:
            TopicMisconfigured: It is another topic.
        """
        lookup = self._lookup
        if lookup is not None and lookup.done():
            self._lookup = None
            if lookup.exception() is None:
                self._take(lookup.result(0))
        elif lookup is None and now_ms >= self._due_ms:
            self._due_ms = now_ms + TOPIC_CHECK_MS
            # Who began at a state that its host keeps has not read the last checkpoint
            # before it; where there is none, it writes one within its interval.
            has_all = all(
                replica.checkpoints.last_offset is not None or replica.began_at > 0
                for replica in self._context.replicas.values()
            )
            look = partial(self._look, has_checkpoints=has_all)
            self._lookup = self._context.ports.background.submit(look)

    def require_same(self) -> None:
        """Ask now; needs no lock.

        Raises:
            TopicMisconfigured: It is another topic.
            CoordinationError: The cluster did not say.
        """
        info = self._ask()
        if info is None:
            raise CoordinationError(
                f"the coordination topic {self._context.ports.log.topic} is not "
                "there; check the brokers with: marshal doctor"
            )
        self._compare(info)

    def _ask(self) -> TopicInfo | None:
        name = self._context.ports.log.topic
        return self._context.ports.data.describe([name], ASK_MS_MAX).get(name)

    def _look(self, *, has_checkpoints: bool) -> _Look:
        """Ask for everything; called in the background."""
        info, name = self._ask(), self._context.ports.log.topic
        starts: dict[int, int] = {}
        wrong = None
        data = self._context.ports.data
        with suppress(MarshalError):
            places = [TopicPartition(name, t) for t in self._context.replicas]
            ranges = data.ranges(places, ASK_MS_MAX)
            starts = {place.partition: span.start for place, span in ranges.items()}
        with suppress(MarshalError):  # settings need a right that members may lack
            wrong = tuple(
                data.wrong_settings(
                    name, has_checkpoints=has_checkpoints, timeout_ms=ASK_MS_MAX
                )
            )
        return _Look(info, starts, wrong)

    def _take(self, look: _Look) -> None:
        self._compare(look.info)
        context = self._context
        context.log_starts.update(look.starts)
        if look.wrong is None:
            return
        known = set(context.wrong_settings)
        context.wrong_settings = look.wrong
        for each in look.wrong:
            if each not in known:
                fields = {"topic": context.ports.log.topic, **each._asdict()}
                context.observe("topic_misconfigured", fields)

    def _compare(self, info: TopicInfo | None) -> None:
        log = self._context.ports.log
        if info is None or info.topic_id is None or log.topic_id is None:
            return
        if info.topic_id != log.topic_id:
            problem = (
                f"the coordination topic {log.topic} was deleted and made anew; what "
                "it said of who owns what is gone: stop every member, then run: "
                "marshal topic format"
            )
            raise TopicMisconfigured(problem, problems=(problem,))
