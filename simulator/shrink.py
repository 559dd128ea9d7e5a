"""Finds few faults of a failed run that break the same rule (delta debugging)."""

import itertools
from collections.abc import Callable, Sequence

from simulator.plan import Plan

RUNS_MAX = 300

Fails = Callable[[Plan], bool]


def shrink(plan: Plan, fails: Fails, *, runs_max: int = RUNS_MAX) -> Plan:
    """Return a plan with faults left out that still fails.

    No single remaining fault can be left out, unless the runs were used up.
    See Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input".

    Args:
        plan: A plan that fails.
        fails: Runs a plan and returns whether it breaks the same rule.
        runs_max: Maximum number of runs.
    """
    kept = [fault.number for fault in plan.faults]
    chunks, runs = 2, 0
    if kept and fails(plan.keeping(())):
        return plan.keeping(())
    while len(kept) > 1 and runs < runs_max:
        for part in _parts(kept, chunks):
            rest = [number for number in kept if number not in part]
            runs += 1
            if fails(plan.keeping(rest)):
                kept, chunks = rest, max(2, chunks - 1)
                break
            if runs >= runs_max:
                break
        else:
            if chunks >= len(kept):
                break
            chunks = min(len(kept), 2 * chunks)
    return plan.keeping(kept)


def _parts(numbers: Sequence[int], count: int) -> list[set[int]]:
    """Split into ``count`` parts of about the same size, without empty parts."""
    count = min(count, len(numbers))
    ends = [len(numbers) * at // count for at in range(count + 1)]
    return [set(numbers[first:end]) for first, end in itertools.pairwise(ends)]
