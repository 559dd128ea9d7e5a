"""Broken variants of the fold, planted to prove that the tests here detect mistakes.

The twin must catch each of them on random logs, and Hypothesis most of them by its own
search in the state machine.
"""

import random

import layoutvariants
import pytest
import variants
from author import write_log
from handoffmodel import (
    keep_the_offer_of_a_claim,
    ready_for_any_epoch,
    refuse_claims_of_what_is_offered,
    release_any_epoch,
)
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from logkit import Log, beat, messages
from test_machine import Fold
from twins import compare, compare_resized

from kafka_marshal.protocol import (
    fold_groups,
    fold_keys,
    fold_positions,
    judging,
    rationalizer,
)
from kafka_marshal.protocol import state as state_of_the_log
from kafka_marshal.protocol.hashing import PLANNER_TOPIC
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import SECOND_LEVEL, ResolvePosition
from kafka_marshal.protocol.state import KeyState, Owner, WorldState

LOGS_MAX = 150
# Hypothesis draws constants from the imported modules, so its first failure differs
# from run to run; the search ends there, without shrinking.
FIND = settings(
    max_examples=5000, stateful_step_count=40, phases=[Phase.generate], database=None
)


def no_epoch_check(monkeypatch):
    """Heartbeats are accepted under any epoch."""
    variants.drop_refusal(monkeypatch, judging, "mismatch", reason="old_epoch")


def renew_while_paused(monkeypatch):
    """A heartbeat renews although its group is paused."""

    def renewal(state, key):
        return state.config.heartbeat_interval_ms

    monkeypatch.setattr(fold_keys, "_renewal", renewal)


def grant_the_last_offset_again(monkeypatch):
    """A grant may begin at the last granted offset."""
    head = KeyState.next_unclaimed

    def next_unclaimed(known):
        unclaimed = head(known)
        is_granted = known.granted is not None and unclaimed == known.granted
        return unclaimed - 1 if is_granted and unclaimed else unclaimed

    monkeypatch.setattr(KeyState, "next_unclaimed", next_unclaimed)


def restart_by_a_bare_heartbeat(monkeypatch):
    """A heartbeat of the same client_id counts as a restart."""
    judge = judging.mismatch

    def mismatch(state, record, *, key):
        known = state.keys.get(key)
        if (
            known is not None
            and known.owner is not None
            and known.owner.client_id == record.client_id
            and known.epoch == record.epoch
            and known.freshness(state.now_ms) is Freshness.FRESH
        ):
            known.owner = Owner(record.client_id, record.incarnation)
            return None
        return judge(state, record, key=key)

    monkeypatch.setattr(judging, "mismatch", mismatch)


def stale_at_2h(monkeypatch):
    """An owner is stale at two intervals, not above."""
    judge = KeyState.freshness

    def freshness(known, log_time_ms):
        return judge(known, log_time_ms + 1)

    monkeypatch.setattr(KeyState, "freshness", freshness)


def revive_an_operation_that_is_over(monkeypatch):
    """A record of an ended operation is applied again."""
    monkeypatch.setattr(fold_groups, "OPS_REMEMBERED_MAX", 0)


def renew_to_an_earlier_end(monkeypatch):
    """A renewal may end a lease earlier."""

    def renew(known, now_ms, heartbeat_interval_ms):
        known.renewed_ms = now_ms
        known.heartbeat_interval_ms = heartbeat_interval_ms

    monkeypatch.setattr(KeyState, "renew", renew)


def show_the_era_in_force(monkeypatch):
    """Tokens have the era in force, not that of the claim."""

    def era_at(state, offset):
        del offset
        return None if state.config is None else state.config.era

    monkeypatch.setattr(WorldState, "era_at", era_at)


def unlock_when_the_pause_ends(monkeypatch):
    """Locks end with the pause of their operation."""
    end = fold_groups.move_pauses

    def move_pauses(state, offset):
        paused = {name for name, group in state.groups.items() if group.pause}
        end(state, offset)
        for group_id, op_id in list(state.locked):
            group = state.groups.get(group_id)
            if group_id in paused and (group is None or group.pause is None):
                for key in state.locked.pop((group_id, op_id)):
                    state.keys[key].lock = None

    monkeypatch.setattr(fold_groups, "move_pauses", move_pauses)


def stage_another_plan(monkeypatch):
    """A Stage of the same operation may have another digest or position."""
    variants.drop_refusal(
        monkeypatch, fold_positions, "_refusal", reason="plan_mismatch"
    )


def obey_any_resolve_at_home(monkeypatch):
    """The home accepts a Resolve of an operation that it has not decided."""
    plain = fold_positions._resolve

    def resolve(step, record):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(fold_positions, "_is_home", lambda *_, **__: False)
            return plain(step, record)

    handler = (resolve, SECOND_LEVEL)
    monkeypatch.setitem(rationalizer._HANDLERS, ResolvePosition, handler)


def forget_what_was_resolved(monkeypatch):
    """An operation may pause and stage after its Resolve."""

    def end_operation(state, group_id, *, op_id, offset):
        del offset
        group = state.groups.get(group_id)
        if group is not None and group.pause and group.pause.op_id == op_id:
            group.pause = None

    monkeypatch.setattr(fold_positions, "end_operation", end_operation)


def fence_every_process_of_a_client(monkeypatch):
    """A fence excludes all processes of a client, not one."""

    def is_fenced(state, owner, *, group_id):
        return any(name[:2] == (group_id, owner[0]) for name in state.fences)

    monkeypatch.setattr(judging, "is_fenced", is_fenced)


def begin_though_cancelled(monkeypatch):
    """A cancelled pause stays scheduled."""
    monkeypatch.setattr(fold_groups, "_unschedule", lambda group, op_id: None)


def begin_one_entry_late(monkeypatch):
    """A scheduled pause begins one entry too late."""
    begin = fold_groups._begin

    def late(state, group_id, due):
        if due.begin_ms < state.append_time_ms:
            begin(state, group_id, due)

    monkeypatch.setattr(fold_groups, "_begin", late)


def pause_more_than_the_scope(monkeypatch):
    """A pause with a scope pauses the whole group."""

    def is_in_scope(scope, key):
        return key.topic != PLANNER_TOPIC

    monkeypatch.setattr(state_of_the_log, "is_in_scope", is_in_scope)


def renew_in_a_scope(monkeypatch):
    """A heartbeat renews a key in the scope of a pause."""
    plain = fold_keys._renewal

    def renewal(state, key):
        is_whole = state.active_pause(key.group_id) is not None
        interval_ms = state.config.heartbeat_interval_ms
        held = plain(state, key) is None and not fold_keys._is_owner_fenced(state, key)
        return interval_ms if held and not is_whole else plain(state, key)

    monkeypatch.setattr(fold_keys, "_renewal", renewal)


def change_a_scope(monkeypatch):
    """The open pause of an operation may get another scope."""
    plain = judging.judge_release_group

    def judge(state, record, *, config):
        reason = plain(state, record, config=config)
        group = state.groups.get(record.group_id)
        lasts = None if group is None else group.lasting(record.op_id)
        is_scoped = lasts is not None and lasts.scope is not None
        return None if reason == "busy" and is_scoped else reason

    monkeypatch.setattr(judging, "judge_release_group", judge)


def plan_without_follows(monkeypatch):
    """A Plan is accepted without regard to the Plan that it follows."""

    def generation(state, group_id):
        del state, group_id
        return Anything()

    monkeypatch.setattr(WorldState, "plan_generation", generation)


class Anything(int):
    """A number that is equal to every other."""

    __hash__ = int.__hash__

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


MUTANTS = [
    no_epoch_check,
    renew_while_paused,
    grant_the_last_offset_again,
    restart_by_a_bare_heartbeat,
    stale_at_2h,
    revive_an_operation_that_is_over,
    renew_to_an_earlier_end,
    show_the_era_in_force,
    variants.claim_a_locked_key,
    unlock_when_the_pause_ends,
    variants.stage_a_held_key,
    stage_another_plan,
    variants.decide_after_the_pause,
    obey_any_resolve_at_home,
    forget_what_was_resolved,
    variants.keep_granted,
    variants.renew_a_fenced_client,
    variants.claim_as_a_fenced_client,
    fence_every_process_of_a_client,
    variants.begin_over_another_operation,
    begin_though_cancelled,
    begin_one_entry_late,
    pause_more_than_the_scope,
    renew_in_a_scope,
    change_a_scope,
    plan_without_follows,
]


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_the_twin_catches_each_mutant(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare_many()


@pytest.mark.parametrize(
    "plant",
    [
        ready_for_any_epoch,
        release_any_epoch,
        refuse_claims_of_what_is_offered,
        keep_the_offer_of_a_claim,
    ],
)
def test_the_twin_catches_broken_handoffs(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare_many()


COUNTS = [
    layoutvariants.obey_a_late_beat,
    layoutvariants.claim_an_unknown_key_before_done,
    layoutvariants.obey_a_second_import,
    layoutvariants.keep_an_earlier_life,
    layoutvariants.claim_a_moving_key,
    layoutvariants.count_no_imports,
    layoutvariants.end_with_an_open_source,
    layoutvariants.fence_over_an_open_change,
    layoutvariants.pause_while_open,
    layoutvariants.fence_beside_a_pause,
    layoutvariants.obey_second_settings,
    layoutvariants.configure_before_done,
    layoutvariants.keep_settings_at_an_earlier_home,
]


@pytest.mark.parametrize("plant", COUNTS, ids=lambda plant: plant.__name__)
def test_the_twin_catches_broken_changes_of_the_partition_count(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare_many_resized()


def compare_many_resized():
    # Twice as many logs: locks and verdicts are rare while a change is open.
    for seed in range(2 * LOGS_MAX):
        compare_resized(seed)


def compare_many():
    for seed in range(LOGS_MAX):
        compare(random.Random(seed).choice)


# The state machine takes longest to find these; the twin needs a few logs.
RARE = {restart_by_a_bare_heartbeat, begin_one_entry_late, renew_in_a_scope}


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(each, marks=pytest.mark.proof if each in RARE else ())
        for each in MUTANTS
    ],
    ids=lambda plant: plant.__name__,
)
def test_the_state_machine_catches_each_mutant(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Fold, settings=FIND)


def test_overlapping_grants_show_the_mutant_without_the_twin(monkeypatch):
    grant_the_last_offset_again(monkeypatch)
    log = Log()
    epoch = log.claimed()
    log.append(messages(epoch, 0, 9))
    assert log.one(messages(epoch, 0, 9)).detail == {"first": 9, "last": 9}
    overlaps = sum(overlap_count(write_log(seed)) for seed in range(LOGS_MAX))
    assert overlaps > 0


def test_no_grants_overlap_without_the_mutant():
    assert sum(overlap_count(write_log(seed)) for seed in range(LOGS_MAX)) == 0


def overlap_count(entries):
    state, granted, found = WorldState(0), {}, 0
    for entry in entries:
        for one in apply(state, entry):
            if one.effect == "claimed" and state.keys[one.key].granted is None:
                granted.pop(one.key, None)
            if one.effect == "position_set":
                granted.pop(one.key, None)
            if one.effect == "granted":
                found += one.detail["first"] <= granted.get(one.key, -1)
                granted[one.key] = one.detail["last"]
    return found


def test_a_beat_of_an_earlier_epoch_renews_only_under_the_mutant(monkeypatch):
    log = Log()
    epoch = log.claimed()
    log.append(beat(epoch), after=1)
    assert log.outcome_of(beat(epoch - 1, 9)) == "old_epoch"
    no_epoch_check(monkeypatch)
    assert log.outcome_of(beat(epoch - 1, 9)) == "renewed"
