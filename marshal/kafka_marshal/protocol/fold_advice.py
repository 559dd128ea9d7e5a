"""How Plans, offers and directives change the state (PROTOCOL 9.2, 9.4, 9.7).

Part of the rationalizer: only ``rationalizer.apply`` calls these. These records change
who should have a key, never who may claim it: they can cost balance and time, never
safety. The content of Plans is soft state, bounded whatever is written; hard state has
only the number of Plans and the time of the last one.
"""

from collections.abc import Callable
from typing import Any

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.fold_groups import end_operation, install_directive
from kafka_marshal.protocol.items import Offer, Planned, PlanNote, StandingDirective
from kafka_marshal.protocol.records import Directive, HandoffOffer, HandoffReady, Plan
from kafka_marshal.protocol.state import (
    GroupState,
    Step,
    Transitions,
    WorldState,
)
from kafka_marshal.protocol.types import OFFSET_MAX, Key

WITHIN_MS_MAX = 3_600_000
"""Maximum duration of an offer, in log time."""
PLAN_SLICES_MAX = 8
"""Maximum number of slices of a plan that members follow."""
PLAN_RECORDS_MAX = 1_024
"""Maximum number of slices kept, of all groups; the oldest plans are dropped first."""


# --- Plans


def _plan(step: Step, record: Plan) -> Transitions:
    state = step.state
    group_id = record.group_id
    is_next = record.follows == state.plan_generation(group_id)
    reason = judging.judge_next(
        state, group_id, is_next=is_next, overtaken="plan_overtaken"
    )
    if reason is not None:
        return (step.refused(reason),)
    group = state.groups.setdefault(group_id, GroupState())
    group.planned = Planned(record.follows + 1, state.now_ms)
    state.note_plan(state.now_ms)
    state.dirty[group_id] = None
    _note(state, record, offset=step.entry.offset)
    return (step.accepted("planned"),)


def _note(state: WorldState, record: Plan, *, offset: int) -> None:
    """Add a slice to the earlier slices of its plan; drop all if one is missing."""
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


# --- handoffs


def _offer(step: Step, record: HandoffOffer) -> Transitions:
    state = step.state
    key = Key(record.group_id, record.topic, record.partition)
    stray = judging.mismatch(state, record, key=key)
    if stray is not None:
        return (step.ignored(stray, key),)
    reason = judging.judge_offer(state, record, key=key)
    if reason is not None:
        return (step.refused(reason, key),)
    known = state.keys[key]
    known.active_ms = state.now_ms
    state.dirty[key] = None
    if record.successor is None:
        known.offer = None
        state.soft.offered_ms.pop(key, None)
        return (step.accepted("offer_withdrawn", key),)
    until_ms = min(state.now_ms + min(record.within_ms, WITHIN_MS_MAX), OFFSET_MAX)
    known.offer = Offer(record.successor, until_ms, step.entry.offset, None)
    state.soft.offered_ms[key] = (step.entry.offset, state.now_ms)
    return (step.accepted("offered", key),)


def _ready(step: Step, record: HandoffReady) -> Transitions:
    state = step.state
    key = Key(record.group_id, record.topic, record.partition)
    reason = judging.judge_ready(state, record, key=key)
    if reason is not None:
        return (step.refused(reason, key),)
    known = state.keys[key]
    assert known.offer is not None  # else it was refused
    known.offer = known.offer._replace(ready=record.incarnation)
    known.active_ms = state.now_ms
    state.dirty[key] = None
    return (step.accepted("ready", key),)


# --- directives


def _directive(step: Step, record: Directive) -> Transitions:
    state = step.state
    config = state.config
    assert config is not None  # the record needs level 2
    reason = judging.judge_directive(state, record, config=config)
    if reason is not None:
        return (step.refused(reason),)
    group_id, op_id = record.group_id, record.op_id
    if record.msg_expire_time <= state.append_time_ms:
        end_operation(state, group_id, op_id=op_id, offset=step.entry.offset)
        return (step.accepted("directive_ended"),)
    longest_ms = state.append_time_ms + config.limit("max_pause_ms")
    standing = StandingDirective(
        op_id=op_id,
        client_id=record.client_id,
        incarnation=record.incarnation,
        seq=record.seq,
        until_ms=min(record.msg_expire_time, longest_ms),
        client=record.client,
        host=record.host,
        action=record.action,
    )
    install_directive(state, group_id, standing=standing)
    return (step.accepted("directed"),)


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {
    Plan: _plan,
    HandoffOffer: _offer,
    HandoffReady: _ready,
    Directive: _directive,
}
"""How each record is folded."""
