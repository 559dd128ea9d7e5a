"""How a Plan changes the state (PROTOCOL 9.2).

Part of the rationalizer: only ``rationalizer.apply`` calls this. The state remembers
that there was a Plan. What it says is soft, and within bounds whatever is written.
"""

from collections.abc import Callable
from typing import Any

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.items import Planned, PlanNote
from kafka_marshal.protocol.layout import is_importing_group
from kafka_marshal.protocol.records import Plan
from kafka_marshal.protocol.state import (
    GroupState,
    Step,
    Transitions,
    WorldState,
)

PLAN_SLICES_MAX = 8
"""Most slices of a plan that members follow."""
PLAN_RECORDS_MAX = 1_024
"""Most slices of all groups that are remembered; those written first are dropped."""


def _plan(step: Step, record: Plan) -> Transitions:
    state = step.state
    config = state.config
    assert config is not None  # the record needs level 2
    group_id = record.group_id
    if home_partition(group_id, partition_count=config.partition_count) != (
        state.partition
    ):
        return (step.refused(judging.elsewhere(state)),)
    if is_importing_group(state, group_id):
        return (step.refused("importing"),)
    if record.follows != state.plan_generation(group_id):
        return (step.refused("plan_overtaken"),)
    if judging.lacks_room_for_group(state, group_id, config=config):
        return (step.refused("limits"),)
    group = state.groups.setdefault(group_id, GroupState())
    group.planned = Planned(record.follows + 1, state.now_ms)
    state.note_plan(state.now_ms)
    state.dirty[group_id] = None
    _note(state, record, offset=step.entry.offset)
    return (step.accepted("planned"),)


def _note(state: WorldState, record: Plan, *, offset: int) -> None:
    """Remember a slice after those before it; nothing if one is missing."""
    plans = state.soft.plans
    before = plans.pop(record.group_id, None)
    records: tuple[Plan, ...] = ()
    if record.number > 0:
        if before is None or not _follows(before, record):
            return
        records = before.records
    if record.slice_count > PLAN_SLICES_MAX or record.number >= record.slice_count:
        return
    plans[record.group_id] = PlanNote(
        records=(*records, record),
        generation=record.follows + 1,
        offset=offset,
        log_time_ms=state.now_ms,
    )
    count = sum(len(note.records) for note in plans.values())
    while count > PLAN_RECORDS_MAX:
        count -= len(plans.pop(next(iter(plans))).records)


def _follows(before: PlanNote, record: Plan) -> bool:
    """Return whether a record is the next slice of the same plan."""
    last = before.records[-1]
    return (
        record.number == len(before.records)
        and record.incarnation == last.incarnation
        and record.slice_count == last.slice_count
        and record.planner_version == last.planner_version
        and record.input_digest == last.input_digest
        and record.vector == last.vector
    )


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {Plan: _plan}
"""How a Plan is folded."""
