"""A bounded slice of the simulation: many seeds, and broken variants to catch.

Look for trouble with other seeds by: SIMULATION_SEEDS=1000:1200 pytest tests/simulation
"""

import os

import pytest
import variants

from kafka_marshal.engine import Delivery
from kafka_marshal.testing.simulation.campaign import Wish, run_seeds, shrunk
from kafka_marshal.testing.simulation.coverage import TRUNCATED
from kafka_marshal.testing.simulation.plan import MINUTE_MS, draw
from kafka_marshal.testing.simulator import (
    FAULTS,
    TRUNCATE,
    SimulationFailed,
    run_plan,
    simulate,
)

FIRST, _, LAST = os.environ.get("SIMULATION_SEEDS", "0:500").partition(":")
SEEDS = range(int(FIRST), int(LAST))
JOBS = int(os.environ.get("SIMULATION_JOBS", "1"))
AMO = Delivery.AT_MOST_ONCE
ALO = Delivery.AT_LEAST_ONCE

# Seeds that found a fault of the product once.
REGRESSIONS: list[int] = []


@pytest.mark.slow
def test_every_invariant_holds_and_every_situation_is_reached():
    summary = run_seeds(SEEDS, Wish(), jobs=JOBS)
    assert summary.broken == []
    assert not summary.is_suite or summary.never == ()


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_was_broken_once_holds(seed):
    assert simulate(seed).claims > 0


@pytest.mark.slow
def test_logs_that_lose_what_was_read():
    summary = run_seeds(range(8), Wish(faults=(TRUNCATE, "crash", "stop")), jobs=JOBS)
    assert summary.broken == []
    assert all(summary.seen[name] for name in TRUNCATED)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_seed_repeats_byte_for_byte(seed):
    first, second = (simulate(seed, duration_ms=3 * MINUTE_MS) for _ in range(2))
    assert first == second
    assert len(first.transcript) > 100


def test_seeds_differ_and_every_fault_is_drawn():
    plans = [draw(seed) for seed in range(40)]
    assert len({plan.faults for plan in plans}) == 40
    assert {kind for plan in plans for kind in plan.kinds} == set(FAULTS)
    struck = {fault.kind for plan in plans for fault in plan.faults}
    assert struck == set(FAULTS) - {"drift"}


# What is planted, the world and the seed that show it, and by what it is caught.
VARIANTS = [
    pytest.param(variants.any_beat_owns, 0, {}, {"S1"}, id="no-epoch-check"),
]


def failure_of(seed, options):
    with pytest.raises(SimulationFailed) as caught:
        simulate(seed, **options)
    return caught.value


@pytest.mark.parametrize(("plant", "seed", "options", "invariants"), VARIANTS)
def test_a_broken_variant_is_caught(monkeypatch, plant, seed, options, invariants):
    simulate(seed, **options)
    plant(monkeypatch)
    failure = failure_of(seed, options)
    assert failure.invariant in invariants
    assert f"marshal sim --seed {seed}" in str(failure)
    assert failure_of(seed, options).transcript == failure.transcript


def test_a_failure_shrinks_to_few_faults(monkeypatch):
    variants.sender_judges(monkeypatch)
    failure = failure_of(0, {})
    small = shrunk(failure)
    assert len(small.faults) < len(failure.plan.faults)
    with pytest.raises(SimulationFailed) as again:
        run_plan(small)
    assert again.value.invariant == failure.invariant
