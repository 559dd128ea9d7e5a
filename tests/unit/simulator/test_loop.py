"""The loop runs calls in the order of virtual time."""

from simulator.clock import VirtualClock
from simulator.loop import Loop


def nothing():
    pass


def test_calls_run_in_order_of_time_and_then_of_scheduling():
    loop, seen = Loop(VirtualClock()), []
    for at_ms, name in [(20, "c"), (10, "a"), (10, "b"), (99, "never")]:
        loop.at(at_ms, lambda at_ms=at_ms, name=name: seen.append((name, at_ms)))
    assert loop.run(50, after=nothing) is None
    assert seen == [("a", 10), ("b", 10), ("c", 20)]
    assert loop.clock.now_ms() == 50


def test_a_call_scheduled_in_the_past_runs_at_once():
    loop, seen = Loop(VirtualClock(now_ms=100)), []
    loop.at(130, lambda: loop.at(5, lambda: seen.append(loop.clock.now_ms())))
    loop.run(50, after=nothing)
    assert seen == [130]


def test_the_loop_ends_as_soon_as_its_condition_holds():
    loop, afters = Loop(VirtualClock()), []
    for at_ms in (10, 20, 30):
        loop.at(at_ms, nothing)
    took_ms = loop.run(
        100, after=lambda: afters.append(1), is_done=lambda: len(afters) == 2
    )
    assert (took_ms, loop.clock.now_ms()) == (20, 20)
