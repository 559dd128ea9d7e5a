"""PROTOCOL 8: set positions, as the fold judges them."""

from hashlib import blake2b

import msgspec
import pytest
from logkit import (
    KEY,
    OP,
    START_MS,
    H,
    Log,
    beat,
    claim,
    decide,
    forgetting,
    ident,
    messages,
    pause,
    release,
    resolve,
    resume,
    stage,
)

from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.types import Key

OTHER_OP = ident("other op")
SECOND = Key("g", "t", 1)
LONG_MS = 100 * H


def drained(*keys, granted=False, **settings):
    """Return a log with released keys at position 5, and the pause of an operation."""
    log = Log(level=2, **settings)
    for key in keys or (KEY,):
        epoch = log.claimed(key=key)
        if granted:
            log.append(messages(epoch, 0, 4, key=key))
        log.append(release(epoch, 5, key=key))
    log.append(pause(log.now_ms + LONG_MS))
    return log


def end_of(log, op=OP):
    """End the pause of an operation."""
    assert log.outcome_of(pause(0, op=op, seq=1)) == "unpaused"


def positions(log):
    return {key: known.position for key, known in log.state.keys.items()}


# --- 8.3 Stage ---


def test_8_3_a_lock_and_a_decide_carry_the_plan_digest():
    """The sender computes it as 8.3 states; the fold only compares it."""
    plan = sorted([["t", None, 1, 9], ["t", None, 0, 2]])
    made = blake2b(msgspec.msgpack.encode(plan), digest_size=16).digest()
    log = drained()
    assert log.outcome_of(stage((0, 2), plan=made)) == "staged"
    assert log.key().lock.plan_digest == made
    assert log.outcome_of(decide(2, plan=made)) == "decided"


def test_8_3_a_stage_locks_all_of_its_keys_or_none():
    log = drained(KEY, SECOND)
    log.append(pause(0, seq=1))
    log.claimed("c2", key=SECOND)
    log.append(pause(log.now_ms + LONG_MS, op=OTHER_OP))
    before = digest(log.state), log.state.next_offset
    refused = log.one(stage((0, 2), (1, 2), op=OTHER_OP))
    assert (refused.reason, refused.key) == ("held", SECOND)
    log.state.next_offset = before[1]
    assert digest(log.state) == before[0]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (stage((0, 2), (5, 1), op=OTHER_OP), "op_over"),
        (stage((0, 2), (5, 1), op=ident("third")), "not_paused"),
        (stage((0, 2), (5, 1), topic_id=ident("old")), "unknown_key"),
        (stage((0, 2), (1, 1), topic_id=ident("old")), "old_topic"),
        (stage((0, 2), (1, 1), topic_id=ident("else")), "cas"),
        (stage((0, 2), (1, 1), (2, 1), topic_id=ident("new")), "plan_mismatch"),
        (stage((1, 1), (2, 1), topic_id=ident("new")), "locked"),
        (stage((2, 1), (3, 1), topic_id=ident("new")), "held"),
        (stage((2, 1), topic_id=ident("new")), "limits"),
    ],
)
def test_8_3_a_stage_gets_the_first_reason_that_applies_to_any_key(record, reason):
    """A key later in the record may have a reason that is judged earlier."""
    assert crowded().outcome_of(record) == reason


def crowded():
    """Return a log whose keys refuse a Stage for different reasons.

    Key 0 is locked by this operation, 1 by another one, 2 is free, 3 has an owner.
    """
    log = Log(level=2, locks=2)
    keys = [Key("g", "t", number) for number in range(4)]
    for key in keys:
        epoch = log.claimed(key=key, topic_id=ident("old"))
        log.append(release(epoch, 5, key=key))
        renewed = log.claimed(key=key, topic_id=ident("new"), expected=epoch)
        if key != keys[3]:
            log.append(release(renewed, 5, key=key))
    log.append(pause(log.now_ms + LONG_MS, op=OTHER_OP))
    assert log.outcome_of(stage((1, 2), op=OTHER_OP)) == "staged"
    end_of(log, OTHER_OP)
    log.append(pause(log.now_ms + LONG_MS))
    assert log.outcome_of(stage((0, 2))) == "staged"
    return log


def test_8_3_a_stage_of_another_partition_is_refused():
    assert Log(level=2, k=50).outcome_of(stage((0, 2))) == "wrong_partition"


def test_8_3_a_locked_key_has_neither_owner_nor_handoff():
    log = Log(level=2)
    log.append(release(log.claimed(), 5, successor="c2"))
    log.append(pause(log.now_ms + LONG_MS))
    assert log.key().handoff is not None
    transition = log.one(stage((0, 2)), after=1)
    assert (transition.effect, transition.detail) == ("staged", {"position": 2})
    known = log.key()
    assert (known.owner, known.handoff, known.position) == (None, None, 5)
    assert known.active_ms == log.state.now_ms


def test_8_3_a_repeated_stage_leaves_the_lock_as_it_is():
    log = drained()
    log.append(stage((0, 2)))
    lock, active_ms = log.key().lock, log.key().active_ms
    assert log.outcome_of(stage((0, 2)), after=5) == "staged"
    assert (log.key().lock, log.key().active_ms) == (lock, active_ms)


def test_8_3_a_stage_is_refused_until_the_owner_is_stale():
    log = Log(level=2)
    epoch = log.claimed()
    log.append(pause(log.now_ms + LONG_MS))
    refused = log.one(stage((0, 2)), after=2 * H)
    assert (refused.reason, refused.detail) == ("held", {"remaining_ms": 1})
    assert log.outcome_of(stage((0, 2)), after=1) == "staged"
    assert log.outcome_of(beat(epoch)) == "not_owner"


def test_8_3_a_lock_outlasts_the_pause_of_its_operation():
    log = drained()
    log.append(stage((0, 2)))
    log.append(b"", after=LONG_MS)
    epoch = log.key().epoch
    assert log.state.active_pause("g") is None
    assert log.outcome_of(claim("c2")) == "locked"
    assert log.outcome_of(resume(epoch)) == "locked"
    assert log.outcome_of(forgetting(epoch)) == "locked"


def test_8_3_a_stage_of_a_forgotten_key_is_refused():
    log = drained()
    end_of(log)
    assert log.outcome_of(forgetting(log.key().epoch)) == "forgotten"
    log.append(pause(log.now_ms + LONG_MS, op=OTHER_OP))
    refused = log.one(stage((0, 2), op=OTHER_OP))
    assert (refused.reason, refused.key, refused.epoch) == ("unknown_key", KEY, None)


# --- 8.4 Decide ---


def test_8_4_a_decide_outside_the_home_is_refused():
    assert Log(1, level=2, k=2).outcome_of(decide(group="a")) == "wrong_partition"
    home = Log(0, level=2, k=2)
    home.append(pause(home.now_ms + LONG_MS, group="a"))
    assert home.outcome_of(decide(group="a")) == "decided"


def test_8_4_a_decide_needs_the_pause_of_its_operation():
    log = drained()
    assert log.outcome_of(decide(op=OTHER_OP)) == "not_paused"
    log.append(stage((0, 2)))
    assert log.outcome_of(decide(), after=LONG_MS) == "op_over"
    assert log.state.groups["g"].verdict is None


def test_8_4_a_decide_at_the_end_of_the_pause_is_refused():
    """A Decide a millisecond earlier is accepted."""
    for early_ms, outcome in ((1, "decided"), (0, "op_over")):
        log = drained()
        log.append(stage((0, 2)))
        assert log.outcome_of(decide(), after=LONG_MS - early_ms) == outcome


def test_8_4_an_unresolved_verdict_makes_the_next_decide_busy():
    log = drained()
    log.append(decide())
    end_of(log)
    log.append(pause(log.now_ms + LONG_MS, op=OTHER_OP))
    assert log.outcome_of(decide(op=OTHER_OP)) == "busy"
    log.append(resolve(commit=True))
    assert log.outcome_of(decide(op=OTHER_OP)) == "decided"
    assert log.state.groups["g"].verdict.op_id == OTHER_OP


def test_8_4_a_repeated_decide_changes_nothing_and_another_plan_is_refused():
    log = drained()
    log.append(decide(1))
    verdict = log.state.groups["g"].verdict
    assert log.outcome_of(decide(1)) == "decided"
    assert log.outcome_of(decide(2)) == "plan_mismatch"
    assert log.outcome_of(decide(1, plan=ident("else"))) == "plan_mismatch"
    assert log.state.groups["g"].verdict == verdict


def test_8_4_a_group_with_an_unresolved_verdict_is_not_dropped():
    log = drained(forget_ms=H, operations=1)
    log.append(decide())
    log.append(b"", after=LONG_MS)
    log.append(resolve(commit=False, op=OTHER_OP, group="h"))
    group = log.state.groups["g"]
    assert (group.key_count, group.pause, group.over) == (0, None, ())
    assert group.unresolved is not None
    assert log.outcome_of(resolve(commit=True)) == "resolved"
    log.append(resolve(commit=False, op=ident("third"), group="h"))
    assert "g" not in log.state.groups


# --- 8.5 Resolve ---


def test_8_5_a_resolve_of_an_operation_that_is_over_is_ignored():
    log = drained()
    log.append(stage((0, 2)))
    assert log.outcome_of(resolve(commit=False)) == "unlocked"
    for commit in (True, False):
        ignored = log.one(resolve(commit=commit))
        assert (ignored.outcome, ignored.reason) == ("ignored", "op_over")


def test_8_5_the_home_accepts_only_the_resolve_that_its_verdict_allows():
    log = drained()
    log.append(stage((0, 2)))
    assert log.outcome_of(resolve(commit=True)) == "undecided"
    log.append(decide())
    assert log.outcome_of(resolve(commit=False)) == "resolve_contradicts"
    assert log.outcome_of(resolve(commit=True)) == "position_set"
    assert log.state.groups["g"].verdict.is_resolved


def test_8_5_outside_the_home_the_first_resolve_counts():
    for commit in (True, False):
        log = Log(1, level=2, k=2)
        key = Key("g", "t", 0)  # its home is 0
        log.append(release(log.claimed(key=key), 5, key=key))
        log.append(pause(log.now_ms + LONG_MS))
        assert log.outcome_of(stage((0, 2))) == "staged"
        effect = "position_set" if commit else "unlocked"
        assert log.outcome_of(resolve(commit=commit)) == effect
        assert log.outcome_of(resolve(commit=not commit)) == "op_over"
        assert positions(log) == {key: 2 if commit else 5}


def test_8_5_an_abort_for_a_group_beyond_the_limit_is_refused():
    log = drained(groups=1)
    assert log.outcome_of(resolve(commit=True, group="h")) == "undecided"
    assert log.outcome_of(resolve(commit=False, group="h")) == "limits"


@pytest.mark.parametrize("granted", [True, False])
def test_8_5_a_commit_sets_the_staged_position_and_notes_the_previous(granted):
    log = drained(granted=granted)
    log.append(stage((0, 2), topic_id=ident("topic")))
    log.append(decide())
    transition = log.one(resolve(commit=True), after=7)
    assert (transition.effect, transition.detail) == ("position_set", {"position": 2})
    known = log.key()
    head = 5 if granted else None
    assert known.previous == (OP, 5, head)
    assert (known.position, known.granted) == (2, 2 if granted else None)
    assert (known.lock, known.topic_id) == (None, ident("topic"))
    assert known.active_ms == log.state.now_ms
    epoch = log.claimed("c2")
    again = log.one(messages(epoch, 2, 6, client="c2"))
    assert again.detail == {"first": 2, "last": 6}


def test_8_5_an_abort_leaves_the_key_as_it_was():
    log = drained(granted=True)
    before = (log.key().position, log.key().granted, log.key().topic_id)
    log.append(stage((0, 2), topic_id=ident("topic")))
    assert log.one(resolve(commit=False)).detail == {"position": 5}
    known = log.key()
    assert (known.position, known.granted, known.topic_id) == before
    assert (known.lock, known.previous) == (None, None)


@pytest.mark.parametrize("commit", [True, False])
def test_8_5_an_operation_that_was_resolved_cannot_begin_again(commit):
    log = drained()
    if commit:
        log.append(decide())
    log.append(resolve(commit=commit))
    assert log.state.active_pause("g") is None
    assert log.outcome_of(pause(log.now_ms + LONG_MS, seq=9)) == "op_over"
    assert log.outcome_of(stage((0, 2))) == "op_over"
    assert log.outcome_of(decide()) == "op_over"


def test_8_5_an_unknown_operation_is_over_after_its_resolve():
    log = Log(level=2)
    assert log.outcome_of(resolve(commit=False)) == "resolved"
    assert log.outcome_of(pause(log.now_ms + LONG_MS)) == "op_over"


def test_8_5_a_new_topic_id_clears_a_set_position_and_its_previous():
    """4.3: another topic_id clears previous."""
    log = drained()
    log.append(stage((0, 2), topic_id=ident("one")))
    log.append(decide())
    log.append(resolve(commit=True))
    epoch = log.claimed("c2")
    assert log.key().previous is not None
    log.append(release(epoch, client="c2"))
    log.claimed("c2", topic_id=ident("two"), expected=epoch)
    known = log.key()
    assert (known.previous, known.position) == (None, None)


# --- 11 ---


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("staged", [(KEY, SECOND), (KEY,)])
def test_8_5_all_keys_of_a_partition_move_or_none(commit, staged):
    """S8 within one partition, however often and late the records arrive."""
    log = drained(KEY, SECOND)
    stages = [stage((key.partition, 2)) for key in staged]
    for record in (*stages, *stages):
        assert log.outcome_of(record) == "staged"
    if commit:
        assert log.outcome_of(decide(len(staged))) == "decided"
    for decided in (not commit, commit, not commit, commit):
        log.append(resolve(commit=decided))
    for record in stages:
        assert log.outcome_of(record) == "op_over"
    assert log.state.locked == {}
    moved = {key for key, at in positions(log).items() if at == 2}
    assert moved == (set(staged) if commit else set())


def test_8_5_only_a_commit_lets_a_position_fall_within_an_epoch():
    """S10."""
    log = drained()
    epoch = log.key().epoch
    found = []
    for record in (stage((0, 2)), decide(), resolve(commit=True)):
        log.append(record)
        assert log.key().epoch == epoch
        found.append(log.key().position)
    assert found == [5, 5, 2]


@pytest.mark.parametrize("count", range(4))
def test_8_5_a_snapshot_within_an_operation_and_the_tail_give_the_whole(count):
    """7.4: locks, verdicts and previous are part of the canonical bytes."""
    records = [stage((0, 2)), decide(), resolve(commit=True), claim("c2")]
    log = drained(granted=True)
    for record in records[:count]:
        log.append(record)
    again = Log(level=2)
    again.state = from_bytes(to_bytes(log.state))
    for record in records[count:]:
        assert again.outcome_of(record) == log.outcome_of(record)
    assert to_bytes(again.state) == to_bytes(log.state)
    assert digest(again.state) == digest(log.state)


def test_8_5_at_level_1_records_of_a_set_position_are_ignored():
    """S6: a topic of level 1 works without section 8."""
    log = Log(level=1)
    log.append(release(log.claimed(), 5))
    log.append(pause(START_MS + LONG_MS))
    state = from_bytes(to_bytes(log.state))
    for record in (stage((0, 2)), decide(), resolve(commit=False)):
        ignored = log.one(record)
        assert (ignored.outcome, ignored.reason) == ("ignored", "level")
    log.state.next_offset = state.next_offset
    assert to_bytes(log.state) == to_bytes(state)
