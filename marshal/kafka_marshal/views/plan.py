"""Views of a group's Plan: its entries and their outcome, changes, verification.

Reads ``World``s and writes nothing (PROTOCOL 9.2).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from kafka_marshal.errors import ClaimRejected, LogUnreadable
from kafka_marshal.protocol.group_plan import PlanInput, Uncovered, plan
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.protocol.items import PlanNote
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.plans import (
    Reading,
    Situation,
    Standbys,
    digest_of,
    entries_of,
    is_reserved,
    is_valid_for,
    situation_of,
    slices_of,
    standing_of,
)
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.settings import FAIR
from kafka_marshal.protocol.spreading import spread
from kafka_marshal.protocol.state import KeyState, MemberState
from kafka_marshal.protocol.types import Key, TopicPartition, lag_of
from kafka_marshal.views.log_scan import LogScan, require_restored
from kafka_marshal.views.world import World

OPEN, DONE, VOID = "open", "done", "void"
SAME, DIVERGED, UNKNOWN = "same", "plan_diverged", "unknown"
PARTITIONS_MAX = 1_000_000
"""Maximum partitions of all topics of a Plan that is computed again."""


@attrs.frozen(kw_only=True)
class PlannedKey:
    """One entry of a Plan.

    Attributes:
        key: The partition.
        holder: Owner of the partition now, None = nobody.
        planned: Member that the entry names.
        state: ``open``: nobody has claimed the partition since the Plan; ``done``: the
            named member owns it by a claim since; ``void``: otherwise.
    """

    key: TopicPartition
    holder: str | None
    planned: str
    state: str


@attrs.frozen(kw_only=True)
class PlanView:
    """The Plan of a group.

    Attributes:
        group_id: The group.
        policy: The group's policy; members follow Plans only under ``planner``.
        generation: Number of Plan records (slices) so far.
        is_known: Whether this reader has read the last Plan, with all its slices.
        author: client_id of the Plan's writer, None if unknown.
        offset: Offset of the Plan's last slice in the group's home, or None.
        log_time_ms: Log time of that slice, or None.
        planner_version: Version of the planner, or None.
        input_digest: Digest of the planner's input in hex, or None.
        members: The live members, in order of name, as ``marshal plan show`` prints
            them: ``limit`` and ``target`` are None for no limit or target. Counts are
            numbers of partitions; ``planned_count`` once the Plan is fulfilled.
        keys: Entries of the Plan, in order.
        lag: Lag of the group: ``lag``, the records between positions and log ends if
            both are known, and ``lag_unknown_count``, the number of other partitions.
        standbys: Standbys of owned partitions, in order; partitions without standbys
            are absent.
        given: Input from which a planner would plan now.
    """

    group_id: str
    policy: str
    generation: int
    is_known: bool
    author: str | None
    offset: int | None
    log_time_ms: int | None
    planner_version: int | None
    input_digest: str | None
    members: tuple[dict[str, Any], ...]
    keys: tuple[PlannedKey, ...]
    lag: Mapping[str, int | None]
    standbys: Mapping[TopicPartition, tuple[str, ...]]
    given: PlanInput

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """Partitions that a planner would leave to nobody now; computes that plan."""
        return plan(self.given).uncovered


def view_plan(
    world: World,
    group_id: str,
    *,
    partition_counts: Mapping[str, int],
    log_ends: Mapping[TopicPartition, int] | None = None,
) -> PlanView:
    """Return the Plan of a group, and the outcome of its entries.

    Args:
        world: A view of all coordinating partitions.
        group_id: The group.
        partition_counts: Current number of partitions by topic; for absent topics, only
            partitions that were claimed count.
        log_ends: Log ends of the group's data partitions (``LogEnds``); the lag of
            absent ones is unknown.
    """
    reading = _reading(world, group_id, partition_counts)
    home = reading.worlds[reading.home]
    note = home.soft.plans.get(group_id)
    states = reading.members()
    situation = situation_of(reading, states)
    keys = _keys(reading, note)
    directives = {
        name: home.action_for((group_id, name), host=each.record.host)
        for name, each in states.items()
    }
    standbys = _standbys(reading, states)
    lags = _lags(world, group_id, situation=situation, log_ends=log_ends or {})
    last = None if note is None else note.records[-1]
    return PlanView(
        group_id=group_id,
        policy=home.settings_of(group_id).policy or FAIR,
        generation=home.plan_generation(group_id),
        is_known=note is not None and note.is_whole,
        author=None if last is None else last.client_id,
        offset=None if note is None else note.offset,
        log_time_ms=None if note is None else note.log_time_ms,
        planner_version=None if last is None else last.planner_version,
        input_digest=None if last is None else last.input_digest.hex(),
        members=_members(
            situation, directives, keys=keys, lags=lags, standbys=standbys
        ),
        keys=keys,
        lag=_lag(lags.values()),
        standbys=standbys,
        given=situation.given,
    )


def standby_rows(world: World, group_id: str) -> list[dict[str, Any]]:
    """Return the standbys of each owned partition, as the command prints them.

    Empty for a view that has only some of the coordinating partitions.
    """
    if world.is_partial:
        return []
    reading = _reading(world, group_id, {})
    return _standby_rows(_standbys(reading, reading.members()))


def _standby_rows(
    standbys: Mapping[TopicPartition, tuple[str, ...]],
) -> list[dict[str, Any]]:
    return [
        {**place._asdict(), "standbys": list(names)}
        for place, names in sorted(standbys.items())
    ]


def plan_object(
    view: PlanView, handoffs: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a Plan as plain data, with the fields that ``marshal plan show`` prints.

    Args:
        view: The Plan.
        handoffs: Open handoffs of the group, from ``World.handoffs``.
    """
    uncovered = [{**row.key._asdict(), "reason": row.reason} for row in view.uncovered]
    return {
        "group_id": view.group_id,
        "policy": view.policy,
        "generation": view.generation,
        "is_known": view.is_known,
        "author": view.author,
        "offset": view.offset,
        "planner_version": view.planner_version,
        "input_digest": view.input_digest,
        "open_count": sum(each.state == OPEN for each in view.keys),
        "uncovered_count": len(uncovered),
        **view.lag,
        "members": list(view.members),
        "keys": [
            {
                **each.key._asdict(),
                "holder": each.holder,
                "planned": each.planned,
                "state": each.state,
            }
            for each in view.keys
        ],
        "handoffs": [dict(row) for row in handoffs],
        "standbys": _standby_rows(view.standbys),
        "uncovered": uncovered,
    }


def explain_key(
    world: World,
    group_id: str,
    *,
    place: TopicPartition,
    partition_counts: Mapping[str, int],
) -> str:
    """Return, in a sentence, which member is to have a partition, and why.

    Raises:
        ClaimRejected: No live member subscribes to its topic, or it does not exist.
    """
    view = view_plan(world, group_id, partition_counts=partition_counts)
    reading = _reading(world, group_id, partition_counts)
    situation = situation_of(reading, reading.members())
    known = {row.key: row for row in situation.given.keys}
    found = next((each for each in view.keys if each.key == place), None)
    if found is not None and found.state == OPEN:
        have = found.holder or "nobody"
        return (
            f"{place} is to go from {have} to {found.planned}, by plan generation "
            f"{view.generation}, written by {view.author}"
        )
    key = Key(group_id, *place)
    state = reading.worlds[reading.partition_of(key)]
    note, now_ms = state.soft.notes.get(key), reading.now_ms(state.partition)
    if is_reserved(state.keys.get(key), note, now_ms=now_ms, grace_ms=reading.grace_ms):
        who = "its owner" if note is None else note.client_id
        return f"{place} is reserved for {who}, which is restarting"
    if place not in known:
        raise ClaimRejected(
            f"{place} is no partition of a topic to which a live member of group "
            f"{group_id} subscribes; see: marshal groups describe {group_id}",
            reason="unknown_key",
        )
    holder = situation.holders[place]
    to = plan(situation.given).owners.get(place)
    if to is None:
        why = next(each.reason for each in view.uncovered if each.key == place)
        return f"{place} stays without an owner: {why}"
    if to == holder:
        return f"{place} stays with {to}: no move would improve the balance"
    return f"{place} would go from {holder or 'nobody'} to {to} by the next plan"


@attrs.frozen(kw_only=True)
class Verification:
    """Whether a Plan is the result of planning from its input.

    Attributes:
        outcome: ``same``; ``plan_diverged``: the same input gives another result; or
            ``unknown``: this reader does not have the input that the planner had.
        generation: Generation of the Plan.
        author: client_id of the Plan's writer.
        differences: Partitions whose member differs, with the member in the Plan and
            the computed member.
    """

    outcome: str
    generation: int
    author: str
    differences: Mapping[TopicPartition, tuple[str | None, str | None]]


def verify_plan(
    world: World, group_id: str, *, past: Callable[[Mapping[int, int]], World]
) -> Verification:
    """Compute the last Plan of a group again, from the log up to its vector.

    Args:
        world: A view of now.
        group_id: The group.
        past: Called with the last offset in each coordinating partition, returns the
            world as of these offsets, with members.

    Raises:
        ClaimRejected: There is no Plan with all its slices, or it is for more than
            `PARTITIONS_MAX` partitions.
        LogUnreadable: The log no longer has the entries before the Plan.
    """
    now = _reading(world, group_id, {})
    found = now.worlds[now.home].soft.plans.get(group_id)
    if found is None or not found.is_whole:
        raise ClaimRejected(
            f"the log shows no whole plan of group {group_id}; see: marshal plan show "
            f"{group_id}",
            reason="unknown_plan",
        )
    standing, last = standing_of(found), found.records[-1]
    total = sum(standing.counts.values())
    if total > PARTITIONS_MAX:
        raise ClaimRejected(
            f"the plan of group {group_id}, by {last.client_id}, is for {total} "
            f"partitions; one for more than {PARTITIONS_MAX} is not computed again; "
            f"see: marshal plan show {group_id}",
            reason="unknown_plan",
        )
    before = past({t: at - 1 for t, (at, _) in enumerate(standing.vector)})
    before.require_known()
    if len(before.partitions) != len(standing.vector):
        raise _of_other_count(len(standing.vector), len(before.partitions))
    reading = attrs.evolve(
        _reading(before, group_id, standing.counts),
        elapsed_ms=tuple(elapsed for _, elapsed in standing.vector),
    )
    situation = situation_of(reading, reading.members())
    is_spread = last.input_digest == digest_of(situation.given, is_spread=True)
    result = (spread if is_spread else plan)(situation.given)
    written = slices_of(
        situation.counts, situation.entries(result), vector=standing.vector
    )
    computed = entries_of(written)
    differences = {
        place: (standing.entries.get(place), computed.get(place))
        for place in sorted({*standing.entries, *computed})
        if standing.entries.get(place) != computed.get(place)
    }
    outcome = SAME
    if last.input_digest != digest_of(situation.given, is_spread=is_spread):
        outcome, differences = UNKNOWN, {}
    elif differences:
        outcome = DIVERGED
    return Verification(
        outcome=outcome,
        generation=found.generation,
        author=last.client_id,
        differences=differences,
    )


def _reading(
    world: World, group_id: str, partition_counts: Mapping[str, int]
) -> Reading:
    return Reading(
        group_id=group_id,
        worlds=world.partitions,
        elapsed_ms=tuple(world.elapsed_ms(each.partition) for each in world.partitions),
        counts=partition_counts,
        partition_of=world.partition_of,
    )


def _keys(reading: Reading, note: PlanNote | None) -> tuple[PlannedKey, ...]:
    standing = standing_of(note)
    if len(standing.vector) != len(reading.worlds):
        return ()
    rows = []
    for place, name in sorted(standing.entries.items()):
        key = Key(reading.group_id, *place)
        partition = reading.partition_of(key)
        known = reading.worlds[partition].keys.get(key)
        owner = None if known is None else known.owner
        holder = None if owner is None else owner.client_id
        state = DONE if holder == name else VOID
        if is_valid_for(known, standing.vector[partition][0]):
            state = OPEN
        rows.append(PlannedKey(key=place, holder=holder, planned=name, state=state))
    return tuple(rows)


def _standbys(
    reading: Reading, states: Mapping[str, MemberState]
) -> dict[TopicPartition, tuple[str, ...]]:
    """Return the standbys of each owned partition that has any."""
    standbys = Standbys(reading, states)
    return {
        key.topic_partition: names
        for world in reading.worlds
        for key, known in world.keys.items()
        if key.group_id == reading.group_id
        and known.owner is not None
        and (names := standbys.of(key, known.owner.client_id))
    }


def _lags(
    world: World,
    group_id: str,
    *,
    situation: Situation,
    log_ends: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int | None]:
    """Return the lag of each partition of a group, None where it is unknown."""
    found: dict[TopicPartition, int | None] = dict.fromkeys(situation.holders)
    for key, state in world.standing().items():
        if key.group_id != group_id or key.topic in RESERVED_TOPICS:
            continue
        place, known = key.topic_partition, state.keys[key]
        freshness = world.estimated_freshness(state, known)
        is_owned = known.owner is not None and freshness is not Freshness.STALE
        found[place] = lag_of(known.position, log_ends.get(place), is_owned=is_owned)
    return found


def _lag(lags: Iterable[int | None]) -> dict[str, int | None]:
    """Return the known lag of partitions, None if none is known; count unknown ones."""
    rows = list(lags)
    known = [each for each in rows if each is not None]
    unknown_count = len(rows) - len(known)
    lag = sum(known) if known or not unknown_count else None
    return {"lag": lag, "lag_unknown_count": unknown_count}


def _members(
    situation: Situation,
    directives: Mapping[str, str | None],
    *,
    keys: tuple[PlannedKey, ...],
    lags: Mapping[TopicPartition, int | None],
    standbys: Mapping[TopicPartition, tuple[str, ...]],
) -> tuple[dict[str, Any], ...]:
    held: defaultdict[str | None, list[int | None]] = defaultdict(list)
    for place, holder in situation.holders.items():
        held[holder].append(lags[place])
    warm = Counter(name for names in standbys.values() for name in names)
    still_open = [each for each in keys if each.state == OPEN]
    gains = Counter(each.planned for each in still_open)
    losses = Counter(situation.holders.get(each.key) for each in still_open)
    return tuple(
        {
            "client_id": each.name,
            "host": each.host,
            "rack": each.rack,
            "limit": each.limit,
            "target": each.target,
            "directive": directives[each.name],
            "held_count": len(held[each.name]),
            "planned_count": len(held[each.name])
            + gains[each.name]
            - losses[each.name],
            "gains_count": gains[each.name],
            "losses_count": losses[each.name],
            **_lag(held[each.name]),
            "standbys_count": warm[each.name],
        }
        for each in situation.given.members
    )


OVERTAKEN = "overtaken"


@attrs.frozen(kw_only=True)
class PlanChange:
    """A partition in an earlier Plan, or whose intended owner has changed since.

    Attributes:
        key: The partition.
        source: Intended owner at the earlier Plan, None = nobody.
        to: Intended owner now, None = nobody.
        holder: Owner now, None = nobody.
        state: Outcome of the entry in the earlier Plan. ``done``: the named member owns
            the partition by a claim since. ``open``: nobody has claimed it since, and
            the Plan in force names the same member. ``overtaken``: neither of these.
            None if the earlier Plan had no entry.
    """

    key: TopicPartition
    source: str | None
    to: str | None
    holder: str | None
    state: str | None


def find_plan(scan: LogScan, group_id: str, *, generation: int) -> PlanNote:
    """Return an earlier Plan of a group.

    Args:
        scan: The log of the group's home partition only.
        group_id: The group.
        generation: Generation of the Plan, or of any of its slices.

    Raises:
        ClaimRejected: The log has no complete Plan of this generation (any more).
        LogUnreadable: The log has lost its start, and has no checkpoint.
    """
    (begun,) = require_restored(scan.restore()).values()
    world = begun.world
    found: PlanNote | None = None
    last: PlanNote | None = None
    whole: list[int] = []
    for _, entry in scan:
        apply(world, entry)
        note = world.soft.plans.get(group_id)
        if note is last or note is None:
            continue
        last = note
        if whole and note.generation <= whole[-1]:
            # The group was dropped meanwhile, and its generations began again at 1.
            whole.clear()
            found = None
        if note.is_whole:
            whole.append(note.generation)
            first = note.generation - len(note.records) + 1
            if first <= generation <= note.generation:
                found = note
    if found is None:
        raise _unknown(group_id, generation, whole)
    return found


def _unknown(group_id: str, generation: int, whole: list[int]) -> ClaimRejected:
    if not whole:
        text = f"the log has no whole plan of group {group_id}"
    elif generation > whole[-1]:
        text = f"group {group_id} has no plan of generation {generation} yet; the last "
        text += f"one is {whole[-1]}"
    else:
        text = f"the log has no whole plan of generation {generation} of group "
        text += f"{group_id} any more; the oldest that it has is {whole[0]}"
    return ClaimRejected(
        f"{text}; see: marshal plan show {group_id}", reason="unknown_plan"
    )


def _of_other_count(planned: int, now: int) -> LogUnreadable:
    return LogUnreadable(
        f"the plan was made for {planned} coordinating partitions, but the topic has "
        f"{now}: it cannot be compared"
    )


def plan_changes(
    world: World,
    view: PlanView,
    *,
    since: PlanNote,
    past: Callable[[Mapping[int, int]], World],
) -> tuple[PlanChange, ...]:
    """Compare an earlier Plan with now; return its partitions and all that changed.

    A Plan names only partitions that should change hands, so two Plans cannot be
    compared directly. Instead the intended owners are compared: the member that the
    Plan names for a partition, else its owner.

    Args:
        world: A view of now.
        view: The Plan in force, from ``world``.
        since: The earlier Plan.
        past: Called with the last offset in each coordinating partition, returns the
            world as of these offsets.

    Raises:
        LogUnreadable: The log no longer has the entries before that Plan.
    """
    standing = standing_of(since)
    if len(standing.vector) != len(world.partitions):
        raise _of_other_count(len(standing.vector), len(world.partitions))
    before = past({t: at - 1 for t, (at, _) in enumerate(standing.vector)})
    before.require_known()
    then = {**_owners(before, view.group_id), **standing.entries}
    holders = _owners(world, view.group_id)
    in_force = {each.key: each.planned for each in view.keys if each.state == OPEN}
    now = {**holders, **in_force}
    changes = []
    for place in sorted({*then, *now}):
        named, state = standing.entries.get(place), None
        if named is not None:
            key = Key(view.group_id, *place)
            partition = world.partition_of(key)
            state = _state(
                world.partitions[partition].keys.get(key),
                named,
                next_offset=standing.vector[partition][0],
                in_force=in_force.get(place),
            )
        source, to = then.get(place), now.get(place)
        if state is not None or source != to:
            holder = holders.get(place)
            row = PlanChange(
                key=place, source=source, to=to, holder=holder, state=state
            )
            changes.append(row)
    return tuple(changes)


def _state(
    known: KeyState | None, named: str, *, next_offset: int, in_force: str | None
) -> str:
    """Return the outcome of an entry of an earlier Plan."""
    if is_valid_for(known, next_offset):
        return OPEN if in_force == named else OVERTAKEN
    owner = None if known is None else known.owner
    return DONE if owner is not None and owner.client_id == named else OVERTAKEN


def _owners(world: World, group_id: str) -> dict[TopicPartition, str]:
    return {
        key.topic_partition: known.owner.client_id
        for key, known in world.claims(group_id)
        if known.owner is not None and key.topic not in RESERVED_TOPICS
    }
