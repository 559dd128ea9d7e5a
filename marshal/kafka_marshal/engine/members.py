"""Announces a session to its group, and notices a twin of it (PROTOCOL 3.6)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kafka_marshal.errors import IdentityConflict
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.records import SUPPORTED_LEVEL, ClaimingPartition, Member
from kafka_marshal.protocol.state import ACCEPTED, Transition, WorldState
from kafka_marshal.protocol.types import Key, Owner

from .context import Context
from .heartbeats import INTERVALS_PER_H
from .holding import Holding
from .outbox import Outbox
from .subscription import BEHIND_LABEL, WEIGHT_LABEL, WEIGHT_MAX, Subscription

TOPICS_MAX = 1_000
SAID_MAX = 10_000  # members, of whom what they said last is remembered
TOPICS_BYTES_MAX = 32 * 1024  # a record is 48 KiB at most
# Ends of a claim after which another life of ours may have it.
SUCCEEDED = frozenset({"lease_expired", "identity_conflict"})
_NO_LABELS: Mapping[str, str] = {}


class Announcer:
    """Sends Member records, each H/3 and whenever the subscriptions change."""

    __slots__ = (
        "_context",
        "_due_ms",
        "_ended",
        "_first_ms",
        "_first_offset",
        "_host",
        "_outbox",
        "_said",
        "_succeeded",
    )

    def __init__(self, context: Context, outbox: Outbox, *, host: str) -> None:
        self._context = context
        self._outbox = outbox
        self._host = host[:255]
        self._due_ms = 0
        self._first_offset: int | None = None
        self._first_ms = 0
        self._said: dict[Owner, object] = {}
        # Epochs of claims that ended though nobody gave them up.
        self._ended: dict[Key, int] = {}
        # Lives of our client_id whose claims are ours now.
        self._succeeded: set[bytes] = set()

    def announce_soon(self) -> None:
        """Announce at the next round."""
        self._due_ms = 0

    def is_due(self, now_ms: int) -> bool:
        """Return whether to announce, and note that it is done."""
        if now_ms < self._due_ms:
            return False
        third_ms = self._context.heartbeat_interval_ms // INTERVALS_PER_H
        self._due_ms = now_ms + third_ms
        return True

    def announce(
        self,
        subs: Sequence[Subscription],
        holdings: Mapping[Key, Holding],
        *,
        is_behind: bool = False,
    ) -> None:
        """Announce what is wanted and held."""
        labels = {BEHIND_LABEL: "yes"} if is_behind else {}
        weight = max((sub.weight for sub in subs), default=1)
        if weight > 1:
            labels[WEIGHT_LABEL] = str(min(weight, WEIGHT_MAX))
        self._announce(subs, holdings, draining=False, labels=labels)

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

    def forget(self, partition: int) -> None:
        """Forget where we joined, if that is in a T that is folded anew."""
        home = self._context.home_of(self._outbox.claimant.group_id)
        self._ended = {
            key: epoch
            for key, epoch in self._ended.items()
            if self._context.partition_of(key) != partition
        }
        if home == partition:
            self._first_offset, self._first_ms = None, 0
            self.announce_soon()

    def _since_offset(self) -> int | None:
        owner, group_id = self._outbox.claimant.owner, self._outbox.claimant.group_id
        members = self._home_world().soft.members
        known = members.get((group_id, owner.client_id, owner.incarnation))
        return None if known is None else known.since_offset

    def _home_world(self) -> WorldState:
        home = self._context.home_of(self._outbox.claimant.group_id)
        return self._context.replicas[home].world

    def is_news(self, transition: Transition) -> bool:
        """Return whether an announcement says what was not said before it.

        Most only say that somebody is still there, each H/3 of every member; what
        somebody holds matters to policies only where it may hold no more than so much.
        """
        record = transition.record
        if not isinstance(record, Member):
            return False
        load = record.load if record.capacity else 0
        labels = tuple(sorted(record.labels.items()))
        said = (record.topics, record.capacity, load, record.draining, labels)
        name = Owner(record.client_id, record.incarnation)
        if self._said.get(name) == said:
            return False
        if len(self._said) >= SAID_MAX:
            self._said.clear()
        self._said[name] = said
        return True

    # --- twins

    def note_end(self, holding: Holding) -> None:
        """Take that a claim ended."""
        ending, epoch = holding.claim.ending, holding.claim.epoch
        if ending is not None and ending.reason in SUCCEEDED and epoch is not None:
            self._ended[holding.key] = epoch

    def note_won(self, holding: Holding) -> None:
        """Take that a claim was won; who had it before is not our elder any more."""
        before = holding.predecessor
        if before is not None and before.client_id == self._client_id:
            self._succeeded.add(before.incarnation)

    def is_succeeded(self, transition: Transition) -> bool:
        """Return whether a claim shows that another life of ours has taken our place.

        Whoever wakes from a long stop ends its claims before it reads who has them.
        """
        record, key = transition.record, transition.key
        if not isinstance(record, ClaimingPartition) or key is None:
            return False
        note = self._context.replica_of(key).world.soft.notes.get(key)
        epoch = self._ended.get(key)
        is_ours = record.client_id == self._client_id
        return (
            is_ours and epoch is not None and note is not None and note.follows == epoch
        )

    @property
    def _client_id(self) -> str:
        return self._outbox.claimant.owner.client_id

    def older_twin(self, transition: Transition) -> str | None:
        """Return the host of a twin that was here before us and lives, if shown.

        The evidence is an announcement of our client_id under another
        incarnation that began before ours and was renewed well after it: what a
        dead process had sent may land for as long as sending is tried, H/2. One whose
        claims are ours now is told by them.
        """
        record = transition.record
        owner = self._outbox.claimant.owner
        if (
            not isinstance(record, Member)
            or record.client_id != owner.client_id
            or record.incarnation in self._succeeded
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
        labels: Mapping[str, str] = _NO_LABELS,
    ) -> int:
        claimant = self._outbox.claimant
        owner = claimant.owner
        terms = _terms(subs, holdings, now_ms=self._context.now_ms)
        seq, _ = self._outbox.send(
            self._context.home_of(claimant.group_id),
            lambda seq: Member(
                owner.client_id,
                claimant.group_id,
                owner.incarnation,
                seq,
                terms.topics,
                self._host,
                terms.capacity,
                terms.load,
                dict(labels),
                draining,
                SUPPORTED_LEVEL,
                None,
            ),
        )
        return seq


class _Terms(NamedTuple):
    """What a member offers its group."""

    topics: tuple[str, ...]
    capacity: int
    load: int


def _terms(
    subs: Sequence[Subscription], holdings: Mapping[Key, Holding], *, now_ms: int
) -> _Terms:
    """Return what to announce.

    A consumer whose application does not come back offers nothing. One that gave
    something up for being too slow offers what it holds, and no more, for some
    time: otherwise the others would hand the same back to it.
    """
    topics: set[str] = set()
    capacity, load, is_unlimited = 0, 0, False
    for sub in subs:
        held = sub.load(holdings.values())
        load += held
        limit = sub.claims_max
        if sub.wedged_at_ms is not None:
            continue
        if sub.backoff.is_on(now_ms):
            limit = min(limit, held) if limit else held
            if not limit or len(subs) > 1:
                continue
        topics.update(sub.topics)
        capacity += limit
        is_unlimited = is_unlimited or not limit
    wanted = {topic for sub in subs for topic in sub.topics}
    others = [h for h in holdings.values() if h.key.topic not in wanted]
    load += sum(holding.claim.is_owned for holding in others)
    return _Terms(_within(topics), 0 if is_unlimited else capacity, load)


def _within(topics: Iterable[str]) -> tuple[str, ...]:
    """Return the first topics by name, as many as a record can hold."""
    kept: list[str] = []
    left = TOPICS_BYTES_MAX
    for topic in sorted(topics):
        left -= len(topic) + 3
        if left < 0 or len(kept) == TOPICS_MAX:
            break
        kept.append(topic)
    return tuple(kept)


def identity_conflict(
    claimant: Claimant, offset: int, *, host: str, age_ms: int
) -> IdentityConflict:
    """Return the error that tells of another live process with our client_id.

    Args:
        claimant: Who we are.
        offset: Offset of the record that shows it.
        host: Where the other process runs, empty where that is unknown.
        age_ms: Age of that record.
    """
    client_id = claimant.owner.client_id
    where = f" on host {host!r}" if host else ""
    return IdentityConflict(
        f"client_id {client_id!r} of group {claimant.group_id!r} is in use by "
        f"another live process{where} (seen at log offset {offset}); stop that "
        "process or start this one with another client_id",
        holder=client_id,
        host=host,
        age_ms=age_ms,
    )
