"""Predicts how a group reacts to changes of members, limits and partition counts.

Under the policy ``fair`` each member decides for itself. So in each wave all members
decide on the same view, and then act, until nothing moves. In a group with the policy
``planner`` the plan of the whole group decides, in one wave. If members race for a key,
the first by name wins; in the group the fastest one wins. Directives in force are
followed (PROTOCOL 9.7). Nobody claims partitions that wait for a growth (9.10). Reads a
``World`` and writes nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import attrs
import msgspec

from kafka_marshal.engine.directives import directed
from kafka_marshal.engine.subscription import member_view
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.claiming import estimate
from kafka_marshal.protocol.group_plan import (
    PlanInput,
    PlanKey,
    PlanMember,
    Uncovered,
    plan,
)
from kafka_marshal.protocol.growths import awaited_source
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.protocol.labels import (
    RACK_LABEL,
    TARGET_LABEL,
    WEIGHT_MAX,
    failing_of,
    number_of,
)
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.placement import by_partition, homes_of
from kafka_marshal.protocol.planner import (
    KeyView,
    MemberView,
    View,
    fair,
    why_uncovered,
)
from kafka_marshal.protocol.plans import guessed_counts
from kafka_marshal.protocol.records import GROWN_MAX
from kafka_marshal.protocol.settings import FAIR, PLANNER
from kafka_marshal.protocol.state import KeyState, MemberState, WorldState
from kafka_marshal.protocol.types import Key, Owner, TopicPartition
from kafka_marshal.views.world import World

WAVES_MAX = 100


@attrs.frozen(kw_only=True)
class NewMember:
    """A member that would join; it subscribes to all topics of the group.

    Attributes:
        name: Its client_id.
        host: Its host, "" = unknown.
        limit: Most keys that it may hold, 0 = no limit.
    """

    name: str
    host: str = ""
    limit: int = 0


@attrs.frozen(kw_only=True)
class Changes:
    """What would change, all at once.

    Attributes:
        kill: Clients that die.
        add: Members that join.
        drain: Clients that close and release all they hold.
        drain_hosts: Hosts whose clients all close and release all they hold.
        limits: Most keys that a client may hold, by client_id, 0 = no limit.
        partitions: New numbers of partitions, by topic.
    """

    kill: tuple[str, ...] = ()
    add: tuple[NewMember, ...] = ()
    drain: tuple[str, ...] = ()
    drain_hosts: tuple[str, ...] = ()
    limits: Mapping[str, int] = attrs.field(factory=dict)
    partitions: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SimulatedMove:
    """A key that changes hands.

    Attributes:
        source: Previous owner, None = nobody.
        to: Next owner.
        wave: Number of the wave of decisions in which it moves, from 1.
        gap_ms: Longest time that it has no owner, None = unknown.
    """

    key: TopicPartition
    source: str | None
    to: str
    wave: int
    gap_ms: int | None


@attrs.frozen(kw_only=True)
class Simulation:
    """The prediction.

    Attributes:
        members: Host of each member, by name; also of members that leave.
        terms: Data on which the shares of the remaining members depend: topics, limit,
            weight, labels and directives, by name.
        before: Owner of each key now; None = nobody.
        owners: Owner of each key that has one at the end.
        moves: Moves, by wave and key; a key may move more than once.
        uncovered: Keys that no member can claim at the end, and why.
        waves: Number of waves until nothing moves.
        is_settled: Whether moves ended within ``WAVES_MAX`` waves.
        policy: Simulated policy: ``planner`` if it is the group's, else ``fair``.
    """

    members: Mapping[str, str]
    terms: Mapping[str, MemberView]
    before: Mapping[TopicPartition, str | None]
    owners: Mapping[TopicPartition, str]
    moves: tuple[SimulatedMove, ...]
    uncovered: tuple[Uncovered, ...]
    waves: int
    is_settled: bool
    policy: str


def simulate(
    world: World,
    group_id: str,
    *,
    changes: Changes,
    partition_counts: Mapping[str, int] | None = None,
) -> Simulation:
    """Predict what the group does after changes.

    Args:
        world: A view, with members.
        group_id: The group.
        changes: The changes, which all happen at once.
        partition_counts: Current number of partitions by topic; absent topics have as
            many as the log shows.

    Raises:
        ConfigurationError: A client, host or topic of the changes is not in the group.
    """
    group = _Group(world, group_id, partition_counts or {})
    before = dict(group.owners)
    group.change(changes)
    is_planned = world.settings(group_id).policy == PLANNER
    if is_planned:
        group.settle_by_plan()
    else:
        group.settle()
    owners = {key: name for key, name in group.owners.items() if name is not None}
    return Simulation(
        members=group.hosts,
        terms=group.terms,
        before=before,
        owners=owners,
        moves=tuple(sorted(group.moves, key=lambda move: (move.wave, move.key))),
        uncovered=group.uncovered(),
        waves=group.waves,
        is_settled=group.is_settled,
        policy=PLANNER if is_planned else FAIR,
    )


def closed_topics(world: World, group_id: str) -> dict[str, str]:
    """Return the topics whose keys no live member can claim now, with the reason.

    The load that members announced last shows whether they have room.
    """
    members = _member_views(world, group_id, _live_members(world, group_id).values())
    found = {
        topic: why_uncovered(topic, members) for topic in group_topics(world, group_id)
    }
    return {topic: why for topic, why in sorted(found.items()) if why is not None}


def uncovered_now(
    world: World, group_id: str, *, partition_counts: Mapping[str, int]
) -> tuple[Uncovered, ...]:
    """Return the claimable keys of a group that no live member can claim.

    Args:
        world: A view, with members.
        group_id: The group.
        partition_counts: Number of partitions of its ``closed_topics``; the result has
            no keys of absent topics.
    """
    states = by_partition(world.partitions)
    found = []
    for topic, why in closed_topics(world, group_id).items():
        for number in range(partition_counts.get(topic, 0)):
            key = Key(group_id, topic, number)
            state = states[world.partition_of(key)]
            guess = estimate(
                state,
                key,
                elapsed_ms=world.elapsed_ms(state.partition),
                claimant=Owner("", b""),
            )
            if guess.wait_ms == 0:
                found.append(Uncovered(key.topic_partition, why))
    return tuple(found)


def group_topics(world: World, group_id: str) -> set[str]:
    """Return the topics to which members subscribe, or of which the group has keys."""
    topics = {key.topic for key, _ in world.claims(group_id)} - set(RESERVED_TOPICS)
    for member in _live_members(world, group_id).values():
        topics |= set(member.record.topics)
    return topics


def _live_members(world: World, group_id: str) -> dict[str, MemberState]:
    """Return the live members by name, the newest process of each."""
    found: dict[str, MemberState] = {}
    live = []
    for state, member in world.members(group_id):
        now_ms = state.now_ms + world.elapsed_ms(state.partition)
        if state.is_live(member, now_ms) and not member.record.draining:
            live.append(member)
    for member in sorted(live, key=lambda each: each.since_offset):
        found[member.record.client_id] = member
    return found


class _Group:
    """A group as its members see it; in a wave each member decides once.

    Attributes:
        owners: Owner of each key, None = nobody.
        hosts: Host of each member, also of members that have left.
        terms: The remaining members, by name.
        moves: Moves so far.
        waves: Number of waves in which something moved.
        is_settled: Whether nothing moves any more.
    """

    def __init__(
        self, world: World, group_id: str, partition_counts: Mapping[str, int]
    ) -> None:
        self._group_id = group_id
        self._world = world
        self._scoped = [state for state in world.partitions if state.scopes]
        self._interval_ms = world.config().heartbeat_interval_ms
        live = _live_members(world, group_id)
        views = _member_views(world, group_id, live.values())
        self.terms = {
            each.client_id: each
            for each in sorted(views, key=lambda view: view.client_id)
        }
        self.hosts = {name: live[name].record.host for name in sorted(live)}
        self.owners: dict[TopicPartition, str | None] = {}
        self._last: dict[TopicPartition, str] = {}
        self._source: dict[TopicPartition, tuple[str | None, int | None]] = {}
        self._states: dict[TopicPartition, KeyState] = {}
        self._waiting: frozenset[TopicPartition] = frozenset()
        self.moves: list[SimulatedMove] = []
        self.waves = 0
        self.is_settled = False
        self._counts = dict(partition_counts)
        self._read()

    def _read(self) -> None:
        known: dict[TopicPartition, tuple[WorldState, KeyState]] = {}
        for key, state in self._world.standing().items():
            if key.group_id == self._group_id and key.topic not in RESERVED_TOPICS:
                known[key.topic_partition] = state, state.keys[key]
        self._counts |= guessed_counts(
            place for place in known if place.topic not in self._counts
        )
        for topic in sorted(self._counts):
            for number in range(self._counts[topic]):
                place = TopicPartition(topic, number)
                if self._is_paused(place):
                    continue
                self.owners[place] = None
                if place in known:
                    self._read_key(place, *known[place])
        self._states = {place: state for place, (_, state) in known.items()}

    def _is_free(self, place: TopicPartition) -> bool:
        """Return whether a partition has no owner, and does not wait for a growth."""
        return self.owners[place] is None and place not in self._waiting

    def _find_waiting(self) -> frozenset[TopicPartition]:
        """Return the partitions that wait for a growth: no wave changes that."""
        growths = [each for state in self._world.partitions for each in state.growths]
        return frozenset(
            place
            for place in (self.owners if growths else ())
            if awaited_source(
                growths,
                Key(self._group_id, *place),
                topic_id=None,
                state_of=lambda key: self._states.get(key.topic_partition),
            )
        )

    def _is_paused(self, place: TopicPartition) -> bool:
        """Return whether a pause of some topics has a key: it counts in no share."""
        key, elapsed_ms = Key(self._group_id, *place), self._world.elapsed_ms
        return any(
            state.is_paused_by_scope(
                key, state.append_time_ms + elapsed_ms(state.partition)
            )
            for state in self._scoped
        )

    def _read_key(
        self, place: TopicPartition, state: WorldState, known: KeyState
    ) -> None:
        note = state.soft.notes.get(Key(self._group_id, *place))
        if known.owner is None:
            if note is not None:
                self._last[place] = note.client_id
            return
        name = known.owner.client_id
        if self._world.estimated_freshness(state, known) is Freshness.STALE:
            self._last[place] = name
            return
        self.owners[place] = name
        if note is not None and note.before is not None:
            self._last[place] = note.before

    # --- changes

    def change(self, changes: Changes) -> None:
        """Make the changes."""
        for name in changes.kill:
            self._require(name, "kill")
            self._remove(name, gap_ms=2 * self._interval_ms)
        for name in (*changes.drain, *self._on_hosts(changes.drain_hosts)):
            if name in self.hosts and name not in self.terms:
                continue  # named twice
            self._require(name, "drain")
            self._remove(name, gap_ms=None)
        topics = frozenset(self._counts)
        for each in changes.add:
            if each.name in self.terms:
                raise ConfigurationError(
                    f"group {self._group_id} has a client {each.name} already; see: "
                    f"marshal clients list --group {self._group_id}",
                    setting="add",
                )
            self.hosts[each.name] = each.host
            self.terms[each.name] = MemberView(
                client_id=each.name, topics=topics, claims_max=each.limit
            )
        for name, limit in changes.limits.items():
            self._require(name, "limits")
            self.terms[name] = msgspec.structs.replace(
                self.terms[name], claims_max=limit
            )
        self._resize(changes.partitions)
        self._waiting = self._find_waiting()

    def _require(self, name: str, setting: str) -> None:
        if name not in self.terms:
            raise ConfigurationError(
                f"no live member of group {self._group_id} is named {name}; see: "
                f"marshal clients list --group {self._group_id}",
                setting=setting,
            )

    def _on_hosts(self, hosts: Iterable[str]) -> list[str]:
        found = []
        for host in hosts:
            names = [name for name, at in self.hosts.items() if at == host]
            if not names:
                raise ConfigurationError(
                    f"no live member of group {self._group_id} is on host {host}; see: "
                    f"marshal clients list --group {self._group_id}",
                    setting="drain_hosts",
                )
            found += names
        return found

    def _remove(self, name: str, *, gap_ms: int | None) -> None:
        del self.terms[name]
        for place, owner in self.owners.items():
            if owner == name:
                self._free(place, gap_ms=gap_ms)

    def _resize(self, partitions: Mapping[str, int]) -> None:
        for topic, count in partitions.items():
            now = self._counts.get(topic, 0)
            if not now:
                raise ConfigurationError(
                    f"group {self._group_id} does not consume topic {topic}; see: "
                    f"marshal groups describe {self._group_id}",
                    setting="partitions",
                )
            if count < now:
                raise ConfigurationError(
                    f"topic {topic} has {now} partitions, and Kafka cannot reduce that "
                    f"to {count}; name a larger number",
                    setting="partitions",
                )
            if count > max(now, GROWN_MAX):
                raise ConfigurationError(
                    f"nothing is predicted for {count} partitions of topic {topic}; "
                    f"name {GROWN_MAX} at most",
                    setting="partitions",
                )
            added = (TopicPartition(topic, number) for number in range(now, count))
            self.owners |= {each: None for each in added if not self._is_paused(each)}
        self.owners = dict(sorted(self.owners.items()))

    # --- waves

    def settle(self) -> None:
        """Run waves until nothing moves."""
        has_orphans = False
        for _ in range(WAVES_MAX):
            if self._wave(has_orphans=has_orphans):
                has_orphans = False
            elif has_orphans:
                self.is_settled = True
                return
            else:
                # Keys that nobody claims for an interval may be claimed by any member.
                has_orphans = True

    def settle_by_plan(self) -> None:
        """Move the keys that a planner of the whole group would move."""
        members = tuple(
            PlanMember(
                name=each.client_id,
                topics=tuple(sorted(each.topics)),
                limit=each.claims_max or None,
                target=number_of(dict(each.labels), TARGET_LABEL),
                weight=each.weight,
                host=self.hosts[each.client_id],
                rack=dict(each.labels).get(RACK_LABEL, ""),
                is_drained=each.is_drained,
                is_cordoned=each.is_cordoned,
            )
            for each in self._members_now()
        )
        failing = tuple(
            (each.client_id, place)
            for each in self._members_now()
            for place in failing_of(dict(each.labels))
        )
        keys = tuple(
            PlanKey(place, owner or self._last.get(place), is_free=owner is None)
            for place, owner in sorted(self.owners.items())
        )
        given = PlanInput(keys=keys, members=members, failing=failing)
        moves = plan(given).moves
        for move in moves:
            if self.owners[move.key] is not None:
                self._free(move.key, gap_ms=None)
            if self._is_free(move.key):
                self._claim(move.key, move.to, wave=1)
        self.waves = 1 if self.moves else 0
        self.is_settled = True

    def _wave(self, *, has_orphans: bool) -> bool:
        """Let every member decide on the same view, then act; return whether any acts.

        For half an interval only the named successor may claim a released key.
        """
        members = self._members_now()
        plans = {
            member.client_id: fair(self._view(member, members, has_orphans=has_orphans))
            for member in members
        }
        wave = self.waves + 1
        claims = [
            (place, name)
            for name, plan in plans.items()
            for place in (key.topic_partition for key in plan.claim)
        ]
        releases = [
            (release.key.topic_partition, release.successor)
            for plan in plans.values()
            for release in plan.release
        ]
        for place, name in claims:
            if self.owners[place] is None:
                self._claim(place, name, wave=wave)
        for place, successor in releases:
            self._free(place, gap_ms=None)
            if successor is not None and self._has_room(successor):
                self._claim(place, successor, wave=wave)
        if claims or releases:
            self.waves = wave
        return bool(claims or releases)

    def _members_now(self) -> tuple[MemberView, ...]:
        """Return the members by name, with the numbers of keys they hold."""
        held = Counter(name for name in self.owners.values() if name is not None)
        return tuple(
            msgspec.structs.replace(member, held=held[name])
            for name, member in sorted(self.terms.items())
        )

    def _view(
        self, me: MemberView, members: tuple[MemberView, ...], *, has_orphans: bool
    ) -> View:
        keys = tuple(
            KeyView(
                key=Key(self._group_id, *place),
                owner=owner,
                is_mine=owner == me.client_id,
                is_claimable=(is_free := self._is_free(place)),
                is_orphan=has_orphans and is_free,
                last_owner=self._last.get(place),
            )
            for place, owner in self.owners.items()
            if place.topic in me.topics
        )
        return View(
            me=me.client_id,
            keys=keys,
            members=members,
            claims_max=me.claims_max,
            weight=min(me.weight, WEIGHT_MAX),
            is_drained=me.is_drained,
            is_cordoned=me.is_cordoned,
        )

    def _has_room(self, name: str) -> bool:
        member = self.terms.get(name)
        if member is None or not member.claims_max:
            return member is not None
        held = sum(owner == name for owner in self.owners.values())
        return held < member.claims_max

    def _free(self, place: TopicPartition, *, gap_ms: int | None) -> None:
        owner = self.owners[place]
        self._source[place] = owner, gap_ms
        if owner is not None:
            self._last[place] = owner
        self.owners[place] = None

    def _claim(self, place: TopicPartition, name: str, *, wave: int) -> None:
        source, gap_ms = self._source.pop(place, (None, None))
        self.owners[place] = name
        self.moves.append(
            SimulatedMove(key=place, source=source, to=name, wave=wave, gap_ms=gap_ms)
        )

    def uncovered(self) -> tuple[Uncovered, ...]:
        """Return the keys that no member can claim, and why."""
        members = self._members_now()
        free = [place for place, name in self.owners.items() if name is None]
        found = ((place, why_uncovered(place.topic, members)) for place in free)
        return tuple(Uncovered(place, why) for place, why in found if why is not None)


def _member_views(
    world: World, group_id: str, members: Iterable[MemberState]
) -> Sequence[MemberView]:
    """Return views of members, with the directives in force applied to them."""
    worlds = by_partition(world.partitions)
    homes = [worlds[t] for t in homes_of(worlds, group_id) if t in worlds]
    return directed([member_view(each) for each in members], homes, group_id=group_id)
