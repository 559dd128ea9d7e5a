"""Announces a session to its group, and detects a twin of it (PROTOCOL 3.6, 13).

A twin is another live process with the same client_id.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kafka_marshal.config import TOPICS_MAX
from kafka_marshal.errors import ClientFenced, IdentityConflict
from kafka_marshal.protocol.applied import Applied, applied_to_tags
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.codec import FRAME_BYTES_MAX, person_of
from kafka_marshal.protocol.group_plan import PLANNER_VERSION
from kafka_marshal.protocol.labels import (
    LAGGING_LABEL,
    LAYOUT_LABEL,
    PLANS_LABEL,
    REPLACES_ANY,
    REPLACES_LABEL,
    STANDBYS_LABEL,
    WARMS_LABEL,
    WEIGHT_LABEL,
    WEIGHT_MAX,
    failing_labels,
)
from kafka_marshal.protocol.records import (
    SECOND_LEVEL,
    SUPPORTED_LEVEL,
    ClaimingPartition,
    FencingClient,
    Member,
)
from kafka_marshal.protocol.state import ACCEPTED, Transition, WorldState
from kafka_marshal.protocol.types import Key, Owner, encodable

from .context import Context
from .heartbeats import INTERVALS_PER_H
from .holding import Holding
from .outbox import Outbox
from .subscription import Subscription

ANNOUNCED_MAX = 10_000  # members whose last announcement is remembered
TOPICS_BYTES_MAX = 32 * 1024
# Room for topics and labels in a record, beside its other fields and tags.
TERMS_BYTES_MAX = FRAME_BYTES_MAX - 3 * 1024
# Reasons of ended claims that another process with our client_id may have taken over.
SUCCEEDED = frozenset({"lease_expired", "identity_conflict"})
_NO_LABELS: Mapping[str, str] = {}


class Announcer:
    """Sends Member records: three per heartbeat interval, and on every change."""

    __slots__ = (
        "_announced",
        "_began_ms",
        "_context",
        "_due_ms",
        "_ended",
        "_first_home",
        "_first_ms",
        "_first_offset",
        "_host",
        "_labels",
        "_outbox",
        "_succeeded",
        "acted_on",
    )

    def __init__(
        self, context: Context, outbox: Outbox, *, host: str, labels: Mapping[str, str]
    ) -> None:
        self._context = context
        self._outbox = outbox
        self._labels = dict(labels)
        self._began_ms = context.now_ms
        self._host = encodable(host[:255])
        self._due_ms = 0
        # Home, offset and log time of the first announcement that still counts.
        self._first_home: int | None = None
        self._first_offset: int | None = None
        self._first_ms = 0
        self._announced: dict[Owner, object] = {}
        # Coordinating partitions and epochs of claims that ended without a release.
        self._ended: dict[Key, tuple[int, int]] = {}
        # Earlier processes of our client_id whose claims we have taken over.
        self._succeeded: set[bytes] = set()
        self.acted_on: Callable[[int], int] = lambda generation: generation
        """Takes the newest Config generation and returns the one that this member acts
        on: an earlier one while processes that use its claims act on that."""

    def announce_soon(self) -> None:
        """Announce in the next round."""
        self._due_ms = 0

    def is_due(self, now_ms: int) -> bool:
        """Return whether to announce now; if so, schedule the next announcement."""
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
        can_plan: bool = True,
        is_planned: bool = False,
    ) -> None:
        """Announce the wanted topics, the load, and the labels that planners read.

        Args:
            subs: Subscriptions of the member.
            holdings: Keys that it holds or contends for.
            is_behind: Whether it does not keep up.
            can_plan: Whether it may plan.
            is_planned: Whether its group follows Plans.
        """
        labels = self._own_labels()
        if is_behind:
            labels[LAGGING_LABEL] = "yes"
        if is_planned:
            labels |= failing_labels(place for sub in subs for place in sub.failing)
        if is_planned and can_plan:
            labels[PLANS_LABEL] = str(PLANNER_VERSION)
        if any(sub.can_warm for sub in subs):
            labels[WARMS_LABEL] = "yes"
        standbys = max((sub.standby_count for sub in subs if sub.standby), default=0)
        if standbys:
            labels[STANDBYS_LABEL] = str(standbys)
        weight = max((sub.weight for sub in subs), default=1)
        if weight > 1:
            labels[WEIGHT_LABEL] = str(min(weight, WEIGHT_MAX))
        self._announce(subs, holdings, draining=False, labels=labels)

    def _own_labels(self) -> dict[str, str]:
        """Return the user's labels; ``replaces=*`` is dropped after ``grace_ms``."""
        labels = dict(self._labels)
        settings = self._context.settings_of(self._outbox.claimant.group_id)
        elapsed_ms = self._context.now_ms - self._began_ms
        is_over = elapsed_ms >= settings.value("grace_ms")
        if labels.get(REPLACES_LABEL) == REPLACES_ANY and is_over:
            del labels[REPLACES_LABEL]
        return labels

    def announce_leaving(
        self, subs: Sequence[Subscription], holdings: Mapping[Key, Holding]
    ) -> list[int]:
        """Announce that this member leaves; return the sequence numbers to wait for."""
        return self._announce(subs, holdings, draining=True)

    def on_own(self, transition: Transition, *, partition: int) -> None:
        """Handle the read-back of an own announcement; only the first home counts.

        A member that was silent for so long that the group forgot it joins again, and
        counts as younger than a twin that joined meanwhile.
        """
        is_home = partition == self._context.home_of(self._outbox.claimant.group_id)
        if transition.outcome != ACCEPTED or not is_home:
            return
        if partition != self._first_home:
            self._first_home, self._first_offset = partition, None
        since_offset = self._since_offset() or transition.offset
        if since_offset != self._first_offset:
            self._first_offset = since_offset
            self._first_ms = self._home_world().now_ms

    def forget(self, partition: int) -> None:
        """Forget records of a coordinating partition that is folded again."""
        if self._context.config is None:
            return  # nothing is sent before all partitions are read
        home = self._context.home_of(self._outbox.claimant.group_id)
        self._ended = {
            key: ended for key, ended in self._ended.items() if ended[0] != partition
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
        """Return whether a member's announcement differs from its previous one.

        Most announcements only renew a membership, three times per heartbeat interval
        and member. A changed load matters to policies only if the capacity is limited.
        """
        record = transition.record
        if not isinstance(record, Member):
            return False
        load = record.load if record.capacity else 0
        labels = tuple(sorted(record.labels.items()))
        content = (record.topics, record.capacity, load, record.draining, labels)
        name = Owner(record.client_id, record.incarnation)
        if self._announced.get(name) == content:
            return False
        if len(self._announced) >= ANNOUNCED_MAX:
            self._announced.clear()
        self._announced[name] = content
        return True

    # --- twins

    def note_end(self, holding: Holding) -> None:
        """Record the end of a claim."""
        ending, epoch = holding.claim.ending, holding.claim.epoch
        if ending is not None and ending.reason in SUCCEEDED and epoch is not None:
            self._ended[holding.key] = (holding.coordinator, epoch)

    def note_won(self, holding: Holding) -> None:
        """Record a won claim.

        Its previous owner no longer counts as an older instance of this client_id.
        """
        before = holding.predecessor
        if before is not None and before.client_id == self._client_id:
            self._succeeded.add(before.incarnation)

    def is_replaced(self, transition: Transition, *, partition: int) -> bool:
        """Return whether a claim shows that a process of our client_id replaced us.

        A process that was stopped for long ends its claims before it reads who owns
        them now.
        """
        record, key = transition.record, transition.key
        if not isinstance(record, ClaimingPartition) or key is None:
            return False
        note = self._context.replicas[partition].world.soft.notes.get(key)
        ended = self._ended.get(key)
        is_same_client = record.client_id == self._client_id
        if not is_same_client or ended is None or note is None:
            return False
        return ended == (partition, note.follows)

    @property
    def _client_id(self) -> str:
        return self._outbox.claimant.owner.client_id

    def older_twin(self, transition: Transition, *, partition: int) -> str | None:
        """Return the host of a live twin that is older than us, if one is shown.

        The evidence is an announcement with our client_id and another incarnation that
        began before ours and was renewed well after it: records of a dead process may
        arrive for as long as sending is retried, half a heartbeat interval. A process
        whose claims we have taken over is no twin.
        """
        record = transition.record
        owner = self._outbox.claimant.owner
        if (
            not isinstance(record, Member)
            or record.client_id != owner.client_id
            or record.incarnation in self._succeeded
            or record.draining
            or self._first_offset is None
            or partition != self._first_home
        ):
            return None
        members = self._context.replicas[partition].world.soft.members
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
    ) -> list[int]:
        claimant = self._outbox.claimant
        marks = dict(labels)
        if self._context.settled.feature_level >= SECOND_LEVEL:
            # Shows admins which change of the partition count this member acts on.
            generation = self.acted_on(self._context.settled.generation)
            marks[LAYOUT_LABEL] = str(generation)
        left = TERMS_BYTES_MAX - sum(
            len(text.encode()) + 3 for pair in marks.items() for text in pair
        )
        terms = _terms(subs, holdings, now_ms=self._context.now_ms, bytes_max=left)
        folded, replicas = self._context.folded, self._context.replicas
        began = {t: replicas[t].began_at for t in folded if t in replicas}
        tags = applied_to_tags(Applied(applied=folded, began=began))

        def record(seq: int) -> Member:
            return Member(
                **claimant.sender(seq),
                topics=terms.topics,
                host=self._host,
                capacity=terms.capacity,
                load=terms.load,
                labels=marks,
                draining=draining,
                feature_level_max=SUPPORTED_LEVEL,
                plan_generation=None,
                tags=tags,
            )

        # To both homes while the partition count changes (PROTOCOL 10.2).
        homes = self._context.homes_of(claimant.group_id)
        there = [home for home in homes if self._context.is_written_to(home)]
        return [self._outbox.send(home, record)[0] for home in there]


class _Terms(NamedTuple):
    """The topics, capacity and load that a member announces."""

    topics: tuple[str, ...]
    capacity: int
    load: int


def _terms(
    subs: Sequence[Subscription],
    holdings: Mapping[Key, Holding],
    *,
    now_ms: int,
    bytes_max: int,
) -> _Terms:
    """Return the terms to announce.

    A consumer whose application does not poll announces neither topics nor capacity. A
    consumer that released a partition for being too slow announces its load as capacity
    for some time: otherwise others would hand the same partitions back to it.
    """
    topics: set[str] = set()
    capacity, load, is_unlimited = 0, 0, False
    for sub in subs:
        held = sub.load(holdings.values())
        load += held
        limit = sub.claims_max
        if sub.stuck_since_ms is not None:
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
    named = _within(topics, bytes_max=min(bytes_max, TOPICS_BYTES_MAX))
    return _Terms(named, 0 if is_unlimited else capacity, load)


def _within(topics: Iterable[str], *, bytes_max: int) -> tuple[str, ...]:
    """Return the first topics in name order, as many as fit into a record."""
    kept: list[str] = []
    left = bytes_max
    for topic in sorted(topics):
        left -= len(topic) + 3
        if left < 0 or len(kept) == TOPICS_MAX:
            break
        kept.append(topic)
    return tuple(kept)


def client_fenced(claimant: Claimant, transition: Transition) -> ClientFenced:
    """Return the error for a fence of this process.

    Args:
        claimant: This process.
        transition: The fence, or the refusal of an own record that shows it: a process
            that folds the log again may not read the fence itself.
    """
    record, offset = transition.record, transition.offset
    by = reason = ""
    if isinstance(record, FencingClient):
        by, reason = person_of(record) or record.client_id, record.reason or ""
    admin = f"{by!r}" if by else "an admin"
    why = f": {reason}" if reason else ""
    return ClientFenced(
        f"client {claimant.owner.client_id!r} of group {claimant.group_id!r} was "
        f"fenced by {admin} at log offset {offset}{why}; this process claims nothing "
        "any more, a new one with this client_id does; see: marshal clients list "
        f"--group {claimant.group_id}",
        by=by,
        reason=reason,
        at_offset=offset,
    )


def identity_conflict(
    claimant: Claimant, offset: int, *, host: str, age_ms: int
) -> IdentityConflict:
    """Return the error for another live process with our client_id.

    Args:
        claimant: This process.
        offset: Offset of the record that shows it.
        host: Host of the other process, empty if unknown.
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
