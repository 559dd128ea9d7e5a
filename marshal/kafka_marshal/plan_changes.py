"""What changed since an earlier Plan of a group, from the log (PROTOCOL 9.2).

A Plan names only the keys that should change hands, so two Plans say little of each
other. What is compared is the intended owner of each partition: the member that the
Plan names, else the owner.
"""

from collections.abc import Callable, Mapping

import attrs

from kafka_marshal.errors import ClaimRejected, LogUnreadable
from kafka_marshal.plan_view import DONE, OPEN, PlanView
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.protocol.items import PlanNote
from kafka_marshal.protocol.plans import is_valid_for, standing_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal.views import LogScan, World, unknown_text

OVERTAKEN = "overtaken"


@attrs.frozen(kw_only=True)
class PlanChange:
    """One partition that an earlier Plan named, or that another member is to have now.

    Attributes:
        key: The partition.
        source: The member that was to have it by the earlier Plan, None = nobody.
        to: The member that is to have it now, None = nobody.
        holder: Who has it now, None = nobody.
        state: What became of the entry of the earlier Plan: ``done``: the named member
            has it by a claim since; ``open``: nobody has claimed it since, and the Plan
            in force names the same member; ``overtaken``: another member has claimed
            it, or the Plan in force does not name that member. None if it had no entry.
    """

    key: TopicPartition
    source: str | None
    to: str | None
    holder: str | None
    state: str | None


def find_plan(scan: LogScan, group_id: str, *, generation: int) -> PlanNote:
    """Return an earlier Plan of a group.

    Args:
        scan: The log of the group's home partition, of no other one.
        group_id: The group.
        generation: Generation of the Plan; in slices, that of any of them.

    Raises:
        ClaimRejected: The log has no whole Plan of this generation any more, or yet.
        LogUnreadable: The start of the log is gone, and it has no checkpoint.
    """
    ((partition, begun),) = scan.restore().items()
    if begun.is_log_start_missing:
        raise LogUnreadable(unknown_text([partition]))
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
            # The group was dropped meanwhile, and counts from 1 again.
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
        text = f"the log has no whole plan of group {group_id} any more"
    elif generation > whole[-1]:
        text = f"group {group_id} has no plan of generation {generation} yet; the last "
        text += f"one is {whole[-1]}"
    else:
        text = f"the log has no whole plan of generation {generation} of group "
        text += f"{group_id} any more; the oldest that it has is {whole[0]}"
    return ClaimRejected(
        f"{text}; see: marshal plan show {group_id}", reason="unknown_plan"
    )


def plan_changes(
    world: World,
    view: PlanView,
    *,
    since: PlanNote,
    past: Callable[[Mapping[int, int]], World],
) -> tuple[PlanChange, ...]:
    """Return what an earlier Plan named, and other intended owners that changed.

    Args:
        world: A view of now.
        view: The Plan in force, of the same view.
        since: The earlier Plan.
        past: Returns the world as of an offset of each coordinating partition.

    Raises:
        LogUnreadable: The log does not reach back so far.
    """
    standing = standing_of(since)
    if len(standing.vector) != len(world.partitions):
        raise LogUnreadable("the plan names other coordinating partitions than exist")
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
    """Return what became of an entry of an earlier Plan."""
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
