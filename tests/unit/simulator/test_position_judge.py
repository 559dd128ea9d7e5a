"""The judge of S8: an operation moves all its keys, or none."""

import pytest
from logkit import KEY, OP, beat, decide, resolve, stage, transition

from kafka_marshal.protocol.items import Verdict
from kafka_marshal.protocol.state import GroupState, WorldState
from kafka_marshal.protocol.types import Key
from simulator.checkers import Folded, Violation
from simulator.position_judge import PositionJudge, name_of, unresolved_in

SECOND = Key("g", "t", 1)
TARGETS = {KEY: 2, SECOND: 3}
STAGED, COMMIT, ABORT = (
    stage((0, 2), (1, 3)),
    resolve(commit=True),
    resolve(commit=False),
)


def judged():
    judge = PositionJudge()
    judge.ask(OP, TARGETS)
    return judge


def take(judge, record, effect, key, *, position=None, head=7):
    detail = None if position is None else {"position": position}
    found = transition(effect, offset=1, key=key, detail=detail, record=record)
    folded = Folded(0, None, found, None, 0, moved=False)
    judge.take(folded._replace(head=head))


def locked():
    judge = judged()
    for key, position in TARGETS.items():
        take(judge, STAGED, "staged", key, position=position)
    return judge


def test_a_commit_moves_all_keys():
    judge = locked()
    for key, position in TARGETS.items():
        take(judge, COMMIT, "position_set", key, position=position)
    asked = judge.operations[OP]
    assert (asked.moved, asked.locked, asked.kept) == (
        {KEY: 7, SECOND: 7},
        set(),
        set(),
    )


def test_an_abort_moves_no_key():
    judge = locked()
    for key in TARGETS:
        take(judge, ABORT, "unlocked", key, position=9)
    assert judge.operations[OP].kept == set(TARGETS)


def test_an_operation_that_moves_only_some_keys_is_a_violation():
    judge = locked()
    take(judge, COMMIT, "position_set", KEY, position=2)
    with pytest.raises(Violation, match="S8: 'op' moved") as caught:
        take(judge, ABORT, "unlocked", SECOND)
    assert caught.value.invariant == "S8"


def test_a_commit_without_all_keys_locked_is_a_violation():
    judge = judged()
    take(judge, STAGED, "staged", KEY, position=2)
    with pytest.raises(Violation, match="S8"):
        take(judge, COMMIT, "position_set", KEY, position=2)


@pytest.mark.parametrize("record", [STAGED, decide(), COMMIT, ABORT])
def test_an_operation_with_lost_records_may_move_only_some_keys(record):
    judge = locked()
    judge.on_lost(record)
    take(judge, COMMIT, "position_set", KEY, position=2)
    take(judge, ABORT, "unlocked", SECOND)


def test_lost_records_of_other_operations_excuse_no_violation():
    judge = locked()
    for record in (beat(1), resolve(commit=True, op=b"another".ljust(16, b"."))):
        judge.on_lost(record)
    take(judge, COMMIT, "position_set", KEY, position=2)
    with pytest.raises(Violation, match="S8"):
        take(judge, ABORT, "unlocked", SECOND)


@pytest.mark.parametrize(
    ("record", "effect"), [(STAGED, "staged"), (COMMIT, "position_set")]
)
def test_a_position_other_than_requested_is_a_violation(record, effect):
    with pytest.raises(Violation, match=r"8\.3"):
        take(locked(), record, effect, KEY, position=3)


def test_a_repeated_request_keeps_the_locked_keys():
    judge = locked()
    judge.ask(OP, {})
    assert judge.operations[OP].locked == set(TARGETS)


def test_unrequested_and_unrelated_records_are_not_judged():
    judge = PositionJudge()
    take(judge, STAGED, "staged", KEY, position=5)
    judge = judged()
    take(judge, beat(1), "renewed", KEY, position=5)
    take(judge, decide(), "decided", None)
    take(judge, STAGED, None, KEY)
    assert judge.operations[OP].locked == set()


def test_locks_and_unfinished_commits_are_unresolved():
    world = WorldState(0)
    assert unresolved_in([world]) == []
    world.locked["g", OP] = {KEY: None}
    verdict = Verdict(OP, b"", 1, 1, is_resolved=False)
    world.groups = {"g": GroupState(verdict=verdict), "h": GroupState()}
    assert unresolved_in([world]) == ["locks of 'op'", "commit of 'op'"]
    assert name_of(b"\xff..".hex()) == "\ufffd"
