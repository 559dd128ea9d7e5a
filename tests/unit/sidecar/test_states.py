import itertools
import logging
import threading

import pytest

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.sidecar.states import CHANGES_MAX, NEXT, Change, State, States
from kafka_marshal.testing.clock import VirtualClock

S = State
# Written out once more, on purpose: the table of the code is what is tested.
LEGAL = {
    (S.NOT_RUNNING, S.STARTING),
    (S.STARTING, S.RECOVERY),
    (S.STARTING, S.SHUTTING_DOWN),
    (S.RECOVERY, S.RUNNING),
    (S.RECOVERY, S.SHUTTING_DOWN),
    (S.RUNNING, S.PENDING_CONTROLLED_SHUTDOWN),
    (S.RUNNING, S.SHUTTING_DOWN),
    (S.PENDING_CONTROLLED_SHUTDOWN, S.SHUTTING_DOWN),
    (S.SHUTTING_DOWN, S.NOT_RUNNING),
}
PATHS = {
    S.NOT_RUNNING: (),
    S.STARTING: (S.STARTING,),
    S.RECOVERY: (S.STARTING, S.RECOVERY),
    S.RUNNING: (S.STARTING, S.RECOVERY, S.RUNNING),
    S.PENDING_CONTROLLED_SHUTDOWN: (
        *(S.STARTING, S.RECOVERY, S.RUNNING),
        S.PENDING_CONTROLLED_SHUTDOWN,
    ),
    S.SHUTTING_DOWN: (S.STARTING, S.SHUTTING_DOWN),
}


@pytest.fixture
def clock():
    return VirtualClock()


def states_in(state, clock):
    states = States(clock)
    for step in PATHS[state]:
        states.move(step, reason="on the way")
    assert states.state is state
    return states


@pytest.mark.parametrize(
    ("before", "after"),
    list(itertools.product(State, State)),
    ids=lambda state: state.value,
)
def test_every_state_with_every_input(before, after, clock):
    states = states_in(before, clock)
    told = []
    states.on_change(told.append)
    reason, since_ms = states.reason, states.since_ms
    clock.advance(7)
    if (before, after) in LEGAL:
        change = states.move(after, reason="asked to")
        assert change == Change(before, after, "asked to", clock.now_ms())
        assert (states.state, states.reason) == (after, "asked to")
        assert states.since_ms == clock.now_ms()
        assert told == [change]
    else:
        with pytest.raises(InvalidTransition) as failed:
            states.move(after, reason="asked to")
        assert before.value in str(failed.value)
        assert after.value in str(failed.value)
        assert "asked to" in str(failed.value)
        assert (states.state, states.reason) == (before, reason)
        assert states.since_ms == since_ms
        assert told == []


def test_the_names_are_those_of_kafka():
    assert [state.value for state in State] == [
        "NOT_RUNNING",
        "STARTING",
        "RECOVERY",
        "RUNNING",
        "PENDING_CONTROLLED_SHUTDOWN",
        "SHUTTING_DOWN",
    ]
    assert {(a, b) for a, after in NEXT.items() for b in after} == LEGAL


def test_a_reason_can_be_renewed_without_a_change(clock):
    states = states_in(S.RECOVERY, clock)
    told = []
    states.on_change(told.append)
    states.explain("9 of 10 partitions read")
    assert states.reason == "9 of 10 partitions read"
    assert told == []


def test_observers_hear_every_change_in_order_until_removed(clock):
    states, first, second = States(clock), [], []
    remove = states.on_change(lambda change: first.append(change.after))
    states.on_change(lambda change: second.append(change.after))
    states.move(S.STARTING, reason="-")
    remove()
    remove()
    states.move(S.RECOVERY, reason="-")
    assert first == [S.STARTING]
    assert second == [S.STARTING, S.RECOVERY]


def test_an_observer_may_change_the_state_and_order_is_kept(clock):
    states, told = States(clock), []

    def go_on(change):
        if change.after is S.STARTING:
            states.move(S.RECOVERY, reason="from an observer")

    states.on_change(go_on)
    states.on_change(lambda change: told.append(change.after))
    states.move(S.STARTING, reason="-")
    assert told == [S.STARTING, S.RECOVERY]


def test_an_observer_that_raises_stops_nobody(clock, caplog):
    states, told = States(clock), []

    def fail(change):
        raise OSError("no room")

    states.on_change(fail)
    states.on_change(told.append)
    with caplog.at_level(logging.ERROR):
        states.move(S.STARTING, reason="-")
        states.move(S.RECOVERY, reason="-")
    assert [change.after for change in told] == [S.STARTING, S.RECOVERY]
    assert "no room" in caplog.text


def test_history_is_bounded_and_ordered(clock):
    states = States(clock)
    for _ in range(CHANGES_MAX):
        for step in (S.STARTING, S.SHUTTING_DOWN, S.NOT_RUNNING):
            states.move(step, reason="again")
    assert len(states.history) == CHANGES_MAX
    assert states.history[-1].after is S.NOT_RUNNING
    for earlier, later in itertools.pairwise(states.history):
        assert earlier.after is later.before


def test_waiting_ends_with_the_state_or_the_deadline(clock):
    states = States(clock)
    assert states.wait_for(S.NOT_RUNNING, timeout_ms=0)
    assert not states.wait_for(S.RUNNING, S.SHUTTING_DOWN, timeout_ms=1)
    found = []
    waiter = threading.Thread(
        target=lambda: found.append(
            states.wait_for(S.RUNNING, S.STARTING, timeout_ms=60_000)
        )
    )
    waiter.start()
    states.move(S.STARTING, reason="-")
    waiter.join(60)
    assert found == [True]
