"""The rows of a policy's view, one for each wanted key.

A row is *kept* while its key has a live owner: this process, or another client that
this one does not contend with. The row stays the same until a record names the key, its
holding changes, or its owner is silent for long. All other rows are computed in each
round: the conditions of claiming a key may depend on other keys and on the time
(``KeyRows._is_claimable``).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kafka_marshal.engine.context import Context, awaited
from kafka_marshal.engine.holding import Holding
from kafka_marshal.engine.planning import ORPHAN_MS_MAX, PlanFollower
from kafka_marshal.engine.releases import ReleaseCooldowns
from kafka_marshal.engine.replica import Changes, Replica
from kafka_marshal.ports import FAR_MS, TopicInfo
from kafka_marshal.protocol.claiming import Estimate, PreviousLife, estimate, resumable
from kafka_marshal.protocol.planner import KeyView
from kafka_marshal.protocol.plans import is_reserved
from kafka_marshal.protocol.state import KeyNote, KeyState
from kafka_marshal.protocol.types import Key, Owner

if TYPE_CHECKING:
    from kafka_marshal.protocol.growths import Source

NOT_READ = -1


@attrs.frozen(kw_only=True)
class RowInputs:
    """The inputs of rows other than the wanted keys and the log.

    Attributes:
        context: State shared by all parts of one engine.
        owner: This process.
        holdings: Keys that its client holds or contends for.
        changes: Keys whose holdings have changed.
        lives: Earlier processes of this client.
        cooldowns: Keys that this client has released.
        now_ms: Local time.
        is_off: Whether nothing is claimed from others.
        may_replace: Clients whose keys this client may claim while they wait for a
            restart.
        grace_ms: How long a key waits for an owner that restarts.
        plans: The Plan of the group.
        lost: Lost partitions of topics that are still held in part.
        topics: Metadata of each topic.
    """

    context: Context
    owner: Owner
    holdings: Mapping[Key, Holding]
    changes: Changes
    lives: tuple[PreviousLife, ...]
    cooldowns: ReleaseCooldowns
    now_ms: int
    is_off: bool
    may_replace: tuple[str, str | None]
    grace_ms: int
    plans: PlanFollower
    lost: set[Key]
    topics: Mapping[str, TopicInfo]


class _PartitionRows:
    """The wanted keys of one coordinating partition.

    Attributes:
        replica: Its replica.
        keys: The keys.
        open: Keys whose rows are computed in this round.
        log_ms: Estimated log time of this round.
        append_ms: Estimated append time of this round.
        is_calm: Whether claims are neither paused nor delayed there.
    """

    __slots__ = (
        "_kept",
        "_read",
        "_until_ms",
        "append_ms",
        "is_calm",
        "keys",
        "log_ms",
        "open",
        "replica",
    )

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.keys: list[Key] = []
        self.open: dict[Key, None] = {}
        self.log_ms = self.append_ms = 0
        self.is_calm = False
        # Keys with kept rows; each row is computed this long before its owner is stale.
        self._kept: dict[Key, int] = {}
        # Log time at which the first of these rows is computed again.
        self._until_ms = FAR_MS
        self._read = NOT_READ

    def begin_round(self, now_ms: int) -> None:
        """Find the keys whose rows may have changed since the last round."""
        replica = self.replica
        world, changes = replica.world, replica.changes
        elapsed_ms = replica.elapsed_ms(now_ms)
        self.log_ms = world.now_ms + elapsed_ms
        self.append_ms = world.append_time_ms + elapsed_ms
        group = world.groups.get(self.keys[0].group_id)
        is_paused = group is not None and (
            bool(group.pauses)
            or any(each.begin_ms <= self.append_ms for each in group.scheduled)
        )
        self.is_calm = world.quiet_until_ms is None and not is_paused
        self.reopen(changes.since(self._read) if self.is_calm else None)
        self._read = changes.end
        if self.log_ms >= self._until_ms:
            self._reopen_late()

    def reopen(self, keys: Iterable[Key] | None) -> None:
        """Compute the rows of these keys again; None = of all keys."""
        if keys is None:
            self.open = dict.fromkeys(self.keys)
            self._kept.clear()
            self._until_ms = FAR_MS
            return
        for key in keys:
            if self._kept.pop(key, None) is not None:
                self.open[key] = None

    def keep(self, key: Key, known: KeyState, *, early_ms: int) -> None:
        """Keep the row of a key, unless its owner is about to be stale.

        Args:
            key: The key.
            known: The key in the log.
            early_ms: How long before its owner is stale the row may change.
        """
        due_ms = known.stale_at_ms - early_ms
        if self.log_ms < due_ms:
            del self.open[key]
            self._kept[key] = early_ms
            self._until_ms = min(self._until_ms, due_ms)

    def _reopen_late(self) -> None:
        """Find the keys whose owners have not renewed their claims for long."""
        states, log_ms, until_ms = self.replica.world.keys, self.log_ms, FAR_MS
        late = []
        # ``stale_at_ms`` inlined: in this round, all of thousands of keys may be due.
        for key, early_ms in self._kept.items():
            known = states.get(key)
            if known is None:
                late.append(key)
                continue
            due_ms = known.renewed_ms + 2 * known.heartbeat_interval_ms + 1 - early_ms
            if due_ms <= log_ms:
                late.append(key)
            elif due_ms < until_ms:
                until_ms = due_ms
        self.reopen(late)
        self._until_ms = until_ms


class KeyRows:
    """The rows of one subscription. Used under the engine's lock.

    Attributes:
        rows: The rows as of the last round, in the order of the wanted keys; without
            keys in the scope of a pause.
        claimable_at_ms: Local time at which the next key may become claimable; at most
            one heartbeat interval after the round.
        named: Free keys that this member is the named successor of.
        named_by_plan: Claimable keys for which the Plan of the group names this member.
        abandoned: Keys that have been claimable for more than two intervals.
        suspects: Owners of stale keys.
        has_orphans: Whether any row is of an orphan.
        waiting: New partitions of topics that have grown, and what each waits for
            (PROTOCOL 9.10).
    """

    def __init__(self) -> None:
        self.rows: tuple[KeyView, ...] = ()
        self.claimable_at_ms = 0
        self.named: set[Key] = set()
        self.named_by_plan: set[Key] = set()
        self.abandoned: set[Key] = set()
        self.suspects: set[str] = set()
        self.has_orphans = False
        self.waiting: dict[Key, Source] = {}
        self._wanted: Sequence[Key] | None = None
        self._by_key: dict[Key, KeyView | None] = {}
        self._partitions: dict[int, _PartitionRows] = {}
        self._basis: object = None
        self._read = NOT_READ
        self._claimable_since: dict[Key, int] = {}

    def update(self, wanted: Sequence[Key], inputs: RowInputs) -> None:
        """Compute the rows that may have changed.

        Args:
            wanted: Every wanted key, in order; another object whenever they change.
            inputs: The other inputs of the rows.
        """
        context = inputs.context
        self.claimable_at_ms = inputs.now_ms + context.heartbeat_interval_ms
        self.named.clear()
        self.named_by_plan.clear()
        self.abandoned.clear()
        self.suspects.clear()
        self.waiting.clear()
        self.has_orphans = False
        has_changed = self._follow(wanted, inputs)
        for part in self._partitions.values():
            part.begin_round(inputs.now_ms)
        self._reopen_held(inputs)
        for part in self._partitions.values():
            has_changed |= self._compute(part, inputs)
        if has_changed:
            rows = self._by_key.values()
            self.rows = tuple(row for row in rows if row is not None)

    def _follow(self, wanted: Sequence[Key], inputs: RowInputs) -> bool:
        """Begin again if an input of every row has changed; return whether it has.

        While the partition count changes, it does so in each round: keys move.
        """
        context = inputs.context
        basis = (
            context.placement.counts,
            context.heartbeat_interval_ms,
            inputs.owner,
            inputs.plans.standing,
            context.replicas[0].world.growths,
        )
        is_same = wanted is self._wanted and basis == self._basis
        if is_same and not context.has_layout:
            return False
        self._wanted, self._basis = wanted, basis
        self._by_key = dict.fromkeys(wanted)
        self._partitions = {}
        for key in wanted:
            partition = context.partition_of(key)
            part = self._partitions.get(partition)
            if part is None:
                part = _PartitionRows(context.replicas[partition])
                self._partitions[partition] = part
            part.keys.append(key)
        return True

    def _reopen_held(self, inputs: RowInputs) -> None:
        changed = inputs.changes.since(self._read)
        self._read = inputs.changes.end
        if changed is None:
            for part in self._partitions.values():
                part.reopen(None)
            return
        for key in changed:
            if key in self._by_key:
                self._partitions[inputs.context.partition_of(key)].reopen((key,))

    def _compute(self, part: _PartitionRows, inputs: RowInputs) -> bool:
        """Compute the open rows of a partition; return whether any has changed."""
        has_changed = False
        for key in list(part.open):
            row = self._row(key, part, inputs)
            if row != self._by_key[key]:
                self._by_key[key] = row
                has_changed = True
        return has_changed

    def _row(self, key: Key, part: _PartitionRows, inputs: RowInputs) -> KeyView | None:
        """Return the row of a key; None while the key is in the scope of a pause.

        Then members share the other keys (PROTOCOL 4.15).
        """
        world, owner = part.replica.world, inputs.owner
        elapsed_ms = part.log_ms - world.now_ms
        guess = estimate(world, key, elapsed_ms=elapsed_ms, claimant=owner)
        known, wait_ms = guess.known, guess.wait_ms
        note = world.soft.notes.get(key)
        is_awaiting = inputs.context.placement.awaits_import(key)
        is_claimable = self._is_claimable(key, guess, inputs, is_awaiting=is_awaiting)
        who = None if known is None or known.owner is None else known.owner
        if who is not None and is_claimable:
            self.suspects.add(who.client_id)
            who = None
        if wait_ms:
            self.claimable_at_ms = min(self.claimable_at_ms, inputs.now_ms + wait_ms)
        if world.is_paused_by_scope(key, part.append_ms):
            return None
        named, is_free = inputs.plans.named(key, world), is_claimable
        if is_claimable and inputs.plans.is_in_force:
            kept_for = _kept_for(known, note, inputs, log_ms=part.log_ms)
            if kept_for is not None:
                is_mine_again = named is None and kept_for in inputs.may_replace
                named = owner.client_id if is_mine_again else named
                is_free = named == owner.client_id
        is_orphan = is_left = False
        if is_free:
            is_orphan, is_left = self._claim_terms(key, guess, named, inputs)
        else:
            self._claimable_since.pop(key, None)
        holding = inputs.holdings.get(key)
        is_held_by_earlier_process = bool(inputs.lives) and _is_held_by_earlier_process(
            known, inputs.lives, owner, log_ms=part.log_ms
        )
        owner_name = None if who is None else who.client_id
        if known is not None and known.handoff is not None and (wait_ms or is_awaiting):
            owner_name = known.handoff[0]  # the key is reserved for this successor
        self._keep_row(key, part, inputs, known)
        return KeyView(
            key=key,
            owner=owner_name,
            is_mine=_is_mine(holding),
            is_claimable=is_free and not is_left,
            is_held_by_earlier_process=is_held_by_earlier_process,
            is_orphan=is_orphan,
            is_leaving=holding is not None and holding.drain is not None,
            is_lost=key in inputs.lost,
            planned=named,
            last_owner=_last_owner(known, note, is_owned=who is not None),
        )

    def _is_claimable(
        self, key: Key, guess: Estimate, inputs: RowInputs, *, is_awaiting: bool
    ) -> bool:
        """Return whether a claim of this client is likely to be accepted now.

        Further conditions belong here. They may depend on other keys, because no row
        of a key without a live owner is kept.
        """
        topic_id = inputs.topics[key.topic].topic_id
        source = awaited(inputs.context, key, topic_id=topic_id)
        if source is not None:
            self.waiting[key] = source
        return guess.wait_ms == 0 and not is_awaiting and source is None

    def _claim_terms(
        self, key: Key, guess: Estimate, named: str | None, inputs: RowInputs
    ) -> tuple[bool, bool]:
        """Return whether a claimable key is an orphan, and is left to others."""
        now_ms = inputs.now_ms
        since_ms = self._claimable_since.setdefault(key, now_ms)
        is_orphan = self._is_orphan(key, now_ms - since_ms, inputs)
        # Released keys are left to others, unless no member claims them.
        is_by_plan = named == inputs.owner.client_id
        is_held_off = not is_by_plan and inputs.cooldowns.is_in_cooldown(key, now_ms)
        is_left = is_held_off or (inputs.is_off and not is_orphan)
        if guess.is_named:
            self.named.add(key)
        if is_by_plan and not is_left:
            self.named_by_plan.add(key)
        return is_orphan, is_left

    def _is_orphan(self, key: Key, free_ms: int, inputs: RowInputs) -> bool:
        """Return whether a key was claimable for more than one interval.

        Has policies run again at the end of the first and of the second interval.
        """
        interval_ms = inputs.context.heartbeat_interval_ms
        if inputs.plans.is_in_force:
            interval_ms = min(interval_ms, ORPHAN_MS_MAX)
        if free_ms > 2 * interval_ms:
            self.abandoned.add(key)
            self.has_orphans = True
            return True
        due_ms = inputs.now_ms + interval_ms + 1 - free_ms % (interval_ms + 1)
        self.claimable_at_ms = min(self.claimable_at_ms, due_ms)
        is_orphan = free_ms > interval_ms
        self.has_orphans |= is_orphan
        return is_orphan

    def _keep_row(
        self, key: Key, part: _PartitionRows, inputs: RowInputs, known: KeyState | None
    ) -> None:
        """Keep the row of a key with a live owner until something may change it."""
        if known is None or known.owner is None:
            return
        if key in inputs.lost or key in self.waiting or not part.is_calm:
            return
        holding = inputs.holdings.get(key)
        if known.owner == inputs.owner:
            if holding is not None and holding.claim.is_owned:
                part.keep(key, known, early_ms=0)
        elif known.owner.client_id != inputs.owner.client_id and holding is None:
            # Computed again an interval before it may be stale: policies run in time.
            part.keep(key, known, early_ms=inputs.context.heartbeat_interval_ms)


def _is_mine(holding: Holding | None) -> bool:
    if holding is None:
        return False
    return holding.claim.is_owned or holding.claim.is_verdict_pending


def _is_held_by_earlier_process(
    known: KeyState | None,
    lives: tuple[PreviousLife, ...],
    owner: Owner,
    *,
    log_ms: int,
) -> bool:
    life = resumable(known, lives, client_id=owner.client_id, log_time_ms=log_ms)
    return life is not None


def _last_owner(
    known: KeyState | None, note: KeyNote | None, *, is_owned: bool
) -> str | None:
    """Return the owner before the current one, or the last owner of a free key."""
    if is_owned:
        return None if note is None else note.before
    if known is not None and known.owner is not None:
        return known.owner.client_id  # gone stale
    return None if note is None else note.client_id


def _kept_for(
    known: KeyState | None, note: KeyNote | None, inputs: RowInputs, *, log_ms: int
) -> str | None:
    """Return the client for whose restart a free key waits, or None (PROTOCOL 9.8)."""
    is_kept = is_reserved(known, note, now_ms=log_ms, grace_ms=inputs.grace_ms)
    return note.client_id if is_kept and note is not None else None
