"""Builds a planner's input from the log, and Plans from its result (PROTOCOL 9.2).

Pure functions of a ``Reading``: what one reader has folded at one moment. A reading is
an estimate while log time does not move; the ``vector`` of a Plan identifies it, so
that others can repeat it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import attrs
import msgspec

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.codec import FRAME_BYTES_MAX
from kafka_marshal.protocol.fold_advice import PLAN_SLICES_MAX
from kafka_marshal.protocol.group_plan import (
    PLANNER_VERSION,
    GroupPlan,
    PlanInput,
    PlanKey,
    PlanMember,
)
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.items import PlanNote
from kafka_marshal.protocol.labels import (
    PLANS_LABEL,
    RACK_LABEL,
    REPLACES_ANY,
    REPLACES_LABEL,
    TARGET_LABEL,
    failing_of,
    number_of,
    standbys_label,
    weight_of,
)
from kafka_marshal.protocol.lease import is_stale
from kafka_marshal.protocol.records import (
    CORDON,
    DRAIN,
    Config,
    Plan,
    PlannedMember,
    PlannedTopic,
)
from kafka_marshal.protocol.standbys import Candidate, standbys_of
from kafka_marshal.protocol.state import (
    KeyNote,
    KeyState,
    MemberState,
    WorldState,
)
from kafka_marshal.protocol.types import Key, TopicPartition

RESTART = "restart"
"""The reason of a release by a member that returns soon."""
SPREAD = "spread"
GUESSED_MIN, GUESSED_PER_CLAIM = 1_000, 10
PLANNERS_MAX = 3
TURN_MS = 2_000

_DIGEST_BYTES = 16
_ENCODER = msgspec.msgpack.Encoder()
# Maximum bytes of a Plan without vector, topics and moves; of each topic or member
# besides its name; of each partition.
_HEAD_BYTES, _ROW_BYTES, _PARTITION_BYTES = 1_536, 12, 5
# The room that a slice needs for at least one move.
_ROOM_BYTES_MIN = 1_024

Entries = Mapping[TopicPartition, str]
"""The member that is named for each key."""


class Standing(NamedTuple):
    """The content of a group's whole Plan, whether its entries are valid or not.

    Attributes:
        entries: The member named for each key.
        counts: Number of partitions of each topic.
        vector: Next offset and milliseconds, by coordinating partition.
    """

    entries: Entries
    counts: Mapping[str, int]
    vector: tuple[tuple[int, int], ...]


NO_PLAN = Standing({}, {}, ())


def standing_of(note: PlanNote | None) -> Standing:
    """Return the content of a Plan, empty if slices are missing. Never raises."""
    if note is None or not note.is_whole:
        return NO_PLAN
    records = note.records
    counts = {
        each.topic: each.partition_total for one in records for each in one.topics
    }
    return Standing(entries_of(records), counts, records[0].vector)


def entries_of(slices: "Sequence[Plan | Slice]") -> dict[TopicPartition, str]:
    """Return the member that a Plan in slices names for each key. Never raises."""
    topics = [each.topic for one in slices for each in one.topics]
    return {
        TopicPartition(topics[number], partition): member.client_id
        for one in slices
        for member in one.moves
        for number, partitions in member.keys
        if number < len(topics)
        for partition in partitions
    }


def is_valid_for(known: KeyState | None, next_offset: int) -> bool:
    """Return whether a key's entry in a Plan is valid: nobody claimed the key since.

    Args:
        known: The key, None if nobody has claimed it.
        next_offset: Next offset of the key's coordinating partition, in the vector.
    """
    return known is None or known.epoch < next_offset


@attrs.frozen(kw_only=True)
class Reading:
    """What one reader knows of a group at one moment.

    Attributes:
        group_id: The group.
        worlds: Every coordinating partition, in order.
        elapsed_ms: Estimated milliseconds since the last entry of each.
        counts: Number of partitions of each topic, as far as it is known.
        partition_of: Returns the coordinating partition of a key.
    """

    group_id: str
    worlds: tuple[WorldState, ...]
    elapsed_ms: tuple[int, ...]
    counts: Mapping[str, int]
    partition_of: Callable[[Key], int]

    @property
    def config(self) -> Config:
        """The Config in force."""
        config = self.worlds[0].config
        assert config is not None
        return config

    @property
    def home(self) -> int:
        """The coordinating partition of members, settings and Plans."""
        count = self.config.partition_count
        return home_partition(self.group_id, partition_count=count)

    @property
    def grace_ms(self) -> int:
        """How long a key waits for an owner that restarts."""
        return self.worlds[self.home].settings_of(self.group_id).value("grace_ms")

    @property
    def vector(self) -> tuple[tuple[int, int], ...]:
        """Next offset and elapsed milliseconds, by coordinating partition."""
        offsets = (world.next_offset for world in self.worlds)
        return tuple(zip(offsets, self.elapsed_ms, strict=True))

    def now_ms(self, partition: int) -> int:
        """Return the estimated log time of a coordinating partition."""
        return self.worlds[partition].now_ms + self.elapsed_ms[partition]

    def standing(self) -> dict[TopicPartition, str]:
        """Return the valid entries of the Plan in force."""
        found = standing_of(self.worlds[self.home].soft.plans.get(self.group_id))
        if len(found.vector) != len(self.worlds):
            return {}
        valid = {}
        for place, name in found.entries.items():
            key = Key(self.group_id, *place)
            partition = self.partition_of(key)
            known = self.worlds[partition].keys.get(key)
            if is_valid_for(known, found.vector[partition][0]):
                valid[place] = name
        return valid

    def members(self, *, has_stale: bool = True) -> dict[str, MemberState]:
        """Return the live members, by name.

        A live member announced itself within a heartbeat interval, and after the last
        of its stale keys went stale: the keys of a process that died go stale one after
        the other. If a client has several processes, the last one counts.
        ``has_stale`` is False if the caller knows that no key of the group is stale.
        """
        now_ms, limit_ms = self.now_ms(self.home), self.config.heartbeat_interval_ms
        stale_ms = self._stale_ms() if has_stale else {}
        found: dict[str, MemberState] = {}
        live = self.worlds[self.home].live_members(self.group_id)
        for member in sorted(live, key=lambda each: each.since_offset):
            name = member.record.client_id
            found.pop(name, None)
            silent_ms = now_ms - member.seen_ms
            is_lost = name in stale_ms and silent_ms >= stale_ms[name]
            if silent_ms <= limit_ms and not member.record.draining and not is_lost:
                found[name] = member
        return dict(sorted(found.items()))

    def _stale_ms(self) -> dict[str, int]:
        """Return, for each owner of stale keys, the time since the last went stale."""
        found: dict[str, int] = {}
        for number, world in enumerate(self.worlds):
            now_ms = self.now_ms(number)
            for key, known in world.keys.items():
                if known.owner is None or key.group_id != self.group_id:
                    continue
                since_ms = now_ms + 1 - known.stale_at_ms
                if since_ms > 0:
                    name = known.owner.client_id
                    found[name] = min(since_ms, found.get(name, since_ms))
        return found


class _Place(NamedTuple):
    """A key for the planner, and its present holder (None: it must be claimed)."""

    key: PlanKey
    holder: str | None


@attrs.frozen(kw_only=True)
class Situation:
    """A group as its planner sees it.

    Attributes:
        given: The planner's input.
        holders: The present holder of each key; None if the key must be claimed.
        standing: The valid entries of the Plan in force about these keys.
        counts: Number of partitions of each topic that a member wants.
    """

    given: PlanInput
    holders: Mapping[TopicPartition, str | None]
    standing: Entries
    counts: Mapping[str, int]

    @property
    def has_unnamed_key(self) -> bool:
        """Whether a key must be claimed and no valid entry names a member for it."""
        return any(
            holder is None and place not in self.standing
            for place, holder in self.holders.items()
        )

    def entries(self, result: GroupPlan) -> dict[TopicPartition, str]:
        """Return the entries that a Plan with this result needs."""
        return {
            place: name
            for place, name in result.owners.items()
            if name != self.holders[place]
        }


def situation_of(reading: Reading, states: Mapping[str, MemberState]) -> Situation:
    """Return what a planner has to decide for the live members.

    A key counts as held by the member that should get it: the member that a valid entry
    of the Plan in force, an open offer or the release names. Otherwise it counts as
    held by its owner, or by the last owner if it is free; if the owner has gone, by its
    first standby. So changes that have begun are not planned again.
    """
    home = reading.worlds[reading.home]
    standing = reading.standing()
    replacing = _replacing(reading, states, standing)
    members = {
        name: _member(home, each, is_early=name in replacing.early)
        for name, each in states.items()
    }
    reader = _KeyReader(
        reading,
        members,
        standing,
        replacing.replacements,
        standbys=Standbys(reading, states),
    )
    counts = _counts(reading, {topic for m in members.values() for topic in m.topics})
    rows = [
        row
        for topic in sorted(counts)
        for number in range(counts[topic])
        if (row := reader.read(TopicPartition(topic, number))) is not None
    ]
    failing = [
        (name, place)
        for name, each in states.items()
        for place in failing_of(each.record.labels)
    ]
    given = PlanInput(
        keys=tuple(row.key for row in rows),
        members=tuple(members.values()),
        failing=tuple(failing),
        barred=tuple(sorted(reader.barred)),
    )
    holders = {row.key.key: row.holder for row in rows}
    # Other planners may know more partitions: their entries for these are left out.
    ours = {place: name for place, name in standing.items() if place in holders}
    return Situation(given=given, holders=holders, standing=ours, counts=counts)


def _action(home: WorldState, member: MemberState) -> str | None:
    """Return what a directive asks of a member, None without one."""
    record = member.record
    client = (record.group_id, record.client_id)
    return home.action_for(client, host=record.host)


def _member(home: WorldState, member: MemberState, *, is_early: bool) -> PlanMember:
    """Return a member for the planner; an early member takes nothing."""
    record = member.record
    labels = record.labels
    action = _action(home, member)
    return PlanMember(
        name=record.client_id,
        topics=tuple(sorted(set(record.topics))),
        limit=record.capacity or None,
        target=number_of(labels, TARGET_LABEL),
        weight=weight_of(labels),
        host=record.host,
        rack=labels.get(RACK_LABEL, ""),
        is_drained=action == DRAIN,
        is_cordoned=action == CORDON or is_early,
    )


class Standbys:
    """Who stands by for the keys of a group, by one reading (PROTOCOL 9.9)."""

    def __init__(self, reading: Reading, states: Mapping[str, MemberState]) -> None:
        """Read the live members."""
        home = reading.worlds[reading.home]
        self._able = [
            (frozenset(each.record.topics), Candidate(name, each.record.host, count))
            for name, each in states.items()
            if (count := standbys_label(each.record.labels))
            and _action(home, each) is None
        ]
        # Hosts of all members, also of those that are gone.
        self._hosts = {
            each.record.client_id: each.record.host
            for each in home.soft.members.values()
            if self._able and each.record.group_id == reading.group_id
        }

    def of(self, key: Key, owner: str) -> tuple[str, ...]:
        """Return the standbys for a key of this owner, in order."""
        if not self._able:
            return ()
        able = [each for topics, each in self._able if key.topic in topics]
        host = self._hosts.get(owner, "")
        return standbys_of(key, owner=owner, host=host, candidates=able)


class _Replacing(NamedTuple):
    """Members that take the place of others after a restart.

    Attributes:
        replacements: New members, by the client that each one replaces, which has gone
            or is drained.
        early: New members that take nothing yet.
    """

    replacements: Mapping[str, str]
    early: frozenset[str]


def _replacing(
    reading: Reading, states: Mapping[str, MemberState], standing: Entries
) -> _Replacing:
    """Return the members that take the place of others (PROTOCOL 9.8)."""
    labels = {
        name: text
        for name, each in states.items()
        if (text := each.record.labels.get(REPLACES_LABEL))
    }
    if not labels:
        return _Replacing({}, frozenset())
    owned, leaving = _leaving(reading, states)
    replacements: dict[str, str] = {}
    for name, replaced in labels.items():
        if replaced not in states or replaced in leaving:
            replacements.setdefault(replaced, name)
    replacements.pop(REPLACES_ANY, None)
    willing = {name for name, text in labels.items() if text == REPLACES_ANY}
    without = []
    for replaced in sorted(leaving.keys() - replacements.keys()):
        named = {standing[place] for place in leaving[replaced] if place in standing}
        if not named:
            without.append(replaced)
        elif named & willing:
            replacements[replaced] = min(named & willing)
    home = reading.worlds[reading.home]
    new = sorted(
        name
        for name in willing - owned - set(replacements.values())
        if _action(home, states[name]) is None
    )
    replacements |= dict(zip(without, new, strict=False))
    early = {
        name
        for name, replaced in labels.items()
        if replaced in states and _action(home, states[replaced]) != DRAIN
    }
    if willing != states.keys():  # else the group is new: no client leaves it
        early |= set(new) - set(replacements.values())
    return _Replacing(replacements, frozenset(early))


def _leaving(
    reading: Reading, states: Mapping[str, MemberState]
) -> tuple[set[str], dict[str, list[TopicPartition]]]:
    """Return all owners, and the keys of each client that is drained or restarts."""
    home, group_id = reading.worlds[reading.home], reading.group_id
    owned: dict[str, list[TopicPartition]] = {}
    waiting: dict[str, list[TopicPartition]] = {}
    for number, world in enumerate(reading.worlds):
        now_ms = reading.now_ms(number)
        for key, known in world.keys.items():
            if key.group_id != group_id:
                continue
            note = world.soft.notes.get(key)
            if known.owner is not None:
                name = known.owner.client_id
                owned.setdefault(name, []).append(key.topic_partition)
            elif note is not None and is_reserved(
                known, note, now_ms=now_ms, grace_ms=reading.grace_ms
            ):
                waiting.setdefault(note.client_id, []).append(key.topic_partition)
    leaving = {name: places for name, places in waiting.items() if name not in states}
    for name, each in states.items():
        if name in owned and _action(home, each) == DRAIN:
            leaving[name] = owned[name]
    return set(owned), leaving


def _counts(reading: Reading, topics: Iterable[str]) -> dict[str, int]:
    """Return the partition counts of topics, guessed if they are unknown."""
    counts = {topic: reading.counts.get(topic, 0) for topic in topics}
    unknown = counts.keys() - reading.counts.keys()
    return counts | guessed_counts(
        key.topic_partition
        for world in reading.worlds
        for key in world.keys
        if key.topic in unknown and key.group_id == reading.group_id
    )


def guessed_counts(claimed: Iterable[TopicPartition]) -> dict[str, int]:
    """Return the partition counts of topics from the partitions that were ever claimed.

    A topic ends with the last of them. Those far above the others do not count: a claim
    of partition 2,147,483,647 must not make readers go through all below it.
    """
    numbers: dict[str, set[int]] = {}
    for topic, number in claimed:
        numbers.setdefault(topic, set()).add(number)
    counts = {}
    for topic, each in numbers.items():
        most = GUESSED_MIN + GUESSED_PER_CLAIM * len(each)
        counts[topic] = max((n + 1 for n in each if n < most), default=0)
    return counts


class _KeyReader:
    """Reads keys one by one, for the planner's input.

    Attributes:
        barred: Pairs of member and key whose offer ended without Ready, not long ago.
    """

    def __init__(
        self,
        reading: Reading,
        members: Mapping[str, PlanMember],
        standing: Entries,
        replacements: Mapping[str, str],
        *,
        standbys: Standbys,
    ) -> None:
        self._reading = reading
        self._standbys = standbys
        self._members = members
        self._standing = standing
        self._replacements = replacements
        self._grace_ms = reading.grace_ms
        settings = reading.worlds[reading.home].settings_of(reading.group_id)
        self._barred_ms = settings.value("handoff_ms")
        self._topics = {name: frozenset(each.topics) for name, each in members.items()}
        self.barred: set[tuple[str, TopicPartition]] = set()

    def read(self, place: TopicPartition) -> _Place | None:
        """Return a key and its holder, None if the key is not planned now."""
        reading = self._reading
        key = Key(reading.group_id, *place)
        partition = reading.partition_of(key)
        world, now_ms = reading.worlds[partition], reading.now_ms(partition)
        known = world.keys.get(key)
        if world.is_paused_by_scope(
            key, world.append_time_ms + reading.elapsed_ms[partition]
        ):
            return None
        note = world.soft.notes.get(key)
        if known is None or known.owner is None:
            return self._free(place, known, note, now_ms=now_ms)
        age_ms = known.age_ms(now_ms)
        if is_stale(age_ms, known.heartbeat_interval_ms):
            owner = self._planned(place) or self._standby(key, known)
            return _Place(PlanKey(place, owner, is_free=True), None)
        name = known.owner.client_id
        holder = name if name in self._members else None
        owner = self._planned(place) or self._offered(place, known, now_ms)
        replacement = self._replacements.get(name)
        if (
            owner is None
            and replacement is not None
            and self._can_have(replacement, place)
        ):
            owner = replacement
        owner = owner or holder or self._standby(key, known)
        return _Place(PlanKey(place, owner), holder)

    def _standby(self, key: Key, known: KeyState) -> str | None:
        """Return the first standby of a key whose owner has gone, or None."""
        assert known.owner is not None
        return next(iter(self._standbys.of(key, known.owner.client_id)), None)

    def _free(
        self,
        place: TopicPartition,
        known: KeyState | None,
        note: KeyNote | None,
        *,
        now_ms: int,
    ) -> _Place | None:
        if known is not None and known.handoff is not None:
            successor, until_ms = known.handoff
            if now_ms < until_ms and self._can_have(successor, place):
                return _Place(PlanKey(place, successor), successor)
        last = None if note is None else note.client_id
        owner = self._planned(place)
        if owner is None and last is not None:
            replacement = self._replacements.get(last, last)
            if replacement in self._members:
                owner = replacement
            elif is_reserved(known, note, now_ms=now_ms, grace_ms=self._grace_ms):
                return None
        return _Place(PlanKey(place, owner, is_free=True), None)

    def _planned(self, place: TopicPartition) -> str | None:
        name = self._standing.get(place)
        return name if name is not None and self._can_have(name, place) else None

    def _offered(
        self, place: TopicPartition, known: KeyState, now_ms: int
    ) -> str | None:
        offer = known.offer
        if offer is None:
            return None
        if now_ms < offer.until_ms:
            name = offer.successor
            return name if self._can_have(name, place) else None
        if offer.ready is None and now_ms < offer.until_ms + self._barred_ms:
            self.barred.add((offer.successor, place))
        return None

    def _can_have(self, name: str, place: TopicPartition) -> bool:
        member = self._members.get(name)
        if member is None or place.topic not in self._topics[name]:
            return False
        return not (member.is_drained or member.is_cordoned)


def is_reserved(
    known: KeyState | None, note: KeyNote | None, *, now_ms: int, grace_ms: int
) -> bool:
    """Return whether a free key waits for an owner that restarts (PROTOCOL 9.8).

    Args:
        known: The key.
        note: Why it changed hands last.
        now_ms: Estimated log time.
        grace_ms: How long it waits.
    """
    if known is None or known.owner is not None or note is None:
        return False
    is_restart = (note.reason or "").partition(":")[0] == RESTART
    return is_restart and now_ms - known.active_ms < grace_ms


# --- whose turn it is


def version_of(reading: Reading, members: Mapping[str, MemberState]) -> int:
    """Return the planner version in force: the lowest of members and settings."""
    settings = reading.worlds[reading.home].settings_of(reading.group_id)
    every = (number_of(each.record.labels, PLANS_LABEL) for each in members.values())
    versions = [version for version in every if version]
    most = settings.planner_version_max or PLANNER_VERSION
    return min(PLANNER_VERSION, most, *versions)


def turn_of(members: Mapping[str, MemberState], me: str) -> int | None:
    """Return the turn of a member among those that plan, from 0; None if it has none.

    Args:
        members: The live members.
        me: Name of the member.
    """
    names = [
        name
        for name, each in sorted(members.items())
        if number_of(each.record.labels, PLANS_LABEL)
    ]
    return names.index(me) if me in names[:PLANNERS_MAX] else None


# --- to records


def digest_of(given: PlanInput, *, is_spread: bool = False) -> bytes:
    """Return the digest of a planner's input, 16 bytes.

    Args:
        given: The input.
        is_spread: Whether a person asked for spread, which changes the result.
    """
    parts = [given.keys, given.members, given.failing, given.barred]
    value = _ENCODER.encode([*parts, SPREAD] if is_spread else parts)
    return blake2b(value, digest_size=_DIGEST_BYTES).digest()


class Slice(NamedTuple):
    """Topics and moves of one Plan."""

    topics: tuple[PlannedTopic, ...]
    moves: tuple[PlannedMember, ...]


def slices_of(
    counts: Mapping[str, int],
    entries: Entries,
    *,
    vector: Sequence[tuple[int, int]],
) -> list[Slice]:
    """Return the content of each slice of a Plan.

    Content beyond ``PLAN_SLICES_MAX`` slices is left for the next Plan. Topics without
    moves are left out first: others need them only to repeat the planner's input.

    Args:
        counts: Number of partitions of each topic.
        entries: The member named for each key.
        vector: Next offset and milliseconds, by coordinating partition.

    Raises:
        MalformedRecord: The vector leaves no room.
    """
    room = FRAME_BYTES_MAX - _HEAD_BYTES - len(_ENCODER.encode(vector))
    if room < _ROOM_BYTES_MIN:
        raise MalformedRecord(
            f"a Plan has an offset of each coordinating partition, and {len(vector):,} "
            "do not fit into one record; decrease their number (marshal topic "
            "resize), or choose another policy (marshal groups set)"
        )
    rows = sorted((name, place) for place, name in entries.items())
    slices = _packed(sorted(counts), rows, counts=counts, bytes_max=room)
    if len(slices) > PLAN_SLICES_MAX:
        slices = _packed((), rows, counts=counts, bytes_max=room)
    return slices[:PLAN_SLICES_MAX]


def _packed(
    topics: Iterable[str],
    rows: Iterable[tuple[str, TopicPartition]],
    *,
    counts: Mapping[str, int],
    bytes_max: int,
) -> list[Slice]:
    """Return slices with these topics, the moves, and the topics of the moves."""
    packer = _Packer(counts, bytes_max)
    for topic in topics:
        packer.number_of(topic)
    for name, place in rows:
        packer.add_key(name, place)
    return packer.slices()


class _Packer:
    """Fills slices, one after the other."""

    def __init__(self, counts: Mapping[str, int], bytes_max: int) -> None:
        self._counts = counts
        self._bytes_max = bytes_max
        self._left = 0
        self._numbers: dict[str, int] = {}
        self._topics: list[list[PlannedTopic]] = []
        self._moves: list[dict[str, dict[int, list[int]]]] = []
        self._begin()

    def _begin(self) -> None:
        self._left = self._bytes_max
        self._topics.append([])
        self._moves.append({})

    def number_of(self, topic: str) -> int:
        """Return the number of a topic; add it if it is new."""
        if topic not in self._numbers:
            self._numbers[topic] = len(self._numbers)
            size = len(topic) + _ROW_BYTES
            if size > self._left:
                self._begin()
            self._left -= size
            self._topics[-1].append(PlannedTopic(topic, self._counts[topic]))
        return self._numbers[topic]

    def add_key(self, name: str, place: TopicPartition) -> None:
        """Add a key of a member."""
        number = self.number_of(place.topic)
        size = _PARTITION_BYTES + self._overhead(name, number)
        if size > self._left:
            self._begin()
            size = _PARTITION_BYTES + self._overhead(name, number)
        self._left -= size
        mine = self._moves[-1].setdefault(name, {})
        mine.setdefault(number, []).append(place.partition)

    def _overhead(self, name: str, number: int) -> int:
        mine = self._moves[-1].get(name)
        if mine is None:
            return len(name) + 2 * _ROW_BYTES
        return 0 if number in mine else _ROW_BYTES

    def slices(self) -> list[Slice]:
        """Return the slices, at least one."""
        return [
            Slice(
                tuple(topics),
                tuple(
                    PlannedMember(
                        name, tuple((n, tuple(keys)) for n, keys in by_topic.items())
                    )
                    for name, by_topic in moves.items()
                ),
            )
            for topics, moves in zip(self._topics, self._moves, strict=True)
        ]
