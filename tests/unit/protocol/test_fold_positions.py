"""Stage, Decide and Resolve of one coordinating partition (PROTOCOL 8.3 to 8.5)."""

import pytest
from logkit import (
    KEY,
    OP,
    START_MS,
    H,
    Log,
    decide,
    ident,
    layout_fence,
    messages,
    pause,
    release,
    resolve,
    stage,
)

from kafka_marshal.protocol.fold_positions import FOLDS
from kafka_marshal.protocol.records import KINDS, SECOND_LEVEL
from kafka_marshal.protocol.state import Previous
from kafka_marshal.protocol.types import Key

OTHER_OP, OTHER_PLAN = ident("other op"), ident("other plan")
SECOND = Key("g", "t", 1)


def free(*, granted=False, **settings):
    """Return a log with a key that was released at position 5, and an admin's pause."""
    log = Log(level=SECOND_LEVEL, **settings)
    epoch = log.claimed(topic_id=ident("topic"))
    if granted:
        log.append(messages(epoch, 0, 4))
    log.append(release(epoch, 5))
    assert log.outcome_of(pause(START_MS + 100 * H)) == "paused"
    return log


def staged(*, granted=False):
    log = free(granted=granted)
    assert log.outcome_of(stage((0, 2))) == "staged"
    return log


def decided(*, granted=False):
    log = staged(granted=granted)
    assert log.outcome_of(decide()) == "decided"
    return log


def test_this_module_folds_all_records_of_section_8():
    numbers = {kind.number for kind in KINDS if kind.record in FOLDS}
    assert numbers == {7, 8, 9}
    assert {kind.level for kind in KINDS if kind.record in FOLDS} == {SECOND_LEVEL}


# --- Stage


def of_another_topic(log):
    log.append(pause(0, seq=1))
    epoch = log.key().epoch
    log.append(release(log.claimed(topic_id=ident("newer"), expected=epoch), 5))
    log.append(pause(START_MS + 100 * H, op=OTHER_OP, seq=2))


@pytest.mark.parametrize(
    ("before", "record", "reason", "key"),
    [
        (None, stage((0, 2), op=OTHER_OP), "not_paused", None),
        (lambda log: log.append(pause(0, seq=1)), stage((0, 2)), "op_over", None),
        (None, stage((0, 2), (3, 2)), "unknown_key", Key("g", "t", 3)),
        (None, stage((0, 2), topic_id=ident("newer")), "cas", KEY),
        (
            of_another_topic,
            stage((0, 2), topic_id=ident("topic"), op=OTHER_OP),
            "old_topic",
            KEY,
        ),
        (
            lambda log: log.append(stage((0, 2))),
            stage((0, 2), plan=OTHER_PLAN),
            "plan_mismatch",
            KEY,
        ),
        (
            lambda log: log.append(stage((0, 2))),
            stage((0, 3)),
            "plan_mismatch",
            KEY,
        ),
    ],
)
def test_a_stage_is_refused_with_its_reason_and_the_key(before, record, reason, key):
    log = free()
    if before is not None:
        before(log)
    transition = log.one(record)
    assert (transition.outcome, transition.reason) == ("refused", reason)
    assert transition.key == key


def test_a_lock_outlives_the_pause_and_refuses_another_operation():
    log = staged()
    log.append(pause(0, seq=1))
    log.append(pause(START_MS + 100 * H, op=OTHER_OP, seq=2))
    refused = log.one(stage((0, 9), op=OTHER_OP))
    assert (refused.reason, refused.key) == ("locked", KEY)
    assert log.outcome_of(resolve(commit=False, op=OTHER_OP)) == "resolved"
    assert log.key().lock is not None


def test_a_stage_of_another_partition_is_refused():
    log = Log(level=SECOND_LEVEL, k=50)
    refused = log.one(stage((0, 2)))
    assert refused.reason == "wrong_partition"


def test_locks_are_limited():
    log = Log(level=SECOND_LEVEL, locks=1)
    for key in (KEY, SECOND):
        log.append(release(log.claimed(key=key), key=key))
    log.append(pause(START_MS + 100 * H))
    assert log.outcome_of(stage((0, 2), (1, 2))) == "limits"
    assert log.outcome_of(stage((0, 2))) == "staged"
    assert log.outcome_of(stage((1, 2))) == "limits"
    assert log.outcome_of(stage((0, 2))) == "staged"


def test_a_silent_locked_key_is_not_dropped():
    log = free(forget_ms=10)
    log.append(stage((0, 2)))
    log.append(b"", after=20)
    log.append(b"", after=20)
    assert KEY in log.state.keys
    log.append(resolve(commit=False), after=20)
    log.append(b"", after=20)
    assert KEY not in log.state.keys


# --- Decide


def test_the_first_of_two_decides_counts():
    log = decided()
    first = log.state.groups["g"].verdict
    assert log.outcome_of(decide()) == "decided"
    assert log.outcome_of(decide(key_count=2)) == "plan_mismatch"
    assert log.outcome_of(decide(plan=OTHER_PLAN)) == "plan_mismatch"
    assert log.state.groups["g"].verdict == first


def test_a_decide_outside_the_home_of_its_group_is_refused():
    log = Log(1, level=SECOND_LEVEL, k=2)
    assert log.outcome_of(decide(group="a")) == "wrong_partition"
    home = Log(0, level=SECOND_LEVEL, k=2)
    assert home.outcome_of(decide(group="a")) == "not_paused"


def test_an_unresolved_verdict_refuses_decides_of_other_operations():
    log = decided()
    log.append(pause(0, seq=1))
    log.append(pause(START_MS + 100 * H, op=OTHER_OP, seq=2))
    assert log.outcome_of(decide(op=OTHER_OP)) == "busy"
    assert log.outcome_of(resolve(commit=True)) == "position_set"
    assert log.outcome_of(decide(op=OTHER_OP)) == "decided"


# --- Resolve


@pytest.mark.parametrize("commit", [True, False])
def test_only_a_commit_clears_the_epoch_that_the_next_claim_follows(commit):
    """The next owner starts at the set position, not where the last one stopped."""
    log = decided() if commit else staged()
    before = log.key().epoch
    log.append(resolve(commit=commit))
    log.claimed("c2")
    assert log.state.soft.notes[KEY].follows == (None if commit else before)


def test_a_commit_sets_the_position_and_the_granted_offset():
    log = decided(granted=True)
    log.append(resolve(commit=True))
    known = log.key()
    assert (known.position, known.granted) == (2, 2)
    assert known.previous == Previous(OP, 5, 5)
    epoch = log.claimed("c2")
    granted = log.one(messages(epoch, 0, 9, client="c2"))
    assert granted.detail == {"first": 2, "last": 9}


@pytest.mark.parametrize("commit", [True, False])
def test_outside_the_home_the_first_resolve_takes_effect(commit):
    log = Log(1, level=SECOND_LEVEL, k=2)
    assert log.outcome_of(resolve(commit=commit, group="a")) == "resolved"
    assert log.outcome_of(resolve(commit=not commit, group="a")) == "op_over"
    assert log.outcome_of(pause(START_MS + H, group="a")) == "op_over"


def test_a_lock_that_outlives_its_pause_can_be_aborted():
    log = staged()
    log.append(pause(0, seq=1))
    assert log.outcome_of(resolve(commit=True)) == "undecided"
    assert log.outcome_of(resolve(commit=False)) == "unlocked"
    assert log.state.groups["g"].over == ((log.state.groups["g"].over[0][0], OP),)


def test_a_resolve_of_a_new_group_beyond_the_limit_is_refused():
    log = free(groups=1)
    assert log.outcome_of(resolve(commit=False, group="h")) == "limits"
    assert "h" not in log.state.groups


def test_a_new_topic_id_clears_the_previous_position():
    log = decided()
    log.append(resolve(commit=True))
    epoch = log.key().epoch
    log.claimed("c2", topic_id=ident("newer"), expected=epoch)
    assert log.key().previous is None


# --- while the partition count changes


def test_a_fence_refuses_a_stage_and_lets_a_set_position_be_resolved():
    """Its pause had expired in partition 0, where the fence was written first."""
    log = Log(1, k=2, level=2)
    epoch = log.claimed()
    log.append(release(epoch))
    log.append(pause(START_MS + 9))
    log.append(stage((0, 5)))
    log.append(layout_fence(4, 2), after=10)
    assert log.outcome_of(stage((0, 5))) == "moving"
    assert log.outcome_of(resolve(commit=True)) == "position_set"
    assert log.key().position == 5
