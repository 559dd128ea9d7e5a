"""How a set position ends, as the home of its group shows (PROTOCOL 8.4, 8.5)."""

import pytest

from kafka_marshal.protocol.items import Pause, Verdict
from kafka_marshal.protocol.resolving import (
    ABORTED,
    COMMITTED,
    UNDECIDED,
    PositionOperation,
    decided_at,
    home_of,
    in_order,
    left_to_resolve,
    may_be_decided,
    outcome_of,
    unresolved,
)
from kafka_marshal.protocol.state import GroupState, WorldState
from kafka_marshal.protocol.types import Key

OP, OTHER_OP = b"o" * 16, b"p" * 16
OPERATION = PositionOperation("g", OP)
HOME = 1
UNTIL_MS = 5_000


def verdict(op_id=OP, *, is_resolved=False):
    return Verdict(op_id, b"d" * 16, 2, 77, is_resolved=is_resolved)


def paused(op_id=OP):
    return Pause(
        op_id=op_id,
        client_id="admin",
        incarnation=b"i" * 16,
        seq=1,
        incarnations=(b"i" * 16,),
        until_ms=UNTIL_MS,
    )


def world(partition=HOME, *, locks=(), is_known=True, **group):
    state = WorldState(partition)
    if is_known:
        state.groups["g"] = GroupState(**group)
    for op_id in locks:
        state.locked["g", op_id] = {Key("g", "t", partition): None}
    return state


OVER = ((9, OP),)


@pytest.mark.parametrize(
    ("home", "outcome", "at"),
    [
        (world(is_known=False), UNDECIDED, None),
        (world(pause=paused()), UNDECIDED, None),
        (world(over=OVER), ABORTED, None),
        (world(over=OVER, verdict=verdict(OTHER_OP)), ABORTED, None),
        (world(verdict=verdict(OTHER_OP)), UNDECIDED, None),
        (world(pause=paused(), verdict=verdict()), COMMITTED, 77),
        (world(over=OVER, verdict=verdict()), COMMITTED, 77),
        (world(over=OVER, verdict=verdict(is_resolved=True)), COMMITTED, 77),
    ],
)
def test_the_home_shows_the_outcome_of_a_set_position(home, outcome, at):
    assert outcome_of(home, OPERATION) == outcome
    assert decided_at(home, OPERATION) == at


def test_a_commit_reaches_the_home_last_and_an_abort_first():
    assert in_order(COMMITTED, home=1, partitions=range(3)) == ((0, 2), (1,))
    assert in_order(ABORTED, home=1, partitions=range(3)) == ((1,), (0, 2))
    assert in_order(UNDECIDED, home=1, partitions=range(3)) == ((1,), (0, 2))


def test_operations_with_locks_or_an_unresolved_verdict_are_unresolved():
    worlds = [
        world(0, locks=(OP,)),
        world(1, verdict=verdict(OTHER_OP)),
        world(2, verdict=verdict(is_resolved=True)),
    ]
    assert unresolved(worlds) == {OPERATION, PositionOperation("g", OTHER_OP)}
    assert unresolved([world()]) == frozenset()


@pytest.mark.parametrize(
    ("home", "elapsed_ms", "expected"),
    [
        (world(pause=paused()), 0, True),
        (world(pause=paused()), UNTIL_MS - 1, True),
        (world(pause=paused()), UNTIL_MS, False),
        (world(pause=paused(OTHER_OP)), 0, False),
        (world(pause=paused(), verdict=verdict()), 0, False),
        (world(), 0, False),
        (world(is_known=False), 0, False),
    ],
)
def test_the_admin_may_decide_while_its_pause_lasts_at_home(home, elapsed_ms, expected):
    assert may_be_decided(home, OPERATION, elapsed_ms=elapsed_ms) is expected


def left(*worlds):
    return tuple(left_to_resolve(dict(enumerate(worlds)), OPERATION, home=HOME))


def test_an_undecided_operation_is_aborted_at_home_alone():
    other = world(0, locks=(OP,))
    assert left(other, world(pause=paused())) == (HOME,)
    assert left(other, world()) == (HOME,)
    assert left(other, world(is_known=False)) == (HOME,)


def test_an_abort_reaches_partitions_with_its_locks_or_its_pause():
    home = world(over=OVER, locks=(OP,))
    others = world(0, locks=(OP,)), world(2, pause=paused())
    assert left(others[0], home, others[1]) == (HOME,)
    home = world(over=OVER)
    assert left(others[0], home, others[1]) == (0, 2)
    clean = world(0, pause=paused(OTHER_OP)), world(2, is_known=False)
    assert left(clean[0], home, clean[1]) == ()


def test_a_commit_reaches_the_home_after_all_other_partitions():
    home = world(verdict=verdict(), locks=(OP,))
    assert left(world(0, locks=(OP,)), home, world(2, locks=(OP,))) == (0, 2)
    assert left(world(0), home, world(2, locks=(OP,))) == (2,)
    assert left(world(0), home, world(2)) == (HOME,)
    home = world(verdict=verdict())
    assert left(world(0), home, world(2, locks=(OTHER_OP,))) == (HOME,)
    home = world(verdict=verdict(is_resolved=True))
    assert left(world(0), home, world(2)) == ()
    assert left(world(0, locks=(OP,)), home, world(2)) == (0,)


@pytest.mark.parametrize("is_resolved", [False, True])
def test_an_earlier_home_shows_a_commit_whose_resolution_was_lost(is_resolved):
    """The home has moved since the commit, and a log has lost a ResolvePosition."""
    home = world(0, is_known=False)
    before = world(3, over=OVER, verdict=verdict(is_resolved=is_resolved))
    worlds = {0: home, 1: world(1, over=OVER), 3: before}
    assert home_of(worlds, OPERATION, home=0) == 3
    assert home_of({0: home, 1: worlds[1]}, OPERATION, home=0) == 0
    other = PositionOperation("g", OTHER_OP)
    assert home_of(worlds, other, home=0) == 0
