"""Delta debugging keeps only the faults that cause a failure."""

import pytest

from simulator.plan import draw
from simulator.shrink import shrink

PLAN = draw(2, faults=("crash",), duration_ms=10**7)
NUMBERS = [fault.number for fault in PLAN.faults]


def numbers(plan):
    return {fault.number for fault in plan.faults}


@pytest.mark.parametrize(
    "culprits",
    [
        pytest.param({NUMBERS[0]}, id="the-first"),
        pytest.param({NUMBERS[-1]}, id="the-last"),
        pytest.param({NUMBERS[3], NUMBERS[17], NUMBERS[-2]}, id="three"),
        pytest.param(set(), id="none"),
    ],
)
def test_only_faults_that_cause_the_failure_remain(culprits):
    assert len(NUMBERS) > 20
    assert numbers(shrink(PLAN, lambda plan: culprits <= numbers(plan))) == culprits


def test_shrinking_stops_after_its_limit_of_runs():
    runs = []

    def fails(plan):
        runs.append(plan)
        return set(NUMBERS[:-1]) <= numbers(plan)

    assert set(NUMBERS[:-1]) <= numbers(shrink(PLAN, fails, runs_max=5))
    assert len(runs) <= 6
