"""Virtual clocks, seeded randomness and inline background work."""

import pytest

from kafka_marshal.errors import InvalidTransition
from simulator.clock import InlineBackground, SeededEntropy, VirtualClock


def test_a_virtual_clock_advances_only_on_request():
    clock = VirtualClock(now_ms=10, wall_ms=1_000)
    assert (clock.now_ms(), clock.wall_ms()) == (10, 1_000)
    clock.advance(5)
    assert (clock.now_ms(), clock.wall_ms()) == (15, 1_005)
    clock.advance(0)
    with pytest.raises(AssertionError):
        clock.advance(-1)
    clock.step_wall(-500)
    assert (clock.now_ms(), clock.wall_ms()) == (15, 505)


@pytest.mark.parametrize(
    ("drift_ppm", "gained"), [(0, 0), (1_000, 60), (-1_000, -60), (1, 0), (-1, -1)]
)
def test_a_view_of_the_clock_has_its_own_drift_and_offsets(drift_ppm, gained):
    clock = VirtualClock(now_ms=1_000, wall_ms=50_000)
    view = clock.view(drift_ppm=drift_ppm, offset_ms=7, wall_offset_ms=-3)
    assert (view.now_ms(), view.wall_ms()) == (1_007, 49_997)
    clock.advance(60_000)
    assert view.now_ms() == 61_007 + gained
    assert view.wall_ms() == 109_997


def test_equal_seeds_draw_equal_values():
    one, two, other = SeededEntropy(1), SeededEntropy(1), SeededEntropy(2)
    assert one.random_bytes(8) == two.random_bytes(8) != other.random_bytes(8)
    assert [one.below(9) for _ in range(20)] == [two.below(9) for _ in range(20)]
    assert one.below(0) == one.below(-3) == one.below(1) == 0


def test_inline_work_runs_at_once():
    background = InlineBackground()
    assert background.submit(lambda: 7).result(timeout=0) == 7
    failed = background.submit(lambda: 1 // 0)
    assert isinstance(failed.exception(timeout=0), ZeroDivisionError)


def test_held_work_runs_on_request():
    background = InlineBackground(is_held=True)
    futures = [background.submit(lambda n=n: n) for n in range(3)]
    assert background.waiting_count == 3
    assert not any(future.done() for future in futures)
    assert background.run_waiting(count=1) == 1
    assert [future.done() for future in futures] == [True, False, False]
    assert background.run_waiting() == 2
    assert [future.result(timeout=0) for future in futures] == [0, 1, 2]


def test_a_closed_background_refuses_work():
    background = InlineBackground(is_held=True)
    waiting = background.submit(int)
    background.close(0)
    background.close(0)
    for future in (waiting, background.submit(int)):
        assert isinstance(future.exception(timeout=0), InvalidTransition)
