"""Stage, Decide and Resolve of one coordinating partition (PROTOCOL 8.3 to 8.5)."""

import pytest
from logkit import (
    KEY,
    LOCK,
    OP,
    PLAN,
    START_MS,
    H,
    Log,
    beat,
    claim,
    decide,
    forgetting,
    ident,
    layout_done,
    layout_fence,
    layout_final,
    layout_import,
    messages,
    pause,
    release,
    resolve,
    stage,
)

from kafka_marshal.protocol.fold_positions import FOLDS
from kafka_marshal.protocol.items import Verdict
from kafka_marshal.protocol.records import KINDS, SECOND_LEVEL, Resume
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
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


def effects(transitions):
    return [(each.effect or each.reason, each.key) for each in transitions]


def test_each_record_of_section_8_is_folded_here():
    numbers = {kind.number for kind in KINDS if kind.record in FOLDS}
    assert numbers == {7, 8, 9}
    assert {kind.level for kind in KINDS if kind.record in FOLDS} == {SECOND_LEVEL}


@pytest.mark.parametrize("record", [stage((0, 2)), decide(), resolve(commit=True)])
def test_a_topic_of_an_earlier_level_ignores_it(record):
    assert Log().outcome_of(record) == "level"


@pytest.mark.parametrize("fold", FOLDS.values())
def test_nothing_is_set_before_a_config(fold):
    log = Log(configured=False)
    for record in (stage((0, 2)), decide(), resolve(commit=False)):
        # Level 1 is in force until a Config says otherwise.
        assert log.outcome_of(record) == "level"


# --- Stage


def test_a_staged_key_is_locked_and_owned_by_nobody():
    log = free()
    transition = log.one(stage((0, 2)))
    assert (transition.effect, transition.key) == ("staged", KEY)
    assert transition.detail == {"position": 2}
    known = log.key()
    assert (known.owner, known.handoff, known.position) == (None, None, 5)
    assert known.lock == LOCK._replace(position=2)
    assert log.state.locked == {("g", OP): {KEY: None}}


def test_each_key_of_a_stage_has_its_transition():
    log = Log(level=SECOND_LEVEL)
    log.append(release(log.claimed()))
    log.append(release(log.claimed(key=SECOND), key=SECOND))
    log.append(pause(START_MS + 100 * H))
    transitions = log.append(stage((1, 7), (0, 2)))
    assert effects(transitions) == [("staged", SECOND), ("staged", KEY)]


def test_an_owner_that_is_stale_loses_the_key():
    log = Log(level=SECOND_LEVEL)
    epoch = log.claimed()
    log.append(pause(START_MS + 100 * H))
    refused = log.one(stage((0, 2)), after=2 * H)
    assert (refused.reason, refused.detail) == ("held", {"remaining_ms": 1})
    assert log.outcome_of(stage((0, 2)), after=1) == "staged"
    assert log.outcome_of(beat(epoch, 9)) == "not_owner"
    assert log.outcome_of(messages(epoch, 0, 9)) == "not_owner"
    past = Resume(ident("c1"), epoch, bytes(16))
    resumed = claim(inc=ident("again"), resume=past)
    assert log.outcome_of(resumed) == "paused"


def test_a_repeat_changes_nothing():
    log = staged()
    before = to_bytes(log.state)
    assert log.outcome_of(stage((0, 2)), offset=log.state.next_offset - 0) == "staged"
    log.state.next_offset -= 1
    assert to_bytes(log.state) == before


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
def test_a_stage_is_refused(before, record, reason, key):
    log = free()
    if before is not None:
        before(log)
    transition = log.one(record)
    assert (transition.outcome, transition.reason) == ("refused", reason)
    assert transition.key == key


def test_a_lock_of_another_operation_is_respected_after_its_pause():
    log = staged()
    log.append(pause(0, seq=1))
    log.append(pause(START_MS + 100 * H, op=OTHER_OP, seq=2))
    refused = log.one(stage((0, 9), op=OTHER_OP))
    assert (refused.reason, refused.key) == ("locked", KEY)
    assert log.outcome_of(resolve(commit=False, op=OTHER_OP)) == "resolved"
    assert log.key().lock is not None


def test_the_first_refusal_of_the_clause_is_given_whichever_key_it_is_of():
    log = Log(level=SECOND_LEVEL)
    log.claimed(topic_id=ident("topic"))
    log.append(pause(START_MS + 100 * H))
    assert log.one(stage((0, 2), topic_id=ident("newer"))).reason == "cas"
    both = log.one(stage((0, 2), (3, 2), topic_id=ident("newer")))
    assert (both.reason, both.key) == ("unknown_key", Key("g", "t", 3))
    assert log.key().lock is None


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


def test_a_locked_key_can_be_neither_claimed_nor_forgotten():
    log = staged()
    epoch = log.key().epoch
    log.append(pause(0, seq=1))
    assert log.outcome_of(claim("c2")) == "locked"
    assert log.outcome_of(forgetting(epoch)) == "locked"


def test_silence_does_not_drop_a_locked_key():
    log = free(forget_ms=10)
    log.append(stage((0, 2)))
    log.append(b"", after=20)
    log.append(b"", after=20)
    assert KEY in log.state.keys
    log.append(resolve(commit=False), after=20)
    log.append(b"", after=20)
    assert KEY not in log.state.keys


# --- Decide


def test_the_verdict_is_kept_on_the_home():
    log = decided()
    verdict = Verdict(OP, PLAN, 1, log.state.next_offset - 1, is_resolved=False)
    assert log.state.groups["g"].verdict == log.state.groups["g"].unresolved == verdict
    log.append(b"", after=200 * H)
    assert log.state.active_pause("g") is None
    assert log.state.groups["g"].unresolved == verdict


def test_the_first_of_two_decides_counts():
    log = decided()
    first = log.state.groups["g"].verdict
    assert log.outcome_of(decide()) == "decided"
    assert log.outcome_of(decide(key_count=2)) == "plan_mismatch"
    assert log.outcome_of(decide(plan=OTHER_PLAN)) == "plan_mismatch"
    assert log.state.groups["g"].verdict == first


@pytest.mark.parametrize(
    ("before", "record", "reason"),
    [
        (None, decide(op=OTHER_OP), "not_paused"),
        (lambda log: log.append(pause(0, seq=1)), decide(), "op_over"),
    ],
)
def test_a_decide_is_refused(before, record, reason):
    log = staged()
    if before is not None:
        before(log)
    assert log.outcome_of(record) == reason
    assert log.state.groups["g"].verdict is None


def test_a_decide_elsewhere_than_at_home_is_refused():
    log = Log(1, level=SECOND_LEVEL, k=2)
    assert log.outcome_of(decide(group="a")) == "wrong_partition"
    home = Log(0, level=SECOND_LEVEL, k=2)
    assert home.outcome_of(decide(group="a")) == "not_paused"


def test_a_verdict_that_is_unresolved_keeps_others_back():
    log = decided()
    log.append(pause(0, seq=1))
    log.append(pause(START_MS + 100 * H, op=OTHER_OP, seq=2))
    assert log.outcome_of(decide(op=OTHER_OP)) == "busy"
    assert log.outcome_of(resolve(commit=True)) == "position_set"
    assert log.outcome_of(decide(op=OTHER_OP)) == "decided"


# --- Resolve


def test_a_commit_sets_the_position_and_keeps_the_old_one():
    log = decided()
    epoch = log.key().epoch
    transition = log.one(resolve(commit=True))
    assert (transition.effect, transition.key) == ("position_set", KEY)
    assert transition.detail == {"position": 2}
    known = log.key()
    assert (known.position, known.granted, known.lock) == (2, None, None)
    assert (known.previous, known.epoch) == (Previous(OP, 5, None), epoch)
    group = log.state.groups["g"]
    assert (group.pause, group.unresolved) == (None, None)
    assert group.verdict.is_resolved
    assert group.is_over(OP)
    assert log.state.locked == {}
    assert log.claimed("c2") > epoch


@pytest.mark.parametrize("commit", [True, False])
def test_a_claim_after_a_commit_follows_no_other(commit):
    """Its start is the new position, whatever the owner before had reached."""
    log = decided() if commit else staged()
    before = log.key().epoch
    log.append(resolve(commit=commit))
    log.claimed("c2")
    assert log.state.soft.notes[KEY].follows == (None if commit else before)


def test_a_commit_moves_grants_too():
    log = decided(granted=True)
    log.append(resolve(commit=True))
    known = log.key()
    assert (known.position, known.granted) == (2, 2)
    assert known.previous == Previous(OP, 5, 5)
    epoch = log.claimed("c2")
    granted = log.one(messages(epoch, 0, 9, client="c2"))
    assert granted.detail == {"first": 2, "last": 9}


def test_a_commit_names_the_topic_of_a_key_without_one():
    log = Log(level=SECOND_LEVEL)
    log.append(release(log.claimed()))
    log.append(pause(START_MS + 100 * H))
    log.append(stage((0, 2), topic_id=ident("topic")))
    assert log.key().topic_id is None
    log.append(decide())
    log.append(resolve(commit=True))
    assert log.key().topic_id == ident("topic")


def test_an_abort_leaves_the_position():
    log = staged(granted=True)
    transition = log.one(resolve(commit=False))
    assert (transition.effect, transition.detail) == ("unlocked", {"position": 5})
    known = log.key()
    assert (known.position, known.granted) == (5, 5)
    assert (known.lock, known.previous) == (None, None)
    assert log.state.active_pause("g") is None
    assert log.outcome_of(stage((0, 2))) == "op_over"
    assert log.outcome_of(decide()) == "op_over"


@pytest.mark.parametrize(
    ("begin", "commit", "reason"),
    [(staged, True, "undecided"), (decided, False, "resolve_contradicts")],
)
def test_at_home_only_what_was_decided_is_obeyed(begin, commit, reason):
    log = begin()
    before = log.key().lock
    assert log.outcome_of(resolve(commit=commit)) == reason
    assert log.key().lock == before


@pytest.mark.parametrize("commit", [True, False])
def test_elsewhere_the_first_resolve_is_obeyed(commit):
    log = Log(1, level=SECOND_LEVEL, k=2)
    assert log.outcome_of(resolve(commit=commit, group="a")) == "resolved"
    assert log.outcome_of(resolve(commit=not commit, group="a")) == "op_over"
    assert log.outcome_of(pause(START_MS + H, group="a")) == "op_over"


def test_a_resolve_of_what_is_over_is_ignored():
    log = decided()
    assert log.outcome_of(resolve(commit=True)) == "position_set"
    before = digest(log.state)
    for commit in (True, False):
        transition = log.one(resolve(commit=commit))
        assert (transition.outcome, transition.reason) == ("ignored", "op_over")
    log.state.next_offset -= 2
    assert digest(log.state) == before


def test_locks_that_outlive_the_pause_are_resolved():
    log = staged()
    log.append(pause(0, seq=1))
    assert log.outcome_of(resolve(commit=True)) == "undecided"
    assert log.outcome_of(resolve(commit=False)) == "unlocked"
    assert log.state.groups["g"].over == ((log.state.groups["g"].over[0][0], OP),)


def test_a_pause_of_another_operation_goes_on():
    log = decided()
    log.append(pause(0, seq=1))
    log.append(pause(START_MS + 100 * H, op=OTHER_OP, seq=2))
    assert log.outcome_of(resolve(commit=True)) == "position_set"
    assert log.state.active_pause("g").op_id == OTHER_OP


def test_two_operations_of_a_group_can_end_at_one_entry():
    log = free()
    until_ms = log.state.active_pause("g").until_ms
    # The pause of one lapses with the very record that ends the other.
    log.append(resolve(commit=False, op=OTHER_OP), at=until_ms)
    group = log.state.groups["g"]
    assert [op for _, op in group.over] == [OP, OTHER_OP]
    assert from_bytes(to_bytes(log.state)).over == log.state.over


def test_an_operation_with_the_same_id_in_another_group_is_another():
    log = staged()
    assert log.outcome_of(resolve(commit=False, group="h")) == "resolved"
    assert log.key().lock is not None


def test_a_resolve_of_an_unknown_group_needs_room():
    log = free(groups=1)
    assert log.outcome_of(resolve(commit=False, group="h")) == "limits"
    assert "h" not in log.state.groups


def test_a_group_without_keys_is_kept_until_its_verdict_is_resolved():
    log = free(forget_ms=10, operations=1)
    assert log.outcome_of(decide()) == "decided"
    log.append(b"", after=200 * H)
    log.append(b"", after=20)
    assert KEY not in log.state.keys
    log.append(pause(0, group="h", seq=5))
    assert log.outcome_of(resolve(commit=False, op=OTHER_OP, group="h")) == "resolved"
    assert log.state.groups["g"].unresolved is not None
    assert log.outcome_of(resolve(commit=True)) == "resolved"
    assert log.outcome_of(resolve(commit=False, op=PLAN, group="h")) == "resolved"
    assert "g" not in log.state.groups


def test_a_topic_that_was_created_again_cannot_be_set_back():
    log = decided()
    log.append(resolve(commit=True))
    epoch = log.key().epoch
    log.claimed("c2", topic_id=ident("newer"), expected=epoch)
    assert log.key().previous is None


# --- canonical bytes


@pytest.mark.parametrize("begin", [staged, decided])
def test_a_state_in_the_middle_survives_its_bytes(begin):
    log = begin(granted=True)
    again = from_bytes(to_bytes(log.state))
    assert again == log.state
    assert again.locked == log.state.locked
    assert digest(again) == digest(log.state)
    record = resolve(commit=begin is decided)
    entry_of = log.append(record)
    assert effects(entry_of) in (
        [("position_set", KEY)],
        [("unlocked", KEY)],
    )


def test_a_group_without_a_verdict_has_the_form_it_had():
    log = free()
    row = from_bytes(to_bytes(log.state))
    assert row.groups["g"].verdict is None
    assert b"decided" not in to_bytes(log.state)


def test_a_set_position_ends_where_it_began_and_stages_no_moving_key():
    """Its pause ran out in partition 0, which the fence went to first."""
    log = Log(1, k=2, level=2)
    epoch = log.claimed()
    log.append(release(epoch))
    log.append(pause(START_MS + 9))
    log.append(stage((0, 5)))
    log.append(layout_fence(4, 2), after=10)
    assert log.outcome_of(stage((0, 5))) == "moving"
    assert log.outcome_of(resolve(commit=True)) == "position_set"
    assert log.key().position == 5


def test_an_imported_key_is_staged():
    log = Log(1, configured=False)
    log.append(layout_fence(2))
    log.append(layout_import())
    log.append(layout_done())
    log.append(layout_final())
    log.append(pause(START_MS + 9))
    assert log.outcome_of(stage((0, 5))) == "staged"
    assert log.state.locked == {("g", OP): {KEY: None}}
