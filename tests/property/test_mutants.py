"""Broken variants of the fold, planted: what the tests here are worth.

Each is a mistake that somebody might make, or that the source of the protocol
made (PROTOCOL 11, the end); each must be caught by the twin on random logs and by
Hypothesis on its own way.
"""

import random

import pytest
import variants
from author import write_log
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from logkit import Log, beat, messages
from test_machine import Fold
from twins import compare

from kafka_marshal.protocol import (
    fold_groups,
    fold_keys,
    fold_positions,
    judging,
    rationalizer,
)
from kafka_marshal.protocol.lease import Freshness
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import POSITION_LEVEL, ResolvePosition
from kafka_marshal.protocol.state import KeyState, Owner, WorldState

LOGS_MAX = 150
FIND = settings(
    max_examples=1000, stateful_step_count=40, phases=[Phase.generate], database=None
)


def no_epoch_check(monkeypatch):
    judge = judging.mismatch

    def mismatch(state, record, *, key):
        reason = judge(state, record, key=key)
        return None if reason == "old_epoch" else reason

    monkeypatch.setattr(judging, "mismatch", mismatch)


def renew_while_paused(monkeypatch):
    def renewal(state, key):
        return state.config.heartbeat_interval_ms

    monkeypatch.setattr(fold_keys, "_renewal", renewal)


def grant_the_last_offset_again(monkeypatch):
    head = KeyState.next_unclaimed

    def next_unclaimed(known):
        unclaimed = head(known)
        is_granted = known.granted is not None and unclaimed == known.granted
        return unclaimed - 1 if is_granted and unclaimed else unclaimed

    monkeypatch.setattr(KeyState, "next_unclaimed", next_unclaimed)


def restart_by_a_bare_heartbeat(monkeypatch):
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
    judge = KeyState.freshness

    def freshness(known, log_time_ms):
        return judge(known, log_time_ms + 1)

    monkeypatch.setattr(KeyState, "freshness", freshness)


def revive_an_operation_that_is_over(monkeypatch):
    monkeypatch.setattr(fold_groups, "OPS_REMEMBERED_MAX", 0)


def renew_to_an_earlier_end(monkeypatch):
    def renew(known, now_ms, heartbeat_interval_ms):
        known.renewed_ms = now_ms
        known.heartbeat_interval_ms = heartbeat_interval_ms

    monkeypatch.setattr(KeyState, "renew", renew)


def show_the_era_in_force(monkeypatch):
    def era_at(state, offset):
        del offset
        return None if state.config is None else state.config.era

    monkeypatch.setattr(WorldState, "era_at", era_at)


def claim_a_locked_key(monkeypatch):
    judge = judging._judge_known

    def judge_known(state, known, record):
        lock, known.lock = known.lock, None
        try:
            return judge(state, known, record)
        finally:
            known.lock = lock

    monkeypatch.setattr(judging, "_judge_known", judge_known)


def unlock_when_the_pause_ends(monkeypatch):
    end = fold_groups.end_pauses

    def end_pauses(state, offset):
        paused = {name for name, group in state.groups.items() if group.pause}
        end(state, offset)
        for group_id, op_id in list(state.locked):
            group = state.groups.get(group_id)
            if group_id in paused and (group is None or group.pause is None):
                for key in state.locked.pop((group_id, op_id)):
                    state.keys[key].lock = None

    monkeypatch.setattr(fold_groups, "end_pauses", end_pauses)


def stage_from_an_owner(monkeypatch):
    judge = fold_positions._refusal

    def refusal(state, key, *, lock):
        reason = judge(state, key, lock=lock)
        return None if reason == "held" else reason

    monkeypatch.setattr(fold_positions, "_refusal", refusal)


def stage_another_plan(monkeypatch):
    judge = fold_positions._refusal

    def refusal(state, key, *, lock):
        reason = judge(state, key, lock=lock)
        return None if reason == "plan_mismatch" else reason

    monkeypatch.setattr(fold_positions, "_refusal", refusal)


def decide_after_the_pause(monkeypatch):
    judge = fold_positions._not_paused

    def not_paused(state, group_id, *, op_id):
        reason = judge(state, group_id, op_id=op_id)
        group = state.groups.get(group_id)
        is_locked = (group_id, op_id) in state.locked
        return None if is_locked and group is not None else reason

    monkeypatch.setattr(fold_positions, "_not_paused", not_paused)


def obey_any_resolve_at_home(monkeypatch):
    plain = fold_positions._resolve

    def resolve(step, record):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(fold_positions, "_is_home", lambda *_, **__: False)
            return plain(step, record)

    handler = (resolve, POSITION_LEVEL)
    monkeypatch.setitem(rationalizer._HANDLERS, ResolvePosition, handler)


def forget_what_was_resolved(monkeypatch):
    def end_operation(state, group_id, *, op_id, offset):
        del offset
        group = state.groups.get(group_id)
        if group is not None and group.pause and group.pause.op_id == op_id:
            group.pause = None

    monkeypatch.setattr(fold_positions, "end_operation", end_operation)


def leave_grants_where_they_were(monkeypatch):
    unlock = fold_positions._unlock

    def keep(known, *, commits):
        granted = known.granted
        unlock(known, commits=commits)
        known.granted = granted

    monkeypatch.setattr(fold_positions, "_unlock", keep)


MUTANTS = [
    no_epoch_check,
    renew_while_paused,
    grant_the_last_offset_again,
    restart_by_a_bare_heartbeat,
    stale_at_2h,
    revive_an_operation_that_is_over,
    renew_to_an_earlier_end,
    show_the_era_in_force,
    claim_a_locked_key,
    unlock_when_the_pause_ends,
    stage_from_an_owner,
    stage_another_plan,
    decide_after_the_pause,
    obey_any_resolve_at_home,
    forget_what_was_resolved,
    leave_grants_where_they_were,
]


def test_the_table_lists_every_variant():
    planted = [plant.__name__ for plant in MUTANTS]
    assert list(variants.listed("broken folds")) == planted


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_the_twin_catches(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare_many()


def compare_many():
    for seed in range(LOGS_MAX):
        compare(random.Random(seed).choice)


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_the_machine_catches(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Fold, settings=FIND)


def test_the_law_of_grants_catches_without_a_twin(monkeypatch):
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


def test_a_former_claim_beats_under_the_mutant_only(monkeypatch):
    log = Log()
    epoch = log.claimed()
    log.append(beat(epoch), after=1)
    assert log.outcome_of(beat(epoch - 1, 9)) == "old_epoch"
    no_epoch_check(monkeypatch)
    assert log.outcome_of(beat(epoch - 1, 9)) == "renewed"
